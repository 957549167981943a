""" "Flatness is a false friend": sharpness beside accuracy, rank degeneracy, the deep linear toy."""
