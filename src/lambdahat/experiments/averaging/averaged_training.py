"""Training with iterate averaging: networks, recipes, runs, and when runs can be compared.

``unready`` and its parts give the reason why a claim cannot be tested here, or "". Their thresholds
were set after the first runs at the scale ``cpu``; none depends on the outcome of a comparison.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lambdahat._core.check import require, require_choice, require_count
from lambdahat.experiments import kit
from lambdahat.experiments.kit import Cell, Reading, Row, Rows, training
from lambdahat.experiments.kit.cells import key_of
from lambdahat.optim.adaptive import Gadam, GadamX, Padam, PadamW
from lambdahat.optim.averaging import SWA, Averaged, Lookahead, refresh_batch_norm
from lambdahat.optim.schedules import make_schedule
from lambdahat.problem import Problem
from lambdahat.problem.batches import Batches
from lambdahat.training.stepping import joint_norm


def family(name: str) -> str:
    """The first word of a network's name: "VGG" of "VGG-16-BN"."""
    return name.split("-")[0]


class AveragePlan(NamedTuple):
    """Average the iterates after steps ``start``, ``start + every``, …"""

    start: int
    every: int

    def due(self, step: int) -> bool:
        """Whether the iterate after ``step`` steps is averaged."""
        return step >= max(self.start, 1) and (step - self.start) % self.every == 0


class Averages:
    """A ``fit`` tracker that keeps θ̄ ← θ̄ + (θ − θ̄)/(n + 1) for each plan, as ``Gadam`` does."""

    name, unit, every = "averages", "step", 1

    def __init__(self, plans: Sequence[AveragePlan]) -> None:
        for plan in plans:
            require_count(plan.start, "start", least=0)
            require_count(plan.every, "every")
        self.plans = list(dict.fromkeys(plans))
        self.counts = dict.fromkeys(self.plans, 0)
        self._means: dict[AveragePlan, list[Tensor]] = {}

    @torch.no_grad()
    def measure(
        self, problem: Problem, optimizer: Any = None, epoch: int = 0, step: int = 0
    ) -> dict[str, float]:
        """Add the iterate to the averages that are due; the run's rows get nothing."""
        params = [p for group in optimizer.param_groups for p in group["params"]]
        for plan in self.plans:
            if not plan.due(step):
                continue
            if self.counts[plan] == 0:
                self._means[plan] = [p.detach().clone() for p in params]
            else:
                torch._foreach_lerp_(self._means[plan], params, 1 / (self.counts[plan] + 1))
            self.counts[plan] += 1
        return {}

    def take(self, others: Averages) -> bool:
        """Copy the averages that ``others`` kept of the same run; False if one is missing."""
        if not set(self.plans) <= set(others.plans):
            return False
        self.counts = {plan: others.counts[plan] for plan in self.plans}
        self._means = {plan: others._means[plan] for plan in self.plans if plan in others._means}
        return True

    def model(self, plan: AveragePlan, like: nn.Module, batches: Iterable[Any]) -> nn.Module:
        """A copy of the network with a plan's average, batch norm refreshed from ``batches``."""
        some = self.counts.get(plan, 0) > 0
        require(some, "plan", "have averaged an iterate", plan, "train for longer")
        twin = copy.deepcopy(like)
        with torch.no_grad():
            for parameter, mean in zip(twin.parameters(), self._means[plan], strict=True):
                parameter.copy_(mean)
            refresh_batch_norm(twin, batches)
        return twin


MOMENTUM = 0.9
AVERAGED_FROM = 161 / 300  # of the epochs
LOOKAHEAD, AUTO = "+LH", "-Auto"
BASES = {
    "SWA": "SGD",
    "ASGD": "SGD",
    "Adam-IA": "Adam",
    "Padam-IA": "Padam",
    "Gadam": "AdamW",
    "GadamX": "PadamW",
}
FINAL = {"linear": 0.01, "averaging": 0.5}  # last rate over first, as in the thesis's code


def averages(name: str) -> bool:
    """Whether an optimiser, by its name, returns the average of its iterates."""
    return name.removesuffix(LOOKAHEAD).removesuffix(AUTO) in BASES


