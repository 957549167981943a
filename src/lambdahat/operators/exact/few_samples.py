"""A few samples gone through the model once: what every guard of the closed forms looks at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lambdahat._core.rng import generator
from lambdahat.operators.exact.layer_calls import Calls, recorded
from lambdahat.operators.linearise import kind_of, twice_differentiable
from lambdahat.problem import Problem
from lambdahat.problem.batches import Batch, take
from lambdahat.problem.losses import CrossEntropy

SEVERAL = 4


@dataclass(frozen=True)
class Mixed:
    """For a random mix u of the outputs z, ∂(uᵀz)/∂ of the parameters, and of what layers that are
    used once give.

    Both by name, where they are not None; ``twice``: whether they can be differentiated once more.
    """

    mix: Tensor
    slopes: dict[str, Tensor]
    signals: dict[str, Tensor]
    twice: bool


@dataclass
class Few:
    """The output of some samples with its graph, and the uses of layers on the way to it.

    ``batch`` is a copy of the samples ``given``: a model may write into its input, and the graph
    keeps it. Other passes take those given. ``failed``: why there is no output.
    """

    problem: Problem
    leaves: dict[str, Tensor]
    given: Batch
    batch: Batch
    output: Any = None
    calls: Calls = field(default_factory=dict)
    failed: str = ""
    _mixed: Mixed | None = None

    def mixed(self, twice: bool = False) -> Mixed:
        """Slopes of one mix for all guards, kept; ``twice``: with a graph, where all operations
        have second slopes.
        """
        if self._mixed is None or (twice and not self._mixed.twice):
            rng = generator(0, "mix of outputs", device=self.output.device)
            mix = random_mix(self.output, normalised(self.problem, self.batch, self.output), rng)
            try:
                self._mixed = self._pulled(mix, twice)
            # an operation that can be differentiated only once
            except (RuntimeError, NotImplementedError):
                if not twice:
                    raise
                self._mixed = self._pulled(mix, False)
        return self._mixed

    def _pulled(self, mix: Tensor, twice: bool) -> Mixed:
        edges = {prefix: found[0].left for prefix, found in self.calls.items() if len(found) == 1}
        inputs: list[Any] = [*edges.values(), *self.leaves.values()]
        with twice_differentiable():
            found = torch.autograd.grad(
                self.output, inputs, mix, retain_graph=True, create_graph=twice, allow_unused=True
            )
        signals, slopes = (
            {name: slope for name, slope in zip(names, part, strict=True) if slope is not None}
            for names, part in ((edges, found[: len(edges)]), (self.leaves, found[len(edges) :]))
        )
        return Mixed(mix, slopes, signals, twice)


def few_of(problem: Problem, leaves: dict[str, Tensor]) -> Few:
    """The first samples of the first batch that has more than one."""
    batch = next((batch for batch in problem.batches if batch.size > 1), problem.batches.first())
    given = take(batch, slice(SEVERAL))
    if problem.norm == "train":
        return Few(
            problem,
            leaves,
            given,
            given,
            failed="samples are normalised by the statistics of their batch",
        )
    batch = _copied(given)
    try:
        with twice_differentiable():
            output, calls = recorded(problem, leaves, batch)
    # a model for one batch size only
    except (RuntimeError, ValueError, IndexError, AssertionError) as error:
        said = str(error).partition("\n")[0] or type(error).__name__
        reason = f"the model does not take {batch.size} samples ({said})"
        return Few(problem, leaves, given, batch, failed=reason)
    return Few(problem, leaves, given, batch, output, calls)


def _copied(batch: Batch) -> Batch:
    return replace(
        batch,
        data=tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch.data),
    )


def normalised(problem: Problem, batch: Batch, output: Tensor) -> int | None:
    """The dimension of a last log-softmax that the loss does not feel; None where there is none
    such.
    """
    loss = problem.loss_function
    if (
        not isinstance(loss, CrossEntropy)
        or output.grad_fn is None
        or kind_of(output.grad_fn) != "LogSoftmax"
    ):
        return None
    classes = 1 if loss._classes_first(output, problem.target(batch)) is output else output.ndim - 1
    dim: int = output.grad_fn._saved_dim  # type: ignore[attr-defined]  # a negative one is saved as unsigned
    return classes if (dim - 2**64 if dim >= 2**63 else dim) % output.ndim == classes else None


def random_mix(output: Tensor, normalised: int | None, rng: torch.Generator) -> Tensor:
    """Random weights u of the outputs, that sum to 0 over the classes where those are
    ``normalised``.

    Such a mix does not feel the log-softmax that the loss does not feel. It is of sixteenths, below
    8, whose sum has no rounding: a sum of 1e-7 would bring back what curvature the log-softmax has,
    by a multiple that grows with the data.
    """
    mix = random_like(output, rng)
    if normalised is None:
        return mix
    steps = (16 * mix).round().clamp(-63, 63) / 16
    return steps - steps.roll(1, normalised)


def random_like(like: Tensor, rng: torch.Generator) -> Tensor:
    """Normal numbers, drawn on the generator's device, the same in every precision."""
    return torch.randn(like.shape, generator=rng, dtype=torch.float32, device=rng.device).to(like)


def random_all(likes: Sequence[Tensor], rng: torch.Generator) -> list[Tensor]:
    """The same for several tensors, drawn together."""
    sizes = [like.numel() for like in likes]
    drawn = torch.randn(sum(sizes), generator=rng, dtype=torch.float32, device=rng.device).split(
        sizes
    )
    return [part.view(like.shape).to(like) for part, like in zip(drawn, likes, strict=True)]
