"""``llc``: exact values at its own nβ and γ, and what it says when it cannot know."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import lambdahat as lh
from lambdahat import Problem, Status, llc
from lambdahat._core.rng import generator
from lambdahat.sampling import hmc, sgld
from lambdahat.singular import exact, llc_along

LINEAR_SAMPLES, LINEAR_DIM = 20_000, 8


def bowl(eigenvalues=(1.0, 2.0, 5.0), num_samples=10_000, at=None):
    """L = ½Σh_i w_i², at its minimum unless told."""
    h = torch.tensor(eigenvalues, dtype=torch.float64)
    theta = torch.zeros_like(h) if at is None else torch.tensor(at, dtype=torch.float64)
    return Problem.from_function(
        lambda p: 0.5 * (h * p["w"] ** 2).sum(), {"w": theta}, num_samples=num_samples
    )


def linear_regression(samples=LINEAR_SAMPLES):
    """Many samples, so that batches are drawn: the loss is a quadratic with a known Hessian."""
    rng = generator(0, "linear regression")
    x = torch.randn(samples, LINEAR_DIM, generator=rng, dtype=torch.float64)
    y = x.sum(dim=1) + torch.randn(samples, generator=rng, dtype=torch.float64)
    best = torch.linalg.lstsq(x, y.unsqueeze(1)).solution.squeeze(1)
    problem = Problem.from_function(
        lambda p, batch: 0.5 * (batch[1] - batch[0] @ p["w"]).square().mean(), {"w": best}, (x, y)
    )
    return problem, torch.linalg.eigvalsh(x.T @ x / len(x))


def relu_pair(scale=1.0, samples=60):
    """A trained one-hidden-layer network, its first layer multiplied and its second divided by
    ``scale``.
    """
    rng = generator(0, "relu pair")
    x = torch.randn(samples, 2, generator=rng, dtype=torch.float64)
    y = (x[:, :1] * x[:, 1:]).tanh() + 0.3 * torch.randn(
        samples, 1, generator=rng, dtype=torch.float64
    )
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1, bias=False)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng, dtype=torch.float64))
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=2000, tolerance_grad=1e-10, tolerance_change=1e-14
    )

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        model[0].weight.mul_(scale)
        model[0].bias.mul_(scale)
        model[2].weight.div_(scale)
    return Problem(model, "mse", (x, y))


def within(found, truth, errors=4.0):
    return abs(found.value - truth) <= errors * found.stderr


@pytest.fixture(scope="module")
def default():
    """The bowl at defaults."""
    return llc(bowl())


def test_a_quadratic_has_its_exact_value_at_defaults(default):
    found = default
    assert found.status is Status.CONVERGED
    assert within(found, exact.quadratic([1.0, 2.0, 5.0], found.nbeta, found.localization))
    assert found.stderr < 0.05 * found.value
    assert found.nbeta == pytest.approx(10_000 / math.log(10_000))
    assert found.temperature == "n/log n, n = 10000"
    assert found.per_chain.shape == (4,)
    assert found.chains.reasons.keys() >= {"kernel", "step_size", "localization", "draws"}
    assert found.rhat < 1.05
    low, high = found.interval()
    assert low < found.value < high


def test_batches_with_many_samples_and_what_their_steps_add_is_taken_off():
    problem, eigenvalues = linear_regression()
    found = llc(problem, seed=1, kernel="sgld", batch_size=512, max_gradients=12_000)
    truth = exact.quadratic(eigenvalues.tolist(), found.nbeta, found.localization)
    assert found.chains.kernel == "SGLD"
    assert found.raw > truth + 0.02 * truth, "the steps were large on purpose"
    assert found.discretisation_bias > 0
    assert within(found, truth, 3.0)
    assert found.stderr < 0.1 * truth


def test_a_larger_problem_is_sampled_by_kinetic_dynamics_on_the_whole_data():
    rng = generator(0, "wide regression")
    x, y = (torch.randn(500, width, generator=rng, dtype=torch.float64) for width in (40, 1))
    best = torch.linalg.lstsq(x, y).solution.squeeze(1)
    problem = Problem.from_function(
        lambda p, batch: 0.5 * (batch[1].squeeze(1) - batch[0] @ p["w"]).square().mean(),
        {"w": best},
        (x, y),
    )
    found = llc(problem, max_gradients=8000)
    eigenvalues = torch.linalg.eigvalsh(x.T @ x / len(x))
    assert (found.chains.kernel, found.chains.batch_size) == ("Kinetic", 500)
    assert found.chains.reasons["batch_size"] == "500: all of the data"
    assert within(found, exact.quadratic(eigenvalues.tolist(), found.nbeta, found.localization))
    assert found.stderr < 0.03 * found.value
    assert found.status is Status.CONVERGED


@pytest.mark.parametrize("step", [2e-6, 2e-5, 1e-4])
def test_a_given_step_size_gives_its_own_stationary_mean(step):
    h, nbeta, gamma = [1.0, 2.0, 5.0], 10_000 / math.log(10_000), 50.0
    found = llc(bowl(h), step_size=step, localization=gamma, draws=2000, burn_in=1000)
    truth = exact.quadratic(h, nbeta, gamma, step)
    assert found.step_size == step
    assert within(found, truth, 4.0)
    assert abs(found.value - truth) < 0.15 * truth
    assert found.value == pytest.approx(found.raw)


def test_a_chain_that_cannot_move_is_at_zero_with_no_error():
    found = llc(linear_regression()[0], step_size=0.0, draws=50, burn_in=0)
    assert (found.value, found.stderr, found.status) == (0.0, 0.0, Status.NOT_MOVING)


def test_a_point_that_is_no_minimum_is_named_and_its_negative_value_shown():
    found = llc(bowl((1.0, 2.0), at=(1.0, 1.0)), localization=1.0)
    assert found.status is Status.NOT_A_MINIMUM
    assert found.value < 0


def test_a_saddle_is_no_minimum():
    problem = Problem.from_function(
        lambda p: p["w"][0] ** 2 + (p["w"][1] ** 2 - 1.0) ** 2,
        {"w": torch.zeros(2).double()},
        num_samples=10_000,
    )
    found = llc(problem)
    assert found.status is Status.NOT_A_MINIMUM
    assert found.value < 0


def test_a_step_size_that_diverges_is_reduced_and_said_so():
    found = llc(bowl(), step_size=1.0, localization=1.0, draws=500, burn_in=500)
    assert found.step_size < 1.0
    assert "reduced" in found.chains.reasons["step_size"]
    assert math.isfinite(found.value)
    assert found.status in (Status.CONVERGED, Status.STEP_BIAS, Status.NOT_MIXED)


def test_dead_parameters_change_nothing():
    h = torch.tensor([1.0, 4.0], dtype=torch.float64)
    with_dead = Problem.from_function(
        lambda p: 0.5 * (h * p["w"] ** 2).sum() + 0.0 * p["dead"].sum(),
        {"w": torch.zeros(2).double(), "dead": torch.zeros(6).double()},
        num_samples=10_000,
    )
    found = llc(with_dead, max_gradients=8000)
    assert within(found, exact.quadratic([1.0, 4.0], found.nbeta, found.localization))


@pytest.mark.slow
def test_rescaling_a_relu_pair_leaves_the_value_if_the_localization_goes_along():
    plain = llc(relu_pair(), localization=1.0, tol=0.02)
    scale = 4.0
    along = {"0": 1.0 / scale**2, "2": scale**2}
    moved = llc(relu_pair(scale), localization=along, tol=0.02)
    left = llc(relu_pair(scale), localization=1.0, tol=0.02)
    error = math.hypot(plain.stderr, moved.stderr)
    assert abs(plain.value - moved.value) < 3 * error
    assert abs(plain.value - left.value) > 3 * math.hypot(plain.stderr, left.stderr), (
        "γ left as it was is another prior"
    )


def test_a_temperature_by_batches_of_several_sizes_is_refused_by_its_name():
    """No batch_size was given, so the error is about nbeta; batches of one size decide it."""
    x, y = (
        torch.randint(5, (9, 4), generator=generator(0, "ids")),
        torch.arange(36).reshape(9, 4) % 3,
    )
    y[0, 1:] = -100  # so that samples have different numbers of terms
    model = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(0, 1), nn.Unflatten(0, (-1, 4)))

    def problem(*sizes: int) -> Problem:
        data = list(zip(x.split(sizes), y.split(sizes), strict=True))
        return Problem(model, lambda out, target: nn.functional.cross_entropy(out.mT, target), data)

    settings = {"step_size": 1e-6, "localization": 1.0, "draws": 20, "burn_in": 0, "nbeta": "batch"}
    with pytest.raises(
        ValueError, match=r"^nbeta must be a number.*got 'batch' with batches of 2 to 4 samples"
    ):
        llc(problem(2, 3, 4), **settings)
    assert llc(problem(4, 4, 1), **settings).temperature == "B/log B, B = 4"


def test_the_temperature_has_names():
    problem = linear_regression()[0]
    settings = {"step_size": 1e-6, "localization": 1.0, "draws": 20, "burn_in": 0}
    by_batch = llc(problem, nbeta="batch", batch_size=256, **settings)
    assert by_batch.nbeta == pytest.approx(256 / math.log(256))
    assert by_batch.temperature == "B/log B, B = 256"
    assert by_batch.wbic is None
    given = llc(problem, nbeta=100.0, **settings)
    assert (given.nbeta, given.temperature) == (100.0, "given")
    assert llc(problem, **settings).wbic is not None


def test_the_same_seed_gives_the_same_value_and_another_seed_another():
    problem = linear_regression(2000)[0]
    by_batches = {"kernel": "sgld", "batch_size": 64, "max_gradients": 800}
    for settings in ({"max_gradients": 1600}, by_batches):
        first, again, other = (llc(problem, seed=seed, **settings).value for seed in (0, 0, 1))
        assert first == again != other


def test_wbic_is_the_mean_loss_over_all_samples(default):
    found = default
    n = 10_000
    assert float(found.wbic) == pytest.approx(n * found.initial_loss + math.log(n) * found.value)
    assert float(found.wbic.stderr) == pytest.approx(math.log(n) * found.stderr)


@pytest.mark.parametrize(
    ("kernel", "by_parameter"), [("hmc", True), ("kinetic", True), ("sgld", False)]
)
def test_the_sensitivity_is_that_of_a_quadratic(kernel, by_parameter):
    """λ̂ = ½Σ nβh/a with a = nβh + γ: dλ̂/d ln γ = −½Σ nβhγ/a², and dλ̂/d ln nβ is the opposite."""
    h, nbeta = [0.002, 0.005, 0.02, 0.05, 1.0], 1000.0
    gammas = [5.0, 20.0, 1.0, 50.0, 10.0] if by_parameter else [5.0] * 5
    gamma = torch.tensor(gammas, dtype=torch.float64) if by_parameter else 5.0
    draws = 1500 if kernel == "hmc" else 2500  # fewer are as exact where they are less alike
    found = llc(bowl(h), nbeta=nbeta, localization=gamma, kernel=kernel, draws=draws)
    slope = sum(0.5 * nbeta * x * g / (nbeta * x + g) ** 2 for x, g in zip(h, gammas, strict=True))
    by_gamma, by_nbeta = found.sensitivity.localization, found.sensitivity.nbeta
    assert abs(float(by_gamma) + slope) < 4 * by_gamma.stderr + 0.02 * slope
    assert abs(float(by_nbeta) - slope) < 4 * by_nbeta.stderr + 0.02 * slope
    assert max(by_gamma.stderr, by_nbeta.stderr) < 0.4 * slope
    assert not found.chains.observables


@pytest.mark.parametrize("kernel", ["kinetic", "sgld"])
def test_the_noise_of_batches_is_taken_out_of_the_sensitivity(kernel):
    """With batches of 256 the energies vary mostly by chance: the variance of that is known and
    taken off.
    """
    problem, eigenvalues = linear_regression()
    nbeta, gamma = 500.0, 200.0
    settings = {"batch_size": 256, "nbeta": nbeta, "localization": gamma}
    found = llc(problem, kernel=kernel, max_gradients=8000, **settings)
    slope = float((0.5 * nbeta * gamma * eigenvalues / (nbeta * eigenvalues + gamma) ** 2).sum())
    assert found.chains.noise["energy"] > slope
    for part, wanted in (
        (found.sensitivity.localization, -slope),
        (found.sensitivity.nbeta, slope),
    ):
        assert abs(float(part) - wanted) < 4 * part.stderr + 0.05 * slope


def test_some_parameters_only():
    problem = Problem.from_function(
        lambda p: 0.5 * (p["a"] ** 2).sum() + 0.5 * (p["b"] ** 2).sum(),
        {"a": torch.zeros(2).double(), "b": torch.zeros(5).double()},
        num_samples=10_000,
    )
    found = llc(problem.restrict("a"), max_gradients=4000)
    assert within(found, exact.quadratic([1.0, 1.0], found.nbeta, found.localization))


def test_a_kernel_with_its_own_settings():
    h, nbeta = [1.0, 2.0, 5.0], 500.0
    found = llc(bowl(h), kernel=hmc(2e-4, nbeta, 3.0, leapfrog=10), draws=500, burn_in=50)
    assert (found.nbeta, found.localization, found.temperature) == (
        nbeta,
        3.0,
        "given by the kernel",
    )
    assert within(found, exact.quadratic(h, nbeta, 3.0))
    with pytest.raises(
        ValueError, match=r"kernel must be a name where the settings are given apart"
    ):
        llc(bowl(), kernel=sgld(1e-3, 1.0), step_size=1e-3)


def test_watching_sees_the_value_come_and_can_stop():
    seen = []

    def watch(energies):
        seen.append(energies.shape)
        return len(seen) == 3

    found = llc(
        linear_regression()[0],
        step_size=1e-5,
        localization=10.0,
        draws=100,
        burn_in=10,
        watch=watch,
    )
    assert seen == [(4, 5), (4, 10), (4, 15)]
    assert found.chains.losses.shape == (4, 15)


def test_along_checkpoints_all_are_at_one_localization(tmp_path):
    problem, eigenvalues = linear_regression(2000)
    best = problem.vector
    found = llc_along(problem, {0: best + 0.5, 10: best}, max_gradients=4000)
    assert found.labels.tolist() == [0, 10]
    assert found.results[0].status is Status.NOT_A_MINIMUM
    assert found.results[0].localization == found.results[1].localization
    truth = exact.quadratic(
        eigenvalues.tolist(), found.results[1].nbeta, found.results[1].localization
    )
    assert within(found.results[1], truth)
    found.save(tmp_path / "along")
    assert lh.Result.load(tmp_path / "along").values.tolist() == found.values.tolist()


def test_a_checkpoint_is_taken_whole_buffers_and_held_parameters_too():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    x, y = torch.randn(40, 3).double(), torch.randn(40, 1).double()
    problem = Problem(model.eval(), "mse", (x, y))
    start = problem.at(problem.vector)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(0.3)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for part in (start, start.restrict("0.*")):
        found = llc_along(
            part, [state], step_size=1e-5, localization=1.0, draws=8, burn_in=0, kernel="sgld"
        )
        assert found.results[0].initial_loss == pytest.approx((model(x) - y).square().mean().item())


def test_a_result_comes_back_from_disk(tmp_path, default):
    found = default
    found.save(tmp_path / "llc")
    again = lh.LearningCoefficient.load(tmp_path / "llc")
    assert (again.value, again.stderr, again.status) == (found.value, found.stderr, found.status)
    assert (again.chains.energies == found.chains.energies).all()


def test_a_small_error_of_few_draws_is_not_converged():
    """In 200 directions the loss hardly fluctuates, so that a few dozen draws have an error
    within the tolerance.
    """
    rng = generator(0, "few draws")
    x = torch.randn(2000, 200, generator=rng, dtype=torch.float64)
    y = x.sum(1, keepdim=True) + torch.randn(2000, 1, generator=rng, dtype=torch.float64)
    model = nn.Linear(200, 1, bias=False).double()
    model.weight.data = torch.linalg.lstsq(x, y).solution.T.contiguous()
    problem = Problem(model, "mse", (x, y))
    cut, whole = (
        llc(problem, kernel="kinetic", batch_size=2000, max_gradients=most) for most in (1200, 6000)
    )
    assert cut.stderr < 0.03 * cut.value
    assert cut.chains.diagnostics.ess_mean < 200
    assert cut.status is Status.GRADIENTS_SPENT
    assert whole.status is Status.CONVERGED
    assert abs(whole.value - 100) < 4 * whole.stderr


@pytest.mark.parametrize(("exponents", "seed"), [((1, 1), 6), ((1, 1), 9), ((2, 2), 0)])
def test_error_bars_hold_where_chains_have_not_seen_the_arms(exponents, seed):
    """The virial as control variate is dropped where the mean distance is not settled."""
    dtype = torch.float32 if exponents == (1, 1) else torch.float64
    loss = lambda p: (p["w"][0] ** exponents[0] * p["w"][1] ** exponents[1]) ** 2  # noqa: E731
    problem = Problem.from_function(loss, {"w": torch.zeros(2, dtype=dtype)}, num_samples=10_000)
    found = llc(problem, seed=seed)
    value = exact.crossing_expectation(exponents, found.nbeta, float(found.localization))
    assert abs(found.value - value) < 3 * found.stderr
