"""The flatness paper's experiments: they run, their claims follow from their rows, and the toy
is the exact one.
"""

import math

import pytest
import torch

from lambdahat.experiments.flatness import (
    cnn_sharpness,
    deep_linear_toy,
    mlp_decay,
    rank_degeneracy,
    softmax_decay,
)
from lambdahat.experiments.kit.cells import Rows, decades
from lambdahat.experiments.kit.claims import FAILS, HOLDS, OPEN, UNTESTED, judge
from lambdahat.experiments.kit.training import (
    Watch,
    curvature_problem,
    final_row,
    hessian_row,
    images,
    loss_and_accuracy,
    mean_square,
    modes_of,
    network,
)
from lambdahat.experiments.published import find
from lambdahat.operators import operator
from lambdahat.operators.curvature import ggn, hessian
from lambdahat.problem import Problem

NAMES = ("mlp-decay", "cnn-decay", "gadam-sharpness", "rank-degeneracy", "deep-linear-toy")
DIGITS = {
    "data": "digits",
    "training": 60,
    "held_out": 40,
    "seed": 3,
    "batch": 16,
    "samples": 50,
    "depth": 20,
}


@pytest.mark.parametrize("name", NAMES)
def test_smoke_runs_to_verdicts_tables_and_charts(name, smoke):
    experiment, store = find(name), smoke(name)
    assert store.errors() == []
    rows = store.rows()
    verdicts = judge(experiment.claims(rows))
    assert {verdict.verdict for verdict in verdicts} <= {HOLDS, FAILS, OPEN, UNTESTED}
    assert all(
        verdict.evidence and verdict.published and "nan" not in verdict.evidence
        for verdict in verdicts
    )
    for table in experiment.tables(rows):
        assert {len(row) for row in table.rows} == {len(table.header)}
    assert all(chart.series for chart in experiment.charts(rows))


@pytest.mark.parametrize("name", NAMES)
def test_every_scale_has_a_grid_and_assumptions(name):
    experiment = find(name)
    assert all(experiment.grid(scale) for scale in ("smoke", "cpu", "paper"))
    assert experiment.assumptions


def test_the_two_parts_share_no_image_and_follow_the_seed():
    found, again = images(DIGITS, "cpu"), images(DIGITS, "cpu")
    other = images({**DIGITS, "seed": 4}, "cpu")
    assert found.shape == (1, 8, 8)
    assert torch.equal(found.training[0], again.training[0])
    assert not torch.equal(found.training[0], other.training[0])
    everything = torch.cat([found.training[0], found.held_out[0]]).flatten(1)
    assert len(everything.unique(dim=0)) == 100
    assert float(everything.min()) == -1
    assert float(everything.max()) == 1


def test_pooling_keeps_the_mean_and_parity_has_two_classes():
    whole = images(DIGITS, "cpu")
    found = images({**DIGITS, "side": 4, "parity": True}, "cpu")
    assert found.shape == (1, 4, 4)
    assert found.classes == 2
    torch.testing.assert_close(found.training[0].mean((1, 2, 3)), whole.training[0].mean((1, 2, 3)))
    assert torch.equal(found.training[1], whole.training[1] % 2)


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ({**DIGITS, "training": 1400}, "training and held_out must be at most 1,438 together"),
        ({**DIGITS, "data": "none"}, "name must be one of"),
    ],
)
def test_images_that_are_not_there_are_refused(cell, message):
    with pytest.raises(ValueError, match=message):
        images(cell, "cpu")


def test_an_unknown_network_is_refused():
    with pytest.raises(ValueError, match="network must be one of 'All-CNN'"):
        network("AlexNet", (1, 8, 8), 10, 0)


def test_frobenius_is_the_mean_squared_eigenvalue():
    values = torch.tensor([3.0, 4.0, 0.0, 0.0], dtype=torch.float64)
    assert mean_square(operator(torch.diag(values)), 0)["frobenius"] == pytest.approx(25 / 4)


