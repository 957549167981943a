"""The model is never changed, whatever is asked of it and however that ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import lambdahat as lh
from lambdahat.problem import Problem
from lambdahat.problem.evaluators import LARGE
from tests.oracles import dense_hessian
from tests.small_problems import C, D, X, Y, batchnorm


class Trap(nn.Module):
    """Raises at its ``after``-th call, once armed; also writes to a buffer at every call, as no
    model should.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.state = {"left": None, "error": ValueError}

    def __deepcopy__(self, memo: dict[int, Any]) -> Trap:
        twin = Trap()
        # the switch is shared, the way a closure would be
        twin.calls, twin.state = self.calls, self.state
        memo[id(self)] = twin
        return twin

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        if self.state["left"] is not None:
            self.state["left"] -= 1
            if self.state["left"] < 0:
                raise self.state["error"]("trapped")
        return x


def guarded() -> nn.Module:
    """Every kind of state that a careless library would change."""
    model = nn.Sequential(*batchnorm(), Trap())
    model[2].eval()  # flags that differ from module to module
    model[0].weight.grad = torch.full_like(model[0].weight, 3.0)
    model[4].register_forward_hook(lambda module, args, out: out)
    return model.double()


def state_of(model: nn.Module) -> dict[str, Any]:
    return {
        "tensors": {
            k: (id(v), v.data_ptr(), v.detach().clone())
            for k, v in model.state_dict(keep_vars=True).items()
        },
        "versions": {k: v._version for k, v in model.named_parameters()},
        "modes": [module.training for module in model.modules()],
        "momenta": [getattr(module, "momentum", None) for module in model.modules()],
        "grads": {
            k: None if p.grad is None else p.grad.clone() for k, p in model.named_parameters()
        },
        "needs": {k: p.requires_grad for k, p in model.named_parameters()},
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
            for m in model.modules()
        ],
        "rng": torch.get_rng_state(),
        "grad mode": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "attention": torch.backends.mha.get_fastpath_enabled(),
    }


def unchanged(before: Any, after: Any) -> bool:
    if isinstance(before, Tensor):
        return isinstance(after, Tensor) and torch.equal(before, after)
    if isinstance(before, dict):
        return before.keys() == after.keys() and all(unchanged(before[k], after[k]) for k in before)
    if isinstance(before, tuple | list):
        return len(before) == len(after) and all(map(unchanged, before, after))
    return before == after


WORK: dict[str, Callable[[Problem], Any]] = {
    "construction": lambda p: None,
    "loss": lambda p: p.loss(),
    "gradient": lambda p: p.gradient(),
    "hessian": lambda p: lh.hessian(p) @ p.vector,
    "hessian, forward": lambda p: lh.hessian(p, mode="forward") @ p.vector,
    "hessian, finite": lambda p: lh.hessian(p, mode="finite") @ p.vector,
    "hessian of a block": lambda p: (
        lh.hessian(p) @ torch.eye(p.num_parameters, 3, dtype=torch.float64)
    ),
    "part": lambda p: lh.hessian(p).restrict("4.*").dense(),
    "ggn": lambda p: lh.ggn(p) @ p.vector,
    "known trace": lambda p: lh.ggn(p).known_trace(),
    "subsample": lambda p: p.subsample(5, batch_size=5).loss(),
    "refresh": lambda p: p.refresh_statistics().loss(),
    "spectrum": lambda p: lh.spectrum(lh.hessian(p), depth=5),
}


@pytest.mark.parametrize("norm", ["eval", "train", "frozen"])
@pytest.mark.parametrize("work", WORK)
def test_the_model_is_never_changed(work, norm):
    model = guarded()
    before = state_of(model)
    problem = Problem(model, "cross_entropy", (X, Y), batch_size=4, norm=norm)
    WORK[work](problem)
    assert unchanged(before, state_of(model))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("norm", ["eval", "train"])
@pytest.mark.parametrize(
    "work", [name for name in WORK if name not in ("construction", "known trace")]
)
def test_the_model_is_as_it_was_after_an_exception(work, norm, error):
    """The third forward pass from now raises; then the same problem does the same work as if
    nothing had been.
    """
    model = guarded()
    before = state_of(model)
    problem = Problem(model, "cross_entropy", (X, Y), batch_size=4, norm=norm)
    reference = problem.gradient()
    model[-1].state.update(left=2, error=error)
    with pytest.raises(error, match="trapped"):
        WORK[work](problem)
    model[-1].state.update(left=None)
    assert unchanged(before, state_of(model))
    assert torch.equal(problem.gradient(), reference)
    WORK[work](problem)
    assert unchanged(before, state_of(model))


@pytest.mark.parametrize(
    ("left", "error"),
    [(0, ValueError), (1, ValueError), (0, KeyboardInterrupt), (1, KeyboardInterrupt)],
)
def test_the_model_is_as_it_was_after_a_failed_construction(left, error):
    model = guarded()
    before = state_of(model)
    model[-1].state.update(left=left, error=error)
    with pytest.raises(error, match="trapped"):
        Problem(model, "cross_entropy", (X, Y), batch_size=4)
    assert unchanged(before, state_of(model))


@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
def test_the_model_is_as_it_was_after_an_interrupted_exact_trace(error):
    model = nn.Sequential(nn.Linear(D, 5), nn.ReLU(), nn.Linear(5, C), Trap()).double()
    problem = Problem(model, "cross_entropy", (X, Y), batch_size=4)
    before, expected = state_of(model), float(dense_hessian(problem).trace())
    H = lh.hessian(problem)
    model[-1].state.update(left=2, error=error)
    with pytest.raises(error, match="trapped"):
        H.known_trace()
    model[-1].state.update(left=None)
    assert unchanged(before, state_of(model))
    assert H.known_trace() == pytest.approx(expected, rel=1e-10)
    assert unchanged(before, state_of(model))


