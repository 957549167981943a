"""Advice on least squares, where the Hessian of every sample is known exactly."""

import math
import re

import numpy as np
import pytest
import torch
from torch import nn

from lambdahat._core.rng import generator
from lambdahat.operators import hessian
from lambdahat.problem import Problem
from lambdahat.randommatrix import Advice, BatchLevels, advise, noise_levels, stability_limit
from lambdahat.randommatrix.advice_rules import in_words
from lambdahat.results import Estimate, Result
from tests.cases import classifier
from tests.randommatrix.test_advice_limits import exact_limit

SAMPLES, ORDER = 48, 4
ROWS = torch.randn(
    SAMPLES, ORDER, generator=generator(0, "advice"), dtype=torch.float64
) * torch.tensor([3.0, 1, 1, 1])
MATRICES = torch.einsum("ni,nj->nij", ROWS, ROWS)
MEAN = MATRICES.mean(0)
VALUES, VECTORS = torch.linalg.eigh(MEAN)
SHARPEST = float(VALUES[-1])
ALONG = float(((MATRICES - MEAN) @ VECTORS[:, -1]).square().sum(1).mean())
ELEMENT = float((MATRICES - MEAN).square().sum((1, 2)).mean()) / ORDER**2


def least_squares(rows, theta=None, sign=1.0):
    """½ of the mean of (x_iᵀθ)², so that H_i = x_i x_iᵀ."""
    at = torch.ones(rows.shape[1], dtype=torch.float64) if theta is None else theta
    return Problem.from_function(
        lambda p, x: sign * 0.5 * (x @ p["theta"]).square().mean(), {"theta": at}, rows
    )


PROBLEM = least_squares(ROWS)


def share(batch_size):
    """Of the variance over samples that is left in the mean of a batch drawn without
    replacement.
    """
    return (SAMPLES - batch_size) / (batch_size * (SAMPLES - 1))


@pytest.mark.parametrize(
    ("optimizer", "factor"), [("sgd", 2.0), ("momentum", 3.8), ("nesterov", 3.8 / 2.8)]
)
def test_with_all_data_the_limits_are_the_textbook_ones(optimizer, factor):
    found = advise(PROBLEM, optimizer, SAMPLES)
    assert math.isclose(float(found["largest stable rate"]), factor / SHARPEST, rel_tol=1e-9)
    assert float(found["scaling exponent"]) == 0.0
    assert found.cautions == ()


def test_the_measured_numbers_are_the_exact_ones():
    levels = advise(PROBLEM, batch_size=4).levels
    assert math.isclose(float(levels.largest), SHARPEST, rel_tol=1e-9)
    assert math.isclose(float(levels.smallest), float(VALUES[0]), rel_tol=1e-9)
    assert math.isclose(float(levels.tau2), ALONG, rel_tol=1e-9)
    assert math.isclose(float(levels.variance), ELEMENT, rel_tol=1e-9)
    b = 4 / (1 - 4 / SAMPLES)
    assert levels.view(4).effective == b
    assert math.isclose(float(levels.expected_excess(b)), ALONG * share(4) / SHARPEST)
    few = levels.view(4).measured
    assert abs(float(few) - np.linalg.eigvalsh(_batches(4).numpy())[:, -1].mean()) < 4 * float(
        few.stderr
    )


def _batches(size, draws=2000):
    rng = np.random.default_rng(0)
    return MATRICES[
        torch.tensor(np.stack([rng.permutation(SAMPLES)[:size] for _ in range(draws)]))
    ].mean(1)


