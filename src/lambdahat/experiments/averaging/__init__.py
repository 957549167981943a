"""Chapter 7 of the spectral thesis: averages of iterates, Gadam and GadamX."""
