"""Trace, eigenvalues and learning coefficient of a model under ``fully_shard`` (FSDP2), no rank
holding all of it.

Every vector is spread over the ranks as the parameters are: a rank keeps its own part of θ, of a
product and of each basis vector. Only numbers are added up over ranks, and the model's own hooks
gather one layer at a time. These hooks cannot be differentiated twice, so that products are central
differences of gradients. A model that fits on each rank whole needs none of this: ``lh.Problem``
takes it, and differentiates exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lambdahat._core.check import require, require_count, require_positive
from lambdahat._core.progress import report
from lambdahat._core.rng import generator
from lambdahat.estimators.sequential import MINIMUM, Goal
from lambdahat.krylov.restart import value_errors
from lambdahat.problem.batches import Batch, make_batches, take
from lambdahat.problem.distributed import (
    SAME_GRADIENT,
    SAME_LOSS,
    Ranks,
    Rounded,
    agree_on_data,
    coarsest,
    is_sharded,
    perturb,
    reshard,
    rounding,
)
from lambdahat.problem.evaluators import Evaluator
from lambdahat.problem.losses import Loss, make_loss
from lambdahat.results import Eigenpairs, Estimate, Status
from lambdahat.sampling.diagnostics import standard_error
from lambdahat.singular._llc import inverse_temperature

DEFAULT_BATCH = 64
FIRST = 16  # Lanczos steps before the first look
SHORTER = 8  # lengths of a difference that are tried
TRUNCATION = 2e-4  # relative error of vᵀHv from the truncated series
LOSS_UNITS = 16  # units of the dtype that a loss may be off
CHUNK = 2**24  # entries that an inner product converts to float64 at a time


class ShardedProblem:
    """The mean loss over a data set of a model under ``fully_shard``, as a function of this rank's
    part of θ.

    Made and used by all ranks alike, each giving all of the data; a rank computes on its part of
    every batch. The model is in eval mode, and its parameters are moved, while something is
    measured, and put back. ``loss`` and ``data`` are as for ``lh.Problem``; samples must not meet
    in the model or the loss.

    Vectors are kept where the parameters are, or on the device ``vectors``. With a
    ``CPUOffloadPolicy`` parameters and vectors are in host memory; ``vectors="cuda"`` then needs
    4P/W bytes of the GPU per vector in float32 and computes with them there.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: str | Loss | Any,
        data: Any,
        *,
        batch_size: int | None = None,
        vectors: torch.device | str | None = None,
    ) -> None:
        require(
            isinstance(model, nn.Module) and is_sharded(model),
            "model",
            "be under torch's fully_shard",
            model,
            "lh.Problem takes any other model",
            TypeError,
        )
        reshard(model)
        trained = [tensor for tensor in model.parameters() if tensor.requires_grad]
        meshes = [getattr(tensor, "device_mesh", None) for tensor in trained]
        spread = all(mesh is not None and mesh.ndim == 1 for mesh in meshes)
        expected = "have all its trained parameters sharded over one mesh dimension"
        cure = "call fully_shard on the root module, with a mesh of one dimension"
        require(bool(trained) and spread, "model", expected, "others", cure)
        self.model, self._parameters = model, trained
        self.ranks = Ranks(meshes[0].get_group())  # type: ignore[union-attr]
        # with offloading the parameters are in host memory, and the mesh's device computes
        kind = meshes[0].device_type  # type: ignore[union-attr]
        parts = [_local(tensor) for tensor in trained]
        offloaded = parts[0].device.type != kind
        self.device = torch.empty(0, device=kind).device if offloaded else parts[0].device
        self.vector_device = parts[0].device if vectors is None else torch.device(vectors)
        self.part_size = sum(part.numel() for part in parts)
        self.batches = make_batches(data, batch_size, DEFAULT_BATCH, self.device, None)
        self._evaluate = Evaluator(model, make_loss(loss), "eval", lambda: {}, False)
        with self._at(None), torch.no_grad():
            self._evaluate = self._evaluate.read_labels(dict, self.batches)
        terms = [self._evaluate.terms(batch) for batch in self.batches]
        self.weights = [term / sum(terms) for term in terms]
        self.num_parameters, self.num_samples = (
            sum(tensor.numel() for tensor in trained),
            self.batches.num_samples,
        )
        self.ranks = agree_on_data(
            self.ranks,
            self.batches,
            {
                "n": self.num_samples,
                "P": self.num_parameters,
                "batches": f"{self.batches.sizes}",
                "loss": f"{type(self._evaluate.loss)}",
                "weights": torch.tensor(self.weights, dtype=torch.float64),
            },
        )
        self._require_apart()

    @property
    def vector(self) -> Tensor:
        """This rank's part of θ, a copy; the parts of all ranks make up P."""
        return self._flat([_local(tensor) for tensor in self._parameters])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of θ."""
        return self._parameters[0].dtype

    def randn(self, rng: torch.Generator) -> Tensor:
        """This rank's part of a vector of standard normal numbers, drawn on the CPU."""
        return torch.randn(self.part_size, generator=rng).to(self.vector_device, self.dtype)

    def signs(self, rng: torch.Generator) -> Tensor:
        """This rank's part of a vector of ±1, from the bits of random bytes drawn on the CPU."""
        octets = torch.randint(0, 256, (-(-self.part_size // 8),), dtype=torch.uint8, generator=rng)
        places = torch.arange(8, dtype=torch.uint8, device=self.vector_device)
        bits = (octets.to(self.vector_device)[:, None] >> places) & 1
        return bits.reshape(-1)[: self.part_size].to(self.dtype).mul_(2).sub_(1)

    def loss(self, theta: Tensor | None = None) -> float:
        """L(θ) over all data."""
        with self._at(theta), torch.no_grad():
            parts = [
                weight * self._own_loss(batch)[0]
                for weight, batch in zip(self.weights, self.batches, strict=True)
            ]
        return float(self.ranks.sum(torch.stack(parts).sum(), "the loss"))

    def gradient(self, theta: Tensor | None = None) -> Tensor:
        """This rank's part of ∇L(θ), (p,)."""
        with self._at(theta):
            self._backward_all()
            return self._collected()

    def step(self, theta: Tensor, index: int) -> tuple[float, Tensor]:
        """The loss of one batch at θ, and this rank's part of its gradient."""
        with self._at(theta):
            own = self._backward(next(iter(self.batches.some({index}))), 1.0)
            return float(self.ranks.sum(own, "the loss of a batch")), self._collected()

    def batch_losses(self) -> Tensor:
        """The loss of each batch at the model's own parameters."""
        with self._at(None), torch.no_grad():
            return self.ranks.sum(
                torch.stack([self._own_loss(batch)[0] for batch in self.batches]), "batch losses"
            ).cpu()

    def product(self, vector: Tensor) -> Tensor:
        """This rank's part of Hv: (∇L(θ + hv) − ∇L(θ − hv))/2h, good to about ε^(2/3).

        At first h = ε^(1/3)(1 + ‖θ‖)/‖v‖; it is lowered where the loss is not quadratic along v
        that far.
        """
        return self.difference(vector, self.loss(), math.inf)[0]

    def difference(self, vector: Tensor, base: float, reach: float) -> tuple[Tensor, float]:
        """This rank's part of Hv, and ‖hv‖, which was at most ``reach``; ``base`` is L(θ).

        By the losses at θ ± hv the second difference of L is h²vᵀHv + h⁴q/12, by their gradients
        h²vᵀHv + h⁴q/6, q the fourth derivative along v. Their disagreement tells the error of the
        truncated series: a sharp direction needs a much shorter h than a random one.
        """
        self._require_fine()
        theta, size = self.vector, float(self.dots([vector], vector)) ** 0.5
        if size == 0:
            return torch.zeros_like(vector), reach
        unit = torch.finfo(theta.dtype).eps
        reach = min(reach, unit ** (1 / 3) * (1.0 + float(self.dots([theta], theta)) ** 0.5))
        for _ in range(SHORTER):
            step = reach / size
            # θ ± hv and the difference are made tensor by tensor: vectors fill the memory
            with self._at(theta, vector, step, back=theta):
                ahead = self._backward_all()
                image = self._collected()
                self._put(theta, vector, -step)
                behind = self._backward_all()
                parts = image.split([_local(tensor).numel() for tensor in self._parameters])
                for part, own in zip(parts, self._gradients(), strict=True):
                    part.sub_(own)
            image.div_(2 * step)
            form = step**2 * float(self.dots([image], vector))
            miss = 2 * abs(form - (ahead + behind - 2 * base))
            noise = LOSS_UNITS * unit * (abs(ahead) + abs(behind) + 2 * abs(base))
            if not miss > TRUNCATION * abs(form) + noise:
                break
            reach *= max(0.8 * math.sqrt(TRUNCATION * abs(form) / miss), 0.05)
        return image, reach

    def dots(self, rows: Sequence[Tensor] | Tensor, vector: Tensor) -> Tensor:
        """The products (m,) of vectors, of which ``rows``, each (p,), and ``vector`` are this
        rank's parts, in float64.
        """
        own = torch.zeros(len(rows), dtype=torch.float64, device=self.vector_device)
        for start in range(0, self.part_size, CHUNK):
            part = vector[start : start + CHUNK].double()
            parts = [(row[start : start + CHUNK].double() * part).sum() for row in rows]
            own += torch.stack(parts)
        return self.ranks.sum(own.to(self.device), "inner products")

    def _own_loss(self, batch: Batch) -> tuple[Tensor, float]:
        """What this rank's samples add to the mean loss of a batch, float64, and the number that
        it comes from.
        """
        low, high = (
            rank * batch.size // self.ranks.size for rank in (self.ranks.rank, self.ranks.rank + 1)
        )
        own = take(batch, torch.arange(low, max(high, low + 1), device=self.device) % batch.size)
        part = (
            self._evaluate.terms(own) / (self._evaluate.terms(batch) or 1.0) if high > low else 0.0
        )
        args, kwargs, _ = self._evaluate.split(own)
        # also without a sample of its own: the hooks gather on all ranks
        output = self.model(*args, **kwargs)
        value = self._evaluate.loss_of(self._evaluate.read(output), own)
        return part * value.double(), part

    def _backward(self, batch: Batch, weight: float) -> Tensor:
        """Add a batch's gradient to that of the parameters; the hooks take the mean over ranks,
        the loss is a sum.
        """
        with torch.enable_grad():
            own, _ = self._own_loss(batch)
            (weight * self.ranks.size * own).backward()
        return own.detach()

    def _backward_all(self) -> float:
        """Add the gradient of the loss over all data to that of the parameters; the loss."""
        pairs = zip(self.weights, self.batches, strict=True)
        parts = [weight * self._backward(batch, weight) for weight, batch in pairs]
        return float(self.ranks.sum(torch.stack(parts).sum(), "the loss"))

    def _gradients(self) -> Iterator[Tensor]:
        """This rank's part of each parameter's gradient, (numel,), which is cleared."""
        for tensor in self._parameters:
            own, tensor.grad = tensor.grad, None
            part = torch.zeros_like(_local(tensor)) if own is None else _local(own)
            yield part.reshape(-1).to(self.vector_device, self.dtype)

    def _collected(self) -> Tensor:
        return self._flat(self._gradients())

    def _flat(self, parts: Iterable[Tensor]) -> Tensor:
        """This rank's parts of all parameters as one vector."""
        flat = torch.empty(self.part_size, dtype=self.dtype, device=self.vector_device)
        start = 0
        for part in parts:
            flat[start : start + part.numel()].copy_(part.reshape(-1))
            start += part.numel()
        return flat

    @contextmanager
    def _at(
        self,
        theta: Tensor | None,
        direction: Tensor | None = None,
        step: float = 0.0,
        back: Tensor | None = None,
    ) -> Iterator[None]:
        """The model at θ + step·direction, in eval mode and without gradients; afterwards as it
        was, with the parameters ``back`` where the caller has them already.
        """
        before = self.vector if back is None else back
        grads = [tensor.grad for tensor in self._parameters]
        modes = [(module, module.training) for module in self.model.modules()]
        for tensor in self._parameters:
            tensor.grad = None
        self.model.eval()
        self._put(before if theta is None else theta, direction, step)
        try:
            yield
        finally:
            self._put(before)
            for module, training in modes:
                module.training = training
            for tensor, grad in zip(self._parameters, grads, strict=True):
                tensor.grad = grad

    @torch.no_grad()
    def _put(self, theta: Tensor, direction: Tensor | None = None, step: float = 0.0) -> None:
        """Write θ + step·direction to the parameters."""
        reshard(self.model)  # what an earlier forward pass gathered has the old values
        start = 0
        for local in map(_local, self._parameters):
            own = slice(start, start + local.numel())
            part = theta[own] if direction is None else theta[own].add(direction[own], alpha=step)
            local.copy_(part.view(local.shape))
            start = own.stop

    def agree(self, what: str, **settings: Any) -> None:
        """Raise on every rank, by name, where one is given other settings."""
        facts = {
            name: value if isinstance(value, int) else f"{value}"
            for name, value in settings.items()
        }
        self.ranks.agree(what, facts, self.device, dict.fromkeys(facts, "give every rank the same"))

    def _require_fine(self) -> None:
        """Differences of gradients in half precision are mostly rounding."""
        own, used = self._parameters[0].dtype, coarsest(self.model)
        fine = used is None or torch.finfo(used).eps <= torch.finfo(own).eps
        require(
            fine,
            "model",
            f"compute in {own}, as its parameters are, for products with the Hessian",
            f"a MixedPrecisionPolicy of {used}, in which a difference of gradients is good to a few"
            " per cent only",
            "call fully_shard without mp_policy on a copy of the model; llc takes it as it is",
        )

    def _require_apart(self) -> None:
        """The first batch's loss and gradient from its parts are those of the whole on every rank,
        or samples meet.

        The gradient is that of a few samples beside the model's parameters, where no layer is 0.
        """
        first = self.batches.first()
        few = take(first, slice(max(2, first.size // self.ranks.size)))
        with self._at(None), torch.no_grad():
            parts = float(self.ranks.sum(self._own_loss(first)[0], "the loss of the first batch"))
            together = float(self._whole_loss(first))
        kind = coarsest(self.model) or self.dtype
        seen = {
            "the loss of the first batch": Rounded(
                (together, 1 + abs(together)), rounding(SAME_LOSS, kind)
            )
        }
        self.ranks.agree("the sharded problem", seen, self.device)
        here = (_local(tensor).to(self.vector_device) for tensor in self._parameters)
        with self._at(self._flat(perturb(here))):
            self._backward(few, 1.0)
            apart = self._collected()
            with torch.enable_grad():
                self._whole_loss(few).backward()
            whole = self._collected()
        size, apart = self.dots([whole], whole), apart.sub_(whole)
        miss = self.dots([apart], apart)
        meet = bool(miss.sqrt() > rounding(SAME_GRADIENT, kind) * size.sqrt())
        close = abs(parts - together) <= max(rounding(SAME_LOSS, kind), 1e-6) * (1 + abs(together))
        require(
            close and not meet,
            "the loss of a batch",
            "be the mean of its samples' own losses, for they are shared out",
            (
                f"{together:.6g}, and {parts:.6g} from its parts"
                if not close
                else (
                    f"a gradient that is {float(miss / size) ** 0.5:.2g} of its length off from"
                    " that of its parts"
                )
            ),
            "lh.Problem takes models in which samples meet",
        )

    def _whole_loss(self, batch: Batch) -> Tensor:
        """The loss of a batch that this rank computes all of."""
        args, kwargs, _ = self._evaluate.split(batch)
        return self._evaluate.loss_of(self._evaluate.read(self.model(*args, **kwargs)), batch)


def trace(
    problem: ShardedProblem, tol: float = 0.05, max_matvecs: int = 400, seed: int = 0
) -> Estimate:
    """tr H, within ``tol`` relative at 95 % confidence, as the mean of zᵀHz for z of ±1
    (Hutchinson 1990).
    """
    require_positive(tol, "tol")
    require_count(max_matvecs, "max_matvecs", 2)
    problem.agree("the trace", tol=tol, max_matvecs=max_matvecs, seed=seed)
    samples, squares = torch.empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.float64)
    ask, base = min(MINIMUM, max_matvecs), problem.loss()
    while True:
        for number in range(len(samples), len(samples) + ask):
            probe = problem.signs(generator(seed, "sharded trace", number, problem.ranks.rank))
            image, _ = problem.difference(probe, base, math.inf)
            found = problem.dots([probe, image], image).cpu()
            samples, squares = torch.cat([samples, found[:1]]), torch.cat([squares, found[1:]])
            report("trace", number + 1, max_matvecs)
        mean = Goal(tol, torch.zeros(1, dtype=torch.float64), squares.mean().sqrt()[None]).judge(
            samples[:, None]
        )
        left = max_matvecs - len(samples)
        if mean.reached or left == 0:
            status = Status.CONVERGED if mean.reached else Status.BUDGET_SPENT
            return Estimate(float(mean.value), float(mean.stderr), len(samples), status, mean.dof)
        ask = min(math.ceil(max(1.05 * mean.wanted - len(samples), 1)), len(samples), left)


def eigenvalues(
    problem: ShardedProblem, k: int = 5, tol: float = 1e-3, max_matvecs: int = 100, seed: int = 0
) -> Eigenpairs:
    """The k largest eigenvalues of H in descending order, by Lanczos with full reorthogonalisation.

    Stops when min(r, r²/gap) ≤ tol·max|θ| for all k, r their residuals. Products are differences
    of gradients, for which Lanczos' own residuals may be far too small; so k more products give the
    values xᵀHx and ``residuals`` ‖Hx − θx‖, and what misses the tolerance by these, or has moved by
    half of it, is not converged. ``vectors`` (p, k) are
    this rank's part of the eigenvectors. The basis takes as many vectors as there were products,
    each 1/W of P on each of W ranks.
    """
    require_count(k, "k", 1, problem.num_parameters)
    cure = "k products check the result"
    most = require_count(max_matvecs, "max_matvecs", 2 * k, cure=cure) - k
    most = min(most, problem.num_parameters)
    problem.agree("eigenvalues", k=k, tol=tol, max_matvecs=max_matvecs, seed=seed)
    start = problem.randn(generator(seed, "sharded eigenvalues", problem.ranks.rank))
    rows = [start.div_(float(problem.dots([start], start)) ** 0.5)]
    alpha: list[float] = []
    beta: list[float] = []
    base, reach = problem.loss(), math.inf
    while True:
        # Lanczos vectors become sharp gradually, and so does the length that suits them
        step, reach = problem.difference(rows[-1], base, 2 * reach)
        coefficient = 0.0
        for _ in range(2):  # twice is enough (Parlett 1998, §6.9)
            overlaps = problem.dots(rows, step).tolist()
            for row, overlap in zip(rows, overlaps, strict=True):
                step.sub_(row, alpha=overlap)
            coefficient += overlaps[-1]
        alpha.append(coefficient)
        beta.append(float(problem.dots([step], step)) ** 0.5)
        report("eigenvalues", len(alpha), most)
        inner = torch.diag(torch.tensor(alpha, dtype=torch.float64))
        off = torch.tensor(beta[:-1], dtype=torch.float64)
        values, vectors = torch.linalg.eigh(inner + torch.diag(off, 1) + torch.diag(off, -1))
        errors, scale = value_errors(values, (beta[-1] * vectors[-1]).abs()), values.abs().max()
        chosen = values.argsort(descending=True)[:k]
        reached, ended = errors[chosen] <= tol * scale, beta[-1] <= 1e-10 * scale
        done = len(alpha) >= max(FIRST, k) and bool(reached.all())
        if done or ended or len(alpha) == most:
            break
        rows.append(step.div_(beta[-1]))
    found = rows[0].new_zeros(len(chosen), problem.part_size)
    for row, weights in zip(rows, vectors[:, chosen].tolist(), strict=True):
        for vector, weight in zip(found, weights, strict=True):
            vector.add_(row, alpha=weight)
    rows.clear()
    residuals, before = (beta[-1] * vectors[-1]).abs(), values[chosen]
    for index, vector in zip(chosen.tolist(), found, strict=True):
        image, reach = problem.difference(vector, base, reach)
        values[index] = float(problem.dots([vector], image))
        image.sub_(vector, alpha=float(values[index]))
        residuals[index] = float(problem.dots([image], image)) ** 0.5
    moved = 2 * (values[chosen] - before).abs()
    reached = torch.maximum(value_errors(values, residuals)[chosen], moved) <= tol * scale
    whole = len(chosen) == k and bool(reached.all())
    status = Status.CONVERGED if whole else Status.NOT_CONVERGED
    cost = len(alpha) + len(chosen)
    return Eigenpairs(values[chosen], found.T, residuals[chosen], reached, cost, status)


def llc(
    problem: ShardedProblem,
    step_size: float,
    localization: float,
    chains: int = 2,
    draws: int = 200,
    burn_in: int = 100,
    nbeta: str | float = "n/log n",
    seed: int = 0,
) -> Estimate:
    """λ̂ = nβ·(E[L(w)] − L(w*)) at the model's parameters w*, by sequential SGLD chains (Lau et al.
    2023).

    A step is w − (ε/2)(nβ∇L_b + γ(w − w*)) + √ε·ξ on one of the problem's batches, drawn by its
    weight, and each loss is paired with that of w* on the same batch. The settings are given: there
    is no pilot, and nothing is taken off for the bias of the steps. A chain's batches depend on
    ``seed`` and its number alone, its noise on the rank too.
    """
    for name, value, least in (("chains", chains, 1), ("draws", draws, 8), ("burn_in", burn_in, 0)):
        require_count(value, name, least)
    require_positive(step_size, "step_size")
    require_positive(localization, "localization")
    problem.agree(
        "llc",
        step_size=step_size,
        localization=localization,
        chains=chains,
        draws=draws,
        burn_in=burn_in,
        nbeta=nbeta,
        seed=seed,
    )
    temperature = inverse_temperature(nbeta, problem.num_samples, problem.batches.sizes[0])[0]
    centre, base = problem.vector, problem.batch_losses()
    weights = torch.tensor(problem.weights, dtype=torch.float64)
    energies = torch.zeros(chains, draws, dtype=torch.float64)
    for chain in range(chains):
        picks, noise = (
            generator(seed, "chain", chain),
            generator(seed, "chain", chain, problem.ranks.rank),
        )
        theta = centre.clone()
        for number in range(burn_in + draws):
            index = int(torch.multinomial(weights, 1, generator=picks))
            loss, gradient = problem.step(theta, index)
            if number >= burn_in:
                energies[chain, number - burn_in] = temperature * (loss - float(base[index]))
            drift = temperature * gradient + localization * (theta - centre)
            kick = problem.randn(noise)
            theta = theta.sub(drift, alpha=step_size / 2).add(kick, alpha=math.sqrt(step_size))
        report("llc", chain + 1, chains)
    found = energies.numpy()
    status = Status.CONVERGED if bool(torch.isfinite(energies).all()) else Status.DIVERGED
    return Estimate(
        float(found.mean()),
        standard_error(found),
        chains * (burn_in + draws),
        status,
        chains - 1 or 1,
    )


def _local(tensor: Any) -> Tensor:
    """This rank's part of a sharded tensor."""
    local: Tensor = tensor.detach().to_local()
    return local
