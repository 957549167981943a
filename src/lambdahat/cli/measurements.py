"""``lambdahat measure`` and ``lambdahat compare``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from lambdahat._core.progress import progress
from lambdahat._measure import compare, measure, quantity_names
from lambdahat._quantities import MeasureSettings
from lambdahat.cli.exits import (
    OK,
    InputError,
    code_of,
    foreign_output,
    own_folder,
    rank,
    require_writable,
    say,
)
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
from lambdahat.results import Estimate, write_atomically
from lambdahat.results.charts import is_number, value_text
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


def run_compare(
    factory: str,
    checkpoints: Sequence[str],
    choices: ProblemChoices,
    question: Mapping[str, Any],
    out: Path | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Compare the checkpoints, print and write; the exit code."""
    require_writable(out)
    problems = {
        name: [load_problem(factory, replace(choices, checkpoint=path)) for path in paths]
        for name, paths in named_checkpoints(checkpoints).items()
    }
    with bars(quiet), foreign_output():
        found = compare(problems, **question)
    header = ("quantity", "name", "value ± error", "n", "status")
    rows = [
        (
            row["quantity"],
            row["name"],
            value_text(Estimate(row["value"], row["stderr"])),
            str(row["n"]),
            row["status"],
        )
        for row in found.table()
    ]
    title = ", ".join(f"{key} = {value:.5g}" for key, value in found.settings.items())
    if out is not None:
        found.save(out / "comparison.json")
        text = text_table(header, rows, title)
        write_atomically(out / "table.txt", f"{text}\n".encode())
        save_figure(plot(found), out / "comparison.png", dpi=110)
    if as_json:
        print_json({"settings": dict(found.settings), "results": found.table()})
    elif not quiet:
        print_table(header, rows, title)
        several = any(len(found) > 1 for part in found.readings.values() for found in part.values())
        print("± is one standard error over the seeds." if several else NOTE)
        if out is not None:
            print(f"written to {out}")
    every = [
        one.status for part in found.readings.values() for each in part.values() for one in each
    ]
    for status in dict.fromkeys(status for status in every if not status.ok):
        say(f"{status.name}: {status.value}")
    return code_of(every)


def named_checkpoints(words: Sequence[str]) -> dict[str, list[Path]]:
    """The files of each name: of FILE its stem, or what is before the = of NAME=FILE,FILE."""
    found: dict[str, list[Path]] = {}
    for word in words:
        name, equals, files = word.partition("=")
        paths = [Path(part) for part in (files if equals else word).split(",") if part]
        name = name if equals else _stem(paths[0]) if paths else ""
        if not name or not paths or name in found:
            raise InputError(
                f"CHECKPOINTS must be FILE or NAME=FILE with a name each, got {word!r}"
                + (f", a second {name!r}; write NAME={word}" if name in found else "")
            )
        found[name] = paths
    if len(found) < 2:
        raise InputError(
            f"CHECKPOINTS must be two or more, got {len(found)}; for one, use lambdahat measure"
        )
    return found


def _stem(path: Path) -> str:
    return path.stem if path.suffix else path.name


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
