"""Rates over batch sizes with batch normalisation: grids, one step in closed form, claims both
ways, charts.
"""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from lambdahat._core.rng import generator
from lambdahat.experiments.kit.cells import Rows, key_of
from lambdahat.experiments.kit.claims import FAILS, HOLDS, UNTESTED, judge
from lambdahat.experiments.kit.experiment import SCALES
from lambdahat.experiments.kit.training import images, network
from lambdahat.experiments.minibatch.batch_norm_rates import (
    EXPERIMENT,
    claims,
    largest_rates,
    links_of,
    run,
    setups_of,
    slopes_of,
    trajectory,
)
from lambdahat.report.figures import draw
from tests.experiments.minibatch.made import assert_same_rows, whole

SEEDS = 6
SIZES = (64, 128, 512, 1024, 2048)
CELL = {
    "data": "digits",
    "training": 64,
    "held_out": 32,
    "side": 0,
    "augmented": False,
    "epochs": 1,
    "batch": 64,
    "network": "VGG-4×2-BN",
    "decay": 0.1,
    "rate": 0.05,
    "seed": 3,
}


@pytest.fixture(scope="module")
def found(smoke):
    return whole(smoke(EXPERIMENT.name))


def test_rates_follow_their_rules():
    cells = [cell for cell in EXPERIMENT.grid("paper") if cell["rule"] != "search"]
    powers = {"linear": 1.0, "square root": 0.5, "constant": 0.0}
    bases = {
        cell["network"]: cell["rate"] for cell in cells if cell["batch"] == cell["reference"] == 128
    }
    assert bases["WideResNet-28×10"] == 0.1  # α = 0.1·B/128, Figures 5.9 and 5.10
    assert bases["VGG-16"] == 0.01  # §5.7.0.2
    for cell in cells:
        assert cell["rate"] == pytest.approx(
            bases[cell["network"]] * (cell["batch"] / 128) ** powers[cell["rule"]]
        )


def test_a_run_that_diverged_counts_as_a_guess_among_its_classes():
    for data, classes in (("cifar10", 10), ("cifar100", 100)):
        for loss, learns in ((0.8 * math.log(classes), True), (None, False)):
            row = {"kind": "end", "network": "VGG-16", "decay": 0.0, "reference": 128, "seed": 0}
            row |= {
                "batch": 128,
                "rule": "linear",
                "rate": 0.1,
                "data": data,
                "training loss": loss,
            }
            (setup,) = setups_of(Rows([row]))
            assert largest_rates(setup) == ({0: -1.0} if learns else {})


@pytest.mark.parametrize("scale", SCALES)
def test_all_batches_are_whole_and_settings_plain(scale):
    for cell in EXPERIMENT.grid(scale):
        assert cell["training"] % cell["batch"] == 0
        assert key_of(cell)


def test_one_step_over_all_data_is_that_of_gradient_descent():
    """‖θ₁ − θ₀‖ = α·‖∇L(θ₀) + γθ₀‖, with batch norm by the batch's own statistics."""
    data = images(CELL, "cpu")
    model = network(CELL["network"], data.shape, data.classes, CELL["seed"])
    x, y = data.training
    cross_entropy(model(x), y).backward()
    squares = sum(
        float((p.grad + CELL["decay"] * p.detach()).double().square().sum())
        for p in model.parameters()
    )
    first, end = run(CELL, "cpu")
    assert (
        first["distance"]
        == end["distance"]
        == pytest.approx(CELL["rate"] * math.sqrt(squares), rel=1e-5)
    )
    assert [row["kind"] for row in (first, end)] == ["epoch", "end"]


def test_a_cell_depends_on_its_settings_alone():
    torch.manual_seed(5)
    one = run(CELL, "cpu")
    torch.manual_seed(6)
    assert_same_rows(run(CELL, "cpu"), one, rel=0)
    assert run({**CELL, "seed": 4}, "cpu")[-1]["distance"] != one[-1]["distance"]


def test_a_run_that_diverges_guesses_and_is_nowhere():
    rows = run({**CELL, "network": "VGG-4×2", "rate": 1e30, "batch": 8, "epochs": 3}, "cpu")
    assert len(rows) < 4
    for row in rows[-2:]:
        assert row["diverged"]
        assert row["error"] == pytest.approx(90.0)
        assert row["distance"] is row["training loss"] is None


def test_a_trajectory_is_read_at_the_full_rate():
    """Of eight epochs the first five have the full rate; the error after the second to the fifth
    may oscillate.
    """
    errors = [90.0, 60.0, 80.0, 50.0, 40.0, 30.0, 20.0, 25.0]
    assert trajectory([{"error": error} for error in errors], 8) == {
        "before": 40.0,
        "oscillation": (20 + 30 + 10) / 3,
        "least": 20.0,
    }
    assert trajectory([{"error": 90.0}], 8) == {"before": 90.0, "oscillation": None, "least": 90.0}


