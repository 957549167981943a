"""``page``: one HTML file of results, with tables, figures and an overview."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from itertools import repeat
from pathlib import Path
from typing import Any

from lambdahat._core.check import require
from lambdahat._core.storage import write_atomically
from lambdahat.experiments import published
from lambdahat.experiments.kit.claims import FAILS, HOLDS, LEVEL, OPEN, UNTESTED, Table, Verdict
from lambdahat.experiments.kit.experiment import Experiment
from lambdahat.experiments.kit.store import stores_in
from lambdahat.report.plotly_charts import describe_chart, figure_of
from lambdahat.report.sections import (
    Card,
    Section,
    named_results,
    section_of_result,
    section_of_store,
)
from lambdahat.report.style import minus, sentence
from lambdahat.results import Status
from lambdahat.results.charts import Chart, counted

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
    """The number of each verdict, coloured, our own claims apart."""
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


Named = tuple[Section, str]  # and the name of its place on the page
FEW = 30  # claims that are shown without being asked for
OTHERS = "Results"  # the heading of what belongs to no paper
PAPERS, OWN = "of the papers", "our own"  # whose a claim is
LARGEST, SMALLER = "largest of each experiment", "smaller ones"  # which runs
MEANING = (
    '<p class="meaning">Holds: our numbers show it; does not hold: they show the opposite;'
    " undecided: they show neither; not testable here: the run cannot test the claim, for the"
    " reason beside it. Over all claims of an experiment the chance of a wrong “holds” is at most"
    f' {100 * LEVEL:.0f}\u00a0%, of a wrong “does not hold” too.</p><p class="meaning">Our numbers'
    " are value ± standard error, most often of a difference, over n runs or draws; effect: the"
    " difference over its standard deviation.</p>"
)
SCALED = (
    '<p class="meaning">Scales: smoke takes seconds and shows that the code runs; cpu takes minutes'
    " on two cores, with less data and smaller networks; paper has the sizes of the paper, or as"
    " near as was affordable.</p>"
)
ONCE = (
    '<p class="meaning">An experiment run at several scales counts once in the totals, at its'
    " largest.</p>"
)


def overview(places: Sequence[Named]) -> str:
    """Experiments and claims with their verdicts; where there are none, all numbers."""
    if any(section.verdicts for section, _ in places):
        body = (
            _totals(places)
            + "".join(_paper(*group) for group in by_paper(places))
            + _claims(places)
        )
    else:
        body = _numbers(places)
    return (
        '<section id="overview" aria-labelledby="overview-h"><h2'
        f' id="overview-h">Overview</h2>{body}</section>'
    )


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
        parts.append(
            f'<li><span class="group">{escape(paper)}</span><ul>{links}</ul></li>'
            if many
            else links
        )
    return f'<nav aria-label="Contents"><ul>{"".join(parts)}</ul></nav>'


def by_paper(places: Sequence[Named]) -> list[tuple[str, list[Named]]]:
    """Parts of the page by paper; those of none come last."""
    groups: dict[str, list[Named]] = {}
    for section, name in places:
        groups.setdefault(section.paper, []).append((section, name))
    return [
        (paper or OTHERS, groups[paper]) for paper in sorted(groups, key=lambda paper: paper == "")
    ]


def _link(place: Named) -> str:
    section, name = place
    return f'<a href="#{name}">{escape(section.title)}</a>'


def largest(places: Sequence[Named]) -> list[Named]:
    """The largest-scale run with verdicts of each experiment, and all that is no experiment."""
    best: dict[str, Named] = {}
    for place in places:
        section, name = place
        key = section.experiment or f"#{name}"
        if section.verdicts and (key not in best or section.size > best[key][0].size):
            best[key] = place
    return list(best.values())


def _totals(places: Sequence[Named]) -> str:
    """How many claims hold and do not, the papers' and ours apart, with links to them."""
    counted_ones = largest(places)
    verdicts = [verdict for section, _ in counted_ones for verdict in section.verdicts]
    papers, own = ([one.verdict for one in verdicts if one.own is ours] for ours in (False, True))
    judged = [section for section, _ in places if section.verdicts]
    head = '<p class="meaning">Claims of the papers:</p>' if own and papers else ""
    lines = head + _buttons(papers, PAPERS if own else "") if papers else ""
    if own:
        lines += f'<p class="meaning">Our own, which no paper makes {OURS}:</p>' + _buttons(
            own, OWN, "small"
        )
    return (
        lines
        + MEANING
        + (SCALED if any(section.experiment for section in judged) else "")
        + (ONCE if len(judged) > len(counted_ones) else "")
    )


