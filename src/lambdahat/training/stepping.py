"""One step of training: gradients of one or more batches, regularizers, clipping, and the
optimiser.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from lambdahat._core.check import require
from lambdahat.optim.kfac import KFAC
from lambdahat.optim.regularizers import BatchProduct
from lambdahat.problem import Problem
from lambdahat.problem.batches import Batch
from lambdahat.problem.network import true_second_derivatives
from lambdahat.training.feeding import Feed
from lambdahat.training.recorded_gradients import RecordedGradients
from lambdahat.training.subjects import Subject

SUMS = ("loss", "met", "counted", "update_norm", "gradient_norm", "normed")


class Diverged(ArithmeticError):
    """The loss is not finite, and something needs it to be."""


class Tally:
    """Sums over the steps of an epoch, kept on the device: reading them is the only wait for it."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        self.samples = self.steps = 0

    def add(self, samples: int, values: Sequence[Tensor]) -> None:
        """Count a step of so many samples, with its sums in the order of ``SUMS``."""
        self.sums += torch.stack([value.detach().double() for value in values])
        self.samples, self.steps = self.samples + samples, self.steps + 1

    def read(self) -> dict[str, float]:
        """Means over samples and steps, and the accuracy (NaN where there is none)."""
        found = dict(zip(SUMS, self.sums.tolist(), strict=True))
        return {
            "loss": found["loss"] / max(self.samples, 1),
            "accuracy": _ratio(found["met"], found["counted"]),
            "update_norm": _ratio(found["update_norm"], found["normed"]),
            "gradient_norm": _ratio(found["gradient_norm"], found["normed"]),
        }

    def is_finite(self) -> Tensor:
        """Whether the loss is; norms may overflow harmlessly."""
        return torch.isfinite(self.sums[0])

    def state_dict(self) -> dict[str, Any]:
        """The sums and counts."""
        return {"sums": self.sums, "samples": self.samples, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What ``state_dict`` gave."""
        self.sums.copy_(state["sums"])
        self.samples, self.steps = state["samples"], state["steps"]


class Stepper:
    """Takes the optimiser one step on a list of batches, and adds to a tally; no waiting for the
    device.

    The gradient is that of the mean over all samples of the step; on a GPU that of a small model is
    replayed from a CUDA graph (``recorded``). ``clip`` bounds its norm. A regularizer's ``add_to``
    comes after the gradient and before clipping, its ``after_step`` after the optimiser.
    """

    def __init__(
        self,
        subject: Subject,
        optimizer: Any,
        feed: Feed,
        *,
        precision: str,
        clip: float | None,
        regularizers: Sequence[Any],
        curvature_samples: int | None,
    ) -> None:
        self.subject, self.optimizer, self.feed = subject, optimizer, feed
        self.clip, self.regularizers, self.curvature_samples = (
            clip,
            list(regularizers),
            curvature_samples,
        )
        self.parameters = subject.trained_by(optimizer)
        self.scaler = torch.amp.GradScaler(subject.device.type) if precision == "float16" else None
        # KFAC sees gradients in the backward pass, before they are unscaled
        for inner in chain(optimizer):
            if self.scaler is not None and getattr(inner, "scaler", self) is None:
                inner.scaler = self.scaler
        self._double = any(rule.needs_product for rule in self.regularizers)
        hooked = any(
            isinstance(inner, KFAC) and inner.fisher == "empirical" for inner in chain(optimizer)
        )
        require(
            not (self._double and hooked),
            "optimizer",
            "be KFAC with another Fisher beside a regularizer of curvature, whose double backward"
            " its hooks do not see",
            'fisher="empirical"',
            'pass fisher="monte_carlo"',
        )
        require(
            not (self._double and self.scaler),
            "precision",
            'be "float32" or "bfloat16" with a regularizer of curvature',
            '"float16", whose gradients are scaled',
        )
        plain = subject.device.type == "cuda" and self.scaler is None and not self._double
        self.recorded = RecordedGradients(subject, self.parameters, joint_norm) if plain else None

    def __call__(self, group: list[Batch], step: int, tally: Tally) -> None:
        with true_second_derivatives(self.subject.model) if self._double else nullcontext():
            self._step(group, step, tally)

    def _step(self, group: list[Batch], step: int, tally: Tally) -> None:
        self._observe(step)
        total = sum(batch.size for batch in group)
        graphs: list[list[Tensor | None]] = []
        found = None if self.recorded is None else self.recorded(group)
        if found is None:
            self.optimizer.zero_grad(set_to_none=True)
            sums, graphs = self._differentiate(group, total)
        grads = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        require(
            bool(grads),
            "the loss",
            "depend on the optimiser's parameters",
            "one whose gradients are all None",
        )
        sums, norm = (sums, joint_norm(grads)) if found is None else found
        self._regularize(graphs, step)
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self._advance()
        tally.add(total, [*sums, *self._norms(norm)])

    def _differentiate(
        self, group: list[Batch], total: int
    ) -> tuple[list[Tensor], list[list[Tensor | None]]]:
        """Gradients into the parameters' ``grad``; Σ loss, targets met and counted, and the
        graphs of the gradients.
        """
        sums: list[Tensor] = []
        graphs = []
        for batch in group:
            loss, met, counted = self.subject.forward(batch)
            share = batch.size / total
            graphs.append(self._backward(loss if share == 1 else loss * share))
            parts = [loss.detach().double() * batch.size, met, counted]
            sums = (
                parts
                if not sums
                else [before + part for before, part in zip(sums, parts, strict=True)]
            )
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        return sums, graphs

    def _norms(self, norm: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The norms of update and gradient, and 1; all 0 where the scaled gradient overflowed:
        no step was taken.
        """
        update, one = _update_norm(self.optimizer, norm).double(), torch.ones_like(norm)
        if self.scaler is None:
            return update, norm, one
        taken, zero = torch.isfinite(norm), torch.zeros_like(norm)
        return (
            torch.where(taken, update, zero),
            torch.where(taken, norm, zero),
            torch.where(taken, one, zero),
        )

    def _observe(self, step: int) -> None:
        """A curvature measurement for the optimiser, on its own batch, where it asks for one."""
        for inner in chain(self.optimizer):
            if getattr(inner, "due", False):
                data = self.feed.sample(
                    self.curvature_samples or self.feed.step_samples, "curvature", step
                )
                loss = self.subject.evaluate([Batch(data, 1)])["loss"]
                if not math.isfinite(loss):
                    raise Diverged(
                        f"the loss is {loss} where curvature is to be measured, at step {step}"
                    )
                inner.observe(self._trained_part().on([data]))

    def _trained_part(self) -> Problem:
        """The problem as a function of the optimiser's parameters alone."""
        problem, held = self.subject.problem, {id(parameter) for parameter in self.parameters}
        names = [name for name in problem.space.names if id(self.subject.tensors[name]) in held]
        return problem if len(names) == len(problem.space.names) else problem.restrict(names)

    def _backward(self, loss: Tensor) -> list[Tensor | None]:
        """Add the loss's gradient to that of the parameters; with its graph where products are
        needed.
        """
        if not self._double:
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            return []
        grads = torch.autograd.grad(loss, self.parameters, create_graph=True, allow_unused=True)
        for parameter, grad in zip(self.parameters, grads, strict=True):
            if grad is not None:
                parameter.grad = (
                    grad.detach().clone()
                    if parameter.grad is None
                    else parameter.grad + grad.detach()
                )
        return list(grads)

    def _regularize(self, graphs: list[list[Tensor | None]], step: int) -> None:
        product = BatchProduct(self.parameters, graphs) if self._double else None
        for rule in self.regularizers:
            rule.add_to(self.parameters, product, step)

    def _advance(self) -> None:
        decoupled = [rule for rule in self.regularizers if hasattr(rule, "after_step")]
        if self.scaler is None:
            self.optimizer.step()
        elif self._scaled_step(self.scaler, bool(decoupled)):
            return
        for rule in decoupled:
            rule.after_step(self.parameters, self.optimizer.param_groups[0]["lr"])

    def _scaled_step(self, scaler: torch.amp.GradScaler, asks: bool) -> bool:
        """A step at a scaled loss; whether it was skipped, where somebody asks: the scale falls
        then and only then.
        """
        before = scaler.get_scale() if asks else 0.0
        scaler.step(self.optimizer)
        scaler.update()
        return asks and scaler.get_scale() < before


def chain(optimizer: Any) -> Iterator[Any]:
    """The optimiser and what it wraps (``base``), outermost first."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "base", None)


def _ratio(total: float, count: float) -> float:
    return total / count if count else float("nan")


def _update_norm(optimizer: Any, gradient_norm: Tensor) -> Tensor:
    """The norm of the preconditioned gradient where the optimiser has one, else that of the
    gradient.
    """
    found = (getattr(inner, "update_norm", None) for inner in chain(optimizer))
    return next((norm for norm in found if isinstance(norm, Tensor)), gradient_norm)


def joint_norm(tensors: list[Tensor]) -> Tensor:
    """The L2 norm of all tensors as one vector, in float64."""
    norm: Tensor = torch.linalg.vector_norm(
        torch.stack([part.double() for part in torch._foreach_norm(tensors)])
    )
    return norm
