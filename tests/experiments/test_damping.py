"""The least damping over batch sizes: Adam's and KFAC's edges against runs by hand, the rule, claims and storage."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from lambdahat.experiments import run_damping
from lambdahat.experiments.damping_claims import judge
from lambdahat.experiments.frontiers import Frontier, Section
from lambdahat.experiments.minibatch_damping import (
    DampingResult,
    _kfac_trained,
    expected_damping,
    least_epsilon,
    least_kfac_damping,
)
from lambdahat.experiments.rate_rules import RateRule
from lambdahat.experiments.rate_subjects import Subject, prepared
from lambdahat.storage import Result

TINY = Subject("tiny", "mlp", "digits", 128, (128,), 10, 2, 1, 128, {"widths": (4,)})
SIZES = (16, 64, 256, 1024)


@pytest.fixture(scope="module")
def found():
    return run_damping("smoke")


@pytest.fixture(scope="module")
def ground():
    return prepared(TINY, {}, 0, "cpu")


def trained_by_adam(ground, epsilon):
    """The loss after all steps of Adam at α = 1 on all data, of the first seed."""
    model = prepared(TINY, {}, 0, "cpu").models[0]
    optimizer = torch.optim.Adam(model.parameters(), 1.0, eps=epsilon)
    x, y = ground.train
    for _ in range(TINY.steps):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return cross_entropy(model(x), y).item()


def test_adam_s_least_epsilon_is_an_edge(ground):
    """With all data in every batch: just above it torch's Adam trains, just below it does not."""
    section = Section(1e-3, 1e3, points=12)
    edge = float(least_epsilon(ground, 0, section).edges[0, 0])
    first = cross_entropy(ground.models[0](ground.train[0]), ground.train[1]).item()
    assert trained_by_adam(ground, edge * section.resolution) < 0.9 * first
    assert not trained_by_adam(ground, edge / section.resolution) < 0.9 * first


def test_kfac_s_least_damping_is_an_edge(ground):
    section = Section(1e-2, 1e6, points=6, rounds=3)
    edge = float(least_kfac_damping(ground, 0, section).edges[0, 0])
    x, y = ground.train
    first = cross_entropy(ground.models[0](x), y).item()

    def ends(damping):
        model = _kfac_trained(ground, 0, damping, 128, TINY.steps, 0)
        return math.inf if model is None else cross_entropy(model(x), y).item()

    assert ends(edge * section.resolution) < 0.9 * first
    assert not ends(edge / section.resolution) < 0.9 * first


def test_training_leaves_the_start_alone(ground):
    before = [parameter.clone() for parameter in ground.models[0].parameters()]
    assert _kfac_trained(ground, 0, 1.0, 128, 2, 0) is not None
    assert all(torch.equal(a, b) for a, b in zip(before, ground.models[0].parameters(), strict=True))
    assert _kfac_trained(ground, 0, 1e-30, 128, 20, 0) is None  # diverges


def rule(excess=32.0, full=2.0):
    values = torch.tensor([full + excess / size for size in SIZES], dtype=torch.float64)
    return RateRule("net", "at the start", 10**9, SIZES, full, {}, values[:, None].repeat(1, 3))


def test_the_rule_s_dampings_are_closed_forms():
    """Eq. 5.36 mended, δ = α·(Pσ²/bλ₁)/2, and for ε heavy ball of rate (1 − β₁)/ε: ε = (λ₁ + 19c/B)/38 at β₁ = 0.9."""
    sizes = torch.tensor(SIZES, dtype=torch.float64)
    torch.testing.assert_close(expected_damping(rule(), "kfac"), 16 / sizes)
    torch.testing.assert_close(expected_damping(rule(), "adam"), (2 + 19 * 32 / sizes) / 38)


def frontier(edges, optimizer="kfac"):
    noise = torch.tensor([0.99, 1.0, 1.01], dtype=torch.float64)
    return Frontier("net", optimizer, "trains", SIZES, edges[:, None] * noise, 1.01)


def test_claims_are_judged_as_stated():
    sizes = torch.tensor(SIZES, dtype=torch.float64)
    exact = judge([frontier(16 / sizes)], [rule()], [], expected_damping)
    assert [v.verdict for v in exact] == ["holds", "holds"]
    constant = judge([frontier(torch.full_like(sizes, 0.1))], [rule()], [], expected_damping)
    assert [v.verdict for v in constant] == ["does not hold", "does not hold"]
    far = judge([frontier(160 / sizes)], [rule()], [], expected_damping)
    assert [v.verdict for v in far] == ["holds", "does not hold"]


def test_everything_is_measured_and_stored(found, tmp_path):
    assert [f.optimizer for f in found.frontiers] == ["adam", "kfac"]
    assert [runs.optimizer for runs in found.scaling] == ["adam", "kfac"]
    assert found.scaling[0].rules == ("inverse", "constant")
    assert len(found.verdicts) == 8
    assert len(found.tables()) == 3
    found.save(tmp_path / "found")
    loaded = Result.load(tmp_path / "found")
    assert isinstance(loaded, DampingResult)
    assert loaded.tables() == found.tables()
    assert loaded.verdicts == found.verdicts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scale": "huge"}, "scale must be one of 'smoke', 'cpu', 'paper', got 'huge'"),
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
    ],
)
def test_misuse_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        run_damping(**{"scale": "smoke", **arguments})
