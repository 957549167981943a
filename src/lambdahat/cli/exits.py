"""How commands end: exit codes that scripts can use, and one-line errors."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import sqlite3
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import typer

from lambdahat._core.check import describe
from lambdahat.problem.distributed import in_a_group
from lambdahat.results import Status

OK, NOT_CONVERGED, BAD_INPUT, FAILED, INTERRUPTED, UNREAD = 0, 1, 2, 3, 130, 141

EXIT_CODES = (
    "Exit codes: 0 success; 1 measured, but some status is not CONVERGED (the output states the"
    " remedy), or a verify case, data file, reproduce cell or bench task failed or is slower than"
    " its reference; 2 bad usage or input; 3 internal error, with traceback; 130 interrupted"
    " (finished work is kept in --out); 141 the output was closed early, as in a pipe to head."
)


NAMELESS = Path("\0")  # no file can be called so
ROOM = 1 << 16  # bytes that a folder for output must have room for
DISK = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
}


class InputError(Exception):
    """Something the caller gave is wrong; the text names the argument and the cure."""


def output_path(given: str | Path) -> Path:
    """An --out as given, or its default; pathlib would read an empty name as "."."""
    return Path(given) if str(given).strip() else NAMELESS


def require_writable(out: Path | None, option: str = "--out", file: bool = False) -> None:
    """Refuse, before any work, a folder (or with ``file`` the place of a file) that cannot be
    written to.

    A small file is written there and removed, and so are folders that this takes: permissions tell
    less, to root nothing, and of a full disk they know nothing at all.
    """
    if out is None:
        return
    made: list[Path] = []
    try:
        if out == NAMELESS:
            raise OSError(errno.EINVAL, "the name is empty")
        if not _is_text(str(out)):
            raise OSError(errno.EILSEQ, "the name is not text")
        if file and out.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        folder = out.parent if file else out
        made = list(
            itertools.takewhile(lambda path: not os.path.lexists(path), (folder, *folder.parents))
        )
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            dir=folder, prefix=f".{out.name}." if file else ".lambdahat."
        ) as stream:
            stream.write(bytes(ROOM))
            stream.flush()
            os.fsync(stream.fileno())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)
        what = "a file" if file else "a folder"
        given = "''" if out == NAMELESS else describe(str(out))
        raise InputError(
            f"{option} must be {what} that can be written to, got {given} ({why})"
        ) from None
    finally:
        for path in made:  # the innermost first
            with suppress(OSError):
                path.rmdir()


def _is_text(name: str) -> bool:
    """Whether a name can be stored: results name their command, in UTF-8."""
    return "\0" not in name and name == name.encode(errors="replace").decode()


@contextmanager
def foreign_output() -> Iterator[None]:
    """Send what the caller's code prints to standard error, from Python or below."""
    sys.stdout.flush()
    try:
        kept = os.dup(1) if sys.stdout.fileno() == 1 else None
    except (OSError, ValueError):  # captured, or closed
        kept = None
    with redirect_stdout(sys.stderr):
        if kept is None:
            yield
            return
        os.dup2(2, 1)
        try:
            yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)


@contextmanager
def exit_codes(kept: str = "") -> Iterator[None]:
    """Turn what is raised inside into an exit code and, where the input is to blame, one line on
    standard error.

    ``ValueError`` and ``TypeError`` are what the library raises for arguments (``_core.check``).
    A disk that is full or read-only is no error inside either.
    """
    try:
        yield
    except KeyboardInterrupt:
        say("interrupted" + (f"; {kept}" if kept else ""))
        raise typer.Exit(INTERRUPTED) from None
    except (InputError, ValueError, TypeError, FileNotFoundError) as error:
        say(f"error: {one_line(error)}")
        raise typer.Exit(BAD_INPUT) from None
    except typer.Exit:
        raise
    except SystemExit as error:  # the library never raises it
        say(
            f"error: the model, its loss or its data called sys.exit({error.code!r}); let them"
            " raise an error instead"
        )
        raise typer.Exit(BAD_INPUT) from None
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _unread():
            raise typer.Exit(UNREAD) from None
        if _of_the_disk(error):
            if _output_is_full():
                raise typer.Exit(BAD_INPUT) from None
            say(
                f"error: {one_line(error)}"
                + (f"; make room or choose another place; {kept}" if kept else "")
            )
            raise typer.Exit(BAD_INPUT) from None
        traceback.print_exc()
        raise typer.Exit(FAILED) from None


@contextmanager
def unread_output() -> Iterator[None]:
    """End without a traceback where nobody reads standard output any more, also when only its last
    lines meet that.

    A disk that is full where standard output goes is one line and exit code 2.
    """
    try:
        try:
            yield
        finally:
            if _output_is_full():
                raise SystemExit(BAD_INPUT) from None
            # what other code prints as Python ends is no part of the output
            with suppress(OSError, ValueError):
                if sys.stdout.fileno() == 1:
                    os.dup2(2, 1)
    except BrokenPipeError:
        # Python writes what is left once more as it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(UNREAD) from None


def _of_the_disk(error: Exception) -> bool:
    """Whether the disk is full, read-only or not there: no fault of the program."""
    if isinstance(error, sqlite3.OperationalError):
        return any(
            text in str(error) for text in ("is full", "readonly", "unable to open", "disk I/O")
        )
    return isinstance(error, OSError) and error.errno in DISK


def _output_is_full() -> bool:
    """Whether standard output goes to a full disk; if so say it, and discard the rest."""
    try:
        print(end="", flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        say(f"error: standard output cannot be written to ({error.strerror})")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return True
    return False


def _unread() -> bool:
    """Whether standard output is the broken pipe; only a write can tell."""
    try:
        print(flush=True)
    except BrokenPipeError:
        return True
    return False


def one_line(error: BaseException) -> str:
    """The message of an error without line breaks; its type where there is no message."""
    return " ".join(str(error).split()) or type(error).__name__


def say(text: str) -> None:
    """One line on standard error."""
    print(text, file=sys.stderr)


def code_of(statuses: Iterable[Status]) -> int:
    """0 when every status is CONVERGED, else 1."""
    return OK if all(status.ok for status in statuses) else NOT_CONVERGED


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
    """Join the other ranks, if any; all end when the first has printed, with its exit code."""
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
    """NCCL if every rank of this machine has its own GPU, else gloo."""
    here, count = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if count:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % count)
    return "cpu:gloo,cuda:nccl" if here <= count and dist.is_nccl_available() else "gloo"
