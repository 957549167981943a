"""Levels that noise mixes, against matrices diagonalised by hand and second-order perturbation
theory.
"""

import numpy as np
import pytest

from lambdahat.randommatrix.predictions import independent_noise, mix, sampled_noise


def test_two_levels_mix_as_the_matrix_of_both_says():
    gap, off = 0.5, 0.2
    noise = np.array([[[0.0, off], [off, 0.0]]])
    found = mix(np.array([0.0, gap]), noise)  # the second level is the upper one
    width = np.hypot(gap, 2 * off)
    assert found.positions == pytest.approx([(gap - width) / 2, (gap + width) / 2])
    assert found.overlaps == pytest.approx(np.full(2, (1 + gap / width) / 2))


def test_levels_far_apart_move_as_second_order_theory_says():
    levels, variance = np.array([5.0, 3.0, -1.0]), 1e-3
    found = mix(levels, independent_noise(np.full((3, 3), variance)))
    gaps = levels[:, None] - levels + np.diag(np.full(3, np.inf))
    shifts = found.positions - levels
    assert (np.abs(shifts - (variance / gaps).sum(axis=1)) < 4 * found.errors).all()
    assert found.overlaps == pytest.approx(1 - (variance / gaps**2).sum(axis=1), abs=1e-4)
    assert found.spreads == pytest.approx(np.full(3, np.sqrt(2 * variance)), rel=0.15)


def test_levels_closer_than_the_noise_change_places():
    found = mix(np.array([1.0, 0.99]), independent_noise(np.diag([1.0, 1.0])))
    assert found.overlaps == pytest.approx([0.5, 0.5], abs=0.08)
    # the mean of the larger of two normal numbers of variance 2 is √(2/π)
    assert found.positions == pytest.approx(
        [1 + np.sqrt(2 / np.pi), 1 - np.sqrt(2 / np.pi)], abs=0.15
    )


@pytest.mark.parametrize("size", [1, 20, 500])
def test_batches_of_samples_have_their_variance(size):
    elements = np.random.default_rng(0).exponential(size=(300, 3)) - 1.0
    elements -= elements.mean(axis=0)
    noise = sampled_noise(elements, 2, size)
    assert noise[:, 0, 1] == pytest.approx(noise[:, 1, 0])
    for (row, column), values in zip([(0, 0), (0, 1), (1, 1)], elements.T, strict=True):
        assert noise[:, row, column].mean() == pytest.approx(0.0, abs=1e-12)
        assert noise[:, row, column].var() == pytest.approx(values.var(), rel=0.35)


def test_single_samples_keep_their_skew():
    elements = np.random.default_rng(0).exponential(size=(300, 1))
    few, many = (sampled_noise(elements - elements.mean(), 1, size).ravel() for size in (1, 200))
    assert (few**3).mean() / few.std() ** 3 > 1.0 > abs((many**3).mean()) / many.std() ** 3
