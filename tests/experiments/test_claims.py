"""Statistics against SciPy and closed forms, and verdicts that follow from them."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from lambdahat.experiments.kit.cells import Rows
from lambdahat.experiments.kit.claims import (
    FAILS,
    HOLDS,
    OPEN,
    UNTESTED,
    Claim,
    Reading,
    correlation,
    holm,
    judge,
    mean_of,
    paired_difference,
    slope,
)
from lambdahat.experiments.kit.experiment import ClaimTexts

RNG = np.random.default_rng(0)
A = RNG.normal(1.0, 1.0, 12)


def test_paired_difference_is_scipys_paired_t_test():
    other = RNG.normal(0.3, 1.0, 12)
    found = paired_difference(dict(enumerate(A)), dict(enumerate(other)))
    theirs = stats.ttest_rel(A, other, alternative="greater")
    assert found.p_above(0.0) == pytest.approx(theirs.pvalue)
    assert found.effect == pytest.approx(np.mean(A - other) / np.std(A - other, ddof=1))


def test_pairs_that_lack_a_partner_or_diverged_are_left_out():
    found = paired_difference({0: 1.0, 1: 5.0, 2: math.inf, 3: 2.0}, {0: 0.5, 2: 1.0, 3: 1.0})
    assert found.count == 2
    assert found.value == pytest.approx(0.75)


def test_slope_is_that_of_a_line():
    x = np.arange(8.0)
    found = slope(x, 3 * x + 1)
    assert found.value == pytest.approx(3.0)
    assert found.stderr == pytest.approx(0.0, abs=1e-9)
    assert math.isnan(slope([1, 2], [1, 2]).value)


def test_correlation_is_spearmans():
    x, y = RNG.normal(size=40), RNG.normal(size=40)
    assert correlation(x, y).value == pytest.approx(stats.spearmanr(x, y).statistic)


def test_holm_is_the_textbook_example():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    corrected = holm([0.01, math.nan])
    assert corrected[0] == pytest.approx(0.01)
    assert math.isnan(corrected[1])


@pytest.mark.parametrize(
    ("reading", "settings", "verdict"),
    [
        (Reading(2.0, 0.1), {"bound": 1.0}, HOLDS),
        (Reading(0.5, 0.1), {"bound": 1.0}, FAILS),
        (Reading(1.05, 0.1), {"bound": 1.0}, OPEN),
        (Reading(2.0, 0.1), {"bound": 1.0, "direction": "below"}, FAILS),
        (Reading(10.2, 0.1), {"bound": 10.0, "direction": "within", "margin": 1.0}, HOLDS),
        (Reading(12.0, 0.1), {"bound": 10.0, "direction": "within", "margin": 1.0}, FAILS),
        (Reading(10.9, 0.3), {"bound": 10.0, "direction": "within", "margin": 1.0}, OPEN),
        (Reading(math.nan, math.nan), {"bound": 1.0}, OPEN),
        (Reading(2.0, 0.0), {"bound": 1.0}, HOLDS),
        (mean_of([2.0]), {"bound": 1.0}, OPEN),
    ],
)
def test_verdicts(reading, settings, verdict):
    (found,) = judge([Claim("c", "s", "p", reading, **settings)])
    assert found.verdict == verdict


def test_a_family_is_judged_together():
    """Twenty claims at p = 0.02 each are no finding, though each alone would be one."""
    score = stats.norm.isf(0.02)
    claims = [Claim(str(i), "s", "p", Reading(score, 1.0)) for i in range(20)]
    assert {verdict.verdict for verdict in judge(claims)} == {OPEN}
    assert judge(claims[:1])[0].verdict == HOLDS


def test_our_own_claims_are_a_family_of_their_own():
    """Many claims of ours, however clear or unclear, leave the verdict on the paper's claim as
    it is without them.
    """
    near, none = Reading(2.2, 1.0), Reading(0.0, 1.0)
    paper, ours = (
        Claim("a", "", "", near),
        [Claim(f"b{i}", "", "", none, own=True) for i in range(9)],
    )
    assert judge([paper])[0].verdict == HOLDS
    assert [v.verdict for v in judge([*ours, paper])] == [OPEN] * 9 + [HOLDS]
    assert judge([paper, *(Claim(f"b{i}", "", "", none) for i in range(9))])[0].verdict == OPEN
    clear = [Claim(f"b{i}", "", "", near, own=True) for i in range(9)]
    assert [v.verdict for v in judge([paper, *clear])] == [HOLDS] + [OPEN] * 9


def test_a_claim_whose_condition_is_not_met_is_not_judged_and_spares_the_others():
    """Holm's correction of two claims of which one counts for nothing is that of one."""
    far, near = Reading(9.0, 1.0), Reading(1.8, 1.0)
    assert [v.verdict for v in judge([Claim("a", "", "", far), Claim("b", "", "", near)])] == [
        HOLDS,
        HOLDS,
    ]
    # p = 0.023: significant alone, not as one of three that all are at 0.023
    border = Reading(2.0, 1.0)
    three = [Claim(name, "", "", border) for name in "abc"]
    assert {v.verdict for v in judge(three)} == {OPEN}
    less = [
        Claim("a", "", "", border),
        *(Claim(n, "", "", border, unmet="the loss is at chance") for n in "bc"),
    ]
    first, *others = judge(less)
    assert first.verdict == HOLDS
    assert {v.verdict for v in others} == {UNTESTED}
    assert "not testable: the loss is at chance" in others[0].evidence


