"""Predicted and measured batch eigenvalues: how claims are judged, and a small run against dense matrices."""

import json
import math

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import lambdahat as lh
from lambdahat._rng import generator
from lambdahat.cli import reproduce
from lambdahat.cli.app import app
from lambdahat.experiments import SCALED, run_batch_eigenvalues
from lambdahat.experiments.minibatch_claims import distance, excess_slope, judge, share_within
from lambdahat.experiments.minibatch_eigenvalues import BatchEigenvaluesResult, concluded
from lambdahat.experiments.minibatch_measuring import batch_extremes
from lambdahat.experiments.minibatch_subjects import SCALES, load_split, training_stops
from lambdahat.randommatrix import effective_batch
from lambdahat.storage import Result
from tests.experiments.minibatch_made import N, cell, point

TEN = np.arange(10.0)  # mean 4.5, deviation √(55/6)
DEVIATION = math.sqrt(55 / 6)


def verdicts_of(points):
    return {verdict.claim.partition(": ")[2]: verdict for verdict in judge(points)}


def test_shares_count_batches_within_a_ruler():
    one = cell(128, TEN, {"additive": (5.0, 1.2)})
    assert share_within([one], "additive", "largest", 1, "predicted") == 0.3  # 4, 5, 6
    assert share_within([one], "additive", "largest", 2, "predicted") == 0.5
    assert share_within([one], "additive", "largest", 1, "measured") == 0.7  # 2 … 8
    assert share_within([one, cell(128, [50.0] * 10, {"additive": (5.0, 1.2)})], "additive", "largest", 1,
                        "predicted") == 0.15  # fmt: skip


def test_the_error_of_a_prediction_widens_its_spread():
    assert cell(128, TEN, {"additive": (5.0, 3.0, 0.5, 4.0)}).spread("additive", "largest") == 5.0


def test_distance_is_in_deviations_between_batches():
    far, error = distance(cell(128, TEN, {"additive": (4.5 + 2 * DEVIATION, 1.0)}), "additive")
    assert far == pytest.approx(2.0)
    assert error == pytest.approx(math.sqrt(1 / 10 + 4 / 18))


@pytest.mark.parametrize("power", [-1.0, -0.5])
def test_the_slope_of_the_excess_is_found(power):
    """λ'₁ = 1 + 100·b^power with a little scatter about it."""
    scatter = np.linspace(-1, 1, 10)
    cells = []
    for size in (16, 64, 256, 1024, 4096):
        excess = 100 * effective_batch(size, N) ** power
        cells.append(cell(size, 1 + excess * (1 + 0.05 * scatter), {"additive": (1 + excess, 0.1)}))
    slope = excess_slope(point(cells))
    assert float(slope) == pytest.approx(power, abs=1e-6)
    verdict = verdicts_of([point(cells)])["λ'₁ − λ₁ falls as b^(−1)"]
    assert verdict.verdict == ("holds" if power == -1 else "does not hold")


def test_no_slope_where_batches_show_no_excess():
    cells = [cell(size, TEN - 4.5 + 1, {"additive": (1.0, 0.1)}) for size in (16, 64, 256)]
    assert math.isnan(float(excess_slope(point(cells))))
    assert verdicts_of([point(cells)])["λ'₁ − λ₁ falls as b^(−1)"].verdict == "undecided"


def test_verdicts_of_predictions_near_and_far():
    told = {"additive": (4.5 + 4 * DEVIATION, 1.0, 0.9), "multiplicative": (4.6, 1.0, 0.5)}
    cells = [cell(size, TEN, told, 0.5 + 0.01 * (TEN - 4.5)) for size in (16, 128, 512)]
    found = verdicts_of([point(cells)])
    near = "lies within one standard deviation of the batches' mean"
    assert found[f"the additive model's λ'₁ {near}"].verdict == "does not hold"
    assert found[f"the multiplicative model's λ'₁ {near}"].verdict == "holds"
    assert found["the multiplicative model fits λ'₁ better than the additive"].verdict == "holds"
    assert found[f"the additive model's overlap (φ̂₁ᵀφ₁)² {near}"].verdict == "does not hold"
    assert found[f"the multiplicative model's overlap (φ̂₁ᵀφ₁)² {near}"].verdict == "holds"
    assert "3 of 3 within" in found[f"the multiplicative model's λ'₁ {near}"].evidence
    assert "0/16, 0/128, 0/512" in found[f"the additive model's λ'₁ {near}"].evidence


