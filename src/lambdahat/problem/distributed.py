"""Many processes on one problem: sums over all ranks, which notice when the ranks do not do the
same thing.

Every rank makes the same calls with the same arguments; each works on its share of the data, and
one all-reduce adds the parts up. The buffer that is reduced begins with a header: what is being
summed, in which shape and as the how manieth sum, and readings of the arguments. Ranks whose
headers differ raise, all of them.
"""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lambdahat._core.check import require
from lambdahat._core.rng import generator

HEADER = 24  # numbers in front of what is summed: 4·24 bytes in float32
DIGITS, READINGS = 6, 4
WIDTH = 4096
CHUNK = 4096 * WIDTH  # entries that are read at a time, in float64
ROUNDING = 1024  # units of rounding, of the length of what was given, by which ranks may differ …
# … and the least such unit: vectors that GPUs add up in another order are no other vectors
FINEST = 1e-14
EXACTLY = 1e-9  # relative difference of numbers that must agree, taken in float64
# within which a rank that is alive tells the others where it is, after a failure
ANSWER = timedelta(seconds=5)
ALIKE = "give every rank the same model and all of the data, which is then shared out"
CURE = (
    "every rank makes the same calls in the same order; where only some measure, they pass"
    " ranks=None"
)

_failures = itertools.count()
_alone: ContextVar[bool] = ContextVar("lambdahat_alone", default=False)


