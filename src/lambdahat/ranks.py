"""Many processes on one problem: sums over all ranks, which notice when the ranks do not do the same thing.

Every rank makes the same calls with the same arguments; each works on its share of the data, and one all-reduce adds
the parts up. The buffer that is reduced begins with a header: what is being summed, in which shape and as the how
manieth sum, and readings of the arguments. Ranks whose headers differ raise, all of them.
"""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lambdahat._check import require
from lambdahat._rng import generator

HEADER = 24  # numbers in front of what is summed: 4·24 bytes in float32
DIGITS, READINGS = 6, 4
WIDTH = 4096
UNLIKE = 1e-4  # squared difference between ranks, as a part of the square itself, that is not rounding in float32
EXACTLY = 1e-9  # relative difference of numbers that must agree, taken in float64
ANSWER = timedelta(seconds=5)  # within which a rank that is alive tells the others where it is, after a failure
CURE = "every rank makes the same calls in the same order; where only some measure, they pass ranks=None"

_failures = itertools.count()
_alone: ContextVar[bool] = ContextVar("lambdahat_alone", default=False)


class Ranks:
    """The processes that share a problem's data; ``size`` is 1 and nothing is sent where there is one alone."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        # torch keeps the group until destroy_process_group, which must then end its threads: one that is left over when
        # Python ends takes the process down with it
        self._group = None if group is None else weakref.ref(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.name, self._sums = "the group", 0

    @classmethod
    def of(cls, ranks: Any) -> Ranks:
        """From "auto" (all ranks where ``torch.distributed`` is initialised), a process group, or None for no other."""
        ready = in_a_group()
        automatic = isinstance(ranks, str) and ranks == "auto"
        if ranks is None or (automatic and (_alone.get() or not ready)):
            return cls(None)
        if automatic:
            return cls(dist.group.WORLD)
        group = ready and isinstance(ranks, dist.ProcessGroup)
        require(group, "ranks", 'be "auto", None or a process group that this process is in', ranks,
                "torch.distributed.new_group makes one", TypeError)  # fmt: skip
        return cls(ranks)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group, None where there is one process alone."""
        if self._group is None:
            return None
        group = self._group()
        require(group is not None, "ranks", "be a process group that lasts as long as the problem",
                "one that has ended", "call destroy_process_group when all is measured")  # fmt: skip
        return group

    def apart(self, name: str) -> Ranks:
        """The same processes for something of its own, whose sums are counted apart."""
        other = Ranks(self.group)
        other.name = f"{name} {self._sums} of {self.name}"
        return other

    def sum(self, values: Tensor, what: str, given: Tensor | None = None) -> Tensor:
        """Σ over ranks of ``values``, by one all-reduce; ``given`` is what every rank must have been given alike."""
        if self.size == 1:
            return values
        self._sums += 1
        kind = f"{what}, {values.dtype} of shape {tuple(values.shape)}, sum {self._sums} of {self.name}"
        header = self._header(kind, given).to(values.device, values.dtype)
        buffer = torch.cat([header, values.detach().reshape(-1)])
        with self._taking_part(kind):
            dist.all_reduce(buffer, group=self.group)
            found = buffer[:HEADER].double().cpu()
        self._require_alike(found, header.double().cpu(), kind)
        return buffer[HEADER:].view(values.shape)

    def gather(self, rows: Tensor, places: Sequence[int], total: int, what: str) -> Tensor:
        """All rows (total, …) on every rank, of which this one has those at ``places``; exactly, for the rest is 0."""
        whole = rows.new_zeros(total, *rows.shape[1:])
        whole[list(places)] = rows
        return self.sum(whole, what)

    def least(self, number: float, what: str, device: torch.device) -> float:
        """The smallest of the ranks' numbers."""
        if self.size == 1:
            return number
        mine = torch.tensor([number], dtype=torch.float64, device=device)
        return float(self.gather(mine, [self.rank], self.size, what).min())

    def agree(self, what: str, facts: Mapping[str, object], device: torch.device) -> str:
        """Raise on every rank, by name, where one of the facts (a number, a text, a tensor or several) differs.

        Returns a text that other facts do not have.
        """
        if self.size == 1:
            return ""
        numbers = [_numbers(fact) for fact in facts.values()]
        mine = torch.tensor([n for fact in numbers for n in fact], dtype=torch.float64, device=device)
        rows = self.gather(mine.unsqueeze(0), [self.rank], self.size, what).cpu()
        for (name, fact), columns in zip(facts.items(), rows.split([len(n) for n in numbers], dim=1), strict=True):
            first = columns[:1]
            unlike = ((columns - first).abs() > EXACTLY * first.abs().max()).any(dim=1).nonzero().flatten().tolist()
            shown = {int: f": {columns.flatten().tolist()}", str: f": {fact} on rank {self.rank}"}.get(type(fact), "")
            require(not unlike, name, f"be the same on every rank for {what}",
                    f"another on rank {', '.join(map(str, unlike))} than on rank 0{shown}",
                    "give every rank the same model and all of the data, which is then shared out")  # fmt: skip
        return hashlib.blake2b(repr(rows[0].tolist()).encode(), digest_size=6).hexdigest()

    def _header(self, kind: str, given: Tensor | None) -> Tensor:
        """[digits and readings, their squares, the square of what was given, 1, 0, 0]: their sums show a difference."""
        digits = torch.tensor(_digits(kind), dtype=torch.float64)
        reading, square = torch.zeros(READINGS, dtype=torch.float64), 0.0
        if given is not None:
            reading, square = readings(given), float(given.detach().double().square().sum())
        marks = torch.cat([digits, reading])
        return torch.cat([marks, marks.square(), torch.tensor([square, 1.0, 0.0, 0.0], dtype=torch.float64)])

    def _require_alike(self, found: Tensor, mine: Tensor, kind: str) -> None:
        """W·Σx² = (Σx)² where x is the same on all W ranks: exactly for digits, to rounding for readings."""
        marks = DIGITS + READINGS
        sums, squares = found[:marks], found[marks : 2 * marks]
        spread = self.size * squares - sums.square()
        unlike = UNLIKE * max(1.0, self.size / 16)  # a ring adds rank after rank, and rounds each time
        room = torch.cat([torch.zeros(DIGITS), torch.full((READINGS,), unlike * self.size * float(found[2 * marks]))])
        far = (sums / self.size - mine[:marks]).abs() > torch.sqrt(room / self.size)
        same = bool(found[2 * marks + 1] == self.size) and not bool(((spread > room) | far).any())
        if not same:
            other = "arguments" if bool((spread[:DIGITS] == 0).all()) else "calls"
            raise RuntimeError(f"the ranks must make the same calls with the same arguments, got other {other} in "
                               f"{kind}; {CURE}{self._whereabouts(kind)}")  # fmt: skip

    @contextmanager
    def _taking_part(self, kind: str) -> Iterator[None]:
        """Errors of the process group with a note on what all ranks were to do."""
        try:
            yield
        except RuntimeError as error:
            text = " ".join(str(error).split())[:200]
            raise RuntimeError(f"all {self.size} ranks must take part in {kind}, got a rank that ended, hangs or does "
                               f"something else ({text}); {CURE}, and init_process_group(timeout=…) says how long to "
                               f"wait{self._whereabouts(kind)}") from error  # fmt: skip

    def _whereabouts(self, kind: str) -> str:
        """Where the other ranks are, as they tell through the store; of those that are gone, that they do not."""
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
        except (RuntimeError, ValueError):  # the process that keeps the store is gone itself, or there is no store
            return ""
        return f". This is rank {self.rank}; " + "; ".join(told)


