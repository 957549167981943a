"""The NGD paper's experiments: each runs, its points are what they say, and its claims are
judged both ways.
"""

import importlib
import io
import math
import sys

import pytest
import torch

from lambdahat._core.storage import Damaged
from lambdahat.cli.reproduce import DEMO_SCALE, with_seeds
from lambdahat.experiments import published
from lambdahat.experiments.kit.cells import Rows
from lambdahat.experiments.kit.claims import FAILS, HOLDS, UNTESTED, judge
from lambdahat.experiments.ngd.ngd_claims import (
    CHANCE,
    FORMS,
    LEARNT,
    PLOTTED,
    bic,
    by_group,
    criterion_claims,
    dimension,
    form_claim,
    log_ratio,
    survival,
    unmet,
)
from lambdahat.experiments.ngd.ngd_runs import (
    TINY,
    RunPoint,
    Way,
    at_equal_loss,
    run_cells,
    subject_of,
    train_run,
)
from lambdahat.report.figures import draw
from lambdahat.results import Status
from tests.documents import ROOT

sys.path.append(str(ROOT / "benchmarks"))  # whose scripts import each other by name
ngd_stacks = importlib.import_module("ngd_stacks")
StackedRun, train_together = ngd_stacks.StackedRun, ngd_stacks.train_together
kept_in, upto = ngd_stacks.kept_in, ngd_stacks.upto

EXPERIMENTS = [name for name in published.PLACES if name.startswith("ngd-")]
OPTIMIZERS = ("sgd", "ngd")


def tiny_subject():
    return subject_of(run_cells(TINY, [("ffnn", 1, 6)], 1)[0], "cpu")


@pytest.fixture(scope="module")
def subject():
    return tiny_subject()


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_smoke_runs_and_reads(name, smoke):
    """Columns keep to Eqs. 18 and 19; claims, tables and charts can be read off the rows of a
    sweep that has begun.
    """
    experiment = published.find(name)
    first = experiment.grid("smoke")[0]
    rows = [
        row for row in smoke(name).rows() if all(row[key] == value for key, value in first.items())
    ]
    assert rows
    for row in rows:
        n = row["training"]
        assert row["wbic"] == pytest.approx(n * row["loss"] + row["llc"] * math.log(n), rel=1e-4)
        assert row["llc_ess"] > 0
        assert row["llc_status"] in Status.__members__
        assert row["trace"] > 0
    for found in (Rows(rows), Rows(rows[:1])):
        assert judge(experiment.claims(found))
        for table in experiment.tables(found):
            assert {len(line) for line in table.rows} <= {len(table.header)}
        assert experiment.charts(found)
    for chart in experiment.charts(Rows(rows)):
        assert chart.x_label
        draw(chart)
        assert (PLOTTED in chart.caption) == bool(chart.source)  # the paper prints no numbers
        assert chart.title[0].isupper()
    assert all(experiment.grid(scale) for scale in ("cpu", "paper"))


def test_runs_of_a_stage_share_start_and_batches(subject):
    """NGD with endless smoothing is SGD on the same batches (§3.2), up to the rescaled norm."""
    start = subject.problem.vector.clone()
    sgd = train_run(subject, "sgd", start, epochs=3)
    ngd = train_run(subject, "ngd", start, epochs=3, alpha=1e9)
    assert torch.equal(sgd.points[0].vector, ngd.points[0].vector)
    moved = (sgd.end.vector - start).norm()
    assert (sgd.end.vector - ngd.end.vector).norm() < 1e-3 * moved
    other = train_run(subject, "sgd", start, "another stage", epochs=3)
    assert (sgd.end.vector - other.end.vector).norm() > 1e-3 * moved


def test_the_last_point_is_the_end_of_the_run(subject):
    way = train_run(subject, "sgd", subject.problem.vector.clone(), epochs=7)
    assert way.end.epoch == 7
    assert way.points[0].epoch == 0
    assert len(way.update_norms) == 7
    assert torch.equal(way.end.vector, subject.problem.vector)
    assert way.end.loss == pytest.approx(float(subject.problem.loss()))


def test_a_run_that_diverges_keeps_its_finite_points(subject):
    start = subject.problem.vector.clone()
    way = train_run(subject, "sgd", start, epochs=3, rate=1e30)
    assert way.diverged
    assert way.points
    assert all(math.isfinite(point.loss) for point in way.points)
    subject.place(start)


