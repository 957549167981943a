"""Misuses of the adaptive optimisers, averages and schedules, and the errors they must get."""

import math

import pytest
import torch
from torch import nn

from lambdahat.optim import (
    Gadam,
    GadamAuto,
    IterateAverage,
    Lookahead,
    Padam,
    make_schedule,
    schedules,
)

W = [nn.Parameter(torch.ones(2))]


def sgd():
    return torch.optim.SGD(W, lr=0.1)


def stepped(parameter, *gradients):
    optimizer = Padam([parameter])
    for gradient in gradients:
        parameter.grad = gradient
        optimizer.step()


ERRORS = {
    "p of 0": (
        lambda: Padam(W, p=0),
        ValueError,
        "p must be a finite number above 0, got 0; SGD with momentum is the",
    ),
    "p above a half": (
        lambda: Padam(W, p=0.75),
        ValueError,
        r"p must lie in \(0, ½\], got 0.75; Adam is p = ½",
    ),
    "p as text": (lambda: Padam(W, p="half"), TypeError, "p must be a number above 0, got 'half'"),
    "p in a group": (
        lambda: Padam([{"params": W, "p": 2.0}]),
        ValueError,
        r"p must lie in \(0, ½\]",
    ),
    "negative rate": (
        lambda: Padam(W, lr=-1.0),
        ValueError,
        "lr must be a finite number of at least 0, got -1.0",
    ),
    "NaN rate": (
        lambda: Padam(W, lr=math.nan),
        ValueError,
        "lr must be a finite number of at least 0, got nan",
    ),
    "rate as text": (
        lambda: Padam(W, lr="0.1"),
        TypeError,
        "lr must be a number of at least 0, got '0.1'",
    ),
    "rate as a tensor": (
        lambda: Padam(W, lr=torch.ones(())),
        ValueError,
        "lr must be a number, or one tensor with ca",
    ),
    "beta of 1": (
        lambda: Padam(W, betas=(0.9, 1.0)),
        ValueError,
        r"betas must be two numbers in \[0, 1\)",
    ),
    "one beta": (lambda: Padam(W, betas=(0.9,)), ValueError, r"betas must be two numbers"),
    "negative decay": (
        lambda: Gadam(W, weight_decay=-0.1),
        ValueError,
        "weight_decay must be a finite number of at l",
    ),
    "unknown form": (
        lambda: Gadam(W, form="adam"),
        ValueError,
        "form must be one of 'adamw', 'coded', 'printed', got",
    ),
    "sparse gradient": (
        lambda: stepped(nn.Parameter(torch.ones(3)), torch.ones(3).to_sparse()),
        ValueError,
        "gradients must be dense.*SparseAdam",
    ),
    "sparse gradient after a dense one": (
        lambda: stepped(nn.Parameter(torch.ones(3)), torch.ones(3), torch.ones(3).to_sparse()),
        ValueError,
        "gradients must be dense",
    ),
    "complex weights": (
        lambda: stepped(nn.Parameter(torch.ones(3) * 1j), torch.ones(3) * 1j),
        ValueError,
        "params must be real floating point, got torch.complex64; optimise torch.view_as_real",
    ),
    "negative start": (
        lambda: Gadam(W, average_start=-1),
        ValueError,
        "average_start must be an integer of at least ",
    ),
    "start as share": (
        lambda: Gadam(W, average_start=0.5),
        TypeError,
        "average_start must be an integer.*start_avera",
    ),
    "no period": (
        lambda: Gadam(W, average_every=0),
        ValueError,
        "average_every must be an integer of at least 1, got",
    ),
    "no patience": (
        lambda: GadamAuto(W, patience=0),
        ValueError,
        "patience must be an integer of at least 1, got 0",
    ),
    "record without patience": (
        lambda: Gadam(W).record(1.0),
        ValueError,
        "patience must be given to the optimiser",
    ),
    "another model": (
        lambda: Gadam(W).averaged_model(nn.Linear(2, 1)),
        ValueError,
        "model must hold this optimiser's",
    ),
    "a class to wrap": (
        lambda: Lookahead(torch.optim.SGD),
        TypeError,
        r"base must be an optimiser.*Lookahead\(torch",
    ),
    "no steps ahead": (
        lambda: Lookahead(sgd(), k=0),
        ValueError,
        "k must be an integer of at least 1, got 0",
    ),
    "alpha of 0": (
        lambda: Lookahead(sgd(), alpha=0.0),
        ValueError,
        r"alpha must lie in \(0, 1\], got 0.0",
    ),
    "unknown average": (
        lambda: IterateAverage(nn.Linear(2, 1), "mean"),
        ValueError,
        "kind must be one of 'average', ",
    ),
    "unknown unit": (
        lambda: IterateAverage(nn.Linear(2, 1), unit="batch"),
        ValueError,
        "unit must be one of 'epoch',",
    ),
    "average from call 0": (
        lambda: IterateAverage(nn.Linear(2, 1), start=0),
        ValueError,
        "start must be an integer o",
    ),
    "decay of 1": (
        lambda: IterateAverage(nn.Linear(2, 1), "ema", decay=1.0),
        ValueError,
        "decay must lie in .0, 1",
    ),
    "no batches": (
        lambda: IterateAverage(nn.Linear(2, 1)).refresh_batch_norm([], limit=0),
        ValueError,
        "limit must b",
    ),
    "unknown schedule": (
        lambda: make_schedule("poly", sgd(), 9),
        ValueError,
        "name must be one of 'flat', 'linear'.*",
    ),
    "unknown setting": (
        lambda: make_schedule("linear", sgd(), 9, gamma=1),
        ValueError,
        "'linear' must be among ratio",
    ),
    "setting of flat": (
        lambda: make_schedule("flat", sgd(), 9, ratio=1),
        ValueError,
        "'flat' must be among none, got",
    ),
    "missing setting": (
        lambda: make_schedule("averaging", sgd(), 9),
        ValueError,
        "'averaging' must include averaging",
    ),
    "no epochs": (
        lambda: schedules.cosine(sgd(), 0),
        ValueError,
        "epochs must be an integer of at least 1, got 0",
    ),
    "ratio above 1": (
        lambda: schedules.linear_decay(sgd(), 9, ratio=2.0),
        ValueError,
        r"ratio must lie in \[0, 1\]",
    ),
    "a start after the end": (
        lambda: schedules.averaging_decay(sgd(), 9, 10),
        ValueError,
        r"averaging_start must be ",
    ),
    "no factor": (
        lambda: schedules.step_decay(sgd(), 9, factor=0.0),
        ValueError,
        "factor must be a finite number abo",
    ),
    "milestone as share": (
        lambda: schedules.step_decay(sgd(), 9, (0.5,)),
        TypeError,
        "milestones must be an integer",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_names_the_argument_and_the_cure(name):
    call, kind, message = ERRORS[name]
    with pytest.raises(kind, match=message):
        call()
