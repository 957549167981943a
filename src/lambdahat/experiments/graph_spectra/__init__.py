"""Chapter 3 of the spectral thesis: entropic graph spectra, likeness of graphs, numbers of
clusters.
"""
