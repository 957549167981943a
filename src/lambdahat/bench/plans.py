"""The plan of a benchmark run: sizes, rounds, device, peers; and rows from timings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from lambdahat.bench.limits import Limit, Rates, limit, measured_rates
from lambdahat.bench.peers import PEERS, Peer
from lambdahat.bench.problems import BenchCase, load
from lambdahat.bench.records import OURS, UNIT, BenchRow
from lambdahat.bench.timing import Maker, Timed, compare


@dataclass(frozen=True)
class Plan:
    """The choices of a run; ``quick`` shows that it runs, with meaningless times."""

    device: str = "cpu"
    peers: bool = True
    quick: bool = False
    rounds: int = 9

    @property
    def gpu(self) -> bool:
        """Whether the device is CUDA's."""
        return self.device.startswith("cuda")

    @property
    def samples(self) -> int:
        """Images in the data."""
        return 64 if self.quick else 8192 if self.gpu else 2048

    @property
    def batch_size(self) -> int:
        """Images in a batch of the data."""
        return 32 if self.quick else 8192 if self.gpu else 512

    @property
    def width(self) -> int:
        """The width of the perceptrons' hidden layers."""
        return 8 if self.quick else 256

    def timed(
        self, makers: Mapping[str, Maker], unit: str = UNIT, long: bool = True
    ) -> dict[str, Timed]:
        """See ``compare``; what takes ``long`` is timed in three rounds at most."""
        if self.quick:
            return compare(makers, unit, rounds=1, sample_s=0.0)
        return compare(makers, unit, min(self.rounds, 3) if long else self.rounds)

    def case(self, name: str) -> BenchCase:
        """A trained network; the same each time it is asked for."""
        if name not in self._cases:
            small = min(self.samples, 2048) if name in ("lenet5", "vgg16") else self.samples
            sizes = {"batch_size": min(self.batch_size, small), "width": self.width}
            self._cases[name] = load(name, small, device=self.device, **sizes)
        return self._cases[name]

    @cached_property
    def _cases(self) -> dict[str, BenchCase]:
        return {}

    @cached_property
    def rates(self) -> Rates:
        """The arithmetic and memory rates of the machine."""
        return measured_rates(self.device, self.quick)

    def able(self, work: str) -> list[Peer]:
        """The peers that have a method of this name, if peers are to run at all."""
        return [peer for peer in PEERS if self.peers and getattr(peer, work) is not None]

    def limit(
        self, work: str, case: BenchCase, count: float = 1.0, kind: str = "", label: str = ""
    ) -> Limit:
        """See ``limits.limit``; there is none for tiny sizes."""
        return Limit() if self.quick else limit(work, case, self.rates, count, kind, label)


def rows(
    work: str,
    case: str,
    timed: Mapping[str, Timed],
    error: Callable[[Any], float] | None = None,
    accuracy: float = math.nan,
    least: Limit | None = None,
    notes: Mapping[str, str] | None = None,
    unit: str = "gradient",
) -> list[BenchRow]:
    """One row for everyone timed; ``error`` maps an answer to its relative error."""
    found = []
    for name, one in timed.items():
        judged = error is not None and not one.note and name != UNIT
        miss = error(one.value) if error is not None and judged else math.nan
        note, measured = one.note or (notes or {}).get(name, ""), (one.seconds, one.cost, unit)
        row = BenchRow(work, case, name, *measured, miss, accuracy, one.memory, note=note)
        if name == OURS and least is not None:
            row = replace(row, limit=least.units, limit_why=least.why)
            row = replace(row, flop_seconds=least.flop_seconds, byte_seconds=least.byte_seconds)
        found.append(row)
    return found
