"""Products of one batch with a vector: what is kept between products, and how each mode makes them.

A *product* is built once for a batch at fixed parameters and then called with tangents, one tensor
per parameter, or with a block of them along a leading dimension. Building runs the model; calling a
kept product is backward passes only.

Convolutions whose second derivative runs at the speed of the first.

PyTorch differentiates the gradient of a convolution by convolutions of odd shapes (batch and
channels exchanged, images as kernels), which libraries serve badly. Here a convolution y = x ∗ w is
given by its three kernels, forward, gradient of the input and gradient of the weight, and so is
every derivative of them; a Hessian–vector product then costs six such kernels a layer against the
gradient's three.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge
from torch.func import grad, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lambdahat._core.check import require
from lambdahat._core.rng import generator
from lambdahat.problem import Problem
from lambdahat.problem.batches import Batch, as_tree, rows_of
from lambdahat.problem.checkpointing import recomputing

Geometry = tuple[list[int], list[int], list[int], int]  # stride, padding, dilation, groups
DIMENSIONS: dict[Callable[..., Tensor], int] = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}


class PlainConvolutions(TorchFunctionMode):
    """While active, convolutions of the model are built from ``_Convolution``."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in DIMENSIONS:
            prepared = _prepare(DIMENSIONS[func], *args, **kwargs)
            if prepared is not None:
                return _Convolution.apply(*prepared)  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)


def _prepare(
    dims: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None, Geometry] | None:
    """The arguments in one form; None for those that torch has to take itself (padding by name,
    no batch dimension).
    """
    if isinstance(padding, str) or x.ndim != dims + 2:
        return None
    stride, padding, dilation = (_tuple(value, dims) for value in (stride, padding, dilation))
    return x, weight, bias, (stride, padding, dilation, groups)


def _tuple(value: Any, dims: int) -> list[int]:
    values = [value] * dims if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    stride, padding, dilation, groups = geometry
    zeros = [0] * len(stride)
    options = stride, padding, dilation, False, zeros, groups
    return torch.ops.aten.convolution(x, weight, bias, *options)  # type: ignore[no-any-return]


