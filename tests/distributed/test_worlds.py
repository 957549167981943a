"""1, 2 and 4 processes on gloo: what they measure, what they send, and what they say when they
do not do the same.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from filelock import FileLock  # torch brings it

import lambdahat as lh
from lambdahat.problem.distributed import HEADER, Ranks, _read, _unlike, pieces
from lambdahat.problem.distributed import fingerprint as told
from tests.distributed.world import OPERATORS, PROBLEMS, classifier, data, measured

SIZES = (1, 2, 4)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One folder for all processes that run these tests, so that the worlds run once."""
    own = tmp_path_factory.getbasetemp()
    place = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "worlds"
    place.mkdir(exist_ok=True)
    return place


@pytest.fixture(scope="module")
def exit_codes(folder):
    """Of every rank of every world, and of three of the four ranks of which one ends and one
    hangs.
    """
    codes = folder / "exit-codes.json"
    with FileLock(folder / "lock"):
        if not codes.is_file():
            run_worlds(folder)
    codes = json.loads(codes.read_text(encoding="utf-8"))
    for size in SIZES:
        assert codes[str(size)] == [0] * size, (folder / "errors.txt").read_text()[-4000:]
    return codes


def run_worlds(folder):
    process = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("world.py"), folder],
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, errors = process.communicate(timeout=600)
        (folder / "errors.txt").write_text(errors, encoding="utf-8")
        assert process.returncode == 0, errors[-4000:]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def worlds(folder, exit_codes):
    """What every rank of every world found: size → list over ranks."""
    return {
        size: [torch.load(folder / f"{size}-{rank}.pt", weights_only=False) for rank in range(size)]
        for size in SIZES
    }


@pytest.fixture(scope="module")
def reference():
    return measured()


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_measures_what_one_process_does(worlds, reference, size):
    for found in worlds[size]:
        assert found["measured"].keys() == reference.keys()
        for name, value in reference.items():
            torch.testing.assert_close(
                found["measured"][name],
                value,
                rtol=1e-9,
                atol=1e-11,
                msg=lambda m, n=name: f"{n}: {m}",
            )


@pytest.mark.parametrize("size", SIZES)
def test_ranks_agree_to_the_last_bit(worlds, size):
    first, *others = worlds[size]
    for found in others:
        for name, value in first["measured"].items():
            assert torch.equal(found["measured"][name], value), name


def test_a_problem_does_not_keep_a_destroyed_group(worlds):
    """Gloo's threads end with the last reference to their group; one that outlives Python's end
    aborts the process.

    In the world of one, for in the others torch's wrappers of models were at work, which keep the
    group themselves.
    """
    (found,) = worlds[1]
    assert found["group ended"]
    assert (
        "ranks must be a process group that lasts as long as the problem" in found["after the end"]
    )


def test_reference_is_right(reference):
    """The sum over ranks is compared with one process; that one with a matrix by plain autograd."""
    problem = classifier(samples=21)

    def loss(theta):
        parts = zip(problem.weights, problem.batches, strict=True)
        return sum(w * problem.batch_loss(problem.named(theta), batch) for w, batch in parts)

    matrix = torch.autograd.functional.hessian(loss, problem.vector)
    torch.testing.assert_close(reference["hessian"], matrix)
    torch.testing.assert_close(reference["closed-form trace"], reference["ggn"].trace())


@pytest.mark.parametrize("size", [2, 4])
def test_one_all_reduce_of_known_bytes_for_each_product(worlds, size):
    count, header = classifier(samples=21).num_parameters, 8 * HEADER
    for found in worlds[size]:
        sent = {name: call["bytes"] for name, call in found["sent"].items()}
        for name in OPERATORS:
            assert sent[f"{name} @ v"] == [8 * count + header]
            assert sent[f"{name} @ V"] == [3 * 8 * count + header]
        assert sent["gradient"] == [8 * count + header]
        # the closed form holds if no rank has met a loss that compares samples
        assert sent["diagonal"] == [8 * size + header, 8 * count + header]
        assert sent["loss"] == [8 + header]
        assert sent["problem"] == [216 * size + header, 200 * size + header]
        assert sent["operator"] == [144 * size + header]
        assert sent["float32 product"] == [4 * count + 4 * HEADER]


