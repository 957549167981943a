"""Labels of language models: which of them count, the causal shift, and n in tokens or in
sequences.

With ℓ_it the loss of label t of sequence i and C the labels that count (not −100), counted in
"tokens" the loss is L = (1/|C|) Σ_C ℓ_it and n = |C|; counted in "sequences" L = (1/n) Σ_i Σ_{t ∈
C_i} ℓ_it and n is the number of sequences. Either way n·L is the negative log-likelihood of the
data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lambdahat.problem.batches import Batch, take

IGNORE = -100
COUNTS = ("tokens", "sequences")
KEY = "labels"
FEW = 2


def token_labels(data: Any) -> Tensor | None:
    """The labels (B, …) of a dict batch where they are class numbers, else None."""
    labels = data.get(KEY) if isinstance(data, Mapping) else None
    known = isinstance(labels, Tensor) and labels.ndim > 0 and not labels.is_floating_point()
    return labels if known else None


def shifted(labels: Tensor, ignored: int = IGNORE) -> Tensor:
    """What each position of a causal model predicts: the next label (B, T), and nothing
    (``ignored``) at the last.
    """
    return torch.cat([labels[:, 1:], labels.new_full(labels[:, :1].shape, ignored)], dim=1)


def labelled(batches: Iterable[Batch]) -> Batch | None:
    """The first batch with a label that counts, where labels have several positions (B, T, …);
    else None.
    """
    for batch in batches:
        labels = token_labels(batch.data)
        if labels is None or labels.ndim < 2:
            return None
        if bool(labels.ne(IGNORE).any()):
            return batch
    return None


@torch.no_grad()
def shifts_labels(own_loss: Callable[[Any], Any], batch: Batch) -> bool:
    """Whether a model moves its labels by one before it compares them, as causal language models
    do.

    A model that moves its labels never sees the first one, which is written here whatever the data
    have there. Alone, it leaves the loss at that of no label (NaN, or 0). Any other model shows at
    least one of several classes: it may be sure of one, with a loss of 0. A NaN may also come from
    a first position that is padding: then it comes back where the other labels are there too. A
    model that takes no labels moves none.
    """
    rows = batch.data[KEY].ne(IGNORE).flatten(1).any(1).nonzero().flatten()[:FEW]
    for some in (take(batch, rows), batch):  # all of it for a model of one batch size
        try:
            return _first_unseen(own_loss, some)
        except (TypeError, KeyError, AttributeError):
            return False
        except (RuntimeError, ValueError, IndexError):
            continue
    return False


def _first_unseen(own_loss: Callable[[Any], Any], batch: Batch) -> bool:
    labels: Tensor = batch.data[KEY]
    none, classes = torch.full_like(labels, IGNORE), _some_classes(labels)

    def loss(first: int, others: Tensor) -> float:
        changed = others.clone()
        changed[:, 0] = first
        return float(own_loss({**batch.data, KEY: changed}))

    nothing = loss(IGNORE, none)
    if not all(_same(loss(first, none), nothing) for first in classes):
        return False
    padding = (
        math.isnan(nothing)
        and math.isnan(loss(classes[-1], labels))
        and not math.isnan(loss(IGNORE, labels))
    )
    return not padding


def _some_classes(labels: Tensor) -> list[int]:
    """Two classes or more that exist: the lowest and highest of the labels, and 0, or 1 where
    there is no other.
    """
    known = labels[labels >= 0]
    low, high = (int(known.min()), int(known.max())) if len(known) else (0, 0)
    return sorted({high, low, 0 if high > 0 else 1})


def _same(first: float, second: float) -> bool:
    """Whether two losses are one, but for the order of sums; NaN is itself."""
    return math.isclose(first, second, rel_tol=1e-4) or (math.isnan(first) and math.isnan(second))


@torch.no_grad()
def takes_labels(own_loss: Callable[[Any], Any], batch: Batch) -> bool:
    """Whether a model computes a loss of labels, or would but for an error that is not about its
    arguments.
    """
    try:
        return own_loss(take(batch, slice(FEW)).data) is not None
    except TypeError:
        return False
    except (RuntimeError, ValueError, IndexError, KeyError, AttributeError):
        return True
