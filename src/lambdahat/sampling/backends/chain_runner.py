"""Advance chains in this process: their losses and gradients, and the runner that holds them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from lambdahat._core.check import describe
from lambdahat.operators.linearise import repeated
from lambdahat.problem import Problem
from lambdahat.problem.batches import Batch
from lambdahat.problem.checkpointing import recomputing
from lambdahat.problem.evaluators import Parameters
from lambdahat.sampling.backends.minibatches import Minibatches
from lambdahat.sampling.kernels import Info, Kernel, Streams

AFTER = 1000  # calls; recording takes about a second when it is the first in a process
Pair = tuple[Tensor, Tensor]
LossAndGradient = tuple[Tensor, Tensor]
Observable = Callable[[Tensor], Tensor | float]
Record = dict[str, Tensor]
TRACES = ("loss", "centre", "distance", "acceptance")
FORCES, STEPS, TRAJECTORIES = ("force", "virial"), ("work", "heat"), ("recycled",)


class UnfoldedConvolutions(TorchFunctionMode):
    """While active, two-dimensional convolutions of one channel are unfolded."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.conv2d:
            found = _unfolded(*args, **kwargs)
            if found is not None:
                return found
        return func(*args, **kwargs)


def has_unfoldable(problem: Problem) -> bool:
    """Whether there is anything to unfold."""
    layers = () if problem.model is None else problem.model.modules()
    return any(
        isinstance(layer, nn.Conv2d) and layer.in_channels == layer.groups == 1 for layer in layers
    )


