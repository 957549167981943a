"""Finding, fetching, checking and loading a data set of the catalogue."""

from __future__ import annotations

import hashlib
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lambdahat._core.check import require, require_choice
from lambdahat._core.storage import digest_tensors
from lambdahat.data.catalogue import CATALOGUE, DataSet
from lambdahat.data.files import VARIABLE, File, candidates, file_digest, note_data, roots
from lambdahat.data.sources import Mirror, Source
from lambdahat.data.splits import Split
from lambdahat.data.texts import Text


@dataclass(frozen=True)
class Found:
    """Where a data set is, in which form, and which of its files are missing there."""

    folder: Path
    form: tuple[File, ...]
    missing: tuple[str, ...]

    @property
    def unpublished(self) -> tuple[File, ...]:
        """The files that nobody published a checksum of: at most their sizes are known."""
        return tuple(file for file in self.form if not file.digest)


def load(name: str, folder: str | Path | None = None, verify: bool = True, **options: Any) -> Split:
    """A data set as tensors, ``split.train`` and ``split.test``.

    Looks in ``folder``, or in the folder that LAMBDAHAT_DATA names and then in the user's cache;
    ``fetch`` brings what is missing. ``verify=False`` takes files of other contents than the
    published ones, such as a part of the data, if they are well formed. Options: ``normalization``
    for images ("unit" [0, 1], "symmetric" [−1, 1], "standard" mean 0 and deviation 1 per channel of
    the training images, "raw" bytes), ``length`` of the stretches of a text, ``seed`` and
    ``held_out`` for digits.

    >>> split = load("digits")
    >>> tuple(split.train[0].shape), split.classes
    ((1438, 64), 10)
    """
    entry = _entry(name)
    unknown = sorted(set(options) - set(entry.options))
    require(
        not unknown,
        "options",
        f"be among those of {name!r}: {', '.join(entry.options)}",
        ", ".join(unknown),
    )
    chosen = {**entry.options, **options}
    if "length" in chosen:
        return load_text(name, folder, verify).split(chosen["length"])
    read = entry.read(**chosen) if entry.bundled else _read(name, folder, verify, **chosen)
    assert isinstance(read, Split)
    note_data(name, lambda: data_digest(name, folder))
    return read


def load_text(name: str, folder: str | Path | None = None, verify: bool = True) -> Text:
    """A text as one long row of numbers, with its vocabulary; found and verified as by ``load``."""
    texts = [key for key, entry in CATALOGUE.items() if "length" in entry.options]
    read = _read(require_choice(name, "name", texts), folder, verify)
    assert isinstance(read, Text)
    note_data(name, lambda: data_digest(name, folder))
    return read


def _read(name: str, folder: str | Path | None, verify: bool, **options: Any) -> Split | Text:
    entry, found = _entry(name), locate(name, folder)
    if found is None or (found.missing and verify):
        raise FileNotFoundError(_absent(name, entry, found, folder))
    if verify:
        check(name, found.folder)
    read = entry.read(found.folder, **options)
    came = (
        (len(read.train), len(read.test))
        if isinstance(read, Text)
        else (len(read.train[0]), len(read.test[0]))
    )
    require(
        not verify or came == entry.counts,
        str(found.folder),
        f"hold {_pair(entry.counts)} samples",
        _pair(came),
        "fetch the data again, or pass verify=False to use a part on purpose",
    )
    return read


def data_digest(name: str, folder: str | Path | None = None) -> str | None:
    """A digest of a data set as it is now, None where it is not here.

    It is one of the unpacked files by name, of those that come with the package one of the tensors.
    """
    if _entry(name).bundled:
        return _bundled_digest(name)
    found = locate(name, folder)
    if found is None:
        return None
    places = {file.name: file.find(found.folder) for file in found.form}
    told = [f"{file} {file_digest(path)}" for file, path in places.items() if path is not None]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:32]


