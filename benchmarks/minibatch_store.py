"""Convert results that were measured in one piece to stores of ``lambdahat reproduce``.

    python benchmarks/minibatch_store.py --scale paper --out FOLDER RESULT...

puts results that benchmarks/minibatch_rates.py and benchmarks/minibatch_eigenvalues.py saved into
FOLDER, cell by cell, where ``lambdahat report FOLDER`` and ``lambdahat reproduce … --out FOLDER``
find them. --scale is the one they were measured at. Both ways run the same functions with the same
seeds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from minibatch_pieces import Piece

from lambdahat.experiments.kit.cells import Cell, Row
from lambdahat.experiments.kit.store import Store
from lambdahat.experiments.published import find

# settings that tell cells apart
PLACE = ("part", "network", "epoch", "operator", "optimizer", "point", "batch_size")


def belongs(row: Row, cell: Cell) -> bool:
    """Whether a row is one that the cell gives."""
    return all(row.get(name) == cell[name] for name in PLACE if name in cell)


def keep(found: Piece, folder: Path, scale: str, source: str) -> int:
    """Add the cells that a result has; how many."""
    measured = getattr(found, "scale", scale)
    if measured != scale:  # networks and epochs of two scales share their names
        raise SystemExit(
            f"{source} was measured at the scale {measured}, not {scale}: pass --scale {measured}"
        )
    experiment = find(found.name)
    cells, rows = experiment.grid(scale), found.rows()
    store = Store(folder, experiment.name, scale)
    store.open(cells, f"python benchmarks/minibatch_store.py, from {source}")
    groups = [(cell, [row for row in rows if belongs(row, cell)]) for cell in cells]
    full = [(cell, mine) for cell, mine in groups if mine]
    for cell, mine in full:
        store.add(cell, mine, 0.0)
    return len(full)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", default="paper", choices=("smoke", "cpu", "paper"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("results", nargs="+", type=Path)
    args = parser.parse_args()
    for path in args.results:
        found = Piece.load(path)
        print(f"{path}: {keep(found, args.out, args.scale, path.name)} cells")


if __name__ == "__main__":
    main()
