"""Figures of what trackers measured along a run: a panel for every computation, with its 95 % intervals."""

from __future__ import annotations

import math
import re
import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np

from lambdahat.report.style import AMBER, BLUE, GREEN, GREY, PURPLE, SKY, VERMILION
from lambdahat.training.measuring_base import is_failure
from lambdahat.training.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = (BLUE, VERMILION, GREEN, AMBER, PURPLE, SKY)
ASIDE = ("_stderr", "_cost", "_seconds", "_status", "_nbeta", "_localization")
WIDE = 20.0  # values that vary by more than this factor are shown by their logarithms
PANELS = {
    "learning rate × sharpness": r"edge(_threshold)?",
    "largest eigenvalues": r"top_\d+",
    "span of the largest eigenvalues": r"top_(overlap|drift)",
    "ends of the spectrum": r"spectrum_(largest|smallest)",
    "share of eigenvalues": r"spectrum_(degeneracy|negative)",
    "trace": r"(spectrum_)?trace",
    "learning coefficient λ̂": r"llc",
    "WBIC": r"wbic",
    "variance of an element": r"variance_\w+",
    "norms": r"norms_\w+",
    "effective learning rate α/‖w‖²": r"effective_rate",
}


def tracked_panels(run: Run, aside: set[str]) -> dict[str, list[str]]:
    """The columns of each panel by its label, those of no known tracker apart; columns in ``aside`` are left out."""
    names = dict.fromkeys(key for row in run.history for key in row if key not in aside and not key.endswith(ASIDE))
    panels: dict[str, list[str]] = {}
    for name in names:
        if any(_finite(row.get(name)) for row in run.history):
            label = next((label for label, form in PANELS.items() if re.fullmatch(form, name)), name)
            panels.setdefault(label + _at_gamma(run, name), []).append(name)
    return panels


def failed_trackers(run: Run, aside: set[str]) -> dict[str, str]:
    """Why trackers measured nothing at some time, by the label of their panel, whether or not it has other points."""
    found: dict[str, str] = {}
    names = dict.fromkeys(key for row in run.history for key in row)
    for name in (key.removesuffix("_status") for key in names if key.endswith("_status")):
        statuses = [row[f"{name}_status"] for row in run.history if f"{name}_status" in row]
        faults = [status for status in statuses if is_failure(status)]
        if faults:
            own = [key for key in names if (key == name or key.startswith(f"{name}_")) and key not in aside]
            columns = [key for key in own if not key.endswith(ASIDE)]
            label = next((label for key in columns or [name] for label, form in PANELS.items()
                          if re.fullmatch(form, key)), name)  # fmt: skip
            count = "not measured" if len(faults) == len(statuses) else f"{len(faults)} of {len(statuses)} not measured"
            found[label + _at_gamma(run, name)] = f"{count}: {faults[-1]}"
    return found


def draw_failure(run: Run, axes: Axes, label: str, reason: str) -> None:
    """A panel that says why it is empty."""
    axes.text(0.5, 0.5, "\n".join(textwrap.wrap(reason, 40)), ha="center", va="center", fontsize="small",
              color=VERMILION, transform=axes.transAxes)  # fmt: skip
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_xlabel(run.about.get("progress", "epoch"))
    axes.set_ylabel(label)


def _at_gamma(run: Run, name: str) -> str:
    """At which localization a quantity was measured, for the label of its panel; often nothing."""
    found = [row.get(f"{name}_localization") for row in run.history]
    known = sorted({float(gamma) for gamma in found if gamma is not None and _finite(gamma)})
    if not known:
        return ""
    span = f"= {known[0]:.3g}" if len(known) == 1 else f"from {known[0]:.3g} to {known[-1]:.3g}"
    return f", γ {span}"


def draw_tracked(run: Run, axes: Axes, label: str, columns: list[str], fault: str = "") -> None:
    """Tracked quantities that share an axis; a threshold is a dashed line; a ``fault`` stands above."""
    seen = []
    for name, colour in zip(columns, _colours(columns), strict=True):
        rows = [row for row in run.history if _finite(row.get(name))]
        progress, values = (np.array([row[key] for row in rows], float) for key in ("progress", name))
        errors = np.array([row.get(f"{name}_stderr", math.nan) for row in rows], float)
        half = 1.96 * np.where(np.isfinite(errors), errors, 0.0)
        if name.endswith("_threshold"):
            axes.plot(progress, values, color=GREY, linestyle="--", linewidth=0.9, label="threshold")
        else:
            axes.errorbar(progress, values, yerr=half if half.any() else None, color=colour, marker="o",
                          markersize=3 if len(rows) <= 40 else 0, linewidth=1.2, capsize=2, label=name)  # fmt: skip
        seen.append(values)
    low, high = min(part.min() for part in seen), max(part.max() for part in seen)
    if 0 < low < high / WIDE:
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.8 * low)
    axes.set_xlabel(run.about.get("progress", "epoch"))
    axes.set_ylabel(label)
    if fault:
        axes.set_title("\n".join(textwrap.wrap(fault, 60)[:3]), fontsize="x-small", color=VERMILION)
    if len(columns) > 1:
        axes.legend(frameon=False, fontsize="small")


def _colours(columns: list[str]) -> list[str]:
    return [COLOURS[place % len(COLOURS)] for place in range(len(columns))]


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
