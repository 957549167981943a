"""Chains run together, one by one and in processes: the same chains, whatever the model."""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lambdahat._core.rng import generator
from lambdahat.problem import Problem
from lambdahat.results import Chains
from lambdahat.sampling import _sample, hmc, kinetic, mala, rmsprop_sgld, sample, sghmc, sgld, sgnht
from lambdahat.sampling._sample import make_runner, processes_available
from lambdahat.sampling.backends.chain_runner import ChainPlan, Together
from lambdahat.sampling.backends.minibatches import SampleLosses
from lambdahat.sampling.kernels import Kernel
from tests.cases import LanguageModel, classifier, network, sentences

STEP = sgld(1e-3, 50.0, 1.0)


def language(loss: str, ignored: bool = False) -> Problem:
    columns = sentences()
    if not ignored:
        columns["labels"] = columns["input_ids"].roll(-1, 1)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = LanguageModel().double()
    return Problem(model, loss, columns, batch_size=2)


def with_data() -> Problem:
    x = torch.randn(30, 3, generator=generator(0, "x"), dtype=torch.float64)
    start = {"w": torch.ones(3).double(), "b": torch.zeros(1).double()}
    return Problem.from_function(lambda p, batch: (batch @ p["w"] + p["b"]).cos().mean(), start, x)


def without_data() -> Problem:
    start = {"w": torch.ones(2).double()}
    return Problem.from_function(lambda p: (p["w"].prod() - 1).square(), start, num_samples=200)


class Branching(nn.Module):
    """Asks for a value of its input, which a mapped model has not."""

    def forward(self, x: Tensor) -> Tensor:
        return x if float(x.detach().abs().sum()) > 0 else -x


def branching() -> Problem:
    x = torch.randn(30, 3, generator=generator(0, "x"), dtype=torch.float64)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 2), Branching(), nn.Tanh(), nn.Linear(2, 1)).double()
    return Problem(model, "mse", (x, x[:, :1]), batch_size=8)


CASES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "mlp": (classifier, ("batched", "sequential", "processes")),
    "convolutions": (lambda: network("lenet"), ("batched", "sequential")),
    "batch-norm": (lambda: network("batch-norm"), ("batched", "sequential")),
    "batch statistics": (lambda: network("batch-norm", norm="train"), ("sequential", "processes")),
    "attention": (lambda: network("transformer"), ("batched", "sequential")),
    "tied": (lambda: network("tied"), ("batched", "sequential")),
    "tokens": (lambda: language("cross_entropy"), ("batched", "sequential")),
    "a model's own loss": (lambda: language("model"), ("batched", "sequential")),
    "ignored tokens": (
        lambda: language("cross_entropy", ignored=True),
        ("sequential", "processes"),
    ),
    "function": (with_data, ("batched", "sequential")),
    "function without data": (without_data, ("batched", "sequential", "processes")),
    "not mappable": (branching, ("sequential",)),
}


def run(problem: Problem, mode: str, kernel: Kernel = STEP, **options: Any) -> Chains:
    given = {
        "chains": 3,
        "draws": 6,
        "burn_in": 2,
        "mode": mode,
        "keep_parameters": True,
        "forces": True,
        **options,
    }
    return sample(problem, kernel, **given)


def same(first: Chains, second: Chains) -> None:
    recycled = ("recycled_losses",) if first.kernel == "HMC" else ()
    for name in (
        "losses",
        "centre_losses",
        "distances",
        "forces",
        "virials",
        "acceptances",
        *recycled,
    ):
        assert getattr(first, name) == pytest.approx(getattr(second, name), rel=1e-7, abs=1e-10)
    assert first.parameters is not None
    assert second.parameters is not None
    assert torch.allclose(first.parameters, second.parameters, rtol=1e-8, atol=1e-10)
    assert first.cost == second.cost
    assert first.batch_size == second.batch_size
    assert first.diagnostics.acceptance == pytest.approx(
        second.diagnostics.acceptance, rel=1e-7, nan_ok=True
    )


