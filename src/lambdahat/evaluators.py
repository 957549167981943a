"""How the loss of a batch is computed from named parameters: by a model and a loss, or by one function."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lambdahat._check import require
from lambdahat.batches import Batch
from lambdahat.losses import IGNORE, Loss

Parameters = Mapping[str, Tensor]
TARGET_KEYS = ("labels", "label", "targets", "target")


class Evaluator:
    """How a loss is computed from named parameters and a batch: by a model and a loss, or by one function."""

    def __init__(
        self, model: nn.Module, loss: Loss, norm: str, constants: Callable[[], dict[str, Tensor]], model_loss: bool
    ) -> None:
        self.model, self.loss, self.norm, self._constants, self.model_loss = model, loss, norm, constants, model_loss
        self._written: frozenset[str] | None = None  # the buffers that a forward pass writes to: it gets copies

    @property
    def constants(self) -> dict[str, Tensor]:
        """What is not in the vector, as it is now: it follows the model until ``with_constants`` or ``apart``."""
        return self._constants()

    def with_constants(self, constants: dict[str, Tensor]) -> Evaluator:
        """The same with other values of what is not in the vector."""
        other = copy.copy(self)
        other._constants = lambda: constants
        return other

    def with_loss(self, loss: Loss) -> Evaluator:
        """The same with another loss of the output."""
        other = copy.copy(self)
        other.loss = loss
        return other

    def apart(self) -> Evaluator:
        """The same with copies of what training the model would change: buffers, and parameters that need gradients."""
        trained = {name for name, tensor in self.model.named_parameters() if tensor.requires_grad}
        moving = trained | {name for name, _ in self.model.named_buffers()}
        return self.with_constants({k: v.clone() if k in moving else v for k, v in self.constants.items()})

    def split(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """A batch as positional inputs, keyword inputs and target."""
        data = batch.data
        if isinstance(data, Mapping):
            key = None if self.model_loss else next((key for key in TARGET_KEYS if key in data), None)
            inputs = {name: value for name, value in data.items() if name != key}
            return (), inputs, data if key is None else data[key]
        if isinstance(data, tuple | list):
            *inputs_, target = data if len(data) > 1 else (*data, None)
            return tuple(inputs_), {}, target
        return (data,), {}, data

    def output(self, parameters: Parameters, batch: Batch) -> Any:
        """What the model gives for a batch; logits where it gives an object that holds them."""
        args, kwargs, _ = self.split(batch)
        names = dict(self.model.named_buffers()) if self._written is None else self._written
        constants = self.constants
        copies = {name: constants[name].clone() for name in names}
        output = functional_call(self.model, {**constants, **copies, **parameters}, args, kwargs)
        if self._written is None:
            same = {name for name, new in copies.items() if _unwritten(new, constants[name])}
            self._written = frozenset(copies) - same
        return output if self.model_loss else getattr(output, "logits", output)

    def loss_of(self, output: Any, batch: Batch) -> Tensor:
        """The mean loss of a batch whose output is known."""
        if self.model_loss:
            found = getattr(output, "loss", None)
            require(isinstance(found, Tensor), 'the output of a model with loss="model"', "hold its loss", output,
                    'give "labels" in each batch, or name a loss', TypeError)  # fmt: skip
            assert isinstance(found, Tensor)
            return found
        return self.loss.value(output, self.split(batch)[2])

    def __call__(self, parameters: Parameters, batch: Batch) -> Tensor:
        return self.loss_of(self.output(parameters, batch), batch)

    def terms(self, batch: Batch) -> float:
        """The weight of a batch before normalisation; for a model's own loss, the labels that are not −100.

        A causal model shifts its labels, so that the first of each sequence is counted here and not there.
        """
        if not self.model_loss:
            return self.loss.terms(self.split(batch)[2], batch.size)
        labels = batch.data.get("labels") if isinstance(batch.data, Mapping) else None
        if not isinstance(labels, Tensor) or labels.ndim == 0 or labels.is_floating_point():
            return float(batch.size)
        return float(labels.ne(IGNORE).sum())


def _unwritten(after: Tensor, before: Tensor) -> bool:
    """Batch-norm does not raise the version of the statistics it writes, so values are compared too."""
    return after._version == 0 and torch.equal(after, before)


class FunctionEvaluator:
    """The loss as one function of named parameters and, where there is data, a batch."""

    def __init__(self, function: Callable[..., Tensor], with_data: bool) -> None:
        self.function, self.with_data = function, with_data

    def __call__(self, parameters: Parameters, batch: Batch) -> Tensor:
        return self.function(dict(parameters), batch.data) if self.with_data else self.function(dict(parameters))

    def terms(self, batch: Batch) -> float:
        """The weight of a batch before normalisation."""
        return float(batch.size)
