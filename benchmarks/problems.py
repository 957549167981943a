"""The networks and images that every benchmark uses, made here, with no download and from fixed seeds.

Images are scikit-learn's 1,797 handwritten digits (8×8), enlarged, shifted at random and with pixel noise, so that
any number of samples can be drawn. "CIFAR" here means CIFAR's shape, 3×32×32 with 10 classes: the same digits in a
random colour on a random background. No figure from these benchmarks is a statement about CIFAR-10 itself.

Each network is trained for a few epochs on its own data, so that its Hessian has a trained network's outliers.
VGG-16 has no batch norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import interpolate

Batches = list[tuple[Tensor, Tensor]]
LOSS = nn.CrossEntropyLoss()
VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)


@dataclass(frozen=True)
class Case:
    """A trained network with the one list of batches that ours, the peers and the gradient all read."""

    name: str
    model: nn.Module
    batches: Batches

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters)

    @property
    def num_samples(self) -> int:
        return sum(len(y) for _, y in self.batches)

    def gradient(self) -> Tensor:
        """One gradient of the mean loss over all the data, flat: the unit of cost."""
        total = torch.zeros(self.num_parameters, device=self.parameters[0].device, dtype=self.parameters[0].dtype)
        for x, y in self.batches:
            grads = torch.autograd.grad(LOSS(self.model(x), y), self.parameters)
            total += torch.cat([g.reshape(-1) for g in grads]) * (len(y) / self.num_samples)
        return total

    @torch.no_grad()
    def describe(self) -> str:
        hits = sum((self.model(x).argmax(1) == y).sum().item() for x, y in self.batches)
        loss = sum(LOSS(self.model(x), y).item() * len(y) for x, y in self.batches) / self.num_samples
        sizes = f"P = {self.num_parameters:,}, n = {self.num_samples:,} in {len(self.batches)} batches"
        return f"{self.name}: {sizes}, loss {loss:.4f}, accuracy {hits / self.num_samples:.3f}"


def digits(samples: int, side: int, *, colour: bool = False, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images (samples, 1 or 3, side, side) and labels (samples,)."""
    rng = torch.Generator().manual_seed(seed)
    bundled = load_digits()
    pick = torch.randint(len(bundled.target), (samples,), generator=rng)
    small = torch.as_tensor(bundled.images, dtype=torch.float32)[pick, None] / 16
    large = interpolate(small, size=side - 4, mode="bilinear", align_corners=False)
    shifts = torch.randint(5, (samples, 2), generator=rng)
    images = torch.zeros(samples, 1, side, side)
    for image, digit, (i, j) in zip(images, large, shifts.tolist(), strict=True):
        image[:, i : i + side - 4, j : j + side - 4] = digit
    if colour:
        ink, paper = torch.rand(2, samples, 3, 1, 1, generator=rng)
        images = paper + (ink - paper) * images
    images += 0.1 * torch.randn(images.shape, generator=rng)
    return (images - images.mean()) / images.std(), torch.as_tensor(bundled.target)[pick]


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def lenet5() -> nn.Sequential:
    features = [nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU()]
    return nn.Sequential(*features, nn.MaxPool2d(2), *mlp(400, 120, 84, 10))


def vgg16() -> nn.Sequential:
    layers, channels = [], 3
    for width in VGG16:
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()] if width else [nn.MaxPool2d(2)]
        channels = width or channels
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return nn.Sequential(*layers, *mlp(512, 512, 10))


def load(name: str, samples: int, *, batch_size: int = 512, device: str = "cpu", width: int = 256) -> Case:
    """The trained case "mlp" (784-width-width-10), "lenet5" or "vgg16"."""
    x, y = (t.to(device) for t in digits(samples, 32 if name == "vgg16" else 28, colour=name == "vgg16"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        make = {"mlp": lambda: mlp(784, width, width, 10), "lenet5": lenet5, "vgg16": vgg16}[name]
        model = make().to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-4 if name == "vgg16" else 1e-3)
        for _ in range(40 if name == "vgg16" else 5):
            for rows in torch.randperm(samples).split(128):
                optimizer.zero_grad()
                LOSS(model(x[rows]), y[rows]).backward()
                optimizer.step()
    model.zero_grad()
    return Case(name, model.eval(), list(zip(x.split(batch_size), y.split(batch_size), strict=True)))