@contextmanager
def on_one_rank() -> Iterator[None]:
    """Problems made inside are this process's alone, unless they are told otherwise: other ranks do not get here."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def in_a_group() -> bool:
    """Whether this process is one of several that ``torch.distributed`` has introduced to each other."""
    return dist.is_available() and dist.is_initialized()


def readings(tensor: Tensor) -> Tensor:
    """Four random projections Σ_i u_i x_i of a tensor's entries, float64, in which other entries or orders show."""
    flat = tensor.detach().reshape(-1)
    flat = flat if flat.is_floating_point() else flat.double()
    rows = len(flat) // WIDTH
    across, down = _directions("across", WIDTH).to(flat), _directions("down", rows + 1)
    sums = [(flat[: rows * WIDTH].view(rows, WIDTH) @ across).double().cpu()] if rows else []
    sums.append((flat[rows * WIDTH :] @ across[: len(flat) - rows * WIDTH]).double().cpu().unsqueeze(0))
    return (torch.cat(sums) * down).sum(dim=0)


@cache
def _directions(name: str, count: int) -> Tensor:
    """Numbers of variance 1, none large: a unit vector must not read so much that its rounding counts."""
    return (torch.rand(count, READINGS, generator=generator(0, "readings", name)).double() - 0.5) * 12**0.5


def _numbers(fact: object) -> list[float]:
    """A fact as floats: a text as one that another text has not, tensors as what ``readings`` tell of them all."""
    if isinstance(fact, int | float):
        return [float(fact)]
    if isinstance(fact, str):
        return [float(int.from_bytes(hashlib.blake2b(fact.encode(), digest_size=6).digest(), "big"))]
    assert isinstance(fact, Iterable)
    tensors = [fact] if isinstance(fact, Tensor) else fact
    return readings(torch.cat([torch.zeros(1), *map(readings, tensors)])).tolist()


def _digits(kind: str) -> list[float]:
    """A hash of a text as six digits below 16: sums of their squares are exact in float32 on up to 74,000 ranks."""
    number = int.from_bytes(hashlib.blake2b(kind.encode(), digest_size=3).digest(), "big")
    return [float(number >> (4 * i) & 15) for i in range(DIGITS)]
