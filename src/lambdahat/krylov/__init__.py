"""Krylov methods on symmetric operators: Lanczos, its thick restart, power iteration, conjugate
gradients.
"""

from lambdahat.krylov.conjugate import Inverse, Solution, conjugate_gradients, inverse
from lambdahat.krylov.lanczos import (
    BREAKDOWN,
    Basis,
    Krylov,
    Lanczos,
    basis_bytes,
    chosen_place,
    dot,
    lanczos,
    random_vector,
    require_finite,
    require_symmetric,
    working_dtype,
)
from lambdahat.krylov.restart import (
    ROUNDING,
    RitzPairs,
    Wanted,
    missing,
    simultaneous_power_iteration,
    thick_restart_lanczos,
    value_errors,
)

__all__ = [
    "BREAKDOWN",
    "ROUNDING",
    "Basis",
    "Inverse",
    "Krylov",
    "Lanczos",
    "RitzPairs",
    "Solution",
    "Wanted",
    "basis_bytes",
    "chosen_place",
    "conjugate_gradients",
    "dot",
    "inverse",
    "lanczos",
    "missing",
    "random_vector",
    "require_finite",
    "require_symmetric",
    "simultaneous_power_iteration",
    "thick_restart_lanczos",
    "value_errors",
    "working_dtype",
]
