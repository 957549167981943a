"""What a problem is checked for before it is used: one look at the loss of its first batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lambdahat._core.check import message, require
from lambdahat.problem.batches import Batch, Batches, concatenate, take
from lambdahat.problem.evaluators import (
    TARGET_KEYS,
    AnyEvaluator,
    Evaluator,
    FunctionEvaluator,
    OutputEvaluator,
    Parameters,
    held_by,
)
from lambdahat.problem.losses import NAMED, Custom, GaussianNLL, Loss, OfClasses


@torch.enable_grad()
def checked(
    evaluate: AnyEvaluator, parameters: Parameters, batches: Batches, dtype: torch.dtype
) -> AnyEvaluator:
    """The evaluator, settled on which dimension holds the classes.

    The loss of the first batch must be a finite scalar, differentiable, deterministic and a mean.
    """
    batch = batches.first()
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in parameters.items()}
    evaluate, loss = _first_loss(evaluate, leaves, batches, dtype)
    require(isinstance(loss, Tensor), "loss", "return a tensor", loss, "", TypeError)
    require(
        loss.ndim == 0 or loss.numel() == 1,
        "loss",
        "return one number, the mean over the batch",
        loss,
        'use reduction="mean"',
    )
    grads: tuple[Tensor | None, ...] = (None,)
    if loss.requires_grad:
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    # with a graph, like the first: attention without one is another kernel
    both = [value.detach().reshape(()) for value in (loss, evaluate(leaves, batch))]
    wide = reduce(torch.promote_types, (total.dtype for _, total in batches.sums), loss.dtype)
    each = [value.to(loss.device, wide) for value in (*both, *(total for _, total in batches.sums))]
    once, again, *totals = torch.stack(each).tolist()  # read at once, for which a GPU is waited for
    if not math.isfinite(once):
        _blame(evaluate, parameters, batch, once)
    with torch.no_grad():
        suspect = {
            index
            for (index, _), total in zip(batches.sums, totals, strict=True)
            if not math.isfinite(total)
        }
        for later in batches.some(suspect) if suspect else ():
            value = float(evaluate(parameters, later))
            if not math.isfinite(value):  # else the model or the loss masks what is not finite
                _blame(evaluate, parameters, later, value)
    require(
        any(grad is not None for grad in grads),
        "loss",
        "depend on the selected parameters",
        "one whose gradient is None",
        "do not detach, use no_grad or argmax on the way to it",
    )
    require(
        abs(once - again) <= 64 * torch.finfo(loss.dtype).eps * abs(once),
        "the model",
        "give the same loss twice",
        f"{once:.9g} then {again:.9g}",
        "switch off dropout or noise that is on in eval mode",
    )
    loss_of_output = (
        evaluate.loss if isinstance(evaluate, Evaluator) and not evaluate.model_loss else None
    )
    if type(loss_of_output) not in NAMED.values():  # those are means as they are made
        with torch.no_grad():
            _require_mean(evaluate, leaves, batch)
    return evaluate


def _blame(evaluate: AnyEvaluator, parameters: Parameters, batch: Batch, loss: float) -> None:
    """Raise for a loss that is not finite, and name what is not finite before it: data,
    parameters, or neither.
    """
    place = "the first batch" if not batch.index else f"batch {batch.index}"
    parts = {"the data": batch.data}
    if isinstance(evaluate, Evaluator):
        args, kwargs, target = evaluate.split(batch)
        parts = {
            **{f"the input {name!r}": value for name, value in kwargs.items()},
            "the inputs": args,
            "the targets": target,
        }
    for name, part in parts.items():
        for leaf in tree_leaves(part):
            if (
                isinstance(leaf, Tensor)
                and leaf.is_floating_point()
                and not bool(leaf.isfinite().all())
            ):
                wrong = leaf.isfinite().logical_not()
                rows = (
                    wrong.reshape(len(wrong), -1).any(dim=1).nonzero().flatten()
                    if wrong.ndim
                    else wrong.nonzero()
                )
                what = "NaN" if bool(leaf.isnan().any()) else "infinity"
                require(
                    False,
                    f"{name} of {place}",
                    "be finite",
                    f"{what} in {len(rows)} of {batch.size} samples, first in sample"
                    f" {int(rows[0])}",
                    "drop those samples, or fill in what is missing",
                )
    for name, tensor in parameters.items():
        require(
            bool(tensor.isfinite().all()),
            f"the parameter {name!r}",
            "be finite",
            "NaN or infinity in it",
            "load a checkpoint from before training diverged",
        )
    require(
        False,
        f"the loss of {place}",
        "be finite",
        repr(loss),
        "data and parameters are: look for a log or a division of 0 in the model and the loss",
    )


def _first_loss(
    evaluate: AnyEvaluator, leaves: Parameters, batches: Batches, dtype: torch.dtype
) -> tuple[AnyEvaluator, Any]:
    """The evaluator, settled, and the first batch's loss, with errors that say which call failed
    and on what.
    """
    batch = batches.first()
    if not isinstance(evaluate, Evaluator) or evaluate.model_loss:
        with _explained(evaluate, batch, dtype):
            return evaluate, evaluate(leaves, batch)
    with _explained(evaluate, batch, dtype):
        output = evaluate.output(leaves, batch)
    target = evaluate.split(batch)[2]
    if not isinstance(evaluate.loss, Custom):
        _require_tensors(evaluate.loss, output, target, batch)
    try:
        if isinstance(evaluate.loss, OfClasses):
            evaluate = _settled(evaluate, evaluate.loss, leaves, batches, output)
        evaluate.loss.check(output, target)
    except ValueError as error:
        if not isinstance(batch.data, Tensor):
            raise
        raise ValueError(
            f"data must give (inputs, targets) batches for loss {evaluate.loss.name!r}, got inputs"
            f" alone, {tuple(batch.data.shape)}; pass (x, y). As their own targets, for an"
            f" autoencoder: {error}"
        ) from error
    with _explained(evaluate, batch, dtype):
        return evaluate, evaluate.loss_of(output, batch)


def _require_tensors(loss: Loss, output: Any, target: Any, batch: Batch) -> None:
    """A loss of the library's own is one of tensors."""
    if not isinstance(output, Tensor) and not isinstance(loss, GaussianNLL):
        cure = 'return it as "logits", wrap the model, or pass a callable loss(output, target)'
        expected = f"be a tensor for loss {loss.name!r}"
        raise TypeError(message("the model's output", expected, held_by(output), cure))
    if not isinstance(target, Tensor):
        got = "inputs alone" if target is None else held_by(target)
        expected = f"give (inputs, targets) batches for loss {loss.name!r}"
        cure = f"use (x, y) tuples, or dicts with the target under {_keys()}"
        raise TypeError(message("data", expected, got, cure))