@cache
def _bundled_digest(name: str) -> str:
    entry = _entry(name)
    split = entry.read(**entry.options)
    assert isinstance(split, Split)
    (x, y), (x_test, y_test) = split
    return digest_tensors({"x": x, "y": y, "x_test": x_test, "y_test": y_test})


def fetch(name: str, folder: str | Path | None = None, mirror: str | None = None) -> Path:
    """Bring the files of a data set, verified, from the first source that works; the folder they
    are in.

    Files that are there and right are kept, a broken download is continued. ``folder`` is where
    they go (by default the folder that LAMBDAHAT_DATA names, else the user's cache); ``mirror`` is
    an address to take the files from instead.
    """
    entry = _entry(name)
    require(
        not entry.bundled,
        "name",
        "be a data set that is not bundled",
        repr(name),
        "it is here already",
    )
    target = Path(folder).expanduser() if folder is not None else roots()[0] / entry.folders[0]
    sources: tuple[Source, ...] = entry.sources if mirror is None else (Mirror(mirror),)
    require(
        bool(sources),
        "name",
        "be a data set with an open source",
        repr(name),
        f"{entry.manual}: {target}",
    )
    files = [file for file in entry.forms[0] if not _right(file, target)]
    if not files:
        return target
    target.mkdir(parents=True, exist_ok=True)
    failures = []
    for source in sources:
        try:
            source.bring(files, target)
            for file in entry.forms[0]:
                _verify(file, target)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            failures.append(f"{source}: {' '.join(str(error).split())}")
        else:
            return target
    names = ", ".join(file.name for file in files)
    raise ConnectionError(
        f"{name} could not be fetched. Tried {'; '.join(failures)}. Put {names} into {target}, or"
        f" name the folder that holds them in {VARIABLE}"
    )


def check(name: str, folder: str | Path | None = None) -> Found:
    """Where a data set is; raises where a file of it is missing, empty or not the published one.

    Of the files in ``unpublished`` of the answer no more than the size is known, so that other
    contents pass here.
    """
    entry = _entry(name)
    found = locate(name, folder)
    if found is None or found.missing:
        raise FileNotFoundError(_absent(name, entry, found, folder))
    for file in found.form:
        _verify(file, found.folder)
    return found


def locate(name: str, folder: str | Path | None = None) -> Found | None:
    """The most complete copy below the first root that has any file of it; None where there is
    none.
    """
    entry = _entry(name)
    for root in candidates(entry.folders, folder):
        copies = [
            Found(place, form, tuple(file.name for file in form if file.find(place) is None))
            for place in root
            for form in entry.forms
        ]
        begun = [copy for copy in copies if len(copy.missing) < len(copy.form)]
        if begun:
            return min(begun, key=lambda copy: len(copy.missing))
    return None


def _entry(name: str) -> DataSet:
    return CATALOGUE[require_choice(name, "name", CATALOGUE)]


def _verify(file: File, folder: Path) -> None:
    """Refuse a file that is not there, or that is not the published one."""
    path = file.find(folder)
    require(
        path is not None, str(folder), f"hold {file.name}", "no such file", "", FileNotFoundError
    )
    assert path is not None
    file.verify(path)


def _right(file: File, folder: Path) -> bool:
    try:
        _verify(file, folder)
    except (ValueError, FileNotFoundError):
        return False
    return True


def _absent(name: str, entry: DataSet, found: Found | None, folder: str | Path | None) -> str:
    cure = f"run `lambdahat data fetch {name}`" if entry.sources else entry.manual
    if found is not None:
        return (
            f"{found.folder} must hold all files of {name}, got none of {', '.join(found.missing)};"
            f" {cure}"
        )
    below = " or ".join(map(str, roots() if folder is None else [folder]))
    return (
        f"{name} must be below {below}, in a folder {' or '.join(entry.folders)}, got no such files"
        f" there; {cure}, or name the folder above it in {VARIABLE}"
    )


def _pair(counts: tuple[int, int]) -> str:
    return f"{counts[0]:,} + {counts[1]:,}"
