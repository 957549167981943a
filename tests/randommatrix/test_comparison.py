"""Scores of measured batches under predictions, against their definition."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from lambdahat.randommatrix import BatchComparison, BatchEigenvalues, predict
from lambdahat.results import Eigenpairs, Estimate

VALUES = torch.tensor([3.0], dtype=torch.float64)
PAIRS = Eigenpairs(
    VALUES, torch.eye(100, 1, dtype=torch.float64), torch.zeros(1), torch.tensor([True])
)
VARIANCE = Estimate(1e-3, 1e-4)


def measured(size, scores, population=1000):
    """Batches whose largest eigenvalues are so many widths √(spread² + stderr²) from the mean.

    By Theorem 14 the mean is 3 + s²/3, s² = 99σ²/B, with the spread √(2σ²/B·(1 − s²/9)) and σ²'s
    error in s²/3.
    """
    noise = 99 * float(VARIANCE) / size
    spread = math.sqrt(2 * float(VARIANCE) / size * (1 - noise / 9))
    width = math.hypot(spread, noise / 3 * float(VARIANCE.stderr) / float(VARIANCE))
    largest = 3 + noise / 3 + width * np.array(scores)[:, None]
    return BatchEigenvalues(size, population, 100, "hessian", largest, -largest)


def compared(*sizes):
    return tuple(predict(PAIRS, VARIANCE, size) for size in sizes)


def test_scores_count_both_the_spread_and_the_error():
    found = BatchComparison(compared(10, 20), (measured(20, [0.5, -3.0]), measured(10, [1.5, 0.9])))
    assert found.scores("additive") == pytest.approx([0.5, -3.0, 1.5, 0.9], abs=0.04)
    assert float(found.within("additive")) == 0.5
    assert float(found.within("additive", 2.0)) == 0.75
    assert float(found.within("additive").stderr) == pytest.approx(0.25)
    assert [each.batch_size for each in found.of("additive")] == [10, 20]


def test_right_predictions_hold_two_thirds_of_the_batches():
    scores = np.random.default_rng(0).standard_normal(4000)
    found = BatchComparison(compared(10), (measured(10, scores),))
    share = found.within("additive")
    assert abs(float(share) - 0.6827) < 4 * float(share.stderr)


def test_all_data_is_not_scored():
    whole = tuple(predict(PAIRS, Estimate(1e-3), size, 20) for size in (10, 20))
    found = BatchComparison(whole, (measured(10, [1.0, 2.0], 20), measured(20, [0.0], 20)))
    assert found.scores("additive").shape == (2,)
    with pytest.raises(ValueError, match="measured must hold batches smaller than the data"):
        BatchComparison(whole[1:], (measured(20, [0.0], 20),)).scores("additive")


def test_it_saves_and_loads(tmp_path):
    found = BatchComparison(compared(10), (measured(10, [0.0]),))
    again = BatchComparison.load(found.save(tmp_path / "comparison"))
    assert again.models == ("additive",)
    assert (again.scores("additive") == found.scores("additive")).all()


ONE = BatchComparison(compared(10), (measured(10, [0.0]),))
MISUSES = {
    "sizes that were not measured": (
        lambda: BatchComparison(compared(10), (measured(20, [0.0]),)),
        ValueError,
        r"predictions must be of the batch sizes that were measured.*\[10, 20\]",
    ),
    "a model without a size": (
        lambda: BatchComparison(
            (*compared(10, 20), replace(compared(10)[0], model="directional")),
            (measured(10, [0.0]), measured(20, [0.0])),
        ),
        ValueError,
        r"measured, for 'directional', got others: \[20\]",
    ),
    "an unknown model": (
        lambda: ONE.scores("directional"),
        ValueError,
        "model must be one of 'additive'",
    ),
    "no deviations": (
        lambda: ONE.within("additive", 0),
        ValueError,
        "deviations must be a finite number above 0",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), MISUSES.values(), ids=MISUSES)
def test_misuse(call, error, message):
    with pytest.raises(error, match=message):
        call()
