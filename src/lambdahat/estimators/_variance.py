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
from collections.abc import Callable, Iterable
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
from lambdahat.operators.linearise import compare_halves
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
    exact. ``cost`` counts passes over the data: products and gradients.
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
            element = spread.unbiased(total) / problem.num_parameters
            readings.setdefault(f"{name}_variance", []).append(element)
            if name != "gradient":
                readings.setdefault(f"{name}_mean", []).append(probe.double() @ spread.mean)
        report("variance", i + 1, rounds)
    estimates = {
        name: _estimate(values, exact or (whole and name == "gradient_variance"))
        for name, values in readings.items()
    }
    theta = problem.vector.double()
    return Variance(
        gradient_mean_norm=Estimate(float(problem.gradient().double().norm())),
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

    def merge(self, other: Spread) -> None:
        """Take in the vectors of another."""
        both, shift = self.count + other.count, other.mean - self.mean
        between = shift.square().sum() * (self.count * other.count / both)
        self.deviation = self.deviation + other.deviation + between
        self.mean = self.mean + shift * (other.count / both)
        self.count = both

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
    eps = (
        2.0**-7 if problem.device.type == "cuda" and short else 100 * torch.finfo(problem.dtype).eps
    )
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
