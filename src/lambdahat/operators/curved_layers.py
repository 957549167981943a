"""Layers that are curved in their input, with second derivatives of few passes over activations.

PyTorch composes the second derivatives of layer norms, attention and smooth activations of many
operations, each of which keeps what it needs. Here each has a formula for the gradient and one for
where tangents of the gradient go. ``linearise`` puts them in the place of torch's functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import TransformType
from torch._functorch.autograd_function import VmapInfo
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.overrides import TorchFunctionMode

Gradients = tuple[Tensor | None, ...]
# keys of attention come in multiples of so many, for matrices with rows of another length have
# slower kernels
ALIGNED = {"cuda": 8}


class CurvedLayers(TorchFunctionMode):
    """The mode under which layers are built. While ``signals_alone``, gradients are differentiated
    in the signals and not in inputs and weights.
    """

    signals_alone = False


class BlockRule(torch.autograd.Function):
    """A function of a layer's tensors that nobody differentiates, with a rule for blocks.

    The vectors of a block are a dimension before the channels. So they fold into the batch where
    the weight is shared, and stack as channels where it is not, both without a copy.
    """

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is saved."""

    @classmethod
    def call(cls, *args: Any) -> Any:
        """What ``apply`` gives, at a tenth of its cost: it binds and flattens its arguments.

        A product of a small network has as many microseconds of arithmetic.
        """
        if not torch._C._are_functorch_transforms_active():
            return cls.forward(*args)
        top: Any = retrieve_current_functorch_interpreter()
        if top.key() != TransformType.Vmap:
            return cls.apply(*args)  # type: ignore[no-untyped-call]
        level, unwrap = top.level(), torch._C._functorch._unwrap_batched
        given = [unwrap(a, level) if isinstance(a, Tensor) else (a, None) for a in args]
        values, dims = zip(*given, strict=True)
        with top.lower():
            if all(dim is None for dim in dims):
                return cls.forward(*values)
            info = VmapInfo(top.batch_size(), top.randomness())
            found, places = cast(Any, cls).vmap(info, dims, *values)
        if isinstance(found, Tensor):
            return torch._C._functorch._add_batch_dim(found, places, level)
        return tuple(
            t if d is None else torch._C._functorch._add_batch_dim(t, d, level)
            for t, d in zip(found, places, strict=True)
        )

    @classmethod
    def vmap(cls, info: Any, dims: Sequence[Any], *args: Any) -> tuple[Any, Any]:
        return cls.one_by_one(info, dims, *args)

    @classmethod
    def one_by_one(cls, info: Any, dims: Sequence[Any], *args: Any) -> tuple[Any, Any]:
        """The rule for what does not stack: grouped convolutions, norms, attention."""
        given = list(zip(args, dims, strict=True))
        found = [
            cls.forward(*(t.select(d, i) if isinstance(d, int) else t for t, d in given))
            for i in range(info.batch_size)
        ]
        if isinstance(found[0], Tensor):
            return torch.stack(found), 0
        parts = tuple(None if p[0] is None else torch.stack(p) for p in zip(*found, strict=True))
        return parts, tuple(None if part is None else 0 for part in parts)


class _Smooth(torch.autograd.Function):
    """y = f(x) of each element, with the slope and the curvature of f in one pass each.

    PyTorch composes the second derivative of many.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, run: Any, pull: Any, bend: Any, layers: CurvedLayers
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.rules, ctx.layers = (pull, bend), layers
        return run(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Gradients:
        (x,), (pull, bend), none = ctx.saved_tensors, ctx.rules, (None,) * 4
        if not torch.is_grad_enabled():
            return pull(g, x), *none
        x = x.detach() if ctx.layers.signals_alone else x
        return cast(Any, _SmoothGradient.apply)(g, x, pull, bend), *none


class _SmoothGradient(torch.autograd.Function):
    """f'(x)·g. It keeps f''(x)·g in the place of g."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor, pull: Any, bend: Any) -> Tensor:
        bent = None
        if ctx.needs_input_grad[1]:  # powers of x may leave the range of float16
            wide = torch.promote_types(x.dtype, torch.float32)
            bent = bend(x.to(wide)).mul_(g).to(x.dtype)
        ctx.save_for_backward(x, bent)
        ctx.pull = pull
        return pull(g, x)  # type: ignore[no-any-return]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, a: Tensor) -> Gradients:
        x, bent = ctx.saved_tensors
        return ctx.pull(a, x), None if bent is None else a * bent, None, None


