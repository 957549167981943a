"""What smooth activations add to the diagonal of the Hessian, without products, against dense
float64 matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn

from lambdahat.estimators import trace, trace_per_layer
from lambdahat.operators import ggn, hessian
from lambdahat.operators.exact import closed_form, layer_squares, residuals
from lambdahat.problem import Problem
from lambdahat.results import Status
from tests.operators.contract import relative
from tests.operators.test_layer_squares import refuse
from tests.operators.test_piecewise import Net
from tests.oracles import dense_ggn, dense_hessian


def problem_of(
    make: Callable[[], nn.Module], shape: Any = (4,), loss: Any = "cross_entropy", **options: Any
) -> Problem:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = make().double()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d):
                nn.init.normal_(module.running_mean)
                nn.init.uniform_(module.running_var, 0.5, 2.0)
                nn.init.normal_(module.weight)
        x = torch.randn(7, *shape, dtype=torch.float64)
        y = (
            torch.randint(3, (7,))
            if loss == "cross_entropy"
            else torch.rand(7, 3, dtype=torch.float64)
        )
    return Problem(model, loss, (x, y), **{"batch_size": 5, **options})


def perceptron(*widths: int, act: Any = nn.Tanh, bias: bool = True) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        layers: list[nn.Module] = []
        for i, (a, b) in enumerate(zip((4, *widths), (*widths, 3), strict=True)):
            layers += [nn.Linear(a, b, bias=bias), *([act()] if i < len(widths) else [])]
        return nn.Sequential(*layers)

    return make


def agree(problem: Problem, columns: int = 0) -> None:
    """The trace, the diagonal and every layer's trace are those of the dense matrix, and nothing
    was multiplied.
    """
    operator, dense = hessian(problem), dense_hessian(problem)
    assert operator.exact.form.columns == columns
    found = trace(operator, method="exact")
    assert found.value == pytest.approx(float(dense.trace()), rel=1e-9, abs=1e-9)
    assert (found.stderr, found.cost, found.status) == (0.0, 0, Status.CONVERGED)
    assert relative(operator.known_diagonal(), dense.diagonal()) < 1e-9
    for layer, part in trace_per_layer(operator).items():
        where = problem.space.indices(problem.space.layers()[layer])
        assert part.value == pytest.approx(float(dense.diagonal()[where].sum()), rel=1e-9, abs=1e-9)
        assert (part.stderr, part.cost) == (0.0, 0)
    assert operator.matvecs == 0
    assert abs(float(dense.trace()) - ggn(problem).known_trace()) > 1e-3 * abs(float(dense.trace()))


class Function(nn.Module):
    def __init__(self, rule: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.rule = rule

    def forward(self, x: Tensor) -> Tensor:
        return self.rule(x)


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "GELU": nn.GELU,
    "GELU by tanh": lambda: nn.GELU("tanh"),
    "SiLU in place": lambda: nn.SiLU(inplace=True),
    "softplus": nn.Softplus,
    "ELU in place": lambda: nn.ELU(inplace=True),
    "SELU": nn.SELU,
    "CELU": lambda: nn.CELU(0.7),
    "mish": nn.Mish,
    "log-sigmoid": nn.LogSigmoid,
    "hard swish": nn.Hardswish,
    "sine": lambda: Function(torch.sin),
    "cube": lambda: Function(lambda x: x**3),
    "scaled, shifted, turned over": lambda: Function(lambda x: 0.5 - torch.tanh(2 * x + 1).flip(1)),
    "two in a row": lambda: nn.Sequential(nn.Tanh(), nn.Softplus()),
    "and ReLU": lambda: nn.Sequential(nn.ReLU(), nn.Tanh(), nn.LeakyReLU()),
}


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_activations(name: str) -> None:
    agree(problem_of(perceptron(5, 6, act=ACTIVATIONS[name])))


@pytest.mark.parametrize("loss", ["cross_entropy", "mse", "bce_with_logits", F.huber_loss])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("widths", [(5,), (5, 6)])
def test_losses_and_biases(widths: tuple[int, ...], bias: bool, loss: Any) -> None:
    agree(problem_of(perceptron(*widths, bias=bias), loss=loss))


@pytest.mark.parametrize(("widths", "columns"), [((5, 6, 4), 4), ((3, 4, 5, 6), 11)])
def test_deeper_networks_by_columns(
    widths: tuple[int, ...], columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = problem_of(perceptron(*widths), loss="mse")
    agree(problem, columns)
    monkeypatch.setattr(layer_squares, "SIGNAL_BYTES", 700)
    monkeypatch.setitem(layer_squares.CHUNK_BYTES, "cpu", 200)
    monkeypatch.setitem(closed_form.CHUNK, "cpu", 2)
    agree(problem, columns)
    monkeypatch.setattr(layer_squares, "_pull_together", refuse)
    agree(problem, columns)


@pytest.mark.parametrize("most", [4, 5])
def test_layers_that_take_too_many_columns_are_left_out_of_the_check(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But only they: what reaches the others is compared in full, so that nothing true is
    refused.
    """
    monkeypatch.setattr(residuals, "MOST_CHECKED", most)
    agree(problem_of(perceptron(6, 7, 5)), 5)
    agree(problem_of(perceptron(3, 4, 5, 4)), 9)


