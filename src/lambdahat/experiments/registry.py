"""The experiments by name; a module is imported when its experiment is asked for."""

from __future__ import annotations

from importlib import import_module

from lambdahat._check import require_choice
from lambdahat.experiments.experiment import Experiment

# name: module and constant
PLACES: dict[str, tuple[str, str]] = {
    "softmax-decay": ("softmax_decay", "EXPERIMENT"),
}


def find(name: str) -> Experiment:
    """The experiment of a name."""
    module, constant = PLACES[require_choice(name, "experiment", PLACES)]
    found: Experiment = getattr(import_module(f"lambdahat.experiments.{module}"), constant)
    return found


def every() -> list[Experiment]:
    """All experiments, paper by paper."""
    return [find(name) for name in PLACES]
