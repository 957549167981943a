from __future__ import annotations

import math

import pytest
import torch

from lambdahat._core.progress import progress
from lambdahat.estimators import trace, trace_per_layer
from lambdahat.estimators._trace import ExchangeableTrace
from lambdahat.estimators.probes import Probes
from lambdahat.estimators.sequential import Goal, standard_error
from lambdahat.operators import operator
from lambdahat.problem.problem import Space
from lambdahat.results import Status
from tests.cases import Products, spectra, with_eigenvalues

SAMPLED = ("auto", "hutchinson", "hutch++", "xtrace")
MATRICES = spectra()
NETWORK = MATRICES["network"]


def misses(found, truth: float) -> float:
    """The error in standard errors."""
    return abs(found.value - truth) / found.stderr


@pytest.mark.parametrize("method", SAMPLED)
@pytest.mark.parametrize("name", ["flat", "decaying", "network"])
def test_value_lies_within_its_error_and_cost_is_counted(method: str, name: str) -> None:
    matrix = MATRICES[name]
    near = Products(matrix)
    found = trace(near, tol=0.2, method=method)
    assert found.cost == near.matvecs
    assert found.status is Status.CONVERGED
    low, high = found.interval(0.95)
    assert 0 < high - low <= 2 * 0.2 * abs(found.value)
    assert misses(found, float(matrix.trace())) < 4


@pytest.mark.parametrize("probe", ["rademacher", "gaussian", "sphere"])
@pytest.mark.parametrize("method", SAMPLED)
def test_every_probe_is_unbiased(method: str, probe: str) -> None:
    matrix = with_eigenvalues(
        torch.cat([torch.linspace(-1, 2, 37), torch.tensor([20.0, 30.0, 40.0])])
    )
    values = torch.tensor(
        [
            trace(
                Products(matrix), tol=10.0, method=method, probe=probe, seed=seed, max_matvecs=36
            ).value
            for seed in range(200)
        ]
    )
    assert abs(float(values.mean() - matrix.trace())) < 4 * float(values.std()) / math.sqrt(200)


def test_deflation_takes_fewer_products_than_hutchinson() -> None:
    costs = {method: trace(Products(NETWORK), tol=0.1, method=method).cost for method in SAMPLED}
    assert costs["auto"] <= 50 < costs["hutchinson"]
    assert costs["hutch++"] <= 50
    assert costs["xtrace"] <= 50


def test_auto_is_hutchinson_where_a_sketch_does_not_pay() -> None:
    flat = MATRICES["flat"]
    auto, plain = (
        trace(Products(flat), tol=0.02),
        trace(Products(flat), tol=0.02, method="hutchinson"),
    )
    assert (auto.value, auto.stderr, auto.cost) == (plain.value, plain.stderr, plain.cost)


def test_exact_is_used_where_known_and_refused_elsewhere() -> None:
    known = operator(NETWORK)
    for method in ("auto", "exact"):
        found = trace(known, method=method)
        assert found.value == pytest.approx(float(NETWORK.trace()), rel=1e-12)
        assert (found.stderr, found.cost, known.matvecs) == (0.0, 0, 0)
    with pytest.raises(
        ValueError, match=r"method must not be 'exact' .* call trace\(operator, method='auto'\)"
    ):
        trace(Products(NETWORK), method="exact")


@pytest.mark.parametrize("method", SAMPLED)
def test_dense_where_probes_would_cost_more(method: str) -> None:
    matrix = MATRICES["indefinite"][:60, :60]
    near = Products(matrix)
    found = trace(near, tol=1e-4, method=method)
    assert found.stderr == 0.0
    assert found.value == pytest.approx(float(matrix.trace()), rel=1e-12)
    assert found.cost == near.matvecs <= 120


@pytest.mark.parametrize("method", SAMPLED)
def test_small_operators_are_dense_at_once(method: str) -> None:
    small = Products(NETWORK[:9, :9])
    found = trace(small, method=method)
    assert found.value == pytest.approx(float(NETWORK[:9, :9].trace()), rel=1e-12)
    assert (found.stderr, found.cost) == (0.0, 9)


@pytest.mark.parametrize("limit", [4, 7, 23, 90])
@pytest.mark.parametrize("method", SAMPLED)
def test_budget_is_kept_and_its_end_is_said(method: str, limit: int) -> None:
    near = Products(MATRICES["indefinite"])
    found = trace(near, tol=1e-6, method=method, max_matvecs=limit)
    assert found.cost == near.matvecs <= limit
    assert found.status is Status.BUDGET_SPENT
    assert misses(found, float(MATRICES["indefinite"].trace())) < 15


