"""MALA and HMC: reversible, exact whatever the step, with the acceptance that quadrature gives."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from lambdahat._rng import generator
from lambdahat.sampling import Streams, hmc, mala, sgld
from lambdahat.sampling.hamiltonian import HMC
from lambdahat.sampling.kernels import Evaluate

MANY = 20_000


class Given(Streams):
    """The momentum asked for, and a coin that accepts whatever can be accepted."""

    def __init__(self, momentum: Tensor) -> None:
        super().__init__(0, [0])
        self.momentum = momentum

    def normal_(self, out: Tensor) -> Tensor:
        return out.copy_(self.momentum)

    def uniform(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(count, dtype=dtype)


def double_well(w: Tensor) -> tuple[Tensor, Tensor]:
    """L(w) = Σ ¼w_i⁴ − ½w_i² + 0.3w_i."""
    return (w**4 / 4 - w**2 / 2 + 0.3 * w).sum(-1), w**3 - w + 0.3


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed, "test"), dtype=torch.float64)


def flown(kernel: HMC, start: Tensor, momentum: Tensor, step: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Where a trajectory ends, its momentum there, and the rise of H = nβL + ½γ‖w‖² + ½‖p‖² along it."""
    path = [start]

    def evaluate(at: Tensor) -> tuple[Tensor, Tensor]:
        path.append(at.clone())
        return double_well(at)

    state = kernel.init(start, torch.zeros(start.shape[-1]).double())
    state.steps = step
    kernel.step(state, evaluate, Given(momentum))
    length, gamma = math.sqrt(kernel.step_size), float(kernel.localization)
    force = kernel.nbeta * double_well(path[-1])[1] + gamma * path[-1]
    last = (path[-1] - path[-2]) / length - length / 2 * force

    def energy(at: Tensor, p: Tensor) -> Tensor:
        return kernel.nbeta * double_well(at)[0] + 0.5 * gamma * at.square().sum(-1) + 0.5 * p.square().sum(-1)

    return path[-1], last, energy(path[-1], last) - energy(start, momentum)


@pytest.mark.parametrize("step", range(4))
def test_a_trajectory_run_backwards_returns(step):
    kernel = hmc(0.01, 1.5, 0.2, leapfrog=5)
    start, momentum = normal(7, 3), normal(7, 3, seed=1)
    end, last, _ = flown(kernel, start, momentum, step)
    back, first, _ = flown(kernel, end, -last, step)
    assert (end - start).abs().max() > 0.05
    assert (back - start).abs().max() < 1e-10
    assert (first + momentum).abs().max() < 1e-10


def test_the_energy_error_of_a_trajectory_falls_with_the_square_of_its_step():
    """Twice the steps of half the length √ε: a quarter of the error."""
    start, momentum = normal(50, 3), normal(50, 3, seed=1)
    errors = []
    for halvings in range(3):
        kernel = hmc(0.09 / 4 ** (halvings + 2), 1.5, leapfrog=8 * 2**halvings)
        object.__setattr__(kernel, "trajectory", lambda step, count=8 * 2**halvings: count)
        errors.append(float(flown(kernel, start, momentum)[2].abs().mean()))
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.03)


def test_the_acceptance_is_that_of_the_energy():
    kernel, start, momentum = hmc(0.3, 1.5, 0.2, leapfrog=3), normal(50, 3), normal(50, 3, seed=1)
    _, _, rise = flown(kernel, start, momentum)
    state = kernel.init(start, torch.zeros(3).double())
    _, info = kernel.step(state, double_well, Given(momentum))
    assert torch.allclose(info.acceptance, (-rise).exp().clamp(max=1.0))
    assert (rise > 0.01).any()
    assert (rise < -0.01).any()