def residual(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.a(x))
    return m.c(h + torch.tanh(m.b(h)))


OTHERS: dict[str, tuple[Callable[[], nn.Module], Any, int]] = {
    "log-softmax at the end": (
        lambda: nn.Sequential(perceptron(5, 6)(), nn.LogSoftmax(1)),
        (4,),
        0,
    ),
    "flattened": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
        (2, 2),
        0,
    ),
    "batch-norm": (
        lambda: nn.Sequential(
            nn.Linear(4, 5),
            nn.BatchNorm1d(5),
            nn.Tanh(),
            nn.Linear(5, 4),
            nn.Tanh(),
            nn.BatchNorm1d(4),
            nn.Linear(4, 3),
        ),
        (4,),
        0,
    ),
    "a bottleneck between": (
        lambda: nn.Sequential(
            nn.Linear(4, 5), nn.Linear(5, 2), nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3)
        ),
        (4,),
        6,
    ),
    "skip connection": (
        lambda: Net(residual, a=nn.Linear(4, 5), b=nn.Linear(5, 5), c=nn.Linear(5, 3)),
        (4,),
        0,
    ),
    "x − tanh x": (lambda: perceptron(5, 6, act=nn.Tanhshrink)(), (4,), 6),
    "a gate": (
        lambda: Net(
            lambda m, x: m.c(m.a(x) * m.b(x).sigmoid()),
            a=nn.Linear(4, 5),
            b=nn.Linear(4, 5),
            c=nn.Linear(5, 3),
        ),
        (4,),
        0,
    ),
    "one unit beside thresholds": (
        lambda: Net(
            lambda m, x: m.c(torch.tanh(m.b(m.a(x).relu()) + torch.linspace(-1, 1, 5).to(x))),
            a=nn.Linear(4, 3),
            b=nn.Linear(3, 1),
            c=nn.Linear(5, 3),
        ),
        (4,),
        5,
    ),
    "linear on positions": (
        lambda: nn.Sequential(nn.Linear(4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(6, 3)),
        (3, 4),
        6,
    ),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 2),
            nn.Tanh(),
            nn.AvgPool2d(2, 1),
            nn.Conv2d(2, 2, 2),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(8, 3),
        ),
        (1, 5, 5),
        40,
    ),
}


@pytest.mark.parametrize("name", list(OTHERS))
def test_other_networks(name: str) -> None:
    make, shape, columns = OTHERS[name]
    agree(problem_of(make, shape), columns)


@pytest.mark.parametrize("pattern", ["0.*", ["0.weight", "2.bias"], "2.weight"])
def test_some_parameters(pattern: Any) -> None:
    """A layer that is held constant still passes on what bends above it."""
    agree(problem_of(perceptron(5, 6), parameters=pattern))
    whole = hessian(problem_of(perceptron(5, 6))).restrict(pattern)
    assert (
        relative(
            whole.known_diagonal(),
            dense_hessian(problem_of(perceptron(5, 6), parameters=pattern)).diagonal(),
        )
        < 1e-9
    )


def test_single_precision_and_unnamed_model() -> None:
    problem = problem_of(perceptron(5, 6), dtype=torch.float32)
    exact = float(dense_hessian(problem_of(perceptron(5, 6))).trace())
    assert trace(hessian(problem)).value == pytest.approx(exact, rel=1e-5)


