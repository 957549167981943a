"""How good are log-determinants, and what do they cost?

The table and the figure of the spectral thesis are ``lambdahat reproduce logdet-kernels`` and
``logdet-moments``. Here are two parts (``--part``):

- ``matrices``: bcsstk16 (log det 96826.2928) over many seeds, with the coverage of its intervals,
  and a 7-point Laplacian of order 10⁶ plus 0.05, whose log-determinant is a sum of logs.
- ``factor``: time against SuperLU, on Laplacians that grow.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
from timing import arguments, report, setting

import lambdahat as lh
from lambdahat.experiments.logdets.logdet_moments import laplacian

BCSSTK16 = Path(__file__).parents[2] / "shared" / "data" / "matrices" / "bcsstk16_full.npz"
EXACT_BCSSTK16 = 96826.2928
SHIFT = 0.05


def cube(side: int) -> tuple[Any, np.ndarray]:
    """The 7-point Laplacian of a cube plus 0.05, and its exact eigenvalues."""
    return laplacian((side,) * 3, SHIFT)


def bcsstk16() -> Any:
    return lh.operator(scipy.sparse.load_npz(BCSSTK16).tocsr().astype(np.float64), psd=True)


def matrices(quick: bool) -> list[dict[str, Any]]:
    rows = []
    if BCSSTK16.exists():
        A, seeds = bcsstk16(), 5 if quick else 100
        for options in (
            {"depth": 50},
            {"method": "maxent", "depth": 30},
            {"method": "chebyshev", "depth": 50},
        ):
            start = time.perf_counter()
            found = [lh.logdet(A, seed=seed, **options) for seed in range(seeds)]
            spent = (time.perf_counter() - start) / seeds
            errors = [abs(float(e) - EXACT_BCSSTK16) / EXACT_BCSSTK16 for e in found]
            width = 1.96 * float(np.mean([float(e.stderr) for e in found])) / EXACT_BCSSTK16
            held = np.mean([e.interval()[0] <= EXACT_BCSSTK16 <= e.interval()[1] for e in found])
            rows.append(
                {
                    "matrix": "bcsstk16",
                    "method": options.get("method", "slq"),
                    "largest error": max(errors),
                    "mean 95 % half-width": width,
                    "held": held,
                    "products": found[0].cost,
                    "seconds": spent,
                }
            )
    matrix, values = cube(20 if quick else 100)
    exact, seeds = float(np.log(values).sum()), 2 if quick else 5
    for options in ({"depth": 30, "probes": 3}, {"method": "maxent", "depth": 25, "probes": 4}):
        start = time.perf_counter()
        found = [
            lh.logdet(lh.operator(matrix, psd=True), seed=seed, **options) for seed in range(seeds)
        ]
        spent = (time.perf_counter() - start) / seeds
        rows.append(
            {
                "matrix": f"Laplacian, n = {matrix.shape[0]:,}",
                "method": options.get("method", "slq"),
                "largest error": max(abs(float(e) - exact) for e in found) / exact,
                "mean 95 % half-width": 1.96
                * float(np.mean([float(e.stderr) for e in found]))
                / exact,
                "held": np.mean([e.interval()[0] <= exact <= e.interval()[1] for e in found]),
                "products": found[0].cost,
                "seconds": spent,
            }
        )
    return rows


def factor(quick: bool) -> list[dict[str, Any]]:
    cases = {
        f"Laplacian, n = {side**3:,}": cube(side) for side in ((8, 10) if quick else (20, 30, 40))
    }
    pairs = {
        name: (lh.operator(matrix, psd=True), float(np.log(v).sum()))
        for name, (matrix, v) in cases.items()
    }
    if BCSSTK16.exists() and not quick:
        pairs["bcsstk16"] = bcsstk16(), EXACT_BCSSTK16
    rows = []
    for name, (A, exact) in pairs.items():
        for method, options in (("exact", {}), ("slq", {"depth": 30, "probes": 5})):
            start = time.perf_counter()
            found = lh.logdet(A, method, **options)
            by, spent = "SuperLU" if method == "exact" else "ours, slq", time.perf_counter() - start
            rows.append(
                {
                    "matrix": name,
                    "by": by,
                    "seconds": spent,
                    "error": abs(float(found) - exact) / exact,
                }
            )
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--part", choices=("matrices", "factor"), default="matrices")
    args = parser.parse_args()
    described = setting(args) | {"part": args.part, "precision": "float64"}
    del described["batch size"]
    rows = {"matrices": matrices, "factor": factor}[args.part](args.quick)
    report(f"Log-determinants: {args.part}", described, rows, args.json)


if __name__ == "__main__":
    main()
