"""When the closed forms hold: which losses have factors at the output, and which outputs are
piecewise linear in every weight.

Factors of the loss's curvature at the output are, per sample i, M_i = Σ_k c_ik s_ik s_ikᵀ with
c = ±1. They exist where every sample has an output of its own, the same alone as among others, and
the loss is a mean over samples: a model that normalises by its batch, or a root of a mean square,
has none.

If the model's output is piecewise linear in every single weight, ∂²z/∂θ_i² = 0 for each i, and the
Hessian of the loss has the diagonal, hence the trace, of its Gauss–Newton matrix; what smooth
elementwise activations add is in ``closed_form.py``. The answer is read off the autograd graph of a
forward pass, so that functional calls and tied weights are seen as well as modules: every node must
be linear or piecewise linear or one function of each element, and a product of two differentiable
tensors must not meet the same parameter on both sides. What a graph may hide, such as hooks on
tensors, is caught by a number: the second derivative of a random mix of the outputs along a random
direction of each parameter must be 0, or with smooth activations what these give
(``residual_checks.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from lambdahat._core.check import require, require_choice
from lambdahat._core.rng import generator
from lambdahat.operators.exact.layer_squares import Calls, record_layers
from lambdahat.operators.linearise import (
    empirical_residuals,
    kind_of,
    monte_carlo_residuals,
    nodes_below,
    twice_differentiable,
)
from lambdahat.problem import Problem
from lambdahat.problem.batches import Batch, take
from lambdahat.problem.losses import CrossEntropy, Custom, diagonal_factors
from lambdahat.problem.network import BATCH_NORMS

SEVERAL = 4


@dataclass(frozen=True)
class MixedOutputs:
    """For a random mix u of the outputs z, ∂(uᵀz)/∂ of the parameters, and of what layers that are
    used once give.

    Both by name, where they are not None; ``twice``: whether they can be differentiated once more.
    """

    mix: Tensor
    slopes: dict[str, Tensor]
    signals: dict[str, Tensor]
    twice: bool


@dataclass
class Few:
    """The output of some samples with its graph, and the uses of layers on the way to it.

    ``batch`` is a copy of the samples ``given``: a model may write into its input, and the graph
    keeps it. Other passes take those given. ``failed``: why there is no output.
    """

    problem: Problem
    leaves: dict[str, Tensor]
    given: Batch
    batch: Batch
    output: Any = None
    calls: Calls = field(default_factory=dict)
    failed: str = ""
    _mixed: MixedOutputs | None = None

    def mixed(self, twice: bool = False) -> MixedOutputs:
        """Slopes of one mix for all guards, kept; ``twice``: with a graph, where all operations
        have second slopes.
        """
        if self._mixed is None or (twice and not self._mixed.twice):
            rng = generator(0, "mix of outputs", device=self.output.device)
            mix = random_like(self.output, rng)
            classes = normalised(self.problem, self.batch, self.output)
            if classes is not None:
                # A mix that sums to 0 over the classes does not feel the log-softmax that the loss
                # does not feel. It is of sixteenths, below 8, whose sum has no rounding: a sum of
                # 1e-7 would bring back what curvature the log-softmax has, by a multiple that grows
                # with the data.
                steps = (16 * mix).round().clamp(-63, 63) / 16
                mix = steps - steps.roll(1, classes)
            try:
                self._mixed = self._pulled(mix, twice)
            # an operation that can be differentiated only once
            except (RuntimeError, NotImplementedError):
                if not twice:
                    raise
                self._mixed = self._pulled(mix, False)
        return self._mixed

    def _pulled(self, mix: Tensor, twice: bool) -> MixedOutputs:
        edges = {prefix: found[0].left for prefix, found in self.calls.items() if len(found) == 1}
        inputs: list[Any] = [*edges.values(), *self.leaves.values()]
        with twice_differentiable():
            found = torch.autograd.grad(
                self.output, inputs, mix, retain_graph=True, create_graph=twice, allow_unused=True
            )
        signals, slopes = (
            {name: slope for name, slope in zip(names, part, strict=True) if slope is not None}
            for names, part in ((edges, found[: len(edges)]), (self.leaves, found[len(edges) :]))
        )
        return MixedOutputs(mix, slopes, signals, twice)


def few_of(problem: Problem, leaves: dict[str, Tensor]) -> Few:
    """The first samples of the first batch that has more than one."""
    batch = next((batch for batch in problem.batches if batch.size > 1), problem.batches.first())
    given = take(batch, slice(SEVERAL))
    if problem.norm == "train":
        return Few(
            problem,
            leaves,
            given,
            given,
            failed="samples are normalised by the statistics of their batch",
        )
    copied = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, given.data)
    batch = replace(given, data=copied)
    try:
        with twice_differentiable():
            output, calls = record_layers(problem, leaves, batch)
    # a model for one batch size only
    except (RuntimeError, ValueError, IndexError, AssertionError) as error:
        said = str(error).partition("\n")[0] or type(error).__name__
        reason = f"the model does not take {batch.size} samples ({said})"
        return Few(problem, leaves, given, batch, failed=reason)
    return Few(problem, leaves, given, batch, output, calls)


def normalised(problem: Problem, batch: Batch, output: Tensor) -> int | None:
    """The dimension of a last log-softmax that the loss does not feel; None where there is none
    such.
    """
    loss = problem.loss_function
    if (
        not isinstance(loss, CrossEntropy)
        or output.grad_fn is None
        or kind_of(output.grad_fn) != "LogSoftmax"
    ):
        return None
    classes = 1 if loss._classes_first(output, problem.target(batch)) is output else output.ndim - 1
    dim: int = output.grad_fn._saved_dim  # type: ignore[attr-defined]  # a negative one is saved as unsigned
    return classes if (dim - 2**64 if dim >= 2**63 else dim) % output.ndim == classes else None


def random_like(like: Tensor, rng: torch.Generator) -> Tensor:
    """Normal numbers, drawn on the generator's device, the same in every precision."""
    return torch.randn(like.shape, generator=rng, dtype=torch.float32, device=rng.device).to(like)


