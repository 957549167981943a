"""Traces and diagonals without products, against dense matrices in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lambdahat._core.progress import progress
from lambdahat.estimators import trace
from lambdahat.operators import fisher, ggn, gradient_covariance, hessian
from lambdahat.operators.exact import ClosedForm, closed_form, layer_squares, validity
from lambdahat.operators.exact.layer_squares import LayerCall
from lambdahat.operators.exact.validity import few_of, separate_output
from lambdahat.operators.linearise import leaves_of
from lambdahat.operators.rounding import closed_form_rounding
from lambdahat.problem import Problem
from lambdahat.problem.losses import make_loss
from lambdahat.results import Status
from tests.cases import network
from tests.operators.contract import relative
from tests.operators.test_piecewise import Net
from tests.oracles import dense_ggn, dense_hessian, dense_second_moment


def flat(*layers: nn.Module, width: int) -> nn.Module:
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width, 3))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(x).sum(dim=1)))


def time_first(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.tanh(m.a(x.transpose(0, 1))).mean(dim=0))


def written(m: Any, x: Tensor) -> Tensor:
    h, out = m.a(x), torch.zeros(len(x), 5, dtype=x.dtype)
    out[:, :2], out[:, 2:] = h[:, :2], h[:, 2:].tanh()  # in place, which vmap refuses
    return m.b(out) * m.w


TOKENS = "tokens"
# name: model, shape of one input, the parameters that must go by their layer's closed form
MODELS: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), (4,), "all"),
    "no bias": (
        lambda: nn.Sequential(nn.Linear(4, 5, bias=False), nn.ReLU(), nn.Linear(5, 3)),
        (4,),
        "all",
    ),
    "linear on sequences": (
        lambda: flat(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2), width=10),
        (5, 4),
        "all",
    ),
    "linear on 4-D": (lambda: flat(nn.Linear(2, 3), nn.Tanh(), width=36), (3, 4, 2), "all"),
    "conv1d": (
        lambda: flat(
            nn.Conv1d(2, 4, 3, stride=2, padding=1, dilation=2, groups=2), nn.Tanh(), width=16
        ),
        (2, 9),
        "all",
    ),
    "conv2d": (
        lambda: flat(
            nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 0)),
            nn.ReLU(True),
            nn.Conv2d(3, 2, 2, bias=False),
            width=8,
        ),
        (2, 5, 4),
        "all",
    ),
    "conv2d dilated, grouped": (
        lambda: flat(nn.Conv2d(4, 4, 3, dilation=2, groups=4), nn.Tanh(), width=16),
        (4, 6, 6),
        "all",
    ),
    "conv3d": (
        lambda: flat(nn.Conv3d(2, 2, 2, dilation=(1, 2, 1), groups=2), nn.Tanh(), width=16),
        (2, 3, 4, 3),
        "all",
    ),
    "same padding": (
        lambda: flat(nn.Conv2d(1, 2, (3, 5), padding="same", dilation=2), nn.Tanh(), width=32),
        (1, 4, 4),
        "all",
    ),
    "valid padding": (
        lambda: flat(nn.Conv1d(1, 2, 3, padding="valid"), nn.Tanh(), width=8),
        (1, 6),
        "all",
    ),
    "circular padding": (
        lambda: flat(nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), nn.Tanh(), width=32),
        (1, 4, 4),
        "all",
    ),
    "reflect padding": (
        lambda: flat(nn.Conv1d(1, 2, 3, padding=2, padding_mode="reflect"), nn.Tanh(), width=16),
        (1, 6),
        "all",
    ),
    "transposed": (
        lambda: flat(nn.ConvTranspose2d(1, 2, 2, stride=2), nn.Tanh(), width=64),
        (1, 2, 4),
        "3.weight",
    ),
    "batch-norm 1d": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)),
        (4,),
        "all",
    ),
    "batch-norm 1d on series": (lambda: flat(nn.BatchNorm1d(2), nn.Tanh(), width=8), (2, 4), "all"),
    "batch-norm 2d": (
        lambda: flat(
            nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.AvgPool2d(2), width=12
        ),
        (2, 6, 6),
        "all",
    ),
    "PReLU": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.PReLU(5), nn.Linear(5, 3)),
        (4,),
        "2.weight",
    ),
    "embedding": (
        lambda: nn.Sequential(
            nn.Embedding(5, 3), nn.Flatten(), nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, 3)
        ),
        TOKENS,
        "4.weight",
    ),
    "layer norm": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)),
        (4,),
        "0.weight",
    ),
    "tied": (Tied, TOKENS, "none"),
    "called twice": (
        lambda: Net(
            lambda m, x: m.b(torch.tanh(m.a(torch.tanh(m.a(x))))),
            a=nn.Linear(4, 4),
            b=nn.Linear(4, 3),
        ),
        (4,),
        "b.weight",
    ),
    "called in parallel": (
        lambda: Net(
            lambda m, x: m.b(torch.tanh(m.a(x)) - m.a(x * x)), a=nn.Linear(4, 4), b=nn.Linear(4, 3)
        ),
        (4,),
        "b.weight",
    ),
    "used outside its layer": (
        lambda: Net(
            lambda m, x: m.b(torch.tanh(m.a(x)) @ m.a.weight), a=nn.Linear(4, 4), b=nn.Linear(4, 3)
        ),
        (4,),
        "a.bias",
    ),
    "used outside, unseen": (
        lambda: Net(
            lambda m, x: m.b(torch.tanh(m.a(x))) + F.relu(x - 50) @ m.b.weight.T,
            a=nn.Linear(4, 4),
            b=nn.Linear(4, 3),
        ),
        (4,),
        "a.weight",
    ),
    "no layers": (
        lambda: Net(lambda m, x: torch.tanh(x @ m.w), w=nn.Parameter(torch.randn(4, 3))),
        (4,),
        "none",
    ),
    **{
        f"time first, {steps} steps": (
            lambda: Net(time_first, a=nn.Linear(4, 4), b=nn.Linear(4, 3)),
            (steps, 4),
            "b.weight",
        )
        for steps in (2, 3, 4, 5)
    },
    "no vmap": (
        lambda: Net(written, a=nn.Linear(4, 5), b=nn.Linear(5, 3), w=nn.Parameter(torch.randn(3))),
        (4,),
        "b.weight",
    ),
}


def problem_of(
    make: Callable[[], nn.Module],
    shape: Any,
    loss: Any = "cross_entropy",
    samples: int = 9,
    **options: Any,
) -> Problem:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = make().double()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                nn.init.normal_(module.running_mean)
                nn.init.uniform_(module.running_var, 0.5, 2.0)
        x = (
            torch.randint(5, (samples, 3))
            if shape == TOKENS
            else torch.randn(samples, *shape, dtype=torch.float64)
        )
        y = (
            torch.randint(3, (samples,))
            if loss == "cross_entropy"
            else torch.rand(samples, 3, dtype=torch.float64)
        )
    return Problem(model, loss, (x, y), **{"batch_size": 4, **options})


def agree(
    problem: Problem, dense: Tensor, kind: str = "hessian", tolerance: float = 1e-10, **options: Any
) -> None:
    form = ClosedForm(problem, kind, **options)
    scale = float(dense.diagonal().abs().sum())
    assert abs(float(form.sums().sum() - dense.trace())) <= tolerance * scale
    assert relative(form.sums(diagonal=True), dense.diagonal()) <= tolerance


@pytest.mark.parametrize("name", list(MODELS))
def test_trace_and_diagonal_are_those_of_the_dense_matrix(name: str) -> None:
    make, shape, layered = MODELS[name]
    problem = problem_of(make, shape)
    agree(problem, dense_ggn(problem))
    found = validity.trusted_layers(few_of(problem, leaves_of(problem, problem.vector))).names
    expected = (
        set(problem.space.names) if layered == "all" else set() if layered == "none" else {layered}
    )
    assert (
        found == expected
        if layered in ("all", "none")
        else expected <= found < set(problem.space.names)
    )


@pytest.mark.parametrize(
    "name", ["linear", "conv2d", "batch-norm 2d", "tied", "time first, 4 steps"]
)
@pytest.mark.parametrize("kind", ["empirical", "monte_carlo"])
def test_sampled_fishers(name: str, kind: str) -> None:
    problem = problem_of(*MODELS[name][:2])
    if kind == "empirical":
        agree(problem, dense_second_moment(problem), kind)
        assert gradient_covariance(problem).known_trace() == pytest.approx(
            float(dense_second_moment(problem).trace() - problem.gradient().square().sum()),
            rel=1e-9,
        )
    else:
        agree(
            problem,
            fisher(problem, "monte_carlo", samples=3, seed=2).dense(),
            kind,
            samples=3,
            seed=2,
        )


@pytest.mark.parametrize("pattern", ["2.weight", "0.*", ["0.bias", "2.bias"]])
def test_some_parameters(pattern: Any) -> None:
    problem = problem_of(*MODELS["linear"][:2], parameters=pattern)
    agree(problem, dense_ggn(problem))
    whole = problem_of(*MODELS["linear"][:2])
    part = ggn(whole).restrict(pattern)
    assert relative(part.known_diagonal(), dense_ggn(problem).diagonal()) < 1e-10
    assert (
        hessian(whole).restrict("2.weight").known_trace()
        == pytest.approx(  # tanh is below the last layer
            float(dense_hessian(problem_of(*MODELS["linear"][:2], parameters="2.weight")).trace()),
            rel=1e-10,
        )
    )


def wavy(output: Tensor, target: Tensor) -> Tensor:
    return torch.sin(3 * (output - target)).sum(dim=-1).mean()


def mixed_products(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target).prod(dim=1) + output.square().sum(dim=1)).mean()


@pytest.mark.parametrize(
    "loss", ["mse", "bce_with_logits", F.huber_loss, nn.SmoothL1Loss(), wavy, mixed_products]
)
def test_other_losses(loss: Any) -> None:
    problem = problem_of(*MODELS["linear"][:2], loss=loss)
    agree(problem, dense_ggn(problem))
    assert ggn(problem).psd == isinstance(loss, str)


def test_weighted_classes_and_label_smoothing() -> None:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.2]).double(), label_smoothing=0.1)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, y = torch.randn(9, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 2, 1, 0, 0, 2, 1])
    problem = Problem(model, loss, (x, y), batch_size=5)
    agree(problem, dense_ggn(problem))


def test_one_number_a_sample() -> None:
    model = Net(
        lambda m, x: m.b(torch.tanh(m.a(x))).squeeze(1), a=nn.Linear(4, 5), b=nn.Linear(5, 1)
    ).double()
    x, y = torch.randn(9, 4, dtype=torch.float64), torch.randn(9, dtype=torch.float64)
    for loss in ("mse", F.huber_loss):
        problem = Problem(model, loss, (x, y), batch_size=4)
        agree(problem, dense_ggn(problem))


def test_gaussian_nll_of_one_tensor() -> None:
    problem = problem_of(
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6)),
        (4,),
        loss="gaussian_nll",
    )
    agree(problem, dense_ggn(problem))
    assert not ggn(problem).psd


def root_mean_square(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target).sqrt()


def test_losses_that_mix_samples_have_no_factors() -> None:
    problem = problem_of(*MODELS["linear"][:2], loss=root_mean_square)
    operator = ggn(problem)
    assert operator.exact.factors is None
    assert operator.known_trace() is None
    assert relative(operator.dense(), dense_ggn(problem)) < 1e-9
    with pytest.raises(ValueError, match="the loss has no factors at this output"):
        trace(operator, method="exact")


def centred(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.b(F.relu(h - h.mean(dim=0)))


@pytest.mark.parametrize("case", ["own statistics", "train mode", "fixed batch", "two outputs"])
def test_models_that_mix_samples_have_no_factors(case: str) -> None:
    rules = {
        "own statistics": centred,
        "fixed batch": lambda m, x: m.b(F.relu(m.a(x.reshape(4, 4)))),
    }
    if case in rules:
        rule = rules[case]
        problem = problem_of(
            lambda: Net(rule, a=nn.Linear(4, 5), b=nn.Linear(5, 3)), (4,), samples=8
        )
    elif case == "train mode":
        problem = network("batch-norm", norm="train")
    else:
        problem = problem_of(
            lambda: Net(lambda m, x: (m.a(x), m.a(x).exp()), a=nn.Linear(4, 3)),
            (4,),
            loss="gaussian_nll",
        )
    assert separate_output(few_of(problem, leaves_of(problem, problem.vector))) is None
    assert ggn(problem).known_trace() is None
    assert hessian(problem).known_trace() is None
    assert ggn(problem).sampled_trace(0.1, 0) is None
    if case == "two outputs":
        with pytest.raises(ValueError, match="output is a tuple, not one tensor"):
            trace(ggn(problem), method="exact")
    dense = float(dense_hessian(problem).trace())
    found = trace(hessian(problem), tol=0.05)
    assert abs(found.value - dense) <= max(4 * found.stderr, 1e-9 * abs(dense))


@pytest.mark.parametrize(
    "loss", ["cross_entropy", "custom", "empirical", "monte_carlo", "sequences"]
)
def test_batches_larger_than_a_chunk(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if loss == "sequences":
        problem = sequences(classes=4, batch_size=5)
        kinds = {"kind": "empirical"}
        dense = dense_second_moment_of_shares(problem)
    else:
        given = F.huber_loss if loss == "custom" else "cross_entropy"
        problem = problem_of(*MODELS["conv2d"][:2], loss=given, samples=11, batch_size=7)
        kinds = {"kind": loss if loss in ("empirical", "monte_carlo") else "hessian"}
        dense = {
            "empirical": dense_second_moment,
            "monte_carlo": lambda p: fisher(p, "monte_carlo").dense(),
        }.get(loss, dense_ggn)(problem)
    monkeypatch.setitem(closed_form.CHUNK, "cpu", 3)
    agree(problem, dense, **kinds)


def test_ignored_targets_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(11, 4, dtype=torch.float64)
    y = torch.tensor([0, -100, -100, -100, 1, 2, -100, 0, 1, 2, 2])
    problem = Problem(MODELS["linear"][0]().double(), "cross_entropy", (x, y), batch_size=8)
    agree(problem, dense_ggn(problem))
    monkeypatch.setitem(closed_form.CHUNK, "cpu", 3)
    agree(problem, dense_ggn(problem))


def test_factors_go_back_in_steps_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(*MODELS["conv2d"][:2])
    dense = dense_ggn(problem)
    monkeypatch.setattr(layer_squares, "SIGNAL_BYTES", 1)
    agree(problem, dense)


def test_first_batch_of_one_sample_with_time_first() -> None:
    """A layout that cannot be told from the usual one on the first batch alone."""
    model = Net(
        lambda m, x: m.b(torch.tanh(m.a(x.transpose(0, 1))).mean(dim=0)),
        a=nn.Linear(4, 4),
        b=nn.Linear(4, 3),
    )
    x, y = torch.randn(7, 1, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2, 0])
    problem = Problem(model.double(), "cross_entropy", [(x[:1], y[:1]), (x[1:], y[1:])])
    agree(problem, dense_ggn(problem))


def test_statistics_that_are_not_the_model_s_own() -> None:
    problem = problem_of(*MODELS["batch-norm 2d"][:2]).refresh_statistics()
    agree(problem, dense_ggn(problem))
    leaves = leaves_of(problem, problem.vector)
    trusted = validity.trusted_layers(few_of(problem, leaves)).names
    assert {"1.weight", "1.bias"} <= trusted


class TestExactTraceOfTheHessian:
    @pytest.mark.parametrize("name", ["mlp", "lenet", "batch-norm"])
    @pytest.mark.parametrize("loss", ["cross_entropy", "mse", "bce_with_logits"])
    def test_relu_networks(self, name: str, loss: str) -> None:
        problem = network(name, loss)
        found, dense = trace(hessian(problem), method="exact"), dense_hessian(problem)
        assert found.value == pytest.approx(float(dense.trace()), rel=1e-10)
        assert (found.stderr, found.cost) == (0.0, 0)
        assert relative(hessian(problem).known_diagonal(), dense.diagonal()) < 1e-10

    @pytest.mark.parametrize(
        ("make", "reason"),
        [
            (
                lambda: problem_of(*MODELS["embedding"][:2]),
                "Tanh is not piecewise linear, and 0.weight does not enter",
            ),
            (
                lambda: problem_of(*MODELS["layer norm"][:2]),
                "NativeLayerNorm is not piecewise linear",
            ),
            (lambda: network("tied"), "first.weight enters twice on one path"),
            (
                lambda: network("batch-norm", norm="train"),
                "1 normalises by the statistics of its batch",
            ),
            (
                lambda: Problem.from_function(
                    lambda p: p["w"].square().sum(), {"w": torch.ones(3)}
                ),
                "no separate model output",
            ),
        ],
    )
    def test_elsewhere_refused_with_the_reason(
        self, make: Callable[[], Problem], reason: str
    ) -> None:
        operator = hessian(make())
        for damped in (operator, 2 * operator, operator + operator):
            with pytest.raises(
                ValueError, match=f"method must not be 'exact' .*{reason}.* method='auto'"
            ):
                trace(damped, method="exact")

    def test_branches_that_the_first_samples_do_not_take(self) -> None:
        def branching(m: Any, x: Tensor) -> Tensor:
            h = m.a(x)
            return m.b(torch.tanh(h) if bool((x > 40).any()) else F.relu(h))

        x, y = torch.randn(8, 4, dtype=torch.float64), torch.randint(3, (8,))
        x[-1, 0] = 50.0
        problem = Problem(
            Net(branching, a=nn.Linear(4, 5), b=nn.Linear(5, 3)).double(),
            "cross_entropy",
            (x, y),
            batch_size=2,
        )
        operator = hessian(problem)
        assert operator.exact.form.curved == ""
        assert operator.known_trace() == pytest.approx(
            float(dense_hessian(problem).trace()), rel=1e-10
        )
        assert operator.exact.form.curved == "Tanh is not piecewise linear"
        assert (
            relative(hessian(problem).known_diagonal(), dense_hessian(problem).diagonal()) < 1e-10
        )

    def test_branches_without_a_closed_form(self) -> None:
        def branching(m: Any, x: Tensor) -> Tensor:
            h = m.a(x)
            return m.b(h.softmax(dim=1) if bool((x > 40).any()) else F.relu(h))

        x, y = torch.randn(8, 4, dtype=torch.float64), torch.randint(3, (8,))
        x[-1, 0] = 50.0
        model = Net(branching, a=nn.Linear(4, 5), b=nn.Linear(5, 3)).double()
        operator = hessian(Problem(model, "cross_entropy", (x, y), batch_size=2))
        assert operator.exact.form.refused == ""
        assert operator.known_trace() is None
        assert operator.exact.form.refused == "Softmax is not piecewise linear"
        assert operator.known_diagonal() is None


def sequences(classes: int = 6, batch_size: int = 4, samples: int = 10) -> Problem:
    """Logits (B, T, V) with targets (B, T), some of them left out."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = nn.Sequential(
            nn.Embedding(6, 3), nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, classes)
        ).double()
        x, y = torch.randint(6, (samples, 3)), torch.randint(classes, (samples, 3))
        y[torch.rand(samples, 3) < 0.3] = -100
        y[:, 0] = 0
    return Problem(model, "cross_entropy", (x, y), batch_size=batch_size)


