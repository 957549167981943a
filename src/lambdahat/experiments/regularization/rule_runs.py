"""Training under the rules of Table 4.1: what a cell of such an experiment is, and its rows.

Rules and seeds of a cell are trained together in one ``Stack``: parameters are stacked and the
forward pass runs under ``vmap``. A row is one rule at one seed: final figures, their curves over
the epochs, the leading eigenvalues of the Hessian, and the vectors of the first layer where it has
two inputs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.functional import cross_entropy

from lambdahat._core.device import Replay, side_stream
from lambdahat._core.progress import report
from lambdahat._core.rng import derived_seed, generator
from lambdahat.estimators import eigenpairs
from lambdahat.experiments.kit.cells import Cell, Row
from lambdahat.experiments.regularization.learning_rules import (
    ABSOLUTE,
    CURVED,
    DROPOUT,
    DROPPED,
    EARLY,
    FLAT,
    SETTINGS,
    RuleRates,
    regime_of,
    rule_of,
)
from lambdahat.operators.curvature import hessian
from lambdahat.optim.regularizers import READINGS, BatchProduct, Product, Rule, layers_of
from lambdahat.problem import Problem

Losses = Callable[[Tensor, Tensor], Tensor]
NEGLIGIBLE = 1e-5  # of the largest: from here on Lanczos has found all there is to find in float32
# of the iteration for the sign of T: eigenvalues from 1e-5 of the largest on get theirs
SQUARINGS = 30


@dataclass(frozen=True)
class RuleMember:
    """A rule from one initialisation regime: where it starts, how fast it learns, and what it
    adds (None: SGD).
    """

    rule: Rule | None
    models: Sequence[nn.Module]
    learning_rate: float


class Stack:
    """R members × S seeds of one architecture; every parameter is held as (R·S, *shape).

    One step is θ ← θ − α∇L − term(θ), Table 4.1 of the regularization thesis. Networks do not mix:
    the gradient of the sum of all losses is each network's own, and so is its product Hθ.
    """

    def __init__(self, members: Sequence[RuleMember], device: torch.device | str = "cpu") -> None:
        self.members, self.seeds = list(members), len(members[0].models)
        self.template = copy.deepcopy(members[0].models[0]).to(device)
        models = [model for member in members for model in member.models]
        self.names = [name for name, _ in self.template.named_parameters()]
        by_name = [dict(model.named_parameters()) for model in models]
        self.stacked = [
            torch.stack([named[name].detach() for named in by_name]).to(device).requires_grad_()
            for name in self.names
        ]
        rates = torch.tensor(
            [member.learning_rate for member in members for _ in member.models], device=device
        )
        self.rates = [rates.view(-1, *[1] * (tensor.ndim - 1)) for tensor in self.stacked]
        rules = [member.rule for member in members if member.rule is not None]
        self.curved = any(rule.needs_product for rule in rules)
        self.depth = max((vars(rule)["depth"] for rule in rules if _absolute(rule)), default=0)
        self._stops = [vars(rule)["tau"] for rule in rules if "tau" in vars(rule)]
        place = torch.device(device)
        self._replay = Replay(place, side_stream(place))
        self._batches: dict[tuple[torch.Size, torch.Size], tuple[Tensor, Tensor]] = {}

    def outputs(self, x: Tensor) -> Tensor:
        """The networks on the inputs (S, n, …) of their seeds: (R·S, n, outputs)."""

        def one(parameters: list[Tensor], inputs: Tensor) -> Tensor:
            leaves = dict(zip(self.names, parameters, strict=True))
            return functional_call(self.template, leaves, (inputs,))  # type: ignore[no-any-return]

        everywhere = x.expand(len(self.members), *x.shape).flatten(0, 1)
        found: Tensor = vmap(one, randomness="different")(self.stacked, everywhere)
        return found

    def step(self, x: Tensor, y: Tensor, losses: Losses, number: int) -> None:
        """One step on the batch x (S, B, …), y (S, B); ``losses`` gives (R·S,) from outputs and
        targets.

        On a GPU the step is replayed from a CUDA graph, one for each shape of a batch and each part
        of training that rules with a stop divide it into.
        """
        if not x.is_cuda:
            self._advance(x, y, losses, number)
            return
        shapes = x.shape, y.shape
        if shapes not in self._batches:
            self._batches[shapes] = x.clone(), y.clone()
        held = self._batches[shapes]
        for place, given in zip(held, (x, y), strict=True):
            place.copy_(given)
        passed = tuple(number >= stop for stop in self._stops)
        self._replay((*shapes, passed), lambda: self._advance(*held, losses, number))

    def _advance(self, x: Tensor, y: Tensor, losses: Losses, number: int) -> None:
        loss = losses(self.outputs(x), y.expand(len(self.members), *y.shape).flatten(0, 1)).sum()
        graph = torch.autograd.grad(loss, self.stacked, create_graph=self.curved)
        held = [tensor.detach() for tensor in self.stacked]
        product = BatchProduct(self.stacked, [graph])
        curvature = product(held) if self.curved else []
        absolute = absolute_products(product, held, self.depth) if self.depth else []
        with torch.no_grad():
            terms = [
                self._terms(index, held, curvature, absolute, number)
                for index in range(len(self.members))
            ]
            for tensor, rate, grad, *added in zip(
                self.stacked, self.rates, graph, *terms, strict=True
            ):
                tensor.sub_(rate * grad + torch.cat(added))

    def _terms(
        self,
        index: int,
        held: list[Tensor],
        curvature: list[Tensor],
        absolute: list[Tensor],
        number: int,
    ) -> list[Tensor]:
        """What one member's rule subtracts, seed by seed: layers' maxima are those of one
        network.
        """
        rows = slice(index * self.seeds, (index + 1) * self.seeds)
        own, rule = [tensor[rows] for tensor in held], self.members[index].rule
        if rule is None:
            return [torch.zeros_like(tensor) for tensor in own]
        source = absolute if _absolute(rule) else curvature if rule.needs_product else []
        curved = [tensor[rows] for tensor in source]
        found: list[Tensor] = vmap(lambda own, curved: rule.term(own, curved, number))(own, curved)
        return found

    def per_member(self, values: Tensor) -> Tensor:
        """(R·S, …) as (R, S, …)."""
        return values.detach().reshape(len(self.members), self.seeds, *values.shape[1:])

    def norms(self) -> Tensor:
        """‖θ‖₂ of every network, (R, S)."""
        squares = torch.stack(
            [tensor.detach().flatten(1).double().square().sum(1) for tensor in self.stacked]
        )
        return self.per_member(squares.sum(0).sqrt())

    def network(self, member: int, seed: int) -> nn.Module:
        """One of the networks, as a model of its own."""
        model = copy.deepcopy(self.template)
        with torch.no_grad():
            for parameter, tensor in zip(model.parameters(), self.stacked, strict=True):
                parameter.copy_(tensor[member * self.seeds + seed])
        return model


def absolute_products(product: Product, vectors: list[Tensor], depth: int) -> list[Tensor]:
    """|H|v of every network, for vectors (N, *shape) and a product that does not mix networks.

    ``depth`` Lanczos steps that start at v give ‖v‖·Q|T|e₁. The recurrence is not reorthogonalised,
    which functions of a matrix do not need (Musco, Musco & Sidford, 2018), and |T| = T·sign(T) is
    found by matrix products alone, so that a CUDA graph can record all of it.
    """
    count = len(vectors[0])
    flat = torch.cat([vector.reshape(count, -1) for vector in vectors], 1)
    length = flat.norm(dim=1, keepdim=True)
    basis = [flat / length.clamp_min(torch.finfo(flat.dtype).tiny)]
    before, beta = torch.zeros_like(flat), torch.zeros_like(length)
    matrix = torch.zeros(count, depth, depth, dtype=torch.float64, device=flat.device)
    largest = torch.zeros_like(length)
    for step in range(depth):
        grown = torch.cat(
            [part.reshape(count, -1) for part in product(_shaped(basis[-1], vectors))], 1
        )
        alpha = (grown * basis[-1]).sum(1, keepdim=True)
        matrix[:, step, step] = alpha[:, 0]
        if step == depth - 1:
            break
        grown = grown - alpha * basis[-1] - beta * before
        before, beta = basis[-1], grown.norm(dim=1, keepdim=True)
        largest = torch.maximum(largest, torch.maximum(alpha.abs(), beta))
        beta = torch.where(beta > NEGLIGIBLE * largest, beta, 0)  # else the next vector is rounding
        basis.append(torch.where(beta > 0, grown / beta, 0))
        matrix[:, step, step + 1] = matrix[:, step + 1, step] = beta[:, 0]
    weights = (matrix @ _sign(matrix))[:, :, 0].to(flat)
    return _shaped(length * torch.stack(basis, 2).matmul(weights.unsqueeze(2)).squeeze(2), vectors)


def _sign(matrix: Tensor) -> Tensor:
    """The sign of symmetric matrices (N, d, d) by Newton and Schulz: X ← X(3 − X²)/2; 0 stays 0."""
    size = matrix.abs().sum(2).amax(1)[:, None, None]
    sign = matrix / torch.where(size > 0, size, 1)
    for _ in range(SQUARINGS):
        sign = 1.5 * sign - 0.5 * sign @ sign @ sign
    return sign


def _shaped(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    parts = flat.split([tensor[0].numel() for tensor in like], 1)
    return [part.reshape(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _absolute(rule: Rule) -> bool:
    return vars(rule).get("reading") == READINGS[1]


QUARTER = 0.25  # of the run, over which the speed of training is read
WITH_CURVES = 5  # seeds whose curves are stored: those of 100 seeds take several megabytes


def early(row: Row, quantity: str) -> float:
    """The mean of a curve over the first quarter of its epochs, without the start; NaN where it
    diverged.
    """
    if quantity in row:
        return float(row[quantity])
    last = QUARTER * row["recorded"][-1]
    points = zip(row["recorded"], row[f"{EARLY[quantity]} curve"], strict=True)
    kept = [value for epoch, value in points if 0 < epoch <= last]
    return sum(kept) / len(kept) if kept else math.nan


def short_row(row: Row) -> Row:
    """The row as it is stored: six digits, and beyond the first seeds the speed in place of the
    curves.
    """
    short = {
        name: float(f"{value:.6g}") if isinstance(value, float) else value
        for name, value in row.items()
    }
    if row["seed"] < WITH_CURVES:
        return short
    speeds = {
        name: float(f"{early(row, name):.6g}") for name, of in EARLY.items() if f"{of} curve" in row
    }
    dropped = ["recorded", *(name for name in row if name.endswith(" curve"))]
    return {name: value for name, value in short.items() if name not in dropped} | speeds


Pair = tuple[Tensor, Tensor]
CHUNK = 5000  # samples evaluated at once


@dataclass(frozen=True)
class RulesScale:
    """One scale. ``gain`` and ``stretch`` adapt Table 4.2 to another width and a shorter run
    (``RuleRates.scaled``).

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
class RuleTask:
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


