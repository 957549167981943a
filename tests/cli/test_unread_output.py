"""``lambdahat … | head -1``, or onto a full disk: output that cannot be written ends a command
without a traceback.
"""

import os
import subprocess
import sys

import pytest
import typer

from lambdahat.cli.exits import BAD_INPUT, FAILED, UNREAD, exit_codes

FACTORY = """
import torch
from lambdahat.problem import Problem

def make_problem():
    rows = torch.arange(1.0, 21.0, dtype=torch.float64)[:, None]
    start = {"theta": torch.ones(1, dtype=torch.float64)}
    return Problem.from_function(lambda p, x: (x @ p["theta"]).square().mean(), start, rows)
"""
COMMANDS = {  # before it writes into a pipe Python keeps 8,192 bytes
    "less than a buffer, met at the end": (
        "advise",
        "problems:make_problem",
        "--batch-size",
        "4",
        "--json",
    ),
    "more, met while it prints": ("reproduce", "--list"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_reader_that_has_gone_is_no_error(name, tmp_path):
    (tmp_path / "problems.py").write_text(FACTORY)
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "lambdahat", *COMMANDS[name]]
    done = subprocess.run(
        command, cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, timeout=100, check=False
    )
    os.close(writer)
    assert done.stderr.decode() == ""
    assert done.returncode == UNREAD


def test_another_pipe_that_breaks_is_an_error(capsys):
    with pytest.raises(typer.Exit) as ended, exit_codes():
        raise BrokenPipeError("a worker's")
    assert ended.value.exit_code == FAILED
    assert "BrokenPipeError: a worker's" in capsys.readouterr().err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_behind_standard_output_is_one_line(name, tmp_path):
    (tmp_path / "problems.py").write_text(FACTORY)
    command = [sys.executable, "-m", "lambdahat", *COMMANDS[name]]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, timeout=100, check=False
        )
    assert (
        done.stderr.decode()
        == "error: standard output cannot be written to (No space left on device)\n"
    )
    assert done.returncode == BAD_INPUT
