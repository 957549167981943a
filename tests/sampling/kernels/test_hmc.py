"""MALA and HMC: reversible, exact whatever the step, with the acceptance that quadrature gives."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from lambdahat._core.rng import generator
from lambdahat.sampling import Streams, hmc, mala, sgld
from lambdahat.sampling.kernels import HMC, Evaluate

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


def flown(
    kernel: HMC, start: Tensor, momentum: Tensor, step: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """The places of a trajectory, its momenta and the rise of H = nβL + ½γ‖w‖² + ½‖p‖² since the
    start.

    A momentum is read off two places: p_i = (w_i − w_{i−1})/δ − (δ/2)∇U(w_i).
    """
    path = []

    def evaluate(at: Tensor) -> tuple[Tensor, Tensor]:
        path.append(at.clone())
        return double_well(at)

    state = kernel.init(start, torch.zeros(start.shape[-1]).double())
    state.steps = step
    kernel.step(state, evaluate, Given(momentum))
    places, (_, length) = torch.stack(path), kernel.trajectory(step)
    loss, slope = double_well(places)
    force = kernel.nbeta * slope + float(kernel.localization) * places
    momenta = torch.cat([momentum[None], places.diff(dim=0) / length - length / 2 * force[1:]])
    tie = 0.5 * float(kernel.localization) * places.square().sum(-1)
    energy = kernel.nbeta * loss + tie + 0.5 * momenta.square().sum(-1)
    return places, momenta, energy - energy[0]


@pytest.mark.parametrize("step", range(4))
def test_a_trajectory_run_backwards_returns(step):
    kernel = hmc(0.04, 1.5, 0.2, leapfrog=5)
    start, momentum = normal(7, 3), normal(7, 3, seed=1)
    places, momenta, _ = flown(kernel, start, momentum, step)
    back, backwards, _ = flown(kernel, places[-1], -momenta[-1], step)
    assert len(places) == 1 + kernel.trajectory(step)[0]
    assert (places[-1] - start).abs().max() > 0.05
    assert (back - places.flip(0)).abs().max() < 1e-10
    assert (backwards + momenta.flip(0)).abs().max() < 1e-10


def test_the_energy_error_of_a_trajectory_falls_with_the_square_of_its_step():
    """Twice the steps of half the length √ε: a quarter of the error."""
    start, momentum = normal(50, 3), normal(50, 3, seed=1)
    errors = []
    for halvings in range(3):
        kernel, plan = hmc(1.0, 1.5), (8 * 2**halvings, 0.075 / 2**halvings)
        object.__setattr__(kernel, "trajectory", lambda step, plan=plan: plan)
        errors.append(float(flown(kernel, start, momentum)[2][-1].abs().mean()))
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.03)


@pytest.mark.parametrize("forces", [False, True])
def test_the_acceptance_is_that_of_the_energy(forces):
    """Of the last place, or, where means are taken over trajectories, the mean of all."""
    kernel, start, momentum = hmc(0.4, 1.5, 0.2, leapfrog=4), normal(50, 3), normal(50, 3, seed=1)
    places, _, rise = flown(kernel, start, momentum)
    accepted = (-rise).exp().clamp(max=1.0)
    assert (rise[1:] > 0.01).any()
    assert (rise[1:] < -0.01).any()
    state = kernel.init(start, torch.zeros(3).double())
    state.forces = forces
    state, info = kernel.step(state, double_well, Given(momentum))
    assert torch.allclose(state.position, places[-1])
    assert torch.allclose(info.acceptance, accepted[1:].mean(0) if forces else accepted[-1])
    if forces:
        loss, slope = double_well(places)
        virial = (places * (1.5 * slope + 0.2 * places)).sum(-1)
        spread = places.square().sum(-1) * (virial - 3 - 2)
        for seen, values in ((info.recycled, loss), (info.virial, virial), (info.spread, spread)):
            assert torch.allclose(
                seen, (accepted * values + (1 - accepted) * values[0])[1:].mean(0)
            )


def test_the_proposal_of_mala_is_a_step_of_sgld():
    start, centre = normal(5, 3), normal(3, seed=2)
    moved = [
        kernel.step(kernel.init(start, centre), double_well, Given(normal(5, 3, seed=1)))[
            0
        ].position
        for kernel in (mala(0.01, 2.0, 0.3), sgld(0.01, 2.0, 0.3))
    ]
    assert torch.allclose(*moved, rtol=1e-13)


def test_trajectories_run_over_all_lengths_evenly():
    kernel = hmc(0.09, 1.0, leapfrog=20, jitter=0.2)
    counts, lengths = zip(*(kernel.trajectory(step) for step in range(500)), strict=True)
    assert set(counts) == set(range(3, 21))
    for values, least, most in ((np.array(counts) + 0.5, 3.0, 21.0), (lengths, 0.06, 0.3)):
        uniform = np.log(np.array(values) / least) / np.log(most / least)
        assert np.abs(np.sort(uniform) - np.linspace(0, 1, 500)).max() < 0.12, "log-uniform"
    assert 0.06 <= min(lengths) < max(lengths) <= 0.3
    assert abs(np.corrcoef(counts, lengths)[0, 1]) < 0.1
    assert {mala(0.09, 1.0).trajectory(step) for step in range(20)} == {(1, 0.3)}


# Exact whatever the step


@pytest.mark.parametrize(("epsilon", "leapfrog"), [(0.05, 4), (0.6, 1), (1.5, 1), (1.5, 3)])
def test_the_law_of_a_quadratic_does_not_depend_on_the_step(epsilon, leapfrog):
    """SGLD of ε = 1.5 would have 1.6 times the variance along the steepest direction."""
    h, gamma = torch.tensor([1.0, 0.4]).double(), torch.tensor([0.0, 0.2]).double()
    kernel, rng = (
        hmc(epsilon, 1.0, gamma, leapfrog=leapfrog, jitter=1.0 if leapfrog == 1 else 0.3),
        Streams(0, [0]),
    )
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
    return torch.from_numpy(
        np.interp(uniform, np.cumsum(weight), grid + (grid[1] - grid[0]) / 2)
    ).unsqueeze(1)


def one_step(
    kernel: HMC, start: Tensor, evaluate: Evaluate, step: int = 0
) -> tuple[Tensor, Tensor]:
    state = kernel.init(start, torch.zeros(1).double())
    state.steps = step
    state, info = kernel.step(state, evaluate, Streams(8, [0]))
    assert info.acceptance is not None
    return state.position, info.acceptance


@pytest.mark.parametrize(
    "kernel", [mala(0.8, 2.0), hmc(0.6, 2.0, leapfrog=4, jitter=0.5)], ids=["mala", "hmc"]
)
@pytest.mark.parametrize("step", [0, 1])
def test_detailed_balance(kernel, step):
    """From the law itself, a move and its reverse are as likely: E[f(w)g(w′)] = E[g(w)f(w′)]."""
    before = from_law(10 * MANY, 2.0)
    after, acceptance = one_step(kernel, before, double_well, step)
    assert 0.5 < float(acceptance.mean()) < 0.995
    functions: list[Callable[[Tensor], Tensor]] = [
        lambda w: w,
        lambda w: w**2,
        torch.sign,
        torch.exp,
    ]
    for i, f in enumerate(functions):
        for g in functions[:i]:
            difference = f(before) * g(after) - g(before) * f(after)
            error = float(difference.std()) / math.sqrt(len(difference))
            assert abs(float(difference.mean())) < 4 * error
    grid, weight = quartic_law(2.0)
    law = lambda w: np.interp(w, grid + (grid[1] - grid[0]) / 2, np.cumsum(weight))  # noqa: E731
    assert scipy.stats.kstest(after.squeeze(1).numpy()[:MANY], law).pvalue > 1e-3


@pytest.mark.parametrize("kernel", [mala(0.8, 2.0), hmc(0.6, 2.0, leapfrog=6)], ids=["mala", "hmc"])
def test_means_over_trajectories_are_right_and_sharper(kernel):
    """E[L], E[w·∇U] = P and E[w²(w·∇U − P − 2)] = 0 under the law, with less noise than the loss
    of the last place.
    """
    state = kernel.init(from_law(10 * MANY, 2.0), torch.zeros(1).double())
    _, info = kernel.step(state, double_well, Streams(8, [0]))
    grid, weight = quartic_law(2.0)
    exact = float((weight * (grid**4 / 4 - grid**2 / 2 + 0.3 * grid)).sum())
    means = (info.loss, exact), (info.recycled, exact), (info.virial, 1.0), (info.spread, 0.0)
    for values, value in means:
        assert abs(float(values.mean()) - value) < 4 * float(values.std()) / math.sqrt(len(values))
    assert info.recycled.std() < info.loss.std()


@pytest.mark.parametrize("epsilon", [0.1, 0.8])
def test_the_acceptance_of_mala_is_that_of_quadrature(epsilon):
    """∫∫ min(1, exp(−ΔH)) over the law of w and a normal momentum."""
    _, seen = one_step(mala(epsilon, 2.0), from_law(10 * MANY, 2.0), double_well)
    grid, weight = quartic_law(2.0)
    momenta = np.linspace(-6, 6, 1201)
    density = np.exp(-(momenta**2) / 2)
    w, p = grid[::4, None], momenta[None, :]
    loss, slope = (
        (lambda x: 2.0 * (x**4 / 4 - x**2 / 2 + 0.3 * x)),
        (lambda x: 2.0 * (x**3 - x + 0.3)),
    )
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
    assert len(calls) == spent == 1 + sum(kernel.trajectory(step)[0] for step in range(5))


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
