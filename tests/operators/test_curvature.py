"""Every curvature operator against its dense matrix, on five small networks in float64."""

from __future__ import annotations

import copy
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from lambdahat._core.rng import generator
from lambdahat.estimators import diagonal, trace, trace_per_layer
from lambdahat.operators import LinearOperator, fisher, ggn, gradient_covariance, hessian, linearise
from lambdahat.problem import Problem
from tests.cases import NETWORKS, LanguageModel, classifier, network, quadratic, sentences
from tests.operators.contract import OperatorContract, relative
from tests.oracles import dense_ggn, dense_hessian, dense_second_moment, jacobians


@pytest.fixture(params=list(NETWORKS), scope="module")
def problem(request: pytest.FixtureRequest) -> Problem:
    return network(request.param)


class TestHessian(OperatorContract):
    @pytest.fixture(scope="class", params=["reverse", "forward"])
    @classmethod
    def operator(cls, problem: Problem, request: pytest.FixtureRequest) -> LinearOperator:
        return hessian(problem, mode=request.param)

    @pytest.fixture(scope="class")
    @classmethod
    def dense(cls, problem: Problem) -> Tensor:
        return dense_hessian(problem)


class TestHessianInBatchNormTrainMode(OperatorContract):
    @pytest.fixture(scope="class")
    @classmethod
    def operator(cls) -> LinearOperator:
        return hessian(network("batch-norm", norm="train"))

    @pytest.fixture(scope="class")
    @classmethod
    def dense(cls) -> Tensor:
        return dense_hessian(network("batch-norm", norm="train"))


class TestFiniteDifferences(OperatorContract):
    """Judged by their own bound: about ε^(2/3) of truncation and rounding, not the 1e-9 of the
    exact modes.
    """

    tolerance = 1e-7

    @pytest.fixture(scope="class")
    @classmethod
    def operator(cls) -> LinearOperator:
        return hessian(classifier(activation="tanh"), mode="finite")

    @pytest.fixture(scope="class")
    @classmethod
    def dense(cls) -> Tensor:
        return dense_hessian(classifier(activation="tanh"))


class TestGaussNewton(OperatorContract):
    @pytest.fixture(scope="class", params=["reverse", "forward"])
    @classmethod
    def operator(cls, problem: Problem, request: pytest.FixtureRequest) -> LinearOperator:
        return ggn(problem, mode=request.param)

    @pytest.fixture(scope="class")
    @classmethod
    def dense(cls, problem: Problem) -> Tensor:
        return dense_ggn(problem)


class TestGaussNewtonOfOtherLosses(OperatorContract):
    @pytest.fixture(scope="class", params=["mse", "bce_with_logits"])
    @classmethod
    def problem(cls, request: pytest.FixtureRequest) -> Problem:
        return network("lenet", request.param)

    @pytest.fixture(scope="class")
    @classmethod
    def operator(cls, problem: Problem) -> LinearOperator:
        return ggn(problem)

    @pytest.fixture(scope="class")
    @classmethod
    def dense(cls, problem: Problem) -> Tensor:
        return dense_ggn(problem)


class TestGaussNewtonInBatchNormTrainMode(OperatorContract):
    @pytest.fixture(scope="class")
    @classmethod
    def operator(cls) -> LinearOperator:
        return ggn(network("batch-norm", norm="train"))

    @pytest.fixture(scope="class")
    @classmethod
    def dense(cls) -> Tensor:
        return dense_ggn(network("batch-norm", norm="train"))


class TestCovariance(OperatorContract):
    @pytest.fixture(scope="class", params=[True, False], ids=["centred", "second moment"])
    @classmethod
    def centred(cls, request: pytest.FixtureRequest) -> bool:
        return request.param

    @pytest.fixture(scope="class")
    @classmethod
    def operator(cls, problem: Problem, centred: bool) -> LinearOperator:
        return gradient_covariance(problem, centred=centred)

    @pytest.fixture(scope="class")
    @classmethod
    def dense(cls, problem: Problem, centred: bool) -> Tensor:
        mean = problem.gradient()
        return dense_second_moment(problem) - centred * torch.outer(mean, mean)


