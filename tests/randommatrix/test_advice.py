"""Advice on least squares, where the Hessian of every sample is known exactly."""

import math
import re

import numpy as np
import pytest
import torch
from torch import nn

from lambdahat._rng import generator
from lambdahat.problem import Problem
from lambdahat.randommatrix import Advice, advise, stability_limit
from lambdahat.randommatrix.advice_rules import in_words
from lambdahat.results import Estimate, Result
from tests.cases import classifier

SAMPLES, ORDER = 48, 4
ROWS = torch.randn(SAMPLES, ORDER, generator=generator(0, "advice"), dtype=torch.float64) * torch.tensor([3.0, 1, 1, 1])
MATRICES = torch.einsum("ni,nj->nij", ROWS, ROWS)
MEAN = MATRICES.mean(0)
VALUES, VECTORS = torch.linalg.eigh(MEAN)
SHARPEST = float(VALUES[-1])
ALONG = float(((MATRICES - MEAN) @ VECTORS[:, -1]).square().sum(1).mean())
ELEMENT = float((MATRICES - MEAN).square().sum((1, 2)).mean()) / ORDER**2


def least_squares(rows, theta=None, sign=1.0):
    """½ of the mean of (x_iᵀθ)², so that H_i = x_i x_iᵀ."""
    at = torch.ones(rows.shape[1], dtype=torch.float64) if theta is None else theta
    return Problem.from_function(lambda p, x: sign * 0.5 * (x @ p["theta"]).square().mean(), {"theta": at}, rows)


PROBLEM = least_squares(ROWS)


def limit(batch_size, momentum):
    """The lowest limit of all directions: the sharpest as many batches show it, with momentum others from their τ²."""
    noises = ((MATRICES - MEAN) @ VECTORS).square().sum(1).mean(0)
    b = batch_size / (1 - batch_size / SAMPLES)
    others = [stability_limit(float(v), float(n / (b * v)), momentum) for v, n in zip(VALUES, noises, strict=True)][:-1]
    sharpest = stability_limit(SHARPEST, sharpness(batch_size) - SHARPEST, momentum)
    return min([sharpest, *others]) if momentum else sharpest


def sharpness(batch_size, draws=4000):
    """E λ₁²/E λ₁ over many batches."""
    rng = np.random.default_rng(0)
    batches = np.stack([rng.permutation(SAMPLES)[:batch_size] for _ in range(draws)])
    values = np.linalg.eigvalsh(MATRICES.numpy()[batches].mean(1))[:, -1]
    return (values**2).mean() / values.mean()


@pytest.mark.parametrize(("optimizer", "factor"), [("sgd", 2.0), ("momentum", 3.8), ("nesterov", 3.8 / 2.8)])
def test_with_all_data_the_limits_are_the_textbook_ones(optimizer, factor):
    found = advise(PROBLEM, optimizer, SAMPLES)
    assert math.isclose(float(found["largest stable rate"]), factor / SHARPEST, rel_tol=1e-9)
    assert float(found["scaling exponent"]) == 0.0
    assert found.cautions == ()


def test_the_measured_numbers_are_the_exact_ones():
    levels = advise(PROBLEM, batch_size=4).levels
    assert math.isclose(float(levels.largest), SHARPEST, rel_tol=1e-9)
    assert math.isclose(float(levels.smallest), float(VALUES[0]), rel_tol=1e-9)
    assert math.isclose(float(levels.along), ALONG, rel_tol=1e-9)
    assert math.isclose(float(levels.variance), ELEMENT, rel_tol=1e-9)
    b = 4 / (1 - 4 / SAMPLES)
    assert levels.view(4).effective == b
    assert math.isclose(float(levels.expected_excess(b)), ALONG / b / SHARPEST)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_interval_of_the_limit_covers_what_many_batches_give(momentum):
    truth = limit(4, momentum)
    held = 0
    for seed in range(12):
        found = advise(PROBLEM, "momentum", 4, momentum=momentum, batches=12, seed=seed)
        low, high = found["largest stable rate", 4].interval()
        held += low <= truth <= high
    assert held >= 9


def test_the_rate_moves_with_its_limit():
    found = advise(PROBLEM, "sgd", 2, 16, learning_rate=0.01)
    old, new = found["largest stable rate", 2], found["largest stable rate", 16]
    assert math.isclose(float(found["learning rate", 16]), 0.01 * float(new) / float(old))
    exponent = math.log(float(new) / float(old)) / math.log(8)
    assert math.isclose(float(found["scaling exponent"]), exponent)
    assert float(found["learning rate"].stderr) > 0
    assert f"{0.01 / float(old):.0%} of the limit at 2" in found.recommendations[2].reason


