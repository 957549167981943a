"""Kernels: ``init`` makes an explicit state, ``step`` moves it one step under the localised
tempered posterior.

All sample p(w) ∝ exp(−U(w)) with U = nβ·L(w) + ½ Σ_i γ_i (w_i − w*_i)², w* the point the chain
starts from. A step sees the loss through ``evaluate(position) -> losses, gradients`` on this step's
batch, where L is a mean over the batch. Positions are (chains, P) or (P,). A step writes to the
state it is given and to the gradients: both are used up.
"""

from __future__ import annotations

import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lambdahat._core.check import describe, require, require_positive
from lambdahat.sampling.mass import KroneckerScale
from lambdahat.sampling.streams import Streams

Evaluate = Callable[[Tensor], tuple[Tensor, Tensor]]
Localization = float | Tensor | Mapping[str, float]
Scale = Tensor | KroneckerScale


@dataclass
class State:
    """Where chains are: ``position`` (…, P), the ``centre`` (P,) they are tied to, and what the
    kernel remembers.

    ``forces`` says whether steps tell about the force, at a pass or two over the parameters.
    """

    position: Tensor
    centre: Tensor
    memory: dict[str, Tensor] = field(default_factory=dict)
    steps: int = 0
    forces: bool = True


class Info(NamedTuple):
    """What a step saw: the loss, the distance ‖w − w*‖ and the probability of acceptance, each
    (…,).

    Kernels that never reject see the point they leave; the others the point they end at.
    ``gradients`` counts the evaluations of the step. Where the state asks for forces, there are
    ‖Sᵀ∇U‖² and the virial (w − w*)·∇U; of them, without the localization, ``work`` (w − w*)·nβ∇L
    and ``heat`` Sᵀnβ∇L·Sᵀ∇U. Kernels with trajectories give the loss and the virial as means over
    the whole trajectory instead (``recycled``: the loss).
    """

    loss: Tensor
    distance: Tensor
    acceptance: Tensor | None
    gradients: int
    force_square: Tensor | None = None
    virial: Tensor | None = None
    work: Tensor | None = None
    heat: Tensor | None = None
    recycled: Tensor | None = None


