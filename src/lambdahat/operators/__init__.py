"""Operators: one fixed matrix each, known by its products."""

from lambdahat.operators.base import Identity, LinearOperator
from lambdahat.operators.curvature import fisher, ggn, gradient_covariance, hessian
from lambdahat.operators.matrix import identity, operator

__all__ = [
    "Identity",
    "LinearOperator",
    "fisher",
    "ggn",
    "gradient_covariance",
    "hessian",
    "identity",
    "operator",
]
