"""``page``: one HTML file of results, with an answer, a figure and an overview of each."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lambdahat._core.check import require
from lambdahat._core.storage import make_folder, write_atomically
from lambdahat.experiments import published
from lambdahat.experiments.kit.claims import FAILS, HOLDS, LEVEL, OPEN, UNTESTED, Table, Verdict
from lambdahat.experiments.kit.store import stores_in
from lambdahat.report.plotly_charts import describe_chart, figure_of
from lambdahat.report.sections import (
    Find,
    Section,
    experiment_of,
    named_results,
    section_of_result,
    section_of_store,
)
from lambdahat.report.style import minus, sentence
from lambdahat.results import Status
from lambdahat.results.charts import Chart, count_text, share_axes

if TYPE_CHECKING:
    from jinja2 import Environment

ASSETS = Path(__file__).parent / "assets"
MARKS = {  # class and sign of a verdict
    HOLDS: ("holds", "✓"),
    FAILS: ("fails", "✗"),
    OPEN: ("open", "?"),
    UNTESTED: ("untested", "–"),
}
CLAIMS_SHOWN = 30  # claims that are shown without being asked for
OPENED = 4  # sections: where there are more, a reader opens those of interest
OTHERS = "Results"  # the heading of what belongs to no paper
PAPERS, OWN = "of the papers", "our own"  # whose a claim is
LARGEST, SMALLER = "largest of each experiment", "smaller ones"  # which runs
HALF = 100.0  # units of a forest plot from its middle to its edge
NUMBER = re.compile(r"([−-]?\d[\d,]*)((?:\.\d+)?(?:e[+−-]?\d+)?)((?: ± | )[^ ]+)?")


@dataclass(frozen=True)
class Place:
    """A section with the name of its place on the page, whether it is open, and whether another
    has its title.
    """

    section: Section
    name: str
    open: bool = True
    twin: bool = False


def document(sections: Sequence[Section], title: str, library: str) -> str:
    """The whole page; ``library`` is the source of plotly.js."""
    sections = [_with_lists(section) for section in sections]
    sections = _with_shared_axes(sections)
    titles = Counter(section.title for section in sections)
    names = _identifiers([section.name or section.title for section in sections])
    places = [
        Place(section, name, len(sections) <= OPENED, titles[section.title] > 1)
        for section, name in zip(sections, names, strict=True)
    ]
    verdicts = verdicts_of(places)
    assets = ("page.css", "charts.js", "inflate.js", "page.js")
    css, *scripts = ((ASSETS / name).read_text(encoding="utf-8") for name in assets)
    payloads = {}
    dump = partial(json.dumps, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for place in places:
        charts = [figure_of(chart) for chart in place.section.charts]
        data = {"charts": charts, "rows": columns_of(place.section.rows)}
        payloads[f"data-{place.name}"] = dump(data)
    packed = {  # the page's script unpacks a text when it needs it
        name: base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()
        for name, text in (payloads | {"plotly": library}).items()
    }
    return (
        _environment()
        .get_template("page.html")
        .render(
            title=title,
            css=css,
            script="".join(scripts),
            payloads=packed,
            places=places,
            groups=by_paper(places),
            alone=len(places) == 1,
            papers=[one.verdict for one in verdicts if not one.own],
            own=[one.verdict for one in verdicts if one.own],
            lines=_claim_lines(places),
            scaled=any(place.section.experiment for place in places),
        )
    )


@cache
def _environment() -> Environment:
    """The templates with the functions that they call; they escape whatever is put in."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("lambdahat.report"), autoescape=True, undefined=StrictUndefined
    )
    environment.globals |= {"marks": MARKS, "few": CLAIMS_SHOWN, "others": OTHERS}
    environment.globals |= {"of_papers": PAPERS, "our_own": OWN, "level": f"{100 * LEVEL:.0f}"}
    environment.filters |= {
        "align": align,
        "claim_groups": _claim_groups,
        "below": _below,
        "counted": count_text,
        "cut": cut,
        "describe": describe_chart,
        "forest": forest,
        "met": _filter_values,
        "minus": minus,
        "parts": _parts,
        "remedies": _remedies,
        "sentence": sentence,
        "slug": slug,
        "statuses": _statuses,
        "unbroken": lambda text: text.replace(" ± ", "\u00a0±\u00a0"),
        "verdicts": verdicts_of,
    }
    return environment


