"""Full-data and mini-batch curvature at points of training: measured, predicted, stored as rows.

A row with ``part`` "batch" has the figures of one batch, and the first of each size the predictions
of every model; a row with "point" has those of the full data, and the Ritz values behind the bulks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lambdahat._core.device import fast_convolutions
from lambdahat._core.progress import report
from lambdahat._core.rng import derived_seed, generator
from lambdahat._core.storage import Result
from lambdahat.data.catalogue import load
from lambdahat.data.splits import Split
from lambdahat.estimators import eigenpairs, spectrum, variance
from lambdahat.experiments.kit.cells import Cell, Row, Rows, short
from lambdahat.experiments.kit.claims import Reading, mean_of
from lambdahat.experiments.kit.training import PHOTOGRAPHS
from lambdahat.krylov import lanczos, random_vector
from lambdahat.models import make_model
from lambdahat.operators.base import LinearOperator
from lambdahat.operators.curvature import ggn, hessian
from lambdahat.problem import Problem
from lambdahat.randommatrix.batch_curvature import (
    BatchEigenvalues,
    DirectionalVariance,
    directional_variance,
)
from lambdahat.randommatrix.bulk import continuous_region, fit_bulk
from lambdahat.randommatrix.predictions import BatchPrediction, predict
from lambdahat.results import Array, Eigenpairs, Estimate, Spectrum
from lambdahat.training._loop import fit

MODELS = ("additive", "multiplicative", "directional")
ENDS = ("largest", "smallest")
CLAIMED_SIZE = 128  # the batch of Figures 5.2, 5.4 and 5.6
ROUNDING = 1e-3


@dataclass(frozen=True)
class BatchCell(Result):
    """The batches of one size: their measured curvature and each model's prediction."""

    measured: BatchEigenvalues
    predictions: Mapping[str, BatchPrediction] = field(default_factory=dict)

    def prediction(self, model: str, what: str) -> Estimate:
        """The prediction of a model, with the error that its measured inputs cause."""
        predicted = self.predictions[model]
        return predicted.overlaps[0] if what == "overlaps" else getattr(predicted, what)

    def spread(self, model: str, end: str) -> float:
        """The standard deviation of one batch about the prediction, including the prediction's."""
        predicted, error = self.predictions[model], float(self.prediction(model, end).stderr)
        spread = predicted.spread if end == "largest" else predicted.smallest_spread
        return math.hypot(spread, error if math.isfinite(error) else 0.0)


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
    def largest(self) -> float:
        """λ₁ of the full data."""
        return float(self.pairs.values[0])

    @property
    def smallest(self) -> float:
        """λ_P of the full data; the GGN has more parameters than rank."""
        return float(self.pairs.values[-1]) if self.operator == "hessian" else 0.0

    @property
    def indefinite(self) -> bool:
        """Whether the full data has eigenvalues below 0 by more than rounding."""
        return self.smallest < -ROUNDING * self.largest

    def with_predictions(self) -> CurvaturePoint:
        """The same with every model's predictions and without the bulky per-sample figures."""
        sources: dict[str, tuple[Spectrum | Eigenpairs, Estimate | DirectionalVariance]] = {
            "additive": (self.pairs, self.variance),
            "multiplicative": (self.spectrum, self.variance),
            "directional": (self.pairs, self.along),
        }
        cells = []
        for cell in self.cells:
            predicted = {}
            for model, (shown, noise) in sources.items():
                prediction = predict(shown, noise, cell.measured.batch_size, self.samples, model)
                # the first of its outliers is all that is compared here
                predicted[model] = replace(prediction, outliers=prediction.outliers[:1])
            cells.append(BatchCell(cell.measured, predicted))
        along = replace(self.along, elements=self.along.elements[:0].clone())
        return replace(self, cells=tuple(cells), along=along)


MOMENTUM = 0.9
TRAINING_BATCH = 128
SIDE = 28  # of the images that LeNet-5 takes
SIZES = tuple(2**power for power in range(4, 13))  # 16 … 4,096


# what measuring a point takes: ``pairs`` of the full data's largest eigenpairs, to ``tol``;
# ``batches`` batches of each size by ``steps`` products each; spectra by ``depth`` products;
# variances from ``probes`` vectors and the eigenvectors, on so many samples (None: all)
EFFORT: Cell = {"pairs": 10, "tol": 1e-4, "batches": 10, "steps": 40, "depth": 100}
EFFORT |= {"probes": 8, "noise_samples": None}


