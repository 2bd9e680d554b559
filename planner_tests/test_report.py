"""Nouns as tables, figures and a page: what is shown is what the noun says, and nothing is lost on the way."""

from __future__ import annotations

import csv
import doctest
import itertools
import math
import random
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import nouns
import pytest
from rich.table import Table

from asa.cli.settings import arguments
from asa.cli.verbs import verbs
from asa.ir import codec
from asa.ir.bench import Bench, BenchResult
from asa.ir.equivalence import Equivalence, TensorError
from asa.ir.intervals import median_interval
from asa.ir.profile import Profile
from asa.planner.questions.explain import Difference, Explanation, Term
from asa.report import units
from asa.report.figures import charts, drawing
from asa.report.pages import bench as page
from asa.report.text import (
    bench,
    bench_screen,
    checks,
    cluster,
    explain,
    plan,
    profile,
    tables,
    training,
    verdicts,
    verify,
)  # fmt: skip

FIGURES = (
    "training_time", "predicted_measured", "speedup", "compute_communication", "accuracy", "accuracy_time", "loss",
    "memory",
    "assignment",
)  # fmt: skip


@pytest.mark.parametrize("module", [units, tables, cluster, profile])
def test_examples_in_docstrings_hold(module):
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0.0, "0 s"), (9.995e-4, "1000 us"), (0.0999, "99.9 ms"), (599.0, "599 s")]
)
def test_seconds(value, text):
    assert units.seconds(value) == text


def test_nothing_has_no_sign():
    terms = [Term(name="boundaries", plan_s=-1e-12, other_s=1e-3)]
    found = Difference(
        other="ddp", plan_s=1.0, other_s=0.9999999, fits=True, why_not="", terms=tuple(terms), changed=()
    )
    text = tables.plain(explain.versus(found), width=120)
    assert re.search(r"boundaries +0 s +1.00 ms +\+1.00 ms", text)
    assert not re.search(r"-0(\.0)? ", text)


def test_a_plan_shows_its_figures_its_groups_and_the_fastest_strategies():
    text = tables.plain(plan.render(nouns.plan(), shares=(0.25, 0.25, 0.5)), width=80)
    assert re.search(r"^Plan +.* a step \(90 %: .*\), .* samples/s, .* a rank$", text, re.MULTILINE)
    assert re.search(r"^Against .* (faster|slower) than|as fast as", text, re.MULTILINE)
    assert re.search(r"^Proof +(optimal|feasible)", text, re.MULTILINE)
    assert "stem .. body.0 (2)" in text
    assert "tensor x2" in text
    assert "50 % ######" in text
    assert text.index("\nthis plan") < text.index("\nddp "), "fastest first"
    assert "note: a note" in text
    assert all(len(row) <= 80 for row in text.splitlines()[1:])


def test_strategies_that_do_not_fit_are_named_and_explained_when_asked():
    made = nouns.plan()
    short, whole = (tables.plain(plan.render(made, verbose=v), width=200) for v in (False, True))
    large = [b.name for b in made.baselines if not b.fits]
    assert large
    assert "16 GiB of 8" not in short
    assert all(name in short for name in large)
    assert "16 GiB of 8" in whole, "a baseline that does not fit says why"
    assert "certificate: optimal" in whole


def test_what_only_runs_on_request_is_not_said_not_to_fit():
    made = nouns.plan()
    asked = replace(made.baselines[0], name="ps_sync", fits=False, why_not="not chosen: it runs where it is asked for")
    text = tables.plain(plan.render(replace(made, baselines=(asked,)), verbose=True), width=200)
    assert re.search(r"^ps_sync .*iB  not chosen: it runs where", text, re.MULTILINE)


def test_strategies_that_break_the_pins_are_not_called_too_large():
    made = nouns.plan()
    fits = replace(made.baselines[0], name="ddp", fits=True, why_not="", step_time_s=1.0)
    pinned = replace(fits, fits=False, why_not="not allowed by the pins")
    large = replace(pinned, name="single", why_not="16 GiB of 8")
    text = tables.plain(plan.render(replace(made, baselines=(pinned, large))), width=200)
    assert "no whole strategy keeps to the pins" in text
    assert re.search("not allowed by the pins: ddp; too large: single", text)
    text = tables.plain(plan.render(replace(made, baselines=(pinned, replace(fits, name="zero1")))), width=200)
    assert "ddp is not allowed by the pins" in text


