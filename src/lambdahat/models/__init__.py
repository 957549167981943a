"""Networks of the field; weights come from a seed and never from the global generator."""

from lambdahat.models.convolutional import all_cnn, lenet5, vgg16
from lambdahat.models.language import gpt, lstm
from lambdahat.models.model_registry import MODELS, make_model, register_model
from lambdahat.models.perceptrons import (
    deep_linear,
    draw_weights,
    mlp,
    softmax_regression,
    xor_network,
    xord_network,
)
from lambdahat.models.residual import preresnet, resnet50, resnet101, resnext29, wide_resnet

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
    "register_model",
    "resnet50",
    "resnet101",
    "resnext29",
    "softmax_regression",
    "vgg16",
    "wide_resnet",
    "xor_network",
    "xord_network",
]
