"""Random batches for chains, and the losses of single samples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lambdahat._core.check import require
from lambdahat.operators.linearise import twice_differentiable
from lambdahat.problem import Problem
from lambdahat.problem.batches import Batch, concatenate, rows_of, take
from lambdahat.problem.evaluators import Parameters
from lambdahat.sampling.kernels import Streams

DEFAULT_BATCH = 512
CHUNK = 256
Way = Callable[[Any, Parameters, Batch], Tensor]


class Minibatches:
    """Batches drawn at random from a problem's data, with the centre's loss on each.

    Where the loss is a mean over samples that are all in memory, a batch is ``batch_size`` samples
    drawn with replacement, and the loss at the centre on it is the mean of n numbers computed once.
    Else (norm="train", ignored targets, streamed data) it is one of the problem's own batches,
    drawn with the probability of its weight. ``shared`` gives all chains the same batch. A batch of
    n samples is the whole data, the same at every step, and so is any batch of a problem without
    data.
    """

    def __init__(self, problem: Problem, batch_size: int | None, shared: bool, seed: int) -> None:
        self.problem, self.shared, self._seed = problem, shared, seed
        self._asked_to_share = shared
        self._whole: Tensor | None = None
        self._room: list[Tensor] = []
        self._common = Streams(seed, [-1], problem.device)
        columns = _columns(problem)
        self.by_sample = columns is not None
        if columns is not None:
            losses, self.columns, self._spec, self._fixed = columns
            dataless = not any(column.numel() for column in self.columns)
            self.size = (
                problem.num_samples
                if dataless
                else min(batch_size or DEFAULT_BATCH, problem.num_samples)
            )
            if self.size == problem.num_samples:
                self.shared, self._whole = (
                    True,
                    torch.arange(1 if dataless else self.size, device=problem.device),
                )
        else:
            losses = _batch_losses(problem)
            sizes = problem.batches.sizes
            require(
                batch_size is None or batch_size in sizes,
                "batch_size",
                "be left out where batches cannot be drawn sample by sample",
                repr(batch_size),
                f"the problem's own batches, of {sizes[0]} samples, are used",
            )
            self.size = sizes[0]
            self._cumulative = torch.tensor(problem.weights, dtype=torch.float64).cumsum(0)
        self.centre_losses = losses

    def rewound_copy(self) -> Minibatches:
        """The same, its streams at their beginning."""
        other = copy.copy(self)
        other._room = []
        other._common = Streams(self._seed, [-1], self.problem.device)
        return other

    def resize(self, size: int) -> None:
        """Draw so many samples from now on; all of them are the whole data."""
        self.size, self._whole, self.shared = size, None, self._asked_to_share
        if size == self.problem.num_samples:
            self.shared, self._whole = True, torch.arange(size, device=self.problem.device)

    @property
    def whole(self) -> bool:
        """Whether a batch is the whole data, the same at every step."""
        return self._whole is not None

    @property
    def generators(self) -> list[torch.Generator]:
        """The streams of its own, besides those of the chains."""
        return self._common.generators if self.shared else []

    @property
    def num_choices(self) -> int:
        """How many samples, or batches, there are to draw from."""
        return len(self.centre_losses)

    def draw(self, rng: Streams, chains: int) -> Tensor:
        """Which samples each chain sees, (chains, batch_size), or which batch, (chains, 1)."""
        if self._whole is not None:
            return self._whole.expand(chains, -1)
        rng, rows = (self._common, 1) if self.shared else (rng, chains)
        if self.by_sample:
            index = rng.integers(self.num_choices, rows, self.size)
        else:
            places = rng.uniform(rows, torch.float64).cpu() * self._cumulative[-1]
            index = torch.searchsorted(self._cumulative, places, right=True).clamp_(
                max=self.num_choices - 1
            )
            index = index.unsqueeze(1)
        return index.expand(chains, -1)

    def centre(self, index: Tensor) -> Tensor:
        """The loss at the centre on what was drawn, (chains,)."""
        return self.centre_losses[index.to(self.centre_losses.device)].mean(dim=-1)

    def gather(self, index: Tensor) -> list[Tensor]:
        """The tensors of the batches, each (chains, batch_size, …)."""
        return [rows.unflatten(0, index.shape) for rows in self._rows(index.reshape(-1))]

    def _rows(self, index: Tensor) -> list[Tensor]:
        """These rows of every column, on a CPU in memory that the next call uses again: fresh
        memory costs more than the copy.
        """
        if index.device.type != "cpu":
            return [column.index_select(0, index) for column in self.columns]
        if len(self._room) != len(self.columns):
            self._room = [column.new_empty(0) for column in self.columns]
        for column, room in zip(self.columns, self._room, strict=True):
            torch.index_select(column, 0, index, out=room.resize_(len(index), *column.shape[1:]))
        return self._room

    def assemble(self, parts: Sequence[Tensor]) -> Batch:
        """The tensors of one batch as the batch that the problem knows."""
        leaves = list(self._fixed)
        for place, part in zip(
            (i for i, leaf in enumerate(leaves) if leaf is None), parts, strict=True
        ):
            leaves[place] = part
        return Batch(tree_unflatten(leaves, self._spec), parts[0].shape[0] if parts else self.size)

    def batch(self, index: Tensor) -> Batch:
        """The batch of one chain, from its row of ``draw``."""
        if self.by_sample:
            return self.assemble(self._rows(index))
        wanted = int(index[0])
        return next(batch for batch in self.problem.batches if batch.index == wanted)


def can_draw_samples(problem: Problem) -> bool:
    """Whether batches of any size can be drawn; else they are the problem's own."""
    return _columns(problem) is not None


