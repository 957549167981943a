"""Where tensors are computed, and what memory they take."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from lambdahat._core import device
from lambdahat._core.device import StraightLine

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


# rows by columns: too small for another kernel, large enough, and with more terms than one sum has
SHAPES = [(3, 4, 5), (300, 784, 256), (64, 4500, 96)]
LAYOUTS = {
    "rows": lambda t: t,
    "columns": lambda t: t.T.contiguous().T,
    "part of a row": lambda t: torch.cat([t, t], dim=1)[:, : t.shape[1]],
    "part of a column": lambda t: torch.cat([t, t])[: len(t)].T.contiguous().T,
    "every other": lambda t: t.repeat_interleave(2, dim=1)[:, ::2],
}


@pytest.mark.parametrize("left", LAYOUTS)
@pytest.mark.parametrize("right", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.no_grad()
def test_products_are_those_in_float64(shape: tuple[int, int, int], left: str, right: str) -> None:
    m, k, n = shape
    rng = torch.Generator().manual_seed(0)
    a = LAYOUTS[left](torch.randn(m, k, generator=rng))
    b = LAYOUTS[right](torch.randn(k, n, generator=rng))
    start, bias = torch.randn(m, n, generator=rng), torch.randn(n, generator=rng)
    exact, kept = a.double() @ b.double(), start.clone()
    allowed = 2e-6 * exact.norm()  # a few roundings
    assert (device.multiply(a, b) - exact).norm() < allowed
    assert (device.multiply(a, b, start) - (kept + exact)).norm() < allowed
    assert torch.equal(start, kept)
    assert (device.multiply(a, b, start, overwrite=True) - (kept + exact)).norm() < allowed
    assert (device.linear(a, b.T, bias) - (exact + bias)).norm() < allowed
    assert (device.linear(a, b.T, bias[:1].expand(n)) - (exact + bias[0])).norm() < allowed
    stacked = a.unflatten(0, (1, m))
    assert (device.linear(stacked, b.T)[0] - exact).norm() < allowed


def test_products_that_are_differentiated_have_gradients() -> None:
    x, weight = torch.randn(300, 784), torch.randn(256, 784, requires_grad=True)
    device.linear(x, weight).sum().backward()
    assert torch.allclose(weight.grad, torch.ones(256, 300) @ x, rtol=1e-4, atol=1e-3)


class _Function:
    """A function of vectors (6,) that counts how often it runs."""

    def __init__(self, function) -> None:
        self.function, self.calls = function, 0
        self.weight = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))

    def __call__(self, given: Tensor) -> Tensor:
        self.calls += 1
        return self.function(self.weight, given)


def _chain(weight: Tensor, given: Tensor) -> Tensor:
    """Views, operations in place, with ``out`` and on lists, and what is made anew each time."""
    total, rows = torch.zeros_like(given), given.view(2, 3)
    left, right = (weight.T @ (weight @ given)).split(3)
    total.view(2, 3).add_(rows, alpha=0.5)
    torch.addmm(rows.clone(), rows, rows.T @ rows, out=(made := torch.empty(2, 3)))
    torch._foreach_add_([total[:3], total[3:]], [left, right], alpha=2.0)
    return torch.cat([torch.stack([made, rows]).sum(0).view(-1), total.detach()]).relu_()


def test_a_repeated_function_is_its_operations_in_the_end() -> None:
    line, function = StraightLine(), _Function(_chain)
    for seed in range(12):
        given = torch.randn(6, generator=torch.Generator().manual_seed(seed))
        found, kept = line(function, given), given.clone()
        assert torch.equal(found, _chain(function.weight, given))
        assert torch.equal(given, kept)
        found.zero_()  # is the caller's
    assert line.replaces
    assert function.calls == StraightLine.FIRST + 1


def test_a_function_that_takes_not_any_tensor_is_compared_on_what_it_is_given() -> None:
    places = [torch.randn(6, generator=torch.Generator().manual_seed(seed)) for seed in range(6)]

    def pair(weight: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        assert any(given is place for place in places)  # as a user's loss may be defined there only
        return given.square().sum(), weight.T @ (weight @ given)

    line, function = StraightLine(2, anywhere=False), _Function(pair)
    for place in places:
        assert all(map(torch.equal, line(function, place), pair(function.weight, place)))
    assert line.replaces
    assert function.calls == 3


def _through_numpy(weight: Tensor, given: Tensor) -> Tensor:
    return weight @ torch.from_numpy(given.numpy() * 2.0)


def _branching(weight: Tensor, given: Tensor) -> Tensor:
    return weight @ given if float(given[0]) > 0 else given


def _random(weight: Tensor, given: Tensor) -> Tensor:
    return weight @ given + torch.rand(4)


def _remembering(weight: Tensor, given: Tensor) -> Tensor:
    weight.mul_(1.5)
    return weight @ given


@pytest.mark.parametrize("kind", [_through_numpy, _branching, _random, _remembering])
def test_what_operations_do_not_tell_is_never_replaced(kind) -> None:
    line, function = StraightLine(), _Function(kind)
    for seed in range(9):
        line(function, torch.randn(6, generator=torch.Generator().manual_seed(seed)))
    assert not line.replaces
    # only what numpy computes is noted, and then once compared
    assert function.calls == (10 if kind is _through_numpy else 9)


@pytest.mark.parametrize("anywhere", [True, False])
@pytest.mark.parametrize("kind", [_through_numpy, _chain])
def test_equal_tensors_and_zeros_show_nothing(kind, anywhere: bool) -> None:
    """They would agree with the operations noted on them, whatever these leave out."""
    for early in (torch.ones(6), torch.zeros(6)):
        line, function = StraightLine(anywhere=anywhere), _Function(kind)
        given = [early] * 8 + [torch.randn(6, generator=torch.Generator().manual_seed(0))] * 2
        for each in given:
            assert torch.equal(line(function, each), kind(function.weight, each))
        assert line.replaces == (kind is _chain)


def test_operations_that_cannot_be_repeated_leave_the_function(monkeypatch) -> None:
    """As those of PyTorch's own forward rule of layer norms, which take no tensors from outside."""

    def refuse(*_: object) -> Tensor:
        raise RuntimeError("Tensor on device meta is not on the expected device cpu!")

    monkeypatch.setattr(device._Operations, "run", refuse)
    line, function = StraightLine(), _Function(_chain)
    for seed in range(9):
        given = torch.randn(6, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(line(function, given), _chain(function.weight, given))


def test_conjugates_are_no_tensors_as_they_are() -> None:
    def squares(weight: Tensor, given: Tensor) -> Tensor:
        number = torch.complex(given, weight[0])
        return (number.conj() * number.conj()).imag + number.conj().imag

    line, function = StraightLine(), _Function(squares)
    for seed in range(9):
        given = torch.randn(6, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(line(function, given), squares(function.weight, given))
    assert line.replaces
