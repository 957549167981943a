"""How good the average of the iterates is: of ``averaging=``, or of an optimiser that keeps its
own.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import nn

from lambdahat.problem.batches import Batch
from lambdahat.problem.network import BATCH_NORMS, accumulating
from lambdahat.training.feeding import Feed
from lambdahat.training.subjects import Subject, modes

# statistics of more samples cost a pass and change little (§7.3.1, spectral thesis)
REFRESH_SAMPLES = 10_000


def averaged_model(
    subject: Subject, optimizer: Any, averaging: Any, feed: Feed
) -> nn.Module | None:
    """The averaged model with batch-norm statistics of its own, a copy; None before there is an
    average.
    """
    model: nn.Module | None = None
    if averaging is not None and averaging.count:
        model = averaging.model
    elif subject.model is not None and getattr(optimizer, "averaging", False):
        model = optimizer.averaged_model(subject.model)
    if model is not None:
        _refresh(subject, model, feed)
    return model


@torch.no_grad()
def _refresh(subject: Subject, model: nn.Module, feed: Feed) -> None:
    """Batch-norm statistics of the averaged weights, which no average of statistics gives
    (§7.3.1).
    """
    layers = [
        layer
        for layer in model.modules()
        if isinstance(layer, BATCH_NORMS) and layer.track_running_stats
    ]
    if not layers:
        return
    with modes(model, training=False), accumulating(layers):
        for layer in layers:
            layer.reset_running_stats()
        for batch in _some(feed):
            subject.forward(batch, model)


def _some(feed: Feed) -> Iterator[Batch]:
    """Batches of about ``REFRESH_SAMPLES`` samples."""
    for group in islice(feed.epoch(0), max(1, REFRESH_SAMPLES // feed.step_samples)):
        yield from group