class TestMonteCarloFisher(OperatorContract):
    @pytest.fixture(scope="class")
    @classmethod
    def operator(cls, problem: Problem) -> LinearOperator:
        return fisher(problem, "monte_carlo", samples=2, seed=4)

    @pytest.fixture(scope="class")
    @classmethod
    def dense(cls, problem: Problem) -> Tensor:
        total = torch.zeros(problem.num_parameters, problem.num_parameters, dtype=torch.float64)
        residuals = linearise.monte_carlo_residuals(problem, 2, 4)
        for weight, batch, z, jacobian in jacobians(problem):
            for (draw,) in residuals(z, batch):
                rows = torch.einsum("bc,bcp->bp", draw, jacobian)
                total += weight / (2 * batch.size) * rows.T @ rows
        return total


class TestFunctionProblem(OperatorContract):
    """A problem that is one function: the Hessian, and the covariance through per-sample
    gradients.
    """

    @pytest.fixture(scope="class", params=["hessian", "covariance"])
    @classmethod
    def operator(cls, request: pytest.FixtureRequest) -> LinearOperator:
        return (
            hessian(cls.problem())
            if request.param == "hessian"
            else gradient_covariance(cls.problem())
        )

    @pytest.fixture(scope="class")
    @classmethod
    def dense(cls, operator: LinearOperator) -> Tensor:
        if type(operator).__name__ == "Hessian":
            return dense_hessian(cls.problem())
        mean = cls.problem().gradient()
        return dense_second_moment(cls.problem()) - torch.outer(mean, mean)

    @staticmethod
    def problem() -> Problem:
        rng = generator(0, "function")
        x = torch.randn(9, 4, generator=rng, dtype=torch.float64)
        params = {
            "w": torch.randn(4, 3, generator=rng, dtype=torch.float64),
            "b": torch.zeros(3, dtype=torch.float64),
        }
        return Problem.from_function(
            lambda p, batch: torch.tanh(batch @ p["w"] + p["b"]).square().sum(dim=1).mean(),
            params,
            x,
            batch_size=4,
        )


@pytest.mark.parametrize("loss", ["cross_entropy", "mse", "bce_with_logits"])
def test_monte_carlo_fisher_tends_to_the_exact_one(loss: str) -> None:
    # the last two layers have 53 parameters, so that a dense matrix is one block of products
    problem = network("mlp", loss, samples=6, parameters=["2.*", "4.*"])
    exact = dense_ggn(problem)
    draws = torch.stack([fisher(problem, "monte_carlo", seed=seed).dense() for seed in range(100)])
    error = (draws.mean(dim=0) - exact) / (draws.std(dim=0) / 10).clamp_min(1e-12)
    assert float(error.square().mean()) < 1.5  # each z-score has unit variance


def test_exact_fisher_is_the_gauss_newton_matrix() -> None:
    problem = network("mlp")
    assert relative(fisher(problem).dense(), dense_ggn(problem)) < 1e-12


def test_ggn_of_a_linear_model_is_its_hessian() -> None:
    problem = classifier(sizes=(4, 3))
    assert relative(ggn(problem).dense(), dense_hessian(problem)) < 1e-12


class Copying(nn.Module):
    """An autoencoder that gives its input too, which no parameter enters."""

    def __init__(self, net: nn.Module, first: bool) -> None:
        super().__init__()
        self.net, self.first = net, first

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x, self.net(x)) if self.first else (self.net(x), x)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("mode", ["reverse", "forward"])
@pytest.mark.parametrize("make", [ggn, gradient_covariance])
def test_outputs_that_do_not_depend_on_parameters(make, mode: str, first: bool) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 3)).double()
        x = torch.randn(6, 3, dtype=torch.float64)
    copying = Problem(
        Copying(net, first), lambda z, y: (z[0] - z[1]).square().mean(), (x, x), batch_size=4
    )
    plain = Problem(net, "mse", (x, x), batch_size=4)
    eye = torch.eye(plain.num_parameters, dtype=torch.float64)
    torch.testing.assert_close(make(copying, mode=mode) @ eye, make(plain, mode=mode) @ eye)


