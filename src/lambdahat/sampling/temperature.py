"""The inverse temperature nβ, by name or by number."""

from __future__ import annotations

import math
from typing import Any

from lambdahat._check import describe, require

NAMES = ("n/log n", "batch")


def inverse_temperature(nbeta: Any, num_samples: int, batch_size: int) -> tuple[float, str]:
    """nβ and how it was found: "n/log n" (β = 1/ln n, Watanabe 2013), "batch" (B/ln B, as devinterp), or a number.

    >>> inverse_temperature("n/log n", 1000, 512)
    (144.76482730108395, 'n/log n, n = 1000')
    """
    if isinstance(nbeta, str):
        require(nbeta in NAMES, "nbeta", f"be a number or one of {', '.join(map(repr, NAMES))}", describe(nbeta))
        size, letter = (num_samples, "n") if nbeta == "n/log n" else (batch_size, "B")
        require(size > 2, "nbeta", "be a number for so little data", f"{nbeta!r} with {letter} = {size}",
                "for a loss without data give num_samples to from_function, or a number here")  # fmt: skip
        name = nbeta if letter == "n" else "B/log B"
        return size / math.log(size), f"{name}, {letter} = {size}"
    number = isinstance(nbeta, int | float) and not isinstance(nbeta, bool)
    require(number, "nbeta", f"be a number or one of {', '.join(map(repr, NAMES))}", describe(nbeta), error=TypeError)
    require(0 < nbeta < math.inf, "nbeta", "be a finite number above 0", repr(nbeta))
    return float(nbeta), "given"
