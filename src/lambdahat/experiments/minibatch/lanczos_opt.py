"""LanczosOPT on many softmax regressions at once, 1,000 images each (Figures 6.2 and 6.4).

The Hessian of softmax regression is known in closed form, so that a product with it is two
multiplications by the inputs. ``lambdahat.optim.LanczosNewton`` does the same for any model.

A row is one run at one look: ``seed``, ``method`` ("LanczosOPT" or "GD"), ``damping`` δ, ``eta`` η,
``step``, and the four measures, errors as shares; NaN where the run diverged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot, pad

from lambdahat._core.check import require
from lambdahat._core.progress import report
from lambdahat._core.rng import derived_seed, generator
from lambdahat.data.catalogue import load
from lambdahat.data.splits import Split
from lambdahat.experiments.kit.cells import Cell, Row, Rows
from lambdahat.experiments.kit.claims import (
    Claim,
    Claims,
    Reading,
    Table,
    mean_of,
    paired_difference,
)
from lambdahat.experiments.kit.experiment import SPECTRAL, Experiment, Size, sentences
from lambdahat.models.perceptrons import softmax_regression
from lambdahat.results.charts import Chart, Heat, Series


class Softmax:
    """S training sets of n samples, each with R weight matrices of its own: vectors are (S, R, P),
    P = (d + 1)·K.

    ``x`` is (S, n, d) and ``y`` (S, n); a column of ones for the biases is added to x. A vector
    reads (d + 1, K), the biases last.
    """

    def __init__(self, x: Tensor, y: Tensor, classes: int) -> None:
        self.x, self.y, self.classes = pad(x, (0, 1), value=1.0), y, classes
        self.targets = one_hot(y, classes).to(x.dtype)

    def logits(self, vectors: Tensor) -> Tensor:
        """(S, n, R, K)."""
        sets, cells = vectors.shape[:2]
        columns = vectors.view(sets, cells, -1, self.classes).transpose(1, 2).flatten(2)
        found: Tensor = (self.x @ columns).unflatten(2, (cells, self.classes))
        return found

    def pull_back(self, outputs: Tensor) -> Tensor:
        """Xᵀ·outputs/n for outputs (S, n, R, K): (S, R, P)."""
        found: Tensor = (self.x.mT @ outputs.flatten(2)).unflatten(
            2, outputs.shape[2:]
        ) / self.x.shape[1]
        return found.transpose(1, 2).flatten(2)

    def gradient(self, vectors: Tensor) -> Tensor:
        """∇L = Xᵀ(p − y)/n."""
        return self.pull_back(self.logits(vectors).softmax(-1) - self.targets.unsqueeze(2))

    def product(self, at: Tensor) -> Callable[[Tensor], Tensor]:
        """v ↦ Hv = Xᵀ[p∘(Xv) − p·(pᵀXv)]/n at the weights ``at``."""
        shares = self.logits(at).softmax(-1)

        def times(vectors: Tensor) -> Tensor:
            pushed = shares * self.logits(vectors)
            return self.pull_back(pushed - shares * pushed.sum(-1, keepdim=True))

        return times

    def evaluate(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss and error rate, (S, R) each, in float64; NaN where the loss is not finite."""
        logits = self.logits(vectors)
        loss = (logits.logsumexp(-1) - (logits * self.targets.unsqueeze(2)).sum(-1)).mean(
            1, dtype=torch.float64
        )
        wrong = (logits.argmax(-1) != self.y.unsqueeze(-1)).double().mean(1)
        return tuple(torch.where(loss.isfinite(), values, math.nan) for values in (loss, wrong))  # type: ignore[return-value]


class StackedKrylov(NamedTuple):
    """Orthonormal ``basis`` (S, R, m, P), Ritz ``values`` (S, R, m) ≥ 0, ``turn`` (S, R, m, m)."""

    basis: Tensor
    values: Tensor
    turn: Tensor


