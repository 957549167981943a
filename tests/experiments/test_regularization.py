"""The experiments of the regularization thesis: stacked training against one network at a time,
rows, claims.
"""

import math
import pickle
from dataclasses import replace
from functools import partial

import pytest
import torch

from lambdahat.data import xor
from lambdahat.experiments.kit.cells import Rows
from lambdahat.experiments.kit.claims import Claim, Reading, judge
from lambdahat.experiments.published import find
from lambdahat.experiments.regularization.learning_rules import (
    ABSOLUTE,
    CURVED,
    EARLY,
    FLAT,
    PUBLISHED,
    RULES,
    SETTINGS,
    quantities_of,
    regime_of,
    rule_of,
    score_of,
)
from lambdahat.experiments.regularization.rule_claims import (
    CLAIMS,
    Below,
    Every,
    Falls,
    Near,
    Reaches,
    agreement,
    by_seed,
    claims_of,
    mean_and_deviation,
    rules_that_failed,
    unmet,
)
from lambdahat.experiments.regularization.rule_experiments import (
    CIFAR,
    MNIST,
    MNIST_TASK,
    XOR,
    XOR_TASK,
    XORD_TASK,
)
from lambdahat.experiments.regularization.rule_runs import (
    MoreSeeds,
    RuleMember,
    Stack,
    absolute_products,
    logistic,
    quadratic,
    rule_cells,
    run_rules,
    short_row,
)
from lambdahat.models import xor_network
from lambdahat.optim import SelectiveL2, batch_product, layers_of
from lambdahat.optim.regularizers import StoppedThenSelectiveL2, dense_hessian
from lambdahat.results.charts import Chart

TASKS = ("xor", "xord", "mnist", "synthetic", "cifar10")
NAMES = {
    "xor": "xor",
    "xord": "xord",
    "mnist": "rules-mnist",
    "synthetic": "rules-synthetic",
    "cifar10": "rules-cifar10",
}


def networks(seeds):
    return [xor_network(variance=2.3, seed=seed) for seed in range(seeds)]


@pytest.mark.parametrize("place", range(len(RULES) + len(ABSOLUTE)))
def test_a_stacked_network_trains_as_it_would_alone(place):
    """SGD and the rule itself, through its public interface, on one of the seeds."""
    seeds, steps = 3, 6
    layers = layers_of(networks(1)[0])
    rules = [rule_of(label, SETTINGS["xor", "tanh"], 1, layers) for label in (*RULES, *ABSOLUTE)]
    if isinstance(rules[place], StoppedThenSelectiveL2):
        rules[place].tau = 3
    x, y = xor()
    stack = Stack([RuleMember(rule, networks(seeds), 0.05) for rule in rules])
    for step in range(steps):
        stack.step(x.expand(seeds, 4, 2), y.expand(seeds, 4), logistic, step)
    alone = networks(seeds)[1]
    parameters, rule = list(alone.parameters()), rules[place]
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(alone(x), y)
        product = batch_product(loss, parameters)
        loss.backward(retain_graph=True)
        if rule is not None:
            rule.add_to(parameters, product, step)
        optimizer.step()
        if rule is not None:
            rule.after_step(parameters, 0.05)
    own = list(stack.network(place, 1).parameters())
    for stacked, single in zip(own, parameters, strict=True):
        torch.testing.assert_close(stacked, single, rtol=2e-4, atol=2e-5)
    norm = torch.nn.utils.parameters_to_vector(parameters).detach().double().norm()
    torch.testing.assert_close(stack.norms()[place, 1], norm, rtol=1e-4, atol=0)


@pytest.mark.parametrize("variance", [0.03, 2.3])
def test_absolute_products_are_those_of_each_network(variance):
    """Two networks at once, against the eigenvectors of each one's Hessian; 300 steps find all
    directions.
    """
    x, y = xor()
    models = [xor_network(width=8, variance=variance, seed=seed).double() for seed in (0, 1)]
    parameters = [
        torch.stack(tensors).detach()
        for tensors in zip(*(m.parameters() for m in models), strict=True)
    ]
    products, expected = [], []
    for model in models:
        own = list(model.parameters())
        products.append(batch_product(torch.nn.functional.cross_entropy(model(x.double()), y), own))
        values, vectors = torch.linalg.eigh(dense_hessian(products[-1], own))
        flat = torch.nn.utils.parameters_to_vector(own).detach()
        expected.append(vectors @ (values.abs() * (vectors.T @ flat)))
        assert values[0] < -1e-3

    def product(vectors):
        parts = [products[i]([vector[i] for vector in vectors]) for i in range(2)]
        return [torch.stack(tensors) for tensors in zip(*parts, strict=True)]

    found = absolute_products(product, parameters, 300)
    found = torch.cat([part.reshape(2, -1) for part in found], 1)
    for ours, exact in zip(found, expected, strict=True):
        assert (ours - exact).norm() < 1e-3 * exact.norm()


