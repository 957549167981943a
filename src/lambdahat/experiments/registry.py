"""The experiments by name; a module is imported when its experiment is asked for."""

from __future__ import annotations

from importlib import import_module

from lambdahat._check import require_choice
from lambdahat.experiments.experiment import Experiment

# name: module and constant
PLACES: dict[str, tuple[str, str]] = {
    "ngd-vs-sgd": ("ngd.vs_sgd", "EXPERIMENT"),
    "ngd-widths": ("ngd.widths", "EXPERIMENT"),
    "ngd-epochs": ("ngd.epochs", "EXPERIMENT"),
    "ngd-smoothing": ("ngd.smoothing", "EXPERIMENT"),
    "ngd-switch": ("ngd.switch", "EXPERIMENT"),
    "ngd-overfitting": ("ngd.overfitting", "EXPERIMENT"),
    "ngd-digits": ("ngd.digits", "EXPERIMENT"),
    "softmax-decay": ("flatness.softmax_decay", "EXPERIMENT"),
    "mlp-decay": ("flatness.mlp_decay", "EXPERIMENT"),
    "cnn-decay": ("flatness.cnn_decay", "EXPERIMENT"),
    "gadam-sharpness": ("flatness.gadam_sharpness", "EXPERIMENT"),
    "rank-degeneracy": ("flatness.rank_degeneracy", "EXPERIMENT"),
    "deep-linear-toy": ("flatness.deep_linear_toy", "EXPERIMENT"),
    "power-method": ("regularization.power_check", "EXPERIMENT"),
    "xor": ("regularization.xor_rules", "XOR"),
    "xord": ("regularization.xor_rules", "XORD"),
    "rules-mnist": ("regularization.data_rules", "MNIST"),
    "rules-synthetic": ("regularization.data_rules", "SYNTHETIC"),
    "rules-cifar10": ("regularization.data_rules", "CIFAR"),
    "vector-fields": ("regularization.vector_fields", "EXPERIMENT"),
    "batch-eigenvalues": ("minibatch.eigen_experiment", "EXPERIMENT"),
    "stable-rates": ("minibatch.rate_experiment", "EXPERIMENT"),
    "damping": ("minibatch.damping_experiment", "EXPERIMENT"),
    "lanczos-opt": ("minibatch.lanczos_experiment", "EXPERIMENT"),
}


def find(name: str) -> Experiment:
    """The experiment of a name."""
    module, constant = PLACES[require_choice(name, "experiment", PLACES)]
    found: Experiment = getattr(import_module(f"lambdahat.experiments.{module}"), constant)
    return found


def every() -> list[Experiment]:
    """All experiments, paper by paper."""
    return [find(name) for name in PLACES]