@dataclass(frozen=True)
class Kernel(ABC):
    """A Markov kernel with its settings: step size ε, inverse temperature nβ and localization γ.

    γ is a number, a tensor (P,), or numbers by name or glob of parameters ({"layers.0.*": 10.0},
    the rest 0). ``scale`` preconditions: S, (P,) for a diagonal, (P, P) symmetric or a
    ``KroneckerScale``, so that the chain moves in S⁻¹w with the same ε.
    """

    step_size: float
    nbeta: float
    localization: Localization = 0.0
    scale: Scale | None = None

    exact: ClassVar[bool] = False
    """Whether the kernel accepts and rejects: then it needs the whole data at every step, and
    has no bias from ε.
    """

    held: ClassVar[int] = 3
    """Vectors (P,) of a chain that a plain step has at once: position, gradient, a buffer, and
    the kernel's own.
    """

    def __post_init__(self) -> None:
        for name, value in (("step_size", self.step_size), ("nbeta", self.nbeta)):
            _require_number(value, name)
            require(0 <= value < math.inf, name, "be a finite number of at least 0", repr(value))
            object.__setattr__(self, name, float(value))
        require_localization(self.localization)
        _require_scale(self.scale)

    def vectors(self, forces: bool = False) -> int:
        """Vectors (P,) of a chain that a step has at once, at most; ``forces`` says whether it
        tells about them.
        """
        if self.scale is not None:
            return self.held + 3
        return self.held + (2 if isinstance(self.localization, Tensor) else int(forces))

    def init(self, theta: Tensor, centre: Tensor | None = None) -> State:
        """Chains at ``theta``, (chains, P) or (P,), tied to ``centre`` (by default where they
        start; one for all).
        """
        require(
            not isinstance(self.localization, Mapping),
            "localization",
            "be a number or a tensor (P,) in a kernel that is stepped by hand",
            describe(self.localization),
            "lh.sample knows the names",
        )
        tied = theta if centre is None else centre
        if tied.ndim > 1:
            tied = tied[0]
        return State(theta.detach().clone(), tied.detach().clone())

    def resume(self, state: State, step_size: float) -> None:  # noqa: B027
        """Go on from a state that the same kernel left with another step size; most have nothing
        to do.
        """

    @abstractmethod
    def step(self, state: State, evaluate: Evaluate, rng: Streams) -> tuple[State, Info]:
        """One step of every chain."""

    def force(self, away: Tensor, gradient: Tensor) -> tuple[Tensor, float]:
        """(v, c) with c·v = ∇U = nβ·∇L + γ(w − w*), v written over the gradient; ``away`` is w −
        w*.

        The factor is apart because whatever uses v can multiply by it on the way: a pass over the
        parameters less.
        """
        gamma = self.localization
        if isinstance(gamma, Tensor):
            return gradient.mul_(self.nbeta).addcmul_(away, gamma), 1.0
        assert not isinstance(gamma, Mapping)
        if not gamma:
            return gradient, self.nbeta
        return torch.add(away, gradient, alpha=self.nbeta / gamma, out=gradient), float(gamma)

    def _seen(self, state: State, evaluate: Evaluate) -> tuple[Tensor, float, Info]:
        """(v, c) with c·v = Sᵀ∇U where the chains are, and what is known there."""
        loss, gradient = evaluate(state.position)
        away = torch.sub(state.position, state.centre, out=_buffer(state))
        distance = _norm(away)
        force, factor = self.force(away, gradient)
        push = self.scaled_force(force)
        if not state.forces:
            return push, factor, Info(loss, distance, None, 1)
        square = (factor * _norm(push)).square()
        info = self._told(Info(loss, distance, None, 1, square), away, force, factor)
        if self.scale is not None:
            gamma: Any = self.localization
            pull = self.scaled_force(away * gamma)
            info = info._replace(heat=square - factor * torch.linalg.vecdot(pull, push))
        return push, factor, info

    def _told(self, info: Info, away: Tensor, force: Tensor, factor: float) -> Info:
        """What is known of the force besides its square."""
        assert info.force_square is not None
        virial = factor * torch.linalg.vecdot(away, force)
        gamma = self.localization
        if isinstance(gamma, Tensor):
            pulled = away * gamma
            tie, pull = (
                torch.linalg.vecdot(pulled, away),
                factor * torch.linalg.vecdot(pulled, force),
            )
        else:
            tie, pull = float(gamma) * info.distance.square(), float(gamma) * virial  # type: ignore[arg-type]
        return info._replace(virial=virial, work=virial - tie, heat=info.force_square - pull)

    def scaled(self, vectors: Tensor) -> Tensor:
        """S v for each row."""
        if self.scale is None:
            return vectors
        if isinstance(self.scale, KroneckerScale):
            return self.scale.times(vectors)
        return vectors * self.scale if self.scale.ndim == 1 else vectors @ self.scale

    def scaled_force(self, vectors: Tensor) -> Tensor:
        """Sᵀ v for each row: a force in the coordinates S⁻¹w."""
        return (
            self.scale.transposed(vectors)
            if isinstance(self.scale, KroneckerScale)
            else self.scaled(vectors)
        )

    def noise(self, state: State, rng: Streams) -> Tensor:
        """S ξ with ξ standard normal, in the buffer that the state keeps."""
        return self.scaled(rng.normal_(_buffer(state)))


@dataclass(frozen=True)
class SGLD(Kernel):
    """Stochastic gradient Langevin dynamics: w ← w − (ε/2)·∇U_batch(w) + √ε·ξ (Welling and Teh
    2011).
    """

    def step(self, state: State, evaluate: Evaluate, rng: Streams) -> tuple[State, Info]:
        push, factor, info = self._seen(state, evaluate)
        state.position.add_(self.scaled(push), alpha=-self.step_size / 2 * factor)
        state.position.add_(self.noise(state, rng), alpha=math.sqrt(self.step_size))
        state.steps += 1
        return state, info


