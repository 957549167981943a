"""``Experiment``, and the verdicts, tables and charts of the rows in its store.

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
REDUCED_SHARE = 0.1
PRINTED_RATES = "as printed"
CLAIM_FIELDS = {field.name for field in fields(Claim)[4:]}  # those of the test, not of the text
DIFFERENCES = ("network", "data", "rate", "length")  # between what we train and what the paper does


@dataclass(frozen=True)
class Size:
    """Network, data and length of a training run; "" and 0 where the paper does not say.

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
        """The size of a cell, from the settings that cells share; pooled images are other data."""
        side, gain, steep = (cell.get(name) for name in ("side", "gain", "steep"))
        short = {"ffnn": f"FFNN {cell.get('layers')} × {cell.get('width')}", "lenet5": "LeNet-5"}
        network = cell.get("network") or ""
        data, samples = cell.get("data") or "", cell.get("training") or cell.get("samples") or 0
        data += f" of {side} × {side}" if side else " pooled" if cell.get("shrink", 1) > 1 else ""
        epochs = cell.get("epochs") or 0
        longest = max(epochs) if isinstance(epochs, tuple) else epochs
        rate = f"{cell['rate']:g}" if cell.get("rate") else ""
        if gain is not None:
            rate = PRINTED_RATES if gain == steep == 1 else f"{gain:g} times the printed"
        return cls(short.get(network, network), data, samples, longest, rate)

    @property
    def subject(self) -> str:
        """The network and its data: "VGG-16 on CIFAR-100"."""
        name, *rest = self.data.split(" ", 1)
        data = " ".join([SETS.get(name, name), *rest])
        named = [self.network] if data in self.network else [self.network, data]
        return " on ".join(filter(None, named))

    def parts(self, paper: Size) -> dict[str, tuple[int, int]]:
        """Our samples and epochs beside those of the paper, where it says how many."""
        whole = paper.samples or WHOLE.get(paper.data, 0)
        pairs = {"samples": (self.samples, whole), "epochs": (self.epochs, paper.epochs)}
        return {name: (ours, theirs) for name, (ours, theirs) in pairs.items() if ours and theirs}

    def shortfall(self, paper: Size) -> str:
        """The part of the paper's training that is missing: "10,000 of 50,000 samples", or ""."""
        parts = [(name, *pair) for name, pair in self.parts(paper).items()]
        return ", ".join(
            f"{ours:,} of {all_:,} {name}" for name, ours, all_ in parts if ours < all_
        )

    def unlike(self, paper: Size) -> list[str]:
        """In which of DIFFERENCES this is a stand-in; a somewhat shorter training is not one."""
        share = math.prod(min(1.0, ours / theirs) for ours, theirs in self.parts(paper).values())
        *names, length = DIFFERENCES
        named = [name for name in names if getattr(paper, name) not in ("", getattr(self, name))]
        return named + [length] * (share < REDUCED_SHARE)

    def nearest(self, papers: Sequence[Size]) -> Size:
        """The one of the paper's sizes that this comes nearest to."""
        return min(papers, key=lambda paper: [name in self.unlike(paper) for name in DIFFERENCES])

    def departure(self, paper: Size) -> str:
        """The same in words, or "": "LeNet-5 on MNIST in place of VGG-16 on CIFAR-100"."""
        unlike = self.unlike(paper)
        if {"network", "data"} & {*unlike}:
            return f"{self.subject} in place of {paper.subject}"
        words = {
            "rate": f"rate {self.rate} in place of {paper.rate}",
            "length": self.shortfall(paper),
        }
        if paper.rate == PRINTED_RATES:
            words["rate"] = f"rates {self.rate}"
        return " and ".join(words[name] for name in unlike)


