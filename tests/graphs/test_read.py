"""Every source of a graph gives the same matrix; weights, loops, duplicates and directions as
the caller says.
"""

import bz2
import gzip
import json
import lzma
import tracemalloc
from types import SimpleNamespace

import networkx as nx
import numpy as np
import pytest
import scipy.io
import scipy.sparse
import torch

from lambdahat.graphs import Graph, edge_lists, graph, structure
from lambdahat.graphs.edge_lists import NameTable

EDGES = [(0, 1), (1, 2), (0, 2), (2, 3)]
PLAIN = np.array([[0, 1, 1, 0], [1, 0, 1, 0], [1, 1, 0, 1], [0, 0, 1, 0]], dtype=float)


def dense(source, **rules):
    return graph(source, **rules).adjacency.toarray()


def written(folder, name, text):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


FILES = {
    "spaces": ("g.txt", "0 1\n1 2\n0 2\n2 3\n"),
    "SNAP": ("g.txt", "# Nodes: 4 Edges: 4\n# FromNodeId\tToNodeId\n0\t1\n1\t2\n\n0\t2\n2\t3\n"),
    "CSV with a header": ("g.csv", "node_1,node_2\n0,1\n1,2\n0,2\n2,3\n"),
    "CSV without a header": ("g.csv", "0,1\n1,2\n0,2\n2,3"),
    "semicolons": ("g.csv", "0;1\n1;2\n0;2\n2;3\n"),
    "weights of 1": ("g.txt", "0 1 1.0\n1 2 1.0\n0 2 1\n2 3 1\n"),
    "networkx's data column": ("g.edgelist", "0 1 {}\n1 2 {}\n0 2 {}\n2 3 {}\n"),
    "both directions": ("g.txt", "0 1\n1 0\n1 2\n0 2\n2 0\n2 3\n2 3\n"),
    "other numbers": ("g.txt", "5 70\n70 900\n5 900\n900 1000000\n"),
    "names": ("g.txt", "a b\nb c\na c\nc d\n"),
    "a negative number first": ("g.txt", "-4 1\n1 2\n-4 2\n2 3\n"),
    "negative numbers in CSV": ("g.csv", "-4,-3\n-3,-2\n-4,-2\n-2,3\n"),
    "a sign first": ("g.txt", "+0 1\n1 2\n0 +2\n2 3\n"),
    "scientific numbers first": ("g.txt", "1e3 2e3\n2000 3000\n1000 3e3\n3000 4e3\n"),
    "scientific numbers later": ("g.txt", "1000 2000 1\n2000 3e3 1\n1000 3000.0 1\n3000 4E+3 1\n"),
    "scientific numbers under a header": (
        "g.csv",
        "from,to\n1e3,2e3\n2000,3000\n1000,3e3\n3000,4e3\n",
    ),
    "fractions as names": ("g.txt", "0.5 1.5\n1.5 2\n0.5 2\n2 3\n"),
    "a name and a number above numbers": ("g.txt", "a 1\n1 2\na 2\n2 3\n"),
    "networkx's weights": (
        "g.edgelist",
        "".join(f"{u} {v} {{'weight': 1.0, 'kind': 'x, y'}}\n" for u, v in EDGES),
    ),
    "networkx's data in CSV": ("g.csv", "0,1,{}\n1,2,{'a': 1}\n0,2,{}\n2,3,{}\n"),
    "networkx's data, names": ("g.edgelist", "a b {'weight': 1}\nb c {}\na c {}\nc d {}\n"),
    "a list in JSON": ("g.json", "[[0, 1], [1, 2], [0, 2], [2, 3]]"),
    "Pajek": (
        "g.net",
        '*Vertices 4\n1 "a b"\n2 "b"\n3 "c"\n4 "d"\n*Edges\n1 2 1\n2 3 1\n1 3 1\n3 4 1\n',
    ),
    "Pajek by another name": (
        "g.txt",
        "*vertices 4\n1 a\n2 b\n3 c\n4 d\n*arcs\n1 2\n2 3\n1 3\n3 4\n",
    ),
    "GML": (
        "g.gml",
        "graph [\n"
        + "".join(f'  node [ id {i} label "n {i}" ]\n' for i in range(4))
        + "".join(f"  edge [\n source {u}\n target {v}\n ]\n" for u, v in EDGES)
        + "]\n",
    ),
    "names under a header": ("g.csv", "Source,Target\na,b\nb,c\na,c\nc,d\n"),
    "names and weights under a header": ("g.csv", "who,whom,times\na,b,1\nb,c,1\na,c,1\nc,d,1\n"),
    "names like a header": ("g.txt", "node1 node2\nnode2 node3\nnode1 node3\nnode3 node4\n"),
    "a byte order mark": ("g.csv", "\ufeff0,1\n1,2\n0,2\n2,3\n"),
    "a byte order mark and a header": ("g.csv", "\ufefffrom,to\n0,1\n1,2\n0,2\n2,3\n"),
    "long names": ("g.txt", "".join(f"{64 * 'x'}{u} {64 * 'x'}{v}\n" for u, v in EDGES)),
    "commas in names": ("g.tsv", "a,a\tb\nb\tc\na,a\tc\nc\td\n"),
    "names in quotes": ("g.csv", '"a, b",b\nb,"c"\n"a, b",c\nc,d\n'),
    "names in quotes, spaces": ("g.txt", '"a b" b\nb "c"\n"a b" c\nc d\n'),
    "spaces after commas": ("g.csv", "0, 1\n1, 2\n0,\t2\n2, 3\n"),
    "Matrix Market": (
        "g.mtx",
        "%%MatrixMarket matrix coordinate pattern symmetric\n4 4 4\n2 1\n3 2\n3 1\n4 3\n",
    ),
}


