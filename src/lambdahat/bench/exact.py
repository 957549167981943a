"""Exact answers in float64 that use neither our estimators nor a peer: what "error" means."""

from __future__ import annotations

import copy

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from lambdahat._core.check import require
from lambdahat.bench.problems import LOSS, Case


def double(case: Case) -> Case:
    """The case in float64."""
    return Case(
        case.name, copy.deepcopy(case.model).double(), [(x.double(), y) for x, y in case.batches]
    )


def trace(case: Case) -> float:
    """tr H: of a perceptron by the recursion over its layers, of another ReLU network through tr
    H = tr GGN.
    """
    flat = all(
        isinstance(layer, nn.Flatten | nn.Linear | nn.ReLU | nn.Tanh)
        for layer in case.model.children()
    )
    return perceptron_trace(case) if flat else piecewise_trace(case)


def perceptron_trace(case: Case) -> float:
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
        total += float(
            ((a.square().sum(1) + 1) * (factor.square().sum((1, 2)) + diagonal.sum(1))).sum()
        )
        if number:
            slope = 1 - a.square() if smooth else (a > 0).to(a)
            bend = -2 * a * slope if smooth else torch.zeros_like(a)
            weight = layers[number].weight
            gradient = gradient @ weight
            factor = slope.unsqueeze(2) * (weight.T @ factor)
            diagonal = slope.square() * (diagonal @ weight.square()) + bend * gradient
            gradient = gradient * slope
    return total


def piecewise_trace(case: Case, chunk: int = 16) -> float:
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

    parts = [vmap(one)(piece).sum() for x, _ in case.batches for piece in x.split(chunk)]
    return sum(float(part) for part in parts) / case.num_samples


def product(case: Case, v: Tensor) -> Tensor:
    """H @ v (P,) by plain double backward; ``case`` in float64 makes it the reference."""
    total, params = torch.zeros_like(v), case.parameters
    for x, y in case.batches:
        grads = torch.autograd.grad(LOSS(case.model(x), y), params, create_graph=True)
        flat = torch.cat([g.reshape(-1) for g in grads])
        columns = torch.autograd.grad(flat, params, v)
        total += torch.cat([c.reshape(-1) for c in columns]) * (len(y) / case.num_samples)
    return total


def gauss_newton_product(case: Case, v: Tensor) -> Tensor:
    """GGN @ v (P,): Jᵀ·(diag p − p pᵀ)·J v, J v by the double-backward trick."""
    total, params = torch.zeros_like(v), case.parameters
    pieces = [
        piece.view_as(p)
        for piece, p in zip(v.split([p.numel() for p in params]), params, strict=True)
    ]
    for x, _ in case.batches:
        output = case.model(x)
        dummy = torch.zeros_like(output, requires_grad=True)
        back = torch.autograd.grad(output, params, dummy, create_graph=True)
        (jv,) = torch.autograd.grad(back, dummy, pieces)
        p = output.detach().softmax(1)
        columns = torch.autograd.grad(output, params, p * jv - p * (p * jv).sum(1, keepdim=True))
        total += torch.cat([c.reshape(-1) for c in columns]) / case.num_samples
    return total


def top_eigenvalues(case: Case, k: int) -> Tensor:
    """The k largest (k,), largest first, by ARPACK to machine precision on a plain
    double-backward product.
    """
    case = double(case)

    def apply(v: np.ndarray) -> np.ndarray:
        return product(case, torch.as_tensor(np.ravel(v), device=case.device)).cpu().numpy()

    size = case.num_parameters
    values = eigsh(
        LinearOperator((size, size), apply, dtype=np.float64),
        k=k,
        which="LA",
        return_eigenvectors=False,
    )
    return torch.as_tensor(np.sort(values)[::-1].copy())


def kronecker_solution(case: Case, gradient: Tensor, damping: float) -> Tensor:
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


def _layer_factors(case: Case, layer: nn.Linear) -> tuple[Tensor, Tensor]:
    seen: list[tuple[Tensor, Tensor]] = []
    handle = layer.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output)))
    A = torch.zeros(
        layer.in_features + 1, layer.in_features + 1, dtype=torch.float64, device=case.device
    )
    G = torch.zeros(layer.out_features, layer.out_features, dtype=torch.float64, device=case.device)
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
