"""Claims of the Gadam chapter follow from rows: they hold of rows made as the thesis says, and fail of the opposite."""

import math

import pytest
import torch

from lambdahat._rng import generator
from lambdahat.experiments.averaging import (
    adam_ia,
    averaging_dimension,
    averaging_ensembles,
    averaging_schedules,
    gadam_image,
    gadam_imagenet,
    gadam_language,
)
from lambdahat.experiments.claims import judge
from lambdahat.experiments.experiment import SCALES, Rows, key_of
from lambdahat.experiments.reproduction import FAILS, HOLDS

SEEDS = 6
MODULES = (adam_ia, averaging_dimension, averaging_ensembles, averaging_schedules, gadam_image, gadam_imagenet,
           gadam_language)  # fmt: skip


def noisy(value, seed, name):
    """A value with a little noise of its own."""
    return value + 0.01 * float(torch.randn((), generator=generator(seed, name)))


def ends(key, values, column="accuracy", **more):
    """A row of the end for each setting and seed."""
    return [{"kind": "end", "network": "N", key: name, "seed": seed, column: noisy(value, seed, name), **more}
            for name, value in values.items() for seed in range(SEEDS)]  # fmt: skip


def verdicts(module, rows):
    return {verdict.claim: verdict.verdict for verdict in judge(module.claims(Rows(rows)))}


def put(rows, key, values, column):
    """Set one more column of rows by their setting."""
    for row in rows:
        row[column] = noisy(values[row[key]], row["seed"], f"{row[key]} {column}")
    return rows


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_every_scale_has_cells_of_plain_settings(module):
    for scale in SCALES:
        cells = module.EXPERIMENT.grid(scale)
        assert all(key_of(cell) for cell in cells)
    assert all(len(words) < 120 for words in module.EXPERIMENT.assumptions)


@pytest.mark.parametrize(("sign", "expected"), [(1, HOLDS), (-1, FAILS)])
def test_claims_on_images(sign, expected):
    order = {"AdamW": 1, "SGD": 2, "PadamW": 3, "SWA": 4, "Gadam": 5, "GadamX": 6}
    rows = ends("optimizer", {name: 70 + sign * rank for name, rank in order.items()})
    rows = put(rows, "optimizer", dict.fromkeys(order, 70 - sign), "before")
    rows = put(rows, "optimizer", {name: 10 + sign * rank for name, rank in order.items()}, "largest")
    rows = put(rows, "optimizer", {name: 10 + sign * rank for name, rank in order.items()}, "solution norm")
    found = verdicts(gadam_image, rows)
    assert len(found) == 10
    assert set(found.values()) == {expected}


def test_the_best_rival_is_the_one_gadamx_is_set_against():
    rows = ends("optimizer", {"SGD": 1.0, "SWA": 9.0, "AdamW": 2.0, "Gadam": 5.0, "PadamW": 3.0, "GadamX": 8.0})
    of = {name: Rows(rows).where(optimizer=name) for name in gadam_image.OPTIMIZERS}
    rival, reading = gadam_image.against_best(of, "GadamX")
    assert rival == "SWA"
    assert reading.value == pytest.approx(-1.0, abs=0.02)


def test_printed_gaps_are_those_of_the_tables():
    assert gadam_image.printed_gap("Gadam", "SGD") == "+1.58, +0.48, +0.15, -0.13"


