"""What smooth activations add to the diagonal of a Hessian, and the checks of it.

Where a network is linear, piecewise linear or a product in everything but activations a = φ(z) of
single elements, ∂²ℓ/∂θ_j² has besides the Gauss–Newton term Σ_k Σ_i r_ki (∂z_ki/∂θ_j)², with r_k =
φ''(z_k)·∂ℓ/∂a_k: as much as Gauss–Newton matrices of the "outputs" z_k, with M = diag(r_k). At the
layer z = Wa + b itself the matrix is diag(r), and one linear map further down, z' = Wφ(z) + b, its
diagonal is φ'(z)²·(W∘W)ᵀr: one product for all columns. Below, columns √|r_i|·e_i are sent back one
by one or, in their place, all times normal numbers u: E[(Σ_i u_i √r_i J_ij)²] = Σ_i r_i J_ij², for
r > 0 and r < 0 apart, independent from sample to sample.

The checks compare this with double backward, on a few samples. The form of a model is read off its
graph, which does not show everything, hooks on tensors for one. Numbers do. What a graph hides is
felt by every layer below it, the less the further it is from the output. So of many layers some are
followed to the output: those with no layer below, and others at equal distances. Besides, every
stretch of the graph from a layer to the next is looked at by itself, so that the number of passes
does not grow with depth.

A direction of several layers at once has the second derivatives ∂²/∂θ_ℓ∂θ_m besides. Activations
account for these too unless ℓ and m are multiplied somewhere, as a layer's weight is by what the
layers below gave. Layers that are nowhere multiplied, as in parallel branches, are checked
together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import combinations, islice
from operator import mul
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from lambdahat._core.device import pull_back
from lambdahat._core.rng import generator
from lambdahat.operators.exact import layer_squares, validity
from lambdahat.operators.exact.layer_squares import (
    ELEMENTWISE,
    SMOOTH,
    Form,
    LayerCall,
    Part,
    Squares,
    Trusted,
    owner,
    pull_squares,
)
from lambdahat.operators.exact.validity import Few, MixedOutputs, ModelForm
from lambdahat.operators.linearise import (
    Leaves,
    kind_of,
    loss_slopes,
    nodes_below,
    tolerance,
    twice_differentiable,
)
from lambdahat.problem import Problem

# Autograd nodes by name. These move elements, or leave some out:
_MOVES = """
    Alias ChannelShuffle Clone Flip Permute PixelShuffle PixelUnshuffle ReshapeAlias Roll Select
    Slice Squeeze T ToCopy Transpose UnsafeView Unsqueeze View"""
MOVES = frozenset(_MOVES.split())


@dataclass(frozen=True)
class Bend:
    """A smooth activation a = φ(z): the edge that z came by, and r = φ''(z)·∂ℓ/∂a (B, …).

    ``near``: diagonals (B, O) of Jᵀdiag(r)J at layers that at most one linear map separates from z.
    ``far``: the layers below, which take the whole matrix.
    """

    edge: GradientEdge
    residual: Tensor
    near: dict[str, Tensor]
    far: tuple[str, ...]

    @property
    def columns(self) -> int:
        """How many signals the far layers take."""
        return self.residual[0].numel() if self.far else 0


@dataclass(eq=False)
class Residuals:
    """Σ_k Σ_i r_ki (∂z_ki/∂θ_j)² for each part of the data that it is called with, exactly.

    It keeps ``curved``, the first smooth activation; ``refused``, why a part has no such form; and
    ``columns``, the largest number of signals for far layers.
    """

    problem: Problem
    leaves: Leaves
    form: Form = "samples"
    curved: str = ""
    refused: str = ""
    columns: int = 0

    def __call__(self, part: Part) -> Squares:
        bends = self.bends(part, lambda: loss_slopes(self.problem, part.output, part.batch)[0])
        return self.squares_of(bends, part) if bends else {}

    def squares_of(self, bends: Sequence[Bend], part: Part) -> Squares:
        """Of these activations, and of the parameters that enter by layers alone."""
        squares = _near_squares(bends, part.once, self.form == "diagonal")
        squares = {name: square for name, square in squares.items() if name in part.layered}
        for bend in bends:
            if bend.far:
                squares = layer_squares.add(squares, _far_squares(bend, part, self.form))
        return squares

    def bends(self, part: Part, slope: Callable[[], Tensor]) -> list[Bend]:
        """The smooth activations of a part, given ∂ℓ/∂z (B, …) at its output; none if refused."""
        form = validity.form_of_graph(self.problem, self.leaves, part)
        outside = sorted(set(self.leaves) - part.layered) if form.bends else []
        if outside and not form.refused and not self.refused:
            self.refused = (
                f"{form.curved}, and {outside[0]} does not enter once, through a linear,"
                " convolution or batch-norm layer"
            )
        self.curved, self.refused = self.curved or form.curved, self.refused or form.refused
        found = [] if self.refused or not form.bends else list(_bends(form.bends, part, slope()))
        self.columns = max(self.columns, sum(bend.columns for bend in found))
        return found


class SampledResiduals(Residuals):
    """The same of each sample by random signals, as {"": (R, B)} for R rounds."""

    def __init__(self, problem: Problem, leaves: Leaves, seed: int, rounds: range) -> None:
        super().__init__(problem, leaves, "rounds")
        self.seed, self.rounds = seed, rounds

    def squares_of(self, bends: Sequence[Bend], part: Part) -> Squares:
        """All activations and all columns of a round in two signals, u∘√r₊ and u∘√r₋ with
        independent normal numbers u.
        """
        edges, each = [bend.edge for bend in bends], []
        for index in self.rounds:
            seeds, rng = [], generator(self.seed, "sampled residuals", index, part.batch.index)
            for bend in bends:
                normal = torch.randn(bend.residual.shape, generator=rng).to(bend.residual)
                halves = (bend.residual, -bend.residual)
                root = [half.clamp(min=0).sqrt() * normal for half in halves]
                seeds.append(torch.stack(root))
            signs = seeds[0].new_ones(2, len(bends[0].residual))
            signs[1] = -1.0
            found = pull_squares(edges, seeds, signs, part, "rounds")
            each.append(torch.stack(list(found.values())).sum(dim=(0, 1), dtype=torch.float64))
        return {"": torch.stack(each)}


def _bends(nodes: Sequence[Any], part: Part, slope: Tensor) -> Iterator[Bend]:
    """What a part's smooth nodes add, for the slope ∂ℓ/∂z at its output."""
    tops = [GradientEdge(node, 0) for node in nodes]
    deltas = pull_back([part.output], tops, [slope.to(part.output.dtype)], retain_graph=True)
    lefts = {(call.left.node, call.left.output_nr): prefix for prefix, call in part.once.items()}
    for node, delta in zip(nodes, deltas, strict=True):
        edge = GradientEdge(*node.next_functions[0])
        residual = second_slope(node, delta, edge)
        near, stop = _descend(edge, residual, lefts, part.once)
        below = set(nodes_below([stop]))
        far = tuple(prefix for (left, _), prefix in lefts.items() if left in below)
        yield Bend(edge, residual, near, far)