def test_the_proposal_of_mala_is_a_step_of_sgld():
    start, centre = normal(5, 3), normal(3, seed=2)
    moved = [kernel.step(kernel.init(start, centre), double_well, Given(normal(5, 3, seed=1)))[0].position
             for kernel in (mala(0.01, 2.0, 0.3), sgld(0.01, 2.0, 0.3))]  # fmt: skip
    assert torch.allclose(*moved, rtol=1e-13)


def test_trajectories_run_over_all_lengths_evenly():
    kernel = hmc(0.1, 1.0, leapfrog=4)
    lengths = np.bincount([kernel.trajectory(step) for step in range(700)], minlength=8)
    assert lengths[0] == 0
    assert len(lengths) == 8
    assert np.abs(lengths[1:] - 100).max() <= 3
    assert {mala(0.1, 1.0).trajectory(step) for step in range(20)} == {1}


# Exact whatever the step


@pytest.mark.parametrize(("epsilon", "leapfrog"), [(0.05, 4), (0.6, 1), (1.5, 1), (1.5, 3)])
def test_the_law_of_a_quadratic_does_not_depend_on_the_step(epsilon, leapfrog):
    """SGLD of ε = 1.5 would have 1.6 times the variance along the steepest direction."""
    h, gamma = torch.tensor([1.0, 0.4]).double(), torch.tensor([0.0, 0.2]).double()
    kernel, rng = hmc(epsilon, 1.0, gamma, leapfrog=leapfrog), Streams(0, [0])
    state = kernel.init(torch.zeros(MANY, 2).double())
    for _ in range(60):
        state, _ = kernel.step(state, lambda w: (0.5 * (h * w * w).sum(-1), h * w), rng)
    for column, precision in zip(state.position.T, h + gamma, strict=True):
        standard = (column * precision.sqrt()).numpy()
        assert scipy.stats.kstest(standard, "norm").pvalue > 1e-3
        assert abs(standard.mean()) < 4 / math.sqrt(MANY)
        assert abs(standard.var() - 1) < 4 * math.sqrt(2 / MANY)
        assert abs((standard**4).mean() - 3) < 4 * math.sqrt(96 / MANY)


def quartic_law(nbeta: float) -> tuple[np.ndarray, np.ndarray]:
    """Points and probabilities of exp(−nβ·L) for the double well in one dimension."""
    grid = np.linspace(-4, 4, 4001)
    weight = np.exp(-nbeta * (grid**4 / 4 - grid**2 / 2 + 0.3 * grid))
    return grid, weight / weight.sum()


def from_law(count: int, nbeta: float) -> Tensor:
    """Independent draws of the double well's law by its inverse distribution function."""
    grid, weight = quartic_law(nbeta)
    uniform = torch.rand(count, generator=generator(3, "test"), dtype=torch.float64).numpy()
    return torch.from_numpy(np.interp(uniform, np.cumsum(weight), grid + (grid[1] - grid[0]) / 2)).unsqueeze(1)


def one_step(kernel: HMC, start: Tensor, evaluate: Evaluate, step: int = 0) -> tuple[Tensor, Tensor]:
    state = kernel.init(start, torch.zeros(1).double())
    state.steps = step
    state, info = kernel.step(state, evaluate, Streams(8, [0]))
    assert info.acceptance is not None
    return state.position, info.acceptance


@pytest.mark.parametrize("kernel", [mala(0.8, 2.0), hmc(0.4, 2.0, leapfrog=3)], ids=["mala", "hmc"])
@pytest.mark.parametrize("step", [0, 1])
def test_detailed_balance(kernel, step):
    """From the law itself, a move and its reverse are as likely: E[f(w)g(w′)] = E[g(w)f(w′)]."""
    before = from_law(10 * MANY, 2.0)
    after, acceptance = one_step(kernel, before, double_well, step)
    assert 0.5 < float(acceptance.mean()) < 0.99
    functions: list[Callable[[Tensor], Tensor]] = [lambda w: w, lambda w: w**2, torch.sign, torch.exp]
    for i, f in enumerate(functions):
        for g in functions[:i]:
            difference = f(before) * g(after) - g(before) * f(after)
            error = float(difference.std()) / math.sqrt(len(difference))
            assert abs(float(difference.mean())) < 4 * error
    grid, weight = quartic_law(2.0)
    law = lambda w: np.interp(w, grid + (grid[1] - grid[0]) / 2, np.cumsum(weight))  # noqa: E731
    assert scipy.stats.kstest(after.squeeze(1).numpy()[:MANY], law).pvalue > 1e-3


