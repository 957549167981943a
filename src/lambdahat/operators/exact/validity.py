"""When the closed forms hold: which losses have factors at the output, and which outputs are
piecewise linear in every weight.

Factors of the loss's curvature at the output, M_i = Σ_k c_ik s_ik s_ikᵀ with c = ±1, exist where
every sample has an output of its own, the same alone as among others, and the loss is a mean over
samples.

If the model's output is piecewise linear in every single weight, ∂²z/∂θ_i² = 0, and the Hessian of
the loss has the diagonal of its Gauss–Newton matrix; what smooth activations add is in
``residuals.py``. This is read off the autograd graph of a forward pass, so that functional calls
and tied weights are seen: every node must be (piecewise) linear or a function of each element, and
a product of two differentiable tensors must not meet the same parameter on both sides. What a graph
may hide is caught by a number: the second derivative of a random mix of the outputs along a random
direction of each parameter must be 0, or what activations give.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from lambdahat._core.device import OperationWatch, pull_back
from lambdahat._core.rng import generator
from lambdahat.operators import linearise
from lambdahat.operators.exact.layer_squares import (
    SMOOTH,
    Part,
    Trusted,
    full_name,
    gradients,
    owner,
    pull_signals,
    trace_layers,
)
from lambdahat.operators.linearise import (
    Leaves,
    eigen_factors,
    kind_of,
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
    """For a random mix u of the outputs z, ∂(uᵀz)/∂ of the parameters and of what layers used once
    give.

    ``twice``: whether they can be differentiated once more.
    """

    mix: Tensor
    slopes: dict[str, Tensor]
    signals: dict[str, Tensor]
    twice: bool


@dataclass
class Few:
    """Some samples after a forward pass, for the checks.

    ``batch`` is a copy of the samples ``given``, for a model may write into its input. ``failed``:
    why there is no ``part``.
    """

    problem: Problem
    leaves: Leaves
    given: Batch
    batch: Batch
    part: Part | None = None
    failed: str = ""
    _mixed: MixedOutputs | None = None

    @property
    def output(self) -> Any:
        """The output with its graph."""
        return None if self.part is None else self.part.output

    @property
    def plain(self) -> bool:
        """Whether the model is a chain, whose graph shows all that it does."""
        return self.part is not None and self.part.plain

    def mixed(self, twice: bool = False) -> MixedOutputs:
        """Slopes of one mix for all checks, cached; ``twice``: with a graph where possible."""
        if self._mixed is not None and (self._mixed.twice or not twice):
            return self._mixed
        assert self.part is not None
        rng = generator(0, "mix of outputs", device=self.output.device)
        (mix,) = random_like([self.output], rng)
        classes = log_softmax_dimension(self.problem, self.batch, self.output)
        if classes is not None:
            # A mix that sums to 0 over the classes does not feel the log-softmax that the loss does
            # not feel. It is of sixteenths, below 8, whose sum has no rounding: a sum of 1e-7 would
            # bring back what curvature the log-softmax has, by a multiple that grows with the data.
            steps = (16 * mix).round().clamp(-63, 63) / 16
            mix = steps - steps.roll(1, classes)
        uses = {
            prefix: found[0].left for prefix, found in self.part.calls.items() if len(found) == 1
        }
        inputs: list[Any] = [*uses.values(), *self.leaves.values()]
        for graph in (True, False) if twice else (False,):
            try:
                with twice_differentiable():
                    found = pull_back(
                        [self.output],
                        inputs,
                        [mix],
                        retain_graph=True,
                        create_graph=graph,
                        allow_unused=True,
                    )
                break
            # an operation that can be differentiated only once
            except (RuntimeError, NotImplementedError):
                if not graph:
                    raise
        signals, slopes = (
            {name: slope for name, slope in zip(names, part, strict=True) if slope is not None}
            for names, part in ((uses, found[: len(uses)]), (self.leaves, found[len(uses) :]))
        )
        self._mixed = MixedOutputs(mix, slopes, signals, graph)
        return self._mixed


def few_of(problem: Problem, leaves: Leaves) -> Few:
    """The first samples of the first batch that has more than one."""
    batch = next((batch for batch in problem.batches if batch.size > 1), problem.batches.first())
    given = take(batch, slice(SEVERAL))
    if problem.norm == "train":
        reason = "samples are normalised by the statistics of their batch"
        return Few(problem, leaves, given, given, failed=reason)
    copied = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, given.data)
    batch = replace(given, data=copied)
    try:
        with twice_differentiable():
            return Few(problem, leaves, given, batch, trace_layers(problem, leaves, batch))
    # a model for one batch size only
    except (RuntimeError, ValueError, IndexError, AssertionError) as error:
        said = str(error).partition("\n")[0] or type(error).__name__
        reason = f"the model does not take {batch.size} samples ({said})"
        return Few(problem, leaves, given, batch, failed=reason)


def log_softmax_dimension(problem: Problem, batch: Batch, output: Tensor) -> int | None:
    """The dimension of a final log-softmax that does not change the loss, or None."""
    loss, node = problem.loss_function, output.grad_fn
    if not isinstance(loss, CrossEntropy) or node is None or kind_of(node) != "LogSoftmax":
        return None
    classes = 1 if loss._classes_first(output, problem.target(batch)) is output else output.ndim - 1
    dim: int = node._saved_dim  # type: ignore[attr-defined]  # a negative one is saved as unsigned
    return classes if (dim - 2**64 if dim >= 2**63 else dim) % output.ndim == classes else None


def random_like(likes: Sequence[Tensor], rng: torch.Generator) -> list[Tensor]:
    """Normal numbers, drawn together on the generator's device, the same in every precision."""
    sizes = [like.numel() for like in likes]
    drawn = torch.randn(sum(sizes), generator=rng, dtype=torch.float32, device=rng.device)
    pairs = zip(drawn.split(sizes), likes, strict=True)
    return [part.view(like.shape).to(like) for part, like in pairs]


