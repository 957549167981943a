"""KFAC and EKFAC: the Fisher as one Kronecker product a layer, its inverse and log-determinant
in closed form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lambdahat._core.check import require, require_choice, require_count
from lambdahat._core.device import default_context
from lambdahat.operators.base import LinearOperator
from lambdahat.operators.kronecker_factors import Fisher, find_layers, moments, second_moments
from lambdahat.operators.linearise import require_kind
from lambdahat.problem import Problem, require_problem
from lambdahat.problem.memory import PASS

SHARING = ("expand", "reduce")


@dataclass(frozen=True)
class KroneckerBlock:
    """The block G ⊗ A of a layer's matrix [W | b] raveled by rows, one in each of g groups.

    ``A`` (g, n, n) is the second moment of the inputs, ``G`` (g, m, m) that of the output
    gradients. With ``corrected`` (g, m, n) (EKFAC) it is U diag(corrected) Uᵀ, U = U_G ⊗ U_A,
    instead.
    """

    names: tuple[str, ...]
    indices: Tensor
    A: Tensor
    G: Tensor
    corrected: Tensor | None = None

    @cached_property
    def basis(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """λ_A (g, n), U_A, λ_G (g, m), U_G, in float64."""
        return *_eigen(self.A), *_eigen(self.G)

    @cached_property
    def values(self) -> Tensor:
        """The eigenvalues (g, m, n), in float64."""
        if self.corrected is not None:
            return self.corrected.double()
        inputs, _, outputs, _ = self.basis
        return outputs.unsqueeze(-1) * inputs.unsqueeze(-2)

    @property
    def singular(self) -> bool:
        """Whether an eigenvalue may be 0, to n·eps·λ_max of a factor, a bound on its rounding.

        Damped inverses keep values below it: to take them for 0 errs a thousand times more.
        """
        if self.corrected is not None:
            return not bool((self.values > 0).all())
        for values, factor in ((self.basis[0], self.A), (self.basis[2], self.G)):
            noise = factor.shape[-1] * torch.finfo(factor.dtype).eps
            if bool((_without_noise(values, noise) == 0).any()):
                return True
        return False

    def with_values(self, corrected: Tensor) -> KroneckerBlock:
        """The block with other eigenvalues in the same basis."""
        block = replace(self, corrected=corrected)
        # a second decomposition may turn degenerate eigenvectors
        block.__dict__["basis"] = self.basis
        return block

    def apply(self, X: Tensor) -> Tensor:
        """The block times X (k, g, m, n)."""
        return self.G @ X @ self.A if self.corrected is None else self.apply_values(self.values, X)

    def apply_values(self, values: Tensor, X: Tensor) -> Tensor:
        """U diag(values) Uᵀ times X (k, g, m, n)."""
        right, left = self.basis[1].to(X), self.basis[3].to(X)
        return left @ (values.to(X) * (left.mT @ X @ right)) @ right.mT

    def diagonal(self) -> Tensor:
        """The diagonal (g, m, n)."""
        if self.corrected is None:
            outputs, inputs = (part.diagonal(dim1=1, dim2=2) for part in (self.G, self.A))
            return outputs.unsqueeze(-1) * inputs.unsqueeze(-2)
        right, left = self.basis[1], self.basis[3]
        return (left.square() @ self.values @ right.square().mT).to(self.A.dtype)

    def damped(self, damping: float, factored: bool) -> Tensor:
        """The eigenvalues of the damped block (g, m, n).

        Factored: (λ_G + √δ/π)(λ_A + π√δ), with π² the ratio of the mean eigenvalues of A and G
        (Martens & Grosse 2015, §6.3).
        """
        if not factored:
            return self.values + damping
        inputs, _, outputs, _ = self.basis
        pi = (inputs.mean(dim=1, keepdim=True) / outputs.mean(dim=1, keepdim=True)).sqrt()
        # a layer without inputs or gradients: no scale to balance
        pi = torch.where(pi.isfinite() & (pi > 0), pi, 1.0)
        root = math.sqrt(damping)
        return (outputs + root / pi).unsqueeze(-1) * (inputs + pi * root).unsqueeze(-2)

    def dense(self) -> Tensor:
        """The matrix of the block, in the order of ``indices`` raveled."""
        size = self.indices.numel()
        eye = torch.eye(size, dtype=self.A.dtype, device=self.A.device)
        return self.apply(eye.view(size, *self.indices.shape)).reshape(size, size)

    def __str__(self) -> str:
        groups, width, depth = self.indices.shape
        each = "" if groups == 1 else f", in each of {groups} groups"
        return f"kronecker {width}×{width} ⊗ {depth}×{depth}{each}"


@dataclass(frozen=True)
class DiagonalBlock:
    """A parameter outside Kronecker form: its exact Fisher diagonal, and why."""

    names: tuple[str, ...]
    indices: Tensor
    values: Tensor
    reason: str

    def apply(self, X: Tensor) -> Tensor:
        """The block times X (k, size)."""
        return self.apply_values(self.values, X)

    def apply_values(self, values: Tensor, X: Tensor) -> Tensor:
        """diag(values) times X (k, size)."""
        return values.to(X) * X

    @property
    def singular(self) -> bool:
        """Whether the block has an eigenvalue 0."""
        return not bool((self.values > 0).all())

    def diagonal(self) -> Tensor:
        """The diagonal (size,)."""
        return self.values

    def damped(self, damping: float, factored: bool) -> Tensor:
        """The damped diagonal (size,)."""
        return self.values.double() + damping

    def dense(self) -> Tensor:
        """The matrix of the block."""
        return torch.diag(self.values)

    def __str__(self) -> str:
        return f"diagonal ({self.reason})"


Block = KroneckerBlock | DiagonalBlock


class KFAC(LinearOperator):
    """A block-diagonal approximation of the Fisher, with a block per layer or remaining parameter.

    ``shared`` are the layers used at several positions, for which ``sharing`` matters.
    """

    def __init__(
        self,
        problem: Problem,
        blocks: Mapping[str, Block],
        *,
        corrected: bool,
        sharing: str = "expand",
        shared: tuple[str, ...] = (),
    ) -> None:
        size, dtype = problem.num_parameters, _dtype(problem)
        super().__init__(size, dtype, problem.device, psd=True, space=problem.space)
        self.blocks = dict(blocks)
        self.corrected, self.sharing, self.shared = corrected, sharing, shared
        self._memory = problem.memory

    def budget(self) -> int | None:
        return self._memory

    def _factor_bytes(self, decomposed: bool) -> int:
        blocks = self.blocks.values()
        shapes = [part.indices.shape for part in blocks if isinstance(part, KroneckerBlock)]
        return _held(self.dim, shapes, self.dtype, decomposed)

    def room(self, share: float) -> float:
        if self._memory is None:
            return super().room(share)
        return self._memory - self._factor_bytes(self.corrected) - self.column_bytes()

    def column_bytes(self) -> int:
        return 5 * self.dim * self.dtype.itemsize

    def __repr__(self) -> str:
        kind = "EKFAC" if self.corrected else "KFAC"
        used = f', sharing="{self.sharing}"' if self.shared else ""
        return f"{kind}{super().__repr__().removeprefix(type(self).__name__)[:-1]}{used})"

    def _apply(self, block: Tensor) -> Tensor:
        return self._map(block, lambda _, part, X: part.apply(X))

    def _map(self, block: Tensor, multiply: Callable[[str, Block, Tensor], Tensor]) -> Tensor:
        """``multiply(label, block, X)`` of each block's coordinates X (k, *indices.shape)."""
        out, count = torch.empty_like(block), block.shape[1]
        for label, part in self.blocks.items():
            where = part.indices.reshape(-1)
            X = block[where].T.reshape(count, *part.indices.shape)
            out[where] = multiply(label, part, X).reshape(count, -1).T
        return out

    def structure(self) -> dict[str, str]:
        """What each block is: "kronecker m×m ⊗ n×n", or "diagonal" with the reason."""
        return {label: str(part) for label, part in self.blocks.items()}

    def known_diagonal(self) -> Tensor:
        out = torch.empty(self.dim, dtype=self.dtype, device=self.device)
        for part in self.blocks.values():
            out[part.indices] = part.diagonal()
        return out

    def eigenvalues(self) -> Tensor:
        """All P eigenvalues, ascending, in float64, from those of the factors."""
        self._require_basis()
        values = [part.values.double().reshape(-1) for part in self.blocks.values()]
        return torch.cat(values).sort().values

    def logdet(self, damping: float = 0.0) -> float:
        """log det(K + δI), exactly; −∞ when that is singular."""
        if not _require_damping(damping) and any(part.singular for part in self.blocks.values()):
            return -math.inf
        return float((self.eigenvalues() + damping).log().sum())

    def inverse(self, damping: float, *, factored: bool = False) -> KFACInverse:
        """(K + δI)⁻¹, exactly, through the eigendecompositions of the factors.

        ``factored=True`` damps each factor instead, (G + (√δ/π) I)⁻¹ ⊗ (A + π√δ I)⁻¹ (Martens &
        Grosse 2015, §6.3), as optimisers do; EKFAC has no factors to damp.
        """
        self._require_basis()
        plain = not (factored and self.corrected)
        require(plain, "factored", "be False for EKFAC", "True", "its eigenvalues do not factor")
        return KFACInverse(self, _require_damping(damping), factored=factored)

    def _require_basis(self) -> None:
        """Refuse decompositions of the factors that the problem's memory cannot hold."""
        if self._memory is not None:
            need = self._factor_bytes(decomposed=True)
            _require_memory(self._memory, need, "the eigenvectors of its factors")


