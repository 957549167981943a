"""``lambdahat bench``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lambdahat._core.check import why_not
from lambdahat.bench import records
from lambdahat.bench.plans import Plan
from lambdahat.bench.suite import describe_run, run
from lambdahat.cli.exits import NOT_CONVERGED, OK, InputError, say
from lambdahat.cli.measurements import bars
from lambdahat.cli.options import Output
from lambdahat.cli.printing import markdown_table, print_json, print_table, text_table
from lambdahat.report.figures import plot, save_figure
from lambdahat.results import write_atomically

HEADER: tuple[str, ...] = ("work", "case", "by", "ms", "cost", "ours / it", "error", "MiB")
HEADER += ("over limit", "over machine", "note")
NOTE = (
    "cost: in the unit of the task, its first row. ours / it: our cost over this one's; below 1 we"
    " are faster.\nerror: relative, against the exact answer. MiB: rise of the peak. over limit:"
    " cost over the least\nmeasured so far, or over the count of arithmetic. over machine: time"
    " over the least arithmetic or traffic at the machine's rates."
)


def run_bench(plan: Plan, only: str, against: Path | None, tolerance: float, output: Output) -> int:
    """Measure, print and write; the exit code. ``against`` measures slower tasks once more."""
    _require_device(plan.device)
    if against is not None and not against.is_file():
        raise InputError(f"--against must name a bench.json, got {against} ({why_not(against)})")
    record = None if against is None else records.BenchResult.load(against)
    if record is not None:
        records.require_alike(describe_run(plan), record)
    out = output.out
    with bars(output.quiet):
        outcome = run(plan, only, None if out is None else lambda result: _save(result, out))
        slower = (
            records.failures(outcome)
            if record is None
            else records.regressions(outcome, record, tolerance)
        )
        if slower and record is not None:
            outcome = records.merged(outcome, run(plan, only))
            slower = records.regressions(outcome, record, tolerance)
    if out is not None:
        write(outcome, out)
    show(outcome, slower, output)
    for one in slower:
        say(str(one))
    return NOT_CONVERGED if slower else OK


def show(result: records.BenchResult, slower: Sequence[records.Regression], output: Output) -> None:
    """On standard output."""
    if output.as_json:
        rows = [_document(result, row) for row in result.rows]
        lost = [asdict(one) for one in slower]
        print_json({"about": result.about, "rows": rows, "regressions": lost})
    elif not output.quiet:
        print_table(HEADER, [as_row(result, row) for row in result.rows], headline(result))
        print(NOTE)


def headline(result: records.BenchResult) -> str:
    """The machine in a line."""
    about = result.about
    device = f"{about['device']} ({about['chip']})"
    return f"{device}, {about['threads']} threads, torch {about['torch']}"


def as_row(result: records.BenchResult, row: records.BenchRow) -> tuple[str, ...]:
    """One row in words."""
    ratio = "" if row.by in (records.OURS, records.UNIT) else number(result.ratio(row))
    costs = number(1e3 * row.seconds), number(row.cost), ratio
    rest = (row.error, row.memory, row.over_limit, row.over_machine)
    return row.work, row.case, row.label, *costs, *map(number, rest), row.note


def number(value: float) -> str:
    """Three digits; nothing for NaN."""
    if not math.isfinite(value):
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def findings(result: records.BenchResult) -> list[str]:
    """What needs an explanation: faster peers, and results of ours far from their limit."""
    lines = [
        f"{row.label} is faster at {row.work} ({row.case}): ours takes {number(result.ratio(row))}"
        " times as long"
        for row in result.faster_peers()
    ]
    return lines + [
        f"{row.work} ({row.case}) costs {number(row.over_limit)} times the limit,"
        f" {number(row.limit)} × one {row.unit} ({row.limit_why})"
        for row in result.far_from_limit()
    ]


def write(result: records.BenchResult, folder: Path) -> None:
    """``bench.json``, ``table.txt``, ``table.md`` and ``bench.png``."""
    _save(result, folder)
    rows = [as_row(result, row) for row in result.rows]
    text = "\n".join([headline(result), *findings(result), NOTE]) + "\n"
    write_atomically(folder / "table.txt", f"{text_table(HEADER, rows)}\n{text}".encode())
    write_atomically(folder / "table.md", f"{markdown_table(HEADER, rows)}\n{text}".encode())
    save_figure(plot(result), folder / "bench.png")


def _save(result: records.BenchResult, folder: Path) -> None:
    result.save(folder / "bench.json")


def _document(result: records.BenchResult, row: records.BenchRow) -> dict[str, Any]:
    extra = {
        "ours_over_it": result.ratio(row),
        "over_limit": row.over_limit,
        "over_machine": row.over_machine,
    }
    return asdict(replace(row, by=row.label)) | extra


def _require_device(device: str) -> None:
    import torch

    known = device.partition(":")[0]
    if known not in ("cpu", "cuda"):
        raise InputError(f"--device must be cpu or cuda, got {device!r}")
    if known == "cpu" and device != "cpu":
        raise InputError(f"--device must be cpu or cuda, got {device!r}; there is one cpu")
    if known == "cuda" and not torch.cuda.is_available():
        came = "got cuda, and torch sees no CUDA device"
        raise InputError(f"--device must be one that is there, {came}")
