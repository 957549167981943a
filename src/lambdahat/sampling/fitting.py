"""Whether chains fit into memory together, and in how many pieces a batch must go through one by one."""

from __future__ import annotations

import torch

from lambdahat.batches import free_memory, take
from lambdahat.memory import PASS, LiveBytes, rows_within
from lambdahat.problem import Problem
from lambdahat.recomputing import recomputing

SHARE = 0.5  # of the free memory, where the problem has no budget
WORKING = 3  # vectors of a chain: its position, its gradient and a buffer
ON_GPU = 21  # there nothing is written in place: so many were live at once, captured; 17 without (H200, torch 2.11)


def together_fits(problem: Problem, samples: int, chains: int) -> bool:
    """Whether the passes of all chains on batches of so many samples, and their vectors, fit into memory at once."""
    working = ON_GPU if problem.device.type == "cuda" else WORKING
    vectors = working * problem.num_parameters * max(problem.dtype.itemsize, 4)
    room = SHARE * free_memory(problem.device) if problem.memory is None else problem.memory
    return chains * (_gradient_bytes(problem, samples) + vectors) <= room


def pieces_within(problem: Problem, samples: int) -> int:
    """Into how many pieces a batch must be cut so that a chain's pass over one stays within the budget; 1 without."""
    if problem.memory is None:
        return 1
    again, most = problem.recomputes, min(samples, problem.batches.first().size)  # as chains one by one do
    one, room = _measured(problem, 1, again), PASS * problem.memory
    rows = rows_within(lambda count: _measured(problem, count, again), most, room, one) if one < room else 1
    return -(-samples // rows)


def _gradient_bytes(problem: Problem, samples: int) -> float:
    """What a gradient on so many samples takes at most: measured on one and two, and on a line through both."""
    counts = (1, 2)[: min(samples, problem.batches.first().size)]
    peaks = [_measured(problem, count, again=False) for count in counts]
    return peaks[0] + (samples - 1) * max(peaks[-1] - peaks[0], 0.0)


@torch.enable_grad()
def _measured(problem: Problem, samples: int, again: bool) -> float:
    """What a gradient on the first samples takes at most; ``again`` runs the parts again that the model checkpoints."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in problem.named(problem.vector).items()}
    few = take(problem.batches.first(), torch.arange(samples, device=problem.device))
    with LiveBytes() as seen, recomputing(again):
        torch.autograd.grad(problem.batch_loss(leaves, few), list(leaves.values()), allow_unused=True)
    return float(seen.peak)
