"""LanczosOPT on many softmax regressions at once: training sets × settings, one matrix product for
all of a set's.

The Hessian of softmax regression is known in closed form, so that a product with it is two
multiplications by the inputs. ``lambdahat.optim.LanczosNewton`` does the same for any model, one
network at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from lambdahat._core.rng import generator


class Softmax:
    """S training sets of n samples, each with R weight matrices of its own: vectors are (S, R, P),
    P = (d + 1)·K.

    ``x`` is (S, n, d) and ``y`` (S, n); a column of ones for the biases is added to x. A vector
    reads (d + 1, K), the biases last.
    """

    def __init__(self, x: Tensor, y: Tensor, classes: int) -> None:
        self.x, self.y, self.classes = pad(x, (0, 1), value=1.0), y, classes
        self.targets = one_hot(y, classes).to(x.dtype)

    def logits(self, vectors: Tensor) -> Tensor:
        """(S, n, R, K)."""
        sets, cells = vectors.shape[:2]
        columns = vectors.view(sets, cells, -1, self.classes).transpose(1, 2).flatten(2)
        found: Tensor = (self.x @ columns).unflatten(2, (cells, self.classes))
        return found

    def pulled(self, outputs: Tensor) -> Tensor:
        """Xᵀ·outputs/n for outputs (S, n, R, K): (S, R, P)."""
        found: Tensor = (self.x.mT @ outputs.flatten(2)).unflatten(
            2, outputs.shape[2:]
        ) / self.x.shape[1]
        return found.transpose(1, 2).flatten(2)

    def gradient(self, vectors: Tensor) -> Tensor:
        """∇L = Xᵀ(p − y)/n."""
        return self.pulled(self.logits(vectors).softmax(-1) - self.targets.unsqueeze(2))

    def product(self, at: Tensor) -> Callable[[Tensor], Tensor]:
        """v ↦ Hv = Xᵀ[p∘(Xv) − p·(pᵀXv)]/n at the weights ``at``."""
        shares = self.logits(at).softmax(-1)

        def times(vectors: Tensor) -> Tensor:
            pushed = shares * self.logits(vectors)
            return self.pulled(pushed - shares * pushed.sum(-1, keepdim=True))

        return times

    def judged(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss and share of wrong answers, (S, R) each, in float64; both are NaN where the
        loss is not finite.
        """
        logits = self.logits(vectors)
        loss = (logits.logsumexp(-1) - (logits * self.targets.unsqueeze(2)).sum(-1)).mean(
            1, dtype=torch.float64
        )
        wrong = (logits.argmax(-1) != self.y.unsqueeze(-1)).double().mean(1)
        return tuple(torch.where(loss.isfinite(), values, math.nan) for values in (loss, wrong))  # type: ignore[return-value]


class Krylov(NamedTuple):
    """Orthonormal ``basis`` (S, R, m, P), the Ritz ``values`` (S, R, m) ≥ 0 and their vectors in
    it (S, R, m, m).
    """

    basis: Tensor
    values: Tensor
    turn: Tensor


def krylov(product: Callable[[Tensor], Tensor], start: Tensor, pairs: int) -> Krylov:
    """``pairs`` Lanczos steps for all from ``start`` (S, R, P), made orthogonal to the whole
    basis twice a step.
    """
    basis = start.new_zeros(*start.shape[:2], pairs, start.shape[2])
    alpha = torch.zeros(*start.shape[:2], pairs, dtype=torch.float64, device=start.device)
    beta = torch.zeros_like(alpha)
    vector = start
    for step in range(pairs):
        length = torch.linalg.vector_norm(vector, dim=-1, keepdim=True)
        beta[..., step] = length[..., 0].double()
        basis[..., step, :] = vector / length.clamp_min(torch.finfo(start.dtype).tiny)
        known = basis[..., : step + 1, :]
        vector = product(basis[..., step, :])
        alpha[..., step] = (vector * basis[..., step, :]).sum(-1, dtype=torch.float64)
        for _ in range(2):
            vector = vector - _combined(known, _overlaps(known, vector))
    off = torch.diag_embed(beta[..., 1:], 1)
    # a cell that has diverged must not stop the others
    values, turn = torch.linalg.eigh(
        (torch.diag_embed(alpha) + off + off.mT).nan_to_num(0.0, 0.0, 0.0)
    )
    return Krylov(basis, values.abs().to(start.dtype), turn.to(start.dtype))


def newton_directions(gradient: Tensor, space: Krylov, eta: Tensor, damping: Tensor) -> Tensor:
    """Eq. 6.6 of the spectral thesis, Σ_i φ_i φ_iᵀg/(ηλ_i + δ) + (g − Σ_i φ_i φ_iᵀg)/δ; eta and
    damping are (R,).

    What is left of g is projected twice, for 1/δ would amplify what rounding leaves of the basis in
    it.
    """
    rest, inside = gradient, torch.zeros_like(space.values)
    for _ in range(2):
        overlaps = _overlaps(space.basis, rest)
        inside, rest = inside + overlaps, rest - _combined(space.basis, overlaps)
    along = _combined(space.turn, inside)  # turnᵀ c: the parts along the Ritz vectors
    gains = along / (eta[:, None] * space.values + damping[:, None])
    return rest / damping[:, None] + _combined(space.basis, _overlaps(space.turn, gains))


def start_vectors(shape: torch.Size, seed: int, step: int, like: Tensor) -> Tensor:
    """Gaussian starts (S, R, P), the same for all R settings of a training set."""
    sets, cells, size = shape
    drawn = torch.randn(sets, 1, size, generator=generator(seed, "lanczos start", step))
    return drawn.to(like).expand(sets, cells, size)


def _overlaps(rows: Tensor, vectors: Tensor) -> Tensor:
    """rows·v, (…, m)."""
    return (rows @ vectors.unsqueeze(-1)).squeeze(-1)


def _combined(rows: Tensor, weights: Tensor) -> Tensor:
    """rowsᵀ·weights."""
    return (rows.mT @ weights.unsqueeze(-1)).squeeze(-1)
