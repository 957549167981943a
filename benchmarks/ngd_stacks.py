"""Runs of the NGD paper that train together, stacked, and are left in a folder.

``train_together`` trains many runs of one network at once, each as ``train_run`` would;
``kept_in`` lets the experiments take them from the folder. ngd_cells.py runs cells this way.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lambdahat._core.check import require
from lambdahat._core.progress import report
from lambdahat._core.rng import derived_seed, generator
from lambdahat._core.storage import Damaged, digest, digest_tensors, write_atomically
from lambdahat.data.catalogue import data_digest
from lambdahat.experiments.kit import Cell, Row
from lambdahat.experiments.ngd.ngd_runs import Pair, RunPoint, Way, load_images, network, runs_from
from lambdahat.problem import Problem
from lambdahat.training.ensembles import DEFAULTS, StackedDescent, StackedModel, StackedStep
from lambdahat.training.feeding import epoch_order


def kept_in(folder: Path) -> AbstractContextManager[None]:
    """Let ``train_run`` take runs from a folder, and train none."""

    def source(cell: Cell, optimizer: str, start: Tensor, stage: str) -> Way:
        return _read_run(folder, _about(cell, optimizer, start, stage), cell["epochs"])

    return runs_from(source)


@dataclass(frozen=True)
class StackedRun:
    """One run among those of ``train_together``: that of ``train_run`` with the same arguments."""

    cell: Cell
    start: Tensor | None = None
    stage: str = ""
    changes: tuple[tuple[str, float], ...] = ()

    @property
    def setting(self) -> Cell:
        """The cell with the changes."""
        return {**self.cell, **dict(self.changes)}


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
    cell, settings = members[0].cell, [member.setting for member in members]
    starts = [member.cell["seed"] for member in members]
    near, _, classes = load_images(cell["data"], cell["network"])
    x, y = (part.to(device) for part in near)
    models = [_start(member, near, classes).to(device) for member in members]
    problem = Problem(models[0], "cross_entropy", (x[:2], y[:2]))
    model = StackedModel(models, problem, one_by_one=cell["network"] == "lenet5")
    values = {**DEFAULTS[optimizer], "lr": tuple(one["rate"] for one in settings)}
    if optimizer == "ngd":
        values |= {name: tuple(one[name] for one in settings) for name in ("alpha", "epsilon")}
    descent = StackedDescent(model.parameters, optimizer, values)
    stepped = _StepWithNorms(model, descent, (x, y), values["lr"])
    drawn = [torch.randperm(len(y), generator=generator(seed, "training")) for seed in starts]
    rows = torch.stack([order[: cell["training"]] for order in drawn])
    abouts = [
        _about(one, optimizer, vector, member.stage)
        for one, member, vector in zip(settings, members, _vectors(model), strict=True)
    ]
    seeds = [
        derived_seed(seed, "order", member.stage)
        for seed, member in zip(starts, members, strict=True)
    ]
    places: list[float] = [0.0]
    losses, vectors, norms = [_losses(model, x, y, rows)], [_vectors(model)], []
    for epoch in range(max(milestones)):
        report(f"training {len(members)} by {optimizer}", epoch, max(milestones))
        pairs = zip(rows, seeds, strict=True)
        orders = torch.stack([row[epoch_order(seed, epoch, len(row))] for row, seed in pairs])
        stepped.norms.zero_()
        done, steps = 0, math.ceil(orders.shape[1] / cell["batch"])
        for part in PARTS.get(epoch, (1.0,)):
            last = round(part * steps)
            if last > done:
                batches = orders[:, done * cell["batch"] : last * cell["batch"]]
                stepped.epoch(batches.to(device), cell["batch"])
                done = last
            if part < 1 or _is_kept(epoch + 1) or epoch + 1 in milestones:
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
    cell = member.cell
    near, _, classes = load_images(cell["data"], cell["network"])
    start = nn.utils.parameters_to_vector(_start(member, near, classes).parameters())
    about = _about(member.setting, optimizer, start, member.stage)
    path = _file(folder, about)
    if not path.is_file():
        return 0
    try:
        record = _read(path, cell["data"])
    except ValueError as error:  # damaged, or of other data
        warnings.warn(f"{error}; it is trained again", RuntimeWarning, stacklevel=2)
        return 0
    return int(record["epochs"])


def _start(member: StackedRun, near: Pair, classes: int) -> nn.Module:
    """The network of a member where it starts."""
    model = network(member.cell, math.prod(near[0].shape[1:]), classes)
    if member.start is not None:
        nn.utils.vector_to_parameters(member.start.cpu(), model.parameters())
    return model


class _StepWithNorms(StackedStep):
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


# the parts of the first epochs after which a point is kept
PARTS = {0: (0.25, 0.5, 0.75, 1.0), 1: (0.5, 1.0), 2: (0.5, 1.0)}


def _is_kept(epoch: int) -> bool:
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
    return torch.cat([tensor.detach().flatten(1) for tensor in model.parameters.values()], 1).cpu()


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


def _about(cell: Cell, optimizer: str, start: Tensor, stage: str) -> Row:
    """What decides a run but for its length, its start by a digest of the parameters (P,)."""
    names = ["data", "training", "batch", "rate"]
    names += [] if optimizer == "sgd" else ["alpha", "epsilon"]
    about = {name: cell[name] for name in names}
    origin = _short_digest(start.detach().cpu().numpy().tobytes())
    return about | {"seed": cell["seed"], "optimizer": optimizer, "start": origin, "stage": stage}


def _file(folder: Path, about: Row) -> Path:
    return folder / f"{_short_digest(json.dumps(about, sort_keys=True).encode())}.pt"


def _short_digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


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
    """What ``_keep`` wrote; Damaged if the file has changed since, ValueError if the data have.

    Early files have no digests, and are read without.
    """
    try:
        record: Row = torch.load(path, mmap=True, weights_only=True)
        written = record.pop("digest", None)
        whole = written in (None, _digest(record))
    except Exception as error:  # torch raises many kinds
        raise Damaged(f"{path} is damaged: {' '.join(str(error).split())[:200]}") from error
    if not whole:
        raise Damaged(f"{path} is damaged: its contents do not match their digest; train it again")
    used, now = record.get("data"), data_digest(data)
    same, cure = None in (used, now) or used == now, "put the data back, or train it again"
    require(same, str(path), f"be a run on {data} as it is now, {now}", f"one on {used}", cure)
    return record


def _digest(record: Row) -> str:
    rest = {name: value for name, value in record.items() if name != "vectors"}
    vectors = digest_tensors({"": record["vectors"]})
    return digest(f"{vectors} {json.dumps(rest, sort_keys=True)}".encode())[:32]


def _read_run(folder: Path, about: Row, epochs: int) -> Way:
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
