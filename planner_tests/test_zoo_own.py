"""Data of the user's own: read as they are, split once, refused in one line where they cannot be used."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from PIL import Image
from refusals import refused

from asa.errors import AsaError, InvalidInputError, UnavailableError, UsageError
from asa.zoo import specs
from asa.zoo.data import fetch, open_split, own

SHAPE = (3, 8, 8)


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    own._both.cache_clear()
    monkeypatch.chdir(tmp_path)


def opened(spec, split="train", shape=SHAPE):
    return open_split(spec, split=split, root=None, input_shape=shape)


def pictures(folder: Path, classes: dict[str, tuple[int, int, int]], count: int = 5, side: int = 8) -> None:
    for name, colour in classes.items():
        (folder / name).mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (side + i, side), colour).save(folder / name / f"{i}.png")


def test_a_folder_of_images_by_class(tmp_path):
    pictures(tmp_path / "here", {"red": (250, 0, 0), "blue": (0, 0, 250)})
    train, test = opened("folder:here"), opened("folder:here", "test")
    assert (train.num_classes, train.shape, len(train), len(test)) == (2, SHAPE, 8, 2)
    for images in (train, test):
        for image, label in zip(images.images, images.labels, strict=True):
            assert image[2 if label == 0 else 0].min() == 250, "blue comes before red"
    grey = opened("folder:here", shape=(1, 8, 8))
    assert grey.images.shape[1:] == (1, 8, 8)
    (tmp_path / "here" / "red" / "0.png").write_text("no image")
    own._both.cache_clear()
    with pytest.raises(InvalidInputError, match=r"red/0.png is no image"):
        opened("folder:here")


def test_a_folder_that_says_what_to_test_on(tmp_path):
    pictures(tmp_path / "here" / "train", {"a": (1, 1, 1), "b": (2, 2, 2)}, 3)
    pictures(tmp_path / "here" / "val", {"b": (9, 9, 9)}, 2)
    assert len(opened("folder:here")) == 6
    test = opened("folder:here", "test")
    assert test.labels.tolist() == [1, 1]
    assert int(test.images.max()) == 9


def table(path: Path, rows: int = 50, label: str = "label") -> None:
    lines = [f"a,{label},b"] + [f"{i},{('cat', 'dog')[i % 2]},{10 * i}" for i in range(rows)]
    path.write_text("\n".join(lines))


def test_a_table_is_scaled_by_what_is_trained_on(tmp_path):
    table(tmp_path / "t.csv")
    train, test = (opened("csv:t.csv", s, (1, 1, 2)) for s in ("train", "test"))
    assert (len(train), len(test), train.num_classes, train.images.dtype) == (40, 10, 2, torch.float32)
    torch.testing.assert_close(train.images.mean(dim=0), torch.zeros(1, 1, 2), atol=1e-5, rtol=0)
    torch.testing.assert_close(train.images.std(dim=0, unbiased=False), torch.ones(1, 1, 2))
    x, y = fetch(train, torch.tensor([3, 1]), train=True, seed=0, epoch=1, device="cpu")
    assert torch.equal(x, train.images[[3, 1]]), "numbers are neither mirrored nor scaled to 0..1"
    assert torch.equal(y, train.labels[[3, 1]])
    torch.testing.assert_close(train.images[:, 0, 0, 0], train.images[:, 0, 0, 1])
    with pytest.raises(UsageError, match="profile it with --input 1x1x2"):
        opened("csv:t.csv", shape=SHAPE)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,label\n1,0\nx,1\n", "column 'a' has 'x' in row 2, not a number"),
        ("a,label\n1,0\n2\n", "row 3 has 1 columns, not 2"),
        ("a,label\n1,0\nnan,1\n", "has nan in row 2"),
        ("a,label\n1,0\n2,\n", "a row without a class"),
        ("a,label\n", "has 1 rows"),
        ("a\n1\n", "has 1 columns"),
    ],
)
def test_a_table_that_cannot_be_used(tmp_path, text, words):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(AsaError, match=words):
        opened("csv:t.csv", shape=(1, 1, 1))


def test_parquet_of_numbers_and_of_images(tmp_path):
    pq, pa = pytest.importorskip("pyarrow.parquet", reason="pyarrow reads Parquet"), pytest.importorskip("pyarrow")
    pq.write_table(pa.table({"a": [float(i) for i in range(20)], "label": [i % 3 for i in range(20)]}), "t.parquet")
    found = opened("parquet:t.parquet", shape=(1, 1, 1))
    assert (found.num_classes, len(found)) == (3, 16)
    Image.new("RGB", (8, 8), (7, 0, 0)).save("one.png")
    cell = {"bytes": Path("one.png").read_bytes(), "path": None}
    pq.write_table(pa.table({"image": [cell] * 10, "label": list(range(10))}), "i.parquet")
    assert int(opened("parquet:i.parquet").images[:, 0].min()) == 7
    Path("bad.parquet").write_text("no table")
    with pytest.raises(InvalidInputError, match=r"parquet:bad\.parquet"):
        opened("parquet:bad.parquet")


def test_a_data_set_of_the_hub(monkeypatch):
    class Part:
        column_names = ("img", "label")

        def __init__(self, count):
            self.columns = {
                "img": [Image.new("L", (8, 8), i) for i in range(count)],
                "label": [i % 2 for i in range(count)],
            }

        def __getitem__(self, name):
            return self.columns[name]

    fake = ModuleType("datasets")
    fake.load_dataset = lambda name: {"train": Part(6), "validation": Part(2)} if name == "mine" else 1 / 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert (len(opened("hf:mine")), len(opened("hf:mine", "test"))) == (6, 2)
    with pytest.raises(UnavailableError, match="hf:other: division by zero"):
        opened("hf:other")


FACTORIES = """
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
X, Y = torch.arange(40.).view(20, 1, 1, 2), torch.arange(20) % 4
def mapped():
    return TensorDataset(X, Y)
