"""A rank's share of the data: whole batches, or pieces of them where the samples of a batch do
not meet.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves

from lambdahat._core.rng import generator
from lambdahat.problem.batches import Batch, Batches, kept_if_small, take
from lambdahat.problem.distributed import Ranks, Rounded, readings, told
from lambdahat.problem.evaluators import AnyEvaluator, Evaluator, Parameters
from lambdahat.problem.losses import Custom

Terms = Callable[[Batch], float]
# entries of data whose text is all that they are
PLAIN = (bool, int, float, complex, str, bytes, type(None))
FEW = 16  # samples of which each one shows in the mean, where they meet
# units of rounding by which the same, computed twice, may differ
SAME_LOSS, SAME_GRADIENT = 1e3, 1e4
NOISE = 4099  # a prime, so that no two rows of a layer are moved alike


@dataclass(frozen=True)
class Piece:
    """Some samples of a batch, all where ``rows`` is None; ``number`` is what random draws for
    it are named by.
    """

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
    """The share of one rank: samples ⌊rn/W⌋ … ⌊(r+1)n/W⌋ of n, or without ``cut`` whole batches
    in the same way.
    """
    if not cut:
        return [Piece(i, None, i) for i in range(*_share(len(sizes), rank, ranks))]
    low, high = _share(sum(sizes), rank, ranks)
    found, start = [], 0
    for i, size in enumerate(sizes):
        first, last = max(low - start, 0), min(high - start, size)
        if first < last:
            whole = last - first == size
            # a batch has one piece on a rank, so that this number is nobody else's
            found.append(
                Piece(i, None, i)
                if whole
                else Piece(i, slice(first, last), len(sizes) * (rank + 1) + i)
            )
        start += size
    return found


def _share(count: int, rank: int, ranks: int) -> tuple[int, int]:
    return rank * count // ranks, (rank + 1) * count // ranks


class Share:
    """The batches and pieces of batches that one rank works on, each with its part of the mean over
    all data.

    Where the data does not fit into memory but a rank's own part of it does, that is kept.
    """

    def __init__(
        self, ranks: Ranks, batches: Batches, weights: Sequence[float], cut: bool, terms: Terms
    ) -> None:
        """``weights`` are those of all batches; with ``cut``, ``terms`` tells what of them is a
        piece's.
        """
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
    """The ranks, once they agree on the facts and on all data; their sums go by the name of that
    data.
    """
    if ranks.size == 1:
        return ranks
    rest = hashlib.blake2b()

    def tensors() -> Iterator[Tensor]:
        for batch in batches:
            leaves, form = tree_flatten(batch.data)
            rest.update(f"{form}{[_told(leaf) for leaf in leaves]}".encode())
            yield from (leaf for leaf in leaves if isinstance(leaf, Tensor))

    facts = {**facts, "data": told(tensors()), "what is no tensor in the data": rest.hexdigest()}
    return ranks.apart("problem " + ranks.agree("the problem", facts, batches.device))


def _told(leaf: Any) -> str:
    """What is compared of an entry of the data beside the numbers of a tensor."""
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype} {tuple(leaf.shape)}"
    return repr(leaf) if isinstance(leaf, PLAIN) else type(leaf).__name__


def splits(evaluate: AnyEvaluator, norm: str, parameters: Parameters, first: Batch) -> bool:
    """Whether a batch's loss is the mean of its parts', so that a batch may be cut between ranks.

    Known of the library's losses, and of a model's own over labels, where samples do not meet. The
    ``first`` batch shows that in its loss, and a few of its samples in their gradient beside the
    parameters: there no layer is 0, which would hide all that comes before it.
    """
    known = isinstance(evaluate, Evaluator) and not isinstance(evaluate.loss, Custom)
    if not known or norm == "train" or first.size == 1:
        return False
    few = take(first, slice(FEW)) if first.size > FEW else first
    try:
        with torch.no_grad():
            parts = _halved(first)
            losses = [evaluate(parameters, part) for part in parts]
            sums = [
                evaluate.terms(part) * loss.double().reshape(1)
                for part, loss in zip(parts, losses, strict=True)
            ]
        point, parts = beside(evaluate, parameters, few), _halved(few)
        steps = [evaluate.terms(part) * gradient_of(evaluate, point, part)[1] for part in parts]
    except (RuntimeError, ValueError, IndexError):  # a model or a target for one batch size only
        return False
    return _adds_up(sums, SAME_LOSS, losses[0].dtype) and _adds_up(
        steps, SAME_GRADIENT, losses[0].dtype
    )


def _halved(batch: Batch) -> list[Batch]:
    return [
        batch,
        *(take(batch, half) for half in torch.arange(batch.size, device=_device(batch)).chunk(2)),
    ]


def _adds_up(found: Sequence[Tensor], units: float, dtype: torch.dtype) -> bool:
    """Whether the first is the sum of the others, to ``units`` of rounding."""
    whole, *parts = found
    miss = float(torch.linalg.vector_norm(whole - sum(parts)))
    return miss <= rounding(units, dtype) * sum(
        float(torch.linalg.vector_norm(part)) for part in parts
    )


def rounding(units: float, dtype: torch.dtype) -> float:
    """So many units of rounding, and no more than a fiftieth."""
    return min(units * torch.finfo(dtype).eps, 0.02)


def first_look(evaluate: AnyEvaluator, parameters: Parameters, first: Batch) -> dict[str, Rounded]:
    """What ranks must find alike, each by itself, of the first batch: that shows another model
    or another loss.
    """
    loss, gradient = gradient_of(evaluate, beside(evaluate, parameters, first), first)
    room = partial(rounding, dtype=next(iter(parameters.values())).dtype)
    size = float(torch.linalg.vector_norm(gradient))
    return {
        "the loss of the first batch": Rounded((loss, abs(loss) + size), room(SAME_LOSS)),
        "the gradient of the first batch": Rounded(
            (*readings(gradient).tolist(), size), room(10 * SAME_GRADIENT)
        ),
    }


def behaviour(
    evaluate: AnyEvaluator, parameters: Parameters, first: Batch, meet: bool
) -> tuple[float, ...]:
    """The loss of the first sample, readings of its gradient, and the gradient's norm, beside the
    parameters.

    Where samples ``meet`` it is that of the first batch; else it does not depend on how the data
    are cut into batches.

    They show another model or another loss, whatever the parameters are: where a layer is 0, all
    that comes before it is hidden at the parameters themselves. ``behaves_alike`` compares two of
    them.
    """
    few = first if meet else take(first, slice(1))
    point = dict(zip(parameters, moved(parameters.values()), strict=True))
    for where, batch in ((point, few), (point, first), (parameters, few)):
        try:
            leaves = {name: tensor.detach().requires_grad_() for name, tensor in where.items()}
            with torch.enable_grad():
                loss = evaluate(leaves, batch).reshape(())
                grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        # a model for one batch size only, or not defined there
        except (RuntimeError, ValueError, IndexError):
            continue
        read, norm = (
            told(grads).numbers[:4],
            math.hypot(*(float(torch.linalg.vector_norm(grad)) for grad in grads)),
        )
        if math.isfinite(float(loss.detach()) + norm):
            return float(loss.detach()), *read, norm
    return ()


def behaves_alike(one: Sequence[float], other: Sequence[float], dtype: torch.dtype) -> bool:
    """Whether two of ``behaviour`` are the same up to rounding."""
    if len(one) != len(other) or not one:
        return len(one) == len(other)
    loss, *read, norm = (abs(a - b) for a, b in zip(one, other, strict=True))
    size = max(one[-1], other[-1])
    return loss <= rounding(SAME_LOSS, dtype) * (abs(one[0]) + size) and all(
        gap <= rounding(10 * SAME_GRADIENT, dtype) * size for gap in (*read, norm)
    )


def gradient_of(
    evaluate: AnyEvaluator, parameters: Parameters, batch: Batch
) -> tuple[float, Tensor]:
    """The loss of a batch and its gradient as one vector, in float64."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in parameters.items()}
    with torch.enable_grad():
        loss = evaluate(leaves, batch).reshape(())
        grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return float(loss.detach()), torch.cat([grad.double().reshape(-1) for grad in grads])


