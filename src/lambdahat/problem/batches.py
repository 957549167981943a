"""A data set as fixed batches in a fixed order: the same at every pass, so that an operator is
one matrix.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_map, tree_unflatten
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from lambdahat._core.check import describe, message, require, require_count
from lambdahat._core.storage import update_digest

CACHE_FRACTION = 0.25


class Columns(dict[str, Any]):
    """A mapping of another type than dict, such as a UserDict or a BatchEncoding, as a dict that
    pytrees know.

    Pytrees would take the mapping itself for one leaf, which is neither moved, cast nor sliced.
    """

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
    """Bytes that can still be taken on a device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
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
    """A re-iterable of ``Batch`` on one device, kept there where it fits in a quarter of the
    free memory.
    """

    def __init__(
        self, passes: Callable[[], Iterable[Any]], device: torch.device, dtype: torch.dtype | None
    ) -> None:
        self._passes, self.device, self.dtype = passes, device, dtype
        self.raw: Any = None  # what the batches were made of, where they are all of it
        self._kept: list[Batch] | None = []
        self.sizes: list[int] = []
        # of the real numbers in each batch: not finite where one is not
        self.sums: list[tuple[int, Tensor]] = []
        room = CACHE_FRACTION * free_memory(device)
        for index, raw in enumerate(passes()):
            batch = self.place(raw, index)
            require(
                batch.size > 0,
                f"batch {index} of the data",
                "hold at least one sample",
                "an empty batch",
                "leave empty batches out",
            )
            self.sizes.append(batch.size)
            self.sums += [(index, part) for part in _sums(batch.data)]
            room -= _bytes(batch.data)
            if room < 0:
                self._kept = None
            if self._kept is not None:
                self._kept.append(batch)
        require(bool(self.sizes), "data", "hold at least one sample", "an empty data set")

    @property
    def num_samples(self) -> int:
        """n, the number of samples."""
        return sum(self.sizes)

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
        end = object()
        with rng_untouched():
            source = iter(self._passes())
        for index in range(len(self.sizes)):
            with rng_untouched():
                raw = next(source, end)
            require(
                raw is not end, "data", f"give {len(self.sizes)} batches at every pass", f"{index}"
            )
            if wanted is None or index in wanted:
                yield self.place(raw, index)

    def digest(self, cut: bool = False) -> str:
        """A digest of every byte of the data, in one pass; with ``cut`` also of how it is cut into
        batches.

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
                header = (
                    f"{form}{leaf.dtype}{tuple(leaf.shape[1:])}"
                    if rows
                    else f"{form}{_content(leaf)}"
                )
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
        """The samples at sorted ``indices``, in batches of ``batch_size`` (default: as they fall
        in the batches).
        """

        def chosen() -> Iterator[Any]:
            start = 0
            for batch in self:
                inside = indices[(indices >= start) & (indices < start + batch.size)] - start
                start += batch.size
                if len(inside):
                    yield take(batch, inside.to(self.device)).data

        if batch_size is None:
            return Batches(chosen, self.device, self.dtype)
        require_count(batch_size, "batch_size")
        whole = concatenate(list(chosen()))
        return Batches(lambda: _slices(whole, batch_size), self.device, self.dtype)

    def cut(self, rows: int) -> Batches:
        """The same samples in the same order, each batch cut into pieces of at most ``rows``."""
        pieces = Batches(
            lambda: (part for batch in self for part in _slices(batch.data, rows)),
            self.device,
            self.dtype,
        )
        pieces.raw = self.raw
        return pieces

    def place(self, raw: Any, index: int) -> Batch:
        """Raw data as a batch on the device."""

        def move(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            require(
                not leaf.is_meta,
                "data",
                "hold numbers",
                "tensors on the meta device, which have shapes alone",
                "load them on a device that computes",
            )
            cast = self.dtype if leaf.is_floating_point() else None
            return leaf.detach().to(self.device, cast)

        raw = as_tree(raw)
        return Batch(tree_map(move, raw), _size(raw), index)


def _content(leaf: Any) -> str:
    """What is not a tensor of rows, in words that another value does not have."""
    found = hashlib.sha256()
    if isinstance(leaf, Tensor):
        update_digest(found, leaf)
    else:
        try:
            found.update(pickle.dumps(leaf))
        except Exception:  # whatever the class of a user's object raises
            return type(leaf).__qualname__
    return found.hexdigest()


def _sums(data: Any) -> list[Tensor]:
    """The sum of each tensor of real numbers in a batch, in float32 at least."""
    real = [
        leaf
        for leaf in tree_flatten(data)[0]
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
    entries = [leaf if leaf.layout == torch.strided else _entries(leaf) for leaf in real]
    return [leaf.sum(dtype=torch.promote_types(leaf.dtype, torch.float32)) for leaf in entries]


def _entries(leaf: Tensor) -> Tensor:
    """The numbers that a sparse tensor holds."""
    return leaf._values() if leaf.layout == torch.sparse_coo else leaf.values()


def kept_if_small(batches: Iterable[Batch], device: torch.device) -> list[Batch] | None:
    """The batches as a list where they fit in a quarter of the free memory, else None."""
    room, kept = CACHE_FRACTION * free_memory(device), []
    for batch in batches:
        room -= _bytes(batch.data)
        if room < 0:
            return None
        kept.append(batch)
    return kept


def chosen_indices(indices: Tensor | Sequence[int], total: int) -> Tensor:
    """Sorted positions out of ``total`` from numbers or a mask."""
    try:
        found = torch.as_tensor(indices).cpu()
    except (TypeError, ValueError, RuntimeError):
        found = torch.empty(0)
    if found.dtype == torch.bool:
        require(
            found.shape == (total,), "indices", f"be a mask of {total} entries, one a sample", found
        )
        found = found.nonzero().flatten()
    whole = not (found.is_floating_point() or found.is_complex()) and found.ndim == 1
    require(
        whole and len(found) > 0,
        "indices",
        "be some integers, or a mask with a True in it",
        indices,
    )
    low, high = int(found.min()), int(found.max())
    require(0 <= low and high < total, "indices", f"lie in [0, {total - 1}]", f"{low} … {high}")
    return found.sort().values


def take(batch: Batch, which: Tensor | slice) -> Batch:
    """Some samples of a batch: copies of those at some indices, or views of a slice."""

    def pick(leaf: Any) -> Any:
        return leaf[which] if isinstance(leaf, Tensor) and leaf.ndim else leaf

    return Batch(
        tree_map(pick, batch.data),
        len(range(batch.size)[which] if isinstance(which, slice) else which),
    )


def rows_of(batch: Batch) -> tuple[list[Tensor], Callable[..., Batch]]:
    """The tensors of a batch that have a row for each sample, and what makes a batch of one sample
    of a row of each.

    All else in the batch (numbers, strings, tensors without dimensions) is the same for every
    sample.
    """
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

    Refused by name: one-shot iterators, shuffling loaders and augmenting data sets, which would be
    another data set at every pass.
    """
    if batch_size is not None:
        require_count(batch_size, "batch_size")
    with rng_untouched():
        passes = _passes(data, batch_size, default)
        batches = Batches(passes, device, dtype)
        _require_same_twice(passes, data)
    batches.raw = data.raw if isinstance(data, Batches) else data
    return batches


