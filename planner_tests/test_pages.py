"""Pages in a real browser, on a phone and on a desk, by day and by night: nothing cut off, nothing too faint."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import nouns
import pytest

from asa.cli import entry
from asa.ir import codec
from asa.ir.plan import CurvePoint, Plan
from asa.ir.streams import piece
from asa.ir.study import Published, Study, StudyCell, StudyRow
from asa.planner.questions.explain import Difference, Term
from asa.planner.questions.frontier import Frontier, MemoryPoint
from asa.report.figures import charts
from asa.report.figures import plan as plan_drawing
from asa.report.pages import bench as page
from asa.report.pages import plan as plan_page
from asa.report.pages import run as run_page
from asa.report.pages import steps
from asa.report.pages import study as study_page
from asa.report.text import study_values as study_figures
from asa.report.text.story import story

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDTHS = (390, 1280)
SVG = '<svg width="993pt" height="300pt" viewBox="0 0 993 300"><rect width="993" height="300" /></svg>'
"""As wide as three panels."""

PROBE = """
<script>
addEventListener("load", () => {
  const channel = c => { c /= 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
  const light = text => { const [r, g, b] = text.match(/[\\d.]+/g).map(Number);
                          return 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b); };
  const found = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument, root = page.documentElement;
    const paper = light(frame.contentWindow.getComputedStyle(page.body).backgroundColor);
    let least = 99;
    for (const e of page.querySelectorAll("h1, h2, p, td, th, caption, figcaption, li, a, code")) {
      const ink = light(frame.contentWindow.getComputedStyle(e).color);
      least = Math.min(least, (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05));
    }
    const wide = [...page.querySelectorAll("table, svg")].filter(e => !e.closest("[tabindex]"));
    return { width: frame.clientWidth, needs: root.scrollWidth, contrast: least, dark: paper < 0.2,
             figures: page.querySelectorAll("svg").length,
             told: page.querySelectorAll('svg[role="img"][aria-labelledby]').length,
             loose: wide.length, captions: page.querySelectorAll("table:not(:has(caption))").length,
             dead: [...page.querySelectorAll('nav a')].filter(a => !page.querySelector(a.hash)).length };
  });
  document.body.innerHTML = "<pre id=found>" + JSON.stringify(found) + "</pre>";
});
</script>
"""


def bench_page() -> str:
    made = nouns.bench()
    return page.html(made, [(c, SVG) for c in charts.charts(made)])


def a_study() -> Study:
    made = nouns.bench()
    rows = []
    for r in made.results:
        cell = StudyCell(
            model=r.model, data="digits", input_shape=(3, 32, 32), gpus=2, global_batch=64, strategy=r.strategy,
            epochs=10, seed=0, precision="fp32", optimizer="sgd", mode="measured", devices="A processor of some name",
        )  # fmt: skip
        ran = r.step_time_s is not None
        state = "measured" if ran else "refused"
        rows.append(
            StudyRow(cell=cell, state=state, result=replace(r, utilisation=0.9) if ran else None, why=r.why_not)
        )
    p = Published(strategy="ddp", model="", data="digits", hardware="8 of some GPU", gpus=2, metric="samples_per_s",
                  value=2968.0, source="a study of " + "very " * 30 + "long name")  # fmt: skip
    return Study(name="grid", title="A grid", created="now", rows=tuple(rows), published=(p,), differs=("data " * 40,))


def study() -> str:
    made = a_study()
    rows = study_figures.of(made)
    return study_page.html(made, rows, [(c, SVG) for c in study_page.charts(rows)])


def a_plan() -> Plan:
    made = nouns.plan()
    points = ((0.1, None, 0.4), (1.0, 0.5, 0.5))
    curve = tuple(CurvePoint(seconds=t, best_s=best, lower_bound_s=bound) for t, best, bound in points)
    return replace(made, certificate=replace(made.certificate, curve=curve))


def plan() -> str:
    made = a_plan()
    return plan_page.html(made, [(c, SVG) for c in plan_page.charts(made, None, OTHER, CURVES)])


OTHER = Difference(other="ddp", plan_s=0.5, other_s=0.6, fits=True, why_not="", changed=("head",),
                   terms=(Term(name="compute", plan_s=0.4, other_s=0.5),))  # fmt: skip
CURVES = Frontier(
    memory=(MemoryPoint(limit_bytes=2**30, fits=True, memory_bytes_max=2**29, step_time_s=0.5, gap=0.0, num_ranks=2,
                        num_microbatches=1, changed="nothing"),),
    cost=(),
)  # fmt: skip
CHANGE = {"event": "replan", "kind": "switch", "new": "beef", "predicted_gain": 0.4, "seconds": 0.5, "epoch": 0,
          "why": "rank 1 is slow", "processes": [0]}  # fmt: skip
EVENTS: list[dict[str, Any]] = [
    {"event": "start", "plan_fingerprint": "f00d", "model": "cnn", "ranks": 2, "data": ["digits"]},
    {"event": "steps", "step": 10, "step_time_s": 0.1, "epoch": 0},
    {"event": "finding", "line": "rank 1 computes twice as long", "epoch": 0},
    {"event": "steps", "step": 20, "step_time_s": 0.2, "epoch": 0},
    CHANGE,
    {"event": "steps", "step": 30, "step_time_s": 0.12, "epoch": 0},
    {"event": "steps", "step": "torn"},
    {"event": "epoch", "line": "", **codec.to_data(nouns.epoch()), "step": 30},
    {"event": "end", "status": "done", "exit_code": 0},
]


def traced() -> dict[str, Any]:
    """Two ranks; the plan's step takes 3 ms, those of the run 4 and 5 ms."""
    events: list[dict[str, Any]] = []
    for process in range(4):
        measured = process % 2
        for i, at in enumerate((0.0, 0.004) if measured else (0.0,)):
            events.append(piece("head", "forward", "compute", process, at, at + 0.003 + measured * (i + 1) / 1e3, None))
            events.append(piece("all_reduce", "gradient", "communication", process, at + 0.001, at + 0.002, None))
            events += [{"name": f"step {i}", "ph": "i", "ts": at * 1e6, "pid": process, "tid": 0}] * measured
    return {"traceEvents": events}


