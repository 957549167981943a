"""The progress protocol: estimators report, whoever asked shows.

An estimator calls ``report(task, done, total)`` and knows nothing more. By default nobody listens.
``with progress():`` shows a bar on a terminal and stays silent elsewhere; ``with progress(callable):``
hands every report to the callable.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[str, int, int | None], None]

_listener: ContextVar[Listener | None] = ContextVar("lambdahat_progress", default=None)


def report(task: str, done: int, total: int | None = None) -> None:
    """Tell the current listener, if any, that ``done`` of ``total`` units of ``task`` are complete."""
    listener = _listener.get()
    if listener is not None:
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
    if listener is not None:
        token = _listener.set(listener)
        try:
            yield
        finally:
            _listener.reset(token)
    elif not sys.stderr.isatty():
        yield
    else:
        with _terminal_bars() as bars:
            token = _listener.set(bars)
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
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        ids: dict[str, int] = {}

        def show(task: str, done: int, total: int | None) -> None:
            if task not in ids:
                ids[task] = bars.add_task(task, total=total)
            bars.update(ids[task], completed=done, total=total)  # type: ignore[arg-type]

        yield show