@dataclass(frozen=True)
class Experiment:
    """A published experiment that can be reproduced.

    ``paper`` is the title of a document, and ``part`` says where in it: sections, tables, figures.
    ``scales`` has the cells of each of ``SCALES``. ``run`` measures a cell on a device and returns
    rows of JSON values; ``claims``, ``tables`` and ``charts`` read the rows of all cells, and may
    be generators: calling them gives lists. ``run`` of one cell must not depend on another: cells
    run in any order, on any machine.

    ``sizes`` are those of the paper, with which the cells of a scale are compared; none where
    nothing is trained. ``size`` says in words what else the paper ran, and what it does not say.
    """

    name: str
    title: str
    paper: str
    part: str
    scales: Mapping[str, list[Cell]]
    run: Callable[[Cell, str], list[Row]]
    claims: Callable[[Rows], Iterable[Claim]]
    tables: Callable[[Rows], Iterable[Table]]
    charts: Callable[[Rows], Iterable[Chart]]
    assumptions: tuple[str, ...] = ()
    size: str = ""
    sizes: tuple[Size, ...] = ()

    def __post_init__(self) -> None:
        for name in ("claims", "tables", "charts"):
            object.__setattr__(self, name, partial(_list_of, getattr(self, name)))

    def grid(self, scale: str) -> list[Cell]:
        """The cells of a scale; no two are the same."""
        cells = self.scales[require_choice(scale, "scale", SCALES)]
        keys = {key_of(cell) for cell in cells}
        repeated = len(cells) - len(keys)
        require(not repeated, f"the cells of {self.name}", "differ", f"{repeated} repeated")
        return cells

    def trained(self, scale: str) -> list[Size]:
        """The distinct sizes that the cells of a scale train; none for cells without data."""
        sizes = dict.fromkeys(Size.of(cell) for cell in self.grid(scale))
        return [size for size in sizes if size.data]

    def stand_in(self, scale: str, sentence: str = "") -> str:
        """Why a run at this scale is not the paper's: "VGG-4×16-BN on CIFAR-10 in place of …".

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
        """The data, unavailable here, that all of the paper's settings need; or ""."""
        needed = dict.fromkeys(setting.data for setting in self.sizes)
        return " and ".join(SETS[name] for name in needed if {*needed} <= {*UNAVAILABLE})

    def reduced(self, scale: str) -> str:
        """The paper's training that a scale lacks: "10,000 of 50,000 samples", or ""."""
        ours = self.trained(scale) if self.sizes else []
        pairs = [(each, each.nearest(self.sizes)) for each in ours]
        lacking = [each.shortfall(paper) for each, paper in pairs if not each.unlike(paper)]
        return " / ".join(dict.fromkeys(filter(None, lacking)))


LEAST_SEEDS = 3  # seeds of a setting that lacks some, to be judged beside others


def _list_of(read: Callable[[Rows], Iterable[Any]], rows: Rows) -> list[Any]:
    return list(read(rows))


@dataclass(frozen=True)
class Findings:
    """Verdicts, tables and charts of ``done`` of ``total`` cells; ``notes`` say what is missing."""

    done: int
    total: int
    verdicts: tuple[Verdict, ...]
    tables: tuple[Table, ...]
    charts: tuple[Chart, ...]
    notes: tuple[str, ...]
    faulty: bool = False  # whether a part could not be made though all cells are there

    @property
    def progress(self) -> str:
        """The number of finished cells, in a sentence."""
        if self.done < self.total:
            return self.notes[0]
        cells = f"All {self.total:,} cells have" if self.total > 1 else "The one cell has"
        return f"{cells} finished."


def findings(experiment: Experiment, store: Store) -> Findings:
    """Read the rows of a store.

    A store can be read while its sweep runs, and rows that lack some cells may be too few for a
    claim, a table or a chart: that must not cost the reader the rest. Nor may a setting that has
    only just begun: its claims would be undecided for want of seeds, and count in Holm's correction
    of the others. So it waits until it has LEAST_SEEDS seeds, unless no setting has more.
    """
    stored = store.finished()
    cells = {key_of(cell): cell for cell in experiment.grid(store.scale)}
    done, total, foreign = len(stored & {*cells}), len(cells), len(stored - {*cells})
    waiting, begun = _settings_begun(cells, stored)
    rows = store.rows(without=waiting)
    parts: list[tuple[Any, ...]] = []
    troubles: dict[str, Exception] = {}
    read: dict[str, Callable[[Rows], Iterable[Any]]] = {
        "claims": partial(_judge_rows, experiment, store),
        "tables": experiment.tables,
        "charts": experiment.charts,
    }
    for name, make in read.items():
        try:
            parts.append(tuple(make(rows)) if len(rows) else ())
        except Exception as error:
            troubles[name] = error
            parts.append(())
    if done == total:
        notes = [
            f"The {name} could not be made from these rows: {type(error).__name__}: {error}"
            for name, error in troubles.items()
        ]
    else:
        rest = ": figures and verdicts are those of the rows so far."
        if troubles:
            *others, last = troubles
            listed = " and ".join(filter(None, [", ".join(others), last]))
            rest = f"; the {listed} need some of the others."
        notes = [f"{done:,} of {total:,} cells have finished{rest}"]
    if begun:
        notes.append(
            f"Neither judged nor shown before {LEAST_SEEDS} seeds have run: {'; '.join(begun)}."
        )
    if foreign:
        notes.append(
            f"{foreign:,} stored cells are not in the grid of this version; the same command runs"
            " it anew."
        )
    verdicts, tables, charts = parts
    faulty = bool(troubles) and done == total
    return Findings(done, total, verdicts, tables, charts, tuple(notes), faulty)


def _judge_rows(experiment: Experiment, store: Store, rows: Rows) -> Sequence[Verdict]:
    """The verdicts; claims untested here keep the decision of a smaller run in the same folder."""
    claims = [place_claim(claim, experiment, store.scale) for claim in experiment.claims(rows)]
    verdicts = judge(claims)
    smaller = Store(store.path.parent, experiment.name, SCALES[1])
    untested = store.scale == SCALES[2] and any(verdict.barrier for verdict in verdicts)
    if untested and smaller.path.exists():
        size = experiment.reduced(smaller.scale) or f"{smaller.scale} scale"
        return carry_decisions(verdicts, findings(experiment, smaller).verdicts, size)
    return verdicts


