"""Checks of the closed form for smooth activations against double backward, on a few samples.

``validity`` and ``closed_form`` read the form of a model off its graph, which does not show
everything, hooks on tensors for one. Numbers do: they are compared here before a closed form is
used.

What a graph hides is felt by every layer below it, the less the further it is from the output. So
of many layers some are followed to the output: those with no layer below, which feel all, and
others at equal distances. Besides, every stretch of the graph from a layer to the next is looked at
by itself, at the cost of one pass. The number of passes does not grow with depth.

A direction of several layers at once has the second derivatives ∂²/∂θ_ℓ∂θ_m besides. Activations
account for these too unless ℓ and m are multiplied somewhere, as a layer's weight is by what the
layers below gave. Layers that are nowhere multiplied, such as those of parallel branches, are
checked together.
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
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lambdahat._core.rng import generator
from lambdahat.operators.exact.closed_form import (
    Bend,
    Part,
    Residuals,
    Trusted,
    second_slope,
    used_once,
)
from lambdahat.operators.exact.layer_squares import LayerCall, Squares, owner
from lambdahat.operators.exact.validity import (
    FACTORS,
    SMOOTH,
    Few,
    MixedOutputs,
    ModelForm,
    random_like,
    tolerance,
)
from lambdahat.operators.linearise import kind_of, twice_differentiable

# groups of layers, each of which takes two passes through the graph; up to so many all are looked
# at
MOST_PROBED = 8


@dataclass(frozen=True)
class Stretch:
    """The graph between a layer and an edge above it, None for the output.

    ``bends``: the smooth activations between the two, and maybe some beside the way.
    """

    layer: str
    top: GradientEdge | None
    bends: tuple[Any, ...]


class Layers:
    """What the graph of an output says of its layers, ``once``, that ``leaves`` enter by.

    Each is one bit of a mask. ``order``: the layers, lower ones first; ``lowest``: those with no
    layer below; ``met``: those that each was seen to be multiplied by, of two at least at one of
    them.
    """

    def __init__(
        self, output: Tensor, leaves: dict[str, Tensor], once: dict[str, LayerCall]
    ) -> None:
        self._once, self._nodes = once, list(_upwards(output.grad_fn))
        self._smooth = [node for node in self._nodes if kind_of(node) in SMOOTH]
        self.names = list(dict.fromkeys(map(owner, leaves)))
        bits = {prefix: 1 << place for place, prefix in enumerate(self.names)}
        self._of_node = {once[prefix].left.node: bit for prefix, bit in bits.items()}
        self.order = [self._of_node[node] for node in self._nodes if node in self._of_node]
        self.lowest, self.met, self._below = 0, dict.fromkeys(bits.values(), 0), {None: 0}
        of_leaf = {id(leaf): bits[owner(name)] for name, leaf in leaves.items()}
        for node in self._nodes:
            if kind_of(node) == "AccumulateGrad":
                self._below[node] = of_leaf.get(id(node.variable), 0)
            else:
                self._note(node, [self._below[child] for child, _ in node.next_functions])

    def _note(self, node: Any, inputs: list[int]) -> None:
        self._below[node] = reduce(int.__or__, inputs, 0)
        factors = [inputs[i] for i in FACTORS.get(kind_of(node), ()) if i < len(inputs)]
        for pair in combinations(factors, 2):
            fewer, more = sorted(pair, key=int.bit_count)
            for bit in _bits_of(fewer):
                self.met[bit] |= more
        if self._below[node] == self._of_node.get(node):
            self.lowest |= self._below[node]

    def probed(self) -> list[list[str]]:
        """Groups of layers that are nowhere multiplied, by name, from the lowest up: all, or
        some as said above.
        """
        return [
            [self._name(bit) for bit in _bits_of(group)]
            for group in _spread(self._groups(), self.lowest)
        ]

    def stretches(self) -> list[Stretch]:
        """One for each node: from the last layer below it, in their order, to the first above;
        those alike once.
        """
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
        pairs = sorted({(last[node], first[node]) for node in self._nodes if last[node] >= 0})
        return [self._stretch(low, high, after) for low, high in pairs]

    def _stretch(self, low: int, high: int, after: dict[Any, int]) -> Stretch:
        bit = self.order[low]
        top = self._once[self._name(self.order[high])].left if high < len(self.order) else None
        end = len(after) if top is None else after[top.node]
        between = tuple(
            node for node in self._smooth if self._below[node] & bit and after[node] < end
        )
        return Stretch(self._name(bit), top, between)

    def _name(self, bit: int) -> str:
        return self.names[bit.bit_length() - 1]

    def _groups(self) -> list[int]:
        """The layers in groups that are nowhere multiplied, each in the first that it fits."""
        groups: list[int] = []
        barred: list[int] = []  # what the members of a group are multiplied by
        for bit in self.order:
            fits = (
                i
                for i, group in enumerate(groups)
                if not (self.met[bit] & group or barred[i] & bit)
            )
            place = next(fits, len(groups))
            if place == len(groups):
                groups.append(0)
                barred.append(0)
            groups[place] |= bit
            barred[place] |= self.met[bit]
        return groups


def _spread(groups: list[int], lowest: int) -> list[int]:
    """All groups if they are few; else those that hold the lowest layers, and of the others some
    at equal distances.
    """
    if len(groups) <= MOST_PROBED:
        return groups
    chosen = {i for i, group in enumerate(groups) if group & lowest}
    others = [i for i in range(len(groups)) if i not in chosen]
    count = min(len(others), max(1, MOST_PROBED - len(chosen)))
    chosen |= {others[(step + 1) * len(others) // count - 1] for step in range(count)}
    return [groups[i] for i in sorted(chosen)]


def _upwards(root: Any) -> Iterator[Any]:
    """Every node of a graph, once, after all that it depends on."""
    done: set[Any] = {None}
    stack: list[tuple[Any, bool]] = [(root, False)]
    while stack:
        node, ready = stack.pop()
        if node in done:
            continue
        if ready:
            done.add(node)
            yield node
            continue
        stack.append((node, True))
        stack.extend((child, False) for child, _ in node.next_functions if child not in done)


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
    """The form of a model with smooth activations, once its residuals agree with double backward on
    a few samples.

    For a random mix of the outputs, second derivatives of layers are compared: along a random
    direction of all their parameters, which shows what the graph hides, and the largest in a single
    weight, where that takes few signals. The passes that takes do not grow with depth
    (``probed_layers``).
    """
    problem, leaves, output = few.problem, few.leaves, few.output
    residuals = Residuals(problem, leaves, diagonal=True)
    with twice_differentiable():
        part = Part(
            few.batch, 1.0, output, *used_once(leaves, few.batch, output, few.calls, trusted.names)
        )
        mixed = few.mixed(twice=True)
        bends = residuals.bends(part, lambda: mixed.mix)
        skipped = {prefix for bend in bends if bend.columns > MOST_CHECKED for prefix in bend.far}
        few_columns = [
            bend if bend.columns <= MOST_CHECKED else replace(bend, far=()) for bend in bends
        ]
        squares = residuals.squares_of(few_columns, part)
        squares = {name: square for name, square in squares.items() if owner(name) not in skipped}
        refused = residuals.refused or _disagreement(
            part, mixed, leaves, squares, bends, 10 * tolerance(problem)
        )
    return ModelForm(form.curved, refused, columns=residuals.columns)


def _disagreement(
    part: Part,
    mixed: MixedOutputs,
    leaves: dict[str, Tensor],
    squares: Squares,
    bends: Sequence[Bend],
    allowed: float,
) -> str:
    """In which layer the second derivative of the mix is another than ``squares`` and ``bends``
    say.
    """
    if not mixed.twice:
        return ""
    layers = Layers(part.output, leaves, part.once)
    groups = layers.probed()
    own = {prefix: [name for name in leaves if owner(name) == prefix] for prefix in layers.names}
    checks: list[tuple[list[str], _Check]] = []
    try:
        unused = {
            name: torch.zeros_like(leaf)
            for name, leaf in leaves.items()
            if name not in mixed.slopes
        }
        slopes = mixed.slopes | unused
        hidden = _Hidden(
            leaves, slopes, bends, generator(0, "hidden curvature", device=mixed.mix.device)
        )
        for group in groups:
            checks += [
                ([owner(name)], _single_check(leaves[name], slopes[name], squares[name]))
                for name in _singles(group, own, squares)
            ]
            checks.append((group, hidden.check([own[prefix] for prefix in group])))
        if sum(map(len, groups)) < len(layers.order):
            rng = generator(0, "stretches", device=mixed.mix.device)
            for stretch in layers.stretches():
                points = {name: leaves[name] for name in own[stretch.layer]}
                checks += [
                    ([stretch.layer], _stretch_check(stretch, part.output, mixed.mix, points, rng))
                    for _ in range(DRAWS)
                ]
    except (RuntimeError, NotImplementedError):  # an operation that can be differentiated only once
        pass
    wrong = _failing([check for _, check in checks], allowed)
    if not wrong:
        return ""
    group = checks[wrong[0]][0]
    alone = (
        _failing([hidden.check([own[prefix]]) for prefix in group], allowed)
        if len(group) > 1
        else []
    )
    return (
        f"its second derivative in {own[group[alone[0] if alone else 0]][0]} is not that of its"
        " activations"
    )


@dataclass(frozen=True)
class _Check:
    """Numbers of the device, and the gap, its size and rounding that they come to: a few
    operations, no matter where.

    ``judge`` works on the host: on a GPU every operation costs as much as many there.
    """

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


def _singles(group: Sequence[str], own: dict[str, list[str]], squares: Squares) -> list[str]:
    """A parameter of each layer of a group that has ``squares``; of many layers, a pass for
    each, only the first.
    """
    found = [next((name for name in own[prefix] if name in squares), "") for prefix in group]
    return [name for name in found if name][: None if len(own) <= MOST_PROBED else 1]


def _single_check(leaf: Tensor, slope: Tensor, square: Tensor) -> _Check:
    """The largest second derivative in a single weight, by double backward and as ``square`` has
    it.
    """
    said = square.flatten()
    # stays on the device, as an index of numbers would not
    place = said.abs().argmax(dim=0, keepdim=True)
    (row,) = _along(
        [slope.flatten().gather(0, place)], [said.new_ones(1, dtype=slope.dtype)], [leaf]
    )
    both = torch.cat([row.flatten().gather(0, place), said.gather(0, place)])
    return _Check(both, lambda values: (abs(values[0] - values[1]), abs(values[1]), 0.0))


def _stretch_check(
    stretch: Stretch, output: Tensor, mix: Tensor, points: dict[str, Tensor], rng: torch.Generator
) -> _Check:
    """That of a layer's parameters for a mix of what is at the stretch's top, in place of the
    output.
    """
    top: Any = output
    if stretch.top is not None:
        top, made = stretch.top, stretch.top.node._input_metadata[stretch.top.output_nr]
        mix = random_like(torch.empty(made.shape, dtype=made.dtype, device=output.device), rng)
    tops = [GradientEdge(node, 0) for node in stretch.bends]
    deltas = (
        torch.autograd.grad([top], tops, [mix], retain_graph=True, allow_unused=True)
        if tops
        else ()
    )
    bends = []
    for node, delta in zip(stretch.bends, deltas, strict=True):
        if delta is not None:
            edge = GradientEdge(*node.next_functions[0])
            bends.append(Bend(edge, second_slope(node, delta, edge), {}, ()))
    return _Hidden(points, _slopes([top], points, [mix]), bends, rng).check([list(points)])


class _Hidden:
    """Curvature that is not in the activations, along a random direction v of the parameters θ of
    some layers.

    A layer is linear in its parameters together, and so are layers that are nowhere multiplied: if
    the graph tells the truth, vᵀ∂²(uᵀz)/∂θ²v is Σ_k Σ_i r_ki (∂z_ki/∂θ·v)², for a mix u of the
    outputs. ∂z/∂θ·v is the derivative of vᵀ(∂z/∂θ)ᵀw in w.
    """

    def __init__(
        self,
        leaves: dict[str, Tensor],
        slopes: dict[str, Tensor],
        bends: Sequence[Bend],
        rng: torch.Generator,
    ) -> None:
        self._leaves, self._slopes, self._rng = leaves, slopes, rng
        self._residual = (
            torch.cat([bend.residual.flatten() for bend in bends]).double() if bends else None
        )
        self._weights = [torch.zeros_like(bend.residual, requires_grad=True) for bend in bends]
        self._back = (
            _slopes([bend.edge for bend in bends], leaves, self._weights) if bends else slopes
        )

    def check(self, layers: Sequence[Sequence[str]]) -> _Check:
        """How much there is in these layers' parameters, the size of what activations give, and
        rounding.
        """
        names = [name for layer in layers for name in layer]
        points, slopes = (
            [self._leaves[name] for name in names],
            [self._slopes[name] for name in names],
        )
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
        """Random ones v_ℓ, with ‖slope_ℓ‖‖v_ℓ‖² the same for all layers, so that rounding in one
        hides no other.
        """
        drawn = iter(
            _products([self._leaves[name] for names in layers for name in names], self._rng)
        )
        grouped = [[next(drawn) for _ in names] for names in layers]
        if len(layers) > 1:
            slopes = [_norms([self._slopes[name] for name in names]).norm() for names in layers]
            sizes = torch.stack(
                [slope * _norms(v).square().sum() for slope, v in zip(slopes, grouped, strict=True)]
            )
            least = torch.where(sizes > 0, sizes, torch.inf).min()
            scales = torch.where(sizes > 0, (least / sizes).sqrt(), 1.0).unbind()
            grouped = [
                [v * scale.to(v.dtype) for v in vs]
                for vs, scale in zip(grouped, scales, strict=True)
            ]
        return [v for vs in grouped for v in vs]


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(list(tensors))).double()


def _products(likes: Sequence[Tensor], rng: torch.Generator) -> list[Tensor]:
    """Products of random vectors, one for each dimension, of numbers not near 0: no weight or
    unit is missed.
    """
    sizes = [size for like in likes for size in like.shape]
    drawn = torch.randn(sum(sizes), generator=rng, dtype=torch.float32, device=rng.device)
    vectors = iter(torch.add(drawn, drawn.sign(), alpha=0.5).to(likes[0]).split(sizes))
    found = []
    for like in likes:
        own = [next(vectors).reshape(-1, *[1] * (like.ndim - dim - 1)) for dim in range(like.ndim)]
        found.append(reduce(Tensor.mul, own).to(like.dtype) if own else torch.ones_like(like))
    return found


def _slopes(
    tops: Sequence[Any], leaves: dict[str, Tensor], seeds: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Σ (∂top/∂θ)ᵀ seed of each parameter, to be differentiated once more."""
    found = torch.autograd.grad(
        tops, list(leaves.values()), seeds, create_graph=True, materialize_grads=True
    )
    return dict(zip(leaves, found, strict=True))


def _along(
    slopes: Sequence[Tensor], directions: Sequence[Tensor], points: Sequence[Tensor]
) -> Sequence[Tensor]:
    """The derivative of Σ slope·direction in each of the points."""
    live = [(slope, v) for slope, v in zip(slopes, directions, strict=True) if slope.requires_grad]
    if not live:
        return [torch.zeros_like(point) for point in points]
    tops, seeds = zip(*live, strict=True)
    return torch.autograd.grad(tops, points, seeds, retain_graph=True, materialize_grads=True)
