"""What does a training step cost with NGD and KFAC, beside one of SGD?

The network is the MLP 784-256-256-10 on batches of 128 random images; a step is zero_grad, forward, backward and the
optimiser's own. Times are averages over whole update periods (NGD: rank 80, an update every 4 steps; KFAC: an inversion
every 10), medians over interleaved rounds. With --device cuda also ten seeds of NGD trained together against one, each
as ``fit_many`` steps them: the step of all members, data included, replayed from a CUDA graph.

    python benchmarks/optimizer_cost.py --json out/optimizer_cost.json
    python benchmarks/optimizer_cost.py --device cuda --json out/optimizer_cost_cuda.json
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from timing import arguments, compare, report, set_tf32, setting
from torch.nn.functional import cross_entropy

from lambdahat import optim
from lambdahat.models import mlp
from lambdahat.problem import Problem
from lambdahat.training.ensembles import DEFAULTS
from lambdahat.training.stacked_steps import StackedDescent, StackedModel, Stepped

SIZES, STEPS = [784, 256, 256, 10], 40  # 40 steps are whole periods of 4 and of 10
SGD, LIMITS = "SGD", {"cpu": {"NGD": 2.2, "KFAC": 2.5, "KFAC, rank 32": 2.5}, "cuda": {}}


def batch(size: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    x, y = torch.rand(size, SIZES[0], generator=rng), torch.randint(0, SIZES[-1], (size,), generator=rng)
    return x.to(device), y.to(device)


def makers() -> dict[str, Callable[[torch.nn.Module], Any]]:
    found: dict[str, Callable[[torch.nn.Module], Any]] = {
        SGD: lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        "NGD": lambda model: optim.NGD(model.parameters(), lr=0.01, rank=80, period=4),
    }
    if hasattr(optim, "KFAC"):
        found["KFAC"] = lambda model: optim.KFAC(model, lr=0.01, damping=1e-2, inverse_every=10)
        found["KFAC, rank 32"] = lambda model: optim.KFAC(model, lr=0.01, damping=1e-2, inverse_every=10, rank=32)
    return found


def steps(make: Callable[[torch.nn.Module], Any], size: int, device: str) -> Callable[[], None]:
    """A function that takes ``STEPS`` steps; the first call leaves the optimiser's first, denser updates behind."""
    model, (x, y) = mlp(SIZES).to(device), batch(size, device)
    optimizer = make(model)

    def run() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()

    return run


def member_steps(members: int, size: int, device: str) -> Callable[[], None]:
    """The same for so many seeds of NGD at once, from data on the device."""
    data = batch(STEPS * size, device)
    models = [mlp(SIZES, seed=seed).to(device) for seed in range(members)]
    stacked = StackedModel(models, Problem(models[0], "cross_entropy", data))
    descent = StackedDescent(stacked.parameters, "ngd", {**DEFAULTS["ngd"], "lr": 0.01, "rank": 80})
    stepped = Stepped(stacked, descent, data)
    orders = torch.stack([torch.randperm(STEPS * size) for _ in range(members)]).to(device)
    return lambda: stepped.epoch(orders, size)


def main() -> None:
    parser = arguments(__doc__)
    parser.set_defaults(batch_size=128)
    args = parser.parse_args()
    set_tf32(False)
    kind, described = args.device.partition(":")[0], setting(args) | {"network": "-".join(map(str, SIZES))}
    tasks = {name: steps(make, args.batch_size, args.device) for name, make in makers().items()}
    for members in (1, 10) if kind == "cuda" else ():
        tasks[f"NGD, {members} stacked"] = member_steps(members, args.batch_size, args.device)
    times = compare(tasks, 1 if args.quick else 15)
    unit, table = times[SGD], []
    for name, seconds in times.items():
        row = {"optimiser": name, "ms a step": 1e3 * seconds / STEPS, "over SGD": seconds / unit}
        table.append(row | {"at most": LIMITS[kind].get(name)})
    if kind == "cuda":
        several = times["NGD, 10 stacked"] / times["NGD, 1 stacked"]
        table.append({"optimiser": "10 seeds over 1", "over SGD": several, "at most": 2.0})
    report("Cost of a training step", described, table, args.json)


if __name__ == "__main__":
    main()
