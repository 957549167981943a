"""Handwritten digits that come with the package."""

from __future__ import annotations

from importlib.resources import files

import numpy as np
import torch
from torch import Tensor

from lambdahat._core.check import require
from lambdahat._core.rng import generator
from lambdahat.data.splits import Split


def digits() -> tuple[Tensor, Tensor]:
    """1,797 images of 8 × 8 pixels as x (1797, 64) float32 in [0, 1], and their labels y (1797,)
    int64.

    Source: UCI, Optical Recognition of Handwritten Digits, through scikit-learn (see ``README.md``
    beside this file).

    >>> x, y = digits()
    >>> tuple(x.shape), float(x.max()), y[:5].tolist()
    ((1797, 64), 1.0, [0, 1, 2, 3, 4])
    """
    with (
        files("lambdahat.data").joinpath("digits.npz").open("rb") as stream,
        np.load(stream) as stored,
    ):
        images, labels = stored["images"], stored["labels"]
    return torch.from_numpy(images.astype(np.float32) / 16.0), torch.from_numpy(
        labels.astype(np.int64)
    )


def digits_split(seed: int = 0, held_out: float = 0.2) -> Split:
    """``digits()`` as (training, held-out) pairs, drawn at random by ``seed``; ``held_out`` is
    the second's share.
    """
    require(0 < held_out < 1, "held_out", "lie in (0, 1)", repr(held_out))
    x, y = digits()
    order = torch.randperm(len(x), generator=generator(seed, "digits_split"))
    rest, train = order.split([round(held_out * len(x)), len(x) - round(held_out * len(x))])
    return Split((x[train], y[train]), (x[rest], y[rest]), 10)
