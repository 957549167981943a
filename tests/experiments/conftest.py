"""Runs at the scale smoke, each made once and shared by the tests and by the processes that run
them.
"""

import os

import pytest
from filelock import FileLock  # torch brings it

from lambdahat.experiments.kit.sweeps import sweep
from lambdahat.experiments.published import find


@pytest.fixture(scope="session")
def smoke(tmp_path_factory):
    """A function: the store of an experiment by its name."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "smoke"
    folder.mkdir(exist_ok=True)

    def run(name):
        with FileLock(folder / f"{name}.lock"):
            return sweep(find(name), folder, scale="smoke")

    return run
