"""Is the model's output piecewise linear in every single weight, up to activations that act
elementwise?

Without such activations ∂²z/∂θ_i² = 0 for each i, and the Hessian of the loss has the diagonal,
hence the trace, of its Gauss–Newton matrix; what smooth ones add is in ``residuals.py``. The answer
is read off the autograd graph of a forward pass, so that functional calls and tied weights are seen
as well as modules: every node must be linear or piecewise linear or one function of each element,
and a product of two differentiable tensors must not meet the same parameter on both sides. What a
graph may hide, such as hooks on tensors, is caught by a number: the second derivative of a random
mix of the outputs along a random direction of each parameter must be 0, or with smooth activations
what these give (``residual_checks.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lambdahat._core.rng import generator
from lambdahat.operators.exact.few_samples import Few, normalised, random_all
from lambdahat.operators.linearise import graph_nodes, kind_of, twice_differentiable
from lambdahat.problem import Problem
from lambdahat.problem.batches import Batch
from lambdahat.problem.network import BATCH_NORMS

# Autograd nodes by name. Linear or piecewise linear in all differentiable inputs together:
_LINEAR = """
    Abs AdaptiveAvgPool1D AdaptiveAvgPool2D AdaptiveAvgPool3D AdaptiveMaxPool2D AdaptiveMaxPool3D
    Add Alias Amax Amin Aminmax AsStrided AvgPool1D AvgPool2D AvgPool3D Cat ChannelShuffle Clamp
    ClampMax ClampMin Clone ConstantPadNd CopyBackwards CopySlices Cummax Cummin Cumsum Diagonal
    Embedding Expand Flip FractionalMaxPool2D Gather Hardshrink Hardtanh Im2Col Index IndexAdd
    IndexCopy IndexPut IndexSelect Kthvalue LeakyRelu MaskedFill Max MaxPool2DWithIndices
    MaxPool3DWithIndices Maximum Mean Median Min Minimum MkldnnAdaptiveAvgPool2D MkldnnMaxPool2D
    MkldnnMaxPool3D Neg Permute PixelShuffle PixelUnshuffle ReflectionPad1D ReflectionPad2D
    ReflectionPad3D Relu Repeat ReplicationPad1D ReplicationPad2D ReplicationPad3D ReshapeAlias
    Roll Rsub ScatterAdd Select Slice Softshrink Sort Split SplitWithSizes Squeeze Stack Sub Sum
    T Threshold ToCopy Topk Trace Transpose Tril Triu Unbind Unfold UnsafeView Unsqueeze
    UpsampleBicubic2D UpsampleBilinear2D UpsampleLinear1D UpsampleNearest1D UpsampleNearest2D
    UpsampleNearest3D UpsampleTrilinear3D View Where"""
# Linear in each differentiable input with the others fixed; the first two multiply each other, the
# rest are added:
_PRODUCTS = """
    Bmm Convolution ConvolutionOverrideable CudnnBatchNorm CudnnConvolution Dot Linear
    MiopenBatchNorm MkldnnConvolution Mm Mul Mv NativeBatchNorm PreluKernel"""
# The same, with what is added first:
_ADDED_PRODUCTS = "Addbmm Addcmul Addmm Addmv Baddbmm SparseAddmm"
# Done in place on part of a tensor these leave a CopySlices node that says no more than that; each
# is piecewise linear:
_IN_PLACE = """
    abs_ add_ clamp_ clamp_max_ clamp_min_ copy_ fill_ hardtanh_ leaky_relu_ masked_fill_ neg_
    relu_ sub_ threshold_ zero_"""

# One function of each element, that has a second derivative:
_SMOOTH = """
    Acos Acosh Asin Asinh Atan Atanh Celu Cos Cosh Elu Erf Erfc Exp Exp2 Expm1 Gelu Hardswish Log
    Log10 Log1P Log2 LogSigmoid Logit Mish Pow Reciprocal Rsqrt Sigmoid Silu Sin Sinc Sinh
    Softplus Sqrt Tan Tanh"""

LINEAR, IN_PLACE, SMOOTH = (frozenset(names.split()) for names in (_LINEAR, _IN_PLACE, _SMOOTH))
FACTORS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(_PRODUCTS.split(), (0, 1)),
    **dict.fromkeys(_ADDED_PRODUCTS.split(), (1, 2)),
    "Trilinear": (0, 1, 2),
}


@dataclass(frozen=True)
class Form:
    """What is in the way of a closed form: ``curved``, why the output may not be piecewise linear
    in single weights.

    ``refused``: why it may not be so even up to the smooth activations, which are the nodes
    ``bends``. Empty if nothing is. ``columns``: the signals that the activations take in
    ``residuals.py``.
    """

    curved: str
    refused: str
    bends: tuple[Any, ...] = ()
    columns: int = 0


@torch.enable_grad()
def form_of(few: Few) -> Form:
    """The form of the model on a few samples; ``form_of_graph`` is for the graphs of others: a
    model may branch.
    """
    problem, leaves, batch, output = few.problem, few.leaves, few.batch, few.output
    reason = _unfixed_statistics(problem) or few.failed
    if not reason and not isinstance(output, Tensor):
        reason = f"the model's output is a {type(output).__name__}, not one tensor"
    if reason:
        return refused_form(reason)
    form = form_of_graph(problem, leaves, batch, output)
    if form.refused:
        return form
    with twice_differentiable():
        reason = _hidden_writes(few)
        if not reason and not form.bends:
            reason = _bend(few)
    return refused_form(reason) if reason else form


def form_of_graph(
    problem: Problem, leaves: dict[str, Tensor], batch: Batch, output: Tensor
) -> Form:
    """What is known from the graph of this output alone."""
    root = output.grad_fn
    if root is None:
        return Form("", "")
    if normalised(problem, batch, output) is not None:
        root = root.next_functions[0][
            0
        ]  # cross-entropy does not feel a last log-softmax: start at the logits
    return _walk(root, {id(leaf): name for name, leaf in leaves.items()})


def refused_form(reason: str) -> Form:
    """No closed form, and why."""
    return Form(reason, reason)


def _unfixed_statistics(problem: Problem) -> str:
    for name, layer in () if problem.model is None else problem.model.named_modules():
        if isinstance(layer, BATCH_NORMS) and (layer.training or layer.running_mean is None):
            return f"{name or type(layer).__name__} normalises by the statistics of its batch"
    return ""


def _walk(root: Any, names: dict[int, str]) -> Form:
    """Depth first over the graph, collecting for each node the parameters below it."""
    below: dict[Any, frozenset[str]] = {None: frozenset()}
    stack: list[tuple[Any, bool]] = [(root, False)]
    curved, bends, parts = "", [], False
    while stack:
        node, ready = stack.pop()
        if node in below:
            continue
        children = [child for child, _ in node.next_functions]
        if not ready:
            stack.append((node, True))
            stack.extend((child, False) for child in children if child not in below)
            continue
        kind = kind_of(node)
        if kind == "AccumulateGrad":
            below[node] = frozenset([names.get(id(node.variable), "a tensor that is no parameter")])
            continue
        sets = [below[child] for child in children]
        below[node] = frozenset().union(*sets)
        parts = parts or kind == "CopySlices"
        if any(made.dtype.is_complex for made in getattr(node, "_input_metadata", ())):
            return refused_form(
                "it computes with complex numbers"
            )  # of which abs(z) is no piecewise linear function
        reason = _objection(node, kind, sets)
        curved = curved or reason
        if kind in SMOOTH and len(children) == 1:
            bends.append(node)
        elif reason:
            return refused_form(reason)
    if bends and parts:  # which write was the smooth one cannot be told
        return refused_form("beside smooth activations it writes in place into part of a tensor")
    return Form(curved, "", tuple(bends))


def _objection(node: Any, kind: str, sets: list[frozenset[str]]) -> str:
    """``sets`` are the parameters below each input of the node, in order."""
    if kind == "Embedding" and getattr(node, "_saved_scale_grad_by_freq", True):
        return "scale_grad_by_freq makes the embedding's gradient another than its derivative"
    if kind in LINEAR:
        return ""
    if kind == "Div":
        return "it divides by a quantity that depends on parameters" if any(sets[1:]) else ""
    if kind not in FACTORS:
        return f"{kind} is not piecewise linear"
    if "BatchNorm" in kind and getattr(node, "_saved_training", True):
        return "batch normalisation uses the statistics of its batch"
    factors = [sets[i] for i in FACTORS[kind] if i < len(sets)]
    shared = sorted(
        name
        for i, first in enumerate(factors)
        for second in factors[i + 1 :]
        for name in first & second
    )
    return f"{shared[0]} enters twice on one path, through {kind}" if shared else ""


class _Writes(TorchDispatchMode):
    """Notes the names of all operations done in place."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.rpartition("::")[2]
        if name.endswith("_"):
            self.names.add(name)
        return func(*args, **(kwargs or {}))


