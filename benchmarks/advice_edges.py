"""Does the advised interval contain the learning rate at which the training of networks becomes
unstable?

    python benchmarks/advice_edges.py calibration|held-out [--out FILE]

For each network (256 handwritten digits), at the start of training and at its end, with momentum 0
and 0.9, batches of 32 and all data: the advice, and the largest stable rate by bisection over
training runs of 100 steps (``largest_stable_rate`` with factor=None). Prints a row for each and how
many intervals contain it. The errors of ``advise`` for what the local quadratic leaves out come
from the set "calibration"; "held-out" has other architectures, activations and losses (14 of its 40
rates, the squared loss and part of the tanh CNN, had been seen when the errors were set).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import lambdahat
from lambdahat import Problem
from lambdahat.randommatrix import advise
from lambdahat.randommatrix.stable_rates import NoLimitError, largest_stable_rate

SAMPLES, STEPS, RUNS, TOL = 256, 100, 2, 0.1
RESULTS = Path(__file__).parent / "results"


class Transformer(nn.Module):
    """The eight rows of a digit as tokens."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.place = nn.Parameter(0.1 * torch.randn(8, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 2, 2 * width, dropout=0.0, batch_first=True, activation="gelu"
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x.view(-1, 8, 8)) + self.place
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(tokens.mean(dim=1))  # type: ignore[no-any-return]


def perceptron(
    sizes: list[int], activation: Callable[[], nn.Module], norm: bool = False
) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [
            nn.Linear(before, after),
            *([nn.LayerNorm(after)] if norm and after != 10 else []),
            activation(),
        ]
    return nn.Sequential(*layers[:-1])


def convolutional(
    widths: tuple[int, int], activation: Callable[[], nn.Module], norm: bool = False
) -> nn.Module:
    layers: list[nn.Module] = [nn.Unflatten(1, (1, 8, 8))]
    for before, after in itertools.pairwise((1, *widths)):
        norms = [nn.GroupNorm(2, after)] if norm else []
        layers += [nn.Conv2d(before, after, 3, padding=1), *norms, activation(), nn.AvgPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * widths[-1], 10))


SETS: dict[str, dict[str, tuple[Callable[[], nn.Module], str]]] = {
    "calibration": {
        "tanh perceptron": (lambda: perceptron([64, 32, 10], nn.Tanh), "cross_entropy"),
        "ReLU perceptron": (lambda: perceptron([64, 64, 32, 10], nn.ReLU), "cross_entropy"),
        "CNN": (lambda: convolutional((8, 16), nn.ReLU), "cross_entropy"),
        "transformer": (lambda: Transformer(16, 1), "cross_entropy"),
        "GELU perceptron with layer norm": (
            lambda: perceptron([64, 40, 40, 40, 10], nn.GELU, True),
            "cross_entropy",
        ),
    },
    "held-out": {
        "squared-loss perceptron": (lambda: perceptron([64, 48, 10], nn.SiLU), "mse"),
        "tanh CNN": (lambda: convolutional((6, 12), nn.Tanh), "cross_entropy"),
        "two-layer transformer": (lambda: Transformer(24, 2), "cross_entropy"),
        "softplus perceptron": (lambda: perceptron([64, 40, 24, 10], nn.Softplus), "cross_entropy"),
        "CNN with group norm": (lambda: convolutional((8, 12), nn.ReLU, True), "cross_entropy"),
    },
}


def digits(seed: int) -> tuple[Tensor, Tensor]:
    with np.load(Path(lambdahat.__file__).parent / "data" / "digits.npz") as stored:
        x, y = stored["images"], stored["labels"]
    chosen = np.random.default_rng(seed).permutation(len(x))[:SAMPLES]
    x = torch.as_tensor(x[chosen].reshape(SAMPLES, -1), dtype=torch.float32)
    return (x - x.mean()) / x.std(), torch.as_tensor(y[chosen], dtype=torch.int64)


def problem_of(make: Callable[[], nn.Module], loss: str, trained: bool, seed: int) -> Problem:
    torch.manual_seed(seed)
    model, (x, y) = make(), digits(seed)
    target = y if loss == "cross_entropy" else nn.functional.one_hot(y, 10).float()
    loss_of = nn.functional.cross_entropy if loss == "cross_entropy" else nn.functional.mse_loss
    if trained:
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        for _ in range(200):
            optimizer.zero_grad()
            loss_of(model(x), target).backward()
            optimizer.step()
    return Problem(model, loss, (x, target))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("set", choices=tuple(SETS))
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--networks", nargs="*", default=None, help="some of the set")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rows = []
    chosen = {name: SETS[given.set][name] for name in given.networks or SETS[given.set]}
    for name, (make, loss) in chosen.items():
        for trained in (False, True):
            problem = problem_of(make, loss, trained, given.seed)
            for size in (32, SAMPLES):
                for momentum in (0.0, 0.9):
                    found = advise(problem, "momentum", size, momentum=momentum)
                    rate = found["largest stable rate"]
                    low, high = rate.interval()
                    try:
                        edge = largest_stable_rate(
                            problem,
                            lambda p, lr, m=momentum: torch.optim.SGD(p, lr, momentum=m),
                            size,
                            steps=STEPS,
                            start=float(rate),
                            runs=RUNS,
                            tol=TOL,
                            factor=None,
                        )
                        value, error = float(edge), float(edge.stderr)
                    except NoLimitError:
                        value, error = math.nan, math.nan
                    row = {
                        "network": name,
                        "point": "end" if trained else "start",
                        "batch": size,
                        "momentum": momentum,
                        "rate": float(rate),
                        "low": low,
                        "high": high,
                        "edge": value,
                        "edge error": error,
                        "loss": problem.loss(),
                    }
                    rows.append(row)
                    print(json.dumps(row), flush=True)
    known = [row for row in rows if math.isfinite(row["edge"])]
    held = sum(row["low"] <= row["edge"] <= row["high"] for row in known)
    above = sum(row["edge"] < row["low"] for row in known)
    print(f"{given.set}: {held} of {len(known)} edges inside, {above} below the interval")
    out = given.out or RESULTS / f"advice-edges-{given.set}.json"
    out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