def _buttons(verdicts: Sequence[str], whose: str, kind: str = "") -> str:
    items = "".join(
        f'<li><button type="button" class="count" data-only="{verdict}" data-whose="{whose}">'
        f"<strong>{verdicts.count(verdict)}</strong> {badge(verdict)}</button></li>"
        for verdict in MARKS
    )
    return f'<ul class="counts {kind}">{items}</ul>'


def _paper(paper: str, places: Sequence[Named]) -> str:
    """A line for each experiment of a paper."""
    verdicts = [verdict for section, _ in largest(places) for verdict in section.verdicts]
    lines = [
        (
            _link((section, name)),
            escape(section.part),
            escape(section.setting),
            tally(section.verdicts),
        )
        for section, name in places
    ]
    table = grid(
        f"Experiments: {paper}",
        ("experiment", "in the paper", "run", "claims"),
        lines,
        "blocks experiments",
    )
    return f"<h3>{escape(paper)} {tally(verdicts)}</h3>{table}"


def _claims(places: Sequence[Named]) -> str:
    """All claims in one table that can be sorted and filtered."""
    judged = [(verdict, place) for place in places for verdict in place[0].verdicts]
    lines = [_line(verdict, place) for verdict, place in judged]
    counting = {name for _, name in largest(places)}
    told = [
        {
            "paper": section.paper,
            "verdict": verdict.verdict,
            "whose": OWN if verdict.own else PAPERS,
            "run": LARGEST if name in counting else SMALLER,
        }
        for verdict, (section, name) in judged
    ]
    marks = [
        "".join(f' data-{name}="{escape(value)}"' for name, value in one.items()) for one in told
    ]
    papers = list(dict.fromkeys(one["paper"] for one in told if one["paper"]))
    return (
        f'<details class="part" id="claims"{" open" if len(judged) <= FEW else ""}>'
        f"<summary><h3>All claims</h3> {counted(len(judged), 'claim')}, to filter and"
        " sort</summary>"
        '<div class="controls" id="filters">'
        + _choice("paper", "Paper", papers)
        + _choice("verdict", "Verdict", _met(told, "verdict", MARKS))
        + _choice("whose", "Whose", _met(told, "whose", (PAPERS, OWN)))
        + _choice("run", "Runs", _met(told, "run", (LARGEST, SMALLER)))
        + '<label>Words <input type="search" data-filter="words" autocomplete="off"></label>'
        + f'<p role="status" id="shown">{counted(len(judged), "claim")}</p></div>'
        + grid(
            "Claims and verdicts",
            ("claim", "experiment", "published", "here", "verdict"),
            lines,
            "blocks claims",
            sortable=True,
            marks=marks,
        )
        + "</details>"
    )


def _line(verdict: Verdict, place: Named) -> tuple[str, ...]:
    section, name = place
    link = f'<a href="#{name}">{escape(section.name or section.title)}</a>'
    return (
        claim_of(verdict),
        link,
        escape(verdict.published),
        unbroken(verdict.evidence),
        badge(verdict.verdict),
    )


def _met(told: Sequence[Mapping[str, str]], name: str, options: Iterable[str]) -> list[str]:
    """Those of the options that there are."""
    known = {one[name] for one in told}
    return [option for option in options if option in known]


def _choice(name: str, label: str, options: Sequence[str]) -> str:
    """A filter; none where there is nothing to choose between."""
    if len(options) < 2 and name in ("whose", "run"):
        return ""
    items = "".join(
        f'<option value="{escape(option)}">{escape(option)}</option>' for option in options
    )
    return (
        f'<label>{label} <select data-filter="{name}"><option'
        f' value="">all</option>{items}</select></label>'
    )


def _numbers(places: Sequence[Named]) -> str:
    """A line for each number, or for a part without any; empty columns are left out."""
    header = ("of", "quantity", "value", "interval", "remedy")
    lines = []
    for place in places:
        section = place[0]
        drawn = counted(len(section.charts), "figure") if section.charts else ""
        none = [Card(section.setting, drawn, remedy=" ".join(section.notes))]
        lines += [
            (
                _link(place),
                escape(card.label),
                unbroken(card.value),
                escape(card.detail),
                escape(card.remedy),
            )
            for card in section.cards or none
        ]
    kept = [place for place in range(len(header)) if any(line[place] for line in lines)]
    told = [tuple(line[place] for place in kept) for line in lines]
    return grid("Numbers", [header[place] for place in kept], told, "blocks", sortable=True)