def test_what_cannot_be_run_is_not_said_to_be_too_large():
    """DDP with fewer samples than ranks has no step time; the reason is not memory."""
    made = nouns.plan()
    fits = replace(made.baselines[0], name="tensor", fits=True, why_not="", step_time_s=1.0)
    ddp = replace(fits, name="ddp", fits=False, why_not="body needs 1 sample per rank, gets 0.5", step_time_s=None)
    text = tables.plain(plan.render(replace(made, baselines=(fits, ddp))), width=200)
    assert "ddp is not possible here" in text
    assert "does not fit" not in text
    large = replace(ddp, why_not="16 GiB of 8", step_time_s=2.0)
    assert "ddp does not fit" in tables.plain(plan.render(replace(made, baselines=(fits, large))), width=200)


def test_a_plan_explained_for_less_memory_than_it_needs_is_said_not_to_fit():
    causes = {"components": (), "overlap_s": 0.0, "hidden_s": 0.0, "peak_component": "body", "binding": "memory"}
    small = Explanation(peak_bytes=2.0**30, capacity_bytes=2.0**20, **causes)
    text = tables.plain(explain.render(small), width=120)
    assert "1.00 GiB, a device has 1.00 MiB at body" in text
    assert "the plan does not fit" in text
    assert "may be faster" not in text
    roomy = tables.plain(explain.render(replace(small, capacity_bytes=2.0**31)), width=120)
    assert "1.00 GiB of 2.00 GiB at body" in roomy
    assert "does not fit" not in roomy


def test_strategies_that_are_one_and_the_same_share_a_row():
    made = nouns.plan()
    first = next(b for b in made.baselines if b.fits)
    twin = replace(first, name="hybrid:twin")
    text = tables.plain(plan.render(replace(made, baselines=(*made.baselines, twin))), width=120)
    assert f"{first.name} = hybrid:twin" in text


def test_the_best_uniform_plan_is_not_said_to_recompute_what_fits():
    made = nouns.plan()
    best = replace(next(b for b in made.baselines if b.fits), name="hybrid+ckpt")
    text = tables.plain(plan.render(replace(made, baselines=(best,))), width=200)
    assert "hybrid+ckpt: computed again only where memory requires it" in text
    assert "activations are computed again" not in text


def test_best_plans_show_their_times_however_long_their_assignments():
    best = nouns.plan()
    parts = tuple(replace(best.components[i % 3], name=f"block.{i}") for i in range(30))
    second = replace(best, components=parts, schedule="1f1b", num_microbatches=4)
    text = tables.plain([plan.several([best, second])], width=100)
    assert re.search(r"^1 +500 ms +-", text, re.MULTILINE)
    assert re.search(r"^2 +500 ms +\+0.0 % .* 1f1b x4 +block.0 ", text, re.MULTILINE)
    assert "block.29: tensor x2" in re.sub(r"\s+", " ", text), "folded, not cut off"


def test_a_profile_shows_its_check_and_what_was_skipped():
    text = tables.plain(profile.render(nouns.profile(), verbose=True), width=160)
    assert "components add up to 147 ms, the whole model took 150 ms (-2.0 %)" in text
    assert "skipped, unmeasured: microbatch 1 of head" in text
    assert re.search(r"^stem .*whole$", text, re.MULTILINE), "a component that does not split"


def test_bus_bandwidth_is_nccl_tests():
    rows = cluster.rows(nouns.cluster(4).levels[0].tables[2])
    assert rows[-1][2:] == ("", "64.0 MiB", "100 ms", "0.671", "1.01")


def test_an_epoch_line_says_what_came_of_it():
    said = training.epoch_line(nouns.epoch())
    assert said == "epoch 2: loss 2.000, validation loss 1.500, accuracy 50.0 %, 12.0 s, 16.0/s\n    nothing to gain"
    words = "predicted 0.0105 s/step, measured 0.041 s (-74.3 %); solved again: this plan stays the best"
    long = training.epoch_line(replace(nouns.epoch(), verdict=replace(nouns.epoch().verdict, reason=words)))
    assert max(map(len, long.splitlines())) <= 80
    assert " ".join(long.split()).endswith(words)


