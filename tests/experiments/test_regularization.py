"""The XOR experiments: stacked training against one network at a time, verdicts, and what is stored."""

import math

import pytest
import torch

from lambdahat.data import xor
from lambdahat.experiments import run_xor, run_xord
from lambdahat.experiments.regularization import XOR, RegularizationResult, _logistic, _models, _quadratic, _rules
from lambdahat.experiments.regularization_claims import PUBLISHED, RULES, Below, Reaches, RuleRun, agreement
from lambdahat.experiments.reproduction import judged, paired_gap, worst
from lambdahat.experiments.stacks import Member, Stack
from lambdahat.optim import SelectiveL2, batch_product, layers_of
from lambdahat.optim.regularizers import StoppedThenSelectiveL2
from lambdahat.storage import Result


@pytest.mark.parametrize("place", range(len(RULES)))
def test_a_stacked_network_trains_as_it_would_alone(place):
    """SGD and the rule itself, through its public interface, on one of the seeds."""
    setting, seeds, steps = XOR.settings["tanh"], 3, 6
    template = _models(XOR, "tanh", "large", 1, 0)[0]
    rules = [rule for _, rule in _rules(setting, 1, layers_of(template))]
    if isinstance(rules[place], StoppedThenSelectiveL2):
        rules[place].tau = 3
    x, y = xor()
    stack = Stack([Member(rule, _models(XOR, "tanh", "large", seeds, 0), 0.05) for rule in rules])
    for step in range(steps):
        stack.step(x.expand(seeds, 4, 2), y.expand(seeds, 4), _logistic, step)
    alone = _models(XOR, "tanh", "large", seeds, 0)[1]
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
    for stacked, single in zip(stack.stacked, parameters, strict=True):
        torch.testing.assert_close(stacked[place * seeds + 1], single, rtol=2e-4, atol=2e-5)
    norm = torch.nn.utils.parameters_to_vector(parameters).detach().double().norm()
    torch.testing.assert_close(stack.norms()[place, 1], norm, rtol=1e-4, atol=0)


def test_losses_are_those_of_torch():
    outputs, labels = torch.randn(2, 5, 2), torch.randint(0, 2, (2, 5))
    expected = [torch.nn.functional.cross_entropy(o, t) for o, t in zip(outputs, labels, strict=True)]
    torch.testing.assert_close(_logistic(outputs, labels), torch.stack(expected))
    targets = 2.0 * labels - 1
    expected = [0.5 * torch.nn.functional.mse_loss(o[:, 0], t) for o, t in zip(outputs, targets, strict=True)]
    torch.testing.assert_close(_quadratic(outputs, labels), torch.stack(expected))


def test_the_rules_are_those_of_table_4_1():
    rules = dict(_rules(XOR.settings["relu"], 4, ("a",)))
    assert tuple(rules) == RULES
    assert {label for label, rule in rules.items() if rule is None} == {"SGD Small", "SGD Large"}
    assert all(rule.decoupled for rule in rules.values() if rule is not None)
    assert isinstance(rules["Selective L2"], SelectiveL2)
    assert rules["L2 Stopped Selective"].tau == rules["L2 Stopped"].tau == 4 * 280
    assert (rules["L2 Stopped Selective"].early_rate, rules["L2 Stopped Selective"].rate) == (0.001, 0.1)


@pytest.fixture(scope="module")
def short():
    return {"xor": run_xor(seeds=3, epochs=3), "xord": run_xord(seeds=3, epochs=1)}


@pytest.mark.parametrize("name", ["xor", "xord"])
def test_every_rule_is_measured_and_every_claim_judged(short, name):
    result = short[name]
    assert [run.label for run in result.runs if run.activation == "relu"] == [*RULES, "Dropout Large"]
    assert all(len(values) == 3 for run in result.runs for values in run.values.values())
    assert {verdict.verdict for verdict in result.verdicts} <= {"holds", "does not hold", "undecided"}
    first, second, ranks = result.tables()
    assert first.header[0] == "rule"
    assert first.header[-1] == "norm"
    assert len(first.rows) == len(second.rows) == 9
    assert len(ranks.rows) == len(agreement(name, result.runs)) == (4 if name == "xor" else 6)


def test_rules_of_a_regime_start_from_the_same_weights(short):
    """After three epochs at these rates SGD and L2 from the large regime have norms in the ratio (1 − λ)³."""
    runs = {run.label: run for run in short["xor"].runs if run.activation == "tanh"}
    ratio = runs["L2"].values["norm"] / runs["SGD Large"].values["norm"]
    torch.testing.assert_close(ratio, torch.full_like(ratio, 0.999**3), rtol=1e-4, atol=0)


