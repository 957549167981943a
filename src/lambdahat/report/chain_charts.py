"""Charts of chains: traces, the running learning coefficient, distances; and the diagnostics as a table."""

from __future__ import annotations

import math

import numpy as np

from lambdahat.experiments.reproduction import Table
from lambdahat.report.chains import ENERGY, LEVEL, chains_of, gamma_text
from lambdahat.report.spectral_charts import listed
from lambdahat.report.style import value_text
from lambdahat.results import Array, Chains, LearningCoefficient, student_quantile
from lambdahat.results.charts import Chart, Series
from lambdahat.sampling.diagnostics import HUGE, standard_error
from lambdahat.singular.stretches import mean_energy

POINTS = 300  # of a trace
LOOKS = 24  # at how many draws the band of the running mean is computed
SHOWN = 12  # chains with a curve of their own


def chain_charts(result: Chains | LearningCoefficient) -> list[Chart]:
    """Traces, the running λ̂ with its band, and the distance from the centre; none where the chains were not kept."""
    if isinstance(result, LearningCoefficient) and result.chains is None:
        return []
    chains = chains_of(result)
    draw = "draw" if chains.thin == 1 else f"draw, {chains.thin} steps each"
    distances = Chart("Distance from the centre", draw, "distance ‖w − w*‖", _traces(chains, chains.distances))
    acceptance = Chart("Acceptance", draw, "acceptance", _traces(chains, chains.acceptances))
    rejects = bool((chains.acceptances < 1).any())
    traces = Chart("Traces", draw, ENERGY, _traces(chains, chains.energies), caption="Means over stretches of draws.")
    return [_running(result, draw), traces, distances, *([acceptance] if rejects else [])]


def _traces(chains: Chains, values: Array) -> tuple[Series, ...]:
    """Every chain as means over stretches; a diverged one until it ran away."""
    out = []
    for number, trace in enumerate(values[:SHOWN], start=1):
        finite = trace[: _steady(trace)]
        if len(finite):
            size = math.ceil(len(finite) / POINTS)
            starts = np.arange(0, len(finite), size)
            means = np.add.reduceat(finite, starts) / np.diff(starts, append=len(finite))
            gone = " (diverged)" if chains.diagnostics.diverged[number - 1] else ""
            out.append(Series(f"chain {number}{gone}", listed(starts + (size + 1) / 2), listed(means)))
    return tuple(out)


def _running(result: Chains | LearningCoefficient, draw: str) -> Chart:
    """Means of the draws so far, by chain and of all with their 95 % interval, and λ̂ with its own at the end."""
    chains = chains_of(result)
    losses = chains.losses if chains.recycled_losses is None else chains.recycled_losses
    with np.errstate(over="ignore", invalid="ignore"):
        energies = chains.nbeta * (losses - chains.centre_losses)
    draws = energies.shape[1]
    looks = np.unique(np.linspace(max(draws / LOOKS, 1), draws, LOOKS).astype(int))
    final = result if isinstance(result, LearningCoefficient) else mean_energy(result)
    series = []
    kept = energies[~chains.diagnostics.diverged]
    if len(kept):
        means = np.cumsum(kept.mean(axis=0)) / np.arange(1, draws + 1)
        errors = np.array([standard_error(kept[:, :look]) for look in looks])
        half = student_quantile(LEVEL, math.inf) * errors
        series.append(Series("all chains", listed(looks), listed(means[looks - 1]), listed(half)))
    for number, trace in enumerate(energies[:SHOWN], start=1):
        seen = looks[looks <= _steady(trace)]
        if len(seen):
            means = np.cumsum(trace[: seen[-1]])[seen - 1] / seen
            series.append(Series(f"chain {number}", listed(seen), listed(means)))
    if math.isfinite(float(final)):
        error = student_quantile(LEVEL, final.dof) * float(final.stderr)
        series.append(Series(f"λ̂ = {value_text(final)}", [draws], [float(final)], [error], "points"))
    caption = "Mean of the draws so far; band and bar: 95 % intervals." + _taken_off(result)
    return Chart("Running λ̂", draw, "λ̂", tuple(series), caption=caption)


def _taken_off(result: Chains | LearningCoefficient) -> str:
    if not isinstance(result, LearningCoefficient) or not result.discretisation_bias:
        return ""
    return f" λ̂ is the last mean less the bias of the steps, {result.discretisation_bias:.2g}."


def _steady(trace: Array) -> int:
    """How many draws come before the first that is on its way to infinity."""
    broken = ~(np.abs(trace) < HUGE)
    return int(np.argmax(broken)) if broken.any() else len(trace)


def chain_tables(result: Chains | LearningCoefficient) -> list[Table]:
    """What says whether the chains can be believed, and how each setting was chosen."""
    if isinstance(result, LearningCoefficient) and result.chains is None:
        return []
    chains = chains_of(result)
    seen = chains.diagnostics
    rows = (
        ("R̂, rank-normalised", f"{seen.rhat:.4f}"),
        ("effective draws: bulk, tail, mean", f"{seen.ess_bulk:,.0f}, {seen.ess_tail:,.0f}, {seen.ess_mean:,.0f}"),
        ("acceptance", f"{seen.acceptance:.3f}"),
        ("drift, last third less first", value_text(seen.drift)),
        ("drift of the distance", value_text(seen.distance_drift)),
        ("diverged chains, times pulled back", f"{seen.diverged.sum()} of {len(chains)}, {seen.bounded.sum():,}"),
        ("burn-in steps, draws, chains", f"{chains.burn_in:,}, {chains.losses.shape[1]:,}, {len(chains)}"),
        ("kernel, step size", f"{chains.kernel}, {chains.step_size:.3g}"),
        ("nβ, γ", f"{chains.nbeta:.5g}, {gamma_text(chains.localization).removeprefix('= ')}"),
    )
    tables = [Table("Diagnostics", ("quantity", "value"), rows)]
    if chains.reasons:
        tables.append(Table("How the settings were chosen", ("setting", "why"), tuple(chains.reasons.items())))
    return tables
