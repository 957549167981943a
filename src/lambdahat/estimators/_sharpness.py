"""Sharpness, plain and invariant to reparametrisation.

Scaling one layer of a ReLU network by c and the next by 1/c leaves the function as it is and
multiplies blocks of the Hessian by 1/c² and c². The adaptive, relative and Fisher–Rao measures
below do not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lambdahat._core.check import require, require_choice, require_count, require_positive
from lambdahat._core.device import default_context
from lambdahat._core.progress import report
from lambdahat._core.rng import derived_seed
from lambdahat.estimators._eigenpairs import eigenpairs, norm_work, pairs_work
from lambdahat.estimators._trace import trace
from lambdahat.estimators.quantities import MeasureSettings, Work, products, quantity
from lambdahat.estimators.sequential import sampled_work
from lambdahat.operators import fisher, hessian
from lambdahat.operators.base import LinearOperator
from lambdahat.problem import Problem, require_problem
from lambdahat.results import Eigenpairs, Estimate, Result, Status

FIRST_STEP = 1.0
LAST_STEP = 1e-4


@dataclass(frozen=True)
class Sharpness(Result):
    """How steeply the loss rises within ‖T⁻¹ε‖ ≤ ``radius`` of θ.

    T is diag|θ| if ``adaptive``, else I. ``rise`` is the largest L(θ + ε) − L(θ) found, a lower
    bound of the maximum. ``slope`` = ‖T∇L‖ and ``curvature`` = λ_max(THT) give its two closed
    forms. ``cost`` counts gradients and Hessian products.
    """

    rise: Estimate
    slope: Estimate
    curvature: Estimate
    radius: float
    adaptive: bool
    cost: int = 0
    status: Status = Status.CONVERGED

    @property
    def first_order(self) -> float:
        """ρ‖T∇L‖, the maximum of the linear model."""
        return self.radius * float(self.slope)

    @property
    def second_order(self) -> float:
        """½ρ²·max(λ_max(THT), 0), the maximum of the quadratic model where the gradient is 0."""
        return 0.5 * self.radius**2 * max(float(self.curvature), 0.0)


@dataclass(frozen=True)
class RelativeSharpness(Result):
    """κ of each weight by name, and the plain ‖w‖²·tr H_w."""

    layers: dict[str, Estimate]
    simple: dict[str, Estimate]
    cost: int = 0
    status: Status = Status.CONVERGED

    @property
    def total(self) -> Estimate:
        """Σ κ over the weights, whose errors are independent: each has probes of its own."""
        parts = list(self.layers.values())
        error = math.sqrt(sum(float(part.stderr) ** 2 for part in parts))
        dof = min(part.dof for part in parts)
        return Estimate(sum(float(part) for part in parts), error, self.cost, self.status, dof)


@dataclass(frozen=True)
class Overlap(Result):
    """How much of the gradient lies along each eigenvector: ``cosines`` φ_iᵀg/‖g‖, (k,).

    ``errors`` (k,) are those of the cosines, r_i/gap_i (see ``gradient_overlap``). ``curvature`` is
    Σ_i λ_i cos²_i, what these pairs contribute to gᵀHg/‖g‖²; its error is Σ_i (r_i cos²_i + 2|λ_i
    cos_i| r_i/gap_i).
    """

    cosines: Tensor
    errors: Tensor
    curvature: Estimate
    gradient_norm: float

    @property
    def squared(self) -> Tensor:
        """cos², the share of ‖g‖² along each vector; its error is 2|cos|·``errors``."""
        return self.cosines.square()

    @property
    def cumulative(self) -> Tensor:
        """The share of ‖g‖² in the span of the first i vectors."""
        return self.squared.cumsum(0)


class _Congruent(LinearOperator):
    """AᵀHA, for a linear map A given by itself and its transpose on blocks of columns."""

    def __init__(
        self,
        inner: LinearOperator,
        dim: int,
        forward: Callable[[Tensor], Tensor],
        back: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__(dim, inner.dtype, inner.device, symmetric=inner.symmetric, psd=inner.psd)
        self.inner, self.forward, self.back = inner, forward, back

    def _apply(self, block: Tensor) -> Tensor:
        return self.back(self.inner @ self.forward(block))


def adaptive_curvature(problem: Problem) -> LinearOperator:
    """THT with T = diag|θ|: the Hessian with each parameter measured by its own size.

    Under θ → Dθ for a positive diagonal D that leaves the function alone, H → D⁻¹HD⁻¹ and T → DT:
    THT does not change.
    """
    inner, scale = hessian(problem), problem.vector.abs()
    scale = scale.to(inner.dtype)[:, None]
    return _Congruent(inner, inner.dim, lambda block: scale * block, lambda block: scale * block)


@default_context()
def sharpness(
    problem: Problem,
    radius: float = 0.05,
    adaptive: bool = True,
    steps: int = 20,
    tol: float = 1e-6,
    seed: int = 0,
) -> Sharpness:
    """Worst-case sharpness max_{‖T⁻¹ε‖≤ρ} L(θ + ε) − L(θ), adaptive as in Kwon et al. 2021 (ASAM).

    ε = Tu with T = diag|θ| (``adaptive``; a parameter that is 0 is not perturbed) or T = I. The
    ascent in u starts from the best of ρ·T∇L/‖T∇L‖ (the maximum of the linear model) and ±ρφ, with
    φ the leading eigenvector of THT (that of the quadratic model at a minimum), and takes ``steps``
    of projected ascent u ← Π(u + s·ρ·T∇L/‖T∇L‖) onto the ball ‖u‖ ≤ ρ, with s starting at 1 and
    halved when the loss does not rise. ``tol`` is that of the eigenpair.
    """
    require_positive(radius, "radius")
    require_count(steps, "steps", least=0)
    operator = adaptive_curvature(problem) if adaptive else hessian(problem)
    leading = eigenpairs(operator, 1, "largest", tol, seed=seed)
    theta = problem.vector
    climb = _Climb(problem, theta, theta.abs() if adaptive else torch.ones_like(theta), radius)
    slope = climb.gradient(torch.zeros_like(theta))
    for start in (slope, leading.vectors[:, 0].to(theta), -leading.vectors[:, 0].to(theta)):
        climb.offer(climb.on_sphere(start))
    climb.ascend(steps)
    value, error = float(leading.values[0]), float(leading.residuals[0])
    curvature = Estimate(value, error, leading.cost, leading.status)
    rise = Estimate(climb.best_loss - climb.centre, math.inf)
    steep, cost = Estimate(float(slope.double().norm())), climb.gradients + leading.cost
    return Sharpness(rise, steep, curvature, float(radius), adaptive, cost, leading.status)


class _Climb:
    """Projected ascent of u ↦ L(θ + Tu) on the ball ‖u‖ ≤ ρ; keeps the best point."""

    def __init__(self, problem: Problem, theta: Tensor, scale: Tensor, radius: float) -> None:
        self.problem, self.theta, self.scale, self.radius = problem, theta, scale, radius
        self.gradients = 0
        self.centre = self.best_loss = problem.loss(theta)
        self.best = torch.zeros_like(theta)

    def gradient(self, u: Tensor) -> Tensor:
        """∇_u L(θ + Tu) = T∇L."""
        self.gradients += 1
        return self.scale * self.problem.gradient(self.theta + self.scale * u)

    def offer(self, u: Tensor) -> bool:
        """Take u when its loss is the highest so far."""
        loss = self.problem.loss(self.theta + self.scale * u)
        better = loss > self.best_loss
        if better:
            self.best, self.best_loss = u, loss
        return better

    def on_sphere(self, u: Tensor) -> Tensor:
        """The multiple of u of length ρ; 0 where u is."""
        size = float(u.norm())
        return u * (self.radius / size) if size > 0 else u

    def ascend(self, steps: int) -> None:
        """``steps`` gradients from the best point, fewer where no step raises the loss."""
        step = FIRST_STEP
        for done in range(steps):
            ahead = self.on_sphere(self.gradient(self.best))
            while step > LAST_STEP:
                u = self.best + step * ahead
                if self.offer(self.on_sphere(u) if float(u.norm()) > self.radius else u):
                    break
                step /= 2
            report("sharpness", done + 1, steps)
            if step <= LAST_STEP:
                return


@default_context()
def relative_sharpness(problem: Problem, tol: float = 0.05, seed: int = 0) -> RelativeSharpness:
    """κ = Σ_{s,s'} ⟨w_s, w_s'⟩ · tr H_{s,s'} of each weight (Petzka et al. 2021), and ‖w‖²·tr H_w.

    w_s are the rows of a weight seen as a matrix (outputs × the rest), H_{s,s'} the block of the
    Hessian between rows s and s'. With LLᵀ = WWᵀ, κ = tr((L ⊗ I)ᵀ H (L ⊗ I)): a trace, estimated to
    ``tol``. Both are invariant to the scale of a whole layer; parameters of fewer than two
    dimensions have none.
    """
    require_problem(problem)
    parameters = problem.space.unflatten(problem.vector)
    weights = {name: tensor for name, tensor in parameters.items() if tensor.ndim > 1}
    require(bool(weights), "the problem", "have a weight of two dimensions or more", "only vectors")
    layers, simple, cost = {}, {}, 0
    whole = hessian(problem)
    for done, (name, weight) in enumerate(weights.items(), start=1):
        block = whole.restrict([name])
        own = derived_seed(seed, "relative sharpness", name)
        layers[name] = trace(_between_rows(block, weight), tol, seed=own)
        plain, size = trace(block, tol, seed=own), float(weight.double().square().sum())
        simple[name] = replace(plain, value=size * float(plain), stderr=size * float(plain.stderr))
        cost += layers[name].cost + plain.cost
        report("relative sharpness", done, len(weights))
    parts = [*layers.values(), *simple.values()]
    status = next((part.status for part in parts if not part.status.ok), Status.CONVERGED)
    return RelativeSharpness(layers, simple, cost, status)


def _between_rows(block: LinearOperator, weight: Tensor) -> LinearOperator:
    """(L ⊗ I)ᵀ H (L ⊗ I) for a weight's block of the Hessian, L (rows, k) with LLᵀ = WWᵀ."""
    matrix = weight.reshape(len(weight), -1).to(block.dtype)
    rows, columns = matrix.shape
    factor = torch.linalg.qr(matrix.T)[1].T
    inner = factor.shape[1]

    def forward(part: Tensor) -> Tensor:
        out = torch.einsum("rk,kcb->rcb", factor, part.reshape(inner, columns, -1))
        return out.reshape(rows * columns, -1)

    def back(part: Tensor) -> Tensor:
        out = torch.einsum("rk,rcb->kcb", factor, part.reshape(rows, columns, -1))
        return out.reshape(inner * columns, -1)

    return _Congruent(block, inner * columns, forward, back)


@default_context()
def fisher_rao_norm(problem: Problem, kind: str = "exact") -> Estimate:
    """The squared Fisher–Rao norm ‖θ‖²_fr = θᵀFθ, exact in one product (Liang et al. 2019).

    The square is Liang et al.'s own definition; the norm itself is its root. F is the Fisher of the
    model's own distribution ("exact"), or of the data's targets ("empirical"). For a parameter
    filter, θ and F are those of the chosen parameters.
    """
    cure = "sampled targets would give a random number"
    require_choice(kind, "kind", ("exact", "empirical"), cure)
    operator, theta = fisher(problem, kind), problem.vector
    return Estimate(float(theta.double() @ (operator @ theta).double()), cost=1)


def gradient_overlap(problem: Problem, pairs: Eigenpairs) -> Overlap:
    """Overlap of the gradient with eigenvectors: the terms of Eq. 5.34 of the spectral thesis.

    To second order a step of gradient descent changes the loss by −α‖g‖²(1 − (α/2) Σ_i λ_i
    (φ_iᵀg)²/‖g‖²), so that the loss falls for α < 2/Σ_i λ_i cos²_i. For the overlap with a
    mini-batch gradient pass ``problem.subsample(B)``.

    An eigenvector with residual r is turned by at most about r/gap (Davis and Kahan 1970), the
    error of its cosine. The gap is taken to the nearest of the other pairs or of 0, where the bulk
    of a network's eigenvalues lies.
    """
    require_problem(problem)
    gradient = problem.gradient().double()
    fits = isinstance(pairs, Eigenpairs) and pairs.vectors.shape[0] == len(gradient)
    require(fits, "pairs", f"be Eigenpairs with vectors of length {len(gradient)}", pairs)
    size = float(gradient.norm())
    fine = size > 0
    require(fine, "the gradient", "not be zero", "a point where it is", "it has no direction there")
    cosines = (pairs.vectors.to(gradient).T @ gradient / size).cpu()
    values, residuals = pairs.values.cpu().double(), pairs.residuals.cpu().double()
    distance = (values[:, None] - values).abs().fill_diagonal_(math.inf)
    gaps = torch.minimum(distance.amin(dim=1), values.abs())
    turns = (residuals / gaps.clamp_min(torch.finfo(torch.float64).tiny)).clamp_max(1.0)
    value = float(values @ cosines.square())
    error = float(residuals @ cosines.square() + 2 * (values * cosines).abs() @ turns)
    return Overlap(cosines, turns, Estimate(value, error, status=pairs.status), size)


quantity(
    "gradient_overlap",
    lambda problem, operator, settings: gradient_overlap(
        problem, eigenpairs(operator, min(settings.top, operator.dim), seed=settings.seed)
    ),
)(pairs_work)


@quantity("sharpness", lambda problem, _, settings: sharpness(problem, seed=settings.seed))
def sharpness_work(problem: Problem, operator: LinearOperator, settings: MeasureSettings) -> Work:
    """One eigenpair, and the gradients of the ascent."""
    pair = norm_work(problem, operator, settings)
    return replace(pair, most=pair.most + 50)


@quantity(
    "relative_sharpness",
    lambda problem, _, settings: relative_sharpness(problem, seed=settings.seed),
)
def relative_work(problem: Problem, operator: LinearOperator, settings: MeasureSettings) -> Work:
    """Two traces of each weight matrix."""
    shapes = ((1, 1),) if operator.space is None else operator.space.shapes
    each = sampled_work(problem, operator, settings)
    weights = sum(len(shape) > 1 for shape in shapes)
    return replace(each, fewest=0, most=2 * weights * each.most)


@quantity("fisher_rao", lambda problem, *_: fisher_rao_norm(problem))
def fisher_rao_work(problem: Problem, operator: LinearOperator, settings: MeasureSettings) -> Work:
    """One product."""
    return products(operator, 1, 1, 2)
