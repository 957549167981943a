"""lambdahat: the geometry of a neural network's loss, with error bars.

λ is two things here: an eigenvalue of the curvature, and the learning coefficient of a singular
model.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lambdahat import maxent, sampling, singular
from lambdahat._core.progress import progress
from lambdahat._measure import compare, measure
from lambdahat.estimators import (
    Overlap,
    RankBound,
    RelativeSharpness,
    Sharpness,
    diagonal,
    eigenpairs,
    fisher_rao_norm,
    frobenius_norm,
    gradient_overlap,
    landscape,
    logdet,
    moments,
    power_iteration,
    random_direction,
    rank_bound,
    relative_sharpness,
    sharpness,
    spectral_norm,
    spectrum,
    towards,
    trace,
    trace_function,
    trace_per_layer,
    variance,
)
from lambdahat.krylov import inverse
from lambdahat.operators.base import LinearOperator
from lambdahat.operators.curvature import fisher, ggn, gradient_covariance, hessian
from lambdahat.operators.kernel_matrix import kernel_matrix
from lambdahat.operators.kronecker import KFAC, ekfac, kfac
from lambdahat.operators.matrix import identity, operator
from lambdahat.problem import Problem
from lambdahat.results import (
    Chains,
    Density,
    Eigenpairs,
    Estimate,
    Landscape,
    LearningCoefficient,
    Moments,
    Result,
    Spectrum,
    Status,
    Variance,
)
from lambdahat.results.measurement import Comparison, Measurement
from lambdahat.sampling import sample
from lambdahat.singular import llc

if TYPE_CHECKING:
    from lambdahat import data, experiments, graphs, models, optim, randommatrix, training
    from lambdahat.report.figures import plot
    from lambdahat.report.page import page

__version__ = "0.1.0"

__all__ = [
    "KFAC",
    "Chains",
    "Comparison",
    "Density",
    "Eigenpairs",
    "Estimate",
    "Landscape",
    "LearningCoefficient",
    "LinearOperator",
    "Measurement",
    "Moments",
    "Overlap",
    "Problem",
    "RankBound",
    "RelativeSharpness",
    "Result",
    "Sharpness",
    "Spectrum",
    "Status",
    "Variance",
    "compare",
    "data",
    "diagonal",
    "eigenpairs",
    "ekfac",
    "experiments",
    "fisher",
    "fisher_rao_norm",
    "frobenius_norm",
    "ggn",
    "gradient_covariance",
    "gradient_overlap",
    "graphs",
    "hessian",
    "identity",
    "inverse",
    "kernel_matrix",
    "kfac",
    "landscape",
    "llc",
    "logdet",
    "maxent",
    "measure",
    "models",
    "moments",
    "operator",
    "optim",
    "page",
    "plot",
    "power_iteration",
    "progress",
    "random_direction",
    "randommatrix",
    "rank_bound",
    "relative_sharpness",
    "sample",
    "sampling",
    "sharpness",
    "singular",
    "spectral_norm",
    "spectrum",
    "towards",
    "trace",
    "trace_function",
    "trace_per_layer",
    "training",
    "variance",
]

_MODULES = ("data", "experiments", "graphs", "models", "optim", "randommatrix", "training")
_LATER = {"page": "lambdahat.report.page", "plot": "lambdahat.report.figures"} | dict.fromkeys(
    _MODULES, ""
)


def __getattr__(name: str) -> Any:
    """What needs more than torch, numpy and scipy, or few people need, is loaded when first
    asked for.
    """
    if name not in _LATER:
        raise AttributeError(f"module 'lambdahat' has no attribute {name!r}")
    if not _LATER[name]:
        return import_module(f"lambdahat.{name}")
    return getattr(import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    """All public names, those that load later too, for completion."""
    return sorted({*globals(), *__all__})
