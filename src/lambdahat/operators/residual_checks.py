"""Does what smooth activations are said to add to the Hessian's diagonal agree with double backward?

``piecewise`` and ``residuals`` read the form of a model off its graph, which does not show everything: hooks on tensors
for one. Numbers do. Here they are compared on two samples, before any closed form is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lambdahat._rng import generator
from lambdahat.batches import take
from lambdahat.operators.closed_form import Part, Trusted, used_once
from lambdahat.operators.layer_calls import owner, recorded
from lambdahat.operators.layer_squares import Squares
from lambdahat.operators.linearise import twice_differentiable
from lambdahat.operators.output_factors import tolerance
from lambdahat.operators.piecewise import PROBE, Form, normalised, random_like, random_mix
from lambdahat.operators.residuals import Bend, Residuals
from lambdahat.problem import Problem

MOST_CHECKED = 64  # columns of an activation that are worth a comparison
ROUNDING = 4  # units in the last place that a second derivative of 0 may come out as, relative to the first


@torch.enable_grad()
def verified(form: Form, problem: Problem, leaves: dict[str, Tensor], trusted: Trusted) -> Form:
    """The form of a model with smooth activations, once its residuals agree with double backward on two samples.

    For a random mix of the outputs, second derivatives of each layer are compared: along a random direction of all its
    parameters, which shows what the graph hides, and the largest in a single weight, where that takes few signals.
    """
    first = problem.batches.first()
    few = take(first, torch.arange(min(PROBE, first.size), device=problem.device))
    residuals = Residuals(problem, leaves, diagonal=True)
    with twice_differentiable():
        output, calls = recorded(problem, leaves, few)
        part = Part(few, 1.0, output, *used_once(leaves, few, output, calls, trusted.names))
        mix = random_mix(output, normalised(problem, few, output), generator(0, "residuals"))
        bends = residuals.bends(part, lambda: mix)
        skipped = {prefix for bend in bends if bend.columns > MOST_CHECKED for prefix in bend.far}
        few_columns = [bend if bend.columns <= MOST_CHECKED else replace(bend, far=()) for bend in bends]
        squares = residuals.squares_of(few_columns, part)
        squares = {name: square for name, square in squares.items() if owner(name) not in skipped}
        refused = residuals.refused or _disagreement(output, mix, leaves, squares, bends, 10 * tolerance(problem))
    return Form(form.curved, refused, columns=residuals.columns)


def _disagreement(
    output: Tensor, mix: Tensor, leaves: dict[str, Tensor], squares: Squares, bends: Sequence[Bend], allowed: float
) -> str:
    """In which layer the second derivative of the mix is another than ``squares`` and ``bends`` say."""
    layers: dict[str, list[str]] = {}
    for name in leaves:
        layers.setdefault(owner(name), []).append(name)
    checks: list[tuple[str, Tensor]] = []
    try:
        slopes = _slopes([output], leaves, [mix])
        hidden = _Hidden(leaves, slopes, bends)
        for names in layers.values():
            single = next((name for name in names if name in squares), None)
            if single is not None:
                checks.append((single, _single_gap(leaves[single], slopes[single], squares[single])))
            checks.append((names[0], hidden.gap(names)))
    except (RuntimeError, NotImplementedError):  # an operation that can be differentiated only once
        pass
    values = torch.stack([check for _, check in checks]).tolist() if checks else []  # once: a GPU is waited for
    for (name, _), (gap, size, noise) in zip(checks, values, strict=True):
        if not gap <= allowed * size + noise:
            return f"its second derivative in {name} is not that of its activations"
    return ""


def _single_gap(leaf: Tensor, slope: Tensor, square: Tensor) -> Tensor:
    """How far off double backward the largest second derivative in a single weight is, its size, and no noise: (3,)."""
    said = square.flatten()
    place = said.abs().argmax()
    (row,) = _along([slope.flatten()[place]], [said.new_ones(())], [leaf])
    gap = (row.flatten()[place] - said[place]).abs()
    return torch.stack([gap, said[place].abs(), torch.zeros_like(gap)]).double()


class _Hidden:
    """Curvature that is not in the activations, along a random direction v of the parameters θ of a layer.

    A layer is linear in its parameters together: if the graph tells the truth, vᵀ∂²(uᵀz)/∂θ²v is
    Σ_k Σ_i r_ki (∂z_ki/∂θ·v)², for a mix u of the outputs. ∂z/∂θ·v is the derivative of vᵀ(∂z/∂θ)ᵀw in w.
    """

    def __init__(self, leaves: dict[str, Tensor], slopes: dict[str, Tensor], bends: Sequence[Bend]) -> None:
        self._leaves, self._slopes, self._rng = leaves, slopes, generator(0, "hidden curvature")
        self._residual = torch.cat([bend.residual.flatten() for bend in bends]).double()
        self._weights = [torch.zeros_like(bend.residual, requires_grad=True) for bend in bends]
        self._back = _slopes([bend.edge for bend in bends], leaves, self._weights)

    def gap(self, names: Sequence[str]) -> Tensor:
        """How much there is in these parameters of a layer, the size of what activations give, and rounding: (3,)."""
        points, slopes = [self._leaves[name] for name in names], [self._slopes[name] for name in names]
        directions = [_direction(point, self._rng) for point in points]
        rows = _along(slopes, directions, points)
        moved = _along([self._back[name] for name in names], directions, self._weights)
        parts = self._residual * torch.cat([dz.flatten() for dz in moved]).double().square()
        found = torch.stack([(row * v).sum(dtype=torch.float64) for row, v in zip(rows, directions, strict=True)]).sum()
        lengths = [torch.stack(torch._foreach_norm(part)).double() for part in (slopes, directions)]
        noise = ROUNDING * torch.finfo(points[0].dtype).eps * (lengths[0] @ lengths[1]) * lengths[1].norm()
        return torch.stack([(found - parts.sum()).abs(), parts.abs().sum(), noise])


def _direction(like: Tensor, rng: torch.Generator) -> Tensor:
    """A product of random vectors, one for each dimension: few numbers, and no single weight is missed."""
    found = like.new_ones([1] * like.ndim)
    for dim, size in enumerate(like.shape):
        found = found * random_like(like.new_empty(size), rng).reshape(-1, *[1] * (like.ndim - dim - 1))
    return found


def _slopes(tops: Sequence[Any], leaves: dict[str, Tensor], seeds: Sequence[Tensor]) -> dict[str, Tensor]:
    """Σ (∂top/∂θ)ᵀ seed of each parameter, to be differentiated once more."""
    found = torch.autograd.grad(tops, list(leaves.values()), seeds, create_graph=True, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def _along(slopes: Sequence[Tensor], directions: Sequence[Tensor], points: Sequence[Tensor]) -> Sequence[Tensor]:
    """The derivative of Σ slope·direction in each of the points."""
    live = [(slope, v) for slope, v in zip(slopes, directions, strict=True) if slope.requires_grad]
    if not live:
        return [torch.zeros_like(point) for point in points]
    tops, seeds = zip(*live, strict=True)
    return torch.autograd.grad(tops, points, seeds, retain_graph=True, materialize_grads=True)