def _hidden_writes(few: Few) -> str:
    """What a write in place into part of a tensor did: its node in the graph does not say."""
    if not any(kind_of(node) == "CopySlices" for node in graph_nodes([few.output])):
        return ""
    with _Writes() as writes:
        few.problem.output(few.leaves, few.given)
    others = sorted(writes.names - IN_PLACE)
    return f"{others[0]} writes in place into part of a tensor" if others else ""


def _bend(few: Few) -> str:
    """Second derivatives that are there in number: ∂²(uᵀz)/∂θ_k² v_k ≠ 0 for some parameter, u and
    v_k random.

    The parameters of a layer, of one prefix, are looked at together first: mostly it is linear in
    them together.
    """
    leaves, live = (
        few.leaves,
        {name: slope for name, slope in few.mixed(True).slopes.items() if slope.requires_grad},
    )
    rng = generator(
        0, "piecewise", device=few.output.device
    )  # many numbers, of which none cross to the GPU
    layers: dict[str, list[str]] = {}
    for name in live:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    sizes = _bent([names for names in layers.values() if len(names) > 1], leaves, live, rng)
    bent = {name for name, (size, _) in sizes.items() if size}
    alone = [
        [name]
        for names in layers.values()
        if len(names) == 1 or bent.intersection(names)
        for name in names
    ]
    for name, (size, allowed) in _bent(alone, leaves, live, rng).items():
        if size > allowed:
            return f"its second derivative in {name} does not vanish"
    return ""


