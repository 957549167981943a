"""Networks of the field, each one small file; weights come from a seed and never from the global
generator.
"""

from lambdahat.models.all_convolutional import all_cnn
from lambdahat.models.lenet import lenet5
from lambdahat.models.perceptrons import deep_linear, mlp, softmax_regression
from lambdahat.models.preactivation import preresnet
from lambdahat.models.recurrent import lstm
from lambdahat.models.registry import MODELS, make_model
from lambdahat.models.residual import resnet50, resnet101, resnext29
from lambdahat.models.transformer import gpt
from lambdahat.models.vgg import vgg16
from lambdahat.models.wide import wide_resnet
from lambdahat.models.xor import draw_weights, xor_network, xord_network

__all__ = [
    "MODELS",
    "all_cnn",
    "deep_linear",
    "draw_weights",
    "gpt",
    "lenet5",
    "lstm",
    "make_model",
    "mlp",
    "preresnet",
    "resnet50",
    "resnet101",
    "resnext29",
    "softmax_regression",
    "vgg16",
    "wide_resnet",
    "xor_network",
    "xord_network",
]
