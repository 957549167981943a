"""Models, functions and losses of ``torch.compile``: the same numbers as without."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import lambdahat as lh
from lambdahat.problem import Problem
from tests.oracles import dense_hessian, dense_second_moment
from tests.small_problems import X, Y


def compiled(part):
    return torch.compile(part, backend="eager")


class Body(nn.Sequential):
    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4))
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(super().forward(x))


def network(activation: Callable[[Tensor], Tensor] = torch.relu) -> nn.Sequential:
    with torch.random.fork_rng():
        return nn.Sequential(Body(activation), nn.Linear(4, 3)).double()


def within() -> nn.Module:
    model = network()
    model[0] = compiled(model[0])
    return model


def in_place() -> nn.Module:
    model = network()
    model.compile(backend="eager")
    return model


def already_run() -> nn.Module:
    model = compiled(network())
    model(X).sum().backward()
    model.zero_grad()
    return model


MODELS = {
    "the model": lambda: compiled(network()),
    "already run": already_run,
    "in place": in_place,
    "a part": within,
    "a part and the whole": lambda: compiled(within()),
    "a function in a layer": lambda: network(compiled(torch.relu)),
    "within DataParallel": lambda: nn.DataParallel(compiled(network())),
    "around DataParallel": lambda: compiled(nn.DataParallel(network())),
}


@pytest.mark.parametrize("name", MODELS)
def test_curvature_of_a_compiled_model(name):
    plain, model = Problem(network(), "cross_entropy", (X, Y)), MODELS[name]()
    names = list(model.state_dict())
    problem = Problem(model, "cross_entropy", (X, Y))
    right = dense_hessian(plain)
    assert problem.space.names == plain.space.names
    for mode in ("reverse", "forward"):
        assert torch.allclose(lh.hessian(problem, mode=mode).dense(), right, atol=1e-12)
    moment = dense_second_moment(plain)
    assert torch.allclose(lh.fisher(problem, "empirical").dense(), moment, atol=1e-12)
    assert torch.allclose(lh.kfac(problem).dense(), lh.kfac(plain).dense(), atol=1e-12)
    assert problem.at(model.state_dict()).loss() == problem.loss()
    assert list(model.state_dict()) == names


LOSSES = {
    "a function": lambda: compiled(lambda z, y: F.cross_entropy(z, y)),
    "a module": lambda: compiled(nn.CrossEntropyLoss()),
}


@pytest.mark.parametrize("name", LOSSES)
def test_curvature_of_a_compiled_loss(name):
    right = dense_hessian(Problem(network(), "cross_entropy", (X, Y)))
    problem = Problem(network(), LOSSES[name](), (X, Y))
    assert torch.allclose(lh.hessian(problem).dense(), right, atol=1e-12)


@pytest.mark.parametrize("loss", [None, "cross_entropy"])
def test_curvature_of_a_compiled_function(loss):
    model = network()
    right = dense_hessian(Problem(model, "cross_entropy", (X, Y)))

    def output(params, x):
        return functional_call(model, params, (x,))

    def value(params, batch):
        return F.cross_entropy(output(params, batch[0]), batch[1])

    params = {name: part.detach() for name, part in model.named_parameters()}
    function = compiled(value if loss is None else output)
    problem = Problem.from_function(function, params, (X, Y), loss=loss)
    assert torch.allclose(lh.hessian(problem).dense(), right, atol=1e-12)


def test_compilation_is_as_before_also_after_threads():
    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        return graph

    function, right = torch.compile(torch.sin, backend=backend), []
    problem = Problem(network(compiled(torch.relu)), "cross_entropy", (X, Y))
    dense = dense_hessian(Problem(network(), "cross_entropy", (X, Y)))

    def work():
        right.append(torch.allclose(lh.hessian(problem).dense(), dense, atol=1e-12))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 4
    assert not seen
    function(X)
    assert len(seen) == 1
