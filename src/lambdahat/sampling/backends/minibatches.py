"""Random batches for chains, and the losses of single samples."""

from __future__ import annotations

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
LARGE = 1_000_000  # parameters beyond which a pass takes no more samples than the problem's batches
CHUNK = 256  # samples whose losses are mapped at once
Way = Callable[[Any, Parameters, Batch], Tensor]


class Minibatches:
    """Batches drawn at random from a problem's data, with the centre's loss on each.

    Where the loss is a mean over samples that are all in memory, a batch is ``batch_size`` samples
    drawn with replacement, and the loss at the centre on it is the mean of n numbers computed once.
    Else (norm="train", ignored targets, streamed data) it is one of the problem's own batches,
    drawn with the probability of its weight. ``shared`` gives all chains the same batch. A batch of
    n samples is the whole data, the same at every step: ``whole`` is then its index, else None.
    """

    def __init__(self, problem: Problem, batch_size: int | None, shared: bool, seed: int) -> None:
        self.problem, self._asked_to_share = problem, shared
        self._room: list[Tensor] = []
        self.whole: Tensor | None = None
        self.common = Streams(seed, [-1], problem.device)  # of batches that chains share
        data, sizes = _columns(problem), problem.batches.sizes
        self.by_sample = data is not None
        if data is not None:
            self.centre_losses, self.columns, self._spec, self._fixed = data
            self.resize(min(batch_size or default_batch(problem), problem.num_samples))
            return
        expected = "be left out where batches cannot be drawn sample by sample"
        cure = f"the problem's own batches, of {sizes[0]} samples, are used"
        own = batch_size is None or batch_size in sizes
        require(own, "batch_size", expected, repr(batch_size), cure)
        self.size, self.shared = sizes[0], shared
        parameters = problem.named(problem.vector)
        with torch.no_grad():
            losses = [
                problem.batch_loss(parameters, batch).reshape(()) for batch in problem.batches
            ]
        self.centre_losses = torch.stack(losses)
        self._cumulative = torch.tensor(problem.weights, dtype=torch.float64).cumsum(0)

    def resize(self, size: int) -> None:
        """Draw so many samples from now on; all of them are the whole data."""
        self.size, self.shared, self.whole = size, self._asked_to_share, None
        if size == self.problem.num_samples:
            self.shared, self.whole = True, torch.arange(size, device=self.problem.device)
            # The mean over ``centre_losses`` would differ from this by rounding.
            self._whole_loss = self.problem.vector.new_tensor(
                self.problem.loss(), dtype=torch.float64
            )

    @property
    def generators(self) -> list[torch.Generator]:
        """The streams of its own, besides those of the chains."""
        return self.common.generators if self.shared else []

    def draw(self, rng: Streams, chains: int) -> tuple[Tensor, Tensor]:
        """Which samples each chain sees, (chains, batch_size), or which batch, (chains, 1); and the
        loss at the centre on them, (chains,).
        """
        rng, rows = (self.common, 1) if self.shared else (rng, chains)
        choices = len(self.centre_losses)  # samples, or batches
        if self.whole is not None:
            return self.whole.expand(chains, -1), self._whole_loss.expand(chains)
        if self.by_sample:
            index = rng.integers(choices, rows, self.size)
        else:
            places = rng.uniform(rows, torch.float64).cpu() * self._cumulative[-1]
            index = torch.searchsorted(self._cumulative, places, right=True)
            index = index.clamp_(max=choices - 1).unsqueeze(1)
        index = index.expand(chains, -1)
        return index, self.centre_losses[index.to(self.centre_losses.device)].mean(dim=-1)

    def gather(self, index: Tensor) -> list[Tensor]:
        """The tensors of the batches, each (chains, batch_size, …)."""
        return [rows.unflatten(0, index.shape) for rows in self._rows(index.reshape(-1))]

    def _rows(self, index: Tensor) -> list[Tensor]:
        """These rows of every column, on a CPU in reused memory: allocating is slow."""
        if index.device.type != "cpu":
            return [column.index_select(0, index) for column in self.columns]
        if len(self._room) != len(self.columns):
            self._room = [column.new_empty(0) for column in self.columns]
        for column, room in zip(self.columns, self._room, strict=True):
            torch.index_select(column, 0, index, out=room.resize_(len(index), *column.shape[1:]))
        return self._room

    def assemble(self, parts: Sequence[Tensor]) -> Batch:
        """The tensors of one batch as the batch that the problem knows."""
        columns = iter(parts)
        leaves = [next(columns) if leaf is None else leaf for leaf in self._fixed]
        return Batch(tree_unflatten(leaves, self._spec), parts[0].shape[0] if parts else self.size)

    def batch(self, index: Tensor) -> Batch:
        """The batch of one chain, from its row of ``draw``."""
        if self.by_sample:
            return self.assemble(self._rows(index))
        wanted = int(index[0])
        return next(batch for batch in self.problem.batches if batch.index == wanted)


