"""Advance chains in this process: their losses and gradients, and the runner that holds them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lambdahat._core.check import describe, message, require, require_count, require_positive
from lambdahat._core.device import StraightLine, beside, side_stream
from lambdahat.operators.linearise import repeated
from lambdahat.problem import Problem
from lambdahat.problem.batches import Batch
from lambdahat.problem.checkpointing import recomputing
from lambdahat.problem.evaluators import Parameters
from lambdahat.sampling.backends.minibatches import Minibatches
from lambdahat.sampling.kernels import Evaluate, Kernel, Streams

NOTED = 100  # the gradient of all chains whose operations are noted, and then repeated
LossAndGradient = tuple[Tensor, Tensor]
Observable = Callable[[Tensor], Tensor | float]
Readings = dict[str, Tensor]
ROOM = 512  # steps whose traces are kept on the device before they are read
TRACES = ("loss", "centre", "distance", "acceptance")
FORCES, STEPS, TRAJECTORIES = ("force", "virial"), ("work", "heat"), ("recycled", "spread")


class UnfoldedConvolutions(TorchFunctionMode):
    """While active, two-dimensional convolutions of one channel are unfolded."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        image = _unfold(*args, **(kwargs or {})) if func is F.conv2d else None
        return func(*args, **(kwargs or {})) if image is None else image


def has_unfoldable(problem: Problem) -> bool:
    """Whether there is anything to unfold."""
    layers = () if problem.model is None else problem.model.modules()
    return any(
        isinstance(layer, nn.Conv2d) and layer.in_channels == layer.groups == 1 for layer in layers
    )


def _unfold(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    """The convolution as a product with the patches; None unless it is plain and of one channel."""
    plain = groups == weight.shape[1] == 1 and x.ndim == 4 and _pair(dilation) == (1, 1)
    if not plain or isinstance(padding, str):
        return None
    (down, right), (high, wide), size = _pair(stride), _pair(padding), weight.shape[2:]
    padded = F.pad(x, (wide, wide, high, high)) if high or wide else x
    windows = padded.unfold(2, size[0], down).unfold(3, size[1], right)  # (B, 1, H, W, k, k)
    patches = windows.permute(0, 1, 4, 5, 2, 3).flatten(4, 5).flatten(1, 3)
    out = weight.flatten(1) @ patches
    shape = tuple(windows.shape[2:4])
    image: Tensor = (out if bias is None else out + bias.unsqueeze(1)).unflatten(2, shape)
    return image


def _pair(value: Any) -> tuple[int, int]:
    values = (value, value) if isinstance(value, int) else tuple(value)
    return (values[0], values[1]) if len(values) == 2 else (values[0], values[0])


class Together:
    """All chains in one call: the losses are mapped (``torch.vmap``), so that matrix products
    become batched ones. With ``unfold``, so do convolutions.
    """

    context = staticmethod(repeated)  # fused attention has no rule for vmap

    def __init__(self, problem: Problem, unfold: bool = False) -> None:
        self.problem = problem
        self._convolutions = UnfoldedConvolutions if unfold else nullcontext
        self._lines: dict[Any, StraightLine] = {}

    def only_batch(self, positions: Tensor) -> LossAndGradient:
        """Losses and gradients on the one batch that there is, on a CPU in the end by the
        operations alone: mapping and differentiating a loss of a few parameters takes several
        times as long.
        """
        batch = self.problem.batches.first()
        if not positions.is_cpu:
            return self.one_batch(positions, batch)
        form = positions.shape, positions.stride(), positions.dtype
        line = self._lines.setdefault(form, StraightLine(NOTED, anywhere=False))
        return line(lambda at: self.one_batch(at, batch), positions)

    def one_batch(self, positions: Tensor, batch: Batch) -> LossAndGradient:
        """Losses (chains,) and gradients (chains, P) on one batch for all."""
        return self.differentiate(lambda leaves: self.problem.batch_loss(leaves, batch), positions)

    def own_batches(self, positions: Tensor, source: Minibatches, index: Tensor) -> LossAndGradient:
        """The same with a batch for each chain."""

        def loss(leaves: Parameters, *own: Tensor) -> Tensor:
            return self.problem.batch_loss(leaves, source.assemble(own))

        return self.differentiate(loss, positions, *source.gather(index))

    @torch.enable_grad()
    def differentiate(
        self, loss: Callable[..., Tensor], positions: Tensor, *parts: Tensor
    ) -> LossAndGradient:
        """One backward pass through the sum: the chains do not touch each other."""
        named = self.problem.named(positions)
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in named.items()}
        with self._convolutions():
            losses = torch.vmap(lambda *own: loss(*own).reshape(()))(leaves, *parts)
        gradients = torch.autograd.grad(losses.sum(), list(leaves.values()), allow_unused=True)
        only = gradients[0] if len(gradients) == 1 else None
        if only is not None and only.dtype == positions.dtype:
            return losses.detach(), only.reshape(positions.shape)
        flat = torch.empty_like(positions)
        for place, gradient in zip(self.problem.space.split(flat), gradients, strict=True):
            place.copy_(gradient) if gradient is not None else place.zero_()
        return losses.detach(), flat


