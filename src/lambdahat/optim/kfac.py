"""KFAC and EKFAC as an optimiser."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lambdahat._core import check
from lambdahat._core.device import COMPILED, multiply, pull_back
from lambdahat._core.rng import derived_seed, generator
from lambdahat.operators.kronecker_factors import Fisher, join_outputs
from lambdahat.optim import descent
from lambdahat.optim.kronecker_layers import (
    Affine,
    Layer,
    Sums,
    apply,
    average,
    find_layers,
    ready,
    refresh,
)
from lambdahat.optim.registry import register_optimizer
from lambdahat.problem import Problem

ROUNDING = 100  # units of the dtype that a sum may be off when it is taken in another order


class LayerRows(NamedTuple):
    """One call of a layer: inputs (b, n) and output gradients (b, m)."""

    x: Tensor
    g: Tensor


def rows_of(layer: Layer, x: Tensor, g: Tensor) -> LayerRows | None:
    """The rows of a call, where they make a step cheaper: on a CPU only."""
    if not (isinstance(layer, Affine) and layer.linear and layer.trains("weight") and x.ndim == 2):
        return None
    count, n, m = len(x), x.shape[1], g.shape[1]
    fewer = count * (n * n + m * m + n * m) < n * m * (n + m)
    same = x.dtype == g.dtype == layer.key.dtype and x.dtype in (torch.float32, torch.float64)
    return LayerRows(x, g) if fewer and same and x.device.type == "cpu" else None


def explain(rows: LayerRows, gradients: Sequence[Tensor]) -> bool:
    """Whether the gradients are the sum over the rows, judged by their product with one vector.

    Not so after accumulation, clipping or unscaling, or where a penalty is part of the loss.
    """
    probe, one = _probe(rows.x.shape[1], rows.x.dtype)
    if len(gradients) > 1:
        found = torch.addmv(gradients[1], gradients[0], probe)
        inputs = torch.addmv(one, rows.x, probe)
    else:
        found, inputs = gradients[0] @ probe, rows.x @ probe
    error = torch.addmv(found, rows.g.T, inputs, alpha=-1)
    bound = ROUNDING * torch.finfo(found.dtype).eps * _norm(found)
    # squares that vanish or overflow tell nothing
    return 0.0 < bound < math.inf and _norm(error) <= bound


def step_of(rows: LayerRows, state: dict[str, Any], biased: bool) -> list[Tensor]:
    """The steps of weight and, where ``biased``, bias: the parts of Σ_i (G⁻¹g_i)(A⁻¹a_i)ᵀ."""
    size = rows.x.shape[1]
    # the products with W's and b's rows and columns of A⁻¹ apart: nothing is copied; A⁻¹aᵀ is
    # faster than aA⁻¹
    inverse = state["A_inverse"][0]
    g = multiply(rows.g, state["G_inverse"][0]).T
    inputs = multiply(inverse[:size, :size], rows.x.T)
    if not biased:
        return [multiply(g, inputs.T)]
    edge = inverse[:size, size]
    inputs.add_(edge.unsqueeze(1))
    return [multiply(g, inputs.T), g @ torch.addmv(inverse[size, size], rows.x, edge)]


@cache
def _probe(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Numbers of one sign and no pattern, and a 1 for the bias."""
    rng = generator(0, "kfac", "rows", size)
    draw = torch.rand(size, generator=rng, dtype=torch.float64) + 0.5
    return draw.to(dtype), torch.ones((), dtype=dtype)


def _norm(vector: Tensor) -> float:
    return math.sqrt(torch.dot(vector, vector))


class Listener(Protocol):
    """Who wants to know what the layers of a model see."""

    def wanted(self) -> bool:
        """Whether the forward pass that runs now is of interest."""

    def receive(self, index: int, x: Tensor, g: Tensor, samples: int, forward_pass: object) -> None:
        """Take the input of module ``index`` and the gradient at its output."""


