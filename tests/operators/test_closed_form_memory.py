"""Exact traces and diagonals within a budget of memory: by rows, by pairs of positions, a few
factors at a time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

import lambdahat as lh
from lambdahat.operators.exact import layer_squares
from lambdahat.operators.rounding import PrecisionComparison
from lambdahat.problem.memory import LiveBytes
from tests.operators.test_closed_form import MODELS as SMALL
from tests.operators.test_closed_form import agree, flat, problem_of
from tests.operators.test_layer_squares import refuse
from tests.oracles import dense_ggn


@pytest.fixture(autouse=True)
def without_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of the closed form alone: the comparison with float64 is counted in
    ``test_rounding``.
    """
    monkeypatch.setattr(PrecisionComparison, "of", classmethod(lambda *_: None))
    monkeypatch.setattr("lambdahat.estimators._trace.closed_form_rounding", lambda *_: None)


MEBI = 2**20
WAYS = ("_linear_squares", "_position_norms", "_shared_squares")
# name: model, shape of one input, the way that the sums of squares of the first layer go
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "linear on three positions": (
        lambda: flat(nn.Linear(7, 6), nn.Tanh(), width=18),
        (3, 7),
        WAYS[1],
    ),
    "without bias": (
        lambda: flat(nn.Linear(7, 6, bias=False), nn.Tanh(), width=18),
        (3, 7),
        WAYS[1],
    ),
    "linear on 2 × 2 positions": (
        lambda: flat(nn.Linear(8, 9), nn.Tanh(), width=36),
        (2, 2, 8),
        WAYS[1],
    ),
    "linear on many positions": (
        lambda: flat(nn.Linear(3, 2), nn.Tanh(), width=14),
        (7, 3),
        WAYS[2],
    ),
    "linear on one position": (
        lambda: flat(nn.Linear(5, 4), nn.Tanh(), width=4),
        (1, 1, 5),
        WAYS[0],
    ),
    "convolution": (lambda: flat(nn.Conv2d(2, 8, 3), nn.Tanh(), width=32), (2, 4, 4), WAYS[1]),
    "groups": (lambda: flat(nn.Conv1d(6, 8, 3, groups=2), nn.Tanh(), width=16), (6, 4), WAYS[1]),
    "groups on one position": (
        lambda: flat(nn.Conv1d(6, 8, 3, groups=2), nn.Tanh(), width=8),
        (6, 3),
        WAYS[1],
    ),
    "convolution at one position": (
        lambda: flat(nn.Conv2d(2, 3, 3), nn.Tanh(), width=3),
        (2, 3, 3),
        WAYS[0],
    ),
}


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each way is gone, from here on."""
    seen: Counter[str] = Counter()

    def spy(way: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def gone(*args: Any) -> Any:
            seen[way] += 1
            return plain(*args)

        return gone

    for way in WAYS:
        monkeypatch.setattr(layer_squares, way, spy(way, getattr(layer_squares, way)))
    return seen


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("rows", [2, 9])
@pytest.mark.parametrize("name", list(MODELS))
def test_every_way_is_exact_by_any_rows(
    name: str, rows: int, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, shape, way = MODELS[name]
    problem = problem_of(make, shape, batch_size=9)
    dense = dense_ggn(problem)

    class Room(int):
        """The smallest room there is, which holds ``rows`` rows of any layer."""

        def __floordiv__(self, other: int) -> int:
            return rows

    monkeypatch.setattr(layer_squares, "FORMED_BYTES", Room(0))
    if not together:
        monkeypatch.setattr(layer_squares, "_pull_together", refuse)
    agree(problem, dense)
    operator = lh.ggn(problem)
    assert operator.exact.trusted.names == set(problem.space.names)
    seen, blocks = counted(monkeypatch), math.ceil(9 / rows)
    operator.known_trace()
    # the last layer has one position
    assert seen == Counter({way: blocks}) + Counter({WAYS[0]: blocks})


@pytest.mark.parametrize(
    "name", ["conv2d", "conv3d", "conv2d dilated, grouped", "batch-norm 2d", "linear on 4-D"]
)
def test_other_layers_by_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(*SMALL[name][:2])
    dense = dense_ggn(problem)
    for room in (1, 3000):
        monkeypatch.setattr(layer_squares, "FORMED_BYTES", room)
        agree(problem, dense)


WORK: dict[str, Callable[[lh.Problem], Any]] = {
    "trace": lambda problem: lh.trace(lh.ggn(problem), method="exact"),
    "diagonal": lambda problem: lh.ggn(problem).known_diagonal(),
}


def wide(positions: int, memory: int | None = None) -> lh.Problem:
    """With 64 samples, 10 factors and 80 kB of parameters, gradients of each factor of each
    sample take 51 MB.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(200, 100), nn.ReLU(), nn.Flatten(), nn.Linear(100 * positions, 10)
        )
        data = torch.randn(64, positions, 200), torch.arange(64) % 10
    return lh.Problem(model, "cross_entropy", data, memory=memory)