def krylov(product: Callable[[Tensor], Tensor], start: Tensor, pairs: int) -> StackedKrylov:
    """``pairs`` Lanczos steps from ``start`` (S, R, P), fully reorthogonalised twice a step."""
    basis = start.new_zeros(*start.shape[:2], pairs, start.shape[2])
    alpha = torch.zeros(*start.shape[:2], pairs, dtype=torch.float64, device=start.device)
    beta = torch.zeros_like(alpha)
    vector = start
    for step in range(pairs):
        length = torch.linalg.vector_norm(vector, dim=-1, keepdim=True)
        beta[..., step] = length[..., 0].double()
        basis[..., step, :] = vector / length.clamp_min(torch.finfo(start.dtype).tiny)
        known = basis[..., : step + 1, :]
        vector = product(basis[..., step, :])
        alpha[..., step] = (vector * basis[..., step, :]).sum(-1, dtype=torch.float64)
        for _ in range(2):
            vector = vector - _combine(known, _overlaps(known, vector))
    off = torch.diag_embed(beta[..., 1:], 1)
    # a cell that has diverged must not stop the others
    values, turn = torch.linalg.eigh(
        (torch.diag_embed(alpha) + off + off.mT).nan_to_num(0.0, 0.0, 0.0)
    )
    return StackedKrylov(basis, values.abs().to(start.dtype), turn.to(start.dtype))


def newton_directions(
    gradient: Tensor, space: StackedKrylov, eta: Tensor, damping: Tensor
) -> Tensor:
    """Eq. 6.6 of the spectral thesis, Σ_i φ_i φ_iᵀg/(ηλ_i + δ) + (g − Σ_i φ_i φ_iᵀg)/δ; eta and
    damping are (R,).

    What is left of g is projected twice, for 1/δ would amplify what rounding leaves of the basis in
    it.
    """
    rest, inside = gradient, torch.zeros_like(space.values)
    for _ in range(2):
        overlaps = _overlaps(space.basis, rest)
        inside, rest = inside + overlaps, rest - _combine(space.basis, overlaps)
    along = _combine(space.turn, inside)  # turnᵀ c: the parts along the Ritz vectors
    gains = along / (eta[:, None] * space.values + damping[:, None])
    return rest / damping[:, None] + _combine(space.basis, _overlaps(space.turn, gains))


def start_vectors(shape: torch.Size, seed: int, step: int, like: Tensor) -> Tensor:
    """Gaussian starts (S, R, P), the same for all R settings of a training set."""
    sets, cells, size = shape
    drawn = torch.randn(sets, 1, size, generator=generator(seed, "lanczos start", step))
    return drawn.to(like).expand(sets, cells, size)


def _overlaps(rows: Tensor, vectors: Tensor) -> Tensor:
    """rows·v, (…, m)."""
    return (rows @ vectors.unsqueeze(-1)).squeeze(-1)


def _combine(rows: Tensor, weights: Tensor) -> Tensor:
    """rowsᵀ·weights."""
    return (rows.mT @ weights.unsqueeze(-1)).squeeze(-1)


METHOD, DESCENT = "LanczosOPT", "GD"
ERRORS = ("training error", "test error")
FITTED = 0.01  # training error below which the training data are fitted
SOURCE = "§6.4.1, Figures 6.2, 6.4"

BySeed = dict[int, float]


