"""WAIC, functional variance, Bayes and Gibbs losses, G_n and reweighting, against closed forms
and quadrature.
"""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import signal

from lambdahat._core.rng import generator
from lambdahat.problem import Problem
from lambdahat.results import Estimate, Result, Status
from lambdahat.sampling import hmc, sample, sgld
from lambdahat.singular import bayes
from lambdahat.singular.bayes import _over_samples, bayes_criteria
from lambdahat.singular.observables import (
    Reweighting,
    in_stretches,
    jackknife,
    join_stretches,
    reweighted,
)
from tests.cases import classifier
from tests.singular.regression import Coin, Regression, regression

KNOWN = regression(30, 3)
HELD_OUT = KNOWN.more(50, seed=7)
SETTINGS = {"kernel": "hmc", "step_size": 0.04, "burn_in": 30, "localization": KNOWN.gamma}
READINGS = (
    "bayes_training_loss",
    "gibbs_training_loss",
    "functional_variance",
    "waic",
    "bayes_generalisation_loss",
    "gibbs_generalisation_loss",
)


def exact(model: Regression, held_out) -> dict[str, float]:
    bayes, gibbs, variance = model.by_sample(model.x, model.y)
    elsewhere = [float(part.mean()) for part in model.by_sample(*held_out)]
    values = [bayes.mean(), gibbs.mean(), variance.sum(), (bayes + variance).mean(), *elsewhere[:2]]
    return {name: float(value) for name, value in zip(READINGS, values, strict=True)}


@pytest.fixture(scope="module")
def runs():
    return [
        bayes_criteria(KNOWN.problem, HELD_OUT, seed=seed, draws=120, **SETTINGS)
        for seed in range(3)
    ]


def coin_chains(coin: Coin, nbeta: float, draws: int = 400, **options):
    return sample(
        coin.problem, hmc(0.2, nbeta, coin.gamma, leapfrog=3), 4, draws, burn_in=20, **options
    )


def draws_error(result, name: str) -> float:
    """The part of the error that the draws have."""
    return (
        result.g_n_draws_error
        if name == "bayes_generalisation_loss"
        else float(getattr(result, name).stderr)
    )


@pytest.mark.parametrize("name", READINGS[:-1])
def test_readings_agree_with_closed_forms_within_their_errors(runs, name):
    errors = [draws_error(run, name) for run in runs]
    assert 0 < np.median(errors) < 0.1 * exact(KNOWN, HELD_OUT)[name]
    z = [
        (float(getattr(run, name)) - exact(KNOWN, HELD_OUT)[name]) / e
        for run, e in zip(runs, errors, strict=True)
    ]
    assert 0.1 < math.sqrt(np.mean(np.square(z))) < 2.2


def test_gibbs_generalisation_loss(runs):
    value = np.mean([float(run.gibbs_generalisation_loss) for run in runs])
    assert value == pytest.approx(exact(KNOWN, HELD_OUT)["gibbs_generalisation_loss"], abs=0.02)


@pytest.mark.slow
def test_intervals_cover():
    wanted = exact(KNOWN, HELD_OUT)
    inside: dict[str, list[bool]] = {name: [] for name in READINGS[:-1]}
    for seed in range(40):
        run = bayes_criteria(KNOWN.problem, HELD_OUT, seed=100 + seed, draws=250, **SETTINGS)
        for name, seen in inside.items():
            seen.append(abs(float(getattr(run, name)) - wanted[name]) < 2 * draws_error(run, name))
    assert all(np.mean(seen) >= 0.85 for seen in inside.values()), {
        k: np.mean(v) for k, v in inside.items()
    }


def test_nothing_need_be_given():
    run = bayes_criteria(KNOWN.problem, HELD_OUT, chains=2, max_gradients=6000)
    wanted = exact(KNOWN, HELD_OUT)
    assert run.chains.kernel == "HMC"
    assert run.ess > 50
    for name in READINGS[:-1]:
        assert (
            abs(float(getattr(run, name)) - wanted[name])
            < 3.5 * draws_error(run, name)
            < 0.5 * wanted[name]
        )


