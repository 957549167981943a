"""LanczosOPT on many softmax regressions at once, 1,000 images each (Figures 6.2 and 6.4).

The Hessian of softmax regression is known in closed form, so that a product with it is two
multiplications by the inputs. ``lambdahat.optim.LanczosNewton`` does the same for any model.

A row is one run at one look: ``seed``, ``method`` ("LanczosOPT" or "GD"), ``damping`` δ, ``eta`` η,
``step``, and the four measures, errors as shares; NaN where the run diverged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot, pad

from lambdahat._core.check import require
from lambdahat._core.progress import report
from lambdahat._core.rng import derived_seed, generator
from lambdahat.data.catalogue import load
from lambdahat.data.splits import Split
from lambdahat.experiments import kit
from lambdahat.experiments.kit.cells import Cell, Row, Rows
from lambdahat.models.perceptrons import softmax_regression


class Softmax:
    """S training sets of n samples, each with R weight matrices: vectors are (S, R, P = (d + 1)·K).

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
        logits: Tensor = (self.x @ columns).unflatten(2, (cells, self.classes))
        return logits

    def pull_back(self, outputs: Tensor) -> Tensor:
        """Xᵀ·outputs/n for outputs (S, n, R, K): (S, R, P)."""
        sums: Tensor = (self.x.mT @ outputs.flatten(2)).unflatten(2, outputs.shape[2:])
        return (sums / self.x.shape[1]).transpose(1, 2).flatten(2)

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
        right = (logits * self.targets.unsqueeze(2)).sum(-1)
        loss = (logits.logsumexp(-1) - right).mean(1, dtype=torch.float64)
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
    matrix = torch.diag_embed(alpha) + off + off.mT
    # a cell that has diverged must not stop the others
    values, turn = torch.linalg.eigh(matrix.nan_to_num(0.0, 0.0, 0.0))
    return StackedKrylov(basis, values.abs().to(start.dtype), turn.to(start.dtype))


def newton_directions(
    gradient: Tensor, space: StackedKrylov, eta: Tensor, damping: Tensor
) -> Tensor:
    """Eq. 6.6 of the spectral thesis, Σ_i φ_i φ_iᵀg/(ηλ_i + δ) + (g − Σ_i φ_i φ_iᵀg)/δ, with η and
    δ (R,). What is left of g is projected twice, for 1/δ would amplify what rounding leaves in it.
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
CLAIMS = kit.ClaimTexts("""
    slope: generalisation suffers as δ falls: test error per tenfold δ
      | §6.4.1, Figures 6.2, 6.4 | rises as δ falls | below | %
    fitting: generalisation suffers as δ falls: test error per tenfold δ, among dampings that fit
      the training data | §6.4.1, Figures 6.2, 6.4 | rises as δ falls | below | % | ours
    harms: δ = {damping:g}: η = {strong:g} harms the test error against η = {first:g}
      | §6.4.1, Figures 6.2, 6.4 | harms at every δ | above | %
    test: at δ = {low:g} η = {strong:g} costs more in test error than in training error
      | §6.4.1, Figures 6.2, 6.4 | training hardly moves | above | %
    more: η = {strong:g} costs more {kind} error at δ = {high:g} than at δ = {low:g}
      | §6.4.1, Figures 6.2, 6.4 | suffers more | above | %
