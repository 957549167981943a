"""``lambdahat measure``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lambdahat._core.progress import progress
from lambdahat._measure import measure, quantity_names
from lambdahat._quantities import MeasureSettings
from lambdahat.cli.exits import OK, code_of, foreign_output, own_folder, rank, require_writable, say
from lambdahat.cli.forecast import HEADER as FORECAST_HEADER
from lambdahat.cli.forecast import as_document, forecast
from lambdahat.cli.loading import ProblemChoices, load_problem
from lambdahat.cli.printing import (
    NOTE,
    leaves,
    markdown_table,
    print_json,
    print_table,
    remedies,
    statuses,
    table_of,
    text_table,
)
from lambdahat.problem import Problem
from lambdahat.report.figures import plot, save_figure
from lambdahat.results import write_atomically
from lambdahat.results.charts import is_number
from lambdahat.results.measurement import Measurement


def run_measure(
    factory: str,
    choices: ProblemChoices,
    what: Sequence[str],
    settings: MeasureSettings,
    out: Path | None,
    vectors: bool,
    as_json: bool,
    dry_run: bool,
    quiet: bool,
) -> int:
    """Measure, print and write; the exit code."""
    names = quantity_names(what)
    if rank() == 0 and not dry_run:
        require_writable(out)
    problem = load_problem(factory, choices)
    if dry_run:
        return _predict(problem, names, settings, as_json)
    with bars(quiet), foreign_output(), own_folder(out) as folder:
        measurement = measure(
            problem,
            names,
            settings.curvature,
            depth=settings.depth,
            probes=settings.probes,
            top=settings.top,
            seed=settings.seed,
            sampling=settings.sampling,
            folder=folder,
            keep_vectors=vectors,
        )
    if rank() == 0:
        if out is not None:
            write_tables(measurement, out)
            write_figures(measurement, out)
        show(measurement, out, as_json, quiet)
    return code_of(statuses(measurement))


@contextmanager
def bars(quiet: bool) -> Iterator[None]:
    """Show progress bars on the first rank if standard error is a terminal, unless ``quiet``."""
    if quiet or rank():
        yield
    else:
        with progress():
            yield


def headline(measurement: Measurement) -> str:
    """One line on what was measured."""
    about = measurement.about
    return (
        f"{about['curvature']}: {about['parameters']:,} parameters, {about['samples']:,} samples, "
        f"{about['loss']} {about['loss_value']:.4g} ({about['dtype']}, {about['device']})"
    )


def show(measurement: Measurement, out: Path | None, as_json: bool, quiet: bool) -> None:
    """The table, or the JSON document, on standard output; remedies on standard error."""
    if as_json:
        place = {} if out is None else {"folder": str(out)}
        print_json({"about": measurement.about, "results": measurement.table(), **place})
    elif not quiet:
        print_table(*table_of(measurement), headline(measurement))
        print(NOTE)
        if out is not None:
            print(f"written to {out}")
    for line in remedies(measurement):
        say(line)


def write_tables(measurement: Measurement, folder: Path) -> None:
    """``table.txt`` and ``table.md``."""
    (header, rows), title = table_of(measurement), headline(measurement)
    write_atomically(folder / "table.txt", f"{text_table(header, rows, title)}\n{NOTE}\n".encode())
    write_atomically(
        folder / "table.md", f"{title}\n\n{markdown_table(header, rows)}\n{NOTE}\n".encode()
    )


def write_figures(measurement: Measurement, folder: Path) -> None:
    """``measurement.png``, and one figure for every result that is more than a number."""
    save_figure(plot(measurement), folder / "measurement.png", dpi=110)
    for name, result in leaves(measurement.results):
        if not is_number(result):
            save_figure(plot(result), folder / f"{name}.png")


def _predict(
    problem: Problem, names: Sequence[str], settings: MeasureSettings, as_json: bool
) -> int:
    with foreign_output():
        first, rows = forecast(problem, names, settings)
    if rank():
        return OK
    if as_json:
        print_json(as_document(first, rows))
    else:
        print_table(FORECAST_HEADER, [row.row() for row in rows], str(first))
    return OK
