"""``lambdahat reproduce``, ``report`` and ``demo``: sweeps, their claims, and the page."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from lambdahat.cli.exits import FAILED, NOT_CONVERGED, OK, InputError, say
from lambdahat.cli.measurements import bars
from lambdahat.cli.options import SweepChoices
from lambdahat.cli.printing import markdown_table, print_json, print_table, text_table
from lambdahat.experiments import published
from lambdahat.experiments.kit.cells import label_of
from lambdahat.experiments.kit.claims import Table
from lambdahat.experiments.kit.experiment import SCALES, Experiment, Findings, findings
from lambdahat.experiments.kit.store import Store, stores_in
from lambdahat.experiments.kit.sweeps import CellForecast, forecast, sweep
from lambdahat.experiments.ngd.epochs import DIGITS
from lambdahat.report.figures import draw, save_figure
from lambdahat.report.page import page_of_folders, page_of_stores
from lambdahat.results import write_atomically

DEMO_SCALE = "cpu"
CLAIMS_HEADER = ("verdict", "claim", "source", "published", "here")


def select_names(names: list[str] | None, everything: bool) -> list[str]:
    """The experiments that a command names."""
    if everything and not names:
        return list(published.PLACES)
    if not names or everything:
        came = "both" if names else "none"
        cure = "--list describes them"
        raise InputError(f"EXPERIMENTS must be some names or --all, got {came}; {cure}")
    return list(dict.fromkeys(names))


def list_experiments() -> None:
    """A table for each paper, a line for each experiment: cells of its scales, and what it is.

    A star marks those to be run at ``paper`` scale too.
    """
    header = ("experiment", *(f"cells, {scale}" for scale in SCALES), "what")
    for paper, experiments in groupby(published.every(), key=lambda experiment: experiment.paper):
        rows = []
        for experiment in experiments:
            counts = [f"{len(experiment.grid(scale)):,}" for scale in SCALES]
            counts[-1] += " *" if experiment.name in published.PAPER_SCALE else ""
            rows.append((experiment.name, *counts, f"{experiment.title} ({experiment.part})"))
        print_table(header, rows, paper)
        print()
    where = "the page 'Reproductions of published results' of the documentation says what came out"
    print(f"* marked for the scale paper too; {where}")


def run_reproduce(
    names: list[str], out: Path, choices: SweepChoices, as_json: bool, quiet: bool
) -> int:
    """Run experiments, print and write; 0 whatever the verdicts, for a claim that does not hold is
    a finding.

    1 where a cell raised: its error is in the store, and the next run tries it again. 3 where all
    cells are there and their rows cannot be read.
    """
    experiments = [published.find(name) for name in names]
    documents, code = [], OK
    for experiment in experiments:
        with bars(quiet):
            command = " ".join(["lambdahat", *sys.argv[1:]])
            store = sweep(experiment, out, command=command, **asdict(choices))
        code = max(code, say_errors(store))
        if len(store.rows()) == 0:
            continue
        outcome = findings(experiment, store)
        code = max(code, say_notes(store, outcome))
        write_tables(experiment, outcome, out / f"{experiment.name}-{choices.scale}")
        documents.append(document(experiment, store, outcome))
        if not (as_json or quiet):
            show(experiment, choices.scale, outcome)
    if any(len(store.rows()) for store in stores_in(out)):
        page = page_of_stores(out, out / "report.html")
        if not (as_json or quiet):
            print(f"written to {out}; open {page}")
    if as_json:
        print_json(documents)
    return code


def run_forecast(
    names: list[str], out: Path, choices: SweepChoices, as_json: bool, quiet: bool
) -> int:
    """What the missing cells would take, from a few of them run for a few epochs."""
    documents = []
    for experiment in [published.find(name) for name in names]:
        scale, only, device = choices.scale, choices.only, choices.device
        with bars(quiet):
            forecasts = [*forecast(experiment, out, scale=scale, only=only, device=device)]
        known = [row for row in forecasts if not math.isnan(row.seconds)]
        cells = sum(row.cells for row in forecasts)
        totals = {
            "cells": cells,
            "minutes": math.fsum(row.total for row in known) / 60,
            "cells not forecast": cells - sum(row.cells for row in known),
        }
        settings = [
            {**asdict(row), "seconds": None if math.isnan(row.seconds) else row.seconds}
            for row in forecasts
        ]
        about = {"experiment": experiment.name, "scale": scale, "device": device}
        documents.append(about | totals | {"settings": settings})
        if not as_json:
            _show_forecast(experiment, device, forecasts, totals)
    if as_json:
        print_json(documents)
    return OK


def _show_forecast(
    experiment: Experiment, device: str, forecasts: list[CellForecast], totals: dict[str, Any]
) -> None:
    """A line for each setting, named by what differs between them, and the sum."""
    if not forecasts:
        print(f"{experiment.name}: no cells are left")
        return
    names = dict.fromkeys(name for row in forecasts for name in row.setting)
    varying = [name for name in names if len({str(row.setting.get(name)) for row in forecasts}) > 1]
    rows = []
    for row in forecasts:
        label = label_of({name: row.setting[name] for name in varying if name in row.setting})
        times = [f"{row.seconds:.3g}", f"{row.total / 60:.3g}"]
        times = ["?", "?"] if math.isnan(row.seconds) else times
        rows.append((label or "all", f"{row.cells:,}", *times, row.source))
    header = ("setting", "cells", "seconds of one", "minutes of all", "how it is known")
    print_table(header, rows, experiment.title)
    unknown = totals["cells not forecast"]
    rest = f"; {unknown:,} of them could not be forecast" if unknown else ""
    print(
        f"{totals['cells']:,} cells are left: about {totals['minutes']:.3g} minutes on {device},"
        f" one at a time{rest}\n"
    )


def run_report(folders: list[Path], out: Path, quiet: bool) -> int:
    """The page from what is stored alone."""
    for folder in folders:
        if not folder.is_dir():
            expected = "be folders with stored rows or results"
            raise InputError(f"FOLDERS must {expected}, got {str(folder)!r}")
    page = page_of_folders(folders, out)
    if not quiet:
        print(f"written to {page}")
    return OK


def say_errors(store: Store) -> int:
    """A line for each cell that raised, on standard error, and the exit code."""
    errors = store.errors()
    for cell, error in errors:
        say(f"{store.experiment}, {label_of(cell)}: {error.strip().splitlines()[-1]}")
    if errors:
        say(
            f"{len(errors)} cells raised; their tracebacks are in {store.path}, and the next run"
            " tries them again"
        )
    return NOT_CONVERGED if errors else OK


def say_notes(store: Store, outcome: Findings) -> int:
    """What the rows lack, on standard error, and the exit code."""
    for note in outcome.notes:
        say(f"{store.experiment}: {note}")
    return FAILED if outcome.faulty else OK


def tables_of(outcome: Findings) -> list[Table]:
    """The experiment's own tables, and the verdicts as one."""
    rows = tuple((v.verdict, v.claim, v.cited, v.published, v.evidence) for v in outcome.verdicts)
    return [*outcome.tables, *([Table("Claims", CLAIMS_HEADER, rows)] if rows else [])]


