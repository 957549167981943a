"""Entropy and error of log det over moments, classical algorithm and MEMe (Figure 2.1)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import scipy.sparse
import torch
from numpy.polynomial.chebyshev import chebvander

from lambdahat._core.rng import generator
from lambdahat.estimators import logdet, moments
from lambdahat.experiments.kit.cells import Cell, Row, Rows, curve, decades, over_seeds
from lambdahat.experiments.kit.claims import (
    MISSING,
    Claim,
    Claims,
    Reading,
    Table,
    mean_of,
    split_header,
)
from lambdahat.experiments.kit.experiment import SPECTRAL, Experiment, sentences
from lambdahat.experiments.kit.store import outside_file
from lambdahat.maxent import MaxentDensity, fit, fit_classical
from lambdahat.operators.matrix import Matrix, operator
from lambdahat.results import Array
from lambdahat.results.charts import Chart

STIFFNESS = "bcsstk16"
STAND_IN = (30, 31)  # sides of the grid in place of bcsstk16
DECADES = 9  # over which its diagonal entries spread


@dataclass(frozen=True)
class Known:
    """A positive definite matrix, its log-determinant, eigenvalues (n,) if asked, its source."""

    operator: Matrix
    log_determinant: float
    eigenvalues: Callable[[], Array]
    data: str


def laplacian(sides: tuple[int, ...], shift: float = 0.0) -> tuple[Any, Array]:
    """−Δ on a grid with fixed ends plus ``shift``, as CSR (n, n), and its eigenvalues Σ_i (2 − 2cos
    πk_i/(s_i + 1)).

    >>> laplacian((2,), 1.0)[0].toarray()
    array([[ 3., -1.],
           [-1.,  3.]])
    """
    matrix, values = scipy.sparse.csr_array((1, 1)), np.zeros(1)
    for side in sides:
        ones = np.ones(side)
        line = scipy.sparse.diags_array([-ones[1:], 2 * ones, -ones[1:]], offsets=[-1, 0, 1])
        modes = 2 - 2 * np.cos(np.pi * np.arange(1, side + 1) / (side + 1))
        matrix = scipy.sparse.kron(matrix, scipy.sparse.eye_array(side)) + scipy.sparse.kron(
            scipy.sparse.eye_array(matrix.shape[0]), line
        )
        values = (values[:, None] + modes).ravel()
    return (matrix + shift * scipy.sparse.eye_array(len(values))).tocsr(), values + shift


def grid(sides: tuple[int, ...]) -> Known:
    """The Laplacian of a grid."""
    matrix, values = laplacian(sides)
    found = _operator(matrix)
    return Known(
        found, float(np.log(values).sum()), lambda: values, f"{' × '.join(map(str, sides))} grid"
    )


def stiffness(scaled: bool) -> Known:
    """bcsstk16, its diagonal ``scaled`` to 1 if asked; without the file a grid of entries."""
    path = outside_file("matrices", f"{STIFFNESS}_full")
    found = _operator(
        _uneven() if path is None else scipy.sparse.load_npz(path).tocsr().astype(np.float64)
    )
    if scaled:
        found = found.rescaled(found.known_diagonal().rsqrt())
    words = (
        STIFFNESS if path is not None else f"grid over {DECADES} decades for {STIFFNESS} (no file)"
    )
    exact = float(logdet(found, "exact"))
    return Known(
        found, exact, partial(_dense_eigenvalues, found), words + (", scaled" if scaled else "")
    )


def _operator(matrix: Any) -> Matrix:
    found = operator(matrix, psd=True)
    assert isinstance(found, Matrix)
    return found


def _dense_eigenvalues(found: Matrix) -> Array:
    return np.asarray(np.linalg.eigvalsh(found.dense().numpy()))


def _uneven() -> Any:
    """S(−Δ)S with the squares of S spread evenly over nine decades."""
    matrix, values = laplacian(STAND_IN)
    powers = torch.rand(
        len(values), generator=generator(0, "uneven grid"), dtype=torch.float64
    ).numpy()
    scale = scipy.sparse.diags_array(10 ** (DECADES / 2 * powers))
    return (scale @ matrix @ scale).tocsr()


COUNTS = (2, 4, 6, 8, 10, 12, 16, 20, 24, 30)
CLASSICAL, MEME = "BMxnt", "MEMe"
GRID = "grid"
PLACE = "§2.6.1, Figure 2.1"
ROUNDING = 1e-6  # of an entropy
LEAST = 0.1  # decades by which an error is to rise or fall


@dataclass(frozen=True)
class MomentScale:
    """Sides of the grid, the other matrices, probe seeds; ``sweeps`` of the classical fit."""

    sides: tuple[int, ...]
    others: tuple[str, ...]
    seeds: int
    sweeps: int = 2000
    probes: int = 50


def cells(config: MomentScale) -> list[Cell]:
    """Matrix × seed of the probes, and each matrix with its exact moments: 0 probes."""
    base = {"sides": list(config.sides), "sweeps": config.sweeps}
    names = (GRID, *config.others)
    drawn = [
        {**base, "matrix": name, "probes": config.probes, "seed": seed}
        for name in names
        for seed in range(config.seeds)
    ]
    return [*drawn, *({**base, "matrix": name, "probes": 0, "seed": 0} for name in names)]


def run(cell: Cell, device: str) -> list[Row]:
    """A row per number of moments and algorithm, on [0, λ_u], λ_u Gershgorin's (Algorithm 3)."""
    found = matrix_of(cell)
    bounds = (0.0, found.operator.known_bounds()[1])
    values, stderr = _moments(found, bounds, cell)
    rows = []
    for count in COUNTS:
        part = slice(count + 1)
        fits = {CLASSICAL: fit_classical(values[part], bounds=bounds, sweeps=cell["sweeps"])}
        fits[MEME] = fit(values[part], bounds=bounds, stderr=stderr[part])
        rows += [
            {"by": by, "moments": count, **_reading(density, found)} for by, density in fits.items()
        ]
    return rows


