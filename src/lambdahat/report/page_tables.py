"""Verdicts and tables of the page: tables scroll by themselves, name their rows, and are blocks on a phone."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import repeat

from lambdahat.experiments.reproduction import FAILS, HOLDS, OPEN, UNTESTED

MARKS = {  # class and sign of a verdict
    HOLDS: ("holds", "✓"),
    FAILS: ("fails", "✗"),
    OPEN: ("open", "?"),
    UNTESTED: ("open", "–"),
}


def badge(verdict: str) -> str:
    """A verdict as a coloured word."""
    kind, sign = MARKS.get(verdict, ("open", ""))
    return f'<span class="badge {kind}"><span aria-hidden="true">{sign}</span> {escape(verdict)}</span>'


def tally(verdicts: Sequence[str]) -> str:
    """How many there are of each verdict, as coloured numbers; of none, nothing."""
    parts = []
    for verdict, (kind, sign) in MARKS.items():
        if count := sum(one == verdict for one in verdicts):
            words = f'<span aria-hidden="true">{sign}</span> {count}<span class="hidden"> {verdict}</span>'
            parts.append(f'<span class="badge {kind}" title="{verdict}">{words}</span>')
    return f'<span class="tally">{" ".join(parts)}</span>' if parts else ""


def grid(
    caption: str,
    header: Sequence[str],
    lines: Sequence[Sequence[str]],
    kind: str = "",
    sortable: bool = False,
    marks: Sequence[str] | None = None,
) -> str:
    """A table whose first column names its rows; the keyboard can scroll it where it is wide.

    Cells are HTML already and carry their column's name, for phones; ``marks`` are attributes of the rows.
    """
    label = '<button type="button" class="sort">{}</button>' if sortable else "{}"
    head = "".join(f'<th scope="col">{label.format(escape(name))}</th>' for name in header)
    body = []
    for cells, mark in zip(lines, marks or repeat(""), strict=marks is not None):
        first, rest = f'<th scope="row">{cells[0]}</th>', zip(header[1:], cells[1:], strict=True)
        others = "".join(f'<td data-label="{escape(name)}">{cell}</td>' for name, cell in rest)
        body.append(f"<tr{mark}>{first}{others}</tr>")
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}">'
        f'<table class="{kind}"><caption class="hidden">{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )
