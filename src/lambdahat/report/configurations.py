"""The configuration of a run, in full and in one line."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

# what a reader asks for first, in this order
FIRST = (
    "data",
    "network",
    "networks",
    "net",
    "nets",
    "model",
    "training",
    "held_out",
    "test",
    "samples",
    "size",
    "sizes",
    "nodes",
    "epochs",
    "seeds",
    "batch",
    "rate",
)
MOST = 10  # parts of the line
LONG = 80  # letters of one part


def in_full(config: Any) -> dict[str, str]:
    """Every field of a configuration; of one that is no dataclass, none."""
    if not dataclasses.is_dataclass(config):
        return {}
    return {f"config: {f.name}": str(getattr(config, f.name)) for f in dataclasses.fields(config)}


def in_short(config: Any) -> str:
    """What was run, as "data: mnist · training: 4,096 · epochs: 35 / 80": a field of several parts
    has all its values.

    Numbers, words and short lists of them are told, those of ``FIRST`` first; what is zero or empty
    is left out.
    """
    found: dict[str, list[str]] = {}
    for name, value in _scalars(config):
        values = found.setdefault(name, [])
        if (word := _word(value)) not in values:
            values.append(word)
    order = [name for name in FIRST if name in found] + [
        name for name in found if name not in FIRST
    ]
    parts = [f"{name.replace('_', ' ')}: {' / '.join(found[name])}" for name in order]
    return " · ".join([part for part in parts if len(part) <= LONG][:MOST])


def _scalars(config: Any) -> Iterator[tuple[str, Any]]:
    """The fields of a configuration and of those inside it; a field of its own hides one of the
    same name inside.
    """
    if not dataclasses.is_dataclass(config):
        return
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    own = [
        (name, part)
        for name, value in fields.items()
        if value
        for part in _parts(value)
        if _is_scalar(part)
    ]
    yield from own
    names = {name for name, _ in own}
    for value in fields.values():
        for part in _parts(value):
            yield from ((name, inner) for name, inner in _scalars(part) if name not in names)


def _parts(value: Any) -> list[Any]:
    """The members of a list, else the value; a list within a list, and one such as ("ffnn", 2,
    64), is one thing.
    """
    if not isinstance(value, list | tuple):
        return [value]
    if len({isinstance(part, str) for part in value}) > 1:
        return [" ".join(map(str, value))]
    return [" ".join(map(str, part)) if isinstance(part, list | tuple) else part for part in value]


def _is_scalar(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _word(value: Any) -> str:
    return (
        value
        if isinstance(value, str)
        else f"{value:,}"
        if isinstance(value, int)
        else f"{value:.6g}"
    )