@pytest.mark.parametrize(("name", "text"), FILES.values(), ids=FILES.keys())
def test_every_format_gives_the_same_graph(tmp_path, name, text):
    assert np.array_equal(dense(written(tmp_path, name, text)), PLAIN)


@pytest.mark.parametrize(("name", "text"), FILES.values(), ids=FILES.keys())
@pytest.mark.parametrize("kind", ["gz", "bz2", "xz"])
def test_packed_files_too(tmp_path, name, text, kind):
    path = tmp_path / f"{name}.{kind}"
    path.write_bytes({"gz": gzip, "bz2": bz2, "xz": lzma}[kind].compress(text.encode()))
    assert np.array_equal(dense(path), PLAIN)
    assert graph(path).name == "g"


def json_writer(convert, **settings):
    return lambda made, path: path.write_text(json.dumps(convert(made, **settings)))


WRITERS = {
    "GraphML": ("g.graphml", nx.write_graphml),
    "GEXF": ("g.gexf", nx.write_gexf),
    "GEXF by another name": ("g.xml", nx.write_gexf),
    "GML": ("g.gml", nx.write_gml),
    "Pajek": ("g.net", lambda made, path: nx.write_pajek(nx.relabel_nodes(made, str), path)),
    "an edge list": ("g.edgelist", nx.write_edgelist),
    "a weighted edge list": ("g.edgelist", nx.write_weighted_edgelist),
    "an edge list with commas": (
        "g.csv",
        lambda made, path: nx.write_edgelist(made, path, delimiter=","),
    ),
    "node-link JSON": ("g.json", json_writer(nx.node_link_data, edges="edges")),
    "D3's JSON": ("g.json", json_writer(nx.node_link_data, edges="links")),
    "adjacency JSON": ("g.json", json_writer(nx.adjacency_data)),
    "Cytoscape's JSON": ("g.json", json_writer(nx.cytoscape_data)),
    "NumPy": ("g.npy", lambda made, path: np.save(path, nx.to_numpy_array(made))),
}


@pytest.mark.parametrize("directed", [False, True], ids=["undirected", "directed"])
@pytest.mark.parametrize(("name", "write"), WRITERS.values(), ids=WRITERS.keys())
def test_what_networkx_writes_is_read(tmp_path, name, write, directed):
    made = nx.DiGraph() if directed else nx.Graph()
    made.add_weighted_edges_from([(0, 1, 2.5), (1, 2, 1.0), (0, 2, 0.25), (2, 3, 7.0)])
    write(made, tmp_path / name)
    found = dense(tmp_path / name)
    one_way = nx.to_numpy_array(made)
    assert np.array_equal(found, np.maximum(one_way, one_way.T))


