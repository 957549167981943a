"""LanczosOPT on 1,000 images with softmax regression: Figures 6.2 and 6.4 of the spectral thesis
(§6.4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

from lambdahat._core.check import require
from lambdahat._core.progress import report
from lambdahat._core.rng import derived_seed, generator
from lambdahat.data.loading import load
from lambdahat.data.splits import Split
from lambdahat.experiments.kit.cells import Row
from lambdahat.experiments.minibatch.lanczos_claims import DESCENT, METHOD
from lambdahat.experiments.minibatch.stacked_softmax import (
    Krylov,
    Softmax,
    krylov,
    newton_directions,
    start_vectors,
)
from lambdahat.models.perceptrons import softmax_regression

RATE = 0.01
ETAS = (1.0, 3.0, 10.0)
MEASURES = ("training error", "test error", "training loss", "test loss")


@dataclass(frozen=True)
class Scale:
    """How much is run: ``every`` steps new Ritz pairs, ``looks`` measurements on the way."""

    data: str
    samples: int
    dampings: tuple[float, ...]
    steps: int
    pairs: int
    every: int
    seeds: int
    looks: int = 10


SCALES = {
    "smoke": Scale("digits", 200, (1e-3, 1e-2, 1e-1), 60, 15, 5, 2, looks=3),
    "cpu": Scale("mnist", 1000, (1e-4, 1e-3, 1e-2, 1e-1, 1.0), 300, 50, 10, 3),
    "paper": Scale(
        "mnist", 1000, (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0), 500, 50, 1, 5
    ),
}


def rows_at(setting: Scale, seed: int, device: torch.device | str = "cpu") -> list[Row]:
    """The grid of dampings δ and factors η, and gradient descent: a row for every run at every
    look.
    """
    return rows_of(setting.dampings, *trained(setting, seed, None, device))


def rows_of(
    dampings: Sequence[float], steps: Sequence[int], measures: Mapping[str, Tensor]
) -> list[Row]:
    """Measures (looks, S, R) of the runs of ``cells_of`` as rows."""
    return [
        {"seed": seed, **where, "step": step}
        | {name: float(measures[name][look, seed, run]) for name in MEASURES}
        for run, where in enumerate(_named(dampings))
        for seed in range(measures[MEASURES[0]].shape[1])
        for look, step in enumerate(steps)
    ]


def _named(dampings: Sequence[float]) -> list[Row]:
    """The settings of the runs; the last is gradient descent."""
    methods = [METHOD] * (len(dampings) * len(ETAS)) + [DESCENT]
    pairs = zip(methods, cells_of(dampings), strict=True)
    return [{"method": method, "damping": damping, "eta": eta} for method, (damping, eta) in pairs]


def cells_of(dampings: Sequence[float]) -> list[tuple[float, float]]:
    """(δ, η) of all runs; with η = 0 and δ = 1 Eq. 6.6 is gradient descent."""
    return [*product(dampings, ETAS), (1.0, 0.0)]


def trained(
    setting: Scale, seed: int, split: Split | None = None, device: torch.device | str = "cpu"
) -> tuple[tuple[int, ...], dict[str, Tensor]]:
    """When it was measured, and the measures (looks, S, R); ``split`` replaces the scale's own
    data set.
    """
    split = split or load(setting.data)
    require(
        setting.samples <= len(split.train[0]),
        "split",
        f"have {setting.samples:,} training samples",
        f"{len(split.train[0]):,}",
    )
    cells = cells_of(setting.dampings)
    train, test = _data(setting, split, seed, torch.device(device))
    damping, eta = torch.tensor(cells, device=device).T
    weights = _initial(train, setting, seed).to(device).unsqueeze(1).repeat(1, len(cells), 1)
    every = max(1, setting.steps // setting.looks)
    steps, looks, space = [], [], None
    for step in range(setting.steps):
        if step % setting.every == 0:
            space = _space(train, weights, setting, seed, step)
        assert space is not None
        weights = weights - RATE * newton_directions(train.gradient(weights), space, eta, damping)
        if (step + 1) % every == 0 or step + 1 == setting.steps:
            steps.append(step + 1)
            looks.append(_measured(train, test, weights))
        report("lanczos-opt", step + 1, setting.steps)
    return tuple(steps), {name: torch.stack([look[name] for look in looks]) for name in MEASURES}


def _space(train: Softmax, weights: Tensor, setting: Scale, seed: int, step: int) -> Krylov:
    start = start_vectors(weights.shape, derived_seed(seed, "ritz"), step, weights)
    return krylov(train.product(weights), start, setting.pairs)


def _data(setting: Scale, split: Split, seed: int, device: torch.device) -> tuple[Softmax, Softmax]:
    """Every seed has training samples of its own; all share the test samples."""
    (x, y), (x_test, y_test) = split
    draws = [
        torch.randperm(len(x), generator=generator(seed, "training images", index))[
            : setting.samples
        ]
        for index in range(setting.seeds)
    ]
    chosen = torch.stack(draws)
    flat, flat_test = x.flatten(1), x_test.flatten(1).expand(setting.seeds, -1, -1)
    train = Softmax(flat[chosen].to(device), y[chosen].to(device), split.classes)
    return train, Softmax(
        flat_test.to(device), y_test.expand(setting.seeds, -1).to(device), split.classes
    )


def _initial(train: Softmax, setting: Scale, seed: int) -> Tensor:
    """The first weights of each seed (S, P), as ``softmax_regression`` draws them."""
    inputs, found = train.x.shape[2] - 1, []
    for index in range(setting.seeds):
        layer = softmax_regression(inputs, train.classes, derived_seed(seed, "weights", index))[0]
        assert isinstance(layer, nn.Linear)
        found.append(torch.cat([layer.weight.detach().T, layer.bias.detach()[None]]).flatten())
    return torch.stack(found)


def _measured(train: Softmax, test: Softmax, weights: Tensor) -> dict[str, Tensor]:
    (loss, error), (test_loss, test_error) = train.judged(weights), test.judged(weights)
    found = dict(zip(MEASURES, (error, test_error, loss, test_loss), strict=True))
    return {name: values.cpu() for name, values in found.items()}
