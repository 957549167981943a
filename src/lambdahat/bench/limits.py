"""The least cost of a task: in gradients, and in arithmetic and traffic of this machine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lambdahat._core.device import multiply
from lambdahat.bench.problems import BenchCase
from lambdahat.bench.timing import seconds

# the least cost that was measured for each row, in gradients: on the CPU, then on a GPU where it
# differs
MEASURED: dict[tuple[str, str], float] = {
    ("HVP", "mlp"): 1.1,
    ("HVP", "lenet5"): 2.35,
    ("GGN product", "mlp"): 0.96,
    ("GGN product", "lenet5"): 2.0,
    ("trace to 1 %", "mlp"): 2.0,
    ("trace to 1 %", "lenet5"): 7.0,
    ("top-10 eigenvalues", "mlp"): 35.0,
    ("density, depth 100", "mlp"): 125.0,
    ("chain-step", "mlp, 4 chains"): 0.96,
}
MEASURED_GPU: dict[tuple[str, str], float] = {("HVP", "mlp"): 1.5}
MEASURED_GPU_SECONDS: dict[tuple[str, str], float] = {
    ("chain-step", "mlp, 4 chains"): 0.076e-3,
    ("chain-step", "mlp, 32 chains"): 0.027e-3,
}


@dataclass(frozen=True)
class Limit:
    """The least cost in units with its source, and seconds of arithmetic and traffic (or NaN)."""

    units: float = float("nan")
    why: str = ""
    flop_seconds: float = float("nan")
    byte_seconds: float = float("nan")


@dataclass(frozen=True)
class Rates:
    """The machine's rates: float32 operations of a large product, bytes of a large copy."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class LayerWork:
    """Operations and bytes of one pass over the data."""

    flops: float
    bytes: float

    def times(self, factor: float) -> LayerWork:
        """The work of ``factor`` passes."""
        return LayerWork(self.flops * factor, self.bytes * factor)

    def at(self, rates: Rates) -> dict[str, float]:
        """The seconds of both."""
        return {"flop_seconds": self.flops / rates.flops, "byte_seconds": self.bytes / rates.bytes}


def measured_rates(device: str, quick: bool) -> Rates:
    """Measure the rates by the faster product of square matrices and by a copy, in float32."""
    size, length = (8192, 2**28) if device.startswith("cuda") else (2048, 2**25)
    if quick:
        size, length = 256, 2**18
    a, source = torch.ones(size, size, device=device), torch.ones(length, device=device)
    target = torch.empty_like(source)
    out = torch.empty_like(a)
    with torch.no_grad():
        runs = (lambda: torch.mm(a, a, out=out)), (lambda: multiply(a, a))
        product = min(seconds(run)[0] for run in runs for _ in range(5))
    copied = min(seconds(lambda: target.copy_(source))[0] for _ in range(5))
    return Rates(2 * size**3 / product, 2 * source.nbytes / copied)


def layer_work(case: BenchCase) -> tuple[list[float], float]:
    """Operations of each layer's forward pass over the data, and elements of all outputs."""
    flops: list[float] = []
    elements = 0.0

    def record(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal elements
        each = layer.weight[0].numel()  # type: ignore[index]
        flops.append(2.0 * each * output.numel())
        elements += output.numel()

    layers = [layer for layer in case.model.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    handles = [layer.register_forward_hook(record) for layer in layers]
    x, _ = case.batches[0]
    with torch.no_grad():
        case.model(x)
    for handle in handles:
        handle.remove()
    factor = case.num_samples / len(x)
    return [part * factor for part in flops], elements * factor


def passes(case: BenchCase) -> dict[str, LayerWork]:
    """The least work of a gradient, an HVP and a GGN product over the data, with what can be kept
    being kept.

    A layer's forward pass is one product of matrices. A gradient adds two (for weights and inputs),
    one in the first layer. With the graph kept, an HVP is two a layer for the tangents, two for the
    tangents of the weights' gradients and two for those of the inputs'; in the first layer, whose
    inputs do not move, two in all. A GGN product is two forwards and two backwards; in the first
    layer one and one. Traffic counts the data, parameters and vectors, and the layers' outputs as
    often as they must be written and read.
    """
    (first, *rest), outputs = layer_work(case)
    others, P = sum(rest), case.num_parameters
    data = sum(x.numel() for x, _ in case.batches)
    return {
        "gradient": LayerWork(2 * first + 3 * others, 4.0 * (data + 2 * P + 2 * outputs)),
        "HVP": LayerWork(2 * first + 6 * others, 4.0 * (data + 3 * P + 4 * outputs)),
        "GGN product": LayerWork(2 * first + 4 * others, 4.0 * (data + 3 * P + 3 * outputs)),
    }


def limit(
    work: str, case: BenchCase, rates: Rates, count: float = 1.0, kind: str = "", label: str = ""
) -> Limit:
    """The limit of ``work`` on a case: the least measured, if known, else ``count`` passes of
    ``kind`` by arithmetic.

    ``label`` names the case in the table where that is not the network alone.
    """
    key, gpu = (work, label or case.name), case.device.type == "cuda"
    table = MEASURED_GPU if gpu else MEASURED
    known = passes(case)
    least = known[kind].times(count) if kind else None
    times = least.at(rates) if least is not None else {}
    if key in table:
        return Limit(table[key], "least measured", **times)
    if least is not None:
        return Limit(least.flops / known["gradient"].flops, "arithmetic", **times)
    return Limit()
