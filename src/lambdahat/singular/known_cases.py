"""The ground-truth suite: problems whose λ̂ is known at every nβ and γ, exactly or with a small
error of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lambdahat._core.check import require_count, require_positive
from lambdahat._core.rng import generator
from lambdahat._core.storage import digest
from lambdahat.operators.curvature import hessian
from lambdahat.problem import Problem
from lambdahat.results import Estimate, Status
from lambdahat.sampling._sample import sample
from lambdahat.sampling.diagnostics import RHAT
from lambdahat.sampling.kernels import mala
from lambdahat.singular.exact import (
    crossing_expectation,
    crossing_problem,
    deep_linear,
    deep_linear_problem,
    deep_linear_reference,
    normal_crossing,
    quadratic,
    quadratic_problem,
)
from lambdahat.singular.singular_regressions import singular_regressions
from lambdahat.singular.verification import KnownCase

TAILS = 10.0  # degrees of freedom of the proposal: its tails are heavier than the posterior's
FEWEST = 300  # effective draws below which the answer is not to be trusted
ELEMENTS = 4_000_000  # draws × samples at a time
POPULATION = 100_000  # the samples that a loss without data stands for
SHAPES: tuple[tuple[tuple[int, ...], int, int], ...] = (  # widths, true rank, samples
    ((5, 3, 5), 0, 1_000_000),
    ((5, 4, 5), 0, 1_000_000),
    ((4, 2, 3), 1, POPULATION),
    ((6, 3, 4), 2, POPULATION),
    ((3, 5, 3), 1, POPULATION),
    ((2, 6, 2), 1, POPULATION),
    ((8, 4, 6), 2, POPULATION),
    ((6, 6, 6), 3, 1_000_000),
    ((10, 5, 8), 2, POPULATION),
    ((2, 2, 2, 2), 0, POPULATION),
    ((3, 3, 3, 3), 1, POPULATION),
    ((4, 3, 3, 4), 1, 1_000_000),
    ((6, 4, 5, 6), 2, POPULATION),
    ((3, 3, 3, 3, 3), 0, POPULATION),
    ((5, 4, 4, 4, 5), 2, 1_000_000),
)
MLP, MLP_SIZES = "mlp-4-8-3", (4, 8, 3)
QUICK = (
    "quadratic-d5-k1e4",
    "quadratic-dead",
    "crossing-4",
    "crossing-6",
    "reduced-rank-4-2-3-r1",
    "reduced-rank-3-5-3-r1",
    "deep-linear-6-4-5-6-r2",
    "logistic-n500-d8",
    "data-linear-4-3-4-r1-noisy",
    "data-factors-8x6-r1-h2",
    "data-tanh-twins",
)
MALA_CHAINS, MALA_STEPS, MALA_ACCEPTANCE = 32, 15_000, 0.6


def logistic_minimum(x: Tensor, y: Tensor) -> Tensor:
    """The w of least mean logistic loss by Newton: x (n, d), y (n,) of 0 and 1, float64."""
    w = torch.zeros(x.shape[1], dtype=x.dtype)
    for _ in range(50):
        p = (x @ w).sigmoid()
        w = w - torch.linalg.solve(_curvature(x, p), x.T @ (p - y) / len(y))
    return w


def _curvature(x: Tensor, p: Tensor) -> Tensor:
    """The Hessian of the mean loss, (d, d)."""
    return (x * (p * (1 - p)).unsqueeze(1)).T @ x / len(x)


def logistic_expectation(
    x: Tensor,
    y: Tensor,
    centre: Tensor,
    nbeta: float,
    localization: float,
    draws: int = 20_000,
    seed: int = 0,
) -> Estimate:
    """nβ·E[L(w) − L(w*)] under exp(−nβ·L(w) − (γ/2)‖w − w*‖²), L the mean logistic loss and w* =
    ``centre``.

    Draws of a Student-t around w* with precision nβH + γ, H the Hessian there, are weighted to the
    posterior, and the weighted mean is taken of e − c·((w − w*)·∇U − d), where e = nβ(L − L*) and c
    is the regression coefficient: under the posterior (w − w*)·∇U averages d (Stein), and near a
    minimum it is nearly a multiple of e. The error is that of a ratio of means. ``cost`` counts
    losses over the data.
    """
    require_positive(nbeta, "nbeta")
    require_positive(localization, "localization")
    require_count(draws, "draws", least=100)
    x, y, centre = x.double(), y.double(), centre.double()
    size = len(centre)
    identity = torch.eye(size, dtype=torch.float64)
    precision = nbeta * _curvature(x, (x @ centre).sigmoid()) + localization * identity
    rng = generator(seed, "importance")
    normal = torch.randn(draws, size, generator=rng, dtype=torch.float64)
    chi = torch.randn(draws, int(TAILS), generator=rng, dtype=torch.float64).square().sum(1) / TAILS
    root = torch.linalg.cholesky(precision)
    away = torch.linalg.solve_triangular(root.T, (normal / chi.sqrt().unsqueeze(1)).T, upper=True).T
    energies, work = _energies(x, y, centre, away, nbeta)
    tie = localization * away.square().sum(1)
    proposal = -0.5 * (TAILS + size) * torch.log1p((away @ root).square().sum(1) / TAILS)
    weights = torch.softmax(-energies - 0.5 * tie - proposal, dim=0)
    # the weighted mean of the energies, less their part along a control whose mean is 0
    control = work + tie - size
    centred = control - weights @ control
    slope = (weights * centred) @ energies / ((weights * centred) @ centred)
    values = energies - slope * control
    mean = float(weights @ values)
    stderr = math.sqrt(float(weights.square() @ (values - mean).square()))
    status = Status.CONVERGED if 1 / float(weights.square().sum()) >= FEWEST else Status.FEW_WEIGHTS
    return Estimate(mean, stderr, len(weights), status)


def _energies(
    x: Tensor, y: Tensor, centre: Tensor, away: Tensor, nbeta: float
) -> tuple[Tensor, Tensor]:
    """nβ(L − L*) and (w − w*)·nβ∇L of each draw."""
    start = x @ centre
    lowest = torch.nn.functional.softplus(start) - y * start
    energies, work = [], []
    for part in away.split(max(ELEMENTS // len(x), 1)):
        change = part @ x.T
        logits = start + change
        loss = torch.nn.functional.softplus(logits) - y * logits
        energies.append(nbeta * (loss - lowest).mean(dim=1))
        work.append(nbeta * ((logits.sigmoid() - y) * change).mean(dim=1))
    return torch.cat(energies), torch.cat(work)


@dataclass(frozen=True)
class Reference:
    """An expensive reference value: looked up where it is stored, else computed.

    ``compute(nbeta, localization, effort)`` takes about ``effort`` times as long as it needs for an
    error of less than one per cent. ``problem``, where the case has data, is what the stored value
    must have been computed for: a value of other data is not used.
    """

    case: str
    compute: Callable[[float, float, float], Estimate]
    problem: Callable[[], Problem] | None = None

    def __call__(self, nbeta: float, localization: float) -> Estimate:
        return self.known(nbeta, localization) or self.compute(nbeta, localization, 1.0)

    def known(self, nbeta: float, localization: float) -> Estimate | None:
        """The stored value, or None."""
        mark = stored_references()["problems"].get(self.case)
        if self.problem is not None and mark != rounded_digest(self.problem()):
            return None
        for at, tie, value, stderr, dof in stored_references()["values"].get(self.case, ()):
            if np.allclose((at, tie), (nbeta, localization), rtol=1e-9, atol=0):
                return Estimate(value, stderr, dof=dof)
        return None


def rounded_digest(problem: Problem) -> str:
    """A digest of data and parameters to six decimals: machines differ in the last bits."""
    leaves = (problem.vector, *(leaf for batch in problem.batches for leaf in batch.data))
    rounded = [(leaf.double().mul(1e6).round().long().tolist(), str(leaf.dtype)) for leaf in leaves]
    return digest(repr(rounded).encode())[:32]


@cache
def stored_references() -> dict[str, Any]:
    """What benchmarks/references.py wrote: values, parameters and digests by case."""
    text = resources.files(__package__).joinpath("references.json").read_text("utf-8")
    references: dict[str, Any] = json.loads(text)
    return references


def suite(quick: bool = False) -> list[KnownCase]:
    """All cases, or with ``quick`` one or two of each family, those that take a few seconds.

    Quadratic forms with eigenvalues from 1 to 1/κ, evenly in the logarithm, and one with dead
    parameters; normal crossings; linear networks on the population loss; models with data, sampled
    on all of it or by mini-batches; and a ReLU network.
    """
    shapes = [(size, label) for size in (5, 50) for label in ("1", "1e2", "1e4")]
    cases = [
        *(
            _quadratic(f"quadratic-d{d}-k{k}", list(np.geomspace(1.0, 1.0 / float(k), d)))
            for d, k in shapes
        ),
        _quadratic("quadratic-dead", [1.0] * 10 + [0.0] * 10),
        *(_crossing(exponents) for exponents in ((2,), (3,), (1, 1), (1, 2), (1, 1, 1))),
        *(_linear_network(*shape) for shape in SHAPES),
        _logistic(500, 8, torch.float64, 20_000),
        _logistic(20_000, 60, torch.float32, 2000),
        _linear(50_000, 30),
        *singular_regressions(),
        KnownCase(MLP, perceptron_problem, Reference(MLP, _perceptron_truth, perceptron_problem)),
    ]
    return [case for case in cases if case.name in QUICK] if quick else cases


def _quadratic(name: str, eigenvalues: list[float]) -> KnownCase:
    def truth(nbeta: float, localization: float) -> Estimate:
        return Estimate(quadratic(eigenvalues, nbeta, localization))

    curved = sum(value > 0 for value in eigenvalues)
    return KnownCase(name, partial(quadratic_problem, eigenvalues, POPULATION), truth, curved / 2)


def _crossing(exponents: Sequence[int]) -> KnownCase:
    """w⁴, w1²w2⁴ and the like, by quadrature."""

    def truth(nbeta: float, localization: float) -> Estimate:
        return Estimate(crossing_expectation(exponents, nbeta, localization))

    name = "crossing-" + "-".join(str(2 * k) for k in exponents)
    make = partial(crossing_problem, exponents, POPULATION)
    return KnownCase(name, make, truth, float(normal_crossing(exponents)))


def _linear_network(widths: tuple[int, ...], rank: int, samples: int) -> KnownCase:
    family = "reduced-rank" if len(widths) == 3 else "deep-linear"
    name = f"{family}-{'-'.join(map(str, widths))}-r{rank}"

    def compute(nbeta: float, localization: float, effort: float) -> Estimate:
        return deep_linear_reference(widths, rank, nbeta, localization, sweeps=int(200 * effort))

    make = partial(deep_linear_problem, widths, rank, samples)
    return KnownCase(name, make, Reference(name, compute), float(deep_linear(widths, rank)))


def _logistic(samples: int, size: int, dtype: torch.dtype, draws: int) -> KnownCase:
    """Labels drawn from the model, at its maximum likelihood; truth by importance sampling."""
    name = f"logistic-n{samples}-d{size}"

    @cache
    def data() -> tuple[Tensor, Tensor, Tensor]:
        rng = generator(0, name)
        x = torch.randn(samples, size, generator=rng, dtype=torch.float64)
        w = torch.randn(size, generator=rng, dtype=torch.float64) / math.sqrt(size)
        y = (torch.rand(samples, generator=rng, dtype=torch.float64) < (x @ w).sigmoid()).double()
        return x, y, logistic_minimum(x, y)

    @cache
    def truth(nbeta: float, localization: float) -> Estimate:
        return logistic_expectation(*data(), nbeta, localization, draws)

    def make() -> Problem:
        x, y, w = (tensor.to(dtype) for tensor in data())
        return Problem(_linear_model(w), "bce_with_logits", (x, y.unsqueeze(1)))

    return KnownCase(name, make, truth, size / 2)


def _linear(samples: int, size: int) -> KnownCase:
    """Least squares with inputs of unequal variance: L − L* is a quadratic form."""
    name = f"regression-n{samples}-d{size}"

    @cache
    def data() -> tuple[Tensor, Tensor, Tensor]:
        rng = generator(0, name)
        scales = torch.from_numpy(np.geomspace(1.0, 0.1, size))
        x = torch.randn(samples, size, generator=rng, dtype=torch.float64) * scales
        w = torch.randn(size, generator=rng, dtype=torch.float64)
        y = x @ w + math.sqrt(0.5) * torch.randn(samples, generator=rng, dtype=torch.float64)
        return x, y, torch.linalg.lstsq(x, y.unsqueeze(1)).solution.squeeze(1)

    def truth(nbeta: float, localization: float) -> Estimate:
        x = data()[0]
        values = torch.linalg.eigvalsh(2 * x.T @ x / samples).tolist()
        return Estimate(quadratic(values, nbeta, localization))

    def make() -> Problem:
        x, y, w = (tensor.float() for tensor in data())
        return Problem(_linear_model(w), "mse", (x, y.unsqueeze(1)))

    return KnownCase(name, make, truth, size / 2)


def _linear_model(w: Tensor) -> nn.Module:
    with torch.device("meta"):  # its own initialisation would draw from the global generator
        model = nn.Linear(len(w), 1, bias=False)
    model.load_state_dict({"weight": w.clone().unsqueeze(0)}, assign=True)
    return model


def perceptron_data() -> tuple[Tensor, Tensor]:
    """Normal inputs and labels drawn from a random ReLU network of the same shape."""
    samples, (inputs, hidden, outputs) = 500, MLP_SIZES
    rng = generator(0, MLP)
    x = torch.randn(samples, inputs, generator=rng, dtype=torch.float64)
    first = torch.randn(inputs, hidden, generator=rng, dtype=torch.float64)
    second = torch.randn(hidden, outputs, generator=rng, dtype=torch.float64)
    shares = (torch.relu(x @ first) @ second).softmax(dim=1).cumsum(dim=1)
    uniform = torch.rand(samples, 1, generator=rng, dtype=torch.float64)
    return x, (uniform > shares).sum(dim=1).clamp_max(outputs - 1)


def perceptron_model() -> nn.Module:
    """The network, its parameters without values."""
    inputs, hidden, outputs = MLP_SIZES
    with torch.device("meta"):
        layers = nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs)
        return nn.Sequential(*layers).double()


def perceptron_problem() -> Problem:
    """The ReLU network at its stored minimum."""
    model, rows = perceptron_model(), stored_references()["parameters"][MLP]
    values = {name: torch.tensor(value, dtype=torch.float64) for name, value in rows.items()}
    model.load_state_dict(values, assign=True)
    return Problem(model, "cross_entropy", perceptron_data())


def _perceptron_truth(nbeta: float, localization: float, effort: float) -> Estimate:
    return mala_reference(perceptron_problem(), nbeta, localization, int(MALA_STEPS * effort))


def mala_reference(
    problem: Problem, nbeta: float, localization: float, steps: int, chains: int = MALA_CHAINS
) -> Estimate:
    """nβ·E[L − L*] by long chains of MALA from w*: no bias but that of what has not mixed; the
    first third is left out.

    The proposal is scaled by (nβ|H| + γ)^−½ with the Hessian H at w*, and its step is halved until
    60 % are accepted. The error is the spread of the chains' own means. ``cost`` counts gradients
    of all chains.
    """
    values, vectors = torch.linalg.eigh(hessian(problem).dense().double())
    scale = (vectors * (nbeta * values.abs() + localization).rsqrt()) @ vectors.T
    step, accepted = 2.0, 0.0
    while not (accepted >= MALA_ACCEPTANCE or step < 1e-6):
        step /= 2
        kernel = mala(step, nbeta, localization, scale.to(problem.dtype))
        burn_in = int(20 / step)
        short = sample(problem, kernel, chains, 200, burn_in=burn_in, mode="batched")
        accepted = short.diagnostics.acceptance
    third = steps // 3
    draws = steps * 2 // 30
    run = sample(problem, kernel, chains, draws, burn_in=third, thin=10, mode="batched")
    means = run.energies.mean(axis=1)
    status = Status.CONVERGED if run.diagnostics.rhat < RHAT else Status.NOT_MIXED
    stderr = float(means.std(ddof=1)) / math.sqrt(chains)
    return Estimate(float(means.mean()), stderr, run.cost, status, chains - 1)
