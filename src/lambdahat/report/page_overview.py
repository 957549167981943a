"""The head of the page: experiments paper by paper with how many claims hold, all claims with filters, the contents."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from lambdahat.experiments.reproduction import Verdict
from lambdahat.report.page_tables import MARKS, badge, grid, tally
from lambdahat.report.sections import Section
from lambdahat.report.style import counted, sentence

Named = tuple[Section, str]  # and the name of its place on the page
FEW = 30  # claims that are shown without being asked for
OTHERS = "Results"  # the heading of what belongs to no paper


def overview(places: Sequence[Named]) -> str:
    """Experiments and claims with their verdicts; where there are none, all numbers; else the names of all parts."""
    verdicts = [verdict.verdict for section, _ in places for verdict in section.verdicts]
    if verdicts:
        body = _totals(verdicts) + "".join(_paper(*group) for group in by_paper(places)) + _claims(places)
    elif any(section.cards for section, _ in places):
        body = _numbers(places)
    else:
        body = "<ul>" + "".join(f"<li>{_link(place)}</li>" for place in places) + "</ul>"
    return f'<section id="overview" aria-labelledby="overview-h"><h2 id="overview-h">Overview</h2>{body}</section>'


def navigation(places: Sequence[Named]) -> str:
    """Links to all parts: of experiments the short names, paper by paper."""
    groups = by_paper(places)
    parts = ['<li><a href="#overview">Overview</a></li>']
    for paper, found in groups:
        links = "".join(
            f'<li><a href="#{name}" title="{escape(section.title)}">'
            f"{escape((section.paper and section.name) or section.title)}</a></li>"
            for section, name in found
        )
        many = len(groups) > 1 or paper != OTHERS
        parts.append(f'<li><span class="group">{escape(paper)}</span><ul>{links}</ul></li>' if many else links)
    return f'<nav aria-label="Contents"><ul>{"".join(parts)}</ul></nav>'


def by_paper(places: Sequence[Named]) -> list[tuple[str, list[Named]]]:
    """Parts of the page by paper; those of none come last."""
    groups: dict[str, list[Named]] = {}
    for section, name in places:
        groups.setdefault(section.paper, []).append((section, name))
    return [(paper or OTHERS, groups[paper]) for paper in sorted(groups, key=lambda paper: paper == "")]


def _link(place: Named) -> str:
    section, name = place
    return f'<a href="#{name}">{escape(section.title)}</a>'


def _totals(verdicts: Sequence[str]) -> str:
    """How many claims hold and do not: each number asks for its claims."""
    items = "".join(
        f'<li><button type="button" class="count" data-only="{kind}"><strong>{verdicts.count(kind)}</strong> '
        f"{badge(kind)}</button></li>"
        for kind in MARKS
    )
    return f'<ul class="counts">{items}</ul>'


def _paper(paper: str, places: Sequence[Named]) -> str:
    """A line for each experiment of a paper."""
    verdicts = [verdict.verdict for section, _ in places for verdict in section.verdicts]
    lines = [
        (_link((section, name)), escape(section.part), escape(section.setting),
         tally([verdict.verdict for verdict in section.verdicts]))
        for section, name in places
    ]  # fmt: skip
    table = grid(f"Experiments: {paper}", ("experiment", "in the paper", "run", "claims"), lines, "blocks experiments")
    return f"<h3>{escape(paper)} {tally(verdicts)}</h3>{table}"


def _claims(places: Sequence[Named]) -> str:
    """All claims in one table that can be sorted and filtered."""
    judged = [(verdict, place) for place in places for verdict in place[0].verdicts]
    lines = [_line(verdict, place) for verdict, place in judged]
    marks = [
        f' data-paper="{escape(section.paper)}" data-verdict="{escape(verdict.verdict)}"'
        for verdict, (section, _) in judged
    ]
    papers = list(dict.fromkeys(section.paper for _, (section, _) in judged if section.paper))
    known = {verdict.verdict for verdict, _ in judged}
    return (
        f'<details class="part" id="claims"{" open" if len(judged) <= FEW else ""}>'
        f"<summary><h3>All claims</h3> {counted(len(judged), 'claim')}, to filter and sort</summary>"
        '<div class="controls" id="filters">'
        + _choice("paper", "Paper", papers)
        + _choice("verdict", "Verdict", [kind for kind in MARKS if kind in known])
        + '<label>Words <input type="search" data-filter="words" autocomplete="off"></label>'
        + f'<p role="status" id="shown">{counted(len(judged), "claim")}</p></div>'
        + grid("Claims and verdicts", ("claim", "experiment", "published", "here", "verdict"), lines, "blocks claims",
               sortable=True, marks=marks)
        + "</details>"
    )  # fmt: skip


def _line(verdict: Verdict, place: Named) -> tuple[str, ...]:
    setting = f" ({escape(place[0].setting)})" if place[0].setting else ""
    figures = map(escape, (verdict.published, verdict.evidence))
    return (escape(sentence(verdict.claim)), _link(place) + setting, *figures, badge(verdict.verdict))


def _choice(name: str, label: str, options: Sequence[str]) -> str:
    items = "".join(f'<option value="{escape(option)}">{escape(option)}</option>' for option in options)
    return f'<label>{label} <select data-filter="{name}"><option value="">all</option>{items}</select></label>'


def _numbers(places: Sequence[Named]) -> str:
    lines = [
        (_link(place), *map(escape, (card.label, card.value, card.detail, card.remedy)))
        for place in places
        for card in place[0].cards
    ]
    return grid("Numbers", ("of", "quantity", "value", "interval", "remedy"), lines, sortable=True)
