"""Random crops and flips of a batch, where the batch is."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lambdahat._core.check import require, require_count


def augment(
    images: Tensor,
    generator: torch.Generator,
    padding: int = 4,
    size: int | None = None,
    flip: bool = True,
) -> Tensor:
    """Pad each of the images (B, C, H, W) with zeros, cut a random square from it, and mirror it
    half of the time.

    ``size`` is the side of the cut, the image's own by default. Everything is decided by
    ``generator``; one on the CPU gives the same images on any device.

    >>> batch = torch.ones(2, 3, 8, 8)
    >>> tuple(augment(batch, torch.Generator().manual_seed(0)).shape)
    (2, 3, 8, 8)
    """
    require(images.ndim == 4, "images", "be a batch (B, C, H, W)", images)
    require_count(padding, "padding", least=0)
    count, _, height, width = images.shape
    tall, wide = (height, width) if size is None else (require_count(size, "size"),) * 2
    slack = height + 2 * padding - tall, width + 2 * padding - wide
    require(
        min(slack) >= 0,
        "size",
        f"be at most {min(height, width) + 2 * padding}, the padded image's side",
        size,
    )
    rows = _starts(count, slack[0], generator, images.device) + torch.arange(
        tall, device=images.device
    )
    columns = _starts(count, slack[1], generator, images.device) + torch.arange(
        wide, device=images.device
    )
    if flip:
        mirrored = torch.randint(0, 2, (count, 1), generator=generator, device=generator.device).to(
            images.device
        )
        columns = torch.where(mirrored == 1, columns.flip(1), columns)
    padded = F.pad(images, [padding] * 4)
    sample = torch.arange(count, device=images.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[sample, rows[:, :, None], columns[:, None, :]].permute(
        0, 3, 1, 2
    )


def _starts(count: int, slack: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Where each cut begins, (B, 1)."""
    return torch.randint(0, slack + 1, (count, 1), generator=generator, device=generator.device).to(
        device
    )
