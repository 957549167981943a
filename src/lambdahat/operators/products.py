"""The products of a problem's batches: which keep their graph, in which mode, and how blocks go
through them.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from lambdahat._core.capture import side_stream
from lambdahat.operators import linearise
from lambdahat.problem import Problem
from lambdahat.problem.batches import Batch, free_memory
from lambdahat.problem.checkpointing import recomputing
from lambdahat.problem.memory import GRAPHS, PASS, LiveBytes

GRAPH_FRACTION = 0.4
CROWDED = 0.25  # share of a GPU's memory in use from which graphs that nobody holds are looked for
BLOCK = 16
CUDA_GRAPH_BYTES = 1 << 30
# bytes that cuDNN looks at: it searches for its kernels anew where a tangent starts elsewhere
ALIGNED = 64
FINITE = (
    "products by finite differences, good to about ε^(2/3), for autograd cannot differentiate the"
    " model twice: "
)


class Products:
    """The products of all batches: which are kept, in which mode, and how blocks go through
    them.
    """

    def __init__(
        self,
        problem: Problem,
        leaves: dict[str, Tensor],
        modes: dict[str, linearise.Builder],
        memory: int | None,
        dtype: torch.dtype,
    ) -> None:
        self.problem, self.leaves, self.modes, self.dtype = problem, leaves, dict(modes), dtype
        # a graph that is kept holds all that a model's checkpoints would save
        self.recomputes = "forward" in modes and problem.recomputes
        if self.recomputes:
            self.modes = {"forward": modes["forward"], **modes}
        self.device = problem.device
        self.stream = side_stream(problem.device)
        self.cache: list[linearise.Product] = []
        budget = self._room() if memory is None else memory
        with linearise.repeated():
            self._prepare(budget)

    def _prepare(self, budget: float) -> None:
        """Choose the mode and keep what the budget holds."""
        first: linearise.Product | None
        first, self.graph_bytes = self._first_that_works()
        count = len(self.problem.share)
        self.kept = min(count, int(budget // max(self.graph_bytes, 1)))
        if self.kept == 0:  # what it holds is needed
            first = None
        # forward mode takes twice the memory of the pass that a budget is made for
        if (
            self.kept < count
            and len(self.modes) > 1
            and self.problem.memory is None
            and not self.recomputes
        ):
            self.mode = self._fastest_unkept()
        self._fill(first)
        self.vmaps = not self.recomputes
        self.replay: Callable[[Tensor], Tensor] | None = None
        self.tried_replay = False

    def apply(self, rows: Tensor, only: int | None = None) -> Tensor:
        """Rows (k, P) times the operator: this rank's share of it, then the sum over ranks.

        ``only`` is the batch to take alone, as if it were all of the data.
        """
        with linearise.repeated():
            if only is not None:
                return torch.stack([self._sum(row, batched=False, only=only) for row in rows])
            own = self._apply(rows)
        return self.problem.ranks.sum(own, "a product", rows)

    def _apply(self, rows: Tensor) -> Tensor:
        if len(rows) == 1:
            return self._single(rows[0]).unsqueeze(0)
        step = 1 if not self.vmaps or self._may_replay() else self._block()
        if len(rows) <= step:
            return self._block_product(rows)
        out = torch.empty_like(rows)
        for part, chunk in zip(out.split(step), rows.split(step), strict=True):
            part.copy_(self._block_product(chunk) if len(chunk) > 1 else self._apply(chunk))
        return out

    def _single(self, row: Tensor) -> Tensor:
        if self._may_replay():
            if not self.tried_replay:
                self.tried_replay = True
                self.replay = self._capture()
            if self.replay is not None:
                return self.replay(row)
        return self._sum(row, batched=False)

    def _block_product(self, rows: Tensor) -> Tensor:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="There is a performance drop")
                return self._sum(rows, batched=True)
        # an operation without a batching rule: one by one from now on
        except (RuntimeError, NotImplementedError):
            self.vmaps = False
            return self._apply(rows)

    def _sum(self, rows: Tensor, batched: bool, only: int | None = None) -> Tensor:
        """Σ_b w_b A_b rows, accumulated in the operator's dtype; A_b rows for ``only`` one of
        the batches.
        """
        if rows.is_cuda and rows.data_ptr() % ALIGNED:  # a row of a block
            rows = rows.clone()
        tangents = [
            piece.to(leaf.dtype)
            for piece, leaf in zip(
                self.problem.space.split(rows), self.leaves.values(), strict=True
            )
        ]
        total: list[Tensor] = []
        for product, weight in self._each(only):
            parts = [part.to(self.dtype) for part in product(tangents, batched)]
            if total:
                torch._foreach_add_(total, parts, alpha=weight)
            else:
                # not scaled in place: what autograd gives may be shared; and with one batch there
                # is nothing to scale
                total = parts if weight == 1.0 else list(torch._foreach_mul(parts, weight))
        if not total:  # more ranks than batches
            return torch.zeros_like(rows)
        return torch.cat([part.reshape(*rows.shape[:-1], -1) for part in total], dim=-1)

    def _each(self, only: int | None = None) -> Any:
        for i, (weight, batch) in enumerate(self.problem.share):
            if only is None or i == only:
                yield (
                    (self.cache[i] if i < len(self.cache) else self._build(batch)),
                    weight if only is None else 1.0,
                )

    def _first(self) -> Batch:
        """The first batch of the share or, where there is none in it, of the data."""
        return (
            next((batch for _, batch in self.problem.share), None) or self.problem.batches.first()
        )

    def _build(self, batch: Batch) -> linearise.Product:
        """The product of one batch; where memory runs out, once more without what was kept of
        the others.
        """
        try:
            return self._built(batch)
        except torch.OutOfMemoryError:
            self.cache.clear()
            self.kept, self.tried_replay, self.replay = 0, True, None
        _collect(self.device)
        return self._built(batch)

    def _built(self, batch: Batch) -> linearise.Product:
        build = self.modes[self.mode]
        if self.stream is None:
            return build(self.problem, self.leaves, batch)
        # graphs are built on a stream of their own, so that a CUDA graph can capture the backward
        # passes on it
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            product = build(self.problem, self.leaves, batch)
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        return product

    def _first_that_works(self) -> tuple[linearise.Product, int]:
        """The first batch's product in the first mode that the model can take, and the bytes its
        graph keeps.
        """
        batch = self._first()
        failures: list[str] = []
        for mode in list(self.modes):
            self.mode = mode
            try:
                product, size = self._build_and_weigh(batch)
                tangents = [torch.zeros_like(leaf) for leaf in self.leaves.values()]
                with nullcontext() if self.problem.memory is None else LiveBytes() as seen:
                    product(tangents)
                self.column_bytes = 0 if seen is None else int(seen.peak)
                if failures and mode == "finite":
                    warnings.warn(FINITE + "; ".join(failures), stacklevel=2)
                return product, size
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, NotImplementedError) as error:
                failures.append(f"{mode}: {str(error).splitlines()[0][:120]}")
                del self.modes[mode]
        raise TypeError(
            "the model must be differentiable twice in some mode, got " + "; ".join(failures)
        )

    def _build_and_weigh(self, batch: Batch) -> tuple[linearise.Product, int]:
        """A product and the bytes it keeps or, where nothing is kept, those a pass of the model
        takes.
        """
        if self.mode == "reverse":
            return linearise.saved_bytes(lambda: self._build(batch))
        if self.mode == "samples":
            return (
                self._build(batch),
                batch.size * self.problem.num_parameters * self.dtype.itemsize,
            )
        with recomputing(self.recomputes):
            _, size = linearise.saved_bytes(lambda: self.problem.batch_loss(self.leaves, batch))
        return self._build(batch), size

    def _fastest_unkept(self) -> str:
        """One timed product of the first batch in each mode, rebuilt as a batch that is not kept
        would be.
        """
        batch = self._first()
        seconds: dict[str, float] = {}
        tangents = [torch.ones_like(leaf) for leaf in self.leaves.values()]
        for mode in [mode for mode in self.modes if mode != "finite"]:
            self.mode = mode
            try:
                for _ in range(2):  # the first warms up
                    start = time.perf_counter()
                    self._build(batch)(tangents)
                    if self.stream is not None:
                        torch.cuda.synchronize(self.device)
                    seconds[mode] = time.perf_counter() - start
            except (RuntimeError, NotImplementedError):
                seconds.pop(mode, None)
        return min(seconds, key=lambda mode: seconds[mode]) if seconds else next(iter(self.modes))

    def _fill(self, first: linearise.Product | None) -> None:
        """Keep the products of as many batches as the budget holds."""
        if self.mode not in ("reverse", "samples"):
            self.kept = 0
        for i, (_, batch) in enumerate(self.problem.share):
            if i >= self.kept:
                break
            product = first if i == 0 and first is not None else self._build(batch)
            if self.kept == 0:  # memory ran out
                break
            self.cache.append(product)

    def _room(self) -> float:
        """Bytes for graphs: a part of the problem's budget, or of what is free."""
        memory = self.problem.memory
        return GRAPH_FRACTION * _room(self.device) if memory is None else GRAPHS * memory

    def _block(self) -> int:
        """Columns that go through vmap together: as many as keep their activations within the
        budget.
        """
        memory = self.problem.memory
        room = free_memory(self.device) * GRAPH_FRACTION if memory is None else PASS * memory
        if memory is not None and self.kept < len(self.problem.share):
            room -= self.graph_bytes  # of a batch that is computed again
        return int(max(1, min(BLOCK, room // max(self.graph_bytes, self.column_bytes, 1))))

    def _may_replay(self) -> bool:
        small = self.graph_bytes * len(self.problem.share) <= CUDA_GRAPH_BYTES
        whole = self.stream is not None and len(self.cache) == len(self.problem.share) and small
        return whole and (self.replay is not None or not self.tried_replay)

    def recordable(self) -> tuple[Callable[[Tensor], Tensor], torch.cuda.Stream] | None:
        """A product (P,) → (P,) of one vector that a larger CUDA graph can take in, and the
        stream to record it on.
        """
        if not self._may_replay() or self.problem.ranks.size > 1:
            return None
        assert self.stream is not None

        def product(row: Tensor) -> Tensor:
            with linearise.repeated():
                return self._sum(row, batched=False)

        return product, self.stream

    def _capture(self) -> Callable[[Tensor], Tensor] | None:
        """One product as a CUDA graph: small networks are bound by launches, which a replay
        makes in one.
        """
        assert self.stream is not None
        given = torch.zeros(self.problem.num_parameters, dtype=self.dtype, device=self.device)
        graph = torch.cuda.CUDAGraph()
        try:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self.stream):
                for _ in range(3):
                    self._sum(given, batched=False)
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
            with torch.cuda.graph(graph, stream=self.stream):
                result = self._sum(given, batched=False)
        except RuntimeError:
            torch.cuda.synchronize(self.device)
            return None

        def replay(row: Tensor) -> Tensor:
            given.copy_(row)
            graph.replay()
            return result.clone()

        return replay


def _room(device: torch.device) -> int:
    """What is free on a device, without the graphs of operators that nobody holds: they wait in
    reference cycles.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        if torch.cuda.memory_allocated(device) > CROWDED * total:
            _collect(device)
    return free_memory(device)


def _collect(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
