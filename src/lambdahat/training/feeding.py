"""The batches of a run, in an order set by seed and epoch, kept on the device if they fit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, IterableDataset

from lambdahat._core.check import require
from lambdahat._core.rng import generator
from lambdahat._core.storage import digest_tensors
from lambdahat.problem import Problem
from lambdahat.problem.batches import Batch, Batches, concatenate, rng_untouched
from lambdahat.problem.distributed import fingerprint

FIRST_LEAVES, FIRST_ROWS = 4, 16  # what a digest looks at
ROUNDING = 1e-5  # by which the same data may differ from machine to machine
Augment = Callable[[Tensor, torch.Generator], Tensor]


def contents(problem: Problem) -> list[Any]:
    """A fingerprint of all samples: a digest of the integers, random projections of real numbers.

    Another machine may prepare real numbers a little differently, so that ``same_contents``
    compares them to rounding. Of data that are no tensors, and would have to be read for it, the
    first batch alone counts.
    """
    leaves = tree_leaves(problem.batches.raw)
    if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
        first = tree_leaves(problem.batches.first().data)
        leaves = [leaf for leaf in first if isinstance(leaf, Tensor)]
    places = range(len(leaves))
    inexact = [leaf.is_floating_point() or leaf.is_complex() for leaf in leaves]
    real = [leaves[place] for place in places if inexact[place]]
    exact = {str(place): leaves[place] for place in places if not inexact[place]}
    strided = [leaf if leaf.layout == torch.strided else leaf.to_dense() for leaf in real]
    return [digest_tensors(exact), *fingerprint(strided).numbers]


def same_contents(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether ``contents`` are those of the same samples."""
    room = ROUNDING * abs(one[-1])
    near = [abs(a - b) <= room for a, b in zip(one[1:], other[1:], strict=True)]
    return one[0] == other[0] and all(near)


def epoch_order(seed: int, epoch: int, count: int) -> Tensor:
    """The permutation (count,) of the samples in epoch number ``epoch``, from 0."""
    return torch.randperm(count, generator=generator(seed, f"epoch {epoch}"))


