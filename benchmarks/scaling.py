"""How does the cost grow with data, parameters and Lanczos depth? Exponents of a log-log fit; linear is 1."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from ours import Lambdahat
from problems import LOSS, load
from timing import arguments, compare, report, setting


def product_task(samples: int, width: int, args):
    case = load("mlp", samples, batch_size=args.batch_size, device=args.device, width=width)
    product = Lambdahat().hvp(case.model, LOSS, case.batches)
    v = torch.ones(case.num_parameters, device=args.device)
    return case.num_parameters, lambda: product(v)


def exponent(sizes: list[int], times: list[float]) -> tuple[float, float]:
    """Slope of log time on log size, and its standard error."""
    (slope, _), covariance = np.polyfit(np.log(sizes), np.log(times), 1, cov="unscaled")
    residual = np.log(times) - np.polyval(np.polyfit(np.log(sizes), np.log(times), 1), np.log(sizes))
    return float(slope), float(np.sqrt(covariance[0, 0] * (residual**2).sum() / (len(sizes) - 2)))


def main() -> None:
    args = arguments(__doc__).parse_args()
    described = setting(args)
    if not Lambdahat().available():
        return
    unit, repeats = (64, 1) if args.quick else (1024, 9)
    sweeps: dict[str, list] = {"data": [], "parameters": [], "depth": []}
    for factor in (1, 2, 4, 8):
        samples = unit * factor
        sweeps["data"].append((samples, product_task(samples, 256, args)[1]))
        sweeps["parameters"].append(product_task(unit, 128 * factor, args))
    case = load("mlp", unit, batch_size=args.batch_size, device=args.device)
    for depth in (10, 20, 40, 80):
        sweeps["depth"].append((depth, partial(Lambdahat().density, case.model, LOSS, case.batches, depth=depth)))
    table = []
    for axis, points in sweeps.items():
        times = compare({str(size): task for size, task in points}, 3 if axis == "depth" else repeats)
        slope, stderr = exponent([size for size, _ in points], list(times.values()))
        for (size, _), t in zip(points, times.values(), strict=True):
            table.append({"axis": axis, "size": size, "ms": 1e3 * t, "exponent": slope, "stderr": stderr})
    report("Scaling: a product over data and parameters, a density over depth", described, table, args.json)


if __name__ == "__main__":
    main()
