"""Spiked models against closed forms, against free convolution, and against actual random
matrices.
"""

import math

import numpy as np
import pytest

from lambdahat.randommatrix import (
    Additive,
    Multiplicative,
    Semicircle,
    TracyWidom,
    effective_batch,
    free_sum,
    noise_scale,
)

SIGMA = 4.0  # standard errors allowed: 1 in 16,000


def test_the_effective_batch_counts_draws_without_replacement():
    assert effective_batch(100) == 100.0
    assert effective_batch(100, 400) == pytest.approx(100 / 0.75)
    assert effective_batch(400, 400) == math.inf


def test_the_noise_of_a_batch_has_the_variance_that_sampling_without_replacement_gives():
    rng, population, size = np.random.default_rng(0), 12, 5
    values = rng.standard_normal(population)
    means = [values[rng.permutation(population)[:size]].mean() for _ in range(20_000)]
    # Eq. 5.5 is for a variance that divides by N − 1
    unbiased = values.var() * population / (population - 1)
    assert np.var(means) == pytest.approx(unbiased / effective_batch(size, population), rel=0.04)


def test_additive_noise_with_the_bulk_at_zero_is_theorems_14_and_17():
    scale = noise_scale(0.5, 200, 50.0)
    assert scale == pytest.approx(math.sqrt(2.0))
    model = Additive(scale)
    assert model.thresholds == pytest.approx((-scale, scale))
    assert model.edges == pytest.approx((-2 * scale, 2 * scale))
    values = np.array([3.0, -3.0, 1.0, -1.0])
    assert model.outlier(values) == pytest.approx([3 + 2 / 3, -3 - 2 / 3, 2 * scale, -2 * scale])
    assert model.overlap(values) == pytest.approx([1 - 2 / 9, 1 - 2 / 9, 0.0, 0.0])


@pytest.mark.parametrize("ratio", [0.3, 1.0, 4.0])
def test_multiplicative_noise_on_a_flat_bulk_is_the_spiked_covariance(ratio):
    variance, order = 1.7, 300
    model = Multiplicative([variance], [order], order / ratio)
    theta = np.array([0.5, 1.5, 1.9, 2.1, 10.0]) * math.sqrt(ratio)
    apart = theta > math.sqrt(ratio)
    expected = np.where(
        apart, variance * (1 + theta) * (1 + ratio / theta), variance * (1 + math.sqrt(ratio)) ** 2
    )
    overlap = np.where(apart, (1 - ratio / theta**2) / (1 + ratio / theta), 0.0)
    spikes = variance * (1 + theta)
    assert model.outlier(spikes) == pytest.approx(expected)
    assert model.overlap(spikes) == pytest.approx(overlap)
    assert model.edges == pytest.approx(
        [variance * (1 - s * math.sqrt(ratio)) ** 2 for s in (1, -1)], abs=1e-12
    )
    assert model.threshold == pytest.approx(variance * (1 + math.sqrt(ratio)))


def test_the_edge_of_a_flat_covariance_fluctuates_as_johnstone_has_it():
    order, samples = 400, 1000
    model = Multiplicative([1.0], [order], samples)
    root = math.sqrt(samples) + math.sqrt(order)
    johnstone = root * (1 / math.sqrt(samples) + 1 / math.sqrt(order)) ** (1 / 3) / samples
    assert model.edge_scales[1] == pytest.approx(johnstone)
    assert Additive(2.0, dimension=1000).edge_scales == pytest.approx((0.02, 0.02))


