"""The least damping over batch sizes: Adam's and KFAC's edges against runs by hand, the rule,
claims and storage.
"""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from lambdahat.experiments.kit import image_setting, training
from lambdahat.experiments.kit.cells import Rows
from lambdahat.experiments.kit.claims import judge
from lambdahat.experiments.minibatch import least_damping
from lambdahat.experiments.minibatch.largest_rates import late_cells
from lambdahat.experiments.minibatch.least_damping import (
    EXPERIMENT,
    OPTIMIZERS,
    SCALES,
    _train_kfac,
    expected_damping,
    least_epsilon,
    least_kfac_damping,
    run,
    scaled_runs,
)
from lambdahat.experiments.minibatch.stability_edges import (
    EdgeSubject,
    Frontier,
    RateRule,
    SearchSection,
    edge_rows,
    frontiers_of,
    prepare,
    rule_rows,
    rules_of,
    scaling_of,
    scaling_rows,
)
from lambdahat.randommatrix import predict
from lambdahat.report.figures import draw
from lambdahat.results import Eigenpairs, Estimate
from tests.experiments.minibatch.made import assert_same_rows, whole

TINY = EdgeSubject("tiny", "mlp", "digits", 128, (128,), 10, 2, 1, 128, {"widths": (4,)})
SIZES = (16, 64, 256, 1024)


def claims_of(frontiers, rules, scaling):
    return list(least_damping.claims_of(frontiers, rules, scaling))


@pytest.fixture(scope="module")
def found(smoke):
    return whole(smoke(EXPERIMENT.name))


@pytest.fixture(scope="module")
def ground():
    return prepare(TINY, {}, 0, "cpu")


def trained_by_adam(ground, epsilon):
    """The loss after all steps of Adam at α = 1 on all data, of the first seed."""
    model = prepare(TINY, {}, 0, "cpu").models[0]
    optimizer = torch.optim.Adam(model.parameters(), 1.0, eps=epsilon)
    x, y = ground.train
    for _ in range(TINY.steps):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return cross_entropy(model(x), y).item()


def test_adam_s_least_epsilon_is_an_edge(ground):
    """With all data in every batch: just above it torch's Adam trains, just below it does not."""
    section = SearchSection(1e-3, 1e3, points=12)
    edge = float(least_epsilon(ground, 0, section).edges[0, 0])
    first = cross_entropy(ground.models[0](ground.train[0]), ground.train[1]).item()
    assert trained_by_adam(ground, edge * section.resolution) < 0.9 * first
    assert not trained_by_adam(ground, edge / section.resolution) < 0.9 * first


def test_kfac_s_least_damping_is_an_edge(ground):
    section = SearchSection(1e-2, 1e6, points=6, rounds=3)
    edge = float(least_kfac_damping(ground, 0, section).edges[0, 0])
    x, y = ground.train
    first = cross_entropy(ground.models[0](x), y).item()

    def ends(damping):
        model = _train_kfac(ground, 0, damping, 128, TINY.steps, 0)
        return math.inf if model is None else cross_entropy(model(x), y).item()

    assert ends(edge * section.resolution) < 0.9 * first
    assert not ends(edge / section.resolution) < 0.9 * first


def test_training_leaves_the_start_alone(ground):
    before = [parameter.clone() for parameter in ground.models[0].parameters()]
    assert _train_kfac(ground, 0, 1.0, 128, 2, 0) is not None
    assert all(
        torch.equal(a, b) for a, b in zip(before, ground.models[0].parameters(), strict=True)
    )
    assert _train_kfac(ground, 0, 1e-30, 128, 20, 0) is None  # diverges


def rule(excess=32.0, full=2.0, told=None):
    """λ₁(B) = λ₁ + c/B of batches; ``told`` has c by model."""
    sizes = torch.tensor(SIZES, dtype=torch.float64)
    values = full + excess / sizes
    predicted = {model: full + each / sizes for model, each in (told or {}).items()}
    return RateRule(
        "net", "at the start", 10**9, SIZES, full, predicted, values[:, None].repeat(1, 3)
    )


