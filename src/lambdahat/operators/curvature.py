"""The curvature of a problem: Hessian, Gauss–Newton, Fishers and gradient covariance as operators.

Every operator is the mean over the data set at the parameters the problem had when it was made: the
same batches in the same order at every product. What a product needs of a batch (the graph of its
gradient) is kept within a budget.
"""

from __future__ import annotations

import gc
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from lambdahat._core.check import memory_bytes, require, require_choice, require_count
from lambdahat._core.device import (
    StraightLine,
    beside,
    default_context,
    keep_freed_pages,
    side_stream,
)
from lambdahat._core.rng import generator
from lambdahat.operators import linearise
from lambdahat.operators.base import CapturableProduct, LinearOperator
from lambdahat.operators.exact import ClosedForm, HessianForm
from lambdahat.problem import Problem, require_problem
from lambdahat.problem.batches import Batch, free_memory
from lambdahat.problem.checkpointing import recomputing
from lambdahat.problem.losses import NAMED
from lambdahat.problem.memory import GRAPHS, PASS, LiveBytes
from lambdahat.problem.network import Pattern
from lambdahat.results import Estimate

GRAPH_FRACTION = 0.4
CROWDED = 0.25  # share of a GPU's memory in use from which graphs that nobody holds are looked for
BLOCK = 16
# rows of the largest block that is captured as a CUDA graph, and the number of sizes that are
CAPTURED, MOST_CAPTURED = 8, 4
# bytes of a graph from which the memory of a block's tensors is worth keeping until its end
PAGES = 1 << 20
# bytes of graphs up to which the time between the operations of a product counts
STRAIGHT_BYTES = 1 << 28
# bytes of graphs up to which products are captured as a CUDA graph: of a block of vectors, and of
# one as a share of the device's memory
CUDA_GRAPH_BYTES, CUDA_GRAPH_FRACTION = 1 << 30, 0.125
# a wrong rule is further off than rounding, by so many times the tolerance
FAR = 100
# bytes that cuDNN looks at: it searches for its kernels anew where a tangent starts elsewhere
ALIGNED = 64
FINITE = (
    "products by finite differences, good to about ε^(2/3) where the model has no kinks, for"
    " autograd cannot differentiate the model twice: "
)
LENGTHENED = 64.0  # steps of finite differences, in place of 1, that show their error

# One thread at a time goes through a model: parameters are put into the one module for a pass, and
# dual numbers have one level in a process. Graphs that are kept need no pass.
passes = threading.RLock()


def _renew_lock() -> None:
    """A thread that held the lock is not in a forked process."""
    global passes
    passes = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


