"""``form_of`` finds nothing curved only where tr H = tr GGN, and that for every piecewise-linear
network listed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lambdahat.operators import hessian
from lambdahat.operators.exact.validity import ModelForm, few_of, form_of
from lambdahat.operators.linearise import leaves_of
from lambdahat.problem import Problem
from tests.oracles import dense_ggn, dense_hessian


def form(problem: Problem) -> ModelForm:
    return form_of(few_of(problem, leaves_of(problem, problem.vector)))


class Net(nn.Module):
    """Layers by name and a forward pass given as a function of the module and its input."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **layers: Any) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.rule = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.rule(self, x)


def between(middle: nn.Module | Callable[[Tensor], Tensor]) -> nn.Module:
    """Linear 4 → 5, something, linear 5 → 3."""
    return Net(
        lambda m, x: m.b(middle(m.a(x))) if not isinstance(middle, nn.Module) else m.b(m.f(m.a(x))),
        a=nn.Linear(4, 5),
        b=nn.Linear(5, 3),
        f=middle if isinstance(middle, nn.Module) else nn.Identity(),
    )


def image(*layers: nn.Module, width: int) -> nn.Module:
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width, 3))


def bare(forward: Callable[[Any, Tensor], Tensor], *shape: int, **layers: Any) -> nn.Module:
    """A net with a loose parameter ``w`` of the given shape."""
    return Net(forward, w=nn.Parameter(torch.randn(*shape)), **layers)


def write_halves(m: Any, x: Tensor) -> Tensor:
    out = torch.zeros(len(x), 5, dtype=x.dtype, device=x.device)
    out[:, :2] = m.a(x)[:, :2]
    out[:, 2:] = m.a(x)[:, 2:].relu()
    return m.b(out)


