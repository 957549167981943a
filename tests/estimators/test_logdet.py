"""Log-determinants against dense ones: every method, preconditioner and kind of matrix, and
whether intervals hold.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import scipy.sparse
import torch
from scipy.sparse.csgraph import reverse_cuthill_mckee

from lambdahat._core.rng import generator
from lambdahat.estimators import _logdet, logdet
from lambdahat.estimators._spectrum import limit_of, rule_of
from lambdahat.estimators.preconditioning import Preconditioned, deflate, outliers, preconditioned
from lambdahat.krylov import lanczos, random_vector
from lambdahat.maxent import fit
from lambdahat.operators import identity, operator
from lambdahat.operators.base import LinearOperator
from lambdahat.operators.curvature import ggn
from lambdahat.operators.kernel_matrix import kernel_matrix
from lambdahat.results import Status
from tests.cases import Products, classifier, with_eigenvalues

D = torch.float64
POSITIVE = torch.logspace(-1, 1, 80, dtype=D)
WIDE = torch.logspace(-4, 1, 200, dtype=D)


def laplacian(side: int = 12, shift: float = 0.05) -> tuple[scipy.sparse.csr_array, float]:
    """The 7-point Laplacian of a cube plus a shift, and its exact log-determinant, a sum of
    logs.
    """
    ones = np.ones(side)
    line = scipy.sparse.diags_array([-ones[1:], 2 * ones, -ones[1:]], offsets=[-1, 0, 1])
    eye = scipy.sparse.eye_array(side)
    parts = ((line, eye, eye), (eye, line, eye), (eye, eye, line))
    matrix = sum(scipy.sparse.kron(scipy.sparse.kron(a, b), c) for a, b, c in parts)
    modes = 2 - 2 * np.cos(np.pi * np.arange(1, side + 1) / (side + 1))
    values = modes[:, None, None] + modes[None, :, None] + modes + shift
    return (matrix + shift * scipy.sparse.eye_array(side**3)).tocsr(), float(np.log(values).sum())


def uneven(size: int = 150) -> scipy.sparse.csr_array:
    """A tridiagonal matrix whose rows differ in scale by 10⁶, as those of a stiffness matrix do."""
    ones = np.ones(size)
    matrix = scipy.sparse.diags_array(
        [-0.45 * ones[1:], ones, -0.45 * ones[1:]], offsets=[-1, 0, 1]
    )
    scale = scipy.sparse.diags_array(np.logspace(0, 3, size))
    return (scale @ matrix @ scale).tocsr()


class Diagonal(LinearOperator):
    """A diagonal matrix that shows its products only."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__(len(values), values.dtype, values.device, psd=True)
        self.values = values

    def _apply(self, block: torch.Tensor) -> torch.Tensor:
        return self.values[:, None] * block


class Known(Diagonal):
    """The same, with its diagonal known apart from products."""

    def known_diagonal(self) -> torch.Tensor:
        return self.values


def points(count: int = 150, dimensions: int = 3) -> torch.Tensor:
    return torch.randn(count, dimensions, generator=generator(0, "points"), dtype=D)


def test_logdet_intervals_cover():
    matrix = with_eigenvalues(POSITIVE)
    exact = logdet(operator(matrix), "exact")
    assert exact.value == pytest.approx(float(torch.logdet(matrix)), rel=1e-12)
    assert 0 < exact.stderr < 1e-10
    runs = [logdet(operator(matrix), depth=30, probes=4, seed=seed) for seed in range(40)]
    inside = [low <= exact.value <= high for low, high in (run.interval() for run in runs)]
    assert 0.85 <= np.mean(inside) <= 0.999
    assert all(run.status is Status.CONVERGED for run in runs)
    assert runs[0].cost == 120


def test_logdet_of_a_multiple_of_the_identity_is_exact():
    found = logdet(operator(3.0 * torch.eye(150, dtype=D)))
    assert found.value == pytest.approx(150 * np.log(3.0), rel=1e-14)
    assert found.cost == 1


def test_too_small_a_depth_is_said():
    A = operator(with_eigenvalues(torch.logspace(-6, 2, 300)))
    assert logdet(A, depth=6, probes=30).status is Status.QUADRATURE
    assert logdet(A, depth=200, probes=3, bounds=(1e-7, 101.0)).status is Status.CONVERGED


def test_logdet_names_what_is_not_positive():
    A = operator(with_eigenvalues(torch.linspace(-0.5, 2, 40)))
    with pytest.raises(
        ValueError, match=r"positive definite, got the Ritz value -0\.\d+; add a shift"
    ):
        logdet(A, depth=30)
    with pytest.raises(ValueError, match=r"the eigenvalue -0\.5; add a shift"):
        logdet(A, "exact")
    with pytest.raises(
        ValueError, match="method must be one of 'slq', 'maxent', 'chebyshev', 'exact'"
    ):
        logdet(A, "lanczos")


def test_logdet_at_the_rounding_of_the_dtype_says_so():
    values = torch.cat([torch.full((20,), 1e-6), torch.linspace(1, 10, 40)])
    found = logdet(operator(with_eigenvalues(values).float()), depth=40)
    assert found.status is Status.PRECISION_LIMIT


