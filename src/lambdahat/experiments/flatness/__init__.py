""" "Flatness is a false friend": sharper and better, rank degeneracy, the deep linear toy."""