def _gelu_bend(x: Tensor) -> Tensor:
    """f'' = φ(x)(2 − x²) of f = xΦ(x)."""
    squares = x.square()
    return (squares / -2).exp_().mul_(squares.sub_(2).neg_()).mul_(1 / math.sqrt(2 * math.pi))


def _tanh_gelu_bend(x: Tensor) -> Tensor:
    """f'' = (1 − t²)(u' + ½xu'' − xtu'²) of f = ½x(1 + t), t = tanh u."""
    scale, cubic = math.sqrt(2 / math.pi), 0.044715
    squares = x.square()
    t = (x * scale * (1 + cubic * squares)).tanh_()
    slope = scale * (1 + 3 * cubic * squares)
    inner = slope + 3 * cubic * scale * squares - x * t * slope.square()
    return t.square_().neg_().add_(1).mul_(inner)


def _silu_bend(x: Tensor) -> Tensor:
    """f'' = s(1 − s)(2 + x(1 − 2s)) of f = xs, s = σ(x)."""
    s = x.sigmoid()
    return (1 - s).mul_(s).mul_(2 + x * (1 - 2 * s))


def _gelu(layers: CurvedLayers, input: Tensor, approximate: str = "none") -> Tensor | None:
    if not input.is_floating_point() or approximate not in ("none", "tanh"):
        return None
    rules = (
        lambda x: torch.ops.aten.gelu(x, approximate=approximate),
        lambda g, x: torch.ops.aten.gelu_backward(g, x, approximate=approximate),
        _gelu_bend if approximate == "none" else _tanh_gelu_bend,
    )
    return cast(Tensor, cast(Any, _Smooth.apply)(input, *rules, layers))


def _silu(layers: CurvedLayers, input: Tensor, inplace: bool = False) -> Tensor | None:
    if inplace or not input.is_floating_point():
        return None
    rules = torch.ops.aten.silu, torch.ops.aten.silu_backward, _silu_bend
    return cast(Tensor, cast(Any, _Smooth.apply)(input, *rules, layers))


