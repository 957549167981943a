"""Do random matrices predict what a batch shows of the curvature? Softmax regression to VGG-16, 16 to 4,096 samples.

    python benchmarks/minibatch_eigenvalues.py --device cuda --images carry/mnist.npz --cifar carry/cifar.npz --json FILE

runs ``lambdahat.experiments.run_batch_eigenvalues`` at the scale "paper" (--scale for another) and saves the result to
FILE after each point of training, with one flat row for every batch beside it as FILE.csv. --networks names some of the
networks, for several runs. --images and --cifar are .npz files with train_images, train_labels, test_images and
test_labels in bytes; without them the data come from ``lh.data.load``.

    python benchmarks/minibatch_eigenvalues.py --page PAGE FILE...

puts tables and verdicts of saved results between the two marks of a Markdown page.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from timing import set_tf32

from lambdahat._progress import progress
from lambdahat.cli.tables import markdown_table
from lambdahat.data.splits import Split, image_split
from lambdahat.experiments import run_batch_eigenvalues
from lambdahat.experiments.minibatch_eigenvalues import BatchEigenvaluesResult
from lambdahat.experiments.reproduction import Table, Verdict

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scale", default="paper", choices=("smoke", "cpu", "paper"))
    parser.add_argument("--networks", nargs="+", help="some of the scale's networks, by name")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--images", type=Path, help="MNIST as .npz")
    parser.add_argument("--cifar", type=Path, help="CIFAR-10 as .npz")
    parser.add_argument("--json", type=Path, help="where the result goes")
    parser.add_argument("--page", type=Path, help="a page to fill from the results named")
    parser.add_argument("results", nargs="*", type=Path)
    return parser.parse_args()


def read_split(path: Path) -> Split:
    """Images of bytes (n, H, W) or (n, C, H, W) as a split with mean 0 and deviation 1 per channel."""
    with np.load(path) as stored:
        parts = [(stored[f"{part}_images"], stored[f"{part}_labels"]) for part in ("train", "test")]
    train, test = ((x[:, None] if x.ndim == 3 else x, y) for x, y in parts)
    return image_split(train, test, 10, "standard")


def save(found: BatchEigenvaluesResult, path: Path) -> None:
    """The result, and its rows as CSV."""
    found.save(path)
    rows = list(found.rows())
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.with_suffix(".csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, names)
        writer.writeheader()
        writer.writerows(rows)


def verdict_table(verdicts: Sequence[Verdict]) -> Table:
    """Claims down, networks across."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    columns: dict[str, None] = {}
    for verdict in verdicts:
        column, _, claim = verdict.claim.partition(": ")
        columns[column] = None
        cells.setdefault((claim, verdict.source), {})[column] = verdict.verdict
    rows = tuple((claim, *(row.get(c, "") for c in columns), source) for (claim, source), row in cells.items())
    return Table("Claims", ("claim", *columns, "source"), rows)


def markdown(results: Sequence[BatchEigenvaluesResult]) -> str:
    """Tables of saved results, one after the other, in Markdown."""
    parts = []
    for found in results:
        for table in (verdict_table(found.verdicts), *found.tables()):
            parts.append(f"**{table.title}**\n\n{markdown_table(table.header, table.rows)}")
        lines = (f"- {v.claim}: **{v.verdict}**. {v.evidence}." for v in found.verdicts)
        parts.append("**Figures behind the verdicts**\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def fill(page: Path, results: Sequence[BatchEigenvaluesResult]) -> None:
    """Put the tables between the page's marks."""
    head, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, tail = rest.partition(END)
    page.write_text(f"{head}{BEGIN}\n\n{markdown(results)}\n{END}{tail}", encoding="utf-8")


def main() -> None:
    args = arguments()
    if args.page is not None:
        fill(args.page, [BatchEigenvaluesResult.load(path) for path in args.results])
        return
    files = {"mnist": args.images, "cifar10": args.cifar}
    data = {name: read_split(path) for name, path in files.items() if path is not None}
    # three digits are more than a tolerance of 1 % needs, and convolutions are three times as fast
    set_tf32(args.device.startswith("cuda"))
    start = time.perf_counter()

    def keep(found: BatchEigenvaluesResult) -> None:
        last = found.points[-1]
        print(f"{time.perf_counter() - start:6.0f} s  {last.network}, epoch {last.epoch}", flush=True)
        if args.json is not None:
            save(found, args.json)

    with progress():
        found = run_batch_eigenvalues(
            args.scale, args.seed, device=args.device, data=data, networks=args.networks, keep=keep
        )
    for table in (*found.tables(), verdict_table(found.verdicts)):
        print(f"\n{table.title}\n\n{markdown_table(table.header, table.rows)}")


if __name__ == "__main__":
    main()
