"""Small problems that the tests share, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lambdahat._core.rng import generator
from lambdahat.models import mlp
from lambdahat.operators import LinearOperator
from lambdahat.problem import Problem
from lambdahat.problem.problem import Space


def classifier(
    sizes: Sequence[int] = (4, 5, 3),
    activation: str = "relu",
    samples: int = 20,
    batch_size: int | None = 7,
    seed: int = 0,
    ranks: Any = "auto",
) -> Problem:
    """An MLP with cross-entropy on Gaussian inputs and random labels."""
    rng = generator(seed, "classifier")
    x = torch.randn(samples, sizes[0], generator=rng, dtype=torch.float64)
    y = torch.randint(0, sizes[-1], (samples,), generator=rng)
    return Problem(
        mlp(sizes, activation, seed).double(),
        "cross_entropy",
        (x, y),
        batch_size=batch_size,
        ranks=ranks,
    )


def quadratic(matrix: Tensor, slope: Tensor | None = None, theta: Tensor | None = None) -> Problem:
    """L(θ) = ½θᵀAθ + bᵀθ with no data, at θ = 0 unless told."""
    at = torch.zeros(len(matrix), dtype=matrix.dtype) if theta is None else theta
    linear = torch.zeros_like(at) if slope is None else slope
    return Problem.from_function(
        lambda p: 0.5 * p["theta"] @ matrix @ p["theta"] + linear @ p["theta"], {"theta": at}
    )


def with_eigenvalues(values: Tensor | Sequence[float], seed: int = 0) -> Tensor:
    """A dense symmetric matrix with the given spectrum, in a random basis."""
    spectrum = torch.as_tensor(values, dtype=torch.float64)
    draw = torch.randn(
        len(spectrum), len(spectrum), generator=generator(seed, "basis"), dtype=torch.float64
    )
    turn = torch.linalg.qr(draw).Q
    matrix = turn @ torch.diag(spectrum) @ turn.T
    return (matrix + matrix.T) / 2


class Products(LinearOperator):
    """A matrix known by its products only, so that nothing about it is exact; ``near`` is its
    control variate.
    """

    def __init__(
        self,
        matrix: Tensor,
        near: LinearOperator | None = None,
        symmetric: bool = True,
        space: Space | None = None,
    ) -> None:
        super().__init__(len(matrix), matrix.dtype, matrix.device, symmetric=symmetric, space=space)
        self.matrix, self.near = matrix, near

    def _apply(self, block: Tensor) -> Tensor:
        return self.matrix @ block

    def control(self) -> LinearOperator | None:
        return self.near


def spectra(size: int = 300) -> dict[str, Tensor]:
    """Dense matrices with the kinds of spectra that estimators meet; "network" is like a trained
    network's Hessian.
    """
    rng = generator(0, "spectra")
    index = torch.arange(1.0, size + 1, dtype=torch.float64)
    normal = torch.randn(size, 2 * size, generator=rng, dtype=torch.float64)
    bulk = torch.randn(size, generator=rng, dtype=torch.float64).exp()
    network = torch.cat(
        [bulk[: size // 3], -0.3 * bulk[size // 3 : size // 2], 1e-3 * bulk[size // 2 :]]
    )
    network[:10] = torch.linspace(50, 500, 10, dtype=torch.float64)
    balanced = torch.randn(size, generator=rng, dtype=torch.float64)
    balanced[:10] = torch.tensor([40.0, -40.0] * 5, dtype=torch.float64)
    symmetric = (normal[:, :size] + normal[:, :size].T) / (2 * size) ** 0.5
    return {
        "flat": normal @ normal.T / (2 * size),
        "decaying": with_eigenvalues(0.9**index),
        "power law": with_eigenvalues(1 / index),
        "network": with_eigenvalues(network),
        "indefinite": symmetric + 0.5 * torch.eye(size, dtype=torch.float64),
        "no trace": with_eigenvalues(balanced - balanced.mean()),
    }


class Tied(nn.Module):
    """Two layers that share one weight, applied one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.second(torch.relu(self.first(x)))))


class Block(nn.Module):
    """One transformer block and a linear reading of its mean."""

    def __init__(self, width: int = 6, hidden: int = 8) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(width, 2, hidden, dropout=0.1, batch_first=True)
        self.last = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(x).mean(dim=1))


def small_lenet() -> nn.Module:
    """LeNet-5's layers at a tenth of its width, for 10 × 10 images."""
    return nn.Sequential(
        nn.Conv2d(1, 2, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(2, 3, 2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(12, 6),
        nn.ReLU(),
        nn.Linear(6, 5),
        nn.ReLU(),
        nn.Linear(5, 3),
    )


def normed() -> nn.Module:
    """A convolution, grouped and strided, with batch-norm."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2),
        nn.BatchNorm2d(4),
        nn.LeakyReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (_perceptron, (4,)),
    "lenet": (small_lenet, (1, 10, 10)),
    "batch-norm": (normed, (2, 8, 8)),
    "transformer": (lambda: Block(4, 6), (3, 4)),
    "tied": (Tied, (5,)),
}


def network(name: str, loss: str = "cross_entropy", samples: int = 11, **options: Any) -> Problem:
    """One of ``NETWORKS`` in float64, random weights, data and batch-norm statistics, in batches
    of 4.
    """
    make, shape = NETWORKS[name]
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = make().double()
        x = torch.randn(samples, *shape, dtype=torch.float64)
        y = (
            torch.randint(0, 3, (samples,))
            if loss in ("cross_entropy", "nll")
            else torch.rand(samples, 3).double()
        )
        y = y.round() if loss == "bce_with_logits" else y
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                nn.init.normal_(layer.running_mean)
                nn.init.uniform_(layer.running_var, 0.5, 2.0)
    return Problem(model, loss, (x, y), **{"batch_size": 4, **options})


class LanguageOutput:
    """What a transformers model returns: ``logits``, and ``loss`` when labels came in."""

    def __init__(self, logits: Tensor, loss: Tensor | None) -> None:
        self.logits, self.loss = logits, loss


class LanguageModel(nn.Module):
    """A stand-in for a transformers model: keyword inputs, an output object, tied embeddings,
    labels of −100.
    """

    def __init__(self, words: int = 7, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> LanguageOutput:
        hidden = torch.tanh(self.mix(self.embed(input_ids))) * attention_mask.unsqueeze(-1)
        logits = self.head(hidden)
        loss = (
            None
            if labels is None
            else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        )
        return LanguageOutput(logits, loss)


def sentences(count: int = 6, length: int = 5, words: int = 7, seed: int = 0) -> dict[str, Tensor]:
    """Token columns as a tokenizer gives them, with some labels left out."""
    rng = generator(seed, "sentences")
    ids = torch.randint(0, words, (count, length), generator=rng)
    mask = torch.ones_like(ids)
    mask[0, 3:] = 0
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": torch.where(mask.bool(), ids.roll(-1, 1), -100),
    }
