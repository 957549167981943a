"""``lambdahat verify``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from lambdahat.cli.exits import NOT_CONVERGED, OK, InputError, say
from lambdahat.cli.measurements import bars
from lambdahat.cli.options import Output
from lambdahat.cli.printing import markdown_table, print_json, print_table, text_table
from lambdahat.report.figures import plot, save_figure
from lambdahat.results import write_atomically
from lambdahat.results.charts import value_text
from lambdahat.singular.known_cases import suite
from lambdahat.singular.verification import CheckedCase, KnownCase, Verification, verify

HEADER = ("case", "λ̂ ± error", "nβ", "γ", "exact", "n → ∞", "off by", "gradients", "verdict")
NOTE = (
    "exact: λ̂ at the same nβ and γ; off by: in standard errors, and relative. A case agrees if its"
    " 95 % interval\ncontains the exact value, is near if the 99.9 % interval does, and fails"
    " beyond, or if it is off by more than 15 %."
)


def run_verify(pattern: str, seed: int, quick: bool, output: Output) -> int:
    """Run the cases, print and write; the exit code."""
    cases = matching_cases(suite(quick), pattern)
    with bars(output.quiet):
        verification = verify(cases, seed, quick, output.out)
    rows = [as_row(row) for row in verification.rows]
    if output.out is not None:
        write(verification, rows, output.out)
    if output.as_json:
        names = ("covered", "median_error", "worst_error", "failed")
        figures = {name: getattr(verification, name) for name in names}
        summary = {**figures, "cases": len(verification)}
        print_json({"cases": verification.table(), "summary": summary})
    elif not output.quiet:
        print_table(HEADER, rows)
        print(f"{headline(verification)}\n{NOTE}")
        output.print_folder()
    for name in verification.failed:
        say(f"{name}: fails")
    return NOT_CONVERGED if verification.failed else OK


def matching_cases(cases: Sequence[KnownCase], pattern: str) -> list[KnownCase]:
    """The cases whose names a glob matches, whatever their letters' case."""
    matching = [case for case in cases if fnmatch(case.name.casefold(), pattern.casefold())]
    if not matching:
        names = "; ".join(case.name for case in cases)
        raise InputError(f"--case must match a case, got {pattern!r}; there are: {names}")
    return matching


def as_row(row: CheckedCase) -> tuple[str, ...]:
    """One case in words."""
    limit = f"{row.asymptotic:.4g}" if math.isfinite(row.asymptotic) else ""
    status = row.estimate.status
    return (
        row.case,
        value_text(row.estimate),
        f"{row.nbeta:.4g}",
        f"{row.localization:.4g}",
        value_text(row.truth).removesuffix(" (exact)"),
        limit,
        f"{row.deviation:+.1f}, {row.relative_error:+.1%}",
        f"{row.estimate.cost:,}",
        row.verdict + ("" if status.ok else f" [{status.name}]"),
    )


def headline(verification: Verification) -> str:
    """One line on all cases."""
    failed = len(verification.failed)
    return (
        f"{verification.covered} of {len(verification)} intervals contain the exact value; relative"
        f" error {verification.median_error:.1%} in the median, {verification.worst_error:.1%} at"
        f" worst; {failed or 'none'} {'fails' if failed == 1 else 'fail'}"
    )


def write(verification: Verification, rows: Sequence[Sequence[str]], folder: Path) -> None:
    """``table.txt``, ``table.md`` and ``verification.png``."""
    text = f"{headline(verification)}\n{NOTE}\n"
    write_atomically(folder / "table.txt", f"{text_table(HEADER, rows)}\n{text}".encode())
    write_atomically(folder / "table.md", f"{markdown_table(HEADER, rows)}\n{text}".encode())
    save_figure(plot(verification), folder / "verification.png")
