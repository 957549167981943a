"""Losses as functions of the model's output, with the curvature each has there.

A loss is the mean over the samples of a batch. Its Hessian at the output is what the generalised Gauss–Newton
matrix, the Fisher and the exact trace of a piecewise-linear network are made of: per sample i,
M_i = B·∂²L_batch/∂z_i², given as a product ``M u``, as factors Σ_k s_k s_kᵀ = M, and as a random factor
with E[s sᵀ] = M.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lambdahat._check import require, require_choice
from lambdahat.labels import IGNORE as IGNORE


class Loss(ABC):
    """A mean loss ``value(output, target)``; ``convex`` in the output, ``likelihood`` when M is the Fisher there."""

    name: str = "custom"
    convex: ClassVar[bool] = False
    likelihood: ClassVar[bool] = False

    @abstractmethod
    def value(self, output: Any, target: Any) -> Tensor:
        """The mean loss of the batch, a scalar."""

    def check(self, output: Any, target: Any) -> None:  # noqa: B027
        """Raise when the output cannot be what this loss takes; called once, at construction."""

    def terms(self, target: Any, size: int) -> float:
        """How many equal terms the mean is over: the weight of a batch in the whole data set's mean."""
        return float(size)

    def counted_in(self, count: str | None) -> Loss:
        """The same as a mean over "tokens", all targets that count, or over "sequences", their sum within each."""
        require(count is None, "count", "be left out for a loss that is not cross-entropy or the model's own", count,
                'use "cross_entropy", "nll" or "model"')  # fmt: skip
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

    def random_factor(self, output: Tensor, target: Any, generator: torch.Generator) -> Tensor:
        """s (B, …) with E[s sᵀ] = M, from a target drawn from the model's own distribution."""
        raise TypeError(f"the loss {self.name!r} has no predictive distribution to draw from; use a named loss")


