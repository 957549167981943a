"""A data set in memory: training and test samples as tensors, or a tokenised text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lambdahat._core.check import describe, require, require_choice, require_count

Pair = tuple[Tensor, Tensor]
NORMALIZATIONS = ("unit", "symmetric", "standard", "raw")


@dataclass(frozen=True, eq=False)
class Split:
    """``train`` and ``test``, each (inputs, labels); unpacks as ``(x, y), test = split``.

    ``classes`` is the number of classes, or of words for a text.
    """

    train: Pair
    test: Pair
    classes: int

    def __iter__(self) -> Iterator[Pair]:
        return iter((self.train, self.test))

    def __getitem__(self, index: int) -> Pair:
        return (self.train, self.test)[index]

    def __len__(self) -> int:
        return 2

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.train[0].shape[1:])

    @property
    def nbytes(self) -> int:
        """Memory of all four tensors."""
        return sum(tensor.nbytes for pair in self for tensor in pair)

    def to(self, device: torch.device | str) -> Split:
        """The same on a device, in one copy; refused if it would not fit the free memory."""
        place = torch.device(device)
        if place.type == "cuda":
            # torch keeps what it freed
            idle = torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)
            free = torch.cuda.mem_get_info(place)[0] + idle
            if self.nbytes >= free:
                raise ValueError(
                    f"device must have {self.nbytes:,} bytes free for the data, got {free:,}; keep"
                    ' the data on the CPU, or load them with normalization="raw"'
                )
        (x, y), (x_test, y_test) = self
        return Split((x.to(place), y.to(place)), (x_test.to(place), y_test.to(place)), self.classes)


@dataclass(frozen=True, eq=False)
class Text:
    """A tokenised text: ``train``, ``test`` and perhaps ``valid``, (n,) int64, and vocabulary."""

    train: Tensor
    test: Tensor
    vocabulary: tuple[str, ...]
    valid: Tensor | None = None

    def split(self, length: int = 64) -> Split:
        """Disjoint stretches of ``length`` tokens: inputs (n, length), targets one token later."""
        return Split(windows(self.train, length), windows(self.test, length), len(self.vocabulary))

    def decode(self, tokens: Iterable[int], between: str = "") -> str:
        """The text of some tokens."""
        return between.join(self.vocabulary[int(token)] for token in tokens)


def windows(tokens: Tensor, length: int) -> Pair:
    """Inputs (n, length) and targets one token later; an incomplete last stretch is dropped."""
    most = len(tokens) - 1
    count = most // require_count(length, "length", most=most)
    size = count * length
    return tokens[:size].view(count, length), tokens[1 : size + 1].view(count, length)


def image_split(
    train: tuple[NDArray[np.uint8], NDArray[np.integer]],
    test: tuple[NDArray[np.uint8], NDArray[np.integer]],
    classes: int,
    normalization: str,
) -> Split:
    """A split from images (n, C, H, W) of bytes and their labels."""
    require_choice(normalization, "normalization", NORMALIZATIONS)
    images, held_out = torch.from_numpy(train[0]), torch.from_numpy(test[0])
    shift, scale = _affine(images, normalization)
    parts = [images, held_out]
    if normalization != "raw":
        parts = [rescale(part, shift, scale) for part in parts]
    labels = [torch.from_numpy(each.astype(np.int64)) for each in (train[1], test[1])]
    return Split((parts[0], labels[0]), (parts[1], labels[1]), classes)


def rescale(images: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """(images − shift)/scale per channel, as float32, without a second copy."""
    shift, scale = (value.float().view(1, -1, 1, 1) for value in (shift, scale))
    return images.float().sub_(shift).div_(scale)


def _affine(images: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Shift and scale per channel: "unit" [0, 1], "symmetric" [−1, 1], "standard" mean 0, std 1."""
    channels = images.shape[1]
    if kind == "unit":
        return torch.zeros(channels), torch.full((channels,), 255.0)
    if kind == "symmetric":
        return torch.full((channels,), 127.5), torch.full((channels,), 127.5)
    if kind == "raw":
        return torch.zeros(channels), torch.ones(channels)
    moments = [_moments(images[:, channel]) for channel in range(channels)]
    means, deviations = zip(*moments, strict=True)
    return torch.tensor(means), torch.tensor([value or 1.0 for value in deviations])


def _moments(pixels: Tensor) -> tuple[float, float]:
    """Mean and deviation of bytes, exactly, from how often each value occurs."""
    counts = torch.bincount(pixels.flatten(), minlength=256).double()
    values = torch.arange(256, dtype=torch.float64)
    mean = (counts * values).sum() / counts.sum()
    variance = (counts * (values - mean).square()).sum() / counts.sum()
    return float(mean), float(variance.sqrt())


def augment(
    images: Tensor,
    generator: torch.Generator,
    padding: int = 4,
    size: int | None = None,
    flip: bool = True,
) -> Tensor:
    """Pad images (B, C, H, W) with zeros, crop a random square from each, and flip half of them.

    ``size`` is the side of the cut, the image's own by default. Everything is decided by
    ``generator``; one on the CPU gives the same images on any device.

    >>> batch = torch.ones(2, 3, 8, 8)
    >>> tuple(augment(batch, torch.Generator().manual_seed(0)).shape)
    (2, 3, 8, 8)
    """
    require(images.ndim == 4, "images", "be a batch (B, C, H, W)", images)
    require_count(padding, "padding", least=0)
    device = images.device

    def draw(below: int) -> Tensor:
        numbers = torch.randint(0, below, (count, 1), generator=generator, device=generator.device)
        return numbers.to(device)

    count, _, height, width = images.shape
    tall, wide = (height, width) if size is None else (require_count(size, "size"),) * 2
    slack = height + 2 * padding - tall, width + 2 * padding - wide
    if min(slack) < 0:
        raise ValueError(
            f"size must be at most {min(height, width) + 2 * padding}, the padded image's side, got"
            f" {describe(size)}"
        )
    rows = draw(slack[0] + 1) + torch.arange(tall, device=device)
    columns = draw(slack[1] + 1) + torch.arange(wide, device=device)
    if flip:
        columns = torch.where(draw(2) == 1, columns.flip(1), columns)
    pixels = F.pad(images, [padding] * 4).permute(0, 2, 3, 1)
    sample = torch.arange(count, device=device)[:, None, None]
    return pixels[sample, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
