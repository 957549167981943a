"""The documents whose experiments are here, each by its whole title: experiments of one document
share the constant.
"""

NGD = "NGD converges to less degenerate solutions than SGD"
FLATNESS = "Flatness is a false friend"
REGULARIZATION = "Generalizing Regularization of Neural Networks to Correlated Parameter Spaces"
SPECTRAL = "Spectral Machine Learning"