def way_of(optimizer, losses):
    return Way(
        optimizer,
        tuple(RunPoint(float(i), loss, torch.zeros(1)) for i, loss in enumerate(losses)),
        (1.0,),
    )


def test_equal_loss_takes_the_highest_end():
    sgd, ngd = way_of("sgd", [2.0, 1.0, 0.5, 0.1]), way_of("ngd", [2.0, 1.5, 1.0, 0.6])
    first, second = at_equal_loss([sgd, ngd])
    assert (first.loss, second.loss) == (0.5, 0.6)
    assert second is ngd.end
    assert [point.loss for point in at_equal_loss([sgd, sgd])] == [0.1, 0.1]


def test_images_are_drawn_by_the_seed():
    cells = run_cells(TINY, [("ffnn", 1, 6), ("lenet5", 0, 0)], 2)
    subjects = [subject_of(cell, "cpu") for cell in (cells[0], cells[0], cells[1], cells[2])]
    first, again, other, squares = (each.problem.batches.first().data for each in subjects)
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[1], other[1])
    assert tuple(squares[0].shape) == (TINY["training"], 1, 28, 28)
    assert subjects[0].held_out.num_samples == TINY["held_out"]


def pairs(gaps, at, **fixed):
    """Made-up rows of SGD at a level and NGD above it by ``gaps``: one column for each, over
    five seeds.
    """
    rows = []
    for seed in range(5):
        for optimizer in OPTIMIZERS:
            noise = 0.01 * ((seed * 7 + 3 * (optimizer == "ngd")) % 5)
            values = {
                name: 10.0 + noise + (gap if optimizer == "ngd" else 0.0)
                for name, gap in gaps.items()
            }
            about = {
                "data": "mnist",
                "network": "ffnn",
                "layers": 1,
                "width": 64,
                "seed": seed,
                "at": at,
            }
            fine = dict.fromkeys(("llc_status", "llc_batch_status"), "CONVERGED")
            rows.append({**about, "optimizer": optimizer, **fine, **values, **fixed})
    return rows


GAPS = {"llc_batch": 5.0, "llc": -5.0, "trace": 5.0}


def test_forms_are_told_apart():
    """Higher at one temperature and lower at the other, and the other way round at equal loss."""
    rows = Rows(
        [*pairs(GAPS, "end"), *pairs({name: -gap for name, gap in GAPS.items()}, "equal loss")]
    )
    claims = published.find("ngd-vs-sgd").claims(rows)
    assert [found.verdict for found in judge(claims)] == [
        HOLDS,
        FAILS,
        FAILS,
        HOLDS,
        FAILS,
        HOLDS,
        FAILS,
    ]
    table = survival(by_group(rows), claims)
    assert [line[1].split(":")[0] for line in table.rows] == [
        HOLDS,
        FAILS,
        FAILS,
        HOLDS,
        FAILS,
        HOLDS,
        FAILS,
    ]
    assert published.find("ngd-digits").claims(rows)[0].reading == claims[0].reading


@pytest.mark.parametrize("status", ["NOT_A_MINIMUM", "NOT_MIXED"])
def test_pairs_with_a_reading_that_is_not_sound_are_left_out(status):
    rows = pairs(GAPS, "end")
    for row in rows:
        if row["seed"] == 2 and row["optimizer"] == "ngd":
            row.update(llc_status=status, llc=-1000.0)
    with_all, sound = (form_claim(Rows(rows), form) for form in FORMS[1:3])
    assert (with_all.reading.count, sound.reading.count) == (5, 4)
    assert sound.reading.value == pytest.approx(-5.0, abs=0.1)
    assert with_all.reading.value < -100
    assert (with_all.unmet, sound.unmet, with_all.own, sound.own) == ("", "", False, True)
    spoilt = Rows({**row, "llc_status": status} for row in rows)
    found = [form_claim(spoilt, form) for form in FORMS[:4]]
    assert [verdict.verdict for verdict in judge(found)] == [HOLDS, UNTESTED, UNTESTED, HOLDS]
    assert found[1].unmet == f"SGD is {status} in 5 of 5; NGD is {status} in 5 of 5"
    assert found[2].unmet == "0 of 5 pairs are left"


