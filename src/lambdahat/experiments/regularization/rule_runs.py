"""Training under the rules of Table 4.1: what a cell of such an experiment is, and its rows.

Rules and seeds of a cell are trained together in one ``Stack``: parameters are stacked and the
forward pass runs under ``vmap``. A row is one rule at one seed: final figures, their curves over
the epochs, the leading eigenvalues of the Hessian, and the vectors of the first layer where it has
two inputs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.functional import cross_entropy

from lambdahat._core.check import require_choice
from lambdahat._core.device import Replay, side_stream
from lambdahat._core.progress import report
from lambdahat._core.rng import derived_seed, generator
from lambdahat.estimators import eigenpairs
from lambdahat.experiments.kit import Cell, Row
from lambdahat.experiments.regularization.learning_rules import (
    ABSOLUTE,
    CURVED,
    DROPOUT,
    DROPPED,
    EARLY,
    FLAT,
    SETTINGS,
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
    """A rule from one initialisation regime: what it adds (None: SGD), its starts and rate."""

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
        outputs: Tensor = vmap(one, randomness="different")(self.stacked, everywhere)
        return outputs

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
            changed = []
            for index, member in enumerate(self.members):
                rows, rule = slice(index * self.seeds, (index + 1) * self.seeds), member.rule
                if rule is None:
                    continue
                own = [tensor[rows] for tensor in held]
                source = absolute if _absolute(rule) else curvature if rule.needs_product else []
                # seed by seed, for layers' maxima are those of one network
                term = vmap(partial(rule.term, step=number))
                changed.append((own, term(own, [tensor[rows] for tensor in source])))
            # large networks are bound by memory: no tensor of zeros for members without a term
            for tensor, rate, grad in zip(held, self.rates, graph, strict=True):
                tensor.addcmul_(rate, grad, value=-1)
            for own, added in changed:
                torch._foreach_sub_(own, added)

    def per_member(self, values: Tensor) -> Tensor:
        """(R·S, …) as (R, S, …)."""
        return values.detach().reshape(len(self.members), self.seeds, *values.shape[1:])

    def norms(self) -> Tensor:
        """‖θ‖₂ of every network, (R, S)."""
        flat = [tensor.detach().flatten(1) for tensor in self.stacked]
        squares = torch.stack([tensor.double().square().sum(1) for tensor in flat])
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
    found by matrix products alone, so that a CUDA graph can capture all of it.
    """
    count = len(vectors[0])
    flat = torch.cat([vector.reshape(count, -1) for vector in vectors], 1)
    length = flat.norm(dim=1, keepdim=True)
    basis = [flat / length.clamp_min(torch.finfo(flat.dtype).tiny)]
    before, beta = torch.zeros_like(flat), torch.zeros_like(length)
    matrix = torch.zeros(count, depth, depth, dtype=torch.float64, device=flat.device)
    largest = torch.zeros_like(length)
    for step in range(depth):
        products = product(_reshape(basis[-1], vectors))
        grown = torch.cat([part.reshape(count, -1) for part in products], 1)
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
    # the sign of T by Newton and Schulz: X ← X(3 − X²)/2; 0 stays 0
    size = matrix.abs().sum(2).amax(1)[:, None, None]
    sign = matrix / torch.where(size > 0, size, 1)
    for _ in range(SQUARINGS):
        sign = 1.5 * sign - 0.5 * sign @ sign @ sign
    weights = (matrix @ sign)[:, :, 0].to(flat)
    return _reshape(length * torch.stack(basis, 2).matmul(weights.unsqueeze(2)).squeeze(2), vectors)


