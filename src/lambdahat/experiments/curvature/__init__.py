"""Chapters 4 and 6 of the spectral thesis: Lanczos, curvature of networks, optimisers using it."""
