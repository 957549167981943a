"""Models that checkpoint their activations: the same numbers in less memory, and none wrong
where that cannot be.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as checkpointing
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lambdahat as lh
from lambdahat._core.rng import generator
from lambdahat.problem.checkpointing import checkpoints_of
from lambdahat.problem.memory import LiveBytes
from lambdahat.sampling._sample import pieces_within
from tests.language import causal, padded, translating, translations
from tests.oracles import dense_ggn, dense_hessian


class Deep(nn.Module):
    """Residual blocks, each wide inside, run plainly or checkpointed."""

    def __init__(self, reentrant: bool | None, depth: int, width: int) -> None:
        super().__init__()
        self.reentrant, inner = reentrant, 4 * width
        self.first, self.last = nn.Linear(5, width), nn.Linear(width, 3)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, inner),
                nn.Tanh(),
                nn.Linear(inner, inner),
                nn.Tanh(),
                nn.Linear(inner, width),
            )
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + (
                block(x)
                if self.reentrant is None
                else checkpoint(block, x, use_reentrant=self.reentrant)
            )
        return self.last(x)


def problem(
    reentrant: bool | None, depth: int = 6, width: int = 8, samples: int = 600, **options: Any
) -> lh.Problem:
    return of(lambda: Deep(reentrant, depth, width), samples, **options)


def of(make: Callable[[], nn.Module], samples: int = 9, **options: Any) -> lh.Problem:
    torch.manual_seed(0)
    model = make().double()
    x = torch.randn(samples, 5, generator=generator(0, "x"), dtype=torch.float64)
    return lh.Problem(model, "cross_entropy", (x, torch.arange(samples) % 3), **options)


def peak(work: Callable[[], Any]) -> int:
    with LiveBytes() as seen:
        work()
    return seen.peak


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("make", "dense"), [(lh.hessian, dense_hessian), (lh.ggn, dense_ggn)])
def test_products_are_exact(reentrant, make, dense):
    small, plain = (problem(kind, depth=2, width=2, samples=9) for kind in (reentrant, None))
    operator, block = (
        make(small),
        torch.randn(small.num_parameters, 3, generator=generator(0, "v")).double(),
    )
    exact = dense(plain) @ block
    assert torch.allclose(operator @ block, exact, atol=1e-12)
    assert (operator.mode, operator.kept_batches) == ("forward", 0)
    assert torch.allclose(make(small, mode="reverse") @ block, exact, atol=1e-12)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("make", "part"), [(lh.hessian, 0.45), (lh.ggn, 0.35)])
def test_products_take_less_memory_than_a_kept_graph(reentrant, make, part):
    plain, saving = problem(None), problem(reentrant)
    v = torch.ones(plain.num_parameters, dtype=torch.float64)
    assert peak(lambda: make(saving) @ v) < part * peak(lambda: make(plain) @ v)
    assert peak(lambda: make(saving) @ v) < 0.6 * peak(lambda: make(plain, mode="forward") @ v)


def test_a_gradient_and_a_chain_take_less_memory():
    plain, saving = problem(None), problem(False)
    assert torch.equal(saving.gradient(), plain.gradient())
    assert peak(saving.gradient) < 0.75 * peak(plain.gradient)
    plain.memory = saving.memory = 2 * peak(plain.gradient)
    assert pieces_within(saving, 600) < pieces_within(plain, 600)


def test_a_budget_that_is_too_small_for_graphs():
    """Batches of the model that checkpoints need not be cut as small, and the budget holds."""
    budget = 3_000_000
    plain, saving = (problem(kind, memory=budget) for kind in (None, False))
    assert max(saving.batches.sizes) > 2 * max(plain.batches.sizes)
    v = torch.ones(plain.num_parameters, dtype=torch.float64)
    assert peak(lambda: lh.hessian(saving) @ v) <= budget
    assert torch.allclose(lh.hessian(saving) @ v, lh.hessian(plain) @ v, atol=1e-12)


class Captured(nn.Module):
    """A part that uses a tensor which is neither its argument nor in the model: it cannot be
    differentiated alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.first.weight.sum().exp()
        return self.last(
            checkpoint(lambda z: (self.first(z) * scale).tanh(), x, use_reentrant=False)
        )


