"""What the page shows: a section for every experiment or result, and how each kind becomes one."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from lambdahat._core.check import describe, require, why_not
from lambdahat._core.storage import is_result_file
from lambdahat.experiments import published
from lambdahat.experiments.kit.cells import Cell, Row
from lambdahat.experiments.kit.claims import OPEN, UNTESTED, Table, Verdict
from lambdahat.experiments.kit.experiment import SCALES, Experiment, findings
from lambdahat.experiments.kit.store import Store
from lambdahat.randommatrix import Advice
from lambdahat.report import figures  # noqa: F401  (registers the charts)
from lambdahat.report.style import sentence
from lambdahat.results import Chains, Estimate, LearningCoefficient, Result
from lambdahat.results.charts import (
    Chart,
    charts_of,
    count_text,
    headline_of,
    is_number,
    label_text,
    leaves,
    settings_text,
    value_text,
)
from lambdahat.results.measurement import Measurement
from lambdahat.singular.curves import CoefficientCurve
from lambdahat.singular.verification import Verification
from lambdahat.training.history import Run

# what a reader asks for first, in this order
FIRST = (
    *("data", "network", "networks", "net", "nets", "layers", "width", "model", "training"),
    *("held_out", "test", "samples", "size", "sizes", "nodes", "epochs", "seeds", "batch", "rate"),
)
Find = Callable[[str], Experiment]
SEEDED = ("seed", "seeds", "group")  # settings of a cell that tell seeds apart
MAX_PARTS = 10  # parts of the line
LONG = 80  # letters of one part


def in_full(cells: Sequence[Cell]) -> dict[str, str]:
    """The number of cells, and the values of all settings but the seed."""
    settings: dict[str, dict[str, None]] = {}
    for name, value in (pair for cell in cells for pair in cell.items() if pair[0] != "seed"):
        settings.setdefault(f"config: {name}", {})[str(value)] = None
    texts = {name: " / ".join(values) for name, values in settings.items()}
    return {"config: cells": str(len(cells)), **texts} if cells else {}


def in_short(cells: Sequence[Cell]) -> str:
    """What was run, as "data: mnist · training: 4,096 · epochs: 35 / 80": a setting of several
    values has all of them.

    Numbers, words and short lists of them are shown, and how many seeds there are, those of
    ``FIRST`` first; what is zero or empty is left out.
    """
    settings: dict[str, dict[str, None]] = {}
    for name, value in (pair for cell in cells for pair in cell.items()):
        told = value and name not in SEEDED
        for part in _configured_parts(value) if told else ():
            if isinstance(part, str | int | float) and not isinstance(part, bool):
                settings.setdefault(name, {})[_word(part)] = None
    if seeds := {seed for cell in cells for seed in _seeds_of(cell)} - {None}:
        settings["seeds"] = {_word(len(seeds)): None}
    order = sorted(settings, key=lambda name: (*FIRST, name).index(name))
    parts = [f"{name.replace('_', ' ')}: {' / '.join(settings[name])}" for name in order]
    return " · ".join([part for part in parts if len(part) <= LONG][:MAX_PARTS])


def _seeds_of(cell: Mapping[str, Any]) -> list[Any]:
    """The seed of a cell, or those that it runs together: a list, or how many of its group."""
    seeds = cell.get("seeds", [cell.get("seed")])
    return seeds if isinstance(seeds, list) else [(cell.get("group"), i) for i in range(seeds)]


def _configured_parts(value: Any) -> list[Any]:
    """The members of a list, else the value; a tuple such as ("ffnn", 2, 64) is one value."""
    if not isinstance(value, list | tuple):
        return [value]
    if len({isinstance(part, str) for part in value}) > 1:
        return [" ".join(map(str, value))]
    return [" ".join(map(str, part)) if isinstance(part, list | tuple) else part for part in value]


def _word(value: Any) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


@dataclass(frozen=True)
class Card:
    """A headline number with its interval (``detail``) and the ``remedy`` of its status."""

    label: str
    value: str
    detail: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Section:
    """One part of the page: ``facts`` are settings and versions, ``rows`` can be downloaded."""

    title: str
    about: str = ""
    paper: str = ""
    verdicts: tuple[Verdict, ...] = ()
    cards: tuple[Card, ...] = ()
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()
    assumptions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    rows: Sequence[Row] = ()
    setting: str = ""  # such as the scale, in small letters below the title
    name: str = ""  # of the files that are downloaded
    part: str = ""  # of the paper: sections, tables, figures
    ran: str = ""  # data, network, epochs and seeds in one line
    # its short name: of several runs of one experiment the largest counts in the totals
    experiment: str = ""
    size: int = 0  # the place of its scale among all
    headline: str = ""  # the answer in one sentence, with the number
    lead: Verdict | None = None  # on the claim that the headline is about
    smoke: bool = False  # a run that shows that the code runs, and decides nothing


def experiment_of(store: Store, find: Find | None = None) -> Experiment | None:
    """The experiment of a store; None where another version of the library has made it."""
    try:
        return (find or published.find)(store.experiment)
    except ValueError:
        return None


def section_of_store(store: Store, experiment: Experiment | None) -> Section:
    """The section of one experiment at one scale, from its store; rows only without it."""
    rows, about, failed = store.rows(), store.about(), store.errors()
    notes: tuple[str, ...] = ()
    if failed:
        raised = f"{count_text(len(failed), 'cell')} raised"
        notes = (f"{raised}; the last error: {failed[-1][1].strip()}",)
    outcome = None if experiment is None else findings(experiment, store)
    done, total = (len(store.finished()),) * 2 if outcome is None else (outcome.done, outcome.total)
    stated = {k: v for k, v in about.items() if k not in ("experiment", "scale", "command")}
    seconds = store.seconds()
    time = f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
    time = f"{seconds:.1f} s" if seconds < 120 else time
    facts = {"scale": store.scale, **stated, "cells": f"{done:,} of {total:,}"}
    facts |= {"rows": f"{len(rows):,}", "time of all cells": time}
    if seeds := rows.distinct("seed"):
        facts["seeds"] = _listed_seeds(seeds)
    command = f"lambdahat reproduce {store.experiment} --scale {store.scale}"
    section = Section(
        store.experiment,
        facts=facts,
        command=about.get("command") or command,
        rows=rows,
        name=f"{store.experiment}-{store.scale}",
        setting=f"{store.scale} scale",
    )
    if experiment is None or outcome is None:
        unknown = "This version of lambdahat does not know the experiment"
        unknown += ": its rows are here, its claims are not."
        return replace(section, notes=(*notes, unknown))
    smoke = store.scale == SCALES[0]
    lead = None if smoke else headline_claim(outcome.verdicts)
    cells = experiment.scales.get(store.scale, [])
    return replace(
        section,
        title=experiment.title,
        about=_purpose(experiment),
        paper=experiment.paper,
        assumptions=experiment.assumptions,
        notes=(*notes, *outcome.notes),
        facts=facts | in_full(cells),
        part=experiment.part,
        verdicts=outcome.verdicts,
        charts=_key_first(outcome.charts, lead),
        tables=outcome.tables,
        ran=in_short(cells),
        experiment=store.experiment,
        size=SCALES.index(store.scale) if store.scale in SCALES else 0,
        headline=_answer(outcome.verdicts, lead, smoke),
        lead=lead,
        smoke=smoke,
    )


def headline_claim(verdicts: Sequence[Verdict]) -> Verdict | None:
    """The verdict that answers the question of an experiment: on the claim that is marked so, else
    on the paper's first that is decided, then on our first, then on the first undecided one.
    """
    tested = [one for one in verdicts if one.verdict != UNTESTED]
    order = [(not one.headline, one.verdict == OPEN, one.own) for one in tested]
    return tested[order.index(min(order))] if tested else None


def _key_first(charts: Sequence[Chart], lead: Verdict | None) -> tuple[Chart, ...]:
    """The charts, first the one whose labels have most words of the claim that the headline tells;
    of several the first.
    """
    words = set(re.findall(r"\w+", lead.claim)) if lead is not None else set[str]()
    labels = (f"{chart.title} {chart.y_label}" for chart in charts)
    shared = [len(words.intersection(re.findall(r"\w+", label))) for label in labels]
    key = shared.index(max(shared)) if shared else 0
    return (*charts[key : key + 1], *charts[:key], *charts[key + 1 :])


def _answer(verdicts: Sequence[Verdict], lead: Verdict | None, smoke: bool) -> str:
    """The first sentence of a section: the claim that matters most, and our numbers."""
    if smoke:
        return "A smoke run: it shows that the code runs, and says nothing about the claims"
    if lead is None:
        return "None of the claims can be tested by this run" if verdicts else ""
    return f"{sentence(lead.claim)}: {lead.answer or lead.evidence}"


def _purpose(experiment: Experiment) -> str:
    """The docstring of the module that defines the experiment, without the marks of code in it.

    An experiment outside the registry is taken to be where its ``run`` is.
    """
    known = published.PLACES.get(experiment.name)
    name = f"{published.__package__}.{known[0]}" if known else experiment.run.__module__
    module = sys.modules.get(name)
    return (inspect.getdoc(module) or "").replace("``", "") if module is not None else ""


def _listed_seeds(seeds: Sequence[Any]) -> str:
    whole = all(isinstance(seed, int) for seed in seeds)
    if whole and len(seeds) > 3 and sorted(seeds) == list(range(min(seeds), max(seeds) + 1)):
        return f"{min(seeds)} to {max(seeds)}"
    return ", ".join(str(seed) for seed in seeds)


def section_of_result(name: str, result: Any) -> Section:
    """The section of one result of any kind."""
    parts = _parts(name, result)
    cards = tuple(card for part, value in parts for card in _cards(part, value))
    # a card shows a number better than a figure
    charts = [] if is_number(result) else charts_of(result)
    labels = {card.label for card in cards}
    for place, chart in enumerate(charts):
        rest = [row for row in chart.rows if row[0].removesuffix(", measured at") not in labels]
        charts[place] = replace(chart, rows=tuple(rest))
    tables = [table for part, value in parts for table in tables_of(part, value)]
    rows: Sequence[Row] = tuple(map(dict, result.history)) if isinstance(result, Run) else ()
    if isinstance(result, Measurement) and (rows := result.table()):
        tables.insert(0, records_table("Numbers", [_in_words(row) for row in rows]))
    charts = [each for each in charts if each.rows or each.series or each.heat or each.warning]
    if not cards and not tables and not charts:
        tables = [fields_table(result)]
    facts = {str(key): str(value) for key, value in getattr(result, "about", {}).items()}
    status = getattr(result, "status", None)
    notes = (f"{status.name}: {status.value}",) if status is not None and not status.ok else ()
    return Section(
        name,
        setting=re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(result).__name__).lower(),
        headline=headline_of(result, name),
        cards=cards,
        charts=tuple(charts),
        tables=tuple(tables),
        notes=notes,
        facts=facts,
        rows=rows,
        name=name,
    )


def _in_words(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a measurement's table, the value with its error in one cell."""
    value = value_text(Estimate(row["value"], row["stderr"]))
    columns = {"quantity": label_text(row["quantity"]), "value ± standard error": value}
    return columns | {key: row[key] for key in row if key not in ("value", "stderr", *columns)}


