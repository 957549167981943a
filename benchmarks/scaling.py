"""How does the cost grow with data, parameters and Lanczos depth, and fall with processes?

Without further options: exponents of a log-log fit; linear is 1.

``--ranks 1 2 4 8`` times products, a trace and chains under torchrun on gloo instead, one thread in
each process, and says where the time goes: computing, waiting for the slowest rank, and the
all-reduce with its bytes. The model t(W) = t(1)/W + 2(W − 1)/W · S/b + a·log₂W is fitted to the
all-reduces (bandwidth b, latency a), compared with the measured times, and evaluated for GPUs.
``--json`` is written anew after every row, ``--page`` writes the tables of a stored run into a
document.

    python benchmarks/scaling.py --ranks 1 2 4 8 --json benchmarks/results/many_processes.json
    python benchmarks/scaling.py --page docs/many-processes.md
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from timing import arguments, report, setting

import lambdahat as lh
from lambdahat.bench.problems import load
from lambdahat.bench.timing import compare
from lambdahat.sampling.kernels import SGLD

RESULTS = Path(__file__).parent / "results" / "many_processes.json"
MARK, END = "<!--scaling.py-->", "<!--end of scaling.py-->"
CHAINS = 8
BUSY = 0.5  # load of others above which wall times mean nothing
# GPT-2 small, 16 sequences of 512 tokens on one H200 (docs/large-models.md): seconds of a product,
# parameters
GPU_PRODUCT, GPU_PARAMETERS = 0.203, 124_439_808
# GPUs, GB/s that an all-reduce reaches for each of them, microseconds of a stage, and the network
CLUSTERS = ((8, 300.0, 10.0, "NVLink in one machine"), (64, 40.0, 20.0, "400 Gb/s for each GPU"))


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


def measure_exponents(args: argparse.Namespace) -> None:
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


class Watch:
    """Times the all-reduces, each behind a barrier: what passes before it is waiting."""

    def __init__(self) -> None:
        self.calls, self.bytes, self.waiting, self.reducing = 0, 0, 0.0, 0.0
        self._reduce = dist.all_reduce

    def __enter__(self) -> Watch:
        dist.all_reduce = self._timed
        return self

    def __exit__(self, *_: Any) -> None:
        dist.all_reduce = self._reduce

    def _timed(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        dist.barrier()
        between = time.perf_counter()
        done = self._reduce(tensor, *args, **kwargs)
        self.waiting += between - start
        self.reducing += time.perf_counter() - between
        self.calls += 1
        self.bytes += tensor.numel() * tensor.element_size()
        return done


def rank_tasks(args: argparse.Namespace) -> dict[str, tuple[Callable[[], Any], int]]:
    """What every rank runs, and how often it is repeated."""
    samples = 512 if args.quick else 4096
    case = load("mlp", samples, batch_size=args.batch_size)
    problem, small = case.problem(), load("mlp", 512, batch_size=args.batch_size).problem()
    hessian = lh.hessian(problem)
    block = torch.randn(problem.num_parameters, 8, generator=torch.Generator().manual_seed(0))
    kernel = SGLD(1e-6, 100.0, 100.0)
    draws = 4 if args.quick else 20
    trace = {"method": "hutchinson", "tol": 1e-6, "max_matvecs": 16}
    return {
        "product": (lambda: hessian @ block[:, 0], 7),
        "product with 8 vectors": (lambda: hessian @ block, 2),
        "trace, 16 probes": (lambda: lh.trace(lh.hessian(problem), **trace), 1),
        f"{CHAINS} chains": (lambda: lh.sample(small, kernel, chains=CHAINS, draws=draws), 1),
    }


def run_rank(args: argparse.Namespace) -> None:
    """One process of torchrun; the first appends its rows to ``--json``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size, first = dist.get_world_size(), dist.get_rank() == 0
    for name, (task, repeats) in rank_tasks(args).items():
        task()  # warms up, and compares the ranks
        times, used = [], []
        for _ in range(1 if args.quick else repeats):
            dist.barrier()
            start, before = time.perf_counter(), time.process_time()
            task()
            dist.barrier()
            times.append(time.perf_counter() - start)
            used.append(time.process_time() - before)
        with Watch() as watch:
            task()
        row = {
            "call": name,
            "ranks": size,
            "s": min(times),
            "cpu_s": min(used),
            "all_reduces": watch.calls,
            "bytes": watch.bytes,
            "waiting_s": watch.waiting,
            "reducing_s": watch.reducing,
        }
        if first:
            with args.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    dist.destroy_process_group()


def measure_ranks(args: argparse.Namespace) -> None:
    """Run every number of processes by torchrun, and keep what has ended."""
    load = f"{os.getloadavg()[0]:.1f}"  # of others: above 0 the times mean little
    described = setting(args) | {"threads": 1, "cores": os.cpu_count(), "load before": load}
    path = args.json or RESULTS
    lines = path.with_suffix(".rows")
    lines.unlink(missing_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    end = time.monotonic() + args.seconds
    for size in args.ranks:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size)]
        launch += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        own = [__file__, "--as-rank", "--json", str(lines), "--batch-size", str(args.batch_size)]
        command = launch + own + (["--quick"] if args.quick else [])
        try:
            subprocess.run(command, env=environment, check=True, timeout=end - time.monotonic())
        except (subprocess.SubprocessError, ValueError) as error:  # what has ended is kept
            print(f"{size} processes: {error}")
        text = lines.read_text(encoding="utf-8") if lines.exists() else ""
        rows = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        report("Processes on one machine", described, with_efficiency(rows), path)
    lines.unlink(missing_ok=True)


