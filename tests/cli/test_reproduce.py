"""``lambdahat reproduce`` and ``lambdahat report``: tables, files, the page, errors."""

import dataclasses
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lambdahat.cli.app import app
from lambdahat.experiments import published
from lambdahat.experiments.kit.store import Store
from tests.experiments.toys import Config, toy


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(autouse=True)
def one_experiment(monkeypatch, tmp_path):
    """A toy in place of the literature."""
    monkeypatch.chdir(tmp_path)
    use(monkeypatch, toy())


def use(monkeypatch, experiment):
    monkeypatch.setattr(published, "PLACES", {"toy": ("nowhere", "TOY")})
    monkeypatch.setattr(published, "find", lambda name: experiment)
    monkeypatch.setattr(published, "every", lambda: [experiment])


def test_tables_claims_and_assumptions_are_printed():
    result = call("reproduce", "toy", "--scale", "cpu")
    assert result.exit_code == 0, result.output
    assert "A toy (no paper, Table 1)" in result.stdout
    assert "the fast rate is above one" in result.stdout
    assert "holds" in result.stdout
    assert "Assumed where the text is silent:\n- nothing" in result.stdout
    assert "say nothing about the paper" not in result.stdout
    assert "All 8 cells have finished." in result.stdout
    assert Path("reproductions/toy-cpu.txt").read_text().startswith("All 8 cells have finished.\n")


def test_the_smoke_scale_says_what_it_is_worth():
    assert (
        "its verdicts say nothing about the paper"
        in call("reproduce", "toy", "--scale", "smoke").stdout
    )


def test_a_dry_run_forecasts_and_writes_nothing(tmp_path):
    result = call("reproduce", "toy", "--scale", "cpu", "--dry-run")
    assert result.exit_code == 0, result.output
    assert (
        "8 cells are left: about 0 minutes on cpu, one at a time; 8 of them could not be forecast"
        in result.stdout
    )
    [found] = json.loads(call("reproduce", "toy", "--scale", "cpu", "--dry-run", "--json").stdout)
    assert found["cells"] == 8
    assert [row["cells"] for row in found["settings"]] == [4, 4]
    assert not list(tmp_path.iterdir())
    call("reproduce", "toy", "--scale", "cpu")
    assert "no cells are left" in call("reproduce", "toy", "--scale", "cpu", "--dry-run").stdout


def test_rows_tables_and_page_are_written(tmp_path):
    result = call("reproduce", "toy", "--scale", "smoke", "--out", "run")
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "toy-smoke.sqlite",
        "toy-smoke.txt",
        "toy-smoke.md",
        "toy-smoke.progress.json",
        "report.html",
    }
    assert len(Store("run", "toy", "smoke").rows()) == 12
    assert "open run/report.html" in result.stdout
    assert "A toy" in (tmp_path / "run" / "report.html").read_text()


def test_a_second_run_resumes_and_a_fresh_one_does_not(monkeypatch):
    experiment, calls = toy(), []
    inner = experiment.run
    object.__setattr__(
        experiment, "run", lambda cell, device: calls.append(cell) or inner(cell, device)
    )
    use(monkeypatch, experiment)
    for options in ([], [], ["--resume"], ["--fresh"]):
        assert call("reproduce", "toy", "--scale", "smoke", "--quiet", *options).exit_code == 0
    assert len(calls) == 8


def test_json_is_all_there_is_on_standard_output():
    (document,) = json.loads(call("reproduce", "--all", "--scale", "smoke", "--json").stdout)
    assert (document["experiment"], document["scale"]) == ("toy", "smoke")
    assert document["claims"][0]["claim"] == "the fast rate is above one"
    assert document["tables"][0]["rows"][0]["rate"] == "0.5"
    assert document["about"]["torch"]
    assert document["cells"] == {"finished": 4, "all": 4}


def test_quiet_prints_nothing():
    assert call("reproduce", "toy", "--scale", "smoke", "--quiet").output == ""


def test_the_list_has_a_table_for_each_paper_and_counts_cells(monkeypatch):
    other = dataclasses.replace(toy(), name="another", paper="A second paper", part="§2")
    monkeypatch.setattr(published, "every", lambda: [toy(), other])
    monkeypatch.setattr(published, "PAPER_SCALE", {"another"})
    lines = [" ".join(line.split()) for line in call("reproduce", "--list").stdout.splitlines()]
    assert "toy 4 8 16 A toy (Table 1)" in lines
    assert (
        lines.index("no paper")
        < lines.index("A second paper")
        < lines.index("another 4 8 16 * A toy (§2)")
    )