@pytest.mark.parametrize("name", ["g.graphml", "g.gexf", "g.net", "g.json", "g.gml"])
def test_isolated_nodes_and_names_of_files_with_nodes(tmp_path, name):
    made = nx.Graph([("ann", "bob c")])
    made.add_node("eve")
    kind = name.removeprefix("g.").replace("net", "pajek")
    if kind == "json":
        (tmp_path / name).write_text(json.dumps(nx.node_link_data(made, edges="edges")))
    else:
        getattr(nx, f"write_{kind}")(made, tmp_path / name)
    found = graph(tmp_path / name)
    assert list(found.names) == ["ann", "bob c", "eve"]
    assert repr(found) == "Graph(3 nodes, 1 edge, 1 isolated)"


def test_numbers_of_any_notation_are_one_node(tmp_path):
    found = graph(written(tmp_path, "g.txt", "-1 1e3\n1000 +7\n7 -1.0\n"))
    assert list(found.names) == [-1, 7, 1000]
    assert found.num_edges == 3
    large = graph(written(tmp_path, "h.txt", "9007199254740993 1e0\n9007199254740992 1\n"))
    assert list(large.names) == [1, 9007199254740992, 9007199254740993]


@pytest.mark.parametrize("packed", ["npy", "npy.gz"])
@pytest.mark.parametrize(
    "array", [np.array(EDGES), np.array(EDGES).T, PLAIN], ids=["edges", "edge_index", "matrix"]
)
def test_arrays_of_files(tmp_path, array, packed):
    np.save(tmp_path / "g.npy", array)
    if packed == "npy.gz":
        (tmp_path / "g.npy.gz").write_bytes(gzip.compress((tmp_path / "g.npy").read_bytes()))
    assert np.array_equal(dense(tmp_path / f"g.{packed}"), PLAIN)


def test_edge_index_and_data_of_pyg():
    index = torch.tensor(EDGES).T
    assert np.array_equal(dense(index), PLAIN)
    three = torch.tensor([[0, 1, 2], [1, 2, 3]])
    assert graph(three).num_edges == 3
    data = SimpleNamespace(
        edge_index=index, edge_weight=torch.tensor([2.0, 1.0, 1.0, 0.5]), num_nodes=6
    )
    found = graph(data)
    assert repr(found) == "Graph(6 nodes, 4 edges, 2 isolated)"
    assert found.adjacency[0, 1] == 2.0
    assert found.adjacency[2, 3] == 0.5
    assert np.array_equal(dense(SimpleNamespace(edge_index=index, edge_weight=None)), PLAIN)


OBJECTS = {
    "pairs": EDGES,
    "two pairs and more": [*EDGES[:3], (2, 3)],
    "a set of pairs": set(EDGES),
    "lists of nodes": [list(edge) for edge in EDGES[:3]] + [[2, 3]] * 2,
    "pairs of names": [("abcd"[u], "abcd"[v]) for u, v in EDGES],
    "an array of names": np.array([("abcd"[u], "abcd"[v]) for u, v in EDGES]),
    "networkx's edges": nx.Graph(EDGES).edges,
    "lists of a matrix": PLAIN.tolist(),
    "an array of pairs": np.array(EDGES),
    "triples": np.array([(u, v, 1.0) for u, v in EDGES]),
    "a dense matrix": PLAIN,
    "SciPy": scipy.sparse.coo_matrix(PLAIN),
    "half a matrix": scipy.sparse.csr_array(np.triu(PLAIN)),
    "networkx": nx.Graph(EDGES),
    "a directed networkx graph": nx.DiGraph([*EDGES, (1, 0)]),
    "a multigraph": nx.MultiGraph([*EDGES, (1, 0)]),
}


@pytest.mark.parametrize("source", OBJECTS.values(), ids=OBJECTS.keys())
def test_every_object_gives_the_same_graph(source):
    assert np.array_equal(dense(source), PLAIN)


def test_tuples_are_edges_whatever_their_number():
    assert repr(graph([(0, 1), (1, 2)])) == "Graph(3 nodes, 2 edges)"
    assert list(graph([("a", "b"), ("b", "c")]).names) == ["a", "b", "c"]
    assert np.array_equal(graph([(0, 1, 5.0), (1, 2, 6.0), (2, 3, 7.0)]).degrees, [5, 11, 13, 7])


@pytest.mark.parametrize("made", [list, np.array], ids=["tuples", "an array of text"])
def test_names_keep_their_weights(made):
    found = graph(made([("a", "b", 5.0), ("b", "c", 2.0), ("c", "d", 3.0), ("a", "d", 1.0)]))
    assert np.array_equal(found.degrees, [6, 7, 5, 4])
    assert list(found.names) == ["a", "b", "c", "d"]


