"""The edge of stability over batch sizes: search, rule, scaled runs, and their rows.

``part`` tells the rows apart: "edge" has an edge for each seed and batch size, "rule" the largest
eigenvalue of one batch beside the predictions, "scaling" the outcome of one run. NaN stands where
nothing was found or a run diverged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from lambdahat.experiments.kit.claims import Reading, Table, mean_of
from lambdahat.experiments.minibatch.batch_points import cut, load_split
from lambdahat.models.model_registry import make_model
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
from lambdahat.results import Eigenpairs, Estimate

Array = NDArray[np.float64]
Passes = Callable[[Tensor], Tensor]
MARGIN = 0.2  # of a slope that counts as the one claimed
FEWEST = 3  # batch sizes that a slope is fitted to


@dataclass(frozen=True)
class SearchSection:
    """Where to look: at ``points`` values from ``low`` to ``high``, then at as many between two
    neighbours.

    ``rounds`` counts both.
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


def largest_passing(passes: Passes, section: SearchSection, seeds: int) -> Tensor:
    """The edge (S,) above which nothing passes: the geometric mean of the last value that does and
    the next.

    ``passes`` maps values (S, R) to whether each does. Values that fail below one that passes do
    not count: at tiny rates nothing is learnt in a given time. NaN where no value passes, infinite
    where the largest does.
    """
    logs = torch.linspace(
        math.log(section.low), math.log(section.high), section.points, dtype=torch.float64
    )
    grid = logs.expand(seeds, -1)
    below = torch.full((seeds,), math.nan, dtype=torch.float64)
    above = torch.full((seeds,), math.inf, dtype=torch.float64)
    for number in range(section.rounds):
        if number:
            shares = torch.arange(1, section.points + 1, dtype=torch.float64) / (section.points + 1)
            known = below.isfinite() & above.isfinite()
            low, high = below.where(known, logs[0]), above.where(known, logs[0])
            grid = low[:, None] + (high - low)[:, None] * shares
        below, above = _narrow(grid, passes(grid.exp()), below, above, first=number == 0)
    return torch.where(below.isnan(), math.nan, ((below + above) / 2).exp())