def _reshape(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    parts = flat.split([tensor[0].numel() for tensor in like], 1)
    return [part.reshape(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _absolute(rule: Rule) -> bool:
    return vars(rule).get("reading") == READINGS[1]


QUARTER = 0.25  # of the run, over which the speed of training is read
WITH_CURVES = 5  # seeds whose curves are stored: those of 100 seeds take several megabytes


def early(row: Row, quantity: str) -> float:
    """The mean of a curve over the first quarter of its epochs, without the start."""
    if quantity in row:
        return float(row[quantity])
    last = QUARTER * row["recorded"][-1]
    points = zip(row["recorded"], row[f"{EARLY[quantity]} curve"], strict=True)
    kept = [value for epoch, value in points if 0 < epoch <= last]
    return sum(kept) / len(kept) if kept else math.nan


def short_row(row: Row) -> Row:
    """The row as it is stored: six digits, and speeds in place of curves beyond the first seeds."""
    kept = dict(row)
    if row["seed"] >= WITH_CURVES:
        kept = {name: row[name] for name in row if not name.endswith((" curve", "recorded"))}
        kept |= {name: early(row, name) for name, of in EARLY.items() if f"{of} curve" in row}
    numbers = {name: value for name, value in kept.items() if isinstance(value, float)}
    return kept | {name: float(f"{value:.6g}") for name, value in numbers.items()}


Pair = tuple[Tensor, Tensor]
CHUNK = 5000  # samples evaluated at once


@dataclass(frozen=True)
class MoreSeeds:
    """The rules of a claim that needs more seeds than the others, up to ``seeds`` in all.

    Of the seeds beyond the scale's only how well and how fast they train is stored, unless they are
    ``whole``.
    """

    activation: str
    rules: tuple[str, ...]
    seeds: int
    together: int = 100  # seeds in a cell
    whole: bool = False


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


# what cells have beside their data. ``gain`` and ``stretch`` adapt Table 4.2 to another width and
# a shorter run (``RuleRates.scale_rates``); ``steep`` is the gain of ReLU from the large regime,
# where gradients grow with the weights and units die
DEFAULTS: Cell = {
    **{"gain": 1.0, "steep": 1.0, "stretch": 1.0},
    "shrink": 1,  # squares of so many pixels along a side become one
    "eigenvalues": 10,
    "curvature": 2000,  # training samples whose loss the eigenvalues are of
    "points": 20,  # of a curve
}


def rule_cells(
    data: str,
    training: int,
    test: int,
    width: int,
    epochs: int,
    batch: int,
    seeds: int,
    together: int,
    groups: Iterable[Sequence[str]] = (FLAT, CURVED, ABSOLUTE),
    more: Iterable[MoreSeeds] = (),
    **settings: Any,
) -> list[Cell]:
    """Activations × groups of rules × groups of seeds, and then the seeds that some need more.

    The rules of a group train ``together``, and so many seeds of them. ``settings`` replace those
    of ``DEFAULTS``, or are the "precision" of matrix products in training: "tf32" rounds factors.
    """
    samples = {"data": data, "training": training, "test": test}
    fields = {**samples, "width": width, "epochs": epochs, "batch": batch, **DEFAULTS, **settings}
    cells: list[Cell] = [
        {"activation": activation, "rules": list(rules), "seeds": part, **fields}
        for activation in ("tanh", "relu")
        for rules in groups
        for part in _parts(0, seeds, together)
    ]
    for extra in more:
        own = {"activation": extra.activation, "rules": list(extra.rules)}
        own |= fields | ({} if extra.whole else {"eigenvalues": 0})
        cells += [{**own, "seeds": part} for part in _parts(seeds, extra.seeds, extra.together)]
    return cells


def _parts(first: int, last: int, together: int) -> list[list[int]]:
    """The seeds from ``first`` up to ``last``, ``together`` in each part."""
    seeds = list(range(first, last))
    return [seeds[start : start + together] for start in range(0, len(seeds), together)]


@contextmanager
def matrix_precision(name: str) -> Iterator[None]:
    """Matrix products on a GPU in float32, or with factors rounded to TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = (
        require_choice(name, "precision", ("float32", "tf32")) == "tf32"
    )
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def run_rules(task: RuleTask, cell: Cell, device: str) -> list[Row]:
    """A row for each rule and seed of the cell."""
    parts = zip(("training", "test"), task.data(cell), strict=True)
    data = {part: (pair[0].to(device), pair[1].to(device)) for part, pair in parts if pair}
    x, y = data["training"]
    steps = math.ceil(cell["training"] / cell["batch"])
    stack = Stack([_member(task, cell, label, steps) for label in cell["rules"]], device)
    curves: dict[str, list[Tensor]] = {}
    # the epochs before which a curve has its points, and the end
    places = range(cell["points"] + 1)
    recorded = sorted({round(cell["epochs"] * place / cell["points"]) for place in places})
    # an order of batches of each seed's own that is the same for all rules
    rngs = [generator(seed, "order of batches") for seed in cell["seeds"]]
    seeds = torch.arange(len(rngs), device=device).unsqueeze(1)
    # dropout, the one other thing that is random, draws from the global generator
    with torch.random.fork_rng(devices=[] if device == "cpu" else [device]):
        torch.manual_seed(derived_seed(cell["seeds"][0], task.name, cell["activation"], "dropout"))
        for epoch in range(cell["epochs"]):
            if epoch in recorded:
                _extend(curves, task, stack, data)
            orders = [torch.randperm(cell["training"], generator=rng) for rng in rngs]
            batches = torch.stack(orders).to(device).split(cell["batch"], dim=1)
            with matrix_precision(cell.get("precision", "float32")):
                for number, rows in enumerate(batches):
                    stack.step(x[seeds, rows], y[seeds, rows], task.losses, epoch * steps + number)
            report(f"{task.name} {cell['activation']}", epoch + 1, cell["epochs"])
    _extend(curves, task, stack, data)
    out, whole = [], cell["eigenvalues"] > 0
    for member, label in enumerate(cell["rules"]):
        for place, seed in enumerate(cell["seeds"]):
            trained = {
                name: [float(values[member, place]) for values in points]
                for name, points in curves.items()
                if whole or name.startswith("training")
            }
            row: Row = {"rule": label, "seed": seed}
            row |= {name: values[-1] for name, values in trained.items()}
            for name, values in trained.items():
                row[f"{name} curve"] = [float(f"{value:.5g}") for value in values]
            row["recorded"] = recorded
            if whole:
                model, count = stack.network(member, place).eval(), cell["curvature"]
                pair = x[place, :count], y[place, :count]
                row["eigenvalues"] = _eigenvalues(task, model, pair, cell["eigenvalues"])
                row |= _vectors(model, seed == 0)
            out.append(short_row(row))
    return out


def _member(task: RuleTask, cell: Cell, label: str, steps: int) -> RuleMember:
    """The same initial weights for every rule of a regime (§4.4)."""
    regime, dropout = regime_of(label), DROPPED if label == DROPOUT else 0.0
    gain = cell["steep" if (cell["activation"], regime) == ("relu", "large") else "gain"]
    printed, share = SETTINGS[task.name, cell["activation"]], cell["epochs"] / task.epochs
    setting = printed.scale_rates(gain, cell["stretch"], share)
    streams = [derived_seed(seed, task.name, regime) for seed in cell["seeds"]]
    models = [task.network(cell, regime, dropout, stream) for stream in streams]
    rule = rule_of(label, setting, steps, layers_of(models[0]), task.depth)
    return RuleMember(rule, models, setting.rate(label))


@torch.no_grad()
def _extend(
    curves: dict[str, list[Tensor]], task: RuleTask, stack: Stack, data: dict[str, Pair]
) -> None:
    """Add a point to the curves, (R, S): what is reported of both parts, and ‖θ‖₂."""
    stack.template.eval()
    measured = {}
    for name, (x, y) in data.items():
        parts = [stack.per_member(stack.outputs(part)) for part in x.split(CHUNK, dim=1)]
        outputs = torch.cat(parts, dim=2)
        diverged = ~outputs.isfinite().flatten(2).all(-1)
        for key, value in task.measures(outputs, y).items():
            measured[f"{name} {key}"] = value.double().masked_fill(diverged, math.nan)
    stack.template.train()
    for name, values in (measured | {"norm": stack.norms()}).items():
        curves.setdefault(name, []).append(values.cpu())


def _eigenvalues(task: RuleTask, model: nn.Module, pair: Pair, count: int) -> list[float]:
    """The leading eigenvalues of the Hessian of the loss alone (§5.7); none after divergence."""
    if not all(bool(parameter.isfinite().all()) for parameter in model.parameters()):
        return []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return task.losses(outputs.unsqueeze(0), targets.unsqueeze(0))[0]

    problem = Problem(model, loss, pair)
    if not math.isfinite(float(problem.loss())):
        return []
    values = eigenpairs(hessian(problem), k=count, tol=1e-4).values
    return [float(f"{value:.5g}") for value in values]


def _vectors(model: nn.Module, shown: bool) -> Row:
    """Input-to-hidden weights, if pairs, and how many of them count: (Σ‖w‖²)²/Σ‖w‖⁴."""
    kinds = nn.Linear | nn.Conv1d | nn.Conv2d
    first = next(layer for layer in model.modules() if isinstance(layer, kinds))
    weights = first.weight.detach().flatten(1).double().cpu()
    if weights.shape[1] != 2:
        return {}
    squares = weights.square().sum(1)
    row: Row = {"vectors": float(squares.sum() ** 2 / squares.square().sum())}
    if shown:
        row["weights"] = [[float(f"{part:.4g}") for part in vector] for vector in weights]
    return row


def logistic(outputs: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of the softmax, network by network."""
    return cross_entropy(outputs.transpose(1, 2), labels, reduction="none").mean(1)


def quadratic(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean of ½(f − y)², network by network."""
    return 0.5 * (outputs[..., 0] - targets).square().mean(1)


def right(outputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The share of right answers."""
    return {"accuracy": (outputs.argmax(-1) == labels).double().mean(-1)}
