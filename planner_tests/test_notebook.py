"""Nouns in notebooks and under print: a line that says what they are, a table of their parts, nothing unescaped."""

from __future__ import annotations

import doctest
import re
from dataclasses import replace
from html.parser import HTMLParser

import nouns
import pytest

from asa.ir import notebook
from asa.ir.plan import DataDegree, Stage, TensorDegree
from asa.report.text.training import replan_line


class _Cells(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)
        if tag == "tr":
            self.rows.append(0)
        elif tag in ("td", "th"):
            self.rows[-1] += 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("noun", [nouns.plan(), nouns.profile(), nouns.bench()], ids=["plan", "profile", "bench"])
def test_a_noun_shows_a_line_and_a_whole_table(noun):
    found = _Cells()
    found.feed(noun._repr_html_())
    assert found.open == []
    assert len(set(found.rows)) == 1, "as many cells in every row"
    assert len(found.rows) > 3
    assert str(noun) == noun.summary()
    assert "\n" not in str(noun)


def test_what_looks_like_markup_is_text():
    made = nouns.bench()
    named = replace(made, results=(replace(made.results[-1], model="<b>", why_not="1 < 2 & 3"),))
    text = named._repr_html_()
    assert "&lt;b&gt;" in text
    assert "1 &lt; 2 &amp; 3" in text
    assert doctest.testmod(notebook).failed == 0


@pytest.mark.parametrize("noun", [nouns.profile(), nouns.bench()], ids=["profile", "bench"])
def test_numbers_are_on_the_right_with_equal_decimals_and_words_on_the_left(noun):
    rows = re.findall(r"<tr>(.*?)</tr>", noun._repr_html_())
    columns = list(zip(*(re.findall(r'text-align:(\w+)">([^<]*)<', row) for row in rows), strict=True))
    numbers = 0
    for column in columns:
        (side,) = {s for s, _ in column}
        cells = [text for _, text in column[1:] if text not in ("-", "None")]
        plain = [re.fullmatch(r"\d+(?:\.(\d+))?", text) for text in cells]
        if side == "right":
            assert len({m[1] and len(m[1]) for m in plain}) == 1, column
            numbers += 1
        else:
            assert not all(plain), column
    assert numbers >= 4


def test_lines_say_the_figures():
    slow = replace(nouns.plan(), prediction=replace(nouns.plan().prediction, step_time_s=12.5, step_time_high_s=15.0))
    assert "12.5 s a step predicted" in str(slow)
    assert "3 components, 147 ms forward and backward of 8 samples" in str(nouns.profile())
    assert "tiny: asa has the lowest median, 500 ms a step, of 5" in str(nouns.bench())


def test_how_a_plan_divides_the_work_is_said_in_a_few_words():
    plain = nouns.plan()
    assert plain.outline == "replicate x2 (2), tensor x2 (1)"
    whole = {"data": DataDegree(strategy="replicate", degree=1), "tensor": TensorDegree(strategy="none", degree=1)}
    parts = tuple(replace(c, stage=int(c.name == "head"), **whole) for c in plain.components)
    stages = (Stage(ranks=(0,)), Stage(ranks=(1,)))
    two = replace(plain, components=parts, stages=stages, schedule="1f1b", num_microbatches=4)
    assert two.outline == "1f1b of 2 + 1 components, 4 microbatches"
    line = replan_line({"kind": "switch", "new": "b", "outline": plain.outline, "why": "w", "predicted_gain": 0.1})
    assert line.startswith(f"new plan b ({plain.outline}), ")