def by_paper(places: Sequence[Place]) -> list[tuple[str, list[Place]]]:
    """Parts of the page by paper; those of none come last."""
    groups: dict[str, list[Place]] = {}
    for place in places:
        groups.setdefault(place.section.paper, []).append(place)
    return [(paper or OTHERS, groups[paper]) for paper in sorted(groups, key=lambda one: not one)]


def largest(places: Sequence[Place]) -> list[Place]:
    """The runs that count: of each experiment the one of largest scale, but no smoke run."""
    best: dict[str, Place] = {}
    for place in places:
        section = place.section
        key = section.experiment or f"#{place.name}"
        larger = key not in best or section.size > best[key].section.size
        if section.verdicts and not section.smoke and larger:
            best[key] = place
    return list(best.values())


def verdicts_of(places: Sequence[Place]) -> list[Verdict]:
    """The verdicts that count."""
    return [verdict for place in largest(places) for verdict in place.section.verdicts]


def _claim_lines(places: Sequence[Place]) -> list[dict[str, Any]]:
    """A line of the table of all claims for each, with what it can be filtered by."""
    counting = {place.name for place in largest(places)}
    return [
        {
            "paper": place.section.paper,
            "verdict": verdict.verdict,
            "whose": OWN if verdict.own else PAPERS,
            "run": LARGEST if place.name in counting else SMALLER,
            "found": verdict,
            "place": place,
        }
        for place in places
        if not place.section.smoke
        for verdict in place.section.verdicts
    ]


