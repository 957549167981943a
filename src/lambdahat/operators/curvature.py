"""The curvature of a problem: Hessian, Gauss–Newton, Fishers and gradient covariance as operators.

Every operator is the mean over the data set at the parameters the problem had when it was made: the
same batches in the same order at every product. What a product needs of a batch (the graph of its
gradient) is kept within a budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from lambdahat._core.check import require, require_choice, require_count
from lambdahat._core.precision import default_context
from lambdahat.operators import linearise
from lambdahat.operators.base import LinearOperator
from lambdahat.operators.exact.closed_form import (
    Extra,
    Trusted,
    accumulate,
    diagonal_of,
    mean_of_rounds,
    sampled_trace,
    trace_of,
    trusted_layers,
)
from lambdahat.operators.exact.few_samples import Few, few_of
from lambdahat.operators.exact.output_factors import (
    Factors,
    exact_factors,
    require_kind,
    require_separable,
    samples_separate,
    why_no_factors,
)
from lambdahat.operators.exact.piecewise import Form, form_of, refused_form
from lambdahat.operators.exact.residual_checks import verified
from lambdahat.operators.exact.residuals import ResidualRounds, Residuals, SampledResiduals
from lambdahat.operators.products import Products
from lambdahat.problem import Problem
from lambdahat.problem.batches import Batch
from lambdahat.problem.losses import NAMED
from lambdahat.problem.memory import PASS, memory_bytes
from lambdahat.problem.space import Pattern
from lambdahat.results import Estimate

T = TypeVar("T")

OWN = 2  # vectors that it holds: its parameters, and the same as leaves of graphs
MANY_FACTORS = 128  # signals sent back for each sample, beyond which a trace is sampled …
MOST_COLUMNS = 1024  # … and those of smooth activations, beyond which there is no closed form


# of operators by id: what makes their products. Each thread has its own, since others may multiply
# meanwhile.
_STAND_INS: ContextVar[Mapping[int, Any]] = ContextVar("stand_ins", default={})  # noqa: B039


class Curvature(LinearOperator):
    """A sum over batches Σ_b w_b A_b, each A_b known by a product that a ``Builder`` makes.

    ``modes`` maps the name of each way to build products to its builder, best first where the graph
    can be kept. ``memory`` is the budget in bytes, or as "4GiB", for graphs kept between products
    (default: a quarter of the problem's ``memory``, or 40 % of what is free).
    """

    def __init__(
        self,
        problem: Problem,
        modes: dict[str, linearise.Builder],
        mode: str = "auto",
        memory: int | str | None = None,
        *,
        psd: bool = False,
    ) -> None:
        dtype = torch.promote_types(problem.dtype, torch.float32)
        super().__init__(
            problem.num_parameters, dtype, problem.device, psd=psd, space=problem.space
        )
        require_choice(mode, "mode", ("auto", *modes))
        memory = memory_bytes(memory, least=0)
        self.problem = problem.fixed()
        self.problem.agree(f"{type(self).__name__} with {mode=} and {memory=}")
        self.problem.ranks = self.problem.ranks.apart(type(self).__name__)
        self.modes = modes if mode == "auto" else {mode: modes[mode]}
        self.memory = memory
        self._products: Products | None = None

    @property
    def mode(self) -> str:
        """The mode in use; chosen at the first product."""
        return self._ready().mode

    @property
    def kept_batches(self) -> int:
        """How many batches keep their graph between products."""
        return self._ready().kept

    @property
    def graph_bytes(self) -> int:
        """Bytes of graph that one batch keeps."""
        return self._ready().graph_bytes

    @property
    def stand_in(self) -> tuple[Curvature, int | None] | None:
        """What makes the products of this thread, and of which batch alone, while precisions are
        compared.
        """
        return _STAND_INS.get().get(id(self))

    @stand_in.setter
    def stand_in(self, value: tuple[Curvature, int | None] | None) -> None:
        others = {key: kept for key, kept in _STAND_INS.get().items() if key != id(self)}
        _STAND_INS.set(others if value is None else {**others, id(self): value})

    def _apply(self, block: Tensor) -> Tensor:
        if self.stand_in is not None:
            other, only = self.stand_in
            return other._ready().apply(block.T.contiguous().to(other.dtype), only).T.to(self.dtype)
        return self._ready().apply(block.T.contiguous()).T

    def prepare(self) -> None:
        """Choose the mode and build the graphs of products now."""
        self._ready()

    def like(self, problem: Problem) -> Curvature:
        """The same kind of operator for another problem of the same parameters."""
        return self._like(problem)

    def recordable(self) -> tuple[Callable[[Tensor], Tensor], torch.cuda.Stream] | None:
        # what a subclass adds to a product is not in the graph
        plain = type(self)._apply is Curvature._apply
        return self._ready().recordable() if plain and self.device.type == "cuda" else None

    def budget(self) -> int | None:
        return self.problem.memory

    def room(self, share: float) -> float:
        memory = self.problem.memory
        if memory is None:
            return super().room(share)
        own = OWN * self.dim * self.problem.dtype.itemsize
        left = (1 - PASS) * memory - self.kept_batches * self.graph_bytes - own
        return self.problem.ranks.least(left, "the memory left", self.device)

    def column_bytes(self) -> int:
        return 3 * self.dim * self.dtype.itemsize

    def free_memory(self, device: torch.device | None = None) -> int:
        return int(
            self.problem.ranks.least(super().free_memory(device), "the free memory", self.device)
        )

    def restrict(self, which: Pattern | Sequence[int] | Tensor) -> LinearOperator:
        """The principal submatrix; by name it differentiates with respect to those parameters
        only.
        """
        by_index = isinstance(which, Tensor) or (
            not callable(which) and len(which) > 0 and not isinstance(which[0], str)
        )
        if by_index:
            return super().restrict(which)
        return self._like(self.problem.restrict(which))  # type: ignore[arg-type]

    def _like(self, problem: Problem) -> Curvature:
        """The same kind of operator for another problem."""
        raise TypeError(f"{type(self).__name__} cannot be restricted by name")

    def _ready(self) -> Products:
        if self._products is None:
            leaves = linearise.leaves_of(self.problem, self.problem.vector)
            self._products = Products(self.problem, leaves, self.modes, self.memory, self.dtype)
        return self._products

    @cached_property
    def _leaves(self) -> dict[str, Tensor]:
        """For closed forms; those of products are their own, for they remember the stream of a
        CUDA graph's capture.
        """
        return linearise.leaves_of(self.problem, self.problem.vector)

    @cached_property
    def _few(self) -> Few:
        """What guards look at; it holds a graph, and goes when the last has looked."""
        return few_of(self.problem, self._leaves)

    @cached_property
    def trusted(self) -> Trusted:
        """The parameters that enter through layers with a closed form."""
        found = trusted_layers(self._few)
        del self._few
        return found

    def forget(self) -> None:
        """Let go of what closed forms take memory for, where there are none."""
        for kept in ("_few", "_leaves"):
            self.__dict__.pop(kept, None)


class Hessian(Curvature):
    """∂²L/∂θ². Its diagonal is the Gauss–Newton matrix's, and what smooth activations add to it."""

    def __init__(
        self, problem: Problem, mode: str = "auto", memory: int | str | None = None
    ) -> None:
        modes: dict[str, linearise.Builder] = {
            "reverse": linearise.hessian_reverse,
            "forward": linearise.hessian_forward,
            "finite": linearise.hessian_finite,
        }
        super().__init__(problem, modes, mode, memory)
        self._options = (mode, memory)

    def _like(self, problem: Problem) -> Hessian:
        return Hessian(problem, *self._options)

    @cached_property
    def form(self) -> Form:
        """What is in the way of a closed form of the diagonal, and how many signals smooth
        activations take for it.
        """
        if self.problem.loss_function is None:
            return refused_form("the problem has no separate model output")
        near, few = self._near, self._near._few
        form = form_of(few)
        if form.refused:
            near.forget()
        # without one there is nothing to guard
        if form.refused or not form.bends or not near.trace_by:
            return Form(form.curved, form.refused)
        few.mixed(twice=True)  # before what does with less
        return verified(form, few, near.trusted)

    @property
    def trace_by(self) -> str:
        if self.form.refused or self._near.trace_by != "closed form":
            return "" if self.form.refused else self._near.trace_by
        return "closed form" if self.form.columns <= MANY_FACTORS else "rounds"

    @property
    def closed_diagonal(self) -> bool:
        """Whether the diagonal is known without products."""
        return (
            not self.form.refused
            and self.form.columns <= MOST_COLUMNS
            and self._near.closed_diagonal
        )

    def known_trace(self) -> float | None:
        return self._closed(False, lambda near, extra: near.known_trace(extra))

    def known_diagonal(self) -> Tensor | None:
        return self._closed(True, lambda near, extra: near.known_diagonal(extra))

    def sampled_trace(self, tol: float, seed: int) -> Estimate | None:
        """Where the closed form takes many signals, random ones in their place."""
        if self.trace_by != "rounds":
            return None
        return self._rounds_of_all(tol, seed) if self._near.many else self._rounds(tol, seed)

    def why_no_trace(self) -> str:
        if self.form.refused or self.form.columns <= MOST_COLUMNS:
            return self.form.refused or self._near.why_no_trace()
        return f"{self.form.curved}, which takes {self.form.columns} signals a sample"

    def control(self) -> LinearOperator | None:
        if self.problem.loss_function is None or self._near.factors is None:
            return None
        # what forbids a second derivative forbids Jv too
        return None if self.mode == "finite" else self._near

    @cached_property
    def _near(self) -> GaussNewton:
        return ggn(self.problem, memory=self.memory)

    def _closed(self, diagonal: bool, ask: Callable[[GaussNewton, Extra], T | None]) -> T | None:
        """What the Gauss–Newton matrix answers, where all parts of the data have the form of the
        first samples.
        """
        if not self.closed_diagonal:
            return None
        extra = Residuals(self.problem, self._near._leaves, diagonal)
        answer = ask(self._near, extra)
        return None if self._differs(extra) else answer

    def _differs(self, *seen: Residuals) -> bool:
        """Whether a part of the data, of this rank or another, has no closed form; it is
        remembered.
        """
        refused = next((extra.refused for extra in seen if extra.refused), "")
        curved = self.form.curved or next((extra.curved for extra in seen if extra.curved), "")
        columns = max(self.form.columns, *(extra.columns for extra in seen))
        flat = self.problem.ranks.least(
            0.0 if refused else 1.0, "a look at all outputs", self.device
        )
        if not flat:
            refused = refused or "an output that another rank saw is curved"
        self.form = Form(curved or refused, refused, columns=columns)
        return bool(refused)

    def _rounds_of_all(self, tol: float, seed: int) -> Estimate | None:
        """Random factors at the output and random signs at the activations, a round of each
        together.
        """
        near, seen = self._near, []

        def extra(index: int) -> SampledResiduals:
            seen.append(SampledResiduals(self.problem, near._leaves, seed, index))
            return seen[-1]

        found = near.sampled_trace(tol, seed, extra)
        return None if found is None or self._differs(*seen) else found

    def _rounds(self, tol: float, seed: int) -> Estimate | None:
        """The Gauss–Newton matrix's trace exactly, and random signs at the activations."""
        near, seen = self._near, []
        base, factors = near.known_trace(), near.factors
        assert base is not None
        assert factors is not None

        def more(rounds: range) -> list[float]:
            seen.append(ResidualRounds(self.problem, near._leaves, seed, rounds))
            accumulate(
                self.problem, near._leaves, replace(factors, count=0), near.trusted, False, seen[-1]
            )
            return self.problem.ranks.sum(seen[-1].totals, "the residuals of a trace").tolist()

        found = mean_of_rounds(more, tol, base)
        return None if self._differs(*seen) else found


class GaussNewton(Curvature):
    """(1/n) Σ_i J_iᵀ M_i J_i for one choice of the matrices M_i at the model's outputs."""

    def __init__(
        self,
        problem: Problem,
        make_map: Callable[[Problem], Callable[[Any, Batch], linearise.OutputMap]],
        factors: Callable[[Few], Factors | None],
        mode: str,
        memory: int | str | None,
        psd: bool,
    ) -> None:
        output_map = make_map(problem)
        modes = {
            "reverse": linearise.gauss_newton_reverse(output_map),
            "forward": linearise.gauss_newton_forward(output_map),
        }
        super().__init__(problem, modes, mode, memory, psd=psd)
        self._recipe = (make_map, factors, mode, memory, psd)

    @cached_property
    def factors(self) -> Factors | None:
        """The factors of M_i, where there are such."""
        found = self._recipe[1](self._few)
        if found is None:
            del self._few
        return found

    def _like(self, problem: Problem) -> GaussNewton:
        return GaussNewton(problem, *self._recipe)

    @cached_property
    def many(self) -> bool:
        """Whether there are so many factors, or none in closed form, that targets are sampled in
        their place.
        """
        few = self.factors is not None and self.factors.count <= MANY_FACTORS
        loss, expected = self.problem.loss_function, self._recipe[0] is linearise.hessian_map
        return not few and expected and loss is not None and loss.likelihood

    @cached_property
    def trace_by(self) -> str:
        """How the trace is found without products: in "closed form", by "rounds" of random
        signals, or "" if not.
        """
        if self.many and (self.factors is not None or samples_separate(self._few)):
            return "rounds"
        return "" if self.factors is None else "closed form"

    @property
    def closed_diagonal(self) -> bool:
        """Whether the diagonal is known without products."""
        return self.factors is not None

    def known_trace(self, extra: Extra | None = None) -> float | None:
        if self.factors is None:
            return None
        return trace_of(self.problem, self._leaves, self.factors, extra, self.trusted)

    def known_diagonal(self, extra: Extra | None = None) -> Tensor | None:
        if self.factors is None:
            return None
        return diagonal_of(self.problem, self._leaves, self.factors, extra, self.trusted).to(
            self.dtype
        )

    def sampled_trace(
        self, tol: float, seed: int, extra: Callable[[int], Extra] | None = None
    ) -> Estimate | None:
        if self.trace_by != "rounds":
            return None
        return sampled_trace(self.problem, self._leaves, tol, seed, extra, self.trusted)

    def why_no_trace(self) -> str:
        return "" if self.factors is not None else why_no_factors(self._few)


class Covariance(Curvature):
    """(1/n) Σ_i g_i g_iᵀ, less ḡ ḡᵀ when centred; g_i the gradient of sample i."""

    def __init__(
        self, problem: Problem, centred: bool, mode: str, memory: int | str | None
    ) -> None:
        require_separable(problem)
        if problem.loss_function is None:
            modes: dict[str, linearise.Builder] = {"samples": linearise.sample_gradients}
        else:
            output_map = linearise.rank_one_map(linearise.empirical_residuals(problem))
            modes = {
                "reverse": linearise.gauss_newton_reverse(output_map),
                "forward": linearise.gauss_newton_forward(output_map),
            }
        super().__init__(problem, modes, mode, memory, psd=True)
        self._options = (centred, mode, memory)
        self.centred = centred
        self._mean = self.problem.gradient().to(self.dtype) if centred else None

    @cached_property
    def _factors(self) -> Factors | None:
        if self.problem.loss_function is None:
            return None
        found = exact_factors(self._few, "empirical")
        if found is None:
            del self._few
        return found

    def _like(self, problem: Problem) -> Covariance:
        return Covariance(problem, *self._options)

    def _apply(self, block: Tensor) -> Tensor:
        out = super()._apply(block)
        source = self if self.stand_in is None else self.stand_in[0]
        mean = source._mean if isinstance(source, Covariance) else None
        return (
            out
            if mean is None
            else (out - torch.outer(mean, mean @ block.to(mean.dtype))).to(self.dtype)
        )

    def known_trace(self) -> float | None:
        if self._factors is None:
            return None
        second = trace_of(self.problem, self._leaves, self._factors, None, self.trusted)
        return second if self._mean is None else second - float(self._mean.double().square().sum())

    def known_diagonal(self) -> Tensor | None:
        if self._factors is None:
            return None
        second = diagonal_of(self.problem, self._leaves, self._factors, None, self.trusted).to(
            self.dtype
        )
        return second if self._mean is None else second - self._mean.square()


@default_context()
def hessian(problem: Problem, *, mode: str = "auto", memory: int | str | None = None) -> Hessian:
    """The Hessian ∂²L/∂θ² of the mean loss.

    ``mode``: "reverse" (graph of the gradient kept between products), "forward" (dual numbers,
    nothing kept), "finite" (central differences) or "auto": the first that the model can take, and
    the faster where the graphs do not fit in ``memory`` bytes.
    """
    _require_problem(problem)
    return Hessian(problem, mode, memory)


@default_context()
def ggn(problem: Problem, *, mode: str = "auto", memory: int | str | None = None) -> GaussNewton:
    """The generalised Gauss–Newton matrix (1/n) Σ_i J_iᵀ (∂²ℓ_i/∂z²) J_i, J_i the Jacobian of
    the model's output z.
    """
    _require_problem(problem)
    problem = problem.with_output("the Gauss–Newton matrix")
    loss = problem.loss_function
    convex = loss is not None and loss.convex
    return GaussNewton(
        problem,
        linearise.hessian_map,
        lambda few: exact_factors(few, "hessian"),
        mode,
        memory,
        convex,
    )


@default_context()
def fisher(
    problem: Problem,
    kind: str = "exact",
    *,
    samples: int = 1,
    seed: int = 0,
    mode: str = "auto",
    memory: int | str | None = None,
) -> Curvature:
    """The Fisher information E[∇log p ∇log pᵀ] of the model's predictive distribution at the data's
    inputs.

    ``kind``: "exact" (expectation in closed form; the Gauss–Newton matrix but for "gaussian_nll"),
    "monte_carlo" (``samples`` targets a sample, drawn once) or "empirical" (the data's own targets:
    the uncentred covariance). Class weights, ``pos_weight`` and label smoothing weigh what a target
    adds as they do in the Gauss–Newton matrix.
    """
    _require_problem(problem)
    require_kind(kind)
    if kind == "empirical":
        return gradient_covariance(problem, centred=False, mode=mode, memory=memory)
    problem = problem.with_output("the Fisher")
    loss = problem.loss_function
    assert loss is not None
    require(
        loss.predictive,
        "loss",
        "be a negative log-likelihood for the Fisher",
        repr(loss.name),
        f'use one of {", ".join(NAMED)}, kind="empirical", or lh.ggn(problem), which takes any'
        " loss",
    )
    if kind == "exact" and loss.likelihood:
        return ggn(problem, mode=mode, memory=memory)
    if kind == "exact":
        return GaussNewton(
            problem,
            linearise.fisher_map,
            lambda few: exact_factors(few, "fisher"),
            mode,
            memory,
            True,
        )
    require_separable(problem)
    require_count(samples, "samples")
    problem.ranks.agree(
        "the Monte-Carlo Fisher", {"seed": seed, "samples": samples}, problem.device
    )

    def drawn(p: Problem) -> Callable[[Any, Batch], linearise.OutputMap]:
        return linearise.rank_one_map(linearise.monte_carlo_residuals(p, samples, seed))

    def factors(few: Few) -> Factors | None:
        return exact_factors(few, "monte_carlo", samples, seed)

    return GaussNewton(problem, drawn, factors, mode, memory, True)


@default_context()
def gradient_covariance(
    problem: Problem, *, centred: bool = True, mode: str = "auto", memory: int | str | None = None
) -> Covariance:
    """The covariance of the per-sample gradients, (1/n) Σ_i g_i g_iᵀ − ḡ ḡᵀ; not centred, the
    empirical Fisher.
    """
    _require_problem(problem)
    return Covariance(problem, centred, mode, memory)


def _require_problem(problem: Any) -> None:
    require(
        isinstance(problem, Problem),
        "problem",
        "be a lambdahat.Problem",
        problem,
        "make one with lh.Problem(model, loss, data)",
        TypeError,
    )
