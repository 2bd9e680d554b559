"""HTML of a record for notebooks: a line and a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def shown(summary: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """HTML with a paragraph, and a table that scrolls in its own box where the page is narrow. All cells are escaped as
    text.

    >>> shown("1 < 2", ("a",), [("x",)]).partition("<thead>")[0]
    '<p>1 &lt; 2</p><div tabindex="0" style="overflow-x:auto"><table>'
    """
    head = "".join(f'<th scope="col">{escape(c)}</th>' for c in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(v))}</td>" for v in row) + "</tr>" for row in rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<p>{escape(summary)}</p><div tabindex="0" style="overflow-x:auto">{table}</div>'
