"""Every command in the README and the documentation runs as written, on less where it would take
minutes.

What is not run is in ``NOT_RUN``, with the reason. What stands in the running text is parsed: its
command, options and names are there.
"""

import gzip
import io
import re
import runpy
import shlex
import subprocess
import sys
from glob import glob
from pathlib import Path

import networkx as nx
import pytest
import scipy
import typer
from typer.testing import CliRunner

from lambdahat.cli import exits, reproduce
from lambdahat.cli.app import app
from lambdahat.experiments.published import PLACES
from tests.documents import (
    DOCS,
    PAGES,
    ROOT,
    assert_alike,
    commands,
    empty_folder,
    inline_commands,
    write_files,
)

# by how a line begins
NOT_RUN = {
    "lambdahat data fetch": "needs the network; tests/cli/test_datasets.py fetches from a folder",
    "python benchmarks/device_cells.py run": "takes minutes on a GPU",
    "python benchmarks/device_cells.py fold": "takes what the command before it wrote",
    "python benchmarks/minibatch_eigenvalues.py --device cuda": "takes minutes on a GPU",
    "python benchmarks/minibatch_eigenvalues.py --conclude": (
        "takes what the command before it wrote"
    ),
    "python benchmarks/minibatch_store.py": "takes what the command before it wrote",
}
# what a command becomes under a note ``smaller``
SMALLER = (
    ("--scale cpu", "--scale smoke"),
    ("lambdahat verify --quick", "lambdahat verify --quick --case quadratic-d5-k1e4"),
)
SLOW = {"minibatch-rates.md", "minibatch-results.md"}  # four experiments at the scale smoke
# Left to `make docs-check`: tests/cli run the same commands.
LONG = {"many-processes.md", "batch-and-step.md", "command-line.md"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LAMBDAHAT_DATA", str(tmp_path / "no-data"))
    monkeypatch.setattr(reproduce, "DEMO_SCALE", "smoke")
    with empty_folder(tmp_path, monkeypatch):
        yield tmp_path


def not_run(line):
    return any(line.startswith(start) for start in NOT_RUN)


def shell(line):
    """One line of a console, its globs expanded: the exit code and what it prints."""
    program, *words = shlex.split(line, comments=True)
    words = [name for word in words for name in (sorted(glob(word)) if "*" in word else [word])]
    if program == "python":
        runpy.run_path(words[0], run_name="__main__")
        return 0, ""
    if program == "torchrun":
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words]
        done = subprocess.run(launch, capture_output=True, text=True, timeout=120, check=False)
        return done.returncode, done.stderr if done.returncode else done.stdout
    assert program == "lambdahat", line
    result = CliRunner().invoke(app, words)
    # a command that takes long says so on standard error
    return result.exit_code, result.stdout if result.exit_code == 0 else result.output


def smaller(line):
    for part, less in SMALLER:
        line = line.replace(part, less)
    return line


def write_graphs(folder):
    """Small graphs under the names that graphs.md uses."""
    cliques, tree = (
        nx.disjoint_union_all([nx.complete_graph(6)] * 4),
        nx.barabasi_albert_graph(60, 2, seed=0),
    )

    def edges(graph, name, delimiter=" "):
        text = io.BytesIO()
        nx.write_edgelist(graph, text, data=False, delimiter=delimiter)
        body = text.getvalue()
        (folder / name).write_bytes(gzip.compress(body) if name.endswith(".gz") else body)

    for name in ("email.txt.gz", "ca-GrQc.txt.gz", "ca-HepTh.txt.gz"):
        edges(cliques, name)
    edges(tree, "web.csv", ",")
    edges(tree, "social.txt")
    nx.write_gml(cliques, folder / "netscience.gml")
    road = io.BytesIO()
    scipy.io.mmwrite(road, nx.to_scipy_sparse_array(nx.grid_2d_graph(5, 8)), symmetry="symmetric")
    (folder / "road.mtx.gz").write_bytes(gzip.compress(road.getvalue()))