def _parts(name: str, result: Any) -> list[tuple[str, Any]]:
    """The results in a measurement, a mapping or a group, or the one result itself."""
    if isinstance(result, Measurement):
        return list(leaves(result.results))
    parts = list(leaves({name: result}))
    if parts and parts[0][1] is result:
        return [(name if isinstance(result, Estimate) else "", result)]
    return [(part.removeprefix(f"{name}."), value) for part, value in parts]


def _cards(name: str, result: Any) -> Iterator[Card]:
    """A card for a number and for what it brings."""
    if not isinstance(result, Estimate) or isinstance(result.value, Tensor):
        return
    low, high = result.interval()
    exact = float(result.stderr) == 0
    known = not exact and all(abs(float(end)) < float("inf") for end in (low, high))
    digits = 5
    if known and high > low:  # enough for the ends to differ
        size, width = max(abs(float(low)), abs(float(high))), float(high - low)
        digits = max(digits, min(math.floor(math.log10(size / width)) + 3, 10))
    detail = f"95 %: {float(low):.{digits}g} to {float(high):.{digits}g}" if known else ""
    detail = "; ".join(part for part in (detail, settings_text(result)) if part)
    remedy = "" if result.status.ok else f"{result.status.name}: {result.status.value}"
    yield Card(label_text(name), value_text(result), detail, remedy)
    wbic = getattr(result, "wbic", None)
    if wbic is not None:
        yield from _cards(f"{name}.wbic", wbic)