@dataclass(frozen=True)
class Kinetic(Kernel):
    """Underdamped (kinetic) Langevin dynamics by the BAOAB splitting, one gradient per step.

    With time step h = ``step_size``, friction ξ and c = exp(−ξh), a step is::

        v ← v − h·Sᵀ∇U(w);   w ← w + (h/2)·Sv;   v ← c·v + √(1 − c²)·N(0, I);   w ← w + (h/2)·Sv

    A direction of curvature a relaxes in about 1/(h√a) steps, where overdamped dynamics need
    1/(h²a). For a Gaussian posterior the positions have the exact covariance at every stable step,
    h < 2/√(largest curvature); elsewhere the bias is O(h²). Gradient noise of covariance V adds
    about hV/(2ξ) to the temperature of each direction, linear in h. With infinite friction it is
    the overdamped scheme of Leimkuhler and Matthews with ε = h².

    Args:
        step_size: The time step h.
        nbeta: The inverse temperature nβ.
        localization: The localization γ.
        scale: A preconditioner S; the mass is (S·Sᵀ)⁻¹.
        friction: The friction ξ per unit of time; by default 2√γ, which damps the flattest
            direction critically (the mean γ where it differs between parameters; 1 for γ = 0).

    References:
        Leimkuhler & Matthews (2013), "Rational construction of stochastic numerical methods for
        molecular sampling".
    """

    friction: float | None = None

    held: ClassVar[int] = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.friction is not None:
            _require_number(self.friction, "friction")
            require(self.friction > 0, "friction", "be above 0", repr(self.friction))

    @property
    def damping(self) -> float:
        """The friction ξ that is used."""
        if self.friction is not None:
            return float(self.friction)
        gamma = self.localization
        mean = float(gamma.mean()) if isinstance(gamma, Tensor) else float(gamma)  # type: ignore[arg-type]
        return 2 * math.sqrt(mean) if self.scale is None and mean > 0 else 1.0 if mean <= 0 else 2.0

    def init(self, theta: Tensor, centre: Tensor | None = None) -> State:
        state = super().init(theta, centre)
        state.memory["velocity"] = torch.zeros_like(state.position)
        return state

    def step(self, state: State, evaluate: Evaluate, rng: Streams) -> tuple[State, Info]:
        push, factor, info = self._seen(state, evaluate)
        length, kept = self.step_size, math.exp(-self.damping * self.step_size)
        velocity = state.memory["velocity"].add_(push, alpha=-length * factor)
        if self.scale is None:
            state.position.add_(velocity, alpha=length / 2)
            velocity.mul_(kept).add_(rng.normal_(_buffer(state)), alpha=math.sqrt(1 - kept**2))
            state.position.add_(velocity, alpha=length / 2)
        else:  # both halves of the way in one product with S
            way = velocity.clone()
            velocity.mul_(kept).add_(rng.normal_(_buffer(state)), alpha=math.sqrt(1 - kept**2))
            state.position.add_(self.scaled(way.add_(velocity)), alpha=length / 2)
        state.steps += 1
        return state, info


