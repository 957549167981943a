"""Maximum entropy: moments to a smooth density, its entropy and divergences (spectral thesis,
chapters 2, 3).
"""

from lambdahat.maxent.density import Density, MaxentDensity
from lambdahat.maxent.maxent_fit import fit, fit_classical

__all__ = ["Density", "MaxentDensity", "fit", "fit_classical"]