class Products:
    """The products of all batches: which graphs are kept, in which mode, and block by block."""

    def __init__(
        self,
        problem: Problem,
        leaves: linearise.Leaves,
        modes: dict[str, linearise.Builder],
        memory: int | None,
        dtype: torch.dtype,
        tried: bool = False,
    ) -> None:
        self.problem, self.leaves, self.modes, self.dtype = problem, leaves, dict(modes), dtype
        self.tried = tried
        # a graph that is kept holds all that a model's checkpoints would save
        self.recomputes = "forward" in modes and problem.recomputes
        if self.recomputes:
            self.modes = {"forward": modes["forward"], **modes}
        self.device, self.stream = problem.device, side_stream(problem.device)
        self.cache: list[linearise.Product] = []
        self.vmaps, self.verified = not self.recomputes, False
        self.why_alone = ""  # why the vectors of a block are multiplied one by one, or not captured
        # products captured as CUDA graphs, by their number of rows; None where that is no gain
        self.replays: dict[int, Callable[[Tensor], Tensor] | None] = {}
        self.line = StraightLine()
        budget: float | None = memory
        if budget is None and problem.memory is not None:
            budget = GRAPHS * problem.memory
        elif budget is None:
            if self.device.type == "cuda":
                # the graphs of operators that nobody holds wait in reference cycles
                total = torch.cuda.get_device_properties(self.device).total_memory
                if torch.cuda.memory_allocated(self.device) > CROWDED * total:
                    _collect(self.device)
            budget = GRAPH_FRACTION * free_memory(self.device)
        with linearise.repeated():
            first: linearise.Product | None
            # of the share or, where there is none in it, of the data
            own = next((batch for _, batch in problem.share), None) or problem.batches.first()
            first, self.graph_bytes = self._first_that_works(own)
            count = len(problem.share)
            self.kept = min(count, int(budget // max(self.graph_bytes, 1)))
            if self.kept == 0:  # what it holds is needed
                first = None
            # forward mode takes twice the memory of the pass that a budget is made for
            choice = len(self.modes) > 1 and problem.memory is None and not self.recomputes
            if self.kept < count and choice:
                self.mode = self._fastest_unkept(own)
            if self.mode not in ("reverse", "samples"):
                self.kept = 0
            for i, (_, batch) in enumerate(problem.share):
                if i >= self.kept:
                    break
                product = first if i == 0 and first is not None else self._build(batch)
                if self.kept == 0:  # memory ran out
                    break
                self.cache.append(product)

    def apply(self, rows: Tensor, only: int | None = None) -> Tensor:
        """Rows (k, P) times the operator, or times that of ``only`` one batch."""
        with (
            linearise.repeated(),
            nullcontext() if self.kept == len(self.problem.share) else passes,
        ):
            if only is not None:
                return torch.stack([self._sum(row, batched=False, only=only) for row in rows])
            own = self._apply(rows)
        return self.problem.ranks.sum(own, "a product", rows)

    def _apply(self, rows: Tensor) -> Tensor:
        count, captures = len(rows), self._may_replay()
        small = self.graph_bytes * len(self.problem.share) <= CUDA_GRAPH_BYTES
        if captures and (count == 1 or (self.vmaps and small and count <= CAPTURED)):
            if count not in self.replays and len(self.replays) < MOST_CAPTURED:
                self.replays[count] = self._capture(rows)
            replay = self.replays.get(count)
            if replay is not None:
                return replay(rows)
        if count == 1:
            run, row = partial(self._sum, batched=False), rows[0]
            # On a CPU a product with one vector is in the end its operations alone; a block has
            # eight times the arithmetic for as much around it.
            whole = len(self.cache) == len(self.problem.share) and self.problem.memory is None
            light = self.graph_bytes * len(self.problem.share) <= STRAIGHT_BYTES
            alone = row.is_cpu and whole and light
            if alone and not torch._C._are_functorch_transforms_active():
                return self.line(run, row).unsqueeze(0)
            return run(row).unsqueeze(0)
        step = 1
        if self.vmaps:  # as many as fit into the budget
            memory = self.problem.memory
            room = free_memory(self.device) * GRAPH_FRACTION if memory is None else PASS * memory
            if memory is not None and self.kept < len(self.problem.share):
                room -= self.graph_bytes  # of a batch that is computed again
            most = room // max(self.graph_bytes, self.column_bytes, 1)
            step = int(max(1, min(BLOCK, most)))
        if captures and step > 1:
            step = CAPTURED if count > CAPTURED and small else 1
        if count <= step:
            return self._block_product(rows)
        out = torch.empty_like(rows)
        for part, chunk in zip(out.split(step), rows.split(step), strict=True):
            part.copy_(self._apply(chunk))
        return out

    def _block_product(self, rows: Tensor) -> Tensor:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="There is a performance drop")
                # the engine would tell the allocator of another stream, and cannot for a block
                own = self.device.type == "cpu" and self.graph_bytes > PAGES
                keeps = own and self.problem.memory is None
                with keep_freed_pages() if keeps else beside(self.device, self.stream):
                    found = self._sum(rows, batched=True)
            if self.verified:
                return found
            # vmap has wrong rules for the second derivatives of some operations
            stream = generator(0, "a sum of rows")
            mix = torch.randn(len(rows), generator=stream, dtype=torch.float64).to(rows)
            alone = self._sum(mix @ rows, batched=False)
            allowed = min(FAR * linearise.tolerance(self.problem), 0.1)
            size, miss = (torch.linalg.vector_norm(t) for t in (alone, mix @ found - alone))
            if bool(miss <= allowed * size):
                self.verified = bool(size > 0)  # zeros show nothing
                return found
            self.why_alone = f"a sum of its rows is off by {float(miss / size):.2g}"
        # an operation without a batching rule
        except (RuntimeError, NotImplementedError) as error:
            self.why_alone = f"{type(error).__name__}: {str(error)[:300]}"
        self.vmaps = False  # one by one from now on
        return self._apply(rows)

    def _sum(self, rows: Tensor, batched: bool, only: int | None = None) -> Tensor:
        """Σ_b w_b A_b rows in the operator's dtype, or A_b rows for ``only`` one batch."""
        if rows.is_cuda and rows.data_ptr() % ALIGNED:  # a row of a block
            rows = rows.clone()
        pairs = zip(self.problem.space.split(rows), self.leaves.values(), strict=True)
        tangents = [piece.to(leaf.dtype) for piece, leaf in pairs]
        # on a GPU more launches than one sum over all parameters; inside a caller's own vmap the
        # sums would be of another level than what is added
        mapped = torch._C._are_functorch_transforms_active()
        plain = not rows.is_cuda and not mapped
        sums = linearise.ProductSums(self.problem.space, rows) if plain else None
        if sums is not None and batched:  # or every batch would copy them to stack them
            tangents = [tangent.contiguous() for tangent in tangents]
        total: list[Tensor] = []
        for i, (weight, batch) in enumerate(self.problem.share):
            if only is not None and i != only:
                continue
            weight = weight if only is None else 1.0
            product = self.cache[i] if i < len(self.cache) else self._build(batch)
            if sums is not None:
                sums.weight = weight
                sums.add(product(tangents, batched, sums))
                continue
            parts = [part.to(self.dtype) for part in product(tangents, batched)]
            if mapped:  # vmap has no rules for the functions of lists
                parts = [part * weight for part in parts]
                total = [a + b for a, b in zip(total, parts, strict=True)] if total else parts
            elif total:
                torch._foreach_add_(total, parts, alpha=weight)
            else:
                # not scaled in place: what autograd gives may be shared; and with one batch there
                # is nothing to scale
                total = parts if weight == 1.0 else list(torch._foreach_mul(parts, weight))
        if sums is not None:
            return sums.flat
        if not total:  # more ranks than batches
            return torch.zeros_like(rows)
        return torch.cat([part.reshape(*rows.shape[:-1], -1) for part in total], dim=-1)

    def _build(self, batch: Batch) -> linearise.Product:
        """The product of one batch; if memory runs out, again without the graphs kept."""
        build = self.modes[self.mode]
        try:
            # graphs are built on a stream of their own, so that a CUDA graph can capture the
            # backward passes on it
            with beside(self.device, self.stream):
                return build(self.problem, self.leaves, batch)
        except torch.OutOfMemoryError:
            self.cache.clear()
            self.kept, self.replays = 0, {1: None}
        _collect(self.device)
        with beside(self.device, self.stream):
            return build(self.problem, self.leaves, batch)

    def _first_that_works(self, batch: Batch) -> tuple[linearise.Product, int]:
        """The first batch's product in the first mode that works, and its graph's bytes."""
        failures: list[str] = []
        for mode in list(self.modes):
            self.mode = mode
            try:
                # the bytes that a product keeps or, where nothing is kept, that a pass takes
                if mode == "reverse":
                    product, size = linearise.saved_bytes(
                        lambda: self._build(batch), held=self.leaves.values()
                    )
                elif mode == "samples":
                    product = self._build(batch)
                    size = batch.size * self.problem.num_parameters * self.dtype.itemsize
                else:
                    with recomputing(self.recomputes):
                        _, size = linearise.saved_bytes(
                            lambda: self.problem.batch_loss(self.leaves, batch)
                        )
                    product = self._build(batch)
                self.column_bytes = 0
                if self.tried and self.problem.memory is None:
                    return product, size
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

    def _fastest_unkept(self, batch: Batch) -> str:
        """The mode with the fastest product of the first batch when no graph is kept."""
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

    def _may_replay(self) -> bool:
        count = len(self.problem.share)
        if self.stream is None or len(self.cache) < count:
            return False
        total = torch.cuda.get_device_properties(self.device).total_memory
        fits = self.graph_bytes * count <= max(CUDA_GRAPH_BYTES, CUDA_GRAPH_FRACTION * total)
        return fits and (1 not in self.replays or self.replays[1] is not None)

    def capturable_product(self) -> CapturableProduct | None:
        """A product (P,) → (P,) that a larger CUDA graph can capture, and its stream."""
        if not self._may_replay() or self.problem.ranks.size > 1:
            return None
        assert self.stream is not None

        def product(row: Tensor) -> Tensor:
            with linearise.repeated():
                return self._sum(row, batched=False)

        return product, self.stream

    def _capture(self, rows: Tensor) -> Callable[[Tensor], Tensor] | None:
        """The product of so many rows as a CUDA graph, since launches bind small networks.

        None if it cannot be captured or if a block takes longer than its rows one by one.
        """
        assert self.stream is not None
        given, batched = torch.zeros_like(rows), len(rows) > 1
        if batched and not self.verified:
            self._block_product(rows)
            if not (self.vmaps and self.verified):
                return None
        graph = torch.cuda.CUDAGraph()
        run: Callable[[], Tensor] = lambda: (  # noqa: E731
            self._sum(given, batched=True) if batched else self._sum(given[0], False).unsqueeze(0)
        )
        try:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self.stream):
                for _ in range(3):
                    run()
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
            with torch.cuda.graph(graph, stream=self.stream):
                result = run()
        except (RuntimeError, NotImplementedError) as error:
            self.why_alone = f"not captured: {type(error).__name__}: {str(error)[:300]}"
            torch.cuda.synchronize(self.device)
            return None

        def replay(rows: Tensor) -> Tensor:
            given.copy_(rows)
            graph.replay()
            return result.clone()

        if batched:
            alone = _gpu_seconds(lambda: [self._apply(row.unsqueeze(0)) for row in rows])
            if (together := _gpu_seconds(lambda: replay(rows))) > alone:
                self.why_alone = f"{together:.2g} s in a block, {alone:.2g} s one by one"
                return None
        return replay