def matrix_of(cell: Cell) -> Known:
    """The matrix of a cell."""
    name = cell["matrix"]
    return grid(tuple(cell["sides"])) if name == GRID else stiffness(scaled=name != STIFFNESS)


def _moments(found: Known, bounds: tuple[float, float], cell: Cell) -> tuple[Array, Array]:
    """Chebyshev moments and their errors; those of the eigenvalues themselves with 0 probes."""
    if cell["probes"]:
        drawn = moments(
            found.operator,
            max(COUNTS),
            "chebyshev",
            cell["probes"],
            cell["seed"],
            bounds,
            "rademacher",
        )
        return drawn.values, drawn.stderr
    exact = chebvander(2 * found.eigenvalues() / bounds[1] - 1, max(COUNTS)).mean(axis=0)
    return exact, np.zeros_like(exact)


def _reading(density: MaxentDensity, found: Known) -> Row:
    size, exact = found.operator.dim, found.log_determinant
    error = (size * density.expectation(np.log) - exact) / abs(exact)
    return {
        "entropy": density.entropy(),
        "error": abs(error),
        "signed": error,
        "status": density.status.name,
        "data": found.data,
        "nodes": size,
    }


def claims(rows: Rows) -> list[Claim]:
    """Of the grid, with measured moments; what is said of the Ecology matrix is not judged."""
    main = rows.where(matrix=GRID)
    drawn, last = main.where(probes=_probes(main)), max(COUNTS)
    ours, theirs = drawn.where(by=MEME), drawn.where(by=CLASSICAL)
    end, mine = theirs.where(moments=last), ours.where(moments=last)
    growth = decades(end, theirs.where(moments=4), "error")
    words = f"the error of BMxnt rises by {LEAST:g} decades or more from 4 to {last} moments"
    found = Claims()
    sentence = "the entropy of MEMe falls with every moment (largest rise of all seeds)"
    found.add(sentence, PLACE, "smoothly", Reading(max(_rises(ours)), 0.0), "below", ROUNDING)
    sentence = "the entropy of BMxnt rises somewhere (largest rise)"
    published = "from m > 12 on Ecology"
    found.add(sentence, PLACE, published, mean_of(_rises(theirs)), bound=ROUNDING)
    sentence = f"the error of MEMe falls by {LEAST:g} decades or more from 2 to {last} moments"
    reading = decades(ours.where(moments=2), ours.where(moments=last), "error")
    found.add(sentence, PLACE, "continually", reading, bound=LEAST, unit=" decades")
    found.add(
        f"Ecology: {words}",
        PLACE,
        "for m > 4",
        growth,
        bound=LEAST,
        unit=" decades",
        unmet=f"measured on another matrix, {main[0]['data']}",
        barrier=MISSING,
    )
    sentence = f"grid: {words}"
    published = "no such matrix"
    found.add(sentence, "this work", published, growth, bound=LEAST, unit=" decades", own=True)
    sentence = f"MEMe errs less than BMxnt with {last} moments, by a decade or more"
    reading = decades(end, mine, "error")
    found.add(sentence, PLACE, "vastly improved", reading, bound=1.0, unit=" decades")
    sentence = "with exact moments the error of MEMe falls with every moment (largest rise)"
    reading = Reading(max(_steps(main.where(probes=0, by=MEME), "error")), 0.0)
    found.add(sentence, "this work", "continually", reading, "below", 0.0, own=True)
    return found


