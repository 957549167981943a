"""The edge of stability over batch sizes: search, rule, scaled runs, and their rows.

``part`` tells the rows apart: "edge" has an edge for each seed and batch size, "rule" the largest
eigenvalue of one batch beside the predictions, "scaling" the outcome of one run. NaN stands where
nothing was found or a run diverged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import least_squares
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.functional import cross_entropy

from lambdahat._core.check import require, require_choice
from lambdahat._core.device import Replay
from lambdahat._core.progress import report
from lambdahat._core.rng import derived_seed, generator
from lambdahat._core.storage import Result
from lambdahat.data.splits import Split
from lambdahat.estimators import eigenpairs, variance
from lambdahat.experiments.kit.cells import Row, Rows
from lambdahat.experiments.kit.claims import Reading, Table, mean_of, table
from lambdahat.experiments.minibatch.batch_points import crop, load_split
from lambdahat.models import make_model
from lambdahat.operators.curvature import hessian
from lambdahat.problem import Problem
from lambdahat.randommatrix import (
    DirectionalVariance,
    batch_eigenpairs,
    directional_variance,
    effective_batch,
    predict,
    stability_limit,
)
from lambdahat.results import Estimate

Array = NDArray[np.float64]
LEAST_SIZES = 3  # batch sizes that a slope is fitted to


@dataclass(frozen=True)
class SearchSection:
    """Where to look: at ``points`` values from ``low`` to ``high``, then between two neighbours, in
    so many ``rounds`` in all.
    """

    low: float
    high: float
    points: int = 8
    rounds: int = 2

    @property
    def resolution(self) -> float:
        """The ratio of the two values that the last round leaves the edge between."""
        first = (self.high / self.low) ** (1 / (self.points - 1))
        return float(first ** (1 / (self.points + 1) ** (self.rounds - 1)))


def largest_passing(
    passes: Callable[[Tensor], Tensor], section: SearchSection, seeds: int
) -> Tensor:
    """The edge (S,) between the largest value that passes and the next, by their geometric mean.

    ``passes`` maps values (S, R) to whether each does. Values that fail below one that passes do
    not count: at tiny rates nothing is learnt in a given time. NaN where no value passes, infinite
    where the largest does.
    """
    ends, points = (math.log(section.low), math.log(section.high)), section.points
    logs = torch.linspace(*ends, points, dtype=torch.float64)
    grid = logs.expand(seeds, -1)
    below = torch.full((seeds,), math.nan, dtype=torch.float64)
    above = torch.full((seeds,), math.inf, dtype=torch.float64)
    for number in range(section.rounds):
        searched = torch.ones(seeds, dtype=torch.bool)
        if number:
            shares = torch.arange(1, points + 1, dtype=torch.float64) / (points + 1)
            searched = below.isfinite() & above.isfinite()
            low, high = below.where(searched, logs[0]), above.where(searched, logs[0])
            grid = low[:, None] + (high - low)[:, None] * shares
        last = torch.where(passes(grid.exp()).cpu(), torch.arange(points), -1).amax(1)
        following = grid.gather(1, (last + 1).clamp_max(points - 1)[:, None])[:, 0]
        bounded = searched & (last + 1 < points) & ((last >= 0) | (number > 0))
        above = following.where(bounded, above)
        largest = grid.gather(1, last.clamp_min(0)[:, None])[:, 0]
        below = largest.where(searched & (last >= 0), below)
    return torch.where(below.isnan(), math.nan, ((below + above) / 2).exp())


@dataclass(frozen=True)
class Frontier(Result):
    """Edges (sizes, S) over batch sizes and seeds for one network, optimiser and criterion."""

    network: str
    optimizer: str
    criterion: str
    batch_sizes: tuple[int, ...]
    edges: Tensor
    resolution: float

    def centre(self) -> Tensor:
        """Geometric means (sizes,) over the seeds whose edge was found; NaN where none was."""
        logs, known = self._logs()
        return (logs.sum(1) / known.sum(1)).exp()

    def at(self, batch_size: int) -> float:
        """The geometric mean at one batch size."""
        return float(self.centre()[self.batch_sizes.index(batch_size)])

    def stderr(self) -> Tensor:
        """Relative standard errors, over seeds and from the last section; NaN for one seed."""
        logs, known = self._logs()
        count = known.sum(1)
        around = (logs - (logs.sum(1) / count)[:, None]).where(known, 0.0).square().sum(1)
        spread = around / (count - 1) / count
        return (spread + math.log(self.resolution) ** 2 / (12 * count)).sqrt()

    def cell(self, batch_size: int) -> str:
        """The mean at one batch size, its relative error, and how many seeds have no edge."""
        place = self.batch_sizes.index(batch_size)
        edges, known = self.edges[place], int(self._logs()[1][place].sum())
        counts = {
            "nothing is steady" if self.criterion == "steady" else "nothing trains": edges.isnan(),
            "below the search": edges == 0,  # the edge of a reciprocal
            "above the search": edges.isposinf(),
        }
        missing = {reason: int(where.sum()) for reason, where in counts.items() if where.any()}
        reasons = ", ".join(f"{reason}: {count}" for reason, count in missing.items())
        if not known:
            return next(iter(missing)) if len(missing) == 1 else reasons
        error = f" ± {100 * float(self.stderr()[place]):.0f} %" if known > 1 else ""
        text = f"{self.at(batch_size):.3g}{error}"
        return f"{text} ({known} of {len(edges)} seeds; {reasons})" if missing else text

    def _logs(self) -> tuple[Tensor, Tensor]:
        """log edges, 0 where none was found, and where one was."""
        logs = self.edges.log()
        return logs.where(logs.isfinite(), 0.0), logs.isfinite()

    def inverse(self) -> Frontier:
        """The same for the reciprocals of what was searched."""
        return replace(self, edges=self.edges.reciprocal())

    def slope(self, low: float = 0, high: float = math.inf) -> Reading:
        """d log edge/d log B over batch sizes in [low, high], mean over seeds; NaN with too few."""
        inside = [low <= size <= high for size in self.batch_sizes]
        logs = torch.tensor(self.batch_sizes, dtype=torch.float64).log()[inside]
        slopes = []
        for values in self.edges.log()[inside].T:
            fine = values.isfinite()
            if int(fine.sum()) >= LEAST_SIZES:
                slopes.append(float(np.polyfit(logs[fine], values[fine], 1)[0]))
        return mean_of(slopes if len(slopes) > 1 else [])

    def turning(self, power: float = 1.0) -> tuple[float, float]:
        """The batch size B₀ of edge = a·(1 + B₀/B)^−power, below which the edge grows as B^power,
        and the standard error of its logarithm over seeds; 0 where it does not grow, infinite
        where it never stops.
        """
        sizes = np.asarray(self.batch_sizes, dtype=float)
        points = [_turning_point(sizes, values.numpy(), power) for values in self.edges.log().T]
        kept = np.asarray([value for value in points if math.isfinite(value)])
        if len(kept) < 2:
            return math.nan, math.nan
        return float(np.exp(kept.mean())), float(kept.std(ddof=1) / math.sqrt(len(kept)))


def _turning_point(sizes: Array, logs: Array, power: float) -> float:
    """log B₀ by least squares, within a factor 16 of the batch sizes that were run."""
    fine = np.isfinite(logs)
    if fine.sum() < LEAST_SIZES:
        return math.nan
    sizes, logs = sizes[fine], logs[fine]
    low, high = math.log(sizes.min() / 16), math.log(sizes.max() * 16)

    def misfit(at: Array) -> Array:
        return np.asarray(at[0] - power * np.log1p(np.exp(at[1]) / sizes) - logs)

    starts, bounds = np.linspace(low, high, 5)[1:-1], ((-np.inf, low), (np.inf, high))
    fits = [least_squares(misfit, (logs.max(), start), bounds=bounds) for start in starts]
    return float(min(fits, key=lambda fit: fit.cost).x[1])


Pair = tuple[Tensor, Tensor]
Parameters = dict[str, Tensor]

MOMENTUM = 0.9
BETAS = 0.9, 0.999
OPTIMIZERS = ("sgd", "momentum", "adam")
PARTS = 10  # of a run, whose mean losses are kept
CHUNK = 1 << 15  # networks × samples evaluated at a time


@dataclass(frozen=True)
class StackedSettings:
    """One optimiser at many settings: rates (S, R), and for Adam ε (S, R)."""

    optimizer: str
    rates: Tensor
    epsilon: Tensor | None = None


class StackedRule:
    """SGD, SGD with momentum 0.9, or Adam on stacked parameters, with a rate and an ε each."""

    def __init__(self, parameters: Sequence[Tensor], settings: StackedSettings) -> None:
        require_choice(settings.optimizer, "optimizer", OPTIMIZERS)
        self.kind, self.parameters = settings.optimizer, list(parameters)
        like = self.parameters[0]
        self.rates = settings.rates.to(like)
        epsilon = settings.epsilon
        self.epsilon = torch.full_like(self.rates, 1e-8) if epsilon is None else epsilon.to(like)
        self.first = [torch.zeros_like(p) for p in self.parameters] if self.kind != "sgd" else []
        self.second = [torch.zeros_like(p) for p in self.parameters] if self.kind == "adam" else []
        # powers βᵗ live on the device, where a captured step can change them
        self.powers = torch.ones(2, dtype=torch.float64, device=like.device)
        self.betas = torch.tensor(BETAS, dtype=torch.float64, device=like.device)

    def step(self, gradients: Sequence[Tensor]) -> None:
        """One step of every cell."""
        self.powers.mul_(self.betas)
        for index, (parameter, gradient) in enumerate(zip(self.parameters, gradients, strict=True)):
            direction = self._direction(index, gradient)
            parameter.addcmul_(direction, _wide(self.rates, parameter), value=-1)

    def _direction(self, index: int, gradient: Tensor) -> Tensor:
        if self.kind == "sgd":
            return gradient
        first = self.first[index]
        if self.kind == "momentum":
            return first.mul_(MOMENTUM).add_(gradient)
        second = self.second[index]
        first.lerp_(gradient, 1 - BETAS[0])
        second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        corrections = (1 - self.powers).to(first.dtype)
        scale = (second / corrections[1]).sqrt() + _wide(self.epsilon, second)
        return (first / corrections[0]) / scale


class Cells:
    """A network of every seed, in as many copies as there are settings, on one training set.

    All copies of a seed start from its network and read the same batches: settings are compared
    like with like.
    """

    def __init__(self, models: Sequence[nn.Module], data: Pair, settings: StackedSettings) -> None:
        wanted, copies = settings.rates.shape
        count = len(models)
        require(count == wanted, "models", f"be {wanted}, one for each seed", str(count))
        self.model, (self.x, self.y) = models[0], data
        stacks = zip(*(model.named_parameters() for model in models), strict=True)
        self.start = {
            same[0][0]: torch.stack([tensor.detach() for _, tensor in same]).to(self.x.device)
            for same in stacks
        }
        self.parameters = {
            name: tensor.unsqueeze(1).repeat(1, copies, *[1] * (tensor.ndim - 1))
            for name, tensor in self.start.items()
        }
        self.rule = StackedRule(list(self.parameters.values()), settings)
        dims = (0, None, None)
        self._gradients = vmap(vmap(grad_and_value(self._loss), in_dims=dims))
        self._judge = vmap(vmap(self._evaluate_one, in_dims=dims), in_dims=dims)

    def _loss(self, parameters: Parameters, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(functional_call(self.model, parameters, (x,)), y)

    def _evaluate_one(self, parameters: Parameters, x: Tensor, y: Tensor) -> Tensor:
        """Sums of losses and of wrong answers, (2,)."""
        logits = functional_call(self.model, parameters, (x,))
        wrong = (logits.argmax(-1) != y).sum()
        return torch.stack([cross_entropy(logits, y, reduction="sum").double(), wrong.double()])

    def train(self, batch_size: int, steps: int, seed: int, task: str) -> Tensor:
        """Train on batches drawn without replacement, each seed in an order of its own.

        Returns the mean batch loss in each tenth of the run, (10, S, R), on the CPU.
        """
        most, device = len(self.x), self.x.device
        expected = f"be at most {most}, the samples there are"
        require(batch_size <= most, "batch_size", expected, str(batch_size))
        seeds = len(self.rule.rates)
        indices = torch.zeros(seeds, batch_size, dtype=torch.int64, device=device)
        replay, ends = Replay(device), {steps * part // PARTS for part in range(1, PARTS + 1)}
        total, before, means = torch.zeros_like(self.rule.rates), 0, []

        @torch.no_grad()
        def step() -> None:
            gradients, losses = self._gradients(self.parameters, self.x[indices], self.y[indices])
            total.add_(losses)
            self.rule.step([gradients[name] for name in self.parameters])

        batches = _batches(seeds, most, batch_size, steps, seed, device)
        for number, drawn in enumerate(batches, 1):
            indices.copy_(drawn)
            replay("step", step)
            if number in ends:
                means.append(total.cpu() / (number - before))
                total.zero_()
                before = number
                report(task, number, steps)
        return torch.stack(means)

    @torch.no_grad()
    def evaluate(self, data: Pair) -> tuple[Tensor, Tensor]:
        """Mean loss and error rate over data, (S, R) each, on the CPU; NaN where not finite."""
        size = max(1, CHUNK // self.rule.rates.numel())
        pieces = zip(*(part.split(size) for part in data), strict=True)
        parts = [self._judge(self.parameters, *piece) for piece in pieces]
        loss, wrong = (torch.stack(parts).sum(0) / len(data[0])).cpu().unbind(-1)
        return loss.where(loss.isfinite(), torch.nan), wrong.where(loss.isfinite(), torch.nan)

    def distances(self) -> Tensor:
        """‖θ − θ₀‖₂ of every copy, (S, R)."""
        moved = [self.parameters[name] - start.unsqueeze(1) for name, start in self.start.items()]
        squares = [part.double().flatten(2).square().sum(2) for part in moved]
        return torch.stack(squares).sum(0).sqrt().cpu()


def _batches(
    seeds: int, samples: int, batch_size: int, steps: int, seed: int, device: torch.device
) -> Iterator[Tensor]:
    """Indices (S, B), step by step; an incomplete last batch of an epoch is dropped."""
    whole, done = samples // batch_size, 0
    for epoch in range(-(-steps // whole)):
        streams = [generator(seed, "order", s, epoch) for s in range(seeds)]
        orders = torch.stack([torch.randperm(samples, generator=rng) for rng in streams])
        drawn = orders[:, : whole * batch_size].to(device)
        yield from drawn.split(batch_size, dim=1)[: steps - done]
        done += whole


def _wide(values: Tensor, like: Tensor) -> Tensor:
    """(S, R) for broadcasting with (S, R, …)."""
    return values.view(*values.shape, *[1] * (like.ndim - 2))


PROBE = 2000  # training samples on which it is judged whether a network has learnt


@dataclass(frozen=True)
class EdgeSubject:
    """A network on ``samples`` images of a data set, ``steps`` steps from each of ``seeds`` starts.

    ``epochs`` is the length of the runs that compare scaling rules; 0 leaves them out.
    """

    network: str
    model: str
    data: str
    samples: int
    batch_sizes: tuple[int, ...]
    steps: int
    seeds: int
    epochs: int = 0
    reference: int = 128
    options: Mapping[str, Any] = field(default_factory=dict)


def edge_cells(
    subjects: Sequence[EdgeSubject],
    optimizers: Sequence[str],
    rules: Sequence[Row],
    scaled: Sequence[str],
) -> list[Row]:
    """For each network the edges by optimiser and batch size, the rules, and the scaled runs.

    All seeds of a network are in one cell, for they train together.
    """
    cells: list[Row] = []
    for subject in subjects:
        whole = asdict(subject) | {"root": 0}
        cells += [
            {**whole, "part": "edge", "optimizer": optimizer, "batch_size": size}
            | {"batch_sizes": (size,)}
            for optimizer in optimizers
            for size in subject.batch_sizes
        ]
        cells += [{**whole, "part": "rule", **rule} for rule in rules]
        runs = scaled if subject.epochs else ()
        cells += [{**whole, "part": "scaling", "optimizer": optimizer} for optimizer in runs]
    return cells


def prepare_cell(cell: Row, device: str) -> PreparedSubject:
    """The subject whose fields are among a cell's settings, on a device."""
    settings = {name: cell[name] for name in EdgeSubject.__dataclass_fields__}
    subject = EdgeSubject(**settings | {"batch_sizes": tuple(settings["batch_sizes"])})
    return prepare(subject, {}, cell["root"], device)