def test_a_measurement_agrees_with_the_dense_hessian():
    found = images({**DIGITS, "side": 4}, "cpu")
    model = network("MLP-4", found.shape, found.classes, 0)
    problem = curvature_problem(model, found, DIGITS)
    assert problem.num_samples == 50
    values = torch.linalg.eigvalsh(hessian(problem).dense().double())
    row = hessian_row(problem, {**DIGITS, "depth": problem.num_parameters})
    assert row["largest"] == pytest.approx(float(values[-1]), rel=1e-4)
    assert row["frobenius"] == pytest.approx(float(values.square().mean()), rel=0.3)
    assert row["curvature loss"] == pytest.approx(problem.loss())


def test_modes_are_the_papers_two_only_with_batch_norm():
    found = images({**DIGITS, "side": 4}, "cpu")
    assert modes_of(network("MLP-4", found.shape, found.classes, 0)) == ("eval",)
    wide = network("WideResNet-10×1", found.shape, found.classes, 0)
    assert modes_of(wide) == ("train", "eval")
    problem = curvature_problem(wide, found, DIGITS, "train")
    assert problem.norm == "train"
    # 50 images: two are left out, for they would be a batch of their own
    assert problem.batches.sizes == [16, 16, 16]


def test_validation_on_the_last_images_keeps_the_order_and_leaves_the_middle_out():
    cell = {"training": 5, "held_out": 3, "validation": softmax_decay.LAST}
    for seed in (0, 1):
        assert softmax_decay._order(cell, 10, seed).tolist() == [0, 1, 2, 3, 4, 7, 8, 9]


def test_otherwise_the_seed_orders_the_images():
    cell = {"training": 50, "held_out": 30}
    first, again, other = (softmax_decay._order(cell, 100, seed) for seed in (0, 0, 1))
    assert first.sort().values.tolist() == list(range(100))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, torch.arange(100))


def test_a_network_is_judged_by_its_largest_logit():
    inputs = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]])
    loss, accuracy = loss_and_accuracy(torch.nn.Identity(), (inputs, torch.tensor([0, 1, 1])))
    assert accuracy == pytest.approx(200 / 3)
    assert loss == pytest.approx(
        float(torch.nn.functional.cross_entropy(inputs, torch.tensor([0, 1, 1])))
    )
    found = images({**DIGITS, "side": 4}, "cpu")
    model = network("MLP-4", found.shape, found.classes, 0)
    norm = torch.nn.utils.parameters_to_vector(model.parameters()).detach().norm()
    assert final_row(model, found)["norm"] == pytest.approx(float(norm), rel=1e-6)


def test_a_watch_keeps_what_it_saw_and_tells_the_run_nothing():
    watch = Watch(lambda: {"value": 2.0}, every=1)
    assert watch.measure(None, None, epoch=3) == {}
    assert watch.rows == [{"epoch": 3, "value": 2.0}]


def test_decades_are_of_the_ratio_seed_by_seed():
    low = Rows([{"seed": 0, "x": 1.0}, {"seed": 1, "x": 5.0}])
    high = Rows([{"seed": 0, "x": 100.0}, {"seed": 1, "x": 500.0}])
    assert decades(high, low, "x").value == pytest.approx(2.0)
    assert decades(high, low, "x").stderr == pytest.approx(0.0, abs=1e-12)
    assert math.isnan(decades(high, Rows([{"seed": 0, "x": -1.0}]), "x").value)


def made(settings, columns, sign, seeds=6, factor=1.0):
    """Rows whose columns change from the first setting to the second by ``sign`` decades, with a
    little noise.
    """
    noise = (
        torch.randn(seeds, len(columns), 2, generator=torch.Generator().manual_seed(0))
        .mul(0.01)
        .tolist()
    )
    return [
        {
            **fixed,
            "seed": seed,
            **{
                name: 10.0 ** (1 + factor * sign * i * change + noise[seed][k][i])
                for k, (name, change) in enumerate(columns.items())
            },
        }
        for i, fixed in enumerate(settings)
        for seed in range(seeds)
    ]


SUBJECT = {"network": "MLP-100", "training": 1200, "data": "mnist"}


def verdicts_of(module, rows):
    """Verdict by claim, without the words on the data."""
    whole = Rows({**SUBJECT, **row} for row in rows)
    return {
        found.claim.replace(", 1,200 images of MNIST", ""): found.verdict
        for found in judge(module.claims(whole))
    }


