"""Lanczos against power iteration, and what Ritz values are not (§4.4, Table 4.5)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from lambdahat._core.rng import generator
from lambdahat.experiments import kit
from lambdahat.experiments.kit import Cell, Chart, Claim, Reading, Row, Rows, Series, Table
from lambdahat.krylov import lanczos
from lambdahat.operators import operator
from lambdahat.randommatrix import convergence_terms, lanczos_bound, power_bound
from lambdahat.randommatrix.laws import Law, MarchenkoPastur, Semicircle

WIGNER = "Wigner"
LAWS: dict[str, Law] = {
    WIGNER: Semicircle(1.0),
    "covariance, T = 2P": MarchenkoPastur(1.0, 0.5),
    "covariance, T = P/2": MarchenkoPastur(1.0, 2.0),
}
KNOWN = "known spectrum"
# of the eigenvalues, uniform on an interval
SHARES = ((0.47, 0.0, 15.0), (0.02, 0.0, 60.0), (0.01, -10.0, 0.0))


def known_values(size: int, seed: int) -> Tensor:
    """Eigenvalues (P,) of §4.5.2: of 1,000, 470 on [0, 15], 20 on [0, 60], 10 on [−10, 0]."""
    rng = generator(seed, "known spectrum")
    parts = [
        low + (high - low) * torch.rand(round(share * size), generator=rng, dtype=torch.float64)
        for share, low, high in SHARES
    ]
    values = torch.cat(parts)
    return torch.cat([values, torch.zeros(size - len(values), dtype=torch.float64)])


def known_matrix(size: int, seed: int) -> tuple[Tensor, Tensor]:
    """The eigenvalues and the matrix (P, P) with these in a random basis."""
    values = known_values(size, seed)
    draw = torch.randn(size, size, generator=generator(seed, "basis"), dtype=torch.float64)
    basis = torch.linalg.qr(draw).Q
    return values, _symmetric((basis * values) @ basis.T)


def law_matrix(name: str, size: int, seed: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """A random matrix (P, P) of one of ``LAWS`` and its eigenvalues, computed on ``device``."""
    matrix = _wigner(size, seed) if name == WIGNER else _symmetric(LAWS[name].sample(size, seed))
    return torch.linalg.eigvalsh(matrix.to(device)).cpu(), matrix


def _wigner(size: int, seed: int) -> Tensor:
    """Elements of variance 1/P, as in the thesis; the law's sample has 2/P on the diagonal."""
    draw: Tensor = torch.randn(size, size, generator=generator(seed, "wigner"), dtype=torch.float64)
    return draw.triu().add(draw.triu(1).T).div(math.sqrt(size))


def unit_start(size: int, seed: int, *names: object) -> Tensor:
    """A start vector (P,), uniform on the sphere."""
    draw = torch.randn(size, generator=generator(seed, "start", *names), dtype=torch.float64)
    return torch.nn.functional.normalize(draw, dim=0)


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.T) / 2


DEPTHS = (5, 10, 15, 20)
# λ₁/λ₂: the terms L and R of the bounds at each of DEPTHS
PRINTED = {
    1.5: ((1.1e-4, 3.9e-2), (2e-10, 6.8e-4), (3.9e-16, 1.2e-5), (7.4e-22, 2.0e-7)),
    1.1: ((2.7e-2, 4.7e-1), (5.5e-5, 1.8e-1), (1.1e-7, 6.9e-2), (2.1e-10, 2.7e-2)),
    1.01: ((5.6e-1, 9.2e-1), (1.0e-1, 8.4e-1), (1.5e-2, 7.6e-1), (2.0e-3, 6.9e-1)),
}
ROUNDING = 1e-15  # of λ₁ − λ_P, below which an error is not measured
DIGITS = 0.03  # decades: two printed digits
NEW = 1e-8  # of the norm: more would be new Ritz values
FOUND = 1e-3  # of the range: an eigenvalue is found by a Ritz value as near


def cells(size: int, steps: int, seeds: int) -> list[Cell]:
    """The table; then, by seed, convergence at each ratio, the shift, two spectra's top pairs.

    Matrices of ``size``, ``steps`` Lanczos steps, ``seeds`` start vectors.
    """
    grid: list[Cell] = [{"part": "table"}]
    base = {"size": size, "steps": steps}
    for seed in range(seeds):
        convergence = {"part": "convergence", "size": size, "seed": seed}
        grid += kit.grid(convergence, ratio=PRINTED)
        grid.append({"part": "shift", **base, "seed": seed})
        grid += kit.grid({"part": "top", **base, "seed": seed}, spectrum=SPECTRA)
    return grid


