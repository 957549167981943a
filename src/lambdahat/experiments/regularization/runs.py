"""Training under the rules of Table 4.1: what a cell of such an experiment is, and the rows it
gives.

Rules and seeds of a cell are trained together in one ``Stack``. A row is one rule at one seed:
final figures, their curves over the epochs, the leading eigenvalues of the Hessian, and the vectors
of the first layer where it has two inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lambdahat._core.progress import report
from lambdahat._core.rng import derived_seed, generator
from lambdahat.estimators import eigenpairs
from lambdahat.experiments.kit.cells import Cell, Row
from lambdahat.experiments.regularization.learning_rules import (
    ABSOLUTE,
    CURVED,
    DROPOUT,
    DROPPED,
    FLAT,
    SETTINGS,
    Setting,
    regime_of,
    rule_of,
)
from lambdahat.experiments.regularization.speeds import shortened
from lambdahat.experiments.regularization.stacks import Losses, Member, Stack
from lambdahat.operators.curvature import hessian
from lambdahat.optim.regularizers import layers_of
from lambdahat.problem import Problem

Pair = tuple[Tensor, Tensor]
CHUNK = 5000  # samples evaluated at once


@dataclass(frozen=True)
class RulesScale:
    """One scale. ``gain`` and ``stretch`` adapt Table 4.2 to another width and a shorter run
    (``Setting.scaled``).

    ``steep`` is the gain of ReLU from the large regime, where gradients grow with the weights and
    units die.
    """

    data: str
    training: int
    test: int
    width: int
    epochs: int
    batch: int
    seeds: int
    together: int  # seeds in a cell
    gain: float = 1.0
    steep: float = 1.0
    stretch: float = 1.0
    shrink: int = 1  # squares of so many pixels along a side become one
    eigenvalues: int = 10
    curvature: int = 2000  # training samples whose loss the eigenvalues are of
    points: int = 20  # of a curve
    groups: tuple[tuple[str, ...], ...] = (FLAT, CURVED, ABSOLUTE)  # rules trained together


@dataclass(frozen=True)
class Task:
    """A data set with its network: ``network(cell, regime, dropout, seed)``, ``data(cell)`` of its
    seeds, and losses.

    ``losses`` has the loss of each network, from outputs (N, n, k) and targets (N, n, …);
    ``measures`` what is reported of outputs (R, S, n, k) and targets (S, n, …). ``depth`` is the
    number of Lanczos steps for |H|θ.
    """

    name: str
    epochs: int  # of the thesis
    network: Callable[[Cell, str, float, int], nn.Module]
    data: Callable[[Cell], tuple[Pair, Pair | None]]
    losses: Losses
    measures: Callable[[Tensor, Tensor], dict[str, Tensor]]
    depth: int = 20


def cells_of(config: RulesScale) -> list[Cell]:
    """Activations × groups of rules × groups of seeds."""
    fields = asdict(config)
    seeds, together, groups = (fields.pop(name) for name in ("seeds", "together", "groups"))
    parts = [list(range(seeds))[start : start + together] for start in range(0, seeds, together)]
    return [
        {"activation": activation, "rules": list(rules), "seeds": part, **fields}
        for activation in ("tanh", "relu")
        for rules in groups
        for part in parts
    ]


def run_rules(task: Task, cell: Cell, device: str) -> list[Row]:
    """A row for each rule and seed of the cell."""
    training, test = (None if pair is None else _placed(pair, device) for pair in task.data(cell))
    assert training is not None
    steps = math.ceil(cell["training"] / cell["batch"])
    stack = Stack([_member(task, cell, label, steps) for label in cell["rules"]], device)
    curves: dict[str, list[Tensor]] = {}
    epochs = _recorded(cell["epochs"], cell["points"])
    # dropout, the one thing that is random beyond the order of batches, draws from the global
    # generator
    with torch.random.fork_rng(devices=[] if device == "cpu" else [device]):
        torch.manual_seed(derived_seed(cell["seeds"][0], task.name, cell["activation"], "dropout"))
        for epoch, batches in enumerate(_epochs(cell, steps, device)):
            if epoch in epochs:
                _record(curves, _measured(task, stack, training, test))
            for number, rows in enumerate(batches):
                stack.step(*_taken(training, rows), task.losses, epoch * steps + number)
            report(f"{task.name} {cell['activation']}", epoch + 1, cell["epochs"])
    _record(curves, _measured(task, stack, training, test))
    return [
        shortened(
            {"rule": label, "seed": seed}
            | _row(task, stack, training, cell, curves, epochs, (member, place))
        )
        for member, label in enumerate(cell["rules"])
        for place, seed in enumerate(cell["seeds"])
    ]


def _setting(task: Task, cell: Cell, regime: str) -> Setting:
    gain = cell["steep" if (cell["activation"], regime) == ("relu", "large") else "gain"]
    return SETTINGS[task.name, cell["activation"]].scaled(
        gain, cell["stretch"], cell["epochs"] / task.epochs
    )


def _member(task: Task, cell: Cell, label: str, steps: int) -> Member:
    """The same initial weights for every rule of a regime (§4.4)."""
    regime, dropout = regime_of(label), DROPPED if label == DROPOUT else 0.0
    setting = _setting(task, cell, regime)
    streams = [derived_seed(seed, task.name, regime) for seed in cell["seeds"]]
    models = [task.network(cell, regime, dropout, stream) for stream in streams]
    return Member(
        rule_of(label, setting, steps, layers_of(models[0]), task.depth),
        models,
        setting.rate(label),
    )


def _placed(pair: Pair, device: str) -> Pair:
    return pair[0].to(device), pair[1].to(device)


def _recorded(epochs: int, points: int) -> list[int]:
    """The epochs before which a curve has its points, and the end."""
    return sorted({round(epochs * point / points) for point in range(points + 1)})


def _epochs(cell: Cell, steps: int, device: str) -> Iterator[Iterator[Tensor]]:
    """Each epoch's batches: samples (S, B), in an order of each seed's own that is the same for
    all rules.
    """
    rngs = [generator(seed, "order of batches") for seed in cell["seeds"]]
    for _ in range(cell["epochs"]):
        orders = [torch.randperm(cell["training"], generator=rng) for rng in rngs]
        yield iter(torch.stack(orders).to(device).split(cell["batch"], dim=1))


def _taken(pair: Pair, rows: Tensor) -> Pair:
    """The samples (S, B) of inputs and targets (S, n, …)."""
    seeds = torch.arange(len(rows), device=rows.device).unsqueeze(1)
    return pair[0][seeds, rows], pair[1][seeds, rows]


@torch.no_grad()
def _measured(task: Task, stack: Stack, training: Pair, test: Pair | None) -> dict[str, Tensor]:
    """What is reported of both parts, and ‖θ‖₂, each (R, S)."""
    stack.template.eval()
    out: dict[str, Tensor] = {}
    for name, pair in (("training", training), ("test", test)):
        if pair is not None:
            parts = [stack.per_member(stack.outputs(part)) for part in pair[0].split(CHUNK, dim=1)]
            outputs = torch.cat(parts, dim=2)
            gone = ~outputs.isfinite().flatten(2).all(-1)
            found = task.measures(outputs, pair[1])
            out |= {
                f"{name} {key}": value.double().masked_fill(gone, math.nan)
                for key, value in found.items()
            }
    stack.template.train()
    return out | {"norm": stack.norms()}


def _record(curves: dict[str, list[Tensor]], measured: dict[str, Tensor]) -> None:
    for name, values in measured.items():
        curves.setdefault(name, []).append(values.cpu())


def _row(
    task: Task,
    stack: Stack,
    training: Pair,
    cell: Cell,
    curves: dict[str, list[Tensor]],
    epochs: list[int],
    place: tuple[int, int],
) -> Row:
    found = {name: [float(values[place]) for values in points] for name, points in curves.items()}
    row: Row = {name: values[-1] for name, values in found.items()}
    row |= {
        f"{name} curve": [float(f"{value:.5g}") for value in values]
        for name, values in found.items()
    }
    model = stack.network(*place).eval()
    pair = training[0][place[1], : cell["curvature"]], training[1][place[1], : cell["curvature"]]
    row |= {"recorded": epochs, "eigenvalues": _eigenvalues(task, model, pair, cell["eigenvalues"])}
    return row | _vectors(model, cell["seeds"][place[1]] == 0)


def _eigenvalues(task: Task, model: nn.Module, pair: Pair, count: int) -> list[float]:
    """The leading eigenvalues of the Hessian of the loss alone (§5.7); none where training
    diverged.
    """
    if not all(bool(parameter.isfinite().all()) for parameter in model.parameters()):
        return []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return task.losses(outputs.unsqueeze(0), targets.unsqueeze(0))[0]

    problem = Problem(model, loss, pair)
    if not math.isfinite(float(problem.loss())):
        return []
    return [
        float(f"{value:.5g}") for value in eigenpairs(hessian(problem), k=count, tol=1e-4).values
    ]


def _vectors(model: nn.Module, shown: bool) -> Row:
    """Input-to-hidden weights as vectors in the plane, and how many of them count:
    (Σ‖w‖²)²/Σ‖w‖⁴.
    """
    first = next(
        layer for layer in model.modules() if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d)
    )
    weights = first.weight.detach().flatten(1).double().cpu()
    if weights.shape[1] != 2:
        return {}
    squares = weights.square().sum(1)
    row: Row = {"vectors": float(squares.sum() ** 2 / squares.square().sum())}
    return row | (
        {"weights": [[float(f"{part:.4g}") for part in vector] for vector in weights]}
        if shown
        else {}
    )


def logistic(outputs: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of the softmax, network by network."""
    return cross_entropy(outputs.transpose(1, 2), labels, reduction="none").mean(1)


def quadratic(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean of ½(f − y)², network by network."""
    return 0.5 * (outputs[..., 0] - targets).square().mean(1)


def right(outputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The share of right answers."""
    return {"accuracy": (outputs.argmax(-1) == labels).double().mean(-1)}
