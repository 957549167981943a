"""Maximum entropy: moments to a smooth density, its entropy and divergences (spectral thesis,
chapters 2, 3).
"""

from lambdahat.maxent._fit import fit, fit_classical
from lambdahat.maxent.density import Density, MaxentDensity

__all__ = ["Density", "MaxentDensity", "fit", "fit_classical"]