class OneByOne:
    """The interface of ``Together``, chain after chain: for models that gain nothing by mapping."""

    context = staticmethod(nullcontext)

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._gradients = problem.vector.new_empty(0)

    def only_batch(self, positions: Tensor) -> LossAndGradient:
        return self.one_batch(positions, self.problem.batches.first())

    def one_batch(self, positions: Tensor, batch: Batch) -> LossAndGradient:
        return self._each(positions, [batch] * len(positions))

    def own_batches(self, positions: Tensor, source: Minibatches, index: Tensor) -> LossAndGradient:
        return self._each(positions, (source.batch(row) for row in index))

    @torch.enable_grad()
    def _each(self, positions: Tensor, batches: Iterable[Batch]) -> LossAndGradient:
        """The gradients are in memory that the next call reuses: allocating is slow."""
        if self._gradients.shape != positions.shape:
            self._gradients = torch.empty_like(positions)
        losses = []
        for theta, batch, out in zip(positions, batches, self._gradients, strict=True):
            named = self.problem.named(theta)
            leaves = {name: tensor.detach().requires_grad_() for name, tensor in named.items()}
            with recomputing(self.problem.recomputes):
                loss = self.problem.batch_loss(leaves, batch)
            gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
            for place, gradient in zip(self.problem.space.split(out), gradients, strict=True):
                place.copy_(gradient)
            losses.append(loss.detach().reshape(()))
        return torch.stack(losses), self._gradients


def full_data(gradients: Together | OneByOne, positions: Tensor) -> LossAndGradient:
    """Losses and gradients over the whole data."""
    if len(gradients.problem.batches) == 1:
        loss, gradient = gradients.only_batch(positions)
        return loss.double(), gradient
    losses, total = torch.zeros(len(positions), dtype=torch.float64, device=positions.device), None
    for weight, batch in gradients.problem.weighted():
        loss, gradient = gradients.one_batch(positions, batch)
        losses = losses + weight * loss.double()
        total = weight * gradient if total is None else total.add_(gradient, alpha=weight)
    assert total is not None
    return losses, total


def on_batches(
    gradients: Together | OneByOne,
    positions: Tensor,
    source: Minibatches,
    index: Tensor,
    parts: int = 1,
) -> LossAndGradient:
    """Losses and gradients on the batches drawn, in ``parts`` pieces where memory is short."""
    if source.whole is not None and parts == 1 and len(gradients.problem.batches) == 1:
        return gradients.only_batch(positions)  # without a copy of the data
    losses, total = None, None
    for piece in index.chunk(parts, dim=1):
        if source.shared:
            loss, gradient = gradients.one_batch(positions, source.batch(piece[0]))
        else:
            loss, gradient = gradients.own_batches(positions, source, piece)
        if parts == 1:
            return loss, gradient
        share = piece.shape[1] / index.shape[1]
        losses = share * loss if losses is None else losses + share * loss
        total = share * gradient if total is None else total.add_(gradient, alpha=share)
    assert losses is not None
    assert total is not None
    return losses, total


