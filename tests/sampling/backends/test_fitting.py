"""What chains take, by the plan and by counting live tensors; together or one by one, captured
or not, by the room.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import lambdahat as lh
from lambdahat._core.rng import generator
from lambdahat.problem.memory import LiveBytes
from lambdahat.sampling import hmc, kinetic, mala, rmsprop_sgld, sghmc, sgld, sgnht
from lambdahat.sampling._sample import Demand
from lambdahat.sampling.backends.chain_runner import ChainPlan
from lambdahat.sampling.kernels import Kernel, Streams
from lambdahat.sampling.kernels import hmc as hmc_
from tests.language import seeded

WIDTH, CHAINS = 400, 4
ROW = 4 * (WIDTH * (WIDTH + 1) + 2 * (WIDTH + 1))


def wide(rows: float | None = None) -> lh.Problem:
    """160,000 parameters on 64 samples, with a budget of so many vectors."""
    model = seeded(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))
    ).float()
    x = torch.randn(64, WIDTH, generator=generator(0, "wide"))
    memory = None if rows is None else int(rows * ROW)
    return lh.Problem(model, "cross_entropy", (x, torch.arange(64) % 2), memory=memory)


def demand(
    rows: float | None, kernel: Kernel | None = None, chains: int = CHAINS, **plan: object
) -> Demand:
    return Demand(wide(rows), kernel or sgld(1e-6, 1.0), chains, 32, replace(ChainPlan(), **plan))  # type: ignore[arg-type]


def vectors_live(kernel: Kernel, size: int, forces: bool) -> float:
    """Vectors of a chain that are live at once in its steps, its gradients in one buffer;
    without the centre.
    """
    theta = torch.zeros(size)
    with LiveBytes() as seen:
        state = kernel.init(theta.expand(1, -1), theta)
        state.forces = forces
        gradient = torch.ones(1, size)

        def evaluate(at: Tensor) -> tuple[Tensor, Tensor]:
            return at.new_zeros(1), gradient.fill_(1.0)

        for _ in range(2):
            state, _ = kernel.step(state, evaluate, Streams(0, [0]))
    return seen.peak / (4 * size) - 1


@pytest.mark.parametrize("forces", [False, True])
@pytest.mark.parametrize("size", [2000, 1 << 16])
@pytest.mark.parametrize("make", [sgld, rmsprop_sgld, sghmc, sgnht, kinetic, mala, hmc])
def test_a_step_takes_the_vectors_it_tells(monkeypatch, make, size, forces):
    """None more, and at most two less: copies to float64 are whole only of short vectors."""
    # a quarter of the long ones, as of a million in earnest
    monkeypatch.setattr(hmc_, "RUN", 1 << 14)
    settings = [{}, {"localization": 1.0}, {"localization": torch.ones(size)}]
    if make not in (rmsprop_sgld, sgnht):
        settings.append({"scale": torch.full((size,), 0.5)})
    for given in settings:
        kernel = make(1e-3, 1.0, **given)
        live, told = vectors_live(kernel, size, forces), kernel.vectors(forces)
        assert live <= told + 0.02
        if not given:
            assert told <= live + 2.1


RUNS = [
    (sgld(1e-6, 1.0), {}),
    (sgld(1e-6, 1.0), {"forces": True, "bound": 1e-4}),
    (sgld(1e-6, 1.0), {"accumulate": 4}),
    (sghmc(1e-6, 1.0), {}),
    (mala(1e-6, 1.0), {}),
]


@pytest.mark.parametrize(("kernel", "settings"), RUNS)
@pytest.mark.parametrize("mode", ["sequential", "batched"])
def test_runs_take_what_was_planned(kernel, settings, mode):
    """At most, under a budget that holds them, and one by one not less than three quarters of
    it.
    """
    plan = demand(80, kernel, **settings)
    planned = plan.one_by_one() if mode == "sequential" else plan.together()
    with LiveBytes() as seen:
        lh.sample(
            plan.problem,
            kernel,
            CHAINS,
            2,
            batch_size=None if kernel.exact else 32,
            mode=mode,
            **settings,
        )
    assert seen.peak <= planned + 0.5 * ROW  # the batches drawn
    if mode == "sequential" and not settings:
        assert seen.peak >= 0.75 * planned


def test_the_room_decides_between_one_by_one_together_and_recorded():
    """Four chains of SGLD: 12 vectors of their own, 5 in common, 13 of one that is probed, and
    their passes.
    """
    alone, together, captured = (
        take / ROW
        for take in (
            demand(36).one_by_one(),
            demand(36).together(),
            demand(36).together(captured=True),
        )
    )
    assert 12 + 5 + 13 < alone < 36
    assert alone < together < 40
    assert captured == pytest.approx(together + CHAINS * 2)  # a copy of the positions and buffers
    assert not demand(36).together_fits()
    assert demand(48).together_fits()
    assert not demand(48).together_fits(captured=True)
    assert demand(60).together_fits(captured=True)
    assert demand(60, chains=3).together() < demand(60).together()


def test_without_a_budget_all_chains_are_probed_together():
    assert demand(None).together() - demand(60).together() == pytest.approx((CHAINS - 1) * 13 * ROW)
    assert demand(None).together_fits(captured=True)


@pytest.mark.parametrize(
    ("rows", "mode"), [(36, {"sequential"}), (60, {"sequential", "batched", "processes"})]
)
def test_sampling_takes_a_mode_that_fits(rows, mode):
    found = lh.sample(wide(rows), sgld(1e-6, 1.0), CHAINS, 2, batch_size=32)
    assert found.mode in mode  # the fastest, where several fit


def test_a_budget_changes_no_draw():
    problems = wide(36), wide()
    bound, free = (
        lh.sample(p, sgld(1e-6, 1.0), 2, 3, batch_size=32, mode="sequential") for p in problems
    )
    assert (bound.losses == free.losses).all()
    assert bound.diagnostics.acceptance == pytest.approx(free.diagnostics.acceptance, rel=1e-6)
