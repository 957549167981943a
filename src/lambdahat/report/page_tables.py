"""Verdicts and tables of the page: tables scroll by themselves, name their rows, and are blocks
on a phone.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import repeat

from lambdahat.experiments.kit.claims import FAILS, HOLDS, OPEN, UNTESTED, Verdict
from lambdahat.report.style import minus, sentence

MARKS = {  # class and sign of a verdict
    HOLDS: ("holds", "✓"),
    FAILS: ("fails", "✗"),
    OPEN: ("open", "?"),
    UNTESTED: ("untested", "–"),
}
OURS = '<span class="own" title="Our own claim: the paper does not make it">ours</span>'


def badge(verdict: str) -> str:
    """A verdict as a coloured word."""
    kind, sign = MARKS.get(verdict, ("open", ""))
    return (
        f'<span class="badge {kind}"><span aria-hidden="true">{sign}</span>'
        f" {escape(verdict)}</span>"
    )


def unbroken(text: str) -> str:
    """Text as HTML in which no line ends between a number and its error."""
    return escape(text).replace(" ± ", "\u00a0±\u00a0")


def claim_of(verdict: Verdict) -> str:
    """The sentence of a claim, marked where it is ours and not the paper's."""
    return escape(sentence(verdict.claim)) + (f" {OURS}" if verdict.own else "")


def tally(verdicts: Sequence[Verdict]) -> str:
    """How many there are of each verdict, as coloured numbers, our own claims apart; of none,
    nothing.
    """
    papers, own = ([one.verdict for one in verdicts if one.own is ours] for ours in (False, True))
    groups = [_counts(papers), [OURS, *_counts(own)] if own else []]
    return " ".join(f'<span class="tally">{" ".join(parts)}</span>' for parts in groups if parts)


def _counts(verdicts: Sequence[str]) -> list[str]:
    parts = []
    for verdict, (kind, sign) in MARKS.items():
        if count := verdicts.count(verdict):
            words = (
                f'<span aria-hidden="true">{sign}</span> {count}<span class="hidden">'
                f" {verdict}</span>"
            )
            parts.append(f'<span class="badge {kind}" title="{verdict}">{words}</span>')
    return parts


def grid(
    caption: str,
    header: Sequence[str],
    lines: Sequence[Sequence[str]],
    kind: str = "",
    sortable: bool = False,
    marks: Sequence[str] | None = None,
) -> str:
    """A table whose first column names its rows; the keyboard can scroll it where it is wide.

    Cells are HTML already, and get minus signs; those of a table that is ``blocks`` on phones carry
    their column's name for it. ``marks`` are attributes of the rows.
    """
    label = '<button type="button" class="sort">{}</button>' if sortable else "{}"
    head = "".join(f'<th scope="col">{label.format(escape(name))}</th>' for name in header)
    body = []
    for texts, mark in zip(lines, marks or repeat(""), strict=marks is not None):
        cells = [minus(text) for text in texts]
        first, rest = f'<th scope="row">{cells[0]}</th>', zip(header[1:], cells[1:], strict=True)
        named = (
            (f' data-label="{escape(name)}"' if "blocks" in kind else "", cell)
            for name, cell in rest
        )
        others = "".join(f"<td{name}>{cell}</td>" for name, cell in named)
        body.append(f"<tr{mark}>{first}{others}</tr>")
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}">'
        f'<table class="{kind}"><caption class="hidden">{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )
