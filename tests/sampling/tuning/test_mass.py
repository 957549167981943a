"""A Kronecker mass: its algebra, what it is made of, and that chains with it are right and need
fewer gradients.
"""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import nn

import lambdahat as lh
from lambdahat.sampling.kernels import Kinetic, KroneckerScale
from lambdahat.sampling.tuning import unadjusted
from lambdahat.sampling.tuning.unadjusted import CurvatureMoments

SHAPES = ((6, 4), (6,), (2, 3, 2), ())


def random_scale(seed: int = 0) -> KroneckerScale:
    rng = torch.Generator().manual_seed(seed)
    moments = CurvatureMoments(SHAPES, torch.zeros(0, dtype=torch.float64))
    forces = torch.randn(20, 43, generator=rng, dtype=torch.float64)
    moments.add(forces, forces)
    return moments.scale(0.1)


def test_the_scale_is_one_matrix() -> None:
    scale = random_scale()
    dense = scale.times(torch.eye(43, dtype=torch.float64)).T
    vectors = torch.randn(5, 43, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(scale.times(vectors), vectors @ dense.T)
    torch.testing.assert_close(scale.transposed(vectors), vectors @ dense)
    torch.testing.assert_close(scale.solve(vectors), torch.linalg.solve(dense, vectors.T).T)
    blocks = torch.block_diag(*(torch.ones(n, n) for n in (24, 6, 12, 1)))
    assert float(dense[blocks == 0].abs().max()) == 0


def test_the_mass_is_the_kronecker_product_of_the_curvature() -> None:
    """Forces drawn from N(0, A ⊗ B + γ) give a mass in whose coordinates that matrix is about
    the identity.
    """
    rng = torch.Generator().manual_seed(0)
    left = torch.linalg.qr(torch.randn(12, 12, generator=rng, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(20, 20, generator=rng, dtype=torch.float64)).Q
    rows, columns = (
        torch.logspace(0, 3, 12, dtype=torch.float64),
        torch.logspace(-1, 2, 20, dtype=torch.float64),
    )
    hessian = torch.kron(left @ (rows[:, None] * left.T), right @ (columns[:, None] * right.T))
    gamma = 2.0
    curvature = hessian + gamma * torch.eye(240, dtype=torch.float64)
    root = torch.linalg.cholesky(curvature)
    # f = nβ∇L and g = ∇U of a quadratic at w ~ N(0, curvature⁻¹)
    places = torch.linalg.solve(root.T, torch.randn(240, 64, generator=rng, dtype=torch.float64)).T
    moments = CurvatureMoments([(12, 20)], torch.zeros(0, dtype=torch.float64))
    moments.add(places @ hessian, places @ curvature)
    dense = moments.scale(gamma).times(torch.eye(240, dtype=torch.float64)).T
    values = torch.linalg.eigvalsh(dense.T @ curvature @ dense)
    before = torch.linalg.eigvalsh(curvature)
    assert float(before[-1] / before[0]) > 1e4
    assert float(values[-1] / values[0]) < 20


TIE = 0.02


def regression(
    samples: int = 1000, dtype: torch.dtype = torch.float64
) -> tuple[lh.Problem, torch.Tensor]:
    """Least squares with 12 outputs and inputs on scales from 1 to 0.01, trained; and the input
    covariance.
    """
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(samples, 20, generator=rng, dtype=torch.float64) * torch.logspace(
        0, -2, 20, dtype=torch.float64
    )
    y = torch.randn(samples, 12, generator=rng, dtype=torch.float64)
    model = nn.Linear(20, 12, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.linalg.lstsq(x, y).solution.T)
    return lh.Problem(model.to(dtype), "mse", (x.to(dtype), y.to(dtype))), x.T @ x / samples


@cache
def with_mass(batch_size: int | None) -> lh.LearningCoefficient:
    problem, _ = regression()
    return lh.llc(problem, kernel="kinetic", localization=TIE, seed=0, batch_size=batch_size)


@pytest.mark.parametrize("batch_size", [None, 256])
def test_chains_with_a_mass_give_the_exact_coefficient(batch_size: int | None) -> None:
    found, (_, covariance) = with_mass(batch_size), regression()
    # the mean over 12 outputs
    stiff = found.nbeta * torch.linalg.eigvalsh(covariance).double() * 2 / 12
    truth = 12 * float((stiff / (stiff + TIE)).sum()) / 2
    assert found.chains.reasons["mass"].startswith("Kronecker products, with")
    assert abs(float(found) - truth) < 3 * found.stderr
    assert found.stderr < 0.06 * truth


def test_a_mass_saves_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    found, (problem, _) = with_mass(None), regression()
    monkeypatch.setattr(unadjusted, "MASS_SIZE", math.inf)
    without = lh.llc(problem, kernel="kinetic", localization=TIE, seed=0)
    assert "mass" not in without.chains.reasons
    assert found.ess / found.cost > 1.5 * without.ess / without.cost
    assert found.status is without.status is lh.Status.CONVERGED


def test_no_mass_where_tensors_are_small_or_it_does_not_help() -> None:
    rng = torch.Generator().manual_seed(0)
    layer = nn.Linear(4, 3).double()
    nn.init.zeros_(layer.weight)
    data = torch.randn(500, 4, generator=rng).double(), torch.randn(500, 3, generator=rng).double()
    small = lh.Problem(layer, "mse", data)
    assert (
        "mass"
        not in lh.llc(small, kernel="kinetic", localization=0.02, max_gradients=4000).chains.reasons
    )
    x = torch.linalg.qr(torch.randn(400, 20, generator=rng, dtype=torch.float64)).Q * math.sqrt(400)
    model = nn.Linear(20, 12, bias=False).double()
    nn.init.zeros_(model.weight)
    problem = lh.Problem(model, "mse", (x, torch.zeros(400, 12, dtype=torch.float64)))
    even = lh.llc(problem, kernel="kinetic", localization=5.0, max_gradients=8000)
    assert "Kronecker products, with" not in even.chains.reasons.get("mass", "")


def test_tensors_without_entries_have_no_mass() -> None:
    moments = CurvatureMoments([(0, 5), (5, 0), (3, 2)], torch.zeros(0))
    moments.add(torch.ones(4, 6), torch.ones(4, 6))
    scale = moments.scale(1.0)
    torch.testing.assert_close(scale.solve(scale.times(torch.arange(6.0))), torch.arange(6.0))


def test_noise_alone_gives_a_mass_near_that_of_the_localization() -> None:
    rng = torch.Generator().manual_seed(0)
    smallest = []
    for _ in range(50):
        moments = CurvatureMoments([(20, 20)], torch.zeros(0))
        moments.add(torch.randn(32, 400, generator=rng), torch.randn(32, 400, generator=rng))
        smallest.append(float(moments.scale(1.0).values.min()))
    assert min(smallest) > 0.6


def test_forces_that_are_not_finite_are_told() -> None:
    moments = CurvatureMoments([(3, 2)], torch.zeros(0))
    moments.add(torch.full((1, 6), math.nan), torch.ones(1, 6))
    assert not bool(moments.totals.isfinite().all())


def test_parameters_in_half_precision_have_a_mass_in_float32() -> None:
    problem, _ = regression(dtype=torch.bfloat16)
    found = lh.llc(problem, kernel="kinetic", localization=TIE, seed=0, max_gradients=4000)
    assert math.isfinite(float(found))
    assert "mass" in found.chains.reasons


def test_a_kernel_with_a_kronecker_scale_samples_the_same_posterior() -> None:
    """Variances of a Gaussian by BAOAB, which is exact at any stable step."""
    rng = torch.Generator().manual_seed(0)
    x = (
        torch.randn(64, 4, generator=rng, dtype=torch.float64)
        * torch.tensor([3.0, 1.0, 0.3, 0.1]).double()
    )
    model = nn.Linear(4, 3, bias=False).double()
    nn.init.zeros_(model.weight)
    problem = lh.Problem(model, "mse", (x, torch.zeros(64, 3, dtype=torch.float64)))
    curvature = 100 * lh.hessian(problem).dense() + 2.0 * torch.eye(12, dtype=torch.float64)
    moments = CurvatureMoments([(3, 4)], problem.vector)
    places = torch.linalg.solve(
        torch.linalg.cholesky(curvature).T, torch.randn(12, 200, generator=rng).double()
    ).T
    moments.add(places @ (curvature - 2.0 * torch.eye(12)), places @ curvature)
    kernel = Kinetic(0.5, 100.0, 2.0, scale=moments.scale(2.0), friction=2.0)
    chains = lh.sample(
        problem, kernel, chains=8, draws=3000, burn_in=100, batch_size=64, keep_parameters=True
    )
    assert chains.parameters is not None
    draws = chains.parameters.double().flatten(0, 1)
    whitened = draws @ torch.linalg.cholesky(curvature)
    torch.testing.assert_close(
        whitened.T @ whitened / len(draws), torch.eye(12).double(), atol=0.12, rtol=0
    )
