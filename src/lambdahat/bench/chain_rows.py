"""Rows: a step of a chain, and λ̂ to five per cent, beside devinterp."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from lambdahat.bench.devinterp_chains import Settings, sampled
from lambdahat.bench.limits import DESIGN_GPU_SECONDS, Limit
from lambdahat.bench.plans import Plan, rows
from lambdahat.bench.problems import Case
from lambdahat.bench.records import OURS, UNIT, BenchRow
from lambdahat.bench.timing import Clocked, Maker, Run
from lambdahat.problem import Problem
from lambdahat.sampling import kinetic, sample, sgld
from lambdahat.sampling.kernels import Kernel
from lambdahat.singular._llc import llc
from lambdahat.singular.known_cases import suite
from lambdahat.singular.verification import Case as KnownCase

STEP_SIZE, LOCALIZATION, BATCH = 1e-5, 1000.0, 512
DRAWS = {"quick": 20, "gpu": 200, "mlp": 200, "lenet5": 40}
KNOWN, ACCURACY = "regression-n50000-d30", 0.05
# the step that is found is corrected for its bias; a plain mean needs a smaller one
SMALLER = (4, 8)
# draws of each of devinterp's chains: the fewest that are accurate are timed
LADDER = (400, 800, 1600, 3200)
SEEDS = 3  # one may be near the truth by chance


def chain_rows(plan: Plan) -> Iterator[list[BenchRow]]:
    """Steps of the chains of two networks, then λ̂ where the truth is known."""
    for name in ("mlp",) if plan.quick else ("mlp", "lenet5"):
        for chains in (4, 32) if plan.gpu else (4,):
            yield _step_rows(plan, plan.case(name), chains)
            yield _step_rows(plan, plan.case(name), chains, "kinetic step")
    yield _coefficient_rows(plan)


def _step_rows(plan: Plan, case: Case, chains: int, work: str = "chain-step") -> list[BenchRow]:
    """A step of SGLD beside devinterp's, or of kinetic Langevin dynamics: the median while the
    chains run.

    The unit is one gradient on one batch of a chain.
    """
    n = case.num_samples
    batch, draws = (
        min(BATCH, n // 2),
        DRAWS["quick" if plan.quick else "gpu" if plan.gpu else case.name],
    )
    settings = Settings(STEP_SIZE, n / math.log(n), LOCALIZATION, batch, chains, draws)
    one, label = case.one_batch(batch), f"{case.name}, {chains} chains"
    problem, make = case.problem(), kinetic if work == "kinetic step" else sgld
    makers: dict[str, Maker] = {
        UNIT: lambda: one.gradient,
        OURS: lambda: partial(our_steps, problem, settings, make=make),
    }
    if plan.peers and work == "chain-step":
        makers["devinterp"] = lambda: partial(_peer_steps, case, settings)
    timed = plan.timed(makers)
    least = plan.limit(work, one, 1, "gradient", label)
    if plan.gpu and (work, label) in DESIGN_GPU_SECONDS:
        unit = DESIGN_GPU_SECONDS[work, label] / timed[UNIT].seconds
        least = Limit(unit, "DESIGN §5", least.flop_seconds, least.byte_seconds)
    return rows(work, label, timed, least=least, unit="gradient of a batch")


def our_steps(
    problem: Problem, settings: Settings, mode: str = "auto", make: type[Kernel] = sgld
) -> Clocked:
    """A chain-step, timed between the calls of ``watch``, which come some twenty times in a run."""
    marks: list[tuple[float, int]] = []

    def watch(energies: Any) -> None:
        marks.append((time.perf_counter(), energies.shape[1]))

    kernel = make(settings.step_size, settings.nbeta, settings.localization)
    sample(
        problem,
        kernel,
        settings.chains,
        settings.draws,
        0,
        batch_size=settings.batch_size,
        mode=mode,
        watch=watch,
    )
    steps = [
        (end - start) / ((after - before) * settings.chains)
        for (start, before), (end, after) in pairwise(marks)
    ]
    return Clocked(statistics.median(steps))


def _peer_steps(case: Case, settings: Settings) -> Clocked:
    """It runs chain after chain, so that four tell as much as more."""
    losses = partial(cross_entropy, reduction="none")
    few = Settings(
        settings.step_size,
        settings.nbeta,
        settings.localization,
        settings.batch_size,
        min(settings.chains, 4),
        settings.draws,
    )
    return Clocked(sampled(case.model, losses, case.whole(), few).step_s)


def _coefficient_rows(plan: Plan) -> list[BenchRow]:
    """λ̂ of least squares in 30 dimensions, whose value at nβ and γ is known in closed form.

    Ours finds everything by itself. devinterp is told nβ, γ and the baseline over all data, and
    given steps of two sizes, both from our SGLD, and more and more of them until its answer is near
    enough to the truth. Errors are the root of the mean square over three seeds; one run is timed.
    """
    known = next(case for case in suite() if case.name == KNOWN)
    problem = _on_device(known, plan.device)
    accuracy, most, seeds = (0.3, 1200, 1) if plan.quick else (ACCURACY, None, SEEDS)
    rest: dict[str, list[_Answer]] = {}

    def ours() -> Run:
        find = partial(_found, problem, accuracy, most)
        rest[OURS] = [find(seed) for seed in range(1, seeds)]
        return partial(find, 0)

    makers: dict[str, Maker] = {UNIT: lambda: problem.gradient, OURS: ours}
    notes: dict[str, str] = {}

    def devinterp() -> Run:
        asked = _Asked(known, problem, accuracy, most, seeds, LADDER[:1] if plan.quick else LADDER)
        run, rest["devinterp"], notes["devinterp"] = _peer_coefficient(asked)
        return run

    if plan.peers:
        makers["devinterp"] = devinterp
    timed = plan.timed(makers)
    # a standard error of the accuracy leaves an error of thrice that once in 400 runs
    found = rows(
        f"λ̂ to {accuracy * 100:.0f} %",
        "least squares, d = 30",
        timed,
        error=partial(_error, known),
        accuracy=3 * accuracy,
        notes=notes,
    )
    return [_over_seeds(known, row, [timed[row.by].value, *rest.get(row.by, [])]) for row in found]


def _over_seeds(known: KnownCase, row: BenchRow, answers: list[Any]) -> BenchRow:
    if row.by == UNIT or not row.seconds > 0:
        return row
    return replace(row, error=_rms(known, answers))


def _rms(known: KnownCase, answers: Sequence[_Answer]) -> float:
    return math.sqrt(statistics.fmean(_error(known, answer) ** 2 for answer in answers))


def _on_device(known: KnownCase, device: str) -> Problem:
    problem = known.make()
    assert isinstance(problem.source, nn.Module)
    x, y = (tensor.to(device) for tensor in _whole(problem))
    return Problem(copy.deepcopy(problem.source).to(device), "mse", (x, y))


def _whole(problem: Problem) -> tuple[Tensor, Tensor]:
    """The data in one piece."""
    inputs, targets = zip(*(batch.data for batch in problem.batches), strict=True)
    return torch.cat(inputs), torch.cat(targets)


class _Answer(NamedTuple):
    """λ̂, and where it was measured."""

    value: float
    nbeta: float
    localization: float


def _found(problem: Problem, accuracy: float, most: int | None, seed: int) -> _Answer:
    found = llc(problem, tol=accuracy, max_gradients=most, seed=seed)
    assert not isinstance(found.localization, Tensor)
    return _Answer(float(found), found.nbeta, float(found.localization))


def _error(known: KnownCase, found: _Answer) -> float:
    return abs(found.value / float(known.truth(found.nbeta, found.localization)) - 1)


class _Asked(NamedTuple):
    known: KnownCase
    problem: Problem
    accuracy: float
    most: int | None
    seeds: int
    ladder: Sequence[int]


def _peer_coefficient(asked: _Asked) -> tuple[Run, list[_Answer], str]:
    """A run of the fewest steps that are accurate over the seeds, else of what came nearest; the
    answers of the other seeds; and what was given.
    """
    found = llc(asked.problem, kernel="sgld", tol=asked.accuracy, max_gradients=asked.most)
    nbeta, localization = found.nbeta, float(found.localization)
    assert isinstance(asked.problem.source, nn.Module)
    model, data = asked.problem.source, _whole(asked.problem)

    def losses(output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(output, target, reduction="none").squeeze(1)

    def run(smaller: int, draws: int, seed: int) -> _Answer:
        settings = Settings(
            found.step_size / smaller, nbeta, localization, draws=draws, seed=10 * seed
        )
        chains = sampled(model, losses, data, settings)
        return _Answer(float(chains.above_whole.mean()), nbeta, localization)

    tried: dict[tuple[int, int], tuple[float, list[_Answer]]] = {}
    for draws in asked.ladder:
        for smaller in SMALLER:
            answers = [run(smaller, draws, seed) for seed in range(asked.seeds)]
            tried[smaller, draws] = _rms(asked.known, answers), answers
        if min(error for error, _ in tried.values()) <= asked.accuracy:
            break
    smaller, draws = min(tried, key=lambda setting: tried[setting][0])
    note = f"nβ, γ, ε/{smaller} and L₀ over all data given, 4 × {draws:,} steps"
    return partial(run, smaller, draws, 0), tried[smaller, draws][1][1:], note
