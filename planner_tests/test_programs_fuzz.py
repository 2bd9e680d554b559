"""A few of the programs that ``benchmarks/fuzz_programs.py`` draws by the hundred."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tables import some

from asa.sharding.gradients import replicated

ROOT = Path(__file__).resolve().parent.parent


def script() -> Any:
    spec = importlib.util.spec_from_file_location("fuzz_programs_script", ROOT / "benchmarks" / "fuzz_programs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("ranks", "count"), some([(2, 5), (2, 12), (3, 1), (3, 3)], [(2, 5), (3, 1)]))
def test_no_program_is_other_than_alone_without_a_word(ranks: int, count: int) -> None:
    fuzz = script()
    draws = [fuzz.drawn(5, number, ranks) for number in range(count)]
    for draw, found in zip(draws, fuzz.judged_all(draws, ranks), strict=True):
        assert found["verdict"] in ("right", "refused", "warned"), (draw, found)


def test_the_record_has_500_programs_and_none_that_differs_in_silence() -> None:
    record = json.loads((ROOT / "benchmarks" / "records" / "fuzz_programs.json").read_text())
    assert len(record["draws"]) >= 500
    assert set(record["verdicts"]) <= {"right", "warned", "refused"}
    assert sum(record["verdicts"].values()) == len(record["draws"])
    assert {d["verdict"] for d in record["draws"]} == set(record["verdicts"])


def test_a_number_that_may_be_that_of_samples_is_named() -> None:
    """The hardest half of two samples, of which each of two ranks has one."""
    fuzz = script()
    draw = replace(fuzz.drawn(17, 17, 2), layers=("linear",), data=("replicate",), optimizer="plain", loop="usual")
    assert (draw.loss, draw.batch) == ("hardest", 2)
    assert fuzz.judged(draw, 2)["verdict"] == "warned"


def test_gradients_that_are_not_averaged_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fuzz = script()
    draw = replace(
        fuzz.drawn(0, 1, 2), layers=("linear",), layout=((2, 1),), data=("replicate",), heads=1, loss="mean",
        loop="usual", tokens=False, optimizer="sgd",
    )  # fmt: skip
    monkeypatch.setattr(replicated, "sender", lambda _axis: lambda _bucket: lambda: None)
    found = fuzz.judged(draw, 2)
    assert found["distance"] > 1e-3
    assert "weights that all ranks hold alike are no longer the same" in found["said"][0]


def test_only_what_names_a_difference_excuses_it() -> None:
    fuzz = script()
    draw = replace(fuzz.drawn(0, 1, 2), layers=("linear", "mixing"), loss="spread", loop="chunks")
    assert (
        fuzz.without(draw, ["whether the loss is a mean over samples was not checked", "gradients are dense"]) is None
    )
    rest = fuzz.without(
        draw, ["the loss is not a mean over samples: ...", "is called with pieces of a batch (1 of ...)"]
    )
    assert (rest.loss, rest.loop, rest.layers) == ("mean", "usual", draw.layers)
