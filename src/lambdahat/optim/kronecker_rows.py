"""KFAC's step of a linear layer from the samples of its last backward pass, in place of their sum.

With inputs a_i and output gradients g_i the gradient of [W | b] is D = Σ_i g_i a_iᵀ, so that
G⁻¹ D A⁻¹ = Σ_i (G⁻¹g_i)(A⁻¹a_i)ᵀ: for a batch smaller than the layer that is less work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lambdahat._core.rng import generator
from lambdahat.optim.kronecker_layers import Affine, Layer

ROUNDING = 100  # units of the dtype that a sum may be off when it is taken in another order


class Rows(NamedTuple):
    """One call of a layer: inputs (b, n) and output gradients (b, m)."""

    x: Tensor
    g: Tensor


def rows_of(layer: Layer, x: Tensor, g: Tensor) -> Rows | None:
    """The rows of a call, where they make a step cheaper. On a CPU alone: ``explain`` waits for
    the device.
    """
    if not (isinstance(layer, Affine) and layer.linear and layer.trains("weight") and x.ndim == 2):
        return None
    count, n, m = len(x), x.shape[1], g.shape[1]
    fewer = count * (n * n + m * m + n * m) < n * m * (n + m)
    same = x.dtype == g.dtype == layer.key.dtype and x.dtype in (torch.float32, torch.float64)
    return Rows(x, g) if fewer and same and x.device.type == "cpu" else None


def explain(rows: Rows, gradients: Sequence[Tensor]) -> bool:
    """Whether the gradients of weight (and bias) are the sum over the rows: seen by their product
    with one vector.

    Not so after accumulation, clipping or unscaling, or where a penalty is part of the loss.
    """
    probe, one = _probe(rows.x.shape[1], rows.x.dtype)
    if len(gradients) > 1:
        found, inputs = (
            torch.addmv(gradients[1], gradients[0], probe),
            torch.addmv(one, rows.x, probe),
        )
    else:
        found, inputs = gradients[0] @ probe, rows.x @ probe
    error = torch.addmv(found, rows.g.T, inputs, alpha=-1)
    bound = ROUNDING * torch.finfo(found.dtype).eps * _norm(found)
    # squares that vanish or overflow tell nothing
    return 0.0 < bound < math.inf and _norm(error) <= bound


def step_of(rows: Rows, state: dict[str, Any], biased: bool) -> list[Tensor]:
    """The steps of weight and, where ``biased``, bias: the parts of Σ_i (G⁻¹g_i)(A⁻¹a_i)ᵀ."""
    size = rows.x.shape[1]
    # the products with W's and b's rows and columns of A⁻¹ apart: nothing is copied; A⁻¹aᵀ is
    # faster than aA⁻¹
    inverse = state["A_inverse"][0]
    g, of_weight = (rows.g @ state["G_inverse"][0]).T, inverse[:size, :size]
    if not biased:
        return [g @ (of_weight @ rows.x.T).T]
    edge = inverse[:size, size]
    inputs = torch.addmm(edge.unsqueeze(1), of_weight, rows.x.T)
    return [g @ inputs.T, g @ torch.addmv(inverse[size, size], rows.x, edge)]


@cache
def _probe(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Numbers of one sign and no pattern, and a 1 for the bias."""
    draw = torch.rand(size, generator=generator(0, "kfac", "rows", size), dtype=torch.float64).add_(
        0.5
    )
    return draw.to(dtype), torch.ones((), dtype=dtype)


def _norm(vector: Tensor) -> float:
    return math.sqrt(torch.dot(vector, vector))
