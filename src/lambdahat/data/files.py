"""Files as they should be: their place, contents and checksum; errors that say what came
instead.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from lambdahat._core.check import require
from lambdahat._core.storage import unpacked_size

VARIABLE = "LAMBDAHAT_DATA"
CURE = "delete it and fetch it again: lambdahat data fetch"
OTHER = (
    "fetch it again (lambdahat data fetch), or pass verify=False to load other contents on purpose"
)


@dataclass(frozen=True)
class File:
    """A standard file: its name, the size of its contents and their checksum, "" or None where
    nobody published one.

    Contents are what a reader sees: a file ``name.gz`` counts unpacked, since mirrors compress
    differently.
    """

    name: str
    size: int | None = None
    digest: str = ""

    def places(self, folder: Path) -> tuple[Path, Path]:
        """Where the file may be in a folder, unpacked and compressed."""
        return folder / self.name, folder / f"{self.name}.gz"

    def find(self, folder: Path) -> Path | None:
        """The file in a folder, compressed or not."""
        return next((path for path in self.places(folder) if path.is_file()), None)

    def verify(self, path: Path) -> None:
        """Refuse contents of another size or checksum, and none at all."""
        data = contents(path, self.size)
        verify_bytes(data, str(path), self.size, self.digest, OTHER)
        require(bool(data), str(path), "hold data", "an empty file", OTHER)


def verify_bytes(data: bytes, name: str, size: int | None, digest: str, cure: str = "") -> None:
    """Refuse bytes of another size or checksum ("sha256:…" or "md5:…")."""
    require(
        size in (None, len(data)),
        name,
        f"hold {size:,} bytes" if size else "",
        f"{len(data):,}",
        cure,
    )
    if digest:
        kind, _, expected = digest.partition(":")
        got = hashlib.new(kind, data, usedforsecurity=False).hexdigest()
        require(got == expected, name, f"have the {kind} checksum {expected}", got, cure)


def contents(path: Path, size: int | None = None) -> bytes:
    """The bytes of a file, unpacked if it is gzip.

    Unpacking stops where there is more than ``size``, the published size, or where none is known,
    far more than the file's own size.
    """
    packed = path.stat().st_size
    with path.open("rb") as stream:
        if stream.read(2) != b"\x1f\x8b":
            stream.seek(0)
            return stream.read()
        stream.seek(0)
        most = unpacked_size(packed) if size is None else size
        try:
            with gzip.GzipFile(fileobj=stream) as unpacked:
                data = unpacked.read(most + 1)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(
                f"{path} must be a whole gzip file, got a damaged or truncated one ({error});"
                f" {CURE}"
            ) from None
    require(
        len(data) <= most,
        str(path),
        f"unpack to at most {most:,} bytes",
        f"more, packed into {packed:,}",
        CURE,
    )
    return data


def file_digest(path: Path) -> str:
    """A digest of what a file holds, unpacked; a file is read again only after a change."""
    found = path.stat()
    return _file_digest(path, found.st_ino, found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=1024)
def _file_digest(path: Path, *_state: int) -> str:
    return hashlib.sha256(contents(path)).hexdigest()


_noted: ContextVar[dict[str, str] | None] = ContextVar(
    "digests of the data that were read", default=None
)


@contextmanager
def noting_data() -> Iterator[dict[str, str]]:
    """Collect the digests of the data that are loaded inside, by name."""
    found: dict[str, str] = {}
    token = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(token)


def note_data(name: str, digest: Callable[[], str | None]) -> None:
    """Note that data were read; a digest is computed only where somebody collects them."""
    noted = _noted.get()
    if noted is not None and (found := digest()) is not None:
        noted[name] = found


def roots() -> list[Path]:
    """Where data are looked for, in order: the folder in LAMBDAHAT_DATA, then the user's own
    cache.
    """
    named = os.environ.get(VARIABLE)
    return [*([Path(named).expanduser()] if named else []), cache()]


def cache() -> Path:
    """The platform's folder for data of programs."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Application Support"
    else:
        base = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return base / "lambdahat" / "data"


def candidates(folders: Sequence[str], folder: str | Path | None) -> list[list[Path]]:
    """Folders that may hold a data set: the one named and its usual subfolders, else those of
    each root in turn.
    """
    if folder is not None:
        named = Path(folder).expanduser()
        require(
            named.is_dir(),
            "folder",
            "be a folder",
            f"{named} (no such folder)",
            "",
            FileNotFoundError,
        )
        return [[named, *(named / inner for inner in folders)]]
    return [[root / inner for inner in folders] for root in roots()]