ASSETS = Path(__file__).parent / "assets"
UNFOLD = (
    '<div class="controls"><button type="button" id="unfold">Open all sections</button>'
    "<p>Open sections to print them: on paper a closed one is its title alone.</p></div>"
)
PRINTED = (
    '<p class="note printed">Closed sections are here as their titles alone: open sections to print'
    " them.</p>"
)
OPENED = 4  # sections: where there are more, a reader opens those of interest


def document(sections: Sequence[Section], title: str, library: str) -> str:
    """The whole page; ``library`` is the source of plotly.js."""
    sections = [_with_lists(section) for section in sections]
    titles = Counter(section.title for section in sections)
    names = _identifiers([section.name or section.title for section in sections])
    places = list(zip(sections, names, strict=True))
    body = "\n".join(
        _section(section, name, len(places) <= OPENED, titles[section.title] > 1)
        for section, name in places
    )
    assets = ("page.css", "charts.js", "page.js")
    css, *scripts = ((ASSETS / name).read_text(encoding="utf-8") for name in assets)
    payloads = {
        name: {
            "charts": [figure_of(chart) for chart in section.charts],
            "rows": columns_of(section.rows),
        }
        for section, name in places
    }
    packed = "\n".join(_payload(f"data-{name}", _json(found)) for name, found in payloads.items())
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>{css}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the content</a>
<header class="bar">
<p class="brand"><a href="#overview">{escape(title)}</a></p>
<button type="button" id="theme" aria-pressed="false">Dark theme</button>
</header>
<div class="frame">
{navigation(places)}
<main id="main" tabindex="-1">
<h1>{escape(title)}</h1>
<noscript>
<p class="note">Charts, filters and downloads need JavaScript; texts and tables do not.</p>
</noscript>
{PRINTED}
{overview(places)}
{UNFOLD if len(places) > 1 else ""}
{body}
</main>
</div>
<footer><p>Made by lambdahat. Everything on this page is in this file.</p></footer>
{packed}
{_payload("plotly", library)}
<script>{"".join(scripts)}</script>
</body>
</html>
"""


def _with_lists(section: Section) -> Section:
    """Lists of numbers among the charts as tables."""
    lists = [
        Table(chart.title, ("quantity", "value"), chart.rows)
        for chart in section.charts
        if chart.rows
    ]
    charts = tuple(chart for chart in section.charts if not chart.rows)
    return dataclasses.replace(section, charts=charts, tables=(*lists, *section.tables))


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rows as JSON holds them: the names of ``columns`` and the ``values`` of each; NaN as
    {"number": "nan"}.

    Values of one column are alike, and so packed smaller than row by row.
    """
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return {
        "columns": columns,
        "values": [[_plain(row.get(column)) for row in rows] for column in columns],
    }


def _plain(value: Any) -> Any:
    if type(value) in (str, int, bool, type(None)):  # most are
        return value
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return {"number": str(value)}
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _payload(name: str, text: str) -> str:
    """Compressed text that the page's script unpacks when it needs it."""
    packed = base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()
    return f'<script type="text/plain" id="{name}">{packed}</script>'


def _identifiers(titles: Sequence[str]) -> list[str]:
    """A distinct name for every section that an address can hold."""
    found: dict[str, None] = {}
    following: dict[
        str, int
    ] = {}  # the number to try next, so that many of one title do not try all before it
    for title in titles:
        base = name = slug(title)
        while name in found:
            number = following.get(base, 2)
            name, following[base] = f"{base}-{number}", number + 1
        found[name] = None
    return list(found)