def test_samples_a_second_of_an_epoch_include_the_wait_for_data():
    slow = replace(nouns.epoch().measurements, data_wait_s=1.5)
    assert training.epoch_line(replace(nouns.epoch(), measurements=slow)).splitlines()[0].endswith("12.0 s, 4.00/s")


def test_a_cross_comes_with_its_repair():
    text = tables.plain(
        checks.render(
            [
                checks.Check(name="a", ok=True, detail="fine"),
                checks.Check(name="b", ok=False, detail="gone", fix="do this"),
            ]
        )
    )
    assert text.startswith("missing: b\n")
    assert "✓ a  fine" in text
    assert "✗ b  gone; do this" in text


def equivalence(*, equivalent: bool) -> Equivalence:
    tensors = tuple(TensorError(name=f"w{i}", error=i * 1e-8, floor=1e-9, allowed=1e-6) for i in range(1, 9))
    return Equivalence(
        equivalent=equivalent,
        max_rel_error=8e-8,
        noise_floor=1e-9,
        worst_tensor="w8",
        allowed=1e-6,
        loss_error=1e-9,
        gradient_error_fp32=2e-6,
        worst_gradient="w3",
        gradient_allowed_fp32=1e-4,
        dtype="float64",
        learning_rate=0.05,
        steps=5,
        samples=8,
        ranks=2,
        batch_norm="exact",
        plan_fingerprint="f00d",
        tensors=tensors,
    )


def test_a_verdict_names_the_worst_tensor_and_the_floor():
    text = tables.plain(verify.render(equivalence(equivalent=True)), width=200)
    assert "w8 differs by 8.00e-08, allowed 1.00e-06" in text
    assert "float64" in text
    assert "w1 " not in text, "only the worst are listed"
    assert "NOT equivalent" in tables.plain(verify.render(equivalence(equivalent=False)), width=200)


def test_every_cell_of_a_comparison_is_shown():
    text = tables.plain(bench_screen.render(nouns.bench(), verbose=True), width=200)
    for strategy in ("single", "ddp", "tensor", "hybrid", "asa", "fsdp"):
        assert re.search(rf"^{strategy} ", text, re.MULTILINE)
    assert "fsdp was not measured: 1.2 GiB of 1.0 GiB <too much>" in text
    assert "A/A, ddp against itself: 1.001" in text
    assert "time of asa over ddp: 0.810 (95 %: 0.790 to 0.830, 30 pairs): asa is faster" in text


SCREENS = {
    "bench": lambda: bench_screen.render(nouns.bench()),
    "profile": lambda: profile.render(nouns.profile()),
    "plan": lambda: plan.render(nouns.plan()),
    **{path.name: (lambda path=path: profile.render(codec.load(Profile, path))) for path in
       sorted((Path(__file__).parent.parent / "profiles").glob("*.cpu.fp32.json"))},
}  # fmt: skip


@pytest.mark.parametrize("screen", SCREENS)
def test_tables_of_a_screen_fit_eighty_columns(screen):
    """Wider, a cell would be folded: a table takes the lines of its rows and one of headings, at any width."""
    shown = SCREENS[screen]()
    found = [part for part in shown if isinstance(part, Table)]
    assert found
    for made in found:
        assert len(tables.plain([made], width=80).splitlines()) == made.row_count + 1


def test_a_comparison_begins_with_the_fastest_and_what_it_was_held_against():
    made = nouns.bench()
    calm = replace(made, comparisons=tuple(replace(c, others_cores=0.0) for c in made.comparisons))
    said = bench_screen.standing(calm, "tiny")
    assert said[0].startswith("Fastest  asa by median, 500 ms a step (80 %: 450 ms to 550 ms), 128/s")
    assert said[1] == "Against  19.0 % faster than ddp (95 %: 17.0 to 21.0 %, 30 pairs)"
    assert said[2].startswith("Promise  5 of 5 steps within 10 % of their prediction (-5.0 % to +7.0 %)")
    assert said[3].startswith("Noise    ddp against itself: 0.980 to 1.020 in 30 pairs")
    loud = replace(made, comparisons=tuple(replace(c, others_cores=1e3) for c in made.comparisons))
    said = bench_screen.standing(loud, "tiny")
    assert said[1].endswith("no verdict")
    assert said[-1].startswith("Doubt    other processes")


