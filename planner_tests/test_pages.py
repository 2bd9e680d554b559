"""Pages in a real browser, on a phone and on a desk, by day and by night: nothing cut off, nothing too faint."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import escape
from pathlib import Path

import nouns
import pytest

from asa.ir.study import Published, Study, StudyCell, StudyRow
from asa.report import charts, page, study_figures, study_page

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


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed here")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_a_phone_and_a_desk_and_can_be_read(tmp_path: Path, scheme: str):
    frames = "".join(
        f'<iframe style="width:{w}px;height:900px;border:0" srcdoc="{escape(text, quote=True)}"></iframe>'
        for text in (bench_page(), study())
        for w in WIDTHS
    )
    (tmp_path / "all.html").write_text(f"<!doctype html><meta charset=utf-8><body>{frames}{PROBE}", encoding="utf-8")
    preferred = {"dark": 0, "light": 1}[scheme]
    done = subprocess.run(
        [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", f"--user-data-dir={tmp_path}/own",
         f"--blink-settings=preferredColorScheme={preferred}", "--virtual-time-budget=5000",
         (tmp_path / "all.html").as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    text = re.search(r'<pre id="found">(.*?)</pre>', done.stdout)
    assert text is not None, done.stderr[-2000:]
    found = json.loads(text[1])
    assert [f["width"] for f in found] == [*WIDTHS, *WIDTHS]
    for f in found:
        assert f["needs"] <= f["width"], "the page itself scrolls sideways"
        assert f["contrast"] >= 4.5
        assert f["dark"] == (scheme == "dark")
        assert f["figures"] == f["told"] > 0
        assert f["loose"] == 0, "what may be wider than the page scrolls in a box that keyboards reach"
        assert f["captions"] == 0
        assert f["dead"] == 0
