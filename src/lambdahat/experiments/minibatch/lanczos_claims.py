"""What §6.4.1 of the spectral thesis says of damping and of sharp directions, from rows; tables and
charts of the same.

A row is one run at one look: ``seed``, ``method`` ("LanczosOPT" or "GD"), ``damping`` δ, ``eta`` η,
``step``, and the four measures, errors as shares; NaN where the run diverged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from lambdahat.experiments.kit.cells import Rows
from lambdahat.experiments.kit.claims import Claim, Reading, Table, mean_of, paired_difference
from lambdahat.results.charts import Chart, Heat, Series

METHOD, DESCENT = "LanczosOPT", "GD"
ERRORS = ("training error", "test error")
FITTED = 0.01  # training error below which the training data are fitted
SOURCE = "§6.4.1, Figures 6.2, 6.4"

BySeed = dict[int, float]


def claims(rows: Rows) -> list[Claim]:
    """What is said of δ and of η, from the errors after the last step; differences are paired
    over seeds.
    """
    last = _last(rows).where(method=METHOD)
    dampings, etas = _grid(last)
    low, high, first, strong = min(dampings), max(dampings), min(etas), max(etas)
    found = [
        Claim(
            "generalisation suffers as δ falls: test error per tenfold δ",
            SOURCE,
            "rises as δ falls",
            _slope(last, dampings),
            "below",
            unit=" %",
        ),
        Claim(
            "generalisation suffers as δ falls: test error per tenfold δ, among dampings that fit"
            " the training data",
            SOURCE,
            "rises as δ falls",
            _slope(last, _fitted(last)),
            "below",
            unit=" %",
            own=True,
        ),
    ]
    for damping in dampings:
        gap = paired_difference(
            _errors(last, "test", damping, strong), _errors(last, "test", damping, first)
        )
        found.append(
            Claim(
                f"δ = {damping:g}: η = {strong:g} harms the test error against η = {first:g}",
                SOURCE,
                "harms at every δ",
                gap,
                unit=" %",
            )
        )
    costs = {
        (kind, damping): _cost(last, kind, damping, first, strong)
        for kind in ("training", "test")
        for damping in (low, high)
    }
    found.append(
        Claim(
            f"at δ = {low:g} η = {strong:g} costs more in test error than in training error",
            SOURCE,
            "training hardly moves",
            paired_difference(costs["test", low], costs["training", low]),
            unit=" %",
        )
    )
    for kind in ("training", "test"):
        gap = paired_difference(costs[kind, high], costs[kind, low])
        found.append(
            Claim(
                f"η = {strong:g} costs more {kind} error at δ = {high:g} than at δ = {low:g}",
                SOURCE,
                "suffers more",
                gap,
                unit=" %",
            )
        )
    return found


def _last(rows: Rows) -> Rows:
    return rows.where(step=max(rows.values("step")))


def _grid(rows: Rows) -> tuple[list[float], list[float]]:
    return sorted(rows.distinct("damping")), sorted(rows.distinct("eta"))


def _errors(rows: Rows, kind: str, damping: float, eta: float) -> BySeed:
    """The error of every seed in percent."""
    found = rows.where(damping=damping, eta=eta).paired(f"{kind} error")
    return {seed: 100 * value for seed, value in found.items()}


def _cost(rows: Rows, kind: str, damping: float, first: float, strong: float) -> BySeed:
    """What the strongest η adds to an error, seed by seed."""
    before, after = _errors(rows, kind, damping, first), _errors(rows, kind, damping, strong)
    return {seed: after[seed] - before[seed] for seed in before}


def _slope(rows: Rows, dampings: Sequence[float]) -> Reading:
    """The slope of the test error in percent over log₁₀ δ at the least η."""
    if len(dampings) < 2:
        return Reading(math.nan, math.nan, math.nan, 0)
    errors = [_errors(rows, "test", damping, min(rows.distinct("eta"))) for damping in dampings]
    logs = np.log10(dampings)
    return mean_of(
        [float(np.polyfit(logs, [each[seed] for each in errors], 1)[0]) for seed in errors[0]]
    )


def _fitted(rows: Rows) -> list[float]:
    """The dampings with which every seed fits the training data at the least η.

    With the largest the flat directions, at rate α/δ, have not been learnt yet: there the error
    falls with δ.
    """
    dampings, etas = _grid(rows)
    return [
        d
        for d in dampings
        if all(e < 100 * FITTED for e in _errors(rows, "training", d, etas[0]).values())
    ]


def tables(rows: Rows) -> list[Table]:
    """Both errors at the end over δ and η, in percent, mean ± standard error over seeds."""
    last = _last(rows)
    grid = last.where(method=METHOD)
    dampings, etas = _grid(grid)
    out = []
    for measure in ERRORS:
        lines = [
            (
                f"{damping:g}",
                *(_cell(grid.where(damping=damping, eta=eta), measure) for eta in etas),
            )
            for damping in dampings
        ]
        lines.append((DESCENT, _cell(last.where(method=DESCENT), measure), *[""] * (len(etas) - 1)))
        title = (
            f"{measure} in % after {last[0]['step']} steps, mean ± se over"
            f" {len(last.distinct('seed'))} seeds"
        )
        out.append(Table(title, ("δ", *(f"η = {eta:g}" for eta in etas)), tuple(lines)))
    return out


def _cell(rows: Rows, measure: str) -> str:
    values = [100 * value for value in rows.values(measure)]
    reading = mean_of(values)
    if reading.count == 0:
        return "diverged"
    text = f"{reading.value:.2f}" + (f" ± {reading.stderr:.2f}" if reading.count > 1 else "")
    lost = len(values) - reading.count
    return f"{text} ({lost} diverged)" if lost else text


def charts(rows: Rows) -> list[Chart]:
    """Heat maps of both errors over δ and η (Figure 6.4), and the test error on the way at each
    δ (Figure 6.2).
    """
    grid, out = rows.where(method=METHOD), []
    dampings, etas = _grid(grid)
    last = _last(grid)
    for measure in ERRORS:
        values = [
            [_mean(last.where(damping=d, eta=eta), measure).value for eta in etas] for d in dampings
        ]
        heat = Heat(
            [f"η = {eta:g}" for eta in etas],
            [f"δ = {d:g}" for d in dampings],
            [[value if math.isfinite(value) else None for value in line] for line in values],
            "%",
        )
        out.append(
            Chart(
                f"{measure.capitalize()} of LanczosOPT",
                "η",
                "δ",
                heat=heat,
                source="Figure 6.4",
                caption="Percent after the last step, mean over the seeds that did not diverge.",
            )
        )
    curves = [(f"δ = {d:g}", grid.where(damping=d, eta=min(etas))) for d in dampings]
    curves.append((DESCENT, rows.where(method=DESCENT)))
    series = tuple(_curve(name, part) for name, part in curves)
    out.append(
        Chart(
            f"Test error on the way, η = {min(etas):g}",
            "step",
            "test error, %",
            series,
            source="Figure 6.2",
        )
    )
    return out


def _curve(name: str, rows: Rows) -> Series:
    steps = rows.distinct("step")
    readings = [_mean(rows.where(step=step), "test error") for step in steps]
    return Series(
        name, steps, [_known(r.value) for r in readings], [_known(r.stderr) for r in readings]
    )


def _mean(rows: Rows, measure: str) -> Reading:
    found: Mapping[int, float] = rows.paired(measure)
    return mean_of([100 * value for value in found.values()])


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
