"""Sampling the localised tempered posterior exp(−nβ·L(w) − ½Σγ_i(w_i − w*_i)²): kernels, chains,
diagnostics.
"""

from __future__ import annotations

from lambdahat.sampling._sample import sample
from lambdahat.sampling.kernels import (
    HMC,
    SGHMC,
    SGLD,
    SGNHT,
    Info,
    Kernel,
    Kinetic,
    RMSpropSGLD,
    State,
    Streams,
    mala,
)

sgld, rmsprop_sgld, sghmc, sgnht, hmc, kinetic = SGLD, RMSpropSGLD, SGHMC, SGNHT, HMC, Kinetic

__all__ = [
    "Info",
    "Kernel",
    "State",
    "Streams",
    "hmc",
    "kinetic",
    "mala",
    "rmsprop_sgld",
    "sample",
    "sghmc",
    "sgld",
    "sgnht",
]