def subject(
    network: str,
    model: str,
    data: str,
    epochs: Sequence[int],
    rate: float,
    samples: int | None = None,
    options: Mapping[str, Any] | None = None,
    batch_sizes: Sequence[int] = SIZES,
    effort: Cell = EFFORT,
    operators: Sequence[str] = ("hessian", "ggn"),
    chunk: int | None = None,
    measured: int | None = None,
) -> Cell:
    """A network on a data set, the ``epochs`` after which it is measured, and the batch sizes.

    It trains on ``samples`` of the training images (None: all). The first ``measured`` of them are
    the full data from which batches are drawn (None: all); ``chunk`` are evaluated at a time.
    """
    settings = {"network": network, "model": model, "data": data, "epochs": epochs, "rate": rate}
    settings |= {"samples": samples, "options": dict(options or {}), "batch_sizes": batch_sizes}
    settings |= {"chunk": chunk} | ({} if measured is None else {"measured": measured})
    return {**settings, **effort, "operators": operators}


Device = torch.device | str


def sgd(model: nn.Module, rate: float) -> Optimizer:
    """SGD with momentum 0.9, no decay."""
    return torch.optim.SGD(model.parameters(), rate, momentum=MOMENTUM)


def training_stops(
    cell: Cell,
    split: Split,
    seed: int,
    device: Device,
    make: Callable[[nn.Module, float], Optimizer] = sgd,
) -> Iterator[tuple[int, Problem]]:
    """The network's problem after each of the cell's epochs, trained on batches of 128."""
    (x, y), samples = split.train, cell["samples"]
    if samples is not None and samples < len(x):
        order = torch.randperm(len(x), generator=generator(seed, "full data"))
        x, y = x[order[:samples]], y[order[:samples]]
    x, y = crop(x, cell["model"]).to(device), y.to(device)
    shape, start = tuple(x.shape[1:]), derived_seed(seed, cell["network"])
    model = make_model(cell["model"], shape, split.classes, start, **cell["options"]).to(device)
    problem, full = (
        Problem(model, "cross_entropy", (x[:count], y[:count]), batch_size=cell["chunk"])
        for count in (None, cell.get("measured"))
    )
    optimizer, done = make(model, cell["rate"]), 0
    for epoch in cell["epochs"]:
        if epoch > done:
            stream = derived_seed(seed, "training", epoch)
            with fast_convolutions():
                fit(problem, optimizer, epoch - done, batch_size=TRAINING_BATCH, seed=stream)
        done = epoch
        yield epoch, full.at(full.vector)


def crop(x: Tensor, model: str) -> Tensor:
    """The centre of images (n, C, H, W) that are too large for LeNet-5; others as they are."""
    if model != "lenet5" or x.shape[-1] == SIDE:
        return x
    edge = (x.shape[-1] - SIDE) // 2
    return x[..., edge : edge + SIDE, edge : edge + SIDE]


def load_split(name: str) -> Split:
    """A data set of the catalogue, images with mean 0 and deviation 1 per channel."""
    if name == "digits":
        return load(name)
    # CIFAR in another order passes too
    return load(name, verify=name not in PHOTOGRAPHS, normalization="standard")


QUICK: Cell = {"pairs": 3, "tol": 1e-4, "batches": 3, "steps": 20, "depth": 20}
QUICK |= {"probes": 2, "noise_samples": 64}
CPU = EFFORT | {"steps": 30, "probes": 4, "noise_samples": 1024}
CONVOLUTIONS = CPU | {"pairs": 5, "tol": 1e-3, "steps": 20, "depth": 40, "noise_samples": 512}
LARGE = CPU | {"pairs": 4, "tol": 1e-2, "steps": 10, "depth": 24, "noise_samples": 128}
HESSIAN_ONLY = ("hessian",)  # of a linear model the GGN is the Hessian
PAPER_SIZES = (16, 64, 128, 512, 2048)

SOFTMAX, MLP = ("softmax", "softmax", "mnist"), ("MLP", "mlp", "mnist")
LENET = ("LeNet-5", "lenet5", "mnist")
VGG = ("VGG-16", "vgg16", "cifar100", (0, 34), 0.02, 45_000, {"dropout": 0.0})
MIDDLE = (16, 64, 128, 256, 1024)
SCALES: dict[str, tuple[Cell, ...]] = {
    "smoke": (
        subject("softmax", "softmax", "digits", (5,), 0.1, 400, {}, (16, 128), QUICK, HESSIAN_ONLY),
        subject("MLP", "mlp", "digits", (0, 5), 0.1, 400, {"widths": (6,)}, (16, 128), QUICK),
    ),
    "cpu": (
        subject(*SOFTMAX, (0, 1, 20), 0.02, 10_000, effort=CPU, operators=HESSIAN_ONLY),
        subject(*MLP, (0, 1, 20), 0.02, 10_000, {"widths": (32,)}, effort=CPU),
        subject(*LENET, (0, 10), 0.02, 4000, {}, MIDDLE, CONVOLUTIONS),
    ),
    "paper": (subject(*VGG, PAPER_SIZES, LARGE, chunk=500, measured=4_000),),
}