MLP_COLUMNS = {"accuracy": 0.1, "largest": 1, "frobenius": 1, "training accuracy": -0.1, "norm": -1}


@pytest.mark.parametrize(("sign", "expected"), [(1, HOLDS), (-1, FAILS)])
def test_claims_on_the_perceptron_follow_from_rows(sign, expected):
    settings = [{"network": "MLP-100", "decay": decay, "last": True} for decay in mlp_decay.DECAYS]
    found = verdicts_of(mlp_decay, made(settings, MLP_COLUMNS, sign))
    assert [verdict for claim, verdict in found.items() if "with weight decay 5e-4" in claim] == [
        expected
    ] * 6


def test_printed_values_of_the_perceptron_hold_only_near_them():
    def rows(values):
        settings = [
            {"network": "MLP-100", "decay": decay, "last": True} for decay in mlp_decay.DECAYS
        ]
        out = made(settings, MLP_COLUMNS, 1)
        for row in out:
            row["frobenius"] = values[mlp_decay.DECAYS.index(row["decay"])] * (
                1 + 0.001 * row["seed"]
            )
        return out

    near, far = verdicts_of(mlp_decay, rows((0.12, 0.16))), verdicts_of(mlp_decay, rows((0.5, 0.9)))
    assert [near[claim] for claim in near if ": Frobenius" in claim] == [HOLDS, HOLDS]
    assert [far[claim] for claim in far if ": Frobenius" in claim] == [FAILS, FAILS]


def test_no_change_at_any_seed_is_no_fall():
    settings = [{"network": "MLP-100", "decay": decay, "last": True} for decay in mlp_decay.DECAYS]
    rows = [{**row, "training accuracy": 100.0} for row in made(settings, MLP_COLUMNS, 1)]
    (found,) = [
        verdict
        for claim, verdict in verdicts_of(mlp_decay, rows).items()
        if ": training accuracy" in claim
    ]
    assert found == FAILS


@pytest.mark.parametrize(("sign", "expected"), [(1, HOLDS), (-1, FAILS)])
def test_claims_on_convolutional_networks_follow_from_rows(sign, expected):
    columns = {"accuracy": 0.1, "largest": 1, "frobenius": 2, "excess": -0.5}
    rows = []
    for name, modes in (("LeNet-5", {"eval": 1}), ("WideResNet-10×1", {"train": 1, "eval": 2})):
        for mode, factor in modes.items():
            settings = [{"network": name, "mode": mode, "decay": decay} for decay in (0.0, 5e-4)]
            rows += made(settings, columns, sign, factor=factor)
    found = verdicts_of(cnn_sharpness.CNN_DECAY, rows)
    assert len(found) == 5 + 8
    assert set(found.values()) == {expected}


@pytest.mark.parametrize(("sign", "expected"), [(1, HOLDS), (-1, FAILS)])
def test_claims_on_gadam_follow_from_rows(sign, expected):
    columns = {"accuracy": 0.1, "largest": 1, "frobenius": 1, "training accuracy": 0.1}
    rows = []
    for mode, factor in (("train", 1), ("eval", 3)):
        settings = [{"mode": mode, "optimizer": name} for name in cnn_sharpness.OPTIMIZERS]
        rows += made(settings, columns, sign, factor=factor)
    for row in rows:
        row["training accuracy"] = (
            99.0 + 0.01 * row["seed"] - (0.1 if row["optimizer"] == "SGD" else 0)
        )
    found = verdicts_of(cnn_sharpness.GADAM_SHARPNESS, rows)
    alike = "MLP-100: Gadam and SGD train to similar accuracy (within 1 point)"
    assert found.pop(alike) == HOLDS
    assert set(found.values()) == {expected}
    for row in rows:
        row["training accuracy"] -= 5 if row["optimizer"] == "SGD" else 0
    assert verdicts_of(cnn_sharpness.GADAM_SHARPNESS, rows)[alike] == FAILS
    full = [{**row, "training accuracy": 100.0} for row in rows]
    assert verdicts_of(cnn_sharpness.GADAM_SHARPNESS, full)[alike] == UNTESTED