def test_bytes_that_are_no_text_keep_names_apart(tmp_path):
    (tmp_path / "g.txt").write_bytes("é b\nè b\n".encode("latin-1"))
    assert list(graph(tmp_path / "g.txt").names) == [r"\xe9", "b", r"\xe8"]


def test_a_file_of_scipy(tmp_path):
    scipy.sparse.save_npz(tmp_path / "g.npz", scipy.sparse.csr_array(PLAIN))
    assert np.array_equal(dense(tmp_path / "g.npz"), PLAIN)


def test_nodes_keep_their_names(tmp_path):
    assert list(graph(written(tmp_path, *FILES["other numbers"])).names) == [5, 70, 900, 1000000]
    assert list(graph(written(tmp_path, *FILES["names"])).names) == ["a", "b", "c", "d"]
    assert list(graph(written(tmp_path, *FILES["GML"])).names) == ["n 0", "n 1", "n 2", "n 3"]
    assert graph(written(tmp_path, *FILES["spaces"])).names is None


TRIPLES = np.array([[0, 1, 2.0], [0, 1, 4.0], [1, 0, 3.0], [1, 2, 5.0], [2, 2, 7.0]])
RULES = {
    "the larger weight": ({}, (4.0, 5.0, 0.0)),
    "duplicates added": ({"duplicates": "sum"}, (6.0, 5.0, 0.0)),
    "their mean": ({"duplicates": "mean"}, (3.0, 5.0, 0.0)),
    "directions added": ({"directed": "sum"}, (7.0, 5.0, 0.0)),
    "their mean, absent as 0": ({"directed": "mean"}, (3.5, 2.5, 0.0)),
    "edges in both directions": ({"directed": "mutual"}, (3.0, 0.0, 0.0)),
    "loops": ({"loops": "keep"}, (4.0, 5.0, 7.0)),
    "loops have one direction": ({"loops": "keep", "directed": "sum"}, (7.0, 5.0, 7.0)),
    "a loop's mean": ({"loops": "keep", "directed": "mean"}, (3.5, 2.5, 7.0)),
    "no weights": ({"weighted": False}, (1.0, 1.0, 0.0)),
    "no weights, how often": (
        {"weighted": False, "duplicates": "sum", "directed": "sum"},
        (3.0, 1.0, 0.0),
    ),
    "no weights, loops": ({"weighted": False, "loops": "keep"}, (1.0, 1.0, 1.0)),
}


@pytest.mark.parametrize(("rules", "expected"), RULES.values(), ids=RULES.keys())
def test_rules(rules, expected):
    found = dense(TRIPLES, **rules)
    assert np.array_equal(found, found.T)
    assert (found[0, 1], found[1, 2], found[2, 2]) == expected


@pytest.mark.parametrize("rules", [{"duplicates": "refuse"}, {"directed": "refuse"}])
def test_rules_that_refuse(rules):
    with pytest.raises(
        ValueError, match=next(iter(rules)) if "duplicates" in rules else "both directions"
    ):
        graph(TRIPLES, **rules)
    assert np.array_equal(dense(PLAIN, **rules), PLAIN)


def test_a_matrix_market_file_says_itself_what_is_symmetric(tmp_path):
    scipy.io.mmwrite(tmp_path / "g.mtx", scipy.sparse.coo_array(2.5 * PLAIN), symmetry="symmetric")
    assert np.array_equal(dense(tmp_path / "g.mtx", directed="refuse"), 2.5 * PLAIN)


@pytest.mark.parametrize("symmetry", ["general", "symmetric"])
@pytest.mark.parametrize("field", ["real", "integer", "pattern"])
@pytest.mark.parametrize("layout", ["coordinate", "array"])
def test_matrix_market_is_read_as_scipy_reads_it(tmp_path, layout, field, symmetry):
    if (layout, field) == ("array", "pattern"):
        return  # there is no such kind
    matrix = np.random.default_rng(0).integers(0, 4, (7, 7))
    matrix = matrix + matrix.T if symmetry == "symmetric" else matrix
    written = matrix.astype(float if field == "real" else int)
    path = tmp_path / "g.mtx"
    scipy.io.mmwrite(
        path,
        written if layout == "array" else scipy.sparse.coo_array(written),
        field=field,
        symmetry=symmetry,
    )
    expected = scipy.io.mmread(path)
    expected = scipy.sparse.coo_array(expected).toarray()
    found = graph(path, directed="mean", loops="keep").adjacency.toarray()
    assert np.array_equal(found, (expected + expected.T) / 2)


