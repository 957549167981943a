"""What the rows of a store say, as far as they go."""

import dataclasses

import pytest

from lambdahat.experiments.kit.cells import key_of
from lambdahat.experiments.kit.claims import (
    FAILS,
    HOLDS,
    MISSING,
    OPEN,
    STAND_IN,
    UNTESTED,
    Claim,
    Verdict,
    mean_of,
)
from lambdahat.experiments.kit.experiment import (
    PRINTED_RATES,
    Size,
    _settings_begun,
    carry_decisions,
    findings,
    place_claim,
)
from lambdahat.experiments.kit.sweeps import sweep
from tests.experiments.toys import Config, toy


def unreadable(rows):
    raise KeyError("width")


def test_all_cells_give_everything(tmp_path):
    found = findings(toy(), sweep(toy(), tmp_path, scale="smoke"))
    assert (found.done, found.total, found.notes, found.faulty) == (4, 4, (), False)
    assert found.progress == "All 4 cells have finished."
    assert found.verdicts
    assert found.tables
    assert found.charts


def test_some_cells_give_what_they_can(tmp_path):
    store = sweep(toy(), tmp_path, scale="smoke", only="rate=2.0")
    found = findings(dataclasses.replace(toy(), claims=unreadable, charts=unreadable), store)
    assert (
        found.progress
        == "2 of 4 cells have finished; the claims and charts need some of the others."
    )
    assert (found.notes, found.faulty) == ((found.progress,), False)
    assert found.tables
    assert findings(toy(), store).progress.startswith(
        "2 of 4 cells have finished: figures and verdicts are those"
    )


def test_what_all_cells_do_not_give_is_a_fault(tmp_path):
    store = sweep(toy(), tmp_path, scale="smoke")
    found = findings(dataclasses.replace(toy(), tables=unreadable), store)
    assert found.notes == ("The tables could not be made from these rows: KeyError: 'width'",)
    assert found.faulty
    assert found.verdicts


def test_cells_of_another_grid_do_not_count(tmp_path):
    store = sweep(toy(smoke=Config(3)), tmp_path, scale="smoke")
    found = findings(toy(smoke=Config(2, rates=(2.0, 3.0))), store)
    assert (found.done, found.total) == (2, 4)
    assert found.notes[1].startswith("4 stored cells are not in the grid of this version")


def grown(**scales):
    """The toy with a claim for each rate that it has rows of, in order of the grid."""

    def claims(rows):
        return [
            Claim(
                f"rate {rate:g} is above {rate - 0.3:g}",
                "Table 1",
                "",
                mean_of(list(part.values())),
                bound=rate - 0.3,
            )
            for rate in rows.distinct("rate")
            if (part := rows.where(rate=rate).paired("value"))
        ]

    return dataclasses.replace(toy(**scales), claims=claims)


def test_a_setting_that_has_just_begun_is_not_judged_beside_others(tmp_path):
    experiment = grown(smoke=Config(4, rates=(0.5, 2.0, 3.0)))
    whole = findings(experiment, sweep(experiment, tmp_path, scale="smoke", only="rate=0.5"))
    for seed in range(2):
        store = sweep(experiment, tmp_path, scale="smoke", only=f"rate=2.0 seed={seed}")
    found = findings(experiment, store)
    assert len(whole.verdicts) == 1
    assert (found.verdicts, found.tables, found.charts) == (
        whole.verdicts,
        whole.tables,
        whole.charts,
    )
    assert found.done == 6
    assert found.notes[1] == "Neither judged nor shown before 3 seeds have run: rate=2.0 (2 of 4)."
    found = findings(experiment, sweep(experiment, tmp_path, scale="smoke", only="rate=2.0 seed=2"))
    assert [verdict.claim for verdict in found.verdicts] == [
        "rate 0.5 is above 0.2",
        "rate 2 is above 1.7",
    ]
    assert len(found.notes) == 1


