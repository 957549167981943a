"""Which claims of the papers hold here? The verdicts of stored runs, as the tables of a page.

    lambdahat reproduce NAME --scale cpu --out benchmarks/results/reproductions
    python benchmarks/reproductions.py benchmarks/results/reproductions --page docs/reproductions.md

reads the stores of a folder, judges the claims of their experiments and writes between the marks of the page: a table
of all runs with how many claims hold, then the claims of each run, paper by paper.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from lambdahat.cli.reproduce import CLAIMS_HEADER
from lambdahat.cli.tables import markdown_table
from lambdahat.experiments import registry
from lambdahat.experiments.claims import judge
from lambdahat.experiments.experiment import SCALES, Experiment
from lambdahat.experiments.reproduction import FAILS, HOLDS, OPEN, Verdict
from lambdahat.experiments.store import Store, stores_in
from lambdahat.report.style import sentence

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
KINDS = (HOLDS, FAILS, OPEN)


@dataclass(frozen=True)
class Run:
    """What a store says: an experiment at a scale and the verdicts on its claims."""

    experiment: Experiment
    store: Store
    verdicts: tuple[Verdict, ...]

    def counts(self) -> list[int]:
        """How many claims hold, do not hold, are undecided."""
        return [sum(verdict.verdict == kind for verdict in self.verdicts) for kind in KINDS]

    @property
    def place(self) -> str:
        """The section's name, from which the site makes its anchor."""
        return f"{self.experiment.name} {self.store.scale}"


def runs_in(folder: Path) -> list[Run]:
    """The runs of a folder, paper by paper, in the order of the registry and of the scales.

    Those at the scale smoke are left out: they say nothing of a paper.
    """
    found = {(store.experiment, store.scale): store for store in stores_in(folder)}
    out = []
    for name in registry.PLACES:
        for scale in SCALES[1:]:
            store = found.get((name, scale))
            if store is not None and len(store.rows()):
                experiment = registry.find(name)
                out.append(Run(experiment, store, tuple(judge(experiment.claims(store.rows())))))
    return out


def tables(runs: Sequence[Run]) -> str:
    """The text between the marks."""
    parts = [summary(runs)]
    for paper, found in groupby(runs, key=lambda run: run.experiment.paper):
        parts += [f"### {paper}", *(section(run) for run in found)]
    return "\n\n".join([BEGIN, *parts, END])


def summary(runs: Sequence[Run]) -> str:
    """How many claims hold in each run and of each paper, and which experiments have not been run."""
    lines = []
    for paper, found in groupby(runs, key=lambda run: run.experiment.paper):
        own = list(found)
        lines.append(_total(f"**{paper}**", own))
        for run in own:
            link = f"[`{run.experiment.name}`](#{run.place.replace(' ', '-')})"
            counts = (str(count) for count in run.counts())
            lines.append((link, run.store.scale, *counts, run.experiment.part, run.experiment.title))
    lines.append(_total("**all**", runs))
    missing = [f"`{name}`" for name in registry.PLACES if name not in {run.experiment.name for run in runs}]
    table = markdown_table(("experiment", "scale", *KINDS, "in the paper", "what"), lines).rstrip()
    table = table.replace("--: | :-- |", ":-- | :-- |", 1)  # the part of a paper is no number
    return table + (f"\n\nNot run beyond `smoke`, and so without a verdict: {', '.join(missing)}." if missing else "")


def _total(name: str, runs: Sequence[Run]) -> tuple[str, ...]:
    sums = (sum(run.counts()[place] for run in runs) for place in range(len(KINDS)))
    return (name, "", *(f"**{count}**" for count in sums), "", "")


def section(run: Run) -> str:
    """One run: what was done, and a line for each claim."""
    about, done, whole = run.store.about(), len(run.store.finished()), len(run.experiment.grid(run.store.scale))
    command = about.get("command") or f"lambdahat reproduce {run.experiment.name} --scale {run.store.scale}"
    cells = f"{done} cells" if done == whole else f"**{done} of {whole} cells so far**"
    title = f"{run.experiment.title} ({run.experiment.part})"
    head = f"#### {run.place}\n\n{title}. `{command}`: {cells}, torch {about['torch']}."
    rows = [(v.verdict, sentence(v.claim), v.source, v.published, v.evidence) for v in run.verdicts]
    marked = [tuple(cell.replace("|", "\\|") for cell in row) for row in rows]
    words = markdown_table(CLAIMS_HEADER, marked).replace("--:", ":--", len(CLAIMS_HEADER))  # no column of numbers
    return f"{head}\n\n{words}".rstrip()


def written(page: str, folder: Path) -> str:
    """The page with the tables of a folder between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + tables(runs_in(folder)) + after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--page", type=Path, required=True)
    args = parser.parse_args()
    args.page.write_text(written(args.page.read_text(encoding="utf-8"), args.folder), encoding="utf-8")


if __name__ == "__main__":
    main()