def test_a_comparison_shows_how_gpus_were_used():
    bench = nouns.bench()
    assert not any("busy" in line for line in bench_screen.standing(bench, "tiny"))  # CPUs report no energy
    used = replace(bench.results[0], utilisation=0.931, energy_j=12.34, clock_mhz=1410.0, throttled=("power",))
    said = bench_screen.standing(replace(bench, results=(used, *bench.results[1:])), "tiny")
    (line,) = [text for text in said if "busy" in text]
    assert line == f"Devices  {used.strategy}: 93.1 % busy, 12.3 J a step, 1410 MHz, clocks reduced: power"


def test_a_screen_of_few_or_slower_pairs_says_so():
    noise = pairs("asa", "asa", 0.99, 1.01)
    assert (
        verdicts.against(pairs("asa", "ddp", 1.1, 1.2), noise)
        == "15.0 % slower than ddp (95 %: 10.0 to 20.0 %, 9 pairs)"
    )
    few = verdicts.against(pairs("asa", "ddp", 0.5, 0.6, 5), noise)
    assert few == "ddp: +45.0 % (all: 40.0 to 50.0 %, 5 pairs): too few pairs to tell"
    assert verdicts.against(pairs("asa", "ddp", 0.98, 1.0), noise).endswith("not told apart from noise")
    other = [verdicts.against(pairs("ddp", "fsdp", *ends), noise) for ends in ((0.7, 0.8), (0.98, 1.0))]
    assert other[0].startswith("ddp is 25.0 % faster than fsdp ("), "asa alone needs no name"
    assert other[1].startswith("ddp against fsdp: +1.0 % (")


def pairs(left: str, right: str, low: float, high: float, n: int = 9, **others: float) -> nouns.b.Comparison:
    return nouns.b.Comparison(model="m", left=left, right=right, pairs=n, ratio=(low + high) / 2, low=low, high=high,
                              **others)  # fmt: skip


@pytest.mark.parametrize(
    ("low", "high", "noise", "said"),
    [
        (0.97, 1.01, (0.99, 1.01), "not told apart from noise"),
        (0.968, 0.987, (0.968, 1.043), "not told apart from noise"),
        (0.736, 0.772, (0.968, 1.043), "asa is faster"),
        (1.10, 1.20, (0.968, 1.043), "ddp is faster"),
        (1.01, 1.20, (0.968, 1.043), "not told apart from noise"),
        (0.90, 0.95, (1.02, 1.10), "asa is faster"),
        (1.01, 1.015, (1.02, 1.10), "not told apart from noise"),
    ],
)
def test_faster_is_said_only_outside_the_noise_of_the_same_run(low, high, noise, said):
    assert verdicts.comparison(pairs("asa", "ddp", low, high), pairs("asa", "asa", *noise)).endswith(said)


def test_a_few_pairs_are_shown_without_a_verdict():
    said = verdicts.comparison(pairs("asa", "ddp", 0.5, 0.6, 5), pairs("asa", "asa", 0.99, 1.01, 5))
    assert "all: 0.500 to 0.600, 5 pairs" in said
    assert said.endswith("too few pairs to tell")


def test_a_busy_machine_is_named_and_no_verdict_given():
    made = nouns.bench()
    loud = replace(made, comparisons=tuple(replace(c, others_cores=1e3) for c in made.comparisons))
    calm = replace(made, comparisons=tuple(replace(c, others_cores=0.0) for c in made.comparisons))
    model = made.settings.models[0]
    assert any("is faster" in text for text in bench.sentences(calm, model))
    said = bench.sentences(loud, model)
    assert not any("is faster" in text for text in said)
    assert "no verdict" in said[-1]


def test_no_verdict_without_a_strategy_against_itself():
    assert "is faster" not in verdicts.comparison(pairs("asa", "ddp", 0.5, 0.6), None)


def test_the_sentence_of_the_page_ranks_only_what_is_told_apart():
    made = nouns.bench()
    calm = replace(made, comparisons=tuple(replace(c, others_cores=0.0) for c in made.comparisons))
    said = bench.story(calm, "tiny")
    assert said.startswith(
        "tiny: asa has the lowest median, 500 ms a step; 1.24 times as fast as plain data parallelism"
    )
    assert "one device" not in said, "they were never paired"
    faster = tuple(replace(r, step_time_s=nouns.stat(0.3, 30)) if r.strategy == "tensor" else r for r in calm.results)
    assert bench.story(replace(calm, results=faster), "tiny") == "tiny: tensor has the lowest median, 300 ms a step."
    loud = replace(made, comparisons=tuple(replace(c, others_cores=1e3) for c in made.comparisons))
    assert "times as fast" not in bench.story(loud, "tiny")
    assert "Other processes kept 1000.0 of " in bench.story(loud, "tiny"), "why there is no verdict"