def test_losses_are_those_of_torch():
    outputs, labels = torch.randn(2, 5, 2), torch.randint(0, 2, (2, 5))
    expected = [
        torch.nn.functional.cross_entropy(o, t) for o, t in zip(outputs, labels, strict=True)
    ]
    torch.testing.assert_close(logistic(outputs, labels), torch.stack(expected))
    targets = 2.0 * labels - 1
    expected = [
        0.5 * torch.nn.functional.mse_loss(o[:, 0], t)
        for o, t in zip(outputs, targets, strict=True)
    ]
    torch.testing.assert_close(quadratic(outputs, targets), torch.stack(expected))


def test_the_rules_are_those_of_table_4_1():
    setting = SETTINGS["xor", "relu"]
    rules = {label: rule_of(label, setting, 4, ("a",)) for label in RULES}
    assert {label for label, rule in rules.items() if rule is None} == {"SGD Small", "SGD Large"}
    assert {
        label for label, rule in rules.items() if rule is not None and rule.needs_product
    } == set(CURVED)
    assert sorted(CURVED + FLAT) == sorted(RULES)
    assert all(rule.decoupled for rule in rules.values() if rule is not None)
    assert isinstance(rules["Selective L2"], SelectiveL2)
    assert rules["L2 Stopped Selective"].tau == rules["L2 Stopped"].tau == 4 * 280
    assert (rules["L2 Stopped Selective"].early_rate, rules["L2 Stopped Selective"].rate) == (
        0.001,
        0.1,
    )
    assert (setting.rate("Metric Small"), setting.rate("L2")) == (0.12, 0.002)
    assert [regime_of(label) for label in ("SGD Small", "L2 Stopped")] == ["small", "large"]


def test_a_shorter_run_shrinks_by_the_same_factor():
    """λ·steps up to τ and to the end are those of the thesis, whatever the epochs."""
    (full, *_), (cpu, *_), epochs = MNIST.grid("paper"), MNIST.grid("cpu"), MNIST_TASK.epochs
    setting = SETTINGS["mnist", "relu"]
    short = setting.scale_rates(cpu["gain"], cpu["stretch"], cpu["epochs"] / epochs)
    steps, fewer = (math.ceil(cell["training"] / cell["batch"]) for cell in (full, cpu))
    assert short.l2 * short.tau * fewer == pytest.approx(setting.l2 * setting.tau * steps, rel=0.01)
    assert short.l2 * cpu["epochs"] * fewer == pytest.approx(setting.l2 * epochs * steps, rel=0.01)
    assert short.metric / short.rates[0] == pytest.approx(setting.metric / setting.rates[0])


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_the_sizes_read_from_the_printed_norms_give_them_back(activation):
    """σ√P of SGD Large, and e^(−λt) of it at the stop and at the end."""
    cell, *_ = MNIST.grid("paper")
    printed, setting = PUBLISHED["mnist", activation], SETTINGS["mnist", activation]
    width, steps = cell["width"], math.ceil(cell["training"] / cell["batch"])
    count = 784 * width + width**2 + 10 * width + 2 * width + 10
    assert setting.spread[1] * math.sqrt(count) == pytest.approx(
        printed["SGD Large"]["norm"], rel=0.01
    )
    assert setting.spread[0] * math.sqrt(count) == pytest.approx(
        printed["SGD Small"]["norm"], rel=0.02
    )
    for rule, epochs in (("L2 Stopped", setting.tau), ("L2", MNIST_TASK.epochs)):
        shrunk = printed["SGD Large"]["norm"] * math.exp(-setting.l2 * steps * epochs)
        assert shrunk == pytest.approx(printed[rule]["norm"], rel=0.02)


