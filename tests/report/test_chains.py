"""Figures of chains and of the learning coefficient: what each panel shows, from results alone."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from lambdahat.report.figures import plot
from lambdahat.report.style import new_figure
from lambdahat.results import Chains, Estimate, LearningCoefficient, Result, Sensitivity, Status
from lambdahat.results.charts import is_number
from lambdahat.results.measurement import Measurement
from lambdahat.sampling.diagnostics import diagnose, standard_error
from tests.report.test_figures import caption

NBETA, INITIAL, DRAWS = 100.0, 0.5, 200


def some_chains(chains=3, kernel="SGLD", lost=(), seed=0, draws=DRAWS, **changes):
    rng = np.random.default_rng(seed)
    energies = rng.gamma(2.0, 1.0, (chains, draws))
    distances = np.sqrt(energies)
    energies[list(lost), draws // 2 :] = np.inf
    acceptances = (
        rng.uniform(0.8, 1.0, energies.shape) if kernel == "HMC" else np.ones_like(energies)
    )
    seen = diagnose(
        energies, distances, float(acceptances.mean()), np.zeros(chains, dtype=np.int64)
    )
    status = Status.DIVERGED if lost else Status.CONVERGED
    found = Chains(
        INITIAL + energies / NBETA,
        np.full_like(energies, INITIAL),
        distances,
        acceptances,
        kernel,
        1e-4,
        NBETA,
        2.0,
        INITIAL,
        1000,
        512,
        50,
        1,
        "batched",
        seen,
        cost=chains * (draws + 50),
        status=status,
    )
    return dataclasses.replace(found, **changes)


def a_coefficient(chains=None, **changes):
    chains = some_chains() if chains is None else chains
    found = LearningCoefficient(
        1.9,
        0.1,
        chains.cost,
        chains.status,
        15.0,
        chains.energies.mean(axis=1),
        None,
        NBETA,
        "n/log n, n = 1000",
        2.0,
        1e-4,
        INITIAL,
        chains,
        1.0,
        500.0,
        2.0,
        0.1,
        Sensitivity(Estimate(-0.03, 0.01), Estimate(0.2, 0.05)),
    )
    return dataclasses.replace(found, **changes)


def texts(axes):
    return [cell.get_text().get_text() for cell in axes.tables[0].get_celld().values()]


def panels(result):
    """The axes of a figure by what they show."""
    return {axes.get_title().partition(":")[0]: axes for axes in plot(result).axes}


def names(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


@pytest.mark.parametrize("make", [some_chains, a_coefficient, lambda: some_chains(kernel="HMC")])
def test_the_panels_come_from_disk(make, tmp_path):
    found = panels(Result.load(make().save(tmp_path / "result")))
    labels = {name: axes.get_ylabel() for name, axes in found.items() if name != "Diagnostics"}
    labels.pop("Acceptance", None)
    assert labels == {
        "Running mean": "λ̂, mean of the draws so far",
        "Traces": "nβ(L − L*)",
        "Distance from the centre": "distance ‖w − w*‖",
    }
    assert all(found[name].get_xlabel() == "draw" for name in labels)
    found["Traces"].figure.savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 20000


def test_the_running_mean_names_value_temperature_localization_and_step():
    axes = panels(a_coefficient())["Running mean"]
    assert axes.get_title() == "Running mean: λ̂ = 1.90 ± 0.1"
    setting = (
        "nβ = 100 (n/log n, n = 1000) · γ = 2 · ε = 0.0001 · SGLD, 512 of 1,000 samples a step ·"
        " 750 gradients."
    )
    assert caption(axes).startswith(setting)
    chains = some_chains(localization=torch.tensor([1.0, 3.0]), batch_size=1000)
    axes = panels(chains)["Running mean"]
    assert axes.get_title().startswith(f"Running mean: λ̂ = {chains.energies.mean():.4g}")
    assert "γ from 1 to 3" in caption(axes)
    assert "SGLD, all samples a step" in caption(axes)
    assert (
        "[NOT_MIXED]" in panels(a_coefficient(status=Status.NOT_MIXED))["Running mean"].get_title()
    )


def test_traces_are_the_energies_with_rolling_means():
    chains = some_chains()
    axes = panels(chains)["Traces"]
    faint = [line for line in axes.lines if line.get_alpha() == 0.25]
    rolling = [line for line in axes.lines if line.get_alpha() is None]
    for line, energies in zip(faint, chains.energies, strict=True):
        np.testing.assert_allclose(line.get_data(), [np.arange(1, DRAWS + 1), energies])
    window = DRAWS // 25
    for line, energies in zip(rolling, chains.energies, strict=True):
        np.testing.assert_allclose(
            line.get_ydata(), np.convolve(energies, np.full(window, 1 / window), "valid")
        )
        assert line.get_xdata()[0] == pytest.approx((window + 1) / 2)
    assert names(axes) == ["chain 1", "chain 2", "chain 3"]
    assert f"R̂ = {chains.diagnostics.rhat:.3f}" in caption(axes)


def test_long_traces_are_thinned():
    axes = panels(some_chains(draws=20_000))["Traces"]
    assert max(len(line.get_xdata()) for line in axes.lines) <= 400


def test_the_running_mean_ends_at_the_mean_of_all_draws_with_its_band():
    chains = some_chains()
    axes = new_figure().add_subplot()
    assert plot(chains, axes) is axes
    (pooled,) = [line for line in axes.lines if line.get_label() == "all chains"]
    assert pooled.get_ydata()[-1] == pytest.approx(chains.energies.mean())
    band = axes.collections[0].get_paths()[0].vertices
    at_end = band[band[:, 0] == DRAWS][:, 1]
    half = 1.96 * standard_error(chains.energies)
    assert at_end.max() == pytest.approx(chains.energies.mean() + half, rel=1e-3)
    assert at_end.min() == pytest.approx(chains.energies.mean() - half, rel=1e-3)


def test_the_final_value_has_its_own_interval():
    axes = plot(a_coefficient(), new_figure().add_subplot())
    (segment,) = axes.collections[-1].get_segments()
    assert tuple(segment[:, 1]) == pytest.approx(a_coefficient().interval(0.95))
    low, high = axes.get_ylim()
    assert low < segment[:, 1].min() < segment[:, 1].max() < high


def test_means_over_trajectories_are_what_runs_where_there_are_any():
    chains = some_chains(kernel="HMC")
    smooth = (
        chains.losses.mean(axis=1, keepdims=True)
        + 0.1 * (chains.losses - chains.losses.mean())
        + 0.01
    )
    axes = panels(dataclasses.replace(chains, recycled_losses=smooth))["Running mean"]
    (pooled,) = [line for line in axes.lines if line.get_label() == "all chains"]
    assert pooled.get_ydata()[-1] == pytest.approx(NBETA * (smooth - INITIAL).mean())


def test_kernels_that_reject_show_their_acceptance_and_all_their_diagnostics():
    chains = some_chains(kernel="HMC")
    axes = panels(chains)["Acceptance"]
    assert axes.get_ylabel() == "acceptance"
    assert f"mean {chains.acceptances.mean():.2f}" in names(axes)
    assert "Acceptance" not in panels(some_chains())
    cells = texts(panels(a_coefficient())["Diagnostics"])
    assert cells[cells.index("mean of the draws, bias of the steps") + 1] == "2, 0.1"
    assert cells[cells.index("burn-in steps, draws, chains") + 1] == "50, 200, 3"
    assert cells[cells.index("diverged chains, times pulled back") + 1] == "0 of 3, 0"
    assert texts(panels(chains)["Diagnostics"])[:2] == [
        "acceptance",
        f"{chains.diagnostics.acceptance:.3f}",
    ]


def test_the_sensitivity_to_the_localization_stands_over_the_distances():
    told = caption(panels(a_coefficient())["Distance from the centre"])
    assert told == "Doubling γ changes λ̂ by about −0.0208 ± 0.0069."
    nothing = Estimate(math.nan, math.nan)
    for unknown in (some_chains(), a_coefficient(sensitivity=Sensitivity(nothing, nothing))):
        assert caption(panels(unknown)["Distance from the centre"]) == ""


def test_a_diverged_chain_leaves_the_frame_and_is_named():
    chains = some_chains(lost=(1,))
    found = panels(chains)
    assert "chain 2 (diverged)" in names(found["Traces"])
    kept = chains.energies[[0, 2]]
    assert kept.max() < found["Traces"].get_ylim()[1] < 2 * kept.max()
    (pooled,) = [line for line in found["Running mean"].lines if line.get_label() == "all chains"]
    assert pooled.get_ydata()[-1] == pytest.approx(kept.mean())
    assert "[DIVERGED]" in found["Running mean"].get_title()


def test_chains_that_all_ran_away_are_followed_on_a_logarithmic_axis():
    growth = np.exp(np.minimum(2.0 * np.arange(DRAWS), 700.0))[None] * np.ones((2, 1))
    growth[:, 150:] = np.nan
    chains = some_chains(2, lost=(0, 1), losses=INITIAL + growth / NBETA, distances=np.sqrt(growth))
    found = panels(chains)
    found["Traces"].figure.canvas.draw()
    assert found["Running mean"].get_title() == "Running mean: λ̂ unknown [DIVERGED]"
    assert found["Traces"].get_yscale() == "log"
    assert found["Traces"].get_xlim()[1] < 50  # where exp(2·draws) passes 1e30


def test_many_chains_share_a_colour_and_a_name():
    axes = panels(some_chains(12, thin=5))["Traces"]
    assert names(axes) == ["12 chains"]
    assert axes.get_xlabel() == "draw, 5 steps each"
    assert len(axes.lines) == 24


def test_few_draws_or_one_chain_or_a_chain_at_rest_can_be_drawn():
    still = some_chains(
        losses=np.full((3, DRAWS), INITIAL),
        distances=np.zeros((3, DRAWS)),
        status=Status.NOT_MOVING,
    )
    for chains in (some_chains(1), some_chains(2, draws=8), some_chains(1, draws=1), still):
        plot(chains).canvas.draw()


def test_a_coefficient_without_its_chains_is_a_number_that_says_its_settings():
    assert not is_number(a_coefficient())
    bare = dataclasses.replace(a_coefficient(), chains=None)
    assert is_number(bare)
    assert plot(bare).get_xlabel() == "value"
    assert plot(bare).get_title() == "1.90 ± 0.1, nβ = 100, γ = 2"


def test_a_measurement_lists_the_coefficient_and_draws_it():
    figure = plot(Measurement({"llc": a_coefficient(), "trace": Estimate(1.0, 0.1)}))
    assert [axes.get_title().split(":")[0] for axes in figure.axes] == ["llc", "value ± error"]
    rows = [("λ̂", "1.90 ± 0.1"), ("λ̂, measured at", "nβ = 100, γ = 2"), ("trace", "1.00 ± 0.1")]
    assert texts(figure.axes[1]) == [part for row in rows for part in row]


def test_the_bias_that_is_taken_off_is_named():
    told = "λ̂ is the last mean less the bias of the steps, 0.1."
    assert told in caption(panels(a_coefficient())["Running mean"])
    assert told not in caption(panels(a_coefficient(value=2.0))["Running mean"])


def test_distances_are_shown_from_zero_unless_they_hardly_change():
    near, far = (
        panels(some_chains(distances=d))["Distance from the centre"]
        for d in (some_chains().distances, 25 + some_chains().distances)
    )
    assert near.get_ylim()[0] == 0
    assert far.get_ylim()[0] > 20
