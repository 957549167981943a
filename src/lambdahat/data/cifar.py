"""CIFAR-10 and CIFAR-100 from their Python or binary files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lambdahat._core.check import describe, require
from lambdahat.data.files import CURE, contents
from lambdahat.data.splits import Split, image_split
from lambdahat.data.unpickling import unpickle

PIXELS = 3 * 32 * 32
Part = tuple[NDArray[np.uint8], NDArray[np.int64]]


def cifar_files(folder: Path, classes: int, normalization: str) -> Split:
    """The batches in a folder as images (n, 3, 32, 32) and labels; of CIFAR-100 the fine ones."""
    train, test = ("train", "test") if classes == 100 else ("data_batch_", "test_batch")
    parts = []
    for prefix in (train, test):
        paths = _batches(folder, prefix)
        parts.append(_joined([read_batch(path, classes) for path in paths]))
    return image_split(parts[0], parts[1], classes, normalization)


def read_batch(path: Path, classes: int) -> Part:
    """One file: pickled, or records of the label's bytes (CIFAR-100: coarse, then fine) and
    3,072 pixels.
    """
    if path.suffix == ".bin":
        width = PIXELS + (2 if classes == 100 else 1)
        data = np.frombuffer(contents(path), np.uint8)
        whole = len(data) > 0 and len(data) % width == 0
        require(
            whole, str(path), f"hold whole records of {width:,} bytes", f"{len(data):,} bytes", CURE
        )
        records = data.reshape(-1, width)
        return checked(records[:, width - PIXELS :], records[:, width - PIXELS - 1], path, classes)
    batch = unpickle(path)
    key = "fine_labels" if classes == 100 else "labels"
    for name in ("data", key):
        require(name in batch, str(path), f"have the entry {name!r}", entries(batch), CURE)
    return checked(batch["data"], batch[key], path, classes)


def entries(batch: Mapping[str, Any]) -> str:
    """The names in a batch for an error message: those that are names, and not too many."""
    names = [
        name if name.isidentifier() and len(name) <= 40 else describe(name)
        for name in sorted(batch)[:8]
    ]
    return ", ".join(names) + (f" and {len(batch) - 8:,} more" if len(batch) > 8 else "") or "none"


def checked(
    data: Any, labels: Any, path: Path, classes: int, first: int = 0, pixels: int = PIXELS
) -> Part:
    """Rows of bytes as images, with as many labels in range, which begin at ``first``."""
    rows = (
        isinstance(data, np.ndarray)
        and data.dtype == np.uint8
        and data.ndim == 2
        and data.shape[1] == pixels
    )
    shown = f"{data.dtype} {data.shape}" if isinstance(data, np.ndarray) else type(data).__name__
    require(rows, str(path), f"hold bytes (n, {pixels})", shown, CURE)
    kinds = {type(label) for label in labels} if isinstance(labels, list) else {type(labels)}
    other = sorted(
        kind.__name__ for kind in kinds - ({int} if isinstance(labels, list) else {np.ndarray})
    )
    require(not other, str(path), f"hold {len(data):,} whole labels", " and ".join(other), CURE)
    numbers = np.asarray(labels)
    whole = numbers.ndim == 1 and numbers.dtype.kind in "iu" and len(numbers) == len(data)
    require(
        whole,
        str(path),
        f"hold {len(data):,} whole labels",
        f"{numbers.dtype} {numbers.shape}",
        CURE,
    )
    inside = len(numbers) > 0 and numbers.min() >= first and numbers.max() < first + classes
    require(
        inside,
        str(path),
        f"hold labels {first} to {first + classes - 1}",
        f"{numbers.min()} to {numbers.max()}" if len(numbers) else "none",
        CURE,
    )
    side = round((pixels // 3) ** 0.5)
    return data.reshape(-1, 3, side, side), numbers.astype(np.int64) - first


def _batches(folder: Path, prefix: str) -> list[Path]:
    """The files of one part: one named ``prefix``, or those numbered from 1 without a gap."""
    single = [path for path in (folder / prefix, folder / f"{prefix}.bin") if path.is_file()]
    if single:
        return single[:1]
    pattern = re.compile(rf"{re.escape(prefix)}(\d+)(\.bin)?")
    named = [(match, path) for path in folder.iterdir() if (match := pattern.fullmatch(path.name))]
    binary = all(match[2] for match, _ in named)
    found = {int(match[1]): path for match, path in named if bool(match[2]) == binary}
    wanted = list(range(1, max(found, default=1) + 1))
    missing = sorted(set(wanted) - set(found))
    require(
        not missing,
        "folder",
        f"hold {prefix}{missing[0] if missing else ''}",
        str(folder),
        "fetch the data again: lambdahat data fetch",
        FileNotFoundError,
    )
    return [found[number] for number in wanted]


def _joined(parts: list[Part]) -> Part:
    return np.concatenate([images for images, _ in parts]), np.concatenate(
        [labels for _, labels in parts]
    )