def run(cell: Cell, device: str) -> list[Row]:
    """The rows of one part."""
    return PARTS[cell["part"]](cell, device)


def _table(_: Cell, __: str) -> list[Row]:
    rows = []
    for ratio, printed in PRINTED.items():
        for depth, (lanczos_printed, power_printed) in zip(DEPTHS, printed, strict=True):
            ours, power = convergence_terms(ratio, depth)
            row = {"ratio": ratio, "depth": depth, "L": ours, "R": power}
            row["R of Theorem 5"] = ratio ** -(2 * depth - 1.0)
            rows.append({**row, "L printed": lanczos_printed, "R printed": power_printed})
    return rows


def _convergence(cell: Cell, device: str) -> list[Row]:
    """Relative errors of λ₁ by m Lanczos steps and by the Rayleigh quotient of Hᵐ⁻¹v."""
    top = cell["ratio"]
    values = torch.linspace(0, 1, cell["size"] - 1, dtype=torch.float64)
    values = torch.cat([values, torch.tensor([top], dtype=torch.float64)]).to(device)
    start = unit_start(len(values), cell["seed"], "convergence", top).to(device)
    steps = lanczos(operator(torch.diag(values)), start, max(DEPTHS))
    overlap, exact = float(start[-1].abs()), values.cpu().numpy()
    rows = []
    for depth in DEPTHS:
        powered = start * values ** (depth - 1)
        quotient = float((powered**2 * values).sum() / (powered**2).sum())
        largest = float(steps.ritz(depth)[0].max())
        for name, value, bound in (
            ("Lanczos", largest, lanczos_bound(exact, overlap, depth)),
            ("power", quotient, power_bound(exact, overlap, depth - 1)),
        ):
            error, limit = (max((top - estimate) / top, ROUNDING) for estimate in (value, bound))
            rows.append({"depth": depth, "method": name, "error": error, "bound": limit})
    return rows


def _shift(cell: Cell, device: str) -> list[Row]:
    """How far the Ritz values of −H + μI are from μ minus those of H, from one start."""
    seed, steps = cell["seed"], cell["steps"]
    matrix = torch.diag(known_values(cell["size"], seed)).to(device)
    start = unit_start(cell["size"], seed, "shift").to(device)
    offset = float(matrix.max()) * (1 + float(torch.rand((), generator=generator(seed, "offset"))))
    plain = lanczos(operator(matrix), start, steps).ritz()
    shifted = offset * torch.eye(len(matrix)).to(matrix) - matrix
    turned = lanczos(operator(shifted), start, steps).ritz()
    gap = (turned[0].flip(0) - (offset - plain[0])).abs().max() / matrix.abs().max()
    weights = (turned[1].flip(0) - plain[1]).abs().max()
    return [{"offset": offset, "gap": float(gap), "weight gap": float(weights)}]


def _doubtful_values(size: int, seed: int) -> Tensor:
    """A spectrum that meets the condition of Theorem 8 at m = 2 with positive shifted trace."""
    rng = generator(seed, "doubtful")
    rest = 1 + 1e-3 * torch.rand(size - 1, generator=rng, dtype=torch.float64)
    return torch.cat([rest, torch.tensor([size - 5.0], dtype=torch.float64)])


SPECTRA = {"like a network's": known_values, "one large": _doubtful_values}


def _top(cell: Cell, device: str) -> list[Row]:
    """Ritz values beside the m largest eigenvalues, and the shifted trace of Theorem 8's proof."""
    values = SPECTRA[cell["spectrum"]](cell["size"], cell["seed"]).sort(descending=True).values
    steps = cell["steps"] if cell["spectrum"] == "like a network's" else 2
    start = unit_start(len(values), cell["seed"], "top").to(device)
    ritz = lanczos(operator(torch.diag(values).to(device)), start, steps).ritz()[0].flip(0).cpu()
    span = float(values[0] - values[-1])
    nearest = (values[:steps, None] - ritz).abs().min(1).values
    middle = float(values[steps - 1] + values[steps]) / 2
    return [
        {
            "m": steps,
            "condition": bool(values[:steps].sum() < values[steps:].sum()),
            "shifted trace": float((values - middle).sum()) / span,
            "found": int((nearest <= FOUND * span).sum()),
            "below": float(values[steps - 1] - ritz[-1]) / span,
            "low end": float(ritz[-1] - values[-1]) / span,
        }
    ]


PARTS = {"table": _table, "convergence": _convergence, "shift": _shift, "top": _top}


