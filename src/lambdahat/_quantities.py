"""The quantities that ``measure`` knows: how each is measured, and a forecast of its cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lambdahat._core.check import describe, require, require_choice, require_count
from lambdahat.estimators import (
    DEFAULT_DEPTH,
    basis_capacity,
    default_budget,
    diagonal,
    eigenpairs,
    fisher_rao_norm,
    frobenius_norm,
    gradient_overlap,
    is_small,
    relative_sharpness,
    samples_at_once,
    sharpness,
    spectral_norm,
    spectrum,
    trace,
    variance,
)
from lambdahat.estimators._variance import COPIES, PROBES
from lambdahat.estimators.sequential import LARGEST_DEFAULT, MINIMUM
from lambdahat.operators.base import LinearOperator
from lambdahat.operators.curvature import (
    GaussNewton,
    Hessian,
    fisher,
    ggn,
    gradient_covariance,
    hessian,
)
from lambdahat.operators.exact import MAX_ROUNDS, MIN_ROUNDS
from lambdahat.problem import Problem
from lambdahat.sampling._sample import LEAST_EFFORT
from lambdahat.sampling.backends.minibatches import DEFAULT_BATCH
from lambdahat.sampling.kernels.hmc import HMC
from lambdahat.sampling.tuning.hamiltonian import (
    CHECKS,
    GATE,
    LONGEST,
    RESCUE,
    TRAJECTORIES,
    WARM_UP,
    WarmUpEffort,
)
from lambdahat.sampling.tuning.unadjusted import EXTRA, Lengths
from lambdahat.singular._llc import default_kernel, llc, whole_is_cheap
from lambdahat.singular.bayes import FACTORS, bayes_criteria, free_energy, temperature_regression
from lambdahat.singular.curves import COLDER, STEP_LADDER, Sweep, llc_curve, sweep
from lambdahat.singular.curves import LADDER as CURVE
from lambdahat.singular.evidence import DEFAULT_PROBES, bic, effective_dimensions, laplace_evidence
from lambdahat.singular.volumes import TRIALS, TRIALS_PER_PARAMETER, volume_scaling

CURVATURES: dict[str, Callable[[Problem], LinearOperator]] = {
    "hessian": hessian,
    "ggn": ggn,
    "fisher": fisher,
    "empirical_fisher": lambda problem: fisher(problem, "empirical"),
    "covariance": gradient_covariance,
}


SAMPLING = (
    "chains",
    "draws",
    "burn_in",
    "batch_size",
    "nbeta",
    "localization",
    "step_size",
    "kernel",
    "tol",
    "max_gradients",
)


@dataclass(frozen=True)
class MeasureSettings:
    """What decides the numbers, beside the problem: ``depth`` and ``probes`` of the spectrum,
    ``top`` eigenpairs.

    ``sampling`` holds settings of ``llc`` by name, as it takes them, in numbers and text so that
    they can be stored; other quantities that need chains take them too.
    """

    curvature: str = "hessian"
    depth: int = 100
    probes: int = 1
    top: int = 10
    seed: int = 0
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_choice(self.curvature, "curvature", CURVATURES)
        for name in ("depth", "probes", "top"):
            require_count(getattr(self, name), name)
        require_count(self.seed, "seed", least=0)
        for name, value in self.sampling.items():
            require_choice(name, "sampling", SAMPLING, "these are settings of llc")
            parts = value.values() if isinstance(value, Mapping) else [value]
            plain = all(isinstance(part, int | float | str) for part in parts)
            expected, got = "be a number, a text, or a dict of names to numbers", describe(value)
            require(plain, f"sampling[{name!r}]", expected, got, "call lh.llc for more", TypeError)

    @property
    def at_own_temperature(self) -> dict[str, Any]:
        """``sampling`` for quantities that are defined at a temperature of their own."""
        return {name: value for name, value in self.sampling.items() if name != "nbeta"}


# of P numbers that a chain holds: position, gradient, noise and what the kernel remembers
CHAIN_VECTORS = 6
# the logarithm of a rise in loss over the prior beyond which a free energy takes more temperatures
STEEPEST = 5.0
SWEEP = {"chains": 2, "draws": 500}  # of each point, where they are not given
VOLUME = 60 * 3 * 2048  # levels, kinds of moves and points of a volume scaling
ROUND = 8  # trajectories that are drawn at once at the least


@dataclass(frozen=True)
class Work:
    """What a quantity costs: ``fewest`` to ``most`` units of work, and memory for its vectors.

    ``unit`` is "products" with the operator, "gradients" on ``samples`` samples each, or "losses"
    over all data.
    """

    fewest: int
    most: int
    vectors_bytes: int
    unit: str = "products"
    samples: int = 0


@dataclass(frozen=True)
class MeasuredQuantity:
    """Something that can be measured: ``compute`` gives the result, ``work`` forecasts its cost.

    Both take the problem, the curvature operator and the settings. A new quantity is one entry of
    ``QUANTITIES``: ``measure``, the command line and ``--dry-run`` then know it.
    """

    compute: Callable[[Problem, LinearOperator, MeasureSettings], Any]
    work: Callable[[Problem, LinearOperator, MeasureSettings], Work]

    def __call__(
        self, problem: Problem, operator: LinearOperator, settings: MeasureSettings
    ) -> Any:
        return self.compute(problem, operator, settings)


def products(operator: LinearOperator, fewest: int, most: int, vectors: int) -> Work:
    """The work of ``fewest`` to ``most`` products, with ``vectors`` vectors in memory at once."""
    return Work(fewest, most, vectors * operator.dim * operator.dtype.itemsize)


def _sampled_work(problem: Problem, operator: LinearOperator, settings: MeasureSettings) -> Work:
    """A pilot at least, and then probes until the tolerance or the default limit is reached."""
    most = min(2 * operator.dim, LARGEST_DEFAULT)
    return products(operator, min(MINIMUM, operator.dim), most, min(operator.dim, 256))


def _diagonal_work(problem: Problem, operator: LinearOperator, settings: MeasureSettings) -> Work:
    """No products where the network's structure gives a closed form."""
    if isinstance(operator, Hessian | GaussNewton) and operator.exact.closed_diagonal:
        return products(operator, 0, 0, 2)
    return replace(_sampled_work(problem, operator, settings), fewest=0)


