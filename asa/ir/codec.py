"""Strict conversion of records to JSON and back, with fingerprints.

A *noun* (record) is a frozen, keyword-only dataclass. A *document* is a noun stored as a file, with ``kind``,
``schema_version`` and ``fingerprint``. The fingerprint is the SHA-256 of everything else in the file, so a file that
was edited or truncated after it was written is refused. A file without a fingerprint was written by hand, and is
accepted without that check.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import stat
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, dataclass_transform

from asa.errors import InvalidInputError, UsageError
from asa.reading import read_text

T = TypeVar("T")

SCHEMA_VERSION = 1

_DIGITS = 18
"""Largest number of digits of a whole number in a file; such a number fits into 64 bits."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
def noun(cls: type[T]) -> type[T]:
    """Make ``cls`` a frozen, keyword-only dataclass whose JSON form refuses unknown keys, NaN and infinity."""
    cls.__pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "strict": True}  # type: ignore[attr-defined]
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)


def hashed(cls: type[T]) -> type[T]:
    """Make a noun class cache its hash; for classes whose objects are hashed far more often than created."""
    plain: Any = cls.__hash__

    def cached_hash(self: Any) -> int:
        cached: int | None = self.__dict__.get("_hash")
        if cached is None:
            cached = plain(self)
            object.__setattr__(self, "_hash", cached)
        return cached

    def state(self: Any) -> dict[str, Any]:
        # Hashes of strings differ between processes.
        return {k: v for k, v in self.__dict__.items() if k != "_hash"}

    cls.__hash__ = cached_hash  # type: ignore[method-assign]
    cls.__getstate__ = state  # type: ignore[method-assign]
    return cls


def later(default: Any = None) -> Any:
    """Default of a field that was added to a noun after the first release of its documents.

    A field with this value is not written to files, so older documents stay equal to what would be written now.
    """
    return dataclasses.field(default=default, metadata={"later": True})


@cache
def _adapter(cls: type[Any]) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(cls)


@cache
def _fields(cls: type[Any]) -> tuple[tuple[str, Any, bool], ...]:
    """(name, default, whether it was added :func:`later`) of every field."""
    return tuple((f.name, f.default, "later" in f.metadata) for f in dataclasses.fields(cls))


_SCALARS: frozenset[type] = frozenset((str, int, float, bool, type(None)))


def to_data(value: Any) -> Any:
    """``value`` (a noun, or a container of nouns) as plain dicts, lists and scalars."""
    if type(value) in _SCALARS:
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        entries = ((name, getattr(value, name), default, late) for name, default, late in _fields(type(value)))
        return {name: to_data(v) for name, v, default, late in entries if not late or v != default}
    if isinstance(value, list | tuple):
        return [to_data(v) for v in value]
    if isinstance(value, dict):
        return {str(k): to_data(v) for k, v in value.items()}
    return value


def fingerprint(value: Any) -> str:
    """Sixteen hex digits that change whenever any field of the noun changes.

    Fields with their default value do not count, so a new field does not change the fingerprints of older files.
    """
    key = id(value)
    cached = _FINGERPRINTS.get(key)
    if cached is None or cached[0]() is not value:
        cached = _FINGERPRINTS[key] = (weakref.ref(value, lambda _: _FINGERPRINTS.pop(key, None)), _fingerprint(value))
    return cached[1]


_FINGERPRINTS: dict[int, tuple[weakref.ref[Any], str]] = {}
"""Cached fingerprints by object identity. Records do not change, and a command needs the fingerprint of a large profile
several times."""


def _fingerprint(value: Any) -> str:
    canonical = json.dumps(_canonical(value), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _canonical(value: Any) -> Any:
    """Data as from :func:`to_data`, without fields at their default, and with 1.0 as 1, which JSON does not
    distinguish."""
    kind: Any = type(value)
    if kind is float:
        return int(value) if value.is_integer() else value
    if kind in _SCALARS:
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        stated = ((name, getattr(value, name), default) for name, default, _ in _fields(kind))
        return {name: _canonical(v) for name, v, default in stated if default is dataclasses.MISSING or v != default}
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list | tuple):
        return [_canonical(v) for v in value]
    if isinstance(value, dict):
        return {str(k): _canonical(v) for k, v in value.items()}
    return value