def test_the_rate_moves_with_its_limit():
    found = advise(PROBLEM, "sgd", 2, 16, learning_rate=0.01)
    old, new = found["largest stable rate", 2], found["largest stable rate", 16]
    assert math.isclose(float(found["learning rate", 16]), 0.01 * float(new) / float(old))
    exponent = math.log(float(new) / float(old)) / math.log(8)
    assert math.isclose(float(found["scaling exponent"]), exponent)
    assert float(found["learning rate"].stderr) > 0
    assert f"{0.01 / float(old):.0%} of the limit at 2" in found.recommendations[2].reason


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "nesterov"])
def test_at_the_end_of_scaling_the_limit_is_half_that_of_all_data(optimizer):
    """Of two samples alike but for their length all is known: τ² = Var_i(h_i) at any batch size."""
    rows = torch.sqrt(torch.tensor([0.01, 0.01, 0.01, 3.97])).double().repeat(10)[:, None]
    found = advise(least_squares(rows), optimizer, 8)
    end, rho, noise = (
        float(found["end of scaling"]),
        found.momentum,
        0.75 * 0.99**2 + 0.25 * 2.97**2,
    )
    excess = noise * (40 - end) / (end * 39)
    half = stability_limit(1.0, 0.0, rho, optimizer == "nesterov") / 2
    assert math.isclose(
        stability_limit(1.0, excess, rho, optimizer == "nesterov"), half, rel_tol=1e-6
    )
    assert 0.05 * end < found["end of scaling"].interval()[1] - end < 0.6 * end


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_flatter_noisier_direction_sets_the_limit(momentum):
    """Along the first axis all samples are alike; along the second, one of ten has all the
    curvature.
    """
    rows = torch.zeros(20, 2, dtype=torch.float64)
    rows[:, 0], rows[0, 1], rows[1, 1] = 2.0, 3.0, -3.0
    found = advise(least_squares(rows), "momentum", 2, momentum=momentum)
    expected = exact_limit(rows.numpy(), 2, momentum)
    assert expected < 0.8 * stability_limit(4.0, 0.0, momentum)
    assert math.isclose(float(found["largest stable rate"]), expected, rel_tol=1e-3)
    assert "eigenvector 2, noisier" in found.recommendations[0].reason


def test_the_end_of_scaling_names_the_direction_that_sets_it():
    """As above: no noise along the first axis, and b* = n/(2λ₁ − λ₂) of the second, where a
    batch adds n/b to λ₂.
    """
    rows = torch.zeros(20, 2, dtype=torch.float64)
    rows[:, 0], rows[0, 1], rows[1, 1] = 2.0, 3.0, -3.0
    found = advise(least_squares(rows), "sgd", 20)
    b = (0.1 * (81 + 36) - 0.81) / 0.9 * 20 / 19 / (2 * 4.0 - 0.9)
    assert math.isclose(float(found["end of scaling"]), b / (1 + b / 20), rel_tol=1e-6)
    reason = found.recommendations[-1].reason
    assert (
        f"near {b:.3g} along eigenvector 2, noisier than the sharpest direction; along that it"
        " would be" in reason
    )
    alone = (
        advise(least_squares(rows[:, :1] + torch.arange(20)[:, None]), "sgd", 20)
        .recommendations[-1]
        .reason
    )
    assert re.search(
        r"more than half that of all data; without momentum it is near τ²/λ₁² = 0\.\d", alone
    )


@pytest.mark.parametrize(
    ("tau2", "words"),
    [
        (0.5, "at B = 1 the limit is already more than half"),
        (0.9, "limit may already be more than half"),
        (1.2, "the limit is half that of all data there"),
    ],
)
def test_the_end_of_scaling_is_no_surer_of_one_sample_than_its_error(tau2, words):
    """Curvatures 1 ± τ of two kinds of samples, so many that b* = τ² is B* but for 1/N: its
    error is MODEL of it.
    """
    kinds = torch.tensor([1 - math.sqrt(tau2), 1 + math.sqrt(tau2)], dtype=torch.float64)
    rows = kinds.abs().sqrt().repeat(2000)[:, None]
    found = advise(
        Problem.from_function(
            lambda p, x: 0.5 * (x[:, 1] * (x[:, 0] * p["w"]).square()).mean(),
            {"w": torch.ones(1).double()},
            torch.cat([rows, kinds.sign().repeat(2000)[:, None]], 1),
        ),
        "sgd",
        4000,
    )
    assert words in found.recommendations[-1].reason
    end = found["end of scaling"]
    assert math.isclose(float(end), max(tau2, 1.0), rel_tol=1e-2)
    assert (float(end.stderr) == 0) == (tau2 == 0.5)