def _narrow(
    grid: Tensor, passed: Tensor, below: Tensor, above: Tensor, first: bool
) -> tuple[Tensor, Tensor]:
    """The new bracket of every seed: the largest value that passed, and the next one above it."""
    for row, (values, good) in enumerate(zip(grid, passed.cpu(), strict=True)):
        if not first and not (below[row].isfinite() and above[row].isfinite()):
            continue
        places = good.nonzero().flatten()
        place = int(places[-1]) if len(places) else -1
        if place >= 0:
            below[row] = values[place]
        if place + 1 < len(values) and (place >= 0 or not first):
            above[row] = values[place + 1]
    return below, above


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
        logs, found = self._logs()
        return (logs.sum(1) / found.sum(1)).exp()

    def at(self, batch_size: int) -> float:
        """The geometric mean at one batch size."""
        return float(self.centre()[self.batch_sizes.index(batch_size)])

    def stderr(self) -> Tensor:
        """Relative standard errors, over seeds and from the last section; NaN for one seed."""
        logs, found = self._logs()
        count = found.sum(1)
        around = (logs - (logs.sum(1) / count)[:, None]).where(found, 0.0).square().sum(1)
        spread = around / (count - 1) / count
        return (spread + math.log(self.resolution) ** 2 / (12 * count)).sqrt()

    def cell(self, batch_size: int) -> str:
        """The mean at one batch size, its relative error, and how many seeds have no edge."""
        place = self.batch_sizes.index(batch_size)
        known, seeds = int(self._logs()[1][place].sum()), self.edges.shape[1]
        missing = self._missing(place)
        if not known:
            return next(iter(missing)) if len(missing) == 1 else _count_text(missing)
        text = f"{self.at(batch_size):.3g}"
        text += f" ± {100 * float(self.stderr()[place]):.0f} %" if known > 1 else ""
        return (
            text if known == seeds else f"{text} ({known} of {seeds} seeds; {_count_text(missing)})"
        )

    def _missing(self, place: int) -> dict[str, int]:
        """How many seeds have no edge, by reason; an edge of a reciprocal can be 0."""
        edges = self.edges[place]
        counts = {
            "nothing is steady" if self.criterion == "steady" else "nothing trains": int(
                edges.isnan().sum()
            ),
            "below the search": int((edges == 0).sum()),
            "above the search": int(edges.isposinf().sum()),
        }
        return {reason: count for reason, count in counts.items() if count}

    def _logs(self) -> tuple[Tensor, Tensor]:
        """log edges, 0 where none was found, and where one was."""
        logs = self.edges.log()
        return logs.where(logs.isfinite(), 0.0), logs.isfinite()

    def slope(self, low: float = 0, high: float = math.inf) -> Reading:
        """d log edge/d log B over batch sizes in [low, high], mean over seeds; NaN with too few."""
        inside = [low <= size <= high for size in self.batch_sizes]
        logs = torch.tensor(self.batch_sizes, dtype=torch.float64).log()[inside]
        found = []
        for values in self.edges.log()[inside].T:
            fine = values.isfinite()
            if int(fine.sum()) >= FEWEST:
                found.append(float(np.polyfit(logs[fine], values[fine], 1)[0]))
        return mean_of(found if len(found) > 1 else [])

    def turning(self, power: float = 1.0) -> tuple[float, float]:
        """The batch size B₀ of edge = a·(1 + B₀/B)^−power, and the standard error of its logarithm
        over seeds.

        Below B₀ the edge grows as B^power, above it it is constant. 0 where it does not grow,
        infinite where it never stops.
        """
        sizes = np.asarray(self.batch_sizes, dtype=float)
        found = [_turning(sizes, values.numpy(), power) for values in self.edges.log().T]
        kept = np.asarray([value for value in found if math.isfinite(value)])
        if len(kept) < 2:
            return math.nan, math.nan
        return float(np.exp(kept.mean())), float(kept.std(ddof=1) / math.sqrt(len(kept)))


def _count_text(missing: Mapping[str, int]) -> str:
    return ", ".join(f"{reason}: {count}" for reason, count in missing.items())


def _turning(sizes: Array, logs: Array, power: float) -> float:
    """log B₀ by least squares, within a factor 16 of the batch sizes that were run."""
    fine = np.isfinite(logs)
    if fine.sum() < FEWEST:
        return math.nan
    sizes, logs = sizes[fine], logs[fine]
    low, high = math.log(sizes.min() / 16), math.log(sizes.max() * 16)

    def misfit(at: Array) -> Array:
        return np.asarray(at[0] - power * np.log1p(np.exp(at[1]) / sizes) - logs)

    starts = np.linspace(low, high, 5)[1:-1]
    fits = [
        least_squares(misfit, (logs.max(), start), bounds=((-np.inf, low), (np.inf, high)))
        for start in starts
    ]
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
        self.epsilon = (
            torch.full_like(self.rates, 1e-8)
            if settings.epsilon is None
            else settings.epsilon.to(like)
        )
        self.first = [torch.zeros_like(p) for p in self.parameters] if self.kind != "sgd" else []
        self.second = [torch.zeros_like(p) for p in self.parameters] if self.kind == "adam" else []
        # powers βᵗ live on the device, where a recorded step can change them
        self.powers = torch.ones(2, dtype=torch.float64, device=like.device)
        self.betas = torch.tensor(BETAS, dtype=torch.float64, device=like.device)

    def step(self, gradients: Sequence[Tensor]) -> None:
        """One step of every cell."""
        self.powers.mul_(self.betas)
        for index, (parameter, gradient) in enumerate(zip(self.parameters, gradients, strict=True)):
            parameter.addcmul_(
                self._direction(index, gradient), _wide(self.rates, parameter), value=-1
            )

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
        return (first / corrections[0]) / (
            (second / corrections[1]).sqrt() + _wide(self.epsilon, second)
        )


