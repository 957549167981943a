"""Known matrices: their spectra, Lanczos and power iteration beside dense answers, and the
claims about them.
"""

import math
from itertools import product

import numpy as np
import pytest
import torch

from lambdahat.experiments.curvature import lanczos_densities, lanczos_theorems
from lambdahat.experiments.curvature.lanczos_theorems import (
    KNOWN,
    LAWS,
    WIGNER,
    known_matrix,
    known_values,
    law_matrix,
    unit_start,
)
from lambdahat.experiments.kit.claims import UNTESTED
from tests.experiments.curvature.verdicts import BOTH, SEEDS, jitter, verdicts_of


def test_the_known_spectrum_has_the_parts_of_the_thesis():
    values = known_values(1000, 3)
    assert int((values == 0).sum()) == 500
    assert int((values < 0).sum()) == 10
    assert float(values.min()) > -10
    assert 15 < float(values.max()) < 60
    found = torch.linalg.eigvalsh(known_matrix(100, 3)[1])
    torch.testing.assert_close(found, known_values(100, 3).sort().values, atol=1e-12, rtol=0)


def test_wigner_elements_have_one_variance_on_the_diagonal_too():
    values, matrix = law_matrix(WIGNER, 300, 0)
    assert torch.equal(matrix, matrix.T)
    assert float(matrix.diagonal().var()) * 300 == pytest.approx(1, abs=0.25)
    assert float(matrix.triu(1).square().sum()) * 2 / 299 == pytest.approx(1, abs=0.02)
    torch.testing.assert_close(values.square().sum(), matrix.square().sum())


def test_starts_are_unit_vectors_of_their_seed():
    start = unit_start(50, 1, "a")
    assert float(start.norm()) == pytest.approx(1)
    assert torch.equal(start, unit_start(50, 1, "a"))
    assert not torch.equal(start, unit_start(50, 2, "a"))


def test_errors_are_those_of_the_dense_krylov_space():
    """Lanczos is Rayleigh–Ritz on span(v, …, Hᵐ⁻¹v); power iteration the quotient of its last
    vector.
    """
    cell = {"part": "convergence", "ratio": 1.1, "size": 40, "seed": 5}
    rows = {(row["method"], row["depth"]): row for row in lanczos_theorems.run(cell, "cpu")}
    values = torch.cat(
        [torch.linspace(0, 1, 39, dtype=torch.float64), torch.tensor([1.1], dtype=torch.float64)]
    )
    start = unit_start(40, 5, "convergence", 1.1)
    space = torch.linalg.qr(torch.stack([start * values**power for power in range(5)], 1)).Q
    best = float(torch.linalg.eigvalsh(space.T @ (values[:, None] * space)).max())
    last = start * values**4
    quotient = float((last**2 * values).sum() / (last**2).sum())
    assert rows["Lanczos", 5]["error"] == pytest.approx((1.1 - best) / 1.1, rel=1e-9)
    assert rows["power", 5]["error"] == pytest.approx((1.1 - quotient) / 1.1, rel=1e-9)
    assert all(row["error"] <= row["bound"] * (1 + 1e-9) + 1e-15 for row in rows.values())


def test_a_shift_learns_nothing_new_to_rounding():
    row = lanczos_theorems.run({"part": "shift", "size": 80, "steps": 15, "seed": 2}, "cpu")[0]
    assert row["gap"] < 1e-12
    assert row["weight gap"] < 1e-12
    assert row["offset"] > 0


def test_the_condition_of_theorem_8_does_not_make_its_trace_negative():
    row = lanczos_theorems.run(
        {"part": "top", "spectrum": "one large", "size": 100, "steps": 9, "seed": 0}, "cpu"
    )[0]
    assert row["condition"]
    assert row["shifted trace"] > 0
    assert row["below"] > 0


def theorem_rows(right):
    """Rows as they would be if the thesis were right everywhere, or wrong."""
    rows = [{"part": "table", **row} for row in lanczos_theorems.run({"part": "table"}, "cpu")]
    for row in rows:
        row["R of Theorem 5"] = row["R printed"] if right else 2 * row["R printed"]
        if not right:
            grows = row["ratio"] == 1.5  # a wider gap helps less, and less the longer
            row |= {"L": 2.0 * row["depth"], "R": 1.0 if grows else 1.5}
    for seed in range(SEEDS):
        for ratio in lanczos_theorems.PRINTED:
            base = {
                "part": "convergence",
                "ratio": ratio,
                "depth": 20,
                "seed": seed,
                "bound": 1e-2 if right else 1e-9,
            }
            rows += [
                {**base, "method": name, "error": error * (1 + jitter(seed))}
                for name, error in (("Lanczos", 1e-6), ("power", 1e-3 if right else 1e-8))
            ]
        rows.append(
            {
                "part": "shift",
                "seed": seed,
                **dict.fromkeys(("gap", "weight gap"), 1e-12 if right else 1e-2),
            }
        )
        rows += [
            {
                "part": "top",
                "spectrum": name,
                "seed": seed,
                "m": 30,
                "condition": True,
                "shifted trace": (-1 if right else 1) + jitter(seed),
                "found": 10 if right else 40,
                "below": (0.3 if right else -0.3) + jitter(seed),
                "low end": (0.01 if right else 0.3) + jitter(seed),
            }
            for name in lanczos_theorems.SPECTRA
        ]
    return rows