def test_communication_that_noise_hides_is_not_drawn():
    alone = replace(nouns.bench().results[0], ranks=1, step_time_s=nouns.Stat(median=1.0, p10=1.0, p90=1.0, n=9))
    cell = replace(alone, ranks=2, communication_s=0.1, communication_low_s=0.05, communication_high_s=0.15,
                   step_time_s=nouns.Stat(median=0.6, p10=0.6, p90=0.6, n=9))  # fmt: skip
    assert bench.clear_communication(cell, alone)
    assert not bench.clear_communication(replace(cell, communication_low_s=-0.1), alone), "the interval is too wide"
    assert not bench.clear_communication(replace(cell, communication_s=0.3), alone), "no rank computes that fast"
    assert bench.exposed(cell) == "17 (8 to 25) %"
    assert bench.costs(cell, 10, alone)[3] == "17 (8 to 25) %"
    assert bench.costs(replace(cell, communication_s=0.3), 10, alone)[3] == "not told apart"


def test_accuracy_near_chance_gives_way_to_the_loss():
    point = nouns.b.AccuracyPoint(
        epoch=0.5, seconds=1.0, train_loss=4.6, validation_loss=4.61, validation_accuracy=0.012
    )
    cell = replace(nouns.bench().results[0], accuracy=(point,))
    assert bench.costs(cell, 100)[-1] == "loss 4.61 after 0.5 epochs"
    assert bench.costs(replace(cell, accuracy=(replace(point, validation_accuracy=0.3),)), 100)[-1].startswith("30.0 %")


@pytest.mark.parametrize("n", [6, 8, 9, 12, 30])
def test_intervals_of_a_median_cover_what_they_say(n):
    rng, held, trials = random.Random(n), 0, 3000
    for _ in range(trials):
        low, high = median_interval([rng.expovariate(1.0) for _ in range(n)])
        held += low <= math.log(2) <= high
    assert held / trials >= 0.94
    assert n < 9 or median_interval(range(n)) > (0, n - 1), "and are narrower than all there is"


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    page.write(nouns.bench(), folder)
    return folder


def test_a_comparison_becomes_all_its_files(written):
    names = {str(p.relative_to(written)) for p in written.rglob("*") if p.is_file()}
    figures = {f"figures/{name}.{kind}" for name in FIGURES for kind in ("svg", "pdf", "png", "csv")}
    assert names == {"report.html", "bench.json", "results.csv"} | figures
    assert codec.load(Bench, written / "bench.json") == nouns.bench()
    assert (written / "figures/speedup.pdf").read_bytes().startswith(b"%PDF")


def test_a_price_adds_the_cost_of_an_epoch_to_the_screen_the_page_and_the_table():
    plain = nouns.bench()
    made = replace(plain, settings=replace(plain.settings, price=2.5, samples_per_epoch=6400))
    text = tables.plain(bench_screen.render(made), width=80)
    assert "an epoch of 6400 samples at 2.5 for a device and hour" in text
    table = text.partition("an epoch of")[2]
    alone, chosen = (re.search(rf"^{s} .*$", table, re.M)[0].split() for s in ("single", "asa"))
    assert alone == ["single", "1", "100", "s", f"{2.5 * 100 / 3600:.4g}"]
    assert chosen == ["asa", "2", "50.0", "s", f"{2.5 * 2 * 50 / 3600:.4g}"]
    assert all(len(row) <= 80 for row in text.splitlines())
    assert "tiny: an epoch of 6400 samples" in page.html(made, [(c, "<svg></svg>") for c in charts.charts(made)])
    row = dict(zip(bench.CSV_COLUMNS, bench.csv_rows(made)[0], strict=True))
    assert (row["epoch_s"], row["cost_per_epoch"]) == (100.0, 2.5 * 100 / 3600)
    assert "an epoch of" not in tables.plain(bench_screen.render(plain), width=80)
    given = arguments(next(v for v in verbs("bench") if v.name == "bench"), ["--price", "2.5"])
    assert given.price == 2.5


