"""Official data files, written here in their formats: read back whole, refused with file and bytes when torn."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import tarfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from asa.errors import InvalidInputError, UsageError
from asa.zoo.data import cifar, idx, open_split
from asa.zoo.data.archive import read_members
from asa.zoo.data.official import CIFAR100, OFFICIAL


def random_images(count: int, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=generator)


def records(count: int, classes: int, *, coarse: bool, seed: int = 0) -> tuple[bytes, Tensor, Tensor]:
    """Written by hand, record by record, so that the reader is held to the format and not to its own writer."""
    images, labels = random_images(count, 3, 32, 32, seed=seed), torch.arange(count) % classes
    data = b""
    for image, label in zip(images, labels.tolist(), strict=True):
        data += bytes([label // 5, label] if coarse else [label]) + bytes(image.flatten().tolist())
    return data, images, labels


def cifar100(root: Path, count: int = 110) -> dict[str, tuple[bytes, Tensor, Tensor]]:
    made = {s: records(count, 100, coarse=True, seed=i) for i, s in enumerate(("train", "test"))}
    (root / "cifar-100-binary").mkdir(parents=True)
    for split, (data, _, _) in made.items():
        (root / "cifar-100-binary" / f"{split}.bin").write_bytes(data)
    return made


def tar_of(path: Path, entries: dict[str, bytes], *, extra: list[tarfile.TarInfo] | None = None) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for info in extra or []:
            tar.addfile(info, io.BytesIO(b"x" * info.size))
        for name, data in entries.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def refused(root: Path, name: str = "cifar100", split: str = "train") -> str:
    with pytest.raises(InvalidInputError) as caught:
        open_split(name, split=split, root=root)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("split", ["train", "test"])
def test_cifar100_is_read_as_its_format_says(tmp_path: Path, split: str) -> None:
    _, images, labels = cifar100(tmp_path)[split]
    for root in (tmp_path, tmp_path / "cifar-100-binary"):
        found = open_split("cifar100", split=split, root=root)  # type: ignore[arg-type]
        assert torch.equal(found.images, images)
        assert torch.equal(found.labels, labels)
        assert found.labels.dtype == torch.int64
        assert (found.num_classes, found.shape, found.flips, len(found)) == (100, (3, 32, 32), True, 110)
        assert "110 images (the official set has " in found.source
        assert str(tmp_path) in found.source


def test_cifar10_joins_its_five_batches_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    parts = [records(12, 10, coarse=False, seed=i) for i in range(6)]
    for i, name in enumerate([*(f"data_batch_{j}" for j in range(1, 6)), "test_batch"]):
        (folder / f"{name}.bin").write_bytes(parts[i][0])
    train = open_split("cifar10", split="train", root=tmp_path)
    assert torch.equal(train.images, torch.cat([p[1] for p in parts[:5]]))
    assert torch.equal(open_split("cifar10", split="test", root=tmp_path).images, parts[5][1])
    (folder / "data_batch_3.bin").write_bytes(parts[2][0][:3073])
    assert "data_batch_3.bin 1" in refused(tmp_path, "cifar10")
    (folder / "data_batch_3.bin").unlink()
    assert "lacks data_batch_3.bin" in refused(tmp_path, "cifar10")


def test_the_writer_writes_the_format() -> None:
    data, images, labels = records(20, 100, coarse=True)
    assert cifar.encode(images, labels, labels // 5) == data
    data, images, labels = records(20, 10, coarse=False)
    assert cifar.encode(images, labels) == data


def test_the_full_official_size_reads_without_a_note(tmp_path: Path) -> None:
    data, _, labels = records(100, 100, coarse=True)
    (tmp_path / "test.bin").write_bytes(data * 100)
    found = open_split("cifar100", split="test", root=tmp_path)
    assert torch.equal(found.labels, labels.repeat(100))
    assert "official set has" not in found.source


@pytest.mark.parametrize("cut", [1, 100, 3073, 110 * 3074 - 1, 110 * 3074])
def test_a_truncated_file_names_itself_and_its_bytes(tmp_path: Path, cut: int) -> None:
    data = cifar100(tmp_path)["train"][0]
    (tmp_path / "cifar-100-binary" / "train.bin").write_bytes(data[:-cut])
    text = refused(tmp_path)
    assert "train.bin" in text
    assert f"{len(data) - cut} bytes" in text
    assert "153700000" in text


def test_half_the_official_file_is_torn_not_small(tmp_path: Path) -> None:
    data, _, _ = records(100, 100, coarse=True)
    (tmp_path / "test.bin").write_bytes(data * 50)
    text = refused(tmp_path, split="test")
    assert "15370000 bytes (5000 images)" in text
    assert "30740000 (10000)" in text


@pytest.mark.parametrize(("column", "label"), [(0, 20), (1, 100), (1, 255)])
def test_a_label_out_of_range_names_record_and_byte(tmp_path: Path, column: int, label: int) -> None:
    data = bytearray(cifar100(tmp_path)["train"][0])
    data[7 * 3074 + column] = label
    (tmp_path / "cifar-100-binary" / "train.bin").write_bytes(data)
    text = refused(tmp_path)
    assert f"record 7 has label {label}" in text
    assert f"byte {7 * 3074 + column}" in text


def test_the_archive_alone_is_enough(tmp_path: Path) -> None:
    data, images, labels = records(110, 100, coarse=True)
    members = {f"cifar-100-binary/{n}": data for n in ("train.bin", "test.bin")} | {"cifar-100-binary/x.txt": b"names"}
    tar_of(tmp_path / "cifar-100-binary.tar.gz", members)
    found = open_split("cifar100", split="train", root=tmp_path)
    assert torch.equal(found.images, images)
    assert torch.equal(found.labels, labels)
    assert "cifar-100-binary.tar.gz" in found.source
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cifar-100-binary.tar.gz"]


def test_a_truncated_archive_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    data, _, _ = records(40, 100, coarse=True)
    members = {"cifar-100-binary/train.bin": data, "cifar-100-binary/test.bin": data}
    path = tar_of(tmp_path / "cifar-100-binary.tar.gz", members)
    whole = path.read_bytes()
    for keep in (0, 5, 30, len(whole) // 4, len(whole) * 3 // 4, len(whole) - 9, len(whole) - 1):
        path.write_bytes(whole[:keep])
        text = refused(tmp_path)
        assert str(path) in text
        assert "truncated" in text or "lacks" in text
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    path.write_bytes(flipped)
    assert "damaged" in refused(tmp_path)
    path.write_bytes(b"no archive at all")
    assert "damaged" in refused(tmp_path)


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, size
    return info


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (entry("../../canary", size=3), "leads outside"),
        (entry("/canary", size=3), "leads outside"),
        (entry("cifar-100-binary/../../canary", size=3), "leads outside"),
        (entry("cifar-100-binary/train.bin", tarfile.SYMTYPE, "/etc/passwd"), "not a plain file"),
        (entry("cifar-100-binary/link", tarfile.LNKTYPE, "../canary"), "not a plain file"),
        (entry("cifar-100-binary/device", tarfile.CHRTYPE), "not a plain file"),
        (entry("cifar-100-binary/pipe", tarfile.FIFOTYPE), "not a plain file"),
        (entry("cifar-100-binary/train.bin", size=3), "twice"),
    ],
)
def test_an_archive_with_a_foul_entry_is_refused_and_nothing_written(
    tmp_path: Path, bad: tarfile.TarInfo, says: str
) -> None:
    root = tmp_path / "a" / "b"
    root.mkdir(parents=True)
    data, _, _ = records(5, 100, coarse=True)
    tar_of(root / "cifar-100-binary.tar.gz", {"cifar-100-binary/train.bin": data}, extra=[bad])
    assert says in refused(root)
    assert not list(tmp_path.rglob("canary"))


def test_a_bomb_is_refused_before_it_unpacks(tmp_path: Path) -> None:
    path = tar_of(tmp_path / "bomb.tar.gz", {"big": bytes(5_000_000), "wanted": b"1"})
    with pytest.raises(InvalidInputError, match="more than 1000000 bytes"):
        read_members(path, {"wanted"}, limit=1_000_000)
    assert read_members(path, {"wanted"}, limit=6_000_000) == {"wanted": b"1"}


class Canary:
    """Unpickling this writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (Path.write_text, (self.path, "executed"))


