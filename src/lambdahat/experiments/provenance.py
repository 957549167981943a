"""What a cell was made with: versions, commit, processor and threads of the process that ran it."""

from __future__ import annotations

import platform
import subprocess
import sys
from functools import cache
from pathlib import Path

import torch


def made_with(device: str) -> dict[str, str]:
    """Of this process, for a cell on ``device``; what cannot be told is left out, and no path is in it."""
    told = versions() | {"processor": _processor(), "threads": str(torch.get_num_threads())}
    told["gpu"] = torch.cuda.get_device_name(device) if device.startswith("cuda") else ""
    told["commit"] = _commit()
    return {name: text for name, text in told.items() if text}


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
    lines = listed.read_text(encoding="utf-8", errors="replace").splitlines() if listed.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


@cache
def _commit() -> str:
    """The commit of the checkout that this file is part of, with "-dirty" where tracked files differ from it."""
    own = Path(__file__).resolve()
    if not _git(own.parent, "ls-files", "--error-unmatch", own.name):
        return ""  # installed, perhaps inside some other project's checkout
    return _git(own.parent, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str:
    """What git answers; nothing where there is no git or no checkout."""
    try:
        answer = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.strip()
