"""Full float32 for our own linear algebra, whatever precision the user allows the model's products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def full_precision() -> Iterator[None]:
    """Matrix products inside run without TF32: three digits would be lost outside every error bar.

    >>> with full_precision():
    ...     torch.backends.cuda.matmul.allow_tf32
    False
    """
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
