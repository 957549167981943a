"""Many processes on one problem: sums over all ranks, sharded parameters, and each rank's share of
the data.

Every rank makes the same calls with the same arguments; each works on its share of the data, whole
batches or pieces of them, and one all-reduce adds the parts up. The buffer that is reduced begins
with a header: what is being summed, its shape, the running number of the sum, and readings of the
arguments. If the headers differ, all ranks raise.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from lambdahat._core.check import message, require
from lambdahat._core.rng import generator
from lambdahat.problem.batches import Batch, Batches, cache_if_small, take
from lambdahat.problem.evaluators import Evaluator, Parameters
from lambdahat.problem.losses import Custom

HEADER = 24  # numbers in front of what is summed: 4·24 bytes in float32
DIGITS, READINGS = 6, 4
WIDTH = 4096
CHUNK = 4096 * WIDTH  # entries that are read at a time, in float64
ROUNDING = 1024  # units of rounding, of the length of what was given, by which ranks may differ …
# … and the least such unit: vectors that GPUs add up in another order are no other vectors
FINEST = 1e-14
EXACTLY = 1e-9  # relative difference of numbers that must agree, taken in float64
# within which a rank that is alive tells the others where it is, after a failure
ANSWER = timedelta(seconds=5)
ALIKE = "give every rank the same model and all of the data, which is then shared out"
CURE = (
    "every rank makes the same calls in the same order; where only some measure, they pass"
    " ranks=None"
)

_failures = itertools.count()
_alone: ContextVar[bool] = ContextVar("lambdahat_alone", default=False)


class Ranks:
    """The processes that share a problem's data; with ``size`` 1 nothing is sent."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        # torch keeps the group until destroy_process_group, which must then end its threads: one
        # that is left over when Python ends takes the process down with it
        self._group = None if group is None else weakref.ref(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.name, self._sums = "the group", 0

    @classmethod
    def of(cls, ranks: Any) -> Ranks:
        """From "auto" (all ranks of an initialised ``torch.distributed``), a group, or None."""
        ready, automatic = in_a_group(), isinstance(ranks, str) and ranks == "auto"
        # what new_group gives to all others
        if ready and ranks is dist.GroupMember.NON_GROUP_MEMBER:
            raise TypeError(
                "ranks must be a process group that this process is in, got one of other processes;"
                " its members alone make the problem; others pass ranks=None"
            )
        if ranks is None or (automatic and (_alone.get() or not ready)):
            return cls(None)
        if automatic:
            return cls(dist.group.WORLD)
        if not ready or not isinstance(ranks, dist.ProcessGroup):
            expected = 'be "auto", None or a process group that this process is in'
            cure = "torch.distributed.new_group makes one"
            raise TypeError(message("ranks", expected, ranks, cure))
        return cls(ranks)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group, None where there is one process alone."""
        group = None if self._group is None else self._group()
        if self._group is not None and group is None:
            raise ValueError(
                "ranks must be a process group that lasts as long as the problem, got one that has"
                " ended; call destroy_process_group when all is measured"
            )
        return group

    def apart(self, name: str) -> Ranks:
        """The same processes for another purpose, whose sums are numbered separately."""
        other = Ranks(self.group)
        other.name = f"{name} {self._sums} of {self.name}"
        return other

    def sum(self, values: Tensor, what: str, given: Tensor | None = None) -> Tensor:
        """Σ over ranks of ``values``, by one all-reduce; all must have the same ``given``."""
        if self.size == 1:
            return values
        self._sums += 1
        shape = f"{values.dtype} of shape {tuple(values.shape)}"
        kind = f"{what}, {shape}, sum {self._sums} of {self.name}"
        header = self._header(kind, given).to(values.device, values.dtype)
        buffer = torch.cat([header, values.detach().reshape(-1)])
        try:
            dist.all_reduce(buffer, group=self.group)
            total = buffer[:HEADER].double().cpu()
        except RuntimeError as error:
            text = " ".join(str(error).split())[:200]
            raise RuntimeError(
                f"all {self.size} ranks must take part in {kind}, got a rank that ended, hangs or"
                f" does something else ({text}); {CURE}, and init_process_group(timeout=…) says how"
                f" long to wait{self._whereabouts(kind)}"
            ) from error
        self._require_alike(total, header.double().cpu(), kind, values.dtype)
        return buffer[HEADER:].view(values.shape)

    def gather(self, rows: Tensor, places: Sequence[int], total: int, what: str) -> Tensor:
        """All rows (total, …) on every rank; this one has those at ``places``."""
        whole = rows.new_zeros(total, *rows.shape[1:])
        whole[list(places)] = rows
        return self.sum(whole, what)

    def least(self, number: float, what: str, device: torch.device) -> float:
        """The smallest of the ranks' numbers."""
        if self.size == 1:
            return number
        mine = torch.tensor([number], dtype=torch.float64, device=device)
        return float(self.gather(mine, [self.rank], self.size, what).min())

    def agree(
        self,
        what: str,
        facts: Mapping[str, object],
        device: torch.device,
        cures: Mapping[str, str] | None = None,
    ) -> str:
        """Raise on every rank, by name, where one of the facts (number, text, tensors) differs.

        Returns a digest of the facts. ``cures`` says what helps for some of them.
        """
        if self.size == 1:
            return ""
        numbers = [_numbers(fact) for fact in facts.values()]
        every = [number for fact in numbers for number in fact]
        mine = torch.tensor(every, dtype=torch.float64, device=device)
        rows = self.gather(mine.unsqueeze(0), [self.rank], self.size, what).cpu()
        parts = rows.split([len(n) for n in numbers], dim=1)
        for (name, fact), columns in zip(facts.items(), parts, strict=True):
            unlike = _unlike(columns, fact.room if isinstance(fact, Rounded) else None)
            shown = {int: f": {columns.flatten().tolist()}", str: f": {fact} on rank {self.rank}"}
            got = f"another on rank {', '.join(map(str, unlike))} than on rank 0"
            got += shown.get(type(fact), "")
            cure = (cures or {}).get(name, ALIKE)
            require(not unlike, name, f"be the same on every rank for {what}", got, cure)
        return hashlib.blake2b(repr(rows[0].tolist()).encode(), digest_size=6).hexdigest()

    def _header(self, kind: str, given: Tensor | None) -> Tensor:
        """[digits and readings, their squares, the length of ``given``, 1, 0, 0]."""
        # a hash of the text as six digits below 16, whose squares sum exactly in float32
        number = int.from_bytes(hashlib.blake2b(kind.encode(), digest_size=3).digest(), "big")
        digits = torch.tensor([number >> (4 * i) & 15 for i in range(DIGITS)], dtype=torch.float64)
        reading, length = torch.zeros(READINGS, dtype=torch.float64), 0.0
        if given is not None:
            reading, others = _read(given)
            length = float(others[0]) ** 0.5
        marks = torch.cat([digits, reading])
        rest = torch.tensor([length, 1.0, 0.0, 0.0], dtype=torch.float64)
        return torch.cat([marks, marks.square(), rest])

    def _require_alike(
        self, total: Tensor, mine: Tensor, kind: str, dtype: torch.dtype = torch.float32
    ) -> None:
        """The mean over ranks is this rank's own: exactly for digits, to rounding for the rest.

        Besides W·Σx² = (Σx)² where x is the same on all W ranks, which is coarser.
        """
        marks = DIGITS + READINGS
        unit = max(torch.finfo(dtype).eps, FINEST) if dtype.is_floating_point else 0.0
        # a ring adds rank after rank, and rounds each time
        room = ROUNDING * unit * max(1.0, self.size / 16)
        length = float(total[2 * marks]) / self.size
        sums, squares = total[:marks], total[marks : 2 * marks]
        spread = self.size * squares - sums.square()
        wide = spread[DIGITS:].isfinite() & (spread[DIGITS:] > room * (self.size * length) ** 2)
        off = (total / self.size - mine).abs()
        far = torch.cat([off[DIGITS:marks], off[2 * marks : 2 * marks + 1]]) > room * length
        digits = bool((spread[:DIGITS] == 0).all()) and not bool(off[:DIGITS].any())
        all_there = bool(total[2 * marks + 1] == self.size)
        if not digits or not all_there or bool(wide.any() | far.any()):
            other = "arguments" if digits else "calls"
            raise RuntimeError(
                f"the ranks must make the same calls with the same arguments, got other {other} in "
                f"{kind}; {CURE}{self._whereabouts(kind)}"
            )

    def _whereabouts(self, kind: str) -> str:
        """What the other ranks report through the store, or that they do not answer."""
        try:
            store = dist.distributed_c10d._get_default_store()
            place = f"lambdahat/{next(_failures)}/{self.group.group_name}"  # type: ignore[union-attr]
            store.set(f"{place}/{self.rank}", kind)
            answers = []
            for rank in (rank for rank in range(self.size) if rank != self.rank):
                try:
                    store.wait([f"{place}/{rank}"], ANSWER)
                    answers.append(f"rank {rank} was at {store.get(f'{place}/{rank}').decode()}")
                except RuntimeError:
                    answers.append(f"rank {rank} does not answer")
        # the process that keeps the store is gone itself, or there is no store
        except (RuntimeError, ValueError):
            return ""
        return f". This is rank {self.rank}; " + "; ".join(answers)


@contextmanager
def on_one_rank() -> Iterator[None]:
    """Problems made inside belong to this process alone unless ``ranks`` says otherwise."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def in_a_group() -> bool:
    """Whether ``torch.distributed`` is initialised in this process."""
    return dist.is_available() and dist.is_initialized()


@dataclass(frozen=True)
class Rounded:
    """Numbers each rank computed itself: equal to within ``room`` times the last of them."""

    numbers: tuple[float, ...]
    room: float


def fingerprint(tensors: Iterable[Tensor]) -> Rounded:
    """Readings of the tensors' readings, and of how many entries are not finite."""
    readings, odd = [torch.zeros(1)], [torch.zeros(1)]
    for tensor in tensors:
        reading, others = _read(tensor)
        readings.append(reading)
        odd.append(others[1:])
    numbers = _read(torch.cat(readings))[0], _read(torch.cat(odd))[0]
    size = max(float(numbers[0].abs().max()), float(numbers[1].abs().max()))
    return Rounded((*numbers[0].tolist(), *numbers[1].tolist(), size), EXACTLY)


def _read(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Four random projections Σ_i u_i x_i of the finite entries, and [their Σx², the numbers of
    NaN, ∞ and −∞].
    """
    flat = tensor.detach()
    flat = (torch.view_as_real(flat) if flat.is_complex() else flat).reshape(-1)
    across = _directions("across", WIDTH).to(flat.device)
    sums, others = [], []
    for part in flat.split(CHUNK):
        entries = part.double()
        odd = [entries.isnan().sum(), (entries == torch.inf).sum(), (entries == -torch.inf).sum()]
        entries = entries.nan_to_num(0.0, 0.0, 0.0)
        whole = len(entries) // WIDTH * WIDTH
        if whole:
            sums.append(entries[:whole].view(-1, WIDTH) @ across)
        if len(entries) > whole:
            sums.append((entries[whole:] @ across[: len(entries) - whole]).unsqueeze(0))
        others.append(torch.stack([entries.square().sum(), *odd]))
    rows = torch.cat(sums or [across.new_zeros(1, READINGS)]).cpu()
    return (rows * _directions("down", len(rows))).sum(dim=0), torch.stack(others).sum(dim=0).cpu()


@cache
def _directions(name: str, count: int) -> Tensor:
    """Bounded random numbers of variance 1, so that no unit vector reads too much."""
    uniform = torch.rand(count, READINGS, generator=generator(0, "readings", name)).double()
    return (uniform - 0.5) * 12**0.5


def _numbers(fact: Any) -> list[float]:
    """A fact as floats: a text as its hash, tensors as their fingerprint."""
    if isinstance(fact, int | float):
        return [float(fact)]
    if isinstance(fact, str):
        text = hashlib.blake2b(fact.encode(), digest_size=6).digest()
        return [float(int.from_bytes(text, "big"))]
    if isinstance(fact, Rounded):
        return list(fact.numbers)
    return list(fingerprint([fact] if isinstance(fact, Tensor) else fact).numbers)


def _unlike(rows: Tensor, room: float | None) -> list[int]:
    """The ranks, one a row, whose numbers are not those of the first; NaN is like NaN."""
    first = rows[:1]
    size = first.abs().nan_to_num(0.0, 0.0, 0.0)
    near = EXACTLY * size.max() if room is None else room * size[0, -1]
    same = (rows == first) | (rows.isnan() & first.isnan()) | ((rows - first).abs() <= near)
    return [int(rank) for rank in (~same).any(dim=1).nonzero().flatten()]


CALL_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
STATE_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or all of a sharded one; then every rank must ask."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    with torch.no_grad():
        gathered: Tensor = tensor.full_tensor()
        return gathered.detach()


class Buffers:
    """Those of the named tensors that are buffers of a model, as they are now: a pass may put other
    tensors in their place.
    """

    def __init__(self, model: nn.Module | None, tensors: Mapping[str, Tensor]) -> None:
        names = {id(tensor): name for name, tensor in tensors.items()}
        layers = () if model is None else model.modules()
        every = ((layer._buffers, key) for layer in layers for key in layer._buffers)
        self._places = [(names[id(b[key])], b, key) for b, key in every if id(b[key]) in names]

    def __call__(self) -> dict[str, Tensor]:
        now = ((name, buffers.get(key)) for name, buffers, key in self._places)
        return {name: buffer for name, buffer in now if buffer is not None}


class Gathered:
    """Tensors by name, on one device and real ones in ``dtype``, of which some may be sharded.

    All ranks must gather at the same time, so that it is done by ``refresh``, anew each time. Those
    that are buffers of ``source`` are read from there, where a pass may put others in their place.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        source: nn.Module | None = None,
    ) -> None:
        self._tensors, self._place = tensors, (device, dtype)
        self._buffers = Buffers(source, tensors)
        self.sharded = [name for name, tensor in tensors.items() if hasattr(tensor, "full_tensor")]
        self.refresh()

    def refresh(self) -> None:
        """Gather sharded tensors as they are now."""
        self._kept = {name: whole(self._tensors[name]) for name in self.sharded}

    def __call__(self) -> dict[str, Tensor]:
        """All tensors by name; sharded ones as of the last ``refresh``."""
        tensors = {**self._tensors, **self._buffers(), **self._kept}
        return place_tensors(tensors, *self._place)


def place_tensors(
    tensors: Mapping[str, Tensor], device: torch.device | None, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """The tensors on a device, real ones in ``dtype``."""
    return {
        name: whole(t).detach().to(device, dtype if t.is_floating_point() else None)
        for name, t in tensors.items()
    }


def is_sharded(model: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on the model or a part of it."""
    return any(map(_sharding, model.modules()))


def without_sharding(model: nn.Module) -> nn.Module:
    """The modules as before ``fully_shard``, which forbids copies, sharing parameters."""
    reshard(model)
    return _plain(model, {})


def reshard(model: nn.Module) -> None:
    """Give up what a forward pass has gathered, so that the parameters are the sharded ones."""
    for module in model.modules():
        if _sharding(module):
            module.reshard()  # type: ignore[operator]


def coarsest(model: nn.Module) -> torch.dtype | None:
    """The coarsest dtype in which ``fully_shard`` computes or reduces gradients, or None."""
    states = [module._get_fsdp_state() for module in model.modules() if _sharding(module)]  # type: ignore[operator]
    policies = [getattr(state, "_mp_policy", None) for state in states]
    kinds = ("param_dtype", "reduce_dtype")
    used = [getattr(policy, kind, None) for policy in policies for kind in kinds]
    real = (dtype for dtype in used if dtype is not None)
    return max(real, key=lambda dtype: torch.finfo(dtype).eps, default=None)


def _sharding(module: nn.Module) -> bool:
    # importing it takes long, and who uses it has done so
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _plain(module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
    if id(module) in made:
        return made[id(module)]
    kind = type(module)
    # fully_shard makes a class of (FSDPModule, the module's own)
    other: nn.Module = object.__new__(kind.__mro__[2] if _sharding(module) else kind)
    made[id(module)], own = other, module.__dict__.items()
    kept = {name: value for name, value in own if not name.startswith("__composable_api")}
    for name in ("_parameters", "_buffers"):
        kept[name] = copy.copy(kept[name])
    for name in CALL_HOOKS:
        kept[name] = copy.copy(kept[name])
        for key, hook in list(kept[name].items()):
            if type(getattr(hook, "__self__", None)).__name__ == "FSDPState":
                del kept[name][key]
    for name in STATE_HOOKS:  # of no use in a copy that is only called
        kept[name] = OrderedDict()
    children = {name: child and _plain(child, made) for name, child in module._modules.items()}
    other.__dict__.update(kept, _modules=children)
    return other


Terms = Callable[[Batch], float]
# entries of data whose text is all that they are
PLAIN = (bool, int, float, complex, str, bytes, type(None))
PROBED_SAMPLES = 16  # few enough for each to show in the mean, if samples are coupled
# units of rounding by which the same, computed twice, may differ
SAME_LOSS, SAME_GRADIENT = 1e3, 1e4
NOISE = 4099  # a prime, so that no two rows of a layer are moved alike


@dataclass(frozen=True)
class Piece:
    """Some samples of a batch, all if ``rows`` is None; random draws are named by ``number``."""

    batch: int
    rows: slice | None
    number: int

    def of(self, batch: Batch) -> Batch:
        """The samples."""
        if self.rows is None:
            return batch
        where = torch.arange(self.rows.start, self.rows.stop, device=_device(batch))
        return replace(take(batch, where), index=self.number)


def pieces(sizes: Sequence[int], rank: int, ranks: int, cut: bool) -> list[Piece]:
    """A rank's share: samples ⌊rn/W⌋ … ⌊(r+1)n/W⌋ of n, or whole batches without ``cut``."""
    if not cut:
        low, high = (part * len(sizes) // ranks for part in (rank, rank + 1))
        return [Piece(i, None, i) for i in range(low, high)]
    low, high = (part * sum(sizes) // ranks for part in (rank, rank + 1))
    share, start = [], 0
    for i, size in enumerate(sizes):
        first, last = max(low - start, 0), min(high - start, size)
        if first < last:
            # a batch has one piece on a rank, so that this number is nobody else's
            own = Piece(i, slice(first, last), len(sizes) * (rank + 1) + i)
            share.append(Piece(i, None, i) if last - first == size else own)
        start += size
    return share


class Share:
    """A rank's batches and pieces of batches, each with its part of the mean over all data.

    They are kept where they fit into memory but the whole data do not.
    """

    def __init__(
        self, ranks: Ranks, batches: Batches, weights: Sequence[float], cut: bool, terms: Terms
    ) -> None:
        """``weights`` are those of all batches; ``terms`` gives a piece's part with ``cut``."""
        self._batches, self.weights = batches, list(weights)
        self._kept: list[Batch] | None = None
        self._wanted: dict[int, Piece] | None = None  # None: all batches
        if ranks.size == 1:
            return
        self._wanted = {
            piece.batch: piece for piece in pieces(batches.sizes, ranks.rank, ranks.size, cut)
        }
        self.weights = [weights[i] for i in self._wanted]
        if cut:
            pairs = zip(self._pieces(), batches.some(self._wanted), strict=True)
            parts = [terms(piece) / (terms(whole) or 1.0) for piece, whole in pairs]
            self.weights = [weight * part for weight, part in zip(self.weights, parts, strict=True)]
        if len(self._wanted) < len(batches) and not batches.in_memory:
            self._kept = cache_if_small(self._pieces(), batches.device)

    def __len__(self) -> int:
        return len(self.weights)

    def __iter__(self) -> Iterator[tuple[float, Batch]]:
        mine: Iterable[Batch] = self._batches if self._wanted is None else self._pieces()
        return zip(self.weights, mine if self._kept is None else self._kept, strict=True)

    def _pieces(self) -> Iterator[Batch]:
        wanted = self._wanted or {}
        return (wanted[batch.index].of(batch) for batch in self._batches.some(wanted))


def agree_on_data(ranks: Ranks, batches: Batches, facts: Mapping[str, Any]) -> Ranks:
    """The ranks, named after the data, once they agree on the facts and on all data."""
    if ranks.size == 1:
        return ranks
    rest = hashlib.blake2b()

    def text(leaf: Any) -> str:
        if isinstance(leaf, Tensor):
            return f"{leaf.dtype} {tuple(leaf.shape)}"
        return repr(leaf) if isinstance(leaf, PLAIN) else type(leaf).__name__

    def tensors() -> Iterator[Tensor]:
        for batch in batches:
            leaves, form = tree_flatten(batch.data)
            rest.update(f"{form}{[text(leaf) for leaf in leaves]}".encode())
            yield from (leaf for leaf in leaves if isinstance(leaf, Tensor))

    facts = {**facts, "data": fingerprint(tensors())}
    facts["what is no tensor in the data"] = rest.hexdigest()
    return ranks.apart("problem " + ranks.agree("the problem", facts, batches.device))


def splits(evaluate: Evaluator, norm: str, parameters: Parameters, first: Batch) -> bool:
    """Whether a batch's loss is the mean of its parts', so that ranks may share a batch.

    Known of the library's losses and a model's own, unless samples meet: the first batch's loss
    shows that, and a few samples' gradients near the parameters, where no layer is 0.
    """
    if isinstance(evaluate.loss, Custom) or norm == "train" or first.size == 1:
        return False
    few = take(first, slice(PROBED_SAMPLES)) if first.size > PROBED_SAMPLES else first
    try:
        with torch.no_grad():
            parts = _halve(first)
            losses = [evaluate(parameters, part) for part in parts]
            pairs = zip(parts, losses, strict=True)
            sums = [evaluate.terms(part) * loss.double().reshape(1) for part, loss in pairs]
        point, parts = nearby(evaluate, parameters, few), _halve(few)
        steps = [evaluate.terms(part) * gradient_of(evaluate, point, part)[1] for part in parts]
    except (RuntimeError, ValueError, IndexError):  # a model or a target for one batch size only
        return False
    dtype = losses[0].dtype
    return _adds_up(sums, SAME_LOSS, dtype) and _adds_up(steps, SAME_GRADIENT, dtype)


def _halve(batch: Batch) -> list[Batch]:
    halves = torch.arange(batch.size, device=_device(batch)).chunk(2)
    return [batch, *(take(batch, half) for half in halves)]


def _adds_up(sums: Sequence[Tensor], units: float, dtype: torch.dtype) -> bool:
    """Whether the first is the sum of the others, to ``units`` of rounding."""
    whole, *parts = sums
    size = sum(float(torch.linalg.vector_norm(part)) for part in parts)
    return float(torch.linalg.vector_norm(whole - sum(parts))) <= rounding(units, dtype) * size


def rounding(units: float, dtype: torch.dtype) -> float:
    """So many units of rounding, and no more than a fiftieth."""
    return min(units * torch.finfo(dtype).eps, 0.02)


def first_look(evaluate: Evaluator, parameters: Parameters, first: Batch) -> dict[str, Rounded]:
    """The first batch's loss and gradient, which must agree on all ranks."""
    loss, gradient = gradient_of(evaluate, nearby(evaluate, parameters, first), first)
    dtype, size = next(iter(parameters.values())).dtype, float(torch.linalg.vector_norm(gradient))
    read = (*_read(gradient)[0].tolist(), size)
    losses = Rounded((loss, abs(loss) + size), rounding(SAME_LOSS, dtype))
    gradients = Rounded(read, rounding(10 * SAME_GRADIENT, dtype))
    return {"the loss of the first batch": losses, "the gradient of the first batch": gradients}


def behaviour(
    evaluate: Evaluator, parameters: Parameters, first: Batch, meet: bool
) -> tuple[float, ...]:
    """The loss of the first sample, readings of its gradient and the gradient's norm.

    Of the first batch where samples ``meet``. Near the parameters, where no layer is 0: it shows
    another model or loss. ``behaves_alike`` compares two of them.
    """
    few = first if meet else take(first, slice(1))
    point = dict(zip(parameters, perturb(parameters.values()), strict=True))
    for where, batch in ((point, few), (point, first), (parameters, few)):
        try:
            value, grads = evaluate.gradients(where, batch)
        # a model for one batch size only, or not defined there
        except (RuntimeError, ValueError, IndexError):
            continue
        loss, norm = float(value), math.hypot(*(float(torch.linalg.vector_norm(g)) for g in grads))
        if math.isfinite(loss + norm):
            return loss, *fingerprint(grads).numbers[:4], norm
    return ()


def behaves_alike(one: Sequence[float], other: Sequence[float], dtype: torch.dtype) -> bool:
    """Whether two of ``behaviour`` are the same up to rounding."""
    if len(one) != len(other) or not one:
        return len(one) == len(other)
    loss, *rest = (abs(a - b) for a, b in zip(one, other, strict=True))
    size = max(one[-1], other[-1])
    same = loss <= rounding(SAME_LOSS, dtype) * (abs(one[0]) + size)
    return same and all(gap <= rounding(10 * SAME_GRADIENT, dtype) * size for gap in rest)


def gradient_of(evaluate: Evaluator, parameters: Parameters, batch: Batch) -> tuple[float, Tensor]:
    """The loss of a batch and its gradient as one vector, in float64."""
    loss, grads = evaluate.gradients(parameters, batch)
    return float(loss), torch.cat([grad.double().reshape(-1) for grad in grads])


def nearby(evaluate: Evaluator, parameters: Parameters, batch: Batch) -> Parameters:
    """Parameters near these, or these themselves where the loss is not finite there."""
    point = dict(zip(parameters, perturb(parameters.values()), strict=True))
    try:
        loss, gradient = gradient_of(evaluate, point, batch)
        fine = math.isfinite(loss) and bool(gradient.isfinite().all())
    except (RuntimeError, ValueError):  # a function that is not defined there
        fine = False
    return point if fine else parameters


def perturb(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Each tensor with noise of a tenth of its size, or of a layer's usual size where it is 0."""
    noise = torch.randn(NOISE, generator=generator(0, "beside"))
    perturbed = []
    for tensor in tensors:
        count = max(tensor.numel(), 1)
        size = float(torch.linalg.vector_norm(tensor.detach().double())) / count**0.5
        size = size or max(tensor.shape[-1] if tensor.ndim else 1, 1) ** -0.5
        own = noise.repeat(-(-count // NOISE))[: tensor.numel()].view(tensor.shape)
        perturbed.append(tensor.detach() + 0.1 * size * own.to(tensor))
    return perturbed


def _device(batch: Batch) -> torch.device:
    leaves = tree_leaves(batch.data)
    return next(leaf.device for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim)