def test_a_network_that_has_not_learnt_decides_nothing():
    """From half of the runs on; the same runs with a lower loss are judged."""
    rows = Rows([*pairs(GAPS, "end", loss=0.1), *pairs(GAPS, "equal loss", loss=0.1)])

    def verdicts(high):
        changed = [
            {**row, "loss": 2.2} if row["optimizer"] == "ngd" and row["seed"] < high else row
            for row in rows
        ]
        return [
            found.verdict for found in judge(published.find("ngd-vs-sgd").claims(Rows(changed)))
        ]

    assert verdicts(2) == verdicts(0)
    assert UNTESTED not in verdicts(0)
    assert set(verdicts(3)) == {UNTESTED}


def test_the_condition_is_about_losses_and_statuses():
    statuses = "NOT_A_MINIMUM", "CONVERGED", "NOT_MIXED", "GRADIENTS_SPENT"
    losses = 0.1, LEARNT + 0.01, 0.1, 0.1
    rows = Rows(
        {"loss": loss, "llc_status": status, "g_n_status": status, "llc_status_rule": "CONVERGED"}
        for loss, status in zip(losses, statuses, strict=True)
    )
    assert CHANCE == pytest.approx(-math.log(0.1))
    assert unmet({"A": rows[:1]}) == unmet({"A": rows[:1]}, "llc_batch") == unmet({}) == ""
    assert unmet({"A": rows[:1]}, "llc") == "A is NOT_A_MINIMUM in 1 of 1"
    assert unmet({"A": rows}, "llc") == "A is NOT_A_MINIMUM in 1 and NOT_MIXED in 1 of 4"
    assert unmet({"A": rows}, "wbic") == unmet({"A": rows}, "g_n") == unmet({"A": rows}, "llc")
    assert unmet({"A": rows}, "llc_rule") == unmet({"A": rows[3:]}, "llc") == ""
    assert (
        unmet({"A": rows[1:2], "B": rows[:1]})
        == "A has not learnt (training loss 1.16, chance 2.30)"
    )
    assert unmet({"A": Rows([{"loss": math.nan}])}).startswith("A has not learnt")


def test_changes_are_log_ratios_to_the_other_run():
    """Halving and doubling are as far from 1, and a λ̂ that is not positive has none."""
    base = {"data": "mnist", "network": "ffnn", "layers": 1, "width": 64}
    low, high = (
        Rows({**base, "seed": seed, "llc": value * (seed + 1)} for seed in range(3))
        for value in (2.0, 8.0)
    )
    assert (
        log_ratio(high, low, "llc").value
        == pytest.approx(math.log(4))
        == -log_ratio(low, high, "llc").value
    )
    negative = Rows([*low[1:], {**low[0], "llc": -1.0}])
    assert log_ratio(high, negative, "llc").count == 2


@pytest.mark.parametrize("sign", [1, -1])
def test_widths(sign):
    rows = []
    for layers in (1, 2):
        for width in (8, 16):
            for at in ("end", "equal loss"):
                rows += pairs(dict.fromkeys(GAPS, 5.0 * sign), at, layers=layers, width=width)
    found = judge(published.find("ngd-widths").claims(Rows(rows)))
    assert {verdict.verdict for verdict in found} == {HOLDS if sign > 0 else FAILS}
    forms = [form for form in FORMS if form.column in GAPS]
    assert sum("of 16" in verdict.claim for verdict in found) == 2 * len(forms)
    # seeds
    assert {claim.reading.count for claim in published.find("ngd-widths").claims(Rows(rows))} == {5}


def on_the_way(value, parts):
    """Made-up rows of both optimisers over epochs; ``value(optimizer, part)`` gives the columns."""
    rows = []
    for part in range(1, parts + 1):
        for row in pairs({}, "on the way", part=part, epoch=float(part)):
            wobble = 1 + 0.002 * row["seed"]
            columns = {
                name: found * wobble for name, found in value(row["optimizer"], part).items()
            }
            rows.append({**row, **columns})
    return Rows(rows)


def test_epochs():
    claims = published.find("ngd-epochs").claims

    def level(optimizer, part):
        high = 1.5 if optimizer == "ngd" else 1.0
        return {"llc_batch": 10 * high, "llc": 20 * high, "trace": high * (100 - 5 * part)}

    assert {found.verdict for found in judge(claims(on_the_way(level, 6)))} == {HOLDS}

    def rising(optimizer, part):
        high = 1.0 if optimizer == "ngd" else 1.5
        return {"llc_batch": 10 * high * part, "llc": 20 * high * part, "trace": high * part}

    assert {found.verdict for found in judge(claims(on_the_way(rising, 6)))} == {FAILS}


