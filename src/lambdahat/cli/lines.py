"""``lambdahat landscape``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lambdahat.cli.exits import OK, code_of, foreign_output, rank, require_writable
from lambdahat.cli.loading import held_out_data, load_problem
from lambdahat.cli.measurements import bars, duration, one_product, size
from lambdahat.cli.options import RANDOM, RITZ, Lines, ProblemChoices
from lambdahat.cli.printing import print_json, print_table
from lambdahat.estimators import Direction, landscape, towards
from lambdahat.estimators.quantities import CURVATURES
from lambdahat.krylov import lanczos, random_vector
from lambdahat.operators.base import LinearOperator
from lambdahat.problem import Problem
from lambdahat.report.figures import plot, save_figure
from lambdahat.results import Landscape

HEADER = (
    "along",
    "vᵀHv",
    "loss at centre",
    "lowest loss",
    "at offset",
    "held out at centre",
    "lowest held out",
)


def run_landscape(
    factory: str,
    checkpoint: Path | None,
    choices: ProblemChoices,
    lines: Lines,
    held_out: str | None,
    out: Path | None,
    as_json: bool,
    dry_run: bool,
    quiet: bool,
) -> int:
    """Draw the lines or the plane, print and write; the exit code."""
    if rank() == 0 and not dry_run:
        require_writable(out)
    problem = load_problem(factory, choices, checkpoint)
    rest = None
    if held_out is not None:
        data = held_out_data(held_out, factory)
        rest = problem.on(data.batches if isinstance(data, Problem) else data)
    operator = CURVATURES[lines.curvature](problem)
    if dry_run:
        return _predict(operator, lines, choices.seed, as_json)
    with bars(quiet), foreign_output():
        if lines.towards is None:
            landscapes = _look(problem, operator, lines, rest, choices.seed)
        else:
            end = load_problem(factory, choices, lines.towards, "--towards")
            label = f"towards {lines.towards.name}"
            landscapes = {
                "towards": landscape(
                    problem,
                    towards(problem, end),
                    (0.0, 1.0),
                    lines.points,
                    rest,
                    refresh=lines.refresh,
                    labels=[label],
                )
            }
    table = []
    if not (as_json or quiet):  # on all ranks, for it may ask for losses
        here = problem.refresh_statistics() if lines.refresh else problem
        with foreign_output():
            table = [_row(name, result, here, rest) for name, result in landscapes.items()]
    if rank() == 0:
        _show(landscapes, table, out, as_json)
    return code_of(result.status for result in landscapes.values())


def _show(
    landscapes: dict[str, Landscape], table: list[tuple[str, ...]], out: Path | None, as_json: bool
) -> None:
    """Write the lines to the folder and print the document or the table, where there is one."""
    if out is not None:
        for name, result in landscapes.items():
            result.save(out / f"landscape-{name}.json")
            save_figure(plot(result), out / f"landscape-{name}.png")
    if as_json:
        print_json({name: _document(result) for name, result in landscapes.items()})
    elif table:
        held_out = any(result.held_out is not None for result in landscapes.values())
        columns = len(HEADER) if held_out else len(HEADER) - 2
        print_table(HEADER[:columns], [row[:columns] for row in table])
        if out is not None:
            print(f"written to {out}")


def directions(operator: LinearOperator, lines: Lines, seed: int) -> list[tuple[Direction, str]]:
    """The named directions and labels: Ritz vectors of one Lanczos run, or random ones."""
    vectors = _ritz(operator, lines.depth, seed) if lines.ritz else {}
    return [vectors[name] if name in RITZ else (name, RANDOM[name]) for name in lines.names]


def _ritz(operator: LinearOperator, depth: int, seed: int) -> dict[str, tuple[Direction, str]]:
    start = random_vector(operator, seed, "landscape")
    run = lanczos(operator, start, min(depth, operator.dim), "Ritz vectors")
    values, vectors = torch.linalg.eigh(
        torch.diag(run.alpha) + torch.diag(run.beta, 1) + torch.diag(run.beta, -1)
    )
    chosen = {
        "largest": len(values) - 1,
        "smallest": 0,
        "smallest-magnitude": int(values.abs().argmin()),
    }
    return {
        name: (
            run.basis @ vectors[:, i].to(run.basis),
            f"the {name} Ritz vector, λ = {float(values[i]):.3g}",
        )
        for name, i in chosen.items()
    }


def _look(
    problem: Problem, operator: LinearOperator, lines: Lines, rest: Problem | None, seed: int
) -> dict[str, Landscape]:
    """Every line by its direction's name, or the one plane."""
    chosen = directions(operator, lines, seed)
    groups = (
        {"plane": chosen[:2]}
        if lines.plane
        else {n: [one] for n, one in zip(lines.names, chosen, strict=True)}
    )
    landscapes = {}
    for name, group in groups.items():
        items, labels = [item for item, _ in group], [label for _, label in group]
        landscapes[name] = landscape(
            problem,
            items,
            lines.distance,
            lines.points,
            rest,
            refresh=lines.refresh,
            labels=labels,
            seed=seed,
        )
    return landscapes


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
    item = torch.empty(0, dtype=operator.dtype).element_size()
    held = (products + 1) * operator.dim * item
    seconds = first.seconds * products
    if rank():
        return OK
    if as_json:
        print_json(
            {
                **dataclasses.asdict(first),
                "products": products,
                "products_seconds": seconds,
                "loss_evaluations": lines.evaluations,
                "vectors_bytes": held,
            }
        )
    else:
        print(
            f"{first}\n{products} products, {duration(seconds)}, and {size(held)} of memory for"
            f" vectors; then {lines.evaluations} times the loss of all data"
        )
    return OK
