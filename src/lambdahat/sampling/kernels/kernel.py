"""The base of all kernels: state, what a step reports, preconditioners and random streams."""

from __future__ import annotations

import dataclasses
import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from lambdahat._core.check import (
    describe,
    message,
    require,
    require_finite,
    require_number,
    require_type,
)
from lambdahat._core.rng import generator

Evaluate = Callable[[Tensor], tuple[Tensor, Tensor]]
Localization = float | Tensor | Mapping[str, float]


class Streams:
    """Random numbers for several chains at once, one row per chain.

    On the CPU every chain has a stream of its own, named by ``(seed, "chain", its number)``:
    however the chains are distributed over calls or processes, each draws the same numbers. On
    another device the chains share one stream of that device, which a CUDA graph can hold.
    """

    def __init__(
        self, seed: int, chains: Sequence[int], device: torch.device | str = "cpu"
    ) -> None:
        self.device = torch.device(device)
        if self.device.type == "cpu":
            self.generators = [generator(seed, "chain", chain) for chain in chains]
        else:
            self.generators = [generator(seed, "chains", tuple(chains), device=device)]

    def normal_(self, out: Tensor) -> Tensor:
        """Fill ``out``, (chains, …), with standard normal numbers."""
        for row, source in self._rows(out):
            row.normal_(generator=source)
        return out

    def uniform(self, count: int, dtype: torch.dtype) -> Tensor:
        """Numbers uniform on [0, 1), (count,)."""
        out = torch.empty(count, dtype=dtype, device=self.device)
        for row, source in self._rows(out):
            row.uniform_(generator=source)
        return out

    def integers(self, high: int, chains: int, count: int) -> Tensor:
        """Integers below ``high``, (chains, count)."""
        out = torch.empty(chains, count, dtype=torch.int64, device=self.device)
        for row, source in self._rows(out):
            row.random_(0, high, generator=source)
        return out

    def _rows(self, out: Tensor) -> list[tuple[Tensor, torch.Generator]]:
        """Pieces of ``out`` with the stream that fills each; one vector is one row."""
        if len(self.generators) == 1:
            return [(out, self.generators[0])]
        return list(zip(out.unbind(), self.generators, strict=True))


