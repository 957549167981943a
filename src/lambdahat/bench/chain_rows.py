"""Rows: a step of a chain, and λ̂ to five per cent, compared with devinterp."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import Dataset

from lambdahat._core.rng import generator
from lambdahat.bench.limits import MEASURED_GPU_SECONDS, Limit
from lambdahat.bench.plans import Plan, rows
from lambdahat.bench.problems import BenchCase
from lambdahat.bench.records import OURS, UNIT, BenchRow
from lambdahat.bench.timing import Clocked, Maker, Run, synchronize
from lambdahat.problem import Problem
from lambdahat.sampling import kinetic, sample, sgld
from lambdahat.sampling.kernels import Kernel
from lambdahat.singular._llc import llc
from lambdahat.singular.known_cases import suite
from lambdahat.singular.verification import KnownCase

INIT_BATCHES = 32  # devinterp's own default for the baseline
SKIPPED = 5  # steps before the clock starts

Losses = Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> (batch,)


@dataclass(frozen=True)
class ChainSettings:
    """Settings of both sides. ε multiplies ½(nβ∇L + γ(w − w*)), and √ε the noise, on both."""

    step_size: float
    nbeta: float
    localization: float
    batch_size: int = 512
    chains: int = 4
    draws: int = 200
    seed: int = 0


@dataclass(frozen=True)
class PeerRun:
    """``losses`` and ``centre_losses``, (chains, draws), are of the same batches, at w_t and at w*.

    ``baseline`` is devinterp's L₀, ``whole`` the same over all data, which its users can ask for.
    ``step_s`` is the median time of a chain-step once it runs; ``total_s`` is of the call, with
    copying the model and collecting garbage at each end of a chain.
    """

    losses: Tensor
    centre_losses: Tensor
    baseline: float
    whole: float
    nbeta: float
    step_s: float
    total_s: float

    @property
    def per_chain(self) -> Tensor:
        """devinterp's λ̂ of each chain."""
        return self.nbeta * (self.losses.mean(1) - self.baseline)

    @property
    def above_whole(self) -> Tensor:
        """devinterp's λ̂ of each chain where it is asked for a baseline over all data."""
        return self.nbeta * (self.losses.mean(1) - self.whole)

    @property
    def paired(self) -> Tensor:
        """λ̂ of each chain with every loss paired with the centre's on the same batch."""
        return self.nbeta * (self.losses - self.centre_losses).mean(1)


class Numbers(Dataset[dict[str, Tensor]]):
    """Samples by number, twice, for a sequence has two tokens at least; a batch in one piece."""

    def __init__(self, numbers: Tensor) -> None:
        self.rows = numbers.unsqueeze(1).repeat(1, 2)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index]}

    def __getitems__(self, indices: list[int]) -> list[dict[str, Tensor]]:
        return [{"input_ids": self.rows[indices]}]


def devinterp(module: str) -> Any:
    """A module of devinterp."""
    with contextlib.suppress(ImportError):
        import_transformers()
    return import_module(f"devinterp.{module}")


def import_transformers() -> Any:
    """The package transformers, which uses torchvision if installed, but not one that is broken.

    A torchvision built for another torch raises when it is imported. It is hidden only while
    transformers looks for it, for other packages would meet what is hidden later on.
    """
    try:
        import_module("torchvision")
    except ImportError:
        pass
    except RuntimeError:
        sys.modules["torchvision"] = None  # type: ignore[assignment]
        try:
            package = import_module("transformers.utils.import_utils")
            for name in ("is_torchvision_available", "is_torchvision_v2_available"):
                look = getattr(package, name)
                getattr(look, "cache_clear", lambda: None)()  # it may have been imported before
                look()
        finally:
            del sys.modules["torchvision"]
    return import_module("transformers")


def token_loss(
    losses: Losses, data: tuple[Tensor, Tensor]
) -> Callable[[nn.Module, Tensor], Tensor]:
    """``losses`` as devinterp's loss (model, input_ids) -> (…, batch, 1)."""
    inputs, targets = data

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        numbers = ids[..., 0]
        chosen = numbers.reshape(-1)
        return losses(model(inputs[chosen]), targets[chosen]).view(*numbers.shape, 1)

    return loss


