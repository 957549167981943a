"""Output that cannot be written is refused before any work; what other code prints never spoils
standard output.
"""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lambdahat.cli.app import app

# what else is wrong with each command is found only after --out was looked at
COMMANDS = {
    "measure": ["measure", "nowhere:nothing"],
    "landscape": ["landscape", "nowhere:nothing"],
    "advise": ["advise", "nowhere:nothing"],
    "train": ["train", "--model", "nothing", "--data", "nothing"],
    "verify": ["verify", "--case", "nothing"],
    "reproduce": ["reproduce", "nothing"],
    "bench": ["bench", "--device", "nothing"],
    "report": ["report", "nowhere"],
    "demo": ["demo"],
    "graph spectrum": ["graph", "spectrum", "nowhere.txt"],
    "graph clusters": ["graph", "clusters", "nowhere.txt"],
    "graph compare": ["graph", "compare", "nowhere.txt"],
    "graph fit": ["graph", "fit", "nowhere.txt"],
    "data fetch": ["data", "fetch", "mnist"],
}
PLACES = {
    "a file": "taken",
    "below a file": "taken/inside",
    "too long": "x" * 300,
    "no text": "\udcff",
    "a null byte": "a\0b",
    "no folder of ours": "/proc/lambdahat/out",
    "empty": "",
}


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def require_one_line(result, option):
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith(f"error: {option} must be a")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("taken").write_text("precious")
    yield tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    assert Path("taken").read_text() == "precious"


# a page may take the place of a file
PAIRS = [
    (command, place)
    for command in COMMANDS
    for place in PLACES
    if (command, place) != ("report", "a file")
]


@pytest.mark.parametrize(("command", "place"), PAIRS)
def test_a_place_that_cannot_be_written_is_refused_first(here, command, place):
    option = "--folder" if command == "data fetch" else "--out"
    found = run(*COMMANDS[command], option, PLACES[place])
    require_one_line(found, option)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_or_read_only_disk_is_refused_first(here, monkeypatch, command, number):
    def fail(handle):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    option = "--folder" if command == "data fetch" else "--out"
    found = run(*COMMANDS[command], option, "new/folder")
    require_one_line(found, option)
    assert os.strerror(number) in found.stderr


FACTORY = """
import atexit, os, sys
import torch
from lambdahat.problem import Problem

print("importing")
if "pytest" not in sys.modules:
    atexit.register(print, "ending")

class Loud(torch.nn.Linear):
    def forward(self, x):
        print("forward")
        return super().forward(x)

def loud():
    print("making")
    os.system("echo below Python")
    torch.manual_seed(0)
    return Problem(Loud(3, 2), "cross_entropy", (torch.randn(20, 3), torch.randint(2, (20,))))

class Leaving(torch.nn.Linear):
    def forward(self, x):
        sys.exit(0)

def leaving():
    sys.exit(0)
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "loud_factory.py").write_text(FACTORY)
    (tmp_path / "leaving_factory.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("loud_factory", "leaving_factory"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_what_a_factory_and_its_model_print_is_not_on_standard_output(project):
    command = [
        sys.executable,
        "-m",
        "lambdahat",
        "measure",
        "loud_factory:loud",
        "--what",
        "trace",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["results"][0]["quantity"] == "trace"
    for text in ("importing", "making", "below Python", "forward", "ending"):
        assert text in done.stderr


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (
            "loud_factory:leaving",
            r"FACTORY: loud_factory:leaving() raised SystemExit: 0 (loud_factory.py, line",
        ),
        ("leaving_factory:make_problem", "FACTORY: importing leaving_factory raised SystemExit: 0"),
    ],
)
def test_a_factory_that_exits_does_not_choose_the_exit_code(project, factory, message):
    found = run("measure", factory, "--json")
    assert found.exit_code == 4
    assert found.stdout == ""
    assert f"error: {message}" in found.stderr


def test_a_model_that_exits_while_it_is_measured_does_not_choose_the_exit_code(
    project, monkeypatch
):
    def leave(*arguments, **settings):
        sys.exit(0)

    monkeypatch.setattr("lambdahat.cli.measurements.measure", leave)
    found = run("measure", "loud_factory:loud", "--json")
    assert found.exit_code == 4
    assert "called sys.exit(0)" in found.stderr.splitlines()[-1]