@pytest.mark.parametrize(("sign", "expected"), [(1, HOLDS), (-1, FAILS)])
def test_claims_on_adam_with_averages(sign, expected):
    level = {"Adam-IA": 1, "GadamX": 2, "SWA": 2, "AdamW": 2, "SWA, low rate": 2, "Gadam": 3}
    rows = ends("run", {name: 50 + sign * rank for name, rank in level.items()}, **{"norm layers": adam_ia.WITH})
    rows = put(rows, "run", dict.fromkeys(level, 50 - 3 * sign), "iterate accuracy")
    rows = put(rows, "run", {name: 5 + sign * (name == "Adam-IA") for name in level}, "at start")
    rows = put(rows, "run", {name: 5 - sign * (name == "Adam-IA") for name in level}, "gain")
    rows = put(rows, "run", {name: 5 - sign * (name == "Gadam") for name in level}, "max norm before")
    rows = put(rows, "run", {name: 1 + 0.5 * sign * (name == "Gadam") for name in level}, "effective rate")
    for row in rows:
        row["iterate norm"] = 10.0
        row["average norm"] = {"SWA": 8.0, "SWA, low rate": 9.0}.get(row["run"], 9.5) + 0.01 * row["seed"]
        if sign < 0:
            longer = {"SWA": 9.5, "SWA, low rate": 9.0}
            row["average norm"] = longer.get(row["run"], 14.0) + 0.01 * row["seed"]
    bare = ends("run", {"Gadam": 50.0, "AdamW": 50.0}, **{"norm layers": adam_ia.WITHOUT})
    found = verdicts(adam_ia, rows + bare)
    assert len(found) == 10
    assert set(found.values()) == {expected}


def schedule_rows(sign):
    level = {"SGD, flat": 0, "SGD, step": 1, "SGD, linear": 1, "SGD + LH": 2, "SWA": 3, "SWA-Auto": 1, "AdamW, flat": 0,
             "AdamW, linear": 1, "AdamW + LH": 2, "Gadam": 4, "Gadam + LH": 3, "Gadam-Auto": 3}  # fmt: skip
    rows = ends("run", {name: 50 + sign * rank for name, rank in level.items()})
    rows = put(rows, "run", dict.fromkeys(level, 50.0), "iterate accuracy")
    rows = put(rows, "run", {name: 90 + sign * (name == "SGD, step") for name in level}, "training accuracy")
    rows = put(rows, "run", {name: 30 + sign * (name == "AdamW + LH") for name in level}, "early")
    for start, every in averaging_schedules.plans(10, 4):
        level = 50 + sign * (2.0 if every == 0 else 1.5)
        rows += [{"kind": "average", "run": "AdamW, flat", "network": "N", "seed": seed, "start": start,
                  "frequency": every, "accuracy": noisy(level, seed, f"{start} {every}")}
                 for seed in range(SEEDS)]  # fmt: skip
    return rows


@pytest.mark.parametrize(("sign", "expected"), [(1, HOLDS), (-1, FAILS)])
def test_claims_on_schedules(sign, expected):
    found = verdicts(averaging_schedules, schedule_rows(sign))
    assert found.pop("averaging every step or once per epoch makes little difference") == HOLDS
    assert len(found) == 11
    assert set(found.values()) == {expected}


def test_starts_fall_on_epochs_and_frequencies_on_steps():
    plans = averaging_schedules.plans(30, 8)
    assert plans[0.5, 0] == (15 * 8, 8)
    assert plans[0.5, 5] == (15 * 8, 5)
    assert plans[0.9, 0] == (27 * 8, 8)
    assert len(plans) == len(averaging_schedules.STARTS) + len(averaging_schedules.FREQUENCIES) - 1


@pytest.mark.parametrize(("sign", "expected"), [(1, HOLDS), (-1, FAILS)])
def test_claims_on_language(sign, expected):
    level = {"Adam": 5, "Padam": 4, "ASGD": 3, "GadamX": 2, "Gadam": 1}
    rows = ends("name", {name: 10 + sign * rank for name, rank in level.items()}, "test perplexity")
    for start, every in gadam_language.plans(10, 100):
        value = 10 + sign * (1.0 if every == 1 else 0.5)
        rows += [{"kind": "average", "network": "N", "seed": seed, "start": start, "frequency": every,
                  "perplexity": noisy(value, seed, f"{start} {every}"),
                  "test perplexity": noisy(value, seed, f"t{start} {every}")} for seed in range(SEEDS)]  # fmt: skip
    found = verdicts(gadam_language, rows)
    assert found.pop("averaging every step or every 100 makes little difference") == FAILS
    assert len(found) == 7
    assert set(found.values()) == {expected}