@torch.no_grad()
def losses_at(model: nn.Module, losses: Losses, data: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of every sample, (n,), on the CPU in float64."""
    parts = zip(*(tensor.split(4096) for tensor in data), strict=True)
    return torch.cat([losses(model(x), y) for x, y in parts]).double().cpu()


def sampled(
    model: nn.Module,
    losses: Losses,
    data: tuple[Tensor, Tensor],
    settings: ChainSettings,
    replacement: bool = False,
) -> PeerRun:
    """devinterp's chains, one after the other as it runs them, on the device where ``data`` is.

    It walks through the data once, so that the loss of a step is of samples that the chain has not
    been pulled by; then again in the same order. ``replacement`` gives it a data set drawn with
    replacement, long enough for all steps.
    """
    sampler = devinterp("slt.sampler")
    inputs, targets = data
    numbers = torch.arange(len(targets))
    if replacement:
        rng = generator(settings.seed, "devinterp batches")
        count = settings.draws * settings.batch_size
        numbers = torch.randint(len(targets), (count,), generator=rng)
    loss = token_loss(losses, data)
    seen: list[tuple[Tensor, Tensor]] = []
    clock: list[list[float]] = [[] for _ in range(settings.chains)]

    def on_batch(*, loss: Tensor, input_ids: Tensor, **_: Any) -> None:
        seen.append((loss.mean(), input_ids[..., 0].reshape(-1)))

    def on_step(chain: int, *_: Any) -> None:
        clock[chain].append(time.perf_counter())

    options = {name: getattr(settings, name) for name in ("nbeta", "localization")}
    options["lr"] = settings.step_size
    synchronize()
    start = time.perf_counter()
    for chain in range(settings.chains):
        with contextlib.redirect_stderr(io.StringIO()):  # its progress bars
            sampler.sample_single_chain(
                model,
                Numbers(numbers),
                lambda model, batch: (loss(model, batch["input_ids"]), {}),
                {name: None for name, _ in model.named_parameters()},
                num_draws=settings.draws,
                batch_size=settings.batch_size,
                sampling_method=devinterp("optim").SGMCMC.sgld,
                sampling_method_kwargs=options,
                chain=chain,
                seed=settings.seed + chain,
                dataloader_seed=settings.seed,
                device=str(inputs.device),
                micro_callback=on_batch,
                step_callback=on_step,
            )
    synchronize()
    total = time.perf_counter() - start
    shape = settings.chains, settings.draws
    if len(seen) != math.prod(shape):
        done = f"{len(seen)} of {math.prod(shape)} steps done"
        raise RuntimeError(f"devinterp stopped a chain: {done}")
    centre = losses_at(model, losses, data)
    traces = torch.stack([loss for loss, _ in seen]).double().cpu().view(shape)
    centres = torch.stack([centre[drawn.cpu()].mean() for _, drawn in seen]).view(shape)
    steps = torch.tensor([times[SKIPPED:] for times in clock], dtype=torch.float64).diff(dim=1)
    baseline, whole = float(centres[:, :INIT_BATCHES].mean()), float(centre.mean())
    pace = float(steps.median())
    return PeerRun(traces, centres, baseline, whole, settings.nbeta, pace, total)


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


def _step_rows(
    plan: Plan, case: BenchCase, chains: int, work: str = "chain-step"
) -> list[BenchRow]:
    """A step of SGLD beside devinterp's, or of kinetic Langevin dynamics: the median while the
    chains run.

    The unit is one gradient on one batch of a chain.
    """
    n = case.num_samples
    batch, kind = min(BATCH, n // 2), "quick" if plan.quick else "gpu" if plan.gpu else case.name
    draws = DRAWS[kind]
    settings = ChainSettings(STEP_SIZE, n / math.log(n), LOCALIZATION, batch, chains, draws)
    one, label = case.one_batch(batch), f"{case.name}, {chains} chains"
    problem, make = case.problem(), kinetic if work == "kinetic step" else sgld
    ours = partial(our_steps, problem, settings, make=make)
    makers: dict[str, Maker] = {UNIT: lambda: one.gradient, OURS: lambda: ours}
    if plan.peers and work == "chain-step":
        makers["devinterp"] = lambda: partial(_peer_steps, case, settings)
    timed = plan.timed(makers)
    least = plan.limit(work, one, 1, "gradient", label)
    if plan.gpu and (work, label) in MEASURED_GPU_SECONDS:
        unit = MEASURED_GPU_SECONDS[work, label] / timed[UNIT].seconds
        least = Limit(unit, "least measured", least.flop_seconds, least.byte_seconds)
    return rows(work, label, timed, least=least, unit="gradient of a batch")


def our_steps(
    problem: Problem, settings: ChainSettings, mode: str = "auto", make: type[Kernel] = sgld
) -> Clocked:
    """A chain-step, timed between the calls of ``watch``, which come some twenty times in a run."""
    marks: list[tuple[float, int]] = []

    def watch(energies: Any) -> None:
        marks.append((time.perf_counter(), energies.shape[1]))

    kernel = make(settings.step_size, settings.nbeta, settings.localization)
    length, size = (settings.chains, settings.draws, 0), settings.batch_size
    sample(problem, kernel, *length, batch_size=size, mode=mode, watch=watch)
    steps = [(end - start) / (after - before) for (start, before), (end, after) in pairwise(marks)]
    return Clocked(statistics.median(steps) / settings.chains)


def _peer_steps(case: BenchCase, settings: ChainSettings) -> Clocked:
    """It runs chain after chain, so that four tell as much as more."""
    losses = partial(cross_entropy, reduction="none")
    few = replace(settings, chains=min(settings.chains, 4))
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
        find = partial(_estimate, problem, accuracy, most)
        rest[OURS] = [find(seed) for seed in range(1, seeds)]
        return partial(find, 0)

    makers: dict[str, Maker] = {UNIT: lambda: problem.gradient, OURS: ours}
    notes: dict[str, str] = {}

    def devinterp() -> Run:
        ladder = LADDER[:1] if plan.quick else LADDER
        asked = (known, problem, accuracy, most, seeds, ladder)
        run, rest["devinterp"], notes["devinterp"] = _peer_coefficient(*asked)
        return run

    if plan.peers:
        makers["devinterp"] = devinterp
    timed = plan.timed(makers)
    # a standard error of the accuracy leaves an error of thrice that once in 400 runs
    work, error = f"λ̂ to {accuracy * 100:.0f} %", partial(_error, known)
    found = rows(work, "least squares, d = 30", timed, error, 3 * accuracy, notes=notes)
    for place, row in enumerate(found):
        if row.by != UNIT and row.seconds > 0:  # over the seeds
            answers = [timed[row.by].value, *rest.get(row.by, [])]
            found[place] = replace(row, error=_rms(known, answers))
    return found


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


def _estimate(problem: Problem, accuracy: float, most: int | None, seed: int) -> _Answer:
    found = llc(problem, tol=accuracy, max_gradients=most, seed=seed)
    assert not isinstance(found.localization, Tensor)
    return _Answer(float(found), found.nbeta, float(found.localization))


def _error(known: KnownCase, found: _Answer) -> float:
    return abs(found.value / float(known.truth(found.nbeta, found.localization)) - 1)


def _peer_coefficient(
    known: KnownCase,
    problem: Problem,
    accuracy: float,
    most: int | None,
    seeds: int,
    ladder: Sequence[int],
) -> tuple[Run, list[_Answer], str]:
    """A run of the fewest steps that are accurate over the seeds, else of what came nearest; the
    answers of the other seeds; and what was given.
    """
    found = llc(problem, kernel="sgld", tol=accuracy, max_gradients=most)
    nbeta, localization = found.nbeta, float(found.localization)
    assert isinstance(problem.source, nn.Module)
    model, data = problem.source, _whole(problem)

    def losses(output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(output, target, reduction="none").squeeze(1)

    def run(smaller: int, draws: int, seed: int) -> _Answer:
        step = found.step_size / smaller
        settings = ChainSettings(step, nbeta, localization, draws=draws, seed=10 * seed)
        chains = sampled(model, losses, data, settings)
        return _Answer(float(chains.above_whole.mean()), nbeta, localization)

    tried: dict[tuple[int, int], tuple[float, list[_Answer]]] = {}
    for draws in ladder:
        for smaller in SMALLER:
            answers = [run(smaller, draws, seed) for seed in range(seeds)]
            tried[smaller, draws] = _rms(known, answers), answers
        if min(error for error, _ in tried.values()) <= accuracy:
            break
    smaller, draws = min(tried, key=lambda setting: tried[setting][0])
    note = f"nβ, γ, ε/{smaller} and L₀ over all data given, 4 × {draws:,} steps"
    return partial(run, smaller, draws, 0), tried[smaller, draws][1][1:], note