BULK = np.concatenate([np.zeros(30), np.linspace(-1.0, 2.0, 50), [2.5, 2.6]])
MODELS = {
    "additive": Additive(0.8),
    "additive, any bulk": Additive(0.8, BULK),
    "multiplicative, few samples": Multiplicative(BULK.clip(0.0), samples=30.0),
    "multiplicative, many samples": Multiplicative(BULK[BULK > 0.1], samples=500.0),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_inverse_undoes_the_noise_and_says_so_where_it_cannot(model):
    lower, upper = model.thresholds
    values = [upper + 0.01, upper + 1.0, 50.0] + (
        [lower / 2 if lower > 0 else lower - 1.0] if lower != 0 else []
    )
    values = [value for value in values if model.stands_apart(value)]
    if isinstance(model, Multiplicative):
        values = [value for value in values if value > 0]
    assert model.inverse(model.outlier(values)) == pytest.approx(np.array(values))
    assert math.isnan(model.inverse((model.edges[0] + model.edges[1]) / 2))


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_threshold_is_where_the_overlap_vanishes_and_the_outlier_meets_the_edge(model):
    above = model.threshold * (1 + 1e-9)
    assert float(model.overlap(above)) == pytest.approx(0.0, abs=1e-6)
    assert float(model.outlier(above)) == pytest.approx(model.edge)
    assert float(model.overlap(1e6)) == pytest.approx(1.0, abs=1e-4)
    assert float(model.closeness(model.threshold)) == pytest.approx(1.0)


def test_additive_noise_agrees_with_free_convolution():
    spikes = [4.0, -3.0]
    found = free_sum(BULK, Semicircle(0.8), spikes=spikes)
    model = MODELS["additive, any bulk"]
    assert model.edges == pytest.approx((found.edges[0][0], found.edges[-1][1]))
    assert sorted(model.outlier(spikes)) == pytest.approx(
        sorted(each.value for each in found.outliers)
    )
    assert sorted(model.overlap(spikes)) == pytest.approx(
        sorted(each.overlap for each in found.outliers)
    )
    deep = Additive(0.8, BULK, dimension=1000.0).edge_scales[1]
    assert deep == pytest.approx((1000 * found.edge_slope) ** (-2 / 3), rel=1e-6)


def test_without_noise_nothing_moves():
    for model in (Additive(0.0, BULK), Multiplicative(BULK.clip(0.0))):
        assert float(model.outlier(3.0)) == 3.0
        assert float(model.overlap(3.0)) == 1.0
        assert model.edge == BULK.max()
        assert model.edge_scales == (0.0, 0.0)


def deviation(readings, expected):
    """How far the mean is from what is expected, in its standard errors."""
    readings = np.asarray(readings)
    return abs(readings.mean() - expected) / (readings.std(ddof=1) / math.sqrt(len(readings)))


def wigner(order, rng):
    """A draw of the Gaussian orthogonal ensemble with spectrum in [−2, 2]."""
    draw = rng.standard_normal((order, order))
    return (draw + draw.T) / math.sqrt(2 * order)


def test_spiked_noise_shows_what_theorems_14_and_17_say():
    order, draws, spikes = 1000, 10, np.array([3.0, 1.5, -2.0])
    rng = np.random.default_rng(0)
    model = Additive(1.0, dimension=order)
    values, overlaps, edges = [], [], []
    for _ in range(draws):
        matrix = wigner(order, rng)
        matrix[np.arange(4), np.arange(4)] += [*spikes, 0.5]
        found, vectors = np.linalg.eigh(matrix)
        values.append(found[[-1, -2, 0]])
        overlaps.append(vectors[[0, 1, 2], [-1, -2, 0]] ** 2)
        edges.append(found[-3])  # the spike 0.5 drowns: the third largest is the edge of the noise
    values, overlaps = np.array(values), np.array(overlaps)
    for i, spike in enumerate(spikes):
        assert deviation(values[:, i], float(model.outlier(spike))) < SIGMA
        assert deviation(overlaps[:, i], float(model.overlap(spike))) < SIGMA
        assert values[:, i].std(ddof=1) / float(model.spread(spike)) == pytest.approx(1.0, abs=0.7)
    law = TracyWidom()
    assert deviation(edges, model.edge + law.mean * model.edge_scales[1]) < SIGMA
    assert 0.4 < np.std(edges, ddof=1) / (law.std * model.edge_scales[1]) < 1.8


def test_sample_covariances_of_any_population_show_what_the_model_says():
    order, samples, draws = 500, 400, 16
    bulk = np.concatenate([np.zeros(200), np.linspace(0.2, 1.0, 200), np.full(98, 1.5)])
    spikes = np.array([20.0, 6.0])
    model = Multiplicative(bulk, samples=samples)
    assert model.stands_apart(spikes).all()
    roots = np.sqrt(np.concatenate([spikes, bulk]))
    rng = np.random.default_rng(1)
    values, overlaps = [], []
    for _ in range(draws):
        draw = rng.standard_normal((samples, order)) * roots
        gram, left = np.linalg.eigh(draw @ draw.T / samples)
        values.append(gram[[-1, -2]])
        vectors = draw.T @ left[:, [-1, -2]]
        overlaps.append((vectors[[0, 1], [0, 1]] ** 2) / (vectors**2).sum(axis=0))
    values, overlaps = np.array(values), np.array(overlaps)
    repelled = model.coupling(*spikes) / 14.0 * np.array([1.0, -1.0])  # the two spikes move apart
    for i, spike in enumerate(spikes):
        assert deviation(values[:, i], float(model.outlier(spike)) + repelled[i]) < SIGMA
        assert deviation(overlaps[:, i], float(model.overlap(spike))) < SIGMA
        assert 0.5 < values[:, i].std(ddof=1) / float(model.spread(spike)) < 1.6


def test_the_edge_of_a_sample_covariance_fluctuates_by_tracy_and_widom():
    samples, draws = 400, 24
    bulk = np.concatenate([np.linspace(0.2, 1.0, 200), np.full(100, 1.5)])
    model, law = Multiplicative(bulk, samples=samples), TracyWidom()
    rng = np.random.default_rng(3)
    edges = []
    for _ in range(draws):
        draw = rng.standard_normal((samples, len(bulk))) * np.sqrt(bulk)
        edges.append(np.linalg.eigvalsh(draw.T @ draw / samples)[-1])
    scale = model.edge_scales[1]
    error = np.std(edges, ddof=1) / math.sqrt(draws)
    # corrections to the centre are of order b^(−1/3) of the scale
    assert abs(
        np.mean(edges) - (model.edge + law.mean * scale)
    ) < SIGMA * error + 0.5 * scale * samples ** (-1 / 3)
    assert 0.5 < np.std(edges, ddof=1) / (law.std * scale) < 1.6


MISUSES = {
    "a batch larger than the data": (
        lambda: effective_batch(10, 5),
        ValueError,
        "batch_size must be at most the popu",
    ),
    "no batch": (
        lambda: effective_batch(0),
        ValueError,
        "batch_size must be an integer of at least 1, got 0",
    ),
    "a share of a batch": (
        lambda: effective_batch(0.5, 5),
        TypeError,
        "batch_size must be an integer",
    ),
    "negative noise": (
        lambda: Additive(-1.0),
        ValueError,
        "scale must be a finite number of at least 0, got -1.0",
    ),
    "infinite noise": (
        lambda: Additive(math.inf),
        ValueError,
        "scale must be a finite number of at least 0",
    ),
    "negative variance": (
        lambda: noise_scale(-1.0, 5, 2.0),
        ValueError,
        "variance must be a number of at least 0",
    ),
    "a batch of 0": (
        lambda: noise_scale(0.1, 10, 0),
        ValueError,
        "batch must be a number above 0, got 0",
    ),
    "a batch below 0": (
        lambda: noise_scale(0.1, 10, -1),
        ValueError,
        "batch must be a number above 0, got -1",
    ),
    "a batch as text": (
        lambda: noise_scale(0.1, 10, "a"),
        TypeError,
        "batch must be a number above 0, got 'a'",
    ),
    "no samples": (
        lambda: Multiplicative([1.0], samples=0),
        ValueError,
        "samples must be a number above 0, got 0",
    ),
    "a negative covariance": (
        lambda: Multiplicative([-1.0]),
        ValueError,
        "eigenvalues must be at least 0.*Additive",
    ),
    "weights of others": (
        lambda: Additive(1.0, [0.0, 1.0], [1.0]),
        ValueError,
        "weights must be as many as the eig",
    ),
    "no weight": (
        lambda: Additive(1.0, [0.0], [0.0]),
        ValueError,
        "weights must be at least 0, not all 0",
    ),
    "NaN in the bulk": (
        lambda: Additive(1.0, [math.nan]),
        ValueError,
        "eigenvalues must be finite",
    ),
    "no bulk": (lambda: Multiplicative([]), ValueError, "eigenvalues must be finite, one or more"),
    "a negative eigenvalue seen": (
        lambda: Multiplicative([2.0], [100], samples=500).inverse([9.0, -1.0]),
        ValueError,
        "observed must be at least 0.*got -1; use Additive",
    ),
    "an infinite eigenvalue seen": (
        lambda: Additive(1.0).inverse(math.inf),
        ValueError,
        "observed must be finite",
    ),
    "a NaN spike": (
        lambda: Additive(1.0).outlier(math.nan),
        ValueError,
        "eigenvalue must be finite",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), MISUSES.values(), ids=MISUSES)
def test_misuse(call, error, message):
    with pytest.raises(error, match=message):
        call()
