"""Markov kernels for the localised tempered posterior, one file each."""

from __future__ import annotations

from typing import Any

from lambdahat.sampling.kernels.hmc import HMC, mala
from lambdahat.sampling.kernels.kernel import (
    Evaluate,
    Info,
    Kernel,
    KroneckerScale,
    Localization,
    State,
    Streams,
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
]

KERNELS: dict[str, Any] = {
    "kinetic": Kinetic,
    "sgld": SGLD,
    "rmsprop_sgld": RMSpropSGLD,
    "sghmc": SGHMC,
    "sgnht": SGNHT,
    "hmc": HMC,
    "mala": mala,
}
