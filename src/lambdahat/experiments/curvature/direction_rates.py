"""Rates along flat and sharp directions under damping and partial adaptivity (§§6.3.1, 6.6)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch.optim import Optimizer

from lambdahat.estimators import eigenpairs
from lambdahat.experiments import kit
from lambdahat.experiments.kit import Cell, Chart, Claim, Row, Rows, Series, Table, short, training
from lambdahat.operators.curvature import hessian
from lambdahat.optim.adaptive import Padam
from lambdahat.optim.kfac import KFAC
from lambdahat.optim.lanczos_newton import LanczosNewton
from lambdahat.problem import Problem
from lambdahat.randommatrix import rate_ratio

DAMPINGS = (1e-8, 1e-6, 1e-4, 1e-2, 1.0)
POWERS = (0.5, 0.25, 0.125, 0.0)
SECOND_ORDER = (1e-3, 1e-2, 1e-1, 1.0)
SHARP, FLAT = 3, 8
RATE = 1e-3
CLOSE = 0.1  # decades


def run(cell: Cell, device: str) -> list[Row]:
    """Train; then the rates of every optimiser at that point, one row each: R of Eq. 6.1."""
    model, data = training.model_and_images(cell, device)
    seed = cell["seed"]
    # Adam, as Padam at p = ½: its second moments are what the rates come from
    adam = Padam(model.parameters(), RATE, p=POWERS[0], amsgrad=False)
    training.train(Problem(model, "cross_entropy", data.training), cell, adam)
    problem = training.curvature_problem(model, data, cell)
    pairs = eigenpairs(hessian(problem), SHARP, tol=1e-3, seed=seed)
    rows: list[Row] = []

    def add(name: str, knob: str, value: float, optimizer: Optimizer) -> None:
        rates = rate_ratio(problem, optimizer, pairs, FLAT, seed=seed)
        row = {"optimizer": name, "knob": knob, "setting": value, "ratio": float(rates.ratio)}
        row |= {"ratio stderr": float(rates.ratio.stderr), "flat": float(rates.flat)}
        row |= {"sharp": short(rates.sharp), "largest": float(pairs.values[0])}
        rows.append({**row, "nonlinearity": rates.nonlinearity})

    add("SGD", "", 0.0, torch.optim.SGD(model.parameters(), RATE))
    group = adam.param_groups[0]
    for damping in DAMPINGS:
        group["eps"] = damping
        add("Adam", "δ", damping, adam)
    group["eps"] = DAMPINGS[0]
    for power in POWERS:
        group["p"] = power
        add("Padam", "p", power, adam)
    for damping in SECOND_ORDER:
        newton = LanczosNewton(model.parameters(), RATE, damping, cell["pairs"], seed=seed)
        add("Lanczos", "δ", damping, newton)
        kfac = KFAC(model, RATE, damping, fisher="exact", seed=seed)
        add("KFAC", "δ", damping, kfac)
        kfac.close()
    return rows


def claims(rows: Rows) -> Iterator[Claim]:
    """SGD has one rate; damping and smaller powers approach it; Lanczos follows the formula."""
    what, ratio = kit.subject(rows), "the rate of flat over sharp directions"
    claim = kit.ClaimTexts(f"""
        SGD: {what}: SGD: the rate along flat and sharp directions is one
          | §6.3.1 | 1 | within 0.01 of 1
        Lanczos: {what}: Lanczos: {ratio} is 1 + λ₁/δ (log₁₀ of measured over predicted, at worst)
          | §6.3.1 | 1 + (λ₁ − λ_P)/δ | below {CLOSE:g} | decades
        Adam: {what}: Adam, δ = 10⁻⁸: flat directions move faster than sharp ones
          | §6.3.1 | larger | above | decades
        damping: {what}: {{name}}: damping lowers {ratio} (δ = {{low:g}} to {{high:g}})
          | §6.3.1, Eq. 6.1 | it controls it | above | decades
        Padam: {what}: Padam: p = 1/8 has a lower rate of flat over sharp directions than p = 1/2
          | §6.6 | increases sharp movement | above | decades
    """)
    yield claim("SGD", kit.mean_of(rows.where(optimizer="SGD").values("ratio")))
    lanczos = rows.where(optimizer="Lanczos")
    ratios = [row["ratio"] / (1 + row["largest"] / row["setting"]) for row in lanczos]
    worst = kit.Reading(max(abs(math.log10(value)) for value in ratios), 0.0)
    yield claim("Lanczos", worst)
    half, eighth = (rows.where(optimizer="Padam", setting=POWERS[place]) for place in (0, 2))
    yield claim("Adam", kit.mean_of(list(kit.logs(half, "ratio").values())))
    for name, dampings in (("Adam", DAMPINGS), ("KFAC", SECOND_ORDER), ("Lanczos", SECOND_ORDER)):
        low, high = dampings[0], dampings[-1]
        weak, strong = (rows.where(optimizer=name, setting=value) for value in (low, high))
        reading = kit.decades(weak, strong, "ratio")
        yield claim("damping", reading, name=name, low=low, high=high)
    yield claim("Padam", kit.decades(half, eighth, "ratio"))


def tables(rows: Rows) -> Iterator[Table]:
    """Every optimiser and setting."""
    lines = []
    for name, chosen in rows.groups("optimizer"):
        for setting, part in chosen.groups("setting"):
            sharp = kit.mean_of([row["sharp"][0] for row in part])
            knob = f"{part[0]['knob']} = {setting:g}" if part[0]["knob"] else ""
            flat, *rest = kit.means(part, "flat", "ratio", "nonlinearity")
            lines.append((name, knob, flat, str(sharp), *rest))
    header = "optimiser | setting | rate, flat | rate, sharpest | ratio | departure from one matrix"
    title = f"{rows[0]['network']} trained by Adam, {rows[0]['data']}; α = {RATE:g}"
    yield kit.table(title, header, lines)


def charts(rows: Rows) -> Iterator[Chart]:
    """The ratio over damping and over the power."""
    damped, power = (
        kit.curves(rows.by("optimizer", names), "ratio", "setting")
        for names in (("Adam", "KFAC", "Lanczos"), ("Padam",))
    )
    part, expected = rows.where(optimizer="Lanczos"), []
    for value in SECOND_ORDER:
        ratios = [1 + row["largest"] / value for row in part.where(setting=value)]
        expected.append(kit.mean_of(ratios).value)
    formula = Series("1 + λ₁/δ", SECOND_ORDER, expected, style="points")
    series, axes = (*damped, formula), ("damping δ", "R_est-curv")
    source = "Eq. 6.1, §6.3.1"
    yield Chart("Flat over sharp rate", *axes, series, x_log=True, y_log=True, source=source)
    title = "Flat over sharp rate of Padam"
    yield Chart(title, "power p", "R_est-curv", power, y_log=True, source="§6.6")


# a network trained by Adam; the Hessian is over ``samples`` images
SMOKE = kit.setting("digits", 300, 100, epochs=3, batch=50, side=0)
CPU = kit.setting("mnist", 3000, 100, epochs=10, side=14)
PAPER = kit.setting("cifar10", 45_000, 100, epochs=10, side=0)
EXPERIMENT = kit.Experiment(
    "direction-rates",
    "Rates along flat and sharp directions under damping and partial adaptivity",
    kit.SPECTRAL,
    "§§6.3 and 6.6",
    {
        "smoke": kit.grid(SMOKE, network=["MLP-12"], samples=[200], pairs=[20], seed=range(3)),
        "cpu": kit.grid(CPU, network=["MLP-100"], samples=[1000], pairs=[40], seed=range(8)),
        "paper": kit.grid(PAPER, network=["VGG-16"], samples=[2000], pairs=[40], seed=range(3)),
    },
    *(run, claims, tables, charts),
    kit.sentences("""
        Rates are read off an optimiser's own steps, along the Hessian's sharpest eigenvector and
          random directions.
        Adam's second moments are those of its training; δ and p are then changed, nothing is
          trained anew.
        KFAC: the exact Fisher at the point. Lanczos: Ritz pairs of the absolute Hessian there.
    """),
    "no run: §§6.3 and 6.6 derive these rates for any network.",
)