def tables_of(name: str, result: Any) -> list[Table]:
    """The tables that go with a result's charts; ``name`` stands before their titles."""
    before = f"{name}: " if name and not isinstance(result, LearningCoefficient) else ""
    chains = result.chains if isinstance(result, LearningCoefficient) else result
    if isinstance(chains, Chains) and chains.reasons:
        title, rows = f"{before}How the settings were chosen", tuple(chains.reasons.items())
        return [Table(title, ("setting", "why"), rows)]
    if isinstance(result, Advice | Verification | CoefficientCurve):
        return [records_table(f"{before}Numbers", result.table())]
    return []


def fields_table(result: Any) -> Table:
    """The fields of a result without charts, or the items of a mapping: arrays by their shape."""
    fields: Mapping[str, Any] = {"value": result}
    if isinstance(result, Mapping):
        fields = result
    elif dataclasses.is_dataclass(result):
        fields = {one.name: getattr(result, one.name) for one in dataclasses.fields(result)}
    texts = {k: value if isinstance(value, str) else describe(value) for k, value in fields.items()}
    rows = tuple((str(name), text) for name, text in texts.items())
    return Table(type(result).__name__, ("field", "value"), rows)


def records_table(title: str, records: list[dict[str, Any]]) -> Table:
    """Records as a table, numbers with six digits."""
    header = tuple(dict.fromkeys(key for record in records for key in record))
    lines = []
    for values in ([record.get(key) for key in header] for record in records):
        texts = [f"{value:.6g}" if isinstance(value, float) else str(value) for value in values]
        pairs = zip(values, texts, strict=True)
        lines.append(tuple("" if value is None else text for value, text in pairs))
    return Table(title, header, tuple(lines))


