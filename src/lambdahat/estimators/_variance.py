"""How much gradient and curvature differ from sample to sample.

With ℓ_i the loss of sample i, g_i and H_i its gradient and Hessian, and bars for means over the
data set, the variance of an element is

    σ_g² = (1/P) Σ_j Var_i(g_i,j)        = (1/P) mean_i ‖g_i − ḡ‖²
    σ_H² = (1/P²) Σ_jk Var_i(H_i,jk)     = (1/P²) mean_i ‖H_i − H̄‖²_F
         = (1/P) E_v mean_i ‖(H_i − H̄)v‖²

for v uniform on the unit sphere, where E[vvᵀ] = I/P. The last form is Algorithm 8 of the spectral
thesis with its missing 1/N put in, and with ‖H̄v‖² in place of its (vᵀH̄v)²: mean_i vᵀH_i²v −
vᵀH̄²v. The data set is the population, so variances divide by N; from n < N samples drawn without
replacement the unbiased form is (N − 1)/N · Σ_i ‖·‖²/(n − 1), the same number at n = N.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from lambdahat._core.check import require, require_count
from lambdahat._core.device import default_context
from lambdahat._core.progress import report
from lambdahat._core.rng import generator
from lambdahat.estimators.quantities import MeasureSettings, Work, products, quantity
from lambdahat.estimators.sequential import standard_error
from lambdahat.operators.base import LinearOperator
from lambdahat.operators.exact import COMPARED_WHOLE
from lambdahat.operators.exact.validity import Kinks
from lambdahat.operators.linearise import compare_halves, tolerance
from lambdahat.operators.rounding import choose_samples, error_of_sum, run_in_double, with_rounding
from lambdahat.problem import Problem, require_problem
from lambdahat.problem.batches import Batch, free_memory, rows_of, take
from lambdahat.problem.losses import CrossEntropy
from lambdahat.problem.memory import PASS
from lambdahat.results import Estimate, Variance

CHUNK_SAMPLES = 256
MEMORY_SHARE = 0.25
PROBES = 8
COPIES = 8  # vectors of length P that one sample's product holds at a time, about
# vectors in float64: the probe, the means of a chunk and of all samples, and what merges them
MEANS = 6

# one sample, with a leading dimension of 1, to a vector (P,)
Derivative = Callable[[Batch], Tensor]


@default_context()
def variance(
    problem: Problem, probes: int = PROBES, seed: int = 0, samples: int | None = None
) -> Variance:
    """Estimate how gradient, Hessian and Gauss–Newton matrix vary between samples.

    The variances are per element.

    Each probe is one vector v, uniform on the unit sphere; the errors are those of the mean over
    probes (NaN for one probe). With ``samples``, every probe also draws its own subset of that many
    samples, so the errors include both. Without it all samples are used, and the gradient's
    variance is exact; with P probes or more the P unit vectors are used instead, and everything is
    exact. For a model below float64 the errors include its rounding, measured on at most 256
    samples. ``cost`` counts passes over the data: products and gradients.
    """
    require_problem(problem)
    require_count(probes, "probes")
    total = problem.num_samples
    least = "a variance needs two samples"
    require(total >= 2, "the problem", "have two samples or more", f"{total} samples", least)
    count = total if samples is None else require_count(samples, "samples", 2, total, least)
    require_own_losses(problem)
    whole = count == total
    exact = whole and probes >= problem.num_parameters
    rounds = problem.num_parameters if exact else probes
    work = PerSample(problem)
    readings: dict[str, list[Tensor]] = {}
    sizes: list[Tensor] = []  # the norms of each sample's derivatives, in the first round
    for i in range(rounds):
        batches: Iterable[Batch] = problem.batches
        if not whole:
            order = torch.randperm(total, generator=generator(seed, "variance samples", i))
            batches = problem.batches.subset(order[:count].sort().values)
        if exact:
            probe = torch.zeros_like(problem.vector)
            probe[i] = 1.0
        else:
            rng = generator(seed, "variance", i)
            drawn = torch.randn(problem.num_parameters, dtype=torch.float64, generator=rng)
            probe = drawn.div(torch.linalg.vector_norm(drawn)).to(problem.device, problem.dtype)
        for name, derivative in work.derivatives(probe).items():
            if name == "gradient" and whole and i > 0:
                continue
            spread = spread_of(work.rows(batch, derivative) for batch in batches)
            if whole and i == 0:
                sizes.append(torch.cat(spread.sizes))
            element = spread.unbiased(total) / problem.num_parameters
            readings.setdefault(f"{name}_variance", []).append(element)
            if name != "gradient":
                readings.setdefault(f"{name}_mean", []).append(probe.double() @ spread.mean)
        report("variance", i + 1, rounds)
    estimates = {
        name: _estimate(values, exact or (whole and name == "gradient_variance"))
        for name, values in readings.items()
    }
    estimates["gradient_mean_norm"] = Estimate(float(problem.gradient().double().norm()))
    for name, error in _rounding(problem, sizes).items():
        error = max(error, torch.finfo(problem.dtype).eps * abs(float(estimates[name])))
        estimates[name] = with_rounding(estimates[name], error, math.inf)
    theta = problem.vector.double()
    return Variance(
        parameter_l2=Estimate(float(theta.norm())),
        parameter_linf=Estimate(float(theta.abs().max())),
        cost=math.ceil(work.products / total) + 1,
        **estimates,  # type: ignore[arg-type]
    )


class Spread:
    """Mean and summed squared deviation of vectors, merged without cancellation (Chan 1979)."""

    def __init__(self, rows: Tensor) -> None:
        self.count = len(rows)
        self.mean = rows.mean(dim=0, dtype=torch.float64)
        self.deviation = (rows - self.mean.to(rows.dtype)).square().sum(dtype=torch.float64)
        self.sizes = [torch.linalg.vector_norm(rows, dim=1)]

    def merge(self, other: Spread) -> None:
        """Take in the vectors of another."""
        both, shift = self.count + other.count, other.mean - self.mean
        between = shift.square().sum() * (self.count * other.count / both)
        self.deviation = self.deviation + other.deviation + between
        self.mean = self.mean + shift * (other.count / both)
        self.count = both
        self.sizes += other.sizes

    def unbiased(self, population: int) -> Tensor:
        """mean_i ‖x_i − x̄‖² of the population that these vectors were drawn from."""
        return self.deviation / (self.count - 1) * ((population - 1) / population)


def spread_of(blocks: Iterable[Iterable[Tensor]]) -> Spread:
    """The spread of all vectors in blocks of chunks."""
    parts = (Spread(rows) for chunks in blocks for rows in chunks)
    whole = next(parts)
    for part in parts:  # one at a time: a part holds a vector of length P
        whole.merge(part)
    return whole


def _rounding(problem: Problem, sizes: Sequence[Tensor]) -> dict[str, float]:
    """About how far rounding in a model below float64 moves each estimate, by its name.

    Derivatives of samples, along one random vector, are computed again in float64: of all samples,
    or of some where they are many, chosen by the ``sizes`` of their derivatives.
    """
    total, size, problem = problem.num_samples, problem.num_parameters, problem.alone()
    if not problem.reduced or problem.memory is not None:
        return {}
    few, parts = problem, [(total, total)]
    if total > COMPARED_WHOLE:
        chosen, parts = choose_samples(problem, sizes, _margins(problem))
        few, _ = problem.on_samples(chosen)
    shares = [
        torch.full((count,), stands_for / total / max(count, 1)) for count, stands_for in parts
    ]
    share = torch.cat(shares).to(problem.device, torch.float64)
    draw = torch.randn(size, dtype=torch.float64, generator=generator(0, "variance rounding"))
    probe = draw.div(torch.linalg.vector_norm(draw)).to(problem.device)

    def blocks(of: Problem) -> Iterator[tuple[str, slice, Tensor]]:
        work = PerSample(of)
        for name, derivative in work.derivatives(probe.to(of.dtype)).items():
            start = 0
            for rows in chain.from_iterable(work.rows(batch, derivative) for batch in of.batches):
                yield name, slice(start, start + len(rows)), rows.double()
                start += len(rows)

    def numbers(of: Problem) -> dict[str, Tensor]:
        """‖x − x̄‖² and x·v of each sample's derivative x, (2, n), v what means are taken along."""
        found: dict[str, list[Tensor]] = {}
        for name, _, rows in blocks(of):
            gaps = (rows - means[name]).square().sum(dim=1)
            found.setdefault(name, []).append(torch.stack([gaps, rows @ along[name]]))
        return {name: torch.cat(columns, dim=1) for name, columns in found.items()}

    means: dict[str, Tensor] = {}
    errors: dict[str, float] = {}
    try:
        for name, where, rows in blocks(few):
            means[name] = means.get(name, torch.zeros_like(probe)) + share[where] @ rows
        slope = torch.linalg.vector_norm(means["gradient"]).clamp(min=1e-300)
        along = dict.fromkeys(means, probe) | {"gradient": means["gradient"] / slope}
        own, double = numbers(few), run_in_double(few, numbers)
    except (ValueError, torch.OutOfMemoryError):
        return {}
    for name, values in own.items():
        gaps = torch.stack([values - double[name], (values - double[name]).square()], dim=2)
        for kind, each in zip(("variance", "mean"), gaps, strict=True):
            split = each.split([count for count, _ in parts])
            error = error_of_sum(parts, [part.sum(dim=0).tolist() for part in split]) / total
            errors[f"{name}_{kind}"] = error / size if kind == "variance" else error
    errors["gradient_mean_norm"] = errors.pop("gradient_mean")
    return {name: error for name, error in errors.items() if math.isfinite(error)}


