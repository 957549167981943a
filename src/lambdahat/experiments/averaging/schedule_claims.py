"""The claims on starts, frequencies, schedules, Lookahead and automatic starts: those of
averaging-schedules.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from lambdahat.experiments.averaging.preconditions import saturated, unlearnt, unready, unsettled
from lambdahat.experiments.averaging.runs import against_best, gap
from lambdahat.experiments.averaging.starts import REFERENCE, begun_at, start_claims
from lambdahat.experiments.kit.cells import Rows, over_seeds
from lambdahat.experiments.kit.claims import Claim, Reading, paired_difference

SMALL_CHANGE = 1.0  # points within which two runs count as alike
NO_GAP = 10.0  # points of training over held-out accuracy that count as none
GADAM_AHEAD = "Gadam + LH"
# the runs of Figure 7.12
AHEAD = ("SGD, linear", "SGD + LH", "AdamW, linear", "AdamW + LH", "Gadam", GADAM_AHEAD)
PRINTED_TUNED = "76.11 to 75.73 (VGG-16)"


def claims(rows: Rows) -> list[Claim]:
    """Starts, frequencies, generalisation gaps, Lookahead and the automatic start."""
    ends, epochs = rows.where(kind="end"), rows.where(kind="epoch")
    of = {name: ends.where(run=name) for name in ends.distinct("run")}
    return (
        start_claims("Gadam", rows, PRINTED_TUNED)
        + _frequency_claims(
            of, rows.where(kind="average", run="AdamW, flat"), epochs.where(run="AdamW, flat")
        )
        + _schedule_claims(of)
        + _lookahead_claims(of, epochs)
        + _automatic_claims(of)
    )


def _frequency_claims(of: dict[str, Rows], made: Rows, flat: Rows) -> list[Claim]:
    """How often to average: Figure 7.13."""
    half = unlearnt(of["AdamW, flat"], of["AdamW, linear"]) or unsettled(
        begun_at(flat, REFERENCE, "AdamW")
    )
    often, seldom = (
        made.where(start=REFERENCE, frequency=1),
        made.where(start=REFERENCE, frequency=0),
    )
    return [
        Claim(
            "averaging every step or once per epoch makes little difference",
            "§7.8.6, Figure 7.13b",
            "very insensitive",
            gap(seldom, often, "accuracy"),
            "within",
            0.0,
            SMALL_CHANGE,
            " points",
            half,
        ),
        Claim(
            "averaging once per epoch is above averaging every step",
            "§7.8.6, Figure 7.13b",
            "slightly better",
            gap(seldom, often, "accuracy"),
            unit=" points",
            unmet=half,
        ),
    ]


def _schedule_claims(of: dict[str, Rows]) -> list[Claim]:
    """Flat rates against schedules: Figure 7.4, and what §7.4.1 says of AdamW."""
    flat, step = of["SGD, flat"], of["SGD, step"]
    gap_now = (
        over_seeds(flat, "training accuracy").value - over_seeds(flat, "iterate accuracy").value
    )
    wide = (
        f"the gap at a flat rate is {gap_now:.0f} points already, where the thesis has none"
        if gap_now > NO_GAP
        else ""
    )
    return [
        Claim(
            "the gap between training and held-out accuracy is wider after step decay than at a"
            " flat rate",
            "§7.5.5, Figure 7.4",
            "ΔE₂ > ΔE₁",
            generalization(step, flat),
            unit=" points",
            unmet=unlearnt(flat, step) or wide,
        ),
        Claim(
            "step decay is above a flat rate",
            "§7.5.5, Figure 7.4",
            "it is",
            gap(step, flat, "accuracy"),
            unit=" points",
            unmet=unready(flat, step),
        ),
        Claim(
            "AdamW at a flat rate is below scheduled AdamW",
            "§7.4.1",
            "by more than 5 points, not drawn",
            gap(of["AdamW, flat"], of["AdamW, linear"], "accuracy"),
            "below",
            unit=" points",
            unmet=unready(of["AdamW, flat"], of["AdamW, linear"]),
        ),
    ]


def _lookahead_claims(of: dict[str, Rows], epochs: Rows) -> list[Claim]:
    """Lookahead alone and before averages: Figure 7.12."""
    where, both = "§7.8.5, Figure 7.12", GADAM_AHEAD
    others = {name: of[name] for name in AHEAD if name != "Gadam"}
    rival, ahead = against_best(others, both)
    runner, faster = against_best({**others, "Gadam": of["Gadam"]}, both, "early")
    rough = [fluctuation(epochs.where(run=name)) for name in ("AdamW + LH", "AdamW, linear")]
    return [
        *lookahead_pairs(of, where),
        Claim(
            "Lookahead makes AdamW converge faster (accuracy over the first third)",
            where,
            "clearly",
            gap(of["AdamW + LH"], of["AdamW, linear"], "early"),
            unit=" points",
            unmet=unlearnt(of["AdamW + LH"], of["AdamW, linear"]),
        ),
        Claim(
            "Lookahead makes AdamW fluctuate less from epoch to epoch",
            where,
            "it reduces fluctuations",
            paired_difference(*rough),
            "below",
            unit=" points",
            unmet=unlearnt(of["AdamW + LH"]),
        ),
        Claim(
            f"{both} is within {SMALL_CHANGE:g} point of Gadam",
            where,
            "only marginally worse (VGG-16)",
            gap(of[both], of["Gadam"], "accuracy"),
            "within",
            0.0,
            SMALL_CHANGE,
            " points",
            unready(of[both], of["Gadam"]),
        ),
        Claim(
            f"{both} is above all others but Gadam (here above {rival}, the best of them)",
            where,
            "still stronger than all others (VGG-16)",
            ahead,
            unit=" points",
            unmet=unready(of[both], of[rival]),
        ),
        Claim(
            f"{both} converges fastest (accuracy over the first third, here against {runner})",
            where,
            "at the fastest speed in all the optimisers tested (VGG-16)",
            faster,
            unit=" points",
            unmet=unlearnt(of[both], of[runner]),
        ),
    ]


def lookahead_pairs(of: dict[str, Rows], source: str, prefix: str = "") -> list[Claim]:
    """What §7.8.5 says of both networks: Lookahead helps SGD, and helps AdamW less than averages
    do.
    """
    said = (
        (
            "SGD + LH",
            "SGD, linear",
            "SGD + Lookahead is above SGD",
            "by a rather significant margin",
        ),
        (
            "Gadam",
            "AdamW + LH",
            "Gadam is above AdamW + Lookahead",
            "more significant and more consistent",
        ),
    )
    return [
        Claim(
            prefix + sentence,
            source,
            words,
            gap(of[upper], of[lower], "accuracy"),
            unit=" points",
            unmet=unready(of[upper], of[lower]),
        )
        for upper, lower, sentence, words in said
    ]


def fluctuation(epochs: Rows) -> dict[Any, float]:
    """The mean change of the iterates' accuracy from one epoch to the next, up or down, for each
    seed.
    """
    out = {}
    for seed in epochs.distinct("seed"):
        values = [
            row["iterate accuracy"]
            for row in sorted(epochs.where(seed=seed), key=lambda row: row["epoch"])
        ]
        changes = [abs(after - before) for before, after in pairwise(values)]
        if changes:
            out[seed] = sum(changes) / len(changes)
    return out


def _automatic_claims(of: dict[str, Rows]) -> list[Claim]:
    """Averages that begin by themselves: Table 7.7."""
    parts = [of[name] for name in ("Gadam", "Gadam-Auto", "SWA", "SWA-Auto")]
    # that they may begin too soon is part of what is tested
    unmet = unlearnt(*parts) or saturated(*parts)
    return [
        Claim(
            "GadamAuto is above SWA-Auto",
            "Table 7.7",
            "75.39 and 73.93",
            gap(of["Gadam-Auto"], of["SWA-Auto"], "accuracy"),
            unit=" points",
            unmet=unmet,
        ),
        Claim(
            "the automatic start costs SGD more than it costs Gadam",
            "§7.8.7",
            "0.64 and 0.34 points",
            losses(of),
            unit=" points",
            unmet=unmet,
        ),
        Claim(
            "SWA-Auto is below scheduled SGD",
            "§7.8.7, Tables 7.2 and 7.7",
            "73.93 and 74.15",
            gap(of["SWA-Auto"], of["SGD, linear"], "accuracy"),
            "below",
            unit=" points",
            unmet=unmet,
        ),
    ]


def generalization(upper: Rows, lower: Rows) -> Reading:
    """The difference of training less held-out accuracy."""
    gaps = []
    for part in (upper, lower):
        training, held_out = part.paired("training accuracy"), part.paired("iterate accuracy")
        gaps.append({seed: training[seed] - held_out[seed] for seed in training})
    return paired_difference(*gaps)


def losses(of: dict[str, Rows]) -> Reading:
    """(SWA − SWA-Auto) − (Gadam − GadamAuto), seed by seed."""
    found = []
    for tuned, automatic in (("SWA", "SWA-Auto"), ("Gadam", "Gadam-Auto")):
        upper, lower = of[tuned].paired("accuracy"), of[automatic].paired("accuracy")
        found.append({seed: upper[seed] - lower[seed] for seed in upper if seed in lower})
    return paired_difference(*found)