@dataclass(frozen=True)
class Factors:
    """``make(problem, output, batch)`` gives S (K, B, …) and signs c (K, B) with Σ_k c_k s_k s_kᵀ =
    M, None for signs that are all 1; K is ``count``.

    ``parts``: whether part of a batch has the factors it has within the whole, up to its share.
    ``linear``: whether the loss is linear in the output, so that they are 0 and there are no
    products.
    """

    count: int
    make: Callable[[Problem, Tensor, Batch], tuple[Tensor, Tensor | None]]
    parts: bool = True
    linear: bool = False


def exact_factors(few: Few, kind: str, samples: int = 1, seed: int = 0) -> Factors | None:
    """Factors of M: the "hessian" of the loss at the output, its diagonal "fisher", "monte_carlo"
    or "empirical"; None where there are none.
    """
    problem, batch, loss = few.problem, few.batch, few.problem.loss_function
    assert loss is not None
    output = separate_output(few)
    if output is None:
        return None
    if kind in ("empirical", "monte_carlo"):

        def rank_one(
            problem: Problem, output: Tensor, batch: Batch
        ) -> tuple[Tensor, Tensor | None]:
            residuals = (
                linearise.empirical_residuals(problem)
                if kind == "empirical"
                else linearise.monte_carlo_residuals(problem, samples, seed)
            )
            stacked = torch.stack([draw[0] for draw in residuals(output, batch)])
            if len(stacked) == 1:
                return stacked, None
            return stacked, stacked.new_full(stacked.shape[:2], 1.0 / len(stacked))

        return Factors(samples if kind == "monte_carlo" else 1, rank_one, parts=False)

    def positive(problem: Problem, output: Tensor, batch: Batch) -> tuple[Tensor, None]:
        target = problem.target(batch)
        weights = loss.fisher(output, target) if kind == "fisher" else None
        found = diagonal_factors(weights[0]) if weights else loss.factors(output, target)
        assert found is not None
        return found, None

    width, target = output[0].numel(), problem.target(batch)
    count = width if kind == "fisher" else loss.factor_count(output, target)
    if count is not None:
        return Factors(count, positive)
    known = loss.product(output, target) is not None or width > linearise.WIDEST_CUSTOM
    if known:
        return None
    try:
        eigen_factors(problem, output, batch)
    except linearise.CoupledLoss:
        return None
    linear = linearise.is_linear(problem, output, batch)
    return Factors(width, eigen_factors, parts=not isinstance(loss, Custom), linear=linear)