def in_place(change: Callable[[Tensor], Any]) -> Callable[[Any, Tensor], Tensor]:
    """Changes one column of the hidden layer in place."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x) * 1.0
        change(h)
        return m.b(h)

    return forward


def hidden(forward: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    return Net(forward, a=nn.Linear(4, 5), b=nn.Linear(5, 3))


FLAT, PICTURE, SERIES, TOKENS = (4,), (2, 6, 6), (2, 8), "tokens"
A = torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

LINEAR: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "ReLU": (lambda: between(nn.ReLU()), FLAT),
    "ReLU in place": (lambda: between(nn.ReLU(inplace=True)), FLAT),
    "F.relu": (lambda: between(F.relu), FLAT),
    "LeakyReLU": (lambda: between(nn.LeakyReLU()), FLAT),
    "LeakyReLU in place": (lambda: between(nn.LeakyReLU(0.2, inplace=True)), FLAT),
    "PReLU": (lambda: between(nn.PReLU()), FLAT),
    "PReLU per channel": (lambda: between(nn.PReLU(5)), FLAT),
    "Hardtanh": (lambda: between(nn.Hardtanh()), FLAT),
    "ReLU6": (lambda: between(nn.ReLU6()), FLAT),
    "Hardsigmoid": (lambda: between(nn.Hardsigmoid()), FLAT),
    "Softshrink": (lambda: between(nn.Softshrink(0.1)), FLAT),
    "clamp": (lambda: between(lambda h: h.clamp(-0.5, 0.5)), FLAT),
    "abs": (lambda: between(torch.abs), FLAT),
    "maximum": (lambda: between(lambda h: torch.maximum(h, 0.3 * h)), FLAT),
    "where": (lambda: between(lambda h: torch.where(h > 0, h, 0.1 * h)), FLAT),
    "masked fill": (lambda: between(lambda h: h.masked_fill(h < 0, 0.0)), FLAT),
    "relu by a mask": (lambda: between(lambda h: h * (h > 0)), FLAT),
    "sort": (lambda: between(lambda h: h.sort(dim=1).values), FLAT),
    "cumulative sum": (lambda: between(lambda h: h.cumsum(dim=1)), FLAT),
    "max of all": (lambda: between(lambda h: h + h.amax(dim=1, keepdim=True)), FLAT),
    "scaled": (lambda: between(lambda h: (3 * h - 1) / 2), FLAT),
    "divided by data": (lambda: between(lambda h: h / A[0].to(h)), FLAT),
    "constant matrix": (lambda: between(lambda h: torch.einsum("bi,ij->bj", h, A.to(h))), FLAT),
    "dropout in eval": (lambda: between(nn.Dropout(0.5)), FLAT),
    "batch-norm 1d in eval": (lambda: between(nn.BatchNorm1d(5)), FLAT),
    "residual": (lambda: hidden(lambda m, x: m.b(m.a(x) + F.relu(m.a(x)))), FLAT),
    "residual by addmm": (
        lambda: bare(
            lambda m, x: m.b(torch.addmm(m.a(x), F.relu(m.a(x)), m.w)),
            5,
            5,
            a=nn.Linear(4, 5),
            b=nn.Linear(5, 3),
        ),
        FLAT,
    ),
    "parallel use": (lambda: hidden(lambda m, x: m.b(F.relu(m.a(x)) + F.relu(m.a(-x)))), FLAT),
    "concatenation": (
        lambda: Net(
            lambda m, x: m.b(torch.cat([m.a(x).relu(), x], dim=1)),
            a=nn.Linear(4, 5),
            b=nn.Linear(9, 3),
        ),
        FLAT,
    ),
    "written by halves": (lambda: hidden(write_halves), FLAT),
    "relu in place on a part": (lambda: hidden(in_place(lambda h: h[:, :2].relu_())), FLAT),
    "relu in place on a view": (
        lambda: hidden(lambda m, x: m.b(F.relu_((m.a(x) * 1.0).view(-1, 5)))),
        FLAT,
    ),
    "gate by another path": (
        lambda: Net(
            lambda m, x: m.b(m.a(x) * m.c(x)),
            a=nn.Linear(4, 5),
            c=nn.Linear(4, 5),
            b=nn.Linear(5, 3),
        ),
        FLAT,
    ),
    "bilinear layer": (
        lambda: Net(
            lambda m, x: m.b(m.c(m.a(x), x)),
            a=nn.Linear(4, 2),
            c=nn.Bilinear(2, 4, 5),
            b=nn.Linear(5, 3),
        ),
        FLAT,
    ),
    "log-softmax at the end": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3), nn.LogSoftmax(dim=-1)),
        FLAT,
    ),
    "constant softmax": (lambda: hidden(lambda m, x: m.b(m.a(x.softmax(dim=1)).relu())), FLAT),
    "max pool": (lambda: image(nn.Conv2d(2, 2, 3), nn.ReLU(), nn.MaxPool2d(2), width=8), PICTURE),
    "max pool 1d": (lambda: image(nn.Conv1d(2, 2, 3), nn.ReLU(), nn.MaxPool1d(2), width=6), SERIES),
    "average pool": (
        lambda: image(nn.Conv2d(2, 2, 3), nn.ReLU(), nn.AvgPool2d(2), width=8),
        PICTURE,
    ),
    "adaptive average pool": (
        lambda: image(nn.Conv2d(2, 2, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(3), width=18),
        PICTURE,
    ),
    "adaptive average pool to 1": (
        lambda: image(nn.Conv2d(2, 2, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), width=2),
        PICTURE,
    ),
    "adaptive max pool": (
        lambda: image(nn.Conv2d(2, 2, 3), nn.AdaptiveMaxPool2d(2), width=8),
        PICTURE,
    ),
    "batch-norm 2d in eval": (
        lambda: image(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(2), width=8),
        PICTURE,
    ),
    "depthwise": (
        lambda: image(
            nn.Conv2d(2, 4, 3, groups=2), nn.ReLU(), nn.Conv2d(4, 2, 1), nn.MaxPool2d(2), width=8
        ),
        PICTURE,
    ),
    "transposed": (
        lambda: image(nn.ConvTranspose2d(2, 2, 2, stride=2), nn.ReLU(), nn.AvgPool2d(4), width=18),
        PICTURE,
    ),
    **{
        f"{mode} padding": (
            lambda mode=mode: image(
                nn.Conv2d(2, 2, 3, padding=1, padding_mode=mode),
                nn.ReLU(),
                nn.Conv2d(2, 1, 3, padding=1, padding_mode=mode),
                nn.AvgPool2d(3),
                width=4,
            ),
            PICTURE,
        )
        for mode in ("zeros", "reflect", "replicate", "circular")
    },
    "upsampling": (
        lambda: image(
            nn.Conv2d(2, 2, 3),
            nn.Upsample(scale_factor=2, mode="bilinear"),
            nn.MaxPool2d(4),
            width=8,
        ),
        PICTURE,
    ),
    "embedding": (
        lambda: nn.Sequential(
            nn.Embedding(6, 4), nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 3)
        ),
        TOKENS,
    ),
    "linear attention": (
        lambda: Net(
            lambda m, x: m.o((m.q(x) @ m.k(x).mT @ m.v(x)).mean(1)),
            q=nn.Linear(2, 3),
            k=nn.Linear(2, 3),
            v=nn.Linear(2, 3),
            o=nn.Linear(3, 3),
        ),
        (5, 2),
    ),
}


class Relu(torch.autograd.Function):
    """Calls itself ReLU, and squares."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * g


