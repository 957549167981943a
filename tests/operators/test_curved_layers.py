"""Products through layers that are curved in their input, beside double backward in float64, and
what they keep.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import lambdahat as lh
from lambdahat.operators import curved_layers, linearise
from lambdahat.problem.memory import LiveBytes

WIDTH, LENGTH, SAMPLES, VECTORS = 12, 7, 5, 3


class Heads(nn.Module):
    """Self-attention of three heads by torch's function, with its options."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.joint, self.options = nn.Linear(WIDTH, 3 * WIDTH), options

    def forward(self, z: Tensor) -> Tensor:
        q, k, v = self.joint(z).view(*z.shape[:2], 3, 3, WIDTH // 3).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, **self.options)
        return found.transpose(1, 2).flatten(2)


class MultiHead(nn.Module):
    """torch's own layer of self-attention, batches first or second."""

    def __init__(self, batch_first: bool = True, **options: Any) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(WIDTH, 3, batch_first=batch_first)
        self.first, self.options = batch_first, options

    def forward(self, z: Tensor) -> Tensor:
        z = z if self.first else z.transpose(0, 1)
        found: Tensor = self.layer(z, z, z, need_weights=False, **self.options)[0]
        return found if self.first else found.transpose(0, 1)


class ByFunction(nn.MultiheadAttention):
    """torch's function with masks of truth values, which its layer turns into scores."""

    def __init__(self, *masks: int) -> None:
        super().__init__(WIDTH, 3)
        left_out = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        self.mask = left_out.expand(*masks, LENGTH, LENGTH)

    def forward(self, z: Tensor) -> Tensor:  # type: ignore[override]
        z, out = z.transpose(0, 1), self.out_proj
        own = (self.in_proj_weight, self.in_proj_bias, None, None, False, 0.0)
        options: dict[str, Any] = {"need_weights": False, "attn_mask": self.mask}
        found = F.multi_head_attention_forward(
            z, z, z, WIDTH, 3, *own, out.weight, out.bias, training=False, **options
        )[0]
        return found.transpose(0, 1)


class OtherSizes(nn.MultiheadAttention):
    """torch's layer with projections of their own for keys and values of another width."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 3, kdim=WIDTH - 1, vdim=WIDTH - 2, batch_first=True)

    def forward(self, z: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(z, z[..., 1:], z[..., 2:], need_weights=False)[0]


def mask() -> Tensor:
    """Some pairs, of which one row has none at all."""
    kept = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) > 0.3
    kept[2] = False
    return kept


def scores(*shape: int) -> Tensor:
    rng = torch.Generator().manual_seed(1)
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "GELU": lambda: nn.GELU(),
    "GELU by tanh": lambda: nn.GELU("tanh"),
    "SiLU": lambda: nn.SiLU(),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "layer norm without weights": lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
    "layer norm of two dimensions": lambda: nn.LayerNorm((LENGTH, WIDTH)),
    "attention": lambda: Heads(),
    "attention to the past": lambda: Heads(is_causal=True, scale=0.7),
    "attention where allowed": lambda: Heads(attn_mask=mask()),
    "attention with scores": lambda: Heads(attn_mask=scores(SAMPLES, 1, LENGTH, LENGTH)),
    "multi-head": lambda: MultiHead(),
    "multi-head, batches second": lambda: MultiHead(False, attn_mask=scores(LENGTH, LENGTH)),
    "multi-head to the past": lambda: MultiHead(
        is_causal=True, attn_mask=torch.ones(LENGTH, LENGTH).triu(1).bool()
    ),
    "multi-head, a mask for each": lambda: MultiHead(
        attn_mask=scores(SAMPLES * 3, LENGTH, LENGTH) > 1
    ),
    "multi-head by its function": lambda: ByFunction(),
    "multi-head by its function, a mask for each": lambda: ByFunction(SAMPLES * 3),
    "multi-head with other sizes": lambda: OtherSizes(),
    "multi-head without padding": lambda: MultiHead(
        key_padding_mask=torch.zeros(SAMPLES, LENGTH, dtype=torch.bool)
    ),
}


class Net(nn.Module):
    """A layer between others, with a residual connection; one class for each position."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.enter, self.layer = nn.Linear(4, WIDTH), layer
        self.leave = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.enter(x)
        out: Tensor = self.leave(torch.tanh(z + self.layer(z)))
        return out.transpose(1, 2)


def made(layer: str, copies: int = 1, **loss: Any) -> lh.Problem:
    torch.manual_seed(0)
    net = Net(LAYERS[layer]()).double()
    for parameter in net.parameters():
        nn.init.normal_(parameter, 0.2, 0.4)
    x, y = torch.randn(SAMPLES, LENGTH, 4).double(), torch.randint(3, (SAMPLES, LENGTH))
    y[0, :2] = -100
    data = x.repeat(copies, 1, 1), y.repeat(copies, 1)
    return lh.Problem(net, nn.CrossEntropyLoss(**loss), [data])


def apart(problem: lh.Problem) -> tuple[Any, list[Tensor], Tensor, Tensor]:
    assert problem.model is not None
    batch = problem.batches.first()
    x, y = batch.data
    return problem.model, list(problem.model.parameters()), x, y


def hessian_columns(problem: lh.Problem, vectors: Tensor) -> Tensor:
    """By torch's double backward."""
    model, parameters, x, y = apart(problem)
    loss = problem.loss_function
    weight, smoothing = getattr(loss, "weight", None), getattr(loss, "smoothing", 0.0)
    with sdpa_kernel(SDPBackend.MATH):
        value = F.cross_entropy(model(x), y, weight=weight, label_smoothing=smoothing)
        slopes = torch.autograd.grad(value, parameters, create_graph=True)
        flat = torch.cat([slope.reshape(-1) for slope in slopes])
        columns = [torch.autograd.grad(flat, parameters, v, retain_graph=True) for v in vectors.T]
    return torch.stack([torch.cat([g.reshape(-1) for g in one]) for one in columns], dim=1)


def gauss_newton_column(problem: lh.Problem, v: Tensor) -> Tensor:
    """By torch's dual numbers."""
    model, parameters, x, y = apart(problem)
    names = [name for name, _ in model.named_parameters()]
    points = tuple(parameter.detach() for parameter in parameters)
    pieces = v.split([point.numel() for point in points])

    def output(*given: Tensor) -> Tensor:
        found: Tensor = functional_call(model, dict(zip(names, given, strict=True)), (x,))
        return found

    with sdpa_kernel(SDPBackend.MATH):
        tangents = tuple(piece.view_as(p) for piece, p in zip(pieces, points, strict=True))
        z, u = jvp(output, points, tangents)
        p, counted = z.softmax(1), (y != -100).unsqueeze(1)
        curved = counted * p * (u - (p * u).sum(1, keepdim=True)) / counted.sum()
        back = vjp(output, *points)[1](curved)
    return torch.cat([part.reshape(-1) for part in back])


@pytest.mark.parametrize("layer", LAYERS)
def test_products_agree_with_double_backward(layer):
    problem = made(layer)
    vectors = scores(problem.num_parameters, VECTORS)
    operator, truth = lh.hessian(problem), hessian_columns(problem, vectors)
    assert operator.mode == "reverse"
    torch.testing.assert_close(operator @ vectors[:, 0], truth[:, 0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(operator @ vectors, truth, rtol=1e-10, atol=1e-12)
    assert operator.prepare().vmaps, operator.prepare().why_alone
    gauss_newton, column = lh.ggn(problem), gauss_newton_column(problem, vectors[:, 0])
    torch.testing.assert_close(gauss_newton @ vectors[:, 0], column, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close((gauss_newton @ vectors)[:, 0], column, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("layer", [name for name in LAYERS if "attention" in name])
def test_attention_to_keys_in_multiples_of_eight(layer, monkeypatch):
    """As on a GPU; keys that are there for the sake of their number change nothing."""
    sizes, plain = list[int](), torch.bmm
    monkeypatch.setattr(curved_layers, "ALIGNED", {"cpu": 8})
    monkeypatch.setattr(torch, "bmm", lambda a, b: sizes.append(b.shape[-1]) or plain(a, b))
    problem = made(layer)
    vectors = scores(problem.num_parameters, VECTORS)
    found = lh.hessian(problem) @ vectors
    assert 8 in sizes
    assert LENGTH not in sizes
    monkeypatch.undo()
    truth = hessian_columns(problem, vectors)
    torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-12)


def test_layer_norms_with_a_bias_alone():
    """PyTorch's own second derivative of them fails, or is wrong where the input is constant."""
    x, y = torch.randn(5, WIDTH).double(), torch.randn(5, WIDTH).double()
    weights = {"a": torch.eye(WIDTH).double(), "b": torch.randn(WIDTH).double()}

    def together(p: Any, z: Tensor) -> Tensor:
        return F.layer_norm(F.layer_norm(z, (WIDTH,), bias=p["b"]) @ p["a"], (WIDTH,), None, p["b"])

    def apart_from_it(p: Any, z: Tensor) -> Tensor:
        return F.layer_norm((F.layer_norm(z, (WIDTH,)) + p["b"]) @ p["a"], (WIDTH,)) + p["b"]

    made = (
        lh.Problem.from_function(function, weights, [(x, y)], loss="mse")
        for function in (together, apart_from_it)
    )
    found, truth = map(lh.hessian, made)
    torch.testing.assert_close(found.dense(), truth.dense(), rtol=1e-10, atol=1e-12)
    assert found.mode == "reverse"


def test_logits_with_the_classes_first_in_another_order():
    """As those of convolutions with their channels last."""
    x, y = torch.randn(5, 3, 4, 4).double(), torch.randint(3, (5, 4, 4))
    layers = nn.Conv2d(3, 4, 1), nn.Tanh(), nn.Conv2d(4, 3, 1)
    problem = lh.Problem(nn.Sequential(*layers).double(), nn.CrossEntropyLoss(), [(x, y)])
    other = problem.on([(x.contiguous(memory_format=torch.channels_last), y)])
    operator, truth = lh.hessian(other), lh.hessian(problem)
    torch.testing.assert_close(operator.dense(), truth.dense(), rtol=1e-10, atol=1e-12)
    assert operator.mode == "reverse"


@pytest.mark.parametrize(
    "loss", [{"weight": torch.tensor([0.5, 1.0, 2.0]).double()}, {"label_smoothing": 0.1}]
)
def test_cross_entropies_of_other_kinds(loss):
    problem = made("GELU", **loss)
    vectors = scores(problem.num_parameters, VECTORS)
    truth = hessian_columns(problem, vectors)
    torch.testing.assert_close(lh.hessian(problem) @ vectors, truth, rtol=1e-10, atol=1e-12)


def test_what_is_restricted_to_some_parameters():
    problem = made("layer norm")
    whole = hessian_columns(problem, torch.eye(problem.num_parameters).double())
    for names in ("enter.*", "layer.*", "layer.bias", "leave.*"):
        restricted = problem.restrict(names)
        where = problem.space.indices(restricted.space.names)
        found = lh.hessian(restricted).dense()
        torch.testing.assert_close(found, whole[where][:, where], rtol=1e-10, atol=1e-12)


class _Passes(TorchDispatchMode):
    """Counts the operations of a product that run over tensors as large as an activation."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.count = least, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, tuple) else out
        shares = [part.alias_info for part in func._schema.returns]
        view = any(share is not None and not share.is_write for share in shares)
        same = view or func._schema.name in ("aten::_unsafe_view", "aten::empty_like")
        self.count += isinstance(first, Tensor) and first.numel() >= self.least and not same
        return out


@pytest.mark.parametrize(
    ("layer", "size"),
    [
        ("GELU", LENGTH * WIDTH),
        ("layer norm", LENGTH * WIDTH),
        ("attention", 3 * LENGTH**2),
        ("multi-head", 3 * LENGTH**2),
    ],
)
def test_a_product_takes_fewer_passes_than_torch(layer, size, monkeypatch):
    """Over activations, and over the weights of all pairs."""

    def cost() -> tuple[int, int]:
        problem = made(layer, copies=8)
        operator, v = lh.hessian(problem), torch.ones(problem.num_parameters).double()
        operator @ v
        with _Passes(8 * SAMPLES * size) as seen:
            operator @ v
        return seen.count, operator.graph_bytes

    ours = cost()
    monkeypatch.setattr(linearise, "CURVE", {})
    passes, kept = cost()
    assert ours[0] <= 0.85 * passes
    if size == 3 * LENGTH**2:
        # of the weights of all pairs, their gradients and those of the scores only the first is
        # kept
        assert ours[1] < kept - 1.5 * 8 * 8 * SAMPLES * size


def test_products_hold_no_gradient_of_every_input():
    """The part of an input's gradient that a tangent of the weight gives waits as its factors."""

    def peak(depth: int) -> float:
        torch.manual_seed(0)
        layers = [part for _ in range(depth) for part in (nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())]
        net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 12 * 12, 3))
        data = torch.randn(16, 4, 12, 12), torch.randint(3, (16,))
        problem = lh.Problem(net, "cross_entropy", data)
        operator, v = lh.hessian(problem), torch.ones(problem.num_parameters)
        operator @ v
        with LiveBytes() as seen:
            operator @ v
        return float(seen.peak)

    activation = 4 * 16 * 4 * 12 * 12
    assert peak(12) - peak(4) < activation


@pytest.mark.parametrize("layer", ["GELU", "layer norm", "attention", "multi-head"])
def test_a_dropped_operator_leaves_no_graph(layer):
    problem = made(layer)
    operator = lh.hessian(problem)
    operator @ torch.ones(problem.num_parameters).double()
    (product,) = operator.prepare().cache
    nodes = list(linearise.nodes_below([product.__closure__[0].cell_contents._scalar.grad_fn]))
    dead = [weakref.ref(node) for node in nodes if "_Gradient" in type(node).__name__]
    assert dead
    del operator, product, nodes
    gc.collect()
    assert not [ref for ref in dead if ref() is not None]


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_of_large_numbers_in_half_precision(approximate):
    """Their powers leave the range of float16."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.GELU(approximate), nn.Linear(8, 3)).half()
    x, y = (60 * torch.randn(10, 4)).half(), torch.randint(3, (10,))
    exact = lh.hessian(lh.Problem(copy.deepcopy(net).double(), "cross_entropy", (x.double(), y)))
    operator = lh.hessian(lh.Problem(net, "cross_entropy", (x, y)))
    v = torch.randn(operator.dim)
    assert (operator @ v - exact @ v).norm() < 0.01 * (exact @ v).norm()


class NewGELUActivation(nn.Module):
    """As in transformers, up to the factor."""

    def __init__(self, factor: float = 0.044715) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, z: Tensor) -> Tensor:
        inner = (2 / torch.pi) ** 0.5 * (z + self.factor * torch.pow(z, 3.0))
        return 0.5 * z * (1.0 + torch.tanh(inner))


@pytest.mark.parametrize("factor", [0.044715, 0.05])
def test_the_activation_of_gpt2_is_one_operation_where_it_is_gelu(factor, monkeypatch):
    monkeypatch.setitem(LAYERS, "theirs", lambda: NewGELUActivation(factor))
    problem, same = made("theirs"), made("GELU by tanh")
    vectors = scores(problem.num_parameters, VECTORS)
    operator, truth = lh.hessian(problem), hessian_columns(problem, vectors)
    torch.testing.assert_close(operator @ vectors, truth, rtol=1e-10, atol=1e-12)
    assert (operator.graph_bytes == lh.hessian(same).graph_bytes) == (factor == 0.044715)
    assert isinstance(problem.source, nn.Module)
    assert not any("forward" in vars(layer) for layer in problem.source.modules())
