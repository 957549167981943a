"""Losses as functions of the model's output, with the curvature each has there, and the labels of
language models.

A loss is the mean over the samples of a batch. Its Hessian at the output, per sample M_i =
B·∂²L_batch/∂z_i², is given as a product ``M u``, as factors Σ_k s_k s_kᵀ = M, and as a random
factor with E[s sᵀ] = M.

With ℓ_it the loss of label t of sequence i and C the labels that count (not −100), counted in
"tokens" L = (1/|C|) Σ_C ℓ_it and n = |C|; counted in "sequences" L = (1/n) Σ_i Σ_{t ∈ C_i} ℓ_it and
n is the number of sequences. Either way n·L is the negative log-likelihood of the data.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lambdahat._core.check import describe, message, require, require_choice
from lambdahat._core.device import COMPILED, AsWritten
from lambdahat.problem.batches import Batch, copy_with, take

IGNORE = -100
COUNTS = ("tokens", "sequences")
KEY = "labels"
PROBED_ROWS = 2  # samples on which a model's treatment of labels is tried out


def token_labels(data: Any) -> Tensor | None:
    """The labels (B, …) of a dict batch where they are class numbers, else None."""
    labels = data.get(KEY) if isinstance(data, Mapping) else None
    known = isinstance(labels, Tensor) and labels.ndim > 0 and not labels.is_floating_point()
    return labels if known else None


@torch.no_grad()
def shifts_labels(own_loss: Callable[[Any], Any], batch: Batch) -> bool:
    """Whether a model moves its labels by one before it compares them, as causal models do.

    Such a model never sees the first label. Alone, that leaves the loss at that of no label (NaN or
    0); any other model shows one of several classes. A NaN from a padded first position comes back
    where the other labels are there too. A model that takes no labels moves none.
    """
    rows = batch.data[KEY].ne(IGNORE).flatten(1).any(1).nonzero().flatten()[:PROBED_ROWS]
    for some in (take(batch, rows), batch):  # all of it for a model of one batch size
        try:
            return _first_unseen(own_loss, some)
        except (TypeError, KeyError, AttributeError):
            return False
        except (RuntimeError, ValueError, IndexError):
            continue
    return False


def _first_unseen(own_loss: Callable[[Any], Any], batch: Batch) -> bool:
    labels: Tensor = batch.data[KEY]
    none, known = torch.full_like(labels, IGNORE), labels[labels >= 0]
    # two classes or more that exist
    low, high = (int(known.min()), int(known.max())) if len(known) else (0, 0)
    classes = sorted({high, low, 0 if high > 0 else 1})

    def loss(first: int, others: Tensor) -> float:
        changed = others.clone()
        changed[:, 0] = first
        return float(own_loss({**batch.data, KEY: changed}))

    nothing = loss(IGNORE, none)
    for first in classes:
        seen = loss(first, none)  # the same but for the order of sums; NaN is itself
        both_nan = math.isnan(seen) and math.isnan(nothing)
        if not both_nan and not math.isclose(seen, nothing, rel_tol=1e-4):
            return False
    padding = math.isnan(nothing) and math.isnan(loss(classes[-1], labels))
    return not (padding and not math.isnan(loss(IGNORE, labels)))


@torch.no_grad()
def takes_labels(own_loss: Callable[[Any], Any], batch: Batch) -> bool:
    """Whether a model computes a loss of labels, or fails for another reason."""
    try:
        return own_loss(take(batch, slice(PROBED_ROWS)).data) is not None
    except TypeError:
        return False
    except (RuntimeError, ValueError, IndexError, KeyError, AttributeError):
        return True


class Loss(ABC):
    """A mean loss ``value(output, target)``; ``convex`` in the output, ``likelihood`` when M is the
    Fisher there.

    ``predictive``: whether it has a distribution of targets, so that there is a Fisher, which need
    not be M.
    """

    name: str = "custom"
    convex: ClassVar[bool] = False
    likelihood: ClassVar[bool] = False
    predictive: ClassVar[bool] = False

    @abstractmethod
    def value(self, output: Any, target: Any) -> Tensor:
        """The mean loss of the batch, a scalar."""

    def check(self, output: Any, target: Any) -> None:  # noqa: B027
        """Raise when the output cannot be what this loss takes; called once, at construction."""

    def check_targets(self, target: Any) -> None:  # noqa: B027
        """Raise for targets that this loss does not take; called for every batch."""

    def terms(self, target: Any, size: int) -> float:
        """How many equal terms the mean is over: the weight of a batch in the data's mean."""
        return float(size)

    def with_count(self, count: str | None) -> Loss:
        """The same as a mean over "tokens", or over "sequences" of their sums."""
        expected = "be left out for a loss that is not cross-entropy or the model's own"
        require(count is None, "count", expected, count, 'use "cross_entropy", "nll" or "model"')
        return self

    def product(self, output: Any, target: Any) -> Callable[[Tensor], Tensor] | None:
        """u (B, …) ↦ M u for each sample, where a closed form exists."""
        return None

    def factors(self, output: Any, target: Any) -> Tensor | None:
        """S (K, B, …) with Σ_k s_k s_kᵀ = M for each sample, where a closed form exists."""
        return None

    def factor_count(self, output: Any, target: Any) -> int | None:
        """K, where such factors exist."""
        return None

    def each_factor(self, output: Any, target: Any) -> tuple[int, Iterator[Tensor]] | None:
        """K and the factors s_k (B, …) one by one, where a closed form exists."""
        factors = self.factors(output, target)
        return None if factors is None else (len(factors), iter(factors))

    def fisher(self, output: Any, target: Any) -> list[Tensor] | None:
        """The diagonal of the Fisher at the output, where that is diagonal and not M."""
        return None

    def random_factor(self, output: Tensor, target: Any, generator: torch.Generator) -> Tensor:
        """s (B, …) with E[s sᵀ] = M, from a target drawn from the model's own distribution."""
        raise TypeError(
            f"the loss {self.name!r} has no predictive distribution to draw from; use a named loss"
        )

    def random_factors(self, output: Any, target: Any, generator: torch.Generator) -> list[Tensor]:
        """s with E[s sᵀ] the Fisher at the output, in as many tensors as the output has."""
        return [self.random_factor(output, target, generator)]

    def root_product(self, output: Tensor, target: Any, vectors: Tensor) -> Tensor:
        """Ru (R, B, …) for vectors u of that shape, with R Rᵀ = M: E[s sᵀ] = M if E[u uᵀ] = I.

        ‖Jᵀs‖² has a relative variance of 2 at most, however concentrated the predictions are;
        that of a factor from a random target grows as one over the chance of an error.
        """
        raise TypeError(f"the loss {self.name!r} has no root of its curvature in closed form")