@pytest.mark.parametrize("size", [2, 4])
def test_nothing_else_is_sent_by_an_estimator(worlds, size):
    """Eigenpairs: a word on the free memory, then the products; chains: about twenty looks,
    whatever their length.
    """
    for found in worlds[size]:
        call = found["sent"]["eigenpairs"]
        assert len(call["bytes"]) == call["result"] + 1
        assert len(set(call["bytes"][1:])) == 1
        draws = found["sent"]["draws"]
        assert draws["result"] == 2 * 40
        assert sum(draws["bytes"]) < 20_000


def test_targets_drawn_in_pieces_of_batches_have_the_right_law(worlds, reference):
    """6,300 independent draws: their mean is within a few per cent of the expectation."""
    for found in worlds[2]:
        assert found["drawn trace"] != float(reference["ggn"].trace())
        assert abs(found["drawn trace"] / float(reference["ggn"].trace()) - 1) < 0.06


def test_rounding_is_no_disagreement():
    """The header of the same vector in float32, added up over any number of ranks, passes for
    the same.
    """
    one = Ranks(None)
    for ranks in (2, 3, 7, 64, 1000):
        one.size = ranks
        for vector in (
            *torch.randn(20, 5000),
            *torch.eye(50)[:5],
            1e-12 * torch.ones(100),
            1e12 * torch.ones(100),
        ):
            header = one._header("a product", vector).float()
            total = torch.zeros_like(header)
            for _ in range(ranks):
                total += header
            one._require_alike(total.double(), header.double(), "a product")


def test_one_process_sends_nothing(worlds):
    assert all(call["bytes"] == [] for call in worlds[1][0]["sent"].values())


def test_wrapped_models(worlds):
    for found in worlds[4]:
        wrapped = found["wrapped"]
        assert wrapped["fsdp still shards"]
        assert wrapped["fsdp trains"]
        for kind in ("ddp", "fsdp"):
            assert wrapped[f"{kind} names"]
            assert wrapped[f"{kind} chains"] == 0.0
            assert max(wrapped[f"{kind} products"], wrapped[f"{kind} eigenvalues"]) < 1e-12


def test_vectors_sharded_like_the_parameters(worlds):
    first, second = (found["sharded"] for found in worlds[2])
    assert first["lengths"][0] + second["lengths"][0] == first["lengths"][1] == 43
    assert first["values"].equal(second["values"])
    exact = torch.linalg.eigvalsh(first["matrix"]).flip(0)
    torch.testing.assert_close(first["values"], exact[:2], rtol=1e-6, atol=0)
    assert first["miss"] < 1e-3 * float(exact[0])
    assert first["status"] == "CONVERGED"
    assert abs(first["gradient"] - float(first["reference"].square().sum())) < 1e-12
    assert abs(float(first["trace"]) - float(first["matrix"].trace())) < 3 * first["trace"].stderr
    assert abs(first["causal"]) < 1e-12
    assert first["trained"]


def test_differences_of_gradients_are_as_short_as_the_curvature_asks(worlds):
    for exact, pairs, trace in worlds[2][0]["sharded"]["offloaded"]:
        error = abs(float(pairs.values[0]) - float(exact[-1])) / float(exact.abs().max())
        assert error < (1e-3 if pairs.status.name == "CONVERGED" else 2e-2)
        assert abs(float(trace) - float(exact.sum())) < 3 * trace.stderr


