"""Files that some experiments take where they are there: graphs and matrices in the folders of
data.
"""

from __future__ import annotations

from pathlib import Path

from lambdahat.data.files import file_digest, note_data, roots

# in place of the digest of a file that was not there, so that something else was measured
ABSENT = "absent"


def outside_file(folder: str, stem: str) -> Path | None:
    """``<stem>.*`` in ``folder`` below LAMBDAHAT_DATA or the user's own cache; None where there
    is none.
    """
    note_data(f"{folder}/{stem}", lambda: outside_digest(folder, stem))
    return _find(folder, stem)


def outside_digest(folder: str, stem: str) -> str:
    """A digest of the file as it is now."""
    path = _find(folder, stem)
    return ABSENT if path is None else file_digest(path)[:32]


def _find(folder: str, stem: str) -> Path | None:
    return next(
        (path for root in roots() for path in sorted((root / folder).glob(f"{stem}.*"))), None
    )