@pytest.mark.parametrize("task", TASKS)
def test_every_rule_is_measured_and_every_claim_judged(smoke, task):
    experiment, store = find(NAMES[task]), smoke(NAMES[task])
    assert store.errors() == []
    rows = store.rows()
    for activation in ("tanh", "relu"):
        part = rows.where(activation=activation)
        assert {*RULES, *ABSOLUTE} <= set(part.distinct("rule"))
        for rule in (*RULES, *ABSOLUTE):
            assert part.where(rule=rule).distinct("seed") == rows.distinct("seed")
    for row in rows:
        for name in quantities_of(task):
            assert row[f"{name} curve"][-1] == pytest.approx(row[name], rel=1e-4)
            assert len(row[f"{name} curve"]) == len(row["recorded"])
        assert row["eigenvalues"] == sorted(row["eigenvalues"], reverse=True)
    verdicts = judge(experiment.claims(rows))
    assert sum(not verdict.own for verdict in verdicts) == sum(
        len(found.activations) for found in CLAIMS[task]
    )
    told = {
        ours: [v.claim for v in verdicts if v.own == ours and "(Metric with" in v.claim]
        for ours in (False, True)
    }
    assert told[True]
    assert [claim.replace("|H|", "H") for claim in told[False]] == told[True]
    assert len({verdict.claim for verdict in verdicts}) == len(verdicts)
    *by_activation, ranks = experiment.tables(rows)
    assert [len(table.rows) for table in by_activation] == [len(rows.distinct("rule"))] * 2
    assert len(ranks.rows) == 2 * len(quantities_of(task))
    charts = experiment.charts(rows)
    assert all(isinstance(chart, Chart) and chart.series for chart in charts)
    assert max(len(chart.series) for chart in charts) <= len(RULES)  # the page has as many colours
    curve = charts[0].series[0]
    found = rows.where(activation="tanh", rule=curve.name)
    mean, deviation = mean_and_deviation(found, quantities_of(task)[0])
    assert (curve.y[-1], curve.error[-1]) == (
        pytest.approx(mean, rel=1e-3),
        pytest.approx(2 * deviation, rel=1e-2),
    )


def test_data_in_place_of_the_papers_are_named(smoke):
    assert (
        "8 × 8 digits in place of MNIST"
        in find("rules-mnist").tables(smoke("rules-mnist").rows())[0].title
    )


@pytest.mark.parametrize("experiment", [MNIST, CIFAR], ids=lambda experiment: experiment.name)
def test_data_that_are_not_at_hand_raise_and_the_grid_stays(experiment):
    before = experiment.grid("cpu")
    assert experiment.grid("cpu") == before
    with pytest.raises(FileNotFoundError, match=f"run `lambdahat data fetch {before[0]['data']}`"):
        experiment.run(before[0], "cpu")


def test_cells_cover_rules_and_seeds_once():
    cells = rule_cells("xor", 4, 0, 8, 2, 4, seeds=5, together=2)
    seen = [
        (c["activation"], rule, seed) for c in cells for rule in c["rules"] for seed in c["seeds"]
    ]
    assert len(seen) == len(set(seen)) == 2 * len((*RULES, *ABSOLUTE)) * 5


def test_some_rules_have_more_seeds_than_the_others():
    more = MoreSeeds("relu", ("SGD Large", "L2"), 8, together=2)
    plain = partial(rule_cells, "xor", 4, 0, 8, 2, 4, 3, 2, eigenvalues=1, points=2)
    extra = plain(more=[more])[len(plain()) :]
    assert [cell["seeds"] for cell in extra] == [[3, 4], [5, 6], [7]]
    rows = run_rules(XOR_TASK, extra[0], "cpu")
    found = [(row["rule"], row["seed"]) for row in rows]
    assert found == [("SGD Large", 3), ("SGD Large", 4), ("L2", 3), ("L2", 4)]
    assert not {"norm", "eigenvalues", "vectors"} & rows[0].keys()
    whole = plain(more=[replace(more, whole=True)])[len(plain()) :]
    assert run_rules(XOR_TASK, whole[0], "cpu")[0].keys() >= {"norm", "eigenvalues", "vectors"}


