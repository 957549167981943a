"""What an exact trace costs beside its arithmetic: operations started, numbers read back, passes
through the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lambdahat.estimators import trace
from lambdahat.operators import ggn, hessian
from lambdahat.operators.rounding import PrecisionComparison
from lambdahat.problem import Problem


@pytest.fixture(autouse=True)
def without_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of the closed form alone: the comparison with float64 is counted in
    ``test_rounding``.
    """
    monkeypatch.setattr(PrecisionComparison, "of", classmethod(lambda *_: None))
    monkeypatch.setattr("lambdahat.estimators._trace.closed_form_rounding", lambda *_: None)


KINDS = {"hessian": hessian, "ggn": ggn}
MODELS: dict[str, Callable[[int], nn.Module]] = {
    "perceptron": lambda classes: nn.Sequential(
        nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, classes)
    ),
    "smooth perceptron": lambda classes: nn.Sequential(
        nn.Flatten(), nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, classes)
    ),
    "convolutions": lambda classes: nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 4, 2),
        nn.Flatten(),
        nn.Linear(16, classes),
    ),
}


class Operations(TorchDispatchMode):
    """Counts what is started inside the block, and what is read back, for which a GPU must come
    to a halt.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        plain = Tensor.tolist

        def counted(tensor: Tensor) -> Any:
            self.names["tolist"] += 1
            return plain(tensor)

        monkeypatch.setattr(Tensor, "tolist", counted)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        return sum(self.names.values())

    @property
    def read(self) -> int:
        return sum(
            self.names[name] for name in ("_local_scalar_dense", "equal", "nonzero", "tolist")
        )


def problem(model: str, batches: int, classes: int = 4) -> Problem:
    rng = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    data = [
        (torch.randn(5, 1, 8, 8, generator=rng), torch.randint(classes, (5,), generator=rng))
        for _ in range(batches)
    ]
    return Problem(MODELS[model](classes), "cross_entropy", data)


def cost(made: Problem, kind: str, monkeypatch: pytest.MonkeyPatch) -> Operations:
    with monkeypatch.context() as patch, Operations(patch) as found:
        trace(KINDS[kind](made), method="exact")
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_no_batch_is_waited_for(model: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (cost(problem(model, count), kind, monkeypatch) for count in (2, 9))
    assert few.read == many.read <= 5  # the guards' verdicts, a look for NaN, and the trace


@pytest.mark.parametrize("model", MODELS)
def test_all_classes_go_back_in_one_pass(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (cost(problem(model, 2, classes), "ggn", monkeypatch) for classes in (4, 11))
    assert few.names == many.names


# operations that start nothing on a GPU
FREE = {
    *(
        "alias",
        "as_strided",
        "detach",
        "empty",
        "empty_like",
        "expand",
        "new_empty",
        "permute",
        "promote_types",
    ),
    *(
        "reshape",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "t",
        "transpose",
        "unbind",
        "unfold",
    ),
    *("unsqueeze", "view", "_reshape_alias", "_unsafe_view"),
}


@pytest.mark.parametrize(
    ("model", "most", "launches"),
    [("perceptron", 230, 95), ("smooth perceptron", 340, 178), ("convolutions", 270, 102)],
)
def test_operations_of_a_trace(
    model: str, most: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the model to the number, one batch: on a GPU the time of a small network is that of
    starting these. Two for each vector that is pulled back are of the CPU alone.
    """
    before = problem(model, 1)
    assert before.model is not None
    with monkeypatch.context() as patch, Operations(patch) as found:
        trace(
            hessian(
                Problem(before.model, "cross_entropy", [batch.data for batch in before.batches])
            )
        )
    assert found.total <= most
    assert sum(count for name, count in found.names.items() if name not in FREE) <= launches
    # the targets' range and how many count; the loss, twice; θ is finite; separate samples; slopes,
    # layers; the trace
    assert found.read <= 6


@pytest.mark.parametrize(("model", "most"), [("perceptron", 110), ("convolutions", 160)])
def test_operations_of_a_batch(model: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (cost(problem(model, count), "ggn", monkeypatch).total for count in (2, 9))
    assert (many - few) / 7 <= most


def test_passes_of_the_guards() -> None:
    seen: list[int] = []
    made = problem("perceptron", 3)
    assert made.model is not None
    made.model.register_forward_hook(lambda _, inputs, output: seen.append(len(output)))
    trace(hessian(made), method="exact")
    # four samples together for all guards, the first alone and the others; the data
    assert sorted(seen) == [1, 3, 4, 5, 5, 5]


def test_problem_of_a_named_loss_runs_the_model_twice() -> None:
    model, seen = MODELS["perceptron"](4), []
    model.register_forward_hook(lambda *_: seen.append(1))
    x, y = torch.randn(5, 1, 8, 8), torch.tensor([0, 1, 2, 3, 0])
    Problem(model, "cross_entropy", [(x, y)])
    assert len(seen) == 2  # the second shows that it is deterministic
    Problem(model, lambda output, target: nn.functional.cross_entropy(output, target), [(x, y)])
    assert len(seen) == 2 + 4  # that a callable is a mean shows when every sample is there twice


@pytest.mark.parametrize("model", MODELS)
def test_problem_of_a_chain_runs_it_once(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own layers are known to be differentiable and to give the same twice."""
    x, y = torch.randn(5, 1, 8, 8), torch.tensor([0, 1, 2, 3, 0])
    net = MODELS[model](4)
    with monkeypatch.context() as patch, Operations(patch) as seen:
        Problem(net, "cross_entropy", [(x, y)])
    layers = sum(isinstance(layer, nn.Linear | nn.Conv2d) for layer in net)
    assert seen.names["addmm"] + seen.names["convolution"] == layers
    assert seen.names["nll_loss_forward"] == 1
    assert not any("backward" in name for name in seen.names)


class _Convolutions(TorchDispatchMode):
    """Batch size and cuDNN's search of every convolution inside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, bool]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "convolution" in func._schema.name:
            self.seen.add((len(args[0]), torch.backends.cudnn.benchmark))
        return func(*args, **(kwargs or {}))


def test_cudnn_searches_for_kernels_of_products_and_not_of_checks():
    """A search tries ten kernels for every shape: worth it for what comes back, not for a pass
    over a few samples.
    """
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(2 * 36, 3))
    problem = Problem(net, "cross_entropy", (torch.randn(12, 1, 8, 8), torch.randint(3, (12,))))
    with _Convolutions() as checks:
        found = trace(hessian(problem))
    assert found.stderr == 0  # exact: no products
    assert checks.seen
    assert not any(search for _, search in checks.seen)
    with _Convolutions() as products:
        hessian(problem) @ torch.ones(problem.num_parameters)
    assert products.seen == {(12, True)}
    assert torch.backends.cudnn.benchmark is False