def dense_second_moment_of_shares(problem: Problem) -> Tensor:
    """(1/n) Σ_i g_i g_iᵀ with g_i the gradient of sample i's share in the mean over all tokens,
    times n.
    """
    theta = problem.vector.requires_grad_()
    total = torch.zeros(problem.num_parameters, problem.num_parameters, dtype=torch.float64)
    tokens = sum(int((problem.target(batch) != -100).sum()) for batch in problem.batches)
    for batch in problem.batches:
        output, target = problem.output(problem.named(theta), batch), problem.target(batch)
        losses = F.cross_entropy(output.movedim(-1, 1), target, reduction="none").sum(dim=1)
        for loss in losses:
            (g,) = torch.autograd.grad(
                loss * problem.num_samples / tokens, theta, retain_graph=True
            )
            total += torch.outer(g, g) / problem.num_samples
    return total


def many_classes() -> Problem:
    with torch.random.fork_rng():
        torch.manual_seed(6)
        model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 140)).double()
        x, y = torch.randn(10, 3, dtype=torch.float64), torch.randint(140, (10,))
    return Problem(model, "cross_entropy", (x, y), batch_size=6)


def segmentation() -> Problem:
    """Logits (B, V, H, W) with targets (B, H, W)."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 3, 1)).double()
        x, y = torch.randn(6, 1, 4, 5, dtype=torch.float64), torch.randint(3, (6, 4, 5))
        y[2, :3] = -100
    return Problem(model, "cross_entropy", (x, y), batch_size=4)


class TestSampledTrace:
    """Over 60 seeds the errors in their own standard errors have mean 0 and variance 1."""

    @pytest.mark.parametrize(("make", "chunk"), [(many_classes, 256), (sequences, 3)])
    def test_error_is_true(
        self, make: Callable[[], Problem], chunk: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        problem = make()
        exact = float(dense_ggn(problem).trace())
        monkeypatch.setitem(closed_form.CHUNK, "cpu", chunk)
        form, scores = ClosedForm(problem, "hessian"), []
        for seed in range(60):
            found = form.sample(0.2, seed)
            chance = stats.t.cdf((found.value - exact) / found.stderr, found.dof)
            scores.append(float(stats.norm.ppf(chance)))
        z = torch.tensor(scores)
        assert abs(float(z.mean())) < 4 / math.sqrt(60)
        assert 0.5 < float(z.var()) < 1.6  # 3 standard deviations of a variance of 60 normal scores

    def test_tolerance_and_budget(self) -> None:
        form = ClosedForm(sequences(), "hessian")
        found = form.sample(0.05, 0)
        low, high = found.interval(0.95)
        assert found.status is Status.CONVERGED
        assert high - low <= 2 * 0.05 * found.value
        tight = form.sample(1e-4, 0)
        assert tight.status is Status.SAMPLES_SPENT
        assert tight.cost == closed_form.MAX_ROUNDS

    @pytest.mark.parametrize("make", [many_classes, sequences, segmentation])
    def test_auto_uses_it(self, make: Callable[[], Problem]) -> None:
        problem = make()
        exact = float(dense_hessian(problem).trace())
        for operator in (hessian(problem), ggn(problem), 2.0 * hessian(problem)):
            found = trace(operator, tol=0.1)
            factor = 2.0 if operator.__class__.__name__ == "Scaled" else 1.0
            assert 0 < found.stderr
            assert abs(found.value - factor * exact) < 4 * found.stderr
            # a round counts as a product, and is none with the operator
            assert closed_form.MIN_ROUNDS <= found.cost <= closed_form.MAX_ROUNDS
            assert operator.matvecs == 0
        if make is many_classes:
            assert trace(hessian(problem), method="exact").value == pytest.approx(exact, rel=1e-10)

    def test_few_classes_are_exact(self) -> None:
        assert ggn(network("mlp")).sampled_trace(0.1, 0) is None
        assert trace(hessian(network("mlp"))).stderr == 0.0


class Residual(nn.Module):
    """Strided and grouped convolutions, batch-norm and a skip connection."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.Conv2d(4, 4, 3, 1, 2, 2, 2)
        self.norm, self.head = nn.BatchNorm2d(4), nn.Linear(4, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.a(x))
        return self.head((x + F.relu(self.norm(self.b(x)))).mean(dim=(2, 3)))


