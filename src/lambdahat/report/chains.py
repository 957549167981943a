"""Figures of chains: traces, the running learning coefficient, distance from the centre, diagnostics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from lambdahat.report.style import (
    AMBER,
    BLUE,
    GREEN,
    GREY,
    PURPLE,
    SKY,
    VERMILION,
    counted,
    new_figure,
    tidy,
    value_text,
)
from lambdahat.results import Array, Chains, Estimate, LearningCoefficient, student_quantile
from lambdahat.sampling.diagnostics import HUGE, standard_error
from lambdahat.singular.stretches import mean_energy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = (BLUE, VERMILION, GREEN, AMBER, SKY, PURPLE)
LEVEL = 0.95
POINTS = 800  # of a trace, as many as a panel can show
LOOKS = 24  # at how many draws the band of the running mean is computed
ENERGY = "nβ(L − L*)"


def draw_chains(result: Chains | LearningCoefficient) -> Figure:
    """Traces, running λ̂ with its band, distance and acceptance or diagnostics: four panels."""
    chains = chains_of(result)
    figure = new_figure(10.4, 6.6)
    panels = [tidy(figure.add_subplot(2, 2, place)) for place in range(1, 5)]
    _draw_traces(chains, panels[0])
    _draw_running(result, panels[1])
    _draw_distances(result, panels[2])
    _draw_acceptance(chains, panels[3]) if _rejects(chains) else _list_diagnostics(result, panels[3])
    figure.suptitle(f"{_headline(result)}\n{_setting(result)}", fontsize="medium")
    return figure


def draw_running(result: Chains | LearningCoefficient, axes: Axes) -> None:
    """The running λ̂ of each chain and of all, with its band: the panel that stands for the rest."""
    _draw_running(result, axes)
    axes.set_title(_headline(result), fontsize="medium")


def chains_of(result: Chains | LearningCoefficient) -> Chains:
    """The chains behind a result."""
    found = result.chains if isinstance(result, LearningCoefficient) else result
    assert found is not None
    return found


def _headline(result: Chains | LearningCoefficient) -> str:
    value = result if isinstance(result, LearningCoefficient) else mean_energy(result)
    text = f"λ̂ = {value_text(value)}" if np.isfinite(value.value) else "λ̂ unknown"
    return text + ("" if result.status.ok else f" [{result.status.name}]")


def _setting(result: Chains | LearningCoefficient) -> str:
    """Temperature, localization, step size and kernel in one line."""
    chains = chains_of(result)
    name = result.temperature if isinstance(result, LearningCoefficient) else ""
    batch = "all" if chains.batch_size == chains.num_samples else f"{chains.batch_size:,} of {chains.num_samples:,}"
    parts = [
        f"nβ = {chains.nbeta:.4g}" + (f" ({name})" if name else ""),
        f"γ {gamma_text(chains.localization)}",
        f"{'h' if chains.kernel == 'Kinetic' else 'ε'} = {chains.step_size:.3g}",
        f"{chains.kernel}, {batch} samples a step",
        counted(result.cost, "gradient"),
    ]
    return "  ·  ".join(parts)


def settings_text(estimate: Estimate, before: str = "") -> str:
    """The nβ and γ of a learning coefficient, after ``before``; nothing for other numbers."""
    if not isinstance(estimate, LearningCoefficient) or not np.isfinite(estimate.nbeta):
        return ""
    return f"{before}nβ = {estimate.nbeta:.4g}, γ {gamma_text(estimate.localization)}"


def gamma_text(localization: float | Tensor) -> str:
    """The text "= 1", or the range where it differs between parameters."""
    if not isinstance(localization, Tensor):
        return f"= {localization:.3g}"
    low, high = float(localization.min()), float(localization.max())
    return f"= {low:.3g}" if low == high else f"from {low:.3g} to {high:.3g}"


def _rejects(chains: Chains) -> bool:
    """Whether the kernel accepts and rejects, so that there is an acceptance draw by draw."""
    return bool((chains.acceptances < 1).any())


def _coloured(chains: Chains) -> Iterator[tuple[int, str, str | None]]:
    """Number, colour and label of every chain; beyond six they look alike and have one label."""
    count, diverged = len(chains), chains.diagnostics.diverged
    for chain in range(count):
        if count > len(COLOURS):
            yield chain, SKY, f"{count} chains" if chain == 0 else None
        else:
            yield chain, COLOURS[chain], f"chain {chain + 1}" + (" (diverged)" if diverged[chain] else "")


def _rolling(values: Array, window: int) -> tuple[Array, Array]:
    """Draw numbers and means over ``window`` draws of one trace, at most some hundred of them."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    means = (sums[window:] - sums[:-window]) / window
    where = np.arange(len(means), dtype=np.float64) + (window + 1) / 2
    step = max(len(means) // POINTS, 1)
    return where[::step], np.asarray(means[::step])


def _draw_each(chains: Chains, values: Array, axes: Axes) -> None:
    """Every draw faint, and rolling means."""
    draws = values.shape[1]
    window, step, many = max(draws // 25, 1), max(draws // POINTS, 1), len(chains) > len(COLOURS)
    lost = bool(chains.diagnostics.diverged.all())
    numbers = np.arange(1, draws + 1)
    for chain, colour, label in _coloured(chains):
        finite = values[chain][: _finite(values[chain])]
        axes.plot(numbers[: len(finite) : step], finite[::step], color=colour, linewidth=1.0 if lost else 0.5,
                  alpha=1.0 if lost else 0.1 if many else 0.25)  # fmt: skip
        if len(finite) >= window and not lost:
            axes.plot(*_rolling(finite, window), color=colour, linewidth=0.8 if many else 1.4, label=label)
    _label_draws(chains, axes)
    kept = values[~chains.diagnostics.diverged]
    if lost:
        _follow_runaway(values, axes)
    elif len(kept) < len(values):  # the runaway leaves the frame
        low, high = float(kept.min()), float(kept.max())
        axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low) or None)


