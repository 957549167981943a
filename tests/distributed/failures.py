"""Ranks that end, hang or go another way, in three groups of one world: ``failures.py <folder>
<rank> <port>``.

Each rank that comes back writes what it was told to ``<group>-<rank>.txt``.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import lambdahat as lh

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.cases import classifier
from tests.distributed.world import error_of

FOLDER, RANK, PORT = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
LIMIT, LONGER = timedelta(seconds=20), timedelta(seconds=200)


def operator(group):
    problem = classifier(samples=21, ranks=group)
    return lh.hessian(problem)


def told(name, text):
    (FOLDER / f"{name}-{RANK}.txt").write_text(text, encoding="utf-8")


def products(op, columns):
    block = torch.ones(op.dim, columns).double()
    for _ in range(3):
        op @ block


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=PORT, RANK=str(RANK), WORLD_SIZE="4")
    dist.init_process_group("gloo", timeout=LONGER)
    ended, hung = (dist.new_group(pair, timeout=LIMIT) for pair in ([0, 1], [2, 3]))
    apart = dist.new_group([0, 2], timeout=LONGER)
    dist.barrier()
    op = operator(ended if RANK < 2 else hung)
    products(op, 1)
    if RANK == 1:
        os._exit(3)
    if RANK == 3:
        time.sleep(300)
    told("ended" if RANK == 0 else "hung", error_of(lambda: products(op, 1)))
    op = operator(apart)
    told("apart", error_of(lambda: products(op, 1 + RANK)) or "no error")
