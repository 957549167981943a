"""What do the trace, the ten largest eigenvalues and a density of depth 100 cost, and how wrong are they?

Each is timed from a fresh start: building the operator and choosing its mode counts. The error of eigenvalues is the
largest relative one of the ten; that of a density, of its mean against tr H / P, which for one probe is mostly Monte
Carlo. References are in reference.py.
"""

from __future__ import annotations

import multiprocessing
import resource
from functools import partial

import torch
from ours import Lambdahat
from peers import PEERS
from problems import LOSS, Case, load
from reference import top_eigenvalues, trace
from timing import GRADIENT, arguments, compare, report, rows, setting

K = 10


def measure(case: Case, depth: int, repeats: int, ours_only: bool) -> list[dict]:
    print(case.describe())
    exact_trace, exact_top = trace(case), top_eigenvalues(case, K)
    print(f"reference: trace {exact_trace:.6g}, largest eigenvalues {exact_top[:3].tolist()} …")

    def error(work, value):
        if work == "trace":
            return abs(value / exact_trace - 1)
        if work == "top_eigenvalues":
            return (value.cpu().double() / exact_top - 1).abs().max().item()
        points, masses = (part.cpu().double() for part in value)
        return abs((points * masses).sum().item() * case.num_parameters / exact_trace - 1)

    table = []
    for work, options in (("trace", {}), ("top_eigenvalues", {"k": K}), ("density", {"depth": depth})):
        others = () if ours_only else PEERS
        peers = [peer for peer in (Lambdahat(), *others) if getattr(peer, work) is not None and peer.available()]
        errors: dict[str, float] = {}

        def run(peer, work=work, options=options, errors=errors):
            value = getattr(peer, work)(case.model, LOSS, case.batches, **options)
            errors[peer.name] = error(work, value)  # of the last repeat

        torch.manual_seed(0)  # curvlinops and PyHessian draw from the global generator
        times = compare({GRADIENT: case.gradient} | {peer.name: partial(run, peer) for peer in peers}, repeats)
        table += rows(case.name, work, times, error=errors)
    return table


def lanczos_memory(case: Case, depth: int) -> float:
    """MiB by which one density of ours raises the peak: on CPU over one of depth 2, on CUDA over the data."""
    run = partial(Lambdahat().density, case.model, LOSS, case.batches)
    if case.parameters[0].is_cuda:
        case.gradient()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(depth=depth)
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    run(depth=2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run(depth=depth)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10


def memory_in_fresh_process(name: str, samples: int, batch_size: int, device: str, depth: int) -> float:
    return lanczos_memory(load(name, samples, batch_size=batch_size, device=device), depth)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--ours", action="store_true", help="leave out the peers, which take minutes")
    args = parser.parse_args()
    described = setting(args)
    samples, depth, repeats = (128, 20, 1) if args.quick else (2048, 100, 3)
    table = []
    for name in ("mlp", "lenet5"):
        case = load(name, samples, batch_size=args.batch_size, device=args.device)
        if Lambdahat().available():
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                mib = pool.apply(memory_in_fresh_process, (name, samples, args.batch_size, args.device, depth))
            vectors = depth * case.num_parameters * 4 / 2**20
            print(f"{name}: Lanczos of depth {depth} adds {mib:.0f} MiB; {depth} float32 vectors are {vectors:.0f} MiB")
            described[f"{name} Lanczos MiB"] = round(mib)
        table += measure(case, depth, repeats, args.ours)
        report(f"Estimates, up to {name}", described, table, args.json)


if __name__ == "__main__":
    main()