@pytest.mark.parametrize("name", ["cifar100", "cifar10"])
def test_the_python_version_is_named_and_never_unpickled(tmp_path: Path, name: str) -> None:
    canary = tmp_path / "canary"
    bomb = pickle.dumps(Canary(canary))
    pickle.loads(bomb)
    assert canary.exists()  # the bomb is live
    canary.unlink()
    plain, packed = {
        "cifar100": ("cifar-100-python", "cifar-100-python.tar.gz"),
        "cifar10": ("cifar-10-batches-py", "cifar-10-python.tar.gz"),
    }[name]
    first, second = tmp_path / "one", tmp_path / "two"
    for file in ("train", "data_batch_1", "meta"):
        (first / plain).mkdir(parents=True, exist_ok=True)
        (first / plain / file).write_bytes(bomb)
    second.mkdir()
    tar_of(second / packed, {f"{plain}/train": bomb})
    for root in (first, second, first / plain):
        text = refused(root, name)
        assert "binary version" in text
        assert OFFICIAL[name].origins[0].urls[0] in text
    assert not canary.exists()


def mnist(root: Path, count: int = 30, *, packed: bool = False, dotted: bool = False) -> tuple[Tensor, Tensor]:
    root.mkdir(parents=True, exist_ok=True)
    images, labels = random_images(count, 28, 28), torch.arange(count) % 10
    for prefix in ("train", "t10k"):
        for kind, data in (
            ("images-idx3", struct.pack(">HBBIII", 0, 8, 3, count, 28, 28) + bytes(images.flatten().tolist())),
            ("labels-idx1", struct.pack(">HBBI", 0, 8, 1, count) + bytes(labels.tolist())),
        ):
            name = f"{prefix}-{kind.replace('-', '.') if dotted else kind}-ubyte"
            (root / (name + ".gz" * packed)).write_bytes(gzip.compress(data) if packed else data)
    return images, labels