@dataclass(frozen=True)
class PreparedSubject:
    """A subject on a device: a network for every seed, its training and its test samples."""

    subject: EdgeSubject
    models: list[nn.Module]
    train: Pair
    test: Pair

    @property
    def probe(self) -> Pair:
        """The training samples on which learning is judged."""
        return self.train[0][:PROBE], self.train[1][:PROBE]

    def at(self, batch_size: int) -> PreparedSubject:
        """The same for one batch size alone."""
        return replace(self, subject=replace(self.subject, batch_sizes=(batch_size,)))

    def cells(self, settings: StackedSettings) -> Cells:
        """Every seed's network at all its settings."""
        return Cells(self.models, self.train, settings)

    def first_losses(self) -> Tensor:
        """The loss of every seed's start over the probe, (S, 1)."""
        unmoved = StackedSettings("sgd", torch.zeros(self.subject.seeds, 1))
        return self.cells(unmoved).evaluate(self.probe)[0]

    def search(
        self,
        optimizer: str,
        criterion: str,
        section: SearchSection,
        passes: Callable[[int, Tensor], Tensor],
    ) -> Frontier:
        """The largest values that pass at every batch size, from every seed's start.

        ``passes`` maps a batch size and values (S, R) to whether each passes.
        """
        sizes, seeds = self.subject.batch_sizes, self.subject.seeds
        edges = [largest_passing(partial(passes, size), section, seeds) for size in sizes]
        where = (self.subject.network, optimizer, criterion, sizes)
        return Frontier(*where, torch.stack(edges), section.resolution)


