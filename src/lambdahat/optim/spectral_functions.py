"""What the online Fisher needs of small positive matrices Z: roots, floors and shares, by
eigenvectors or by products.

``by_eigenvectors`` is fast on a CPU. ``by_products`` uses batched matrix products alone: on a GPU
eigensolvers wait for the host and cannot be part of a CUDA graph, and a product of small matrices
costs a launch.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

CONVERGED = 1e-9
# how far below δ the eigenvalues of Z^½ may fall, relative to the largest, after one great gradient
SPIKE = 1e-3
# eigenvalues nearer to the floor than this, relative to the largest, may end on either side of it
NEAR = 1e-6
MARGIN = 1.02


class Task(NamedTuple):
    """What fixes the next estimate beside RY/rate; tensors are (S,) in float64, for all stacks one
    after the other.

    ``rate`` is η/N, ``mass`` tr Y, ``least`` the floor ρ(1 − η) of the singular values of RY,
    ``size`` d.
    """

    rate: Tensor
    mass: Tensor
    least: Tensor
    size: Tensor
    alpha: float | Tensor
    delta: float
    epsilon: float | Tensor


class Next(NamedTuple):
    """R' = ``turn``·RY/rate, with ``turn`` (S, R, R); D' and ``share`` E' = D'(D' + β'I)⁻¹, (S, R)
    where diagonal, else (S, R, R); ``rest`` ρ', (S,). All in float64.
    """

    turn: Tensor
    weights: Tensor
    share: Tensor
    rest: Tensor


def by_eigenvectors(images: list[Tensor], task: Task) -> Next:
    """Z = (RY)(RY)ᵀ = UCUᵀ, R' = C^{−½}Uᵀ·RY and D' = max(C^½ − ρ', floor) for stacks (S, R, d) of
    RY/rate, of one R.

    The eigenvalues of Z span the square of those of F, and NGD lifts the small ones: an eigensolver
    in float32 is accurate to the largest and turns the direction by several percent. The entries of
    Z may be float32 sums: their errors are relative to the rows of RY that they come from.
    """
    square = torch.cat([torch.bmm(image, image.mT) for image in images]).double()
    # a member that has diverged must not stop the others
    values, vectors = torch.linalg.eigh(square.nan_to_num_(0.0, 0.0, 0.0))
    rate = task.rate.unsqueeze(-1)
    root = torch.maximum(values.clamp_min(0.0).sqrt() * rate, task.least.unsqueeze(-1))
    rest = (task.mass - root.sum(-1)) / (task.size - root.shape[-1])
    floor = torch.clamp(task.delta * root[:, -1], min=task.epsilon)
    weights = torch.maximum(root - rest.unsqueeze(-1), floor.unsqueeze(-1))
    rest = torch.maximum(rest, floor)
    beta = smoothed(weights.sum(-1), rest, task.size, task.alpha).unsqueeze(-1)
    return Next(vectors.mT * (rate / root).unsqueeze(-1), weights, weights / (weights + beta), rest)


def smoothed(trace: Tensor, rest: Tensor, size: Tensor, alpha: float | Tensor) -> Tensor:
    """β = ρ + κ = ρ(1 + α) + α·tr(D)/d."""
    return rest * (1.0 + alpha) + alpha * trace / size


def by_products(images: list[Tensor], task: Task) -> Next:
    """The same with R' = Z^{−½}RY and D' = max(Z^½ − ρ'I, floor·I), for stacks of any R, in
    float64.
    """
    square, real = _filled([torch.bmm(image, image.mT) for image in images])
    scale = _column(torch.linalg.matrix_norm(square))
    eye = torch.eye(square.shape[-1], dtype=scale.dtype, device=scale.device)
    # rounding leaves eigenvalues below 0 where the floor is this low
    square = square / scale + 1e-15 * eye
    root, whiten = _roots(square, eye, SPIKE * task.delta)
    root, whiten = root * scale.sqrt() * _column(task.rate), whiten / scale.sqrt()
    largest = (_largest(square) * scale[:, 0, 0]).sqrt() * task.rate
    rest = (task.mass - _trace(root, real)) / (task.size - real.sum(-1))
    floor = torch.clamp(task.delta * largest, min=task.epsilon)
    weights = _floored(root - _column(rest) * eye, floor, largest + rest.abs(), eye)
    rest = torch.maximum(rest, floor)
    beta = smoothed(_trace(weights, real), rest, task.size, task.alpha)
    bound = MARGIN * torch.maximum(largest, floor) + beta
    # β' ≥ ρ' ≥ floor and D' ≥ floor, so that D' + β' ≥ 2δ of its largest eigenvalue
    inverse = _inverse((weights + _column(beta) * eye) / _column(bound), eye, 0.5 * task.delta)
    return Next(whiten, weights, eye - _column(beta / bound) * inverse, rest)


def _filled(squares: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Matrices of different order as one stack (S, R, R), and 1 where a row is one, else 0, (S, R).

    The rows that fill up are eigenvectors of an eigenvalue that is not the largest.
    """
    most = max(square.shape[-1] for square in squares)
    filled, real = [], []
    for square in squares:
        lack = most - square.shape[-1]
        diagonal = pad(torch.zeros_like(square[..., 0]), (0, lack), value=1.0) * square[:, :1, 0]
        filled.append(pad(square, (0, lack, 0, lack)) + torch.diag_embed(diagonal))
        real.append(pad(torch.ones_like(square[..., 0]), (0, lack)))
    return torch.cat(filled), torch.cat(real)


def _floored(matrices: Tensor, floor: Tensor, bound: Tensor, eye: Tensor) -> Tensor:
    """max(X, floor·I) of symmetric X with norm at most ``bound``: floor + (K + K·sign K)/2, K =
    X − floor.
    """
    above = matrices - _column(floor) * eye
    sign = _sign(above / _column(MARGIN * (bound + floor)), NEAR)
    above = 0.5 * (above + torch.bmm(above, sign))
    return 0.5 * (above + above.mT) + _column(floor) * eye


def _column(values: Tensor) -> Tensor:
    return values[:, None, None]


def _trace(matrices: Tensor, real: Tensor | None = None) -> Tensor:
    diagonal = matrices.diagonal(dim1=-2, dim2=-1)
    return (diagonal if real is None else diagonal * real).sum(-1)


def _schedule(low: float) -> list[float]:
    """Scales c of the cubic x → cx(3 − c²x²)/2 that take [low, 1] to 1 fastest (Chen and Chow,
    2014).
    """
    scales = []
    while 1.0 - low > CONVERGED:
        scale = math.sqrt(3.0 / (1.0 + low + low * low))
        scales.append(scale)
        low = 0.5 * scale * low * (3.0 - (scale * low) ** 2)
    return scales


def _roots(square: Tensor, eye: Tensor, low: float) -> tuple[Tensor, Tensor]:
    """Z^½ and Z^{−½} of Z with eigenvalues in [low², 1]: Newton–Schulz, coupled (Higham, 2008,
    Eq. 6.35) and scaled.
    """
    root, inverse = square, eye.expand_as(square)
    for scale in _schedule(max(low, 1e-8)):
        product = torch.bmm(inverse, root)
        keep, take = 1.5 * scale, -0.5 * scale**3
        root, inverse = (
            torch.baddbmm(root, root, product, beta=keep, alpha=take),
            torch.baddbmm(inverse, product, inverse, beta=keep, alpha=take),
        )
    return root, inverse


def _sign(matrices: Tensor, low: float) -> Tensor:
    """sign(X) of symmetric X with norm at most 1; eigenvalues nearer to 0 than ``low`` are left
    between −1 and 1.
    """
    for scale in _schedule(low):
        matrices = torch.baddbmm(
            matrices,
            matrices,
            torch.bmm(matrices, matrices),
            beta=1.5 * scale,
            alpha=-0.5 * scale**3,
        )
    return matrices


def _inverse(matrices: Tensor, eye: Tensor, low: float) -> Tensor:
    """X⁻¹ for eigenvalues in [low, 1]: Newton–Schulz (Hotelling, Schulz), scaled."""
    inverse = eye.expand_as(matrices)
    while 1.0 - low > CONVERGED:
        scale = 2.0 / (1.0 + low)
        inverse = torch.baddbmm(
            inverse, inverse, torch.bmm(matrices, inverse), beta=2 * scale, alpha=-(scale**2)
        )
        low = 4.0 * low / (1.0 + low) ** 2
    return inverse


def _largest(square: Tensor) -> Tensor:
    """The largest eigenvalue of Z of Frobenius norm 1: tr(Z·Z^k)/tr(Z^k), k = 2¹⁵, by squaring,
    without underflow.
    """
    power = square
    for _ in range(3):
        power = power / _column(_trace(power))
        for _ in range(5):
            power = torch.bmm(power, power)
    return (square * power).sum((-2, -1)) / _trace(power)
