"""What a measurement would cost, from one measured product and, for chains, one measured
gradient.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lambdahat._measure import CURVATURES, MeasureSettings
from lambdahat.estimators import (
    DEFAULT_DEPTH,
    basis_capacity,
    default_budget,
    is_small,
    samples_at_once,
)
from lambdahat.estimators._variance import COPIES, PROBES
from lambdahat.estimators.sequential import LARGEST_DEFAULT, MINIMUM
from lambdahat.krylov import random_vector
from lambdahat.operators.base import LinearOperator
from lambdahat.operators.curvature import Curvature, GaussNewton, Hessian
from lambdahat.operators.exact.closed_form import MAX_ROUNDS, MIN_ROUNDS
from lambdahat.problem import Problem
from lambdahat.sampling.backends.minibatches import DEFAULT_BATCH
from lambdahat.sampling.kernels.hmc import HMC
from lambdahat.sampling.tuning import LEAST_EFFORT
from lambdahat.sampling.tuning.hamiltonian import (
    CHECKS,
    GATE,
    LONGEST,
    RESCUE,
    TRAJECTORIES,
    WARM_UP,
    Effort,
)
from lambdahat.sampling.tuning.unadjusted import EXTRA, Lengths
from lambdahat.singular._llc import default_kernel, whole_is_cheap
from lambdahat.singular.bayes import FACTORS
from lambdahat.singular.curves import COLDER, STEP_LADDER
from lambdahat.singular.curves import LADDER as CURVE
from lambdahat.singular.evidence import DEFAULT_PROBES
from lambdahat.singular.volumes import TRIALS, TRIALS_PER_PARAMETER

HEADER = ("quantity", "products", "time", "memory for vectors")
# of P numbers that a chain holds: position, gradient, noise and what the kernel remembers
CHAIN_VECTORS = 6
CHAINS = ("llc", "llc_curve", "bayes_criteria", "temperature_regression", "free_energy", "sweep")
# the logarithm of a rise in loss over the prior beyond which a free energy takes more temperatures
STEEPEST = 5.0
SWEEP = {"chains": 2, "draws": 500}  # of each point, where they are not given
VOLUME = 60 * 3 * 2048  # levels, kinds of moves and points of a volume scaling
ROUND = 8  # trajectories that are drawn at once at the least


@dataclass(frozen=True)
class Forecast:
    """Products, seconds and bytes that one quantity takes, between ``fewest`` and ``most``
    products.

    Of chains it is gradients, over all of them, and ``unit`` says so.
    """

    quantity: str
    fewest: int
    most: int
    seconds_fewest: float
    seconds_most: float
    vectors_bytes: int
    unit: str = "products"

    def row(self) -> tuple[str, str, str, str]:
        """In words."""
        if self.most == 0:
            return self.quantity, "0, closed form", "a few gradients", size(self.vectors_bytes)
        products = (
            f"{self.fewest:,}" if self.fewest == self.most else f"{self.fewest:,} to {self.most:,}"
        )
        products += "" if self.unit == "products" else f" {self.unit}"
        low, high = duration(self.seconds_fewest), duration(self.seconds_most)
        return (
            self.quantity,
            products,
            low if low == high else f"{low} to {high}",
            size(self.vectors_bytes),
        )


Plan = Callable[[LinearOperator, MeasureSettings], tuple[int, int, int]]
"""(operator, settings) -> the fewest and the most products, and how many vectors are held at
once.
"""


def _sampled(operator: LinearOperator, settings: MeasureSettings) -> tuple[int, int, int]:
    """A pilot at least, and then until the tolerance or the default limit."""
    return (
        min(MINIMUM, operator.dim),
        min(2 * operator.dim, LARGEST_DEFAULT),
        min(operator.dim, 256),
    )


def _closed_form(operator: LinearOperator, settings: MeasureSettings) -> tuple[int, int, int]:
    """None where the structure gives the answer, as that of a perceptron's Hessian does."""
    if isinstance(operator, Hessian | GaussNewton) and operator.closed_diagonal:
        return 0, 0, 2
    return 0, *_sampled(operator, settings)[1:]


def _trace(operator: LinearOperator, settings: MeasureSettings) -> tuple[int, int, int]:
    """Rounds of random signals, each about a product, where the closed form takes too many; else
    the closed form.
    """
    if isinstance(operator, Hessian | GaussNewton) and operator.trace_by == "rounds":
        return MIN_ROUNDS, MAX_ROUNDS, 2
    return _closed_form(operator, settings)


def _pairs(count: int | None = None) -> Plan:
    def plan(operator: LinearOperator, settings: MeasureSettings) -> tuple[int, int, int]:
        pairs = min(count or settings.top, operator.dim)
        if is_small(operator, pairs):
            return operator.dim, operator.dim, operator.dim
        return pairs, default_budget(pairs), basis_capacity(operator, pairs) + 1

    return plan


