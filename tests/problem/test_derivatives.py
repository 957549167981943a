"""Second derivatives of layers that torch differentiates wrongly, against central differences of
gradients.
"""

import contextlib
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrizations

from lambdahat.operators import ggn, hessian
from lambdahat.optim import Metric, batch_product, true_second_derivatives
from lambdahat.optim.regularizers import dense_hessian
from lambdahat.problem import Problem
from lambdahat.training import fit

Y = torch.tensor([0, 1, 1, 0, 1, 0])
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
NORMED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight norm": parametrizations.weight_norm,
    "weight norm by column": lambda layer: parametrizations.weight_norm(layer, dim=1),
    "weight norm, counted from the end": lambda layer: parametrizations.weight_norm(layer, dim=-2),
    "weight norm of all": lambda layer: parametrizations.weight_norm(layer, dim=None),
    "weight norm by hooks": nn.utils.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "spectral norm by hooks": nn.utils.spectral_norm,
    "orthogonal": lambda layer: parametrizations.orthogonal(layer, orthogonal_map="cayley"),
}
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")


def model(normed: str) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
        NORMED[normed](net[0])
    net(X)  # hooks keep a weight with its graph
    return net.eval()


def slopes(gradient: Callable[[Tensor], Tensor], theta: Tensor, step: float = 1e-5) -> Tensor:
    """∂∇L/∂θ by central differences."""
    ways = step * torch.eye(len(theta), dtype=theta.dtype)
    return torch.stack([gradient(theta + way) - gradient(theta - way) for way in ways]) / (2 * step)


def gradient_of(net: nn.Module, theta: Tensor) -> Tensor:
    """The first derivative by the model as it is, which torch has right."""
    names, shapes = zip(*((name, p.shape) for name, p in net.named_parameters()), strict=True)
    leaf = theta.clone().requires_grad_()
    parts = leaf.split([math.prod(shape) for shape in shapes])
    state = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
    return torch.autograd.grad(
        cross_entropy(torch.func.functional_call(net, state, (X,)), Y), leaf
    )[0]


def exact(net: nn.Module) -> Tensor:
    theta = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    return slopes(lambda at: gradient_of(net, at), theta)


def error(found: Tensor, true: Tensor) -> float:
    return float((found - true).norm() / true.norm())


@pytest.mark.parametrize("normed", NORMED)
def test_problems(normed: str) -> None:
    net = model(normed)
    problem = Problem(net, "cross_entropy", (X, Y))
    assert problem.loss() == pytest.approx(float(cross_entropy(net(X), Y).detach()), rel=1e-12)
    for mode in ("reverse", "forward"):
        operator = hessian(problem, mode=mode)
        assert error(operator.dense(), exact(net)) < 1e-8
        columns = [operator @ row for row in torch.eye(operator.dim, dtype=torch.float64)]
        assert error(torch.stack(columns, 1), exact(net)) < 1e-8


@pytest.mark.parametrize("name", ["solve", "inv", "det", "slogdet", "cholesky", "eigvalsh", "qr"])
def test_linear_algebra_inside_a_model(name: str) -> None:
    """Some gradients read saved factors, which have no tangents."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4).double())

        def forward(self, x: Tensor) -> Tensor:
            matrix = self.weight @ self.weight.T + torch.eye(4).double()
            if name == "solve":
                return torch.linalg.solve(matrix, x.T).T
            value = getattr(torch.linalg, name)(matrix)
            value = value if isinstance(value, Tensor) else value[-1]
            return x @ value if value.ndim == 2 else x * value

    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(Inner(), nn.Tanh(), nn.Linear(4, 2).double())
    problem = Problem(net, "cross_entropy", (X, Y))
    for mode in ("reverse", "forward"):
        operator = hessian(problem, mode=mode)
        columns = [operator @ row for row in torch.eye(operator.dim, dtype=torch.float64)]
        assert error(torch.stack(columns, 1), exact(net)) < 1e-7
        assert error(operator.dense(), exact(net)) < 1e-7


class Slopes(nn.Module):
    """A model that gives its own gradient by the inputs too, as for forces; ``way`` is how."""

    def __init__(self, layer: nn.Module, way: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), layer, nn.Tanh(), nn.Linear(6, 1))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "functional":
            energy, pull = torch.func.vjp(self.layers, x)
            return torch.cat([energy, *pull(torch.ones_like(energy))], dim=1)
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.layers(x)
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return torch.cat([energy, force], dim=1)


STATISTICS = {
    "layer norm": lambda: nn.LayerNorm(6),
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, affine=True), nn.Flatten()
    ),
    "batch norm": lambda: nn.BatchNorm1d(6),
    "group norm": lambda: nn.GroupNorm(2, 6),
}


@pytest.mark.parametrize("way", ["autograd", "functional"])
@pytest.mark.parametrize("name", STATISTICS)
def test_models_that_differentiate_norms_themselves(name: str, way: str) -> None:
    """PyTorch holds the statistics of most constant in the third derivative."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Slopes(STATISTICS[name](), way).double()
        truth = torch.randn(6, 5, dtype=torch.float64)
    problem = Problem(net, "mse", (X, truth))
    expected = slopes(problem.gradient, problem.vector)
    exactly = name in ("batch norm", "group norm")  # the first by its running statistics
    warned = pytest.warns(UserWarning, match="third derivative of layer and batch norms")
    with contextlib.nullcontext() if exactly else warned:
        operator = hessian(problem)
        columns = [operator @ row for row in torch.eye(operator.dim, dtype=torch.float64)]
    assert error(torch.stack(columns, 1), expected) < 1e-6
    assert (operator.mode == "finite") != exactly


