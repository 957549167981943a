"""The noise of a batch's Hessian, element by element (Lemmas 11 and 12), and the eigenvalues that
a semicircle of noise moves (Theorem 14 and Lemma 15).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from scipy import stats

from lambdahat._core.rng import derived_seed
from lambdahat.experiments import kit
from lambdahat.experiments.kit import Cell, Chart, Claim, Reading, Row, Rows, Table
from lambdahat.results import Array

ELEMENTS, LIPSCHITZ, OUTLIERS = "elements", "bound", "outliers"
POPULATION, INPUTS = 1000, 4  # N, and dimensions of the inputs
BATCHES = (5, 20, 80, 320)
SPIKES = (3.0, 1.5, 0.5, -3.0)  # λ of the full data, in units of σ
SECOND = 2.5  # a further outlier
LENGTHS = (0.5, 2.0, 8.0, 32.0)  # of the inputs, for the bound of Lemma 11
UNIFORM = math.sqrt(3)  # half the width of a uniform law of variance 1
BIAS, CLOSE, EXPONENT, NEAR = 0.05, 0.05, 0.05, 0.03


def cells(seeds: int, batches: int, size: int) -> list[Cell]:
    """By seed: elements over ``batches`` of each size, the bound at each length of inputs, and
    outliers of noise matrices of ``size``.
    """
    base = {"inputs": INPUTS, "population": POPULATION}
    elements = {"part": ELEMENTS, **base, "batches": batches}
    bound = {"part": LIPSCHITZ, **base, "batches": 200}
    return [
        *kit.grid(elements, batch=BATCHES, seed=range(seeds)),
        *kit.grid(bound, length=LENGTHS, seed=range(seeds)),
        *kit.grid({"part": OUTLIERS, "size": size}, spike=SPIKES, seed=range(seeds)),
    ]


def run(cell: Cell, device: str) -> list[Row]:
    """The row of one part."""
    label = derived_seed(cell["seed"], "batch noise", *(str(value) for value in cell.values()))
    return [PARTS[cell["part"]](cell, np.random.default_rng(label))]


def _hessians(cell: Cell, length: float, rng: np.random.Generator) -> tuple[Array, float]:
    """Each sample's Hessian p(1 − p)·xxᵀ of logistic regression, as (N, elements), and the largest
    L that its gradient needs: ‖x‖²/4.
    """
    count, inputs = cell["population"], cell["inputs"]
    x = length * rng.uniform(-UNIFORM, UNIFORM, (count, inputs))
    logits = x @ rng.standard_normal(inputs)
    outer = x[:, :, None] * x[:, None, :]
    curvature = 1 / (2 + 2 * np.cosh(logits))  # p(1 − p)
    rows, columns = np.triu_indices(inputs)
    hessians = (curvature[:, None, None] * outer)[:, rows, columns]
    return hessians, float(np.square(x).sum(1).max()) / 4


def _noise(hessians: Array, batch: int, count: int, rng: np.random.Generator) -> Array:
    """ε of ``count`` batches drawn without replacement, (count, elements)."""
    whole = hessians.mean(0)
    drawn = (rng.permutation(len(hessians))[:batch] for _ in range(count))
    return np.stack([hessians[chosen].mean(0) - whole for chosen in drawn])


def _elements(cell: Cell, rng: np.random.Generator) -> Row:
    """Mean, variance and law of ε's elements over batches, on average over the elements."""
    hessians, _ = _hessians(cell, 1.0, rng)
    noise = _noise(hessians, cell["batch"], cell["batches"], rng)
    spread, deviation = hessians.var(0, ddof=1), noise.std(0, ddof=1)
    expected = spread * (1 / cell["batch"] - 1 / cell["population"])
    distances = [stats.kstest(part / part.std(ddof=1), "norm").statistic for part in noise.T]
    return {
        "bias": float((noise.mean(0) / deviation).mean()),
        "over printed": float((deviation**2 / expected).mean()),
        "variance": float((deviation**2 / spread).mean()),
        "distance": float(np.mean(distances)),
    }


