"""The layers that KFAC preconditions: their second moments of one call, and their gradient as one
matrix.

A layer is seen as [W | b] of m outputs × n inputs in g groups, (g, m, n), the bias as one more
input that is always 1. A call with input x and gradient ∂L/∂y of a mean loss L adds to sums; with N
samples in all, A = Σ a aᵀ / rows is the second moment of the inputs and G = N Σ g gᵀ that of the
samples' own output gradients N·g.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lambdahat._core.device import multiply, multiply_stacks
from lambdahat._core.rng import generator
from lambdahat.operators.kronecker_factors import CHUNK_ELEMENTS, patches
from lambdahat.operators.linearise import CONVOLUTIONS
from lambdahat.problem.network import NORMS

State = dict[str, Any]


@dataclass
class Sums:
    """The running totals of one layer since the last step."""

    totals: dict[str, Tensor] = field(default_factory=dict)
    rows: int = 0
    samples: int = 0
    passes: set[object] = field(default_factory=set)

    def add(self, name: str, part: Tensor) -> None:
        """Add one call's part."""
        self.totals[name] = self.totals[name] + part if name in self.totals else part

    def count(self, rows: int, samples: int, forward_pass: object) -> None:
        """Count the rows of a call; samples count once per forward pass."""
        self.rows += rows
        self.samples += 0 if forward_pass in self.passes else samples
        self.passes.add(forward_pass)

    def factors(self, scale: float = 1.0) -> dict[str, float]:
        """The factors that turn totals into moments, for gradients multiplied by ``scale``."""
        return dict.fromkeys(self.totals, self.samples / scale**2) | {"A": 1.0 / max(self.rows, 1)}