def _lanczos(operator: LinearOperator, settings: MeasureSettings) -> tuple[int, int, int]:
    depth = min(settings.depth, operator.dim)
    return depth * settings.probes, depth * settings.probes, depth + 1


def _variance(operator: LinearOperator, settings: MeasureSettings) -> tuple[int, int, int]:
    """Passes over the data: two of gradients, and each probe's Hessian and Gauss–Newton
    products.
    """
    assert isinstance(operator, Curvature)
    rounds = min(PROBES, operator.dim)
    passes = 2 + rounds * (1 if operator.problem.loss_function is None else 2)
    return passes, passes, COPIES * samples_at_once(operator.problem)


def _sharpness(operator: LinearOperator, settings: MeasureSettings) -> tuple[int, int, int]:
    """One eigenpair, and the gradients of the ascent."""
    fewest, most, vectors = _pairs(1)(operator, settings)
    return fewest, most + 50, vectors


def _by_weight(operator: LinearOperator, settings: MeasureSettings) -> tuple[int, int, int]:
    """Two traces of each weight."""
    weights = (
        1 if operator.space is None else sum(len(shape) > 1 for shape in operator.space.shapes)
    )
    _, most, vectors = _sampled(operator, settings)
    return 0, 2 * weights * most, vectors


def _eigenvalues(operator: LinearOperator, settings: MeasureSettings) -> tuple[int, int, int]:
    """All of them where P is small, else a quadrature, and a Krylov space of the gradient."""
    if operator.dim <= DEFAULT_PROBES * DEFAULT_DEPTH:
        return operator.dim, operator.dim, operator.dim
    return DEFAULT_PROBES * DEFAULT_DEPTH, (DEFAULT_PROBES + 1) * DEFAULT_DEPTH, DEFAULT_DEPTH + 1


PLANS: dict[str, Plan] = {
    "trace": _trace,
    "frobenius": _sampled,
    "diagonal": _closed_form,
    "spectral_norm": _pairs(1),
    "eigenpairs": _pairs(),
    "gradient_overlap": _pairs(),
    "spectrum": _lanczos,
    "variance": _variance,
    "sharpness": _sharpness,
    "relative_sharpness": _by_weight,
    "fisher_rao": lambda *_: (1, 1, 2),
    "effective_dimensions": _eigenvalues,
    "laplace_evidence": _eigenvalues,
    "bic": lambda *_: (0, 0, 1),
}


@dataclass(frozen=True)
class OneProduct:
    """What setting up an operator and making one product took; ``graph_bytes`` stay in use
    between products.
    """

    setup_seconds: float
    seconds: float
    graph_bytes: int

    def __str__(self) -> str:
        return (
            f"one product took {duration(self.seconds)}, setting up {duration(self.setup_seconds)};"
            f" graphs kept between products: {size(self.graph_bytes)}"
        )


def one_product(operator: LinearOperator, seed: int = 0) -> OneProduct:
    """Set the operator up, make one product, and take the time of each."""
    vector = random_vector(operator, seed, "forecast").to(operator.dtype)
    start = time.perf_counter()
    graphs = operator.kept_batches * operator.graph_bytes if isinstance(operator, Curvature) else 0
    ready = time.perf_counter()
    operator @ vector
    if operator.device.type == "cuda":
        torch.cuda.synchronize(operator.device)
    return OneProduct(ready - start, time.perf_counter() - ready, graphs)


def forecast(
    problem: Problem, what: Sequence[str], settings: MeasureSettings
) -> tuple[OneProduct, list[Forecast]]:
    """One product of the operator, and what each quantity would take at that price."""
    operator = CURVATURES[settings.curvature](problem)
    first = one_product(operator, settings.seed)
    item = torch.empty(0, dtype=operator.dtype).element_size()
    rows = []
    for name in what:
        if name in CHAINS:
            rows.append(chains_forecast(problem, name, settings))
            continue
        if name == "volume_scaling":
            rows.append(_volumes(problem))
            continue
        fewest, most, vectors = PLANS[name](operator, settings)
        times = first.seconds * fewest, first.seconds * most
        rows.append(Forecast(name, fewest, most, *times, vectors * operator.dim * item))
    return first, rows


def chains_forecast(problem: Problem, name: str, settings: MeasureSettings) -> Forecast:
    """The gradients of ``llc`` and its kin, each on a batch, or on all data where that is cheap
    or asked for.
    """
    given = {**settings.sampling, "kernel": "sgld"} if name == "sweep" else settings.sampling
    chains, grid = int(given.get("chains", 4)), _grid(given) if name == "sweep" else 0
    kernel = given.get("kernel") or default_kernel(
        problem, given.get("step_size"), given.get("batch_size")
    )
    runs, most_runs = _runs(name, problem)
    adjusted = kernel in ("hmc", "mala")
    fewest, most = _trajectories(given, problem.num_parameters) if adjusted else _steps(given)
    free = (
        kernel == "kinetic" and given.get("step_size") is None and given.get("batch_size") is None
    )
    whole = adjusted or (free and whole_is_cheap(problem))
    batch = (
        problem.num_samples
        if whole
        else min(int(given.get("batch_size", DEFAULT_BATCH)), problem.num_samples)
    )
    fewest, most = runs * chains * fewest + grid, most_runs * chains * most + grid
    seconds = _one_gradient(problem, batch, settings.seed)
    held = CHAIN_VECTORS * chains * problem.num_parameters * problem.vector.element_size()
    return Forecast(name, fewest, most, seconds * fewest, seconds * most, held, "gradients")


