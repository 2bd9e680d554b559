"""Bad input, drawn at random from a fixed seed: every mutation of a valid file or command is planned from, or refused
in one line with the documented exit code and the place in the file. Never anything else."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_strategies
import nouns
import pytest

from asa import reading
from asa.cli import entry, places
from asa.errors import AsaError, InvalidInputError
from asa.ir import codec
from asa.ir.cluster import Cluster
from asa.ir.plan import Plan
from asa.ir.profile import Profile
from asa.planner import Request, plan, verify

FULL = fake_strategies.FULL
VALUES: tuple[Any, ...] = (
    None, True, False, "", "x", "none", "zero9", "\x00", "\ud800", "a" * 5000, [], {}, [[]], [1, 2], {"a": 1},
    0, 1, 2, 3, -1, 0.5, -0.0, 1.5, 1e-320, 1e-9, 1e9, 1e300, -1e300, 2**31, 2**63, 10**30, 10**400,
)  # fmt: skip
RAW = ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "00", "0x1", "'a'", "nul", "")
"""Put into the text in place of a value: JSON does not know them."""
MARK = "@@here@@"


def spots(data: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a document."""
    if at:
        yield at
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield from spots(value, (*at, key))


def reach(data: Any, at: tuple[Any, ...]) -> Any:
    for key in at:
        data = data[key]
    return data


def mutated(whole: dict[str, Any], rng: random.Random) -> tuple[str, str]:
    """What was done, and the text of the document after it."""
    data = copy.deepcopy(whole)
    done = []
    raw = None
    for _ in range(rng.choice((1, 1, 1, 2))):
        at = rng.choice(list(spots(data)))
        parent, key = reach(data, at[:-1]), at[-1]
        kind = rng.choice(("value", "number", "number", "number", "drop", "twice", "raw", "rename", "borrow"))
        if kind == "number":
            numbers = [s for s in spots(data) if type(reach(data, s)) in (int, float)]
            at = rng.choice(numbers)
            parent, key = reach(data, at[:-1]), at[-1]
            factor = rng.choice((-1, 0, 10, 1000, 0.5, 1e-6, 1e6, 1e12, 1e250))
            parent[key] = type(parent[key])(parent[key] * factor)
        elif kind == "drop":
            del parent[key]
        elif kind == "twice" and isinstance(parent, list):
            parent.insert(rng.randrange(len(parent) + 1), copy.deepcopy(parent[key]))
        elif kind == "rename" and isinstance(parent, dict):
            parent[f"{key}_"] = parent.pop(key)
        elif kind == "borrow":
            parent[key] = copy.deepcopy(reach(data, rng.choice(list(spots(data)))))
        elif kind == "raw":
            raw = rng.choice(RAW)
            parent[key] = MARK
        else:
            parent[key] = rng.choice(VALUES)
        done.append(f"{kind} at {at}")
    text = json.dumps(data)
    if raw is not None:
        text = text.replace(f'"{MARK}"', raw)
    if rng.random() < 0.05:
        cut = rng.randrange(len(text))
        text, done = text[:cut], [*done, f"cut at {cut}"]
    return "; ".join(done), text


def sealed(cls: type, text: str) -> str:
    """``text`` with the fingerprint of what it holds, as a tool that writes such files would give it."""
    try:
        data = json.loads(text)
        fields = {k: v for k, v in data.items() if k not in ("kind", "schema_version", "fingerprint")}
        data["fingerprint"] = codec.fingerprint(codec.build(cls, fields, source=""))
        return json.dumps(data)
    except (ValueError, TypeError, AttributeError, AsaError):
        return text


def documents() -> dict[str, tuple[type, dict[str, Any]]]:
    found = plan(nouns.profile(), nouns.cluster(), FULL, Request(gpus=2, global_batch=8))[0]
    return {
        "profile": (Profile, codec.document(nouns.profile())),
        "cluster": (Cluster, codec.document(nouns.cluster())),
        "plan": (Plan, codec.document(found)),
    }


def one_line(error: AsaError) -> None:
    said = str(error)
    assert said
    assert "\n" not in said
    assert error.exit_code in (2, 3, 4), f"{type(error).__name__}: {said}"


def placed(error: InvalidInputError, path: Path) -> None:
    """The file is named, and the place in it where it is JSON at all."""
    said = str(error)
    assert str(path) in said
    assert any(words in said for words in ("(at $", "is not valid JSON", "holds a JSON")), said


