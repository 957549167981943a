"""How the loss of a batch is computed from named parameters, by a model and a loss or by one
function, and the checks of the first batch's loss before a problem is used.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from lambdahat._core.check import describe, message, require, require_type
from lambdahat._core.device import AsWritten
from lambdahat.problem import losses
from lambdahat.problem.batches import Batch, Batches, concatenate, copy_with, restored, take
from lambdahat.problem.checkpointing import checkpoints_of, recomputing
from lambdahat.problem.losses import IGNORE, KEY, CrossEntropy, Custom, Loss

Parameters = Mapping[str, Tensor]
TARGET_KEYS = ("labels", "label", "targets", "target")
UNDER = " or ".join(f'"{key}"' for key in TARGET_KEYS)
# what a decoder reads, where it is not made of the labels
DECODER = ("decoder_input_ids", "decoder_inputs_embeds")
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
LOGITS, LOSS = "logits", "loss"  # by which names models give them
LARGE = 1 << 20  # bytes of a tensor above which a copy for every pass would cost time and memory
# torch's own layers that take every sample by itself: from inputs of so many dimensions, …
_IMAGES = (
    (nn.Conv1d, nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveMaxPool1d, nn.AdaptiveAvgPool1d),
    (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveMaxPool2d, nn.AdaptiveAvgPool2d),
    (nn.Conv3d, nn.MaxPool3d, nn.AvgPool3d, nn.AdaptiveMaxPool3d, nn.AdaptiveAvgPool3d),
)
OF_IMAGES = {kind: place + 3 for place, kinds in enumerate(_IMAGES) for kind in kinds}
# … and from any
OF_ROWS = {
    *(nn.Linear, nn.Flatten, nn.Identity, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout),
    *(nn.ReLU, nn.LeakyReLU, nn.ReLU6, nn.Hardtanh, nn.Hardshrink, nn.Softshrink, nn.Threshold),
    *(nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.SELU, nn.CELU, nn.Mish, nn.Softplus),
    *(nn.LogSigmoid, nn.Hardswish, nn.Tanhshrink),
}
SINGLE = (
    "data must be a list of batches, got a first batch with {}; make one batch of single samples:"
    " torch.utils.data.default_collate(samples)"
)
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Evaluator:
    """How a model and a loss, or one function, give a batch's loss at named parameters."""

    with_data = True  # whether the loss is one over data, not of the parameters alone

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        norm: str,
        constants: Callable[[], dict[str, Tensor]],
        model_loss: bool,
    ) -> None:
        self.model, self.loss, self.norm, self.model_loss = model, loss, norm, model_loss
        # what is not in the vector; it follows the model until ``with_constants``
        self.constants = constants
        # whether the model's labels are those of the next position; None: not yet seen
        self.shifts: bool | None = None
        self.feeds = False  # whether the model makes the inputs of its decoder of the labels
        # whether the model's own loss, a mean over labels, is to be one over sequences
        self.by_sequence = False
        # whether the model was seen to run parts by torch.utils.checkpoint
        self.checkpoints = False
        self._recomputes: bool | None = None
        self._copied: frozenset[str] | None = None  # the constants that every pass gets copies of

    def with_constants(self, constants: dict[str, Tensor]) -> Self:
        """The same with other values of what is not in the vector."""
        # the first pass with others is to show whether it writes to them
        copied = self._copied if constants.keys() <= self.constants().keys() else None
        return copy_with(self, constants=lambda: constants, _copied=copied)

    def with_count(self, count: str | None) -> Self:
        """The same for labels counted in tokens or sequences."""
        loss = self.loss if self.model_loss else self.loss.with_count(count)
        return copy_with(self, loss=loss, by_sequence=count == "sequences")

    def read_labels(self, current: Callable[[], Parameters], batches: Iterable[Batch]) -> Self:
        """The same, knowing what the model does with labels where the data have some."""
        for batch in batches:  # the first with a label that counts, where labels are (B, T, …)
            labels = losses.token_labels(batch.data)
            if labels is None or labels.ndim < 2:
                return self
            if bool(labels.ne(IGNORE).any()):
                break
        else:
            return self
        parameters = current()

        def own_loss(data: Mapping[str, Any]) -> Any:
            return _part_of(self._run(parameters, (), data), LOSS, None)

        shifts, feeds = losses.shifts_labels(own_loss, batch), self.feeds
        config = getattr(self.model, "config", None)
        if not self.model_loss and getattr(config, "is_encoder_decoder", False):
            feeds = losses.takes_labels(own_loss, batch)
            missing = DECODER[0] in inspect.signature(self.model.forward).parameters
            missing = missing and not any(name in batch.data for name in DECODER)
            if missing and not feeds:
                raise ValueError(
                    f"data must hold {DECODER[0]!r} for an encoder-decoder that computes no loss of"
                    f' "labels", got a batch of {", ".join(map(repr, batch.data))}; add them, the'
                    " labels moved by one to the right, or use a model with its own loss"
                )
        return copy_with(self, shifts=shifts, feeds=feeds)

    def split(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """A batch as positional inputs, keyword inputs and target."""
        data = batch.data
        if isinstance(data, Mapping):
            keys = [] if self.model_loss else [key for key in TARGET_KEYS if key in data]
            key = keys[0] if keys else None
            fed = key == KEY and self.feeds and not any(name in data for name in DECODER)
            inputs = {name: restored(value) for name, value in data.items() if fed or name != key}
            if key == KEY and self.shifts:
                # each position predicts the next label, and the last none
                labels, ignored = data[KEY], getattr(self.loss, "ignored", IGNORE)
                last = labels.new_full(labels[:, :1].shape, ignored)
                return (), inputs, torch.cat([labels[:, 1:], last], dim=1)
            if self.model_loss:
                return (), inputs, data
            return (), inputs, restored(data if key is None else data[key])
        if isinstance(data, tuple | list):
            *inputs_, target = data if len(data) > 1 else (*data, None)
            return tuple(restored(value) for value in inputs_), {}, restored(target)
        return (data,), {}, data

    def output(self, parameters: Parameters, batch: Batch) -> Any:
        """What the loss takes of what the model gives for a batch."""
        args, kwargs, _ = self.split(batch)
        kept = self._kept(batch) if self.model_loss else None
        # a mean over no label would be NaN: any label does, for its weight is 0
        if kept is not None:
            kwargs = {**kwargs, KEY: torch.where(kept > 0, kwargs[KEY], 0)}
        output = self._run(parameters, args, kwargs)
        return output if isinstance(output, Tensor) else self.read(output)

    def _run(self, parameters: Parameters, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What the model gives for its arguments.

        A pass may write to the constants, so it gets copies: the first of all but large parameters
        that are no bounded embeddings, later ones of what was written to and of small buffers. The
        rest is watched, by version.
        """
        constants, names = self.constants(), self._copied
        first = names is None
        if names is None:
            always = {name for name, _ in self.model.named_buffers()}
            for name, layer in self.model.named_modules():
                if isinstance(layer, EMBEDDINGS) and layer.max_norm is not None:
                    always.add(f"{name}.weight" if name else "weight")
            names = frozenset(k for k, v in constants.items() if k in always or not _is_large(v))
        copies = {name: constants[name].clone() for name in names}
        own = {name: tensor for name, tensor in constants.items() if name not in copies}
        before = [_version(tensor) for tensor in own.values()]
        tensors = {**constants, **copies, **parameters}
        with AsWritten(), checkpoints_of(self.model, tensors) as met:
            output = functional_call(self.model, tensors, args, dict(kwargs))
        for (name, tensor), version in zip(own.items(), before, strict=True):
            if _version(tensor) != version:
                raise ValueError(
                    "the model must not write to tensors that are held constant, got a pass that"
                    f" wrote to {name!r}, which is now changed; put it back, and have forward write"
                    f" to a clone of it, or make it a buffer of at most {LARGE >> 20} MiB, which"
                    " passes get copies of"
                )
        if first:
            self._copied = self._still_copied(copies, constants)
        self.checkpoints = self.checkpoints or bool(met)
        return output

    def read(self, output: Any) -> Any:
        """What the loss takes of a model's output: the logits of an object or a dict, or all."""
        plain = isinstance(output, Mapping) and not hasattr(output, LOGITS)
        if self.model_loss or (type(self.loss) is Custom and plain):
            return output
        return _part_of(output, LOGITS, output)

    def _still_copied(
        self, copies: dict[str, Tensor], constants: dict[str, Tensor]
    ) -> frozenset[str]:
        """The constants of which all passes after the first get copies."""
        # the running statistics of torch's own layers in eval mode are only read
        fixed = {
            key
            for name, layer in self.model.named_modules()
            if isinstance(layer, nn.modules.batchnorm._NormBase) and not layer.training
            if type(layer).__module__.startswith("torch.nn.")
            for key, _ in layer.named_buffers(name, recurse=False)
        }
        buffers = {name for name, _ in self.model.named_buffers()} - fixed
        small = {name for name in buffers.intersection(copies) if not _is_large(copies[name])}
        # batch-norm does not raise the version of the statistics it writes, and inference mode has
        # none: values tell
        unsure = {name for name in copies if name in buffers or copies[name].is_inference()}
        changed = {k for k in unsure - small if not torch.equal(copies[k], constants[k])}
        return frozenset(small | changed | {k for k, v in copies.items() if _version(v) > 0})

    def loss_of(self, output: Any, batch: Batch) -> Tensor:
        """The mean loss of a batch whose output is known."""
        if not self.model_loss:
            return self.loss.value(restored(output), self.split(batch)[2])
        loss, kept = _part_of(output, LOSS, None), self._kept(batch)
        if not isinstance(loss, Tensor):
            raise TypeError(
                'the output of a model with loss="model" must hold its loss, got'
                f' {describe_output(output)}; give "labels" in each batch, return it as "loss", or'
                " name a loss"
            )
        if kept is None:
            return loss
        return loss * (kept / batch.size if self.by_sequence else (kept > 0)).to(loss.dtype)

    def __call__(self, parameters: Parameters, batch: Batch) -> Tensor:
        if self.model_loss:
            return self.loss_of(self.output(parameters, batch), batch)
        args, kwargs, target = self.split(batch)
        output = self._run(parameters, args, kwargs)
        return self.loss.value(
            output if isinstance(output, Tensor) else restored(self.read(output)), target
        )

    def chain(self, batch: Batch) -> tuple[list[tuple[str, nn.Module]], Tensor] | None:
        """The layers by name, in their order, of a chain of torch's own, and their input; None for
        other models.

        In a chain every sample is taken by itself, and the graph of its output shows all that it
        does: no layer has a hook, a forward pass or a kind of parameters of its own. Hooks come and
        go, so that this is looked at anew each time.
        """
        args, kwargs, _ = ((), {}, None) if self.model_loss else self.split(batch)
        if kwargs or len(args) != 1 or type(args[0]) is not Tensor:
            return None
        layers, left, held, dims = [], [("", self.model)], list[int](), args[0].ndim
        while left:
            name, layer = left.pop()
            kind, state = type(layer), vars(layer)
            known = kind is nn.Sequential or kind in OF_ROWS or OF_IMAGES.get(kind) == dims
            # torch's own pass, which users replace in a layer or in its class
            known = known and "forward" not in state
            known = known and kind.forward.__module__.startswith("torch.nn.")
            if not known or any(map(state.get, HOOKS)):
                return None
            if kind is nn.Sequential:
                dot = f"{name}." if name else ""
                parts = [(f"{dot}{key}", part) for key, part in layer._modules.items()]
                left += [(key, part) for key, part in reversed(parts) if part is not None]
                continue
            tensors = [*layer._parameters.values(), *layer._buffers.values()]
            tensors = [tensor for tensor in tensors if tensor is not None]
            if layer.training or not {nn.Parameter, Tensor}.issuperset(map(type, tensors)):
                return None
            if isinstance(layer, nn.Flatten):
                if (layer.start_dim, layer.end_dim) != (1, -1):
                    return None
                dims = 2
            layers.append((name, layer))
            held += map(id, tensors)  # a layer or a tensor that is there twice has one name only
        everywhere = any(getattr(nn.modules.module, f"_global{hooks}") for hooks in HOOKS)
        single = dims > 1 and len(set(held)) == len(held)
        return None if everywhere or not single else (layers, args[0])

    def recomputes(self, point: Callable[[], tuple[Parameters, Batch]]) -> bool:
        """Whether the model checkpoints, with the same gradient where those parts rerun; tried
        once.
        """
        if self.checkpoints and self._recomputes is None:
            self._recomputes = self._same_again(*point())
        return bool(self._recomputes)

    def gradients(
        self, parameters: Parameters, batch: Batch, again: bool = False
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The mean loss of a batch and its gradients, 0 by parameters that it does not depend on;
        ``again`` reruns the model's checkpointed parts.
        """
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in parameters.items()}
        with torch.enable_grad(), recomputing(again):
            loss = self(leaves, batch)
        values = list(leaves.values())
        return loss.detach(), torch.autograd.grad(loss, values, materialize_grads=True)

    def _same_again(self, parameters: Parameters, batch: Batch) -> bool:
        """Whether a few samples' gradient is the same when checkpointed parts rerun."""
        few = take(batch, slice(2))
        try:
            _, kept = self.gradients(parameters, few)
        except (RuntimeError, ValueError, TypeError, IndexError):  # a model for one batch size only
            few, (_, kept) = batch, self.gradients(parameters, batch)
        try:
            _, again = self.gradients(parameters, few, again=True)
        except RuntimeError:  # a part that does not run twice
            return False
        pairs = zip(kept, again, strict=True)
        return all(torch.allclose(a, b, 1e-3, 1e-3 * float(a.abs().max())) for a, b in pairs)

    def terms(self, batch: Batch) -> float:
        """The weight of a batch before normalisation."""
        if not self.model_loss:
            return self.loss.terms(self.split(batch)[2], batch.size)
        kept = self._kept(batch)
        return float(batch.size if kept is None or self.by_sequence else kept)

    def check_targets(self, batch: Batch) -> None:
        """Raise for targets that the loss does not take."""
        if not self.model_loss:
            self.loss.check_targets(self.split(batch)[2])

    def _kept(self, batch: Batch) -> Tensor | None:
        """How many labels a model's own loss averages over, a tensor (), or None."""
        labels = losses.token_labels(batch.data)
        if labels is None:
            return None
        return (labels[:, 1:] if self.shifts else labels).ne(IGNORE).sum()


def run_layer(layer: Any, own: Mapping[str, Tensor], given: Tensor) -> Tensor:
    """What a layer of a chain gives with parameters and buffers of these values."""
    weight, bias = own.get("weight"), own.get("bias")
    if isinstance(layer, nn.Linear):
        return F.linear(given, own["weight"], bias)
    if isinstance(layer, nn.modules.conv._ConvNd):
        return layer._conv_forward(given, own["weight"], bias)
    if isinstance(layer, nn.modules.batchnorm._BatchNorm):
        mean, variance = own["running_mean"], own["running_var"]
        return F.batch_norm(given, mean, variance, weight, bias, eps=layer.eps)
    return layer(given)  # type: ignore[no-any-return]


def _part_of(output: Any, name: str, default: Any) -> Any:
    """A part of a model's output by name: under that key of a mapping, or an attribute."""
    attribute = getattr(output, name, None)
    if isinstance(output, Mapping) and (name in output or attribute is None):
        return output.get(name, default)
    return default if attribute is None else attribute


def describe_output(output: Any) -> str:
    """What an output is, for an error: of a mapping its keys."""
    keys = f" of {', '.join(map(repr, output)) or 'nothing'}" if isinstance(output, Mapping) else ""
    return f"{type(output).__name__}{keys}" if keys else describe(output)


def _is_large(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.numel() * tensor.element_size() > LARGE


def _version(tensor: Tensor) -> int:
    """How often it was written to in place; inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version


class OutputEvaluator(Evaluator):
    """The output as a function of named parameters and a batch's inputs, and a loss of it."""

    def __init__(self, function: Callable[..., Any], loss: Loss) -> None:
        super().__init__(nn.Module(), loss, "eval", dict, False)
        self.function = function

    def _run(self, parameters: Parameters, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with AsWritten():
            return self.function({**self.constants(), **parameters}, *args, **kwargs)


class FunctionEvaluator(Evaluator):
    """The loss as one function of named parameters and, where there is data, a batch."""

    def __init__(self, function: Callable[..., Tensor], with_data: bool) -> None:
        super().__init__(nn.Module(), Custom(function), "eval", dict, True)
        self.function, self.with_data, self.shifts = function, with_data, False

    def __call__(self, parameters: Parameters, batch: Batch) -> Tensor:
        data = (restored(batch.data),) if self.with_data else ()
        with AsWritten():
            return self.function(dict(parameters), *data)

    def terms(self, batch: Batch) -> float:
        return float(batch.size)


@torch.enable_grad()
def check_first_batch(evaluate: Evaluator, parameters: Parameters, batches: Batches) -> Evaluator:
    """The evaluator, settled on which dimension holds the classes.

    The loss of the first batch must be a finite scalar, differentiable, deterministic and a mean.
    """
    batch = batches.first()
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in parameters.items()}
    evaluate, loss = _first_loss(evaluate, leaves, batches)
    cure = "leave out .item() and float()" if isinstance(loss, float) else ""
    require_type(loss, Tensor, "loss", "return a tensor", cure)
    single, cure = loss.ndim == 0 or loss.numel() == 1, 'use reduction="mean"'
    require(single, "loss", "return one number, the mean over the batch", loss, cure)
    named = not evaluate.model_loss and type(evaluate.loss) in losses.NAMED.values()
    # a chain of torch's own layers has a gradient, and gives the same twice
    known = named and type(evaluate) is Evaluator and evaluate.chain(batch) is not None
    grads: tuple[Tensor | None, ...] = (None,)
    if loss.requires_grad and not known:
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    # with a graph, like the first: attention without one is another kernel
    other = loss if known else evaluate(leaves, batch)
    values = [value.detach().reshape(()) for value in (loss, other)]
    values += [total for _, total in batches.sums]
    wide = reduce(torch.promote_types, (value.dtype for value in values[2:]), loss.dtype)
    each = torch.stack([value.to(loss.device, wide) for value in values])
    once, again, *totals = each.tolist()  # read at once, for which a GPU is waited for
    if not math.isfinite(once):
        _blame(evaluate, parameters, batch, once)
    with torch.no_grad():
        pairs = zip(batches.sums, totals, strict=True)
        suspect = {index for (index, _), total in pairs if not math.isfinite(total)}
        for later in batches.some(suspect) if suspect else ():
            value = float(evaluate(parameters, later))
            if not math.isfinite(value):  # else the model or the loss masks what is not finite
                _blame(evaluate, parameters, later, value)
    depends = loss.requires_grad if known else any(grad is not None for grad in grads)
    if not depends:
        raise ValueError(
            "loss must depend on the selected parameters, got one whose gradient is None; do not"
            " detach, use no_grad or argmax on the way to it"
        )
    if not abs(once - again) <= 64 * torch.finfo(loss.dtype).eps * abs(once):
        raise ValueError(
            f"the model must give the same loss twice, got {once:.9g} then {again:.9g}; switch off"
            " dropout or noise that is on in eval mode"
        )
    if not named:  # those are means as they are made
        with torch.no_grad():
            _require_mean(evaluate, leaves, batch)
    return evaluate


def _blame(evaluate: Evaluator, parameters: Parameters, batch: Batch, loss: float) -> None:
    """Raise for a non-finite loss, and name the cause: data, parameters, or neither."""
    place = "the first batch" if not batch.index else f"batch {batch.index}"
    parts = {"the data": batch.data}
    if not isinstance(evaluate, FunctionEvaluator):
        args, kwargs, target = evaluate.split(batch)
        parts = {f"the input {name!r}": value for name, value in kwargs.items()}
        parts |= {"the inputs": args, "the targets": target}
    for name, leaf in ((name, leaf) for name, part in parts.items() for leaf in tree_leaves(part)):
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            continue
        wrong = leaf.isfinite().logical_not()
        rows = wrong.reshape(len(wrong) if wrong.ndim else 1, -1).any(dim=1).nonzero().flatten()
        if len(rows):
            what = "NaN" if bool(leaf.isnan().any()) else "infinity"
            raise ValueError(
                f"{name} of {place} must be finite, got {what} in {len(rows)} of"
                f" {batch.size} samples, first in sample {int(rows[0])}; drop those samples, or"
                " fill in what is missing"
            )
    for name, tensor in parameters.items():
        cure, finite = "load a checkpoint from before training diverged", tensor.isfinite().all()
        require(bool(finite), f"the parameter {name!r}", "be finite", "NaN or infinity in it", cure)
    raise ValueError(
        f"the loss of {place} must be finite, got {loss!r}; data and parameters are: look for a"
        " log or a division of 0 in the model and the loss"
    )


def _first_loss(evaluate: Evaluator, leaves: Parameters, batches: Batches) -> tuple[Evaluator, Any]:
    """The evaluator, settled, and the first batch's loss; errors say which call failed."""
    batch = batches.first()
    if evaluate.model_loss:
        with _explain_errors(evaluate, leaves, batch):
            return evaluate, evaluate(leaves, batch)
    target, loss = evaluate.split(batch)[2], evaluate.loss
    if isinstance(target, Tensor) and target.ndim == 0:
        raise ValueError(SINGLE.format("a target that is one number"))
    with _explain_errors(evaluate, leaves, batch):
        output = evaluate.output(leaves, batch)
    if _takes_one_sample(evaluate, leaves, batch, output):
        raise ValueError(SINGLE.format("inputs that the model takes as one sample"))
    # the library's own losses take tensors
    if not isinstance(output, Tensor) and not isinstance(loss, Custom | losses.GaussianNLL):
        cure = 'return it as "logits", wrap the model, or pass a callable loss(output, target)'
        expected = f"be a tensor for loss {loss.name!r}"
        raise TypeError(message("the model's output", expected, describe_output(output), cure))
    expected = f"give (inputs, targets) batches for loss {loss.name!r}"
    if not isinstance(target, Tensor) and not isinstance(loss, Custom):
        got = "inputs alone" if target is None else describe_output(target)
        cure = f"use (x, y) tuples, or dicts with the target under {UNDER}"
        raise TypeError(message("data", expected, got, cure))
    try:
        if isinstance(loss, CrossEntropy):
            # decide once which dimension holds the classes, from the first batch that shows it
            with torch.no_grad():
                passes = enumerate(batches)
                outputs = (evaluate.output(leaves, each) if i else output for i, each in passes)
                targets = (evaluate.split(each)[2] for each in batches)
                evaluate = copy_with(evaluate, loss=loss.settle(zip(outputs, targets, strict=True)))
        evaluate.loss.check(output, target)
    except ValueError as error:
        if not isinstance(batch.data, Tensor):
            raise
        got = f"inputs alone, {tuple(batch.data.shape)}"
        cure = f"pass (x, y); the inputs cannot be their own targets, as in an autoencoder: {error}"
        raise ValueError(message("data", expected, got, cure)) from error
    with _explain_errors(evaluate, leaves, batch):
        return evaluate, evaluate.loss_of(output, batch)


def _takes_one_sample(evaluate: Evaluator, leaves: Parameters, batch: Batch, output: Any) -> bool:
    """Whether vectors (B,) are not B numbers to the model: it takes no fewer of them."""
    inputs = tree_leaves(evaluate.split(batch)[:2])
    flat = isinstance(output, Tensor) and output.ndim == 1 and type(evaluate) is Evaluator
    if not flat or not all(isinstance(x, Tensor) and x.ndim == 1 for x in inputs):
        return False
    try:
        evaluate.output(leaves, take(batch, slice(1)))
    except RuntimeError:
        return batch.size > 1
    return False


def _missing_target(evaluate: Evaluator, data: Any) -> str:
    """What may be wrong with data that name no target, or ""."""
    if evaluate.model_loss:
        return ""
    if isinstance(data, Tensor) or (isinstance(data, tuple | list) and len(data) == 1):
        return (
            "; the data are inputs alone, taken for their own targets: pass (x, y) to give others"
        )
    if isinstance(data, Mapping) and not any(key in data for key in TARGET_KEYS):
        held = ", ".join(map(repr, data))
        return f"; the batch holds {held} and no target, which goes under {UNDER}"
    return ""


@contextmanager
def _explain_errors(evaluate: Evaluator, leaves: Parameters, batch: Batch) -> Iterator[None]:
    """Errors of the user's own code with a note on what it was called with."""
    try:
        yield
    except Exception as error:
        tensors = [leaf for leaf in tree_leaves(batch.data) if isinstance(leaf, Tensor)]
        given = ", ".join(f"{tuple(leaf.shape)} {leaf.dtype}" for leaf in tensors)
        kinds = " and ".join(sorted({str(leaf.dtype) for leaf in leaves.values()}))
        if isinstance(evaluate, FunctionEvaluator):
            form = f"it is called as loss_fn({'params, batch' if evaluate.with_data else 'params'})"
        elif isinstance(evaluate, OutputEvaluator):
            form = "with loss=, it is called as output_fn(params, *inputs), or with keyword"
            form += " arguments from a dict"
        else:
            form = "a batch is (*inputs, target) or a dict of keyword arguments;"
            form += " dtype=torch.float32 casts parameters and real numbers in the data"
            inputs = tree_leaves(evaluate.split(batch)[:2])
            if any(isinstance(leaf, Tensor) and not leaf.is_floating_point() for leaf in inputs):
                form += ", not integers: call .float() on those that are no indices"
        place = f"at the first batch, {given}, " if evaluate.with_data else ""
        missing = _missing_target(evaluate, batch.data)
        error.add_note(f"lambdahat: raised {place}with {kinds} parameters; {form}{missing}")
        raise


def _require_mean(evaluate: Evaluator, leaves: Parameters, batch: Batch) -> None:
    """A mean does not change when every sample is there twice; a sum doubles."""
    if not evaluate.with_data:
        return
    few = take(batch, slice(4))
    try:
        once = float(evaluate(leaves, few))
        twice = float(evaluate(leaves, Batch(concatenate([few.data, few.data]), 2 * few.size)))
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):
        return  # a model for one batch size only: nothing to compare
    summed = abs(once) > 1e-6 and abs(twice / once - 2.0) < 1e-3
    got, cure = "a sum: it doubles when the batch does", "divide by the batch size"
    require(not summed, "loss", "average over the batch", got, cure)
