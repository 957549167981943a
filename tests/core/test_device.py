"""Where tensors are computed, and what memory they take."""

from __future__ import annotations

import platform
import resource

import pytest
import torch

from lambdahat._core.device import keep_freed_pages


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_freed_tensors_leave_their_pages_to_the_next() -> None:
    """Of tensors one after another, ever smaller, only the first has new pages."""
    sizes = [part << 20 for part in (128, 112, 96, 80)]

    def new_pages() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for size in sizes:
            torch.ones(size, dtype=torch.uint8)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    page = resource.getpagesize()
    with keep_freed_pages(), keep_freed_pages():
        assert new_pages() < 1.2 * sizes[0] / page
