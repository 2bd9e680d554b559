"""Downloads: only on request, from the addresses on record, and only what has the right checksum counts."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import struct
import urllib.error
from pathlib import Path
from typing import Any

import pytest

from asa.errors import InvalidInputError, UnavailableError
from asa.zoo.data import cache, open_split
from asa.zoo.data import split as split_module
from asa.zoo.data.download import download
from asa.zoo.data.official import CIFAR100, MNIST, OFFICIAL, Official


def small_mnist() -> tuple[Official, dict[str, bytes]]:
    """MNIST as if its official files were these."""
    contents, origins = {}, []
    for origin in MNIST.origins:
        if "images" in origin.file:
            data = struct.pack(">HBBIII", 0, 8, 3, 20, 28, 28) + bytes(20 * 784)
        else:
            data = struct.pack(">HBBI", 0, 8, 1, 20) + bytes(range(10)) * 2
        contents[origin.file] = gzip.compress(data, mtime=0)
        digest = hashlib.sha256(contents[origin.file]).hexdigest()
        origins.append(dataclasses.replace(origin, size=len(contents[origin.file]), sha256=digest))
    return dataclasses.replace(MNIST, origins=tuple(origins)), contents


class Web:
    """Answers like urlopen; counts what it is asked."""

    def __init__(self, contents: dict[str, bytes], *, dead: tuple[str, ...] = ()) -> None:
        self.contents, self.dead, self.asked = contents, dead, list[str]()

    def __call__(self, url: str, *, timeout: float) -> Any:
        assert 0 < timeout <= 60
        self.asked.append(url)
        if any(host in url for host in self.dead):
            raise urllib.error.URLError("Name or service not known")
        return io.BytesIO(self.contents[url.rpartition("/")[2]])


def refuse(url: str, *, timeout: float) -> Any:
    raise AssertionError(f"nobody asked for {url}")


def test_files_arrive_once_and_are_kept(tmp_path: Path) -> None:
    what, contents = small_mnist()
    web = Web(contents)
    download(what, tmp_path, opener=web)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == contents
    assert len(web.asked) == 4
    download(what, tmp_path, opener=refuse)
    (tmp_path / what.origins[0].file).write_bytes(b"torn")
    download(what, tmp_path, opener=web)
    assert len(web.asked) == 5
    assert (tmp_path / what.origins[0].file).read_bytes() == contents[what.origins[0].file]


def test_a_dead_address_is_followed_by_the_next(tmp_path: Path) -> None:
    what, contents = small_mnist()
    web = Web(contents, dead=("ossci",))
    download(what, tmp_path, opener=web)
    assert len(web.asked) == 8
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data[:-1], "bytes"),
        (lambda data: data + b"x", "more than"),
        (lambda data: bytes([data[0] ^ 1]) + data[1:], "wrong checksum"),
        (lambda data: b"<html>blocked</html>", "20 of"),
    ],
)
def test_wrong_bytes_are_thrown_away(tmp_path: Path, change: Any, says: str) -> None:
    what, contents = small_mnist()
    with pytest.raises(UnavailableError) as caught:
        download(what, tmp_path, opener=Web({k: change(v) for k, v in contents.items()}))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failure", [urllib.error.URLError("unreachable"), TimeoutError("timed out"), OSError("x")])
def test_offline_is_one_line_that_names_file_and_remedy(tmp_path: Path, failure: OSError) -> None:
    def offline(url: str, *, timeout: float) -> Any:
        raise failure

    with pytest.raises(UnavailableError) as caught:
        open_split("cifar100", split="train", root=tmp_path, download=True, opener=offline)
    text = str(caught.value)
    assert "cannot download cifar-100-binary.tar.gz" in text
    assert "yourself" in text
    assert "\n" not in text
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_place_is_an_environment_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnavailableError, match="cannot write downloads"):
        download(CIFAR100, tmp_path / "file" / "below", opener=refuse)


def test_open_split_downloads_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    what, contents = small_mnist()
    monkeypatch.setitem(split_module.OFFICIAL, "mnist", what)
    monkeypatch.setattr(cache, "folder", lambda: tmp_path / "cache")
    monkeypatch.setattr("urllib.request.urlopen", refuse)
    root = tmp_path / "root"
    root.mkdir()
    with pytest.raises(InvalidInputError):
        open_split("mnist", split="train", root=root)
    assert "Made-up" in open_split("mnist", split="train", root=None).source
    found = open_split("mnist", split="train", root=root, download=True, opener=Web(contents))
    assert len(found) == 20
    assert len(open_split("mnist", split="test", root=root)) == 20
    # Without a root the files stay in the cache, and serve later calls that ask for no download.
    open_split("mnist", split="train", root=None, download=True, opener=Web(contents))
    later = open_split("mnist", split="train", root=None)
    assert len(later) == 20
    assert "Made-up" not in later.source


def test_the_record_of_origins_is_whole() -> None:
    for what in OFFICIAL.values():
        for origin in what.origins:
            assert len(origin.sha256) == 64
            assert int(origin.sha256, 16)
            assert origin.size > 1000
            assert origin.source.startswith("tensorflow/datasets")
            assert all(u.startswith("https://") and u.endswith(origin.file) for u in origin.urls)
        assert len(what.mean) == len(what.std) == what.shape[0]
