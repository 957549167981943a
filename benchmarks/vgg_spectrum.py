"""Extract the spectra of VGG-16 for Figure 6.1 of the spectral thesis from the results of
benchmarks/minibatch_eigenvalues.py.

    python benchmarks/vgg_spectrum.py --out benchmarks/results/vgg16-spectrum.json RESULT...

keeps Ritz values, weights and residuals of the full data's Hessian and Gauss–Newton matrix at every
epoch.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from minibatch_pieces import BatchEigenvaluesResult

from lambdahat.experiments.minibatch.batch_points import CurvaturePoint

NETWORK = "VGG-16"
DIGITS = 7


def kept(point: CurvaturePoint) -> dict[str, Any]:
    """One point's spectrum as plain numbers, nodes ascending."""
    order = np.argsort(point.spectrum.nodes[0])
    found = {
        "epoch": point.epoch,
        "operator": point.operator,
        "loss": point.loss,
        "samples": point.samples,
    }
    for name in ("nodes", "weights", "residuals"):
        found[name] = [
            float(f"{value:.{DIGITS}g}") for value in getattr(point.spectrum, name)[0][order]
        ]
    return {**found, "dim": point.spectrum.dim}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("results", nargs="+", type=Path)
    args = parser.parse_args()
    points = [point for path in args.results for point in BatchEigenvaluesResult.load(path).points]
    rows = [
        kept(point)
        for point in sorted(points, key=lambda point: point.epoch)
        if point.network == NETWORK
    ]
    lines = ",\n".join(json.dumps(row) for row in rows)
    args.out.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
