"""Names of data sets on the command line. Checked before torch is imported, which takes seconds.

cifar100 | cifar10 | mnist | digits | synthetic     official files, or what comes with the package
shapes | sentiment                                  synthetic segmentation and text
folder:DIR                                          images by class: DIR/CLASS/*.png, or DIR/train/CLASS/*.png
coco:DIR                                            images and masks in COCO's format
csv:FILE, parquet:FILE, arrow:FILE                  a table: numbers, text or images, and a column of classes
hf:NAME                                             a data set of the Hugging Face hub; needs ``datasets``
package.module:factory                              a function that returns a dataset, or two
"""

from __future__ import annotations

import importlib.util
from difflib import get_close_matches
from pathlib import Path

from asa.errors import InvalidInputError, UnavailableError, UsageError, lacking
from asa.reading import kind_at
from asa.zoo.names import check_module

NAMED = ("cifar100", "cifar10", "mnist", "digits", "synthetic", "shapes", "sentiment")
FOLDERS = ("folder", "coco")
PATHS = (*FOLDERS, "csv", "parquet", "arrow")
FORMS = "folder:DIR, coco:DIR, csv:FILE, parquet:FILE, arrow:FILE, hf:NAME and package.module:factory"
CLASSES = {"cifar100": 100, "cifar10": 10, "mnist": 10, "digits": 10}
"""Number of classes of data sets that are known before they are read."""

_NEEDED = {"parquet": "pyarrow", "arrow": "pyarrow", "hf": "datasets"}


def is_own(spec: str) -> bool:
    """Whether ``spec`` is the user's own data, and not a named data set."""
    return ":" in spec


def check_form(spec: str) -> None:
    """Check that ``spec`` has the form of a data set's name.

    Raises:
        ValueError: it has not.
    """
    origin, colon, rest = spec.partition(":")
    if not colon and spec not in NAMED:
        matches = get_close_matches(spec, NAMED, n=1)
        hint = f"did you mean {matches[0]}?" if matches else f"there are {', '.join(NAMED)}, {FORMS}"
        raise ValueError(f"no data set is called {spec!r}; {hint}")
    named = origin in (*PATHS, *_NEEDED)
    if colon and (not rest or not (named or all(p.isidentifier() for p in (*origin.split("."), *rest.split("."))))):
        raise ValueError(f"{spec!r} is none of {FORMS}")


def check_there(spec: str) -> None:
    """Check that the files of ``spec`` exist, or the module of its factory, and the package that reads the files.

    Raises:
        UsageError: no such module, or no such function in it.
        InvalidInputError: no such file or folder.
        UnavailableError: no such package.
    """
    origin, colon, rest = spec.partition(":")
    if not colon:
        return
    if origin not in (*PATHS, *_NEEDED):
        check_module(spec, origin, "data")
        return
    path = Path(rest)
    if origin in PATHS and not (path.is_dir() if origin in FOLDERS else path.is_file()):
        needed = "folder" if origin in FOLDERS else "file"
        found = kind_at(rest)
        why = f"{rest} is {found}, not a {needed}" if found else f"there is no {needed} {rest}"
        if origin == "arrow" and path.is_dir():
            why += f"; --data hf:{rest} reads a folder that save_to_disk wrote"
        raise InvalidInputError(f"--data {spec}: {why}")
    if origin in _NEEDED and importlib.util.find_spec(_NEEDED[origin]) is None:
        raise UnavailableError(lacking(_NEEDED[origin], f"--data {spec}"))


def check_classes(spec: str, has: int, model_has: int) -> None:
    """Check that a model with ``model_has`` classes can be trained on ``spec``, which ``has`` so many.

    Raises:
        UsageError: it has too few.
    """
    if has > model_has:
        raise UsageError(
            f"{spec} has {has} classes, the model has {model_has}; make a model of {has} with --classes {has}, or take "
            "other --data"
        )