OPERATORS = {"hessian": hessian, "ggn": ggn}
SPECTRA = 4  # batches whose whole spectrum is seen


def measure_point(
    cell: Cell, epoch: int, problem: Problem, seed: int, spectra: int = SPECTRA
) -> Iterator[CurvaturePoint]:
    """A network at one epoch through the cell's operators, with ``spectra`` batch spectra."""
    stream, samples = derived_seed(seed, cell["network"], epoch), cell["noise_samples"]
    samples = None if samples is None else min(samples, problem.num_samples)
    elements = variance(problem, cell["probes"], stream, samples)
    size = min(CLAIMED_SIZE, problem.num_samples)
    batches = [problem.subsample(size, derived_seed(stream, "spectra", i)) for i in range(spectra)]
    for name in cell["operators"]:
        operator = OPERATORS[name]
        element = elements.hessian_variance if name == "hessian" else elements.ggn_variance
        assert element is not None
        pairs = _pairs(operator(problem), cell, name == "hessian", stream)
        whole, *parts = (
            spectrum(operator(each), cell["depth"], seed=stream) for each in (problem, *batches)
        )
        along = directional_variance(problem, pairs, name, cell["probes"], samples, stream)
        shared = (cell["batches"], cell["steps"], pairs.vectors[:, 0], stream)
        cells = tuple(
            BatchCell(batch_extremes(problem, name, size, *shared)) for size in cell["batch_sizes"]
        )
        # vectors take gigabytes for a large network and are not needed
        values = replace(pairs, vectors=pairs.vectors[:, :0].cpu())
        where = (cell["network"], epoch, name, problem.num_samples, problem.loss(), element)
        yield CurvaturePoint(*where, along, values, cells, size, whole, tuple(parts))


def batch_extremes(
    problem: Problem, operator: str, size: int, batches: int, steps: int, vector: Tensor, seed: int
) -> BatchEigenvalues:
    """Extreme eigenvalues of each of several random batches, and the overlap with the full φ₁.

    By ``steps`` of Lanczos, whatever the residual: a loose tolerance may be met by the second
    eigenvalue before the start has grown towards the first, and a fixed number costs what was
    planned.
    """
    extremes, count = [], problem.num_samples
    for i in range(batches):
        order = torch.randperm(count, generator=generator(seed, "batch", size, i))
        part = problem.subset(order[:size], min(size, max(problem.batches.sizes)))
        extremes.append(_extremes(OPERATORS[operator](part), steps, vector, seed))
        report(f"{operator}, batches of {size}", i + 1, batches)
    largest, smallest, overlaps = np.array(extremes).T[:, :, None]
    where = (size, count, problem.num_parameters, operator)
    return BatchEigenvalues(*where, largest, smallest, overlaps, batches * steps)


def _extremes(
    operator: LinearOperator, steps: int, vector: Tensor, seed: int
) -> tuple[float, float, float]:
    """λ'₁, λ'_P and |φ̂₁ᵀφ₁|², φ̂₁ = Qs the leading Ritz vector."""
    run = lanczos(operator, random_vector(operator, seed, "batch start"), min(steps, operator.dim))
    values, weights = torch.linalg.eigh(run.tridiagonal)
    shadow = (run.basis.T @ vector.to(run.basis)).double().cpu()
    return float(values[-1]), float(values[0]), min(float(weights[:, -1] @ shadow) ** 2, 1.0)


def _pairs(operator: LinearOperator, cell: Cell, indefinite: bool, seed: int) -> Eigenpairs:
    """The full data's largest eigenpairs, descending, then the smallest if ``indefinite``.

    Both ends are searched to the same number of pairs: a lone smallest one would end the search too
    early.
    """
    which, count = "both" if indefinite else "largest", cell["pairs"]
    pairs = eigenpairs(operator, count, which, cell["tol"], seed=seed)
    kept = [*range(count), len(pairs) - 1] if indefinite else list(range(count))
    columns = {name: getattr(pairs, name)[kept] for name in ("values", "residuals", "converged")}
    return replace(pairs, vectors=pairs.vectors[:, kept], **columns)


MEASURED = (*ENDS, "overlaps")


def rows_of(points: Sequence[CurvaturePoint]) -> list[Row]:
    """A row for every point, and one for every batch there."""
    return [row for point in points for row in (_bulk_row(point), *batch_rows(point))]


def where(point: CurvaturePoint) -> Row:
    """Which point of training a row is of."""
    return {"network": point.network, "epoch": point.epoch, "operator": point.operator}


