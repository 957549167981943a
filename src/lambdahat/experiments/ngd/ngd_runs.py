"""Networks of the NGD paper: trained by SGD and by NGD from the same start on the same batches, and
what the paper measures at a point of a run.

``subject_of`` makes the network and the data of a cell, ``train_run`` a run with about 100 points
of its way, and ``measure`` a row of one point: λ̂ at two temperatures, Tr H, WBIC, losses, and G_n,
which the paper lacked. ``train_together`` trains many runs at once and leaves them in a folder.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from lambdahat._core.check import require, require_choice
from lambdahat._core.progress import report
from lambdahat._core.rng import derived_seed, generator
from lambdahat._core.storage import Damaged, digest, digest_tensors, write_atomically
from lambdahat.data.catalogue import data_digest, load
from lambdahat.data.sources import note_data
from lambdahat.estimators._trace import trace
from lambdahat.experiments.kit.cells import Cell, Row
from lambdahat.experiments.kit.training import train
from lambdahat.models.convolutional import lenet5
from lambdahat.models.perceptrons import mlp
from lambdahat.operators.curvature import hessian
from lambdahat.optim.ngd import NGD
from lambdahat.problem import Problem
from lambdahat.results import Status
from lambdahat.singular._llc import default_localization, llc
from lambdahat.singular.bayes import bayes_criteria
from lambdahat.training.ensembles import DEFAULTS, StackedDescent, StackedModel, StackedStep
from lambdahat.training.feeding import epoch_order

# column: nβ as ``llc`` names it. Both, because the answer depends on it.
TEMPERATURES = {"llc": "n/log n", "llc_batch": "batch"}
WORDS = {"llc": "nβ = n/ln n", "llc_batch": "nβ = B/ln B"}
RULE = "_rule"  # ends the columns of λ̂ at the γ of the library's rule
Pair = tuple[Tensor, Tensor]
Net = tuple[
    str, int, int
]  # "ffnn" with so many hidden layers of so many nodes, or ("lenet5", 0, 0)
SIDE = 28  # pixels of LeNet-5's images
POINTS = 100  # of a run that are kept, about


@dataclass(frozen=True)
class NgdSetting:
    """What all runs of a cell share: the data, how long and how fast to train, and how to sample
    λ̂.

    α and ε are Eq. 7's. Each chain of λ̂ takes ``burn_in`` + ``draws`` steps of SGLD on batches of
    ``sampled_batch``: a chain that finds lower loss than the centre goes on falling, so that its
    length must not differ between runs. A pilot finds the step size where it is not given. With
    ``tol`` λ̂ is instead drawn by ``llc``'s own kernel until its standard error is this part of it
    or ``max_gradients`` are spent, ``draws`` and ``burn_in`` being None, and with ``rule`` also at
    the γ that the library's rule gives where SGD ended. A cell has these only where they are set.
    """

    data: str
    training: int
    held_out: int
    epochs: int
    rate: float = 0.01
    alpha: float = 0.1
    epsilon: float = 1e-10
    batch: int = 128
    chains: int = 4
    draws: int | None = 500
    burn_in: int | None = 500
    sampled_batch: int = 512
    localization: float = 100.0
    step_size: float | None = None
    tol: float | None = None
    max_gradients: int | None = None
    rule: bool | None = None


OPTIONAL = ("tol", "max_gradients", "rule")  # settings that a cell lacks where they are None


@dataclass(frozen=True)
class RunPoint:
    """A place on the way of a run: after ``epoch`` epochs, with L_n over all training data and the
    parameters (P,).
    """

    epoch: float
    loss: float
    vector: Tensor


@dataclass(frozen=True)
class Way:
    """A run: its points, the last one its end, and the update norm of each epoch, ‖∇L‖ or ‖F_s⁻¹∇L‖
    (§3.3).
    """

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


class Snapshots:
    """A tracker that keeps the parameters and the loss over all training data every ``every`` steps
    while finite.
    """

    unit, name = "step", "snapshots"

    def __init__(self, every: int, steps: int) -> None:
        self.every, self._steps = every, steps
        self.points: list[RunPoint] = []

    def measure(
        self, problem: Problem, optimizer: Any = None, epoch: int = 0, step: int = 0
    ) -> dict[str, float | str]:
        """Keep where the run is; it gives the row nothing."""
        point = RunPoint(step / self._steps, float(problem.loss()), problem.vector.detach().clone())
        if math.isfinite(point.loss):
            self.points.append(point)
        return {}


@dataclass(frozen=True)
class NgdSubject:
    """A cell's data on a device, its training problem, and the model inside it."""

    setting: NgdSetting
    seed: int
    problem: Problem
    held_out: Problem

    @property
    def model(self) -> nn.Module:
        """The network that training moves."""
        model = self.problem.model
        assert model is not None
        return model

    def place(self, vector: Tensor) -> None:
        """Put the model at parameters (P,)."""
        with torch.no_grad():
            for name, tensor in self.problem.space.unflatten(vector).items():
                self.model.get_parameter(name).copy_(tensor)


