"""Checks of model names before torch is imported, which takes seconds. Only building the model is a full check."""

from __future__ import annotations

import importlib.util
import re
import sys
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import NoReturn

from asa.errors import UnavailableError, UsageError
from asa.reading import kind_at
from asa.zoo.sizes import SHAPES
from asa.zoo.sources import check_defined

OWN = ("bert", "cnn", "gru", "logistic", "lstm", "unet")
"""Models of the zoo's own."""

REMARKS = {
    "bert": "bert is a small encoder that reads the colours of an image as tokens; for text, take hf:bert-base-uncased "
    "and --tokens"
}
"""What the name of a model may be mistaken for."""

PACKAGES = {"timm": "timm", "hf": "transformers"}
"""Package of a model by the prefix of its spec, before the colon."""

_SIZED = ("gpt2", "llama")
"""Families in which a model is named by its size after a colon."""

_FOLDERS = (".", "segmentation")
"""Folders below torchvision's ``models`` whose models are accepted."""

_REGISTERED = re.compile(r"^@register_model\((?:name=)?[\"']?(\w*)[\"']?\)$.*?^def (\w+)\(", re.DOTALL | re.MULTILINE)


@cache
def of_torchvision() -> frozenset[str]:
    """Names of torchvision's classification and segmentation models, read from its source without importing it.

    Empty if torchvision, or its source, is missing.
    """
    package = importlib.util.find_spec("torchvision")
    names: set[str] = set()
    for root in (package.submodule_search_locations or ()) if package else ():
        for folder in _FOLDERS:
            for path in sorted((Path(root) / "models" / folder).glob("*.py")):
                text = path.read_text(encoding="utf-8", errors="replace")
                names |= {name or function for name, function in _REGISTERED.findall(text)}
    return frozenset(names)


def check(spec: str) -> None:
    """Check that ``spec`` can be the name of a model, at the cost of reading some files.

    Raises:
        UsageError: no model has that name (similar ones are given), or there is no such module.
        UnavailableError: the package that ``spec`` needs is not installed.
    """
    origin, colon, name = spec.partition(":")
    if origin in _SIZED:
        check_size(spec)
    elif colon and origin in PACKAGES:
        check_installed(PACKAGES[origin], spec)
    elif origin == "torchvision" and name in of_torchvision():
        raise UsageError(f"model {spec!r}: models of torchvision go by their name alone, {name}")
    elif colon:
        check_module(spec, origin)
    elif spec not in OWN and of_torchvision() and spec not in of_torchvision():
        unknown(spec, of_torchvision())


def check_size(spec: str) -> None:
    """Check that a family of language models has the size that ``spec`` names.

    Raises:
        UsageError: it has not; lists the existing ones.
    """
    if spec not in SHAPES:
        family = spec.partition(":")[0]
        raise UsageError(
            f"no model is called {spec!r}; there are {', '.join(n for n in SHAPES if n.partition(':')[0] == family)}"
        )


AIMS = {
    "loss": ("cross_entropy", "mse", "bce"),
    "metric": ("accuracy", "top5"),
    "schedule": ("cosine", "linear", "constant", "step"),
}
"""Kinds of functions that define a training's goal, with the names that each may have."""


def check_aim(what: str, spec: str) -> None:
    """Check that there may be a ``what`` (a key of :data:`AIMS`) with the name ``spec``, without importing it.

    Raises:
        UsageError: there is no such name and no such module.
    """
    if spec in AIMS[what]:
        return
    if ":" not in spec:
        raise UsageError(f"no {what} is called {spec!r}; there are {', '.join(AIMS[what])} and package.module:factory")
    check_module(spec, spec.partition(":")[0], what)


def check_kind(spec: str, tokens: bool) -> None:
    """Check that a model that reads images gets no tokens, and one that reads tokens gets no images, if its name
    determines which.

    Raises:
        UsageError: it reads the other kind.
    """
    if spec in SHAPES and not tokens:
        raise UsageError(f"{spec} reads tokens, not images; try --tokens {SHAPES[spec].tokens}")
    if tokens and spec not in SHAPES and (":" not in spec or spec.startswith("timm:")):
        raise UsageError(f"{spec} reads images, not tokens; leave out --tokens, or take gpt2, llama:8b or hf:NAME")


def check_installed(package: str, spec: str) -> None:
    """Check that the package that ``spec`` needs is installed.

    Raises:
        UnavailableError: it is not.
    """
    if importlib.util.find_spec(package) is None:
        raise UnavailableError(f"model {spec!r} needs the package {package}: pip install {package}")


def check_module(spec: str, name: str, what: str = "model") -> None:
    """Check that the module of ``package.module:factory`` exists, and that its source defines the factory. ``what`` is
    the kind of thing that it makes, for the message.

    Raises:
        UsageError: it does not, or ``spec`` does not have that form.
    """
    if name.endswith(".py") or "/" in name:
        module = name.removesuffix(".py").strip("./").replace("/", ".")
        raise UsageError(f"{what} {spec!r} names a file; name its module: {module}:{spec.partition(':')[2]}")
    if not all(part.isidentifier() for part in spec.replace(":", ".", 1).split(".")):
        raise UsageError(f"{what} {spec!r} is not of the form package.module:factory")
    first = name.partition(".")[0]
    cwd = Path.cwd()
    exists = first in sys.modules or (cwd / first).is_dir() or any(cwd.glob(f"{first}.*"))
    if not exists and importlib.util.find_spec(first) is None:
        raise UsageError(f"{what} {spec!r}: no module {name!r} to import from here or the installed packages")
    check_defined(spec, name, spec.partition(":")[2], what)


def unknown(spec: str, names: frozenset[str]) -> NoReturn:
    """Raise the error that no model has the name ``spec``, with similar names.

    Raises:
        UsageError: always.
    """
    plain = spec.lower().replace("-", "").replace(" ", "")
    matches = get_close_matches(plain, sorted({*names, *OWN, *SHAPES}), n=3, cutoff=0.5)
    if not matches and ("-" in spec or "/" in spec):  # as the Hugging Face hub calls its models
        matches = [f"hf:{spec}", *(name for name in OWN if name in plain)]
    hint = f"; did you mean {', '.join(matches)}?" if matches else "; `package.module:factory` names one of your own"
    if kind := kind_at(spec):
        hint = f", and {spec} is {kind}; name a model"
    raise UsageError(f"no model is called {spec!r}{hint}")
