"""Figures of graphs show what the results hold."""

import networkx as nx
import numpy as np
import pytest

from lambdahat.graphs import clusters, graph, similarity, spectrum, which_model
from lambdahat.report.figures import plot
from lambdahat.results.charts import is_number
from tests.graphs.made import cliques
from tests.report.test_figures import caption


def test_a_spectrum_is_drawn_over_0_to_2():
    found = spectrum(graph(nx.gnp_random_graph(60, 0.2, seed=0), name="random"), 20)
    axes = plot(found)
    (line,) = axes.get_lines()
    x, y = line.get_data()
    assert (x[0], x[-1]) == (0.0, 2.0)
    assert y[len(x) // 2] == pytest.approx(float(found.density.evaluate([x[len(x) // 2]])[0]))
    assert axes.get_title() == "Spectrum of random"
    assert caption(axes) == f"60 nodes, {found.edges} edges, 20 moments."


def test_clusters_show_their_cut_and_gap():
    found = clusters(cliques([8, 8, 8]), 40)
    axes = plot(found)
    marks = [line.get_xdata()[0] for line in axes.get_lines() if len(line.get_xdata()) == 2]
    assert marks == [found.cut, found.cut][: len(marks)]
    assert len(axes.patches) == 1
    assert axes.get_title() == "graph: 3 (exact) clusters"
    assert caption(axes).startswith("24 nodes, ")
    assert not is_number(found)


def test_a_refusal_is_in_the_title():
    axes = plot(clusters(graph(nx.path_graph(300)), 40))
    assert axes.get_title() == "graph: no gap [NO_GAP]"
    assert not axes.patches


def test_similarity_is_a_heat_map_with_a_tree():
    made = [graph(nx.gnp_random_graph(50, p, seed=0), name=f"p = {p}") for p in (0.1, 0.12, 0.4)]
    found = similarity(made, 10)
    figure = plot(found)
    heat, _, tree = figure.axes  # between them the bar of colours
    order = found.order()
    names = [found.names[i] for i in order]
    assert [label.get_text() for label in heat.get_yticklabels()] == names
    texts = np.array([text.get_text() for text in heat.texts]).reshape(3, 3)
    assert texts[0, 1] == f"{found.divergences[order[0], order[1]]:.3g}"
    assert sorted(label.get_text() for label in tree.get_yticklabels()) == sorted(found.names)
    figure.canvas.draw()


def test_models_are_bars_the_nearest_on_top():
    found = which_model(graph(nx.gnp_random_graph(40, 0.3, seed=0)), moments=8, draws=2)
    axes = plot(found)
    assert [bar.get_width() for bar in axes.patches] == [fit.divergence for fit in found.fits]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # the first is on top
    assert axes.get_title() == f"graph: nearest to {found.best}"
