"""LanczosOPT on 1,000 images with softmax regression: Figures 6.2 and 6.4 of the spectral thesis (§6.4)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

from lambdahat._check import require, require_choice, require_count
from lambdahat._progress import report
from lambdahat._rng import derived_seed, generator
from lambdahat.data.loading import load
from lambdahat.data.splits import Split
from lambdahat.experiments.reproduction import OPEN, Reproduction, Table, Verdict, judged, paired_gap, worst
from lambdahat.experiments.stacked_softmax import Krylov, Softmax, krylov, newton_directions, start_vectors
from lambdahat.models.perceptrons import softmax_regression

RATE = 0.01
ETAS = (1.0, 3.0, 10.0)
MEASURES = ("training error", "test error", "training loss", "test loss")
FITTED = 0.01  # training error below which the training data are fitted
SOURCE = "§6.4.1, Figures 6.2, 6.4"


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

    def tables(self) -> tuple[Table, ...]:
        """Errors at the end, mean ± standard error over seeds, in percent."""
        seeds = self.final("test error").shape[0]
        out = []
        for measure in ("training error", "test error"):
            found = 100 * self.final(measure)
            rows = [
                (f"{damping:g}", *(_cell(found[:, row, column]) for column in range(len(self.etas))))
                for row, damping in enumerate(self.dampings)
            ]
            rows.append(("GD", _cell(100 * self.descent[measure][-1]), *[""] * (len(self.etas) - 1)))
            title = f"{measure} in % after {self.steps[-1]} steps, mean ± se over {seeds} seeds"
            out.append(Table(title, ("δ", *(f"η = {eta:g}" for eta in self.etas)), tuple(rows)))
        return tuple(out)


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
    return LanczosResult("lanczos-opt", setting.dampings, ETAS, looks, measures, descent,
                         judge(setting.dampings, measures), _assumptions(setting), seed)  # fmt: skip


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


def judge(dampings: tuple[float, ...], measures: dict[str, Tensor]) -> tuple[Verdict, ...]:
    """What §6.4.1 says, from the errors after the last step; differences are paired over seeds."""
    test, train = measures["test error"][-1], measures["training error"][-1]
    return (
        _worse_as_damping_falls(dampings, train, test),
        _worse_as_eta_rises(dampings, test),
        _training_untouched(dampings, train, test),
        _graver_at_large_damping(dampings, train, test),
    )


def _worse_as_damping_falls(dampings: tuple[float, ...], train: Tensor, test: Tensor) -> Verdict:
    """The slope of the test error on log₁₀ δ at η = 1, seed by seed, among the dampings that fit the training data.

    With the largest dampings the flat directions, at rate α/δ, have not been learnt yet: there the error falls with δ.
    """
    fitted = (train[..., 0] < FITTED).all(0)
    logs = torch.tensor(dampings, dtype=torch.float64).log10()[fitted]
    best = dampings[int(test[..., 0].mean(0).nan_to_num(1.0).argmin())]
    claim = "generalisation suffers as δ falls, among dampings that fit the training data"
    if int(fitted.sum()) < 2:
        return Verdict(claim, SOURCE, OPEN, f"fewer than two dampings fit to {100 * FITTED:g} %, least at δ = {best:g}")
    centred = logs - logs.mean()
    slopes = test[:, fitted, 0] @ centred / centred.square().sum()
    fall, stderr = paired_gap(slopes, torch.zeros_like(slopes))
    span = f"from δ = {10 ** float(logs.min()):.2g} to {10 ** float(logs.max()):.2g}"
    change = f"test error {-100 * fall:+.2f} ± {100 * stderr:.2f} % for each tenfold δ"
    figures = f"{change}, {span}; least of all at δ = {best:g}"
    return Verdict(claim, SOURCE, judged(fall, stderr), figures)


def _worse_as_eta_rises(dampings: tuple[float, ...], test: Tensor) -> Verdict:
    """At every δ, each η against the next smaller one."""
    gaps = {}
    for row, column in product(range(len(dampings)), range(1, len(ETAS))):
        gaps[row, column] = paired_gap(test[:, row, column - 1], test[:, row, column])
    verdict = worst([judged(*gap) for gap in gaps.values()])
    held = sum(judged(*gap) == "holds" for gap in gaps.values())
    (row, column), (gap, stderr) = min(gaps.items(), key=lambda item: item[1][0])
    figures = (f"holds in {held} of {len(gaps)} pairs; least at δ = {dampings[row]:g}, η {ETAS[column - 1]:g} → "
               f"{ETAS[column]:g}: {100 * gap:+.2f} ± {100 * stderr:.2f} %")  # fmt: skip
    return Verdict("at every δ a greater η harms generalisation more", SOURCE, verdict, figures)


def _training_untouched(dampings: tuple[float, ...], train: Tensor, test: Tensor) -> Verdict:
    """At the least δ, η = 10 against η = 1: the training error moves less than the test error."""
    low = dampings.index(min(dampings))
    moved, stderr = paired_gap(train[:, low, 0], train[:, low, -1])
    suffered, test_stderr = paired_gap(test[:, low, 0], test[:, low, -1])
    excess = (test[:, low, -1] - test[:, low, 0]) - (train[:, low, -1] - train[:, low, 0])
    verdict = judged(*paired_gap(torch.zeros_like(excess), excess))
    figures = (f"δ = {dampings[low]:g}, η 1 → 10: training error {100 * moved:+.2f} ± {100 * stderr:.2f} %, test error "
               f"{100 * suffered:+.2f} ± {100 * test_stderr:.2f} %")  # fmt: skip
    return Verdict("at very low damping η harms the test error and hardly the training error", SOURCE, verdict, figures)


def _graver_at_large_damping(dampings: tuple[float, ...], train: Tensor, test: Tensor) -> Verdict:
    """What η = 10 costs at the largest δ against what it costs at the least, in both errors."""
    low, high = dampings.index(min(dampings)), dampings.index(max(dampings))
    verdicts, figures = [], []
    for name, values in (("training", train), ("test", test)):
        cost = values[..., -1] - values[..., 0]
        gap, stderr = paired_gap(cost[:, low], cost[:, high])
        verdicts.append(judged(gap, stderr))
        means = 100 * cost.mean(0)
        figures.append(f"{name} error {means[low]:+.2f} % at δ = {dampings[low]:g}, {means[high]:+.2f} % at δ = "
                       f"{dampings[high]:g}, difference {100 * gap:+.2f} ± {100 * stderr:.2f} %")  # fmt: skip
    claim = "with larger δ the perturbed optimisers suffer more, in training and in test"
    return Verdict(claim, SOURCE, worst(verdicts), "; ".join(figures))


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


def _cell(values: Tensor) -> str:
    found = values[values.isfinite()]
    lost = len(values) - len(found)
    if len(found) < 2:
        return "diverged" if lost else f"{float(found.mean()):.2f}"
    text = f"{float(found.mean()):.2f} ± {float(found.std()) / math.sqrt(len(found)):.2f}"
    return text + (f" ({lost} diverged)" if lost else "")
