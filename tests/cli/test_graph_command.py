"""``lambdahat graph``: its tables, JSON, files, exit codes."""

import json

import networkx as nx
import pytest
from typer.testing import CliRunner

from lambdahat.cli.app import app
from lambdahat.graphs import Clusters, GraphSpectrum, ModelChoice, ModelFit, Similarity
from lambdahat.results import Result


def call(*arguments):
    return CliRunner().invoke(app, ["graph", *(str(argument) for argument in arguments)])


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = {
        "cliques": nx.disjoint_union_all([nx.complete_graph(6)] * 4),
        "path": nx.path_graph(400),
        "random": nx.gnp_random_graph(80, 0.2, seed=0),
    }
    for name, one in made.items():
        nx.write_edgelist(one, f"{name}.txt", data=False)
    return tmp_path


def test_clusters_in_a_table_and_refused_with_1(files):
    result = call("clusters", "cliques.txt")
    assert result.exit_code == 0, result.output
    header, _, row = result.stdout.splitlines()
    assert header.split("  ")[0] == "graph"
    assert row.split()[:2] == ["cliques", "24"]
    assert float(row.split()[2]) == pytest.approx(4, abs=1e-3)
    assert row.split()[-1] == "CONVERGED"
    refused = call("clusters", "cliques.txt", "path.txt")
    assert refused.exit_code == 1
    assert refused.stderr.startswith("path: NO_GAP. No gap parts")
    assert refused.stdout.splitlines()[3].split()[:3] == ["path", "400", "none"]


def test_clusters_as_json_with_labels_and_files(files):
    result = call("clusters", "cliques.txt", "--json", "--labels", "--out", "out")
    (document,) = json.loads(result.stdout)
    assert document["clusters"] == pytest.approx(4, abs=1e-3)
    assert (document["nodes"], document["edges"], document["components"]) == (24, 60, 4)
    assert document["labels"]["0"] == document["labels"]["5"] != document["labels"]["6"]
    assert isinstance(Result.load("out/clusters-cliques.json"), Clusters)
    assert (files / "out" / "clusters-cliques.png").stat().st_size > 1000


def test_a_refusal_is_null_in_json(files):
    (document,) = json.loads(call("clusters", "path.txt", "--json").stdout)
    assert document["clusters"] is None
    assert document["status"] == "NO_GAP"


def test_a_cut_by_hand(files):
    (document,) = json.loads(call("clusters", "path.txt", "--json", "--cut", "0.5").stdout)
    assert document["cut"] == 0.5
    assert 100 < document["clusters"] < 160


def test_spectrum(files):
    result = call("spectrum", "cliques.txt", "random.txt", "--moments", "20", "--out", "out")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == "written to out"
    assert isinstance(Result.load("out/spectrum-random.json"), GraphSpectrum)
    assert (files / "out" / "spectrum-cliques.png").is_file()
    (document, _) = json.loads(
        call("spectrum", "cliques.txt", "random.txt", "--moments", "20", "--json").stdout
    )
    assert len(document["moments"]) == 21
    assert document["moments"][0] == 1.0
    assert document["moments"][1] == pytest.approx(0.0, abs=1e-12)  # tr L = n


def test_compare(files):
    result = call(
        "compare", "cliques.txt", "path.txt", "random.txt", "--moments", "20", "--out", "out"
    )
    assert result.exit_code == 0, result.output
    assert sorted(result.stdout.splitlines()[1].split()) == ["cliques", "path", "random"]
    found = Result.load("out/similarity.json")
    assert isinstance(found, Similarity)
    assert (files / "out" / "similarity.png").is_file()
    document = json.loads(
        call("compare", "path.txt", "random.txt", "--moments", "20", "--json").stdout
    )
    assert document["divergences"][0][1] == document["divergences"][1][0] > 0


def test_fit(files):
    options = ("--moments", "10", "--draws", "2", "--size", "40")
    result = call("fit", "random.txt", "--model", "erdos_renyi", *options)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[2].split()[:4] == ["random", "erdos_renyi", "p", "="]
    documents = json.loads(call("fit", "random.txt", *options, "--json", "--out", "out").stdout)
    assert {one["model"] for one in documents} == {
        "erdos_renyi",
        "watts_strogatz",
        "barabasi_albert",
    }
    assert isinstance(Result.load("out/fit-random.json"), ModelChoice)


def test_fit_takes_several_files_and_the_library_s_own_settings(files, monkeypatch):
    seen = []

    def fitted(one, *args, **given):
        seen.append((one.name, args, given))
        return ModelFit(0.5, 0.1, model="erdos_renyi", parameter="p")

    monkeypatch.setattr("lambdahat.cli.graph_commands.fit_model", fitted)
    documents = json.loads(
        call("fit", "random.txt", "cliques.txt", "--model", "erdos_renyi", "--json").stdout
    )
    assert [one["name"] for one in documents] == ["random", "cliques"]
    assert seen[0] == ("random", ("erdos_renyi",), {"seed": 0})


def test_files_of_one_name_do_not_overwrite_each_other(files):
    (files / "more").mkdir()
    nx.write_edgelist(nx.complete_graph(5), "more/cliques.txt", data=False)
    result = call("spectrum", "cliques.txt", "more/cliques.txt", "--moments", "20", "--out", "out")
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.stdout.splitlines()[2:4]] == ["cliques", "cliques-2"]
    assert [
        Result.load(f"out/spectrum-{name}.json").nodes for name in ("cliques", "cliques-2")
    ] == [24, 5]


def test_files_are_read_as_the_options_say(files):
    (files / "w.txt").write_text("0 1 2.0\n1 0 4.0\n2 2 1.0\n", encoding="utf-8")
    (document,) = json.loads(
        call("spectrum", "w.txt", "--moments", "8", "--json", "--loops", "keep").stdout
    )
    assert (document["nodes"], document["edges"], document["isolated"]) == (3, 2, 0)
    refused = call("spectrum", "w.txt", "--directed", "refuse")
    assert refused.exit_code == 2
    assert "must be the same in both directions" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("spectrum", "nothing.txt"), "error: source must name a file, got nothing.txt"),
        (("compare", "path.txt"), "error: graphs must hold at least two"),
        (("fit", "path.txt", "--model", "er"), "error: model must be one of"),
        (("clusters", "path.txt", "--loops", "x"), "error: loops must be one of"),
    ],
)
def test_bad_input_is_one_line_and_2(files, arguments, message):
    result = call(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(message)
    assert len(result.stderr.splitlines()) == 1


def test_quiet_prints_nothing(files):
    assert call("clusters", "cliques.txt", "--quiet").output == ""
