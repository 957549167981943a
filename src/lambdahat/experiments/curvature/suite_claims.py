"""What §§4.2 and 4.6 of the spectral thesis say of a trained network's curvature, as code;
tables and charts.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from lambdahat.experiments.kit.cells import Row, Rows, decades, gap, over_seeds, stems
from lambdahat.experiments.kit.claims import Claim, Table, mean_of, paired_difference
from lambdahat.experiments.kit.experiment import subject
from lambdahat.results.charts import Chart, Series

NAMES = {"hessian": "Hessian", "ggn": "Gauss–Newton matrix", "covariance": "gradient covariance"}
DIRECTIONS = {
    "largest": "the largest",
    "smallest": "the smallest",
    "flattest": "the smallest in magnitude",
}
FACTOR = math.log10(2)
CLOSE = 0.1  # of λ₁: "quite closely resembles"
SAME = 1e-3  # of λ₁ between two random vectors
SAME_MASS = 0.02
THEIRS = "VGG-16, CIFAR-100"


def claims(rows: Rows) -> list[Claim]:
    """Two matrices alike, a diagonal that is not, random vectors that agree, and lines through
    the loss.
    """
    found = [
        *_matrix_claims(rows),
        *_diagonal_claims(rows),
        *_probe_claims(rows),
        *_line_claims(rows),
    ]
    return [
        replace(
            claim,
            sentence=f"{subject(rows)}: {claim.sentence}",
            published=f"{claim.published} ({THEIRS})",
        )
        for claim in found
    ]


def _spectra(rows: Rows, name: str, probe: int = 0) -> Rows:
    return rows.where(kind="spectrum", curvature=name, probe=probe)


def _matrix_claims(rows: Rows) -> list[Claim]:
    full, near, noise = (_spectra(rows, name) for name in NAMES)
    tops = {row["seed"]: np.array(row["top"]) for row in near}
    apart = [float(np.abs(tops[row["seed"]] / np.array(row["top"]) - 1).mean()) for row in full]
    return [
        Claim(
            "the Gauss–Newton matrix has the outliers of the Hessian (mean relative difference of"
            f" the largest four, below {CLOSE:g})",
            "§4.6.1, Figure 4.7",
            "quite closely",
            mean_of(apart),
            "below",
            CLOSE,
        ),
        Claim(
            "the Hessian has mass below 0, more than 1 %",
            "§4.6.1",
            "37 %",
            over_seeds(full, "negative"),
            bound=0.01,
        ),
        Claim(
            "without the Ritz value of most weight less than 1 % of the Hessian's mass is left"
            " below 0",
            "§4.6.1",
            "0.05 %",
            over_seeds(full, "negative rest"),
            "below",
            0.01,
        ),
        Claim(
            "λ₁ of the gradient covariance is that of the Hessian, within a factor 2",
            "§4.1.1",
            "close",
            decades(noise, full, "largest"),
            "within",
            0.0,
            FACTOR,
            " decades",
        ),
    ]


def _diagonal_claims(rows: Rows) -> list[Claim]:
    flat, near = rows.where(kind="diagonal"), _spectra(rows, "ggn")
    return [
        Claim(
            "the diagonal misses λ₁: its largest element is less than half of it",
            "§4.6.1, Figure 4.7",
            "about 3 of 6.88",
            decades(flat, near, "largest"),
            "below",
            -FACTOR,
            unit=" decades",
        ),
        Claim(
            "more elements of the diagonal are beyond the bulk than eigenvalues (difference of"
            " their numbers)",
            "§4.6.1, Figure 4.7",
            "many spurious",
            paired_difference(flat.paired("beyond"), flat.paired("eigenvalues beyond")),
        ),
    ]


def _probe_claims(rows: Rows) -> list[Claim]:
    first, second = (_spectra(rows, "hessian", probe) for probe in (0, 1))
    ends, both = [], {row["seed"]: row for row in second}
    for row in first:
        other = both[row["seed"]]
        ends.append(
            max(abs(row[key] - other[key]) for key in ("largest", "smallest")) / row["largest"]
        )
    return [
        Claim(
            f"two random vectors give the same extremes (difference over λ₁, below {SAME:g})",
            "Figure 4.8",
            "6.8885 and 6.8891",
            mean_of(ends),
            "below",
            SAME,
        ),
        Claim(
            f"two random vectors give the same mass at 0 (within {SAME_MASS:g})",
            "Figure 4.8",
            "unchanged",
            gap(first, second, "at zero"),
            "within",
            0.0,
            SAME_MASS,
        ),
    ]


def excess(row: Row) -> float:
    """log₁₀ of the ratio of the mean changes of the held-out and of the training loss along a
    line.
    """
    middle = len(row["offsets"]) // 2
    changes = [np.abs(np.array(row[part]) - row[part][middle]).mean() for part in ("test", "train")]
    return float(math.log10(max(changes[0], 1e-12) / max(changes[1], 1e-12)))


def _line_claims(rows: Rows) -> list[Claim]:
    lines = {name: rows.where(kind="line", direction=name) for name in DIRECTIONS}
    sharp, flat = (
        {row["seed"]: excess(row) for row in lines[name]} for name in ("largest", "flattest")
    )
    distances = [{seed: abs(value) for seed, value in part.items()} for part in (flat, sharp)]
    return [
        Claim(
            "along the sharpest direction training and test loss change alike (within a factor 2)",
            "Table 4.3",
            "similar",
            mean_of(list(sharp.values())),
            "within",
            0.0,
            FACTOR,
            " decades",
        ),
        Claim(
            "along a flat direction training and test loss change less alike (distance of the ratio"
            " from 1)",
            "Table 4.3",
            "not necessarily flat",
            paired_difference(*distances),
            unit=" decades",
        ),
    ]


def tables(rows: Rows) -> list[Table]:
    """The spectra, the diagonal, and the lines."""
    lines = []
    for name, words in NAMES.items():
        part = _spectra(rows, name)
        keys = ("largest", "smallest", "negative", "negative rest", "at zero")
        lines.append((words, *(str(over_seeds(part, key)) for key in keys)))
    header = (
        "matrix",
        "largest",
        "smallest",
        "mass below 0",
        "without its heaviest Ritz value",
        "mass at 0",
    )
    first = rows.where(kind="spectrum")[0]
    title = f"{first['network']}, {first['parameters']:,} parameters"
    flat = rows.where(kind="diagonal")
    diagonal = tuple(
        str(over_seeds(flat, key)) for key in ("largest", "edge", "eigenvalues beyond", "beyond")
    )
    return [
        Table(title, header, tuple(lines)),
        Table(
            "The diagonal of the Gauss–Newton matrix",
            ("largest element", "edge of the bulk", "eigenvalues beyond", "elements beyond"),
            (diagonal,),
        ),
        Table(
            "Mean change of the loss within 1 of the solution",
            ("direction of", "Ritz value", "log₁₀ test over training"),
            tuple(_line_row(rows, name) for name in DIRECTIONS),
        ),
    ]


def _line_row(rows: Rows, name: str) -> tuple[str, str, str]:
    part = rows.where(kind="line", direction=name)
    return (
        DIRECTIONS[name],
        str(over_seeds(part, "value")),
        str(mean_of([excess(row) for row in part])),
    )


def charts(rows: Rows) -> list[Chart]:
    """Stem plots of the first seed, the diagonal among them, and the lines."""
    first = rows.where(seed=0)
    flat = first.where(kind="diagonal")[0]
    shown = [stems(words, _spectra(first, name)[0]) for name, words in NAMES.items()]
    diagonal = Series(
        "diagonal of the Gauss–Newton matrix", flat["centres"], flat["shares"], style="step"
    )
    probes = tuple(
        stems(f"random vector {probe + 1}", _spectra(first, "hessian", probe)[0])
        for probe in (0, 1)
    )
    out = [
        Chart(
            "Spectra",
            "eigenvalue",
            "weight",
            tuple(shown),
            y_log=True,
            source="Tables 4.1 and 4.2, Figure 4.7",
        ),
        Chart(
            "Ritz values and the diagonal",
            "eigenvalue",
            "share",
            (diagonal, shown[1], shown[0]),
            y_log=True,
            source="Figure 4.7",
        ),
        Chart(
            "Two random vectors, Hessian",
            "eigenvalue",
            "weight",
            probes,
            y_log=True,
            source="Figure 4.8",
        ),
    ]
    for name, words in DIRECTIONS.items():
        row = first.where(kind="line", direction=name)[0]
        series = tuple(Series(part, row["offsets"], row[part]) for part in ("train", "test"))
        out.append(
            Chart(
                f"Loss along the Ritz vector of {words} value",
                "offset",
                "loss",
                series,
                source="Table 4.3",
            )
        )
    return out