@dataclass(frozen=True)
class RMSpropSGLD(Kernel):
    """SGLD preconditioned by running gradient squares (Li et al. 2016), as devinterp has it.

    V ← aV + (1 − a)(∇L)², G = 1/(√V + e); w ← w − (ε/2)·G∇U + √(εG)·ξ. V starts at 1, is not
    corrected for that, and the Γ term of the paper, the divergence of G, is left out. With
    ``decay`` a = 1, V stays and the chain is unbiased.
    """

    decay: float = 0.99
    epsilon: float = 0.1

    held: ClassVar[int] = 6

    def __post_init__(self) -> None:
        super().__post_init__()
        require_share(self.decay, "decay")
        require_positive(self.epsilon, "epsilon")
        require(self.scale is None, "scale", "be left out: RMSprop-SGLD finds its own", self.scale)

    def init(self, theta: Tensor, centre: Tensor | None = None) -> State:
        state = super().init(theta, centre)
        state.memory["squares"] = torch.ones_like(state.position)
        return state

    def step(self, state: State, evaluate: Evaluate, rng: Streams) -> tuple[State, Info]:
        loss, gradient = evaluate(state.position)
        squares = (
            state.memory["squares"]
            .mul_(self.decay)
            .addcmul_(gradient, gradient, value=1 - self.decay)
        )
        away = torch.sub(state.position, state.centre, out=_buffer(state))
        force, factor = self.force(away, gradient)
        metric = squares.sqrt().add_(self.epsilon).reciprocal_()
        info = Info(loss, _norm(away), None, 1)
        if state.forces:
            square = factor**2 * (force.square() * metric).sum(-1)
            info = self._told(info._replace(force_square=square), away, force, factor)
        state.position.addcmul_(force, metric, value=-self.step_size / 2 * factor)
        state.position.addcmul_(
            self.noise(state, rng), metric.sqrt_(), value=math.sqrt(self.step_size)
        )
        state.steps += 1
        return state, info


@dataclass(frozen=True)
class SGHMC(Kernel):
    """Stochastic gradient Hamiltonian Monte Carlo (Chen, Fox and Guestrin 2014, Eq. 15).

    v ← (1 − α)v − (ε/2)·∇U + √(αε)·ξ, w ← w + v, with friction α. At α = 1 it is SGLD of the same
    ε.
    """

    friction: float = 0.1

    held: ClassVar[int] = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        require_share(self.friction, "friction")

    def init(self, theta: Tensor, centre: Tensor | None = None) -> State:
        state = super().init(theta, centre)
        state.memory["velocity"] = torch.zeros_like(state.position)
        return state

    def resume(self, state: State, step_size: float) -> None:
        _resize_increments(state, self.step_size, step_size)

    def step(self, state: State, evaluate: Evaluate, rng: Streams) -> tuple[State, Info]:
        push, factor, info = self._seen(state, evaluate)
        velocity = state.memory["velocity"].mul_(1 - self.friction)
        velocity.add_(self.scaled(push), alpha=-self.step_size / 2 * factor)
        velocity.add_(self.noise(state, rng), alpha=math.sqrt(self.friction * self.step_size))
        state.position.add_(velocity)
        state.steps += 1
        return state, info


@dataclass(frozen=True)
class SGNHT(Kernel):
    """The stochastic gradient Nosé–Hoover thermostat (Ding et al. 2014), with η = ε/2 in their
    notation.

    v ← (1 − α)v − (ε/2)·∇U + √(aε)·ξ, w ← w + v, α ← α + (1 − α/2)·‖v‖²/P − ε/2: the friction α of
    each chain starts at ``friction`` (by default the ``diffusion`` a) and settles near a + (ε/4)·V,
    with V the mean variance of ∇U over batches. That takes hundreds of steps, in which chains are
    too hot or too cold, unless it starts there. The factor 1 − α/2 is not in the paper. These steps
    give a direction of curvature c the variance (1 − α/2)·E[v²]/(cε/2) at any stable step, so the
    paper's thermostat leaves the positions too cold by α/2.
    """

    diffusion: float = 0.1
    friction: float | None = None

    held: ClassVar[int] = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        require_share(self.diffusion, "diffusion")
        if self.friction is not None:
            require_share(self.friction, "friction")
        require(
            self.scale is None,
            "scale",
            "be left out: the thermostat knows one temperature only",
            self.scale,
        )

    def init(self, theta: Tensor, centre: Tensor | None = None) -> State:
        state = super().init(theta, centre)
        state.memory["velocity"] = torch.zeros_like(state.position)
        start = self.diffusion if self.friction is None else self.friction
        state.memory["friction"] = torch.full_like(state.position[..., :1], start)
        return state

    def resume(self, state: State, step_size: float) -> None:
        _resize_increments(state, self.step_size, step_size)
        state.memory["friction"].fill_(self.diffusion if self.friction is None else self.friction)

    def step(self, state: State, evaluate: Evaluate, rng: Streams) -> tuple[State, Info]:
        push, factor, info = self._seen(state, evaluate)
        velocity, friction = state.memory["velocity"], state.memory["friction"]
        velocity.mul_(1 - friction).add_(push, alpha=-self.step_size / 2 * factor)
        velocity.add_(self.noise(state, rng), alpha=math.sqrt(self.diffusion * self.step_size))
        state.position.add_(velocity)
        heat = velocity.square().mean(-1, keepdim=True)
        friction.add_((1 - friction / 2) * heat - self.step_size / 2)
        state.steps += 1
        return state, info


