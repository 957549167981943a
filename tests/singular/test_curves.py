"""λ̂ over γ and nβ, and along training: on quadratic losses all of it is known exactly."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import lambdahat as lh
from lambdahat._core.progress import progress
from lambdahat.results import Estimate, LearningCoefficient, Result, Sensitivity, Status
from lambdahat.sampling import hmc
from lambdahat.singular import CoefficientCurve, Trajectory, bayes, curves, llc_curve, sweep
from lambdahat.singular._llc import default_localization
from lambdahat.singular.bayes import log_temperature, temperature_regression
from lambdahat.singular.exact import quadratic, quadratic_problem

EIGENVALUES = np.array([1.0, 2.0, 4.0, 8.0])
NBETA = 100.0
SHORT = {"kernel": "hmc", "step_size": 0.04, "burn_in": 20, "draws": 200}


def bowl():
    return quadratic_problem(EIGENVALUES.tolist(), 1000)


def exact_slope(nbeta, gamma, axis):
    """dλ̂/d ln nβ = ½ Σ xγ/(x + γ)² with x = nβh; dλ̂/d ln γ is its negative."""
    stiffness = nbeta * EIGENVALUES
    slope = 0.5 * float((stiffness * gamma / (stiffness + gamma) ** 2).sum())
    return slope if axis == "nbeta" else -slope


@pytest.fixture(scope="module")
def over_gamma():
    return llc_curve(bowl(), [1600.0, 25.0, 400.0], nbeta=NBETA, **SHORT)


@pytest.fixture(scope="module")
def over_nbeta():
    return llc_curve(bowl(), nbetas=["n/log n", 20.0, 500], localization=100.0, **SHORT)


def test_a_curve_over_gamma_has_the_exact_values_in_ascending_order(over_gamma):
    assert (over_gamma.axis, over_gamma.fixed) == ("localization", NBETA)
    assert over_gamma.grid.tolist() == [25.0, 400.0, 1600.0]
    assert [result.localization for result in over_gamma.results] == [25.0, 400.0, 1600.0]
    for gamma, value, error in zip(
        over_gamma.grid, over_gamma.values, over_gamma.stderr, strict=True
    ):
        assert abs(value - quadratic(EIGENVALUES.tolist(), NBETA, gamma)) < 4 * error
        assert error < 0.1 * value
    assert over_gamma.default == default_localization(bowl(), NBETA)[0]
    assert over_gamma.cost == sum(result.cost for result in over_gamma.results) > 0


def test_a_curve_over_nbeta_has_the_exact_values_at_one_gamma(over_nbeta):
    assert (over_nbeta.axis, over_nbeta.fixed) == ("nbeta", 100.0)
    assert over_nbeta.grid.tolist() == [20.0, log_temperature(1000), 500.0]
    assert over_nbeta.default == log_temperature(1000)
    for nbeta, result in zip(over_nbeta.grid, over_nbeta.results, strict=True):
        assert (
            abs(float(result) - quadratic(EIGENVALUES.tolist(), nbeta, 100.0)) < 4 * result.stderr
        )
        assert result.localization == 100.0


@pytest.mark.parametrize("name", ["over_gamma", "over_nbeta"])
def test_slopes_are_the_derivatives_of_the_curve(name, request):
    curve = request.getfixturevalue(name)
    for result, slope in zip(curve.results, curve.slopes, strict=True):
        exact = exact_slope(result.nbeta, result.localization, curve.axis)
        assert abs(float(slope) - exact) < 4 * slope.stderr
        assert slope.stderr < 0.3


def test_a_point_is_the_learning_coefficient_with_the_same_settings(over_gamma):
    direct = lh.llc(bowl(), nbeta=NBETA, localization=400.0, **SHORT)
    assert float(over_gamma.results[1]) == float(direct)


def test_the_table_has_both_settings_in_every_row(over_nbeta):
    rows = over_nbeta.table()
    assert [row["nbeta"] for row in rows] == over_nbeta.grid.tolist()
    assert {row["localization"] for row in rows} == {100.0}
    assert [row["value"] for row in rows] == over_nbeta.values.tolist()
    assert [row["slope"] for row in rows] == [float(slope) for slope in over_nbeta.slopes]
    assert [row["status"] for row in rows] == [status.name for status in over_nbeta.statuses]


def test_a_curve_comes_back_from_disk(over_gamma, tmp_path):
    stored = CoefficientCurve.load(over_gamma.save(tmp_path / "curve"))
    np.testing.assert_array_equal(stored.values, over_gamma.values)
    assert stored.table() == over_gamma.table()
    assert isinstance(Result.load(tmp_path / "curve.json"), CoefficientCurve)


def answers(asked):
    """A stand-in for ``llc`` that answers at once with the exact value and notes its settings."""

    def llc(problem, **settings):
        asked.append(settings)
        count = problem.num_terms
        nbeta = settings.get("nbeta", "n/log n")
        value = {"n/log n": log_temperature(max(count, 3)), "batch": 7.0}.get(nbeta, nbeta)
        gamma = settings.get("localization") or default_localization(problem, value)[0]
        number = gamma if isinstance(gamma, float | int) else 1.0
        slope = Estimate(exact_slope(value, number, "nbeta"), 0.1)
        return LearningCoefficient(
            quadratic(EIGENVALUES.tolist(), value, number),
            0.1,
            10,
            localization=gamma,
            nbeta=value,
            sensitivity=Sensitivity(dataclasses.replace(slope, value=-slope.value), slope),
        )

    return llc


def test_the_default_grid_is_a_ladder_around_the_rule(monkeypatch):
    asked = []
    monkeypatch.setattr(curves, "llc", answers(asked))
    found = llc_curve(bowl(), seed=3, nbeta=50.0)
    rule = default_localization(bowl(), 50.0)[0]
    np.testing.assert_allclose(found.grid, rule * 4.0 ** np.arange(-2, 3))
    assert (found.default, found.fixed, len(found)) == (rule, 50.0, 5)
    assert len(asked) == 5
    assert all(settings["seed"] == 3 and settings["nbeta"] == 50.0 for settings in asked)


def test_a_given_localization_is_the_centre_of_the_default_grid(monkeypatch):
    monkeypatch.setattr(curves, "llc", answers([]))
    found = llc_curve(bowl(), localization=8.0)
    assert found.grid.tolist() == [0.5, 2.0, 8.0, 32.0, 128.0]
    assert found.default == default_localization(bowl(), log_temperature(1000))[0]


def test_all_temperatures_are_at_the_gamma_of_the_rule_at_the_default_one(monkeypatch):
    asked = []
    monkeypatch.setattr(curves, "llc", answers(asked))
    found = llc_curve(bowl(), nbetas=("batch", 3.0, "n/log n"))
    rule = default_localization(bowl(), log_temperature(1000))[0]
    assert [settings["localization"] for settings in asked] == [rule] * 3
    assert found.fixed == rule
    assert found.grid.tolist() == [3.0, 7.0, log_temperature(1000)]


def test_a_localization_of_each_parameter_serves_at_all_temperatures():
    found = llc_curve(bowl(), nbetas=[50.0], localization={"w": 5.0}, **{**SHORT, "draws": 8})
    assert torch.equal(found.fixed, torch.full((4,), 5.0, dtype=torch.float64))
    assert found.table()[0]["localization"] == 5.0


def test_progress_is_reported(monkeypatch):
    monkeypatch.setattr(curves, "llc", answers([]))
    seen = []
    with progress(lambda stage, done, total: seen.append((stage, done, total))):
        llc_curve(bowl(), nbetas=[1.0, 2.0])
    assert seen == [("curve", 0, 2), ("curve", 1, 2), ("curve", 2, 2)]


def test_the_status_of_a_curve_is_its_first_warning(over_gamma):
    warned = dataclasses.replace(over_gamma.results[1], status=Status.NOT_MIXED)
    curve = dataclasses.replace(over_gamma, results=(over_gamma.results[0], warned, warned))
    assert curve.status is Status.NOT_MIXED


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"localizations": [1.0], "nbetas": [2.0]},
            ValueError,
            "nbetas must be left out where localizations are",
        ),
        (
            {"localizations": []},
            ValueError,
            "localizations must hold at least one number, got none",
        ),
        ({"nbetas": []}, ValueError, "nbetas must hold at least one number, got none"),
        (
            {"localizations": [1.0, -2.0]},
            ValueError,
            "localizations must be a finite number above 0, got -2",
        ),
        (
            {"localizations": [0.0]},
            ValueError,
            "localizations must be a finite number above 0, got 0",
        ),
        (
            {"localizations": [math.inf]},
            ValueError,
            "localizations must be a finite number above 0, got inf",
        ),
        (
            {"localizations": ["weak"]},
            TypeError,
            "localizations must be a number above 0, got 'weak'",
        ),
        ({"localizations": 3.0}, TypeError, "localizations must be a list of numbers, got 3.0"),
        ({"nbetas": "n/log n"}, TypeError, "nbetas must be a list of numbers, got 'n/log n'"),
        ({"localizations": [1.0, 2.0, 1]}, ValueError, "localizations must hold different values"),
        ({"nbetas": ["batch", "batch"]}, ValueError, "nbetas must hold different values"),
        (
            {"nbetas": ["n/log n", log_temperature(1000)]},
            ValueError,
            "nbetas must hold different values",
        ),
        (
            {"nbetas": ["n log n"]},
            ValueError,
            "nbetas must be one of 'n/log n', 'batch', got 'n log n'",
        ),
        ({"nbetas": [-1.0]}, ValueError, "nbetas must be a finite number above 0"),
        ({"nbetas": [True]}, TypeError, "nbetas must be a number above 0, got True"),
        (
            {"nbetas": [1.0], "nbeta": 2.0},
            ValueError,
            "nbeta must be left out where nbetas are given, got 2.0",
        ),
        (
            {"localizations": [1.0], "localization": 2.0},
            ValueError,
            "localization must be left out where loc",
        ),
        ({"localization": {"w": 1.0}}, TypeError, "localization must be a number above 0.*centre"),
        (
            {"kernel": hmc(0.1, 10.0)},
            TypeError,
            "kernel must be a name, since a kernel has its own nbeta",
        ),
        ({"steps": 3}, TypeError, "options must be those of llc"),
    ],
)
def test_bad_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        llc_curve(bowl(), **arguments)


def test_little_data_needs_a_localization_and_a_number():
    bare = lh.Problem.from_function(lambda p: p["w"].square().sum(), {"w": torch.ones(2)})
    with pytest.raises(ValueError, match="localization must be given for so little data"):
        llc_curve(bare, nbetas=[10.0])
    with pytest.raises(TypeError, match="problem must be a lambdahat"):
        llc_curve("a model")


def result(localization=1.0, nbeta=10.0):
    return LearningCoefficient(2.0, 0.1, localization=localization, nbeta=nbeta)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (
            {"localization": 2.0},
            r"localization must be the same for all results, got 1\.0, 2\.0; λ̂ depends on it",
        ),
        (
            {"localization": torch.tensor([1.0, 2.0])},
            "localization must be the same for all .* got 1.0, by parameter",
        ),
        ({"nbeta": 11.0}, r"nbeta must be the same for all results, got 10\.0, 11\.0"),
    ],
)
def test_a_trajectory_of_different_settings_is_refused(others, message):
    with pytest.raises(ValueError, match=message):
        Trajectory(np.array([0.0, 1.0]), (result(), result(**others)))


def test_a_trajectory_and_a_sweep_say_at_which_settings_they_are():
    path = Trajectory(np.array([0.0, 1.0]), (result(), result(1.0 + 1e-9)))
    assert (path.nbeta, path.localization) == (10.0, 1.0)
    sgld = {
        "kernel": "sgld",
        "step_size": 1e-3,
        "localization": 5.0,
        "nbeta": 20.0,
        "draws": 8,
        "burn_in": 0,
    }
    found = sweep(bowl(), [1e-3], [50.0], draws=4, coefficient=lh.llc(bowl(), **sgld))
    assert (found.nbeta, found.localization) == (20.0, 5.0)


def test_a_curve_in_which_two_settings_change_is_refused():
    with pytest.raises(ValueError, match="nbeta must be the same for all results"):
        CoefficientCurve("localization", np.array([1.0, 2.0]), (result(), result(2.0, 11.0)), 10.0)


FLAT = [1.0] * 10


def test_a_bent_line_over_temperatures_is_a_misfit(monkeypatch):
    """E[nL] = ½ Σ nh/(βnh + γ) is a line in 1/β only while γ is small against βnh."""

    def exact(problem, nbeta, localization, **_):
        chains = SimpleNamespace(initial_loss=0.0, localization=localization)
        rise = quadratic(FLAT, nbeta, localization)
        return SimpleNamespace(chains=chains, estimate=Estimate(rise, 0.03, 10, dof=15.0))

    monkeypatch.setattr(bayes, "draw", exact)
    straight, bent = (
        temperature_regression(quadratic_problem(FLAT, 1000), localization=gamma)
        for gamma in (0.1, 50.0)
    )
    assert float(straight.learning_coefficient) == pytest.approx(5.0, rel=0.01)
    assert straight.status is Status.CONVERGED
    assert float(bent.learning_coefficient) < 4
    assert bent.misfit > 10
    assert bent.status is bent.learning_coefficient.status is bent.intercept.status is Status.MISFIT


@pytest.mark.slow
def test_chains_at_a_strong_localization_are_a_misfit():
    settings = {"kernel": "hmc", "step_size": 0.03, "burn_in": 10, "draws": 400}
    bent = temperature_regression(quadratic_problem(FLAT, 1000), localization=150.0, **settings)
    assert bent.status is Status.MISFIT


@pytest.mark.parametrize(
    ("misfit", "bent"), [(1.0, False), (5.4, False), (5.5, True), (math.nan, False)]
)
def test_a_misfit_is_improbable_by_the_chi_square_law(misfit, bent):
    assert bayes._is_misfit(misfit, 3) is bent  # P(χ²₃ > 16.27) = 0.001
    assert not bayes._is_misfit(misfit, 0)


def test_a_regression_over_temperatures_takes_the_gamma_of_the_rule():
    problem = bowl().at({"w": torch.full((4,), 0.01, dtype=torch.float64)})
    found = temperature_regression(problem, betas=(0.3, 1.0), **{**SHORT, "draws": 8})
    assert found.localization == default_localization(problem, log_temperature(1000))[0]