TINY = NgdSetting("digits", 200, 100, 12, 0.05, batch=50, chains=2, draws=10, burn_in=10)
TINY = replace(TINY, sampled_batch=50, step_size=3e-4)
SMALL = NgdSetting("mnist", 4096, 2000, 35, rate=0.05, chains=2, draws=150, burn_in=150)
WHOLE = NgdSetting(
    "mnist", 60_000, 10_000, 60, draws=None, burn_in=None, tol=0.05, max_gradients=10_000
)


def run_cells(
    setting: NgdSetting, data: Sequence[str], networks: Sequence[Net], seeds: int, **more: Any
) -> list[Cell]:
    """A cell for every data set, network and seed."""
    shared = {k: v for k, v in asdict(setting).items() if v is not None or k not in OPTIONAL}
    return [
        {**shared, "data": name, "network": kind, "layers": layers, "width": width, "seed": seed}
        | more
        for name in data
        for kind, layers, width in networks
        for seed in range(seeds)
    ]


def setting_of(cell: Cell) -> NgdSetting:
    """The setting in a cell's fields."""
    return NgdSetting(
        **{name: cell[name] for name in NgdSetting.__dataclass_fields__ if name in cell}
    )


def subject_of(cell: Cell, device: str) -> NgdSubject:
    """The network of a cell at its start, with images that the cell's seed drew."""
    setting, seed = setting_of(cell), cell["seed"]
    training, held_out, classes = images(setting, cell["network"], seed)
    hidden = [cell["width"]] * cell["layers"]
    model = network(cell["network"], hidden, math.prod(training[0].shape[1:]), classes, seed).to(
        device
    )
    near, far = (tuple(part.to(device) for part in pair) for pair in (training, held_out))
    problem = Problem(model, "cross_entropy", near, batch_size=10_000)
    return NgdSubject(setting, seed, problem, problem.on(far))


def images(setting: NgdSetting, network: str, seed: int) -> tuple[Pair, Pair, int]:
    """So many training and held-out images of mean 0 and deviation 1, and the classes; 28 × 28 for
    LeNet-5.
    """
    near, far, classes = _whole(setting.data, network)
    rows, others = _drawn(setting, seed, len(near[1]), len(far[1]))
    return (near[0][rows], near[1][rows]), (far[0][others], far[1][others]), classes


def _drawn(setting: NgdSetting, seed: int, training: int, held_out: int) -> tuple[Tensor, Tensor]:
    """Which images a seed trains on and holds out, in its order."""
    parts = (("training", training, setting.training), ("held out", held_out, setting.held_out))
    first, second = (
        torch.randperm(total, generator=generator(seed, name))[:count]
        for name, total, count in parts
    )
    return first, second


def _whole(data: str, network: str) -> tuple[Pair, Pair, int]:
    """All training and held-out images of a data set as a network takes them, and the classes."""
    found = data_digest(data)  # data that have changed are read again
    note_data(data, lambda: found)
    return _prepared(data, network, found)


@lru_cache(maxsize=4)
def _prepared(data: str, network: str, _contents: str | None) -> tuple[Pair, Pair, int]:
    options: dict[str, Any] = {} if data == "digits" else {"normalization": "standard"}
    split = load(data, **options)
    mean, deviation = split.train[0].mean(), split.train[0].std()
    pairs = []
    for x, y in split:
        scaled = (x - mean) / deviation if data == "digits" else x
        pairs.append((_squares(scaled) if network == "lenet5" else scaled.flatten(1), y))
    return pairs[0], pairs[1], split.classes


