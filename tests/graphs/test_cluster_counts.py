"""Cluster counts against graphs whose clusters are known, and refusals where there is no gap."""

import math
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from scipy.sparse.linalg import eigsh

from lambdahat.graphs import Clusters, cluster_labels, clusters, graph, smoothed_lanczos_clusters
from lambdahat.graphs.cluster_counts import Gap, weigh
from lambdahat.graphs.spectra import components, degrees_of_freedom, eigenvalues, walk_partition
from lambdahat.results import Result, Status
from tests.graphs.made import cliques, planted


@pytest.mark.parametrize(("sizes", "count"), [([10] * 5, 5), ([10, 7, 1, 1, 12], 5)])
def test_components_are_clusters_and_isolated_nodes_too(sizes, count):
    found = clusters(cliques(sizes), 60)
    assert float(found) == pytest.approx(count, abs=1e-3)
    assert (found.rounded, found.components, found.status) == (count, count, Status.CONVERGED)


@pytest.mark.parametrize("probes", [None, 100])
@pytest.mark.parametrize("count", [9, 30])
def test_planted_clusters_are_counted(count, probes):
    one = planted(count, seed=3)
    found = clusters(one, 80, probes=probes)
    assert found.components < count  # the links join most of them
    # the thesis's own error at 30, Table 3.2
    assert float(found) == pytest.approx(count, rel=6.4e-3)
    assert found.status.ok
    values = eigenvalues(one)
    assert values[count - 1] <= found.gaps[0].low + 0.02
    assert found.gaps[0].high - 0.02 <= values[count]


def test_the_error_bar_covers():
    """Twelve seeds on one graph, judged in their own standard errors."""
    one = planted(30, seed=1, outside=1.0)
    found = [clusters(one, 60, probes=60, seed=seed) for seed in range(12)]
    assert all(f.status.ok for f in found)
    off = np.array([(float(f) - 30) / float(f.stderr) for f in found])
    assert int((np.abs(off) < 2.2).sum()) >= 10
    assert abs(np.mean([float(f) for f in found]) - 30) < 0.02 * 30


def test_the_error_bar_holds_where_only_the_fit_errs():
    """Exact moments of atoms, which a density only comes near: the count below λ* is a whole
    number.
    """
    one = graph(nx.relaxed_caveman_graph(5, 12, 0.05, seed=1))
    found = clusters(one, 100)
    assert int((eigenvalues(one) <= found.cut).sum()) == 5
    assert abs(float(found) - 5) <= 3 * float(found.stderr) < 1e-3


def laplacian_eigenvalues(made):
    """By NumPy, from the definition."""
    adjacency = nx.to_numpy_array(made, weight=None)
    degrees = adjacency.sum(axis=1)
    return np.linalg.eigvalsh(np.eye(len(made)) - adjacency / np.sqrt(np.outer(degrees, degrees)))


def test_other_gaps_tell_of_other_clusters():
    found = clusters(planted(9, seed=0, outside=1.0), 80)
    assert found.rounded == 9
    assert found.components == 1
    assert any(abs(gap.count - 1) < 0.05 for gap in found.gaps[1:])
    assert all(a.weight >= b.weight for a, b in zip(found.gaps, found.gaps[1:], strict=False))


@pytest.mark.parametrize("seed", range(3))
def test_the_gap_behind_0_is_not_the_count_where_another_is_wider(seed):
    """12 clusters of 40: the eigengap is widest after 12, though in arccos(1 − λ) it is widest
    behind 0.
    """
    made = nx.planted_partition_graph(12, 40, 0.4, 0.01, seed=seed)
    gaps = np.diff(laplacian_eigenvalues(made)[:240])
    assert gaps.argmax() == 11
    found = clusters(graph(made))
    assert (float(found), float(found.stderr), found.status) == (12.0, 0.0, Status.CONVERGED)
    assert found.rivals == {12: 1.0}
    assert any(round(gap.count) == 1 for gap in found.gaps)