def test_without_noise_scaling_has_ended_at_one_sample():
    found = advise(least_squares(torch.ones(20, 2).double()), "momentum", 4)
    assert float(found["end of scaling"]) == 1.0
    assert "at B = 1 the limit is already" in found.recommendations[-1].reason
    assert math.isclose(float(found["largest stable rate"]), 2 * 1.9 / 2, rel_tol=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "name", "rate"),
    [("lanczos-newton", "least damping", 1.0), ("adam", "least epsilon", 1e-3)],
)
def test_damping_is_the_mended_equation(optimizer, name, rate):
    found = advise(PROBLEM, optimizer, 4, 8)
    for size in (4, 8):
        assert math.isclose(
            float(found[name, size]), rate * ALONG * share(size) / (2 * SHARPEST), rel_tol=1e-9
        )
        isotropic = rate * ORDER * ELEMENT * share(size) / (2 * SHARPEST)
        assert math.isclose(float(found[f"{name}, isotropic noise", size]), isotropic, rel_tol=1e-9)
        assert math.isnan(float(found[name, size].stderr))
    assert "order of magnitude at best" in found.cautions[0]
    halved = advise(PROBLEM, optimizer, 4, learning_rate=rate / 2)
    assert math.isclose(float(halved[name]), float(found[name]) / 2, rel_tol=1e-9)


def test_kfac_is_advised_from_the_gauss_newton_matrix():
    problem = classifier()
    found = advise(problem, "kfac", 5, batches=3)
    assert found.levels.operator == "ggn"
    assert str(found.levels.smallest) == "at least 0"
    assert float(found["least damping"]) > 0


def test_adam_scales_by_the_root_and_says_that_its_error_is_unknown():
    found = advise(PROBLEM, "adam", 4, 16, learning_rate=0.01)
    assert float(found["learning rate", 16]) == 0.02
    assert math.isnan(float(found["learning rate", 16].stderr))
    gradients = ROWS * (ROWS @ torch.ones(ORDER).double())[:, None]
    mean = gradients.mean(0)
    size = mean.square().mean() + (gradients - mean).square().mean() * share(4)
    assert math.isclose(float(found["typical √v"]), math.sqrt(size), rel_tol=1e-9)
    assert "pass steps" in found.cautions[-1]


def axes_problem(size=5):
    """Every sample along its own axis: H̄ = I, and each batch of one has λ₁ = size exactly."""
    return least_squares(math.sqrt(size) * torch.eye(size, dtype=torch.float64))


def test_a_prediction_that_misses_is_named():
    found = advise(axes_problem(), "sgd", 1)
    assert math.isclose(float(found["largest stable rate"]), 2 / 5, rel_tol=1e-4)
    assert found["largest stable rate"].interval()[0] > 0.39
    (caution,) = [each for each in found.cautions if "predicted differently" in each]
    assert re.search(
        r"batches of 1 was measured as 5 but predicted differently \(4\..* from isotropic", caution
    )


def test_training_finds_the_same_limit_where_it_is_exact():
    found = advise(axes_problem(), "sgd", 1, steps=150)
    assert math.isclose(float(found["stable rate by training", 1]), 2 / 5, rel_tol=0.05)
    assert not [each for each in found.cautions if "by training" in each]