@pytest.mark.parametrize("method", ["slq", "maxent", "chebyshev"])
def test_every_method_covers(method):
    matrix = with_eigenvalues(POSITIVE)
    exact = float(torch.logdet(matrix))
    hidden = Products(matrix)
    runs = [logdet(hidden, method, depth=30, probes=6, seed=seed) for seed in range(25)]
    inside = [low <= exact <= high for low, high in (run.interval() for run in runs)]
    assert np.mean(inside) >= 0.85
    assert np.std([run.value for run in runs]) < 0.1 * POSITIVE.log().abs().sum()
    assert runs[0].cost == 30 * 6 + (0 if method == "slq" else 30) + 1  # one shows the scale


@pytest.mark.parametrize("method", ["slq", "maxent", "chebyshev"])
def test_intervals_hold_where_the_depth_does_not_suffice(method):
    """At depth 8 every method is biased on six decades; the bound on that is in the interval."""
    values = torch.logspace(-5, 1, 300, dtype=D)
    A = Products(with_eigenvalues(values)) + 0.0 * identity(Products(torch.eye(300, dtype=D)))
    exact = float(values.log().sum())
    for seed in range(4):
        found = logdet(A, method, depth=8, probes=10, seed=seed, bounds=(1e-5, 10.5))
        low, high = found.interval()
        assert low <= exact <= high
        assert found.status is Status.QUADRATURE


UNBOUNDED = {
    "x⁴": torch.linspace(1e-3, 1, 500, dtype=D) ** 4,
    "log-uniform": torch.logspace(-8, 0, 400, dtype=D),
    "twenty small": torch.cat(
        [torch.logspace(-8, -3, 20, dtype=D), torch.linspace(0.1, 1, 400, dtype=D)]
    ),
}


@pytest.mark.parametrize("method", ["slq", "maxent", "chebyshev"])
@pytest.mark.parametrize("name", UNBOUNDED)
def test_intervals_hold_where_no_lower_bound_is_known(name, method):
    """Products only, and eigenvalues far below what the depth resolves: said, and held all the
    same.
    """
    values = UNBOUNDED[name]
    exact = float(values.log().sum())
    found = [logdet(Diagonal(values), method, depth=30, seed=seed) for seed in range(3)]
    for one in found:
        low, high = one.interval()
        assert low <= exact <= high
        assert one.status in (Status.QUADRATURE, Status.POSITIVITY)


def test_a_wider_bar_stays_of_use():
    """The same x⁴ at the depth of the default: the bar is that of a power of the depth, not of
    the rounding.
    """
    values = UNBOUNDED["x⁴"]
    found = logdet(Diagonal(values))
    assert abs(float(found) - float(values.log().sum())) <= 2 * float(found.stderr)
    assert float(found.stderr) < 0.08 * abs(float(found))


@pytest.mark.parametrize("method", ["slq", "maxent", "chebyshev"])
def test_a_singular_matrix_is_not_said_to_be_positive(method):
    line = np.diff(np.eye(200), axis=0)
    path = operator(scipy.sparse.csr_array(line.T @ line), psd=True)
    for seed in range(3):
        assert logdet(path, method, seed=seed).status in (Status.POSITIVITY, Status.QUADRATURE)
    shifted = logdet(path + 0.1 * identity(path), method)
    assert shifted.status is Status.CONVERGED


@pytest.mark.parametrize("dtype", [torch.float32, D])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_small_matrices_are_exact(size, dtype):
    for seed in range(6):
        draws = torch.randn(size, size, generator=generator(seed, "small"), dtype=dtype)
        matrix = draws @ draws.T + 0.1 * torch.eye(size, dtype=dtype)
        exact = float(torch.logdet(matrix.double()))
        for method in ("slq", "maxent", "chebyshev"):
            found = logdet(operator(matrix), method, seed=seed)
            assert float(found) == pytest.approx(exact, rel=1e-10, abs=1e-10)
            assert found.stderr < 1e-12


def exact_log_determinant(rows):
    """Gaussian elimination in rational numbers."""
    left, total = [[Fraction(float(entry)) for entry in row] for row in rows], 0.0
    while left:
        (pivot, *first), *others = left
        total += math.log(pivot.numerator) - math.log(pivot.denominator)
        left = [
            [entry - row[0] * above / pivot for entry, above in zip(row[1:], first, strict=True)]
            for row in others
        ]
    return total


@pytest.mark.parametrize("rows", ["equal", "uneven"])
@pytest.mark.parametrize("make", [torch.as_tensor, scipy.sparse.csr_array], ids=["dense", "sparse"])
def test_exact_log_determinants_have_the_rounding_of_the_factorisation(make, rows):
    """Condition numbers of up to 10¹⁶: errors of up to 10⁻³ that are no error of any probe."""
    ratios = []
    for order in (3, 5, 8, 11):
        for seed in range(3):
            points = np.sort(np.random.default_rng(seed).random(order))
            matrix = 1 / (1 + points[:, None] + points) + 1e-15 * np.eye(order)
            if rows == "uneven":
                matrix = matrix * np.outer(10.0 ** np.arange(order), 10.0 ** np.arange(order))
            found = logdet(operator(make(matrix)), "exact")
            ratios.append((float(found) - exact_log_determinant(matrix)) / float(found.stderr))
    assert np.abs(ratios).max() < 4
    assert np.sqrt(np.mean(np.square(ratios))) > 0.05  # not by saying nothing


def test_small_matrices_known_by_products_carry_the_rounding():
    matrix = with_eigenvalues([1e-3, 1.0, 2.0]).float()
    found = logdet(Products(matrix))
    assert found.cost == 3
    exact = float(torch.logdet(matrix.double()))
    assert 0 < float(found.stderr) < 1e-3
    assert abs(float(found) - exact) <= 4 * float(found.stderr)