def test_rules_of_a_regime_start_from_the_same_weights():
    """After three epochs at these rates SGD and L2 from the large regime have norms in the ratio
    (1 − λ)³.
    """
    few = {"eigenvalues": 1, "points": 1, "groups": [("SGD Large", "L2")]}
    cell = rule_cells("xor", 4, 0, 64, 3, 4, 2, 2, **few)[0]
    rows = Rows(run_rules(XOR_TASK, cell, "cpu"))
    for plain, decayed in zip(rows.where(rule="SGD Large"), rows.where(rule="L2"), strict=True):
        assert decayed["norm"] / plain["norm"] == pytest.approx(0.999**3, rel=1e-4)
        assert decayed["norm curve"][0] == plain["norm curve"][0]


def test_a_row_does_not_depend_on_what_it_is_trained_beside():
    """Nor on the global generator, which is left alone."""
    few = {"eigenvalues": 1, "points": 1, "groups": [("SGD Small", "Selective L2")]}
    cell = rule_cells("xord", 12, 10, 8, 2, 3, 2, 2, **few)[0]
    before = torch.get_rng_state()
    together = Rows(run_rules(XORD_TASK, cell, "cpu")).where(rule="Selective L2", seed=1)[0]
    assert torch.equal(torch.get_rng_state(), before)
    alone = run_rules(XORD_TASK, cell | {"rules": ["Selective L2"], "seeds": [1]}, "cpu")[0]
    for name in ("training error", "test error", "norm"):
        assert alone[name] == pytest.approx(together[name], rel=1e-4)


def test_experiments_reach_workers():
    for name in ("xor", "rules-cifar10", "power-method", "vector-fields"):
        copied = pickle.loads(pickle.dumps(find(name)))
        assert copied.grid("smoke") == find(name).grid("smoke")


def rows_of(**rules):
    """Rows of one activation, from the norms of each rule seed by seed."""
    return Rows(
        {
            "activation": "tanh",
            "rule": rule,
            "seed": seed,
            "norm": float(value),
            "test error": 2 * float(value),
            "eigenvalues": [4.0 * value, value],
        }
        for rule, values in rules.items()
        for seed, value in enumerate(values)
    )


def verdict_of(claim):
    return judge([claim])[0].verdict


@pytest.mark.parametrize(
    ("share", "times", "expected"),
    [
        (1.2, 1.1, "holds"),
        (1.2, 0.2, "holds"),
        (1.2, 1.3, "does not hold"),
        (0.9, 0.95, "holds"),
        (0.9, 3.0, "holds"),
        (0.9, 0.8, "does not hold"),
    ],
)
def test_a_rule_that_is_near_another_is_not_beyond_a_share_of_it(share, times, expected):
    """Seed by seed, for the rule that is farthest off; the other of the two is the same."""
    last = (1.0, 2.0, 3.0, 5.0)
    beside = [times * value * noise for value, noise in zip(last, (1, 1.01, 0.99, 1), strict=True)]
    rows = rows_of(**{"L2": beside, "Selective L2": last, "SGD Small": last})
    claim = Near("", "", ("tanh",), "test error", ("L2", "Selective L2", "SGD Small"), share)
    assert verdict_of(claim.claim("synthetic", "tanh", rows)) == expected


def test_a_claim_of_many_pairs_is_as_strong_as_its_weakest():
    claim = Below("", "", ("tanh",), "norm", ("SGD Small",), ("L2", "SGD Large"))
    low, near, high = (1, 2, 3, 2), (0.8, 2.6, 3.1, 2), (2, 3, 4.1, 3)

    def found(small, decayed, large):
        return claim.claim(
            "xor", "tanh", rows_of(**{"SGD Small": small, "L2": decayed, "SGD Large": large})
        )

    # though the ranges overlap: seeds are paired
    assert verdict_of(found(low, high, high)) == "holds"
    weak = found(low, near, high)
    assert verdict_of(weak) == "undecided"
    assert weak.ours.startswith("0.125 ± 0.17, L2 2.125 less SGD Small 2 (n = 4")
    assert weak.published == "7.18 below 18.44; least here 0.13"
    assert verdict_of(found(high, low, (9, 9, 9, 9))) == "does not hold"
    assert verdict_of(found(low, low, high)) == "does not hold"  # equal at every seed is not below


