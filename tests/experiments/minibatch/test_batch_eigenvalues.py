"""Predicted and measured batch eigenvalues: how claims are judged, and a small run against dense
matrices.
"""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

import lambdahat as lh
from lambdahat._core.rng import generator
from lambdahat.experiments.kit.cells import Rows
from lambdahat.experiments.kit.claims import VERDICTS, judge
from lambdahat.experiments.minibatch.batch_eigenvalues import (
    AT_ONE,
    EXPERIMENT,
    claims,
    excess_slope,
    share_within,
)
from lambdahat.experiments.minibatch.batch_points import (
    SCALES,
    batch_extremes,
    load_split,
    points_of,
    rows_of,
    training_stops,
)
from lambdahat.randommatrix import effective_batch
from lambdahat.report.figures import draw
from tests.experiments.minibatch.made import N, cell, point, whole

TEN = np.arange(10.0)  # mean 4.5, deviation √(55/6)
DEVIATION = math.sqrt(55 / 6)


def verdicts_of(points):
    """By what is claimed, without the network and the epoch."""
    verdicts = judge(claims(Rows(rows_of(points))))
    return {re.sub(r"^.*?: (at epoch \d+ )?", "", verdict.claim): verdict for verdict in verdicts}


def batches(made):
    """A cell as the rows show it."""
    return view(point([made])).batches[0]


def view(made):
    (found,) = points_of(Rows(rows_of([made])))
    return found


def test_shares_count_batches_within_a_ruler():
    one = batches(cell(128, TEN, {"additive": (5.0, 1.2)}))
    assert share_within([one], "additive", "largest", 1, "predicted") == 0.3  # 4, 5, 6
    assert share_within([one], "additive", "largest", 2, "predicted") == 0.5
    assert share_within([one], "additive", "largest", 1, "measured") == 0.7  # 2 … 8
    other = batches(cell(128, [50.0] * 10, {"additive": (5.0, 1.2)}))
    assert share_within([one, other], "additive", "largest", 1, "predicted") == 0.15


def test_the_error_of_a_prediction_widens_its_spread():
    assert cell(128, TEN, {"additive": (5.0, 3.0, 0.5, 4.0)}).spread("additive", "largest") == 5.0


@pytest.mark.parametrize("power", [-1.0, -0.5])
def test_the_slope_of_the_excess_is_found(power):
    """λ'₁ = 1 + 100·b^power with a little scatter about it."""
    scatter = np.linspace(-1, 1, 10)
    cells = []
    for size in (16, 64, 256, 1024, 4096):
        excess = 100 * effective_batch(size, N) ** power
        cells.append(cell(size, 1 + excess * (1 + 0.05 * scatter), {"additive": (1 + excess, 0.1)}))
    assert excess_slope(view(point(cells))).value == pytest.approx(power, abs=1e-6)
    verdict = verdicts_of([point(cells)])["λ'₁ − λ₁ of this network's batches falls as b^(−1)"]
    assert verdict.verdict == ("holds" if power == -1 else "does not hold")


def test_no_slope_where_batches_show_no_excess():
    cells = [cell(size, TEN - 4.5 + 1, {"additive": (1.0, 0.1)}) for size in (16, 64, 256)]
    assert math.isnan(excess_slope(view(point(cells))).value)
    assert (
        verdicts_of([point(cells)])["λ'₁ − λ₁ of this network's batches falls as b^(−1)"].verdict
        == "undecided"
    )


SIZES = tuple(2**power for power in range(4, 13))
NEAR = "is within one standard deviation of this network's batches, over epochs and B"


def test_verdicts_of_predictions_near_and_far():
    told = {"additive": (7.5 + 4 * DEVIATION, 1.0, 0.9), "multiplicative": (7.6, 1.0, 0.5)}
    # no batch is far from the mean at every size
    turned = [np.roll(TEN, place) for place in range(len(SIZES))]
    cells = [
        cell(size, 3 + values, told, 0.5 + 0.01 * (values - 4.5))
        for size, values in zip(SIZES, turned, strict=True)
    ]
    found = verdicts_of([point(cells), point(cells, 5)])
    assert found[f"the additive model's λ'₁ {NEAR}"].verdict == "does not hold"
    assert found[f"the multiplicative model's λ'₁ {NEAR}"].verdict == "holds"
    better = (
        "the multiplicative model fits λ'₁ of this network's batches better than the additive, by"
        " 10 % or more"
    )
    assert found[f"{better}, over epochs and B"].verdict == "holds"
    assert found[f"the additive model's overlap (φ̂₁ᵀφ₁)² {NEAR}"].verdict == "does not hold"
    assert found[f"the multiplicative model's overlap (φ̂₁ᵀφ₁)² {NEAR}"].verdict == "holds"