@pytest.mark.parametrize(("sign", "expected"), [(1, HOLDS), (-1, FAILS)])
def test_claims_on_imagenet(sign, expected):
    level = {
        "SGD large": 0,
        "Lookahead, centralised": 0,
        "SGD": 1,
        "SGD IA": 2,
        "Gadam": 2,
        "Gadam δ = 1": 3,
        "GadamX": 4,
    }
    rows = ends("run", {name: 60 + sign * rank for name, rank in level.items()})
    rows = put(rows, "run", dict.fromkeys(level, 60 - 9 * sign), "before")
    found = verdicts(gadam_imagenet, rows)
    assert len(found) == 8
    assert set(found.values()) == {expected}


@pytest.mark.parametrize(("sign", "expected"), [(1, HOLDS), (-1, FAILS)])
def test_claims_on_dimension(sign, expected):
    rows = []
    for power, size in enumerate((100, 1000, 10_000, 100_000)):
        gain = {"SGD": 0.0, "SWA": 5 + sign * power, "GadamX": 5.5 + sign * power}
        rows += [
            {**row, "subject": "network", "network": f"N{size}", "parameters": size,
             "own gain": noisy(5 + sign * power, row["seed"], f"own {size}")}
            for row in ends("optimizer", {name: 50 + value for name, value in gain.items()})
        ]  # fmt: skip
        rows += [
            {"subject": "quadratic", "dimension": size, "seed": seed, "gain": noisy(1.0, seed, size) * size**sign,
             "misfit": noisy(0.0 if sign > 0 else 9.0, seed, f"m{size}")}
            for seed in range(SEEDS)
        ]  # fmt: skip
    found = verdicts(averaging_dimension, rows)
    assert len(found) == 6
    assert set(found.values()) == {expected}


def test_the_quadratic_follows_its_exact_law():
    """Theorem 18: for many directions ‖w‖² of one run is near its mean, and the average's is smaller by a factor."""
    row = averaging_dimension.quadratic_row({"dimension": 4000, "seed": 0})
    assert row["final"] == pytest.approx(row["exact final"], rel=0.1)
    assert row["average"] == pytest.approx(row["exact average"], rel=0.1)
    assert row["average"] < row["final"] / 20
    assert abs(row["misfit"]) < 4


def test_the_printed_slope_is_of_the_printed_points():
    sizes, gains = zip(*averaging_dimension.PRINTED.values(), strict=True)
    logs = [math.log10(size) for size in sizes]
    centre = sum(logs) / len(logs)
    exact = sum((a - centre) * b for a, b in zip(logs, gains, strict=True)) / sum((a - centre) ** 2 for a in logs)
    assert averaging_dimension._printed_slope().startswith(f"{exact:.2f} over")


@pytest.mark.parametrize(("sign", "expected"), [(1, HOLDS), (-1, FAILS)])
def test_claims_on_ensembles(sign, expected):
    decays = {0.0: 0, 1e-3: 1, 1e-2: 2}
    rows = ends("decay", {decay: 50 + sign * rank for decay, rank in decays.items()})
    rows = put(rows, "decay", {decay: 5 + sign * rank for decay, rank in decays.items()}, "average gain")
    rows = put(rows, "decay", {decay: 40 - sign * rank for decay, rank in decays.items()}, "before")
    rows = put(rows, "decay", dict.fromkeys(decays, 3.0), "ensemble gain")
    rows = put(rows, "decay", dict.fromkeys(decays, 40.0), "member")
    rows = put(rows, "decay", dict.fromkeys(decays, 40.0 + sign), "ensemble")
    rows = put(rows, "decay", {decay: 1.0 + sign * rank for decay, rank in decays.items()}, "distance")
    found = verdicts(averaging_ensembles, rows)
    assert len(found) == 7
    assert set(found.values()) == {expected}