@dataclass(frozen=True)
class ChainPlan:
    """The options of a run besides the kernel; see ``sample``."""

    seed: int = 0
    batch_size: int | None = None
    shared_batches: bool = False
    accumulate: int = 1
    thin: int = 1
    bound: float | None = None
    full_losses: bool = False
    forces: bool = False
    keep_parameters: bool = False
    observables: Mapping[str, Observable] = field(default_factory=dict)
    averages: Mapping[str, Observable] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_count(self.accumulate, "accumulate")
        require_count(self.thin, "thin")
        if self.batch_size is not None:
            require_count(self.batch_size, "batch_size")
        if self.bound is not None:
            require_positive(self.bound, "bound")
        expected = "be a dict of names to functions of the flat parameters (P,)"
        for name, functions in (("observables", self.observables), ("averages", self.averages)):
            fine = isinstance(functions, Mapping) and all(
                isinstance(key, str) and callable(value) for key, value in functions.items()
            )
            require(fine, name, expected, functions, "", TypeError)

    @property
    def observes(self) -> bool:
        """Whether draws need more than the kernel reports."""
        return bool(self.full_losses or self.keep_parameters or self.observables or self.averages)


@dataclass(frozen=True)
class ChainSetup:
    """What all runners of a run share; ``source`` is None where steps see the whole data.

    ``rounding`` is the error of a loss over the whole data at its precision.
    """

    problem: Problem
    plan: ChainPlan
    centre: Tensor
    centre_loss: float
    rounding: float
    source: Minibatches | None


