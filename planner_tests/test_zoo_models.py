"""Models by name: every spec leads to a model or to one line that says what to do."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tables import some
from torch import nn

from asa.errors import InvalidInputError, UnavailableError, UsageError
from asa.zoo import models

SMALL = (3, 32, 32)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Write a module into the working directory; forgotten again after the test."""
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)

    def write(name: str, text: str) -> None:
        path = tmp_path / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("import torch\nfrom torch import nn\n" + text)

    yield write
    for name in set(sys.modules) - before:
        if name.startswith("own_"):
            del sys.modules[name]


def message(error: pytest.ExceptionInfo[BaseException]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_names_are_the_classifiers_of_torchvision_and_the_plain_ones() -> None:
    names = models.names()
    assert names == sorted(names)
    for name in ("resnet50", "vit_b_16", "vgg16", "densenet121", "convnext_tiny", "swin_t", "cnn", "logistic"):
        assert name in names
    assert "fcn_resnet50" not in names
    assert "fcn_resnet50" in models.segmentation_names()


@pytest.mark.parametrize("name", ["cnn", "logistic", "resnet18", "mobilenet_v3_small", "googlenet", "regnet_x_400mf"])
def test_a_named_model_takes_its_default_input_in_both_modes(name: str) -> None:
    shape, classes = models.default_input(name)
    assert (shape, classes) == (SMALL, 100)
    model = models.build(name, num_classes=7, input_shape=shape)
    assert model.training
    assert model.eval()(torch.zeros(2, *shape)).shape == (2, 7)
    output = model.train()(torch.zeros(2, *shape))
    if name == "googlenet":
        assert output.aux_logits1.shape == output.aux_logits2.shape == (2, 7)


@pytest.mark.parametrize("name", ["lstm", "gru", "bert", "unet"])
def test_models_of_our_own_take_images_of_any_size(name: str) -> None:
    for shape in ((3, 32, 32), (1, 28, 28), (3, 9, 7)):
        model = models.build(name, num_classes=7, input_shape=shape)
        output = model(torch.randn(2, *shape))
        assert output.shape == ((2, 7, *shape[1:]) if name == "unet" else (2, 7))
        output.sum().backward()
        assert all(p.grad is not None for p in model.parameters())
    if name == "bert":
        assert model.decoder.weight is model.tokens.weight


CIFAR = ("densenet121", "efficientnet_v2_s", "convnext_tiny", "swin_v2_t", "vgg16", "vit_b_16")


@pytest.mark.parametrize("name", some(CIFAR, ("convnext_tiny", "swin_v2_t", "vgg16", "vit_b_16")))
def test_large_models_take_cifar(name: str) -> None:
    assert models._why_not(name, 100, models.default_input(name)[0]) == ""


@pytest.mark.parametrize(
    "name", some(sorted(models._LARGER_DEFAULTS), models._LARGER_DEFAULTS.keys() - {"maxvit_t", "vit_h_14"})
)
def test_models_that_need_more_than_cifars_pixels_name_the_smallest_input(name: str) -> None:
    shape, _ = models.default_input(name)
    assert models._why_not(name, 10, SMALL)
    assert models._why_not(name, 10, shape) == ""
    if name != "vit_h_14":  # 2.5 GB
        with pytest.raises(UsageError) as caught:
            models.build(name, num_classes=10, input_shape=SMALL)
        assert f"{name} cannot take inputs of 3x32x32" in message(caught)
        assert f"try --input 3x{shape[1]}x{shape[1]}" in message(caught)


def test_inception_keeps_its_auxiliary_head_where_it_fits() -> None:
    def has_head(side: int) -> bool:
        with torch.device("meta"):
            return models._torchvision("inception_v3", 10, (3, side, side)).AuxLogits is not None

    assert has_head(299)
    assert not has_head(75)
    assert models._why_not("inception_v3", 10, (3, 299, 299)) == ""


def test_a_factory_that_takes_no_classes_has_its_own(here: Callable[[str, str], None]) -> None:
    here(
        "own_heads",
        "import math\n"
        "def seven(input_shape): return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), 7))\n"
        "def told(num_classes=5): return nn.Sequential(nn.Flatten(), nn.Linear(3072, num_classes))\n",
    )
    assert models.default_input("own_heads:seven") == (SMALL, 7)
    assert models.default_input("own_heads:seven", (1, 8, 8)) == ((1, 8, 8), 7)
    assert models.default_input("own_heads:seven", classes=3) == (SMALL, 3)
    assert models.default_input("own_heads:told") == (SMALL, 100)


def test_lazy_layers_and_records_are_models_like_others(here: Callable[[str, str], None]) -> None:
    here(
        "own_kinds",
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Output:\n"
        "    logits: torch.Tensor\n"
        "class Lazy(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.first, self.norm, self.last = nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.LazyLinear(5)\n"
        "    def forward(self, x):\n"
        "        return Output(self.last(self.norm(self.first(x)).flatten(1)))\n",
    )
    assert models.default_input("own_kinds:Lazy", (1, 8, 8)) == ((1, 8, 8), 5)
    one, other = (models.build("own_kinds:Lazy", num_classes=5, input_shape=(1, 8, 8)) for _ in range(2))
    assert one.training
    assert one(torch.zeros(2, 1, 8, 8)).logits.shape == (2, 5)
    assert all(map(torch.equal, one.parameters(), other.parameters()))


def test_vit_takes_its_image_size_from_the_input() -> None:
    with torch.device("meta"):
        assert models._torchvision("vit_b_16", 10, (3, 64, 64)).image_size == 64
    with pytest.raises(UsageError, match="square inputs, not 32x48; try --input 3x32x32"):
        models.build("vit_b_16", num_classes=10, input_shape=(3, 32, 48))


def test_grey_images_reach_a_colour_network_with_the_same_response() -> None:
    grey = models.build("resnet18", num_classes=4, input_shape=(1, 32, 32), seed=3).eval()
    colour = models.build("resnet18", num_classes=4, input_shape=SMALL, seed=3).eval()
    assert grey.conv1.weight.shape == (64, 1, 7, 7)
    assert grey.conv1.in_channels == 1
    six = models.build("resnet18", num_classes=4, input_shape=(6, 32, 32), seed=3).eval()
    x = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(six(torch.cat([x, x], 1)), colour(x))


def test_segmentation_gives_a_map() -> None:
    model = models.build("lraspp_mobilenet_v3_large", num_classes=5, input_shape=SMALL).eval()
    assert model(torch.zeros(1, *SMALL))["out"].shape == (1, 5, 32, 32)


def test_weights_depend_on_the_seed_alone_and_no_generator_moves() -> None:
    def state() -> tuple[object, ...]:
        return (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())

    before = state()
    first = models.build("resnet18", num_classes=10, input_shape=SMALL, seed=1).state_dict()
    assert state() == before
    torch.rand(3)
    random.random()
    second = models.build("resnet18", num_classes=10, input_shape=SMALL, seed=1).state_dict()
    other = models.build("resnet18", num_classes=10, input_shape=SMALL, seed=2).state_dict()
    assert all(torch.equal(a, second[k]) for k, a in first.items())
    assert not torch.equal(first["conv1.weight"], other["conv1.weight"])
    # The trial passes leave no trace in BatchNorm's statistics.
    assert first["bn1.num_batches_tracked"] == 0
    assert torch.equal(first["bn1.running_mean"], torch.zeros(64))


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("resnet5", "resnet50"),
        ("ResNet-50", "did you mean resnet50"),
        ("qqqqqq", "package.module:factory"),
        ("", "package.module:factory"),
        ("own_no.such:thing", "no module 'own_no.such'"),
        ("a b:c", "not of the form"),
        ("a:", "not of the form"),
        (":a", "not of the form"),
        ("torch.nn:Lineer", "did you mean Linear"),
        ("torch:__version__", "not a function"),
    ],
)
def test_an_unknown_model_is_a_usage_error(spec: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        models.build(spec, num_classes=10, input_shape=SMALL)
    assert says in message(caught)


@pytest.mark.parametrize(("classes", "shape"), [(0, SMALL), (10, (3, 0, 32)), (10, (32, 32))])
def test_impossible_numbers_are_usage_errors(classes: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError):
        models.build("cnn", num_classes=classes, input_shape=shape)  # type: ignore[arg-type]


def test_a_factory_in_the_working_directory(here: Callable[[str, str], None], capsys: pytest.CaptureFixture) -> None:
    here(
        "own_pkg.nets",
        "from own_pkg.parts import head\nprint('hello')\n"
        "def make(num_classes=3, *, input_shape): return nn.Sequential(nn.Flatten(), head(input_shape, num_classes))\n"
        "def fixed(): return nn.Sequential(nn.Flatten(), nn.Linear(3072, 12))\n"
        "def open_ended(**options): return nn.Sequential(nn.Flatten(), nn.Linear(3072, options['num_classes']))\n"
        "class Holder:\n    make = staticmethod(make)\n",
    )
    here("own_pkg.parts", "def head(s, n): return nn.Linear(s[0] * s[1] * s[2], n)\n")
    path = list(sys.path)
    for factory in ("make", "fixed", "open_ended", "Holder.make"):
        model = models.build(f"own_pkg.nets:{factory}", num_classes=11, input_shape=SMALL)
        assert model(torch.zeros(2, *SMALL)).shape == (2, 12 if factory == "fixed" else 11)
    assert sys.path == path
    # Documents on stdout stay whole whatever a module prints.
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("def make(): raise RuntimeError('boom\\nsecond line')\n", "the factory failed with RuntimeError: boom"),
        ("def make(): raise SystemExit(0)\n", "the factory failed with SystemExit"),
        ("def make(size): return nn.Linear(size, 1)\n", "the factory failed with TypeError"),
        ("def make(): return 5\n", "returned a int, not an nn.Module"),
        ("def make(): return nn.Sequential(nn.Flatten(), nn.Linear(5, 10))\n", "fails on an input of 3x32x32"),
        ("def make(): return nn.Sequential(nn.Flatten(), nn.Linear(3072, 9))\n", "tells 9 classes apart, 10 were"),
        ("def make(): return nn.Flatten()\n", "has no parameters to train"),
        (
            "def make(): return nn.Sequential(nn.Flatten(), nn.Linear(3072, 10, device='meta'))\n",
            "1.weight of model 'own_bad:make' has no values",
        ),
        ("def make(): return nn.Conv2d(3, 1, 32)\n", "tells 1 classes apart"),
        (
            "class Net(nn.Linear):\n    def forward(self, x): return super().forward(x.flatten(1)).long()\n"
            "def make(): return Net(3072, 10)\n",
            "gives int64 values, which are no logits",
        ),
        ("import own_missing_thing\ndef make(): pass\n", "needs 'own_missing_thing', which is missing"),
        ("raise SystemExit('usage: x')\n", "failed with SystemExit: usage: x"),
        ("def make(:\n", "failed with SyntaxError"),
    ],
)
def test_a_bad_factory_is_one_line(here: Callable[[str, str], None], body: str, says: str) -> None:
    here("own_bad", body)
    with pytest.raises(InvalidInputError) as caught:
        models.build("own_bad:make", num_classes=10, input_shape=SMALL)
    assert says in message(caught)