def _unfolded(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    """The convolution as a product with the patches, or None for those that are not plain and of
    one channel.
    """
    if (
        groups != 1
        or weight.shape[1] != 1
        or isinstance(padding, str)
        or x.ndim != 4
        or _pair(dilation) != (1, 1)
    ):
        return None
    (down, right), (high, wide), size = _pair(stride), _pair(padding), weight.shape[2:]
    padded = F.pad(x, (wide, wide, high, high)) if high or wide else x
    windows = padded.unfold(2, size[0], down).unfold(3, size[1], right)  # (B, 1, H, W, k, k)
    shape = windows.shape[2:4]
    patches = windows.permute(0, 1, 4, 5, 2, 3).flatten(4, 5).flatten(1, 3)
    out = weight.flatten(1) @ patches
    image: Tensor = (out if bias is None else out + bias.unsqueeze(1)).unflatten(2, tuple(shape))
    return image


def _pair(value: Any) -> tuple[int, int]:
    values = (value, value) if isinstance(value, int) else tuple(value)
    return (values[0], values[1]) if len(values) == 2 else (values[0], values[0])


class Recorded:
    """``function(positions)``, from the thousandth call on by the tensor operations it did then
    (``make_fx``).

    Mapping and differentiating a loss of a few parameters takes several times as long as the
    operations that come of it. These are the same operations on the same kernels, so the numbers
    stay the same to the bit; a function that cannot be recorded, or whose record answers otherwise,
    is called as before.
    """

    def __init__(self, function: Callable[[Tensor], Pair]) -> None:
        self._function = function
        self._calls = 0
        self._record: Callable[[Tensor], Pair] | None = None
        self._like: tuple[torch.Size, torch.dtype] | None = None

    def __call__(self, positions: Tensor) -> Pair:
        self._calls += 1
        if self._record is not None and self._like == (positions.shape, positions.dtype):
            return self._record(positions)
        answer = self._function(positions)
        if self._calls == AFTER:
            self._try(positions, answer)
        return answer

    def _try(self, positions: Tensor, answer: Pair) -> None:
        """Record at these positions and keep the record if it gives the answer that is known."""
        try:
            record = make_fx(self._function)(positions)
            same = all(
                torch.equal(ours, theirs)
                for ours, theirs in zip(record(positions), answer, strict=True)
            )
        except Exception:  # whatever a user's function does that cannot be recorded
            return
        if same:
            self._record, self._like = record, (positions.shape, positions.dtype)


class Together:
    """All chains in one call: the losses are mapped (``torch.vmap``), so that matrix products
    become batched ones.

    With ``unfold`` convolutions become matrix products, too.
    """

    def __init__(self, problem: Problem, unfold: bool = False) -> None:
        self.problem = problem
        self._convolutions = UnfoldedConvolutions if unfold else nullcontext
        # a record that held it would keep the problem until the collector comes
        own = weakref.proxy(self)
        self.only_batch = Recorded(
            lambda positions: own.one_batch(positions, problem.batches.first())
        )

    def one_batch(self, positions: Tensor, batch: Batch) -> LossAndGradient:
        """Losses (chains,) and gradients (chains, P) on one batch for all."""
        return self._differentiate(
            lambda leaves: self.problem.batch_loss(leaves, batch).reshape(()), positions
        )

    def own_batches(self, positions: Tensor, source: Minibatches, index: Tensor) -> LossAndGradient:
        """The same with a batch for each chain."""

        def loss(leaves: Parameters, *own: Tensor) -> Tensor:
            return self.problem.batch_loss(leaves, source.assemble(own)).reshape(())

        return self._differentiate(loss, positions, *source.gather(index))

    @torch.enable_grad()
    def _differentiate(
        self, loss: Callable[..., Tensor], positions: Tensor, *parts: Tensor
    ) -> LossAndGradient:
        """One backward pass through the sum: the chains do not touch each other."""
        leaves = {
            name: tensor.detach().requires_grad_()
            for name, tensor in self.problem.named(positions).items()
        }
        with self._convolutions():
            losses = torch.vmap(loss)(leaves, *parts)
        gradients = torch.autograd.grad(losses.sum(), list(leaves.values()), allow_unused=True)
        if (
            len(gradients) == 1
            and gradients[0] is not None
            and gradients[0].dtype == positions.dtype
        ):
            return losses.detach(), gradients[0].reshape(positions.shape)
        flat = torch.empty_like(positions)
        for place, gradient in zip(self.problem.space.split(flat), gradients, strict=True):
            place.copy_(gradient) if gradient is not None else place.zero_()
        return losses.detach(), flat


class OneByOne:
    """Chain after chain, each by a plain backward pass: for models that cannot be mapped, or
    gain nothing by it.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._gradients = problem.vector.new_empty(0)

    def only_batch(self, positions: Tensor) -> LossAndGradient:
        """The same as ``one_batch`` on the first batch of the problem."""
        return self.one_batch(positions, self.problem.batches.first())

    def one_batch(self, positions: Tensor, batch: Batch) -> LossAndGradient:
        """Losses (chains,) and gradients (chains, P) on one batch for all."""
        return self._each(positions, [batch] * len(positions))

    def own_batches(self, positions: Tensor, source: Minibatches, index: Tensor) -> LossAndGradient:
        """The same with a batch for each chain."""
        return self._each(positions, (source.batch(row) for row in index))

    def _each(self, positions: Tensor, batches: Iterable[Batch]) -> LossAndGradient:
        """The gradients are in memory that the next call uses again: fresh memory costs as much
        as a pass over it.
        """
        if self._gradients.shape != positions.shape:
            self._gradients = torch.empty_like(positions)
        triples = zip(positions, batches, self._gradients, strict=True)
        return torch.stack(
            [self._single(theta, batch, out) for theta, batch, out in triples]
        ), self._gradients

    @torch.enable_grad()
    def _single(self, theta: Tensor, batch: Batch, out: Tensor) -> Tensor:
        """The loss of one chain; its gradient goes to ``out``."""
        leaves = {
            name: tensor.detach().requires_grad_()
            for name, tensor in self.problem.named(theta).items()
        }
        with recomputing(self.problem.recomputes):
            loss = self.problem.batch_loss(leaves, batch)
        gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        for place, gradient in zip(self.problem.space.split(out), gradients, strict=True):
            place.copy_(gradient)
        return loss.detach().reshape(())


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
    """Losses and gradients on the batches drawn, in ``parts`` pieces one after the other where
    memory is short.
    """
    if source.whole and parts == 1 and len(gradients.problem.batches) == 1:
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

    @property
    def looks(self) -> bool:
        """Whether the positions are looked at draw by draw, not only the losses."""
        return (
            self.full_losses
            or self.keep_parameters
            or bool(self.observables)
            or bool(self.averages)
        )


class ChainSetup:
    """What all runners of a run share: the problem, the plan, the centre, its loss and the batches
    to draw from.
    """

    def __init__(self, problem: Problem, plan: ChainPlan, exact: bool) -> None:
        self.problem, self.plan = problem, plan
        vector = problem.vector  # steps smaller than the rounding of half precision would be lost
        self.centre, self.centre_loss = (
            vector.to(torch.promote_types(vector.dtype, torch.float32)),
            problem.loss(),
        )
        self.source = (
            None if exact else Minibatches(problem, plan.batch_size, plan.shared_batches, plan.seed)
        )


class Runner:
    """Chains of one kernel on one problem, advanced together in this process."""

    def __init__(
        self,
        ground: ChainSetup,
        kernel: Kernel,
        chains: Sequence[int],
        gradients: Together | OneByOne,
    ) -> None:
        self.ground, self.kernel, self.gradients = ground, kernel, gradients
        self.problem, self.plan, self.centre = ground.problem, ground.plan, ground.centre
        problem, plan = self.problem, self.plan
        self.chains = tuple(chains)
        self.rng = Streams(plan.seed, self.chains, problem.device)
        self.source = None if ground.source is None else ground.source.rewound_copy()
        self.state = kernel.init(self.centre.expand(len(self.chains), -1), self.centre)
        # of each chain: on a batch, or on the whole data for an exact kernel
        self.gradients_spent = 0
        self.bounded = torch.zeros(len(self.chains), dtype=torch.int64, device=problem.device)

    @property
    def positions(self) -> Tensor:
        """Where the chains are, (chains, P)."""
        return self.state.position

    @property
    def own(self) -> tuple[Tensor, tuple[int, ...]]:
        """Where the chains that this process knows of are, and their numbers."""
        return self.state.position, self.chains

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all chains, from those of ``own``."""
        return rows

    @property
    def steps(self) -> int:
        """Steps of each chain since all were last put at the centre."""
        return self.state.steps

    @property
    def batch_size(self) -> int:
        """Samples in the batch of a step."""
        return self.problem.num_samples if self.source is None else self.source.size

    @property
    def traces(self) -> tuple[str, ...]:
        """The names of what every step tells: loss, loss at the centre on the same batch, distance
        from it, acceptance; with forces ‖S∇U‖², the virial, and work and heat, or of trajectories
        the mean loss.
        """
        if not self.plan.forces:
            return TRACES
        return (*TRACES, *FORCES, *(TRAJECTORIES if self.kernel.exact else STEPS))

    def retune(self, kernel: Kernel) -> None:
        """Continue with other settings from the present positions."""
        was, now = self.kernel, kernel
        before, after = was.localization, now.localization
        if isinstance(before, Tensor) and isinstance(after, Tensor):
            tied = torch.equal(before, after)
        else:
            numbers = isinstance(before, int | float) and isinstance(after, int | float)
            tied = numbers and before == after
        same = type(was) is type(now) and was.nbeta == now.nbeta and tied
        self.kernel = kernel
        if same and was.step_size != now.step_size:
            now.resume(self.state, was.step_size)
        if not same:  # what was remembered belongs to another posterior
            self.state.memory.clear()
            steps, self.state = self.state.steps, kernel.init(self.state.position, self.centre)
            self.state.steps = steps

    def restart(self, chains: Sequence[int] | None = None) -> None:
        """Put the chains of these numbers, or all, back to the centre."""
        for row, chain in zip(self.state.position, self.chains, strict=True):
            if chains is None or chain in chains:
                row.copy_(self.centre)
        self.state.memory.clear()  # before what comes in its place is made
        steps, self.state = self.state.steps, self.kernel.init(self.state.position, self.centre)
        self.state.steps = 0 if chains is None else steps

    def resize(self, batch_size: int, accumulate: int) -> None:
        """Go on with batches of another size, in ``accumulate`` pieces; only where samples are
        drawn one by one.
        """
        assert self.source is not None
        self.plan = replace(self.plan, batch_size=batch_size, accumulate=accumulate)
        self.source.resize(batch_size)

    def noise(self, batches: int) -> Record:
        """Measure what batches add by chance where the chains are, without moving them; each entry
        is (chains,).

        "trace" is tr V with V the covariance of Sᵀ·nβ∇L over batches, "energy" the variance of nβ(L
        − L*), "tied" an estimate of tr(S⁻ᵀV·SᵀΓ·A⁻¹) with Γ the localization and A the curvature of
        U: the part of the noise that heats the localization and not the loss. As A⁻¹ is the
        covariance of d = w − w*, it is the covariance over batches of nβ∇L·d and nβ∇L·SSᵀΓd.
        """
        count = len(self.chains)
        zeros = torch.zeros(count, dtype=torch.float64)
        if self.source is None or self.source.whole:
            return {"trace": zeros, "energy": zeros, "tied": zeros}
        source, energies, works, pulls = self.source, [], [], []
        total, squares = torch.zeros_like(self.state.position), zeros.to(self.problem.device)
        away = self.state.position - self.state.centre
        gamma: Any = self.kernel.localization
        pull = self.kernel.scaled(self.kernel.scaled_force(away * gamma))
        with repeated() if isinstance(self.gradients, Together) else nullcontext():
            for _ in range(batches):
                index = source.draw(self.rng, count)
                loss, gradient = on_batches(
                    self.gradients, self.state.position, source, index, self.plan.accumulate
                )
                energies.append((loss - source.centre(index)).double())
                works.append(torch.linalg.vecdot(gradient, away).double())
                pulls.append(torch.linalg.vecdot(gradient, pull).double())
                gradient = self.kernel.scaled_force(gradient)
                total += gradient
                squares = squares + gradient.square().sum(-1).double()
        self.gradients_spent += batches
        spread = (squares - total.square().sum(-1).double() / batches) / (batches - 1)
        work, pulled = torch.stack(works), torch.stack(pulls)
        tied = ((work - work.mean(dim=0)) * (pulled - pulled.mean(dim=0))).sum(dim=0) / (
            batches - 1
        )
        found = {"trace": spread, "energy": torch.stack(energies).var(dim=0), "tied": tied}
        return {name: (self.kernel.nbeta**2 * values).cpu() for name, values in found.items()}

    def forces(self) -> Record:
        """The gradients of nβL on two batches (once on the whole data) and of the localization,
        (chains, P) each.
        """
        count, source = len(self.chains), self.source
        gamma: Any = self.kernel.localization
        found = []
        with repeated() if isinstance(self.gradients, Together) else nullcontext():
            for _ in range(2 if source is not None and not source.whole else 1):
                if source is None:
                    gradient = full_data(self.gradients, self.state.position)[1]
                else:
                    index = source.draw(self.rng, count)
                    plan = self.plan
                    gradient = on_batches(
                        self.gradients, self.state.position, source, index, plan.accumulate
                    )[1]
                found.append(self.kernel.nbeta * gradient)
        self.gradients_spent += len(found)
        return {
            "first": found[0],
            "second": found[-1],
            "tie": gamma * (self.state.position - self.state.centre),
        }

    def skip(self, steps: int) -> None:
        """Take steps without recording anything."""
        with repeated() if isinstance(self.gradients, Together) else nullcontext():
            for _ in range(steps):
                self._step()

    def advance(self, draws: int, look: bool = True) -> Record:
        """``draws`` more draws: for each trace a tensor (chains, draws), for observables (chains,
        draws, …).

        What is to be averaged has one entry for all of them, (chains, 1, …). Without ``look``, the
        traces alone.
        """
        # fused attention has no rule for vmap
        with repeated() if isinstance(self.gradients, Together) else nullcontext():
            look = look and self.plan.looks
            count = len(self.chains)
            names = self.traces
            record = {
                name: torch.zeros(count, draws, dtype=torch.float64, device=self.problem.device)
                for name in names
            }
            looks: dict[str, list[Tensor]] = {}
            self._totals: dict[str, Tensor] = {}
            for draw in range(draws):
                for _ in range(self.plan.thin - 1):
                    self._step()
                if look and not self.kernel.exact:
                    self._look(looks)
                for name, value in zip(names, self._step(), strict=True):
                    record[name][:, draw] = value
                if look and self.kernel.exact:
                    self._look(looks)
        stacked = {name: torch.stack(values, dim=1) for name, values in looks.items()}
        stacked.update({name: total.unsqueeze(1) / draws for name, total in self._totals.items()})
        return {name: values.cpu() for name, values in {**record, **stacked}.items()}

    def _step(self) -> tuple[Tensor, ...]:
        """One step, and what it adds to each of the ``traces``, (chains,)."""
        self.state.forces = self.plan.forces
        base, info = self._move()
        if self.plan.bound is not None:
            self._keep_within(self.plan.bound)
        self.gradients_spent += info.gradients
        acceptance = (
            info.acceptance if info.acceptance is not None else torch.ones_like(info.distance)
        )
        seen = (
            info.loss,
            base,
            info.distance,
            acceptance,
            info.force_square,
            info.virial,
            info.work,
            info.heat,
            info.recycled,
        )
        return tuple(value for value in seen if value is not None)

    def _move(self) -> tuple[Tensor, Info]:
        """The kernel's step, and the loss at the centre on the batch it saw."""
        if self.source is None:
            self.state, info = self.kernel.step(
                self.state, lambda at: full_data(self.gradients, at), self.rng
            )
            return torch.full_like(info.loss, self.ground.centre_loss), info
        source, index = self.source, self.source.draw(self.rng, len(self.chains))
        self.state, info = self.kernel.step(
            self.state,
            lambda at: on_batches(self.gradients, at, source, index, self.plan.accumulate),
            self.rng,
        )
        return source.centre(index), info

    def _keep_within(self, bound: float) -> None:
        """Pull chains beyond ``bound`` back onto the sphere of that radius, and count it."""
        away = self.state.position - self.centre
        distance = torch.linalg.vector_norm(away, dim=-1, keepdim=True)
        outside = distance > bound
        self.bounded += outside.squeeze(-1)
        away.mul_(bound / distance).add_(self.centre)
        torch.where(outside, away, self.state.position, out=self.state.position)
        if self.kernel.exact and bool(outside.any()):
            self.state.memory.clear()

    def _look(self, looks: dict[str, list[Tensor]]) -> None:
        """Record what the plan asks for at the present positions."""
        plan, positions = self.plan, self.state.position
        if plan.full_losses:
            losses = [
                self.problem.loss(theta) if theta.isfinite().all() else float("nan")
                for theta in positions
            ]
            looks.setdefault("full", []).append(torch.tensor(losses, dtype=torch.float64))
        if plan.keep_parameters:
            looks.setdefault("parameters", []).append(positions.detach().cpu().clone())
        for name, observable in plan.observables.items():
            looks.setdefault(f"observable {name}", []).append(_values(name, observable, positions))
        for name, observable in plan.averages.items():
            values = _values(name, observable, positions)
            key = f"average {name}"
            self._totals[key] = self._totals[key] + values if key in self._totals else values

    def close(self) -> None:
        """A runner in this process holds nothing that must be closed."""


def _values(name: str, observable: Observable, positions: Tensor) -> Tensor:
    """The observable of every chain, (chains, …)."""
    found = [observable(theta) for theta in positions]
    try:
        return torch.stack([torch.as_tensor(value).detach().double().cpu() for value in found])
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"observable {name!r} must return a number or a tensor, of one shape, got"
            f" {describe(found[0])}"
        ) from error
