"""lambdahat: the geometry of a neural network's loss, with error bars.

λ is two things here: an eigenvalue of the curvature, and the learning coefficient of a singular
model.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lambdahat import maxent, sampling, singular
from lambdahat._progress import progress
from lambdahat.estimators.degeneracy import RankBound, rank_bound
from lambdahat.estimators.determinants import logdet
from lambdahat.estimators.diagonals import diagonal
from lambdahat.estimators.eigen import eigenpairs, power_iteration, spectral_norm
from lambdahat.estimators.flatness import (
    Overlap,
    RelativeSharpness,
    Sharpness,
    fisher_rao_norm,
    gradient_overlap,
    relative_sharpness,
    sharpness,
)
from lambdahat.estimators.landscapes import landscape, random_direction, towards
from lambdahat.estimators.norms import frobenius_norm
from lambdahat.estimators.spectra import moments, spectrum, trace_function
from lambdahat.estimators.traces import trace, trace_per_layer
from lambdahat.estimators.variances import variance
from lambdahat.krylov import inverse
from lambdahat.measurements import Measurement
from lambdahat.measuring import measure
from lambdahat.operators.base import LinearOperator
from lambdahat.operators.curvature import fisher, ggn, gradient_covariance, hessian
from lambdahat.operators.kernels import kernel_matrix
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