def test_a_weaker_gap_than_that_behind_0_is_the_count_where_random_graphs_have_none():
    """20 clusters with a third of their edges outside: behind 0 the eigengap is wider, and says
    nothing.
    """
    made = nx.planted_partition_graph(20, 40, 0.5, 0.02, seed=0)
    gaps = np.diff(laplacian_eigenvalues(made)[:400])
    assert gaps.argmax() == 0
    assert gaps[1:].argmax() == 18
    assert clusters(graph(made)).rounded == 20


@pytest.mark.parametrize(("size", "count"), [(40, 40), (100, 17)])
def test_large_graphs_are_counted_to_the_last_cluster(size, count):
    """Beyond 1,000 nodes 100 probes alone err by about √(count/50)."""
    made = nx.planted_partition_graph(count, size, 0.4, 0.01 * 40 / size, seed=5)
    assert len(made) > 1000
    found = clusters(graph(made))
    assert (float(found), float(found.stderr), found.status) == (
        float(count),
        0.0,
        Status.CONVERGED,
    )
    values = laplacian_eigenvalues(made)
    assert int((values < found.cut).sum()) == count
    assert found.cost <= 2 * 100 * 50


RANDOM = {
    "Erdős–Rényi": lambda: nx.gnp_random_graph(300, 0.06, seed=1),
    "Barabási–Albert": lambda: nx.barabasi_albert_graph(400, 5, seed=1),
    "regular": lambda: nx.random_regular_graph(8, 250, seed=1),
    "complete": lambda: nx.complete_graph(40),
    "a large one": lambda: nx.gnp_random_graph(1500, 0.01, seed=2),
}


@pytest.mark.parametrize("made", RANDOM.values(), ids=RANDOM.keys())
def test_a_graph_without_clusters_is_one(made):
    found = clusters(graph(made()))
    assert found.rounded == 1
    assert next(iter(found.rivals.values())) > 0.5
    assert found.status.ok


def test_clusters_of_clusters_are_rivals_and_the_error_bar_covers_both():
    """4 groups of 4 clusters: the eigenvalues part after 4 and after 16."""
    blocks = np.full((16, 16), 0.01)
    for group in range(4):
        blocks[4 * group : 4 * group + 4, 4 * group : 4 * group + 4] = 0.11
    np.fill_diagonal(blocks, 0.6)
    made = nx.stochastic_block_model([30] * 16, blocks, seed=0)
    gaps = np.diff(laplacian_eigenvalues(made)[:240])
    assert set(np.argsort(-gaps)[:2] + 1) == {4, 16}
    found = clusters(graph(made))
    assert {4, 16} <= set(found.rivals)
    assert sum(found.rivals.values()) == pytest.approx(1.0)
    low, high = found.interval()
    assert low <= 4
    assert high >= 16
    assert "4 (" in str(found)
    assert "16 (" in str(found)


PLACES = [
    folder / "shared" / "data" / "graphs" / "football.gml.gz" for folder in Path(__file__).parents
]
FOOTBALL = next((path for path in PLACES if path.is_file()), None)


@pytest.mark.skipif(FOOTBALL is None, reason="the shared data is not here")
def test_football_has_its_conferences():
    """Girvan and Newman's games have 12 conferences, one of them of independents that hardly
    play each other.
    """
    found = clusters(graph(FOOTBALL))
    assert found.rounded in (11, 12)
    assert {11, 12} <= set(found.rivals)
    low, high = found.interval()
    assert low <= 11 < 12 <= high


MANY_COMPONENTS = {
    "cliques among isolated nodes": (
        nx.disjoint_union_all([nx.complete_graph(10)] * 8 + [nx.empty_graph(120)]),
        128,
    ),
    "pairs": (nx.disjoint_union_all([nx.path_graph(2)] * 100), 100),
    "no edge": (nx.empty_graph(50), 50),
    "one pair": (nx.path_graph(2), 1),
}


