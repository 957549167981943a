"""Are the Lanczos products of a batch enough? From the results of
benchmarks/minibatch_eigenvalues.py.

    python benchmarks/lanczos_steps.py RESULT...

Some batches of 128 have, beside their extremes from a few products, a spectrum from many. A
spectrum of m products holds those of fewer: the leading block of its Jacobi matrix. For every point
it prints, batch by batch, λ'₁, the squared cosine of its vector, and λ'_P from few products,
relative to those from many.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from minibatch_pieces import BatchEigenvaluesResult

from lambdahat.experiments.minibatch.batch_points import SCALES
from lambdahat.results import Array, Spectrum


def basis(nodes: Array, weights: Array, steps: int) -> Array:
    """The Lanczos vectors of diag(nodes) from √weights, (nodes, steps)."""
    vectors = [np.sqrt(weights / weights.sum())]
    while len(vectors) < steps:
        following = nodes * vectors[-1]
        for _ in range(2):  # once more, for the rounding of the first
            for vector in vectors:
                following = following - (vector @ following) * vector
        vectors.append(following / np.linalg.norm(following))
    return np.stack(vectors, 1)


def few_over_many(spectrum: Spectrum, steps: int) -> tuple[float, float, float]:
    """λ'₁, the squared cosine of its vector and λ'_P from ``steps`` products, over those from
    all.
    """
    there = spectrum.weights[0] > 0
    nodes, weights = spectrum.nodes[0][there], spectrum.weights[0][there]
    vectors = basis(nodes, weights, min(steps, len(nodes)))
    values, mixing = np.linalg.eigh(vectors.T @ (nodes[:, None] * vectors))
    cosine = (vectors @ mixing[:, -1])[int(np.argmax(nodes))]
    return float(values[-1] / nodes.max()), float(cosine**2), float(values[0] / nodes.min())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path)
    for result in map(BatchEigenvaluesResult.load, parser.parse_args().results):
        subjects = {subject["network"]: subject for subject in SCALES[result.scale]}
        for point in result.points:
            subject = subjects[point.network]
            print(
                f"{point.network}, epoch {point.epoch}, {point.operator}: {subject['steps']} of"
                f" {subject['depth']} products"
            )
            for spectrum in point.batch_spectra:
                largest, cosine, smallest = few_over_many(spectrum, subject["steps"])
                low = f", λ'_P {smallest:.3f}" if point.indefinite else ""
                print(f"  λ'₁ {largest:.3f}, its vector {cosine:.3f}{low}")


if __name__ == "__main__":
    main()