def test_eq_5_36_is_that_of_the_additive_model():
    """By ``predict``: δ = αPσ²/(2bλ₁) with σ² = 0.01 of an element, P = 400, b = B/(1 − B/N), to
    1/P.
    """
    top, order, total = 3.0, 400, 10_000
    pairs = Eigenpairs(
        torch.tensor([top]), torch.empty(order, 0), torch.zeros(1), torch.ones(1, dtype=torch.bool)
    )
    told = [
        float(predict(pairs, Estimate(0.01), size, population=total, model="additive").largest)
        for size in SIZES
    ]
    values = torch.tensor(told, dtype=torch.float64)
    here = RateRule(
        "net",
        "at the start",
        total,
        SIZES,
        top,
        {"additive": values},
        values[:, None].repeat(1, 3) + 1.0,
    )
    sizes = torch.tensor(SIZES, dtype=torch.float64)
    expected = 0.5 * order * 0.01 * (1 - sizes / total) / (2 * sizes * top)
    torch.testing.assert_close(here.dampings(0.5, "additive"), expected, rtol=1.01 / order, atol=0)
    torch.testing.assert_close(
        here.dampings(0.5), expected + 0.25, rtol=1e-3, atol=0
    )  # what batches show is not Eq. 5.36


def test_the_rule_of_batches_is_a_closed_form():
    """δ = α(λ₁(B) − λ₁)/2, and for ε heavy ball of rate (1 − β₁)/ε: ε = (λ₁ + 19c/B)/38 at β₁ =
    0.9.
    """
    sizes = torch.tensor(SIZES, dtype=torch.float64)
    torch.testing.assert_close(expected_damping(rule(), "kfac"), 16 / sizes)
    torch.testing.assert_close(expected_damping(rule(), "adam"), (2 + 19 * 32 / sizes) / 38)


def frontier(edges, optimizer="kfac"):
    noise = torch.tensor([0.99, 1.0, 1.01], dtype=torch.float64)
    return Frontier("net", optimizer, "trains", SIZES, edges[:, None] * noise, 1.01)


def verdicts(edges):
    return [verdict.verdict for verdict in judge(claims_of([frontier(edges)], [rule()], []))]


def test_claims_are_judged_as_stated():
    sizes = torch.tensor(SIZES, dtype=torch.float64)
    assert verdicts(16 / sizes) == ["holds", "holds"]
    assert verdicts(torch.full_like(sizes, 0.1)) == ["does not hold", "does not hold"]
    assert verdicts(160 / sizes) == ["holds", "does not hold"]


def test_eq_5_36_is_judged_by_itself():
    """Batches add 32/B, isotropic noise 0.32/B: each is the least damping in one case and not in
    the other.
    """
    sizes, here = (
        torch.tensor(SIZES, dtype=torch.float64),
        rule(told={"additive": 0.32, "directional": 30.0}),
    )
    for level, expected in ((16, ["holds", "does not hold"]), (0.16, ["does not hold", "holds"])):
        made = claims_of([frontier(level / sizes)], [here], [])[1:]
        assert [(claim.source, claim.own) for claim in made] == [
            ("after Eq. 5.36", True),
            ("Eq. 5.36", False),
        ]
        assert [verdict.verdict for verdict in judge(made)] == expected


def test_the_table_tells_eq_5_36_from_what_batches_show():
    here, sizes = (
        rule(told={"additive": 0.32, "directional": 30.0}),
        torch.tensor(SIZES, dtype=torch.float64),
    )
    rows = Rows([*edge_rows(frontier(16 / sizes)), *rule_rows(here)])
    (table,) = EXPERIMENT.tables(rows)
    assert table.header == (
        "B",
        "kfac",
        "Eq. 5.36, Pσ²",
        "τ² for Pσ²",
        "from batch curvature, kfac",
    )
    assert table.rows[0] == ("16", "1 ± 1 %", "0.01", "0.938", "1")


def test_everything_is_measured(found):
    assert [f.optimizer for f in frontiers_of(found)] == list(OPTIMIZERS)
    runs = scaling_of(found)
    assert [each.optimizer for each in runs] == list(OPTIMIZERS)
    assert runs[0].rules == ("inverse", "constant")
    assert len(judge(EXPERIMENT.claims(found))) == 10
    assert len(EXPERIMENT.tables(found)) == 3


LEFT_OUT = [
    {"part": "edge", "batch_size": 64},
    {"part": "edge"},
    {"part": "rule"},
    {"part": "scaling"},
]


@pytest.mark.parametrize("left", LEFT_OUT)
def test_some_cells_of_a_grid_are_enough_to_say_something(found, left):
    """As while it runs: the rest of the edges, or no edges, rules or runs at all."""
    rows = Rows(
        [row for row in found if any(row.get(name) != value for name, value in left.items())]
    )
    assert len(rows.where(**left)) == 0 < len(rows)
    judge(EXPERIMENT.claims(rows))
    assert all(
        len(line) == len(table.header) for table in EXPERIMENT.tables(rows) for line in table.rows
    )
    assert len(EXPERIMENT.charts(rows)) > 0


