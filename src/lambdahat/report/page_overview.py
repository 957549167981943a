"""The head of the page: experiments paper by paper with how many claims hold, all claims with
filters, the contents.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from lambdahat.experiments.kit.claims import LEVEL, Verdict
from lambdahat.report.page_tables import MARKS, OURS, badge, claim_of, grid, tally, unbroken
from lambdahat.report.sections import Card, Section
from lambdahat.results.charts import counted

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
    """Of the runs of one experiment that have verdicts the one of the largest scale; what is no
    experiment, too.
    """
    best: dict[str, Named] = {}
    for place in places:
        section, name = place
        key = section.experiment or f"#{name}"
        if section.verdicts and (key not in best or section.size > best[key][0].size):
            best[key] = place
    return list(best.values())


def _totals(places: Sequence[Named]) -> str:
    """How many claims hold and do not, the papers' and ours apart: each number asks for its
    claims.
    """
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
    """A line for each number, and one for each part that has none; a column in which nothing
    stands is left out.
    """
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