def _bound(cell: Cell, rng: np.random.Generator) -> Row:
    """The largest |ε_jk| of batches of one sample, over √(PL) and over √P·L."""
    hessians, lipschitz = _hessians(cell, cell["length"], rng)
    largest = float(np.abs(_noise(hessians, 1, cell["batches"], rng)).max())
    root = math.sqrt(cell["inputs"])
    return {
        "printed": largest / (root * math.sqrt(lipschitz)),
        "mended": largest / root / lipschitz,
    }


def _outliers(cell: Cell, rng: np.random.Generator) -> Row:
    """Eigenvalues of A + ε/√P in units of σ_ε, where A has the eigenvalue ``spike`` and, if that is
    the largest, a second.
    """
    size, spike = cell["size"], cell["spike"]
    draw = rng.standard_normal((size, size))
    matrix = (np.triu(draw) + np.triu(draw, 1).T) / math.sqrt(size)
    basis = np.linalg.qr(rng.standard_normal((size, 2)))[0]
    both = np.array([spike, SECOND if spike == max(SPIKES) else 0.0])
    values = np.linalg.eigvalsh(matrix + (basis * both) @ basis.T)
    return {"end": float(values[-1] if spike > 0 else values[0]), "second": float(values[-2])}


PARTS = {ELEMENTS: _elements, LIPSCHITZ: _bound, OUTLIERS: _outliers}


def moved(eigenvalue: float) -> float:
    """λ + 1/λ: where noise of σ_ε = 1 puts an eigenvalue of the full data."""
    return eigenvalue + 1 / eigenvalue


CLAIMS = kit.ClaimTexts(f"""
    mean: the elements of ε have mean 0 (in deviations of an element, over batch sizes)
      | Lemma 12, Eq. 5.5 | 0 | within {BIAS:g} of 0
    variance: the variance of an element is (1/B − 1/N)·Var[∇²ℓ] (share, over batch sizes)
      | Eq. 5.5 | equal | within {CLOSE:g} of 1
    exponent: it is proportional to 1/B − 1/N (exponent)
      | Lemma 12 | 1 | within {EXPONENT:g} of 1
    normal: its distance from the normal law falls with B (exponent)
      | Lemma 12 | to 0 | below
    bound: |ε_jk| is at most √(PL) (largest share, over inputs of any length)
      | Lemma 11 | at most 1 | below 1
    mended: |ε_jk| is at most √P·L, as the lemma's proof has it (largest share)
      | Lemma 11 mended | none: it prints √(PL) | below 1 | | ours
    apart: λ₁ = {SPIKES[0]:g}σ: the largest eigenvalue is λ₁ + σ²/λ₁, within {NEAR:.0%}
      | Theorem 14, Lemma 15 | {moved(SPIKES[0]):.4g} | within
    second: λ₂ = {SECOND:g}σ: the second is λ₂ + σ²/λ₂, within {NEAR:.0%}
      | §5.3, after Theorem 14 | {moved(SECOND):.4g} | within
    least: λ_P = {SPIKES[3]:g}σ: the smallest eigenvalue is λ_P + σ²/λ_P, within {NEAR:.0%}
      | Theorem 14, Lemma 15 | {moved(SPIKES[3]):.4g} | within
    between: λ₁ = {SPIKES[1]:g}σ: the largest eigenvalue is λ₁ + σ²/λ₁, within {NEAR:.0%}
      | Theorem 14 | {moved(SPIKES[1]):.4g} | within
    lemma: λ₁ = {SPIKES[1]:g}σ: the largest eigenvalue is 2σ, within {NEAR:.0%}
      | Lemma 15 | 2 | within
    hidden: λ₁ = {SPIKES[2]:g}σ: the largest eigenvalue is 2σ, within {NEAR:.0%}
      | Theorem 14, Lemma 15 | 2 | within
""")