def _filter_values(lines: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    """The values of a filter that there are; verdicts in their own order."""
    met = dict.fromkeys(line[name] for line in lines if line[name])
    order = [*MARKS, PAPERS, OWN, LARGEST, SMALLER]
    return sorted(met, key=lambda value: order.index(value) if value in order else -1)


def forest(verdict: Verdict) -> list[dict[str, Any]]:
    """What a forest plot shows of a claim, a line for each number, in units of 0 to 2·HALF.

    The middle is the bound, or the middle of the claimed range; the scale reaches to the end of the
    interval that is farther from it.
    """
    lines = []
    for value, low, high, least, most in verdict.marks if verdict.verdict in MARKS else ():
        bounds = [bound for bound in (least, most) if math.isfinite(bound)]
        if not bounds or not math.isfinite(value):
            continue
        middle = math.fsum(bounds) / len(bounds)
        known = math.isfinite(low) and math.isfinite(high)
        ends = [value, *bounds, *((low, high) if known else ())]
        reach = 1.1 * max(abs(end - middle) for end in ends) or 1.0

        def at(place: float, middle: float = middle, reach: float = reach) -> float:
            return round(min(max(HALF + HALF * (place - middle) / reach, 0.0), 2 * HALF), 1)

        sides = {"above": least, "below": most}
        known_sides = [side for side in sides if math.isfinite(sides[side])]
        claimed = " and ".join(f"{side} {sides[side]:.4g}" for side in known_sides)
        interval = f", 95 % interval {low:.4g} to {high:.4g}" if known and low < high else ""
        lines.append(
            {
                "x": at(value),
                "low": at(low) if known and low < high else None,
                "high": at(high) if known else None,
                "left": at(least),
                "width": round(at(most) - at(least), 1),
                "edges": [at(bound) for bound in bounds],
                "words": minus(f"{value:.4g}{interval}; claimed: {claimed}"),
            }
        )
    return lines


def align(rows: Iterable[Sequence[Any]]) -> tuple[list[list[str]], list[bool]]:
    """The cells of a table, and which columns hold numbers: spaces of a digit's width behind those
    of fewer decimals put the decimal points below each other.

    >>> align([("a", "1.25"), ("b", "10")])[1]
    [False, True]
    """
    lines = [[minus(str(cell)).replace(" ± ", "\u00a0±\u00a0") for cell in row] for row in rows]
    columns = [list(column) for column in zip(*lines, strict=True)]
    numeric = []
    for column in columns:
        plain = [cell.replace("\u00a0", " ") for cell in column]
        numbers = [NUMBER.fullmatch(cell) for cell in plain]
        empty = [cell in ("", "–", "nan", "inf", "−inf", "not known") for cell in plain]
        numeric.append(any(numbers) and all(map(any, zip(numbers, empty, strict=True))))
        if numeric[-1]:
            tails = [[part or "" for part in each.groups()[1:]] if each else [] for each in numbers]
            widths = [max(map(len, parts)) for parts in zip(*filter(None, tails), strict=True)]
            for place, each in enumerate(numbers):
                if each:
                    text = each.group(1)
                    for part, width in zip(tails[place], widths, strict=True):
                        # spaces as wide as the point, and the digits, that the part lacks
                        spaces = "\u2008" * (not part) + "\u2007" * width
                        text += part + spaces[: width - len(part)]
                    column[place] = text.replace(" ± ", "\u00a0±\u00a0")
    return [list(row) for row in zip(*columns, strict=True)], numeric


def cut(text: str, room: int) -> tuple[str, str]:
    """A text in two: what a cell shows at once, and the rest of one with more letters than
    ``room``, some four lines on a phone.
    """
    if len(text) <= room:
        return text, ""
    first = text[: room - 20].rsplit(" ", 1)[0]
    return first, text[len(first) :].lstrip()


def _below(chart: Chart) -> str:
    """The text below a chart: what is missing, its caption, and what to compare it with."""
    beside = "" if chart.source.startswith("not ") or not chart.source else "Compare with "
    source = chart.source and sentence(f"{beside}{chart.source}.")
    return " ".join(filter(None, (chart.warning and f"{chart.warning}.", chart.below, source)))


def _parts(section: Section) -> dict[str, int]:
    """The parts of a section that can be jumped to, with how much there is of each."""
    sizes = {
        "Claims": len(section.verdicts),
        "Figures": max(len(section.charts) - 1, 0),
        "Tables": len(section.tables),
        "Assumptions": len(section.assumptions),
    }
    parts = {text: size for text, size in sizes.items() if size}
    return parts | ({"Run it again": 0} if section.command else {})


def _remedies(section: Section) -> list[str]:
    """What to do about the numbers of a plain result that did not converge."""
    if section.experiment or section.verdicts:
        return []
    return list(dict.fromkeys([*section.notes, *(c.remedy for c in section.cards if c.remedy)]))


def _claim_groups(section: Section) -> list[tuple[str, list[Verdict]]]:
    """The claims of a section: first those that were tested, the paper's and ours apart."""
    groups: dict[str, list[Verdict]] = {}
    for verdict in sorted(section.verdicts, key=lambda one: (one.verdict == UNTESTED, one.own)):
        whose = "Our own claims, which no paper makes" if verdict.own else "Claims of the paper"
        untested = ", not testable by this run" if verdict.verdict == UNTESTED else ""
        groups.setdefault(f"{whose}{untested}", []).append(verdict)
    return list(groups.items())


def _statuses(section: Section) -> list[str]:
    """What the statuses mean that the claims name, and those of hollow points."""
    parts = [part for one in section.verdicts for part in (one.claim, one.evidence)]
    drawn = [one for chart in section.charts for one in chart.series]
    parts += [one.statuses[place] for one in drawn for place in one.hollow]
    words = set(re.findall(r"\w+", " ".join(parts)))
    return [f"{status.name}: {status.value}" for status in Status if status.name in words]


def _with_lists(section: Section) -> Section:
    """Lists of numbers among the charts as tables."""
    lists = [chart for chart in section.charts if chart.rows]
    tables = [Table(chart.title, ("quantity", "value"), chart.rows) for chart in lists]
    charts = tuple(chart for chart in section.charts if not chart.rows)
    return dataclasses.replace(section, charts=charts, tables=(*tables, *section.tables))


def _with_shared_axes(sections: Sequence[Section]) -> list[Section]:
    """Spectra of one experiment on shared axes; so are those of all plain results."""
    groups: dict[str, list[int]] = {}
    for place, section in enumerate(sections):
        groups.setdefault(section.experiment and section.name, []).append(place)
    shared = list(sections)
    for places in groups.values():
        charts = iter(share_axes([chart for place in places for chart in sections[place].charts]))
        for place in places:
            own = tuple(next(charts) for _ in sections[place].charts)
            shared[place] = dataclasses.replace(sections[place], charts=own)
    return shared


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rows as JSON holds them: the names of ``columns`` and the ``values`` of each; NaN as
    {"number": "nan"}.

    Values of one column are alike, and so packed smaller than row by row.
    """
    columns = list(dict.fromkeys(key for row in rows for key in row))
    values = [[_plain(row.get(column)) for row in rows] for column in columns]
    return {"columns": columns, "values": values}


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


def _identifiers(titles: Sequence[str]) -> list[str]:
    """A distinct name for every section that an address can hold."""
    identifiers: dict[str, None] = {}
    # the number to try next, so that many of one title do not try all before it
    following: dict[str, int] = {}
    for title in titles:
        base = name = slug(title)
        while name in identifiers:
            number = following.get(base, 2)
            name, following[base] = f"{base}-{number}", number + 1
        identifiers[name] = None
    return list(identifiers)


def slug(text: str) -> str:
    """A text as part of an address or a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "section"


def page(results: Any, path: str | Path, title: str = "Measurements") -> Path:
    """Write results to one HTML file and return its path.

    ``results`` is a result, a mapping from names, a sequence, or a folder: of saved results, of the
    stores of experiments, or of both. The file needs no server and no network: it holds its charts,
    tables and data.
    """
    sections = [_section_of(name, result) for name, result in named_results(results).items()]
    if isinstance(results, str | Path):
        sections = [*_sections_of_stores([results]), *sections]
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
        _section_of(name, result, Path(folder))
        for folder in listed
        for name, result in named_results(folder).items()
    ]
    title = "Measurements" if results else "Reproductions"
    return write_page([*_sections_of_stores(listed), *results], path, title)