def _follow_runaway(values: Array, axes: Axes) -> None:
    """A logarithmic axis up to the draw where the last chain is gone."""
    axes.set_yscale("log")
    axes.set_xlim(0, max(_finite(trace) for trace in values) + 1)


def _finite(values: Array) -> int:
    """How many draws come before the first that is on its way to infinity."""
    broken = ~(np.abs(values) < HUGE)
    return int(np.argmax(broken)) if broken.any() else len(values)


def _label_draws(chains: Chains, axes: Axes) -> None:
    axes.set_xlim(0, chains.losses.shape[1])
    axes.set_xlabel("draw" if chains.thin == 1 else f"draw, {chains.thin} steps each")


def _draw_traces(chains: Chains, axes: Axes) -> None:
    _draw_each(chains, chains.energies, axes)
    axes.set_ylabel(ENERGY)
    if chains.diagnostics.diverged.all():
        axes.set_title("Traces: every chain diverged", fontsize="medium")
        return
    axes.axhline(0.0, color=GREY, linewidth=0.8, linestyle="--")
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.12 * (high - low))  # room for the names
    axes.legend(frameon=False, fontsize="small", ncols=len(COLOURS), loc="upper right", columnspacing=1.2,
                handlelength=1.2)  # fmt: skip
    shown = chains.diagnostics
    axes.set_title(f"Traces and rolling means: R̂ = {shown.rhat:.3f}, {shown.ess_mean:,.0f} effective draws",
                   fontsize="medium")  # fmt: skip


def _draw_running(result: Chains | LearningCoefficient, axes: Axes) -> None:
    """Means of the draws so far, the pooled one with its 95 % interval, and λ̂ with its own at the end.

    λ̂ may lie off the last mean: the bias of the steps is taken off it, or a control variate used.
    """
    chains = chains_of(result)
    energies, draws = _averaged(chains), chains.losses.shape[1]
    numbers = np.arange(1, draws + 1)
    step = max(draws // POINTS, 1)
    for chain, colour, _ in _coloured(chains):
        count = _finite(energies[chain])
        means = np.cumsum(energies[chain][:count]) / numbers[:count]
        axes.plot(numbers[:count:step], means[::step], color=colour, linewidth=0.9, alpha=0.8)
    kept = energies[~chains.diagnostics.diverged]
    if kept.size:
        _draw_pooled(kept, axes)
    final = result if isinstance(result, LearningCoefficient) else mean_energy(result)
    _label_draws(chains, axes)
    if np.isfinite(final.value):
        _draw_final(final, draws, axes)
    axes.set_ylabel("λ̂, mean of the draws so far")
    axes.legend(frameon=False, fontsize="small") if kept.size else _follow_runaway(energies, axes)
    axes.set_title("Running λ̂" + _taken_off(result), fontsize="medium")


def _taken_off(result: Chains | LearningCoefficient) -> str:
    """What lies between the last mean and λ̂, where it is the bias of the steps."""
    if not isinstance(result, LearningCoefficient) or not result.discretisation_bias:
        return ""
    corrected = np.isclose(result.raw - result.discretisation_bias, float(result))
    return f"; the bias of the steps, {result.discretisation_bias:.2g}, is taken off at the end" if corrected else ""


def _averaged(chains: Chains) -> Array:
    """What λ̂ is the mean of: energies over trajectories where there are any, else those of the draws."""
    if chains.recycled_losses is None:
        return chains.energies
    return np.asarray(chains.nbeta * (chains.recycled_losses - chains.centre_losses))


def _draw_final(final: Estimate, draws: int, axes: Axes) -> None:
    half = student_quantile(LEVEL, final.dof) * float(final.stderr)
    axes.errorbar(draws, float(final), yerr=half, fmt="D", color="black", markerfacecolor="white", markersize=6,
                  capsize=4, clip_on=False, zorder=4, label=f"λ̂ = {value_text(final)}")  # fmt: skip
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, float(final) - 1.2 * half), max(high, float(final) + 1.2 * half))


