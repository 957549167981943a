"""Where tensors are computed, and what memory they take."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from lambdahat._core import device

PAGES = """
import resource
import torch
from lambdahat._core.device import keep_freed_pages
sizes = [part << 20 for part in (128, 112, 96, 80)]
with keep_freed_pages(), keep_freed_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for size in sizes:
        torch.ones(size, dtype=torch.uint8)
    new = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(new * resource.getpagesize() / sizes[0])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_freed_tensors_leave_their_pages_to_the_next() -> None:
    """Of tensors one after another, ever smaller, only the first has new pages; in a process of its
    own, for the heap of another may have holes.
    """
    command = [sys.executable, "-c", PAGES]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert float(shown) < 1.2


def test_a_budget_of_memory_comes_before_kept_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    pages, settings = device._FreedPages(), []
    monkeypatch.setattr(pages, "_set", lambda **values: settings.append(values))
    pages.lower(1 << 20)
    pages.lower(1 << 22)  # no more than the smallest budget asks for
    with pages.held():
        pass
    assert settings == [{"MMAP_THRESHOLD": 1 << 20}]