def test_log_softmax_in_the_model_is_seen_through() -> None:
    """FACTS: with LogSoftmax inside the model and NLL the naive Gauss–Newton matrix is 0."""
    plain = network("mlp")
    model = nn.Sequential(plain.model, nn.LogSoftmax(dim=1))
    data = [batch.data for batch in plain.batches]
    wrapped = Problem(model, nn.NLLLoss(), data)
    assert relative(ggn(wrapped).dense(), dense_ggn(plain)) < 1e-12
    assert hessian(wrapped).known_trace() == pytest.approx(
        float(dense_hessian(plain).trace()), rel=1e-10
    )


def test_quadratic() -> None:
    matrix = torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
    assert relative(hessian(quadratic(matrix)).dense(), matrix) < 1e-14


def test_linear_loss_has_zero_hessian() -> None:
    problem = Problem.from_function(lambda p: p["w"].sum(), {"w": torch.ones(3)})
    assert torch.equal(hessian(problem).dense(), torch.zeros(3, 3))


@pytest.mark.parametrize("make", [hessian, ggn, gradient_covariance])
def test_memory_budget_decides_what_is_kept(make: type) -> None:
    problem = network("mlp")
    kept, none, some = make(problem), make(problem, memory=0), make(problem, memory=2)
    v = torch.ones(problem.num_parameters, dtype=torch.float64)
    assert kept.kept_batches == len(problem.batches)
    assert none.kept_batches == 0
    assert kept.graph_bytes > 0
    some = make(problem, mode="reverse", memory=2 * kept.graph_bytes)
    assert some.kept_batches == 2
    assert relative(none @ v, kept @ v) < 1e-12
    assert relative(some @ v, kept @ v) < 1e-12


@pytest.mark.parametrize("fails", [2, 3, 5])
def test_memory_that_runs_out_costs_the_graphs_not_the_product(
    monkeypatch: pytest.MonkeyPatch, fails: int
) -> None:
    """Whichever build fails, while graphs are kept or in a product, the matrix is the same."""
    problem = network("mlp")
    right = hessian(problem).dense()
    budget, builds, build = 2 * hessian(problem).graph_bytes, [], linearise.hessian_reverse

    def short_of_memory(*arguments: object) -> object:
        builds.append(1)
        if len(builds) == fails:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return build(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(linearise, "hessian_reverse", short_of_memory)
    operator = hessian(problem, mode="reverse", memory=budget)
    assert relative(operator.dense(), right) < 1e-12
    assert len(builds) > fails
    assert operator.kept_batches == 0


def test_kept_products_do_not_run_the_model_again() -> None:
    problem = network("mlp")
    operator = hessian(problem)
    calls = []
    _ = operator @ problem.vector
    handle = problem.model.register_forward_hook(lambda *_: calls.append(1))
    _ = operator @ problem.vector
    handle.remove()
    assert not calls


def test_operator_is_one_matrix_while_the_model_trains_on() -> None:
    model = nn.Linear(4, 3).double()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])
    problem = Problem(model, "cross_entropy", (x, y))
    operator, v = hessian(problem), torch.ones(15, dtype=torch.float64)
    before, vector = operator @ v, problem.vector
    with torch.no_grad():
        model.weight.mul_(3)
    assert torch.equal(operator @ v, before)
    assert not torch.equal(problem.vector, vector)
    assert not torch.equal(hessian(problem) @ v, before)


