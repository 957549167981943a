"""A data set as fixed batches in a fixed order: the same at every pass, so that an operator is
one matrix.
"""

from __future__ import annotations

import copy
import hashlib
import os
import pickle
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import (
    register_pytree_node,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from lambdahat._core.check import describe, message, require, require_count
from lambdahat._core.storage import update_digest

CACHE_FRACTION = 0.25
FITS = 1 << 26  # bytes that are taken without a look at the free memory


T = TypeVar("T")


def copy_with(thing: T, **attributes: Any) -> T:
    """A shallow copy with other attributes."""
    other = copy.copy(thing)
    vars(other).update(attributes)
    return other


class Columns(dict[str, Any]):
    """A mapping of another type, such as UserDict or BatchEncoding, as a dict that pytrees know."""

    kind: type[Any] = dict

    @classmethod
    def of(cls, given: Mapping[str, Any], kind: type[Any] | None = None) -> Columns:
        """The entries of a mapping, and its type."""
        columns = cls(given)
        columns.kind = kind or type(given)
        return columns

    def restored(self) -> Any:
        """The entries in a mapping of the first type, or a dict where it is not made of a dict."""
        entries = {key: restored(value) for key, value in self.items()}
        try:
            return self.kind(entries)
        except Exception:  # whatever the constructor of a user's class raises
            return entries


register_pytree_node(
    Columns,
    lambda columns: (list(columns.values()), (columns.kind, list(columns))),
    lambda values, spec: Columns.of(dict(zip(spec[1], values, strict=True)), spec[0]),
)


def restored(data: Any) -> Any:
    """Data with its mappings in their own types again, for the user's code."""
    if isinstance(data, Tensor):
        return data
    return tree_map(
        lambda leaf: leaf.restored() if isinstance(leaf, Columns) else leaf,
        data,
        is_leaf=lambda leaf: isinstance(leaf, Columns),
    )


@dataclass(frozen=True)
class Batch:
    """What one step of the data gives: a tensor, a tuple such as (inputs, targets), or a dict;
    ``size`` samples.

    ``index`` is its place in the pass, so that what is drawn for a batch can be drawn again.
    """

    data: Any
    size: int
    index: int = 0


def free_memory(device: torch.device) -> int:
    """Bytes that can still be taken on a device, by a process that may have only a share of it."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        fraction = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # not in torch 2.6
        share = int(fraction(device) * total) - reserved if fraction else free
        return min(free, max(share, 0)) + reserved - torch.cuda.memory_allocated(device)
    try:  # free pages leave out the page cache, which may be nearly all of the memory
        with open("/proc/meminfo", encoding="ascii") as lines:
            return 1024 * next(
                int(line.split()[1]) for line in lines if line.startswith("MemAvailable")
            )
    except (OSError, StopIteration):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not every platform tells
        return 4 << 30


class Batches:
    """A re-iterable of ``Batch`` on one device, cached in up to a quarter of its free memory."""

    def __init__(
        self, passes: Callable[[], Iterable[Any]], device: torch.device, dtype: torch.dtype | None
    ) -> None:
        self._passes, self.device, self.dtype = passes, device, dtype
        self.raw: Any = None  # what the batches were made of, where they are all of it
        self.sizes: list[int] = []
        # of the real numbers in each batch: not finite where one is not
        self.sums: list[tuple[int, Tensor]] = []
        first_pass = self._first_pass()
        self._kept = cache_if_small(first_pass, device)
        for _ in first_pass:  # the rest of data that are too large to be kept
            pass
        require(bool(self.sizes), "data", "hold at least one sample", "an empty data set")
        self.num_samples = sum(self.sizes)

    def _first_pass(self) -> Iterator[Batch]:
        """All batches, whose sizes and sums are noted."""
        for index, raw in enumerate(self._passes()):
            batch, name = self.place(raw, index), f"batch {index} of the data"
            cure = "leave empty batches out"
            require(batch.size > 0, name, "hold at least one sample", "an empty batch", cure)
            self.sizes.append(batch.size)
            for leaf in tree_leaves(batch.data):
                if isinstance(leaf, Tensor) and leaf.is_floating_point():
                    if leaf.layout != torch.strided:  # the numbers that a sparse tensor holds
                        sparse = leaf.layout == torch.sparse_coo
                        leaf = leaf._values() if sparse else leaf.values()
                    wide = torch.promote_types(leaf.dtype, torch.float32)
                    self.sums.append((index, leaf.sum(dtype=wide)))
            yield batch

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._kept) if self._kept is not None else self._fresh_pass()

    def some(self, wanted: Container[int]) -> Iterator[Batch]:
        """The batches at some places of the pass; the others are not moved to the device."""
        if self._kept is not None:
            return (batch for batch in self._kept if batch.index in wanted)
        return self._fresh_pass(wanted)

    def _fresh_pass(self, wanted: Container[int] | None = None) -> Iterator[Batch]:
        """A pass over the raw data; a DataLoader draws from the global generator when it starts."""
        end, count = object(), len(self.sizes)
        with rng_untouched():
            source = iter(self._passes())
        for index in range(count):
            with rng_untouched():
                raw = next(source, end)
            require(raw is not end, "data", f"give {count} batches at every pass", f"{index}")
            if wanted is None or index in wanted:
                yield self.place(raw, index)

    def digest(self, cut: bool = False) -> str:
        """A digest of every byte of the data, in one pass; with ``cut`` also of the batches' sizes.

        Without ``cut`` the same samples in batches of another size, as on another device, have the
        same digest.
        """
        columns: list[Any] = []
        headers: list[str] = []
        for batch in self:
            leaves, form = tree_flatten(batch.data)
            while len(columns) < len(leaves):
                columns.append(hashlib.sha256())
                headers.append("")
            for place, leaf in enumerate(leaves):
                rows = isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.layout == torch.strided
                content = f"{leaf.dtype}{tuple(leaf.shape[1:])}" if rows else _content(leaf)
                header = f"{form}{content}"
                # numbers and strings that all batches share count once
                if header != headers[place]:
                    columns[place].update(header.encode())
                    headers[place] = header
                if rows:
                    update_digest(columns[place], leaf, headed=False)
        whole = hashlib.sha256("".join(column.hexdigest() for column in columns).encode())
        whole.update(f"{self.sizes if cut else self.num_samples}".encode())
        return whole.hexdigest()[:32]

    @property
    def in_memory(self) -> bool:
        """Whether all batches are kept on the device."""
        return self._kept is not None

    def first(self) -> Batch:
        """The first batch."""
        return next(iter(self))

    def subset(self, indices: Tensor, batch_size: int | None = None) -> Batches:
        """The samples at sorted ``indices``, in batches of ``batch_size`` or as they fall."""
        passes: Callable[[], Iterable[Any]] = partial(self._rows, indices)
        if batch_size is not None:
            require_count(batch_size, "batch_size")
            passes = partial(_slices, concatenate(list(passes())), batch_size)
        return Batches(passes, self.device, self.dtype)

    def _rows(self, indices: Tensor) -> Iterator[Any]:
        start = 0
        for batch in self:
            inside = indices[(indices >= start) & (indices < start + batch.size)] - start
            start += batch.size
            if len(inside):
                yield take(batch, inside.to(self.device)).data

    def gather(self, indices: Tensor) -> Batch:
        """The samples at ``indices``, in this order, as one batch."""
        if len(self) == 1:  # nothing to read on a GPU
            return take(self.first(), indices.to(self.device))
        places, order = indices.cpu().sort()
        whole = Batch(concatenate(list(self._rows(places))), len(places))
        return take(whole, order.argsort().to(self.device))

    def only(self, batch: Batch) -> Batches:
        """One batch of samples of these, which need no second look."""
        one = {"_passes": lambda: [batch.data], "_kept": [batch], "raw": None}
        return copy_with(self, **one, sizes=[batch.size], num_samples=batch.size, sums=[])

    def cut(self, rows: int) -> Batches:
        """The same samples in the same order, each batch cut into pieces of at most ``rows``."""
        pieces = Batches(
            lambda: (part for batch in self for part in _slices(batch.data, rows)),
            self.device,
            self.dtype,
        )
        pieces.raw = self.raw
        return pieces

    def cast(self, dtype: torch.dtype) -> Batches:
        """The same batches with real numbers in another dtype."""

        def wider(leaf: Any) -> Any:
            return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

        moved = (replace(batch, data=tree_map(wider, batch.data)) for batch in self)
        small = self._kept is not None and sum(map(_bytes, self._kept)) * dtype.itemsize <= FITS
        kept = list(moved) if small else cache_if_small(moved, self.device)
        copied = copy_with(self, dtype=dtype, raw=None, _kept=kept)
        copied._passes = lambda: (batch.data for batch in self)
        return copied

    def place(self, raw: Any, index: int) -> Batch:
        """Raw data as a batch on the device."""

        def move(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if leaf.is_meta:
                raise ValueError(
                    "data must hold numbers, got tensors on the meta device, which have shapes"
                    " alone; load them on a device that computes"
                )
            return leaf.detach().to(self.device, self.dtype if leaf.is_floating_point() else None)

        raw = as_tree(raw)
        return Batch(tree_map(move, raw), _size(raw), index)


def _content(leaf: Any) -> str:
    """A text that identifies a leaf that is not a tensor of rows."""
    content = hashlib.sha256()
    if isinstance(leaf, Tensor):
        update_digest(content, leaf)
    else:
        try:
            content.update(pickle.dumps(leaf))
        except Exception:  # whatever the class of a user's object raises
            return type(leaf).__qualname__
    return content.hexdigest()


def _bytes(batch: Batch) -> int:
    tensors = (leaf for leaf in tree_leaves(batch.data) if isinstance(leaf, Tensor))
    return sum(leaf.numel() * leaf.element_size() for leaf in tensors)


def cache_if_small(batches: Iterable[Batch], device: torch.device) -> list[Batch] | None:
    """The batches as a list where they fit in a quarter of the free memory, else None."""
    room, kept = CACHE_FRACTION * free_memory(device), []
    for batch in batches:
        room -= _bytes(batch)
        if room < 0:
            return None
        kept.append(batch)
    return kept


def read_indices(indices: Tensor | Sequence[int], total: int) -> Tensor:
    """Sorted positions out of ``total`` from numbers or a mask."""
    try:
        positions = torch.as_tensor(indices).cpu()
    except (TypeError, ValueError, RuntimeError):
        positions = torch.empty(0)
    if positions.dtype == torch.bool:
        expected = f"be a mask of {total} entries, one a sample"
        require(positions.shape == (total,), "indices", expected, positions)
        positions = positions.nonzero().flatten()
    fits = not (positions.is_floating_point() or positions.is_complex()) and positions.ndim == 1
    fits = fits and len(positions) > 0
    require(fits, "indices", "be some integers, or a mask with a True in it", indices)
    low, high = int(positions.min()), int(positions.max())
    require(0 <= low and high < total, "indices", f"lie in [0, {total - 1}]", f"{low} … {high}")
    return positions.sort().values


def take(batch: Batch, which: Tensor | slice) -> Batch:
    """Some samples of a batch: copies of those at some indices, or views of a slice."""
    size = len(range(batch.size)[which] if isinstance(which, slice) else which)
    rows = tree_map(
        lambda leaf: leaf[which] if isinstance(leaf, Tensor) and leaf.ndim else leaf, batch.data
    )
    return Batch(rows, size)


def rows_of(batch: Batch) -> tuple[list[Tensor], Callable[..., Batch]]:
    """The tensors with a row a sample, and what makes a batch of one sample from a row of each."""
    flat, spec = tree_flatten(batch.data)
    columns = [i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor) and leaf.ndim]

    def single(*rows: Tensor) -> Batch:
        data = list(flat)
        for i, row in zip(columns, rows, strict=True):
            data[i] = row.unsqueeze(0)
        return Batch(tree_unflatten(data, spec), 1)

    return [flat[i] for i in columns], single


def concatenate(parts: Sequence[Any]) -> Any:
    """Batches of one structure as one batch."""
    leaves = [tree_flatten(part)[0] for part in parts]
    spec = tree_flatten(parts[0])[1]
    columns = list(zip(*leaves, strict=True))
    joined = [torch.cat(c) if isinstance(c[0], Tensor) and c[0].ndim else c[0] for c in columns]
    return tree_unflatten(joined, spec)


def make_batches(
    data: Any, batch_size: int | None, default: int, device: torch.device, dtype: Any
) -> Batches:
    """Fixed batches from tensors, a Dataset, a DataLoader or a list of batches.

    One-shot iterators, shuffling loaders and random augmentation are refused by name.
    """
    if batch_size is not None:
        require_count(batch_size, "batch_size")
    with rng_untouched():
        passes = _passes(data, batch_size, default)
        batches = Batches(passes, device, dtype)
        # a generator, an augmentation or a custom shuffle shows in two passes that begin otherwise
        if not (is_columns(data) or isinstance(data, list | tuple)):
            first, second = (tree_leaves(as_tree(next(iter(passes()), None))) for _ in range(2))
            if len(first) != len(second) or not all(map(_equal, first, second)):
                raise ValueError(
                    "data must be the same at every pass, got first batches that differ (shuffling"
                    " or random augmentation); fix one pass with list(loader)"
                )
    batches.raw = data.raw if isinstance(data, Batches) else data
    return batches


def _passes(data: Any, batch_size: int | None, default: int) -> Callable[[], Iterable[Any]]:
    """A function that starts a fresh pass over the raw batches."""
    if isinstance(data, Batches):
        return partial(map, attrgetter("data"), data)
    loader, listed = isinstance(data, DataLoader), isinstance(data, Sequence)
    expected = "be a Dataset, a DataLoader, tensors or a list of batches"
    if isinstance(data, str | bytes):
        cure = "lambdahat.data.load reads data sets by name"
        raise TypeError(message("data", expected, repr(data), cure))
    pair = not isinstance(data, Dataset) and all(hasattr(data, part) for part in ("train", "test"))
    if pair:
        raise TypeError(message("data", expected, "a train and a test set", "pass data.train"))
    if isinstance(data, IterableDataset):
        return partial(DataLoader, data, batch_size=batch_size or default)
    if not loader and is_columns(data):
        return partial(_slices, as_tree(data), batch_size or default)
    if loader or listed:
        if loader and "Random" in type(getattr(data, "sampler", None)).__name__:
            raise ValueError(
                "data must come in the same order at every pass, got a DataLoader that shuffles;"
                " use shuffle=False, or list(loader) to fix one pass"
            )
        require(loader or len(data) > 0, "data", "hold at least one batch", "an empty list")
        # to describe a good one would print its tensors
        if not loader and not isinstance(data[0], Tensor | tuple | list | Mapping):
            raise TypeError(
                "data must be a list of batches (tensors, tuples or dicts of tensors), got a"
                f" {type(data).__name__} whose first entry is {describe(data[0])}; torch.as_tensor"
                " makes tensors"
            )
        left_out = f"be left out for {'a DataLoader' if loader else 'a list of batches'}"
        own = "it has its own batches"
        require(batch_size is None, "batch_size", left_out, batch_size, own)
        return partial(iter, data)
    if isinstance(data, Dataset) or (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        require(len(data) > 0, "data", "hold at least one sample", "an empty data set")
        return partial(_collate, data, batch_size or default)
    got, cure = data, ""
    if hasattr(data, "__next__"):
        got = "a one-shot iterator"
        cure = "pass list(data): an operator needs the same batches at every product"
    raise TypeError(message("data", expected, got, cure))


def is_columns(data: Any) -> bool:
    """Whether data is whole columns: a tensor, several in a tuple, list or dict, or with dicts.

    Dicts alone, in a tuple or a list, are batches, and a dict by number is a data set.
    """
    if isinstance(data, Tensor):
        return data.ndim > 0
    if isinstance(data, Mapping):
        leaves = tree_leaves(as_tree(data)) if all(isinstance(key, str) for key in data) else []
        return any(isinstance(leaf, Tensor) and leaf.ndim for leaf in leaves)
    parts = list(data) if isinstance(data, tuple | list) else []
    rest = [part for part in parts if not isinstance(part, Tensor)]
    mixed = isinstance(data, tuple) and all(
        isinstance(part, Mapping) and is_columns(part) for part in rest
    )
    return len(rest) < len(parts) and (not rest or mixed)


def as_tree(raw: Any) -> Any:
    """The same with mappings that pytrees do not know as ``Columns``, at every depth."""

    def known(leaf: Any) -> Any:
        if not isinstance(leaf, Mapping):
            return leaf
        return Columns.of({key: as_tree(value) for key, value in leaf.items()}, type(leaf))

    return raw if isinstance(raw, Tensor) else tree_map(known, raw)


def _slices(columns: Any, batch_size: int) -> Iterator[Any]:
    whole = Batch(columns, _size(columns))
    for start in range(0, whole.size, batch_size):
        yield take(whole, slice(start, start + batch_size)).data


def _collate(dataset: Any, batch_size: int) -> Iterator[Any]:
    total = len(dataset)
    for start in range(0, total, batch_size):
        yield default_collate([dataset[i] for i in range(start, min(start + batch_size, total))])


def _size(raw: Any) -> int:
    """Samples in a batch: the common first dimension of its tensors."""
    tensors = [leaf for leaf in tree_leaves(raw) if isinstance(leaf, Tensor) and leaf.ndim]
    sizes = {leaf.shape[0] for leaf in tensors}
    if len(sizes) == 1:
        return int(sizes.pop())
    cure = ""
    if len(sizes) == 2 and 1 in sizes and isinstance(raw, Mapping):
        # tensors of one row that all samples share, such as position_ids (1, T)
        calls = [
            f"{name}.expand({max(sizes)}{', -1' * (leaf.ndim - 1)})"
            for name, leaf in raw.items()
            if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == 1
        ]
        cure = f"give each sample its own row: {', '.join(calls)}" if calls else ""
    shapes = ", ".join(str(tuple(leaf.shape)) for leaf in tensors[:6])
    got = f"shapes {shapes}" if sizes else "a batch without tensors"
    expected = "have one tensor or more, all with the same first dimension"
    raise ValueError(message("data", expected, got, cure))


def _equal(first: Any, second: Any) -> bool:
    """Whether two leaves are the same, NaN counting as itself."""
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        return bool(first == second)
    alike = first.shape == second.shape and first.dtype == second.dtype
    return alike and bool(((first == second) | ((first != first) & (second != second))).all())


@contextmanager
def rng_untouched() -> Iterator[None]:
    """Whatever runs inside leaves torch's global random state as it was."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        yield