def test_tensors_from_outside_are_not_lost():
    found = of(Captured)
    assert not found.recomputes
    assert torch.allclose(lh.hessian(found).dense(), dense_hessian(found), atol=1e-10)


class Particular(nn.Module):
    """A part for batches of nine alone, or one that can be run only once in a pass."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.last, self.left = kind, nn.Linear(5, 4), nn.Linear(4, 3), 0

    def part(self, x: Tensor) -> Tensor:
        if self.kind == "once":
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("used up")
        return self.first(x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        self.left = 1
        x = x.reshape(9, 5) if self.kind == "nine" else x
        return self.last(
            checkpoint(self.part, x, use_reentrant=False) if self.kind else self.part(x)
        )


@pytest.mark.parametrize(("kind", "again"), [("nine", True), ("once", False)])
def test_parts_that_cannot_be_looked_at_as_usual(kind, again):
    found, plain = of(lambda: Particular(kind)), of(lambda: Particular(""))
    assert found.recomputes is again
    assert torch.allclose(found.gradient(), plain.gradient(), atol=1e-14)


def test_whether_parts_are_run_again_is_found_once(monkeypatch):
    found = problem(False, depth=1, width=2, samples=9, batch_size=3)
    assert found.recomputes
    monkeypatch.setattr(
        lh.Problem, "vector", property(lambda self: pytest.fail("the parameters were copied again"))
    )
    assert found.recomputes


class Structured(nn.Module):
    """Checkpoints within a checkpoint, keyword arguments, and outputs that are not all tensors."""

    def __init__(self, on: bool) -> None:
        super().__init__()
        self.on, self.inner, self.last = on, nn.Linear(5, 5), nn.Linear(5, 3)

    def part(self, x: Tensor, *, scales: dict[str, Tensor], times: int) -> dict[str, Any]:
        again = (lambda z: self.call(torch.tanh, self.inner(z))) if times else torch.sin
        return {"out": self.call(again, x * scales["a"]), "times": times, "count": torch.arange(2)}

    def call(self, part: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return (
            checkpoint(part, *args, use_reentrant=False, **kwargs)
            if self.on
            else part(*args, **kwargs)
        )

    def forward(self, x: Tensor) -> Tensor:
        scales = {"a": self.inner.bias.exp()}
        found = self.call(self.part, x, scales=scales, times=1)
        return self.last(found["out"]) * found["times"] * found["count"].sum()


def test_arguments_and_outputs_of_any_form():
    on, off = of(lambda: Structured(True)), of(lambda: Structured(False))
    assert on.recomputes
    theta = off.vector + 0.3
    assert torch.allclose(on.gradient(theta), off.gradient(theta), atol=1e-13)
    assert torch.allclose(
        lh.hessian(on.at(theta)).dense(), dense_hessian(off.at(theta)), atol=1e-11
    )
    assert torch.allclose(lh.ggn(on).dense(), dense_ggn(off), atol=1e-11)


class Once(torch.autograd.Function):
    """Differentiable once."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad * (1 - ctx.saved_tensors[0].tanh() ** 2)


class OnceInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(lambda z: Once.apply(self.first(z)), x, use_reentrant=False))


def test_an_operation_that_can_be_differentiated_once_is_noticed():
    found = lh.hessian(of(OnceInside))
    with pytest.warns(UserWarning, match="finite differences"):
        matrix = found.dense()
    assert found.mode == "finite"
    plain = of(lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)))
    assert torch.allclose(matrix, dense_hessian(plain), atol=1e-6)


