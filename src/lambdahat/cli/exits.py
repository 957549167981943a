"""How commands end: exit codes that scripts can use, and one-line errors."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import sqlite3
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from datetime import timedelta
from dis import opmap
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import typer

from lambdahat._core.check import describe

if TYPE_CHECKING:
    from lambdahat.results import Status

OK, NOT_CONVERGED, BAD_INPUT, FAILED, USERS_CODE, INTERRUPTED, UNREAD = 0, 1, 2, 3, 4, 130, 141

EXIT_CODES = (
    "Exit codes: 0 success; 1 measured, but some status is not CONVERGED, or a verify case, data"
    " file, reproduce cell or bench task failed or is slower than its reference; 2 bad usage or"
    " input; 3 internal error, with traceback; 4 an error in your own code (factory, model, loss,"
    " data), with traceback; 130 interrupted; 141 the output was closed early."
)

PACKAGE = Path(__file__).parent.parent.resolve()
INSTALLED = {
    Path(sysconfig.get_path(name)).resolve()
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
}

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


class FactoryError(Exception):
    """The user's factory raised the error that this one is raised from; the text names it."""


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
        name = str(out)  # results name their command, in UTF-8
        if "\0" in name or name != name.encode(errors="replace").decode():
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
        why = "it is a file" if not file and os.path.isfile(out) else why
        what = "a file" if file else "a folder"
        given = "''" if out == NAMELESS else describe(str(out))
        raise InputError(
            f"{option} must be {what} that can be written to, got {given} ({why})"
        ) from None
    finally:
        for path in made:  # the innermost first
            with suppress(OSError):
                path.rmdir()


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
    """Turn what is raised inside into an exit code and a message on standard error.

    An argument check of the library is one line, as is a disk that is full or read-only. An error
    in the user's own code, and any other error, keeps its traceback.
    """
    try:
        yield
    except KeyboardInterrupt:
        say("interrupted" + (f"; {kept}" if kept else ""))
        raise typer.Exit(INTERRUPTED) from None
    except typer.Exit:
        raise
    except SystemExit as error:  # the library never raises it
        say(
            f"error: the model, its loss or its data called sys.exit({error.code!r}); let them"
            " raise an error instead"
        )
        raise typer.Exit(USERS_CODE) from None
    except FactoryError as error:
        _say_users_error(error.__cause__ or error, f"{error} raised")
        raise typer.Exit(USERS_CODE) from None
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _unread():
            raise typer.Exit(UNREAD) from None
        if not isinstance(error, InputError) and _in_users_code(error):
            _say_users_error(error, "your code raised")
            raise typer.Exit(USERS_CODE) from None
        if _of_the_disk(error) and _output_is_full():
            raise typer.Exit(BAD_INPUT) from None
        if _is_bad_input(error):
            room = "; make room or choose another place; " if kept and _of_the_disk(error) else ""
            say(f"error: {one_line(error)}" + (f"{room}{kept}" if room else ""))
            raise typer.Exit(BAD_INPUT) from None
        traceback.print_exc()
        raise typer.Exit(FAILED) from None


def _is_bad_input(error: Exception) -> bool:
    """Whether an error is about what the caller gave, or about the disk.

    The library checks arguments by ``raise ValueError`` or ``TypeError``. The same error from a
    call, such as ``int("x")``, is a mistake inside: the last instruction tells them apart.
    """
    if isinstance(error, InputError | FileNotFoundError) or _of_the_disk(error):
        return True
    if isinstance(error, ConnectionError):  # a worker's pipe, not a file of the caller's
        return False
    if not isinstance(error, ValueError | TypeError | ImportError | OSError):
        return False
    *_, last = _steps(error.__traceback__)
    raised = last.tb_frame.f_code.co_code[last.tb_lasti] == opmap["RAISE_VARARGS"]
    return raised and _place(last).is_relative_to(PACKAGE)


def _in_users_code(error: BaseException) -> bool:
    """Whether the library called other code than what it is built on, and that raised the error.

    Installed packages count if a module of torch called them: a model may come from one.
    """
    within, within_model = False, False
    for step in [*_steps(error.__traceback__)][1:]:  # the first is ``exit_codes``
        place = _place(step)
        within |= place.is_relative_to(PACKAGE)
        if not within or place.is_relative_to(PACKAGE) or place.name.startswith("<"):
            continue
        within_torch = "torch" in place.parts
        within_model |= within_torch and place.parts[-3:] == ("nn", "modules", "module.py")
        installed = any(place.is_relative_to(folder) for folder in INSTALLED)
        if not installed or (within_model and "site-packages" in place.parts and not within_torch):
            return True
    return False


def _say_users_error(error: BaseException, what: str) -> None:
    """The traceback from the first line outside the library on, and a last line that names it."""
    steps = [*_steps(error.__traceback__)]
    outside = [
        step
        for step in steps
        if not _place(step).is_relative_to(PACKAGE) and not _place(step).name.startswith("<")
    ]
    own = [s for s in outside if not any(_place(s).is_relative_to(f) for f in INSTALLED)]
    blamed = own or outside or steps
    if blamed:
        traceback.print_exception(error.with_traceback(blamed[0]), chain=False)
    last = blamed[-1:]
    where = "".join(f" ({_place(step).name}, line {step.tb_lineno})" for step in last)
    say(f"error: {what} {type(error).__name__}: {one_line(error)}{where}")


def _steps(step: TracebackType | None) -> Iterator[TracebackType]:
    while step is not None:
        yield step
        step = step.tb_next


def _place(step: TracebackType) -> Path:
    name = step.tb_frame.f_code.co_filename
    return Path(name) if name.startswith("<") else Path(name).resolve()


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
    from torch import distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


@contextmanager
def of_torchrun(arguments: Sequence[str]) -> Iterator[None]:
    """Join the other ranks, if any; all end when the first has printed, with its exit code."""
    from torch import distributed as dist

    from lambdahat.problem.distributed import in_a_group

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
    from torch import distributed as dist

    from lambdahat.problem.distributed import in_a_group

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
    import torch
    from torch import distributed as dist

    here, count = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if count:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % count)
    return "cpu:gloo,cuda:nccl" if here <= count and dist.is_nccl_available() else "gloo"