def separate_output(few: Few) -> Tensor | None:
    """The output of a few samples if samples do not mix, else None."""
    problem, size = few.problem, few.batch.size
    if not isinstance(few.output, Tensor) or few.output.ndim == 0 or len(few.output) != size:
        return None
    together = few.output.detach()
    if few.plain:
        return together
    parts = [slice(0, 1), slice(1, size)] if size > 1 else [slice(0, 1)]
    try:
        with twice_differentiable(), torch.no_grad():
            apart = [problem.output(few.leaves, take(few.given, which)) for which in parts]
    # a model for one batch size only
    except (RuntimeError, ValueError, IndexError, AssertionError):
        return None
    if [z.shape for z in apart] != [together[which].shape for which in parts]:
        return None
    pair = (torch.cat(apart) - together, together)
    norms = torch.stack([torch.linalg.vector_norm(z, math.inf) for z in pair])
    gap, scale = norms.tolist()
    return together if gap <= linearise.tolerance(problem) * scale else None


def trusted_layers(few: Few) -> Trusted:
    """Which layers give the gradient of a random mix of the outputs, sample by sample.

    Agreement in numbers guards against what modules do not show: hooks, inputs without the batch
    first. With a mix u_i a layer's form gives Σ_i J_iᵀu_i, and with d_i u_i the signal of sample i
    is d_i times what it was. Both come back as factors will, and are compared with what the engine
    gives: together, which leaves out hooks and may be wrong where torch's rules are, or else one
    after the other; so too where a layer is dead in these samples, which shows nothing.
    """
    part = few.part
    if part is None:
        return Trusted(set(), 0)
    width = sum(call.width for found in part.calls.values() for call in found) // few.batch.size
    if few.plain or not part.layered:
        return Trusted(part.layered, width)
    with twice_differentiable():
        together = _agreeing(few, part, True)
        apart = part.layered if together == part.layered else _agreeing(few, part, False)
    return Trusted(together, width) if len(together) >= len(apart) else Trusted(apart, width, False)


def _agreeing(few: Few, part: Part, together: bool) -> set[str]:
    """The parameters of layers whose signals and gradients are those of the engine."""
    mixed, edges = few.mixed(), [call.left for call in part.layers.values()]
    # d_i, exact, whatever they multiply
    powers = 2.0 ** torch.arange(len(few.output), device=few.output.device)

    def scaled(signal: Tensor) -> Tensor:
        each = powers.to(signal.dtype).reshape(-1, *[1] * (signal.ndim - 1))
        return torch.stack([signal, signal * each])

    nodes = part.nodes if together else None
    back = pull_signals([few.output], edges, [scaled(mixed.mix)], nodes)
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for (prefix, call), signals in zip(part.layers.items(), back, strict=True):
        if signals is not None and prefix in mixed.signals:
            delta = mixed.signals[prefix].detach()
            pairs[f"{prefix}."] = (torch.cat(signals), scaled(delta))
            for key, said in gradients(call, delta).items():
                name = full_name(prefix, key)
                if name in mixed.slopes:
                    pairs[name] = (said, mixed.slopes[name].detach())
    if not pairs:
        return set()
    own = [pair[0] for pair in pairs.values()]
    slopes = [slope.to(like.dtype) for like, slope in pairs.values()]
    norms = torch._foreach_norm([*torch._foreach_sub(own, slopes), *slopes])
    gaps, sizes = torch.stack(norms).view(2, -1).tolist()  # all read at once
    allowed, rows = linearise.tolerance(few.problem), zip(pairs, gaps, sizes, strict=True)
    # where nothing comes back in these samples, nothing is seen of what others would have
    close = {
        name
        for name, gap, size in rows
        if gap <= allowed * size and (size > 0 or not (together and name.endswith(".")))
    }
    return {name for name in part.layered if name in close and f"{owner(name)}." in close}


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