class Runner:
    """Chains of one kernel on one problem, advanced together in this process.

    ``traces`` names what every step reports: loss, loss at the centre on the same batch, distance
    from the centre, acceptance; with forces also ‖S∇U‖² and the virial, and work and heat or, for
    trajectories, their mean loss and spread. ``chains`` are the numbers of all chains, ``own`` of
    those in this process; ``batch_size`` is the number of samples of a step.
    """

    def __init__(
        self,
        setup: ChainSetup,
        kernel: Kernel,
        chains: Sequence[int],
        gradients: Together | OneByOne,
    ) -> None:
        self.setup, self.kernel, self.gradients = setup, kernel, gradients
        self.problem, self.plan, self.centre = setup.problem, setup.plan, setup.centre
        self.chains = self.own = tuple(chains)
        self.rng = Streams(self.plan.seed, self.chains, self.problem.device)
        # its own stream for batches that chains share, and its own scratch memory
        self.source = copy.copy(setup.source)
        if self.source is not None:
            self.source.common = Streams(self.plan.seed, [-1], self.problem.device)
        self.batch_size = self.problem.num_samples if self.source is None else self.source.size
        self.traces: tuple[str, ...] = TRACES
        if self.plan.forces:
            self.traces = *TRACES, *FORCES, *(TRAJECTORIES if kernel.exact else STEPS)
        self.state = kernel.init(self.centre.expand(len(self.chains), -1), self.centre)
        # of each chain: on a batch, or on the whole data for an exact kernel
        self.gradients_spent = 0
        self.bounded = torch.zeros(len(self.chains), dtype=torch.int64, device=self.problem.device)

    @property
    def positions(self) -> Tensor:
        """The positions of the chains in this process, (chains, P)."""
        return self.state.position

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all chains, from those of this process."""
        return rows

    @property
    def steps(self) -> int:
        """Steps of each chain since all were last put at the centre."""
        return self.state.steps

    def retune(self, kernel: Kernel) -> None:
        """Continue with other settings from the current positions."""
        was, self.kernel = self.kernel, kernel
        before, after = was.localization, kernel.localization
        tied = type(before) is type(after) and bool(torch.as_tensor(before == after).all())
        if type(was) is not type(kernel) or was.nbeta != kernel.nbeta or not tied:
            self._forget()  # what was remembered belongs to another posterior
        elif was.step_size != kernel.step_size:
            kernel.resume(self.state, was.step_size)

    def _forget(self) -> None:
        """Begin the kernel's own variables anew where the chains are."""
        self.state.memory.clear()  # before what comes in its place is made
        steps, self.state = self.state.steps, self.kernel.init(self.state.position, self.centre)
        self.state.steps = steps

    def restart(self, chains: Sequence[int] | None = None) -> None:
        """Put the chains of these numbers, or all, back to the centre."""
        for row, chain in zip(self.state.position, self.chains, strict=True):
            if chains is None or chain in chains:
                row.copy_(self.centre)
        self._forget()
        if chains is None:
            self.state.steps = 0

    def resize(self, batch_size: int, accumulate: int) -> None:
        """Continue with batches of another size, in ``accumulate`` pieces."""
        assert self.source is not None
        self.plan = replace(self.plan, batch_size=batch_size, accumulate=accumulate)
        self.source.resize(batch_size)
        self.batch_size = batch_size

    def noise(self, batches: int) -> Readings:
        """Measure the noise of batches where the chains are, without moving them; each entry is
        (chains,).

        "trace" is tr V with V the covariance of Sᵀ·nβ∇L over batches, "energy" the variance of nβ(L
        − L*), "tied" an estimate of tr(S⁻ᵀV·SᵀΓ·A⁻¹) with Γ the localization and A the curvature of
        U: the part of the noise that heats the localization and not the loss. As A⁻¹ is the
        covariance of d = w − w*, it is the covariance over batches of nβ∇L·d and nβ∇L·SSᵀΓd.
        """
        count, source, position = len(self.chains), self.source, self.state.position
        zeros = torch.zeros(count, dtype=torch.float64)
        if source is None or source.whole is not None:
            return {"trace": zeros, "energy": zeros, "tied": zeros}
        energies, works, pulls = [], [], []
        total, squares = torch.zeros_like(position), zeros.to(self.problem.device)
        away, gamma = position - self.state.centre, self.kernel.localization
        pull = self.kernel.scaled(self.kernel.scaled_force(away * gamma))  # type: ignore[operator]
        with self.gradients.context():
            for _ in range(batches):
                evaluate, centre = self._draw_batch()
                loss, gradient = evaluate(position)
                energies.append((loss - centre).double())
                works.append(torch.linalg.vecdot(gradient, away).double())
                pulls.append(torch.linalg.vecdot(gradient, pull).double())
                gradient = self.kernel.scaled_force(gradient)
                total += gradient
                squares = squares + gradient.square().sum(-1).double()
        self.gradients_spent += batches
        trace = (squares - total.square().sum(-1).double() / batches) / (batches - 1)
        work, pulled = (torch.stack(values) for values in (works, pulls))
        tied = ((work - work.mean(dim=0)) * (pulled - pulled.mean(dim=0))).sum(dim=0)
        energy = torch.stack(energies).var(dim=0)
        noise = {"trace": trace, "energy": energy, "tied": tied / (batches - 1)}
        return {name: (self.kernel.nbeta**2 * values).cpu() for name, values in noise.items()}

    def forces(self) -> Readings:
        """Gradients of nβL on two batches (or once on all data) and of γ, (chains, P) each."""
        source, position, seen = self.source, self.state.position, []
        gamma: Any = self.kernel.localization
        with self.gradients.context():
            for _ in range(2 if source is not None and source.whole is None else 1):
                evaluate, _ = self._draw_batch()
                seen.append(self.kernel.nbeta * evaluate(position)[1])
        self.gradients_spent += len(seen)
        tie = gamma * (position - self.state.centre)
        return {"first": seen[0], "second": seen[-1], "tie": tie}

    def skip(self, steps: int) -> None:
        """Take steps without reading anything."""
        with self.gradients.context():
            for _ in range(steps):
                self._step()

    def advance(self, draws: int, observe: bool = True) -> Readings:
        """``draws`` more draws: for each trace a tensor (chains, draws), for observables (chains,
        draws, …).

        What is to be averaged has one entry for all of them, (chains, 1, …). Without ``observe``,
        the traces alone.
        """
        observe, names = observe and self.plan.observes, self.traces
        shape, device = (len(self.chains), draws), self.problem.device
        readings = {name: torch.zeros(shape, dtype=torch.float64, device=device) for name in names}
        observations: dict[str, list[Tensor]] = {}
        totals: Readings = {}
        with self.gradients.context():
            for draw in range(draws):
                for _ in range(self.plan.thin - 1):
                    self._step()
                # those that never reject report the point that a step leaves
                if observe and not self.kernel.exact:
                    self._observe(observations, totals)
                for name, value in zip(names, self._step(), strict=True):
                    readings[name][:, draw] = value
                if observe and self.kernel.exact:
                    self._observe(observations, totals)
        readings |= {name: torch.stack(values, dim=1) for name, values in observations.items()}
        readings |= {name: total.unsqueeze(1) / draws for name, total in totals.items()}
        return {name: values.cpu() for name, values in readings.items()}

    def _step(self) -> tuple[Tensor, ...]:
        """Take one step; returns its entry of each of the ``traces``, (chains,)."""
        self.state.forces = self.plan.forces
        evaluate, centre = self._draw_batch()
        self.state, info = self.kernel.step(self.state, evaluate, self.rng)
        bound = self.plan.bound
        if bound is not None:  # chains beyond it are pulled back onto the sphere of that radius
            away = self.state.position - self.centre
            distance = torch.linalg.vector_norm(away, dim=-1, keepdim=True)
            outside = distance > bound
            self.bounded += outside.squeeze(-1)
            away.mul_(bound / distance).add_(self.centre)
            torch.where(outside, away, self.state.position, out=self.state.position)
            if self.kernel.exact and bool(outside.any()):
                self.state.memory.clear()
        self.gradients_spent += info.gradients
        acceptance = torch.ones_like(info.distance) if info.acceptance is None else info.acceptance
        steps, whole = (info.work, info.heat), (info.recycled, info.spread)
        forces = info.force_square, info.virial, *steps, *whole
        seen = info.loss, centre, info.distance, acceptance, *forces
        return tuple(value for value in seen if value is not None)

    def _draw_batch(self) -> tuple[Evaluate, Tensor]:
        """The loss and gradient of each chain on its next batch, as a function of the positions,
        and the loss at the centre on that batch, (chains,).
        """
        source, gradients, parts = self.source, self.gradients, self.plan.accumulate
        if source is None:
            centre = torch.full_like(self.bounded, self.setup.centre_loss, dtype=torch.float64)
            return lambda at: full_data(gradients, at), centre
        index, centre = source.draw(self.rng, len(self.chains))
        return lambda at: on_batches(gradients, at, source, index, parts), centre

    def _observe(self, observations: dict[str, list[Tensor]], totals: Readings) -> None:
        """Read what the plan asks for at the current positions."""
        plan, positions = self.plan, self.state.position
        seen: Readings = {}
        if plan.full_losses:
            losses = [
                self.problem.loss(theta) if theta.isfinite().all() else float("nan")
                for theta in positions
            ]
            seen["full"] = torch.tensor(losses, dtype=torch.float64)
        if plan.keep_parameters:
            seen["parameters"] = positions.detach().cpu().clone()
        for name, observable in plan.observables.items():
            seen[f"observable {name}"] = _values(name, observable, positions)
        for name, value in seen.items():
            observations.setdefault(name, []).append(value)
        for name, observable in plan.averages.items():
            values, key = _values(name, observable, positions), f"average {name}"
            totals[key] = totals[key] + values if key in totals else values

    def close(self) -> None:
        """Nothing to do for a runner in this process."""


