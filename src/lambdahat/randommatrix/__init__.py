"""What a mini-batch does to curvature, and the learning rates, momenta and damping that follow."""

from __future__ import annotations

from lambdahat.randommatrix.advice import Advice, advise
from lambdahat.randommatrix.advice_rules import Recommendation
from lambdahat.randommatrix.batch_curvature import BatchEigenvalues, batch_eigenpairs
from lambdahat.randommatrix.bulk import BulkFit, fit_bulk
from lambdahat.randommatrix.comparison import BatchComparison
from lambdahat.randommatrix.directions import DirectionalVariance, directional_variance
from lambdahat.randommatrix.free_convolution import FreeSum, Outlier, free_sum
from lambdahat.randommatrix.lanczos_bounds import (
    convergence_terms,
    excludes_top_pairs,
    lanczos_bound,
    power_bound,
)
from lambdahat.randommatrix.laws import Law, MarchenkoPastur, Semicircle
from lambdahat.randommatrix.noise_levels import BatchLevels, BatchView, NoiseLevels
from lambdahat.randommatrix.noisy_quadratic import (
    IterateLaw,
    NoisyQuadratic,
    Trajectories,
    average_loss_bound,
    crossing_steps,
    final_loss_bound,
    matching_rate,
)
from lambdahat.randommatrix.predictions import BatchPrediction, PredictedOutlier, predict
from lambdahat.randommatrix.rate_limits import stability_limit
from lambdahat.randommatrix.rate_ratios import RateRatio, rate_ratio
from lambdahat.randommatrix.shrinkage import (
    LinearShrinkage,
    Shrinkage,
    damping_as_shrinkage,
    linear_shrinkage,
    shrinkage_as_damping,
)
from lambdahat.randommatrix.spikes import (
    Additive,
    Multiplicative,
    SpikedModel,
    effective_batch,
    noise_scale,
)
from lambdahat.randommatrix.stable_rates import StableRate, largest_stable_rate
from lambdahat.randommatrix.tracy_widom import TracyWidom, edge_fluctuation

__all__ = [
    "Additive",
    "Advice",
    "BatchComparison",
    "BatchEigenvalues",
    "BatchLevels",
    "BatchPrediction",
    "BatchView",
    "BulkFit",
    "DirectionalVariance",
    "FreeSum",
    "IterateLaw",
    "Law",
    "LinearShrinkage",
    "MarchenkoPastur",
    "Multiplicative",
    "NoiseLevels",
    "NoisyQuadratic",
    "Outlier",
    "PredictedOutlier",
    "RateRatio",
    "Recommendation",
    "Semicircle",
    "Shrinkage",
    "SpikedModel",
    "StableRate",
    "TracyWidom",
    "Trajectories",
    "advise",
    "average_loss_bound",
    "batch_eigenpairs",
    "convergence_terms",
    "crossing_steps",
    "damping_as_shrinkage",
    "directional_variance",
    "edge_fluctuation",
    "effective_batch",
    "excludes_top_pairs",
    "final_loss_bound",
    "fit_bulk",
    "free_sum",
    "lanczos_bound",
    "largest_stable_rate",
    "linear_shrinkage",
    "matching_rate",
    "noise_scale",
    "power_bound",
    "predict",
    "rate_ratio",
    "shrinkage_as_damping",
    "stability_limit",
]
