"""Measured iterations: bad tables, scores and fit worked by hand, what the law reaches on rows it has not seen."""

from __future__ import annotations

import dataclasses
import doctest
from pathlib import Path

import numpy as np
import pytest

from asa.cost.machine import presets
from asa.errors import InvalidInputError
from benchmarks.truth import replay, scaling, vtrain
from benchmarks.truth.fit import least_squares
from benchmarks.truth.law import PARAMETERS, Law

TRUTH = Path(__file__).resolve().parent.parent.parent / "shared" / "truth"
here = pytest.mark.skipif(not TRUTH.is_dir(), reason="the public measurements (../shared/truth) are not here")

HEADER = (
    "gpus,global_batch,micro_batch,hidden_size,attention_heads,layers,sequence_length,tensor,data,pipeline,iteration_ms"
)
ROWS = [
    "2,16,8,1024,16,24,1024,1,1,2,372.16",
    "8,32,4,1024,16,24,1024,2,2,2,219.73",
    "8,8,2,2048,16,20,1024,4,1,2,160.6",
]


def table(*rows: str) -> str:
    return "\n".join([HEADER, *rows]) + "\n"


def test_a_table_is_read_by_columns():
    made = vtrain.parse(table(*ROWS), source="it")
    assert len(made) == 3
    assert made.seconds.tolist() == pytest.approx([0.37216, 0.21973, 0.1606])
    assert made.microbatches.tolist() == [2, 4, 4]
    assert len(set(made.group.tolist())) == 3


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", "line 1"),
        ("gpus,iteration_ms\n1,2\n", "line 1"),
        (table(), "line 2"),
        (table(ROWS[0], ROWS[1][:-16]), "line 3"),
        (table(ROWS[0].replace("372.16", "nan")), "line 2"),
        (table(ROWS[0].replace("372.16", "0")), "line 2"),
        (table(ROWS[0].replace("1024", "1024.5", 1)), "line 2"),
        (table(ROWS[0].replace("2,16,8", "4,16,8")), "line 2"),
        (table(ROWS[0].replace("2,16,8", "2,15,8")), "line 2"),
        (table(ROWS[0].replace(",24,", ",23,")), "line 2"),
    ],
)
def test_a_bad_table_is_refused_with_the_line(text, where):
    with pytest.raises(InvalidInputError) as caught:
        vtrain.parse(text, source="it")
    assert caught.value.exit_code == 3
    assert caught.value.where == where


def test_scores_by_hand():
    rows = [f"2,16,{b},1024,16,24,1024,1,{d},{p},{ms}" for b, d, p, ms in ((1, 2, 1, 10), (2, 1, 2, 20), (4, 1, 2, 40))]
    made = vtrain.parse(table(*rows, "4,16,1,1024,16,24,1024,1,4,1,5"), source="it")
    everything = np.ones(4, dtype=bool)
    right = vtrain.score(made, made.seconds, everything)
    assert (right.rank, right.regret, right.error, right.groups, right.rows) == (1.0, 0.0, 0.0, 1, 4)
    wrong = vtrain.score(made, np.array([0.04, 0.01, 0.02, 0.01]), everything)
    assert wrong.rank == pytest.approx(-0.5)
    assert wrong.regret == wrong.worst_regret == pytest.approx(1.0)
    assert wrong.error == pytest.approx((3 + 0.5 + 0.5 + 1) / 4)
    assert vtrain.spearman(np.array([1.0, 1.0, 2.0]), np.array([5.0, 5.0, 9.0])) == pytest.approx(1.0)
    assert vtrain.spearman(np.ones(3), np.arange(3.0)) == 0.0
    with pytest.raises(InvalidInputError, match="no group"):
        vtrain.score(made, made.seconds, made.gpus == 4)


def test_examples_in_docstrings_hold():
    assert doctest.testmod(vtrain).failed == 0


def test_least_squares_finds_a_known_curve_and_keeps_to_the_prior_where_nothing_is_said():
    x = np.linspace(0, 1, 30)
    target = np.exp(1.5 * x) + 0.25

    def residuals(p: np.ndarray) -> np.ndarray:
        return np.exp(p[0] * x) + p[1] - target

    found = least_squares(residuals, np.zeros(3), prior=1e-4)
    assert found[:2] == pytest.approx([1.5, 0.25], abs=1e-4)
    assert found[2] == 0.0


