"""Bad graphs and bad arguments, and what each says; in the form of ``tests/misuses.py``."""

import networkx as nx
import numpy as np
import pytest
import scipy.sparse

from lambdahat.graphs import (
    cluster_labels,
    clusters,
    edge_perturbation,
    fit_model,
    graph,
    similarity,
    smoothed_lanczos_clusters,
    spectrum,
    which_model,
)
from lambdahat.graphs.random_models import Model

RING = graph(nx.cycle_graph(12))

FILES = {
    "Graphviz": (
        "g.dot",
        "graph { a -- b }",
        ValueError,
        r"source must be .*, got g.dot \(Graphviz DOT\); read",
    ),
    "an adjacency list": (
        "g.adjlist",
        "0 1 2\n1 2\n",
        ValueError,
        r"got g.adjlist \(an adjacency list\)",
    ),
    "other XML": (
        "g.xml",
        "<html></html>",
        ValueError,
        "source must be GraphML or GEXF if it is XML, got g.xml",
    ),
    "broken GraphML": (
        "g.graphml",
        "<graphml><graph>",
        ValueError,
        "g.graphml must be a graphml file, got another",
    ),
    "broken GEXF": ("g.gexf", "<gexf>", ValueError, "g.gexf must be a gexf file, got another"),
    "other JSON": (
        "g.json",
        '{"a": 1}',
        ValueError,
        "g.json must be JSON with node-link, .*, got another: keys a",
    ),
    "broken JSON": ("g.json", '{"a": ', ValueError, "g.json must be JSON with"),
    "another array": ("g.npy", "0 1\n", ValueError, "g.npy must be a file of numpy.save"),
    "Pajek labels twice": (
        "g.net",
        '*Vertices 3\n1 "a"\n2 "a"\n3 "b"\n*Edges\n1 3\n2 3\n',
        ValueError,
        "every Pajek vertex must have a label of its own, got 3 vertices with 2 labels",
    ),
    "a fraction among numbers": (
        "g.txt",
        "0 1\n1 2.5\n",
        ValueError,
        "g.txt must hold two nodes .*'2.5'",
    ),
    "networkx's data broken": (
        "g.txt",
        "0 1 {'weight': x}\n",
        ValueError,
        "must hold two nodes and a weight in",
    ),
    "a missing column": (
        "g.txt",
        "0 1\n1\n2 3\n",
        ValueError,
        r"g.txt must hold two nodes in every row, got another",
    ),
    "a missing weight": (
        "g.txt",
        "0 1 2.0\n1 2\n",
        ValueError,
        "must hold two nodes and a weight in every row",
    ),
    "one column": (
        "g.txt",
        "0\n1\n",
        ValueError,
        "perhaps a weight, got '1'; a missing column, or another",
    ),
    "many columns": (
        "g.txt",
        "0 1 2 3\n",
        ValueError,
        "pass weighted=False to take the first two columns",
    ),
    "text for a weight": (
        "g.txt",
        "0 1 1.0\n1 2 heavy\n",
        ValueError,
        "got another row after 0 rows",
    ),
    "text among numbers": ("g.txt", "0 1\n1 two\n", ValueError, "got another row after 0 rows"),
    "a negative weight": (
        "g.txt",
        "0 1 2.0\n1 2 -3.5\n",
        ValueError,
        "weights must be at least 0, got -3.5; take abs",
    ),
    "NaN for a weight": (
        "g.txt",
        "0 1 2.0\n1 2 nan\n",
        ValueError,
        "weights must be finite, got nan; pass weighted=F",
    ),
    "an infinite weight": (
        "g.csv",
        "0,1,2.0\n1,2,inf\n",
        ValueError,
        "the weights must be finite, got inf",
    ),
    "no edges": (
        "g.txt",
        "# Nodes: 0\n",
        ValueError,
        "the file must hold edges, got g.txt, without a row of data",
    ),
    "an empty file": ("g.txt", "", ValueError, "the file must hold edges"),
    "one node": (
        "g.txt",
        "3 3\n",
        ValueError,
        "the graph must have at least two nodes, got a single node",
    ),
    "not square": (
        "g.mtx",
        "%%MatrixMarket matrix coordinate real general\n2 3 1\n1 3 1.0\n",
        ValueError,
        r"an adjacency matrix must be square, got shape \(2, 3\)",
    ),
    "NaN in a matrix": (
        "g.mtx",
        "%%MatrixMarket matrix coordinate real general\n2 2 1\n1 2 nan\n",
        ValueError,
        "the weights must be finite, got nan",
    ),
    "a negative entry": (
        "g.mtx",
        "%%MatrixMarket matrix coordinate real general\n2 2 1\n1 2 -1\n",
        ValueError,
        "the weights must be at least 0, got -1",
    ),
    "a complex matrix": (
        "g.mtx",
        "%%MatrixMarket matrix coordinate complex general\n2 2 1\n1 2 1 1\n",
        ValueError,
        "the matrix must be real",
    ),
    "no Matrix Market": (
        "g.mtx",
        "0 1\n",
        ValueError,
        "g.mtx must begin with %%MatrixMarket matrix",
    ),
    "half a Matrix Market": (
        "g.mtx",
        "%%MatrixMarket matrix coordinate real general\n2 2 5\n1 2 1\n",
        ValueError,
        "g.mtx must hold 5 entries, as its header says, got 1",
    ),
    "no GML": ("g.gml", "0 1", ValueError, "the file must hold one GML graph, got g.gml with 0"),
    "half a GML": (
        "g.gml",
        "graph [ node",
        ValueError,
        "GML must hold a value for every key, got none for 'node'",
    ),
    "an edge of GML to nowhere": (
        "g.gml",
        "graph [ node [ id 0 ] node [ id 1 ] edge [ source 0 target 5 ] ]",
        ValueError,
        "every GML edge must join nodes of the file",
    ),
    "a weight of GML of text": (
        "g.gml",
        'graph [ node [ id 0 ] node [ id 1 ] edge [ source 0 target 1 weight "x" ] ]',
        ValueError,
        "the weights must be numbers, got could not convert .*take 'weight' out",
    ),
    "a node of GML without brackets": (
        "g.gml",
        "graph [ node 5 node 6 ]",
        ValueError,
        "every GML node must stand in brackets, got node 5",
    ),
    "a node of GML twice": (
        "g.gml",
        "graph [ node [ id 0 ] node [ id 0 ] ]",
        ValueError,
        "every GML node must have an id of its own, got 2 with 1 ids",
    ),
    "a decimal comma": (
        "g.csv",
        "0;1;1,5\n1;2;2,5\n",
        ValueError,
        "write weights with a decimal point",
    ),
    "a name missing": (
        "g.csv",
        "ann,bob\nbob,\n",
        ValueError,
        "in every row, got another row after 0 rows: 'bob,'",
    ),
    "three names": (
        "g.csv",
        "ann,bob\nbob,eve,dan\n",
        ValueError,
        "got another row after 0 rows: 'bob,eve,dan'",
    ),
    "a file of no matrix": (
        "g.npz",
        "0 1",
        ValueError,
        "g.npz must be a file of scipy.sparse.save_npz, got another",
    ),
    "a node of GML without id": (
        "g.gml",
        "graph [ node [ label 0 ] ]",
        ValueError,
        "every GML node must have an id",
    ),
    "an edge of GML without end": (
        "g.gml",
        "graph [ node [ id 0 ] edge [ source 0 ] ]",
        ValueError,
        "every GML edge must have source and target",
    ),
}