def test_fluctuation_is_half_the_variance(runs):
    for run in runs:
        assert float(run.singular_fluctuation) == float(run.functional_variance) / 2
        assert float(run.singular_fluctuation.stderr) == float(run.functional_variance.stderr) / 2
        assert (run.how, run.g_n_from, run.status) == (
            "own chains",
            "held-out data",
            run.chains.status,
        )
        assert run.chains.nbeta == 30
        assert run.cost == run.chains.cost > 0
        assert not run.chains.averages


def test_g_n_is_the_mean_rise_of_the_free_energy(runs):
    """E[F_{n+1}] − F_n over the held-out samples, F by the closed form of the marginal
    likelihood.
    """
    rises = []
    for x, y in zip(*HELD_OUT, strict=True):
        more = dataclasses.replace(
            KNOWN, x=torch.vstack([KNOWN.x, x]), y=torch.cat([KNOWN.y, y.reshape(1)])
        )
        rises.append(more.free_energy() - KNOWN.free_energy())
    run = runs[0]
    assert abs(float(run.g_n) - np.mean(rises)) < 4 * run.g_n_draws_error
    among = np.std(rises, ddof=1) / math.sqrt(len(rises))
    assert float(run.g_n.stderr) == pytest.approx(math.hypot(run.g_n_draws_error, among), rel=0.05)
    assert run.g_n == run.bayes_generalisation_loss


def test_without_held_out_data_g_n_is_the_waic():
    run = bayes_criteria(KNOWN.problem, draws=40, chains=2, **SETTINGS)
    assert run.bayes_generalisation_loss is None
    assert run.gibbs_generalisation_loss is None
    assert run.g_n_from == "WAIC"
    assert float(run.g_n) == float(run.waic)
    assert run.g_n_draws_error == float(run.waic.stderr)
    bayes, _, variance = KNOWN.by_sample(KNOWN.x, KNOWN.y)
    among = float((bayes + variance).std()) / math.sqrt(30)
    assert float(run.g_n.stderr) == pytest.approx(math.hypot(run.g_n_draws_error, among), rel=0.1)


@pytest.mark.parametrize("source", ["WAIC", "held-out data"])
def test_error_over_samples_covers_g_n(source):
    """With the posterior exact, over data sets: the interval of ``_over_samples`` holds −E_x ln
    E[p(x|w)].
    """
    inside = []
    for seed in range(200):
        model = regression(60, 3, gamma=0.01, seed=seed)
        truth = float(model.by_sample(*model.more(20_000, seed=1000 + seed))[0].mean())
        x, y = (model.x, model.y) if source == "WAIC" else model.more(60, seed=3000 + seed)
        bayes, _, variance = model.by_sample(x, y)
        values = (bayes + variance if source == "WAIC" else bayes).numpy()
        low, high = _over_samples(Estimate(float(values.mean())), values).interval()
        inside.append(low < truth < high)
    assert 0.90 <= np.mean(inside) <= 0.99


def test_chains_that_cannot_move_show_the_centre():
    run = bayes_criteria(KNOWN.problem, HELD_OUT, chains=2, draws=8, kernel="hmc", step_size=0.0)
    assert float(run.functional_variance) == float(run.functional_variance.stderr) == 0
    assert float(run.waic) == pytest.approx(KNOWN.problem.loss(), rel=1e-12)
    assert run.status is Status.NOT_MOVING


def test_draws_with_parameters_give_what_streaming_gives(monkeypatch):
    def drawn(problem, nbeta, averages=None, **options):
        return sample(
            problem, hmc(0.02, nbeta, KNOWN.gamma), 2, 40, averages=averages, keep_parameters=True
        )

    monkeypatch.setattr(
        bayes, "draw", lambda *args, **options: SimpleNamespace(chains=drawn(*args, **options))
    )
    given = bayes_criteria(
        KNOWN.problem, KNOWN.problem.on(HELD_OUT), chains=drawn(KNOWN.problem, 30.0)
    )
    streamed = bayes_criteria(KNOWN.problem, HELD_OUT, chains=2)
    assert given.how == streamed.how == "own chains"
    for name in READINGS:
        first, second = getattr(given, name), getattr(streamed, name)
        assert float(first) == pytest.approx(float(second), rel=1e-9)
        assert float(first.stderr) == pytest.approx(float(second.stderr), rel=1e-6)