CLAIMS = kit.ClaimTexts(f"""
    L: the terms L of Theorem 4 are those printed (at worst)
      | Theorem 4, Table 4.5 | 12 numbers | below {DIGITS:g} | decades
    R of Theorem 5: the terms R of Theorem 5 are those printed (at worst)
      | Theorem 5, Table 4.5 | 12 numbers | below {DIGITS:g} | decades
    R: the terms R with the exponent 2(m − 1) for Theorem 5's 2m − 1 are those printed (at worst)
      | Table 4.5 | 12 numbers | below {DIGITS:g} | decades | ours
    below: the bound of Lanczos is always below that of power iteration (least log₁₀ R/L)
      | Table 4.5 | always
    growth: the edge of the Lanczos bound grows with m (least growth of log₁₀ R/L)
      | Table 4.5 | it grows
    loss: a smaller gap reduces the edge of the Lanczos bound (least loss of log₁₀ R/L)
      | Table 4.5 | it is reduced
    closer: λ₁/λ₂ = {{ratio:g}}: after m = {max(DEPTHS)} products Lanczos is closer to λ₁ than power
      iteration | §4.4.1 | far superior | above | decades
    bounded: the error of {{name}} is within its bound (largest log₁₀ of error over bound)
      | {{theorem}} | a bound | below 1e-6
    gap: H → −H + μI turns the Ritz values θ into μ − θ, and so learns nothing new (at worst)
      | Theorem 7 | exactly | below {NEW:g}
    weight gap: H → −H + μI leaves the weights of the Ritz values, and so learns nothing new (at
      worst) | Theorem 7 | exactly | below {NEW:g}
    smallest: the smallest Ritz value is near the smallest eigenvalue λ_P, in widths of the spectrum
      | §4.4.4, Figure 4.3c | captured | below 0.05
    trace: where Σ_{{{{i≤m}}}} λ_i < Σ_{{{{i>m}}}} λ_i the shifted trace is negative (P − 5, and P −
      1 near 1; m = 2) | proof of Theorem 8 | negative | below
    not the largest: {{what}}: m = {{depth}} Ritz values are not the m largest eigenvalues: the
      smallest lies below λ_m, in widths of the spectrum | Theorem 8 | they are not
    not found: {{what}}: the m = {{depth}} largest eigenvalues are not all found to {FOUND:g} of the
      width (number found) | §4.4.4 | cannot approximately match | below
""")


def claims(rows: Rows) -> Iterator[Claim]:
    """The printed table, what was measured beside it, and Theorems 7 and 8."""
    yield from _table_claims(rows.where(part="table"))
    yield from _measured_claims(rows.where(part="convergence"))
    for name in ("gap", "weight gap"):
        yield CLAIMS(name, Reading(max(rows.where(part="shift").values(name)), 0.0))
    known, doubtful = (rows.where(part="top", spectrum=name) for name in SPECTRA)
    yield from _top_claims(known, "spectrum like a network's")
    yield CLAIMS("smallest", kit.over_seeds(known, "low end"))
    yield CLAIMS("trace", kit.over_seeds(doubtful, "shifted trace"))
    yield from _top_claims(doubtful, "one large eigenvalue")


def _table_claims(rows: Rows) -> Iterator[Claim]:
    for name in ("L", "R of Theorem 5", "R"):
        # distances of our terms to the printed ones
        misses = [abs(math.log10(row[name] / row[f"{name[0]} printed"])) for row in rows]
        yield CLAIMS(name, Reading(max(misses), 0.0))
    edges = {(row["ratio"], row["depth"]): math.log10(row["R"] / row["L"]) for row in rows}
    ratios, depths = list(pairwise(sorted(PRINTED, reverse=True))), list(pairwise(DEPTHS))
    growth = (edges[ratio, more] - edges[ratio, few] for ratio in PRINTED for few, more in depths)
    loss = (
        edges[wide, depth] - edges[narrow, depth] for depth in DEPTHS for wide, narrow in ratios
    )
    for key, values in (("below", edges.values()), ("growth", growth), ("loss", loss)):
        yield CLAIMS(key, Reading(min(values), 0.0))


def _measured_claims(rows: Rows) -> Iterator[Claim]:
    for ratio in PRINTED:
        part = rows.where(ratio=ratio, depth=max(DEPTHS))
        power, krylov = (part.where(method=name) for name in ("power", "Lanczos"))
        yield CLAIMS("closer", kit.decades(power, krylov, "error"), ratio=ratio)
    for name, theorem in (("Lanczos", "Theorem 4"), ("power", "Theorem 5")):
        part = rows.where(method=name)
        over = max(math.log10(row["error"] / max(row["bound"], ROUNDING)) for row in part)
        yield CLAIMS("bounded", Reading(over, 0.0), name=name, theorem=theorem)


