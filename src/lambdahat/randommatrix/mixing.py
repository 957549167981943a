"""What noise does to a few eigenvalues that stand near one another, by diagonalising draws of it.

Second-order perturbation theory fails where the curvature along one eigenvector varies from batch
to batch by more than its distance to the next: then they change places. Noise between k known
eigenvectors is a k × k matrix, so that its effect is had by drawing it: Gaussian, or batches of the
samples' own matrices where these were measured.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from lambdahat._core.rng import generator
from lambdahat.results import Array

# Gaussian draws, each of which is used with both signs: what is odd in the noise then cancels
PAIRS = 256
DRAWS = 512


class Mixed(NamedTuple):
    """Of each level (k,): mean place and its error from the draws, mean |φ̂_mᵀφ_m|², and
    deviation between batches.
    """

    positions: Array
    errors: Array
    overlaps: Array
    spreads: Array


def mix(levels: Array, noise: Array) -> Mixed:
    """The eigenvalues of diag(levels) + noise, (draws, k, k), by rank: the m-th largest of both
    belong together.
    """
    if not len(levels):
        return Mixed(levels, levels, levels, levels)
    ranks = np.argsort(-levels, kind="stable")
    values, vectors = np.linalg.eigh(np.diag(levels) + noise)
    values, vectors = values[:, ::-1], vectors[:, :, ::-1]
    positions, errors, overlaps, spreads = (np.empty_like(levels) for _ in range(4))
    positions[ranks] = values.mean(axis=0)
    # the mean of what is linear in the noise is 0 exactly
    curved = values - levels[ranks] - noise[:, ranks, ranks]
    errors[ranks] = curved.std(axis=0) / math.sqrt(len(noise))
    overlaps[ranks] = (vectors[:, ranks, np.arange(len(levels))] ** 2).mean(axis=0)
    spreads[ranks] = values.std(axis=0)
    return Mixed(positions, errors, overlaps, spreads)


def independent_noise(variances: Array) -> Array:
    """Draws (2·PAIRS, k, k) with independent elements of ``variances`` (k, k), twice that on the
    diagonal.
    """
    order = len(variances)
    drawn = np.triu(_normal(order * order).reshape(PAIRS, order, order))
    off, scale = np.triu(drawn, 1), np.sqrt(variances)
    return _both_signs((off + off.transpose(0, 2, 1) + math.sqrt(2.0) * (drawn - off)) * scale)


def sampled_noise(elements: Array, order: int, batch_size: int) -> Array:
    """√B times the mean deviation of batches of B samples, (DRAWS, k, k), from ``elements``, the
    samples' own (n, q).

    Those are the upper triangles, row by row, q = k(k+1)/2, of each sample's deviation from the
    mean. Batches are drawn with replacement, and Gaussian beyond B = n; the factor that replacement
    costs is the caller's, who scales by 1/√b.
    """
    count = len(elements)
    rng = generator(0, "mixing batches", batch_size)
    if batch_size > count:
        weights = torch.randn(DRAWS, count, dtype=torch.float64, generator=rng) / math.sqrt(count)
    else:
        chosen = torch.randint(count, (DRAWS, batch_size), generator=rng)
        weights = torch.zeros(DRAWS, count, dtype=torch.float64)
        weights.scatter_add_(
            1, chosen, torch.full(chosen.shape, 1.0 / math.sqrt(batch_size), dtype=torch.float64)
        )
    drawn = weights.numpy() @ elements
    drawn = drawn - drawn.mean(axis=0)  # the mean over all batches is known: 0
    rows, columns = np.triu_indices(order)
    noise = np.zeros((DRAWS, order, order))
    noise[:, rows, columns] = drawn
    noise[:, columns, rows] = drawn
    return noise


@cache
def _normal(count: int) -> Array:
    drawn = torch.randn(PAIRS, count, dtype=torch.float64, generator=generator(0, "mixing", count))
    return drawn.numpy()


def _both_signs(noise: Array) -> Array:
    return np.concatenate([noise, -noise])
