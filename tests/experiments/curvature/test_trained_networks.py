"""Curvature of trained networks beside dense answers, and the claims about it."""

import math

import pytest
import torch

from lambdahat.experiments.curvature import bulk_outliers, curvature_suite
from lambdahat.experiments.kit.cells import Rows
from lambdahat.experiments.kit.training import curvature_problem, images, network
from lambdahat.krylov import lanczos, random_vector
from lambdahat.operators import operator
from lambdahat.operators.curvature import fisher, ggn, hessian
from lambdahat.randommatrix import TracyWidom
from lambdahat.results import Spectrum
from tests.experiments.curvature.verdicts import BOTH, SEEDS, SUBJECT, jitter, verdicts_of

CELL = {
    "data": "digits",
    "training": 60,
    "held_out": 60,
    "seed": 1,
    "batch": 16,
    "samples": 60,
    "depth": 30,
    "side": 4,
}


@pytest.fixture(scope="module")
def problem():
    found = images(CELL, "cpu")
    return curvature_problem(network("MLP-3", found.shape, found.classes, 0), found, CELL)


def test_ritz_vectors_are_eigenvectors_once_the_space_is_whole():
    matrix = torch.diag(torch.tensor([3.0, -1.0, 0.5, 0.1], dtype=torch.float64))
    op = operator(matrix)
    steps = lanczos(op, random_vector(op, 0, "test"), 4)
    for place, value in enumerate((-1.0, 0.1, 0.5, 3.0)):
        vector = curvature_suite.ritz_vector(steps, place)
        torch.testing.assert_close(matrix @ vector, value * vector, atol=1e-9, rtol=0)
        assert float(vector.norm()) == pytest.approx(1)


def test_the_diagonal_is_that_of_the_dense_matrix(problem):
    shape = Spectrum(
        *(
            torch.tensor(part).double().numpy()
            for part in ([[0.0, 0.1, 5.0]], [[0.9, 0.09, 0.01]], [[1e-3, 1e-3, 1e-6]])
        ),
        dim=problem.num_parameters,
    )
    row = curvature_suite._diagonal_row(problem, shape, seed=4)
    dense = fisher(problem, kind="monte_carlo", seed=4).dense().diagonal()
    assert row["largest"] == pytest.approx(float(dense.max()), rel=1e-4)
    assert row["beyond"] == int((dense > row["edge"]).sum())
    assert sum(row["shares"]) == pytest.approx(1, abs=1e-3)


def test_negative_mass_is_counted_with_and_without_its_heaviest_node():
    shape = Spectrum(
        *(
            torch.tensor(part).double().numpy()
            for part in ([[-2.0, -0.1, 0.0, 4.0]], [[0.05, 0.3, 0.6, 0.05]], [[0.0] * 4])
        ),
        dim=100,
    )
    row = curvature_suite._shape_row(shape)
    assert row["negative"] == pytest.approx(0.35)
    assert row["negative rest"] == pytest.approx(0.05)
    assert (row["largest"], row["smallest"]) == (4.0, -2.0)


def test_a_line_along_an_eigenvector_begins_as_its_parabola(problem):
    op = hessian(problem)
    steps = lanczos(op, random_vector(op, 0, "test"), 20)
    found = images(CELL, "cpu")
    rows = {row["direction"]: row for row in curvature_suite._lines(problem, found, steps)}
    sharp = rows["largest"]
    middle = len(sharp["offsets"]) // 2
    assert sharp["offsets"][middle] == 0
    assert sharp["train"][middle] == pytest.approx(problem.loss(), rel=1e-5)
    step = sharp["offsets"][middle + 1]
    second = (
        sharp["train"][middle + 1] + sharp["train"][middle - 1] - 2 * sharp["train"][middle]
    ) / step**2
    assert second == pytest.approx(sharp["value"], rel=0.1)


def test_excess_is_the_ratio_of_mean_changes():
    row = {"offsets": [-1, 0, 1], "train": [3.0, 1.0, 3.0], "test": [6.0, 2.0, 6.0]}
    assert curvature_suite.excess(row) == pytest.approx(math.log10(2))


