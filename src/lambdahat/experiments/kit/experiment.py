"""What an experiment is, and what the rows of its store say.

An experiment is a grid of cells at three scales, a function from a cell to rows, and claims, tables
and charts that read the rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from textwrap import dedent
from typing import Any

from lambdahat._core.check import require, require_choice
from lambdahat.experiments.kit.cells import Cell, Row, Rows, key_of, label_of, without_seeds
from lambdahat.experiments.kit.claims import (
    FAILS,
    HOLDS,
    MISSING,
    STAND_IN,
    UNTESTED,
    Claim,
    Reading,
    Table,
    Verdict,
    judge,
)
from lambdahat.experiments.kit.store import Store
from lambdahat.results.charts import Chart

NGD = "NGD converges to less degenerate solutions than SGD"
FLATNESS = "Flatness is a false friend"
REGULARIZATION = "Generalizing Regularization of Neural Networks to Correlated Parameter Spaces"
SPECTRAL = "Spectral Machine Learning"


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
CLAIM_FIELDS = {field.name for field in fields(Claim)}


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
    """A published experiment that can be reproduced.

    ``paper`` is the title of a document, and ``part`` says where in it: sections, tables, figures.
    ``scales`` has a frozen configuration for each of ``SCALES``; ``cells`` makes the grid of one;
    ``run`` measures a cell on a device and returns rows of JSON values; ``claims``, ``tables`` and
    ``charts`` read the rows of all cells. ``run`` of one cell must not depend on another: cells run
    in any order, on any machine. The last three may be generators: calling them gives lists.

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
    claims: Callable[[Rows], Iterable[Claim]]
    tables: Callable[[Rows], Iterable[Table]]
    charts: Callable[[Rows], Iterable[Chart]]
    assumptions: tuple[str, ...] = ()
    size: str = ""
    sizes: tuple[Size, ...] = ()

    def __post_init__(self) -> None:
        for name in ("claims", "tables", "charts"):
            read = getattr(self, name)
            if not (isinstance(read, partial) and read.func is _list_of):
                object.__setattr__(self, name, partial(_list_of, read))

    def grid(self, scale: str) -> list[Cell]:
        """The cells of a scale; no two are the same."""
        require_choice(scale, "scale", SCALES)
        cells = self.cells(self.scales[scale])
        keys = {key_of(cell) for cell in cells}
        repeated = len(cells) - len(keys)
        require(not repeated, f"the cells of {self.name}", "differ", f"{repeated} repeated")
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
        names = [each.network for each in ours if sentence.startswith(each.network)]
        about = max(names, key=len, default="")
        apart = [each for each in ours if about in ("", each.network)]
        return next(filter(None, (each.departure(each.nearest(self.sizes)) for each in apart)), "")

    @property
    def missing(self) -> str:
        """The data that the paper's settings need and that cannot be had here; "" if some need
        none of them.
        """
        needed = dict.fromkeys(setting.data for setting in self.sizes)
        absent = needed and {*needed} <= {*UNAVAILABLE}
        return " and ".join(SETS[name] for name in needed) if absent else ""

    def reduced(self, scale: str) -> str:
        """What a scale lacks of the paper's training: "10,000 of 50,000 samples"; "" for
        nothing.
        """
        ours = self.trained(scale) if self.sizes else []
        pairs = [(each, each.nearest(self.sizes)) for each in ours]
        found = [each.shortfall(paper) for each, paper in pairs if not each.unlike(paper)]
        return " / ".join(dict.fromkeys(filter(None, found)))


LEAST = 3  # seeds of a setting that lacks some, to be judged beside others


def _list_of(read: Callable[[Rows], Iterable[Any]], rows: Rows) -> list[Any]:
    return list(read(rows))


@dataclass(frozen=True)
class Findings:
    """Verdicts, tables and charts of ``done`` of ``total`` cells; ``notes`` say what is missing
    and why.
    """

    done: int
    total: int
    verdicts: tuple[Verdict, ...]
    tables: tuple[Table, ...]
    charts: tuple[Chart, ...]
    notes: tuple[str, ...]
    faulty: bool = False  # whether a part could not be made though all cells are there

    @property
    def progress(self) -> str:
        """How many cells there are, in a sentence."""
        if self.done < self.total:
            return self.notes[0]
        return (
            f"All {self.total:,} cells have finished."
            if self.total > 1
            else "The one cell has finished."
        )


