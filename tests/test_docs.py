"""The documentation is true: its examples and commands run and print what it shows, its tables and figures are there.

Python blocks of a page run in their order, in one namespace, in an empty folder. A ``text`` block right after one is
what it prints; in ``console`` blocks that is what follows a ``$`` line. Text must agree, numbers to 20 %, and what
follows a ± is not compared. An HTML comment right above a block may say otherwise, and why:

- ``<!-- skip: why -->``: the block is not run;
- ``<!-- output varies: why -->``: it is run, and its output not compared;
- ``<!-- file: name -->``: the block is also written to that file, for later blocks to use.
"""

import contextlib
import importlib.util
import io
import math
import re
import runpy
import shlex
import sys
from itertools import zip_longest
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import lambdahat as lh
from lambdahat.cli import exits
from lambdahat.cli.app import app
from lambdahat.results import Status

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
BLOCK = re.compile(r"(?:^<!-- (?P<note>.*?) -->\n+)?^```(?P<kind>\w+)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"(± ?)?-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")


def preamble(page):
    """What a page takes for granted: the README a model and data of the reader's own."""
    if page.name != "README.md":
        return {}
    return {"model": lh.models.mlp([64, 8, 10]), "data": lh.data.digits()}


def blocks(page):
    """(kind, body, note, the text block that follows at once or None) for every block of a page."""
    text = page.read_text(encoding="utf-8")
    found = list(BLOCK.finditer(text))
    for block, after in zip_longest(found, found[1:]):
        near = after is not None and after["kind"] == "text" and not text[block.end() : after.start()].strip()
        yield block["kind"], block["body"], block["note"] or "", after["body"] if near else None


def skeleton(text):
    """The text without its numbers, with white space and rules of dashes made equal; and the numbers that count."""
    numbers = [float(m[0].replace(",", "")) for m in NUMBER.finditer(text) if not m[1]]
    return re.sub(r"-{2,}", "--", " ".join(NUMBER.sub("#", text).split())), numbers


def assert_alike(shown, printed):
    (words, numbers), (words_now, numbers_now) = skeleton(shown), skeleton(printed)
    assert words == words_now, printed
    for then, now in zip(numbers, numbers_now, strict=True):
        assert math.isclose(then, now, rel_tol=0.2, abs_tol=2e-5), f"{then} is now {now} in\n{printed}"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty current directory, a seeded generator, and modules that stay out of other tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield tmp_path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run_and_print_what_is_shown(page, folder):
    namespace = {"__name__": "documentation", **preamble(page)}
    for kind, body, note, shown in blocks(page):
        if kind != "python" or note.startswith("skip: "):
            continue
        if note.startswith("file: "):
            (folder / note.removeprefix("file: ")).write_text(body, encoding="utf-8")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(body, page.name, "exec"), namespace)
        if shown is not None and not note.startswith("output varies: "):
            assert_alike(shown, printed.getvalue())


def shell(line):
    """One line of a console: its exit code and what it prints."""
    program, *arguments = shlex.split(line)
    if program == "python":
        runpy.run_path(arguments[0], run_name="__main__")
        return 0, ""
    assert program == "lambdahat", line
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output


@pytest.fixture
def digits(folder):
    """The page's own module ``digits``, trained."""
    (body,) = [b for kind, b, note, _ in blocks(DOCS / "command-line.md") if note == "file: digits.py"]
    (folder / "digits.py").write_text(body, encoding="utf-8")


def test_commands_run_and_print_what_is_shown(digits):
    code = 0
    for kind, body, note, _ in blocks(DOCS / "command-line.md"):
        if kind != "console" or note.startswith("skip: "):
            continue
        for step in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
            line, _, shown = step.partition("\n")
            if line == "echo $?":
                assert code == int(shown)
                continue
            code, printed = shell(line)
            assert code == (exits.BAD_INPUT if shown.startswith("error: ") else exits.OK), printed
            if shown and not note.startswith("output varies: "):
                assert_alike(shown, printed)


def test_commands_for_the_deep_curvature_suite_run(digits):
    runpy.run_path("digits.py", run_name="__main__")
    page = (DOCS / "command-line.md").read_text(encoding="utf-8").split("## The Deep Curvature Suite")[1]
    right = " ".join(re.findall(r"^\| .* \| (.*) \|$", page, re.MULTILINE))
    calls = [call for call in re.findall(r"`(.*?)`", right) if call.startswith(("--", "lambdahat")) and call != "--out"]
    assert len(calls) >= 8
    for number, call in enumerate(calls):
        whole = call if call.startswith("lambdahat") else f"lambdahat measure F --checkpoint C {call}"
        places = {"F": "digits:make_problem", "C": "digits.safetensors", "G": "digits:held_out", "DIR": f"out{number}"}
        if "--what" not in whole and "measure" in whole:
            whole += " --what trace"
        code, printed = shell(" ".join(places.get(word, word) for word in whole.split()))
        assert code == exits.OK, f"{whole}\n{printed}"


def test_every_status_is_in_the_table_with_its_remedy():
    page = (DOCS / "errors-and-status.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([A-Z_]+)` \| (.*?) \| .* \|$", page, re.MULTILINE)
    assert rows == [(status.name, status.value or "none needed") for status in Status]


def test_exit_codes_are_those_of_the_command():
    codes = {exits.OK, exits.NOT_CONVERGED, exits.BAD_INPUT, exits.FAILED, exits.INTERRUPTED}
    for name in ("errors-and-status.md", "command-line.md"):
        table = (DOCS / name).read_text(encoding="utf-8").split("## Exit codes")[1]
        assert {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)} == codes


KERNELS = {"sgld": "kernels.SGLD", "rmsprop_sgld": "kernels.RMSpropSGLD", "sghmc": "kernels.SGHMC",
           "sgnht": "kernels.SGNHT", "hmc": "hamiltonian.HMC"}  # fmt: skip


def test_every_public_name_is_in_the_reference():
    page = (DOCS / "reference.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^::: lambdahat\.([\w.]+)$", page, re.MULTILINE))
    modules = {"data", "experiments", "graphs", "maxent", "models", "optim", "randommatrix", "sampling", "singular",
               "training"}  # fmt: skip
    assert {name for name in listed if "." not in name} == set(lh.__all__) - modules
    elsewhere = {"exact", "llc", "sample"}  # a module of its own, and names of lambdahat itself
    for module in sorted(modules):
        names = {KERNELS.get(name, name) for name in set(getattr(lh, module).__all__) - elsewhere}
        inner = {name.removeprefix(f"{module}.") for name in listed if name.startswith(f"{module}.")}
        assert {name for name in inner if not name.startswith("exact.")} == names


def figures_script():
    spec = importlib.util.spec_from_file_location("figures", DOCS / "figures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_lead_somewhere_and_figures_are_small():
    shown = set()
    for page in PAGES:
        links = re.findall(r"\]\((?!https?:|#)([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
        missing = [link for link in links if not (page.parent / link).exists()]
        assert not missing, f"{page.name}: {missing}"
        shown |= {page.parent / link for link in links if link.endswith(".png")}
    assert {DOCS / "figures" / f"{name}.png" for name in figures_script().FIGURES} <= shown
    sizes = {path: path.stat().st_size for path in (DOCS / "figures").iterdir()}
    assert set(sizes) == shown
    assert max(sizes.values()) < 120_000
    assert sum(sizes.values()) < 1_500_000


@pytest.mark.slow
def test_figures_are_drawn(folder):
    script = figures_script()
    script.main(folder)
    assert {path.stem for path in folder.glob("*.png")} == set(script.FIGURES)
