"""Charts of chains and learning coefficients, and of what is measured along with them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from lambdahat.report.spectral_charts import interval_chart
from lambdahat.results import (
    NORMAL_QUANTILE,
    Array,
    Chains,
    Estimate,
    LearningCoefficient,
    Status,
    student_quantile,
)
from lambdahat.results.charts import (
    COLOURS,
    INTERVAL,
    Chart,
    Series,
    charts_of,
    count_text,
    gamma_text,
    half_width,
    interval_series,
    is_wide,
    numbers,
    settings_text,
    value_text,
    with_status,
)
from lambdahat.sampling.diagnostics import HUGE, standard_error
from lambdahat.singular.bayes import FreeEnergy, TemperatureRegression
from lambdahat.singular.curves import CoefficientCurve, Sweep, Trajectory
from lambdahat.singular.observables import mean_energy
from lambdahat.singular.verification import TOLERANCE, CheckedCase, Verification
from lambdahat.singular.volumes import VolumeScaling

LEVEL = 0.95
POINTS = 400  # of a trace
LOOKS = 24  # at how many draws the band of the running mean is computed
WINDOWS = 25  # a rolling mean is over this part of the draws
STEP = "step size ε"
VERDICTS = {"agrees": "blue", "near": "amber", "fails": "vermilion"}


@charts_of.register
def _(chains: Chains) -> list[Chart]:
    return _chain_charts(chains, chains)


@charts_of.register
def _(coefficient: LearningCoefficient) -> list[Chart]:
    """The charts of the chains, or where they were not kept the value with its interval."""
    if coefficient.chains is not None:
        return _chain_charts(coefficient, coefficient.chains)
    text = value_text(coefficient) + settings_text(coefficient, ", ")
    return [interval_chart(with_status(text, coefficient.status), coefficient)]


def _chain_charts(result: Chains | LearningCoefficient, chains: Chains) -> list[Chart]:
    """The running λ̂ with its band, traces, distance from the centre, acceptance, diagnostics."""
    seen, caption = chains.diagnostics, "Every chain diverged."
    if not seen.diverged.all():
        mixing = f"R̂ = {seen.rhat:.3f}, {seen.ess_mean:,.0f} effective draws"
        caption = f"{mixing}. Thick lines: rolling means."
    traces = _trace_chart(chains, chains.energies, "Traces", "nβ(L − L*)", caption)
    sensitivity = result.sensitivity if isinstance(result, LearningCoefficient) else None
    caption = ""
    if sensitivity is not None and math.isfinite(float(sensitivity.localization)):
        slope = sensitivity.localization
        change = Estimate(math.log(2) * float(slope), math.log(2) * float(slope.stderr))
        caption = f"Doubling γ changes λ̂ by about {value_text(change)}."
    labels = ("Distance from the centre", "distance ‖w − w*‖")
    distances = _trace_chart(chains, chains.distances, *labels, caption)
    charts = [_running(result, chains), traces, distances]
    if (chains.acceptances < 1).any():
        charts.append(_acceptance(chains))
    return [*charts, Chart("Diagnostics", rows=_diagnostics(result, chains))]


def _draw_label(chains: Chains) -> str:
    return "draw" if chains.thin == 1 else f"draw, {chains.thin} steps each"


def _looks(chains: Chains) -> Iterator[tuple[int, str, str, bool]]:
    """Number, colour, name and legend entry of every chain; many chains share one colour."""
    count, diverged = len(chains), chains.diagnostics.diverged
    for chain in range(count):
        if count > len(COLOURS):
            yield chain, "sky", f"{count} chains", chain == 0
        else:
            lost = " (diverged)" if diverged[chain] else ""
            yield chain, COLOURS[chain], f"chain {chain + 1}{lost}", True


def _trace_chart(chains: Chains, values: Array, title: str, label: str, caption: str) -> Chart:
    """Faint draws and rolling means; a diverged chain is cut where it runs away."""
    draws, lost = values.shape[1], bool(chains.diagnostics.diverged.all())
    window, step = max(draws // WINDOWS, 1), math.ceil(draws / POINTS)
    places = np.arange(1, draws + 1)
    faint, means = [], []
    for chain, colour, name, legend in _looks(chains):
        finite = values[chain][: _steady(values[chain])]
        x, y = numbers(places[: len(finite) : step]), numbers(finite[::step])
        if lost:
            means.append(Series(name, x, y, colour=colour, legend=legend))
            continue
        faint.append(Series(name, x, y, colour=colour, faint=True, legend=False))
        if len(finite) >= window:
            means.append(Series(name, *_rolling(finite, window), colour=colour, legend=legend))
    kept = values[~chains.diagnostics.diverged]
    low, high = (float(kept.min()), float(kept.max())) if kept.size else (0.0, 0.0)
    room = 0.05 * (high - low)
    ends = (0.0 if 0 <= low < 0.5 * high else low - room, high + room) if room else (None, None)
    axes, series = (_draw_label(chains), label), (*faint, *means)
    return Chart(title, *axes, series, y_log=lost, y_range=ends, caption=caption)


def _rolling(values: Array, window: int) -> tuple[list[float], list[float]]:
    """Draw numbers and means over ``window`` draws of one trace, at most some hundred of them."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    means = (sums[window:] - sums[:-window]) / window
    where = np.arange(len(means), dtype=np.float64) + (window + 1) / 2
    step = math.ceil(len(means) / POINTS)
    return numbers(where[::step]), numbers(means[::step])


