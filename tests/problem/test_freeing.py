"""What a problem, its operators and its chains hold dies with them: no cycle keeps it until the
collector comes.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import lambdahat as lh
from lambdahat._core.device import side_stream
from lambdahat._core.rng import generator
from lambdahat.operators.curvature import Products
from lambdahat.sampling import mala, sgld
from lambdahat.sampling.backends.chain_runner import Runner, Together
from tests.language import seeded

WIDTH = 40


def wide(memory: int | None = None) -> lh.Problem:
    model = seeded(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))
    ).float()
    x = torch.randn(8, WIDTH, generator=generator(0, "wide"))
    return lh.Problem(model, "cross_entropy", (x, torch.arange(8) % 2), memory=memory)


def product(problem: lh.Problem) -> object:
    H = lh.hessian(problem)
    return H, H @ torch.ones(problem.num_parameters)


WORK = {
    "nothing": lambda p: None,
    "other parameters": lambda p: p.at(p.vector),
    "fewer parameters": lambda p: p.restrict("0.*").loss(),
    "a product": product,
    "a block": lambda p: lh.hessian(p) @ torch.ones(p.num_parameters, 4),
    "a Gauss–Newton product": lambda p: lh.ggn(p) @ torch.ones(p.num_parameters),
    "trace": lambda p: lh.trace(lh.hessian(p), max_matvecs=20),
    "eigenpairs": lambda p: lh.eigenpairs(lh.hessian(p), 3, max_matvecs=20),
    "spectrum": lambda p: lh.spectrum(lh.hessian(p), 10),
    "chains one by one": lambda p: lh.sample(
        p, sgld(1e-6, 1.0), 2, 2, batch_size=4, mode="sequential"
    ),
    "chains together": lambda p: lh.sample(p, sgld(1e-6, 1.0), 2, 2, batch_size=4, mode="batched"),
    "exact chains": lambda p: lh.sample(p, mala(1e-6, 1.0), 2, 2, mode="batched"),
}


def noted(monkeypatch: pytest.MonkeyPatch, kind: type) -> list[weakref.ref[object]]:
    """References to all objects of a kind that are made from now on."""
    made: list[weakref.ref[object]] = []
    init = kind.__init__

    def noting(self, *args, **kwargs):
        made.append(weakref.ref(self))
        init(self, *args, **kwargs)

    monkeypatch.setattr(kind, "__init__", noting)
    return made


@pytest.mark.parametrize("memory", [None, 10_000_000])
@pytest.mark.parametrize("work", WORK)
def test_everything_dies_without_the_collector(monkeypatch, work, memory):
    WORK[work](wide(memory))  # what is made once, at the first call in a process
    made = [noted(monkeypatch, kind) for kind in (lh.Problem, Products, Together, Runner)]
    gc.disable()
    try:
        problem = wide(memory)
        assert made[0]
        model, theta = weakref.ref(problem.model), weakref.ref(problem.model[0].weight)
        result = WORK[work](problem)
        del problem, result
        assert [len([ref for ref in kind if ref() is not None]) for kind in made] == [0] * 4
        assert model() is None
        assert theta() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("make", [lh.hessian, lh.ggn])
def test_a_kept_product_holds_no_gradient(monkeypatch, make):
    """The graph of ∇L, or of Jᵀu, is kept between products; itself, a vector for each batch, is
    not.
    """
    made, plain = [], torch.autograd.grad

    def noting(*args, **kwargs):
        found = plain(*args, **kwargs)
        made.extend(weakref.ref(gradient) for gradient in found if kwargs.get("create_graph"))
        return found

    monkeypatch.setattr(torch.autograd, "grad", noting)
    operator = make(wide())
    operator @ torch.ones(operator.dim)
    assert (operator.mode, operator.kept_batches) == ("reverse", 1)
    assert len(made) >= 4  # one for each parameter
    assert not [ref for ref in made if ref() is not None]


def test_there_is_no_side_stream_without_a_gpu():
    assert side_stream(torch.device("cpu")) is None
