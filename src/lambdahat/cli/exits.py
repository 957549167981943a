"""How commands end: exit codes that scripts can use, and one-line errors."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import typer

from lambdahat.results import Status

OK, NOT_CONVERGED, BAD_INPUT, FAILED, INTERRUPTED, UNREAD = 0, 1, 2, 3, 130, 141

EXIT_CODES = (
    "Exit codes: 0 all went well; 1 measured, but some status is not CONVERGED (the output states the remedy), or a "
    "case of verify, a file of data check, a cell of reproduce or a task of bench fails, or is slower than on record; "
    "2 bad usage or input; 3 an error inside, with its traceback; "
    "130 interrupted (what had been finished is kept in --out); "
    "141 whoever read the output stopped reading, as in a pipe to head."
)


class InputError(Exception):
    """Something the caller gave is wrong; the text names the argument and the cure."""


@contextmanager
def exit_codes(kept: str = "") -> Iterator[None]:
    """Turn what is raised inside into an exit code and, where the input is to blame, one line on standard error.

    ``ValueError`` and ``TypeError`` are what the library raises for arguments (``_check.require``).
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
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _unread():
            raise typer.Exit(UNREAD) from None
        traceback.print_exc()
        raise typer.Exit(FAILED) from None


@contextmanager
def unread_output() -> Iterator[None]:
    """End without a traceback where nobody reads standard output any more, also when only its last lines meet that."""
    try:
        try:
            yield
        finally:
            print(end="", flush=True)
    except BrokenPipeError:
        # Python writes what is left once more as it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(UNREAD) from None


def _unread() -> bool:
    """Whether standard output is the pipe that broke. It takes a write: one that failed leaves nothing to flush."""
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
