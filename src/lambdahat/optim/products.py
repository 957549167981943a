"""Products with the Hessian of a training batch, for rules that need them between backward and
step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lambdahat._core.check import require
from lambdahat.krylov import lanczos
from lambdahat.operators.base import LinearOperator
from lambdahat.problem.network import require_true_second_derivative

Product = Callable[[list[Tensor]], list[Tensor]]


class BatchProduct:
    """v ↦ H v at the current parameters, by differentiating gradients again; vectors are lists
    shaped as parameters.

    ``graphs`` are the gradients of one or more losses, each with its graph (``create_graph=True``,
    None where a loss does not depend on a parameter); H is the Hessian of their sum. A product
    costs about one more backward pass.
    """

    def __init__(
        self, parameters: Sequence[Tensor], graphs: Sequence[Sequence[Tensor | None]]
    ) -> None:
        self.parameters, self.graphs = list(parameters), [list(graph) for graph in graphs]

    def __call__(self, vectors: list[Tensor]) -> list[Tensor]:
        """H v."""
        return [part.detach() for part in self._multiply(vectors, create_graph=False)]

    def third(self, vectors: list[Tensor]) -> list[Tensor]:
        """∇³L[v, v, ·] = ∇(vᵀH(θ)v) with v held, by a third differentiation."""
        held = [vector.detach() for vector in vectors]
        curved = self._multiply(held, create_graph=True)
        return [part.detach() for part in self._differentiate(curved, held, create_graph=False)]

    @property
    def gradient(self) -> list[Tensor]:
        """∇L, without its graph."""
        out = [torch.zeros_like(parameter) for parameter in self.parameters]
        for graph in self.graphs:
            out = [
                total if part is None else total + part.detach()
                for total, part in zip(out, graph, strict=True)
            ]
        return out

    def _multiply(self, vectors: list[Tensor], create_graph: bool) -> list[Tensor]:
        out = [torch.zeros_like(parameter) for parameter in self.parameters]
        for graph in self.graphs:
            parts = self._differentiate(graph, vectors, create_graph)
            out = [total + part for total, part in zip(out, parts, strict=True)]
        return out

    def _differentiate(
        self, values: Sequence[Tensor | None], vectors: list[Tensor], create_graph: bool
    ) -> tuple[Tensor, ...]:
        """∇ Σ vᵀ·values; 0 where nothing depends on the parameters, as the gradient of a linear
        loss.
        """
        pairs = [
            (g, v)
            for g, v in zip(values, vectors, strict=True)
            if g is not None and g.requires_grad
        ]
        if not pairs:
            return tuple(torch.zeros_like(parameter) for parameter in self.parameters)
        return torch.autograd.grad(
            [g for g, _ in pairs],
            self.parameters,
            [v.detach() for _, v in pairs],
            create_graph=create_graph,
            retain_graph=True,
            materialize_grads=True,
        )


def batch_product(loss: Tensor, parameters: Sequence[Tensor]) -> BatchProduct:
    """The product closure of a batch's ``loss``, a scalar with its graph: ``product(v)`` is H v on
    that batch.

    Take it before ``loss.backward()``, and give that ``retain_graph=True``; or spare that pass, for
    ``product.gradient`` is what it would leave in ``.grad``. A model with weight norm is run within
    ``true_second_derivatives(model)``, for torch's own kernel has a wrong second derivative.

    >>> weight = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> product = batch_product((weight**3).sum(), [weight])
    >>> product([torch.ones(2)])
    [tensor([ 6., 12.])]
    """
    require(
        isinstance(loss, Tensor) and loss.ndim == 0,
        "loss",
        "be a scalar tensor",
        loss,
        "take its mean",
    )
    require(
        loss.requires_grad,
        "loss",
        "have its graph",
        "a tensor without one",
        "call batch_product before backward(), outside torch.no_grad()",
    )
    require_true_second_derivative(loss)
    trained = list(parameters)
    return BatchProduct(
        trained, [torch.autograd.grad(loss, trained, create_graph=True, allow_unused=True)]
    )


def absolute_product(product: Product, vectors: list[Tensor], depth: int) -> list[Tensor]:
    """|H| v, where |H| has the absolute eigenvalues of H: ‖v‖·Q|T|e₁ from ``depth`` Lanczos steps
    that start at v.

    One product a step; exact where ``depth`` reaches the number of distinct eigenvalues that v has
    a part in.
    """
    flat = torch.cat([vector.detach().reshape(-1) for vector in vectors])
    length = torch.linalg.vector_norm(flat)
    if not length > 0:
        return [torch.zeros_like(vector) for vector in vectors]
    found = lanczos(_Flat(product, vectors), flat, min(depth, len(flat)), task="|H|θ")
    values, rotation = torch.linalg.eigh(
        torch.diag(found.alpha) + torch.diag(found.beta, 1) + torch.diag(found.beta, -1)
    )
    weights = rotation @ (values.abs() * rotation[0])
    return shaped(length * (found.basis @ weights.to(found.basis)), vectors)


def dense_hessian(product: Product, parameters: Sequence[Tensor]) -> Tensor:
    """H (P, P), one product a column: for small models."""
    return _Flat(product, parameters).dense()


class _Flat(LinearOperator):
    """A product on lists of tensors as an operator on flat vectors."""

    def __init__(self, product: Product, like: Sequence[Tensor]) -> None:
        size = sum(tensor.numel() for tensor in like)
        super().__init__(size, like[0].dtype, like[0].device)
        self.product, self.like = product, list(like)

    def _apply(self, block: Tensor) -> Tensor:
        columns = [self.product(shaped(column, self.like)) for column in block.T]
        return torch.stack(
            [torch.cat([part.reshape(-1) for part in column]) for column in columns], dim=1
        )


def shaped(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """A flat vector (P,) as tensors of the shapes of ``like``."""
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.reshape(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
