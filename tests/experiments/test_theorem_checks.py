"""Theorems of the theses as experiments: rows against answers that are known otherwise, and
claims that can fail.
"""

import math
from functools import cache

import numpy as np
import pytest

from lambdahat.experiments.averaging.noisy_averages import DECAY, RATE
from lambdahat.experiments.averaging.noisy_averages import EXPERIMENT as AVERAGES
from lambdahat.experiments.curvature.fluctuations import EXPERIMENT as NOISE
from lambdahat.experiments.curvature.fluctuations import NORMAL, WIDE
from lambdahat.experiments.curvature.limit_laws import EXPERIMENT as LAWS
from lambdahat.experiments.curvature.limit_laws import SIGNS
from lambdahat.experiments.curvature.limit_laws import WIDE as TALL
from lambdahat.experiments.curvature.noise_outliers import ELEMENTS, LIPSCHITZ, OUTLIERS
from lambdahat.experiments.curvature.noise_outliers import EXPERIMENT as BATCHES
from lambdahat.experiments.curvature.shrinkage_errors import EXPERIMENT as SHRINKAGE
from lambdahat.experiments.curvature.shrinkage_errors import SPIKED, WISHART, _weight
from lambdahat.experiments.graph_spectra.edge_moves import EXPERIMENT as EDGES
from lambdahat.experiments.graph_spectra.edge_moves import PAIR, REGULAR
from lambdahat.experiments.kit.cells import Rows
from lambdahat.experiments.kit.claims import FAILS, HOLDS, judge
from lambdahat.experiments.logdets.trace_noise import DIAGONAL, EQUAL, PASTUR
from lambdahat.experiments.logdets.trace_noise import EXPERIMENT as TRACES
from lambdahat.experiments.logdets.trace_noise import NORMAL as GAUSSIAN
from lambdahat.experiments.logdets.trace_noise import SIGNS as RADEMACHER
from lambdahat.experiments.published import find
from lambdahat.experiments.regularization.mmse import EXPERIMENT as MMSE
from lambdahat.experiments.regularization.mmse import LINEAR


def rows_of(experiment, scale="smoke"):
    return Rows(
        {**cell, **row} for cell in experiment.grid(scale) for row in experiment.run(cell, "cpu")
    )


@cache
def first_rows(name, seeds):
    """Those of the first seeds at the scale cpu."""
    experiment = find(name)
    cells = [cell for cell in experiment.grid("cpu") if cell["seed"] < seeds]
    return Rows({**cell, **row} for cell in cells for row in experiment.run(cell, "cpu"))


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


def test_variances_of_traces_are_those_of_known_matrices():
    """Var[uᵀHu] = 2·Tr H² + (m₄ − 3)·ΣH_ii²: nothing with ±1 and a diagonal matrix, 2·Tr H² with
    normal elements.
    """
    rows = first_rows(TRACES.name, 3)
    assert max(rows.where(matrix=DIAGONAL, law=RADEMACHER).values("noise")) < 1e-20
    shares = rows.where(law=GAUSSIAN).values("over lemma")
    assert np.mean(shares) == pytest.approx(2 / 5, rel=0.02)
    for row in rows.where(matrix=EQUAL, law=GAUSSIAN):
        assert row["share"] == pytest.approx(1 / row["size"])
        assert row["bound"] == pytest.approx(row["share"])
        assert row["noise"] == pytest.approx(2 / row["size"], rel=0.15)


def test_claims_on_traces_can_fail():
    rows = first_rows(TRACES.name, 3)
    assert verdict(TRACES, rows, "is at most (2 + m₄)") == HOLDS
    assert verdict(TRACES, rows, "the variance is (2 + m₄)") == FAILS
    assert verdict(TRACES, changed(rows, "over lemma", 1.0), "the variance is (2 + m₄)") == HOLDS
    assert verdict(TRACES, changed(rows, "bound", 1e-9), "at most 1/(1 + (P − 1)/κ²)") == FAILS
    level = Rows({**row, "noise": 1.0 + 1e-6 * row["seed"]} for row in rows)
    for words in ("noise to signal of covariances", "with equal eigenvalues"):
        assert verdict(TRACES, rows, words) == HOLDS
        assert verdict(TRACES, level, words) == FAILS
    assert {row["matrix"] for row in rows if "bound" in row} == {PASTUR, EQUAL, DIAGONAL}


def test_limit_laws_have_the_distances_of_their_distribution_functions():
    """With q = 2 half of the eigenvalues are 0, where both functions jump."""
    rows = first_rows(LAWS.name, 8)
    assert set(rows.where(matrix=TALL).values("at zero")) == {0.5}
    for row in rows.where(size=400):
        assert row["distance"] < 0.02
    assert verdict(LAWS, rows, "the others end at") == FAILS
    assert verdict(LAWS, rows, "they end at (1 + √q)²") == HOLDS
    assert verdict(LAWS, rows, "integrate polynomials") == HOLDS
    assert verdict(LAWS, changed(rows, "missed", 1e-3), "integrate polynomials") == FAILS
    level = Rows({**row, "distance": 0.1 * (1 + 1e-3 * row["seed"])} for row in rows)
    growing = Rows({**row, "distance": row["distance"] * row["size"] ** 2} for row in level)
    assert verdict(LAWS, rows, f"{SIGNS}: the distance") == HOLDS
    assert verdict(LAWS, growing, f"{SIGNS}: the distance") == FAILS


def test_noise_of_batches_follows_theorem_14_between_the_two_thresholds():
    rows = first_rows(BATCHES.name, 10)
    for key in ("largest eigenvalue is λ₁ + σ²/λ₁", "the second is", "smallest eigenvalue is"):
        assert {v.verdict for v in judge(BATCHES.claims(rows)) if key in v.claim} == {HOLDS}
    assert verdict(BATCHES, rows, "λ₁ = 1.5σ: the largest eigenvalue is 2σ") == FAILS
    assert verdict(BATCHES, rows, "λ₁ = 0.5σ: the largest eigenvalue is 2σ") == HOLDS
    assert {row["part"] for row in rows} == {ELEMENTS, LIPSCHITZ, OUTLIERS}


def test_claims_on_elements_of_the_noise_can_fail():
    rows = first_rows(BATCHES.name, 10)
    assert verdict(BATCHES, rows, "is at most √(PL)") == FAILS
    assert verdict(BATCHES, rows, "is at most √P·L") == HOLDS
    for column, words in (
        ("bias", "elements of ε have mean 0"),
        ("over printed", "(1/B − 1/N)·Var"),
        ("variance", "is proportional to"),
        ("distance", "from the normal law"),
    ):
        assert verdict(BATCHES, rows, words) == HOLDS
        wrong = {row["seed"]: 3.0 + 0.01 * row["seed"] for row in rows}
        far = Rows(
            {**row, column: wrong[row["seed"]] * row["batch"]} if column in row else row
            for row in rows
        )
        assert verdict(BATCHES, far, words) == FAILS
