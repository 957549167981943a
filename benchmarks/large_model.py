"""What do trace, top-5, density and λ̂ of a GPT-2-sized language model cost, in time, memory and
gradients?

A GPT-2 small (124 M parameters, vocabulary 50257, transformers' own), trained briefly on Tiny
Shakespeare by characters, on sequences of 512. Every part has a time limit and is written to
``--out`` when it ends, so that a run that is cut off loses nothing. ``--peers`` does the same work
with curvlinops and devinterp, where they are installed.

    export PYTHONPATH=src:carry/peers:carry/arviz
    python3 benchmarks/large_model.py --device cuda --peers --out large.json
    python3 benchmarks/large_model.py --tiny --out tiny.json  # shows that it runs; no timing
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import gzip
import io
import json
import math
import resource
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import lambdahat as lh

TEXT = Path("carry/tinyshakespeare.txt.gz")
TOL = 0.02  # of the trace, as a standard error
Facts = dict[str, Any]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="JSON file, written anew after every part")
    parser.add_argument("--text", type=Path, help="text to train on, plain or .gz")
    parser.add_argument(
        "--tiny", action="store_true", help="two layers of width 32: seconds on a CPU"
    )
    parser.add_argument("--peers", action="store_true", help="curvlinops and devinterp too")
    parser.add_argument(
        "--tf32", action="store_true", help="allow TF32 products (default: strict float32)"
    )
    parser.add_argument(
        "--sequences", type=int, default=16, help="of the data set that is measured"
    )
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--train-steps", type=int, default=100)
    parser.add_argument("--llc-gradients", type=int, default=1000, help="of all chains together")
    parser.add_argument(
        "--memory", help='budget of the problem, such as "60GiB" (default: what is free)'
    )
    parser.add_argument(
        "--limit", type=float, default=45.0, help="seconds of a part; 2× for the trace, 4× for λ̂"
    )
    parser.add_argument(
        "--parts", default="", help="comma-separated names of the only parts to run"
    )
    args = parser.parse_args()
    if args.tiny:
        args.sequences, args.batch_size, args.length, args.train_steps, args.llc_gradients = (
            8,
            4,
            16,
            3,
            1000,
        )
        args.limit = 10.0
    return args


def language_model(args: argparse.Namespace) -> nn.Module:
    """GPT-2 small, or a tiny one of the same make; no dropout, for devinterp samples in train
    mode.
    """
    with contextlib.suppress(ImportError):
        try:
            import torchvision  # noqa: F401
        except RuntimeError:  # built for another torch; transformers imports it if it finds it
            sys.modules["torchvision"] = None  # type: ignore[assignment]
    from transformers import GPT2Config, GPT2LMHeadModel

    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    size = (
        {"vocab_size": 257, "n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 64}
        if args.tiny
        else {}
    )
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**quiet, **size, bos_token_id=0, eos_token_id=0)).to(
        args.device
    )


def tokens(args: argparse.Namespace, rows: int, skip: int = 0) -> Tensor:
    """Sequences of characters of the text as ids, (rows, length)."""
    path = args.text or TEXT
    if not path.exists():
        raise SystemExit(
            f"no text at {path}: give --text, or put tinyshakespeare.txt.gz into carry/"
        )
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    known = {byte: number for number, byte in enumerate(sorted(set(text)))}
    start, count = skip * args.length, rows * args.length
    return torch.tensor([known[byte] for byte in text[start : start + count]]).view(
        rows, args.length
    )


def train(model: nn.Module, args: argparse.Namespace) -> float:
    """AdamW for a few steps; the last loss."""
    data = tokens(args, args.batch_size * args.train_steps, skip=args.sequences).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    loss = torch.zeros(())
    for ids in data.split(args.batch_size):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


class Table:
    """The parts that are done, written to a file after each."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.facts = args, {}
        self.only = {name for name in args.parts.split(",") if name}
        self.gradient_s = math.nan

    def part(self, name: str, work: Callable[[], Facts], seconds: float | None = None) -> Facts:
        """Run one part within its limit, with wall time and peak memory; {} where it was left
        out or failed.
        """
        if self.only and name not in self.only:
            return {}
        release()
        start = time.perf_counter()
        try:
            with limited(seconds or self.args.limit):
                found = work()
                synchronize()
        except Exception as error:  # a part that fails leaves the others
            found = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
        taken = time.perf_counter() - start
        self.facts[name] = {
            "wall_s": taken,
            "wall_gradients": taken / self.gradient_s,
            "peak_GiB": peak(),
            **found,
        }
        print(name, json.dumps(self.facts[name]), flush=True)
        if self.args.out is not None:
            self.args.out.parent.mkdir(parents=True, exist_ok=True)
            self.args.out.write_text(json.dumps(self.facts, indent=1) + "\n")
        return found if "failed" not in found else {}


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"cut off after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def release() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak() -> float:
    """GiB at most since the last release; on a CPU, of the process so far."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def median_s(task: Callable[[], Any], repeats: int = 5) -> float:
    task()
    times = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        task()
        synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    args = arguments()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = args.tf32
    table = Table(args)
    model = language_model(args)
    device = torch.cuda.get_device_name() if args.device.startswith("cuda") else "cpu"
    table.part(
        "setting",
        lambda: {
            "device": device,
            "torch": torch.__version__,
            "precision": "TF32" if args.tf32 else "strict float32",
            "memory": args.memory,
            "sequences": args.sequences,
            "length": args.length,
            "batch_size": args.batch_size,
            "parameters": sum(p.numel() for p in model.parameters()),
            "vocabulary": model.config.vocab_size,
            "train_steps": args.train_steps,
            "train_loss": train(model, args),
        },
    )
    ids = tokens(args, args.sequences).to(args.device)
    columns = {"input_ids": ids, "labels": ids}
    problem = lh.Problem(
        model,
        "cross_entropy",
        columns,
        batch_size=args.batch_size,
        count="tokens",
        memory=args.memory,
    )
    ours(problem, table)
    if args.peers:
        curvlinops_parts(model, ids, table)
        devinterp_parts(model, ids, table)


def ours(problem: lh.Problem, table: Table) -> None:
    v = torch.randn(problem.num_parameters, device=problem.device)

    def gradient() -> Facts:
        table.gradient_s = median_s(problem.gradient)
        return {"ms": 1e3 * table.gradient_s, "loss": problem.loss(), "tokens": problem.num_terms}

    def product(make: Callable[[lh.Problem], Any]) -> Callable[[], Facts]:
        def run() -> Facts:
            operator = make(problem)
            taken = median_s(lambda: operator @ v)
            return {
                "ms": 1e3 * taken,
                "gradients": taken / table.gradient_s,
                "mode": operator.mode,
                "kept_batches": operator.kept_batches,
                "graph_GiB": operator.graph_bytes / 2**30,
            }

        return run

    def most(limit: float) -> int:
        """The products that fit into a part's time, so that what is cut off still has a value
        and an error.
        """
        known = table.facts.get("hessian product", {}).get("ms", 1e3) / 1e3
        return max(16, int(0.5 * limit / known))

    def trace() -> Facts:
        found = lh.trace(
            lh.hessian(problem), tol=1.96 * TOL, max_matvecs=most(2 * table.args.limit)
        )
        return {
            "value": found.value,
            "stderr": found.stderr,
            "products": found.cost,
            "status": found.status.name,
        }

    def top() -> Facts:
        found = lh.eigenpairs(
            lh.hessian(problem), k=5, tol=1e-3, max_matvecs=most(table.args.limit)
        )
        return {
            "values": found.values.tolist(),
            "residuals": found.residuals.tolist(),
            "products": found.cost,
            "status": found.status.name,
        }

    def density() -> Facts:
        found = lh.spectrum(lh.hessian(problem), depth=min(60, problem.num_parameters))
        return {
            "extremes": [float(found.nodes.min()), float(found.nodes.max())],
            "products": found.cost,
            "trace_of_rule": float(found.trace),
        }

    table.part("gradient", gradient)
    table.part("hessian product", product(lh.hessian))
    table.part("ggn product", product(lh.ggn))
    table.part("trace", trace, 2 * table.args.limit)
    table.part("top-5", top)
    table.part("density", density)
    table.part("llc", lambda: learning_coefficient(problem, table.args), 4 * table.args.limit)


def learning_coefficient(problem: lh.Problem, args: argparse.Namespace) -> Facts:
    start = time.perf_counter()
    found = lh.llc(
        problem,
        chains=4,
        batch_size=args.batch_size,
        max_gradients=args.llc_gradients,
        kernel="sgld",
    )
    chains = found.chains
    taken = time.perf_counter() - start
    return {
        "value": found.value,
        "stderr": found.stderr,
        "gradients": found.cost,
        "mode": chains.mode,
        "ms_per_gradient": 1e3 * taken / found.cost,
        "draws": chains.losses.shape[1],
        "rhat": found.rhat,
        "step_size": found.step_size,
        "localization": found.localization,
        "nbeta": found.nbeta,
        "status": found.status.name,
    }


class Logits(nn.Module):
    """Token ids (B, T) to the logits of all positions but the last, (B·(T − 1), vocabulary):
    what curvlinops takes.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids).logits[:, :-1].flatten(0, 1)


