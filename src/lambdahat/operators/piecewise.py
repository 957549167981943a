"""Is the model's output piecewise linear in every single weight?

Then ∂²z/∂θ_i² = 0 for each i, and the Hessian of the loss has the diagonal, hence the trace, of its Gauss–Newton
matrix. The answer is read off the autograd graph of a forward pass, so that functional calls and tied weights are seen
as well as modules: every node must be linear or piecewise linear, and a product of two differentiable tensors must not
meet the same parameter on both sides. What a graph may hide is caught by a number: the second derivative of a random
mix of the outputs along a random direction of each parameter must be 0.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode

from lambdahat._rng import generator
from lambdahat.batches import Batch, take
from lambdahat.losses import CrossEntropy
from lambdahat.network import BATCH_NORMS
from lambdahat.operators.linearise import graph_nodes
from lambdahat.problem import Problem

PROBE = 2

# Autograd nodes by name. Linear or piecewise linear in all differentiable inputs together:
_LINEAR = """
    Abs AdaptiveAvgPool1D AdaptiveAvgPool2D AdaptiveAvgPool3D AdaptiveMaxPool2D AdaptiveMaxPool3D Add Alias Amax Amin
    Aminmax AsStrided AvgPool1D AvgPool2D AvgPool3D Cat ChannelShuffle Clamp ClampMax ClampMin Clone ConstantPadNd
    CopyBackwards CopySlices Cummax Cummin Cumsum Diagonal Embedding Expand Flip FractionalMaxPool2D Gather Hardshrink
    Hardtanh Im2Col Index IndexAdd IndexCopy IndexPut IndexSelect Kthvalue LeakyRelu MaskedFill Max
    MaxPool2DWithIndices MaxPool3DWithIndices Maximum Mean Median Min Minimum MkldnnAdaptiveAvgPool2D MkldnnMaxPool2D
    MkldnnMaxPool3D Neg Permute PixelShuffle PixelUnshuffle ReflectionPad1D ReflectionPad2D ReflectionPad3D Relu Repeat
    ReplicationPad1D ReplicationPad2D ReplicationPad3D ReshapeAlias Roll Rsub ScatterAdd Select Slice Softshrink Sort
    Split SplitWithSizes Squeeze Stack Sub Sum T Threshold ToCopy Topk Trace Transpose Tril Triu Unbind Unfold
    UnsafeView Unsqueeze UpsampleBicubic2D UpsampleBilinear2D UpsampleLinear1D UpsampleNearest1D UpsampleNearest2D
    UpsampleNearest3D UpsampleTrilinear3D View Where"""
# Linear in each differentiable input with the others fixed; the first two multiply each other, the rest are added:
_PRODUCTS = """
    Bmm Convolution ConvolutionOverrideable CudnnBatchNorm CudnnConvolution Dot Linear MiopenBatchNorm
    MkldnnConvolution Mm Mul Mv NativeBatchNorm PreluKernel"""
# The same, with what is added first:
_ADDED_PRODUCTS = "Addbmm Addcmul Addmm Addmv Baddbmm SparseAddmm"
# Done in place on part of a tensor these leave a CopySlices node that says no more than that; each is piecewise linear:
_IN_PLACE = """
    abs_ add_ clamp_ clamp_max_ clamp_min_ copy_ fill_ hardtanh_ leaky_relu_ masked_fill_ neg_ relu_ sub_ threshold_
    zero_"""

LINEAR, IN_PLACE = frozenset(_LINEAR.split()), frozenset(_IN_PLACE.split())
FACTORS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(_PRODUCTS.split(), (0, 1)),
    **dict.fromkeys(_ADDED_PRODUCTS.split(), (1, 2)),
    "Trilinear": (0, 1, 2),
}


@torch.enable_grad()
def curved_because(problem: Problem) -> str:
    """Empty when the output is piecewise linear in every single weight, else the reason why it may not be.

    Looks at two samples; ``objection`` is for the graphs of the others, where the model may branch.
    """
    if problem.loss_function is None:
        return "the problem has no separate model output"
    reason = _unfixed_statistics(problem)
    if reason:
        return reason
    first = problem.batches.first()
    batch = take(first, torch.arange(min(PROBE, first.size), device=problem.device))
    leaves = {name: t.detach().requires_grad_() for name, t in problem.named(problem.vector).items()}
    try:
        output = problem.output(leaves, batch)
    except (RuntimeError, ValueError, IndexError) as error:
        return f"the model does not take {batch.size} samples ({str(error).splitlines()[0]})"
    if not isinstance(output, Tensor):
        return f"the model's output is a {type(output).__name__}, not one tensor"
    return (
        objection(problem, leaves, batch, output)
        or _hidden_writes(problem, leaves, batch, output)
        or _bend(output, leaves, _normalised(problem, batch, output))
    )


def objection(problem: Problem, leaves: dict[str, Tensor], batch: Batch, output: Tensor) -> str:
    """What in the graph of this output is not known to be piecewise linear in single weights; empty when all is."""
    root = output.grad_fn
    if root is None:
        return ""
    if _normalised(problem, batch, output) is not None:
        root = root.next_functions[0][0]  # cross-entropy does not feel a last log-softmax: start at the logits
    return _walk(root, {id(leaf): name for name, leaf in leaves.items()})


def _unfixed_statistics(problem: Problem) -> str:
    model = problem.model
    assert model is not None
    for name, layer in model.named_modules():
        if isinstance(layer, BATCH_NORMS) and (layer.training or layer.running_mean is None):
            return f"{name or type(layer).__name__} normalises by the statistics of its batch"
    return ""


def _normalised(problem: Problem, batch: Batch, output: Tensor) -> int | None:
    """The dimension of a last log-softmax that the loss does not feel; None where there is none such."""
    loss = problem.loss_function
    if not isinstance(loss, CrossEntropy) or output.grad_fn is None or _kind(output.grad_fn) != "LogSoftmax":
        return None
    classes = 1 if loss._classes_first(output, problem.target(batch)) is output else output.ndim - 1
    dim: int = output.grad_fn._saved_dim  # type: ignore[attr-defined]  # a negative one is saved as unsigned
    return classes if (dim - 2**64 if dim >= 2**63 else dim) % output.ndim == classes else None


def _kind(node: Any) -> str:
    """What a node does, by its name; a custom function may call itself anything, so that its name says nothing."""
    if isinstance(node, BackwardCFunction):
        return f"the custom function {type(node).__name__.removesuffix('Backward')}"
    return re.sub(r"Backward\d+$", "", type(node).__name__)


def _walk(root: Any, names: dict[int, str]) -> str:
    """Depth first over the graph, collecting for each node the parameters below it."""
    below: dict[Any, frozenset[str]] = {None: frozenset()}
    stack: list[tuple[Any, bool]] = [(root, False)]
    while stack:
        node, ready = stack.pop()
        if node in below:
            continue
        children = [child for child, _ in node.next_functions]
        if not ready:
            stack.append((node, True))
            stack.extend((child, False) for child in children if child not in below)
            continue
        kind = _kind(node)
        if kind == "AccumulateGrad":
            below[node] = frozenset([names.get(id(node.variable), "a tensor that is no parameter")])
            continue
        sets = [below[child] for child in children]
        below[node] = frozenset().union(*sets)
        reason = _objection(node, kind, sets)
        if reason:
            return reason
    return ""


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
    shared = sorted(name for i, first in enumerate(factors) for second in factors[i + 1 :] for name in first & second)
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


def _hidden_writes(problem: Problem, leaves: dict[str, Tensor], batch: Batch, output: Tensor) -> str:
    """What a write in place into part of a tensor did: its node in the graph does not say."""
    if not any(_kind(node) == "CopySlices" for node in graph_nodes([output])):
        return ""
    with _Writes() as writes:
        problem.output(leaves, batch)
    others = sorted(writes.names - IN_PLACE)
    return f"{others[0]} writes in place into part of a tensor" if others else ""


def _bend(output: Tensor, leaves: dict[str, Tensor], normalised: int | None) -> str:
    """Second derivatives that are there in number: ∂²(uᵀz)/∂θ_k² v_k ≠ 0 for some parameter, u and v_k random.

    A mix u that sums to 0 over the classes does not feel the log-softmax that the loss does not feel.
    """
    rng = generator(0, "piecewise")

    def draw(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=rng, dtype=torch.float32).to(like)

    mix = draw(output)
    mix = mix if normalised is None else mix - mix.mean(dim=normalised, keepdim=True)
    try:
        slopes = torch.autograd.grad(output, list(leaves.values()), mix, create_graph=True, allow_unused=True)
        for (name, leaf), slope in zip(leaves.items(), slopes, strict=True):
            if slope is None or not slope.requires_grad:
                continue
            direction = draw(leaf)
            (bend,) = torch.autograd.grad(slope, leaf, direction, retain_graph=True, allow_unused=True)
            allowed = torch.finfo(leaf.dtype).eps * slope.norm() * direction.norm()
            if bend is not None and bool(bend.norm() > allowed):
                return f"its second derivative in {name} does not vanish"
    except (RuntimeError, NotImplementedError):  # an operation that can be differentiated only once
        pass
    return ""
