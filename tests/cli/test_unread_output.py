"""``lambdahat … | head -1``, or onto a full disk: output that cannot be written ends a command
without a traceback.
"""

import json
import os
import subprocess
import sys

import pytest
import typer

from lambdahat.cli import exits
from lambdahat.cli.exits import BAD_INPUT, FAILED, UNREAD

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


# Forks one process for each command and place to write to, and says how they ended: the package is
# imported once.
STARTER = """
import gc, json, os, sys
import lambdahat.cli.app
from lambdahat.experiments.published import every
every()  # imported here, once
gc.collect()
gc.freeze()  # what is imported need not be searched, and copied, in every process

reader, writer = os.pipe()
os.close(reader)
places = {"a reader that has gone": writer}
if os.path.exists("/dev/full"):
    places["a full disk"] = os.open("/dev/full", os.O_WRONLY)
found = []
for place, out in places.items():
    for name, words in json.loads(sys.argv[1]).items():
        child = os.fork()
        if not child:
            os.dup2(out, 1)
            os.dup2(os.open("errors", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            sys.argv = ["lambdahat", *words]
            sys.exit(lambdahat.cli.main())
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found.append([place, name, code, open("errors").read()])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """(exit code, standard error) of every command at every place."""
    folder = tmp_path_factory.mktemp("unread")
    (folder / "problems.py").write_text(FACTORY)
    done = subprocess.run(
        [sys.executable, "-c", STARTER, json.dumps(COMMANDS)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return {(place, name): (code, text) for place, name, code, text in json.loads(done.stdout)}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_reader_that_has_gone_is_no_error(name, ends):
    assert ends["a reader that has gone", name] == (UNREAD, "")


def test_another_pipe_that_breaks_is_an_error(capsys):
    inside = compile('raise BrokenPipeError("a worker\'s")', exits.__file__, "exec")
    with pytest.raises(typer.Exit) as ended, exits.exit_codes():
        exec(inside)
    assert ended.value.exit_code == FAILED
    assert "BrokenPipeError: a worker's" in capsys.readouterr().err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_behind_standard_output_is_one_line(name, ends):
    assert ends["a full disk", name] == (
        BAD_INPUT,
        "error: standard output cannot be written to (No space left on device)\n",
    )