def random_all(likes: Sequence[Tensor], rng: torch.Generator) -> list[Tensor]:
    """The same for several tensors, drawn together."""
    sizes = [like.numel() for like in likes]
    drawn = torch.randn(sum(sizes), generator=rng, dtype=torch.float32, device=rng.device).split(
        sizes
    )
    return [part.view(like.shape).to(like) for part, like in zip(drawn, likes, strict=True)]


PROBE = 8
WIDEST_CUSTOM = 256
KINDS = {
    "exact": ("type-2", "type2", "type-1", "true", "ggn"),
    "monte_carlo": ("mc", "sampled", "monte-carlo", "montecarlo"),
    "empirical": ("ef", "emp"),
}


def require_kind(kind: Any) -> str:
    """One of the kinds of Fisher; names that other libraries use are told ours."""
    ours = next(
        (
            name
            for name, others in KINDS.items()
            if isinstance(kind, str) and kind.lower() in others
        ),
        None,
    )
    return require_choice(kind, "kind", tuple(KINDS), f"use kind={ours!r}" if ours else "")


@dataclass(frozen=True)
class Factors:
    """``make(output, batch)`` gives S (K, B, …) and signs c (K, B) with Σ_k c_k s_k s_kᵀ = M; K =
    ``count``.

    ``parts``: whether part of a batch has the factors it has within the whole, up to the share of
    terms that count.
    """

    count: int
    make: Callable[[Tensor, Batch], tuple[Tensor, Tensor]]
    parts: bool = True


