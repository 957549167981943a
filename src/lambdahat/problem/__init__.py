"""The problem: a model, a loss and data, as one function of the parameters."""

from lambdahat.problem.problem import DEFAULT_BATCH, Problem, require_problem

__all__ = ["DEFAULT_BATCH", "Problem", "require_problem"]