def place_claim(claim: Claim, experiment: Experiment, scale: str) -> Claim:
    """The claim, not testable if what ran at this scale stands in for what it is about.

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
    """The verdicts of the larger run; untested claims keep the smaller run's decision, if any."""
    decided = {
        (each.claim, each.source): each for each in smaller if each.verdict in (HOLDS, FAILS)
    }
    out = []
    for verdict in larger:
        before = decided.get((verdict.claim, verdict.source))
        if verdict.verdict == UNTESTED and before is not None:
            evidence = f"{before.evidence} at {size}; larger: {verdict.evidence}"
            verdict = replace(before, evidence=evidence)
        out.append(verdict)
    return tuple(out)


def _settings_begun(cells: Mapping[str, Cell], stored: set[str]) -> tuple[set[str], list[str]]:
    """The finished cells of settings with fewer seeds than LEAST_SEEDS, and these in words."""
    settings: dict[str, list[str]] = {}
    for key, cell in cells.items():
        settings.setdefault(key_of(without_seeds(cell)), []).append(key)
    every = [without_seeds(cells[keys[0]]) for keys in settings.values()]

    def count_seeds(keys: Iterable[str]) -> int:
        """A cell has a "seed", or "seeds" that run together: a list, or how many."""
        seeds = [cells[key].get("seeds", 1) for key in keys]
        return sum(each if isinstance(each, int) else len(each) for each in seeds)

    begun, words = set[str](), []
    for setting, keys in zip(every, settings.values(), strict=True):
        there = stored.intersection(keys)
        seeds = count_seeds(there)
        if there and len(there) < len(keys) and seeds < LEAST_SEEDS:
            varied = [name for name in setting if any(o.get(name) != setting[name] for o in every)]
            label = label_of({name: setting[name] for name in varied})
            words.append(f"{label} ({seeds} of {count_seeds(keys)})")
            begun |= there
    return (begun, words) if stored & set(cells) - begun else (set(), [])


def subject(rows: Rows) -> str:
    """The network and its data, often not the paper's: "LeNet-5, 1,000 images of CIFAR-10"."""
    row = rows[0]
    return f"{row['network']}, {row['training']:,} images of {SETS[row['data']]}"


def network_title(rows: Rows) -> str:
    """The network, its size and its data, as the title of a table."""
    return "{network}, {parameters:,} parameters, {data}".format(**rows[0])


def saturation_reason(*parts: Rows) -> str:
    """Why training errors cannot be compared: all runs of all parts have none; or ""."""
    errors = [value for rows in parts for value in rows.values("training error")]
    errors += [100 - value for rows in parts for value in rows.values("training accuracy")]
    return "every run fits all of its training images" if errors and max(errors) == 0 else ""


def sentences(text: str) -> tuple[str, ...]:
    """The sentences of a text, each on a line of its own; indented lines continue the one before.

    >>> sentences('''
    ...     One seed.
    ...     All data
    ...       at once.
    ... ''')
    ('One seed.', 'All data at once.')
    """
    lines: list[str] = []
    for line in dedent(text).strip().splitlines():
        if line.startswith(" "):
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line)
    return tuple(lines)


class ClaimTexts:
    """The claims of an experiment as a text; calling it with a reading makes one of them.

    Each is "key: sentence | source | published | test | unit | ours", on lines as ``sentences``
    reads them; what is empty at the end may be left out. The test is "above", "below 1.5" or
    "within 0.2 of 1", and by default "above". Names in braces stand for values that the call gives;
    those it gives by the name of a later field of ``Claim`` set that field. ``shared`` are values
    of all claims whose text and call say nothing else.

    >>> texts = ClaimTexts("grows: {network}: σ² grows | Figure 5.5 | grows | above 1 | times")
    >>> texts("grows", Reading(2.0, 0.1), network="MLP", own=True).sentence
    'MLP: σ² grows'
    """

    def __init__(self, text: str, **shared: Any) -> None:
        lines = (line.partition(": ") for line in sentences(text))
        self._texts = {key: re.split(r" \|(?= |$)", rest) for key, _, rest in lines}
        self._shared = shared

    def __call__(self, key: str, reading: Reading, **values: Any) -> Claim:
        """The claim with this key; ``values`` fill its text or set its fields."""
        filled = [text.format(**{**self._shared, **values}).strip() for text in self._texts[key]]
        sentence, source, published, test, unit, ours = filled + [""] * (6 - len(filled))
        settings = dict(self._shared)
        if test:
            direction, *numbers = test.replace(" of ", " ").split()
            settings["direction"] = direction
            settings |= zip(("bound", "margin"), map(float, reversed(numbers)), strict=False)
        if unit:
            settings["unit"] = f" {unit}"
        settings |= {"own": True} if ours else {}
        settings = {name: (settings | values)[name] for name in CLAIM_FIELDS & {*settings, *values}}
        return Claim(sentence, source, published, reading, **settings)