def recipe(
    optimizer: str,
    rate: float,
    decay: float,
    epochs: int,
    schedule: str = "",
    first: int | None = None,
    every: int = 0,
) -> Cell:
    """The part of a cell that says how to train.

    ``schedule`` is by default the thesis's: a straight line down to a hundredth (Eq. 12, flatness
    paper), or with averages to a half, constant from then on (Eq. 13). Averages begin after epoch
    ``first``, by default the share 161/300, and take an iterate every ``every`` steps, once per
    epoch where that is 0.
    """
    start = max(1, round(AVERAGED_FROM * epochs)) if first is None else first
    return {
        "optimizer": optimizer,
        "rate": rate,
        "decay": decay,
        "epochs": epochs,
        "schedule": schedule or ("averaging" if averages(optimizer) else "linear"),
        "first": start,
        "every": every,
    }


def make_optimizer(cell: Cell, parameters: Iterable[Tensor], steps: int) -> Optimizer:
    """The optimiser of a cell; an epoch has so many ``steps``. "+LH" wraps Lookahead around it.

    "-Auto" waits for ``patience`` epochs without a better validation loss before it averages, and
    as long again before it stops (§7.8.7). Of ``eps`` and ``power`` (p of Padam) a cell may have
    its own.
    """
    name: str = cell["optimizer"]
    if name.endswith(LOOKAHEAD):
        alone = {**cell, "optimizer": name.removesuffix(LOOKAHEAD)}
        base = make_optimizer(alone, parameters, steps)
        return Lookahead(base, centralize=cell.get("centralize", False))
    plain = name.removesuffix(AUTO)
    base_name = BASES.get(plain, plain)
    parameters = list(parameters)
    # torch's default takes a pass over the memory for every operation of the rule
    fused: dict[str, Any] = {"fused": all(parameter.is_cuda for parameter in parameters)}
    rate, decay = cell["rate"], {"weight_decay": cell["decay"]}
    eps, power = {"eps": cell.get("eps", 1e-8)}, {"p": cell.get("power", 0.125)}
    when: dict[str, Any] = {"average_every": cell["every"] or steps}
    if name.endswith(AUTO):
        when["patience"] = cell["patience"]
    else:
        when["average_start"] = cell["first"] * steps
    if plain in ("Gadam", "GadamX"):
        averaged = Gadam if plain == "Gadam" else GadamX
        return averaged(parameters, rate, **eps, **decay, **when)
    if plain == "SWA":
        return SWA(parameters, rate, MOMENTUM, cell["decay"], **when)
    makers: dict[str, Callable[..., Optimizer]] = {
        "SGD": partial(torch.optim.SGD, momentum=cell.get("momentum", MOMENTUM), **fused),
        "Adam": partial(torch.optim.Adam, **eps, **fused),
        "AdamW": partial(torch.optim.AdamW, **eps, **fused),
        "Padam": partial(Padam, **power),
        "PadamW": partial(PadamW, **power),
    }
    make = makers[require_choice(base_name, "optimizer", makers)]
    made = make(parameters, rate, **decay)
    return Averaged(made, **when) if plain in BASES else made


def schedule_of(cell: Cell, optimizer: Optimizer) -> LRScheduler:
    """The cell's learning-rate schedule, stepped once per epoch."""
    name, settings = cell["schedule"], {}
    if name in FINAL:
        settings["ratio"] = cell.get("ratio", FINAL[name])
    if name == "averaging":
        settings["averaging_start"] = cell["first"]
    if name == "step" and "milestones" in cell:
        settings["milestones"] = tuple(cell["milestones"])
    return make_schedule(name, optimizer, cell["epochs"], **settings)


REFRESHED = 10_000  # samples for the batch-norm statistics of an average (§7.3.1)
MEASURED = ("run", "part", "norm layers", "samples", "depth")  # settings that no training reads
# samples at once, for several processes share a GPU; gadam-image takes curvature on the first
JUDGED = 512

# the runs of ``sharing_runs`` that another cell may take over: with the weights at the end, and the
# averages that were kept of it
_kept: dict[str, tuple[AveragedRun, dict[str, Tensor], Averages]] | None = None


@dataclass(frozen=True)
class AveragedTask:
    """A network, the loss on its training data, and held-out batches."""

    model: nn.Module
    problem: Problem
    held_out: Batches

    def training(self, size: int) -> Iterator[Any]:
        """Inputs of the first training samples, for the statistics of batch norm."""
        left = REFRESHED
        for batch in self.problem.batches:
            for part in batch.data[0].split(size):
                if left > 0 and len(part) > 1:
                    left -= len(part)
                    yield part


