"""What KFAC is made of: layers and their weight sharing, input and output-gradient moments,
per-sample diagonals.

A layer's block is written as a matrix [W | b] of m outputs × n inputs (the bias as one more input
that is always 1), in g groups: shape (g, m, n), with g = 1 but for grouped convolutions. A layer
applied at R positions, as a convolution or a linear layer on a sequence, gives for one sample and
one vector s at the output the gradient D = Σ_r g_r a_rᵀ.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lambdahat._core.check import describe, message, require
from lambdahat._core.device import pull_back
from lambdahat._core.progress import report
from lambdahat._core.rng import generator
from lambdahat.operators import linearise
from lambdahat.operators.linearise import CONVOLUTIONS
from lambdahat.problem import Problem
from lambdahat.problem.batches import Batch, as_tree, rows_of, take
from lambdahat.problem.evaluators import Parameters
from lambdahat.problem.losses import each_diagonal_factor

CHUNK_ELEMENTS = 1 << 24
PROBE_TOLERANCE = 0.05
# backward passes for a batch beyond which the exact Fisher is not what anyone would wait for
MOST_PASSES = 1 << 14


@dataclass(frozen=True)
class FactoredLayer:
    """A linear or convolution layer; ``indices`` (g, m, n) place its block in the flat vector."""

    name: str
    module: Any
    names: tuple[str, ...]
    indices: Tensor

    def outputs(self, y: Tensor) -> Tensor:
        """The layer's output, or a gradient of that shape, as (b, R, g, m)."""
        if isinstance(self.module, nn.Linear):
            return y.reshape(y.shape[0], -1, 1, y.shape[-1])
        groups = self.module.groups
        return y.flatten(2).transpose(1, 2).reshape(y.shape[0], -1, groups, y.shape[1] // groups)

    def inputs(self, x: Tensor, y: Tensor) -> Tensor:
        """What each output row is linear in, (b, R, g, n); ``y`` is of the output's shape."""
        parts, kinds = [], {name.rpartition(".")[2] for name in self.names}
        if "weight" in kinds:
            linear = isinstance(self.module, nn.Linear)
            flat = x.reshape(x.shape[0], -1, 1, x.shape[-1]) if linear else patches(x, self.module)
            parts.append(flat)
        if "bias" in kinds:
            parts.append(torch.ones_like(self.outputs(y)[..., :1]))
        return torch.cat(parts, dim=-1)

    def chunk(self, y: Tensor) -> int:
        """Samples at a time, to bound the rows of inputs and the per-sample gradients."""
        groups, width, depth = self.indices.shape
        rows = y[0].numel() // (groups * width)
        return max(1, CHUNK_ELEMENTS // (groups * depth * max(rows, width)))


def patches(x: Tensor, module: Any) -> Tensor:
    """The inputs under the kernel at each position, (b, R, groups, channels/groups · kernel)."""
    count = len(module.kernel_size)
    x = linearise.windows(module, x).unflatten(1, (module.groups, -1))
    # (b, g, c, positions…, kernel…) to (b, positions…, g, c, kernel…)
    order = [0, *range(3, 3 + count), 1, 2, *range(3 + count, 3 + 2 * count)]
    return x.permute(order).flatten(1, count).flatten(3)


@dataclass(frozen=True)
class FactoredCall:
    """One application of a layer in a forward pass."""

    layer: FactoredLayer
    x: Tensor
    y: Tensor


@contextmanager
def traced_calls(layers: Sequence[FactoredLayer]) -> Iterator[list[FactoredCall]]:
    """Every call of the layers inside the block, in order; no hook outlives it."""
    calls: list[FactoredCall] = []
    handles: list[Any] = []

    def hook(layer: FactoredLayer, _: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        x = args[0] if args else kwargs["input"]
        if x.ndim < 2 + len(getattr(layer.module, "kernel_size", ())):
            return output  # without a batch there are no rows: the layer then fails the probe
        calls.append(FactoredCall(layer, x.detach(), output))
        return output.clone()  # an activation in place must not touch what was traced

    try:
        for layer in layers:
            watch = partial(hook, layer)
            handles.append(layer.module.register_forward_hook(watch, with_kwargs=True))
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def join_outputs(output: Any) -> Tensor:
    """A model's output, or what has its structure, as one tensor with the samples first."""
    if isinstance(output, Tensor):
        return output
    tensors = (leaf for leaf in tree_leaves(as_tree(output)) if isinstance(leaf, Tensor))
    parts = [leaf for leaf in tensors if leaf.is_floating_point()]
    if not parts or not all(part.ndim > 0 and len(part) == len(parts[0]) for part in parts):
        expected = "be tensors with a row for each sample for KFAC"
        raise TypeError(message("the model's output", expected, output))
    return torch.cat([part.reshape(len(part), -1) for part in parts], dim=1)


@dataclass(frozen=True)
class Fisher:
    """Which vectors s at the output make up the matrix: F = mean_i Σ_k Jᵢᵀ s_k s_kᵀ Jᵢ."""

    kind: str
    samples: int
    seed: int

    def stream(self) -> torch.Generator:
        """The labels' stream, from its beginning: every pass over the data draws the same."""
        return generator(self.seed, "kfac", "labels")

    def vectors(
        self, problem: Problem, output: Any, batch: Batch, rng: torch.Generator
    ) -> Iterator[Tensor]:
        """The vectors s_k of one batch, one by one, of the shape of the joined output."""
        loss, target = problem.loss_function, problem.target(batch)
        fixed = tree_map(lambda z: z.detach() if isinstance(z, Tensor) else z, output)
        assert loss is not None

        def joined(parts: list[Tensor]) -> Tensor:
            return parts[0] if isinstance(output, Tensor) else join_outputs(parts)

        if self.kind == "empirical":
            return iter([joined(linearise.empirical_residuals(problem)(fixed, batch)[0])])
        if self.kind == "monte_carlo":
            if not loss.predictive:
                raise ValueError(
                    f'kind must be "exact" or "empirical" for the loss {loss.name!r}, got'
                    ' "monte_carlo"; it has no distribution to draw targets from'
                )
            draws = (loss.random_factors(fixed, target, rng) for _ in range(self.samples))
            root = math.sqrt(self.samples)
            return (joined(draw) / root for draw in draws)
        diagonal = loss.fisher(fixed, target)
        if diagonal is not None:
            weights = joined(diagonal)
            count, each = weights[0].numel(), each_diagonal_factor(weights)
        else:
            closed = loss.each_factor(fixed, target)
            count, each = _eigen_factors(problem, fixed, batch) if closed is None else closed
        if count > MOST_PASSES:
            raise ValueError(
                'kind must be "monte_carlo" or "empirical" where "exact" takes more than'
                f' {MOST_PASSES} backward passes for a batch, got "exact", which takes {count}'
            )
        return each


def _eigen_factors(problem: Problem, output: Any, batch: Batch) -> tuple[int, Iterator[Tensor]]:
    """K and factors s_k (B, …) with Σ_k s_k s_kᵀ = M, for a custom loss that is convex here."""
    loss = problem.loss_function
    assert loss is not None
    cure = 'use kind="empirical", or a named loss'
    if not (isinstance(output, Tensor) and output.ndim > 0 and len(output) == batch.size):
        raise ValueError(
            f"the model's output must be one tensor for KFAC with the loss {loss.name!r}, got"
            f" {describe(output)}; {cure}"
        )
    width = output[0].numel()
    if width > linearise.WIDEST_CUSTOM:
        raise ValueError(
            f'kind must be "empirical" for the loss {loss.name!r}, which has no closed form, of'
            f' more than {linearise.WIDEST_CUSTOM} outputs, got "exact" of {width} outputs; {cure}'
        )
    try:
        factors, signs = linearise.eigen_factors(problem, output, batch)
    except linearise.CoupledLoss as error:
        expected = f"loss must be a sum over samples for KFAC, got {loss.name!r}; {cure}"
        raise ValueError(expected) from error
    sizes = factors.reshape(*signs.shape, -1).square().sum(dim=2)
    if not bool((sizes * (signs < 0)).max() <= linearise.tolerance(problem) * sizes.max()):
        raise ValueError(
            f"loss must be convex in the model's output for KFAC, got {loss.name!r}, which is not"
            f" here; {cure}"
        )
    positive = (signs > 0).reshape(*signs.shape, *[1] * (output.ndim - 1))
    return width, iter(torch.where(positive, factors, 0.0))


@dataclass(frozen=True)
class Pass:
    """One batch after its forward pass; ``vectors`` can be gone through once."""

    weight: float
    batch: Batch
    vectors: Iterator[Tensor]
    output: Tensor
    calls: list[FactoredCall]

    def gradients(self, vector: Tensor) -> tuple[Tensor, ...]:
        """The gradients of Σ_i s_iᵀ zᵢ at the outputs of all calls, for a vector s."""
        ends = [call.y for call in self.calls]
        if not ends:
            return ()
        return pull_back([self.output], ends, [vector], retain_graph=True, materialize_grads=True)


def passes(
    problem: Problem, layers: Sequence[FactoredLayer], fisher: Fisher, task: str
) -> Iterator[Pass]:
    """The forward pass of each batch with the calls of ``layers`` traced."""
    values, rng = problem.named(problem.vector), fisher.stream()
    total = len(problem.batches)
    for done, (weight, batch) in enumerate(problem.weighted()):
        parameters = {name: value.detach().requires_grad_() for name, value in values.items()}
        with traced_calls(layers) as calls:
            output = as_tree(problem.output(parameters, batch))
        vectors = fisher.vectors(problem, output, batch, rng)
        yield Pass(weight, batch, vectors, join_outputs(output), calls)
        report(task, done + 1, total)


def find_layers(problem: Problem) -> tuple[list[FactoredLayer], dict[str, str]]:
    """The layers in Kronecker form, and for every other parameter the reason why not.

    On the first batch, a layer's gradient must be Σ_r g_r a_rᵀ over its traced calls, with each
    row r of one sample. Shared weights, other subclasses and inputs that all samples share fail.
    """
    model, slices = problem.model or nn.Module(), problem.space.slices  # a function has no layers
    aliases: dict[int, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(tensor), []).append(name)
    tied = {names[0] for names in aliases.values() if len(names) > 1}
    none = "not in a linear or convolution layer"
    reasons = {name: "tied" if name in tied else none for name in problem.space.names}
    candidates = []
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Linear, *CONVOLUTIONS)):
            continue
        own = [f"{name}.{kind}" if name else kind for kind in ("weight", "bias")]
        kept = tuple(full for full in own if full in slices and full not in tied)
        if kept:
            groups = getattr(module, "groups", 1)
            where = [torch.arange(slices[full].start, slices[full].stop) for full in kept]
            parts = [part.reshape(groups, len(module.weight) // groups, -1) for part in where]
            indices = torch.cat(parts, dim=-1).to(problem.device)
            candidates.append(FactoredLayer(name, module, kept, indices))
    unfit = _probe(problem, candidates)
    for layer in candidates:
        for name in layer.names:
            if layer.name in unfit:
                reasons[name] = unfit[layer.name]
            else:
                del reasons[name]
    return [layer for layer in candidates if layer.name not in unfit], reasons


def _probe(problem: Problem, layers: Sequence[FactoredLayer]) -> dict[str, str]:
    """The layers without Kronecker form on the first batch, each with the reason."""
    values = problem.named(problem.vector)
    leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
    with traced_calls(layers) as calls:
        output = join_outputs(problem.output(leaves, problem.batches.first()))
    first = torch.randn(output.shape, generator=generator(0, "kfac", "probe")).to(output)
    rest = first.clone()
    first[1:], rest[:1] = 0.0, 0.0  # the first sample alone, and all the others
    inputs = [*(call.y for call in calls), *leaves.values()]
    pulled = [
        pull_back([output], inputs, [v], retain_graph=True, materialize_grads=True)
        for v in (first, rest)
    ]
    grads = [g + h for g, h in zip(*pulled, strict=True)]
    flat = problem.space.flatten(dict(zip(leaves, grads[len(calls) :], strict=True)))
    shared = set()
    for call, g, h in zip(calls, *pulled, strict=False):
        both = [(call.layer.outputs(part) != 0).any(-1) for part in (g, h)]
        if bool((both[0] & both[1]).any()):
            shared.add(call.layer.name)
    unfit = {}
    for layer in layers:
        pairs = zip(calls, grads, strict=False)
        own = [(call, grad) for call, grad in pairs if call.layer is layer]
        true = flat[layer.indices]
        if not own or not (_implied(own) - true).norm() <= PROBE_TOLERANCE * true.norm():
            unfit[layer.name] = "not used through its layer alone"
        elif layer.name in shared:
            unfit[layer.name] = "one output for several samples"
    return unfit


def _implied(calls: Sequence[tuple[FactoredCall, Tensor]]) -> Tensor:
    """Σ_r g_r a_rᵀ over all calls of one layer, (g, m, n)."""
    total = torch.zeros((), device=calls[0][1].device)
    for call, grad in calls:
        layer, size = call.layer, call.layer.chunk(call.y)
        for x, g in zip(call.x.split(size), grad.split(size), strict=True):
            total = total + torch.einsum("brgm,brgn->gmn", layer.outputs(g), layer.inputs(x, g))
    return total


def moments(
    problem: Problem,
    layers: Sequence[FactoredLayer],
    loose: Sequence[str],
    fisher: Fisher,
    sharing: str,
    dtype: torch.dtype,
) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor], set[str]]:
    """The factors (A, G) of each layer, the exact Fisher diagonal of the ``loose`` parameters, and
    who shares weights.

    With a_r the input and g_kr the output gradient of a layer at position r of a sample, "expand"
    has A = mean over samples and positions of a_r a_rᵀ, (g, n, n), and G = mean over samples of Σ_k
    Σ_r g_kr g_krᵀ, (g, m, m), which is Grosse & Martens 2016 for convolutions. "reduce" has the
    same of the one row Σ_r a_r/R and Σ_r g_kr of a sample (Eschenhagen et al. 2023). The last are
    the layers that are applied at several positions or several times.
    """
    factors = {}
    for layer in layers:
        groups, width, depth = layer.indices.shape
        A = torch.zeros(groups, depth, depth, dtype=dtype, device=problem.device)
        factors[layer.name] = A, A.new_zeros(groups, width, width)
    values = problem.named(problem.vector)
    diagonals = {name: torch.zeros_like(values[name], dtype=dtype) for name in loose}
    shared: set[str] = set()
    for step in passes(problem, layers, fisher, "kfac"):
        calls = _by_layer(step.calls)
        rows = {
            name: sum(call.layer.outputs(call.y).shape[:2].numel() for call in own)
            for name, own in calls.items()
        }
        several = {name for name, count in rows.items() if count > step.batch.size}
        shared |= several
        reduced = several if sharing == "reduce" else set()
        for name, own in calls.items():
            if name in reduced:
                _require_samples_first(own, step.batch, 'sharing="reduce"', 'sharing="expand"')
            # by samples, not by weights in the loss: the mean over inputs is the same however they
            # are batched
            count = step.batch.size if name in reduced else rows[name]
            share = step.batch.size / problem.num_samples / count
            for a in _input_rows(own, name in reduced, step.batch.size / rows[name], dtype):
                factors[name][0].add_(_gram(a), alpha=share)
        kept: list[Tensor] = []
        for vector in step.vectors:
            for name, grads in _by_layer(step.calls, step.gradients(vector)).items():
                for g in _gradient_rows(calls[name][0].layer, grads, name in reduced, dtype):
                    factors[name][1].add_(_gram(g), alpha=step.weight / step.batch.size)
            if loose:
                kept.append(vector)
                if len(kept) * vector.numel() >= CHUNK_ELEMENTS:
                    _add_squares(diagonals, problem, step, kept, dtype)
                    kept = []
        if kept:
            _add_squares(diagonals, problem, step, kept, dtype)
    return factors, diagonals, shared


def _input_rows(
    calls: Sequence[FactoredCall], reduced: bool, scale: float, dtype: torch.dtype
) -> Iterator[Tensor]:
    """The inputs a_r of all calls, (rows, g, n) at a time, or their means over positions (``scale``
    1/R).
    """
    total: list[Tensor] = []
    for call in calls:
        layer, size = call.layer, call.layer.chunk(call.y)
        pairs = zip(call.x.split(size), call.y.detach().split(size), strict=True)
        parts = (layer.inputs(x, y).to(dtype) for x, y in pairs)
        if reduced:
            total.append(torch.cat([part.sum(dim=1) for part in parts]))
        else:
            yield from (part.flatten(0, 1) for part in parts)
    if reduced:
        yield torch.stack(total).sum(dim=0) * scale


def _gradient_rows(
    layer: FactoredLayer, grads: Sequence[Tensor], reduced: bool, dtype: torch.dtype
) -> list[Tensor]:
    """The output gradients of all calls, (rows, g, m) each, or summed over positions."""
    parts = [layer.outputs(grad).to(dtype) for grad in grads]
    if reduced:
        return [torch.stack([part.sum(dim=1) for part in parts]).sum(dim=0)]
    return [part.flatten(0, 1) for part in parts]


def _add_squares(
    diagonals: dict[str, Tensor],
    problem: Problem,
    step: Pass,
    vectors: Sequence[Tensor],
    dtype: torch.dtype,
) -> None:
    squares = per_sample_squares(
        problem, tuple(diagonals), step.batch, torch.stack(list(vectors)), dtype
    )
    for name, square in squares.items():
        diagonals[name].add_(square, alpha=step.weight / step.batch.size)


def _require_samples_first(
    calls: Sequence[FactoredCall], batch: Batch, what: str, cure: str
) -> None:
    expected = f"have the {batch.size} samples first"
    cure = f"{what} needs it: use {cure}, or put the batch first"
    for call in calls:
        first = call.x.shape[0] == call.y.shape[0] == batch.size
        require(first, f"the input of layer {call.layer.name!r}", expected, call.x, cure)


def _gram(rows: Tensor) -> Tensor:
    """Σ_r row rowᵀ for rows (r, g, n), as (g, n, n)."""
    return torch.einsum("rgi,rgj->gij", rows, rows)


def second_moments(
    problem: Problem,
    layers: Sequence[FactoredLayer],
    bases: dict[str, tuple[Tensor, Tensor]],
    fisher: Fisher,
) -> dict[str, Tensor]:
    """The Fisher's diagonal in each Kronecker eigenbasis: mean_i Σ_k (U_Gᵀ D_ik U_A)², (g, m, n).

    D_ik = Σ_r g_r a_rᵀ is the gradient of one sample (George et al. 2018).
    """
    totals = {layer.name: bases[layer.name][0].new_zeros(layer.indices.shape) for layer in layers}
    for step in passes(problem, layers, fisher, "ekfac"):
        _require_samples_first(step.calls, step.batch, "EKFAC", "kfac(problem)")
        groups = _by_layer(step.calls)
        squares = {}
        for name, (call, *others) in groups.items():
            # a layer that is applied once, at one position: (U_Aᵀ a)² of each sample, (b, g, n)
            if not others and call.layer.outputs(call.y).shape[1] == 1:
                right = bases[name][0]
                a = call.layer.inputs(call.x, call.y.detach())[:, 0].to(right)
                squares[name] = torch.einsum("bgi,gij->bgj", a, right).square()
        for vector in step.vectors:
            found = _by_layer(step.calls, step.gradients(vector))
            for name, calls in groups.items():
                right, left = bases[name]
                # one position: the square of an outer product is the outer product of squares
                if name in squares:
                    g = calls[0].layer.outputs(found[name][0])[:, 0].to(left)
                    g = torch.einsum("bgi,gij->bgj", g, left).square()
                    total = torch.einsum("bgm,bgn->gmn", g, squares[name])
                else:
                    total = _projected_squares(calls, found[name], right, left)
                totals[name].add_(total, alpha=step.weight / step.batch.size)
    return totals


def _by_layer(
    calls: Sequence[FactoredCall], items: Sequence[Any] | None = None
) -> dict[str, list[Any]]:
    """The calls, or what belongs to each, by the name of their layer."""
    out: dict[str, list[Any]] = {}
    for call, item in zip(calls, calls if items is None else items, strict=True):
        out.setdefault(call.layer.name, []).append(item)
    return out


def _projected_squares(
    calls: Sequence[FactoredCall], grads: Sequence[Tensor], right: Tensor, left: Tensor
) -> Tensor:
    """Σ_i (U_Gᵀ D_i U_A)² over the samples of a batch, for all calls of one layer."""
    layer, size = calls[0].layer, min(call.layer.chunk(call.y) for call in calls)
    total = right.new_zeros(layer.indices.shape)
    for start in range(0, len(grads[0]), size):
        part, pairs = slice(start, start + size), zip(calls, grads, strict=True)
        g = torch.cat([layer.outputs(grad[part]) for grad in grads], dim=1).to(right)
        rows = [layer.inputs(call.x[part], grad[part]) for call, grad in pairs]
        a = torch.cat(rows, dim=1).to(right)
        total += (left.mT @ torch.einsum("brgm,brgn->bgmn", g, a) @ right).square().sum(dim=0)
    return total


def per_sample_squares(
    problem: Problem, names: Sequence[str], batch: Batch, vectors: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Σ_i Σ_k (J_iᵀ s_ki)² of the named parameters: by vmap, or sample by sample."""
    values = {name: value.detach() for name, value in problem.named(problem.vector).items()}
    free = {name: values.pop(name) for name in list(values) if name in names}
    size = max(1, CHUNK_ELEMENTS // (len(vectors) * sum(value.numel() for value in free.values())))

    def one(sample: Batch, own: Tensor) -> dict[str, Tensor]:
        def output(chosen: Parameters) -> Tensor:
            return join_outputs(problem.output({**values, **chosen}, sample))

        pull = torch.func.vjp(output, free)[1]
        grads = [pull(vector.unsqueeze(0))[0] for vector in own.unbind(0)]
        return {k: torch.stack([g[k].to(dtype) for g in grads]).square().sum(dim=0) for k in free}

    try:
        out = {name: torch.zeros_like(value, dtype=dtype) for name, value in free.items()}
        for part in torch.arange(batch.size, device=problem.device).split(size):
            columns, single = rows_of(take(batch, part))
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="There is a performance drop")
                each = torch.func.vmap(lambda own, *rows, single=single: one(single(*rows), own))
                squares = each(vectors[:, part].transpose(0, 1), *columns)
            for name, square in squares.items():
                out[name] += square.sum(dim=0)
        return out
    # data-dependent control flow, an operation without a batching rule
    except (RuntimeError, NotImplementedError):
        out = {name: torch.zeros_like(value, dtype=dtype) for name, value in free.items()}
    for part in torch.arange(batch.size, device=problem.device).split(1):
        leaves = {name: value.detach().requires_grad_() for name, value in free.items()}
        output = join_outputs(problem.output({**values, **leaves}, take(batch, part)))
        points = list(leaves.values())
        for vector in vectors[:, part].unbind(0):
            grads = pull_back([output], points, [vector], retain_graph=True, allow_unused=True)
            for name, grad in zip(leaves, grads, strict=True):
                if grad is not None:
                    out[name] += grad.to(dtype).square()
    return out
