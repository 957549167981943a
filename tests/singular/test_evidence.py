"""Laplace's evidence against closed forms and integrals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import logsumexp
from torch import Tensor

from lambdahat.problem import Problem
from lambdahat.results import Result, Status
from lambdahat.singular.evidence import bic, effective_dimensions, laplace_evidence
from tests.cases import classifier, quadratic, with_eigenvalues
from tests.oracles import dense_hessian

D = torch.float64
SIGMA, GAMMA = 0.7, 2.5


def regression(
    theta: Tensor | None = None, samples: int = 40, size: int = 5
) -> tuple[Problem, Tensor, Tensor]:
    """Linear regression with Gaussian noise: a problem at ``theta`` whose loss is the whole
    negative log-likelihood.
    """
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(samples, size, generator=rng, dtype=D)
    y = x @ torch.linspace(-1, 1, size, dtype=D) + SIGMA * torch.randn(
        samples, generator=rng, dtype=D
    )

    def loss(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        residual = batch[0] @ params["w"] - batch[1]
        return (residual.square() / (2 * SIGMA**2) + 0.5 * math.log(2 * math.pi * SIGMA**2)).mean()

    at = torch.zeros(size, dtype=D) if theta is None else theta
    return Problem.from_function(loss, {"w": at}, (x, y), batch_size=16), x, y


def marginal(x: Tensor, y: Tensor, mean: Tensor) -> float:
    """log p(y) of the regression under w ~ N(mean, I/γ): y is Gaussian with covariance σ²I +
    XXᵀ/γ.
    """
    covariance = SIGMA**2 * torch.eye(len(y), dtype=D) + x @ x.T / GAMMA
    return float(
        stats.multivariate_normal.logpdf(y.numpy(), (x @ mean).numpy(), covariance.numpy())
    )


def logistic(samples: int, size: int = 2, precision: float = 1.0) -> tuple[Problem, Tensor, Tensor]:
    """Logistic regression at the mode of its posterior under N(0, I/γ), found by Newton's
    method.
    """
    rng = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, size, generator=rng, dtype=D)
    y = (torch.rand(samples, generator=rng, dtype=D) < (x.sum(1) * 0.8).sigmoid()).to(D)
    w = torch.zeros(size, dtype=D)
    for _ in range(30):
        p = (x @ w).sigmoid()
        slope = x.T @ (p - y) + precision * w
        w = w - torch.linalg.solve(
            (x.T * (p * (1 - p))) @ x + precision * torch.eye(size, dtype=D), slope
        )
    model = torch.nn.Linear(size, 1, bias=False).to(D)
    model.weight.data = w[None]
    return Problem(model, "bce_with_logits", (x, y[:, None])), x, y


def integral(x: Tensor, y: Tensor) -> float:
    """log ∫ p(y | w) N(w; 0, I) dw over a fine grid in the plane: the trapezoidal rule of a
    Gaussian tail is exact.
    """
    grid = torch.linspace(-6, 6, 301, dtype=D)
    w = torch.stack(torch.meshgrid(grid, grid, indexing="ij"), dim=-1).reshape(-1, 2)
    signs = 2 * y - 1
    terms = sum(
        torch.nn.functional.logsigmoid(s * (w @ row)) for s, row in zip(signs, x, strict=True)
    )
    prior = -0.5 * w.square().sum(1) - math.log(2 * math.pi)
    return float(logsumexp((terms + prior).numpy())) + 2 * math.log(float(grid[1] - grid[0]))


def test_linear_regression_is_exact_at_the_mode():
    _, x, y = regression()
    mode = torch.linalg.solve(
        x.T @ x / SIGMA**2 + GAMMA * torch.eye(5, dtype=D), x.T @ y / SIGMA**2
    )
    found = laplace_evidence(regression(mode)[0], GAMMA, centre="zero")
    assert found.free_energy.value == pytest.approx(
        -marginal(x, y, torch.zeros(5, dtype=D)), rel=1e-11
    )
    assert found.free_energy.stderr == 0.0
    assert found.status is Status.CONVERGED
    assert found.decrement.value == pytest.approx(0.0, abs=1e-20)
    likelihood = stats.norm.logpdf(y.numpy(), (x @ mode).numpy(), SIGMA).sum()
    assert found.log_likelihood.value == pytest.approx(likelihood, rel=1e-12)
    prior = stats.norm.logpdf(mode.numpy(), 0, GAMMA**-0.5).sum()
    assert found.log_prior.value == pytest.approx(prior, rel=1e-12)
    assert found.cost == 5


def test_a_prior_around_the_parameters_is_exact_at_least_squares():
    _, x, y = regression()
    fit = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    found = laplace_evidence(regression(fit)[0], GAMMA)
    assert found.free_energy.value == pytest.approx(-marginal(x, y, fit), rel=1e-11)
    assert found.log_prior.value == pytest.approx(2.5 * math.log(GAMMA / (2 * math.pi)), rel=1e-12)


@pytest.mark.parametrize("centre", ["theta", "zero"])
def test_away_from_the_mode_the_decrement_makes_up_for_the_gradient(centre):
    theta = torch.linspace(0.5, -1.5, 5, dtype=D)
    problem, x, y = regression(theta)
    mean = theta if centre == "theta" else torch.zeros(5, dtype=D)
    found = laplace_evidence(problem, GAMMA, centre)
    assert found.status is found.free_energy.status is Status.NOT_STATIONARY
    assert found.decrement.value > 1
    assert found.free_energy.value - found.decrement.value == pytest.approx(
        -marginal(x, y, mean), rel=1e-11
    )


def test_parts_sum_up():
    found = laplace_evidence(logistic(100, 3)[0], 0.4, "zero")
    occam = found.log_prior.value + 1.5 * math.log(2 * math.pi) - 0.5 * found.logdet.value
    assert found.occam_factor.value == pytest.approx(occam, rel=1e-12)
    assert found.free_energy.value == pytest.approx(-found.log_likelihood.value - occam, rel=1e-12)


def test_logistic_regression_has_the_determinant_of_its_dense_hessian():
    problem, _, _ = logistic(60, 4)
    found = laplace_evidence(problem, 1.0, "zero")
    matrix = 60 * dense_hessian(problem) + torch.eye(4, dtype=D)
    assert found.logdet.value == pytest.approx(float(torch.logdet(matrix)), rel=1e-11)


def test_logistic_regression_nears_the_integral():
    """The error of Laplace's method falls as 1/n."""
    errors = []
    for samples in (20, 80, 320):
        problem, x, y = logistic(samples)
        found = laplace_evidence(problem, 1.0, "zero")
        assert found.status is Status.CONVERGED
        errors.append(abs(found.free_energy.value + integral(x, y)))
    assert errors[0] < 0.1
    assert errors[2] < 0.01
    assert errors[1] < 0.5 * errors[0]
    assert errors[2] < 0.5 * errors[1]


