"""Damping as linear shrinkage of the curvature, against the best estimator (§6.3.2)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from lambdahat._core.rng import derived_seed
from lambdahat.experiments import kit
from lambdahat.experiments.kit import Cell, Chart, Claim, Row, Rows, Table
from lambdahat.randommatrix import damping_as_shrinkage
from lambdahat.results import Array

WISHART, TWO, SPIKED = "inverse Wishart", "two levels", "spiked"
SPECTRA = (WISHART, TWO, SPIKED)
DAMPINGS = np.logspace(-4, 2, 61)
EXACT, CLOSE = 1e-9, math.log10(1.05)
ESTIMATORS = {
    "sample": "the sample's",
    "linear": "linear shrinkage",
    "oracle": "the best eigenvalues",
}
COLUMNS = {**ESTIMATORS, "weight": "β", "step": "Newton step"}
COLUMNS |= {"damped step": "damped", "damping": "damping"}


def cells(seeds: int, size: int = 200) -> list[Cell]:
    """Spectrum × q × seed: covariances of ``size`` × ``size`` from as many samples times 1/q."""
    return kit.grid({}, spectrum=SPECTRA, ratio=(0.25, 1.0), size=[size], seed=range(seeds))


def run(cell: Cell, device: str) -> list[Row]:
    """Errors of the estimators, of their Newton steps, and of Eq. 6.5 as an identity."""
    seed = derived_seed(cell["seed"], "shrinkage", cell["spectrum"], cell["ratio"])
    rng = np.random.default_rng(seed)
    truth, size = _truth(cell["spectrum"], cell["size"], rng), cell["size"]
    draws = rng.standard_normal((round(size / cell["ratio"]), size)) @ np.linalg.cholesky(truth).T
    sample = draws.T @ draws / len(draws)
    values, vectors = np.linalg.eigh(sample)
    weight = _weight(draws, sample)
    shrunk = weight * sample + (1 - weight) * np.trace(sample) / size * np.eye(size)
    # of all that keep the sample's eigenvectors
    best = np.einsum("ji,jk,ki->i", vectors, truth, vectors)
    estimates = {"sample": sample, "linear": shrunk, "oracle": vectors * best @ vectors.T}
    row = {name: float(np.linalg.norm(estimate - truth)) for name, estimate in estimates.items()}
    row |= {"weight": weight, **_steps(truth, values, vectors, rng)}
    # the largest relative difference of 1/(λ + δ) and 1/(κ(βλ + 1 − β)), Eq. 6.5
    errors = []
    for damping in DAMPINGS:
        kappa, beta = damping_as_shrinkage(float(damping))
        errors.append(np.abs((values + damping) / (kappa * (beta * values + 1 - beta)) - 1).max())
    return [row | {"identity": float(max(errors))}]


def _weight(draws: Array, sample: Array) -> float:
    """β by Ledoit and Wolf (2004), from the draws alone."""
    spread = float(np.square(sample - np.trace(sample) / len(sample) * np.eye(len(sample))).sum())
    powers = np.square(draws).sum(1)  # ‖xxᵀ − S‖² = ‖x‖⁴ − 2xᵀSx + ‖S‖²
    crossed = np.einsum("ij,jk,ik->i", draws, sample, draws)
    noise = float((powers**2 - 2 * crossed).sum() / len(draws) ** 2)
    noise += float(np.square(sample).sum()) / len(draws)
    return max(0.0, 1 - noise / spread)


def _truth(name: str, size: int, rng: np.random.Generator) -> Array:
    """A covariance of mean eigenvalue 1 or so, with random eigenvectors."""
    if name == WISHART:
        draws = rng.standard_normal((3 * size, size))
        made = np.linalg.inv(draws.T @ draws / len(draws))
        return np.asarray(made * size / np.trace(made))
    values = np.where(np.arange(size) < size // 2, 0.2, 1.8) if name == TWO else np.full(size, 0.5)
    if name == SPIKED:
        values[: max(1, size // 40)] = 20.0
    basis = np.linalg.qr(rng.standard_normal((size, size)))[0]
    return np.asarray(basis * values @ basis.T)


def _steps(truth: Array, values: Array, vectors: Array, rng: np.random.Generator) -> Row:
    """Errors of Newton steps on the sample, without damping and with the best one."""
    gradient = rng.standard_normal(len(truth))
    wanted = np.asarray(np.linalg.solve(truth, gradient), np.float64)
    parts = vectors.T @ gradient
    away = []
    for damping in (1e-8, *DAMPINGS):
        step = vectors @ (parts / (values + damping))
        # at the best learning rate, so that directions are compared
        scaled = step * float(step @ wanted) / float(step @ step)
        away.append(float(np.linalg.norm(scaled - wanted)))
    size, best = float(np.linalg.norm(wanted)), float([0.0, *DAMPINGS][np.argmin(away)])
    return {"step": away[0] / size, "damped step": min(away) / size, "damping": best}


def claims(rows: Rows) -> Iterator[Claim]:
    """The identity; shrinkage against the sample, and against the best rotation-invariant one."""
    claim = kit.ClaimTexts(f"""
        identity: damping is a rate and a linear shrinkage (relative difference, at worst)
          | Eq. 6.5 | 0 | below {EXACT:g}
        sample: {{name}}: linear shrinkage errs less than the sample covariance
          | §6.3.2 | it can | below | decades
        oracle: {{name}}: no other eigenvalues err less, by more than 5 %
          | §6.3.2, Bun et al. | the minimum error | below | decades
        step: {{name}}: a damped Newton step is nearer the true one
          | §6.3.2, §6.5 | more accurately descends | below | decades
    """)
    yield claim("identity", kit.Reading(max(rows.values("identity")), 0.0))
    for name, part in rows.groups("spectrum"):
        errors = {column: kit.logs(part, column) for column in COLUMNS}
        for lower, upper in (("sample", "linear"), ("oracle", "linear"), ("step", "damped step")):
            reading = kit.paired_difference(errors[upper], errors[lower])
            yield claim(lower, reading, name=name, bound=CLOSE if lower == "oracle" else 0.0)


def tables(rows: Rows) -> Iterator[Table]:
    """Errors, weights and steps."""
    groups = rows.groups("spectrum", "ratio")
    parts = {(name, f"{ratio:g}"): part for (name, ratio), part in groups}
    title = f"Errors in Frobenius norm, P = {rows[0]['size']}; of steps relative"
    yield kit.means_table(title, "spectrum | P/N", parts, COLUMNS)


def charts(rows: Rows) -> Iterator[Chart]:
    """Errors over P/N."""
    axes = "P/N", "‖·‖ of the error"
    for name, part in rows.groups("spectrum"):
        series = kit.curves(part, ESTIMATORS, "ratio")
        yield Chart(f"Error, {name}", *axes, series, y_log=True, source="§6.3.2")


EXPERIMENT = kit.Experiment(
    "linear-shrinkage",
    "Damping as linear shrinkage, and what it does to errors of the curvature",
    kit.SPECTRAL,
    "§6.3.2, Eq. 6.5",
    {"smoke": cells(2, 40), "cpu": cells(5), "paper": cells(20, 400)},
    *(run, claims, tables, charts),
    kit.sentences("""
        The multiplicative noise model: sample covariances of Gaussian draws, whose truth is known.
        β is estimated from the draws (Ledoit and Wolf) and shrinks towards the sample's mean
          eigenvalue.
        The best eigenvalues for the sample's eigenvectors are vᵀCv: no estimator that keeps these
          vectors errs less.
        Steps are compared at the best learning rate for each, for a random gradient; the damping is
          the best of 61.
        Three spectra: of the inverse Wishart law, for which linear shrinkage is known to be
          optimal, and two others.
        Errors are means over both values of P/N; a first run at cpu scale judged each separately,
          with the best β.
    """),
    "no experiment of its own: an identity, and a theorem of Bun et al. that is cited.",
)
