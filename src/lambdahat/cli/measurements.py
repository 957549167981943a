"""``lambdahat measure`` and ``lambdahat compare``, and forecasts of what they cost."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lambdahat._core.progress import progress
from lambdahat._measure import compare, measure, quantity_names
from lambdahat.cli import exits, printing
from lambdahat.cli.loading import load_problem
from lambdahat.cli.options import Output, ProblemChoices
from lambdahat.estimators.quantities import CURVATURES, QUANTITIES, MeasureSettings
from lambdahat.krylov import random_vector
from lambdahat.operators.base import LinearOperator
from lambdahat.operators.curvature import Curvature
from lambdahat.problem import Problem
from lambdahat.report.figures import plot, save_figure
from lambdahat.results import Estimate, LearningCoefficient, write_atomically
from lambdahat.results.charts import is_number, value_text
from lambdahat.results.measurement import Measurement, number_rows

FORECAST_HEADER = ("quantity", "products", "time", "memory for vectors")


def run_measure(
    factory: str,
    checkpoint: Path | None,
    choices: ProblemChoices,
    what: Sequence[str],
    settings: MeasureSettings,
    vectors: bool,
    output: Output,
    dry_run: bool,
) -> int:
    """Measure, print and write; the exit code."""
    names = quantity_names(what)
    if exits.rank() == 0 and not dry_run:
        exits.require_writable(output.out)
    problem = load_problem(factory, choices, checkpoint)
    if dry_run:
        return _predict(problem, names, settings, output.as_json)
    with bars(output.quiet), exits.foreign_output(), exits.own_folder(output.out) as folder:
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
    if exits.rank() == 0:
        if output.out is not None:
            write_tables(measurement, output.out)
            # `measurement.png`, and one figure for every result that is more than a number
            save_figure(plot(measurement), output.out / "measurement.png", dpi=110)
            for name, result in printing.leaves(measurement.results):
                if not is_number(result):
                    save_figure(plot(result), output.out / f"{name}.png")
        show(measurement, output)
    return exits.code_of(printing.statuses(measurement))


def run_compare(
    factory: str,
    checkpoints: Sequence[str],
    choices: ProblemChoices,
    output: Output,
    **question: Any,
) -> int:
    """Compare the checkpoints, print and write; the exit code."""
    out = output.out
    exits.require_writable(out)
    problems = {
        name: [load_problem(factory, choices, path, "CHECKPOINTS") for path in paths]
        for name, paths in named_checkpoints(checkpoints).items()
    }
    with bars(output.quiet), exits.foreign_output():
        comparison = compare(problems, **question)
    header = ("quantity", "name", "value ± error", "seeds", "status")
    rows = []
    for row in comparison.table():
        value = value_text(Estimate(row["value"], row["stderr"]))
        rows.append((row["quantity"], row["name"], value, str(row["n"]), row["status"]))
    title = printing.settings_text(comparison.settings)
    if out is not None:
        comparison.save(out / "comparison.json")
        text = printing.text_table(header, rows, title)
        write_atomically(out / "table.txt", f"{text}\n".encode())
        save_figure(plot(comparison), out / "comparison.png", dpi=110)
    measured = [each for part in comparison.readings.values() for each in part.values()]
    if output.as_json:
        printing.print_json({"settings": dict(comparison.settings), "results": comparison.table()})
    elif not output.quiet:
        printing.print_table(header, rows, title)
        several = any(len(each) > 1 for each in measured)
        print("± is one standard error over the seeds." if several else printing.NOTE)
        output.print_folder()
    every = [one.status for each in measured for one in each]
    for status in dict.fromkeys(status for status in every if not status.ok):
        exits.say(f"{status.name}: {status.value}")
    return exits.code_of(every)


def named_checkpoints(words: Sequence[str]) -> dict[str, list[Path]]:
    """The files of each name: of FILE its stem, or what is before the = of NAME=FILE,FILE."""
    named: dict[str, list[Path]] = {}
    for word in words:
        name, equals, files = word.partition("=")
        paths = [Path(part) for part in (files if equals else word).split(",") if part]
        if not equals and paths:
            name = paths[0].stem if paths[0].suffix else paths[0].name
        if not name or not paths or name in named:
            raise exits.InputError(
                f"CHECKPOINTS must be FILE or NAME=FILE with a name each, got {word!r}"
                + (f", a second {name!r}; write NAME={word}" if name in named else "")
            )
        named[name] = paths
    if len(named) < 2:
        raise exits.InputError(
            f"CHECKPOINTS must be two or more, got {len(named)}; for one, use lambdahat measure"
        )
    return named


@contextmanager
def bars(quiet: bool) -> Iterator[None]:
    """Show progress bars on the first rank if standard error is a terminal, unless ``quiet``."""
    if quiet or exits.rank():
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


def show(measurement: Measurement, output: Output) -> None:
    """The table, or the JSON document, on standard output; remedies on standard error."""
    if output.as_json:
        place = {} if output.out is None else {"folder": str(output.out)}
        printing.print_json({"about": measurement.about, "results": measurement.table(), **place})
    elif not output.quiet:
        for name, result in printing.leaves(measurement.results):
            if isinstance(result, LearningCoefficient):
                label = "λ̂" if name == "llc" else f"λ̂ ({name})"
                at = printing.settings_text(number_rows({name: result})[0])
                print(f"{label} = {value_text(result)} at {at} [{result.status.name}]")
        printing.print_table(*printing.table_of(measurement), headline(measurement))
        print(printing.NOTE)
        output.print_folder()
    for line in printing.remedies(measurement):
        exits.say(line)


def write_tables(measurement: Measurement, folder: Path) -> None:
    """``table.txt`` and ``table.md``."""
    (header, rows), title = printing.table_of(measurement), headline(measurement)
    plain, marked = printing.text_table(header, rows, title), printing.markdown_table(header, rows)
    write_atomically(folder / "table.txt", f"{plain}\n{printing.NOTE}\n".encode())
    write_atomically(folder / "table.md", f"{title}\n\n{marked}\n{printing.NOTE}\n".encode())


def _predict(
    problem: Problem, names: Sequence[str], settings: MeasureSettings, as_json: bool
) -> int:
    with exits.foreign_output():
        first, rows = forecast(problem, names, settings)
    if exits.rank():
        return exits.OK
    if as_json:
        printing.print_json({**asdict(first), "forecast": [asdict(row) for row in rows]})
    else:
        printing.print_table(FORECAST_HEADER, [row.row() for row in rows], str(first))
    return exits.OK


@dataclass(frozen=True)
class CostForecast:
    """Products, seconds and bytes that one quantity takes, between ``fewest`` and ``most``
    products.

    Of chains it is gradients, over all of them, and ``unit`` says so.
    """

    quantity: str
    fewest: int
    most: int
    seconds_fewest: float
    seconds_most: float
    vectors_bytes: int
    unit: str = "products"

    def row(self) -> tuple[str, str, str, str]:
        """In words."""
        memory = size(self.vectors_bytes)
        if self.most == 0:
            return self.quantity, "0, closed form", "a few gradients", memory
        products = " to ".join(dict.fromkeys([f"{self.fewest:,}", f"{self.most:,}"]))
        products += "" if self.unit == "products" else f" {self.unit}"
        seconds = map(duration, (self.seconds_fewest, self.seconds_most))
        return self.quantity, products, " to ".join(dict.fromkeys(seconds)), memory


@dataclass(frozen=True)
class OneProduct:
    """The seconds of setting up an operator and of one product; ``graph_bytes`` stay in use."""

    setup_seconds: float
    seconds: float
    graph_bytes: int

    def __str__(self) -> str:
        return (
            f"one product took {duration(self.seconds)}, setting up {duration(self.setup_seconds)};"
            f" graphs kept between products: {size(self.graph_bytes)}"
        )


def one_product(operator: LinearOperator, seed: int = 0) -> OneProduct:
    """Set the operator up, make one product, and take the time of each."""
    vector = random_vector(operator, seed, "forecast").to(operator.dtype)
    start = time.perf_counter()
    graphs = operator.kept_batches * operator.graph_bytes if isinstance(operator, Curvature) else 0
    ready = time.perf_counter()
    operator @ vector
    if operator.device.type == "cuda":
        torch.cuda.synchronize(operator.device)
    return OneProduct(ready - start, time.perf_counter() - ready, graphs)


def forecast(
    problem: Problem, what: Sequence[str], settings: MeasureSettings
) -> tuple[OneProduct, list[CostForecast]]:
    """One product of the operator, and what each quantity would take at that price."""
    operator = CURVATURES[settings.curvature](problem)
    first = one_product(operator, settings.seed)
    rows = []
    for name in what:
        work = QUANTITIES[name].work(problem, operator, settings)
        if work.unit == "products":
            price = first.seconds
        elif work.unit == "gradients":
            price = _one_gradient(problem, work.samples, settings.seed)
        else:
            start = time.perf_counter()
            problem.loss()
            price = time.perf_counter() - start
        low, high = price * work.fewest, price * work.most
        rows.append(
            CostForecast(name, work.fewest, work.most, low, high, work.vectors_bytes, work.unit)
        )
    return first, rows


def _one_gradient(problem: Problem, samples: int, seed: int) -> float:
    """Seconds of a gradient on so many samples, the second of two."""
    if samples < problem.num_samples and problem.norm != "train":
        problem = problem.subsample(samples, seed)
    for _ in range(2):
        start = time.perf_counter()
        float(problem.gradient().norm())  # a number, so that a GPU has finished
    return time.perf_counter() - start


def duration(seconds: float) -> str:
    """Seconds in words: "12 ms", "3.4 s", "5 min", "2.1 h"."""
    for limit, unit, factor in ((1.0, "ms", 1e3), (120.0, "s", 1.0), (7200.0, "min", 1 / 60)):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds / 3600:.3g} h"


def size(count: float) -> str:
    """Bytes in words: "3.2 MB"."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
