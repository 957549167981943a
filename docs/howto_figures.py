"""The figures of the README and of the how-to pages: each page's own code, run and drawn."""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import lambdahat as lh
from lambdahat.report.figures import draw
from lambdahat.report.style import BLUE, GREY, VERMILION, new_figure, tidy
from lambdahat.results.charts import Chart, charts_of

DOCS = Path(__file__).parent
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@cache
def names_of(page: str) -> dict[str, Any]:
    """Run the Python blocks of a page in an empty folder; return the names they leave."""
    names: dict[str, Any] = {"__name__": "documentation"}
    back = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng():
        os.chdir(folder)
        try:
            torch.manual_seed(0)
            for body in BLOCK.findall((DOCS / page).read_text(encoding="utf-8")):
                exec(compile(body, page, "exec"), names)
        finally:
            os.chdir(back)
    return names


def running_mean(found: lh.LearningCoefficient) -> Chart:
    """λ̂ of the draws so far with its band: the chains in grey, their mean in blue."""
    chart = charts_of(found)[0]
    series = [
        replace(one, colour="blue" if one.legend else "muted", faint=not one.legend)
        for one in chart.series
    ]
    return replace(chart, series=tuple(series), title=f"Learning coefficient: {series[-1].name}")


def overview() -> Any:
    """The picture of the README: a spectrum with its outliers, and λ̂ with its band."""
    names = names_of("../README.md")
    spectrum = lh.spectrum(names["H"], depth=80, probes=10)
    figure = new_figure(9.6, 3.6)
    left, right = (tidy(figure.add_subplot(1, 2, place)) for place in (1, 2))
    density = spectrum.density()
    grid, value = np.asarray(density.grid), np.asarray(density.values)
    edge = float(lh.randommatrix.fit_bulk(spectrum).upper)
    for chosen, colour, label in (
        (grid <= edge, BLUE, "bulk"),
        (grid >= edge, VERMILION, "outliers"),
    ):
        left.fill_between(grid[chosen], 1e-4, value[chosen], color=colour, alpha=0.2, linewidth=0)
        left.semilogy(grid[chosen], value[chosen], color=colour, label=label)
    left.set_ylim(1e-3, 3 * value.max())
    left.set(xlabel="eigenvalue of the Hessian", ylabel="density of eigenvalues")
    left.legend(frameon=False)
    left.set_title("Spectrum: a degenerate bulk and a few outliers", fontsize="medium")
    draw(running_mean(lh.llc(names["problem"], tol=0.1)), right)
    return left


def compared() -> Any:
    """Two checkpoints as a forest plot."""
    return lh.plot(names_of("compare-checkpoints.md")["comparison"])


def sharpness() -> Any:
    """What the trackers of the page saw."""
    return lh.plot(names_of("sharpness-during-training.md")["track"].run)


def eigenvector() -> Any:
    """The loss of the page's network along its sharpest direction."""
    names = names_of("top-eigenvalue.md")
    return lh.plot(names["along"])


def below_the_centre() -> Any:
    """Traces of chains from untrained and from trained weights."""
    names, figure = names_of("not-a-minimum.md"), new_figure(9.6, 3.4)
    for place, name in enumerate(("untrained", "trained"), start=1):
        found = names[name]
        chart = replace(charts_of(found)[1], title=f"{name.capitalize()}: {found.status.name}")
        axes = draw(chart, tidy(figure.add_subplot(1, 2, place)))
        axes.axhline(0, color=GREY, linewidth=1)
        axes.set_ylim(top=max(axes.get_ylim()[1], 3))
    return figure.axes[0]


def stable_rate() -> Any:
    """The advice of the page."""
    return lh.plot(names_of("learning-rate.md")["advice"])


def transformer() -> Any:
    """λ̂ of the page's transformer with its band."""
    return draw(running_mean(names_of("transformer-coefficient.md")["estimate"]))