def test_weights_of_gml_and_networkx(tmp_path):
    mixed = "edge [ source 0 target 1 ] edge [ source 1 target 2 weight 9 ]"
    nodes = "node [ id 0 ] node [ id 1 ] node [ id 2 ]"
    assert list(graph(written(tmp_path, "m.gml", f"graph [ {nodes} {mixed} ]")).degrees) == [
        1,
        10,
        9,
    ]
    text = (
        "graph [ node [ id 7 ] node [ id 9 ] node [ id 8 ] edge [ source 7 target 8 value 2.5 ] ]"
    )
    found = graph(written(tmp_path, "g.gml", text))
    assert found.adjacency[0, 2] == 2.5
    assert list(found.names) == ["7", "9", "8"]
    made = nx.Graph()
    made.add_edge("x", "y", weight=3.0)
    made.add_node("z")
    assert graph(made).adjacency[0, 1] == 3.0
    assert len(graph(made)) == 3


def test_duplicates_of_an_undirected_file_are_one_edge_in_either_order(tmp_path):
    edges = "edge [ source 0 target 1 value 2 ] edge [ source 1 target 0 value 3 ]"
    path = written(tmp_path, "g.gml", f"graph [ node [ id 0 ] node [ id 1 ] {edges} ]")
    assert graph(path, duplicates="sum").adjacency[0, 1] == 5.0
    assert graph(path, duplicates="mean").adjacency[1, 0] == 2.5
    with pytest.raises(
        ValueError, match="duplicates must not occur, got an edge that is listed again"
    ):
        graph(path, duplicates="refuse")


def test_without_weights_an_entry_of_0_is_no_edge_and_nan_is_one():
    matrix = scipy.sparse.coo_array(([0.0, np.nan], ([0, 1], [1, 2])), shape=(3, 3))
    assert np.array_equal(dense(matrix, weighted=False), [[0, 0, 0], [0, 0, 1], [0, 1, 0]])


def test_isolated_nodes_stay_where_the_source_names_them(tmp_path):
    assert len(graph(scipy.sparse.coo_array(([1.0], ([0], [1])), shape=(4, 4)))) == 4
    assert len(graph(written(tmp_path, "g.txt", "0 1\n5 5\n"))) == 3
    assert (
        repr(graph(written(tmp_path, "g.txt", "0 1\n5 5\n")))
        == "Graph(3 nodes, 1 edge, 1 isolated)"
    )
    assert len(graph([(0, 1), (5, 5)]).without_isolated()) == 2


def test_chunks_make_the_same_graph(tmp_path, monkeypatch):
    pairs = np.random.default_rng(0).integers(0, 50, (400, 2))
    path = written(tmp_path, "g.txt", "".join(f"{u} {v}\n" for u, v in pairs))
    whole = dense(path)
    expected = np.zeros((50, 50))
    expected[pairs[:, 0], pairs[:, 1]] = expected[pairs[:, 1], pairs[:, 0]] = 1.0
    np.fill_diagonal(expected, 0.0)
    assert np.array_equal(whole, expected)
    monkeypatch.setattr(edge_lists, "CHUNK_ROWS", 7)
    assert np.array_equal(dense(path), whole)
    assert np.array_equal(
        dense(path, loops="keep"),
        dense(scipy.sparse.coo_array((np.ones(400), pairs.T), shape=(50, 50)), loops="keep"),
    )


