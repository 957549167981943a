"""What the rows of a store say, as far as they go: the same for the command's tables and for the
page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lambdahat.experiments.claims import Claim, judge
from lambdahat.experiments.experiment import SCALES, Cell, Experiment, Rows, key_of, label_of
from lambdahat.experiments.reproduction import (
    FAILS,
    HOLDS,
    MISSING,
    STAND_IN,
    UNTESTED,
    Table,
    Verdict,
)
from lambdahat.experiments.store import Store
from lambdahat.results.charts import Chart

LEAST = 3  # seeds of a setting that lacks some, to be judged beside others


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
        [placed(claim, experiment, store.scale) for claim in experiment.claims(rows)]
    )
    smaller = Store(store.path.parent, experiment.name, SCALES[1])
    if (
        store.scale == SCALES[2]
        and any(verdict.barrier for verdict in verdicts)
        and smaller.path.exists()
    ):
        size = experiment.reduced(smaller.scale) or f"{smaller.scale} scale"
        return carried(verdicts, findings(experiment, smaller).verdicts, size)
    return verdicts


def placed(claim: Claim, experiment: Experiment, scale: str) -> Claim:
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


def carried(
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
        settings.setdefault(key_of(_setting(cell)), []).append(key)
    every = [_setting(cells[keys[0]]) for keys in settings.values()]
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


def _setting(cell: Cell) -> Cell:
    """What the seeds of a setting share."""
    return {name: value for name, value in cell.items() if name not in ("seed", "seeds")}


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