class OfClasses(Loss):
    """A loss of logits whose classes are dimension 1, as in torch, or the last where only that fits the targets.

    ``settled`` decides which for a whole data set. ``torch_order``: where both fit, dimension 1.
    """

    torch_order = True
    classes: int | None = None  # the dimension, 1 or −1, once it is decided

    def settled(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Self:
        """The same with the dimension of the classes decided by the first (output, target) that leaves one choice."""
        if self.classes is not None:
            return self
        other, shape = copy.copy(self), torch.Size()
        for output, target in pairs:
            fitting, shape = self._fitting(output, target), output.shape
            if len(fitting) == 1:
                other.classes = fitting[0]
                return other
        require(self.torch_order, "the model's output", "show which dimension holds the classes",
                f"logits {tuple(shape)}, where dimension 1 and the last both fit the targets",
                "move the classes to dimension 1 and pass loss=torch.nn.functional.cross_entropy, which takes them "
                "there, or flatten to logits (batch, classes)")  # fmt: skip
        other.classes = 1
        return other

    def _classes_first(self, output: Tensor, target: Tensor) -> Tensor:
        require(isinstance(output, Tensor) and output.ndim >= 2, "the model's output",
                "be logits (batch, classes) for cross_entropy", output)  # fmt: skip
        fitting = self._fitting(output, target)
        require(self.classes is None or self.classes in fitting, "logits", "hold the classes in the same dimension in "
                "every batch", f"{tuple(output.shape)} for targets {tuple(target.shape)}")  # fmt: skip
        return output if (self.classes or fitting[0]) == 1 else output.movedim(-1, 1)

    def _fitting(self, output: Tensor, target: Tensor) -> tuple[int, ...]:
        """The dimensions, 1 or −1, that may hold the classes."""
        shape, first = tuple(target.shape), (output.shape[0], *output.shape[2:])
        if target.is_floating_point() or (output.ndim == 2 and shape == first):
            return (1,)
        fitting = tuple(dim for dim, fits in ((1, first), (-1, tuple(output.shape[:-1]))) if shape == fits)
        require(bool(fitting), "targets", f"have shape {first} for logits {tuple(output.shape)}", target)
        return fitting


class CrossEntropy(OfClasses):
    """Softmax cross-entropy, −log p_y with p = softmax(z): M = diag(p) − ppᵀ, over T positions M/T each.

    Targets of −100 are left out of the mean. ``by_sequence``: the mean over samples of the sum over each one's T
    positions, so that M is not divided by T. Logits in half precision are taken to float32.
    """

    name, convex, likelihood = "cross_entropy", True, True

    def __init__(self, torch_order: bool = False) -> None:
        self.torch_order, self.by_sequence = torch_order, False

    def counted_in(self, count: str | None) -> CrossEntropy:
        other = copy.copy(self)
        other.by_sequence = count == "sequences"
        return other

    def value(self, output: Tensor, target: Tensor) -> Tensor:
        logits = self._classes_first(output, target)
        if target.is_floating_point():
            positions = logits[0, 0].numel() if self.by_sequence else 1
            return F.cross_entropy(_wide(logits), target) * positions
        counted = len(target) if self.by_sequence else (target != IGNORE).sum().clamp(min=1)  # else NaN over none
        if logits is not output:  # the classes come last: along rows torch is faster than along strides
            logits, target = output.flatten(0, -2), target.flatten()
        return F.cross_entropy(_wide(logits), target, reduction="sum") / counted

    def check(self, output: Any, target: Any) -> None:
        logits = self._classes_first(output, target)
        if target.is_floating_point():
            fits = target.shape == logits.shape
            require(fits, "targets", f"be class indices (int64) or probabilities of shape {tuple(logits.shape)}",
                    f"{target.dtype} of shape {tuple(target.shape)}", "for class indices call .long()")  # fmt: skip
            return
        whole = target.dtype in (torch.int64, torch.uint8)
        require(whole, "targets", "be class indices of dtype int64", str(target.dtype), "call .long()")
        classes, (low, high) = logits.shape[1], _range(target)
        lowest = low if low >= 0 else _range(target.masked_fill(target == IGNORE, 0))[0]
        require(lowest >= 0 and high < classes, "targets", f"lie in [0, {classes - 1}] for {classes} classes",
                f"values in [{low}, {high}]",
                f"number classes from 0, and mark targets to leave out with {IGNORE}")  # fmt: skip

    def terms(self, target: Tensor, size: int) -> float:
        each = self.by_sequence or target.is_floating_point()
        return float(size) if each else float((target != IGNORE).sum())

    def product(self, output: Tensor, target: Tensor) -> Callable[[Tensor], Tensor]:
        """Keeps one tensor of the size of the output: with a vocabulary of 50,000 each is most of the memory."""
        logits = self._classes_first(output, target)
        classes = 1 if logits is output else -1
        p = _wide(output).softmax(dim=classes)
        scale = self._scale(logits, target).square()
        scale = scale if logits is output else scale.movedim(1, -1)

        def multiply(u: Tensor) -> Tensor:
            wide = u.to(p.dtype)
            return (wide - (p * wide).sum(dim=classes, keepdim=True)).mul_(p).mul_(scale).to(u.dtype)

        return multiply

    def factors(self, output: Tensor, target: Tensor) -> Tensor | None:
        """C − 1 factors s_k = √p_k·(e_k − w), k > 0, with w = (p + √p₀·e₀)/(1 + √p₀).

        diag(√p) − p√pᵀ, whose square is M, sends √p to 0: a reflection of √p onto e₀ empties its first column, and
        these are the others.
        """
        logits = self._classes_first(output, target)
        if logits.ndim != 2:
            return None
        p = logits.softmax(dim=1)
        root = p.sqrt()
        first = root[:, :1]
        inner = torch.cat([p[:, :1] + first, p[:, 1:]], dim=1) / (1 + first)
        ends = torch.eye(p.shape[1], dtype=p.dtype, device=p.device)[1:].unsqueeze(1)  # (C − 1, 1, C)
        scaled = root[:, 1:] * self._scale(logits, target)
        return (ends - inner) * scaled.T.unsqueeze(2)

    def factor_count(self, output: Tensor, target: Tensor) -> int | None:
        logits = self._classes_first(output, target)
        return logits.shape[1] - 1 if logits.ndim == 2 else None

    def random_factor(self, output: Tensor, target: Tensor, generator: torch.Generator) -> Tensor:
        logits = self._classes_first(output, target)
        p = logits.softmax(dim=1)
        flat = p.movedim(1, -1).reshape(-1, p.shape[1]).double().cpu()
        drawn = torch.multinomial(flat, 1, generator=generator).to(p.device).reshape(p.movedim(1, -1).shape[:-1])
        hot = F.one_hot(drawn, p.shape[1]).movedim(-1, 1).to(p.dtype)
        residual = (p - hot) * self._scale(logits, target)
        return residual if logits is output else residual.movedim(1, -1)

    def _scale(self, logits: Tensor, target: Tensor) -> Tensor:
        """√(B/terms), 1 by sequence, where a position counts and 0 where not, shaped to multiply logits (B, C, …)."""
        if target.is_floating_point():
            counted, mass = torch.ones_like(logits[:, :1]), target.sum(dim=1, keepdim=True)
            positions = 1 if self.by_sequence else logits[0, 0].numel()
            return counted * mass.sqrt() / math.sqrt(positions)
        counts = target != IGNORE
        kept = counts.unsqueeze(1).to(logits.dtype)
        if self.by_sequence:
            return kept
        terms = counts.sum(dtype=torch.float64).clamp(min=1.0)  # a tensor: a number would wait for the GPU
        return kept * (math.sqrt(len(logits)) * terms.rsqrt())


def _range(target: Tensor) -> tuple[int, int]:
    """The smallest and the largest, read at once: every reading waits for the GPU."""
    low, high = torch.stack(target.aminmax()).tolist() if target.numel() else (0, 0)
    return low, high


def _wide(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


class _Elementwise(Loss):
    """A mean over all elements of the output: M is diagonal."""

    convex, likelihood = True, True

    def check(self, output: Any, target: Any) -> None:
        same = isinstance(output, Tensor) and isinstance(target, Tensor) and output.shape == target.shape
        require(same, "targets", "have the shape of the model's output (torch would broadcast them)",
                f"targets {tuple(getattr(target, 'shape', ()))} for outputs {tuple(getattr(output, 'shape', ()))}",
                "reshape the targets")  # fmt: skip

    @abstractmethod
    def curvature(self, output: Tensor) -> Tensor:
        """Second derivative of one element's term at each output."""

    def product(self, output: Tensor, target: Tensor) -> Callable[[Tensor], Tensor]:
        weights = self.curvature(output) / output[0].numel()
        return lambda u: weights * u

    def factors(self, output: Tensor, target: Tensor) -> Tensor | None:
        width = output[0].numel()
        root = (self.curvature(output) / width).sqrt().reshape(len(output), width)
        return torch.diag_embed(root).permute(1, 0, 2).reshape(width, *output.shape)

    def factor_count(self, output: Tensor, target: Tensor) -> int | None:
        return output[0].numel()


class MeanSquare(_Elementwise):
    """Mean of (z − y)² over all elements: M = (2/D)·I, the Fisher of a Gaussian of variance D/2."""

    name = "mse"

    def value(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()  # F.mse_loss breaks under forward-mode differentiation of its gradient

    def curvature(self, output: Tensor) -> Tensor:
        return torch.full_like(output, 2.0)

    def random_factor(self, output: Tensor, target: Tensor, generator: torch.Generator) -> Tensor:
        noise = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
        return noise * math.sqrt(2.0 / output[0].numel())


class BinaryCrossEntropy(_Elementwise):
    """Mean over all elements of the binary cross-entropy of logits: M = diag(p(1 − p))/D, p = σ(z)."""

    name = "bce_with_logits"

    def value(self, output: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(output, target.to(output.dtype))

    def curvature(self, output: Tensor) -> Tensor:
        p = output.sigmoid()
        return p * (1 - p)

    def random_factor(self, output: Tensor, target: Tensor, generator: torch.Generator) -> Tensor:
        p = output.sigmoid()
        uniform = torch.rand(output.shape, generator=generator, dtype=torch.float64).to(p)
        return (p - (uniform < p).to(p.dtype)) / math.sqrt(output[0].numel())


class GaussianNLL(Loss):
    """Gaussian negative log-likelihood of a model that gives mean and variance.

    The output is a pair (mean, variance), as for torch, or one tensor whose last dimension holds means and then
    log-variances. Not convex in the output.
    """

    name = "gaussian_nll"

    def value(self, output: Any, target: Tensor) -> Tensor:
        mean, variance = self._mean_and_variance(output)
        return F.gaussian_nll_loss(mean, target, variance)

    def check(self, output: Any, target: Any) -> None:
        mean, variance = self._mean_and_variance(output)
        require(mean.shape == target.shape == variance.shape, "targets",
                f"have the shape of the means {tuple(mean.shape)} and variances {tuple(variance.shape)}", target,
                "reshape the targets: torch would broadcast them")  # fmt: skip

    def _mean_and_variance(self, output: Any) -> tuple[Tensor, Tensor]:
        if isinstance(output, Tensor):
            require(output.ndim > 0 and output.shape[-1] % 2 == 0, "the model's output",
                    "be (mean, variance), or means and log-variances in an even last dimension", output)  # fmt: skip
            mean, log_variance = output.chunk(2, dim=-1)
            return mean, log_variance.exp()
        pair = isinstance(output, tuple | list) and len(output) == 2
        require(pair, "the model's output", "be (mean, variance) for gaussian_nll", output, "return the two as a tuple")
        return output[0], output[1]


class NegativeLogLikelihood(CrossEntropy):
    """NLL of a model that ends in log-softmax, taken as cross-entropy at the logits.

    log-softmax leaves log-probabilities as they are, so the loss is the same; and the Gauss–Newton matrix is that of
    the logits below, where the NLL's own, being linear, is 0.
    """

    name = "nll"

    def check(self, output: Any, target: Any) -> None:
        super().check(output, target)
        logits = self._classes_first(output, target)
        off = float(logits.detach().logsumexp(dim=1).abs().max())
        require(off < 1e-2, "the model's output", "be log-probabilities for nll", f"log Σ exp = {off:.3g} away from 0",
                "use cross_entropy for logits")  # fmt: skip


class Custom(Loss):
    """Any callable ``loss(output, target) -> scalar mean``."""

    def __init__(self, function: Callable[[Any, Any], Tensor]) -> None:
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)

    def value(self, output: Any, target: Any) -> Tensor:
        return self.function(output, target)


class WeightedCrossEntropy(OfClasses, Custom):
    """torch's cross-entropy or NLL with options: Σ w_y ℓ / Σ w_y over the targets y that are not ``ignore_index``.

    With label smoothing torch divides by the same Σ w_y. Probabilities as targets are averaged over the batch.
    """

    def __init__(self, module: nn.CrossEntropyLoss | nn.NLLLoss) -> None:
        super().__init__(module)
        self.weight, self.ignored = module.weight, module.ignore_index
        smoothed = partial(F.cross_entropy, label_smoothing=getattr(module, "label_smoothing", 0.0))
        self.total = smoothed if isinstance(module, nn.CrossEntropyLoss) else F.nll_loss

    def value(self, output: Tensor, target: Tensor) -> Tensor:
        if target.is_floating_point():
            return self.function(output, target)
        weight, mass = None if self.weight is None else self.weight.to(output), self._mass(target)
        logits = self._classes_first(output, target)
        total = self.total(logits, target, weight=weight, ignore_index=self.ignored, reduction="sum")
        return total / torch.where(mass > 0, mass, 1.0).to(output)  # 0, not NaN, where no target counts

    def terms(self, target: Tensor, size: int) -> float:
        return float(size) if target.is_floating_point() else float(self._mass(target))

    def _mass(self, target: Tensor) -> Tensor:
        kept = target != self.ignored
        if self.weight is None:
            return kept.sum().double()
        return (self.weight.to(target.device).double()[target.where(kept, 0)] * kept).sum()


NAMED: dict[str, type[Loss]] = {
    kind.name: kind for kind in (CrossEntropy, MeanSquare, BinaryCrossEntropy, GaussianNLL, NegativeLogLikelihood)
}
_FUNCTIONS: dict[Any, type[Loss]] = {
    F.cross_entropy: CrossEntropy,
    F.mse_loss: MeanSquare,
    F.binary_cross_entropy_with_logits: BinaryCrossEntropy,
    F.nll_loss: NegativeLogLikelihood,
    F.gaussian_nll_loss: GaussianNLL,
}


def make_loss(loss: Any) -> Loss:
    """A loss from its name, a torch loss module or function, or a callable; sums are refused by name."""
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, str):
        return NAMED[require_choice(loss, "loss", tuple(NAMED))]()
    require(callable(loss), "loss", f"be one of {', '.join(NAMED)}, a module or a callable", loss, "", TypeError)
    for function, kind in _FUNCTIONS.items():
        if loss is function:  # a callable need not be hashable
            return kind(torch_order=True) if issubclass(kind, CrossEntropy) else kind()
    reduction = getattr(loss, "reduction", "mean")
    require(reduction in ("mean", "batchmean"), "loss", "average over the batch", f"reduction={reduction!r}",
            'use reduction="mean": every quantity here is of the mean loss')  # fmt: skip
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        plain = loss.weight is None and loss.ignore_index == IGNORE and not getattr(loss, "label_smoothing", 0.0)
        if not plain:
            return WeightedCrossEntropy(loss)
        return (CrossEntropy if isinstance(loss, nn.CrossEntropyLoss) else NegativeLogLikelihood)(torch_order=True)
    if isinstance(loss, nn.MSELoss):
        return MeanSquare()
    if isinstance(loss, nn.GaussianNLLLoss) and not loss.full and loss.eps == 1e-6:
        return GaussianNLL()
    if isinstance(loss, nn.BCEWithLogitsLoss) and loss.weight is None and loss.pos_weight is None:
        return BinaryCrossEntropy()
    return Custom(loss)
