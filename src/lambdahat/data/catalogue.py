"""The data sets by name: find, fetch, check and load them."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from lambdahat._core.check import require, require_choice
from lambdahat._core.storage import digest_tensors
from lambdahat.data.sources import VARIABLE, File, Mirror, Source, candidates, file_digest, roots
from lambdahat.data.splits import Split, Text

Read = TypeVar("Read", bound=Callable[..., "Split | Text"])


@dataclass(frozen=True)
class DataSet:
    """A registered data set; see ``register_dataset``."""

    description: str
    counts: tuple[int, int]
    read: Callable[..., Split | Text]
    options: Mapping[str, Any] = field(default_factory=dict)
    forms: tuple[tuple[File, ...], ...] = ()
    folders: tuple[str, ...] = ()
    sources: tuple[Source, ...] = ()
    manual: str = ""

    @property
    def bundled(self) -> bool:
        """Whether it comes with the package."""
        return not self.folders


CATALOGUE: dict[str, DataSet] = {}
"""The registered data sets by name."""


def register_dataset(
    name: str,
    description: str,
    counts: tuple[int, int],
    options: Mapping[str, Any] | None = None,
    *,
    forms: tuple[tuple[File, ...], ...] = (),
    folders: tuple[str, ...] = (),
    sources: tuple[Source, ...] = (),
    manual: str = "",
    **fixed: Any,
) -> Callable[[Read], Read]:
    """Register a reader, for ``load``, ``fetch`` and the command line.

    The contract tests run over everything that is registered.

    Args:
        name: The name to ask for.
        description: A few words for lists.
        counts: Training and test samples of the whole; for texts the tokens.
        options: Options of ``load``, with their defaults. A text has "length".
        forms: Sets of files, each complete in itself. The reader is given their folder; without
            files it is called with the options alone.
        folders: Usual names of the folder; the library uses the first.
        sources: Where ``fetch`` gets the files of the first form, tried in turn.
        manual: How to get them where there is no open source.
        fixed: Arguments of the reader that this name decides.
    """
    require(name not in CATALOGUE, "name", "not be taken", repr(name))

    def add(read: Read) -> Read:
        reader = partial(read, **fixed) if fixed else read
        CATALOGUE[name] = DataSet(
            description, counts, reader, options or {}, forms, folders, sources, manual
        )
        return read

    return add


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


_noted: ContextVar[dict[str, str] | None] = ContextVar(
    "digests of the data that were read", default=None
)


@contextmanager
def noting_data() -> Iterator[dict[str, str]]:
    """Collect the digests of the data that are loaded inside, by name."""
    digests: dict[str, str] = {}
    token = _noted.set(digests)
    try:
        yield digests
    finally:
        _noted.reset(token)


def note_data(name: str, digest: Callable[[], str | None]) -> None:
    """Note that data were read; a digest is computed only where somebody collects them."""
    noted = _noted.get()
    if noted is not None and (contents := digest()) is not None:
        noted[name] = contents


def load(name: str, folder: str | Path | None = None, verify: bool = True, **options: Any) -> Split:
    """A data set as tensors, ``split.train`` and ``split.test``.

    Looks in ``folder``, or in the folder that LAMBDAHAT_DATA names and then in the user's cache;
    ``fetch`` brings what is missing. ``verify=False`` takes files of other contents than the
    published ones, such as a part of the data, if they are well formed. Options: ``normalization``
    for images ("unit" [0, 1], "symmetric" [−1, 1], "standard" zero mean and unit standard deviation
    per channel of the training images, "raw" bytes), ``length`` of the stretches of a text,
    ``seed`` and ``held_out`` for digits.

    >>> split = load("digits")
    >>> tuple(split.train[0].shape), split.classes
    ((1438, 64), 10)
    """
    entry = _entry(name)
    unknown = sorted(set(options) - set(entry.options))
    expected = f"be among those of {name!r}: {', '.join(entry.options)}"
    require(not unknown, "options", expected, ", ".join(unknown))
    chosen = {**entry.options, **options}
    if "length" in chosen:
        return load_text(name, folder, verify).split(chosen["length"])
    read = entry.read(**chosen) if entry.bundled else _read(name, folder, verify, **chosen)
    assert isinstance(read, Split)
    note_data(name, lambda: data_digest(name, folder))
    return read


def load_text(name: str, folder: str | Path | None = None, verify: bool = True) -> Text:
    """A text as token indices with its vocabulary, found and verified as by ``load``."""
    texts = [key for key, entry in CATALOGUE.items() if "length" in entry.options]
    read = _read(require_choice(name, "name", texts), folder, verify)
    assert isinstance(read, Text)
    note_data(name, lambda: data_digest(name, folder))
    return read


def _read(name: str, folder: str | Path | None, verify: bool, **options: Any) -> Split | Text:
    entry, copy = _entry(name), locate(name, folder)
    if copy is None or (copy.missing and verify):
        raise FileNotFoundError(_absence(name, entry, copy, folder))
    if verify:
        check(name, copy.folder)
    read = entry.read(copy.folder, **options)
    train, test = (read.train, read.test) if isinstance(read, Text) else (read[0][0], read[1][0])
    came = len(train), len(test)
    if verify and came != entry.counts:
        raise ValueError(
            f"{copy.folder} must hold {_pair(entry.counts)} samples, got {_pair(came)}; fetch the"
            " data again, or pass verify=False to use a part on purpose"
        )
    return read


def data_digest(name: str, folder: str | Path | None = None) -> str | None:
    """A digest of a data set's unpacked files or made tensors; None where it is not here."""
    if _entry(name).bundled:
        return _bundled_digest(name)
    copy = locate(name, folder)
    if copy is None:
        return None
    places = {file.name: file.find(copy.folder) for file in copy.form}
    lines = [f"{file} {file_digest(path)}" for file, path in places.items() if path is not None]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


