"""Every kind of result has its charts on the page, with the result's own numbers."""

import math
from functools import cache

import networkx as nx
import numpy as np
import pytest
import torch

from lambdahat._rng import generator
from lambdahat.graphs import clusters, graph, similarity, spectrum, which_model
from lambdahat.problem import Problem
from lambdahat.randommatrix import advise
from lambdahat.report.chart_figures import draw
from lambdahat.report.plotly_charts import figure_of
from lambdahat.report.result_charts import CHARTS, charts_of, fields_table, tables_of
from lambdahat.report.sections import section_of_result
from lambdahat.results import Estimate, Status
from tests.graphs.made import cliques
from tests.report.test_chains import a_coefficient, some_chains
from tests.report.test_coefficients import (
    a_curve,
    a_free_energy,
    a_regression,
    a_scaling,
    a_sweep,
    a_trajectory,
    a_verification,
)
from tests.report.test_figures import RESULTS
from tests.report.test_training import run as a_run


def random_graphs():
    return [graph(nx.gnp_random_graph(40, p, seed=0), name=f"p = {p}") for p in (0.1, 0.12, 0.4)]


def some_advice():
    rows = torch.randn(40, 3, generator=generator(0, "rows"), dtype=torch.float64)
    start = {"theta": torch.ones(3, dtype=torch.float64)}
    return advise(Problem.from_function(lambda p, x: (x @ p["theta"]).square().mean(), start, rows), "momentum", 4, 16)


MADE = {
    **{name: lambda result=result: result for name, result in RESULTS.items() if name not in ("scalar", "exact")},
    "maxent": lambda: RESULTS["spectrum"].density(smoothing="maxent", moments=4),
    "chains": some_chains, "HMC": lambda: some_chains(kernel="HMC"), "coefficient": a_coefficient,
    "lost chains": lambda: some_chains(lost=(0, 1, 2)), "a lost chain": lambda: some_chains(lost=(1,)),
    "curve": a_curve, "curve over nβ": lambda: a_curve("nbeta"),
    "sweep": a_sweep, "volumes": a_scaling, "temperatures": a_regression, "trajectory": a_trajectory,
    "free energy": a_free_energy, "verification": a_verification, "run": a_run,
    "graph": lambda: spectrum(random_graphs()[0], 20), "clusters": lambda: clusters(cliques([8, 8, 8]), 40),
    "similarity": lambda: similarity(random_graphs(), 10),
    "choice": lambda: which_model(random_graphs()[0], moments=6, draws=2),
    "advice": some_advice,
}  # fmt: skip


@cache
def made(name):
    return MADE[name]()


@pytest.mark.parametrize("name", MADE)
def test_every_kind_has_charts_that_can_be_drawn(name):
    result = made(name)
    charts = charts_of(result)
    assert charts
    for chart in charts:
        assert chart.x_label and chart.y_label and chart.title  # noqa: PT018
        assert figure_of(chart)["data"]
    section = section_of_result("name", result)
    assert [chart.title for chart in section.charts] == [chart.title for chart in charts]


def test_no_kind_of_the_registry_is_left_out():
    seen = {next(kind for kind in CHARTS if isinstance(made(name), kind)) for name in MADE}
    assert seen == set(CHARTS)


def series(result, place=0):
    return {one.name: one for one in charts_of(result)[place].series}


def test_eigenvalues_have_their_residuals():
    found = series(RESULTS["eigenpairs"])
    assert found["converged"].y == [3.0, 2.0]
    assert found["not converged"].x == ["3"]
    assert found["converged"].error == pytest.approx([1e-6, 1e-3])


def test_stems_are_the_spectrum():
    stems = series(RESULTS["spectrum"])["Ritz values"]
    assert (stems.x, stems.y) == ([-0.5, 0.0, 0.1, 4.0], [0.01, 0.6, 0.38, 0.01])


def test_a_density_keeps_its_peak():
    density = RESULTS["density"]
    drawn = series(density)["density"]
    assert max(drawn.y, key=lambda y: y or 0.0) == density.values.max()
    assert drawn.error[0] == pytest.approx(1.96 * density.stderr[0], rel=1e-3)


def test_a_line_has_both_losses_and_its_parabola():
    line = RESULTS["line"]
    found = series(line)
    assert found["training"].y == line.loss.tolist()
    assert found["held out"].y == line.held_out.tolist()
    drawn = found["parabola, vᵀHv = 0.6"]
    told = [0.1 + x + 0.3 * x * x for x in drawn.x]  # the loss is one itself
    assert drawn.y == pytest.approx(told)


