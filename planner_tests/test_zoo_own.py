"""Data of the user's own: read as they are, split once, refused in one line where they cannot be used."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import json
import lzma
import os
import ssl
import sys
from dataclasses import replace
from email.message import Message
from pathlib import Path
from types import ModuleType, SimpleNamespace
from urllib.error import HTTPError, URLError

import psutil
import pytest
import torch
from PIL import Image
from refusals import refused

from asa.errors import AsaError, InvalidInputError, UnavailableError, UsageError
from asa.zoo import hub, specs
from asa.zoo.data import fetch, open_split, own, readers

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
    with pytest.raises(InvalidInputError, match=r"red/0.png is not a readable image"):
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
        ("a,label\n1,0\n2\n", "line 3 has 1 columns, not 2"),
        ("a,label\n1,0\nnan,1\n", "has nan in row 2"),
        ("a,label\n1,0\n2,\n", "row 2 has no class in column 'label'"),
        ("a,label\n1,0\n2,1\n3,nan\n", "row 3 has no class in column 'label'"),
        ("a,label\n1,x\n2,NULL\n3,y\n", "row 2 has no class in column 'label'"),
        ("a,label\n", "has 1 rows"),
        ("a,label\n1,0\n2,1\n", "2 to train on and 0 to test on; give 5 or more, a fifth is for testing"),
        ("a\n1\n", "has one column, 'a'"),
        ("a;label\n1;0\n2;1\n", "commas separate columns"),
        ("a,a,label\n1,2,0\n2,3,1\n", "2 columns called 'a'"),
        ("a,caf\udce9\n1,0\n2,1\n", "is not UTF-8 text"),
    ],
)
def test_a_table_that_cannot_be_used(tmp_path, text, words):
    (tmp_path / "t.csv").write_text(text, errors="surrogateescape")
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


def test_a_table_of_text(tmp_path):
    Path("t.csv").write_text("text,label\n" + "".join(f"{w} day {i},{w}\n" for i in range(10) for w in ("bad", "good")))
    train = opened("csv:t.csv", shape=(2, 4, 8))
    assert (train.num_classes, train.images.shape, train.images.dtype) == (2, (16, 2, 4, 8), torch.float32)
    day = {tuple(x[:, 2].flatten().tolist()) for x in train.images}
    assert len(day) == 1, "one word is one row, wherever it comes"
    assert train.images[:, :, 0].abs().sum() == 0, "three words end in the last row of four"
    tokens = opened("csv:t.csv", shape=(6,))
    words = {bytes(x.tolist()).rstrip(b"\0").decode() for x in tokens.images}
    assert words == {"bad da", "good d"}
    x, y = fetch(tokens, torch.tensor([0]), train=True, seed=0, epoch=0, device="cpu")
    assert torch.equal(x, tokens.images[:1])
    assert y.shape == (1,)
    table(Path("n.csv"))
    with pytest.raises(
        UsageError, match="gives 2 numbers, the model reads 6 tokens; plan it for such data: --input 1x1x2"
    ):
        opened("csv:n.csv", shape=(6,))


def test_arrow_files_and_streams(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="pyarrow reads Arrow")
    made = pa.table({"a": [float(i) for i in range(20)], "label": [i % 3 for i in range(20)]})
    for name, new in (("f.arrow", pa.ipc.new_file), ("s.arrow", pa.ipc.new_stream)):
        with new(name, made.schema) as writer:
            writer.write_table(made)
        assert len(opened(f"arrow:{name}", shape=(1, 1, 1))) == 16
    Path("bad.arrow").write_text("no table")
    with pytest.raises(InvalidInputError, match=r"arrow:bad\.arrow"):
        opened("arrow:bad.arrow")


def coco(folder: Path, segmentations, split: str = "train", side: int = 8, **changes) -> None:
    """One image for each of ``segmentations``, of category 7, the second of two."""
    (folder / "annotations").mkdir(parents=True, exist_ok=True)
    (folder / f"{split}2017").mkdir()
    ids = range(1, len(segmentations) + 1)
    for i in ids:
        Image.new("RGB", (side, side), (i, 0, 0)).save(folder / f"{split}2017" / f"{i}.png")
    document = {
        "images": [{"id": i, "file_name": f"{i}.png", "width": side, "height": side} for i in ids],
        "categories": [{"id": 7, "name": "cat"}, {"id": 3, "name": "dog"}],
        "annotations": [{"image_id": i, "category_id": 7, "segmentation": s} for i, s in zip(ids, segmentations)],  # noqa: B905
    }
    (folder / "annotations" / f"instances_{split}2017.json").write_text(json.dumps(document | changes))


RLE = {"size": [8, 8], "counts": [16, 8, 40]}
"""The third column."""


def test_masks_in_the_format_of_coco():
    square = [[0, 0, 3, 0, 3, 3, 0, 3]]
    coco(Path("here"), [square, RLE, {"size": [8, 8], "counts": "`08X1"}])
    coco(Path("here"), [square], "val")
    train, test = opened("coco:here"), opened("coco:here", "test")
    assert (train.num_classes, len(train), len(test)) == (3, 3, 1)
    assert train.labels.unique().tolist() == [0, 2], "the categories go by their ids"
    assert torch.equal(train.labels[0].nonzero(), torch.cartesian_prod(torch.arange(4), torch.arange(4)))
    for coded in train.labels[1:]:
        assert torch.equal(coded[0].nonzero().flatten(), torch.tensor([2]))
        assert (coded == coded[0]).all()
    larger = opened("coco:here", shape=(3, 16, 16))
    assert torch.equal(larger.labels[0].nonzero().max(0).values, torch.tensor([7, 7]))


@pytest.mark.parametrize(
    ("segmentation", "changes", "words"),
    [
        ([[0, 0, 1]], {}, "neither polygons nor a run-length code"),
        ({"size": [8, 8], "counts": [5]}, {}, "a mask of 5 pixels in an image of 8x8"),
        (RLE, {"categories": []}, "an annotation of category 7, which it does not list"),
        (RLE, {"images": []}, "names no images"),
        (RLE, {"annotations": 5}, "not in COCO's format"),
        (RLE, {"annotations": []}, "has no annotations"),
    ],
)
def test_annotations_that_cannot_be_used(segmentation, changes, words):
    coco(Path("here"), [segmentation] * 6, **changes)
    with pytest.raises(InvalidInputError, match=words):
        opened("coco:here")
    Path("here/annotations/instances_train2017.json").unlink()
    with pytest.raises(InvalidInputError, match="one file of annotations to train on is needed, found: none"):
        opened("coco:here")


def test_the_class_of_a_pixel_goes_where_the_pixel_goes():
    train = opened("shapes", shape=(1, 8, 8))
    told = replace(train, images=train.labels[:, None].to(torch.uint8), mean=(0.0,), std=(1 / 255,))
    for epoch in range(3):
        x, y = fetch(told, torch.arange(40), train=True, seed=0, epoch=epoch, device="cpu")
        assert torch.equal(x[:, 0].round().long(), y)
        assert not torch.equal(y, train.labels[:40]), "they are moved at all"


@pytest.mark.parametrize(("name", "shape"), [("shapes", (3, 16, 12)), ("sentiment", (1, 8, 64)), ("sentiment", (40,))])
def test_tasks_of_the_package_are_the_same_everywhere_and_their_parts_differ(name, shape):
    train, again, test = opened(name, shape=shape), opened(name, shape=shape), opened(name, "test", shape=shape)
    assert torch.equal(train.images, again.images)
    assert train.images.shape[1:] == test.images.shape[1:] == shape
    assert int(train.labels.max()) == train.num_classes - 1
    seen = {x.numpy().tobytes() for x in train.images}
    new = sum(x.numpy().tobytes() not in seen for x in test.images)
    assert new > len(test) / 2
    shares = train.labels.flatten().bincount() / train.labels.numel()
    assert shares.min() > 0.02


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
    asked: list[bool] = []
    monkeypatch.setattr(readers, "reachable", lambda: asked.append(True) or True)
    assert (len(opened("hf:mine")), len(opened("hf:mine", "test"))) == (6, 2)
    with pytest.raises(UnavailableError, match="hf:other: division by zero"):
        opened("hf:other")
    assert asked == [True, True]
    monkeypatch.setattr(readers, "reachable", lambda: False)
    with pytest.raises(
        UnavailableError, match="hf:third: it is no folder, not stored on this machine, and the hub does"
    ):
        opened("hf:third")
    Path("there").mkdir()
    fake.load_dataset = lambda name: {"train": Part(6)}  # type: ignore[attr-defined]
    monkeypatch.setattr(readers, "reachable", lambda: 1 / 0)
    assert len(opened("hf:there")) == 5, "a folder needs no hub"
    fake.load_dataset = lambda name: 1 / 0  # type: ignore[attr-defined]  which refuses what save_to_disk wrote
    for file, saved in (("state.json", Part(5)), ("dataset_dict.json", {"train": Part(4), "test": Part(2)})):
        Path(file[:5]).mkdir()
        (Path(file[:5]) / file).touch()
        fake.load_from_disk = lambda name, saved=saved: saved  # type: ignore[attr-defined]
        tested = 2 if isinstance(saved, dict) else 1
        assert [len(opened(f"hf:{file[:5]}", s)) for s in ("train", "test")] == [4, tested]


@pytest.mark.parametrize(("failure", "answers"), [
    (URLError(OSError("no route")), False), (TimeoutError(), False), (HTTPError("", 503, "", Message(), None), True),
    (URLError(ssl.SSLError("who is it")), True), (None, True),
])  # fmt: skip
def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch, failure, answers):
    asked = []

    def request(*_, **__):
        asked.append(True)
        if failure is not None:
            raise failure
        return contextlib.nullcontext()

    constants = SimpleNamespace(HF_HUB_OFFLINE=False, ENDPOINT="https://hub.invalid")
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(constants=constants))
    monkeypatch.setattr(hub, "urlopen", request)
    for name in ("HF_HUB_OFFLINE", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "")
    assert [hub.reachable(), hub.reachable()] == [answers] * 2
    assert constants.HF_HUB_OFFLINE is not answers, "the library is told"
    assert os.environ["HF_HUB_OFFLINE"] == ("" if answers else "1"), "and so are the ranks"
    assert len(asked) == (2 if answers else 1)


TEXTS = [f"{('bad', 'good')[i % 2]} day {i}" for i in range(20)]


@pytest.mark.parametrize("kind", ["csv", "parquet", "arrow"])
def test_what_a_table_has_and_what_a_model_takes_must_agree(kind):
    def written(name: str, columns: dict[str, list]) -> str:
        columns = columns | {"label": [i % 2 for i in range(20)]}
        if kind == "csv":
            rows = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
            Path(name).write_text("\n".join(rows))
        else:
            pa = pytest.importorskip("pyarrow", reason="pyarrow reads columnar tables")
            pq = pytest.importorskip("pyarrow.parquet")
            table = pa.table(columns)
            if kind == "parquet":
                pq.write_table(table, name)
            else:
                with pa.ipc.new_file(name, table.schema) as writer:
                    writer.write_table(table)
        return f"{kind}:{name}"

    numbers = {name: [float(i) for i in range(20)] for name in "abcd"}
    for columns in ({"text": TEXTS}, {"text": TEXTS} | numbers, {"a": numbers["a"], "review": TEXTS}):
        with pytest.raises(UsageError, match=r"column '(text|review)' is text, the model takes 4 numbers; .*--input"):
            opened(written("t", columns), shape=(1, 1, 4))
    found = opened(written("t", {"text": TEXTS} | numbers), shape=(1, 16, 64))
    assert "not read: a, b, c, d" in found.source
    named = written("n", {"a": numbers["a"], "content": numbers["b"], "image": numbers["c"], "text": numbers["d"]})
    assert opened(named, shape=(1, 1, 4)).images.shape == (16, 1, 1, 4), "numbers are numbers whatever they are called"
    with pytest.raises(
        UsageError, match="gives 4 numbers, the model reads 16 tokens; plan it for such data: --input 1x1x4"
    ):
        opened(named, shape=(16,))
    with pytest.raises(UsageError, match=r"gives 4 numbers, the model takes samples of 1x16x64; .*--input 1x1x4"):
        opened(named, shape=(1, 16, 64))
    with pytest.raises(InvalidInputError, match=r"column 'body' has 'bad day 0' in row 1, .* call it 'text'"):
        opened(written("b", {"body": TEXTS}), shape=(1, 16, 64))
    if kind != "csv":
        with pytest.raises(InvalidInputError, match="column 'text' has None in row 1, not text"):
            opened(written("m", {"text": [None, *TEXTS[1:]]}), shape=(1, 16, 64))


def test_other_data_than_a_model_takes_are_refused_too(tmp_path, module):
    with pytest.raises(UsageError, match="--data sentiment is text, the model takes 4 numbers"):
        opened("sentiment", shape=(1, 1, 4))
    pictures(tmp_path / "here", {"red": (250, 0, 0), "blue": (0, 0, 250)})
    for shape, takes in (((1, 1, 4), "4 numbers"), ((16,), "text of 16 tokens")):
        with pytest.raises(
            UsageError, match=f"0.png is an image, the model takes {takes}; profile it with --input 3x8x8"
        ):
            opened("folder:here", shape=shape)
    with pytest.raises(UsageError, match="gives images of 3x8x8, the model takes 4 numbers"):
        opened(f"{module}:maps", shape=(1, 1, 4))
    with pytest.raises(UsageError, match="gives 4 tokens, the model takes 4 numbers; give float32 for numbers"):
        opened(f"{module}:tokens", shape=(1, 1, 4))
    assert opened(f"{module}:tokens", shape=(4,)).images.dtype == torch.int64


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
def halves():
    return [(torch.zeros(2), 0.5)] * 9
def words():
    return [(torch.zeros(2), "cat")] * 9
def endless():
    return TensorDataset(X / 0, Y)
def imaginary():
    return TensorDataset(X.to(torch.complex64), Y)
def none_loaded():
    return DataLoader([], batch_size=4)
def uneven_loaded():
    return DataLoader([(torch.zeros(n), 0) for n in range(2, 6)])
def tokens():
    return TensorDataset(torch.arange(80).view(20, 4), Y)
def onehot():
    return TensorDataset(X, torch.eye(4)[Y])
def last():
    return TensorDataset(torch.zeros(20, 8, 8, 3, dtype=torch.uint8), Y)
class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.zeros(1, 1, 2), 0
def stream():
    return Endless()
class Longer(Endless):
    def __len__(self):
        return 30
def longer():
    return Longer()
def stream_loaded():
    return DataLoader(Endless(), batch_size=4)
def loose():
    return DataLoader(TensorDataset(X, Y), batch_size=None)
def columns():
    return TensorDataset(X, Y[:, None])
def channel():
    return TensorDataset(torch.zeros(10, 3, 8, 8, dtype=torch.uint8), torch.arange(640).view(10, 1, 8, 8) % 3)
def rare():
    return TensorDataset(X, Y), TensorDataset(X[:2], torch.tensor([0, 9]))
def maps():
    return [(torch.zeros(3, 8, 8, dtype=torch.uint8), torch.eye(8)) for _ in range(10)]
def named():
    return [{"pixel_values": x, "labels": int(y)} for x, y in zip(X, Y)]
def named_loaded():
    return DataLoader(named(), batch_size=6)
def masked():
    return [{"input": x, "mask": x, "label": y} for x, y in zip(X, Y)]
def bytes_in_rows():
    return [(torch.full((8,), i, dtype=torch.uint8), i % 2) for i in range(20)]
def unnamed():
    return [{"input": x, "kind": y} for x, y in zip(X, Y)]
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "own_data_here.py").write_text(FACTORIES)
    monkeypatch.delitem(sys.modules, "own_data_here", raising=False)
    return "own_data_here"


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_table_that_does_not_exist_is_said_to_be_missing(kind):
    with pytest.raises(InvalidInputError, match=r"there is no none\.file"):
        opened(f"{kind}:none.file", "train", None)


@pytest.mark.parametrize("shape", [None, (1, 1, 8)])
def test_rows_of_bytes_are_no_images_to_be_shifted(module, shape):
    with pytest.raises(UsageError, match="gives 8 numbers of uint8, which is for images"):
        opened(f"{module}:bytes_in_rows", "train", shape)
    assert opened(f"{module}:bytes_in_rows", "train", (1, 2, 4)).shape == (1, 2, 4)


@pytest.mark.parametrize(
    ("name", "sizes", "added"),
    [
        ("mapped", (16, 4), 0),
        ("two", (20, 3), 0),
        ("streamed", (16, 4), 0),
        ("loaded", (16, 4), 1),
        ("named", (16, 4), 0),
        ("named_loaded", (16, 4), 0),
    ],
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
        ("masked", r"has the names input, mask, label; give a pair .input, class., or one input beside 'label'"),
        ("unnamed", "has the names input, kind; give a pair"),
        ("failing", "RuntimeError: no disk"),
        ("nothing", "returned '7', not a dataset"),
        ("halves", "classes are whole numbers from 0, not"),
        ("words", "a class is 'cat', not a tensor or number"),
        ("endless", "not finite real numbers"),
        ("imaginary", "not finite real numbers"),
        ("none_loaded", "has no samples"),
        ("uneven_loaded", "different shapes"),
        ("nosuch", "data 'own_data_here:nosuch': own_data_here has no 'nosuch'"),
    ],
)
def test_a_function_that_returns_no_data(module, name, words):
    with pytest.raises(AsaError, match=words):
        opened(f"{module}:{name}", shape=(1, 1, 2))


@pytest.mark.parametrize("name", ["stream", "stream_loaded"])
@pytest.mark.parametrize(("bound", "most"), [("_MOST_SAMPLES", 1000), ("_MOST_BYTES", 8000)])
def test_data_that_may_never_end_are_read_up_to_a_bound(module, monkeypatch, name, bound, most):
    monkeypatch.setattr(own, bound, most)
    said = r"has not ended after \d+ samples, .* GiB, .* as itertools.islice\(samples, \d+\) does"
    with pytest.raises(InvalidInputError, match=said):
        opened(f"{module}:{name}", shape=(1, 1, 2))
    assert len(opened(f"{module}:mapped", shape=(1, 1, 2))) == 16
    with pytest.raises(InvalidInputError, match="its __len__ is 30, but it goes on; let it end there"):
        opened(f"{module}:longer", shape=(1, 1, 2))


def test_what_is_not_there_is_said_before_torch_is_asked(tmp_path, monkeypatch, capsys):
    for spec, words in (("folder:none", "no folder none"), ("csv:none.csv", "no file none.csv")):
        assert words in refused(capsys, 3, "train", "--data", spec)
    assert "did you mean cifar100" in refused(capsys, 2, "train", "--data", "cifar1000")
    assert "is none of folder:DIR" in refused(capsys, 2, "train", "--data", "foo/bar:x")
    monkeypatch.setattr(specs.importlib.util, "find_spec", lambda _: None)
    assert "pip install 'datasets'" in refused(capsys, 5, "train", "--data", "hf:mnist")


def test_a_label_that_is_not_a_number_in_parquet_is_no_class(tmp_path, monkeypatch):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.chdir(tmp_path)
    parquet.write_table(arrow.table({"a": [1.0, 2.0, 3.0], "label": [0.0, float("nan"), 1.0]}), "n.parquet")
    with pytest.raises(InvalidInputError, match="row 2 has no class in column 'label'"):
        opened("parquet:n.parquet", shape=(1, 1, 1))


@pytest.mark.parametrize(
    ("text", "shape", "words"),
    [
        ("0.5,1,0\n" * 9, (1, 1, 2), "begins with numbers .*; its first line must name the columns"),
        ("a,label\n" + "1,4\n" * 9, (1, 1, 1), "all 8 samples to train on are of class 4; 2 classes are needed"),
        ("a,label\n" + "1,-1\n1,0\n1,1\n" * 9, (1, 1, 1), "'label' has class -1; classes are numbered from 0"),
        ("a,label\n" + "1,0\n1,99999999999999999999\n" * 9, (1, 1, 1), "up to 9999999999999999... in 18 rows"),
        ("a,price\n" + "1,1000\n2,350000\n" * 9, (1, 1, 1), "up to 350000 in 18 rows; .*call the column of classes"),
        (
            "a,label\n" + "".join(f"1,{i}.5\n" for i in range(9)),
            (1, 1, 1),
            "to learn a quantity, divide it into classes",
        ),
        ("a,label\n" + "1e400,0\n1,1\n" * 9, (1, 1, 1), "'a' has inf in row 1"),
        ("a,label\n" + "1e300,0\n-1e300,1\n" * 9, (1, 1, 1), "numbers of 1e[+]300 are too large to be scaled"),
        (",label\n" + "1,0\n2,1\n" * 9, (1, 1, 1), "no column of inputs besides the classes in 'label'"),
        ("text,label\n" + ",0\n ,1\n" * 9, (1, 4, 8), "column 'text' is empty in every row"),
        ("a,label\n1,0\n\n\n2\n", (1, 1, 1), "line 5 has 1 columns, not 2"),
    ],
)
def test_tables_whose_values_no_model_can_learn(text, shape, words):
    Path("t.csv").write_text(text)
    with pytest.raises(AsaError, match=words):
        opened("csv:t.csv", shape=shape)


def test_columns_are_found_by_their_names_and_row_numbers_are_no_inputs():
    rows = "".join(f"{i},{('cat', 'dog')[i // 10]},{i * i},{i % 3}\n" for i in range(20))
    Path("t.csv").write_text(f",Label,a,b\n{rows}")
    found = opened("csv:t.csv", shape=(1, 1, 2))
    assert "2 columns (a, b) of csv:t.csv, classes in 'Label' (cat, dog); not read: a column without" in found.source
    Path("t.csv").write_text("Review,Sentiment\n" + "".join(f"{t},{i % 2}\n" for i, t in enumerate(TEXTS)))
    assert opened("csv:t.csv", shape=(1, 4, 8)).images.shape[1:] == (1, 4, 8)


def test_a_column_of_large_numbers_keeps_their_differences():
    Path("t.csv").write_text("a,b,label\n" + "".join(f"{1_700_000_000 + i},123456789012,{i % 2}\n" for i in range(40)))
    found = opened("csv:t.csv", shape=(1, 1, 2))
    assert len(found.images[:, 0, 0, 0].unique()) == 32, "as many as rows, which float32 would join"
    assert found.images[:, 0, 0, 1].abs().max() == 0, "a constant says nothing"


def test_what_is_cut_off_a_text_is_named():
    Path("t.csv").write_text(
        "text,label\n" + "".join(f"{'word ' * (30000 * (i % 2) + 1)},{i % 2}\n" for i in range(20))
    )
    assert (
        "10 of 20 texts are longer than 4 words, of which the last are read"
        in opened("csv:t.csv", shape=(1, 4, 8)).source
    )
    assert (
        "10 of 20 texts are longer than 6 bytes, of which the first are read" in opened("csv:t.csv", shape=(6,)).source
    )


def test_classes_that_are_whole_numbers_stay_however_they_are_written():
    Path("t.csv").write_text("a,label\n" + "".join(f"{i},{i % 12}.0\n" for i in range(60)))
    order = own.permutation(own.key(60, own._SALT), 60)[12:]
    assert torch.equal(opened("csv:t.csv", shape=(1, 1, 1)).labels, order % 12), "10.0 does not come before 2.0"


def test_what_is_done_to_images_and_what_is_not_read_is_named(tmp_path):
    pictures(tmp_path / "here", {"red": (250, 0, 0), "blue": (0, 0, 250)})
    (tmp_path / "here" / "red" / "notes.txt").write_text("no image")
    source = opened("folder:here").source
    assert "(blue, red), resized from 5 sizes (8x8 to 8x12) to 8x8; not read: red/notes.txt" in source
    assert "colours weighted to grey" in opened("folder:here", shape=(1, 8, 8)).source
    with pytest.raises(UsageError, match="has 3 channels, the model takes 4; profile it with --input 3x8x8"):
        opened("folder:here", shape=(4, 8, 8))


@pytest.mark.parametrize(
    ("folders", "words"),
    [
        ({"train/a": 5, "train/b": 5, "val/a": 2, "val/c": 2}, "val has the class c, which here/train has not"),
        ({"train/a": 5, "train/b": 5, "test/": 2}, "test has no folder of a class .a, b.; sort its images"),
        ({"a": 5, "b": 5, "test/a": 2}, "has a folder test and none called train"),
        ({"a": 5}, ": 1; 2 are needed"),
    ],
)
def test_folders_whose_parts_do_not_fit(folders, words):
    for name, count in folders.items():
        home = Path("here", name)
        home.mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (8, 8)).save(home / f"{i}.png")
    with pytest.raises(InvalidInputError, match=words):
        opened("folder:here")


def test_images_of_16_bits_are_scaled_and_others_refused(tmp_path):
    pictures(tmp_path / "here", {"a": (1, 1, 1), "b": (2, 2, 2)})
    Image.fromarray((torch.arange(64).view(8, 8) * 1000).to(torch.uint16).numpy()).save("here/a/0.png")
    found, other = opened("folder:here"), opened("folder:here", "test")
    brightest = max(int(x.max()) for s in (found, other) for x in s.images)
    assert brightest == 63_000 >> 8, "not cut off at 255"
    assert "grey repeated over 3 channels" in found.source
    Image.fromarray(torch.rand(8, 8).numpy()).save("here/a/0.tiff")
    (tmp_path / "here" / "a" / "0.png").unlink()
    with pytest.raises(InvalidInputError, match=r"0\.tiff is not a readable image: its pixels are floating numbers"):
        opened("folder:here")


def test_annotations_of_coco_are_chosen_checked_and_counted():
    square = [[0, 0, 3, 0, 3, 3, 0, 3]]
    coco(Path("here"), [square] * 6)
    for name in ("captions_train2017", "person_keypoints_train2017"):
        Path(f"here/annotations/{name}.json").write_text("{}")
    path = Path("here/annotations/instances_train2017.json")
    document = json.loads(path.read_text())
    del document["annotations"][2:]
    path.write_text(json.dumps(document))
    assert "4 of 6 images without an object" in opened("coco:here").source
    document["images"][3] |= {"width": 10**6, "height": 10**6}
    path.write_text(json.dumps(document))
    with pytest.raises(
        InvalidInputError, match=r"4\.png has 8x8 pixels, instances_train2017\.json says 1000000x1000000"
    ):
        opened("coco:here")
    for broken in (float("inf"), float("nan")):
        document["annotations"][0]["segmentation"] = [[0, 0, broken, 0, 3, 3]]
        document["images"][3] |= {"width": 8, "height": 8}
        path.write_text(json.dumps(document))
        with pytest.raises(InvalidInputError, match="a coordinate is not a finite number"):
            opened("coco:here")
    path.write_text("[" * 100_000)
    with pytest.raises(InvalidInputError, match="not in COCO's format"):
        opened("coco:here")


def test_parts_of_the_hub_are_numbered_alike_and_unlabelled_ones_not_read(monkeypatch):
    class Part(dict):
        column_names = ("a", "label")

    def part(labels):
        return Part(a=[float(i) for i in range(len(labels))], label=labels)

    fake = ModuleType("datasets")
    parts = {"train": part(["x", "y", "z"] * 4), "test": part([-1] * 4), "validation": part(["z", "y"])}
    fake.load_dataset = lambda name: parts  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    monkeypatch.setattr(readers, "reachable", lambda: True)
    train, test = (opened("hf:mine", s, (1, 1, 1)) for s in ("train", "test"))
    assert (train.labels.tolist(), test.labels.tolist()) == ([0, 1, 2] * 4, [2, 1])
    assert "not read: test" in train.source


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("onehot", (1, 1, 2), "classes of a sample have shape 4; give one number, .* not a one-hot vector"),
        ("last", (3, 8, 8), "with channels last; give .C, H, W."),
        ("stream", (1, 1, 2), "samples take .* bytes and 1000 are free, too few for a copy"),
        ("stream_loaded", (1, 1, 2), "samples take .* bytes and 1000 are free, too few for a copy"),
        ("loose", (1, 1, 2), "a batch of the loader has no dimension of samples"),
    ],
)
def test_functions_whose_samples_no_model_can_take(module, monkeypatch, name, shape, words):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    monkeypatch.setattr(own, "_LOOKS", 10_000)
    with pytest.raises(AsaError, match=words):
        opened(f"{module}:{name}", shape=shape)


def test_classes_may_have_dimensions_of_one_and_classes_only_tested_are_named(module):
    assert opened(f"{module}:columns", shape=(1, 1, 2)).labels.shape == (16,)
    assert opened(f"{module}:channel").labels.shape == (8, 8, 8)
    assert "classes that are only tested: 9" in opened(f"{module}:rare", shape=(1, 1, 2)).source


def test_a_hash_of_samples_tells_other_samples():
    one = opened("digits", shape=(1, 8, 8))
    other = replace(one, labels=one.labels.roll(1))
    assert one.digest() == opened("digits", shape=(1, 8, 8)).digest()
    assert one.digest() != other.digest()


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_a_compressed_table_is_called_compressed(tmp_path, pack):
    (tmp_path / "t.csv").write_bytes(pack(bytes(range(256)) * 4))
    with pytest.raises(InvalidInputError, match="is compressed; unpack it first"):
        opened("csv:t.csv", shape=(1, 1, 1))


def test_data_that_have_changed_are_read_again(tmp_path, monkeypatch):
    """As in a notebook, where one process reads them before and after."""

    def table(rows: int) -> None:
        Path("t.csv").write_text("a,label\n" + "".join(f"{i},{i % 2}\n" for i in range(rows)))

    table(20)
    before = opened("csv:t.csv", shape=(1, 1, 1))
    assert opened("csv:t.csv", shape=(1, 1, 1)).images is before.images, "what has not changed is not"
    table(40)
    assert [len(opened("csv:t.csv", split, (1, 1, 1))) for split in ("train", "test")] == [32, 8]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    table(10)
    assert len(opened("csv:t.csv", shape=(1, 1, 1))) == 8
    pictures(tmp_path / "here", {"red": (250, 0, 0), "blue": (0, 0, 250)})
    assert len(opened(f"folder:{tmp_path / 'here'}")) == 8
    Image.new("RGB", (8, 8)).save(tmp_path / "here" / "red" / "more.png")
    assert len(opened(f"folder:{tmp_path / 'here'}")) == 9
