"""Curvature through training by SGD and KFAC: how claims over seeds are judged, and a small run
against its parts.
"""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

import lambdahat as lh
from lambdahat.experiments.kit.cells import Rows
from lambdahat.experiments.kit.claims import judge
from lambdahat.experiments.minibatch.batch_points import load_split, sgd, training_stops
from lambdahat.experiments.minibatch.eigenvalues_through_training import (
    EXPERIMENT,
    claims,
    courses_of,
    kfac,
    rows_of,
)
from lambdahat.optim import KFAC
from lambdahat.report.figures import draw
from tests.experiments.minibatch.made import assert_same_rows, cell, point, whole

TEN = np.arange(10.0) - 4.5  # mean 0
DEVIATION = math.sqrt(55 / 6)
MODELS = ("additive", "multiplicative", "directional")


def made(
    variances=(1.0, 2.0),
    top=10.0,
    means=(20.0, 30.0),
    told=None,
    seeds=5,
    loss=0.1,
    optimizers=("SGD", "KFAC"),
):
    """Rows of runs with two stops: σ², the mean λ'₁ of ten batches and predictions at each;
    seeds differ by 1 %.
    """
    predictions = told or dict.fromkeys(MODELS, (1.0, 1.0))
    rows = []
    for optimizer in optimizers:
        for seed in range(seeds):
            own = 1 + 0.01 * (seed - (seeds - 1) / 2)
            for epoch in (0, 4) if optimizer == "SGD" else (4,):
                place = int(epoch > 0)
                scale = own if place else 1.0
                made = cell(
                    128,
                    means[place] * scale + TEN,
                    {
                        model: (means[place] * scale * times, spread)
                        for model, (times, spread) in predictions.items()
                    },
                )
                stop = replace(
                    point([made], epoch, (variances[place] * scale, 0.0), top), loss=loss
                )
                rows += [{"optimizer": optimizer, "seed": seed, **row} for row in rows_of([stop])]
    return Rows(rows)


def claim_of(rows, words, optimizer="SGD"):
    (found,) = [
        claim
        for claim in claims(rows)
        if words in claim.sentence and f", {optimizer}:" in claim.sentence
    ]
    return found


def test_both_optimisers_begin_at_the_start_that_sgd_measured():
    sgd_courses, kfac_courses = courses_of(made())
    assert (sgd_courses.optimizer, kfac_courses.optimizer) == ("SGD", "KFAC")
    assert sgd_courses.epochs == kfac_courses.epochs == [0, 4]
    for seed in range(5):
        assert kfac_courses.seeds[seed][0] is sgd_courses.seeds[seed][0]
    assert courses_of(made(optimizers=("KFAC",))) == []


@pytest.mark.parametrize(
    ("last", "verdict"), [(2.0, "holds"), (1.0, "undecided"), (0.5, "does not hold")]
)
@pytest.mark.parametrize("optimizer", ["SGD", "KFAC"])
def test_growth_of_the_variance_is_judged_over_seeds(last, verdict, optimizer):
    found = claim_of(made((1.0, last)), "σ² grows from epoch 0 to 4", optimizer)
    assert (found.reading.count, found.reading.dof) == (5, 4)
    assert found.reading.value == pytest.approx(math.log(last), abs=1e-3)
    assert judge([found])[0].verdict == verdict


@pytest.mark.parametrize(
    ("means", "verdict"), [((20.0, 30.0), "holds"), ((30.0, 20.0), "does not hold")]
)
def test_batches_move_away_from_the_full_data(means, verdict):
    found = claim_of(made(means=means), "moves away")
    assert found.reading.value == pytest.approx(means[1] - means[0])
    assert judge([found])[0].verdict == verdict


@pytest.mark.parametrize(("top", "verdict"), [(10.0, "holds"), (50.0, "does not hold")])
def test_batches_exceed_the_full_data(top, verdict):
    found = claim_of(made(top=top), "exceeds the full data's")
    assert found.reading.value == pytest.approx(math.log(30 / top), abs=1e-3)
    assert judge([found])[0].verdict == verdict


