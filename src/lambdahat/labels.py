"""Labels of language models: which of them count, the causal shift, and n in tokens or in sequences.

With ℓ_it the loss of label t of sequence i and C the labels that count (not −100), counted in "tokens" the loss is
L = (1/|C|) Σ_C ℓ_it and n = |C|; counted in "sequences" L = (1/n) Σ_i Σ_{t ∈ C_i} ℓ_it and n is the number of
sequences. Either way n·L is the negative log-likelihood of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lambdahat.batches import Batch, take

IGNORE = -100
COUNTS = ("tokens", "sequences")
KEY = "labels"
FEW = 2


def token_labels(data: Any) -> Tensor | None:
    """The labels (B, …) of a dict batch where they are class numbers, else None."""
    labels = data.get(KEY) if isinstance(data, Mapping) else None
    known = isinstance(labels, Tensor) and labels.ndim > 0 and not labels.is_floating_point()
    return labels if known else None


def shifted(labels: Tensor) -> Tensor:
    """What each position of a causal model predicts: the next label (B, T), and nothing (−100) at the last."""
    return torch.cat([labels[:, 1:], labels.new_full(labels[:, :1].shape, IGNORE)], dim=1)


@torch.no_grad()
def shifts_labels(own_loss: Callable[[Batch], Any], batches: Iterable[Batch]) -> bool:
    """Whether a model moves its labels by one before it compares them, as causal language models do.

    It is asked for the loss of the first label of a sequence alone: a model that moves its labels never sees that one,
    and its mean over nothing is NaN or 0. One that takes no labels moves none.
    """
    for batch in batches:
        labels = token_labels(batch.data)
        if labels is None or labels.ndim < 2:
            return False
        rows = labels[:, 0].ne(IGNORE).nonzero().flatten()[:FEW]
        if len(rows) == 0:
            continue
        few = take(batch, rows)
        first = few.data[KEY].clone()
        first[:, 1:] = IGNORE
        try:
            value = float(own_loss(Batch({**few.data, KEY: first}, few.size)))
        except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError):
            return False
        return value != value or value == 0.0
    return False
