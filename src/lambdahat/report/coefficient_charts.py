"""Charts of learning coefficients: curves, sweeps, volumes, temperatures, free energies, trajectories, verification."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lambdahat.report.chains import gamma_text
from lambdahat.report.spectral_charts import INTERVAL, listed
from lambdahat.report.style import value_text
from lambdahat.results import Array, LearningCoefficient, student_quantile
from lambdahat.results.charts import Chart, Series
from lambdahat.singular.curves import CoefficientCurve, Trajectory
from lambdahat.singular.free_energies import FreeEnergy
from lambdahat.singular.sweeps import Sweep
from lambdahat.singular.temperatures import TemperatureRegression
from lambdahat.singular.verification import TOLERANCE, Verification
from lambdahat.singular.volumes import VolumeScaling

LEVEL = 0.95
STEP = "step size ε"
WIDE = 20.0  # values that vary by more than this factor are shown by their logarithms


def sweep_charts(sweep: Sweep) -> list[Chart]:
    """λ̂ and the acceptance over step sizes, a curve for each temperature; diverged cells are gaps."""
    sizes, half = listed(sweep.step_sizes), student_quantile(LEVEL, math.inf) * sweep.stderr
    names = [f"nβ = {nbeta:.4g} ({name})" for nbeta, name in zip(sweep.nbetas, sweep.temperatures, strict=True)]
    values = [Series(name, sizes, listed(y), listed(e)) for name, y, e in zip(names, sweep.values, half, strict=True)]
    found = sweep.coefficient
    error = student_quantile(LEVEL, found.dof) * float(found.stderr)
    chosen = Series(f"chosen by llc: {value_text(found)}", [sweep.chosen[0]], [float(found)], [error], "points")
    accepted = tuple(Series(name, sizes, listed(row)) for name, row in zip(names, sweep.acceptance, strict=True))
    return [
        Chart("λ̂ over step sizes", STEP, "λ̂", (*values, chosen), x_log=True, y_log=_wide(sweep.values),
              caption=f"By SGLD, γ {gamma_text(sweep.localization)}, batches of {sweep.batch_size:,}. {INTERVAL} Gaps: "
              "chains that diverged."),
        Chart("Acceptance of MALA steps", STEP, "acceptance", accepted, x_log=True),
    ]  # fmt: skip


def curve_charts(curve: CoefficientCurve) -> list[Chart]:
    """λ̂ over γ or nβ with its tangents, the default setting, and apart what its status warns of."""
    letter, label, fixed, default = curve_words(curve)
    where, values = listed(curve.grid), listed(curve.values)
    half = [student_quantile(LEVEL, found.dof) * float(found.stderr) for found in curve.results]
    series = [Series("λ̂", where, values, half)]
    series += _warned(where, values, curve.results)
    pieces = [(*piece, (piece[0][1], None)) for piece in tangents(curve)]
    ends = [end for piece in pieces for end in piece][:-1]
    if ends:
        name = f"slope dλ̂/d ln {letter} of the draws at each point"
        series.append(Series(name, [x for x, _ in ends], [y for _, y in ends], style="segments"))
    known = curve.values[np.isfinite(curve.values)]
    if default and known.size:
        low, high = float(known.min()), float(known.max())
        series.append(Series(default, [curve.default] * 2, [low, high], style="segments"))
    title = f"λ̂ over {letter}"
    return [Chart(title, label, "λ̂", tuple(series), x_log=True, caption=f"At {fixed}. {INTERVAL}")]


def curve_words(curve: CoefficientCurve) -> tuple[str, str, str, str]:
    """The letter of the axis, its label, the fixed setting, and the default one ("" if unknown)."""
    if curve.axis == "localization":
        fixed = f"nβ = {curve.results[0].nbeta:.4g} ({curve.results[0].temperature})"
        default = f"γ of the rule = {curve.default:.3g}" if math.isfinite(curve.default) else ""
        return "γ", "localization γ", fixed, default
    default = f"n/ln n = {curve.default:.4g}" if math.isfinite(curve.default) else ""
    return "nβ", "inverse temperature nβ", f"γ {gamma_text(curve.fixed)}", default


def tangents(curve: CoefficientCurve) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """The two ends of a short piece of the tangent at each point whose slope is known."""
    gaps = np.diff(np.log(curve.grid))
    reach = 0.3 * float(gaps.min()) if gaps.size else 0.3
    found = []
    for place, value, slope in zip(curve.grid, curve.values, curve.slopes, strict=True):
        rise = reach * float(slope)
        if math.isfinite(value + rise):
            left, right = (float(place) * math.exp(sign * reach) for sign in (-1, 1))
            found.append(((left, float(value) - rise), (right, float(value) + rise)))
    return found


def _warned(
    where: list[float],
    values: list[float],
    results: Sequence[LearningCoefficient],
) -> list[Series]:
    """The points whose status is not CONVERGED, a series for each status."""
    series = []
    for status in dict.fromkeys(found.status for found in results if not found.status.ok):
        hits = [place for place, found in enumerate(results) if found.status is status]
        x, y = ([column[place] for place in hits] for column in (where, values))
        series.append(Series(status.name, x, y, style="points"))
    return series


def volume_charts(scaling: VolumeScaling) -> list[Chart]:
    """V(ε) on logarithmic axes with the curve of slope λ over the levels that it was fitted to."""
    levels, volumes = scaling.levels, scaling.volumes
    half = student_quantile(LEVEL, len(scaling.log_levels) - 1) * scaling.stderr * volumes
    series = [Series("nested sampling", listed(levels), listed(volumes), listed(half), "points")]
    slope = scaling.coefficient
    if math.isfinite(float(slope)):
        low = slice(len(levels) // 2, None)
        shape = float(slope) * np.log(levels[low])
        shape += (scaling.multiplicity - 1) * np.log(np.log(levels[0] / levels[low]))
        fitted = np.exp(shape + np.mean(scaling.log_volumes[low] - shape))
        series.append(Series(f"slope λ = {value_text(slope)}", listed(levels[low]), listed(fitted)))
    return [Chart("Volume of nearly optimal parameters", "level ε of L − L*", "V(ε), share of the ball", tuple(series),
                  x_log=True, y_log=True, caption=f"Within {scaling.radius:.3g} of w*.")]  # fmt: skip


def temperature_charts(regression: TemperatureRegression) -> list[Chart]:
    """E[nL] over 1/β, less the intercept, and the line whose slope is λ."""
    where, base = 1 / regression.betas, float(regression.intercept)
    half, slope = student_quantile(LEVEL, math.inf) * regression.errors, regression.learning_coefficient
    ends = [0.0, 1.06 * float(where.max())]
    points = Series("chains", listed(where), listed(regression.losses - base), listed(half), "points")
    line = Series(f"slope λ = {value_text(slope)}", ends, [float(slope) * end for end in ends])
    caption = f"Intercept {value_text(regression.intercept)}. {INTERVAL}"
    return [Chart("Loss over temperature", "temperature 1/β", "E[nL] less the intercept", (points, line),
                  caption=caption)]  # fmt: skip


def free_energy_charts(energy: FreeEnergy) -> list[Chart]:
    """λ̂ over nβ: its integral over ln nβ is the free energy above n·L*."""
    half = student_quantile(LEVEL, math.inf) * energy.errors
    series = Series("λ̂", listed(energy.nbetas), listed(energy.energies), listed(half))
    caption = f"Free energy {value_text(energy.value)}. {INTERVAL}"
    return [Chart("Free energy", "inverse temperature nβ", "λ̂ = nβ·E[L − L*]", (series,), x_log=True, caption=caption)]


def trajectory_charts(trajectory: Trajectory) -> list[Chart]:
    """λ̂ along training, with what its status warns of apart."""
    where, values = listed(trajectory.labels), listed(trajectory.values)
    half = [student_quantile(LEVEL, found.dof) * float(found.stderr) for found in trajectory.results]
    series = [Series("λ̂", where, values, half), *_warned(where, values, trajectory.results)]
    caption = f"At nβ = {trajectory.nbeta:.4g}, γ {gamma_text(trajectory.localization)}. {INTERVAL}"
    return [Chart("λ̂ along training", "checkpoint", "λ̂", tuple(series), caption=caption)]


def verification_charts(verification: Verification) -> list[Chart]:
    """The relative deviation of every case from the truth."""
    series = []
    for verdict in ("agrees", "near", "fails"):
        rows = [row for row in verification.rows if row.verdict == verdict]
        half = [100 * student_quantile(LEVEL, row.dof) * row.stderr / abs(float(row.truth) or math.nan) for row in rows]
        off = [100 * row.relative_error for row in rows]
        if rows:
            series.append(Series(f"{verdict} ({len(rows)})", [row.case for row in rows], off, half, "points"))
    caption = f"{verification.covered} of {len(verification)} intervals of 95 % hold the truth."
    bounds = tuple((f"{sign * 100 * TOLERANCE:+.0f} %", sign * 100 * TOLERANCE) for sign in (1, -1))
    return [Chart("λ̂ against the truth", "case", "deviation, %", tuple(series), lines=bounds, caption=caption)]


def _wide(values: Array) -> bool:
    finite = values[np.isfinite(values)]
    return bool(finite.size and 0 < finite.min() < finite.max() / WIDE)
