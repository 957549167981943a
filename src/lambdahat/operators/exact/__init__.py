"""Exact traces and diagonals of curvature matrices, and the checks of where they hold.

``HessianForm`` is for the Hessian of a loss, ``ClosedForm`` for Gauss–Newton matrices, Fishers and
second moments of gradients. A form says whether it is there and how the trace is found
(``trace_by``, ``closed_diagonal``, ``why_not``), and computes it: ``sums``, or a ``sample`` of the
trace where all signals would be too many.
"""

from __future__ import annotations

import math
from functools import cached_property

from torch import Tensor

from lambdahat.operators.exact import closed_form
from lambdahat.operators.exact.closed_form import (
    COMPARED_WHOLE,
    MAX_ROUNDS,
    MIN_ROUNDS,
    ClosedForm,
    Residuals,
    SampledResiduals,
)
from lambdahat.operators.exact.residual_checks import verify
from lambdahat.operators.exact.validity import ModelForm, form_of, no_form
from lambdahat.problem import Problem
from lambdahat.problem.batches import Batch
from lambdahat.results import Estimate

__all__ = ["COMPARED_WHOLE", "MAX_ROUNDS", "MIN_ROUNDS", "ClosedForm", "HessianForm"]

MOST_COLUMNS = 1024  # signals of smooth activations, beyond which there is no closed form


class HessianForm:
    """The closed form of ∂²L/∂θ²: that of the Gauss–Newton matrix, and what activations add."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.gauss_newton = problem, ClosedForm(problem, "hessian")

    @cached_property
    def form(self) -> ModelForm:
        """What prevents a closed form of the diagonal, and the signals it takes."""
        if self.problem.loss_function is None:
            return no_form("the problem has no separate model output")
        gauss_newton, few = self.gauss_newton, self.gauss_newton.few
        form = form_of(few)
        if form.refused:
            gauss_newton.forget()
        # without one there is nothing to guard
        if form.refused or not form.bends or not gauss_newton.trace_by:
            return ModelForm(form.curved, form.refused)
        few.mixed(twice=True)  # before what does with less
        return verify(form, few, gauss_newton.trusted)

    @property
    def trace_by(self) -> str:
        """How the trace is found: in "closed form", by "rounds" of random signals, or "" if not."""
        if self.form.refused:
            return ""
        many = self.form.columns > closed_form.MANY_COLUMNS
        return "rounds" if many and self.gauss_newton.trace_by else self.gauss_newton.trace_by

    @property
    def closed_diagonal(self) -> bool:
        """Whether the diagonal is known without products."""
        few = not self.form.refused and self.form.columns <= MOST_COLUMNS
        return few and self.gauss_newton.factors is not None

    def why_not(self) -> str:
        """Why there is no closed form, where that is known."""
        if self.form.refused or self.form.columns <= MOST_COLUMNS:
            return self.form.refused or self.gauss_newton.why_not()
        return f"{self.form.curved}, which takes {self.form.columns} signals a sample"

    def like(self, problem: Problem) -> HessianForm:
        """The form of the same model and loss on other data or in another precision, unchecked."""
        other = HessianForm(problem)
        other.gauss_newton, other.form = self.gauss_newton.like(problem), self.form
        return other

    def sums(self, diagonal: bool = False, only: Batch | None = None) -> Tensor | None:
        """The diagonal (P,) in float64, or its sum over each parameter; None without a form.

        With ``only``, those of the mean loss of one batch.
        """
        gauss_newton = self.gauss_newton
        if not self.closed_diagonal or gauss_newton.factors is None:
            return None
        extra = Residuals(self.problem, gauss_newton.leaves, diagonal)
        sums = gauss_newton.accumulate(gauss_newton.factors, diagonal, extra, only)
        return None if self._differs(extra) else sums

    def sample(self, tol: float, seed: int, limit: int | None = None) -> Estimate | None:
        """The trace by random signals, where all would be too many."""
        if self.trace_by != "rounds":
            return None
        gauss_newton, seen = self.gauss_newton, list[Residuals]()

        def signs(rounds: range) -> Residuals:
            """Random signs at the activations, in the rounds of those at the output."""
            seen.append(SampledResiduals(self.problem, gauss_newton.leaves, seed, rounds))
            return seen[-1]

        offset, signals = None, math.inf
        if gauss_newton.factors is not None and self.form.columns <= MOST_COLUMNS:
            signals = self.form.columns
            signals += gauss_newton.factors.count if gauss_newton.many else 0
        if not gauss_newton.many:
            base = gauss_newton.sums()
            assert base is not None
            offset = float(base.sum())
        found = gauss_newton.sample(tol, seed, limit, signs, offset, signals)
        return None if found is None or self._differs(*seen) else found

    def _differs(self, *seen: Residuals) -> bool:
        """Whether some data, on any rank, have no closed form; the form is updated."""
        refused = next((extra.refused for extra in seen if extra.refused), "")
        curved = self.form.curved or next((extra.curved for extra in seen if extra.curved), "")
        columns = max(self.form.columns, *(extra.columns for extra in seen))
        flat = self.problem.ranks.least(
            0.0 if refused else 1.0, "a look at all outputs", self.problem.device
        )
        if not flat:
            refused = refused or "an output that another rank saw is curved"
        self.form = ModelForm(curved or refused, refused, columns=columns)
        return bool(refused)
