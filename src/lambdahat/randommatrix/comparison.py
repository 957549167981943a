"""Predicted against measured extreme eigenvalues of batches."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lambdahat._core.check import require, require_choice, require_positive
from lambdahat._core.storage import Result
from lambdahat.randommatrix.batch_curvature import BatchEigenvalues
from lambdahat.randommatrix.predictions import BatchPrediction
from lambdahat.results import Array, Estimate


@dataclass(frozen=True)
class BatchComparison(Result):
    """Predictions of one or more models, and what batches of the same sizes were measured to
    show.
    """

    predictions: tuple[BatchPrediction, ...]
    measured: tuple[BatchEigenvalues, ...]

    def __post_init__(self) -> None:
        known = {each.batch_size for each in self.measured}
        for model in self.models:
            missing = sorted(
                {each.batch_size for each in self.predictions if each.model == model} ^ known
            )
            expected = f"be of the batch sizes that were measured, for {model!r}"
            require(not missing, "predictions", expected, f"others: {missing}")

    @property
    def models(self) -> tuple[str, ...]:
        """The names of the models, in the order of the predictions."""
        return tuple(dict.fromkeys(each.model for each in self.predictions))

    def of(self, model: str) -> tuple[BatchPrediction, ...]:
        """One model's predictions, by rising batch size."""
        require_choice(model, "model", self.models)
        return tuple(
            sorted((p for p in self.predictions if p.model == model), key=lambda p: p.batch_size)
        )

    def scores(self, model: str, which: str = "largest") -> Array:
        """(λ − predicted)/√(spread² + stderr²) of every measured batch; ``which`` is "largest" or
        "smallest".

        A batch of all data, of which an exact prediction has neither, is left out.
        """
        require_choice(which, "which", ("largest", "smallest"))
        by_size = {each.batch_size: each for each in self.of(model)}
        found = []
        for measured in self.measured:
            prediction = by_size[measured.batch_size]
            expected = prediction.largest if which == "largest" else prediction.smallest
            spread = prediction.spread if which == "largest" else prediction.smallest_spread
            values = measured.largest[:, 0] if which == "largest" else measured.smallest[:, 0]
            width = math.hypot(spread, float(expected.stderr))
            if width > 0:
                found.append((values - float(expected)) / width)
        require(
            bool(found),
            "measured",
            "hold batches smaller than the data",
            "none",
            "all data has no noise to score",
        )
        return np.concatenate(found)

    def within(self, model: str, deviations: float = 1.0, which: str = "largest") -> Estimate:
        """The share of batches within so many predicted standard deviations: 0.68 and 0.95 for 1
        and 2, if right.
        """
        inside = np.abs(self.scores(model, which)) <= require_positive(deviations, "deviations")
        share = float(inside.mean())
        return Estimate(
            share, math.sqrt(max(share * (1 - share), 1 / (4 * inside.size)) / inside.size)
        )