def used(which: str, path: Path, whole: dict[str, tuple[type, dict[str, Any]]]) -> None:
    """What the file is for, done with it."""
    cls = whole[which][0]
    try:
        found = codec.load(cls, path)
    except InvalidInputError as error:
        placed(error, path)
        raise
    profile = found if which == "profile" else nouns.profile()
    cluster = found if which == "cluster" else nouns.cluster()
    if which == "plan":
        verify(found, profile, cluster, FULL)
        return
    gpus = min(2, cluster.num_devices)
    made = plan(profile, cluster, FULL, Request(gpus=gpus, global_batch=8, solver="dp", time_limit_s=1.0))[0]
    codec.loads(Plan, codec.dumps(made), source="again")


@pytest.mark.parametrize("which", ["profile", "cluster", "plan"])
def test_mutated_files(which, tmp_path):
    whole = documents()
    cls, document = whole[which]
    rng = random.Random(f"fuzz {which}")
    refused = 0
    for number in range(150):
        done, text = mutated(document, rng)
        path = tmp_path / f"{number}.json"
        path.write_bytes(sealed(cls, text).encode("utf-8", "surrogatepass"))
        try:
            used(which, path, whole)
        except AsaError as error:
            one_line(error)
            refused += 1
        except Exception as error:
            raise AssertionError(f"{which} {number}, {done}: {type(error).__name__}: {error}") from error
    assert refused > 50, "most mutations leave something that means nothing"


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A directory with one profile, one cluster of two CPU ranks, and one plan of both."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(places, "SHIPPED", tmp_path / "source" / "profiles")
    for name in [n for n in os.environ if n.startswith("ASA_")]:
        monkeypatch.delenv(name)
    codec.save(nouns.profile(), tmp_path / "profiles" / "tiny.json")
    codec.save(nouns.cluster(), tmp_path / "profiles" / "cluster.box.json")
    assert entry.run(["plan", "--gpus", "2", "-o", "plan.json"]) == 0
    return tmp_path


ABSURD: dict[str, tuple[str, ...]] = {
    "--gpus": ("0", "-1", "1", "2", "3", "1e3", "99999999999999999999", "two", "", "1.5"),
    "--global-batch": ("0", "-8", "1", "2", "7", "8", "9", "10000000", "1" + "0" * 30, "nan"),
    "--memory": ("0", "-1", "nan", "inf", "1e999", "1e-9", "0.01", "0.2", "0.3", "100", "1e7", "x"),
    "--strategies": ("", ",", "asa", "ddp,ddp", "dpp", "hybrid:", "hybrid:d2", "hybrid:d0t2", "hybrid:d9t9", "ps_sync",
                     "hybrid:d99999t99999p99999", "interleaved", "single", "tensor", "gpipe", "fsdp,nothing"),
    "--pin": ("head=tensor@2", "head=tensor@0", "head=tensor@3", "head=zero3@2", "head=none@2", "*=replicate@2", "=@",
              "nothing=tensor@2", "head", "head=tensor", "head=zero9@2", "stem=tensor@2", "[=tensor@2",
              "*=tensor@999999", "head=replicate@1", "head=hsdp@2"),
    "--solver": ("ilp", "dp", "exhaustive", "magic", ""),
    "--optimizer": ("sgd", "adamw", "adam"),
    "--time-limit": ("0", "-1s", "1ms", "0.001s", "1s", "1e999", "...", "99999999h", "s"),
    "--top": ("0", "1", "2", "-1", "x"),
    "--price": ("0", "1", "nan", "-1", "1e308", "1e-300", "free"),
    "--epoch-samples": ("0", "1", "100", "1" + "0" * 25),
    "--cluster": ("box", "plan.json", "profiles/tiny.json", "nowhere.json", "nowhere", "a100-nvlink-8", "", "/", "."),
    "--precision": ("fp32", "bf16", "fp8"),
    "--classes": ("10", "11", "0"),
    "-o": ("out.json", "plan.json", "profiles", "plan.json/x.json"),
    "": ("profiles/tiny.json", "plan.json", "profiles/cluster.box.json", "nowhere.json", "a/b.json", "--gpu", "-x"),
}  # fmt: skip