class Feed:
    """The steps of an epoch, each a list of ``accumulate`` batches of ``batch_size`` samples; the
    last may be short.

    Samples are drawn without replacement. Tensors, and data sets that fit, stay on the device;
    larger data sets are read sample by sample. With ``batch_size=None`` the problem's own batches
    are used as they are: in a random order where they are in memory, else in the data's.
    ``augment(inputs, generator)`` changes the first tensor of a batch.
    """

    def __init__(
        self,
        problem: Problem,
        batch_size: int | None,
        accumulate: int,
        seed: int,
        augment: Augment | None = None,
    ) -> None:
        self.problem, self.batch_size, self.accumulate = problem, batch_size, accumulate
        self.seed, self._augment = seed, augment
        batches = problem.batches
        self.num_samples = batches.num_samples
        self._columns: Any = None
        self._simple = False  # the common case, (x, y), made short
        self._dataset: tuple[Any, Sequence[Any], dict[str, Any]] | None = None
        if batch_size is None or not problem.has_data:
            self.steps = ceil(len(batches) / accumulate)
            return
        columns = self._columns = _columns(batches)
        self._simple = type(columns) is tuple and all(isinstance(each, Tensor) for each in columns)
        if columns is not None:
            self._home = next(leaf.device for leaf in tree_leaves(columns) if _has_rows(leaf))
        else:
            self._dataset = _dataset(batches)
            expected = "be None where samples cannot be drawn one by one"
            cure = "the problem's own batches are then used"
            require(self._dataset is not None, "batch_size", expected, repr(batch_size), cure)
        self.steps = ceil(self.num_samples / (batch_size * accumulate))

    @property
    def step_samples(self) -> int:
        """The number of samples per step, except for a short last one."""
        return self.accumulate * (self.batch_size or self.problem.batches.sizes[0])

    def digest(self) -> str:
        """The first samples in a few words, where the data are tensors.

        Real numbers count to four digits: another machine may prepare them a little differently.
        """
        leaves = tree_leaves(self.problem.batches.raw)
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            return ""
        words = []
        for leaf in leaves[:FIRST_LEAVES]:
            first = (leaf[:FIRST_ROWS] if leaf.ndim else leaf).detach().cpu().reshape(-1)
            if first.is_floating_point() or first.is_complex():
                content = f"{float(first.abs().double().square().mean().sqrt()):.4g}"
            else:
                content = hashlib.sha256(first.numpy().tobytes()).hexdigest()[:8]
            words.append(f"{leaf.dtype} {tuple(leaf.shape)} {content}")
        return "; ".join(words)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[list[Batch]]:
        """The steps of one epoch from ``start`` on; a step's samples do not depend on ``start``."""
        groups: Iterator[list[Batch]]
        if self._columns is not None:
            order, size = epoch_order(self.seed, epoch, self.num_samples), self.batch_size or 1
            parts = order.to(self._home).split(size * self.accumulate)[start:]
            groups = ([self._take(rows) for rows in part.split(size)] for part in parts)
        elif self._dataset is not None:
            groups = _group(self._from_dataset(epoch, start), self.accumulate)
        else:
            groups = islice(_group(self._own(epoch), self.accumulate), start, None)
        if self._augment is None:
            yield from groups
            return
        for step, group in enumerate(groups, start=start):
            rngs = [
                generator(self.seed, "augment", epoch, step, part) for part in range(len(group))
            ]
            yield [
                Batch(self._change(batch.data, rng), batch.size, batch.index)
                for batch, rng in zip(group, rngs, strict=True)
            ]

    def sample(self, count: int, *names: object) -> Any:
        """Data of ``count`` samples drawn without replacement from ``(seed, *names)``."""
        count = min(count, self.num_samples)
        drawn = torch.randperm(self.num_samples, generator=generator(self.seed, *names))
        indices = drawn[:count].sort().values
        if self._columns is not None:
            return self._take(indices.to(self._home)).data
        return concatenate([batch.data for batch in self.problem.batches.subset(indices)])

    def _take(self, indices: Tensor) -> Batch:
        columns = self._columns
        if self._simple and indices.device == self.problem.device:
            return Batch(tuple(column[indices] for column in columns), len(indices))
        rows = tree_map(lambda leaf: leaf[indices] if _has_rows(leaf) else leaf, columns)
        return self.problem.batches.place(rows, 0)

    def _from_dataset(self, epoch: int, start: int) -> Iterator[Batch]:
        assert self.batch_size is not None
        assert self._dataset is not None
        dataset, keys, loading = self._dataset
        order = epoch_order(self.seed, epoch, self.num_samples)
        rest = order[start * self.batch_size * self.accumulate :]
        indices = [[keys[i] for i in part.tolist()] for part in rest.split(self.batch_size)]
        with rng_untouched():  # a DataLoader draws from the global generator when it starts
            raws = iter(DataLoader(dataset, batch_sampler=indices, **loading))
        for index, raw in enumerate(raws):
            yield self.problem.batches.place(raw, index)

    def _own(self, epoch: int) -> Iterator[Batch]:
        if not self.problem.batches.in_memory:
            return iter(self.problem.batches)
        kept = list(self.problem.batches)
        return (kept[i] for i in epoch_order(self.seed, epoch, len(kept)).tolist())

    def _change(self, data: Any, rng: torch.Generator) -> Any:
        """The data of a batch with its first tensor augmented."""
        assert self._augment is not None
        if isinstance(data, dict):
            first = next(key for key, value in data.items() if isinstance(value, Tensor))
            return {**data, first: self._augment(data[first], rng)}
        if isinstance(data, tuple | list):
            return (self._augment(data[0], rng), *data[1:])
        return self._augment(data, rng)


def _columns(batches: Batches) -> Any:
    """All samples as one batch, on the device if they fit, else in place; None if impossible."""
    raw = batches.raw
    leaves = [raw] if isinstance(raw, Tensor) else raw
    leaves = list(leaves.values()) if isinstance(leaves, dict) else leaves
    leaves = leaves if isinstance(leaves, list | tuple) else []
    rows = {len(leaf) if _has_rows(leaf) else 0 for leaf in leaves}
    there = rows == {batches.num_samples}
    if there and (not batches.in_memory or all(leaf.device == batches.device for leaf in leaves)):
        return tree_map(lambda leaf: leaf.detach(), raw)
    try:
        return concatenate([batch.data for batch in batches]) if batches.in_memory else None
    except (RuntimeError, TypeError, ValueError):  # batches of different shapes
        return None


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0


# how a loader reads samples, apart from which come together
LOADING: tuple[str, ...] = ("collate_fn", "num_workers", "timeout", "worker_init_fn")
LOADING += ("multiprocessing_context", "prefetch_factor")


def _dataset(batches: Batches) -> tuple[Any, Sequence[Any], dict[str, Any]] | None:
    """The data set that gives single samples, their keys in it, and how its loader reads it, or
    None.
    """
    loader = batches.raw if isinstance(batches.raw, DataLoader) else None
    raw: Any = batches.raw if loader is None else loader.dataset
    readable = hasattr(raw, "__getitem__") and hasattr(raw, "__len__")
    if not readable or isinstance(raw, list | tuple | dict | Tensor | IterableDataset):
        return None
    if loader is None:
        return raw, range(len(raw)), {}
    # without a batch sampler the data set gives whole batches
    keys = [key for batch in loader.batch_sampler or () for key in batch]
    loading = {name: getattr(loader, name) for name in LOADING}
    return (raw, keys, loading) if len(keys) == batches.num_samples else None


def _group(batches: Iterator[Batch], size: int) -> Iterator[list[Batch]]:
    while group := list(islice(batches, size)):
        yield group
