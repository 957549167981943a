"""Maximum entropy: moments to a smooth density, its entropy and divergences (spectral thesis,
chapters 2, 3).
"""

from lambdahat.maxent.classical import fit_classical
from lambdahat.maxent.densities import Density, MaxentDensity
from lambdahat.maxent.fitting import fit

__all__ = ["Density", "MaxentDensity", "fit", "fit_classical"]
