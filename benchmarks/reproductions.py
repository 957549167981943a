"""Which claims of the papers hold here? The verdicts of stored runs, as the tables of a page.

    lambdahat reproduce NAME --scale cpu --out benchmarks/results/reproductions
    python benchmarks/reproductions.py benchmarks/results/reproductions --page docs/reproductions.md

reads the stores of a folder and judges the claims of their experiments. Between the marks of the
page it writes how many claims of each paper hold and a table of the papers' sizes beside ours; in
the folder ``claims`` next to the page, one page per paper (per chapter of the long thesis) lists
every claim of every run.
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
FOLDER = "claims"
# thousands of rows would crowd every other page out of the site's search
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"


@dataclass(frozen=True)
class Chapter:
    """A page of claims: its file, its title, and the page that discusses the results."""

    file: str
    title: str
    discussion: str


# by the first experiment, in the order of the registry, of those on the page
CHAPTERS = {
    "ngd-vs-sgd": Chapter("ngd", "Natural gradient and SGD", "experiments-ngd.md"),
    "softmax-decay": Chapter("flatness", "Flatness", "experiments-flatness.md"),
    "power-method": Chapter("regularization", "Regularization", "experiments-regularization.md"),
    "logdet-kernels": Chapter("logdets", "Log-determinants and graphs", "experiments-logdets.md"),
    "fluctuation-spectrum": Chapter("minibatch", "Mini-batch spectra", "minibatch-results.md"),
    "curvature-suite": Chapter("curvature", "Curvature", "experiments-curvature.md"),
    "gadam-image": Chapter("averaging", "Averaging", "experiments-averaging.md"),
}


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
        trained = self.experiment.trained(self.store.scale)
        alike = [each for each in trained if not each.unlike(each.nearest(self.experiment.sizes))]
        names = " and ".join(dict.fromkeys(each.network for each in alike if each.network))
        if other and names:
            rest = f"reduced ({reduced})" if reduced else "the paper's"
            return f"{names}: {rest}; the others stand-in: {other}"
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

    @property
    def anchor(self) -> str:
        """Where the site puts that section on its page."""
        return f"#{self.place.replace(' ', '-')}"

    @property
    def chapter(self) -> Chapter:
        """The page of claims that it belongs to."""
        names = list(published.PLACES)
        before = names[: names.index(self.experiment.name) + 1]
        return next(CHAPTERS[name] for name in reversed(before) if name in CHAPTERS)


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
    return "\n\n".join([BEGIN, overview(runs), sizes(runs), END])


def largest_first(runs: Sequence[Run]) -> list[Run]:
    """The runs with those of an experiment from its largest scale down."""
    same = groupby(runs, key=lambda run: run.experiment.name)
    return [run for _, found in same for run in reversed(list(found))]


def claim_pages(runs: Sequence[Run]) -> dict[str, str]:
    """The pages of claims by file name."""
    pages = {}
    for chapter, found in groupby(largest_first(runs), key=lambda run: run.chapter):
        own = list(found)
        papers = " and ".join(dict.fromkeys(f'"{run.experiment.paper}"' for run in own))
        head = (
            f"# {chapter.title}: all claims\n\nEvery claim of {papers} that was tested, with the"
            " published value, our result and the verdict."
            f" [{chapter.title}](../{chapter.discussion}) discusses the results;"
            " [Reproductions](../reproductions.md#how-a-claim-is-judged) describes how claims are"
            " judged and what the columns mean. This page is generated from the stored runs."
        )
        sections = [UNSEARCHED + head, summary(own), *(section(run) for run in own)]
        pages[f"{chapter.file}.md"] = "\n\n".join(sections) + "\n"
    return pages


COUNTS = (
    *VERDICTS,
    f"not testable: {' / '.join(BARRIERS)}",
    "ours: holds / does not / undecided / not testable",
)


def overview(runs: Sequence[Run]) -> str:
    """How many claims of each paper and chapter hold, and which experiments have not been run."""
    lines = []
    for paper, found in groupby(runs, key=lambda run: run.experiment.paper):
        own = list(found)
        parts = {
            f"{FOLDER}/{chapter.file}.md": (chapter.title, list(part))
            for chapter, part in groupby(own, key=lambda run: run.chapter)
        }
        if len(parts) == 1:
            lines.append(_total(f"[**{paper}**]({next(iter(parts))})", own))
            continue
        lines.append(_total(f"**{paper}**", own))
        lines += [_total(f"[{title}]({link})", part) for link, (title, part) in parts.items()]
    lines.append(_total("**all**", runs))
    said = [markdown_table(("paper", "experiments", *COUNTS), lines).rstrip()]
    said.append(_decided(runs))
    there = {run.experiment.name for run in runs}
    missing = [f"`{name}`" for name in published.PLACES if name not in there]
    if missing:
        said.append(f"Run only at `smoke`, and therefore without a verdict: {', '.join(missing)}.")
    left = _left_at_paper_scale(runs)
    if left:
        said.append(
            "Intended for the scale `paper` (a star in `reproduce --list`) but not completed there:"
            f" {left}."
        )
    return "\n\n".join(said)


def summary(runs: Sequence[Run]) -> str:
    """How many of the paper's claims hold in each run."""
    lines = [
        (
            f"[`{run.experiment.name}`]({run.anchor})",
            run.store.scale,
            run.experiment.title,
            *(str(count) for count in run.counts()),
        )
        for run in runs
    ]
    return markdown_table(("experiment", "scale", "what", *VERDICTS), lines).rstrip()


