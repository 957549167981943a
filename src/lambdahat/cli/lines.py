"""``lambdahat landscape``."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lambdahat.cli.exits import OK, code_of, foreign_output, rank, require_writable
from lambdahat.cli.loading import held_out_data, load_problem
from lambdahat.cli.measurements import bars, duration, one_product, size
from lambdahat.cli.options import RANDOM, RITZ, Lines, Output, ProblemChoices
from lambdahat.cli.printing import print_json, print_table
from lambdahat.estimators import Direction, landscape, towards
from lambdahat.estimators.quantities import CURVATURES
from lambdahat.krylov import lanczos, random_vector
from lambdahat.operators.base import LinearOperator
from lambdahat.problem import Problem
from lambdahat.report.figures import plot, save_figure
from lambdahat.results import Landscape

HEADER = ("along", "vᵀHv", "loss at centre", "lowest loss", "at offset")
HELD_OUT = ("held out at centre", "lowest held out")


def run_landscape(
    factory: str,
    checkpoint: Path | None,
    choices: ProblemChoices,
    lines: Lines,
    held_out: str | None,
    output: Output,
    dry_run: bool,
) -> int:
    """Draw the lines or the plane, print and write; the exit code."""
    if rank() == 0 and not dry_run:
        require_writable(output.out)
    problem = load_problem(factory, choices, checkpoint)
    rest = None
    if held_out is not None:
        data = held_out_data(held_out, factory)
        rest = problem.on(data.batches if isinstance(data, Problem) else data)
    operator = CURVATURES[lines.curvature](problem)
    if dry_run:
        return _predict(operator, lines, choices.seed, output.as_json)
    draw = partial(landscape, problem, points=lines.points, held_out=rest, refresh=lines.refresh)
    with bars(output.quiet), foreign_output():
        if lines.towards is None:
            landscapes = {
                name: draw(group, lines.distance, labels=labels, seed=choices.seed)
                for name, (group, labels) in _groups(operator, lines, choices.seed).items()
            }
        else:
            end = load_problem(factory, choices, lines.towards, "--towards")
            label = f"the line to {lines.towards.name}"
            landscapes = {"towards": draw(towards(problem, end), (0.0, 1.0), labels=[label])}
    table = []
    if not (output.as_json or output.quiet):  # on all ranks, for it may ask for losses
        here = problem.refresh_statistics() if lines.refresh else problem
        with foreign_output():
            table = [_row(name, result, here, rest) for name, result in landscapes.items()]
    if rank() == 0:
        _show(landscapes, table, output)
    return code_of(result.status for result in landscapes.values())


def _show(landscapes: dict[str, Landscape], table: list[tuple[str, ...]], output: Output) -> None:
    """Write the lines to the folder and print the document or the table, where there is one."""
    out = output.out
    if out is not None:
        for name, result in landscapes.items():
            result.save(out / f"landscape-{name}.json")
            save_figure(plot(result), out / f"landscape-{name}.png")
    if output.as_json:
        print_json({name: _document(result) for name, result in landscapes.items()})
    elif table:
        held_out = any(result.held_out is not None for result in landscapes.values())
        header = (*HEADER, *HELD_OUT) if held_out else HEADER
        print_table(header, [row[: len(header)] for row in table])
        output.print_folder()


Group = tuple[list[Direction], list[str]]  # directions and their labels


def _groups(operator: LinearOperator, lines: Lines, seed: int) -> dict[str, Group]:
    """Every direction by its name, or those of the one plane: Ritz vectors of one Lanczos run, or
    random ones.
    """
    known: dict[str, tuple[Direction, str]] = {name: (name, RANDOM[name]) for name in RANDOM}
    if lines.ritz:
        start = random_vector(operator, seed, "landscape")
        run = lanczos(operator, start, min(lines.depth, operator.dim), "Ritz vectors")
        values, vectors = torch.linalg.eigh(run.tridiagonal)
        places = (len(values) - 1, 0, int(values.abs().argmin()))
        for name, place in zip(RITZ, places, strict=True):
            label = f"the {name} Ritz vector, λ = {float(values[place]):.3g}"
            known[name] = run.basis @ vectors[:, place].to(run.basis), label
    chosen = {name: known[name] for name in lines.names}
    if lines.plane:
        directions, labels = zip(*[known[name] for name in lines.names[:2]], strict=True)
        return {"plane": (list(directions), list(labels))}
    return {name: ([direction], [label]) for name, (direction, label) in chosen.items()}


def _row(name: str, landscape: Landscape, here: Problem, other: Problem | None) -> tuple[str, ...]:
    nearest = int(np.abs(landscape.offsets).argmin())
    middle = (nearest,) * landscape.loss.ndim
    missing = landscape.offsets[nearest] != 0  # an even number of points has none at the centre
    centre = here.loss() if missing else landscape.loss[middle]
    place = np.unravel_index(int(landscape.loss.argmin()), landscape.loss.shape)
    at = ", ".join(f"{landscape.offsets[i]:.3g}" for i in place)
    rest = ("", "")
    if landscape.held_out is not None and other is not None:
        held_out = here.on(other.batches).loss() if missing else landscape.held_out[middle]
        rest = f"{held_out:.5g}", f"{landscape.held_out.min():.5g}"
    bends = ", ".join(f"{bend:.4g}" for bend in landscape.curvature)
    return name, bends, f"{centre:.5g}", f"{landscape.loss.min():.5g}", at, *rest


def _document(landscape: Landscape) -> dict[str, Any]:
    rest = None if landscape.held_out is None else landscape.held_out.tolist()
    return {
        "offsets": landscape.offsets.tolist(),
        "loss": landscape.loss.tolist(),
        "held_out": rest,
        "labels": landscape.labels,
        "curvature": landscape.curvature,
        "status": landscape.status.name,
    }


def _predict(operator: LinearOperator, lines: Lines, seed: int, as_json: bool) -> int:
    with foreign_output():
        first = one_product(operator, seed)
    products = min(lines.depth, operator.dim) if lines.ritz else 0
    held = (products + 1) * operator.dim * operator.dtype.itemsize
    seconds = first.seconds * products
    if rank():
        return OK
    if as_json:
        work = {"products": products, "products_seconds": seconds}
        rest = {"loss_evaluations": lines.evaluations, "vectors_bytes": held}
        print_json(asdict(first) | work | rest)
    else:
        print(
            f"{first}\n{products} products, {duration(seconds)}, and {size(held)} of memory for"
            f" vectors; then {lines.evaluations} times the loss of all data"
        )
    return OK