def _runs(name: str, problem: Problem) -> tuple[int, int]:
    """How often chains are run, at the least and at the most."""
    if name == "llc_curve":
        return len(CURVE), len(CURVE)
    if name == "temperature_regression":
        return len(FACTORS), len(FACTORS)
    if name == "free_energy":  # one for each unit of ln β, from where the prior itself is enough
        return 3, 2 * math.ceil((math.log(problem.num_samples) + STEEPEST) / 2) + 1
    return 1, 1


def _grid(given: Mapping[str, Any]) -> int:
    """Gradients of the points of a sweep."""
    chains, draws = (int(given.get(name, SWEEP[name])) for name in ("chains", "draws"))
    return len(STEP_LADDER) * len(COLDER) * chains * (draws + int(given.get("burn_in", draws)))


def _volumes(problem: Problem) -> Forecast:
    """Losses over the whole data of a volume scaling, if rounding cuts off no level and no point
    leaves the ball.
    """
    most = VOLUME * (TRIALS + TRIALS_PER_PARAMETER * problem.num_parameters)
    start = time.perf_counter()
    problem.loss()
    seconds = time.perf_counter() - start
    held = 2 * 2048 * problem.num_parameters * 8
    return Forecast(
        "volume_scaling", most // 4, most, seconds * most / 4, seconds * most, held, "losses"
    )


def _trajectories(given: Mapping[str, Any], parameters: int) -> tuple[int, int]:
    """Gradients of a chain of HMC: warm-ups, one or two, and then trajectories until the error
    is small enough.
    """
    limit = given["max_gradients"] // given.get("chains", 4) if "max_gradients" in given else None
    effort = Effort() if limit is None else Effort.within(limit, parameters)
    rescue, gate = effort.gradients(RESCUE[0]), effort.gradients(GATE[0])
    once = effort.gradients(WARM_UP[-1]) + rescue
    warm = (0, 0) if "step_size" in given else (once, 2 * (once + rescue) + gate + effort.longest)
    longest = HMC.leapfrog if "step_size" in given else effort.longest
    burn_in = given.get("burn_in", TRAJECTORIES if "step_size" in given else 0)
    if "draws" in given:
        fewest, most = (
            warm[0] + given["draws"] + burn_in,
            warm[1] + (longest + 1) * (given["draws"] + burn_in),
        )
    else:
        fewest, most = warm[0] + CHECKS[0], max(CHECKS[-1] + warm[0], warm[1]) + ROUND * LONGEST
    return (fewest, most) if limit is None else (min(fewest, limit - longest - 1), min(most, limit))


def _steps(given: Mapping[str, Any]) -> tuple[int, int]:
    """Steps of a chain that never rejects: a pilot or trials of the step that is given, the
    burn-in and the draws.
    """
    limit = given["max_gradients"] // given.get("chains", 4) if "max_gradients" in given else None
    tuned, burn_in, draws = "step_size" not in given, given.get("burn_in"), given.get("draws")
    lengths = Lengths.of(limit, burn_in, draws, tuned)
    least = (
        lengths.fitted(0.0, burn_in, draws, LEAST_EFFORT if "tol" in given else 1.0)
        if tuned
        else lengths
    )
    fewest = least.pilot + least.burn_in + least.coarse + least.round
    return fewest, lengths.most + EXTRA if limit is None else limit


def _one_gradient(problem: Problem, samples: int, seed: int) -> float:
    """Seconds of a gradient on so many samples, the second of two."""
    part = (
        problem.subsample(samples, seed)
        if samples < problem.num_samples and problem.norm != "train"
        else problem
    )
    for _ in range(2):
        start = time.perf_counter()
        float(part.gradient().norm())  # a number, so that a GPU has finished
    return time.perf_counter() - start


def as_document(first: OneProduct, rows: Sequence[Forecast]) -> dict[str, Any]:
    """For --json."""
    return {**asdict(first), "forecast": [asdict(row) for row in rows]}


def duration(seconds: float) -> str:
    """Seconds in words: "12 ms", "3.4 s", "5 min", "2.1 h"."""
    for limit, unit, factor in ((1.0, "ms", 1e3), (120.0, "s", 1.0), (7200.0, "min", 1 / 60)):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds / 3600:.3g} h"


def size(count: float) -> str:
    """Bytes in words: "3.2 MB"."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
