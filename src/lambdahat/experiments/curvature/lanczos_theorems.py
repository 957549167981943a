"""Lanczos against power iteration, and what Ritz values are not (§4.4, Table 4.5)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from lambdahat._core.rng import generator
from lambdahat.experiments.kit.cells import Cell, Row, Rows, curve, means, over_seeds
from lambdahat.experiments.kit.claims import (
    Claim,
    Claims,
    Reading,
    Table,
    TableLines,
    paired_difference,
    split_header,
)
from lambdahat.experiments.kit.experiment import SPECTRAL, Experiment, sentences
from lambdahat.krylov import lanczos
from lambdahat.operators import operator
from lambdahat.randommatrix import convergence_terms, lanczos_bound, power_bound
from lambdahat.randommatrix.laws import Law, MarchenkoPastur, Semicircle
from lambdahat.results.charts import Chart, Series

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


@dataclass(frozen=True)
class TheoremScale:
    """One scale: matrices of ``size``, ``steps`` Lanczos steps, ``seeds`` start vectors."""

    size: int
    steps: int
    seeds: int


def cells(config: TheoremScale) -> list[Cell]:
    """The table; then, by seed, convergence at each ratio, the shift, two spectra's top pairs."""
    found: list[Cell] = [{"part": "table"}]
    base = {"size": config.size, "steps": config.steps}
    for seed in range(config.seeds):
        found += [
            {"part": "convergence", "ratio": ratio, "size": config.size, "seed": seed}
            for ratio in PRINTED
        ]
        found.append({"part": "shift", **base, "seed": seed})
        found += [{"part": "top", "spectrum": name, **base, "seed": seed} for name in SPECTRA]
    return found


def run(cell: Cell, device: str) -> list[Row]:
    """The rows of one part."""
    return PARTS[cell["part"]](cell, device)


def _table(_: Cell, __: str) -> list[Row]:
    rows = []
    for ratio, printed in PRINTED.items():
        for depth, (lanczos_printed, power_printed) in zip(DEPTHS, printed, strict=True):
            ours, power = convergence_terms(ratio, depth)
            rows.append(
                {
                    "ratio": ratio,
                    "depth": depth,
                    "L": ours,
                    "R": power,
                    "R of Theorem 5": ratio ** -(2 * depth - 1.0),
                    "L printed": lanczos_printed,
                    "R printed": power_printed,
                }
            )
    return rows


def _convergence(cell: Cell, device: str) -> list[Row]:
    """Relative errors of λ₁ by m Lanczos steps and by the Rayleigh quotient of Hᵐ⁻¹v."""
    values = torch.linspace(0, 1, cell["size"] - 1, dtype=torch.float64)
    values = torch.cat([values, torch.tensor([cell["ratio"]], dtype=torch.float64)]).to(device)
    start = unit_start(len(values), cell["seed"], "convergence", cell["ratio"]).to(device)
    steps = lanczos(operator(torch.diag(values)), start, max(DEPTHS))
    overlap, exact = float(start[-1].abs()), values.cpu().numpy()
    rows = []
    for depth in DEPTHS:
        powered = start * values ** (depth - 1)
        quotient = float((powered**2 * values).sum() / (powered**2).sum())
        found = {"Lanczos": float(steps.ritz(depth)[0].max()), "power": quotient}
        bounds = {
            "Lanczos": lanczos_bound(exact, overlap, depth),
            "power": power_bound(exact, overlap, depth - 1),
        }
        rows += [
            {
                "depth": depth,
                "method": name,
                "error": _relative(cell["ratio"], value),
                "bound": _relative(cell["ratio"], bounds[name]),
            }
            for name, value in found.items()
        ]
    return rows


def _relative(exact: float, found: float) -> float:
    return max((exact - found) / exact, ROUNDING)


def _shift(cell: Cell, device: str) -> list[Row]:
    """How far the Ritz values of −H + μI are from μ minus those of H, from one start."""
    matrix = torch.diag(known_values(cell["size"], cell["seed"])).to(device)
    start = unit_start(cell["size"], cell["seed"], "shift").to(device)
    offset = float(matrix.max()) * (
        1 + float(torch.rand((), generator=generator(cell["seed"], "offset")))
    )
    plain = lanczos(operator(matrix), start, cell["steps"]).ritz()
    turned = lanczos(
        operator(offset * torch.eye(len(matrix)).to(matrix) - matrix), start, cell["steps"]
    ).ritz()
    gap = (turned[0].flip(0) - (offset - plain[0])).abs().max() / matrix.abs().max()
    weights = (turned[1].flip(0) - plain[1]).abs().max()
    return [{"offset": offset, "gap": float(gap), "weight gap": float(weights)}]


def _doubtful_values(size: int, seed: int) -> Tensor:
    """A spectrum that meets the condition of Theorem 8 at m = 2 with positive shifted trace."""
    rest = 1 + 1e-3 * torch.rand(
        size - 1, generator=generator(seed, "doubtful"), dtype=torch.float64
    )
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