def test_the_rate_is_full_where_a_trajectory_is_read(found):
    """Eq. 5.37: up to t/T = ½ the rate is the cell's, and then less."""
    epochs = found.where(kind="epoch", network="VGG-4×4-BN", rule="linear", batch=64, seed=0)
    full = [row["rate now"] == row["rate"] for row in epochs]
    assert full == [True, True, True, False]
    (end,) = found.where(kind="end", network="VGG-4×4-BN", rule="linear", batch=64, seed=0)
    assert end["before"] == epochs[full.count(True) - 1]["error"]


def noisy(value, *name):
    return value + 0.01 * float(torch.randn((), generator=generator(0, *map(str, name))))


def made(name, errors, decay=5e-4, distance=lambda size: 10.0, rule="linear", **more):
    """Rows of ends, with an error for each batch size."""
    return [
        {
            "kind": "end",
            "network": name,
            "decay": decay,
            "rule": rule,
            "batch": size,
            "reference": 128,
            "seed": seed,
            "rate": 0.1 * size / 128,
            "error": noisy(error, name, decay, rule, size, seed),
            "diverged": False,
            "distance": noisy(distance(size), name, "far", rule, size, seed),
            "before": 60.0,
            "data": "cifar10",
            "epochs": 10,
            "parameters": 7,
            "oscillation": 1.0,
            "training loss": 0.5,
            "training error": 5.0,
            "validation loss": 1.0,
        }
        | {key: value(size) if callable(value) else value for key, value in more.items()}
        for size, error in errors.items()
        for seed in range(SEEDS)
    ]


def tried(name, losses):
    """Ends of the search at the reference, with a training loss for each rate."""
    return [
        row | {"rate": rate}
        for rate, loss in losses.items()
        for row in made(name, {128: 50.0}, rule="search", **{"training loss": loss})
    ]


FLAT = dict.fromkeys(SIZES, 30.0)


def verdicts(rows):
    judged = judge(claims(Rows(rows)))
    assert len({each.claim for each in judged}) == len(judged)
    return {each.claim: each.verdict for each in judged}


def told(rows, words):
    (verdict,) = [verdict for claim, verdict in verdicts(rows).items() if words in claim]
    return verdict


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        (FLAT | {1024: 31.0, 2048: 36.0}, (HOLDS, HOLDS, HOLDS)),
        (FLAT | {512: 33.0, 1024: 33.0, 2048: 31.0}, (FAILS, FAILS, FAILS)),
        (FLAT | {64: 27.0, 1024: 31.0, 2048: 36.0}, (FAILS, HOLDS, HOLDS)),
    ],
)
@pytest.mark.parametrize("name", ["VGG-A-BN", "VGG-A"])
def test_errors_are_kept_up_to_a_threshold(name, errors, expected):
    rows = made(name, errors)
    words = ("is that at 128", "rises by little at B = 1024", "higher still at B = 2048")
    assert tuple(told(rows, word) for word in words) == expected


@pytest.mark.parametrize(("loss", "expected"), [(2.3, HOLDS), (None, HOLDS), (0.4, FAILS)])
@pytest.mark.parametrize(("name", "words"), [("VGG-A-BN", "do not train"), ("VGG-A", "diverge")])
def test_an_unstable_vgg_does_not_train(loss, expected, name, words):
    rows = made(
        name, FLAT | {2048: 88.0}, **{"training loss": lambda size: loss if size == 2048 else 0.5}
    )
    for row in rows:  # a known spread, for a reading without an error says little
        if row["training loss"] is not None:
            row["training loss"] += 0.001 * row["seed"]
    assert told(rows, f"unstable runs {words}") == expected
    assert told(made(name, FLAT), f"unstable runs {words}") == UNTESTED


@pytest.mark.parametrize(("before", "end", "expected"), [(60.0, 40.0, HOLDS), (20.0, 25.0, FAILS)])
@pytest.mark.parametrize(("decay", "figure"), [(5e-4, "Figure 5.9"), (5e-5, "Figure 5.10")])
def test_an_oscillating_residual_network_comes_back_and_stays_behind(
    before, end, expected, decay, figure
):
    swings = {"oscillation": lambda size: 8.0 if size == 2048 else 1.0, "before": before}
    rows = made("ResNet", FLAT | {2048: end}, decay, **swings)
    assert (
        told(rows, "falls when the rate is reduced")
        == told(rows, "it ends above that at")
        == expected
    )
    assert {claim.source.split(", ")[-1] for claim in claims(Rows(rows)) if not claim.own} == {
        figure
    }
    calm = made("ResNet", FLAT | {2048: end}, decay, before=before)
    assert (
        told(calm, "falls when the rate is reduced")
        == told(calm, "it ends above that at")
        == UNTESTED
    )


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("name", "own"), [("VGG-A-BN", True), ("VGG-A", False)])
def test_rules_are_compared_eight_times_from_the_reference(sign, name, own):
    rows = made(name, FLAT, distance=lambda size: 20.0)
    rows += made(
        name, {1024: 30.0 + 3 * sign}, distance=lambda size: 20.0 - 5 * sign, rule="square root"
    )
    for words in (
        "generalises better than the square root",
        "ends further from the start than the square root",
    ):
        assert told(rows, words) == (HOLDS if sign > 0 else FAILS)
        assert [claim.own for claim in claims(Rows(rows)) if words in claim.sentence] == [own]


