"""Exact traces and diagonals of curvature matrices, and the checks of where they hold.

``HessianForm`` is for the Hessian of a loss, ``ClosedForm`` for Gauss–Newton matrices, Fishers and
second moments of gradients. A form says whether it is there and how the trace is found
(``trace_by``, ``closed_diagonal``, ``why_not``), and computes it: ``sums``, or a ``sample`` of the
trace where all signals would be too many.
"""

from lambdahat.operators.exact.closed_form import (
    COMPARED_WHOLE,
    MAX_ROUNDS,
    MIN_ROUNDS,
    ClosedForm,
    HessianForm,
)

__all__ = ["COMPARED_WHOLE", "MAX_ROUNDS", "MIN_ROUNDS", "ClosedForm", "HessianForm"]
