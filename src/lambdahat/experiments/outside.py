"""Files that some experiments take where they are there: graphs and matrices in the folders of data."""

from __future__ import annotations

from pathlib import Path

from lambdahat.data.files import roots


def outside_file(folder: str, stem: str) -> Path | None:
    """``<stem>.*`` in ``folder`` below LAMBDAHAT_DATA or the user's own cache; None where there is none."""
    return next((path for root in roots() for path in sorted((root / folder).glob(f"{stem}.*"))), None)
