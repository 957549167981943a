"""Settings of the whole test run."""

import torch

# The problems are too small to share between threads, and threads that wait for each other are slow
# on a busy machine.
torch.set_num_threads(1)