def beside(evaluate: AnyEvaluator, parameters: Parameters, batch: Batch) -> Parameters:
    """Parameters near these, as ``moved`` makes them; these themselves where the loss is not
    finite there.
    """
    point = dict(zip(parameters, moved(parameters.values()), strict=True))
    try:
        loss, gradient = gradient_of(evaluate, point, batch)
        fine = math.isfinite(loss) and bool(gradient.isfinite().all())
    except (RuntimeError, ValueError):  # a function that is not defined there
        fine = False
    return point if fine else parameters


def moved(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Each tensor with noise of a tenth of its own size, or of a layer's usual one where it is
    0.
    """
    noise = torch.randn(NOISE, generator=generator(0, "beside"))
    found = []
    for tensor in tensors:
        count = max(tensor.numel(), 1)
        size = float(torch.linalg.vector_norm(tensor.detach().double())) / count**0.5
        size = size or max(tensor.shape[-1] if tensor.ndim else 1, 1) ** -0.5
        own = noise.repeat(-(-count // NOISE))[: tensor.numel()].view(tensor.shape)
        found.append(tensor.detach() + 0.1 * size * own.to(tensor))
    return found


def _device(batch: Batch) -> torch.device:
    return next(
        leaf.device for leaf in tree_leaves(batch.data) if isinstance(leaf, Tensor) and leaf.ndim
    )
