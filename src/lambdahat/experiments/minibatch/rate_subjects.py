"""The networks whose largest stable rate and least damping are searched for: data, start, and
what is spent on each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lambdahat._core.check import require
from lambdahat._core.rng import derived_seed, generator
from lambdahat.data.splits import Split
from lambdahat.experiments.minibatch.eigen_subjects import cut, load_split
from lambdahat.models.registry import make_model

Pair = tuple[Tensor, Tensor]
PROBE = 2000  # training samples on which it is judged whether a network has learnt


@dataclass(frozen=True)
class Subject:
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

    def described(self) -> str:
        """Its size in words."""
        return f"{self.network}: {self.samples:,} samples, {self.steps} steps, {self.seeds} seeds."


def subject_of(cell: Mapping[str, Any]) -> Subject:
    """The subject whose fields are among a cell's settings."""
    settings = {name: cell[name] for name in Subject.__dataclass_fields__}
    return Subject(**settings | {"batch_sizes": tuple(settings["batch_sizes"])})


@dataclass(frozen=True)
class Ground:
    """A subject made ready on a device: a network for every seed, its training samples, and the
    test samples.
    """

    subject: Subject
    models: list[nn.Module]
    train: Pair
    test: Pair

    @property
    def probe(self) -> Pair:
        """The training samples on which learning is judged."""
        return self.train[0][:PROBE], self.train[1][:PROBE]

    def at(self, batch_size: int) -> Ground:
        """The same for one batch size alone."""
        return replace(self, subject=replace(self.subject, batch_sizes=(batch_size,)))


def prepared(
    subject: Subject, splits: Mapping[str, Split], seed: int, device: torch.device | str
) -> Ground:
    """The subject's data, from ``splits`` where given there, and networks; images are cut to the
    size LeNet-5 takes.
    """
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
    return Ground(
        subject, [model.to(device) for model in models], _moved(train, device), _moved(test, device)
    )


def _moved(pair: Pair, device: torch.device | str) -> Pair:
    return pair[0].to(device), pair[1].to(device)


def powers(low: int, high: int) -> tuple[int, ...]:
    """2^low … 2^high."""
    return tuple(2**power for power in range(low, high + 1))