def test_few_seeds_are_judged_where_no_setting_has_more_or_is_to_have_more(tmp_path):
    experiment = grown(smoke=Config(4))
    found = findings(
        experiment, sweep(experiment, tmp_path / "young", scale="smoke", only="seed=0")
    )
    assert len(found.verdicts) == 2
    experiment = grown(smoke=Config(2))
    found = findings(
        experiment, sweep(experiment, tmp_path / "planned", scale="smoke", only="rate=2.0")
    )
    assert [verdict.claim for verdict in found.verdicts] == ["rate 2 is above 1.7"]


def test_seeds_that_run_together_count_each():
    together = [(1.0, [0, 1]), (1.0, [2, 3]), (2.0, [0, 1, 2]), (2.0, [3]), (3.0, 1)]
    cells = {
        key_of(cell): cell for cell in ({"rate": rate, "seeds": seeds} for rate, seeds in together)
    }
    first, _, third, _, last = cells
    assert _settings_begun(cells, set(cells)) == (set(), [])
    assert _settings_begun(cells, {first, third, last}) == ({first}, ["rate=1.0 (2 of 4)"])


VGG = Size("VGG-16", "cifar100", 45_000, 300)


def training(sizes, **cells):
    """The toy, whose cells train what is said, at the scales cpu and paper."""
    scales = {
        scale: [{**cell, "toy rate": cell["rate"], **cells} for cell in every]
        for scale, every in toy().scales.items()
    }
    return dataclasses.replace(toy(), sizes=sizes, scales=scales)


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ({"network": "VGG-16", "data": "cifar100", "training": 45_000, "epochs": 300}, ""),
        ({"network": "VGG-16", "data": "cifar100", "training": 45_000, "epochs": 100}, ""),
        (
            {"network": "VGG-16", "data": "cifar100", "training": 10_000, "epochs": 30},
            "10,000 of 45,000 samples, 30 of 300 epochs",
        ),
        (
            {"network": "LeNet-5", "data": "cifar100", "training": 45_000, "epochs": 300},
            "LeNet-5 on CIFAR-100 in place of VGG-16 on CIFAR-100",
        ),
        (
            {
                "network": "VGG-16",
                "data": "cifar100",
                "side": 8,
                "training": 45_000,
                "epochs": (0, 300),
            },
            "VGG-16 on CIFAR-100 of 8 × 8 in place of VGG-16 on CIFAR-100",
        ),
    ],
)
def test_another_network_data_set_or_a_tenth_of_the_training_stands_in(cell, words):
    assert training((VGG,), **cell).stand_in("paper") == words


def test_rates_that_the_paper_prints_are_compared():
    assert training(
        (Size(data="mnist", rate="0.01"),), data="mnist", training=60_000, rate=0.05
    ).stand_in("cpu") == ("rate 0.05 in place of 0.01")
    rules = (Size(data="mnist", rate=PRINTED_RATES),)
    assert training(rules, data="mnist", gain=1.0, steep=1.0).stand_in("cpu") == ""
    assert (
        training(rules, data="mnist", gain=3.0, steep=1.0).stand_in("cpu")
        == "rates 3 times the printed"
    )


def test_where_the_paper_says_no_number_the_whole_set_counts():
    few = training((Size(data="mnist"),), data="mnist", training=4096)
    assert few.stand_in("paper") == "4,096 of 60,000 samples"
    most = training((Size(data="mnist"),), data="mnist", training=30_000)
    assert (most.stand_in("paper"), most.reduced("paper")) == ("", "30,000 of 60,000 samples")


def test_a_claim_about_one_network_is_compared_by_that_network_alone():
    cells = [
        {"network": network, "data": "cifar100", "training": 45_000, "epochs": 300}
        for network in ("LeNet-5", "VGG-16", "VGG-16-BN")
    ]
    sizes = (VGG, Size("VGG-16-BN", "cifar100"))
    both = dataclasses.replace(toy(), sizes=sizes, scales={"cpu": cells})
    assert (
        both.stand_in("cpu", "VGG-16: it trains")
        == both.stand_in("cpu", "VGG-16-BN: it trains")
        == ""
    )
    assert both.stand_in("cpu", "LeNet-5: it trains").startswith("LeNet-5 on CIFAR-100")
    assert both.stand_in("cpu", "all of them train").startswith("LeNet-5 on CIFAR-100")


