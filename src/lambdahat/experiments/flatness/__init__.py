"""The flatness paper: sharpness beside accuracy, rank degeneracy, the deep linear toy."""