@pytest.mark.parametrize("epsilon", [0.1, 0.8])
def test_the_acceptance_of_mala_is_that_of_quadrature(epsilon):
    """∫∫ min(1, exp(−ΔH)) over the law of w and a normal momentum."""
    _, seen = one_step(mala(epsilon, 2.0), from_law(10 * MANY, 2.0), double_well)
    grid, weight = quartic_law(2.0)
    momenta = np.linspace(-6, 6, 1201)
    density = np.exp(-(momenta**2) / 2)
    w, p = grid[::4, None], momenta[None, :]
    loss, slope = (lambda x: 2.0 * (x**4 / 4 - x**2 / 2 + 0.3 * x)), (lambda x: 2.0 * (x**3 - x + 0.3))
    half = p - math.sqrt(epsilon) / 2 * slope(w)
    there = w + math.sqrt(epsilon) * half
    last = half - math.sqrt(epsilon) / 2 * slope(there)
    rise = loss(there) - loss(w) + (last**2 - p**2) / 2
    accepted = np.exp(-np.maximum(rise, 0))
    exact = (weight[::4, None] * density * accepted).sum() / (weight[::4].sum() * density.sum())
    assert abs(float(seen.mean()) - exact) < 4 * float(seen.std()) / math.sqrt(len(seen))
    assert exact < (0.999 if epsilon < 0.5 else 0.9)


# What is kept between steps


def test_evaluations_are_counted_and_not_repeated():
    calls = []

    def counted(at: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(at.shape)
        return double_well(at)

    kernel, rng, spent = hmc(0.1, 2.0, leapfrog=3), Streams(0, [0]), 0
    state = kernel.init(normal(4, 2))
    for _ in range(5):
        state, info = kernel.step(state, counted, rng)
        spent += info.gradients
    assert len(calls) == spent == 1 + sum(kernel.trajectory(step) for step in range(5))


def test_what_is_kept_belongs_to_where_the_chain_is():
    kernel, rng = mala(0.9, 2.0, 0.4), Streams(0, [0])
    state = kernel.init(normal(40, 2), torch.ones(2).double())
    for _ in range(3):
        before = state.position.clone()
        state, info = kernel.step(state, double_well, rng)
        loss, slope = double_well(state.position)
        stayed = (state.position == before).all(1)
        assert 0 < stayed.sum() < 40
        force = 2.0 * slope + 0.4 * (state.position - 1)
        assert torch.allclose(info.loss, loss)
        assert torch.allclose(info.force_square, force.square().sum(1))
        assert torch.allclose(info.distance, (state.position - 1).norm(dim=1))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_trajectory_into_nowhere_is_rejected(bad):
    def cliff(at: Tensor) -> tuple[Tensor, Tensor]:
        loss, slope = double_well(at)
        beyond = at.abs().amax(-1) > 1
        return torch.where(beyond, bad, loss), torch.where(beyond.unsqueeze(-1), bad, slope)

    kernel, rng = hmc(0.5, 1.0, leapfrog=2), Streams(0, [0])
    state, seen = kernel.init(torch.zeros(50, 2).double()), []
    for _ in range(10):
        state, info = kernel.step(state, cliff, rng)
        seen.append(info.acceptance)
        assert state.position.abs().max() <= 1
        assert info.loss.isfinite().all()
    assert (torch.stack(seen) == 0).any()