def point_row(point: CurvaturePoint) -> Row:
    """The row of a point: what the full data show there.

    The anisotropy is τ²/(Pσ²): the noise along φ₁ over what it would be were noise alike in all
    directions.
    """
    parameters, element = point.spectrum.dim, float(point.variance)
    along = float(torch.as_tensor(point.along.tau2.value)[0])
    return {
        **where(point),
        "part": "point",
        "population": point.samples,
        "parameters": parameters,
        "loss": point.loss,
        "variance": element,
        "variance error": float(point.variance.stderr),
        "anisotropy": along / (parameters * element),
        "full largest": point.largest,
        "full smallest": point.smallest,
    }


def _bulk_row(point: CurvaturePoint) -> Row:
    """The row of a point with its bulk, and the Ritz values of the spectra behind it."""
    bulk, first = fit_bulk(point.spectrum), point.batch_spectra[0]
    edges = (bulk.lower, bulk.upper)
    whole, *batches = (continuous_region(each) for each in (point.spectrum, *point.batch_spectra))
    return {
        **point_row(point),
        "indefinite": point.indefinite,
        "width": whole[1] - whole[0],
        "width size": point.batch_size,
        "batch widths": [high - low for low, high in batches],
        "bulk": [float(edge) for edge in edges],
        "bulk errors": [float(edge.stderr) for edge in edges],
        "outliers": [float(value) for value in bulk.outliers],
        **{"nodes": short(point.spectrum.nodes[0]), "weights": short(point.spectrum.weights[0])},
        **{"batch nodes": short(first.nodes[0]), "batch weights": short(first.weights[0])},
    }


def batch_rows(point: CurvaturePoint) -> Iterator[Row]:
    """A row per batch; the first of each size also has the predictions of every model."""
    for cell in point.cells:
        measured = cell.measured
        predictions: Row = {}  # with the error, and the spread of one batch about it
        for model in cell.predictions:
            for what in MEASURED:
                predicted = cell.prediction(model, what)
                predictions[f"{model} {what}"] = float(predicted)
                predictions[f"{model} {what} error"] = float(predicted.stderr)
            predictions |= {f"{model} {end} spread": cell.spread(model, end) for end in ENDS}
        for batch in range(len(measured)):
            size = {"part": "batch", "batch_size": measured.batch_size, "batch": batch}
            seen = {what: float(getattr(measured, what)[batch, 0]) for what in MEASURED}
            row = {**where(point), **size, **seen}
            yield row | (predictions if batch == 0 else {})


@dataclass(frozen=True)
class SizeBatches:
    """The batches of one size at one point."""

    size: int
    rows: Rows

    def values(self, what: str) -> Array:
        """The "largest", "smallest" or "overlaps" of every batch, (n,)."""
        return np.asarray(self.rows.values(what), dtype=np.float64)

    def mean(self, what: str) -> Reading:
        """Its mean over the batches."""
        return mean_of(self.values(what).tolist())

    def deviation(self, what: str) -> float:
        """Its standard deviation between batches."""
        return float(self.values(what).std(ddof=1))

    def prediction(self, model: str, what: str) -> Reading:
        """The prediction of a model; an unknown error counts as 0."""
        error = self.rows[0][f"{model} {what} error"]
        return Reading(self.rows[0][f"{model} {what}"], error if math.isfinite(error) else 0.0)

    def spread(self, model: str, end: str) -> float:
        """The standard deviation of one batch about the prediction."""
        return float(self.rows[0][f"{model} {end} spread"])


@dataclass(frozen=True)
class TrainingPoint:
    """One network after one epoch through one operator; ``row`` has what the full data show."""

    row: Row
    batches: tuple[SizeBatches, ...]

    def __getitem__(self, name: str) -> Any:
        return self.row[name]

    @property
    def name(self) -> str:
        """Network and operator."""
        return f"{self['network']}, {'GGN' if self['operator'] == 'ggn' else 'Hessian'}"

    @cached_property
    def models(self) -> list[str]:
        """The models with predictions."""
        return [model for model in MODELS if f"{model} largest" in self.batches[0].rows[0]]


def points_of(rows: Rows) -> list[TrainingPoint]:
    """The points whose rows are whole, in order of the epochs."""
    names, points = ("network", "epoch", "operator"), []
    batches = dict(rows.where(part="batch").groups(*names))
    for row in rows.where(part="point"):
        sizes = sorted(batches[tuple(row[name] for name in names)].groups("batch_size"))
        parts = (SizeBatches(size, part) for size, part in sizes)
        points.append(TrainingPoint(row, tuple(parts)))
    return sorted(points, key=lambda point: int(point["epoch"]))


def groups_of(rows: Rows) -> list[list[TrainingPoint]]:
    """The points of each network and operator, by epoch."""
    return [points_of(part) for _, part in rows.groups("network", "operator")]
