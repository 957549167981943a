"""Stable rates over batch sizes: the edge where it is known, the rule in closed form, claims and
storage.
"""

import math
from dataclasses import replace

import pytest
import torch

from lambdahat.experiments.kit import image_setting, training
from lambdahat.experiments.kit.cells import Rows
from lambdahat.experiments.kit.claims import judge
from lambdahat.experiments.minibatch import largest_rates
from lambdahat.experiments.minibatch.largest_rates import (
    EXPERIMENT,
    SCALES,
    errors_of,
    far_from,
    late_cells,
    rule_of,
    run_late,
    scaled_runs,
    stable_rates,
)
from lambdahat.experiments.minibatch.stability_edges import (
    Cells,
    EdgeSubject,
    Frontier,
    RateRule,
    ScalingRuns,
    SearchSection,
    StackedSettings,
    edge_rows,
    frontiers_of,
    prepare,
    rule_at,
    rule_rows,
    rules_of,
    scaling_of,
    scaling_rows,
    scaling_runs,
    start_of,
    train_from,
)
from lambdahat.operators import hessian
from lambdahat.report.figures import draw
from tests.experiments.minibatch.made import assert_same_rows, whole

TINY = EdgeSubject("tiny", "mlp", "digits", 128, (4, 32, 128), 10, 2, 1, 32, {"widths": (4,)})
SAMPLES = 10**9
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def claims_of(frontiers, rules, scaling):
    return list(largest_rates.claims_of(frontiers, rules, scaling))


@pytest.fixture(scope="module")
def ground():
    return prepare(TINY, {}, 0, "cpu")


@pytest.fixture(scope="module")
def found(smoke):
    return whole(smoke(EXPERIMENT.name))


def test_the_steady_edge_is_that_of_gradient_descent():
    """With all data in every batch nothing is left to chance: steps written out know the edge.

    That of "trains" is not compared: at rates a hundred times the steady ones the steps are
    chaotic, and whether the last loss lies below the first depends on how the machine rounds.
    """
    section = SearchSection(1e-2, 1e3, points=12)
    ground = prepare(EdgeSubject("linear", "softmax", "digits", 128, (128,), 20, 2), {}, 0, "cpu")
    edges = stable_rates(ground, "sgd", 0, "steady", section=section).edges
    start = start_of(ground)

    def steady(rate):
        problem, losses = start, []
        for _ in range(20):
            losses.append(problem.loss())
            problem = problem.at(problem.vector - rate * problem.gradient())
        worst = torch.tensor(losses).reshape(10, 2).mean(1).max()
        return bool(worst < 1.1 * start.loss()) and problem.loss() < 0.9 * start.loss()

    rates = torch.logspace(-1, 2, 61, dtype=torch.float64)  # a factor 1.12 apart
    passes = torch.tensor([steady(float(rate)) for rate in rates])
    last = int(passes.nonzero().max())
    assert bool(passes[int(passes.nonzero().min()) : last].all())  # one edge, no more
    ratio = float(rates[1] / rates[0])
    middle = float((rates[last] * rates[last + 1]).sqrt())
    assert float(edges[0, 0]) == pytest.approx(middle, rel=ratio * section.resolution - 1)


def test_steady_rates_are_no_larger_than_those_that_train(found):
    by = {(frontier.optimizer, frontier.criterion): frontier for frontier in frontiers_of(found)}
    for optimizer in ("sgd", "momentum"):
        ratios = by[optimizer, "steady"].edges / by[optimizer, "trains"].edges
        assert int(ratios.isfinite().sum()) >= 4
        assert bool((ratios[ratios.isfinite()] <= 1.0 + 1e-9).all())