@pytest.mark.parametrize("probes", [None, 16])
@pytest.mark.parametrize(("made", "count"), MANY_COMPONENTS.values(), ids=MANY_COMPONENTS.keys())
def test_more_components_than_half_of_the_nodes_are_counted(made, count, probes):
    found = clusters(graph(made), 60, probes=probes)
    assert float(found) == pytest.approx(count, abs=1e-3)
    assert (found.components, found.status) == (count, Status.CONVERGED)


def test_a_graph_without_edges_has_a_label_and_a_figure_for_every_node(tmp_path):
    found = clusters(graph(nx.empty_graph(5)), labels=True)
    assert list(found.labels) == list(range(5))
    assert (found.value, found.stderr, found.spectrum) == (5.0, 0.0, None)
    assert Result.load(found.save(tmp_path / "clusters")).value == 5.0


def test_degrees_of_freedom_are_those_of_the_probes_of_each_part():
    one = planted(9, seed=3)
    assert not walk_partition(one, 0).exact
    assert clusters(one, 40).dof == math.inf  # exact moments
    assert clusters(one, 40, probes=8).dof == 3  # 4 probes for the groups, 4 for the rest
    assert clusters(one, 40, probes=100).dof == 24
    two = clusters(cliques([6, 7]), 40, probes=8)
    # the part of components is known
    assert degrees_of_freedom(two.spectrum.moments, components(cliques([6, 7]))) == 7
    # and all eigenvalues confirm that there are no others
    assert (float(two), two.dof) == (2.0, math.inf)


@pytest.mark.parametrize(
    "made", [nx.path_graph(600), nx.grid_2d_graph(25, 24)], ids=["a path", "a grid"]
)
def test_no_gap_is_refused(made):
    found = clusters(graph(made), 60)
    assert found.status is Status.NO_GAP
    assert math.isnan(float(found))
    with pytest.raises(ValueError, match="the count must be known, got none; No gap"):
        _ = found.rounded


def test_a_cut_by_hand_counts_eigenvalues_below():
    one = graph(nx.path_graph(300))
    found = clusters(one, 80, cut=0.4)
    exact = int((eigenvalues(one) <= 0.4).sum())
    assert found.status.ok
    assert abs(float(found) - exact) < 2


@pytest.mark.parametrize("links", [[(0, 10), (10, 20)], []], ids=["linked", "apart"])
def test_labels_are_the_clusters(links):
    one = cliques([10, 8, 12], [(u, v - 2 if v == 20 else v) for u, v in links])
    found = clusters(one, 60, labels=True)
    assert found.rounded == 3
    groups = [set(found.labels[part]) for part in (slice(0, 10), slice(10, 18), slice(18, 30))]
    assert all(len(group) == 1 for group in groups)
    assert len(set.union(*groups)) == 3


def test_labels_of_one_cluster_and_of_more_than_components():
    assert set(cluster_labels(cliques([5]), 1)) == {0}
    assert len(set(cluster_labels(planted(6, seed=2), 6))) == 6


def test_saved_and_loaded(tmp_path):
    found = clusters(cliques([6, 6, 5]), 40, labels=True)
    again = Result.load(found.save(tmp_path / "clusters"))
    assert isinstance(again, Clusters)
    assert (again.value, again.gaps, again.cut) == (found.value, found.gaps, found.cut)
    assert np.array_equal(again.labels, found.labels)
    assert again.spectrum.nodes == 17


def test_the_baseline_counts_too_and_is_noisier():
    one = planted(30, seed=3)
    base = smoothed_lanczos_clusters(one, 40, 20)
    assert base.status.ok
    assert abs(float(base) - 30) < 4 * float(base.stderr)
    assert float(base.stderr) > 3 * float(clusters(one, 40, probes=20).stderr)
    assert base.cost == 800