def second_slope(node: Any, delta: Tensor, edge: GradientEdge) -> Tensor:
    """φ''(z)·δ: the derivative of φ'(z)·δ, which the node computes, with the graph of z."""
    slope = node(delta)
    if not slope.requires_grad:
        return torch.zeros_like(slope)
    (found,) = pull_back(
        [slope], [edge], [torch.ones_like(slope)], retain_graph=True, allow_unused=True
    )
    return torch.zeros_like(slope) if found is None else found


@torch.no_grad()
def _descend(
    edge: GradientEdge,
    residual: Tensor,
    lefts: dict[tuple[Any, int], str],
    once: dict[str, LayerCall],
) -> tuple[dict[str, Tensor], Any]:
    """The diagonal of Jᵀdiag(r)J at the layers where it suffices, and the node below which it does
    not.

    A second linear map on the way down would take the whole matrix.
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
        square = call.slope.detach().to(q.dtype).square()
        q, mixed = (q @ square, True) if linear else (q * square, mixed)
    return near, None


def _through(node: Any, q: Tensor) -> tuple[tuple[Any, int], Tensor] | None:
    """The edge below a node that moves or maps single elements, and the diagonal there."""
    kind, children = kind_of(node), enumerate(node.next_functions)
    inputs = [(index, child) for index, child in children if child[0] is not None]
    if len(inputs) != 1 or not (kind in MOVES or kind in ELEMENTWISE):
        return None
    (index, place), dtype = inputs[0], node._input_metadata[0].dtype
    entered = tuple(place[0]._input_metadata[place[1]].shape)
    if kind in ELEMENTWISE and entered != q.shape:
        return None  # elements that are broadcast share an input: Jᵀdiag(r)J is not diagonal
    found = node((q if kind in MOVES else torch.ones_like(q)).to(dtype))
    found = (found[index] if isinstance(found, tuple) else found).to(q.dtype)
    if kind in MOVES:
        return place, found
    return (place, q * found.square()) if found.shape == q.shape else None


def _near_squares(bends: Sequence[Bend], once: dict[str, LayerCall], diagonal: bool) -> Squares:
    """From the diagonals at the layers' outputs, of all activations together."""
    total: dict[str, Tensor] = {}
    for bend in bends:
        for prefix, q in bend.near.items():
            total[prefix] = total[prefix] + q if prefix in total else q
    squares: Squares = {}
    for prefix, q in total.items():
        entered = once[prefix].entered.to(q.dtype)
        if isinstance(once[prefix].layer, nn.Linear):
            found = layer_squares.one_position(entered, q, diagonal)
        else:
            over = 0 if diagonal else 1
            found = {"weight": (q * entered.square()).sum(dim=over), "bias": q.sum(dim=over)}
        squares |= {layer_squares.full_name(prefix, key): square for key, square in found.items()}
    return squares