def test_a_biased_prediction_is_rejected_though_it_lies_within_the_spread():
    """0.9 deviations off is t = 2.8 for a mean of ten, 0.5 is t = 1.6; 2.26 is rejected at 5 %."""
    told = {"additive": (4.5 + 0.9 * DEVIATION, 1.0), "multiplicative": (4.5 + 0.5 * DEVIATION, 1.0)}
    found = verdicts_of([point([cell(size, TEN, told) for size in (16, 64, 128)])])
    assert found["the additive model's λ'₁ is the mean over batches, at every size"].verdict == "does not hold"
    assert found["the multiplicative model's λ'₁ is the mean over batches, at every size"].verdict == "holds"
    near = "lies within one standard deviation of the batches' mean"
    assert found[f"the additive model's λ'₁ {near}"].verdict == "holds"


@pytest.mark.parametrize(
    ("last", "verdict"),
    [((2.0, 0.1), "holds"), ((1.1, 0.1), "undecided"), ((0.5, 0.1), "does not hold")],
)
def test_variance_through_training_is_judged_in_its_errors(last, verdict):
    cells = [cell(128, TEN, {"additive": (4.5, 1.0)})]
    points = [point(cells), point(cells, 5, last)]
    assert verdicts_of(points)["σ² grows through training"].verdict == verdict


@pytest.mark.parametrize(("scale", "verdict"), [(1.0, "holds"), (0.25, "does not hold")])
def test_a_bulk_that_broadens_is_seen(scale, verdict):
    found = verdicts_of([point([cell(128, TEN, {"additive": (4.5, 1.0)})], batch_scale=scale)])
    assert found["the bulk of a batch of 128 is wider than the full data's"].verdict == verdict


def test_a_batch_that_shows_more_is_seen():
    told = {"additive": (4.5, 1.0)}
    text = "the largest eigenvalue of a batch of 128 exceeds the full data's"
    assert verdicts_of([point([cell(128, TEN + 3, told)])])[text].verdict == "holds"
    assert verdicts_of([point([cell(128, TEN + 3, told)], top=30.0)])[text].verdict == "does not hold"


@pytest.fixture(scope="module")
def found():
    kept = []
    result = run_batch_eigenvalues("smoke", keep=kept.append)
    assert [len(part.points) for part in kept] == [1, 3, 5]
    own = tuple(verdict for verdict in result.verdicts if verdict.claim.startswith("softmax"))
    assert concluded(kept[:1]).verdicts == own
    return result


def test_every_network_epoch_operator_and_size_is_measured(found):
    keys = [(point.network, point.epoch, point.operator) for point in found.points]
    both = ("hessian", "ggn")
    assert keys == [("softmax", 5, "hessian"), *(("MLP", epoch, operator) for epoch in (0, 5) for operator in both)]
    for each in found.points:
        assert [cell.batch_size for cell in each.cells] == [16, 128]
        assert each.models == ("additive", "multiplicative", "directional")
        for one in each.cells:
            assert len(one.measured) == 4
            assert all(math.isfinite(float(one.predicted(model, "largest"))) for model in each.models)


@pytest.mark.parametrize("network", ["softmax", "MLP"])
def test_the_full_data_is_that_of_the_dense_matrix(found, network):
    subject = next(each for each in SCALES["smoke"] if each.network == network)
    for epoch, problem in training_stops(subject, load_split("digits"), 0, "cpu"):
        for name in subject.operators:
            operator = {"hessian": lh.hessian, "ggn": lh.ggn}[name]
            point = next(p for p in found.points if (p.network, p.epoch, p.operator) == (network, epoch, name))
            exact = torch.linalg.eigvalsh(operator(problem).dense().double())
            scale = float(exact.abs().max())
            torch.testing.assert_close(point.pairs.values[:4], exact.flip(0)[:4], rtol=0, atol=1e-3 * scale)
            if name == "hessian":
                assert point.smallest == pytest.approx(float(exact[0]), abs=1e-3 * scale)
            assert point.loss == pytest.approx(problem.loss(), rel=1e-6)