def test_models_that_differentiate_batch_statistics_themselves() -> None:
    net = Slopes(nn.BatchNorm1d(6), "autograd").double()
    problem = Problem(net, "mse", [(X, torch.randn(6, 5).double())], norm="train")
    with pytest.warns(UserWarning, match="third derivative of layer and batch norms"):
        dense = hessian(problem).dense()
    assert error(dense, slopes(problem.gradient, problem.vector)) < 1e-6


@pytest.mark.parametrize("normed", ["weight norm", "weight norm by hooks"])
def test_products_of_the_users_own_model(normed: str) -> None:
    net = model(normed)
    parameters = list(net.parameters())
    with pytest.raises(
        ValueError, match=r"loss must have a true second derivative.*true_second_derivatives"
    ):
        batch_product(cross_entropy(net(X), Y), parameters)
    with true_second_derivatives(net):
        loss = cross_entropy(net(X), Y)
    assert error(dense_hessian(batch_product(loss, parameters), parameters), exact(net)) < 1e-8


@pytest.mark.parametrize("normed", ["weight norm", "weight norm by hooks"])
def test_the_model_is_put_back(normed: str) -> None:
    net = model(normed)
    holders = [
        *net.modules(),
        *(hook for layer in net.modules() for hook in layer._forward_pre_hooks.values()),
    ]
    before = [set(vars(holder)) for holder in holders]
    within = true_second_derivatives(net)
    with contextlib.suppress(KeyError), within:
        assert before != [set(vars(holder)) for holder in holders]
        raise KeyError
    assert before == [set(vars(holder)) for holder in holders]


@pytest.mark.parametrize("normed", ["weight norm", "weight norm by hooks"])
def test_regularizers_of_curvature_in_training(normed: str) -> None:
    """One step of SGD: θ − α(∇L + λHθ)."""
    net = model(normed)
    theta = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    expected = theta - 0.1 * (gradient_of(net, theta) + 0.5 * exact(net) @ theta)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    fit(
        Problem(net, "cross_entropy", (X, Y)),
        optimizer,
        epochs=1,
        batch_size=6,
        regularizers=[Metric(0.5)],
    )
    assert error(torch.cat([p.detach().reshape(-1) for p in net.parameters()]), expected) < 1e-9


class Scaled(nn.Embedding):
    """One with a forward pass of its own."""

    def forward(self, tokens: Tensor) -> Tensor:
        return 3 * super().forward(tokens)


def bounded(embedding: nn.Module, width: int) -> tuple[nn.Sequential, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tokens = torch.randint(0, 5, (6, 4))
        return nn.Sequential(
            embedding, nn.Flatten(), nn.Tanh(), nn.Linear(width, 2)
        ).double(), tokens


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag, Scaled])
def test_embeddings_with_a_largest_norm_keep_the_loss_and_the_weight(kind: type[nn.Module]) -> None:
    net, tokens = bounded(kind(5, 3, max_norm=1.0), 3 if kind is nn.EmbeddingBag else 12)
    problem = Problem(net, "cross_entropy", (tokens, Y))
    theta = problem.vector
    given = theta.clone()
    loss = problem.loss(given)
    if kind is not Scaled:
        assert torch.equal(given, theta)
    with torch.no_grad():
        assert loss == pytest.approx(float(cross_entropy(net(tokens), Y)), rel=1e-12)