def test_a_cell_that_raises_is_said_and_the_rest_is_kept(monkeypatch):
    use(monkeypatch, toy(smoke=Config(2, broken=1)))
    result = call("reproduce", "toy", "--scale", "smoke")
    assert result.exit_code == 1
    assert "RuntimeError: this cell is broken" in result.stderr
    assert "2 cells raised" in result.stderr
    assert len(Store("reproductions", "toy", "smoke").rows()) == 6


def choosy():
    """A toy whose claims need both rates."""

    def claims(rows):
        return (
            toy().claims(rows) if min(len(rows.where(rate=rate)) for rate in (0.5, 2.0)) else [][0]
        )

    return dataclasses.replace(toy(), claims=claims)


def test_cells_too_few_for_the_claims_are_counted(monkeypatch):
    use(monkeypatch, choosy())
    result = call("reproduce", "toy", "--scale", "smoke", "--only", "seed=1 rate=2", "--out", "run")
    expected = "1 of 4 cells have finished; the claims need some of the others."
    assert (result.exit_code, result.stderr.strip()) == (0, f"toy: {expected}")
    assert expected in result.stdout
    assert "Values" in result.stdout
    assert "Claims" not in result.stdout
    for name in ("report.html", "toy-smoke.txt"):
        assert expected in Path("run", name).read_text()
    assert call("report", "run").exit_code == 0
    assert "All 4 cells" in call("reproduce", "toy", "--scale", "smoke", "--out", "run").stdout


def test_claims_that_all_cells_do_not_suffice_for_are_an_error_inside(monkeypatch):
    use(monkeypatch, dataclasses.replace(toy(), claims=lambda rows: [][0]))
    result = call("reproduce", "toy", "--scale", "smoke")
    assert result.exit_code == 3
    assert "toy: The claims could not be made from these rows: IndexError" in result.stderr


def test_a_broken_store_is_one_line():
    call("reproduce", "toy", "--scale", "smoke", "--out", "run", "--quiet")
    Path("run/toy-smoke.sqlite").write_bytes(b"no database, but long enough " * 50)
    for command in (["reproduce", "toy", "--scale", "smoke", "--out", "run"], ["report", "run"]):
        result = call(*command)
        assert result.exit_code == 2
        assert result.stderr.startswith(
            "error: run/toy-smoke.sqlite must be a whole store that can be opened, got: file"
        )
    assert call("reproduce", "toy", "--scale", "smoke", "--out", "run", "--fresh").exit_code == 0


def test_a_device_that_is_not_there_is_one_line(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = call("reproduce", "toy", "--scale", "smoke", "--device", "cuda", "--out", "run")
    assert result.exit_code == 2
    assert result.stderr.startswith(
        "error: device must be one that is there, got 'cuda', and torch sees 0 CUDA devices"
    )
    assert not Path("run").exists()


def test_report_builds_the_page_from_the_store_alone(tmp_path, monkeypatch):
    experiment = toy()
    use(monkeypatch, experiment)
    call("reproduce", "toy", "--scale", "smoke", "--out", "run", "--quiet")
    object.__setattr__(experiment, "run", lambda cell, device: pytest.fail("nothing is to be run"))
    result = call("report", "run", "--out", "page.html")
    assert result.exit_code == 0, result.output
    assert "The fast rate is above one" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["reproduce", "tooy"],
            "EXPERIMENT must be one of 'toy', got 'tooy'; did you mean 'toy'?; --list describes",
        ),
        (
            ["reproduce", "mnist"],
            "EXPERIMENT must be one of 'toy', got 'mnist'; --list describes them",
        ),
        (["reproduce"], "EXPERIMENTS must be some names or --all, got none; --list describes them"),
        (
            ["reproduce", "toy", "--all"],
            "EXPERIMENTS must be some names or --all, got both; --list describes them",
        ),
        (
            ["reproduce", "toy", "--scale", "big"],
            "scale must be one of 'smoke', 'cpu', 'paper', got 'big'",
        ),
        (
            ["reproduce", "toy", "--only", "x=1"],
            "only must match a cell, got 'x=1'; cells differ in rate=",
        ),
        (
            ["reproduce", "toy", "--scale", "smoke", "--out", "file"],
            "--out must be a folder that can be written to, got 'file' (it is a file)",
        ),
        (
            ["report", ".", "--out", "."],
            "--out must be a file that can be written to, got '.' (it is a folder)",
        ),
        (
            ["report", "nowhere"],
            "FOLDERS must be folders with stored rows or results, got 'nowhere'",
        ),
    ],
)
def test_misuse_is_one_line(arguments, message):
    Path("file").touch()
    result = call(*arguments)
    assert result.exit_code == 2
    assert result.stderr.strip().startswith(f"error: {message}")