def _far_squares(bend: Bend, part: Part, form: Form) -> Squares:
    """By one signal √|r_i|·e_i a column, as many at a time as the budget allows."""
    flat = bend.residual.flatten(1)
    size, width = flat.shape
    root, sign = flat.abs().sqrt(), flat.sign()
    room = min(layer_squares.part_bytes(flat.device), part.room)
    step = int(max(1, min(width, room // max(1, flat.numel() * flat.element_size()))))
    squares: Squares = {}
    for start in range(0, width, step):
        where = torch.arange(start, min(start + step, width), device=flat.device)
        seeds = flat.new_zeros(len(where), size, width)
        seeds[torch.arange(len(where), device=flat.device), :, where] = root[:, where].T
        seeds = seeds.reshape(-1, *bend.residual.shape)
        found = pull_squares([bend.edge], [seeds], sign[:, where].T, part, form, bend.far)
        squares = layer_squares.add(squares, found)
    return squares


# groups of layers, each of which takes two passes through the graph; up to so many all are looked
# at
MOST_PROBED = 8


@dataclass(frozen=True)
class Stretch:
    """The graph between a layer and an edge above it (None: the output), with its smooth nodes."""

    layer: str
    top: GradientEdge | None
    bends: tuple[Any, ...]


class Layers:
    """What the graph of an output says of its layers, ``once``, that ``leaves`` enter by.

    Each is one bit of a mask. ``order``: lower layers first; ``lowest``: those with none below;
    ``met``: those that each is multiplied by.
    """

    def __init__(self, output: Tensor, leaves: Leaves, once: dict[str, LayerCall]) -> None:
        self._once, self._nodes = once, list(nodes_below([output.grad_fn]))
        self._smooth = [node for node in self._nodes if kind_of(node) in SMOOTH]
        self.names = list(dict.fromkeys(map(owner, leaves)))
        bits = {prefix: 1 << place for place, prefix in enumerate(self.names)}
        self._of_node = {once[prefix].left.node: bit for prefix, bit in bits.items()}
        self.order = [self._of_node[node] for node in self._nodes if node in self._of_node]
        self.lowest, self.met, self._below = 0, dict.fromkeys(bits.values(), 0), {None: 0}
        of_leaf = {id(leaf): bits[owner(name)] for name, leaf in leaves.items()}
        for node in self._nodes:
            kind = kind_of(node)
            if kind == "AccumulateGrad":
                self._below[node] = of_leaf.get(id(node.variable), 0)
                continue
            inputs = [self._below[child] for child, _ in node.next_functions]
            self._below[node] = reduce(int.__or__, inputs, 0)
            factors = [inputs[i] for i in validity.FACTORS.get(kind, ()) if i < len(inputs)]
            for pair in combinations(factors, 2):
                fewer, more = sorted(pair, key=int.bit_count)
                for bit in _bits_of(fewer):
                    self.met[bit] |= more
            if self._below[node] == self._of_node.get(node):
                self.lowest |= self._below[node]

    def probe_groups(self) -> list[list[str]]:
        """Groups of layers that are nowhere multiplied, lowest first: all if they are few; else
        those with the lowest layers, and others at equal distances.
        """
        groups = self._groups()
        chosen = {i for i, group in enumerate(groups) if group & self.lowest}
        others = [i for i in range(len(groups)) if i not in chosen]
        if len(groups) > MOST_PROBED:
            count = min(len(others), max(1, MOST_PROBED - len(chosen)))
            others = [others[(step + 1) * len(others) // count - 1] for step in range(count)]
        picked = [groups[i] for i in sorted(chosen.union(others))]
        return [[self._name(bit) for bit in _bits_of(group)] for group in picked]

    def stretches(self) -> list[Stretch]:
        """The stretches from a layer to the next, each once."""
        place = {bit: i for i, bit in enumerate(self.order)}
        last: dict[Any, int] = {None: -1}
        for node in self._nodes:
            beneath = max((last[child] for child, _ in node.next_functions), default=-1)
            last[node] = place[self._of_node[node]] if node in self._of_node else beneath
        first = {self._nodes[-1]: len(self.order)}
        for node in reversed(self._nodes):
            above = place[self._of_node[node]] if node in self._of_node else first[node]
            for child, _ in node.next_functions:
                first[child] = min(first.get(child, above), above)
        after = {node: i for i, node in enumerate(self._nodes)}
        found = []
        for low, high in sorted({(last[node], first[node]) for node in self._nodes}):
            if low >= 0:
                bit, last_layer = self.order[low], high == len(self.order)
                top = None if last_layer else self._once[self._name(self.order[high])].left
                end = len(after) if top is None else after[top.node]
                smooth = (node for node in self._smooth if self._below[node] & bit)
                inside = tuple(node for node in smooth if after[node] < end)
                found.append(Stretch(self._name(bit), top, inside))
        return found

    def _name(self, bit: int) -> str:
        return self.names[bit.bit_length() - 1]

    def _groups(self) -> list[int]:
        """The layers in groups that are nowhere multiplied, each in the first that it fits."""
        groups: list[int] = []
        barred: list[int] = []  # what the members of a group are multiplied by
        for bit in self.order:
            pairs = enumerate(zip(groups, barred, strict=True))
            fits = (i for i, (group, bar) in pairs if not (self.met[bit] & group or bar & bit))
            place = next(fits, len(groups))
            if place == len(groups):
                groups.append(0)
                barred.append(0)
            groups[place] |= bit
            barred[place] |= self.met[bit]
        return groups


def _bits_of(mask: int) -> Iterable[int]:
    while mask:
        yield mask & -mask
        mask &= mask - 1


MOST_CHECKED = 64  # columns of an activation that are worth a comparison
# random mixes and directions for a stretch, in one of which a defect might all but cancel
DRAWS = 3
# units in the last place that a second derivative of 0 may come out as, relative to the first
ROUNDING = 4


@torch.enable_grad()
def verify(form: ModelForm, few: Few, trusted: Trusted) -> ModelForm:
    """The form of a model with smooth activations, compared with double backward on a few samples.

    For a random mix of the outputs, second derivatives of layers are compared along a random
    direction of all their parameters, and in the single weight with the largest, where that takes
    few signals. A chain, whose graph shows all that it does, is not compared.
    """
    problem, leaves, part = few.problem, few.leaves, few.part
    assert part is not None
    layered, residuals = part.layered & trusted.names, Residuals(problem, leaves, "diagonal")
    part = replace(part, layered=layered, together=trusted.together)
    with twice_differentiable():
        if few.plain:
            residuals.bends(part, lambda: torch.ones_like(few.output))
            return ModelForm(form.curved, residuals.refused, columns=residuals.columns)
        mixed = few.mixed(twice=True)
        bends = residuals.bends(part, lambda: mixed.mix)
        skipped = {prefix for bend in bends if bend.columns > MOST_CHECKED for prefix in bend.far}
        checked = [b if b.columns <= MOST_CHECKED else replace(b, far=()) for b in bends]
        squares = residuals.squares_of(checked, part)
        squares = {name: square for name, square in squares.items() if owner(name) not in skipped}
        allowed = 10 * tolerance(problem)
        refused = residuals.refused or _disagreement(part, mixed, leaves, squares, bends, allowed)
    return ModelForm(form.curved, refused, columns=residuals.columns)


def _disagreement(
    part: Part,
    mixed: MixedOutputs,
    leaves: Leaves,
    squares: Squares,
    bends: Sequence[Bend],
    allowed: float,
) -> str:
    """The layer whose second derivative disagrees with ``squares`` and ``bends``, or ""."""
    if not mixed.twice:
        return ""
    layers = Layers(part.output, leaves, part.once)
    groups, device = layers.probe_groups(), mixed.mix.device
    own = {prefix: [name for name in leaves if owner(name) == prefix] for prefix in layers.names}
    checks: list[tuple[list[str], _Check]] = []
    try:
        unused = {k: torch.zeros_like(v) for k, v in leaves.items() if k not in mixed.slopes}
        slopes = mixed.slopes | unused
        hidden = _Hidden(leaves, slopes, bends, generator(0, "hidden curvature", device=device))
        for group in groups:
            # a parameter of each layer that has squares; of many layers only the first
            names = [next((k for k in own[prefix] if k in squares), "") for prefix in group]
            for name in list(filter(None, names))[: None if len(own) <= MOST_PROBED else 1]:
                check = _single_check(leaves[name], slopes[name], squares[name])
                checks.append(([owner(name)], check))
            checks.append((group, hidden.check([own[prefix] for prefix in group])))
        if sum(map(len, groups)) < len(layers.order):
            rng = generator(0, "stretches", device=device)
            for stretch in layers.stretches():
                points = {name: leaves[name] for name in own[stretch.layer]}
                for _ in range(DRAWS):
                    check = _stretch_check(stretch, part.output, mixed.mix, points, rng)
                    checks.append(([stretch.layer], check))
    except (RuntimeError, NotImplementedError):  # an operation that can be differentiated only once
        pass
    wrong = _failing([check for _, check in checks], allowed)
    if not wrong:
        return ""
    group = checks[wrong[0]][0]
    each = [hidden.check([own[prefix]]) for prefix in group] if len(group) > 1 else []
    alone = [*_failing(each, allowed), 0][0]
    return f"its second derivative in {own[group[alone]][0]} is not that of its activations"


@dataclass(frozen=True)
class _Check:
    """Numbers on the device, and a function of them on the host: (gap, size, rounding)."""

    numbers: Tensor
    judge: Callable[[list[float]], tuple[float, float, float]]


def _failing(checks: Sequence[_Check], allowed: float) -> list[int]:
    """The places of those whose gap is too large, all read at once: a GPU is waited for."""
    if not checks:
        return []
    values, wrong = iter(torch.cat([check.numbers for check in checks]).tolist()), []
    for place, check in enumerate(checks):
        gap, size, noise = check.judge(list(islice(values, len(check.numbers))))
        if not gap <= allowed * size + noise:
            wrong.append(place)
    return wrong


def _single_check(leaf: Tensor, slope: Tensor, square: Tensor) -> _Check:
    """The largest second derivative in one weight, by double backward and as in ``square``."""
    said = square.flatten()
    # stays on the device, as an index of numbers would not
    place = said.abs().argmax(dim=0, keepdim=True)
    one = said.new_ones(1, dtype=slope.dtype)
    (row,) = _along([slope.flatten().gather(0, place)], [one], [leaf])
    both = torch.cat([row.flatten().gather(0, place), said.gather(0, place)])
    return _Check(both, lambda values: (abs(values[0] - values[1]), abs(values[1]), 0.0))


def _stretch_check(
    stretch: Stretch, output: Tensor, mix: Tensor, points: Leaves, rng: torch.Generator
) -> _Check:
    """The hidden curvature of a layer's parameters for a mix at the stretch's top."""
    top: Any = output
    if stretch.top is not None:
        top, made = stretch.top, stretch.top.node._input_metadata[stretch.top.output_nr]
        like = torch.empty(made.shape, dtype=made.dtype, device=output.device)
        (mix,) = validity.random_like([like], rng)
    tops, bends = [GradientEdge(node, 0) for node in stretch.bends], []
    deltas: Sequence[Any] = ()
    if tops:
        deltas = pull_back([top], tops, [mix], retain_graph=True, allow_unused=True)
    for node, delta in zip(stretch.bends, deltas, strict=True):
        if delta is not None:
            edge = GradientEdge(*node.next_functions[0])
            bends.append(Bend(edge, second_slope(node, delta, edge), {}, ()))
    return _Hidden(points, _slopes([top], points, [mix]), bends, rng).check([list(points)])


class _Hidden:
    """Curvature beside the activations', along a random direction v of some layers' parameters θ.

    A layer is linear in its parameters, and so are layers that are nowhere multiplied: then
    vᵀ∂²(uᵀz)/∂θ²v is Σ_k Σ_i r_ki (∂z_ki/∂θ·v)² for a mix u of the outputs. ∂z/∂θ·v is the
    derivative of vᵀ(∂z/∂θ)ᵀw in w.
    """

    def __init__(
        self, leaves: Leaves, slopes: Leaves, bends: Sequence[Bend], rng: torch.Generator
    ) -> None:
        self._leaves, self._slopes, self._rng = leaves, slopes, rng
        self._residual: Tensor | None = None
        self._weights, self._back = list[Tensor](), slopes
        if bends:
            self._residual = torch.cat([bend.residual.flatten() for bend in bends]).double()
            self._weights = [torch.zeros_like(bend.residual, requires_grad=True) for bend in bends]
            self._back = _slopes([bend.edge for bend in bends], leaves, self._weights)

    def check(self, layers: Sequence[Sequence[str]]) -> _Check:
        """The curvature in these layers' parameters beside that of the activations."""
        names = [name for layer in layers for name in layer]
        points, slopes = ([of[name] for name in names] for of in (self._leaves, self._slopes))
        directions = self._directions(layers)
        rows = torch._foreach_mul(list(_along(slopes, directions, points)), directions)
        numbers = [row.sum(dtype=torch.float64) for row in rows]
        if self._residual is not None:
            moved = _along([self._back[name] for name in names], directions, self._weights)
            parts = torch.cat([dz.flatten() for dz in moved]).double().square() * self._residual
            numbers += [parts.sum(), parts.abs().sum()]
        else:
            numbers += [torch.zeros_like(numbers[0])] * 2
        numbers += torch._foreach_norm([*(slope.detach() for slope in slopes), *directions])
        count, eps = len(names), torch.finfo(points[0].dtype).eps

        def judge(values: list[float]) -> tuple[float, float, float]:
            found, (said, size), norms = (
                values[:count],
                values[count : count + 2],
                values[count + 2 :],
            )
            lengths = norms[count:]
            noise = ROUNDING * eps * sum(map(mul, norms[:count], lengths)) * math.hypot(*lengths)
            return abs(sum(found) - said), size, noise

        return _Check(torch.stack(numbers), judge)

    def _directions(self, layers: Sequence[Sequence[str]]) -> list[Tensor]:
        """Random v_ℓ with equal ‖slope_ℓ‖‖v_ℓ‖², so that no layer's rounding hides another."""
        likes = [self._leaves[name] for names in layers for name in names]
        drawn = iter(_products(likes, self._rng))
        grouped = [[next(drawn) for _ in names] for names in layers]
        if len(layers) > 1:
            slopes = [_norms([self._slopes[name] for name in names]).norm() for names in layers]
            pairs = zip(slopes, grouped, strict=True)
            sizes = torch.stack([slope * _norms(v).square().sum() for slope, v in pairs])
            least = torch.where(sizes > 0, sizes, torch.inf).min()
            scales = torch.where(sizes > 0, (least / sizes).sqrt(), 1.0).unbind()
            scaled = zip(grouped, scales, strict=True)
            grouped = [[v * scale.to(v.dtype) for v in vs] for vs, scale in scaled]
        return [v for vs in grouped for v in vs]


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(list(tensors))).double()


def _products(likes: Sequence[Tensor], rng: torch.Generator) -> list[Tensor]:
    """Products of random vectors, one a dimension, with entries away from 0."""
    sizes = [size for like in likes for size in like.shape]
    drawn = torch.randn(sum(sizes), generator=rng, dtype=torch.float32, device=rng.device)
    vectors = iter(torch.add(drawn, drawn.sign(), alpha=0.5).to(likes[0]).split(sizes))
    found = []
    for like in likes:
        own = [next(vectors).reshape(-1, *[1] * (like.ndim - dim - 1)) for dim in range(like.ndim)]
        found.append(reduce(Tensor.mul, own).to(like.dtype) if own else torch.ones_like(like))
    return found


def _slopes(tops: Sequence[Any], leaves: Leaves, seeds: Sequence[Tensor]) -> dict[str, Tensor]:
    """Σ (∂top/∂θ)ᵀ seed of each parameter, to be differentiated once more."""
    found = pull_back(tops, list(leaves.values()), seeds, create_graph=True, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def _along(
    slopes: Sequence[Tensor], directions: Sequence[Tensor], points: Sequence[Tensor]
) -> Sequence[Tensor]:
    """The derivative of Σ slope·direction in each of the points."""
    live = [(slope, v) for slope, v in zip(slopes, directions, strict=True) if slope.requires_grad]
    if not live:
        return [torch.zeros_like(point) for point in points]
    tops, seeds = zip(*live, strict=True)
    return pull_back(tops, points, seeds, retain_graph=True, materialize_grads=True)
