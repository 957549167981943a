"""What smooth activations add to the diagonal of the Hessian, beside the Gauss–Newton matrix's.

Where a network is linear, piecewise linear or a product in everything but activations a = φ(z) of
single elements, ∂²ℓ/∂θ_j² has besides the Gauss–Newton term Σ_k Σ_i r_ki (∂z_ki/∂θ_j)², with r_k =
φ''(z_k)·∂ℓ/∂a_k, over all such activations k: as much as Gauss–Newton matrices of the "outputs"
z_k, with M = diag(r_k).

At the layer z = Wa + b itself the matrix is diag(r), and one linear map further down, z' = Wφ(z) +
b, its diagonal is φ'(z)²·(W∘W)ᵀr: one product for all columns. A perceptron of two hidden layers
has no others. Below, columns √|r_i|·e_i are sent back one by one or, in their place, random signs
of all: E[(Σ_i ε_i √r_i J_ij)²] = Σ_i r_i J_ij², for r > 0 and r < 0 apart, independent from sample
to sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from lambdahat._core.rng import generator
from lambdahat.operators.exact.closed_form import CHUNK_BYTES, Part
from lambdahat.operators.exact.layer_calls import Call, full_name
from lambdahat.operators.exact.layer_squares import (
    Squares,
    add_squares,
    one_position,
    pulled_squares,
)
from lambdahat.operators.exact.piecewise import SMOOTH, form_of_graph
from lambdahat.operators.linearise import kind_of, loss_slopes, nodes_below
from lambdahat.problem import Problem

# Autograd nodes by name. These move elements, or leave some out:
_MOVES = """
    Alias ChannelShuffle Clone Flip Permute PixelShuffle PixelUnshuffle ReshapeAlias Roll Select
    Slice Squeeze T ToCopy Transpose UnsafeView Unsqueeze View"""
# The output depends, element by element, on one element of the only input that is no constant:
_ELEMENTWISE = """
    Abs Add Clamp ClampMax ClampMin Div Hardshrink Hardtanh LeakyRelu MaskedFill Mul Neg Relu
    Rsub Softshrink Sub Threshold"""

MOVES, ELEMENTWISE = frozenset(_MOVES.split()), SMOOTH | frozenset(_ELEMENTWISE.split())


@dataclass(frozen=True)
class Bend:
    """A smooth activation a = φ(z): the edge that z came by, and r = φ''(z)·∂ℓ/∂a (B, …).

    ``near``: the diagonal (B, O) of Jᵀdiag(r)J at the layers that at most one linear map separates
    from z, by name. ``far``: the layers below whose part takes the whole matrix.
    """

    edge: GradientEdge
    residual: Tensor
    near: dict[str, Tensor]
    far: tuple[str, ...]

    @property
    def columns(self) -> int:
        """How many signals the far layers take."""
        return self.residual[0].numel() if self.far else 0


class Residuals:
    """Σ_k Σ_i r_ki (∂z_ki/∂θ_j)² for each part of the data that it is called with, exactly.

    What it finds in the graphs is kept: ``curved``, the first smooth activation; ``refused``, why a
    part has no such form; ``columns``, the largest number of signals that far layers take.
    """

    def __init__(self, problem: Problem, leaves: dict[str, Tensor], diagonal: bool = False) -> None:
        self.problem, self.leaves, self.diagonal = problem, leaves, diagonal
        self.curved, self.refused, self.columns = "", "", 0

    def __call__(self, part: Part) -> Squares:
        return self.squares_of(
            self.bends(part, lambda: loss_slopes(self.problem, part.output, part.batch)[0]), part
        )

    def squares_of(self, bends: Sequence[Bend], part: Part) -> Squares:
        """Of these activations."""
        found = [_near_squares(bends, part.once, self.diagonal)]
        return _added(
            found + [_far_squares(bend, part, self.diagonal) for bend in bends if bend.far], part
        )

    def bends(self, part: Part, slope: Callable[[], Tensor]) -> list[Bend]:
        """The smooth activations of a part, for ∂ℓ/∂z = ``slope()`` (B, …) at its output; none if
        it has no form.
        """
        form = form_of_graph(self.problem, self.leaves, part.batch, part.output)
        outside = sorted(set(self.leaves) - part.layered) if form.bends else []
        if outside and not form.refused:
            reason = (
                f"{outside[0]} does not enter once, through a linear, convolution or batch-norm"
                " layer"
            )
            self.refused = self.refused or f"{form.curved}, and {reason}"
        self.curved, self.refused = self.curved or form.curved, self.refused or form.refused
        found = [] if self.refused or not form.bends else list(_bends(form.bends, part, slope()))
        self.columns = max(self.columns, sum(bend.columns for bend in found))
        return found


class SampledResiduals(Residuals):
    """The same by random signs: the round that ``index`` names."""

    def __init__(self, problem: Problem, leaves: dict[str, Tensor], seed: int, index: int) -> None:
        super().__init__(problem, leaves)
        self.seed, self.index = seed, index

    def squares_of(self, bends: Sequence[Bend], part: Part) -> Squares:
        return _added([_sampled_squares(bends, part, self.seed, self.index)], part) if bends else {}


class ResidualRounds(Residuals):
    """Several rounds of random signs in one pass over the data: ``totals`` (R,), the trace by
    each.
    """

    def __init__(
        self, problem: Problem, leaves: dict[str, Tensor], seed: int, rounds: Sequence[int]
    ) -> None:
        super().__init__(problem, leaves)
        self.seed, self.rounds = seed, rounds
        self.totals = torch.zeros(len(rounds), dtype=torch.float64, device=problem.device)

    def squares_of(self, bends: Sequence[Bend], part: Part) -> Squares:
        """Nothing: the rounds are added up here."""
        for place, index in enumerate(self.rounds if bends else ()):
            found = _added([_sampled_squares(bends, part, self.seed, index)], part).values()
            self.totals[place] += part.share * torch.stack(list(found)).sum(dtype=torch.float64)
        return {}


def _added(found: Sequence[Squares], part: Part) -> Squares:
    """The sum over some, of the parameters that enter by layers alone."""
    total: Squares = {}
    for squares in found:
        add_squares(
            total, {name: square for name, square in squares.items() if name in part.layered}
        )
    return total


def _bends(nodes: Sequence[Any], part: Part, slope: Tensor) -> Iterator[Bend]:
    tops = [GradientEdge(node, 0) for node in nodes]
    deltas = torch.autograd.grad(part.output, tops, slope.to(part.output.dtype), retain_graph=True)
    lefts = {(call.left.node, call.left.output_nr): prefix for prefix, call in part.once.items()}
    for node, delta in zip(nodes, deltas, strict=True):
        edge = GradientEdge(*node.next_functions[0])
        residual = second_slope(node, delta, edge)
        near, stop = _descend(edge, residual, lefts, part.once)
        below = set(nodes_below([stop]))
        yield Bend(
            edge,
            residual,
            near,
            tuple(prefix for (left, _), prefix in lefts.items() if left in below),
        )


def second_slope(node: Any, delta: Tensor, edge: GradientEdge) -> Tensor:
    """φ''(z)·δ: the derivative of φ'(z)·δ, which is what the node itself computes, with the graph
    of z.
    """
    slope = node(delta)
    if not slope.requires_grad:
        return torch.zeros_like(slope)
    (found,) = torch.autograd.grad(
        slope, edge, torch.ones_like(slope), retain_graph=True, allow_unused=True
    )
    return torch.zeros_like(slope) if found is None else found


@torch.no_grad()
def _descend(
    edge: GradientEdge, residual: Tensor, lefts: dict[tuple[Any, int], str], once: dict[str, Call]
) -> tuple[dict[str, Tensor], Any]:
    """The diagonal of Jᵀdiag(r)J at the layers that it is enough for, and the node below which it
    is not.

    Down from z, as long as one path leads there: a second linear map would take the whole matrix.
    """
    q = residual.to(torch.promote_types(residual.dtype, torch.float32))
    near: dict[str, Tensor] = {}
    place, mixed = (edge.node, edge.output_nr), False
    while place[0] is not None:
        prefix = lefts.get(place)
        if prefix is None:
            moved = _through(place[0], q)
            if moved is None:
                return near, place[0]
            place, q = moved
            continue
        call = once[prefix]
        if call.slope is None or q.ndim != 2:
            return near, place[0]
        near[prefix] = q
        if call.came is None:
            return near, None
        place, linear = (call.came.node, call.came.output_nr), isinstance(call.layer, nn.Linear)
        if linear and mixed:
            return near, place[0]
        square = call.slope.to(q.dtype).square()
        q, mixed = (q @ square, True) if linear else (q * square, mixed)
    return near, None


def _through(node: Any, q: Tensor) -> tuple[tuple[Any, int], Tensor] | None:
    """The edge below a node that moves elements or acts on each, and the diagonal there; None for
    other nodes.
    """
    kind = kind_of(node)
    inputs = [
        (index, child) for index, child in enumerate(node.next_functions) if child[0] is not None
    ]
    if len(inputs) != 1 or not (kind in MOVES or kind in ELEMENTWISE):
        return None
    (index, place), dtype = inputs[0], node._input_metadata[0].dtype
    found = node((q if kind in MOVES else torch.ones_like(q)).to(dtype))
    found = (found[index] if isinstance(found, tuple) else found).to(q.dtype)
    if kind in MOVES:
        return place, found
    return (place, q * found.square()) if found.shape == q.shape else None


def _near_squares(bends: Sequence[Bend], once: dict[str, Call], diagonal: bool) -> Squares:
    """From the diagonals at the layers' outputs, of all activations together."""
    total: dict[str, Tensor] = {}
    for bend in bends:
        for prefix, q in bend.near.items():
            total[prefix] = total[prefix] + q if prefix in total else q
    squares: Squares = {}
    for prefix, q in total.items():
        entered = once[prefix].entered.to(q.dtype)
        if isinstance(once[prefix].layer, nn.Linear):
            found = one_position(entered, q, diagonal)
        else:
            found = {"weight": (q * entered.square()).sum(dim=0), "bias": q.sum(dim=0)}
            found = found if diagonal else {key: square.sum() for key, square in found.items()}
        squares |= {full_name(prefix, key): square for key, square in found.items()}
    return squares


