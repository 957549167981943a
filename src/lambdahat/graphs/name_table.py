"""Names of nodes as numbers 0, 1, …: each text is kept once, and the table that finds it holds
numbers only.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.dtypes import StringDType
from numpy.typing import NDArray

SLOTS = 1 << 10  # at first; a power of two, so that a mask gives the slot
PIECE = 1 << 14  # names hashed again at once when the table grows


class NameTable:
    """Numbers names as they come, a few thousand at a time.

    A dict of 400,000 names of ten letters takes 60 MB, nearly all of it for objects. Here a name
    takes 16 bytes, with its text where that has at most 15, and one to three slots of 4 bytes in a
    table of open addressing. The hash is Python's and differs from run to run; the numbers do not.
    """

    def __init__(self) -> None:
        self._count = 0
        self._text: NDArray[Any] = np.empty(0, dtype=StringDType())
        self._slots = np.full(SLOTS, -1, dtype=np.int32)

    def __len__(self) -> int:
        return self._count

    @property
    def names(self) -> NDArray[Any]:
        """The names by number, (n,)."""
        return self._text[: self._count]

    def numbers(self, names: Collection[str]) -> NDArray[np.int32]:
        """The number of each name, (k,); the names differ, and those that are new are numbered
        on in their order.
        """
        text = np.array(list(names), dtype=StringDType())
        hashes = _hashes(names)
        found = self._find(text, hashes)
        new = np.flatnonzero(found < 0)
        added = np.arange(self._count, self._count + len(new), dtype=np.int32)
        self._reserve(self._count + len(new))
        self._text[added], found[new] = text[new], added
        self._count += len(new)
        self._insert(added, hashes[new])
        return found

    def close(self) -> None:
        """Free all but the names: none is looked up any more."""
        self._text, self._slots = self.names.copy(), np.empty(0, dtype=np.int32)

    def _find(self, text: NDArray[Any], hashes: NDArray[np.int64]) -> NDArray[np.int32]:
        """The numbers of the names, −1 for those that are new: each goes from its slot on to its
        own or a free one.
        """
        found = np.full(len(text), -1, dtype=np.int32)
        mask = len(self._slots) - 1
        left, slots = np.arange(len(text)), hashes & mask
        while len(left):
            held = self._slots[slots]
            taken = held >= 0
            left, slots, held = left[taken], slots[taken], held[taken]
            same = self._text[held] == text[left]
            found[left[same]] = held[same]
            left, slots = left[~same], (slots[~same] + 1) & mask
        return found

    def _insert(self, numbers: NDArray[np.int32], hashes: NDArray[np.int64]) -> None:
        mask = len(self._slots) - 1
        left, slots = numbers, hashes & mask
        while len(left):
            free = self._slots[slots] < 0
            self._slots[slots[free]] = left[free]  # where several want one slot, the last gets it
            out = self._slots[slots] != left
            left, slots = left[out], (slots[out] + 1) & mask

    def _reserve(self, count: int) -> None:
        """Room for that many names, and slots of which a third stay free."""
        if count > len(self._text):
            longer = np.empty(max(count, len(self._text) * 5 // 4), dtype=self._text.dtype)
            longer[: self._count] = self.names
            self._text = longer
        if 3 * count > 2 * len(self._slots):
            self._slots = np.full(1 << (3 * count // 2).bit_length(), -1, dtype=np.int32)
            for first in range(0, self._count, PIECE):
                part = self.names[first : first + PIECE]
                self._insert(
                    np.arange(first, first + len(part), dtype=np.int32), _hashes(part.tolist())
                )


def _hashes(names: Collection[str]) -> NDArray[np.int64]:
    return np.fromiter(map(hash, names), dtype=np.int64, count=len(names))
