"""LanczosOPT on 1,000 images with softmax regression: Figures 6.2 and 6.4 of the spectral thesis (§6.4)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor, nn

from lambdahat._check import require, require_choice, require_count
from lambdahat._progress import report
from lambdahat._rng import derived_seed, generator
from lambdahat.data.loading import load
from lambdahat.data.splits import Split
from lambdahat.experiments.claims import judge
from lambdahat.experiments.experiment import Row, Rows
from lambdahat.experiments.minibatch.lanczos_claims import DESCENT, METHOD
from lambdahat.experiments.minibatch.lanczos_claims import claims as lanczos_claims
from lambdahat.experiments.minibatch.lanczos_claims import tables as lanczos_tables
from lambdahat.experiments.minibatch.stacked_softmax import Krylov, Softmax, krylov, newton_directions, start_vectors
from lambdahat.experiments.reproduction import Reproduction, Table, Verdict
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
    "paper": Scale("mnist", 1000, (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0), 500, 50, 1, 5),
}


@dataclass(frozen=True)
class LanczosResult(Reproduction):
    """Curves of every cell: ``measures`` by name, (looks, S, D, E) for S seeds, D dampings and E factors η.

    ``descent`` has those of gradient descent, (looks, S); ``steps`` says when they were taken.
    """

    name: str
    dampings: tuple[float, ...]
    etas: tuple[float, ...]
    steps: tuple[int, ...]
    measures: dict[str, Tensor]
    descent: dict[str, Tensor]
    verdicts: tuple[Verdict, ...]
    assumptions: tuple[str, ...]
    seed: int

    def final(self, measure: str) -> Tensor:
        """(S, D, E) after the last step."""
        return self.measures[measure][-1]

    def rows(self) -> list[Row]:
        """One record for every run at every look."""
        grid = product(range(len(self.dampings)), range(len(self.etas)))
        runs: list[tuple[Row, dict[str, Tensor]]] = [
            ({"method": METHOD, "damping": self.dampings[row], "eta": self.etas[column]},
             {name: values[..., row, column] for name, values in self.measures.items()})
            for row, column in grid
        ]  # fmt: skip
        runs.append(({"method": DESCENT, "damping": 1.0, "eta": 0.0}, self.descent))
        return [
            {"seed": seed, **where, "step": step} | {name: float(seen[name][look, seed]) for name in MEASURES}
            for where, seen in runs
            for seed in range(seen[MEASURES[0]].shape[1])
            for look, step in enumerate(self.steps)
        ]

    def tables(self) -> tuple[Table, ...]:
        """Errors at the end, mean ± standard error over seeds, in percent."""
        return tuple(lanczos_tables(Rows(self.rows())))


def run_lanczos_opt(
    scale: str = "cpu", seed: int = 0, split: Split | None = None, device: torch.device | str = "cpu"
) -> LanczosResult:
    """The grid of dampings δ and factors η, and gradient descent; ``split`` replaces the scale's own data set."""
    return lanczos_opt_of(SCALES[require_choice(scale, "scale", SCALES)], seed, split, device)


def lanczos_opt_of(
    setting: Scale, seed: int = 0, split: Split | None = None, device: torch.device | str = "cpu"
) -> LanczosResult:
    """The same at a size of one's own choice."""
    require_count(seed, "seed", least=0)
    split = split or load(setting.data)
    require(setting.samples <= len(split.train[0]), "split", f"have {setting.samples:,} training samples",
            f"{len(split.train[0]):,}")  # fmt: skip
    cells = [*product(setting.dampings, ETAS), (1.0, 0.0)]  # with η = 0 and δ = 1 Eq. 6.6 is gradient descent
    looks, found = _train(setting, split, cells, seed, torch.device(device))
    grid = (len(setting.dampings), len(ETAS))
    measures = {name: values[..., :-1].unflatten(2, grid) for name, values in found.items()}
    descent = {name: values[..., -1] for name, values in found.items()}
    result = LanczosResult("lanczos-opt", setting.dampings, ETAS, looks, measures, descent, (), _assumptions(setting),
                           seed)  # fmt: skip
    return replace(result, verdicts=tuple(judge(lanczos_claims(Rows(result.rows())))))


def _train(
    setting: Scale, split: Split, cells: list[tuple[float, float]], seed: int, device: torch.device
) -> tuple[tuple[int, ...], dict[str, Tensor]]:
    """When it was measured, and the measures (looks, S, R)."""
    train, test = _data(setting, split, seed, device)
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
        torch.randperm(len(x), generator=generator(seed, "training images", index))[: setting.samples]
        for index in range(setting.seeds)
    ]
    chosen = torch.stack(draws)
    flat, flat_test = x.flatten(1), x_test.flatten(1).expand(setting.seeds, -1, -1)
    train = Softmax(flat[chosen].to(device), y[chosen].to(device), split.classes)
    return train, Softmax(flat_test.to(device), y_test.expand(setting.seeds, -1).to(device), split.classes)


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


def _assumptions(setting: Scale) -> tuple[str, ...]:
    ritz = "at every step" if setting.every == 1 else f"every {setting.every} steps (the thesis: at every step)"
    drawn = f"drawn anew for each of {setting.seeds} seeds"
    return (
        f"{setting.steps} full-batch steps at α = {RATE:g}: the thesis does not say how many.",
        f"{setting.samples:,} training samples of {setting.data}, {drawn}; pixels in [0, 1].",
        "Weights and biases are uniform on ±1/√inputs at the start.",
        f"{setting.pairs} Lanczos steps from a random vector, {ritz}.",
        "The dampings are ours: those of the figures are not in the text.",
        "GD takes the same α.",
    )
