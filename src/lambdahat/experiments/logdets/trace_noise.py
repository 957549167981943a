"""What random vectors say of a trace: Lemma 1 of the spectral thesis, and the remark behind it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np

from lambdahat._core.rng import derived_seed
from lambdahat.experiments import kit
from lambdahat.experiments.kit import Cell, Chart, Claim, Reading, Row, Rows, Table
from lambdahat.results import Array

PASTUR, EQUAL, RANK_ONE, DIAGONAL = "covariance", "identity", "rank 1", "diagonal"
MATRICES = (PASTUR, EQUAL, RANK_ONE, DIAGONAL)
SIGNS, NORMAL, SPARSE = "±1", "normal", "sparse"
FOURTH = {SIGNS: 1.0, NORMAL: 3.0, SPARSE: 10.0}  # m₄ of a vector's elements
TOGETHER = (1, 4, 16, 64)  # vectors whose mean is taken
BIAS, CLOSE, EXPONENT = 0.01, 0.1, 0.1


def cells(
    seeds: int, vectors: int = 6400, sizes: Iterable[int] = (25, 50, 100, 200, 400)
) -> list[Cell]:
    """Matrix × size × seed: matrices P × P of these ``sizes``, each with so many ``vectors``."""
    return kit.grid({"vectors": vectors}, matrix=MATRICES, size=sizes, seed=range(seeds))


def run(cell: Cell, device: str) -> list[Row]:
    """uᵀHu by the law of u's elements: its mean and variance beside Tr H and (2 + m₄)·Tr H²."""
    name, size, count = cell["matrix"], cell["size"], cell["vectors"]
    rng = np.random.default_rng(derived_seed(cell["seed"], "traces", name, size))
    matrix = _matrix(name, size, rng)
    trace, square = float(np.trace(matrix)), float(np.square(matrix).sum())
    values = np.linalg.eigvalsh(matrix)
    common = {"share": square / trace**2}
    if values[0] > 1e-9 * values[-1]:
        condition = float(values[-1] / values[0])
        common["bound"] = 1 / (1 + (size - 1) / condition**2)
    rows = []
    for law, fourth in FOURTH.items():
        vectors = _vectors(law, (count, size), rng)
        forms = np.einsum("ij,ij->i", vectors @ matrix, vectors)
        row = {"law": law, **common, "bias": float(forms.mean()) / trace - 1}
        row["over lemma"] = float(forms.var(ddof=1)) / ((2 + fourth) * square)
        row["noise"] = float(forms.var(ddof=1)) / trace**2
        for number in TOGETHER:
            means = forms[: count // number * number].reshape(-1, number).mean(1)
            row[f"noise of {number}"] = float(means.var(ddof=1)) / trace**2
        rows.append(row)
    return rows


def _matrix(name: str, size: int, rng: np.random.Generator) -> Array:
    """A covariance of 2P draws, the identity, rank 1, or a diagonal of uneven elements."""
    if name == PASTUR:
        draws = rng.standard_normal((size, 2 * size))
        return np.asarray(draws @ draws.T / (2 * size))
    if name == RANK_ONE:
        direction = rng.standard_normal(size)
        return np.asarray(np.outer(direction, direction) / size)
    return np.diag(np.ones(size) if name == EQUAL else rng.uniform(0.1, 2.0, size))


def _vectors(law: str, shape: tuple[int, int], rng: np.random.Generator) -> Array:
    """Independent elements of mean 0 and variance 1; sparse ones are 0 but for a tenth."""
    if law == NORMAL:
        return rng.standard_normal(shape)
    signs = rng.choice([-1.0, 1.0], shape)
    if law == SPARSE:
        signs *= math.sqrt(FOURTH[SPARSE]) * (rng.random(shape) < 1 / FOURTH[SPARSE])
    return signs


CLAIMS = kit.ClaimTexts(f"""
    mean: the mean of uᵀHu is Tr H (relative difference, over laws and matrices)
      | Lemma 1 | equal | within {BIAS:g} of 0
    bound: the variance of uᵀHu is at most (2 + m₄)·Tr H² (largest share, over laws and matrices)
      | Lemma 1 | at most 1 | below 1
    equal: the variance is (2 + m₄)·Tr H² (share, covariances, over laws)
      | Eq. 2.33 | equal | within {CLOSE:g} of 1
    falls: the squared noise to signal of covariances falls inversely with P (exponent, ±1)
      | §2.5, after Lemma 1 | −1 | within {EXPONENT:g} of -1
    condition: Tr H²/(Tr H)² is at most 1/(1 + (P − 1)/κ²) (largest log₁₀ of their ratio)
      | Eq. 2.34 | at most 0 | below 1e-9
    identity: with equal eigenvalues the squared noise to signal falls as 1/P (exponent, normal)
      | §2.5, after Eq. 2.34 | −1 | within {EXPONENT:g} of -1
    rank: of a matrix of rank 1 it does not fall with P (exponent, normal)
      | §2.5, after Eq. 2.34 | 0 | within {EXPONENT:g} of 0
    vectors: the mean of d vectors has 1/d of the variance (exponent, covariances)
      | §2.5 | −1 | within {EXPONENT:g} of -1
""")


def claims(rows: Rows) -> Iterator[Claim]:
    """The lemma, the equality of its proof, and what the remark says of the dimension."""
    covariances = rows.where(matrix=PASTUR)
    yield CLAIMS("mean", kit.over_seeds(rows, "bias"))
    yield CLAIMS("bound", kit.by_seed(rows, lambda part: max(part.values("over lemma"))))
    yield CLAIMS("equal", kit.over_seeds(covariances, "over lemma"))
    yield CLAIMS("falls", kit.exponent(covariances.where(law=SIGNS), "noise", "size"))
    above = [math.log10(row["share"] / row["bound"]) for row in rows if "bound" in row]
    yield CLAIMS("condition", Reading(max(above), 0.0))
    for key, name in (("identity", EQUAL), ("rank", RANK_ONE)):
        part = rows.where(matrix=name, law=NORMAL)
        yield CLAIMS(key, kit.exponent(part, "noise", "size"))
    yield CLAIMS("vectors", kit.by_seed(covariances, _falls_with_vectors))


def _falls_with_vectors(rows: Rows) -> float:
    """The slope over log₁₀ of the number of vectors."""
    noise = [np.log10(rows.values(f"noise of {number}")).mean() for number in TOGETHER]
    return kit.slope(np.log10(TOGETHER).tolist(), list(map(float, noise))).value


def tables(rows: Rows) -> Iterator[Table]:
    """The variance over that of the lemma, and the squared noise to signal, over P."""
    sizes = rows.distinct("size")
    for column, title in (
        ("over lemma", "Var[uᵀHu] over (2 + m₄)·Tr H²"),
        ("noise", "Squared noise to signal, Var[uᵀHu]/(Tr H)²"),
    ):
        lines = []
        for (name, law), part in rows.groups("matrix", "law"):
            parts = (part.where(size=size) for size in sizes)
            lines.append((name, law, *(str(kit.over_seeds(each, column)) for each in parts)))
        header = ("matrix", "elements", *(f"P = {size}" for size in sizes))
        yield kit.table(title, header, tuple(lines))


def charts(rows: Rows) -> Iterator[Chart]:
    """The squared noise to signal over P."""
    series = kit.curves(rows.where(law=NORMAL).by("matrix"), "noise", "size")
    title, axes = "Noise of a trace by one normal vector", ("P", "Var[uᵀHu]/(Tr H)²")
    yield Chart(title, *axes, series, x_log=True, y_log=True, source="Eq. 2.34")


EXPERIMENT = kit.Experiment(
    "trace-noise",
    "Mean and variance of a trace by random vectors",
    kit.SPECTRAL,
    "§2.5, Lemma 1, Eqs. 2.33 and 2.34",
    {"smoke": cells(2, 320, (10, 20, 40)), "cpu": cells(5), "paper": cells(20)},
    *(run, claims, tables, charts),
    kit.sentences(f"""
        Elements of u are ±1 (m₄ = 1), normal (m₄ = 3), or zero except for one in ten (m₄ = 10).
        Matrices are covariances of 2P normal draws, whose condition number hardly depends on P, the
          identity, rank 1, and diagonal with elements from 0.1 to 2.
        Each mean and variance is over 6,400 vectors; n counts seeds, each with matrices of its own.
        Eq. 2.33 states an equality, the lemma a bound: both are judged.
        Margins are {BIAS:g} for the mean, {CLOSE:g} for the variance and {EXPONENT:g} for
          exponents: set before any run.
    """),
    "no experiment: a lemma, of any symmetric matrix.",
)
