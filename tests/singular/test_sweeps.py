"""Sweeps over step size and temperature: every cell is what theory says of it."""

import math

import numpy as np
import pytest
import torch

from lambdahat.results import Estimate, LearningCoefficient, Result, Status
from lambdahat.sampling import hmc, sample, sgld
from lambdahat.singular import curves
from lambdahat.singular.curves import sweep
from lambdahat.singular.exact import quadratic, quadratic_problem
from tests.cases import classifier

EIGENVALUES = [1.0, 2.0, 4.0]
NBETAS = [50.0, 200.0]
GAMMA = 5.0
STEPS = [1e-3, 4e-3, 2.5e-2]


def chosen(problem, step_size=2.5e-3, nbeta=200.0, batch_size=None):
    """As llc's answer: the sweep needs its settings."""
    chains = sample(problem, sgld(step_size, nbeta, GAMMA), 1, 4, batch_size=batch_size)
    return LearningCoefficient(
        1.45,
        0.02,
        400,
        localization=GAMMA,
        step_size=step_size,
        nbeta=nbeta,
        temperature="given",
        chains=chains,
    )


def by_hmc():
    problem = quadratic_problem(EIGENVALUES, 1000)
    return LearningCoefficient(1.45, 0.02, chains=sample(problem, hmc(1e-3, 200.0, GAMMA), 1, 4))


@pytest.fixture(scope="module")
def swept():
    problem = quadratic_problem(EIGENVALUES, 1000)
    return sweep(
        problem,
        STEPS,
        NBETAS,
        chains=6,
        draws=500,
        seed=3,
        burn_in=100,
        coefficient=chosen(problem),
    )


def test_every_cell_has_the_exact_value_of_its_finite_step(swept):
    stable = []
    for row, nbeta in enumerate(NBETAS):
        for column, step in enumerate(STEPS):
            stiffest = step * (nbeta * max(EIGENVALUES) + GAMMA)
            found = swept[row, column]
            if stiffest >= 4:
                assert found.status is Status.DIVERGED
                assert math.isnan(found.value)
                continue
            exact = quadratic(EIGENVALUES, nbeta, GAMMA, step)
            assert abs(float(found) - exact) < 4 * found.stderr, (nbeta, step)
            assert found.stderr < 0.2 * exact
            stable.append(abs(quadratic(EIGENVALUES, nbeta, GAMMA) - exact) / found.stderr)
    assert len(stable) == 4
    assert max(stable) > 8  # the grid reaches steps whose bias shows


def test_acceptance_falls_with_the_step_size(swept):
    assert swept.acceptance.shape == (2, 3)
    for row in swept.acceptance:
        shown = row[np.isfinite(row)]
        assert (np.diff(shown) < 0).all()
    assert swept.acceptance[0, 0] > 0.95
    assert swept.acceptance[1, 1] < 0.8


def test_the_choice_of_llc_is_marked(swept):
    assert swept.chosen == (2.5e-3, 200.0)
    assert (float(swept.coefficient), swept.coefficient.cost, swept.localization) == (
        1.45,
        400,
        GAMMA,
    )
    assert swept.cost == 6 * 6 * 600


def test_it_comes_back_from_disk(swept, tmp_path):
    stored = Result.load(swept.save(tmp_path / "sweep"))
    np.testing.assert_array_equal(stored.values, swept.values)
    assert stored.statuses == swept.statuses
    assert stored.chosen == swept.chosen


def test_a_sweep_depends_on_its_seed_alone():
    problem = quadratic_problem(EIGENVALUES, 1000)
    first, again, other = (
        sweep(problem, [1e-3], [50.0], draws=20, seed=seed, coefficient=chosen(problem))
        for seed in (0, 0, 1)
    )
    assert first.values == again.values
    assert first.values != other.values


def test_without_a_coefficient_llc_finds_one_by_sgld(monkeypatch):
    problem, asked = quadratic_problem(EIGENVALUES, 1000), []
    answer = chosen(problem)
    monkeypatch.setattr(curves, "llc", lambda _, **settings: asked.append(settings) or answer)
    found = sweep(problem, [1e-3], [50.0], draws=4, seed=2, mode="sequential")
    assert asked == [{"seed": 2, "kernel": "sgld", "mode": "sequential"}]
    assert found.chosen == (answer.step_size, answer.nbeta)


def test_default_steps_are_a_ladder_around_the_choice():
    problem = quadratic_problem(EIGENVALUES, 1000)
    found = sweep(problem, draws=4, burn_in=0, coefficient=chosen(problem))
    np.testing.assert_allclose(found.step_sizes, 2.5e-3 * 4.0 ** np.arange(-2, 3))
    np.testing.assert_allclose(found.nbetas, 1000 / math.log(1000) * np.array([1 / 16, 1 / 4, 1]))
    assert found.temperatures == ("0.0625 of it", "0.25 of it", "n/log n, n = 1000")


def test_default_temperatures_with_batches():
    problem = classifier(samples=40, batch_size=None)
    found = sweep(
        problem, [1e-4], draws=4, burn_in=0, coefficient=chosen(problem, 1e-4, batch_size=10)
    )
    hot, cold = 10 / math.log(10), 40 / math.log(40)
    np.testing.assert_allclose(found.nbetas, [hot, math.sqrt(hot * cold), cold])
    assert found.temperatures == ("B/log B, B = 10", "their geometric mean", "n/log n, n = 40")
    assert found.batch_size == 10


def test_a_point_that_is_no_minimum_shows_its_negative_value():
    problem = quadratic_problem([1.0], 1000).at({"w": torch.tensor([0.5], dtype=torch.float64)})
    found = sweep(problem, [1e-3], [200.0], draws=400, coefficient=chosen(problem))
    assert found.values[0, 0] < -5


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"step_sizes": []}, ValueError, "step_sizes must hold at least one"),
        ({"step_sizes": [0.0]}, ValueError, "step_sizes must be a finite number above 0"),
        ({"nbetas": []}, ValueError, "nbetas must hold at least one"),
        ({"nbetas": ["warm"]}, ValueError, "nbeta must be a number or one of"),
        ({"draws": 1}, ValueError, "draws must be an integer of at least 4"),
        ({"chains": 0}, ValueError, "chains must be an integer"),
        ({"coefficient": by_hmc()}, ValueError, "coefficient must come from SGLD"),
        ({"coefficient": Estimate(1.0)}, TypeError, "coefficient must be what llc found"),
        (
            {"coefficient": LearningCoefficient(1.0)},
            TypeError,
            "coefficient must be what llc found",
        ),
    ],
)
def test_bad_arguments_are_named(arguments, error, message):
    problem = quadratic_problem(EIGENVALUES, 1000)
    with pytest.raises(error, match=message):
        sweep(problem, **{"coefficient": chosen(problem), **arguments})
