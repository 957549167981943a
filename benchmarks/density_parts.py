"""Where does the time of a spectral density on a GPU go? cuDNN's search for kernels, the products,
and the rest.

    python benchmarks/density_parts.py [--tf32] [--limit 4] [--case vgg16] [--depth 100]

times, from a fresh process, the first gradient (most of it cuDNN's search), later ones, the whole
density with the search that its own kernels need, products afterwards, and Gram–Schmidt's two
passes over a basis as deep. ``--limit`` is torch.backends.cudnn.benchmark_limit, the kernels that a
search tries.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from lambdahat.bench.plans import Plan
from lambdahat.estimators import spectrum
from lambdahat.krylov.lanczos import Basis
from lambdahat.operators.curvature import ggn, hessian


def seconds(work: Callable[[], Any]) -> float:
    """How long it takes until the device has done it."""
    _wait()
    start = time.perf_counter()
    work()
    _wait()
    return time.perf_counter() - start


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median(work: Callable[[], Any], times: int = 5) -> float:
    """Of some calls after a first."""
    work()
    return statistics.median(seconds(work) for _ in range(times))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--limit", type=int, default=10)
    parser.add_argument("--case", default="vgg16", choices=("mlp", "tanh", "lenet5", "vgg16"))
    parser.add_argument("--depth", type=int, default=100)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    case = Plan(args.device, peers=False).case(args.case)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit = True, args.limit
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = args.tf32
    v = torch.randn(case.num_parameters, device=args.device)
    parts = {
        "first gradient": seconds(case.gradient),
        "gradient": median(case.gradient),
        "density": seconds(
            lambda: spectrum(hessian(case.problem()), depth=args.depth, probes=1, seed=0)
        ),
    }
    for name, make in (("Hessian product", hessian), ("GGN product", ggn)):
        operator = make(case.problem())
        parts[name] = median(lambda operator=operator: operator @ v)  # type: ignore[misc]
        del operator
    basis = Basis(args.depth, case.num_parameters, v.dtype, v.device)
    basis.rows.normal_()
    parts["Gram–Schmidt, last step"] = median(
        lambda: [basis.orthogonalise(v.clone(), args.depth) for _ in range(2)]
    )
    print(f"{args.case}, {case.describe()}, TF32 {args.tf32}, limit {args.limit}")
    for name, spent in parts.items():
        print(f"{name:24} {1e3 * spent:10.1f} ms")


if __name__ == "__main__":
    main()
