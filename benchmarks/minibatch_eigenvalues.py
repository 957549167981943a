"""Does random-matrix theory predict how mini-batching changes the Hessian spectrum? From softmax
regression to VGG-16, batches of 16 to 4,096 samples.

    python benchmarks/minibatch_eigenvalues.py --device cuda --json FILE

trains and measures the networks of the scale "paper" (--scale for another, --networks for some) and
saves what was measured to FILE after each point of training. --images and --cifar are .npz files of
MNIST and CIFAR-10 with train_images, train_labels, test_images and test_labels in bytes; without
them the data come from ``lh.data.load``.

    python benchmarks/minibatch_eigenvalues.py --conclude FILE... --json RESULT [--page PAGE]

joins what was measured, adds predictions and verdicts (no GPU needed), saves the result with one
flat row for every batch beside it as RESULT.csv, and puts its tables between the two marks of a
Markdown page.

    python benchmarks/minibatch_eigenvalues.py --store FOLDER --page PAGE

does the last with the rows that ``lambdahat reproduce`` or benchmarks/minibatch_store.py left in a
folder.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from minibatch_pieces import BatchEigenvaluesResult, concluded, measure_networks
from timing import set_tf32

from lambdahat._core.progress import progress
from lambdahat.cli.printing import markdown_table
from lambdahat.data.splits import Split, image_split
from lambdahat.experiments.kit.cells import Row, Rows
from lambdahat.experiments.kit.claims import Table, Verdict, judge
from lambdahat.experiments.kit.store import Store
from lambdahat.experiments.published import find

NAME = "batch-eigenvalues"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scale", default="paper", choices=("smoke", "cpu", "paper"))
    parser.add_argument("--networks", nargs="+", help="some of the scale's networks, by name")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--images", type=Path, help="MNIST as .npz")
    parser.add_argument("--cifar", type=Path, help="CIFAR-10 as .npz")
    parser.add_argument(
        "--json", type=Path, default=Path("batch-eigenvalues.json"), help="where the result goes"
    )
    parser.add_argument("--conclude", nargs="+", type=Path, help="files with what was measured")
    parser.add_argument("--store", type=Path, help="a folder with the rows of lambdahat reproduce")
    parser.add_argument("--page", type=Path, help="a page to fill with the tables")
    return parser.parse_args()


def read_split(path: Path) -> Split:
    """Images of bytes (n, H, W) or (n, C, H, W) as a split with mean 0 and deviation 1 per
    channel.
    """
    with np.load(path) as stored:
        parts = [(stored[f"{part}_images"], stored[f"{part}_labels"]) for part in ("train", "test")]
    train, test = ((x[:, None] if x.ndim == 3 else x, y) for x, y in parts)
    return image_split(train, test, 10, "standard")


def write_rows(found: BatchEigenvaluesResult, path: Path) -> None:
    """One row for every batch, as CSV, each with the predictions that stand with the first of
    its size.
    """
    rows: list[Row] = []
    for row in (row for row in found.rows() if row["part"] == "batch"):
        rows.append(row if row["batch"] == 0 else rows[-1] | row)
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, names)
        writer.writeheader()
        writer.writerows({name: _short(value) for name, value in row.items()} for row in rows)


def _short(value: Any) -> Any:
    """Six digits of a number are more than batches agree in, and half the file."""
    return f"{value:.6g}" if isinstance(value, float) else value


def verdict_table(verdicts: Sequence[Verdict]) -> Table:
    """Claims down, networks across."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    columns: dict[str, None] = {}
    for verdict in verdicts:
        column, _, claim = verdict.claim.partition(": ")
        columns[column] = None
        cells.setdefault((claim, verdict.source), {})[column] = verdict.verdict
    rows = tuple(
        (claim, *(row.get(c, "") for c in columns), source)
        for (claim, source), row in cells.items()
    )
    return Table("Claims", ("claim", *columns, "source"), rows)


def markdown(rows: Rows) -> str:
    """Verdicts, tables and the figures behind the verdicts, in Markdown."""
    experiment = find(NAME)
    verdicts = judge(experiment.claims(rows))
    tables = (verdict_table(verdicts), *experiment.tables(rows))
    parts = [f"**{table.title}**\n\n{markdown_table(table.header, table.rows)}" for table in tables]
    lines = (f"- {v.claim}: **{v.verdict}**. {v.evidence}." for v in verdicts)
    return "\n".join([*parts, "**Figures behind the verdicts**\n\n" + "\n".join(lines)])


def fill(page: Path, text: str) -> None:
    """Put the text between the page's marks."""
    head, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, tail = rest.partition(END)
    page.write_text(f"{head}{BEGIN}\n\n{text}\n\n{END}{tail}", encoding="utf-8")


def measure(args: argparse.Namespace) -> None:
    """Save after each point; predictions are left to --conclude."""
    files = {"mnist": args.images, "cifar10": args.cifar}
    data = {name: read_split(path) for name, path in files.items() if path is not None}
    # three digits are more than these comparisons need, and convolutions are three times as fast
    set_tf32(args.device.startswith("cuda"))
    start = time.perf_counter()

    def keep(found: BatchEigenvaluesResult) -> None:
        last = found.points[-1]
        print(
            f"{time.perf_counter() - start:6.0f} s  {last.network}, epoch {last.epoch}, loss"
            f" {last.loss:.3g}",
            flush=True,
        )
        found.save(args.json)

    with progress():
        measure_networks(args.scale, args.seed, args.device, data, args.networks, keep)


def main() -> None:
    args = arguments()
    if args.store is not None:
        text = markdown(Store(args.store, NAME, args.scale).rows())
    elif args.conclude is not None:
        with progress():
            found = concluded([BatchEigenvaluesResult.load(path) for path in args.conclude])
        text = markdown(Rows(found.rows()))
        found.save(args.json)
        write_rows(found, args.json.with_suffix(".csv"))
    else:
        measure(args)
        return
    print(text)
    if args.page is not None:
        fill(args.page, text)


if __name__ == "__main__":
    main()
