"""Networks by name, made to fit the data."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from torch import nn

from lambdahat._core.check import require, require_choice, require_count

Build = TypeVar("Build", bound=Callable[..., nn.Module])


@dataclass(frozen=True)
class Entry:
    """A registered network; see ``register_model``."""

    build: Callable[..., nn.Module]
    takes: str
    description: str
    side: int | None = None
    parameters: Mapping[int, int] = field(default_factory=dict)
    small: Mapping[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> tuple[str, ...]:
        """The arguments that are not determined by the data."""
        decided = {"inputs", "channels", "classes", "vocabulary", "seed"}
        fixed = self.build.keywords if isinstance(self.build, partial) else {}
        names = inspect.signature(self.build).parameters
        return tuple(name for name in names if name not in decided | set(fixed))


MODELS: dict[str, Entry] = {}
"""The registered networks by name."""


def register_model(
    name: str,
    takes: str,
    description: str,
    parameters: Mapping[int, int] | None = None,
    *,
    side: int | None = None,
    small: Mapping[str, Any] | None = None,
    **fixed: Any,
) -> Callable[[Build], Build]:
    """Register a function that builds a network, for ``make_model`` and the command line.

    The contract tests run over everything that is registered.

    Args:
        name: The name to ask for.
        takes: What one sample is: "vectors" (the function takes ``inputs``, ``classes`` and
            ``seed``), "images" (``channels``, ``classes``, ``seed``) or "tokens" (``vocabulary``,
            ``seed``).
        description: A few words for lists.
        parameters: Published numbers of parameters, by the number of classes.
        side: The height and width of its images, where it takes no others.
        small: Options that make it small enough for a test.
        fixed: Arguments of the function that this name decides.
    """
    require(name not in MODELS, "name", "not be taken", repr(name))
    require_choice(takes, "takes", ("vectors", "images", "tokens"))

    def add(build: Build) -> Build:
        made = partial(build, **fixed) if fixed else build
        MODELS[name] = Entry(made, takes, description, side, parameters or {}, small or {})
        return build

    return add


def make_model(
    name: str, shape: Sequence[int] = (3, 32, 32), classes: int = 10, seed: int = 0, **options: Any
) -> nn.Module:
    """The network ``name`` for samples of ``shape`` and ``classes`` outputs.

    ``shape`` is that of one sample without the batch: (64,), or (channels, height, width). Networks
    that take vectors flatten images first. For language models ``classes`` is the size of the
    vocabulary and ``shape`` plays no part. ``MODELS`` lists the names; the options are the
    arguments of the function of the same name.

    >>> sum(p.numel() for p in make_model("softmax", shape=(1, 28, 28)).parameters())
    7850
    """
    entry = MODELS[require_choice(name, "name", MODELS)]
    require_count(classes, "classes")
    unknown = sorted(set(options) - set(entry.options))
    known = ", ".join(entry.options) or "none"
    require(not unknown, "options", f"be among those of {name!r}: {known}", ", ".join(unknown))
    if entry.takes == "tokens":
        return entry.build(vocabulary=classes, seed=seed, **options)
    for size in shape:
        require_count(size, "shape")
    if entry.takes == "images":
        sides = "height, width" if entry.side is None else f"{entry.side}, {entry.side}"
        fits = len(shape) == 3 and (entry.side is None or tuple(shape[1:]) == (entry.side,) * 2)
        require(fits, "shape", f"be (channels, {sides}) for {name!r}", repr(tuple(shape)))
        return entry.build(channels=shape[0], classes=classes, seed=seed, **options)
    model = entry.build(inputs=math.prod(shape), classes=classes, seed=seed, **options)
    assert isinstance(model, nn.Sequential)
    return model if len(shape) == 1 else nn.Sequential(nn.Flatten(), *model)