@pytest.mark.parametrize(("folder", "packed", "dotted"), [(".", 0, 0), (".", 1, 0), ("MNIST/raw", 0, 0), (".", 0, 1)])
def test_mnist_is_read_as_its_format_says(tmp_path: Path, folder: str, packed: bool, dotted: bool) -> None:
    images, labels = mnist(tmp_path / folder, packed=packed, dotted=dotted)
    for split in ("train", "test"):
        found = open_split("mnist", split=split, root=tmp_path)  # type: ignore[arg-type]
        assert torch.equal(found.images, images[:, None])
        assert torch.equal(found.labels, labels)
        assert (found.num_classes, found.shape, found.flips) == (10, (1, 28, 28), False)
    assert idx.decode(idx.encode(images), dimensions=3, source="x").equal(images)


def test_a_bad_mnist_file_is_named_with_its_bytes(tmp_path: Path) -> None:
    mnist(tmp_path)
    images, labels = tmp_path / "train-images-idx3-ubyte", tmp_path / "train-labels-idx1-ubyte"
    good, tags = images.read_bytes(), labels.read_bytes()
    images.write_bytes(good[:-100])
    assert f"{images} is truncated: {len(good) - 100} bytes, its header asks for {len(good)}" in refused(
        tmp_path, "mnist"
    )
    images.write_bytes(good[:10])
    assert "truncated: 10 bytes" in refused(tmp_path, "mnist")
    images.write_bytes(b"\1\2\3\4" + good[4:])
    assert "begins with 01 02 03 04" in refused(tmp_path, "mnist")
    images.write_bytes(good + b"x")
    assert "too long" in refused(tmp_path, "mnist")
    images.write_bytes(good)
    labels.write_bytes(tags[:12] + b"\x0a" + tags[13:])
    assert "label 4 is 10" in refused(tmp_path, "mnist")
    labels.write_bytes(struct.pack(">HBBI", 0, 8, 1, 29) + tags[8:-1])
    assert "30 images" in refused(tmp_path, "mnist")
    labels.unlink()
    assert "lacks train-labels-idx1-ubyte(.gz)" in refused(tmp_path, "mnist")
    packed = tmp_path / "train-labels-idx1-ubyte.gz"
    packed.write_bytes(gzip.compress(tags)[:-5])
    assert f"{packed} " in refused(tmp_path, "mnist")
    packed.write_bytes(gzip.compress(tags))
    assert len(open_split("mnist", split="train", root=tmp_path)) == 30


def test_a_wrong_root_is_an_error_not_a_fallback(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "nowhere")
    assert "cifar-100-binary/train.bin or cifar-100-binary.tar.gz" in refused(tmp_path)
    assert "train-images-idx3-ubyte(.gz) and train-labels" in refused(tmp_path, "mnist")
    (tmp_path / "file").touch()
    assert "is not a directory" in refused(tmp_path / "file")
    (tmp_path / "train.bin").mkdir()
    assert "looked for" in refused(tmp_path)


def test_unknown_names_and_splits_are_usage_errors() -> None:
    with pytest.raises(UsageError, match="cifar100, cifar10, mnist, digits, synthetic"):
        open_split("imagenet", split="train", root=None)
    with pytest.raises(UsageError, match="train and test, not 'val'"):
        open_split("digits", split="val", root=None)  # type: ignore[arg-type]


def test_images_are_converted_to_the_models_input_and_it_is_said(tmp_path: Path) -> None:
    _, images, _ = cifar100(tmp_path)["train"]
    grey = open_split("cifar100", split="train", root=tmp_path, input_shape=(1, 32, 32))
    expected = (images.float() * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True).round()
    assert (grey.images.float() - expected).abs().max() <= 1
    assert "colours weighted to grey" in grey.source
    assert len(grey.mean) == len(grey.std) == 1
    large = open_split("cifar100", split="train", root=tmp_path, input_shape=(3, 48, 40))
    assert large.images.shape == (110, 3, 48, 40)
    assert large.shape == (3, 48, 40)
    assert "resized from 32x32 to 48x40" in large.source
    with pytest.raises(UsageError, match="has 3 channels, the model takes 4; try --input 3x32x32"):
        open_split("cifar100", split="train", root=tmp_path, input_shape=(4, 32, 32))
    assert CIFAR100.mean == open_split("cifar100", split="train", root=tmp_path).mean