def claim_of(points, words):
    (found,) = [claim for claim in claims(Rows(rows_of(points))) if words in claim.sentence]
    return found


def test_epochs_and_sizes_are_averaged_before_batches_count():
    """4, 5 and 6 of ten lie within 1.2 of 5: of each batch the same at all sizes and epochs, and
    n is 10, not 180.
    """
    told = {"additive": (4.5, 1.0)}
    for epochs in (1, 2):
        made = [point([cell(size, TEN, told) for size in SIZES], epoch) for epoch in range(epochs)]
        reading = claim_of(made, f"additive model's λ'₁ {NEAR}").reading
        inside = np.abs(TEN - 4.5) <= DEVIATION
        assert (reading.count, reading.dof) == (10, 9)
        assert reading.value == pytest.approx(inside.mean())
        assert reading.stderr == pytest.approx(inside.std(ddof=1) / math.sqrt(10))


def test_a_prediction_one_deviation_from_normal_batches_is_at_the_bound():
    rng = np.random.default_rng(0)
    one = batches(cell(128, rng.normal(size=200_000), {"additive": (1.0, 1.0)}))
    assert share_within([one], "additive", "largest", 1, "measured") == pytest.approx(
        AT_ONE, abs=5e-3
    )


def test_a_fit_that_is_hardly_better_does_not_hold():
    """Predictions 8 and 3 % below all batches: the gap is known to rounding and below 10 %."""
    values = 4.5 + 0.01 * (TEN - 4.5)
    told = {"additive": (4.5 * 0.92, 1.0), "multiplicative": (4.5 * 0.97, 1.0)}
    made = [point([cell(size, values, told) for size in SIZES])]
    found = claim_of(made, "fits λ'₁ of this network's batches better than the additive")
    assert found.reading.value == pytest.approx(math.log(0.97 / 0.92), rel=1e-3)
    assert found.reading.count == 10
    assert judge([found])[0].verdict == "does not hold"


def test_claims_of_the_model_that_is_ours_are_told_apart():
    told = dict.fromkeys(("additive", "multiplicative", "directional"), (4.5, 1.0))
    made = claims(Rows(rows_of([point([cell(size, TEN, told) for size in SIZES])])))
    assert {claim.own for claim in made if "directional" in claim.sentence} == {True}
    theirs = [
        claim
        for claim in made
        if "the additive model's" in claim.sentence or "λ₁ of this" in claim.sentence
    ]
    assert theirs
    assert not any(claim.own for claim in theirs)
    assert all((claim.source == "this work") == claim.own for claim in made)


def test_a_network_that_learnt_nothing_tests_nothing():
    made = replace(point([cell(size, TEN, {"additive": (4.5, 1.0)}) for size in SIZES]), loss=2.3)
    verdicts = judge(claims(Rows(rows_of([made]))))
    assert {verdict.verdict for verdict in verdicts} == {"not testable here"}
    assert all(
        "its loss at epoch 0 is 2.3, near guessing" in verdict.evidence for verdict in verdicts
    )


def test_a_biased_prediction_is_rejected_though_it_lies_within_the_spread():
    """20 % above batches whose mean is known to 2 %, and 2 % above it."""
    values = 4.5 + 0.3 * (TEN - 4.5)
    told = {"additive": (4.5 * 1.2, 1.0), "multiplicative": (4.5 * 1.02, 1.0)}
    found = verdicts_of([point([cell(size, values, told) for size in SIZES])])
    mean = (
        "model's λ'₁ is the mean of this network's batches within 10 %, on average over their sizes"
    )
    assert found[f"the additive {mean}"].verdict == "does not hold"
    assert found[f"the multiplicative {mean}"].verdict == "holds"