def prepare(
    subject: EdgeSubject, splits: Mapping[str, Split], seed: int, device: torch.device | str
) -> PreparedSubject:
    """The subject's data, from ``splits`` if given there, and its networks."""
    split = splits.get(subject.data) or load_split(subject.data)
    (x, y), (x_test, y_test) = split
    enough, wanted = subject.samples <= len(x), f"have {subject.samples:,} training samples"
    require(enough, subject.data, wanted, f"{len(x):,}")
    order = torch.randperm(len(x), generator=generator(seed, "training samples"))
    x, y = x[order[: subject.samples]], y[order[: subject.samples]]
    x, x_test = crop(x, subject.model), crop(x_test, subject.model)
    models = []
    for index in range(subject.seeds):
        start, shape = derived_seed(seed, subject.network, index), tuple(x.shape[1:])
        model = make_model(subject.model, shape, split.classes, start, **subject.options)
        models.append(model.to(device))
    train, test = (x.to(device), y.to(device)), (x_test.to(device), y_test.to(device))
    return PreparedSubject(subject, models, train, test)


def powers(low: int, high: int) -> tuple[int, ...]:
    """2^low … 2^high."""
    return tuple(2**power for power in range(low, high + 1))


SMALLEST_SCALED = 16  # batch size: smaller ones take long and nobody scales down to them


