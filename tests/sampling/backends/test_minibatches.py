"""Batches of chains: who is in them, the centre's loss on them, and what their noise does to a
chain.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor, nn

from lambdahat._core.rng import generator
from lambdahat.operators.linearise import twice_differentiable
from lambdahat.problem import Problem
from lambdahat.sampling import Streams, sample, sgld
from lambdahat.sampling.backends.chain_runner import OneByOne, Together, on_batches
from lambdahat.sampling.backends.minibatches import Minibatches
from lambdahat.singular import llc
from tests.cases import LanguageModel, classifier, network, sentences

N = 20


def regression(samples: int = 40, width: int = 2) -> Problem:
    """½(x·w − y)² at its minimum, as a function."""
    rng = generator(0, "regression")
    x = torch.randn(samples, width, generator=rng, dtype=torch.float64)
    y = x.sum(1) + torch.randn(samples, generator=rng, dtype=torch.float64)
    best = torch.linalg.lstsq(x, y.unsqueeze(1)).solution.squeeze(1)
    return Problem.from_function(
        lambda p, b: 0.5 * (b[0] @ p["w"] - b[1]).square().mean(), {"w": best}, (x, y)
    )


def language(count: int = 6, ignored: bool = True) -> Problem:
    columns = sentences(count)
    if not ignored:
        columns["labels"] = columns["input_ids"].roll(-1, 1)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = LanguageModel().double()
    return Problem(model, "cross_entropy", columns, batch_size=2)


def source(
    problem: Problem, batch_size: int | None = None, shared: bool = False, seed: int = 0
) -> Minibatches:
    return Minibatches(problem, batch_size, shared, seed)


def losses_on(problem: Problem, data: Minibatches, index: Tensor) -> list[float]:
    parameters = problem.named(problem.vector)
    return [float(problem.batch_loss(parameters, data.batch(row))) for row in index]


# Who is in a batch


def test_samples_are_drawn_evenly_with_replacement():
    data = source(classifier(samples=N), 7)
    index = torch.cat([data.draw(Streams(seed, range(3)), 3)[0] for seed in range(100)])
    assert (data.by_sample, data.size, index.shape) == (True, 7, (300, 7))
    counts = index.flatten().bincount(minlength=N)
    assert len(counts) == N
    assert float(((counts - 105.0) ** 2 / 105).sum()) < scipy.stats.chi2.ppf(0.999, N - 1)
    assert any(len(set(row.tolist())) < 7 for row in index)


def test_chains_have_batches_of_their_own_unless_shared():
    problem = classifier(samples=N)
    own, _ = source(problem, 7).draw(Streams(0, range(3)), 3)
    assert not torch.equal(own[0], own[1])
    assert torch.equal(own[2:], source(problem, 7).draw(Streams(0, [2]), 1)[0])
    shared = source(problem, 7, shared=True)
    first, second = (shared.draw(Streams(seed, range(3)), 3)[0] for seed in (0, 1))
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first, second)
    assert torch.equal(first, source(problem, 7, shared=True).draw(Streams(5, range(3)), 3)[0]), (
        "only its seed counts"
    )
    assert not torch.equal(
        first, source(problem, 7, shared=True, seed=1).draw(Streams(0, range(3)), 3)[0]
    )


@pytest.mark.parametrize("batch_size", [None, N])
def test_a_batch_of_all_samples_is_the_whole_data(batch_size):
    problem = classifier(samples=N)
    data = source(problem, batch_size)
    index, centre = data.draw(Streams(0, range(3)), 3)
    assert data.size == N
    assert torch.equal(index, torch.arange(N).expand(3, -1))
    assert centre.tolist() == [problem.loss()] * 3


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("samples", [7, 64, 200])
@pytest.mark.parametrize("rows", [8, None])
def test_steps_on_the_whole_data_are_recognised_to_the_bit(accumulate, samples, rows):
    """A sum of single losses would differ from the loss of the data in the last bit, for some n."""
    problem = classifier(samples=samples, batch_size=rows)
    chains = sample(problem, sgld(1e-4, 9.0, 1.0), 2, 4, accumulate=accumulate)
    assert chains.on_whole_data
    assert chains.losses[:, 0] == pytest.approx(problem.loss(), rel=1e-12)  # the first is at w*


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_problem_without_data_is_whole_at_every_step(accumulate):
    problem = Problem.from_function(
        lambda p: p["w"].square().sum(), {"w": torch.ones(3).double()}, num_samples=10**6
    )
    settings = {"batch_size": 512, "accumulate": accumulate}
    chains = sample(problem, sgld(1e-4, 9.0, 1.0), 2, 4, **settings)
    assert (chains.batch_size, chains.on_whole_data) == (10**6, True)
    assert (chains.centre_losses == 3.0).all()


OWN: dict[str, Any] = {
    "norm=train": lambda: network("batch-norm", norm="train"),
    "ignored targets": language,
    "shapes that differ": lambda: Problem(
        nn.Sequential(nn.AdaptiveAvgPool1d(3), nn.Flatten(), nn.Linear(3, 1)).double(),
        "mse",
        [
            (
                torch.rand(k, 1, 4 + k, generator=generator(k, "x")).double(),
                torch.ones(k, 1).double(),
            )
            for k in (2, 3, 5)
        ],
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_the_problems_own_batches_come_by_their_weight(name):
    problem = OWN[name]()
    data = source(problem)
    draws = [data.draw(Streams(seed, range(3)), 3) for seed in range(400)]
    index, centre = (torch.cat(parts) for parts in zip(*draws, strict=True))
    assert not data.by_sample
    assert index.shape == (1200, 1)
    expected = 1200 * torch.tensor(problem.weights).double()
    counts = index.flatten().bincount(minlength=len(expected))
    assert float(((counts - expected) ** 2 / expected).sum()) < scipy.stats.chi2.ppf(
        0.999, len(expected) - 1
    )
    few = index[:6]
    assert centre[:6].tolist() == pytest.approx(losses_on(problem, data, few), rel=1e-12)
    with pytest.raises(
        ValueError,
        match="batch_size must be left out where batches cannot be drawn sample by sample",
    ):
        source(problem, 997)


def test_streamed_data_comes_in_its_own_batches(monkeypatch):
    monkeypatch.setattr("lambdahat.problem.batches.CACHE_FRACTION", 0.0)
    problem = classifier(samples=N)
    assert not problem.batches.in_memory
    data = source(problem)
    index, centre = data.draw(Streams(0, range(3)), 3)
    assert not data.by_sample
    assert centre.tolist() == pytest.approx(losses_on(problem, data, index), rel=1e-12)


# What the centre's loss and the gradients are on them

CASES: dict[str, Any] = {
    "classifier": lambda: classifier(samples=N),
    "tuple function": regression,
    "dict": lambda: language(ignored=False),
    "images": lambda: network("batch-norm"),
    "attention": lambda: network("transformer"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_centre_is_paired_with_the_same_samples(name):
    problem = CASES[name]()
    data = source(problem, 4)
    index, centre = data.draw(Streams(0, range(5)), 5)
    assert data.by_sample
    assert centre.tolist() == pytest.approx(losses_on(problem, data, index), rel=1e-10)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shared", [False, True])
def test_gradients_together_one_by_one_and_in_pieces(name, shared):
    problem = CASES[name]()
    data = source(problem, 5, shared)
    index, _ = data.draw(Streams(0, range(3)), 3)
    positions = (
        problem.vector
        + 0.1 * torch.randn(3, problem.num_parameters, generator=generator(0, "p")).double()
    )
    expected = []
    for theta, row in zip(positions, index, strict=True):
        leaf = theta.clone().requires_grad_()
        loss = problem.batch_loss(problem.named(leaf), data.batch(row))
        expected.append((loss.detach(), torch.autograd.grad(loss, leaf)[0]))
    losses, gradients = (torch.stack(parts) for parts in zip(*expected, strict=True))
    before = positions.clone()
    for way in (Together(problem), OneByOne(problem)):
        for parts in (1, 2, 5, 9):
            with twice_differentiable():
                found, slopes = on_batches(way, positions, data, index, parts)
            assert torch.allclose(found, losses, rtol=1e-9)
            assert torch.allclose(slopes, gradients, rtol=1e-8, atol=1e-11)
    assert torch.equal(positions, before)


# What their noise does


def noisy_covariance(problem: Problem, kernel: Any, batch: int) -> np.ndarray:
    """The stationary covariance V of SGLD on a linear regression at its minimum, noise of batches
    included.

    e ← M e − (εnβ/2)·r + √ε·ξ with M = I − (ε/2)(nβH_B + γ) and r the batch's gradient at the
    minimum, both random and of the same batch, so that vec V = E[M⊗M] vec V + vec((εnβ/2)² Cov r +
    ε), the mean of e being 0.
    """
    x, y = (part.numpy() for part in problem.batches.first().data)
    width = x.shape[1]
    squares = np.einsum("ni,nj->nij", x, x)
    residual = (x @ problem.vector.numpy() - y)[:, None] * x
    half = kernel.step_size * kernel.nbeta / 2
    mean = np.eye(width) * (1 - kernel.step_size * kernel.localization / 2) - half * squares.mean(0)
    spread = squares - squares.mean(0)
    second = np.kron(mean, mean) + half**2 / batch * np.mean(
        [np.kron(s, s) for s in spread], axis=0
    )
    heat = half**2 / batch * np.einsum("ni,nj->ij", residual, residual) / len(
        x
    ) + kernel.step_size * np.eye(width)
    return np.linalg.solve(np.eye(width**2) - second, heat.reshape(-1)).reshape(width, width)


@pytest.mark.parametrize("shared", [False, True])
def test_the_noise_of_batches_heats_a_chain_by_what_its_recursion_says(shared):
    """The paired losses have the mean ½nβ·tr(HV); without the noise of batches it would be a
    third less.
    """
    problem, chains, draws, batch = regression(), 32, 1000, 5
    kernel = sgld(0.05, 12.0, 2.0)
    found = sample(
        problem,
        kernel,
        chains,
        draws,
        burn_in=60,
        batch_size=batch,
        shared_batches=shared,
        keep_parameters=True,
        mode="batched",
    )
    assert found.parameters is not None
    x = problem.batches.first().data[0].numpy()
    hessian, exact = x.T @ x / len(x), noisy_covariance(problem, kernel, batch)
    away = (found.parameters - problem.vector).numpy()
    for i, j in ((0, 0), (0, 1), (1, 1)):
        check(away[..., i] * away[..., j], exact[i, j], shared)
    check(found.energies, kernel.nbeta / 2 * np.trace(hessian @ exact), shared)
    quiet = noisy_covariance(problem, kernel, 10**9)
    assert np.trace(hessian @ quiet) < 0.75 * np.trace(hessian @ exact)


def check(values: np.ndarray, exact: float, shared: bool) -> None:
    """The mean within four standard errors, over chains, or over stretches where the chains
    depend on each other.
    """
    parts = values.mean(0).reshape(40, -1).mean(1) if shared else values.mean(1)
    assert abs(parts.mean() - exact) < 4 * parts.std(ddof=1) / math.sqrt(len(parts))
    assert parts.std(ddof=1) / math.sqrt(len(parts)) < 0.06 * abs(exact) + 0.003


class _Counts(nn.Linear):
    """A layer of more than a million parameters that notes how many samples it sees at once."""

    seen: ClassVar[set[int]] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add(len(x))
        return super().forward(x)


def test_a_large_model_never_sees_more_samples_than_in_the_batches_it_was_given():
    """Whoever gave batches of 3 may have no memory for more: neither steps nor the pilot's
    Hessian products take 512 or 1,024 samples at once.
    """
    rng = generator(0, "large model")
    x, y = (torch.randn(40, width, generator=rng) for width in (1001, 1000))
    problem = Problem(_Counts(1001, 1000), "mse", (x, y), batch_size=3)
    _Counts.seen.clear()
    result = llc(problem, chains=2, max_gradients=200, draws=8, localization=1e4, mode="sequential")
    assert max(_Counts.seen) <= 3
    assert result.chains.reasons["batch_size"].endswith(": an effective draw is cheapest")