def named_results(results: Any) -> dict[str, Any]:
    """Results by name: of a mapping, a sequence, one result, or a folder of saved ones."""
    if isinstance(results, str | Path):
        return dict(saved_in(Path(results)))
    if isinstance(results, Result):
        return {type(results).__name__: results}
    if isinstance(results, Mapping):
        return {str(name): result for name, result in results.items()}
    expected = "be a result, several, or a folder of them"
    require(isinstance(results, Iterable), "results", expected, describe(results), error=TypeError)
    listed = list(results)
    total = Counter(type(result).__name__ for result in listed)
    so_far: Counter[str] = Counter()
    named = {}
    for result in listed:
        kind = type(result).__name__
        so_far[kind] += 1
        named[kind if total[kind] == 1 else f"{kind} {so_far[kind]}"] = result
    return named


def saved_in(folder: Path) -> Iterator[tuple[str, Result]]:
    """The results saved in a folder and below, by their path; a measurement has its parts."""
    expected, got = "name a folder of saved results", f"{folder} ({why_not(folder, 'folder')})"
    require(folder.is_dir(), "results", expected, got, "", FileNotFoundError)
    for path in sorted(folder.rglob("*.json")):
        index = path.parent / "measurement.json"
        if (index.is_file() and path != index) or not is_result_file(path):
            continue
        try:
            result = Result.load(path)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if str(path) in str(error):
                raise
            expected = "be a result written by save()"
            raise ValueError(f"{path} must {expected}, got another: {error}") from error
        place = path.parent if path == index else path.with_suffix("")
        name = folder.name or type(result).__name__
        yield name if place == folder else str(place.relative_to(folder)), result