LINEAR, IN_PLACE = frozenset(_LINEAR.split()), frozenset(_IN_PLACE.split())
FACTORS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(_PRODUCTS.split(), (0, 1)),
    **dict.fromkeys(_ADDED_PRODUCTS.split(), (1, 2)),
    "Trilinear": (0, 1, 2),
}


@dataclass(frozen=True)
class ModelForm:
    """``curved``: why the output may not be piecewise linear in single weights, or "".

    ``refused``: why not even up to the smooth activations, the nodes ``bends``. ``columns``: the
    signals that activations take.
    """

    curved: str
    refused: str
    bends: tuple[Any, ...] = ()
    columns: int = 0


@torch.enable_grad()
def form_of(few: Few) -> ModelForm:
    """The form of the model on a few samples, with checks by numbers beside the graph's."""
    problem, leaves, part, output = few.problem, few.leaves, few.part, few.output
    reason = few.failed
    for name, layer in () if problem.model is None else problem.model.named_modules():
        if isinstance(layer, BATCH_NORMS) and (layer.training or layer.running_mean is None):
            reason = f"{name or type(layer).__name__} normalises by the statistics of its batch"
            break
    if not reason and not isinstance(output, Tensor):
        reason = not_one_tensor(output)
    if reason or part is None:
        return no_form(reason)
    form = form_of_graph(problem, leaves, part)
    if form.refused or part.plain:
        return form
    with twice_differentiable():
        # the node of a write in place into part of a tensor does not say what was written
        if "CopySlices" in map(kind_of, part.nodes):
            with _Writes() as writes:
                problem.output(leaves, few.given)
            others = sorted(writes.names - IN_PLACE)
            reason = f"{others[0]} writes in place into part of a tensor" if others else ""
        if not reason and not form.bends:
            reason = _bend(few)
    return no_form(reason) if reason else form


def form_of_graph(problem: Problem, leaves: Leaves, part: Part) -> ModelForm:
    """What is known from the graph of this output alone."""
    nodes = part.nodes
    if part.straight:
        return ModelForm("", "")
    if log_softmax_dimension(problem, part.batch, part.output) is not None:
        # cross-entropy does not feel a last log-softmax: start at the logits
        nodes = list(nodes_below([part.output.grad_fn.next_functions[0][0]]))
    names = {id(leaf): name for name, leaf in leaves.items()}
    # the parameters below each node
    below: dict[Any, frozenset[str]] = {None: frozenset()}
    curved, bends, parts = "", [], False
    for node in nodes:
        kind = kind_of(node)
        if kind == "AccumulateGrad":
            below[node] = frozenset([names.get(id(node.variable), "a tensor that is no parameter")])
            continue
        sets = [below[child] for child, _ in node.next_functions]
        below[node] = frozenset().union(*sets)
        parts = parts or kind == "CopySlices"
        if any(made.dtype.is_complex for made in getattr(node, "_input_metadata", ())):
            # of which abs(z) is no piecewise linear function
            return no_form("it computes with complex numbers")
        reason = _objection(node, kind, sets)
        curved = curved or reason
        if kind in SMOOTH and len(sets) == 1:
            bends.append(node)
        elif reason:
            return no_form(reason)
    if bends and parts:  # which write was the smooth one cannot be told
        return no_form("beside smooth activations it writes in place into part of a tensor")
    return ModelForm(curved, "", tuple(bends))


def not_one_tensor(output: Any) -> str:
    """Why an output of several parts has no closed form."""
    return f"the model's output is a {type(output).__name__}, not one tensor"


def no_form(reason: str) -> ModelForm:
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