class LayerTracer:
    """Calls ``listener.receive(index, x, g, samples, forward_pass)`` in a backward pass for every
    call of a module.

    x is the input of ``modules[index]`` and g the gradient at its output; ``samples`` is the batch
    size of the model's own input, and ``forward_pass`` the same object for all calls in one forward
    pass of the model. Passes in eval mode or without gradients are not seen, nor those of
    ``create_graph=True``, nor those that are not ``wanted()``. The hooks hold the tracer weakly
    and are removed with it, or by ``close``; so does the tracer its listener.
    """

    def __init__(self, model: nn.Module, modules: Sequence[nn.Module], listener: Listener) -> None:
        self.modules, self._listener = tuple(modules), weakref.ref(listener)
        self._current: tuple[int, object] | None = None
        handles = [model.register_forward_pre_hook(_Hook(self, "begin"), with_kwargs=True)]
        for index, module in enumerate(self.modules):
            hook = _Hook(self, "called", index)
            handles.append(module.register_forward_hook(hook, with_kwargs=True))
        hook = _Hook(self, "end")  # last, for the model may be a layer itself
        handles.append(model.register_forward_hook(hook, with_kwargs=True, always_call=True))
        self.close = weakref.finalize(self, _remove, handles)

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a forward pass of the model: its first tensor gives the number of samples."""
        leaves = tree_leaves((args, kwargs))
        sizes = [len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim > 0]
        self._current = (sizes[0], object()) if sizes else None

    def end(self, *_: Any) -> None:
        """It is over."""
        self._current = None

    def called(self, index: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """One layer was called: watch for the gradient at its output."""
        listener = self._listener()
        if module is not self.modules[index] or not module.training or not torch.is_grad_enabled():
            return
        differentiable = isinstance(output, Tensor) and output.requires_grad
        if not differentiable or listener is None or not listener.wanted():
            return
        x = (args[0] if args else kwargs["input"]).detach()
        samples, forward_pass = self._current or (len(x), object())
        held, waiting = self._listener, [x]  # emptied by the first backward pass

        def hook(g: Tensor) -> None:
            listener, rest = held(), waiting.copy()
            waiting.clear()
            if listener is not None and rest and not torch.is_grad_enabled():
                listener.receive(index, rest[0], g, samples, forward_pass)

        output.register_hook(hook)


class _Hook:
    """A weak call of one of the tracer's methods; a copied or unpickled one does nothing."""

    def __init__(self, tracer: LayerTracer, method: str, *first: Any) -> None:
        self.tracer, self.method, self.first = weakref.ref(tracer), method, first

    def __call__(self, *args: Any) -> None:
        tracer = self.tracer()
        if tracer is not None:
            getattr(tracer, self.method)(*self.first, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        # a callable of the standard library that ignores its arguments, so that a model that was
        # saved while it was being trained loads where lambdahat is not installed
        return getattr, (contextlib.nullcontext(), "__exit__")


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()


KINDS = ("kfac", "ekfac")
FISHERS = ("empirical", "monte_carlo", "exact")
FIRST_STEPS = 10  # curvature changes fastest at the start of training


@register_optimizer("kfac")
class KFAC(descent.Descent):
    """Gradient descent preconditioned layer by layer with the Kronecker-factored Fisher (Martens &
    Grosse 2015).

    A linear or convolution layer with gradient D of [W | b] steps along (G + √δ/π)⁻¹ D (A + π√δ)⁻¹,
    A the second moment of its inputs, G that of the gradients at its outputs, π² = (tr A/n)/(tr
    G/m). ``kind="ekfac"`` steps along U_G [(U_Gᵀ D U_A)/(S + δ)] U_Aᵀ, S the second moments of
    per-sample gradients in the eigenbasis (George et al. 2018). An embedding is a linear layer of
    one-hot inputs; a norm layer has one block of (γ, β) for each unit (Osawa et al. 2019); other
    and tied parameters step along their plain gradient. ``structure()`` lists them all.

    ``fisher="empirical"`` takes the moments from the backward passes of training, through hooks on
    ``model`` in train mode; the loss must be a mean over the batch, or over all batches that are
    accumulated. "monte_carlo" (labels drawn from the model) and "exact" come from
    ``observe(problem)``, whenever ``due``.

    Moments are updated every ``factor_every`` steps by an average of weight ``decay``, inverses
    every ``inverse_every``, both at each of the first ten steps. ``kl_clip`` (1e-3 is customary)
    shortens a group's steps where they would change the output too much, None never does. ``rank``
    keeps that many leading eigenpairs of factors more than twice as wide and the mean of the rest
    (Puiu 2022): faster, and exact where the rest is flat. ``sharing`` is "expand" or "reduce"
    (Eschenhagen et al. 2023). Momentum is that of ``torch.optim.SGD`` on the preconditioned
    gradient, weight decay is decoupled. ``parameters`` gives parameter groups; by default all that
    require a gradient. With a ``GradScaler`` pass it as ``scaler``.
    """

    decoupled = True
    takes_model = True
    OWN = ("model", "sharing", "kind", "fisher", "rank", "scaler", "seed", "update_norm")

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        damping: float = 1e-2,
        *,
        decay: float = 0.95,
        factor_every: int = 10,
        inverse_every: int = 10,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        kl_clip: float | None = None,
        kind: str = "kfac",
        fisher: str = "empirical",
        sharing: str = "expand",
        rank: int | None = None,
        parameters: Iterable[Any] | None = None,
        scaler: Any = None,
        seed: int = 0,
    ) -> None:
        cure = "KFAC hooks its layers; pass parameter groups as parameters="
        check.require_type(model, nn.Module, "model", "be a torch.nn.Module", cure)
        compiled = any(
            COMPILED in layer._modules or layer._compiled_call_impl is not None
            for layer in model.modules()
        )
        cure = "train it as it is: torch.compile traces no hooks that read layers"
        check.require(not compiled, "model", "not be compiled", "one of torch.compile", cure)
        check.require_choice(kind, "kind", KINDS)
        check.require_choice(fisher, "fisher", FISHERS)
        check.require_choice(sharing, "sharing", ("expand", "reduce"))
        fits, cure = rank is None or kind == "kfac", "its basis is complete"
        check.require(fits, "rank", 'be None for kind="ekfac"', rank, cure)
        self.kind, self.fisher, self.scaler = kind, fisher, scaler
        self.rank = None if rank is None else check.require_count(rank, "rank")
        self.seed = check.require_count(seed, "seed", least=0)
        every = ("factor_every", "inverse_every")
        names = ("lr", "damping", "decay", *every, "momentum", "weight_decay", "kl_clip")
        settings = descent.group_settings(locals(), *names, step=0, observed=-1)
        self.model, self.sharing = model, sharing
        free = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.update_norm: Tensor | None = None
        super().__init__(free if parameters is None else parameters, settings)
        self._watch()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if hasattr(self, "layers"):  # parameters thawed later on get their blocks too
            self.close()
            self._watch()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "model" in state:  # of a copy, which the hooks on the model did not come along with
            self._watch()

    def _watch(self) -> None:
        self.layers, self._plain = find_layers(self.model, self.all_parameters(), self.sharing)
        self._forget()
        self._tracer = LayerTracer(self.model, [layer.module for layer in self.layers], self)

    def check_group(self, group: dict[str, Any]) -> None:
        check.require_number(group["damping"], "damping", "[0, inf)")
        check.require_number(group["decay"], "decay", "[0, 1)")
        if group["kl_clip"] is not None:
            check.require_positive(group["kl_clip"], "kl_clip", "None switches it off")
        check.require_count(group["factor_every"], "factor_every")
        check.require_count(group["inverse_every"], "inverse_every")

    def structure(self) -> dict[str, str]:
        """Each layer's block, and why every other parameter keeps its plain gradient."""
        blocks = {layer.name: str(layer) for layer in self.layers}
        return blocks | {name: f"plain gradient ({reason})" for name, reason in self._plain.items()}

    @property
    def due(self) -> bool:
        """Whether ``observe(problem)`` must come before the next step; never if empirical."""
        group = self.param_groups[0]
        observed = bool(group["observed"] == group["step"])
        return self.fisher != "empirical" and self._is_due("factor_every") and not observed

    def observe(self, problem: Problem) -> None:
        """Measure the moments on a problem of the same model and parameters."""
        expected = 'be "monte_carlo" or "exact" for observe'
        cure = "the empirical Fisher comes from training's own backward passes"
        check.require(self.fisher != "empirical", "fisher", expected, '"empirical"', cure)
        self.require_same_point(problem)
        problem = problem.with_output("KFAC")
        if problem.model is None:
            raise TypeError(
                "problem must be made of a model for KFAC, got one made by from_function; KFAC"
                " needs its layers"
            )
        group = self.param_groups[0]
        fisher = Fisher(self.fisher, 1, derived_seed(self.seed, "kfac", group["step"]))
        for layer, sums in zip(self.layers, self._measure(problem, fisher), strict=True):
            if sums.samples:
                average(self.state[layer.key], sums.totals, sums.factors(), group["decay"])
        group["observed"] = group["step"]

    def wanted(self) -> bool:
        """Whether the backward pass of the forward pass that runs now is to be traced."""
        return self._by_rows or self._measures

    def receive(self, index: int, x: Tensor, g: Tensor, samples: int, forward_pass: object) -> None:
        """Add one call of layer ``index`` to its sums; the hooks call this in a backward pass."""
        if self._by_rows:  # of a single call
            self._rows[index] = None if index in self._rows else rows_of(self.layers[index], x, g)
        if self._measures:
            self._collect(self._sums[index], index, x, g, samples, forward_pass)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and what was traced for a step that was not taken."""
        super().zero_grad(set_to_none)
        self._forget()

    def close(self) -> None:
        """Remove the hooks from the model."""
        self._tracer.close()

    def directions(self) -> descent.Directions:
        """The preconditioned gradients, after whatever update of moments and inverses is due."""
        if self._measures:
            self._update()
        if self._is_due("inverse_every"):
            self._refresh()
        found = self.gradients()
        blocks: list[tuple[Layer, list[Tensor]]] = []
        clipped: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for index, (layer, group) in enumerate(self._with_groups()):
            complete = all(parameter in found for parameter in layer.parameters)
            if complete and ready(self.state[layer.key]):
                gradients = [found[parameter] for parameter in layer.parameters]
                steps = self._steps(layer, gradients, group["damping"], self._rows.get(index))
                blocks.append((layer, steps))
                clipped.setdefault(id(group), []).extend(zip(steps, gradients, strict=True))
        for group in self.param_groups:
            if group["kl_clip"] is not None and id(group) in clipped:
                self._clip(group, clipped[id(group)])
        for layer, steps in blocks:
            parts = zip(layer.parameters, steps, strict=True)
            found.update((parameter, part.to(parameter.dtype)) for parameter, part in parts)
        self.update_norm = descent.total_norm(list(found.values()))
        self._forget()
        return found

    def _steps(
        self, layer: Layer, gradients: list[Tensor], damping: float, rows: LayerRows | None
    ) -> list[Tensor]:
        """The preconditioned gradients of a layer's parameters."""
        state = self.state[layer.key]
        if rows is not None and explain(rows, gradients):
            return step_of(rows, state, len(gradients) > 1)
        dtype = torch.promote_types(layer.key.dtype, torch.float32)
        matrix = layer.matrix([gradient.to(dtype) for gradient in gradients])
        return layer.split(apply(state, matrix, damping))

    def _forget(self) -> None:
        """Drop what was traced since the last step."""
        self._sums = [Sums() for _ in self.layers]
        self._rows: dict[int, LayerRows | None] = {}

    @property
    def _measures(self) -> bool:
        """Whether the moments come from the backward passes before the next step."""
        return self.fisher == "empirical" and self._is_due("factor_every")

    @property
    def _by_rows(self) -> bool:
        """Whether steps may be made of the samples of a backward pass."""
        exact = self.kind == "kfac" and self.rank is None
        return exact and bool(self.layers) and self.layers[0].key.device.type == "cpu"

    def _clip(self, group: dict[str, Any], pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Shorten a group's steps d by min(1, √(κ / Σ lr² dᵀg)); a pair is (d, g).

        Σ lr² dᵀg is lr² dᵀFd, twice the Kullback–Leibler divergence of the step (Ba, Grosse &
        Martens 2017).
        """
        changes = [group["lr"] ** 2 * (d * g.to(d.dtype)).sum().float() for d, g in pairs]
        change = torch.stack(changes).sum()
        scale = (group["kl_clip"] / change.clamp_min(torch.finfo(change.dtype).tiny)).sqrt()
        for step, _ in pairs:
            step.mul_(scale.clamp_max(1.0).to(step))

    def _is_due(self, every: str) -> bool:
        """Whether "factor_every" or "inverse_every" is due; in the first steps always."""
        group = self.param_groups[0]
        return bool(group["step"] < FIRST_STEPS or group["step"] % group[every] == 0)

    def _collect(
        self,
        sums: Sums,
        index: int,
        x: Tensor,
        g: Tensor,
        samples: int,
        forward_pass: object,
        inputs: bool = True,
    ) -> None:
        layer = self.layers[index]
        dtype = torch.promote_types(layer.key.dtype, torch.float32)
        with torch.autocast(g.device.type, enabled=False):
            x, g = x.to(dtype) if x.is_floating_point() else x, g.to(dtype)
            rows = layer.collect(sums, x, g, self.state[layer.key], inputs)
        sums.count(rows if inputs else 0, samples, forward_pass)

    def _measure(self, problem: Problem, fisher: Fisher) -> list[Sums]:
        """The sums over a whole problem, with the Fisher's own vectors at its outputs."""
        sums, rng = [Sums() for _ in self.layers], fisher.stream()
        for weight, batch in problem.weighted():
            with torch.enable_grad():
                values = problem.named(problem.vector)
                leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
                output, calls = self._forward(problem, leaves, batch)
                vectors = fisher.vectors(problem, output, batch, rng)
                output = join_outputs(output)
            watched, forward_pass = [y for _, _, y in calls], object()
            for number, vector in enumerate(vectors):
                scaled = vector * (weight / batch.size)
                options = {"retain_graph": True, "materialize_grads": True}
                grads = pull_back([output], watched, [scaled], **options)
                first = number == 0
                for (index, x, _), g in zip(calls, grads, strict=True):
                    self._collect(sums[index], index, x, g, batch.size, forward_pass, first)
        return sums

    def _forward(
        self, problem: Problem, parameters: dict[str, Tensor], batch: Any
    ) -> tuple[Any, list[tuple[int, Tensor, Tensor]]]:
        """The problem's output on a batch, and every call of a layer: index, input and output."""
        calls: list[tuple[int, Tensor, Tensor]] = []

        def keep(index: int) -> Callable[..., Tensor]:
            def hook(_: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
                calls.append((index, (args[0] if args else kwargs["input"]).detach(), output))
                return output.clone()  # an activation in place must not touch what was traced

            return hook

        assert problem.model is not None
        modules = dict(problem.model.named_modules())
        layers = enumerate(modules[layer.name] for layer in self.layers)
        handles = [layer.register_forward_hook(keep(i), with_kwargs=True) for i, layer in layers]
        try:
            return problem.output(parameters, batch), calls
        finally:
            for handle in handles:
                handle.remove()

    def _update(self) -> None:
        """Mix what the hooks traced into the running moments."""
        if self.layers and not any(sums.samples for sums in self._sums):
            raise RuntimeError(
                "the model must have run forward and backward in train mode before step, got no"
                " pass traced; call model.train(); after close() make a new KFAC"
            )
        scale = float(self.scaler.get_scale()) if self.scaler is not None else 1.0
        decay = self.param_groups[0]["decay"]
        for layer, sums in zip(self.layers, self._sums, strict=True):
            if sums.samples:
                average(self.state[layer.key], sums.totals, sums.factors(scale), decay)

    def _refresh(self) -> None:
        updated = ["updates" in self.state[layer.key] for layer in self.layers]
        descent.require_observation(self.fisher == "empirical" or any(updated) or not self.layers)
        corrected = self.kind == "ekfac"
        for layer, group in self._with_groups():
            state = self.state[layer.key]
            if "updates" in state:
                refresh(state, group["damping"], self.rank, corrected, layer.name)

    def _with_groups(self) -> list[tuple[Layer, dict[str, Any]]]:
        """Each layer with the parameter group of its first parameter."""
        groups = {id(p): group for group in self.param_groups for p in group["params"]}
        return [(layer, groups[id(layer.key)]) for layer in self.layers]
