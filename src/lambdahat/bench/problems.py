"""The trained networks that every row is measured on, made here from the digits of the package,
from fixed seeds.

The digits (8 × 8) are enlarged to 28 × 28, or to 3 × 32 × 32 in random colours for VGG-16, shifted
at random and with pixel noise, so that any number of samples can be drawn. Each network is trained
for a few epochs on them, so that its Hessian has a trained network's outliers.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn.functional import cross_entropy, interpolate

from lambdahat._core.check import require
from lambdahat._core.rng import generator
from lambdahat.data import digits
from lambdahat.models import lenet5, mlp, vgg16
from lambdahat.problem import Problem

LOSS = nn.CrossEntropyLoss()
EPOCHS = {"vgg16": 40}
RATES = {"vgg16": 2e-4}


@dataclass(frozen=True)
class BenchCase:
    """A trained network with the one list of batches that everyone reads."""

    name: str
    model: nn.Module
    batches: list[tuple[Tensor, Tensor]]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the network, in its order."""
        return list(self.model.parameters())

    @property
    def num_parameters(self) -> int:
        """The number of parameters P."""
        return sum(p.numel() for p in self.parameters)

    @property
    def num_samples(self) -> int:
        """The number of samples n."""
        return sum(len(y) for _, y in self.batches)

    @property
    def device(self) -> torch.device:
        """Where network and data are."""
        return self.parameters[0].device

    def whole(self) -> tuple[Tensor, Tensor]:
        """All data in one piece."""
        images, labels = zip(*self.batches, strict=True)
        return torch.cat(images), torch.cat(labels)

    def one_batch(self, size: int) -> BenchCase:
        """The case on its first ``size`` samples alone."""
        x, y = self.whole()
        return replace(self, batches=[(x[:size], y[:size])])

    def problem(self) -> Problem:
        """The case as a ``Problem``."""
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


def images(samples: int, side: int, *, colour: bool = False) -> tuple[Tensor, Tensor]:
    """Images (samples, 1 or 3, side, side) and labels (samples,)."""
    rng = generator(0, "bench images")
    pixels, labels = digits()
    pick = torch.randint(len(labels), (samples,), generator=rng)
    small, size = pixels[pick].view(-1, 1, 8, 8), side - 4
    large = interpolate(small, size=size, mode="bilinear", align_corners=False)
    shifts = torch.randint(5, (samples, 2), generator=rng)
    out = torch.zeros(samples, 1, side, side)
    for image, digit, (i, j) in zip(out, large, shifts.tolist(), strict=True):
        image[:, i : i + size, j : j + size] = digit
    if colour:
        ink, paper = torch.rand(2, samples, 3, 1, 1, generator=rng)
        out = paper + (ink - paper) * out
    out = out + 0.1 * torch.randn(out.shape, generator=rng)
    return (out - out.mean()) / out.std(), labels[pick]


def network(name: str, width: int) -> nn.Module:
    """The network by name: "mlp" and "tanh" are 784-width-width-10."""
    if name == "lenet5":
        return lenet5()
    if name == "vgg16":
        return vgg16(dropout=0.0)
    activation = "tanh" if name == "tanh" else "relu"
    return nn.Sequential(nn.Flatten(), *mlp([784, width, width, 10], activation))


def load(
    name: str, samples: int, *, batch_size: int, device: str = "cpu", width: int = 256
) -> BenchCase:
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
    batches = zip(x.split(batch_size), y.split(batch_size), strict=True)
    return BenchCase(name, model.eval(), list(batches))


def double(case: BenchCase) -> BenchCase:
    """The case in float64; tokens stay what they are."""
    batches = [(x.double() if x.is_floating_point() else x, y) for x, y in case.batches]
    return BenchCase(case.name, copy.deepcopy(case.model).double(), batches)


def trace(case: BenchCase) -> float:
    """tr H: of a perceptron by recursion over layers, of other ReLU networks as tr GGN."""
    kinds = nn.Flatten | nn.Linear | nn.ReLU | nn.Tanh
    flat = all(isinstance(layer, kinds) for layer in case.model.children())
    return perceptron_trace(case) if flat else piecewise_trace(case)


