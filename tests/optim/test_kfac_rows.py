"""KFAC's steps made of the samples of a backward pass are those made of its gradient, and only
where they may be.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lambdahat._core.rng import generator
from lambdahat.optim import KFAC, kfac
from lambdahat.optim.kfac import LayerRows, explain


def drawn(*shape, name):
    return torch.randn(*shape, generator=generator(0, "test rows", name), dtype=torch.float64)


@pytest.fixture
def data():
    return drawn(6, 40, name="x"), torch.arange(6) % 3


@pytest.fixture
def network():
    """Two layers wider than the batch, one of them without a bias, and one that is not."""
    model = nn.Sequential(
        nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 20, bias=False), nn.Tanh(), nn.Linear(20, 3)
    )
    model = model.double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(0.2 * drawn(*parameter.shape, name=number))
    return model


def plain(optimizer, model, x, y):
    F.cross_entropy(model(x), y).backward()


def clipped(optimizer, model, x, y):
    plain(optimizer, model, x, y)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def penalised(optimizer, model, x, y):
    (
        F.cross_entropy(model(x), y) + 1e-6 * sum(p.square().sum() for p in model.parameters())
    ).backward()


def accumulated(optimizer, model, x, y):
    for part in (slice(0, 2), slice(2, 6)):
        (F.cross_entropy(model(x[part]), y[part]) * len(y[part]) / len(y)).backward()


def edited(optimizer, model, x, y):
    plain(optimizer, model, x, y)
    for parameter in model.parameters():
        parameter.grad.view(-1)[-1] += 1e-3


def bias_edited(optimizer, model, x, y):
    plain(optimizer, model, x, y)
    model[0].bias.grad.mul_(1.001)


def run(model, data, way, **settings):
    optimizer = KFAC(model, 0.1, **settings)
    for _ in range(13):
        optimizer.zero_grad()
        way(optimizer, model, *data)
        optimizer.step()
    return torch.cat([parameter.detach().ravel() for parameter in model.parameters()])


@pytest.mark.parametrize(
    "settings", [{}, {"momentum": 0.9, "weight_decay": 0.1}, {"kl_clip": 1e-4}], ids=str
)
@pytest.mark.parametrize("way", [plain, clipped, penalised, accumulated, edited, bias_edited])
def test_steps_from_rows_are_those_from_the_gradient(network, data, way, settings, monkeypatch):
    used, step_of = [], kfac.step_of
    monkeypatch.setattr(kfac, "step_of", lambda *given: used.append(given) or step_of(*given))
    found = run(copy.deepcopy(network), data, way, **settings)
    assert len(used) == {plain: 2 * 13, bias_edited: 13}.get(way, 0)
    monkeypatch.setattr(kfac, "rows_of", lambda *given: None)
    torch.testing.assert_close(found, run(network, data, way, **settings), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e25])
@pytest.mark.parametrize("biased", [True, False])
def test_a_gradient_is_told_from_the_sum_over_the_samples_at_any_scale(scale, biased):
    x, g = drawn(6, 40, name="x").float(), drawn(6, 30, name="g").float()
    gradients = [g.T @ x, g.sum(dim=0)][: 1 + biased]
    assert explain(LayerRows(x, g), gradients)
    for number in range(len(gradients)):
        wrong = [
            (1.01 if number == index else 1.0) * scale * part
            for index, part in enumerate(gradients)
        ]
        assert not explain(LayerRows(x, scale * g), wrong)


def test_nothing_recorded_outlives_a_step(network, data):
    optimizer = KFAC(network, 0.1)
    plain(optimizer, network, *data)
    assert len(optimizer._rows) == 3
    optimizer.step()
    assert not optimizer._rows
    plain(optimizer, network, *data)
    optimizer.zero_grad()
    assert not optimizer._rows