@pytest.mark.parametrize("dtype", [torch.float32, D])
def test_a_whole_krylov_space_leaves_no_gap(dtype):
    """Its residual is rounding, and a node may sit at the bound: neither is a singular solve."""
    for seed in range(10):
        run = lanczos(
            operator(torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=dtype)),
            torch.tensor([1.0, seed], dtype=dtype),
            2,
        )
        limit = limit_of([run], 1.0, sure=True)
        assert limit.low == limit.value == limit.gauss
        assert (
            logdet(operator([[2.0, 1.0], [1.0, 3.0]]), depth=2, seed=seed).status
            is Status.CONVERGED
        )


def test_one_step_is_not_settled():
    A = Diagonal(torch.linspace(0.1, 10, 150, dtype=D))
    found = logdet(A, depth=1, probes=50)
    low, high = found.interval()
    assert low <= float(A.values.log().sum()) <= high
    assert found.status is Status.QUADRATURE


def test_factors_that_would_not_fit_are_refused(monkeypatch):
    """A 3-D Laplacian fills in; a line does not."""
    monkeypatch.setattr(_logdet, "free_memory", lambda device: 2**21)
    with pytest.raises(
        ValueError, match=r"method must fit into the free memory.*'exact', which may need .*\"slq\""
    ):
        logdet(operator(laplacian()[0]), "exact")
    assert logdet(operator(uneven(3000)), "exact").status.ok


def test_the_envelope_holds_the_factor():
    matrix = laplacian(6)[0]
    dense = np.linalg.cholesky(
        matrix.toarray()[np.ix_(*[reverse_cuthill_mckee(matrix, symmetric_mode=True)] * 2)]
    )
    assert np.count_nonzero(np.abs(dense) > 1e-14) <= _logdet._envelope(matrix.tocsc())


def test_gauss_and_radau_rules_hold_each_probe():
    """zᵀlog(A)z lies between the Gauss–Radau rule at the smallest eigenvalue and the Gauss rule,
    at every depth.
    """
    matrix = with_eigenvalues(WIDE)
    A, values, vectors = operator(matrix), *torch.linalg.eigh(matrix)
    z = random_vector(A, 0, "probe")
    exact = float((vectors.T @ z).square() @ values.log())
    for depth in (3, 6, 12, 24):
        run = lanczos(A, z, depth)
        nodes, weights, _ = run.ritz()
        others, masses = run.radau(float(WIDE[0]) * (1 - 1e-9))
        assert float(masses.sum()) == pytest.approx(1.0, abs=1e-12)
        assert float(others[0]) == pytest.approx(float(WIDE[0]), rel=1e-6)
        for order in range(2 * depth + 1):  # one more than the Gauss rule
            moment = float((vectors.T @ z).square() @ (values / 10) ** order)
            assert float(masses @ (others / 10) ** order) == pytest.approx(moment, abs=1e-10)
        assert float(masses @ others.log()) <= exact + 1e-12
        assert exact <= float(weights @ nodes.log()) + 1e-12
        limit = limit_of([run], float(WIDE[0]), sure=True)
        assert limit.low - 1e-12 <= exact <= limit.high + 1e-12


def test_rule_of_a_density_is_that_of_its_moments():
    values = 0.5 + 1.5 * torch.rand(4000, generator=generator(0, "rule"), dtype=D)
    x = ((values - 1.25) / 0.75).numpy()
    moments = np.polynomial.chebyshev.chebvander(x, 12).mean(0)
    rule = rule_of(fit(moments, bounds=(0.5, 2.0)), 6).ritz()
    assert len(rule[0]) == 6
    for order in range(12):
        assert float(rule[1] @ rule[0] ** order) == pytest.approx(
            float((values**order).mean()), rel=1e-6
        )


def test_known_traces_steady_the_estimate():
    """tr A and tr A² are known of a matrix that is there, and not of one known by its products."""
    matrix = with_eigenvalues(torch.linspace(1, 3, 200))
    for method in ("slq", "maxent", "chebyshev"):
        steady = logdet(operator(matrix), method, depth=20, probes=5, precondition="none")
        plain = logdet(Products(matrix), method, depth=20, probes=5)
        assert float(steady.stderr) < 0.3 * float(plain.stderr)
        assert abs(steady.value - float(torch.logdet(matrix))) <= 4 * float(steady.stderr)


def test_sparse_laplacian_is_within_its_interval():
    matrix, exact = laplacian()
    A = operator(matrix, psd=True)
    assert logdet(A, "exact").value == pytest.approx(exact, rel=1e-12)
    assert A.known_bounds()[0] == pytest.approx(0.05)
    for method in ("slq", "maxent", "chebyshev"):
        found = logdet(A, method, depth=40, probes=6)
        assert found.status is Status.CONVERGED
        assert abs(found.value - exact) <= 4 * float(found.stderr) < 0.02 * exact


def test_exact_of_a_sparse_matrix_is_that_of_the_dense_one():
    matrix = uneven()
    sparse, dense = operator(matrix), operator(matrix.toarray())
    assert logdet(sparse, "exact").value == pytest.approx(logdet(dense, "exact").value, rel=1e-12)
    assert logdet(sparse, "exact").cost == 0


def test_jacobi_scaling_is_chosen_and_helps():
    matrix = uneven()
    exact = float(np.linalg.slogdet(matrix.toarray())[1])
    scaled, plain = (
        logdet(operator(matrix), depth=20, precondition=kind) for kind in ("auto", "none")
    )
    assert abs(scaled.value - exact) <= 4 * float(scaled.stderr)
    assert scaled.status is Status.CONVERGED
    assert float(scaled.stderr) < 0.1 * float(plain.stderr)
    assert scaled.cost == plain.cost


