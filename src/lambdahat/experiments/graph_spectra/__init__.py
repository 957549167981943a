"""Chapter 3 of the spectral thesis: entropic graph spectra, similarity, numbers of clusters."""
