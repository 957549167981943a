"""Networks of the NGD paper: trained by SGD and by NGD from the same start on the same batches, and
what the paper measures at a point of a run.

``subject_of`` makes the network and the data of a cell, ``train_run`` a run with about 100 points
of its way, and ``measure`` a row of one point: λ̂ at two temperatures, Tr H, WBIC, losses, and G_n,
which the paper lacked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from lambdahat._core.check import require_choice
from lambdahat._core.progress import report
from lambdahat._core.rng import derived_seed, generator
from lambdahat.data.catalogue import data_digest, load, note_data
from lambdahat.estimators._trace import trace
from lambdahat.experiments.kit import Cell, Row, grid
from lambdahat.models.convolutional import lenet5
from lambdahat.models.perceptrons import mlp
from lambdahat.operators.curvature import hessian
from lambdahat.optim.ngd import NGD
from lambdahat.problem import Problem
from lambdahat.singular._llc import default_localization, llc
from lambdahat.singular.bayes import bayes_criteria
from lambdahat.training import fit

# column: nβ as ``llc`` names it. Both, because the answer depends on it.
TEMPERATURES = {"llc": "n/log n", "llc_batch": "batch"}
WORDS = {"llc": "nβ = n/ln n", "llc_batch": "nβ = B/ln B"}
RULE = "_rule"  # ends the columns of λ̂ at the γ of the library's rule
Pair = tuple[Tensor, Tensor]
Net = tuple[str, int, int]  # "ffnn" with hidden layers and their width, or ("lenet5", 0, 0)
SIDE = 28  # pixels of LeNet-5's images
POINTS = 100  # of a run that are kept, about


def ngd_setting(data: str, training: int, held_out: int, epochs: int, **more: Any) -> Cell:
    """The settings that all runs of a cell share: data, training and the sampling of λ̂.

    α and ε are Eq. 7's. Each chain of λ̂ takes ``burn_in`` + ``draws`` steps of SGLD on batches of
    ``sampled_batch``: a chain that finds lower loss than the centre goes on falling, so that its
    length must not differ between runs. A pilot finds the step size where it is None. With ``tol``
    λ̂ is instead drawn by ``llc``'s own kernel until its standard error is this part of it or
    ``max_gradients`` are spent, ``draws`` and ``burn_in`` being None; where a ``mode`` is named,
    nothing is chosen by timing. With ``rule`` λ̂ is also drawn at the γ that the library's rule
    gives where SGD ended.
    """
    samples = {"data": data, "training": training, "held_out": held_out, "epochs": epochs}
    descent = {"rate": 0.01, "alpha": 0.1, "epsilon": 1e-10, "batch": 128}
    chains = {"chains": 4, "draws": 500, "burn_in": 500, "sampled_batch": 512}
    return {**samples, **descent, **chains, "localization": 100.0, "step_size": None, **more}


@dataclass(frozen=True)
class RunPoint:
    """The parameters (P,) after ``epoch`` epochs and L_n over all training data."""

    epoch: float
    loss: float
    vector: Tensor


@dataclass(frozen=True)
class Way:
    """The points of a run, and the update norm of each epoch, ‖∇L‖ or ‖F_s⁻¹∇L‖ (§3.3)."""

    optimizer: str
    points: tuple[RunPoint, ...]
    update_norms: tuple[float, ...]
    diverged: bool = False

    @property
    def end(self) -> RunPoint:
        """Where the run ended."""
        return self.points[-1]

    def at(self, epoch: float) -> RunPoint:
        """The point nearest to an epoch."""
        return min(self.points, key=lambda point: abs(point.epoch - epoch))


@dataclass(eq=False)
class Snapshots:
    """A tracker that keeps parameters and finite losses every ``every`` of ``steps`` an epoch."""

    every: int
    steps: int
    points: list[RunPoint] = field(default_factory=list)
    unit: str = "step"
    name: str = "snapshots"

    def measure(
        self, problem: Problem, optimizer: Any = None, epoch: int = 0, step: int = 0
    ) -> dict[str, float | str]:
        """Keep where the run is; it gives the row nothing."""
        point = RunPoint(step / self.steps, float(problem.loss()), problem.vector.detach().clone())
        if math.isfinite(point.loss):
            self.points.append(point)
        return {}


@dataclass(frozen=True)
class NgdSubject:
    """A cell, its training problem with the model, and the held-out data."""

    cell: Cell
    problem: Problem
    held_out: Problem

    @property
    def seed(self) -> int:
        """The seed of the cell."""
        return int(self.cell["seed"])

    def place(self, vector: Tensor) -> None:
        """Put the model at parameters (P,)."""
        assert self.problem.model is not None
        with torch.no_grad():
            for name, tensor in self.problem.space.unflatten(vector).items():
                self.problem.model.get_parameter(name).copy_(tensor)


TINY = ngd_setting("digits", 200, 100, 12, rate=0.05, batch=50, chains=2, draws=10, burn_in=10)
TINY |= {"sampled_batch": 50, "step_size": 3e-4}
SMALL = ngd_setting("mnist", 4096, 2000, 35, rate=0.05, chains=2, draws=150, burn_in=150)
WHOLE = ngd_setting(
    "mnist", 60_000, 10_000, 60, draws=None, burn_in=None, tol=0.05, max_gradients=10_000
)


def run_cells(setting: Cell, networks: Sequence[Net], seeds: int, **more: Any) -> list[Cell]:
    """A cell for every network and seed."""
    nets = [dict(zip(("network", "layers", "width"), net, strict=True)) for net in networks]
    return [cell | more for cell in grid(setting, net=nets, seed=range(seeds))]


def subject_of(cell: Cell, device: str) -> NgdSubject:
    """The network of a cell at its start, with images that the cell's seed drew."""
    *parts, classes = load_images(cell["data"], cell["network"])
    model = network(cell, math.prod(parts[0][0].shape[1:]), classes).to(device)
    counts = {"training": cell["training"], "held out": cell["held_out"]}
    drawn = []
    for (x, y), (name, count) in zip(parts, counts.items(), strict=True):
        rows = torch.randperm(len(y), generator=generator(cell["seed"], name))[:count]
        drawn.append((x[rows].to(device), y[rows].to(device)))
    problem = Problem(model, "cross_entropy", drawn[0], batch_size=10_000)
    return NgdSubject(cell, problem, problem.on(drawn[1]))