def _buffer(state: State) -> Tensor:
    """Room for one thing at a time of the size of the positions: fresh memory costs a CPU more
    than the arithmetic.
    """
    buffer = state.memory.get("buffer")
    if buffer is None:
        buffer = state.memory["buffer"] = torch.empty_like(state.position)
    return buffer


def _resize_increments(state: State, step_size: float, before: float) -> None:
    """Velocities that are increments of the position have variance ε/2: left as they are, a
    smaller ε would heat.
    """
    state.memory["velocity"].mul_(math.sqrt(step_size / before) if before > 0 else 0.0)


def _norm(vectors: Tensor) -> Tensor:
    """‖v‖ of each row."""
    norm: Tensor = torch.linalg.vector_norm(vectors, dim=-1)
    return norm


def _require_number(value: Any, name: str) -> None:
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    require(real, name, "be a number", describe(value), error=TypeError)


def require_share(value: Any, name: str) -> None:
    """A number in (0, 1]."""
    _require_number(value, name)
    require(0 < value <= 1, name, "lie in (0, 1]", repr(value))


def _require_scale(scale: Any) -> None:
    """S must be a vector without zeros, a symmetric matrix, of finite numbers, or a Kronecker
    product.
    """
    if scale is None or isinstance(scale, KroneckerScale):
        return
    require(isinstance(scale, Tensor), "scale", "be a tensor (P,) or (P, P)", scale, "", TypeError)
    square = scale.ndim == 2 and scale.shape[0] == scale.shape[1]
    require(scale.ndim == 1 or square, "scale", "have shape (P,) or (P, P)", scale)
    require(bool(scale.isfinite().all()), "scale", "be finite", "NaN or infinity in it")
    fine = torch.allclose(scale, scale.T, rtol=1e-4) if square else bool((scale != 0).all())
    require(
        fine,
        "scale",
        "be symmetric" if square else "have no zeros",
        scale,
        "S and S² must keep all directions",
    )


def require_localization(localization: Any) -> None:
    """γ must be a number, a tensor or a mapping of parameter names to numbers, none of them
    negative.
    """
    text = "be a number, a tensor (P,), or a dict of parameter names or globs to numbers"
    if isinstance(localization, Tensor):
        fine = (
            localization.ndim == 1
            and bool((localization >= 0).all())
            and bool(localization.isfinite().all())
        )
        require(
            fine, "localization", "be a vector (P,) of finite numbers of at least 0", localization
        )
        return
    named = isinstance(localization, Mapping)
    values = list(localization.values()) if named else [localization]
    real = all(isinstance(value, numbers.Real) and not isinstance(value, bool) for value in values)
    names = not named or all(isinstance(name, str) for name in localization)
    require(
        real and names and bool(values),
        "localization",
        text,
        describe(localization),
        error=TypeError,
    )
    fine = all(0 <= value < math.inf for value in values)
    require(fine, "localization", "be finite and at least 0", describe(localization))