def test_reweighting_from_another_temperature_against_quadrature():
    coin = Coin()
    chains = coin_chains(coin, 20 / math.log(20), keep_parameters=True)
    run = bayes_criteria(coin.problem, chains=chains)
    assert run.how == "reweighted"
    assert 100 < run.ess < 1600
    assert run.status is Status.CONVERGED
    signs = 1 - 2 * coin.outcomes.numpy()
    loss = [lambda w, s=s: np.logaddexp(0, s * w) for s in signs]
    bayes = -np.mean([math.log(coin.mean(lambda w, f=f: np.exp(-f(w)), 20)) for f in loss])
    variance = sum(coin.mean(lambda w, f=f: f(w) ** 2, 20) - coin.mean(f, 20) ** 2 for f in loss)
    for found, wanted in (
        (run.bayes_training_loss, bayes),
        (run.gibbs_training_loss, coin.mean(coin.loss, 20)),
        (run.functional_variance, variance),
        (run.waic, bayes + variance / 20),
    ):
        assert abs(float(found) - wanted) < 3.5 * float(found.stderr)
        assert float(found.stderr) < 0.2 * abs(wanted)


def test_reweighted_means_and_their_effective_draws():
    coin = Coin()
    chains = coin_chains(coin, 7.0, draws=500)
    weighting = reweighted(chains, 14.0)
    assert weighting.weights.sum() == pytest.approx(1)
    assert weighting.ess == pytest.approx(1 / (weighting.weights**2).sum())
    share = coin.mean(lambda w: np.exp(-7 * coin.loss(w)), 7) ** 2 / coin.mean(
        lambda w: np.exp(-14 * coin.loss(w)), 7
    )
    assert weighting.ess / weighting.weights.size == pytest.approx(share, rel=0.1)
    mean = weighting.mean(chains.losses)
    assert abs(float(mean) - coin.mean(coin.loss, 14)) < 3.5 * float(mean.stderr)
    assert abs(float(mean) - coin.mean(coin.loss, 7)) > 5 * float(mean.stderr)


def test_reweighting_to_the_same_temperature_changes_nothing():
    chains = coin_chains(Coin(), 7.0, draws=40)
    same = reweighted(chains, 7.0)
    assert same.ess == pytest.approx(160)
    assert float(same.mean(chains.losses)) == pytest.approx(chains.losses.mean(), rel=1e-12)


def test_few_draws_with_all_the_weight_are_reported():
    many = regression(100, 20)
    chains = sample(
        many.problem, hmc(0.02, 100 / math.log(100), 1.0), 2, 60, burn_in=20, keep_parameters=True
    )
    weighting = reweighted(chains, 100.0)
    assert weighting.ess < 20
    assert weighting.status is Status.FEW_WEIGHTS
    assert bayes_criteria(many.problem, chains=chains).status is Status.FEW_WEIGHTS


def test_weights_need_losses_of_the_whole_data():
    chains = sample(KNOWN.problem, sgld(1e-3, 9.0, 1.0), 2, 10, batch_size=29)
    with pytest.raises(
        ValueError, match=r'full_energies must have losses over the whole data.*baseline="full"'
    ):
        reweighted(chains, 30.0)
    full = sample(KNOWN.problem, sgld(1e-3, 9.0, 1.0), 2, 10, batch_size=29, baseline="full")
    assert reweighted(full, 30.0).weights.sum() == pytest.approx(1)
    whole = sample(KNOWN.problem, sgld(1e-3, 9.0, 1.0), 2, 10)  # all 30 samples at every step
    assert reweighted(whole, 30.0).weights.sum() == pytest.approx(1)