def _trace_work(problem: Problem, operator: LinearOperator, settings: MeasureSettings) -> Work:
    """The closed form, or rounds of random signals where that takes too many products."""
    if isinstance(operator, Hessian | GaussNewton) and operator.exact.trace_by == "rounds":
        return products(operator, MIN_ROUNDS, MAX_ROUNDS, 2)
    return _diagonal_work(problem, operator, settings)


def _pairs_work(problem: Problem, operator: LinearOperator, settings: MeasureSettings) -> Work:
    pairs = min(settings.top, operator.dim)
    if is_small(operator, pairs):
        return products(operator, operator.dim, operator.dim, operator.dim)
    return products(operator, pairs, default_budget(pairs), basis_capacity(operator, pairs) + 1)


def _norm_work(problem: Problem, operator: LinearOperator, settings: MeasureSettings) -> Work:
    return _pairs_work(problem, operator, replace(settings, top=1))


def _spectrum_work(problem: Problem, operator: LinearOperator, settings: MeasureSettings) -> Work:
    depth = min(settings.depth, operator.dim)
    return products(operator, depth * settings.probes, depth * settings.probes, depth + 1)


def _variance_work(problem: Problem, operator: LinearOperator, settings: MeasureSettings) -> Work:
    """Passes over the data: two of gradients; Hessian and Gauss–Newton products of each probe."""
    rounds = min(PROBES, operator.dim)
    passes = 2 + rounds * (1 if problem.loss_function is None else 2)
    return products(operator, passes, passes, COPIES * samples_at_once(problem))


def _sharpness_work(problem: Problem, operator: LinearOperator, settings: MeasureSettings) -> Work:
    """One eigenpair, and the gradients of the ascent."""
    pair = _norm_work(problem, operator, settings)
    return replace(pair, most=pair.most + 50)


def _relative_work(problem: Problem, operator: LinearOperator, settings: MeasureSettings) -> Work:
    """Two traces of each weight matrix."""
    shapes = ((1, 1),) if operator.space is None else operator.space.shapes
    each = _sampled_work(problem, operator, settings)
    weights = sum(len(shape) > 1 for shape in shapes)
    return replace(each, fewest=0, most=2 * weights * each.most)