class KFACInverse(LinearOperator):
    """The inverse of a damped KFAC operator, by closed form."""

    def __init__(self, kfac: KFAC, damping: float, *, factored: bool) -> None:
        super().__init__(kfac.dim, kfac.dtype, kfac.device, psd=True, space=kfac.space)
        self.kfac, self.damping, self.factored = kfac, damping, factored
        values = {label: part.damped(damping, factored) for label, part in kfac.blocks.items()}
        singular = not damping and any(part.singular for part in kfac.blocks.values())
        least = 0.0 if singular else min(float(value.min()) for value in values.values())
        if not least > 0:
            raise ValueError(
                f"damping must make the operator positive definite, got {damping!r}; its smallest"
                f" eigenvalue is {least:.3g}: raise damping"
            )
        self._values = {label: value.reciprocal() for label, value in values.items()}

    def _apply(self, block: Tensor) -> Tensor:
        values = self._values
        return self.kfac._map(block, lambda label, part, X: part.apply_values(values[label], X))


@torch.enable_grad()
@default_context()
def kfac(
    problem: Problem,
    *,
    kind: str = "exact",
    sharing: str = "expand",
    correction: bool = False,
    samples: int = 1,
    seed: int = 0,
) -> KFAC:
    """The Kronecker-factored approximation of the Fisher F = Σ_b w_b (1/B) Σ_i J_iᵀ M_i J_i.

    A linear or convolution layer's block is G ⊗ A, the moment of its output gradients and that of
    its inputs, the bias among the weights (Martens & Grosse 2015; convolutions: Grosse & Martens
    2016). Other parameters (norm layers, embeddings, tied weights, …) keep their exact Fisher
    diagonal; ``structure()`` lists both.

    Args:
        problem: The problem, of a model and a loss of its output.
        kind: Where M comes from: "exact" from the loss's Hessian at the output, or the Fisher there
            for "gaussian_nll", at one backward pass for each number that a sample's output has;
            "monte_carlo" from ``samples`` labels a data point drawn from the model; "empirical"
            from the data's own labels.
        sharing: For layers applied at several positions of a sample, such as convolutions and
            linear layers on sequences: "expand" counts each position as a sample, which is exact
            for deep linear networks with a loss at each position; "reduce" takes the mean input and
            the summed gradient over the positions of a sample, which is exact for deep linear
            networks that average over positions before the loss (Eschenhagen et al. 2023). The repr
            says which was used where a layer shares its weights.
        correction: True gives EKFAC.
        samples: Labels drawn for each data point with kind="monte_carlo".
        seed: Seed of those draws.

    Returns:
        An operator with closed-form inverse, log-determinant and eigenvalues, which later training
        does not change.
    """
    require_problem(problem)
    require_kind(kind)
    require_choice(sharing, "sharing", SHARING)
    require_count(samples, "samples")
    require_count(seed, "seed", least=0)
    fits = samples == 1 or kind == "monte_carlo"
    require(fits, "samples", 'be left out unless kind is "monte_carlo"', samples)
    problem = problem.with_output("KFAC")
    if problem.norm == "train":
        raise ValueError(
            'norm must be "eval" or "frozen" for KFAC (batch statistics mix the samples), got'
            ' "train"; use norm="eval" and problem.refresh_statistics()'
        )
    fisher, dtype = Fisher(kind, samples, seed), _dtype(problem)
    layers, reasons = find_layers(problem)
    if problem.memory is not None:
        shapes = [layer.indices.shape for layer in layers]
        need = _held(problem.num_parameters, shapes, dtype, correction)
        _require_memory((1 - PASS) * problem.memory, need, "its Kronecker factors")
    factors, diagonals, shared = moments(problem, layers, tuple(reasons), fisher, sharing, dtype)
    for name, parts in {**factors, **{name: (part,) for name, part in diagonals.items()}}.items():
        if not all(bool(part.isfinite().all()) for part in parts):
            raise ValueError(
                f"the Fisher must be finite, got NaN or infinity at {name!r}; look for a root, a"
                " log or a quotient at 0 in the model and the loss"
            )
    kronecker = {
        layer.name: KroneckerBlock(layer.names, layer.indices, *factors[layer.name])
        for layer in layers
    }
    if correction:
        bases = {
            label: (block.basis[1].to(dtype), block.basis[3].to(dtype))
            for label, block in kronecker.items()
        }
        exact = second_moments(problem, layers, bases, fisher)
        kronecker = {label: block.with_values(exact[label]) for label, block in kronecker.items()}
    blocks: dict[str, Block] = {**kronecker}
    for name, part in problem.space.slices.items():
        if name in reasons:
            where = torch.arange(part.start, part.stop, device=problem.device)
            blocks[name] = DiagonalBlock((name,), where, diagonals[name].reshape(-1), reasons[name])
    names = tuple(layer.name for layer in layers if layer.name in shared)
    return KFAC(problem, blocks, corrected=correction, sharing=sharing, shared=names)


