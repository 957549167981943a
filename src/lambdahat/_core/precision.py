"""Full float32 for our own linear algebra, whatever precision the user allows the model's
products or autocast sets.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

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


@contextmanager
def default_context() -> Iterator[None]:
    """Leave ``torch.autocast`` and ``torch.inference_mode`` inside: an operator is one matrix in
    every context.

    >>> with torch.autocast("cpu", torch.bfloat16), default_context():
    ...     (torch.eye(2) @ torch.eye(2)).dtype
    torch.float32
    """
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        yield