@dataclass(frozen=True)
class AveragedRun:
    """A finished run: a row per epoch, and the trained network or the average of its iterates."""

    rows: list[Row]
    solution: nn.Module
    averaged: bool

    @property
    def end(self) -> Row:
        """The last epoch's row, with the iterate's accuracy where averaging began ("before")."""
        last = {**self.rows[-1], "kind": "end", "stopped": self.rows[-1]["epoch"]}
        begun = [row for row in self.rows if row["averaged"]]
        before = begun[0] if begun else self.rows[-1]
        return {**last, "begun": before["epoch"], "before": before["iterate accuracy"]}


def image_task(cell: Cell, device: str, start: int | None = None) -> AveragedTask:
    """A cell's network on its part of the data; ``start`` seeds the weights."""
    data, seed = training.images(cell, device), cell["seed"] if start is None else start
    model = training.network(cell["network"], data.shape, data.classes, seed, device)
    problem = Problem(model, "cross_entropy", data.training, batch_size=JUDGED)
    return AveragedTask(model, problem, problem.on(data.held_out, JUDGED).batches)


def training_of(cell: Cell) -> str:
    """A key of the settings that determine a training run; cells may measure different things."""
    return key_of({name: value for name, value in cell.items() if name not in MEASURED})


@contextmanager
def sharing_runs() -> Iterator[None]:
    """Let ``train`` keep its runs, and take one over where a cell trains as an earlier one did.

    A run takes the memory of its networks, so that a block is best one for each training.
    """
    global _kept
    before, _kept = _kept, {}
    try:
        yield
    finally:
        _kept = before


def train(cell: Cell, task: AveragedTask, averages: Averages | None = None) -> AveragedRun:
    """Train a task's network in place as the cell says, and keep ``averages`` of its iterates."""
    averages = Averages([]) if averages is None else averages
    key = training_of(cell)
    shared = None if _kept is None else _kept.get(key)
    if shared is not None and averages.take(shared[2]):
        own, end, _ = shared
        task.model.load_state_dict(end)
        return own if own.averaged else replace(own, solution=task.model)
    trained = _train(cell, task, [averages] if averages.plans else [])
    if _kept is not None:
        end = {name: value.clone() for name, value in task.model.state_dict().items()}
        _kept[key] = trained, end, averages
    return trained


def _train(cell: Cell, task: AveragedTask, trackers: Sequence[Any]) -> AveragedRun:
    model, steps = task.model, math.ceil(task.problem.num_samples / cell["batch"])
    optimizer: Any = make_optimizer(cell, model.parameters(), steps)

    def average_norm() -> Row:
        averaging = getattr(optimizer, "averaging", False)
        norm = float(joint_norm(optimizer.averaged_parameters)) if averaging else None
        return {"average norm": norm}

    watch, schedule = training.Watch(average_norm, 1), schedule_of(cell, optimizer)
    given = cell, optimizer, schedule, task.held_out, [watch, *trackers]
    history = training.train(task.problem, *given).epochs
    rows = [_epoch(row, seen) for row, seen in zip(history, [*watch.rows, {}], strict=False)]
    if not getattr(optimizer, "averaging", False):
        return AveragedRun(rows, model, averaged=False)
    with torch.no_grad():
        solution = optimizer.averaged_model(model, task.training(cell["batch"]))
    return AveragedRun(rows, solution, averaged=True)


def _epoch(row: Any, seen: Row) -> Row:
    """The row of an epoch; "accuracy" and "loss" are those of the average once there is one."""
    averaged = "average_validation_loss" in row
    kind = "average_validation" if averaged else "validation"
    norm, rate = row["norm"], row["learning_rate"]
    mean_norm = seen.get("average norm") if averaged else None
    return {
        "kind": "epoch",
        "epoch": row["epoch"],
        "averaged": averaged,
        "rate now": rate,
        "training loss": row["loss"],
        "training accuracy": 100 * row["accuracy"],
        "iterate accuracy": 100 * row.get("validation_accuracy", math.nan),
        "iterate loss": row.get("validation_loss", math.nan),
        "accuracy": 100 * row.get(f"{kind}_accuracy", math.nan),
        "loss": row.get(f"{kind}_loss", math.nan),
        "norm": norm,
        "max norm": row["max_norm"],
        "effective rate": rate / norm**2,
        "average norm": mean_norm,
        "solution norm": mean_norm if averaged else norm,
    }