def _values(name: str, observable: Observable, positions: Tensor) -> Tensor:
    """The observable of every chain, (chains, …)."""
    values = [observable(theta) for theta in positions]
    try:
        return torch.stack([torch.as_tensor(value).detach().double().cpu() for value in values])
    except (TypeError, ValueError, RuntimeError) as error:
        expected = "return a number or a tensor, of one shape"
        text = message(f"observable {name!r}", expected, describe(values[0]))
        raise TypeError(text) from error


class GraphRunner(Runner):
    """A runner whose steps replay one captured step; traces are written on the device."""

    def __init__(
        self,
        setup: ChainSetup,
        kernel: Kernel,
        chains: Sequence[int],
        gradients: Together | OneByOne,
    ) -> None:
        super().__init__(setup, kernel, chains, gradients)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._room = max(ROOM, self.plan.thin)
        shape = (len(self.traces), len(self.chains), self._room)
        self._traces = torch.zeros(shape, dtype=torch.float64, device=self.problem.device)
        self._place = torch.zeros(1, dtype=torch.int64, device=self.problem.device)
        self._capture()

    def retune(self, kernel: Kernel) -> None:
        super().retune(kernel)
        self._capture()

    def restart(self, chains: Sequence[int] | None = None) -> None:
        super().restart(chains)
        self._capture()

    def resize(self, batch_size: int, accumulate: int) -> None:
        super().resize(batch_size, accumulate)
        self._capture()

    def skip(self, steps: int) -> None:
        for start in range(0, steps, self._room):
            self._replay(min(self._room, steps - start))

    def advance(self, draws: int, observe: bool = True) -> Readings:
        parts, thin = [], self.plan.thin
        while draws > 0:
            now = min(draws, self._room // thin)
            self._replay(now * thin)
            parts.append(self._traces[:, :, thin - 1 : now * thin : thin].cpu())
            draws -= now
        return dict(zip(self.traces, torch.cat(parts, dim=2), strict=True))

    def _replay(self, steps: int) -> None:
        """Take steps, whose traces are written from the beginning."""
        assert self._graph is not None
        self._place.zero_()
        for _ in range(steps):
            self._graph.replay()
        self.gradients_spent += steps
        self.state.steps += steps

    def _step_into_traces(self) -> None:
        values = torch.stack([value.double() for value in self._step()])
        self._traces.index_copy_(2, self._place, values.unsqueeze(2))
        self._place.add_(1)

    @repeated()
    def _capture(self) -> None:
        """Capture one step; state, traces and random numbers stay as they were."""
        before = [tensor.clone() for tensor in self._tensors()]
        streams = self.rng.generators + ([] if self.source is None else self.source.generators)
        marks = [stream.get_state() for stream in streams]
        spent, steps = self.gradients_spent, self.state.steps
        self._place.zero_()
        self._graph = None  # and its memory, before the next takes as much
        side = side_stream(self.problem.device)
        with beside(self.problem.device, side):
            for _ in range(3):
                self._step_into_traces()
        fresh = self._tensors()[len(before) :]  # what the kernel made at its first step
        self._graph = torch.cuda.CUDAGraph()
        for stream in streams:
            self._graph.register_generator_state(stream)
        with torch.cuda.graph(self._graph, stream=side):
            self._step_into_traces()
        for tensor, value in zip(self._tensors(), before, strict=False):
            tensor.copy_(value)
        for tensor in fresh:
            tensor.zero_()
        for stream, mark in zip(streams, marks, strict=True):
            stream.set_state(mark)
        self.gradients_spent, self.state.steps = spent, steps

    def _tensors(self) -> list[Tensor]:
        return [self.state.position, self.bounded, *self.state.memory.values()]