def suite_rows(right):
    rows = []
    for seed in range(SEEDS):
        noise = jitter(seed)
        top = 4.0 * (1 + noise)
        for name, probe in (("hessian", 0), ("hessian", 1), ("ggn", 0), ("covariance", 0)):
            other = (
                1.0 if right else (2.0 if name == "ggn" else 10.0 if name == "covariance" else 1.0)
            )
            rows.append(
                {
                    "kind": "spectrum",
                    "curvature": name,
                    "probe": probe,
                    "seed": seed,
                    "largest": top * other + (0 if right else probe),
                    "smallest": -0.1,
                    "top": [top * other] * 4,
                    "negative": (0.3 if right else 0.001) + noise * 1e-2,
                    "negative rest": 1e-3 if right else 0.2,
                    "at zero": 0.9 + (0 if right else 0.2 * probe) + noise * probe,
                }
            )
        rows.append(
            {
                "kind": "diagonal",
                "seed": seed,
                "largest": (1.0 if right else 40.0) * (1 + noise),
                "beyond": 90 + 20 * noise if right else 3 + noise,
                "eigenvalues beyond": 9,
            }
        )
        for direction in curvature_suite.DIRECTIONS:
            sharp, flat = (1.0 + noise, 5.0) if right else (9.0 + noise, 1.0)
            rise = sharp if direction == "largest" else flat
            rows.append(
                {
                    "kind": "line",
                    "direction": direction,
                    "seed": seed,
                    "offsets": [-1, 0, 1],
                    "train": [2.0, 1.0, 2.0],
                    "test": [1 + rise, 1.0, 1 + rise],
                }
            )
    return rows


@pytest.mark.parametrize(("right", "expected"), BOTH)
def test_claims_on_the_suite_follow_from_rows(right, expected):
    found = verdicts_of(curvature_suite, suite_rows(right))
    assert len(found) == 10
    assert {claim for claim, verdict in found.items() if verdict != expected} == set()


def test_a_spiked_matrix_has_the_outliers_and_cones_that_are_told():
    row = bulk_outliers.run({"part": "matrix", "size": 300, "depth": 60, "seed": 3}, "cpu")[0]
    assert row["told values"] == pytest.approx(
        [spike + 1 / spike for spike in bulk_outliers.SPIKES], rel=1e-3
    )
    assert row["told"] == pytest.approx([1 - spike**-2 for spike in bulk_outliers.SPIKES], rel=1e-3)
    assert row["values"] == pytest.approx(row["told values"], abs=0.3)
    assert row["overlaps"] == pytest.approx(row["told"], abs=0.15)
    assert row["hidden"] < 0.15
    assert row["outliers"] == 3


def test_the_same_images_keep_every_eigenvector(problem):
    row = bulk_outliers._reading(problem, problem, CELL)
    assert row["kept"] == pytest.approx([1.0] * bulk_outliers.PAIRS, abs=1e-3)
    exact = torch.linalg.eigvalsh(hessian(problem).dense().double()).flip(0)[:3]
    assert row["values"][:3] == pytest.approx(exact.tolist(), rel=2e-2)
    assert float(torch.linalg.eigvalsh(ggn(problem).dense().double())[0]) > -1e-6


def bulk_rows(right):
    rows = []
    for seed in range(8):
        noise = jitter(seed, 0.01)
        rows.append(
            {
                "part": "matrix",
                "seed": seed,
                "outliers": 3 if right else 5,
                "told": [0.9],
                "overlaps": [(0.9 if right else 0.2) + noise],
                "hidden": (0.01 if right else 0.7) + noise / 9,
                "last of the bulk": TracyWidom().mean + (0 if right else 9) + noise,
            }
        )
        kept = [0.9 + noise, 0.2] if right else [0.2 + noise, 0.9]
        rows += [
            {
                "part": "network",
                "seed": seed,
                "last": last,
                "classes": 10,
                "edge": 1.0,
                "largest": 2.0,
                "kept": kept,
                "weight edge": (1.1 if right else 9.0) * (1 + noise),
                "outliers": 9 + noise,
            }
            for last in (False, True)
        ]
    return rows


