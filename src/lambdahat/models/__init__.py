"""Networks of the field, each one small file; weights come from a seed and never from the global generator."""

from lambdahat.models.lenet import lenet5
from lambdahat.models.perceptrons import mlp

__all__ = ["lenet5", "mlp"]
