"""Processes on one GPU: one on NCCL, and two on gloo, for NCCL takes no two ranks of one device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.device_world import measured

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WORLD = Path(__file__).with_name("device_world.py")


def launched(size: int, backend: str, folder: Path) -> subprocess.CompletedProcess[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run(
        [sys.executable, *torchrun, str(WORLD), str(folder), backend],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.fixture(scope="module")
def reference():
    return measured()


@pytest.mark.parametrize(("size", "backend"), [(1, "nccl"), (2, "gloo")])
def test_processes_measure_what_one_does(tmp_path, reference, size, backend):
    done = launched(size, backend, tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(size):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert found["size"] == size
        assert found["samples"] in (300 // size, 300 - 300 // size)
        for name, value in reference.items():
            tight = 1e-4 if name == "llc" else 1e-9  # chains on a GPU are the same in law
            if name == "llc" and size > 1:
                error = (
                    4 * (found["measured"]["llc stderr"] ** 2 + reference["llc stderr"] ** 2) ** 0.5
                )
                assert abs(found["measured"][name] - value) < error
            elif name != "llc stderr":
                torch.testing.assert_close(found["measured"][name], value, rtol=tight, atol=1e-10)


def test_nccl_refuses_two_ranks_on_one_device(tmp_path):
    """Why the test above runs gloo; should NCCL come to take them, NCCL it can be."""
    if torch.cuda.device_count() > 1:
        pytest.skip("each rank would have a device of its own")
    done = launched(2, "nccl", tmp_path)
    assert done.returncode != 0
    assert (
        "Duplicate GPU" in done.stderr + done.stdout or "invalid usage" in done.stderr + done.stdout
    )