def findings(experiment: Experiment, store: Store) -> Findings:
    """Read the rows of a store.

    A store can be read while its sweep runs, and rows that lack some cells may be too few for a
    claim, a table or a chart: that must not cost the reader the rest. Nor may a setting that has
    only just begun: its claims would be undecided for want of seeds, and count in Holm's correction
    of the others. So it waits until it has LEAST seeds, unless no setting has more.
    """
    stored = store.finished()
    cells = {key_of(cell): cell for cell in experiment.grid(store.scale)}
    grid = set(cells)
    done, total, foreign = len(stored & grid), len(grid), len(stored - grid)
    waiting, begun = _begun(cells, stored)
    rows = store.rows(without=waiting)
    parts: dict[str, Callable[[], Iterable[Any]]] = {
        "claims": lambda: _judged(experiment, store, rows),
        "tables": lambda: experiment.tables(rows),
        "charts": lambda: experiment.charts(rows),
    }
    found: dict[str, tuple[Any, ...]] = {}
    troubles: dict[str, Exception] = {}
    for name, read in parts.items():
        try:
            found[name] = tuple(read()) if len(rows) else ()
        except Exception as error:
            found[name], troubles[name] = (), error
    notes = _missing(done, total, list(troubles))
    if done == total:
        notes = [
            f"The {name} could not be made from these rows: {type(error).__name__}: {error}"
            for name, error in troubles.items()
        ]
    if begun:
        notes.append(f"Neither judged nor shown before {LEAST} seeds have run: {'; '.join(begun)}.")
    if foreign:
        notes.append(
            f"{foreign:,} stored cells are not in the grid of this version; the same command runs"
            " it anew."
        )
    return Findings(
        done,
        total,
        found["claims"],
        found["tables"],
        found["charts"],
        tuple(notes),
        bool(troubles) and done == total,
    )


def _judged(experiment: Experiment, store: Store, rows: Rows) -> Sequence[Verdict]:
    """The verdicts; what these rows leave untested keeps the decision of a smaller run in the
    same folder.
    """
    verdicts: Sequence[Verdict] = judge(
        [place_claim(claim, experiment, store.scale) for claim in experiment.claims(rows)]
    )
    smaller = Store(store.path.parent, experiment.name, SCALES[1])
    if (
        store.scale == SCALES[2]
        and any(verdict.barrier for verdict in verdicts)
        and smaller.path.exists()
    ):
        size = experiment.reduced(smaller.scale) or f"{smaller.scale} scale"
        return carry_decisions(verdicts, findings(experiment, smaller).verdicts, size)
    return verdicts


def place_claim(claim: Claim, experiment: Experiment, scale: str) -> Claim:
    """The claim, not testable if what ran at this scale stands in for what it is about, whichever
    way it points.

    A claim of our own is about our run, and a general one about any network: only a smoke run says
    nothing of either.
    """
    other = experiment.stand_in(scale, claim.sentence)
    if not other or ((claim.own or claim.general) and scale != SCALES[0]):
        return claim
    barrier = MISSING if experiment.missing or claim.barrier == MISSING else STAND_IN
    return replace(claim, unmet="; ".join(filter(None, [other, claim.unmet])), barrier=barrier)


def carry_decisions(
    larger: Sequence[Verdict], smaller: Sequence[Verdict], size: str
) -> tuple[Verdict, ...]:
    """The verdicts of the larger run; what it leaves untested keeps the decision of the smaller
    run, with its size.

    Only a decision counts, and a stand-in makes none.
    """
    decided = {
        (each.claim, each.source): each for each in smaller if each.verdict in (HOLDS, FAILS)
    }
    out = []
    for verdict in larger:
        before = decided.get((verdict.claim, verdict.source))
        if verdict.verdict == UNTESTED and before is not None:
            verdict = replace(
                before, evidence=f"{before.evidence} at {size}; larger: {verdict.evidence}"
            )
        out.append(verdict)
    return tuple(out)