@pytest.mark.parametrize(
    ("make", "columns"),
    [
        (lambda: operator(uneven()), 30),
        (lambda: operator(uneven().toarray()), 0),
        (lambda: kernel_matrix(points(), noise=1e-3), 30),
        (lambda: kernel_matrix(points(), noise=1e-3) + 0.1 * identity(kernel_matrix(points())), 30),
        (lambda: operator(with_eigenvalues(WIDE)), 0),
    ],
)
@pytest.mark.parametrize("kind", ["jacobi", "cholesky"])
def test_preconditioners_leave_the_determinant_alone(make, columns, kind):
    """The columns of a dense matrix are read, those of the others are products."""
    A = make()
    ready = preconditioned(A, kind, 30 if kind == "cholesky" else None)
    whole, inner = torch.logdet(A.dense()), torch.logdet(ready.operator.dense())
    assert ready.logdet + float(inner) == pytest.approx(float(whole), rel=1e-8, abs=1e-6)
    least = float(torch.linalg.eigvalsh(ready.operator.dense())[0])
    assert ready.operator.known_bounds()[0] <= least * (1 + 1e-6)
    assert ready.cost == (columns if kind == "cholesky" else 0)


def test_a_whole_cholesky_factor_leaves_the_identity():
    K = kernel_matrix(points(60), length_scale=0.3, noise=1e-2)
    found = logdet(K, depth=3, probes=2, precondition="cholesky", rank=60)
    assert found.value == pytest.approx(float(torch.logdet(K.dense())), rel=1e-9)
    assert found.cost <= 60 + 6


def test_ill_conditioned_kernel_within_a_budget():
    """Squared exponential with κ of 10⁷: 300 products bring 3 %, and the interval holds."""
    K = kernel_matrix(points(300), length_scale=1.5, noise=1e-5)
    exact = float(torch.logdet(K.dense()))
    found = logdet(K, depth=10, probes=15, rank=150)
    assert found.cost == 300
    low, high = found.interval()
    assert low <= exact <= high
    assert abs(found.value - exact) <= 0.03 * abs(exact)
    assert abs(logdet(K, depth=10, probes=30, precondition="none").value - exact) > 0.05 * abs(
        exact
    )


def test_no_preconditioner_is_kept_where_columns_tell_nothing():
    K = kernel_matrix(points(100), length_scale=0.02)
    ready = preconditioned(K, "auto", 20)
    assert ready.operator is K
    assert ready.cost == 20


@pytest.mark.parametrize(
    "make", [lambda K: 0.1 * identity(K) + K, lambda K: 2.0 * K, lambda K: K + 0.1 * identity(K)]
)
def test_sums_and_multiples_keep_the_kernels_preconditioner(make):
    A = make(kernel_matrix(points(), noise=1e-3))
    ready = preconditioned(A, "auto", 30)
    assert ready.name == "a Cholesky factor of rank 30"
    whole, inner = torch.logdet(A.dense()), torch.logdet(ready.operator.dense())
    assert ready.logdet + float(inner) == pytest.approx(float(whole), rel=1e-8, abs=1e-6)


def test_bounds_may_be_an_array():
    A = operator(with_eigenvalues(POSITIVE))
    as_array, as_tuple = (
        logdet(A, depth=10, bounds=given) for given in (np.array([0.1, 10.0]), (0.1, 10.0))
    )
    assert float(as_array) == float(as_tuple)


def test_curvature_of_a_network():
    G = ggn(classifier((3, 4, 2)))
    shifted = G + 0.1 * identity(G)
    exact = float(torch.logdet(shifted.dense()))
    found = logdet(shifted, depth=20, probes=20)
    assert abs(found.value - exact) <= 4 * float(found.stderr)


OUTLYING = {
    "one of 1e-8": [1e-8],
    "one of 1e-3": [1e-3],
    "two equal ones of 1e-6": [1e-6, 1e-6],
    "one of 1e5": [1e5],
    "one at each end": [1e-6, 1e4],
}


# what moves one eigenvalue far below or above the bulk also moves one at each end
SLOW = {"one of 1e-8", "one of 1e5"}
APART = [pytest.param(name, "slq", marks=[pytest.mark.slow] * (name in SLOW)) for name in OUTLYING]
APART += [("one of 1e-8", "maxent"), ("one at each end", "chebyshev")]


@pytest.mark.parametrize(("name", "method"), APART)
def test_single_eigenvalues_apart_from_a_bulk(name, method):
    """Over 40 seeds, by products only: 34 intervals hold at least, and what is left is the error
    of the bulk.
    """
    values = torch.cat([torch.tensor(OUTLYING[name], dtype=D), torch.linspace(1, 2, 200, dtype=D)])
    A, exact = Diagonal(values), float(values.log().sum())
    runs = [logdet(A, method, depth=20, probes=6, seed=seed) for seed in range(40)]
    held = sum(low <= exact <= high for low, high in (run.interval() for run in runs))
    # with probability 0.95 each, fewer hold once in 300; with 0.75, nine times in ten
    assert held >= 34
    assert np.sqrt(np.mean([(run.value - exact) ** 2 for run in runs])) < 3.0
    assert sum(run.status is Status.CONVERGED for run in runs) >= 36