@pytest.mark.parametrize(("right", "expected"), BOTH)
def test_claims_on_lanczos_follow_from_rows(right, expected):
    found = verdicts_of(lanczos_theorems, theorem_rows(right))
    assert len(found) == 19
    assert set(found.values()) == {expected}


def test_theorem_8_is_not_asked_of_a_spectrum_that_does_not_meet_its_condition():
    rows = [
        {**row, "condition": False} if row.get("spectrum") == "one large" else row
        for row in theorem_rows(True)
    ]
    found = {
        claim: verdict
        for claim, verdict in verdicts_of(lanczos_theorems, rows).items()
        if verdict == UNTESTED
    }
    assert len(found) == 2
    assert all(claim.startswith("one large eigenvalue: ") for claim in found)


def test_a_spectrum_has_no_distance_to_itself_and_c_to_itself_moved_by_c():
    exact = np.linspace(-1, 3, 50)
    weights = np.full(50, 1 / 50)
    same, moved = (
        lanczos_densities._distances(exact, exact, weights),
        lanczos_densities._distances(exact, exact + 0.2, weights),
    )
    assert same["distance"] == pytest.approx(0, abs=1e-12)
    assert same["support"] == 0
    assert moved["distance"] == pytest.approx(0.05)
    assert moved["support"] == pytest.approx(0.05)


def test_mass_at_zero_and_outliers_are_counted():
    exact = np.concatenate([np.zeros(50), np.full(48, 1.0), [20.0, 30.0]])
    row = lanczos_densities._distances(
        exact, np.array([0.0, 1.0, 30.1]), np.array([0.5, 0.48, 0.02])
    )
    assert row["at zero"] == 0.5
    assert (row["outliers"], row["found"]) == (2, 1)


def test_few_steps_see_the_same_as_the_first_of_many():
    *_, one, more = lanczos_densities.cells((20,), known=40, seeds=2, few=3)
    assert more["seeds"] == [2]
    few = lanczos_densities.FEW
    found = next(row for row in lanczos_densities.run(one, "cpu") if row["depth"] == few)
    (same,) = lanczos_densities.run({**more, "seeds": [one["seed"]]}, "cpu")
    assert {name: same[name] for name in found} == pytest.approx(found)


# what a row holds where the thesis is right, and where it is wrong
LANCZOS = {"support": (0.01, 0.2), "at zero": (0.5, 0.7)}
DIAGONAL = {
    "distance": (0.5, 0.02),
    "support": (0.5, 0.01),
    "at zero": (0.0, 0.0),
    "second ratio": (1, 3),
    "smallest": (3.3, 0.1),
    "largest": (5.3, 50),
}
DISTANCE = {(225, True): 0.1, (2000, True): 0.01, (225, False): 0.01, (2000, False): 0.1}
FOUND = {(5, True): 2, (15, True): 2, (30, True): 9, (5, False): 12, (15, False): 2, (30, False): 2}


def density_rows(right):
    rows, side = [], 0 if right else 1
    for name, size, seed in product((*LAWS, KNOWN), (225, 2000), range(SEEDS)):
        base, noise = {"matrix": name, "size": size, "seed": seed, "outliers": 10}, 1 + jitter(seed)
        for depth in (5, 15, 30):
            worse = 5 if (depth == 30) != right else 1
            rows.append(
                {
                    **base,
                    "method": "Lanczos",
                    "depth": depth,
                    "found": FOUND[depth, right],
                    "distance": DISTANCE[size, right] * worse * noise,
                    **{key: pair[side] * noise for key, pair in LANCZOS.items()},
                }
            )
        rows.append(
            {
                **base,
                "method": "diagonal",
                "depth": 0,
                "found": 0,
                "variance": (1 + 2 * side) / size * noise,
                **{key: pair[side] * noise for key, pair in DIAGONAL.items()},
            }
        )
    return rows


@pytest.mark.parametrize(("right", "expected"), BOTH)
def test_claims_on_densities_follow_from_rows(right, expected):
    found = verdicts_of(lanczos_densities, density_rows(right))
    assert len(found) == 4 * 3 + 5 + 7
    assert {claim for claim, verdict in found.items() if verdict != expected} == set()


def test_printed_terms_are_ours():
    for row in lanczos_theorems.run({"part": "table"}, "cpu"):
        assert math.log10(row["L"] / row["L printed"]) == pytest.approx(
            0, abs=lanczos_theorems.DIGITS
        )
        assert math.log10(row["R"] / row["R printed"]) == pytest.approx(
            0, abs=lanczos_theorems.DIGITS
        )
