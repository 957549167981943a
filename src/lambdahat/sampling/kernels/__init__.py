"""Markov kernels for the localised tempered posterior, one file each.

To add one, write a file with a class that is decorated by ``@register("name")`` and import it here:
``llc`` then takes its name, and the contract tests judge it.
"""

from __future__ import annotations

from lambdahat.sampling.kernels.hmc import HMC, mala
from lambdahat.sampling.kernels.kernel import (
    KERNELS,
    Evaluate,
    Info,
    Kernel,
    KroneckerScale,
    Localization,
    State,
    Streams,
    register,
)
from lambdahat.sampling.kernels.kinetic import Kinetic
from lambdahat.sampling.kernels.rmsprop_sgld import RMSpropSGLD
from lambdahat.sampling.kernels.sghmc import SGHMC
from lambdahat.sampling.kernels.sgld import SGLD
from lambdahat.sampling.kernels.sgnht import SGNHT

__all__ = [
    "HMC",
    "KERNELS",
    "SGHMC",
    "SGLD",
    "SGNHT",
    "Evaluate",
    "Info",
    "Kernel",
    "Kinetic",
    "KroneckerScale",
    "Localization",
    "RMSpropSGLD",
    "State",
    "Streams",
    "mala",
    "register",
]
