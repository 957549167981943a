"""Gradients of training steps as CUDA graphs: forward and backward passes of small networks are
bound by launches.

A batch is copied to fixed tensors, and one replay runs the model, its loss and the backward pass on
them. The optimiser, its schedule, regularizers and clipping stay as they are, on the gradients that
the replay leaves.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lambdahat._core.device import Replay, beside, side_stream
from lambdahat.operators.linearise import saved_bytes
from lambdahat.problem.batches import Batch
from lambdahat.problem.evaluators import Evaluator
from lambdahat.problem.losses import Custom
from lambdahat.training.subjects import Subject

Norm = Callable[[list[Tensor]], Tensor]  # of all tensors as one vector
# of activations: from here on launches do not count, and a graph would hold them between steps
MOST_BYTES = 1 << 30
MOST_FORMS = 4  # batches of more shapes than these would each need a graph


class RecordedGradients:
    """The gradient of a step's mean loss, left in the parameters' ``grad``; the first steps run as
    they are.

    Only what a replay repeats truly is recorded. Gives None, for the caller to run the step by
    itself, where the model draws random numbers, has hooks or attributes that a step changes, or is
    large; where the loss is the user's own; and where CUDA cannot record the step.
    """

    def __init__(self, subject: Subject, parameters: list[Tensor], norm: Norm) -> None:
        self.subject, self.parameters, self._norm = subject, parameters, norm
        self._side = side_stream(subject.device)
        self.replay = Replay(subject.device)
        self._forms: dict[Hashable, _Form] = {}
        self._on = _plain(subject)

    def __call__(self, group: list[Batch]) -> tuple[list[Tensor], Tensor] | None:
        """[Σ loss, targets met, targets counted] of a step and the norm of its gradient."""
        leaves = [leaf for batch in group for leaf in tree_leaves(batch.data)]
        if not self._on or not all(isinstance(leaf, Tensor) for leaf in leaves):
            return None
        key = self._key(group, leaves)
        form = self._forms.get(key)
        full = form is None and len(self._forms) == MOST_FORMS
        if full or _hooked(self.subject.model, self.parameters):
            self._on = False
            self._forms.clear()
            return None
        if form is None:
            form = self._forms[key] = _Form(self.subject, self.parameters, group, self._norm)
            self._on = self._first(form)
            if not self._on:
                self._forms.clear()
        else:
            form.fill(leaves)
            self.replay(key, form.run)
        for parameter, gradient, used in zip(
            self.parameters, form.gradients, form.used, strict=True
        ):
            parameter.grad = gradient if used else None
        return list(form.sums[:3]), form.sums[3]

    def _key(self, group: list[Batch], leaves: list[Tensor]) -> Hashable:
        """What a graph depends on: shapes, which parameters are trained, where the model's tensors
        are, and settings.

        Those are the plain values among the attributes of layers, which somebody may change between
        two steps.
        """
        model = self.subject.model
        assert model is not None
        shapes = tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)
        places = tuple(
            (tensor.data_ptr(), tensor.requires_grad) for tensor in self.subject.tensors.values()
        )
        values = (value for layer in model.modules() for value in vars(layer).values())
        settings = tuple(value for value in values if type(value) in (bool, int, float, str))
        return tuple(batch.size for batch in group), shapes, places, settings

    def _first(self, form: _Form) -> bool:
        """Take a step as it is, and look whether a replay could stand for it."""
        assert self.subject.model is not None
        before = _host_state(self.subject.model)
        with beside(self.subject.device, self._side):
            _, size = saved_bytes(form.run)
        return size <= MOST_BYTES and _host_state(self.subject.model) == before


class _Form:
    """Steps of one shape: fixed places for the batches, the gradients and the sums, and the work
    between them.
    """

    def __init__(
        self, subject: Subject, parameters: list[Tensor], group: list[Batch], norm: Norm
    ) -> None:
        self._subject, self._parameters, self._norm = subject, parameters, norm
        self._group = [Batch(tree_map(torch.clone, batch.data), batch.size) for batch in group]
        self._places = [leaf for batch in self._group for leaf in tree_leaves(batch.data)]
        self.gradients = [torch.zeros_like(parameter) for parameter in parameters]
        self.sums = torch.zeros(4, dtype=torch.float64, device=subject.device)
        self.used = [False] * len(parameters)

    def fill(self, leaves: list[Tensor]) -> None:
        """Put a step's data in place."""
        for place, leaf in zip(self._places, leaves, strict=True):
            place.copy_(leaf)

    def run(self) -> None:
        """Gradients and sums of what is in place; the same operations as a plain backward pass."""
        total = sum(batch.size for batch in self._group)
        self.used = [False] * len(self._parameters)
        self.sums.zero_()
        for batch in self._group:
            loss, met, counted = self._subject.forward(batch)
            share = batch.size / total
            found = torch.autograd.grad(
                loss if share == 1 else loss * share, self._parameters, allow_unused=True
            )
            self.sums[:3] += torch.stack(
                [loss.detach().double() * batch.size, met.double(), counted.double()]
            )
            self._add(found)
        live = [gradient for gradient, used in zip(self.gradients, self.used, strict=True) if used]
        if live:
            self.sums[3] = self._norm(live)

    def _add(self, found: tuple[Tensor | None, ...]) -> None:
        fresh: list[tuple[Tensor, Tensor]] = []
        more: list[tuple[Tensor, Tensor]] = []
        for index, gradient in enumerate(found):
            if gradient is not None:
                (more if self.used[index] else fresh).append((self.gradients[index], gradient))
                self.used[index] = True
        if fresh:
            torch._foreach_copy_([place for place, _ in fresh], [gradient for _, gradient in fresh])
        if more:
            torch._foreach_add_([place for place, _ in more], [gradient for _, gradient in more])


def _plain(subject: Subject) -> bool:
    """Whether all that runs in a step is the model and the library's own code."""
    evaluate = subject.problem._evaluate
    known = isinstance(evaluate, Evaluator) and (
        evaluate.model_loss or not isinstance(evaluate.loss, Custom)
    )
    return known and subject.model is not None and not subject.judged


def _hooked(model: nn.Module | None, parameters: list[Tensor]) -> bool:
    """Whether somebody watches the passes, of these layers or of all there are: a replay would
    not call them.
    """
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(nn.modules.module, f"_global{name}") for name in names):
        return True
    layers = [] if model is None else model.modules()
    tensors = any(
        getattr(p, "_backward_hooks", None) or getattr(p, "_post_accumulate_grad_hooks", None)
        for p in parameters
    )
    return tensors or any(getattr(layer, name, None) for layer in layers for name in names)


def _host_state(model: nn.Module) -> list[Any]:
    """What a step may change on the host: random generators, and the plain attributes of layers.

    Tensors count by their place, so that one which a step replaces shows; collections by their
    length.
    """
    state: list[Any] = [random.getstate(), torch.get_rng_state().tolist()]
    state.append(str(np.random.get_state()))  # noqa: NPY002 (it is the user's, and only looked at)
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    if device.type == "cuda":
        state.append(torch.cuda.get_rng_state(device).tolist())
    for layer in model.modules():
        state += [(name, _shown(value)) for name, value in vars(layer).items()]
    return state


def _shown(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.data_ptr()
    if isinstance(value, list | tuple | dict | set):
        return len(value)
    return value if isinstance(value, bool | int | float | str) else None