def run_rules(task: RuleTask, cell: Cell, device: str) -> list[Row]:
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
        short_row(
            {"rule": label, "seed": seed}
            | _row(task, stack, training, cell, curves, epochs, (member, place))
        )
        for member, label in enumerate(cell["rules"])
        for place, seed in enumerate(cell["seeds"])
    ]


def _setting(task: RuleTask, cell: Cell, regime: str) -> RuleRates:
    gain = cell["steep" if (cell["activation"], regime) == ("relu", "large") else "gain"]
    return SETTINGS[task.name, cell["activation"]].scaled(
        gain, cell["stretch"], cell["epochs"] / task.epochs
    )


def _member(task: RuleTask, cell: Cell, label: str, steps: int) -> RuleMember:
    """The same initial weights for every rule of a regime (§4.4)."""
    regime, dropout = regime_of(label), DROPPED if label == DROPOUT else 0.0
    setting = _setting(task, cell, regime)
    streams = [derived_seed(seed, task.name, regime) for seed in cell["seeds"]]
    models = [task.network(cell, regime, dropout, stream) for stream in streams]
    return RuleMember(
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
def _measured(task: RuleTask, stack: Stack, training: Pair, test: Pair | None) -> dict[str, Tensor]:
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
    task: RuleTask,
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


def _eigenvalues(task: RuleTask, model: nn.Module, pair: Pair, count: int) -> list[float]:
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
