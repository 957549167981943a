"""How does the cost grow with data, parameters and Lanczos depth? Exponents of a log-log fit;
linear is 1.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from timing import arguments, report, setting

import lambdahat as lh
from lambdahat.bench.problems import load
from lambdahat.bench.timing import compare


def product_task(samples: int, width: int, args):
    case = load("mlp", samples, batch_size=args.batch_size, device=args.device, width=width)
    v = torch.ones(case.num_parameters, device=args.device)
    return case.num_parameters, partial(lh.hessian(case.problem()).__matmul__, v)


def density(problem: lh.Problem, depth: int) -> None:
    lh.spectrum(lh.hessian(problem), depth=depth, probes=1, seed=0)


def exponent(sizes: list[int], times: list[float]) -> tuple[float, float]:
    """Slope of log time on log size, and its standard error."""
    (slope, _), covariance = np.polyfit(np.log(sizes), np.log(times), 1, cov="unscaled")
    residual = np.log(times) - np.polyval(
        np.polyfit(np.log(sizes), np.log(times), 1), np.log(sizes)
    )
    return float(slope), float(np.sqrt(covariance[0, 0] * (residual**2).sum() / (len(sizes) - 2)))


def main() -> None:
    args = arguments(__doc__).parse_args()
    described = setting(args)
    unit, repeats = (64, 1) if args.quick else (1024, 9)
    sweeps: dict[str, list] = {"data": [], "parameters": [], "depth": []}
    for factor in (1, 2, 4, 8):
        samples = unit * factor
        sweeps["data"].append((samples, product_task(samples, 256, args)[1]))
        sweeps["parameters"].append(product_task(unit, 128 * factor, args))
    case = load("mlp", unit, batch_size=args.batch_size, device=args.device)
    for depth in (10, 20, 40, 80):
        sweeps["depth"].append((depth, partial(density, case.problem(), depth)))
    table = []
    for axis, points in sweeps.items():
        makers = {str(size): lambda task=task: task for size, task in points}
        timed = compare(makers, str(points[0][0]), 3 if axis == "depth" else repeats)
        times = [one.seconds for one in timed.values()]
        slope, stderr = exponent([size for size, _ in points], times)
        for (size, _), t in zip(points, times, strict=True):
            table.append(
                {"axis": axis, "size": size, "ms": 1e3 * t, "exponent": slope, "stderr": stderr}
            )
    report(
        "Scaling: a product over data and parameters, a density over depth",
        described,
        table,
        args.json,
    )


if __name__ == "__main__":
    main()