def test_a_difference_must_be_a_tenth_of_the_published_one():
    """Of norms as a share: 24.49 and 22.16 differ by 9.5 % of the larger, so that 0.95 % of ours
    is asked for.
    """
    claim = Below("", "", ("relu",), "norm", ("Metric Large",), ("SGD Large",))

    def found(gap):
        noise = (-0.01, 0.0, 0.01, 0.0)
        rules = {
            "SGD Large": (100, 100, 100, 100),
            "Metric Large": [100 - gap + part for part in noise],
        }
        return verdict_of(claim.claim("xor", "relu", rows_of(**rules)))

    assert [found(gap) for gap in (1.0, 0.9514, 0.9, 0.1)] == [
        "holds",
        "undecided",
        "does not hold",
        "does not hold",
    ]
    error = Below("", "", ("tanh",), "test error", ("SGD Small",), ("SGD Large",))
    rows = rows_of(**{"SGD Small": (0.0, 0.1), "SGD Large": (2.0, 2.4)})  # errors are twice as much
    assert "least here 4.3" in error.claim("xord", "tanh", rows).published  # (60.8 − 17.64)/10
    assert verdict_of(error.claim("xord", "tanh", rows)) == "undecided"
    # the forest plot and the seeds that would decide it have the same bound
    assert error.claim("xord", "tanh", rows).marks[0][3] == pytest.approx((60.8 - 17.64) / 10)
    assert error.claim("xord", "tanh", rows).edge == pytest.approx((60.8 - 17.64) / 10)


def test_a_tie_without_an_error_speaks_for_neither_side():
    # of which the thesis prints no numbers
    claim = Below("", "", ("tanh",), "λ₁", ("SGD Small",), ("L2",))
    assert (
        verdict_of(claim.claim("xor", "tanh", rows_of(**{"SGD Small": (1, 2), "L2": (1, 2)})))
        == "undecided"
    )


def test_networks_that_have_not_learnt_are_not_compared():
    """Half of the seeds below 0.8 of the printed accuracy; training itself is judged all the
    same.
    """

    def found(quantity, accuracies):
        claim = Below("", "", ("tanh",), quantity, ("L2",), ("SGD Large",))
        rows = rows_of(**{"L2": (1, 2, 1, 2), "SGD Large": (9, 9.5, 9, 9.6)})
        return claim.claim(
            "xor",
            "tanh",
            Rows(
                row
                | {
                    "training accuracy": 1.0
                    if row["rule"] == "SGD Large"
                    else accuracies[row["seed"]]
                }
                for row in rows
            ),
        )

    assert verdict_of(found("norm", (1.0, 1.0, 1.0, 0.75))) == "holds"
    spoilt = found("norm", (0.5, 1.0, 1.0, 0.75))
    assert verdict_of(spoilt) == "not testable here"
    assert spoilt.unmet == "not learnt, by training accuracy: L2 0.812 [1]"
    assert verdict_of(found("training accuracy", (0.5, 0.5, 0.5, 0.75))) == "holds"


def test_learning_of_a_regression_is_measured_against_the_mean():
    """Half of 27.57 where the thesis came below that; Metric Small, which predicts the mean
    there, may do so here.
    """
    rows = Rows({"rule": rule, "seed": 0, "training error": 14.0} for rule in RULES)
    assert (
        rules_that_failed("synthetic", "tanh", rows, ["L2 Stopped"])
        == "not learnt, by training error: L2 Stopped 14 [8.46]"
    )
    assert rules_that_failed("synthetic", "tanh", rows, ["Metric Small", "L2"]) == ""
    lower = Rows(row | {"training error": 13.0} for row in rows)
    assert rules_that_failed("synthetic", "tanh", lower, ["L2 Stopped"]) == ""
    gone = Rows(row | {"training error": math.nan} for row in rows)
    assert "L2 Stopped" in rules_that_failed("synthetic", "tanh", gone, ["L2 Stopped"])