def claims(rows: Rows) -> list[Claim]:
    """The effects of δ and η on the final errors, paired over seeds."""
    last = _last(rows).where(method=METHOD)
    dampings, etas = _grid(last)
    low, high, first, strong = min(dampings), max(dampings), min(etas), max(etas)
    found = Claims(unit=" %")
    sentence = "generalisation suffers as δ falls: test error per tenfold δ"
    found.add(sentence, SOURCE, "rises as δ falls", _slope(last, dampings), "below")
    sentence = (
        "generalisation suffers as δ falls: test error per tenfold δ, among dampings that fit"
        " the training data"
    )
    published = "rises as δ falls"
    found.add(sentence, SOURCE, published, _slope(last, _fitting_dampings(last)), "below", own=True)
    for damping in dampings:
        gap = paired_difference(
            _errors(last, "test", damping, strong), _errors(last, "test", damping, first)
        )
        sentence = f"δ = {damping:g}: η = {strong:g} harms the test error against η = {first:g}"
        found.append(Claim(sentence, SOURCE, "harms at every δ", gap, unit=" %"))
    costs = {
        (kind, damping): _cost(last, kind, damping, first, strong)
        for kind in ("training", "test")
        for damping in (low, high)
    }
    sentence = f"at δ = {low:g} η = {strong:g} costs more in test error than in training error"
    reading = paired_difference(costs["test", low], costs["training", low])
    found.append(Claim(sentence, SOURCE, "training hardly moves", reading, unit=" %"))
    for kind in ("training", "test"):
        gap = paired_difference(costs[kind, high], costs[kind, low])
        sentence = f"η = {strong:g} costs more {kind} error at δ = {high:g} than at δ = {low:g}"
        found.append(Claim(sentence, SOURCE, "suffers more", gap, unit=" %"))
    return found


def _last(rows: Rows) -> Rows:
    return rows.where(step=max(rows.values("step")))


def _grid(rows: Rows) -> tuple[list[float], list[float]]:
    return sorted(rows.distinct("damping")), sorted(rows.distinct("eta"))


def _errors(rows: Rows, kind: str, damping: float, eta: float) -> BySeed:
    """The error of every seed in percent."""
    found = rows.where(damping=damping, eta=eta).paired(f"{kind} error")
    return {seed: 100 * value for seed, value in found.items()}


def _cost(rows: Rows, kind: str, damping: float, first: float, strong: float) -> BySeed:
    """What the strongest η adds to an error, seed by seed."""
    before, after = _errors(rows, kind, damping, first), _errors(rows, kind, damping, strong)
    return {seed: after[seed] - before[seed] for seed in before}


def _slope(rows: Rows, dampings: Sequence[float]) -> Reading:
    """The slope of the test error in percent over log₁₀ δ at the least η."""
    if len(dampings) < 2:
        return Reading(math.nan, math.nan, math.nan, 0)
    errors = [_errors(rows, "test", damping, min(rows.distinct("eta"))) for damping in dampings]
    logs = np.log10(dampings)
    return mean_of(
        [float(np.polyfit(logs, [each[seed] for each in errors], 1)[0]) for seed in errors[0]]
    )


def _fitting_dampings(rows: Rows) -> list[float]:
    """The dampings with which every seed fits the training data at the least η.

    With the largest the flat directions, at rate α/δ, have not been learnt yet: there the error
    falls with δ.
    """
    dampings, etas = _grid(rows)
    return [
        d
        for d in dampings
        if all(e < 100 * FITTED for e in _errors(rows, "training", d, etas[0]).values())
    ]


def tables(rows: Rows) -> list[Table]:
    """Both errors at the end over δ and η, in percent, mean ± standard error over seeds."""
    last = _last(rows)
    grid = last.where(method=METHOD)
    dampings, etas = _grid(grid)
    out = []
    for measure in ERRORS:
        lines = [
            (
                f"{damping:g}",
                *(_cell(grid.where(damping=damping, eta=eta), measure) for eta in etas),
            )
            for damping in dampings
        ]
        lines.append((DESCENT, _cell(last.where(method=DESCENT), measure), *[""] * (len(etas) - 1)))
        title = (
            f"{measure} in % after {last[0]['step']} steps, mean ± se over"
            f" {len(last.distinct('seed'))} seeds"
        )
        out.append(Table(title, ("δ", *(f"η = {eta:g}" for eta in etas)), tuple(lines)))
    return out


def _cell(rows: Rows, measure: str) -> str:
    values = [100 * value for value in rows.values(measure)]
    reading = mean_of(values)
    if reading.count == 0:
        return "diverged"
    text = f"{reading.value:.2f}" + (f" ± {reading.stderr:.2f}" if reading.count > 1 else "")
    lost = len(values) - reading.count
    return f"{text} ({lost} diverged)" if lost else text