def _decided(runs: Sequence[Run]) -> str:
    """The share of claims that are decided, of those whose data are available."""
    claims = [
        found
        for run in _largest(runs)
        for found in run.verdicts
        if not found.own and found.barrier != MISSING
    ]
    decided = sum(found.verdict in (HOLDS, FAILS) for found in claims)
    share = f", {decided / len(claims):.0%}" if claims else ""
    return (
        f"Decided: {decided} of the papers' {len(claims)} claims whose data are available"
        f" here{share}."
    )


def sizes(runs: Sequence[Run]) -> str:
    """What the paper ran, and how the size of our run compares."""
    lines = [
        (
            f"[`{run.experiment.name}`]({FOLDER}/{run.chapter.file}.md{run.anchor})",
            run.store.scale,
            run.experiment.size,
            run.size,
        )
        for run in largest_first(runs)
    ]
    header = ("experiment", "scale", "size in the paper", "size here")
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
    return (name, *map(str, (len(largest), *theirs)), _ours(why), _ours(ours))


def _largest(runs: Sequence[Run]) -> list[Run]:
    """Of each experiment the run at its largest scale, which carries what a smaller one decided
    and it did not test; of networks that it has not reached, or of which nothing can be judged
    yet, what the smaller says of their kind.
    """
    largest: dict[str, Run] = {}
    for run in runs:
        smaller = largest.get(run.experiment.name)
        kinds = tuple(name.split("-")[0] + "-" for name in run.unreached)
        if not run.verdicts:
            kinds = ("",)
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
    about_run = [f"Command: `{command}` ({cells}, torch {about['torch']})"]
    settings = in_short(run.experiment.scales[run.store.scale])
    if settings:
        about_run.append(f"Settings: {settings}")
    if run.experiment.size:
        size = run.experiment.size.removesuffix(".")
        about_run += [f"Size in the paper: {size}", f"Size here: {run.size}"]
    about_run += [note.removesuffix(".") for note in run.notes]
    head = f"## {run.place}\n\n{run.experiment.title} ({run.experiment.part}).\n\n"
    head += "\n".join(f"- {line}." for line in about_run)
    assumed = "\n".join(f"- {text}" for text in run.experiment.assumptions)
    if assumed:
        head += f"\n\n<details markdown><summary>Assumptions</summary>\n\n{assumed}\n\n</details>"
    rows = [
        (v.verdict, sentence(v.claim), v.cited, v.published, v.evidence, v.plan)
        for v in run.verdicts
    ]
    planned = any(verdict.plan for verdict in run.verdicts)  # a column for undecided claims alone
    marked = [
        tuple(cell.replace("|", "\\|") for cell in row[: 6 if planned else 5]) for row in rows
    ]
    words = markdown_table((*CLAIMS_HEADER, "to decide") if planned else CLAIMS_HEADER, marked)
    if run.size.startswith("stand-in"):
        told = f"Claims tested on this stand-in ({len(rows)}), which decides none of the paper's"
        words = f"<details markdown><summary>{told}</summary>\n\n{words.rstrip()}\n\n</details>"
    return f"{head}\n\n{words}".rstrip()


def documents(page: Path, folder: Path) -> dict[Path, str]:
    """The page with the tables of a folder between its marks, and the pages of claims beside it."""
    runs = runs_in(folder)
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    claims = {page.parent / FOLDER / name: text for name, text in claim_pages(runs).items()}
    return {page: before + tables(runs) + after, **claims}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--page", type=Path, required=True)
    args = parser.parse_args()
    for path, text in documents(args.page, args.folder).items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