@pytest.mark.parametrize("method", ["slq", "maxent", "chebyshev"])
def test_a_small_eigenvalue_that_is_left_in_its_place(method):
    """Without a preconditioner the bar is wide enough, or the status says so."""
    values = torch.cat([torch.tensor([1e-8], dtype=D), torch.linspace(1, 2, 200, dtype=D)])
    A, exact = Diagonal(values), float(values.log().sum())
    runs = [
        logdet(A, method, depth=20, probes=6, seed=seed, precondition="none") for seed in range(40)
    ]
    assert sum(low <= exact <= high for low, high in (run.interval() for run in runs)) >= 36


def test_a_deflated_matrix_keeps_its_determinant_and_its_traces():
    values = torch.cat(
        [torch.tensor([1e-7, 1e-3, 400.0], dtype=D), torch.linspace(1, 2, 150, dtype=D)]
    )
    A = operator(with_eigenvalues(values))
    run = lanczos(A, random_vector(A, 0, "sphere"), 40)
    moved = deflate(Preconditioned(A, A), run, outliers(A, run))
    assert moved.name == "deflation of 3 eigenvalues"
    inner = moved.operator.dense()
    assert moved.logdet + float(torch.logdet(inner)) == pytest.approx(
        float(values.log().sum()), rel=1e-8
    )
    assert moved.operator.known_trace() == pytest.approx(float(inner.trace()), rel=1e-6)
    assert moved.operator.known_squares() == pytest.approx(float((inner @ inner).trace()), rel=1e-6)
    assert float(torch.linalg.eigvalsh(inner)[0]) > 0.5


@pytest.mark.parametrize("method", ["maxent", "chebyshev"])
def test_the_last_deflation_has_its_own_ends(method, monkeypatch):
    """A bulk at 0.015 and values near 1: once these are moved to the middle, the spectrum ends
    at 1.3, not at 1.
    """
    monkeypatch.setattr("lambdahat.estimators._logdet.DEFLATIONS", 1)
    values = torch.cat(
        [torch.linspace(0.01, 0.02, 200, dtype=D), torch.linspace(0.7, 1.0, 4, dtype=D)]
    )
    A, exact = Products(with_eigenvalues(values)), float(values.log().sum())
    runs = [logdet(A, method, depth=30, probes=6, seed=seed) for seed in range(20)]
    assert sum(low <= exact <= high for low, high in (run.interval() for run in runs)) >= 17
    assert all(run.status is Status.CONVERGED and float(run.stderr) < 3 for run in runs)


@pytest.mark.parametrize(
    ("method", "outside"),
    [
        ("maxent", [1.06]),
        ("chebyshev", [1.06]),
        ("chebyshev", [1.02, 1.03, 1.031, 1.04]),
        ("maxent", [3.0]),
    ],
)
def test_own_bounds_that_prove_wrong_are_widened(method, outside, monkeypatch):
    """Eigenvalues above the edge that the run for the bounds cannot see, for its start is
    orthogonal to theirs.
    """
    monkeypatch.setattr("lambdahat.estimators._spectrum.BOUNDS_DEPTH", 30 if outside[0] < 2 else 8)
    values = torch.cat([torch.linspace(0.2, 1, 200, dtype=D), torch.tensor(outside, dtype=D)])
    logs = values.log()
    # of six probes, exactly, but for P + 2
    deviation = math.sqrt(2 * float((logs - logs.mean()).square().sum()) / 6)
    for seed in range(6):
        start = random_vector(Diagonal(values), seed, "bounds")
        turn = torch.linalg.qr(
            torch.cat([start[:, None], with_eigenvalues(values, seed)[:, 1:]], dim=1)
        ).Q
        mixed = turn[:, :200] @ torch.linalg.qr(with_eigenvalues(values[:200], seed)).Q
        vectors = torch.cat([mixed, turn[:, 200:]], dim=1)
        A = Products((vectors * values) @ vectors.T)
        found = logdet(A, method, depth=40, probes=6, seed=seed)
        assert found.cost == A.matvecs > 30 + 40 * 6 + 200
        assert abs(float(found) - float(logs.sum())) <= 3.5 * deviation
        assert 0.3 * deviation < float(found.stderr) < 2 * deviation


FALSE_BOUNDS = {
    "above the least": (0.5, 12.0),
    "below the largest": (1e-3, 5.0),
    "elsewhere": (20.0, 30.0),
}


# every preconditioner with every method, and all false bounds with each of them
BOUNDED = [
    ("above the least", method, precondition)
    for method in ("slq", "maxent", "chebyshev", "exact")
    for precondition in ("auto", "none", "jacobi", "cholesky")
]
BOUNDED += [
    (name, method, "none") for name in list(FALSE_BOUNDS)[1:] for method in ("slq", "exact")
]
BOUNDED += [
    (name, method, "jacobi")
    for name in list(FALSE_BOUNDS)[1:]
    for method in ("maxent", "chebyshev")
]


