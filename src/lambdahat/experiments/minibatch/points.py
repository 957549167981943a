"""What the mini-batch experiment measures at one point of training: full-data curvature,
batches, predictions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from lambdahat._core.storage import Result
from lambdahat.randommatrix.batch_curvature import BatchEigenvalues
from lambdahat.randommatrix.bulk import BulkFit, continuous_region, fit_bulk
from lambdahat.randommatrix.directions import DirectionalVariance
from lambdahat.randommatrix.predictions import BatchPrediction, predict
from lambdahat.randommatrix.spikes import effective_batch
from lambdahat.results import Array, Eigenpairs, Estimate, Spectrum

MODELS = ("additive", "multiplicative", "directional")
ENDS = ("largest", "smallest")
CLAIMED_SIZE = 128  # the batch of Figures 5.2, 5.4 and 5.6
ROUNDING = 1e-3


@dataclass(frozen=True)
class BatchCell(Result):
    """The batches of one size: what their own curvature shows, and what each model predicts of
    it.
    """

    measured: BatchEigenvalues
    predictions: Mapping[str, BatchPrediction] = field(default_factory=dict)

    @property
    def batch_size(self) -> int:
        """B."""
        return self.measured.batch_size

    @property
    def effective(self) -> float:
        """b = B/(1 − B/N)."""
        return effective_batch(self.batch_size, self.measured.population)

    def values(self, what: str) -> Array:
        """The "largest" or "smallest" eigenvalue or the "overlaps" |φ̂₁ᵀφ₁|² of every batch,
        (n,).
        """
        found: Array = getattr(self.measured, what)[:, 0]
        return found

    def mean(self, what: str) -> Estimate:
        """Its mean over the batches, with the standard error."""
        return self.measured.mean(what)

    def deviation(self, what: str) -> float:
        """Its standard deviation between batches."""
        return self.measured.spread(what)

    def predicted(self, model: str, what: str) -> Estimate:
        """What a model predicts; the error is that of its measured ingredients."""
        told = self.predictions[model]
        return {"largest": told.largest, "smallest": told.smallest, "overlaps": told.overlaps[0]}[
            what
        ]

    def spread(self, model: str, end: str) -> float:
        """The standard deviation of one batch about the prediction: between batches, and of the
        prediction itself.
        """
        told = self.predictions[model]
        error = float(self.predicted(model, end).stderr)
        return math.hypot(told.spread if end == "largest" else told.smallest_spread, _known(error))


@dataclass(frozen=True)
class CurvaturePoint(Result):
    """One network after one epoch, through one operator: "hessian" or "ggn".

    ``pairs`` are the full data's largest eigenvalues, descending, with the Hessian's smallest after
    them; their vectors are dropped. ``variance`` is σ² per element, ``along`` the noise along the
    eigenvectors. ``spectrum`` is the full data's, ``batch_spectra`` those of some batches of
    ``batch_size`` samples.
    """

    network: str
    epoch: int
    operator: str
    samples: int
    loss: float
    variance: Estimate
    along: DirectionalVariance
    pairs: Eigenpairs
    cells: tuple[BatchCell, ...]
    batch_size: int
    spectrum: Spectrum
    batch_spectra: tuple[Spectrum, ...]

    @property
    def parameters(self) -> int:
        """P."""
        return self.spectrum.dim

    @property
    def largest(self) -> float:
        """λ₁ of the full data."""
        return float(self.pairs.values[0])

    @property
    def smallest(self) -> float:
        """λ_P of the full data; the GGN has more parameters than rank."""
        return float(self.pairs.values[-1]) if self.operator == "hessian" else 0.0

    @property
    def anisotropy(self) -> float:
        """τ²/(Pσ²), the noise along φ₁ over what it would be were noise alike in all directions."""
        along = float(torch.as_tensor(self.along.tau2.value)[0])
        return along / (self.parameters * float(self.variance))

    @property
    def indefinite(self) -> bool:
        """Whether the full data has eigenvalues below 0 by more than rounding."""
        return self.smallest < -ROUNDING * self.largest

    @cached_property
    def bulk(self) -> BulkFit:
        """The bulk of the full data's spectrum, and its outliers."""
        return fit_bulk(self.spectrum)

    @property
    def width(self) -> float:
        """How wide the continuous region of the full data's spectrum is."""
        low, high = continuous_region(self.spectrum)
        return high - low

    @property
    def models(self) -> tuple[str, ...]:
        """The models with predictions."""
        return tuple(self.cells[0].predictions)

    def predicted(self) -> CurvaturePoint:
        """The same with the predictions of every model, and without the samples' own figures, by
        far the most of it.
        """
        sources: dict[str, tuple[Spectrum | Eigenpairs, Estimate | DirectionalVariance]] = {
            "additive": (self.pairs, self.variance),
            "multiplicative": (self.spectrum, self.variance),
            "directional": (self.pairs, self.along),
        }
        cells = []
        for cell in self.cells:
            told = {
                model: _leading(predict(shown, noise, cell.batch_size, self.samples, model))
                for model, (shown, noise) in sources.items()
            }
            cells.append(BatchCell(cell.measured, told))
        return replace(
            self,
            cells=tuple(cells),
            along=replace(self.along, elements=self.along.elements[:0].clone()),
        )


def _leading(told: BatchPrediction) -> BatchPrediction:
    """A prediction with the first of its outliers only, which is all that is compared here."""
    return replace(told, outliers=told.outliers[:1])


def _known(error: float) -> float:
    return error if math.isfinite(error) else 0.0