def test_distances_are_in_deviations_of_the_batches_and_fits_in_logarithms():
    """At a mean of 20 at the start and 30·own later, 1.3 times that is 6 and 9·own away."""
    told = {"additive": (1.3, 1.0), "multiplicative": (1.01, 1.0), "directional": (1.0, 1.0)}
    rows = made(told=told)
    far = claim_of(rows, "the additive model's λ'₁ is within one")
    assert far.reading.value == pytest.approx(7.5 / DEVIATION, rel=1e-6)
    assert judge([far])[0].verdict == "does not hold"
    near = claim_of(rows, "the multiplicative model's λ'₁ is within one")
    assert near.reading.value == pytest.approx(0.25 / DEVIATION, rel=1e-6)
    assert judge([near])[0].verdict == "holds"
    better = claim_of(rows, "the multiplicative model fits")
    assert better.reading.value == pytest.approx(math.log(1.3 / 1.01))
    assert judge([better])[0].verdict == "holds"
    hardly = claim_of(rows, "the directional model fits")
    assert hardly.reading.value == pytest.approx(math.log(1.01))
    assert judge([hardly])[0].verdict == "does not hold"


def test_kfac_and_sgd_are_compared_seed_by_seed():
    """KFAC's σ² is twice SGD's of each seed, though seeds differ; its λ₁ is the same."""
    doubled = Rows(
        [
            row | {"variance": 2 * row["variance"]}
            if row["part"] == "point" and row["optimizer"] == "KFAC"
            else row
            for row in made()
        ]
    )
    larger = {
        re.sub("^.*KFAC's ", "", claim.sentence): claim
        for claim in claims(doubled)
        if "KFAC's" in claim.sentence
    }
    assert larger["σ² is larger than SGD's"].reading.value == pytest.approx(math.log(2))
    assert larger["σ² is larger than SGD's"].reading.stderr == pytest.approx(0, abs=1e-12)
    assert larger["λ₁ of the full data is larger than SGD's"].reading.value == 0
    assert all(claim.own and claim.source == "this work" for claim in larger.values())


def test_claims_that_are_ours_are_told_apart():
    for claim in claims(made()):
        assert (
            claim.own
            == (claim.source == "this work")
            == ("directional" in claim.sentence or "KFAC's" in claim.sentence)
        )


def test_networks_that_learnt_nothing_test_nothing():
    rows = made(loss=2.3)
    assert {verdict.verdict for verdict in judge(claims(rows))} == {"not testable here"}
    learnt = [
        row | {"loss": 0.1} if row["optimizer"] == "KFAC" and row["part"] == "point" else row
        for row in rows
    ]
    told = judge(claims(Rows(learnt)))
    assert {v.verdict for v in told if ", KFAC:" in v.claim} <= {
        "holds",
        "does not hold",
        "undecided",
    }
    others = [v for v in told if ", KFAC:" not in v.claim]
    assert all(
        v.verdict == "not testable here" and "by SGD 5 of 5 seeds" in v.evidence for v in others
    )


@pytest.fixture(scope="module")
def found(smoke):
    return whole(smoke(EXPERIMENT.name))


def test_every_network_optimiser_seed_stop_and_operator_is_measured(found):
    keys = {
        (row["network"], row["optimizer"], row["seed"], row["epoch"], row["operator"])
        for row in found.where(part="point")
    }
    stops = {
        ("softmax", "SGD"): (0, 5),
        ("softmax", "KFAC"): (5,),
        ("MLP 6", "SGD"): (0, 1, 5),
        ("MLP 6", "KFAC"): (1, 5),
    }
    operators = {"softmax": ("hessian",), "MLP 6": ("hessian", "ggn")}
    assert keys == {
        (*place, seed, epoch, operator)
        for place, epochs in stops.items()
        for seed in (0, 1)
        for epoch in epochs
        for operator in operators[place[0]]
    }
    for courses in courses_of(found):
        assert set(courses.seeds) == {0, 1}
        assert courses.models == list(MODELS)
        for points in courses.seeds.values():
            assert all(
                math.isfinite(each.batches[0].prediction(model, "largest").value)
                for each in points
                for model in MODELS
            )