@pytest.mark.parametrize(("name", "method", "precondition"), BOUNDED)
def test_bounds_that_do_not_hold_the_spectrum_are_refused(name, method, precondition):
    """In the units of A, whatever it is scaled with; the Ritz value that lies outside is in the
    message.
    """
    scale = torch.logspace(-1, 1, 80, dtype=D).roll(17)
    matrix = with_eigenvalues(POSITIVE)
    # an uneven diagonal, so that bounds of the scaled matrix would be others
    if precondition == "jacobi":
        matrix = (
            scale.sqrt()[:, None]
            * with_eigenvalues(torch.linspace(0.5, 1.0, 80, dtype=D))
            * scale.sqrt()
        )
    values = torch.linalg.eigvalsh(matrix)
    options = {} if method == "exact" else {"depth": 30}
    with pytest.raises(
        ValueError, match=r"bounds must hold the whole spectrum of A, got .* and a Ritz value of"
    ) as error:
        logdet(
            operator(matrix),
            method,
            bounds=FALSE_BOUNDS[name],
            precondition=precondition,
            **options,
        )
    value = float(str(error.value).split("Ritz value of")[1].split(";")[0].split()[-1])
    assert float(values[0]) * 0.99 <= value <= float(values[-1]) * 1.01
    assert not FALSE_BOUNDS[name][0] <= value <= FALSE_BOUNDS[name][1]
    found = logdet(
        operator(matrix),
        method,
        precondition=precondition,
        bounds=(values[0], values[-1]),
        **options,
    )
    low, high = found.interval(0.9999)
    assert low - 1e-8 <= float(values.log().sum()) <= high + 1e-8


@pytest.mark.parametrize("method", ["slq", "maxent", "chebyshev"])
def test_bounds_of_a_matrix_of_uneven_rows_are_its_own(method):
    """Jacobi scaling is chosen; the bounds given are those of the matrix, 10⁶ apart."""
    matrix = uneven()
    values = np.linalg.eigvalsh(matrix.toarray())
    found = logdet(operator(matrix), method, bounds=(0.99 * values[0], 1.01 * values[-1]))
    assert (
        abs(found.value - np.log(values).sum()) <= 4 * float(found.stderr) < 0.05 * abs(found.value)
    )


DIAGONALS = {
    "identity": torch.ones(150, dtype=D),
    "a third of it": torch.full((150,), 1 / 3, dtype=D),
    "two values": torch.tensor([1.0, 2.0], dtype=D).repeat(100),
    "five values": torch.logspace(-2, 2, 5, dtype=D).repeat(60),
    "six decades": torch.logspace(-3, 3, 250, dtype=D),
    "1 to 2": torch.linspace(1, 2, 400, dtype=D),
}


@pytest.mark.parametrize("dtype", [torch.float32, D])
@pytest.mark.parametrize("method", ["slq", "maxent", "chebyshev"])
@pytest.mark.parametrize("name", DIAGONALS)
def test_no_alarm_on_the_identity_and_on_diagonals(name, method, dtype):
    values = DIAGONALS[name].to(dtype)
    exact = float(values.double().log().sum())
    forms = [torch.diag(values), scipy.sparse.diags_array(values.numpy()).tocsr()]
    forms += [Diagonal(values)] if len(values.unique()) <= 5 else []
    for form in forms:
        found = logdet(form, method)
        assert found.status is Status.CONVERGED, found
        assert abs(found.value - exact) <= 4 * float(found.stderr) + 1e-6 * len(values)


@pytest.mark.parametrize(
    ("dimensions", "scale", "noise", "method"),
    [(3, 1.0, 1e-4, "slq"), (3, 1.5, 1e-2, "maxent"), (2, 0.5, 1e-5, "chebyshev")],
)
def test_a_dense_kernel_array_is_preconditioned_as_a_kernel_is(dimensions, scale, noise, method):
    array = kernel_matrix(points(500, dimensions), length_scale=scale, noise=noise).dense().numpy()
    exact = float(np.linalg.slogdet(array)[1])
    runs = [logdet(array, method, seed=seed) for seed in range(3)]
    runs.append(logdet(operator(array - noise * np.eye(500)) + noise * identity(array), method))
    for found in runs:
        assert abs(found.value - exact) <= 0.01 * abs(exact)
        assert abs(found.value - exact) <= 4 * float(found.stderr)
        assert found.cost <= 1130  # its columns are read


@pytest.mark.parametrize(("side", "shift"), [(24, 0.05), (24, 0.0)])
def test_a_tolerance_saves_products(side, shift):
    """14,000 rows to 0.2 %: fewer than a hundred products."""
    matrix, exact = laplacian(side, shift)
    for seed in range(5):
        found = logdet(matrix, tol=2e-3, seed=seed)
        low, high = found.interval()
        assert (high - low) / 2 <= 2e-3 * abs(exact) * 1.01
        assert abs(found.value - exact) <= 2e-3 * abs(exact)
        assert found.cost < 100
        assert found.status in (
            (Status.CONVERGED,) if shift else (Status.CONVERGED, Status.POSITIVITY)
        )
    finer = logdet(matrix, tol=5e-4)
    assert found.cost < finer.cost < 1500
    assert abs(finer.value - exact) <= 5e-4 * abs(exact)


def _torus(side: int, shift: float) -> tuple[scipy.sparse.csr_array, float]:
    """The Laplacian of a periodic square plus a shift, and its log det by Fourier modes."""
    ring = scipy.sparse.diags_array(
        [-1.0, -1.0, 2.0, -1.0, -1.0], offsets=[1 - side, -1, 0, 1, side - 1], shape=(side, side)
    )
    eye, mode = scipy.sparse.eye_array(side), 2 - 2 * np.cos(2 * np.pi * np.arange(side) / side)
    matrix = scipy.sparse.kron(ring, eye) + scipy.sparse.kron(eye, ring)
    matrix = (matrix + shift * scipy.sparse.eye_array(side**2)).tocsr()
    return matrix, float(np.log(mode[:, None] + mode + shift).sum())