def perceptron_trace(case: BenchCase) -> float:
    """tr H of a perceptron of at most two hidden layers, z = Wa + b, a' = φ(z), by hand: without
    autograd.

    ∂²ℓ/∂W_ij² = a_j²·∂²ℓ/∂z_i², so a layer adds (‖a‖² + 1)·tr ∂²ℓ/∂z² for each sample. With S =
    ∂²ℓ/∂z² of the next layer and g = ∂ℓ/∂a', that of this one is diag(φ')·WᵀSW·diag(φ') +
    diag(φ''·g). It is kept as FFᵀ + diag(d); of WᵀDW only the diagonal is carried on, which is all
    that the traces of two hidden layers need.
    """
    case = double(case)
    layers = [layer for layer in case.model.children() if isinstance(layer, nn.Linear)]
    require(len(layers) <= 3, "case", "have at most two hidden layers", str(len(layers) - 1))
    smooth = any(isinstance(layer, nn.Tanh) for layer in case.model.children())
    with torch.no_grad():
        parts = [_batch_trace(layers, x.flatten(1), y, smooth) for x, y in case.batches]
    return sum(parts) / case.num_samples


def _batch_trace(layers: list[nn.Linear], inputs: Tensor, labels: Tensor, smooth: bool) -> float:
    """Σ over the samples of a batch."""
    seen = [inputs]
    for layer in layers[:-1]:
        z = layer(seen[-1])
        seen.append(z.tanh() if smooth else z.relu())
    p = layers[-1](seen[-1]).softmax(1)
    gradient = p - nn.functional.one_hot(labels, p.shape[1])
    root = p.sqrt()
    factor = root.diag_embed() - p.unsqueeze(2) * root.unsqueeze(1)  # its square is diag p − ppᵀ
    diagonal = torch.zeros_like(p)
    total = 0.0
    for number in reversed(range(len(layers))):
        a = seen[number]
        traces = factor.square().sum((1, 2)) + diagonal.sum(1)
        total += float(((a.square().sum(1) + 1) * traces).sum())
        if number:
            slope = 1 - a.square() if smooth else (a > 0).to(a)
            bend = -2 * a * slope if smooth else torch.zeros_like(a)
            weight = layers[number].weight
            gradient = gradient @ weight
            factor = slope.unsqueeze(2) * (weight.T @ factor)
            diagonal = slope.square() * (diagonal @ weight.square()) + bend * gradient
            gradient = gradient * slope
    return total


def piecewise_trace(case: BenchCase) -> float:
    """tr H of a ReLU network, which is tr GGN = (1/n) Σ_samples Σ_ij (diag p − p pᵀ)_ij ⟨∂f_i,
    ∂f_j⟩.

    The identity holds because such a network is linear in each single weight wherever it is
    differentiable.
    """
    case = double(case)
    params = {name: p.detach() for name, p in case.model.named_parameters()}

    def one(x: Tensor) -> Tensor:
        jacobian = jacrev(lambda p: functional_call(case.model, p, (x[None],))[0])(params)
        gram = torch.stack([j.flatten(1) @ j.flatten(1).T for j in jacobian.values()]).sum(0)
        p = functional_call(case.model, params, (x[None],))[0].softmax(0)
        found: Tensor = ((p.diag() - p.outer(p)) * gram).sum()
        return found

    parts = [vmap(one)(piece).sum() for x, _ in case.batches for piece in x.split(16)]
    return sum(float(part) for part in parts) / case.num_samples


def product(case: BenchCase, v: Tensor) -> Tensor:
    """H @ v (P,) by plain double backward; ``case`` in float64 makes it the reference."""
    total, params = torch.zeros_like(v), case.parameters
    for x, y in case.batches:
        grads = torch.autograd.grad(LOSS(case.model(x), y), params, create_graph=True)
        flat = torch.cat([g.reshape(-1) for g in grads])
        columns = torch.autograd.grad(flat, params, v)
        total += torch.cat([c.reshape(-1) for c in columns]) * (len(y) / case.num_samples)
    return total