def load_images(data: str, network: str) -> tuple[Pair, Pair, int]:
    """All training and held-out images of a data set as a network takes them, and the classes."""
    contents = data_digest(data)  # data that have changed are read again
    note_data(data, lambda: contents)
    return _prepare(data, network, contents)


@lru_cache(maxsize=4)
def _prepare(data: str, network: str, _contents: str | None) -> tuple[Pair, Pair, int]:
    options: dict[str, Any] = {} if data == "digits" else {"normalization": "standard"}
    split = load(data, **options)
    mean, deviation = split.train[0].mean(), split.train[0].std()
    pairs = []
    for x, y in split:
        scaled = (x - mean) / deviation if data == "digits" else x
        if network == "lenet5":
            side = math.isqrt(x[0].numel())
            square = scaled.view(len(x), 1, side, side)
            inputs = square if side == SIDE else interpolate(square, size=(SIDE, SIDE))
        else:
            inputs = scaled.flatten(1)
        pairs.append((inputs, y))
    return pairs[0], pairs[1], split.classes


def network(cell: Cell, inputs: int, classes: int) -> nn.Module:
    """The network of a cell at its start: "ffnn" or "lenet5" (§2.1)."""
    if require_choice(cell["network"], "network", ("ffnn", "lenet5")) == "lenet5":
        return lenet5(classes=classes, seed=cell["seed"])
    return mlp([inputs, *[cell["width"]] * cell["layers"], classes], seed=cell["seed"])


