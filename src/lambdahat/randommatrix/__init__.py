"""How mini-batching changes the Hessian spectrum, and the rates and damping that follow."""

from __future__ import annotations

from lambdahat.randommatrix.advice import Advice, advise
from lambdahat.randommatrix.advice_rules import Recommendation
from lambdahat.randommatrix.batch_curvature import (
    BatchEigenvalues,
    DirectionalVariance,
    batch_eigenpairs,
    directional_variance,
)
from lambdahat.randommatrix.bulk import BulkFit, fit_bulk
from lambdahat.randommatrix.free_sums import (
    FreeSum,
    Outlier,
    TracyWidom,
    edge_fluctuation,
    free_sum,
)
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
from lambdahat.randommatrix.predictions import (
    BatchComparison,
    BatchPrediction,
    PredictedOutlier,
    predict,
)
from lambdahat.randommatrix.rate_limits import stability_limit
from lambdahat.randommatrix.spikes import (
    Additive,
    LinearShrinkage,
    Multiplicative,
    Shrinkage,
    SpikedModel,
    damping_as_shrinkage,
    effective_batch,
    linear_shrinkage,
    noise_scale,
    shrinkage_as_damping,
)
from lambdahat.randommatrix.stable_rates import (
    RateRatio,
    StableRate,
    largest_stable_rate,
    rate_ratio,
)

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
