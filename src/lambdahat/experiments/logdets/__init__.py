"""Chapter 2 of the spectral thesis: log-determinants by maximum entropy."""
