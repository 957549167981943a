"""What is trained: the user's own model or tensors, as a loss of a batch that a step can
differentiate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lambdahat._core.check import require
from lambdahat.problem import Problem
from lambdahat.problem.batches import Batch
from lambdahat.problem.evaluators import AnyEvaluator, FunctionEvaluator, OutputEvaluator
from lambdahat.problem.losses import IGNORE, Loss
from lambdahat.problem.network import named_tensors

Judge = Callable[[Any, Any], Tensor]
PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Subject:
    """The user's model (or tensors) with the problem's loss; ``forward`` runs it as it is, in its
    own mode.

    ``judge(output, target)`` says for every target whether it was met, as booleans; by default the
    largest logit, or the sign of a single one, is the answer, and other losses have no accuracy.
    """

    def __init__(
        self, problem: Problem, precision: str = "float32", judge: Judge | None = None
    ) -> None:
        self.problem, self.device, self._judge = problem, problem.device, judge
        self._precision = PRECISIONS[precision]
        self._evaluate: AnyEvaluator = problem._evaluate
        source = problem.source
        self.model: nn.Module | None = source if isinstance(source, nn.Module) else None
        self.tensors: dict[str, Tensor] = (
            named_tensors(source) if isinstance(source, nn.Module) else source
        )

    @property
    def judged(self) -> bool:
        """Whether the user says which targets were met."""
        return self._judge is not None

    def forward(
        self, batch: Batch, model: nn.Module | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The mean loss of a batch, how many targets were met and how many there are (0 where
        nothing can be said).
        """
        with (
            nullcontext()
            if self._precision is None
            else torch.autocast(self.device.type, self._precision)
        ):
            if isinstance(self._evaluate, FunctionEvaluator | OutputEvaluator):
                loss = self._evaluate(self.tensors, batch)
                return loss.reshape(()), loss.new_zeros(()), loss.new_zeros(())
            evaluate, runs = self._evaluate, self.model if model is None else model
            assert runs is not None
            args, kwargs, target = evaluate.split(batch)
            output = evaluate.read(runs(*args, **kwargs))
            loss = evaluate.loss_of(output, batch)
            met, counted = self._met(None if evaluate.model_loss else evaluate.loss, output, target)
        return loss.reshape(()), met, counted

    @torch.no_grad()
    def evaluate(self, batches: Any, model: nn.Module | None = None) -> dict[str, float]:
        """Loss and accuracy over batches in evaluation mode, each batch counted by its size."""
        model = self.model if model is None else model
        with modes(model, training=False):
            sums, size = torch.zeros(3, dtype=torch.float64, device=self.device), 0
            for batch in batches:
                loss, met, counted = self.forward(batch, model)
                sums += torch.stack([loss.double() * batch.size, met.double(), counted.double()])
                size += batch.size
        total, hits, targets = sums.tolist()
        return {"loss": total / size, "accuracy": hits / targets if targets else float("nan")}

    def _met(self, loss: Loss | None, output: Any, target: Any) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            hits, counted = self._hits(loss, output, target)
            if hits is None:
                return torch.zeros((), device=self.device), torch.zeros((), device=self.device)
            count = (
                torch.full((), float(hits.numel()), device=self.device)
                if counted is None
                else counted.sum()
            )
            return hits.sum(), count

    def _hits(
        self, loss: Loss | None, output: Any, target: Any
    ) -> tuple[Tensor | None, Tensor | None]:
        """Which targets were met, and which count (None: all); one that does not count is never
        met.
        """
        if self._judge is not None:
            return self._judge(output, target).bool(), None
        if not (isinstance(output, Tensor) and isinstance(target, Tensor)):
            return None, None
        if loss is not None and loss.name == "bce_with_logits":
            return (output > 0) == (target > 0.5), None
        if target.is_floating_point() or output.ndim != target.ndim + 1:
            return None, None
        kept = target != getattr(loss, "ignored", IGNORE)
        return (output.argmax(dim=_class_dimension(loss, output, target)) == target) & kept, kept

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back values by name, in place."""
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                tensor.copy_(tensors[name])

    def trained_by(self, optimizer: Any) -> list[Tensor]:
        """The optimiser's parameters, which must be those of the model."""
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        own = {id(tensor) for tensor in self.tensors.values()}
        others = [tuple(parameter.shape) for parameter in held if id(parameter) not in own]
        require(
            not others,
            "optimizer",
            "hold parameters of the problem's own model (or tensors)",
            f"{len(others)} others, the first of shape {others[0] if others else ()}",
            "make it with model.parameters() of the model that the problem was made of",
        )
        needy = all(parameter.requires_grad for parameter in held)
        require(
            needy,
            "optimizer",
            "hold parameters that require gradients",
            "some that do not",
            "call requires_grad_() on them",
        )
        return held


@contextmanager
def modes(model: nn.Module | None, training: bool) -> Iterator[None]:
    """The model in training or evaluation mode, every layer put back as it was."""
    before = [] if model is None else [(layer, layer.training) for layer in model.modules()]
    try:
        if model is not None:
            model.train(training)
        yield
    finally:
        for layer, was in before:
            layer.training = was


def _class_dimension(loss: Loss | None, output: Tensor, target: Tensor) -> int:
    """Where the classes are: as the loss has settled, or where only that dimension fits."""
    settled = getattr(loss, "classes", None)
    if settled is not None:
        return int(settled)
    return 1 if (output.shape[0], *output.shape[2:]) == tuple(target.shape) else -1