@default_context()
def ekfac(
    problem: Problem,
    *,
    kind: str = "exact",
    sharing: str = "expand",
    samples: int = 1,
    seed: int = 0,
) -> KFAC:
    """KFAC with optimal eigenvalues in its eigenbasis: the Fisher's diagonal (George et al. 2018).

    Never further from the Fisher in Frobenius norm than KFAC with the same ``sharing``, which sets
    the eigenbasis; one more pass over the data. The arguments are those of ``kfac``.
    """
    return kfac(problem, kind=kind, sharing=sharing, correction=True, samples=samples, seed=seed)


def _held(dim: int, shapes: Sequence[Sequence[int]], dtype: torch.dtype, decomposed: bool) -> int:
    """Bytes of the factors of blocks (g, m, n) and P indices; ``decomposed`` with eigenvectors."""
    sizes = [(groups * depth**2, groups * width**2) for groups, width, depth in shapes]
    entries, largest = sum(map(sum, sizes)), max(map(max, sizes), default=0)
    plain = 8 * dim + (entries + largest) * dtype.itemsize
    return plain + (8 * (entries + 4 * largest) + (8 + dtype.itemsize) * dim if decomposed else 0)


def _require_memory(room: float, need: int, what: str) -> None:
    expected, cure = f"have room for {need:,} bytes of KFAC, {what}", "raise it, or choose fewer"
    require(need <= room, "memory", expected, f"{room:,.0f} for them", f"{cure} parameters")


def _dtype(problem: Problem) -> torch.dtype:
    return torch.promote_types(problem.dtype, torch.float32)


def _eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors in float64; eigenvalues of the size of rounding are 0.

    A softmax leaves G an eigenvalue 0, whose rounding times A's largest may exceed the damping.
    """
    values, vectors = torch.linalg.eigh(matrix.double())
    noise = torch.finfo(matrix.dtype).eps + matrix.shape[-1] * torch.finfo(values.dtype).eps
    return _without_noise(values, noise), vectors


def _without_noise(values: Tensor, noise: float) -> Tensor:
    """Ascending eigenvalues with 0 for those of at most ``noise``·λ_max."""
    return torch.where(values > noise * values[..., -1:].clamp(min=0.0), values, 0.0)


def _require_damping(damping: float) -> float:
    real = isinstance(damping, int | float) and not isinstance(damping, bool)
    fine = real and 0.0 <= damping < math.inf
    require(fine, "damping", "be a finite number of at least 0", damping)
    return float(damping)
