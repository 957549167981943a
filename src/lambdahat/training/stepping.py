"""One training step: gradients of one or more batches, regularizers, clipping, optimiser."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lambdahat._core.check import require
from lambdahat._core.device import Replay, beside, side_stream
from lambdahat.operators.linearise import saved_bytes
from lambdahat.optim.descent import require_dense
from lambdahat.optim.kfac import KFAC
from lambdahat.optim.regularizers import BatchProduct
from lambdahat.problem import Problem
from lambdahat.problem.batches import Batch
from lambdahat.problem.distributed import Buffers
from lambdahat.problem.evaluators import FunctionEvaluator, OutputEvaluator
from lambdahat.problem.losses import IGNORE, Custom, Loss
from lambdahat.problem.network import named_tensors, true_second_derivatives
from lambdahat.training.feeding import Feed

Judge = Callable[[Any, Any], Tensor]
PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TrainingSubject:
    """The user's model (or tensors) with the problem's loss; ``forward`` runs it as it is, in its
    own mode.

    ``judge(output, target)`` says for every target whether it was met, as booleans; by default the
    largest logit, or the sign of a single one, is the answer, and other losses have no accuracy.
    """

    def __init__(
        self, problem: Problem, precision: str = "float32", judge: Judge | None = None
    ) -> None:
        self.problem, self.device, self.judge = problem, problem.device, judge
        self._precision = PRECISIONS[precision]
        self._evaluate = problem._evaluate
        source = problem.source
        self.model: nn.Module | None = source if isinstance(source, nn.Module) else None
        self._first = named_tensors(source) if isinstance(source, nn.Module) else source
        self._buffers = Buffers(self.model, self._first)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers by name, as they are now."""
        return {**self._first, **self._buffers()}

    def forward(
        self, batch: Batch, model: nn.Module | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The mean loss of a batch, its correct predictions and their number (0 if undefined)."""
        low = self._precision
        with nullcontext() if low is None else torch.autocast(self.device.type, low):
            if isinstance(self._evaluate, FunctionEvaluator | OutputEvaluator):
                loss = self._evaluate(self.tensors, batch)
                return loss.reshape(()), loss.new_zeros(()), loss.new_zeros(())
            evaluate, runs = self._evaluate, self.model if model is None else model
            assert runs is not None
            args, kwargs, target = evaluate.split(batch)
            output = evaluate.read(runs(*args, **kwargs))
            loss = evaluate.loss_of(output, batch)
            kind = None if evaluate.model_loss else evaluate.loss
            with torch.no_grad():
                hits = count_hits(kind, output, target, self.device, self.judge)
        return loss.reshape(()), *hits

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

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back values by name, in place."""
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                tensor.copy_(tensors[name])


def count_hits(
    loss: Loss | None, output: Any, target: Any, device: torch.device, judge: Judge | None = None
) -> tuple[Tensor, Tensor]:
    """The number of correct predictions and of targets; 0 and 0 where accuracy is undefined."""
    tensors = isinstance(output, Tensor) and isinstance(target, Tensor)
    if judge is not None:
        hits = judge(output, target).bool()
    elif tensors and loss is not None and loss.name == "bce_with_logits":
        hits = (output > 0) == (target > 0.5)
    elif not tensors or target.is_floating_point() or output.ndim != target.ndim + 1:
        return torch.zeros((), device=device), torch.zeros((), device=device)
    else:
        classes = getattr(loss, "classes", None)
        if classes is None:  # not settled by the loss: where only that dimension fits
            fits = (output.shape[0], *output.shape[2:]) == tuple(target.shape)
            classes = 1 if fits else -1
        kept = target != getattr(loss, "ignored", IGNORE)
        return ((output.argmax(dim=int(classes)) == target) & kept).sum(), kept.sum()
    return hits.sum(), torch.full((), float(hits.numel()), device=device)


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


Norm = Callable[[list[Tensor]], Tensor]  # of all tensors as one vector
# of activations: from here on launches do not count, and a graph would hold them between steps
MOST_BYTES = 1 << 30
MOST_FORMS = 4  # batches of more shapes than these would each need a graph


class CapturedGradients:
    """The gradient of a step's mean loss, left in the parameters' ``grad``; the first steps run as
    they are.

    Only what a replay repeats exactly is captured. Returns None, for the caller to run the step by
    itself, where the model draws random numbers on the host, has hooks or attributes that a step
    changes, or is large; where the loss is the user's own; and where CUDA cannot capture the step.
    Dropout on the device is captured: every replay advances the device's generator as a plain step
    does, and draws the same numbers.
    """

    def __init__(self, subject: TrainingSubject, parameters: list[Tensor], norm: Norm) -> None:
        self.subject, self.parameters, self._norm = subject, parameters, norm
        self._side = side_stream(subject.device)
        self.replay = Replay(subject.device)
        self._forms: dict[Hashable, _Form] = {}
        # only if all that runs in a step is the model and the library's own code
        evaluate = subject.problem._evaluate
        known = evaluate.model_loss or not isinstance(evaluate.loss, Custom)
        self._on = subject.model is not None and subject.judge is None and known

    def __call__(self, group: list[Batch]) -> tuple[list[Tensor], Tensor] | None:
        """[Σ loss, targets met, targets counted] of a step and the norm of its gradient."""
        leaves = [leaf for batch in group for leaf in tree_leaves(batch.data)]
        if not self._on or not all(isinstance(leaf, Tensor) for leaf in leaves):
            return None
        key = self._key(group, leaves)
        form = self._forms.get(key)
        full = form is None and len(self._forms) == MOST_FORMS
        if full or _has_hooks(self.subject.model, self.parameters):
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
        places = zip(self.parameters, form.gradients, form.used, strict=True)
        for parameter, gradient, used in places:
            parameter.grad = gradient if used else None
        return list(form.sums[:3]), form.sums[3]

    def _key(self, group: list[Batch], leaves: list[Tensor]) -> Hashable:
        """What a graph depends on: shapes, which parameters are trained, where the model's tensors
        are, and the plain attributes of layers, which may change between two steps.
        """
        model = self.subject.model
        assert model is not None
        shapes = tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)
        tensors = self.subject.tensors.values()
        places = tuple((tensor.data_ptr(), tensor.requires_grad) for tensor in tensors)
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
    """Steps of one shape: static buffers for batches, gradients and sums, and the work between."""

    def __init__(
        self, subject: TrainingSubject, parameters: list[Tensor], group: list[Batch], norm: Norm
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
            part = loss if share == 1 else loss * share
            gradients = torch.autograd.grad(part, self._parameters, allow_unused=True)
            require_dense(gradients)
            sums = [loss.detach().double() * batch.size, met.double(), counted.double()]
            self.sums[:3] += torch.stack(sums)
            self._add(gradients)
        live = [gradient for gradient, used in zip(self.gradients, self.used, strict=True) if used]
        if live:
            self.sums[3] = self._norm(live)

    def _add(self, gradients: tuple[Tensor | None, ...]) -> None:
        fresh: list[tuple[Tensor, Tensor]] = []
        more: list[tuple[Tensor, Tensor]] = []
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                (more if self.used[index] else fresh).append((self.gradients[index], gradient))
                self.used[index] = True
        if fresh:
            torch._foreach_copy_([place for place, _ in fresh], [gradient for _, gradient in fresh])
        if more:
            torch._foreach_add_([place for place, _ in more], [gradient for _, gradient in more])


def _has_hooks(model: nn.Module | None, parameters: list[Tensor]) -> bool:
    """Whether hooks watch the passes of any layer: a replay would not call them."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(nn.modules.module, f"_global{name}") for name in names):
        return True
    own = ("_backward_hooks", "_post_accumulate_grad_hooks")
    if any(getattr(parameter, name, None) for parameter in parameters for name in own):
        return True
    layers = [] if model is None else model.modules()
    return any(getattr(layer, name, None) for layer in layers for name in names)


def _host_state(model: nn.Module) -> list[Any]:
    """The host's random generators, and the layers' attributes: tensors by place, collections by
    length.
    """
    state: list[Any] = [random.getstate(), torch.get_rng_state().tolist()]
    state += map(torch.Tensor.data_ptr, named_tensors(model).values())
    state.append(str(np.random.get_state()))  # noqa: NPY002 (it is the user's, and only looked at)
    for layer in model.modules():
        state += [(name, _fingerprint(value)) for name, value in vars(layer).items()]
    return state


def _fingerprint(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.data_ptr()
    if isinstance(value, list | tuple | dict | set):
        return len(value)
    return value if isinstance(value, bool | int | float | str) else None


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
        loss, met, counted, update_norm, gradient_norm, normed = self.sums.tolist()
        return {
            "loss": loss / max(self.samples, 1),
            "accuracy": met / counted if counted else math.nan,
            "update_norm": update_norm / normed if normed else math.nan,
            "gradient_norm": gradient_norm / normed if normed else math.nan,
        }

    def state_dict(self) -> dict[str, Any]:
        """The sums and counts."""
        return {"sums": self.sums, "samples": self.samples, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        self.sums.copy_(state["sums"])
        self.samples, self.steps = state["samples"], state["steps"]


class Stepper:
    """Takes the optimiser one step on a list of batches, and adds to a tally; no waiting for the
    device.

    The gradient is that of the mean over all samples of the step; on a GPU that of a small model is
    replayed from a CUDA graph (``captured``). ``clip`` bounds its norm. A regularizer's ``add_to``
    comes after the gradient and before clipping, its ``after_step`` after the optimiser.
    """

    def __init__(
        self,
        subject: TrainingSubject,
        optimizer: Any,
        feed: Feed,
        *,
        precision: str,
        clip: float | None,
        regularizers: Sequence[Any],
        curvature_samples: int | None,
    ) -> None:
        self.subject, self.optimizer, self.feed = subject, optimizer, feed
        self.clip, self.curvature_samples = clip, curvature_samples
        self.regularizers = list(regularizers)
        self.parameters = require_own_parameters(subject, optimizer)
        self.scaler = torch.amp.GradScaler(subject.device.type) if precision == "float16" else None
        # KFAC sees gradients in the backward pass, before they are unscaled
        for inner in chain(optimizer):
            if self.scaler is not None and getattr(inner, "scaler", self) is None:
                inner.scaler = self.scaler
        self._double = any(rule.needs_product for rule in self.regularizers)
        kfacs = [inner for inner in chain(optimizer) if isinstance(inner, KFAC)]
        if self._double and any(inner.fisher == "empirical" for inner in kfacs):
            raise ValueError(
                "optimizer must be KFAC with another Fisher beside a regularizer of curvature,"
                ' whose double backward its hooks do not see, got fisher="empirical"; pass'
                ' fisher="monte_carlo"'
            )
        expected = 'be "float32" or "bfloat16" with a regularizer of curvature'
        came = '"float16", whose gradients are scaled'
        require(not self._double or not self.scaler, "precision", expected, came)
        plain = subject.device.type == "cuda" and self.scaler is None and not self._double
        self.captured = CapturedGradients(subject, self.parameters, joint_norm) if plain else None

    def __call__(self, group: list[Batch], step: int, tally: Tally) -> None:
        """One step on these batches."""
        with true_second_derivatives(self.subject.model) if self._double else nullcontext():
            for inner in chain(self.optimizer):
                if getattr(inner, "due", False):
                    self._observe(inner, step)
            total = sum(batch.size for batch in group)
            graphs: list[list[Tensor | None]] = []
            replayed = None if self.captured is None else self.captured(group)
            if replayed is None:
                self.optimizer.zero_grad(set_to_none=True)
                sums, graphs = self._differentiate(group, total)
            grads = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
            expected = "depend on the optimiser's parameters"
            require(bool(grads), "the loss", expected, "one whose gradients are all None")
            require_dense(grads)
            sums, norm = (sums, joint_norm(grads)) if replayed is None else replayed
            product = BatchProduct(self.parameters, graphs) if self._double else None
            for rule in self.regularizers:
                rule.add_to(self.parameters, product, step)
            if self.clip is not None:
                torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
            self._advance()
            own = [getattr(inner, "update_norm", None) for inner in chain(self.optimizer)]
            update = next((each for each in own if isinstance(each, Tensor)), norm).double()
            norms = [update, norm, torch.ones_like(norm)]
            if self.scaler is not None:  # the step is not taken if the scaled gradient overflowed
                taken, zero = torch.isfinite(norm), torch.zeros_like(norm)
                norms = [torch.where(taken, value, zero) for value in norms]
            tally.add(total, [*sums, *norms])

    def _differentiate(
        self, group: list[Batch], total: int
    ) -> tuple[list[Tensor], list[list[Tensor | None]]]:
        """Set every ``grad``; return Σ loss, targets met and counted, and, where regularizers need
        products, the gradients of each batch with their graphs.
        """
        sums: list[Tensor] = []
        graphs: list[list[Tensor | None]] = []
        for batch in group:
            loss, met, counted = self.subject.forward(batch)
            share = batch.size / total
            part = loss if share == 1 else loss * share
            if self._double:
                gradients = torch.autograd.grad(
                    part, self.parameters, create_graph=True, allow_unused=True
                )
                graphs.append(list(gradients))
                for parameter, gradient in zip(self.parameters, graphs[-1], strict=True):
                    if gradient is not None:
                        before, own = parameter.grad, gradient.detach()
                        parameter.grad = own.clone() if before is None else before + own
            else:
                (part if self.scaler is None else self.scaler.scale(part)).backward()
            parts = [loss.detach().double() * batch.size, met, counted]
            sums = [a + b for a, b in zip(sums, parts, strict=True)] if sums else parts
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        return sums, graphs

    def _observe(self, inner: Any, step: int) -> None:
        """Give an optimiser a measurement of curvature on a batch of its own."""
        count = self.curvature_samples or self.feed.step_samples
        data = self.feed.sample(count, "curvature", step)
        loss = self.subject.evaluate([Batch(data, 1)])["loss"]
        if not math.isfinite(loss):
            raise Diverged(f"the loss is {loss} at step {step}, where curvature is due")
        # the problem as a function of the optimiser's parameters alone
        problem, held = self.subject.problem, {id(parameter) for parameter in self.parameters}
        tensors = self.subject.tensors
        names = [name for name in problem.space.names if id(tensors[name]) in held]
        whole = len(names) == len(problem.space.names)
        inner.observe((problem if whole else problem.restrict(names)).on([data]))

    def _advance(self) -> None:
        decoupled = [rule for rule in self.regularizers if hasattr(rule, "after_step")]
        if self.scaler is None:
            self.optimizer.step()
        else:
            before = self.scaler.get_scale() if decoupled else 0.0
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if decoupled and self.scaler.get_scale() < before:  # the step was skipped
                return
        for rule in decoupled:
            rule.after_step(self.parameters, self.optimizer.param_groups[0]["lr"])


def require_own_parameters(subject: TrainingSubject, optimizer: Any) -> list[Tensor]:
    """The optimiser's parameters in the model's order, which ``layers_of`` has too; raise unless
    they are those of the problem's own model.
    """
    problem = subject.problem
    came = "one made by at(), which is at other parameters"
    require(problem._theta is None, "problem", "follow its model", came, "load them into the model")
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    devices = {parameter.device for parameter in held}
    if devices != {problem.device}:
        raise ValueError(
            f"problem must be on the device of the parameters, {', '.join(map(str, devices))}, got"
            f" {problem.device}; move the model with model.to(device), then make problem and"
            " optimizer"
        )
    expected = "have its model's own dtype"
    cure = "cast the model itself, or pass precision="
    require(problem._cast is None, "problem", expected, f"dtype={problem._cast}", cure)
    own = {id(tensor): tensor for tensor in subject.tensors.values()}
    others = [tuple(parameter.shape) for parameter in held if id(parameter) not in own]
    if others:
        raise ValueError(
            "optimizer must hold parameters of the problem's own model (or tensors), got"
            f" {len(others)} others, the first of shape {others[0]}; make it"
            " with model.parameters() of the model that the problem was made of"
        )
    if not all(parameter.requires_grad for parameter in held):
        raise ValueError(
            "optimizer must hold parameters that require gradients, got some that do not; call"
            " requires_grad_() on them"
        )
    known = {id(parameter) for parameter in held}
    return [tensor for key, tensor in own.items() if key in known]


def chain(optimizer: Any) -> Iterator[Any]:
    """The optimiser and what it wraps (``base``), outermost first."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "base", None)


def joint_norm(tensors: list[Tensor]) -> Tensor:
    """The L2 norm of all tensors as one vector, in float64."""
    parts = [part.double() for part in torch._foreach_norm(tensors)]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(parts))
    return norm