def _bent(
    groups: list[list[str]],
    leaves: dict[str, Tensor],
    slopes: dict[str, Tensor],
    rng: torch.Generator,
) -> dict[str, tuple[float, float]]:
    """How much a parameter's slope changes along a random direction of all of its group, and by
    rounding at the most.

    Those of all groups are read at once: every reading waits for the GPU. What does not depend on
    it changes by 0.
    """
    names = [name for group in groups for name in group]
    if not names:
        return {}
    directions = dict(zip(names, random_all([leaves[name] for name in names], rng), strict=True))
    bends: dict[str, Tensor] = {}
    for group in groups:
        points, moved, along = ([of[name] for name in group] for of in (leaves, slopes, directions))
        try:
            found = torch.autograd.grad(moved, points, along, retain_graph=True, allow_unused=True)
        except (
            RuntimeError,
            NotImplementedError,
        ):  # an operation that can be differentiated only once
            continue
        bends |= {name: bend for name, bend in zip(group, found, strict=True) if bend is not None}
    if not bends:
        return {}
    norms = torch._foreach_norm(
        [of[name].detach() for of in (bends, slopes, directions) for name in bends]
    )
    rows = zip(*torch.stack(norms).view(3, -1).tolist(), strict=True)
    eps = [torch.finfo(leaves[name].dtype).eps for name in bends]
    return {
        name: (bend, rounding * slope * length)
        for name, rounding, (bend, slope, length) in zip(bends, eps, rows, strict=True)
    }
