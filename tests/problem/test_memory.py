"""The budget of memory: what is counted, how batches are cut, and that what runs under a budget
stays within it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

import lambdahat as lh
from lambdahat._core.check import memory_bytes
from lambdahat._core.rng import generator
from lambdahat.problem.memory import LiveBytes, pass_bytes
from lambdahat.sampling import sgld
from lambdahat.sampling._sample import Demand
from lambdahat.sampling.backends.chain_runner import ChainPlan
from tests.cases import LanguageModel, sentences
from tests.language import seeded

WORDS, ROWS, LENGTH = 400, 32, 12
MEBI = 2**20
ROW = 4 * (400 * 401 + 401 * 2)  # bytes of a vector of ``wide``


def language(memory: int | str | None = None, loss: str = "cross_entropy", **options) -> lh.Problem:
    """A language model whose logits, 0.6 MB for all rows, are most of what a pass takes."""
    model = seeded(lambda: LanguageModel(WORDS, 16)).float()
    return lh.Problem(model, loss, sentences(ROWS, LENGTH, WORDS), memory=memory, **options)


def wide(memory: int | None = None) -> lh.Problem:
    """160,000 parameters on few samples: vectors are most of what there is."""
    model = seeded(lambda: nn.Sequential(nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 2))).float()
    x = torch.randn(8, 400, generator=generator(0, "wide"))
    return lh.Problem(model, "cross_entropy", (x, torch.arange(8) % 2), memory=memory)


def chains(problem: lh.Problem, count: int, mode: str = "auto") -> lh.Chains:
    return lh.sample(problem, sgld(1e-6, 1.0), count, 2, batch_size=4, mode=mode)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        (7, 7),
        ("7", 7),
        ("3 KB", 3000),
        ("2KiB", 2048),
        ("1.5MiB", 1572864),
        ("4GiB", 2**32),
    ],
)
def test_texts_are_read_as_bytes(given, expected):
    assert memory_bytes(given) == expected


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: language("4 gigabytes"),
            ValueError,
            'memory must be a number of bytes or a text such as "4GiB"',
        ),
        (lambda: language(1.5), TypeError, "memory must be an integer of at least 1"),
        (lambda: language(0), ValueError, "memory must be an integer of at least 1, got 0"),
        (
            lambda: language(10_000),
            ValueError,
            "of which a pass over one sample may take a quarter, got 10,000",
        ),
        (
            lambda: lh.Problem.from_function(
                lambda p, x: (x @ p["w"]).square().mean(),
                {"w": torch.ones(9)},
                torch.ones(500, 9),
                memory=5000,
            ),
            ValueError,
            "give smaller batches",
        ),
        (
            lambda: lh.spectrum(lh.hessian(wide(36 * ROW)), 100),
            ValueError,
            "into what the problem's memory=23,213,088",
        ),
        (
            lambda: lh.spectrum(lh.hessian(wide(36 * ROW)), 40, basis="host"),
            ValueError,
            "with basis='device'; lower",
        ),
        (
            lambda: lh.trace(lh.hessian(wide(36 * ROW)), method="xtrace"),
            ValueError,
            "method must be 'auto' or 'hutch",
        ),
        (
            lambda: lh.moments(lh.hessian(wide(36 * ROW)), 2, probe="orthogonal"),
            ValueError,
            "probes must fit into",
        ),
        (
            lambda: lh.logdet(lh.ggn(wide(36 * ROW)), "exact"),
            ValueError,
            "the problem's memory, 16,",
        ),
        (
            lambda: lh.eigenpairs(lh.hessian(wide(36 * ROW)), 30),
            ValueError,
            "raise it, or ask for fewer pairs",
        ),
        (
            lambda: lh.spectrum(lh.hessian(wide()), 5, basis="disk"),
            ValueError,
            "basis must be one of 'auto', 'device'",
        ),
        (
            lambda: lh.eigenpairs(lh.hessian(wide()), 2, basis="half"),
            ValueError,
            "basis must be one of 'device'",
        ),
        (
            lambda: chains(wide(36 * ROW), 8),
            ValueError,
            "bytes for 8 chains of SGLD, got 23,213,088; raise it, or run",
        ),
        (
            lambda: chains(wide(33 * ROW), 4, "batched"),
            ValueError,
            "mode must fit into the problem's memory, 21,278,6",
        ),
    ],
)
def test_misuse(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_live_bytes_are_counted_and_forgotten():
    outside = torch.ones(1000)
    with LiveBytes() as seen:
        a = outside * 2  # 4,000 bytes
        b = a.view(10, 100)  # none
        c = a + 1  # 8,000 in all
        del a, b, c
        for _ in range(10):
            outside.mul(3.0)  # one at a time
        torch.cat([outside] * 3)  # 12,000
    assert seen.peak == 12_000


def test_live_bytes_see_what_a_backward_pass_makes():
    x = torch.ones(1000, requires_grad=True)
    with LiveBytes() as seen:
        x.exp().sum().backward()
    assert 8_000 <= seen.peak <= 12_100  # exp(x), which is saved, its gradient, and that of x


@pytest.mark.parametrize("loss", ["cross_entropy", "model"])
def test_batches_are_cut_to_the_budget_and_nothing_else_changes(loss):
    free, bound = language(loss=loss), language(8 * MEBI, loss)
    assert free.batches.sizes == [ROWS]
    assert max(bound.batches.sizes) < ROWS
    leaves = {name: t.requires_grad_() for name, t in bound.named(bound.vector).items()}
    assert max(pass_bytes(bound.batch_loss, leaves, batch) for batch in bound.batches) <= 2 * MEBI
    assert bound.loss() == pytest.approx(free.loss(), rel=1e-6)
    assert torch.allclose(bound.gradient(), free.gradient(), rtol=1e-4, atol=1e-7)
    v = torch.randn(free.num_parameters, generator=generator(0, "v"))
    assert torch.allclose(lh.hessian(bound) @ v, lh.hessian(free) @ v, rtol=1e-3, atol=1e-6)


def test_samples_that_meet_are_not_cut():
    model = nn.Sequential(nn.Linear(3, 50), nn.BatchNorm1d(50), nn.Linear(50, 2))
    x = torch.randn(64, 3, generator=generator(0, "met"))
    problem = lh.Problem(
        model, "cross_entropy", (x, torch.arange(64) % 2), norm="train", batch_size=64, memory="1GB"
    )
    assert problem.batches.sizes == [64]
    with pytest.raises(ValueError, match="give smaller batches"):
        lh.Problem(
            model,
            "cross_entropy",
            (x, torch.arange(64) % 2),
            norm="train",
            batch_size=64,
            memory=200_000,
        )


WORK = {
    "a product": lambda p: lh.hessian(p) @ torch.ones(p.num_parameters),
    "a Gauss–Newton product": lambda p: lh.ggn(p) @ torch.ones(p.num_parameters),
    "a block": lambda p: lh.hessian(p) @ torch.ones(p.num_parameters, 4),
    "trace": lambda p: lh.trace(lh.hessian(p), method="hutchinson", max_matvecs=20),
    "eigenpairs": lambda p: lh.eigenpairs(lh.hessian(p), 3, max_matvecs=20),
    "spectrum": lambda p: lh.spectrum(lh.hessian(p), 40),
    "sample": lambda p: lh.sample(
        p, sgld(1e-4, 1.0), chains=3, draws=2, batch_size=min(32, p.num_samples)
    ),
}


@pytest.mark.parametrize("work", WORK)
def test_work_on_a_language_model_stays_within_its_budget(work):
    """And takes more where there is none, so that the budget is what holds it."""
    budget = 3 * MEBI
    problem, free = language(budget, count="sequences"), language(count="sequences")
    peaks = []
    for each in (problem, free):
        with LiveBytes() as seen:
            WORK[work](each)
        peaks.append(seen.peak)
    assert peaks[0] <= budget < peaks[1]


@pytest.mark.parametrize("work", ["trace", "eigenpairs", "spectrum", "sample"])
def test_vectors_stay_within_the_budget(work):
    budget = 36 * ROW
    peaks = []
    for problem in (wide(budget), wide()):
        with LiveBytes() as seen:
            WORK[work](problem)
        peaks.append(seen.peak)
    assert peaks[0] <= budget < peaks[1]


def attentive(memory: int | None = None, dtype: torch.dtype = torch.float32) -> lh.Problem:
    """640 parameters behind a softmax and layer norms, so that there is no closed form."""

    class Attentive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(24, 8), nn.Linear(8, 24)
            self.mix, self.norm = nn.Linear(8, 24), nn.LayerNorm(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.norm(self.words(x))
            q, k, v = self.mix(h).chunk(3, dim=-1)
            return self.head(h + torch.softmax(q @ k.mT, dim=-1) @ v).mT

    rng = generator(0, "attentive")
    x, y = (torch.randint(24, (6, 6), generator=rng) for _ in range(2))
    return lh.Problem(
        seeded(Attentive).to(dtype), "cross_entropy", (x, y), memory=memory, count="tokens"
    )


ESTIMATES = {
    "diagonal": lambda p: lh.diagonal(
        lh.hessian(p.subset(range(3))), tol=1e-9
    ),  # a product for each parameter
    "diagonal, sampled": lambda p: lh.diagonal(lh.hessian(p), probes=40),
    "diagonal of a sum": lambda p: lh.diagonal(
        lh.hessian(p) + lh.identity(lh.hessian(p)), probes=70
    ),
    "trace": lambda p: lh.trace(lh.hessian(p), tol=0.05, max_matvecs=80),
    "hutch++": lambda p: lh.trace(lh.hessian(p), tol=0.05, method="hutch++", max_matvecs=80),
    "trace_per_layer": lambda p: lh.trace_per_layer(lh.hessian(p), tol=0.1, max_matvecs=80),
    "frobenius_norm": lambda p: lh.frobenius_norm(lh.hessian(p), tol=0.05, max_matvecs=80),
    "moments": lambda p: lh.moments(lh.hessian(p), 4, basis="chebyshev", probes=40),
    "eigenpairs": lambda p: lh.eigenpairs(lh.hessian(p), 3, max_matvecs=60, basis="host"),
    "spectrum": lambda p: lh.spectrum(lh.hessian(p), depth=20),
}


# a product for each parameter makes many blocks: twice the room, still a fifth of what all take
BUDGETS = [(name, 120 if name == "diagonal" else 60, torch.float32) for name in ESTIMATES]
BUDGETS += [(name, 200, torch.float64) for name in ("diagonal, sampled", "trace", "eigenpairs")]


@pytest.mark.parametrize(("estimate", "vectors", "dtype"), BUDGETS)
def test_estimators_cut_their_blocks_to_the_budget(estimate, vectors, dtype):
    problem = attentive(vectors * attentive().num_parameters * dtype.itemsize, dtype)
    with LiveBytes() as seen:
        ESTIMATES[estimate](problem)
    assert seen.peak <= problem.memory


def test_blocks_of_any_size_give_the_same_diagonal():
    bound, free = (attentive(memory, torch.float64) for memory in (120 * 640 * 8, None))
    dense = lh.hessian(free).dense().diagonal()
    assert torch.allclose(lh.diagonal(lh.hessian(bound), tol=1e-9).value, dense)
    sampled = lh.diagonal(lh.hessian(bound), probes=40)
    assert ((sampled.value - dense).abs() <= 6 * sampled.stderr + 1e-9).all()


def test_depths_near_the_limit_stay_within_the_budget():
    """Of every depth that is accepted, the peak; rounded vectors are widened in pieces."""
    for basis in ("auto", "host", "half"):
        accepted = []
        for depth in (10, 22, 26, 30, 70):
            problem = attentive(60 * 640 * 4)
            with LiveBytes() as seen:
                try:
                    lh.spectrum(lh.hessian(problem), depth, basis=basis)
                except ValueError as error:
                    assert "memory=153,600" in str(error)  # noqa: PT017
                    continue
            accepted.append(depth)
            assert seen.peak <= problem.memory
        assert 10 in accepted
        assert 70 not in accepted


def test_the_numbers_are_those_without_a_budget():
    bound, free = wide(36 * ROW), wide()
    pairs = [lh.eigenpairs(lh.hessian(p), 3, tol=1e-4) for p in (bound, free)]
    assert torch.allclose(pairs[0].values, pairs[1].values, rtol=1e-3)
    nodes = [lh.spectrum(lh.hessian(p), 12).nodes.max() for p in (bound, free)]
    assert nodes[0] == pytest.approx(nodes[1], rel=1e-4)


def test_a_gauss_newton_product_keeps_a_few_tensors_of_the_size_of_the_logits():
    """No Jacobian: that of B·T·V logits in P parameters would be 35,000 times as large as the
    logits.
    """
    problem = language()
    logits = ROWS * LENGTH * WORDS * 4
    with LiveBytes() as seen:
        lh.ggn(problem) @ torch.ones(problem.num_parameters)
    assert seen.peak <= 14 * logits


def test_chains_go_one_by_one_where_they_do_not_fit_together():
    many = lambda p: lh.sample(p, sgld(1e-4, 1.0), chains=4, draws=2, batch_size=16)  # noqa: E731

    def fits(memory):
        problem = language(memory, count="sequences")
        return Demand(problem, sgld(1e-4, 1.0), 4, 16, ChainPlan()).together_fits()

    assert fits("1GiB")  # which mode is then fastest, timing says
    assert not fits(3 * MEBI)
    bound = many(language(3 * MEBI, count="sequences"))
    assert bound.mode == "sequential"
    assert bound.losses == pytest.approx(many(language(count="sequences")).losses, rel=1e-5)


SCRIPT = """
import json, sys
import torch
import lambdahat as lh