def run() -> str:
    figures = [(c, SVG) for c in run_page.charts(EVENTS, a_plan())]
    return run_page.html(story(EVENTS), figures, "a run", [(c, SVG) for c in steps.charts(traced())])


def test_a_run_is_stepped_through_beside_its_plan(tmp_path: Path, monkeypatch, capsys):
    rows = steps.pieces(traced())
    ends = {(r[0], r[1], r[2]): r[6] for r in rows if r[4] == "forward"}
    of_run = {(s, rank, "measured"): 3.0 + s for s in (1, 2) for rank in (0, 1)}
    assert ends == pytest.approx(of_run | {(s, rank, "planned"): 3.0 for s in (1, 2) for rank in (0, 1)})
    figures = [c.draw(c.rows) for c in steps.charts(traced())]
    assert [f.axes[0].get_xlim() for f in figures] == 2 * [pytest.approx((0, 5.1))], "one scale"
    assert [t.get_text() for t in figures[0].axes[0].get_yticklabels()][:3] == [
        "rank 0 planned", "rank 0 planned, communication", "rank 0 measured",
    ]  # fmt: skip
    many = {"traceEvents": [e for e in traced()["traceEvents"] for _ in range(200 if e["ph"] == "X" else 1)]}
    assert len(steps.charts(many)) == 1, "pages stay small"
    night = tmp_path / "night"
    (night / "trace").mkdir(parents=True)
    (night / "log.jsonl").write_text("".join(json.dumps(e) + "\n" for e in EVENTS))
    path = night / "trace" / "plan_and_run.json.gz"
    path.write_bytes(gzip.compress(json.dumps(traced()).encode()))
    monkeypatch.setattr(page, "draw", lambda chart, folder: ([], SVG))
    assert entry.run(["explain", str(night), "--report", str(tmp_path / "page")]) == 0
    text = (tmp_path / "page" / "report.html").read_text()
    assert text.count('<input type="radio" name="steps"') == 2
    assert text.count(" checked>") == 1
    path.write_bytes(b"torn")
    assert entry.run(["explain", str(night), "--report", str(tmp_path / "page")]) == 3
    assert "is not a trace" in capsys.readouterr().err


def test_a_message_of_which_only_the_start_is_known_is_still_seen():
    sent = piece("to stage 1", "transfer", "sending on", 1, 0.002, 0.002, None)
    both = [steps.charts({"traceEvents": [*traced()["traceEvents"], *more]})[0] for more in ((), (sent,))]
    assert ["only the start was measured" in c.caption for c in both] == [False, True]
    (bar,) = (p for p in both[1].draw(both[1].rows).axes[0].patches if p.get_width() == 0)
    assert bar.get_linewidth() > 0