@pytest.mark.parametrize(("name", "text", "error", "message"), FILES.values(), ids=FILES.keys())
def test_bad_files(tmp_path, name, text, error, message):
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(error, match=message):
        graph(tmp_path / name)


CALLS = {
    "no file": (
        lambda: graph("nothing.txt"),
        FileNotFoundError,
        r"source must name a file, got nothing.txt \(no such",
    ),
    "an unknown format": (
        lambda: graph(__file__, format="xml"),
        ValueError,
        "format must be one of 'edges', 'gml'",
    ),
    "a format for an object": (
        lambda: graph(nx.path_graph(3), format="gml"),
        ValueError,
        "format must be None for",
    ),
    "a number": (
        lambda: graph(7),
        TypeError,
        "source must be a file, a networkx graph, an adjacency matrix, or edge",
    ),
    "a ragged list": (lambda: graph([(0, 1), (1, 2, 3)]), TypeError, "source must be a file"),
    "two lists of two": (
        lambda: graph([[0, 1], [1, 2]]),
        ValueError,
        r"pass tuples for edges, np.array\(source\) fo",
    ),
    "three lists of three": (
        lambda: graph([[0, 1, 5.0]] * 3),
        ValueError,
        "source must say whether it holds edges or",
    ),
    "tuples of four": (
        lambda: graph([(0, 1, 2, 3)]),
        TypeError,
        r"an edge must be a tuple \(from, to\)",
    ),
    "names and numbers": (
        lambda: graph([("a", 1), ("b", 2)]),
        TypeError,
        "nodes must be all whole numbers, or all na",
    ),
    "a weight of text": (
        lambda: graph([("a", "b", "heavy")]),
        TypeError,
        "the weights must be numbers, got 'heavy'",
    ),
    "a node of nothing": (
        lambda: graph([(None, 1), (2, 3)]),
        TypeError,
        "the nodes must be numbers, got None",
    ),
    "a matrix of text": (
        lambda: graph(np.array([["a", "b"], ["b", "c"]])),
        TypeError,
        "adjacency matrix must hold nu",
    ),
    "an infinite node": (
        lambda: graph([(0, np.inf), (1, 2)]),
        ValueError,
        "the nodes of pairs must be whole numbers",
    ),
    "a networkx weight of text": (
        lambda: graph(nx.Graph([(0, 1, {"weight": "a"})])),
        TypeError,
        "weights must be nu",
    ),
    "a networkx weight of None": (
        lambda: graph(nx.Graph([(0, 1, {"weight": None})])),
        TypeError,
        "weights must be nu",
    ),
    "an empty list": (lambda: graph([]), TypeError, "source must be a file"),
    "an empty matrix": (
        lambda: graph(np.zeros((0, 0))),
        ValueError,
        "must have at least two nodes, got an e",
    ),
    "one node": (
        lambda: graph(np.zeros((1, 1))),
        ValueError,
        "the graph must have at least two nodes, got a single",
    ),
    "an empty networkx graph": (
        lambda: graph(nx.Graph()),
        ValueError,
        "must have at least two nodes, got an e",
    ),
    "a matrix that is not square": (
        lambda: graph(scipy.sparse.eye_array(3, 4)),
        ValueError,
        "must be square, got sha",
    ),
    "a complex matrix": (
        lambda: graph(scipy.sparse.eye_array(3, dtype=complex)),
        ValueError,
        "must be real",
    ),
    "a negative entry": (
        lambda: graph(-np.eye(3)),
        ValueError,
        "the weights must be at least 0, got -1",
    ),
    "NaN": (
        lambda: graph(np.full((3, 3), np.nan)),
        ValueError,
        "the weights must be finite, got nan",
    ),
    "a negative node": (
        lambda: graph([(0, -1), (1, 2), (2, 3)]),
        ValueError,
        "nodes must have numbers of at least 0",
    ),
    "half a node": (
        lambda: graph([(0, 1.5), (1, 2), (2, 3)]),
        ValueError,
        "the nodes of pairs must be whole numbers",
    ),
    "loops by another name": (
        lambda: graph([(0, 1)], loops="remove"),
        ValueError,
        "loops must be one of 'drop'",
    ),
    "duplicates by another name": (
        lambda: graph([(0, 1)], duplicates="first"),
        ValueError,
        "duplicates must be one",
    ),
    "directed by another name": (
        lambda: graph([(0, 1)], directed=True),
        ValueError,
        "directed must be one of 'max'",
    ),
    "the spectrum of a matrix": (
        lambda: spectrum(np.eye(3)),
        TypeError,
        r"graph must be .*lh.graphs.graph\(source\)",
    ),
    "clusters of networkx": (
        lambda: clusters(nx.path_graph(4)),
        TypeError,
        "make one with lh.graphs.graph",
    ),
    "no moments": (
        lambda: spectrum(RING, 0),
        ValueError,
        "moments must be an integer of at least 2, got 0",
    ),
    "one probe": (
        lambda: spectrum(RING, 10, probes=1),
        ValueError,
        "probes must be .* at least 8.*standard error",
    ),
    "few moments for clusters": (
        lambda: clusters(RING, 4),
        ValueError,
        "moments must be an integer of at least 8",
    ),
    "a cut outside": (lambda: clusters(RING, 10, cut=3.0), ValueError, r"cut must lie in \(0, 2\)"),
    "a cut of text": (
        lambda: clusters(RING, 10, cut="a"),
        TypeError,
        r"cut must be a number in \(0, 2\), got 'a'; the spectrum lies there; None finds a gap",
    ),
    "a cut of NaN": (
        lambda: clusters(RING, 10, cut=float("nan")),
        ValueError,
        r"cut must lie in \(0, 2\)",
    ),
    "more labels than nodes": (
        lambda: cluster_labels(RING, 13),
        ValueError,
        r"count must be an integer in \[1, 12\]",
    ),
    "one graph to compare": (
        lambda: similarity([RING]),
        ValueError,
        "graphs must hold at least two, got 1",
    ),
    "a group of strangers": (
        lambda: similarity([RING, RING], 8).apart(["x", "y"]),
        ValueError,
        "group must hold at",
    ),
    "an unknown model": (
        lambda: fit_model(RING, "er"),
        ValueError,
        "model must be one of 'erdos_renyi', 'watts_",
    ),
    "one draw": (
        lambda: which_model(RING, draws=1),
        ValueError,
        "draws must be an integer of at least 2",
    ),
    "a model of nobody": (
        lambda: fit_model(RING, "erdos_renyi", size=2),
        ValueError,
        "size must be an integer of at",
    ),
    "many neighbours": (
        lambda: fit_model(RING, "watts_strogatz", neighbours=500),
        ValueError,
        r"neighbours .*\[2, 11",
    ),
    "odd neighbours": (
        lambda: fit_model(RING, "watts_strogatz", neighbours=7),
        ValueError,
        "neighbours must be even",
    ),
    "neighbours of text": (
        lambda: fit_model(RING, "watts_strogatz", neighbours="a"),
        TypeError,
        "neighbours must be",
    ),
    "another's neighbours": (
        lambda: fit_model(RING, "erdos_renyi", neighbours=4),
        ValueError,
        "be None but for watts",
    ),
    "no moments to fit": (
        lambda: fit_model(RING, "erdos_renyi", moments=0),
        ValueError,
        "moments must be an integer",
    ),
    "moments of text": (
        lambda: which_model(RING, moments="x"),
        TypeError,
        "moments must be an integer of at least 2",
    ),
    "a fit without edges": (
        lambda: fit_model(graph(nx.empty_graph(9)), "barabasi_albert"),
        ValueError,
        "and an edge",
    ),
    "a fit of two nodes": (
        lambda: fit_model(graph([(0, 1)]), "erdos_renyi"),
        ValueError,
        "have at least 4 nodes",
    ),
    "a ring without neighbours": (
        lambda: Model("watts_strogatz", 10),
        ValueError,
        r"neighbours must be .*\[2, 9\]",
    ),
    "an edge to itself": (
        lambda: edge_perturbation(RING, 1, 1),
        ValueError,
        "second must be another node",
    ),
    "an edge that is there": (
        lambda: edge_perturbation(RING, 1, 2),
        ValueError,
        "without an edge to first yet",
    ),
    "an edge to nowhere": (
        lambda: edge_perturbation(RING, 1, 12),
        ValueError,
        r"second must be an integer in \[0, 11",
    ),
    "an edge of isolated nodes": (
        lambda: edge_perturbation(graph(nx.empty_graph(3)), 1, 0),
        ValueError,
        "an edge",
    ),
    "deep Lanczos": (
        lambda: smoothed_lanczos_clusters(RING, 13),
        ValueError,
        r"depth must be an integer in \[2, 12\]",
    ),
    "no width": (
        lambda: smoothed_lanczos_clusters(RING, 4, width=0.0),
        ValueError,
        "width must be a finite number",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), CALLS.values(), ids=CALLS.keys())
def test_bad_calls(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_the_file_without_weights_reads_what_the_error_says(tmp_path):
    (tmp_path / "g.txt").write_text("0 1 -2.0 x\n1 2 nan y\n", encoding="utf-8")
    assert graph(tmp_path / "g.txt", weighted=False).num_edges == 2