class Sorting(nn.Module):
    """Writes to a tensor of its own in batches of one kind alone, that is not the kind of the
    first.
    """

    def __init__(self, numbers: int, parameter: bool = False) -> None:
        super().__init__()
        self.fc, seen = nn.Linear(D, C), torch.zeros(numbers)
        if parameter:
            self.seen = nn.Parameter(seen, requires_grad=False)
        else:
            self.register_buffer("seen", seen)

    def forward(self, x: Tensor) -> Tensor:
        if float(x.sum()) > 0:
            self.seen.add_(1.0)
        return self.fc(x)


SORTED = torch.cat([-X[:4].abs(), X[4:].abs()])


@pytest.mark.parametrize("work", WORK)
def test_a_buffer_that_some_batches_write_to(work):
    model = nn.Sequential(*[nn.Identity() for _ in range(4)], Sorting(3)).double()
    before = state_of(model)
    problem = Problem(model, "cross_entropy", (SORTED, Y), batch_size=4)
    problem.gradient()
    WORK[work](problem)
    assert unchanged(before, state_of(model))
    assert model[-1].seen._version == 0


@pytest.mark.parametrize(
    ("numbers", "parameter"), [(LARGE // 4, False), (LARGE // 4, True), (3, True)]
)
def test_what_is_not_copied_is_watched(numbers, parameter):
    """Large buffers, and parameters that are held constant: the error says that they are no
    longer what they were.
    """
    model = Sorting(numbers, parameter).double()
    problem = Problem(model, "cross_entropy", (SORTED, Y), batch_size=4)
    assert not model.seen.any()
    said = (
        "held constant, got a pass that wrote to 'seen', which is now changed; put it back, and"
        " have forward write"
    )
    with pytest.raises(ValueError, match=said):
        problem.loss()
    assert model.seen.all()


@pytest.mark.parametrize("rows", [9, LARGE // 8])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_frozen_embedding_that_passes_renormalise(kind, rows):
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.fc = kind(rows, 4, max_norm=0.5), nn.Linear(4, C)
            self.table.weight.requires_grad_(False)

        def forward(self, words: Tensor) -> Tensor:
            found = self.table(words)
            return self.fc(found.mean(dim=1) if found.ndim == 3 else found)

    words = torch.randint(9, (12, 3), generator=torch.Generator().manual_seed(0))
    target = torch.arange(12) % C
    model = Bag().double()
    before = state_of(model)
    problem = Problem(model, "cross_entropy", (words, target), batch_size=5)
    found, gradient = problem.loss(), problem.gradient()
    lh.trace(lh.hessian(problem))
    assert unchanged(before, state_of(model))
    assert torch.equal(problem.gradient(), gradient)
    with torch.no_grad():
        # the user's own pass does renormalise
        expected = nn.functional.cross_entropy(model(words), target)
    assert not unchanged(before, state_of(model))
    assert found == pytest.approx(float(expected), rel=1e-12)


class Clones(TorchDispatchMode):
    """Counts copies."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.clone.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("norm", "copies"), [("eval", 0), ("train", 3)])
def test_statistics_are_copied_where_they_are_written(norm, copies):
    model = nn.Sequential(nn.Linear(D, 5), nn.BatchNorm1d(5), nn.Linear(5, C)).double()
    problem = Problem(model, "cross_entropy", (X, Y), batch_size=4, norm=norm)
    with Clones() as clones:
        problem.loss()
    assert clones.count == copies * len(problem.batches)


def test_statistics_of_a_layer_that_the_model_sets_to_train():
    class Setting(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self[1].train() else x

    model = Setting(nn.Linear(D, 5), nn.BatchNorm1d(5), nn.Linear(5, C)).double().eval()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    problem = Problem(model, "cross_entropy", (X, Y), batch_size=4)
    problem.gradient()
    assert unchanged(before, dict(model.named_buffers()))


def test_a_large_buffer_that_every_batch_writes_to():
    model = nn.Sequential(nn.Linear(D, C), Trap()).double()
    model[1].calls = torch.zeros(LARGE // 4, dtype=torch.float64)
    problem = Problem(model, "cross_entropy", (X, Y), batch_size=4)
    problem.gradient()
    assert not model[1].calls.any()


def test_sparse_buffers():
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(D, C)
            self.register_buffer("mix", torch.eye(C).to_sparse())

        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(self.mix, self.fc(x).T).T

    model = Mixing().double()
    expected = Problem(model.fc, "cross_entropy", (X, Y))
    assert Problem(model, "cross_entropy", (X, Y)).loss() == pytest.approx(
        expected.loss(), rel=1e-12
    )


def test_state_of_notices_changes():
    """The guard itself can fail."""
    changes = [
        lambda m: m.eval(),
        lambda m: m(X),
        lambda m: m[0].weight.data.add_(1.0),
        lambda m: setattr(m[0].weight, "grad", None),
        lambda m: m[0].weight.requires_grad_(False),
        lambda m: m[0].register_forward_hook(print),
        lambda m: torch.rand(1),
    ]
    for change in changes:
        model = guarded()
        before = state_of(model)
        change(model)
        assert not unchanged(before, state_of(model))