def test_it_is_bic_and_what_bic_leaves_out():
    """F = BIC + ½ log det(H + (γ/n)I) − log prior − (P/2) log 2π."""
    problem, _, _ = logistic(60, 4)
    found = laplace_evidence(problem, 3.0)
    rest = 0.5 * float(torch.logdet(dense_hessian(problem) + 3 / 60 * torch.eye(4, dtype=D)))
    whole = bic(problem).value + rest - found.log_prior.value - 2 * math.log(2 * math.pi)
    assert found.free_energy.value == pytest.approx(whole, rel=1e-12)
    assert bic(problem).value == pytest.approx(60 * problem.loss() + 2 * math.log(60), rel=1e-12)
    assert bic(problem).stderr == 0.0


def test_the_occam_factor_is_half_the_log_determinant_of_the_effective_dimensions():
    problem = logistic(60, 4)[0]
    found = laplace_evidence(problem, 3.0)
    dimensions = effective_dimensions(problem, z=3.0 / 60)
    assert found.occam_factor.value == pytest.approx(-0.5 * dimensions.logdet.value, rel=1e-12)


def test_dead_parameters_leave_the_evidence_alone():
    values = torch.linspace(0.1, 3, 6, dtype=D)
    alive, dead = (
        quadratic(torch.diag(v)) for v in (values, torch.cat([values, torch.zeros(9, dtype=D)]))
    )
    found, more = (laplace_evidence(problem, 0.2) for problem in (alive, dead))
    assert more.free_energy.value == pytest.approx(found.free_energy.value, rel=1e-12)
    assert more.occam_factor.value == pytest.approx(
        -0.5 * float((1 + values / 0.2).log().sum()), rel=1e-12
    )


@pytest.mark.parametrize("limits", [{}, {"probes": 1, "depth": 10}])
def test_truncation_leaves_the_rest_at_the_prior(limits):
    """Both from every eigenvalue and from Lanczos pairs; it becomes the whole as k goes to P."""
    values = torch.logspace(-3, 2, 60, dtype=D).flip(0)
    problem = quadratic(with_eigenvalues(values))
    whole = laplace_evidence(problem, 0.5)
    energies = []
    for top in (1, 7, 30, 60):
        found = laplace_evidence(problem, 0.5, top=top, **limits)
        energies.append(found.free_energy.value)
        assert found.occam_factor.value == pytest.approx(
            -0.5 * float((values[:top] / 0.5 + 1).log().sum()), rel=1e-5
        )
        assert found.logdet.value == pytest.approx(
            -2 * found.occam_factor.value + 60 * math.log(0.5), rel=1e-12
        )
        assert found.top == top
        assert found.cutoff == pytest.approx(float(values[top - 1]), rel=1e-3)
        assert found.status is Status.CONVERGED
    assert energies == sorted(energies)
    assert energies[-1] == pytest.approx(whole.free_energy.value, rel=1e-6)
    assert (whole.top, whole.cutoff) == (None, None)


