"""Lanczos–Newton against the dense absolute Hessian, and what it reduces to."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lambdahat as lh
from lambdahat._core.rng import generator
from lambdahat.models import mlp
from lambdahat.optim import LanczosNewton
from tests.cases import quadratic, with_eigenvalues
from tests.oracles import dense_ggn, dense_hessian

VALUES = torch.cat([torch.linspace(-3.0, -0.1, 5), torch.linspace(0.2, 8.0, 9)]).double()


def parabola(seed=0):
    """A quadratic with eigenvalues of both signs, its parameter as an optimiser holds it, and
    the problem.
    """
    matrix = with_eigenvalues(VALUES)
    theta = nn.Parameter(
        torch.randn(len(VALUES), generator=generator(seed, "parabola"), dtype=torch.float64)
    )
    return matrix, theta, quadratic(matrix, theta=theta)


def classifier(activation="tanh"):
    rng = generator(1, "lanczos newton")
    x, y = (
        torch.randn(30, 4, generator=rng, dtype=torch.float64),
        torch.randint(3, (30,), generator=rng),
    )
    return mlp([4, 5, 3], activation).double(), x, y


def matrix_function(matrix, function):
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(function(values)) @ vectors.T


@pytest.mark.parametrize("eta", [1.0, 3.0])
def test_with_all_pairs_it_is_the_damped_absolute_hessian(eta):
    matrix, theta, problem = parabola()
    start = theta.detach().clone()
    optimizer = LanczosNewton([theta], lr=0.7, damping=0.4, pairs=len(VALUES), eta=eta)
    optimizer.observe(problem)
    theta.grad = matrix @ start
    optimizer.step()
    inverse = matrix_function(matrix, lambda v: 1 / (eta * v.abs() + 0.4))
    torch.testing.assert_close(
        theta.detach(), start - 0.7 * inverse @ (matrix @ start), rtol=1e-8, atol=1e-9
    )


@pytest.mark.parametrize("curvature", ["absolute_hessian", "ggn"])
def test_all_pairs_of_a_network(curvature):
    model, x, y = classifier()
    problem = lh.Problem(model, "cross_entropy", (x, y))
    optimizer = LanczosNewton(
        model.parameters(), 0.5, 0.1, problem.num_parameters, curvature=curvature
    )
    matrix = dense_hessian(problem) if curvature == "absolute_hessian" else dense_ggn(problem)
    inverse = matrix_function(matrix.detach(), lambda v: 1 / (v.abs() + 0.1))
    start, slope = problem.vector, problem.gradient()
    optimizer.observe(problem)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    torch.testing.assert_close(problem.vector, start - 0.5 * inverse @ slope, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(optimizer.update_norm, (inverse @ slope).norm(), rtol=1e-6, atol=0)


def test_a_few_pairs_leave_the_rest_at_the_damping():
    matrix, theta, problem = parabola()
    g = torch.randn(len(VALUES), generator=generator(2, "g"), dtype=torch.float64)
    optimizer = LanczosNewton([theta], 1.0, 0.4, pairs=5)
    optimizer.observe(problem)
    Phi = optimizer.state[theta]["ritz_vectors"]
    ritz = optimizer.state[theta]["ritz_values"]
    torch.testing.assert_close(Phi @ Phi.T, torch.eye(5, dtype=torch.float64), rtol=0, atol=1e-9)
    torch.testing.assert_close((Phi @ matrix @ Phi.T).diagonal().abs(), ritz, rtol=1e-9, atol=1e-10)
    start, theta.grad = theta.detach().clone(), g
    optimizer.step()
    outside = g - Phi.T @ (Phi @ g)
    expected = Phi.T @ ((Phi @ g) / (ritz + 0.4)) + outside / 0.4
    torch.testing.assert_close(start - theta.detach(), expected)


def test_without_pairs_it_is_sgd_at_rate_over_damping():
    model, x, y = classifier("relu")
    other = copy.deepcopy(model)
    settings = {"momentum": 0.9, "weight_decay": 0.01}
    optimizer = LanczosNewton(model.parameters(), 0.2, 4.0, pairs=0, **settings)
    sgd = torch.optim.SGD(other.parameters(), 0.05, **settings)
    assert not optimizer.due
    for _ in range(6):
        for net, opt in ((model, optimizer), (other, sgd)):
            opt.zero_grad()
            F.cross_entropy(net(x), y).backward()
            opt.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-13)


def test_newton_minimises_a_convex_quadratic_in_one_step():
    matrix = with_eigenvalues(torch.linspace(0.5, 4.0, 8, dtype=torch.float64))
    theta = nn.Parameter(torch.ones(8, dtype=torch.float64))
    optimizer = LanczosNewton([theta], 1.0, 1e-6, pairs=8)
    optimizer.observe(quadratic(matrix, theta=theta))
    theta.grad = matrix @ theta.detach()
    optimizer.step()
    assert float(theta.detach().norm()) < 1e-5


def test_eta_slows_the_sharp_directions_alone():
    matrix, theta, _ = parabola()
    g = torch.randn(len(VALUES), generator=generator(2, "g"), dtype=torch.float64)
    steps = {}
    for eta in (1.0, 10.0):
        probe = nn.Parameter(theta.detach().clone())
        optimizer = LanczosNewton([probe], 1.0, 0.1, pairs=6, eta=eta)
        optimizer.observe(quadratic(matrix, theta=probe))
        probe.grad = g
        optimizer.step()
        steps[eta] = theta.detach() - probe.detach()
    Phi, ritz = (optimizer.state[probe][name] for name in ("ritz_vectors", "ritz_values"))
    torch.testing.assert_close(
        Phi @ steps[10.0], Phi @ steps[1.0] * (ritz + 0.1) / (10 * ritz + 0.1)
    )
    flat = [step - Phi.T @ (Phi @ step) for step in steps.values()]
    torch.testing.assert_close(*flat)


def test_sharp_directions_stay_slow_at_little_damping_in_float32():
    values = torch.cat([torch.linspace(50.0, 400.0, 10), torch.linspace(0.0, 0.1, 290)])
    matrix = with_eigenvalues(values)
    theta = nn.Parameter(torch.ones(300))
    optimizer = LanczosNewton([theta], 1.0, 1e-4, pairs=60)
    optimizer.observe(quadratic(matrix.float(), theta=theta))
    sharp = torch.linalg.eigh(matrix).eigenvectors[:, -1].float()
    theta.grad = sharp.clone()
    optimizer.step()
    step = torch.ones(300) - theta.detach()
    assert float(step @ sharp) == pytest.approx(1 / 400, rel=0.05)


def test_due_every_so_many_steps():
    matrix, theta, problem = parabola()
    optimizer = LanczosNewton([theta], 0.0, 1.0, pairs=3, every=3)
    seen = []
    for _ in range(7):
        seen.append(optimizer.due)
        if optimizer.due:
            optimizer.observe(problem)
            assert not optimizer.due
        theta.grad = matrix @ theta.detach()
        optimizer.step()
    assert seen == [True, False, False, True, False, False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_resumes_bit_for_bit(dtype):
    model, x, y = classifier("relu")
    model, x = model.to(dtype), x.to(dtype)

    def build(model):
        groups = [
            {"params": list(model.parameters())[:2]},
            {"params": list(model.parameters())[2:], "lr": 0.05},
        ]
        return LanczosNewton(groups, 0.1, 0.5, 4, every=3, momentum=0.9, weight_decay=1e-3)

    def advance(model, optimizer, steps):
        for _ in range(steps):
            if optimizer.due:
                optimizer.observe(lh.Problem(model, "cross_entropy", (x, y)))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    optimizer = build(model)
    advance(model, optimizer, 4)
    buffer = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], buffer)
    buffer.seek(0)
    weights, state = torch.load(buffer)
    other = mlp([4, 5, 3], "relu").to(dtype)
    other.load_state_dict(weights)
    again = build(other)
    again.load_state_dict(state)
    advance(model, optimizer, 4)
    advance(other, again, 4)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def step_unseen(**settings):
    theta = nn.Parameter(torch.ones(3))
    theta.grad = torch.ones(3)
    LanczosNewton([theta], 0.1, 1.0, **settings).step()


def observe(theta, **settings):
    LanczosNewton([theta], 0.1, 1.0, **settings).observe(parabola()[2])


MISUSES = {
    "no damping": (
        lambda t: LanczosNewton([t], 0.1, 0.0),
        ValueError,
        "damping must be a finite number above 0",
    ),
    "negative pairs": (
        lambda t: LanczosNewton([t], 0.1, 1.0, -1),
        ValueError,
        "pairs must be an integer of at least",
    ),
    "unknown curvature": (
        lambda t: LanczosNewton([t], 0.1, 1.0, curvature="hessian"),
        ValueError,
        "curvature must be one of 'absolute_hessian', 'ggn'",
    ),
    "eta of 0": (
        lambda t: LanczosNewton([t], 0.1, 1.0, eta=0),
        ValueError,
        "eta must be a finite number above 0",
    ),
    "every 0 steps": (
        lambda t: LanczosNewton([t], 0.1, 1.0, every=0),
        ValueError,
        "every must be an integer of at",
    ),
    "no observation": (
        lambda t: step_unseen(),
        RuntimeError,
        r"observe\(problem\) must be called before the first",
    ),
    "more pairs than parameters": (
        lambda t: observe(parabola()[1], pairs=99),
        ValueError,
        r"pairs must lie in",
    ),
    "another point": (
        lambda t: observe(t),
        ValueError,
        "problem must be at the optimiser's present parameters",
    ),
    "another shape": (
        lambda t: observe(nn.Parameter(torch.ones(2))),
        ValueError,
        "problem must have parameters of shapes",
    ),
    "a model": (
        lambda t: LanczosNewton([t], 0.1, 1.0).observe(nn.Linear(2, 2)),
        TypeError,
        "problem must be a lambdahat.Prob",
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_refused_with_the_cure(name):
    call, error, text = MISUSES[name]
    with pytest.raises(error, match=text):
        call(nn.Parameter(torch.ones(len(VALUES), dtype=torch.float64)))