def _line(size: int) -> tuple[scipy.sparse.csr_array, float]:
    """A tridiagonal Toeplitz matrix, eigenvalues 2.5 − 2cos(πj/(n + 1))."""
    matrix = scipy.sparse.diags_array([-1.0, 2.5, -1.0], offsets=[-1, 0, 1], shape=(size, size))
    values = 2.5 - 2 * np.cos(np.pi * np.arange(1, size + 1) / (size + 1))
    return matrix.tocsr(), float(np.log(values).sum())


@pytest.mark.parametrize(
    ("matrix", "exact"),
    [_torus(150, 0.1), _line(20_000), laplacian(28, 0.05)],
    ids=["torus", "line", "cube"],
)
def test_the_plain_call_stops_at_a_narrow_interval_and_covers(matrix, exact):
    """To 0.02 %, or by ten probes of few steps: far below ten times 100 products."""
    found = [logdet(matrix, seed=seed) for seed in range(12)]
    held = sum(low <= exact <= high for low, high in (one.interval() for one in found))
    assert held >= 10
    for one in found:
        assert one.status is Status.CONVERGED
        assert abs(one.value - exact) <= 1e-3 * abs(exact)
        assert one.cost <= 320
    assert logdet(matrix, depth=100, probes=1).cost == 100  # what is given is kept


TOLERANCES = {
    "Laplacian": (lambda: operator(laplacian(14, 0.05)[0]), laplacian(14, 0.05)[1], 4e-3),
    "x²": (lambda: Diagonal(torch.linspace(0.05, 1, 4000, dtype=D) ** 2), None, 2e-2),
    "an outlier": (
        lambda: Diagonal(torch.cat([torch.tensor([1e-6], dtype=D), torch.linspace(1, 3, 5000)])),
        None,
        0.01,
    ),
    "log-uniform": (lambda: Diagonal(torch.logspace(-3, 0, 5000, dtype=D)), None, 1e-2),
}


@pytest.mark.parametrize("name", TOLERANCES)
def test_a_tolerance_is_kept(name):
    """Over 40 seeds: the interval is as narrow as asked for, and holds in 34 at least."""
    make, exact, tol = TOLERANCES[name]
    A = make()
    exact = float(A.values.log().sum()) if exact is None else exact
    held = 0
    for seed in range(40):
        found = logdet(A, tol=tol, seed=seed)
        low, high = found.interval()
        assert found.status in (Status.CONVERGED, Status.POSITIVITY)
        assert (high - low) / 2 <= 1.02 * tol * max(abs(found.value), abs(exact))
        held += low <= exact <= high
    assert held >= 34


@pytest.mark.parametrize("method", ["maxent", "chebyshev"])
def test_a_tolerance_for_moments(method):
    A = Diagonal(torch.linspace(1, 3, 5000, dtype=D))
    exact = float(A.values.log().sum())
    found = [logdet(A, method, tol=tol) for tol in (3e-2, 1e-2)]
    for one, tol in zip(found, (3e-2, 1e-2), strict=True):
        low, high = one.interval()
        assert (high - low) / 2 <= tol * abs(one.value)
        assert abs(one.value - exact) <= 2 * tol * exact
        assert one.status is Status.CONVERGED
    assert found[0].cost < found[1].cost


def test_a_tolerance_beyond_reach():
    """Where P products do it is exact; else the budget is said to be spent, and is."""
    matrix = with_eigenvalues(POSITIVE)
    found = logdet(Products(matrix), tol=1e-6)
    assert found.value == pytest.approx(float(torch.logdet(matrix)), rel=1e-10)
    assert found.cost <= 80 + 110
    spent = logdet(Diagonal(torch.logspace(-3, 0, 5000, dtype=D)), tol=1e-6, max_matvecs=300)
    assert spent.status is Status.BUDGET_SPENT
    assert spent.cost <= 300
    low, high = spent.interval()
    assert low <= float(torch.logspace(-3, 0, 5000, dtype=D).log().sum()) <= high
    for values in (torch.ones(500), torch.full((500,), 2.0, dtype=D)):
        assert logdet(Diagonal(values), tol=1e-3).cost <= 4
    with pytest.raises(ValueError, match="positive definite, got the Ritz value"):
        logdet(Diagonal(torch.linspace(-1, 1, 500)), tol=1e-2)