def made_up() -> tuple[vtrain.Iterations, np.ndarray]:
    """A table whose times are those of the law itself with other parameters than the guesses."""
    rows = [
        f"{t * d * p},{m * b * d},{b},{h},16,{n},1024,{t},{d},{p},1"
        for h in (1024, 2048) for n in (12, 24) for t in (1, 2, 4) for d in (1, 2) for p in (1, 2) for b in (1, 4)
        for m in (2, 8) if 1 < t * d * p <= 8
    ]  # fmt: skip
    given = vtrain.parse(table(*rows), source="it")
    law = Law(given, presets.load("a100-nvlink-8"), cells=False)
    hidden = np.random.default_rng(1).normal(size=len(PARAMETERS))
    times = law.seconds(hidden)
    lines = [row.rsplit(",", 1)[0] + f",{1e3 * t}" for row, t in zip(rows, times, strict=True)]
    return vtrain.parse(table(*lines), source="it"), hidden


def test_the_law_explains_what_it_made_and_carries_it_to_more_gpus():
    given, hidden = made_up()
    law = Law(given, presets.load("a100-nvlink-8"), cells=False)
    found = law.fit(given.gpus <= 4)
    predicted = law.seconds(found)
    assert np.abs(predicted / given.seconds - 1).max() < 0.1
    assert set(law.named(found)) == set(PARAMETERS)
    assert law.named(hidden)["efficiency"] < 1
    assert replay.more_gpus(given, presets.load("a100-nvlink-8"), cells=False).error < 0.05


def test_the_layers_that_are_missed_by_most_are_named():
    given, _ = made_up()
    odd = (given.hidden_size == 2048) & (given.micro_batch == 4) & (given.tensor == 2)
    slower = dataclasses.replace(given, seconds=np.where(odd, 3 * given.seconds, given.seconds))
    said = replay.surprises(slower, presets.load("a100-nvlink-8"), most=1)
    assert said[0].startswith("hidden 2048, microbatch 4, tensor 2: predicted -")


def test_factors_of_layers_that_were_never_seen_stay_at_one():
    given, _ = made_up()
    law = Law(given, presets.load("a100-nvlink-8"))
    found = law.fit((given.hidden_size == 1024) & (given.tensor == 1))
    factors = law._factors(found)
    assert factors[(given.hidden_size == 2048) & (given.tensor == 1)].tolist() == pytest.approx(
        [1.0] * int(((given.hidden_size == 2048) & (given.tensor == 1)).sum())
    )


@here
@pytest.mark.parametrize(
    ("split", "rank", "regret", "error"),
    [
        (replay.more_gpus, 0.94, 0.05, 0.10),
        (replay.other_sizes, 0.93, 0.03, 0.15),
        (replay.unseen_groups, 0.95, 0.03, 0.06),
    ],
)
def test_the_law_on_measured_iterations_it_has_not_seen(split, rank, regret, error):
    found = split(vtrain.load(TRUTH / "vtrain_iterations.csv"), presets.load("a100-nvlink-8"))
    assert found.rank >= rank
    assert found.regret <= regret
    assert found.error <= error


@here
def test_the_published_table_has_the_rows_it_says():
    given = vtrain.load(TRUTH / "vtrain_iterations.csv")
    assert len(given) == 750
    assert replay.unseen_groups(given, presets.load("a100-nvlink-8")).groups == 68


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("# nothing\n", "line 1"),
        ("gpu,model\n3090,vgg16\n", "line 1"),
        ("# unit\ngpu,model,bs,n1,n2,n4,n8\n3090,vgg16,64,1,2,nan,4\n", "line 3"),
        ("gpu,model,bs,n1,n2,n4,n8\n3090,vgg16,64,1,2\n", "line 2"),
    ],
)
def test_a_bad_scaling_table_is_refused_with_the_line(tmp_path, text, where):
    path = tmp_path / "scaling_pcie.csv"
    path.write_text(text)
    with pytest.raises(InvalidInputError) as caught:
        scaling.read_pcie(path)
    assert caught.value.where == where


@here
def test_published_rows_of_one_run_are_joined():
    rows = {(r.gpu, r.model, r.precision, r.batch): r for r in scaling.read_nvlink(TRUTH / "scaling.csv")}
    assert rows["V100", "resnet101", "fp32", 32].efficiency(8) == pytest.approx(1430.2 / 197.5 / 8)
    cards = {(r.gpu, r.model, r.batch): r for r in scaling.read_pcie(TRUTH / "scaling_pcie.csv")}
    assert cards["4090", "resnet50", 64].rates == {1: 1688.03, 2: 2794.01, 4: 4233.10}