LINES = {
    "plain": "{} {}\n",
    "numbers with gaps and weights": "{}0 {}0 {}.5\n",
    "names and weights": "node{} node{} {}.7\n",
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES.keys())
def test_reading_takes_less_than_twice_the_graph(tmp_path, line):
    """The graph is its matrix and the names of its nodes, which as text of up to 15 bytes take
    16 each.
    """
    pairs = np.random.default_rng(0).integers(0, 40_000, (200_000, 2)).tolist()
    path = written(tmp_path, "g.txt", "".join(line.format(u, v, u % 9) for u, v in pairs))
    tracemalloc.start()
    found = graph(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    matrix = found.adjacency
    names = 0 if found.names is None else found.names.nbytes
    size = matrix.data.nbytes + matrix.indices.nbytes + matrix.indptr.nbytes + names
    assert peak < 2 * size, peak / size


def test_names_are_numbered_as_a_dict_would_over_many_chunks():
    """Short and long ones, over enough chunks that the table grows several times."""
    rng, table, expected = np.random.default_rng(0), NameTable(), {}
    for _ in range(40):
        names = dict.fromkeys(f"{'é' * int(i % 40)}{i}" for i in rng.integers(0, 9_000, 500))
        assert [expected.setdefault(name, len(expected)) for name in names] == table.numbers(
            names
        ).tolist()
    table.close()
    assert table.names.tolist() == list(expected)
    assert len(expected) > 4 * edge_lists.SLOTS


def test_names_of_one_hash_stay_apart(monkeypatch):
    monkeypatch.setattr(edge_lists, "_hashes", lambda names: np.full(len(names), -7))
    monkeypatch.setattr(edge_lists, "SLOTS", 4)
    table = NameTable()
    assert table.numbers(["b", "a"]).tolist() == [0, 1]
    assert table.numbers([*"cabdef"]).tolist() == [2, 1, 0, 3, 4, 5]
    assert table.names.tolist() == [*"bacdef"]


@pytest.mark.parametrize("duplicates", ["max", "sum", "mean"])
@pytest.mark.parametrize("directed", ["max", "sum", "mean", "mutual"])
def test_rules_over_many_chunks_are_those_of_a_table(monkeypatch, duplicates, directed):
    monkeypatch.setattr(structure, "BLOCK", 13)
    rng = np.random.default_rng(1)
    rows = np.column_stack([rng.integers(0, 12, (300, 2)), rng.random(300)])
    cells = {
        (u, v): [w for a, b, w in rows if (a, b) == (u, v)] for u in range(12) for v in range(12)
    }
    reduce = {"max": max, "sum": sum, "mean": np.mean}
    one_way = np.array(
        [
            [reduce[duplicates](cells[u, v]) if cells[u, v] else 0.0 for v in range(12)]
            for u in range(12)
        ]
    )
    join = {
        "max": np.maximum,
        "sum": np.add,
        "mean": lambda a, b: (a + b) / 2,
        "mutual": np.minimum,
    }
    expected = join[directed](one_way, one_way.T)
    np.fill_diagonal(expected, one_way.diagonal())
    found = dense(rows, duplicates=duplicates, directed=directed, loops="keep")
    assert np.allclose(found, expected, rtol=1e-14)


def test_a_matrix_of_the_caller_is_left_as_it_was():
    entries = scipy.sparse.coo_array(
        (TRIPLES[:, 2], TRIPLES[:, :2].T.astype(np.int32)), shape=(3, 3)
    )
    before = [part.copy() for part in (entries.row, entries.col, entries.data)]
    graph(entries)
    assert all(
        np.array_equal(a, b)
        for a, b in zip(before, (entries.row, entries.col, entries.data), strict=True)
    )


def test_node_numbers_and_weights_that_grow_wider_on_the_way(tmp_path, monkeypatch):
    """Numbers beyond 32 bits, and a weight that float32 does not hold, after chunks of small
    ones.
    """
    monkeypatch.setattr(edge_lists, "CHUNK_ROWS", 2)
    rows = [(0, 1, 1.5), (1, 2, 2.0), (2, 3, 0.5), (3, 7_000_000_000, 0.1), (0, 3, 2.5)]
    found = graph(written(tmp_path, "g.txt", "".join(f"{u} {v} {w}\n" for u, v, w in rows)))
    assert list(found.names) == [0, 1, 2, 3, 7_000_000_000]
    assert np.array_equal(found.degrees, [4.0, 3.5, 2.5, 3.1, 0.1])


def test_rules_of_a_graph_of_ours_are_obeyed():
    one = graph(TRIPLES, loops="keep")
    assert graph(one, loops="keep") is one
    assert graph(one, loops="keep", name="other").name == "other"
    assert np.array_equal(dense(one, directed="sum", duplicates="sum"), dense(TRIPLES))
    assert np.array_equal(
        dense(one, weighted=False, loops="keep"), dense(TRIPLES, weighted=False, loops="keep")
    )


def test_a_graph_is_taken_as_it_is():
    one = graph(EDGES)
    assert graph(one) is one
    assert isinstance(one, Graph)
