"""Data sets made in memory: digits, XOR, teacher-student and linear regression."""

from __future__ import annotations

from importlib.resources import files
from itertools import product

import numpy as np
import torch
from torch import Tensor, nn

from lambdahat._core.check import require_count, require_number
from lambdahat._core.rng import generator
from lambdahat.data.catalogue import register_dataset
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
    source = files("lambdahat.data").joinpath("digits.npz")
    with source.open("rb") as stream, np.load(stream) as stored:
        images, labels = stored["images"], stored["labels"]
    pixels, classes = images.astype(np.float32) / 16.0, labels.astype(np.int64)
    return torch.from_numpy(pixels), torch.from_numpy(classes)


@register_dataset(
    "digits",
    "handwritten digits, 8 × 8, with the package",
    (1438, 359),
    {"seed": 0, "held_out": 0.2},
)
def digits_split(seed: int = 0, held_out: float = 0.2) -> Split:
    """``digits()`` split at random by ``seed``; ``held_out`` is the fraction of the test part."""
    x, y = digits()
    order = torch.randperm(len(x), generator=generator(seed, "digits_split"))
    test = _held_out(held_out, len(x))
    rest, train = order[:test], order[test:]
    return Split((x[train], y[train]), (x[rest], y[rest]), 10)


def xor() -> tuple[Tensor, Tensor]:
    """The four points x (4, 2) of ±1 and their labels y (4,) int64, 1 where the two inputs differ.

    >>> x, y = xor()
    >>> x.tolist(), y.tolist()
    ([[-1.0, -1.0], [-1.0, 1.0], [1.0, -1.0], [1.0, 1.0]], [0, 1, 1, 0])
    """
    x = _points(2)
    return x, (x[:, 0] != x[:, 1]).long()


@register_dataset(
    "xord",
    "detection of an XOR among pairs of ±1, made on the spot",
    (12, 10),
    {"pairs": 5, "train": 12, "test": 10, "seed": 0},
)
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
        if require_count(count, name) % 2 != 0:
            raise ValueError(f"{name} must be even: half of it is labelled 1, got {count!r}")
    points = _points(2 * pairs)
    differing = (points.view(-1, pairs, 2).prod(-1) < 0).sum(1)
    half, all_halves = train // 2, (train + test) // 2
    if all_halves > 2**pairs:
        raise ValueError(
            f"train + test must be at most {2 ** (pairs + 1)} for {pairs} pairs, got"
            f" {train + test!r}; raise pairs"
        )
    rng = generator(seed, "xord")
    chosen = [
        pool[torch.randperm(len(pool), generator=rng)[:all_halves]]
        for pool in (points[differing == 0], points[differing == 1])  # no XOR, and one
    ]
    cuts = (slice(half), slice(half, None))
    parts = [torch.cat([pool[cut] for pool in chosen]) for cut in cuts]
    labels = [torch.arange(2).repeat_interleave(len(part) // 2) for part in parts]
    return Split((parts[0], labels[0]), (parts[1], labels[1]), classes=2)


def _points(inputs: int) -> Tensor:
    """All 2^inputs points of ±1."""
    return torch.tensor(list(product((-1.0, 1.0), repeat=inputs)))


@register_dataset(
    "synthetic-regression",
    "a sine and a line of 256 inputs with noise, made on the spot",
    (1600, 400),
    {"samples": 2000, "inputs": 256, "noise": 1.0, "held_out": 0.2, "seed": 0},
)
def synthetic_regression(
    samples: int = 2000,
    inputs: int = 256,
    a: float = 1.0,
    b: float = 2.0,
    c: float = 1.0,
    noise: float = 1.0,
    held_out: float = 0.2,
    seed: int = 0,
) -> Split:
    """y = a·sin(XW) + a·XB + ε (§4.2.3 of the regularization thesis), of shapes (n, inputs) and (n,
    1).

    X is uniform on (0, b), W and B on (0, c), ε normal with standard deviation ``noise``. The
    defaults are those of §5.5, where y has a variance of about 30. The last ``held_out`` of the
    samples are the test part.
    """
    require_count(samples, "samples", least=2)
    require_count(inputs, "inputs")
    for name, value in (("a", a), ("b", b), ("c", c), ("noise", noise)):
        require_number(value, name)
    test = _held_out(held_out, samples)
    rng = generator(seed, "synthetic_regression")
    x = b * torch.rand(samples, inputs, generator=rng, dtype=torch.float64)
    wave, slope = (c * torch.rand(inputs, 1, generator=rng, dtype=torch.float64) for _ in range(2))
    error = noise * torch.randn(samples, 1, generator=rng, dtype=torch.float64)
    y = a * (x @ wave).sin() + a * (x @ slope) + error
    return _split_last(x.float(), y.float(), test)


def teacher_student(
    teacher: nn.Module,
    inputs: int,
    train: int = 1000,
    test: int = 1000,
    noise: float = 0.0,
    seed: int = 0,
) -> Split:
    """Inputs from N(0, I) and a teacher network's outputs, plus Gaussian noise of standard
    deviation ``noise``.

    >>> split = teacher_student(nn.Linear(3, 2), inputs=3, train=8, test=4)
    >>> tuple(split.train[1].shape), tuple(split.test[0].shape)
    ((8, 2), (4, 3))
    """
    for name, count in (("inputs", inputs), ("train", train), ("test", test)):
        require_count(count, name)
    require_number(noise, "noise", "[0, inf)")
    rng = generator(seed, "teacher_student")
    x = torch.randn(train + test, inputs, generator=rng)
    like = next(teacher.parameters(), x)
    modes = [(layer, layer.training) for layer in teacher.modules()]
    with torch.no_grad():
        y = teacher.eval()(x.to(like)).cpu()
    for layer, was_training in modes:
        layer.training = was_training
    return _split_last(x, y + noise * torch.randn(y.shape, generator=rng).to(y), test)


def _held_out(share: float, samples: int) -> int:
    """The samples of a test part of this share; at least one sample is in each part."""
    require_number(share, "held_out", "(0, 1)")
    return min(max(1, round(share * samples)), samples - 1)


def _split_last(x: Tensor, y: Tensor, test: int) -> Split:
    """The last ``test`` samples apart; ``classes`` counts the outputs."""
    return Split((x[:-test], y[:-test]), (x[-test:], y[-test:]), classes=y.shape[1])
