"""HTML of a record for notebooks: a line and a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_DIGITS, _MOST_DECIMALS = 5, 3


def shown(summary: str, columns: Sequence[str], rows: Iterable[Sequence[str | float | None]]) -> str:
    """HTML with a paragraph, and a table that scrolls in its own box where the page is narrow. All cells are escaped as
    text. Columns of numbers are on the right with equal decimals; None is a missing number.

    >>> shown("1 < 2", ("a", "b"), [("x", 12.5)]).partition("<thead>")[0]
    '<p>1 &lt; 2</p><div tabindex="0" style="overflow-x:auto"><table>'
    >>> shown("", ("a",), [(1234.56,), (None,)]).partition("<tbody>")[2].partition("</tbody>")[0].count("right")
    2
    """
    made = list(zip(*rows, strict=True)) or [()] * len(columns)
    texts = [_texts(column) for column in made]
    sides = ["left" if any(isinstance(v, str) for v in column) else "right" for column in made]
    head = "".join(
        f'<th scope="col" style="text-align:{s}">{escape(c)}</th>' for c, s in zip(columns, sides, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(f'<td style="text-align:{s}">{escape(v)}</td>' for v, s in zip(row, sides, strict=True))
        + "</tr>"
        for row in zip(*texts, strict=True)
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<p>{escape(summary)}</p><div tabindex="0" style="overflow-x:auto">{table}</div>'


def _texts(column: Sequence[str | float | None]) -> list[str]:
    """The cells of a column, with as many decimals as the largest number needs for five digits.

    >>> _texts([0.5, 123.456, None]), _texts([1, 20]), _texts([31415.9])
    (['0.50', '123.46', '-'], ['1', '20'], ['31416'])
    """
    largest = max((abs(v) for v in column if isinstance(v, float)), default=0.0)
    decimals = min(_MOST_DECIMALS, max(0, _DIGITS - len(str(int(largest)))))
    return ["-" if v is None else f"{v:.{decimals}f}" if isinstance(v, float) else str(v) for v in column]