def test_cells_are_parts_of_one_search(found):
    """KFAC's least δ at all batch sizes at once and Adam's scaled runs are those of the cells."""
    assert [cell["part"] for cell in EXPERIMENT.grid("smoke")] == ["edge"] * 6 + ["rule"] + [
        "scaling"
    ] * 2
    whole = prepare(SCALES["smoke"][0], {}, 0, "cpu")
    assert_same_rows(
        found.where(part="edge", optimizer="kfac"), edge_rows(least_kfac_damping(whole, 0))
    )
    assert_same_rows(
        found.where(part="scaling", optimizer="adam"), scaling_rows(scaled_runs(whole, "adam", 0))
    )


def test_charts_come_from_rows(found):
    dampings, *scaled = EXPERIMENT.charts(found)
    assert [series.name for series in dampings.series] == [
        "Adam's ε",
        "KFAC's δ",
        "Eq. 5.36, Pσ²",
        "τ² for Pσ²",
        "from batch curvature, adam",
        "from batch curvature, kfac",
    ]
    assert dampings.series[4].y == pytest.approx(
        expected_damping(rules_of(found)[0], "adam").tolist()
    )
    assert [chart.source for chart in scaled] == [
        "Figure 5.12",
        "not in the thesis",
        "Figure 5.11",
        "Figure 5.14",
        "not in the thesis",
        "Figure 5.13",
    ]
    for chart in (dampings, *scaled):
        draw(chart)


LATE = image_setting("digits", 200, 100, epochs=3, batch=50) | {
    "network": "MLP-8",
    "precision": "float32",
    "rate": 0.1,
    "steps": 12,
    "samples": 150,
}


def test_the_least_epsilon_of_a_trained_network_is_that_of_adam():
    """With all data in every batch, Adam at α = 1 passes above the edge and fails below it."""
    cell, rule = late_cells(LATE, (200,), (16,), seeds=1)
    (row,) = run(cell, "cpu")
    assert row["optimizer"] == "adam"

    def loss_after(epsilon):
        model, data = training.model_and_images(cell, "cpu")
        sgd = torch.optim.SGD(model.parameters(), cell["rate"], 0.9)
        training.train(data.problem(model), cell, sgd)
        adam, (x, y) = torch.optim.Adam(model.parameters(), 1.0, eps=epsilon), data.training
        for _ in range(cell["steps"]):
            adam.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            adam.step()
        return training.loss_and_accuracy(model, data.training)[0]

    ratio, learnt = math.sqrt(row["resolution"]), 0.9 * math.log(10)
    assert loss_after(row["edge"] * ratio) < learnt
    assert not loss_after(row["edge"] / ratio) < learnt
    assert all(row["additive"] > row["full"] for row in run(rule, "cpu"))


def test_claims_on_adam_s_epsilon_of_a_trained_network():
    *cells, last = late_cells({**LATE, "network": "net"}, (16, 64, 256), (16, 64, 256), seeds=3)
    rows = [
        {**cell, "optimizer": "adam", "criterion": "trains", "resolution": 1.1, "loss": 1.0}
        | {"batch_size": size, "edge": (1 + 0.01 * cell["seed"]) * 50 / size}
        for cell in cells
        for size in (16, 64, 256)
    ]
    rows += [
        {**last, "point": "late", "population": 10**9, "full": 1.0, "batch_size": size}
        | {"batch": batch, "largest": 1.0 + 100 / size, "additive": 1.0 + 110 / size}
        for size in (16, 64, 256)
        for batch in range(5)
    ]
    made = [claim for claim in EXPERIMENT.claims(Rows(rows)) if not claim.own]
    found = [verdict.verdict for verdict in judge(made)]
    # the slope and Eq. 5.36; then Adam's scaled runs, and KFAC
    assert found == ["holds", "holds"] + ["not testable here"] * 4
    alone = [claim for claim in EXPERIMENT.claims(Rows(rows).where(part="edge")) if not claim.own]
    assert {claim.sentence for claim in alone} == {claim.sentence for claim in made}
    assert len(alone) == len(made) == 6


def test_paper_scale_trains_the_paper_s_network():
    assert EXPERIMENT.stand_in("paper") == ""
    assert EXPERIMENT.reduced("paper") == "34 of 300 epochs"