torch.set_num_threads(1)
memory = json.loads(sys.argv[1])
data = torch.randn(16, 3), torch.randint(0, 2, (16,))
lh.trace(lh.hessian(lh.Problem(torch.nn.Linear(3, 2), "cross_entropy", data, memory=memory)))
compiler = "torch._dynamo" in sys.modules
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(1000, 600), torch.nn.Tanh(), torch.nn.Linear(600, 2))
data = torch.randn(16, 1000), torch.arange(16) % 2
problem = lh.Problem(model, "cross_entropy", data, memory=memory)
lh.hessian(problem) @ torch.ones(problem.num_parameters)  # loads what counts for nobody

def most():  # not ru_maxrss, which a process has from the one that started it
    if not sys.platform.startswith("linux"):
        return 0
    lines = open("/proc/self/status")
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

before = most()
lh.spectrum(lh.hessian(problem), 40)
print(json.dumps({"rise": most() - before, "compiler": compiler}))
"""
BUDGET = 86_000_000


@pytest.fixture(scope="module")
def processes():
    """What two processes say of their memory and modules: one with a budget, one without."""
    return [
        json.loads(
            subprocess.run(
                [sys.executable, "-c", SCRIPT, json.dumps(memory)],
                capture_output=True,
                text=True,
                check=True,
                timeout=100,
            ).stdout
        )
        for memory in (BUDGET, None)
    ]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_the_process_stays_within_the_budget(processes):
    """41 vectors of 2.4 MB, 98 MB, in a budget of 86 MB that is not for vectors alone."""
    bound, free = (found["rise"] for found in processes)
    assert bound <= BUDGET < free


def test_a_first_call_leaves_the_compiler_of_torch_alone(processes):
    """Its import takes a second, and dispatch modes would ask for it."""
    assert not any(found["compiler"] for found in processes)
