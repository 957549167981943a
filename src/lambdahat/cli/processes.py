"""The command under ``torchrun``: every rank measures its share of the data, the first prints
and writes.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from lambdahat.cli.exits import BAD_INPUT, NOT_CONVERGED, OK, say
from lambdahat.problem.distributed import in_a_group

SHARED = ("measure", "landscape")
TIMEOUT = timedelta(minutes=30)
MEASURED = (
    "exit code 1: all was measured, but not all is CONVERGED; torchrun takes that for a failure,"
    " and reports one"
)


def rank() -> int:
    """This process's number among those of ``torchrun``; 0 where it is alone."""
    return dist.get_rank() if in_a_group() else 0


@contextmanager
def of_torchrun(arguments: Sequence[str]) -> Iterator[None]:
    """Meet the other ranks, if there are any; all end when the first has printed, and its exit
    code is the job's.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ or in_a_group():
        yield
        return
    command = next((word for word in arguments if not word.startswith("-")), "")
    if command not in SHARED:
        if os.environ["RANK"] == "0":
            say(
                f"error: {command or 'lambdahat'} is for one process, got torchrun with"
                f" {os.environ['WORLD_SIZE']}; only {' and '.join(SHARED)} are shared out, start"
                " the others without torchrun"
            )
        raise SystemExit(BAD_INPUT)
    dist.init_process_group(_backend(), timeout=TIMEOUT)
    try:
        yield
    except SystemExit as end:
        # an error: the others may not get as far as here
        if end.code not in (OK, None, NOT_CONVERGED):
            raise
        dist.barrier()
        if rank() == 0 and end.code == NOT_CONVERGED:
            say(MEASURED)
        raise SystemExit(end.code if rank() == 0 else OK) from None
    finally:
        dist.destroy_process_group()


@contextmanager
def own_folder(out: Path | None) -> Iterator[Path | None]:
    """Where this rank keeps finished results: the first in ``out``, the others in copies of what
    was there before.

    A rank that saw what the first has just written would not measure it, and the first would wait
    for its share.
    """
    if out is None or not in_a_group():
        yield out
        return
    with tempfile.TemporaryDirectory() as name:
        if rank() and out.is_dir():
            shutil.copytree(out, name, dirs_exist_ok=True)
        dist.barrier()
        yield Path(name) if rank() else out


def _backend() -> str:
    """NCCL where every rank of this machine has a GPU to itself, and gloo for the rest: NCCL
    takes one rank a GPU.
    """
    here, count = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if count:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % count)
    return "cpu:gloo,cuda:nccl" if here <= count and dist.is_nccl_available() else "gloo"