def test_negative_curvature_is_said_and_left_at_the_prior():
    values = torch.tensor([-3.0, -0.1, 0.5, 2.0], dtype=D)
    problem = quadratic(with_eigenvalues(values))
    found = laplace_evidence(problem, 1.0)
    assert found.status is found.free_energy.status is found.logdet.status is Status.INDEFINITE
    assert found.logdet.value == pytest.approx(math.log(1.5) + math.log(3.0), rel=1e-10)
    assert laplace_evidence(problem, 1.0, top=2).status is Status.CONVERGED
    assert laplace_evidence(problem, 1.0, top=4).status is Status.INDEFINITE
    stiff = laplace_evidence(problem, 4.0)
    assert stiff.status is Status.CONVERGED
    assert stiff.logdet.value == pytest.approx(float((values + 4).log().sum()), rel=1e-10)
    assert "no minimum" in Status.INDEFINITE.value


def many_parameters() -> tuple[Problem, Tensor]:
    """½Σ d_i θ_i² in 500 dimensions, not at its minimum, standing for 100 samples."""
    rng = torch.Generator().manual_seed(5)
    values = torch.cat([torch.logspace(-3, 1, 250, dtype=D), torch.zeros(250, dtype=D)])
    theta = 0.01 * torch.randn(500, generator=rng, dtype=D)
    loss = lambda p: 0.5 * (values * p["w"].square()).sum()  # noqa: E731
    return Problem.from_function(loss, {"w": theta}, num_samples=100), values


def test_error_bars_over_seeds_beyond_the_dense_limit():
    problem, values = many_parameters()
    exact = laplace_evidence(problem, 1.0)
    assert exact.cost == 500
    assert exact.logdet.value == pytest.approx(float((100 * values + 1).log().sum()), rel=1e-12)
    runs = [laplace_evidence(problem, 1.0, seed=seed, probes=2, depth=40) for seed in range(30)]
    scores = np.array(
        [(r.free_energy.value - exact.free_energy.value) / r.free_energy.stderr for r in runs]
    )
    assert 0.7 < math.sqrt((scores**2).mean()) < 1.35
    low, high = np.array([r.free_energy.interval() for r in runs]).T
    assert ((low <= exact.free_energy.value) & (exact.free_energy.value <= high)).mean() >= 0.86
    first = runs[0]
    assert first.free_energy.stderr == 0.5 * first.logdet.stderr == first.occam_factor.stderr > 0
    assert first.cost == 120
    assert first.decrement.value == pytest.approx(exact.decrement.value, rel=1e-3)
    assert abs(first.decrement.value - exact.decrement.value) <= first.decrement.stderr + 1e-12


def test_evidence_of_a_network_is_that_of_its_dense_hessian():
    problem = classifier((4, 5, 3), "tanh")
    found = laplace_evidence(problem, 500.0, "zero")
    matrix = 20 * dense_hessian(problem) + 500 * torch.eye(problem.num_parameters, dtype=D)
    slope = 20 * problem.gradient() + 500 * problem.vector
    assert found.logdet.value == pytest.approx(float(torch.logdet(matrix)), rel=1e-10)
    assert found.decrement.value == pytest.approx(
        0.5 * float(slope @ torch.linalg.solve(matrix, slope)), rel=1e-8
    )


def test_evidence_survives_the_disk(tmp_path):
    found = laplace_evidence(logistic(20)[0], top=1)
    assert Result.load(found.save(tmp_path / "evidence")) == found


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda p: laplace_evidence(p, prior_precision=0.0),
            ValueError,
            "prior_precision must be a finite number",
        ),
        (
            lambda p: laplace_evidence(p, prior_precision="1"),
            TypeError,
            "prior_precision must be a number",
        ),
        (
            lambda p: laplace_evidence(p, centre="map"),
            ValueError,
            "centre must be one of 'theta', 'zero'",
        ),
        (
            lambda p: laplace_evidence(p, top=3),
            ValueError,
            r"top must be an integer in \[1, 2\], got 3",
        ),
        (lambda p: laplace_evidence(p, top=0), ValueError, "top must be an integer"),
        (lambda p: laplace_evidence(p, top=1.5), TypeError, "top must be an integer"),
        (lambda p: laplace_evidence(p, probes=0), ValueError, "probes must be"),
        (lambda p: laplace_evidence(p, depth=0), ValueError, "depth must be"),
        (
            lambda p: laplace_evidence(torch.eye(2)),
            TypeError,
            r"problem must be a lambdahat\.Problem",
        ),
        (lambda p: bic(p.model), TypeError, r"problem must be a lambdahat\.Problem"),
    ],
)
def test_misuse(call, error, text):
    with pytest.raises(error, match=text):
        call(logistic(20)[0])