def _margins(problem: Problem) -> Tensor:
    """How near each sample is to a kink of the model."""
    margins, parameters = [], problem.named(problem.vector)
    for batch in problem.batches:
        with Kinks(batch.size, problem.device) as kinks, torch.no_grad():
            problem.batch_loss(parameters, batch)
        margins.append(kinks.margins)
    return torch.cat(margins)


def samples_at_once(problem: Problem) -> int:
    """How many samples' products fit into the memory, at most 256."""
    theta, memory = problem.vector, problem.memory
    need = COPIES * theta.numel() * theta.element_size()
    if memory is None:
        return int(max(1, min(CHUNK_SAMPLES, MEMORY_SHARE * free_memory(theta.device) // need)))
    room = (1 - PASS) * memory - MEANS * 8 * theta.numel()
    expected = f"hold {need:,} bytes for the derivatives of one sample beside the means of all"
    got = f"{memory:,}, of which {max(room, 0.0):,.0f} are left"
    require(need <= room, "memory", expected, got, "raise it, or choose fewer parameters")
    return int(min(CHUNK_SAMPLES, room // need))


class PerSample:
    """Derivatives of each sample's loss at the problem's parameters, many samples at a time."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.theta = problem, problem.vector
        self.products = 0
        self.chunk = samples_at_once(problem)
        self._vectorised = True

    def derivatives(self, probe: Tensor) -> dict[str, Derivative]:
        """g_i, H_i v and, for a model with a loss of its output, G_i v = J_iᵀM_iJ_i v."""

        def loss(sample: Batch) -> Callable[[Tensor], Tensor]:
            problem = self.problem
            return lambda theta: problem.batch_loss(problem.named(theta), sample).reshape(())

        def hessian(sample: Batch) -> Tensor:
            return grad(lambda theta: grad(loss(sample))(theta) @ probe)(self.theta)  # type: ignore[no-any-return]

        out: dict[str, Derivative] = {"gradient": lambda one: grad(loss(one))(self.theta)}
        out["hessian"] = hessian
        if self.problem.loss_function is not None:
            out["ggn"] = lambda sample: self._gauss_newton(sample, probe)
        return out

    def rows(self, batch: Batch, derivative: Derivative) -> Iterable[Tensor]:
        """The derivative of every sample of a batch, as rows of blocks (chunk, P)."""
        self.products += batch.size
        for start in range(0, batch.size, self.chunk):
            stop = min(start + self.chunk, batch.size)
            part = take(batch, torch.arange(start, stop, device=self.problem.device))
            rows = self._each(part, derivative).detach()
            yield rows.to(torch.promote_types(rows.dtype, torch.float32))

    def _each(self, batch: Batch, derivative: Derivative) -> Tensor:
        inputs, single = rows_of(batch)

        def one(*rows: Tensor) -> Tensor:
            return derivative(single(*rows))

        # the fused attention kernels have no second derivatives; operations that vmap loops over
        # are right all the same
        with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")
            if self._vectorised:
                try:
                    return vmap(one)(*inputs)
                except RuntimeError:  # control flow that depends on the data, or too little memory
                    self._vectorised = False
            return torch.stack([one(*leaves) for leaves in zip(*inputs, strict=True)])

    def _gauss_newton(self, sample: Batch, probe: Tensor) -> Tensor:
        """G_iv by reverse mode only, Jv = ∂(Jᵀu·v)/∂u: fused layers often lack forward mode."""

        def output(theta: Tensor) -> Any:
            return self.problem.output(self.problem.named(theta), sample)

        at, pull = vjp(output, self.theta)[:2]
        forward = vjp(lambda u: pull(u)[0], tree_map(torch.zeros_like, at))[1](probe)[0]
        slope = grad(lambda z: self.problem.output_loss(z, sample).reshape(()))
        weighted = vjp(slope, at)[1](forward)[0]
        return pull(weighted)[0]  # type: ignore[no-any-return]


def require_own_losses(problem: Problem) -> None:
    """The loss must be the mean of its samples' own losses, each with the same weight."""
    coupled = problem.norm == "train"
    cure = "batch statistics couple the samples of a batch, so that none has a loss of its own"
    require(not coupled, "the problem", 'have norm="eval" or "frozen"', 'norm="train"', cure)
    loss = problem.loss_function
    if isinstance(loss, CrossEntropy):
        ends = [
            torch.stack(loss.terms_by_sample(problem.target(batch)).aminmax())
            for batch in problem.batches
        ]
        low, high = torch.stack(ends).aminmax()
        expected = "have as many that count (not −100), of one weight, in every sample"
        cure = "samples must have one weight in the mean loss; pass such data, or count='sequences'"
        require(bool(low == high), "targets", expected, f"{float(low):g} to {float(high):g}", cure)
    first = torch.arange(min(problem.batches.sizes[0], 8), device=problem.device)
    few = take(problem.batches.first(), first)
    parameters = problem.named(problem.vector)
    with torch.no_grad():
        together = problem.batch_loss(parameters, few)
        singles = (take(few, torch.tensor([i], device=problem.device)) for i in range(few.size))
        losses = [problem.batch_loss(parameters, single).reshape(()) for single in singles]
        alone = torch.stack(losses)
    error = float((together - alone.mean()).abs())
    # how far a batch's loss may lie from the mean of its samples', relative; TF32 has ten bits
    short = torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
    eps = 2.0**-7 if problem.device.type == "cuda" and short else tolerance(problem)
    got = f"{float(together):.6g}, and {float(alone.mean()):.6g} from single samples"
    if error <= eps * (1 + float(alone.abs().max())):
        got = compare_halves(problem, eps)
    cure = "a loss that compares samples has no variance over them"
    require(not got, "the loss of a batch", "be the mean of its samples' own losses", got, cure)


def _estimate(readings: list[Tensor], exact: bool) -> Estimate:
    values = torch.stack(readings).cpu()
    finite = bool(torch.isfinite(values).all())
    cure = "look for samples of infinite loss"
    require(finite, "derivatives of every sample", "be finite", "NaN or infinity", cure)
    if exact:
        return Estimate(float(values.mean()))
    stderr = float(standard_error(values[:, None])) if len(values) > 1 else math.nan
    return Estimate(float(values.mean()), stderr, dof=max(len(values) - 1, 1))


@quantity("variance", lambda problem, _, settings: variance(problem, seed=settings.seed))
def variance_work(problem: Problem, operator: LinearOperator, settings: MeasureSettings) -> Work:
    """Passes over the data: two of gradients; Hessian and Gauss–Newton products of each probe."""
    rounds = min(PROBES, operator.dim)
    passes = 2 + rounds * (1 if problem.loss_function is None else 2)
    return products(operator, passes, passes, COPIES * samples_at_once(problem))
