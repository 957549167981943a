"""Ways to misuse the library: each gets an error that names the argument and the cure, or a right
answer.

``ERRORS``, from ``misuses.py`` here and in ``sampling/`` and ``singular/``, maps a misuse to a
call, its error and what the text must hold; ``ANSWERS`` maps what looks like a misuse to a call
that returns what came and what is right.
"""

from __future__ import annotations

import copy
import re
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lambdahat as lh
from tests import misuses
from tests.cases import Products, with_eigenvalues
from tests.misuses import (
    DATA,
    ESTIMATORS,
    LOSSES,
    MODELS,
    OPERATORS,
    SKEW,
    A,
    Apply,
    H,
    X,
    Y,
    Z,
    function,
    net,
    ones,
    problem,
)
from tests.sampling.misuses import SAMPLING
from tests.singular.misuses import SINGULAR

ERRORS = {**misuses.ERRORS, **SAMPLING, **SINGULAR}


def test_the_table_is_long_enough_and_every_name_is_there_once():
    assert len(ERRORS) >= 50
    groups = (
        DATA,
        LOSSES,
        MODELS,
        OPERATORS,
        ESTIMATORS,
        misuses.ARPACK,
        misuses.ALGEBRA,
        misuses.FILES,
        SAMPLING,
        SINGULAR,
    )
    assert len(ERRORS) == sum(map(len, groups))


@pytest.mark.parametrize("name", ERRORS)
def test_misuse_is_named_with_its_cure(name):
    call, error, pattern = ERRORS[name]
    with pytest.raises(error) as caught:
        call()
    text = " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert re.search(pattern, text, re.DOTALL), text


# What looks like a misuse and has a right answer


def loss_of(model: nn.Module, x: Tensor = X, y: Tensor = Y) -> float:
    return float(F.cross_entropy(copy.deepcopy(model).eval()(x), y).detach())


def saved_and_loaded() -> tuple[Any, Any]:
    with tempfile.TemporaryDirectory() as folder:
        lh.Estimate(2.5).save(Path(folder) / "new" / "folders" / "r")
        return float(lh.Estimate.load(Path(folder) / "new" / "folders" / "r")), 2.5


def under_no_grad() -> tuple[Any, Any]:
    with torch.no_grad():
        return (lh.hessian(problem()) @ ones).norm(), (H @ ones).norm()


def within_a_forgotten_backward() -> tuple[Any, Any]:
    model = net()
    found = problem(model)
    F.cross_entropy(model(X), Y).backward()
    return found.gradient().norm(), torch.cat([p.grad.flatten() for p in model.parameters()]).norm()


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.mean(x), self.spread(x).exp()


def heads() -> tuple[Any, Any]:
    model = TwoHeads()
    mean, variance = model(X)
    return problem(model, "gaussian_nll", (X, Z)).loss(), F.gaussian_nll_loss(
        mean, Z, variance
    ).detach()


def trained() -> nn.Module:
    return net(nn.Dropout(0.5)).train()


def batch_norm_trace() -> tuple[Any, Any]:
    H = lh.hessian(
        problem(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)))
    )
    return lh.trace(H), H.dense().trace()


def read_only() -> tuple[Any, Any]:
    matrix = np.eye(3)
    matrix.setflags(write=False)
    return lh.trace(lh.operator(matrix)), 3.0


