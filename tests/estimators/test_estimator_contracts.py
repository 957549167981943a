"""What every registered estimator keeps, on a matrix of order 300 that is known by its products.

A new estimator is held to this by the decorator ``estimator`` in its own module.
"""

import inspect
import math

import numpy as np
import pytest
import scipy.sparse
import torch

import lambdahat as lh
from lambdahat import estimators
from lambdahat.estimators.estimator_registry import ESTIMATORS
from lambdahat.operators import LinearOperator
from lambdahat.results import Result

SIZE, SEEDS = 300, 10
LIMITED = [
    n for n, e in ESTIMATORS.items() if "max_matvecs" in inspect.signature(e.function).parameters
]
each = pytest.mark.parametrize("name", list(ESTIMATORS))


def positive_matrix():
    """Eigenvalues from 0.5 to 3 and three outliers, in a random basis."""
    rng = np.random.default_rng(0)
    basis, _ = np.linalg.qr(rng.standard_normal((SIZE, SIZE)))
    values = np.append(np.linspace(0.5, 3.0, SIZE - 3), [8.0, 12.0, 20.0])
    matrix = (basis * values) @ basis.T
    return torch.as_tensor((matrix + matrix.T) / 2)


MATRIX = positive_matrix()


class Opaque(LinearOperator):
    """The matrix by its products alone: no entries, no known bounds, no closed forms."""

    def __init__(self):
        super().__init__(SIZE, torch.float64, torch.device("cpu"), symmetric=True, psd=True)

    def _apply(self, block):
        return MATRIX @ block


def run(name, source=None, **more):
    entry = ESTIMATORS[name]
    return entry.function(Opaque() if source is None else source, **{**entry.settings, **more})


def read(name, result):
    """Value and standard error, as arrays of one shape."""
    value, error = (np.asarray(part, dtype=float) for part in ESTIMATORS[name].read(result))
    assert value.shape == error.shape
    return value, error


def exact(name):
    return np.asarray(ESTIMATORS[name].exact(MATRIX), dtype=float)


def rounding(name):
    return 1e-12 * np.abs(exact(name)).max()


def test_every_public_estimator_of_an_operator_is_registered():
    public = (getattr(lh, name) for name in estimators.__all__ if hasattr(lh, name))
    of_operators = {
        function.__name__
        for function in public
        if inspect.isfunction(function)
        and next(iter(inspect.signature(function).parameters)) == "operator"
    }
    assert of_operators - set(ESTIMATORS) == {"trace_per_layer"}  # trace, for layers with names
    assert set(ESTIMATORS) <= of_operators


@each
def test_the_same_seed_gives_the_same_bits(name, tmp_path):
    first, second = (run(name, seed=3).save(tmp_path / folder / "found") for folder in "ab")
    assert first.read_bytes() == second.read_bytes()  # with the digest of the arrays beside it


@each
def test_another_seed_differs_within_the_errors(name):
    (one, error), (other, spread) = (read(name, run(name, seed=seed)) for seed in (1, 2))
    assert not np.array_equal(one, other)
    assert (np.abs(one - other) <= 5 * np.hypot(error, spread) + rounding(name)).all()


@each
def test_the_errors_hold_the_exact_answer(name):
    """No reading is beyond 5 errors, nor their mean square beyond 1.8² (about 1 for a standard
    error, less for a bound), and the errors are small beside the answer.
    """
    truth, scores = exact(name), []
    for seed in range(SEEDS):
        value, error = read(name, run(name, seed=seed))
        assert value.shape == truth.shape
        assert (error > 0).all()
        assert np.linalg.norm(error) < 0.35 * np.linalg.norm(truth)
        scores.append((value - truth) / (error + rounding(name)))
    assert np.abs(scores).max() < 5
    assert math.sqrt(np.mean(np.square(scores))) < 1.8


@each
def test_matrices_of_any_kind_are_taken(name):
    sources = {
        "NumPy": MATRIX.numpy(),
        "torch": MATRIX,
        "lists": lh.operator(MATRIX.tolist()),
        "sparse": scipy.sparse.csr_array(MATRIX.numpy()),
        "SciPy": scipy.sparse.linalg.aslinearoperator(MATRIX.numpy()),
    }
    for kind, source in sources.items():
        value, error = read(name, run(name, source))
        slack = 5 * error + 1e-9 * np.abs(exact(name)).max()
        assert (np.abs(value - exact(name)) <= slack).all(), kind


@each
def test_results_are_read_back_from_disk(name, tmp_path):
    found = run(name)
    path = found.save(tmp_path / "first" / "found")
    again = type(found).load(path)
    assert again.status is found.status
    assert isinstance(Result.load(path), type(found))
    assert again.save(tmp_path / "second" / "found").read_bytes() == path.read_bytes()


@each
def test_a_status_that_is_not_ok_states_a_remedy(name):
    statuses = [run(name).status]
    if name in LIMITED:
        statuses.append(run(name, **tight(name), max_matvecs=4).status)
        assert not statuses[-1].ok
    for status in statuses:
        assert status.ok == (status.value == "")
        assert status.ok or any(word in status.value for word in ("raise", "lower", "pass", "use"))


def tight(name):
    """A tolerance that four products do not reach, in place of what else sets the accuracy."""
    return {"depth": None, "tol": 1e-9} if name == "logdet" else {"tol": 1e-9}


@pytest.mark.parametrize("limit", [4, 50, SIZE + 20])
@pytest.mark.parametrize("name", LIMITED)
def test_the_most_products_are_respected(name, limit):
    operator = Opaque()
    found = run(name, operator, **tight(name), max_matvecs=limit)
    assert 0 < found.cost <= limit
    assert operator.matvecs <= limit


@each
def test_a_matrix_with_nan_is_refused(name):
    broken = MATRIX.clone()
    broken[3, 4] = broken[4, 3] = torch.nan
    with pytest.raises(ValueError, match=r"NaN|finite"):
        run(name, broken)