@pytest.mark.parametrize("name", CASES)
def test_all_modes_make_the_same_chains(name):
    make, ways = CASES[name]
    problem = make()
    chosen = run(problem, "auto")
    assert chosen.mode == ways[0]
    assert float(chosen.distances[:, 1:].min()) > 0
    for mode in ways:
        found = run(problem, mode)
        assert found.mode == mode
        same(found, chosen)


@pytest.mark.parametrize(
    "kernel",
    [
        kinetic(0.03, 50.0, 1.0),
        rmsprop_sgld(1e-3, 50.0, 1.0),
        sghmc(1e-3, 50.0),
        sgnht(1e-3, 50.0),
        mala(1e-3, 50.0),
        hmc(1e-3, 50.0, 1.0),
    ],
    ids=lambda kernel: f"{type(kernel).__name__}{getattr(kernel, 'leapfrog', '')}",
)
def test_all_kernels_run_in_all_modes(kernel):
    first = run(classifier(), "batched", kernel)
    same(run(classifier(), "sequential", kernel), first)


def test_shared_batches_and_pieces_in_processes():
    """Five chains come back from two processes as 0, 2, 4, 1, 3."""
    options: dict[str, Any] = {
        "chains": 5,
        "shared_batches": True,
        "batch_size": 6,
        "accumulate": 2,
        "thin": 2,
    }
    options["bound"] = 0.1
    first, second = (run(classifier(), mode, **options) for mode in ("sequential", "processes"))
    same(first, second)
    assert np.array_equal(first.diagnostics.bounded, second.diagnostics.bounded)
    assert first.diagnostics.bounded.sum() > 0


def test_exact_kernels_run_batched_where_batches_cannot_be_mapped():
    """On the whole data no batch is drawn: chains share a call even where samples cannot be told
    apart.
    """
    problem = language("cross_entropy", ignored=True)
    found = run(problem, "auto", mala(1e-3, 5.0))
    assert found.mode == "batched"
    same(run(problem, "sequential", mala(1e-3, 5.0)), found)
    assert found.full_energies == pytest.approx(found.energies)


def test_the_size_of_the_batches_is_the_one_used():
    assert run(network("batch-norm", norm="train"), "auto").batch_size == 4
    assert run(language("cross_entropy", ignored=True), "auto").batch_size == 2
    assert run(classifier(), "auto").batch_size == 20
    assert run(classifier(), "processes", batch_size=5).batch_size == 5
    assert run(classifier(), "auto", mala(1e-3, 5.0)).batch_size == 20


# The choice


def test_large_problems_are_timed(monkeypatch):
    expected = run(classifier(), "sequential")
    monkeypatch.setattr(_sample, "SMALL", 0)
    found = run(classifier(), "auto")
    assert found.mode in ("batched", "sequential", "processes")
    same(found, expected)


