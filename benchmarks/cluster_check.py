"""Does a sweep give the same rows on loky, a local dask cluster and a local ray?

    make cluster-check

runs the tests of this, including those marked slow, and writes the outcome of each to
benchmarks/results/clusters.txt.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "results" / "clusters.txt"
CHOSEN = "clusters or everywhere or two_workers or handed_back or an_address"
PACKAGES = ("torch", "joblib", "dask", "distributed", "ray")


def main() -> int:
    command = [
        "-m",
        "pytest",
        "tests/experiments/test_sweeps.py",
        "-k",
        CHOSEN,
        "-m",
        "slow or not slow",
        "-v",
    ]
    said = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        text=True,
        capture_output=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    print(said.stdout, said.stderr, sep="")
    outcomes = [
        " ".join(line.split()[:2]) for line in said.stdout.splitlines() if line.startswith("tests/")
    ]
    # what was skipped shows nothing
    if said.returncode or any(not outcome.endswith("PASSED") for outcome in outcomes):
        return 1
    head = [
        time.strftime("python benchmarks/cluster_check.py, %Y-%m-%d %H:%M UTC", time.gmtime()),
        f"python {sys.version.split()[0]}, "
        + ", ".join(f"{name} {version(name)}" for name in PACKAGES),
        f'python -m pytest tests/experiments/test_sweeps.py -k "{CHOSEN}" -m "slow or not slow" -v',
    ]
    RECORD.write_text("\n".join([*head, "", *outcomes]) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