def test_a_plane_lies_the_right_way_round():
    plane = RESULTS["plane"]
    surface, contours, *_ = charts_of(plane)
    assert surface.surface
    assert not contours.surface
    assert contours.heat.values[0][3] == plane.loss[3, 0]


def test_the_running_mean_ends_at_the_mean_and_lambda_stands_beside_it():
    coefficient = a_coefficient()
    found = series(coefficient)
    assert found["all chains"].y[-1] == pytest.approx(coefficient.chains.energies.mean())
    assert found["chain 2"].y[-1] == pytest.approx(coefficient.chains.energies[1].mean())
    final = found["λ̂ = 1.90 ± 0.1"]
    assert (final.x, final.y) == ([200], [1.9])
    assert final.error == pytest.approx([(coefficient.interval()[1] - coefficient.interval()[0]) / 2])
    assert tables_of(coefficient)[0].rows[0][0] == "R̂, rank-normalised"


def test_traces_are_means_over_stretches():
    chains = some_chains(draws=1000)
    trace = series(chains, 1)["chain 1"]
    assert trace.y[0] == pytest.approx(chains.energies[0, :4].mean())
    assert (trace.x[0], trace.x[1]) == (2.5, 6.5)


def test_what_diverged_is_a_gap_and_warnings_have_a_name():
    assert math.isnan(series(a_sweep())["nβ = 900 (n/log n, n = 8000)"].y[-1])
    assert series(a_trajectory())["NOT_A_MINIMUM"].y == [-1.0]


def test_a_curve_has_its_tangents_the_rule_and_a_table():
    found = series(a_curve())
    assert found["λ̂"].y == [3.0, 2.8, 2.0]
    assert found["NOT_MIXED"].x == [16.0]
    tangents = found["slope dλ̂/d ln γ of the draws at each point"]
    assert [y is None for y in tangents.y] == [False, False, True, False, False]
    assert (tangents.y[0] + tangents.y[1]) / 2 == pytest.approx(3.0)
    assert found["γ of the rule = 4"].x == [4.0, 4.0]
    (chart,) = charts_of(a_curve())
    assert chart.caption.startswith("At nβ = 100 (n/log n, n = 647). ")
    drawn = {trace["name"]: trace for trace in figure_of(chart)["data"]}
    assert drawn[tangents.name]["mode"] == "lines"
    assert len(draw(chart).lines) == len(chart.series)
    assert tables_of(a_curve())[0].rows[0][:2] == ("1", "100")
    section = section_of_result("curve", a_curve())
    assert section.notes == (f"NOT_MIXED: {Status.NOT_MIXED.value}",)


def test_gamma_stands_beside_the_coefficient():
    (card,) = section_of_result("llc", a_coefficient()).cards
    assert card.detail.endswith("; nβ = 100, γ = 2")
    assert ("nβ, γ", "100, 2") in tables_of(a_coefficient())[0].rows
    assert charts_of(a_trajectory())[0].caption.startswith("At nβ = 100, γ = 10. ")
    assert "γ = 1, " in charts_of(a_sweep())[0].caption


def test_a_run_has_what_it_tracked_with_its_error():
    charts = {chart.y_label: chart for chart in charts_of(a_run())}
    assert list(charts) == ["loss, mean per sample", "accuracy", "norm", "trace"]
    assert charts["loss, mean per sample"].y_log
    assert charts["trace"].series[0].error == pytest.approx([1.96 * 0.5] * 5)
    assert section_of_result("run", a_run()).rows[2]["trace"] == 15.0


def test_numbers_are_cards_and_groups_are_opened():
    bad = Estimate(2.0, 0.5, 3, Status.BUDGET_SPENT)
    (card,) = section_of_result("trace", bad).cards
    assert (card.label, card.value) == ("trace", "2.00 ± 0.5")
    assert card.detail == "95 %: 1.02 to 2.98"
    assert card.remedy.startswith("BUDGET_SPENT: ")
    cards = section_of_result("layers", {"a": Estimate(1.0), "b": Estimate(2.0)}).cards
    assert [card.label for card in cards] == ["a", "b"]


def test_an_unknown_kind_is_its_table_of_fields():
    table = fields_table({"what": "text", "matrix": np.zeros((2, 3))})
    assert table.rows == (("what", "text"), ("matrix", "ndarray of shape (2, 3)"))
