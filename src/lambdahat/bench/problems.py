"""The trained networks that every row is measured on, made here from the digits of the package,
from fixed seeds.

The digits (8 × 8) are enlarged to 28 × 28, or to 3 × 32 × 32 in random colours for VGG-16, shifted
at random and with pixel noise, so that any number of samples can be drawn. Each network is trained
for a few epochs on them, so that its Hessian has a trained network's outliers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

from lambdahat._core.rng import generator
from lambdahat.data import digits
from lambdahat.models import lenet5, mlp, vgg16
from lambdahat.problem import Problem

LOSS = nn.CrossEntropyLoss()
EPOCHS = {"vgg16": 40}
RATES = {"vgg16": 2e-4}


@dataclass(frozen=True)
class Case:
    """A trained network with the one list of batches that ours, the peers and the gradient all
    read.
    """

    name: str
    model: nn.Module
    batches: list[tuple[Tensor, Tensor]]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Of the network, in its order."""
        return list(self.model.parameters())

    @property
    def num_parameters(self) -> int:
        """P."""
        return sum(p.numel() for p in self.parameters)

    @property
    def num_samples(self) -> int:
        """n."""
        return sum(len(y) for _, y in self.batches)

    @property
    def device(self) -> torch.device:
        """Where network and data are."""
        return self.parameters[0].device

    def whole(self) -> tuple[Tensor, Tensor]:
        """All data in one piece."""
        images, labels = zip(*self.batches, strict=True)
        return torch.cat(images), torch.cat(labels)

    def one_batch(self, size: int) -> Case:
        """The case on its first ``size`` samples alone."""
        x, y = self.whole()
        return replace(self, batches=[(x[:size], y[:size])])

    def problem(self) -> Problem:
        """As ours takes it."""
        return Problem(self.model, LOSS, self.batches)

    def gradient(self) -> Tensor:
        """One gradient of the mean loss over all the data, flat (P,): the unit of cost."""
        total = torch.zeros(self.num_parameters, device=self.device, dtype=self.parameters[0].dtype)
        for x, y in self.batches:
            grads = torch.autograd.grad(LOSS(self.model(x), y), self.parameters)
            total += torch.cat([g.reshape(-1) for g in grads]) * (len(y) / self.num_samples)
        return total

    def describe(self) -> str:
        """Sizes in words."""
        return (
            f"P = {self.num_parameters:,}, n = {self.num_samples:,} in {len(self.batches)} batches"
        )


def images(
    samples: int, side: int, *, colour: bool = False, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Images (samples, 1 or 3, side, side) and labels (samples,)."""
    rng = generator(seed, "bench images")
    pixels, labels = digits()
    pick = torch.randint(len(labels), (samples,), generator=rng)
    large = interpolate(
        pixels[pick].view(-1, 1, 8, 8), size=side - 4, mode="bilinear", align_corners=False
    )
    shifts = torch.randint(5, (samples, 2), generator=rng)
    out = torch.zeros(samples, 1, side, side)
    for image, digit, (i, j) in zip(out, large, shifts.tolist(), strict=True):
        image[:, i : i + side - 4, j : j + side - 4] = digit
    if colour:
        ink, paper = torch.rand(2, samples, 3, 1, 1, generator=rng)
        out = paper + (ink - paper) * out
    out = out + 0.1 * torch.randn(out.shape, generator=rng)
    return (out - out.mean()) / out.std(), labels[pick]


def network(name: str, width: int) -> nn.Module:
    """By name: "mlp" and "tanh" are 784-width-width-10."""
    if name == "lenet5":
        return lenet5()
    if name == "vgg16":
        return vgg16(dropout=0.0)
    return nn.Sequential(
        nn.Flatten(), *mlp([784, width, width, 10], "tanh" if name == "tanh" else "relu")
    )


def load(
    name: str, samples: int, *, batch_size: int, device: str = "cpu", width: int = 256
) -> Case:
    """The trained case "mlp", "tanh", "lenet5" or "vgg16"."""
    large = name == "vgg16"
    x, y = (t.to(device) for t in images(samples, 32 if large else 28, colour=large))
    model = network(name, width).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATES.get(name, 1e-3))
    rng = generator(0, "bench", name)
    for _ in range(EPOCHS.get(name, 5)):
        for rows in torch.randperm(samples, generator=rng).split(128):
            optimizer.zero_grad()
            cross_entropy(model(x[rows.to(device)]), y[rows.to(device)]).backward()
            optimizer.step()
    model.zero_grad()
    return Case(
        name, model.eval(), list(zip(x.split(batch_size), y.split(batch_size), strict=True))
    )
