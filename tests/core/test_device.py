"""Where tensors are computed, and what memory they take."""

from __future__ import annotations

import platform
import resource

import pytest
import torch

from lambdahat._core import device


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_freed_tensors_leave_their_pages_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tensors one after another, ever smaller, only the first has new pages."""
    monkeypatch.setattr(device, "_freed_pages", device._FreedPages())
    sizes = [part << 20 for part in (128, 112, 96, 80)]
    with device.keep_freed_pages(), device.keep_freed_pages():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for size in sizes:
            torch.ones(size, dtype=torch.uint8)
        new = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert new < 1.2 * sizes[0] / resource.getpagesize()


def test_a_budget_of_memory_comes_before_kept_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    pages, settings = device._FreedPages(), []
    monkeypatch.setattr(pages, "_set", lambda **values: settings.append(values))
    monkeypatch.setattr(device, "_freed_pages", pages)
    device.give_back_pages(1 << 20)
    device.give_back_pages(1 << 22)  # no more than the smallest budget asks for
    with device.keep_freed_pages():
        pass
    assert settings == [{"MMAP_THRESHOLD": 1 << 20}]