def test_stand_ins_decide_nothing_either_way_but_general_claims_and_ours_are_judged():
    experiment = training((VGG,), network="LeNet-5", data="mnist", training=60_000, epochs=300)
    claim = Claim("LeNet-5: it trains", "Table 1", "", mean_of([1.0, 1.1]))
    other = place_claim(claim, experiment, "paper")
    assert (other.unmet, other.barrier) == (
        "LeNet-5 on MNIST in place of VGG-16 on CIFAR-100",
        STAND_IN,
    )
    for kept in (dataclasses.replace(claim, own=True), dataclasses.replace(claim, general=True)):
        assert place_claim(kept, experiment, "paper") is kept
        assert place_claim(kept, experiment, "smoke").unmet.startswith("a smoke run")
    unlearnt = place_claim(dataclasses.replace(claim, unmet="it has not learnt"), experiment, "cpu")
    assert unlearnt.unmet.endswith("VGG-16 on CIFAR-100; it has not learnt")


def test_data_that_cannot_be_had_are_another_reason():
    claim = Claim("it trains", "Table 1", "", mean_of([1.0, 1.1]))
    cells = {"network": "ResNet-50", "data": "cifar10", "training": 50_000, "epochs": 90}
    assert (
        place_claim(claim, training((Size("ResNet-50", "imagenet"),), **cells), "cpu").barrier
        == MISSING
    )
    both = training((Size("ResNet-50", "imagenet"), VGG), **cells)
    assert place_claim(claim, both, "cpu").barrier == STAND_IN
    assert place_claim(dataclasses.replace(claim, barrier=MISSING), both, "cpu").barrier == MISSING


def verdict(kind, evidence="1 ± 0.1", claim="a"):
    return Verdict(
        claim, "Table 1", kind, evidence, barrier="precondition" if kind == UNTESTED else ""
    )


def test_what_a_larger_run_does_not_test_stays_decided_with_its_size():
    (kept,) = carry_decisions(
        [verdict(UNTESTED, "too short")], [verdict(HOLDS)], "150 of 1,000 epochs"
    )
    assert (kept.verdict, kept.barrier) == (HOLDS, "")
    assert kept.evidence == "1 ± 0.1 at 150 of 1,000 epochs; larger: too short"
    for larger in (OPEN, FAILS):  # a larger run that tests the claim is believed
        assert carry_decisions([verdict(larger)], [verdict(HOLDS)], "") == (verdict(larger),)
    for smaller in (OPEN, UNTESTED):
        assert carry_decisions([verdict(UNTESTED)], [verdict(smaller)], "") == (verdict(UNTESTED),)
    assert carry_decisions([verdict(UNTESTED)], [verdict(HOLDS, claim="b")], "") == (
        verdict(UNTESTED),
    )


def test_a_run_at_paper_scale_carries_what_the_smaller_run_beside_it_decided(tmp_path):
    sweep(toy(), tmp_path, scale="cpu")
    unlearnt = dataclasses.replace(
        toy(),
        claims=lambda rows: [
            dataclasses.replace(claim, unmet="" if len(rows) < 40 else "not learnt")
            for claim in toy().claims(rows)
        ],
    )
    (found,) = findings(unlearnt, sweep(toy(), tmp_path, scale="paper")).verdicts
    assert found.verdict == HOLDS
    assert "at cpu scale; larger: " in found.evidence
    (tmp_path / "toy-cpu.sqlite").unlink()
    (found,) = findings(unlearnt, sweep(toy(), tmp_path, scale="paper")).verdicts
    assert found.verdict == UNTESTED