def test_rows_that_torch_has_scaled_are_within_the_limit() -> None:
    """Their gradient is then torch's own, as in training; float32 may leave them a rounding
    beyond.
    """
    net, tokens = bounded(nn.Embedding(5, 3, max_norm=1.0), 12)
    net.float()
    with torch.no_grad():
        net(tokens)
        net[0].weight.mul_(1 + 2e-7)
    assert bool((net[0].weight.norm(dim=1) > 1).any())
    problem = Problem(net, "cross_entropy", (tokens, Y))
    found = problem.gradient()
    own = torch.autograd.grad(cross_entropy(net(tokens), Y), list(net.parameters()))
    torch.testing.assert_close(
        found, torch.cat([part.reshape(-1) for part in own]), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("largest", [None, 0.7])
def test_the_row_of_padding_is_a_constant_in_every_mode(largest: float | None) -> None:
    """Torch's own forward mode takes that row for a parameter: Hessians came out unsymmetric."""
    net, tokens = bounded(nn.Embedding(5, 3, padding_idx=0, max_norm=largest), 12)
    assert bool((tokens == 0).any())
    with torch.no_grad():
        net[0].weight[0] = 0.3
    problem = Problem(net, "cross_entropy", (tokens, Y))
    true = slopes(problem.gradient, problem.vector)
    true[:3] = 0
    for mode in ("reverse", "forward"):
        assert error(hessian(problem, mode=mode).dense(), true) < 1e-8
    if largest is None:  # or torch writes to the weight
        own = torch.autograd.grad(cross_entropy(net(tokens), Y), list(net.parameters()))
        torch.testing.assert_close(
            problem.gradient(), torch.cat([part.reshape(-1) for part in own])
        )


def test_an_embedding_with_a_largest_norm_must_not_share_its_weight() -> None:
    """torch shortens the shared weight before the other layer reads it: a loss of no fixed
    weights.
    """

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = (
                nn.Embedding(5, 3, max_norm=0.5),
                nn.Linear(3, 5, bias=False),
            )
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embedding(tokens))

    with pytest.raises(
        ValueError, match=r"an embedding with max_norm must have a weight of its own"
    ):
        Problem(Tied(), "cross_entropy", (torch.tensor([0, 1, 2]), torch.tensor([1, 2, 3])))


@pytest.mark.parametrize("padding", [None, 1])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_give_torchs_numbers_and_can_be_differentiated_twice(
    mode: str, padding: int | None
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        bag = nn.EmbeddingBag(5, 3, mode=mode, padding_idx=padding, sparse=mode != "max").double()
        net = nn.Sequential(bag, nn.Tanh(), nn.Linear(3, 2).double())
    tokens = torch.tensor([[0, 1, 3], [2, 2, 4], [1, 1, 1], [4, 0, 1]])
    given = (tokens, torch.tensor([0, 1, 1, 0]))
    problem = Problem(net, "cross_entropy", given)
    expected = cross_entropy(net(tokens), given[1])
    assert float(problem.loss()) == pytest.approx(float(expected.detach()), rel=1e-12)
    if mode == "max":
        return  # of its second derivative torch has none
    matrix = hessian(problem).dense()
    found = slopes(lambda theta: problem.at(theta).gradient(), problem.vector)
    assert torch.allclose(matrix, found, rtol=1e-7, atol=1e-9)
    assert torch.allclose(ggn(problem).dense(), ggn(problem).dense().T)


@pytest.mark.parametrize("inplace", [False, True])
def test_hard_sigmoids_can_be_differentiated_twice(inplace: bool) -> None:
    """Against central differences of the gradients of the user's own model."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Hardsigmoid(inplace), nn.Linear(5, 2)).double()
    with torch.no_grad():
        net[0].weight *= 8

    def slope(theta: Tensor) -> Tensor:
        nn.utils.vector_to_parameters(theta, net.parameters())
        loss = cross_entropy(net(X), Y)
        return nn.utils.parameters_to_vector(torch.autograd.grad(loss, list(net.parameters())))

    theta = nn.utils.parameters_to_vector(net.parameters()).detach()
    ways = 1e-6 * torch.eye(len(theta), dtype=theta.dtype)
    columns = [(slope(theta + way) - slope(theta - way)) / 2e-6 for way in ways]
    nn.utils.vector_to_parameters(theta, net.parameters())
    operator = hessian(Problem(net, "cross_entropy", (X, Y)))
    assert torch.allclose(operator.dense(), torch.stack(columns), atol=1e-7)
    assert operator.mode == "reverse"
