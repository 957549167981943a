"""Kernels that never reject: the noise of batches, the bias of steps, their tuning and their
limit on gradients.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from lambdahat.problem import Problem
from lambdahat.results import Status
from lambdahat.sampling import kinetic, rmsprop_sgld, sghmc, sgld, sgnht
from lambdahat.sampling._sample import SamplingRequest, make_runner
from lambdahat.sampling.backends.chain_runner import ChainPlan
from lambdahat.sampling.kernels import Kernel
from lambdahat.sampling.tuning.unadjusted import (
    STEPS,
    Draws,
    Lengths,
    bias_of_steps,
    require_enough,
)
from lambdahat.singular import exact, llc
from lambdahat.singular.known_cases import suite
from tests.singular.test_llc_settings import bowl, data_of, regression


def eigenvalues(problem: Problem) -> list[float]:
    x, _ = data_of(problem)
    return torch.linalg.eigvalsh(x.T @ x / len(x)).tolist()


# The noise of batches


@pytest.mark.parametrize(
    "scale", [None, torch.tensor([0.5, 1.0, 2.0]).double()], ids=["plain", "scaled"]
)
def test_the_noise_of_batches_is_their_covariance(scale):
    """Batches of B samples with replacement: V = nβ²·Cov(S∇ℓ)/B, and the energies vary by
    nβ²·Var(ℓ − ℓ*)/B.
    """
    problem, nbeta, size, looks, chains = regression(width=3), 50.0, 10, 40, 8
    kernel = kinetic(0.01, nbeta, 1.0, scale)
    runner, _ = make_runner(problem, kernel, chains, ChainPlan(batch_size=size), "batched")
    runner.skip(20)
    before, spent = runner.positions.clone(), runner.gradients_spent
    found = runner.noise(looks)
    assert torch.equal(runner.positions, before)
    assert runner.gradients_spent == spent + looks
    x, y = data_of(problem)
    traces, spreads = [], []
    for theta in before:
        left = x @ theta - y
        gradients = x * left.unsqueeze(1) * (1.0 if scale is None else scale)
        traces.append(nbeta**2 / size * float(gradients.var(dim=0, correction=0).sum()))
        losses = 0.5 * left.square() - 0.5 * (x @ problem.vector - y).square()
        spreads.append(nbeta**2 / size * float(losses.var(correction=0)))
    error = 4 * math.sqrt(2 / (chains * (looks - 1)))
    assert float(found["trace"].mean()) == pytest.approx(np.mean(traces), rel=error)
    assert float(found["energy"].mean()) == pytest.approx(np.mean(spreads), rel=error)
    assert found["trace"].shape == found["energy"].shape == (chains,)


@pytest.mark.parametrize(
    "scale", [None, torch.tensor([0.5, 1.0, 2.0]).double()], ids=["plain", "scaled"]
)
@pytest.mark.parametrize(
    "gamma", [400.0, torch.tensor([100.0, 400.0, 1600.0]).double()], ids=["one γ", "several"]
)
def test_the_noise_that_heats_the_localization_is_its_share_of_the_trace(gamma, scale):
    """At exact draws of the posterior of curvature A = nβH + Γ, "tied" is tr(V·S²ΓA⁻¹) in the
    mean.
    """
    problem, nbeta, size, chains, looks = regression(width=3), 50.0, 10, 2000, 8
    runner, _ = make_runner(
        problem, kinetic(0.01, nbeta, gamma, scale), chains, ChainPlan(batch_size=size), "batched"
    )
    x, y = data_of(problem)
    ties = torch.diag(gamma * torch.ones(3).double())
    inverse = torch.linalg.inv(nbeta * x.T @ x / len(x) + ties)
    rng = torch.Generator().manual_seed(0)
    draws = (
        torch.randn(chains, 3, generator=rng, dtype=torch.float64)
        @ torch.linalg.cholesky(inverse).T
    )
    runner.state.position.copy_(problem.vector + draws)
    gradients = x * (x @ problem.vector - y).unsqueeze(1)
    squared = torch.diag(torch.ones(3).double() if scale is None else scale**2)
    truth = (
        nbeta**2
        / size
        * float((torch.cov(gradients.T, correction=0) @ squared @ ties @ inverse).trace())
    )
    tied = runner.noise(looks)["tied"]
    assert float(tied.mean()) == pytest.approx(truth, abs=4 * float(tied.std()) / math.sqrt(chains))
    assert float(tied.std()) / math.sqrt(chains) < 0.1 * truth


@pytest.mark.parametrize("mode", ["sequential", "processes"])
def test_the_noise_is_the_same_in_all_modes(mode):
    runs = []
    for way in ("batched", mode):
        runner, _ = make_runner(
            regression(width=3), kinetic(0.01, 50.0, 1.0), 2, ChainPlan(batch_size=10), way
        )
        try:
            runner.skip(5)
            runs.append(runner.noise(3))
            assert runner.gradients_spent == 8
        finally:
            runner.close()
    for name in ("trace", "energy", "tied"):
        assert torch.allclose(runs[0][name], runs[1][name], rtol=1e-6)


def test_the_whole_data_has_no_noise_and_costs_nothing():
    for problem, plan in ((regression(width=3), ChainPlan(batch_size=4000)), (bowl(), ChainPlan())):
        runner, _ = make_runner(problem, kinetic(0.01, 50.0, 1.0), 2, plan, "batched")
        assert {name: values.tolist() for name, values in runner.noise(4).items()} == {
            "trace": [0.0, 0.0],
            "energy": [0.0, 0.0],
            "tied": [0.0, 0.0],
        }
        assert runner.gradients_spent == 0


# The bias of steps


KERNELS: list[Kernel] = [
    kinetic(0.1, 10.0, 1.0),
    sgld(0.1, 10.0, 1.0),
    sghmc(0.1, 10.0, 1.0),
    sgnht(0.1, 10.0, 1.0),
    rmsprop_sgld(0.1, 10.0, 1.0),
]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: type(kernel).__name__)
def test_a_time_step_is_kept_by_every_kernel(kernel):
    for step in (0.01, 0.3):
        assert kernel.with_time_step(step, 2.0).time_step == pytest.approx(step)


def energies_of(mean: float, error: float, seed: int) -> np.ndarray:
    """White noise, so that the standard error of the mean is ``error``, shifted to have that
    mean exactly.
    """
    values = np.random.default_rng(seed).normal(size=(4, 400))
    return mean + error * 40 * (values - values.mean())


def draws_of(
    kernel: Kernel, mean: float, error: float, seed: int, trace: float = 0.0, tied: float = 0.0
) -> Draws:
    """Draws of a quadratic loss; forces are noise alone."""
    record = {"work": np.full((4, 400), 2 * mean), "heat": np.full((4, 400), trace)}
    noise = {"trace": trace, "tied": tied}
    return Draws(kernel, energies_of(mean, error, seed), record, noise)


@pytest.mark.parametrize(
    ("kernel", "order"),
    [(KERNELS[0], 1), (KERNELS[2], 1), (KERNELS[4], 2)],
    ids=["Kinetic", "SGHMC", "RMSpropSGLD"],
)
def test_two_step_sizes_show_what_the_steps_add(kernel, order):
    """λ̂(h) = 5 + b·h^r and b 10 % more than the formula says: without statistical error b is
    found exactly.
    """
    truth, trace = 5.0, 40.0
    once, twice = (kernel.with_time_step(step, 2.0) for step in (0.05, 0.1))
    formula = once.noise_bias(trace, 1.0, 2.0, truth, 100)
    bias = 1.1 * formula if order == 1 else 0.2
    coarse = draws_of(twice, truth + 2**order * bias, 1e-9, 1, trace)
    found = bias_of_steps(draws_of(once, truth + bias, 1e-9, 0, trace), coarse, 100)
    assert 0.1 < bias < 1.0
    assert float(found) == pytest.approx(bias, rel=0.02)
    assert found.stderr < 0.02


def test_a_bias_that_contradicts_its_formula_is_in_the_error():
    """Draws at twice the step that are ten times as far off as the formula allows."""
    kernel = kinetic(0.05, 10.0, 1.0, friction=2.0)
    coarse = draws_of(kernel.with_time_step(0.1, 2.0), 8.0, 1e-3, 1)
    found = bias_of_steps(draws_of(kernel, 5.0, 1e-3, 0), coarse, 100)
    assert found.stderr >= 0.5 * (8.0 - 5.0) / 3


def test_without_draws_at_twice_the_step_the_formula_is_all():
    kernel = kinetic(0.1, 10.0, 1.0, friction=2.0)
    found = bias_of_steps(draws_of(kernel, 5.0, 0.01, 0, 8.0), None, 100)
    assert float(found) == pytest.approx(0.1 / (4 * 2.0) * 8.0)
    assert found.stderr == pytest.approx(0.25 * 0.1 + 0.01 * 5.0)
    unknown = bias_of_steps(draws_of(rmsprop_sgld(0.1, 10.0), 5.0, 0.01, 0, 8.0), None, 100)
    assert (float(unknown), unknown.stderr) == (0.0, pytest.approx(0.15 * 5.0))


def test_a_share_of_noise_that_is_known_between_bounds_is_in_the_error():
    """With 60 % of the noise in the localization the loss has 40 to 100 % of it: 70 ± 30 % of
    the formula.
    """
    kernel = kinetic(0.1, 10.0, 1.0, friction=2.0)
    found = bias_of_steps(draws_of(kernel, 5.0, 0.01, 0, 8.0, 4.8), None, 100)
    whole = 0.1 / (4 * 2.0) * 8.0
    assert float(found) == pytest.approx(0.7 * whole)
    assert found.stderr == pytest.approx(0.3 * whole + 0.25 * 0.7 * whole + 0.01 * 5.0)


def test_noise_that_heats_the_localization_is_not_taken_off_the_loss():
    """A linear network at rank 0: its weights are small, γ rules most directions, and little of
    the noise is in L.
    """
    case = next(case for case in suite() if case.name == "data-linear-1-1-1-r0-noisy")
    problem = case.make()
    scores = []
    for seed in range(4):
        found = llc(problem, batch_size=512, seed=seed, max_gradients=8000)
        scores.append(
            (found.value - float(case.truth(found.nbeta, found.localization))) / found.stderr
        )
    assert max(map(abs, scores)) < 3
    assert abs(np.mean(scores)) < 1.5


def test_the_step_is_set_against_noise_where_chains_have_cooled():
    """Batches of 512 heat the pilot to several times the posterior's energy; the draws have a
    few per cent too much.
    """
    case = next(case for case in suite() if case.name == "data-linear-4-3-4-r1-noisy")
    found = llc(case.make(), batch_size=512, seed=0, max_gradients=8000)
    truth = float(case.truth(found.nbeta, found.localization))
    assert found.raw < 1.3 * truth
    assert abs(found.value - truth) < 3 * found.stderr


@pytest.mark.parametrize("kernel", ["kinetic", "sgld", "sghmc", "sgnht"])
def test_batches_without_noise_take_the_largest_stable_step(kernel):
    """All samples alike: a batch is the whole data, and nothing has to be cooled or taken off."""
    x, y = torch.eye(4).repeat(50, 1, 1).double(), torch.ones(50, 4, 1).double()
    model = torch.nn.Linear(4, 1, bias=False).double()
    torch.nn.init.ones_(model.weight)
    problem = Problem(model, "mse", (x, y))
    found = llc(
        problem, kernel=kernel, batch_size=10, localization=1.0, nbeta=400.0, max_gradients=4000
    )
    truth = exact.quadratic([0.5] * 4, found.nbeta, found.localization)
    assert found.chains.noise["trace"] == pytest.approx(0.0, abs=1e-12)
    assert abs(found.value - truth) < 4 * found.stderr


@pytest.mark.parametrize(("fine", "rough"), [(0.01, 0.02), (0.05, 0.05), (0.1, 0.2)])
def test_the_error_of_a_corrected_value_is_that_of_repetitions(fine, rough):
    """Means at h and 2h with errors of their own, and a bias within its prior of 1 %: z has unit
    variance.
    """
    truth, rng, scores = 5.0, np.random.default_rng(0), []
    kernel = kinetic(0.05, 10.0, 1.0, friction=2.0)
    for seed in range(400):
        bias = rng.normal(scale=0.01 * truth)
        draws = draws_of(kernel, truth + bias + fine * rng.normal(), fine, seed)
        coarse = draws_of(
            kernel.with_time_step(0.1, 2.0),
            truth + 4 * bias + rough * rng.normal(),
            rough,
            1000 + seed,
        )
        found = bias_of_steps(draws, coarse, 100)
        missed = draws.energies.mean() - float(found) - truth
        scores.append(missed / math.hypot(fine, found.stderr))
    assert np.mean(np.square(scores)) == pytest.approx(1.0, abs=4 * math.sqrt(2 / 400))


@pytest.mark.parametrize("kernel", ["kinetic", "sgld", "sghmc"])
def test_heat_of_small_batches_is_taken_off(kernel):
    """Linear regression on batches of 128 of 20,000 samples: the heated mean is not the truth,
    the corrected one is.
    """
    problem = regression(samples=20_000, width=20)
    found = llc(problem, kernel=kernel, batch_size=128, seed=1, max_gradients=8000)
    truth = exact.quadratic(eigenvalues(problem), found.nbeta, found.localization)
    assert found.chains.batch_size == 128
    assert found.chains.step_bias is not None
    assert 0.015 * truth < float(found.chains.step_bias) < 0.15 * truth
    assert found.value == pytest.approx(found.raw - float(found.chains.step_bias))
    assert abs(found.value - truth) < 4 * found.stderr
    assert found.stderr < 0.2 * truth
    assert found.chains.noise["trace"] > 0
    assert found.chains.noise["dof"] > 10


def test_a_thermostat_absorbs_the_noise_of_small_batches():
    problem = regression(samples=20_000, width=20)
    found = llc(problem, kernel="sgnht", batch_size=128, seed=1, max_gradients=16_000)
    truth = exact.quadratic(eigenvalues(problem), found.nbeta, found.localization)
    assert abs(found.value - truth) < 3 * found.stderr < 0.4 * truth


@pytest.mark.parametrize(
    ("kernel", "step", "batch"),
    [
        ("sghmc", 8e-4, 32),
        ("sghmc", 1e-4, 32),
        ("kinetic", 5e-3, 32),
        ("rmsprop_sgld", 1e-3, 32),
        ("rmsprop_sgld", 1e-3, 4000),
    ],
)
def test_what_a_given_step_adds_is_in_the_error(kernel, step, batch):
    """Nothing is subtracted, and no value far from the truth is CONVERGED."""
    problem = regression(width=20)
    found = llc(problem, kernel=kernel, step_size=step, batch_size=batch, draws=1000, burn_in=300)
    truth = exact.quadratic(eigenvalues(problem), found.nbeta, found.localization)
    assert found.value == found.raw
    assert abs(found.value - truth) < 3 * found.stderr
    far = abs(found.value - truth) > 0.5 * truth
    assert found.status is Status.STEP_BIAS if far else found.discretisation_bias > 0


def test_sghmc_takes_off_what_its_steps_add_to_the_whole_data():
    """100 alike directions, at whose time step each has 10 % too much variance, and 60 % at
    twice the step.
    """
    found = llc(bowl((1.0,) * 100), kernel="sghmc", localization=1.0)
    truth = exact.quadratic([1.0] * 100, found.nbeta, 1.0)
    assert found.status is Status.CONVERGED
    assert found.raw > 1.05 * truth
    assert abs(found.value - truth) < 3 * found.stderr


# Every kernel finds its settings


@pytest.mark.parametrize(
    "name", ["kinetic", "sgld", "sghmc", "sgnht", "rmsprop_sgld", "hmc", "mala"]
)
def test_every_kernel_tunes_itself_on_a_gaussian(name):
    """Twenty directions with curvatures from 0.01 to 1."""
    h = np.geomspace(0.01, 1.0, 20).tolist()
    found = llc(bowl(tuple(h)), kernel=name, max_gradients=12_000)
    truth = exact.quadratic(h, found.nbeta, found.localization)
    assert abs(found.value - truth) < 4 * found.stderr
    assert found.stderr < 0.15 * truth
    assert found.cost <= 12_000
    assert found.status in (Status.CONVERGED, Status.GRADIENTS_SPENT)
    assert found.step_size > 0
    assert found.chains.reasons.keys() >= {"kernel", "step_size", "localization", "draws"}


# The tolerance


def test_a_larger_tolerance_costs_less_and_a_missed_one_is_told():
    problem, small = regression(width=20), {"batch_size": 256, "kernel": "sgld"}
    loose, usual, tight = (
        llc(problem, **small, **given)
        for given in ({"tol": 0.1}, {}, {"tol": 1e-5, "max_gradients": 6000})
    )
    assert loose.cost < usual.cost
    assert loose.status is usual.status is Status.CONVERGED
    assert loose.stderr <= 0.1 * loose.value
    assert usual.stderr <= 0.03 * usual.value
    assert tight.status is Status.GRADIENTS_SPENT
    assert tight.stderr > 1e-5 * tight.value


def test_the_default_tolerance_counts_no_value_as_less_than_one_and_a_given_one_is_relative():
    few = bowl((1.0,))
    usual = llc(few)
    assert usual.status is Status.CONVERGED
    assert usual.stderr <= 0.03
    spent = llc(few, tol=1e-4, max_gradients=2000)
    assert spent.status is Status.GRADIENTS_SPENT


# The limit on gradients


GIVEN: list[dict[str, Any]] = [
    {},
    {"localization": 5.0},
    {"batch_size": 100},
    {"batch_size": 100, "draws": 60},
    {"kernel": "sgld"},
    {"kernel": "sgld", "batch_size": 64, "burn_in": 30},
    {"kernel": "sgnht", "batch_size": 64},
    {"burn_in": 100},
    {"draws": 50},
    {"draws": 20, "burn_in": 5},
    {"step_size": 1e-5},
    {"step_size": 10.0, "localization": 5.0, "burn_in": 20},
]


LIMITS = [
    *((800, settings) for settings in GIVEN),
    (1300, {"draws": 50}),
    (1300, {"kernel": "sgld"}),
    (3001, {}),
]


@pytest.mark.parametrize(("limit", "settings"), LIMITS, ids=str)
def test_steps_keep_within_their_gradients(limit, settings):
    found = llc(regression(width=20), max_gradients=limit, **settings)
    assert found.cost <= limit
    assert math.isfinite(found.value)
    assert found.chains.losses.shape[1] == settings.get("draws", found.chains.losses.shape[1])


def test_chains_that_diverge_in_the_pilot_keep_within_their_gradients():
    """Curvature that grows without bound: steps that are stable at w* are not where the chains
    go.
    """
    problem = Problem.from_function(
        lambda p: (p["w"] ** 2).sum() + 1e4 * (p["w"] ** 6).sum(),
        {"w": torch.zeros(20).double()},
        num_samples=10_000,
    )
    for kernel in ("kinetic", "sgld"):
        found = llc(problem, kernel=kernel, max_gradients=3000, localization=0.01)
        assert found.cost <= 3000


def twisted() -> Problem:
    """A valley in which no chain mixes."""
    return Problem.from_function(
        lambda p: 100 * (p["w"][0] - 0.5 * torch.sin(8 * p["w"][1])) ** 2 + 1e-3 * p["w"][1] ** 4,
        {"w": torch.zeros(2, dtype=torch.float64)},
        num_samples=100_000,
    )


@pytest.mark.parametrize(
    ("make", "budget"), [(bowl, 1600), (bowl, 3000), (twisted, 1600), (twisted, 12_000)]
)
def test_hmc_keeps_within_its_gradients(make, budget):
    """Warm-ups and trials of a mass count."""
    found = llc(make(), max_gradients=budget)
    assert found.chains.kernel == "HMC"
    assert found.cost <= budget
    assert found.chains.losses.shape[1] >= 8
    assert math.isfinite(found.value)


@pytest.mark.parametrize(
    "settings", [{"step_size": 1e-4}, {"step_size": 1e-4, "draws": 30}, {"draws": 5000}]
)
def test_hmc_of_given_steps_or_draws_keeps_within_its_gradients(settings):
    found = llc(bowl(), kernel="hmc", max_gradients=4000, **settings)
    assert found.cost <= 4000
    assert found.status is (
        Status.GRADIENTS_SPENT if settings.get("draws") == 5000 else found.status
    )


@pytest.mark.parametrize(
    "settings", [{}, {"draws": 400}, {"draws": 100, "burn_in": 50}, {"kernel": "sgld"}], ids=str
)
def test_too_few_gradients_are_refused_by_name_and_the_least_suffice(settings):
    problem = regression(width=20)
    match = r"max_gradients must be at least (\d+) for 4 chains, got 396; pilot"
    with pytest.raises(ValueError, match=match) as told:
        llc(problem, max_gradients=396, batch_size=100, **settings)
    least = int(str(told.value).split("at least ")[1].split()[0])
    with pytest.raises(ValueError, match=r"max_gradients must be at least"):
        llc(problem, max_gradients=least - 1, batch_size=100, **settings)
    found = llc(problem, max_gradients=least, batch_size=100, **settings)
    assert found.cost <= least
    assert found.chains.losses.shape[1] >= settings.get("draws", 8)


def test_too_few_gradients_of_hmc_are_refused():
    with pytest.raises(
        ValueError, match=r"max_gradients must be at least 1600 for 4 chains of HMC, got 1000"
    ):
        llc(bowl(), max_gradients=1000)
    with pytest.raises(
        ValueError,
        match=r"burn_in must be \d+ trajectories at most with these max_gradients, got 500",
    ):
        llc(bowl(), max_gradients=4000, burn_in=500)


@pytest.mark.parametrize("tuned", [True, False])
@pytest.mark.parametrize("burn_in", [None, 0, 300])
@pytest.mark.parametrize("draws", [None, 50, 2000])
def test_the_parts_of_a_run_fit_into_its_limit(draws, burn_in, tuned):
    chains, step_size = 100, None if tuned else 1e-3

    def asked(limit):
        counts = {"max_gradients": limit * chains, "burn_in": burn_in, "draws": draws}
        return SamplingRequest(chains, step_size=step_size, **counts)

    with pytest.raises(ValueError, match="at least") as told:
        require_enough(asked(1))
    least = int(str(told.value).split("at least ")[1].split()[0]) // chains
    for limit in (least, least + 1, 2 * least, 50_000):
        require_enough(asked(limit))
        part = Lengths.of(asked(limit))
        assert part.pilot + part.burn_in + part.coarse + part.round < part.most == limit
        assert part.burn_in == (part.burn_in if burn_in is None else burn_in)
        assert part.round == (part.round if draws is None else draws)


def test_a_long_burn_in_takes_nothing_from_the_draws():
    plain, long = (Lengths.of(SamplingRequest(burn_in=steps)) for steps in (None, 5 * STEPS))
    assert plain.most == STEPS
    assert long.most == 6 * STEPS
    assert (long.pilot, long.coarse, long.round) == (plain.pilot, plain.coarse, plain.round)
