"""MNIST and Fashion-MNIST from their idx files."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lambdahat._core.check import require
from lambdahat.data.files import CURE, File, contents
from lambdahat.data.splits import Split, image_split

NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def read_idx(path: Path) -> NDArray[np.uint8]:
    """The array in an idx file of bytes: a header 0, 0, 8, ndim, the sizes as big-endian
    integers, then the values.
    """
    data = contents(path)
    known = len(data) >= 4 and data[:3] == b"\0\0\x08" and 1 <= data[3] <= 3
    require(
        known,
        str(path),
        "be an idx file of bytes",
        f"a file that begins with {data[:4].hex()!r}",
        CURE,
    )
    start = 4 + 4 * data[3]
    require(
        len(data) >= start,
        str(path),
        f"have a header of {start} bytes",
        f"{len(data)} bytes in all",
        CURE,
    )
    sizes = struct.unpack(f">{data[3]}I", data[4:start])
    whole = start + math.prod(sizes)
    require(
        len(data) == whole,
        str(path),
        f"hold {whole:,} bytes for {'×'.join(map(str, sizes))} values",
        f"{len(data):,}",
        CURE,
    )
    return np.frombuffer(data, np.uint8, offset=start).reshape(sizes).copy()


def handwriting_files(folder: Path, normalization: str) -> Split:
    """Four idx files as images (n, 1, 28, 28) and labels 0 … 9."""
    parts: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]] = []
    for images_name, labels_name in (NAMES[:2], NAMES[2:]):
        images_path, labels_path = (_found(folder, name) for name in (images_name, labels_name))
        images, labels = read_idx(images_path), read_idx(labels_path)
        require(
            images.ndim == 3 and images.shape[1:] == (28, 28),
            str(images_path),
            "hold images of 28 × 28",
            f"an array {images.shape}",
            CURE,
        )
        require(
            labels.shape == images.shape[:1],
            str(labels_path),
            f"hold {len(images):,} labels",
            f"an array {labels.shape}",
            CURE,
        )
        require(
            len(labels) > 0 and int(labels.max()) < 10,
            str(labels_path),
            "hold labels 0 to 9",
            f"up to {labels.max(initial=0)}",
            CURE,
        )
        parts.append((images[:, None], labels))
    return image_split(parts[0], parts[1], 10, normalization)


def _found(folder: Path, name: str) -> Path:
    path = File(name).find(folder)
    require(
        path is not None, "folder", f"hold {name} or {name}.gz", str(folder), "", FileNotFoundError
    )
    assert path is not None
    return path
