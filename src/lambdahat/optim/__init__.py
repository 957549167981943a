"""Optimisers as drop-ins for ``torch.optim``, with averaging, schedules and regularizers."""

from lambdahat.optim import schedules
from lambdahat.optim.adaptive import Gadam, GadamAuto, GadamX, Padam, PadamW
from lambdahat.optim.averaging import (
    ASGD,
    SWA,
    Averaged,
    IterateAverage,
    Lookahead,
    refresh_batch_norm,
)
from lambdahat.optim.exact_ngd import ExactNGD
from lambdahat.optim.kfac import KFAC
from lambdahat.optim.lanczos_newton import LanczosNewton
from lambdahat.optim.ngd import NGD
from lambdahat.optim.regularizers import (
    L1,
    L2,
    BatchProduct,
    Metric,
    SelectiveL2,
    StoppedL2,
    StoppedThenSelectiveL2,
    batch_product,
    layers_of,
)
from lambdahat.optim.schedules import make_schedule
from lambdahat.optim.spectral_sgd import SpectralSGD
from lambdahat.problem.network import true_second_derivatives

__all__ = [
    "ASGD",
    "KFAC",
    "L1",
    "L2",
    "NGD",
    "SWA",
    "Averaged",
    "BatchProduct",
    "ExactNGD",
    "Gadam",
    "GadamAuto",
    "GadamX",
    "IterateAverage",
    "LanczosNewton",
    "Lookahead",
    "Metric",
    "Padam",
    "PadamW",
    "SelectiveL2",
    "SpectralSGD",
    "StoppedL2",
    "StoppedThenSelectiveL2",
    "batch_product",
    "layers_of",
    "make_schedule",
    "refresh_batch_norm",
    "schedules",
    "true_second_derivatives",
]