def write_page(sections: Sequence[Section], path: str | Path, title: str) -> Path:
    """Write the page of given sections."""
    cure = "name a folder with saved results or with the stores of experiments"
    require(len(sections) > 0, "the page", "have something to show", "no results", cure)
    from plotly.offline import get_plotlyjs

    path = Path(path)
    other = path.suffix.lower() in (".pdf", ".png", ".svg")
    cure = "figures of results are saved by lh.plot(result).figure.savefig"
    require(not other, "path", "name an HTML file", str(path), cure)
    make_folder(path.parent)
    write_atomically(path, document(sections, title, get_plotlyjs()).encode())
    return path


def _section_of(name: str, result: Any, folder: Path | None = None) -> Section:
    """The section of a result; the error for a damaged one names it and its place."""
    try:
        return section_of_result(name, result)
    except Exception as error:  # whatever is wrong inside a result, a reader wants to know which
        place = name if folder is None else str(folder / name)
        text = " ".join(str(error).split())[:200]
        got = f"got one that fails with {type(error).__name__}: {text}"
        raise ValueError(f"{place} must be a result that can be shown, {got}") from error


def _sections_of_stores(folders: Sequence[str | Path], find: Find | None = None) -> list[Section]:
    """Paper by paper, in the order of the registry."""
    known = {name: place for place, name in enumerate(published.PLACES)}
    stores = [store for folder in folders for store in stores_in(folder)]
    stores.sort(key=lambda store: known.get(store.experiment, len(known)))
    return [section_of_store(store, experiment_of(store, find)) for store in stores]
