"""Predictions against closed forms, against the models they are made of, and against actual
noisy matrices.
"""

import math

import numpy as np
import pytest
import torch

from lambdahat.estimators._eigenpairs import eigenpairs
from lambdahat.estimators._spectrum import spectrum
from lambdahat.operators import operator
from lambdahat.randommatrix import BatchPrediction, Multiplicative, TracyWidom, predict
from lambdahat.results import Eigenpairs, Estimate
from tests.cases import with_eigenvalues

ORDER = 500
NETWORK = np.concatenate([[9.0, 5.0, -2.0], np.linspace(-0.02, 0.05, ORDER - 3)])


def pairs(*values, order=ORDER, errors=0.0):
    """Eigenpairs along the axes."""
    values = torch.tensor(values, dtype=torch.float64)
    vectors = torch.eye(order, dtype=torch.float64)[:, : len(values)]
    return Eigenpairs(
        values, vectors, torch.full_like(values, errors), torch.full(values.shape, True)
    )


@pytest.fixture(scope="module")
def measured():
    """Lanczos's view of a spectrum like a network's."""
    return spectrum(operator(with_eigenvalues(NETWORK)), depth=60, seed=0)


@pytest.fixture(scope="module")
def positive():
    """Lanczos's view of a positive semi-definite spectrum."""
    return spectrum(operator(with_eigenvalues(np.abs(NETWORK))), depth=60, seed=0)


def test_with_eigenpairs_additive_noise_is_theorem_14():
    variance, batch, population = 1e-3, 40, 200
    found = predict(pairs(3.0, -2.0), variance, batch, population)
    effective = batch / (1 - batch / population)
    noise = (ORDER - 2) * variance / effective  # s², without the two that stand apart
    repelled = variance / effective / 5.0  # by one another
    assert found.effective == effective
    assert float(found.largest) == pytest.approx(3.0 + noise / 3.0 + repelled, abs=0.2 * repelled)
    assert float(found.smallest) == pytest.approx(-2.0 - noise / 2.0 - repelled, abs=0.2 * repelled)
    assert [float(each) for each in found.edges] == pytest.approx(
        [-2 * math.sqrt(noise), 2 * math.sqrt(noise)]
    )
    assert [float(each) for each in found.overlaps] == pytest.approx(
        [1 - noise / 9, 1 - noise / 4], abs=1e-5
    )
    assert found.spread == pytest.approx(
        math.sqrt(2 * variance / effective * (1 - noise / 9)), rel=0.1
    )


def test_an_eigenvalue_that_drowns_leaves_the_edge_of_the_noise():
    found = predict(pairs(0.5), 0.1, 10)
    scale = math.sqrt(ORDER * 0.1 / 10)
    law = TracyWidom()
    assert float(found.edges[1]) == pytest.approx(2 * scale, rel=1e-3)
    assert float(found.largest) == pytest.approx(
        2 * scale + law.mean * scale * ORDER ** (-2 / 3), rel=1e-3
    )
    assert float(found.smallest) == pytest.approx(-float(found.largest), rel=1e-2)
    assert found.spread == pytest.approx(law.std * scale * ORDER ** (-2 / 3), rel=1e-2)
    assert [float(each) for each in found.overlaps] == [0.0]
    assert found.regime.startswith("noise: λ₁ = 0.5 drowns")
    assert float(found.exponent) == pytest.approx(0.5, abs=1e-3)


def test_a_largest_eigenvalue_below_0_has_no_regime():
    found = predict(pairs(-1.0, -2.0), 1e-6, 50)
    assert found.regime.startswith("no curvature upwards: λ₁ = -1 of all data")


def test_the_regimes_change_where_the_noise_equals_the_signal():
    variance, population = 0.02, 1000
    found = predict(pairs(0.5), variance, 64, population)
    onset = (ORDER - 1) * variance / 0.25
    assert float(found.separates_at) == pytest.approx(onset / (1 + onset / population))
    assert float(found.signal_at) == pytest.approx(float(found.separates_at))
    below, above = (
        predict(pairs(0.5), variance, round(float(found.separates_at)) + d, population)
        for d in (-2, 2)
    )
    assert float(below.overlaps[0]) == 0.0 < float(above.overlaps[0])
    assert above.regime.startswith("between: λ₁ = 0.5 stands apart")
    assert predict(pairs(0.5), variance, 500, population).regime.startswith(
        "signal: noise adds 4.0% to λ₁ = 0.5"
    )


@pytest.mark.parametrize("batch", [20, 100, 400])
def test_under_additive_noise_the_exponent_never_exceeds_a_half(batch):
    scale2 = (ORDER - 1) * 0.02 / batch
    found = float(predict(pairs(0.5), 0.02, batch).exponent)
    share = scale2 / 0.5 / (0.5 + scale2 / 0.5)
    assert found == pytest.approx(0.5 if scale2 > 0.25 else share, rel=1e-2)
    assert found <= 0.5 + 1e-6


def test_under_multiplicative_noise_small_batches_scale_linearly():
    values = np.concatenate([[9.0], np.linspace(0.8, 1.2, ORDER - 1)])
    heavy = spectrum(operator(with_eigenvalues(values)), depth=20, seed=0)
    gaussian = (values.sum() ** 2 + (values**2).sum()) / ORDER**2
    assert float(predict(heavy, gaussian, 1, model="multiplicative").exponent) > 0.9
    assert float(predict(heavy, gaussian, 100_000, model="multiplicative").exponent) < 0.01