def test_a_model_that_only_runs_for_real_is_admitted(here: Callable[[str, str], None]) -> None:
    # .item() fails on meta tensors; a real pass has the last word, and leaves no trace.
    here(
        "own_real",
        "class Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.norm = nn.BatchNorm2d(3)\n"
        "        self.lin = nn.Linear(3072, 10)\n"
        "    def forward(self, x):\n        x = self.norm(x) if x.sum().item() == 0 else x\n"
        "        return self.lin(x.flatten(1))\n"
        "def make(): return Net()\n",
    )
    model = models.build("own_real:make", num_classes=10, input_shape=SMALL)
    assert model.norm.num_batches_tracked == 0


def test_missing_packages_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for spec, package in (("timm:resnet18", "timm"), ("hf:vit", "transformers")):
        with pytest.raises(UnavailableError, match=f"pip install {package}"):
            models.build(spec, num_classes=10, input_shape=SMALL)


def test_timm_is_asked_for_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def create_model(name: str, *, pretrained: bool, num_classes: int, in_chans: int) -> nn.Module:
        assert not pretrained
        return nn.Sequential(nn.Flatten(), nn.Linear(in_chans * 32 * 32, num_classes))

    fake = types.ModuleType("timm")
    vars(fake).update(create_model=create_model, is_model=lambda n: n == "tiny", list_models=lambda: ["tiny"])
    monkeypatch.setitem(sys.modules, "timm", fake)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    assert models.build("timm:tiny", num_classes=4, input_shape=SMALL)[1].out_features == 4
    with pytest.raises(UsageError, match="did you mean tiny"):
        models.build("timm:tinny", num_classes=4, input_shape=SMALL)


