"""What an experiment is: a grid of cells at three scales, a function from a cell to rows, and
claims about the rows.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any

from lambdahat._check import require, require_choice
from lambdahat.experiments.claims import Claim
from lambdahat.experiments.reproduction import Table
from lambdahat.results.charts import Chart

Cell = dict[str, Any]
Row = dict[str, Any]

SCALES = ("smoke", "cpu", "paper")
SETS = {
    "mnist": "MNIST",
    "fashion-mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "digits": "digits",
    "imagenet32": "ImageNet 32 × 32",
    "imagenet": "ImageNet",
    "penn-treebank": "Penn Treebank",
    "tiny-shakespeare": "Tiny Shakespeare",
    "xor": "XOR",
    "xord": "XORD",
    "synthetic": "the synthetic regression",
}
# training samples
WHOLE = {"mnist": 60_000, "fashion-mnist": 60_000, "cifar10": 50_000, "cifar100": 50_000}
UNAVAILABLE = ("imagenet32", "imagenet", "penn-treebank")  # sets that cannot be had here
# share of the paper's samples times epochs from which a smaller run counts as a reduced one
ENOUGH = 0.1
PRINTED_RATES = "as printed"


class Rows(Sequence[Row]):
    """The rows of an experiment, each a flat record that holds its cell's settings and what was
    measured there.

    >>> rows = Rows([{"seed": 0, "loss": 1.0}, {"seed": 1, "loss": 2.0}])
    >>> rows.where(seed=1).values("loss")
    [2.0]
    """

    def __init__(self, records: Iterable[Row]) -> None:
        self._records = list(records)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: Any) -> Any:
        return Rows(self._records[index]) if isinstance(index, slice) else self._records[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._records)

    def where(self, **settings: Any) -> Rows:
        """The rows with these settings; a list, tuple or set stands for any of its members."""
        kept = self._records
        for name, value in settings.items():
            if isinstance(value, list | tuple | set | frozenset):
                kept = [row for row in kept if row.get(name) in value]
            else:
                kept = [row for row in kept if row.get(name) == value]
        return Rows(kept)

    def values(self, name: str) -> list[Any]:
        """A column, without the rows that lack it."""
        return [row[name] for row in self._records if row.get(name) is not None]

    def distinct(self, name: str) -> list[Any]:
        """The values of a column, each once, in order of appearance."""
        return list(dict.fromkeys(self.values(name)))

    def paired(self, name: str, by: str = "seed") -> dict[Any, float]:
        """One number for each value of ``by``: the mean of the column over its rows."""
        groups: dict[Any, list[float]] = {}
        for row in self._records:
            if row.get(name) is not None:
                groups.setdefault(row[by], []).append(float(row[name]))
        return {key: sum(found) / len(found) for key, found in groups.items()}

    def frame(self) -> Any:
        """The same as a ``pandas.DataFrame``."""
        from pandas import DataFrame  # type: ignore[import-untyped]

        return DataFrame(self._records)


@dataclass(frozen=True)
class Size:
    """What was trained on what and for how long, in the paper or here; "" and 0 stand for what the
    paper does not say.

    ``samples`` are those trained on; where the paper names a data set and no number, its whole
    training part counts.
    """

    network: str = ""
    data: str = ""
    samples: int = 0
    epochs: int = 0
    rate: str = ""

    @classmethod
    def of(cls, cell: Cell) -> Size:
        """What a cell trains, by the names that cells share; images that are pooled are another
        data set.
        """
        layers, side, gains = (
            cell.get("layers"),
            cell.get("side"),
            (cell.get("gain"), cell.get("steep")),
        )
        data, epochs = cell.get("data") or "", cell.get("epochs") or 0
        network = {"ffnn": f"FFNN {layers} × {cell.get('width')}", "lenet5": "LeNet-5"}.get(
            cell.get("network", ""), cell.get("network") or ""
        )
        pooled = f" of {side} × {side}" if side else " pooled" if cell.get("shrink", 1) > 1 else ""
        rate = f"{cell['rate']:g}" if cell.get("rate") else ""
        if gains[0] is not None:
            rate = PRINTED_RATES if gains == (1, 1) else f"{gains[0]:g} times the printed"
        samples = cell.get("training") or cell.get("samples") or 0
        return cls(
            network,
            data + pooled,
            samples,
            max(epochs) if isinstance(epochs, tuple) else epochs,
            rate,
        )

    @property
    def subject(self) -> str:
        """The network and its data: "VGG-16 on CIFAR-100"."""
        name, *rest = self.data.split(" ", 1)
        data = " ".join([SETS.get(name, name), *rest])
        return (
            self.network
            if data in self.network
            else " on ".join(filter(None, [self.network, data]))
        )

    def parts(self, paper: Size) -> dict[str, tuple[int, int]]:
        """Our samples and epochs beside those of the paper, where it says how many."""
        whole = paper.samples or WHOLE.get(paper.data, 0)
        pairs = {"samples": (self.samples, whole), "epochs": (self.epochs, paper.epochs)}
        return {name: (ours, theirs) for name, (ours, theirs) in pairs.items() if ours and theirs}

    def shortfall(self, paper: Size) -> str:
        """What this lacks of the paper's training: "10,000 of 50,000 samples, 30 of 300 epochs";
        "" for nothing.
        """
        parts = self.parts(paper).items()
        return ", ".join(
            f"{ours:,} of {theirs:,} {name}" for name, (ours, theirs) in parts if ours < theirs
        )

    def unlike(self, paper: Size) -> list[str]:
        """In what this differs from a setting of the paper so that it stands in for it; a
        shorter training is alike.
        """
        named = [
            name
            for name in ("network", "data", "rate")
            if getattr(paper, name) not in ("", getattr(self, name))
        ]
        share = math.prod(min(1.0, ours / theirs) for ours, theirs in self.parts(paper).values())
        return named + ["length"] * (share < ENOUGH)

    def nearest(self, papers: Sequence[Size]) -> Size:
        """The one of the paper's sizes that this comes nearest to."""
        return min(
            papers,
            key=lambda paper: [
                name in self.unlike(paper) for name in ("network", "data", "rate", "length")
            ],
        )

    def departure(self, paper: Size) -> str:
        """The same in words: "LeNet-5 on MNIST in place of VGG-16 on CIFAR-100"; "" where there
        is none.
        """
        found = self.unlike(paper)
        if {"network", "data"} & {*found}:
            return f"{self.subject} in place of {paper.subject}"
        rate = (
            f"rates {self.rate}"
            if paper.rate == PRINTED_RATES
            else f"rate {self.rate} in place of {paper.rate}"
        )
        words = {"rate": rate, "length": self.shortfall(paper)}
        return " and ".join(words[name] for name in found)


