"""Figures of estimates beside exact answers, from what benchmarks and ``lambdahat verify`` left
behind.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file

import lambdahat as lh
from lambdahat.report.style import AMBER, BLUE, GREEN, GREY, VERMILION, new_axes

KINDS = {
    "ReLU MLP": (BLUE, "o"),
    "tanh MLP": (VERMILION, "s"),
    "convolutional": (AMBER, "^"),
    "spectra": (GREY, "D"),
}
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def coverage() -> Any:
    """How often intervals hold the truth, from what ``benchmarks/coverage.py`` measured."""
    stored = json.loads((RESULTS / "coverage.json").read_text(encoding="utf-8"))
    rows = [(*row["case"].split(": "), row) for row in stored["rows"]]
    readings = list(dict.fromkeys(reading for kind, reading, _ in rows if kind in KINDS))
    axes = new_axes(4.2)
    axes.axvspan(92, 98, color=GREEN, alpha=0.12, linewidth=0, label="92 to 98 %")
    axes.axvline(95, color=GREY, linewidth=1, linestyle="--")
    for place, (kind, (colour, mark)) in enumerate(KINDS.items()):
        found = [
            (readings.index(reading), row["coverage %"], row["runs"])
            for of, reading, row in rows
            if of == kind
        ]
        where, share, runs = (np.array(part) for part in zip(*found, strict=True))
        error = np.sqrt(share * (100 - share) / runs)
        named = "random spectra" if kind == "spectra" else kind
        offset = 0.16 * (place - (len(KINDS) - 1) / 2)
        axes.errorbar(
            share,
            where + offset,
            xerr=error,
            fmt=mark,
            color=colour,
            capsize=2,
            markersize=4,
            label=named,
        )
    axes.set_yticks(range(len(readings)), readings)
    axes.set_ylim(len(readings) - 0.4, -0.6)
    axes.set_xlim(82, 101)
    axes.set_xlabel("intervals that contain the exact answer, %")
    axes.legend(frameon=False, fontsize="small", loc="upper left")
    axes.set_title("Coverage of 95 % intervals (bars: ± 1 standard error)", fontsize="medium")
    return axes


def volume_scaling() -> Any:
    """V(ε) of w₁²w₂² and its slope."""
    crossing = lh.singular.exact.crossing_problem([1, 1], num_samples=1000)
    return lh.plot(lh.singular.volume_scaling(crossing, multiplicity=2, levels=40))


def verification() -> Any:
    """Every case of the ground-truth suite, from the stored result of one run."""
    return lh.plot(lh.singular.Verification.load(RESULTS / "verification.json"))


def llc_curve() -> Any:
    """λ̂ of a network over γ, beside the stored references of ``benchmarks/llc_networks.py`` at
    four of them.
    """
    stored = RESULTS / "llc_networks"
    lines = (stored / "networks.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["network"] == "digits-mlp"]
    weights = load_file(stored / "digits-mlp.safetensors")
    problem = lh.Problem(
        lh.models.mlp([64, 32, 10]), "cross_entropy", lh.data.digits_split(seed=0)[0]
    ).at(weights)
    rule = next(row["localization"] for row in rows if abs(row["over_scale"] - 1) < 1e-6)
    axes = lh.plot(lh.singular.llc_curve(problem, [rule * 2.0**power for power in range(-3, 4)]))
    axes.plot(
        [row["localization"] for row in rows],
        [row["value"] for row in rows],
        "x",
        color="black",
        markersize=9,
        markeredgewidth=1.8,
        zorder=5,
        label="reference",
    )
    axes.legend(frameon=False, fontsize="small")
    return axes