def default_batch(problem: Problem) -> int:
    """Default number of samples per step: 512, or for a large model no more than the problem's own
    batches have, since so many might not fit into memory.
    """
    large = problem.num_parameters > LARGE
    return min(DEFAULT_BATCH, problem.batches.sizes[0]) if large else DEFAULT_BATCH


def can_draw_samples(problem: Problem) -> bool:
    """Whether batches of any size can be drawn; else they are the problem's own."""
    return _columns(problem) is not None


def _columns(problem: Problem) -> tuple[Tensor, list[Tensor], TreeSpec, list[Any]] | None:
    """The losses of all samples at the centre and the data as columns; None if not separable."""
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
    fixed = [None if tensor else leaf for leaf, tensor in zip(leaves, tensors, strict=True)]
    return losses, columns, spec, fixed


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
        parameters, batch = problem.named(problem.vector), problem.batches.first()
        right = False
        with torch.no_grad():
            whole = problem.batch_loss(parameters, batch).double()
            for way in (*ways, kind._by_vmap, kind._by_loop):
                self._way = way
                try:
                    parts = way(self, parameters, batch)
                except torch.OutOfMemoryError:
                    raise
                except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
                    continue
                if parts.shape == (batch.size,) or way is kind._by_loop:
                    off = (parts.double().mean() - whole).abs()
                    right = bool(off <= 1e-4 * (1e-3 + whole.abs()))
                    if right:
                        break
        sizes = torch.tensor(problem.batches.sizes, dtype=torch.float64)
        weights = torch.tensor(problem.weights).double()
        even = torch.allclose(weights, sizes / sizes.sum(), rtol=1e-6)
        fine = right and even and problem.norm != "train"
        got = 'one whose samples depend on each other or count unequally (norm="train", ignored'
        cure = "this reading needs the loss of each sample by itself"
        expected = "be a mean over the samples"
        require(fine, "the problem's loss", expected, f"{got} targets)", cure, TypeError)

    @torch.no_grad()
    def __call__(self, theta: Tensor) -> Tensor:
        parameters = self.problem.named(theta)
        return torch.cat([self._way(self, parameters, batch) for batch in self.problem.batches])

    def _by_output(self, parameters: Parameters, batch: Batch) -> Tensor:
        output, target = self.problem.output(parameters, batch), self.problem.target(batch)
        loss = self.problem.loss_function
        assert loss is not None
        return torch.vmap(lambda z, y: loss.value(z.unsqueeze(0), y.unsqueeze(0)))(output, target)

    def _by_vmap(self, parameters: Parameters, batch: Batch) -> Tensor:
        columns, single = rows_of(batch)
        if not any(column.numel() for column in columns):  # no data: the samples are alike
            return self.problem.batch_loss(parameters, batch).reshape(()).expand(batch.size)
        one = torch.vmap(
            lambda *rows: self.problem.batch_loss(parameters, single(*rows)), chunk_size=CHUNK
        )
        with twice_differentiable(), torch.no_grad():  # fused attention has no rule for vmap
            return one(*columns)

    def _by_loop(self, parameters: Parameters, batch: Batch) -> Tensor:
        rows = torch.arange(batch.size, device=self.problem.device).split(1)
        losses = (self.problem.batch_loss(parameters, take(batch, row)) for row in rows)
        return torch.stack([loss.reshape(()) for loss in losses])
