"""Is λ̂ of trained networks correct? ``lh.llc`` at its defaults against long chains on the full
data.

``references`` computes λ̂ = nβ·(E[L(w)] − L(w*)) of six trained networks at several localizations γ
with BAOAB kinetic Langevin on the full data. It is written in plain torch and shares no code with
``lambdahat.sampling``. Chains of two step sizes, h and h/2, run side by side; the values are
extrapolated in h². Networks whose weights are missing are trained first, from fixed seeds.

``check`` runs ``lh.llc`` on the same networks over several seeds and compares it with the
references at the same γ. ``check --invariance`` varies the budget, the batch size, the number of
chains and the precision instead, none of which may change what is estimated.

``mass`` asks what a mass could gain: independent draws of the loss per 1,000 gradients of kinetic
chains whose mass is made of the exact mean Hessian: a number per tensor, the diagonal, a diagonal
in Kronecker eigenvectors, or the blocks of tensors. ``lh.llc`` estimates it from forces alone.

Every finished result is one line of a JSON file, and another call with the same file runs only what
is missing.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timing import in_processes, report
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional as F

Row = dict[str, Any]
RESULTS = Path(__file__).parent / "results" / "llc_networks"
MODULUS, LENGTH = 47, 4  # of the transformer's sequences
STEPS_PER_CHAIN = 4000  # gradients per chain that ``--invariance`` takes as one budget
BLOCKS = 8  # per chain, for the standard error
LARGEST_ROUND = 4096  # steps that are recorded between two looks at the error


# --- Networks and data ---------------------------------------------------------------------------


class TokenEmbedding(nn.Embedding):
    """An embedding as a product with one-hot rows.

    The backward pass of a lookup sorts its indices, which not every version of torch can capture
    in a CUDA graph.
    """

    def forward(self, tokens: Tensor) -> Tensor:
        classes = torch.arange(self.num_embeddings, device=tokens.device)
        return (tokens.unsqueeze(-1) == classes).to(self.weight.dtype) @ self.weight


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.hidden_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        size = width // self.heads
        projected = self.project(self.attention_norm(x)).view(batch, length, 3, self.heads, size)
        query, key, value = projected.permute(2, 0, 3, 1, 4).unbind(0)
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = (query @ key.transpose(-1, -2) / math.sqrt(size)).masked_fill(future, -1e9)
        mixed = (scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, length, width)
        x = x + self.merge(mixed)
        return x + self.down(F.gelu(self.up(self.hidden_norm(x))))


class Transformer(nn.Module):
    """Next-token logits (batch, length, classes)."""

    def __init__(self, classes: int, length: int, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.tokens = TokenEmbedding(classes, width)
        self.positions = nn.Parameter(0.3 * torch.randn(length, width))
        nn.init.normal_(self.tokens.weight, std=0.3)
        self.block = Block(width, heads, hidden)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.block(self.tokens(tokens) + self.positions)))


def mlp(inputs: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def narrow_mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10))


def narrow_cnn() -> nn.Sequential:
    """Two strided convolutions on 8 × 8 images: 666 parameters, cheap enough for hundreds of
    runs.
    """
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def small_cnn(norm: bool) -> nn.Sequential:
    """Two convolutions on 8 × 8 images: 1,898 parameters, and 48 more with batch normalisation."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 8), (8, 16)):
        layers.append(nn.Conv2d(inputs, outputs, 3, padding=1))
        layers += [nn.BatchNorm2d(outputs)] if norm else []
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 10))