@dataclass(frozen=True)
class ScalingRuns(Result):
    """Runs under every rule and batch size: ``values`` (rules, sizes) of what is scaled, and per
    seed (rules, sizes, S) what came of it.

    ``training_loss`` is over the training samples that learning is judged on, ``distance`` is ‖θ −
    θ₀‖₂. Values are NaN where a run diverged.
    """

    network: str
    optimizer: str
    scaled: str
    reference: int
    epochs: int
    rules: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    values: Tensor
    validation_error: Tensor
    training_loss: Tensor
    distance: Tensor

    def at(self, name: str, rule: str, size: int) -> Tensor:
        """An outcome of every seed, (S,)."""
        values: Tensor = getattr(self, name)
        return values[self.rules.index(rule), self.batch_sizes.index(size)]

    def by_size(self) -> Table:
        """Validation error and distance by batch size, means over the seeds."""
        lines = []
        for place, size in enumerate(self.batch_sizes):
            pairs = zip(100 * self.validation_error[:, place], self.distance[:, place], strict=True)
            lines.append((size, *(f"{_mean(error)} ({_mean(far)})" for error, far in pairs)))
        base = float(self.values[0, self.batch_sizes.index(self.reference)])
        what = f"validation error in % (distance from the start) after {self.epochs} epochs"
        start = f"{self.scaled} {base:.3g} at B = {self.reference}"
        title = f"{self.network}, {self.optimizer}: {what}, {start}"
        return table(title, ("B", *self.rules), lines)


