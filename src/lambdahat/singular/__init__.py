"""Singular learning theory: the learning coefficient and all that is read off the same chains."""

from __future__ import annotations

from lambdahat.singular import exact
from lambdahat.singular._llc import llc
from lambdahat.singular.bayes import (
    BayesCriteria,
    FreeEnergy,
    TemperatureRegression,
    bayes_criteria,
    free_energy,
    local_free_energy,
    temperature_regression,
    wbic,
)
from lambdahat.singular.curves import (
    CoefficientCurve,
    Sweep,
    Trajectory,
    llc_along,
    llc_curve,
    sweep,
)
from lambdahat.singular.evidence import (
    EffectiveDimensions,
    LaplaceEvidence,
    bic,
    effective_dimension,
    effective_dimensions,
    laplace_evidence,
)
from lambdahat.singular.observables import Reweighting, reweighted, sample_losses
from lambdahat.singular.verification import Verification, verify
from lambdahat.singular.volumes import VolumeScaling, volume_scaling

__all__ = [
    "BayesCriteria",
    "CoefficientCurve",
    "EffectiveDimensions",
    "FreeEnergy",
    "LaplaceEvidence",
    "Reweighting",
    "Sweep",
    "TemperatureRegression",
    "Trajectory",
    "Verification",
    "VolumeScaling",
    "bayes_criteria",
    "bic",
    "effective_dimension",
    "effective_dimensions",
    "exact",
    "free_energy",
    "laplace_evidence",
    "llc",
    "llc_along",
    "llc_curve",
    "local_free_energy",
    "reweighted",
    "sample_losses",
    "sweep",
    "temperature_regression",
    "verify",
    "volume_scaling",
    "wbic",
]