def charts(rows: Rows) -> list[Chart]:
    """Both errors over δ and η (Figure 6.4), and the test error over steps by δ (Figure 6.2)."""
    grid, out = rows.where(method=METHOD), []
    dampings, etas = _grid(grid)
    last = _last(grid)
    for measure in ERRORS:
        values = [
            [_mean(last.where(damping=d, eta=eta), measure).value for eta in etas] for d in dampings
        ]
        heat = Heat(
            [f"η = {eta:g}" for eta in etas],
            [f"δ = {d:g}" for d in dampings],
            [[value if math.isfinite(value) else None for value in line] for line in values],
            "%",
        )
        title = f"{measure.capitalize()} of LanczosOPT"
        caption = "Percent after the last step, mean over the seeds that did not diverge."
        out.append(Chart(title, "η", "δ", heat=heat, source="Figure 6.4", caption=caption))
    curves = [(f"δ = {d:g}", grid.where(damping=d, eta=min(etas))) for d in dampings]
    curves.append((DESCENT, rows.where(method=DESCENT)))
    series = tuple(_curve(name, part) for name, part in curves)
    title = f"Test error on the way, η = {min(etas):g}"
    out.append(Chart(title, "step", "test error, %", series, source="Figure 6.2"))
    return out


def _curve(name: str, rows: Rows) -> Series:
    steps = rows.distinct("step")
    readings = [_mean(rows.where(step=step), "test error") for step in steps]
    return Series(
        name, steps, [_finite(r.value) for r in readings], [_finite(r.stderr) for r in readings]
    )


def _mean(rows: Rows, measure: str) -> Reading:
    found: Mapping[int, float] = rows.paired(measure)
    return mean_of([100 * value for value in found.values()])


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


RATE = 0.01
ETAS = (1.0, 3.0, 10.0)
MEASURES = ("training error", "test error", "training loss", "test loss")


@dataclass(frozen=True)
class LanczosSetting:
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
    "smoke": LanczosSetting("digits", 200, (1e-3, 1e-2, 1e-1), 60, 15, 5, 2, looks=3),
    "cpu": LanczosSetting("mnist", 1000, (1e-4, 1e-3, 1e-2, 1e-1, 1.0), 300, 50, 10, 3),
    "paper": LanczosSetting(
        "mnist", 1000, (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0), 500, 50, 1, 5
    ),
}


def rows_at(setting: LanczosSetting, seed: int, device: torch.device | str = "cpu") -> list[Row]:
    """All dampings δ and factors η, and gradient descent: a row per run and look."""
    return rows_of(setting.dampings, *train_runs(setting, seed, None, device))


def rows_of(
    dampings: Sequence[float], steps: Sequence[int], measures: Mapping[str, Tensor]
) -> list[Row]:
    """Measures (looks, S, R) of the runs of ``cells_of`` as rows."""
    return [
        {"seed": seed, **where, "step": step}
        | {name: float(measures[name][look, seed, run]) for name in MEASURES}
        for run, where in enumerate(_run_settings(dampings))
        for seed in range(measures[MEASURES[0]].shape[1])
        for look, step in enumerate(steps)
    ]


def _run_settings(dampings: Sequence[float]) -> list[Row]:
    """The settings of the runs; the last is gradient descent."""
    methods = [METHOD] * (len(dampings) * len(ETAS)) + [DESCENT]
    pairs = zip(methods, cells_of(dampings), strict=True)
    return [{"method": method, "damping": damping, "eta": eta} for method, (damping, eta) in pairs]


def cells_of(dampings: Sequence[float]) -> list[tuple[float, float]]:
    """(δ, η) of all runs; with η = 0 and δ = 1 Eq. 6.6 is gradient descent."""
    return [*product(dampings, ETAS), (1.0, 0.0)]