class Layer(ABC):
    """A module whose ``parameters`` (weight, bias, or what is trained of them) share one block."""

    def __init__(self, name: str, module: Any, parameters: Sequence[nn.Parameter]) -> None:
        self.name, self.module, self.parameters = name, module, tuple(parameters)

    @property
    def key(self) -> nn.Parameter:
        """The parameter under which an optimiser keeps this layer's state."""
        return self.parameters[0]

    def trains(self, kind: str) -> bool:
        """Whether the module's "weight" or "bias" is among the parameters."""
        return any(parameter is getattr(self.module, kind, None) for parameter in self.parameters)

    @abstractmethod
    def collect(self, sums: Sums, x: Tensor, g: Tensor, state: State, inputs: bool = True) -> int:
        """Add the moments of one call (input x, output gradient g); return the number of rows.

        ``state`` may hold an eigenbasis (EKFAC). ``inputs=False`` adds only what depends on g.
        """

    @abstractmethod
    def matrix(self, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors shaped like the parameters as one, (g, m, n)."""

    @abstractmethod
    def split(self, matrix: Tensor) -> list[Tensor]:
        """The inverse of ``matrix``."""


class Affine(Layer):
    """A linear or convolution layer.

    ``sharing`` says what a layer applied at R positions of one sample does: "expand" counts every
    position as a row, "reduce" takes the mean of a and the sum of g over them (Eschenhagen et al.
    2023).
    """

    def __init__(
        self, name: str, module: Any, parameters: Sequence[nn.Parameter], sharing: str
    ) -> None:
        super().__init__(name, module, parameters)
        self.sharing = sharing
        self.linear = isinstance(module, nn.Linear)
        self.groups = 1 if self.linear else int(module.groups)
        self.dimensions = 2 if self.linear else 2 + len(module.kernel_size)

    def collect(self, sums: Sums, x: Tensor, g: Tensor, state: State, inputs: bool = True) -> int:
        rows = 0
        for a, d in self._rows(x, g, bool(inputs or "A_basis" in state)):
            if "A_basis" in state:
                sums.add("squares", projected_squares(a, d, state["A_basis"], state["G_basis"]))
            if self.sharing == "reduce":
                a, d = a.mean(1, keepdim=True), d.sum(1, keepdim=True)
            if inputs:
                sums.add("A", _gram(a.flatten(0, 1)))
            sums.add("G", _gram(d.flatten(0, 1)))
            rows += d.shape[0] * d.shape[1]
        return rows

    def _rows(self, x: Tensor, g: Tensor, inputs: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs a (b, R, g, n) and output gradients (b, R, g, m), by chunks of samples."""
        if x.ndim < self.dimensions:
            x, g = x.unsqueeze(0), g.unsqueeze(0)
        for part, grad in zip(x.split(self._chunk(x, g)), g.split(self._chunk(x, g)), strict=True):
            d = self._outputs(grad)
            yield self._inputs(part, d) if inputs else d, d

    def _chunk(self, x: Tensor, g: Tensor) -> int:
        """The samples at a time that keep unfolded inputs and per-sample gradients small."""
        outputs = g.shape[-1] if self.linear else g.shape[1]
        positions = g[0].numel() // outputs
        if self.linear and positions == 1:
            return len(x)
        inputs = int(self.module.weight[0].numel()) * self.groups
        return max(1, CHUNK_ELEMENTS // (inputs * max(positions, outputs // self.groups)))

    def _outputs(self, g: Tensor) -> Tensor:
        if self.linear:
            return g.reshape(g.shape[0], -1, 1, g.shape[-1])
        rows: Tensor = g.flatten(2).transpose(1, 2).unflatten(2, (self.groups, -1))
        return rows

    def _inputs(self, x: Tensor, d: Tensor) -> Tensor:
        parts = []
        if self.trains("weight"):
            flat = self.linear
            parts.append(x.reshape(len(x), -1, 1, x.shape[-1]) if flat else patches(x, self.module))
        if self.trains("bias"):
            parts.append(torch.ones_like(d[..., :1]))
        return torch.cat(parts, dim=-1)

    def matrix(self, tensors: Sequence[Tensor]) -> Tensor:
        shape = (self.groups, len(self.key) // self.groups, -1)
        return torch.cat([tensor.reshape(shape) for tensor in tensors], dim=-1)

    def split(self, matrix: Tensor) -> list[Tensor]:
        sizes = [parameter.numel() // len(parameter) for parameter in self.parameters]
        parts = zip(matrix.split(sizes, dim=-1), self.parameters, strict=True)
        return [part.reshape(parameter.shape) for part, parameter in parts]

    def __str__(self) -> str:
        outputs = len(self.key) // self.groups
        inputs = sum(parameter.numel() // len(parameter) for parameter in self.parameters)
        product = f"kronecker {outputs}×{outputs} ⊗ {inputs}×{inputs}"
        return product if self.groups == 1 else f"{product}, in each of {self.groups} groups"


class Embedding(Layer):
    """An embedding (V, m) as a linear layer of one-hot inputs: A is the word frequency, (1, V)."""

    def collect(self, sums: Sums, x: Tensor, g: Tensor, state: State, inputs: bool = True) -> int:
        words, d = x.reshape(-1), g.reshape(-1, g.shape[-1])
        if self.module.padding_idx is not None:  # the weight has no gradient from there
            kept = (words != self.module.padding_idx).to(d.dtype)
            d = d * kept.unsqueeze(1)
        else:
            kept = torch.ones_like(d[:, 0])
        if inputs:
            sums.add("A", d.new_zeros(1, len(self.key)).index_add_(1, words, kept.unsqueeze(0)))
        sums.add("G", (d.T @ d).unsqueeze(0))
        if "G_basis" in state:
            sums.add("squares", self._squares(x, d, state["G_basis"][0]))
        return words.numel()

    def _squares(self, x: Tensor, d: Tensor, basis: Tensor) -> Tensor:
        """Σ_i (U_Gᵀ D_i)², (1, m, V); rows of a repeated word are added first."""
        vocabulary, samples = len(self.key), x.shape[0] if x.ndim > 1 else x.numel()
        of_sample = torch.arange(samples, device=x.device).repeat_interleave(x.numel() // samples)
        keys, place = torch.unique(of_sample * vocabulary + x.reshape(-1), return_inverse=True)
        each = d.new_zeros(len(keys), d.shape[1]).index_add_(0, place, d)
        total = d.new_zeros(vocabulary, d.shape[1])
        total.index_add_(0, keys % vocabulary, (each @ basis).square())
        return total.T.unsqueeze(0)

    def matrix(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].T.unsqueeze(0)

    def split(self, matrix: Tensor) -> list[Tensor]:
        return [matrix[0].T]

    def __str__(self) -> str:
        return f"kronecker {self.key.shape[1]}×{self.key.shape[1]} ⊗ diagonal of {len(self.key)}"


class NormLayer(Layer):
    """A normalisation layer γ ⊙ x̂ + β: a block of (γ, β) for each unit (Osawa et al. 2019).

    Its matrix is (1, units, k), k the number of trained parameters; its moment is (units, k, k).
    """

    def collect(self, sums: Sums, x: Tensor, g: Tensor, state: State, inputs: bool = True) -> int:
        parts = []
        if self.trains("weight"):
            parts.append(self._per_sample(g * self._normalize(x)))
        if self.trains("bias"):
            parts.append(self._per_sample(g))
        each = torch.stack(parts, dim=-1)  # (b, units, k)
        sums.add("F", torch.einsum("buk,bul->ukl", each, each))
        return len(each)

    def _per_sample(self, g: Tensor) -> Tensor:
        """Sums over the positions of each sample, (b, units)."""
        units = self.key.numel()
        if isinstance(self.module, nn.modules.batchnorm._NormBase | nn.GroupNorm):
            return g.reshape(g.shape[0], units, -1).sum(dim=2)
        if g.ndim > self.key.ndim:
            return g.reshape(g.shape[0], -1, units).sum(dim=1)
        return g.reshape(1, units)

    def _normalize(self, x: Tensor) -> Tensor:
        """x̂ by the layer's own rule, without its parameters or a change of its statistics."""
        m = self.module
        if isinstance(m, nn.LayerNorm):
            return F.layer_norm(x, m.normalized_shape, None, None, m.eps)
        if isinstance(m, nn.GroupNorm):
            return F.group_norm(x, m.num_groups, None, None, m.eps)
        if isinstance(m, nn.modules.batchnorm._NormBase):
            batch = m.training or m.running_mean is None
            mean, var = (None, None) if batch else (m.running_mean, m.running_var)
            if isinstance(m, nn.modules.batchnorm._BatchNorm):
                return F.batch_norm(x, mean, var, None, None, batch, 0.0, m.eps)
            return F.instance_norm(x, mean, var, None, None, batch, 0.0, m.eps)
        return F.rms_norm(x, m.normalized_shape, None, m.eps)

    def matrix(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.stack([tensor.reshape(-1) for tensor in tensors], dim=-1).unsqueeze(0)

    def split(self, matrix: Tensor) -> list[Tensor]:
        parts = zip(matrix[0].unbind(-1), self.parameters, strict=True)
        return [part.reshape(parameter.shape) for part, parameter in parts]

    def __str__(self) -> str:
        k = len(self.parameters)
        return f"{k}×{k} for each of {self.key.numel()} units"


def projected_squares(a: Tensor, d: Tensor, right: Tensor, left: Tensor) -> Tensor:
    """Σ_i (U_Gᵀ D_i U_A)², D_i = Σ_r d_ir a_irᵀ, (g, m, n), for rows (b, R, g, ·)."""
    a, d = torch.einsum("brgn,gnk->brgk", a, right), torch.einsum("brgm,gmk->brgk", d, left)
    if a.shape[1] == 1:  # the square of an outer product is the outer product of squares
        return torch.einsum("bgm,bgn->gmn", d[:, 0].square(), a[:, 0].square())
    return torch.einsum("brgm,brgn->bgmn", d, a).square().sum(dim=0)


def _gram(rows: Tensor) -> Tensor:
    """Σ_r row rowᵀ for rows (r, g, n), as (g, n, n)."""
    if rows.shape[1] == 1:
        return multiply(rows[:, 0].T, rows[:, 0]).unsqueeze(0)
    return torch.einsum("rgi,rgj->gij", rows, rows)


def find_layers(
    model: nn.Module, trained: Sequence[Tensor], sharing: str
) -> tuple[list[Layer], dict[str, str]]:
    """The layers with blocks, and for each other parameter the reason why it has none."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(name)
    wanted = {id(tensor) for tensor in trained}
    other = "not in a linear, convolution, embedding or norm layer"
    kept = [own for key, own in names.items() if key in wanted]
    reasons = {own[0]: "tied" if len(own) > 1 else other for own in kept}
    layers = []
    for name, module in model.named_modules():
        own = [module._parameters.get(kind) for kind in ("weight", "bias")]
        free = [p for p in own if p is not None and id(p) in wanted and len(names[id(p)]) == 1]
        layer = _layer(name, module, free, sharing) if free else None
        if layer is not None:
            layers.append(layer)
            for parameter in free:
                reasons.pop(names[id(parameter)][0], None)
    return layers, reasons


def _layer(name: str, module: nn.Module, parameters: Sequence[Any], sharing: str) -> Layer | None:
    if isinstance(module, (nn.Linear, *CONVOLUTIONS)):
        return Affine(name, module, parameters, sharing)
    if isinstance(module, nn.Embedding) and not (module.sparse or module.scale_grad_by_freq):
        return Embedding(name, module, parameters)
    return NormLayer(name, module, parameters) if isinstance(module, NORMS) else None


MOMENTS = ("A", "G", "F", "squares")
FIRST_ITERATIONS = 3


def average(
    state: State, totals: dict[str, Tensor], factors: dict[str, float], decay: float
) -> None:
    """Mix fresh moments factor·total into the running ones: the plain mean of the first few, then
    an exponential one.

    F ← ε F + (1 − ε) F_new, ε = min(1 − 1/k, decay) at the k-th (Martens & Grosse 2015, §5). A
    batch with NaN or infinity in it, as loss scaling provokes, is left out.
    """
    state["updates"] = state.get("updates", 0) + 1
    weight = 1.0 - min(1.0 - 1.0 / state["updates"], decay)
    for name, total in totals.items():
        old, factor = state.get(name), factors[name]
        if old is None:
            state[name] = total * factor
        elif old.device.type != "cpu":
            new = total * factor
            state[name] = torch.where(new.sum().isfinite(), old.lerp(new, weight), old)
        elif (total.sum() * factor).isfinite():  # in place: a moment is as large as a layer
            old.mul_(1.0 - weight).add_(total, alpha=weight * factor)


def refresh(state: State, damping: float, rank: int | None, corrected: bool, name: str) -> None:
    """Make the inverse of the damped block from the moments as they are now."""
    if "F" in state:
        state["inverse"] = _inverse(state["F"], torch.tensor(damping, dtype=torch.float64), name)
    elif corrected:
        _turn(state, name)
    else:
        # π√δ for A and √δ/π for G, (g, 1, 1); π² is the ratio of their mean eigenvalues
        A, G = state["A"], state["G"]
        of_inputs = A.mean(-1) if A.ndim == 2 else A.diagonal(dim1=1, dim2=2).mean(-1)
        pi = (of_inputs / G.diagonal(dim1=1, dim2=2).mean(-1)).sqrt()
        # no inputs or gradients: no scale to balance
        pi = torch.where(pi.isfinite() & (pi > 0), pi, 1.0)[:, None, None]
        inputs, outputs = pi * math.sqrt(damping), math.sqrt(damping) / pi
        _refresh_side(state, "A", inputs, rank, name)
        _refresh_side(state, "G", outputs, rank, name)


def apply(state: State, matrix: Tensor, damping: float) -> Tensor:
    """The inverse of the damped block times a gradient (g, m, n)."""
    if "F" in state:
        return torch.einsum("ukl,gul->guk", state["inverse"], matrix)
    if "squares" not in state:
        return _from_left(state, _from_right(state, matrix))
    left, right = state["G_basis"], state.get("A_basis")
    turned: Tensor = left.mT @ (matrix if right is None else matrix @ right)
    turned = left @ (turned / (state["squares"] + damping))
    return turned if right is None else turned @ right.mT


def ready(state: State) -> bool:
    """Whether there is an inverse to apply."""
    return "inverse" in state or "G_inverse" in state or "G_basis" in state


def _refresh_side(state: State, side: str, shift: Tensor, rank: int | None, name: str) -> None:
    """Invert one damped factor: a matrix, a diagonal, or c·(I + U diag(gains) Uᵀ)."""
    moment = state[side]
    if moment.ndim == 2:
        state[f"{side}_inverse"] = (moment + shift[..., 0]).reciprocal()
    elif rank is None or moment.shape[-1] <= 2 * rank:
        state[f"{side}_inverse"] = _inverse(moment, shift, name)
    else:
        values, vectors, rest = _leading_pairs(moment, state.get(f"{side}_vectors"), rank)
        outside, shift = rest + shift[..., 0], shift[..., 0]
        state[f"{side}_vectors"] = vectors
        state[f"{side}_gains"] = (outside / (values + shift) - 1.0).unsqueeze(1)
        state[f"{side}_inverse"] = outside.reciprocal().unsqueeze(-1)


def _from_right(state: State, matrix: Tensor) -> Tensor:
    """A gradient (g, m, n) times the inverse of A; what is returned may be written to."""
    inverse: Tensor = state["A_inverse"]
    if inverse.ndim == 2:
        return matrix * inverse.unsqueeze(1)
    if "A_gains" not in state:
        return multiply_stacks(matrix, inverse)
    vectors: Tensor = state["A_vectors"]
    inside = multiply_stacks(matrix, vectors) * state["A_gains"]
    return multiply_stacks(inside, vectors.mT, matrix).mul_(inverse)


def _from_left(state: State, matrix: Tensor) -> Tensor:
    """The inverse of G times a matrix (g, m, n), which may be written to."""
    inverse: Tensor = state["G_inverse"]
    if "G_gains" not in state:
        return multiply_stacks(inverse, matrix)
    vectors: Tensor = state["G_vectors"]
    inside, outside = multiply_stacks(vectors.mT, matrix), vectors * state["G_gains"]
    return multiply_stacks(outside, inside, matrix, overwrite=True).mul_(inverse)


def _inverse(moment: Tensor, shift: Tensor, name: str) -> Tensor:
    """(M + shift·I)⁻¹ by Cholesky, in the working dtype."""
    own = moment.device.type == "cpu"
    damped = moment.mT.clone() if own else moment.clone()  # by columns LAPACK works in place
    damped.diagonal(dim1=-2, dim2=-1).add_(shift.to(moment).reshape(-1, 1))
    out = (damped, damped.new_empty(damped.shape[:-2], dtype=torch.int32)) if own else None
    factor, failed = torch.linalg.cholesky_ex(damped, out=out)
    if failed.any():
        raise RuntimeError(
            f"damping must make the moments of layer {name!r} positive definite, got singular or"
            " infinite ones; raise damping, or lower lr if the loss has become NaN"
        )
    return torch.cholesky_inverse(factor, out=factor if own else None)


def _leading_pairs(
    moment: Tensor, start: Tensor | None, rank: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The ``rank`` leading eigenpairs, (g, rank) and (g, n, rank), and the mean (g, 1) of the other
    eigenvalues, by one step of subspace iteration from the last ones (randomized KFAC, Puiu 2022).
    """
    groups, order, _ = moment.shape
    vectors, steps = start, 1
    if vectors is None:
        rng = generator(0, "kfac", "subspace")
        draw = torch.randn(order, rank, generator=rng, dtype=moment.dtype)
        vectors, steps = draw.to(moment.device).expand(groups, -1, -1), FIRST_ITERATIONS
    for _ in range(steps):
        vectors = torch.linalg.qr(multiply_stacks(moment, vectors)).Q
    values, turn = torch.linalg.eigh(vectors.mT @ multiply_stacks(moment, vectors))
    values = values.clamp_min(0.0)
    left = moment.diagonal(dim1=1, dim2=2).sum(-1, keepdim=True) - values.sum(-1, keepdim=True)
    return values, vectors @ turn, (left / (order - rank)).clamp_min(0.0)


def _turn(state: State, name: str) -> None:
    """Update the eigenbases and carry the second moments "squares" (g, m, n) over to them."""
    A, G = state["A"], state["G"]
    if not G.isfinite().all():
        raise RuntimeError(
            f"the loss must stay finite, got infinite moments of layer {name!r}; lower lr"
        )
    outputs, left = torch.linalg.eigh(G)
    inputs, right = (A, None) if A.ndim == 2 else torch.linalg.eigh(A)
    if "squares" not in state:
        of_outputs, of_inputs = outputs.clamp_min(0.0), inputs.clamp_min(0.0)
        state["squares"] = of_outputs.unsqueeze(-1) * of_inputs.unsqueeze(-2)
    else:
        turned = (left.mT @ state["G_basis"]).square() @ state["squares"]
        if right is not None:
            turned = turned @ (state["A_basis"].mT @ right).square()
        state["squares"] = turned
    state["G_basis"] = left
    if right is not None:
        state["A_basis"] = right
