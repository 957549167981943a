"""Settings of the whole test run."""

import gc

import torch

# The problems are too small to share between threads, and threads that wait for each other are slow
# on a busy machine.
torch.set_num_threads(1)


def pytest_collection_finish():
    """Leave ten thousand tests and all modules out of every later search for garbage."""
    gc.collect()
    gc.freeze()
