"""Optimisers and regularizers by name."""

import pytest
import torch
from torch import nn

from lambdahat.optim.registry import OPTIMIZERS, REGULARIZERS, make_optimizer, make_regularizer
from lambdahat.problem import Problem
from lambdahat.training import fit

NEEDED = {"lanczos-newton": {"damping": 1.0}}
RULES = {
    "l1": {},
    "l2": {},
    "metric": {},
    "selective-l2": {"omega": 0.5},
    "stopped-l2": {"tau": 1},
    "stopped-selective-l2": {"tau": 1, "omega": 0.5},
}


def problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(64, 3)
    return model, Problem(model, "cross_entropy", (x, (x.sum(1) > 0).long()))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimiser_lowers_the_loss(name):
    model, here = problem()
    model[0].bias.requires_grad_(False)
    kept = model[0].bias.clone()
    optimizer = make_optimizer(name, model, lr=0.02, **NEEDED.get(name, {}))
    assert type(optimizer) is OPTIMIZERS[name]
    before = here.loss()
    fit(here, optimizer, 10, batch_size=32, validation=here.batches)
    assert here.loss() < before
    assert torch.equal(model[0].bias, kept)


@pytest.mark.parametrize("name", REGULARIZERS)
def test_every_regularizer_changes_the_run(name):
    ends = []
    for rules in ([], [make_regularizer(name, rate=0.1, **RULES[name])]):
        model, here = problem()
        fit(here, torch.optim.SGD(model.parameters(), lr=0.1), 2, batch_size=32, regularizers=rules)
        ends.append(Problem(model, "cross_entropy", here.batches).vector)
    assert not torch.equal(*ends)