def test_a_package_that_does_not_import_is_an_environment_error(
    here: Callable[[str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here("timm", "import own_missing_thing\n")
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnavailableError, match="timm does not import: ModuleNotFoundError"):
        models.build("timm:resnet18", num_classes=10, input_shape=SMALL)


def test_transformers_gives_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    class Classifier(nn.Module):
        def __init__(self, num_labels: int) -> None:
            super().__init__()
            self.head = nn.Linear(3072, num_labels)

        def forward(self, pixel_values: torch.Tensor) -> types.SimpleNamespace:
            return types.SimpleNamespace(logits=self.head(pixel_values.flatten(1)))

    class AutoConfig:
        @staticmethod
        def for_model(name: str, **options: int) -> dict[str, int]:
            assert (name, options["image_size"], options["num_channels"]) == ("tiny", 32, 3)
            return options

        @staticmethod
        def from_pretrained(name: str, **options: int) -> dict[str, int]:
            raise OSError("offline\nmore")

    class AutoModelForImageClassification:
        @staticmethod
        def from_config(config: dict[str, int]) -> nn.Module:
            return Classifier(config["num_labels"])

    fake = types.ModuleType("transformers")
    vars(fake).update(
        CONFIG_MAPPING={"tiny": 1},
        AutoConfig=AutoConfig,
        AutoModelForImageClassification=AutoModelForImageClassification,
    )
    monkeypatch.setitem(sys.modules, "transformers", fake)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    model = models.build("hf:tiny", num_classes=4, input_shape=SMALL)
    assert model(torch.zeros(2, *SMALL)).shape == (2, 4)
    with pytest.raises(UnavailableError) as caught:
        models.build("hf:someone/thing", num_classes=4, input_shape=SMALL)
    assert "its configuration is not available: OSError: offline" in message(caught)


def test_a_configuration_in_a_folder_that_cannot_be_used_is_an_unusable_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def from_pretrained(name: str, **options: int) -> types.SimpleNamespace:
        if name == str(tmp_path / "pixels"):
            return types.SimpleNamespace(patch_size=8)
        raise OSError("this is wrong:\n  not valid JSON")

    fake = types.ModuleType("transformers")
    vars(fake).update(CONFIG_MAPPING={}, AutoConfig=types.SimpleNamespace(from_pretrained=from_pretrained))
    monkeypatch.setitem(sys.modules, "transformers", fake)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    for folder in ("broken", "pixels"):
        (tmp_path / folder).mkdir()
    with pytest.raises(InvalidInputError, match="is not available: OSError: this is wrong: not valid JSON"):
        models.build(f"hf:{tmp_path}/broken", num_classes=4, input_shape=SMALL)
    with pytest.raises(InvalidInputError, match="there is no folder"):
        models.build(f"hf:{tmp_path}/missing", num_classes=4, input_shape=SMALL)
    with pytest.raises(InvalidInputError, match="has no vocabulary, so it reads no tokens"):
        models.default_input(f"hf:{tmp_path}/pixels", (16,))


def test_a_factory_elsewhere_needs_no_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    (tmp_path / "own_elsewhere.py").write_text(
        "from torch import nn\ndef make(): return nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert models.build("own_elsewhere:make", num_classes=10, input_shape=SMALL)[1].out_features == 10