def claims(rows: Rows) -> Iterator[Claim]:
    """Elements of the noise, their bound, and where eigenvalues of the full data come to lie."""
    elements, bounds = rows.where(part=ELEMENTS), rows.where(part=LIPSCHITZ)
    for key, column in (("mean", "bias"), ("variance", "over printed")):
        yield CLAIMS(key, kit.over_seeds(elements, column))
    yield CLAIMS("exponent", kit.by_seed(elements, _growth))
    yield CLAIMS("normal", kit.exponent(elements, "distance", "batch"))
    for key, column in (("bound", "printed"), ("mended", "mended")):
        yield CLAIMS(key, Reading(max(bounds.values(column)), 0.0))
    above, between, hidden, below = (rows.where(part=OUTLIERS, spike=spike) for spike in SPIKES)
    for key, part, column, place in (
        ("apart", above, "end", moved(SPIKES[0])),
        ("second", above, "second", moved(SECOND)),
        ("least", below, "end", moved(SPIKES[3])),
        ("between", between, "end", moved(SPIKES[1])),
        ("lemma", between, "end", 2.0),
        ("hidden", hidden, "end", 2.0),
    ):
        reading = kit.over_seeds(part, column)
        yield CLAIMS(key, reading, bound=place, margin=NEAR * abs(place))


def _growth(rows: Rows) -> float:
    """The slope of log₁₀ of the variance over log₁₀ of 1/B − 1/N."""
    sizes = [math.log10(1 / row["batch"] - 1 / POPULATION) for row in rows]
    return kit.slope(sizes, np.log10(rows.values("variance")).tolist()).value


def tables(rows: Rows) -> Iterator[Table]:
    """Elements by batch size, the bound by length of inputs, and outliers beside the theorem."""
    columns = {
        "bias": "mean, in deviations",
        "over printed": "variance over that of Eq. 5.5",
        "distance": "distance from the normal law",
    }
    title = f"Elements of ε = H_batch − H_emp, N = {POPULATION:,}"
    yield kit.means_table(title, "B", rows.where(part=ELEMENTS).by("batch"), columns)
    bounds = {"printed": "over √(PL)", "mended": "over √P·L"}
    lengths = rows.where(part=LIPSCHITZ).by("length", "{:g}")
    yield kit.means_table("The largest |ε_jk|, B = 1", "length of inputs", lengths, bounds)
    part, ends = rows.where(part=OUTLIERS), []
    for spike in SPIKES:
        place = moved(spike) if abs(spike) > 1 else 2.0
        seen = kit.over_seeds(part.where(spike=spike), "end")
        ends.append((f"{spike:g}", str(seen), f"{place:.4g}"))
    title = f"The outermost eigenvalue in units of σ_ε, P = {part[0]['size']:,}"
    yield kit.table(title, "λ of the full data | with noise | Theorem 14", ends)


def charts(rows: Rows) -> Iterator[Chart]:
    """The distance from the normal law over B."""
    series = kit.curves({"elements": rows.where(part=ELEMENTS)}, "distance", "batch")
    title = "Elements of the noise and the normal law"
    yield Chart(title, "B", "distance", series, x_log=True, y_log=True, source="Lemma 12")


EXPERIMENT = kit.Experiment(
    "batch-noise",
    "The noise of a batch's Hessian and the eigenvalues that it moves",
    kit.SPECTRAL,
    "§§5.2 and 5.3, Lemmas 11, 12 and 15, Theorem 14",
    {"smoke": cells(2, 200, 100), "cpu": cells(10, 2000, 500), "paper": cells(20, 5000, 1000)},
    *(run, claims, tables, charts),
    kit.sentences(f"""
        Elements are those of logistic regression in 4 dimensions, whose Hessians are known, with
          uniform inputs and N = {POPULATION:,}; batches are drawn without replacement.
        For Lemma 11 the inputs are scaled by {LENGTHS[0]:g} to {LENGTHS[-1]:g}, and L is the
          largest ‖x‖²/4: a bound proportional to √L cannot hold in all units.
        Outliers are those of a matrix of rank 1 or 2 in noise of independent normal elements.
        Lemma 15 has the threshold 2σ, Theorem 14 has σ: between the two, both are judged.
        Margins are {NEAR:.0%} for eigenvalues and {CLOSE:g} elsewhere: set before any run.
    """),
    "no experiment: lemmas and a theorem, of any loss and any noise that meet their conditions.",
)