@pytest.mark.parametrize("direction", ["above", "below"])
def test_a_tie_without_an_error_decides_nothing(direction):
    (found,) = judge([Claim("0 = 0", "", "", Reading(0.0, 0.0), direction)])
    assert found.verdict == OPEN
    (moved,) = judge([Claim("1 > 0", "", "", Reading(1.0, 0.0), direction)])
    assert moved.verdict == (HOLDS if direction == "above" else FAILS)


def test_our_own_claims_are_marked():
    assert [
        v.own
        for v in judge(
            [Claim("a", "", "", Reading(1, 1)), Claim("b", "", "", Reading(1, 1), own=True)]
        )
    ] == [False, True]


def test_power_is_how_often_drawn_seeds_decide():
    """Against 20,000 drawn experiments of each size; 0.01 is three standard errors of a share
    among them.
    """
    reading, rng = Reading(1.0, 0.5, 4, 5), np.random.default_rng(0)
    for count in (5, 10):
        draws = rng.normal(1.0, 0.5 * math.sqrt(5), (20_000, count))
        scores = draws.mean(1) / (draws.std(1, ddof=1) / math.sqrt(count))
        share = (stats.t.sf(scores, count - 1) < 0.01).mean()
        assert reading.power(0.0, 0.01, count) == pytest.approx(share, abs=0.011)
    assert Reading(1.0, 0.5, math.inf, 4).power(0.0, 0.025, 4) == pytest.approx(
        stats.norm.cdf(2.0 - 1.959964), abs=1e-6
    )


def test_planned_seeds_are_the_fewest_that_reach_the_power():
    reading = Reading(1.0, 0.5, 4, 5)
    count = reading.seeds_for(0.0, 0.01)
    assert reading.power(0.0, 0.01, count) >= 0.8 > reading.power(0.0, 0.01, count - 1)
    assert Reading(1e-6, 0.5, 4, 5).seeds_for(0.0, 0.01) is None


def test_undecided_claims_are_planned_at_the_level_of_their_family():
    reading = Reading(1.0, 0.7, 4, 5)
    alone, *_ = judge([Claim("a", "", "", reading)])
    assert alone.verdict == OPEN
    assert (
        alone.plan
        == f"n = {reading.seeds_for(0.0, 0.05)} (power so far {reading.power(0.0, 0.05, 5):.0%})"
    )
    among, *_ = judge(
        [
            Claim("a", "", "", reading),
            *(Claim(name, "", "", Reading(0.0, 1.0, 4, 5)) for name in "bc"),
        ]
    )
    assert f"n = {reading.seeds_for(0.0, 0.05 / 3)} " in among.plan
    untested = Claim("b", "", "", reading, unmet="not learnt")
    assert judge([Claim("a", "", "", reading), untested])[0].plan == alone.plan
    assert judge([Claim("a", "", "", Reading(9.0, 0.1, 4, 5))])[0].plan == ""
    assert judge([Claim("a", "", "", Reading(0.0, math.nan, 0, 1))])[0].plan == "not known"
    assert "n > 1,000" in judge([Claim("a", "", "", Reading(1e-6, 0.5, 4, 5))])[0].plan


def test_the_nearer_edge_of_a_margin_counts():
    inside = Claim("a", "", "", Reading(0.5, 0.4, 4, 5), "within", 0.0, 1.0)
    assert inside.edge == 1.0
    assert inside.outlook(0.05) == (
        inside.reading.power(1.0, 0.05, 5),
        inside.reading.seeds_for(1.0, 0.05),
    )


TEXTS = ClaimTexts("""
    plain: {name} grows | §5 | by half
    near: {row[network]}: the slope is
      one | Theorem 1 | | within 0.2 of -1 | |ln(a/b)| of {row[network]} | ours
    low: it falls | §6 | falls | below 1.5 | %
""")


def test_a_text_of_claims_says_sentence_source_test_and_unit():
    reading = Reading(1.0, 0.1)
    assert TEXTS("plain", reading, name="λ₁") == Claim("λ₁ grows", "§5", "by half", reading)
    near = Claim("MLP: the slope is one", "Theorem 1", "", reading, "within", -1.0, 0.2)
    found = TEXTS("near", reading, row={"network": "MLP"})
    assert found == replace(near, unit=" |ln(a/b)| of MLP", own=True)
    assert TEXTS("low", reading) == Claim(
        "it falls", "§6", "falls", reading, "below", 1.5, unit=" %"
    )


def test_what_a_call_gives_goes_before_the_text_of_a_claim():
    found = TEXTS("low", Reading(1.0, 0.1), bound=2.0, unit="", own=True, unmet="too few")
    assert (found.bound, found.unit, found.own, found.unmet) == (2.0, "", True, "too few")


def test_groups_are_the_rows_of_each_value_in_order_of_appearance():
    rows = Rows([{"a": 2, "b": 1}, {"a": 1, "b": 1}, {"a": 2, "b": None}, {"b": 1}])
    assert [(key, list(part)) for key, part in rows.groups("a")] == [
        (2, [rows[0], rows[2]]),
        (1, [rows[1]]),
    ]
    assert [key for key, _ in rows.groups("a", "b")] == [(2, 1), (1, 1)]