class CrossEntropy(Loss):
    """Softmax cross-entropy −Σ_c q_c log p_c: M = m·(diag(p) − ppᵀ), m = Σ_c q_c.

    For a class y, q = (1 − ε) w_y e_y + (ε/C) w with class weights w and label smoothing ε; the
    mean is divided by Σ w_y over the targets that are not ``ignored``, as in torch. Probabilities
    are smoothed and weighted likewise and averaged over all positions. ``by_sequence``: the mean
    over samples of their sums. Half-precision logits are taken to float32.

    The classes are in dimension 1 of the logits, as in torch, or last where only that fits:
    ``settle`` decides for a whole data set; ``torch_order`` takes dimension 1 where both fit.
    """

    name, convex, likelihood, predictive = "cross_entropy", True, True, True
    classes: int | None = None  # the dimension, 1 or −1, once it is decided
    width: int = 0  # their number, from then on

    def __init__(
        self,
        torch_order: bool = False,
        weight: Tensor | None = None,
        ignored: int = IGNORE,
        smoothing: float = 0.0,
    ) -> None:
        self.torch_order, self.by_sequence = torch_order, False
        self.weight = None if weight is None else weight.detach()
        self.ignored, self.smoothing = ignored, smoothing

    def with_count(self, count: str | None) -> CrossEntropy:
        unweighted, cure = count is None or self.weight is None, "n·L is no log-likelihood then"
        require(unweighted, "count", "be left out for a loss with class weights", count, cure)
        return copy_with(self, by_sequence=count == "sequences")

    def settle(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Self:
        """The same with the dimension of the classes decided by the first clear pair."""
        if self.classes is not None:
            return self
        shape = torch.Size()
        for output, target in pairs:
            fitting, shape = self._fitting(output, target), output.shape
            if len(fitting) == 1:
                return copy_with(self, classes=fitting[0], width=shape[fitting[0]])
        if not self.torch_order:
            raise ValueError(
                "the model's output must show which dimension holds the classes, got logits"
                f" {tuple(shape)}, where dimension 1 and the last both fit the targets; move the"
                " classes to dimension 1 and pass loss=torch.nn.functional.cross_entropy, which"
                " takes them there, or flatten to logits (batch, classes)"
            )
        return copy_with(self, classes=1, width=shape[1])

    def _classes_first(self, output: Tensor, target: Tensor) -> Tensor:
        if not isinstance(output, Tensor) or output.ndim < 2:
            expected = "be logits (batch, classes) for cross_entropy"
            raise ValueError(message("the model's output", expected, output))
        if output.ndim == 2 and target.shape == output.shape[:1] and self.classes in (None, 1):
            return output
        fitting = self._fitting(output, target)
        if self.classes is not None and self.classes not in fitting:
            raise ValueError(
                "logits must hold the classes in the same dimension in every batch, got"
                f" {tuple(output.shape)} for targets {tuple(target.shape)}"
            )
        return output if (self.classes or fitting[0]) == 1 else output.movedim(-1, 1)

    def _fitting(self, output: Tensor, target: Tensor) -> tuple[int, ...]:
        """The dimensions, 1 or −1, that may hold the classes."""
        shape, first = tuple(target.shape), (output.shape[0], *output.shape[2:])
        if target.is_floating_point() or (output.ndim == 2 and shape == first):
            return (1,)
        fits = ((1, first), (-1, tuple(output.shape[:-1])))
        fitting = tuple(dim for dim, fit in fits if shape == fit)
        expected, cure = f"have shape {first} for logits {tuple(output.shape)}", ""
        if shape == tuple(output.shape):
            cure = "of one-hot targets take .argmax(1); .float() makes them probabilities"
        elif shape in ((*first, 1), (first[0], 1, *first[1:])):
            cure = f"take .squeeze({1 if shape[1] == 1 else -1})"
        require(bool(fitting), "targets", expected, target, cure)
        return fitting

    def value(self, output: Tensor, target: Tensor) -> Tensor:
        logits = self._classes_first(output, target)
        weight = None if self.weight is None else self.weight.to(_wide(output))
        entropy = partial(F.cross_entropy, weight=weight, label_smoothing=self.smoothing)
        if target.is_floating_point():
            positions, wide = logits[0, 0].numel() if self.by_sequence else 1, _wide(logits)
            return entropy(wide, target.to(wide)) * positions
        target = target.long()
        counted = len(target) if self.by_sequence else self._divisor(target, target != self.ignored)
        # the classes come last: along rows torch is faster than along strides
        if logits is not output:
            logits, target = output.flatten(0, -2), target.flatten()
        wide, plain = _wide(logits), self.weight is None and not self.smoothing
        if plain and torch._C._functorch.is_batchedtensor(wide):
            # what PyTorch does inside vmap, but for a check that imports its compiler's algebra
            kept = target != self.ignored
            places = torch.where(kept, target, 0).unsqueeze(1)
            each = -wide.log_softmax(1).gather(1, places).squeeze(1)
            total = torch.where(kept, each, 0).sum()
        else:
            total = entropy(wide, target, ignore_index=self.ignored, reduction="sum")
        if isinstance(counted, Tensor) and counted.is_floating_point():
            # two numbers without dimensions would be divided in the wider dtype
            counted = counted.to(total.dtype)
        return total / counted

    def check(self, output: Any, target: Any) -> None:
        logits = self._classes_first(output, target)
        classes = logits.shape[1]
        fits = self.weight is None or self.weight.shape == (classes,)
        require(fits, "weight", f"hold one number for each of the {classes} classes", self.weight)
        if target.is_floating_point():
            if target.shape != logits.shape:
                raise ValueError(
                    "targets must be class indices (int64) or probabilities of shape"
                    f" {tuple(logits.shape)}, got {target.dtype} of shape {tuple(target.shape)};"
                    " for class indices call .long()"
                )
            absent, expected = self.ignored < 0, "be left out for targets that are probabilities"
            require(absent, "ignore_index", expected, self.ignored)
        else:
            whole, kind = target.dtype in (torch.int64, torch.uint8), str(target.dtype)
            require(whole, "targets", "be class indices of dtype int64", kind, "call .long()")
        self._require_range(target, classes)

    def check_targets(self, target: Tensor) -> None:
        self._require_range(target, self.width)

    def _require_range(self, target: Tensor, classes: int) -> None:
        low, high = _range(target)
        if target.is_floating_point():
            expected = "be class indices (int64) or probabilities"
            got, cure = f"{low:.3g} among them", "of class indices call .long(), of logits .softmax"
            require(not low < 0, "targets", expected, got, cure)
        elif low < 0 or high >= classes:
            kept = target.long()
            least, most = _range(kept.masked_fill(kept == self.ignored, 0))
            if least < 0 or most >= classes:
                cure = f"number classes from 0, and mark targets to leave out with {self.ignored}"
                if classes == 1:
                    cure = 'for one output and two classes use "bce_with_logits"'
                named = "1 class" if classes == 1 else f"{classes} classes"
                raise ValueError(
                    f"targets must lie in [0, {classes - 1}] for {named}, got values in"
                    f" [{low}, {high}]; {cure}"
                )

    def terms(self, target: Tensor, size: int) -> float:
        each = self.by_sequence or target.is_floating_point()
        return float(size) if each else float(self._weights(target.long()).sum())

    def terms_by_sample(self, target: Tensor) -> Tensor:
        """The weight of each sample in the mean, (B,)."""
        if self.by_sequence or target.is_floating_point():
            return torch.ones(len(target), device=target.device)
        return self._weights(target.long()).reshape(len(target), -1).sum(dim=1)

    def product(self, output: Tensor, target: Tensor) -> Callable[[Tensor], Tensor]:
        """Keeps one tensor of the output's size, for the sake of large vocabularies."""
        logits = self._classes_first(output, target)
        classes = 1 if logits is output else -1
        p = _wide(output).softmax(dim=classes)
        scale = self._scale(logits, target).square()
        scale = scale if logits is output else scale.movedim(1, -1)

        def multiply(u: Tensor) -> Tensor:
            wide = u.to(p.dtype)
            centred = wide - (p * wide).sum(dim=classes, keepdim=True)
            return centred.mul_(p).mul_(scale).to(u.dtype)

        return multiply

    def factors(self, output: Tensor, target: Tensor) -> Tensor | None:
        logits = self._classes_first(output, target)
        return self._rows(logits, target) if logits.ndim == 2 else None

    def factor_count(self, output: Tensor, target: Tensor) -> int | None:
        logits = self._classes_first(output, target)
        return logits.shape[1] - 1 if logits.ndim == 2 else None

    def each_factor(self, output: Tensor, target: Tensor) -> tuple[int, Iterator[Tensor]]:
        """Position after position: a factor is 0 at all other positions."""
        logits = self._classes_first(output, target)
        if logits.ndim == 2:
            return logits.shape[1] - 1, iter(self._rows(logits, target))
        flat, scale = logits.flatten(2), self._scale(logits, target).flatten(2)
        positions = flat.shape[2]

        def each() -> Iterator[Tensor]:
            for t in range(positions):
                for row in self._rows(flat[:, :, t], None, scale[:, :, t]):
                    spread = torch.zeros_like(flat)
                    spread[:, :, t] = row
                    spread = spread.reshape(logits.shape)
                    yield spread if logits is output else spread.movedim(1, -1)

        return positions * (flat.shape[1] - 1), each()

    def _rows(self, logits: Tensor, target: Tensor | None, scale: Tensor | None = None) -> Tensor:
        """C − 1 factors s_k = √(m·p_k)·(e_k − w), k > 0, w = (p + √p₀·e₀)/(1 + √p₀), of logits (B,
        C).

        diag(√p) − p√pᵀ, whose square is diag(p) − ppᵀ, sends √p to 0: a reflection of √p onto e₀
        empties its first column, and these are the others.
        """
        scale = self._scale(logits, target) if scale is None else scale  # type: ignore[arg-type]
        p = logits.softmax(dim=1)
        root = p.sqrt()
        first = root[:, :1]
        inner = torch.cat([p[:, :1] + first, p[:, 1:]], dim=1) / (1 + first)
        # (C − 1, 1, C)
        ends = torch.eye(p.shape[1], dtype=p.dtype, device=p.device)[1:].unsqueeze(1)
        scaled = root[:, 1:] * scale
        return (ends - inner) * scaled.T.unsqueeze(2)

    def random_factor(self, output: Tensor, target: Tensor, generator: torch.Generator) -> Tensor:
        logits = self._classes_first(output, target)
        p = logits.softmax(dim=1)
        last = p.movedim(1, -1)
        flat = last.reshape(-1, p.shape[1]).double().cpu()
        draw = torch.multinomial(flat, 1, generator=generator).to(p.device).reshape(last.shape[:-1])
        hot = F.one_hot(draw, p.shape[1]).movedim(-1, 1).to(p.dtype)
        residual = (p - hot) * self._scale(logits, target)
        return residual if logits is output else residual.movedim(1, -1)

    def root_product(self, output: Tensor, target: Tensor, vectors: Tensor) -> Tensor:
        """(diag(√p) − p√pᵀ)u at every position."""
        logits = self._classes_first(output, target)
        first, classes = logits is output, 1 if logits is output else -1
        p = _wide(output).softmax(dim=classes)
        root, scale = p.sqrt(), self._scale(_wide(logits), target)
        along = (root * vectors).sum(dim=classes + first, keepdim=True)
        spread = (root * vectors - p * along) * (scale if first else scale.movedim(1, -1))
        return spread.to(output.dtype)

    def _scale(self, logits: Tensor, target: Tensor) -> Tensor:
        """√(m·B/terms) at each position, without B/terms by sequence, to multiply logits."""
        spread = [1, -1] + [1] * (logits.ndim - 2)
        weight = None if self.weight is None else self.weight.to(logits.device, torch.float64)
        # Σ_c w_c/C, the mass that smoothing spreads
        even = 1.0 if weight is None else float(weight.mean())
        if target.is_floating_point():
            own = target if weight is None else target * weight.reshape(spread).to(target)
            mass = (1 - self.smoothing) * own.sum(dim=1, keepdim=True) + self.smoothing * even
            positions = 1 if self.by_sequence else logits[0, 0].numel()
            return mass.sqrt().to(logits.dtype) / math.sqrt(positions)
        target = target.long()
        counts = target != self.ignored
        kept = counts.unsqueeze(1).to(logits.dtype)
        if weight is not None:
            own = (1 - self.smoothing) * weight[target.where(counts, 0)] + self.smoothing * even
            kept = kept * own.sqrt().unsqueeze(1).to(logits.dtype)
        if self.by_sequence:
            return kept
        return kept * (
            math.sqrt(len(logits)) * self._divisor(target, counts, torch.float64).rsqrt()
        )

    def _divisor(self, target: Tensor, counts: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Σ w_y, or 1 where no target counts; a tensor, to avoid a GPU synchronisation."""
        if self.weight is None:
            return counts.sum(dtype=dtype).clamp(min=1)
        mass = self._weights(target).sum()
        return torch.where(mass > 0, mass, 1.0)

    def _weights(self, target: Tensor) -> Tensor:
        """w_y of each target that counts, and 0 of the others."""
        kept = target != self.ignored
        if self.weight is None:
            return kept
        return self.weight.to(target.device).double()[target.where(kept, 0)] * kept


def _range(target: Tensor) -> tuple[float, float]:
    """The smallest and the largest, read at once: every reading waits for the GPU."""
    low, high = torch.stack(target.aminmax()).tolist() if target.numel() else (0, 0)
    return low, high


def _wide(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


class _Elementwise(Loss):
    """A mean over all elements of the output: M is diagonal."""

    convex, likelihood, predictive = True, True, True

    def check(self, output: Any, target: Any) -> None:
        shapes = [tuple(getattr(part, "shape", ())) for part in (target, output)]
        tensors = isinstance(output, Tensor) and isinstance(target, Tensor)
        if not tensors or shapes[0] != shapes[1]:
            raise ValueError(
                "targets must have the shape of the model's output (torch would broadcast them),"
                f" got targets {shapes[0]} for outputs {shapes[1]}; reshape the targets"
            )

    @abstractmethod
    def curvature(self, output: Tensor, target: Tensor) -> Tensor:
        """Second derivative of one element's term at each output."""

    def _weights(self, output: Tensor, target: Tensor) -> Tensor:
        """The diagonal of M."""
        return self.curvature(output, target) / output[0].numel()

    def product(self, output: Tensor, target: Tensor) -> Callable[[Tensor], Tensor]:
        weights = self._weights(output, target)
        return lambda u: weights * u

    def factors(self, output: Tensor, target: Tensor) -> Tensor | None:
        return diagonal_factors(self._weights(output, target))

    def factor_count(self, output: Tensor, target: Tensor) -> int | None:
        return output[0].numel()

    def each_factor(self, output: Tensor, target: Tensor) -> tuple[int, Iterator[Tensor]]:
        return output[0].numel(), each_diagonal_factor(self._weights(output, target))

    def root_product(self, output: Tensor, target: Tensor, vectors: Tensor) -> Tensor:
        return self._weights(output, target).sqrt() * vectors


def diagonal_factors(weights: Tensor) -> Tensor:
    """S (D, B, …) of a diagonal M of weights (B, …)."""
    width = weights[0].numel()
    root = weights.sqrt().reshape(len(weights), width)
    return torch.diag_embed(root).permute(1, 0, 2).reshape(width, *weights.shape)


def each_diagonal_factor(weights: Tensor) -> Iterator[Tensor]:
    """The same one by one, so that a wide output does not take its width squared."""
    root = weights.sqrt().reshape(len(weights), -1)
    for k in range(root.shape[1]):
        factor = torch.zeros_like(root)
        factor[:, k] = root[:, k]
        yield factor.reshape(weights.shape)


class MeanSquare(_Elementwise):
    """Mean of (z − y)² over all elements: M = (2/D)·I, the Fisher of a Gaussian of variance D/2."""

    name = "mse"

    def value(self, output: Tensor, target: Tensor) -> Tensor:
        # F.mse_loss breaks under forward-mode differentiation of its gradient
        return (output - target).square().mean()

    def curvature(self, output: Tensor, target: Tensor) -> Tensor:
        return torch.full_like(output, 2.0)

    def random_factor(self, output: Tensor, target: Tensor, generator: torch.Generator) -> Tensor:
        noise = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
        return noise * math.sqrt(2.0 / output[0].numel())


class BinaryCrossEntropy(_Elementwise):
    """Mean binary cross-entropy of logits over all elements: M = diag(m·p(1 − p))/D, p = σ(z).

    m = w·(v·y + 1 − y), with v the ``pos_weight`` of targets y and w the ``weight``.
    """

    name = "bce_with_logits"

    def __init__(self, weight: Tensor | None = None, pos_weight: Tensor | None = None) -> None:
        weights = (None if w is None else w.detach() for w in (weight, pos_weight))
        self.weight, self.pos_weight = weights

    def value(self, output: Tensor, target: Tensor) -> Tensor:
        pair, target = (self.weight, self.pos_weight), target.to(output.dtype)
        own, positive = (None if w is None else w.to(output) for w in pair)
        return F.binary_cross_entropy_with_logits(output, target, own, pos_weight=positive)

    def check(self, output: Any, target: Any) -> None:
        super().check(output, target)
        cure = "a weight for each sample would be another one in every batch"
        expected = f"broadcast to the outputs {tuple(output.shape[1:])} of one sample"
        for name, weight in (("weight", self.weight), ("pos_weight", self.pos_weight)):
            if weight is not None:
                # one for the elements of a sample, the same for every sample
                own = (1,) * (output.ndim - weight.ndim) + tuple(weight.shape)
                sizes = zip(own, (1, *output.shape[1:]), strict=False)
                fits = len(own) == output.ndim and all(have in (1, want) for have, want in sizes)
                require(fits, name, expected, weight, cure)
        self.check_targets(target)

    def check_targets(self, target: Tensor) -> None:
        low, high = _range(target)
        got, cure = f"values in [{low:.3g}, {high:.3g}]", "0 and 1 stand for the two classes"
        require(not (low < 0 or high > 1), "targets", "lie in [0, 1]", got, cure)

    def curvature(self, output: Tensor, target: Tensor) -> Tensor:
        p, rest = output.sigmoid(), (-output).sigmoid()  # 1 − p is 0 where p is 1 up to rounding
        return self._mass(target.to(p)) * p * rest

    def random_factor(self, output: Tensor, target: Tensor, generator: torch.Generator) -> Tensor:
        p = output.sigmoid()
        uniform = torch.rand(output.shape, generator=generator, dtype=torch.float64).to(p)
        root = self._mass(target.to(p)).sqrt()
        return root * (p - (uniform < p).to(p.dtype)) / math.sqrt(output[0].numel())

    def _mass(self, target: Tensor) -> Tensor:
        """What p(1 − p) is multiplied by at each element."""
        mass = torch.ones_like(target)
        if self.pos_weight is not None:
            mass = self.pos_weight.to(target) * target + (1 - target)
        return mass if self.weight is None else mass * self.weight.to(target)


class GaussianNLL(Loss):
    """Gaussian negative log-likelihood of a model that gives mean and variance.

    The output is (mean, variance), or one tensor of means and log-variances along the last
    dimension. M is not the Fisher, which is diagonal: 1/v for a mean, 1/(2v²) for a variance and
    1/2 for a log-variance, divided by the number D of targets of a sample.
    """

    name, predictive = "gaussian_nll", True

    def __init__(self, full: bool = False, eps: float = 1e-6) -> None:
        self.full, self.eps = full, eps

    def value(self, output: Any, target: Tensor) -> Tensor:
        mean, variance = self._mean_and_variance(output)
        return F.gaussian_nll_loss(mean, target, variance, full=self.full, eps=self.eps)

    def check(self, output: Any, target: Any) -> None:
        mean, variance = self._mean_and_variance(output)
        if not mean.shape == target.shape == variance.shape:
            raise ValueError(
                f"targets must have the shape of the means {tuple(mean.shape)} and variances"
                f" {tuple(variance.shape)}, got {describe(target)}; reshape the targets: torch"
                " would broadcast them"
            )

    def fisher(self, output: Any, target: Any) -> list[Tensor]:
        mean, variance = self._mean_and_variance(output)
        used, each = variance.clamp(min=self.eps), mean[0].numel()
        means = used.reciprocal() / each
        if isinstance(output, Tensor):
            return [torch.cat([means, (variance / used).square() / (2 * each)], dim=-1)]
        return [means, used.square().reciprocal() / (2 * each)]

    def random_factors(self, output: Any, target: Any, generator: torch.Generator) -> list[Tensor]:
        """The slope at a target μ + √v·ε: −ε/√v for the mean and (1 − ε²)/(2v) for the variance."""
        mean, variance = self._mean_and_variance(output)
        used, root = variance.clamp(min=self.eps), math.sqrt(mean[0].numel())
        noise = torch.randn(mean.shape, generator=generator, dtype=torch.float64).to(mean)
        means, spread = -noise / used.sqrt() / root, (1 - noise.square()) / (2 * used) / root
        if isinstance(output, Tensor):
            return [torch.cat([means, spread * variance], dim=-1)]
        return [means, spread]

    def _mean_and_variance(self, output: Any) -> tuple[Tensor, Tensor]:
        name = "the model's output"
        if isinstance(output, Tensor):
            even = output.ndim > 0 and output.shape[-1] % 2 == 0
            expected = "be (mean, variance), or means and log-variances in an even last dimension"
            require(even, name, expected, output)
            mean, log_variance = output.chunk(2, dim=-1)
            return mean, log_variance.exp()
        pair = isinstance(output, tuple | list) and len(output) == 2
        expected, cure = "be (mean, variance) for gaussian_nll", "return the two as a tuple"
        require(pair, name, expected, output, cure)
        return output[0], output[1]


class NegativeLogLikelihood(CrossEntropy):
    """NLL of a model that ends in log-softmax, taken as cross-entropy at the logits.

    The loss is the same, and the Gauss–Newton matrix is that of the logits: the NLL's own is 0.
    """

    name = "nll"

    def check(self, output: Any, target: Any) -> None:
        super().check(output, target)
        logits = self._classes_first(output, target)
        off = float(logits.detach().logsumexp(dim=1).abs().max())
        got, cure = f"log Σ exp = {off:.3g} away from 0", "use cross_entropy for logits"
        require(off < 1e-2, "the model's output", "be log-probabilities for nll", got, cure)


class Custom(Loss):
    """Any callable ``loss(output, target) -> scalar mean``."""

    def __init__(self, function: Callable[[Any, Any], Tensor]) -> None:
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)

    def value(self, output: Any, target: Any) -> Tensor:
        with AsWritten():
            return self.function(output, target)


NAMED: dict[str, type[Loss]] = {
    kind.name: kind
    for kind in (CrossEntropy, MeanSquare, BinaryCrossEntropy, GaussianNLL, NegativeLogLikelihood)
}
_FUNCTIONS: dict[Any, type[nn.Module]] = {
    F.cross_entropy: nn.CrossEntropyLoss,
    F.mse_loss: nn.MSELoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    F.nll_loss: nn.NLLLoss,
    F.gaussian_nll_loss: nn.GaussianNLLLoss,
}


def make_loss(loss: Any) -> Loss:
    """A loss from its name, a torch loss module or function, or a callable."""
    loss = getattr(loss, COMPILED, loss)
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, str):
        cure = '"model" takes the loss that the model itself returns'
        return NAMED[require_choice(loss, "loss", tuple(NAMED), cure)]()
    known = f"be one of {', '.join(NAMED)}, a module or a callable"
    if isinstance(loss, type):
        name = loss.__name__
        raise TypeError(message("loss", known, f"the class {name}", f"make an instance: {name}()"))
    swapped = isinstance(loss, tuple | list | Dataset | DataLoader)
    cure = "the loss comes before the data: Problem(model, loss, data)" if swapped else ""
    require(
        callable(loss), "loss", known, type(loss).__name__ if swapped else loss, cure, TypeError
    )
    for function, module in _FUNCTIONS.items():
        if loss is function:  # a callable need not be hashable
            return make_loss(module())
        if isinstance(loss, partial) and loss.func is function and not loss.args:
            return make_loss(module(**loss.keywords))
    reduction = getattr(loss, "reduction", "mean")
    if reduction not in ("mean", "batchmean"):
        cure = 'use reduction="mean": every quantity here is of the mean loss'
        raise ValueError(message("loss", "average over the batch", f"{reduction=}", cure))
    # torch's own module, or one of a class that inherits what it computes
    kinds = (kind for kind in _FUNCTIONS.values() if isinstance(loss, kind))
    match next((kind for kind in kinds if type(loss).forward is kind.forward), None):
        case nn.CrossEntropyLoss:
            return CrossEntropy(True, loss.weight, loss.ignore_index, loss.label_smoothing)
        case nn.NLLLoss:
            return NegativeLogLikelihood(True, loss.weight, loss.ignore_index)
        case nn.MSELoss:
            return MeanSquare()
        case nn.GaussianNLLLoss:
            return GaussianNLL(loss.full, loss.eps)
        case nn.BCEWithLogitsLoss:
            return BinaryCrossEntropy(loss.weight, loss.pos_weight)
    return Custom(loss)