class Slow:
    """A runner that takes its time, or fails."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.closed = seconds, False

    def skip(self, steps: int) -> None:
        if self.seconds == math.inf:
            raise RuntimeError("cannot be mapped")
        time.sleep(self.seconds)

    def close(self) -> None:
        self.closed = True


def test_the_fastest_mode_that_works_is_taken():
    made = {
        name: Slow(seconds)
        for name, seconds in (("sequential", 0.03), ("batched", math.inf), ("processes", 0.0))
    }
    runner, name = _sample._fastest(
        {name: lambda runner=runner: runner for name, runner in made.items()}
    )
    assert (runner, name) == (made["processes"], "processes")
    assert made["sequential"].closed
    with pytest.raises(RuntimeError, match="cannot be mapped"):
        _sample._fastest({"sequential": lambda: Slow(math.inf)})


def test_chains_that_do_not_fit_together_run_one_by_one(monkeypatch):
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError) as told:
        _sample._fastest(
            {"sequential": lambda: type("Full", (), {"skip": full, "close": lambda _: None})()}
        )
    assert "a larger accumulate or a smaller batch_size needs less" in told.value.__notes__[0]
    alone = run(classifier(), "sequential", batch_size=5)
    monkeypatch.setattr(Together, "own_batches", full)
    together = run(classifier(), "auto", batch_size=5)
    assert together.mode == "sequential"
    assert np.array_equal(together.losses, alone.losses)
    monkeypatch.setattr(SampleLosses, "__call__", full)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        run(classifier(), "sequential", batch_size=5)


def test_a_model_that_cannot_be_mapped_is_told_when_asked_for():
    with pytest.raises(RuntimeError):
        run(branching(), "batched")


def test_no_processes_within_a_daemon(monkeypatch):
    problem = classifier()
    assert processes_available(problem)
    monkeypatch.setattr(multiprocessing.current_process(), "_config", {"daemon": True})
    assert not processes_available(problem)


# Processes


def test_an_error_in_a_process_is_handed_on_and_no_process_is_left():
    def failing(theta: Tensor) -> float:
        raise ArithmeticError("in the child")

    with pytest.raises(RuntimeError, match=r"(?s)in the child.*mode=\"sequential\" shows where"):
        run(classifier(), "processes", observables={"bad": failing})
    assert not multiprocessing.active_children()


def test_a_killed_process_is_told():
    runner, _ = make_runner(classifier(), STEP, 2, ChainPlan(), "processes")
    try:
        runner.advance(1)
        child = multiprocessing.active_children()[0]
        child.kill()
        child.join()
        with pytest.raises(
            RuntimeError, match=r"process ended \(exit code -9\).*\"sequential\" needs least"
        ):
            runner.advance(1)
    finally:
        runner.close()
    assert not multiprocessing.active_children()


# Going on with a runner


@pytest.mark.parametrize("mode", ["batched", "processes"])
def test_a_runner_goes_on_with_another_step_and_starts_again(mode):
    problem = classifier()
    runner, _ = make_runner(problem, STEP, 2, ChainPlan(), mode)
    try:
        first = runner.advance(4)
        here = runner.positions.clone()
        runner.retune(dataclasses.replace(STEP, step_size=0.0))
        still = runner.advance(2)
        assert torch.equal(runner.positions, here)
        assert torch.allclose(
            still["distance"], (here - problem.vector).norm(dim=1, keepdim=True).expand(-1, 2)
        )
        runner.retune(STEP)
        runner.restart()
        assert torch.equal(runner.positions, problem.vector.repeat(2, 1))
        again = runner.advance(4)
        assert float(again["distance"][:, 0].max()) == 0
        assert not torch.equal(again["loss"][:, 1:], first["loss"][:, 1:]), "the noise goes on"
        assert runner.gradients_spent == 10
    finally:
        runner.close()


def test_what_a_kernel_remembers_ends_with_its_posterior():
    runner, _ = make_runner(classifier(), mala(1e-3, 50.0), 2, ChainPlan(), "batched")
    runner.advance(3)
    spent = runner.gradients_spent
    runner.retune(mala(2e-3, 50.0))
    runner.advance(1)
    assert runner.gradients_spent == spent + 1
    runner.retune(mala(2e-3, 50.0, 1.0))
    runner.advance(1)
    assert runner.gradients_spent == spent + 3, "the force is another"
    for tie in (2.0, 2.0):  # another tensor of the same numbers is the same posterior
        gamma = torch.full((classifier().num_parameters,), tie, dtype=torch.float64)
        runner.retune(mala(2e-3, 50.0, gamma))
        runner.advance(1)
    assert runner.gradients_spent == spent + 3 + 2 + 1
    other, _ = make_runner(classifier(), sghmc(1e-3, 50.0), 2, ChainPlan(), "batched")
    other.advance(3)
    velocity = other.state.memory["velocity"].clone()
    other.retune(sghmc(1e-4, 50.0))
    assert torch.allclose(other.state.memory["velocity"], velocity * math.sqrt(0.1)), (
        "increments of variance ε/2"
    )
    other.retune(sgld(1e-4, 50.0))
    assert "velocity" not in other.state.memory
