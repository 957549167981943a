"""``lambdahat verify``: its table, its files, its exit codes, and that it resumes."""

import json

import pytest
from typer.testing import CliRunner

from lambdahat.cli import verifications
from lambdahat.cli.app import app
from lambdahat.results import Estimate, LearningCoefficient, Status
from lambdahat.singular import verification
from lambdahat.singular.exact import quadratic_problem
from lambdahat.singular.known_cases import suite
from lambdahat.singular.verification import KnownCase, Verification


def call(*arguments):
    return CliRunner().invoke(app, ["verify", *(str(argument) for argument in arguments)])


def case(name, size, asymptotic=None):
    return KnownCase(
        name,
        lambda: quadratic_problem([1.0] * size, 100),
        lambda *_: Estimate(size / 2),
        asymptotic,
    )


@pytest.fixture(autouse=True)
def calls(monkeypatch, tmp_path):
    """Three cases and an ``llc`` that misses the last one; how many parameters it was asked
    about.
    """
    monkeypatch.chdir(tmp_path)
    seen = []

    def answer(problem, seed):
        size = problem.num_parameters
        seen.append(size)
        status = Status.NOT_MIXED if size == 2 else Status.CONVERGED
        return LearningCoefficient(
            size / 2 + 0.01 + (size == 3), 0.02, 1200, status, 15.0, nbeta=20.0, localization=1.0
        )

    cases = [case("plane-1", 1, 0.5), case("plane-2", 2), case("Bad-3", 3)]
    monkeypatch.setattr(verification, "llc", answer)
    monkeypatch.setattr(verifications, "suite", lambda quick: cases[:2] if quick else cases)
    return seen


def test_the_table_shows_estimate_truth_deviation_and_verdict():
    result = call("--quick")
    assert result.exit_code == 0, result.output
    header, _, first, second, headline, *_ = result.stdout.splitlines()
    assert header.split("  ")[0] == "case"
    assert first.split() == [
        "plane-1",
        "0.510",
        "±",
        "0.02",
        "20",
        "1",
        "0.5",
        "0.5",
        "+0.5,",
        "+2.0%",
        "1,200",
        "agrees",
    ]
    assert second.split()[-2:] == ["agrees", "[NOT_MIXED]"]
    assert (
        headline
        == "2 of 2 intervals contain the exact value; relative error 1.5% in the median, 2.0% at"
        " worst; none fail"
    )


def test_a_failing_case_is_named_and_exits_with_1():
    result = call()
    assert result.exit_code == 1
    assert result.stderr.strip() == "Bad-3: fails"
    assert "1 fails" in result.stdout


def test_everything_is_written(tmp_path):
    result = call("--quick", "--out", "run")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"cases", "verification.json", "verification.png", "table.txt", "table.md"}
    assert Verification.load(tmp_path / "run" / "verification.json").rows[0].case == "plane-1"
    assert (tmp_path / "run" / "table.txt").read_text().strip() in result.stdout
    assert result.stdout.strip().endswith("written to run")


def test_cases_are_chosen_by_glob(calls):
    assert call("--case", "bad*").exit_code == 1
    assert calls == [3]
    result = call("--case", "none")
    assert result.exit_code == 2
    assert (
        result.stderr.strip()
        == "error: --case must match a case, got 'none'; there are: plane-1; plane-2; Bad-3"
    )


def test_json_is_all_there_is_on_standard_output():
    document = json.loads(call("--json").stdout)
    assert [row["verdict"] for row in document["cases"]] == ["agrees", "agrees", "fails"]
    assert document["cases"][1]["asymptotic"] is None
    assert document["summary"]["failed"] == ["Bad-3"]


def test_quiet_prints_failures_only():
    assert call("--quick", "--quiet").output == ""
    assert call("--quiet").output.strip() == "Bad-3: fails"


def test_an_interrupted_run_resumes(calls, monkeypatch):
    known = verification.llc

    def interrupted(problem, seed):
        if problem.num_parameters == 2:
            raise KeyboardInterrupt
        return known(problem, seed)

    monkeypatch.setattr(verification, "llc", interrupted)
    result = call("--quick", "--out", "run")
    assert result.exit_code == 130
    assert result.stderr.strip() == "interrupted; finished cases are kept; the same command resumes"
    monkeypatch.setattr(verification, "llc", known)
    assert call("--quick", "--out", "run").exit_code == 0
    assert calls == [1, 2]
    result = call("--quick", "--out", "run", "--seed", 1)
    assert result.exit_code == 2
    assert "folder must hold cases of this run, with seed = 1" in result.stderr


def test_the_cases_of_the_suite_have_names_for_files():
    names = [verification._file_name(each.name) for each in suite()]
    assert len(set(names)) == len(names)
    assert {each.name for each in suite(quick=True)} < {each.name for each in suite()}
