"""What advances chains: it holds their states and hands back what the draws showed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lambdahat._core.check import describe
from lambdahat.operators.linearise import repeated
from lambdahat.problem import Problem
from lambdahat.sampling.gradients import OneByOne, Together, full_data, on_batches
from lambdahat.sampling.kernels import Info, Kernel
from lambdahat.sampling.minibatches import Minibatches
from lambdahat.sampling.streams import Streams

Observable = Callable[[Tensor], Tensor | float]
Record = dict[str, Tensor]
TRACES = ("loss", "centre", "distance", "acceptance")
FORCES, STEPS, TRAJECTORIES = ("force", "virial"), ("work", "heat"), ("recycled",)


@dataclass(frozen=True)
class Plan:
    """What a run does beside the kernel's steps; see ``sample``."""

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


class Ground:
    """What all runners of a run stand on: the problem, the plan, the centre, its loss and the
    batches to draw from.
    """

    def __init__(self, problem: Problem, plan: Plan, exact: bool) -> None:
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
        self, ground: Ground, kernel: Kernel, chains: Sequence[int], gradients: Together | OneByOne
    ) -> None:
        self.ground, self.kernel, self.gradients = ground, kernel, gradients
        self.problem, self.plan, self.centre = ground.problem, ground.plan, ground.centre
        problem, plan = self.problem, self.plan
        self.chains = tuple(chains)
        self.rng = Streams(plan.seed, self.chains, problem.device)
        self.source = None if ground.source is None else ground.source.afresh()
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
        return self.positions, self.chains

    def gathered(self, rows: Tensor) -> Tensor:
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
        """Go on with other settings from where the chains are."""
        was, now = self.kernel, kernel
        same = (
            type(was) is type(now)
            and was.nbeta == now.nbeta
            and _equal(was.localization, now.localization)
        )
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
        """Steps that nothing is recorded of."""
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
            return self._advanced(draws, look and self.plan.looks)

    def _advanced(self, draws: int, look: bool) -> Record:
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
        base, info = self._moved()
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

    def _moved(self) -> tuple[Tensor, Info]:
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
        """What draws show beside their losses."""
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
        """Nothing to give back."""


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


def _equal(first: object, second: object) -> bool:
    """Whether two localizations, numbers or tensors (P,), are the same."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    return isinstance(first, int | float) and isinstance(second, int | float) and first == second
