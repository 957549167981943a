"""The loop that trains, measures while it does, and never loses a run."""

from lambdahat.training._loop import fit
from lambdahat.training.callbacks import HuggingFaceTracker, LightningTracker, Tracking, tracking
from lambdahat.training.checkpoints import Checkpoints, load_run
from lambdahat.training.curvature_trackers import (
    EdgeTracker,
    SpectrumTracker,
    TopTracker,
    TraceTracker,
)
from lambdahat.training.ensembles import Ensemble, fit_many
from lambdahat.training.history import EarlyStopping, Run, read_rows
from lambdahat.training.loggers import (
    LOGGERS,
    CSVLogger,
    Logger,
    MLflowLogger,
    TensorBoardLogger,
    WandBLogger,
)
from lambdahat.training.scale_trackers import (
    EffectiveRateTracker,
    LearningCoefficientTracker,
    NormTracker,
    VarianceTracker,
)
from lambdahat.training.trackers import (
    TRACKERS,
    Cost,
    SampledTracker,
    Tracker,
    make_tracker,
    make_trackers,
)

__all__ = [
    "LOGGERS",
    "TRACKERS",
    "CSVLogger",
    "Checkpoints",
    "Cost",
    "EarlyStopping",
    "EdgeTracker",
    "EffectiveRateTracker",
    "Ensemble",
    "HuggingFaceTracker",
    "LearningCoefficientTracker",
    "LightningTracker",
    "Logger",
    "MLflowLogger",
    "NormTracker",
    "Run",
    "SampledTracker",
    "SpectrumTracker",
    "TensorBoardLogger",
    "TopTracker",
    "TraceTracker",
    "Tracker",
    "Tracking",
    "VarianceTracker",
    "WandBLogger",
    "fit",
    "fit_many",
    "load_run",
    "make_tracker",
    "make_trackers",
    "read_rows",
    "tracking",
]