def _backward(
    g: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, mask: list[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of input, weight and bias, those that ``mask`` asks for."""
    stride, padding, dilation, groups = geometry
    zeros, sizes = [0] * len(stride), [weight.shape[0]]
    return torch.ops.aten.convolution_backward(  # type: ignore[no-any-return]
        g, x, weight, sizes, stride, padding, dilation, False, zeros, groups, mask
    )


class _Convolution(torch.autograd.Function):
    """y = x ∗ w + b."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry = geometry
        return _forward(x, weight, bias, geometry)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        mask = list(ctx.needs_input_grad[:3])
        if not torch.is_grad_enabled():
            return (*_backward(g, x, weight, ctx.geometry, mask), None)
        return (*_Gradient.apply(g, x, weight, ctx.geometry, mask), None)  # type: ignore[no-untyped-call]


class _Gradient(torch.autograd.Function):
    """(∂x, ∂w, ∂b) of a convolution as a function of the signal g, the input and the weight."""

    @staticmethod
    def forward(
        ctx: Any, g: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, mask: list[bool]
    ) -> tuple[Tensor | None, ...]:
        ctx.save_for_backward(g, x, weight)
        ctx.geometry = geometry
        ctx.set_materialize_grads(False)
        return _backward(g, x, weight, geometry, mask)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, a: Tensor | None, b: Tensor | None, c: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """For tangents a, b, c of the three gradients: ∂g = a∗w + x∗b + c, ∂x and ∂w from g with
        b and with a.
        """
        g, x, weight = ctx.saved_tensors
        signal = entered = own = None
        if ctx.needs_input_grad[0]:
            signal = _signal(g, a, b, c, x, weight, ctx.geometry)
        if ctx.needs_input_grad[1] and b is not None:
            entered = _backward(g, x, b, ctx.geometry, [True, False, False])[0]
        if ctx.needs_input_grad[2] and a is not None:
            own = _backward(g, a, weight, ctx.geometry, [False, True, False])[1]
        return signal, entered, own, None, None


def _signal(
    g: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    c: Tensor | None,
    x: Tensor,
    weight: Tensor,
    geometry: Geometry,
) -> Tensor:
    """a∗w + x∗b + c, what is there of it."""
    parts = [] if a is None else [_forward(a, weight, None, geometry)]
    parts += [] if b is None else [_forward(x, b, None, geometry)]
    parts += [] if c is None else [c.reshape(1, -1, *[1] * (g.ndim - 2)).expand_as(g)]
    return torch.zeros_like(g) if not parts else sum(parts[1:], parts[0])


Tangents = Sequence[Tensor]
Product = Callable[..., list[Tensor]]  # (tangents, batched=False) -> one tensor per parameter
Builder = Callable[[Problem, dict[str, Tensor], Batch], Product]
OutputMap = Callable[[list[Tensor]], list[Tensor]]


class _Flag:
    """A global setting of torch that has one value while any thread needs it, and its own again
    after the last.
    """

    def __init__(self, read: Callable[[], bool], write: Callable[[bool], Any], value: bool) -> None:
        self._read, self._write, self._value = read, write, value
        self._lock, self._users, self._before = threading.Lock(), 0, value

    @contextmanager
    def held(self) -> Iterator[None]:
        with self._lock:
            if not self._users:
                self._before = self._read()
                self._write(self._value)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._write(self._before)


_PLAIN_ATTENTION = _Flag(
    torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False
)
_SEARCH = _Flag(
    lambda: bool(torch.backends.cudnn.benchmark),
    lambda value: setattr(torch.backends.cudnn, "benchmark", value),
    True,
)


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """What the passes of an operator run under: gradients on, and kernels that have second
    derivatives.

    Attention goes by the plain kernel: the fused ones have no second derivative, no forward mode
    and no batching rule.
    """
    with _PLAIN_ATTENTION.held(), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        yield


@contextmanager
def repeated() -> Iterator[None]:
    """The same for passes whose shapes come back at every product, so that cuDNN's search for fast
    kernels pays.

    A check runs once, over a few samples, and must not search: that takes longer than the check.
    """
    with _SEARCH.held(), twice_differentiable():
        yield


def nodes_below(roots: Sequence[Any]) -> Iterator[Any]:
    """Some nodes of an autograd graph and every node below them, once."""
    seen: set[Any] = {None}
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        stack.extend(child for child, _ in node.next_functions)


def kind_of(node: Any) -> str:
    """What a node does, by its name; a custom function may call itself anything, so that its
    name says nothing.
    """
    return _kind(type(node))  # type: ignore[arg-type]  # a class is hashable


@lru_cache(1024)
def _kind(node: type[Any]) -> str:
    if issubclass(node, BackwardCFunction):
        return f"the custom function {node.__name__.removesuffix('Backward')}"
    return re.sub(r"Backward\d+$", "", node.__name__)


def require_graph(tensors: Sequence[Tensor]) -> None:
    """Raise where a node of the graph has no derivative: autograd would take it for a constant
    and say nothing.
    """
    if any(
        type(node).__name__ in ("Error", "NotImplemented")
        for node in nodes_below([tensor.grad_fn for tensor in tensors])
    ):
        raise NotImplementedError("an operation of the model can be differentiated only once")


def saved_bytes(run: Callable[[], Any]) -> tuple[Any, int]:
    """What ``run`` gives and the bytes its autograd graph saved, each storage once."""
    seen: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        # with its own node it would be a cycle that no collector sees; unpacking puts it back
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = run()
    return result, sum(seen.values())


def leaves_of(problem: Problem, theta: Tensor) -> dict[str, Tensor]:
    """The parameters at θ as leaves of new autograd graphs."""
    values = {name: tensor.detach() for name, tensor in problem.named(theta).items()}
    leaves = {name: torch.empty_like(value) for name, value in values.items()}
    torch._foreach_copy_(list(leaves.values()), list(values.values()))  # one operation for all
    return {name: leaf.requires_grad_() for name, leaf in leaves.items()}


def hessian_reverse(problem: Problem, leaves: dict[str, Tensor], batch: Batch) -> Product:
    """Reverse over reverse: keeps the graph of ∇L, so that each Hv = ∂(∇L·v)/∂θ is one backward
    pass through it.
    """
    parameters = list(leaves.values())
    with PlainConvolutions():
        loss = problem.batch_loss(leaves, batch)
    grads = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    live = [i for i, g in enumerate(grads) if g is not None and g.requires_grad]
    require_graph([grads[i] for i in live])
    # not the gradients themselves, a vector for each batch
    kept = [get_gradient_edge(grads[i]) for i in live]

    def product(tangents: Tangents, batched: bool = False) -> list[Tensor]:
        if not kept:  # a loss linear in every parameter
            return [torch.zeros_like(t) for t in tangents]
        return _pull(kept, parameters, [tangents[i] for i in live], batched)

    return product


def hessian_forward(problem: Problem, leaves: dict[str, Tensor], batch: Batch) -> Product:
    """Forward over reverse: dual numbers through the gradient; nothing is kept, and what is
    checkpointed runs again.
    """
    names = list(leaves)

    def gradient(*parameters: Tensor) -> tuple[Tensor, ...]:
        def loss(leaves: tuple[Tensor, ...]) -> Tensor:
            return problem.batch_loss(dict(zip(names, leaves, strict=True)), batch)

        return grad(loss)(parameters)  # type: ignore[no-any-return]

    def product(tangents: Tangents, batched: bool = False) -> list[Tensor]:
        points = tuple(leaf.detach() for leaf in leaves.values())
        if batched:
            return list(vmap(lambda *t: jvp(gradient, points, t)[1])(*tangents))
        with forward_ad.dual_level():
            duals = [
                forward_ad.make_dual(p, t).requires_grad_()
                for p, t in zip(points, tangents, strict=True)
            ]
            with recomputing(problem.recomputes, require_graph):
                loss = problem.batch_loss(dict(zip(names, duals, strict=True)), batch)
            grads = torch.autograd.grad(loss, duals, allow_unused=True)
            return [_tangent(g, p) for g, p in zip(grads, points, strict=True)]

    return product


def hessian_finite(problem: Problem, leaves: dict[str, Tensor], batch: Batch) -> Product:
    """Central differences (∇L(θ + hv) − ∇L(θ − hv))/2h, for models that autograd cannot take twice.

    h = ε^{1/3}·(1 + ‖θ‖)/‖v‖ balances truncation O(h²) against rounding O(ε/h), for an error of
    about ε^{2/3}.
    """
    names = list(leaves)
    points = [leaf.detach() for leaf in leaves.values()]
    scale = 1.0 + torch.stack([point.double().norm() for point in points]).norm()

    def gradient(step: Tensor, tangents: Tangents) -> list[Tensor]:
        moved = [
            (p + step.to(p.dtype) * t).requires_grad_()
            for p, t in zip(points, tangents, strict=True)
        ]
        with recomputing(problem.recomputes):
            loss = problem.batch_loss(dict(zip(names, moved, strict=True)), batch)
        grads = torch.autograd.grad(loss, moved, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for g, p in zip(grads, points, strict=True)]

    def product(tangents: Tangents, batched: bool = False) -> list[Tensor]:
        if batched:
            columns = [product([t[i] for t in tangents]) for i in range(len(tangents[0]))]
            return [torch.stack(parts) for parts in zip(*columns, strict=True)]
        size = torch.stack([t.double().norm() for t in tangents]).norm()
        step = (
            torch.finfo(points[0].dtype).eps ** (1 / 3)
            * scale
            / torch.where(size > 0, size, torch.ones_like(size))
        )
        ahead, behind = gradient(step, tangents), gradient(-step, tangents)
        return [(a - b) / (2 * step).to(a.dtype) for a, b in zip(ahead, behind, strict=True)]

    return product


def gauss_newton_reverse(make_map: Callable[[Any, Batch], OutputMap]) -> Builder:
    """JᵀMJv with the graphs of the output and of Jᵀu kept: Jv = ∂(Jᵀu · v)/∂u is one backward
    pass, Jᵀ another.
    """

    def build(problem: Problem, leaves: dict[str, Tensor], batch: Batch) -> Product:
        parameters = list(leaves.values())
        with PlainConvolutions():
            outputs, multiply = _outputs(problem, leaves, batch, make_map)
        seeds = [torch.zeros_like(z, requires_grad=True) for z in outputs]
        grads = torch.autograd.grad(
            outputs, parameters, seeds, create_graph=True, allow_unused=True
        )
        live = [i for i, g in enumerate(grads) if g is not None and g.requires_grad]
        require_graph([grads[i] for i in live])
        kept = [get_gradient_edge(grads[i]) for i in live]

        def product(tangents: Tangents, batched: bool = False) -> list[Tensor]:
            forward = _pull(kept, seeds, [tangents[i] for i in live], batched)
            weighted = (
                vmap(lambda *u: tuple(multiply(list(u))))(*forward)
                if batched
                else multiply(forward)
            )
            return _pull(outputs, parameters, list(weighted), batched)

        return product

    return build


def gauss_newton_forward(make_map: Callable[[Any, Batch], OutputMap]) -> Builder:
    """JᵀMJv with dual numbers for Jv and one backward pass for Jᵀ; nothing is kept."""

    def build(problem: Problem, leaves: dict[str, Tensor], batch: Batch) -> Product:
        names = list(leaves)

        def product(tangents: Tangents, batched: bool = False) -> list[Tensor]:
            if batched:
                columns = [product([t[i] for t in tangents]) for i in range(len(tangents[0]))]
                return [torch.stack(parts) for parts in zip(*columns, strict=True)]
            parameters = [leaf.detach().requires_grad_() for leaf in leaves.values()]
            with forward_ad.dual_level():
                duals = [
                    forward_ad.make_dual(p, t) for p, t in zip(parameters, tangents, strict=True)
                ]
                with recomputing(problem.recomputes):
                    structure = as_tree(problem.output(dict(zip(names, duals, strict=True)), batch))
                leaves_, spec = tree_flatten(structure)
                pairs = [
                    forward_ad.unpack_dual(z) if isinstance(z, Tensor) else (z, None)
                    for z in leaves_
                ]
            primal = tree_unflatten(
                [pair[0].detach() if isinstance(pair[0], Tensor) else pair[0] for pair in pairs],
                spec,
            )
            live = [pair for pair in pairs if isinstance(pair[0], Tensor) and pair[0].requires_grad]
            forward = [torch.zeros_like(z) if t is None else t.detach() for z, t in live]
            multiply = _between_live([z for z, _ in pairs], make_map(primal, batch))
            return _pull([z for z, _ in live], parameters, multiply(forward), False)

        return product

    return build


def sample_gradients(problem: Problem, leaves: dict[str, Tensor], batch: Batch) -> Product:
    """(1/B) Σ_i g_i (g_iᵀv) with the per-sample gradients kept: for problems that are one function
    of the batch.

    The gradients come by vmap or, where an operation does not take it, one by one.
    """
    names = list(leaves)
    points = {name: leaf.detach() for name, leaf in leaves.items()}

    columns, single = rows_of(batch)

    def gradient(*rows: Tensor) -> Tensor:
        found = grad(lambda parameters: problem.batch_loss(parameters, single(*rows)).reshape(()))(
            points
        )
        return torch.cat([found[name].reshape(-1) for name in names])

    try:
        rows = vmap(gradient)(*columns)
    # control flow that depends on the data, an operation without a batching rule
    except RuntimeError:
        rows = torch.stack([gradient(*sample) for sample in zip(*columns, strict=True)])
    sizes = [point.numel() for point in points.values()]

    def product(tangents: Tangents, batched: bool = False) -> list[Tensor]:
        lead = (len(tangents[0]),) if batched else ()
        flat = torch.cat([t.reshape(*lead, -1) for t in tangents], dim=-1)
        out = (flat @ rows.T) @ rows / batch.size
        pieces = out.split(sizes, dim=-1)
        return [
            piece.reshape(*lead, *point.shape)
            for piece, point in zip(pieces, points.values(), strict=True)
        ]

    return product


def hessian_map(problem: Problem) -> Callable[[Any, Batch], OutputMap]:
    """u ↦ ∂²L_batch/∂z² u: the loss's own closed form, or two backward passes at the output."""

    def make(output: Any, batch: Batch) -> OutputMap:
        loss = problem.loss_function
        closed = loss.product(output, problem.target(batch)) if loss is not None else None
        if closed is not None:
            return lambda u: [closed(u[0]) / batch.size]
        flat, spec = tree_flatten(output)
        points = [z.detach().requires_grad_() if _smooth(z) else z for z in flat]
        live = [z for z in points if isinstance(z, Tensor) and z.requires_grad]
        value = problem.output_loss(tree_unflatten(points, spec), batch)
        slopes = torch.autograd.grad(value, live, create_graph=True, materialize_grads=True)
        curved = [i for i, slope in enumerate(slopes) if slope.requires_grad]
        require(
            bool(curved),
            "loss",
            "be curved in the model's output for a Gauss–Newton product",
            "one that is linear in it",
            'return logits from the model and use "cross_entropy"',
        )
        return lambda u: _pull([slopes[i] for i in curved], live, [u[i] for i in curved], False)

    return make


def fisher_map(problem: Problem) -> Callable[[Any, Batch], OutputMap]:
    """u ↦ F u/B for a loss whose Fisher F at the output is diagonal and not its Hessian there."""

    def make(output: Any, batch: Batch) -> OutputMap:
        loss = problem.loss_function
        diagonal = None if loss is None else loss.fisher(output, problem.target(batch))
        assert diagonal is not None
        return lambda u: [
            weight * part / batch.size for weight, part in zip(diagonal, u, strict=True)
        ]

    return make


def rank_one_map(
    residuals: Callable[[Any, Batch], list[list[Tensor]]],
) -> Callable[[Any, Batch], OutputMap]:
    """u ↦ (1/KB) Σ_k r_ik (r_ikᵀ u_i) per sample i, for K residuals r of a batch, one tensor per
    output each.
    """

    def make(output: Any, batch: Batch) -> OutputMap:
        drawn = residuals(output, batch)

        def multiply(u: list[Tensor]) -> list[Tensor]:
            total = [torch.zeros_like(part) for part in u]
            for draw in drawn:
                along = sum(
                    (r * part).flatten(1).sum(dim=1) for r, part in zip(draw, u, strict=True)
                )
                assert isinstance(along, Tensor)
                total = [
                    t + r * along.reshape(-1, *[1] * (r.ndim - 1))
                    for t, r in zip(total, draw, strict=True)
                ]
            return [part / (len(drawn) * batch.size) for part in total]

        return multiply

    return make


def loss_slopes(problem: Problem, output: Any, batch: Batch) -> list[Tensor]:
    """∂ℓ/∂z of a batch times its size, for every tensor of the output, at the data's own
    targets.
    """
    flat, spec = tree_flatten(output)
    points = [z.detach().requires_grad_() if _smooth(z) else z for z in flat]
    live = [z for z in points if isinstance(z, Tensor) and z.requires_grad]
    value = problem.output_loss(tree_unflatten(points, spec), batch)
    return [
        slope * batch.size for slope in torch.autograd.grad(value, live, materialize_grads=True)
    ]


def empirical_residuals(problem: Problem) -> Callable[[Any, Batch], list[list[Tensor]]]:
    """The one residual of the empirical Fisher at the data's own target: r_i = n ∂L/∂z_i.

    It lacks the root of the batch's share, for r_i r_iᵀ is multiplied by the batch's weight in the
    mean elsewhere.
    """

    def residuals(output: Any, batch: Batch) -> list[list[Tensor]]:
        root = math.sqrt(problem.sample_share(batch))
        return [[slope * root for slope in loss_slopes(problem, output, batch)]]

    return residuals


def monte_carlo_residuals(
    problem: Problem, samples: int, seed: int
) -> Callable[[Any, Batch], list[list[Tensor]]]:
    """``samples`` residuals with E[r rᵀ] = M, from targets that the model itself predicts; the
    same at every call.
    """

    def residuals(output: Any, batch: Batch) -> list[list[Tensor]]:
        loss = problem.loss_function
        assert loss is not None
        stream = generator(seed, "monte carlo fisher", batch.index)
        target = problem.target(batch)
        fixed = tree_map(lambda z: z.detach() if isinstance(z, Tensor) else z, output)
        return [loss.random_factors(fixed, target, stream) for _ in range(samples)]

    return residuals


def _outputs(
    problem: Problem,
    leaves: dict[str, Tensor],
    batch: Batch,
    make_map: Callable[[Any, Batch], OutputMap],
) -> tuple[list[Tensor], OutputMap]:
    """The differentiable tensors of the model's output and the map of tangents on them."""
    flat, spec = tree_flatten(as_tree(problem.output(leaves, batch)))
    live = [z for z in flat if isinstance(z, Tensor) and z.requires_grad]
    constant = tree_unflatten([z.detach() if isinstance(z, Tensor) else z for z in flat], spec)
    return live, _between_live(flat, make_map(constant, batch))


def _between_live(outputs: Sequence[Any], multiply: OutputMap) -> OutputMap:
    """A map of tangents on all real tensors of an output as one on those that parameters enter;
    others do not move.
    """
    smooth = [z for z in outputs if _smooth(z)]
    moving = [z.requires_grad for z in smooth]
    if all(moving):
        return multiply

    def between(u: list[Tensor]) -> list[Tensor]:
        given = iter(u)
        every = [
            next(given) if moves else torch.zeros_like(z)
            for z, moves in zip(smooth, moving, strict=True)
        ]
        return [part for part, moves in zip(multiply(every), moving, strict=True) if moves]

    return between


def _smooth(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _pull(
    outputs: Sequence[Any], inputs: Sequence[Tensor], seeds: Sequence[Tensor], batched: bool
) -> list[Tensor]:
    """A backward pass that keeps its graph; inputs that are not reached get zeros."""
    found = torch.autograd.grad(
        outputs, inputs, seeds, retain_graph=True, allow_unused=True, is_grads_batched=batched
    )
    lead = (len(seeds[0]),) if batched else ()
    return [
        i.new_zeros(*lead, *i.shape) if g is None else g for g, i in zip(found, inputs, strict=True)
    ]


def _tangent(gradient: Tensor | None, like: Tensor) -> Tensor:
    tangent = None if gradient is None else forward_ad.unpack_dual(gradient).tangent
    return torch.zeros_like(like) if tangent is None else tangent.detach()