@pytest.mark.parametrize("name", ["hessian", "ggn"])
def test_a_batch_shows_the_extremes_of_its_dense_matrix(name):
    subject = next(each for each in SCALES["smoke"] if each.network == "MLP")
    *_, (_, problem) = training_stops(subject, load_split("digits"), 0, "cpu")
    operator = {"hessian": lh.hessian, "ggn": lh.ggn}[name]
    vector = lh.eigenpairs(operator(problem), 1).vectors[:, 0]
    found = batch_extremes(problem, name, 32, 2, 60, vector, 0)
    for i in range(2):
        chosen = torch.randperm(600, generator=generator(0, "batch", 32, i))[:32]
        values, vectors = torch.linalg.eigh(operator(problem.subset(chosen)).dense().double())
        assert found.largest[i, 0] == pytest.approx(float(values[-1]), rel=1e-4)
        assert found.smallest[i, 0] == pytest.approx(float(values[0]), abs=1e-3 * float(values[-1]))
        assert found.overlaps[i, 0] == pytest.approx(float(vectors[:, -1] @ vector.double()) ** 2, abs=1e-3)


def test_the_same_seed_gives_the_same_numbers_and_leaves_the_global_generator_alone(found):
    before = torch.get_rng_state()
    again = run_batch_eigenvalues("smoke", networks=["softmax"])
    assert torch.equal(torch.get_rng_state(), before)
    for one, other in zip(again.points, found.points[:1], strict=True):
        np.testing.assert_allclose(one.cells[0].values("largest"), other.cells[0].values("largest"), rtol=1e-6)


def test_tables_and_rows_hold_every_batch(found):
    rows = list(found.rows())
    assert len(rows) == 5 * 2 * 4
    assert {"network", "epoch", "operator", "batch_size", "batch", "largest", "smallest", "overlaps"} <= set(rows[0])
    assert {"additive largest", "directional smallest spread", "multiplicative largest error"} <= set(rows[0])
    for table in found.tables():
        assert all(len(row) == len(table.header) for row in table.rows), table.title
    assert {verdict.verdict for verdict in found.verdicts} <= {"holds", "does not hold", "undecided"}


def test_results_are_stored_whole(found, tmp_path):
    found.save(tmp_path / "found")
    loaded = Result.load(tmp_path / "found")
    assert isinstance(loaded, BatchEigenvaluesResult)
    assert loaded.tables() == found.tables()
    assert loaded.verdicts == found.verdicts


def test_the_command_takes_the_scale(found, monkeypatch, tmp_path):
    asked = {}
    monkeypatch.setattr(reproduce, "EXPERIMENTS", {"batch-eigenvalues": lambda **given: asked.update(given) or found})
    assert "batch-eigenvalues" in SCALED
    arguments = ["reproduce", "batch-eigenvalues", "--scale", "smoke", "--json", "--out", str(tmp_path / "run")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert asked == {"scale": "smoke", "seed": 0}
    assert json.loads(result.stdout)["experiment"] == "batch-eigenvalues"
    assert {path.suffix for path in (tmp_path / "run").iterdir()} == {".json", ".npz", ".png", ".txt", ".md"}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"scale": "huge"}, "scale must be one of 'smoke', 'cpu', 'paper', got 'huge'"),
        ({"scale": "smoke", "networks": ["VGG-16"]}, "networks must be one of 'softmax', 'MLP', got 'VGG-16'"),
        ({"scale": "smoke", "seed": -1}, "seed must be an integer of at least 0"),
    ],
)
def test_misuse_is_named(given, text):
    with pytest.raises(ValueError, match=text):
        run_batch_eigenvalues(**given)