class _Writes(OperationWatch):
    """Notes the names of all operations done in place."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.rpartition("::")[2]
        if name.endswith("_"):
            self.names.add(name)
        return func(*args, **(kwargs or {}))


# Where operations have kinks: at 0, at ±3, at numbers given as arguments, where two inputs are
# equal, and where the largest of a window is not alone.
_AT_ZERO = frozenset(
    ["abs", "celu", "elu", "heaviside", "leaky_relu", "_prelu_kernel", "relu", "rrelu_with_noise"]
)
_AT_ZERO |= {"sgn", "sign"}
_AT_THREE = frozenset(["hardsigmoid", "hardswish"])
_COMPARISONS = frozenset(["ge", "gt", "le", "lt"])
_BETWEEN = _COMPARISONS | {"maximum", "minimum"}
_SHRINKS = frozenset(["hardshrink", "softshrink"])
_GIVEN = frozenset(["clamp", "clamp_max", "clamp_min", "hardtanh", "threshold"])
_GIVEN |= _COMPARISONS | _SHRINKS
_POOLS = frozenset(["max_pool2d_with_indices", "max_pool3d_with_indices"])
# the argument whose last dimension but one, or whose first entry, says how many terms are summed
_SUMS = {"addmm": 2, "baddbmm": 2, "bmm": 1, "convolution": 1, "linear": 1, "mm": 1}
NEAR = 2.0  # roundings of a sample's largest term, times √terms, that may cross a kink
EXACTLY = 0.5  # the margin of a number on the kink itself, as those are behind another kink


class Kinks(OperationWatch):
    """How far the numbers of each of ``count`` samples stay from the kinks of a model.

    ``margins`` (B,) are the least distances over what rounding may move a number by: below 1 the
    sample may be on the other side of a kink in exact arithmetic. Infinite where there is no kink.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.margins, self._terms = torch.full((count,), math.inf, device=device), 1
        # the largest terms of the last sum, which may cancel, and the largest ratio of these to
        # the sum so far: later layers pass the rounding on
        self._size = self._ratio = torch.zeros(count, device=device)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.rpartition("::")[2].rstrip("_")
        real = bool(args) and isinstance(args[0], Tensor) and args[0].is_floating_point()
        points: list[Any] = [0.0] if name in _AT_ZERO else []
        points += [-3.0, 3.0] if name in _AT_THREE else []
        if name in _GIVEN:
            numbers = args[1:3] or (0.5,)  # what the two kinds of shrinking do if nothing is given
            points = [given for given in numbers if isinstance(given, int | float)]
            points += [-given for given in points] if name in _SHRINKS else []
        if name in _BETWEEN and len(args) > 1 and isinstance(args[1], Tensor):
            points = [args[1]]
        for point in points if real else ():  # before, for it may be done in place
            self._note(args[0], (args[0] - point).abs_())
        out = func(*args, **(kwargs or {}))
        if name in _POOLS and real:
            distance = _lead_in_window(args[0], out[0], *args[1:5])
            # nothing passes the activations below a window of zeros
            self._note(args[0], torch.where(out[0] == 0, math.inf, distance))
        elif name in _SUMS:
            given, weight = args[_SUMS[name] - 1 : _SUMS[name] + 1]
            terms = weight.shape[-2] if name.endswith("mm") else weight[0].numel()
            self._terms, count = max(self._terms, terms), len(self.margins)
            if real and not any(part.numel() % count or 0 in part.shape for part in (given, out)):
                entered, left = (part.reshape(count, -1).abs().amax(dim=1) for part in (given, out))
                self._size = torch.maximum(entered * weight.abs().max(), self._ratio * left)
                self._ratio = torch.where(left > 0, self._size / left, self._ratio)
        return out

    def _note(self, entered: Tensor, distance: Tensor) -> None:
        """Take in the distances of some numbers from a kink."""
        count = len(self.margins)
        if any(0 in each.shape or each.numel() % count for each in (entered, distance)):
            return
        eps = torch.finfo(entered.dtype).eps * NEAR * math.sqrt(self._terms)
        rows, largest = distance.reshape(count, -1), entered.reshape(count, -1).abs().amax(dim=1)
        unit = eps * torch.maximum(largest, self._size.to(largest))
        least = rows.amin(dim=1)
        # rarely, and far slower; on a GPU the answer would take longer
        if entered.is_cuda or bool((least == 0).any()):
            least = torch.where(rows == 0, (EXACTLY * unit)[:, None], rows).amin(dim=1)
        self.margins = torch.fmin(self.margins, (least / unit).float())