WITH_COMMANDS = [
    pytest.param(
        page,
        id=page.name,
        marks=[pytest.mark.slow] * (page.name in SLOW)
        + [pytest.mark.documents] * (page.name in LONG),
    )
    for page in PAGES
    if any(commands(page))
]


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_commands_run_and_print_what_is_shown(page, folder):
    write_files(page, folder)
    write_graphs(folder)
    code = 0
    for line, shown, note in commands(page):
        if line == "echo $?":
            assert code == int(shown)
            continue
        if not_run(line):
            continue
        less = note.startswith("smaller: ")
        code, printed = shell(smaller(line) if less else line)
        assert code == (exits.BAD_INPUT if shown.startswith("error: ") else exits.OK), (
            f"{line}\n{printed}"
        )
        if shown and not less and not note.startswith("output varies: "):
            assert_alike(shown, printed)


def test_the_deep_curvature_suite_has_its_commands(folder):
    write_files(DOCS / "command-line.md", folder)
    runpy.run_path("digits.py", run_name="__main__")
    page = (
        (DOCS / "command-line.md")
        .read_text(encoding="utf-8")
        .split("## The Deep Curvature Suite")[1]
    )
    right = " ".join(re.findall(r"^\| .* \| (.*) \|$", page, re.MULTILINE))
    calls = [
        call
        for call in re.findall(r"`(.*?)`", right)
        if call.startswith(("--", "lambdahat")) and call != "--out"
    ]
    assert len(calls) >= 8
    for number, call in enumerate(calls):
        whole = (
            call if call.startswith("lambdahat") else f"lambdahat measure F --checkpoint C {call}"
        )
        places = {
            "F": "digits:make_problem",
            "C": "digits.safetensors",
            "G": "digits:held_out",
            "DIR": f"out{number}",
        }
        if "--what" not in whole and "measure" in whole:
            whole += " --what trace"
        code, printed = shell(" ".join(places.get(word, word) for word in whole.split()))
        assert code == exits.OK, f"{whole}\n{printed}"


def parsed(command, words):
    """The click context of a command, parsed and not run; None for a group or a command alone."""
    context = command.make_context("lambdahat", [], resilient_parsing=True)
    while words and hasattr(command, "commands"):
        name, *words = words
        assert name in command.commands or name.startswith("-"), (
            f"{name} is no command of {command.name}"
        )
        if name.startswith("-"):
            return None
        command = command.commands[name]
    return (
        command.make_context(command.name, words, parent=context)
        if words and "--help" not in words
        else None
    )


def all_lines():
    for page in PAGES:
        yield from ((page.name, line) for line, _, _ in commands(page) if line != "echo $?")
        yield from ((page.name, line) for line in inline_commands(page))


def test_commands_in_the_text_are_there():
    seen, whole = 0, typer.main.get_command(app)
    for page, line in all_lines():
        program, *words = shlex.split(line)
        if program == "lambdahat" and words[-1:] != ["--model"]:  # an option by itself
            context = parsed(whole, words)
            names = context.params.get("experiments") or () if context else ()
            assert set(names) <= {*PLACES, "NAME"}, f"{page}: {line}"
            seen += 1
        elif program == "make":
            assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), (
                f"{page}: {line}"
            )
    assert seen > 60


def source_of(script):
    """The text of a script and of the scripts beside it that it imports."""
    text = script.read_text(encoding="utf-8")
    beside = {
        script.with_name(f"{name}.py")
        for name in re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE)
    }
    return text + "".join(
        path.read_text(encoding="utf-8") for path in sorted(beside) if path.is_file()
    )


def test_scripts_in_the_text_are_there_with_their_options():
    seen = 0
    for page, line in all_lines():
        program, *words = shlex.split(line)
        if program == "python" and words[0].startswith(("benchmarks/", "docs/")):
            assert (ROOT / words[0]).is_file(), f"{page}: {line}"
            options = [word for word in words if word.startswith("--")]
            text = source_of(ROOT / words[0])
            assert all(f'"{option}"' in text for option in options), f"{page}: {line}"
            seen += 1
    assert seen > 15


def test_what_is_not_run_is_still_in_the_documentation():
    lines = [line for page in PAGES for line, _, _ in commands(page)]
    for start in NOT_RUN:
        assert any(line.startswith(start) for line in lines), start
    for part, _ in SMALLER:
        assert any(part in line for line in lines), part
    assert all(any(commands(DOCS / name)) for name in SLOW | LONG)


def test_make_targets_of_the_readme_are_run_in_a_fresh_clone():
    shown = re.findall(
        r"^make (\w+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert shown == ["demo", "test"]
    assert "make test" in Path(ROOT / ".ci" / "run").read_text()