def _steady(trace: Array) -> int:
    """How many draws come before the first that is on its way to infinity."""
    broken = ~(np.abs(trace) < HUGE)
    return int(np.argmax(broken)) if broken.any() else len(trace)


def _running(result: Chains | LearningCoefficient, chains: Chains) -> Chart:
    """Means of the draws so far, by chain and of all with their 95 % interval, and λ̂ with its own
    at the end.

    λ̂ may lie off the last mean: the bias of the steps is taken off it, or a control variate used.
    """
    losses = chains.losses if chains.recycled_losses is None else chains.recycled_losses
    with np.errstate(over="ignore", invalid="ignore"):
        energies = chains.nbeta * (losses - chains.centre_losses)
    draws = energies.shape[1]
    looks = np.unique(np.linspace(max(draws / LOOKS, 1), draws, LOOKS).astype(int))
    places = np.unique(np.concatenate([looks, np.arange(1, draws + 1, math.ceil(draws / POINTS))]))
    final = result if isinstance(result, LearningCoefficient) else mean_energy(result)
    over = f"{INTERVAL} over {count_text(len(energies), 'chain')}"
    series = []
    for chain, colour, name, _ in _looks(chains):
        seen = places[places <= _steady(energies[chain])]
        if len(seen):
            means = np.cumsum(energies[chain][: seen[-1]])[seen - 1] / seen
            # The traces beside this chart name the chains; a legend here would cover their start.
            style: Any = {"style": "segments", "colour": colour, "legend": False}
            series.append(Series(name, numbers(seen), numbers(means), **style))
    kept = energies[~chains.diagnostics.diverged]
    ends: tuple[float | None, float | None] = (None, None)
    look: Any = {}
    if len(kept):
        pooled = np.cumsum(kept.mean(axis=0)) / np.arange(1, draws + 1)
        half = NORMAL_QUANTILE * np.array([standard_error(kept[:, :look]) for look in looks])
        band = np.interp(places, looks, half, left=math.nan)
        x, y, half_widths = map(numbers, (places, pooled[places - 1], band))
        series.append(Series("all chains", x, y, half_widths, colour="ink", band=over))
        ends = _frame(pooled, half, looks, float(final), half_width(final))
    value = "λ̂ unknown"
    if math.isfinite(float(final)):
        value = f"λ̂ = {value_text(final)}"
        look = {"colour": "ink", "mark": "diamond", "band": over}
        series.append(interval_series(value, [(float(draws), final)], **look))
    title = with_status(f"Running mean: {value}", result.status)
    look = {"y_log": not len(kept), "y_range": ends}
    look["caption"] = f"{_setting(result, chains)}.{_correction(result)}"
    labels = _draw_label(chains), "λ̂, mean of the draws so far"
    return Chart(title, *labels, tuple(series), **look)