def curvlinops_parts(model: nn.Module, ids: Tensor, table: Table) -> None:
    """The same matrix: a Hessian–vector product, as many probes as ours took, top-5 and density
    by its own calls.
    """
    try:
        import curvlinops
        from scipy.sparse.linalg import eigsh
    except Exception as error:  # a peer may break in any way
        print(f"curvlinops: skipped, {type(error).__name__}: {error}")
        return
    model.eval()
    data = [(part, part[:, 1:].flatten()) for part in ids.split(table.args.batch_size)]
    parameters = [p for p in model.parameters() if p.requires_grad]
    make = curvlinops.HessianLinearOperator
    operator = make(
        Logits(model), nn.CrossEntropyLoss(), parameters, data, check_deterministic=False
    )
    v = torch.randn(operator.shape[1], device=ids.device)

    def product() -> Facts:
        taken = median_s(lambda: operator @ v, 3)
        return {"ms": 1e3 * taken, "gradients": taken / table.gradient_s}

    def trace() -> Facts:
        wanted, end = (
            table.facts.get("trace", {}).get("products", 16),
            time.time() + 0.8 * table.args.limit,
        )
        readings: list[float] = []
        while len(readings) < wanted and time.time() < end:
            readings.append(float(curvlinops.hutchinson_trace(operator, 1)))
        spread = (
            statistics.stdev(readings) / math.sqrt(len(readings)) if len(readings) > 1 else math.nan
        )
        return {"value": statistics.fmean(readings), "stderr": spread, "products": len(readings)}

    def top() -> Facts:
        values = eigsh(operator.to_scipy(), k=5, which="LA", tol=1e-3, return_eigenvectors=False)
        return {"values": sorted(map(float, values), reverse=True)}

    def density() -> Facts:
        curvlinops.lanczos_approximate_spectrum(operator, 60)
        return {}

    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no second derivative
        for name, work in (
            ("product", product),
            ("trace", trace),
            ("top-5", top),
            ("density", density),
        ):
            table.part(f"curvlinops {name}", work)