def residual_network(classes: int = 40, dtype: torch.dtype = torch.float64) -> Problem:
    with torch.random.fork_rng():
        torch.manual_seed(8)
        model = Residual(classes).to(dtype)
        nn.init.uniform_(model.norm.running_var, 0.5, 2.0)
        nn.init.normal_(model.norm.running_mean)
        x, y = torch.randn(24, 2, 7, 6, dtype=dtype), torch.randint(classes, (24,))
    weight = torch.rand(classes, generator=torch.Generator().manual_seed(0)) + 0.5
    loss = nn.CrossEntropyLoss(weight, ignore_index=3, label_smoothing=0.1)
    return Problem(model, loss, (x, y), batch_size=10, norm="eval")


# Every layer with a closed form; of the models that also need gradients of single samples, which
# cost ten times as much, one for every way to compute them.
ROUNDS = sorted(name for name, (_, _, layered) in MODELS.items() if layered == "all")
ROUNDS += ["embedding", "no vmap", "tied", "time first, 4 steps"]


@cache
def residual_trace() -> float:
    """The exact trace of the residual network's Hessian."""
    return float(dense_hessian(residual_network()).trace())


class TestRounds:
    """Random sums of all factors in the place of the factors."""

    @pytest.mark.parametrize("loss", ["weighted", "probabilities", "positions", "mse", "bce"])
    def test_mean_over_all_signs_is_the_curvature(self, loss: str) -> None:
        rng = torch.Generator().manual_seed(0)
        shape = (2, 3, 2) if loss == "positions" else (2, 4)
        output = torch.randn(shape, generator=rng, dtype=torch.float64)
        classes, weight = torch.tensor([1, 3]), torch.tensor([0.5, 1.0, 2.0, 3.0])
        kinds: dict[str, tuple[Any, Tensor]] = {
            "weighted": (nn.CrossEntropyLoss(weight, ignore_index=3, label_smoothing=0.2), classes),
            "probabilities": (nn.CrossEntropyLoss(weight), output.flip(0).softmax(dim=1)),
            "positions": ("cross_entropy", torch.tensor([[1, -100], [0, 2]])),
            "mse": ("mse", output.flip(0)),
            "bce": (nn.BCEWithLogitsLoss(pos_weight=weight), (output > 0).double()),
        }
        given, target = kinds[loss]
        made = make_loss(given)
        width = output[0].numel()
        patterns = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * width)
        signs = patterns.reshape(-1, 1, *shape[1:]).expand(-1, *shape)
        roots = made.root_product(output, target, signs).flatten(2)
        found = torch.einsum("rbi,rbj->bij", roots, roots) / len(patterns)
        multiply = made.product(output, target)
        columns = [
            multiply(unit.reshape(1, *shape[1:]).expand(shape))
            for unit in torch.eye(width).double()
        ]
        expected = torch.stack(columns, dim=-1).reshape(2, width, width)
        assert torch.allclose(found, expected, rtol=1e-12, atol=1e-14)

    @pytest.mark.parametrize("name", ROUNDS)
    def test_every_layer(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without a bias that four per cent would show, for every kind of layer."""
        monkeypatch.setattr(closed_form, "MANY_FACTORS", 0)
        monkeypatch.setattr(closed_form, "MOST_SIGNALS", 0)
        monkeypatch.setattr(closed_form, "MAX_ROUNDS", 512)
        make, shape, _ = MODELS[name]
        problem = problem_of(make, shape)
        found, exact = ggn(problem).sampled_trace(0.06, 0), float(dense_ggn(problem).trace())
        assert found is not None
        assert found.status is Status.CONVERGED
        assert abs(found.value - exact) < 4 * found.stderr < 0.1 * exact

    def test_the_gauss_newton_matrix_has_the_rounds_of_the_hessian(self) -> None:
        """Without a curved activation the two have one trace."""
        both = hessian(residual_network()), ggn(residual_network())
        for seed in range(3):
            found, same = (trace(operator, tol=0.1, seed=seed) for operator in both)
            assert found.stderr > 0
            assert found == same

    def test_error_is_true(self) -> None:
        """Over 200 seeds."""
        matrix, exact = hessian(residual_network()), residual_trace()
        scores, costs = [], []
        for seed in range(200):
            found = trace(matrix, tol=0.1, seed=seed)
            costs.append(found.cost)
            chance = stats.t.cdf((found.value - exact) / found.stderr, found.dof)
            scores.append(float(stats.norm.ppf(chance)))
        z = torch.tensor(scores)
        assert max(costs) <= 32  # an exact trace takes 39 signals
        assert abs(float(z.mean())) < 4 / math.sqrt(200)
        assert 0.6 < float(z.var()) < 1.4  # 4 standard deviations of a variance of 200 scores
        assert float((z.abs() < 1.96).double().mean()) > 0.9

    def test_a_tight_tolerance_is_exact(self) -> None:
        exact = residual_trace()
        for classes, tol in ((40, 1e-3), (20, 0.1)):
            problem = residual_network(classes)
            found = trace(hessian(problem), tol=tol)
            assert (found.stderr, found.cost) == (0.0, 0)
            if classes == 40:
                assert found.value == pytest.approx(exact, rel=1e-10)

    def test_rounds_respect_the_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(closed_form, "MOST_SIGNALS", 0)
        found = trace(hessian(residual_network()), tol=1e-6, max_matvecs=5)
        assert found.cost <= 5
        assert found.status is Status.SAMPLES_SPENT

    def test_rounding_is_that_of_the_same_signs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """However the data are cut: other signs would differ by far more than rounding."""
        monkeypatch.setitem(layer_squares.CHUNK_BYTES, "cpu", 10_000)
        operator = hessian(residual_network(dtype=torch.float32))
        found = trace(operator, tol=0.1)
        assert found.cost >= closed_form.MIN_ROUNDS
        error, _ = closed_form_rounding(operator, sampled=True)
        assert 0 < error < 1e-5 * found.value

    def test_progress_tells_rounds_and_samples(self) -> None:
        seen: list[tuple[str, int, int | None]] = []
        with progress(lambda task, done, total: seen.append((task, done, total))):
            found = trace(hessian(residual_network()), tol=0.1)
        rounds = [row for row in seen if row[0] == "sampled trace"]
        assert rounds[0][1:] == (0, closed_form.MIN_ROUNDS)
        assert rounds[-1][1:] == (found.cost, found.cost)
        assert ("closed form", 24, 24) in seen


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    "options", [{}, {"stride": (2, 1)}, {"padding": (1, 2)}, {"dilation": (2, 1), "padding": 2}]
)
def test_patches_are_those_of_torch(options: dict[str, Any], groups: int) -> None:
    layer, x = nn.Conv2d(4, 6, (3, 2), groups=groups, **options), torch.randn(5, 4, 9, 8)
    expected = F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    assert torch.equal(layer_squares.patches(layer, x), expected)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(3, 4), (5, 3)),
        (nn.Linear(3, 4), (5, 2, 6, 3)),
        (nn.Conv1d(4, 6, 3, padding=1, groups=2), (5, 4, 7)),
        (nn.Conv2d(4, 6, (3, 2), stride=2, dilation=(2, 1)), (5, 4, 9, 8)),
        (nn.BatchNorm2d(3).eval(), (5, 3, 2, 2)),
    ],
)
def test_gradients_of_a_layer(layer: nn.Module, shape: tuple[int, ...]) -> None:
    layer, x = layer.double(), torch.randn(shape, dtype=torch.float64)
    z = layer(x)
    delta = torch.randn_like(z)
    entered = x / math.sqrt(1 + layer.eps) if isinstance(layer, nn.BatchNorm2d) else x
    call = LayerCall(layer, entered, get_gradient_edge(z), z.numel(), None, None)
    found = layer_squares.gradients(call, delta)
    for (name, _), slope in zip(
        layer.named_parameters(), torch.autograd.grad(z, layer.parameters(), delta), strict=True
    ):
        torch.testing.assert_close(found[name], slope)


@pytest.mark.parametrize("tol", [0.5, 0.1])
def test_one_sample_that_makes_up_the_trace_is_seen(tol: float) -> None:
    """49 samples that the network is sure of, and one between two classes: signs would give it 0 or
    twice its share, and four equal rounds in an eighth of the seeds.
    """
    classes, count = 40, 50
    model = nn.Linear(classes, classes, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(30 * torch.eye(classes))
    labels = torch.arange(count) % classes
    inputs = torch.eye(classes).double()[labels]
    inputs[0, 7] = 1.0
    problem = Problem(model, "cross_entropy", (inputs, labels))
    exact = trace(hessian(problem), method="exact").value
    found = [trace(hessian(problem), tol=tol, seed=seed) for seed in range(60)]
    assert all(abs(e.value - exact) <= 5 * e.stderr + 1e-9 * exact for e in found if e.status.ok)
    assert any(e.status.ok for e in found)
