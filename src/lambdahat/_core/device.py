"""Where and how tensors are computed: full float32 for our own linear algebra, and CUDA graphs that
replay many small launches as one; on the CPU, memory that is used again without new pages, and
vector–Jacobian products that do not wait for what torch imports.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode


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
def fast_convolutions() -> Iterator[None]:
    """Convolutions inside may use TF32, as PyTorch's do by default: enough for training, whose
    curvature is then measured outside in full float32.
    """
    allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = allowed


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


class _FreedPages:
    """What glibc does with memory that is freed: by default it goes back to the system.

    A block of more than ``largest`` bytes has pages of its own outside a ``held`` section.
    """

    # mallopt's names of its settings (malloc.h)
    TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4
    # what glibc raises its threshold to by itself, at most, and how many blocks it maps
    LARGEST, MAPS = 1 << 25, 65536

    def __init__(self) -> None:
        self._lock, self._users, self.largest = threading.Lock(), 0, self.LARGEST
        given = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_"}
        tunables = os.environ.get("GLIBC_TUNABLES", "")
        self._tuned = bool(given & os.environ.keys()) or "malloc" in tunables

    def _set(self, **values: int) -> None:
        if sys.platform.startswith("linux"):
            with suppress(AttributeError, OSError):  # another C library
                mallopt = ctypes.CDLL(None).mallopt
                for name, value in values.items():
                    mallopt(getattr(self, name), value)

    def lower(self, largest: int) -> None:
        """Have the C library return freed blocks of more than ``largest`` bytes to the system.

        glibc keeps freed blocks of up to 32 MiB, and vectors of many sizes leave holes between
        them. This holds for the whole process, and costs some time.
        """
        with self._lock:
            if largest < self.largest:
                self.largest = largest
                self._set(MMAP_THRESHOLD=largest)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the memory of tensors that are freed inside for those that come next.

        The kernel clears every new page, which takes longer than a pass over it. Afterwards memory
        goes back to the system as before. Does nothing after ``lower``, with a user's own settings
        of malloc, or with another C library.
        """
        if self._tuned or self.largest < self.LARGEST:
            yield
            return
        with self._lock:
            if not self._users:
                self._set(TRIM_THRESHOLD=2**31 - 1, MMAP_MAX=0)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    # what glibc sets by itself once a tensor of 32 MiB has been freed
                    trim = 2 * self.LARGEST
                    self._set(MMAP_THRESHOLD=self.largest, TRIM_THRESHOLD=trim, MMAP_MAX=self.MAPS)


_freed_pages = _FreedPages()
keep_freed_pages, give_back_pages = _freed_pages.held, _freed_pages.lower


_sides = threading.local()


def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream of a CUDA device on which work warms up and is captured, None elsewhere: one for
    each thread.

    One for all, because cuBLAS keeps a workspace, 32 MiB on an H200, for every stream that a thread
    ever used, and another for the backward passes on it. Not shared by threads, because a capture
    takes in all that is started on the stream.
    """
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    known: dict[int, torch.cuda.Stream] = _sides.__dict__.setdefault("streams", {})
    if index not in known:
        known[index] = torch.cuda.Stream(index)
    return known[index]


class _Joined(torch.autograd.Function):
    """A scalar whose gradient by the outputs is what ``vectors`` holds in the backward pass."""

    @staticmethod
    def forward(ctx: Any, vectors: list[Tensor], *outputs: Tensor) -> Tensor:
        ctx.vectors = vectors
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.vectors


class Pullback:
    """v ↦ Jᵀv for the outputs of a graph, tensors or edges; tensors are not held.

    It is made outside of vmap and may be called within. Threads take turns. At the first
    ``torch.autograd.grad`` with ``grad_outputs`` torch imports sympy, to compare shapes that may be
    symbolic; that takes longer than many a measurement. The gradient of a scalar needs no vectors,
    so on the CPU the outputs are joined into a scalar whose derivative in each is the vector.
    """

    def __init__(self, outputs: Sequence[Any]) -> None:
        # apart from self, which would be a cycle through the graph that no collector sees
        self._vectors: list[Tensor] = []
        self._lock = threading.Lock()
        self._edges, self._scalar = outputs, None
        # functorch has rules of its own for functions
        if torch._C._are_functorch_transforms_active():
            return
        # an edge cannot be joined, and on a GPU further kernels would be started at every call
        if not outputs or not all(
            isinstance(z, Tensor) and z.device.type == "cpu" for z in outputs
        ):
            live = [isinstance(z, Tensor) and z.requires_grad for z in outputs]
            pairs = zip(outputs, live, strict=True)
            self._edges = [get_gradient_edge(z) if held else z for z, held in pairs]
            return
        self._edges = ()
        with torch.enable_grad():
            self._scalar = cast(Any, _Joined.apply)(self._vectors, *outputs)

    def __call__(
        self, inputs: Sequence[Any], vectors: Sequence[Tensor], **options: Any
    ) -> tuple[Any, ...]:
        """The gradients of Σ vᵀz at the inputs; ``options`` are those of autograd.grad."""
        if self._scalar is None:
            return torch.autograd.grad(self._edges, inputs, vectors, **options)
        with self._lock:
            self._vectors[:] = vectors
            try:
                return torch.autograd.grad(self._scalar, inputs, **options)
            finally:
                self._vectors.clear()


def pull_back(
    outputs: Sequence[Any], inputs: Sequence[Any], vectors: Sequence[Tensor], **options: Any
) -> tuple[Any, ...]:
    """The gradients of Σ vᵀz at the inputs, of outputs z that are pulled back once."""
    return Pullback(outputs)(inputs, vectors, **options)


class Replay:
    """Runs functions of no arguments that read and write fixed tensors, by key: first as they are,
    later as a graph.

    A function's first run warms up, its second is captured; both do their work once. If CUDA
    cannot capture it, or is already capturing, it runs as it is. ``stream`` is where it warms up
    and is captured, for functions whose autograd graphs were built on that stream. ``replays``
    counts the runs that were replays.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._on = device.type == "cuda"
        self._device, self._stream = device, stream
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph | None] = {}
        self.replays = 0

    def __call__(self, key: Hashable, function: Callable[[], None]) -> None:
        """Run ``function``, or replay what it did before under ``key``."""
        if not self._on or torch.cuda.is_current_stream_capturing():
            function()
        elif key not in self._graphs:
            with beside(self._device, self._stream):
                function()
            self._graphs[key] = None
        else:
            graph = self._graphs[key] or self._capture(function)
            if graph is None:
                function()
            else:
                self._graphs[key] = graph
                graph.replay()
                self.replays += 1

    def _capture(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                function()
        except RuntimeError:  # an operation that cannot be captured: nothing has been computed
            self._on = False
            torch.cuda.synchronize()
            return None
        return graph


@contextmanager
def beside(device: torch.device, stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run what is inside on another stream, in order with what comes before and after."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(stream):
            yield
    # what was started may still read or write tensors that the caller gives up after an error
    finally:
        torch.cuda.current_stream(device).wait_stream(stream)


class OperationWatch(TorchDispatchMode):
    """A mode that sees every operation, and that torch's compiler leaves alone.

    Torch's own way to have it left alone imports the compiler, which takes a second; here that
    waits until someone else has imported it.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)  # type: ignore[no-untyped-call]
        plain: Any = cls.__torch_dispatch__
        skipped = torch._disable_dynamo(plain, recursive=True)  # type: ignore[attr-defined]

        def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen = skipped if "torch._dynamo" in sys.modules else plain
            return seen(self, func, types, args, kwargs)

        cls.__torch_dispatch__ = dispatch  # type: ignore[method-assign]