def _keys() -> str:
    return " or ".join(f'"{key}"' for key in TARGET_KEYS)


def _untold(evaluate: AnyEvaluator, data: Any) -> str:
    """What may be wrong with data that name no target; empty where they do, or where a model has
    its own loss.
    """
    if not isinstance(evaluate, Evaluator) or evaluate.model_loss:
        return ""
    if isinstance(data, Tensor) or (isinstance(data, tuple | list) and len(data) == 1):
        return (
            "; the data are inputs alone, taken for their own targets: pass (x, y) to give others"
        )
    if isinstance(data, Mapping) and not any(key in data for key in TARGET_KEYS):
        return (
            f"; the batch holds {', '.join(map(repr, data))} and no target, which goes under"
            f" {_keys()}"
        )
    return ""


def _settled(
    evaluate: Evaluator, loss: OfClasses, parameters: Parameters, batches: Batches, first: Tensor
) -> Evaluator:
    """Decide once which dimension holds the classes, from the first batch that shows it."""
    with torch.no_grad():
        outputs = (
            evaluate.output(parameters, batch) if i else first for i, batch in enumerate(batches)
        )
        targets = (evaluate.split(batch)[2] for batch in batches)
        return evaluate.with_loss(loss.settled(zip(outputs, targets, strict=True)))


@contextmanager
def _explained(evaluate: AnyEvaluator, batch: Batch, dtype: torch.dtype) -> Iterator[None]:
    """Errors of the user's own code with a note on what it was called with."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        tensors = [leaf for leaf in tree_leaves(batch.data) if isinstance(leaf, Tensor)]
        given = ", ".join(f"{tuple(leaf.shape)} {leaf.dtype}" for leaf in tensors)
        form = "a batch is (*inputs, target) or a dict of keyword arguments; dtype= casts both"
        if isinstance(evaluate, OutputEvaluator):
            form = (
                "with loss=, it is called as output_fn(params, *inputs), or with keyword arguments"
                " from a dict"
            )
        if isinstance(evaluate, FunctionEvaluator):
            form = (
                "it is called as loss_fn(params, batch)"
                if evaluate.with_data
                else "loss_fn(params)"
            )
        untold = _untold(evaluate, batch.data)
        error.add_note(
            f"lambdahat: raised at the first batch, {given}, with {dtype} parameters;"
            f" {form}{untold}"
        )
        raise


def _require_mean(evaluate: AnyEvaluator, leaves: Parameters, batch: Batch) -> None:
    """A mean does not change when every sample is there twice; a sum doubles."""
    if isinstance(evaluate, FunctionEvaluator) and not evaluate.with_data:
        return
    few = take(batch, slice(4))
    try:
        once = float(evaluate(leaves, few))
        twice = float(evaluate(leaves, Batch(concatenate([few.data, few.data]), 2 * few.size)))
    except (RuntimeError, ValueError, TypeError, IndexError):
        return  # a model for one batch size only: nothing to compare
    summed = abs(once) > 1e-6 and abs(twice / once - 2.0) < 1e-3
    require(
        not summed,
        "loss",
        "average over the batch",
        "a sum: it doubles when the batch does",
        "divide by the batch size",
    )