@pytest.mark.parametrize("sign", [1, -1])
def test_smoothing(sign):
    """λ̂ = 10 ± 2·log₁₀ of the value, SGD's at 4 or 16: slopes of ∓2, and at the largest value
    SGD's or far from it.
    """
    rows = []
    for sweep in ("alpha", "epsilon"):
        for at in ("end", "equal loss"):
            for seed in range(4):
                base = {
                    "data": "mnist",
                    "network": "ffnn",
                    "layers": 1,
                    "width": 64,
                    "seed": seed,
                    "at": at,
                    "sweep": sweep,
                }
                wobble = 0.001 * seed**2
                rows.append(
                    {**base, "optimizer": "sgd", "llc": 4.0 + wobble, "llc_batch": 4.0 + wobble}
                )
                for power in (-3, 0, 3):
                    column = 10 - sign * (2 + wobble) * power
                    rows.append(
                        {
                            **base,
                            "optimizer": "ngd",
                            "value": 10.0**power,
                            "llc": column,
                            "llc_batch": column,
                        }
                    )
    found = published.find("ngd-smoothing").claims(Rows(rows))
    assert found[0].reading.value == pytest.approx(-2 * sign, abs=0.1)
    assert {verdict.verdict for verdict in judge(found)} == {HOLDS if sign > 0 else FAILS}


def switched(values):
    """Made-up rows of the branches of both figures from {branch: λ̂ at the end}; 10 at the
    split.
    """
    rows = []
    for figure in ("4", "5 and 6"):
        for seed in range(5):
            base = {
                "data": "mnist",
                "network": "ffnn",
                "layers": 2,
                "width": 64,
                "seed": seed,
                "figure": figure,
            }
            wobble = 1 + 0.001 * seed**2
            flat = {
                "llc": 10.0 * wobble,
                "llc_batch": 10.0 * wobble,
                "validation_loss": 1.0,
                "update_norm": 1.0,
            }
            rows.append({**base, "branch": "split", "at": "split", "part": 0, **flat})
            for branch, value in values.items():
                raised = 0.5 if values["SGD ×100"] < 12 else 2.0
                columns = {
                    "llc": value * wobble,
                    "llc_batch": value * wobble,
                    "update_norm": value / 10 * wobble**2,
                    "validation_loss": raised if branch == "SGD ×100" else wobble,
                }
                end = {**base, "branch": branch, "optimizer": branch[:3].lower(), **columns}
                rows += [{**end, "at": "on the way", "part": 1}, {**end, "at": "equal loss"}]
    return Rows(rows)


def test_switch():
    claims = published.find("ngd-switch").claims
    held = switched(
        {"SGD ×1": 9.5, "NGD ×1": 11.0, "NGD ×10": 15.0, "NGD ×100": 20.0, "SGD ×100": 10.0}
    )
    assert {verdict.verdict for verdict in judge(claims(held))} == {HOLDS}
    failed = switched(
        {"SGD ×1": 30.0, "NGD ×1": 20.5, "NGD ×10": 15.0, "NGD ×100": 20.0, "SGD ×100": 40.0}
    )
    assert {verdict.verdict for verdict in judge(claims(failed))} == {FAILS}
    early = Rows(
        {**row, "loss": 1.6} if row["branch"] == "split" and row["figure"] != "4" else row
        for row in held
    )
    kinds = {
        (found.own, "Figure 4" in found.source): found.verdict for found in judge(claims(early))
    }
    assert kinds == {(False, True): HOLDS, (False, False): UNTESTED, (True, False): HOLDS}


def switched_late(values, before, factor):
    """``switched`` with λ̂ of ``before`` ahead of the split, and by ``factor`` other losses and
    norms of raised SGD.
    """
    rows = []
    for row in switched(values).where(figure="5 and 6"):
        if row["branch"] == "split":
            rows.append(
                {**row, "branch": "before", "at": "before", "llc": before, "llc_batch": before}
            )
        last = factor * (1 + 0.01 * row["seed"]) if row["branch"] == "SGD ×100" else 1.0
        rows.append({**row, "loss": 0.2 * last})
        if row["at"] == "on the way":
            rows.append({**rows[-1], "part": 2, "update_norm": row["update_norm"] * last})
    return Rows(rows)


