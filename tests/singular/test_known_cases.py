"""The ground-truth suite: its truths against exact answers, its problems at their minima, and
``verify`` over it.
"""

import math

import numpy as np
import pytest
import torch

from lambdahat.operators.curvature import hessian
from lambdahat.results import Status
from lambdahat.singular import known_cases as module
from lambdahat.singular._llc import inverse_temperature
from lambdahat.singular.exact import (
    crossing_expectation,
    deep_linear_reference,
    quadratic,
    quadratic_problem,
)
from lambdahat.singular.known_cases import (
    MLP,
    QUICK,
    Reference,
    logistic_expectation,
    logistic_minimum,
    mala_reference,
    suite,
)
from lambdahat.singular.verification import verify
from tests.singular.regression import Coin

CASES = {case.name: case for case in suite()}
REFERENCES = [case for case in CASES.values() if isinstance(case.truth, Reference)]


def nbeta_of(problem):
    return inverse_temperature("n/log n", problem.num_samples, 1)[0]


def test_the_suite_holds_what_it_must():
    names = list(CASES)
    assert sum(name.startswith(("reduced-rank", "deep-linear")) for name in names) >= 12
    assert sum(name.startswith("crossing") for name in names) == 5
    assert sum(name.startswith("quadratic") for name in names) == 7
    assert sum(name.startswith("data-") for name in names) >= 12
    assert [case.name for case in suite(quick=True)] == [name for name in names if name in QUICK]
    assert len(suite(quick=True)) == len(QUICK)


@pytest.mark.parametrize("name", [name for name in CASES if name != MLP])
def test_every_problem_stands_at_a_minimum(name):
    problem = CASES[name].make()
    rounding = 1e-6 if problem.dtype == torch.float32 else 1e-12
    assert float(problem.gradient().abs().max()) < rounding
    theta = problem.vector
    rng = torch.Generator().manual_seed(0)
    for _ in range(5):
        step = torch.randn(theta.shape, generator=rng, dtype=torch.float64).to(theta)
        assert problem.loss(theta + 0.1 * step) >= problem.loss()


def test_the_perceptron_stands_at_a_minimum_on_kinks_of_its_loss():
    """The gradient on one side of a kink is not 0, but the loss rises along it, its opposite,
    and all else.
    """
    problem = CASES[MLP].make()
    theta, gradient = problem.vector, problem.gradient()
    rng = torch.Generator().manual_seed(0)
    random = torch.randn(40, len(theta), generator=rng, dtype=torch.float64)
    for direction in (gradient, -gradient, *random):
        for length in (1e-4, 1e-3, 1e-2):
            assert (
                problem.loss(theta + length * direction / direction.norm()) > problem.loss() - 1e-9
            )
    assert nbeta_of(problem) * float(gradient.square().sum()) < 0.01


@pytest.mark.parametrize("name", ["quadratic-d5-k1e4", "quadratic-dead", "regression-n50000-d30"])
@pytest.mark.parametrize("gamma", [1.0, 300.0])
def test_truths_of_quadratic_losses_follow_from_the_hessian(name, gamma):
    problem = CASES[name].make()
    stiffness = nbeta_of(problem) * torch.linalg.eigvalsh(hessian(problem).dense().double())
    expected = 0.5 * float((stiffness / (stiffness + gamma)).sum())
    assert float(CASES[name].truth(nbeta_of(problem), gamma)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("nbeta", "gamma"), [(20.0, 1.0), (3.0, 0.3), (200.0, 50.0)])
def test_importance_sampling_of_one_parameter_agrees_with_quadrature(nbeta, gamma):
    coin = Coin(gamma=gamma)
    exact = nbeta * coin.mean(lambda w: coin.loss(w) - coin.loss(coin.centre), nbeta)
    centre = torch.tensor([coin.centre], dtype=torch.float64)
    found = logistic_expectation(
        torch.ones(coin.tosses, 1).double(), coin.outcomes, centre, nbeta, gamma
    )
    assert abs(float(found) - exact) < 4 * float(found.stderr)
    assert 0 < float(found.stderr) < 0.003 * exact
    assert found.status.ok


def test_importance_sampling_says_when_few_draws_carry_the_weight():
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(30, 12, generator=rng, dtype=torch.float64)
    found = logistic_expectation(x, (x[:, 0] > 0).double(), torch.zeros(12), 30.0, 1e-3, draws=400)
    assert found.status is Status.FEW_WEIGHTS


