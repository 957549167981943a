"""Claims that several things are so at once: the intersection–union test for them, Bonferroni's
against.
"""

import math

import numpy as np
import pytest

from lambdahat.experiments.kit.claims import (
    FAILS,
    HOLDS,
    OPEN,
    UNTESTED,
    Claim,
    Reading,
    jointly,
    judge,
)


def part(value, stderr=1.0, **settings):
    return Claim("", "", "", Reading(value, stderr), **settings)


def both(*parts):
    return jointly("both", "", "", {f"part {i}": part for i, part in enumerate(parts)})


def test_it_is_as_likely_as_its_weakest_part_and_refuted_by_its_worst():
    first, second, third = part(5.0), part(1.0), part(-3.0, direction="below", bound=-2.0)
    found = both(first, second, third)
    assert found.p_values()[0] == max(claim.p_values()[0] for claim in (first, second, third))
    assert found.p_values()[1] == pytest.approx(
        min(1, 3 * min(claim.p_values()[1] for claim in (first, second, third)))
    )


def test_one_part_is_that_part():
    for value in (-2.0, 0.3, 4.0):
        assert both(part(value)).p_values() == pytest.approx(part(value).p_values())


@pytest.mark.parametrize(
    ("parts", "verdict"),
    [
        ((part(9.0), part(4.0)), HOLDS),
        ((part(9.0), part(1.0)), OPEN),
        ((part(9.0), part(-4.0)), FAILS),
        ((part(9.0), part(-1.8)), OPEN),  # p = 0.036 against one of two
        ((part(9.0), part(0.0, 0.0)), OPEN),  # a tie without an error
        ((part(9.0), part(math.nan, math.nan)), OPEN),
        ((part(-9.0), part(math.nan, math.nan)), FAILS),
        ((part(9.0), part(4.0, unmet="nothing was learnt")), UNTESTED),
    ],
)
def test_verdicts_on_two_parts(parts, verdict):
    assert judge([both(*parts)])[0].verdict == verdict


def test_neither_side_is_decided_wrongly_more_often_than_the_level_says():
    """At the corner where both true values are the bound, and where one of them is far above it."""
    rng, count, level = np.random.default_rng(0), 4000, 0.05
    for shift in (0.0, 8.0):
        scores = rng.normal([0.0, shift], 1.0, (count, 2))
        values = np.array([both(*map(part, row)).p_values() for row in scores])
        assert (values <= level).mean(0).max() <= level + 3 * math.sqrt(level * (1 - level) / count)


def test_the_evidence_shows_every_figure_and_the_fewest_seeds():
    few, many = (Reading(1.5, 0.5, 3, count) for count in (4, 10))
    found = jointly(
        "both",
        "",
        "",
        {"accuracy": Claim("", "", "", many, unit=" points"), "λ₁": Claim("", "", "", few)},
    )
    assert found.ours == "accuracy 1.5 ± 0.5 points, λ₁ 1.5 ± 0.5 (n = 4)"