def lenet() -> nn.Sequential:
    """LeNet-5. Pooling before ReLU is the same function and moves a third less memory."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(6, 16, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )


def digits(shape: tuple[int, ...]) -> Callable[[Path], tuple[Tensor, Tensor]]:
    def load(folder: Path) -> tuple[Tensor, Tensor]:
        from lambdahat.data import digits_split

        x, y = digits_split().train
        return x.reshape(-1, *shape), y

    return load


def mnist(shape: tuple[int, ...]) -> Callable[[Path], tuple[Tensor, Tensor]]:
    def load(folder: Path) -> tuple[Tensor, Tensor]:
        from lambdahat.data import load as load_data

        x, y = load_data("mnist", folder, normalization="standard").train
        return x.reshape(-1, *shape), y

    return load


def recurrences(folder: Path) -> tuple[Tensor, Tensor]:
    """All sequences a, b, a + b, a + 2b, … modulo 47, as inputs and targets one token later.

    The second token cannot be predicted, so that the least possible loss is (ln 47)/4.
    """
    first = torch.arange(MODULUS)
    tokens = [first.repeat_interleave(MODULUS), first.repeat(MODULUS)]
    while len(tokens) <= LENGTH:
        tokens.append((tokens[-1] + tokens[-2]) % MODULUS)
    rows = torch.stack(tokens, 1)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


@dataclass(frozen=True)
class Network:
    """A network with its data, how it is trained, and how its reference is computed.

    ``coarse`` chains run at step size h and twice as many at h/2, since the extrapolated value puts
    four times as much weight on the latter. ``share`` is its part of the time.
    """

    make: Callable[[], nn.Module]
    data: Callable[[Path], tuple[Tensor, Tensor]]
    epochs: int
    rate: float
    momentum: float | None = None  # of SGD; None trains with Adam
    batch: int = 128
    dtype: torch.dtype = torch.float64
    coarse: int = 8
    chunk: int = 60_000
    share: float = 1.0


NETWORKS = {
    "digits-mlp": Network(lambda: mlp(64, 32), digits((64,)), 300, 5e-3),
    "digits-cnn": Network(lambda: small_cnn(False), digits((1, 8, 8)), 150, 5e-3),
    "mnist-mlp": Network(lambda: mlp(784, 128), mnist((784,)), 18, 0.04, 0.9, coarse=2, share=1.5),
    "mnist-lenet": Network(
        lenet,
        mnist((1, 28, 28)),
        14,
        0.03,
        0.9,
        dtype=torch.float32,
        coarse=2,
        chunk=20_000,
        share=5.0,
    ),
    "digits-batchnorm": Network(lambda: small_cnn(True), digits((1, 8, 8)), 150, 5e-3),
    "transformer": Network(
        lambda: Transformer(MODULUS, LENGTH, 32, 2, 128), recurrences, 700, 5e-3, batch=256
    ),
    "narrow-mlp": Network(narrow_mlp, digits((64,)), 300, 5e-3),
    "narrow-cnn": Network(narrow_cnn, digits((1, 8, 8)), 200, 5e-3),
}


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """The mean over samples and positions, summed in float64."""
    losses = F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="none")
    return losses.double().mean()


def train(network: Network, folder: Path) -> nn.Module:
    """A network trained from its fixed seed with a cosine schedule, in eval mode.

    Batch normalisation runs with its running statistics over the last half of the epochs, so that
    the end is near a minimum of the function that eval mode computes.
    """
    x, y = network.data(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = network.make()
        if network.momentum is None:
            optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), network.rate)
        else:
            optimizer = torch.optim.SGD(model.parameters(), network.rate, network.momentum)
        steps = network.epochs * -(-len(x) // network.batch)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for epoch in range(network.epochs):
            model.train(epoch < network.epochs / 2)
            for rows in torch.randperm(len(x)).split(network.batch):
                optimizer.zero_grad()
                cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
                schedule.step()
    return model.eval()


def load_network(name: str, args: argparse.Namespace) -> tuple[nn.Module, str]:
    """The network in eval mode and a digest of its weights; it is trained if there are none."""
    from safetensors.torch import load, save_file

    path = args.weights / f"{name}.safetensors"
    if not path.is_file():
        start = time.perf_counter()
        trained = train(NETWORKS[name], args.data)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({key: value.contiguous() for key, value in trained.state_dict().items()}, path)
        print(f"{name}: trained in {time.perf_counter() - start:.0f} s", flush=True)
    stored = path.read_bytes()
    model = NETWORKS[name].make()
    model.load_state_dict(load(stored))
    return model.eval(), hashlib.sha256(stored).hexdigest()[:16]


def scale_localization(model: nn.Module) -> float:
    """γ0 = P/‖w*‖² over all parameters."""
    vector = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    return len(vector) / float(vector @ vector)


def parse_gammas(text: str, unit: float) -> list[float]:
    """Localizations from numbers and multiples of γ0, such as "0.5x,1x,100"."""
    items = [item.strip() for item in text.split(",") if item.strip()]
    return [float(item[:-1]) * unit if item.endswith("x") else float(item) for item in items]


# --- The reference sampler -----------------------------------------------------------------------


class FullLoss:
    """Losses (C,) and gradients (C, P), both float64, of C chains over the whole data."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, chunk: int, batched: bool) -> None:
        self.model, self.batched = model, batched
        self.shapes = {name: p.shape for name, p in model.named_parameters()}
        self.sizes = [shape.numel() for shape in self.shapes.values()]
        self.dtype = next(model.parameters()).dtype
        inputs = x.to(self.dtype) if x.is_floating_point() else x
        self.chunks = list(zip(inputs.split(chunk), y.split(chunk), strict=True))
        self.count = len(x)

    def loss(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The share of one chunk of the data in the mean loss."""
        parts = theta.to(self.dtype).split(self.sizes)
        named = zip(self.shapes.items(), parts, strict=True)
        parameters = {name: part.view(shape) for (name, shape), part in named}
        output = functional_call(self.model, parameters, (x,))
        return cross_entropy(output, y) * (len(x) / self.count)

    def __call__(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        losses, gradients = torch.zeros_like(theta[:, 0]), torch.zeros_like(theta)
        for x, y in self.chunks:
            if self.batched:
                slope, value = vmap(grad_and_value(self.loss), in_dims=(0, None, None))(theta, x, y)
            else:
                one_by_one = [grad_and_value(self.loss)(row, x, y) for row in theta]
                slope, value = (torch.stack(part) for part in zip(*one_by_one, strict=True))
            losses, gradients = losses + value, gradients + slope
        return losses, gradients


class Chains:
    """BAOAB kinetic Langevin of several chains, all of whose state is changed in place.

    v ← v − h∇U(w);  w ← w + (h/2)v;  v ← e^{−ξh}v + √(1 − e^{−2ξh})·N(0, I);  w ← w + (h/2)v,
    U(w) = nβ·L(w) + (γ/2)‖w − w*‖². On a GPU a step is captured in a CUDA graph, except for the
    noise, which is drawn outside so that a failed capture leaves the generator intact.
    """

    def __init__(self, full_loss: FullLoss, center: Tensor, coarse: int, nbeta: float) -> None:
        count, device = 3 * coarse, center.device
        double: dict[str, Any] = {"dtype": torch.float64, "device": device}
        self.full_loss, self.center, self.coarse, self.nbeta = full_loss, center, coarse, nbeta
        self.w = center.repeat(count, 1)
        self.v, self.noise = torch.zeros_like(self.w), torch.zeros_like(self.w)
        self.h, self.decay = torch.zeros(count, 1, **double), torch.zeros(count, 1, **double)
        self.gamma = torch.zeros((), **double)
        self.record = torch.zeros(3, count, LARGEST_ROUND, **double)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.generator = torch.Generator(device)
        self.replay: Callable[[], None] = self.step
        self.label = "eager"
        self.gradients = 0

    def set(self, gamma: float, h: float, friction: float) -> None:
        """Use the step size h for the first chains and h/2 for the others."""
        self.gamma.fill_(gamma)
        self.h[: self.coarse], self.h[self.coarse :] = h, h / 2
        self.decay.copy_(torch.exp(-friction * self.h))

    def step(self) -> None:
        loss, slope = self.full_loss(self.w)
        shift = self.w - self.center
        force = self.nbeta * slope + self.gamma * shift
        recorded = torch.stack([loss, shift.square().sum(1), (shift * force).sum(1)])
        self.record.index_copy_(2, self.position, recorded.unsqueeze(2))
        self.position.add_(1)
        self.v.sub_(self.h * force)
        self.w.add_(0.5 * self.h * self.v)
        self.v.mul_(self.decay).add_((1 - self.decay.square()).sqrt() * self.noise)
        self.w.add_(0.5 * self.h * self.v)

    def run(self, steps: int) -> Tensor:
        """Loss, ‖w − w*‖² and (w − w*)·∇U at each step: (3, C, steps) on the CPU."""
        parts = []
        for start in range(0, steps, LARGEST_ROUND):
            size = min(LARGEST_ROUND, steps - start)
            self.position.zero_()
            for _ in range(size):
                self.noise.normal_(generator=self.generator)
                self.replay()
            parts.append(self.record[:, :, :size].cpu())
        self.gradients += steps * len(self.w)
        return torch.cat(parts, 2)

    def start(self, seed: str, positions: Tensor | None) -> None:
        digest = hashlib.sha256(seed.encode()).digest()
        self.generator.manual_seed(int.from_bytes(digest[:7], "big"))
        self.w.copy_(self.center.expand_as(self.w) if positions is None else positions)
        self.v.normal_(generator=self.generator)

    def capture(self) -> None:
        """Replace the step by a CUDA graph of it."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        self.position.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        self.replay, self.label = graph.replay, "CUDA graph"

    def curvature(self, iterations: int, spread: float = 0.0) -> float:
        """The largest |eigenvalue| of the Hessian of L over the chains' positions.

        Power iteration with differences of gradients, which see the kinks of ReLU too. ``spread``
        is the standard deviation of a displacement from these positions.
        """
        generator = torch.Generator(self.w.device).manual_seed(0)
        vectors = torch.empty_like(self.w).normal_(generator=generator)
        origin = self.w + spread * vectors.flip(0)
        distance = 3e-3
        here = self.full_loss(origin)[1]
        for _ in range(iterations):
            vectors = vectors / vectors.norm(dim=1, keepdim=True)
            vectors = (self.full_loss(origin + distance * vectors)[1] - here) / distance
        self.gradients += (iterations + 1) * len(self.w)
        return float(vectors.norm(dim=1).max())


def seconds_per_step(chains: Chains) -> float:
    chains.set(1.0, 0.0, 1.0)
    chains.position.zero_()
    chains.replay()
    _synchronize(chains.w.device)
    start = time.perf_counter()
    for _ in range(3):
        chains.replay()
    _synchronize(chains.w.device)
    return (time.perf_counter() - start) / 3


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_chains(name: str, model: nn.Module, args: argparse.Namespace) -> Chains:
    """Chains that run all at once (vmap) or one by one, whichever is faster."""
    network = NETWORKS[name]
    x, y = (part[: args.samples].to(args.device) for part in network.data(args.data))
    model = model.to(args.device, network.dtype).requires_grad_(False)
    center = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    nbeta = len(x) / math.log(len(x))
    best: tuple[float, Chains] | None = None
    for batched in (True, False):
        full_loss = FullLoss(model, x, y, network.chunk, batched)
        chains = Chains(full_loss, center, args.chains or network.coarse, nbeta)
        try:
            if args.device == "cuda" and args.graphs:
                try:
                    chains.capture()
                except RuntimeError as error:
                    print(f"{name}: no CUDA graph: {str(error).splitlines()[0]}", flush=True)
                    _synchronize(center.device)
            seconds = seconds_per_step(chains)
        except RuntimeError as error:  # one way may lack a kernel or need too much memory
            print(f"{name}: batched={batched} fails: {str(error).splitlines()[0]}", flush=True)
            continue
        print(
            f"{name}: batched={batched}, {chains.label}: {1e3 * seconds:.2f} ms a step of"
            f" {len(chains.w)} chains",
            flush=True,
        )
        if best is None or seconds < best[0]:
            best = seconds, chains
        del full_loss, chains
        if args.device == "cuda":
            torch.cuda.empty_cache()
    if best is None:
        raise RuntimeError(f"{name}: neither way of running the chains works")
    return best[1]


# --- Statistics of the reference -----------------------------------------------------------------


def split_rhat(traces: Tensor) -> float:
    """Split R-hat of (C, steps)."""
    half = traces.shape[1] // 2
    parts = torch.cat([traces[:, :half], traces[:, -half:]])
    within = float(parts.var(dim=1).mean())
    between = half * float(parts.mean(1).var())
    return math.sqrt(((half - 1) / half * within + between / half) / within)


def mean_and_error(traces: Tensor) -> tuple[float, float]:
    """The mean of (C, steps); the larger of the errors by blocks and by the spread of chains."""
    count, steps = traces.shape
    blocks = traces[:, : steps // BLOCKS * BLOCKS].reshape(count * BLOCKS, -1).mean(1)
    by_blocks = float(blocks.std()) / math.sqrt(len(blocks))
    spread = float(traces.mean(1).std()) / math.sqrt(count) if count > 1 else 0.0
    return float(traces.mean()), max(by_blocks, spread)


def find_burn_in(traces: Tensor) -> tuple[int, float]:
    """The fewest steps of (k, C, steps) after which no quantity drifts, and the drift that is left.

    The drift is the t statistic, over chains, of the first quarter of what remains less its last
    half; the largest of the k quantities counts.
    """
    steps, count, drift = traces.shape[2], traces.shape[1], math.inf
    burn_in = 0
    for share in (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5):
        burn_in = int(share * steps)
        rest = traces[:, :, burn_in:]
        size = rest.shape[2]
        change = rest[:, :, : size // 4].mean(2) - rest[:, :, size // 2 :].mean(2)
        drift = float((change.mean(1) / (change.std(1) / math.sqrt(count))).abs().max())
        if drift < 2.0:
            break
    return burn_in, drift


def extrapolate(coarse: tuple[float, float], fine: tuple[float, float]) -> tuple[float, float]:
    """The limit h → 0 of a quantity with a bias in h², from h and h/2.

    A quarter of the correction counts as an error, for the bias of higher order.
    """
    value = (4 * fine[0] - coarse[0]) / 3
    noise = math.hypot(4 * fine[1], coarse[1]) / 3
    return value, math.hypot(noise, 0.25 * abs(value - fine[0]))


def summarize(traces: Tensor, coarse: int, gamma: float, parameters: int) -> Row:
    """The reference from nβ(L − L*), ‖w − w*‖² and the virial, (3, C, steps)."""
    burn_in, drift = find_burn_in(traces[:2])
    kept = traces[:, :, burn_in:]
    energy, distance, virial = kept
    groups = slice(None, coarse), slice(coarse, None)
    first, second = (mean_and_error(energy[group]) for group in groups)
    value, error = extrapolate(first, second)
    virials = [mean_and_error(virial[group] / parameters) for group in groups]
    fine = energy[coarse:], distance[coarse:]
    centered = [part - part.mean() for part in fine]
    return {
        "value": value,
        "stderr": error,
        "coarse": first[0],
        "coarse_stderr": first[1],
        "fine": second[0],
        "fine_stderr": second[1],
        "slope": -0.5 * gamma * float((centered[0] * centered[1]).mean()),  # dλ̂/d ln γ
        "virial": [mean for mean, _ in virials],
        "virial_stderr": [err for _, err in virials],
        "rhat": max(split_rhat(energy[group]) for group in groups),
        "rhat_distance": max(split_rhat(distance[group]) for group in groups),
        "distance": float(fine[1].mean().sqrt()),
        "lowest_energy": float(energy.min()),
        "steps": traces.shape[2],
        "burn_in": burn_in,
        "drift": drift,
    }


# --- The command references ----------------------------------------------------------------------


@dataclass
class Prepared:
    """A network that is ready to be sampled, and the positions where its chains are."""

    chains: Chains
    digest: str
    initial_loss: float
    gradient_norm: float
    positions: Tensor | None = None
    precision: Row | None = None


def prepare(name: str, args: argparse.Namespace) -> Prepared:
    model, digest = load_network(name, args)
    digest += f"-first-{args.samples}" if args.samples else ""  # never taken for a reference
    chains = make_chains(name, model, args)
    loss, slope = chains.full_loss(chains.center.unsqueeze(0))
    return Prepared(chains, digest, float(loss[0]), float(slope.norm()))


def reference(name: str, gamma: float, ready: Prepared, seconds: float, args: Any) -> Row:
    """λ̂ of one network at one γ, within ``seconds``."""
    begin = time.perf_counter()
    chains = ready.chains
    chains.gradients = 0
    friction = 2 * math.sqrt(gamma)
    for halvings in range(8):
        warm = ready.positions is not None and halvings == 0
        chains.start(f"{name} {gamma:.9g} {halvings}", ready.positions if warm else None)
        h, largest = tune(chains, gamma, args.step / 2**halvings, friction, warm)
        traces = None if h is None else _production(chains, h, begin + seconds, ready, args.tol)
        if traces is not None:
            break
        print(f"{name}, γ = {gamma:.4g}: a chain diverged, h is halved", flush=True)
    else:
        raise RuntimeError(f"{name}, γ = {gamma:.4g}: chains diverge at any step size")
    ready.positions = chains.w.clone()
    if chains.full_loss.dtype == torch.float32 and ready.precision is None:
        ready.precision = compare_precision(chains)
    found = summarize(traces, chains.coarse, gamma, chains.center.numel())
    return {
        "network": name,
        "weights": ready.digest,
        "parameters": chains.center.numel(),
        "samples": chains.full_loss.count,
        "nbeta": chains.nbeta,
        "localization": gamma,
        "over_scale": gamma * float(chains.center @ chains.center) / chains.center.numel(),
        "initial_loss": ready.initial_loss,
        "gradient_norm": ready.gradient_norm,
        **found,
        "step_size": h,
        "friction": friction,
        "largest_curvature": largest,
        "chains": [chains.coarse, 2 * chains.coarse],
        "gradients": chains.gradients,
        "dtype": str(chains.full_loss.dtype).removeprefix("torch."),
        "precision": ready.precision,
        "batched": chains.full_loss.batched,
        "way": chains.label,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if chains.w.is_cuda else "cpu",
        "seconds": time.perf_counter() - begin,
    }


def tune(
    chains: Chains, gamma: float, step: float, friction: float, warm: bool
) -> tuple[float | None, float]:
    """h = step/√(nβλmax + γ) where the chains live, and λmax; None if a chain diverged on the way.

    The curvature at a w* of little loss is far below that at a distance, so h is set anew on the
    way there, at first from the curvature beside w*.
    """
    largest = 0.0 if warm else chains.curvature(8, 0.2 / math.sqrt(gamma))
    for times in (0.5, 1.0) if warm else (0.1, 0.2, 0.5, 1.0, 1.5, 1.5):
        largest = max(chains.curvature(8), largest if times < 1 else 0.0)
        h = step / math.sqrt(chains.nbeta * largest + gamma)
        chains.set(gamma, h, friction)
        chains.run(_steps(times, gamma, h))
        if not bool(chains.w.isfinite().all()):
            return None, largest
    largest = max(largest, chains.curvature(8))
    h = step / math.sqrt(chains.nbeta * largest + gamma)
    chains.set(gamma, h, friction)
    return h, largest


def _steps(times: float, gamma: float, h: float) -> int:
    """The steps of size h in some relaxation times 1/√γ."""
    return max(16, math.ceil(times / (math.sqrt(gamma) * h)))


def _production(chains: Chains, h: float, end: float, ready: Prepared, tol: float) -> Tensor | None:
    """Rounds until the relative error is ``tol`` or the time is over; None if a chain diverged."""
    # Rounds are short, or a slow network would overrun its share of the time.
    gamma = float(chains.gamma)
    size, parts = max(16, min(_steps(4.0, gamma, h), 64)), []
    begin, wanted = time.perf_counter(), 4
    while True:
        for _ in range(max(wanted - len(parts), 1)):
            part = chains.run(size)
            part[0] = chains.nbeta * (part[0] - ready.initial_loss)
            if not bool(part.isfinite().all()):
                return None
            parts.append(part)
            if len(parts) >= 4 and time.perf_counter() > end:
                break
        traces = torch.cat(parts, 2)
        found = summarize(traces, chains.coarse, gamma, chains.center.numel())
        accurate = found["stderr"] <= tol * abs(found["value"]) and found["rhat"] < 1.02
        long_enough = traces.shape[2] >= _steps(30.0, gamma, h)
        now = time.perf_counter()
        if now > end or (accurate and long_enough and found["drift"] < 2):
            return traces
        pace = (now - begin) / len(parts)
        wanted = len(parts) + max(1, min(len(parts) // 4, int((end - now) / pace)))


def compare_precision(chains: Chains) -> Row:
    """What float32 changes, at the positions of two chains: nβ·ΔL and the gradient's rel. error."""
    used = chains.full_loss
    x, y = (torch.cat(parts) for parts in zip(*used.chunks, strict=True))
    where = chains.w[-2:]
    loss, slope = used(where)
    try:
        used.model.double()
        exact_loss, exact = FullLoss(used.model, x, y, 10_000, False)(where)
    except RuntimeError as failure:  # the reference itself must not be lost
        return {"error": str(failure).splitlines()[0]}
    finally:
        used.model.to(used.dtype)
    error = ((slope - exact).norm(dim=1) / exact.norm(dim=1)).max()
    return {
        "energy": float((chains.nbeta * (loss - exact_loss)).abs().max()),
        "gradient": float(error),
    }


def references(args: argparse.Namespace) -> None:
    begin, end = time.monotonic(), time.monotonic() + 60 * args.minutes
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "networks.jsonl"
    names = matching(args.networks)
    prepared: dict[str, Prepared] = {}
    lists: dict[str, list[float]] = {}
    digests: dict[str, str] = {}
    for name in names:
        model, digests[name] = load_network(name, args)
        unit = scale_localization(model)
        # γ0 comes first for every network, then the neighbours, so that a cut run has the most.
        order = sorted(parse_gammas(args.gammas, unit), key=lambda g, u=unit: abs(math.log(g / u)))
        lists[name] = order
    rounds = itertools.zip_longest(*lists.values())
    tasks = [
        (name, gamma, place)
        for place, gammas in enumerate(rounds)
        for name, gamma in zip(names, gammas, strict=True)
        if gamma is not None and find_reference(read(path), name, digests[name], gamma) is None
    ]
    if args.train_only:
        return
    # The first γ of each network may take three times as long as another one.
    weights = [NETWORKS[name].share * (3 if place == 0 else 1) for name, _, place in tasks]
    table = [row for row in read(path) if row["network"] in names]
    for index, (name, gamma, _) in enumerate(tasks):
        if time.monotonic() > end:
            print(f"out of time: {len(tasks) - index} values are missing", flush=True)
            break
        try:
            if name not in prepared:
                prepared[name] = prepare(name, args)
            share = weights[index] / sum(weights[index:])
            seconds = max(end - time.monotonic(), 1.0) * share
            row = reference(name, gamma, prepared[name], seconds, args)
        except RuntimeError as error:  # one network that fails must not end the others
            print(f"{name}, γ = {gamma:.5g} fails: {error}", flush=True)
            continue
        append(path, row)
        table.append(row)
        print(
            f"{name}, γ = {gamma:.5g} ({row['over_scale']:.3g} γ0): {row['value']:.5g} ± "
            f"{row['stderr']:.2g}, h {row['coarse']:.5g}, h/2 {row['fine']:.5g}, R-hat "
            f"{row['rhat']:.3f}, {row['steps']} steps, {row['seconds']:.1f} s; "
            f"{time.monotonic() - begin:.0f} s in all",
            flush=True,
        )
    report(
        "References of λ̂",
        {"file": path},
        [
            {
                "network": row["network"],
                "P": row["parameters"],
                "n": row["samples"],
                "loss": row["initial_loss"],
                "γ": row["localization"],
                "γ/γ0": row["over_scale"],
                "λ̂": f"{row['value']:.5g}",
                "±": row["stderr"],
                "h": f"{row['coarse']:.5g}",
                "h/2": f"{row['fine']:.5g}",
                "virial": "/".join(f"{v:.4f}" for v in row["virial"]),
                "R-hat": row["rhat"],
                "drift": row["drift"],
                "seconds": row["seconds"],
            }
            for row in table
        ],
        None,
    )


# --- The command check ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """One call of ``lh.llc``; None leaves a setting to its default."""

    network: str
    seed: int
    localization: float | None = None
    budget: int | None = None
    batch_size: int | None = None
    chains: int | None = None
    dtype: str = "float32"
    device: str = "cpu"

    def row(self) -> Row:
        return {f"asked_{key}": value for key, value in self.__dict__.items()}


def run_task(task: Task, args: argparse.Namespace) -> Row:
    """What ``lh.llc`` says, or the error that it raises."""
    import lambdahat as lh

    torch.set_num_threads(args.threads)
    model, digest = load_network(task.network, args)
    x, y = (part.to(task.device) for part in NETWORKS[task.network].data(args.data))
    settings = {
        "localization": task.localization,
        "max_gradients": task.budget,
        "batch_size": task.batch_size,
        "chains": task.chains,
    }
    given = {key: value for key, value in settings.items() if value is not None}
    try:
        kind = getattr(torch, task.dtype)
        model = model.to(task.device)
        problem = lh.Problem(model, "cross_entropy", (x, y), norm="eval", dtype=kind)
        start = time.perf_counter()
        found = lh.llc(problem, seed=task.seed, **given)
        seconds = time.perf_counter() - start
        low, high = found.interval(0.95)
    except Exception as error:  # one run that breaks must not end the others
        return task.row() | {"weights": digest, "error": f"{type(error).__name__}: {error}"}
    return task.row() | {
        "weights": digest,
        "value": float(found),
        "stderr": float(found.stderr),
        "half_width": float(high - low) / 2,
        "localization": float(found.localization),
        "nbeta": float(found.nbeta),
        "status": found.status.name,
        "gradients": found.cost,
        "rhat": found.rhat,
        "ess": found.ess,
        "step_size": found.step_size,
        "seconds": seconds,
        "parameters": problem.num_parameters,
        "samples": problem.num_samples,
    }


def check_tasks(args: argparse.Namespace) -> Iterator[Task]:
    """Seed by seed, so that an early end cuts all networks alike."""
    names = matching(args.networks)
    scales = {name: scale_localization(load_network(name, args)[0]) for name in names}
    where = args.dtype, args.device
    for seed, name in itertools.product(range(args.first, args.first + args.seeds), names):
        for item in args.localization.split(","):
            gamma = None if item == "rule" else localization_of(item, name, scales[name], args)
            yield Task(name, seed, gamma, args.budget, args.batch_size, None, *where)


def localization_of(item: str, name: str, unit: float, args: argparse.Namespace) -> float:
    """A number, a multiple of γ0, or "reference": the stored γ that is closest to γ0."""
    if item != "reference":
        return parse_gammas(item, unit)[0]
    stored = [row["localization"] for row in read(args.references) if row["network"] == name]
    if not stored:
        raise SystemExit(f"{args.references} has no reference of {name}: see --networks")
    return min(stored, key=lambda gamma: abs(math.log(gamma / unit)))


def invariance_tasks(args: argparse.Namespace) -> Iterator[Task]:
    names = [
        name
        for name in matching(args.networks)
        if name in ("digits-mlp", "narrow-mlp", "narrow-cnn")
    ]
    counts = {name: len(NETWORKS[name].data(args.data)[0]) for name in names}
    per_chain = args.budget or STEPS_PER_CHAIN
    kinds = "float32", "float64"
    grid = list(itertools.product((1.0, 0.25, 4.0), (512, 64, None), (4, 2, 16), kinds))
    for seed in range(args.first, args.first + args.seeds):
        for (multiple, batch, chains, dtype), name in itertools.product(grid, names):
            yield Task(
                name,
                seed,
                None,
                round(multiple * per_chain * chains),
                batch or counts[name],
                chains,
                dtype,
                args.device,
            )


def check(args: argparse.Namespace) -> None:
    tasks = list((invariance_tasks if args.invariance else check_tasks)(args))
    digests = {task.network: load_network(task.network, args)[1] for task in tasks}
    done = {task_key(row): row for row in read(args.json) if "error" not in row}
    keys = [task_key(task.row() | {"weights": digests[task.network]}) for task in tasks]
    left = [task for task, key in zip(tasks, keys, strict=True) if key not in done]
    args.json.parent.mkdir(parents=True, exist_ok=True)
    for row in in_processes(partial(run_task, args=args), left, args.workers, args.minutes):
        append(args.json, row)
        print(describe(row), flush=True)
    last = {task_key(row): row for row in read(args.json)}
    rows = [last[key] for key in keys if key in last]
    for row in rows:
        if "error" in row:
            print(f"error: {row['asked_network']}, seed {row['asked_seed']}: {row['error']}")
    good = [row for row in rows if "error" not in row]
    table = invariance_table(good) if args.invariance else check_table(good, args)
    title = "What is estimated does not depend on how" if args.invariance else "λ̂ of networks"
    setting = {"device": args.device, "workers": args.workers, "torch": torch.__version__}
    report(
        title, setting | {"runs": len(rows), "missing": len(keys) - len(rows)}, table, args.summary
    )


def task_key(row: Row) -> str:
    asked = {key: value for key, value in row.items() if key.startswith("asked_")}
    return json.dumps(asked | {"weights": row["weights"]}, sort_keys=True)


def describe(row: Row) -> str:
    named = f"{row['asked_network']}, seed {row['asked_seed']}"
    if "error" in row:
        return f"{named}: {row['error']}"
    return (
        f"{named}: γ = {row['localization']:.5g}, {row['value']:.4g} ± {row['stderr']:.2g}, "
        f"{row['status']}, {row['gradients']} gradients, {row['seconds']:.1f} s"
    )


def check_table(rows: list[Row], args: argparse.Namespace) -> list[Row]:
    """One line for each network and γ."""
    known = read(args.references)
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["asked_network"], f"{row['localization']:.9g}"), []).append(row)
    table = []
    for (name, _), group in groups.items():
        first = group[0]
        found = find_reference(known, name, first["weights"], first["localization"])
        line: Row = {
            "network": name,
            "P": first["parameters"],
            "n": first["samples"],
            "γ": first["localization"],
            "reference": "no reference",
        }
        values = [row["value"] for row in group]
        line |= {
            "±": None,
            "mean λ̂": f"{statistics.fmean(values):.4g}",
            "mean stderr": statistics.fmean(row["stderr"] for row in group),
            "RMSE": None,
            "RMSE %": None,
            "intervals": None,
        }
        if found is not None:
            truth, error = found["value"], found["stderr"]
            squares = [(value - truth) ** 2 for value in values]
            held = [
                abs(row["value"] - truth) <= math.hypot(row["half_width"], 1.96 * error)
                for row in group
            ]
            rmse = math.sqrt(statistics.fmean(squares))
            line |= {
                "reference": f"{truth:.5g}",
                "±": error,
                "RMSE": rmse,
                "RMSE %": 100 * rmse / abs(truth),
                "intervals": f"{sum(held)} of {len(held)}",
            }
        table.append(
            line
            | {
                "statuses": counted(row["status"] for row in group),
                "gradients": round(statistics.median(row["gradients"] for row in group)),
                "seconds": statistics.median(row["seconds"] for row in group),
            }
        )
    return table


def invariance_table(rows: list[Row]) -> list[Row]:
    """One line for each network: are γ and nβ the same in all runs, and do the values agree?"""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["asked_network"], []).append(row)
    table = []
    for name, group in groups.items():
        converged = [row for row in group if row["status"] == "CONVERGED"]
        agree = [
            abs(a["value"] - b["value"]) <= 3 * math.hypot(a["stderr"], b["stderr"])
            for a, b in itertools.combinations(converged, 2)
        ]
        line: Row = {"network": name, "runs": len(group)}
        for label, key in (("γ", "localization"), ("nβ", "nbeta")):
            values = [row[key] for row in group]
            same = max(values) - min(values) <= 1e-6 * max(values)
            line[label] = f"{values[0]:.6g}" if same else f"{min(values):.6g} to {max(values):.6g}"
            line[f"one {label}"] = same
        values = [row["value"] for row in converged]
        table.append(
            line
            | {
                "converged": len(converged),
                "mean λ̂": f"{statistics.fmean(values):.4g}" if values else None,
                "least": min(values, default=None),
                "largest": max(values, default=None),
                "pairs that agree %": 100 * statistics.fmean(agree) if agree else None,
                "statuses": counted(row["status"] for row in group),
            }
        )
    return table


# --- Masses --------------------------------------------------------------------------------------


FRICTIONS = 0.06, 0.12, 0.25, 0.5, 1.0, 2.0  # over the critical damping of the flattest directions


def mass(args: argparse.Namespace) -> None:
    """Whether chains with a mass need fewer gradients, at the best of several frictions.

    The mass is made of Hessians at two places where chains have been, and the step from those at
    two others. "kronecker" is a diagonal in the eigenvectors of a Kronecker product, tensor by
    tensor.
    """
    done = {(row["network"], row["seed"]) for row in read(args.json)}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    for seed, name in itertools.product(range(args.seeds), matching(args.networks)):
        if (name, seed) in done or time.monotonic() - start > 60 * args.minutes:
            continue
        row = compare_masses(name, seed, args)
        append(args.json, row)
        print(json.dumps(row), flush=True)
    groups: dict[str, list[Row]] = {}
    for row in read(args.json):
        groups.setdefault(row["network"], []).append(row)
    table = []
    for name, group in groups.items():
        line: Row = {"network": name, "P": group[0]["P"], "seeds": len(group)}
        for kind in group[0]["draws"]:
            ratios = [row["draws"][kind] / row["draws"]["none"] for row in group]
            label = "draws per 1,000 gradients" if kind == "none" else f"{kind}, times"
            values = [row["draws"]["none"] for row in group] if kind == "none" else ratios
            line[label] = statistics.geometric_mean(values)
        table.append(line)
    setting = {"device": args.device, "torch": torch.__version__, "steps": args.steps}
    report("What a mass gains", setting, table, args.summary)


def compare_masses(name: str, seed: int, args: argparse.Namespace) -> Row:
    """Independent draws per 1,000 gradients for each mass."""
    import lambdahat as lh

    model, _ = load_network(name, args)
    x, y = (part.to(args.device) for part in NETWORKS[name].data(args.data))
    problem = lh.Problem(model.to(args.device), "cross_entropy", (x, y), norm="eval")
    found = lh.llc(problem, seed=seed, chains=4, draws=300, kernel="kinetic", keep_parameters=True)
    gamma, nbeta = float(found.localization), found.nbeta
    size = problem.num_parameters
    places = [chain[-1] for chain in found.chains.parameters]
    hessians = [nbeta * lh.hessian(problem.at(place)).dense().double() for place in places]
    flat = gamma * torch.eye(size, dtype=torch.float64, device=args.device)
    mean = (hessians[0] + hessians[1]) / 2 + flat
    draws: dict[str, float] = {}
    frictions: dict[str, float] = {}
    every: dict[str, dict[float, float]] = {}
    shapes = [tensor.shape for tensor in model.parameters()]
    for kind, scale in scales(mean, shapes, gamma).items():
        tops = [torch.linalg.eigvalsh(scale @ (held + flat) @ scale)[-1] for held in hessians[2:]]
        h = 0.6 / math.sqrt(float(max(tops)))
        slow = 2 * math.sqrt(gamma * float((scale @ scale).diagonal().mean()))
        used = scale.diagonal() if kind in ("tensor", "diagonal") else scale
        given = None if kind == "none" else used.to(problem.vector)
        rates = {}
        for factor in FRICTIONS:
            kernel = lh.sampling.Kinetic(h, nbeta, gamma, scale=given, friction=factor * slow)
            chains = lh.sampling.sample(
                problem,
                kernel,
                4,
                args.steps,
                seed,
                burn_in=args.steps // 2,
                batch_size=problem.num_samples,
            )
            rates[factor] = 1000 * chains.diagnostics.ess_mean / (4 * args.steps)
        every[kind] = rates
        frictions[kind] = max(rates, key=lambda factor: rates[factor])
        draws[kind] = rates[frictions[kind]]
    return {
        "network": name,
        "seed": seed,
        "P": size,
        "γ": gamma,
        "draws": draws,
        "frictions": frictions,
        "by friction": every,
    }


def scales(mean: Tensor, shapes: list[torch.Size], gamma: float) -> dict[str, Tensor]:
    """Inverse square roots of the masses, as matrices."""
    diagonal = mean.diagonal().clamp_min(gamma)
    tensor, block, kronecker = (
        torch.empty_like(diagonal),
        torch.zeros_like(mean),
        torch.zeros_like(mean),
    )
    begin = 0
    for shape in shapes:
        part = slice(begin, begin := begin + shape.numel())
        tensor[part] = diagonal[part].mean()
        values, vectors = torch.linalg.eigh(mean[part, part])
        block[part, part] = (vectors * values.abs().clamp_min(gamma).rsqrt()) @ vectors.T
        if len(shape) > 1:
            parted = mean[part, part].reshape(2 * (shape[0], shape.numel() // shape[0]))
            rows = torch.linalg.eigh(parted.diagonal(dim1=1, dim2=3).sum(-1)).eigenvectors
            columns = torch.linalg.eigh(parted.diagonal(dim1=0, dim2=2).sum(-1)).eigenvectors
            vectors = torch.kron(rows, columns)
            values = ((mean[part, part] @ vectors) * vectors).sum(0)
        kronecker[part, part] = (vectors * values.abs().clamp_min(gamma).rsqrt()) @ vectors.T
    one = torch.eye(len(mean), dtype=mean.dtype, device=mean.device)
    return {
        "none": one,
        "tensor": tensor.rsqrt().diag(),
        "diagonal": diagonal.rsqrt().diag(),
        "kronecker": kronecker,
        "block": block,
    }


def counted(names: Iterator[str]) -> str:
    known = list(names)
    return " ".join(f"{name}:{known.count(name)}" for name in sorted(set(known)))


# --- Files and arguments -------------------------------------------------------------------------


def read(path: Path) -> list[Row]:
    """The lines of a file; half a line of a run that was killed is left out."""
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def append(path: Path, row: Row) -> None:
    whole = not path.is_file() or path.read_bytes()[-1:] in (b"", b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write(("" if whole else "\n") + json.dumps(row) + "\n")


def find_reference(rows: list[Row], name: str, digest: str, gamma: float) -> Row | None:
    """The reference of these weights at this γ; values between two references are not known.

    Of several references of one γ it is the first, with the mean of all weighted by their errors.
    """
    same = [
        row
        for row in rows
        if row["network"] == name
        and row["weights"] == digest
        and math.isclose(row["localization"], gamma, rel_tol=1e-6)
    ]
    if not same:
        return None
    weights = [row["stderr"] ** -2 for row in same]
    value = sum(w * row["value"] for w, row in zip(weights, same, strict=True)) / sum(weights)
    return same[0] | {"value": value, "stderr": sum(weights) ** -0.5}


def matching(globs: str) -> list[str]:
    names = [
        name for name in NETWORKS if any(fnmatch.fnmatch(name, glob) for glob in globs.split(","))
    ]
    if not names:
        raise SystemExit(f"--networks matches none of {', '.join(NETWORKS)}, got {globs!r}")
    return names


def arguments() -> argparse.Namespace:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    commands = parser.add_subparsers(dest="command", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--networks", default="*", help=f"globs of {', '.join(NETWORKS)}")
    shared.add_argument("--data", type=Path, default=Path("carry/mnist"), help="MNIST's folder")
    shared.add_argument("--weights", type=Path, default=RESULTS, help="folder of the weights")
    shared.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    shared.add_argument("--threads", type=int, default=1, help="torch's CPU threads")
    shared.add_argument("--minutes", type=float, default=math.inf, help="start nothing later")

    first = commands.add_parser("references", parents=[shared], help="compute the references")
    first.add_argument("--out", type=Path, default=RESULTS, help="folder of networks.jsonl")
    first.add_argument("--gammas", default="0.125x,0.5x,1x,2x,100", help="0.5x is half of γ0")
    first.add_argument("--tol", type=float, default=0.004, help="relative error to stop at")
    first.add_argument("--step", type=float, default=0.5, help="h·√(nβλmax + γ)")
    first.add_argument("--chains", type=int, help="chains at h; twice as many run at h/2")
    first.add_argument("--samples", type=int, help="only the first few: shows that it runs")
    first.add_argument("--no-graphs", dest="graphs", action="store_false")
    first.add_argument("--train-only", action="store_true", help="only train missing networks")

    second = commands.add_parser("check", parents=[shared], help="compare lh.llc with them")
    second.add_argument("--references", type=Path, default=RESULTS / "networks.jsonl")
    second.add_argument("--seeds", type=int, help="10 by default, 5 with --invariance")
    second.add_argument("--first", type=int, default=0, help="the first seed")
    second.add_argument(
        "--localization",
        default="rule",
        help="rule, reference, 0.5x or a number, or several with commas between",
    )
    second.add_argument("--budget", type=int, help="max_gradients; per chain with --invariance")
    second.add_argument("--batch-size", type=int)
    second.add_argument("--dtype", default="float32", choices=("float32", "float64"))
    second.add_argument("--invariance", action="store_true")
    second.add_argument("--workers", type=int, default=1, help="processes")
    second.add_argument("--json", type=Path, default=Path("llc_networks.jsonl"))
    second.add_argument("--summary", type=Path, help="write the table to this file as JSON")

    third = commands.add_parser("mass", parents=[shared], help="whether a mass would help")
    third.add_argument("--seeds", type=int, default=3)
    third.add_argument("--steps", type=int, default=4000, help="of each chain")
    third.add_argument("--json", type=Path, default=Path("llc_mass.jsonl"))
    third.add_argument("--summary", type=Path, help="write the table to this file as JSON")
    args = parser.parse_args()
    if args.command == "references":
        args.minutes = min(args.minutes, 60.0)
    elif args.command == "check" and args.seeds is None:
        args.seeds = 5 if args.invariance else 10
    return args


def main() -> None:
    args = arguments()
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[variable] = str(args.threads)  # the processes of ``check`` inherit these
    torch.set_num_threads(args.threads)
    {"references": references, "check": check, "mass": mass}[args.command](args)


if __name__ == "__main__":
    main()