def slug(text: str) -> str:
    """A text as part of an address or a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "section"


def _section(section: Section, name: str, shown: bool, twin: bool) -> str:
    """A collapsible section; where titles repeat, the setting stands beside the title."""
    beside = (
        f'<span class="setting">{escape(section.setting)}</span> '
        if twin and section.setting
        else ""
    )
    parts = [
        (
            f'<section id="{name}" aria-labelledby="{name}-h"><details'
            f' class="part"{" open" if shown else ""}>'
        ),
        (
            f'<summary><h2 id="{name}-h">{escape(section.title)}</h2>'
            f" {beside}{tally(section.verdicts)}</summary>"
        ),
    ]
    if under := " · ".join(filter(None, (section.paper, section.part, section.setting))):
        parts.append(f'<p class="paper">{escape(under)}</p>')
    if section.ran:
        parts.append(f'<p class="ran">{escape(section.ran)}</p>')
    parts.append(_jumps(section, name))
    parts += [f"<p>{escape(text)}</p>" for text in section.about.split("\n\n") if text.strip()]
    parts += [f'<p class="note">{escape(note)}</p>' for note in section.notes]
    if section.cards:
        parts.append('<ul class="cards">' + "".join(map(_card, section.cards)) + "</ul>")
    if section.verdicts:
        lines = [
            (
                claim_of(one),
                *map(escape, (one.source, one.published)),
                unbroken(one.evidence),
                badge(one.verdict),
            )
            for one in section.verdicts
        ]
        parts.append(_heading(name, "Claims"))
        parts.append(
            grid(
                "Claims",
                ("claim", "source", "published", "here", "verdict"),
                lines,
                "blocks claims",
            )
        )
        parts.append(_statuses(section))
    if section.charts:
        figures = "".join(
            _figure(chart, name, number) for number, chart in enumerate(section.charts)
        )
        parts.append(f'{_heading(name, "Figures")}<div class="figures">{figures}</div>')
    if section.tables:
        parts.append(_heading(name, "Tables") + "".join(map(_table_of, section.tables)))
    if section.assumptions:
        items = "".join(f"<li>{escape(text)}</li>" for text in section.assumptions)
        parts.append(f'{_heading(name, "Assumptions")}<ul class="assumptions">{items}</ul>')
    parts.append(_provenance(section, name))
    return "".join(parts) + "</details></section>"


def _heading(section: str, text: str) -> str:
    return f'<h3 id="{section}--{slug(text)}">{text}</h3>'


def _statuses(section: Section) -> str:
    """What the statuses mean that the claims name."""
    told = " ".join(part for one in section.verdicts for part in (one.claim, one.evidence))
    texts = (
        f"{status.name}: {status.value}"
        for status in Status
        if re.search(rf"\b{status.name}\b", told)
    )
    return "".join(f'<p class="meaning">{escape(text)}</p>' for text in texts)


def _jumps(section: Section, name: str) -> str:
    """Links to the parts of a long section, with how much there is of each."""
    sizes = {
        "Claims": len(section.verdicts),
        "Figures": len(section.charts),
        "Tables": len(section.tables),
        "Assumptions": len(section.assumptions),
        "Run it again": 1 if section.command else 0,
    }
    found = {text: size for text, size in sizes.items() if size}
    if len(found) < 3:
        return ""
    counts = {text: "" if text == "Run it again" else f" ({size})" for text, size in found.items()}
    links = (f'<a href="#{name}--{slug(text)}">{text}{counts[text]}</a>' for text in found)
    return f'<p class="jumps">{" ".join(links)}</p>'


def _card(card: Card) -> str:
    parts = {
        "label": card.label,
        "value": minus(card.value),
        "detail": minus(card.detail),
        "remedy": card.remedy,
    }
    spans = (f'<span class="{kind}">{escape(text)}</span>' for kind, text in parts.items() if text)
    return f"<li>{''.join(spans)}</li>"


def _figure(chart: Chart, section: str, number: int) -> str:
    """A place that the script draws in, with a description and a table to open."""
    place = f"{section}-chart-{number}"
    beside = "" if chart.source.startswith("not ") or not chart.source else "Compare with "
    source = chart.source and sentence(f"{beside}{chart.source}.")
    below = " ".join(filter(None, (chart.warning and f"{chart.warning}.", chart.caption, source)))
    caption = f"<p>{escape(below)}</p>" if below else ""
    return (
        f'<figure aria-labelledby="{place}-h"><figcaption><h4'
        f' id="{place}-h">{escape(chart.title)}</h4></figcaption><div'
        f' class="chart{" tall" if chart.heat else ""}" id="{place}" role="img"'
        f' data-section="{section}" data-number="{number}"'
        f' aria-label="{escape(describe_chart(chart))}"></div>{caption}<details class="data"'
        f' data-chart="{place}"><summary>Data<span class="hidden"> of'
        f" {escape(chart.title)}</span></summary></details></figure>"
    )


def _table_of(table: Table) -> str:
    lines = [tuple(unbroken(str(cell)) for cell in row) for row in table.rows]
    return f"<h4>{escape(table.title)}</h4>" + grid(table.title, table.header, lines)


def _provenance(section: Section, name: str) -> str:
    """How to run it again, with what it was run, and its rows as files."""
    parts = []
    if section.command:
        parts.append(
            f'{_heading(name, "Run it again")}<div class="command">'
            f'<pre tabindex="0"><code>{escape(section.command)}</code></pre>'
            '<button type="button" class="copy">Copy</button></div>'
        )
    if section.rows:
        file = slug(section.name or section.title)
        buttons = "".join(
            f'<button type="button" class="download" data-section="{name}" data-kind="{kind}"'
            f' data-file="{file}">{kind.upper()}<span class="hidden"> of the rows of'
            f" {escape(section.title)}</span></button>"
            for kind in ("csv", "json")
        )
        parts.append(f'<p class="downloads">{counted(len(section.rows), "row")}: {buttons}</p>')
    if section.facts:
        lines = [(escape(key), escape(value)) for key, value in section.facts.items()]
        table = grid("Configuration", ("what", "value"), lines)
        parts.append(
            f'<details class="facts"><summary>Configuration and versions</summary>{table}</details>'
        )
    return "".join(parts)


Find = Callable[[str], Experiment]


def page(results: Any, path: str | Path, title: str = "Measurements") -> Path:
    """Write results to one HTML file and return its path.

    ``results`` is a result, a mapping from names, a sequence, or a folder: of saved results, of the
    stores of experiments, or of both. The file needs no server and no network: it holds its charts,
    tables and data.
    """
    sections = [_section_of(name, result) for name, result in named_results(results).items()]
    if isinstance(results, str | Path):
        sections = [*_sections_of_stores([results], None), *sections]
    return write_page(sections, path, title)


def page_of_stores(
    folders: str | Path | Iterable[str | Path],
    path: str | Path,
    title: str = "Reproductions",
    find: Find | None = None,
) -> Path:
    """Write the page of all experiments whose stores lie in ``folders``, from the stores alone.

    ``find`` gives the experiment of a name, and raises ValueError for one that it does not know; by
    default it is that of ``lambdahat.experiments.published``.
    """
    listed = [folders] if isinstance(folders, str | Path) else list(folders)
    return write_page(_sections_of_stores(listed, find), path, title)


def page_of_folders(folders: Iterable[str | Path], path: str | Path) -> Path:
    """Write the page of all stores and all saved results in ``folders``."""
    listed = list(folders)
    results = [
        _section_of(name, found, Path(folder))
        for folder in listed
        for name, found in named_results(folder).items()
    ]
    title = "Measurements" if results else "Reproductions"
    return write_page([*_sections_of_stores(listed, None), *results], path, title)


def write_page(sections: Sequence[Section], path: str | Path, title: str) -> Path:
    """Write the page of given sections."""
    require(
        len(sections) > 0,
        "the page",
        "have something to show",
        "no results",
        "name a folder with saved results or with the stores of experiments",
    )
    from plotly.offline import get_plotlyjs

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, document(sections, title, get_plotlyjs()).encode())
    return path


def _section_of(name: str, result: Any, folder: Path | None = None) -> Section:
    """The section of a result; the error for a damaged one names it and its place."""
    try:
        return section_of_result(name, result)
    except Exception as error:  # whatever is wrong inside a result, a reader wants to know which
        place = name if folder is None else str(folder / name)
        text = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{place} must be a result that can be shown, got one that fails with"
            f" {type(error).__name__}: {text}"
        ) from error


def _sections_of_stores(folders: Sequence[str | Path], find: Find | None) -> list[Section]:
    """Paper by paper, in the order of the registry."""
    known = {name: place for place, name in enumerate(published.PLACES)}
    stores = [store for folder in folders for store in stores_in(folder)]
    stores.sort(key=lambda store: known.get(store.experiment, len(known)))
    return [section_of_store(store, _known(find, store.experiment)) for store in stores]


def _known(find: Find | None, name: str) -> Experiment | None:
    """The experiment of a store; None where another version of the library has made it."""
    try:
        return (find or published.find)(name)
    except ValueError:
        return None