def halves(accuracy, sharpness):
    """Rows of a network whose accuracy and λ₁ go these ways with weight decay."""
    columns = {"accuracy": accuracy, "largest": sharpness, "frobenius": 2, "excess": -0.5}
    return made(
        [{"network": "LeNet-5", "mode": "eval", "decay": decay} for decay in (0.0, 5e-4)],
        columns,
        1,
    )


@pytest.mark.parametrize(
    ("accuracy", "sharpness", "expected"),
    [(0.1, 1, HOLDS), (-0.1, 1, FAILS), (0.1, -1, FAILS), (0.0, 1, OPEN)],
    ids=["both", "sharper and worse", "flatter and better", "sharper alone"],
)
def test_sharper_and_better_holds_of_both_together_only(accuracy, sharpness, expected):
    found = verdicts_of(cnn_sharpness.CNN_DECAY, halves(accuracy, sharpness))
    assert found["LeNet-5: validation accuracy and λ₁ rise together with weight decay"] == expected


@pytest.mark.parametrize(
    ("rank", "shown", "origin", "expected"),
    [(300, 0.7, 1e-9, HOLDS), (900, 0.2, 1e-3, FAILS)],
    ids=["low", "full"],
)
def test_claims_on_degeneracy_follow_from_rows(rank, shown, origin, expected):
    rows = [
        {
            "network": "MLP-9",
            "exact": True,
            "mode": "eval",
            "curvature": curvature,
            "seed": seed,
            "epoch": epoch,
            "last": epoch > 0,
            "bound": 500,
            "parameters": 1000,
            "rank": rank,
            "zeros": 0.7,
            "degeneracy": shown + 0.001 * seed,
            "origin": origin * (1 + 0.01 * seed),
        }
        for curvature in rank_degeneracy.CURVATURES
        for seed in range(6)
        for epoch in (0, 4)
    ]
    found = verdicts_of(rank_degeneracy, rows)
    assert len(found) == 9
    others = {
        claim: found.pop(claim)
        for claim in list(found)
        if "Gauss–Newton matrix" in claim and "Hessian" in claim
    }
    assert len(others) == 2
    assert set(found.values()) == {expected}


def test_other_networks_are_not_asked_what_is_said_of_one_that_has_run():
    shared = {"exact": False, "mode": "eval", "last": True, "bound": None, "parameters": 1000}
    rows = [
        {**shared, "network": name, "curvature": curvature, "seed": seed}
        | {"degeneracy": 0.5, "origin": 1e-8, "epoch": 4}
        for name in ("MLP-9", "VGG-16")
        for curvature in rank_degeneracy.CURVATURES
        for seed in range(3)
    ]
    for asked, others in (("VGG-16", rows), ("MLP-9", rows[:6])):
        found = verdicts_of(rank_degeneracy, others)
        assert len(found) == 3
        assert all(claim.startswith(f"{asked}: ") for claim in found)


@pytest.mark.parametrize(("sign", "expected"), [(1, HOLDS), (-1, FAILS)])
def test_claims_on_hessian_and_gauss_newton_matrix_at_the_origin_follow_from_rows(sign, expected):
    rows = [
        {
            "network": "MLP-9",
            "exact": False,
            "mode": "eval",
            "curvature": curvature,
            "seed": seed,
            "epoch": 4,
            "last": True,
            "bound": None,
            "parameters": 1000,
            "degeneracy": 0.5 + side * sign * 0.1 + 0.001 * seed,
            "origin": 10.0 ** (-8 + side * sign + 0.01 * seed**2),
        }
        for curvature, side in (("hessian", 1), ("ggn", 0))
        for seed in range(6)
    ]
    rows[0]["degeneracy"] += 0.001
    rows[0]["origin"] *= 1.01
    found = verdicts_of(rank_degeneracy, rows)
    assert [verdict for claim, verdict in found.items() if "the Hessian" in claim] == [expected] * 2


