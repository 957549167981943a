"""The loss of every sample by itself against the loss of a batch of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from lambdahat._core.rng import generator
from lambdahat.problem import Problem
from lambdahat.problem.batches import take
from lambdahat.sampling.backends.minibatches import SampleLosses
from tests.cases import NETWORKS, Block, LanguageModel, network, sentences


def one_by_one(problem: Problem, theta: Tensor) -> Tensor:
    parameters = problem.named(theta)
    singles = [
        take(batch, torch.tensor([i])) for batch in problem.batches for i in range(batch.size)
    ]
    with torch.no_grad():
        return torch.stack(
            [problem.batch_loss(parameters, single).reshape(()) for single in singles]
        )


def language(loss: str = "cross_entropy", columns: dict[str, Tensor] | None = None) -> Problem:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = LanguageModel().double()
    whole = sentences()
    return Problem(
        model, loss, columns or {**whole, "labels": whole["input_ids"].roll(-1, 1)}, batch_size=4
    )


class Branching(nn.Module):
    """Asks for a value of its input, which a mapped function has not."""

    def forward(self, x: Tensor) -> Tensor:
        return x if float(x.detach().abs().sum()) > 0 else -x


def attention() -> Problem:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model, x = Block().double().eval(), torch.randn(6, 3, 6).double()
    start = {name: tensor.detach() for name, tensor in model.named_parameters()}
    return Problem.from_function(
        lambda p, b: functional_call(model, p, (b,)).square().mean(), start, x, batch_size=4
    )


def function(make: Any) -> Problem:
    x = torch.randn(9, 3, generator=generator(0, "x"), dtype=torch.float64)
    return Problem.from_function(make, {"w": torch.ones(3).double()}, x, batch_size=4)


CASES: dict[str, Any] = {
    **{
        f"{name}, {loss}": lambda name=name, loss=loss: network(name, loss)
        for name in NETWORKS
        for loss in ("cross_entropy", "mse")
    },
    "bce": lambda: network("mlp", "bce_with_logits"),
    "a callable loss": lambda: network("mlp", loss=lambda z, y: F.smooth_l1_loss(z, y)),
    "a module": lambda: network("mlp", loss=nn.HuberLoss()),
    "tokens": language,
    "a model's own loss": lambda: language("model"),
    "function": lambda: function(lambda p, b: (b @ p["w"]).square().mean()),
    "function that returns (1,)": lambda: function(
        lambda p, b: (b @ p["w"]).square().mean().reshape(1)
    ),
    "function with attention": attention,
    "function that cannot be mapped": lambda: function(
        lambda p, b: Branching()(b @ p["w"]).square().mean()
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_sample_by_itself(name):
    problem = CASES[name]()
    losses = SampleLosses(problem)
    for theta in (problem.vector, problem.vector + 0.1):
        found = losses(theta)
        assert found.shape == (problem.num_samples,)
        assert not found.requires_grad
        assert torch.allclose(found, one_by_one(problem, theta), rtol=1e-9, atol=1e-12)
        assert float(found.mean()) == pytest.approx(problem.loss(theta), rel=1e-9)
    assert float(losses(problem.vector).std()) > 1e-6


def test_a_model_sees_whole_batches():
    """A pass for each batch, not one for each sample."""
    calls = []

    class Counted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(len(x))
            return super().forward(x)

    x = torch.randn(9, 4, generator=generator(0, "x"))
    losses = SampleLosses(problem := Problem(Counted(4, 1), "mse", (x, x[:, :1]), batch_size=4))
    calls.clear()
    losses(problem.vector)
    assert calls == [4, 4, 1]


def test_without_data_all_samples_are_alike_and_cost_one_call():
    calls = []

    def loss(p: dict[str, Tensor]) -> Tensor:
        calls.append(1)
        return p["w"].square().sum()

    problem = Problem.from_function(loss, {"w": torch.ones(3).double()}, num_samples=10**5)
    losses = SampleLosses(problem)
    calls.clear()
    assert torch.equal(losses(2 * problem.vector), torch.full((10**5,), 12.0).double())
    assert len(calls) == 1


def ignored_evenly() -> Problem:
    """The same number of labels in each batch, unequal within."""
    columns = {name: torch.cat([tensor, tensor]) for name, tensor in sentences(4).items()}
    return language(columns=columns)


REFUSED: dict[str, Any] = {
    "batch statistics": lambda: network("batch-norm", norm="train"),
    "ignored targets": lambda: language(columns=sentences()),
    "targets ignored in every batch": ignored_evenly,
    "samples that depend on each other": lambda: function(
        lambda p, b: (b @ p["w"]).mean().square() + 1
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_losses_that_are_no_mean_over_samples_are_refused(name):
    with pytest.raises(
        TypeError, match=r"loss must be a mean over the samples.*needs the loss of each sample"
    ):
        SampleLosses(REFUSED[name]())