def linked(name, slope):
    """Errors that change by ``slope`` per cent with every doubling of the distance, over 64 …
    1,024.
    """
    errors = {size: 30.0 + slope * math.log2(size / 128) for size in SIZES[:-1]}
    return made(name, errors, distance=float)


def test_distance_and_error_are_set_against_each_other():
    both = linked("VGG-A-BN", 0.5) + linked("VGG-A", -5.0)
    setup, twin = setups_of(Rows(both))
    assert set(links_of(setup).values()) == {1.0}
    assert set(links_of(twin).values()) == {-1.0}
    assert slopes_of(twin)[0] == pytest.approx(5.0, abs=0.05)
    assert told(both, "VGG-A-BN, γ = 0.0005: the further from the start, the higher") == HOLDS
    assert told(both, "VGG-A, γ = 0.0005: the further from the start, the lower") == HOLDS
    assert told(both, "smaller in magnitude") == HOLDS
    other = linked("VGG-A-BN", -5.0) + linked("VGG-A", 0.5)
    assert told(other, "the higher the error") == told(other, "the lower the error") == FAILS
    assert told(other, "smaller in magnitude") == FAILS


def test_a_link_is_weaker_by_its_rank_correlation():
    """The twin's errors fall with every doubling; with batch norm they go up and down."""
    zigzag = made(
        "VGG-A-BN", dict(zip(SIZES[:-1], (30.0, 32.0, 31.0, 30.5), strict=True)), distance=float
    )
    assert told(zigzag + linked("VGG-A", -5.0), "the link of distance and error is weaker") == HOLDS
    assert (
        told(linked("VGG-A-BN", -5.0) + [row | {"network": "VGG-A"} for row in zigzag], "is weaker")
        == FAILS
    )


def test_runs_that_are_all_alike_have_no_link():
    rows = [row | {"error": 90.0} for row in made("VGG-A-BN", FLAT)]
    (setup,) = setups_of(Rows(rows))
    assert links_of(setup) == slopes_of(setup) == {}
    assert not any("further from the start" in claim.sentence for claim in claims(Rows(rows)))


def test_batch_norm_allows_larger_rates_and_costs_less_at_large_batches():
    rows = made("VGG-A-BN", FLAT | {2048: 35.0}) + made("VGG-A", FLAT | {2048: 80.0})
    assert told(rows, "costs less at B = 2048") == HOLDS
    rows += tried("VGG-A-BN", {1.0: 0.9, 3.0: 1.9, 10.0: 2.3}) + tried(
        "VGG-A", {1.0: 2.3, 3.0: None, 10.0: 2.3}
    )
    setup, twin = setups_of(Rows(rows))
    assert largest_rates(setup) == dict.fromkeys(range(SEEDS), math.log10(3.0))
    # the rate of the scaled run, 0.1
    assert largest_rates(twin) == dict.fromkeys(range(SEEDS), -1.0)
    assert told(rows, "the largest rate that trains") == HOLDS


def test_nothing_is_judged_where_the_run_that_is_scaled_learnt_nothing():
    rows = made("VGG-A-BN", dict.fromkeys(SIZES, 55.0), distance=float) + made(
        "VGG-A", FLAT, distance=float
    )
    for claim, verdict in verdicts(rows).items():
        assert (verdict == UNTESTED) == ("VGG-A-BN" in claim or "diverge" in claim), claim


@pytest.mark.parametrize(
    "left", [{"rule": "search"}, {"batch": 256}, {"network": "VGG-4×4"}, {"rule": "linear"}]
)
def test_some_cells_of_a_grid_are_enough_to_say_something(found, left):
    rows = Rows(
        [row for row in found if any(row.get(name) != value for name, value in left.items())]
    )
    assert 0 < len(rows) < len(found)
    judge(EXPERIMENT.claims(rows))
    assert all(
        len(line) == len(table.header) for table in EXPERIMENT.tables(rows) for line in table.rows
    )
    EXPERIMENT.charts(rows)


def test_charts_draw_errors_over_sizes_epochs_and_distances(found):
    charts = EXPERIMENT.charts(found)
    assert [chart.source for chart in charts] == [
        "Figure 5.7c",
        "Figure 5.7c",
        "Figure 5.8b",
        "Figure 5.10",
        "Figure 5.10",
        "Figure 5.8b",
        "Figure 5.7a",
        "Figure 5.7a",
        "Figure 5.8a",
        "§5.7.0.1",
    ]
    printed = {series.name: series for series in charts[6].series if series.published}
    # 100 − 65.82 and 100 − 64.35
    assert list(printed["linear, thesis, VGG-16 on CIFAR-100"].y) == [34.18, 35.65]
    assert list(printed["square root, thesis, VGG-16 on CIFAR-100"].y) == [38.92]  # 100 − 61.08
    assert not any(series.published for chart in charts[:6] for series in chart.series)
    ends = found.where(kind="end", network="VGG-4×4-BN", rule="linear", batch=64)
    assert charts[0].series[0].y[2] == pytest.approx(sum(ends.values("error")) / 2)
    for chart in charts:
        draw(chart)
