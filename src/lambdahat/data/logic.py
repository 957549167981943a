"""XOR, and the detection of an XOR among pairs of inputs."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from lambdahat._core.check import require, require_count
from lambdahat._core.rng import generator
from lambdahat.data.splits import Split


def xor() -> tuple[Tensor, Tensor]:
    """The four points x (4, 2) of ±1 and their labels y (4,) int64, 1 where the two inputs differ.

    >>> x, y = xor()
    >>> x.tolist(), y.tolist()
    ([[-1.0, -1.0], [-1.0, 1.0], [1.0, -1.0], [1.0, 1.0]], [0, 1, 1, 0])
    """
    x = _points(2)
    return x, (x[:, 0] != x[:, 1]).long()


def xord(pairs: int = 5, train: int = 12, test: int = 10, seed: int = 0) -> Split:
    """XOR detection (§4.2.1 of the regularization thesis): does any of the ``pairs`` of inputs hold
    an XOR?

    Inputs are ±1, of shape (n, 2·pairs). Half of each part is labelled 1 and holds an XOR in
    exactly one pair; half is labelled 0 and holds none. No point is drawn twice, so that no test
    sample has been trained on.

    >>> (x, y), _ = xord()
    >>> tuple(x.shape), int(y.sum())
    ((12, 10), 6)
    """
    require_count(pairs, "pairs", most=10)
    for name, count in (("train", train), ("test", test)):
        require(
            require_count(count, name) % 2 == 0,
            name,
            "be even: half of it is labelled 1",
            repr(count),
        )
    points = _points(2 * pairs)
    differing = (points.view(-1, pairs, 2).prod(-1) < 0).sum(1)
    half, all_halves = train // 2, (train + test) // 2
    require(
        all_halves <= 2**pairs,
        "train + test",
        f"be at most {2 ** (pairs + 1)} for {pairs} pairs",
        repr(train + test),
        "raise pairs",
    )
    rng = generator(seed, "xord")
    chosen = [
        pool[torch.randperm(len(pool), generator=rng)[:all_halves]]
        for pool in _pools(points, differing)
    ]
    parts = [
        torch.cat([drawn[part] for drawn in chosen]) for part in (slice(half), slice(half, None))
    ]
    labels = [torch.arange(2).repeat_interleave(len(part) // 2) for part in parts]
    return Split((parts[0], labels[0]), (parts[1], labels[1]), classes=2)


def _pools(points: Tensor, differing: Tensor) -> tuple[Tensor, Tensor]:
    """The points with no XOR, and those with one."""
    return points[differing == 0], points[differing == 1]


def _points(inputs: int) -> Tensor:
    """All 2^inputs points of ±1."""
    return torch.tensor(list(product((-1.0, 1.0), repeat=inputs)))