ONE = torch.eye(5, dtype=torch.float64)
MISUSES = {
    "one probe for moments": (
        lambda: logdet(operator(ONE), "maxent", probes=1),
        "probes must be an integer of at least 2",
    ),
    "depth beyond P": (lambda: logdet(operator(ONE), depth=100), "depth must be"),
    "bounds that hold 0": (
        lambda: logdet(operator(ONE), "chebyshev", bounds=(0.0, 2.0)),
        "0 < low < high",
    ),
    "bounds too narrow": (
        lambda: logdet(operator(with_eigenvalues(POSITIVE)), "maxent", 20, bounds=(1.0, 2.0)),
        "bounds must hold the whole spectrum",
    ),
    "a tolerance and a depth": (
        lambda: logdet(operator(ONE), tol=0.1, depth=3),
        "tol must come without depth and probes, which it sets, got depth=3",
    ),
    "a tolerance and probes": (
        lambda: logdet(operator(ONE), tol=0.1, probes=3),
        "tol must come without",
    ),
    "no tolerance": (lambda: logdet(operator(ONE), tol=0.0), "tol must be a finite number above 0"),
    "a budget without a tolerance": (
        lambda: logdet(operator(ONE), max_matvecs=9),
        "max_matvecs must come with tol",
    ),
    "preconditioner unknown": (
        lambda: logdet(operator(ONE), precondition="ilu"),
        "precondition must be one of 'auto'",
    ),
    "rank of no factor": (
        lambda: logdet(operator(ONE), precondition="jacobi", rank=3),
        "rank must come with",
    ),
    "rank beyond P": (
        lambda: logdet(operator(ONE), precondition="cholesky", rank=6),
        r"rank must be an integer in \[1, 5\]",
    ),
    "preconditioner unknown, exact": (
        lambda: logdet(operator(ONE), "exact", precondition="ilu"),
        "precondition must be one of 'auto'",
    ),
    "a negative rank, exact": (
        lambda: logdet(operator(ONE), "exact", rank=-3),
        "rank must be an integer",
    ),
    "bounds of a word, exact": (
        lambda: logdet(operator(ONE), "exact", bounds="x"),
        "bounds must be two finite numbers",
    ),
    "probes below 1, exact": (lambda: logdet(operator(ONE), "exact", probes=-1), "probes must be"),
    "no diagonal": (
        lambda: logdet(Products(ONE), depth=2, precondition="jacobi"),
        "precondition must be 'none' where no diagonal",
    ),
    "asymmetric": (lambda: logdet(operator(np.triu(np.ones((4, 4))))), "must be symmetric"),
    "negative diagonal": (
        lambda: logdet(
            operator(torch.diag(torch.tensor([1.0, -2.0]))), depth=2, precondition="jacobi"
        ),
        "positive definite, got the diagonal entry -2; add a shift",
    ),
    "indefinite after scaling": (
        lambda: logdet(operator(torch.tensor([[1.0, 20.0], [20.0, 100.0]])), depth=2),
        r"positive definite, got the Ritz value -2\.\d+; add a shift",
    ),
    "indefinite, sparse": (
        lambda: logdet(
            operator(scipy.sparse.csr_array(np.array([[1.0, 2.0], [2.0, 1.0]]))), "exact"
        ),
        "positive definite, got the pivot -3; add a shift",
    ),
    "singular, sparse": (
        lambda: logdet(operator(scipy.sparse.csr_array(np.ones((2, 2)))), "exact"),
        "positive definite, got the pivot 0; add a shift",
    ),
    "indefinite, moments": (
        lambda: logdet(
            operator(with_eigenvalues([-1.0, 1.0, 2.0])), "maxent", 3, precondition="none"
        ),
        "positive definite, got the Ritz value -1; add a shift",
    ),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_names_the_argument(misuse):
    call, text = MISUSES[misuse]
    with pytest.raises(ValueError, match=text):
        call()


def test_a_budget_counts_the_products_of_a_preconditioner() -> None:
    """Sixty columns for a Cholesky factor, each a product, leave 140 of 200."""
    A = Known(torch.logspace(-3, 0, 5000, dtype=D))
    found = logdet(A, tol=1e-6, max_matvecs=200, precondition="cholesky", rank=60)
    assert found.status is Status.BUDGET_SPENT
    assert 60 < found.cost <= 200
    assert found.cost == A.matvecs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_errors_of_scaled_operators_quote_the_numbers_of_the_caller(dtype: torch.dtype) -> None:
    scale = 1e-25 if dtype == torch.float32 else 1e-200
    values = torch.linspace(1, 2, 150, dtype=torch.float64)
    values[0] = -1.0
    dense = torch.diag(values * scale).to(dtype)
    with pytest.raises(
        ValueError, match=f"positive definite, got the .*-1e{math.log10(scale):.0f}"
    ):
        logdet(operator(dense), depth=20, precondition="none")
    values[0] = 1.0
    given = operator(torch.diag(values * scale).to(dtype))
    with pytest.raises(ValueError, match=f"hold the whole spectrum of A.*e{math.log10(scale):.0f}"):
        logdet(given, depth=20, bounds=(1.5 * scale, 1.6 * scale), precondition="none")


@pytest.mark.parametrize(("low", "high"), [(-22, 23), (-37, 8)])
def test_float32_matrices_over_45_decades_keep_their_small_entries(low: int, high: int) -> None:
    entries = torch.logspace(low, high, 200, dtype=torch.float64).float()
    truth = float(entries.double().log().sum())
    for settings in ({}, {"depth": 40}, {"tol": 1e-3}):
        found = logdet(operator(torch.diag(entries)), **settings)
        assert abs(float(found) - truth) <= max(4 * float(found.stderr), 1e-9 * abs(truth))


def test_jacobi_scaling_keeps_the_shift_of_a_sum():
    """A semidefinite matrix plus a multiple of the identity is positive, also when it is scaled."""
    gauss_newton = ggn(classifier((30, 20, 3), samples=60))
    shifted = gauss_newton + 1e-3 * identity(gauss_newton)
    found = logdet(shifted, precondition="jacobi", probes=10)
    assert found.status is Status.CONVERGED
    assert abs(float(found) - float(torch.logdet(shifted.dense()))) <= 4 * float(found.stderr)


@pytest.mark.parametrize("seed", range(4))
def test_long_runs_of_an_uneven_spectrum_keep_their_basis(seed):
    """Overlaps that grew in a run of 200 steps once made Ritz values of −1e18."""
    values = torch.logspace(0, -8, 250, dtype=torch.float64)
    found = logdet(operator(with_eigenvalues(values)), tol=0.01, seed=seed)
    assert abs(float(found) - float(values.log().sum())) <= max(4 * found.stderr, 1e-3)
