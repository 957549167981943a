"""Whether chains fit into memory together, and in how many pieces a batch must go through one by one."""

from __future__ import annotations

import torch

from lambdahat.batches import free_memory, take
from lambdahat.memory import PASS, LiveBytes
from lambdahat.problem import Problem

SHARE = 0.5  # of the free memory, where the problem has no budget
WORKING = 3  # vectors of a chain: its position, its gradient and a buffer


def together_fits(problem: Problem, samples: int, chains: int) -> bool:
    """Whether the passes of all chains on batches of so many samples, and their vectors, fit into memory at once."""
    vectors = WORKING * problem.num_parameters * max(problem.dtype.itemsize, 4)
    room = SHARE * free_memory(problem.device) if problem.memory is None else problem.memory
    return chains * (_gradient_bytes(problem, samples) + vectors) <= room


def pieces_within(problem: Problem, samples: int) -> int:
    """Into how many pieces a batch must be cut so that a chain's pass over one stays within the budget; 1 without."""
    if problem.memory is None:
        return 1
    one, room = _gradient_bytes(problem, 1), PASS * problem.memory
    each = max(_gradient_bytes(problem, 2) - one, 1)
    rows = max(1 + int((room - one) // each), 1)
    return -(-samples // rows)


@torch.enable_grad()
def _gradient_bytes(problem: Problem, samples: int) -> float:
    """What a gradient on so many samples takes at most: measured on one and two, and on a line through both."""
    first = problem.batches.first()
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in problem.named(problem.vector).items()}
    peaks = []
    for count in (1, 2)[: min(samples, first.size)]:
        few = take(first, torch.arange(count, device=problem.device))
        with LiveBytes() as seen:
            torch.autograd.grad(problem.batch_loss(leaves, few), list(leaves.values()), allow_unused=True)
        peaks.append(float(seen.peak))
    return peaks[0] + (samples - 1) * max(peaks[-1] - peaks[0], 0.0)