def test_a_rate_above_the_limit_is_a_caution():
    for rate, words in (
        (0.9, "0.9 is above the limit at 1, 0.3"),
        (0.4, "0.4 may be above the limit"),
    ):
        assert words in " ".join(advise(axes_problem(), "sgd", 1, learning_rate=rate).cautions)
    assert "be above" not in " ".join(advise(axes_problem(), "sgd", 1, learning_rate=0.2).cautions)


def test_a_saddle_is_a_caution():
    rows = torch.tensor([[2.0, 1.0], [2.0, 1.0], [2.0, 1.0]]).double()
    problem = Problem.from_function(
        lambda p, x: 0.5 * (x[:, 0].square() * p["w"][0] ** 2 - p["w"][1] ** 2).mean(),
        {"w": torch.ones(2).double()},
        rows,
    )
    assert any("smallest eigenvalue is -1" in each for each in advise(problem, "sgd", 3).cautions)


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (0.95, 0.01, "linear scaling"),
        (0.5, 0.05, "square-root scaling"),
        (0.02, 0.01, "hardly any scaling"),
        (0.5, math.nan, "how, is unknown"),
        (0.5, 0.5, "anything from hardly any to linear scaling"),
        (0.7, 0.1, "anything from square-root to linear scaling"),
    ],
)
def test_words_are_no_surer_than_the_interval(value, error, words):
    assert in_words(Estimate(value, error)) == words


def test_it_prints_tabulates_saves_and_loads(tmp_path):
    found = advise(PROBLEM, "momentum", 4, 8, learning_rate=0.001)
    text = str(found)
    first, second = text.splitlines()[:2]
    low, high = found["learning rate"].interval()
    assert (
        first
        == f"use lr ≈ {float(found['learning rate']):.3g} ({low:.3g} to {high:.3g}) at batch 8, for"
        " this point of training"
    )
    assert second == "momentum 0.9, 4 parameters, 48 samples"
    assert f"λ₁ = {SHARPEST:.4g}" in text
    rows = found.table()
    assert [row["name"] for row in rows] == [
        "largest stable rate",
        "largest stable rate",
        "learning rate",
        "scaling exponent",
        "end of scaling",
    ]
    assert rows[0]["low"] < rows[0]["value"] < rows[0]["high"]
    assert all(row["reason"] for row in rows)
    found.save(tmp_path / "advice")
    again = Result.load(tmp_path / "advice")
    assert isinstance(again, Advice)
    assert str(again) == text
    assert again.cost == found.cost > 0


def test_the_same_seed_gives_the_same_advice():
    assert str(advise(PROBLEM, "sgd", 4, seed=3)) == str(advise(PROBLEM, "sgd", 4, seed=3))


def test_sgd_takes_a_momentum():
    given, named = advise(PROBLEM, "sgd", 4, momentum=0.9), advise(PROBLEM, "momentum", 4)
    assert float(given["largest stable rate"]) == float(named["largest stable rate"])
    assert given.rule == "sgd 0.9"
    assert float(advise(PROBLEM, "sgd", 4)["largest stable rate"]) > 2 * float(
        named["largest stable rate"]
    )


def test_the_default_batch_is_all_data_where_that_is_fewer_than_128():
    assert advise(PROBLEM).recommendations[0].batch_size == SAMPLES


def test_of_the_smallest_eigenvalues_only_one_is_looked_for(monkeypatch):
    """Flat directions crowd, and ten of them cost far more than the ten sharpest: none is ever
    used.
    """
    asked = []
    whole = noise_levels.eigenpairs
    monkeypatch.setattr(
        noise_levels,
        "eigenpairs",
        lambda a, k, which, *rest, **named: (
            asked.append((which, k)),
            whole(a, k, which, *rest, **named),
        )[1],
    )
    advise(PROBLEM, "sgd", SAMPLES)
    assert asked == [("largest", ORDER), ("smallest", 1)]
    asked.clear()
    advise(classifier(), "kfac", 5, batches=2)
    assert asked == [("largest", 10)]


