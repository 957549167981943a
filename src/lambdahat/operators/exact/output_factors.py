"""Factors of the loss's curvature at the output: per sample i, M_i = Σ_k c_ik s_ik s_ikᵀ with c =
±1.

There are such where every sample has an output of its own, the same alone as among others, and the
loss is a mean over samples: a model that normalises by its batch or a root of a mean square has
none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lambdahat._core.check import require, require_choice
from lambdahat._core.rng import generator
from lambdahat.operators.exact.few_samples import Few
from lambdahat.operators.linearise import (
    empirical_residuals,
    monte_carlo_residuals,
    twice_differentiable,
)
from lambdahat.problem import Problem
from lambdahat.problem.batches import Batch, take
from lambdahat.problem.losses import Custom, diagonal_factors

PROBE = 8
WIDEST_CUSTOM = 256
KINDS = {
    "exact": ("type-2", "type2", "type-1", "true", "ggn"),
    "monte_carlo": ("mc", "sampled", "monte-carlo", "montecarlo"),
    "empirical": ("ef", "emp"),
}


def require_kind(kind: Any) -> str:
    """One of the kinds of Fisher; names that other libraries use are told ours."""
    ours = next(
        (
            name
            for name, others in KINDS.items()
            if isinstance(kind, str) and kind.lower() in others
        ),
        None,
    )
    return require_choice(kind, "kind", tuple(KINDS), f"use kind={ours!r}" if ours else "")


@dataclass(frozen=True)
class Factors:
    """``make(output, batch)`` gives S (K, B, …) and signs c (K, B) with Σ_k c_k s_k s_kᵀ = M; K =
    ``count``.

    ``parts``: whether part of a batch has the factors it has within the whole, up to the share of
    terms that count.
    """

    count: int
    make: Callable[[Tensor, Batch], tuple[Tensor, Tensor]]
    parts: bool = True


def exact_factors(few: Few, kind: str, samples: int = 1, seed: int = 0) -> Factors | None:
    """Factors of M, the "hessian" of the loss at the output or one of the Fishers; None where there
    are none.

    ``kind``: "hessian", "fisher" for a loss whose Fisher is diagonal and another matrix,
    "monte_carlo" or "empirical".
    """
    problem, batch, loss = few.problem, few.batch, few.problem.loss_function
    assert loss is not None
    output = _separate_output(few)
    if output is None:
        return None
    if kind == "fisher":
        return Factors(
            output[0].numel(), lambda output, batch: _of_diagonal_fisher(problem, output, batch)
        )
    if kind != "hessian":
        residuals = (
            empirical_residuals(problem)
            if kind == "empirical"
            else monte_carlo_residuals(problem, samples, seed)
        )

        def drawn(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
            stacked = torch.stack([draw[0] for draw in residuals(output, batch)])
            return stacked, stacked.new_full(stacked.shape[:2], 1.0 / len(stacked))

        return Factors(samples if kind == "monte_carlo" else 1, drawn, parts=False)
    count = loss.factor_count(output, problem.target(batch))
    if count is not None:
        return Factors(count, lambda output, batch: _closed(problem, output, batch))
    width = output[0].numel()
    known = loss.product(output, problem.target(batch)) is not None
    if known or width > WIDEST_CUSTOM or not _loss_separates(problem, output, batch):
        return None
    return Factors(
        width,
        lambda output, batch: _by_eigenvectors(problem, output, batch),
        parts=not isinstance(loss, Custom),
    )


def samples_separate(few: Few) -> bool:
    """Whether the output of a sample is one row of one tensor, the same alone as among others."""
    return _separate_output(few) is not None


def _separate_output(few: Few) -> Tensor | None:
    """The output of a few samples if the first alone and the others by themselves give the same;
    else None.
    """
    problem, size = few.problem, few.batch.size
    if not isinstance(few.output, Tensor) or few.output.ndim == 0 or len(few.output) != size:
        return None
    together = few.output.detach()
    parts = [slice(0, 1), slice(1, size)] if size > 1 else [slice(0, 1)]
    try:
        with twice_differentiable(), torch.no_grad():
            apart = [problem.output(few.leaves, take(few.given, which)) for which in parts]
    # a model for one batch size only
    except (RuntimeError, ValueError, IndexError, AssertionError):
        return None
    shapes = [(which.stop - which.start, *together.shape[1:]) for which in parts]
    if [z.shape for z in apart] != shapes:
        return None
    off = torch.cat(apart) - together
    gap, scale = torch.stack(
        [torch.linalg.vector_norm(z, math.inf) for z in (off, together)]
    ).tolist()
    return together if gap <= tolerance(problem) * scale else None


def require_separable(problem: Problem) -> None:
    """Raise unless the loss of a batch is the mean of its samples' own losses, on a few samples of
    the first batch.

    Targets that do not count leave a sample less weight in the mean. That is right where its
    gradient is taken within the batch; a loss without an output is differentiated sample by sample,
    so that there the weights must be even.
    """
    require(
        problem.norm != "train",
        "norm",
        'be "eval" or "frozen" for per-sample gradients',
        '"train"',
        "batch statistics couple the samples",
    )
    first, parameters = problem.batches.first(), problem.named(problem.vector)
    few = take(first, slice(PROBE))
    singles = [take(few, slice(i, i + 1)) for i in range(few.size)]
    terms, even = problem._evaluate.terms, problem.loss_function is None
    if even:
        each = terms(singles[0])
        alike = all(terms(batch) == each * batch.size for batch in problem.batches)
        require(
            alike,
            "the labels",
            "have as many that count (not −100) in every sample for per-sample gradients",
            "samples of uneven weight",
            'use loss="cross_entropy", or samples of one length',
        )
    shares = torch.tensor(
        [1.0 if even else terms(single) for single in singles], dtype=torch.float64
    )
    try:
        with torch.no_grad(), twice_differentiable():
            together = float(problem.batch_loss(parameters, few))
            found = [problem.batch_loss(parameters, single) for single in singles]
    except (RuntimeError, ValueError, TypeError, IndexError):
        return  # a model for one batch size only: nothing to compare
    alone = torch.tensor([float(loss) for loss in found], dtype=torch.float64)
    mean = float(
        torch.where(shares > 0, shares * alone, 0.0).sum() / shares.sum().clamp(min=1e-300)
    )
    close = abs(together - mean) <= tolerance(problem) * (
        1.0 + float(alone.abs().nan_to_num().max())
    )
    require(
        close,
        "the loss of a batch",
        "be the mean of its samples' own losses for per-sample gradients",
        f"{together:.6g}, and {mean:.6g} from single samples",
        "a loss that compares samples, or gives them uneven weights, has none",
    )


def why_no_factors(few: Few) -> str:
    """The reason, where ``exact_factors`` finds none."""
    if few.failed:
        return few.failed
    return (
        "the loss has no factors at this output"
        if samples_separate(few)
        else "samples mix in the model"
    )


def tolerance(problem: Problem) -> float:
    """How far apart, relative, two ways to one number may come out in the arithmetic in use."""
    eps = torch.finfo(problem.dtype).eps
    if problem.device.type == "cuda" and problem.dtype == torch.float32:
        short = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
        eps = 2.0**-11 if short else eps
    return float(min(10 * eps**0.7, 0.1))


def _closed(problem: Problem, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    assert problem.loss_function is not None
    factors = problem.loss_function.factors(output, problem.target(batch))
    assert factors is not None
    return factors, factors.new_ones(factors.shape[:2])


def _of_diagonal_fisher(problem: Problem, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    assert problem.loss_function is not None
    weights = problem.loss_function.fisher(output, problem.target(batch))
    assert weights is not None
    factors = diagonal_factors(weights[0])
    return factors, factors.new_ones(factors.shape[:2])


def _by_eigenvectors(problem: Problem, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Signed factors √|λ|·v of the loss's Hessian at each sample's output, for a loss without a
    closed form.
    """
    values, vectors = torch.linalg.eigh(
        _loss_blocks(problem, output, batch)[0].double() * batch.size
    )
    factors = (vectors * values.abs().sqrt().unsqueeze(1)).permute(2, 0, 1)
    return factors.to(output.dtype).reshape(-1, *output.shape), values.sign().T.to(output.dtype)


