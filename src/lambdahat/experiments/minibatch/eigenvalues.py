"""Extreme eigenvalues of mini-batch curvature, predicted and measured: chapter 5 of the spectral thesis, Theorem 17."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lambdahat._check import require_choice, require_count
from lambdahat._progress import report
from lambdahat.data.splits import Split
from lambdahat.experiments.claims import judge
from lambdahat.experiments.experiment import Row, Rows
from lambdahat.experiments.minibatch.eigen_claims import claims
from lambdahat.experiments.minibatch.eigen_measuring import measure_point
from lambdahat.experiments.minibatch.eigen_rows import rows_of
from lambdahat.experiments.minibatch.eigen_subjects import SCALES, Subject, load_split, training_stops
from lambdahat.experiments.minibatch.eigen_tables import tables as eigen_tables
from lambdahat.experiments.minibatch.points import CurvaturePoint
from lambdahat.experiments.reproduction import Reproduction, Table, Verdict

ASSUMPTIONS = (
    "CIFAR-10 in place of CIFAR-100, which cannot be had here; SGD with momentum 0.9 and no weight decay.",
    "Batches are drawn without replacement from the full data, ten of each size unless the scale says fewer.",
    "σ² is Algorithm 8 with its 1/N put in and ‖H̄v‖² in place of (vᵀH̄v)².",
    "Theorem 16 is read as the spiked covariance with the measured spectrum as population, in consistent units.",
    "“Within one standard deviation” is of the batches' own spread, as the error bars of Figure 5.6 are.",
    "A batch's eigenvalues come from a fixed number of Lanczos steps, which see a bulk's edge a little inside.",
    "“Within one standard deviation” is judged over all epochs and batch sizes: it holds if most of them are within.",
    "That λ'₁ exceeds λ₁, equals a model's and falls as 1/b is judged at the last epoch, the first at B = 128.",
    "The directional model is ours: τ² = mean_i‖(H_i − H̄)φ‖² along each eigenvector in place of Pσ².",
)


@dataclass(frozen=True)
class BatchEigenvaluesResult(Reproduction):
    """Every network at every point of its training, through Hessian and GGN, and the verdicts on what is claimed."""

    name: str
    scale: str
    points: tuple[CurvaturePoint, ...]
    verdicts: tuple[Verdict, ...]
    assumptions: tuple[str, ...]
    seed: int

    def rows(self) -> list[Row]:
        """A record for every point, and one for every batch."""
        return rows_of(self.points)

    def tables(self) -> tuple[Table, ...]:
        """Shares of batches within one and two deviations; λ'₁ and overlaps by size; variances; bulks."""
        return tuple(eigen_tables(Rows(self.rows())))


def run_batch_eigenvalues(scale: str = "cpu", seed: int = 0, **choices: Any) -> BatchEigenvaluesResult:
    """Train every network of a scale, measure it at its stops, and judge what the models predict.

    "smoke" takes seconds on the digits that come with the package, "cpu" minutes on 10,000 images of MNIST, "paper"
    needs a GPU and CIFAR-10. ``choices`` are those of ``measure_networks``.
    """
    return concluded([measure_networks(scale, seed, **choices)])


def measure_networks(
    scale: str,
    seed: int = 0,
    *,
    device: torch.device | str = "cpu",
    data: Mapping[str, Split] | None = None,
    networks: Sequence[str] | None = None,
    keep: Callable[[BatchEigenvaluesResult], Any] | None = None,
) -> BatchEigenvaluesResult:
    """What there is to measure, without predictions and verdicts, which ``concluded`` adds.

    ``data`` gives data sets by name in place of those that ``lh.data.load`` finds, ``networks`` some of the scale's.
    ``keep`` is called after each point with all that was measured so far, lest a kill lose it.
    """
    require_choice(scale, "scale", SCALES)
    require_count(seed, "seed", least=0)
    points: list[CurvaturePoint] = []
    subjects = _chosen(SCALES[scale], networks)
    stops, done = sum(len(subject.epochs) for subject in subjects), 0
    for subject in subjects:
        split = data[subject.data] if data is not None and subject.data in data else load_split(subject.data)
        for epoch, problem in training_stops(subject, split, seed, device):
            points += measure_point(subject, epoch, problem, seed)
            done += 1
            report("batch-eigenvalues", done, stops)
            if keep is not None:
                keep(_measured(scale, points, seed))
    return _measured(scale, points, seed)


def concluded(parts: Sequence[BatchEigenvaluesResult]) -> BatchEigenvaluesResult:
    """What was measured in one run, or in several of some networks each, with predictions and verdicts."""
    points = []
    for part in parts:
        for point in part.points:
            points.append(point.predicted())
            report("predictions", len(points), sum(len(each.points) for each in parts))
    return replace(parts[0], points=tuple(points), verdicts=tuple(judge(claims(Rows(rows_of(points))))))


def _measured(scale: str, points: Sequence[CurvaturePoint], seed: int) -> BatchEigenvaluesResult:
    return BatchEigenvaluesResult("batch-eigenvalues", scale, tuple(points), (), ASSUMPTIONS, seed)


def _chosen(subjects: tuple[Subject, ...], networks: Sequence[str] | None) -> tuple[Subject, ...]:
    names = [subject.network for subject in subjects]
    for name in networks or ():
        require_choice(name, "networks", names)
    return tuple(subject for subject in subjects if networks is None or subject.network in networks)