def claims(rows: Rows) -> list[Claim]:
    """The printed table, what was measured beside it, and Theorems 7 and 8."""
    return [
        *_table_claims(rows.where(part="table")),
        *_measured_claims(rows.where(part="convergence")),
        *_shift_claims(rows.where(part="shift")),
        *_top_claims(rows.where(part="top")),
    ]


def _table_claims(rows: Rows) -> list[Claim]:
    edges = {(row["ratio"], row["depth"]): math.log10(row["R"] / row["L"]) for row in rows}
    growth = [
        edges[ratio, after] - edges[ratio, before]
        for ratio in PRINTED
        for before, after in pairwise(DEPTHS)
    ]
    ratios = sorted(PRINTED, reverse=True)
    loss = [
        edges[wide, depth] - edges[narrow, depth]
        for depth in DEPTHS
        for wide, narrow in pairwise(ratios)
    ]
    terms = (
        ("the terms L of Theorem 4 are those printed (at worst)", "Theorem 4, Table 4.5", "L"),
        (
            "the terms R of Theorem 5 are those printed (at worst)",
            "Theorem 5, Table 4.5",
            "R of Theorem 5",
        ),
        (
            (
                "the terms R with the exponent 2(m − 1) for Theorem 5's 2m − 1 are those printed"
                " (at worst)"
            ),
            "Table 4.5",
            "R",
        ),
    )
    found = Claims(
        (
            Claim(
                sentence,
                source,
                "12 numbers",
                _exact(max(_misses(rows, name))),
                "below",
                DIGITS,
                unit=" decades",
                own=name == "R",
            )
            for sentence, source, name in terms
        )
    )
    text = "the bound of Lanczos is always below that of power iteration (least log₁₀ R/L)"
    found.add(text, "Table 4.5", "always", _exact(min(edges.values())))
    text = "the edge of the Lanczos bound grows with m (least growth of log₁₀ R/L)"
    found.add(text, "Table 4.5", "it grows", _exact(min(growth)))
    text = "a smaller gap reduces the edge of the Lanczos bound (least loss of log₁₀ R/L)"
    found.add(text, "Table 4.5", "it is reduced", _exact(min(loss)))
    return found


def _exact(value: float) -> Reading:
    return Reading(value, 0.0)


def _misses(rows: Rows, name: str) -> list[float]:
    """Distances of our terms to the printed ones, in decades."""
    return [abs(math.log10(row[name] / row[f"{name[0]} printed"])) for row in rows]


def _measured_claims(rows: Rows) -> list[Claim]:
    found = Claims()
    for ratio in PRINTED:
        part = rows.where(ratio=ratio, depth=max(DEPTHS))
        power, krylov = (_logs(part.where(method=name)) for name in ("power", "Lanczos"))
        sentence = (
            f"λ₁/λ₂ = {ratio:g}: after m = {max(DEPTHS)} products Lanczos is closer to λ₁ than"
            " power iteration"
        )
        published = "far superior"
        found.add(sentence, "§4.4.1", published, paired_difference(power, krylov), unit=" decades")
    for name, theorem in (("Lanczos", "Theorem 4"), ("power", "Theorem 5")):
        part = rows.where(method=name)
        over = max(math.log10(row["error"] / max(row["bound"], ROUNDING)) for row in part)
        sentence = f"the error of {name} is within its bound (largest log₁₀ of error over bound)"
        found.append(Claim(sentence, theorem, "a bound", _exact(over), "below", 1e-6))
    return found


def _logs(rows: Rows) -> dict[int, float]:
    return {seed: math.log10(value) for seed, value in rows.paired("error").items()}


def _shift_claims(rows: Rows) -> list[Claim]:
    found = Claims()
    for name, words in (
        ("gap", "turns the Ritz values θ into μ − θ"),
        ("weight gap", "leaves the weights of the Ritz values"),
    ):
        sentence = f"H → −H + μI {words}, and so learns nothing new (at worst)"
        found.add(sentence, "Theorem 7", "exactly", _exact(max(rows.values(name))), "below", NEW)
    return found


def _top_claims(rows: Rows) -> list[Claim]:
    known, doubtful = (rows.where(spectrum=name) for name in SPECTRA)
    found = Claims(_theorem_claims(known, "spectrum like a network's"))
    sentence = (
        "the smallest Ritz value is near the smallest eigenvalue λ_P, in widths of the spectrum"
    )
    source = "§4.4.4, Figure 4.3c"
    found.add(sentence, source, "captured", over_seeds(known, "low end"), "below", 0.05)
    sentence = (
        "where Σ_{i≤m} λ_i < Σ_{i>m} λ_i the shifted trace is negative (P − 5, and P − 1 near"
        " 1; m = 2)"
    )
    source = "proof of Theorem 8"
    found.add(sentence, source, "negative", over_seeds(doubtful, "shifted trace"), "below")
    found += _theorem_claims(doubtful, "one large eigenvalue")
    return found