def test_losses_of_batches_are_not_those_of_the_data_where_the_model_fits_exactly():
    """Every batch then has the loss at w* of the whole data: zero."""
    x = torch.randn(40, 3, generator=generator(0, "exact fit"), dtype=torch.float64)
    start = {"w": torch.zeros(3, dtype=torch.float64)}
    fit = Problem.from_function(lambda p, b: 0.5 * (b @ p["w"]).square().mean(), start, x)
    chains = sample(fit, sgld(1e-3, 9.0, 1.0), 2, 10, batch_size=5)
    assert not chains.on_whole_data
    with pytest.raises(ValueError, match="full_energies must have losses over the whole data"):
        reweighted(chains, 30.0)


def test_diverged_chains_are_left_out():
    chains = sample(KNOWN.problem, hmc(0.02, 30.0, 1.0), 3, 20, burn_in=5, keep_parameters=True)
    losses, parameters = chains.losses.copy(), chains.parameters.clone()
    losses[1], parameters[1] = np.nan, torch.nan
    diverged = dataclasses.replace(chains.diagnostics, diverged=np.array([False, True, False]))
    broken = dataclasses.replace(
        chains, losses=losses, parameters=parameters, diagnostics=diverged, status=Status.DIVERGED
    )
    run = bayes_criteria(KNOWN.problem, chains=broken)
    assert math.isfinite(float(run.waic))
    assert run.status is Status.DIVERGED
    weighting = reweighted(broken, 20.0)
    assert weighting.weights[1].sum() == 0
    assert math.isfinite(float(weighting.mean(losses)))
    every = dataclasses.replace(diverged, diverged=np.array([True] * 3))
    with pytest.raises(ValueError, match=r"only diverged chains; .*lower step_size"):
        bayes_criteria(KNOWN.problem, chains=dataclasses.replace(broken, diagnostics=every))


def test_a_classifier_with_batches():
    problem = classifier((4, 3), samples=20)
    run = bayes_criteria(
        problem, problem.subset(range(6)), chains=2, draws=40, **{**SETTINGS, "step_size": 0.05}
    )
    assert float(run.gibbs_training_loss) > float(run.bayes_training_loss)
    assert float(run.gibbs_generalisation_loss) > float(run.bayes_generalisation_loss)
    assert float(run.waic) > float(run.bayes_training_loss)


@pytest.mark.parametrize("kind", ["criteria", "weights"])
def test_results_go_to_disk_and_back(runs, kind, tmp_path):
    result = runs[0] if kind == "criteria" else reweighted(runs[0].chains, 20.0)
    again = Result.load(result.save(tmp_path / "result"))
    assert type(again) is type(result)
    if isinstance(result, Reweighting):
        assert np.array_equal(again.weights, result.weights)
    else:
        assert again.waic == result.waic
        assert again.g_n_from == result.g_n_from
        assert np.array_equal(again.chains.losses, result.chains.losses)