def test_late_switch():
    """Judged both ways; where λ̂ still moved before the split, or a branch is no minimum, only
    the losses are.
    """
    claims = published.find("ngd-switch-late").claims
    held = {"SGD ×1": 10.2, "NGD ×1": 10.5, "NGD ×10": 15.0, "NGD ×100": 20.0, "SGD ×100": 10.0}
    failed = {"SGD ×1": 30.0, "NGD ×1": 20.5, "NGD ×10": 15.0, "NGD ×100": 8.0, "SGD ×100": 40.0}
    rows = switched_late(held, 9.5, 0.5)
    assert {verdict.verdict for verdict in judge(claims(rows))} == {HOLDS}
    assert {verdict.verdict for verdict in judge(claims(switched_late(failed, 9.5, 2.0)))} == {
        FAILS
    }
    moving = judge(claims(switched_late(held, 8.0, 0.5)))
    assert {("λ̂" in found.claim and not found.own, found.verdict) for found in moving} == {
        (True, UNTESTED),
        (False, HOLDS),
    }
    assert "λ̂ changed by more than 10% before the split in 5 of 5" in moving[0].evidence
    fine = {True: "NOT_MIXED", False: "CONVERGED"}
    spoilt = Rows({**row, "llc_status": fine[row["branch"] == "NGD ×10"]} for row in rows)
    found = [verdict.claim for verdict in judge(claims(spoilt)) if verdict.verdict == UNTESTED]
    assert found == ["λ̂ of NGD at 10 times the rate is above that of NGD ×1, nβ = n/ln n"]


def test_the_late_split_is_the_end_of_sgd_and_shares_its_end_at_equal_loss():
    experiment = published.find("ngd-switch-late")
    cell = {**experiment.grid("smoke")[0], "points": 1}
    rows = Rows(experiment.run(cell, "cpu"))
    before, split = rows[0], rows[1]
    assert (before["at"], split["at"]) == ("before", "split")
    assert before["epoch"] == pytest.approx(-0.25 * cell["approach"] - cell["before"], abs=1)
    assert split["loss"] < before["loss"]
    highest = max(
        rows.where(part=cell["points"], branch=["SGD ×100", "NGD ×100"]),
        key=lambda row: row["loss"],
    )
    equal = rows.where(at="equal loss", branch=highest["branch"])[0]
    assert {key: highest[key] for key in equal if key != "at"} == {
        key: equal[key] for key in equal if key != "at"
    }
    assert set(equal) == set(rows.where(at="equal loss")[0])


NAMES = ("llc", "llc_batch", "trace", "wbic", "g_n")


@pytest.mark.parametrize("sign", [1, -1])
def test_overfitting(sign):
    """Quantities that go as the validation loss to the power ±2 once it rises, and at random
    before.
    """

    def course(optimizer, part):
        loss = 1.0 + 0.1 * abs(part - 3)
        return {
            "loss": 0.1,
            "validation_loss": loss,
            **dict.fromkeys(NAMES, loss ** (2.0 * sign) if part >= 3 else 50.0),
        }

    rows = on_the_way(course, 8)
    found = published.find("ngd-overfitting").claims(rows)
    assert [claim.reading.value for claim in found] == pytest.approx([2.0 * sign] * len(found))
    assert {verdict.verdict for verdict in judge(found)} == {HOLDS if sign > 0 else FAILS}
    # WBIC of SGD, and G_n
    assert [claim.own for claim in found] == [False] * 6 + [True, False, True, True]
    # some of these epochs once more, and others between, from a cell of NGD alone
    halves = [
        {**row, "epoch": row["part"] / 2}
        for row in on_the_way(lambda optimizer, part: course(optimizer, part / 2), 16)
        if row["optimizer"] == "ngd"
    ]
    again = published.find("ngd-overfitting").claims(Rows([*halves, *rows]))
    assert [claim.reading.value for claim in again] == pytest.approx([2.0 * sign] * len(found))


def test_without_overfitting_nothing_is_said():
    def course(optimizer, part):
        return {"loss": 0.1, "validation_loss": 1 / part, **dict.fromkeys(NAMES, float(part))}

    found = judge(published.find("ngd-overfitting").claims(on_the_way(course, 6)))
    assert {verdict.verdict for verdict in found} == {UNTESTED}