ANSWERS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "dropout in train mode is off": lambda: (problem(trained()).loss(), loss_of(trained())),
    "one fixed pass of a shuffling loader": lambda: (
        problem(
            data=list(
                DataLoader(
                    TensorDataset(X, Y),
                    batch_size=3,
                    shuffle=True,
                    generator=torch.Generator().manual_seed(0),
                )
            )
        ).loss(),
        loss_of(net()),
    ),
    "mean and variance from a tuple": heads,
    "targets left out": lambda: (
        problem(data=(X, torch.where(Y == 0, -100, Y)), batch_size=2).loss(),
        loss_of(net(), X[Y != 0], Y[Y != 0]),
    ),
    "an unfinished last batch": lambda: (problem(batch_size=7).loss(), loss_of(net())),
    "a batch larger than the data": lambda: (problem(batch_size=1000).loss(), loss_of(net())),
    "integer matrix": lambda: (lh.trace(lh.operator([[1, 2], [2, 3]])), 4.0),
    "read-only array": read_only,
    "matrix of one": lambda: (lh.spectrum(lh.operator([[3.0]])).trace, 3.0),
    "zero matrix": lambda: (lh.frobenius_norm(lh.operator(np.zeros((5, 5)))), 0.0),
    "zero matrix by products": lambda: (lh.trace(Products(torch.zeros(50, 50))), 0.0),
    "zero Hessian": lambda: (lh.trace(lh.hessian(function(lambda p: p["a"].sum()))), 0.0),
    "eigenpairs of all of P": lambda: (lh.eigenpairs(A, k=8).values.sum(), A.dense().trace()),
    "both ends of a small matrix": lambda: (len(lh.eigenpairs(A, k=7, which="both")), 8),
    "asymmetric trace": lambda: (lh.trace(SKEW), 4.0),
    "no columns": lambda: ((A @ torch.ones(8, 0).double()).numel(), 0),
    "vector of another dtype": lambda: (
        (A @ torch.ones(8)).norm(),
        (A @ torch.ones(8).double()).norm(),
    ),
    "a numpy vector": lambda: ((A @ np.ones(8)).norm(), (A @ torch.ones(8).double()).norm()),
    "saving into a new folder": saved_and_loaded,
    "a cast of model and data": lambda: (
        problem(data=(X.double(), Y), dtype=torch.float64).loss(),
        loss_of(net()),
    ),
    "under no_grad": under_no_grad,
    "the user's own backward": within_a_forgotten_backward,
    "scalar parameters": lambda: (
        lh.trace(lh.hessian(function(lambda p: p["a"] ** 2, {"a": torch.tensor(3.0)}))),
        2.0,
    ),
    "a parameter the loss does not use": lambda: (
        lh.trace(
            lh.hessian(
                function(lambda p: p["a"] ** 2, {"a": torch.tensor(3.0), "b": torch.ones(4)})
            )
        ),
        2.0,
    ),
    "batch-norm of vectors": batch_norm_trace,
    "a data-parallel wrapper": lambda: (problem(nn.DataParallel(net())).loss(), loss_of(net())),
    "a compiled loss of one number in a vector": lambda: (
        problem(loss=lambda z, y: F.cross_entropy(z, y).reshape(1)).loss(),
        loss_of(net()),
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_the_right_answer(name):
    found, right = ANSWERS[name]()
    assert float(found) == pytest.approx(float(right), rel=1e-5, abs=1e-6)


# Interrupted midway


class Interrupting(Products):
    """Raises KeyboardInterrupt at one product, once."""

    def __init__(self, matrix: Tensor, at: int) -> None:
        super().__init__(matrix)
        self.countdown = at

    def _apply(self, block: Tensor) -> Tensor:
        self.countdown -= block.shape[1]
        if -block.shape[1] < self.countdown <= 0:
            raise KeyboardInterrupt
        return super()._apply(block)


LONG: dict[str, Callable[[Any], Any]] = {
    "spectrum": lambda op: lh.spectrum(op, depth=20, probes=2).trace,
    "eigenpairs": lambda op: lh.eigenpairs(op, 3).values.sum(),
    "power iteration": lambda op: lh.power_iteration(op, 2).values.sum(),
    "trace": lambda op: lh.trace(op),
    "frobenius norm": lambda op: lh.frobenius_norm(op),
    "diagonal": lambda op: lh.diagonal(op).value.sum(),
    "logdet": lambda op: lh.logdet(op + 3.0 * lh.identity(op), depth=20),
    "dense": lambda op: op.dense().trace(),
}


@pytest.mark.parametrize("name", LONG)
def test_an_interrupted_estimate_can_be_made_again(name):
    matrix = with_eigenvalues(torch.linspace(-1, 3, 150))
    A = Interrupting(matrix, at=5)
    with pytest.raises(KeyboardInterrupt):
        LONG[name](A)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert float(LONG[name](A)) == float(LONG[name](Products(matrix)))


OF_NETWORKS = {
    "spectrum": LONG["spectrum"],
    "eigenpairs": LONG["eigenpairs"],
    "trace": lambda op: lh.trace(op, method="hutchinson"),  # by itself it takes a closed form
}


@pytest.mark.parametrize("name", OF_NETWORKS)
def test_an_interrupted_network_is_as_before(name):
    """Ctrl-C in the middle of the products of a network leaves the model and the operator as
    they were.
    """
    left = [None]

    def count(z: Tensor) -> Tensor:
        if left[0] is not None:
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
        return torch.tanh(z)

    model = nn.Sequential(nn.Linear(4, 20), Apply(count), nn.Linear(20, 3)).double()
    whole = problem(model, data=(X.double(), Y), batch_size=4)
    H = lh.hessian(whole, memory=0)  # nothing is kept: every product runs the model
    before = copy.deepcopy(model.state_dict())
    expected = float(OF_NETWORKS[name](lh.hessian(whole, memory=0)))
    left[0] = 5 * 3 + 2
    with pytest.raises(KeyboardInterrupt):
        OF_NETWORKS[name](H)
    left[0] = None
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert float(OF_NETWORKS[name](H)) == pytest.approx(expected, rel=1e-9)