def test_the_error_of_a_prediction_is_common_to_all_sizes():
    """Batches are known to 0.3/(4.5·√10) at each of nine sizes, the prediction to 4 % at all of
    them alike.
    """
    values = 4.5 + 0.3 * (TEN - 4.5) / DEVIATION
    made = [
        point([cell(size, values, {"additive": (4.5, 1.0, 0.5, 0.04 * 4.5)}) for size in SIZES])
    ]
    reading = claim_of(made, "the additive model's λ'₁ is the mean").reading
    assert reading.stderr == pytest.approx(math.hypot(0.04, 0.3 / 4.5 / math.sqrt(90)))
    exact = [point([cell(size, values, {"additive": (4.5, 1.0)}) for size in SIZES])]
    assert claim_of(exact, "the additive model's λ'₁ is the mean").reading.dof == pytest.approx(81)


@pytest.mark.parametrize(
    ("last", "verdict"),
    [((2.0, 0.1), "holds"), ((1.1, 0.1), "undecided"), ((0.5, 0.1), "does not hold")],
)
def test_variance_through_training_is_judged_in_its_errors(last, verdict):
    cells = [cell(128, TEN, {"additive": (4.5, 1.0)})]
    points = [point(cells), point(cells, 5, last)]
    assert verdicts_of(points)["σ² grows from epoch 0 to 5 of this one run"].verdict == verdict


@pytest.mark.parametrize(("scale", "sign"), [(1.0, 1), (0.25, -1)])
def test_a_bulk_that_broadens_is_seen(scale, sign):
    """Twice as wide or half: of two batches, both alike, over three epochs, and n counts the
    two.
    """
    cells = [cell(128, TEN, {"additive": (4.5, 1.0)})]
    made = [point(cells, epoch, batch_scale=scale) for epoch in range(3)]
    found = claim_of(
        made, "the bulk of this network's batches of 128 is wider than the full data's"
    )
    assert found.reading.value == pytest.approx(sign * math.log(2), abs=0.2)
    assert (found.reading.count, found.reading.stderr) == (2, 0.0)
    assert judge([found])[0].verdict == ("holds" if sign > 0 else "does not hold")


def test_a_batch_that_shows_more_is_seen():
    told = {"additive": (4.5, 1.0)}
    text = "the largest eigenvalue of this network's batches of 128 exceeds the full data's"
    assert verdicts_of([point([cell(128, TEN + 3, told)])])[text].verdict == "holds"
    assert (
        verdicts_of([point([cell(128, TEN + 3, told)], top=30.0)])[text].verdict == "does not hold"
    )


@pytest.fixture(scope="module")
def found(smoke):
    return whole(smoke(EXPERIMENT.name))


def test_every_network_epoch_operator_and_size_is_measured(found):
    points = found.where(part="point")
    both = ("hessian", "ggn")
    keys = [(row["network"], row["epoch"], row["operator"]) for row in points]
    assert keys == [
        ("softmax", 5, "hessian"),
        *(("MLP", epoch, operator) for epoch in (0, 5) for operator in both),
    ]
    for each in points_of(found):
        assert [batches.size for batches in each.batches] == [16, 128]
        assert each.models == ["additive", "multiplicative", "directional"]
        for batches in each.batches:
            assert len(batches.rows) == 3
            assert all(
                math.isfinite(batches.prediction(model, "largest").value) for model in each.models
            )


@pytest.mark.parametrize("network", ["softmax", "MLP"])
def test_the_full_data_is_that_of_the_dense_matrix(found, network):
    subject = next(each for each in SCALES["smoke"] if each["network"] == network)
    for epoch, problem in training_stops(subject, load_split("digits"), 0, "cpu"):
        for name in subject["operators"]:
            operator = {"hessian": lh.hessian, "ggn": lh.ggn}[name]
            (point,) = found.where(part="point", network=network, epoch=epoch, operator=name)
            exact = torch.linalg.eigvalsh(operator(problem).dense().double())
            scale = float(exact.abs().max())
            assert point["full largest"] == pytest.approx(float(exact[-1]), abs=1e-3 * scale)
            if name == "hessian":
                assert point["full smallest"] == pytest.approx(float(exact[0]), abs=1e-3 * scale)
            assert point["loss"] == pytest.approx(problem.loss(), rel=1e-6)


