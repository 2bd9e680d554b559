"""The embedded default and the digits: the same everywhere, learnable, read by the reader of the real files."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch.nn.functional import cross_entropy

from asa.errors import UsageError
from asa.reading import user_cache
from asa.zoo import models
from asa.zoo.data import GlobalOrder, ImageSet, cache, cifar, fetch, open_split
from asa.zoo.data.official import CIFAR100
from asa.zoo.data.stand_in import RECIPES, VERSION, generate


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_cache(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "folder", lambda: shared)


def digest(images: ImageSet) -> str:
    return hashlib.sha256(images.images.numpy().tobytes() + images.labels.numpy().tobytes()).hexdigest()[:16]


GOLDEN = {
    ("cifar100", "train"): "f02eb2d7172722e2",
    ("cifar100", "test"): "e4acc7321e14c605",
    ("cifar10", "train"): "454b981cb38c0eb8",
    ("mnist", "test"): "00679236f5c83fa8",
}


@pytest.mark.parametrize(("name", "split"), sorted(GOLDEN))
def test_the_made_up_images_never_change_unnoticed(name: str, split: str) -> None:
    """Where this fails on purpose, raise stand_in.VERSION: results on different images do not compare."""
    assert VERSION == 1
    assert digest(open_split(name, split=split, root=None)) == GOLDEN[name, split]  # type: ignore[arg-type]


def test_it_is_written_in_cifars_format_and_read_by_the_same_reader(shared: Path) -> None:
    found = open_split("cifar100", split="train", root=None)
    file = shared / f"stand-in-{VERSION}" / "cifar-100-binary" / "train.bin"
    assert file.stat().st_size == 5000 * 3074
    images, labels = cifar.decode(file.read_bytes(), CIFAR100, source="x", official_count=50_000)
    assert torch.equal(images, found.images)
    assert torch.equal(labels, found.labels)
    assert "no --data-root was given" in found.source
    assert "say nothing about CIFAR-100" in found.source
    as_root = open_split("cifar100", split="train", root=shared / f"stand-in-{VERSION}")
    assert digest(as_root) == digest(found)
    by_name = open_split("synthetic", split="train", root=None)
    assert digest(by_name) == digest(found)
    assert "asked for by name" in by_name.source


def test_classes_are_equally_frequent_and_splits_share_no_image() -> None:
    train, test = (open_split("cifar100", split=s, root=None) for s in ("train", "test"))  # type: ignore[arg-type]
    assert torch.bincount(train.labels).tolist() == [50] * 100
    assert torch.bincount(test.labels).tolist() == [10] * 100
    rows = {bytes(i.flatten().tolist()) for i in train.images[:300]}
    assert len(rows) == 300
    assert not rows & {bytes(i.flatten().tolist()) for i in test.images[:300]}
    assert train.mean == test.mean
    pixels = train.images.double() / 255
    torch.testing.assert_close(torch.tensor(train.std).double(), pixels.std(dim=(0, 2, 3)), rtol=1e-6, atol=0)


def test_a_damaged_cache_is_made_anew(shared: Path) -> None:
    before = digest(open_split("mnist", split="test", root=None))
    folder = shared / f"stand-in-{VERSION}" / "mnist"
    victim = folder / "t10k-images-idx3-ubyte"
    whole = victim.read_bytes()
    for harm in (whole[:-1], whole[:100] + bytes([whole[100] ^ 1]) + whole[101:], b""):
        victim.write_bytes(harm)
        assert digest(open_split("mnist", split="test", root=None)) == before
        assert victim.read_bytes() == whole
    (folder / "SHA256SUMS").unlink()
    assert digest(open_split("mnist", split="test", root=None)) == before
    assert sorted(p.name for p in folder.iterdir() if p.name.startswith(".")) == []


def test_an_unwritable_cache_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest(open_split("mnist", split="test", root=None))
    blocked = tmp_path / "file"
    blocked.touch()
    spare = tmp_path / "tmp"
    spare.mkdir()
    monkeypatch.setattr(cache, "folder", lambda: blocked / "below")
    monkeypatch.setattr("tempfile.tempdir", str(spare))
    assert digest(open_split("mnist", split="test", root=None)) == before
    assert list(spare.iterdir()) == []


def test_a_cache_that_cannot_be_entered_or_has_no_place_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = digest(open_split("mnist", split="test", root=None))

    def stat(path: Path, **options: bool) -> os.stat_result:
        if "official" in path.parts:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return os.stat(path, **options)

    with monkeypatch.context() as patch:  # as of a home that belongs to another user
        patch.setattr(Path, "stat", stat)
        patch.setattr(cache, "folder", lambda: tmp_path)
        assert digest(open_split("mnist", split="test", root=None)) == before
    for home in (RuntimeError("no home"), Path("~/.cache/asa")):  # newer and older versions of platformdirs
        monkeypatch.setattr("platformdirs.user_cache_path", Mock(side_effect=[home]))
        assert user_cache() == Path("/dev/null/asa")
    monkeypatch.setattr(cache, "folder", lambda: Path("/dev/null/asa/datasets"))
    assert digest(open_split("mnist", split="test", root=None)) == before


def accuracy(name: str, epochs: int, lr: float, model: str) -> float:
    """Test accuracy of ``model`` after ``epochs`` of plain SGD."""
    train, test = (open_split(name, split=s, root=None) for s in ("train", "test"))  # type: ignore[arg-type]
    net = models.build(model, num_classes=train.num_classes, input_shape=train.shape)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    order = GlobalOrder(len(train), 64, seed=0)
    for epoch in range(epochs):
        for step in range(order.steps_per_epoch):
            x, y = fetch(train, order.batch(epoch, step), train=True, seed=0, epoch=epoch, device="cpu")
            optimizer.zero_grad()
            cross_entropy(net(x), y).backward()
            optimizer.step()
    net.eval()
    with torch.no_grad():
        x, y = fetch(test, torch.arange(len(test)), train=False, seed=0, epoch=0, device="cpu")
        return float((net(x).argmax(1) == y).double().mean())


def test_it_can_be_learned_but_not_at_once() -> None:
    # 100 classes: chance is 1 %.
    assert 0.2 < accuracy("cifar100", 1, 0.01, "logistic") < 0.8


def test_the_digits_can_be_learned() -> None:
    assert accuracy("digits", 4, 0.05, "cnn") > 0.8


def test_the_digits_are_split_once_and_converted() -> None:
    train, test = (open_split("digits", split=s, root=None) for s in ("train", "test"))  # type: ignore[arg-type]
    assert (len(train), len(test), train.shape, train.flips) == (1437, 360, (1, 8, 8), False)
    assert int(train.images.max()) == 255
    assert test.labels.bincount().min() > 20
    shades = (torch.cat([train.images, test.images]).flatten(1).double() * 16 / 255).round().to(torch.uint8)
    # What scikit-learn 1.9's load_digits().data has, in whatever order, and its target.
    rows = b"".join(sorted(map(bytes, shades.numpy())))
    assert hashlib.sha256(rows).hexdigest() == "d34fb8ecae8dd76408eb4241f93dd5e31df5a84fe18291efd0ee1ae70b2122aa"
    labels = torch.cat([train.labels, test.labels]).bincount().tolist()
    assert labels == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    large = open_split("digits", split="test", root=None, input_shape=(3, 32, 32))
    assert large.images.shape == (360, 3, 32, 32)
    assert torch.equal(large.images[:, 0], large.images[:, 2])
    assert "grey repeated over 3 channels, resized from 8x8 to 32x32" in large.source
    # Enlarging keeps the digit: its mean brightness stays.
    torch.testing.assert_close(
        large.images[:, :1].double().mean((1, 2, 3)), test.images.double().mean((1, 2, 3)), rtol=0, atol=6.0
    )


def test_every_recipe_names_an_official_set_of_its_shape() -> None:
    from asa.zoo.data.official import OFFICIAL

    assert RECIPES.keys() == OFFICIAL.keys()
    for name, recipe in RECIPES.items():
        assert (recipe.channels, recipe.side, recipe.side) == OFFICIAL[name].shape
        assert recipe.num_classes == OFFICIAL[name].num_classes


def test_generation_does_not_touch_the_generators() -> None:
    before = torch.get_rng_state()
    generate(RECIPES["mnist"])
    assert torch.equal(before, torch.get_rng_state())


def test_impossible_shapes_are_usage_errors() -> None:
    with pytest.raises(UsageError):
        open_split("digits", split="test", root=None, input_shape=(1, 0, 8))
