"""Rates along flat and sharp directions under damping and partial adaptivity (§§6.3.1, 6.6)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from lambdahat.estimators import eigenpairs
from lambdahat.experiments.kit.cells import (
    Cell,
    Row,
    Rows,
    Scale,
    decades,
    errors,
    logs,
    over_seeds,
    settings_of,
)
from lambdahat.experiments.kit.claims import (
    Claim,
    Claims,
    Reading,
    Table,
    TableLines,
    mean_of,
    paired_difference,
    split_header,
)
from lambdahat.experiments.kit.experiment import SPECTRAL, Experiment, sentences, subject
from lambdahat.experiments.kit.training import Images, curvature_problem, images, network
from lambdahat.operators.curvature import hessian
from lambdahat.optim.adaptive import Padam
from lambdahat.optim.kfac import KFAC
from lambdahat.optim.lanczos_newton import LanczosNewton
from lambdahat.problem import Problem
from lambdahat.randommatrix import rate_ratio
from lambdahat.results import Eigenpairs
from lambdahat.results.charts import Chart, Series, short
from lambdahat.training import fit

DAMPINGS = (1e-8, 1e-6, 1e-4, 1e-2, 1.0)
POWERS = (0.5, 0.25, 0.125, 0.0)
SECOND_ORDER = (1e-3, 1e-2, 1e-1, 1.0)
SHARP, FLAT = 3, 8
RATE = 1e-3
CLOSE = 0.1  # decades


@dataclass(frozen=True)
class DirectionScale(Scale):
    """One scale: a network trained by Adam, then looked at over ``samples`` of its images."""

    network: str
    samples: int
    pairs: int
    side: int = 0


def cells(config: DirectionScale) -> list[Cell]:
    """Seed by seed."""
    base = settings_of(config, "seeds")
    return [{**base, "seed": seed} for seed in range(config.seeds)]


def run(cell: Cell, device: str) -> list[Row]:
    """Train; then the rates of every optimiser at that point, one row each."""
    found = images(cell, device)
    model = network(cell["network"], found, cell["seed"])
    adam = _train_adam(model, found, cell)
    problem = curvature_problem(model, found, cell)
    pairs = eigenpairs(hessian(problem), SHARP, tol=1e-3, seed=cell["seed"])
    rows = [_row("SGD", "", 0.0, problem, torch.optim.SGD(model.parameters(), RATE), pairs, cell)]
    group = adam.param_groups[0]
    for damping in DAMPINGS:
        group["eps"] = damping
        rows.append(_row("Adam", "δ", damping, problem, adam, pairs, cell))
    group["eps"] = DAMPINGS[0]
    for power in POWERS:
        group["p"] = power
        rows.append(_row("Padam", "p", power, problem, adam, pairs, cell))
    return rows + _second_order(model, problem, pairs, cell)


def _train_adam(model: nn.Module, found: Images, cell: Cell) -> Padam:
    """Adam, as Padam at p = ½: its second moments are what the rates come from."""
    optimizer = Padam(model.parameters(), RATE, p=POWERS[0], amsgrad=False)
    fit(
        Problem(model, "cross_entropy", found.training),
        optimizer,
        cell["epochs"],
        batch_size=cell["batch"],
        seed=cell["seed"],
    )
    return optimizer


def _second_order(model: nn.Module, problem: Problem, pairs: Eigenpairs, cell: Cell) -> list[Row]:
    rows = []
    for damping in SECOND_ORDER:
        newton = LanczosNewton(model.parameters(), RATE, damping, cell["pairs"], seed=cell["seed"])
        rows.append(_row("Lanczos", "δ", damping, problem, newton, pairs, cell))
        kfac = KFAC(model, RATE, damping, fisher="exact", seed=cell["seed"])
        rows.append(_row("KFAC", "δ", damping, problem, kfac, pairs, cell))
        kfac.close()
    return rows


def _row(
    name: str,
    knob: str,
    value: float,
    problem: Problem,
    optimizer: Optimizer,
    pairs: Eigenpairs,
    cell: Cell,
) -> Row:
    """R_est-curv of Eq. 6.1 with its parts."""
    found = rate_ratio(problem, optimizer, pairs, FLAT, seed=cell["seed"])
    return {
        "optimizer": name,
        "knob": knob,
        "setting": value,
        "ratio": float(found.ratio),
        "ratio stderr": float(found.ratio.stderr),
        "flat": float(found.flat),
        "sharp": short(found.sharp),
        "largest": float(pairs.values[0]),
        "nonlinearity": found.nonlinearity,
    }


def claims(rows: Rows) -> list[Claim]:
    """SGD has one rate; damping and smaller powers approach it; Lanczos follows the formula."""
    told = rows.where(optimizer="Lanczos")
    misses = [math.log10(row["ratio"] / (1 + row["largest"] / row["setting"])) for row in told]
    worst = max(abs(miss) for miss in misses)
    least, what = rows.where(optimizer="Padam", setting=POWERS[0]), subject(rows)
    found = Claims()
    sentence = f"{what}: SGD: the rate along flat and sharp directions is one"
    reading = mean_of(rows.where(optimizer="SGD").values("ratio"))
    found.add(sentence, "§6.3.1", "1", reading, "within", 1.0, 0.01)
    sentence = (
        f"{what}: Lanczos: the rate of flat over sharp directions is 1 + λ₁/δ (log₁₀ of"
        " measured over told, at worst)"
    )
    reading = Reading(worst, 0.0)
    found.add(sentence, "§6.3.1", "1 + (λ₁ − λ_P)/δ", reading, "below", CLOSE, unit=" decades")
    sentence = f"{what}: Adam, δ = 10⁻⁸: flat directions move faster than sharp ones"
    reading = mean_of(list(logs(least, "ratio").values()))
    found.add(sentence, "§6.3.1", "larger", reading, unit=" decades")
    for name, low, high in (
        ("Adam", DAMPINGS[0], DAMPINGS[-1]),
        ("KFAC", SECOND_ORDER[0], SECOND_ORDER[-1]),
        ("Lanczos", SECOND_ORDER[0], SECOND_ORDER[-1]),
    ):
        part = rows.where(optimizer=name)
        sentence = (
            f"{what}: {name}: damping lowers the rate of flat over sharp directions (δ ="
            f" {low:g} to {high:g})"
        )
        reading = decades(part.where(setting=low), part.where(setting=high), "ratio")
        found.append(Claim(sentence, "§6.3.1, Eq. 6.1", "it controls it", reading, unit=" decades"))
    quarter = rows.where(optimizer="Padam", setting=POWERS[2])
    sentence = f"{what}: Padam: p = 1/8 has a lower rate of flat over sharp directions than p = 1/2"
    reading = paired_difference(logs(least, "ratio"), logs(quarter, "ratio"))
    found.append(Claim(sentence, "§6.6", "increases sharp movement", reading, unit=" decades"))
    return found


def tables(rows: Rows) -> list[Table]:
    """Every optimiser and setting."""
    lines = TableLines()
    for name in rows.distinct("optimizer"):
        for setting in rows.where(optimizer=name).distinct("setting"):
            part = rows.where(optimizer=name, setting=setting)
            sharp = mean_of([row["sharp"][0] for row in part])
            knob = f"{part[0]['knob']} = {setting:g}" if part[0]["knob"] else ""
            lines.add(
                name,
                knob,
                str(over_seeds(part, "flat")),
                str(sharp),
                str(over_seeds(part, "ratio")),
                str(over_seeds(part, "nonlinearity")),
            )
    header = split_header(
        "optimiser | setting | rate, flat | rate, sharpest | ratio | departure from one matrix"
    )
    title = f"{rows[0]['network']} trained by Adam, {rows[0]['data']}; α = {RATE:g}"
    return [Table(title, header, tuple(lines))]


def charts(rows: Rows) -> list[Chart]:
    """The ratio over damping and over the power."""
    damped = tuple(_series(rows, name) for name in ("Adam", "KFAC", "Lanczos"))
    part = rows.where(optimizer="Lanczos")
    told = [
        mean_of([1 + row["largest"] / value for row in part.where(setting=value)]).value
        for value in SECOND_ORDER
    ]
    formula = Series("1 + λ₁/δ", SECOND_ORDER, told, style="points")
    out = []
    title = "Flat over sharp rate"
    series = (*damped, formula)
    source = "Eq. 6.1, §6.3.1"
    out.append(
        Chart(title, "damping δ", "R_est-curv", series, x_log=True, y_log=True, source=source)
    )
    title = "Flat over sharp rate of Padam"
    series = (_series(rows, "Padam"),)
    out.append(Chart(title, "power p", "R_est-curv", series, y_log=True, source="§6.6"))
    return out


def _series(rows: Rows, name: str) -> Series:
    part = rows.where(optimizer=name)
    places = sorted(part.distinct("setting"))
    readings = [over_seeds(part.where(setting=place), "ratio") for place in places]
    return Series(name, places, [r.value for r in readings], errors(readings))


EXPERIMENT = Experiment(
    "direction-rates",
    "Rates along flat and sharp directions under damping and partial adaptivity",
    SPECTRAL,
    "§§6.3 and 6.6",
    {
        "smoke": DirectionScale(
            "digits", 300, 100, 3, 3, "MLP-12", samples=200, pairs=20, batch=50
        ),
        "cpu": DirectionScale(
            "mnist", 3000, 100, 10, 8, "MLP-100", samples=1000, pairs=40, side=14
        ),
        "paper": DirectionScale("cifar10", 45_000, 100, 10, 3, "VGG-16", samples=2000, pairs=40),
    },
    *(cells, run, claims, tables, charts),
    sentences("""
        Rates are read off an optimiser's own steps, along the Hessian's sharpest eigenvector and
          random directions.
        Adam's second moments are those of its training; δ and p are then changed, nothing is
          trained anew.
        KFAC: the exact Fisher at the point. Lanczos: Ritz pairs of the absolute Hessian there.
    """),
    size="no run: §§6.3 and 6.6 derive these rates for any network.",
)