def test_learning_coefficient_of_sharded_parameters(worlds):
    """For a quadratic loss SGLD of step ε has λ̂ = ½Σ nβh/(a(1 − εa/4)), a = nβh + γ, on all
    data.
    """
    for found in worlds[2]:
        curvature = 20.0 * torch.linalg.eigvalsh(found["sharded"]["line"])
        stiffness = curvature + 1.0
        exact = float((curvature / stiffness / (1 - 0.02 * stiffness / 4)).sum()) / 2
        assert abs(float(found["sharded"]["llc"]) - exact) < 4 * found["sharded"]["llc"].stderr
    assert float(worlds[2][0]["sharded"]["llc"]) == float(worlds[2][1]["sharded"]["llc"])


def test_sharded_problems_refuse_what_they_cannot_take(worlds):
    for found in worlds[2]:
        assert "model must be under torch's fully_shard" in found["sharded"]["plain"]
        for case in ("meeting", "meeting behind 0"):
            assert (
                "the loss of a batch must be the mean of its samples' own losses"
                in found["sharded"][case]
            )
        assert "data must be the same on every rank" in found["sharded"]["order"]
        assert (
            "the loss of the first batch must be the same on every rank"
            in found["sharded"]["another loss"]
        )
        assert "seed must be the same on every rank for llc" in found["sharded"]["seed"]
        assert "tol must be the same on every rank for the trace" in found["sharded"]["tol"]
        assert "model must compute in torch.float32" in found["sharded"]["half"]
        assert found["sharded"]["half llc"] == ""


def test_sharded_constants_are_gathered_where_ranks_are_together(worlds):
    assert len({found["constants"]["21: pieces"] for found in worlds[4]}) > 1
    for found in worlds[4]:
        for samples in (1, 21):
            assert (
                max(
                    found["constants"][f"{samples}: {what}"]
                    for what in ("products", "trained since")
                )
                < 1e-12
            )
            assert found["constants"][f"{samples}: chains"] < 1e-12


ANOTHER_LOSS = "the loss of the first batch must be the same on every rank"
REFUSALS = {
    "another activation": ANOTHER_LOSS,
    "another plain tensor": ANOTHER_LOSS,
    "other class weights": ANOTHER_LOSS,
    "another loss of one's own": ANOTHER_LOSS,
    "another function": ANOTHER_LOSS,
    "another count": "count must be the same on every rank",
    "an entry that is no tensor": "what is no tensor in the data must be the same on every rank",
    "data beside a NaN": "data must be the same on every rank",
    "large data in half precision": "data must be the same on every rank",
    "running statistics": "torch.distributed.broadcast(buffer, 0)",
    "a vector a little off": "got other arguments in a product",
    "a vector in float32 a little off": "got other arguments in a product",
    "a point a little off": "got other arguments in the loss",
    "data of another length": "n must be the same on every rank",
    "data in another order": "data must be the same on every rank",
    "another model": "the parameters must be the same on every rank",
    "another width": "P must be the same on every rank",
    "trained apart since": "the parameters must be the same on every rank for Hessian",
    "another vector": "got other arguments in a product",
    "another operator": "got other calls in a product",
    "another point": "got other arguments in the gradient",
    "another seed": "seed must be the same on every rank for sampling",
    "another step size": "kernel must be the same on every rank for sampling",
    "another seed of a Fisher": "seed must be the same on every rank",
}


@pytest.mark.parametrize("case", REFUSALS)
def test_all_ranks_refuse_what_they_do_not_agree_on(worlds, case):
    for found in worlds[4]:
        assert REFUSALS[case] in found["refusals"][case]


def test_statistics_that_no_pass_reads_may_differ(worlds):
    for found in worlds[4]:
        assert found["refusals"]["running statistics that are not read"] == ""


def test_a_group_of_some_ranks_and_a_process_alone(worlds):
    for rank, found in enumerate(worlds[4]):
        assert abs(found["groups"]["alone"] - worlds[4][0]["groups"]["loss"]) < 1e-12
        assert ("loss" in found["groups"]) == (rank < 2)
        assert found["groups"].get("size", 2) == 2
        outside = (
            "ranks must be a process group that this process is in, got one of other processes"
        )
        assert rank < 2 or outside in found["groups"]["outside"]
    assert worlds[4][0]["groups"]["callback"] == worlds[4][0]["groups"]["alone"]


