"""Singular learning theory: the learning coefficient and all that is read off the same chains."""

from __future__ import annotations

from lambdahat.singular import exact
from lambdahat.singular.coefficient import llc
from lambdahat.singular.criteria import BayesCriteria, bayes_criteria
from lambdahat.singular.curves import CoefficientCurve, Trajectory, llc_along, llc_curve
from lambdahat.singular.dimensions import (
    EffectiveDimensions,
    effective_dimension,
    effective_dimensions,
)
from lambdahat.singular.evidence import LaplaceEvidence, bic, laplace_evidence
from lambdahat.singular.free_energies import FreeEnergy, free_energy
from lambdahat.singular.restricted import sample_losses
from lambdahat.singular.reweighting import Reweighting, reweighted
from lambdahat.singular.sweeps import Sweep, sweep
from lambdahat.singular.temperatures import (
    TemperatureRegression,
    local_free_energy,
    temperature_regression,
    wbic,
)
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
