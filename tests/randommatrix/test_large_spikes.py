"""Where spikes are seen and how much of their vectors is left, against random matrices of order
4,000.

Means over independent draws are judged in their own standard errors; biases of finite size are of
order 1/P.
"""

import math

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import LinearOperator, eigsh

from lambdahat.randommatrix import Additive, MarchenkoPastur, Multiplicative, Semicircle, free_sum

pytestmark = pytest.mark.slow
ORDER, DRAWS = 4000, 10
SIGMA = 4.0  # standard errors allowed


def extremes(matrix, above, below=0):
    """The largest eigenvalues in descending order, then the smallest; and the squared elements
    of their vectors.
    """
    found, vectors = eigsh(matrix, above, which="LA")
    order = np.argsort(found)[::-1]
    found, vectors = found[order], vectors[:, order]
    if below:
        low, others = eigsh(matrix, below, which="SA")
        found, vectors = np.concatenate([found, low]), np.concatenate([vectors, others], axis=1)
    return found, vectors**2


def assert_means(readings, expected):
    """Of every column of the draws (draws, k)."""
    readings = np.array(readings)
    errors = readings.std(axis=0, ddof=1) / math.sqrt(len(readings))
    assert np.all(np.abs(readings.mean(axis=0) - expected) < SIGMA * errors)
    # a mean that agrees only because its error is large says nothing
    assert np.all(errors < 0.02 * np.abs(expected))


def test_additive_noise_moves_and_turns_spikes_as_theorems_14_and_17_say():
    spikes = np.array([3.0, 1.5, -2.0])
    rng, model = np.random.default_rng(2), Additive(1.0, dimension=ORDER)
    values, overlaps = [], []
    for _ in range(DRAWS):
        draw = rng.standard_normal((ORDER, ORDER))
        matrix = (draw + draw.T) / math.sqrt(2 * ORDER)
        matrix[np.arange(3), np.arange(3)] += spikes
        found, shares = extremes(matrix, 2, 1)
        values.append(found)
        overlaps.append(shares[np.arange(3), np.arange(3)])
    assert_means(values, model.outlier(spikes))
    assert_means(overlaps, model.overlap(spikes))


BULKS = {
    "flat": np.ones(ORDER - 2),
    "stretched, half of it 0": np.linspace(-1.5, 1.5, ORDER - 2).clip(0.0),
}


@pytest.mark.parametrize("samples", [2000, 6000])
@pytest.mark.parametrize("bulk", BULKS.values(), ids=BULKS)
def test_multiplicative_noise_moves_and_turns_spikes_as_the_spiked_covariance_says(bulk, samples):
    spikes = np.array([9.0, 4.5])
    model = Multiplicative(bulk, samples=samples)
    assert model.stands_apart(spikes).all()
    rng, roots = (
        np.random.default_rng(samples),
        np.sqrt(np.concatenate([spikes, bulk])).astype(np.float32),
    )
    values, overlaps = [], []
    for _ in range(DRAWS):
        draw = rng.standard_normal((samples, ORDER), dtype=np.float32) * roots
        covariance = LinearOperator(
            (ORDER, ORDER),
            lambda x, draw=draw: draw.T @ (draw @ x.ravel()) / samples,
            dtype=np.float32,
        )
        found, shares = extremes(covariance, 2)
        values.append(found)
        overlaps.append(shares[np.arange(2), np.arange(2)])
    assert_means(values, model.outlier(spikes))
    assert_means(overlaps, model.overlap(spikes))


@pytest.mark.parametrize("law", [Semicircle(1.0), MarchenkoPastur(1.0, 2.0)], ids=repr)
def test_a_free_sum_moves_and_turns_a_spike_of_any_bulk(law):
    spike, bulk = 6.0, np.repeat([-2.0, 0.0, 3.0], [1000, 2000, 1000])
    (expected,) = free_sum(bulk, law, spikes=[spike]).outliers
    known = torch.as_tensor(np.append(bulk[:-1], spike))
    readings = []
    for seed in range(DRAWS):
        matrix = law.sample(ORDER, seed)
        matrix.diagonal().add_(known)
        found, shares = extremes(matrix.numpy(), 1)
        readings.append([found[0], shares[-1, 0]])
    assert_means(readings, [expected.value, expected.overlap])