def devinterp_parts(model: nn.Module, ids: Tensor, table: Table) -> None:
    """SGLD at the settings that ours found, 4 chains one after the other as devinterp runs them."""
    try:
        from devinterp.optim import SGMCMC
        from devinterp.slt.sampler import sample_single_chain
    except Exception as error:
        print(f"devinterp: skipped, {type(error).__name__}: {error}")
        return
    known = table.facts.get("llc", {})
    settings = {
        "lr": known.get("step_size", 1e-8),
        "nbeta": known.get("nbeta", 1000.0),
        "localization": known.get("localization", 1e4),
    }
    steps = min(known.get("draws", 20), 40)
    rows = [{"input_ids": row} for row in ids.cpu()]

    def evaluate(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Facts]:
        given = batch["input_ids"]
        logits = model(input_ids=given).logits[:, :-1]
        losses = nn.functional.cross_entropy(
            logits.flatten(0, 1), given[:, 1:].flatten(), reduction="none"
        )
        return losses.view(len(given), -1), {}

    def sampled() -> Facts:
        losses: list[float] = []
        clock: list[float] = []
        for chain in range(4):
            with contextlib.redirect_stderr(io.StringIO()):  # its progress bars
                sample_single_chain(
                    model,
                    rows,
                    evaluate,
                    {name: None for name, _ in model.named_parameters()},
                    num_draws=steps,
                    batch_size=table.args.batch_size,
                    sampling_method=SGMCMC.sgld,
                    sampling_method_kwargs=settings,
                    chain=chain,
                    seed=chain,
                    dataloader_seed=0,
                    device=str(ids.device),
                    micro_callback=lambda *, loss, **_: losses.append(float(loss.mean())),
                    step_callback=lambda *_: clock.append(time.perf_counter()),
                )
        gaps = [after - before for before, after in pairwise(clock)]
        return {
            "chain_step_ms": 1e3 * statistics.median(gaps),
            "steps": steps,
            "mean_loss": statistics.fmean(losses),
        }

    table.part("devinterp llc", sampled)


if __name__ == "__main__":
    main()
