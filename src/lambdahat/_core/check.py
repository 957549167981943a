"""Errors that name the argument, what was expected, what came, and the cure."""

from __future__ import annotations

import difflib
import math
import numbers
import re
from collections.abc import Collection
from typing import Any

_UNITS = {
    "": 1,
    "B": 1,
    **{f"{k}B": 1000**i for i, k in enumerate("KMGT", 1)},
    **{f"{k}iB": 1024**i for i, k in enumerate("KMGT", 1)},
}


def describe(value: object) -> str:
    """A short text of any value for an error message: shapes rather than contents."""
    shape = getattr(value, "shape", None)
    if shape is not None and not isinstance(value, type):
        return f"{type(value).__name__} of shape {tuple(shape)}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{type(value).__name__} {text[:60]}…"


def require(
    condition: bool,
    name: str,
    expected: str,
    got: object,
    cure: str = "",
    error: type[Exception] = ValueError,
) -> None:
    """Raise ``error`` unless ``condition``: "<name> must <expected>, got <got>; <cure>".

    >>> require(False, "depth", "lie in [1, 5]", 9, "at this size op.dense() is exact")
    Traceback (most recent call last):
    ValueError: depth must lie in [1, 5], got 9; at this size op.dense() is exact
    """
    if not condition:
        raise error(message(name, expected, got, cure))


def message(name: str, expected: str, got: object, cure: str = "") -> str:
    """The text of an error, for a ``raise`` that type checkers understand."""
    text = got if isinstance(got, str) else describe(got)
    return f"{name} must {expected}, got {text}" + (f"; {cure}" if cure else "")


def require_count(
    value: Any, name: str, least: int = 1, most: int | None = None, cure: str = ""
) -> int:
    """An integer in [least, most], as an ``int``."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if whole and least <= value and (most is None or value <= most):
        return int(value)
    bounds = f"of at least {least}" if most is None else f"in [{least}, {most}]"
    require(whole, name, f"be an integer {bounds}", describe(value), cure, TypeError)
    raise ValueError(message(name, f"be an integer {bounds}", repr(value), cure))


def require_positive(value: Any, name: str, cure: str = "") -> float:
    """A finite real number above 0, as a ``float``."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if real and 0 < value < float("inf"):
        return float(value)
    require(real, name, "be a number above 0", describe(value), cure, TypeError)
    raise ValueError(message(name, "be a finite number above 0", repr(value), cure))


def require_like(value: Any, default: Any, name: str, hint: str = "") -> None:
    """Refuse an option of another kind than its default: text for a number, a number for a truth
    value, and NaN.

    ``hint`` is the annotation; where it allows text, text is left to whoever reads the option.
    """
    tensor = hasattr(value, "shape")
    if isinstance(value, float):
        require(not math.isnan(value), name, "be a number", "nan")
    if tensor or default is None or ("str" in hint and isinstance(value, str)):
        return
    if isinstance(default, bool):
        require(isinstance(value, bool), name, "be True or False", describe(value), error=TypeError)
    elif isinstance(default, numbers.Real):
        fits = value is None or (isinstance(value, numbers.Real) and not isinstance(value, bool))
        require(fits, name, "be a number", describe(value), error=TypeError)
    elif (
        isinstance(default, tuple)
        and default
        and all(isinstance(item, numbers.Real) for item in default)
    ):
        alike = isinstance(value, tuple | list) and all(
            isinstance(item, numbers.Real) for item in value
        )
        require(alike, name, f"be numbers such as {default}", describe(value), error=TypeError)
        for item in value:
            require_like(item, None, name)


def require_interval(value: Any, name: str, least: float = -math.inf) -> tuple[float, float]:
    """Two finite numbers, least < low < high, of any sequence, as floats."""
    try:
        low, high = (float(end) for end in value)
        fine = least < low < high < math.inf
    except (TypeError, ValueError):
        low, high, fine = 0.0, 0.0, False
    form = "(low, high) with low < high" if least == -math.inf else f"{least:g} < low < high"
    require(fine, name, f"be two finite numbers {form}", repr(value))
    return low, high


def did_you_mean(value: Any, choices: Collection[str]) -> str:
    """A question with the choice that is spelt most like an unknown one; empty where none is
    near.
    """
    if not isinstance(value, str) or value in choices:
        return ""
    folded = {choice.casefold(): choice for choice in choices}
    near = difflib.get_close_matches(value.casefold(), folded, 1)
    return f"did you mean {folded[near[0]]!r}?" if near else ""


def require_choice(value: Any, name: str, choices: Collection[str], cure: str = "") -> str:
    """One of the named choices; the error names the one that is spelt most like what came.

    >>> require_choice("mnst", "data set", ("digits", "mnist"))
    Traceback (most recent call last):
    ValueError: data set must be one of 'digits', 'mnist', got 'mnst'; did you mean 'mnist'?
    """
    if isinstance(value, str) and value in choices:
        return str(value)
    known = ", ".join(repr(choice) for choice in choices)
    cure = "; ".join(part for part in (did_you_mean(value, choices), cure) if part)
    raise ValueError(message(name, f"be one of {known}", describe(value), cure))


def memory_bytes(memory: Any, least: int = 1) -> int | None:
    """A budget as a number of bytes; "4GiB" and "500MB" are known.

    >>> memory_bytes("4GiB"), memory_bytes(1000), memory_bytes(None)
    (4294967296, 1000, None)
    """
    if memory is None:
        return None
    if not isinstance(memory, str):
        return require_count(memory, "memory", least)
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)\s*", memory)
    if found is None or found[2] not in _UNITS:
        expected = 'be a number of bytes or a text such as "4GiB" or "500MB"'
        raise ValueError(message("memory", expected, describe(memory)))
    return require_count(int(float(found[1]) * _UNITS[found[2]]), "memory", least)
