"""lambdahat: the geometry of a neural network's loss, with error bars.

λ is two things here: an eigenvalue of the curvature, and the learning coefficient of a singular
model.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lambdahat import (
        data,
        experiments,
        graphs,
        maxent,
        models,
        optim,
        randommatrix,
        sampling,
        singular,
        training,
    )
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
    from lambdahat.report.figures import plot
    from lambdahat.report.page import page
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

# where each public name lives: it is imported when first asked for, so that `import lambdahat` and
# `lambdahat --help` do not wait for torch
_HOMES = {
    "_core.progress": "progress",
    "_measure": "compare measure",
    "estimators": (
        "Overlap RankBound RelativeSharpness Sharpness diagonal eigenpairs fisher_rao_norm "
        "frobenius_norm gradient_overlap landscape logdet moments power_iteration "
        "random_direction rank_bound relative_sharpness sharpness spectral_norm spectrum "
        "towards trace trace_function trace_per_layer variance"
    ),
    "krylov": "inverse",
    "operators.base": "LinearOperator",
    "operators.curvature": "fisher ggn gradient_covariance hessian",
    "operators.kernel_matrix": "kernel_matrix",
    "operators.kronecker": "KFAC ekfac kfac",
    "operators.matrix": "identity operator",
    "problem": "Problem",
    "report.figures": "plot",
    "report.page": "page",
    "results": (
        "Chains Density Eigenpairs Estimate Landscape LearningCoefficient Moments Result "
        "Spectrum Status Variance"
    ),
    "results.measurement": "Comparison Measurement",
    "sampling": "sample",
    "singular": "llc",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage collection meanwhile.

    What an import makes stays, but it is so much that Python would go through all objects of torch,
    which takes as long as our own imports.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def __getattr__(name: str) -> Any:
    """A public name from its module, or a package of the library."""
    try:
        with _uncollected():
            value = (
                getattr(import_module(f"lambdahat.{_HOME_OF[name]}"), name)
                if name in _HOME_OF
                else import_module(f"lambdahat.{name}")
            )
    except ModuleNotFoundError as error:
        if error.name != f"lambdahat.{name}":
            raise
        text = f"module 'lambdahat' has no attribute {name!r}"
        # with both, Python suggests the public name that is spelt most like it
        raise AttributeError(text, name=name, obj=import_module("lambdahat")) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """All public names, those that are not loaded yet too, for completion."""
    own = (name for name in globals() if name.startswith("__"))
    return sorted({*own, *__all__})


# Where torch is loaded, the modules behind every measurement, a tenth of torch itself, are part of
# the import, and not of whichever call comes first. They stay out of a process that wants no more
# than a name, such as a command line that shows its help.
if "torch" in sys.modules:
    with _uncollected():
        import_module("lambdahat.estimators")