def _probes(rows: Rows) -> int:
    return int(max(rows.values("probes")))


def _steps(rows: Rows, name: str) -> list[float]:
    """The change of a column from one number of moments to the next, of one seed."""
    values = [row[name] for row in sorted(rows, key=lambda row: row["moments"])]
    return [after - before for before, after in pairwise(values)]


def _rises(rows: Rows) -> list[float]:
    """The largest step of the entropy of each seed."""
    return [max(_steps(rows.where(seed=seed), "entropy")) for seed in rows.distinct("seed")]


def tables(rows: Rows) -> list[Table]:
    """For each matrix: entropies and errors by the number of moments."""
    out = []
    for name in rows.distinct("matrix"):
        part = rows.where(matrix=name)
        drawn, exact = part.where(probes=_probes(part)), part.where(probes=0)
        kinds = [
            (drawn.where(by=CLASSICAL), "entropy"),
            (drawn.where(by=MEME), "entropy"),
            (drawn.where(by=CLASSICAL), "error"),
            (drawn.where(by=MEME), "error"),
            (exact.where(by=MEME), "error"),
        ]
        lines = tuple(
            (
                str(count),
                *(_cell(over_seeds(found.where(moments=count), column)) for found, column in kinds),
            )
            for count in COUNTS
        )
        header = split_header(
            f"moments | entropy, {CLASSICAL} | entropy, {MEME} | error, {CLASSICAL} | "
            f"error, {MEME} | error, {MEME}, exact moments"
        )
        first = part[0]
        title = f"{first['data']}, n = {first['nodes']:,}: relative error of log det"
        out.append(Table(title, header, lines))
    return out


def _cell(reading: Reading) -> str:
    return f"{reading.value:.4g}" if not math.isfinite(reading.stderr) else str(reading)


def charts(rows: Rows) -> list[Chart]:
    """Entropy and error over moments for each matrix."""
    out = []
    for name in rows.distinct("matrix"):
        part = rows.where(matrix=name)
        drawn, exact = part.where(probes=_probes(part)), part.where(probes=0, by=MEME)
        lines = {by: drawn.where(by=by) for by in (CLASSICAL, MEME)}
        entropy = tuple(curve(by, found, "entropy", "moments") for by, found in lines.items())
        errors = tuple(curve(by, found, "error", "moments") for by, found in lines.items())
        errors += (curve(f"{MEME}, exact moments", exact, "error", "moments"),)
        words = part[0]["data"]
        out.append(
            Chart(f"Entropy: {words}", "moments", "entropy", entropy, source="Figure 2.1a, c")
        )
        title = f"Error of log det: {words}"
        axis = "relative error"
        out.append(Chart(title, "moments", axis, errors, y_log=True, source="Figure 2.1b, d"))
    return out


EXPERIMENT = Experiment(
    "logdet-moments",
    "Entropy and error of log det over the number of moments: the classical algorithm and MEMe",
    SPECTRAL,
    "§2.6.1, Figure 2.1",
    {
        "smoke": MomentScale((12, 13), (), 3, sweeps=100, probes=20),
        "cpu": MomentScale((284, 285), (STIFFNESS, f"{STIFFNESS}, scaled"), 5),
        "paper": MomentScale((284, 285), (STIFFNESS, f"{STIFFNESS}, scaled"), 20),
    },
    *(cells, run, claims, tables, charts),
    sentences("""
        The Ecology matrix (n = 80,900; a landscape as a grid) cannot be had: a 5-point Laplacian
          stands for it.
        bcsstk16 is in <LAMBDAHAT_DATA>/matrices; without it a small grid with entries over nine
          decades is taken.
        50 Hutchinson probes (±1), as in Table 2.1: the text gives none for the figure.
        The classical algorithm makes 2,000 rounds at most; the thesis gives no number.
        n counts seeds of the probes on one matrix, the grid. What BMxnt's error does on Ecology is
          not judged on it.
        An error rises or falls by 0.1 decades or more, and is vastly improved by one; bounds set
          after the results.
        Entropies are those on [0, λ_u]: they differ by log λ_u from those on [0, 1].
    """),
    size="the Ecology matrix, n = 80,900, up to 30 moments; that very matrix is not at hand.",
)
