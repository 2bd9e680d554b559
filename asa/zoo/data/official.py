"""Description of the official data sets: files, sizes, origins, statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "test"]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """A file to download. ``size`` is in bytes; ``urls`` are in the order in which they are tried; ``source`` is that
    of the checksum."""

    file: str
    urls: tuple[str, ...]
    size: int
    sha256: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Official:
    """One official data set.

    Attributes:
        files: for each split its files, each with the official number of images.
        label_bytes: number of bytes before an image in CIFAR's records, of which the last is the class; 0 if labels
            have their own file.
        mean, std: those of the official training images per channel, scaled to 0..1.
        flips: whether a mirrored image still has its class.
    """

    name: str
    title: str
    num_classes: int
    shape: tuple[int, int, int]
    folder: str
    files: dict[Split, tuple[tuple[str, int], ...]]
    label_bytes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    flips: bool
    origins: tuple[Origin, ...]

    @property
    def archive(self) -> str:
        """The tar archive that contains the files; empty if they are separate."""
        return self.origins[0].file if self.label_bytes else ""


_TORONTO = "https://www.cs.toronto.edu/~kriz/"
_CATALOG = "tensorflow/datasets, tensorflow_datasets/url_checksums/"


def _cifar(file: str, size: int, sha256: str, catalog: str) -> tuple[Origin, ...]:
    return (Origin(file=file, urls=(_TORONTO + file,), size=size, sha256=sha256, source=_CATALOG + catalog),)


def _mnist(file: str, size: int, sha256: str) -> Origin:
    # The authors' address (yann.lecun.com) no longer serves the files; these mirrors have the same bytes.
    mirrors = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
    urls = tuple(m + file for m in mirrors)
    return Origin(file=file, urls=urls, size=size, sha256=sha256, source=_CATALOG + "mnist.txt")


CIFAR100 = Official(
    name="cifar100",
    title="CIFAR-100",
    num_classes=100,
    shape=(3, 32, 32),
    folder="cifar-100-binary",
    files={"train": (("train.bin", 50_000),), "test": (("test.bin", 10_000),)},
    label_bytes=2,
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
    flips=True,
    origins=_cifar(
        "cifar-100-binary.tar.gz",
        168_513_733,
        "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
        "cifar100.txt",
    ),
)

CIFAR10 = Official(
    name="cifar10",
    title="CIFAR-10",
    num_classes=10,
    shape=(3, 32, 32),
    folder="cifar-10-batches-bin",
    files={
        "train": tuple((f"data_batch_{i}.bin", 10_000) for i in range(1, 6)),
        "test": (("test_batch.bin", 10_000),),
    },
    label_bytes=1,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    flips=True,
    origins=_cifar(
        "cifar-10-binary.tar.gz",
        170_052_171,
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        "cifar10.txt",
    ),
)

MNIST = Official(
    name="mnist",
    title="MNIST",
    num_classes=10,
    shape=(1, 28, 28),
    folder="mnist",
    files={
        "train": (("train-images-idx3-ubyte", 60_000), ("train-labels-idx1-ubyte", 60_000)),
        "test": (("t10k-images-idx3-ubyte", 10_000), ("t10k-labels-idx1-ubyte", 10_000)),
    },
    label_bytes=0,
    mean=(0.1307,),
    std=(0.3081,),
    flips=False,
    origins=(
        _mnist(
            "train-images-idx3-ubyte.gz",
            9_912_422,
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        ),
        _mnist(
            "train-labels-idx1-ubyte.gz", 28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"
        ),
        _mnist(
            "t10k-images-idx3-ubyte.gz", 1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"
        ),
        _mnist("t10k-labels-idx1-ubyte.gz", 4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    ),
)

OFFICIAL: dict[str, Official] = {o.name: o for o in (CIFAR100, CIFAR10, MNIST)}