def _eigenvalues_work(
    problem: Problem, operator: LinearOperator, settings: MeasureSettings
) -> Work:
    """All eigenvalues where P is small, else a quadrature and a Krylov space of the gradient."""
    if operator.dim <= DEFAULT_PROBES * DEFAULT_DEPTH:
        return products(operator, operator.dim, operator.dim, operator.dim)
    most = (DEFAULT_PROBES + 1) * DEFAULT_DEPTH
    return products(operator, DEFAULT_PROBES * DEFAULT_DEPTH, most, DEFAULT_DEPTH + 1)


def _volume_work(problem: Problem, operator: LinearOperator, settings: MeasureSettings) -> Work:
    """The losses of a volume scaling that loses no level to rounding and no point to the ball."""
    most = VOLUME * (TRIALS + TRIALS_PER_PARAMETER * problem.num_parameters)
    return Work(most // 4, most, 2 * 2048 * problem.num_parameters * 8, "losses")


def _llc_work(problem: Problem, operator: LinearOperator, settings: MeasureSettings) -> Work:
    return chain_work(problem, settings.sampling)


def _curve_work(problem: Problem, operator: LinearOperator, settings: MeasureSettings) -> Work:
    return chain_work(problem, settings.sampling, (len(CURVE), len(CURVE)))


def _regression_work(problem: Problem, operator: LinearOperator, settings: MeasureSettings) -> Work:
    return chain_work(problem, settings.sampling, (len(FACTORS), len(FACTORS)))


def _free_energy_work(
    problem: Problem, operator: LinearOperator, settings: MeasureSettings
) -> Work:
    """A run for each unit of ln β, from where the prior itself is enough."""
    most = 2 * math.ceil((math.log(problem.num_samples) + STEEPEST) / 2) + 1
    return chain_work(problem, settings.sampling, (3, most))


def _sweep_work(problem: Problem, operator: LinearOperator, settings: MeasureSettings) -> Work:
    """SGLD at one point, and then the points of the grid."""
    given = settings.sampling
    chains, draws = (int(given.get(name, SWEEP[name])) for name in ("chains", "draws"))
    points = len(STEP_LADDER) * len(COLDER)
    grid = points * chains * (draws + int(given.get("burn_in", draws)))
    first = chain_work(problem, {**given, "kernel": "sgld"})
    return replace(first, fewest=first.fewest + grid, most=first.most + grid)


def chain_work(problem: Problem, given: Mapping[str, Any], runs: tuple[int, int] = (1, 1)) -> Work:
    """The gradients of ``runs`` (fewest, most) runs of chains, on batches or on all data."""
    chains = int(given.get("chains", 4))
    step_size, batch_size = given.get("step_size"), given.get("batch_size")
    kernel = given.get("kernel") or default_kernel(problem, step_size, batch_size)
    adjusted = kernel in ("hmc", "mala")
    fewest, most = _trajectories(given, problem.num_parameters) if adjusted else _steps(given)
    free = kernel == "kinetic" and step_size is None and batch_size is None
    samples = problem.num_samples
    if not adjusted and not (free and whole_is_cheap(problem)):
        samples = min(int(given.get("batch_size", DEFAULT_BATCH)), samples)
    held = CHAIN_VECTORS * chains * problem.num_parameters * problem.vector.element_size()
    return Work(runs[0] * chains * fewest, runs[1] * chains * most, held, "gradients", samples)


def _trajectories(given: Mapping[str, Any], parameters: int) -> tuple[int, int]:
    """Gradients of a chain of HMC: warm-ups, one or two, and then trajectories until the error
    is small enough.
    """
    limit = given["max_gradients"] // given.get("chains", 4) if "max_gradients" in given else None
    effort = WarmUpEffort() if limit is None else WarmUpEffort.within(limit, parameters)
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
        lengths.shorten(0.0, burn_in, draws, LEAST_EFFORT if "tol" in given else 1.0)
        if tuned
        else lengths
    )
    fewest = least.pilot + least.burn_in + least.coarse + least.round
    return fewest, lengths.most + EXTRA if limit is None else limit


