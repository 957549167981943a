"""What a cell was made with: versions, commit, processor and threads of the process that ran it,
and its data.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lambdahat.data.loading import data_digest
from lambdahat.experiments.outside import ABSENT, outside_digest

DATA = "data digests"  # the fact that has those of all data that a cell has loaded


def made_with(device: str, data: Mapping[str, str] | None = None) -> dict[str, str]:
    """Of this process, for a cell on ``device``; what cannot be told is left out, and no path is in
    it.

    ``data`` has the digests of what the cell has loaded (``noting_data``).
    """
    told = versions() | {"processor": _processor(), "threads": str(torch.get_num_threads())}
    told["gpu"] = torch.cuda.get_device_name(device) if device.startswith("cuda") else ""
    told["commit"] = _commit()
    told[DATA] = ", ".join(f"{name} {digest}" for name, digest in (data or {}).items())
    return {name: text for name, text in told.items() if text}


def data_of(made: Mapping[str, str]) -> dict[str, str]:
    """The digests of a cell's data, by name; none for cells of early versions."""
    parts = [part.rpartition(" ") for part in made.get(DATA, "").split(", ") if part]
    return {name: digest for name, _, digest in parts}


def changed_data(made: Mapping[str, str], cell: Mapping[str, Any]) -> list[str]:
    """Those data of a cell that are others now, as "name (was …, is …)"; of data that are not
    here nothing is said.
    """
    found = []
    for name, told in data_of(made).items():
        folder, _, stem = name.rpartition("/")
        with suppress(FileNotFoundError):  # the cell's own folder of data
            now = (
                outside_digest(folder, stem)
                if folder
                else data_digest(name, cell.get("folder") or None)
            )
            if now not in (None, ABSENT, told):
                found.append(f"{name} (was {told[:12]}, is {now[:12]})")
    return found


def versions() -> dict[str, str]:
    """Those of this package, of torch and of Python, and the kind of machine."""
    own = sys.modules["lambdahat"].__version__  # importing the package here would be a circle
    return {
        "lambdahat": own,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


@cache
def _processor() -> str:
    """The model's name; ``platform`` does not know it on Linux."""
    listed = Path("/proc/cpuinfo")
    lines = (
        listed.read_text(encoding="utf-8", errors="replace").splitlines()
        if listed.is_file()
        else []
    )
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


@cache
def _commit() -> str:
    """The commit of the checkout that this file is part of, with "-dirty" where tracked files
    differ from it.
    """
    own = Path(__file__).resolve()
    if not _git(own.parent, "ls-files", "--error-unmatch", own.name):
        return ""  # installed, perhaps inside some other project's checkout
    return _git(own.parent, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str:
    """What git answers; nothing where there is no git or no checkout."""
    try:
        answer = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.strip()
