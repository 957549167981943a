"""Which claims of the papers hold here? The verdicts of stored runs, as the tables of a page.

    lambdahat reproduce NAME --scale cpu --out benchmarks/results/reproductions
    python benchmarks/reproductions.py benchmarks/results/reproductions --page docs/reproductions.md

reads the stores of a folder, judges the claims of their experiments and writes between the marks of
the page: a table of all runs with how many claims hold, a table of the papers' sizes beside ours,
then the claims of each run, paper by paper.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from lambdahat.cli.printing import markdown_table
from lambdahat.cli.reproduce import CLAIMS_HEADER
from lambdahat.experiments import published
from lambdahat.experiments.kit.cells import key_of
from lambdahat.experiments.kit.claims import BARRIERS, FAILS, HOLDS, MISSING, VERDICTS, Verdict
from lambdahat.experiments.kit.experiment import SCALES, Experiment, findings
from lambdahat.experiments.kit.store import Store, stores_in
from lambdahat.report.sections import in_short
from lambdahat.report.style import sentence

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


@dataclass(frozen=True)
class Run:
    """What a store says: an experiment at a scale and the verdicts on its claims."""

    experiment: Experiment
    store: Store
    verdicts: tuple[Verdict, ...]
    done: int
    total: int
    notes: tuple[str, ...] = ()

    def counts(self, own: bool = False) -> list[int]:
        """How many claims of the paper, or of our own, have each verdict."""
        return [
            sum(found.verdict == kind and found.own == own for found in self.verdicts)
            for kind in VERDICTS
        ]

    def barriers(self) -> list[int]:
        """How many claims of the paper are not testable for each reason."""
        return [
            sum(found.barrier == kind and not found.own for found in self.verdicts)
            for kind in BARRIERS
        ]

    @property
    def size(self) -> str:
        """How it stands to what the paper ran: a stand-in, reduced, or the paper's; the scale if
        nothing is trained.
        """
        other, reduced = (
            read(self.store.scale) for read in (self.experiment.stand_in, self.experiment.reduced)
        )
        if not self.experiment.sizes:
            return self.store.scale
        return (
            f"stand-in: {other}"
            if other
            else f"reduced: {reduced}"
            if reduced
            else "the paper's, as far as it says"
        )

    @property
    def unreached(self) -> list[str]:
        """The networks of the grid of which no cell has run."""
        grid, there = self.experiment.grid(self.store.scale), self.store.finished()
        networks = dict.fromkeys(str(cell["network"]) for cell in grid if "network" in cell)
        run = {str(cell["network"]) for cell in grid if "network" in cell and key_of(cell) in there}
        return [name for name in networks if name not in run]

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
    for name in published.PLACES:
        for scale in SCALES[1:]:
            store = found.get((name, scale))
            if store is not None and len(store.rows()):
                experiment = published.find(name)
                said = findings(experiment, store)
                notes = tuple(note for note in said.notes if note != said.progress)
                out.append(Run(experiment, store, said.verdicts, said.done, said.total, notes))
    return out


def tables(runs: Sequence[Run]) -> str:
    """The text between the marks."""
    parts = [summary(runs), sizes(runs)]
    for paper, found in groupby(runs, key=lambda run: run.experiment.paper):
        parts += [f"### {paper}", *(section(run) for run in found)]
    return "\n\n".join([BEGIN, *parts, END])


def summary(runs: Sequence[Run]) -> str:
    """How many claims hold in each run and of each paper, and which experiments have not been
    run.
    """
    lines = []
    for paper, found in groupby(runs, key=lambda run: run.experiment.paper):
        own = list(found)
        lines.append(_total(f"**{paper}**", own))
        for run in own:
            link = f"[`{run.experiment.name}`](#{run.place.replace(' ', '-')})"
            counts = (str(count) for count in run.counts())
            ours = _ours(run.counts(own=True))
            why = _ours(run.barriers())
            lines.append(
                (
                    link,
                    run.store.scale,
                    *counts,
                    why,
                    ours,
                    run.experiment.part,
                    run.experiment.title,
                )
            )
    lines.append(_total("**all**", runs))
    missing = [
        f"`{name}`"
        for name in published.PLACES
        if name not in {run.experiment.name for run in runs}
    ]
    header = (
        "experiment",
        "scale",
        *VERDICTS,
        " / ".join(BARRIERS),
        "ours",
        "in the paper",
        "what",
    )
    table = markdown_table(header, lines).rstrip()
    said = [_decided(runs)]
    if missing:
        said.append(f"Not run beyond `smoke`, and so without a verdict: {', '.join(missing)}.")
    left = _left_at_paper_scale(runs)
    if left:
        said.append(
            "Marked for the scale `paper` (a star in `reproduce --list`) and not run through:"
            f" {left}."
        )
    return "\n\n".join([table, *said])


def _decided(runs: Sequence[Run]) -> str:
    """The share of claims that are decided, of those whose data can be had here."""
    claims = [
        found
        for run in _largest(runs)
        for found in run.verdicts
        if not found.own and found.barrier != MISSING
    ]
    decided = sum(found.verdict in (HOLDS, FAILS) for found in claims)
    share = f", {decided / len(claims):.0%}" if claims else ""
    return (
        f"Decided: {decided} of the papers' {len(claims)} claims that need no data which cannot be"
        f" had here{share}."
    )


def sizes(runs: Sequence[Run]) -> str:
    """What the paper ran beside what was run here, and how the two stand to each other."""
    lines = [
        (
            f"`{run.experiment.name}`",
            run.experiment.size,
            in_short(run.experiment.scales[run.store.scale]),
            run.size,
        )
        for run in runs
    ]
    header = ("experiment", "in the paper", "here", "size")
    return f"### Sizes, the papers' and ours\n\n{markdown_table(header, lines).rstrip()}"


def _left_at_paper_scale(runs: Sequence[Run]) -> str:
    """The experiments marked for the largest scale whose rows are not all there."""
    whole = {
        run.experiment.name
        for run in runs
        if run.store.scale == SCALES[-1] and run.done == run.total
    }
    return ", ".join(
        f"`{name}`" for name in published.PLACES if name in published.PAPER_SCALE - whole
    )


def _total(name: str, runs: Sequence[Run]) -> tuple[str, ...]:
    """The sums over experiments, each at its largest scale."""
    largest = _largest(runs)
    theirs, ours, why = (
        [sum(counts) for counts in zip(*found, strict=True)]
        for found in (
            [run.counts() for run in largest],
            [run.counts(own=True) for run in largest],
            [run.barriers() for run in largest],
        )
    )
    return (name, "", *(f"**{count}**" for count in theirs), _ours(why), _ours(ours), "", "")


def _largest(runs: Sequence[Run]) -> list[Run]:
    """Of each experiment the run at its largest scale, which carries what a smaller one decided
    and it did not test; of networks that it has not reached, what the smaller says of their kind.
    """
    largest: dict[str, Run] = {}
    for run in runs:
        smaller = largest.get(run.experiment.name)
        kinds = tuple(name.split("-")[0] + "-" for name in run.unreached)
        kept = [v for v in smaller.verdicts if v.claim.startswith(kinds)] if smaller else []
        largest[run.experiment.name] = replace(run, verdicts=(*run.verdicts, *kept))
    return list(largest.values())


def _ours(counts: Sequence[int]) -> str:
    """Several counts in one column; nothing if all are 0."""
    return " / ".join(map(str, counts)) if any(counts) else ""


def section(run: Run) -> str:
    """One run: what was done, and a line for each claim."""
    about = run.store.about()
    command = (
        about.get("command")
        or f"lambdahat reproduce {run.experiment.name} --scale {run.store.scale}"
    )
    cells = (
        f"{run.done} cells"
        if run.done == run.total
        else f"**{run.done} of {run.total} cells so far**"
    )
    if run.unreached:
        cells += f" (none of {' and '.join(run.unreached)})"
    title = f"{run.experiment.title} ({run.experiment.part})"
    ran = (
        f"`{command}`: {cells}, torch {about['torch']}."
        f" {in_short(run.experiment.scales[run.store.scale])}".rstrip()
    )
    ran += "".join(f".\n\n{note.removesuffix('.')}" for note in run.notes)
    ran += (
        f".\n\nIn the paper: {run.experiment.size}\nSize here: {run.size}."
        if run.experiment.size
        else ""
    )
    assumed = "\n".join(f"- {text}" for text in run.experiment.assumptions)
    more = (
        f"\n\n<details markdown><summary>What was assumed</summary>\n\n{assumed}\n\n</details>"
        if assumed
        else ""
    )
    head = f"#### {run.place}\n\n{title}. {ran}{more}"
    rows = [
        (v.verdict, sentence(v.claim), v.cited, v.published, v.evidence, v.plan)
        for v in run.verdicts
    ]
    planned = any(verdict.plan for verdict in run.verdicts)  # a column for undecided claims alone
    marked = [
        tuple(cell.replace("|", "\\|") for cell in row[: 6 if planned else 5]) for row in rows
    ]
    words = markdown_table((*CLAIMS_HEADER, "to decide") if planned else CLAIMS_HEADER, marked)
    return f"{head}\n\n{words}".rstrip()


def written(page: str, folder: Path) -> str:
    """The page with the tables of a folder between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + tables(runs_in(folder)) + after


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--page", type=Path, required=True)
    args = parser.parse_args()
    args.page.write_text(
        written(args.page.read_text(encoding="utf-8"), args.folder), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
