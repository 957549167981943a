"""The progress protocol: estimators report, whoever asked shows.

An estimator calls ``report(task, done, total)`` and knows nothing more. In a notebook a line below
the cell shows the task under way; elsewhere nobody listens unless asked. ``progress`` says who
listens.
"""

from __future__ import annotations

import hashlib
import html
import json
import os
import platform
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, suppress
from contextvars import ContextVar, Token
from functools import cache
from pathlib import Path
from typing import Any, TextIO, TypeVar

from lambdahat._core.check import describe, require

# seconds from which the time left is estimated: a cell of an experiment may take many minutes
REMEMBERED = 4 * 3600.0

Listener = Callable[[str, int, int | None], None]
Item = TypeVar("Item")


class Tasks(ABC):
    """The tasks under way, as one line of text, which subclasses show; only they get notes.

    A task that began at 0 stays on the line while others report, as one that contains them, until
    it is complete. A task that did not, such as a Lanczos run, may end before its total, which
    nobody reports; it leaves the line when another one reports.
    """

    wait = 1.0  # seconds before the first line
    every = 0.25  # seconds from one line to the next

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget all tasks and wait again."""
        self._tasks: dict[str, tuple[float, int, int, int | None, str]] = {}
        self._due: float | None = None

    def __call__(self, task: str, done: int, total: int | None, note: str = "") -> None:
        now = time.monotonic()
        if self._due is None:
            self._due = now + self.wait
        names = list(self._tasks)
        inner = names[names.index(task) + 1 :] if task in names else []
        for name, (_, first, _, _, _) in list(self._tasks.items()):
            if name in inner or (name != task and first > 0):
                del self._tasks[name]
        start, first, before, _, _ = self._tasks.get(task, (now, done, done, total, note))
        if done < before:  # the same task again
            start, first = now, done
        self._tasks[task] = start, first, done, total, note
        if now >= self._due:
            self._due = now + self.every
            self.show()
        if total is not None and done >= total:
            del self._tasks[task]

    def line(self) -> str:
        """All tasks, and the time that the last one has taken and has left."""
        parts, now = [], time.monotonic()
        for name, (_, _, done, total, note) in self._tasks.items():
            count = f"{done:,}" if total is None else f"{done:,}/{total:,}"
            parts.append(f"{name} {count}" + (f" ({note})" if note else ""))
        start, first, done, total, _ = list(self._tasks.values())[-1]
        text = f"{' · '.join(parts)}, {_clock(now - start)}"
        if total is None or done <= first:
            return text
        return f"{text}, about {_clock((now - start) / (done - first) * (total - done))} left"

    def share(self) -> float:
        """How much of all is done, 0 to 1, where all tasks have totals."""
        share, width = 0.0, 1.0
        for _, _, done, total, _ in self._tasks.values():
            share, width = share + width * done / (total or 1), width / (total or 1)
        return min(share, 1.0)

    @abstractmethod
    def show(self) -> None:
        """Show the line."""

    def close(self) -> None:
        """Remove what is shown and forget all tasks."""
        self.restart()


def _clock(seconds: float) -> str:
    """Minutes and seconds, or hours before them."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class TextLines(Tasks):
    """A line of text every few seconds, for logs and pipes; on standard error by default."""

    wait = every = 5.0

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__()
        self._stream = stream

    def show(self) -> None:
        print(self.line(), file=self._stream or sys.stderr, flush=True)


class NotebookLine(Tasks):
    """One line with a bar below a notebook's cell, empty again when the cell has run.

    The line is plain HTML in the colours of the notebook, without scripts or styles of its own.
    """

    def __init__(self, shell: Any) -> None:
        super().__init__()
        self._events, self._listens = shell.events, False
        self._handle: Any = None

    def __call__(self, task: str, done: int, total: int | None, note: str = "") -> None:
        if not self._listens:  # also for a cell that ends before there is a line
            self._events.register("post_run_cell", self._end_cell)
            self._listens = True
        super().__call__(task, done, total, note)

    def show(self) -> None:
        from IPython.display import DisplayHandle

        text = self.line()
        bar = f'<progress value="{self.share():.3f}" max="1"></progress> '
        bundle = {"text/html": f"<small>{bar}{html.escape(text)}</small>", "text/plain": text}
        if self._handle is None:
            self._handle = DisplayHandle()  # type: ignore[no-untyped-call]
            self._handle.display(bundle, raw=True)
        else:
            self._handle.update(bundle, raw=True)

    def _end_cell(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        if self._listens:
            self._events.unregister("post_run_cell", self._end_cell)
            self._listens = False
        if self._handle is not None:
            self._handle.update({"text/html": "", "text/plain": ""}, raw=True)
        self._handle = None
        super().close()


class Bars(Tasks):
    """One rich bar for each task, on a terminal."""

    def __init__(self, stack: ExitStack) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        super().__init__()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        console = Console(stderr=True)
        shown = Progress(
            *columns, console=console, transient=True, speed_estimate_period=REMEMBERED
        )
        self._bars = stack.enter_context(shown)
        self._ids: dict[str, Any] = {}

    def __call__(self, task: str, done: int, total: int | None, note: str = "") -> None:
        if task not in self._ids:
            self._ids[task] = self._bars.add_task(task, total=total)
        text = f"{task}: {note}" if note else task
        self._bars.update(self._ids[task], description=text, completed=done, total=total)

    def show(self) -> None:
        self._bars.refresh()


class ProgressFile:
    """How far the work inside a ``with`` block is, in a small file that other processes may read.

    The file is replaced at most twice a second, and what goes wrong with it goes unnoticed: it is
    no part of the result. With ``path=None`` nothing is written.
    """

    every = 0.5

    def __init__(self, path: Path | None, **about: Any) -> None:
        self._path, self._due, self._tasks = path, 0.0, dict[str, list[Any]]()
        here = {"pid": os.getpid(), "host": host_mark(), "began": time.time()}
        self._about = {"format": "lambdahat-progress", **about, **here}

    def __enter__(self) -> None:
        self._outer = _record.get()
        self._token = _record.set(self if self._path is not None else self._outer)
        self._write()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        _record.reset(self._token)
        self._write(ended="finished" if kind is None else kind.__name__)

    def __call__(self, task: str, done: int, total: int | None, note: str) -> None:
        """Note where a task is; the first one contains all others."""
        if self._outer is not None:
            self._outer(task, done, total, note)
        now, begins = time.time(), not self._tasks
        start, first, before, *_ = self._tasks.get(task, (now, done, done))
        if done < before:  # the same task again
            start, first = now, done
        self._tasks[task] = [start, first, done, total, note]
        outer = next(iter(self._tasks))
        if task != outer:
            self._tasks = {outer: self._tasks[outer], task: self._tasks[task]}
        if now >= self._due or begins:
            self._write()

    def _write(self, ended: str = "") -> None:
        if self._path is None:
            return
        now = time.time()
        self._due = now + self.every
        text = json.dumps({**self._about, "updated": now, "ended": ended, "tasks": self._tasks})
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        with suppress(OSError):
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, self._path)