def test_scaling_ends_where_the_limit_is_half_that_of_all_data():
    found = advise(PROBLEM, "sgd", 4, batches=40)
    end = float(found["end of scaling"])
    b = end / (1 - end / SAMPLES)
    excess = float(found.levels.excess(4)) * found.levels.view(4).effective / b
    assert math.isclose(stability_limit(SHARPEST, excess), 1 / SHARPEST, rel_tol=1e-9)


def test_with_momentum_a_flatter_noisier_direction_sets_the_limit():
    """Along the first axis all samples are alike; along the second, one of ten has all the curvature."""
    rows = torch.zeros(20, 2, dtype=torch.float64)
    rows[:, 0], rows[0, 1], rows[1, 1] = 2.0, 3.0, -3.0
    found = advise(least_squares(rows), "momentum", 2)
    b = 2 / (1 - 2 / 20)
    curvature, noise = 0.9, 0.1 * (81 + 36) - 0.81
    expected = stability_limit(curvature, noise / (b * curvature), 0.9)
    assert expected < 0.2 * stability_limit(4.0, 0.0, 0.9)
    assert math.isclose(float(found["largest stable rate"]), expected, rel_tol=0.02)
    assert "eigenvector 2 is noisier" in found.recommendations[0].reason


def test_where_noise_is_not_resolved_the_end_is_predicted_from_its_variance():
    found = advise(PROBLEM, "sgd", SAMPLES)
    b = ALONG / SHARPEST**2
    assert math.isclose(float(found["end of scaling"]), b / (1 + b / SAMPLES), rel_tol=1e-6)
    assert "not resolved" in next(each.reason for each in found.recommendations if each.name == "end of scaling")


@pytest.mark.parametrize(("optimizer", "name", "rate"), [
    ("lanczos-newton", "least damping", 1.0), ("adam", "least epsilon", 1e-3),
])  # fmt: skip
def test_damping_is_the_mended_equation(optimizer, name, rate):
    found = advise(PROBLEM, optimizer, 4, 8)
    for size in (4, 8):
        b = size / (1 - size / SAMPLES)
        assert math.isclose(float(found[name, size]), rate * ALONG / (2 * b * SHARPEST), rel_tol=1e-9)
        isotropic = rate * ORDER * ELEMENT / (2 * b * SHARPEST)
        assert math.isclose(float(found[f"{name}, isotropic noise", size]), isotropic, rel_tol=1e-9)
    halved = advise(PROBLEM, optimizer, 4, learning_rate=rate / 2)
    assert math.isclose(float(halved[name]), float(found[name]) / 2, rel_tol=1e-9)


def test_kfac_is_advised_from_the_gauss_newton_matrix():
    problem = classifier()
    found = advise(problem, "kfac", 5, batches=3)
    assert found.levels.curvature == "ggn"
    assert float(found.levels.smallest) > -1e-9
    assert float(found["least damping"]) > 0


def test_adam_scales_by_the_root_and_says_that_its_error_is_unknown():
    found = advise(PROBLEM, "adam", 4, 16, learning_rate=0.01)
    assert float(found["learning rate", 16]) == 0.02
    assert math.isnan(float(found["learning rate", 16].stderr))
    gradients = ROWS * (ROWS @ torch.ones(ORDER).double())[:, None]
    mean = gradients.mean(0)
    size = mean.square().mean() + (gradients - mean).square().mean() * (1 / 4 - 1 / SAMPLES)
    assert math.isclose(float(found["typical √v"]), math.sqrt(size), rel_tol=1e-9)
    assert "pass steps" in found.cautions[-1]


def axes_problem(size=5):
    """Every sample along its own axis: H̄ = I, and each batch of one has λ₁ = size exactly."""
    return least_squares(math.sqrt(size) * torch.eye(size, dtype=torch.float64))


def test_a_prediction_that_misses_is_named_and_the_measured_number_used():
    found = advise(axes_problem(), "sgd", 1)
    assert math.isclose(float(found["largest stable rate"]), 2 / 5)
    (caution,) = [each for each in found.cautions if "predicted otherwise" in each]
    assert re.search(r"batches of 1 was measured as 5 but predicted otherwise \(additive 4\.", caution)


def test_training_finds_the_same_limit_where_it_is_exact():
    found = advise(axes_problem(), "sgd", 1, steps=150)
    assert math.isclose(float(found["stable rate by training", 1]), 2 / 5, rel_tol=0.05)
    assert not [each for each in found.cautions if "by training" in each]


def test_a_rate_above_the_limit_is_a_caution():
    assert "0.9 is above the limit at 1, 0.4 to 0.4" in " ".join(
        advise(axes_problem(), "sgd", 1, learning_rate=0.9).cautions
    )
    assert "is above" not in " ".join(advise(axes_problem(), "sgd", 1, learning_rate=0.3).cautions)


