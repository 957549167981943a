"""``sample``: chains of a kernel on a problem."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lambdahat._core.check import require, require_choice, require_count, require_positive
from lambdahat._core.device import default_context
from lambdahat._core.progress import report
from lambdahat.problem import Problem, require_problem
from lambdahat.problem.space import Space, matcher
from lambdahat.results import Array, Chains
from lambdahat.sampling.backends import AnyRunner, make_runner
from lambdahat.sampling.backends.chain_runner import ChainPlan, Observable, Record
from lambdahat.sampling.diagnostics import AcceptanceProbe, diagnose, verdict
from lambdahat.sampling.kernels import Kernel, KroneckerScale, Localization
from lambdahat.sampling.kernels.kernel import require_localization

PIECES = 20
MOST_STRETCHES = 40
OBSERVABLE, AVERAGE = "observable ", "average "  # how a runner names what is to be averaged
PROBES = 5
Watch = Callable[[np.ndarray[Any, Any]], Any]


@default_context()
def sample(
    problem: Problem,
    kernel: Kernel,
    chains: int = 4,
    draws: int = 500,
    seed: int = 0,
    *,
    burn_in: int = 0,
    thin: int = 1,
    batch_size: int | None = None,
    shared_batches: bool = False,
    accumulate: int = 1,
    baseline: str = "paired",
    observables: Mapping[str, Observable] | None = None,
    averages: Mapping[str, Observable] | None = None,
    forces: bool = False,
    keep_parameters: bool = False,
    bound: float | None = None,
    mode: str = "auto",
    watch: Watch | None = None,
) -> Chains:
    """Sample exp(−nβ·L(w) − ½Σγ_i(w_i − w*_i)²) around the problem's parameters w*, with
    ``kernel``.

    Every chain starts at w*, takes ``burn_in`` steps that are discarded and then ``draws`` ×
    ``thin`` steps, of which every ``thin``-th is a draw. A step uses ``batch_size`` random samples
    (512 by default; exact kernels use all), separately for each chain unless ``shared_batches``, in
    ``accumulate`` pieces if memory is short. Every loss is paired with the loss at w* on the same
    batch; ``baseline`` "full" or "both" also evaluates the loss of every draw on the whole data,
    which is another pass and not in ``cost``.

    ``observables`` are functions of the flat parameters, recorded for every draw; of ``averages``
    only the means over about twenty segments of each chain are kept, whatever the number of draws;
    ``keep_parameters`` keeps the draws. ``forces`` records ‖∇U‖² and the virial (w − w*)·∇U, which
    reveal step-size bias and incomplete relaxation. Chains farther than ``bound`` from w* are
    pulled back, which the status reports. ``mode`` is "batched", "sequential", "processes", "graph"
    or "auto", the fastest. ``watch`` is called with nβ(L − L*) of the draws so far, (chains,
    draws), about twenty times; sampling stops if it returns True.
    """
    require_problem(problem)
    _require_kernel(kernel)
    for name, value, least in (
        ("chains", chains, 1),
        ("draws", draws, 1),
        ("burn_in", burn_in, 0),
        ("thin", thin, 1),
        ("accumulate", accumulate, 1),
    ):
        require_count(value, name, least)
    require_choice(baseline, "baseline", ("paired", "full", "both"))
    if batch_size is not None:
        require_count(batch_size, "batch_size", 1, problem.num_samples)
    if bound is not None:
        require_positive(bound, "bound")
    require_functions(observables, "observables")
    require_functions(averages, "averages")
    require(
        watch is None or callable(watch),
        "watch",
        "be a function of the energies so far",
        watch,
        "",
        TypeError,
    )
    plan = ChainPlan(
        seed,
        batch_size,
        shared_batches,
        accumulate,
        thin,
        bound,
        baseline != "paired",
        forces,
        keep_parameters,
        dict(observables or {}),
        dict(averages or {}),
    )
    frozen = problem.at(problem.vector)
    placed = place(kernel, frozen)
    runner, found = make_runner(frozen, placed, chains, plan, mode)
    try:
        burn(runner, burn_in)
        collector = Collector(runner, frozen, placed, plan, found, watch)
        collector.draw(draws)
        return collector.chains()
    finally:
        runner.close()


def burn(runner: AnyRunner, steps: int) -> None:
    """Take steps that are discarded, in pieces so that progress is reported."""
    for done, piece in _pieces(steps):
        report("burn-in", done, steps)
        runner.skip(piece)
    if steps:
        report("burn-in", steps, steps)


class Collector:
    """Collects the draws of a runner and makes ``Chains`` of them."""

    def __init__(
        self,
        runner: AnyRunner,
        problem: Problem,
        kernel: Kernel,
        plan: ChainPlan,
        mode: str,
        watch: Watch | None = None,
    ) -> None:
        self.runner, self.problem, self.kernel, self.plan, self.mode = (
            runner,
            problem,
            kernel,
            plan,
            mode,
        )
        self._watch = watch
        self.forget()

    def forget(self) -> None:
        """Discard the draws so far: they count as burn-in."""
        self._parts: list[Record] = []
        self._stretches: list[tuple[int, Record]] = []
        self._burn_in = self.runner.steps
        self._probe = (
            None
            if self.kernel.exact
            else AcceptanceProbe(self.problem, self.kernel, self.plan.seed)
        )

    def draw(self, draws: int) -> bool:
        """``draws`` more; False if the caller's ``watch`` has seen enough."""
        pieces = _pieces(draws)
        for number, (done, piece) in enumerate(pieces):
            report("sample", done, draws)
            self._keep(self.runner.advance(piece), piece)
            if self._probe is not None and number % max(len(pieces) // PROBES, 1) == 0:
                self._probe.look(*self.runner.own, self.runner.gather)
            if self._watch is not None and self._watch(self._energies(self._join())):
                return False
        report("sample", draws, draws)
        return True

    def _keep(self, record: Record, draws: int) -> None:
        """Averages are kept by stretches, which are joined two by two where there are many:
        memory stays bounded.
        """
        self._parts.append(
            {name: values for name, values in record.items() if not name.startswith(AVERAGE)}
        )
        if self.plan.averages:
            self._stretches.append(
                (draws, {name: record[name] for name in record if name.startswith(AVERAGE)})
            )
        if len(self._stretches) > MOST_STRETCHES:
            pairs = zip(self._stretches[::2], self._stretches[1::2], strict=False)
            left = self._stretches[len(self._stretches) // 2 * 2 :]
            self._stretches = [_together(*pair) for pair in pairs] + left

    def chains(self, reasons: Mapping[str, str] | None = None) -> Chains:
        """The chains so far, with their diagnostics and status."""
        record, runner, kernel = self._join(), self.runner, self.kernel
        arrays = {name: values.numpy() for name, values in record.items() if name != "parameters"}
        acceptance = (
            float(arrays["acceptance"].mean()) if self._probe is None else self._probe.acceptance
        )
        unknown = (
            {}
            if self._probe is None or not self._probe.unknown
            else {"acceptance": self._probe.unknown}
        )
        bounded = runner.bounded.cpu().numpy()
        diagnostics = diagnose(self._energies(record), arrays["distance"], acceptance, bounded)
        averages = {
            name: np.concatenate([part[name].numpy() for _, part in self._stretches], axis=1)
            for name in (self._stretches[0][1] if self._stretches else ())
        }
        return Chains(
            arrays["loss"],
            arrays["centre"],
            arrays["distance"],
            arrays["acceptance"],
            type(kernel).__name__,
            kernel.step_size,
            kernel.nbeta,
            kernel.localization,  # type: ignore[arg-type]
            runner.ground.centre_loss,
            self.problem.num_samples,
            runner.batch_size,
            self._burn_in,
            self.plan.thin,
            self.mode,
            diagnostics,
            full_losses=arrays.get("full"),
            recycled_losses=arrays.get("recycled"),
            forces=arrays.get("force"),
            virials=arrays.get("virial"),
            work=arrays.get("work"),
            heat=arrays.get("heat"),
            observables={
                name.removeprefix(OBSERVABLE): values
                for name, values in arrays.items()
                if name.startswith(OBSERVABLE)
            },
            averages={name.removeprefix(AVERAGE): values for name, values in averages.items()},
            stretches=tuple(length for length, _ in self._stretches),
            parameters=record.get("parameters"),
            reasons={**(reasons or {}), **unknown},
            cost=runner.gradients_spent * len(bounded),
            status=verdict(diagnostics, moved=bool((arrays["distance"] > 0).any())),
        )

    def _join(self) -> Record:
        return {
            name: torch.cat([part[name] for part in self._parts], dim=1) for name in self._parts[0]
        }

    def _energies(self, record: Record) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):  # chains that run away
            energies: Array = self.kernel.nbeta * (record["loss"] - record["centre"]).numpy()
        return energies


def _together(first: tuple[int, Record], second: tuple[int, Record]) -> tuple[int, Record]:
    """Two stretches, as (draws, means), as one."""
    count = first[0] + second[0]
    return count, {
        name: (first[0] * first[1][name] + second[0] * second[1][name]) / count for name in first[1]
    }


def place(kernel: Kernel, problem: Problem) -> Kernel:
    """The kernel with its localization and scale as tensors where the problem's vector is, if
    they are not numbers.
    """
    gamma: Any = localization_tensor(kernel.localization, problem.space, problem.vector)
    scale = kernel.scale
    if scale is not None:
        count = problem.num_parameters
        shape = scale.values.shape if isinstance(scale, KroneckerScale) else scale.shape
        fits = shape in ((count,), (count, count))
        require(fits, "scale", f"have shape ({count},) or ({count}, {count})", scale)
        scale = scale.to(
            problem.vector.to(torch.promote_types(problem.vector.dtype, torch.float32))
        )
    return dataclasses.replace(kernel, localization=gamma, scale=scale)


def localization_tensor(localization: Localization, space: Space, like: Tensor) -> float | Tensor:
    """γ as a number, or as a vector (P,) where it differs between parameters."""
    require_localization(localization)
    if isinstance(localization, Tensor):
        require(
            localization.shape == (space.size,),
            "localization",
            f"have shape ({space.size},)",
            localization,
        )
        return localization.to(like)
    if not isinstance(localization, Mapping):
        return float(localization)
    gamma = torch.zeros_like(like)
    for pattern, value in localization.items():
        for name in _named_by(pattern, space):
            gamma[space.slices[name]] = float(value)
    return gamma


def _named_by(pattern: str, space: Space) -> tuple[str, ...]:
    """The parameters that a name, a layer's name or a glob of either stands for."""
    match = matcher(pattern)
    found = tuple(name for name in space.names if match(name) or match(name.rpartition(".")[0]))
    some = ", ".join(space.names[:6]) + (", …" if len(space.names) > 6 else "")
    require(
        bool(found),
        "localization",
        f"name parameters, layers or globs of them among {some}",
        repr(pattern),
    )
    return found


def _pieces(draws: int) -> list[tuple[int, int]]:
    """(done before, size) of about twenty pieces."""
    size = max(-(-draws // PIECES), 1)
    return [(start, min(size, draws - start)) for start in range(0, draws, size)]


def require_functions(functions: Any, name: str) -> None:
    pairs = (
        functions.items()
        if isinstance(functions, Mapping)
        else []
        if functions is None
        else [(None, None)]
    )
    fine = all(isinstance(key, str) and callable(value) for key, value in pairs)
    require(
        fine,
        name,
        "be a dict of names to functions of the flat parameters (P,)",
        functions,
        "",
        TypeError,
    )


def _require_kernel(kernel: Any) -> None:
    require(
        isinstance(kernel, Kernel),
        "kernel",
        "be a kernel such as lh.sampling.sgld(...)",
        kernel,
        "lambdahat.sampling has kinetic, sgld, rmsprop_sgld, sgnht, sghmc, mala and hmc",
        TypeError,
    )