class Cells:
    """A network of every seed, in as many copies as there are settings, on one training set.

    All copies of a seed start from its network and read the same batches: settings are compared
    like with like.
    """

    def __init__(self, models: Sequence[nn.Module], data: Pair, settings: StackedSettings) -> None:
        x, y = data
        wanted = len(settings.rates)
        require(
            len(models) == wanted, "models", f"be {wanted}, one for each seed", str(len(models))
        )
        self.model, self.x, self.y = models[0], x, y
        copies = settings.rates.shape[1]
        self.start = {
            name: torch.stack(
                [dict(model.named_parameters())[name].detach() for model in models]
            ).to(x.device)
            for name, _ in self.model.named_parameters()
        }
        self.parameters = {
            name: tensor.unsqueeze(1).repeat(1, copies, *[1] * (tensor.ndim - 1))
            for name, tensor in self.start.items()
        }
        self.rule = StackedRule(list(self.parameters.values()), settings)
        self._gradients = vmap(vmap(grad_and_value(self._loss), in_dims=(0, None, None)))
        self._judge = vmap(
            vmap(self._evaluate_one, in_dims=(0, None, None)), in_dims=(0, None, None)
        )

    def _loss(self, parameters: Parameters, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(functional_call(self.model, parameters, (x,)), y)

    def _evaluate_one(self, parameters: Parameters, x: Tensor, y: Tensor) -> Tensor:
        """Sums of losses and of wrong answers, (2,)."""
        logits = functional_call(self.model, parameters, (x,))
        wrong = (logits.argmax(-1) != y).sum()
        return torch.stack([cross_entropy(logits, y, reduction="sum").double(), wrong.double()])

    def train(self, batch_size: int, steps: int, seed: int, task: str) -> Tensor:
        """``steps`` steps on batches drawn without replacement, each seed in an order of its own.

        Returns the mean loss of the batches, as they were met, in each tenth of the run: (10, S,
        R), on the CPU.
        """
        require(
            batch_size <= len(self.x),
            "batch_size",
            f"be at most {len(self.x)}, the samples there are",
            str(batch_size),
        )
        seeds = len(self.rule.rates)
        indices = torch.zeros(seeds, batch_size, dtype=torch.int64, device=self.x.device)
        replay, ends = (
            Replay(self.x.device),
            {steps * part // PARTS for part in range(1, PARTS + 1)},
        )
        total, before, means = torch.zeros_like(self.rule.rates), 0, []

        @torch.no_grad()
        def step() -> None:
            gradients, losses = self._gradients(self.parameters, self.x[indices], self.y[indices])
            total.add_(losses)
            self.rule.step([gradients[name] for name in self.parameters])

        for number, drawn in enumerate(
            _batches(seeds, len(self.x), batch_size, steps, seed, self.x.device)
        ):
            indices.copy_(drawn)
            replay("step", step)
            if number + 1 in ends:
                means.append(total.cpu() / (number + 1 - before))
                total.zero_()
                before = number + 1
                report(task, number + 1, steps)
        return torch.stack(means)

    @torch.no_grad()
    def evaluate(self, data: Pair) -> tuple[Tensor, Tensor]:
        """Mean loss and error rate over data, (S, R) each, on the CPU; NaN where not finite."""
        x, y = data
        size = max(1, CHUNK // self.rule.rates.numel())
        parts = [
            self._judge(self.parameters, *part)
            for part in zip(x.split(size), y.split(size), strict=True)
        ]
        loss, wrong = (torch.stack(parts).sum(0) / len(x)).cpu().unbind(-1)
        return loss.where(loss.isfinite(), torch.nan), wrong.where(loss.isfinite(), torch.nan)

    def distances(self) -> Tensor:
        """‖θ − θ₀‖₂ of every copy, (S, R)."""
        moved = [self.parameters[name] - start.unsqueeze(1) for name, start in self.start.items()]
        return (
            torch.stack([part.double().flatten(2).square().sum(2) for part in moved])
            .sum(0)
            .sqrt()
            .cpu()
        )


def _batches(
    seeds: int, samples: int, batch_size: int, steps: int, seed: int, device: torch.device
) -> Iterator[Tensor]:
    """Indices (S, B), step by step; an incomplete last batch of an epoch is dropped."""
    whole, done = samples // batch_size, 0
    for epoch in range(-(-steps // whole)):
        orders = [
            torch.randperm(samples, generator=generator(seed, "order", s, epoch))
            for s in range(seeds)
        ]
        drawn = torch.stack(orders)[:, : whole * batch_size].to(device)
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

    def description(self) -> str:
        """Its size in words."""
        return f"{self.network}: {self.samples:,} samples, {self.steps} steps, {self.seeds} seeds."


def subject_of(cell: Mapping[str, Any]) -> EdgeSubject:
    """The subject whose fields are among a cell's settings."""
    settings = {name: cell[name] for name in EdgeSubject.__dataclass_fields__}
    return EdgeSubject(**settings | {"batch_sizes": tuple(settings["batch_sizes"])})


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


def prepare(
    subject: EdgeSubject, splits: Mapping[str, Split], seed: int, device: torch.device | str
) -> PreparedSubject:
    """The subject's data, from ``splits`` if given there, and its networks."""
    split = splits.get(subject.data) or load_split(subject.data)
    (x, y), (x_test, y_test) = split
    require(
        subject.samples <= len(x),
        subject.data,
        f"have {subject.samples:,} training samples",
        f"{len(x):,}",
    )
    chosen = torch.randperm(len(x), generator=generator(seed, "training samples"))[
        : subject.samples
    ]
    train, test = (cut(x[chosen], subject.model), y[chosen]), (cut(x_test, subject.model), y_test)
    shape = tuple(train[0].shape[1:])
    models = [
        make_model(
            subject.model,
            shape,
            split.classes,
            derived_seed(seed, subject.network, index),
            **subject.options,
        )
        for index in range(subject.seeds)
    ]
    return PreparedSubject(
        subject,
        [model.to(device) for model in models],
        _to_device(train, device),
        _to_device(test, device),
    )


def _to_device(pair: Pair, device: torch.device | str) -> Pair:
    return pair[0].to(device), pair[1].to(device)


def powers(low: int, high: int) -> tuple[int, ...]:
    """2^low … 2^high."""
    return tuple(2**power for power in range(low, high + 1))


LEAST = 16  # batch size: smaller ones take long and nobody scales down to them


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

    def table(self) -> Table:
        """Validation error and distance by batch size, means over the seeds."""
        rows = []
        for place, size in enumerate(self.batch_sizes):
            cells = [
                f"{_mean(100 * self.validation_error[rule, place])}"
                f" ({_mean(self.distance[rule, place])})"
                for rule in range(len(self.rules))
            ]
            rows.append((str(size), *cells))
        base = float(self.values[0, self.batch_sizes.index(self.reference)])
        what = f"validation error in % (distance from the start) after {self.epochs} epochs"
        title = (
            f"{self.network}, {self.optimizer}: {what}, {self.scaled} {base:.3g} at B ="
            f" {self.reference}"
        )
        return Table(title, ("B", *self.rules), tuple(rows))


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
    sizes = tuple(size for size in subject.batch_sizes if size >= min(LEAST, subject.reference))
    values = torch.tensor(
        [[base * (size / subject.reference) ** power for size in sizes] for power in rules.values()]
    )
    found = [run(size, values[:, place]) for place, size in enumerate(sizes)]
    errors, losses, distances = (torch.stack(parts, dim=1) for parts in zip(*found, strict=True))
    return ScalingRuns(
        subject.network,
        optimizer,
        scaled,
        subject.reference,
        subject.epochs,
        tuple(rules),
        sizes,
        values,
        errors,
        losses,
        distances,
    )


def steps_of(ground: PreparedSubject, size: int) -> int:
    """The steps of the subject's epochs at a batch size."""
    return max(1, ground.subject.epochs * (len(ground.train[0]) // size))


def outcome(ground: PreparedSubject, settings: StackedSettings, size: int, seed: int) -> Outcome:
    """Stacked training at the settings of one batch size."""
    cells = Cells(ground.models, ground.train, settings)
    task = f"{ground.subject.network}, {settings.optimizer}, rules at B = {size}"
    cells.train(size, steps_of(ground, size), seed, task)
    _, error = cells.evaluate(ground.test)
    loss, _ = cells.evaluate(ground.probe)
    distance = cells.distances().where(loss.isfinite(), torch.nan)
    return error.T, loss.T, distance.T


def _mean(values: Tensor) -> str:
    found = values[values.isfinite()]
    if len(found) == 0:
        return "diverged"
    error = f" ± {float(found.std()) / math.sqrt(len(found)):.1g}" if len(found) > 1 else ""
    lost = len(values) - len(found)
    return f"{float(found.mean()):.3g}{error}" + (f", {lost} diverged" if lost else "")


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
        """The largest stable rates (sizes,) that the rule allows, from λ₁ "measured" or as a model
        predicts it.

        2/λ₁ of the batch for SGD (Eq. 5.34, spectral thesis); with momentum the noise counts for
        more, see ``randommatrix.stability_limit``.
        """
        found = [
            stability_limit(self.full, float(value), HELD[optimizer]) for value in self.excess(by)
        ]
        return torch.tensor(found, dtype=torch.float64)

    def excess(self, by: str = "measured") -> Tensor:
        """What a batch adds to λ₁ (sizes,), measured or as a model predicts; at least 0."""
        batch = self.measured.mean(1) if by == "measured" else self.predicted[by]
        return (batch - self.full).clamp_min(0.0)

    def dampings(self, rate: float = 1.0, by: str = "measured") -> Tensor:
        """The least damping (sizes,) of a second-order method at a rate: α/2 times what a batch
        adds to λ₁.

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
        inverse = torch.tensor(
            [1 / effective_batch(size, self.samples) for size in self.batch_sizes]
        ).double()
        excess = self.measured.mean(1) - self.full
        weights = (
            self.measured.var(1) / self.measured.shape[1] + (0.01 * self.full) ** 2
        ).reciprocal()
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
    sizes = ground.subject.batch_sizes
    predicted = {
        model: [_predict_largest(problem, pairs, noise[model], size, model) for size in sizes]
        for model in MODELS
    }
    shown = [
        batch_eigenpairs(problem, size, BATCHES, seed=seed, tol=TOL).largest[:, 0] for size in sizes
    ]
    return RateRule(
        ground.subject.network,
        point,
        problem.num_samples,
        sizes,
        float(pairs.values[0]),
        {model: torch.tensor(values, dtype=torch.float64) for model, values in predicted.items()},
        torch.stack([torch.as_tensor(values, dtype=torch.float64) for values in shown]),
    )


def start_of(ground: PreparedSubject) -> Problem:
    """The first seed's network at its start."""
    return Problem(ground.models[0], "cross_entropy", ground.train)


def train_from(ground: PreparedSubject, rate: float, seed: int) -> Problem:
    """The first seed's network after SGD at a rate, on batches of the reference size."""
    subject = ground.subject
    cells = Cells(ground.models[:1], ground.train, StackedSettings("sgd", torch.tensor([[rate]])))
    cells.train(subject.reference, subject.steps, seed, f"{subject.network}, a trained point")
    return start_of(ground).at({name: tensor[0, 0] for name, tensor in cells.parameters.items()})


def _predict_largest(
    problem: Problem, pairs: Eigenpairs, noise: Noise, size: int, model: str
) -> float:
    return float(predict(pairs, noise, size, population=problem.num_samples, model=model).largest)


OUTCOMES = {
    "validation error": "validation_error",
    "training loss": "training_loss",
    "distance": "distance",
}


def edge_rows(frontier: Frontier) -> list[Row]:
    """A row for each batch size and seed."""
    where = {
        "part": "edge",
        "network": frontier.network,
        "optimizer": frontier.optimizer,
        "criterion": frontier.criterion,
        "resolution": frontier.resolution,
    }
    return [
        {**where, "batch_size": size, "seed": seed, "edge": float(edge)}
        for size, edges in zip(frontier.batch_sizes, frontier.edges, strict=True)
        for seed, edge in enumerate(edges)
    ]


def rule_rows(rule: RateRule) -> list[Row]:
    """A row for each batch that was measured."""
    where = {
        "part": "rule",
        "network": rule.network,
        "point": rule.point,
        "population": rule.samples,
        "full": rule.full,
    }
    return [
        {**where, "batch_size": size, "batch": batch, "largest": float(value)}
        | {model: float(values[place]) for model, values in rule.predicted.items()}
        for place, size in enumerate(rule.batch_sizes)
        for batch, value in enumerate(rule.measured[place])
    ]


def scaling_rows(runs: ScalingRuns) -> list[Row]:
    """A row for each run."""
    where = {
        "part": "scaling",
        "network": runs.network,
        "optimizer": runs.optimizer,
        "scaled": runs.scaled,
        "reference": runs.reference,
        "epochs": runs.epochs,
    }
    return [
        {
            **where,
            "rule": rule,
            "batch_size": size,
            "seed": seed,
            "value": float(runs.values[row, place]),
        }
        | {name: float(getattr(runs, field)[row, place, seed]) for name, field in OUTCOMES.items()}
        for row, rule in enumerate(runs.rules)
        for place, size in enumerate(runs.batch_sizes)
        for seed in range(runs.validation_error.shape[2])
    ]


def frontiers_of(rows: Rows) -> list[Frontier]:
    """The edges of every network, optimiser and criterion."""
    edges, out = rows.where(part="edge"), []
    for network, optimizer, criterion in dict.fromkeys(
        (r["network"], r["optimizer"], r["criterion"]) for r in edges
    ):
        part = edges.where(network=network, optimizer=optimizer, criterion=criterion)
        sizes, seeds = sorted(part.distinct("batch_size")), part.distinct("seed")
        found = _fill(part, "edge", batch_size=sizes, seed=seeds)
        out.append(
            Frontier(network, optimizer, criterion, tuple(sizes), found, part[0]["resolution"])
        )
    return out


def rules_of(rows: Rows) -> list[RateRule]:
    """The rule of every network at every point."""
    measured, out = rows.where(part="rule"), []
    for network, point in dict.fromkeys((row["network"], row["point"]) for row in measured):
        part = measured.where(network=network, point=point)
        sizes, first = sorted(part.distinct("batch_size")), part[0]
        values = _fill(part, "largest", batch_size=sizes, batch=part.distinct("batch"))
        told = {
            model: _fill(part, model, batch_size=sizes, batch=[0])[:, 0]
            for model in MODELS
            if model in first
        }
        out.append(
            RateRule(network, point, first["population"], tuple(sizes), first["full"], told, values)
        )
    return out


def scaling_of(rows: Rows) -> list[ScalingRuns]:
    """The runs of every network and optimiser."""
    every, out = rows.where(part="scaling"), []
    for network, optimizer in dict.fromkeys((row["network"], row["optimizer"]) for row in every):
        part = every.where(network=network, optimizer=optimizer)
        first, rules, sizes = part[0], part.distinct("rule"), sorted(part.distinct("batch_size"))
        axes = {"rule": rules, "batch_size": sizes, "seed": part.distinct("seed")}
        values = _fill(part, "value", **axes)[..., 0]
        outcomes = [_fill(part, name, **axes) for name in OUTCOMES]
        out.append(
            ScalingRuns(
                network,
                optimizer,
                first["scaled"],
                first["reference"],
                first["epochs"],
                tuple(rules),
                tuple(sizes),
                values,
                *outcomes,
            )
        )
    return out


def _fill(rows: Rows, name: str, **axes: list[object]) -> Tensor:
    """A column as an array over the values of other columns; NaN where there is no row."""
    places = [{value: place for place, value in enumerate(values)} for values in axes.values()]
    found = torch.full([len(values) for values in axes.values()], math.nan, dtype=torch.float64)
    for row in rows:
        index = tuple(place.get(row[axis]) for axis, place in zip(axes, places, strict=True))
        if None not in index:
            found[index] = row[name]
    return found
