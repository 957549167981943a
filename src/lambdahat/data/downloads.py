"""Downloads that resume: bytes go to a ``.part`` file, and a broken one is continued from where it stopped."""

from __future__ import annotations

import http.client
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from lambdahat._check import require
from lambdahat._progress import report

CHUNK = 1 << 18
ATTEMPTS = 3


def download(url: str, part: Path, timeout: float = 30.0) -> None:
    """Bring the whole of ``url`` into ``part``, continuing what is there already (HTTP Range)."""
    require(url.startswith(("http://", "https://")), "url", "begin with http:// or https://", url)
    part.parent.mkdir(parents=True, exist_ok=True)
    total: int | None = None
    for _ in range(ATTEMPTS):
        try:
            total = _continue(url, part, timeout)
        except (http.client.HTTPException, ConnectionError, TimeoutError):
            continue
        if total is None or (part.exists() and part.stat().st_size == total):
            return
    came = part.stat().st_size if part.exists() else 0
    raise ConnectionError(
        f"{url} broke off after {came:,} of {'an unknown number of' if total is None else f'{total:,}'} bytes; "
        "the same command continues from there"
    )


def _continue(url: str, part: Path, timeout: float) -> int | None:
    """One request for what is missing; the size of the whole where the server tells it."""
    done = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "lambdahat", **({"Range": f"bytes={done}-"} if done else {})}
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout)
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
        with part.open("ab" if done else "wb") as stream:
            _copy(response, stream, url.rsplit("/", 1)[-1], done, total)
    return total


def _copy(response: Any, stream: Any, name: str, done: int, total: int | None) -> None:
    while block := response.read(CHUNK):
        stream.write(block)
        done += len(block)
        report(f"fetch {name}", done, total)
