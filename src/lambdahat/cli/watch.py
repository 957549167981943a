"""``lambdahat watch``."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

from lambdahat.cli.exits import InputError, say
from lambdahat.cli.options import argument, option


def watch(
    folder: Path = argument("Folder of a run, a sweep or a measurement.", ..., "FOLDER"),
    port: int = option("Port of the page; 0 takes a free one.", 0, min=0, max=65535),
    host: str = option("Address; another one opens it to other machines.", "127.0.0.1"),
    open_page: bool | None = option(
        "Open a browser.", None, "", "--open/--no-open", shown="with a display"
    ),
) -> None:
    """Follow runs, sweeps and measurements in the browser."""
    from lambdahat.report.live import LiveServer

    try:
        server = LiveServer(folder, host, port)
    except FileNotFoundError as error:
        raise InputError(str(error).replace("folder must", "FOLDER must", 1)) from error
    except (OSError, OverflowError) as error:
        raise InputError(_cause(error, host, port)) from error
    with server:
        print(f"watching {folder}: {server.url}", flush=True)
        if open_page or (open_page is None and _has_display()):
            import webbrowser

            webbrowser.open(server.url)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            say("stopped")


def _cause(error: OSError | OverflowError, host: str, port: int) -> str:
    number = getattr(error, "errno", None)
    if number == errno.EADDRINUSE:
        return f"--port must be free, got {port}, which is in use; leave it out for a free one"
    if number in (errno.EACCES, errno.EPERM):
        return f"--port must be one that you may use, got {port}; choose one above 1023"
    return f"--host must be an address of this machine, got {host!r} ({error})"


def _has_display() -> bool:
    """Whether a browser would open a window, and a person asked."""
    graphical = sys.platform in ("darwin", "win32") or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")
    )
    return graphical and sys.stdout.isatty()
