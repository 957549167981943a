"""A rank's share of the data: whole batches, or pieces of them where the samples of a batch do not meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lambdahat.batches import Batch, Batches, kept_if_small, take
from lambdahat.evaluators import AnyEvaluator, Evaluator, Parameters
from lambdahat.losses import Custom
from lambdahat.ranks import Ranks

Terms = Callable[[Batch], float]


@dataclass(frozen=True)
class Piece:
    """Some samples of a batch, all where ``rows`` is None; ``number`` is what random draws for it are named by."""

    batch: int
    rows: slice | None
    number: int

    def of(self, batch: Batch) -> Batch:
        """The samples."""
        if self.rows is None:
            return batch
        where = torch.arange(self.rows.start, self.rows.stop, device=_device(batch))
        return replace(take(batch, where), index=self.number)


def pieces(sizes: Sequence[int], rank: int, ranks: int, cut: bool) -> list[Piece]:
    """The share of one rank: samples ⌊rn/W⌋ … ⌊(r+1)n/W⌋ of n, or without ``cut`` whole batches in the same way."""
    if not cut:
        return [Piece(i, None, i) for i in range(*_share(len(sizes), rank, ranks))]
    low, high = _share(sum(sizes), rank, ranks)
    found, start = [], 0
    for i, size in enumerate(sizes):
        first, last = max(low - start, 0), min(high - start, size)
        if first < last:
            whole = last - first == size
            # a batch has one piece on a rank, so that this number is nobody else's
            found.append(Piece(i, None, i) if whole else Piece(i, slice(first, last), len(sizes) * (rank + 1) + i))
        start += size
    return found


def _share(count: int, rank: int, ranks: int) -> tuple[int, int]:
    return rank * count // ranks, (rank + 1) * count // ranks


class Share:
    """The batches and pieces of batches that one rank works on, each with its part of the mean over all data.

    Where the data does not fit into memory but a rank's own part of it does, that is kept.
    """

    def __init__(self, ranks: Ranks, batches: Batches, weights: Sequence[float], cut: bool, terms: Terms) -> None:
        """``weights`` are those of all batches; with ``cut``, ``terms`` tells what of them is a piece's."""
        found = pieces(batches.sizes, ranks.rank, ranks.size, cut)
        self._batches, self._wanted = batches, {piece.batch: piece for piece in found}
        self._kept: list[Batch] | None = None
        self.weights = [weights[piece.batch] for piece in found]
        if cut:
            pairs = zip(self._pieces(), batches.some(self._wanted), strict=True)
            parts = [terms(piece) / (terms(whole) or 1.0) for piece, whole in pairs]
            self.weights = [weight * part for weight, part in zip(self.weights, parts, strict=True)]
        if len(found) < len(batches) and not batches.in_memory:
            self._kept = kept_if_small(self._pieces(), batches.device)

    def __len__(self) -> int:
        return len(self._wanted)

    def __iter__(self) -> Iterator[tuple[float, Batch]]:
        return zip(self.weights, self._pieces() if self._kept is None else self._kept, strict=True)

    def _pieces(self) -> Iterator[Batch]:
        return (self._wanted[batch.index].of(batch) for batch in self._batches.some(self._wanted))


def joined(ranks: Ranks, batches: Batches, facts: Mapping[str, Any]) -> Ranks:
    """The ranks, once they agree on the facts and on all data; their sums go by the name of that data."""
    if ranks.size == 1:
        return ranks
    tensors = (leaf for batch in batches for leaf in tree_leaves(batch.data) if isinstance(leaf, Tensor))
    return ranks.apart("problem " + ranks.agree("the problem", {**facts, "data": tensors}, batches.device))


@torch.no_grad()
def splits(evaluate: AnyEvaluator, norm: str, parameters: Parameters, first: Batch) -> bool:
    """Whether a batch's loss is the mean of its parts', so that a batch may be cut between ranks.

    Known of the library's losses, and of a model's own over labels, where samples do not meet, which the ``first``
    batch shows.
    """
    known = isinstance(evaluate, Evaluator) and not isinstance(evaluate.loss, Custom)
    if not known or norm == "train" or first.size == 1:
        return False
    halves = torch.arange(first.size, device=_device(first)).chunk(2)
    parts = [first, *(take(first, half) for half in halves)]
    try:
        losses = [evaluate(parameters, part) for part in parts]
    except (RuntimeError, ValueError, IndexError):  # a model or a target for one batch size only
        return False
    sums = [evaluate.terms(part) * float(loss) for part, loss in zip(parts, losses, strict=True)]
    return abs(sums[0] - sums[1] - sums[2]) <= min(1e3 * torch.finfo(losses[0].dtype).eps, 0.02) * abs(sums[0])


def _device(batch: Batch) -> torch.device:
    return next(leaf.device for leaf in tree_leaves(batch.data) if isinstance(leaf, Tensor) and leaf.ndim)
