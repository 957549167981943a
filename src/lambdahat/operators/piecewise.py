"""Is the model's output piecewise linear in every single weight?

Then ∂²z/∂θ_i² = 0 for each i, and the Hessian of the loss has the diagonal, hence the trace, of its Gauss–Newton matrix. The
answer is read off the autograd graph of one forward pass, so that functional calls and tied weights are seen as well as
modules: every node must be linear or piecewise linear, and a product of two differentiable tensors must not meet the
same parameter on both sides.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from lambdahat.batches import take
from lambdahat.losses import CrossEntropy
from lambdahat.problem import BATCH_NORMS, Problem

# Linear or piecewise linear in all differentiable inputs together.
LINEAR = frozenset(
    """T Transpose Permute Movedim View UnsafeView ReshapeAlias AsStrided Expand Squeeze Unsqueeze Select Slice Index
    IndexSelect Gather Cat Stack Split SplitWithSizes Unbind Clone ToCopy CopySlices Copy Neg Add Sub Rsub Sum Mean Relu
    LeakyRelu Hardtanh HardtanhBackward Threshold Abs Max Min Amax Amin Maximum Minimum Where MaskedFill
    MaxPool1DWithIndices MaxPool2DWithIndices MaxPool3DWithIndices MkldnnMaxPool2D MkldnnMaxPool3D AvgPool1D AvgPool2D
    AvgPool3D AdaptiveAvgPool1D AdaptiveAvgPool2D AdaptiveAvgPool3D MkldnnAdaptiveAvgPool2D AdaptiveMaxPool2D
    AdaptiveMaxPool3D FractionalMaxPool2D ConstantPadNd ReflectionPad1D ReflectionPad2D ReplicationPad1D ReplicationPad2D
    UpsampleNearest1D UpsampleNearest2D UpsampleBilinear2D PixelShuffle PixelUnshuffle Embedding Flip Roll Repeat Im2Col
    Unfold Diagonal Tril Triu Identity Alias Detach Contiguous Flatten""".split()
)
# Linear in each differentiable input with the others fixed.
MULTILINEAR = frozenset(
    """Addmm Mm Bmm Baddbmm Addbmm Mv Addmv Dot Linear Mul Convolution ConvolutionOverrideable MkldnnConvolution
    CudnnConvolution SlowConv2D ThnnConv2D PreluKernel Prelu NativeBatchNorm CudnnBatchNorm MiopenBatchNorm
    BatchNormImplIndex""".split()
)


def curved_because(problem: Problem) -> str:
    """Empty when the output is piecewise linear in every single weight, else the reason why it may not be."""
    if problem.loss_function is None:
        return "the problem has no separate model output"
    batch = take(problem.batches.first(), torch.arange(min(2, problem.batches.first().size), device=problem.device))
    leaves = {name: t.detach().requires_grad_() for name, t in problem.named(problem.vector).items()}
    output = problem.output(leaves, batch)
    if not isinstance(output, Tensor):
        return f"the model's output is a {type(output).__name__}, not one tensor"
    reason = _unfixed_statistics(problem)
    if reason or output.grad_fn is None:
        return reason
    root = output.grad_fn
    if isinstance(problem.loss_function, CrossEntropy) and _kind(root) == "LogSoftmax":
        root = root.next_functions[0][0]  # cross-entropy does not feel a last log-softmax: start at the logits
    return _walk(root, {id(leaf): name for name, leaf in leaves.items()})


def _unfixed_statistics(problem: Problem) -> str:
    model = problem.model
    assert model is not None
    for name, layer in model.named_modules():
        by_batch = isinstance(layer, BATCH_NORMS) and (layer.training or layer.running_mean is None)
        if by_batch and not isinstance(layer, nn.Identity):
            return f"{name or type(layer).__name__} normalises by the statistics of its batch"
    return ""


def _kind(node: Any) -> str:
    return re.sub(r"(Backward\d*|Backward)$", "", type(node).__name__)


def _walk(root: Any, names: dict[int, str]) -> str:
    """Depth first over the graph, collecting for each node the parameters below it."""
    below: dict[Any, frozenset[str]] = {}
    stack: list[tuple[Any, bool]] = [(root, False)]
    while stack:
        node, ready = stack.pop()
        if node in below:
            continue
        children = [child for child, _ in node.next_functions if child is not None]
        if not ready:
            stack.append((node, True))
            stack.extend((child, False) for child in children if child not in below)
            continue
        kind = _kind(node)
        if kind == "AccumulateGrad":
            below[node] = frozenset([names.get(id(node.variable), "?")])
            continue
        sets = [below[child] for child in children]
        below[node] = frozenset().union(*sets)
        reason = _objection(node, kind, sets)
        if reason:
            return reason
    return ""


def _objection(node: Any, kind: str, sets: list[frozenset[str]]) -> str:
    if kind in LINEAR or not any(sets):
        return ""
    if kind in ("Div", "DivBackward"):
        return "" if len(sets) == 1 else "it divides by a quantity that depends on parameters"
    if kind not in MULTILINEAR:
        return f"{kind} is not piecewise linear"
    if getattr(node, "_saved_training", False) and "BatchNorm" in kind:
        return "batch normalisation uses the statistics of its batch"
    shared = sorted(name for i, first in enumerate(sets) for second in sets[i + 1 :] for name in first & second)
    return f"{shared[0]} enters twice on one path, through {kind}" if shared else ""