@dataclass(frozen=True)
class KroneckerScale:
    """S of a mass (S·Sᵀ)⁻¹ that is block-diagonal over tensors: the block of one is (Q₁ ⊗
    Q₂)·diag(s).

    A tensor is seen as a matrix with a row for each entry of its first dimension; Q₁ rotates the
    rows and Q₂ the columns (None: not rotated). ``values`` are the s of all tensors, flat. Vectors
    are (…, P).
    """

    shapes: tuple[tuple[int, int], ...]
    rows: tuple[Tensor | None, ...]
    columns: tuple[Tensor | None, ...]
    values: Tensor

    def times(self, vectors: Tensor) -> Tensor:
        """S v."""
        return self._rotate(vectors * self.values, back=True)

    def transposed(self, vectors: Tensor) -> Tensor:
        """Sᵀ v."""
        return self._rotate(vectors, back=False).mul_(self.values)

    def solve(self, vectors: Tensor) -> Tensor:
        """S⁻¹ v."""
        return self._rotate(vectors, back=False).div_(self.values)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that define it."""
        return [self.values, *(q for q in (*self.rows, *self.columns) if q is not None)]

    def to(self, like: Tensor) -> KroneckerScale:
        """The same on another device, in another precision."""
        rows, columns = (
            [None if q is None else q.to(like) for q in side] for side in (self.rows, self.columns)
        )
        return KroneckerScale(self.shapes, tuple(rows), tuple(columns), self.values.to(like))

    def _rotate(self, vectors: Tensor, back: bool) -> Tensor:
        rotated = torch.empty_like(vectors)
        begin = 0
        for (height, width), left, right in zip(self.shapes, self.rows, self.columns, strict=True):
            part = slice(begin, begin := begin + height * width)
            block = vectors[..., part].unflatten(-1, (height, width))
            if left is not None:
                block = (left if back else left.T) @ block
            if right is not None:
                block = block @ (right.T if back else right)
            rotated[..., part] = block.flatten(-2)
        return rotated

    @property
    def products(self) -> int:
        """Multiplications of one application to a vector, for the forecast of its cost."""
        total = 0
        for (height, width), left, right in zip(self.shapes, self.rows, self.columns, strict=True):
            total += height * width * ((left is not None) * height + (right is not None) * width)
        return total


Scale = Tensor | KroneckerScale
KERNELS: dict[str, Callable[..., Kernel]] = {}
Make = TypeVar("Make", bound=Callable[..., Any])


def register(name: str) -> Callable[[Make], Make]:
    """Register a kernel under ``name`` for ``llc``, the command line and the contract tests."""

    def add(make: Make) -> Make:
        KERNELS[name] = make
        return make

    return add


@dataclass
class State:
    """State of the chains: ``position`` (…, P), the ``centre`` (P,) of the localization, and the
    kernel's own variables.

    ``forces`` says whether steps report the force, which costs a pass or two over the parameters.
    """

    position: Tensor
    centre: Tensor
    memory: dict[str, Tensor] = field(default_factory=dict)
    steps: int = 0
    forces: bool = True


class Info(NamedTuple):
    """Information about a step: the loss, the distance ‖w − w*‖ and the acceptance probability,
    each (…,).

    Kernels that never reject evaluate the point they leave, the others the point at which they end.
    ``gradients`` counts the evaluations of the step. Where the state asks for forces, there are
    ‖Sᵀ∇U‖² and the virial (w − w*)·∇U; of them, without the localization, ``work`` (w − w*)·nβ∇L
    and ``heat`` Sᵀnβ∇L·Sᵀ∇U. Kernels with trajectories give means over the whole trajectory
    instead: of the loss (``recycled``), of the virial, and of the ``spread``, which is
    ‖w − w*‖²((w − w*)·∇U − P − 2) and has the mean 0 under the posterior.
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
    spread: Tensor | None = None


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

    inertial: ClassVar[bool] = False
    """Whether the state has velocities: then the bias from mini-batch noise is linear in the time
    step, else quadratic, and directions relax as in damped oscillation, not diffusion.
    """

    increments: ClassVar[bool] = False
    """Whether velocities are increments of the position, which have variance ε/2."""

    bias_formula: ClassVar[str] = "noise"
    """What predicts the bias of finite steps: "noise" (``noise_bias``), "steps" (the work and heat
    of the draws, as for SGLD) or "none".
    """

    frozen: ClassVar[Mapping[str, Any]] = {}
    """Settings with which nothing adapts while the kernel draws."""

    is_unadjusted_mala: ClassVar[bool] = False
    """Whether steps are those of MALA without the accept–reject step, so that an acceptance rate
    can be estimated.
    """

    held: ClassVar[int] = 3
    """Vectors (P,) of a chain that a plain step has at once: position, gradient, a buffer, and
    the kernel's own.
    """

    def __post_init__(self) -> None:
        for name, value in (("step_size", self.step_size), ("nbeta", self.nbeta)):
            object.__setattr__(self, name, require_number(value, name, "[0, inf)"))
        require_localization(self.localization)
        scale = self.scale
        if scale is None or isinstance(scale, KroneckerScale):
            return
        require_type(scale, Tensor, "scale", "be a tensor (P,) or (P, P)")
        square = scale.ndim == 2 and scale.shape[0] == scale.shape[1]
        require(scale.ndim == 1 or square, "scale", "have shape (P,) or (P, P)", scale)
        require_finite(scale, "scale")
        fine = torch.allclose(scale, scale.T, rtol=1e-4) if square else bool((scale != 0).all())
        expected = "be symmetric" if square else "have no zeros"
        require(fine, "scale", expected, scale, "S and S² must keep all directions")

    def gamma(self, reduce: Callable[[Tensor], Tensor] = torch.mean) -> float:
        """γ as one number: of a γ for each parameter the mean, or as ``reduce`` says."""
        gamma: Any = self.localization
        return float(reduce(gamma) if isinstance(gamma, Tensor) else gamma)

    def vectors(self, forces: bool = False) -> int:
        """The largest number of vectors (P,) that a step holds at a time for each chain."""
        if self.scale is not None:
            return self.held + 3
        return self.held + (2 if isinstance(self.localization, Tensor) else int(forces))

    def init(self, theta: Tensor, centre: Tensor | None = None) -> State:
        """Chains at ``theta``, (chains, P) or (P,), tied to ``centre``: by default the start."""
        if isinstance(self.localization, Mapping):
            expected = "be a number or a tensor (P,) in a kernel that is stepped by hand"
            got, cure = describe(self.localization), "lh.sample knows the names"
            raise ValueError(message("localization", expected, got, cure))
        tied = theta if centre is None else centre
        tied = tied[0] if tied.ndim > 1 else tied
        state = State(theta.detach().clone(), tied.detach().clone())
        if not self.exact:  # scratch memory: allocating costs more than the arithmetic
            state.memory["buffer"] = torch.empty_like(state.position)
        if self.inertial:
            state.memory["velocity"] = torch.zeros_like(state.position)
        return state

    def resume(self, state: State, step_size: float) -> None:
        """Adapt a state that the same kernel left with another step size."""
        if self.increments:
            factor = math.sqrt(self.step_size / step_size) if step_size > 0 else 0.0
            state.memory["velocity"].mul_(factor)

    @property
    def time_step(self) -> float:
        """The time step h by which the kernel is tuned."""
        return math.sqrt(self.step_size / 2 if self.increments else self.step_size)

    def with_time_step(
        self, step: float, friction: float, trace: float = 0.0, parameters: int = 1
    ) -> Self:
        """The kernel with time step h and, if it has velocities, friction ξ per unit of time.

        ``trace`` is the total variance of ∇U over mini-batches, to which a thermostat adapts.
        """
        return dataclasses.replace(self, step_size=step**2)

    def absorbed_friction(self, step: float, trace: float, parameters: int) -> float:
        """Friction per step that a thermostat adds for gradient noise of variance ``trace``."""
        return 0.0

    @property
    def damping(self) -> float:
        """The friction ξ per unit of time of a kernel with velocities."""
        return math.inf

    def noise_bias(
        self, trace: float, share: float, degree: float, energy: float, parameters: int
    ) -> float:
        """What gradient noise of total variance ``trace`` adds to nβ(L − L*), to first order.

        A direction of curvature a = nβh + γ is heated by hV/(2ξ) (velocities, friction ξ) or h²V/4
        (none). Half of that is energy, of which nβh/a is in the loss: in all a ``share`` of the
        trace. A loss of degree q around w* has 2/q of it.
        """
        step = self.time_step
        if self.inertial:
            return 2 / degree * step / (4 * self.damping) * trace * share
        return 2 / degree * step**2 / 8 * trace * share

    @property
    def virial_excess(self) -> float:
        """What finite steps without gradient noise add to (w − w*)·∇U, as a multiple of ‖Sᵀ∇U‖²."""
        return 0.0

    @abstractmethod
    def step(self, state: State, evaluate: Evaluate, rng: Streams) -> tuple[State, Info]:
        """One step of every chain."""

    def force(self, away: Tensor, gradient: Tensor) -> tuple[Tensor, float]:
        """(v, c) with c·v = ∇U = nβ·∇L + γ(w − w*), v written over the gradient; ``away`` is w −
        w*.

        The factor is separate because what uses v can multiply by it anyway, which saves a pass
        over the parameters.
        """
        gamma = self.localization
        if isinstance(gamma, Tensor):
            return gradient.mul_(self.nbeta).addcmul_(away, gamma), 1.0
        assert not isinstance(gamma, Mapping)
        if not gamma:
            return gradient, self.nbeta
        return torch.add(away, gradient, alpha=self.nbeta / gamma, out=gradient), float(gamma)

    def observe(self, state: State, evaluate: Evaluate) -> tuple[Tensor, float, Info]:
        """Return (v, c) with c·v = Sᵀ∇U where the chains are, and what the step reports."""
        loss, gradient = evaluate(state.position)
        away = torch.sub(state.position, state.centre, out=state.memory["buffer"])
        distance = torch.linalg.vector_norm(away, dim=-1)
        force, factor = self.force(away, gradient)
        push = force if self.scale is None else self.scaled_force(force)
        if not state.forces:
            return push, factor, Info(loss, distance, None, 1)
        square = (factor * torch.linalg.vector_norm(push, dim=-1)).square()
        info = self.with_work(Info(loss, distance, None, 1, square), away, force, factor)
        if self.scale is not None:
            gamma: Any = self.localization
            pull = self.scaled_force(away * gamma)
            info = info._replace(heat=square - factor * torch.linalg.vecdot(pull, push))
        return push, factor, info

    def with_work(self, info: Info, away: Tensor, force: Tensor, factor: float) -> Info:
        """Add the virial, the work and the heat, which follow from the force."""
        assert info.force_square is not None
        virial = factor * torch.linalg.vecdot(away, force)
        gamma = self.localization
        if isinstance(gamma, Tensor):
            pulled = away * gamma
            tie = torch.linalg.vecdot(pulled, away)
            pull = factor * torch.linalg.vecdot(pulled, force)
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
        if isinstance(self.scale, KroneckerScale):
            return self.scale.transposed(vectors)
        return self.scaled(vectors)

    def noise(self, state: State, rng: Streams) -> Tensor:
        """S ξ with ξ standard normal, in the buffer that the state keeps."""
        return self.scaled(rng.normal_(state.memory["buffer"]))


def require_localization(localization: Any) -> None:
    """γ must be a number, a tensor or numbers by parameter names, none negative."""
    if isinstance(localization, Tensor):
        fine = localization.ndim == 1 and bool(
            ((localization >= 0) & localization.isfinite()).all()
        )
        expected = "be a vector (P,) of finite numbers of at least 0"
        require(fine, "localization", expected, localization)
        return
    named = isinstance(localization, Mapping)
    values = list(localization.values()) if named else [localization]
    real = all(isinstance(value, numbers.Real) and not isinstance(value, bool) for value in values)
    names = not named or all(isinstance(name, str) for name in localization)
    if not (real and names and values):
        expected = "be a number, a tensor (P,), or a dict of parameter names or globs to numbers"
        raise TypeError(message("localization", expected, describe(localization)))
    if not all(0 <= value < math.inf for value in values):
        expected = "be finite and at least 0"
        raise ValueError(message("localization", expected, describe(localization)))
