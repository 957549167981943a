"""Tiny files in the standard formats."""

from __future__ import annotations

import gzip
import hashlib
import pickle
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np

from lambdahat.data.catalogue import DataSet
from lambdahat.data.image_files import NAMES
from lambdahat.data.sources import File


def idx(array: np.ndarray) -> bytes:
    """An array of bytes as an idx file."""
    return (
        bytes([0, 0, 8, array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )


def handwriting(train: int = 7, test: int = 5) -> dict[str, np.ndarray]:
    """The four arrays of an MNIST of a few images."""
    rng = np.random.default_rng(0)
    arrays = []
    for count in (train, test):
        arrays += [
            rng.integers(0, 256, (count, 28, 28), np.uint8),
            rng.integers(0, 10, count, np.uint8),
        ]
    return dict(zip(NAMES, arrays, strict=True))


def write_handwriting(
    folder: Path, compressed: bool = False, **counts: int
) -> dict[str, np.ndarray]:
    folder.mkdir(parents=True, exist_ok=True)
    arrays = handwriting(**counts)
    for name, array in arrays.items():
        data = idx(array)
        (folder / (f"{name}.gz" if compressed else name)).write_bytes(
            gzip.compress(data) if compressed else data
        )
    return arrays


def published(
    entry: DataSet, folder: Path, counts: tuple[int, int], sources: tuple = ()
) -> DataSet:
    """The entry as if the files in the folder were the published ones."""
    files = []
    for file in entry.forms[0]:
        path = file.find(folder)
        assert path is not None, file.name
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        files.append(File(file.name, len(data), f"sha256:{hashlib.sha256(data).hexdigest()}"))
    return replace(entry, forms=(tuple(files), *entry.forms[1:]), counts=counts, sources=sources)


def colours(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 3072), np.uint8)


def dump(path: Path, value: object, protocol: int = 2) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(value, protocol=protocol))