def test_the_timeline_of_a_run_marks_changes_of_plan_and_what_was_slow():
    promised = nouns.epoch().measurements.predicted_step_time_s
    assert run_page.timeline(EVENTS).rows == (
        ("measured", 10, 0.1, None), ("finding", 10, None, "rank 1 computes twice as long"),
        ("measured", 20, 0.2, None), ("change", 20, None, "rank 1 is slow"),
        ("measured", 30, 0.12, None), ("expected", 0, promised, None),
        ("expected", 30, promised, None),
    )  # fmt: skip
    said = run_page.first_sentence(story(EVENTS))
    changed = "the plan was changed once and won 300 ms; something became slow once."
    assert said == f"cnn on 2 ranks: 30 steps of 140 ms; {changed}"


def test_a_plan_and_a_run_become_all_their_files(tmp_path: Path):
    assert plan_page.write(a_plan(), tmp_path / "plan", None, OTHER, CURVES).stat().st_size < 2**20
    names = {p.stem for p in (tmp_path / "plan" / "figures").iterdir()}
    assert names == {"network", "beside", "search", "trade"}
    assert {p.suffix for p in (tmp_path / "plan" / "figures").iterdir()} == {".svg", ".pdf", ".png", ".csv"}
    page = run_page.write(story(EVENTS), EVENTS, tmp_path / "run", a_plan(), "night 7")
    assert "<h1>night 7</h1>" in page.read_text(), "a page is named after its run, not after the folder it is in"
    names = {p.stem for p in (tmp_path / "run" / "figures").iterdir()}
    assert names == {"timeline", "learning", "rank_memory", "network"}
    assert "http" not in re.sub(r"xmlns(:\w+)?=\"[^\"]+\"", "", page.read_text())
    only = run_page.charts(EVENTS[:2])
    assert [c.name for c in only] == ["timeline"], "a run of which little is known is drawn as far as it is"


def test_strategies_that_recompute_are_told_from_those_that_do_not():
    names = ["ddp", *("one", "two", "three") * 3, "ddp+ckpt"]
    (axes,) = plan_drawing.trade([("strategy", name, 2.0**30, 0.1) for name in names]).axes
    first, last = (axes.get_lines()[i] for i in (0, -1))
    assert (first.get_color(), first.get_fillstyle()) != (last.get_color(), last.get_fillstyle())


def test_a_run_of_one_step_is_drawn_too():
    (axes,) = plan_drawing.step_times((("measured", 1, 0.03, None),)).axes
    (line,) = axes.get_lines()
    assert list(zip(line.get_xdata(), line.get_ydata(), strict=True)) == [(0.0, 30.0), (1.0, 30.0)]
    assert all(x == int(x) for x in axes.get_xticks()), "there is no half a step"


def test_marks_of_the_largest_values_are_inside_their_figures():
    drawn = [c.draw(c.rows) for c in (*plan_page.charts(a_plan(), None, OTHER, CURVES), run_page.timeline(EVENTS))]
    checked = 0
    for axes in (a for figure in drawn for a in figure.axes if a.get_ylim()[0] == 0):
        for line in axes.get_lines():
            ys = [y for y in line.get_ydata() if y > 1]  # upright lines go from 0 to 1
            assert all(y < axes.get_ylim()[1] / 1.02 for y in ys), axes.get_ylabel()
            checked += len(ys)
    assert checked > 5


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed here")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_a_phone_and_a_desk_and_can_be_read(tmp_path: Path, scheme: str):
    frames = "".join(
        f'<iframe style="width:{w}px;height:900px;border:0" srcdoc="{escape(text, quote=True)}"></iframe>'
        for text in (bench_page(), study(), plan(), run())
        for w in WIDTHS
    )
    (tmp_path / "all.html").write_text(f"<!doctype html><meta charset=utf-8><body>{frames}{PROBE}", encoding="utf-8")
    preferred = {"dark": 0, "light": 1}[scheme]
    done = subprocess.run(
        [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", f"--user-data-dir={tmp_path}/own",
         f"--blink-settings=preferredColorScheme={preferred}", "--virtual-time-budget=5000",
         (tmp_path / "all.html").as_uri()],
        capture_output=True, text=True, timeout=480, check=True,
    )  # fmt: skip
    text = re.search(r'<pre id="found">(.*?)</pre>', done.stdout)
    assert text is not None, done.stderr[-2000:]
    found = json.loads(text[1])
    assert [f["width"] for f in found] == 4 * [*WIDTHS]
    for f in found:
        assert f["needs"] <= f["width"], "the page itself scrolls sideways"
        assert f["contrast"] >= 4.5
        assert f["dark"] == (scheme == "dark")
        assert f["figures"] == f["told"] > 0
        assert f["loose"] == 0, "what may be wider than the page scrolls in a box that keyboards reach"
        assert f["captions"] == 0
        assert f["dead"] == 0