def test_bounds_are_the_papers_for_chains_and_none_with_shortcuts():
    found = images({**DIGITS, "data": "digits"}, "cpu")
    chain = network("MLP-20-12", found.shape, found.classes, 0)
    problem = Problem(chain, "cross_entropy", found.training)
    assert rank_degeneracy.claimed_bound(problem, chain, 64, 10) == 4 * 10 * (20 + 12 + 10 + 64)
    wide = network("WideResNet-10×1", found.shape, found.classes, 0)
    assert rank_degeneracy.claimed_bound(problem, wide, 64, 10) is None
    small = torch.nn.Sequential(
        torch.nn.Conv2d(1, 3, 3), torch.nn.Flatten(), torch.nn.Linear(108, 10)
    )
    assert rank_degeneracy.claimed_bound(problem, small, 64, 10) == 4 * 10 * (3 + 10 + 64)


def test_exact_rank_is_that_of_a_known_matrix():
    factor = torch.randn(12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert rank_degeneracy.exact_rank(operator(factor @ factor.T)) == 5


def test_softmax_regression_loses_a_class_of_rank():
    """Adding a vector to all rows of its weights changes nothing: d + 1 directions of no
    curvature, for GGN and H.
    """
    generator = torch.Generator().manual_seed(0)
    x, y = (
        torch.randn(200, 6, generator=generator),
        torch.randint(0, 3, (200,), generator=generator),
    )
    model = torch.nn.Linear(6, 3).double()
    for make in (ggn, hessian):
        problem = Problem(model, "cross_entropy", (x.double(), y))
        assert rank_degeneracy.exact_rank(make(problem)) == 7 * (3 - 1)


def toy_rows(seeds=6):
    experiment = find("deep-linear-toy")
    cells = deep_linear_toy.cells(seeds)
    return [{**cell, **row} for cell in cells for row in experiment.run(cell, "cpu")]


def test_the_toys_minimum_has_the_closed_form_spectrum():
    """At (−s, s, s) with s·exp(−s³) = μ the Hessian of exp(w₁w₂w₃) has eigenvalues μ(3s³ − 2), μ
    and μ.
    """
    for row in toy_rows(1):
        if row["kind"] != "minimiser":
            continue
        s, decay = row["norm"] / math.sqrt(3), row["decay"]
        assert s * math.exp(-(s**3)) == pytest.approx(decay, rel=1e-10)
        weights = torch.tensor([-s, s, s], dtype=torch.float64)
        problem = deep_linear_toy.toy_problem(weights, 1.0)
        values = torch.linalg.eigvalsh(hessian(problem).dense())
        exact = sorted([decay, decay, decay * (3 * s**3 - 2)])
        torch.testing.assert_close(
            values, torch.tensor(exact, dtype=torch.float64), rtol=1e-9, atol=0
        )
        assert float((problem.gradient() + decay * weights).norm()) == pytest.approx(0, abs=1e-10)
        assert row["rank"] == 3


def test_the_toys_hessian_is_the_printed_one_and_the_second_derivative_of_the_product():
    weights, x = torch.tensor([0.7, -1.3, 0.4], dtype=torch.float64), 1.7
    a, b, c = weights.tolist()
    second = torch.tensor([[0, c, b], [c, 0, a], [b, a, 0]], dtype=torch.float64)
    whole = deep_linear_toy.printed_hessian(weights, x) + x * math.exp(x * a * b * c) * second
    torch.testing.assert_close(hessian(deep_linear_toy.toy_problem(weights, x)).dense(), whole)
    torch.testing.assert_close(
        deep_linear_toy.others(weights), torch.tensor([b * c, a * c, a * b]).double()
    )


def test_the_toys_verdicts_are_those_of_the_mathematics():
    found = {
        verdict.claim: verdict.verdict
        for verdict in judge(deep_linear_toy.claims(Rows(toy_rows())))
    }
    false = [claim for claim, verdict in found.items() if verdict == FAILS]
    assert [claim.split(" (")[0] for claim in false] == [
        "the Hessian of three weights has rank 1",
        "a longer product has no higher rank",
        "λ₁ is the trace",
    ]
    assert all(verdict == HOLDS for claim, verdict in found.items() if claim not in false)


def test_the_toys_claims_would_hold_of_the_printed_hessian():
    rows = [
        {**row, "rank": row["printed rank"], "gap": 0.0} if row["kind"] == "point" else row
        for row in toy_rows()
    ]
    assert {verdict.verdict for verdict in judge(deep_linear_toy.claims(Rows(rows)))} == {HOLDS}