def _frame(
    pooled: Array, half: Array, looks: Array, value: float, error: float
) -> tuple[float, float]:
    """The ends of the axis: the first draws swing too far to set the scale."""
    steady = pooled[int(looks[0]) - 1 :]
    reach = max(float(np.nanmax(half[len(half) // 4 :])), float(np.ptp(steady)), 1e-12)
    low, high = float(steady.min()) - 1.5 * reach, float(steady.max()) + 1.5 * reach
    if not math.isfinite(value + error):
        return low, high
    return min(low, value - 1.2 * error), max(high, value + 1.2 * error)


def _setting(result: Chains | LearningCoefficient, chains: Chains) -> str:
    """Temperature, localization, step size and kernel in one line."""
    name = result.temperature if isinstance(result, LearningCoefficient) else ""
    whole = chains.batch_size == chains.num_samples
    batch = "all" if whole else f"{chains.batch_size:,} of {chains.num_samples:,}"
    parts = [
        f"nβ = {chains.nbeta:.4g}" + (f" ({name})" if name else ""),
        f"γ {gamma_text(chains.localization)}",
        f"{'h' if chains.kernel == 'Kinetic' else 'ε'} = {chains.step_size:.3g}",
        f"{chains.kernel}, {batch} samples a step",
        count_text(result.cost, "gradient"),
    ]
    return " · ".join(parts)


def _correction(result: Chains | LearningCoefficient) -> str:
    """What lies between the last mean and λ̂, where it is the bias of the steps."""
    if not isinstance(result, LearningCoefficient) or not result.discretisation_bias:
        return ""
    bias = result.discretisation_bias
    corrected = math.isclose(result.raw - bias, float(result), rel_tol=1e-5)
    return f" λ̂ is the last mean less the bias of the steps, {bias:.2g}." if corrected else ""


def _acceptance(chains: Chains) -> Chart:
    window, mean = max(chains.losses.shape[1] // WINDOWS, 1), chains.diagnostics.acceptance
    series = tuple(
        Series(name, *_rolling(chains.acceptances[chain], window), colour=colour, legend=legend)
        for chain, colour, name, legend in _looks(chains)
    )
    caption = f"Means over {count_text(window, 'draw')}."
    look: Any = {"lines": ((f"mean {mean:.2f}", mean),), "y_range": (0.0, 1.05), "caption": caption}
    return Chart("Acceptance", _draw_label(chains), "acceptance", series, **look)


def _diagnostics(
    result: Chains | LearningCoefficient, chains: Chains
) -> tuple[tuple[str, str], ...]:
    """The numbers that say whether the chains can be believed."""
    seen = chains.diagnostics
    rejects = bool((chains.acceptances < 1).any())
    label = "acceptance" if rejects else "acceptance of MALA steps of this ε"
    sizes = f"{seen.ess_bulk:,.0f}, {seen.ess_tail:,.0f}, {seen.ess_mean:,.0f}"
    rows = {label: f"{seen.acceptance:.3f}"} if math.isfinite(seen.acceptance) else {}
    rows |= {
        "R̂, rank-normalised": f"{seen.rhat:.4f}",
        "effective draws: bulk, tail, mean": sizes,
        "drift, last third less first": value_text(seen.drift),
        "drift of the distance": value_text(seen.distance_drift),
    }
    if isinstance(result, LearningCoefficient):
        means = f"{result.raw:.4g}, {result.discretisation_bias:.2g}"
        rows["mean of the draws, bias of the steps"] = means
    lost = f"{seen.diverged.sum()} of {len(chains)}, {seen.bounded.sum():,}"
    counts = f"{chains.burn_in:,}, {chains.losses.shape[1]:,}, {len(chains)}"
    gamma = gamma_text(chains.localization).removeprefix("= ")
    rows |= {
        "diverged chains, times pulled back": lost,
        "burn-in steps, draws, chains": counts,
        "kernel, step size": f"{chains.kernel}, {chains.step_size:.3g}",
        "nβ, γ": f"{chains.nbeta:.5g}, {gamma}",
    }
    return tuple(rows.items())


@charts_of.register
def _(sweep: Sweep) -> list[Chart]:
    """λ̂ and the acceptance over step sizes, a curve for each temperature; crosses where chains
    diverged.
    """
    sizes, half = sweep.step_sizes, NORMAL_QUANTILE * sweep.stderr
    colours = ("amber", "green", "blue", "purple", "sky")
    values: list[Series] = []
    accepted: list[Series] = []
    lost: list[Series] = []
    for row, (nbeta, temperature) in enumerate(zip(sweep.nbetas, sweep.temperatures, strict=True)):
        name, colour = f"nβ = {nbeta:.4g} ({temperature})", colours[row % len(colours)]
        gone = np.array([status is Status.DIVERGED for status in sweep.statuses[row]])
        heights = np.where(gone, math.nan, sweep.values[row])
        known = zip(sweep.statuses[row], gone, strict=True)
        statuses = ["" if lost_one else status.name for status, lost_one in known]
        look: Any = {"colour": colour, "band": INTERVAL, "statuses": statuses}
        x, y = numbers(sizes), numbers(heights)
        values.append(Series(name, x, y, numbers(half[row]), "joined", **look))
        accepted.append(Series(name, numbers(sizes), numbers(sweep.acceptance[row]), colour=colour))
        if gone.any():
            look = {"mark": "cross", "colour": colour, "legend": not lost}
            x, y = numbers(sizes[gone]), numbers(heights[gone])
            lost.append(Series("diverged", x, y, None, "rug", **look))
    coefficient = sweep.coefficient
    name, point = f"chosen by llc: λ̂ = {value_text(coefficient)}", [(sweep.chosen[0], coefficient)]
    chosen = interval_series(name, point, colour="ink", mark="star")
    wide = is_wide(value for series in values for value in series.y)
    caption = f"By SGLD, γ {gamma_text(sweep.localization)}, batches of {sweep.batch_size:,}."
    title = with_status("λ̂ over step sizes", coefficient.status)
    curves = (*values, *lost, chosen)
    look = {"y_range": (-0.03, 1.03), "x_lines": (("chosen by llc", sweep.chosen[0]),)}
    return [
        Chart(title, STEP, "λ̂", curves, x_log=True, y_log=wide, caption=caption),
        Chart("Acceptance of MALA steps", STEP, "acceptance", tuple(accepted), x_log=True, **look),
    ]


@charts_of.register
def _(curve: CoefficientCurve) -> list[Chart]:
    """λ̂ over γ or nβ with its band and tangents, and the default setting; hollow where it did not
    converge.
    """
    known, first = math.isfinite(curve.default), curve.results[0]
    if curve.axis == "localization":
        letter, label = "γ", "localization γ"
        fixed = f"nβ = {first.nbeta:.4g} ({first.temperature})"
        default = f"default γ = {curve.default:.3g}"
    else:
        letter, label, fixed = "nβ", "inverse temperature nβ", f"γ {gamma_text(curve.fixed)}"
        default = f"n/ln n = {curve.default:.4g}"
    points = zip(numbers(curve.grid), curve.results, strict=True)
    series = [interval_series("λ̂", points, "line", colour="blue")]
    pieces = [(*piece, (piece[0][1], None)) for piece in _tangents(curve)]
    ends = [end for piece in pieces for end in piece][:-1]
    if ends:
        name, x, y = f"slope dλ̂/d ln {letter}", [x for x, _ in ends], [y for _, y in ends]
        series.append(Series(name, x, y, style="segments", colour="vermilion"))
    look: Any = {"x_lines": ((default, curve.default),) if known else (), "caption": f"At {fixed}."}
    return [Chart(f"λ̂ over {letter}", label, "λ̂", tuple(series), x_log=True, **look)]


def _tangents(curve: CoefficientCurve) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """The two ends of a short piece of the tangent at each point whose slope is known."""
    gaps = np.diff(np.log(curve.grid))
    reach = 0.3 * float(gaps.min()) if gaps.size else 0.3
    tangents = []
    for place, value, slope in zip(curve.grid, curve.values, curve.slopes, strict=True):
        rise = reach * float(slope)
        if math.isfinite(value + rise):
            left, right = (float(place) * math.exp(sign * reach) for sign in (-1, 1))
            tangents.append(((left, float(value) - rise), (right, float(value) + rise)))
    return tangents


@charts_of.register
def _(trajectory: Trajectory) -> list[Chart]:
    """λ̂ along training; hollow where it did not converge."""
    where, first = numbers(trajectory.labels), trajectory.results[0]
    points = zip(where, trajectory.results, strict=True)
    curve = interval_series("λ̂", points, "joined", colour="blue")
    named = f" ({first.temperature})" if first.temperature else ""
    caption = f"At nβ = {first.nbeta:.4g}{named}, γ {gamma_text(first.localization)}."
    zero = (("", 0.0),) if trajectory.values.min() < 0 else ()
    return [Chart("λ̂ along training", "checkpoint", "λ̂", (curve,), lines=zero, caption=caption)]


@charts_of.register
def _(scaling: VolumeScaling) -> list[Chart]:
    """V(ε) on logarithmic axes with the curve of slope λ over the levels that it was fitted to."""
    levels, volumes = scaling.levels, scaling.volumes
    half = student_quantile(LEVEL, len(scaling.log_levels) - 1) * scaling.stderr
    above, below = numbers(volumes * np.expm1(half)), numbers(-volumes * np.expm1(-half))
    x, y, name = numbers(levels), numbers(volumes), "nested sampling"
    runs = count_text(len(scaling.log_levels), "run")
    look: Any = {"colour": "blue", "band": f"{INTERVAL} over {runs}"}
    series = [
        Series(name, x, y, above, "segments", below=below, faint=True, legend=False, **look),
        Series(name, x, y, None, "points", statuses=[scaling.status.name] * len(x), **look),
    ]
    slope = scaling.coefficient
    if math.isfinite(float(slope)):
        low = slice(len(levels) // 2, None)
        shape = float(slope) * np.log(levels[low])
        shape += (scaling.multiplicity - 1) * np.log(np.log(levels[0] / levels[low]))
        fitted = np.exp(shape + np.mean(scaling.log_volumes[low] - shape))
        power = "" if scaling.multiplicity == 1 else f", m = {scaling.multiplicity}"
        name, x, y = f"slope λ = {value_text(slope)}{power}", numbers(levels[low]), numbers(fitted)
        series.append(Series(name, x, y, style="segments", colour="vermilion"))
    title = with_status("Volume of nearly optimal parameters", scaling.status)
    look = {"x_log": True, "y_log": True, "caption": f"Within {scaling.radius:.3g} of w*."}
    return [Chart(title, "level ε of L − L*", "V(ε), share of the ball", tuple(series), **look)]


@charts_of.register
def _(regression: TemperatureRegression) -> list[Chart]:
    """E[nL] over 1/β, less the intercept, and the line whose slope is λ."""
    where, base = 1 / regression.betas, float(regression.intercept)
    slope, end = regression.learning_coefficient, 1.06 * float(where.max())
    heights, half = regression.losses - base, NORMAL_QUANTILE * regression.errors
    look: Any = {"band": INTERVAL, "statuses": [regression.status.name] * len(where)}
    points = Series("chains", numbers(where), numbers(heights), numbers(half), "points", **look)
    name, ends = f"slope λ = {value_text(slope)}", ([0.0, end], [0.0, float(slope) * end])
    line, misfit = Series(name, *ends, style="segments"), ""
    if math.isfinite(regression.misfit):
        misfit = f", χ² per degree of freedom {regression.misfit:.2g}"
    title = with_status("Loss over temperature", regression.status)
    caption = f"Intercept {value_text(regression.intercept)}{misfit}."
    look = {"caption": caption, "x_range": (0.0, end)}
    return [Chart(title, "temperature 1/β", "E[nL] less the intercept", (points, line), **look)]


@charts_of.register
def _(energy: FreeEnergy) -> list[Chart]:
    """λ̂ over nβ: its integral over ln nβ is the free energy above n·L*."""
    x, y, half = map(numbers, (energy.nbetas, energy.energies, NORMAL_QUANTILE * energy.errors))
    statuses = [energy.status.name] * len(x)
    series = Series("λ̂", x, y, half, "area", band=INTERVAL, statuses=statuses)
    title = with_status(f"Free energy {value_text(energy.value)}", energy.status)
    caption = "The shaded area is the integral over ln nβ."
    labels = (title, "inverse temperature nβ", "λ̂ = nβ·E[L − L*]")
    return [Chart(*labels, (series,), x_log=True, caption=caption)]


@charts_of.register
def _(verification: Verification) -> list[Chart]:
    """The relative deviation of every case from the truth with its 95 % interval, by verdict."""
    rows = verification.rows
    series, reach = [], 115 * TOLERANCE
    for verdict, colour in VERDICTS.items():
        places = [place for place, row in enumerate(rows) if row.verdict == verdict]
        errors = [100 * rows[place].relative_error for place in places]
        half = [_half(rows[place]) for place in places]
        if places:
            name = f"{verdict} ({len(places)})"
            look: Any = {"colour": colour, "band": INTERVAL}
            look["statuses"] = [rows[place].estimate.status.name for place in places]
            series.append(Series(name, places, errors, half, "points", **look))
        ends = [abs(error) + width for error, width in zip(errors, half, strict=True)]
        reach = max([reach, *(1.05 * end for end in ends if math.isfinite(end))])
    shifts = {
        place: 100 * (row.asymptotic / float(row.truth) - 1)
        for place, row in enumerate(rows)
        if math.isfinite(row.asymptotic) and float(row.truth)
    }
    if shifts:
        seen = {place: min(max(shift, -reach), reach) for place, shift in shifts.items()}
        texts = [f"{shifts[at]:+.0f} %" if seen[at] != shifts[at] else "" for at in shifts]
        look = {"style": "points", "mark": "diamond", "colour": "muted", "texts": texts}
        series.append(Series("λ as n → ∞", list(seen), list(seen.values()), **look))
    count = f"{verification.covered} of {len(rows)} intervals contain the exact value"
    median, worst = f"{verification.median_error:.1%}", f"{verification.worst_error:.1%}"
    caption = f"{count}; median error {median}, largest {worst}."
    if any(float(row.truth) < 1 for row in rows):
        caption += f" Where λ < 1, an error of {TOLERANCE:g} is tolerated, beyond the band."
    tolerated = (f"± {100 * TOLERANCE:.0f} %", -100 * TOLERANCE, 100 * TOLERANCE)
    look = {"lines": (("", 0.0),), "bands": (tolerated,), "y_range": (-1.2 * reach, 1.2 * reach)}
    look |= {"x_names": tuple(row.case for row in rows), "horizontal": True, "caption": caption}
    label = "error of λ̂ relative to the exact value at the same nβ and γ, %"
    return [Chart("λ̂ compared with exact values", "", label, tuple(series), **look)]


def _half(row: CheckedCase) -> float:
    """Half the 95 % interval, in per cent of the truth."""
    return 100 * student_quantile(LEVEL, row.dof) * row.stderr / abs(float(row.truth) or math.nan)
