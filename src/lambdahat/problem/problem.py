"""``Problem``: the mean loss over a data set as a function of the flat parameter vector."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from math import prod
from os import PathLike
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from lambdahat._core.check import (
    describe,
    memory_bytes,
    message,
    require,
    require_choice,
    require_count,
    require_shape,
    require_type,
)
from lambdahat._core.rng import generator
from lambdahat._core.storage import digest, digest_tensors
from lambdahat.problem import distributed
from lambdahat.problem.batches import (
    Batch,
    Batches,
    copy_with,
    is_columns,
    make_batches,
    read_indices,
    rng_untouched,
)
from lambdahat.problem.distributed import Gathered, Ranks, Share, gradient_of, place_tensors
from lambdahat.problem.evaluators import (
    Evaluator,
    FunctionEvaluator,
    OutputEvaluator,
    Parameters,
    check_first_batch,
)
from lambdahat.problem.losses import COUNTS, CrossEntropy, Custom, Loss, make_loss
from lambdahat.problem.memory import cut_to_fit
from lambdahat.problem.network import (
    BATCH_NORMS,
    Pattern,
    accumulating,
    device_of,
    matcher,
    named_tensors,
    own_names,
    private_copy,
    select_parameters,
    structure,
    untied,
)

# what a model's own loss may be, of its logits and labels
OWN_LOSSES = ("cross_entropy", "mse", "bce_with_logits")
FEW_ROWS = 64  # batches of no more are not worth cutting
DEFAULT_BATCH = {"cpu": 1024, "cuda": 8192}
BUFFERS = "buffers and constants"
BROADCAST = (
    "give all ranks those of rank 0 by torch.distributed.broadcast(buffer, 0) for all of"
    ' model.buffers(), as a pass of DistributedDataParallel in eval mode does; norm="train" reads'
    " no running statistics"
)


@dataclass(frozen=True)
class Space:
    """The order, names and shapes of the parameters that make up a flat vector of length P.

    A vector is the concatenation of the raveled parameters in the order of ``names``; a block of k
    vectors has shape (P, k), one vector a column.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor]) -> Space:
        """The space of named tensors, in their order."""
        return cls(tuple(parameters), tuple(tuple(tensor.shape) for tensor in parameters.values()))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of each parameter."""
        return tuple(prod(shape) for shape in self.shapes)

    @cached_property
    def size(self) -> int:
        """P, the length of the flat vector."""
        return sum(self.sizes)

    @property
    def slices(self) -> dict[str, slice]:
        """Where each parameter sits in the flat vector."""
        out, start = {}, 0
        for name, size in zip(self.names, self.sizes, strict=True):
            out[name] = slice(start, start + size)
            start += size
        return out

    def flatten(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Named tensors to one vector (P,), in the promoted dtype of all."""
        return torch.cat([parameters[name].reshape(-1) for name in self.names])

    def split(self, vector: Tensor) -> list[Tensor]:
        """A vector (P,), or several (k, P), as views shaped like the parameters."""
        if vector.shape[-1:] != (self.size,):
            raise ValueError(message("vector", f"have shape ({self.size},)", vector))
        lead, pieces = vector.shape[:-1], vector.split(self.sizes, dim=-1)
        return [part.view((*lead, *shape)) for part, shape in zip(pieces, self.shapes, strict=True)]

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """One vector (P,) to named views of it; several (k, P) to views (k, *shape)."""
        return dict(zip(self.names, self.split(vector), strict=True))

    def select(self, pattern: Pattern) -> tuple[str, ...]:
        """The names that match, in order; an error when none does."""
        match = matcher(pattern)
        chosen = tuple(name for name in self.names if match(name))
        some = ", ".join(self.names[:6]) + (", …" if len(self.names) > 6 else "")
        require(bool(chosen), "parameters", f"match at least one of {some}", repr(pattern))
        return chosen

    def subspace(self, names: Sequence[str]) -> Space:
        """The space of some of the parameters, in this space's order."""
        keep, pairs = set(names), zip(self.names, self.shapes, strict=True)
        kept = {name: shape for name, shape in pairs if name in keep}
        return Space(tuple(kept), tuple(kept.values()))

    def indices(self, names: Sequence[str]) -> Tensor:
        """Positions in the flat vector of the named parameters, in this space's order."""
        keep = set(names)
        parts = [part for name, part in self.slices.items() if name in keep]
        return torch.cat([torch.arange(part.start, part.stop) for part in parts])

    def layers(self) -> dict[str, tuple[str, ...]]:
        """Parameter names grouped by the module that owns them."""
        groups: dict[str, list[str]] = {}
        for name in self.names:
            groups.setdefault(name.rpartition(".")[0] or name, []).append(name)
        return {layer: tuple(names) for layer, names in groups.items()}