""")


def claims(rows: Rows) -> Iterator[kit.Claim]:
    """The effects of δ and η on the final errors, paired over seeds."""
    last = _last(rows).where(method=METHOD)
    dampings, etas = _grid(last)
    (low, *_, high), (first, *_, strong) = dampings, etas
    claim = partial(CLAIMS, low=low, high=high, first=first, strong=strong)
    yield claim("slope", _slope(last, dampings))
    # The dampings with which every seed fits the training data. With the largest the flat
    # directions, at rate α/δ, have not been learnt yet: there the error falls with δ.
    training = {d: _errors(last, "training", d, first).values() for d in dampings}
    fitting = [d for d in dampings if all(error < 100 * FITTED for error in training[d])]
    yield claim("fitting", _slope(last, fitting))
    costs = {}
    for kind, damping in product(("training", "test"), dampings):
        before, after = (_errors(last, kind, damping, eta) for eta in (first, strong))
        costs[kind, damping] = {seed: after[seed] - before[seed] for seed in before}
        if kind == "test":
            yield claim("harms", kit.paired_difference(after, before), damping=damping)
    yield claim("test", kit.paired_difference(costs["test", low], costs["training", low]))
    for kind in ("training", "test"):
        yield claim("more", kit.paired_difference(costs[kind, high], costs[kind, low]), kind=kind)


def _last(rows: Rows) -> Rows:
    return rows.where(step=max(rows.values("step")))


def _grid(rows: Rows) -> tuple[list[float], list[float]]:
    return sorted(rows.distinct("damping")), sorted(rows.distinct("eta"))


def _errors(rows: Rows, kind: str, damping: float, eta: float) -> dict[int, float]:
    """The error of every seed in percent."""
    errors = rows.where(damping=damping, eta=eta).paired(f"{kind} error")
    return {seed: 100 * value for seed, value in errors.items()}


def _slope(rows: Rows, dampings: Sequence[float]) -> kit.Reading:
    """The slope of the test error in percent over log₁₀ δ at the least η."""
    if len(dampings) < 2:
        return kit.UNKNOWN
    errors = [_errors(rows, "test", damping, min(rows.distinct("eta"))) for damping in dampings]
    logs, by_seed = np.log10(dampings), ([each[seed] for each in errors] for seed in errors[0])
    return kit.mean_of([float(np.polyfit(logs, values, 1)[0]) for values in by_seed])


def tables(rows: Rows) -> Iterator[kit.Table]:
    """Both errors at the end over δ and η, in percent, mean ± standard error over seeds."""
    last = _last(rows)
    grid = last.where(method=METHOD)
    dampings, etas = _grid(grid)
    after = f"after {last[0]['step']} steps, mean ± se over {len(last.distinct('seed'))} seeds"
    for measure in ERRORS:
        lines = [
            (f"{d:g}", *(_cell(grid.where(damping=d, eta=eta), measure) for eta in etas))
            for d in dampings
        ]
        lines.append((DESCENT, _cell(last.where(method=DESCENT), measure), *[""] * (len(etas) - 1)))
        yield kit.table(f"{measure} in % {after}", ("δ", *(f"η = {eta:g}" for eta in etas)), lines)


def _cell(rows: Rows, measure: str) -> str:
    values = [100 * value for value in rows.values(measure)]
    reading = kit.mean_of(values)
    if reading.count == 0:
        return "diverged"
    text = f"{reading.value:.2f}" + (f" ± {reading.stderr:.2f}" if reading.count > 1 else "")
    lost = len(values) - reading.count
    return f"{text} ({lost} diverged)" if lost else text


def charts(rows: Rows) -> Iterator[kit.Chart]:
    """Both errors over δ and η (Figure 6.4), and the test error over steps by δ (Figure 6.2)."""
    grid = rows.where(method=METHOD)
    dampings, etas = _grid(grid)
    last, labels = _last(grid), [f"η = {eta:g}" for eta in etas]
    caption = "Percent after the last step, mean over the seeds that did not diverge."
    for measure in ERRORS:
        values = [
            [_mean(last.where(damping=d, eta=eta), measure)[0] for eta in etas] for d in dampings
        ]
        heat = kit.Heat(labels, [f"δ = {d:g}" for d in dampings], values, "%")
        title = f"{measure.capitalize()} of LanczosOPT"
        yield kit.Chart(title, "η", "δ", heat=heat, source="Figure 6.4", caption=caption)
    followed = rows.where(step=min(rows.values("step"))).distinct("seed")
    rows = Rows(row for row in rows if row["seed"] in followed)
    curves = {f"δ = {d:g}": rows.where(method=METHOD, damping=d, eta=etas[0]) for d in dampings}
    series = []
    for name, part in (curves | {DESCENT: rows.where(method=DESCENT)}).items():
        steps = part.distinct("step")
        points = [_mean(part.where(step=step), "test error") for step in steps]
        heights, errors = ([point[side] for point in points] for side in (0, 1))
        series.append(kit.Series(name, steps, heights, errors, band="± standard error over seeds"))
    title = f"Test error on the way, η = {etas[0]:g}"
    yield kit.Chart(title, "step", "test error, %", tuple(series), source="Figure 6.2")


def _mean(rows: Rows, measure: str) -> tuple[float | None, float | None]:
    """Mean in percent and its error over the seeds, None where not known."""
    reading = kit.mean_of([100 * value for value in rows.paired(measure).values()])
    value, error = kit.finite([reading.value, reading.stderr])
    return value, error


RATE = 0.01
ETAS = (1.0, 3.0, 10.0)
MEASURES = ("training error", "test error", "training loss", "test loss")


FEW, MORE = (1e-3, 1e-2, 1e-1), (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
MOST = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)


def setting(
    data: str,
    samples: int,
    dampings: Sequence[float],
    steps: int,
    pairs: int,
    every: int,
    seeds: int,
    looks: int = 10,
) -> Cell:
    """The size of a run: new Ritz pairs ``every`` few steps, ``looks`` measurements in all."""
    about = {"data": data, "samples": samples, "dampings": dampings, "steps": steps}
    return {**about, "pairs": pairs, "every": every, "seeds": seeds, "looks": looks}


SCALES = {
    "smoke": setting("digits", 200, FEW, 60, 15, 5, 2, looks=3),
    "cpu": setting("mnist", 1000, MORE, 300, 50, 10, 3),
    "paper": setting("mnist", 1000, MOST, 500, 50, 1, 5),
}


def rows_at(cell: Cell, seed: int, device: torch.device | str = "cpu") -> list[Row]:
    """All dampings δ and factors η, and gradient descent: a row per run and look."""
    return rows_of(cell["dampings"], *train_runs(cell, seed, None, device))


def rows_of(
    dampings: Sequence[float], steps: Sequence[int], measures: Mapping[str, Tensor]
) -> list[Row]:
    """Measures (looks, S, R) of the runs of ``cells_of`` as rows; the last is gradient descent."""
    settings = cells_of(dampings)
    methods = [METHOD] * (len(settings) - 1) + [DESCENT]
    return [
        {"seed": seed, "method": methods[run], "damping": damping, "eta": eta, "step": step}
        | {name: float(measures[name][look, seed, run]) for name in MEASURES}
        for run, (damping, eta) in enumerate(settings)
        for seed in range(measures[MEASURES[0]].shape[1])
        for look, step in enumerate(steps)
    ]


def cells_of(dampings: Sequence[float]) -> list[tuple[float, float]]:
    """(δ, η) of all runs; with η = 0 and δ = 1 Eq. 6.6 is gradient descent."""
    return [*product(dampings, ETAS), (1.0, 0.0)]


def train_runs(
    cell: Cell, seed: int, split: Split | None = None, device: torch.device | str = "cpu"
) -> tuple[tuple[int, ...], dict[str, Tensor]]:
    """The steps of the looks and the measures (looks, S, R); ``split`` replaces the data set."""
    split, samples, last = split or load(cell["data"]), cell["samples"], cell["steps"]
    count, expected = len(split.train[0]), f"have {samples:,} training samples"
    require(samples <= count, "split", expected, f"{count:,}")
    cells = cells_of(cell["dampings"])
    train, test = _data(cell, split, seed, torch.device(device))
    damping, eta = torch.tensor(cells, device=device).T
    weights = _initial(train, seed).to(device).unsqueeze(1).repeat(1, len(cells), 1)
    every = max(1, last // cell["looks"])
    steps, looks, space = [], [], None
    for step in range(last):
        if step % cell["every"] == 0:
            start = start_vectors(weights.shape, derived_seed(seed, "ritz"), step, weights)
            space = krylov(train.product(weights), start, cell["pairs"])
        assert space is not None
        weights = weights - RATE * newton_directions(train.gradient(weights), space, eta, damping)
        if (step + 1) % every == 0 or step + 1 == last:
            (loss, error), (test_loss, test_error) = train.evaluate(weights), test.evaluate(weights)
            steps.append(step + 1)
            looks.append([each.cpu() for each in (error, test_error, loss, test_loss)])
        report("lanczos-opt", step + 1, last)
    columns = [torch.stack(values) for values in zip(*looks, strict=True)]
    return tuple(steps), dict(zip(MEASURES, columns, strict=True))


def _data(cell: Cell, split: Split, seed: int, device: torch.device) -> tuple[Softmax, Softmax]:
    """Every seed has training samples of its own; all share the test samples."""
    (x, y), (x_test, y_test) = split
    streams = [generator(seed, "training images", index) for index in range(cell["seeds"])]
    draws = [torch.randperm(len(x), generator=rng)[: cell["samples"]] for rng in streams]
    chosen = torch.stack(draws)
    train = Softmax(x.flatten(1)[chosen].to(device), y[chosen].to(device), split.classes)
    x, y = x_test.flatten(1).expand(len(draws), -1, -1), y_test.expand(len(draws), -1)
    return train, Softmax(x.to(device), y.to(device), split.classes)


def _initial(train: Softmax, seed: int) -> Tensor:
    """The first weights of each seed (S, P), as ``softmax_regression`` draws them."""
    inputs, weights = train.x.shape[2] - 1, []
    for index in range(len(train.x)):
        layer = softmax_regression(inputs, train.classes, derived_seed(seed, "weights", index))[0]
        assert isinstance(layer, nn.Linear)
        weights.append(torch.cat([layer.weight.detach().T, layer.bias.detach()[None]]).flatten())
    return torch.stack(weights)


def cells(base: Cell, seeds: int, together: int = 1) -> list[Cell]:
    """A cell for each group of seeds, each with all dampings, all η, and gradient descent."""
    return kit.grid(base | {"seeds": together}, group=range(seeds // together))


def run(cell: Cell, device: str) -> list[Row]:
    """A row for each run and look."""
    first = cell["group"] * cell["seeds"]
    rows = rows_at(cell, cell["group"], device)
    return [row | {"seed": first + row["seed"]} for row in rows]


EXPERIMENT = kit.Experiment(
    "lanczos-opt",
    "Less damping and less movement in sharp directions harm the test error",
    kit.SPECTRAL,
    "§6.4, Figures 6.2 and 6.4",
    {
        "smoke": cells(SCALES["smoke"], seeds=2),
        "cpu": [*cells(SCALES["cpu"], seeds=6), *cells(SCALES["cpu"] | {"looks": 1}, seeds=60)[6:]],
        "paper": cells(SCALES["paper"], seeds=5, together=5),
    },
    *(run, claims, tables, charts),
    kit.sentences(f"""
        Full-batch steps at α = {RATE:g}, 500 at paper scale: the thesis does not say how many.
        1,000 training images of MNIST drawn anew for each seed; pixels in [0, 1].
        Weights and biases are uniform on ±1/√inputs at the start.
        50 Lanczos steps from a random vector: at every step at paper scale, every ten at cpu scale.
        The dampings are ours: those of the figures are not in the text.
        GD takes the same α; it is Eq. 6.6 with η = 0 and δ = 1.
        “As δ falls” is judged over all dampings, and, as a claim of ours, over those that fit the
          training data.
        n counts seeds: draws of 1,000 images with a start each.
        At cpu scale the first 6 seeds left claims undecided that a planned 51 could decide; 60 were
          run, with the first among them. Of the others only the last step is stored.
    """),
    size=(
        "logistic regression on 1,000 images of MNIST, 10,000 test images, α = 0.01, 50 Lanczos"
        " steps; steps of training and seeds are not in the text."
    ),
    sizes=(kit.Size(data="mnist", samples=1000),),
)
