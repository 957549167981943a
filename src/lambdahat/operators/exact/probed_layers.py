"""Which layers a check of second derivatives looks at, and which of them at once, in passes that
depth does not add to.

What a graph hides, a hook on a tensor, is felt by every layer below it, from the output down the
less the further. So of many layers some are followed to the output: those with no layer below,
which feel all, and others at equal distances. Besides, every stretch of the graph from a layer to
the next is looked at by itself, at the cost of one pass.

A direction of several layers at once has the second derivatives ∂²/∂θ_ℓ∂θ_m besides. Activations
account for these too unless ℓ and m are multiplied somewhere, as a layer's weight is by what the
layers below gave. Layers that are nowhere multiplied, such as those of parallel branches, go
together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import combinations
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from lambdahat.operators.exact.layer_calls import Call, owner
from lambdahat.operators.exact.piecewise import FACTORS, SMOOTH
from lambdahat.operators.linearise import kind_of

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

    def __init__(self, output: Tensor, leaves: dict[str, Tensor], once: dict[str, Call]) -> None:
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