def _squares(x: Tensor) -> Tensor:
    """Images (n, 1, 28, 28), enlarged where they are smaller."""
    side = math.isqrt(x[0].numel())
    square = x.view(len(x), 1, side, side)
    return square if side == SIDE else interpolate(square, size=(SIDE, SIDE))


def network(name: str, hidden: Sequence[int], inputs: int, classes: int, seed: int) -> nn.Module:
    """ "ffnn" with these hidden widths, or "lenet5" (§2.1)."""
    if require_choice(name, "network", ("ffnn", "lenet5")) == "lenet5":
        return lenet5(classes=classes, seed=seed)
    return mlp([inputs, *hidden, classes], seed=seed)


def train_run(
    subject: NgdSubject,
    optimizer: str,
    start: Tensor | None = None,
    stage: str = "",
    **changes: Any,
) -> Way:
    """Train by "sgd" or "ngd" from ``start`` (the model's parameters as they are).

    ``changes`` replace rate, alpha, epsilon or epochs of the setting. Runs of the same ``stage``
    see the same batches. A run that ``train_together`` has left in the folder of ``kept_in`` is
    taken from there.
    """
    setting = subject.setting
    chosen = _chosen(setting, changes)
    if start is not None:
        subject.place(start)
    if _folder is not None:
        about = _about(setting, subject.seed, optimizer, subject.problem.vector, stage, changes)
        return _kept(_folder, about, chosen["epochs"])
    parameters = list(subject.model.parameters())
    if require_choice(optimizer, "optimizer", ("sgd", "ngd")) == "sgd":
        rule: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=chosen["rate"])
    else:
        rule = NGD(parameters, lr=chosen["rate"], alpha=chosen["alpha"], epsilon=chosen["epsilon"])
    steps = math.ceil(subject.problem.num_samples / setting.batch)
    total = steps * chosen["epochs"]
    every = next(
        k for k in range(max(total // POINTS, 1), total + 1) if total % k == 0
    )  # the end is a point
    kept = Snapshots(every, steps)
    kept.measure(subject.problem)
    seed = derived_seed(subject.seed, "order", stage)
    told = {"epochs": chosen["epochs"], "batch": setting.batch, "seed": seed}
    run = train(subject.problem, told, rule, trackers=[kept])
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


def _chosen(setting: NgdSetting, changes: Row) -> Row:
    return {
        name: changes.get(name, getattr(setting, name))
        for name in ("rate", "alpha", "epsilon", "epochs")
    }


def compare_ends(subject: NgdSubject, ways: Sequence[Way], labels: Sequence[Row]) -> list[Row]:
    """Two rows of each run: where it ended (``at`` "end"), and at the highest loss at which any
    ended ("equal loss").

    A point is measured once: the run that ended highest has the same numbers in both rows.
    """
    rows = []
    gamma = rule_at(subject, ways[0].end)
    for way, label, equal in zip(ways, labels, at_equal_loss(ways), strict=True):
        about = {**label, "optimizer": way.optimizer, "diverged": way.diverged}
        end = measure(subject, way.end, gamma=gamma)
        other = end if equal is way.end else measure(subject, equal, gamma=gamma)
        rows += [{**about, "at": "end", **end}, {**about, "at": "equal loss", **other}]
        report("measuring", len(rows) // 2, len(ways))
    return rows


def rule_at(subject: NgdSubject, point: RunPoint) -> float | None:
    """γ of the library's rule at a point and nβ = n/ln n, for all points of a comparison; None
    where it is not asked.

    λ̂ at different γ cannot be compared.
    """
    if not subject.setting.rule:
        return None
    problem = subject.problem.at(point.vector.to(subject.problem.device))
    return default_localization(problem, problem.num_samples / math.log(problem.num_samples))[0]


def measure(
    subject: NgdSubject, point: RunPoint, bayes: bool = False, gamma: float | None = None
) -> Row:
    """A row of one point.

    ``llc`` and ``llc_batch`` are λ̂ at nβ = n/ln n and B/ln B (Eq. 19) with ``…_stderr`` and
    ``…_status``; ``below_centre`` and ``below_centre_batch`` say NOT_A_MINIMUM: the chain found
    lower loss than the point's. ``wbic`` is n·E[L_n] at β = 1/ln n (Eq. 18). With ``bayes`` also
    ``g_n`` (Eq. 28), from chains at β = 1. With ``gamma`` the same once more at this γ, in columns
    that end in RULE.
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
    for column, nbeta in TEMPERATURES.items():
        row |= _coefficient(problem, subject, column, nbeta)
        if gamma is not None:
            again = _coefficient(problem, subject, column, nbeta, gamma)
            row |= {f"{name}{RULE}": value for name, value in again.items()} | {"gamma_rule": gamma}
    return row | (_bayes(problem, held_out, subject) if bayes else {})


def _coefficient(
    problem: Problem, subject: NgdSubject, column: str, nbeta: str, gamma: float | None = None
) -> Row:
    settings = _sampling(problem, subject) | ({} if gamma is None else {"localization": gamma})
    if subject.setting.tol is not None and nbeta == "n/log n":
        # the temperature does not depend on it, and the noise of batches does
        settings["batch_size"] = None
    found = llc(problem, seed=subject.seed, nbeta=nbeta, **settings)
    flag = column.replace("llc", "below_centre")
    row: Row = {
        column: float(found),
        f"{column}_stderr": float(found.stderr),
        f"{column}_status": found.status.name,
        flag: found.status is Status.NOT_A_MINIMUM,
    }
    if found.wbic is not None:
        row |= {"wbic": float(found.wbic), "wbic_stderr": float(found.wbic.stderr)}
    return row


def _bayes(problem: Problem, held_out: Problem, subject: NgdSubject) -> Row:
    found = bayes_criteria(problem, held_out, seed=subject.seed, **_sampling(problem, subject))
    values = float(found.g_n), found.g_n_draws_error, found.status.name
    return dict(zip(("g_n", "g_n_stderr", "g_n_status"), values, strict=True))


def _sampling(problem: Problem, subject: NgdSubject) -> dict[str, Any]:
    """SGLD of fixed length and γ, of which at most the step is found; or, with a tolerance, what
    ``llc`` chooses.

    The mode is named: timing modes would change the bits.
    """
    setting = subject.setting
    batch = min(setting.sampled_batch, problem.num_samples)
    shared = {"batch_size": batch, "chains": setting.chains, "localization": setting.localization}
    if setting.tol is not None:
        return shared | {"tol": setting.tol, "max_gradients": setting.max_gradients}
    mode = "auto" if problem.device.type == "cuda" else "sequential"
    lengths = {"draws": setting.draws, "burn_in": setting.burn_in}
    return shared | lengths | {"kernel": "sgld", "step_size": setting.step_size, "mode": mode}


_folder: Path | None = None


@contextmanager
def kept_in(folder: Path) -> Iterator[None]:
    """Let ``train_run`` take runs from a folder, and train none."""
    global _folder
    before, _folder = _folder, folder
    try:
        yield
    finally:
        _folder = before


@dataclass(frozen=True)
class StackedRun:
    """One run among those of ``train_together``: that of ``train_run`` with the same arguments."""

    cell: Cell
    start: Tensor | None = None
    stage: str = ""
    changes: tuple[tuple[str, float], ...] = ()


def train_together(
    members: Sequence[StackedRun],
    optimizer: str,
    device: str,
    folder: Path,
    milestones: Sequence[int],
    reached: Callable[[int], None] | None = None,
) -> list[Way]:
    """Train runs of one network, data set and optimiser at once, each as ``train_run`` would, and
    leave them in a folder.

    Rate, α and ε may differ between members. The runs are written at each of ``milestones``, in
    epochs, the last of which ends them; ``reached`` is then told of it. About 45 points of the
    first 100 epochs are kept, those of the first epochs closer together.
    """
    cell, settings = members[0].cell, [setting_of(member.cell) for member in members]
    setting = settings[0]
    near, _, classes = _whole(setting.data, cell["network"])
    x, y = (part.to(device) for part in near)
    models = [_start(member, near, classes).to(device) for member in members]
    problem = Problem(models[0], "cross_entropy", (x[:2], y[:2]))
    model = StackedModel(models, problem, one_by_one=cell["network"] == "lenet5")
    chosen = [
        _chosen(one, dict(member.changes)) for one, member in zip(settings, members, strict=True)
    ]
    values = {**DEFAULTS[optimizer], "lr": tuple(one["rate"] for one in chosen)}
    if optimizer == "ngd":
        values |= {name: tuple(one[name] for one in chosen) for name in ("alpha", "epsilon")}
    stepped = _Normed(
        model, StackedDescent(model.parameters, optimizer, values), (x, y), values["lr"]
    )
    rows = torch.stack([_drawn(setting, member.cell["seed"], len(y), 0)[0] for member in members])
    abouts = [
        _about(one, member.cell["seed"], optimizer, vector, member.stage, dict(member.changes))
        for one, member, vector in zip(settings, members, _vectors(model), strict=True)
    ]
    seeds = [derived_seed(member.cell["seed"], "order", member.stage) for member in members]
    places: list[float] = [0.0]
    losses, vectors, norms = [_losses(model, x, y, rows)], [_vectors(model)], []
    for epoch in range(max(milestones)):
        report(f"training {len(members)} by {optimizer}", epoch, max(milestones))
        orders = torch.stack(
            [row[epoch_order(seed, epoch, len(row))] for row, seed in zip(rows, seeds, strict=True)]
        )
        stepped.norms.zero_()
        done, steps = 0, math.ceil(orders.shape[1] / setting.batch)
        for part in _parts(epoch):
            last = round(part * steps)
            if last > done:
                stepped.epoch(
                    orders[:, done * setting.batch : last * setting.batch].to(device), setting.batch
                )
                done = last
            if part < 1 or _wanted(epoch + 1) or epoch + 1 in milestones:
                places.append(epoch + done / steps)
                losses.append(_losses(model, x, y, rows))
                vectors.append(_vectors(model))
        norms.append((stepped.norms / steps).cpu())
        if epoch + 1 in milestones:
            columns = places, losses, vectors, norms
            ways = [_way(optimizer, index, *columns) for index in range(len(members))]
            for about, way in zip(abouts, ways, strict=True):
                _keep(folder, about, way, epoch + 1)
            if reached is not None:
                reached(epoch + 1)
    return ways


def upto(member: StackedRun, optimizer: str, folder: Path) -> int:
    """How many epochs of a member's run are in a folder."""
    near, _, classes = _whole(member.cell["data"], member.cell["network"])
    start = nn.utils.parameters_to_vector(_start(member, near, classes).parameters())
    setting = setting_of(member.cell)
    path = _file(
        folder,
        _about(setting, member.cell["seed"], optimizer, start, member.stage, dict(member.changes)),
    )
    if not path.is_file():
        return 0
    try:
        record = _read(path, setting.data)
    except ValueError as error:  # damaged, or of other data
        warnings.warn(f"{error}; it is trained again", RuntimeWarning, stacklevel=2)
        return 0
    return int(record["epochs"])


def _start(member: StackedRun, near: Pair, classes: int) -> nn.Module:
    """The network of a member where it starts."""
    cell = member.cell
    hidden = [cell["width"]] * cell["layers"]
    model = network(cell["network"], hidden, math.prod(near[0].shape[1:]), classes, cell["seed"])
    if member.start is not None:
        nn.utils.vector_to_parameters(member.start.cpu(), model.parameters())
    return model


class _Normed(StackedStep):
    """Steps that also sum the norm of each member's update over its rate."""

    def __init__(
        self, model: StackedModel, descent: StackedDescent, columns: Any, rates: tuple[float, ...]
    ) -> None:
        super().__init__(model, descent, columns)
        self._rates = torch.tensor(rates, dtype=torch.float64, device=model.device)
        self.norms = torch.zeros_like(self._rates)

    def _step(self, indices: Tensor, now: bool) -> None:
        before = [parameter.clone() for parameter in self.model.parameters.values()]
        super()._step(indices, now)
        pairs = zip(self.model.parameters.values(), before, strict=True)
        squares = sum((one - other).flatten(1).double().square().sum(1) for one, other in pairs)
        self.norms += torch.as_tensor(squares).sqrt() / self._rates


def _parts(epoch: int) -> tuple[float, ...]:
    """The parts of an epoch after which a point is kept."""
    return {0: (0.25, 0.5, 0.75, 1.0), 1: (0.5, 1.0), 2: (0.5, 1.0)}.get(epoch, (1.0,))


def _wanted(epoch: int) -> bool:
    """Whether the point after so many epochs is kept."""
    return epoch <= 20 or (epoch <= 40 and epoch % 2 == 0) or epoch % 5 == 0


@torch.no_grad()
def _losses(model: StackedModel, x: Tensor, y: Tensor, rows: Tensor) -> list[float]:
    """L_n of every member over its own images."""
    total = torch.zeros(len(rows), dtype=torch.float64, device=x.device)
    for part in rows.split(5000, dim=1):
        chosen = part.to(x.device)
        total += model.losses((x[chosen], y[chosen])).double() * part.shape[1]
    return (total / rows.shape[1]).tolist()


def _vectors(model: StackedModel) -> Tensor:
    """The members' parameters, (S, P), on the CPU."""
    return torch.cat(
        [tensor.detach().flatten(1) for tensor in model.parameters.values()], dim=1
    ).cpu()


def _way(
    optimizer: str,
    index: int,
    places: list[float],
    losses: list[list[float]],
    vectors: list[Tensor],
    norms: list[Tensor],
) -> Way:
    """The run of one member, up to where its loss is not finite."""
    found = zip(places, losses, vectors, strict=True)
    points = [RunPoint(place, loss[index], vector[index]) for place, loss, vector in found]
    kept = tuple(takewhile(lambda point: math.isfinite(point.loss), points))
    steps = tuple(float(norm[index]) for norm in norms)
    return Way(optimizer, kept, steps, len(kept) < len(points))


def _about(
    setting: NgdSetting, seed: int, optimizer: str, start: Tensor, stage: str, changes: Row
) -> Row:
    """What decides a run but for its length, its start by a digest of the parameters (P,)."""
    chosen = _chosen(setting, changes)
    names = ("rate",) if optimizer == "sgd" else ("rate", "alpha", "epsilon")
    origin = hashlib.blake2b(start.detach().cpu().numpy().tobytes(), digest_size=16).hexdigest()
    about = {name: getattr(setting, name) for name in ("data", "training", "batch")}
    about |= {"seed": seed, "optimizer": optimizer, "start": origin, "stage": stage}
    return about | {name: chosen[name] for name in names}


def _file(folder: Path, about: Row) -> Path:
    digest = hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=16)
    return folder / f"{digest.hexdigest()}.pt"


def _keep(folder: Path, about: Row, way: Way, epochs: int) -> None:
    path = _file(folder, about)
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "places": [point.epoch for point in way.points],
        "losses": [point.loss for point in way.points],
        "vectors": torch.stack([point.vector for point in way.points]),
        "norms": list(way.update_norms),
        "diverged": way.diverged,
        "epochs": epochs,
        "optimizer": way.optimizer,
        "data": data_digest(about["data"]),
    }
    stream = io.BytesIO()
    torch.save(record | {"digest": _digest(record)}, stream)
    write_atomically(path, stream.getvalue())


def _read(path: Path, data: str) -> Row:
    """What ``_keep`` wrote, of data that are still the same; early files have no digests, and are
    read without.

    Raises:
        Damaged: If the file is not as it was written.
        ValueError: If the data set has changed since.
    """
    try:
        record: Row = torch.load(path, mmap=True, weights_only=True)
        told = record.pop("digest", None)
        whole = told is None or told == _digest(record)
    except Exception as error:  # torch raises many kinds
        raise Damaged(f"{path} is damaged: {' '.join(str(error).split())[:200]}") from error
    if not whole:
        raise Damaged(f"{path} is damaged: its contents do not match their digest; train it again")
    used, now = record.get("data"), data_digest(data)
    require(
        None in (used, now) or used == now,
        str(path),
        f"be a run on {data} as it is now, {now}",
        f"one on {used}",
        "put the data back, or train it again",
    )
    return record


def _digest(record: Row) -> str:
    rest = {name: value for name, value in record.items() if name != "vectors"}
    vectors = digest_tensors({"": record["vectors"]})
    return digest(f"{vectors} {json.dumps(rest, sort_keys=True)}".encode())[:32]


def _kept(folder: Path, about: Row, epochs: int) -> Way:
    """The first ``epochs`` epochs of a run in a folder."""
    path = _file(folder, about)
    if not path.is_file():
        raise FileNotFoundError(
            f"folder must hold the run of {about}, got none in {folder}; train it first"
        )
    record = _read(path, about["data"])
    most = record["epochs"]
    require(most >= epochs, "epochs", f"be {most} at most for a run in {folder}", epochs)
    count = sum(place <= epochs for place in record["places"])
    found = zip(*(record[name][:count] for name in ("places", "losses", "vectors")), strict=True)
    points = tuple(RunPoint(*each) for each in found)
    diverged = record["diverged"] and count == len(record["places"])
    return Way(record["optimizer"], points, tuple(record["norms"][:epochs]), diverged)