@cache
def _bundled_digest(name: str) -> str:
    entry = _entry(name)
    split = entry.read(**entry.options)
    assert isinstance(split, Split)
    (x, y), (x_test, y_test) = split
    return digest_tensors({"x": x, "y": y, "x_test": x_test, "y_test": y_test})


def fetch(name: str, folder: str | Path | None = None, mirror: str | None = None) -> Path:
    """Download and verify the files of a data set from the first source that works, and return
    their folder.

    Files that already exist and verify are kept; an interrupted download is resumed. ``folder`` is
    where they go (by default the folder that LAMBDAHAT_DATA names, else the user's cache);
    ``mirror`` is an address to take the files from instead.
    """
    entry = _entry(name)
    expected = "be a data set that is not bundled"
    require(not entry.bundled, "name", expected, repr(name), "it is here already")
    target = Path(folder).expanduser() if folder is not None else roots()[0] / entry.folders[0]
    sources: tuple[Source, ...] = entry.sources if mirror is None else (Mirror(mirror),)
    expected = "be a data set with an open source"
    require(bool(sources), "name", expected, repr(name), f"{entry.manual}: {target}")
    files, failures = [], []
    for file in entry.forms[0]:
        try:
            _verify(file, target)
        except (ValueError, FileNotFoundError):
            files.append(file)
    if not files:
        return target
    target.mkdir(parents=True, exist_ok=True)
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
    """Return the folder of a data set; raise if a file is missing, empty or not the published one.

    Files in ``unpublished`` of the answer are compared by size alone.
    """
    entry = _entry(name)
    copy = locate(name, folder)
    if copy is None or copy.missing:
        raise FileNotFoundError(_absence(name, entry, copy, folder))
    for file in copy.form:
        _verify(file, copy.folder)
    return copy


def locate(name: str, folder: str | Path | None = None) -> Found | None:
    """The most complete copy below the first root that has any of its files, or None."""
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
    if path is None:
        raise FileNotFoundError(f"{folder} must hold {file.name}, got no such file")
    file.verify(path)


def _absence(name: str, entry: DataSet, copy: Found | None, folder: str | Path | None) -> str:
    cure = f"run `lambdahat data fetch {name}`" if entry.sources else entry.manual
    if copy is not None:
        return (
            f"{copy.folder} must hold all files of {name}, got none of {', '.join(copy.missing)};"
            f" {cure}"
        )
    below = " or ".join(map(str, roots() if folder is None else [folder]))
    return (
        f"{name} must be below {below}, in a folder {' or '.join(entry.folders)}, got no such files"
        f" there; {cure}, or name the folder above it in {VARIABLE}"
    )


def _pair(counts: tuple[int, int]) -> str:
    return f"{counts[0]:,} + {counts[1]:,}"