def ignored() -> Problem:
    x = torch.randn(11, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([0, -100, -100, -100, 1, 2, -100, 0, 1, 2, 2])
    return Problem(problem_of(perceptron(5, 6)).model, "cross_entropy", (x, y), batch_size=8)


def test_ignored_targets_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    agree(ignored())
    monkeypatch.setitem(closed_form.CHUNK, "cpu", 3)
    agree(ignored())


class HiddenBend(torch.autograd.Function):
    """Its name is in the graph, whatever it does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> Tensor:
        return delta


def hooked(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.a(x))
    if h.requires_grad:
        # a derivative that autograd takes twice, and no node shows
        h.register_hook(lambda delta: delta * (1 + h))
    return m.b(h)


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (hooked, "its second derivative in a.weight is not that of its activations"),
        (
            lambda m, x: m.b(HiddenBend.apply(torch.tanh(m.a(x)))),
            "the custom function HiddenBend is not",
        ),
        (lambda m, x: m.b(F.softmax(torch.tanh(m.a(x)), 1)), "Softmax is not piecewise linear"),
        (lambda m, x: m.b(F.silu(m.a(x)) * m.a(x)), "a.bias enters twice|a.weight enters twice"),
        (
            lambda m, x: m.b(torch.tanh(x @ m.a.weight.T)),
            "Tanh is not piecewise linear, and a.bias does not enter",
        ),
    ],
)
def test_refused_with_the_reason(rule: Any, reason: str) -> None:
    operator = hessian(problem_of(lambda: Net(rule, a=nn.Linear(4, 5), b=nn.Linear(5, 3))))
    assert operator.known_trace() is None
    assert operator.known_diagonal() is None
    assert operator.sampled_trace(0.1, 0) is None
    assert any(part in operator.why_no_trace() for part in reason.split("|"))
    with pytest.raises(ValueError, match="method must not be 'exact'"):
        trace(operator, method="exact")


def many_classes() -> Problem:
    """Many for the tests that lower ``MANY_FACTORS``."""
    with torch.random.fork_rng():
        torch.manual_seed(6)
        model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 20)).double()
        x, y = torch.randn(10, 3, dtype=torch.float64), torch.randint(20, (10,))
    return Problem(model, "cross_entropy", (x, y), batch_size=6)


def deep() -> Problem:
    return problem_of(perceptron(5, 6, 4), loss="mse")


def convolutional() -> Problem:
    return problem_of(*OTHERS["convolutions"][:2])


@pytest.mark.parametrize("make", [many_classes, deep, convolutional])
def test_errors_of_sampled_residuals_are_true(
    make: Callable[[], Problem], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over 60 seeds the errors in their own standard errors have mean 0 and variance 1."""
    monkeypatch.setattr(closed_form, "MANY_FACTORS", 3)
    monkeypatch.setattr(closed_form, "MANY_COLUMNS", 3)
    operator = hessian(make())
    exact, scores = float(dense_hessian(make()).trace()), []
    for seed in range(60):
        found = trace(operator, tol=10.0, seed=seed)
        assert found.stderr > 0
        assert closed_form.MIN_ROUNDS <= found.cost <= 2 * closed_form.MIN_ROUNDS
        assert found.dof >= closed_form.MIN_DOF
        scores.append(
            float(stats.norm.ppf(stats.t.cdf((found.value - exact) / found.stderr, found.dof)))
        )
    z = torch.tensor(scores)
    assert abs(float(z.mean())) < 4 / math.sqrt(60)
    assert 0.45 < float(z.var()) < 1.8  # 4 standard deviations of a variance of 60 normal scores


def test_rounds_go_on_until_the_error_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closed_form, "MANY_FACTORS", 3)
    monkeypatch.setattr(closed_form, "MANY_COLUMNS", 3)
    monkeypatch.setattr(closed_form, "MOST_SIGNALS", 0)  # or the closed form would be cheaper
    operator = hessian(deep())
    found = trace(operator, tol=0.02)
    assert found.cost > closed_form.MIN_ROUNDS
    low, high = found.interval(0.95)
    assert high - low <= 2.001 * 0.02 * abs(found.value)
    assert found.status is Status.CONVERGED
    assert trace(operator, tol=1e-9, max_matvecs=2).status is Status.SAMPLES_SPENT


@pytest.mark.parametrize("make", [deep, many_classes])
def test_products_go_on_where_rounds_are_spent(
    make: Callable[[], Problem], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the dense answer, which a tolerance that no rounds reach asks for."""
    monkeypatch.setattr(closed_form, "MANY_FACTORS", 3)
    monkeypatch.setattr(closed_form, "MANY_COLUMNS", 3)
    monkeypatch.setattr(closed_form, "MAX_ROUNDS", 16)
    monkeypatch.setattr(closed_form, "MOST_SIGNALS", 0)  # or the closed form would be cheaper
    cases = [(hessian(make()), dense_hessian(make()))]
    if make is many_classes:
        cases += [(2.0 * ggn(make()), 2.0 * dense_ggn(make()))]
    for operator, dense in cases:
        found = trace(operator, tol=1e-9)
        assert found.value == pytest.approx(float(dense.trace()), rel=1e-9)
        assert (found.stderr, found.status) == (0.0, Status.CONVERGED)
        assert operator.dim <= found.cost <= 2 * operator.dim


def test_too_many_columns_are_left_to_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closed_form, "MANY_FACTORS", 3)
    monkeypatch.setattr(closed_form, "MANY_COLUMNS", 3)
    monkeypatch.setattr(closed_form, "MOST_COLUMNS", 3)
    operator = hessian(deep())
    assert operator.known_diagonal() is None
    assert operator.exact.trace_by == "rounds"
    with pytest.raises(
        ValueError, match="Tanh is not piecewise linear, which takes 4 signals a sample"
    ):
        trace(operator, method="exact")