def at_the_minimum(samples=60):
    """Least squares with residuals, at its solution: no gradient over all data, but one in every
    batch.
    """
    x = torch.randn(samples, 3, generator=generator(0, "minimum"), dtype=torch.float64)
    y = x.sum(1, keepdim=True) + 0.5 * torch.randn(
        samples, 1, generator=generator(1, "minimum"), dtype=torch.float64
    )
    best = torch.linalg.lstsq(x, y).solution
    return Problem.from_function(
        lambda p, batch: 0.5 * (batch[0] @ p["w"] - batch[1]).square().mean(), {"w": best}, (x, y)
    )


def test_training_from_a_minimum_finds_the_limit_above_the_noise():
    """The rule's limit is exact to its error on a quadratic, also where any step raises the
    loss.
    """
    found = advise(at_the_minimum(), "sgd", 10, steps=100)
    trained, rule = (
        float(found[name, 10]) for name in ("stable rate by training", "largest stable rate")
    )
    assert 0.8 * rule < trained < 1.5 * rule
    assert "what noise explains" in found.recommendations[-1].reason


def test_a_search_that_fails_is_a_caution():
    # every sample's gradient is 0
    flat = least_squares(ROWS, theta=torch.zeros(ORDER, dtype=torch.float64))
    found = advise(flat, "sgd", 4, steps=5)
    assert "training with batches of 4 found no limit" in found.cautions[-1]
    assert float(found["largest stable rate"]) > 0


def test_a_loss_below_0_can_be_trained_on():
    below = Problem.from_function(
        lambda p, x: 0.5 * (x @ p["w"]).square().mean() - 50,
        {"w": torch.ones(ORDER).double()},
        ROWS,
    )
    found = advise(below, "sgd", SAMPLES, steps=100)
    assert math.isclose(float(found["stable rate by training"]), 2 / SHARPEST, rel_tol=0.06)


LAYERS = {"running statistics": nn.BatchNorm1d(3), "dropout is off": nn.Dropout(0.5)}


@pytest.mark.parametrize("words", LAYERS)
def test_layers_that_act_otherwise_in_training_are_a_caution(words):
    net = nn.Sequential(nn.Linear(2, 3), LAYERS[words], nn.Tanh(), nn.Linear(3, 2)).double()
    x = torch.randn(12, 2, generator=generator(0, "layers"), dtype=torch.float64)
    found = advise(Problem(net, "cross_entropy", (x, (x[:, 0] > 0).long())), "sgd", 4, batches=2)
    assert words in found.cautions[0]


def test_a_well_fitted_classifier_in_single_precision_gets_advice():
    x = torch.randn(40, 4, generator=generator(0, "fitted"))
    net = nn.Linear(4, 2)
    with torch.no_grad():
        net.bias.zero_()
        net.weight.zero_()
        net.weight[:, 0] = torch.tensor([-60.0, 60.0])
    problem = Problem(net, "cross_entropy", (x, (x[:, 0] > 0).long()))
    found = advise(problem, "sgd", 4, batches=3)
    levels = found.levels
    assert float(levels.largest) < 1e-3
    rule = stability_limit(
        float(levels.largest), float(levels.expected_excess(levels.view(4).effective))
    )
    assert float(found["largest stable rate"]) <= rule * (1 + 1e-9)


def normed_network(seed=0, samples=24, batch_size=6):
    """A network with batch-norm by the batch's statistics, in double precision."""
    x = torch.randn(samples, 2, generator=generator(seed, "normed"), dtype=torch.float64)
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 2)).double()
    return Problem(
        net, "cross_entropy", (x, (x[:, 0] > 0).long()), norm="train", batch_size=batch_size
    )


def dense_sharpness(problem, size, draws=100):
    """λ₁ of the dense Hessians of random batches, each normalised by itself."""
    rng = np.random.default_rng(0)
    chosen = [torch.tensor(rng.permutation(problem.num_samples)[:size]) for _ in range(draws)]
    return np.array(
        [
            float(torch.linalg.eigvalsh(hessian(problem.subset(each, size)).dense())[-1])
            for each in chosen
        ]
    )