class Ranks:
    """The processes that share a problem's data; ``size`` is 1 and nothing is sent where there
    is one alone.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        # torch keeps the group until destroy_process_group, which must then end its threads: one
        # that is left over when Python ends takes the process down with it
        self._group = None if group is None else weakref.ref(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.name, self._sums = "the group", 0

    @classmethod
    def of(cls, ranks: Any) -> Ranks:
        """From "auto" (all ranks where ``torch.distributed`` is initialised), a process group,
        or None for no other.
        """
        ready = in_a_group()
        automatic = isinstance(ranks, str) and ranks == "auto"
        # what new_group gives to all others
        outside = ready and ranks is dist.GroupMember.NON_GROUP_MEMBER
        require(
            not outside,
            "ranks",
            "be a process group that this process is in",
            "one of other processes",
            "its members alone make the problem; others pass ranks=None",
            TypeError,
        )
        if ranks is None or (automatic and (_alone.get() or not ready)):
            return cls(None)
        if automatic:
            return cls(dist.group.WORLD)
        group = ready and isinstance(ranks, dist.ProcessGroup)
        require(
            group,
            "ranks",
            'be "auto", None or a process group that this process is in',
            ranks,
            "torch.distributed.new_group makes one",
            TypeError,
        )
        return cls(ranks)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group, None where there is one process alone."""
        if self._group is None:
            return None
        group = self._group()
        require(
            group is not None,
            "ranks",
            "be a process group that lasts as long as the problem",
            "one that has ended",
            "call destroy_process_group when all is measured",
        )
        return group

    def apart(self, name: str) -> Ranks:
        """The same processes for something of its own, whose sums are counted apart."""
        other = Ranks(self.group)
        other.name = f"{name} {self._sums} of {self.name}"
        return other

    def sum(self, values: Tensor, what: str, given: Tensor | None = None) -> Tensor:
        """Σ over ranks of ``values``, by one all-reduce; ``given`` is what every rank must have
        been given alike.
        """
        if self.size == 1:
            return values
        self._sums += 1
        kind = (
            f"{what}, {values.dtype} of shape {tuple(values.shape)}, sum {self._sums} of"
            f" {self.name}"
        )
        header = self._header(kind, given).to(values.device, values.dtype)
        buffer = torch.cat([header, values.detach().reshape(-1)])
        with self._taking_part(kind):
            dist.all_reduce(buffer, group=self.group)
            found = buffer[:HEADER].double().cpu()
        self._require_alike(found, header.double().cpu(), kind, values.dtype)
        return buffer[HEADER:].view(values.shape)

    def gather(self, rows: Tensor, places: Sequence[int], total: int, what: str) -> Tensor:
        """All rows (total, …) on every rank, of which this one has those at ``places``; exactly,
        for the rest is 0.
        """
        whole = rows.new_zeros(total, *rows.shape[1:])
        whole[list(places)] = rows
        return self.sum(whole, what)

    def least(self, number: float, what: str, device: torch.device) -> float:
        """The smallest of the ranks' numbers."""
        if self.size == 1:
            return number
        mine = torch.tensor([number], dtype=torch.float64, device=device)
        return float(self.gather(mine, [self.rank], self.size, what).min())

    def agree(
        self,
        what: str,
        facts: Mapping[str, object],
        device: torch.device,
        cures: Mapping[str, str] | None = None,
    ) -> str:
        """Raise on every rank, by name, where one of the facts (a number, a text, a tensor or
        several) differs.

        Returns a text that other facts do not have. ``cures`` says what helps for some facts in
        particular.
        """
        if self.size == 1:
            return ""
        numbers = [_numbers(fact) for fact in facts.values()]
        mine = torch.tensor(
            [n for fact in numbers for n in fact], dtype=torch.float64, device=device
        )
        rows = self.gather(mine.unsqueeze(0), [self.rank], self.size, what).cpu()
        for (name, fact), columns in zip(
            facts.items(), rows.split([len(n) for n in numbers], dim=1), strict=True
        ):
            unlike = _unlike(columns, fact.room if isinstance(fact, Rounded) else None)
            shown = {
                int: f": {columns.flatten().tolist()}",
                str: f": {fact} on rank {self.rank}",
            }.get(type(fact), "")
            require(
                not unlike,
                name,
                f"be the same on every rank for {what}",
                f"another on rank {', '.join(map(str, unlike))} than on rank 0{shown}",
                (cures or {}).get(name, ALIKE),
            )
        return hashlib.blake2b(repr(rows[0].tolist()).encode(), digest_size=6).hexdigest()

    def _header(self, kind: str, given: Tensor | None) -> Tensor:
        """[digits and readings, their squares, the length of what was given, 1, 0, 0]: their
        sums show a difference.
        """
        digits = torch.tensor(_digits(kind), dtype=torch.float64)
        reading, length = torch.zeros(READINGS, dtype=torch.float64), 0.0
        if given is not None:
            reading, others = _read(given)
            length = float(others[0]) ** 0.5
        marks = torch.cat([digits, reading])
        return torch.cat(
            [marks, marks.square(), torch.tensor([length, 1.0, 0.0, 0.0], dtype=torch.float64)]
        )

    def _require_alike(
        self, found: Tensor, mine: Tensor, kind: str, dtype: torch.dtype = torch.float32
    ) -> None:
        """The mean over ranks is this rank's own: exactly for digits, to rounding for readings and
        the length.

        Besides W·Σx² = (Σx)² where x is the same on all W ranks. This is coarser, and the same on
        all ranks.
        """
        marks = DIGITS + READINGS
        unit = max(torch.finfo(dtype).eps, FINEST) if dtype.is_floating_point else 0.0
        # a ring adds rank after rank, and rounds each time
        room = ROUNDING * unit * max(1.0, self.size / 16)
        length = float(found[2 * marks]) / self.size
        sums, squares = found[:marks], found[marks : 2 * marks]
        spread = self.size * squares - sums.square()
        wide = spread[DIGITS:].isfinite() & (spread[DIGITS:] > room * (self.size * length) ** 2)
        off = (found / self.size - mine).abs()
        far = torch.cat([off[DIGITS:marks], off[2 * marks : 2 * marks + 1]]) > room * length
        digits = bool((spread[:DIGITS] == 0).all()) and not bool(off[:DIGITS].any())
        same = (
            digits and bool(found[2 * marks + 1] == self.size) and not bool(wide.any() | far.any())
        )
        if not same:
            other = "arguments" if digits else "calls"
            raise RuntimeError(
                f"the ranks must make the same calls with the same arguments, got other {other} in "
                f"{kind}; {CURE}{self._whereabouts(kind)}"
            )

    @contextmanager
    def _taking_part(self, kind: str) -> Iterator[None]:
        """Errors of the process group with a note on what all ranks were to do."""
        try:
            yield
        except RuntimeError as error:
            text = " ".join(str(error).split())[:200]
            raise RuntimeError(
                f"all {self.size} ranks must take part in {kind}, got a rank that ended, hangs or"
                f" does something else ({text}); {CURE}, and init_process_group(timeout=…) says how"
                f" long to wait{self._whereabouts(kind)}"
            ) from error

    def _whereabouts(self, kind: str) -> str:
        """Where the other ranks are, as they tell through the store; of those that are gone,
        that they do not.
        """
        try:
            store = dist.distributed_c10d._get_default_store()
            place = f"lambdahat/{next(_failures)}/{self.group.group_name}"  # type: ignore[union-attr]
            store.set(f"{place}/{self.rank}", kind)
            told = []
            for rank in (rank for rank in range(self.size) if rank != self.rank):
                try:
                    store.wait([f"{place}/{rank}"], ANSWER)
                    told.append(f"rank {rank} was at {store.get(f'{place}/{rank}').decode()}")
                except RuntimeError:
                    told.append(f"rank {rank} does not answer")
        # the process that keeps the store is gone itself, or there is no store
        except (RuntimeError, ValueError):
            return ""
        return f". This is rank {self.rank}; " + "; ".join(told)


