"""Activation checkpointing, which the passes of a problem go without.

``torch.utils.checkpoint`` runs parts of a model again in the backward pass. By then the parameters that the pass was
called with are no longer in the modules, so that it would see the model's own instead: a gradient at other parameters
would be wrong without a word. Neither does it take forward mode. Where memory is short, a problem's ``memory`` cuts
batches instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.utils.checkpoint as checkpointing

NON_REENTRANT, REENTRANT = "_checkpoint_without_reentrant_generator", "CheckpointFunction"


class _Plain:
    """In place of the autograd function that recomputes."""

    @staticmethod
    def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
        return function(*args)


def _nothing(*_: Any, **__: Any) -> Iterator[None]:
    """In place of what surrounds a checkpointed call: it is resumed once before and once after."""
    yield


@contextmanager
def nothing_recomputed() -> Iterator[None]:
    """Calls of ``torch.utils.checkpoint.checkpoint`` inside are plain calls."""
    found = {name: getattr(checkpointing, name) for name in (NON_REENTRANT, REENTRANT)}
    try:
        setattr(checkpointing, NON_REENTRANT, _nothing)
        setattr(checkpointing, REENTRANT, _Plain)
        yield
    finally:
        for name, value in found.items():
            setattr(checkpointing, name, value)