def test_with_batch_statistics_the_rate_is_that_of_the_batches_alone():
    problem = normed_network()
    found = advise(problem, "sgd", 6, 12, learning_rate=0.1, batches=12)
    assert isinstance(found.levels, BatchLevels)
    names = [each.name for each in found.recommendations]
    assert names == [
        "largest stable rate",
        "largest stable rate",
        "learning rate",
        "scaling exponent",
    ]
    for size in (6, 12):
        exact, seen = dense_sharpness(problem, size), found.levels.view(size)
        assert abs(float(seen.measured) - exact.mean()) < 4 * math.hypot(
            float(seen.measured.stderr), exact.std() / 10
        )
        assert math.isclose(float(found["largest stable rate", size]), 2 / float(seen.sharpness))
        low, high = found["largest stable rate", size].interval()
        assert low < 2 / exact.mean() < high
        assert 2 / (exact.mean() + exact.std()) > low  # the batches' own spread is in the error
        assert seen.predicted == {}
    assert "training may bear far higher rates" in found.cautions[0]
    assert all(
        "nothing is predicted from all data" in each.reason for each in found.recommendations[:2]
    )
    ratio = float(found["largest stable rate", 12]) / float(found["largest stable rate", 6])
    assert math.isclose(float(found["learning rate", 12]), 0.1 * ratio)
    assert math.isclose(float(found["scaling exponent"]), math.log2(ratio))


@pytest.mark.parametrize(
    ("optimizer", "factor"), [("sgd", 2.0), ("momentum", 3.8), ("nesterov", 3.8 / 2.8)]
)
def test_one_batch_of_all_data_has_the_textbook_limit_with_batch_statistics_too(optimizer, factor):
    problem = normed_network(batch_size=24)
    sharpest = float(torch.linalg.eigvalsh(hessian(problem).dense())[-1])
    found = advise(problem, optimizer, 24)
    assert math.isclose(float(found["largest stable rate"]), factor / sharpest, rel_tol=1e-5)


@pytest.mark.parametrize("optimizer", ["momentum", "nesterov"])
def test_with_batch_statistics_and_momentum_two_rates_hold_every_split_of_signal_and_noise(
    optimizer,
):
    found = advise(normed_network(), optimizer, 6, batches=6)
    low, high = (float(found[f"largest stable rate, {name}"]) for name in ("all noise", "no noise"))
    s = float(found.levels.view(6).sharpness)
    for share in (1e-6, 0.1, 0.5, 0.9, 1 - 1e-6):
        limit = stability_limit((1 - share) * s, share * s, 0.9, optimizer == "nesterov")
        assert low * (1 - 1e-3) <= limit <= high * (1 + 1e-3)
    moved = advise(normed_network(), optimizer, 6, 12, learning_rate=0.01, batches=3)
    assert {each.name for each in moved.recommendations} == {
        each.name for each in found.recommendations
    }
    assert "that is unknown" in " ".join(moved.cautions)
    assert (
        "may be above"
        in advise(normed_network(), optimizer, 6, batches=6, learning_rate=low).cautions[-1]
    )


def test_with_batch_statistics_training_finds_a_rate(tmp_path):
    found = advise(normed_network(), "adam", 6, batches=3, steps=20)
    assert [each.name for each in found.recommendations] == ["stable rate by training"]
    assert float(found["stable rate by training"]) > 0
    found.save(tmp_path / "advice")
    assert str(Result.load(tmp_path / "advice")) == str(found)


