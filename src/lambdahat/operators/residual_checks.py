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
from torch.autograd.graph import GradientEdge

from lambdahat._rng import generator
from lambdahat.batches import take
from lambdahat.operators.closed_form import Part, Trusted, used_once
from lambdahat.operators.layer_calls import owner, recorded
from lambdahat.operators.layer_squares import Squares
from lambdahat.operators.linearise import twice_differentiable
from lambdahat.operators.output_factors import tolerance
from lambdahat.operators.piecewise import PROBE, Form, normalised, random_like, random_mix
from lambdahat.operators.probed_layers import MOST_PROBED, Layers, Stretch
from lambdahat.operators.residuals import Bend, Residuals, second_slope
from lambdahat.problem import Problem

MOST_CHECKED = 64  # columns of an activation that are worth a comparison
DRAWS = 3  # random mixes and directions for a stretch, in one of which a defect might all but cancel
ROUNDING = 4  # units in the last place that a second derivative of 0 may come out as, relative to the first


@torch.enable_grad()
def verified(form: Form, problem: Problem, leaves: dict[str, Tensor], trusted: Trusted) -> Form:
    """The form of a model with smooth activations, once its residuals agree with double backward on two samples.

    For a random mix of the outputs, second derivatives of layers are compared: along a random direction of all their
    parameters, which shows what the graph hides, and the largest in a single weight, where that takes few signals. The
    passes that takes do not grow with depth (``probed_layers``).
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
        refused = residuals.refused or _disagreement(part, mix, leaves, squares, bends, 10 * tolerance(problem))
    return Form(form.curved, refused, columns=residuals.columns)


def _disagreement(
    part: Part, mix: Tensor, leaves: dict[str, Tensor], squares: Squares, bends: Sequence[Bend], allowed: float
) -> str:
    """In which layer the second derivative of the mix is another than ``squares`` and ``bends`` say."""
    layers = Layers(part.output, leaves, part.once)
    groups = layers.probed()
    own = {prefix: [name for name in leaves if owner(name) == prefix] for prefix in layers.names}
    checks: list[tuple[list[str], Tensor]] = []
    try:
        slopes = _slopes([part.output], leaves, [mix])
        hidden = _Hidden(leaves, slopes, bends, generator(0, "hidden curvature"))
        for group in groups:
            checks += [([owner(name)], _single_gap(leaves[name], slopes[name], squares[name]))
                       for name in _singles(group, own, squares)]  # fmt: skip
            checks.append((group, hidden.gap([own[prefix] for prefix in group])))
        if sum(map(len, groups)) < len(layers.order):
            rng = generator(0, "stretches")
            for stretch in layers.stretches():
                points = {name: leaves[name] for name in own[stretch.layer]}
                checks += [([stretch.layer], _stretch_gap(stretch, part.output, mix, points, rng))
                           for _ in range(DRAWS)]  # fmt: skip
    except (RuntimeError, NotImplementedError):  # an operation that can be differentiated only once
        pass
    values = torch.stack([check for _, check in checks]).tolist() if checks else []  # once: a GPU is waited for
    for (group, _), value in zip(checks, values, strict=True):
        if _differs(value, allowed):
            alone = ((prefix, hidden.gap([own[prefix]]).tolist()) for prefix in (group if len(group) > 1 else ()))
            prefix = next((prefix for prefix, gap in alone if _differs(gap, allowed)), group[0])
            return f"its second derivative in {own[prefix][0]} is not that of its activations"
    return ""


def _differs(check: Sequence[float], allowed: float) -> bool:
    gap, size, noise = check
    return not gap <= allowed * size + noise


def _singles(group: Sequence[str], own: dict[str, list[str]], squares: Squares) -> list[str]:
    """A parameter of each layer of a group that has ``squares``; of many layers, a pass for each, only the first."""
    found = [next((name for name in own[prefix] if name in squares), "") for prefix in group]
    return [name for name in found if name][: None if len(own) <= MOST_PROBED else 1]


def _single_gap(leaf: Tensor, slope: Tensor, square: Tensor) -> Tensor:
    """How far off double backward the largest second derivative in a single weight is, its size, and no noise: (3,)."""
    said = square.flatten()
    place = said.abs().argmax(dim=0, keepdim=True)  # stays on the device, as an index of numbers would not
    (row,) = _along([slope.flatten().gather(0, place)], [said.new_ones(1, dtype=slope.dtype)], [leaf])
    expected = said.gather(0, place).squeeze()
    gap = (row.flatten().gather(0, place).squeeze() - expected).abs()
    return torch.stack([gap, expected.abs(), torch.zeros_like(gap)]).double()


def _stretch_gap(
    stretch: Stretch, output: Tensor, mix: Tensor, points: dict[str, Tensor], rng: torch.Generator
) -> Tensor:
    """The gap (3,) of a layer's parameters for a mix of what is at the stretch's top, in place of the output."""
    top: Any = output
    if stretch.top is not None:
        top, made = stretch.top, stretch.top.node._input_metadata[stretch.top.output_nr]
        mix = random_like(torch.empty(made.shape, dtype=made.dtype, device=output.device), rng)
    tops = [GradientEdge(node, 0) for node in stretch.bends]
    deltas = torch.autograd.grad([top], tops, [mix], retain_graph=True, allow_unused=True) if tops else ()
    bends = []
    for node, delta in zip(stretch.bends, deltas, strict=True):
        if delta is not None:
            edge = GradientEdge(*node.next_functions[0])
            bends.append(Bend(edge, second_slope(node, delta, edge), {}, ()))
    return _Hidden(points, _slopes([top], points, [mix]), bends, rng).gap([list(points)])


class _Hidden:
    """Curvature that is not in the activations, along a random direction v of the parameters θ of some layers.

    A layer is linear in its parameters together, and so are layers that are nowhere multiplied: if the graph tells the
    truth, vᵀ∂²(uᵀz)/∂θ²v is Σ_k Σ_i r_ki (∂z_ki/∂θ·v)², for a mix u of the outputs. ∂z/∂θ·v is the derivative of
    vᵀ(∂z/∂θ)ᵀw in w.
    """

    def __init__(
        self, leaves: dict[str, Tensor], slopes: dict[str, Tensor], bends: Sequence[Bend], rng: torch.Generator
    ) -> None:
        self._leaves, self._slopes, self._rng = leaves, slopes, rng
        self._residual = [bend.residual for bend in bends]
        self._weights = [torch.zeros_like(bend.residual, requires_grad=True) for bend in bends]
        self._back = _slopes([bend.edge for bend in bends], leaves, self._weights) if bends else slopes

    def gap(self, layers: Sequence[Sequence[str]]) -> Tensor:
        """How much there is in these layers' parameters, the size of what activations give, and rounding: (3,)."""
        names = [name for layer in layers for name in layer]
        points, slopes = [self._leaves[name] for name in names], [self._slopes[name] for name in names]
        directions = self._directions(layers)
        rows = _along(slopes, directions, points)
        moved = _along([self._back[name] for name in names], directions, self._weights) if self._weights else []
        pairs = zip(self._residual, moved, strict=True)
        parts = torch.cat(
            [rows[0].new_zeros(1).double(), *(r.double().flatten() * dz.double().flatten().square() for r, dz in pairs)]
        )
        found = torch.stack([(row * v).sum(dtype=torch.float64) for row, v in zip(rows, directions, strict=True)]).sum()
        lengths = [_norms(part) for part in (slopes, directions)]
        noise = ROUNDING * torch.finfo(points[0].dtype).eps * (lengths[0] @ lengths[1]) * lengths[1].norm()
        return torch.stack([(found - parts.sum()).abs(), parts.abs().sum(), noise])

    def _directions(self, layers: Sequence[Sequence[str]]) -> list[Tensor]:
        """Random ones v_ℓ, with ‖slope_ℓ‖‖v_ℓ‖² the same for all layers, so that rounding in one hides no other."""
        drawn = [[_direction(self._leaves[name], self._rng) for name in names] for names in layers]
        if len(layers) > 1:
            slopes = [_norms([self._slopes[name] for name in names]).norm() for names in layers]
            sizes = torch.stack([slope * _norms(v).square().sum() for slope, v in zip(slopes, drawn, strict=True)])
            least = torch.where(sizes > 0, sizes, torch.inf).min()
            scales = torch.where(sizes > 0, (least / sizes).sqrt(), 1.0).unbind()
            drawn = [[v * scale.to(v.dtype) for v in vs] for vs, scale in zip(drawn, scales, strict=True)]
        return [v for vs in drawn for v in vs]


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(list(tensors))).double()


def _direction(like: Tensor, rng: torch.Generator) -> Tensor:
    """A product of random vectors, one for each dimension, of numbers not near 0: no weight or unit is missed."""
    found = like.new_ones([1] * like.ndim)
    for dim, size in enumerate(like.shape):
        drawn = random_like(like.new_empty(size), rng)
        found = found * (drawn + 0.5 * drawn.sign()).reshape(-1, *[1] * (like.ndim - dim - 1))
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