@pytest.mark.parametrize(("last", "verdict"), [(5, UNTESTED), (6, HOLDS)])
def test_points_that_interpolate_do_not_count_as_overfitting(last, verdict):
    """Validation loss rises from part 3 on; the measures rise with it up to ``last``, then fall
    with training loss.
    """

    def course(optimizer, part):
        value = float(part) if part <= last else 1e-3
        return {
            "loss": 0.1 if part <= last else 1e-3,
            "validation_loss": 1.0 + 0.1 * abs(part - 3),
        } | dict.fromkeys(NAMES, value)

    claims = published.find("ngd-overfitting").claims(on_the_way(course, 12))
    assert {found.verdict for found in judge(claims)} == {verdict}
    assert all(("interpolates" in claim.unmet) == (verdict == UNTESTED) for claim in claims)


def test_wbic_is_set_against_bic():
    """BIC = n·L + (d/2)·ln n with d of the network: 784·64 + 64 + 640 + 10."""
    rows = [
        row | {"training": 1000, "loss": 0.5, "wbic": 600.0 + row["seed"]}
        for row in pairs(GAPS, "end")
    ]
    assert bic(rows[0]) == pytest.approx(500 + 50890 / 2 * math.log(1000))
    assert dimension({"network": "lenet5", "layers": 0, "width": 0, "data": "mnist"}) == 61706
    claims = criterion_claims(Rows(rows), "here")
    assert [found.verdict for found in judge(claims)] == [HOLDS, HOLDS]
    above = [row | {"wbic": 1e6 + row["seed"]} for row in rows]
    assert [found.verdict for found in judge(criterion_claims(Rows(above), "here"))] == [
        FAILS,
        FAILS,
    ]


def test_forms_with_the_rule_are_judged_where_they_were_measured():
    gaps = GAPS | {"llc_rule": 5.0, "llc_batch_rule": -5.0, "wbic": 5.0}
    rows = pairs(gaps, "end", training=1000, loss=0.5)
    found = {
        verdict.claim: verdict for verdict in judge(published.find("ngd-vs-sgd").claims(Rows(rows)))
    }
    ends = {
        claim.split("at the end, ")[1]: verdict
        for claim, verdict in found.items()
        if "at the end, " in claim
    }
    assert ends["λ̂ at nβ = n/ln n, γ by the rule"].verdict == HOLDS
    assert ends["λ̂ at nβ = B/ln B, γ by the rule"].verdict == FAILS
    assert (ends["WBIC"].verdict, ends["WBIC"].own) == (HOLDS, True)


def test_a_cell_is_a_function_of_its_settings():
    experiment = published.find("ngd-epochs")
    cell = {**experiment.grid("smoke")[0], "epochs": 2, "points": 1}
    assert experiment.run(cell, "cpu") == experiment.run(cell, "cpu")


def test_the_demonstration_can_start_at_another_seed():
    experiment = with_seeds(published.find("ngd-digits"), 7)
    assert [cell["seed"] for cell in experiment.grid(DEMO_SCALE)] == [7, 8, 9, 10]