def _measure_sweep(problem: Problem, _: LinearOperator, settings: MeasureSettings) -> Sweep:
    """The grid around what SGLD finds; chains, draws and burn-in are those of its points, too."""
    given = settings.sampling
    grid = {name: given[name] for name in ("chains", "draws", "burn_in") if name in given}
    coefficient = llc(problem, seed=settings.seed, **{**given, "kernel": "sgld"})
    return sweep(problem, seed=settings.seed, coefficient=coefficient, **grid)


# depth and top are cut to P: a spectrum of depth P, like P eigenpairs, is all there is
QUANTITIES: dict[str, MeasuredQuantity] = {
    "trace": MeasuredQuantity(
        lambda _, operator, settings: trace(operator, seed=settings.seed), _trace_work
    ),
    "frobenius": MeasuredQuantity(
        lambda _, operator, settings: frobenius_norm(operator, seed=settings.seed), _sampled_work
    ),
    "spectral_norm": MeasuredQuantity(
        lambda _, operator, settings: spectral_norm(operator, seed=settings.seed), _norm_work
    ),
    "diagonal": MeasuredQuantity(
        lambda _, operator, settings: diagonal(operator, seed=settings.seed), _diagonal_work
    ),
    "eigenpairs": MeasuredQuantity(
        lambda _, operator, settings: eigenpairs(
            operator, min(settings.top, operator.dim), seed=settings.seed
        ),
        _pairs_work,
    ),
    "spectrum": MeasuredQuantity(
        lambda _, operator, settings: spectrum(
            operator, min(settings.depth, operator.dim), settings.probes, seed=settings.seed
        ),
        _spectrum_work,
    ),
    "variance": MeasuredQuantity(
        lambda problem, _, settings: variance(problem, seed=settings.seed), _variance_work
    ),
    "gradient_overlap": MeasuredQuantity(
        lambda problem, operator, settings: gradient_overlap(
            problem, eigenpairs(operator, min(settings.top, operator.dim), seed=settings.seed)
        ),
        _pairs_work,
    ),
    "sharpness": MeasuredQuantity(
        lambda problem, _, settings: sharpness(problem, seed=settings.seed), _sharpness_work
    ),
    "relative_sharpness": MeasuredQuantity(
        lambda problem, _, settings: relative_sharpness(problem, seed=settings.seed), _relative_work
    ),
    "fisher_rao": MeasuredQuantity(
        lambda problem, *_: fisher_rao_norm(problem),
        lambda _, operator, __: products(operator, 1, 1, 2),
    ),
    "effective_dimensions": MeasuredQuantity(
        lambda problem, _, settings: effective_dimensions(problem, seed=settings.seed),
        _eigenvalues_work,
    ),
    "laplace_evidence": MeasuredQuantity(
        lambda problem, _, settings: laplace_evidence(problem, seed=settings.seed),
        _eigenvalues_work,
    ),
    "bic": MeasuredQuantity(
        lambda problem, *_: bic(problem), lambda _, operator, __: products(operator, 0, 0, 1)
    ),
    "volume_scaling": MeasuredQuantity(
        lambda problem, _, settings: volume_scaling(problem, seed=settings.seed), _volume_work
    ),
    "llc": MeasuredQuantity(
        lambda problem, _, settings: llc(problem, seed=settings.seed, **settings.sampling),
        _llc_work,
    ),
    "bayes_criteria": MeasuredQuantity(
        lambda problem, _, settings: bayes_criteria(
            problem, seed=settings.seed, **settings.at_own_temperature
        ),
        _llc_work,
    ),
    "temperature_regression": MeasuredQuantity(
        lambda problem, _, settings: temperature_regression(
            problem, seed=settings.seed, **settings.at_own_temperature
        ),
        _regression_work,
    ),
    "free_energy": MeasuredQuantity(
        lambda problem, _, settings: free_energy(
            problem, seed=settings.seed, **settings.at_own_temperature
        ),
        _free_energy_work,
    ),
    "llc_curve": MeasuredQuantity(
        lambda problem, _, settings: llc_curve(problem, seed=settings.seed, **settings.sampling),
        _curve_work,
    ),
    "sweep": MeasuredQuantity(_measure_sweep, _sweep_work),
}