def test_modes_that_a_model_cannot_take_are_passed_over() -> None:
    class NoDouble(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)  # type: ignore[attr-defined]
            return x.square()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: object, g: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
            return 2 * x * g

    problem = Problem.from_function(
        lambda p: NoDouble.apply(p["w"]).sum().square(), {"w": torch.ones(3).double()}
    )
    operator = hessian(problem)
    dense = 8 * torch.ones(3, 3).double() + 12 * torch.eye(3).double()  # of (Σ w²)² at w = 1
    with pytest.warns(UserWarning, match=r"finite differences.*reverse: .*forward: "):
        assert operator.mode == "finite"
    assert relative(operator.dense(), dense) < 1e-7


def _slopes(problem: Problem, step: float = 1e-5) -> Tensor:
    """∂∇L/∂θ by central differences."""
    theta = problem.vector
    ways = step * torch.eye(len(theta), dtype=theta.dtype)
    return torch.stack(
        [problem.gradient(theta + way) - problem.gradient(theta - way) for way in ways]
    ) / (2 * step)


@pytest.mark.parametrize("dim", [0, 1, None])
def test_normed_weights(dim: int | None) -> None:
    """torch's kernel for g·v/‖v‖ along rows is differentiated twice as if ‖v‖ were constant."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
        x, y = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1, 0])
    nn.utils.parametrizations.weight_norm(model[0], dim=dim)
    problem = Problem(model, "cross_entropy", (x, y))
    exact = _slopes(problem)
    for mode in ("reverse", "forward"):
        assert relative(hessian(problem, mode=mode).dense(), exact) < 1e-8
    assert float(trace(hessian(problem))) == pytest.approx(float(exact.trace()), rel=1e-8)
    assert problem.loss() == pytest.approx(
        float(nn.functional.cross_entropy(model(x), y).detach()), rel=1e-12
    )


@pytest.mark.parametrize("option", ["sparse", "scale_grad_by_freq"])
def test_embeddings_whose_gradient_has_a_form_of_its_own(option: str) -> None:
    def problem(**options: bool) -> Problem:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layers = nn.Embedding(5, 3, **options), nn.Flatten(), nn.Tanh(), nn.Linear(12, 2)
            tokens, y = torch.randint(0, 5, (6, 4)), torch.tensor([0, 1, 1, 0, 1, 0])
        return Problem(nn.Sequential(*layers).double(), "cross_entropy", (tokens, y))

    given, plain = problem(**{option: True}), problem()
    assert torch.equal(given.gradient(), plain.gradient())
    assert torch.equal(hessian(given).dense(), hessian(plain).dense())


def test_embeddings_with_a_largest_norm() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Embedding(5, 3, padding_idx=0, max_norm=1.0),
            nn.Flatten(),
            nn.Tanh(),
            nn.Linear(12, 2),
        )
        tokens, y = torch.randint(1, 5, (6, 4)), torch.tensor([0, 1, 1, 0, 1, 0])
    problem = Problem(model.double(), "cross_entropy", (tokens, y))
    theta = problem.vector
    assert relative(hessian(problem).dense(), _slopes(problem)) < 1e-8
    problem.loss(theta)
    assert torch.equal(theta, problem.vector)  # torch's own layer writes to what it is given
    with torch.no_grad():
        assert problem.loss() == pytest.approx(
            float(nn.functional.cross_entropy(model(tokens), y)), rel=1e-12
        )


def test_traces_of_a_model_that_can_be_differentiated_once() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.EmbeddingBag(6, 4, mode="max"), nn.Tanh(), nn.Linear(4, 3)
        ).double()
        tokens, y = torch.randint(0, 6, (6, 4)), torch.tensor([0, 1, 2, 0, 1, 2])
    problem = Problem(model, "cross_entropy", (tokens, y))
    exact = float(_slopes(problem).trace())
    operator = hessian(problem)
    with pytest.warns(UserWarning, match="finite differences"):
        assert float(trace(operator)) == pytest.approx(exact, rel=1e-6)
    assert float(diagonal(operator).value.sum()) == pytest.approx(exact, rel=1e-6)
    assert sum(float(part) for part in trace_per_layer(operator).values()) == pytest.approx(
        exact, rel=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision(dtype: torch.dtype) -> None:
    exact = dense_hessian(network("mlp"))
    operator = hessian(network("mlp", dtype=dtype))
    assert operator.dtype == torch.float32
    assert relative(operator.dense().double(), exact) < (1e-5 if dtype == torch.float32 else 0.05)


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["mlp", "lenet"])
def test_curvlinops_agrees(name: str) -> None:
    curvlinops = pytest.importorskip("curvlinops")
    problem = network(name)
    model, data = problem.model, [batch.data for batch in problem.batches]
    params, v = list(model.parameters()), torch.ones(problem.num_parameters, dtype=torch.float64)
    for ours, theirs in (
        (hessian(problem), curvlinops.HessianLinearOperator),
        (ggn(problem), curvlinops.GGNLinearOperator),
    ):
        other = theirs(model, nn.CrossEntropyLoss(), params, data, check_deterministic=False)
        assert relative(ours @ v, other @ v) < 1e-10


COUPLED = {
    "a function that compares samples": lambda: Problem.from_function(
        lambda p, batch: (batch[0] @ p["w"]).logsumexp(0),
        {"w": torch.ones(3).double()},
        (RANDOM[:, :3], RANDOM[:, 3]),
    ),
    "a loss that compares samples": lambda: Problem(
        nn.Linear(4, 2).double(),
        lambda z, y: (z - y).square().mean().sqrt(),
        (RANDOM, RANDOM[:, :2]),
    ),
}
RANDOM = torch.randn(6, 4, generator=generator(0, "test coupled"), dtype=torch.float64)


@pytest.mark.parametrize("name", COUPLED)
def test_samples_that_are_coupled_have_no_gradients_of_their_own(name: str) -> None:
    problem = COUPLED[name]()
    for make in (gradient_covariance, lambda p: fisher(p, "empirical")):
        with pytest.raises(
            ValueError, match="the loss of a batch must be the mean of its samples' own losses"
        ):
            make(problem)


def test_padded_labels_weighed_by_the_model_have_no_covariance() -> None:
    """The one shorter sentence is the last of many."""
    padded = {name: column.flip(0) for name, column in sentences(24).items()}
    with pytest.raises(
        ValueError, match=r"the labels must have as many that count \(not −100\) in every sample"
    ):
        gradient_covariance(Problem(LanguageModel().double(), "model", padded))
    whole = {name: column[:-1] for name, column in padded.items()}
    problem = Problem(LanguageModel().double(), "model", whole, batch_size=5)
    assert float(gradient_covariance(problem).dense().diagonal().min()) >= -1e-12


def test_models_that_couple_samples_have_no_sampled_fisher() -> None:
    class Centred(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) - input.mean(dim=0)[:2]

    problem = Problem(Centred(4, 2).double(), "mse", (RANDOM, RANDOM[:, :2]))
    with pytest.raises(ValueError, match="the mean of its samples' own losses"):
        fisher(problem, "monte_carlo")


def test_covariance_of_a_function_of_a_dict_and_without_vmap() -> None:
    """Numbers and 0-d tensors in a batch belong to every sample; data-dependent branches go
    sample by sample.
    """
    w, scale = torch.ones(4).double(), torch.tensor(2.0).double()

    def loss(p: dict, batch: dict) -> Tensor:
        signed = batch["x"] if not batch["branch"] or float(batch["x"].sum()) < 1e9 else -batch["x"]
        return (batch["power"] * batch["scale"] * (signed @ p["w"])).square().mean()

    for branch in (False, True):
        data = [{"x": RANDOM, "scale": scale, "power": 0.5, "branch": branch}]
        operator = gradient_covariance(Problem.from_function(loss, {"w": w}, data), centred=False)
        g = 2 * (RANDOM @ w).unsqueeze(1) * RANDOM
        assert relative(operator.dense(), g.T @ g / len(g)) < 1e-12


class _Stored(nn.Module):
    """A linear layer with its weight as (inputs, outputs), as in transformers' GPT-2."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return rows.view(*x.shape[:-1], -1)


