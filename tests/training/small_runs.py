"""Small training runs on the bundled digits that the tests of the loop share."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lambdahat import optim
from lambdahat.data import digits_split
from lambdahat.problem import Problem
from lambdahat.training import Run, fit

TRAIN, TEST = digits_split(seed=0)
TRAIN = TRAIN[0][:300], TRAIN[1][:300]
TEST = TEST[0][:100], TEST[1][:100]


def network(seed: int = 0, width: int = 16) -> nn.Sequential:
    """A perceptron with batch norm and dropout, so that both statistics and random draws must
    survive.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(64, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(width, 10),
        )


def plain(seed: int = 0) -> nn.Sequential:
    """A perceptron without either."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


class Setup:
    """One way to train: a fresh model, its problem, optimiser and everything else, made anew for
    each call.
    """

    def __init__(self, kind: str = "sgd", model: nn.Module | None = None) -> None:
        # the exact method takes all eigenvectors of a matrix of the size of the model
        width = 4 if kind == "exact" else 16
        self.model = network(width=width) if model is None else model
        self.problem = Problem(self.model, "cross_entropy", TRAIN)
        self.optimizer, self.options = KINDS[kind](self.model)

    def fit(self, epochs: int = 3, folder: Path | None = None, **options: Any) -> Run:
        settings = {"batch_size": 64, "validation": TEST, "seed": 3, **self.options, **options}
        return fit(self.problem, self.optimizer, epochs, folder=folder, **settings)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


def _sgd(model: nn.Module) -> tuple[Any, dict[str, Any]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return optimizer, {"schedule": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)}


def _adam(model: nn.Module) -> tuple[Any, dict[str, Any]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=40)
    return optimizer, {
        "schedule": schedule,
        "schedule_unit": "step",
        "precision": "bfloat16",
        "accumulate": 2,
        "batch_size": 32,
        "clip": 1.0,
    }


def _scaled(model: nn.Module) -> tuple[Any, dict[str, Any]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2])
    return optimizer, {"precision": "float16", "schedule": schedule}


def _gadam(model: nn.Module) -> tuple[Any, dict[str, Any]]:
    return optim.Lookahead(optim.Gadam(model.parameters(), lr=0.01, average_start=4), k=3), {}


def _averaged(model: nn.Module) -> tuple[Any, dict[str, Any]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    return optimizer, {
        "averaging": optim.IterateAverage(model, "ema", unit="step", decay=0.9),
        "schedule": schedule,
    }


def _ngd(model: nn.Module) -> tuple[Any, dict[str, Any]]:
    return optim.NGD(model.parameters(), lr=0.1, alpha=0.5, momentum=0.9), {}


def _kfac(model: nn.Module) -> tuple[Any, dict[str, Any]]:
    return optim.KFAC(model, lr=0.05, factor_every=2, inverse_every=4, momentum=0.9), {}


def _sampled_kfac(model: nn.Module) -> tuple[Any, dict[str, Any]]:
    return optim.KFAC(model, lr=0.05, fisher="monte_carlo", factor_every=3), {}


def _exact(model: nn.Module) -> tuple[Any, dict[str, Any]]:
    return optim.ExactNGD(model.parameters(), lr=0.1, alpha=10.0, every=3), {
        "curvature_samples": 30
    }


def _newton(model: nn.Module) -> tuple[Any, dict[str, Any]]:
    rules = [optim.Metric(0.01), optim.L2(0.01, decoupled=True)]
    return optim.LanczosNewton(model.parameters(), lr=0.1, damping=1.0, pairs=5, every=3), {
        "regularizers": rules
    }


def _spectral(model: nn.Module) -> tuple[Any, dict[str, Any]]:
    return optim.SpectralSGD(model.parameters(), every=4, depth=5), {"curvature_samples": 50}


KINDS = {
    "ngd": _ngd,
    "kfac": _kfac,
    "sampled kfac": _sampled_kfac,
    "exact": _exact,
    "newton": _newton,
    "spectral": _spectral,
    "sgd": _sgd,
    "adam": _adam,
    "scaled": _scaled,
    "gadam": _gadam,
    "averaged": _averaged,
}


class StepCount:
    """A tracker with a state: it counts its calls and looks at a random number, which must not
    disturb the run.
    """

    def __init__(self, every: int = 2, unit: str = "step") -> None:
        self.name, self.every, self.unit, self.calls = f"count_{unit}", every, unit, 0

    def measure(self, problem: Problem, optimizer: Any, epoch: int, step: int) -> dict[str, float]:
        self.calls += 1
        torch.rand(3)
        return {
            self.name: float(self.calls),
            f"{self.name}_loss": problem.loss(),
            f"{self.name}_nan": math.nan,
        }

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


def timeless(rows: Any) -> list[dict[str, Any]]:
    """Rows without what depends on the clock, NaN as text so that rows compare."""
    return [
        {
            key: "nan" if value != value else value
            for key, value in row.items()
            if not key.endswith("seconds")
        }
        for row in rows
    ]


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Bit for bit, NaN and signed zeros too."""
    return list(first) == list(second) and all(
        first[name]
        .contiguous()
        .view(-1)
        .view(torch.uint8)
        .equal(second[name].contiguous().view(-1).view(torch.uint8))
        for name in first
    )