def _gpu_seconds(run: Callable[[], Any]) -> float:
    """The shorter of two calls, after one that warms up."""
    found = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return min(found[1:])


def _collect(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


OutputMaps = Callable[[Any, Batch], linearise.OutputMap]
OWN = 2  # vectors that it holds: its parameters, and the same as leaves of graphs


# of operators by id: what makes their products. Each thread has its own, since others may multiply
# meanwhile.
_STAND_INS: ContextVar[Mapping[int, Any]] = ContextVar("stand_ins", default={})  # noqa: B039


class Curvature(LinearOperator):
    """A sum over batches Σ_b w_b A_b, each A_b known by a product that a ``Builder`` makes.

    ``modes`` are the builders by name, best first where graphs can be kept. ``memory`` is the
    budget, in bytes or as "4GiB", for graphs kept between products (default: a quarter of the
    problem's ``memory``, or 40 % of what is free). ``exact_kind`` is that of its ``ClosedForm``.
    """

    exact_kind: tuple[Any, ...]

    def __init__(
        self,
        problem: Problem,
        modes: dict[str, linearise.Builder],
        mode: str = "auto",
        memory: int | str | None = None,
        *,
        psd: bool = False,
    ) -> None:
        size, dtype = problem.num_parameters, torch.promote_types(problem.dtype, torch.float32)
        super().__init__(size, dtype, problem.device, psd=psd, space=problem.space)
        require_choice(mode, "mode", ("auto", *modes))
        memory = memory_bytes(memory, least=0)
        self.problem = problem.fixed()
        if problem.ranks.size > 1:
            self.problem.agree(f"{type(self).__name__} with {mode=} and {memory=}")
            self.problem.ranks = problem.ranks.apart(type(self).__name__)
        self.modes = modes if mode == "auto" else {mode: modes[mode]}
        self.memory = memory
        self._products: Products | None = None

    @property
    def mode(self) -> str:
        """The mode in use; chosen at the first product."""
        return self.prepare().mode

    @property
    def kept_batches(self) -> int:
        """How many batches keep their graph between products."""
        return self.prepare().kept

    @property
    def graph_bytes(self) -> int:
        """Bytes of graph that one batch keeps."""
        return self.prepare().graph_bytes

    @property
    def stand_in(self) -> tuple[Curvature, int | None] | None:
        """The operator, and the batch, that makes this thread's products in a comparison."""
        return _STAND_INS.get().get(id(self))

    @stand_in.setter
    def stand_in(self, value: tuple[Curvature, int | None] | None) -> None:
        others = {key: kept for key, kept in _STAND_INS.get().items() if key != id(self)}
        _STAND_INS.set(others if value is None else {**others, id(self): value})

    def _apply(self, block: Tensor) -> Tensor:
        rows = block.T.contiguous()
        if self.stand_in is None:
            return self.prepare().apply(rows).T
        other, only = self.stand_in
        return other.prepare().apply(rows.to(other.dtype), only).T.to(self.dtype)

    def prepare(self, mode: str | None = None) -> Products:
        """The products; the first call chooses the mode and builds the graphs.

        A ``mode`` in which the same model was multiplied before is taken without a trial.
        """
        if self._products is None:
            with passes:
                if self._products is None:  # no other thread was first
                    leaves = linearise.leaves_of(self.problem, self.problem.vector)
                    modes = self.modes if mode is None else {mode: self.modes[mode]}
                    settings = self.memory, self.dtype, mode is not None
                    self._products = Products(self.problem, leaves, modes, *settings)
        return self._products

    def like(self, problem: Problem) -> Curvature:
        """The same kind of operator for another problem."""
        raise TypeError(f"{type(self).__name__} cannot be restricted by name")

    def capturable_product(self) -> CapturableProduct | None:
        # what a subclass adds to a product is not in the graph
        plain = type(self)._apply is Curvature._apply
        return self.prepare().capturable_product() if plain and self.device.type == "cuda" else None

    def budget(self) -> int | None:
        return self.problem.memory

    def room(self, share: float) -> float:
        memory = self.problem.memory
        if memory is None:
            return super().room(share)
        own = OWN * self.dim * self.problem.dtype.itemsize
        left = (1 - PASS) * memory - self.kept_batches * self.graph_bytes - own
        return self.problem.ranks.least(left, "the memory left", self.device)

    def column_bytes(self) -> int:
        return 3 * self.dim * self.dtype.itemsize

    def free_memory(self, device: torch.device | None = None) -> int:
        free = super().free_memory(device)
        return int(self.problem.ranks.least(free, "the free memory", self.device))

    def restrict(self, which: Pattern | Sequence[int] | Tensor) -> LinearOperator:
        """The principal submatrix; by name it differentiates in those parameters only."""
        names = callable(which) or (
            not isinstance(which, Tensor) and (len(which) == 0 or isinstance(which[0], str))
        )
        return self.like(self.problem.restrict(which)) if names else super().restrict(which)  # type: ignore[arg-type]

    @cached_property
    def exact(self) -> ClosedForm | HessianForm:
        """Whether trace and diagonal have a closed form, and how the trace is found."""
        return ClosedForm(self.problem, *self.exact_kind)

    @cached_property
    def closed_sums(self) -> Tensor | None:
        """The sums of the diagonal over each parameter, float64, where they have a closed form."""
        return self.exact.sums()

    def known_trace(self) -> float | None:
        return None if self.closed_sums is None else float(self.closed_sums.sum())

    def known_diagonal(self) -> Tensor | None:
        sums = self.exact.sums(diagonal=True)
        return None if sums is None else sums.to(self.dtype)

    def sampled_trace(self, tol: float, seed: int, limit: int | None = None) -> Estimate | None:
        return self.exact.sample(tol, seed, limit)

    def why_no_trace(self) -> str:
        return self.exact.why_not()


class Hessian(Curvature):
    """∂²L/∂θ². Its diagonal is the Gauss–Newton matrix's, and what smooth activations add to it."""

    exact_kind: tuple[Any, ...] = ("hessian",)

    def __init__(
        self, problem: Problem, mode: str = "auto", memory: int | str | None = None
    ) -> None:
        modes: dict[str, linearise.Builder] = {
            "reverse": linearise.hessian_reverse,
            "forward": linearise.hessian_forward,
            "finite": linearise.hessian_finite,
        }
        super().__init__(problem, modes, mode, memory)
        self._options = (mode, memory)

    def like(self, problem: Problem) -> Hessian:
        return Hessian(problem, *self._options)

    @property
    def finite(self) -> bool:
        """Whether its products so far are finite differences."""
        return self._products is not None and self._products.mode == "finite"

    def with_longer_steps(self) -> Hessian:
        """The same by finite differences between points further apart."""
        other = self.like(self.problem)
        other.modes = {"finite": partial(linearise.hessian_finite, lengthened=LENGTHENED)}
        return other

    @cached_property
    def exact(self) -> HessianForm:
        """Whether trace and diagonal have a closed form, and how the trace is found."""
        return HessianForm(self.problem)

    @cached_property
    def _gauss_newton(self) -> GaussNewton:
        """The Gauss–Newton matrix, which shares what is known of its closed form."""
        gauss_newton = ggn(self.problem, memory=self.memory)
        gauss_newton.exact = self.exact.gauss_newton
        return gauss_newton

    def control(self) -> LinearOperator | None:
        factors = self.exact.gauss_newton.factors
        if factors is None or factors.linear:
            return None
        # what forbids a second derivative forbids Jv too
        return None if self.mode == "finite" else self._gauss_newton


class GaussNewton(Curvature):
    """(1/n) Σ_i J_iᵀ M_i J_i for one choice of the matrices M_i at the model's outputs."""

    def __init__(
        self,
        problem: Problem,
        make_map: Callable[[Problem], OutputMaps],
        exact_kind: tuple[Any, ...],
        mode: str,
        memory: int | str | None,
        psd: bool,
    ) -> None:
        super().__init__(problem, _output_modes(make_map(problem)), mode, memory, psd=psd)
        self.exact_kind = exact_kind
        self._recipe = (make_map, exact_kind, mode, memory, psd)

    def like(self, problem: Problem) -> GaussNewton:
        return GaussNewton(problem, *self._recipe)


def _output_modes(output_map: OutputMaps) -> dict[str, linearise.Builder]:
    return {
        "reverse": linearise.gauss_newton_reverse(output_map),
        "forward": linearise.gauss_newton_forward(output_map),
    }


class Covariance(Curvature):
    """(1/n) Σ_i g_i g_iᵀ, less ḡ ḡᵀ when centred; g_i the gradient of sample i."""

    exact_kind: tuple[Any, ...] = ("empirical",)

    def __init__(
        self, problem: Problem, centred: bool, mode: str, memory: int | str | None
    ) -> None:
        modes: dict[str, linearise.Builder] = {"samples": linearise.sample_gradients}
        if problem.loss_function is not None:
            modes = _output_modes(linearise.rank_one_map(linearise.empirical_residuals(problem)))
        super().__init__(problem, modes, mode, memory, psd=True)
        self._options = (centred, mode, memory)
        self.centred = centred
        self._mean = self.problem.gradient().to(self.dtype) if centred else None

    def like(self, problem: Problem) -> Covariance:
        return Covariance(problem, *self._options)

    def _apply(self, block: Tensor) -> Tensor:
        out = super()._apply(block)
        source = self if self.stand_in is None else self.stand_in[0]
        mean = source._mean if isinstance(source, Covariance) else None
        if mean is None:
            return out
        return (out - torch.outer(mean, mean @ block.to(mean.dtype))).to(self.dtype)

    def known_trace(self) -> float | None:
        second = super().known_trace()
        if second is None or self._mean is None:
            return second
        return second - float(self._mean.double().square().sum())

    def known_diagonal(self) -> Tensor | None:
        second = super().known_diagonal()
        return second if second is None or self._mean is None else second - self._mean.square()


@default_context()
def hessian(problem: Problem, *, mode: str = "auto", memory: int | str | None = None) -> Hessian:
    """The Hessian ∂²L/∂θ² of the mean loss.

    ``mode``: "reverse" (graph of the gradient kept between products), "forward" (dual numbers,
    nothing kept), "finite" (central differences) or "auto": the first that the model supports, and
    the faster one if the graphs do not fit in ``memory`` bytes.
    """
    require_problem(problem)
    return Hessian(problem, mode, memory)


@default_context()
def ggn(problem: Problem, *, mode: str = "auto", memory: int | str | None = None) -> GaussNewton:
    """The generalised Gauss–Newton matrix (1/n) Σ_i J_iᵀ (∂²ℓ_i/∂z²) J_i, z the model's output."""
    require_problem(problem)
    problem = problem.with_output("the Gauss–Newton matrix")
    convex = problem.loss_function is not None and problem.loss_function.convex
    return GaussNewton(problem, linearise.hessian_map, ("hessian",), mode, memory, convex)


@default_context()
def fisher(
    problem: Problem,
    kind: str = "exact",
    *,
    samples: int = 1,
    seed: int = 0,
    mode: str = "auto",
    memory: int | str | None = None,
) -> Curvature:
    """The Fisher information E[∇log p ∇log pᵀ] of the model's predictions at the data's inputs.

    ``kind``: "exact" (expectation in closed form; the Gauss–Newton matrix except for
    "gaussian_nll"), "monte_carlo" (``samples`` targets per sample, drawn once) or "empirical" (the
    data's own targets: the uncentred covariance). Class weights, ``pos_weight`` and label smoothing
    weight the contribution of a target as they do in the Gauss–Newton matrix.
    """
    require_problem(problem)
    linearise.require_kind(kind)
    require_count(samples, "samples")
    drawn = samples == 1 or kind == "monte_carlo"
    require(drawn, "samples", f"be left out for kind={kind!r}, which draws none", samples)
    if kind == "empirical":
        return gradient_covariance(problem, centred=False, mode=mode, memory=memory)
    problem = problem.with_output("the Fisher")
    loss = problem.loss_function
    assert loss is not None
    if not loss.predictive:
        raise ValueError(
            f"loss must be a negative log-likelihood for the Fisher, got {loss.name!r}; use one of"
            f' {", ".join(NAMED)}, kind="empirical", or lh.ggn(problem), which takes any loss'
        )
    if kind == "exact" and loss.likelihood:
        return ggn(problem, mode=mode, memory=memory)
    if kind == "exact":
        return GaussNewton(problem, linearise.fisher_map, ("fisher",), mode, memory, True)
    linearise.require_separable(problem)
    draws = {"seed": seed, "samples": samples}
    problem.ranks.agree("the Monte-Carlo Fisher", draws, problem.device)
    return GaussNewton(
        problem,
        lambda p: linearise.rank_one_map(linearise.monte_carlo_residuals(p, samples, seed)),
        ("monte_carlo", samples, seed),
        mode,
        memory,
        True,
    )


@default_context()
def gradient_covariance(
    problem: Problem, *, centred: bool = True, mode: str = "auto", memory: int | str | None = None
) -> Covariance:
    """(1/n) Σ_i g_i g_iᵀ − ḡ ḡᵀ of the per-sample gradients; uncentred, the empirical Fisher."""
    require_problem(problem)
    linearise.require_separable(problem)
    return Covariance(problem, centred, mode, memory)