@pytest.mark.parametrize("name", ["hessian", "ggn"])
def test_a_batch_shows_the_extremes_of_its_dense_matrix(name):
    subject = next(each for each in SCALES["smoke"] if each["network"] == "MLP")
    *_, (_, problem) = training_stops(subject, load_split("digits"), 0, "cpu")
    operator = {"hessian": lh.hessian, "ggn": lh.ggn}[name]
    vector = lh.eigenpairs(operator(problem), 1).vectors[:, 0]
    found = batch_extremes(problem, name, 32, 2, 60, vector, 0)
    for i in range(2):
        chosen = torch.randperm(400, generator=generator(0, "batch", 32, i))[:32]
        values, vectors = torch.linalg.eigh(operator(problem.subset(chosen)).dense().double())
        assert found.largest[i, 0] == pytest.approx(float(values[-1]), rel=1e-4)
        assert found.smallest[i, 0] == pytest.approx(float(values[0]), abs=1e-3 * float(values[-1]))
        assert found.overlaps[i, 0] == pytest.approx(
            float(vectors[:, -1] @ vector.double()) ** 2, abs=1e-3
        )


def test_the_same_seed_gives_the_same_numbers_and_leaves_the_global_generator_alone(found):
    before = torch.get_rng_state()
    again = EXPERIMENT.run(EXPERIMENT.grid("smoke")[0], "cpu")
    assert torch.equal(torch.get_rng_state(), before)
    first = found.where(network="softmax").values("largest")
    np.testing.assert_allclose(
        [row["largest"] for row in again if row["part"] == "batch"], first, rtol=1e-6
    )


def test_rows_hold_every_batch_and_a_prediction_for_each_size(found):
    rows = found.where(part="batch")
    assert len(rows) == 5 * 2 * 3
    told = {"additive largest", "directional smallest spread", "multiplicative overlaps error"}
    for row in rows:
        assert {
            "network",
            "epoch",
            "operator",
            "batch_size",
            "batch",
            "largest",
            "smallest",
            "overlaps",
        } <= set(row)
        assert told <= set(row) if row["batch"] == 0 else not told & set(row)
    for table in EXPERIMENT.tables(found):
        assert all(len(row) == len(table.header) for row in table.rows), table.title
    assert {verdict.verdict for verdict in judge(claims(found))} <= set(VERDICTS)


@pytest.mark.parametrize("scale", ["smoke", "cpu", "paper"])
def test_a_cell_holds_its_subject_and_survives_json(scale):
    subjects = {subject["network"]: subject for subject in SCALES[scale]}
    for each in EXPERIMENT.grid(scale):
        own = dict(subjects[each["network"]])
        assert each["operator"] in own.pop("operators")
        assert json.loads(json.dumps(own)).items() <= json.loads(json.dumps(each)).items()


def test_a_model_that_is_never_negative_has_no_ratio_of_smallest_eigenvalues():
    """Batches have λ'_P = −(1 … 10), one model −1 and the other 0."""
    made = point([cell(128, TEN + 1, {"additive": (5.0, 1.2), "multiplicative": (5.0, 1.2)})])
    rows = Rows(
        [
            row | {"multiplicative smallest": 0.0} if row["part"] == "batch" else row
            for row in rows_of([made])
        ]
    )
    _, smallest, *_ = EXPERIMENT.tables(rows)
    assert [(line[1], line[-1]) for line in smallest.rows] == [
        ("additive", "0.18 … 0.18"),
        ("multiplicative", "none"),
    ]


def test_charts_draw_batches_models_and_spectra(found):
    charts = EXPERIMENT.charts(found)
    # λ'₁, overlap and spectrum of each network and operator at the end; variances
    assert len(charts) == 3 * 3 + 1
    last = points_of(found.where(network="softmax"))[-1]
    assert charts[0].series[0].y == pytest.approx(
        [each.mean("largest").value for each in last.batches]
    )
    assert charts[0].series[1].y == pytest.approx(
        [each.prediction("additive", "largest").value for each in last.batches]
    )
    assert charts[0].lines == (("full data", pytest.approx(last["full largest"])),)
    assert [len(series.x) for series in charts[-1].series] == [1, 2, 2]
    for chart in charts:
        draw(chart)
