"""Mini-batch curvature, learning rates and damping: chapters 5 and 6 of the spectral thesis."""