@pytest.mark.parametrize("model", ["additive", "multiplicative"])
def test_all_the_data_shows_the_spectrum_itself(measured, positive, model):
    shown = measured if model == "additive" else positive
    found = predict(shown, 0.3, 200, 200, model)
    low, high = shown.extremes
    assert float(found.largest) == pytest.approx(float(high), rel=1e-9)
    assert found.spread == pytest.approx(0.0, abs=1e-12)
    assert all(float(each) == pytest.approx(1.0) for each in found.overlaps)
    if model == "additive":
        assert float(found.smallest) == pytest.approx(float(low), rel=1e-9)


def test_multiplicative_noise_of_gaussian_samples_is_a_sample_covariance(positive):
    eigenvalues = np.sort(np.abs(NETWORK))
    gaussian = (eigenvalues.sum() ** 2 + (eigenvalues**2).sum()) / ORDER**2
    found = predict(positive, gaussian, 300, model="multiplicative")
    model = Multiplicative(eigenvalues[:-3], samples=300)
    repelled = 9 * 5 / 300 / 4.0 + 9 * 2 / 300 / 7.0
    assert float(found.largest) == pytest.approx(float(model.outlier(9.0)) + repelled, rel=5e-3)
    assert float(found.edges[1]) == pytest.approx(model.edge, rel=0.05)
    assert float(found.smallest) == 0.0
    double = predict(positive, 2 * gaussian, 600, model="multiplicative")
    assert float(double.largest) == pytest.approx(float(found.largest), rel=1e-12)


def test_errors_are_those_of_the_delta_method():
    value, variance, batch = 3.0, Estimate(0.01, 0.001, dof=7), 20
    found = predict(pairs(value, errors=0.02), variance, batch)
    noise = (ORDER - 1) * 0.01 / batch
    by_value, by_variance = (1 - noise / 9) * 0.02, noise / 3 * 0.1
    assert float(found.largest.stderr) == pytest.approx(math.hypot(by_value, by_variance), rel=1e-3)
    assert float(found.edges[1].stderr) == pytest.approx(math.sqrt(noise) * 0.1, rel=1e-2)
    overlap = math.hypot(2 * noise / 27 * 0.02, noise / 9 * 0.1)
    assert float(found.overlaps[0].stderr) == pytest.approx(overlap, rel=1e-3)
    assert found.largest.dof == 7
    assert math.isnan(float(predict(pairs(value), Estimate(0.01, math.nan), batch).largest.stderr))


def test_single_noisy_matrices_stray_as_far_as_is_said(measured):
    variance, batch, draws = 0.02, 20, 40
    found = predict(measured, variance, batch)
    rng = np.random.default_rng(0)
    readings = []
    for _ in range(draws):
        noise = rng.standard_normal((ORDER, ORDER)) * math.sqrt(variance / batch)
        matrix = np.diag(NETWORK) + (noise + noise.T) / math.sqrt(2)
        values = np.linalg.eigvalsh(matrix)
        readings.append([values[-1], values[-2], values[0]])
    readings = np.array(readings)
    assert float(found.overlaps[0]) > 0.9  # 9, 5 and −2 stand apart
    expected = [found.largest, found.outliers[1].batch, found.smallest]
    spreads = [found.spread, found.outliers[1].spread, found.smallest_spread]
    for values, value, spread in zip(readings.T, expected, spreads, strict=True):
        scores = (values - float(value)) / spread
        assert abs(scores.mean()) < 4 / math.sqrt(draws)
        assert 0.6 < scores.std() < 1.5


def test_it_saves_and_loads(tmp_path, measured):
    found = predict(measured, Estimate(0.02, 0.001), 20, 100)
    again = BatchPrediction.load(found.save(tmp_path / "prediction"))
    assert again == found


HESSIAN = pairs(1.0)
MISUSES = {
    "a matrix": (
        lambda: predict(torch.eye(3), 1.0, 5),
        TypeError,
        "spectrum must be a Spectrum or Eigenpairs",
    ),
    "a negative variance": (
        lambda: predict(HESSIAN, -1.0, 5),
        ValueError,
        "variance must be finite and at least 0",
    ),
    "a NaN variance": (
        lambda: predict(HESSIAN, math.nan, 5),
        ValueError,
        "variance must be finite and at least 0",
    ),
    "no variance": (
        lambda: predict(HESSIAN, None, 5),
        TypeError,
        "variance must be a number, an Estimate or a Direc",
    ),
    "a batch larger than the data": (
        lambda: predict(HESSIAN, 1.0, 6, 5),
        ValueError,
        "batch_size must be at most the",
    ),
    "an unknown model": (
        lambda: predict(HESSIAN, 1.0, 5, model="wigner"),
        ValueError,
        "model must be one of",
    ),
    "a number for a direction": (
        lambda: predict(HESSIAN, 1.0, 5, model="directional"),
        TypeError,
        r"variance must be directional_variance\(…\) for 'directional'",
    ),
    "a covariance of few": (
        lambda: predict(HESSIAN, 1.0, 5, model="multiplicative"),
        TypeError,
        "spectrum must be a Spectrum for multiplicative noise",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), MISUSES.values(), ids=MISUSES)
def test_misuse(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_lanczos_pairs_are_taken_as_they_come():
    found = eigenpairs(operator(with_eigenvalues(NETWORK)), 3, "both")
    seen = predict(found, 1e-3, 50)
    assert float(seen.largest) > 9.0
    assert float(seen.smallest) < -2.0
    assert len(seen.outliers) == 6
