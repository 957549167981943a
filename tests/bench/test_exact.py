"""The benchmark's exact answers are exact: against dense matrices, in float64."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lambdahat._core.rng import generator
from lambdahat.bench import problems
from lambdahat.bench.limits import passes
from lambdahat.bench.problems import LOSS, BenchCase, load
from lambdahat.bench.rows import torus, torus_moments
from lambdahat.graphs import graph
from lambdahat.graphs.spectra import eigenvalues, exact_moments
from lambdahat.models import mlp


def small(activation="relu"):
    rng = generator(0, "bench tests")
    x, y = torch.randn(6, 4, generator=rng).double(), torch.randint(0, 3, (6,), generator=rng)
    layers = nn.Sequential(*mlp([4, 5, 3, 3], activation, seed=1)).double()
    return BenchCase("small", layers, [(x[:4], y[:4]), (x[4:], y[4:])])


def other(*layers):
    """Another network on the same data."""
    return BenchCase("other", nn.Sequential(*layers).double(), small().batches)


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def dense(case):
    """The Hessian over all data by two passes of automatic differentiation."""
    x, y = case.whole()
    names = [name for name, _ in case.model.named_parameters()]
    shapes = [p.shape for p in case.parameters]

    def loss(theta):
        pieces = theta.split([math.prod(shape) for shape in shapes])
        values = {n: p.view(s) for n, p, s in zip(names, pieces, shapes, strict=True)}
        return LOSS(torch.func.functional_call(case.model, values, (x,)), y)

    theta = torch.cat([p.detach().reshape(-1) for p in case.parameters])
    return torch.autograd.functional.hessian(loss, theta)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_the_trace_of_a_perceptron(activation):
    case = small(activation)
    assert problems.perceptron_trace(case) == pytest.approx(float(dense(case).trace()), rel=1e-10)


def test_the_trace_of_a_piecewise_linear_network():
    case = small()
    assert problems.piecewise_trace(case) == pytest.approx(
        problems.perceptron_trace(case), rel=1e-10
    )
    case = other(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 4, 1), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    )
    assert problems.trace(case) == pytest.approx(float(dense(case).trace()), rel=1e-10)


def test_products_and_eigenvalues():
    case = small("tanh")
    H = dense(case)
    v = torch.randn(len(H), generator=generator(0, "v")).double()
    torch.testing.assert_close(problems.product(case, v), H @ v)
    torch.testing.assert_close(
        problems.top_eigenvalues(case, 3), torch.linalg.eigvalsh(H).flip(0)[:3]
    )


def test_gauss_newton_is_the_hessian_of_a_linear_model():
    linear = other(nn.Linear(4, 3))
    v = torch.randn(15, generator=generator(0, "v")).double()
    torch.testing.assert_close(problems.gauss_newton_product(linear, v), dense(linear) @ v)


def test_the_kronecker_solution_of_one_layer_inverts_its_dense_matrix():
    linear = other(nn.Linear(4, 3))
    x, _ = linear.whole()
    a = torch.cat([x, torch.ones(6, 1).double()], dim=1)
    p = linear.model(x).softmax(1).detach()
    A, G = a.T @ a / 6, (p.diag_embed() - p.unsqueeze(2) * p.unsqueeze(1)).mean(0)
    g = linear.gradient()
    matrix = torch.cat([g[:12].view(3, 4), g[12:].unsqueeze(1)], dim=1)
    solved = torch.linalg.solve(
        torch.kron(G, A) + 0.1 * torch.eye(15).double(), matrix.reshape(-1)
    ).view(3, 5)
    expected = torch.cat([solved[:, :4].reshape(-1), solved[:, 4]])
    torch.testing.assert_close(problems.kronecker_solution(linear, g, 0.1), expected)


def test_the_moments_of_a_torus():
    np.testing.assert_allclose(
        torus_moments(5, 12), exact_moments(eigenvalues(graph(torus(5))), 12).values, atol=1e-12
    )


@pytest.mark.parametrize("name", ["mlp", "lenet5"])
def test_the_arithmetic_of_a_gradient_is_counted_as_torch_counts_it(name):
    case = load(name, 16, batch_size=8, width=6)
    with FlopCounterMode(display=False) as counter:
        case.gradient()
    assert passes(case)["gradient"].flops == counter.get_total_flops()
