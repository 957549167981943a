"""How fast does each optimiser train LeNet-5 on Fashion-MNIST, per epoch and per second?

All start from the same weights and read the same batches in the same order. Only training is
timed; the test set is read between epochs. Where an optimiser averages its iterates (once per epoch
from half of the epochs on) the test figures are the average's. With --tune each runs an epoch at a
third, one and three times its rate and keeps the best on 5,000 images held out of the training set;
all then train on the same remaining images. Peers (pytorch_optimizer's PAdam and Lookahead) take
part where installed or found under --peer-path.

--json FILE writes every epoch of every optimiser, and the table of the last epochs beside it as
FILE-summary.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timing import arguments, report, set_tf32, setting
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import lambdahat as lh
from lambdahat import optim
from lambdahat._core.rng import generator
from lambdahat.bench.timing import synchronize

Pair = tuple[Tensor, Tensor]
HELD_OUT = 5000
DECAY = 5e-4  # of SGD's gradient; decoupled decays are their optimisers' defaults


def peer(name: str) -> Any:
    return getattr(importlib.import_module("pytorch_optimizer"), name)


def makers(epochs: int, steps: int) -> dict[str, tuple[float, Callable[[nn.Module, float], Any]]]:
    """The rate each starts from, and what makes it from a model and a rate."""
    averages = {"average_start": max(1, epochs // 2) * steps, "average_every": steps}
    return {
        "SGD": (
            0.05,
            lambda m, lr: torch.optim.SGD(m.parameters(), lr, momentum=0.9, weight_decay=DECAY),
        ),
        "Adam": (1e-3, lambda m, lr: torch.optim.Adam(m.parameters(), lr)),
        "NGD": (0.05, lambda m, lr: optim.NGD(m.parameters(), lr, momentum=0.9)),
        "KFAC": (0.03, lambda m, lr: optim.KFAC(m, lr, damping=0.03, kl_clip=1e-3)),
        "LanczosNewton": (
            1.0,
            lambda m, lr: optim.LanczosNewton(m.parameters(), lr, damping=10.0, pairs=10, every=10),
        ),
        "SWA": (0.05, lambda m, lr: optim.SWA(m.parameters(), lr, weight_decay=DECAY, **averages)),
        "Gadam": (1e-3, lambda m, lr: optim.Gadam(m.parameters(), lr, **averages)),
        "GadamX": (0.1, lambda m, lr: optim.GadamX(m.parameters(), lr, **averages)),
        "Gadam + Lookahead": (
            1e-3,
            lambda m, lr: optim.Lookahead(optim.Gadam(m.parameters(), lr, **averages)),
        ),
        "Padam": (0.1, lambda m, lr: optim.Padam(m.parameters(), lr, form="coded", amsgrad=False)),
        "Padam, pytorch_optimizer": (
            0.1,
            lambda m, lr: peer("PAdam")(m.parameters(), lr, partial=0.125),
        ),
        "Lookahead(Adam)": (
            1e-3,
            lambda m, lr: optim.Lookahead(torch.optim.Adam(m.parameters(), lr)),
        ),
        "Lookahead(Adam), pytorch_optimizer": (
            1e-3,
            lambda m, lr: peer("Lookahead")(torch.optim.Adam(m.parameters(), lr)),
        ),
    }


def images(path: Path | None) -> tuple[Pair, Pair]:
    """Training and test images (n, 1, 28, 28), standardised by the training pixels, and labels
    (n,).
    """
    if path is None:
        train, test = lh.data.fashion_mnist()
    else:
        with np.load(path) as stored:
            train, test = (
                tuple(torch.from_numpy(stored[f"{part}_{kind}"]) for kind in ("images", "labels"))
                for part in ("train", "test")
            )
    pixels = train[0].float()
    mean, deviation = pixels.mean(), pixels.std()

    def ready(pair: Pair) -> Pair:
        return (pair[0].float().reshape(-1, 1, 28, 28) - mean) / deviation, pair[1].long()

    return ready(train), ready(test)


@torch.no_grad()
def judge(model: nn.Module, data: Pair) -> tuple[float, float]:
    """Mean loss and accuracy."""
    x, y = data
    outputs = torch.cat([model(part) for part in x.split(2000)])
    return cross_entropy(outputs, y).item(), (outputs.argmax(1) == y).float().mean().item()


def train_epoch(
    model: nn.Module, optimizer: Any, data: Pair, batch_size: int, epoch: int
) -> Tensor:
    """One pass; the mean loss of its batches before their steps."""
    x, y = data
    order = torch.randperm(len(x), generator=generator(0, "order", epoch)).to(x.device)
    total = torch.zeros((), device=x.device)
    parts = order.split(batch_size)
    for rows in parts:
        xb, yb = x[rows], y[rows]
        if getattr(optimizer, "due", False):
            optimizer.observe(lh.Problem(model, "cross_entropy", (xb, yb)))
        optimizer.zero_grad()
        loss = cross_entropy(model(xb), yb)
        loss.backward()
        optimizer.step()
        total += loss.detach()
    return total / len(parts)


def run(
    make: Callable[[nn.Module], Any], data: Pair, test: Pair, epochs: int, batch_size: int
) -> list[dict[str, Any]]:
    """One row per epoch; ``seconds`` of training add up."""
    model = lh.models.lenet5(seed=0).to(data[0].device)
    optimizer = make(model)
    seconds, rows = 0.0, []
    for epoch in range(1, epochs + 1):
        synchronize()
        start = time.perf_counter()
        loss = train_epoch(model, optimizer, data, batch_size, epoch)
        synchronize()
        seconds += time.perf_counter() - start
        averaging = getattr(optimizer, "averaging", False)
        with optimizer.average() if averaging else nullcontext():
            test_loss, accuracy = judge(model, test)
        rows.append(
            {
                "epoch": epoch,
                "training loss": loss.item(),
                "test loss": test_loss,
                "test accuracy": accuracy,
                "averaged": bool(averaging),
                "seconds": seconds,
            }
        )
    return rows


def tuned(
    make: Callable[[nn.Module, float], Any],
    rate: float,
    data: Pair,
    held_out: Pair,
    batch_size: int,
) -> float:
    """The best of three rates after one epoch, by the loss of the held-out images."""
    losses = {}
    for lr in (rate / 3, rate, rate * 3):
        (row,) = run(lambda model, lr=lr: make(model, lr), data, held_out, 1, batch_size)
        losses[lr] = row["test loss"] if math.isfinite(row["test loss"]) else math.inf
    return min(losses, key=losses.__getitem__)


def summary(curves: dict[str, list[dict[str, Any]]], goal: float) -> list[dict[str, Any]]:
    """The last epoch of each, its cost against SGD's, and the seconds to the ``goal`` accuracy."""
    unit = curves["SGD"][-1]["seconds"] if "SGD" in curves else math.nan
    table = []
    for name, rows in curves.items():
        last = rows[-1]
        reached = [row for row in rows if row["test accuracy"] >= goal]
        table.append(
            {
                "by": name,
                "rate": last["rate"],
                "training loss": last["training loss"],
                "test loss": last["test loss"],
                "test accuracy": last["test accuracy"],
                "s per epoch": last["seconds"] / len(rows),
                "time / SGD's": last["seconds"] / unit,
                f"epochs to {goal:g}": reached[0]["epoch"] if reached else None,
                f"s to {goal:g}": reached[0]["seconds"] if reached else None,
            }
        )
    return table


