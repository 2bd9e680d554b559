"""External models: ``package.module:factory`` of the user's own, ``timm:NAME``, ``hf:NAME``."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from asa.errors import InvalidInputError, UnavailableError, UsageError, place_of
from asa.zoo.hub import reachable
from asa.zoo.inputs import Shape, example, of_tokens
from asa.zoo.names import PACKAGES, check_installed


def first_line(error: BaseException) -> str:
    """``Kind: message`` of an exception, in one line of at most 200 characters, followed by its place in the user's
    code."""
    text = [t.strip() for t in str(error).strip().splitlines()]
    first = " ".join(text[: 2 if text and text[0].endswith(":") else 1])  # a heading alone says nothing
    line = f"{type(error).__name__}: {first}" if text else type(error).__name__
    return (line if len(line) <= 200 else line[:197] + "...") + place_of(error)


@contextlib.contextmanager
def at_home() -> Iterator[None]:
    """Context in which the working directory, if it still exists, is importable (the ``asa`` script does not add it),
    and stdout goes to stderr."""
    cwd: list[str] = []
    with contextlib.suppress(FileNotFoundError):
        cwd = [os.getcwd()]
    sys.path[:0] = cwd
    importlib.invalidate_caches()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        for path in cwd:
            with contextlib.suppress(ValueError):
                sys.path.remove(path)


def _import(spec: str, name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # If the named module or a parent package is missing, the name is wrong. Otherwise the module lacks an import.
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise UsageError(
                f"{what} {spec!r}: no module {name!r} to import from here or the installed packages"
            ) from None
        raise InvalidInputError(f"{what} {spec!r}: importing {name} needs {error.name!r}, which is missing") from None
    except (Exception, SystemExit) as error:
        raise InvalidInputError(f"{what} {spec!r}: importing {name} failed with {first_line(error)}") from None


def factory(spec: str, what: str = "model") -> Callable[..., Any]:
    """The function that ``package.module:factory`` names. ``what`` is the kind of thing that it makes, for messages.

    Raises:
        UsageError: there is none.
        InvalidInputError: its module cannot be imported.
    """
    module_name, _, attribute = spec.partition(":")
    parts = [*module_name.split("."), *attribute.split(".")]
    if not all(p.isidentifier() for p in parts):
        raise UsageError(f"{what} {spec!r} is not of the form package.module:factory")
    function: Any = _import(spec, module_name, what)
    for part in attribute.split("."):
        if not hasattr(function, part):
            matches = get_close_matches(part, [n for n in dir(function) if not n.startswith("_")], n=3)
            hint = f"; did you mean {', '.join(matches)}?" if matches else ""
            raise UsageError(f"{what} {spec!r}: {module_name} has no {attribute!r}{hint}")
        function = getattr(function, part)
    if not callable(function) or isinstance(function, nn.Module):
        raise UsageError(f"{what} {spec!r}: {attribute} is a {type(function).__name__}, not a function that makes one")
    return function  # type: ignore[no-any-return]


def accepted(function: Callable[..., Any], offered: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments, out of ``offered``, that the function takes. ``**kwargs`` takes all but ``input_shape``."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {n for n, p in parameters.items() if p.kind in by_name}
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        named |= offered.keys() - {"input_shape"}
    return {k: v for k, v in offered.items() if k in named}


def takes_classes(spec: str) -> bool:
    """Whether the model accepts a number of classes. Only a factory of the user's own may not.

    Raises:
        UsageError: the spec does not name a function.
        InvalidInputError: the module cannot be imported.
    """
    origin, colon, _ = spec.partition(":")
    if not colon or origin in PACKAGES:
        return True
    with at_home():
        return bool(accepted(factory(spec), {"num_classes": 0}))


def from_factory(spec: str, *, num_classes: int, input_shape: Shape) -> nn.Module:
    """Call ``package.module:factory``, with ``num_classes`` and ``input_shape`` if it takes them.

    Raises:
        UsageError: the spec does not lead to a function.
        InvalidInputError: the module cannot be imported, or the function fails or returns no ``nn.Module``.
    """
    with at_home():
        function = factory(spec)
        try:
            model = function(**accepted(function, {"num_classes": num_classes, "input_shape": input_shape}))
        except (Exception, SystemExit) as error:
            raise InvalidInputError(f"model {spec!r}: the factory failed with {first_line(error)}") from None
    if not isinstance(model, nn.Module):
        raise InvalidInputError(f"model {spec!r}: the factory returned a {type(model).__name__}, not an nn.Module")
    _initialise(model, input_shape)
    return model


def _initialise(model: nn.Module, shape: Shape) -> None:
    """Give lazy layers (``nn.LazyLinear``) of ``model`` their weights, by a run on an input of ``shape``. If the model
    fails on it, they have none, and whoever tries the model says why."""
    lazy = [p for p in model.parameters() if isinstance(p, UninitializedParameter)]
    if lazy:
        modes = {m: m.training for m in model.modules()}
        with torch.no_grad(), contextlib.suppress(Exception):
            model.eval()(example(shape, device=lazy[0].device.type))
        for module, mode in modes.items():
            module.training = mode


def _package(name: str, spec: str) -> Any:
    check_installed(name, spec)
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise UnavailableError(f"model {spec!r}: the installed {name} does not import: {first_line(error)}") from None


def from_timm(spec: str, *, num_classes: int, input_shape: Shape) -> nn.Module:
    """Model of ``timm.create_model`` without pre-trained weights, with ``img_size`` if the model takes one.

    Raises:
        UnavailableError: timm is not installed.
        UsageError: timm has no such model.
        InvalidInputError: it cannot be built for this input.
    """
    timm = _package("timm", spec)
    name = spec.partition(":")[2]
    if not timm.is_model(name):
        matches = get_close_matches(name, timm.list_models(), n=3)
        raise UsageError(f"timm has no model {name!r}" + (f"; did you mean {', '.join(matches)}?" if matches else ""))
    options = {"pretrained": False, "num_classes": num_classes, "in_chans": input_shape[0]}
    try:
        try:
            model = timm.create_model(name, **options, img_size=input_shape[1:])
        except TypeError:  # purely convolutional models take any size and have no such argument
            model = timm.create_model(name, **options)
    except Exception as error:
        raise InvalidInputError(f"model {spec!r} cannot be built: {first_line(error)}") from None
    return model  # type: ignore[no-any-return]


class Logits(nn.Module):
    """A model of transformers as a function from its input, pixels or tokens, to logits."""

    def __init__(self, model: nn.Module, reads: str) -> None:
        super().__init__()
        self.model, self.reads = model, reads

    def forward(self, x: Tensor) -> Tensor:
        """Logits for ``x``: pixels [N, C, H, W], or tokens int64 [N, T]."""
        return self.model(**{self.reads: x}).logits  # type: ignore[no-any-return]


_TOKEN_MODELS = ("AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoModelForSequenceClassification")
"""Kinds of models, in the order in which a text configuration is tried (encoders can also be built as causal
models)."""


def from_transformers(spec: str, *, num_classes: int, input_shape: Shape) -> nn.Module:
    """A model of transformers with fresh weights: by model type (``hf:vit``, ``hf:llama``), or by a folder or hub name
    whose configuration is read.

    For images it is a classifier. For tokens it is a classifier of sequences if the configuration names one; otherwise
    a masked or causal language model, whose vocabulary size is ``num_classes``.

    Raises:
        UnavailableError: transformers is not installed, or the hub does not give the configuration.
        InvalidInputError: it is no such model, a folder has no configuration that can be used, or the model cannot be
            built for this input.
    """
    transformers = _package("transformers", spec)
    text = of_tokens(input_shape)
    options: dict[str, Any] = {"use_cache": False}
    if not text:
        options = {"num_labels": num_classes, "num_channels": input_shape[0], "image_size": input_shape[1]}
    config = _configuration(transformers, spec, options)
    try:
        if not text:
            return Logits(transformers.AutoModelForImageClassification.from_config(config), "pixel_values")
        return Logits(_of_text(transformers, config, num_classes), "input_ids")
    except Exception as error:
        raise InvalidInputError(f"model {spec!r} cannot be built: {first_line(error)}") from None


def _configuration(transformers: Any, spec: str, options: dict[str, Any]) -> Any:
    name = spec.partition(":")[2]
    try:
        if name in transformers.CONFIG_MAPPING:
            return transformers.AutoConfig.for_model(name, **options)
        if not Path(name).is_dir():
            if name.startswith((".", "/")):
                raise FileNotFoundError(f"there is no folder {name}")
            reachable()
        return transformers.AutoConfig.from_pretrained(name, **options)
    except Exception as error:
        kind = InvalidInputError if name.startswith((".", "/")) or Path(name).is_dir() else UnavailableError
        raise kind(f"model {spec!r}: its configuration is not available: {first_line(error)}") from None


def vocabulary_by_configuration(spec: str) -> int:
    """Vocabulary size of a model of transformers that reads tokens, or its number of classes if it classifies
    sequences.

    Raises:
        UnavailableError: transformers is not installed, or the hub does not give the configuration.
        InvalidInputError: the model has no vocabulary, or a folder's configuration cannot be used.
    """
    config = _configuration(_package("transformers", spec), spec, {})
    size = config.num_labels if _classifies(config) else getattr(config, "vocab_size", None)
    if size is None:
        raise InvalidInputError(f"model {spec!r} has no vocabulary, so it reads no tokens; take --input in their place")
    return int(size)


def _classifies(config: Any) -> bool:
    return any("SequenceClassification" in a for a in getattr(config, "architectures", None) or [])


def _of_text(transformers: Any, config: Any, num_classes: int) -> nn.Module:
    """The model of tokens for ``config``, with a vocabulary, or number of classes, of ``num_classes``."""
    for kind in _TOKEN_MODELS[2:] if _classifies(config) else _TOKEN_MODELS:
        auto = getattr(transformers, kind)
        if type(config) not in auto._model_mapping:
            continue
        if kind == _TOKEN_MODELS[2]:
            config.num_labels = num_classes
        else:
            config.vocab_size = num_classes
        return auto.from_config(config)  # type: ignore[no-any-return]
    raise ValueError(f"{type(config).__name__} is neither a causal or masked model nor a classifier of sequences")