@dataclass(frozen=True)
class Experiment:
    """A published experiment that can be run again.

    ``paper`` is one of ``papers``, and ``part`` says where in it: sections, tables and figures.
    ``scales`` has a frozen configuration for each of ``SCALES``; ``cells`` makes the grid of one;
    ``run`` measures a cell on a device and returns rows of JSON values; ``claims``, ``tables`` and
    ``charts`` read the rows of all cells. ``run`` of one cell must not depend on another: cells run
    in any order, on any machine.

    ``sizes`` are those of the paper, with which the cells of a scale are compared; none where
    nothing is trained. ``size`` says in words what else the paper ran, and what it does not say.
    """

    name: str
    title: str
    paper: str
    part: str
    scales: Mapping[str, Any]
    cells: Callable[[Any], list[Cell]]
    run: Callable[[Cell, str], list[Row]]
    claims: Callable[[Rows], list[Claim]]
    tables: Callable[[Rows], list[Table]]
    charts: Callable[[Rows], list[Chart]]
    assumptions: tuple[str, ...] = ()
    size: str = ""
    sizes: tuple[Size, ...] = ()

    def grid(self, scale: str) -> list[Cell]:
        """The cells of a scale; no two are the same."""
        require_choice(scale, "scale", SCALES)
        cells = self.cells(self.scales[scale])
        keys = {key_of(cell) for cell in cells}
        require(
            len(keys) == len(cells),
            f"the cells of {self.name}",
            "differ",
            f"{len(cells) - len(keys)} repeated",
        )
        return cells

    def trained(self, scale: str) -> list[Size]:
        """What the cells of a scale train, each once; of cells that train nothing, nothing."""
        found = dict.fromkeys(Size.of(cell) for cell in self.grid(scale))
        return [setting for setting in found if setting.data]

    def stand_in(self, scale: str, sentence: str = "") -> str:
        """Why a run at this scale is not what the paper ran: "VGG-4×16-BN on CIFAR-10 in place of
        …"; "" where it is.

        A ``sentence`` that begins with the name of a network is about that network alone.
        """
        if scale == SCALES[0]:
            return "a smoke run, which shows that the code runs"
        ours = self.trained(scale) if self.sizes else []
        names = [
            setting.network
            for setting in ours
            if setting.network and sentence.startswith(setting.network)
        ]
        about = max(names, key=len, default="")
        apart = (
            each.departure(each.nearest(self.sizes)) for each in ours if about in ("", each.network)
        )
        return next(filter(None, apart), "")

    @property
    def missing(self) -> str:
        """The data that the paper's settings need and that cannot be had here; "" if some need
        none of them.
        """
        needed = dict.fromkeys(setting.data for setting in self.sizes)
        return (
            " and ".join(SETS[name] for name in needed)
            if needed and {*needed} <= {*UNAVAILABLE}
            else ""
        )

    def reduced(self, scale: str) -> str:
        """What a scale lacks of the paper's training: "10,000 of 50,000 samples"; "" for
        nothing.
        """
        pairs = (
            [(each, each.nearest(self.sizes)) for each in self.trained(scale)] if self.sizes else []
        )
        found = [each.shortfall(paper) for each, paper in pairs if not each.unlike(paper)]
        return " / ".join(dict.fromkeys(filter(None, found)))


@dataclass(frozen=True)
class Scale:
    """The settings that all experiments which train have at each scale; a configuration adds its
    own.

    ``training`` and ``held_out`` are numbers of samples of the set ``data``.
    """

    data: str
    training: int
    held_out: int
    epochs: int
    seeds: int
    _: KW_ONLY
    batch: int = 128


def settings_of(config: Any, *varied: str) -> Cell:
    """The fields of a configuration that all its cells share: without those whose members tell
    cells apart.
    """
    return {
        field.name: getattr(config, field.name)
        for field in fields(config)
        if field.name not in varied
    }


def key_of(cell: Cell) -> str:
    """A short name of a cell that depends on its settings alone."""
    text = json.dumps(cell, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def label_of(cell: Cell) -> str:
    """The settings of a cell in words, as --only matches them: "alpha=0.1 seed=3"."""
    return " ".join(f"{name}={value}" for name, value in cell.items())
