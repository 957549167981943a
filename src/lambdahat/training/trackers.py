"""The trackers by name, as ``--track llc,trace`` asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

from lambdahat._core.check import require, require_choice
from lambdahat.training.curvature_trackers import (
    EdgeTracker,
    SpectrumTracker,
    TopTracker,
    TraceTracker,
)
from lambdahat.training.measuring_base import SAMPLES, SampledTracker
from lambdahat.training.scale_trackers import (
    EffectiveRateTracker,
    LearningCoefficientTracker,
    NormTracker,
    VarianceTracker,
)

TRACKERS: dict[str, type[SampledTracker]] = {
    "trace": TraceTracker,
    "spectrum": SpectrumTracker,
    "degeneracy": SpectrumTracker,
    "top": TopTracker,
    "overlap": TopTracker,
    "drift": TopTracker,
    "edge": EdgeTracker,
    "llc": LearningCoefficientTracker,
    "wbic": LearningCoefficientTracker,
    "variance": VarianceTracker,
    "norms": NormTracker,
    "effective_rate": EffectiveRateTracker,
}


def make_tracker(
    name: str,
    every: int = 1,
    unit: str = "epoch",
    samples: int | None = SAMPLES,
    seed: int = 0,
    **settings: Any,
) -> SampledTracker:
    """The tracker of a quantity: one measurement every ``every`` epochs or steps, on ``samples``
    samples.

    What comes of the same computation has one tracker: "degeneracy" is a column of "spectrum",
    "overlap" and "drift" are columns of "top", and "wbic" is one of "llc". ``settings`` are those
    of the tracker, such as ``k=10`` for "top", and ``keep=True`` for all.

    >>> make_tracker("edge", every=10, unit="step")
    EdgeTracker(every=10, unit='step', samples=1000, seed=0)
    """
    kind = TRACKERS[require_choice(name, "name", TRACKERS)]
    own = _settings_of(kind)
    strange = ", ".join(sorted(set(settings) - set(own)))
    require(
        not strange,
        "settings",
        f"be those of {kind.__name__}: {', '.join(own)}",
        strange,
        error=TypeError,
    )
    return kind(every=every, unit=unit, samples=samples, seed=seed, **settings)


def make_trackers(names: str | Sequence[str], **common: Any) -> list[SampledTracker]:
    """One tracker for each computation that the names ask for: a list, or a text such as
    "llc,trace".

    >>> [tracker.name for tracker in make_trackers("trace, llc, wbic")]
    ['trace', 'llc']
    """
    parts = [part.strip() for part in names.split(",")] if isinstance(names, str) else list(names)
    require(
        bool(parts),
        "names",
        "name at least one tracker",
        "none",
        f"choose from {', '.join(TRACKERS)}",
    )
    found: dict[str, SampledTracker] = {}
    for part in parts:
        tracker = make_tracker(part, **common)
        found.setdefault(tracker.name, tracker)
    return list(found.values())


def _settings_of(kind: type[SampledTracker]) -> tuple[str, ...]:
    """What a tracker can be told beside when and on what to measure: the named arguments of it
    and its bases.
    """
    found: dict[str, None] = {}
    for each in kind.__mro__:
        if issubclass(each, SampledTracker) and "__init__" in vars(each):
            found |= dict.fromkeys(signature(each.__init__).parameters)
    return tuple(
        name for name in found if name not in ("self", "common", "every", "unit", "samples", "seed")
    )