class _Complex(nn.Module):
    """A linear layer with complex weights of real parameters."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, outputs, inputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.randn(2, outputs))

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = torch.complex(*self.weight), torch.complex(*self.bias)
        y = functional.linear(torch.complex(x, x.sin()), weight, bias)
        return y.abs() * y.imag


class _ChannelsLast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last)


def _frozen(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels)
    for tensor, low, high in ((norm.running_var, 0.5, 2), (norm.running_mean, -1, 1)):
        tensor.uniform_(low, high)
    nn.init.uniform_(norm.weight, 0.5, 2)
    return norm


PLAIN = {
    "convolutions": lambda: (
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 4, 2, groups=2, bias=False),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 1, padding=1),
    ),
    "frozen norms": lambda: (
        nn.Conv2d(2, 3, 3, dilation=2, bias=False),
        _frozen(3),
        nn.ReLU(),
        nn.Conv2d(3, 3, 1),
        _frozen(3),
        nn.Tanh(),
        nn.MaxPool2d(2),
    ),
    "sequences": lambda: (
        nn.Flatten(2),
        nn.Linear(36, 4),
        nn.GELU(),
        nn.LayerNorm(4),
        _Stored(4, 3),
        nn.Tanh(),
        nn.Linear(3, 3, bias=False),
    ),
    "sequences in place": lambda: (
        nn.Flatten(2),
        nn.Linear(36, 4),
        nn.SiLU(inplace=True),
        nn.Linear(4, 3),
        nn.ReLU(inplace=True),
    ),
    "channels last": lambda: (
        _ChannelsLast(),
        nn.Conv2d(2, 4, 3),
        nn.Tanh(),
        nn.Conv2d(4, 3, 2),
        nn.SiLU(),
    ),
    "complex numbers": lambda: (nn.Flatten(), nn.Linear(72, 4), _Complex(4, 3), _Complex(3, 3)),
    "one dimension": lambda: (nn.Flatten(2), nn.Conv1d(2, 3, 4, stride=3), nn.Sigmoid()),
}


@pytest.mark.parametrize("which", ["*", "*bias", "*weight"])
@pytest.mark.parametrize("name", PLAIN)
def test_layers_and_blocks_of_vectors(name: str, which: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(5, 2, 6, 6, dtype=torch.float64), torch.arange(5) % 3
    model = nn.Sequential(*PLAIN[name](), nn.Flatten(), nn.LazyLinear(3)).double().eval()
    model(x)
    problem = Problem(model, "cross_entropy", (x, y), batch_size=3, parameters=which)
    vectors = torch.randn(problem.num_parameters, 4, dtype=torch.float64)
    for make, exact in ((hessian, dense_hessian(problem)), (ggn, dense_ggn(problem))):
        operator = make(problem, mode="reverse")
        block = operator @ vectors
        assert operator.prepare().vmaps, "the block is one product"
        assert relative(block, exact @ vectors) < 1e-12
        assert relative(operator @ vectors[:, 0], exact @ vectors[:, 0]) < 1e-12


@pytest.mark.parametrize("vectors", [1, 3])
@pytest.mark.parametrize(("make", "kernels"), [(ggn, 4), (hessian, 6)])
def test_matrix_products_of_a_product(make, kernels: int, vectors: int) -> None:
    """Jv takes two a layer and so does Jᵀ, a Hessian's product six, and the first layer two."""
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    problem = Problem(model, "cross_entropy", (torch.randn(7, 6), torch.arange(7) % 3))
    operator, given = make(problem), torch.randn(problem.num_parameters, vectors)
    operator @ given
    in_place = {torch.ops.aten.addmm_: lambda _, a, b, **__: 2 * a[0] * a[1] * b[1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as count:
        operator @ given
    multiplications = 2 * 6 * 5 + kernels * (5 * 4 + 4 * 3)
    assert count.get_total_flops() == 2 * 7 * vectors * multiplications


@pytest.mark.parametrize("make", [hessian, ggn, gradient_covariance, fisher])
def test_repeated_products_are_the_first_to_the_bit(make) -> None:
    """Layers large enough for the fastest kernels, against float64; in the end no autograd runs."""
    layers = nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 5)
    model, rng = nn.Sequential(*layers), torch.Generator().manual_seed(0)
    x, y = torch.randn(600, 64, generator=rng), torch.randint(0, 5, (600,), generator=rng)
    operator = make(Problem(model, "cross_entropy", (x, y), batch_size=300))
    exact = make(Problem(copy.deepcopy(model).double(), "cross_entropy", (x.double(), y)))
    vectors = torch.randn(operator.dim, 3, generator=rng)
    first = [operator @ v for v in vectors.T]
    assert relative(torch.stack(first, dim=1), exact @ vectors.double()) < 2e-6
    for _ in range(3):
        assert all(torch.equal(operator @ v, w) for v, w in zip(vectors.T, first, strict=True))
    assert operator.prepare().line.replaces
    assert relative(operator @ vectors, exact @ vectors.double()) < 2e-6
    assert operator.matvecs == 15


@pytest.mark.parametrize("make", [hessian, ggn])
@pytest.mark.parametrize("before", [1, 8])
def test_data_that_change_in_place_are_refused(make, before: int) -> None:
    """With the activations of the old data, products would be those of no data at all."""
    x, y = torch.randn(12, 4), torch.arange(12) % 3
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    for changed in (slice(6), slice(6, 12)):
        parts = [(x[:6].clone(), y[:6]), (x[6:].clone(), y[6:])]
        operator = make(Problem(model, "cross_entropy", parts))
        v = torch.randn(operator.dim)
        for _ in range(before):
            operator @ v
        assert operator.prepare().line.replaces == (before == 8)
        parts[changed.start == 6][0].mul_(2.0)
        with pytest.raises(RuntimeError, match=r"changed in place|modified by an inplace"):
            operator @ v


def test_blocks_are_checked_where_the_first_vectors_show_nothing(monkeypatch) -> None:
    """Inputs that are 0 in all samples, as the first pixels of MNIST, leave zero columns."""
    right = linearise._Signal.vmap

    def wrong(info: Any, dims: Any, *args: Any) -> Any:
        found, places = right(info, dims, *args)
        return 2 * found, places

    x, y = torch.randn(6, 4).double(), torch.arange(6) % 3
    x[:, :2] = 0
    problem = Problem(nn.Sequential(nn.Linear(4, 5), nn.Tanh()).double(), "cross_entropy", (x, y))
    exact = dense_hessian(problem)
    monkeypatch.setattr(linearise._Signal, "vmap", staticmethod(wrong))
    operator = hessian(problem)
    first = torch.zeros(operator.dim, 2, dtype=torch.float64)
    first[[0, 1], [0, 1]] = 1.0
    assert not (operator @ first).any()
    assert relative(operator.dense(), exact) < 1e-12
    assert not operator.prepare().vmaps


class _LinearOutput(nn.Module):
    """Two linear maps without bias, whose own passes do not follow their second derivatives."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2, bias=False), nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class _SharedLayer(nn.Module):
    """One layer used three times, in a chain and around it."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.shared(torch.tanh(self.shared(x)))
        return self.head(torch.relu(inner) + self.shared(x))


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        (_LinearOutput(), lambda z, y: (z * y.unsqueeze(1)).sum() / len(z)),
        (_LinearOutput(), nn.CrossEntropyLoss()),
        (_SharedLayer(), nn.CrossEntropyLoss()),
    ],
)
def test_parts_that_layers_add_in_place_are_all_in_the_product(model: nn.Module, loss: Any) -> None:
    """One by one and in a block, against plain double backward, over batches of unequal size."""
    model = model.double()
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(7, 3, generator=rng, dtype=torch.float64), torch.arange(7) % 2
    parameters = list(model.parameters())
    grads = torch.autograd.grad(loss(model(x), y), parameters, create_graph=True)
    flat = torch.cat([g.reshape(-1) for g in grads])
    columns = [
        torch.autograd.grad(one, parameters, retain_graph=True, materialize_grads=True)
        for one in flat
    ]
    dense = torch.stack([torch.cat([c.reshape(-1) for c in column]) for column in columns])
    operator = hessian(Problem(model, loss, [(x[:5], y[:5]), (x[5:], y[5:])]), mode="reverse")
    eye = torch.eye(len(dense), dtype=torch.float64)
    assert relative(operator @ eye, dense) < 1e-12
    assert relative(torch.stack([operator @ unit for unit in eye]), dense) < 1e-12


