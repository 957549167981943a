"""Extreme eigenvalues of mini-batch curvature, cell by cell: chapter 5 of the spectral thesis, Theorem 17."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from lambdahat.experiments.experiment import Cell, Experiment, Row
from lambdahat.experiments.minibatch.eigen_claims import claims
from lambdahat.experiments.minibatch.eigen_measuring import measure_point
from lambdahat.experiments.minibatch.eigen_rows import rows_of
from lambdahat.experiments.minibatch.eigen_subjects import SCALES, Effort, Subject, load_split, training_stops
from lambdahat.experiments.minibatch.eigen_tables import charts, tables
from lambdahat.experiments.minibatch.eigenvalues import ASSUMPTIONS


@dataclass(frozen=True)
class Config:
    """The networks of a scale, and the ``root`` that the seeds of starts, samples and batches derive from."""

    subjects: tuple[Subject, ...]
    root: int = 0


def cells(config: Config) -> list[Cell]:
    """A cell for each network, epoch and operator. Each trains to its epoch, which costs little beside measuring."""
    return [
        {"network": subject.network, "epoch": epoch, "operator": operator, "root": config.root, **settings_of(subject)}
        for subject in config.subjects
        for epoch in subject.epochs
        for operator in subject.operators
    ]


def settings_of(subject: Subject) -> dict[str, Any]:
    """A subject as flat settings; ``noise_samples`` are the effort's."""
    found: dict[str, Any] = asdict(subject) | asdict(subject.effort)
    del found["effort"], found["operators"]
    return found | {"samples": subject.samples, "noise_samples": subject.effort.samples}


def subject_of(cell: Cell) -> Subject:
    """The subject of a cell, with its operator alone."""
    effort = Effort(**{field.name: cell[field.name] for field in fields(Effort)} | {"samples": cell["noise_samples"]})
    names = {field.name for field in fields(Subject)} - {"effort", "operators"}
    settings = {name: cell[name] for name in names} | {name: tuple(cell[name]) for name in ("epochs", "batch_sizes")}
    return Subject(**settings, effort=effort, operators=(cell["operator"],))


def run(cell: Cell, device: str) -> list[Row]:
    """A row for the full data, and one for every batch, with the models' predictions."""
    subject = subject_of(cell)
    upto = replace(subject, epochs=tuple(epoch for epoch in subject.epochs if epoch <= cell["epoch"]))
    *_, (epoch, problem) = training_stops(upto, load_split(subject.data), cell["root"], device)
    return rows_of([point.predicted() for point in measure_point(subject, epoch, problem, cell["root"])])


EXPERIMENT = Experiment(
    "batch-eigenvalues",
    "What a mini-batch shows of the full data's curvature, predicted and measured",
    "Spectral thesis, chapter 5",
    {scale: Config(subjects) for scale, subjects in SCALES.items()},
    cells,
    run,
    claims,
    tables,
    charts,
    ASSUMPTIONS,
)
