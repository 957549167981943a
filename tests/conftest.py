"""Settings of the whole test run."""

import torch

# The problems here are too small to share between threads, and threads that spin for each other are slow on a busy machine.
torch.set_num_threads(1)
