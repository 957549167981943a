"""A layer's running moments, their damped inverse, and its product with a gradient.

The state of a layer is a dict of tensors: the moments "A" (g, n, n), or (g, n) where it is
diagonal, and "G" (g, m, m), or "F" (units, k, k) of a norm layer; and what was made of them at the
last refresh.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lambdahat._core.check import require
from lambdahat._core.rng import generator

State = dict[str, Any]
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
        inputs, outputs = _damping(state, damping)
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


def _damping(state: State, damping: float) -> tuple[Tensor, Tensor]:
    """π√δ for A and √δ/π for G, (g, 1, 1), π² the ratio of their mean eigenvalues (Martens &
    Grosse 2015, §6.3).
    """
    A, G = state["A"], state["G"]
    of_inputs = A.mean(-1) if A.ndim == 2 else A.diagonal(dim1=1, dim2=2).mean(-1)
    pi = (of_inputs / G.diagonal(dim1=1, dim2=2).mean(-1)).sqrt()
    # no inputs or gradients: no scale to balance
    pi = torch.where(pi.isfinite() & (pi > 0), pi, 1.0)[:, None, None]
    return pi * math.sqrt(damping), math.sqrt(damping) / pi


def _refresh_side(state: State, side: str, shift: Tensor, rank: int | None, name: str) -> None:
    """The inverse of one damped factor: a matrix, a diagonal, or c·(I + U diag(gains) Uᵀ) for
    one of low rank.
    """
    moment = state[side]
    if moment.ndim == 2:
        state[f"{side}_inverse"] = (moment + shift[..., 0]).reciprocal()
    elif rank is None or moment.shape[-1] <= 2 * rank:
        state[f"{side}_inverse"] = _inverse(moment, shift, name)
    else:
        values, vectors, rest = _leading(moment, state.get(f"{side}_vectors"), rank)
        outside, shift = rest + shift[..., 0], shift[..., 0]
        state[f"{side}_vectors"], state[f"{side}_gains"] = (
            vectors,
            (outside / (values + shift) - 1.0).unsqueeze(1),
        )
        state[f"{side}_inverse"] = outside.reciprocal().unsqueeze(-1)


def _from_right(state: State, matrix: Tensor) -> Tensor:
    """A gradient (g, m, n) times the inverse of A; what is returned may be written to."""
    inverse: Tensor = state["A_inverse"]
    if inverse.ndim == 2:
        return matrix * inverse.unsqueeze(1)
    if "A_gains" not in state:
        return matrix @ inverse
    vectors: Tensor = state["A_vectors"]
    return torch.baddbmm(matrix, (matrix @ vectors) * state["A_gains"], vectors.mT).mul_(inverse)


def _from_left(state: State, matrix: Tensor) -> Tensor:
    """The inverse of G times a matrix (g, m, n), which may be written to."""
    inverse: Tensor = state["G_inverse"]
    if "G_gains" not in state:
        return inverse @ matrix
    vectors: Tensor = state["G_vectors"]
    return matrix.baddbmm_(vectors * state["G_gains"], vectors.mT @ matrix).mul_(inverse)


def _inverse(moment: Tensor, shift: Tensor, name: str) -> Tensor:
    """(M + shift·I)⁻¹ by Cholesky, in the working dtype."""
    own = moment.device.type == "cpu"
    damped = moment.mT.clone() if own else moment.clone()  # by columns LAPACK works in place
    damped.diagonal(dim1=-2, dim2=-1).add_(shift.to(moment).reshape(-1, 1))
    out = (damped, damped.new_empty(damped.shape[:-2], dtype=torch.int32)) if own else None
    factor, failed = torch.linalg.cholesky_ex(damped, out=out)
    fine = not bool(failed.any())
    require(
        fine,
        "damping",
        f"make the moments of layer {name!r} positive definite",
        "singular or infinite ones",
        "raise damping, or lower lr if the loss has become NaN",
        RuntimeError,
    )
    return torch.cholesky_inverse(factor, out=factor if own else None)


def _leading(moment: Tensor, start: Tensor | None, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The ``rank`` leading eigenpairs, (g, rank) and (g, n, rank), and the mean (g, 1) of the other
    eigenvalues.

    By one step of subspace iteration from the last ones, with Rayleigh–Ritz (randomized KFAC, Puiu
    2022).
    """
    groups, order, _ = moment.shape
    vectors, steps = start, 1
    if vectors is None:
        draw = torch.randn(
            order, rank, generator=generator(0, "kfac", "subspace"), dtype=moment.dtype
        )
        vectors, steps = draw.to(moment.device).expand(groups, -1, -1), FIRST_ITERATIONS
    for _ in range(steps):
        vectors = torch.linalg.qr(moment @ vectors).Q
    values, turn = torch.linalg.eigh(vectors.mT @ moment @ vectors)
    values = values.clamp_min(0.0)
    left = moment.diagonal(dim1=1, dim2=2).sum(-1, keepdim=True) - values.sum(-1, keepdim=True)
    return values, vectors @ turn, (left / (order - rank)).clamp_min(0.0)


def _turn(state: State, name: str) -> None:
    """The eigenbases of the moments, and the second moments "squares" (g, m, n) carried over to
    them (EKFAC).

    Those of the old basis give in the new one the diagonal of the same matrix; the first are KFAC's
    own, λ_G λ_Aᵀ.
    """
    A, G = state["A"], state["G"]
    require(
        bool(G.isfinite().all()),
        "the loss",
        "stay finite",
        f"infinite moments of layer {name!r}",
        "lower lr",
        RuntimeError,
    )
    outputs, left = torch.linalg.eigh(G)
    inputs, right = (A, None) if A.ndim == 2 else torch.linalg.eigh(A)
    if "squares" not in state:
        state["squares"] = outputs.clamp_min(0.0).unsqueeze(-1) * inputs.clamp_min(0.0).unsqueeze(
            -2
        )
    else:
        turned = (left.mT @ state["G_basis"]).square() @ state["squares"]
        state["squares"] = (
            turned if right is None else turned @ (state["A_basis"].mT @ right).square()
        )
    state["G_basis"] = left
    if right is not None:
        state["A_basis"] = right
