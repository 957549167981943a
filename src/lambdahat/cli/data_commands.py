"""``lambdahat data list``, ``fetch`` and ``check``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lambdahat._core.check import require_choice
from lambdahat.cli import exits
from lambdahat.cli.measurements import bars
from lambdahat.cli.printing import print_json, print_table
from lambdahat.data.catalogue import CATALOGUE, check, fetch, locate
from lambdahat.data.sources import File, roots

LISTED = ("data set", "training", "test", "what", "where")
CHECKED = ("data set", "state", "where")
UNPUBLISHED = "no published checksum"


def run_list(as_json: bool) -> int:
    """Every data set, and where its files are."""
    rows = []
    for name, entry in CATALOGUE.items():
        copy = None if entry.bundled else locate(name)
        where = "bundled" if entry.bundled else "not found" if copy is None else str(copy.folder)
        if copy is not None and copy.missing:
            where += f" (without {', '.join(copy.missing)})"
        rows.append((name, entry.counts, entry.description, where))
    if as_json:
        keys = "name", "counts", "description", "where"
        print_json([dict(zip(keys, row, strict=True)) for row in rows])
    else:
        print_table(
            LISTED, [(name, f"{n:,}", f"{m:,}", what, where) for name, (n, m), what, where in rows]
        )
    return exits.OK


def run_fetch(names: Sequence[str], folder: Path | None, mirror: str | None, quiet: bool) -> int:
    """Bring data sets; where nothing works, one line that says what was tried."""
    for name in names:
        require_choice(name, "data set", CATALOGUE)
    if folder is None:
        exits.require_writable(roots()[0], "the folder of the data")
    else:
        exits.require_writable(
            folder if folder == exits.NAMELESS else folder.expanduser(), "--folder"
        )
    for name in names:
        with bars(quiet):
            try:
                place = fetch(name, folder, mirror)
            except ConnectionError as error:
                raise exits.InputError(exits.one_line(error)) from None
        if not quiet:
            print(f"{name}: {place}")
    return exits.OK


def run_check(names: Sequence[str], folder: Path | None, as_json: bool, quiet: bool) -> int:
    """Compare files with their published checksums: those of the names, or of all that are here.

    Where nobody published one, that is said and is no failure: only the size, if known, was
    compared.
    """
    for name in names:
        require_choice(name, "data set", CATALOGUE)
    wanted = names or [
        name for name, entry in CATALOGUE.items() if not entry.bundled and locate(name, folder)
    ]
    rows, wrong, notes = [], [], []
    for name in wanted:
        if CATALOGUE[name].bundled:
            rows.append((name, "right", "bundled"))
            continue
        try:
            copy = check(name, folder)
        except (ValueError, OSError) as error:
            wrong.append(f"{name}: {exits.one_line(error)}")
            rows.append((name, "missing" if isinstance(error, FileNotFoundError) else "wrong", ""))
        else:
            rows.append((name, UNPUBLISHED if copy.unpublished else "right", str(copy.folder)))
            if copy.unpublished:
                notes.append(f"{name}: {_untold(copy.unpublished)}")
    if as_json:
        print_json([dict(zip(("name", "state", "where"), row, strict=True)) for row in rows])
    elif not quiet:
        print_table(CHECKED, rows) if rows else print("no data sets here")
    for line in (*wrong, *notes):
        exits.say(line)
    return exits.NOT_CONVERGED if wrong else exits.OK


def _untold(files: Sequence[File]) -> str:
    """What could not be checked of files without a published checksum, and what was."""
    names = files[0].name if len(files) == 1 else f"{files[0].name} … {files[-1].name}"
    compared = (
        "their sizes are right"
        if all(file.size is not None for file in files)
        else "they are there, not empty"
    )
    return f"{UNPUBLISHED} of {names}; {compared}, other contents would not be noticed"
