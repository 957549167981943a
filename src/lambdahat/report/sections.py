"""What the page shows: a section for every experiment or result, and how each kind becomes one."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from lambdahat._check import describe, require
from lambdahat.experiments import registry
from lambdahat.experiments.experiment import SCALES, Experiment, Row
from lambdahat.experiments.findings import findings
from lambdahat.experiments.reproduction import Table, Verdict
from lambdahat.experiments.store import Store
from lambdahat.measurements import Measurement
from lambdahat.report.chains import settings_text
from lambdahat.report.configurations import in_full, in_short
from lambdahat.report.figures import estimates_in
from lambdahat.report.result_charts import charts_of, fields_table, records_table, tables_of
from lambdahat.report.style import counted, value_text
from lambdahat.results import Estimate, Result
from lambdahat.results.charts import Chart
from lambdahat.storage import is_result_file
from lambdahat.training.runs import Run


@dataclass(frozen=True)
class Card:
    """A number with its error, large: ``detail`` is its interval, ``remedy`` what its status asks for."""

    label: str
    value: str
    detail: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Section:
    """One part of the page. ``facts`` are configuration, versions and seeds; ``rows`` what can be downloaded."""

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
    experiment: str = ""  # its short name: of several runs of one experiment the largest counts in the totals
    size: int = 0  # the place of its scale among all


def section_of_store(store: Store, experiment: Experiment | None) -> Section:
    """The section of one experiment at one scale, from its store alone; without ``experiment`` its rows only."""
    rows, about, failed = store.rows(), store.about(), store.errors()
    notes = [f"{counted(len(failed), 'cell')} raised; the last error: {failed[-1][1].strip()}"] if failed else []
    if store.scale == "smoke":
        notes.append("Smoke scale: sizes are tiny and show that the code runs; verdicts say nothing about the paper.")
    found = None if experiment is None else findings(experiment, store)
    done, total = (len(store.finished()),) * 2 if found is None else (found.done, found.total)
    facts = {"scale": store.scale, **{k: v for k, v in about.items() if k not in ("experiment", "scale", "command")}}
    facts |= {"cells": f"{done:,} of {total:,}", "rows": f"{len(rows):,}", "time of all cells": _time(store.seconds())}
    if seeds := rows.distinct("seed"):
        facts["seeds"] = _listed_seeds(seeds)
    command = about.get("command") or f"lambdahat reproduce {store.experiment} --scale {store.scale}"
    name = f"{store.experiment}-{store.scale}"
    if experiment is None or found is None:
        notes.append("This version of lambdahat does not know the experiment: its rows are here, its claims are not.")
        return Section(store.experiment, notes=tuple(notes), facts=facts, command=command, rows=rows, name=name,
                       setting=f"{store.scale} scale")  # fmt: skip
    config = experiment.scales.get(store.scale)
    facts |= in_full(config)
    return Section(
        experiment.title, about=_purpose(experiment), paper=experiment.paper, assumptions=experiment.assumptions,
        notes=(*notes, *found.notes), facts=facts, command=command, rows=rows, name=name,
        setting=f"{store.scale} scale", part=experiment.part, verdicts=found.verdicts, charts=found.charts,
        tables=found.tables, ran=in_short(config), experiment=store.experiment,
        size=SCALES.index(store.scale) if store.scale in SCALES else 0,
    )  # fmt: skip


def _purpose(experiment: Experiment) -> str:
    """The docstring of the module that defines the experiment, without the marks of code in it.

    An experiment outside the registry is taken to be where its ``run`` is.
    """
    known = registry.PLACES.get(experiment.name)
    name = f"{registry.__package__}.{known[0]}" if known else experiment.run.__module__
    module = sys.modules.get(name)
    return (inspect.getdoc(module) or "").replace("``", "") if module is not None else ""


def _listed_seeds(seeds: Sequence[Any]) -> str:
    whole = all(isinstance(seed, int) for seed in seeds)
    if whole and len(seeds) > 3 and sorted(seeds) == list(range(min(seeds), max(seeds) + 1)):
        return f"{min(seeds)} to {max(seeds)}"
    return ", ".join(str(seed) for seed in seeds)


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def section_of_result(name: str, result: Any) -> Section:
    """The section of one result of any kind."""
    if isinstance(result, Measurement):
        return _measured(name, result)
    charts = tuple(charts_of(result))
    cards = tuple(_cards(name if isinstance(result, Estimate) else "", result, bool(charts)))
    tables = tuple(tables_of(result))
    if not cards and not tables and not charts:
        tables = (fields_table(result),)
    facts = {str(key): str(value) for key, value in getattr(result, "about", {}).items()}
    rows = tuple(dict(row) for row in result.history) if isinstance(result, Run) else ()
    status = getattr(result, "status", None)
    notes = (f"{status.name}: {status.value}",) if status is not None and not status.ok else ()
    return Section(
        name, setting=type(result).__name__, cards=cards, charts=charts, tables=tables, notes=notes,
        facts=facts, rows=rows, name=name,
    )  # fmt: skip


def _measured(name: str, measurement: Measurement) -> Section:
    """The numbers of all parts as cards or a table, and the charts of each."""
    rows = measurement.table()
    found = {part: charts_of(result) for part, result in measurement.results.items()}
    cards = tuple(
        card for part, result in measurement.results.items() for card in _cards(part, result, bool(found[part]))
    )
    charts = [
        dataclasses.replace(chart, title=f"{part}: {chart.title}") for part, each in found.items() for chart in each
    ]
    tables = [records_table("Numbers", rows)] if rows else []
    tables += [
        Table(f"{part}: {table.title}", table.header, table.rows)
        for part, result in measurement.results.items()
        for table in tables_of(result)
    ]
    about = {str(key): str(value) for key, value in measurement.about.items()}
    return Section(name, setting="Measurement", cards=cards, charts=tuple(charts), tables=tuple(tables), facts=about,
                   rows=rows, name=name)  # fmt: skip


def _cards(name: str, result: Any, drawn: bool) -> Iterator[Card]:
    """A card for every number in a result, unless it is ``drawn``: then its charts show them."""
    if isinstance(result, Estimate) and not isinstance(result.value, Tensor):
        low, high = result.interval()
        exact = float(result.stderr) == 0
        known = not exact and all(abs(float(end)) < float("inf") for end in (low, high))
        detail = f"95 %: {float(low):.5g} to {float(high):.5g}" if known else ""
        detail = "; ".join(part for part in (detail, settings_text(result)) if part)
        remedy = "" if result.status.ok else f"{result.status.name}: {result.status.value}"
        yield Card(name, value_text(result), detail, remedy)
        wbic = getattr(result, "wbic", None)
        if wbic is not None:
            yield from _cards(f"{name}.wbic", wbic, False)
    elif not drawn:
        for part, value in estimates_in(result).items():
            yield from _cards(f"{name}.{part}" if name else str(part), value, bool(charts_of(value)))


def named_results(results: Any) -> dict[str, Any]:
    """Results by name: of a mapping, a sequence, one result, or a folder of saved ones."""
    if isinstance(results, str | Path):
        return dict(saved_in(Path(results)))
    if isinstance(results, Result):
        return {type(results).__name__: results}
    if isinstance(results, Mapping):
        return {str(name): result for name, result in results.items()}
    require(isinstance(results, Iterable), "results", "be a result, several, or a folder of them", describe(results),
            error=TypeError)  # fmt: skip
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
    """The results saved in a folder and below, by their path; the parts of a measurement come with it."""
    require(folder.is_dir(), "results", "name a folder of saved results", f"{folder} (no such folder)", "",
            FileNotFoundError)  # fmt: skip
    for path in sorted(folder.rglob("*.json")):
        index = path.parent / "measurement.json"
        if (index.is_file() and path != index) or not is_result_file(path):
            continue
        try:
            result = Result.load(path)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if str(path) in str(error):
                raise
            raise ValueError(f"{path} must be a result written by save(), got another: {error}") from error
        place = path.parent if path == index else path.with_suffix("")
        yield str(place.relative_to(folder)) if place != folder else folder.name or type(result).__name__, result