def test_threads_that_multiply_by_one_operator_do_not_mix() -> None:
    operator = hessian(network("mlp"))
    blocks = torch.randn(4, operator.dim, 3, generator=torch.Generator().manual_seed(0)).to(
        operator.dtype
    )
    right = [operator @ block for block in blocks]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            for found, one in zip(pool.map(operator.__matmul__, blocks), right, strict=True):
                assert relative(found, one) < 1e-12


@pytest.mark.parametrize("make", [hessian, ggn, gradient_covariance])
def test_threads_do_not_mix_where_no_graph_is_kept(make: Any) -> None:
    """Every product puts its parameters into the one module, or uses the one level of duals."""
    problem = classifier()
    operators = [make(problem, memory=0) for _ in range(2)]
    vectors = torch.randn(8, problem.num_parameters, generator=generator(0, "threads"))
    vectors = vectors.to(problem.dtype)
    expected = [make(problem, memory=0) @ v for v in vectors]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: operators[i % 2] @ vectors[i % 8], range(80)))
    assert all(relative(each, expected[i % 8]) < 1e-12 for i, each in enumerate(found))


@pytest.mark.parametrize("make", [hessian, ggn, gradient_covariance])
def test_vmap_over_products(make: Any) -> None:
    """A caller's own vmap, over several batches, of vectors and of blocks."""
    operator = make(classifier(batch_size=7))
    vectors = torch.randn(4, operator.dim, generator=generator(0, "vmap")).to(operator.dtype)
    expected = (operator @ vectors.T).T
    assert relative(torch.func.vmap(lambda v: operator @ v)(vectors), expected) < 1e-6
    pairs = torch.func.vmap(lambda v: operator @ torch.stack([v, 2 * v], dim=1))(vectors)
    assert relative(pairs[..., 1], 2 * expected) < 1e-6


class _Descending(nn.Module):
    """A network whose input takes a gradient step on an energy first, by ``torch.func``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.energy, self.head = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        step = torch.func.grad(lambda at: self.energy(torch.tanh(self.inner(at))).sum())(x)
        return self.head(x - 0.3 * step)


class _Hollow(nn.Module):
    """A network with a layer of width 0."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
            self.first, self.second = nn.Linear(3, 0), nn.Linear(0, 3)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x) + self.second(self.first(x)))


@pytest.mark.parametrize("model", [_Descending, _Hollow])
@pytest.mark.parametrize("mode", ["auto", "reverse", "forward"])
def test_models_with_gradients_inside_and_empty_layers(model: type[nn.Module], mode: str) -> None:
    rng = generator(0, "inside")
    x = torch.randn(7, 3, generator=rng, dtype=torch.float64)
    problem = Problem(model().double(), "mse", (x, x[:, :2] ** 2), batch_size=3)
    assert relative(hessian(problem, mode=mode).dense(), dense_hessian(problem)) < 1e-10
    assert relative(ggn(problem).dense(), dense_ggn(problem)) < 1e-10