def _columns(problem: Problem) -> tuple[Tensor, list[Tensor], TreeSpec, list[Any]] | None:
    """The losses of all samples at the centre and the data as columns, or None where samples
    cannot be drawn.
    """
    if not problem.batches.in_memory:
        return None
    try:
        losses = SampleLosses(problem)(problem.vector)
        whole = concatenate([batch.data for batch in problem.batches])
    except torch.OutOfMemoryError:
        raise
    # dependent samples, or batches of different shapes
    except (TypeError, RuntimeError, ValueError):
        return None
    leaves, spec = tree_flatten(whole)
    tensors = [isinstance(leaf, Tensor) and leaf.ndim > 0 for leaf in leaves]
    columns = [leaf for leaf, tensor in zip(leaves, tensors, strict=True) if tensor]
    return (
        losses,
        columns,
        spec,
        [None if tensor else leaf for leaf, tensor in zip(leaves, tensors, strict=True)],
    )


@torch.no_grad()
def _batch_losses(problem: Problem) -> Tensor:
    parameters = problem.named(problem.vector)
    return torch.stack(
        [problem.batch_loss(parameters, batch).reshape(()) for batch in problem.batches]
    )


class SampleLosses:
    """θ ↦ ℓ_1(θ) … ℓ_n(θ), (n,), with L = (1/n) Σ ℓ_i; refused where the loss is no such mean.

    Where the loss is one of the model's output, the model sees whole batches and only the loss is
    taken sample by sample; else the loss of a batch of one is mapped over the samples, in a loop
    where it cannot be.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        # functions, for methods would hold this object, and its problem, in a cycle
        kind = type(self)
        ways: list[Way] = [kind._by_output] if problem.loss_function else []
        ways += [kind._mapped, kind._looped]
        parameters, batch = problem.named(problem.vector), problem.batches.first()
        with torch.no_grad():
            whole = problem.batch_loss(parameters, batch).double()
        right = False
        for way in ways:
            self._way = way
            parts = self._try(way, parameters, batch)
            if parts is not None and (parts.shape == (batch.size,) or way is kind._looped):
                off = (parts.double().mean() - whole).abs()
                right = bool(off <= 1e-4 * (1e-3 + whole.abs()))
                if right:
                    break
        sizes = torch.tensor(problem.batches.sizes, dtype=torch.float64)
        even = torch.allclose(
            torch.tensor(problem.weights).double(), sizes / sizes.sum(), rtol=1e-6
        )
        require(
            right and even and problem.norm != "train",
            "the problem's loss",
            "be a mean over the samples",
            'one whose samples depend on each other or count unequally (norm="train", ignored'
            " targets)",
            "this reading needs the loss of each sample by itself",
            TypeError,
        )

    @torch.no_grad()
    def __call__(self, theta: Tensor) -> Tensor:
        parameters = self.problem.named(theta)
        return torch.cat([self._way(self, parameters, batch) for batch in self.problem.batches])

    def _try(self, way: Way, parameters: Parameters, batch: Batch) -> Tensor | None:
        """The losses of the batch's samples, or None where this way fails."""
        try:
            with torch.no_grad():
                return way(self, parameters, batch)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
            return None

    def _by_output(self, parameters: Parameters, batch: Batch) -> Tensor:
        output, target = self.problem.output(parameters, batch), self.problem.target(batch)
        loss = self.problem.loss_function
        assert loss is not None
        return torch.vmap(lambda z, y: loss.value(z.unsqueeze(0), y.unsqueeze(0)))(output, target)

    def _mapped(self, parameters: Parameters, batch: Batch) -> Tensor:
        columns, single = rows_of(batch)
        if not any(column.numel() for column in columns):  # no data: the samples are alike
            return self.problem.batch_loss(parameters, batch).reshape(()).expand(batch.size)
        one = torch.vmap(
            lambda *rows: self.problem.batch_loss(parameters, single(*rows)), chunk_size=CHUNK
        )
        with twice_differentiable(), torch.no_grad():  # fused attention has no rule for vmap
            return one(*columns)

    def _looped(self, parameters: Parameters, batch: Batch) -> Tensor:
        rows = torch.arange(batch.size, device=self.problem.device)
        return torch.stack(
            [
                self.problem.batch_loss(parameters, take(batch, row)).reshape(())
                for row in rows.split(1)
            ]
        )
