"""What do trace, top-5, density and λ̂ of a GPT-2-sized language model cost, in time, memory and
gradients?

A GPT-2 small (124 M parameters, vocabulary 50257, transformers' own), trained briefly on Tiny
Shakespeare by characters, on sequences of 512. Every part has a time limit and is written to
``--out`` when it ends, so that a run that is cut off loses nothing. ``--peers`` does the same work
with curvlinops and devinterp, where they are installed.

    export PYTHONPATH=src:carry/peers:carry/arviz
    python3 benchmarks/large_model.py --device cuda --peers --out large.json
    python3 benchmarks/large_model.py --tiny --out tiny.json  # shows that it runs; no timing

``--fsdp`` measures a product, the largest eigenvalue and the trace to 10 % of a GPT of 1.3 billion
parameters under ``fully_shard`` with CPU offload instead: parameters and gradients in host memory,
vectors on the device. It ends within ``--seconds``. With ``--tiny`` it compares them with the dense
float64 Hessian, also under torchrun.

    python3 benchmarks/large_model.py --fsdp --device cuda --out fsdp.json
    torchrun --nproc-per-node 2 benchmarks/large_model.py --fsdp --tiny
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import gzip
import io
import json
import math
import os
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
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

import lambdahat as lh
from lambdahat import fsdp
from lambdahat.models.language import GPT

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
    parser.add_argument("--fsdp", action="store_true", help="1.3 billion sharded parameters")
    parser.add_argument("--blocks", type=int, default=24, help="of the sharded model")
    parser.add_argument("--width", type=int, default=2048, help="of the sharded model")
    parser.add_argument("--seconds", type=float, default=150.0, help="limit of all sharded parts")
    args = parser.parse_args()
    if args.fsdp:
        args.sequences, args.length = (4, 6) if args.tiny else (4, 256)
        if args.tiny:
            args.blocks, args.width = 2, 8
        return args
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
        self.gradient_s = self.product_s = math.nan

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
    return host_peak()


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
    if args.fsdp:
        sharded_parts(args)
        return
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


def sharded_parts(args: argparse.Namespace) -> None:
    """A product, the largest eigenvalue and the trace of a GPT under ``fully_shard`` with CPU
    offload, in strict float32: products are differences of gradients, which TF32 would drown.
    """
    start = time.perf_counter()
    kind = torch.device(args.device).type
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if "RANK" in os.environ:
        dist.init_process_group("gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl")
    else:
        backend = "gloo" if kind == "cpu" else "nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    args.out = args.out if dist.get_rank() == 0 else None
    table = Table(args)
    vocabulary, context = (11, 8) if args.tiny else (50257, 1024)
    heads = 2 if args.tiny else args.width // 128
    torch.manual_seed(0)
    with torch.device(args.device):
        model = GPT(vocabulary, context, args.width, heads, args.blocks, fused=kind == "cuda")
        for layer in model.modules():
            if isinstance(layer, nn.Embedding | nn.Linear):
                nn.init.normal_(layer.weight, std=0.5 if args.tiny else 0.02)
        ids = torch.randint(vocabulary, (args.sequences, args.length + 1))
    data = ids[:, :-1], ids[:, 1:]
    if args.tiny:
        plain = lh.Problem(copy.deepcopy(model).double(), "cross_entropy", data, ranks=None)
        exact = lh.hessian(plain).dense()
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    offload = CPUOffloadPolicy(pin_memory=kind == "cuda")
    for block in model.blocks:
        fully_shard(block, mesh=mesh, offload_policy=offload)
    fully_shard(model, mesh=mesh, offload_policy=offload)
    problem = fsdp.ShardedProblem(model, "cross_entropy", data, vectors=args.device)

    def left() -> float:
        return args.seconds - (time.perf_counter() - start)

    def setting() -> Facts:
        return {
            "device": torch.cuda.get_device_name() if kind == "cuda" else "cpu",
            "torch": torch.__version__,
            "precision": "strict float32",
            "ranks": dist.get_world_size(),
            "parameters": problem.num_parameters,
            "tokens": args.sequences * args.length,
            "parameters_on": str(next(model.parameters()).to_local().device),
            "vectors_on": str(problem.vector.device),
            "build_s": time.perf_counter() - start,
        }

    def gradient() -> Facts:
        table.gradient_s = median_s(problem.gradient, 3)
        return {"s": table.gradient_s, "loss": problem.loss(), "host_GiB": host_peak()}

    def product() -> Facts:
        probe = problem.signs(torch.Generator().manual_seed(dist.get_rank()))
        table.product_s = median_s(lambda: problem.product(probe), 3)
        facts = {"s": table.product_s, "gradients": table.product_s / table.gradient_s}
        if args.tiny:
            known = _own(problem, exact @ plain.vector)
            miss = problem.product(problem.vector) - known
            squares = problem.dots([miss], miss) / problem.dots([known], known)
            facts["relative_error"] = float(squares) ** 0.5
        return facts | {"host_GiB": host_peak()}

    def top() -> Facts:
        most = 60 if args.tiny else max(2, min(20, int(0.5 * left() / table.product_s)))
        found = fsdp.eigenvalues(problem, k=1, tol=1e-2, max_matvecs=most)
        facts = {
            "value": float(found.values[0]),
            "residual": float(found.residuals[0]),
            "products": found.cost,
            "status": found.status.name,
        }
        return facts | ({"exact": float(torch.linalg.eigvalsh(exact)[-1])} if args.tiny else {})

    def trace() -> Facts:
        most = 400 if args.tiny else max(2, int(0.9 * left() / table.product_s))
        found = fsdp.trace(problem, tol=0.1, max_matvecs=most)
        facts = {
            "value": found.value,
            "stderr": found.stderr,
            "products": found.cost,
            "status": found.status.name,
        }
        return facts | ({"exact": float(exact.trace())} if args.tiny else {})

    table.part("setting", setting)
    table.part("gradient", gradient, left())
    table.part("hessian product", product, left())
    table.part("top-1", top, max(left(), 1.0))
    table.part("trace to 10 %", trace, max(left(), 1.0))
    dist.destroy_process_group()


def _own(problem: fsdp.ShardedProblem, vector: Tensor) -> Tensor:
    """This rank's part of a whole vector: of each tensor the rows that its shard holds."""
    parts, start = [], 0
    for tensor in problem.model.parameters():
        whole = vector[start : start + tensor.numel()].view(tensor.shape)
        rows = whole.chunk(problem.ranks.size)
        start += tensor.numel()
        if problem.ranks.rank < len(rows):
            parts.append(rows[problem.ranks.rank].reshape(-1))
    return torch.cat(parts).to(problem.vector_device, problem.dtype)


def host_peak() -> float:
    """GiB of host memory at most, of the process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


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
