"""The rows of the benchmark at tiny sizes: all there, accurate, and a peer that is missing says
so.
"""

import importlib
import math
import sys
from importlib.util import find_spec

import pytest
import torch

from lambdahat.bench import FAMILIES, Plan, problems, rows, run
from lambdahat.bench.chain_rows import import_transformers
from lambdahat.bench.peers import PEERS, installed_version
from lambdahat.bench.records import OURS, UNIT
from lambdahat.bench.rows import WORKS, trace_rows


def installed(peer):
    return pytest.mark.skipif(
        installed_version(peer.package) == "not installed", reason=f"{peer.name} is not installed"
    )


@pytest.fixture(scope="module")
def plan():
    return Plan(peers=False, quick=True)


def test_products(plan):
    seen = []
    found = run(plan, "products", seen.append)
    # a unit and ours after each task
    assert [len(one) for one in seen] == list(range(2, len(found) + 1, 2))
    assert [work for work, _ in found.tasks()] == [*WORKS.values()] * 2
    for row in found.rows:
        assert row.cost == 1.0 if row.by == UNIT else row.cost > 0
        assert row.by == UNIT or row.error < 1e-5
    assert found.about["quick"]


def test_networks(plan, monkeypatch):
    found = run(plan, "networks")
    ours = [row for row in found.rows if row.by == OURS]
    assert {row.case for row in ours} == set(rows.SMALL_NETWORKS)
    assert [row.work for row in ours][:4] == [
        "HVP",
        "GGN product",
        "HVP, block of 4",
        "top-3 eigenvalues to 1e-3",
    ]
    for row in ours:
        assert row.cost > 0, row.note
        assert row.error < (1e-4 if "eigen" not in row.work else 2e-3)
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(rows, "SMALL_NETWORKS", {"gpt2": rows.REAL_NETWORKS["gpt2"]})
    (missing,) = run(plan, "networks").rows
    assert "transformers is not installed" in missing.note


def test_a_family_that_is_not_there_is_refused(plan):
    with pytest.raises(
        ValueError,
        match=r"only must match a family of rows: products, estimates, .* got 'curvature'",
    ):
        run(plan, "curvature")


def test_a_missing_peer_has_a_row_that_says_so(plan, monkeypatch):
    for peer in PEERS:
        monkeypatch.setitem(sys.modules, peer.module, None)
    rows = {row.by: row for row in trace_rows(Plan(peers=True, quick=True), plan.case("mlp"))}
    assert set(rows) == {UNIT, OURS} | {peer.name for peer in PEERS}
    for peer in PEERS:
        assert rows[peer.name].note.startswith("ModuleNotFoundError: ")
        assert math.isnan(rows[peer.name].cost)
    assert rows[OURS].accurate


@pytest.mark.oracle
@pytest.mark.parametrize("peer", [pytest.param(p, marks=installed(p), id=p.name) for p in PEERS])
@pytest.mark.filterwarnings("ignore")
def test_peers_give_the_same_numbers(peer, plan):
    case = plan.case("mlp")
    v = torch.linspace(-1, 1, case.num_parameters)
    if peer.hvp is not None:
        truth = problems.product(problems.double(case), v.double())
        torch.testing.assert_close(peer.hvp(case)(v).double(), truth, rtol=1e-3, atol=1e-5)
    if peer.exact_trace:
        assert peer.trace(case, 0).value == pytest.approx(problems.trace(case), rel=1e-5)
    if peer.kfac is not None:
        g = case.gradient()
        truth = problems.kronecker_solution(case, g, 0.1)
        torch.testing.assert_close(peer.kfac(case, g, 0.1).double(), truth, rtol=1e-3, atol=1e-5)


def test_log_determinants_of_both_sizes_and_nothing_global_left_changed(plan):
    before = (
        torch.random.get_rng_state(),
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark,
    )
    found = run(plan, "determinants")
    assert [work for work, _ in found.tasks()] == [
        "log-determinant to 1 %",
        "log-determinant to 0.02 %",
    ]
    assert all(row.accurate for row in found.rows)
    notes = {row.note for row in found.rows if row.note}
    assert "2 probes, depth 10" in notes
    assert any(note.startswith("logdet(matrix): ") for note in notes)
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert before[1:] == (torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark)


@pytest.mark.filterwarnings("ignore")
def test_everyone_counts_the_planted_clusters():
    whole = run(Plan(peers=True, quick=True), "graphs")
    assert {work for work, _ in whole.tasks()} == {"100 graph moments", "cluster count"}
    found = whole.of("cluster count", "9 clusters, n = 250")
    assert set(found) == {UNIT, OURS, "SciPy"}
    assert found["SciPy"].error == 0
    assert found[OURS].error < 0.05


def test_a_network_whose_package_is_broken_or_missing_is_a_row_that_says_so(tmp_path, monkeypatch):
    (tmp_path / "torchvision").mkdir()
    text = "raise RuntimeError('operator torchvision::nms does not exist')"
    (tmp_path / "torchvision" / "__init__.py").write_text(text)
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("torchvision", "absent"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    absent = rows.Network(lambda: importlib.import_module("absent"), (3,), 10, 4)
    small = {"vit_b_16": rows.REAL_NETWORKS["vit_b_16"], "absent": absent}
    monkeypatch.setattr(rows, "SMALL_NETWORKS", small)
    assert [row.note for task in rows.network_rows(Plan(quick=True)) for row in task] == [
        "torchvision was built for another torch: pip install torchvision",
        "absent is not installed: pip install absent",
    ]


def test_tf32_is_on_inside_only():
    flags = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [flag.allow_tf32 for flag in flags]
    try:
        for flag in flags:
            flag.allow_tf32 = False
        with rows._tf32():
            assert all(flag.allow_tf32 for flag in flags)
        assert not any(flag.allow_tf32 for flag in flags)
    finally:
        for flag, value in zip(flags, before, strict=True):
            flag.allow_tf32 = value


def test_every_family_is_there():
    assert list(FAMILIES) == [
        "products",
        "estimates",
        "networks",
        "chains",
        "optimizers",
        "determinants",
        "graphs",
    ]


def test_a_broken_torchvision_is_hidden_from_transformers_alone(tmp_path, monkeypatch):
    """It stays broken for others, also where transformers was imported and had found it before."""
    found = "from functools import cache\nfrom importlib.util import find_spec\n"
    for name in ("is_torchvision_available", "is_torchvision_v2_available"):
        found += f"@cache\ndef {name}():\n    return find_spec('torchvision') is not None\n"
    files = {
        "torchvision/__init__.py": "raise RuntimeError('built for another torch')",
        "transformers/__init__.py": "",
        "transformers/utils/__init__.py": "",
        "transformers/utils/import_utils.py": found,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("torchvision", "transformers"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        looks = importlib.import_module("transformers.utils.import_utils")
        assert looks.is_torchvision_available()
        assert import_transformers() is sys.modules["transformers"]
        assert not looks.is_torchvision_available()
        assert "torchvision" not in sys.modules
        assert find_spec("torchvision") is not None
    finally:
        for name in [*sys.modules]:
            if name.partition(".")[0] == "transformers":
                del sys.modules[name]