def document(value: Any) -> dict[str, Any]:
    """The JSON document of a noun: ``schema_version``, ``kind``, its fields, and ``fingerprint``."""
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": type(value).__name__.lower(),
        **to_data(value),
        "fingerprint": fingerprint(value),
    }


def schema(cls: type[Any]) -> dict[str, Any]:
    """JSON Schema (draft 2020-12) for the documents of a noun class, made from its types.

    :func:`loads` refuses every file that the schema refuses. The fingerprint is optional, as in a file written by hand.
    """
    result: dict[str, Any] = _adapter(cls).json_schema()  # type: ignore[arg-type]
    envelope = {
        "schema_version": {"const": SCHEMA_VERSION},
        "kind": {"const": cls.__name__.lower()},
        "fingerprint": {"type": "string", "pattern": "^[0-9a-f]{16}$"},
    }
    result["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    result["properties"] = envelope | result["properties"]
    result["required"] = ["schema_version", "kind", *result.get("required", [])]
    return result


def dumps(value: Any) -> str:
    """The document of ``value`` as text; numbers round-trip exactly."""
    return json.dumps(document(value), indent=1, allow_nan=False) + "\n"


def save(value: Any, path: Path) -> None:
    """Write the document of ``value`` to ``path``; see :func:`write`.

    Raises:
        OSError: it cannot be written; names ``path``.
    """
    write(dumps(value), path)


def write(text: str | bytes, path: Path) -> None:
    """Write ``text`` to ``path`` atomically: readers see the old file or the complete new one, even if the disk is
    full.

    Raises:
        OSError: it cannot be written; names ``path``.
        UsageError: it has the name of a file that is not UTF-8.
    """
    try:
        data = text if isinstance(text, bytes) else text.encode()
    except UnicodeEncodeError as error:
        name = error.object[max(0, error.start - 20) : error.end + 20]
        raise UsageError(f"{path} cannot hold {name!a}, which is not UTF-8; rename that file or folder") from None
    with replacing(path) as temporary:
        temporary.write_bytes(data)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Context with the path of a temporary file, which takes the place of ``path`` at the end. Of a link, its target is
    replaced. A device, or a pipe that somebody reads, is not replaced: it is written to itself.

    Raises:
        OSError: it cannot be written; names ``path``.
    """
    reader = _pipe_with_reader(path)
    if reader is not None or (is_special(path) and not path.is_fifo()):
        try:
            yield path
        except OSError as error:
            raise _naming(error, path) from error
        finally:
            if reader is not None:
                os.close(reader)
        return
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:100]}.", suffix=".tmp")
    except OSError as error:
        raise _naming(error, path) from error
    os.close(handle)
    try:
        yield Path(name)
        with suppress(PermissionError):  # some file systems have no permissions
            os.chmod(name, 0o644)
        os.replace(name, target)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        raise _naming(error, path) from error
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _naming(error: OSError, path: Path) -> OSError:
    """``error`` with ``path`` as its file: the error of a full disk names none."""
    return OSError(error.errno, error.strerror or str(error), str(path))


def _pipe_with_reader(path: Path) -> int | None:
    """Open file of the pipe at ``path``; None if there is none, or nobody reads it: writing would wait for ever."""
    if not path.is_fifo():
        return None
    with suppress(OSError):
        return os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    return None


def now() -> str:
    """The current time as documents state it: UTC, in whole seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def is_special(path: Path) -> bool:
    """Whether ``path`` is a device, a pipe or a socket, as ``/dev/null`` is, and no file or folder."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _refuse_constant(token: str) -> Any:
    raise ValueError(f"{token} is not a number")


def _finite(token: str) -> float:
    value = float(token)
    if not math.isfinite(value):
        raise ValueError(f"{token} is out of range")
    return value


def _integer(token: str) -> int:
    if len(token) > _DIGITS:
        raise ValueError(f"{token[:_DIGITS]}... is out of range")
    return int(token)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {key!r} appears twice")
        result[key] = value
    return result


_JSON_TYPES = {list: "list", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}
"""What JSON calls the values that are no object."""


def parse(text: str, *, source: str) -> dict[str, Any]:
    """Parse JSON text to a dict; refuses NaN, infinities, numbers out of range and duplicate keys.

    Raises:
        InvalidInputError: the text is not one JSON object of that kind.
    """
    try:
        data = json.loads(
            text, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_integer, object_pairs_hook=_unique
        )
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError) and error.pos >= len(text.rstrip()):
            size = len(text.encode())
            raise InvalidInputError(
                f"{source} is not valid JSON: it ends too early, after {size} bytes; copy or write it again"
            ) from None
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise InvalidInputError(f"{source} is not valid JSON: {why}") from None
    if not isinstance(data, dict):
        raise InvalidInputError(f"{source} holds a JSON {_JSON_TYPES[type(data)]}, not an object")
    return data


def build(cls: type[T], data: Any, *, source: str) -> T:
    """Make a noun of type ``cls`` from plain data, checking every field.

    Raises:
        InvalidInputError: names the JSON path of the first wrong field.
    """
    from pydantic import ValidationError

    try:
        # Through JSON text: strict mode then still takes arrays as tuples.
        value: T = _adapter(cls).validate_json(json.dumps(data))  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "$" + "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        message = message.lower() if message == first["msg"] else message  # what a noun says keeps its names
        raise InvalidInputError(f"{source}: {message}", where=where) from None
    except (InvalidInputError, UsageError) as error:  # raised by a noun, which does not know its file
        raise InvalidInputError(f"{source}: {error}") from None
    except (RecursionError, ValueError) as error:
        raise InvalidInputError(f"{source}: {error}") from None
    return value


def loads(cls: type[T], text: str, *, source: str) -> T:
    """Read the noun in a document's text.

    Raises:
        InvalidInputError: other kind, other schema version, wrong field, or a fingerprint that does not match.
    """
    data = parse(text, source=source)
    kind = cls.__name__.lower()
    if data.get("kind") != kind:
        actual = data.get("kind", "file of unknown kind")
        raise InvalidInputError(f"{source} is a {actual}, not a {kind}", where="$.kind")
    version = data.pop("schema_version", None)
    if type(version) is not int or version != SCHEMA_VERSION:
        newer = type(version) is int and version > SCHEMA_VERSION
        raise InvalidInputError(
            f"{source} has schema version {version!r}, this asa reads {SCHEMA_VERSION}; "
            + ("install the newer asa that wrote it, or create it again" if newer else "create it again"),
            where="$.schema_version",
        )
    del data["kind"]
    sealed = "fingerprint" in data
    stated = data.pop("fingerprint", None)
    foresee = getattr(cls, "foresee", None)
    if foresee is not None:
        try:
            foresee(data)
        except InvalidInputError as error:
            raise InvalidInputError(f"{source}: {error}") from None
    value = build(cls, data, source=source)
    check_loaded = getattr(value, "check_loaded", None)
    if check_loaded is not None:
        try:
            check_loaded()
        except InvalidInputError as error:
            raise InvalidInputError(f"{source}: {error}") from None
    if sealed and stated != fingerprint(value):
        raise InvalidInputError(
            f"{source} was changed after it was written: it states fingerprint {stated}, its content has "
            f"{fingerprint(value)}; if the change is intended, remove the fingerprint",
            where="$.fingerprint",
        )
    return value


def load(cls: type[T], path: Path) -> T:
    """Read the noun in the file at ``path``.

    Raises:
        InvalidInputError: the file is missing, unreadable, or not a document of that kind.
    """
    return loads(cls, read_text(path), source=str(path))