@pytest.mark.parametrize("optimizer", ["SGD", "KFAC"])
def test_a_stop_shows_the_dense_matrix_of_the_network_so_trained(found, optimizer):
    (cell,) = [
        c
        for c in EXPERIMENT.grid("smoke")
        if (c["network"], c["optimizer"], c["seed"]) == ("MLP 6", optimizer, 1)
    ]
    make = sgd if optimizer == "SGD" else lambda model, rate: KFAC(model, rate, 0.1, momentum=0.9)
    for epoch, problem in training_stops(cell, load_split("digits"), 1, "cpu", make):
        for name, operator in (("hessian", lh.hessian), ("ggn", lh.ggn)):
            (row,) = found.where(
                part="point",
                network="MLP 6",
                optimizer=optimizer,
                seed=1,
                epoch=epoch,
                operator=name,
            )
            exact = torch.linalg.eigvalsh(operator(problem).dense().double())
            assert row["full largest"] == pytest.approx(float(exact[-1]), rel=1e-2)
            assert row["loss"] == pytest.approx(problem.loss(), rel=1e-5)


def test_optimisers_are_those_that_are_named():
    model = lh.models.mlp([4, 3, 2])
    assert isinstance(kfac(model, 0.01, 0.1), KFAC)
    assert kfac(model, 0.01, 0.1).param_groups[0]["damping"] == 0.1
    assert type(sgd(model, 0.01)) is torch.optim.SGD
    assert {
        group["momentum"]
        for each in (kfac(model, 0.01, 0.1), sgd(model, 0.01))
        for group in each.param_groups
    } == {0.9}


def test_both_train_and_kfac_otherwise_than_sgd(found):
    last = found.where(part="point", network="MLP 6", epoch=5, operator="hessian")
    for seed in (0, 1):
        losses = [
            last.where(seed=seed, optimizer=optimizer)[0]["loss"] for optimizer in ("SGD", "KFAC")
        ]
        start = found.where(part="point", network="MLP 6", epoch=0, operator="hessian", seed=seed)[
            0
        ]["loss"]
        assert losses[0] != losses[1]
        assert max(losses) < start


def test_the_same_cell_gives_the_same_rows(found):
    cell = EXPERIMENT.grid("smoke")[1]
    stored = found.where(network=cell["network"], optimizer=cell["optimizer"], seed=cell["seed"])
    assert_same_rows(stored, EXPERIMENT.run(cell, "cpu"), rel=1e-4)


@pytest.mark.parametrize("scale", ["smoke", "cpu", "paper"])
def test_the_start_is_measured_by_sgd_alone(scale):
    for each in EXPERIMENT.grid(scale):
        assert (each["epochs"][0] == 0) == (each["optimizer"] == "SGD")


def test_tables_and_charts_show_both_optimisers(found):
    tables = EXPERIMENT.tables(found)
    assert len(tables) == 3
    for table in tables:
        assert all(len(row) == len(table.header) for row in table.rows), table.title
        assert {row[1] for row in table.rows} == {"SGD", "KFAC"}
    charts = EXPERIMENT.charts(found)
    assert len(charts) == 3 * 2 + 3  # λ₁ of each network and operator by each optimiser, and σ
    first = courses_of(found)[0]
    means = [np.mean([each["full largest"] for each in first.at(epoch)]) for epoch in first.epochs]
    assert charts[0].series[0].y == pytest.approx(means)
    assert [series.name for series in charts[-1].series] == ["SGD", "KFAC"]
    assert [series.name for series in charts[0].series] == ["full data", "batches of 64", *MODELS]
    for chart in charts:
        draw(chart)