def test_the_same_seed_gives_the_same_numbers_and_leaves_the_global_generator_alone(short):
    before = torch.get_rng_state()
    again = run_xor(seeds=3, epochs=3)
    assert torch.equal(torch.get_rng_state(), before)
    for one, two in zip(again.runs, short["xor"].runs, strict=True):
        assert all(torch.equal(one.values[name], two.values[name]) for name in one.values)
    other = run_xor(seeds=3, epochs=3, seed=1)
    assert not torch.equal(other.runs[0].values["norm"], again.runs[0].values["norm"])


def test_results_are_stored_whole(short, tmp_path):
    short["xord"].save(tmp_path / "found")
    loaded = Result.load(tmp_path / "found")
    assert isinstance(loaded, RegularizationResult)
    assert loaded.tables() == short["xord"].tables()
    assert loaded.verdicts == short["xord"].verdicts
    assert loaded.assumptions == short["xord"].assumptions


def test_a_width_asked_for_is_named():
    found = run_xor(seeds=2, epochs=1, width=5)
    assert found.assumptions[0] == "5 hidden units or filters, as asked for, not 64."
    assert found.assumptions[1:] == XOR.assumptions[1:]


def run_of(label, *values):
    return RuleRun("tanh", label, {"norm": torch.tensor(values, dtype=torch.float64)})


def test_verdicts_are_judged_in_paired_standard_errors():
    claim = Below("", "", ("tanh",), "norm", ("a",), ("b", "c"))
    low, near, high = run_of("a", 1, 2, 3), run_of("b", 0.75, 2.25, 3.0), run_of("c", 2, 3, 4.1)
    assert claim.judge({"a": low, "b": high, "c": high})[0] == "holds"  # though the ranges overlap: seeds are paired
    verdict, figures = claim.judge({"a": low, "b": near, "c": high})
    assert verdict == "undecided"
    assert figures.startswith("a 2, b 2, difference +0 ± 0.1")
    assert claim.judge({"a": high, "b": low, "c": run_of("c", 9, 9, 9)})[0] == "does not hold"
    verdict, figures = claim.judge({"a": low, "b": low, "c": run_of("c", 0.5, 2.1, 3.0)})
    assert verdict == "does not hold"  # equal at every seed is not below
    assert figures == "a 2, b 2, difference +0 ± 0"  # the pair that decides, not the undecided one


def test_gaps_leave_out_what_diverged():
    lower, upper = torch.tensor([1.0, math.nan, 3.0, 1.0]), torch.tensor([2.0, 1.0, 5.0, math.inf])
    assert paired_gap(lower, upper) == (1.5, pytest.approx(0.5))
    assert math.isnan(paired_gap(lower[:2], upper[:2])[0])
    assert judged(math.nan, math.nan) == "undecided"
    assert worst(["holds", "undecided"]) == "undecided"
    assert worst(["undecided", "does not hold"]) == "does not hold"
    assert worst(["holds"]) == "holds"


def test_an_accuracy_reached():
    claim = Reaches("", "", ("tanh",), "norm", ("a", "b"), 0.95)
    assert claim.judge({"a": run_of("a", 1, 1), "b": run_of("b", 0.9, 1)}) == ("holds", "lowest: b 0.95")
    assert claim.judge({"a": run_of("a", 1, 1), "b": run_of("b", 0.8, 1)})[0] == "does not hold"


def test_the_order_of_the_thesis_agrees_with_itself():
    published = PUBLISHED["xord", "relu"]
    runs = [
        RuleRun("relu", label, {name: torch.tensor([value, value], dtype=torch.float64) for name, value in row.items()})
        for label, row in published.items()
    ]
    assert list(agreement("xord", runs).values()) == pytest.approx([1.0] * 3)
    for run in runs:
        run.values["norm"].neg_()
    assert agreement("xord", runs)["relu", "norm"] == pytest.approx(-1.0)


@pytest.mark.slow
def test_the_norms_of_xor_have_the_order_of_the_thesis():
    found = run_xor(seeds=10)
    ranks = agreement("xor", found.runs)
    assert min(ranks[activation, "norm"] for activation in ("tanh", "relu")) > 0.8
    for run in found.runs:
        published = PUBLISHED["xor", run.activation].get(run.label)
        if published and run.label in ("SGD Small", "SGD Large", "L2", "L2 Stopped"):
            assert run.mean("norm") == pytest.approx(published["norm"], rel=0.15)