def _lead_in_window(
    entered: Tensor,
    largest: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
) -> Tensor:
    """By how much the largest number of each window of a pooling exceeds the second."""
    dims = len(kernel)
    sizes = largest.shape[-dims:]
    steps, sides, gaps = stride or kernel, [*padding] * dims, [*dilation] * dims
    # the last windows may end beyond the input
    ends = [
        steps[i] * (sizes[i] - 1)
        + gaps[i] * (kernel[i] - 1)
        + 1
        - sides[i]
        - entered.shape[i - dims]
        for i in range(dims)
    ]
    if any(sides[:dims]) or max(ends) > 0:
        around = [size for i in reversed(range(dims)) for size in (sides[i], max(0, ends[i]))]
        entered = F.pad(entered, around, value=-math.inf)
    first, second = torch.full_like(largest, -math.inf), torch.full_like(largest, -math.inf)
    for place in product(*map(range, kernel)):
        starts = [gaps[i] * place[i] for i in range(dims)]
        where = [
            slice(start, start + steps[i] * (sizes[i] - 1) + 1, steps[i])
            for i, start in enumerate(starts)
        ]
        part = entered[..., *where]  # type: ignore[index]
        second = torch.maximum(second, torch.minimum(first, part))
        first = torch.maximum(first, part)
    return first - second


def _bend(few: Few) -> str:
    """Whether ∂²(uᵀz)/∂θ_k² v_k ≠ 0 for a parameter θ_k, with u and v_k random; "" if not.

    The parameters of a layer are looked at together first: mostly it is linear in them together.
    """
    slopes = few.mixed(True).slopes
    live = {name: slope for name, slope in slopes.items() if slope.requires_grad}
    # many numbers, of which none cross to the GPU
    rng = generator(0, "piecewise", device=few.output.device)
    layers: dict[str, list[str]] = {}
    for name in live:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    several = [names for names in layers.values() if len(names) > 1]
    sizes = _bends_along(several, few.leaves, live, rng)
    bent = {name for name, (size, _) in sizes.items() if size}
    unsure = [names for names in layers.values() if len(names) == 1 or bent.intersection(names)]
    alone = [[name] for names in unsure for name in names]
    for name, (size, allowed) in _bends_along(alone, few.leaves, live, rng).items():
        if size > allowed:
            return f"its second derivative in {name} does not vanish"
    return ""


def _bends_along(
    groups: list[list[str]], leaves: Leaves, slopes: Leaves, rng: torch.Generator
) -> dict[str, tuple[float, float]]:
    """How much each slope changes along a random direction of its group, and by rounding.

    All groups are read at once, for every reading waits for the GPU.
    """
    names = [name for group in groups for name in group]
    if not names:
        return {}
    drawn = random_like([leaves[name] for name in names], rng)
    directions = dict(zip(names, drawn, strict=True))
    bends: dict[str, Tensor] = {}
    for group in groups:
        points, moved, along = ([of[name] for name in group] for of in (leaves, slopes, directions))
        try:
            found = pull_back(moved, points, along, retain_graph=True, allow_unused=True)
        # an operation that can be differentiated only once
        except (RuntimeError, NotImplementedError):
            continue
        bends |= {name: bend for name, bend in zip(group, found, strict=True) if bend is not None}
    if not bends:
        return {}
    parts = [of[name].detach() for of in (bends, slopes, directions) for name in bends]
    rows = zip(*torch.stack(torch._foreach_norm(parts)).view(3, -1).tolist(), strict=True)
    return {
        name: (bend, torch.finfo(leaves[name].dtype).eps * slope * length)
        for name, (bend, slope, length) in zip(bends, rows, strict=True)
    }