@cache
def host_mark() -> str:
    """A mark of this machine that does not tell its name."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:12]


_listener: ContextVar[Listener | None] = ContextVar("lambdahat_progress", default=None)
_record: ContextVar[ProgressFile | None] = ContextVar("lambdahat_record", default=None)
_chosen: Listener | None = None  # for everything outside of ``with`` blocks; None: notebooks alone
_notebook: NotebookLine | None = None


def notebook_line() -> NotebookLine | None:
    """The line of the notebook that this code runs in; None elsewhere."""
    global _notebook
    if _notebook is None and "ipykernel" in sys.modules:
        from IPython import get_ipython

        shell = get_ipython()
        if getattr(shell, "kernel", None) is not None:
            _notebook = NotebookLine(shell)
    return _notebook


def report(task: str, done: int, total: int | None = None, note: str = "") -> None:
    """Tell the current listener, if any, that ``done`` of ``total`` units of ``task`` are complete.

    A ``note``, such as the loss so far, is shown beside the count; functions that users give as
    listeners do not get it.
    """
    record = _record.get()
    if record is not None:
        record(task, done, total, note)
    listener = _listener.get() or _chosen or notebook_line()
    if isinstance(listener, Tasks):
        listener(task, done, total, note)
    elif listener is not None:
        listener(task, done, total)


def track(task: str, items: Collection[Item]) -> Iterator[Item]:
    """Go through ``items``, reporting before each how many are done, and at the end that all are.

    >>> with progress(lambda task, done, total: print(task, done, total)):
    ...     list(track("curve", "ab"))
    curve 0 2
    curve 1 2
    curve 2 2
    ['a', 'b']
    """
    for done, item in enumerate(items):
        report(task, done, len(items))
        yield item
    report(task, len(items), len(items))


class progress:
    """Show the progress of everything that follows, or of one block.

    Without this call, notebooks show a line with a bar below a cell that runs longer than a second,
    and remove it at the end; scripts are silent. ``progress(False)`` silences notebooks from here
    on. ``progress()`` makes scripts print one line every five seconds on standard error.

    In a ``with`` statement the choice holds for the block. ``with progress():`` draws bars on a
    terminal, and lines where standard error is a file or a pipe.

    Args:
        listener: True to show, False to be silent, or a function of the task's name, the units that
            are done and their total, None where it is unknown.

    >>> seen = []
    >>> with progress(lambda task, done, total: seen.append((task, done, total))):
    ...     report("trace", 1, 2)
    >>> seen
    [('trace', 1, 2)]
    """

    def __init__(self, listener: Listener | bool = True) -> None:
        global _chosen
        known = isinstance(listener, bool) or callable(listener)
        expected = "be True, False or a function"
        require(known, "listener", expected, describe(listener), "", TypeError)
        self._before, self._given = _chosen, listener
        if isinstance(listener, bool):
            listener = (notebook_line() or TextLines()) if listener else lambda *_: None
        self._chosen = _chosen = listener
        self._stack = ExitStack()
        self._token: Token[Listener | None] | None = None

    def __repr__(self) -> str:
        return f"progress({self._given})"

    def __enter__(self) -> None:
        global _chosen
        _chosen, shown = self._before, self._chosen
        if self._given is True and notebook_line() is None and sys.stderr.isatty():
            shown = Bars(self._stack)
        if isinstance(shown, Tasks):
            self._stack.callback(shown.close)
        self._token = _listener.set(shown)

    def __exit__(self, *_: object) -> None:
        assert self._token is not None
        _listener.reset(self._token)
        self._stack.close()
