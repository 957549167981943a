"""Eigenvalues of single batches against dense Hessians of the same batches."""

import math

import numpy as np
import pytest
import torch

from lambdahat._core.rng import generator
from lambdahat.estimators._eigenpairs import eigenpairs
from lambdahat.operators import ggn, hessian
from lambdahat.randommatrix import BatchEigenvalues, batch_eigenpairs
from tests.cases import classifier
from tests.oracles import dense_ggn, dense_hessian

PROBLEM = classifier(activation="tanh", samples=30)


def drawn(size, seed, i):
    """The same samples as the library draws."""
    return torch.randperm(30, generator=generator(seed, "batch curvature", size, i))[:size]


@pytest.mark.parametrize(("name", "dense"), [("hessian", dense_hessian), ("ggn", dense_ggn)])
def test_eigenvalues_and_overlaps_are_those_of_dense_matrices(name, dense):
    full = eigenpairs({"hessian": hessian, "ggn": ggn}[name](PROBLEM), 3)
    found = batch_eigenpairs(PROBLEM, 8, batches=3, k=2, seed=4, operator=name, full=full)
    assert len(found) == 3
    for i in range(3):
        values, vectors = np.linalg.eigh(dense(PROBLEM.subset(drawn(8, 4, i))).numpy())
        assert found.largest[i] == pytest.approx(values[::-1][:2], abs=1e-8)
        assert found.smallest[i] == pytest.approx(values[:2], abs=1e-8)
        dots = (vectors[:, ::-1][:, :2] * full.vectors[:, :2].numpy()).sum(axis=0)
        assert found.overlaps[i] == pytest.approx(dots**2, abs=1e-6)


def test_a_batch_of_all_the_data_is_the_data():
    full = eigenpairs(hessian(PROBLEM), 2, "both")
    found = batch_eigenpairs(PROBLEM, 30, batches=2, full=full)
    assert found.largest == pytest.approx(np.full((2, 1), float(full.values[0])))
    assert found.smallest == pytest.approx(np.full((2, 1), float(full.values[-1])))
    assert found.overlaps == pytest.approx(np.ones((2, 1)))
    assert found.spread() == pytest.approx(0.0, abs=1e-9)


def test_the_mean_carries_its_error():
    found = batch_eigenpairs(PROBLEM, 8, batches=6)
    mean = found.mean()
    assert float(mean) == pytest.approx(found.largest.mean())
    assert float(mean.stderr) == pytest.approx(found.largest.std(ddof=1) / math.sqrt(6))
    assert mean.dof == 5
    assert found.spread("smallest") == pytest.approx(found.smallest.std(ddof=1))
    assert math.isnan(batch_eigenpairs(PROBLEM, 8, batches=1).spread())


def test_it_saves_and_loads(tmp_path):
    found = batch_eigenpairs(PROBLEM, 8, batches=2)
    again = BatchEigenvalues.load(found.save(tmp_path / "batches"))
    assert (again.largest == found.largest).all()
    assert again.overlaps is None


SMALL = eigenpairs(hessian(classifier(sizes=(3, 2))), 2)
RISING = eigenpairs(hessian(PROBLEM), 2, "smallest")


def measure(size=3, problem=PROBLEM, **options):
    return batch_eigenpairs(problem, size, **options)


MISUSES = {
    "a batch larger than the data": (
        lambda: measure(31),
        ValueError,
        r"batch_size must be an integer in \[1, 30\]",
    ),
    "no batches": (
        lambda: measure(batches=0),
        ValueError,
        "batches must be an integer of at least 1",
    ),
    "pairs of another size": (
        lambda: measure(full=SMALL),
        ValueError,
        "full must be 1 eigenpairs or more of order 43",
    ),
    "the smallest pairs": (
        lambda: measure(full=RISING, k=2),
        ValueError,
        "full must begin with the largest",
    ),
    "an unknown operator": (
        lambda: measure(operator="kfac"),
        ValueError,
        "operator must be one of 'hessian', 'ggn'",
    ),
    "overlaps not asked for": (
        lambda: measure(batches=1).mean("overlaps"),
        ValueError,
        "pass full=",
    ),
    "an unknown reading": (
        lambda: measure(batches=1).mean("median"),
        ValueError,
        "which must be one of",
    ),
    "a model": (lambda: measure(problem="model"), TypeError, "problem must be a lambdahat.Problem"),
}


@pytest.mark.parametrize(("call", "error", "message"), MISUSES.values(), ids=MISUSES)
def test_misuse(call, error, message):
    with pytest.raises(error, match=message):
        call()
