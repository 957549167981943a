"""The loop that trains, measures while it does, and never loses a run."""

from lambdahat.training.checkpoints import Checkpoints
from lambdahat.training.curvature_trackers import (
    EdgeTracker,
    SpectrumTracker,
    TopTracker,
    TraceTracker,
)
from lambdahat.training.ensembles import Ensemble, fit_many
from lambdahat.training.folders import load_run
from lambdahat.training.lightning_callback import LightningTracker
from lambdahat.training.loop import fit
from lambdahat.training.measuring_base import Cost, SampledTracker, Tracker
from lambdahat.training.metrics import read_rows
from lambdahat.training.runs import EarlyStopping, Run
from lambdahat.training.scale_trackers import (
    EffectiveRateTracker,
    LearningCoefficientTracker,
    NormTracker,
    VarianceTracker,
)
from lambdahat.training.tracked_loops import Tracking, tracking
from lambdahat.training.trackers import TRACKERS, make_tracker, make_trackers
from lambdahat.training.transformers_callback import HuggingFaceTracker

__all__ = [
    "TRACKERS",
    "Checkpoints",
    "Cost",
    "EarlyStopping",
    "EdgeTracker",
    "EffectiveRateTracker",
    "Ensemble",
    "HuggingFaceTracker",
    "LearningCoefficientTracker",
    "LightningTracker",
    "NormTracker",
    "Run",
    "SampledTracker",
    "SpectrumTracker",
    "TopTracker",
    "TraceTracker",
    "Tracker",
    "Tracking",
    "VarianceTracker",
    "fit",
    "fit_many",
    "load_run",
    "make_tracker",
    "make_trackers",
    "read_rows",
    "tracking",
]
