"""Theorems of the theses as experiments: rows against answers that are known otherwise, and
claims that can fail.
"""

import math

import numpy as np
import pytest

from lambdahat.experiments.averaging.noisy_averages import DECAY, RATE
from lambdahat.experiments.averaging.noisy_averages import EXPERIMENT as AVERAGES
from lambdahat.experiments.curvature.fluctuations import EXPERIMENT as NOISE
from lambdahat.experiments.curvature.fluctuations import NORMAL, WIDE
from lambdahat.experiments.curvature.shrinkage_errors import EXPERIMENT as SHRINKAGE
from lambdahat.experiments.curvature.shrinkage_errors import SPIKED, WISHART, _weight
from lambdahat.experiments.graph_spectra.edge_moves import EXPERIMENT as EDGES
from lambdahat.experiments.graph_spectra.edge_moves import PAIR, REGULAR
from lambdahat.experiments.kit.cells import Rows
from lambdahat.experiments.kit.claims import FAILS, HOLDS, judge
from lambdahat.experiments.regularization.mmse import EXPERIMENT as MMSE
from lambdahat.experiments.regularization.mmse import LINEAR


def rows_of(experiment, scale="smoke"):
    return Rows(
        {**cell, **row} for cell in experiment.grid(scale) for row in experiment.run(cell, "cpu")
    )


def verdict(experiment, rows, words):
    (found,) = [each.verdict for each in judge(experiment.claims(rows)) if words in each.claim]
    return found


def changed(rows, column, value):
    return Rows({**row, column: value} if column in row else row for row in rows)


def test_metric_halves_least_squares_under_the_prior_of_the_thesis():
    """The posterior covariance is (2I)⁻¹, half of least squares' error; λ' = λ/2 gives 2/3 of it
    in place of 1/2.
    """
    rows = rows_of(MMSE, "cpu").where(model=LINEAR)
    assert rows.values("printed rule") == pytest.approx([1 / 3] * len(rows))
    ratios = [row["Metric, thesis"] / row["least squares, thesis"] for row in rows]
    error = np.std(ratios, ddof=1) / math.sqrt(len(ratios))
    assert np.mean(ratios) == pytest.approx(0.5, abs=4 * error)
    assert max(rows.values("distance")) < 1e-6


def test_claims_on_the_posterior_mean_can_fail():
    rows = rows_of(MMSE)
    words = "linear model: the minimum of Eq. 3.5"
    assert verdict(MMSE, rows, words) == HOLDS
    assert verdict(MMSE, changed(rows, "distance", 0.01), words) == FAILS
    assert verdict(MMSE, changed(rows, "share told", 0.999), "just where") == FAILS
    assert verdict(MMSE, changed(rows, "least eigenvalue", -0.1), "an unbiased estimator") == FAILS


def test_moves_of_eigenvalues_that_are_known():
    """Two single edges become a path: 0, 0, 2, 2 → 1 − cos(πk/3) = 0, ½, 3/2, 2. Degree d: Eq.
    3.13 is 2 − 2/d.
    """
    rows = rows_of(EDGES)
    (pair,) = rows.where(graph=PAIR)
    assert (pair["largest move"], pair["zero's move"]) == (pytest.approx(0.5), pytest.approx(0.5))
    assert pair["printed"] == pytest.approx(0.0, abs=1e-12)
    for row in rows.where(graph=REGULAR, links=1):
        assert row["printed"] == pytest.approx(2 - 2 / row["degree"])
        assert row["first order"] == pytest.approx(1 / row["degree"])
    assert verdict(EDGES, rows, "a link moves the eigenvalue 0") == HOLDS
    assert (
        verdict(EDGES, changed(rows, "zero's move", 0.3), "a link moves the eigenvalue 0") == FAILS
    )
    assert verdict(EDGES, rows, "two single edges") == FAILS


def test_noise_of_samples_is_a_shifted_marchenko_pastur_law():
    """At P/b = 1 it ends at (1 + 1)² − 1 = 3 in units of σ_ε = 1; independent noise at 2. Edges
    move as P^(−2/3).
    """
    cells = [cell for cell in NOISE.grid("cpu") if cell["size"] == 400 and cell["seed"] < 4]
    rows = Rows({**cell, **row} for cell in cells for row in NOISE.run(cell, "cpu"))
    for kind, edge in ((WIDE, 3.0), (NORMAL, 2.0)):
        assert np.mean(rows.where(noise=kind).values("largest")) == pytest.approx(edge, rel=0.04)


def test_claims_on_the_semicircle_can_fail():
    rows = rows_of(NOISE, "smoke")
    far = Rows({**row, "distance": 0.2 + 1e-3 * row["seed"]} for row in rows)
    assert verdict(NOISE, far, f"{NORMAL}: at P") == FAILS


def test_simulated_averages_have_their_exact_variances():
    rows = rows_of(AVERAGES, "cpu").where(kind="simulated", steps=3000)
    for row in rows:
        curvatures = 10 ** _drawn(row["seed"], row["size"])
        phi, stationary = 1 - RATE * curvatures, RATE / (curvatures * (2 - RATE * curvatures))
        moving = stationary * (1 - DECAY) * (1 + DECAY * phi) / ((1 + DECAY) * (1 - DECAY * phi))
        for column, exact in (
            ("final", stationary),
            ("ema", moving),
            ("average", 1 / (curvatures**2 * 3000)),
        ):
            assert row[f"{column} variance"] == pytest.approx(exact.mean(), rel=0.15)


def _drawn(seed, size):
    from lambdahat._core.rng import derived_seed

    return np.random.default_rng(derived_seed(seed, "curvatures")).uniform(-1, 0, size)


def test_the_weight_is_ledoit_and_wolfs():
    """‖xxᵀ − S‖² summed over the draws, as they define it, in place of its expansion."""
    draws = np.random.default_rng(0).standard_normal((60, 20)) * np.linspace(0.5, 2, 20)
    sample = draws.T @ draws / 60
    noise = sum(np.square(np.outer(x, x) - sample).sum() for x in draws) / 60**2
    spread = np.square(sample - np.trace(sample) / 20 * np.eye(20)).sum()
    assert _weight(draws, sample) == pytest.approx(1 - noise / spread)


def test_linear_shrinkage_is_the_best_of_an_inverse_wishart_covariance_alone():
    rows = rows_of(SHRINKAGE, "cpu")
    assert verdict(SHRINKAGE, rows, f"{WISHART}: no other eigenvalues") == HOLDS
    assert verdict(SHRINKAGE, rows, f"{SPIKED}: no other eigenvalues") == FAILS
    assert all(row["oracle"] <= row["linear"] for row in rows)
