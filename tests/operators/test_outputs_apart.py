"""Gauss–Newton matrices of a model's own loss and of functions, against dense float64 matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev

import lambdahat as lh
from tests.operators.kronecker_cases import relative

WORDS = 6


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor


class Causal(nn.Module):
    """A causal language model with a loss of its own, the mean over the next labels, and one
    more term if asked.
    """

    def __init__(self, extra: float = 0.0, smoothing: float = 0.0) -> None:
        super().__init__()
        self.embed, self.mix, self.head = (
            nn.Embedding(WORDS, 4),
            nn.Linear(4, 4),
            nn.Linear(4, WORDS),
        )
        self.extra, self.smoothing = extra, smoothing

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        h = self.embed(input_ids)
        scores = (self.mix(h) @ h.mT).masked_fill(
            torch.ones(h.shape[1], h.shape[1]).triu(1).bool(), -torch.inf
        )
        logits = self.head(torch.tanh(scores.softmax(-1) @ h))
        loss = None
        if labels is not None:
            pairs = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            loss = (
                F.cross_entropy(*pairs, label_smoothing=self.smoothing)
                + self.extra * logits.square().mean()
            )
        return Output(loss, logits)


class Classifier(nn.Module):
    """One number or several classes a sample, with a loss of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body, self.kind = nn.Linear(4, 3), kind

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        logits = torch.tanh(self.body(x))
        losses = {
            "cross_entropy": F.cross_entropy,
            "mse": F.mse_loss,
            "bce": F.binary_cross_entropy_with_logits,
        }
        return {
            "logits": logits,
            "loss": None if labels is None else losses[self.kind](logits, labels),
        }


