"""Volume scaling against exact volumes and exact learning coefficients, in its own errors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from lambdahat._core.progress import progress
from lambdahat._core.rng import generator
from lambdahat.problem import Problem
from lambdahat.results import Result, Status
from lambdahat.singular import exact
from lambdahat.singular.volumes import VolumeScaling, volume_scaling


def _agrees(found: VolumeScaling, truth: float) -> bool:
    low, high = found.coefficient.interval(0.998)
    return low < truth < high


@pytest.mark.parametrize(
    ("problem", "truth", "levels"),
    [
        (exact.quadratic_problem([1.0], 1), exact.regular(1), 40),
        (exact.quadratic_problem([1e-2, 1.0, 1e2, 1e4], 1), exact.regular(4), 40),
        (exact.crossing_problem([1, 2], 1), exact.normal_crossing([1, 2]), 40),
        (exact.crossing_problem([1, 1], 1), exact.normal_crossing([1, 1]), 60),
        (exact.deep_linear_problem((2, 2, 2), 0, 1), exact.deep_linear((2, 2, 2), 0), 40),
        (exact.deep_linear_problem((2, 1, 2), 1, 1), exact.deep_linear((2, 1, 2), 1), 40),
    ],
    ids=["line", "condition 1e6", "crossing 1 2", "crossing 1 1", "2-2-2", "2-1-2 of rank 1"],
)
def test_the_slope_is_the_learning_coefficient(problem, truth, levels):
    found = volume_scaling(problem, samples=1024, levels=levels, multiplicity=truth.multiplicity)
    assert found.status is Status.CONVERGED
    assert _agrees(found, truth.value)
    assert found.coefficient.stderr < 0.025 * truth.value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("widths", "rank"),
    [((3, 2, 3), 0), ((2, 2, 2), 1), ((2, 2, 2, 2), 0), ((3, 3, 3), 1), ((2, 3, 2), 0)],
)
def test_the_slope_of_linear_networks(widths, rank):
    truth = exact.deep_linear(widths, rank)
    found = volume_scaling(
        exact.deep_linear_problem(widths, rank, 1), multiplicity=truth.multiplicity, levels=80
    )
    assert found.status is Status.CONVERGED
    assert _agrees(found, truth.value)
    assert found.coefficient.stderr < 0.025 * truth.value


@pytest.mark.slow
def test_the_error_is_the_spread_over_seeds():
    problem = exact.quadratic_problem([1.0, 3.0, 0.2], 1)
    runs = [
        volume_scaling(problem, samples=512, levels=24, seed=seed).coefficient for seed in range(40)
    ]
    values = np.array([run.value for run in runs])
    claimed = math.sqrt(np.mean([run.stderr**2 for run in runs]))
    assert 0.7 < values.std(ddof=1) / claimed < 1.4
    assert abs(values.mean() - 1.5) < 3 * claimed / math.sqrt(40)
    covered = sum(run.interval()[0] < 1.5 < run.interval()[1] for run in runs)
    assert covered >= 34


def test_volumes_of_an_ellipsoid_at_every_level():
    """V(ε) = ∏ √(2ε/h_i) of the unit ball once the ellipsoid lies inside."""
    h = np.array([1.0, 4.0, 9.0])
    found = volume_scaling(exact.quadratic_problem(h.tolist(), 1), samples=1024, levels=30)
    inside = found.levels < 0.5 * h.min()
    truth = 0.5 * np.log(2 * found.levels[:, None] / h).sum(axis=1)
    errors = (found.log_volumes - truth)[inside] / found.stderr[inside]
    assert inside.sum() > 25
    assert np.abs(errors).max() < 3.5
    assert found.stderr[-1] < 0.3
    np.testing.assert_allclose(found.volumes, np.exp(found.log_volumes))


def test_volumes_of_a_crossing_in_a_disc():
    """|xy| < t in the unit disc: the corner |sin 2φ| > 2t, r² > 2t/|sin 2φ| is cut off, ∫ in
    closed form.
    """
    found = volume_scaling(exact.crossing_problem([1, 1], 1), samples=1024, levels=20, radius=2.0)
    t = np.sqrt(found.levels[1:]) / 4  # |xy| = √ε in a disc of radius 2
    corner = np.pi / 2 - np.arcsin(2 * t)  # half-width of 2φ around π/2
    cut = 2 * (corner - 2 * t * np.log((1 + np.cos(np.arcsin(2 * t))) / (2 * t)))
    errors = (found.log_volumes[1:] - np.log(1 - cut / np.pi)) / found.stderr[1:]
    assert np.abs(errors).max() < 3.5


def test_the_multiplicity_moves_the_slope_as_it_should():
    found = volume_scaling(exact.crossing_problem([1, 1], 1), samples=256, levels=60)
    plain, double = found.slope(1), found.slope(2)
    assert found.coefficient == plain
    depth = np.log(found.levels[0] / found.levels[45])
    assert float(double) - float(plain) == pytest.approx(1 / depth, rel=0.1)


def _regression() -> Problem:
    rng = generator(0, "regression")
    x = torch.randn(30, 2, generator=rng, dtype=torch.float64)
    y = torch.randn(30, 1, generator=rng, dtype=torch.float64)
    columns = torch.cat([x, torch.ones(30, 1, dtype=torch.float64)], dim=1)
    best = torch.linalg.lstsq(columns, y).solution.flatten()
    model = nn.Linear(2, 1).double()
    problem = Problem(model, "mse", (x, y), batch_size=13)
    return problem.at({"weight": best[None, :2], "bias": best[2:]})


def test_a_model_with_data_and_a_loss_above_zero():
    found = volume_scaling(_regression(), samples=256, levels=30)
    assert found.status is Status.CONVERGED
    assert _agrees(found, 1.5)


def test_rounding_ends_the_levels():
    problem = exact.quadratic_problem([1.0], 1)
    raised = Problem.from_function(
        lambda p: 1.0 + 0.5 * p["w"].square().sum(), {"w": problem.vector}
    )
    found = volume_scaling(raised, samples=256, levels=60)
    assert 16 < len(found.log_volumes) < 40
    assert found.levels[-1] > 1e-15
    assert found.status is Status.CONVERGED
    assert _agrees(found, 0.5)
    flat = volume_scaling(
        Problem.from_function(lambda p: 0 * p["w"].sum(), {"w": problem.vector}), samples=256
    )
    assert flat.status is Status.PRECISION_LIMIT
    assert math.isnan(float(flat.coefficient))


def test_a_loss_that_cannot_be_mapped_gives_the_same(monkeypatch):
    monkeypatch.setattr("lambdahat.singular.volumes.TRIALS", 1)
    smooth = exact.quadratic_problem([1.0, 2.0], 1)

    def branching(parameters):
        w = parameters["w"]
        return 0.5 * w[0] ** 2 + w[1] ** 2 if bool(w[0] > 0) else w[1] ** 2 + 0.5 * w[0] ** 2

    other = Problem.from_function(branching, {"w": smooth.vector})
    mapped, looped = (
        volume_scaling(problem, samples=128, levels=16) for problem in (smooth, other)
    )
    assert float(looped.coefficient) == pytest.approx(float(mapped.coefficient), rel=1e-6)
    assert looped.cost == mapped.cost


def test_a_point_that_is_no_minimum_is_said():
    found = volume_scaling(exact.quadratic_problem([1.0, -1.0], 1), samples=128, levels=16)
    assert found.status is Status.NOT_A_MINIMUM
    assert "NOT_A_MINIMUM" in str(found.coefficient)


def test_a_slope_that_still_changes_is_said():
    """¼w⁴ + ½·10⁻⁷·w² scales as ε^{1/4} down to |w| ≈ 2⁻¹¹ and as ε^{1/2} below."""
    problem = Problem.from_function(
        lambda p: 0.25 * p["w"].pow(4).sum() + 0.5e-7 * p["w"].square().sum(),
        {"w": torch.zeros(1).double()},
    )
    assert volume_scaling(problem, samples=512, levels=16).status is Status.NOT_ASYMPTOTIC
    settled = volume_scaling(problem, samples=512, levels=40)
    assert settled.status is Status.CONVERGED
    assert _agrees(settled, 0.5)


def test_dead_parameters_change_nothing():
    alive = volume_scaling(exact.crossing_problem([1], 1), samples=256, levels=30)
    dead = volume_scaling(exact.crossing_problem([1, 0, 0], 1), samples=256, levels=30)
    noise = math.hypot(alive.coefficient.stderr, dead.coefficient.stderr)
    assert abs(float(alive.coefficient) - float(dead.coefficient)) < 3 * noise


def test_one_seed_one_answer_and_progress_and_disk(tmp_path):
    problem = exact.quadratic_problem([1.0, 2.0], 1)
    seen = []
    with progress(lambda task, done, total: seen.append((task, done, total))):
        first = volume_scaling(problem, samples=128, levels=16)
    assert seen[-1] == ("volume scaling", 16, 16)
    again, other = (volume_scaling(problem, samples=128, levels=16, seed=seed) for seed in (0, 1))
    assert float(first.coefficient) == float(again.coefficient) != float(other.coefficient)
    loaded = Result.load(first.save(tmp_path / "volumes"))
    assert isinstance(loaded, VolumeScaling)
    assert loaded.coefficient == first.coefficient
    np.testing.assert_array_equal(loaded.log_levels, first.log_levels)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"radius": 0.0}, "radius"),
        ({"samples": 10}, "samples"),
        ({"levels": 3}, "levels"),
        ({"multiplicity": 0}, "mult"),
    ],
)
def test_bad_arguments_are_named(options, name):
    with pytest.raises(ValueError, match=name):
        volume_scaling(exact.quadratic_problem([1.0], 1), **options)


def test_a_model_is_refused():
    with pytest.raises(TypeError, match=r"lh\.Problem"):
        volume_scaling(nn.Linear(1, 1))