def _top_claims(rows: Rows, what: str) -> Iterator[Claim]:
    """Theorem 8: exactly, and to the share of the width at which an eigenvalue counts as found."""
    depth = rows[0]["m"]
    unmet = "" if all(rows.values("condition")) else "Σ_{i≤m} λ_i is not below Σ_{i>m} λ_i"
    claim = partial(CLAIMS, what=what, depth=depth, unmet=unmet)
    yield claim("not the largest", kit.over_seeds(rows, "below"))
    yield claim("not found", kit.over_seeds(rows, "found"), bound=depth - 0.5)


def tables(rows: Rows) -> Iterator[Table]:
    """Table 4.5 with the measured errors, and the top pairs."""
    lines = []
    for row in rows.where(part="table"):
        part, errors = rows.where(part="convergence", ratio=row["ratio"], depth=row["depth"]), []
        for name in ("Lanczos", "power"):
            values = torch.tensor(part.where(method=name).values("error"), dtype=torch.float64)
            errors.append(f"{float(values.median()):.1e}")
        terms = (f"{row['L' + tail]:.1e} / {row['R' + tail]:.1e}" for tail in ("", " printed"))
        lines.append((f"{row['ratio']:g}", str(row["depth"]), *terms, " / ".join(errors)))
    header = ("λ₁/λ₂", "m", "L / R", "printed", "errors measured, Lanczos / power")
    title = "Terms of the bounds, and relative errors of λ₁ (median over starts)"
    yield kit.table(title, header, lines)
    lines = []
    for name in SPECTRA:
        part = rows.where(part="top", spectrum=name)
        readings = kit.means(part, "found", "below", "low end", "shifted trace")
        condition = "met" if all(part.values("condition")) else "not met"
        lines.append((name, str(part[0]["m"]), condition, *readings))
    columns = (
        "spectrum | m | condition of Theorem 8 | of the top m found | λ_m − θ_m | θ_m − λ_P | "
        "shifted trace"
    )
    title = "Ritz values and the largest eigenvalues, in widths of the spectrum"
    yield kit.table(title, columns, lines)


def charts(rows: Rows) -> Iterator[Chart]:
    """Errors over m for each gap, and the terms of the bounds."""
    errors, terms = [], []
    for ratio in PRINTED:
        part = rows.where(part="convergence", ratio=ratio)
        table = rows.where(part="table", ratio=ratio)
        for letter, name in (("L", "Lanczos"), ("R", "power")):
            label = f"{name}, λ₁/λ₂ = {ratio:g}"
            errors.append(kit.curve(label, part.where(method=name), "error", "depth"))
            terms.append(Series(label, DEPTHS, table.values(letter)))
            printed = DEPTHS, table.values(f"{letter} printed")
            terms.append(Series(f"{label}, printed", *printed, style="points", published=True))
    title = "Error of the largest eigenvalue"
    yield Chart(title, "m", "(λ₁ − θ₁)/λ₁", tuple(errors), y_log=True, source="§4.4.1")
    yield Chart("Terms of the bounds", "m", "L, R", tuple(terms), y_log=True, source="Table 4.5")


EXPERIMENT = kit.Experiment(
    "lanczos-theorems",
    "Lanczos against power iteration, and Ritz values beside the largest eigenvalues",
    kit.SPECTRAL,
    "§4.4, Table 4.5",
    {
        "smoke": cells(200, 20, seeds=3),
        "cpu": cells(1000, 30, seeds=20),
        "paper": cells(1000, 30, seeds=100),
    },
    *(run, claims, tables, charts),
    kit.sentences(f"""
        Convergence: λ₁ = λ₁/λ₂, the other eigenvalues evenly on [0, 1]; starts uniform on the
          sphere; float64.
        Both methods use the same m vectors v, Hv, …, Hᵐ⁻¹v, and one more product for the quotient.
        A spectrum like a network's: 47 % on [0, 15], 2 % on [0, 60], 1 % on [−10, 0], the rest at 0
          (§4.5.2).
        An eigenvalue is found if a Ritz value is within {FOUND:g} of the spectrum's width.
        One large eigenvalue: P − 5, and P − 1 near 1, at m = 2; the claim that both eigenvalues are
          found was added after the runs.
    """),
    "bounds and their proofs; Table 4.5 has their terms.",
)
