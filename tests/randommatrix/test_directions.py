"""Directional variances against dense Hessians of single samples, and what follows from them
against actual batches.
"""

import math

import numpy as np
import pytest
import torch

from lambdahat.estimators._eigenpairs import eigenpairs
from lambdahat.operators import ggn, hessian
from lambdahat.randommatrix import DirectionalVariance, directional_variance, predict
from lambdahat.results import Eigenpairs
from tests.cases import classifier, quadratic
from tests.oracles import dense_ggn, dense_hessian


def singles(problem, dense):
    """The matrix of every sample alone, (N, P, P)."""
    return torch.stack([dense(problem.subset([i])) for i in range(problem.num_samples)])


def exact(matrices, vectors):
    """τ² (k,) and the couplings (k, k), from the definition."""
    apart = matrices - matrices.mean(dim=0)
    tau2 = (apart @ vectors).square().sum(dim=1).mean(dim=0)
    return tau2, (vectors.T @ apart @ vectors).square().mean(dim=0)


@pytest.mark.parametrize(
    ("name", "make", "dense"), [("hessian", hessian, dense_hessian), ("ggn", ggn, dense_ggn)]
)
def test_everything_is_what_dense_matrices_of_single_samples_say(name, make, dense):
    problem = classifier(sizes=(3, 3, 2), activation="tanh", samples=10)
    order = problem.num_parameters
    pairs = eigenpairs(make(problem), order - 1)
    matrices = singles(problem, dense)
    assert torch.allclose(matrices.mean(dim=0), dense(problem))
    found = directional_variance(problem, pairs, name, probes=1)
    tau2, couplings = exact(matrices, pairs.vectors)
    assert torch.allclose(found.tau2.value, tau2, rtol=1e-6, atol=1e-10)
    assert torch.allclose(found.couplings.value, couplings, rtol=1e-6, atol=1e-10)
    assert torch.allclose(found.omega2.value, couplings.diagonal(), atol=1e-10)
    assert float(torch.as_tensor(found.tau2.stderr).max()) == 0.0
    # the complement is one direction, so that every probe is that one
    last = torch.linalg.qr(
        torch.cat([pairs.vectors, torch.ones(order, 1, dtype=torch.float64)], dim=1)
    ).Q[:, -1]
    apart = matrices - matrices.mean(dim=0)
    alone = (last @ apart @ last).square().mean()
    assert float(found.bulk) == pytest.approx(float(alone), rel=1e-6)
    assert torch.allclose(found.rest.value, tau2 - couplings.sum(dim=0), rtol=1e-5, atol=1e-10)


def test_the_bulk_is_estimated_within_its_error():
    problem = classifier(sizes=(3, 3, 2), activation="tanh", samples=10)
    pairs = eigenpairs(hessian(problem), 3)
    vectors = torch.linalg.qr(pairs.vectors, mode="complete").Q[:, 3:]
    matrices = singles(problem, dense_hessian)
    apart = vectors.T @ (matrices - matrices.mean(dim=0)) @ vectors
    expected = float(apart.square().mean())
    found = directional_variance(problem, pairs, probes=40).bulk
    assert abs(float(found) - expected) < 4 * float(found.stderr)
    assert float(found.stderr) < 0.3 * expected


def test_a_subset_of_samples_is_unbiased_and_knows_its_error():
    problem = classifier(sizes=(3, 3, 2), activation="tanh", samples=60)
    pairs = eigenpairs(hessian(problem), 2)
    whole = directional_variance(problem, pairs, probes=1)
    parts = [
        directional_variance(problem, pairs, probes=1, samples=20, seed=seed) for seed in range(12)
    ]
    readings = torch.stack([part.tau2.value for part in parts])
    error = readings.std(dim=0) / math.sqrt(len(parts))
    assert ((readings.mean(dim=0) - whole.tau2.value).abs() < 4 * error).all()
    claimed = torch.stack([part.tau2.stderr for part in parts]).mean(dim=0)
    assert (0.4 < claimed / readings.std(dim=0)).all()
    assert (claimed / readings.std(dim=0) < 2.0).all()
    assert parts[0].cost == 1  # 3 passes over a third of the data


def test_it_saves_and_loads(tmp_path):
    problem = classifier()
    found = directional_variance(problem, eigenpairs(hessian(problem), 2))
    again = DirectionalVariance.load(found.save(tmp_path / "directions"))
    assert torch.equal(again.couplings.value, found.couplings.value)
    assert float(again.bulk) == float(found.bulk)
    assert len(again) == 2