class ExpInPlace(torch.autograd.Function):
    """The exponential of what it is given where it lies, by ``copy_``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.copy_(x.exp())
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return y * g


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.second(F.relu(self.first(x)))))


def norm_layer(layer: nn.Module) -> nn.Module:
    return image(nn.Conv2d(2, 2, 3), layer, nn.ReLU(), nn.MaxPool2d(2), width=8)


CURVED: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "tanh": (lambda: between(nn.Tanh()), FLAT, "Tanh is not piecewise linear"),
    "GELU": (lambda: between(nn.GELU()), FLAT, "Gelu is not"),
    "F.gelu": (lambda: between(F.gelu), FLAT, "Gelu is not"),
    "SiLU": (lambda: between(nn.SiLU()), FLAT, "Silu is not"),
    "sigmoid": (lambda: between(nn.Sigmoid()), FLAT, "Sigmoid is not"),
    "softplus": (lambda: between(nn.Softplus()), FLAT, "Softplus is not"),
    "ELU": (lambda: between(nn.ELU()), FLAT, "Elu is not"),
    "Hardswish": (lambda: between(nn.Hardswish()), FLAT, "Hardswish is not"),
    "softmax": (lambda: between(lambda h: h.softmax(dim=1)), FLAT, "Softmax is not"),
    "attention": (
        lambda: Net(
            lambda m, x: m.o((F.softmax(m.q(x) @ m.k(x).mT, -1) @ m.v(x)).mean(1)),
            q=nn.Linear(2, 3),
            k=nn.Linear(2, 3),
            v=nn.Linear(2, 3),
            o=nn.Linear(3, 3),
        ),
        (5, 2),
        "Softmax is not",
    ),
    "transformer": (
        lambda: Net(
            lambda m, x: m.o(m.t(x).mean(1)),
            o=nn.Linear(4, 3),
            t=nn.TransformerEncoderLayer(4, 2, 4, batch_first=True),
        ),
        (3, 4),
        "is not piecewise linear|enters twice on one path, through Bmm",
    ),
    "linear attention twice": (
        lambda: Net(
            lambda m, x: m.o((m.q(m.i(x)) @ m.k(m.i(x)).mT @ x).mean(1)),
            i=nn.Linear(2, 2),
            q=nn.Linear(2, 3),
            k=nn.Linear(2, 3),
            o=nn.Linear(2, 3),
        ),
        (5, 2),
        "i.bias enters twice",
    ),
    "LayerNorm": (lambda: between(nn.LayerNorm(5)), FLAT, "NativeLayerNorm is not"),
    "GroupNorm": (lambda: norm_layer(nn.GroupNorm(1, 2)), PICTURE, "NativeGroupNorm is not"),
    "InstanceNorm": (
        lambda: norm_layer(nn.InstanceNorm2d(2)),
        PICTURE,
        "1 normalises by the statistics",
    ),
    "batch-norm without statistics": (
        lambda: norm_layer(nn.BatchNorm2d(2, track_running_stats=False)),
        PICTURE,
        "1 normalises by the statistics of its batch",
    ),
    "F.batch_norm": (
        lambda: between(lambda h: F.batch_norm(h, None, None, training=True)),
        FLAT,
        "batch normalisation uses",
    ),
    "F.batch_norm with weight": (
        lambda: bare(
            lambda m, x: m.b(F.batch_norm(m.a(x), None, None, m.w, training=True)),
            5,
            a=nn.Linear(4, 5),
            b=nn.Linear(5, 3),
        ),
        FLAT,
        "batch normalisation uses",
    ),
    "tied in series": (Tied, FLAT, "first.weight enters twice on one path, through Addmm"),
    "layer in series": (
        lambda: Net(lambda m, x: m.b(m.a(F.relu(m.a(x)))), a=nn.Linear(4, 4), b=nn.Linear(4, 3)),
        FLAT,
        "a.weight enters twice",
    ),
    "recurrent ReLU": (
        lambda: Net(
            lambda m, x: m.b(m.r(x)[0][:, -1]),
            r=nn.RNN(2, 3, nonlinearity="relu", batch_first=True),
            b=nn.Linear(3, 3),
        ),
        (4, 2),
        "enters twice|is not piecewise linear",
    ),
    "square": (lambda: between(lambda h: h * h), FLAT, "enters twice on one path, through Mul"),
    "square by a power": (lambda: between(torch.square), FLAT, "Pow is not"),
    "x relu x": (
        lambda: between(lambda h: h * F.relu(h)),
        FLAT,
        "enters twice on one path, through Mul",
    ),
    "self product": (
        lambda: between(lambda h: h @ h.mT @ A[: len(h)].to(h)),
        FLAT,
        "enters twice on one path, through Mm",
    ),
    "batched self product": (
        lambda: between(lambda h: torch.einsum("bi,bi,ij->bj", h, h, A.to(h))),
        FLAT,
        "enters twice",
    ),
    "dot": (
        lambda: between(lambda h: h + torch.dot(h.flatten(), h.flatten())),
        FLAT,
        "through Dot",
    ),
    "product of all": (
        lambda: between(lambda h: torch.cat([h, h], dim=1).prod(dim=1, keepdim=True).expand(-1, 5)),
        FLAT,
        "Prod is not",
    ),
    "gate by the same path": (
        lambda: Net(
            lambda m, x: m.b(m.a(x) * m.c(m.a(x))),
            a=nn.Linear(4, 5),
            c=nn.Linear(5, 5),
            b=nn.Linear(5, 3),
        ),
        FLAT,
        "a.bias enters twice",
    ),
    "addcmul": (lambda: between(lambda h: torch.addcmul(h, h, h)), FLAT, "through Addcmul"),
    "division": (
        lambda: between(lambda h: h / (2 + h.abs().sum(1, keepdim=True))),
        FLAT,
        "it divides by a quantity",
    ),
    "constant divided": (
        lambda: between(lambda h: A[0].to(h) / (2 + h.abs())),
        FLAT,
        "it divides by a quantity",
    ),
    "number divided": (lambda: between(lambda h: 1 / (2 + h.abs())), FLAT, "Reciprocal is not"),
    "variance": (
        lambda: between(lambda h: h.var(dim=1, keepdim=True).expand(-1, 5)),
        FLAT,
        "Var is not",
    ),
    "norm": (
        lambda: between(lambda h: h + h.norm(dim=1, keepdim=True)),
        FLAT,
        "LinalgVectorNorm is not",
    ),
    "normalised": (
        lambda: between(lambda h: F.normalize(h, dim=1)),
        FLAT,
        "LinalgVectorNorm is not",
    ),
    "exp of a parameter": (
        lambda: bare(lambda m, x: m.b(m.a(x) * m.w.exp()), 5, a=nn.Linear(4, 5), b=nn.Linear(5, 3)),
        FLAT,
        "Exp is not",
    ),
    "square of a parameter": (
        lambda: bare(lambda m, x: m.b(m.a(x) * m.w * m.w), 5, a=nn.Linear(4, 5), b=nn.Linear(5, 3)),
        FLAT,
        "w enters twice",
    ),
    "tied embedding": (
        lambda: bare(lambda m, x: F.relu(F.embedding(x, m.w).sum(1)) @ m.w[:3].mT, 6, 4),
        TOKENS,
        "w enters twice",
    ),
    "weight norm": (
        lambda: Net(
            lambda m, x: m.b(F.relu(m.a(x))),
            a=parametrizations.weight_norm(nn.Linear(4, 5)),
            b=nn.Linear(5, 3),
        ),
        FLAT,
        "LinalgVectorNorm is not piecewise linear",
    ),
    "spectral norm": (
        lambda: Net(
            lambda m, x: m.b(F.relu(m.a(x))),
            a=parametrizations.spectral_norm(nn.Linear(4, 5)).eval(),
            b=nn.Linear(5, 3),
        ),
        FLAT,
        "Vdot is not|it divides by a quantity",
    ),
    "log-softmax inside": (
        lambda: between(lambda h: h.log_softmax(dim=1)),
        FLAT,
        "LogSoftmax is not",
    ),
    "log-softmax over samples": (
        lambda: hidden(lambda m, x: m.b(m.a(x)).log_softmax(dim=0)),
        FLAT,
        "LogSoftmax is not",
    ),
    "log-softmax and more": (
        lambda: hidden(lambda m, x: m.b(m.a(x)).log_softmax(dim=1) * A[0, :3].to(x)),
        FLAT,
        "LogSoftmax is not",
    ),
    "tanh in place on a part": (
        lambda: hidden(in_place(lambda h: h[:, 0].tanh_())),
        FLAT,
        "tanh_ writes in place",
    ),
    "product in place on a part": (
        lambda: hidden(in_place(lambda h: h[:, 0].mul_(h[:, 0].clone()))),
        FLAT,
        "mul_ writes in place",
    ),
    "custom function on a part": (
        lambda: hidden(in_place(lambda h: ExpInPlace.apply(h[:, 0]))),
        FLAT,
        "second derivative in a.weight",
    ),
    "custom function": (lambda: between(Relu.apply), FLAT, "the custom function Relu is not"),
}


# those whose curvature is that of functions of single elements, which has a closed form too
SMOOTH = (
    "tanh",
    "GELU",
    "F.gelu",
    "SiLU",
    "sigmoid",
    "softplus",
    "ELU",
    "Hardswish",
    "square by a power",
    "number divided",
)


def problem_of(
    make: Callable[[], nn.Module], shape: Any, loss: str = "cross_entropy", **options: Any
) -> Problem:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = make().double()
        tokens = shape == TOKENS
        x = torch.randint(6, (5, 3)) if tokens else torch.randn(5, *shape, dtype=torch.float64)
        y = torch.randint(3, (5,))
        for module in model.modules():
            if (
                isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d)
                and module.running_mean is not None
            ):
                nn.init.normal_(module.running_mean)
                nn.init.uniform_(module.running_var, 0.5, 2.0)
    by_batch = any(
        isinstance(m, nn.BatchNorm2d) and m.running_mean is None for m in model.modules()
    )
    options = {"batch_size": 3, "norm": "train" if by_batch else "eval", **options}
    return Problem(model, loss, (x, y), **options)


def traces(problem: Problem) -> tuple[float, float]:
    return float(dense_hessian(problem).trace()), float(dense_ggn(problem).trace())


@pytest.mark.parametrize("name", list(LINEAR))
def test_piecewise_linear_networks_are_recognised(name: str) -> None:
    problem = problem_of(*LINEAR[name])
    assert form(problem).curved == ""
    full, near = traces(problem)
    assert full == pytest.approx(near, rel=1e-10)
    assert hessian(problem).known_trace() == pytest.approx(full, rel=1e-10)


@pytest.mark.parametrize("name", list(CURVED))
def test_curved_networks_are_refused_by_name(name: str) -> None:
    make, shape, reason = CURVED[name]
    problem = problem_of(make, shape)
    found = form(problem).curved
    assert any(part in found for part in reason.split("|")), found
    full, near = traces(problem)
    assert not math.isclose(full, near, rel_tol=1e-6)
    operator = hessian(problem)
    if name in SMOOTH:
        assert operator.known_trace() == pytest.approx(full, rel=1e-9)
        return
    assert operator.known_trace() is None
    assert operator.known_diagonal() is None
    assert operator.sampled_trace(0.1, 0) is None


LOWER = [
    (name, (torch.float32, torch.bfloat16)[number % 2])
    for kind in (LINEAR, CURVED)
    for number, name in enumerate(kind)
]


@pytest.mark.parametrize(("name", "dtype"), LOWER)
def test_lower_precision_does_not_change_the_answer(name: str, dtype: torch.dtype) -> None:
    make, shape, *_ = LINEAR.get(name) or CURVED[name]
    problem = problem_of(make, shape, dtype=dtype)
    assert bool(form(problem).curved) == (name in CURVED)


def test_batch_norm_in_train_mode() -> None:
    problem = problem_of(*LINEAR["batch-norm 2d in eval"], norm="train")
    assert form(problem).curved == "1 normalises by the statistics of its batch"
    full, near = traces(problem)
    assert not math.isclose(full, near, rel_tol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [*LINEAR, *CURVED])
def test_the_names_of_nodes_are_known_on_the_gpu(name: str, dtype: torch.dtype) -> None:
    if name == "recurrent ReLU":
        pytest.skip("cuDNN has no backward pass of a recurrent layer in eval mode")
    make, shape, *_ = LINEAR.get(name) or CURVED[name]
    problem = problem_of(make, shape, dtype=dtype, device="cuda")
    assert bool(form(problem).curved) == (name in CURVED)
    if name in LINEAR:
        here = hessian(problem_of(make, shape)).known_trace()
        assert hessian(problem).known_trace() == pytest.approx(
            here, rel=1e-9 if dtype is torch.float64 else 5e-3
        )


def test_without_gradients_the_answer_is_the_same() -> None:
    problem = problem_of(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), (4,))
    with torch.no_grad():
        assert "Tanh" in form(problem).curved


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("classes", [2, 11])
def test_large_inputs_below_a_log_softmax(classes: int, dtype: torch.dtype) -> None:
    """The mix that does not feel the log-softmax sums to 0 without rounding, which such inputs
    would make visible.
    """
    for seed in range(6):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            layers = [
                nn.Linear(20, 64),
                nn.ReLU(),
                nn.Linear(64, 64),
                nn.ReLU(),
                nn.Linear(64, classes),
            ]
            model = nn.Sequential(*layers, nn.LogSoftmax(-1)).to(dtype)
            x, y = 300 * torch.randn(16, 20, dtype=dtype), torch.randint(classes, (16,))
        assert form(Problem(model, "cross_entropy", (x, y))).curved == ""
