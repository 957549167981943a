"""Draw the figures of the documentation: ``python docs/figures.py [folder [name ...]]``.

Everything is measured here, on a small network trained on the digits that come with the package,
with fixed seeds; but for the coverage of intervals, which ``benchmarks/coverage.py`` measures, the
batches and rates of large networks, which ``benchmarks/minibatch_eigenvalues.py`` and
``benchmarks/minibatch_rates.py`` do, the ground-truth suite, of which ``lambdahat verify`` left a
result, and the published experiments, whose runs ``lambdahat reproduce`` has stored.
"""

from __future__ import annotations

import io
import runpy
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image

FOLDER = Path(__file__).parent / "figures"
DPI = 100
COLOURS = 128


@cache
def script(name: str) -> dict[str, Any]:
    """What ``<name>_figures.py`` beside this file defines; read once, so that its figures share
    what they train.
    """
    return runpy.run_path(str(Path(__file__).with_name(f"{name}_figures.py")))


def part(name: str, figure: str) -> Callable[[], Any]:
    """A figure of a script, which is read when the figure is drawn."""
    return lambda: script(name)[figure]()


FIGURES: dict[str, Callable[[], Any]] = {
    "overview": part("howto", "overview"),
    "top-eigenvalue": part("howto", "eigenvector"),
    "transformer-coefficient": part("howto", "transformer"),
    "learning-rate": part("howto", "stable_rate"),
    "sharpness-during-training": part("howto", "sharpness"),
    "compare-checkpoints": part("howto", "compared"),
    "not-a-minimum": part("howto", "below_the_centre"),
    "architecture": part("architecture", "rooms"),
    "random-matrices": part("matrix", "ensembles"),
    "lanczos-and-diagonals": part("matrix", "lanczos_and_diagonals"),
    "batch-regimes": part("matrix", "batch_regimes"),
    "maximum-entropy": part("entropy", "maximum_entropy"),
    "classical-entropy": part("entropy", "classical_entropy"),
    "spectrum": part("digits", "spectrum"),
    "density": part("digits", "density"),
    "eigenpairs": part("digits", "eigenpairs"),
    "landscape-line": part("digits", "landscape_line"),
    "landscape-plane": part("digits", "landscape_plane"),
    "trace-methods": part("digits", "trace_methods"),
    "trace-layers": part("digits", "trace_layers"),
    "coverage": part("truth", "coverage"),
    "variance": part("digits", "variance"),
    "sharpness": part("digits", "sharpness"),
    "batch-norm": part("digits", "batch_norm"),
    "llc": part("digits", "llc"),
    "llc-curve": part("truth", "llc_curve"),
    "llc-sweep": part("digits", "llc_sweep"),
    "volume-scaling": part("truth", "volume_scaling"),
    "edge-of-stability": part("training", "edge_of_stability"),
    "averaging": part("training", "averaging"),
    "training": part("training", "training"),
    "verification": part("truth", "verification"),
    "regularizers": part("training", "regularizers"),
    "graph-clusters": part("entropy", "graph_clusters"),
    "graph-spectra": part("entropy", "graph_spectra"),
    "graph-similarity": part("entropy", "graph_similarity"),
    "batch-and-step": part("advice", "batch_and_step"),
    "noisy-quadratic": part("bulk", "noisy_quadratic"),
    "bulk": lambda: script("bulk")["bulk"](script("digits")["digits_problem"]()),
    "mini-batch-spectra": part("digits", "mini_batch_spectra"),
    "batch-eigenvalues": part("batch", "eigenvalues"),
    "eigenvalues-through-training": part("batch", "through_training"),
    "spikes": part("bulk", "spikes"),
    "vgg-spectrum": part("bulk", "vgg"),
    "stable-rates": part("rate", "stable_rates"),
    "batch-norm-rates": part("rate", "batch_norm_rates"),
    "scaling-momentum": part("rate", "scaling_momentum"),
    "scaling-adam": part("rate", "scaling_adam"),
    "damping": part("rate", "damping"),
    "lanczos-opt": part("rate", "lanczos_opt"),
    "ngd-pairs": part("experiment", "ngd_pairs"),
    "ngd-overfitting": part("experiment", "overfitting"),
    "flatness": part("experiment", "flatness"),
}


def save(drawn: Any, path: Path) -> None:
    """Write a figure as a PNG of few colours, a third of the size: lines and text need no more.

    By maximum coverage: the median cut spends all colours on a heat map and gives two thin lines
    one colour.
    """
    buffer = io.BytesIO()
    drawn.figure.savefig(buffer, dpi=DPI, metadata={"Software": None})
    few = Image.open(buffer).convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE)
    few.save(path, optimize=True)


def main(folder: Path, names: Sequence[str] = ()) -> None:
    """Draw the figures with these names, or all, into a folder."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or FIGURES:
        save(FIGURES[name](), folder / f"{name}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER, sys.argv[2:])
