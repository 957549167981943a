"""The progress protocol: estimators report, whoever asked shows.

An estimator calls ``report(task, done, total)`` and knows nothing more. By default nobody listens.
``with progress():`` shows a bar on a terminal and stays silent elsewhere; ``with
progress(callable):`` hands every report to the callable.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar

# seconds from which the time left is estimated: a cell of an experiment may take many minutes
REMEMBERED = 4 * 3600.0

Listener = Callable[[str, int, int | None], None]

_listener: ContextVar[Listener | None] = ContextVar("lambdahat_progress", default=None)


class Bars:
    """The listener that draws bars; it alone shows notes beside them."""

    def __init__(
        self,
        add: Callable[[str, int | None], int],
        update: Callable[[int, str, int, int | None], None],
    ) -> None:
        self._add, self._update = add, update
        self._ids: dict[str, int] = {}

    def __call__(self, task: str, done: int, total: int | None, note: str = "") -> None:
        if task not in self._ids:
            self._ids[task] = self._add(task, total)
        self._update(self._ids[task], f"{task}: {note}" if note else task, done, total)


def report(task: str, done: int, total: int | None = None, note: str = "") -> None:
    """Tell the current listener, if any, that ``done`` of ``total`` units of ``task`` are complete.

    A ``note``, such as the loss so far, is drawn beside the bar; other listeners do not get it.
    """
    listener = _listener.get()
    if isinstance(listener, Bars):
        listener(task, done, total, note)
    elif listener is not None:
        listener(task, done, total)


@contextmanager
def progress(listener: Listener | None = None) -> Iterator[None]:
    """Show the progress of everything inside the block.

    >>> seen = []
    >>> with progress(lambda task, done, total: seen.append((task, done, total))):
    ...     report("trace", 1, 2)
    >>> seen
    [('trace', 1, 2)]
    """
    if listener is None and not sys.stderr.isatty():
        yield
        return
    with _terminal_bars() if listener is None else nullcontext(listener) as shown:
        token = _listener.set(shown)
        try:
            yield
        finally:
            _listener.reset(token)


@contextmanager
def _terminal_bars() -> Iterator[Listener]:
    """One rich bar per task, on standard error."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console, memory = Console(stderr=True), REMEMBERED
    with Progress(*columns, console=console, transient=True, speed_estimate_period=memory) as bars:

        def update(number: int, text: str, done: int, total: int | None) -> None:
            bars.update(number, description=text, completed=done, total=total)  # type: ignore[arg-type]

        yield Bars(lambda task, total: bars.add_task(task, total=total), update)