def test_rules_with_weight_decay_need_weights_that_have_decayed():
    """The thesis's L2 on MNIST ends at 98.82 from 4170.87; a run of a seventh of its epochs does
    not, and says nothing of rules with weight decay.
    """

    def rows(norm):
        norms = {"SGD Large": 4000.0, "L2": norm}
        return Rows(
            {"rule": rule, "seed": seed, "data": "mnist", "norm": value}
            for rule, value in norms.items()
            for seed in (0, 1)
        )

    def reason(norm, *rules, quantity="training accuracy"):
        return unmet("mnist", "tanh", rows(norm), quantity, rules)

    short = "L2 keeps 0.5 of SGD Large's norm, in the thesis 0.024"
    assert reason(2000.0, "L2", "L2 Stopped") == reason(2000.0, *RULES) == short
    assert reason(2000.0, "Selective L2", "SGD Large", quantity="norm") == short
    assert reason(2000.0, "SGD Small", "Metric Small") == ""
    assert reason(2000.0, "L2", "SGD Large", quantity="early training accuracy") == ""
    assert reason(180.0, *RULES) == ""
    without = rows(2000.0).where(rule="L2")
    assert unmet("mnist", "tanh", without, "training accuracy", ("L2",)) == ""


def test_speed_is_read_off_the_first_quarter_of_the_curve():
    curve = [0.1, 0.5, 0.7, 0.9, 1.0, 1.0, 1.0, 1.0, 1.0]
    rows = Rows(
        [{"rule": "L2", "seed": 3, "recorded": list(range(0, 9)), "training accuracy curve": curve}]
    )
    assert by_seed(rows, "early training accuracy") == {3: pytest.approx(0.6)}
    assert by_seed(rows, "early training error") == {}
    assert set(EARLY.values()) == {"training accuracy", "training error"}


def test_later_seeds_have_their_speed_in_place_of_curves():
    row = {
        "rule": "L2",
        "seed": 3,
        "norm": 1.23456789,
        "recorded": [0, 1, 2, 3, 4],
        "norm curve": [1.0] * 5,
        "training accuracy curve": [0.1, 0.5, 0.7, 0.9, 1.0],
        "weights": [[1.0, 2.0]],
    }
    assert short_row(row) == row | {"norm": 1.23457}
    later = short_row(row | {"seed": 70})
    assert later == {
        "rule": "L2",
        "seed": 70,
        "norm": 1.23457,
        "weights": [[1.0, 2.0]],
        "early training accuracy": 0.5,
    }
    speeds = by_seed(Rows([row, later]), "early training accuracy")
    assert speeds == {3: pytest.approx(0.5), 70: pytest.approx(0.5)}


def test_speeds_of_two_regimes_need_the_same_gain():
    rows = Rows({"rule": rule, "gain": 27.0, "steep": 8.0, "data": "mnist"} for rule in RULES)
    name, both = "early training accuracy", ("SGD Small", "SGD Large")
    assert unmet("mnist", "relu", rows, name, both).endswith(
        "27 times the printed one in the small regime, 8 times in the large"
    )
    assert (
        unmet("mnist", "tanh", rows, name, both)
        == unmet("mnist", "relu", rows, name, ("SGD Large", "L2"))
        == ""
    )
    digits = Rows(row | {"data": "digits"} for row in rows)
    assert (
        unmet("mnist", "tanh", digits, "training accuracy", both)
        == "8 × 8 digits in place of MNIST"
    )


def test_first_layer_vectors_have_a_chart_for_each_rule():
    weights = [[1.0, 2.0], [-3.0, 0.5]]
    row = {
        "activation": "tanh",
        "rule": "L2",
        "vectors": 1.5,
        "weights": weights,
        "norm": 1.0,
        "eigenvalues": [],
        "training accuracy": 1.0,
        "training accuracy curve": [1.0],
        "norm curve": [1.0],
        "recorded": [0],
        "seed": 0,
    }
    rows = Rows([row, row | {"rule": "SGD Large"}])
    panels = [chart for chart in XOR.charts(rows) if chart.title.startswith("First-layer weights")]
    assert [chart.title for chart in panels] == [
        f"First-layer weights, tanh, {rule}" for rule in ("L2", "SGD Large")
    ]
    (stroke,) = panels[0].series
    assert list(zip(stroke.x, stroke.y, strict=True)) == [
        (0, 0),
        (1, 2),
        (1, None),
        (0, 0),
        (-3, 0.5),
        (-3, None),
    ]
    assert "Of 2, 1.5 count" in panels[0].caption


