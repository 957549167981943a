"""Where and how tensors are computed: full float32 for our own linear algebra, and CUDA graphs that
replay many small launches as one; on the CPU, memory that is used again without new pages, the
fastest matrix products, vector–Jacobian products that do not wait for what torch imports, and
functions that are repeated by their operations alone.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from lambdahat._core.rng import generator

COMPILED = "_orig_mod"  # where a module made by torch.compile holds the original


class AsWritten:
    """Context in which what ``torch.compile`` compiled runs as it was written.

    Its tracer goes through our modes and hooks, and the derivatives that come out are wrong. The
    setting is one for the whole process, so the last thread to leave restores it.
    """

    _lock, _inside = threading.Lock(), 0
    _stance: ClassVar[Any] = None

    def __init__(self) -> None:
        self._compiled = "torch._dynamo" in sys.modules  # else nothing is, and its import is slow

    def __enter__(self) -> None:
        if self._compiled:
            with AsWritten._lock:
                if AsWritten._inside == 0:
                    AsWritten._stance = torch.compiler.set_stance("force_eager")
                AsWritten._inside += 1

    def __exit__(self, *error: object) -> None:
        if self._compiled:
            with AsWritten._lock:
                AsWritten._inside -= 1
                if AsWritten._inside == 0:
                    AsWritten._stance.__exit__(None, None, None)


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


# multiplications of a matrix product from which oneDNN's call, 8 µs longer, pays
LARGE_PRODUCT = 1 << 20
# terms that oneDNN may add one after the other: its rounding grows with their root
MOST_TERMS, TERMS = 2048, 512
PLAIN = (Tensor, Parameter)  # and not a subclass with operations of its own


@cache
def _has_faster_products() -> bool:
    """Whether oneDNN multiplies matrices in float32 faster than MKL: on AMD's CPUs with AVX-512.

    MKL keeps to AVX2 there, at 2.2 times the time. A rule, not a measurement, so that all runs on
    one machine round alike.
    """
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    maker = platform.processor()
    with suppress(OSError):
        maker += Path("/proc/cpuinfo").read_text(encoding="utf-8")[:1000]
    with suppress(AttributeError, RuntimeError):  # a PyTorch with another signature
        one, linear = torch.ones(1, 1), torch.ops.mkldnn._linear_pointwise
        linear.binary(one, linear.default(one, one, None, "none", [], ""), one, None, "add")
        return "AuthenticAMD" in maker
    return False


def _fits(a: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN is to compute a·weightᵀ, for matrices or a stack ``a`` of them."""
    if a.numel() * weight.shape[0] < LARGE_PRODUCT or torch.is_grad_enabled():
        return False
    if not (a.dtype is weight.dtype is torch.float32 and a.is_cpu and weight.is_cpu):
        return False
    if not (type(a) in PLAIN and type(weight) in PLAIN and _has_faster_products()):
        return False
    # it takes a thousand times as long where the rows of a weight lie apart
    return weight.is_contiguous() or weight.T.is_contiguous()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear`` by the fastest kernel; not differentiable."""
    plain = bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous())
    same = bias is None or (type(bias) in PLAIN and bias.dtype is x.dtype)
    if x.shape[-1] <= MOST_TERMS and plain and same and _fits(x, weight):
        found: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
        return found
    return F.linear(x, weight, bias)


def multiply(
    a: Tensor,
    b: Tensor,
    start: Tensor | None = None,
    alpha: float = 1.0,
    *,
    overwrite: bool = False,
) -> Tensor:
    """AB of matrices by the fastest kernel, or ``start`` + alpha·AB, which may ``overwrite`` it;
    not differentiable.
    """
    terms, weight = b.shape[0], b.T
    cut = terms > TERMS and b.is_contiguous()
    if (cut or terms <= MOST_TERMS) and _fits(a, weight):
        run = torch.ops.mkldnn._linear_pointwise
        parts = zip(a.split(TERMS, 1), weight.split(TERMS, 1), strict=True) if cut else None
        for left, right in parts or [(a, weight)]:
            if start is None:
                start = run.default(left, right, None, "none", [], "")
            else:
                start = run.binary(
                    left, start, right * alpha if alpha != 1.0 else right, None, "add"
                )
        assert start is not None
        return start
    if start is None:
        return a @ b
    if overwrite:  # not addmm_, which torch's counter of FLOPs overlooks
        return torch.addmm(start, a, b, alpha=alpha, out=start)
    return torch.addmm(start, a, b, alpha=alpha)


def multiply_stacks(
    a: Tensor,
    b: Tensor,
    start: Tensor | None = None,
    alpha: float = 1.0,
    *,
    overwrite: bool = False,
) -> Tensor:
    """The same of stacks of matrices (S, ·, ·), of each member as of it alone."""
    large = a.shape[1] * a.shape[2] * b.shape[2] >= LARGE_PRODUCT
    if large and _fits(a[0], b[0].T):
        starts = [None] * len(a) if start is None else start
        members = zip(a, b, starts, strict=True)
        parts = [multiply(*each, alpha, overwrite=overwrite) for each in members]
        return parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(parts)
    if start is None:
        return torch.bmm(a, b)
    add = start.baddbmm_ if overwrite else start.baddbmm
    return add(a, b, alpha=alpha)


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


Found = TypeVar("Found", Tensor, tuple[Tensor, Tensor])


class StraightLine:
    """A function of one tensor on a CPU that runs often: in the end by its operations alone.

    In a small network, autograd's engine and the Python between its operations take a tenth of a
    Hessian product, and most of the gradient of a few parameters. So one call, the ``first``, notes
    the operations, and the next runs them and the function on a random tensor. If every bit agrees
    they take its place; else, as for a function with a random number, a branch or another library
    in it, nothing changes. Not on the tensors that are given: those may be zero, or twice the same.
    But where a function need not take any tensor, as a user's loss, it is ``anywhere`` False, and
    the two are compared on the next given tensor that differs.
    """

    FIRST = 5  # noting and comparing cost three calls, which a few more calls would not earn

    def __init__(self, first: int = FIRST, anywhere: bool = True) -> None:
        self._calls, self._first, self._anywhere = 0, first, anywhere
        self._noted: _Operations | None = None
        self._at: Tensor | None = None  # what they were noted on, unless they run anywhere
        self.replaces = False

    def __call__(self, function: Callable[[Tensor], Found], given: Tensor) -> Found:
        """The same ``function`` at every call, of contiguous tensors of one shape."""
        noted, self._calls = self._noted, self._calls + 1
        if noted is None and self._calls == self._first:
            self._at = None if self._anywhere else given.clone()
            with (noted := _Operations(given)):
                found = function(given)
            self._noted = noted if noted.complete(found) else None
            return found
        # constants that were changed in place: autograd may refuse, and says why
        if noted is not None and any(each._version != was for each, was in noted.versions):
            noted, self._noted, self.replaces = None, None, False
        if noted is not None and not self.replaces:
            probe = given
            if self._at is None:
                probe = torch.randn(given.shape, generator=generator(0, "line"), dtype=given.dtype)
            elif torch.equal(given, self._at):
                return function(given)
            found = function(probe)
            # some operations cannot be called from outside of PyTorch
            with suppress(RuntimeError):
                pairs = zip(_each(found), _each(noted.run(probe)), strict=True)
                self.replaces = all(torch.equal(one, other) for one, other in pairs)
            self._noted = noted = noted if self.replaces else None
            if probe is given:
                return found
        return function(given) if noted is None else noted.run(given)


class _Operations(OperationWatch):
    """The operations that run inside, as steps from a given tensor, and from constants.

    A step is a function of some of the ``values``, which are constants, or what steps before it
    gave until nobody needs it any more. Views of constants are constants; a view of the given
    tensor is taken once.
    """

    def __init__(self, given: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.plain = True
        self._values: list[Any] = [None]
        # not by tensors that are kept: what a function frees, it frees here too
        self._places = WeakTensorKeyDictionary({given: 0})
        self._made, self._views = {0}, dict[Any, int]()
        self._steps: list[Any] = []
        self.versions: list[tuple[Tensor, int]] = []  # of the constants
        self._found: Any = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self.plain:
            return out
        where = tuple(map(self._place, args))
        named = {name: self._place(value) for name, value in kwargs.items()}
        places = {i for at in (*where, *named.values()) for i in _each(at)}
        found = _each(out)
        if not places & self._made and func.is_view:
            return out
        random = torch.Tag.nondeterministic_seeded in func.tags
        schema = zip(func._schema.arguments, [*where, *[None] * len(named)], strict=False)
        given = [(argument, named.get(argument.name, at)) for argument, at in schema]
        writes = [at for one, at in given if one.alias_info and one.alias_info.is_write]
        lasting = any(not set(_each(at)) <= self._made for at in writes)
        strange = any(not isinstance(each, Tensor) or type(each) is not Tensor for each in found)
        if random or lasting or strange:
            self.plain = False
            return out
        if func.is_view and isinstance(out, Tensor):
            of = args[0]
            same = out.shape == of.shape and out.stride() == of.stride() and out.dtype == of.dtype
            same = same and out.is_conj() == of.is_conj() and out.is_neg() == of.is_neg()
            if same and out.storage_offset() == of.storage_offset():  # all of it as it is
                self._places[out] = where[0]
                return out
            key = func, where[0], repr(args[1:]), repr(kwargs)
            if key in self._views:
                self._places[out] = self._views[key]
                return out
            self._views[key] = len(self._values)
        for each in found:
            if each not in self._places:
                self._places[each] = len(self._values)
                self._made.add(len(self._values))
                self._values.append(None)
        targets = [self._places[each] for each in found]
        self._steps.append((func, where, named, targets, isinstance(out, Tensor)))
        return out

    def _place(self, value: Any) -> Any:
        """Where an argument is among the values; a list where it is a list with tensors in it."""
        if isinstance(value, (list, tuple)) and any(isinstance(each, Tensor) for each in value):
            return [self._place(each) for each in value]
        if isinstance(value, Tensor):
            if value in self._places:
                return self._places[value]
            self.plain = self.plain and type(value) in PLAIN
            self._places[value] = len(self._values)
            if not value.is_inference():
                self.versions.append((value, value._version))
        self._values.append(value)
        return len(self._values) - 1

    def complete(self, found: Tensor | tuple[Tensor, ...]) -> bool:
        """End with what the function returned; whether the steps can be run."""
        places = [self._places.get(each) for each in _each(found)]
        if not self.plain or not self._made.issuperset(places):
            return False
        last = dict.fromkeys(places, len(self._steps))
        for number in reversed(range(len(self._steps))):
            func, where, named, targets, single = self._steps[number]
            used = {i for at in (*where, *named.values()) for i in _each(at)} | set(targets)
            dead = [i for i in used & self._made if last.setdefault(i, number) == number]
            self._steps[number] = _caller(func, where, named), targets, single, dead
        self._found = places if isinstance(found, tuple) else places[0]
        self._places, self._views, self._made = WeakTensorKeyDictionary(), {}, set()
        return True

    @torch.no_grad()
    def run(self, given: Tensor) -> Any:
        """What the function gives for a tensor of the same shape and strides."""
        values = self._values.copy()
        values[0] = given
        for call, targets, single, dead in self._steps:
            out = call(values)
            if single:
                values[targets[0]] = out
            elif targets:
                for target, each in zip(targets, out, strict=True):
                    values[target] = each
            for place in dead:
                values[place] = None
        found = _pick(values, self._found)
        return tuple(found) if isinstance(found, list) else found


def _each(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _pick(values: list[Any], at: Any) -> Any:
    """The value at a place, or those at a list of places."""
    return values[at] if isinstance(at, int) else [values[i] for i in at]


def _caller(func: Any, where: tuple[Any, ...], named: dict[str, Any]) -> Callable[[Any], Any]:
    """A function of the values that calls ``func`` on those at these places."""
    if len(where) > 1 and not named and all(isinstance(at, int) for at in where):
        take = itemgetter(*where)
        return lambda values: func(*take(values))
    return lambda values: func(
        *(_pick(values, at) for at in where),
        **{name: _pick(values, at) for name, at in named.items()},
    )
