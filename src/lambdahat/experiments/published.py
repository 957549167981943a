"""The experiments by name; a module is imported when its experiment is asked for."""

from __future__ import annotations

from importlib import import_module

from lambdahat._core.check import require_choice
from lambdahat.experiments.kit.experiment import Experiment

# name: module and constant
PLACES: dict[str, tuple[str, str]] = {
    "ngd-vs-sgd": ("ngd.vs_sgd", "VS_SGD"),
    "ngd-widths": ("ngd.vs_sgd", "WIDTHS"),
    "ngd-epochs": ("ngd.epochs", "EPOCHS"),
    "ngd-smoothing": ("ngd.smoothing", "SMOOTHING"),
    "ngd-switch": ("ngd.switch", "SWITCH"),
    "ngd-switch-late": ("ngd.switch", "SWITCH_LATE"),
    "ngd-overfitting": ("ngd.overfitting", "OVERFITTING"),
    "ngd-digits": ("ngd.epochs", "DIGITS"),
    "softmax-decay": ("flatness.softmax_decay", "EXPERIMENT"),
    "mlp-decay": ("flatness.mlp_decay", "EXPERIMENT"),
    "cnn-decay": ("flatness.cnn_sharpness", "CNN_DECAY"),
    "gadam-sharpness": ("flatness.cnn_sharpness", "GADAM_SHARPNESS"),
    "rank-degeneracy": ("flatness.rank_degeneracy", "EXPERIMENT"),
    "deep-linear-toy": ("flatness.deep_linear_toy", "EXPERIMENT"),
    "power-method": ("regularization.power_check", "EXPERIMENT"),
    "xor": ("regularization.rule_experiments", "XOR"),
    "xord": ("regularization.rule_experiments", "XORD"),
    "rules-mnist": ("regularization.rule_experiments", "MNIST"),
    "rules-synthetic": ("regularization.rule_experiments", "SYNTHETIC"),
    "rules-cifar10": ("regularization.rule_experiments", "CIFAR"),
    "vector-fields": ("regularization.vector_fields", "EXPERIMENT"),
    "metric-mmse": ("regularization.mmse", "EXPERIMENT"),
    "logdet-kernels": ("logdets.logdet_kernels", "EXPERIMENT"),
    "logdet-moments": ("logdets.logdet_moments", "EXPERIMENT"),
    "trace-noise": ("logdets.trace_noise", "EXPERIMENT"),
    "graph-spectra": ("graph_spectra.random_spectra", "EXPERIMENT"),
    "graph-models": ("graph_spectra.graph_models", "EXPERIMENT"),
    "graph-similarity": ("graph_spectra.likeness", "EXPERIMENT"),
    "graph-clusters": ("graph_spectra.graph_clusters", "EXPERIMENT"),
    "graph-communities": ("graph_spectra.communities", "EXPERIMENT"),
    "graph-edges": ("graph_spectra.edge_moves", "EXPERIMENT"),
    "fluctuation-spectrum": ("curvature.fluctuations", "EXPERIMENT"),
    "batch-noise": ("curvature.noise_outliers", "EXPERIMENT"),
    "batch-eigenvalues": ("minibatch.batch_eigenvalues", "EXPERIMENT"),
    "eigenvalues-through-training": ("minibatch.eigenvalues_through_training", "EXPERIMENT"),
    "stable-rates": ("minibatch.largest_rates", "EXPERIMENT"),
    "batch-norm-rates": ("minibatch.batch_norm_rates", "EXPERIMENT"),
    "damping": ("minibatch.least_damping", "EXPERIMENT"),
    "lanczos-opt": ("minibatch.lanczos_opt", "EXPERIMENT"),
    "curvature-suite": ("curvature.curvature_suite", "EXPERIMENT"),
    "lanczos-theorems": ("curvature.lanczos_theorems", "EXPERIMENT"),
    "lanczos-densities": ("curvature.lanczos_densities", "EXPERIMENT"),
    "limit-laws": ("curvature.limit_laws", "EXPERIMENT"),
    "bulk-outliers": ("curvature.bulk_outliers", "EXPERIMENT"),
    "second-order-curves": ("curvature.second_order", "EXPERIMENT"),
    "spectral-sgd": ("curvature.spectral_rates", "EXPERIMENT"),
    "direction-rates": ("curvature.direction_rates", "EXPERIMENT"),
    "linear-shrinkage": ("curvature.shrinkage_errors", "EXPERIMENT"),
    "adaptive-damping": ("curvature.adaptive_damping", "EXPERIMENT"),
    "adaptive-batch-norm": ("curvature.adaptive_batch_norm", "EXPERIMENT"),
    "gadam-image": ("averaging.gadam_image", "EXPERIMENT"),
    "gadam-imagenet": ("averaging.gadam_imagenet", "EXPERIMENT"),
    "gadam-language": ("averaging.gadam_language", "EXPERIMENT"),
    "adam-ia": ("averaging.adam_ia", "EXPERIMENT"),
    "averaging-schedules": ("averaging.averaging_schedules", "EXPERIMENT"),
    "averaging-starts": ("averaging.averaging_starts", "EXPERIMENT"),
    "averaging-dimension": ("averaging.averaging_dimension", "EXPERIMENT"),
    "averaging-ensembles": ("averaging.averaging_ensembles", "EXPERIMENT"),
    "noisy-averages": ("averaging.noisy_averages", "EXPERIMENT"),
}
# those at cpu scale alone; the others are marked to be run at ``paper`` scale too, on a GPU or in
# hours on a CPU, and docs/reproductions.md names those still to run
CPU_SCALE = (
    "ngd-digits",
    "rules-cifar10",
    "graph-clusters",
    "lanczos-opt",
    "lanczos-densities",
    "direction-rates",
)
PAPER_SCALE = frozenset(PLACES) - {*CPU_SCALE}


def find(name: str) -> Experiment:
    """The experiment with this name."""
    module, constant = PLACES[
        require_choice(name, "experiment", PLACES, "`lambdahat reproduce --list` lists them")
    ]
    experiment: Experiment = getattr(import_module(f"lambdahat.experiments.{module}"), constant)
    return experiment


def every() -> list[Experiment]:
    """All experiments, paper by paper."""
    return [find(name) for name in PLACES]
