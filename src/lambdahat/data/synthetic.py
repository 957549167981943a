"""Regression data made from a formula or from a network."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lambdahat._core.check import require, require_count
from lambdahat._core.rng import generator
from lambdahat.data.splits import Split


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

    X is uniform on (0, b), W and B on (0, c), ε normal with deviation ``noise``. The defaults are
    those of §5.5, where y has a variance of about 30. The last ``held_out`` of the samples are the
    test part.
    """
    require_count(samples, "samples", least=2)
    require_count(inputs, "inputs")
    require(0 < held_out < 1, "held_out", "lie in (0, 1)", repr(held_out))
    rng = generator(seed, "synthetic_regression")
    x = b * torch.rand(samples, inputs, generator=rng, dtype=torch.float64)
    wave, slope = (c * torch.rand(inputs, 1, generator=rng, dtype=torch.float64) for _ in range(2))
    y = (
        a * (x @ wave).sin()
        + a * (x @ slope)
        + noise * torch.randn(samples, 1, generator=rng, dtype=torch.float64)
    )
    return _parted(x.float(), y.float(), max(1, round(held_out * samples)))


def teacher_student(
    teacher: nn.Module,
    inputs: int,
    train: int = 1000,
    test: int = 1000,
    noise: float = 0.0,
    seed: int = 0,
) -> Split:
    """Inputs from N(0, I) and a teacher network's outputs for them, plus normal noise of deviation
    ``noise``.

    >>> split = teacher_student(nn.Linear(3, 2), inputs=3, train=8, test=4)
    >>> tuple(split.train[1].shape), tuple(split.test[0].shape)
    ((8, 2), (4, 3))
    """
    for name, count in (("inputs", inputs), ("train", train), ("test", test)):
        require_count(count, name)
    require(noise >= 0, "noise", "be at least 0", repr(noise))
    rng = generator(seed, "teacher_student")
    x = torch.randn(train + test, inputs, generator=rng)
    like = next(teacher.parameters(), x)
    was_training = teacher.training
    with torch.no_grad():
        y = teacher.eval()(x.to(like)).cpu()
    teacher.train(was_training)
    return _parted(x, y + noise * torch.randn(y.shape, generator=rng).to(y), test)


def _parted(x: Tensor, y: Tensor, test: int) -> Split:
    """The last ``test`` samples apart; ``classes`` counts the outputs."""
    return Split((x[:-test], y[:-test]), (x[-test:], y[-test:]), classes=y.shape[1])
