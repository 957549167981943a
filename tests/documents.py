"""The pages of the documentation, their blocks, and what it takes to run one.

In ``console`` blocks a line after ``$`` is a command, and what follows it is what it prints; a
``text`` block right after a block of Python is what that prints. Text must agree, numbers to 20 %,
and what follows a ± is not compared. An HTML comment right above a block may say otherwise, and
why:

- ``<!-- skip: why -->``: a block of Python that is not run;
- ``<!-- smaller: why -->``: commands that are run on less (``SMALLER`` in test_commands.py says
  how);
- ``<!-- output varies: why -->``: it is run, and its output not compared;
- ``<!-- file: name -->``: the block is also written to that file, for later blocks to use.
"""

import math
import re
import sys
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
# Pages and examples that sample, train or sweep for long: `make docs-check` runs them.
LONG = """learning-coefficient.md compare-checkpoints.md transformer-coefficient.md bayes.md
not-a-minimum.md not-mixed.md batch-and-step.md sampling.md ground-truth.md mini-batch-spectra.md
minibatch-results.md reproductions.md top-eigenvalue.md learning-rate.md log-determinants.md
natural-gradient.md shrinkage.md learning_coefficient.py llc_along_training.py"""
BLOCK = re.compile(
    r"(?:^<!-- (?P<note>.*?) -->\n+)?^```(?P<kind>\w+)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
NUMBER = re.compile(r"(± ?)?-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")


def in_two_jobs(names):
    """Parameters of a test: those that take long are left to the job on documents."""
    long = LONG.split()
    return [
        pytest.param(name, marks=pytest.mark.documents) if Path(name).name in long else name
        for name in names
    ]


def blocks(page):
    """(kind, body, note, the text block that follows at once or None) for every block of a page."""
    text = page.read_text(encoding="utf-8")
    found = list(BLOCK.finditer(text))
    for block, after in zip_longest(found, found[1:]):
        near = (
            after is not None
            and after["kind"] == "text"
            and not text[block.end() : after.start()].strip()
        )
        yield block["kind"], block["body"], block["note"] or "", after["body"] if near else None


def commands(page):
    """(line, what it prints, note) for every command in the blocks of a page."""
    for kind, body, note, _ in blocks(page):
        if kind == "console":
            for step in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
                line, _, shown = step.partition("\n")
                yield line, shown, note


def inline_commands(page):
    """The commands in the running text and the tables of a page."""
    text = re.sub(
        r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    found = re.findall(r"`((?:lambdahat|python|make)\s[^`]*|benchmarks/\w+\.py[^`]*)`", text)
    return [
        " ".join(f"python {line}".split() if line.startswith("bench") else line.split())
        for line in found
    ]


def write_files(page, folder):
    """The files that blocks of a page are also written to."""
    for _, body, note, _ in blocks(page):
        if note.startswith("file: "):
            (folder / note.removeprefix("file: ")).write_text(body, encoding="utf-8")


def skeleton(text):
    """The text without its numbers, with white space and rules of dashes made equal; and the
    numbers that count.
    """
    numbers = [float(m[0].replace(",", "")) for m in NUMBER.finditer(text) if not m[1]]
    return re.sub(r"-{2,}", "--", " ".join(NUMBER.sub("#", text).split())), numbers


def assert_alike(shown, printed):
    (words, numbers), (words_now, numbers_now) = skeleton(shown), skeleton(printed)
    assert words == words_now, printed
    for then, now in zip(numbers, numbers_now, strict=True):
        assert math.isclose(then, now, rel_tol=0.2, abs_tol=2e-5), (
            f"{then} is now {now} in\n{printed}"
        )


@contextmanager
def empty_folder(path, monkeypatch):
    """An empty current directory, a seeded generator, and modules that stay out of other tests."""
    monkeypatch.chdir(path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(path) in str(
            sys.modules[name].__file__
        ):
            del sys.modules[name]