def with_efficiency(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with the fraction of a perfect speed-up over one process."""
    alone = {row["call"]: row["s"] for row in rows if row["ranks"] == 1}
    return [
        row | {"efficiency": alone[row["call"]] / (row["ranks"] * row["s"])}
        if row["call"] in alone
        else row
        for row in rows
    ]


def predict(alone: float, size: int, sent: float, calls: float, rate: float, delay: float) -> float:
    """t(W) = t(1)/W + 2(W − 1)/W · S/b + n·a·log₂W in seconds, for n all-reduces of S bytes."""
    return alone / size + 2 * (size - 1) / size * sent / rate + calls * delay * math.log2(size)


def fit_network(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """Bandwidth b (bytes/s) and latency a (s) of the measured all-reduces: the latency from the
    smallest messages, the bandwidth from the largest.
    """
    shared = [row for row in rows if row["ranks"] > 1 and row["all_reduces"]]
    small = min(shared, key=lambda row: row["bytes"] / row["all_reduces"])
    delay = small["reducing_s"] / small["all_reduces"] / math.log2(small["ranks"])
    large = max(shared, key=lambda row: row["bytes"] / row["all_reduces"])
    moved = 2 * (large["ranks"] - 1) / large["ranks"] * large["bytes"]
    spent = large["reducing_s"] - large["all_reduces"] * delay * math.log2(large["ranks"])
    return moved / max(spent, 1e-9), delay


def tables(stored: dict[str, Any]) -> str:
    """The measured rows beside the model's, and the model for GPUs, in Markdown."""
    rows, described = stored["rows"], stored["setting"]
    rate, delay = fit_network(rows)
    alone, single_cpu = (
        {row["call"]: row[kind] for row in rows if row["ranks"] == 1} for kind in ("s", "cpu_s")
    )
    where = (
        f"Measured on {described['cores']} cores (load before the run {described['load before']}),"
        f" torch {described['torch']}, gloo"
    )
    lines = [
        f"{where}: {rate / 1e9:.2g} GB/s and {1e6 * delay:.0f} µs per stage by the fit.",
        "",
        "| call | ranks | time | efficiency | by model | of CPU | waiting | all-reduce | sent |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    if float(described["load before"]) > BUSY:
        lines[0] += " The machine was busy: only the efficiency of CPU time and the bytes count."
    for row in sorted(rows, key=lambda row: list(alone).index(row["call"])):
        single, size = alone[row["call"]], row["ranks"]
        expected = predict(single, size, row["bytes"], row["all_reduces"], rate, delay)
        shares = [f"{row[part] / row['s']:.0%}" for part in ("waiting_s", "reducing_s")]
        model = f"{single / (size * expected):.0%}" if size > 1 else ""
        cells = [row["call"], size, duration(row["s"]), f"{row['efficiency']:.0%}", model]
        cells.append(f"{single_cpu[row['call']] / (size * row['cpu_s']):.0%}")
        cells += [*shares, f"{row['bytes'] / 1e6:.3g} MB"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    sent, seconds = 4.0 * GPU_PARAMETERS + 96, GPU_PRODUCT
    task = f"a product of {sent / 1e6:.0f} MB that takes {1e3 * seconds:.0f} ms for 8,192 tokens"
    lines += [
        "",
        f"**Extrapolated, not measured**: {task} on one GPU.",
        "",
        "| GPUs | network | b | a | tokens | one GPU | all | all-reduce | speed-up |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for size, bandwidth, micro, name in CLUSTERS:
        for factor in (1, 64):
            total = seconds * factor
            together = predict(total, size, sent, 1, bandwidth * 1e9, micro * 1e-6)
            cells = [size, name, f"{bandwidth:g} GB/s", f"{micro:g} µs", f"{8192 * factor:,}"]
            cells += [duration(total), duration(together), duration(together - total / size)]
            cells.append(f"{total / together:.1f}")
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """Seconds in words, three digits."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def write_page(page: Path, stored: dict[str, Any]) -> None:
    """Put the tables between the marks of a document."""
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(MARK + "\n", 1)
    _, after = rest.split(END, 1)
    page.write_text(f"{before}{MARK}\n\n{tables(stored)}\n\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", help="numbers of processes to time")
    parser.add_argument("--seconds", type=float, default=115.0, help="limit of all of them")
    parser.add_argument("--page", type=Path, help="document that gets the tables of --json")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_rank:
        run_rank(args)
    elif args.ranks:
        measure_ranks(args)
    elif args.page is not None:
        write_page(args.page, json.loads((args.json or RESULTS).read_text(encoding="utf-8")))
    else:
        measure_exponents(args)


if __name__ == "__main__":
    main()