@pytest.mark.parametrize("part", range(3))
def test_absurd_commands(part, place, capsys):
    rng = random.Random(f"commands {part}")
    codes = set()
    for _ in range(60):
        argv = ["plan"]
        for option in rng.sample(sorted(ABSURD), rng.choice((1, 1, 2, 3))):
            argv += [*([option] if option else []), rng.choice(ABSURD[option])]
        capsys.readouterr()
        code = entry.run(argv)
        last = ([*capsys.readouterr().err.strip().splitlines(), ""])[0 if code == 0 else -2]
        assert code in (0, 2, 3, 4) or (code == 5 and "-o" in argv), (argv, code, last)
        assert code == 0 or last.startswith("asa: "), (argv, last)
        assert "internal error" not in last, (argv, last)
        codes.add(code)
    assert {0, 2} <= codes


@pytest.mark.parametrize("verb", ["explain", "simulate", "plan"])
def test_mutated_files_on_the_command_line(verb, place, capsys):
    which = "plan" if verb != "plan" else "profile"
    cls, document = documents()[which]
    rng = random.Random(f"{verb} on the command line")
    for number in range(40):
        done, text = mutated(document, rng)
        Path("bad.json").write_bytes(sealed(cls, text).encode("utf-8", "surrogatepass"))
        capsys.readouterr()
        code = entry.run([verb, "bad.json", "--json"])
        said = capsys.readouterr()
        assert code in (0, 2, 3, 4), f"{verb} {number}, {done}: {code} {said.err}"
        found = json.loads(said.out)
        assert code == 0 or (found["exit_code"] == code and "\n" not in found["error"])


def test_more_components_than_any_model_has_are_refused_at_once(tmp_path):
    """10^5 components: by the size of the file, before it is read; fewer, by their number."""
    data = codec.document(nouns.profile())
    one = data["graph"]["components"][1]
    data["graph"]["components"] = [{**one, "name": f"part.{i}"} for i in range(6000)]
    path = tmp_path / "many.json"
    path.write_text(json.dumps(data))
    with pytest.raises(InvalidInputError, match=r"6000 components, the most is 2000 \(at \$\.graph\.components\)"):
        codec.load(Profile, path)
    with path.open("wb") as stream:
        stream.truncate(reading.MOST_BYTES + 1)
    with pytest.raises(InvalidInputError, match="the most is 67108864"):
        codec.load(Profile, path)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("$.updates[0].tensor_degree", 0),
        ("$.whole[0]", {"microbatch": 0}),
        ("$.whole[0]", {"components_s": -1.0}),
        ("$.dispatch_floor_s", -1.0),
        ("$.graph.components[1].split", {"max_degree": 0}),
        ("$.graph.components[0].num_parameter_tensors", 2**31),
        ("$.graph.input_bytes_per_sample", -1.0),
        ("$.timings[0].forward", {"median": -1.0}),
        ("$.timings[0]", {"microbatch": 0}),
        ("$.global_batch", 0),
    ],
)
def test_numbers_that_no_profile_holds_are_named_with_their_place(path, value, tmp_path):
    data = codec.document(nouns.profile())
    keys = [int(k) if k.isdigit() else k for k in path[2:].replace("[", ".").replace("]", "").split(".")]
    parent = reach(data, tuple(keys[:-1]))
    parent[keys[-1]] = {**parent[keys[-1]], **value} if isinstance(value, dict) else value
    (tmp_path / "bad.json").write_text(json.dumps(data))
    with pytest.raises(InvalidInputError) as caught:
        codec.load(Profile, tmp_path / "bad.json")
    assert f"(at {path}" in str(caught.value)


@pytest.mark.parametrize("how", ["flag", "variable", "file", "table"])
def test_a_document_is_printed_wherever_json_is_asked_for(how, place, capsys, monkeypatch):
    capsys.readouterr()
    if how == "variable":
        monkeypatch.setenv("ASA_JSON", "1")
    elif how == "file":
        Path("asa.toml").write_text("json = true\n")
    elif how == "table":
        Path("asa.toml").write_text("json = false\n[plan]\njson = true\n")
    more = ["--json"] if how == "flag" else []
    assert entry.run(["plan", *more]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "plan"
    assert entry.run(["plan", "--gpus", "0", *more]) == 2
    assert json.loads(capsys.readouterr().out)["exit_code"] == 2, "an error is a document, too"
    assert entry.run(["plan", "--help"]) == 0
    assert "--frontier" in capsys.readouterr().out, "help is for people"


def test_an_interrupted_run_says_so_in_its_result():
    run = pytest.importorskip("asa.executor.running.run")
    seen: dict[str, Any] = {}

    class Log:
        checkpoint = None

        def finish(self, **what: Any) -> dict[str, Any]:
            seen.update(what)
            return seen

    def interrupted() -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run._run_and_log(Log(), interrupted)
    assert seen["exit_code"] == 130