def _layer_norm(
    layers: CurvedLayers,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor | None:
    if weight is None and bias is not None:  # together PyTorch differentiates them once
        return F.layer_norm(input, normalized_shape, None, None, eps) + bias
    given = input, weight, bias
    if any(part is None or part.dtype != input.dtype for part in given) or input.ndim < 2:
        return None
    plain = len(normalized_shape) == 1 and not torch.is_autocast_enabled(input.device.type)
    if not plain or not input.numel():
        return None
    return cast(Tensor, cast(Any, _LayerNorm.apply)(*given, eps, layers))


class _LayerNorm(torch.autograd.Function):
    """y = w∘n + b with n = (x − μ)/σ along the last dimension.

    ∂n/∂x = J = (I − 11ᵀ/N − nnᵀ/N)/σ is symmetric, and PyTorch has a kernel for it; J, its tangent
    and those of w and b are all that the derivatives consist of.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, layers: CurvedLayers
    ) -> Tensor:
        y, *moments = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
        ctx.save_for_backward(x, weight, *moments)
        ctx.eps, ctx.layers = eps, layers
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Gradients:
        x, weight, *moments = ctx.saved_tensors
        mask, none = ctx.needs_input_grad[:3], (None, None)
        if not torch.is_grad_enabled():
            return (*_NormBackward.call(g, x, weight, *moments, mask), *none)
        if ctx.layers.signals_alone:
            x, weight = x.detach(), weight.detach()
        found = cast(Any, _NormGradient.apply)(g, x, weight, *moments, mask, ctx.eps)
        return (*found, *none)


class _NormGradient(torch.autograd.Function):
    """(∂x, ∂w, ∂b) = (J(g∘w), Σ g∘n, Σ g) as a function of the signal g, the input and w."""

    @staticmethod
    def forward(
        ctx: Any,
        g: Tensor,
        x: Tensor,
        weight: Tensor,
        mean: Tensor,
        scale: Tensor,
        mask: Sequence[bool],
        eps: float,
    ) -> Gradients:
        ctx.save_for_backward(g, x, weight, mean, scale)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        return _NormBackward.forward(g, x, weight, mean, scale, mask)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, a: Tensor | None, b: Tensor | None, c: Tensor | None) -> Gradients:
        if a is None and b is None and c is None:
            return (None,) * 7
        needs = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        return (*_NormSecond.call(*ctx.saved_tensors, a, b, c, ctx.eps, needs), *(None,) * 4)


class _NormBackward(BlockRule):
    """(J(g∘w), Σ g∘n, Σ g); those that ``mask`` asks for."""

    @staticmethod
    def forward(
        g: Tensor, x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor, mask: Sequence[bool]
    ) -> Gradients:
        backward = torch.ops.aten.native_layer_norm_backward
        return tuple(backward(g, x, weight.shape, mean, scale, weight, weight, list(mask)))


class _NormSecond(BlockRule):
    """Where tangents a, b, c of (∂x, ∂w, ∂b) go: to the signal, the input and the weight.

    With u = Ja the signal's is u∘w + n∘b + c and the weight's Σ u∘g. From aᵀJv of v = g∘w with dn =
    J dx and d(1/σ) = −nᵀdx/Nσ² the input's is J(g∘b − (nᵀv/σN)a − (nᵀa/σN)v) − (uᵀv/σN)n.
    """

    @staticmethod
    def forward(
        g: Tensor,
        x: Tensor,
        weight: Tensor,
        mean: Tensor,
        scale: Tensor,
        a: Tensor | None,
        b: Tensor | None,
        c: Tensor | None,
        eps: float,
        needs: bool,
    ) -> Gradients:
        shape, count = weight.shape, len(weight)
        b = torch.zeros_like(weight) if b is None else b

        def pull(z: Tensor) -> Tensor:
            given = z, x, shape, mean, scale, None, None, [True, False, False]
            return torch.ops.aten.native_layer_norm_backward(*given)[0]  # type: ignore[no-any-return]

        signal = F.layer_norm(x, shape, b, c, eps)
        if a is None:
            return signal, pull(g * b) if needs else None, None
        u = pull(a)
        signal.addcmul_(u, weight)
        if not needs:
            return signal, None, None
        # on a GPU the scale of half precision is in float32
        n, factor = F.layer_norm(x, shape, None, None, eps), (scale / -count).to(x.dtype)
        along = (n * a).sum(-1, keepdim=True)
        moved = torch.addcmul(b, factor * along, weight).mul_(g)
        moved.addcmul_(a, factor * (n * g).matmul(weight).unsqueeze(-1))
        u.mul_(g)
        entered = pull(moved).addcmul_(n, factor * u.matmul(weight).unsqueeze(-1))
        return signal, entered, u.flatten(0, -2).sum(0)


def _attention(
    layers: CurvedLayers,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Attention over three-dimensional tensors, heads with the batch; None for rarer kinds."""
    three, lead = (query, key, value), query.shape[:-2]
    if any(t.shape[:-2] != lead or t.dtype != query.dtype or not t.numel() for t in three):
        return None
    rare = dropout_p > 0 or enable_gqa or (is_causal and attn_mask is not None)
    masked = attn_mask is not None and attn_mask.requires_grad
    if rare or masked or query.ndim < 3 or torch.is_autocast_enabled(query.device.type):
        return None
    if is_causal:
        sizes = query.shape[-2], key.shape[-2]
        attn_mask = torch.ones(sizes, dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        never = torch.zeros(attn_mask.shape, dtype=query.dtype, device=query.device)
        attn_mask = never.masked_fill_(~attn_mask, -math.inf)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    length = key.shape[-2]
    if spare := -length % ALIGNED.get(query.device.type, 1):
        key, value = (F.pad(t, (0, 0, 0, spare)) for t in (key, value))
        seen = query.new_zeros(length) if attn_mask is None else attn_mask
        attn_mask = F.pad(seen.expand(*seen.shape[:-1], length), (0, spare), value=-math.inf)
    flat = (t.reshape(-1, *t.shape[-2:]).contiguous() for t in (query, key, value))
    found = cast(Any, _Attention.apply)(*flat, attn_mask, lead, scale, layers)
    return cast(Tensor, found.view(*lead, *found.shape[-2:]))


class _Attention(torch.autograd.Function):
    """o = Pv with P = softmax(s·qkᵀ), whose second derivative keeps no other matrix of P's size."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        lead: Sequence[int],
        scale: float,
        layers: CurvedLayers,
    ) -> Tensor:
        scores = torch.bmm(q, k.mT).mul_(scale)
        if mask is None:
            weights = scores.softmax(-1)
        else:
            scores.view(*lead, *scores.shape[1:]).add_(mask)
            weights = torch.ops.aten._safe_softmax(scores, -1)  # a row may be masked as a whole
        ctx.save_for_backward(q, k, v, weights)
        ctx.scale, ctx.layers = scale, layers
        return torch.bmm(weights, v)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Gradients:
        q, k, v, weights = ctx.saved_tensors
        none = (None,) * 4
        if not torch.is_grad_enabled():
            return (*_AttentionBackward.call(g, q, k, v, weights, ctx.scale), *none)
        if ctx.layers.signals_alone:
            q, k, v = q.detach(), k.detach(), v.detach()
        found = cast(Any, _AttentionGradient.apply)(g.contiguous(), q, k, v, weights, ctx.scale)
        return (*found, *none)


class _AttentionGradient(torch.autograd.Function):
    """(∂q, ∂k, ∂v) as a function of the signal, q, k and v."""

    @staticmethod
    def forward(
        ctx: Any, g: Tensor, q: Tensor, k: Tensor, v: Tensor, weights: Tensor, scale: float
    ) -> Gradients:
        ctx.save_for_backward(g, q, k, v, weights)
        ctx.scale = scale
        return _AttentionBackward.forward(g, q, k, v, weights, scale)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, a: Tensor, b: Tensor, c: Tensor) -> Gradients:
        needs = any(ctx.needs_input_grad[1:4])
        return (*_AttentionSecond.call(*ctx.saved_tensors, a, b, c, ctx.scale, needs), None, None)


class _AttentionBackward(BlockRule):
    """(s·Sk, s·Sᵀq, Pᵀg) with S = P∘(gvᵀ − rows' means), the gradient of the scores."""

    @staticmethod
    def forward(
        g: Tensor, q: Tensor, k: Tensor, v: Tensor, weights: Tensor, scale: float
    ) -> Gradients:
        slopes = _softmax_pull(torch.bmm(g, v.mT), weights)
        of_q, of_k = torch.bmm(slopes, k), torch.bmm(slopes.mT, q)
        return of_q.mul_(scale), of_k.mul_(scale), torch.bmm(weights.mT, g)


def _softmax_pull(slopes: Tensor, weights: Tensor) -> Tensor:
    """P∘(slopes − Σ_j P∘slopes), which is the tangent of a softmax as well."""
    return torch._softmax_backward_data(slopes, weights, -1, weights.dtype)


class _AttentionSecond(BlockRule):
    """Where tangents a, b, c of (∂q, ∂k, ∂v) go: to the signal, q, k and v.

    E = s(akᵀ + qbᵀ) is the tangent of the scores, C = E − Σ_j P∘E, and P∘C that of P, so that the
    signal's is (P∘C)v + Pc. With T = gvᵀ − Σ_j P∘gvᵀ the gradient of the scores is S = P∘T, and
    what comes back to them softmax's pullback of C∘T + gcᵀ.
    """

    @staticmethod
    def forward(
        g: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weights: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        scale: float,
        needs: bool,
    ) -> Gradients:
        a, b = a * scale, b * scale
        moved = torch.bmm(a, k.mT).baddbmm_(q, b.mT)
        if not needs:
            tangent = _softmax_pull(moved, weights)
            return torch.bmm(tangent, v).baddbmm_(weights, c), None, None, None
        # sums over the rows of P∘E and of P∘gvᵀ, by products that read P once
        moved -= (a * torch.bmm(weights, k) + q * torch.bmm(weights, b)).sum(-1, keepdim=True)
        tangent = moved * weights
        signal = torch.bmm(tangent, v).baddbmm_(weights, c)
        of_v = torch.bmm(tangent.mT, g)
        del tangent
        slopes = torch.bmm(g, v.mT)
        slopes -= (g * torch.bmm(weights, v)).sum(-1, keepdim=True)
        moved.mul_(slopes).baddbmm_(g, c.mT)
        slopes.mul_(weights)
        of_q, of_k = torch.bmm(slopes, b), torch.bmm(slopes.mT, a)
        del slopes
        moved = _softmax_pull(moved, weights)
        of_q.baddbmm_(moved, k, alpha=scale)
        of_k.baddbmm_(moved.mT, q, alpha=scale)
        return signal, of_q, of_k, of_v


def _multi_head_attention(
    layers: CurvedLayers,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    width: int,
    heads: int,
    weight: Tensor | None,
    bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_weight: Tensor,
    out_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    **others: Any,
) -> tuple[Tensor, None] | None:
    """Self-attention of ``nn.MultiheadAttention`` by the layers it consists of.

    Inside of a function no mode sees its calls, so it is written out; None for rarer kinds.
    """
    rare = bias_k is not None or bias_v is not None or add_zero_attn or need_weights
    rare = rare or key_padding_mask is not None or (training and dropout_p > 0)
    own = query is key and key is value and query.ndim == 3 and weight is not None
    others.pop("average_attn_weights", None)
    separate = any(value is not None and value is not False for value in others.values())
    if rare or separate or not own or (is_causal and attn_mask is None):
        return None
    length, size, _ = query.shape
    if is_causal:  # which says what the mask is
        attn_mask = None
    elif attn_mask is not None:
        if attn_mask.dtype == torch.bool:  # of pairs to leave out, where the other's are to keep
            attn_mask = ~attn_mask
        if attn_mask.ndim == 3:
            attn_mask = attn_mask.reshape(size, heads, length, length)
    with layers:
        joint = F.linear(query.transpose(0, 1).contiguous(), cast(Tensor, weight), bias)
        q, k, v = joint.view(size, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal)
        found = F.linear(found.transpose(1, 2).flatten(2), out_weight, out_bias)
    return found.transpose(0, 1), None


def _cross_entropy(
    layers: CurvedLayers,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Of class indices, by ``_LogSoftmax``; None for the other kinds."""
    old = size_average is not None or reduce is not None
    rare = old or label_smoothing > 0 or target.is_floating_point() or input.ndim < 2
    if rare or not input.numel() or torch.is_autocast_enabled(input.device.type):
        return None
    logs = cast(Any, _LogSoftmax.apply)(input, 1 - input.ndim)
    options: dict[str, Any] = {"ignore_index": ignore_index, "reduction": reduction}
    return F.nll_loss(logs, target, weight, **options)


class _LogSoftmax(torch.autograd.Function):
    """y = x − log Σ e^x. PyTorch is slow where the classes are not the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        y = x.log_softmax(-1) if dim == -1 else x - x.logsumexp(dim, keepdim=True)
        y = y.contiguous()  # as the kernels of losses want it
        ctx.save_for_backward(y)
        ctx.dim = dim
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return cast(Any, _LogSoftmaxGradient.apply)(g, y, ctx.dim), None
        return g - y.exp().mul(g.sum(ctx.dim, keepdim=True)), None


class _LogSoftmaxGradient(torch.autograd.Function):
    """g − p Σg with p = e^y, as a function of the signal g and y."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, y: Tensor, dim: int) -> Tensor:
        total = g.sum(dim, keepdim=True)
        ctx.save_for_backward(y, total)
        ctx.dim = dim
        return y.exp().mul_(total).neg_().add_(g)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, a: Tensor) -> tuple[Tensor, Tensor, None]:
        y, total = ctx.saved_tensors
        weighted = a * y.exp()
        return a - weighted.sum(ctx.dim, keepdim=True), weighted * -total, None


CURVE: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    F.multi_head_attention_forward: _multi_head_attention,
    F.gelu: _gelu,
    F.silu: _silu,
    F.layer_norm: _layer_norm,
    F.scaled_dot_product_attention: _attention,
}
