"""Kernels against the exact laws of linear recursions: on a quadratic every step is linear in
the state.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import scipy.optimize
import scipy.stats
import torch
from torch import Tensor

from lambdahat._core.rng import generator
from lambdahat.sampling import State, Streams, hmc, kinetic, mala, rmsprop_sgld, sghmc, sgld, sgnht
from lambdahat.sampling.kernels import Evaluate, Info, Kernel
from tests.cases import with_eigenvalues

CURVATURES = torch.tensor([3.0, 1.0, 0.3, 0.1], dtype=torch.float64)
GAMMA = torch.tensor([0.5, 2.0, 0.0, 1.0], dtype=torch.float64)
EPSILON, NBETA = 0.1, 10.0
MANY = 8192


def bowl(h: Tensor) -> Evaluate:
    """L(w) = ½ Σ h_i w_i²."""
    return lambda w: (0.5 * (h * w * w).sum(-1), h * w)


def ellipse(matrix: Tensor) -> Evaluate:
    """L(w) = ½ wᵀAw."""
    return lambda w: (0.5 * (w @ matrix * w).sum(-1), w @ matrix)


def walked(
    kernel: Kernel,
    evaluate: Evaluate,
    start: Tensor,
    steps: int,
    after: Callable[[State], Any] = lambda state: None,
) -> tuple[State, Info]:
    """Chains after some steps, all of one stream."""
    state, rng = kernel.init(start), Streams(0, [0])
    for _ in range(steps):
        state, info = kernel.step(state, evaluate, rng)
        after(state)
    return state, info


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed, "test"), dtype=torch.float64)


def z_of_square(samples: Tensor, exact: Any) -> Tensor:
    """(mean of squares − exact)/error for each column of independent centred normal samples."""
    exact = torch.as_tensor(exact, dtype=torch.float64)
    return (samples.square().mean(0) - exact) / (exact * math.sqrt(2 / len(samples)))


def underdamped(a: float, friction: float, diffusion: float, extra: float = 0.0) -> np.ndarray:
    """The covariance of (w, v) under v ← (1 − α)v − (ε/2)(aw + noise of variance ``extra``) +
    √(dε)·ξ, w ← w + v.
    """
    pull = EPSILON / 2 * a
    step = np.array([[1 - pull, 1 - friction], [-pull, 1 - friction]])
    heat = diffusion * EPSILON + (EPSILON / 2) ** 2 * extra
    return scipy.linalg.solve_discrete_lyapunov(step, heat * np.ones((2, 2)))


def splitting(a: float, h: float, friction: float, extra: float = 0.0) -> np.ndarray:
    """The covariance of (w, v) under BAOAB steps of length h; ``extra`` is the variance of the
    force's noise.
    """
    kept = math.exp(-friction * h)
    kick = np.array([[1.0, 0.0], [-h * a, 1.0]])
    drift, damp = np.array([[1.0, h / 2], [0.0, 1.0]]), np.diag([1.0, kept])
    fresh, late = drift @ damp @ drift @ [0.0, h], drift @ [0.0, math.sqrt(1 - kept**2)]
    heat = extra * np.outer(fresh, fresh) + np.outer(late, late)
    return scipy.linalg.solve_discrete_lyapunov(drift @ damp @ drift @ kick, heat)


# The step, written out


def test_an_sgld_step_is_the_equation():
    kernel, at, centre = sgld(EPSILON, NBETA, GAMMA), normal(3, 4), normal(4, seed=1)
    state, info = kernel.step(kernel.init(at, centre), bowl(CURVATURES), Streams(5, [0, 1, 2]))
    noise = torch.stack(
        [torch.empty(4).double().normal_(generator=generator(5, "chain", i)) for i in range(3)]
    )
    force = NBETA * CURVATURES * at + GAMMA * (at - centre)
    assert torch.allclose(
        state.position, at - EPSILON / 2 * force + math.sqrt(EPSILON) * noise, rtol=1e-13
    )
    assert torch.allclose(info.loss, 0.5 * (CURVATURES * at * at).sum(1))
    assert torch.allclose(info.distance, (at - centre).norm(dim=1))
    assert torch.allclose(info.force_square, force.square().sum(1))
    assert torch.allclose(info.virial, (force * (at - centre)).sum(1))
    assert (info.acceptance, info.gradients, state.steps) == (None, 1, 1)


@pytest.mark.parametrize("make", [sgld, kinetic, rmsprop_sgld, sghmc, sgnht, mala, hmc])
def test_what_a_step_tells_of_the_force_is_its_own_and_on_request(make):
    kernel, ways = make(1e-3, NBETA, GAMMA), []
    for asked in (True, False):
        state = kernel.init(normal(3, 4), torch.zeros(4).double())
        state.forces = asked
        ways.append(kernel.step(state, bowl(CURVATURES), Streams(0, [0])))
    (first, told), (second, silent) = ways
    assert torch.equal(first.position, second.position)
    assert torch.equal(told.loss, silent.loss)
    assert torch.equal(told.distance, silent.distance)
    assert silent.force_square is silent.virial is silent.recycled is None
    assert (told.recycled is not None) == kernel.exact


def test_rmsprop_steps_are_the_equation():
    kernel = rmsprop_sgld(EPSILON, NBETA, 0.7, decay=0.9, epsilon=0.2)
    state, _ = walked(kernel, bowl(CURVATURES), normal(4), 3)
    w, squares, stream = normal(4), torch.ones(4).double(), generator(0, "chain", 0)
    for _ in range(3):
        slope = CURVATURES * w
        squares = 0.9 * squares + 0.1 * slope**2
        metric = 1 / (squares.sqrt() + 0.2)
        noise = torch.empty(4).double().normal_(generator=stream)
        force = NBETA * slope + 0.7 * (w - normal(4))
        w = w - EPSILON / 2 * metric * force + (EPSILON * metric).sqrt() * noise
    assert torch.allclose(state.position, w, rtol=1e-12)


@pytest.mark.parametrize("friction", [None, 3.0])
def test_a_kinetic_step_is_the_equation(friction):
    """The default friction is 2√γ, γ the mean over the parameters."""
    kernel, h, at = kinetic(0.2, NBETA, GAMMA, friction=friction), 0.2, normal(4)
    state, stream = kernel.init(at, torch.zeros(4).double()), generator(0, "chain", 0)
    kept = math.exp(-h * (2 * math.sqrt(float(GAMMA.mean())) if friction is None else friction))
    w, v, rng = at.clone(), torch.zeros(4).double(), Streams(0, [0])
    for _ in range(3):
        v = v - h * (NBETA * CURVATURES * w + GAMMA * w)
        middle = w + h / 2 * v
        v = kept * v + math.sqrt(1 - kept**2) * torch.empty(4).double().normal_(generator=stream)
        w = middle + h / 2 * v
        state, info = kernel.step(state, bowl(CURVATURES), rng)
    assert torch.allclose(state.position, w, rtol=1e-12)
    assert torch.allclose(state.memory["velocity"], v, rtol=1e-12)
    assert (info.acceptance, info.gradients, state.steps) == (None, 1, 3)


# The stationary laws


@pytest.mark.parametrize("gamma", [0.5, GAMMA], ids=["number", "vector"])
@pytest.mark.parametrize(("step", "friction"), [(0.1, 1.0), (0.3, 4.0), (0.345, 30.0)])
def test_kinetic_positions_have_the_exact_variance_at_any_stable_step(step, friction, gamma):
    """E[w²] = 1/a for every h < 2/√a, here up to 0.96 of it; λ̂ = ½Σ nβh/a then has no bias of
    the step.
    """
    a = NBETA * CURVATURES + gamma
    for value in a.tolist():
        assert splitting(value, step, friction)[0, 0] == pytest.approx(1 / value, rel=1e-10)
    kernel = kinetic(step, NBETA, gamma, friction=friction)
    start = torch.randn(MANY, 4, generator=generator(3, "start"), dtype=torch.float64) / a.sqrt()
    state, rng = kernel.init(start, torch.zeros(4).double()), Streams(0, [0])
    for _ in range(60):
        state, info = kernel.step(state, bowl(CURVATURES), rng)
    assert z_of_square(state.position, 1 / a).abs().max() < 4
    estimate, value = NBETA * info.loss, 0.5 * float((NBETA * CURVATURES / a).sum())
    assert abs(float(estimate.mean()) - value) < 4 * float(estimate.std()) / math.sqrt(MANY)


@pytest.mark.parametrize("gamma", [0.0, 0.5, GAMMA], ids=["none", "number", "vector"])
def test_sgld_has_its_exact_law_at_a_finite_step(gamma):
    """E[w²] = 1/[a(1 − εa/4)], and E[λ̂] = ½ Σ nβh/[a(1 − εa/4)], a = nβh + γ: up to 4.2 times
    the posterior's here.
    """
    a = NBETA * CURVATURES + gamma
    exact = 1 / (a * (1 - EPSILON * a / 4))
    state, info = walked(
        sgld(EPSILON, NBETA, gamma), bowl(CURVATURES), torch.zeros(MANY, 4).double(), 250
    )
    assert (1 - EPSILON * a.min() / 2) ** 500 < 1e-3, "the chains have forgotten their start"
    assert z_of_square(state.position, exact).abs().max() < 4
    estimate = NBETA * info.loss
    value = 0.5 * float((NBETA * CURVATURES * exact).sum())
    assert abs(float(estimate.mean()) - value) < 4 * float(estimate.std()) / math.sqrt(MANY)


@pytest.mark.parametrize("friction", [0.1, 0.4, 1.0])
def test_sghmc_has_the_law_of_its_recursion(friction):
    kernel = sghmc(EPSILON, NBETA, 0.5, friction=friction)
    state, _ = walked(kernel, bowl(CURVATURES), torch.zeros(MANY, 4).double(), 300)
    velocity = state.memory["velocity"]
    for i, h in enumerate(CURVATURES):
        exact = underdamped(NBETA * float(h) + 0.5, friction, friction)
        assert abs(z_of_square(state.position[:, i], exact[0, 0])) < 4
        assert abs(z_of_square(velocity[:, i], exact[1, 1])) < 4
        products = state.position[:, i] * velocity[:, i]
        assert abs(float(products.mean()) - exact[0, 1]) < 4 * float(products.std()) / math.sqrt(
            MANY
        )


def test_the_thermostat_takes_the_heat_of_noisy_gradients_away():
    """With gradients of variance σ² the friction settles where positions have the exact variance
    1/a.
    """
    a, diffusion, extra, count = 4.0, 0.1, 8.0, 4000
    friction = scipy.optimize.brentq(
        lambda x: underdamped(a, x, diffusion, extra)[0, 0] - 1 / a, 0.05, 1.0
    )
    exact = underdamped(a, friction, diffusion, extra)
    stream = generator(1, "batches")

    def noisy(w: Tensor) -> tuple[Tensor, Tensor]:
        slope = w + math.sqrt(extra) / a * torch.randn(w.shape, generator=stream, dtype=w.dtype)
        return 0.5 * w.square().sum(-1), slope

    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    kernel = sgnht(EPSILON, a, diffusion=diffusion)
    walked(
        kernel,
        noisy,
        torch.zeros(2, count).double(),
        600,
        lambda state: seen.append(
            (
                state.memory["friction"].mean(),
                state.position.square().mean(),
                state.memory["velocity"].square().mean(),
            )
        ),
    )
    means = [float(torch.stack(values[200:]).mean()) for values in zip(*seen, strict=True)]
    assert means == pytest.approx([friction, 1 / a, exact[1, 1]], rel=0.01)
    hot = underdamped(a, diffusion, diffusion, extra)[0, 0]
    assert hot > 1.5 * exact[0, 0], "without the thermostat the chain would be hot"


def test_noise_of_the_gradient_heats_kinetic_chains_as_their_recursion_says():
    """To first order the temperature rises by hV/(2ξ)."""
    a, step, friction, extra = 4.0, 0.05, 2.0, 8.0
    exact = splitting(a, step, friction, extra)
    assert exact[0, 0] == pytest.approx((1 + step * extra / (2 * friction)) / a, rel=0.02)
    stream = generator(1, "batches")

    def noisy(w: Tensor) -> tuple[Tensor, Tensor]:
        noise = torch.randn(w.shape, generator=stream, dtype=w.dtype)
        return 0.5 * w.square().sum(-1), w + math.sqrt(extra) / a * noise

    state, _ = walked(
        kinetic(step, a, friction=friction), noisy, torch.zeros(1, 20_000).double(), 300
    )
    assert z_of_square(state.position.T, exact[0, 0]).abs().max() < 4


# One kernel as another


@pytest.mark.parametrize(
    "scale", [None, torch.tensor([1.0, 2.0, 0.5, 1.5]).double()], ids=["plain", "scaled"]
)
def test_kinetic_dynamics_of_huge_friction_are_leimkuhler_and_matthews(scale):
    """w ← w − (ε/2)S²∇U + √ε·S(ξ_n + ξ_{n+1})/2 with ε = h², the first ξ of chains at rest 0."""
    kernels = [kinetic(0.2, NBETA, 0.5, scale, friction=friction) for friction in (1e6, math.inf)]
    state, infinite = (walked(kernel, bowl(CURVATURES), normal(4), 20)[0] for kernel in kernels)
    assert torch.equal(state.position, infinite.position)
    w, last, stream = normal(4), torch.zeros(4).double(), generator(0, "chain", 0)
    for _ in range(20):
        fresh = torch.empty(4).double().normal_(generator=stream)
        factor = 1.0 if scale is None else scale
        force = NBETA * CURVATURES * w + 0.5 * (w - normal(4))
        w = w - 0.02 * factor**2 * force + 0.1 * factor * (last + fresh)
        last = fresh
    assert torch.allclose(state.position, w, rtol=1e-10)


def test_sghmc_without_inertia_is_sgld():
    for scale in (None, torch.tensor([1.0, 2.0, 0.5, 1.5]).double()):
        runs = [
            walked(make, bowl(CURVATURES), normal(5, 4), 20)[0].position
            for make in (
                sgld(EPSILON, 1.0, 0.5, scale),
                sghmc(EPSILON, 1.0, 0.5, scale, friction=1.0),
            )
        ]
        assert torch.allclose(*runs, rtol=1e-12)


def test_sgnht_of_a_held_friction_is_sghmc():
    def hold(state: State) -> None:
        state.memory["friction"].fill_(0.3)

    thermostat, _ = walked(
        sgnht(EPSILON, NBETA, GAMMA, diffusion=0.3), bowl(CURVATURES), normal(5, 4), 20, hold
    )
    plain, _ = walked(
        sghmc(EPSILON, NBETA, GAMMA, friction=0.3), bowl(CURVATURES), normal(5, 4), 20
    )
    assert torch.allclose(thermostat.position, plain.position, rtol=1e-12)


def test_the_friction_of_a_thermostat_follows_the_heat():
    kernel = sgnht(EPSILON, NBETA, diffusion=0.3)
    state, _ = kernel.step(kernel.init(normal(5, 4)), bowl(CURVATURES), Streams(0, [0]))
    heat = state.memory["velocity"].square().mean(1, keepdim=True)
    assert torch.allclose(state.memory["friction"], 0.3 + (1 - 0.3 / 2) * heat - EPSILON / 2)


def test_rmsprop_that_never_learns_is_sgld_of_a_smaller_step():
    slow = rmsprop_sgld(EPSILON, NBETA, GAMMA, decay=1.0, epsilon=0.25)
    runs = [
        walked(kernel, bowl(CURVATURES), normal(5, 4), 20)
        for kernel in (slow, sgld(EPSILON / 1.25, NBETA, GAMMA))
    ]
    assert torch.allclose(runs[0][0].position, runs[1][0].position, rtol=1e-12)
    assert torch.allclose(runs[0][1].force_square * 1.25, runs[1][1].force_square)


KERNELS: dict[str, Kernel] = {
    "kinetic": kinetic(EPSILON, NBETA),
    "sgld": sgld(EPSILON, NBETA),
    "rmsprop": rmsprop_sgld(EPSILON, NBETA),
    "sghmc": sghmc(EPSILON, NBETA),
    "sgnht": sgnht(EPSILON, NBETA),
    "mala": mala(EPSILON, NBETA),
    "hmc": hmc(EPSILON, NBETA, leapfrog=3),
}


@pytest.mark.parametrize("name", ["sgld", "kinetic", "sghmc", "mala", "hmc"])
def test_a_preconditioned_chain_is_the_chain_of_the_transformed_quadratic(name):
    """With u = S⁻¹w the loss is ½uᵀ(SAS)u, and the noise is the same."""
    matrix, dense = (
        with_eigenvalues([0.5, 1.0, 2.0, 4.0]),
        with_eigenvalues([0.3, 0.6, 1.0, 1.2], seed=1),
    )
    diagonal, start = torch.tensor([0.5, 1.2, 0.8, 0.3]).double(), normal(6, 4)
    own = dataclasses.replace(KERNELS[name], nbeta=2.0)
    for scale in (diagonal, dense):
        full = torch.diag(scale) if scale.ndim == 1 else scale
        moved = start @ torch.linalg.inv(full)
        u, there = walked(own, ellipse(full @ matrix @ full), moved, 15)
        w, here = walked(dataclasses.replace(own, scale=scale), ellipse(matrix), start, 15)
        assert torch.allclose(w.position, u.position @ full, rtol=1e-9, atol=1e-11)
        assert torch.allclose(here.force_square, there.force_square, rtol=1e-9)
        assert not torch.allclose(w.position, start, atol=0.1)


@pytest.mark.parametrize("name", KERNELS)
def test_localization_as_a_number_and_as_a_vector(name):
    kinds = [
        dataclasses.replace(KERNELS[name], localization=gamma)
        for gamma in (1.5, torch.full((4,), 1.5).double(), 0.0)
    ]
    runs = [walked(kernel, bowl(CURVATURES), normal(3, 4), 8)[0].position for kernel in kinds]
    assert torch.allclose(runs[0], runs[1], rtol=1e-12)
    assert not torch.allclose(runs[0], runs[2], atol=1e-3)


# What a kernel leaves alone


@pytest.mark.parametrize("name", KERNELS)
def test_one_chain_may_come_as_a_vector(name):
    alone, info = walked(KERNELS[name], bowl(CURVATURES), normal(4), 5)
    row, infos = walked(KERNELS[name], bowl(CURVATURES), normal(1, 4), 5)
    assert alone.position.shape == (4,)
    assert torch.equal(alone.position, row.position[0])
    assert info.loss.shape == ()
    assert torch.allclose(info.force_square, infos.force_square[0])
    assert torch.allclose(info.distance, infos.distance[0])


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_changes_neither_its_start_nor_the_global_random_state(name):
    start, before = normal(3, 4), torch.get_rng_state()
    state, _ = walked(KERNELS[name], bowl(CURVATURES), start, 3)
    assert torch.equal(start, normal(3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert state.steps == 3
    assert torch.equal(state.centre, start[0])


@pytest.mark.parametrize("name", KERNELS)
def test_no_step_size_no_move(name):
    state, info = walked(
        dataclasses.replace(KERNELS[name], step_size=0.0), bowl(CURVATURES), normal(3, 4), 5
    )
    assert torch.equal(state.position, normal(3, 4))
    assert torch.equal(info.loss, bowl(CURVATURES)(normal(3, 4))[0])


def test_settings_of_numpy_are_numbers():
    kernel = sgld(np.float32(0.5), np.int64(3), np.float64(2.0))
    assert (kernel.step_size, kernel.nbeta) == (0.5, 3.0)
    state, _ = walked(kernel, bowl(CURVATURES), normal(3, 4), 2)
    assert torch.equal(
        state.position, walked(sgld(0.5, 3, 2.0), bowl(CURVATURES), normal(3, 4), 2)[0].position
    )


# The random numbers of chains


def test_a_chains_stream_does_not_depend_on_its_neighbours():
    together, alone, other = Streams(3, [0, 1, 2]), Streams(3, [2]), Streams(4, [2])
    for many, one in zip(
        *(
            (
                rng.normal_(torch.empty(count, 20)),
                rng.uniform(count, torch.float64),
                rng.integers(10, count, 6),
            )
            for rng, count in ((together, 3), (alone, 1))
        ),
        strict=True,
    ):
        assert torch.equal(many[2:], one)
    assert not torch.equal(alone.normal_(torch.empty(1, 20)), other.normal_(torch.empty(1, 20)))


def test_integers_and_uniforms_have_their_ranges():
    rng = Streams(0, [0, 1])
    counts = rng.integers(5, 2, 5000).flatten().bincount()
    assert len(counts) == 5
    assert ((counts - 2000) ** 2 / 2000).sum() < scipy.stats.chi2.ppf(0.999, 4)
    values = torch.stack([rng.uniform(2, torch.float64) for _ in range(500)]).flatten()
    assert scipy.stats.kstest(values.numpy(), "uniform").pvalue > 1e-3
