"""Kernel matrices from points, multiplied block by block and never formed above a memory budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lambdahat._core.check import describe, require, require_choice, require_count, require_positive
from lambdahat.operators.base import LinearOperator

MEMORY = 2**29

# each maps the scaled distances r to k(r) in place of a fresh block, with k(0) = 1 (Rasmussen and
# Williams, §4.2)
_KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "squared_exponential": lambda r: r.square_().mul_(-0.5).exp_(),
    "exponential": lambda r: r.neg_().exp_(),
    "matern12": lambda r: r.neg_().exp_(),
    "matern32": lambda r: (r.mul_(math.sqrt(3.0)) + 1.0).mul_(r.neg().exp_()),
    "matern52": lambda r: (r.mul_(math.sqrt(5.0)) + 1.0 + r.square() / 3.0).mul_(r.neg().exp_()),
}


class KernelMatrix(LinearOperator):
    """K_ij = σ²·k(‖x_i − x_j‖/l) + noise·δ_ij for points (n, d); spectrum in [noise, nσ² + noise].

    Formed once if n² entries fit into ``memory`` bytes; else each product makes a few rows at a
    time.
    """

    def __init__(
        self, points: Tensor, kind: str, variance: float, noise: float, memory: int
    ) -> None:
        super().__init__(len(points), points.dtype, points.device, psd=True)
        self.points, self.kind, self.variance, self.noise = points, kind, variance, noise
        # beside a block of entries stand one or two of the same size, in which the kernel is
        # evaluated
        self.rows = min(self.dim, max(1, memory // (3 * self.dim * points.element_size())))
        self._formed: Tensor | None = None

    def _entries(self, rows: Tensor) -> Tensor:
        """K[rows, :] without the noise, (k, n)."""
        # by differences: the formula through inner products loses half the digits of small
        # distances
        distance = torch.cdist(rows, self.points, compute_mode="donot_use_mm_for_euclid_dist")
        return _KINDS[self.kind](distance).mul_(self.variance)

    def _apply(self, block: Tensor) -> Tensor:
        if self.rows == self.dim:
            return (self._whole() @ block).add_(block, alpha=self.noise)
        out = self.noise * block
        for first in range(0, self.dim, self.rows):
            where = slice(first, first + self.rows)
            out[where] += self._entries(self.points[where]) @ block
        return out

    def _whole(self) -> Tensor:
        """K without the noise, formed at the first call."""
        if self._formed is None:
            self._formed = self._entries(self.points)
        return self._formed

    def columns(self, indices: Sequence[int]) -> Tensor:
        """K[:, indices], by n·k evaluations of the kernel."""
        self.matvecs += len(indices)
        found = self._entries(self.points[list(indices)]).T.contiguous()
        found[list(indices), range(len(indices))] += self.noise
        return found

    def known_diagonal(self) -> Tensor:
        value = self.variance + self.noise
        return torch.full((self.dim,), value, dtype=self.dtype, device=self.device)

    def known_squares(self) -> float | None:
        if self.rows < self.dim:
            return None
        squares = float(self._whole().double().square().sum())
        return squares + self.dim * (2 * self.variance + self.noise) * self.noise

    def known_bounds(self) -> tuple[float, float]:
        return self.noise, self.dim * self.variance + self.noise


def kernel_matrix(
    points: Any,
    kind: str = "squared_exponential",
    length_scale: float | Sequence[float] = 1.0,
    noise: float = 0.0,
    variance: float = 1.0,
    memory: int = MEMORY,
) -> KernelMatrix:
    """The kernel matrix of ``points`` (n, d) as an operator, on their device and in their dtype.

    ``kind`` is "squared_exponential", exp(−r²/2), "exponential" (also "matern12"), exp(−r),
    "matern32" or "matern52"; r is the distance over ``length_scale``, one number or one a
    dimension. ``noise`` is the variance added to the diagonal. Above ``memory`` bytes the matrix is
    made in blocks of rows, anew for every product.

    >>> kernel_matrix([[0.0], [1.0]], "exponential") @ torch.tensor([1.0, 0.0], dtype=torch.float64)
    tensor([1.0000, 0.3679], dtype=torch.float64)
    """
    require_choice(kind, "kind", tuple(_KINDS))
    require_positive(variance, "variance")
    require_count(memory, "memory", 1)
    fine = isinstance(noise, int | float) and 0 <= noise < math.inf
    require(fine, "noise", "be a finite number of at least 0", noise)
    places = _as_points(points)
    if isinstance(length_scale, int | float):
        require_positive(length_scale, "length_scale")
    scale, d = torch.as_tensor(length_scale, dtype=torch.float64), places.shape[1]
    fits = scale.shape in ((), (1,), (d,)) and bool((torch.isfinite(scale) & (scale > 0)).all())
    require(fits, "length_scale", f"be one number above 0, or {d} of them", scale)
    # centred first: far from the origin the division would round away small distances
    scaled = (places - places.mean(dim=0)) / scale.to(places)
    return KernelMatrix(scaled.contiguous(), kind, float(variance), float(noise), memory)


def _as_points(points: Any) -> Tensor:
    try:
        own = points.detach() if isinstance(points, Tensor) else torch.as_tensor(np.array(points))
    except (TypeError, ValueError) as error:
        got = describe(points)
        raise TypeError(f"points must be an array of numbers (n, d), got {got}") from error
    plain = not own.is_complex() and own.dtype != torch.bool
    require(plain, "points", "be real numbers", str(own.dtype), error=TypeError)
    shaped, cure = own.ndim == 2 and own.numel() > 0, "for one dimension pass points[:, None]"
    require(shaped, "points", "have shape (n, d), and not be empty", own, cure)
    own = own if own.dtype in (torch.float32, torch.float64) else own.double()
    finite = bool(torch.isfinite(own).all())
    require(finite, "points", "hold finite numbers only", "NaN or infinity")
    return own