def exact_factors(few: Few, kind: str, samples: int = 1, seed: int = 0) -> Factors | None:
    """Factors of M, the "hessian" of the loss at the output or one of the Fishers; None where there
    are none.

    ``kind``: "hessian", "fisher" for a loss whose Fisher is diagonal and another matrix,
    "monte_carlo" or "empirical".
    """
    problem, batch, loss = few.problem, few.batch, few.problem.loss_function
    assert loss is not None
    output = _separate_output(few)
    if output is None:
        return None
    if kind == "fisher":
        return Factors(
            output[0].numel(), lambda output, batch: _of_diagonal_fisher(problem, output, batch)
        )
    if kind != "hessian":
        residuals = (
            empirical_residuals(problem)
            if kind == "empirical"
            else monte_carlo_residuals(problem, samples, seed)
        )

        def drawn(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
            stacked = torch.stack([draw[0] for draw in residuals(output, batch)])
            return stacked, stacked.new_full(stacked.shape[:2], 1.0 / len(stacked))

        return Factors(samples if kind == "monte_carlo" else 1, drawn, parts=False)
    count = loss.factor_count(output, problem.target(batch))
    if count is not None:
        return Factors(count, lambda output, batch: _closed_factors(problem, output, batch))
    width = output[0].numel()
    known = loss.product(output, problem.target(batch)) is not None
    if known or width > WIDEST_CUSTOM or not _loss_separates(problem, output, batch):
        return None
    return Factors(
        width,
        lambda output, batch: _by_eigenvectors(problem, output, batch),
        parts=not isinstance(loss, Custom),
    )


def samples_separate(few: Few) -> bool:
    """Whether the output of a sample is one row of one tensor, the same alone as among others."""
    return _separate_output(few) is not None


def _separate_output(few: Few) -> Tensor | None:
    """The output of a few samples if the first alone and the others by themselves give the same;
    else None.
    """
    problem, size = few.problem, few.batch.size
    if not isinstance(few.output, Tensor) or few.output.ndim == 0 or len(few.output) != size:
        return None
    together = few.output.detach()
    parts = [slice(0, 1), slice(1, size)] if size > 1 else [slice(0, 1)]
    try:
        with twice_differentiable(), torch.no_grad():
            apart = [problem.output(few.leaves, take(few.given, which)) for which in parts]
    # a model for one batch size only
    except (RuntimeError, ValueError, IndexError, AssertionError):
        return None
    shapes = [(which.stop - which.start, *together.shape[1:]) for which in parts]
    if [z.shape for z in apart] != shapes:
        return None
    off = torch.cat(apart) - together
    gap, scale = torch.stack(
        [torch.linalg.vector_norm(z, math.inf) for z in (off, together)]
    ).tolist()
    return together if gap <= tolerance(problem) * scale else None


def require_separable(problem: Problem) -> None:
    """Raise unless the loss of a batch is the mean of its samples' own losses, on a few samples of
    the first batch.

    Targets that do not count leave a sample less weight in the mean. That is right where its
    gradient is taken within the batch; a loss without an output is differentiated sample by sample,
    so that there the weights must be even.
    """
    require(
        problem.norm != "train",
        "norm",
        'be "eval" or "frozen" for per-sample gradients',
        '"train"',
        "batch statistics couple the samples",
    )
    first, parameters = problem.batches.first(), problem.named(problem.vector)
    few = take(first, slice(PROBE))
    singles = [take(few, slice(i, i + 1)) for i in range(few.size)]
    terms, even = problem._evaluate.terms, problem.loss_function is None
    if even:
        each = terms(singles[0])
        alike = all(terms(batch) == each * batch.size for batch in problem.batches)
        require(
            alike,
            "the labels",
            "have as many that count (not −100) in every sample for per-sample gradients",
            "samples of uneven weight",
            'use loss="cross_entropy", or samples of one length',
        )
    shares = torch.tensor(
        [1.0 if even else terms(single) for single in singles], dtype=torch.float64
    )
    try:
        with torch.no_grad(), twice_differentiable():
            together = float(problem.batch_loss(parameters, few))
            found = [problem.batch_loss(parameters, single) for single in singles]
    except (RuntimeError, ValueError, TypeError, IndexError):
        return  # a model for one batch size only: nothing to compare
    alone = torch.tensor([float(loss) for loss in found], dtype=torch.float64)
    mean = float(
        torch.where(shares > 0, shares * alone, 0.0).sum() / shares.sum().clamp(min=1e-300)
    )
    close = abs(together - mean) <= tolerance(problem) * (
        1.0 + float(alone.abs().nan_to_num().max())
    )
    require(
        close,
        "the loss of a batch",
        "be the mean of its samples' own losses for per-sample gradients",
        f"{together:.6g}, and {mean:.6g} from single samples",
        "a loss that compares samples, or gives them uneven weights, has none",
    )


def why_no_factors(few: Few) -> str:
    """The reason, where ``exact_factors`` finds none."""
    if few.failed:
        return few.failed
    return (
        "the loss has no factors at this output"
        if samples_separate(few)
        else "samples mix in the model"
    )


def tolerance(problem: Problem) -> float:
    """How far apart, relative, two ways to one number may come out in the arithmetic in use."""
    eps = torch.finfo(problem.dtype).eps
    if problem.device.type == "cuda" and problem.dtype == torch.float32:
        short = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
        eps = 2.0**-11 if short else eps
    return float(min(10 * eps**0.7, 0.1))


def _closed_factors(problem: Problem, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    assert problem.loss_function is not None
    factors = problem.loss_function.factors(output, problem.target(batch))
    assert factors is not None
    return factors, factors.new_ones(factors.shape[:2])


def _of_diagonal_fisher(problem: Problem, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    assert problem.loss_function is not None
    weights = problem.loss_function.fisher(output, problem.target(batch))
    assert weights is not None
    factors = diagonal_factors(weights[0])
    return factors, factors.new_ones(factors.shape[:2])


def _by_eigenvectors(problem: Problem, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Signed factors √|λ|·v of the loss's Hessian at each sample's output, for a loss without a
    closed form.
    """
    values, vectors = torch.linalg.eigh(
        _loss_blocks(problem, output, batch)[0].double() * batch.size
    )
    factors = (vectors * values.abs().sqrt().unsqueeze(1)).permute(2, 0, 1)
    return factors.to(output.dtype).reshape(-1, *output.shape), values.sign().T.to(output.dtype)


def positive_factors(problem: Problem, output: Any, batch: Batch) -> tuple[int, Iterator[Tensor]]:
    """K and factors s_k (B, …) with Σ_k s_k s_kᵀ = M, for a loss without a closed form that is
    convex where it is.
    """
    loss = problem.loss_function
    assert loss is not None
    cure = 'use kind="empirical", or a named loss'
    single = isinstance(output, Tensor) and output.ndim > 0 and len(output) == batch.size
    require(
        single,
        "the model's output",
        f"be one tensor for KFAC with the loss {loss.name!r}",
        output,
        cure,
    )
    width = output[0].numel()
    require(
        width <= WIDEST_CUSTOM,
        "kind",
        f'be "empirical" for the loss {loss.name!r}, which has no closed form, of more than'
        f" {WIDEST_CUSTOM} outputs",
        f'"exact" of {width} outputs',
        cure,
    )
    require(
        _loss_separates(problem, output, batch),
        "loss",
        "be a sum over samples for KFAC",
        repr(loss.name),
        cure,
    )
    factors, signs = _by_eigenvectors(problem, output, batch)
    sizes = factors.reshape(*signs.shape, -1).square().sum(dim=2)
    convex = bool((sizes * (signs < 0)).max() <= tolerance(problem) * sizes.max())
    require(
        convex,
        "loss",
        "be convex in the model's output for KFAC",
        f"{loss.name!r}, which is not here",
        cure,
    )
    return width, iter(
        torch.where((signs > 0).reshape(*signs.shape, *[1] * (output.ndim - 1)), factors, 0.0)
    )


def _loss_blocks(
    problem: Problem, output: Tensor, batch: Batch
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """∂²L_batch/∂z_i² (B, D, D) with the rows of all samples together, and the product with
    ∂²L_batch/∂z² itself.
    """
    point = output.detach().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(problem.output_loss(point, batch), point, create_graph=True)

    def product(u: Tensor) -> Tensor:
        if not slope.requires_grad:
            return torch.zeros_like(u)
        return torch.autograd.grad(slope, point, u, retain_graph=True, materialize_grads=True)[0]

    eye = torch.eye(output[0].numel(), dtype=output.dtype, device=output.device)
    rows = [
        product(e.reshape(output.shape[1:]).expand_as(output)).reshape(len(output), -1) for e in eye
    ]
    return torch.stack(rows, dim=1), product


def _loss_separates(problem: Problem, output: Tensor, batch: Batch) -> bool:
    """Whether the loss is a sum over samples, as a root of a mean or a contrastive loss is not."""
    blocks, product = _loss_blocks(problem, output, batch)
    draw = torch.randn(
        output.shape, generator=generator(0, "loss separates"), dtype=torch.float64
    ).to(output)
    apart = torch.einsum("bij,bj->bi", blocks, draw.reshape(len(output), -1)).reshape(output.shape)
    together = product(draw)
    return bool((apart - together).abs().max() <= tolerance(problem) * together.abs().max())


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
class ModelForm:
    """What is in the way of a closed form: ``curved``, why the output may not be piecewise linear
    in single weights.

    ``refused``: why it may not be so even up to the smooth activations, which are the nodes
    ``bends``. Empty if nothing is. ``columns``: the signals that the activations take in
    ``closed_form.py``.
    """

    curved: str
    refused: str
    bends: tuple[Any, ...] = ()
    columns: int = 0


@torch.enable_grad()
def form_of(few: Few) -> ModelForm:
    """The form of the model on a few samples; ``form_of_graph`` is for the graphs of others: a
    model may branch.
    """
    problem, leaves, batch, output = few.problem, few.leaves, few.batch, few.output
    reason = few.failed
    for name, layer in () if problem.model is None else problem.model.named_modules():
        if isinstance(layer, BATCH_NORMS) and (layer.training or layer.running_mean is None):
            reason = f"{name or type(layer).__name__} normalises by the statistics of its batch"
            break
    if not reason and not isinstance(output, Tensor):
        reason = f"the model's output is a {type(output).__name__}, not one tensor"
    if reason:
        return refused_form(reason)
    form = form_of_graph(problem, leaves, batch, output)
    if form.refused:
        return form
    with twice_differentiable():
        # the node of a write in place into part of a tensor does not say what was written
        if any(kind_of(node) == "CopySlices" for node in nodes_below([output.grad_fn])):
            with _Writes() as writes:
                problem.output(leaves, few.given)
            others = sorted(writes.names - IN_PLACE)
            reason = f"{others[0]} writes in place into part of a tensor" if others else ""
        if not reason and not form.bends:
            reason = _bend(few)
    return refused_form(reason) if reason else form


def form_of_graph(
    problem: Problem, leaves: dict[str, Tensor], batch: Batch, output: Tensor
) -> ModelForm:
    """What is known from the graph of this output alone."""
    root = output.grad_fn
    if root is None:
        return ModelForm("", "")
    if normalised(problem, batch, output) is not None:
        # cross-entropy does not feel a last log-softmax: start at the logits
        root = root.next_functions[0][0]
    names = {id(leaf): name for name, leaf in leaves.items()}
    # depth first over the graph, collecting for each node the parameters below it
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
            # of which abs(z) is no piecewise linear function
            return refused_form("it computes with complex numbers")
        reason = _objection(node, kind, sets)
        curved = curved or reason
        if kind in SMOOTH and len(children) == 1:
            bends.append(node)
        elif reason:
            return refused_form(reason)
    if bends and parts:  # which write was the smooth one cannot be told
        return refused_form("beside smooth activations it writes in place into part of a tensor")
    return ModelForm(curved, "", tuple(bends))


def refused_form(reason: str) -> ModelForm:
    """No closed form, and why."""
    return ModelForm(reason, reason)


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
    sizes = _bends_along([names for names in layers.values() if len(names) > 1], leaves, live, rng)
    bent = {name for name, (size, _) in sizes.items() if size}
    alone = [
        [name]
        for names in layers.values()
        if len(names) == 1 or bent.intersection(names)
        for name in names
    ]
    for name, (size, allowed) in _bends_along(alone, leaves, live, rng).items():
        if size > allowed:
            return f"its second derivative in {name} does not vanish"
    return ""


def _bends_along(
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