def peak(problem: lh.Problem, work: str) -> int:
    with LiveBytes() as seen:
        WORK[work](problem)
    return seen.peak


@pytest.mark.parametrize(("positions", "work"), [(1, "trace"), (1, "diagonal"), (3, "trace")])
def test_no_gradients_of_samples_where_none_are_needed(positions: int, work: str) -> None:
    assert peak(wide(positions), work) <= 2 * MEBI


def test_gradients_of_samples_stay_within_their_room(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak(wide(3), "diagonal") <= layer_squares.FORMED_BYTES + 2 * MEBI
    # as on a GPU, where it alone bounds them
    monkeypatch.setattr(layer_squares, "SIGNAL_BYTES", 2 * MEBI)
    monkeypatch.setattr(layer_squares, "FORMED_BYTES", 1 << 60)
    assert peak(wide(3), "diagonal") <= 4 * MEBI


def test_a_budget_holds_them() -> None:
    budget = 8 * MEBI
    bound, free = wide(3, budget), wide(3)
    assert peak(bound, "diagonal") <= budget < peak(free, "diagonal")
    torch.testing.assert_close(
        lh.ggn(bound).known_diagonal(), lh.ggn(free).known_diagonal(), rtol=1e-4, atol=1e-9
    )


@pytest.mark.parametrize("together", [True, False])
def test_signals_stay_within_their_room_where_the_batch_cannot_be_cut(
    together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer with far more outputs than inputs, and a loss whose factors are those of the whole
    batch.
    """
    make = lambda: flat(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), width=8)  # noqa: E731
    problem = problem_of(make, (1, 6, 6), lambda z, y: (z - y).pow(4).mean(), batch_size=9)
    dense = dense_ggn(problem)
    row = (
        9 * (8 * 6 * 6 + 8) * 8
    )  # bytes of one factor's signals, at the convolution's output and the last layer's input
    monkeypatch.setattr(layer_squares, "SIGNAL_BYTES", 2 * row)
    if not together:
        monkeypatch.setattr(layer_squares, "_pull_together", refuse)
    sent, plain = [], layer_squares._of_layer

    def spy(call: Any, deltas: Any, *rest: Any) -> Any:
        sent.append(sum(map(len, deltas)))
        return plain(call, deltas, *rest)

    monkeypatch.setattr(layer_squares, "_of_layer", spy)
    agree(problem, dense)
    assert max(sent) == 1


class Doubled(torch.autograd.Function):
    """2h, by a backward that takes no batched tensor."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, error: type[Exception]) -> Tensor:
        ctx.error = error
        return 2 * h

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor, None]:
        if torch._C._functorch.is_batchedtensor(delta):
            raise ctx.error("no batched tensors")
        return 2 * delta, None


class Double(nn.Module):
    def __init__(self, error: type[Exception] | None) -> None:
        super().__init__()
        self.error = error

    def forward(self, h: Tensor) -> Tensor:
        return 2 * h if self.error is None else Doubled.apply(h, self.error)


@pytest.mark.parametrize("shape", [(4,), (3, 4)])
@pytest.mark.parametrize("error", [RuntimeError, ValueError, TypeError, AssertionError])
def test_a_backward_of_the_user_s_own_that_takes_no_batches(
    error: type[Exception], shape: tuple[int, ...]
) -> None:
    def make(kind: type[Exception] | None) -> lh.Problem:
        width = 5 * (shape[0] if len(shape) > 1 else 1)
        return problem_of(
            lambda: flat(nn.Linear(4, 5), Double(kind), nn.Tanh(), width=width), shape
        )

    dense = dense_ggn(make(None))
    operator = lh.ggn(make(error))
    assert lh.trace(operator).value == pytest.approx(float(dense.trace()), rel=1e-10)
    torch.testing.assert_close(operator.known_diagonal(), dense.diagonal(), rtol=1e-10, atol=1e-14)


def test_an_error_of_the_user_s_own_is_seen() -> None:
    x = torch.ones(3, requires_grad=True)
    z = 2 * x

    def broken(delta: Tensor) -> Tensor:
        raise LookupError("mine")

    z.register_hook(broken)
    with pytest.raises(LookupError, match="mine"):
        layer_squares.pull_signals([z], [get_gradient_edge(x)], [torch.eye(3)], None)
    model = flat(nn.Linear(4, 5), nn.Tanh(), width=5).double()
    model[0].register_forward_hook(lambda layer, given, left: left.register_hook(broken) and None)
    data = torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3
    with pytest.raises(LookupError, match="mine"):
        lh.trace(lh.ggn(lh.Problem(model, "cross_entropy", data)), method="exact")