class Problem:
    """The loss L(θ) = (1/n) Σ_i ℓ_i(θ) of a model over a data set, at the model's parameters.

    ``loss`` is a name ("cross_entropy", "mse", "bce_with_logits", "gaussian_nll", "nll"), a torch
    loss, a callable ``loss(output, target)`` that averages over the batch, or "model" for models
    that compute their own (``output.loss`` or ``output["loss"]``, as transformers do). ``data`` is
    a Dataset, a DataLoader, tensors (x, y), or a list of batches; a batch is (x, y) or a dict of
    the model's keyword arguments with the target under "labels". ``parameters`` selects by glob;
    parameters that need no gradient are constants. ``norm`` sets the normalisation layers: "eval"
    uses running statistics, "train" the statistics of each fixed batch, "frozen" running statistics
    with the layers' own parameters held constant. Dropout is off.

    If labels have several positions (−100 is ignored), the loss is the mean over positions and n
    counts samples. With ``count`` "tokens", n counts positions too; with "sequences", the loss is
    the mean over samples of their sums. Either way n·L is the negative log-likelihood. If the model
    shifts "labels" internally (causal language models), the same shift is applied under any loss.

    ``memory``, in bytes or as "4GiB", limits what operators, estimators and chains of this problem
    may use in addition to the model and the data: batches are split, graphs dropped and chains run
    one by one to stay within it.

    ``ranks`` are the processes that share the work: "auto" for all ranks of ``torch.distributed``
    if it is initialised, a process group, or None for this process alone. Every rank must have the
    same model and all of the data.

    The model is never changed. Parameters and buffers are shared with it, so ``vector`` and the
    statistics follow later training, also with ``dtype`` or ``device``; operators copy them when
    they are constructed.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: str | Loss | Callable[[Any, Any], Tensor],
        data: Any,
        *,
        parameters: Pattern | None = None,
        batch_size: int | None = None,
        norm: str = "eval",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        count: str | None = None,
        memory: int | str | None = None,
        ranks: Any = "auto",
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"model must be a torch.nn.Module, got {describe(model)}; for a bare function use"
                " Problem.from_function"
            )
        require_choice(norm, "norm", ("eval", "train", "frozen"))
        if count is not None:
            require_choice(count, "count", COUNTS)
        self.ranks = Ranks.of(ranks)
        # the user's own, which training runs and changes
        self.source: nn.Module | dict[str, Tensor] = model
        own, model = model, private_copy(model, norm)
        chosen = select_parameters(model, parameters, norm)
        self.device = device_of(named_tensors(model), device)
        self._cast = _float_dtype(dtype)
        held = {name: part for name, part in named_tensors(model).items() if name not in chosen}
        constants = Gathered(held, self.device, dtype, own)
        self._sharded = constants if constants.sharded else None  # to be gathered by all ranks
        own_loss = loss == "model"
        loss = make_loss("cross_entropy" if own_loss else loss)
        evaluate = Evaluator(model, loss, norm, constants, own_loss)
        self._parameters: dict[str, Tensor] = chosen
        self._theta: Tensor | None = None
        self.norm, self.count, self.memory = norm, count, memory_bytes(memory)
        self.batches = self._make_batches(data, batch_size)
        self._evaluate = evaluate.with_count(count)
        self._finish()

    @classmethod
    def from_function(
        cls,
        loss_fn: Callable[..., Any],
        params: Mapping[str, Tensor],
        data: Any = None,
        *,
        loss: str | Loss | Callable[[Any, Any], Tensor] | None = None,
        num_samples: int | None = None,
        batch_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        memory: int | str | None = None,
        ranks: Any = "auto",
    ) -> Self:
        """A problem from ``loss_fn(params, batch) -> mean loss``, or ``loss_fn(params)``.

        With ``loss``, a loss as for a model, the function gives the output and the loss is one of
        that: ``loss(output_fn(params, *inputs), target)`` for batches (*inputs, target), or keyword
        arguments from dicts. Such a problem has a Gauss–Newton matrix and Fishers too.

        Without data, ``num_samples`` says how many samples the loss stands for (1 by default); it
        matters only where n does, as in the learning coefficient.
        """
        require_type(loss_fn, Callable, "loss_fn", "be callable")
        if isinstance(loss, str) and loss == "model":
            cure = "leave it out for one function"
            raise ValueError(message("loss", "be a loss of the function's output", '"model"', cure))
        given = loss is None or data is not None
        require(given, "data", "be given with loss, whose targets are in them", "None")
        named = isinstance(params, Mapping) and len(params) > 0
        named = named and all(isinstance(p, Tensor) for p in params.values())
        require(named, "params", "be a non-empty dict of name to tensor", params, "", TypeError)
        for name, part in params.items():
            kind = f"params[{name!r}]"
            require(part.is_floating_point(), kind, "be floating point", str(part.dtype))
        self = cls.__new__(cls)
        self.ranks, self.source = Ranks.of(ranks), dict(params)
        self.device, self._cast = device_of(params, device), _float_dtype(dtype)
        self._parameters = {name: tensor.detach() for name, tensor in params.items()}
        self._sharded, self._theta = None, None
        self.norm, self.count, self.memory = "eval", None, memory_bytes(memory)
        self._evaluate = (
            FunctionEvaluator(loss_fn, data is not None)
            if loss is None
            else OutputEvaluator(loss_fn, make_loss(loss))
        )
        if data is None:
            count = 1 if num_samples is None else require_count(num_samples, "num_samples")
            # samples of nothing
            self.batches = Batches(partial(iter, [torch.zeros(count, 0)]), self.device, None)
        else:
            absent = num_samples is None
            require(absent, "num_samples", "be left out when data is given", num_samples)
            self.batches = self._make_batches(data, batch_size)
        self._finish()
        return self

    def _finish(self) -> None:
        if torch.is_inference_mode_enabled():
            raise ValueError(
                "a problem must be made outside torch.inference_mode(), got inference mode, which"
                " forbids gradients; torch.no_grad() is fine"
            )
        self.space = Space.of(self._parameters)
        with rng_untouched():
            run = self._evaluate
            if run.shifts is None:
                run = run.read_labels(lambda: self.named(self.vector), self.batches)
            current = self.named(self.vector)
            if self.memory is not None:
                self.batches = cut_to_fit(self.batches, self.memory, run, self.norm, current)
            self._evaluate = check_first_batch(run, current, self.batches)
            if self.norm == "train" and min(self.batches.sizes) == 1 < max(self.batches.sizes):
                single = next(batch for batch in self.batches if batch.size == 1)
                try:  # a layer may need the variance over the batch
                    self._evaluate(current, single)
                except ValueError as error:
                    got = f"one sample in batch {single.index}, for which {error}"
                    cure = 'choose a batch_size that leaves no single sample, or norm="eval"'
                    expected = 'have more than one sample in each batch for norm="train"'
                    raise ValueError(message("data", expected, got, cure)) from error
        self._weigh()

    def _weigh(self, all_count: bool = False) -> None:
        """Weigh the batches and, once all ranks agree on the whole, take this rank's share."""
        run = self._evaluate
        terms = []
        for batch in self.batches:
            if batch.index:  # the first was looked at with the output
                run.check_targets(batch)
            terms.append(float(batch.size) if all_count else run.terms(batch))
        self._total = sum(terms)
        counted = self._total > 0
        require(counted, "data", "hold at least one target that counts", "only ignored targets")
        self.weights = [term / self._total for term in terms]
        # the n of n·L and of nβ
        self.num_terms = round(self._total) if self.count == "tokens" else self.num_samples
        cut = False
        if self.ranks.size > 1:
            point = self.named(self.vector), self.batches.first()
            with rng_untouched():
                cut = distributed.splits(self._evaluate, self.norm, *point)
                seen = distributed.first_look(self._evaluate, *point)
            _ = self.recomputes  # found out here, where all ranks are together
            facts = {
                "n": self.num_samples,
                "P": self.num_parameters,
                "parameters": f"{self.space}",
                "dtype": f"{self.dtype}",
                "norm": self.norm,
                "batches": f"{self.batches.sizes}",
                "loss": f"{type(self.loss_function)}, {cut=}",
                "count": f"{self.count}",
                "weights": torch.tensor(self.weights, dtype=torch.float64),
            }
            self.ranks = distributed.agree_on_data(self.ranks, self.batches, facts)
            self.agree("the problem", seen)
        self.share = Share(self.ranks, self.batches, self.weights, cut, self._evaluate.terms)

    @property
    def num_parameters(self) -> int:
        """P, the length of the flat vector."""
        return self.space.size

    @property
    def num_samples(self) -> int:
        """n, the number of samples."""
        return self.batches.num_samples

    @property
    def has_data(self) -> bool:
        """Whether the loss is one over data, not a function of the parameters alone."""
        return self._evaluate.with_data

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the flat vector: the widest of the parameters'."""
        kinds = {self._cast or tensor.dtype for tensor in self._parameters.values()}
        return reduce(torch.promote_types, kinds, torch.bfloat16)

    @property
    def vector(self) -> Tensor:
        """The current flat parameters (P,), a copy."""
        if self._theta is not None:
            return self._theta.clone()
        if self._sharded is not None:
            self._sharded.refresh()
        place, parts = (self.device, self.dtype), self._parameters.items()
        return self.space.flatten({k: distributed.whole(v).detach().to(*place) for k, v in parts})

    @property
    def loss_function(self) -> Loss | None:
        """The loss at the model's output, or None when the problem is one function."""
        return None if self._evaluate.model_loss else self._evaluate.loss

    @property
    def model(self) -> nn.Module | None:
        """The private copy of the model that is evaluated, or None."""
        return self._evaluate.model if type(self._evaluate) is Evaluator else None

    def chain(self, batch: Batch) -> tuple[list[tuple[str, nn.Module]], Tensor] | None:
        """The layers of a model whose graph shows all that it does (``Evaluator.chain``), and their
        input; None for other models.
        """
        if self.model is None or self.norm == "train":
            return None
        return self._evaluate.chain(batch)

    def tensors(self, parameters: Parameters) -> dict[str, Tensor]:
        """The named parameters with all else that the model holds."""
        return {**self._with_model("tensors").constants(), **parameters}

    def at(self, theta: Tensor | Parameters) -> Problem:
        """The same problem at other parameters: a flat vector, or tensors by name (the rest as is).

        By name also what is held constant can be given: buffers, and parameters that are not in the
        vector. Nothing in it follows later training, not the batch-norm statistics either.
        """
        vector = self.vector if isinstance(theta, Mapping) else self._check_vector(theta)
        run = self._evaluate
        # copies of what training changes: buffers and trainable parameters
        moving = {name for name, part in run.model.named_parameters() if part.requires_grad}
        moving |= {name for name, _ in run.model.named_buffers()}
        held = run.constants()
        constants = {k: v.clone() if k in moving else v for k, v in held.items()}
        if isinstance(theta, Mapping):
            current = self.space.unflatten(vector)
            known = [*current, *held]
            theta = untied(own_names(theta, known), run.model)
            unknown = ", ".join(sorted(set(theta).difference(known))[:5])
            some = ", ".join(known[:4]) + ", …" * (len(known) > 4)
            require(not unknown, "theta", f"name parameters of this problem ({some})", unknown)
            for name, tensor in theta.items():
                shape = (current[name] if name in current else held[name]).shape
                require_type(tensor, Tensor, name, "be a tensor")
                require_shape(tensor, shape, name)
            fixed = {k: v for k, v in theta.items() if k in held}
            constants |= place_tensors(fixed, self.device, self._cast)
            moved = {k: v.to(self.device, self.dtype) for k, v in theta.items() if k in current}
            vector = self._check_vector(self.space.flatten({**current, **moved}))
        evaluate = run.with_constants(constants)
        return copy_with(self, _evaluate=evaluate, _theta=vector.clone(), _sharded=None)

    @property
    def reduced(self) -> bool:
        """Whether the model computes in less than float64."""
        kinds = {self._cast or tensor.dtype for tensor in self._parameters.values()}
        return kinds != {torch.float64}

    def in_double(self, halved: bool = False) -> Problem:
        """The same parameters, constants and data, as they are now, computed with in float64.

        ``halved`` cuts batches in two where samples do not share statistics, so that a pass takes
        the same memory.
        """
        other = self.fixed()
        other._cast, other._theta = torch.float64, self.vector.double()
        held = place_tensors(other._evaluate.constants(), self.device, torch.float64)
        other._evaluate = other._evaluate.with_constants(held)
        rows = max(1, max(self.batches.sizes) // 2)
        split = halved and self.norm != "train" and rows > FEW_ROWS
        other.batches = (self.batches.cut(rows) if split else self.batches).cast(torch.float64)
        if self.ranks.size > 1:
            other._finish()
        elif split:
            other._weigh()  # the first batch was looked at in this problem
        else:
            parts = other.batches, self.weights, False, other._evaluate.terms
            other.share = Share(self.ranks, *parts)
        return other

    def fixed(self) -> Problem:
        """The same problem at its current parameters: it does not follow later training."""
        return self.at(self.vector) if self._theta is None else copy.copy(self)

    @property
    def held_names(self) -> tuple[str, ...]:
        """The buffers and parameters of the model that are not in the vector, by name."""
        return tuple(self._evaluate.constants())

    def restrict(self, parameters: Pattern) -> Problem:
        """The same loss as a function of some of the parameters, the rest held constant."""
        keep, run = self.space.select(parameters), self._evaluate
        current, space = self.named(self.vector), self.space.subspace(keep)
        rest = {name: tensor for name, tensor in current.items() if name not in keep}
        if isinstance(run, FunctionEvaluator):
            function = run.function
            evaluate: Evaluator = FunctionEvaluator(
                lambda params, *batch: function({**rest, **params}, *batch), run.with_data
            )
        else:
            evaluate = run.with_constants({**run.constants(), **rest})
        own = {name: self._parameters[name] for name in keep}
        theta = None if self._theta is None else space.flatten(current)
        return copy_with(self, _evaluate=evaluate, _parameters=own, space=space, _theta=theta)

    def subsample(self, count: int, seed: int = 0, batch_size: int | None = None) -> Problem:
        """The same problem on ``count`` random samples; norm="train" needs ``batch_size``."""
        require_count(count, "count", 1, self.num_samples)
        order = torch.randperm(self.num_samples, generator=generator(seed, "subsample"))
        return self.subset(order[:count], batch_size)

    def subset(self, indices: Tensor | Sequence[int], batch_size: int | None = None) -> Problem:
        """The same problem on the samples at ``indices``, or in a mask, in the data's order."""
        _require_batch_size(self.norm, batch_size)
        return self.on(self.batches.subset(read_indices(indices, self.num_samples), batch_size))

    def on(self, data: Any, batch_size: int | None = None) -> Problem:
        """The same model, loss and parameters on other data, such as a held-out set."""
        own = isinstance(data, Batches)
        other = copy_with(self, batches=data if own else self._make_batches(data, batch_size))
        other._finish()
        return other

    def on_samples(self, indices: Tensor) -> tuple[Problem, float]:
        """The same on some of its own samples, in this order in one batch, and their share in L."""
        batch = self.batches.gather(indices)
        other = self.on_checked(self.batches.only(batch))
        return other, other._total / self._total

    def on_checked(self, batches: Batches) -> Problem:
        """The same problem on some of its own samples, which are not checked again."""
        other = copy_with(self, batches=batches)
        # to count the targets of some a GPU would be waited for
        loss, all_count = self.loss_function, False
        if self.model is not None and type(loss) is CrossEntropy and loss.weight is None:
            whole = self._total == self.num_samples
            all_count = whole and self.target(self.batches.first()).ndim == 1
        other._weigh(all_count)
        return other

    def refresh_statistics(self) -> Problem:
        """The same problem with batch-norm running statistics recomputed over the data.

        They are averaged batch by batch. The user's model keeps its own statistics.
        """
        inner = self._evaluate
        if self.model is None:
            raise ValueError(message("the problem", "have a model", "one made by from_function"))
        constants = inner.constants()
        modules = inner.model.named_modules()
        layers = {name: layer for name, layer in modules if isinstance(layer, BATCH_NORMS)}
        fresh = {}
        for name, layer in layers.items():
            for buffer, _ in layer.named_buffers(prefix=name, recurse=False):
                start = torch.ones_like if buffer.endswith("var") else torch.zeros_like
                fresh[buffer] = start(constants[buffer])
        buffers = [name for name, _ in inner.model.named_buffers() if name not in fresh]
        others = {name: constants[name].clone() for name in buffers}
        tensors = {**constants, **others, **fresh, **self.named(self.vector)}
        with accumulating(layers.values()), torch.no_grad():
            for batch in self.batches:
                args, kwargs, _ = inner.split(batch)
                functional_call(inner.model, tensors, args, kwargs)  # writes to ``fresh``
        return copy_with(self, _evaluate=inner.with_constants({**constants, **fresh}))

    def named(self, theta: Tensor) -> dict[str, Tensor]:
        """A vector (P,), or several (k, P), as named tensors in their parameters' dtypes."""
        parts, own = zip(self.space.names, self.space.split(theta), strict=True), self._parameters
        return {name: view.to(self._cast or own[name].dtype) for name, view in parts}

    def batch_loss(self, parameters: Parameters, batch: Batch) -> Tensor:
        """The mean loss of one batch at named parameters."""
        return self._evaluate(parameters, batch)

    @property
    def recomputes(self) -> bool:
        """Whether passes differentiated once rerun the model's checkpointed parts."""
        run = self._evaluate
        return run.checkpoints and run.recomputes(
            lambda: (self.named(self.vector), self.batches.first())
        )

    def output(self, parameters: Parameters, batch: Batch) -> Any:
        """The model's output for one batch at named parameters."""
        return self._with_model("output").output(parameters, batch)

    def output_loss(self, output: Any, batch: Batch) -> Tensor:
        """The mean loss of one batch as a function of the model's output."""
        return self._with_model("output_loss").loss_of(output, batch)

    def target(self, batch: Batch) -> Any:
        """The target in a batch."""
        return self._with_model("target").split(batch)[2]

    def with_output(self, what: str) -> Problem:
        """The same problem as one of the model's output and a loss of that, which ``what`` needs.

        A model's own loss is taken apart where it is a named loss of its logits and labels, as that
        of causal language models is: where it has the same value and gradient on the first batch.
        Else this raises, and names the cure.
        """
        if self.loss_function is None and self.model is not None:
            for name in OWN_LOSSES:
                named = copy_with(
                    self._evaluate, loss=make_loss(name), model_loss=False, shifts=None
                )
                try:
                    other = copy_with(self, _evaluate=named.with_count(self.count))
                    other._finish()
                # logits or labels of another form
                except (ValueError, TypeError, RuntimeError, LookupError, AttributeError):
                    continue
                if self._is_same_loss(other):
                    return other
        self._with_model(what)
        return self

    def _is_same_loss(self, other: Problem) -> bool:
        """Whether another problem has the same loss and gradient on the first batch."""
        batch, point = self.batches.first(), self.named(self.vector)
        (value, slope), (again, other_slope) = (
            gradient_of(problem._evaluate, point, batch) for problem in (self, other)
        )
        close = min(10 * torch.finfo(self.dtype).eps ** 0.7, 1e-2)
        same = float((slope - other_slope).norm()) <= close * float(slope.norm())
        same = same and abs(value - again) <= close * abs(value)
        return same and bool(np.allclose(self.weights, other.weights, rtol=1e-9))

    def loss(self, theta: Tensor | None = None) -> float:
        """L(θ), summed in float64 over batches."""
        vector = self._check_vector(theta)
        parameters = self.named(vector)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with torch.no_grad():
            parts = [
                weight * self.batch_loss(parameters, batch).double().reshape(())
                for weight, batch in self.share
            ]
            total = torch.stack(parts).sum() if parts else total
        return float(self.ranks.sum(total, "the loss", vector))

    @torch.enable_grad()
    def gradient(self, theta: Tensor | None = None) -> Tensor:
        """∇L(θ), (P,), in the dtype of ``vector``."""
        vector = self._check_vector(theta)
        wide = torch.promote_types(vector.dtype, torch.float32)
        total = torch.zeros(self.num_parameters, dtype=wide, device=self.device)
        for weight, batch in self.share:
            _, grads = self._evaluate.gradients(self.named(vector), batch, self.recomputes)
            total.add_(torch.cat([grad.reshape(-1) for grad in grads]), alpha=weight)
        gradient = self.ranks.sum(total, "the gradient", vector).to(vector.dtype)
        # elsewhere a run may have diverged
        if theta is None and not bool(gradient.isfinite().all()):
            self._require_finite(vector)
            raise ValueError(
                "the gradient must be finite, got NaN or infinity in it; look for a square root, a"
                " norm or a quotient at 0 in the model and the loss"
            )
        return gradient

    def sample_share(self, batch: Batch) -> float:
        """The mean weight of a batch's samples in the mean over all data, 1 on average."""
        place = batch.index
        own = 0 <= place < len(self.weights) and batch.size == self.batches.sizes[place]
        part = self.weights[place] if own else self._evaluate.terms(batch) / self._total
        return part * self.num_samples / batch.size

    def weighted(self) -> Iterator[tuple[float, Batch]]:
        """All batches with their share of the whole mean; those of this rank are in ``share``."""
        return zip(self.weights, self.batches, strict=True)

    def alone(self) -> Problem:
        """The same problem for this process alone; no other rank need take part."""
        if self.ranks.size == 1:
            return self
        ranks = Ranks(None)
        share = Share(ranks, self.batches, self.weights, False, self._evaluate.terms)
        return copy_with(self, ranks=ranks, share=share)

    def agree(self, what: str, besides: Mapping[str, object] | None = None) -> None:
        """Raise where ranks differ in the parameters, the constants, or ``besides``."""
        if self.ranks.size > 1:
            facts = {"the parameters": self.vector, BUFFERS: self._read_constants()}
            self.ranks.agree(what, {**facts, **(besides or {})}, self.device, {BUFFERS: BROADCAST})

    def _read_constants(self) -> list[Tensor]:
        """The constants that a pass reads; norm="train" reads no running statistics."""
        run = self._evaluate
        layers = run.model.named_modules() if self.norm == "train" else ()
        unread = set[str]()
        for name, layer in layers:
            if isinstance(layer, BATCH_NORMS):
                unread.update(key for key, _ in layer.named_buffers(name, recurse=False))
        return [tensor for name, tensor in run.constants().items() if name not in unread]

    def identity(self) -> dict[str, Any]:
        """Digests that identify this problem: of everything that its loss is computed from.

        Every byte of the data counts, which takes a pass over them; so do the parameters, the
        buffers and other constants, the layers and the code of the model, the loss and its
        settings. "behaviour" is the loss of the first sample and its gradient near the parameters:
        it shows what no digest sees, such as a closure. ``behaves_alike`` compares it up to
        rounding; all else is equal or the problem is another one.
        """
        run, theta, named_loss = self._evaluate, self.vector, self.loss_function
        loss = None if isinstance(run, FunctionEvaluator) else run.loss
        # whether the loss may depend on how data are cut into batches
        meet = self.norm == "train" or named_loss is None or isinstance(named_loss, Custom)
        with rng_untouched():
            seen = distributed.behaviour(run, self.named(theta), self.batches.first(), meet)
        model = self.model or getattr(run, "function", None)
        constants = {f"{i}": tensor for i, tensor in enumerate(self._read_constants())}
        return {
            "theta": digest_tensors({"theta": theta}),
            "data": self.batches.digest(cut=meet) if self.has_data else "none",
            "constants": digest_tensors(constants),
            "model": digest(f"{self.space} {structure(model)}".encode())[:32],
            "loss function": digest(structure(loss).encode())[:32],
            "num_terms": self.num_terms,
            "behaviour": list(seen),
        }

    def __repr__(self) -> str:
        unit = f" {self.count}" if self.count else ""
        held = {self._cast or tensor.dtype for tensor in self._parameters.values()}
        kinds, kind = sorted(str(dtype)[6:] for dtype in held), str(self.dtype)[6:]
        kind = kind if kinds == [kind] else f"{kind} vector of {' and '.join(kinds)} parameters"
        return f"Problem(P={self.num_parameters}, n={self.num_terms}{unit}, {kind}, {self.device})"

    def _make_batches(self, data: Any, batch_size: int | None) -> Batches:
        own = isinstance(data, torch.utils.data.DataLoader | Batches)
        if not own and not (isinstance(data, list | tuple) and not is_columns(data)):
            _require_batch_size(self.norm, batch_size)
        default = DEFAULT_BATCH.get(self.device.type, 1024)
        return make_batches(data, batch_size, default, self.device, self._cast)

    def _check_vector(self, theta: Tensor | None) -> Tensor:
        if theta is None:
            return self.vector
        shape = (self.num_parameters,)
        fits, expected = isinstance(theta, Tensor) and theta.shape == shape, "be a tensor of shape"
        path = isinstance(theta, str | PathLike)
        cure = "load it first: problem.at(torch.load(path))" if path else ""
        require(fits, "theta", f"{expected} {shape}", repr(theta) if path else theta, cure)
        got = "a tensor on the meta device, which has a shape alone"
        require(not theta.is_meta, "theta", "hold numbers", got)
        if float((0 * theta.detach()).sum()) != 0.0:  # as isfinite would say, in fewer operations
            self._require_finite(theta)
        if self._sharded is not None:
            self._sharded.refresh()
        return theta.detach().to(self.device, self.dtype)

    def _require_finite(self, theta: Tensor) -> None:
        parts = self.space.unflatten(theta).items()
        wrong = [repr(name) for name, part in parts if not bool(part.isfinite().all())]
        if not wrong:
            return
        raise ValueError(
            f"theta must be finite, got NaN or infinity in {', '.join(wrong[:3])}; load a"
            " checkpoint from before training diverged"
        )

    def _with_model(self, what: str) -> Evaluator:
        run = self._evaluate
        if not run.model_loss:
            return run
        got, cure = 'one with loss="model"', "name the loss of the output, such as"
        cure += ' loss="cross_entropy" with "labels" in the batches'
        if isinstance(run, FunctionEvaluator):
            got = "one made by from_function"
            cure = "give from_function the output function and loss= apart"
        expected = f"be made of a model and a loss of its output for {what}"
        raise TypeError(message("the problem", expected, got, cure))


def _float_dtype(dtype: Any) -> torch.dtype | None:
    known = dtype is None or dtype in (torch.float32, torch.float64, torch.bfloat16)
    require(known, "dtype", "be torch.float32, torch.float64 or torch.bfloat16", repr(dtype))
    return dtype  # type: ignore[no-any-return]


def _require_batch_size(norm: str, batch_size: int | None) -> None:
    given, cure = norm != "train" or batch_size is not None, "batch statistics depend on it"
    require(given, "batch_size", 'be given with norm="train"', "None", cure)


def require_problem(problem: Any) -> None:
    """Raise unless it is a problem; a model is one call away from one."""
    if not isinstance(problem, Problem):
        cure = "make one with lh.Problem(model, loss, data)"
        raise TypeError(message("problem", "be a lambdahat.Problem", problem, cure))