def _passes(data: Any, batch_size: int | None, default: int) -> Callable[[], Iterable[Any]]:
    """A function that starts a fresh pass over the raw batches."""
    given = "a DataLoader" if isinstance(data, DataLoader) else "a list of batches"
    if isinstance(data, Batches):
        return partial(_raw, data)
    if isinstance(data, DataLoader):
        require(
            batch_size is None,
            "batch_size",
            f"be left out for {given}",
            batch_size,
            "it has its own batches",
        )
        _require_ordered(data)
        return partial(_same, data)
    if isinstance(data, IterableDataset):
        return partial(DataLoader, data, batch_size=batch_size or default)
    if is_columns(data):
        return partial(_slices, as_tree(data), batch_size or default)
    if isinstance(data, Sequence) and not isinstance(data, str | bytes):
        require(len(data) > 0, "data", "hold at least one batch", "an empty list")
        # to describe a good one would print its tensors
        if not isinstance(data[0], Tensor | tuple | list | Mapping):
            require(
                False,
                "data",
                "be a list of batches (tensors, tuples or dicts of tensors)",
                f"a {type(data).__name__} whose first entry is {describe(data[0])}",
                "torch.as_tensor makes tensors",
                TypeError,
            )
        require(
            batch_size is None,
            "batch_size",
            f"be left out for {given}",
            batch_size,
            "it has its own batches",
        )
        return partial(_same, data)
    if isinstance(data, Dataset) or (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        require(len(data) > 0, "data", "hold at least one sample", "an empty data set")
        return partial(_collate, data, batch_size or default)
    once = hasattr(data, "__next__")
    cure = "pass list(data): an operator needs the same batches at every product" if once else ""
    require(
        False,
        "data",
        "be a Dataset, a DataLoader, tensors or a list of batches",
        "a one-shot iterator" if once else data,
        cure,
        TypeError,
    )
    raise AssertionError


def _raw(batches: Batches) -> Iterator[Any]:
    return (batch.data for batch in batches)


def _same(data: Any) -> Any:
    return data


def is_columns(data: Any) -> bool:
    """Whether data is whole columns: a tensor, or several in a tuple, list or dict, or a tuple with
    dicts among them.

    Dicts alone, in a tuple or a list, are batches, and a dict by number is a data set.
    """
    if isinstance(data, Tensor):
        return data.ndim > 0
    if isinstance(data, Mapping):
        named = all(isinstance(key, str) for key in data)
        return named and any(
            isinstance(leaf, Tensor) and leaf.ndim for leaf in tree_flatten(as_tree(data))[0]
        )
    parts = list(data) if isinstance(data, tuple | list) else []
    tensors = [part for part in parts if isinstance(part, Tensor)]
    rest = [part for part in parts if not isinstance(part, Tensor)]
    mixed = isinstance(data, tuple) and all(
        isinstance(part, Mapping) and is_columns(part) for part in rest
    )
    return bool(tensors) and (not rest or mixed)


def as_tree(raw: Any) -> Any:
    """The same with mappings that pytrees do not know as ``Columns``, at every depth."""

    def known(leaf: Any) -> Any:
        if not isinstance(leaf, Mapping):
            return leaf
        return Columns.of({key: as_tree(value) for key, value in leaf.items()}, type(leaf))

    return tree_map(known, raw)


def _slices(columns: Any, batch_size: int) -> Iterator[Any]:
    total = _size(columns)
    for start in range(0, total, batch_size):
        part = slice(start, start + batch_size)
        yield tree_map(
            lambda leaf, part=part: leaf[part] if isinstance(leaf, Tensor) and leaf.ndim else leaf,
            columns,
        )


def _collate(dataset: Any, batch_size: int) -> Iterator[Any]:
    total = len(dataset)
    for start in range(0, total, batch_size):
        yield default_collate([dataset[i] for i in range(start, min(start + batch_size, total))])


def _size(raw: Any) -> int:
    """Samples in a batch: the common first dimension of its tensors."""
    sizes = {
        leaf.shape[0] for leaf in tree_flatten(raw)[0] if isinstance(leaf, Tensor) and leaf.ndim
    }
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
    got = f"first dimensions {sorted(sizes)}" if sizes else "a batch without tensors"
    expected = "have one tensor or more, all with the same first dimension"
    raise ValueError(message("data", expected, got, cure))


def _bytes(raw: Any) -> int:
    return sum(
        leaf.numel() * leaf.element_size()
        for leaf in tree_flatten(raw)[0]
        if isinstance(leaf, Tensor)
    )


def _require_ordered(loader: DataLoader[Any]) -> None:
    shuffles = "Random" in type(getattr(loader, "sampler", None)).__name__
    require(
        not shuffles,
        "data",
        "come in the same order at every pass",
        "a DataLoader that shuffles",
        "use shuffle=False, or list(loader) to fix one pass",
    )


def _require_same_twice(passes: Callable[[], Iterable[Any]], data: Any) -> None:
    """Two passes must begin alike; a generator, an augmentation or a custom shuffle shows here."""
    if is_columns(data) or isinstance(data, list | tuple):
        return
    first, second = (tree_flatten(as_tree(next(iter(passes()), None)))[0] for _ in range(2))
    same = len(first) == len(second) and all(map(_equal, first, second))
    require(
        same,
        "data",
        "be the same at every pass",
        "first batches that differ (shuffling or random augmentation)",
        "fix one pass with list(loader)",
    )


def _equal(first: Any, second: Any) -> bool:
    """Whether two leaves are the same, NaN counting as itself."""
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        return bool(first == second)
    alike = first.shape == second.shape and first.dtype == second.dtype
    return alike and bool(((first == second) | ((first != first) & (second != second))).all())


@contextmanager
def rng_untouched() -> Iterator[None]:
    """Whatever runs inside leaves torch's global random state as it was."""
    with torch.random.fork_rng(
        devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    ):
        yield