def train_runs(
    setting: LanczosSetting,
    seed: int,
    split: Split | None = None,
    device: torch.device | str = "cpu",
) -> tuple[tuple[int, ...], dict[str, Tensor]]:
    """The steps of the looks and the measures (looks, S, R); ``split`` replaces the data set."""
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
            looks.append(_measure(train, test, weights))
        report("lanczos-opt", step + 1, setting.steps)
    return tuple(steps), {name: torch.stack([look[name] for look in looks]) for name in MEASURES}


def _space(
    train: Softmax, weights: Tensor, setting: LanczosSetting, seed: int, step: int
) -> StackedKrylov:
    start = start_vectors(weights.shape, derived_seed(seed, "ritz"), step, weights)
    return krylov(train.product(weights), start, setting.pairs)


def _data(
    setting: LanczosSetting, split: Split, seed: int, device: torch.device
) -> tuple[Softmax, Softmax]:
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


def _initial(train: Softmax, setting: LanczosSetting, seed: int) -> Tensor:
    """The first weights of each seed (S, P), as ``softmax_regression`` draws them."""
    inputs, found = train.x.shape[2] - 1, []
    for index in range(setting.seeds):
        layer = softmax_regression(inputs, train.classes, derived_seed(seed, "weights", index))[0]
        assert isinstance(layer, nn.Linear)
        found.append(torch.cat([layer.weight.detach().T, layer.bias.detach()[None]]).flatten())
    return torch.stack(found)


def _measure(train: Softmax, test: Softmax, weights: Tensor) -> dict[str, Tensor]:
    (loss, error), (test_loss, test_error) = train.evaluate(weights), test.evaluate(weights)
    found = dict(zip(MEASURES, (error, test_error, loss, test_loss), strict=True))
    return {name: values.cpu() for name, values in found.items()}


@dataclass(frozen=True)
class LanczosScale:
    """A scale of the experiment, and how many of its seeds a cell trains ``together``."""

    setting: LanczosSetting
    together: int = 1


def cells(config: LanczosScale) -> list[Cell]:
    """A cell for each group of seeds, each with all dampings, all η, and gradient descent."""
    groups = config.setting.seeds // config.together
    return [
        asdict(replace(config.setting, seeds=config.together)) | {"group": group}
        for group in range(groups)
    ]


def run(cell: Cell, device: str) -> list[Row]:
    """A row for each run and look."""
    first = cell["group"] * cell["seeds"]
    return [
        row | {"seed": first + row["seed"]}
        for row in rows_at(setting_of(cell), cell["group"], device)
    ]


def setting_of(cell: Cell) -> LanczosSetting:
    """The settings that a cell holds."""
    settings: dict[str, Any] = {field.name: cell[field.name] for field in fields(LanczosSetting)}
    return LanczosSetting(**settings | {"dampings": tuple(cell["dampings"])})


EXPERIMENT = Experiment(
    "lanczos-opt",
    "Less damping and less movement in sharp directions harm the test error",
    SPECTRAL,
    "§6.4, Figures 6.2 and 6.4",
    {
        "smoke": LanczosScale(SCALES["smoke"]),
        "cpu": LanczosScale(replace(SCALES["cpu"], seeds=6)),
        "paper": LanczosScale(SCALES["paper"], together=5),
    },
    *(cells, run, claims, tables, charts),
    sentences(f"""
        Full-batch steps at α = {RATE:g}, 500 at paper scale: the thesis does not say how many.
        1,000 training images of MNIST drawn anew for each seed; pixels in [0, 1].
        Weights and biases are uniform on ±1/√inputs at the start.
        50 Lanczos steps from a random vector: at every step at paper scale, every ten at cpu scale.
        The dampings are ours: those of the figures are not in the text.
        GD takes the same α; it is Eq. 6.6 with η = 0 and δ = 1.
        “As δ falls” is judged over all dampings, and as a claim of ours over those that fit the
          training data.
        n counts seeds: draws of 1,000 images with a start each.
    """),
    size=(
        "logistic regression on 1,000 images of MNIST, 10,000 test images, α = 0.01, 50 Lanczos"
        " steps; steps of training and seeds are not in the text."
    ),
    sizes=(Size(data="mnist", samples=1000),),
)
