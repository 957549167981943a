"""The HTML of the page: every text is escaped here, and what scripts read is packed so that no text
can end it.
"""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from lambdahat.experiments.kit.claims import Table
from lambdahat.report.page_overview import navigation, overview
from lambdahat.report.page_tables import badge, claim_of, grid, tally, unbroken
from lambdahat.report.plotly_charts import describe_chart, figure_of
from lambdahat.report.sections import Card, Section
from lambdahat.report.style import minus, sentence
from lambdahat.results import Status
from lambdahat.results.charts import Chart, counted

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
    css, script = ((ASSETS / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
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
<script>{script}</script>
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
    """One section, which its title opens and closes; where another has its title, its setting
    stands beside it.
    """
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
    """A place that the script draws in, with a description, and a table that it fills when
    opened.
    """
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
