"""Chains on a GPU: steps replayed from a CUDA graph have the law of steps taken one by one."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from lambdahat._core.rng import generator
from lambdahat.problem import Problem
from lambdahat.results import Chains, Status
from lambdahat.sampling import Streams, hmc, kinetic, mala, rmsprop_sgld, sample, sghmc, sgld, sgnht
from lambdahat.sampling._sample import make_runner
from lambdahat.sampling.backends.chain_runner import ChainPlan
from lambdahat.sampling.kernels import Kernel
from tests.cases import network

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CURVATURES = torch.tensor([3.0, 1.0, 0.3, 0.1], dtype=torch.float64)
EPSILON, NBETA, GAMMA = 0.05, 10.0, 0.5


def bowl(dtype: torch.dtype = torch.float64) -> Problem:
    """½ Σ h_i w_i² with no data."""
    h, start = CURVATURES.to("cuda", dtype), {"w": torch.zeros(4, dtype=dtype, device="cuda")}
    return Problem.from_function(
        lambda p: 0.5 * (h * p["w"].square()).sum(), start, num_samples=100
    )


def regression(samples: int = 400) -> Problem:
    """½(x·w − y)² at its minimum, on noisy targets."""
    rng = generator(0, "regression")
    x = torch.randn(samples, 2, generator=rng, dtype=torch.float64)
    y = x.sum(1) + torch.randn(samples, generator=rng, dtype=torch.float64)
    best = torch.linalg.lstsq(x, y.unsqueeze(1)).solution.squeeze(1).cuda()
    return Problem.from_function(
        lambda p, b: 0.5 * (b[0] @ p["w"] - b[1]).square().mean(), {"w": best}, (x.cuda(), y.cuda())
    )


def run(problem: Problem, kernel: Kernel, mode: str = "graph", **options: Any) -> Chains:
    given = {"chains": 64, "draws": 500, "burn_in": 200, "forces": True, **options}
    return sample(problem, kernel, mode=mode, **given)


def mean_and_error(values: np.ndarray) -> tuple[float, float]:
    parts = values.mean(axis=1)
    return float(parts.mean()), float(parts.std(ddof=1)) / math.sqrt(len(parts))


def agree(first: np.ndarray, second: np.ndarray) -> None:
    (a, da), (b, db) = mean_and_error(first), mean_and_error(second)
    assert abs(a - b) < 4 * math.hypot(da, db)
    assert max(da, db) < 0.05 * max(abs(a), abs(b)), "sharp enough to tell"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_captured_sgld_step_has_its_exact_law(dtype):
    a = NBETA * CURVATURES + GAMMA
    exact = 0.5 * float((NBETA * CURVATURES / (a * (1 - EPSILON * a / 4))).sum())
    found = run(bowl(dtype), sgld(EPSILON, NBETA, GAMMA))
    value, error = mean_and_error(found.energies)
    assert found.mode == "graph"
    assert abs(value - exact) < 4 * error
    assert error < 0.03 * exact
    assert found.cost == 64 * 700


@pytest.mark.parametrize(
    "kernel",
    [
        sgld(EPSILON, NBETA, GAMMA),
        kinetic(0.2, NBETA, GAMMA),
        sghmc(EPSILON, NBETA, GAMMA),
        sgnht(EPSILON, NBETA, GAMMA),
        rmsprop_sgld(EPSILON, NBETA, GAMMA),
        sgld(EPSILON, NBETA, {"w": GAMMA}, torch.tensor([0.5, 1.0, 1.5, 2.0])),
    ],
    ids=["sgld", "kinetic", "sghmc", "sgnht", "rmsprop", "scaled"],
)
def test_every_kernel_agrees_with_its_uncaptured_self(kernel):
    found, plain = (run(bowl(), kernel, mode) for mode in ("graph", "batched"))
    agree(found.energies, plain.energies)
    agree(found.distances, plain.distances)
    agree(found.forces, plain.forces)
    agree(found.virials, plain.virials)


@pytest.mark.parametrize("shared", [False, True])
def test_batches_are_drawn_anew_at_every_replay(shared):
    problem, kernel = regression(), sgld(0.02, 20.0, 2.0)
    found, plain = (
        run(problem, kernel, mode, batch_size=5, shared_batches=shared)
        for mode in ("graph", "batched")
    )
    if not shared:
        agree(found.energies, plain.energies)
    assert len(np.unique(found.centre_losses[0])) > 400, "the batches differ from step to step"
    assert (np.ptp(found.centre_losses, axis=0) == 0).all() == shared
    assert found.centre_losses.mean() == pytest.approx(problem.loss(), rel=0.1)


@pytest.mark.parametrize("name", ["mlp", "lenet", "batch-norm", "transformer"])
def test_networks_are_captured(name):
    problem = network(name, device="cuda")
    kernel = sgld(1e-3, 20.0, 20.0)
    found, plain = (
        run(problem, kernel, mode, chains=16, draws=200, batch_size=4)
        for mode in ("auto", "batched")
    )
    assert found.mode == "graph"
    agree(found.distances, plain.distances)
    still = run(problem, sgld(0.0, 1e3), draws=5, burn_in=0, batch_size=4)
    assert np.abs(still.energies).max() < 1e-9
    assert still.status is Status.NOT_MOVING


def test_the_seed_decides():
    runs = [
        run(regression(), sgld(0.02, 20.0), seed=seed, draws=50, batch_size=5) for seed in (3, 3, 4)
    ]
    first, second, other = runs
    for name in ("losses", "centre_losses", "distances", "forces", "virials"):
        assert np.array_equal(getattr(first, name), getattr(second, name))
        assert not np.array_equal(getattr(first, name), getattr(other, name))


def test_the_noise_of_chains_is_independent():
    found = run(bowl(), sgld(EPSILON, NBETA, GAMMA), chains=32, draws=600)
    assert len({tuple(row) for row in found.distances}) == 32
    correlation = np.corrcoef(found.energies) - np.eye(32)
    assert np.abs(correlation).max() < 0.5
    assert abs(correlation.sum() / (32 * 31)) < 0.02
    steps = np.diff(found.distances, axis=1)
    assert (np.abs(steps) > 0).all(), "the noise differs from step to step"


def test_more_draws_than_a_graph_holds_and_long_thinning():
    kernel = sgld(EPSILON, NBETA, GAMMA)
    found = run(bowl(), kernel, chains=4, draws=12_000, burn_in=0)
    assert found.losses.shape == (4, 12_000)
    assert (np.diff(found.losses, axis=1) != 0).all()
    thin = run(bowl(), kernel, chains=4, draws=3, burn_in=0, thin=700)
    assert thin.losses.shape == (4, 3)
    assert thin.cost == 4 * 2100
    assert len(np.unique(thin.losses)) == 12
    assert np.array_equal(thin.losses, found.losses[:, 699:2100:700]), (
        "every 700th step of the same chain"
    )


def test_a_runner_goes_on_with_another_step_and_starts_again():
    problem, kernel = bowl(), sgld(EPSILON, NBETA, GAMMA)
    runner, mode = make_runner(problem, kernel, 3, ChainPlan(), "graph")
    assert mode == "graph"
    assert torch.equal(runner.positions, problem.vector.repeat(3, 1)), "capturing leaves no mark"
    first = runner.advance(5)
    here = runner.positions.clone()
    assert float((here - problem.vector).abs().min()) > 0
    runner.retune(dataclasses.replace(kernel, step_size=0.0))
    assert torch.equal(runner.positions, here)
    still = runner.advance(3)
    assert torch.equal(runner.positions, here)
    assert torch.allclose(still["distance"], here.norm(dim=1, keepdim=True).cpu().expand(-1, 3))
    runner.retune(kernel)
    runner.restart()
    assert torch.equal(runner.positions, problem.vector.repeat(3, 1))
    again = runner.advance(5)
    assert float(again["distance"][:, 0].max()) == 0
    assert not torch.equal(again["loss"][:, 1:], first["loss"][:, 1:]), "the noise goes on"
    assert runner.gradients_spent == 13


def test_the_velocity_survives_another_step_size():
    runner, _ = make_runner(bowl(), sghmc(EPSILON, NBETA), 3, ChainPlan(), "graph")
    runner.advance(5)
    velocity = runner.state.memory["velocity"].clone()
    runner.retune(sghmc(EPSILON / 2, NBETA))
    assert torch.allclose(runner.state.memory["velocity"], velocity / math.sqrt(2)), (
        "increments of variance ε/2"
    )
    assert float(velocity.abs().min()) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_captured_kinetic_dynamics_are_exact_for_a_gaussian(dtype):
    a = NBETA * CURVATURES + GAMMA
    exact = 0.5 * float((NBETA * CURVATURES / a).sum())
    found = run(bowl(dtype), kinetic(0.2, NBETA, GAMMA))
    value, error = mean_and_error(found.energies)
    assert found.mode == "graph"
    assert abs(value - exact) < 4 * error
    assert error < 0.05 * exact


def test_the_noise_of_batches_is_the_same_captured():
    """Batches of 5 samples at rest: means over many looks agree, and the chains stay where they
    are.
    """
    traces = []
    for mode in ("graph", "batched"):
        runner, _ = make_runner(
            regression(), kinetic(0.02, 20.0, 2.0), 8, ChainPlan(batch_size=5), mode
        )
        runner.retune(kinetic(0.0, 20.0, 2.0))
        here = runner.positions.clone()
        traces.append(float(runner.noise(400)["trace"].mean()))
        assert torch.equal(runner.positions, here)
        assert runner.gradients_spent == 400
    assert traces[0] == pytest.approx(traces[1], rel=0.15)


def test_a_bound_and_divergence_are_told():
    bounded = run(bowl(), sgld(EPSILON, NBETA), bound=0.5, burn_in=0)
    assert bounded.status is Status.BOUNDED
    assert bounded.distances.max() <= 0.5 + 1e-9
    lost = run(bowl(), sgld(10.0, NBETA), chains=3, draws=400, burn_in=0)
    assert lost.status is Status.DIVERGED
    assert lost.diagnostics.diverged.all()


def test_what_looks_at_draws_runs_uncaptured():
    found = run(
        bowl(),
        sgld(EPSILON, NBETA),
        "auto",
        draws=5,
        observables={"first": lambda w: w[0]},
        keep_parameters=True,
    )
    assert found.mode == "batched"
    assert found.observables["first"] == pytest.approx(found.parameters[..., 0].numpy())
    with pytest.raises(ValueError, match="mode must be one of"):
        run(bowl(), sgld(EPSILON, NBETA), keep_parameters=True)
    with pytest.raises(ValueError, match="processes need"):
        run(bowl(), sgld(EPSILON, NBETA), "processes")


@pytest.mark.parametrize(
    "kernel", [mala(0.1, NBETA, GAMMA), hmc(0.1, NBETA, GAMMA, leapfrog=3)], ids=["mala", "hmc"]
)
def test_exact_kernels_are_exact_here_too(kernel):
    exact = 0.5 * float((NBETA * CURVATURES / (NBETA * CURVATURES + GAMMA)).sum())
    found = run(bowl(), kernel, "auto")
    value, error = mean_and_error(found.energies)
    assert found.mode == "batched"
    assert abs(value - exact) < 4 * error
    assert error < 0.05 * exact


def test_the_stream_of_a_device_is_one_for_all_chains():
    first, second = (
        Streams(3, range(4), "cuda").normal_(torch.empty(4, 8, device="cuda")) for _ in range(2)
    )
    assert torch.equal(first, second)
    assert len(torch.unique(first)) == 32
    index = Streams(3, range(4), "cuda").integers(5, 4, 1000)
    assert index.device.type == "cuda"
    assert sorted(index.unique().tolist()) == [0, 1, 2, 3, 4]