def test_bad_input_is_refused_by_name():
    problem, settings = KNOWN.problem, SETTINGS
    chains = sample(problem, hmc(0.02, 30.0, 1.0), 1, 2)
    with pytest.raises(ValueError, match=r"chains must hold the parameters .*keep_parameters=True"):
        bayes_criteria(problem, chains=chains)
    with pytest.raises(
        ValueError, match="settings must be left out where chains are given, got draws"
    ):
        bayes_criteria(problem, chains=chains, draws=5)
    kept = sample(problem, hmc(0.02, 30.0, 1.0), 1, 2, keep_parameters=True)
    with pytest.raises(
        ValueError, match="chains must be of a problem with 3 parameters and 20 samples"
    ):
        bayes_criteria(problem.subset(range(20)), chains=kept)
    with pytest.raises(TypeError, match="chains must be an integer"):
        bayes_criteria(problem, chains=2.5, **settings)
    with pytest.raises(TypeError, match=r"problem must be a lambdahat\.Problem"):
        bayes_criteria(torch.nn.Linear(2, 2))
    with pytest.raises(
        ValueError, match=r'kernel must have nbeta = 30, got one at 9; give its name, such as "hmc"'
    ):
        bayes_criteria(problem, kernel=hmc(0.02, 9.0))
    with pytest.raises(ValueError, match="held_out must have the problem's parameters"):
        bayes_criteria(problem, regression(5, 2).problem, **settings)
    population = Problem.from_function(
        lambda p: p["w"].square().sum(), {"w": torch.zeros(2)}, num_samples=100
    )
    with pytest.raises(ValueError, match="problem must have data, got a loss without any"):
        bayes_criteria(population, **settings)
    with pytest.raises(ValueError, match="values must have shape"):
        reweighted(chains, 20.0).mean(np.ones(3))
    with pytest.raises(ValueError, match="nbeta must be a finite number above 0"):
        reweighted(chains, -1.0)


def test_jackknife_of_a_variance_is_the_unbiased_one():
    values = torch.randn(4, 20, generator=generator(0, "jackknife"), dtype=torch.float64).numpy()
    mean, variance = jackknife(lambda a, b: np.array([a, b - a**2]), [values, values**2])
    assert float(mean) == pytest.approx(values.mean(), rel=1e-12)
    assert float(variance) == pytest.approx(values.var(ddof=1), rel=1e-12)
    assert float(mean.stderr) >= values.std(ddof=1) / math.sqrt(80)


@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_jackknife_errors_hold_for_correlated_draws(correlation):
    """ln of the mean of exp(x), x an autoregressive chain of unit variance: ½."""
    z = []
    for seed in range(150):
        noise = torch.randn(4, 400, generator=generator(seed, "ar"), dtype=torch.float64).numpy()
        noise[:, 1:] *= math.sqrt(1 - correlation**2)
        draws = signal.lfilter([1.0], [1.0, -correlation], noise, axis=1)
        (found,) = jackknife(lambda a: np.log(a)[None], [in_stretches(np.exp(draws))])
        z.append((float(found) - 0.5) / float(found.stderr))
    assert 0.8 < np.std(z) < 1.35
    assert 0.87 < np.mean(np.abs(z) < 2) < 0.99


def test_stretches_are_joined_by_their_lengths():
    lengths = [7] * 30 + [1] * 12 + [40]
    draws = torch.randn(
        3, sum(lengths), 2, generator=generator(0, "joined"), dtype=torch.float64
    ).numpy()
    cuts = np.cumsum(lengths)[:-1]
    means = np.stack([part.mean(axis=1) for part in np.split(draws, cuts, axis=1)], axis=1)
    weights, sums = join_stretches([means], lengths)
    assert weights.shape == sums.shape[:2]
    assert 12 <= weights.shape[1] <= 20
    assert weights.mean() == pytest.approx(1)
    assert sums.mean(axis=(0, 1)) == pytest.approx(draws.mean(axis=(0, 1)))
    first = math.ceil(weights[0, 0] * sum(lengths) / weights.shape[1] - 1e-9)
    assert sums[:, 0] / weights[:, 0, None] == pytest.approx(draws[:, :first].mean(axis=1))


def test_chains_tell_how_long_their_stretches_are():
    chains = sample(
        KNOWN.problem,
        hmc(0.02, 30.0),
        2,
        45,
        averages={"w": lambda theta: theta},
        keep_parameters=True,
    )
    weights, sums = join_stretches([chains.averages["w"]], chains.stretches)
    assert sum(chains.stretches) == 45
    assert sums.mean(axis=(0, 1)) / weights.mean() == pytest.approx(
        chains.parameters.mean(dim=(0, 1)).numpy()
    )


def test_one_stretch_has_no_error():
    (found,) = jackknife(lambda a: a[None], [np.full((1, 1), 2.0)])
    assert float(found) == 2.0
    assert math.isnan(float(found.stderr))