@pytest.mark.parametrize("net", [("ffnn", 1, 6), ("lenet5", 0, 0)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_runs_trained_together_are_those_trained_alone(optimizer, net, tmp_path):
    """Two seeds at two rates, α and ε, stacked: the same points, losses and update norms as one
    by one.
    """
    setting = TINY | {"epochs": 4}
    cells = run_cells(setting, [net], 2)
    changed = [("rate", (0.05, 0.02)), ("alpha", (0.1, 1.0)), ("epsilon", (1e-10, 1e-2))]
    members = [
        StackedRun(
            cell, stage="s", changes=tuple((name, values[index]) for name, values in changed)
        )
        for index, cell in enumerate(cells)
    ]
    train_together(members, optimizer, "cpu", tmp_path, (2, 4))
    for member in members:
        subject = subject_of(member.cell, "cpu")
        start = subject.problem.vector.clone()
        alone = train_run(subject, optimizer, start, "s", **dict(member.changes))
        with kept_in(tmp_path):
            kept, short = (
                train_run(subject, optimizer, start, "s", **dict(member.changes), epochs=k)
                for k in (4, 2)
            )
        assert (kept.end.epoch, short.end.epoch, kept.points[0].epoch) == (4, 2, 0)
        assert torch.equal(kept.points[0].vector, start)
        moved = (alone.end.vector - start).norm()
        assert (kept.end.vector - alone.end.vector).norm() < 1e-3 * moved
        assert kept.end.loss == pytest.approx(alone.end.loss, rel=1e-4)
        assert kept.update_norms == pytest.approx(alone.update_norms, rel=1e-3)
        assert len(short.update_norms) == 2
        assert not kept.diverged
        with kept_in(tmp_path), pytest.raises(FileNotFoundError, match="train it first"):
            train_run(subject, optimizer, start, "another", **dict(member.changes))


def test_a_stage_can_follow_another_together(tmp_path):
    cells = run_cells(TINY | {"epochs": 2}, [("ffnn", 1, 6)], 2)
    firsts = train_together([StackedRun(cell) for cell in cells], "sgd", "cpu", tmp_path, (2,))
    after = [
        StackedRun(cell, first.end.vector, "after")
        for cell, first in zip(cells, firsts, strict=True)
    ]
    train_together(after, "ngd", "cpu", tmp_path, (2,))
    subject = subject_of(cells[1], "cpu")
    with kept_in(tmp_path):
        first = train_run(subject, "sgd")
        second = train_run(subject, "ngd", first.end.vector, "after")
    assert torch.equal(second.points[0].vector, first.end.vector)
    assert second.end.loss < first.end.loss


def test_a_kept_run_knows_its_data_and_its_damage(tmp_path, monkeypatch):
    (cell,) = run_cells(TINY | {"epochs": 2}, [("ffnn", 1, 6)], 1)
    train_together([StackedRun(cell)], "sgd", "cpu", tmp_path, (2,))
    subject, (path,) = subject_of(cell, "cpu"), tmp_path.iterdir()
    blob = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(ngd_stacks, "data_digest", lambda name: "f" * 32)
        with (
            kept_in(tmp_path),
            pytest.raises(ValueError, match="must be a run on digits as it is now, ffff"),
        ):
            train_run(subject, "sgd")
        with pytest.warns(RuntimeWarning, match="it is trained again"):
            assert upto(StackedRun(cell), "sgd", tmp_path) == 0
    assert upto(StackedRun(cell), "sgd", tmp_path) == 2
    named = []
    for place in range(0, len(blob), len(blob) // 60):
        path.write_bytes(blob[:place] + bytes([blob[place] ^ 8]) + blob[place + 1 :])
        with kept_in(tmp_path):
            try:
                found = train_run(subject, "sgd")
            except Damaged as error:
                named.append(path.name in str(error))
            else:  # in what zip files have between their parts
                path.write_bytes(blob)
                assert torch.equal(found.end.vector, train_run(subject, "sgd").end.vector)
    assert len(named) > 30
    assert all(named)
    record = torch.load(io.BytesIO(blob), weights_only=True)
    torch.save(
        {name: value for name, value in record.items() if name not in ("data", "digest")}, path
    )
    assert upto(StackedRun(cell), "sgd", tmp_path) == 2  # as early versions wrote it


def test_runs_that_cells_share_are_trained_once(monkeypatch):
    """benchmarks/ngd_cells.py: SGD of a seed serves three experiments, and a chain of stages is
    one training.
    """
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    script = importlib.import_module("ngd_cells")
    specs = (
        "ngd-vs-sgd:data=mnist network=ffnn",
        "ngd-epochs:data=mnist",
        "ngd-smoothing",
        "ngd-switch-late",
    )
    works = [work for spec in specs for work in script.works(spec, tiny=False)]
    jobs = script.trainings(works)
    assert [(job.chain or job.optimizer, len(job.members)) for job in jobs] == [
        ("sgd", 10),
        ("ngd", 10),  # ten seeds, which the others share
        ("sgd", 5),
        ("ngd", 40),  # another network: five α, and three more ε, in one stack
        ("ngd-switch-late", 5),
    ]
    first = {work.name: work.needs for work in reversed(works)}
    assert first["ngd-epochs"] == first["ngd-vs-sgd"] == [(0, 60), (1, 60)]
    assert first["ngd-smoothing"] == [(2, 60), *[(3, 60)] * 5]
    assert first["ngd-switch-late"] == [(4, 1)]