@pytest.mark.parametrize(("right", "expected"), BOTH)
def test_claims_on_bulks_follow_from_rows(right, expected):
    rows = bulk_rows(right)
    found = verdicts_of(bulk_outliers, rows)
    assert len(found) == 8
    counts = {
        claim: verdict
        for claim, verdict in found.items()
        if "outliers stand apart" in claim or "classes" in claim
    }
    assert len(counts) == 2
    assert {
        claim for claim, verdict in found.items() if claim not in counts and verdict != expected
    } == set()


@pytest.mark.parametrize(
    ("number", "several", "few"),
    [(9, "holds", "holds"), (40, "holds", "does not hold"), (0, "does not hold", "holds")],
)
def test_outliers_are_several_and_no_more_than_classes(number, several, few):
    rows = [{**row, "outliers": number + jitter(row["seed"])} for row in bulk_rows(True)]
    found = verdicts_of(bulk_outliers, rows)
    assert found["several outliers stand apart from the bulk (their number)"] == several
    assert found["any network: no more outliers than classes (mean difference)"] == few


def test_outliers_are_not_counted_where_spectra_end_in_a_tail():
    """No edge below λ₁ is no sign that there are no outliers."""
    seeds = sorted({row["seed"] for row in bulk_rows(True)})
    for tails, judged in ((seeds, False), (seeds[:2], True)):
        rows = [
            row | ({"edge": 2.5, "outliers": 0} if row["seed"] in tails else {})
            for row in bulk_rows(True)
        ]
        claims = list(bulk_outliers.claims(Rows({**SUBJECT, **row} for row in rows)))
        (classes,) = [claim for claim in claims if "no more outliers" in claim.sentence]
        # nine of each that has an edge, and ten classes
        assert not judged or classes.reading.value == pytest.approx(-1, abs=0.02)
        unmet = {claim.sentence.split(": ", 1)[1]: claim.unmet for claim in claims}
        asked = ("several outliers", "no more outliers", "the bulk ends")
        reasons = {why for sentence, why in unmet.items() if sentence.startswith(asked)}
        count = f"in {len(tails)} of {len(seeds)}"
        tail = f"the largest eigenvalues are spaced like the tail of the bulk {count}"
        assert reasons == ({""} if judged else {tail})
        assert {why for sentence, why in unmet.items() if not sentence.startswith(asked)} == {""}


@pytest.mark.parametrize("experiment", [curvature_suite, bulk_outliers])
@pytest.mark.parametrize(("failed", "judged"), [((), True), ((0,), True), ((0, 3, 4, 5), False)])
def test_networks_that_have_not_learnt_are_left_out(experiment, failed, judged):
    """Those left give the same verdicts, and fewer than three give none."""
    made = suite_rows if experiment is curvature_suite else bulk_rows
    rows = [
        {**row, **({"largest": 1e9, "kept": [0, 9]} if row["seed"] in failed else {})}
        | {"data": "cifar100", "training accuracy": 1.0 if row["seed"] in failed else 60.0}
        for row in made(True)
        if row.get("part") == "matrix" or row["seed"] < 6
    ]
    claims = experiment.EXPERIMENT.claims(Rows({**SUBJECT, **row} for row in rows))
    about = [claim for claim in claims if not claim.sentence.startswith("spiked matrix")]
    reason = (
        "" if judged else "2 of 6 networks have learnt (training accuracy above 2 %), fewer than 3"
    )
    assert about
    assert {claim.unmet for claim in about} == {reason}
    left = [
        claim
        for claim in claims
        if claim.sentence.endswith("of number 20 (share within their leading 20)")
    ]
    assert all(claim.reading.value == pytest.approx(0.7, abs=0.1) for claim in left)


def test_the_tracy_widom_mean_is_not_the_thesis_claim():
    (own,) = [
        claim
        for claim in bulk_outliers.claims(Rows({**SUBJECT, **row} for row in bulk_rows(True)))
        if claim.own
    ]
    assert "Tracy–Widom" in own.sentence
    assert own.bound == pytest.approx(-1.2065, abs=1e-3)  # of the orthogonal ensemble