@contextmanager
def on_one_rank() -> Iterator[None]:
    """Problems made inside are this process's alone, unless they are told otherwise: other ranks
    do not get here.
    """
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def in_a_group() -> bool:
    """Whether this process is one of several that ``torch.distributed`` has introduced to each
    other.
    """
    return dist.is_available() and dist.is_initialized()


@dataclass(frozen=True)
class Rounded:
    """Numbers that every rank has computed by itself: alike within ``room``, as a part of the
    last of them.
    """

    numbers: tuple[float, ...]
    room: float


def readings(tensor: Tensor) -> Tensor:
    """Four random projections Σ_i u_i x_i of a tensor's finite entries, in which other entries
    or orders show.
    """
    return _read(tensor)[0]


def told(tensors: Iterable[Tensor]) -> Rounded:
    """What is compared of several tensors: readings of their readings, and of how many entries
    are not finite.
    """
    found, odd = [torch.zeros(1)], [torch.zeros(1)]
    for tensor in tensors:
        reading, others = _read(tensor)
        found.append(reading)
        odd.append(others[1:])
    numbers = readings(torch.cat(found)), readings(torch.cat(odd))
    size = max(float(numbers[0].abs().max()), float(numbers[1].abs().max()))
    return Rounded((*numbers[0].tolist(), *numbers[1].tolist(), size), EXACTLY)


def _read(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The readings of the finite entries, and [Σx² of them, how many are NaN, ∞ and −∞];
    float64, on the CPU.
    """
    flat = (
        torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    ).reshape(-1)
    across = _directions("across", WIDTH).to(flat.device)
    sums, others = [], []
    for part in flat.split(CHUNK):
        entries = part.double()
        odd = [entries.isnan().sum(), (entries == torch.inf).sum(), (entries == -torch.inf).sum()]
        entries = entries.nan_to_num(0.0, 0.0, 0.0)
        whole = len(entries) // WIDTH * WIDTH
        sums += [entries[:whole].view(-1, WIDTH) @ across] if whole else []
        sums += (
            [(entries[whole:] @ across[: len(entries) - whole]).unsqueeze(0)]
            if len(entries) > whole
            else []
        )
        others.append(torch.stack([entries.square().sum(), *odd]))
    rows = torch.cat(sums or [across.new_zeros(1, READINGS)]).cpu()
    return (rows * _directions("down", len(rows))).sum(dim=0), torch.stack(others).sum(dim=0).cpu()


@cache
def _directions(name: str, count: int) -> Tensor:
    """Numbers of variance 1, none large: a unit vector must not read so much that its rounding
    counts.
    """
    return (
        torch.rand(count, READINGS, generator=generator(0, "readings", name)).double() - 0.5
    ) * 12**0.5


def _numbers(fact: object) -> list[float]:
    """A fact as floats: a text as one that another text has not, tensors as their readings and
    what is not finite.
    """
    if isinstance(fact, int | float):
        return [float(fact)]
    if isinstance(fact, str):
        return [
            float(int.from_bytes(hashlib.blake2b(fact.encode(), digest_size=6).digest(), "big"))
        ]
    if isinstance(fact, Rounded):
        return list(fact.numbers)
    assert isinstance(fact, Iterable)
    return list(told([fact] if isinstance(fact, Tensor) else fact).numbers)


def _unlike(rows: Tensor, room: float | None) -> list[int]:
    """The ranks, one a row, whose numbers are not those of the first; NaN is like NaN."""
    first = rows[:1]
    size = first.abs().nan_to_num(0.0, 0.0, 0.0)
    near = EXACTLY * size.max() if room is None else room * size[0, -1]
    same = (rows == first) | (rows.isnan() & first.isnan()) | ((rows - first).abs() <= near)
    return [int(rank) for rank in (~same).any(dim=1).nonzero().flatten()]


def _digits(kind: str) -> list[float]:
    """A hash of a text as six digits below 16: sums of their squares are exact in float32 on up
    to 74,000 ranks.
    """
    number = int.from_bytes(hashlib.blake2b(kind.encode(), digest_size=3).digest(), "big")
    return [float(number >> (4 * i) & 15) for i in range(DIGITS)]
