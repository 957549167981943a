"""What blocks of Hessian–vector products cost on a GPU, in gradients per vector, and their memory.

    python benchmarks/blocks.py --out blocks.json

measures blocks of 1, 4, 8 and 16 vectors for the small networks of the benchmark and of 1 and 4 for
ResNet-50, ViT-B/16 and GPT-2 small, the latter in TF32. Every row says whether the block ran as one
product and whether that was captured as a CUDA graph. The file is written after each row, a row
that fails says why, and no network starts after ``--seconds``. ``--quick`` runs tiny networks.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lambdahat as lh
from lambdahat.bench.problems import LOSS, BenchCase, images, network
from lambdahat.bench.rows import REAL_NETWORKS, SMALL_NETWORKS, NextToken
from lambdahat.models import gpt

SMALL, LARGE = (1, 4, 8, 16), (1, 4)
GIBI = 2**30


class VisionTransformer(nn.Module):
    """ViT-B/16 of torch's own layers, where torchvision is not installed."""

    def __init__(self, classes: int = 1000, width: int = 768, blocks: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, stride=16)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, 197, width))
        layer = nn.TransformerEncoderLayer(
            width, 12, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, blocks, nn.LayerNorm(width), False)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.first.expand(len(x), -1, -1), tokens], dim=1) + self.places
        logits: Tensor = self.head(self.body(tokens)[:, 0])
        return logits


def real_network(name: str, quick: bool) -> tuple[nn.Module, tuple[int, ...], int, int]:
    """A network, the shape of a sample, and how many values and samples there are."""
    kind = (SMALL_NETWORKS if quick else REAL_NETWORKS)[name]
    try:
        model = kind.make()
    except ImportError:
        if name == "vit_b_16":
            model = VisionTransformer()
        else:
            model = NextToken(gpt(50257, context=256, width=768, heads=12, blocks=12))
    return model, kind.shape, kind.classes, kind.samples


def real_case(name: str, quick: bool, device: str) -> BenchCase:
    """One batch of random images or tokens at initialisation."""
    torch.manual_seed(0)
    model, shape, classes, samples = real_network(name, quick)
    if len(shape) == 1:
        x = torch.randint(classes, (samples, *shape))
        y = x[:, 1:]
    else:
        x, y = torch.randn(samples, *shape), torch.randint(classes, (samples,))
    return BenchCase(name, model.to(device).eval(), [(x.to(device), y.to(device))])


def small_case(name: str, quick: bool, device: str) -> BenchCase:
    """A small network at initialisation on one batch, of the sizes of ``lambdahat bench``."""
    torch.manual_seed(0)
    samples = 64 if quick else {"mlp": 8192, "lenet5": 2048}[name]
    x, y = (t.to(device) for t in images(samples, 28))
    return BenchCase(name, network(name, 256).to(device).eval(), [(x, y)])


def seconds(run: Callable[[], Any], device: str, budget: float) -> float:
    """The median of calls that fill ``budget`` seconds, five at least; two calls warm up."""

    def once() -> float:
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    once(), once()
    found: list[float] = []
    while len(found) < 5 or sum(found) < budget:
        found.append(once())
    return statistics.median(found)


@contextmanager
def peak(device: str) -> Iterator[dict[str, float]]:
    """The GiB that torch's allocator had in use at most inside, and reserved afterwards."""
    found: dict[str, float] = {}
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    yield found
    if device == "cuda":
        found["peak_gib"] = (torch.cuda.max_memory_allocated() - before) / GIBI
        found["reserved_gib"] = torch.cuda.memory_reserved() / GIBI


def rows(case: BenchCase, widths: tuple[int, ...], device: str) -> Iterator[dict[str, Any]]:
    """The gradient, then blocks of so many vectors, each in gradients per vector."""
    with peak(device) as memory:
        unit = seconds(case.gradient, device, 0.3)
    yield {"network": case.name, "work": "gradient", "seconds": unit, **memory}
    base = memory.get("peak_gib", float("nan"))
    generator = torch.Generator().manual_seed(0)
    for width in widths:
        row: dict[str, Any] = {"network": case.name, "work": f"block of {width}"}
        try:
            vectors = torch.randn(case.num_parameters, width, generator=generator).to(device)
            with peak(device) as memory:
                operator = lh.hessian(lh.Problem(case.model, LOSS, case.batches))
                spent = seconds(partial(operator.__matmul__, vectors), device, 0.3)
            products = operator.prepare()
            again = seconds(case.gradient, device, 0.2)
            row |= {"seconds": spent, "gradients_per_vector": spent / width / min(unit, again)}
            row |= {**memory, "over_gradient": memory.get("peak_gib", float("nan")) / base}
            row |= {"mode": products.mode, "graph_gib": products.graph_bytes / GIBI}
            row |= {"one_product": products.vmaps, "why_alone": products.why_alone}
            captured = {k: replay is not None for k, replay in products.replays.items()}
            row |= {"captured": captured}
            alone = torch.stack([operator @ v for v in vectors.T[:2]], dim=1)
            off = (operator @ vectors)[:, :2] - alone
            row["difference_from_single"] = float(off.norm() / alone.norm())
        except Exception as error:  # one row that fails leaves the others
            row["failed"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        yield row
        operator = products = vectors = alone = off = None  # type: ignore[assignment]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    start, found = time.perf_counter(), []
    large = SMALL_NETWORKS if args.quick else REAL_NETWORKS
    cases: dict[str, tuple[Any, tuple[int, ...]]] = {
        **dict.fromkeys(("mlp", "lenet5"), (small_case, SMALL)),
        **dict.fromkeys(large, (real_case, LARGE)),
    }
    for name, (make, widths) in cases.items():
        if time.perf_counter() - start > args.seconds:
            break
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = make is real_case
        try:
            for row in rows(make(name, args.quick, args.device), widths, args.device):
                found.append({**row, "at_s": round(time.perf_counter() - start, 1)})
                print(json.dumps(found[-1]), flush=True)
                args.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
        except Exception as error:  # a network that cannot be made leaves the others
            found.append({"network": name, "failed": f"{type(error).__name__}: {error}"[:300]})
            args.out.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
