"""Settings of the whole test run."""

import gc

import pytest
import torch

# The problems are too small to share between threads, and threads that wait for each other are slow
# on a busy machine.
torch.set_num_threads(1)


def pytest_collection_finish():
    """Leave ten thousand tests and all modules out of every later search for garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_data_of_the_user(tmp_path_factory):
    """Hide the data sets of whoever runs the tests, also from the processes that tests start."""
    with pytest.MonkeyPatch.context() as patch:
        home = str(tmp_path_factory.mktemp("data-home"))
        patch.delenv("LAMBDAHAT_DATA", raising=False)
        for variable in ("XDG_DATA_HOME", "LOCALAPPDATA"):
            patch.setenv(variable, home)
        yield