def test_low_rank_is_found_exactly() -> None:
    matrix = with_eigenvalues([5.0, 3.0, -1.0, *[0.0] * 97])
    for method in ("hutch++", "xtrace"):
        found = trace(Products(matrix), tol=1e-9, method=method)
        assert found.value == pytest.approx(7.0, abs=1e-9)
        assert found.cost <= 48
    for method in SAMPLED:
        assert trace(Products(torch.zeros(100, 100)), method=method).value == 0.0


def test_diagonal_matrix_costs_one_block_of_rademacher_probes() -> None:
    found = trace(Products(torch.diag(torch.linspace(-1, 5, 200, dtype=torch.float64))), tol=1e-9)
    assert found.value == pytest.approx(400.0, rel=1e-12)
    assert found.cost == 16


def test_vanishing_trace_is_measured_against_the_frobenius_norm() -> None:
    matrix = MATRICES["no trace"]
    found = trace(Products(matrix), tol=0.1)
    low, high = found.interval(0.95)
    assert found.status is Status.CONVERGED
    assert 0.2 * abs(found.value) < high - low < 2 * 0.1 * 1.5 * float(matrix.norm())


class TestControlVariate:
    def test_known_trace_is_kept_in_float64(self) -> None:
        matrix = torch.full((300, 300), 1e6, dtype=torch.float64).fill_diagonal_(411522.63)
        # its own control
        found = trace(Products(matrix, near=operator(matrix)), tol=1e-4, max_matvecs=64)
        assert float(found) == pytest.approx(float(matrix.trace()), rel=1e-12)

    def near(self, distance: float) -> Products:
        step = with_eigenvalues(distance * torch.linspace(-1, 1, 300, dtype=torch.float64), seed=5)
        return Products(NETWORK + step, near=operator(NETWORK))

    def test_is_used_where_it_pays(self) -> None:
        close = self.near(1.0)
        found = trace(close, tol=0.01)
        assert found.cost == close.matvecs + close.near.matvecs == 32
        assert misses(found, float(close.matrix.trace())) < 4

    def test_is_dropped_where_it_does_not(self) -> None:
        far = self.near(300.0)
        found = trace(far, tol=0.3)
        assert far.near.matvecs == 4
        assert found.cost == far.matvecs + 4
        assert misses(found, float(far.matrix.trace())) < 4

    def test_keeps_the_budget(self) -> None:
        close = self.near(1.0)
        assert trace(close, tol=1e-6, max_matvecs=20).cost <= 20


def test_operators_that_are_not_symmetric() -> None:
    matrix = torch.triu(MATRICES["flat"])
    for method in ("hutch++", "xtrace"):
        with pytest.raises(
            ValueError, match="method must be 'hutchinson' for an operator that is not symmetric"
        ):
            trace(Products(matrix, symmetric=False), method=method)
    for method in ("auto", "hutchinson"):
        found = trace(Products(matrix, symmetric=False), tol=0.05, method=method)
        assert misses(found, float(matrix.trace())) < 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tol": 0}, "tol must be a finite number above 0"),
        ({"tol": -0.1}, "tol must be a finite number above 0"),
        ({"method": "hutch"}, "method must be one of 'auto', 'exact'"),
        ({"max_matvecs": 1}, "max_matvecs must be an integer of at least 2"),
        ({"method": "xtrace", "max_matvecs": 3}, "max_matvecs must be an integer of at least 4"),
        ({"probe": "uniform"}, "probe must be one of"),
    ],
)
def test_misuse_is_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trace(Products(NETWORK), **arguments)


@pytest.mark.parametrize("method", ["auto", "hutchinson", "xtrace"])
def test_products_that_are_not_finite_are_named(method: str) -> None:
    broken = NETWORK.clone()
    broken[3, 3] = math.nan
    with pytest.raises(ValueError, match="the operator must give finite products"):
        trace(Products(broken), method=method)


def test_xtrace_agrees_with_leaving_each_probe_out() -> None:
    near = Products(NETWORK)
    for kind in ("sphere", "gaussian"):
        state = ExchangeableTrace(near, Probes(near, kind, 0, "test"))
        state.extend(5)
        state.extend(4)
        for i, found in enumerate(state.estimates()[0]):
            others = [j for j in range(9) if j != i]
            basis = torch.linalg.qr(NETWORK @ state.omega[:, others]).Q
            rest = state.omega[:, i] - basis @ (basis.T @ state.omega[:, i])
            factor = (300 - 8) / (rest @ rest) if kind == "sphere" else 1.0
            direct = (basis.T @ NETWORK @ basis).trace() + factor * (rest @ NETWORK @ rest)
            assert float(found) == pytest.approx(float(direct), rel=1e-10)