def test_a_saddle_is_a_caution():
    rows = torch.tensor([[2.0, 1.0], [2.0, 1.0], [2.0, 1.0]]).double()
    problem = Problem.from_function(lambda p, x: 0.5 * (x[:, 0].square() * p["w"][0] ** 2 - p["w"][1] ** 2).mean(),
                                    {"w": torch.ones(2).double()}, rows)  # fmt: skip
    assert any("smallest eigenvalue is -1" in each for each in advise(problem, "sgd", 3).cautions)


@pytest.mark.parametrize(("value", "error", "words"), [
    (0.95, 0.01, "linear scaling"), (0.5, 0.05, "square-root scaling"), (0.02, 0.01, "hardly any scaling"),
    (0.5, 0.5, "anything from hardly any to linear scaling"), (0.7, 0.1, "anything from square-root to linear scaling"),
])  # fmt: skip
def test_words_are_no_surer_than_the_interval(value, error, words):
    assert in_words(Estimate(value, error)) == words


def test_it_prints_tabulates_saves_and_loads(tmp_path):
    found = advise(PROBLEM, "momentum", 4, 8, learning_rate=0.001)
    text = str(found)
    assert text.splitlines()[0] == "momentum 0.9, 4 parameters, 48 samples"
    assert f"λ₁ is {SHARPEST:.4g}" in text
    rows = found.table()
    assert [row["name"] for row in rows] == ["largest stable rate", "largest stable rate", "learning rate",
                                             "scaling exponent", "end of scaling"]  # fmt: skip
    assert rows[0]["low"] < rows[0]["value"] < rows[0]["high"]
    assert all(row["reason"] for row in rows)
    found.save(tmp_path / "advice")
    again = Result.load(tmp_path / "advice")
    assert isinstance(again, Advice)
    assert str(again) == text
    assert again.cost == found.cost > 0


def test_the_same_seed_gives_the_same_advice():
    assert str(advise(PROBLEM, "sgd", 4, seed=3)) == str(advise(PROBLEM, "sgd", 4, seed=3))


DATALESS = Problem.from_function(lambda p: p["w"].square().sum(), {"w": torch.ones(2).double()}, num_samples=100)
MISUSES = {
    "a model": (lambda: advise(nn.Linear(1, 1)), TypeError, "problem must be a lambdahat.Problem"),
    "unknown optimiser": (lambda: advise(PROBLEM, "lbfgs", 4), ValueError, "be one of 'sgd', 'momentum', 'nesterov'"),
    "batch beyond the data": (lambda: advise(PROBLEM, "sgd", 64), ValueError, r"batch_size must .* \[1, 48\]"),
    "new batch beyond the data": (lambda: advise(PROBLEM, "sgd", 4, 64), ValueError, "new_batch_size must .*than the"),
    "the same batch": (lambda: advise(PROBLEM, "sgd", 4, 4), ValueError, "new_batch_size must differ from batch_size"),
    "empty batch": (lambda: advise(PROBLEM, "sgd", 0), ValueError, "batch_size must be an integer in"),
    "no data": (lambda: advise(DATALESS, "sgd", 4), ValueError, "problem must be a loss over data"),
    "a maximum": (lambda: advise(least_squares(ROWS, sign=-1.0), "sgd", 4), ValueError,
                  "the largest eigenvalue of the hessian must be above 0.*train further"),
    "rate of 0": (lambda: advise(PROBLEM, "sgd", 4, learning_rate=0.0), ValueError, "learning_rate must be a finite"),
    "momentum of 1": (lambda: advise(PROBLEM, "momentum", 4, momentum=1.0), ValueError, r"must lie in \[0, 1\)"),
    "momentum as text": (lambda: advise(PROBLEM, "momentum", 4, momentum="0.9"), TypeError, "must be a number in"),
    "one batch": (lambda: advise(PROBLEM, "sgd", 4, batches=1), ValueError, "batches must .*shows no error"),
    "one sample": (lambda: advise(PROBLEM, "sgd", 4, samples=1), ValueError, r"samples must be .*\[2, 48\]"),
    "kfac of a function": (lambda: advise(PROBLEM, "kfac", 4), TypeError, "made of a model and a loss of its output"),
    "training of kfac": (lambda: advise(classifier(), "kfac", 4, steps=5), ValueError, "steps must be .*any torch"),
    "unknown advice": (lambda: advise(PROBLEM, "sgd", 4)["damping"], KeyError, "be one of 'largest stable rate', 4"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISUSES)
def test_misuse(name):
    call, error, text = MISUSES[name]
    with pytest.raises(error, match=text):
        call()
