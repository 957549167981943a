"""Which parameters KFAC gives which block, what it leaves alone, and what it refuses."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.func import hessian
from torch.nn.attention import SDPBackend, sdpa_kernel

from lambdahat.models import mlp
from lambdahat.operators.kronecker import ekfac, kfac
from lambdahat.problem import Problem
from tests.operators.kronecker_cases import (
    Mixed,
    data,
    dense_ggn,
    make,
    mixed_problem,
    relative,
    vectors,
)


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.mark.parametrize("tied", [False, True])
def test_other_parameters_keep_the_exact_diagonal(tied: bool) -> None:
    problem, x, y = mixed_problem(tied)
    K, F_dense = kfac(problem), dense_ggn(problem, "cross_entropy", x, y)
    loose = {
        "embed.weight": "diagonal (tied)"
        if tied
        else "diagonal (not in a linear or convolution layer)"
    }
    loose |= dict.fromkeys(
        ("norm.weight", "norm.bias", "scale"), "diagonal (not in a linear or convolution layer)"
    )
    structure = K.structure()
    assert {name: text for name, text in structure.items() if text.startswith("diagonal")} == loose
    assert set(structure) - set(loose) == ({"mix", "hidden"} if tied else {"mix", "hidden", "head"})
    where = problem.space.indices(list(loose))
    block = K.dense()[where][:, where]
    assert relative(block, torch.diag(F_dense.diagonal()[where])) < 1e-9


def test_diagonal_is_the_same_where_vmap_cannot_go(monkeypatch: pytest.MonkeyPatch) -> None:
    class Branching(Mixed):
        def forward(self, tokens: Tensor) -> Tensor:
            out = super().forward(tokens)
            return out if float(out.detach().sum()) < 1e9 else -out  # a Python number from data

    problem, x, y = mixed_problem(False)
    branching = Branching()
    branching.load_state_dict(problem.model.state_dict())
    same = kfac(make(branching, x, y))
    V = vectors(problem)
    assert relative(same @ V, kfac(problem) @ V) < 1e-12
    monkeypatch.setattr(torch.func, "vmap", lambda *_: pytest.fail("vmap was used"))
    with pytest.raises(pytest.fail.Exception):
        kfac(problem)


def test_batch_norm_in_eval_and_frozen_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    x, y = data((4,), 3)
    problem = make(model, x, y)
    F_dense, K = dense_ggn(problem, "cross_entropy", x, y), kfac(problem)
    where = problem.space.indices(["1.weight", "1.bias"])
    assert relative(K.dense()[where][:, where], torch.diag(F_dense.diagonal()[where])) < 1e-9
    assert set(kfac(make(model, x, y, norm="frozen")).structure()) == {"0", "3"}
    with pytest.raises(ValueError, match=r"norm must be .*refresh_statistics"):
        kfac(make(model, x[:6], y[:6], norm="train"))


def test_only_chosen_parameters_are_in_it() -> None:
    x, y = data((4,), 3)
    model = mlp([4, 5, 3], "tanh")
    whole = kfac(make(model, x, y))
    G = whole.blocks["0"].G[0]
    bias = kfac(make(model, x, y, parameters="0.bias"))
    assert relative(bias.dense(), G) < 1e-12
    weight = kfac(make(model, x, y, parameters="0.weight"))
    assert relative(weight.dense(), torch.kron(G, whole.blocks["0"].A[0, :-1, :-1])) < 1e-12


def test_weight_used_outside_its_layer_gets_the_exact_diagonal() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # reads out_proj.weight, never calls out_proj
            self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
            self.again = nn.Linear(4, 4)
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.attend(x, x, x, need_weights=False)[0]
            return self.head((self.again(h) @ self.again.weight).mean(dim=1))

    x, y = data((5, 4), 3)
    problem = make(Attention(), x, y)
    K = kfac(problem)
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernel has no batching rule for jacrev
        F_dense = dense_ggn(problem, "cross_entropy", x, y)
    reason = "diagonal (not used through its layer alone)"
    assert {
        K.structure()[name] for name in ("attend.out_proj.weight", "again.weight", "again.bias")
    } == {reason}
    assert K.structure()["head"].startswith("kronecker")
    where = problem.space.indices(
        [name for name in problem.space.names if not name.startswith("head")]
    )
    assert relative(K.dense()[where][:, where], torch.diag(F_dense.diagonal()[where])) < 1e-9


@pytest.mark.parametrize("shape", [(4,), (3, 4)])
def test_layer_on_a_learned_input_that_all_samples_share_gets_the_exact_diagonal(
    shape: tuple[int, ...],
) -> None:
    class Query(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seed", torch.randn(shape))
            self.make, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            query = torch.tanh(self.make(self.seed)).reshape(-1, 4).sum(dim=0)
            return self.head(torch.tanh(x * query))

    x, y = data((4,), 3)
    problem = make(Query(), x, y)
    K, F_dense = kfac(problem), dense_ggn(problem, "cross_entropy", x, y)
    reason = (
        "one output for several samples" if len(shape) == 2 else "not used through its layer alone"
    )
    assert K.structure()["make.weight"] == f"diagonal ({reason})"
    where = problem.space.indices(["make.weight", "make.bias"])
    assert relative(K.known_diagonal()[where], F_dense.diagonal()[where]) < 1e-9


def test_the_model_is_left_alone_even_after_an_error() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls_left = nn.Linear(4, 3), 100

        def forward(self, x: Tensor) -> Tensor:
            self.calls_left -= 1
            if self.calls_left < 0:
                raise KeyboardInterrupt
            return self.layer(x)

    model = Fails()
    problem = make(model, *data((4,), 3))
    before = copy.deepcopy(model.state_dict())
    kfac(problem)
    problem.model.calls_left = 2  # the probe and one batch, then the interruption
    with pytest.raises(KeyboardInterrupt):
        kfac(problem)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    for module in (*model.modules(), *problem.model.modules()):
        assert not module._forward_hooks


def test_training_afterwards_does_not_change_it() -> None:
    model = mlp([4, 3])
    K = kfac(make(model, *data((4,), 3)))
    before = K.dense()
    with torch.no_grad():
        model[0].weight.add_(1.0)
    assert torch.equal(before, K.dense())


def test_sequences_of_logits_by_monte_carlo() -> None:
    x, y = torch.randint(6, (4, 5)), torch.randint(6, (4, 5))
    problem = make(nn.Sequential(nn.Embedding(6, 3), nn.Linear(3, 6)), x, y)
    loss = torch.nn.CrossEntropyLoss()
    z = problem.model(x).detach().reshape(-1, 6)
    h = hessian(lambda z: loss(z, y.reshape(-1)))(z)
    # head bias: its Fisher's trace is that of M over all positions
    trace_M = float(torch.einsum("rcrc->", h))
    found = [
        float(kfac(problem, kind="monte_carlo", samples=4, seed=seed).blocks["1"].G[0].trace())
        for seed in range(40)
    ]
    mean, error = torch.tensor(found).mean(), torch.tensor(found).std() / math.sqrt(40)
    assert abs(float(mean) - trace_M) < 4 * float(error)


def test_misuse_is_named() -> None:
    x, y = data((4,), 3)
    problem = make(mlp([4, 3]), x, y)
    with pytest.raises(ValueError, match=r"kind must be one of 'exact'.*use kind='exact'"):
        kfac(problem, kind="type-2")
    with pytest.raises(
        ValueError, match=r"samples must be left out unless kind is \"monte_carlo\""
    ):
        kfac(problem, samples=3)
    with pytest.raises(TypeError, match="problem must be made of a model and a loss"):
        kfac(Problem.from_function(lambda p: p["w"].square().sum(), {"w": torch.ones(2)}))

    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.layer(x.transpose(0, 1))).mean(dim=0))

    sequences = make(TimeFirst(), *data((5, 4), 3))
    assert kfac(sequences).structure()["layer"].startswith("kronecker")
    with pytest.raises(
        ValueError, match="the input of layer 'layer' must have the 3 samples first"
    ):
        ekfac(sequences)


def test_it_can_be_made_without_gradients() -> None:
    problem, _, _ = mixed_problem(tied=False)
    expected = kfac(problem).known_diagonal()
    with torch.no_grad():
        assert torch.equal(kfac(problem).known_diagonal(), expected)