def test_float32_is_summed_in_float64() -> None:
    found = trace(Products(NETWORK.float()), tol=0.01)
    same = trace(Products(NETWORK), tol=0.01)
    assert found.cost == same.cost
    assert found.value == pytest.approx(same.value, rel=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("method", SAMPLED)
def test_the_device_changes_rounding_only(method: str) -> None:
    here, there = (
        trace(Products(NETWORK.to(device)), tol=0.1, method=method) for device in ("cpu", "cuda")
    )
    assert (here.cost, here.status) == (there.cost, there.status)
    assert here.value == pytest.approx(there.value, rel=1e-9)
    assert here.stderr == pytest.approx(there.stderr, rel=1e-6)


def test_standard_error_is_larger_for_skewed_samples() -> None:
    even = torch.tensor([[-1.0], [1.0]] * 8, dtype=torch.float64)
    assert float(standard_error(even)) == pytest.approx(float(even.std()) / 4)
    skewed = torch.tensor([[0.0]] * 15 + [[16.0]], dtype=torch.float64)
    skewness = (15 * (-1.0) ** 3 + 15.0**3) / 16 / 15**1.5
    assert float(standard_error(skewed)) == pytest.approx(
        float(skewed.std()) / 4 * (1 + skewness**2 / 8)
    )


def test_goal_wants_the_samples_that_student_asks_for() -> None:
    samples = torch.tensor([[9.0], [11.0]] * 8, dtype=torch.float64)
    nothing = torch.zeros(1, dtype=torch.float64)
    mean = Goal(0.01, nothing, nothing).judge(samples)
    assert mean.wanted == pytest.approx((2.13145 * float(samples.std()) / 0.1) ** 2, rel=1e-4)
    assert not mean.reached
    assert Goal(0.06, nothing, nothing).judge(samples).reached


def test_progress_is_reported() -> None:
    seen: list[tuple[str, int, int | None]] = []
    with progress(lambda *report: seen.append(report)):
        found = trace(Products(NETWORK), tol=0.1)
    assert seen[-1] == ("trace", found.cost, found.cost)


class TestPerLayer:
    space = Space(("first.weight", "first.bias", "second.weight"), ((10, 12), (10,), (17, 10)))

    def exact(self, matrix: torch.Tensor) -> dict[str, float]:
        diagonal = matrix.diagonal()
        return {"first": float(diagonal[:130].sum()), "second": float(diagonal[130:].sum())}

    def test_one_set_of_probes_serves_all_layers(self) -> None:
        near = Products(MATRICES["flat"], space=self.space)
        found = trace_per_layer(near, tol=0.03)
        for layer, truth in self.exact(near.matrix).items():
            assert 0 < found[layer].stderr < 0.03 * truth
            assert misses(found[layer], truth) < 4
            assert found[layer].cost == near.matvecs

    def test_control_variate_and_dense(self) -> None:
        step = with_eigenvalues(torch.linspace(-1, 1, 300, dtype=torch.float64), seed=5)
        near = Products(NETWORK + step, near=operator(NETWORK), space=self.space)
        found = trace_per_layer(near, tol=0.05)
        assert found["first"].cost == near.matvecs + near.near.matvecs < 100
        exact = self.exact(near.matrix)
        assert all(misses(found[layer], exact[layer]) < 4 for layer in exact)
        dense = trace_per_layer(Products(NETWORK, space=self.space), tol=1e-4)
        assert {layer: part.value for layer, part in dense.items()} == pytest.approx(
            self.exact(NETWORK)
        )
        assert all(part.stderr == 0.0 for part in dense.values())

    def test_names_are_needed(self) -> None:
        with pytest.raises(ValueError, match="operator must have named parameters"):
            trace_per_layer(Products(NETWORK))


class _Controlled(Products):
    """With a control variate of which the trace is known, and which is far from the matrix."""

    def control(self):
        return operator(torch.eye(self.dim, dtype=self.dtype))


@pytest.mark.parametrize("order", [17, 20, 24, 31, 33, 40, 47, 49])
@pytest.mark.parametrize("method", SAMPLED)
def test_small_operators_get_the_dense_answer_within_the_default_budget(
    method: str, order: int
) -> None:
    matrix = with_eigenvalues(torch.linspace(-3, 3.5, order))
    found = trace(_Controlled(matrix), tol=1e-3, method=method)
    assert found.status is Status.CONVERGED
    assert found.value == pytest.approx(float(matrix.trace()), rel=1e-6)


@pytest.mark.parametrize("method", ["auto", "hutchinson", "hutch++"])
@pytest.mark.parametrize("most", [2, 3, 5])
def test_few_probes_that_agree_by_chance_are_not_exact(method: str, most: int) -> None:
    """One entry beside the diagonal moves each form up or down by the same."""
    matrix = torch.eye(100, dtype=torch.float64)
    matrix[3, 7] = matrix[7, 3] = 5.0
    runs = [
        trace(Products(matrix), method=method, max_matvecs=most, seed=seed) for seed in range(200)
    ]
    covered = sum(low <= 100.0 <= high for low, high in (found.interval() for found in runs))
    assert covered >= 0.92 * len(runs)
    assert all(found.stderr > 0 for found in runs)
