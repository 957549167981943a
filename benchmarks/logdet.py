"""How good are log-determinants, and what do they cost?

Four parts (``--part``):

- ``table``: Table 2.1 of the spectral thesis: squared-exponential kernel matrices of 1,000 points in six dimensions at
  nine condition numbers (the thesis does not give the scale of its inputs, so the length scale is chosen for the
  condition number), 30 moments and 50 probes, at most 1,500 products. Over several draws of the points.
- ``moments``: Figure 2.1 on bcsstk16 and a shifted Laplacian: entropy and error over the number of moments, by the
  classical algorithm and ours.
- ``matrices``: bcsstk16 (log det 96826.2928) over many seeds, with the coverage of its intervals, and a 7-point
  Laplacian of order 10⁶ plus 0.05, whose log-determinant is a sum of logs.
- ``factor``: time against SuperLU, on Laplacians that grow.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
import torch
from numpy.polynomial.chebyshev import chebvander
from timing import arguments, report, setting

import lambdahat as lh

BCSSTK16 = Path(__file__).parents[2] / "shared" / "data" / "matrices" / "bcsstk16_full.npz"
EXACT_BCSSTK16 = 96826.2928
SHIFT, NOISE = 0.05, 1e-8
ROWS = {  # condition number: the printed errors of MEMe, Chebyshev and Lanczos
    3.0e1: (0.0014, 0.0037, 0.0024),
    1.1e3: (0.0522, 0.0104, 0.0024),
    1.0e5: (0.0387, 0.0795, 0.0072),
    2.4e6: (0.0263, 0.2302, 0.0196),
    8.3e7: (0.0284, 0.3439, 0.0502),
    4.2e8: (0.0256, 0.4089, 0.0646),
    4.3e9: (0.00048, 0.5049, 0.0838),
    1.4e10: (0.0086, 0.5049, 0.1050),
    4.2e10: (0.0177, 0.5358, 0.1199),
}
PLAIN = {"precondition": "none", "probes": 50}
SETTINGS: dict[str, dict[str, Any]] = {
    "maxent, plain": PLAIN | {"method": "maxent", "depth": 15},
    "chebyshev, plain": PLAIN | {"method": "chebyshev", "depth": 15},
    "slq, plain": PLAIN | {"method": "slq", "depth": 30},
    "maxent": {"method": "maxent", "depth": 15, "probes": 50, "rank": 500},
    "chebyshev": {"method": "chebyshev", "depth": 15, "probes": 50, "rank": 500},
    "slq": {"method": "slq", "depth": 40, "probes": 25, "rank": 500},
}


def kernel(points: torch.Tensor, length_scale: float) -> tuple[Any, torch.Tensor]:
    """The kernel matrix and its eigenvalues."""
    K = lh.kernel_matrix(points, length_scale=length_scale, noise=NOISE)
    return K, torch.linalg.eigvalsh(K.dense())


def matched(points: torch.Tensor, condition: float) -> tuple[Any, torch.Tensor]:
    """The kernel matrix whose condition number is nearest to ``condition``, by bisection of the length scale."""
    low, high = 0.02, 2.0
    for _ in range(14):
        middle = math.sqrt(low * high)
        K, values = kernel(points, middle)
        reached = float(values[-1] / values[0])
        if abs(math.log(reached / condition)) < 0.02:
            break
        low, high = (middle, high) if reached < condition else (low, middle)
    return K, values


def table(draws: int, quick: bool) -> list[dict[str, Any]]:
    size, settings = (200, {"slq": SETTINGS["slq"] | {"rank": 100}}) if quick else (1000, SETTINGS)
    errors: dict[tuple[float, str], list[float]] = {}
    inside: dict[tuple[float, str], list[bool]] = {}
    costs: dict[str, int] = {}
    for draw in range(draws):
        points = 0.2 * torch.randn(size, 6, generator=torch.Generator().manual_seed(draw), dtype=torch.float64)
        for condition in ROWS:
            K, values = matched(points, condition)
            exact = float(values.log().sum())
            for name, options in settings.items():
                found = lh.logdet(K, seed=draw, **options)
                low, high = found.interval()
                errors.setdefault((condition, name), []).append(abs(float(found) - exact) / abs(exact))
                inside.setdefault((condition, name), []).append(low <= exact <= high)
                costs[name] = max(costs.get(name, 0), found.cost)
    rows = []
    for condition, (meme, chebyshev, lanczos) in ROWS.items():
        row: dict[str, Any] = {"κ": condition, "printed MEMe": meme, "printed Chebyshev": chebyshev}
        row["printed Lanczos"] = lanczos
        for name in settings:
            found = errors[condition, name]
            row[name] = f"{np.mean(found):.4f} ± {np.std(found):.4f} (max {max(found):.4f})"
            row[f"{name}: held"] = f"{np.mean(inside[condition, name]):.0%}"
        rows.append(row)
    return [*rows, {"κ": math.nan} | {name: f"{cost} products" for name, cost in costs.items()}]


def laplacian(side: int) -> tuple[scipy.sparse.csr_array, np.ndarray]:
    """The 7-point Laplacian of a cube plus 0.05, and its exact eigenvalues."""
    ones = np.ones(side)
    line = scipy.sparse.diags_array([-ones[1:], 2 * ones, -ones[1:]], offsets=[-1, 0, 1])
    eye = scipy.sparse.eye_array(side)
    parts = ((line, eye, eye), (eye, line, eye), (eye, eye, line))
    matrix = sum(scipy.sparse.kron(scipy.sparse.kron(a, b), c) for a, b, c in parts)
    modes = 2 - 2 * np.cos(np.pi * np.arange(1, side + 1) / (side + 1))
    values = modes[:, None, None] + modes[None, :, None] + modes + SHIFT
    return (matrix + SHIFT * scipy.sparse.eye_array(side**3)).tocsr(), values.ravel()


def bcsstk16() -> Any:
    return lh.operator(scipy.sparse.load_npz(BCSSTK16).tocsr().astype(np.float64), psd=True)


def over_moments(quick: bool) -> list[dict[str, Any]]:
    """Algorithm 3 with more and more moments: entropy and error of log det by the classical fit and by ours.

    Beside them what ours errs with the exact moments, and the standard error that the probes give it.
    """
    matrix, values = laplacian(10 if quick else 43)
    cases = {f"Laplacian, n = {matrix.shape[0]:,}": (lh.operator(matrix, psd=True), values)}
    if BCSSTK16.exists() and not quick:
        plain = bcsstk16()
        scaled = lh.operator(plain.rescaled(plain.known_diagonal().rsqrt()).matrix, psd=True)
        cases |= {name: (A, np.linalg.eigvalsh(A.dense().numpy()))
                  for name, A in (("bcsstk16", plain), ("bcsstk16, scaled", scaled))}  # fmt: skip
    rows = []
    for name, (A, values) in cases.items():
        bounds = (0.0, A.known_bounds()[1])  # λ_u by Gershgorin
        exact, true = float(np.log(values).sum()), chebvander(2 * values / bounds[1] - 1, 30).mean(axis=0)
        measured = lh.moments(A, 30, "chebyshev", probes=50, bounds=bounds)
        for count in (2, 4, 6, 8, 10, 12, 16, 20, 24, 30):
            part = slice(count + 1)
            fits = {"classical": lh.maxent.fit_classical(measured.values[part], bounds=bounds, sweeps=2000)}
            fits["ours"] = lh.maxent.fit(measured.values[part], bounds=bounds, stderr=measured.stderr[part])
            fits["ours, exact moments"] = lh.maxent.fit(true[part], bounds=bounds)
            row: dict[str, Any] = {"matrix": name, "moments": count}
            for label, density in fits.items():
                row[f"{label}: entropy"] = density.entropy()
                row[f"{label}: error"] = abs(A.dim * density.expectation(np.log) - exact) / abs(exact)
                row[f"{label}: status"] = density.status.name
            slopes = fits["ours"].sensitivity(np.log)
            noise = slopes @ measured.covariance[1 : count + 1, 1 : count + 1] @ slopes
            rows.append(row | {"ours: stderr": A.dim * math.sqrt(noise) / abs(exact)})
    return rows


def matrices(quick: bool) -> list[dict[str, Any]]:
    rows = []
    if BCSSTK16.exists():
        A, seeds = bcsstk16(), 5 if quick else 100
        for options in ({"depth": 50}, {"method": "maxent", "depth": 30}, {"method": "chebyshev", "depth": 50}):
            start = time.perf_counter()
            found = [lh.logdet(A, seed=seed, **options) for seed in range(seeds)]
            spent = (time.perf_counter() - start) / seeds
            errors = [abs(float(e) - EXACT_BCSSTK16) / EXACT_BCSSTK16 for e in found]
            width = 1.96 * float(np.mean([float(e.stderr) for e in found])) / EXACT_BCSSTK16
            held = np.mean([e.interval()[0] <= EXACT_BCSSTK16 <= e.interval()[1] for e in found])
            rows.append({"matrix": "bcsstk16", "method": options.get("method", "slq"), "largest error": max(errors),
                         "mean 95 % half-width": width,
                         "held": held, "products": found[0].cost, "seconds": spent})  # fmt: skip
    matrix, values = laplacian(20 if quick else 100)
    exact, seeds = float(np.log(values).sum()), 2 if quick else 5
    for options in ({"depth": 30, "probes": 3}, {"method": "maxent", "depth": 25, "probes": 4}):
        start = time.perf_counter()
        found = [lh.logdet(lh.operator(matrix, psd=True), seed=seed, **options) for seed in range(seeds)]
        spent = (time.perf_counter() - start) / seeds
        rows.append({"matrix": f"Laplacian, n = {matrix.shape[0]:,}", "method": options.get("method", "slq"),
                     "largest error": max(abs(float(e) - exact) for e in found) / exact,
                     "mean 95 % half-width": 1.96 * float(np.mean([float(e.stderr) for e in found])) / exact,
                     "held": np.mean([e.interval()[0] <= exact <= e.interval()[1] for e in found]),
                     "products": found[0].cost, "seconds": spent})  # fmt: skip
    return rows


def factor(quick: bool) -> list[dict[str, Any]]:
    cases = {f"Laplacian, n = {side**3:,}": laplacian(side) for side in ((8, 10) if quick else (20, 30, 40))}
    pairs = {name: (lh.operator(matrix, psd=True), float(np.log(v).sum())) for name, (matrix, v) in cases.items()}
    if BCSSTK16.exists() and not quick:
        pairs["bcsstk16"] = bcsstk16(), EXACT_BCSSTK16
    rows = []
    for name, (A, exact) in pairs.items():
        for method, options in (("exact", {}), ("slq", {"depth": 30, "probes": 5})):
            start = time.perf_counter()
            found = lh.logdet(A, method, **options)
            by, spent = "SuperLU" if method == "exact" else "ours, slq", time.perf_counter() - start
            rows.append({"matrix": name, "by": by, "seconds": spent, "error": abs(float(found) - exact) / exact})
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--part", choices=("table", "moments", "matrices", "factor"), default="matrices")
    parser.add_argument("--draws", type=int, default=10, help="draws of the points for the table")
    args = parser.parse_args()
    described = setting(args) | {"part": args.part, "precision": "float64"}
    del described["batch size"]
    if args.part == "table":
        rows = table(2 if args.quick else args.draws, args.quick)
    else:
        rows = {"moments": over_moments, "matrices": matrices, "factor": factor}[args.part](args.quick)
    report(f"Log-determinants: {args.part}", described, rows, args.json)


if __name__ == "__main__":
    main()
