"""A budget of memory, M bytes beside model and data: a quarter for what a pass over a batch takes,
up to a quarter for graphs kept between products, the rest for vectors.

What a pass takes is measured on one, two, four and more samples of the first batch, by counting the
bytes of all tensors that live at the same time; batches are then cut to as many samples as fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel

from lambdahat._core.device import OperationWatch, give_back_pages, pull_back
from lambdahat.problem.batches import Batch, Batches, take
from lambdahat.problem.checkpointing import recomputing
from lambdahat.problem.distributed import splits
from lambdahat.problem.evaluators import Evaluator, Parameters

PASS, GRAPHS = 0.25, 0.25


class LiveBytes(OperationWatch):
    """Counts the bytes of tensors made inside that live at the same time: ``peak``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._total = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        # held weakly, so that their addresses are not used again
        self._outside: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._note_all(args, False)
        self._note_all(kwargs.values(), False)
        out = func(*args, **kwargs)
        self._note_all((out,), True)
        return out

    def _note_all(self, values: Iterable[Any], made: bool) -> None:
        # Not torch's tree_leaves, which takes longer than most operations: what an operation takes
        # and gives are tensors, and lists and tuples of them.
        for value in values:
            if isinstance(value, Tensor):
                self._note(value, made)
            elif isinstance(value, (list, tuple)):
                self._note_all(value, made)

    def _note(self, tensor: Tensor, made: bool) -> None:
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # a tensor without memory of its own
            return
        key = storage._cdata
        if key in self._live or key in self._outside:
            return
        if not made:
            self._outside[key] = StorageWeakRef(storage)
            return
        self._live[key] = StorageWeakRef(storage), storage.nbytes()
        self._total += storage.nbytes()
        if self._total > self.peak:
            self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
            self._total = sum(size for _, size in self._live.values())
            self.peak = max(self.peak, self._total)


def pass_bytes(
    loss: Callable[[Parameters, Batch], Tensor], leaves: Parameters, batch: Batch
) -> int:
    """Peak bytes of a batch's Hessian–vector product, or gradient if only that exists."""
    parameters = list(leaves.values())
    with LiveBytes() as seen, torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        grads = torch.autograd.grad(
            loss(leaves, batch), parameters, create_graph=True, allow_unused=True
        )
        live = [grad for grad in grads if grad is not None and grad.requires_grad]
        with suppress(RuntimeError):  # an operation that can be differentiated only once
            zeros = [torch.zeros_like(grad) for grad in live]
            pull_back(live, parameters, zeros, retain_graph=True, allow_unused=True)
    return int(seen.peak)


def recomputed_bytes(
    loss: Callable[[Parameters, Batch], Tensor], leaves: Parameters, batch: Batch
) -> int:
    """The same by dual numbers through a gradient that reruns checkpointed parts."""
    with (
        LiveBytes() as seen,
        torch.enable_grad(),
        sdpa_kernel(SDPBackend.MATH),
        recomputing(),
        forward_ad.dual_level(),
    ):
        # a view's tangent is its base's size
        points = {name: leaf.detach().clone() for name, leaf in leaves.items()}
        duals = {
            name: forward_ad.make_dual(p, torch.zeros_like(p)).requires_grad_()
            for name, p in points.items()
        }
        torch.autograd.grad(loss(duals, batch), list(duals.values()), allow_unused=True)
    return int(seen.peak)


def _product_bytes(evaluate: Evaluator, leaves: Parameters, batch: Batch) -> int:
    """What a product of a batch takes at most, in the way that ``operators`` makes it."""
    size = pass_bytes(evaluate, leaves, batch)
    if evaluate.recomputes(lambda: (leaves, batch)):
        with suppress(RuntimeError, NotImplementedError):  # an operation without forward mode
            return min(size, recomputed_bytes(evaluate, leaves, batch))
    return size


@torch.enable_grad()
def cut_to_fit(
    batches: Batches, memory: int, evaluate: Evaluator, norm: str, parameters: Parameters
) -> Batches:
    """The batches, cut where a pass would exceed a quarter of ``memory`` and the loss allows it."""
    if batches.device.type == "cpu":
        give_back_pages(max(memory // 256, 1 << 17))
    allowed, largest = PASS * memory, max(batches.sizes)
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in parameters.items()}
    first = next(batch for batch in batches if batch.size == largest)

    def rows_of_first(rows: int) -> Batch:
        return take(first, torch.arange(min(rows, largest), device=batches.device))

    whole = not splits(evaluate, norm, parameters, rows_of_first(2))
    needed = _product_bytes(evaluate, leaves, first if whole else rows_of_first(1))
    if needed > allowed:
        of = f"a batch of {largest}" if whole else "one sample"
        cure = "give smaller batches" if whole else "raise it, or choose fewer parameters"
        raise ValueError(
            f"memory must be at least {needed / PASS:,.0f} bytes, of which a pass over {of} may"
            f" take a quarter, got {memory:,}; {cure}"
        )
    if whole:
        return batches
    rows = rows_within(
        lambda count: _product_bytes(evaluate, leaves, rows_of_first(count)),
        largest,
        allowed,
        needed,
    )
    return batches if rows >= largest else batches.cut(rows)


def rows_within(bytes_of: Callable[[int], float], most: int, allowed: float, one: float) -> int:
    """The most rows, up to ``most``, that take no more than ``allowed`` bytes; one takes ``one``.

    What a pass takes is convex in its rows, so a line through two points is too low beyond them and
    never between. Rows are doubled while that line fits, and measured each time.
    """
    rows, size, slope = 1, one, 0.0
    while rows < most:
        room = most if slope <= 0 else rows + int((allowed - size) // slope)
        following = min(2 * rows, most, max(room, rows + 1))
        found = bytes_of(following)
        slope = (found - size) / (following - rows)
        if found > allowed:
            return rows + int((allowed - size) // slope)
        if following == room:
            return following
        rows, size = following, found
    return rows