def test_models_of_other_batches_have_their_own_epochs_and_headlines():
    plain = nouns.bench()
    small = [replace(r, global_batch=16, samples_per_s=16 / r.step_time_s.median / 2) for r in plain.of("small")]
    made = replace(plain, results=(*plain.of("tiny"), *small))
    chart = next(c for c in charts.charts(made) if c.name == "training_time")
    found = {row[:2]: dict(zip(chart.columns, row, strict=True))["epoch_s"] for row in chart.rows}
    table = {(row[0], row[1]): row[bench.CSV_COLUMNS.index("epoch_s")] for row in bench.csv_rows(made)}
    assert found == table
    assert found["small", "asa"] == pytest.approx(2 * 1000 / 16 * 0.5), "half of that is waiting for data"
    assert "batch 64" in bench_screen.headline(made, "tiny")
    assert "batch 16" in bench_screen.headline(made, "small")


def test_results_csv_has_every_cell_in_plain_numbers(written):
    with (written / "results.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == len(nouns.bench().results)
    asa = next(r for r in rows if r["model"] == "tiny" and r["strategy"] == "asa")
    assert float(asa["step_median_s"]) == 0.5
    assert (float(asa["epochs_trained"]), float(asa["validation_accuracy"])) == (3.0, 0.52), (
        "an accuracy has its epochs"
    )
    assert rows[-1]["step_median_s"] == ""
    assert rows[-1]["why_not"].endswith("<too much>")


def test_figure_data_can_be_plotted_again():
    made = {c.name: c for c in charts.charts(nouns.bench())}
    assert tuple(made) == FIGURES
    for chart in made.values():
        assert chart.rows
        assert all(len(row) == len(chart.columns) for row in chart.rows)
    speed = [r for r in made["speedup"].rows if r[0] == "tiny" and r[1] == "asa" and r[2] == 2]
    assert speed[0][5] == pytest.approx(1.9)
    assert speed[0][6] == pytest.approx(1 / 0.62)
    assert [r[3] for r in made["assignment"].rows if r[0] == "tiny" and r[1] == "asa"] == ["stem", "body.0", "head"]


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        found = dict(attrs)
        self.ids += [found["id"]] if found.get("id") else []
        self.links += [v for k, v in attrs if k in ("src", "href", "xlink:href") and v]


def test_the_page_is_self_contained(written):
    text = (written / "report.html").read_text()
    parsed = _Page()
    parsed.feed(text)
    assert parsed.open.count("svg") == len(FIGURES)
    assert len(parsed.ids) == len(set(parsed.ids)), "figures share no ids"
    assert all(link.startswith("#") for link in parsed.links), "nothing is fetched"
    assert "<script" not in text
    assert "@import" not in text
    assert "1.2 GiB of 1.0 GiB &lt;too much&gt;" in text
    used = set(re.findall(r"url\(#([^)]+)\)", text)) | {link[1:] for link in parsed.links}
    assert used <= set(parsed.ids), "every reference inside a figure finds its target"
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)


def test_the_page_can_be_heard_and_walked_through(written):
    text = (written / "report.html").read_text()
    assert len(re.findall(r'<svg role="img" aria-labelledby="[^"]+" aria-describedby="[^"]+"', text)) == len(FIGURES)
    assert text.count("<table>") == text.count("<caption>") == text.count('role="region"')
    values = re.findall(r"<details><summary>Values</summary>.*?</details>", text)
    assert len(values) == len(FIGURES), "values without a pointer"
    assert all(">0.62<" in found for found in values[:2])
    heads = re.findall(r"<th[ >]", text)
    assert len(heads) == len(re.findall(r'<th scope="(?:col|row)"', text))
    ids = set(re.findall(r'id="([^"]+)"', text))
    for attribute in ("aria-labelledby", "aria-describedby"):
        assert set(re.findall(rf'{attribute}="([^"]+)"', text)) <= ids
    assert text.index('class="first"') < text.index('id="training_time"') < text.index("<table>"), "the story first"
    assert len(text.encode()) < 1_000_000
    assert "prefers-color-scheme: dark" in text