def test_a_rank_that_ends_or_hangs_is_an_error_on_the_others(exit_codes, folder):
    """No rank gives a product that another had no part in, and the error says who does not
    answer.
    """
    assert exit_codes["failing"][1] == 3  # the one that ends
    for name in ("ended-0", "hung-2"):
        text = (folder / f"{name}.txt").read_text(encoding="utf-8")
        assert "all 2 ranks must take part in a product" in text
        assert "rank 1 does not answer" in text


def test_products_of_other_sizes_never_come_back(exit_codes, folder):
    """Gloo ends the process where sizes differ, or the header shows it: no rank goes on with a
    wrong product.
    """
    for rank in (0, 2):
        told = folder / f"apart-{rank}.txt"
        assert exit_codes["failing"][rank] != 0 or "must" in told.read_text(encoding="utf-8")
        assert not told.exists() or told.read_text(encoding="utf-8") != "no error"


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_shares_hold_every_sample_once(cut, ranks):
    sizes = [7, 7, 6]
    found = [piece for rank in range(ranks) for piece in pieces(sizes, rank, ranks, cut)]
    rows = [
        (p.batch, i)
        for p in found
        for i in (range(sizes[p.batch]) if p.rows is None else range(p.rows.start, p.rows.stop))
    ]
    assert sorted(rows) == [(b, i) for b, size in enumerate(sizes) for i in range(size)]
    assert len({piece.number for piece in found}) == len(found)
    held = [len(pieces(sizes, rank, ranks, cut)) for rank in range(ranks)]
    assert cut or max(held) - min(held) <= 1


def test_a_problem_alone_shares_nothing_out():
    problem = PROBLEMS["cut batches"]()
    assert problem.ranks.size == 1
    assert [weight for weight, _ in problem.share] == problem.weights


@pytest.mark.parametrize("ranks", ["all", 3, [0, 1]])
def test_ranks_are_a_group(ranks):
    with pytest.raises(TypeError, match='ranks must be "auto", None or a process group'):
        lh.Problem(torch.nn.Linear(4, 3).double(), "cross_entropy", data(), ranks=ranks)


def test_readings_tell_entries_and_orders_apart():
    x = torch.randn(10_000, 4, dtype=torch.float64)
    assert torch.equal(_read(x)[0], _read(x.clone())[0])
    assert not torch.isclose(_read(x)[0], _read(x.flip(0))[0]).any()
    assert not torch.isclose(_read(x)[0], _read(x.roll(1, dims=1))[0]).any()
    assert float(_read(torch.zeros(5))[0].abs().max()) == 0.0


def test_what_is_not_finite_is_told_apart():
    x = torch.randn(50, 4, dtype=torch.float64)
    x[0, 0], x[1, 1] = torch.nan, torch.inf
    other = x.clone()
    other[1, 1] = -torch.inf
    rows = [
        torch.tensor([told([tensor]).numbers for tensor in pair])
        for pair in ((x, x.clone()), (x, other), (x, -x))
    ]
    assert [_unlike(pair, None) for pair in rows] == [[], [1], [1]]
    assert torch.isfinite(torch.stack(rows)).all()
    half = 65000 * torch.rand(2, 4096).half()
    assert torch.equal(_read(half)[0], _read(half.double())[0])


def test_not_a_number_is_like_itself_and_unlike_a_number():
    rows = torch.tensor([[torch.nan, 1.0], [torch.nan, 1.0], [0.0, 1.0], [torch.nan, torch.inf]])
    assert _unlike(rows, None) == _unlike(rows, 0.1) == [2, 3]


def test_a_process_alone_adds_nothing():
    values = torch.ones(3)
    assert Ranks(None).sum(values, "anything") is values
    assert Ranks(None).least(2.0, "anything", values.device) == 2.0