def test_the_maximum_of_the_likelihood_is_found():
    coin = Coin()
    found = logistic_minimum(torch.ones(coin.tosses, 1).double(), coin.outcomes)
    assert float(found) == pytest.approx(coin.centre, rel=1e-10)


def test_logistic_truth_tends_to_that_of_its_quadratic_form():
    """Where γ holds w so close that the loss is its quadratic form."""
    case = CASES["logistic-n500-d8"]
    problem = case.make()
    eigenvalues = torch.linalg.eigvalsh(hessian(problem).dense()).tolist()
    near = float(case.truth(nbeta_of(problem), 1e4))
    assert near == pytest.approx(quadratic(eigenvalues, nbeta_of(problem), 1e4), rel=3e-3)
    assert (
        abs(
            float(case.truth(nbeta_of(problem), 1.0))
            - quadratic(eigenvalues, nbeta_of(problem), 1.0)
        )
        > 0.01
    )


def test_block_gibbs_of_a_scalar_network_agrees_with_quadrature():
    """½(w₁w₂)² at nβ is the crossing (w₁w₂)² at nβ/2."""
    found = deep_linear_reference((1, 1, 1), 0, 2000.0, 1.0, sweeps=400)
    exact = crossing_expectation((1, 1), 1000.0, 1.0)
    assert abs(float(found) - exact) < 4 * float(found.stderr)
    assert float(found.stderr) < 0.01 * exact


def test_mala_agrees_with_a_quadratic_in_closed_form():
    eigenvalues = [1.0, 0.1, 0.01, 0.0]
    found = mala_reference(quadratic_problem(eigenvalues, 1000), 100.0, 1.0, steps=1500, chains=16)
    assert abs(float(found) - quadratic(eigenvalues, 100.0, 1.0)) < 4 * float(found.stderr)
    assert float(found.stderr) < 0.05


@pytest.mark.parametrize("case", REFERENCES, ids=lambda case: case.name)
def test_stored_references_are_known_well_enough_and_fall_with_the_localization(case):
    nbeta = nbeta_of(case.make())
    found = [case.truth.known(nbeta, gamma) for gamma in (1.0, 10.0, 100.0)]
    assert all(float(one.stderr) <= 0.005 * float(one) for one in found)
    assert float(found[0]) > float(found[1]) > float(found[2]) > 0
    assert case.asymptotic is None or float(found[0]) < 1.01 * case.asymptotic


def test_a_reference_that_is_not_stored_is_computed():
    case = CASES["reduced-rank-4-2-3-r1"]
    nbeta = nbeta_of(case.make())
    assert case.truth.known(nbeta, 1.0 + 1e-6) is None
    near = case.truth(nbeta, 1.0 + 1e-6)  # another run of the sampler, at what is nearly the same γ
    stored = case.truth.known(nbeta, 1.0)
    assert near.cost > 0
    assert abs(float(near) - float(stored)) < 4 * math.hypot(
        float(near.stderr), float(stored.stderr)
    )


def test_a_stored_reference_of_other_data_is_not_used(monkeypatch):
    (case,) = [case for case in REFERENCES if case.name == MLP]
    nbeta = 500 / math.log(500)
    assert case.truth.known(nbeta, 10.0) is not None
    x, y = module.perceptron_data()
    x[3, 1] += 1e-3
    monkeypatch.setattr(module, "perceptron_data", lambda: (x, y))
    assert case.truth.known(nbeta, 10.0) is None


def test_references_stay_small():
    assert (
        len(module.resources.files("lambdahat.singular").joinpath("references.json").read_bytes())
        < 20_000
    )


def test_verify_agrees_on_some_cases():
    found = verify([CASES["quadratic-d5-k1e2"], CASES["crossing-4"]], seed=1)
    assert [row.verdict for row in found.rows] == ["agrees", "agrees"]
    assert found.worst_error < 0.02


@pytest.mark.slow
def test_verify_agrees_on_the_whole_suite():
    found = verify(seed=0)
    assert found.failed == ()
    assert found.median_error <= 0.05
    assert found.worst_error <= 0.15
    assert found.covered >= np.ceil(0.85 * len(found))