def train_run(
    subject: NgdSubject,
    optimizer: str,
    start: Tensor | None = None,
    stage: str = "",
    **changes: Any,
) -> Way:
    """Train by "sgd" or "ngd" from ``start`` (the model's parameters as they are).

    ``changes`` replace rate, alpha, epsilon or epochs of the cell. Runs of the same ``stage``
    see the same batches. Inside ``runs_from`` the run is taken from there.
    """
    cell, problem = {**subject.cell, **changes}, subject.problem
    if start is not None:
        subject.place(start)
    if _source is not None:
        return _source(cell, optimizer, problem.vector, stage)
    assert problem.model is not None
    parameters = list(problem.model.parameters())
    if require_choice(optimizer, "optimizer", ("sgd", "ngd")) == "sgd":
        rule: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=cell["rate"])
    else:
        rule = NGD(parameters, cell["rate"], alpha=cell["alpha"], epsilon=cell["epsilon"])
    epochs, batch = cell["epochs"], cell["batch"]
    steps = math.ceil(problem.num_samples / batch)
    total = steps * epochs
    # a divisor, so that the end is a point
    every = next(k for k in range(max(total // POINTS, 1), total + 1) if total % k == 0)
    kept = Snapshots(every, steps)
    kept.measure(problem)
    seed = derived_seed(subject.seed, "order", stage)
    run = fit(problem, rule, epochs, batch_size=batch, trackers=[kept], seed=seed)
    norms = tuple(float(row["update_norm"]) for row in run.epochs)
    return Way(optimizer, tuple(kept.points), norms, run.ended == "diverged")


def train_both(subject: NgdSubject) -> list[Way]:
    """The runs of SGD and of NGD from the model's parameters as they are."""
    start = subject.problem.vector.clone()
    return [train_run(subject, optimizer, start) for optimizer in ("sgd", "ngd")]


def at_equal_loss(ways: Sequence[Way]) -> list[RunPoint]:
    """A point of each run, all at the highest loss at which any of them ended."""
    goal = max(way.end.loss for way in ways)
    return [min(way.points, key=lambda point: abs(math.log(point.loss / goal))) for way in ways]


def measure_along(subject: NgdSubject, way: Way, points: int, bayes: bool = False) -> list[Row]:
    """Rows at the 1st, …, last of ``points`` equal parts of a run; ``part`` counts them."""
    rows = []
    for part in range(1, points + 1):
        point = way.at(part / points * way.end.epoch)
        place = {"at": "on the way", "part": part, "diverged": way.diverged}
        rows.append({"optimizer": way.optimizer, **place, **measure(subject, point, bayes)})
        report(f"measuring {way.optimizer.upper()}", part, points)
    return rows


def compare_ends(subject: NgdSubject, ways: Sequence[Way], labels: Sequence[Row]) -> list[Row]:
    """Two rows of each run: where it ended (``at`` "end"), and at the highest loss at which any
    ended ("equal loss").

    A point is measured once: the run that ended highest has the same numbers in both rows. With
    ``rule`` all points have the γ of the library's rule at the end of the first run and
    nβ = n/ln n, for λ̂ at different γ cannot be compared.
    """
    rows, gamma = [], None
    if subject.cell.get("rule"):
        problem = subject.problem.at(ways[0].end.vector.to(subject.problem.device))
        count = problem.num_samples
        gamma = default_localization(problem, count / math.log(count))[0]
    for way, label, equal in zip(ways, labels, at_equal_loss(ways), strict=True):
        about = {**label, "optimizer": way.optimizer, "diverged": way.diverged}
        end = measure(subject, way.end, gamma=gamma)
        other = end if equal is way.end else measure(subject, equal, gamma=gamma)
        rows += [{**about, "at": "end", **end}, {**about, "at": "equal loss", **other}]
        report("measuring", len(rows) // 2, len(ways))
    return rows


def measure(
    subject: NgdSubject, point: RunPoint, bayes: bool = False, gamma: float | None = None
) -> Row:
    """A row of one point.

    ``llc`` and ``llc_batch`` are λ̂ at nβ = n/ln n and B/ln B (Eq. 19) with ``…_stderr``,
    ``…_status`` and ``…_ess``, the effective draws of all chains. ``wbic`` is n·E[L_n] at
    β = 1/ln n (Eq. 18). With ``bayes`` also ``g_n`` (Eq. 28), from chains at β = 1. With ``gamma``
    the same once more at this γ, in columns that end in RULE.
    """
    vector = point.vector.to(subject.problem.device)
    problem, held_out = subject.problem.at(vector), subject.held_out.at(vector)
    whole = trace(hessian(problem), seed=subject.seed)
    row: Row = {
        "epoch": point.epoch,
        "loss": point.loss,
        "gradient": float(problem.gradient().norm()),
        "norm": float(vector.norm()),
        "validation_loss": float(held_out.loss()),
        "trace": float(whole),
        "trace_stderr": float(whole.stderr),
    }
    cell = subject.cell
    sampling: Row = {"chains": cell["chains"], "localization": cell["localization"]}
    sampling["batch_size"] = min(cell["sampled_batch"], problem.num_samples)
    if "tol" in cell:
        sampling |= {name: cell[name] for name in ("tol", "max_gradients")}
        sampling["mode"] = cell.get("mode", "auto")
    else:  # SGLD of fixed length, tuned in its step at most; timing modes would change the bits
        mode = "auto" if problem.device.type == "cuda" else "sequential"
        sampling |= {name: cell[name] for name in ("draws", "burn_in", "step_size")}
        sampling |= {"kernel": "sgld", "mode": mode}
    for column, nbeta in TEMPERATURES.items():
        row |= _coefficient(problem, subject, column, sampling | {"nbeta": nbeta})
        if gamma is not None:
            again = sampling | {"nbeta": nbeta, "localization": gamma}
            row |= _coefficient(problem, subject, column, again, RULE) | {"gamma_rule": gamma}
    if bayes:
        criteria = bayes_criteria(problem, held_out, seed=subject.seed, **sampling)
        error, status = criteria.g_n_draws_error, criteria.status.name
        row |= {"g_n": float(criteria.g_n), "g_n_stderr": error, "g_n_status": status}
    return row


def _coefficient(
    problem: Problem, subject: NgdSubject, column: str, sampling: Row, suffix: str = ""
) -> Row:
    """The columns of λ̂ at one temperature, and WBIC where it is n/ln n."""
    if sampling.get("mode") == "auto" and "tol" in sampling and sampling["nbeta"] == "n/log n":
        # chosen by cost: the temperature does not depend on it, and the noise of batches does
        sampling = sampling | {"batch_size": None}
    estimate = llc(problem, seed=subject.seed, **sampling)
    assert estimate.chains is not None
    row: Row = {
        column: float(estimate),
        f"{column}_stderr": float(estimate.stderr),
        f"{column}_status": estimate.status.name,
        f"{column}_ess": estimate.chains.diagnostics.ess_mean,
    }
    if estimate.wbic is not None:
        row |= {"wbic": float(estimate.wbic), "wbic_stderr": float(estimate.wbic.stderr)}
    return {f"{name}{suffix}": value for name, value in row.items()}


def status_of(column: str) -> str:
    """The column with the status of a reading; WBIC is read off the chains of λ̂ at nβ = n/ln n."""
    name = column.removesuffix(RULE)
    return f"{'llc' if name == 'wbic' else name}_status{column[len(name) :]}"


RunSource = Callable[[Cell, str, Tensor, str], Way]
_source: RunSource | None = None


@contextmanager
def runs_from(source: RunSource) -> Iterator[None]:
    """Let ``train_run`` take runs from ``source(cell, optimizer, start, stage)`` instead."""
    global _source
    before, _source = _source, source
    try:
        yield
    finally:
        _source = before
