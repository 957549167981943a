"""Sharpness: closed forms on quadratics, dense sums on networks, and what a rescaled layer pair
leaves alone.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lambdahat.estimators import (
    RelativeSharpness,
    Sharpness,
    eigenpairs,
    fisher_rao_norm,
    gradient_overlap,
    relative_sharpness,
    sharpness,
)
from lambdahat.estimators._sharpness import adaptive_curvature
from lambdahat.operators import fisher, hessian
from lambdahat.problem import Problem
from lambdahat.results import Eigenpairs
from lambdahat.results.measurement import Measurement
from tests.cases import classifier, quadratic
from tests.oracles import dense_hessian

RADIUS = 0.1


def rotated(values: list[float]) -> Tensor:
    """A symmetric matrix with these eigenvalues."""
    drawn = torch.randn(
        len(values), len(values), generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    basis = torch.linalg.qr(drawn)[0]
    return basis @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ basis.T


def rescaled(problem: Problem, c: float) -> Problem:
    """The same function of a ReLU network: first layer times c, second divided by c."""
    parts = {name: t.clone() for name, t in problem.space.unflatten(problem.vector).items()}
    parts["0.weight"] *= c
    parts["0.bias"] *= c
    parts["2.weight"] /= c
    return problem.at(problem.space.flatten(parts))


def worst_rise(matrix: Tensor, slope: Tensor, radius: float) -> float:
    """max_{‖u‖≤ρ} ½uᵀAu + bᵀu, by the trust-region secular equation ‖(νI − A)⁻¹b‖ = ρ, ν ≥
    λ_max, bisected.
    """
    values, vectors = torch.linalg.eigh(matrix)
    b = vectors.T @ slope
    low, high = float(values[-1]), float(values[-1]) + float(slope.norm()) / radius + 1e-9
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if float((b / (middle - values)).norm()) > radius else (low, middle)
        )
    u = b / (high - values)
    return float(0.5 * (values * u * u).sum() + b @ u)


@pytest.mark.parametrize("values", [[4.0, 3.0, 1.0, 0.5], [1.0, 0.2, -0.5, -10.0]])
def test_at_a_stationary_point_the_rise_is_half_the_leading_eigenvalue(values: list[float]) -> None:
    found = sharpness(quadratic(rotated(values)), RADIUS, adaptive=False)
    assert float(found.curvature) == pytest.approx(values[0], rel=1e-10)
    assert float(found.rise) == pytest.approx(0.5 * values[0] * RADIUS**2, rel=1e-8)
    assert found.second_order == pytest.approx(float(found.rise), rel=1e-8)
    assert float(found.slope) == found.first_order == 0


@pytest.mark.parametrize("values", [[4.0, 3.0, 1.0, 0.5], [1.0, 0.2, -0.5, -10.0]])
def test_with_a_gradient_the_ascent_solves_the_trust_region_problem(values: list[float]) -> None:
    matrix, slope = rotated(values), torch.tensor([0.3, -0.1, 0.2, 0.05], dtype=torch.float64)
    found = sharpness(quadratic(matrix, slope), RADIUS, adaptive=False, steps=60)
    truth = worst_rise(matrix, slope, RADIUS)
    assert float(found.rise) <= truth + 1e-12
    assert float(found.rise) == pytest.approx(truth, rel=1e-4)
    assert float(found.slope) == pytest.approx(float(slope.norm()), rel=1e-12)
    assert found.first_order == pytest.approx(RADIUS * float(slope.norm()))


def test_adaptive_sharpness_of_a_quadratic_is_that_of_the_scaled_one() -> None:
    matrix, theta = (
        rotated([4.0, 3.0, 1.0, 0.5]),
        torch.tensor([2.0, -1.0, 0.5, 0.0], dtype=torch.float64),
    )
    problem = quadratic(matrix, theta=theta)
    scale = theta.abs()
    scaled = scale[:, None] * matrix * scale
    torch.testing.assert_close(adaptive_curvature(problem).dense(), scaled, rtol=1e-12, atol=1e-14)
    found = sharpness(problem, RADIUS, steps=100)
    assert float(found.curvature) == pytest.approx(
        float(torch.linalg.eigvalsh(scaled)[-1]), rel=1e-9
    )
    assert float(found.slope) == pytest.approx(float((scale * (matrix @ theta)).norm()), rel=1e-12)
    truth = worst_rise(scaled, scale * (matrix @ theta), RADIUS)
    assert float(found.rise) == pytest.approx(truth, rel=1e-4)


@pytest.mark.parametrize("c", [0.25, 8.0])
def test_a_rescaled_layer_pair_changes_only_the_plain_measures(c: float) -> None:
    problem = classifier(batch_size=None)
    other = rescaled(problem, c)
    assert other.loss() == pytest.approx(problem.loss(), rel=1e-12)
    plain = [sharpness(p, RADIUS, adaptive=False, steps=5) for p in (problem, other)]
    assert abs(float(plain[1].curvature) / float(plain[0].curvature) - 1) > 0.5
    assert abs(float(plain[1].rise) / float(plain[0].rise) - 1) > 0.1
    first, second = (sharpness(p, RADIUS, steps=8) for p in (problem, other))
    for name in ("curvature", "slope", "rise"):
        assert float(getattr(second, name)) == pytest.approx(
            float(getattr(first, name)), rel=1e-8
        ), name
    one, two = (relative_sharpness(p) for p in (problem, other))
    for name in one.layers:
        assert float(two.layers[name]) == pytest.approx(float(one.layers[name]), rel=1e-8), name
        assert float(two.simple[name]) == pytest.approx(float(one.simple[name]), rel=1e-8), name
    for kind in ("exact", "empirical"):
        norms = [float(fisher_rao_norm(p, kind)) for p in (problem, other)]
        assert norms[1] == pytest.approx(norms[0], rel=1e-8), kind


def test_sharpness_rises_with_the_radius_and_the_steps() -> None:
    problem = classifier(activation="tanh", batch_size=None)
    start, climbed = (float(sharpness(problem, RADIUS, steps=steps).rise) for steps in (0, 20))
    assert 0 < start < climbed
    assert climbed < float(sharpness(problem, 2 * RADIUS).rise)
    worst = sharpness(problem, 1e-3, steps=50)
    # the linear model holds in a small ball
    assert float(worst.rise) == pytest.approx(worst.first_order, rel=0.05)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_relative_sharpness_is_the_sum_over_pairs_of_rows(activation: str) -> None:
    problem = classifier(activation=activation, batch_size=None)
    dense, slices = dense_hessian(problem), problem.space.slices
    found = relative_sharpness(problem, tol=0.01)
    assert set(found.layers) == {"0.weight", "2.weight"}
    total = 0.0
    for name, weight in problem.space.unflatten(problem.vector).items():
        if weight.ndim < 2:
            continue
        rows, columns = weight.shape
        block = dense[slices[name], slices[name]].reshape(rows, columns, rows, columns)
        between = torch.einsum("scrc->sr", block)
        kappa = float(((weight @ weight.T) * between).sum())
        total += kappa
        low, high = found.layers[name].interval(0.9999)
        assert low - 1e-9 <= kappa <= high + 1e-9, name
        simple = float(weight.square().sum() * between.trace())
        low, high = found.simple[name].interval(0.9999)
        assert low - 1e-9 <= simple <= high + 1e-9, name
    assert float(found.total) == pytest.approx(total, rel=0.02)


def test_the_weights_of_a_total_have_probes_of_their_own() -> None:
    weight = torch.randn(8, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def loss(parts: dict[str, Tensor]) -> Tensor:
        return sum(((w @ w.T).sin() ** 2).sum() for w in (parts["first"], parts["second"]))  # type: ignore[return-value]

    found = relative_sharpness(
        Problem.from_function(loss, {"first": weight, "second": weight.clone()}), tol=1.0
    )
    first, second = found.layers["first"], found.layers["second"]
    assert first.stderr > 0
    assert float(first) != float(second)


def test_fisher_rao_norm_is_the_quadratic_form_of_the_fisher() -> None:
    problem = classifier((4, 6, 3))
    theta = problem.vector
    for kind in ("exact", "empirical"):
        dense = fisher(problem, kind).dense()
        assert float(fisher_rao_norm(problem, kind)) == pytest.approx(
            float(theta @ dense @ theta), rel=1e-12
        )


def test_fisher_rao_norm_of_a_linear_model_is_the_variance_of_its_logits() -> None:
    problem = classifier((4, 3))
    norm = 0.0
    for weight, batch in problem.weighted():
        z = problem.output(problem.named(problem.vector), batch)
        p = z.softmax(dim=1)
        norm += weight * float(((p * z * z).sum(dim=1) - (p * z).sum(dim=1) ** 2).mean())
    assert float(fisher_rao_norm(problem)) == pytest.approx(norm, rel=1e-12)


def test_overlap_with_all_eigenvectors_is_the_whole_gradient() -> None:
    problem = classifier((4, 6, 3), "tanh")
    operator = hessian(problem)
    found = gradient_overlap(problem, eigenpairs(operator, operator.dim))
    g, dense = problem.gradient(), dense_hessian(problem)
    assert float(found.cumulative[-1]) == pytest.approx(1.0, abs=1e-10)
    assert float(found.curvature) == pytest.approx(float(g @ dense @ g / (g @ g)), rel=1e-9)
    assert found.gradient_norm == pytest.approx(float(g.norm()), rel=1e-12)
    few = eigenpairs(operator, 3)
    some = gradient_overlap(problem, few)
    torch.testing.assert_close(some.cosines, few.vectors.T @ g / g.norm(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(some.cumulative, some.squared.cumsum(0))
    batch = gradient_overlap(problem.subsample(5), few)
    assert not torch.allclose(batch.cosines, some.cosines, atol=1e-3)


@pytest.mark.parametrize("turn", [1e-3, 1e-2])
def test_a_turned_eigenvector_is_within_the_errors_of_the_overlap(turn: float) -> None:
    matrix = torch.diag(torch.tensor([4.0, 0.0], dtype=torch.float64))
    slope = torch.tensor([math.cos(1.4), math.sin(1.4)], dtype=torch.float64)
    vector = torch.tensor([math.cos(turn), math.sin(turn)], dtype=torch.float64)
    value = vector @ matrix @ vector
    residual = (matrix @ vector - value * vector).norm()
    pairs = Eigenpairs(value[None], vector[:, None], residual[None], torch.tensor([True]))
    found = gradient_overlap(quadratic(matrix, slope), pairs)
    assert abs(float(found.cosines) - math.cos(1.4)) <= 1.01 * float(found.errors) <= 2 * turn
    assert abs(float(found.curvature) - 4 * math.cos(1.4) ** 2) <= 1.01 * float(
        found.curvature.stderr
    )


def test_results_save_and_fill_tables(tmp_path: object) -> None:
    problem = classifier()
    plain, relative = sharpness(problem, steps=2), relative_sharpness(problem)
    loaded = Sharpness.load(plain.save(f"{tmp_path}/sharpness"))
    assert str(loaded) == str(plain)
    assert str(plain.rise).startswith("at least ")
    assert RelativeSharpness.load(relative.save(f"{tmp_path}/relative")) == relative
    rows = {
        row["quantity"] for row in Measurement({"sharpness": plain, "relative": relative}).table()
    }
    assert {"sharpness.rise", "sharpness.curvature", "relative.layers.0.weight"} <= rows


def test_refusals() -> None:
    with pytest.raises(ValueError, match="radius must be a finite number above 0"):
        sharpness(classifier(), radius=0.0)
    with pytest.raises(ValueError, match="only vectors"):
        relative_sharpness(quadratic(torch.eye(3, dtype=torch.float64)))
    with pytest.raises(ValueError, match="kind must be one of 'exact', 'empirical'"):
        fisher_rao_norm(classifier(), "monte_carlo")
    with pytest.raises(TypeError, match=r"problem must be a lambdahat\.Problem"):
        relative_sharpness(torch.eye(3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"problem must be a lambdahat\.Problem"):
        gradient_overlap(torch.eye(3), None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model and a loss"):
        fisher_rao_norm(quadratic(torch.eye(3, dtype=torch.float64)))
    flat = quadratic(torch.eye(3, dtype=torch.float64))
    pairs = eigenpairs(hessian(flat), 2)
    with pytest.raises(ValueError, match="the gradient must not be zero"):
        gradient_overlap(flat, pairs)
    with pytest.raises(ValueError, match="vectors of length 43"):
        gradient_overlap(classifier(), pairs)
    assert math.isfinite(float(sharpness(flat, steps=1).rise))
