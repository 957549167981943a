"""What KFAC is made of: layers and their weight sharing, input and output-gradient moments, per-sample diagonals.

A layer's block is written as a matrix [W | b] of m outputs × n inputs (the bias as one more input that is always 1),
in g groups: shape (g, m, n), with g = 1 but for grouped convolutions. A layer applied at R positions, as a convolution
or a linear layer on a sequence, gives for one sample and one vector s at the output the gradient D = Σ_r g_r a_rᵀ.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lambdahat._check import require
from lambdahat._progress import report
from lambdahat._rng import generator
from lambdahat.batches import Batch, rows_of, take
from lambdahat.evaluators import Parameters
from lambdahat.operators.layer_squares import borders
from lambdahat.problem import Problem

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
CHUNK_ELEMENTS = 1 << 24
PROBE_TOLERANCE = 0.05


@dataclass(frozen=True)
class Layer:
    """A linear or convolution layer in Kronecker form; ``indices`` (g, m, n) place its block in the flat vector."""

    name: str
    module: Any
    names: tuple[str, ...]
    indices: Tensor

    @property
    def least_dimensions(self) -> int:
        """Dimensions of an input that has a batch."""
        return 2 if isinstance(self.module, nn.Linear) else 2 + len(self.module.kernel_size)

    def outputs(self, y: Tensor) -> Tensor:
        """The layer's output, or a gradient of that shape, as (b, R, g, m)."""
        if isinstance(self.module, nn.Linear):
            return y.reshape(y.shape[0], -1, 1, y.shape[-1])
        groups = self.module.groups
        return y.flatten(2).transpose(1, 2).reshape(y.shape[0], -1, groups, y.shape[1] // groups)

    def inputs(self, x: Tensor, y: Tensor) -> Tensor:
        """What each output row is linear in, (b, R, g, n); ``y`` is of the output's shape."""
        parts = []
        if self._has("weight"):
            linear = isinstance(self.module, nn.Linear)
            parts.append(x.reshape(x.shape[0], -1, 1, x.shape[-1]) if linear else patches(x, self.module))
        if self._has("bias"):
            parts.append(torch.ones_like(self.outputs(y)[..., :1]))
        return torch.cat(parts, dim=-1)

    def chunk(self, y: Tensor) -> int:
        """Samples at a time, so that neither the rows of inputs nor the per-sample gradients grow large."""
        groups, width, depth = self.indices.shape
        rows = y[0].numel() // (groups * width)
        return max(1, CHUNK_ELEMENTS // (groups * depth * max(rows, width)))

    def _has(self, kind: str) -> bool:
        return any(name.rpartition(".")[2] == kind for name in self.names)


def patches(x: Tensor, module: Any) -> Tensor:
    """The inputs under the kernel at each position, (b, R, groups, channels/groups · kernel), in 1 to 3 dimensions."""
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    x = F.pad(x, borders(module), mode=mode)
    for axis, (size, step, gap) in enumerate(zip(module.kernel_size, module.stride, module.dilation, strict=True)):
        x = x.unfold(axis + 2, (size - 1) * gap + 1, step)[..., ::gap]
    count = len(module.kernel_size)
    x = x.unflatten(1, (module.groups, -1))
    # (b, g, c, positions…, kernel…) to (b, positions…, g, c, kernel…)
    order = [0, *range(3, 3 + count), 1, 2, *range(3 + count, 3 + 2 * count)]
    return x.permute(order).flatten(1, count).flatten(3)


@dataclass(frozen=True)
class Call:
    """One application of a layer in a forward pass."""

    layer: Layer
    x: Tensor
    y: Tensor


@contextmanager
def recording(layers: Sequence[Layer]) -> Iterator[list[Call]]:
    """Every call of the layers inside the block, in order; no hook outlives it."""
    calls: list[Call] = []
    handles: list[Any] = []

    def watch(layer: Layer) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
            x = args[0] if args else kwargs["input"]
            if x.ndim < layer.least_dimensions:
                return output  # without a batch there are no rows: the layer then fails the probe
            calls.append(Call(layer, x.detach(), output))
            return output.clone()  # an activation in place must not touch what was recorded

        return hook

    try:
        handles += [layer.module.register_forward_hook(watch(layer), with_kwargs=True) for layer in layers]
        yield calls
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Fisher:
    """Which vectors s at the output make up the matrix: F = mean_i Σ_k Jᵢᵀ s_k s_kᵀ Jᵢ."""

    kind: str
    samples: int
    seed: int

    def stream(self) -> torch.Generator:
        """The labels' stream, from its beginning: every pass over the data draws the same."""
        return generator(self.seed, "kfac", "labels")

    def vectors(self, problem: Problem, output: Tensor, batch: Batch, rng: torch.Generator) -> list[Tensor]:
        """The vectors s_k (B, …) of one batch."""
        loss, target, output = problem.loss_function, problem.target(batch), output.detach()
        assert loss is not None
        if self.kind == "empirical":
            leaf = output.requires_grad_()
            return [batch.size * torch.autograd.grad(problem.output_loss(leaf, batch), leaf)[0]]
        if self.kind == "monte_carlo":
            root = math.sqrt(self.samples)
            return [loss.random_factor(output, target, rng) / root for _ in range(self.samples)]
        factors = loss.factors(output, target)
        require(factors is not None, "kind", f'be "monte_carlo" or "empirical" for the loss {loss.name!r} here',
                '"exact"', "its Hessian at these outputs has no closed-form factors")  # fmt: skip
        assert factors is not None
        return list(factors.unbind(0))


@dataclass(frozen=True)
class Pass:
    """One batch after its forward pass."""

    weight: float
    batch: Batch
    vectors: list[Tensor]
    output: Tensor
    calls: list[Call]

    def gradients(self) -> Iterator[tuple[Tensor, ...]]:
        """For each vector s_k, the gradients of Σ_i s_kᵢᵀ zᵢ at the outputs of all calls."""
        for vector in self.vectors if self.calls else ():
            yield torch.autograd.grad(self.output, [call.y for call in self.calls], vector, retain_graph=True,
                                      materialize_grads=True)  # fmt: skip


def passes(problem: Problem, layers: Sequence[Layer], fisher: Fisher, task: str) -> Iterator[Pass]:
    """The forward pass of each batch with the calls of ``layers`` recorded."""
    values, rng = problem.named(problem.vector), fisher.stream()
    total = len(problem.batches)
    for done, (weight, batch) in enumerate(problem.weighted()):
        parameters = {name: value.detach().requires_grad_() for name, value in values.items()}
        with recording(layers) as calls:
            output = problem.output(parameters, batch)
        yield Pass(weight, batch, fisher.vectors(problem, output, batch, rng), output, calls)
        report(task, done + 1, total)


def find_layers(problem: Problem) -> tuple[list[Layer], dict[str, str]]:
    """The layers in Kronecker form, and for every other parameter the reason why it is not in one.

    A layer qualifies when its parameters' gradient is Σ_r g_r a_rᵀ over its recorded calls and each row r belongs to
    one sample, which is checked on the first batch: a weight that is also used elsewhere, a subclass that computes
    something else, or a layer on a learned input that all samples share does not.
    """
    model = problem.model
    assert model is not None
    aliases: dict[int, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(tensor), []).append(name)
    tied = {names[0] for names in aliases.values() if len(names) > 1}
    reasons = {name: "tied" if name in tied else "not in a linear or convolution layer" for name in problem.space.names}
    candidates = [
        layer for name, module in model.named_modules() if isinstance(module, (nn.Linear, *CONVOLUTIONS))
        if (layer := _layer(problem, name, module, tied)) is not None
    ]  # fmt: skip
    unfit = _probe(problem, candidates)
    for layer in candidates:
        for name in layer.names:
            if layer.name in unfit:
                reasons[name] = unfit[layer.name]
            else:
                del reasons[name]
    return [layer for layer in candidates if layer.name not in unfit], reasons


def _layer(problem: Problem, name: str, module: Any, tied: set[str]) -> Layer | None:
    slices = problem.space.slices
    own = {kind: f"{name}.{kind}" if name else kind for kind in ("weight", "bias")}
    kept = {kind: full for kind, full in own.items() if full in slices and full not in tied}
    if not kept:
        return None
    groups = getattr(module, "groups", 1)
    where = [torch.arange(slices[full].start, slices[full].stop) for full in kept.values()]
    outputs = module.out_features if isinstance(module, nn.Linear) else module.out_channels
    indices = torch.cat([part.reshape(groups, outputs // groups, -1) for part in where], dim=-1)
    return Layer(name, module, tuple(kept.values()), indices.to(problem.device))


def _probe(problem: Problem, layers: Sequence[Layer]) -> dict[str, str]:
    """The layers without Kronecker form on the first batch, each with the reason."""
    batch = problem.batches.first()
    leaves = {name: value.detach().requires_grad_() for name, value in problem.named(problem.vector).items()}
    with recording(layers) as calls:
        output = problem.output(leaves, batch)
    one = isinstance(output, Tensor)
    require(one, "the model's output", "be one tensor for KFAC", output, "wrap the model", TypeError)
    first = torch.randn(output.shape, generator=generator(0, "kfac", "probe")).to(output)
    rest = first.clone()
    first[1:], rest[:1] = 0.0, 0.0  # the first sample alone, and all the others
    inputs = [*(call.y for call in calls), *leaves.values()]
    pulled = [torch.autograd.grad(output, inputs, v, retain_graph=True, materialize_grads=True) for v in (first, rest)]
    grads = [g + h for g, h in zip(*pulled, strict=True)]
    flat = problem.space.flatten(dict(zip(leaves, grads[len(calls) :], strict=True)))
    shared = {
        call.layer.name for call, g, h in zip(calls, *pulled, strict=False)
        if bool(((call.layer.outputs(g) != 0).any(-1) & (call.layer.outputs(h) != 0).any(-1)).any())
    }  # fmt: skip
    unfit = {}
    for layer in layers:
        own = [(call, grad) for call, grad in zip(calls, grads, strict=False) if call.layer is layer]
        true = flat[layer.indices]
        if not own or not (_implied(own) - true).norm() <= PROBE_TOLERANCE * true.norm():
            unfit[layer.name] = "not used through its layer alone"
        elif layer.name in shared:
            unfit[layer.name] = "one output for several samples"
    return unfit


def _implied(calls: Sequence[tuple[Call, Tensor]]) -> Tensor:
    """Σ_r g_r a_rᵀ over all calls of one layer, (g, m, n)."""
    total = torch.zeros((), device=calls[0][1].device)
    for call, grad in calls:
        layer, size = call.layer, call.layer.chunk(call.y)
        for x, g in zip(call.x.split(size), grad.split(size), strict=True):
            total = total + torch.einsum("brgm,brgn->gmn", layer.outputs(g), layer.inputs(x, g))
    return total


def moments(
    problem: Problem, layers: Sequence[Layer], loose: Sequence[str], fisher: Fisher, dtype: torch.dtype
) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]:
    """The factors (A, G) of each layer and the exact Fisher diagonal of the ``loose`` parameters.

    A = mean over samples and positions of a aᵀ, (g, n, n); G = mean over samples of Σ_k Σ_r g_kr g_krᵀ, (g, m, m):
    KFAC-expand (Eschenhagen et al. 2023), for convolutions Grosse & Martens 2016.
    """
    factors = {}
    for layer in layers:
        groups, width, depth = layer.indices.shape
        A = torch.zeros(groups, depth, depth, dtype=dtype, device=problem.device)
        factors[layer.name] = A, A.new_zeros(groups, width, width)
    values = problem.named(problem.vector)
    diagonals = {name: torch.zeros_like(values[name], dtype=dtype) for name in loose}
    for step in passes(problem, layers, fisher, "kfac"):
        _add_input_moments(factors, step, dtype)
        for grads in step.gradients():
            for call, grad in zip(step.calls, grads, strict=True):
                g = call.layer.outputs(grad).flatten(0, 1).to(dtype)
                factors[call.layer.name][1].add_(_gram(g), alpha=step.weight / step.batch.size)
        if loose:
            squares = per_sample_squares(problem, loose, step.batch, torch.stack(step.vectors), dtype)
            for name, square in squares.items():
                diagonals[name].add_(square, alpha=step.weight / step.batch.size)
    return factors, diagonals


def _add_input_moments(factors: dict[str, tuple[Tensor, Tensor]], step: Pass, dtype: torch.dtype) -> None:
    rows = dict.fromkeys(factors, 0)
    for call in step.calls:
        rows[call.layer.name] += call.layer.outputs(call.y).shape[:2].numel()
    for call in step.calls:
        layer, size = call.layer, call.layer.chunk(call.y)
        for x, y in zip(call.x.split(size), call.y.detach().split(size), strict=True):
            a = layer.inputs(x, y).flatten(0, 1).to(dtype)
            factors[layer.name][0].add_(_gram(a), alpha=step.weight / rows[layer.name])


def _gram(rows: Tensor) -> Tensor:
    """Σ_r row rowᵀ for rows (r, g, n), as (g, n, n)."""
    return torch.einsum("rgi,rgj->gij", rows, rows)


def second_moments(
    problem: Problem, layers: Sequence[Layer], bases: dict[str, tuple[Tensor, Tensor]], fisher: Fisher
) -> dict[str, Tensor]:
    """The Fisher's diagonal in each layer's Kronecker eigenbasis (U_A, U_G): mean_i Σ_k (U_Gᵀ D_ik U_A)², (g, m, n).

    D_ik = Σ_r g_r a_rᵀ is the gradient of one sample (George et al. 2018).
    """
    totals = {layer.name: bases[layer.name][0].new_zeros(layer.indices.shape) for layer in layers}
    for step in passes(problem, layers, fisher, "ekfac"):
        for call in step.calls:
            first = call.x.shape[0] == call.y.shape[0] == step.batch.size
            require(first, f"the input of layer {call.layer.name!r}", f"have the {step.batch.size} samples first",
                    call.x, "EKFAC needs it: use kfac(problem), or put the batch first")  # fmt: skip
        groups = _by_layer(step.calls)
        squares = {name: _input_squares(calls[0], bases[name][0]) for name, calls in groups.items() if _is_flat(calls)}
        for grads in step.gradients():
            found = _by_layer(step.calls, grads)
            for name, calls in groups.items():
                right, left = bases[name]
                if name in squares:  # one position: the square of an outer product is the outer product of squares
                    g = calls[0].layer.outputs(found[name][0])[:, 0].to(left)
                    g = torch.einsum("bgi,gij->bgj", g, left).square()
                    total = torch.einsum("bgm,bgn->gmn", g, squares[name])
                else:
                    total = _projected_squares(calls, found[name], right, left)
                totals[name].add_(total, alpha=step.weight / step.batch.size)
    return totals


def _by_layer(calls: Sequence[Call], items: Sequence[Any] | None = None) -> dict[str, list[Any]]:
    """The calls, or what belongs to each, by the name of their layer."""
    out: dict[str, list[Any]] = {}
    for call, item in zip(calls, calls if items is None else items, strict=True):
        out.setdefault(call.layer.name, []).append(item)
    return out


def _is_flat(calls: Sequence[Call]) -> bool:
    """Whether a layer is applied once, at one position."""
    return len(calls) == 1 and calls[0].layer.outputs(calls[0].y).shape[1] == 1


def _input_squares(call: Call, right: Tensor) -> Tensor:
    """(U_Aᵀ a)² of each sample, (b, g, n), for a layer at one position."""
    a = call.layer.inputs(call.x, call.y.detach())[:, 0].to(right)
    return torch.einsum("bgi,gij->bgj", a, right).square()


def _projected_squares(calls: Sequence[Call], grads: Sequence[Tensor], right: Tensor, left: Tensor) -> Tensor:
    """Σ_i (U_Gᵀ D_i U_A)² over the samples of a batch, for all calls of one layer."""
    layer, size = calls[0].layer, min(call.layer.chunk(call.y) for call in calls)
    total = right.new_zeros(layer.indices.shape)
    for start in range(0, len(grads[0]), size):
        part = slice(start, start + size)
        g = torch.cat([layer.outputs(grad[part]) for grad in grads], dim=1).to(right)
        pairs = zip(calls, grads, strict=True)
        a = torch.cat([layer.inputs(call.x[part], grad[part]) for call, grad in pairs], dim=1).to(right)
        total += (left.mT @ torch.einsum("brgm,brgn->bgmn", g, a) @ right).square().sum(dim=0)
    return total


def per_sample_squares(
    problem: Problem, names: Sequence[str], batch: Batch, vectors: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Σ_i Σ_k (J_iᵀ s_ki)² of the named parameters, by element: through vmap, or sample by sample where that fails."""
    values = problem.named(problem.vector)
    free = {name: value.detach() for name, value in values.items() if name in names}
    fixed = {name: value.detach() for name, value in values.items() if name not in names}
    size = max(1, CHUNK_ELEMENTS // (len(vectors) * sum(value.numel() for value in free.values())))
    try:
        return _squares_by_vmap(problem, free, fixed, batch, vectors, size, dtype)
    except (RuntimeError, NotImplementedError):  # data-dependent control flow, an operation without a batching rule
        return _squares_one_by_one(problem, free, fixed, batch, vectors, dtype)


def _squares_by_vmap(
    problem: Problem, free: Parameters, fixed: Parameters, batch: Batch, vectors: Tensor, size: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    def one(sample: Batch, own: Tensor) -> dict[str, Tensor]:
        pull = torch.func.vjp(lambda chosen: problem.output({**fixed, **chosen}, sample), free)[1]
        grads = [pull(vector.unsqueeze(0))[0] for vector in own.unbind(0)]
        return {name: torch.stack([grad[name].to(dtype) for grad in grads]).square().sum(dim=0) for name in free}

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


def _squares_one_by_one(
    problem: Problem, free: Parameters, fixed: Parameters, batch: Batch, vectors: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    out = {name: torch.zeros_like(value, dtype=dtype) for name, value in free.items()}
    for part in torch.arange(batch.size, device=problem.device).split(1):
        leaves = {name: value.detach().requires_grad_() for name, value in free.items()}
        output = problem.output({**fixed, **leaves}, take(batch, part))
        for vector in vectors[:, part].unbind(0):
            grads = torch.autograd.grad(output, list(leaves.values()), vector, retain_graph=True, allow_unused=True)
            for name, grad in ((name, grad) for name, grad in zip(leaves, grads, strict=True) if grad is not None):
                out[name] += grad.to(dtype).square()
    return out
