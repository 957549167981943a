"""``verify``: verdicts that can fail, kept case by case and resumed."""

import dataclasses
import math

import pytest

from lambdahat.results import Estimate, LearningCoefficient, Result, Status
from lambdahat.singular import verification
from lambdahat.singular.exact import (
    crossing_expectation,
    crossing_problem,
    quadratic,
    quadratic_problem,
)
from lambdahat.singular.verification import CheckedCase, KnownCase, Verification, compare, verify

QUADRATIC = KnownCase(
    "quadratic, condition 10",
    lambda: quadratic_problem([1.0, 10.0], 1000),
    lambda nbeta, localization: Estimate(quadratic([1.0, 10.0], nbeta, localization)),
    1.0,
)
CROSSING = KnownCase(
    "crossing w⁴",
    lambda: crossing_problem([2], 1000),
    lambda nbeta, localization: Estimate(crossing_expectation([2], nbeta, localization)),
)
CASES = [QUADRATIC, CROSSING]
NBETA = 1000 / math.log(1000)


@pytest.fixture
def calls(monkeypatch):
    """An ``llc`` that knows the answers, to 1 %, and the seeds it was called with."""
    seen = []

    def answer(problem, seed):
        seen.append((problem.num_parameters, seed))
        value = 0.99 if problem.num_parameters == 2 else 0.26
        return LearningCoefficient(value, 0.02, 500, dof=15.0, nbeta=NBETA, localization=2.0)

    monkeypatch.setattr(verification, "llc", answer)
    return seen


def a_row(value=1.0, stderr=0.05, truth=1.0, truth_stderr=0.0, dof=math.inf):
    return CheckedCase(
        "case",
        Estimate(value, stderr, dof=dof),
        Estimate(truth, truth_stderr),
        1.0,
        1.0,
        1.0,
        0.0,
        0,
    )


def test_the_truth_is_that_of_the_same_temperature_and_localization(calls):
    first, second = verify(CASES).rows
    assert float(first.truth) == pytest.approx(quadratic([1.0, 10.0], NBETA, 2.0))
    assert float(second.truth) == pytest.approx(crossing_expectation([2], NBETA, 2.0))
    assert (first.nbeta, first.localization) == (NBETA, 2.0)
    assert (first.asymptotic, math.isnan(second.asymptotic)) == (1.0, True)
    assert (first.estimate.cost, first.estimate.dof) == (500, 15.0)
    assert len(calls) == 2


def test_a_case_has_the_same_seed_whatever_runs_beside_it(calls):
    verify(CASES, seed=3)
    verify(CASES[::-1], seed=3)
    verify(CASES, seed=4)
    assert calls[:2] == calls[3:1:-1]
    assert len({seed for _, seed in calls}) == 4


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        (a_row(1.09), "agrees"),
        (a_row(1.11), "near"),  # beyond 1.96 standard errors
        (a_row(1.11, truth_stderr=0.05), "agrees"),  # the truth has an error too
        (a_row(1.11, dof=5.0), "agrees"),  # Student's t
        (a_row(1.14, 0.04), "fails"),  # beyond 3.29 standard errors
        (a_row(1.2, 0.5), "fails"),  # an interval so wide that it says nothing
        (a_row(0.8, 0.5), "fails"),
        (a_row(math.nan, math.nan), "fails"),
        (a_row(1.0, 0.0), "agrees"),
        (a_row(1.001, 0.0), "fails"),
        (a_row(0.0, 0.0, 0.0), "agrees"),
        (a_row(0.195, 0.016, 0.164), "agrees"),  # off by 19 % of a λ below 1
        (a_row(0.324, 0.5, 0.164), "fails"),
        (a_row(5.7, 0.5, 5.0), "agrees"),
        (a_row(5.8, 0.5, 5.0), "fails"),  # 0.8 is more than 15 % of a λ above 1
    ],
)
def test_verdicts(row, verdict):
    assert row.verdict == verdict


def test_the_summary_counts():
    rows = tuple(a_row(value) for value in (1.01, 0.98, 1.11, 1.3))
    found = Verification(rows, 0, False)
    assert found.median_error == pytest.approx(0.065)
    assert found.worst_error == pytest.approx(0.3)
    assert found.covered == 2
    assert found.failed == ("case",)
    assert len(found) == 4


def test_the_table_has_a_row_for_each_case(calls):
    table = verify(CASES).table()
    assert [row["case"] for row in table] == ["quadratic, condition 10", "crossing w⁴"]
    row = table[0]
    assert row["value"] == 0.99
    assert row["deviation"] == pytest.approx((0.99 - row["truth"]) / 0.02)
    assert row["relative_error"] == pytest.approx(0.99 / row["truth"] - 1)
    assert (row["gradients"], row["status"], row["verdict"]) == (500, "CONVERGED", "agrees")


def test_it_comes_back_from_disk(calls, tmp_path):
    found = verify(CASES, folder=tmp_path)
    stored = Result.load(tmp_path / "verification.json")
    assert [row.estimate for row in stored.rows] == [row.estimate for row in found.rows]
    assert stored.table()[0] == found.table()[0]
    assert (stored.seed, stored.quick) == (0, False)


def test_a_killed_run_resumes_with_the_cases_that_are_missing(calls, tmp_path):
    def killed():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify([QUADRATIC, dataclasses.replace(CROSSING, make=killed)], folder=tmp_path)
    assert not (tmp_path / "verification.json").exists()
    found = verify(CASES, folder=tmp_path)
    assert [parameters for parameters, _ in calls] == [2, 1]
    assert [row.case for row in found.rows] == [case.name for case in CASES]


def test_another_problem_of_the_same_name_and_a_damaged_case_are_run_again(calls, tmp_path):
    verify(CASES, folder=tmp_path)
    count = len(calls)
    verify(CASES, folder=tmp_path)
    assert len(calls) == count
    verify([dataclasses.replace(QUADRATIC, name=CROSSING.name)], folder=tmp_path)
    assert len(calls) == count + 1
    path = next((tmp_path / "cases").glob(f"{QUADRATIC.name.split()[0]}*.json"))
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))
    with pytest.warns(RuntimeWarning, match=r"\.json is damaged.*running .* again"):
        verify([QUADRATIC], folder=tmp_path)
    assert len(calls) == count + 2


def test_a_folder_of_another_seed_is_refused(calls, tmp_path):
    verify(CASES, folder=tmp_path)
    with pytest.raises(ValueError, match="folder must hold cases of this run, with seed = 1"):
        verify(CASES, seed=1, folder=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cases": []}, "cases must hold at least one case"),
        ({"cases": [QUADRATIC, QUADRATIC]}, "cases must have names that differ"),
        ({"cases": CASES, "seed": -1}, "seed must be an integer"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        verify(**arguments)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_llc_finds_the_truth(case):
    row = compare(case, seed=1)
    assert row.estimate.status is Status.CONVERGED
    assert row.verdict in ("agrees", "near")
    assert abs(row.relative_error) < 0.05
    assert row.seconds > 0
