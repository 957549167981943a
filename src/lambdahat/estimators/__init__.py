"""Estimators: from an operator or a problem to a result with its error."""

from lambdahat.estimators._diagonal import diagonal
from lambdahat.estimators._eigenpairs import (
    basis_capacity,
    default_budget,
    eigenpairs,
    is_small,
    power_iteration,
    spectral_norm,
)
from lambdahat.estimators._landscape import Direction, landscape, random_direction, towards
from lambdahat.estimators._logdet import logdet
from lambdahat.estimators._norms import frobenius_norm
from lambdahat.estimators._rank_bound import RankBound, rank_bound
from lambdahat.estimators._sharpness import (
    Overlap,
    RelativeSharpness,
    Sharpness,
    fisher_rao_norm,
    gradient_overlap,
    relative_sharpness,
    sharpness,
)
from lambdahat.estimators._spectrum import (
    DEFAULT_DEPTH,
    lanczos_runs,
    moments,
    quadrature,
    spectrum,
    trace_function,
)
from lambdahat.estimators._trace import trace, trace_per_layer
from lambdahat.estimators._variance import (
    PerSample,
    require_own_losses,
    samples_at_once,
    spread_of,
    variance,
)

__all__ = [
    "DEFAULT_DEPTH",
    "Direction",
    "Overlap",
    "PerSample",
    "RankBound",
    "RelativeSharpness",
    "Sharpness",
    "basis_capacity",
    "default_budget",
    "diagonal",
    "eigenpairs",
    "fisher_rao_norm",
    "frobenius_norm",
    "gradient_overlap",
    "is_small",
    "lanczos_runs",
    "landscape",
    "logdet",
    "moments",
    "power_iteration",
    "quadrature",
    "random_direction",
    "rank_bound",
    "relative_sharpness",
    "require_own_losses",
    "samples_at_once",
    "sharpness",
    "spectral_norm",
    "spectrum",
    "spread_of",
    "towards",
    "trace",
    "trace_function",
    "trace_per_layer",
    "variance",
]
