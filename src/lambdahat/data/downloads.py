"""Downloads that resume: bytes go to a ``.part`` file, and a broken one is continued from where
it stopped.
"""

from __future__ import annotations

import http.client
import os
import re
import stat
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO, Any

from lambdahat._core.check import require
from lambdahat._core.progress import report

CHUNK = 1 << 18
ATTEMPTS = 3


def download(url: str, part: Path, timeout: float = 30.0, most: int | None = None) -> None:
    """Bring the whole of ``url`` into ``part``, continuing what is there already (HTTP Range).

    Nothing is written through a link: one in the place of ``part`` is removed. More than ``most``
    bytes are refused.
    """
    require(url.startswith(("http://", "https://")), "url", "begin with http:// or https://", url)
    part.parent.mkdir(parents=True, exist_ok=True)
    total: int | None = None
    for _ in range(ATTEMPTS):
        try:
            total = _continue(url, part, timeout, most)
        except (http.client.HTTPException, ConnectionError, TimeoutError):
            continue
        if total is None or (part.exists() and part.stat().st_size == total):
            return
    came = part.stat().st_size if part.exists() else 0
    raise ConnectionError(
        f"{url} broke off after {came:,} of"
        f" {'an unknown number of' if total is None else f'{total:,}'} bytes; the same command"
        " continues from there"
    )


def begun(part: Path) -> int:
    """The bytes that are there already; whatever is no plain file of its own in the place of
    ``part`` is removed.
    """
    try:
        found = part.lstat()
    except FileNotFoundError:
        return 0
    if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
        return found.st_size
    part.unlink()
    return 0


def open_part(part: Path, append: bool = False) -> IO[bytes]:
    """The file to write to, never through a link, not even through one made this moment."""
    begun(part)
    flags = (
        os.O_WRONLY
        | os.O_CREAT
        | (os.O_APPEND if append else os.O_TRUNC)
        | getattr(os, "O_NOFOLLOW", 0)
    )
    return os.fdopen(
        os.open(part, flags | getattr(os, "O_BINARY", 0), 0o644), "ab" if append else "wb"
    )


def _continue(url: str, part: Path, timeout: float, most: int | None) -> int | None:
    """One request for what is missing; the size of the whole where the server tells it."""
    done = begun(part)
    headers = {"User-Agent": "lambdahat", **({"Range": f"bytes={done}-"} if done else {})}
    try:
        response = urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=timeout
        )
    except urllib.error.HTTPError as error:
        with error:
            if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                raise
            whole = re.fullmatch(r"bytes \*/(\d+)", error.headers.get("Content-Range", ""))
        if whole is None or int(whole[1]) != done:  # more than there is: begin again
            part.unlink()
            return -1
        return done
    with response:
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:
            done = 0
        length = response.headers.get("Content-Length")
        total = None if length is None else done + int(length)
        with open_part(part, append=done > 0) as stream:
            fits = _copy(response, stream, url.rsplit("/", 1)[-1], done, total, most)
        if not fits:
            part.unlink()
            raise ValueError(f"{url} must have at most {most:,} bytes, got more")
    return total


def _copy(
    response: Any, stream: IO[bytes], name: str, done: int, total: int | None, most: int | None
) -> bool:
    """Whether all that came was written, and no more than ``most``."""
    while block := response.read(CHUNK):
        done += len(block)
        if most is not None and done > most:
            return False
        stream.write(block)
        report(f"fetch {name}", done, total)
    return True