def _draw_pooled(energies: Array, axes: Axes) -> None:
    draws = energies.shape[1]
    pooled = np.cumsum(energies.mean(axis=0)) / np.arange(1, draws + 1)
    looks = np.unique(np.linspace(max(draws / LOOKS, 1), draws, LOOKS).astype(int))
    half = student_quantile(LEVEL, np.inf) * np.array([standard_error(energies[:, :look]) for look in looks])
    middle = pooled[looks - 1]
    axes.fill_between(looks, middle - half, middle + half, color="black", alpha=0.15, linewidth=0,
                      label="95 % interval")  # fmt: skip
    step = max(draws // POINTS, 1)
    axes.plot(np.arange(1, draws + 1)[::step], pooled[::step], color="black", linewidth=1.8, label="all chains")
    steady = pooled[looks[0] - 1 :]  # the first draws swing too far to set the scale
    reach = max(float(np.nanmax(half[len(half) // 4 :])), float(np.ptp(steady)), 1e-12)
    axes.set_ylim(float(steady.min()) - 1.5 * reach, float(steady.max()) + 1.5 * reach)


def _draw_distances(result: Chains | LearningCoefficient, axes: Axes) -> None:
    chains = chains_of(result)
    _draw_each(chains, chains.distances, axes)
    low, high = axes.get_ylim()
    if axes.get_yscale() == "linear" and low < 0.5 * high:
        axes.set_ylim(bottom=0.0)
    axes.set_ylabel("distance ‖w − w*‖")
    text = "Distance from the centre"
    if isinstance(result, LearningCoefficient) and result.sensitivity is not None:
        slope = float(result.sensitivity.localization)
        text += f"; doubling γ changes λ̂ by about {0.69 * slope:.2g}" if np.isfinite(slope) else ""
    axes.set_title(text, fontsize="medium")


def _draw_acceptance(chains: Chains, axes: Axes) -> None:
    window = max(chains.losses.shape[1] // 25, 1)
    many = len(chains) > len(COLOURS)
    for chain, colour, _ in _coloured(chains):
        axes.plot(*_rolling(chains.acceptances[chain], window), color=colour, linewidth=0.8 if many else 1.2)
    mean = chains.diagnostics.acceptance
    axes.axhline(mean, color=GREY, linewidth=1, linestyle="--", label=f"mean {mean:.2f}")
    axes.set_ylim(0.0, 1.05)
    _label_draws(chains, axes)
    axes.set_ylabel("acceptance")
    axes.legend(frameon=False, fontsize="small", loc="lower right")
    axes.set_title(f"Acceptance, means over {counted(window, 'draw')}", fontsize="medium")


def _list_diagnostics(result: Chains | LearningCoefficient, axes: Axes) -> None:
    """The numbers that say whether the chains can be believed."""
    axes.set_axis_off()
    axes.set_title("Diagnostics", fontsize="medium")
    table = axes.table([list(row) for row in _diagnostics(result)], cellLoc="left", edges="horizontal",
                       loc="upper center", colWidths=[0.62, 0.38])  # fmt: skip
    table.auto_set_font_size(False)
    table.set_fontsize(9)
    table.scale(1.0, 1.45)
    for line in table.get_celld().values():
        line.set_edgecolor("0.8")


def _diagnostics(result: Chains | LearningCoefficient) -> list[tuple[str, str]]:
    chains = chains_of(result)
    seen = chains.diagnostics
    rows = [
        ("acceptance of MALA steps of this ε", f"{seen.acceptance:.3f}"),
        ("R̂, rank-normalised", f"{seen.rhat:.4f}"),
        ("effective draws: bulk, tail, mean", f"{seen.ess_bulk:,.0f}, {seen.ess_tail:,.0f}, {seen.ess_mean:,.0f}"),
        ("drift, last third less first", value_text(seen.drift)),
        ("drift of the distance", value_text(seen.distance_drift)),
    ]
    if isinstance(result, LearningCoefficient):
        rows += [("mean of the draws, bias of the steps", f"{result.raw:.4g}, {result.discretisation_bias:.2g}")]
    stopped = int(seen.diverged.sum()), int(seen.bounded.sum())
    rows += [
        ("diverged chains, times pulled back", f"{stopped[0]} of {len(chains)}, {stopped[1]:,}"),
        ("burn-in steps, draws, chains", f"{chains.burn_in:,}, {chains.losses.shape[1]:,}, {len(chains)}"),
    ]
    return rows


def has_chains(estimate: Estimate) -> bool:
    """Whether there are chains to draw."""
    return isinstance(estimate, LearningCoefficient) and estimate.chains is not None
