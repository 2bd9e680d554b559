"""HTML of a record for notebooks: a line and a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def shown(summary: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """HTML with a paragraph and a table; all cells are escaped as text.

    >>> shown("1 < 2", ("a",), [("x",)])
    '<p>1 &lt; 2</p><table><thead><tr><th scope="col">a</th></tr></thead><tbody><tr><td>x</td></tr></tbody></table>'
    """
    head = "".join(f'<th scope="col">{escape(c)}</th>' for c in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(v))}</td>" for v in row) + "</tr>" for row in rows)
    return f"<p>{escape(summary)}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