def seeded(build: Any, *args: Any, **options: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build(*args, **options).double()


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(WORDS, (7, 5), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, 2:] = -100
    labels[3, :4] = -100
    return {"input_ids": ids, "labels": labels}


def dense(problem: lh.Problem, output: Any, loss: Any) -> Tensor:
    """Jᵀ (∂²L/∂z²) J of all data."""
    theta = problem.vector
    z = output(problem.space.unflatten(theta)).detach()
    J = jacrev(lambda t: output(problem.space.unflatten(t)))(theta).reshape(-1, len(theta))
    return J.T @ hessian(loss)(z).reshape(z.numel(), z.numel()) @ J


@pytest.mark.parametrize("count", [None, "sequences"])
def test_the_own_loss_of_a_causal_language_model_has_a_gauss_newton_matrix(
    count: str | None,
) -> None:
    model, data = seeded(Causal), tokens()
    problem = lh.Problem(model, "model", data, batch_size=3, count=count)
    following = data["labels"][:, 1:]

    def loss(z: Tensor) -> Tensor:
        total = F.cross_entropy(z[:, :-1].flatten(0, 1), following.flatten(), reduction="sum")
        return total / (len(following) if count == "sequences" else following.ne(-100).sum())

    truth = dense(problem, lambda p: functional_call(model, p, (data["input_ids"],)).logits, loss)
    assert relative(lh.ggn(problem).dense(), truth) < 1e-12
    assert relative(lh.fisher(problem).dense(), truth) < 1e-12
    assert (
        relative(lh.ekfac(problem).known_trace() * torch.ones(1), truth.trace() * torch.ones(1))
        < 1e-10
    )
    assert lh.trace(lh.ggn(problem), tol=0.04).value == pytest.approx(
        float(truth.trace()), rel=0.05
    )


@pytest.mark.parametrize("kind", ["cross_entropy", "mse", "bce"])
def test_own_losses_of_classifiers(kind: str) -> None:
    model, rng = seeded(Classifier, kind), torch.Generator().manual_seed(2)
    x = torch.randn(7, 4, generator=rng, dtype=torch.float64)
    y = torch.randint(3, (7,), generator=rng)
    if kind != "cross_entropy":
        y = torch.randint(2, (7, 3), generator=rng).double()
    problem = lh.Problem(model, "model", {"x": x, "labels": y}, batch_size=3)
    own = {
        "cross_entropy": F.cross_entropy,
        "mse": F.mse_loss,
        "bce": F.binary_cross_entropy_with_logits,
    }[kind]
    truth = dense(problem, lambda p: functional_call(model, p, (x,))["logits"], lambda z: own(z, y))
    assert relative(lh.ggn(problem).dense(), truth) < 1e-12


@pytest.mark.parametrize("options", [{"extra": 1e-3}, {"smoothing": 0.1}])
@pytest.mark.parametrize("build", [lh.ggn, lh.fisher, lh.kfac])
def test_another_loss_of_its_own_is_refused_with_the_cure(
    build: Any, options: dict[str, float]
) -> None:
    problem = lh.Problem(seeded(Causal, **options), "model", tokens())
    with pytest.raises(
        TypeError,
        match=r'got one with loss="model"; name the loss of the output, such as loss="cross',
    ):
        build(problem)


RNG = torch.Generator().manual_seed(3)
X, Y = torch.randn(9, 4, generator=RNG, dtype=torch.float64), torch.randint(3, (9,), generator=RNG)
Z = torch.randn(9, 3, generator=RNG, dtype=torch.float64)
PARAMS = {
    "layer.weight": torch.randn(5, 4, generator=RNG, dtype=torch.float64),
    "layer.bias": torch.randn(5, generator=RNG, dtype=torch.float64),
    "head": torch.randn(3, 5, generator=RNG, dtype=torch.float64),
}


def network(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.tanh(x @ params["layer.weight"].mT + params["layer.bias"]) @ params["head"].mT


@pytest.mark.parametrize("form", ["tuple", "dict"])
@pytest.mark.parametrize(
    ("loss", "y"),
    [
        ("cross_entropy", Y),
        (nn.CrossEntropyLoss(label_smoothing=0.2), Y),
        ("mse", Z),
        (lambda z, y: F.huber_loss(z, y, delta=5.0), Z),
    ],
)
def test_an_output_function_and_a_loss_apart(loss: Any, y: Tensor, form: str) -> None:
    data = (X, y) if form == "tuple" else {"x": X, "labels": y}
    problem = lh.Problem.from_function(network, PARAMS, data, loss=loss, batch_size=4)
    plain = (
        {"cross_entropy": F.cross_entropy, "mse": F.mse_loss}.get(loss, loss)
        if isinstance(loss, str)
        else loss
    )
    assert problem.loss() == pytest.approx(float(plain(network(PARAMS, X), y)), rel=1e-12)
    truth = dense(problem, lambda p: network(p, X), lambda z: plain(z, y))
    assert problem.model is None
    for mode in ("reverse", "forward"):
        assert relative(lh.ggn(problem, mode=mode).dense(), truth) < 1e-12
    own = hessian(lambda t: plain(network(problem.space.unflatten(t), X), y))(problem.vector)
    assert relative(lh.hessian(problem).dense(), own) < 1e-12
    assert relative(lh.diagonal(lh.ggn(problem)).value, truth.diagonal()) < 1e-10
    K = lh.kfac(problem)
    assert relative(K.known_diagonal(), truth.diagonal()) < 1e-10
    assert set(K.structure().values()) == {"diagonal (not in a linear or convolution layer)"}
    part = lh.ggn(problem).restrict("layer.*")
    assert relative(part.dense(), truth[:25, :25]) < 1e-12
    assert (
        relative(
            lh.fisher(problem, "empirical").dense(),
            lh.fisher(one_function(plain, y), "empirical").dense(),
        )
        < 1e-9
    )


def one_function(loss: Any, y: Tensor) -> lh.Problem:
    return lh.Problem.from_function(
        lambda p, batch: loss(network(p, batch[0]), batch[1]), PARAMS, (X, y), batch_size=4
    )


def test_one_function_names_the_cure() -> None:
    for build in (lh.ggn, lh.fisher, lh.kfac):
        with pytest.raises(
            TypeError,
            match=r"got one made by from_function; give from_function the output function",
        ):
            build(one_function(F.cross_entropy, Y))
    with pytest.raises(ValueError, match="data must be given with loss"):
        lh.Problem.from_function(network, PARAMS, loss="mse")
    with pytest.raises(
        ValueError, match='loss must be a loss of the function\'s output, got "model"'
    ):
        lh.Problem.from_function(network, PARAMS, (X, Y), loss="model")
    with pytest.raises(TypeError) as caught:
        lh.Problem.from_function(
            lambda params: params["head"], PARAMS, (X, Y), loss="cross_entropy"
        )
    assert "called as output_fn(params, *inputs)" in caught.value.__notes__[0]


def test_chains_and_training_take_an_output_function() -> None:
    problem = lh.Problem.from_function(network, PARAMS, (X, Y), loss="cross_entropy")
    one = one_function(F.cross_entropy, Y)
    kernel = lh.sampling.sgld(step_size=1e-4, localization=10.0, nbeta=4.0)
    first, second = (lh.sample(p, kernel, chains=2, draws=5, seed=0).losses for p in (problem, one))
    assert torch.allclose(torch.as_tensor(first), torch.as_tensor(second), rtol=1e-6)


def gauss_newton(model: nn.Module, x: Tensor, loss: Any) -> Tensor:
    """Dense JᵀMJ in float64 by torch.func alone."""
    names = [name for name, _ in model.named_parameters()]
    point = torch.cat([p.detach().flatten() for p in model.parameters()])
    shapes = [p.shape for p in model.parameters()]

    def output(theta: Tensor) -> Tensor:
        parts = theta.split([shape.numel() for shape in shapes])
        values = {n: p.view(s) for n, p, s in zip(names, parts, shapes, strict=True)}
        return functional_call(model, values, (x,)).flatten()

    shape = functional_call(model, dict(model.named_parameters()), (x,)).shape
    jacobian = jacrev(output)(point)
    middle = hessian(lambda z: loss(z.view(shape)))(output(point))
    return jacobian.T @ middle @ jacobian


@pytest.mark.parametrize(
    "loss",
    [
        lambda o: F.linear(F.normalize(o), F.normalize(o)).logsumexp(1).mean(),
        lambda o: F.linear(o, o).square().mean(),
        lambda o: F.softplus(F.linear(F.relu(o), o.tanh())).mean(),
        lambda o: F.conv1d(o[:, None], o[:2, None, :2]).square().mean(),
    ],
)
def test_a_loss_with_layers_of_the_output_on_both_sides(loss: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    x = torch.randn(8, 3, dtype=torch.float64)
    problem = lh.Problem(model, lambda o, _: loss(o), (x, torch.arange(8)))
    expected = gauss_newton(model, x, loss)
    assert relative(lh.ggn(problem).dense(), expected) < 1e-9
    assert lh.trace(lh.ggn(problem)).value == pytest.approx(float(expected.trace()), rel=1e-9)


@pytest.mark.parametrize("act", [torch.relu, torch.tanh])
def test_a_model_that_takes_gradients_itself(act: Any) -> None:
    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 6), nn.Linear(6, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            energy = self.b(act(self.a(x)))
            return torch.cat(
                [energy, torch.autograd.grad(energy.sum(), x, create_graph=True)[0]], 1
            )

    torch.manual_seed(0)
    model, x = Force().double(), torch.randn(9, 3, dtype=torch.float64)
    problem = lh.Problem(model, "mse", (x, torch.zeros(9, 4, dtype=torch.float64)))
    point = torch.cat([p.detach().flatten() for p in model.parameters()])

    def output(theta: Tensor) -> Tensor:
        """The same by formulas: e = b·act(Ax + c) + d and its gradient in x."""
        a, c, b, d = theta.split([18, 6, 6, 1])
        a = a.view(6, 3)
        h = x @ a.T + c
        slope = (h > 0).to(h) if act is torch.relu else 1 - h.tanh().square()
        return torch.cat([(act(h) @ b + d)[:, None], (slope * b) @ a], 1).flatten()

    jacobian = jacrev(output)(point)
    expected = 2 / 36 * jacobian.T @ jacobian
    assert relative(lh.ggn(problem).dense(), expected) < 1e-9
    assert lh.trace(lh.ggn(problem)).value == pytest.approx(float(expected.trace()), rel=1e-9)
