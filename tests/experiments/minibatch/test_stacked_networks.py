"""Stacked networks train as each would alone, by torch's own optimisers."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from lambdahat._core.rng import generator
from lambdahat.experiments.minibatch.stability_edges import Cells, StackedSettings, _batches
from lambdahat.models import lenet5, mlp

RATES = torch.tensor([[0.01, 0.1, 0.4], [0.02, 0.2, 0.8]])
MAKERS = {
    "sgd": lambda parameters, rate, _: torch.optim.SGD(parameters, rate),
    "momentum": lambda parameters, rate, _: torch.optim.SGD(parameters, rate, momentum=0.9),
    "adam": lambda parameters, rate, eps: torch.optim.Adam(parameters, rate, eps=eps),
}


def problem(samples=40):
    rng = generator(0, "cells")
    x = torch.randn(samples, 6, generator=rng, dtype=torch.float64)
    return x, torch.randint(0, 4, (samples,), generator=rng)


def networks():
    return [mlp([6, 5, 4], "tanh", seed=seed).double() for seed in range(2)]


@pytest.mark.parametrize("optimizer", MAKERS)
def test_a_cell_trains_as_it_would_alone(optimizer):
    (x, y), steps, size = problem(), 13, 8  # more than one epoch
    epsilon = torch.tensor([[1e-8, 0.1, 1.0], [1e-8, 0.2, 3.0]])
    cells = Cells(networks(), (x, y), StackedSettings(optimizer, RATES, epsilon))
    cells.train(size, steps, seed=3, task="test")
    batches = list(_batches(2, len(x), size, steps, 3, x.device))
    assert len(batches) == steps
    for seed in range(2):
        for column in range(3):
            alone = networks()[seed]
            by = MAKERS[optimizer](
                alone.parameters(), float(RATES[seed, column]), float(epsilon[seed, column])
            )
            for rows in batches:
                by.zero_grad()
                cross_entropy(alone(x[rows[seed]]), y[rows[seed]]).backward()
                by.step()
            for name, parameter in alone.named_parameters():
                torch.testing.assert_close(
                    cells.parameters[name][seed, column], parameter, rtol=1e-5, atol=1e-6
                )
            start = torch.nn.utils.parameters_to_vector(networks()[seed].parameters())
            moved = torch.nn.utils.parameters_to_vector(alone.parameters()) - start
            torch.testing.assert_close(
                cells.distances()[seed, column], moved.detach().norm(), rtol=1e-5, atol=1e-6
            )
            loss, wrong = cells.evaluate((x, y))
            torch.testing.assert_close(
                loss[seed, column], cross_entropy(alone(x), y).detach(), rtol=1e-5, atol=1e-6
            )
            assert float(wrong[seed, column]) == float((alone(x).argmax(1) != y).double().mean())


def test_convolutions_stack_too():
    x, y = torch.randn(12, 1, 28, 28, generator=generator(0, "x")), torch.arange(12) % 10
    models = [lenet5(seed=seed) for seed in range(2)]
    cells = Cells(models, (x, y), StackedSettings("sgd", torch.full((2, 2), 0.1)))
    cells.train(4, 1, seed=0, task="test")
    (rows,) = _batches(2, 12, 4, 1, 0, x.device)
    by = torch.optim.SGD(models[1].parameters(), 0.1)
    cross_entropy(models[1](x[rows[1]]), y[rows[1]]).backward()
    by.step()
    for name, parameter in models[1].named_parameters():
        torch.testing.assert_close(
            cells.parameters[name][1, 0], parameter.detach(), rtol=1e-4, atol=1e-6
        )


def test_epochs_use_every_sample_once():
    batches = list(_batches(2, 20, 5, 8, 0, torch.device("cpu")))
    for seed in range(2):
        for epoch in (batches[:4], batches[4:]):
            assert sorted(torch.cat([rows[seed] for rows in epoch]).tolist()) == list(range(20))
    assert not torch.equal(batches[0][0], batches[0][1])
    assert not torch.equal(batches[0][0], batches[4][0])


def test_one_cell_that_diverges_leaves_the_others_alone():
    x, y = problem()
    rates = torch.tensor([[0.1, 1e308], [0.1, 0.1]], dtype=torch.float64)
    cells = Cells(networks(), (x, y), StackedSettings("sgd", rates))
    cells.train(8, 10, seed=0, task="test")
    loss, wrong = cells.evaluate((x, y))
    assert loss.isfinite().tolist() == wrong.isfinite().tolist() == [[True, False], [True, True]]
    alone = Cells(networks(), (x, y), StackedSettings("sgd", rates[:, :1]))
    alone.train(8, 10, seed=0, task="test")
    torch.testing.assert_close(loss[:, 0], alone.evaluate((x, y))[0][:, 0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"models": 1}, "models must be 2, one for each seed, got 1"),
        ({"batch_size": 41}, "batch_size must be at most 40, the samples there are, got 41"),
        (
            {"optimizer": "rmsprop"},
            "optimizer must be one of 'sgd', 'momentum', 'adam', got 'rmsprop'",
        ),
    ],
)
def test_misuse_is_named(change, message):
    def train():
        cells = Cells(
            networks()[: change.get("models")],
            problem(),
            StackedSettings(change.get("optimizer", "sgd"), RATES),
        )
        cells.train(change.get("batch_size", 4), 1, seed=0, task="test")

    with pytest.raises(ValueError, match=message):
        train()
