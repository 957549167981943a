"""Points and cells of the mini-batch experiment with figures that are known."""

import math
from functools import cache

import numpy as np
import pytest
import torch

import lambdahat as lh
from lambdahat.experiments.minibatch.batch_points import BatchCell, CurvaturePoint
from lambdahat.randommatrix.batch_curvature import BatchEigenvalues, DirectionalVariance
from lambdahat.randommatrix.predictions import BatchPrediction, PredictedOutlier
from lambdahat.randommatrix.spikes import effective_batch
from lambdahat.results import Eigenpairs, Estimate

N, P = 10_000, 400


def prediction(size, model, largest, spread, overlap=0.5, error=0.0):
    """A prediction of λ'₁ with its error and spread; the rest does not matter."""
    told = Estimate(largest, error)
    outlier = PredictedOutlier(Estimate(1.0), told, Estimate(overlap), spread)
    none = Estimate(math.nan)
    return BatchPrediction(
        size,
        N,
        effective_batch(size, N),
        model,
        told,
        Estimate(-1.0),
        spread,
        0.1,
        (Estimate(-1.0), Estimate(1.0)),
        (outlier,),
        none,
        none,
        none,
        "made",
    )


def cell(size, values, predictions, overlaps=None):
    """A cell with the batches' λ'₁ ``values``; ``predictions`` by model: (λ'₁, spread) and more."""
    largest = np.asarray(values, dtype=np.float64)[:, None]
    seen = (
        np.full_like(largest, 0.5)
        if overlaps is None
        else np.asarray(overlaps, dtype=np.float64)[:, None]
    )
    measured = BatchEigenvalues(size, N, P, "hessian", largest, -largest, seen)
    return BatchCell(
        measured, {model: prediction(size, model, *told) for model, told in predictions.items()}
    )


@cache
def bulk_spectrum(scale):
    """A semicircle of radius 2·scale with one outlier at 5, seen by a Lanczos run."""
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(P, P)) * scale / math.sqrt(2 * P)
    matrix = noise + noise.T
    matrix[0, 0] += 5.0
    return lh.spectrum(lh.operator(torch.from_numpy(matrix)), 60, seed=0)


def point(
    cells,
    epoch=0,
    variance=(1.0, 0.01),
    top=1.0,
    batch_scale=1.0,
    network="made",
    operator="hessian",
):
    """A point whose bulk has radius 1, and that of its batch twice ``batch_scale``."""
    whole, part = bulk_spectrum(0.5), bulk_spectrum(batch_scale)
    pairs = Eigenpairs(
        torch.tensor([top, -0.1]),
        torch.empty(P, 0),
        torch.zeros(2),
        torch.ones(2, dtype=torch.bool),
    )
    some = Estimate(torch.ones(2), torch.zeros(2))
    along = DirectionalVariance(
        some,
        some,
        Estimate(torch.eye(2), torch.zeros(2, 2)),
        torch.zeros(1, 3),
        Estimate(0.0),
        P,
        N,
        operator,
    )
    return CurvaturePoint(
        network,
        epoch,
        operator,
        N,
        0.1,
        Estimate(*variance),
        along,
        pairs,
        tuple(cells),
        128,
        whole,
        (part, part),
    )


def whole(store):
    """The rows of a run in which no cell raised."""
    assert store.errors() == []
    return store.rows()


def assert_same_rows(found, expected, rel=1e-6):
    """The columns of ``expected`` in the same order of rows, texts equal and numbers close."""
    for row, other in zip(found, expected, strict=True):
        assert set(row) >= set(other)
        for name, value in other.items():
            if isinstance(value, float | int | list):
                assert row[name] == pytest.approx(value, rel=rel, nan_ok=True), name
            else:
                assert row[name] == value