def positive_factors(problem: Problem, output: Any, batch: Batch) -> tuple[int, Iterator[Tensor]]:
    """K and factors s_k (B, …) with Σ_k s_k s_kᵀ = M, for a loss without a closed form that is
    convex where it is.
    """
    loss = problem.loss_function
    assert loss is not None
    cure = 'use kind="empirical", or a named loss'
    single = isinstance(output, Tensor) and output.ndim > 0 and len(output) == batch.size
    require(
        single,
        "the model's output",
        f"be one tensor for KFAC with the loss {loss.name!r}",
        output,
        cure,
    )
    width = output[0].numel()
    require(
        width <= WIDEST_CUSTOM,
        "kind",
        f'be "empirical" for the loss {loss.name!r}, which has no closed form, of more than'
        f" {WIDEST_CUSTOM} outputs",
        f'"exact" of {width} outputs',
        cure,
    )
    require(
        _loss_separates(problem, output, batch),
        "loss",
        "be a sum over samples for KFAC",
        repr(loss.name),
        cure,
    )
    factors, signs = _by_eigenvectors(problem, output, batch)
    sizes = factors.reshape(*signs.shape, -1).square().sum(dim=2)
    convex = bool((sizes * (signs < 0)).max() <= tolerance(problem) * sizes.max())
    require(
        convex,
        "loss",
        "be convex in the model's output for KFAC",
        f"{loss.name!r}, which is not here",
        cure,
    )
    return width, iter(
        torch.where((signs > 0).reshape(*signs.shape, *[1] * (output.ndim - 1)), factors, 0.0)
    )


def _loss_blocks(
    problem: Problem, output: Tensor, batch: Batch
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """∂²L_batch/∂z_i² (B, D, D) with the rows of all samples together, and the product with
    ∂²L_batch/∂z² itself.
    """
    point = output.detach().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(problem.output_loss(point, batch), point, create_graph=True)

    def product(u: Tensor) -> Tensor:
        if not slope.requires_grad:
            return torch.zeros_like(u)
        return torch.autograd.grad(slope, point, u, retain_graph=True, materialize_grads=True)[0]

    eye = torch.eye(output[0].numel(), dtype=output.dtype, device=output.device)
    rows = [
        product(e.reshape(output.shape[1:]).expand_as(output)).reshape(len(output), -1) for e in eye
    ]
    return torch.stack(rows, dim=1), product


def _loss_separates(problem: Problem, output: Tensor, batch: Batch) -> bool:
    """Whether the loss is a sum over samples, as a root of a mean or a contrastive loss is not."""
    blocks, product = _loss_blocks(problem, output, batch)
    draw = torch.randn(
        output.shape, generator=generator(0, "loss separates"), dtype=torch.float64
    ).to(output)
    apart = torch.einsum("bij,bj->bi", blocks, draw.reshape(len(output), -1)).reshape(output.shape)
    together = product(draw)
    return bool((apart - together).abs().max() <= tolerance(problem) * together.abs().max())
