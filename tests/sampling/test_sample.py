"""``sample``: what is drawn, what is recorded, what is left alone and what is told."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lambdahat._core.progress import progress
from lambdahat._core.rng import generator
from lambdahat.problem import Problem
from lambdahat.results import Chains, Result, Status
from lambdahat.sampling import hmc, mala, rmsprop_sgld, sample, sghmc, sgld
from lambdahat.sampling._sample import Collector, localization_tensor, make_runner
from lambdahat.sampling.backends.chain_runner import ChainPlan
from tests.cases import LanguageModel, classifier, network, sentences
from tests.problem.test_untouched import guarded, state_of, unchanged

STEP = sgld(1e-3, 50.0, 1.0)


def quadratic(h: float = 1.0, width: int = 2, samples: int = 100) -> Problem:
    start = {"w": torch.zeros(width).double()}
    return Problem.from_function(
        lambda p: 0.5 * h * p["w"].square().sum(), start, num_samples=samples
    )


def run(
    problem: Problem | None = None,
    kernel: Any = STEP,
    chains: int = 3,
    draws: int = 8,
    **options: Any,
) -> Chains:
    return sample(classifier() if problem is None else problem, kernel, chains, draws, **options)


def equal(first: Chains, second: Chains) -> bool:
    names = ("losses", "centre_losses", "distances", "acceptances")
    return all(np.array_equal(getattr(first, name), getattr(second, name)) for name in names)


# The draws


@pytest.mark.parametrize("kernel", [STEP, mala(1e-3, 50.0, 1.0)], ids=["sgld", "mala"])
def test_burn_in_is_thrown_away_and_thinning_keeps_every_other(kernel):
    options: dict[str, Any] = {
        "kernel": kernel,
        "keep_parameters": True,
        "mode": "sequential",
        "forces": True,
    }
    whole = run(draws=20, **options)
    late = run(draws=8, burn_in=12, **options)
    thin = run(draws=4, burn_in=12, thin=2, **options)
    for name in ("losses", "centre_losses", "distances", "forces", "virials", "acceptances"):
        assert np.array_equal(getattr(late, name), getattr(whole, name)[:, 12:])
        assert np.array_equal(getattr(thin, name), getattr(whole, name)[:, 13::2])
    assert torch.equal(late.parameters, whole.parameters[:, 12:])
    assert torch.equal(thin.parameters, whole.parameters[:, 13::2])
    assert (late.burn_in, late.thin, thin.thin) == (12, 1, 2)
    assert late.cost == thin.cost == whole.cost == 3 * (20 if kernel is STEP else 21)


def test_a_loss_belongs_to_its_parameters_and_its_batch():
    problem = classifier()
    found = run(
        problem,
        draws=5,
        burn_in=3,
        batch_size=20,
        keep_parameters=True,
        baseline="both",
        forces=True,
    )
    exact = run(problem, mala(1e-3, 50.0, 1.0), draws=5, keep_parameters=True, forces=True)
    for chains in (found, exact):
        losses = [[problem.loss(theta) for theta in chain] for chain in chains.parameters]
        assert chains.losses == pytest.approx(np.array(losses), rel=1e-10)
        assert chains.distances == pytest.approx(
            (chains.parameters - problem.vector).norm(dim=2).numpy()
        )
        assert chains.full_energies == pytest.approx(chains.energies, abs=1e-9)
        assert chains.energies == pytest.approx(
            50.0 * (np.array(losses) - problem.loss()), abs=1e-9
        )
        away = chains.parameters - problem.vector
        slopes = torch.stack(
            [torch.stack([problem.gradient(theta) for theta in row]) for row in chains.parameters]
        )
        force = 50.0 * slopes + away
        assert chains.forces == pytest.approx(force.square().sum(2).numpy())
        if chains is found:
            assert chains.virials == pytest.approx((away * force).sum(2).numpy())
    assert run(problem).forces is run(problem).virials is None, "on request only"
    assert found.full_losses == pytest.approx(found.losses)


@pytest.mark.parametrize("baseline", ["full", "both"])
def test_losses_over_the_whole_data_come_beside_those_of_batches(baseline):
    problem = classifier()
    found = run(problem, batch_size=4, baseline=baseline, keep_parameters=True)
    losses = [[problem.loss(theta) for theta in chain] for chain in found.parameters]
    assert found.full_losses == pytest.approx(np.array(losses), rel=1e-12)
    assert found.full_energies == pytest.approx(
        50.0 * (np.array(losses) - problem.loss()), rel=1e-9, abs=1e-12
    )
    assert np.abs(found.losses - found.full_losses).max() > 1e-2
    assert equal(found, run(problem, batch_size=4)), "looking does not change the chain"
    with pytest.raises(
        ValueError, match=r"full_energies must have losses over the whole data.*baseline=\"full\""
    ):
        _ = run(problem, batch_size=4).full_energies


def test_pieces_of_a_batch_are_the_batch():
    """The same indices: the gradient of the whole is the mean of those of the pieces, weighted
    by their sizes.
    """
    whole = run(batch_size=10)
    for pieces in (2, 3, 10, 30):
        parts = run(batch_size=10, accumulate=pieces)
        assert parts.losses == pytest.approx(whole.losses, rel=1e-10)
        assert parts.distances == pytest.approx(whole.distances, rel=1e-10)
        assert np.array_equal(parts.centre_losses, whole.centre_losses)
        assert parts.cost == whole.cost == 24


def test_shared_batches():
    shared, own = (run(batch_size=4, shared_batches=share) for share in (True, False))
    assert np.array_equal(shared.centre_losses, shared.centre_losses[:1].repeat(3, axis=0))
    assert len(np.unique(shared.centre_losses[0])) > 1
    assert len(np.unique(shared.losses[:, -1])) == 3
    assert (np.ptp(own.centre_losses, axis=0) > 0).all()


BASELINES: dict[str, Any] = {
    "classifier": classifier,
    "batch statistics": lambda: network("batch-norm", norm="train"),
    "tokens": lambda: Problem(LanguageModel().double(), "cross_entropy", sentences(), batch_size=2),
    "function": quadratic,
}


@pytest.mark.parametrize(
    "kernel", [sgld(0.0, 1e3), sghmc(0.0, 1e3), mala(0.0, 1e3)], ids=["sgld", "sghmc", "mala"]
)
@pytest.mark.parametrize("name", BASELINES)
def test_a_chain_that_cannot_move_reads_nothing(name, kernel):
    """Every loss is paired with the loss at the centre on the same batch: 0, however small the
    batches.
    """
    sizes = {"batch_size": 2} if name == "classifier" else {}
    found = run(BASELINES[name](), kernel, **sizes)
    assert np.abs(found.energies).max() < 1e-9
    assert np.array_equal(found.distances, np.zeros((3, 8)))
    assert found.status is Status.NOT_MOVING
    assert found.diagnostics.acceptance == pytest.approx(
        math.nan if found.kernel == "SGHMC" else 1.0, nan_ok=True
    )


# What can be watched


def test_observables_averages_and_parameters():
    functions = {
        "first": lambda theta: theta[0],
        "pair": lambda theta: theta[:2].square(),
        "one": lambda theta: 1.0,
    }
    found = run(
        draws=40, observables=functions, averages=functions, keep_parameters=True, burn_in=3
    )
    assert found.parameters.shape == (3, 40, classifier().num_parameters)
    expected = {
        "first": found.parameters[..., 0],
        "pair": found.parameters[..., :2].square(),
        "one": torch.ones(3, 40),
    }
    for name, values in expected.items():
        assert found.observables[name] == pytest.approx(values.numpy())
        stretches = values.numpy().reshape(3, 20, 2, *values.shape[2:]).mean(axis=2)
        assert found.averages[name] == pytest.approx(stretches), "means over twenty stretches"
    assert equal(found, run(draws=40, burn_in=3)), "looking does not change the chain"


def test_numbers_of_numpy_count_as_integers():
    counts = {"chains": 2, "draws": 8, "burn_in": 1}
    plain = run(**counts)
    numpys = run(**{name: np.int64(count) for name, count in counts.items()})
    assert np.array_equal(plain.losses, numpys.losses)


def test_averages_do_not_grow_with_the_draws():
    found = run(draws=200, chains=2, averages={"all": lambda theta: theta})
    assert found.averages["all"].shape == (2, 20, classifier().num_parameters)
    assert found.parameters is None
    assert not found.observables


def test_averages_of_many_rounds_stay_few():
    """As HMC draws, round after round: stretches are joined, and their weighted mean is that of
    all draws.
    """
    problem = classifier()
    plan = ChainPlan(averages={"all": lambda theta: theta}, keep_parameters=True)
    runner, mode = make_runner(problem, STEP, 2, plan, "batched")
    collector = Collector(runner, mode)
    for draws in (3, 20, 1, 40, 7, 30, 30, 25):
        collector.draw(draws)
    found = collector.chains()
    lengths = np.array(found.stretches)
    assert len(lengths) <= 40
    assert lengths.sum() == found.losses.shape[1] == 156
    weighted = (found.averages["all"] * lengths[:, None]).sum(axis=1) / 156
    assert weighted == pytest.approx(found.parameters.numpy().mean(axis=1))
    starts = np.concatenate([[0], lengths.cumsum()])
    first = found.parameters.numpy()[:, starts[1] : starts[2]].mean(axis=1)
    assert found.averages["all"][:, 1] == pytest.approx(first)


def test_an_observable_may_differentiate():
    def slope(theta: Tensor) -> Tensor:
        leaf = theta.clone().requires_grad_()
        return (
            leaf.square().sum()
            + torch.autograd.grad(leaf.square().sum(), leaf, create_graph=True)[0].sum()
        )

    found = run(draws=2, observables={"slope": slope}, keep_parameters=True)
    expected = found.parameters.square().sum(2) + 2 * found.parameters.sum(2)
    assert found.observables["slope"] == pytest.approx(expected.numpy())


def test_a_watch_sees_the_draws_so_far_and_may_stop():
    seen = []
    found = run(draws=40, watch=seen.append)
    assert [values.shape for values in seen] == [(3, count) for count in range(2, 41, 2)]
    assert np.array_equal(seen[-1], found.energies)
    short = run(draws=40, watch=lambda values: values.shape[1] >= 10)
    assert np.array_equal(short.energies, found.energies[:, :10])
    assert short.cost == 30


def test_progress_is_reported():
    seen: list[tuple[str, int, int | None]] = []
    with progress(lambda *report: seen.append(report)):
        run(draws=40, burn_in=10)
    assert [report for report in seen if report[0] == "sample"][-1] == ("sample", 40, 40)
    assert [report for report in seen if report[0] == "burn-in"][-1] == ("burn-in", 10, 10)
    done = [report[1] for report in seen if report[0] == "sample"]
    assert done == sorted(done)
    assert len(done) == 21


# Localization


def test_localization_by_name_layer_and_glob():
    problem = classifier()
    space = problem.space
    first, last = space.layers()
    expected = torch.zeros(space.size).double()
    for name in space.layers()[first]:
        expected[space.slices[name]] = 3.0
    for pattern in (first, f"{first}.*", f"{first}.????*"):
        assert torch.equal(localization_tensor({pattern: 3.0}, space, problem.vector), expected)
    name = space.layers()[last][0]
    expected[space.slices[name]] = 0.5
    assert torch.equal(
        localization_tensor({first: 3.0, name: 0.5}, space, problem.vector), expected
    )
    by_name, by_tensor = (
        run(problem, sgld(1e-3, 50.0, gamma)) for gamma in ({first: 3.0, name: 0.5}, expected)
    )
    assert equal(by_name, by_tensor)
    assert torch.equal(by_name.localization, expected)
    assert not equal(by_name, run(problem, sgld(1e-3, 50.0, 3.0)))


def test_only_the_problems_parameters_move():
    """The weight-restricted learning coefficient: the rest of the network is held."""
    problem = classifier()
    name = problem.space.names[0]
    part = problem.restrict(name)
    found = run(part, keep_parameters=True, batch_size=20)
    assert found.parameters.shape[2] == part.num_parameters < problem.num_parameters
    theta = problem.vector
    theta[problem.space.slices[name]] = found.parameters[0, -1]
    assert found.losses[0, -1] == pytest.approx(problem.loss(theta))


def test_a_strong_localization_keeps_chains_close():
    loose, tied = (
        run(kernel=sgld(1e-3, 50.0, gamma), draws=50).distances[:, 25:].mean()
        for gamma in (0.0, 900.0)
    )
    assert tied < 0.5 * loose


# What goes wrong is told


def test_a_bound_holds_and_is_reported():
    free = run(quadratic(), sgld(0.1, 1.0), chains=4, draws=100)
    found = run(quadratic(), sgld(0.1, 1.0), chains=4, draws=100, bound=1.0)
    assert free.distances.max() > 1.5
    assert found.distances.max() <= 1 + 1e-12
    assert found.status is Status.BOUNDED
    assert (found.diagnostics.bounded > 0).all()
    assert free.diagnostics.bounded.sum() == 0
    wide = run(quadratic(), sgld(0.1, 1.0), chains=4, draws=100, bound=100.0)
    assert equal(wide, free)
    assert wide.status is not Status.BOUNDED
    exact = run(quadratic(), mala(2.5, 1.0), chains=4, draws=100, bound=1.0)
    assert exact.diagnostics.bounded.sum() > 0
    assert exact.diagnostics.acceptance < 0.9
    assert exact.losses == pytest.approx(0.5 * exact.distances**2), (
        "what a kernel remembers is forgotten at the bound"
    )


def test_divergence_is_told_of_the_chains_that_diverged():
    """In a quartic well a chain runs away once it is beyond 2/√ε: some do, some do not yet."""
    start = {"w": torch.zeros(1).double()}
    problem = Problem.from_function(lambda p: p["w"].pow(4).sum() / 4, start, num_samples=50)
    found = run(problem, sgld(0.6, 1.0), chains=8, draws=100, seed=1)
    lost = found.diagnostics.diverged
    assert 0 < lost.sum() < 8
    assert (np.abs(found.energies[~lost]) < 1e3).all()
    assert not (np.abs(found.energies[lost]) < 1e30).all(axis=1).any()
    assert found.status is Status.DIVERGED
    assert found.losses.shape == (8, 100), "nothing is hidden"
    assert math.isfinite(found.diagnostics.rhat)
    assert 0 < found.diagnostics.acceptance < 1


def test_a_step_size_far_too_large_diverges_and_mala_stands():
    found = run(quadratic(100.0), sgld(1.0, 100.0), draws=300)
    assert found.diagnostics.diverged.all()
    assert found.status is Status.DIVERGED
    assert math.isnan(found.diagnostics.rhat)
    stuck = run(quadratic(100.0), mala(1.0, 100.0), draws=300)
    assert not stuck.diagnostics.diverged.any()
    assert stuck.diagnostics.acceptance < 0.1


def test_a_point_that_is_no_minimum_shows_a_negative_value():
    start = {"w": torch.ones(2).double()}
    slope = Problem.from_function(lambda p: 0.5 * p["w"].square().sum(), start, num_samples=100)
    assert run(slope, sgld(0.01, 20.0), draws=200).energies[:, 100:].mean() < -10


# What is left alone, and what the seed decides


@pytest.mark.parametrize("mode", ["auto", "sequential", "processes"])
@pytest.mark.parametrize("norm", ["eval", "train"])
def test_the_model_and_the_global_random_state_are_untouched(mode, norm):
    x = torch.randn(11, 5, generator=generator(0, "x"), dtype=torch.float64)
    model = guarded()
    x = x[:, : model[0].in_features]
    y = torch.randint(0, model[-2].out_features, (11,), generator=generator(0, "y"))
    problem = Problem(model, "cross_entropy", (x, y), batch_size=4, norm=norm)
    before = state_of(model)
    run(problem, draws=3, mode=mode, observables={"first": lambda theta: theta[0]}, baseline="both")
    assert unchanged(before, state_of(model))


@pytest.mark.parametrize(
    "kernel", [STEP, rmsprop_sgld(1e-3, 50.0), hmc(1e-3, 50.0)], ids=["sgld", "rmsprop", "hmc"]
)
def test_the_seed_decides(kernel):
    torch.manual_seed(1)
    first = run(kernel=kernel, seed=5, batch_size=4)
    torch.manual_seed(2)
    assert equal(first, run(kernel=kernel, seed=5, batch_size=4))
    assert not equal(first, run(kernel=kernel, seed=6, batch_size=4))


@pytest.mark.parametrize("kernel", [STEP, mala(1e-3, 50.0)], ids=["sgld", "mala"])
def test_a_chain_does_not_depend_on_how_many_run_beside_it(kernel):
    few, many = (
        run(kernel=kernel, chains=chains, batch_size=4, mode="sequential") for chains in (2, 5)
    )
    assert np.array_equal(many.losses[:2], few.losses)
    assert np.array_equal(many.distances[:2], few.distances)
    together = run(kernel=kernel, chains=5, batch_size=4, mode="batched")
    assert together.losses == pytest.approx(many.losses, rel=1e-9)
    assert len(np.unique(many.losses[:, -1])) == 5


def test_later_training_does_not_reach_a_result():
    problem = classifier()
    found = run(problem, keep_parameters=True)
    kept = found.parameters.clone()
    with torch.no_grad():
        for parameter in problem.model.parameters():
            parameter.add_(1.0)
    assert torch.equal(found.parameters, kept)
    assert run(problem).initial_loss != found.initial_loss


def test_float32_chains_are_paired_too():
    problem = Problem.from_function(
        lambda p, b: (b[0] @ p["w"] - b[1]).square().mean(),
        {"w": torch.ones(3)},
        (torch.randn(30, 3, generator=generator(0, "x")), torch.zeros(30)),
    )
    found = run(problem, sgld(0.0, 1e3), batch_size=4)
    assert np.abs(found.energies).max() < 1e-2 * 1e3 * 1e-4
    assert run(problem, batch_size=4, keep_parameters=True).parameters.dtype == torch.float32


# The result


def test_chains_survive_the_disk(tmp_path):
    kernel = sgld(1e-3, 50.0, {classifier().space.names[0]: 2.0})
    found = run(
        kernel=kernel,
        observables={"w": lambda w: w[:2]},
        averages={"w": lambda w: w[0]},
        keep_parameters=True,
        baseline="both",
        bound=0.2,
        forces=True,
    )
    back = Result.load(found.save(tmp_path / "chains"))
    assert isinstance(back, Chains)
    assert equal(found, back)
    assert torch.equal(back.parameters, found.parameters)
    assert torch.equal(back.localization, found.localization)
    for name in ("full_losses", "forces", "virials"):
        assert np.array_equal(getattr(back, name), getattr(found, name))
    assert np.array_equal(back.observables["w"], found.observables["w"])
    assert np.array_equal(back.averages["w"], found.averages["w"])
    for name in (
        "kernel",
        "step_size",
        "nbeta",
        "initial_loss",
        "num_samples",
        "batch_size",
        "mode",
        "cost",
        "status",
    ):
        assert getattr(back, name) == getattr(found, name)
    for name, value in vars(found.diagnostics).items():
        assert np.array_equal(
            getattr(back.diagnostics, name), value, equal_nan=not isinstance(value, Result)
        )
    assert back.diagnostics.diverged.dtype == bool
    assert len(back) == 3


def test_chains_for_arviz():
    import arviz_stats

    found = run(
        draws=50, observables={"pair": lambda theta: theta[:2], "one": lambda theta: theta[0]}
    )
    tree = found.to_arviz()
    assert np.array_equal(tree.posterior["learning_coefficient"].values, found.energies)
    assert tree.posterior["learning_coefficient"].dims == ("chain", "draw")
    assert tree.posterior["pair"].shape == (3, 50, 2)
    assert np.array_equal(tree.posterior["one"].values, found.observables["one"])
    assert np.array_equal(tree.sample_stats["loss"].values, found.losses)
    assert set(tree.sample_stats.data_vars) == {"energy", "loss", "distance", "acceptance_rate"}
    summary = arviz_stats.summary(tree, var_names=["learning_coefficient"], round_to="none").iloc[0]
    diagnostics = found.diagnostics
    assert summary["mean"] == pytest.approx(found.energies.mean())
    assert summary["ess_bulk"] == pytest.approx(diagnostics.ess_bulk)
    assert summary["r_hat"] == pytest.approx(diagnostics.rhat)
    for ours, method in (
        (diagnostics.ess_mean, {"method": "mean"}),
        (diagnostics.ess_tail, {"method": "tail", "prob": (0.05, 0.95)}),
    ):
        theirs = arviz_stats.ess(tree, var_names=["learning_coefficient"], **method)
        assert float(theirs["learning_coefficient"]) == pytest.approx(ours)
    kept = run(draws=4, keep_parameters=True).to_arviz()
    assert kept.posterior["parameters"].dims == ("chain", "draw", "parameter")