def assumptions_text(experiment: Experiment) -> str:
    """What the text leaves open, one line each."""
    lines = [f"- {text}" for text in experiment.assumptions]
    return "\n".join(["Assumed where the text is silent:", *lines])


def show(experiment: Experiment, scale: str, outcome: Findings) -> None:
    """Tables and assumptions on standard output."""
    print(f"{experiment.title} ({experiment.paper}, {experiment.part})\n\n{outcome.progress}\n")
    if scale == "smoke":
        print(
            "The scale smoke shows that all of it runs; its verdicts say nothing about the paper.\n"
        )
    for table in tables_of(outcome):
        print_table(table.header, table.rows, table.title)
        print()
    print(assumptions_text(experiment), end="\n\n")


def write_tables(experiment: Experiment, outcome: Findings, path: Path) -> None:
    """The same as text and as Markdown."""
    tables = tables_of(outcome)
    texts = [text_table(table.header, table.rows, table.title) for table in tables]
    marked = [f"**{each.title}**\n\n{markdown_table(each.header, each.rows)}" for each in tables]
    for suffix, parts in ((".txt", texts), (".md", marked)):
        text = "\n\n".join([outcome.progress, *parts, assumptions_text(experiment)]) + "\n"
        write_atomically(path.with_name(path.name + suffix), text.encode())


def document(experiment: Experiment, store: Store, outcome: Findings) -> dict[str, Any]:
    """The same for --json."""
    records: list[dict[str, Any]] = []
    for table in tables_of(outcome):
        rows = [dict(zip(table.header, row, strict=True)) for row in table.rows]
        records.append({"title": table.title, "rows": rows})
    count = len(outcome.tables)
    return {
        "experiment": experiment.name,
        "scale": store.scale,
        "about": store.about(),
        "cells": {"finished": outcome.done, "all": outcome.total},
        "notes": list(outcome.notes),
        "tables": records[:count],
        "claims": records[count]["rows"] if outcome.verdicts else [],
        "assumptions": list(experiment.assumptions),
    }


def run_demo(out: Path, seed: int, quiet: bool) -> int:
    """Train, measure, judge, write and print; 0 whatever the verdicts, 1 where a cell raised."""
    from joblib import cpu_count

    experiment = with_seeds(DIGITS, seed)
    # a cell gives the same numbers in any process
    jobs = min(cpu_count(), len(experiment.grid(DEMO_SCALE)))
    with bars(quiet), one_thread():
        command = f"lambdahat demo --seed {seed}"
        store = sweep(experiment, out, scale=DEMO_SCALE, jobs=jobs, resume=False, command=command)
    code = say_errors(store)
    if len(store.rows()) == 0:
        return code
    outcome = findings(experiment, store)
    code = max(code, say_notes(store, outcome))
    write_tables(experiment, outcome, out / "table")
    for number, chart in enumerate(outcome.charts, 1):
        axes: Any = draw(chart)
        save_figure(axes, out / f"figure-{number:02d}.png", dpi=110)
    page = page_of_stores(out, out / "report.html", title="Demonstration")
    if not quiet:
        show(experiment, DEMO_SCALE, outcome)
        print(f"rows, tables and figures are in {out}; open {page}")
    return code


def with_seeds(experiment: Experiment, seed: int) -> Experiment:
    """The experiment with other seeds at the demonstration's scale."""
    cells = [{**cell, "seed": seed + cell["seed"]} for cell in experiment.scales[DEMO_SCALE]]
    return replace(experiment, scales={**experiment.scales, DEMO_SCALE: cells})


@contextmanager
def one_thread() -> Iterator[None]:
    """Products this small take longer on several threads than on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