def test_the_baseline_without_a_minimum_says_so():
    found = smoothed_lanczos_clusters(graph(nx.path_graph(200)), 40, 10, width=2.0)
    assert found.status is Status.NO_GAP


@pytest.mark.parametrize(("width", "first"), [(0.0373, 17), (0.02, 1)])
def test_one_cluster_is_the_headline_only_if_it_is_likelier_than_all_others_together(width, first):
    """Widths of a blurred graph with 19 clusters; the gap behind 0 counts as one of 0.0376,
    which stands out.
    """
    gaps = [
        Gap(0.06, 1.0, 0.0, 0.12),
        Gap(0.298, 17.0, 0.28, 0.28 + width),
        Gap(0.33, 18.0, 0.32, 0.348),
    ]
    weighed = weigh(gaps, 1, 0.0376)
    assert weighed[0].count == first
    sizes = np.array([0.0376, width, 0.028]) ** 3
    assert {gap.count: gap.weight for gap in weighed} == pytest.approx(
        dict(zip((1, 17, 18), sizes / sizes.sum(), strict=True))
    )


def test_a_gap_that_moments_do_not_resolve_is_found_by_the_eigenvalues():
    """1,102 nodes in 38 clusters: 20 moments show the gap behind 0 alone."""
    made = nx.planted_partition_graph(38, 29, 0.45, 0.015, seed=3)
    found = clusters(graph(made), moments=20)
    assert (found.rounded, found.status) == (38, Status.CONVERGED)


HIDDEN = {  # count, size, p inside, p outside, probes
    "a few probes": (38, 26, 0.4, 0.02, 30),
    "more than 2,500 nodes": (40, 70, 0.2, 0.01, None),
    "60 clusters": (60, 62, 0.2, 0.008, None),
}


@pytest.mark.parametrize(
    ("count", "size", "inside", "outside", "probes"), HIDDEN.values(), ids=HIDDEN.keys()
)
def test_many_clusters_behind_an_unresolved_gap_are_never_one(count, size, inside, outside, probes):
    """The gap is ten times wider than any other by ARPACK, but narrower than 100 moments resolve
    at its place.
    """
    made = nx.planted_partition_graph(count, size, inside, outside, seed=1)
    one = graph(made)
    values = np.sort(
        1 - eigsh(one.normalized(), k=count + 10, which="LA", return_eigenvectors=False)
    )
    gaps = np.diff(values)
    assert gaps[count - 1] > (10 if size > 30 else 3) * np.delete(gaps, [0, count - 1]).max()
    assert nx.is_connected(made)
    found = clusters(one, probes=probes)
    assert (float(found), found.rivals, found.status) == (count, {count: 1.0}, Status.CONVERGED)
    assert values[count - 1] < found.cut < values[count]
    assert found.cost > (50 * probes if probes else 5000)


def test_components_that_cannot_be_confirmed_are_a_lower_bound():
    """A small world: hundreds of eigenvalues below the edge of a semicircle, more than are
    computed.
    """
    found = clusters(graph(nx.watts_strogatz_graph(4000, 10, 0.1, seed=1)), moments=60)
    assert (float(found), float(found.stderr), found.status) == (1.0, math.inf, Status.UNRESOLVED)
    assert str(found).startswith("at least 1 [UNRESOLVED")


@pytest.mark.parametrize(
    ("made", "count"),
    [
        (lambda: nx.gnp_random_graph(3000, 0.01, seed=1), 1),
        (lambda: nx.barabasi_albert_graph(3000, 5, seed=1), 1),
        (lambda: nx.disjoint_union_all([nx.complete_graph(12)] * 300), 300),
    ],
    ids=["Erdős–Rényi", "Barabási–Albert", "cliques"],
)
def test_large_graphs_without_other_clusters_are_confirmed(made, count):
    found = clusters(graph(made()))
    assert (found.rounded, found.components, found.status) == (count, count, Status.CONVERGED)
    low, high = found.interval()
    assert low <= count <= high < math.inf
