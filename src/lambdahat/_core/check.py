"""Errors that name the argument, what was expected, what came, and the cure."""

from __future__ import annotations

import difflib
import math
import numbers
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{k}B": 1000**i for i, k in enumerate("KMGT", 1)}
_UNITS |= {f"{k}iB": 1024**i for i, k in enumerate("KMGT", 1)}

FEW_LETTERS = 3  # from which on the beginning of a name says which
MANY = 30  # choices, beyond which an error that has something better to say does not list them


def describe(value: object) -> str:
    """A short text of any value for an error message: shapes rather than contents."""
    shape = getattr(value, "shape", None)
    if shape is not None and not isinstance(value, type):
        return f"{type(value).__name__} of shape {tuple(shape)}"
    text, kind = " ".join(repr(value).split()), type(value).__name__
    if len(text) <= 80:
        return text
    return f"{text[:60]}…" if text.startswith(kind) else f"{kind} {text[:60]}…"


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


def require_number(value: Any, name: str, interval: str = "(-inf, inf)", cure: str = "") -> float:
    """A real number in an interval such as "[0, 1)", as a ``float``; "[0, inf]" includes infinity.

    >>> require_number(1.5, "momentum", "[0, 1)")
    Traceback (most recent call last):
    ValueError: momentum must lie in [0, 1), got 1.5
    """
    low, high = (float(end) for end in interval[1:-1].split(","))
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if real:
        above = low <= value if interval[0] == "[" else low < value
        below = value <= high if interval[-1] == "]" else value < high
        if above and below:
            return float(value)
    if high < math.inf:
        kind, expected = f"be a number in {interval}", f"lie in {interval}"
    else:
        least = "of at least" if interval[0] == "[" else "above"
        bound = "" if low == -math.inf else f" {least} {low:g}"
        kind = f"be a number{bound}"
        expected = kind if interval[-1] == "]" else f"be a finite number{bound}"
    if not real:
        raise TypeError(message(name, kind, describe(value), cure))
    raise ValueError(message(name, expected, repr(value), cure))


def require_positive(value: Any, name: str, cure: str = "") -> float:
    """A finite real number above 0, as a ``float``."""
    return require_number(value, name, "(0, inf)", cure)


def require_type(value: Any, kind: Any, name: str, expected: str, cure: str = "") -> None:
    """Raise ``TypeError`` unless ``value`` is an instance of ``kind``, which may be ``Callable``.

    >>> require_type(3, str, "metric", "be the name of a column", "such as 'loss'")
    Traceback (most recent call last):
    TypeError: metric must be the name of a column, got 3; such as 'loss'
    """
    if not isinstance(value, kind):
        raise TypeError(message(name, expected, describe(value), cure))


def require_shape(value: Any, shape: Sequence[int | str], name: str, cure: str = "") -> None:
    """Raise ``ValueError`` unless an array has a shape; a name in it stands for any length.

    >>> import numpy as np
    >>> require_shape(np.zeros((3, 2)), (4, "k"), "start")
    Traceback (most recent call last):
    ValueError: start must have shape (4, k), got ndarray of shape (3, 2)
    """
    came = getattr(value, "shape", ())
    fits = [isinstance(n, str) or n == m for n, m in zip(shape, came, strict=False)]
    if len(came) != len(shape) or not all(fits):
        text = ", ".join(map(str, shape)) + "," * (len(shape) == 1)
        raise ValueError(message(name, f"have shape ({text})", describe(value), cure))


def require_finite(value: Any, name: str, cure: str = "") -> None:
    """Raise ``ValueError`` if a number, an array or a tensor holds NaN or infinity."""
    import numpy as np

    finite = value.isfinite() if hasattr(value, "isfinite") else np.isfinite(value)
    if not bool(finite.all()):
        raise ValueError(message(name, "be finite", "NaN or infinity in it", cure))


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
    elif isinstance(default, tuple) and default and _all_real(default):
        alike = isinstance(value, tuple | list) and _all_real(value)
        require(alike, name, f"be numbers such as {default}", describe(value), error=TypeError)
        for item in value:
            require_like(item, None, name)


def _all_real(values: Sequence[Any]) -> bool:
    return all(isinstance(value, numbers.Real) for value in values)


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
    """Suggest the choice that is spelt most like an unknown one, else those that begin with it.

    >>> did_you_mean("ngd", ("ngd-widths", "ngd-epochs", "xor"))
    "did you mean 'ngd-widths' or 'ngd-epochs'?"
    """
    if not isinstance(value, str) or value in choices:
        return ""
    folded = {choice.casefold(): choice for choice in choices}
    near = difflib.get_close_matches(value.casefold(), folded, 1)
    if len(value) >= FEW_LETTERS:
        near = near or [choice for choice in folded if choice.startswith(value.casefold())]
    *first, last = [repr(folded[choice]) for choice in near] or [""]
    return f"did you mean {', '.join(first)}{' or ' if first else ''}{last}?" if last else ""


def require_choice(value: Any, name: str, choices: Collection[str], cure: str = "") -> str:
    """One of the named choices; the error names the one that is spelt most like what came.

    >>> require_choice("mnst", "data set", ("digits", "mnist"))
    Traceback (most recent call last):
    ValueError: data set must be one of 'digits', 'mnist', got 'mnst'; did you mean 'mnist'?
    >>> require_choice("fitt", "case", [*map(str, range(40)), "fit"], "--list lists them")
    Traceback (most recent call last):
    ValueError: case must be one of 41 names, got 'fitt'; did you mean 'fit'?; --list lists them
    """
    if isinstance(value, str) and value in choices:
        return str(value)
    known = ", ".join(repr(choice) for choice in choices)
    near = did_you_mean(value, choices)
    if len(choices) > MANY and (near or cure):
        known = f"{len(choices)} names"
    cure = "; ".join(part for part in (near, cure) if part)
    raise ValueError(message(name, f"be one of {known}", describe(value), cure))


def why_not(path: str | Path, kind: str = "file") -> str:
    """Why a path is not an existing ``kind``, "file" or "folder", in a few words.

    >>> why_not("/", "file"), why_not("/no/such/place", "folder")
    ('it is a folder', 'no such folder')
    """
    other = os.path.isdir(path) if kind == "file" else os.path.isfile(path)
    return f"it is a {'folder' if kind == 'file' else 'file'}" if other else f"no such {kind}"


def memory_bytes(memory: Any, least: int = 1) -> int | None:
    """A budget as a number of bytes; "4GiB" and "500MB" are known.

    >>> memory_bytes("4GiB"), memory_bytes(1000), memory_bytes(None)
    (4294967296, 1000, None)
    """
    if memory is None:
        return None
    if not isinstance(memory, str):
        return require_count(memory, "memory", least)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)\s*", memory)
    if match is None or match[2] not in _UNITS:
        expected = 'be a number of bytes or a text such as "4GiB" or "500MB"'
        raise ValueError(message("memory", expected, describe(memory)))
    return require_count(int(float(match[1]) * _UNITS[match[2]]), "memory", least)
