"""Reading pickled arrays without running what a pickle may contain."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from lambdahat._check import require
from lambdahat.data.files import CURE, contents


def _bytes_of(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes into pickles of protocol 2; no other codec is let through."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"an encoding {encoding!r}")
    return text.encode("latin1")


def _no_bytes() -> bytes:
    """How it writes no bytes at all; with an argument ``bytes`` would make as many as the file asks for."""
    return b""


_RECONSTRUCT: Any = np.empty(0).__reduce__()[0]
ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _bytes_of,
    ("__builtin__", "bytes"): _no_bytes,
}


class RestrictedUnpickler(pickle.Unpickler):
    """Builds dicts, lists, numbers, text, bytes and numpy arrays, and refuses everything else by name."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name}, which no data set needs") from None


def unpickle(path: Path) -> dict[str, Any]:
    """The dictionary in a pickled batch, with text keys, read by the restricted unpickler.

    Bytes of Python 2 stay bytes.
    """
    try:
        found = RestrictedUnpickler(io.BytesIO(contents(path)), encoding="bytes").load()
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path} must be a pickled dictionary of arrays, got {error or type(error).__name__}; {CURE}"
        ) from None
    require(isinstance(found, dict), str(path), "be a pickled dictionary", f"a {type(found).__name__}", CURE)
    return {key.decode("latin1") if isinstance(key, bytes) else str(key): value for key, value in found.items()}
