"""Edges found by sections, their slopes and turning points, against closed forms."""

import math

import pytest
import torch

from lambdahat._core.storage import Result
from lambdahat.experiments.minibatch.stability_edges import Frontier, SearchSection, largest_passing

SIZES = tuple(2**power for power in range(11))


def frontier(edges):
    return Frontier(
        "net", "sgd", "trains", SIZES, torch.as_tensor(edges, dtype=torch.float64), 1.01
    )


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_an_edge_is_found_to_the_resolution(rounds):
    section = SearchSection(1e-4, 10.0, points=6, rounds=rounds)
    edges = torch.tensor([3.3e-3, 0.2, 4.0], dtype=torch.float64)
    found = largest_passing(lambda values: values < edges[:, None], section, 3)
    assert bool(((found / edges).log().abs() <= math.log(section.resolution)).all())
    assert section.resolution == pytest.approx((1e5 ** (1 / 5)) ** (1 / 7 ** (rounds - 1)))


def test_values_that_fail_below_the_edge_do_not_count():
    """At tiny rates nothing is learnt in the given time."""
    section = SearchSection(1e-4, 10.0, points=6, rounds=3)
    found = largest_passing(lambda values: (values > 0.05) & (values < 0.7), section, 1)
    assert float(found) == pytest.approx(0.7, rel=section.resolution - 1)


def test_no_edge_is_said_not_guessed():
    section = SearchSection(0.1, 1.0, points=3, rounds=2)
    wanted = torch.tensor([[False], [True], [True]])
    found = largest_passing(
        lambda values: wanted & (values < torch.tensor([[9.0], [9.0], [0.5]])), section, 3
    )
    assert math.isnan(float(found[0]))  # nothing passes
    assert float(found[1]) == math.inf  # all passes
    assert float(found[2]) == pytest.approx(0.5, rel=section.resolution - 1)


def test_slopes_are_those_of_a_power_law():
    sizes = torch.tensor(SIZES, dtype=torch.float64)
    found = frontier(torch.stack([0.1 * sizes**0.4, 0.3 * sizes**0.6], dim=1)).slope()
    assert (found.value, found.stderr, found.dof) == (pytest.approx(0.5), pytest.approx(0.1), 1)
    short = frontier(torch.stack([sizes, sizes], dim=1))
    assert math.isnan(short.slope(high=2).value)
    steep = short.slope(high=4)
    assert (steep.value, steep.stderr) == (pytest.approx(1.0), pytest.approx(0.0, abs=1e-12))


def test_the_turning_point_of_the_rule_itself():
    """Eq. 5.34 with λ₁(B) = λ(1 + B₀/B): rate 2/λ₁(B)."""
    sizes = torch.tensor(SIZES, dtype=torch.float64)
    edges = torch.stack([2 / (3 * (1 + at / sizes)) for at in (20.0, 20.0, 45.0)], dim=1)
    turning, stderr = frontier(edges).turning()
    assert turning == pytest.approx((20 * 20 * 45) ** (1 / 3), rel=1e-4)
    assert stderr == pytest.approx(math.log(45 / 20) / 3, rel=1e-4)  # sd/√3 of (0, 0, ln 2.25)
    rooted = frontier(edges[:, :2].sqrt()).turning(power=0.5)
    assert rooted[0] == pytest.approx(20, rel=1e-4)


def test_means_are_geometric_and_errors_relative():
    found = frontier(torch.tensor([[1.0, 4.0]]).repeat(len(SIZES), 1))
    assert found.at(16) == pytest.approx(2.0)
    spread = math.log(4) / math.sqrt(2) / math.sqrt(2)
    assert float(found.stderr()[0]) == pytest.approx(
        math.hypot(spread, math.log(1.01) / math.sqrt(24))
    )


def test_seeds_without_an_edge_are_left_out_and_counted():
    edges = torch.full((len(SIZES), 3), 2.0, dtype=torch.float64)
    edges[0], edges[1, 1:], edges[2, 2] = math.nan, math.inf, 0.0
    found = frontier(edges)
    assert [found.cell(size) for size in (1, 2, 4, 8)] == [
        "nothing trains",
        "2 (1 of 3 seeds; above the search: 2)",
        "2 ± 0 % (2 of 3 seeds; below the search: 1)",
        "2 ± 0 %",
    ]
    assert math.isnan(float(found.centre()[0]))
    assert found.at(2) == pytest.approx(2.0)
    assert found.slope().value == pytest.approx(0.0, abs=1e-12)


def test_why_there_is_no_edge_is_told_apart():
    """Of a search for the largest rate, and of one for the least damping, which searches 1/δ."""
    section = SearchSection(0.1, 1.0, points=3, rounds=2)
    none, every = torch.zeros(2, 3, dtype=torch.bool), torch.ones(2, 3, dtype=torch.bool)
    rows = [
        largest_passing(lambda values, wanted=wanted: wanted, section, 2)
        for wanted in (none, every)
    ]
    rates, dampings = torch.stack(rows), torch.stack(rows).reciprocal()
    cells = [
        [Frontier("net", "sgd", criterion, (1, 2), edges, 1.01).cell(size) for size in (1, 2)]
        for edges, criterion in ((rates, "trains"), (dampings, "trains"), (rates, "steady"))
    ]
    assert cells == [
        ["nothing trains", "above the search"],
        ["nothing trains", "below the search"],
        ["nothing is steady", "above the search"],
    ]
    mixed = Frontier(
        "net", "sgd", "trains", (1,), torch.tensor([[math.nan, math.inf, math.inf]]), 1.01
    )
    assert mixed.cell(1) == "nothing trains: 1, above the search: 2"


def test_a_frontier_is_stored(tmp_path):
    found = frontier(torch.rand(len(SIZES), 3))
    found.save(tmp_path / "edge")
    loaded = Result.load(tmp_path / "edge")
    assert torch.equal(loaded.edges, found.edges)
    assert loaded.batch_sizes == SIZES