def _begun(cells: Mapping[str, Cell], stored: set[str]) -> tuple[set[str], list[str]]:
    """The finished cells of settings that lack seeds and have fewer than LEAST, and these settings
    in words.

    None if no setting has more.
    """
    settings: dict[str, list[str]] = {}
    for key, cell in cells.items():
        settings.setdefault(key_of(without_seeds(cell)), []).append(key)
    every = [without_seeds(cells[keys[0]]) for keys in settings.values()]
    begun, words = set[str](), []
    for setting, keys in zip(every, settings.values(), strict=True):
        there = stored.intersection(keys)
        seeds = sum(_seeds(cells[key]) for key in there)
        if there and len(there) < len(keys) and seeds < LEAST:
            told = {
                name: value
                for name, value in setting.items()
                if any(other.get(name) != value for other in every)
            }
            words.append(f"{label_of(told)} ({seeds} of {sum(_seeds(cells[key]) for key in keys)})")
            begun |= there
    return (begun, words) if stored & set(cells) - begun else (set(), [])


def _seeds(cell: Cell) -> int:
    """How many seeds a cell runs: "seed", or "seeds" that run together, a list or how many."""
    seeds = cell.get("seeds", 1)
    return seeds if isinstance(seeds, int) else len(seeds)


def _missing(done: int, total: int, short: list[str]) -> list[str]:
    start = f"{done:,} of {total:,} cells have finished"
    if not short:
        return [f"{start}: figures and verdicts are those of the rows so far."]
    listed = " and ".join([", ".join(short[:-1]), short[-1]] if len(short) > 1 else short)
    return [f"{start}; the {listed} need some of the others."]


def subject(rows: Rows) -> str:
    """The network and its data, which often stand in for the paper's: "LeNet-5, 1,000 images of
    CIFAR-10".
    """
    row = rows[0]
    return f"{row['network']}, {row['training']:,} images of {SETS[row['data']]}"


def saturated(*parts: Rows) -> str:
    """Why training errors cannot be compared, nor what falls with them: all runs of all parts
    have none.
    """
    found = [value for rows in parts for value in rows.values("training error")]
    found += [100 - value for rows in parts for value in rows.values("training accuracy")]
    return "every run fits all of its training images" if found and max(found) == 0 else ""


def sentences(text: str) -> tuple[str, ...]:
    """The sentences of a text, each on a line of its own; indented lines continue the one before.

    >>> sentences('''
    ...     One seed.
    ...     All data
    ...       at once.
    ... ''')
    ('One seed.', 'All data at once.')
    """
    found: list[str] = []
    for line in dedent(text).strip().splitlines():
        if line.startswith(" "):
            found[-1] += f" {line.strip()}"
        else:
            found.append(line)
    return tuple(found)


def claim_texts(text: str) -> dict[str, tuple[str, str, str]]:
    """Sentence, source and published figure of claims by a key; a line reads "key: … | … | …".

    What is published may be left out; indented lines continue the one before.

    >>> claim_texts("end: SWA ends above SGD | Table 7.2 | by 0.42 points")["end"]
    ('SWA ends above SGD', 'Table 7.2', 'by 0.42 points')
    """
    found = {}
    for line in sentences(text):
        key, _, words = line.partition(": ")
        sentence, source, published = [*words.split(" | "), ""][:3]
        found[key] = sentence, source, published
    return found


class ClaimTexts:
    """The claims of an experiment as a text; calling it with a reading makes one of them.

    Each is "key: sentence | source | published | test | unit | ours", on lines as ``sentences``
    reads them; what is empty at the end may be left out. The test is "above", "below 1.5" or
    "within 0.2 of 1", and by default "above". Names in braces stand for values that the call gives;
    those it gives by the name of a field of ``Claim`` set that field.

    >>> texts = ClaimTexts("grows: {network}: σ² grows | Figure 5.5 | grows | above 1 | times")
    >>> texts("grows", Reading(2.0, 0.1), network="MLP", own=True).sentence
    'MLP: σ² grows'
    """

    def __init__(self, text: str) -> None:
        lines = (line.partition(": ") for line in sentences(text))
        self._texts = {key: re.split(r" \|(?= |$)", rest) for key, _, rest in lines}

    def __call__(self, key: str, reading: Reading, **values: Any) -> Claim:
        filled = [text.format(**values).strip() for text in self._texts[key]]
        sentence, source, published, test, unit, ours = filled + [""] * (6 - len(filled))
        direction, *numbers = test.replace(" of ", " ").split() or ["above"]
        settings: dict[str, Any] = {
            "direction": direction,
            **dict(zip(("bound", "margin"), map(float, reversed(numbers)), strict=False)),
            "unit": unit and f" {unit}",
            "own": ours == "ours",
        }
        settings |= {name: values[name] for name in CLAIM_FIELDS & values.keys()}
        return Claim(sentence, source, published, reading, **settings)
