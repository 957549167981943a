"""Figures of learning coefficients: curves, sweeps, volume scaling, temperatures, verification."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from lambdahat.report.chains import gamma_text
from lambdahat.report.coefficient_charts import curve_words, tangents
from lambdahat.report.style import AMBER, BLUE, GREEN, GREY, PURPLE, VERMILION, new_figure, tidy, title, value_text
from lambdahat.results import Array, Status, student_quantile
from lambdahat.singular.curves import CoefficientCurve, Trajectory
from lambdahat.singular.free_energies import FreeEnergy
from lambdahat.singular.sweeps import Sweep
from lambdahat.singular.temperatures import TemperatureRegression
from lambdahat.singular.verification import TOLERANCE, Comparison, Verification
from lambdahat.singular.volumes import VolumeScaling

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEVEL = 0.95
COLOURS = (AMBER, GREEN, BLUE, PURPLE, GREY)
MARKS = ("s", "^", "o", "D", "v")
VERDICTS = {"agrees": BLUE, "near": AMBER, "fails": VERMILION}
BESIDE: Any = {"frameon": False, "fontsize": "small", "loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
WIDE = 20.0  # values that vary by more than this factor are shown by their logarithms
ROW_HEIGHT = 0.27  # of a case, in inches


def draw_sweep_figure(sweep: Sweep) -> Figure:
    """λ̂ over step sizes, one line a temperature, and the acceptance of such steps below."""
    figure = new_figure(8.8, 5.4)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[2.6, 1])
    draw_sweep(sweep, tidy(upper))
    upper.set_xlabel("")
    tidy(lower)
    for row, (colour, mark) in enumerate(_looks(sweep)):
        lower.plot(sweep.step_sizes, sweep.acceptance[row], color=colour, marker=mark, markersize=4, linewidth=1.2)
    lower.axvline(sweep.chosen[0], color=GREY, linewidth=0.8, linestyle=":")
    lower.set_ylim(-0.03, 1.03)
    lower.set_xlabel("step size ε")
    lower.set_ylabel("acceptance\nof MALA steps")
    return figure


def draw_sweep(sweep: Sweep, axes: Axes) -> None:
    """λ̂ with 95 % intervals over step sizes, one line a temperature; the point that ``llc`` chose is a star."""
    axes.set_xscale("log")
    half = student_quantile(LEVEL, math.inf) * sweep.stderr
    gone, shaky = (np.array([[kind(status) for status in row] for row in sweep.statuses]) for kind in (_gone, _shaky))
    for row, (colour, mark) in enumerate(_looks(sweep)):
        shown = ~gone[row]
        label = f"nβ = {sweep.nbetas[row]:.4g} ({sweep.temperatures[row]})"
        axes.errorbar(sweep.step_sizes[shown], sweep.values[row, shown], yerr=half[row, shown], color=colour,
                      marker=mark, markersize=4.5, linewidth=1.3, elinewidth=1, capsize=3, label=label)  # fmt: skip
        hollow = shown & shaky[row]
        axes.plot(sweep.step_sizes[hollow], sweep.values[row, hollow], mark, color=colour, markersize=4.5,
                  markerfacecolor="white", zorder=3)  # fmt: skip
    seen = sweep.values[~gone]
    if seen.size and 0 < seen.min() < seen.max() / WIDE:
        axes.set_yscale("log")
    _mark_gone(sweep, gone, axes)
    found = sweep.coefficient
    error = student_quantile(LEVEL, found.dof) * float(found.stderr)
    axes.errorbar(sweep.chosen[0], float(found), yerr=error, color="black", marker="*", markersize=13, capsize=4,
                  linestyle="none", zorder=4, label=f"chosen by llc: λ̂ = {value_text(found)}")  # fmt: skip
    axes.set_xlabel("step size ε")
    axes.set_ylabel("λ̂")
    if (shaky & ~gone).any():
        axes.plot([], [], "o", color=GREY, markerfacecolor="white", label="not mixed, or another warning")
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda i: labels[i].startswith(("diverged", "not mixed")))
    axes.legend([handles[i] for i in order], [labels[i] for i in order], **BESIDE)
    title(axes, f"λ̂ by SGLD, γ {gamma_text(sweep.localization)}, batches of {sweep.batch_size:,}", found.status)


def _looks(sweep: Sweep) -> list[tuple[Any, str]]:
    """Colour and mark of each temperature."""
    return [(COLOURS[row % len(COLOURS)], MARKS[row % len(MARKS)]) for row in range(len(sweep.nbetas))]


def _gone(status: Status) -> bool:
    return status is Status.DIVERGED


def _shaky(status: Status) -> bool:
    return not status.ok


def _mark_gone(sweep: Sweep, gone: Array, axes: Axes) -> None:
    """Crosses along the upper edge where chains diverged."""
    for row, (colour, _) in enumerate(_looks(sweep)):
        where = sweep.step_sizes[gone[row]]
        axes.plot(where, np.full(len(where), 0.97 - 0.045 * row), "x", color=colour, markersize=7, markeredgewidth=1.8,
                  transform=axes.get_xaxis_transform())  # fmt: skip
    if gone.any():
        axes.plot([], [], "x", color=GREY, markersize=7, markeredgewidth=1.8, label="diverged")


def draw_curve(curve: CoefficientCurve, axes: Axes) -> None:
    """λ̂ over γ or nβ with its 95 % band and tangents; a hollow mark where it is not CONVERGED."""
    letter, label, fixed, default = curve_words(curve)
    grid, values, results = curve.grid, curve.values, curve.results
    half = np.array([student_quantile(LEVEL, found.dof) * float(found.stderr) for found in results])
    axes.set_xscale("log")
    band: Any = {"color": BLUE, "alpha": 0.18, "linewidth": 0, "label": "95 % interval"}
    axes.fill_between(grid, values - half, values + half, **band)
    if len(curve) == 1:  # a band of one point has no width
        axes.errorbar(grid, values, yerr=half, color=BLUE, capsize=3, linestyle="none")
    axes.plot(grid, values, color=BLUE, marker="o", markersize=5, linewidth=1.3, label="λ̂")
    for place, ((left, low), (right, high)) in enumerate(tangents(curve)):
        name = f"slope dλ̂/d ln {letter}" if place == 0 else None
        axes.plot([left, right], [low, high], color=VERMILION, linewidth=2.2, zorder=3, label=name)
    warned = np.array([not status.ok for status in curve.statuses])
    if warned.any():
        names = ", ".join(dict.fromkeys(one.name for one in curve.statuses if not one.ok))
        hollow: Any = {"markersize": 5, "markerfacecolor": "white", "zorder": 4, "label": names}
        axes.plot(grid[warned], values[warned], "o", color=BLUE, **hollow)
    if default:
        axes.axvline(curve.default, color=GREY, linewidth=0.9, linestyle="--", label=default)
    axes.set_xlabel(label)
    axes.set_ylabel("λ̂")
    axes.legend(frameon=False, fontsize="small")
    axes.set_title(f"λ̂ over {letter}, at {fixed}", fontsize="medium")


def draw_volumes(scaling: VolumeScaling, axes: Axes) -> None:
    """V(ε) on logarithmic axes with the line of slope λ over the levels that it was fitted to."""
    levels, volumes = scaling.levels, scaling.volumes
    half = student_quantile(LEVEL, len(scaling.log_levels) - 1) * scaling.stderr
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.fill_between(levels, volumes * np.exp(-half), volumes * np.exp(half), color=BLUE, alpha=0.2, linewidth=0,
                      label="95 % interval")  # fmt: skip
    axes.plot(levels, volumes, "o", color=BLUE, markersize=3, label="nested sampling")
    slope = scaling.coefficient
    if math.isfinite(float(slope)):
        low = slice(len(levels) // 2, None)
        logarithms = (scaling.multiplicity - 1) * np.log(np.log(levels[0] / levels[low]))
        shape = float(slope) * np.log(levels[low]) + logarithms
        fitted = np.exp(shape + np.mean(scaling.log_volumes[low] - shape))
        power = "" if scaling.multiplicity == 1 else f", m = {scaling.multiplicity}"
        axes.plot(levels[low], fitted, color=VERMILION, linewidth=2, zorder=3,
                  label=f"slope λ = {value_text(slope)}{power}")  # fmt: skip
    axes.set_xlabel("level ε of L − L*")
    axes.set_ylabel("V(ε), share of the ball")
    axes.legend(frameon=False, fontsize="small", loc="upper left")
    title(axes, f"Volume of nearly optimal parameters within {scaling.radius:.3g} of w*", scaling.status)


def draw_temperatures(regression: TemperatureRegression, axes: Axes) -> None:
    """E[nL] over 1/β with 95 % intervals and the line whose slope is λ, above its value at 1/β = 0."""
    where, base = 1 / regression.betas, float(regression.intercept)
    half = student_quantile(LEVEL, math.inf) * regression.errors
    slope = regression.learning_coefficient
    ends = np.array([0.0, 1.06 * where.max()])
    axes.plot(ends, float(slope) * ends, color=VERMILION, linewidth=1.5, label=f"slope λ = {value_text(slope)}")
    axes.errorbar(where, regression.losses - base, yerr=half, fmt="o", color=BLUE, markersize=5, capsize=3,
                  label="chains, 95 % interval")  # fmt: skip
    axes.set_xlim(0, ends[1])
    axes.set_xlabel("temperature 1/β")
    axes.set_ylabel("E[nL] less the intercept")
    axes.legend(frameon=False, fontsize="small", loc="upper left")
    misfit = f", χ² per degree of freedom {regression.misfit:.2g}" if math.isfinite(regression.misfit) else ""
    title(axes, f"Intercept {value_text(regression.intercept)}{misfit}", regression.status)


def draw_trajectory(trajectory: Trajectory, axes: Axes) -> None:
    """λ̂ with 95 % intervals along training; a hollow mark where the status is another than CONVERGED."""
    values, results = trajectory.values, trajectory.results
    half = np.array([student_quantile(LEVEL, result.dof) * float(result.stderr) for result in results])
    axes.errorbar(trajectory.labels, values, yerr=half, color=BLUE, marker="o", markersize=5, linewidth=1.3,
                  elinewidth=1, capsize=3, label="λ̂, 95 % interval")  # fmt: skip
    warned = np.array([not result.status.ok for result in results])
    if warned.any():
        named = ", ".join(dict.fromkeys(result.status.name for result in results if not result.status.ok))
        axes.plot(trajectory.labels[warned], values[warned], "o", color=BLUE, markersize=5, markerfacecolor="white",
                  zorder=3, label=named)  # fmt: skip
    if values.min() < 0:
        axes.axhline(0.0, color=GREY, linewidth=0.8, linestyle="--")
    axes.set_xlabel("checkpoint")
    axes.set_ylabel("λ̂")
    axes.legend(frameon=False, fontsize="small")
    first = results[0]
    setting = f"nβ = {first.nbeta:.4g} ({first.temperature}), γ {gamma_text(first.localization)}"
    axes.set_title(f"λ̂ along training, {setting}", fontsize="medium")


def draw_free_energy(energy: FreeEnergy, axes: Axes) -> None:
    """λ̂ over ln nβ with 95 % intervals: the area under it is the free energy above n·L*."""
    half = student_quantile(LEVEL, math.inf) * energy.errors
    axes.set_xscale("log")
    axes.fill_between(energy.nbetas, 0.0, energy.energies, color=BLUE, alpha=0.12, linewidth=0,
                      label="its integral over ln nβ")  # fmt: skip
    axes.errorbar(energy.nbetas, energy.energies, yerr=half, color=BLUE, marker="o", markersize=5, linewidth=1.3,
                  elinewidth=1, capsize=3, label="λ̂, 95 % interval")  # fmt: skip
    axes.set_xlabel("inverse temperature nβ")
    axes.set_ylabel("λ̂ = nβ·E[L − L*]")
    axes.legend(frameon=False, fontsize="small")
    title(axes, f"Free energy {value_text(energy.value)}", energy.status)


def verification_axes(verification: Verification) -> Axes:
    """Axes as high as the cases need."""
    return tidy(new_figure(8.4, 1.3 + ROW_HEIGHT * len(verification)).add_subplot())


def draw_verification(verification: Verification, axes: Axes) -> None:
    """The relative deviation of every case from the truth with its 95 % interval, coloured by the verdict."""
    rows = verification.rows
    reach = _draw_cases(rows, axes)
    axes.axvspan(-100 * TOLERANCE, 100 * TOLERANCE, color=GREEN, alpha=0.07, linewidth=0,
                 label=f"± {100 * TOLERANCE:.0f} %")  # fmt: skip
    axes.axvline(0.0, color="black", linewidth=0.9)
    axes.set_yticks(range(len(rows)), [row.case for row in rows], fontsize="small")
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(-reach, reach)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("λ̂ against the truth at the same nβ and γ, %")
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda i: labels[i].startswith(("±", "λ")))
    axes.legend([handles[i] for i in order], [labels[i] for i in order], **BESIDE)
    summary = (
        f"{verification.covered} of {len(rows)} intervals hold the truth; error {verification.median_error:.1%} "
        f"in the median, {verification.worst_error:.1%} at worst"
    )
    axes.set_title(summary, fontsize="medium")


def _draw_cases(rows: tuple[Comparison, ...], axes: Axes) -> float:
    """Points, bars and hollow marks; how far the axis must reach for all but the asymptotic values."""
    reach = 100 * TOLERANCE * 1.15
    for verdict, colour in VERDICTS.items():
        places = [place for place, row in enumerate(rows) if row.verdict == verdict]
        if not places:
            continue
        errors = np.array([100 * rows[place].relative_error for place in places])
        half = np.array([_half(rows[place]) for place in places])
        axes.errorbar(errors, places, xerr=half, fmt="o", color=colour, markersize=5, capsize=3, elinewidth=1.2,
                      label=f"{verdict} ({len(places)})")  # fmt: skip
        ends = (np.abs(errors) + half)[np.isfinite(errors + half)]
        reach = max(reach, 1.05 * float(ends.max(initial=0.0)))
    known = [place for place, row in enumerate(rows) if math.isfinite(row.asymptotic) and float(row.truth)]
    if known:
        shifts = np.array([100 * (rows[place].asymptotic / float(rows[place].truth) - 1) for place in known])
        seen = np.clip(shifts, -0.985 * reach, 0.985 * reach)
        axes.plot(seen, known, "D", color=GREY, markersize=5, markerfacecolor="none", linestyle="none",
                  label="λ as n → ∞")  # fmt: skip
        for place, shift, at in zip(known, shifts, seen, strict=True):
            if at != shift:
                axes.annotate(f"{shift:+.0f} %", (at, place), (6 if shift < 0 else -6, 0), textcoords="offset points",
                              ha="left" if shift < 0 else "right", va="center", fontsize=7, color=GREY)  # fmt: skip
    return reach


def _half(row: Comparison) -> float:
    """Half the 95 % interval, in per cent of the truth."""
    return 100 * student_quantile(LEVEL, row.dof) * row.stderr / abs(float(row.truth))