DATALESS = Problem.from_function(
    lambda p: p["w"].square().sum(), {"w": torch.ones(2).double()}, num_samples=100
)
NORMED = Problem(
    nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)),
    "mse",
    (torch.randn(8, 2), torch.zeros(8, 3)),
    norm="train",
    batch_size=4,
)
MISUSES = {
    "a model": (lambda: advise(nn.Linear(1, 1)), TypeError, "problem must be a lambdahat.Problem"),
    "unknown optimiser": (
        lambda: advise(PROBLEM, "lbfgs", 4),
        ValueError,
        "be one of 'sgd', 'momentum', 'nesterov'",
    ),
    "batch beyond the data": (
        lambda: advise(PROBLEM, "sgd", 64),
        ValueError,
        r"batch_size must .* \[1, 48\]",
    ),
    "new batch beyond the data": (
        lambda: advise(PROBLEM, "sgd", 4, 64),
        ValueError,
        "new_batch_size must .*than the",
    ),
    "the same batch": (
        lambda: advise(PROBLEM, "sgd", 4, 4),
        ValueError,
        "new_batch_size must differ from batch_size",
    ),
    "empty batch": (
        lambda: advise(PROBLEM, "sgd", 0),
        ValueError,
        "batch_size must be an integer in",
    ),
    "no data": (lambda: advise(DATALESS, "sgd", 4), ValueError, "problem must be a loss over data"),
    "a maximum": (
        lambda: advise(least_squares(ROWS, sign=-1.0), "sgd", 4),
        ValueError,
        "the largest eigenvalue of the hessian must be above 0.*train further",
    ),
    "rate of 0": (
        lambda: advise(PROBLEM, "sgd", 4, learning_rate=0.0),
        ValueError,
        "learning_rate must be a finite",
    ),
    "momentum of 1": (
        lambda: advise(PROBLEM, "momentum", 4, momentum=1.0),
        ValueError,
        r"must lie in \[0, 1\)",
    ),
    "momentum as text": (
        lambda: advise(PROBLEM, "momentum", 4, momentum="0.9"),
        TypeError,
        "must be a number in",
    ),
    "momentum of adam": (
        lambda: advise(PROBLEM, "adam", 4, momentum=0.9),
        ValueError,
        "momentum must be left out with 'adam', got 0.9",
    ),
    "momentum of kfac": (
        lambda: advise(classifier(), "kfac", 4, momentum=0.0),
        ValueError,
        "left out with 'kfac'",
    ),
    "one sample in all": (
        lambda: advise(least_squares(ROWS[:1])),
        ValueError,
        "two samples or more, got 1",
    ),
    "a factor of 0": (
        lambda: advise(PROBLEM, "sgd", 4, steps=5, factor=0.0),
        ValueError,
        "factor must be a finite",
    ),
    "damping of batch-norm": (
        lambda: advise(NORMED, "kfac", 4),
        ValueError,
        "or come with steps .* got 'kfac'",
    ),
    "Adam's ε of batch-norm": (
        lambda: advise(NORMED, "adam", 4),
        ValueError,
        "leave no sample a curvature",
    ),
    "samples of batch-norm": (
        lambda: advise(NORMED, "sgd", 4, samples=4),
        ValueError,
        "samples must be left out",
    ),
    "one batch": (
        lambda: advise(PROBLEM, "sgd", 4, batches=1),
        ValueError,
        "batches must .*shows no error",
    ),
    "one sample": (
        lambda: advise(PROBLEM, "sgd", 4, samples=1),
        ValueError,
        r"samples must be .*\[2, 48\]",
    ),
    "kfac of a function": (
        lambda: advise(PROBLEM, "kfac", 4),
        TypeError,
        "made of a model and a loss of its output",
    ),
    "training of kfac": (
        lambda: advise(classifier(), "kfac", 4, steps=5),
        ValueError,
        "steps must be .*any torch",
    ),
    "unknown advice": (
        lambda: advise(PROBLEM, "sgd", 4)["damping"],
        KeyError,
        "be one of 'largest stable rate', 4",
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse(name):
    call, error, text = MISUSES[name]
    with pytest.raises(error, match=text):
        call()
