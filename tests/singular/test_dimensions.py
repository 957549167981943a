"""Effective dimensions against every eigenvalue, and their error bars over many seeds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lambdahat.estimators._spectrum import spectrum
from lambdahat.operators import LinearOperator, operator
from lambdahat.operators.curvature import ggn, hessian
from lambdahat.problem import Problem
from lambdahat.results import Result, Status
from lambdahat.singular.evidence import (
    SHARES,
    effective_dimension,
    effective_dimensions,
    eigenvalues,
    tail,
)
from tests.cases import Products, classifier, quadratic, with_eigenvalues
from tests.oracles import dense_hessian

D = torch.float64
INDEFINITE = torch.tensor([-2.0, -1e-3, 0.0, 1e-3, 0.5, 3.0, 40.0], dtype=D)
READINGS = ("rank", "n_eff", "logdet", "negative")


class Diagonal(LinearOperator):
    """A diagonal matrix known by its products. Probes are uniform on the sphere, so that no
    basis is special.
    """

    def __init__(self, values: Tensor) -> None:
        super().__init__(len(values), values.dtype, values.device)
        self.values = values

    def _apply(self, block: Tensor) -> Tensor:
        return self.values[:, None] * block


def truth(values: Tensor, z: float, threshold: float) -> dict[str, float]:
    """The four readings from every eigenvalue, by their definitions."""
    readings = dict.fromkeys(READINGS, 0.0)
    for value in values.tolist():
        readings["rank"] += abs(value) > threshold
        readings["negative"] += value < -threshold
        readings["n_eff"] += value / (value + z) if value > 0 else 0.0
        readings["logdet"] += math.log1p(value / z) if value > 0 else 0.0
    return readings


def many(size: int = 400) -> dict[str, Tensor]:
    """Spectra of order ``size``: like a trained network's Hessian, of low rank, over many
    decades, and flat.
    """
    rng = torch.Generator().manual_seed(0)
    normal = torch.randn(size, generator=rng, dtype=D)
    trained = 1e-4 * normal * normal.exp()
    trained[: size // 10] = torch.logspace(-3, 1, size // 10, dtype=D)
    low = torch.zeros(size, dtype=D)
    low[: size // 20] = torch.logspace(-2, 1, size // 20, dtype=D)
    return {
        "trained": trained,
        "low rank": low,
        "decades": torch.logspace(-8, 1, size, dtype=D),
        "flat": torch.rand(size, generator=rng, dtype=D),
    }


@pytest.mark.parametrize("z", [1e-4, 0.5, 30.0])
def test_all_four_are_exact_for_small_operators(z):
    A = Products(with_eigenvalues(INDEFINITE))
    found = effective_dimensions(A, z=z, threshold=0.01)
    for name, value in truth(INDEFINITE, z, 0.01).items():
        assert getattr(found, name).value == pytest.approx(value, rel=1e-10), name
        assert getattr(found, name).stderr == 0.0
    assert (found.parameters.value, found.z, found.threshold) == (7.0, z, 0.01)
    assert (found.status, found.cost) == (Status.CONVERGED, 7)
    assert effective_dimension(A, z).value == found.n_eff.value


def test_a_regular_model_has_all_its_parameters():
    A = operator(with_eigenvalues([1.0] * 10))
    assert effective_dimension(A, 1.0).value == pytest.approx(5.0, rel=1e-12)
    found = effective_dimensions(A, z=1e-9)
    assert found.rank.value == 10.0
    assert found.n_eff.value == pytest.approx(10.0, rel=1e-8)


def test_the_slope_of_the_log_determinant_is_the_effective_dimension():
    A, step = operator(with_eigenvalues(INDEFINITE)), 1e-4
    ends = [effective_dimensions(A, z=0.3 * math.exp(sign * step)).logdet.value for sign in (-1, 1)]
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(
        effective_dimension(A, 0.3).value, rel=1e-7
    )


def test_dead_parameters_change_only_their_number():
    alive = effective_dimensions(operator(with_eigenvalues(INDEFINITE)), z=0.1)
    dead = effective_dimensions(
        operator(with_eigenvalues([*INDEFINITE.tolist(), *[0.0] * 20])), z=0.1
    )
    assert dead.parameters.value == alive.parameters.value + 20
    for name in READINGS:
        assert getattr(dead, name).value == pytest.approx(getattr(alive, name).value, rel=1e-10), (
            name
        )


def test_a_problem_has_its_hessian_and_a_prior_of_unit_variance():
    problem = classifier()
    found = effective_dimensions(problem)
    assert found.z == 1 / problem.num_samples
    values = torch.linalg.eigvalsh(dense_hessian(problem))
    for name, value in truth(values, found.z, found.threshold).items():
        assert getattr(found, name).value == pytest.approx(value, rel=1e-9), name
    assert 0 < found.threshold < 1e-12 * float(values.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_threshold_tells_rounding_from_curvature(dtype):
    """Two of six inputs are copies: a linear model of rank 4 + 1, its small curvature 10⁴ below
    the largest.
    """
    rng = torch.Generator().manual_seed(3)
    free = torch.randn(500, 4, generator=rng) * torch.tensor([1.0, 0.3, 0.1, 0.03])
    x = torch.cat([free, free[:, :2]], dim=1).to(dtype)
    model = nn.Linear(6, 1).to(dtype)
    found = effective_dimensions(Problem(model, "mse", (x, x[:, :1])))
    assert (found.parameters.value, found.rank.value, found.negative.value) == (7.0, 5.0, 0.0)


def test_z_below_rounding_is_said():
    values = torch.linspace(0, 10, 50)
    single, double = operator(torch.diag(values)), operator(torch.diag(values.double()))
    assert effective_dimension(single, 1e-6).status is Status.PRECISION_LIMIT
    assert effective_dimensions(single, z=1e-6).status is Status.PRECISION_LIMIT
    assert effective_dimension(double, 1e-6).status is Status.CONVERGED


def test_the_quadrature_costs_what_was_asked():
    A = Diagonal(many()["flat"])
    found = effective_dimensions(A, z=0.1, probes=3, depth=20)
    assert found.cost == A.matvecs == 60
    assert effective_dimensions(A, z=0.1, probes=4, depth=100).n_eff.stderr == 0.0
    seen = spectrum(A, 20, 3, seed=0)
    given = effective_dimensions(seen, z=0.1)
    assert given == found
    assert effective_dimension(seen, 0.1) == found.n_eff
    assert (
        effective_dimensions(A, z=0.1, probes=3, depth=20, seed=1).n_eff.value != found.n_eff.value
    )


@pytest.mark.parametrize("name", many())
def test_error_bars_are_true_where_the_quadrature_settles(name):
    values = many()[name]
    runs = [
        effective_dimensions(Diagonal(values), z=0.3, probes=2, depth=30, seed=seed)
        for seed in range(40)
    ]
    exact = truth(values, 0.3, 0.0)
    for reading in ("n_eff", "logdet"):
        found = [getattr(run, reading) for run in runs]
        assert all(f.status is Status.CONVERGED for f in found)
        scores = np.array([(f.value - exact[reading]) / f.stderr for f in found])
        covered = np.mean([f.interval()[0] <= exact[reading] <= f.interval()[1] for f in found])
        assert 0.75 < math.sqrt((scores**2).mean()) < 1.3, reading
        assert covered >= 0.88, reading


@pytest.mark.parametrize("name", many())
@pytest.mark.parametrize("z", [1e-6, 1e-3])
def test_what_the_depth_cannot_resolve_is_in_the_error(name, z):
    """z far below the nodes next to 0: the probes alone would claim errors up to hundreds of
    times too small.
    """
    values = many()[name]
    exact = truth(values, z, 0.0)
    for seed in range(5):
        found = effective_dimensions(Diagonal(values), z=z, probes=2, depth=40, seed=seed)
        for reading in ("n_eff", "logdet"):
            estimate = getattr(found, reading)
            assert abs(estimate.value - exact[reading]) <= 3.5 * estimate.stderr, reading
    if name == "decades":
        assert found.n_eff.status is found.status is Status.QUADRATURE


@pytest.mark.parametrize("name", many())
@pytest.mark.parametrize("threshold", [None, 1e-3, 0.3])
def test_counts_hold_the_truth_at_their_threshold(name, threshold):
    values = many()[name]
    for seed in range(5):
        found = effective_dimensions(
            Diagonal(values), z=0.1, threshold=threshold, probes=3, depth=40, seed=seed
        )
        exact = truth(values, 0.1, found.threshold)
        for reading in ("rank", "negative"):
            estimate = getattr(found, reading)
            assert abs(estimate.value - exact[reading]) <= 3.5 * estimate.stderr, reading
            assert 0 <= estimate.value <= len(values)
    assert threshold is None or found.threshold == threshold


def test_a_resolved_cluster_at_zero_is_counted_well():
    values = many()["low rank"]
    found = effective_dimensions(Diagonal(values), z=0.1, probes=3, depth=60)
    assert found.threshold < 1e-6
    assert found.rank.status is Status.CONVERGED
    assert found.rank.value == pytest.approx(20, abs=3 * found.rank.stderr)
    assert found.rank.stderr < 5
    whole = effective_dimensions(Diagonal(many()["flat"] + 0.1), z=0.1, probes=3, depth=60)
    assert (whole.rank.value, whole.rank.stderr, whole.negative.value) == (400.0, 0.0, 0.0)


def test_rules_of_less_depth_are_those_of_a_shorter_run():
    A = Diagonal(many()["trained"])
    shorter = eigenvalues(spectrum(A, 40, 2), None, 1, 0)._shorter
    for steps, rule in zip((20, 25, 30, 35), shorter, strict=True):
        run = spectrum(A, steps, 2)
        assert np.allclose(rule.nodes, run.nodes, atol=1e-10)
        assert np.allclose(rule.weights, run.weights, atol=1e-10)


def test_the_tail_of_a_geometric_error():
    """Errors r^(8·share): what is left at the whole depth is found from the distances to it."""
    for ratio, sign in ((0.5, 1.0), (0.8, 1.0), (0.6, -1.0)):
        error = [sign * ratio ** (8 * share) for share in (*SHARES, 1)]
        assert tail([e - error[-1] for e in error[:-1]]) == pytest.approx(abs(error[-1]), rel=1e-9)
    assert tail([1.0, 1.0, 0.9, 0.8]) == 1.0  # slower than any factor
    assert tail([-1.0, 2.0, 0.5, -0.5]) == 1.0  # to and fro
    assert tail([0.0, 0.0, 0.0, 4.0]) == 1.0
    assert tail([0.0] * 4) == 0.0


def test_an_exact_quadrature_has_no_error():
    found = effective_dimensions(
        Diagonal(torch.full((500,), 2.0, dtype=D)), z=2.0, probes=1, depth=5
    )
    assert found.n_eff.value == pytest.approx(250.0, rel=1e-12)
    assert found.n_eff.stderr <= 1e-9
    assert found.status is Status.CONVERGED


def test_gauss_newton_gives_fewer_than_the_data_allow():
    """The GGN of one batch of n samples and C classes has rank at most n·(C − 1)."""
    problem = classifier((4, 10, 3), samples=6)
    found = effective_dimensions(ggn(problem), z=1 / 6)
    assert found.rank.value <= 12 < found.parameters.value
    assert found.n_eff.value < found.rank.value
    assert found.negative.value == 0.0


def test_dimensions_survive_the_disk(tmp_path):
    found = effective_dimensions(quadratic(with_eigenvalues(INDEFINITE)), z=0.1)
    assert Result.load(found.save(tmp_path / "dimensions")) == found


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda A: effective_dimension(A, 0.0),
            ValueError,
            "z must be a finite number above 0, got 0.0",
        ),
        (lambda A: effective_dimension(A, -1.0), ValueError, "z must be"),
        (lambda A: effective_dimension(A, math.nan), ValueError, "z must be"),
        (lambda A: effective_dimension(A, "small"), TypeError, "z must be a number above 0"),
        (
            lambda A: effective_dimension("eye", 1.0),
            TypeError,
            r"source must be a Problem, an operator.*lh\.Problem",
        ),
        (lambda A: effective_dimensions(None), TypeError, "source must be a Problem"),
        (lambda A: effective_dimensions(A), ValueError, "z must be given for a Matrix.*1/n"),
        (lambda A: effective_dimensions(spectrum(A)), ValueError, "z must be given for a Spectrum"),
        (lambda A: effective_dimensions(A, z=1.0, threshold=0), ValueError, "threshold must be"),
        (lambda A: effective_dimensions(A, z=1.0, probes=0), ValueError, "probes must be"),
        (lambda A: effective_dimensions(A, z=1.0, depth=2.5), TypeError, "depth must be"),
        (
            lambda A: effective_dimensions(operator(np.triu(np.ones((4, 4)))), z=1.0),
            ValueError,
            "be symmetric",
        ),
    ],
)
def test_misuse(call, error, text):
    with pytest.raises(error, match=text):
        call(operator(with_eigenvalues(INDEFINITE)))


def test_the_hessian_is_the_default_of_a_problem():
    problem = classifier(activation="tanh")
    assert (
        effective_dimensions(problem).n_eff.value
        == effective_dimension(hessian(problem), 1 / 20).value
    )