def test_many_pairs_do_not_make_a_claim_fail_by_chance():
    """One pair of ten at p = 0.02 against the claim is not enough, one alone is."""
    contrary = Reading(-2.06, 1.0)
    one = Every("", "", "", contrary, readings=(contrary,))
    ten = Every("", "", "", contrary, readings=(contrary, *[Reading(5.0, 1.0)] * 9))
    assert (verdict_of(one), verdict_of(ten)) == ("does not hold", "undecided")
    lost = Reading(math.nan, math.nan)
    assert all(math.isnan(value) for value in Every("", "", "", lost, readings=(lost,)).p_values())
    assert Every("", "", "", lost, readings=(lost, Reading(9.0, 1.0))).p_values()[0] == 1.0


def test_one_pair_alone_is_an_ordinary_claim():
    reading = Reading(1.3, 0.7, 4, 5)
    assert (
        Every("", "", "", reading, readings=(reading,)).p_values()
        == Claim("", "", "", reading).p_values()
    )


def test_an_accuracy_reached():
    claim = Reaches("", "", ("tanh",), "norm", ("SGD Small", "L2"), 0.95)
    reached = claim.claim("xor", "tanh", rows_of(**{"SGD Small": (1, 1), "L2": (1, 1)}))
    assert reached.marks[0][3] == 0.95
    assert (
        verdict_of(claim.claim("xor", "tanh", rows_of(**{"SGD Small": (1, 1), "L2": (1, 1)})))
        == "holds"
    )
    assert (
        verdict_of(claim.claim("xor", "tanh", rows_of(**{"SGD Small": (1, 1), "L2": (0.8, 0.8)})))
        == "does not hold"
    )


def test_eigenvalues_are_read_from_their_list():
    rows = rows_of(L2=(1, 2))
    assert by_seed(rows, "λ₁") == {0: 4.0, 1: 8.0}
    assert by_seed(rows, "λ₁/λ₂") == {0: 4.0, 1: 4.0}
    assert by_seed(Rows([rows[0] | {"eigenvalues": []}]), "λ₁") == {}


def test_norm_against_generalisation_is_a_rank_correlation():
    """An error that rises with the norm is a performance that falls."""
    rows = rows_of(**{rule: (place, place + 0.5, place) for place, rule in enumerate(RULES)})
    claim = Falls().claim("xord", "tanh", rows)
    assert (claim.reading.value, claim.reading.stderr) == (
        pytest.approx(-1.0),
        pytest.approx(0.0, abs=1e-9),
    )
    assert [score_of(task)[1] for task in TASKS] == [1, -1, 1, -1, 1]


def printed_rows(task):
    return Rows(
        {
            "activation": activation,
            "rule": rule,
            "seed": seed,
            "vectors": 1.0,
            "eigenvalues": [],
            "gain": 1.0,
            "steep": 1.0,
        }
        | row
        for activation in ("tanh", "relu")
        for rule, row in PUBLISHED[task, activation].items()
        for seed in range(2)
    )


@pytest.mark.parametrize("task", TASKS)
def test_the_tables_of_the_thesis_bear_out_its_text(task):
    """Their order is their own, and every claim on a printed quantity holds of the printed
    means.
    """
    rows = printed_rows(task)
    assert all(tau == pytest.approx(1.0) for tau in agreement(task, rows).values())
    printed = [
        claim
        for claim in claims_of(task, rows)
        if not {"λ₁", "λ₁/λ₂", "vectors", *EARLY} & quantity_of(claim)
    ]
    assert printed
    assert [claim.sentence for claim in printed if verdict_of(claim) != "holds"] == []


def quantity_of(claim):
    """The quantity that a claim's sentence opens with, after the activation."""
    return {claim.sentence.partition(":")[0].partition(", ")[2]}


@pytest.mark.slow
def test_the_norms_of_xor_have_the_order_of_the_thesis():
    cells = rule_cells("xor", 4, 0, 64, 400, 4, 10, 10, [RULES], eigenvalues=1, points=1)
    rows = Rows(cell | row for cell in cells for row in XOR.run(cell, "cpu"))
    ranks = agreement("xor", rows)
    assert min(ranks[activation, "norm"] for activation in ("tanh", "relu")) > 0.8
    for (task, activation), table in PUBLISHED.items():
        for rule in ("SGD Small", "SGD Large", "L2", "L2 Stopped") if task == "xor" else ():
            ours = mean_and_deviation(rows.where(activation=activation, rule=rule), "norm")[0]
            assert ours == pytest.approx(table[rule]["norm"], rel=0.15)