def test_the_library_is_put_back():
    function = inspect.unwrap(checkpointing.checkpoint)
    before = function.__code__
    lh.hessian(problem(False, depth=1, width=2, samples=6)).dense()
    assert function.__code__ is before
    model = Deep(False, 1, 2)
    model(torch.ones(2, 5)).sum().backward()
    assert model.blocks[0][0].weight.grad is not None


def test_a_model_without_checkpoints_is_left_alone():
    assert not problem(None, depth=1, width=2, samples=6).recomputes


def test_layers_of_transformers_save_memory_too():
    """They checkpoint in training alone; a problem's passes are in evaluation mode."""
    model, saving = causal(), causal()
    saving.gradient_checkpointing_enable()
    problems = [lh.Problem(m, "cross_entropy", padded(64)) for m in (model, saving)]
    v = torch.ones(problems[0].num_parameters, dtype=torch.float64)
    assert problems[1].recomputes
    products = [lh.hessian(p) @ v for p in problems]
    assert torch.allclose(*products, rtol=1e-10, atol=1e-11)
    assert peak(lambda: lh.hessian(problems[1]) @ v) < peak(lambda: lh.hessian(problems[0]) @ v)


def test_layers_of_an_encoder_decoder_are_run_again():
    """Its decoder has a configuration of its own, which asks for keys and values to be kept; the
    user's stays.
    """
    model, saving = translating("t5"), translating("t5")
    saving.gradient_checkpointing_enable()
    asked = [layer.config.use_cache for layer in (saving, saving.encoder, saving.decoder)]
    problems = [lh.Problem(m, "model", translations(5)) for m in (model, saving)]
    assert problems[1].recomputes
    assert (
        [layer.config.use_cache for layer in (saving, saving.encoder, saving.decoder)]
        == asked
        == [True, False, True]
    )
    v = torch.ones(problems[0].num_parameters, dtype=torch.float64)
    assert torch.allclose(*(problem.gradient() for problem in problems), rtol=1e-6, atol=1e-8)
    assert torch.allclose(*(lh.hessian(problem) @ v for problem in problems), rtol=1e-5, atol=1e-6)


class Shared:
    """A configuration that copies of a model share."""

    use_cache = True

    def __deepcopy__(self, memo):
        return self


def test_a_configuration_that_copies_share_stays_as_it_is():
    model = nn.Linear(2, 2)
    model.config = Shared()
    private = lh.Problem(model, "cross_entropy", (torch.ones(2, 2), torch.tensor([0, 1]))).model
    assert model.config.use_cache
    assert not private.config.use_cache


class Handing(nn.Module):
    """A checkpointed part with a keyword of an awkward name, which hands its input on beside
    what it makes.
    """

    def __init__(self, on):
        super().__init__()
        self.a, self.b, self.on = nn.Linear(3, 4), nn.Linear(4, 2), on

    def part(self, h, args=1.0):
        return h, torch.tanh(h) * args

    def forward(self, x):
        h = self.a(x)
        given, made = (
            checkpoint(self.part, h, args=3.0, use_reentrant=False)
            if self.on
            else self.part(h, args=3.0)
        )
        return self.b(given + made)


@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_awkward_keywords_and_inputs_handed_on(mode):
    torch.manual_seed(0)
    plain = Handing(False).double()
    checked = Handing(True).double()
    checked.load_state_dict(plain.state_dict())
    data = (torch.randn(5, 3).double(), torch.tensor([0, 1, 1, 0, 1]))
    expected, found = (
        lh.hessian(lh.Problem(model, "cross_entropy", data), mode=mode).dense()
        for model in (plain, checked)
    )
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_passes_that_overlap_leave_the_function_of_torch_as_it_was():
    function = inspect.unwrap(checkpointing.checkpoint)
    before, model = function.__code__, nn.Linear(2, 2)
    first, second = checkpoints_of(model, {}), checkpoints_of(model, {})
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert function.__code__ is not before
    second.__exit__(None, None, None)
    assert function.__code__ is before
