"""What the rows of a store say, as far as they go: the same for the command's tables and for the page."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from lambdahat.experiments.charts import Chart
from lambdahat.experiments.claims import judge
from lambdahat.experiments.experiment import Experiment, key_of
from lambdahat.experiments.reproduction import Table, Verdict
from lambdahat.experiments.store import Store


@dataclass(frozen=True)
class Findings:
    """Verdicts, tables and charts of ``done`` of ``total`` cells; ``notes`` say what is missing and why."""

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
        return f"All {self.total:,} cells have finished." if self.total > 1 else "The one cell has finished."


def findings(experiment: Experiment, store: Store) -> Findings:
    """Read the rows of a store.

    A store can be read while its sweep runs, and rows that lack some cells may be too few for a claim, a table or a
    chart: that must not cost the reader the rest.
    """
    rows, stored = store.rows(), store.finished()
    grid = {key_of(cell) for cell in experiment.grid(store.scale)}
    done, total, foreign = len(stored & grid), len(grid), len(stored - grid)
    parts: dict[str, Callable[[], Iterable[Any]]] = {
        "claims": lambda: judge(experiment.claims(rows)),
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
        notes = [f"The {name} could not be made from these rows: {type(error).__name__}: {error}"
                 for name, error in troubles.items()]  # fmt: skip
    if foreign:
        notes.append(f"{foreign:,} stored cells are not in the grid of this version; the same command runs it anew.")
    return Findings(done, total, found["claims"], found["tables"], found["charts"], tuple(notes),
                    bool(troubles) and done == total)  # fmt: skip


def _missing(done: int, total: int, short: list[str]) -> list[str]:
    start = f"{done:,} of {total:,} cells have finished"
    if not short:
        return [f"{start}: figures and verdicts are those of the rows so far."]
    listed = " and ".join([", ".join(short[:-1]), short[-1]] if len(short) > 1 else short)
    return [f"{start}; the {listed} need some of the others."]