def main() -> None:
    parser = arguments(__doc__)
    parser.set_defaults(batch_size=128)
    parser.add_argument(
        "--images", type=Path, help=".npz of train_images, train_labels, test_images, test_labels"
    )
    parser.add_argument(
        "--peer-path", type=Path, help="folder with a copy of pytorch_optimizer, put on sys.path"
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--only", nargs="*", help="names of optimisers")
    parser.add_argument("--tune", action="store_true", help="choose each rate among three")
    parser.add_argument("--goal", type=float, default=0.88, help="test accuracy to reach")
    args = parser.parse_args()
    if args.peer_path is not None:
        sys.path.append(str(args.peer_path.resolve()))
    set_tf32(False)
    train, test = (tuple(part.to(args.device) for part in pair) for pair in images(args.images))
    epochs = 2 if args.quick else args.epochs
    if args.quick:
        train, test = (
            tuple(part[: HELD_OUT + 2000] for part in train),
            tuple(part[:1000] for part in test),
        )
    data, held_out = (
        tuple(part[HELD_OUT:] for part in train),
        tuple(part[:HELD_OUT] for part in train),
    )
    described = setting(args) | {
        "epochs": epochs,
        "training images": len(data[0]),
        "rates tuned": args.tune,
    }
    table = makers(epochs, math.ceil(len(data[0]) / args.batch_size))
    # the first epoch warms up
    run(lambda model: table["SGD"][1](model, 0.01), data, test, 1, args.batch_size)
    curves: dict[str, list[dict[str, Any]]] = {}
    for name in args.only or table:
        rate, make = table[name]
        try:
            rate = tuned(make, rate, data, held_out, args.batch_size) if args.tune else rate
            rows = run(
                lambda model, make=make, rate=rate: make(model, rate),
                data,
                test,
                epochs,
                args.batch_size,
            )
        except (ImportError, AttributeError) as error:
            print(f"{name}: skipped, {type(error).__name__}: {error}")
            continue
        curves[name] = [{"by": name, "rate": rate, **row} for row in rows]
        print(f"{name}: test accuracy " + " ".join(f"{row['test accuracy']:.4f}" for row in rows))
        if args.json is not None:  # at once: a machine may be taken away
            every = {"title": "LeNet-5 on Fashion-MNIST, every epoch", "setting": described}
            every["rows"] = [row for rows in curves.values() for row in rows]
            args.json.write_text(json.dumps(every, indent=1) + "\n")
    path = None if args.json is None else args.json.with_stem(args.json.stem + "-summary")
    report("LeNet-5 on Fashion-MNIST, the last epoch", described, summary(curves, args.goal), path)


if __name__ == "__main__":
    main()