def gauss_newton_product(case: BenchCase, v: Tensor) -> Tensor:
    """GGN @ v (P,): Jᵀ·(diag p − p pᵀ)·J v, J v by the double-backward trick."""
    total, params = torch.zeros_like(v), case.parameters
    split = zip(v.split([p.numel() for p in params]), params, strict=True)
    pieces = [piece.view_as(p) for piece, p in split]
    for x, _ in case.batches:
        output = case.model(x)
        dummy = torch.zeros_like(output, requires_grad=True)
        back = torch.autograd.grad(output, params, dummy, create_graph=True)
        (jv,) = torch.autograd.grad(back, dummy, pieces)
        p = output.detach().softmax(1)
        columns = torch.autograd.grad(output, params, p * jv - p * (p * jv).sum(1, keepdim=True))
        targets = sum(y.numel() for _, y in case.batches)
        total += torch.cat([c.reshape(-1) for c in columns]) / targets
    return total


def top_eigenvalues(case: BenchCase, k: int) -> Tensor:
    """The k largest (k,), descending, by ARPACK on a plain double-backward product."""
    case = double(case)

    def apply(v: np.ndarray) -> np.ndarray:
        return product(case, torch.as_tensor(np.ravel(v), device=case.device)).cpu().numpy()

    size = case.num_parameters
    operator = LinearOperator((size, size), apply, dtype=np.float64)
    values = eigsh(operator, k=k, which="LA", return_eigenvectors=False)
    return torch.as_tensor(np.sort(values)[::-1].copy())


def kronecker_solution(case: BenchCase, gradient: Tensor, damping: float) -> Tensor:
    """(K + δI)⁻¹ times a gradient (P,), K the exact KFAC of a perceptron's Fisher, in float64.

    A layer's block is G ⊗ A on [W | b]: A = E[aaᵀ] with a 1 appended, G = E[Σ_c s_c s_cᵀ], s_c =
    √p_c·∂(e_c − p)ᵀz/∂z.
    """
    case = double(case)
    layers = [layer for layer in case.model.children() if isinstance(layer, nn.Linear)]
    sizes = [layer.weight.numel() + layer.out_features for layer in layers]
    factors = [_layer_factors(case, layer) for layer in layers]
    out = []
    for layer, (A, G), piece in zip(layers, factors, gradient.double().split(sizes), strict=True):
        weight, bias = piece.split([layer.weight.numel(), layer.out_features])
        D = torch.cat([weight.view_as(layer.weight), bias.unsqueeze(1)], dim=1)
        (a, U), (g, V) = torch.linalg.eigh(A), torch.linalg.eigh(G)
        D = V @ ((V.T @ D @ U) / (g.unsqueeze(1) * a + damping)) @ U.T
        out += [D[:, :-1].reshape(-1), D[:, -1]]
    return torch.cat(out)


def _layer_factors(case: BenchCase, layer: nn.Linear) -> tuple[Tensor, Tensor]:
    seen: list[tuple[Tensor, Tensor]] = []
    handle = layer.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output)))
    sizes = layer.in_features + 1, layer.out_features
    A, G = (torch.zeros(n, n, dtype=torch.float64, device=case.device) for n in sizes)
    for x, _ in case.batches:
        output = case.model(x)
        inputs, z = seen.pop()
        a = torch.cat([inputs.detach(), inputs.new_ones(len(inputs), 1)], dim=1)
        A += a.T @ a / case.num_samples
        p = output.detach().softmax(1)
        for c in range(output.shape[1]):
            root = p[:, c : c + 1].sqrt() * (torch.eye(output.shape[1]).to(p)[c] - p)
            (back,) = torch.autograd.grad(output, z, root, retain_graph=True)
            G += back.T @ back / case.num_samples
    handle.remove()
    return A, G
