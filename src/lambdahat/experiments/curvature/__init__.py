"""Spectral thesis, chapters 4 and 6: what Lanczos sees, curvature of trained networks,
optimisers that use it.
"""
