"""``lambdahat reproduce``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lambdahat.cli.exits import OK, InputError
from lambdahat.cli.measurements import bars
from lambdahat.cli.tables import markdown_table, print_json, print_table, text_table
from lambdahat.experiments import EXPERIMENTS, SCALED
from lambdahat.experiments.reproduction import Reproduction, Table
from lambdahat.report.figures import plot
from lambdahat.results import write_atomically

CLAIMS_HEADER = ("verdict", "claim", "source", "here")


def run_reproduce(
    name: str, full: bool, seed: int, out: Path | None, as_json: bool, quiet: bool, scale: str | None = None
) -> int:
    """Run one experiment, print and write; 0 whatever the verdicts, for a claim that does not hold is a finding."""
    if name not in EXPERIMENTS:
        raise InputError(f"EXPERIMENT must be one of {', '.join(EXPERIMENTS)}, got {name!r}")
    with bars(quiet):
        found = EXPERIMENTS[name](seed=seed, **_size(name, full, scale))
    tables = [*found.tables(), claims(found)]
    if out is not None:
        write(found, tables, out)
    if as_json:
        print_json(document(found))
    elif not quiet:
        for table in tables:
            print_table(table.header, table.rows, table.title)
            print()
        print(assumed(found))
        if out is not None:
            print(f"written to {out}")
    return OK


def _size(name: str, full: bool, scale: str | None) -> dict[str, Any]:
    """How large a run: an experiment knows either --full or --scale, of which --full is the largest."""
    if name in SCALED:
        return {"scale": "paper" if full else scale or "cpu"}
    if scale is not None:
        raise InputError(f"--scale must be left out for {name!r}, got {scale!r}; pass --full for more seeds")
    return {"full": full}


def claims(found: Reproduction) -> Table:
    """The verdicts as a table."""
    rows = tuple((verdict.verdict, verdict.claim, verdict.source, verdict.evidence) for verdict in found.verdicts)
    return Table("Claims", CLAIMS_HEADER, rows)


def assumed(found: Reproduction) -> str:
    """What the text leaves open, one line each."""
    return "\n".join(["Assumed where the text is silent:", *(f"- {text}" for text in found.assumptions)])


def document(found: Reproduction) -> dict[str, Any]:
    """The same for --json."""
    tables = [{"title": table.title, "rows": list(_records(table))} for table in found.tables()]
    verdicts = [vars(verdict) for verdict in found.verdicts]
    return {"experiment": found.name, "seed": found.seed, "tables": tables, "claims": verdicts,
            "assumptions": list(found.assumptions)}  # fmt: skip


def _records(table: Table) -> Iterator[dict[str, str]]:
    for row in table.rows:
        yield dict(zip(table.header, row, strict=True))


def write(found: Reproduction, tables: list[Table], folder: Path) -> None:
    """``<name>.json``, ``table.txt``, ``table.md`` and ``<name>.png``."""
    found.save(folder / f"{found.name}.json")
    texts = [text_table(table.header, table.rows, table.title) for table in tables]
    marked = [f"**{table.title}**\n\n{markdown_table(table.header, table.rows)}" for table in tables]
    write_atomically(folder / "table.txt", ("\n\n".join([*texts, assumed(found)]) + "\n").encode())
    write_atomically(folder / "table.md", ("\n".join([*marked, assumed(found)]) + "\n").encode())
    drawn = plot(found)
    getattr(drawn, "figure", drawn).savefig(folder / f"{found.name}.png", dpi=150)