# validation error, training loss and distance, (rules, S) each
Outcome = tuple[Tensor, Tensor, Tensor]


def scaling_runs(
    ground: PreparedSubject,
    optimizer: str,
    scaled: str,
    base: float,
    rules: Mapping[str, float],
    run: Callable[[int, Tensor], Outcome],
) -> ScalingRuns:
    """All rules, each a power of B, at all batch sizes, from the value ``base`` at the reference.

    ``run(size, values)`` trains every seed at the values (rules,) of one batch size.
    """
    subject = ground.subject
    sizes = tuple(
        size for size in subject.batch_sizes if size >= min(SMALLEST_SCALED, subject.reference)
    )
    values = torch.tensor(
        [[base * (size / subject.reference) ** power for size in sizes] for power in rules.values()]
    )
    outcomes = [run(size, values[:, place]) for place, size in enumerate(sizes)]
    errors, losses, distances = (torch.stack(parts, dim=1) for parts in zip(*outcomes, strict=True))
    where = (subject.network, optimizer, scaled, subject.reference, subject.epochs)
    return ScalingRuns(*where, tuple(rules), sizes, values, errors, losses, distances)


def steps_of(ground: PreparedSubject, size: int) -> int:
    """The steps of the subject's epochs at a batch size."""
    return max(1, ground.subject.epochs * (len(ground.train[0]) // size))


def outcome(ground: PreparedSubject, settings: StackedSettings, size: int, seed: int) -> Outcome:
    """Stacked training at the settings of one batch size."""
    cells = ground.cells(settings)
    task = f"{ground.subject.network}, {settings.optimizer}, rules at B = {size}"
    cells.train(size, steps_of(ground, size), seed, task)
    _, error = cells.evaluate(ground.test)
    loss, _ = cells.evaluate(ground.probe)
    distance = cells.distances().where(loss.isfinite(), torch.nan)
    return error.T, loss.T, distance.T


def _mean(values: Tensor) -> str:
    finite = values[values.isfinite()]
    if len(finite) == 0:
        return "diverged"
    error = f" ± {float(finite.std()) / math.sqrt(len(finite)):.1g}" if len(finite) > 1 else ""
    lost = len(values) - len(finite)
    return f"{float(finite.mean()):.3g}{error}" + (f", {lost} diverged" if lost else "")


Noise = Estimate | DirectionalVariance

BATCHES = 5
PAIRS = 5
VARIANCE_SAMPLES = 1000
TOL = 1e-2
MODELS = ("additive", "directional")
HELD = {"sgd": 0.0, "momentum": MOMENTUM}  # the momentum of the optimisers that the rule speaks of


@dataclass(frozen=True)
class RateRule(Result):
    """λ₁ of all data and of batches: ``predicted`` (sizes,), ``measured`` (sizes, batches)."""

    network: str
    point: str
    samples: int
    batch_sizes: tuple[int, ...]
    full: float
    predicted: dict[str, Tensor]
    measured: Tensor

    def rates(self, optimizer: str, by: str = "measured") -> Tensor:
        """The largest stable rates (sizes,), from λ₁ "measured" or as a model predicts it.

        2/λ₁ of the batch for SGD (Eq. 5.34, spectral thesis); with momentum the noise counts for
        more, see ``randommatrix.stability_limit``.
        """
        momentum, excess = HELD[optimizer], self.excess(by).tolist()
        limits = [stability_limit(self.full, value, momentum) for value in excess]
        return torch.tensor(limits, dtype=torch.float64)

    def excess(self, by: str = "measured") -> Tensor:
        """The excess of a batch's λ₁ over that of all data (sizes,), measured or predicted; ≥ 0."""
        batch = self.measured.mean(1) if by == "measured" else self.predicted[by]
        return (batch - self.full).clamp_min(0.0)

    def dampings(self, rate: float = 1.0, by: str = "measured") -> Tensor:
        """The least damping (sizes,) at a rate α: α/2 times what a batch adds to λ₁.

        By the model "additive" a batch adds Pσ²/(bλ₁), and this is Eq. 5.36 of the spectral thesis
        with its units mended, δ = αPσ²/(2bλ₁). By "directional" it is ατ²/(2bλ₁) to first order.
        The "measured" one is no equation of the thesis.
        """
        return 0.5 * rate * self.excess(by)

    def turning(self, optimizer: str) -> float:
        """The batch size at which noise halves the rate, from what single batches show.

        The excess of λ₁ over that of all data is c/b: c is the slope of least squares over 1/b,
        batch sizes weighted by the spread of its batches and by 1 % of λ₁.
        """
        sizes = [effective_batch(size, self.samples) for size in self.batch_sizes]
        inverse = torch.tensor([1 / size for size in sizes]).double()
        excess = self.measured.mean(1) - self.full
        spread = self.measured.var(1) / self.measured.shape[1]
        weights = (spread + (0.01 * self.full) ** 2).reciprocal()
        slope = float((weights * inverse * excess).sum() / (weights * inverse.square()).sum())
        momentum = HELD[optimizer]
        return max(slope, 0.0) / self.full * (1 + momentum) / (1 - momentum)


def rule_at(ground: PreparedSubject, problem: Problem, point: str, seed: int) -> RateRule:
    """The rate rule at the parameters of a problem over the subject's training samples."""
    pairs = eigenpairs(hessian(problem), PAIRS, tol=1e-3, seed=seed)
    samples = min(VARIANCE_SAMPLES, problem.num_samples)
    noise: dict[str, Noise] = {
        "additive": variance(problem, probes=4, seed=seed, samples=samples).hessian_variance,
        "directional": directional_variance(problem, pairs, probes=1, samples=samples, seed=seed),
    }
    sizes, population = ground.subject.batch_sizes, problem.num_samples
    predicted = {}
    for model in MODELS:
        predictions = [predict(pairs, noise[model], size, population, model) for size in sizes]
        predicted[model] = torch.tensor(
            [float(each.largest) for each in predictions], dtype=torch.float64
        )
    shown = [
        batch_eigenpairs(problem, size, BATCHES, seed=seed, tol=TOL).largest[:, 0] for size in sizes
    ]
    measured = torch.stack([torch.as_tensor(values, dtype=torch.float64) for values in shown])
    full = float(pairs.values[0])
    return RateRule(ground.subject.network, point, population, sizes, full, predicted, measured)


def start_of(ground: PreparedSubject) -> Problem:
    """The first seed's network at its start."""
    return Problem(ground.models[0], "cross_entropy", ground.train)


def train_from(ground: PreparedSubject, rate: float, seed: int) -> Problem:
    """The first seed's network after SGD at a rate, on batches of the reference size."""
    subject = ground.subject
    cells = Cells(ground.models[:1], ground.train, StackedSettings("sgd", torch.tensor([[rate]])))
    cells.train(subject.reference, subject.steps, seed, f"{subject.network}, a trained point")
    return start_of(ground).at({name: tensor[0, 0] for name, tensor in cells.parameters.items()})


OUTCOMES = ("validation error", "training loss", "distance")


def edge_rows(frontier: Frontier) -> list[Row]:
    """A row for each batch size and seed."""
    names = ("network", "optimizer", "criterion", "resolution")
    where = {"part": "edge"} | {name: getattr(frontier, name) for name in names}
    return [
        {**where, "batch_size": size, "seed": seed, "edge": float(edge)}
        for size, edges in zip(frontier.batch_sizes, frontier.edges, strict=True)
        for seed, edge in enumerate(edges)
    ]


def rule_rows(rule: RateRule) -> list[Row]:
    """A row for each batch that was measured."""
    where: Row = {"part": "rule", "network": rule.network, "point": rule.point}
    where |= {"population": rule.samples, "full": rule.full}
    return [
        {**where, "batch_size": size, "batch": batch, "largest": float(value)}
        | {model: float(values[place]) for model, values in rule.predicted.items()}
        for place, size in enumerate(rule.batch_sizes)
        for batch, value in enumerate(rule.measured[place])
    ]


def scaling_rows(runs: ScalingRuns) -> list[Row]:
    """A row for each run."""
    names = ("network", "optimizer", "scaled", "reference", "epochs")
    where = {"part": "scaling"} | {name: getattr(runs, name) for name in names}
    outcomes = {name: getattr(runs, name.replace(" ", "_")) for name in OUTCOMES}
    return [
        {**where, "rule": rule, "batch_size": size, "seed": seed}
        | {"value": float(runs.values[row, place])}
        | {name: float(values[row, place, seed]) for name, values in outcomes.items()}
        for row, rule in enumerate(runs.rules)
        for place, size in enumerate(runs.batch_sizes)
        for seed in range(runs.validation_error.shape[2])
    ]


def frontiers_of(rows: Rows) -> list[Frontier]:
    """The edges of every network, optimiser and criterion."""
    out = []
    keys = ("network", "optimizer", "criterion")
    for (network, optimizer, criterion), part in rows.where(part="edge").groups(*keys):
        sizes, seeds = sorted(part.distinct("batch_size")), part.distinct("seed")
        edges = _fill(part, "edge", batch_size=sizes, seed=seeds)
        where = (network, optimizer, criterion, tuple(sizes))
        out.append(Frontier(*where, edges, part[0]["resolution"]))
    return out


def rules_of(rows: Rows) -> list[RateRule]:
    """The rule of every network at every point."""
    out = []
    for (network, point), part in rows.where(part="rule").groups("network", "point"):
        sizes, first = sorted(part.distinct("batch_size")), part[0]
        values = _fill(part, "largest", batch_size=sizes, batch=part.distinct("batch"))
        predicted = {
            model: _fill(part, model, batch_size=sizes, batch=[0])[:, 0]
            for model in MODELS
            if model in first
        }
        where = (network, point, first["population"], tuple(sizes), first["full"])
        out.append(RateRule(*where, predicted, values))
    return out


def networks_of(rows: Rows) -> Iterator[tuple[str, list[Frontier], list[RateRule]]]:
    """Each network with its edges, and its rules."""
    frontiers, rules = frontiers_of(rows), rules_of(rows)
    for network in dict.fromkeys(frontier.network for frontier in frontiers):
        own = [frontier for frontier in frontiers if frontier.network == network]
        yield network, own, [rule for rule in rules if rule.network == network]


def scaling_of(rows: Rows) -> list[ScalingRuns]:
    """The runs of every network and optimiser."""
    out = []
    for (network, optimizer), part in rows.where(part="scaling").groups("network", "optimizer"):
        rules, sizes = part.distinct("rule"), sorted(part.distinct("batch_size"))
        axes = {"rule": rules, "batch_size": sizes, "seed": part.distinct("seed")}
        values = _fill(part, "value", **axes)[..., 0]
        error, loss, distance = (_fill(part, name, **axes) for name in OUTCOMES)
        first = part[0]
        where = (network, optimizer, first["scaled"], first["reference"], first["epochs"])
        grid = (tuple(rules), tuple(sizes), values)
        out.append(ScalingRuns(*where, *grid, error, loss, distance))
    return out


def _fill(rows: Rows, name: str, **axes: list[object]) -> Tensor:
    """A column as an array over the values of other columns; NaN where there is no row."""
    places = [{value: place for place, value in enumerate(values)} for values in axes.values()]
    array = torch.full([len(values) for values in axes.values()], math.nan, dtype=torch.float64)
    for row in rows:
        index = tuple(place.get(row[axis]) for axis, place in zip(axes, places, strict=True))
        if None not in index:
            array[index] = row[name]
    return array