def _theorem_claims(rows: Rows, what: str) -> list[Claim]:
    """Theorem 8: exactly, and to the share of the width at which an eigenvalue counts as found."""
    depth, met = rows[0]["m"], all(rows.values("condition"))
    unmet = "" if met else "Σ_{i≤m} λ_i is not below Σ_{i>m} λ_i"
    found = Claims(unmet=unmet)
    sentence = (
        f"{what}: m = {depth} Ritz values are not the m largest eigenvalues: the smallest lies"
        " below λ_m, in widths of the spectrum"
    )
    found.add(sentence, "Theorem 8", "they are not", over_seeds(rows, "below"))
    sentence = (
        f"{what}: the m = {depth} largest eigenvalues are not all found to {FOUND:g} of the"
        " width (number found)"
    )
    published = "cannot approximately match"
    found.add(sentence, "§4.4.4", published, over_seeds(rows, "found"), "below", depth - 0.5)
    return found


def tables(rows: Rows) -> list[Table]:
    """Table 4.5 with the measured errors, and the top pairs."""
    return [_error_table(rows), _top_table(rows.where(part="top"))]


def _error_table(rows: Rows) -> Table:
    lines = TableLines()
    for row in rows.where(part="table"):
        part = rows.where(part="convergence", ratio=row["ratio"], depth=row["depth"])
        errors = [f"{_middle(part.where(method=name)):.1e}" for name in ("Lanczos", "power")]
        lines.add(
            f"{row['ratio']:g}",
            str(row["depth"]),
            f"{row['L']:.1e} / {row['R']:.1e}",
            f"{row['L printed']:.1e} / {row['R printed']:.1e}",
            " / ".join(errors),
        )
    header = ("λ₁/λ₂", "m", "L / R", "printed", "errors measured, Lanczos / power")
    return Table(
        "Terms of the bounds, and relative errors of λ₁ (median over starts)", header, tuple(lines)
    )


def _top_table(rows: Rows) -> Table:
    lines = TableLines()
    for name in SPECTRA:
        part = rows.where(spectrum=name)
        readings = means(part, "found", "below", "low end", "shifted trace")
        lines.add(
            name,
            str(part[0]["m"]),
            "met" if all(part.values("condition")) else "not met",
            *readings,
        )
    header = split_header(
        "spectrum | m | condition of Theorem 8 | of the top m found | λ_m − θ_m | θ_m − λ_P | "
        "shifted trace"
    )
    return Table(
        "Ritz values and the largest eigenvalues, in widths of the spectrum", header, tuple(lines)
    )


def _middle(rows: Rows) -> float:
    return float(torch.tensor(rows.values("error"), dtype=torch.float64).median())


def charts(rows: Rows) -> list[Chart]:
    """Errors over m for each gap, and the terms of the bounds."""
    part, table = rows.where(part="convergence"), rows.where(part="table")
    errors = tuple(
        curve(f"{name}, λ₁/λ₂ = {ratio:g}", part.where(ratio=ratio, method=name), "error", "depth")
        for ratio in PRINTED
        for name in ("Lanczos", "power")
    )
    terms = []
    for ratio in PRINTED:
        chosen = table.where(ratio=ratio)
        for letter, name in (("L", "Lanczos"), ("R", "power")):
            label = f"{name}, λ₁/λ₂ = {ratio:g}"
            terms.append(Series(label, DEPTHS, chosen.values(letter)))
            heights = chosen.values(f"{letter} printed")
            terms.append(
                Series(f"{label}, printed", DEPTHS, heights, style="points", published=True)
            )
    out = []
    title = "Error of the largest eigenvalue"
    out.append(Chart(title, "m", "(λ₁ − θ₁)/λ₁", errors, y_log=True, source="§4.4.1"))
    title = "Terms of the bounds"
    out.append(Chart(title, "m", "L, R", tuple(terms), y_log=True, source="Table 4.5"))
    return out


EXPERIMENT = Experiment(
    "lanczos-theorems",
    "Lanczos against power iteration, and Ritz values beside the largest eigenvalues",
    SPECTRAL,
    "§4.4, Table 4.5",
    {
        "smoke": TheoremScale(200, 20, 3),
        "cpu": TheoremScale(1000, 30, 20),
        "paper": TheoremScale(1000, 30, 100),
    },
    *(cells, run, claims, tables, charts),
    sentences(f"""
        Convergence: λ₁ = λ₁/λ₂, the other eigenvalues evenly on [0, 1]; starts uniform on the
          sphere; float64.
        Both methods have the same m vectors v, Hv, …, Hᵐ⁻¹v, and one product more for the quotient.
        A spectrum like a network's: 47 % on [0, 15], 2 % on [0, 60], 1 % on [−10, 0], the rest at 0
          (§4.5.2).
        An eigenvalue is found if a Ritz value is within {FOUND:g} of the spectrum's width.
        One large eigenvalue: P − 5, and P − 1 near 1, at m = 2; that its two are found was asked
          after the runs.
    """),
    size="bounds and their proofs; Table 4.5 has their terms.",
)