def luminance(colour: str) -> float:
    wide = colour if len(colour) == 7 else "#" + "".join(2 * c for c in colour[1:])
    parts = [int(wide[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_stands_out_from_the_paper_in_both_schemes():
    """Contrast by WCAG 2.1: 4.5 for text."""
    schemes = re.findall(r":root \{([^}]*)\}", page.STYLE)
    assert len(schemes) == 2
    for scheme in schemes:
        colours = dict(re.findall(r"--(\w+): (#[0-9a-f]+)", scheme))
        paper = luminance(colours["paper"])
        for name in ("ink", "soft", "accent"):
            high, low = sorted((luminance(colours[name]), paper), reverse=True)
            assert (high + 0.05) / (low + 0.05) >= 4.5, name


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
@pytest.mark.parametrize("kind", ["pdf", "png"])
def test_a_figure_that_cannot_be_written_is_named(tmp_path: Path, kind: str) -> None:
    chart = charts.memory(nouns.bench())
    (tmp_path / f"{chart.name}.{kind}").symlink_to("/dev/full")
    with pytest.raises(OSError, match=f"No space left on device.*{chart.name}.{kind}"):
        page.draw(chart, tmp_path)


def test_the_same_comparison_gives_the_same_figure(written, tmp_path):
    _, svg = page.draw(charts.memory(nouns.bench()), tmp_path)
    assert (tmp_path / "memory.svg").read_text() == (written / "figures/memory.svg").read_text()
    assert svg.removeprefix("<svg ") in (written / "report.html").read_text()


def test_a_comparison_in_which_nothing_ran_is_still_a_report(tmp_path):
    gone = BenchResult(
        model="tiny",
        strategy="ddp",
        ranks=2,
        global_batch=64,
        step_time_s=None,
        predicted_step_time_s=None,
        why_not="no",
    )
    nothing = replace(nouns.bench(), results=(gone,), scaling=(), comparisons=(), sealed=())
    page.write(nothing, tmp_path)
    assert "ddp was not measured: no" in (tmp_path / "report.html").read_text()


def test_bars_and_lines_tell_their_values_where_a_pointer_rests(tmp_path: Path):
    rows = (("cnn", "ddp", 0.25, 0.2, 0.3, 0.21, 5.0), ("cnn", "a<b", 0.5, 0.4, 0.6, 0.4, 9.0))
    chart = charts.Chart(name="time", title="t", caption="c", columns=("a",) * 7, rows=rows, draw=drawing.training_time)
    paths, svg = page.draw(chart, tmp_path)
    titles = re.findall(r'<g id="time-value-\d+"><title>(.*?)</title>', svg)
    assert "ddp: 0.25 seconds per step" in titles
    assert "a&lt;b: 0.5 seconds per step" in titles
    assert "0.21, 0" in titles, "the diamond of what was predicted"
    assert "<title>ddp: 0.25 seconds per step</title>" in paths[0].read_text()


def test_every_colour_is_seen_on_white_and_belongs_to_one_strategy():
    def lightness(shade: str) -> float:
        parts = [int(shade[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    shades = {name: drawing.colour(name) for name in ("asa", *drawing.KNOWN)}
    assert len(set(shades.values())) == len(shades)
    assert {n: c for n, c in shades.items() if 1.05 / (lightness(c) + 0.05) < 2} == {}


def test_strategies_with_the_same_speed_have_one_line_and_one_name():
    rows = [("tiny", s, n, 1.0, 1.0, float(n), float(n)) for s in ("tensor", "hybrid", "ddp") for n in (1, 2)]
    rows = [(*r[:5], 0.5, 0.5) if r[1] == "ddp" and r[2] == 2 else r for r in rows]
    (axes,) = drawing.speedup(rows).axes
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["perfect", "tensor = hybrid", "ddp"]


def test_a_loss_that_hardly_changes_looks_flat():
    rows = [("tiny", s, e, e, 4.6, 4.6 + 1e-5 * e, 0.01) for s in ("ddp", "asa") for e in (1, 2)]
    (axes,) = drawing.loss(rows).axes
    low, high = axes.get_ylim()
    assert high - low > 0.2
    assert not axes.yaxis.get_major_formatter().get_useOffset()


def test_a_figure_of_which_nothing_is_known_is_left_out_and_an_early_end_is_in_the_first_sentence(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(page, "draw", lambda chart, folder: ([], f"<svg {chart.name} />"))
    made = nouns.bench()
    bare = tuple(replace(r, communication_s=None, accuracy=()) for r in made.results)
    page.write(replace(made, results=bare, notes=("tiny: ended after round 1 of 3",)), tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert "Computation against communication" not in text
    assert "Validation loss" not in text
    assert "Peak memory per device" in text
    first = text[text.index('<p class="first">') :].partition("</p>")[0]
    assert first.endswith("It ended after round 1 of 3.")


def test_a_plan_says_for_what_size_of_input_it_is():
    for shape, words in (((3, 224, 160), "of 224x160, "), ((128,), "of 128 tokens, "), ((1, 1, 4), "of 4 numbers, ")):
        assert words in str(plan.headline(replace(nouns.plan(), input_shape=shape)))


def test_an_emulated_comparison_does_not_look_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "draw", lambda chart, folder: ([], f"<svg {chart.name} />"))
    made = nouns.bench()
    stood_in = replace(made, environment=replace(made.environment, device_name="emulated Test GPU"))
    for b, how in ((made, "measured"), (stood_in, "nothing trained")):
        assert bench_screen.headline(b, "tiny").endswith(f", {how}")
        assert all(("nothing was trained" in c.caption) is b.environment.emulated for c in charts.charts(b))
    page.write(stood_in, tmp_path)
    assert "under every strategy, on emulated devices</h1>" in (tmp_path / "report.html").read_text()


def test_names_that_are_long_or_look_like_formulas_are_drawn_as_they_are(tmp_path):
    name = "csv:a_data_set_of_exactly_46_characters_in_all, b " + "a_folder/" * 20 + r"$x$ $\frac{$.csv"
    rows = tuple((panel, "strategy " * 9, 0.25, 0.2, 0.3, 0.21, 5.0) for panel in (name, f"other, {name}"))
    chart = charts.Chart(name="time", title="t", caption="c", columns=("a",) * 7, rows=rows, draw=drawing.training_time)
    _, svg = page.draw(chart, tmp_path)
    assert r"$\frac{$.csv" in svg
    assert f"<title>{'strategy ' * 9}: 0.25 seconds per step</title>" in svg
    for axes in drawing.training_time(rows).axes:
        texts = [axes.get_title(loc="left"), *(t.get_text() for t in axes.get_yticklabels())]
        assert max(len(line) for text in texts for line in text.split("\n")) <= 46
        assert texts[0].replace("\n", "").endswith(name)
        assert not any(line.startswith(" ") for text in texts for line in text.split("\n"))


def test_many_strategies_beside_one_another_can_be_read():
    rows = [("tiny", s, 0, "head", "replicate", 2, "none", 1, "replicate x2") for s in drawing.KNOWN]
    figure = drawing.assignment(rows)
    figure.draw_without_rendering()
    boxes = [t.get_window_extent() for t in figure.axes[0].get_xticklabels()]
    assert all(a.x1 <= b.x0 for a, b in itertools.pairwise(boxes))


def test_a_figure_of_very_many_values_leaves_them_to_its_file():
    chart = charts.training_time(nouns.bench())
    assert "<details>" in page.figure(chart, "<svg />")
    assert "<details>" not in page.figure(replace(chart, rows=20 * chart.rows), "<svg />")


def test_results_csv_has_how_devices_were_used():
    made = nouns.bench()
    used = replace(made.results[0], utilisation=0.9, mfu=0.4, state_memory_bytes=7, energy_j=12.0, data_wait_s=0.1)
    row = dict(zip(bench.CSV_COLUMNS, bench.csv_rows(replace(made, results=(used,)))[0], strict=True))
    assert [row[n] for n in ("utilisation", "mfu", "state_memory_bytes", "energy_j_per_step", "data_wait_s")] == [
        0.9, 0.4, 7, 12.0, 0.1,
    ]  # fmt: skip


def test_numbers_of_many_digits_have_room_beside_one_another():
    times = [(m, "ddp", 17.2e-4, 15e-4, 19e-4, 16e-4, 1.0) for m in ("a", "b", "c")]
    parts = [(m, "ddp", 4e-4, 13e-4, 0.76, 12e-4, 15e-4) for m in ("a", "b", "c")]
    for figure in (drawing.training_time(times), drawing.compute_communication(parts)):
        figure.draw_without_rendering()
        boxes = [t.get_window_extent() for t in figure.axes[1].get_xticklabels() if t.get_text()]
        assert len(boxes) > 2
        assert all(b.x0 - a.x1 > boxes[0].height for a, b in itertools.pairwise(boxes))