def two(input_shape):
    assert input_shape == (1, 1, 2)
    return TensorDataset(X, Y), TensorDataset(X[:3], Y[:3])
class Stream(IterableDataset):
    def __iter__(self):
        return ((x, int(y)) for x, y in zip(X, Y))
def streamed():
    return Stream()
def loaded():
    return DataLoader(TensorDataset(X, Y), batch_size=6, collate_fn=lambda rows: (
        torch.stack([x + 1 for x, _ in rows]), torch.stack([y for _, y in rows])))
def uneven():
    return [(torch.zeros(2), 0), (torch.zeros(3), 1)]
def unpaired():
    return [torch.zeros(2)]
def failing():
    raise RuntimeError("no disk")
def nothing():
    return 7
def maps():
    return [(torch.zeros(3, 8, 8, dtype=torch.uint8), torch.ones(8, 8)) for _ in range(10)]
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "own_data_here.py").write_text(FACTORIES)
    monkeypatch.delitem(sys.modules, "own_data_here", raising=False)
    return "own_data_here"


@pytest.mark.parametrize(
    ("name", "sizes", "added"),
    [("mapped", (16, 4), 0), ("two", (20, 3), 0), ("streamed", (16, 4), 0), ("loaded", (16, 4), 1)],
)
def test_any_dataset_of_a_function(module, name, sizes, added):
    train, test = (opened(f"{module}:{name}", s, (1, 1, 2)) for s in ("train", "test"))
    assert (len(train), len(test), train.num_classes) == (*sizes, 4)
    for x, y in zip(train.images, train.labels, strict=True):
        assert (int(x.flatten()[0]) - added) // 2 % 4 == int(y), "every sample keeps its class"


def test_labels_may_be_maps(module):
    found = opened(f"{module}:maps")
    assert (found.labels.shape[1:], found.num_classes, found.images.dtype) == ((8, 8), 2, torch.uint8)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("uneven", "different shapes"),
        ("unpaired", "not a pair"),
        ("failing", "RuntimeError: no disk"),
        ("nothing", "returned a int, not a dataset"),
        ("nosuch", "data 'own_data_here:nosuch': own_data_here has no 'nosuch'"),
    ],
)
def test_a_function_that_returns_no_data(module, name, words):
    with pytest.raises(AsaError, match=words):
        opened(f"{module}:{name}", shape=(1, 1, 2))


def test_what_is_not_there_is_said_before_torch_is_asked(tmp_path, monkeypatch, capsys):
    for spec, words in (("folder:none", "no folder none"), ("csv:none.csv", "no file none.csv")):
        assert words in refused(capsys, 3, "train", "--data", spec)
    assert "did you mean cifar100" in refused(capsys, 2, "train", "--data", "cifar1000")
    assert "is none of folder:DIR" in refused(capsys, 2, "train", "--data", "foo/bar:x")
    monkeypatch.setattr(specs.importlib.util, "find_spec", lambda _: None)
    assert "pip install 'datasets'" in refused(capsys, 5, "train", "--data", "hf:mnist")
