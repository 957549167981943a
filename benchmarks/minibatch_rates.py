"""Does the largest stable rate follow the curvature of batches, the smallest stable damping 1/B,
and the test error the damping?

    python benchmarks/minibatch_rates.py --device cuda --images mnist.npz \\
        --cifar cifar.npz --json FILE

runs the experiments "lanczos-opt", "damping" and "stable-rates" of ``lambdahat reproduce`` at the
scale "paper" (--scale for another) and saves each as FILE-<part>, the stable rates of each network
as a part of their own. --parts names some parts. --images and --cifar are .npz files with
train_images, train_labels, test_images and test_labels in bytes; without them the data come from
``lh.data.load``.

    python benchmarks/minibatch_rates.py --page PAGE FILE...

puts tables and verdicts of saved results between the two marks of a Markdown page.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from minibatch_pieces import Piece, run_damping, run_lanczos_opt, run_stable_rates
from timing import set_tf32

from lambdahat._core.progress import progress
from lambdahat.cli.printing import markdown_table
from lambdahat.cli.reproduce import CLAIMS_HEADER
from lambdahat.data.splits import Split, image_split
from lambdahat.experiments.kit.cells import Rows
from lambdahat.experiments.kit.claims import Table
from lambdahat.experiments.minibatch.largest_rates import SCALES
from lambdahat.experiments.published import find

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scale", default="paper", choices=("smoke", "cpu", "paper"))
    parser.add_argument(
        "--parts", nargs="+", help="some parts, by name; a name that is not known lists them"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--images", type=Path, help="MNIST as .npz")
    parser.add_argument("--cifar", type=Path, help="CIFAR-10 as .npz")
    parser.add_argument(
        "--json", type=Path, help="where the results go, each with its part's name added"
    )
    parser.add_argument("--page", type=Path, help="a page to fill from the results named")
    parser.add_argument("results", nargs="*", type=Path)
    return parser.parse_args()


def read_split(path: Path, normalization: str) -> Split:
    """Images of bytes (n, H, W) or (n, C, H, W) as a split."""
    with np.load(path) as stored:
        parts = [(stored[f"{part}_images"], stored[f"{part}_labels"]) for part in ("train", "test")]
    train, test = ((x[:, None] if x.ndim == 3 else x, y) for x, y in parts)
    return image_split(train, test, 10, normalization)


def parts(args: argparse.Namespace) -> dict[str, Callable[[], Piece]]:
    """What is to be run, in the order of what a killed run should have done first."""
    files = {
        name: path
        for name, path in (("mnist", args.images), ("cifar10", args.cifar))
        if path is not None
    }
    splits = {name: read_split(path, "standard") for name, path in files.items()}
    plain = read_split(args.images, "unit") if args.images is not None else None
    common = {"scale": args.scale, "seed": args.seed, "device": args.device}
    found: dict[str, Callable[[], Piece]] = {
        "lanczos-opt": partial(
            run_lanczos_opt, split=plain if args.scale != "smoke" else None, **common
        ),
        "damping": partial(run_damping, splits=splits, **common),
    }
    for subject in SCALES[args.scale]:
        name = f"stable-rates-{subject.model}-{subject.data}"
        found[name] = partial(run_stable_rates, splits=splits, networks=[subject.network], **common)
    return found


def markdown(results: Sequence[Piece]) -> str:
    """Verdicts and tables of saved results, one after the other, in Markdown."""
    out = []
    for found in results:
        # of a file that an earlier version wrote the verdicts may be judged otherwise
        rows = tuple(
            (
                v.verdict,
                f"{v.claim} (ours)" if v.own else v.claim,
                v.source,
                v.published,
                v.evidence,
            )
            for v in found.judged()
        )
        measured = find(found.name).tables(Rows(found.rows()))
        tables = (Table(f"Claims: {found.name}", CLAIMS_HEADER, rows), *measured)
        out += [
            f"**{table.title}**\n\n{markdown_table(table.header, table.rows)}" for table in tables
        ]
    return "\n".join(out)


def fill(page: Path, results: Sequence[Piece]) -> None:
    """Put the tables between the page's marks."""
    head, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, tail = rest.partition(END)
    page.write_text(f"{head}{BEGIN}\n\n{markdown(results)}\n{END}{tail}", encoding="utf-8")


def main() -> None:
    args = arguments()
    if args.page is not None:
        fill(args.page, [Piece.load(path) for path in args.results])
        return
    every = parts(args)
    unknown = sorted(set(args.parts or ()) - set(every))
    if unknown:
        raise SystemExit(f"--parts must be among {', '.join(every)}, got {', '.join(unknown)}")
    start = time.perf_counter()
    for name in args.parts or every:
        # whether a run diverges is no matter of the fourth digit; what Lanczos finds is
        set_tf32(args.device.startswith("cuda") and name != "lanczos-opt")
        with progress():
            found = every[name]()
        if args.json is not None:
            found.save(args.json.with_name(f"{args.json.stem}-{name}.json"))
        print(f"{time.perf_counter() - start:6.0f} s  {name}\n\n{markdown([found])}", flush=True)


if __name__ == "__main__":
    main()