def batch_extremes(matrices, size, batches, seed=0):
    """The largest eigenvalue of the mean over random batches, and its vector's overlap with the
    full mean's.
    """
    rng = np.random.default_rng(seed)
    stack, total = matrices.numpy(), len(matrices)
    top = np.linalg.eigh(stack.mean(axis=0))[1][:, -1]
    chosen = np.array([rng.permutation(total)[:size] for _ in range(batches)])
    weights = np.zeros((batches, total))
    np.put_along_axis(weights, chosen, 1.0 / size, axis=1)
    values, vectors = np.linalg.eigh(np.tensordot(weights, stack, axes=1))
    return values[:, -1], (vectors[:, :, -1] @ top) ** 2


@pytest.fixture(scope="module")
def regression():
    """Softmax regression on 200 samples, the Hessian Jᵀ(diag p − ppᵀ)J of each (200, 21, 21),
    and all eigenpairs.
    """
    problem = classifier(sizes=(6, 3), samples=200, batch_size=None)
    batch = problem.batches.first()
    inputs = batch.data[0]
    shares = torch.softmax(problem.output(problem.named(problem.vector), batch), dim=1)
    eye = torch.eye(3, dtype=torch.float64)
    weights = torch.einsum("nd,ce->nced", inputs, eye).reshape(200, 3, 18)
    slopes = torch.cat([weights, eye.expand(200, 3, 3)], dim=2)
    middle = torch.diag_embed(shares) - shares[:, :, None] * shares[:, None, :]
    matrices = (slopes.mT @ middle @ slopes).detach()
    assert torch.allclose(matrices.mean(dim=0), dense_hessian(problem))
    return problem, matrices, eigenpairs(hessian(problem), problem.num_parameters)


@pytest.mark.parametrize("size", [20, 60, 120])
def test_second_order_theory_agrees_with_exact_batches(regression, size):
    problem, matrices, pairs = regression
    noise = directional_variance(problem, pairs, probes=1)
    found = predict(pairs, noise, size, problem.num_samples)
    values, overlaps = batch_extremes(matrices, size, 4000)
    error = values.std() / math.sqrt(len(values))
    full = float(pairs.values[0])
    shift = values.mean() - full
    # what is left is of higher order in 1/b
    assert abs(values.mean() - float(found.largest)) < 4 * error + 3 / size * shift
    assert shift > 10 * error
    # levels that repel one another vary less than each alone would: ω/√b is the more
    assert 0.95 * values.std() < found.spread < 1.4 * values.std()
    assert float(found.overlaps[0]) == pytest.approx(
        overlaps.mean(), abs=0.2 * (1 - overlaps.mean())
    )


def test_a_few_eigenvectors_tell_most_of_it(regression):
    problem, matrices, pairs = regression
    few = Eigenpairs(
        pairs.values[:6], pairs.vectors[:, :6], pairs.residuals[:6], pairs.converged[:6]
    )
    size = 60
    found = predict(few, directional_variance(problem, few), size, problem.num_samples)
    values, _ = batch_extremes(matrices, size, 4000)
    shift = values.mean() - float(pairs.values[0])
    assert float(found.largest) - float(pairs.values[0]) == pytest.approx(shift, rel=0.25)


def other():
    """Eigenpairs of another problem of the same size."""
    return eigenpairs(hessian(classifier(seed=1)), 2)


def pairs_of(problem):
    return eigenpairs(hessian(problem), 2)


PROBLEM = classifier()
FUNCTION = quadratic(torch.eye(3, dtype=torch.float64))
MISUSES = {
    "a model": (
        lambda: directional_variance(None, other()),
        TypeError,
        "problem must be a lambdahat.Problem",
    ),
    "eigenvalues": (
        lambda: directional_variance(PROBLEM, torch.ones(2)),
        TypeError,
        "eigenpairs must be Eigenpairs",
    ),
    "pairs of another problem": (
        lambda: directional_variance(PROBLEM, other()),
        ValueError,
        "eigenpairs must be of this problem's operator, got a residual",
    ),
    "an unknown operator": (
        lambda: directional_variance(PROBLEM, pairs_of(PROBLEM), "fisher"),
        ValueError,
        "operator must be one of 'hessian', 'ggn'",
    ),
    "no probes": (
        lambda: directional_variance(PROBLEM, pairs_of(PROBLEM), probes=0),
        ValueError,
        "probes must be",
    ),
    "one sample": (
        lambda: directional_variance(PROBLEM, pairs_of(PROBLEM), samples=1),
        ValueError,
        "samples must be",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), MISUSES.values(), ids=MISUSES)
def test_misuse(call, error, message):
    with pytest.raises(error, match=message):
        call()