@torch.no_grad()
def top_accuracy(model: nn.Module, batches: Batches, top: int = 1) -> float:
    """The top-``top`` accuracy on held-out samples, in per cent."""
    was, hits, count = model.training, 0, 0
    model.eval()
    for batch in batches:
        x, y = batch.data
        logits = model(x)
        best = logits.topk(min(top, logits.shape[-1]), dim=-1).indices
        hits += int((best == y.unsqueeze(-1)).sum())
        count += y.numel()
    model.train(was)
    return 100 * hits / count


def size_of(task: AveragedTask) -> Row:
    """The number of parameters as a column of a row."""
    return {"parameters": training.parameters_of(task.model)}


RUN = ("network", "seed")  # which runs are compared with each other
gap, decades = partial(kit.gap, by=RUN), partial(kit.decades, by=RUN)
mean = partial(kit.over_seeds, by=RUN)


def change(rows: Rows, after: str, before: str) -> Reading:
    """The difference of two columns of the same rows, over networks and seeds."""
    return kit.paired_difference(rows.paired(after, RUN), rows.paired(before, RUN))


def comparison(
    upper: Rows,
    lower: Rows,
    column: str = "accuracy",
    read: Callable[[Rows, Rows, str], Reading] = gap,
    unmet: Callable[..., str] | None = None,
) -> dict[str, Any]:
    """Reading, unit and condition of a claim that compares two runs."""
    reason = (unmet or unready)(upper, lower)
    unit = " decades" if read is decades else " points"
    return {"reading": read(upper, lower, column), "unit": unit, "unmet": reason}


def against_best(of: dict[str, Rows], name: str, column: str = "accuracy") -> tuple[str, Reading]:
    """The best of the others by its mean, and how far ``name`` is above it."""
    others = {other: mean(part, column).value for other, part in of.items() if other != name}
    rival = max(others, key=others.__getitem__)
    return rival, gap(of[name], of[rival], column)


def tuned_start(averages: Rows, name: str, lowest: bool = False) -> dict[Any, float]:
    """A column for each seed, at the start of averaging that is best for the other seeds."""
    seeds, best = averages.distinct("seed"), min if lowest else max
    out: dict[Any, float] = {}
    for seed in seeds:
        others = averages.where(seed=[other for other in seeds if other != seed])
        means = others.paired(name, by="start")
        if means:
            chosen = averages.where(seed=seed, start=best(means, key=means.__getitem__))
            out |= chosen.paired(name)
    return out


SATURATED = 99.5  # per cent held out, beyond which nothing is left to gain
SETTLED = 1.0  # points that the iterates may still gain while they are averaged


def unready(*parts: Rows) -> str:
    """Why the accuracies of runs cannot be compared, or ""; each part is the end of one setting."""
    return unlearnt_reason(*parts) or ceiling_reason(*parts) or unsettled_reason(*parts)


def unlearnt_reason(*parts: Rows) -> str:
    """Names a run whose held-out accuracy is less than twice chance, or ""."""
    for part in parts:
        accuracy = kit.over_seeds(part, "accuracy").value
        data = part[0].get("data", "") if len(part) else ""
        chance = training.CHANCE.get(data, training.TEN_CLASSES)
        if accuracy < training.LEARNT_RATIO * chance:
            figures = f"{accuracy:.1f} % held out where a guess has {chance:g} %"
            return f"{name_of(part)} learnt nothing, {figures}"
    return ""


def ceiling_reason(*parts: Rows) -> str:
    """Says that all runs are near 100 %, so that they cannot be ordered, or ""."""
    values = [kit.over_seeds(part, "accuracy").value for part in parts]
    if values and all(value >= SATURATED for value in values):
        return f"all have at least {SATURATED:g} % held out"
    return ""


def unsettled_reason(*parts: Rows) -> str:
    """Averages that began while the iterates still improved, where the thesis lets them begin once
    "the validation statistics stop improving and iterates oscillate around the minimum" (§7.5.6).
    """
    for part in parts:
        kept = part.where(averaged=True)
        rise = kit.paired_difference(kept.paired("iterate accuracy"), kept.paired("before")).value
        if rise > SETTLED:
            more = f"its iterates gain {rise:.1f} points more"
            return f"averages of {name_of(part)} begin too soon, {more}"
    return ""


def name_of(part: Rows) -> str:
    """The name of a setting, from whichever column has it."""
    row = part[0] if len(part) else {}
    return str(row.get("run") or row.get("name") or row.get("optimizer") or "the run")