def rule(excess, batches=4, full=2.0):
    """λ₁(B) = λ₁ + c/B, exactly."""
    values = torch.tensor([full + excess / size for size in SIZES], dtype=torch.float64)
    spread = 1e-3 * torch.tensor([1.0, -1.0]).repeat(batches // 2)
    measured = values[:, None] + spread / torch.tensor(SIZES)[:, None]
    return RateRule("net", "at the start", SAMPLES, SIZES, full, {"additive": values}, measured)


def test_the_rule_s_rates_and_turning_point_are_closed_forms():
    here = rule(excess=12.0)
    expected = torch.tensor([2 / (2 + 12 / size) for size in SIZES], dtype=torch.float64)
    torch.testing.assert_close(here.rates("sgd"), expected)
    torch.testing.assert_close(here.rates("sgd", "additive"), expected)
    assert here.turning("sgd") == pytest.approx(6.0)
    limit = torch.tensor([3.8 / (2 + 19 * 12 / size) for size in SIZES], dtype=torch.float64)
    torch.testing.assert_close(here.rates("momentum"), limit)
    assert here.turning("momentum") == pytest.approx(6.0 * 19)
    halved = float(here.rates("sgd")[-1]) / 2  # at B₀ the rate is half of what all data allow
    at = 2 / (2 + 12 / here.turning("sgd"))
    assert at == pytest.approx(halved, rel=0.03)
    torch.testing.assert_close(
        here.dampings(0.5), torch.tensor([3 / size for size in SIZES], dtype=torch.float64)
    )


def test_measured_rules_are_eigenvalues_of_batches(ground):
    problem = start_of(ground)
    here = rule_at(ground, problem, "at the start", 0)
    top = torch.linalg.eigvalsh(hessian(problem).dense().double())[-1]
    assert here.full == pytest.approx(float(top), rel=1e-3)
    assert here.measured.shape == (3, 5)
    assert here.measured[-1].tolist() == pytest.approx([here.full] * 5, rel=2e-2)  # B = N
    assert float(here.predicted["additive"][-1]) == pytest.approx(here.full, rel=1e-3)


def test_a_trained_point_is_that_of_the_cells(ground):
    moved = train_from(ground, 0.5, 0)
    cells = Cells(ground.models[:1], ground.train, StackedSettings("sgd", torch.tensor([[0.5]])))
    cells.train(32, TINY.steps, 0, "test")
    assert moved.loss() == pytest.approx(float(cells.evaluate(ground.train)[0]), rel=1e-5)
    assert moved.loss() < start_of(ground).loss()


def frontier(edges, optimizer="sgd", criterion="trains"):
    noise = torch.tensor([0.99, 1.0, 1.01], dtype=torch.float64)
    return Frontier("net", optimizer, criterion, SIZES, edges[:, None] * noise, 1.01)


def verdicts(frontiers, rules, scaling=()):
    return [verdict.verdict for verdict in judge(claims_of(frontiers, rules, scaling))]


def test_claims_hold_where_the_rule_is_exact():
    # threshold at B = 3,200: all batch sizes lie in the linear part
    here = rule(excess=64.0, full=0.02)
    edge = frontier(here.rates("sgd"))
    assert verdicts([edge], [here]) == ["holds", "not testable here", "holds"]
    made = claims_of([edge], [here], [])
    assert made[0].reading.value == pytest.approx(1.0, abs=0.02)
    assert (
        made[1].unmet
        == "fewer than 3 batch sizes with a rate lie from four times the rule's threshold on,"
        " 1.28e+04"
    )
    flat = rule(excess=0.01)
    assert verdicts([frontier(flat.rates("sgd"))], [flat]) == [
        "not testable here",
        "holds",
        "holds",
    ]


def test_claims_fail_where_they_are_wrong():
    sizes = torch.tensor(SIZES, dtype=torch.float64)
    here = rule(excess=64.0, full=0.02)
    constant = verdicts([frontier(torch.full_like(sizes, 0.1))], [here])
    assert constant == ["does not hold", "not testable here", "does not hold"]
    growing = verdicts([frontier(0.1 * sizes)], [rule(excess=0.01)])
    # where the rule leaves no sizes, also up to the last
    assert growing == ["not testable here", "holds", "does not hold", "does not hold"]


def test_where_the_rule_leaves_too_few_sizes_growth_is_read_to_its_measured_end():
    """Rates 1/(1 + B₀/B) with B₀ = 1,000, where the rule has it at 0.005: all sizes are below,
    the slope near 1.
    """
    sizes = torch.tensor(SIZES, dtype=torch.float64)
    theirs, ours, *_ = claims_of([frontier(1 / (1 + 1000 / sizes))], [rule(excess=0.01)], [])
    x, y = sizes.log(), (1 / (1 + 1000 / sizes)).log()
    expected = float(((x - x.mean()) * y).sum() / (x - x.mean()).square().sum())
    assert (theirs.own, theirs.ours) == (
        False,
        (
            "not known; not testable: fewer than 3 batch sizes with a rate lie up to the rule's"
            " threshold, 0.005"
        ),
    )
    assert ours.reading.value == pytest.approx(expected, rel=1e-6)
    assert (ours.own, ours.unit) == (True, " up to B = 1e+03, chosen after the results")
    short = claims_of([frontier(1 / (1 + 20 / sizes))], [rule(excess=0.01)], [])[1]
    inside = sizes <= 16
    x, y = x[inside] - x[inside].mean(), (1 / (1 + 20 / sizes)).log()[inside]
    assert short.reading.value == pytest.approx(float((x * y).sum() / x.square().sum()), rel=1e-6)
    told = claims_of(
        [frontier(rule(excess=64.0, full=0.02).rates("sgd"))], [rule(excess=64.0, full=0.02)], []
    )
    assert told[0].unit == " up to the rule's threshold, B = 3.2e+03"
    flat = claims_of([frontier(torch.ones_like(sizes))], [rule(excess=0.01)], [])
    assert not any("chosen after" in claim.unit for claim in flat)


def test_growth_by_the_root_is_not_taken_for_linear_by_a_measured_end():
    sizes = torch.tensor(SIZES, dtype=torch.float64)
    assert verdicts([frontier(0.1 * sizes.sqrt())], [rule(excess=0.01)])[1] == "does not hold"


def test_steady_edges_and_the_rule_s_height_are_claims_of_ours():
    here = rule(excess=64.0, full=0.02)
    for criterion, expected in (("trains", [False, False, True]), ("steady", [True, True, True])):
        made = claims_of([frontier(here.rates("sgd"), criterion=criterion)], [here], [])
        assert [claim.own for claim in made] == expected


def test_what_the_choice_after_the_results_was_is_said():
    assert any("after the results had been seen" in line for line in EXPERIMENT.assumptions)


def test_the_worst_batch_size_decides_whether_the_rule_predicts():
    """Twice the rule's rate and 10 % at one batch size, half a per cent off elsewhere."""
    here = rule(excess=0.01)
    edges = 1.005 * here.rates("sgd")
    edges[2] *= 2.2
    claim = claims_of([frontier(edges)], [here], [])[-1]
    assert claim.reading.value == pytest.approx(math.log2(1.005 * 2.2), abs=1e-3)
    assert claim.unit.endswith("B = 4")
    assert verdicts([frontier(edges)], [here])[-1] == "does not hold"


@pytest.mark.parametrize(
    ("power", "verdict"), [(0.5, "holds"), (1.0, "does not hold"), (0.0, "does not hold")]
)
def test_adam_s_rate_is_to_grow_as_the_square_root(power, verdict):
    sizes = torch.tensor(SIZES, dtype=torch.float64)
    assert verdicts([frontier(0.01 * sizes**power, "adam")], [rule(1.0)]) == [verdict]


def runs(linear, root, distance=(30.0, 20.0), optimizer="momentum", base=0.1):
    """Errors at B = 16 and 128 under two rules, three seeds."""
    seeds = torch.tensor([0.0, 0.001, 0.002], dtype=torch.float64)
    errors = torch.tensor([[base, linear], [base, root]], dtype=torch.float64)[..., None] + seeds
    far = (
        torch.tensor([[25.0, distance[0]], [25.0, distance[1]]], dtype=torch.float64)[..., None]
        + seeds
    )
    values = torch.ones(2, 2)
    return ScalingRuns(
        "net",
        optimizer,
        "rate",
        16,
        3,
        ("linear", "square root"),
        (16, 128),
        values,
        errors,
        errors,
        far,
    )


def test_rules_are_compared_seed_by_seed():
    assert verdicts([], [], [runs(0.1, 0.2)]) == ["holds", "holds", "holds", "undecided"]
    assert verdicts([], [], [runs(0.3, 0.2, (10.0, 20.0))])[:3] == ["does not hold"] * 3
    assert verdicts([], [], [runs(0.3, 0.2, optimizer="adam")]) == ["holds"]


@pytest.mark.parametrize(("base", "shown"), [(0.55, "55"), (math.nan, "90")])
def test_nothing_is_judged_where_the_run_that_is_scaled_learnt_nothing(base, shown):
    lost = [runs(0.6, 0.9, base=base), runs(0.9, 0.6, optimizer="adam", base=base)]
    assert verdicts([], [], lost) == ["not testable here"] * 5
    for claim in claims_of([], [], lost):
        assert claim.unmet == f"the run at B = 16 that is scaled errs on {shown} %"
    # the figure is shown all the same
    assert claims_of([], [], lost)[1].reading.value == pytest.approx(30.0)
    assert verdicts([], [], [runs(0.6, 0.9, base=0.45)])[1] == "holds"


@pytest.mark.parametrize(
    ("loss", "verdict"), [(2.3, "holds"), (math.nan, "holds"), (0.4, "does not hold")]
)
def test_a_rate_below_the_edge_that_is_lost_later_is_seen(loss, verdict):
    """Rates 1.9 and 8 at B = 16: the first is below all edges, 1.98 to 2.02. That at 128 is
    beyond the reference.
    """
    made = runs(0.1, 0.2)
    losses = torch.tensor([[loss, 9.0], [1.0, 9.0]], dtype=torch.float64)[..., None] + torch.tensor(
        [0.0, 0.01, 0.02]
    )
    made = replace(made, values=torch.tensor([[1.9, 0.1], [8.0, 0.1]]), training_loss=losses)
    edge = frontier(torch.full((len(SIZES),), 2.0, dtype=torch.float64), "momentum")
    steady = frontier(torch.full((len(SIZES),), 9.0, dtype=torch.float64), "momentum", "steady")
    (found,) = [
        claim for claim in claims_of([edge, steady], [], [made]) if "later" in claim.sentence
    ]
    assert judge([found])[0].verdict == verdict
    assert found.unit.startswith(
        " = training loss at rate 1.9 at B = 16, 95% of the edge, after 3 epochs; 2.07 is"
    )


def test_without_a_rate_below_the_edge_nothing_is_unstable_later():
    edge = frontier(torch.full((len(SIZES),), 0.5, dtype=torch.float64), "momentum")
    (found,) = [
        claim for claim in claims_of([edge], [], [runs(0.1, 0.2)]) if "later" in claim.sentence
    ]
    assert found.unmet == "no run has a rate below the edge"


def test_runs_that_diverge_count_as_guesses():
    lost = runs(math.nan, 0.2)
    assert errors_of(lost, "linear", 128) == {0: 90.0, 1: 90.0, 2: 90.0}
    assert verdicts([], [], [lost])[:2] == ["does not hold", "does not hold"]


def test_rules_scale_from_the_reference(ground):
    seen = {}

    def run(size, values):
        seen[size] = values.tolist()
        return (torch.zeros(2, 2),) * 3

    made = scaling_runs(ground, "sgd", "rate", 0.4, {"linear": 1.0, "square root": 0.5}, run)
    assert list(seen) == [32, 128]
    assert seen[32] == pytest.approx([0.4, 0.4])
    assert seen[128] == pytest.approx([1.6, 0.8])
    assert far_from(made) == 128
    assert far_from(replace(made, batch_sizes=(32, 128, 1024))) == 128


def test_every_search_is_made(found):
    assert [(f.optimizer, f.criterion) for f in frontiers_of(found)] == [
        ("sgd", "trains"),
        ("sgd", "steady"),
        ("momentum", "trains"),
        ("momentum", "steady"),
        ("adam", "trains"),
    ]
    assert [rule.point for rule in rules_of(found)] == ["at the start", "trained"]
    assert [runs.optimizer for runs in scaling_of(found)] == ["momentum", "adam"]
    assert {row["network"] for row in found} == {subject.network for subject in SCALES["smoke"]}
    assert len(EXPERIMENT.tables(found)) == 1 + 1 + 2 + 2


def test_rows_hold_all_that_was_measured(found):
    """Edges, rules and runs to rows and back."""
    parts = (
        ("edge", edge_rows, frontiers_of),
        ("rule", rule_rows, rules_of),
        ("scaling", scaling_rows, scaling_of),
    )
    for part, to_rows, of_rows in parts:
        again = [row for each in of_rows(found) for row in to_rows(each)]
        rows = found.where(part=part)
        assert len(again) == len(rows) > 0
        for row in again:
            (same,) = rows.where(
                **{name: value for name, value in row.items() if isinstance(value, str | int)}
            )
            assert_same_rows([same], [row], rel=0)


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
    """The edges of all batch sizes at once, a rule and runs are those of the cells, each of
    which starts anew.
    """
    (subject,) = SCALES["smoke"]
    whole = prepare(subject, {}, 0, "cpu")
    assert [cell["part"] for cell in EXPERIMENT.grid("smoke")] == ["edge"] * 9 + ["rule"] * 2 + [
        "scaling"
    ] * 2
    edges = found.where(part="edge", optimizer="momentum", criterion="steady")
    assert_same_rows(edges, edge_rows(stable_rates(whole, "momentum", 0, "steady")))
    assert_same_rows(
        found.where(part="rule", point="trained"), rule_rows(rule_of(whole, "trained", 0))
    )
    assert_same_rows(
        found.where(part="scaling", optimizer="adam"), scaling_rows(scaled_runs(whole, "adam", 0))
    )


def test_charts_draw_edges_rules_and_runs(found):
    charts = EXPERIMENT.charts(found)
    assert len(charts) == 1 + 2 * 3
    assert len(charts[0].series) == 5 + 2 * 2
    centre = frontiers_of(found)[0].centre().tolist()
    assert charts[0].series[0].y == [value if math.isfinite(value) else None for value in centre]
    errors = 100 * scaling_of(found)[0].validation_error[0].mean(1)
    assert charts[1].series[0].y == pytest.approx(errors.tolist())
    assert charts[3].series[0].y == pytest.approx(
        scaling_of(found)[0].training_loss[0].mean(1).tolist()
    )
    assert [chart.source for chart in charts[1:]] == [
        "Figure 5.7a",
        "Figure 5.8a",
        "not in the thesis",
        "Figure 5.16",
        "not in the thesis",
        "Figure 5.15",
    ]
    for chart in charts:
        draw(chart)


def test_an_unknown_criterion_is_named(ground):
    with pytest.raises(
        ValueError, match="criterion must be one of 'trains', 'steady', got 'falls'"
    ):
        stable_rates(ground, "sgd", 0, "falls")


def test_too_few_samples_are_refused():
    with pytest.raises(ValueError, match=r"digits must have 2,000 training samples, got 1,438"):
        prepare(replace(TINY, samples=2000), {}, 0, "cpu")


LATE = image_setting("digits", 200, 100, epochs=3, batch=50) | {
    "network": "MLP-8",
    "precision": "float32",
    "rate": 0.1,
    "steps": 12,
    "samples": 150,
}


def test_the_edge_of_a_trained_network_is_that_of_gradient_descent():
    """With all data in every batch, steps written out pass below the edge and fail above it."""
    cell, rule = late_cells(LATE, (200,), (16, 150), seeds=1)
    edges = {row["optimizer"]: row for row in run_late(cell, "cpu")}
    assert list(edges) == ["sgd", "momentum", "adam"]
    model, data = training.model_and_images(cell, "cpu")
    sgd = torch.optim.SGD(model.parameters(), cell["rate"], 0.9)
    training.train(data.problem(model), cell, sgd)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    ratio = math.sqrt(edges["sgd"]["resolution"])

    def loss_after(rate, momentum):
        weights, speed = [w.clone().requires_grad_() for w in start], [w * 0 for w in start]
        names, (x, y) = dict(model.named_parameters()), data.training

        def loss():
            named = dict(zip(names, weights, strict=True))
            return torch.nn.functional.cross_entropy(
                torch.func.functional_call(model, named, (x,)), y
            )

        for _ in range(cell["steps"]):
            gradients = torch.autograd.grad(loss(), weights)
            speed = [momentum * v + g for v, g in zip(speed, gradients, strict=True)]
            weights = [
                (w - rate * v).detach().requires_grad_()
                for w, v in zip(weights, speed, strict=True)
            ]
        return float(loss().detach())

    learnt = 0.9 * math.log(10)
    assert loss_after(0.0, 0.0) == pytest.approx(edges["sgd"]["loss"], rel=1e-5)
    for name, momentum in (("sgd", 0.0), ("momentum", 0.9)):
        edge = edges[name]["edge"]
        assert loss_after(edge / ratio, momentum) < learnt
        assert not loss_after(edge * ratio, momentum) < learnt
    # all samples in one batch: nothing is added to λ₁
    rows = run_late(rule, "cpu")
    whole = [row["largest"] for row in rows if row["batch_size"] == 150]
    assert whole == pytest.approx([rows[0]["full"]] * 5, rel=0.05)


def test_a_network_that_has_not_learnt_has_no_edge():
    cell, _ = late_cells({**LATE, "rate": 0.0}, (50,), (16,), seeds=1)
    assert all(math.isnan(row["edge"]) for row in run_late(cell, "cpu"))


def test_claims_on_edges_of_a_trained_network_and_on_runs_that_are_not_there():
    """Seven claims of the paper; two on other runs are not testable without any."""
    *cells, last = late_cells({**LATE, "network": "net"}, SIZES, SIZES, seeds=3)
    here = replace(rule(excess=64.0, full=0.02), network="net")
    rows = [{**last, **row} for row in rule_rows(here)]
    for cell in cells:
        rows += [
            {**cell, "optimizer": name, "criterion": "trains", "resolution": 1.1, "loss": 1.0}
            | {"batch_size": size, "edge": (1 + 0.01 * cell["seed"]) * 1e-3 * size**power}
            for name, power in (("sgd", 1.0), ("momentum", 0.5), ("adam", 0.5))
            for size in SIZES
        ]
    made = [claim for claim in EXPERIMENT.claims(Rows(rows)) if not claim.own]
    assert len(made) == 7
    told = {
        claim.sentence: verdict.verdict for claim, verdict in zip(made, judge(made), strict=True)
    }
    assert [verdict for words, verdict in told.items() if "up to a threshold" in words] == [
        "holds",
        "does not hold",
    ]
    assert told["net, Adam, small ε: from B = 16 the largest stable rate grows as √B"] == "holds"
    unscaled = [claim for claim in made if claim.unmet == largest_rates.UNSCALED]
    assert len(unscaled) == 2
    alone = [claim for claim in EXPERIMENT.claims(Rows(rows).where(part="edge")) if not claim.own]
    assert {claim.sentence for claim in alone} == {claim.sentence for claim in made}
    assert sum(claim.unmet == largest_rates.UNRULED for claim in alone) == 4


def test_paper_scale_trains_the_paper_s_network():
    assert EXPERIMENT.stand_in("paper") == ""
    assert EXPERIMENT.reduced("paper") == "34 of 300 epochs"
