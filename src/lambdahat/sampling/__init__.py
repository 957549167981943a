"""Sampling the localised tempered posterior exp(−nβ·L(w) − ½Σγ_i(w_i − w*_i)²): kernels, chains,
diagnostics.
"""

from __future__ import annotations

from lambdahat.sampling.hamiltonian import HMC, mala
from lambdahat.sampling.kernels import SGHMC, SGLD, SGNHT, Info, Kernel, Kinetic, RMSpropSGLD, State
from lambdahat.sampling.running import sample
from lambdahat.sampling.streams import Streams

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