def _far_squares(bend: Bend, part: Part, diagonal: bool) -> Squares:
    """By one signal √|r_i|·e_i a column, as many at a time as the budget allows."""
    flat = bend.residual.flatten(1)
    size, width = flat.shape
    root, sign = flat.abs().sqrt(), flat.sign()
    room = min(CHUNK_BYTES.get(flat.device.type, CHUNK_BYTES["cpu"]), part.room or math.inf)
    step = int(max(1, min(width, room // max(1, flat.numel() * flat.element_size()))))
    calls = {prefix: part.once[prefix] for prefix in bend.far}
    squares: Squares = {}
    for start in range(0, width, step):
        where = torch.arange(start, min(start + step, width), device=flat.device)
        seeds = flat.new_zeros(len(where), size, width)
        seeds[torch.arange(len(where), device=flat.device), :, where] = root[:, where].T
        seeds = seeds.reshape(-1, *bend.residual.shape)
        found = pulled_squares([bend.edge], [seeds], sign[:, where].T, calls, diagonal, part.room)
        add_squares(squares, found)
    return squares


def _sampled_squares(bends: Sequence[Bend], part: Part, seed: int, index: int) -> Squares:
    """All activations and all columns in two signals, ε∘√r₊ and ε∘√r₋ with independent signs ε."""
    seeds, rng = [], generator(seed, "sampled residuals", index, part.batch.index)
    for bend in bends:
        signs = torch.randint(2, bend.residual.shape, generator=rng).to(bend.residual) * 2 - 1
        seeds.append(
            torch.stack(
                [part.clamp(min=0).sqrt() * signs for part in (bend.residual, -bend.residual)]
            )
        )
    signs = seeds[0].new_ones(2, len(bends[0].residual))
    signs[1] = -1.0
    return pulled_squares([bend.edge for bend in bends], seeds, signs, part.once, False, part.room)
