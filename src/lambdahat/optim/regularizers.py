"""The regularizers of Table 4.1 of the regularization thesis, as small objects beside any
optimiser.

A rule adds its term to every ``.grad`` between ``backward()`` and ``step()``; several are used one
after the other::

    product = batch_product(loss, parameters)        # only where a rule needs one
    loss.backward(retain_graph=True)                  # which the product still needs
    for rule in rules:
        rule.add_to(parameters, product, step)
    optimizer.step()
    for rule in rules:
        rule.after_step(parameters, lr)

With ``decoupled=True`` the term skips the optimiser: it is taken at the parameters before the step
and subtracted from them after it, θ ← θ − α∇L − λ·term(θ) with SGD. That is how Table 4.1 writes
the rules: its λ is a rate of its own beside the learning rate α. Otherwise the term is part of the
gradient, and SGD moves by αλ·term(θ).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor, nn

from lambdahat._core import check
from lambdahat._core.device import pull_back
from lambdahat.krylov import lanczos
from lambdahat.operators.base import LinearOperator
from lambdahat.operators.linearise import nodes_below, through_norms
from lambdahat.optim.registry import register_regularizer
from lambdahat.problem.problem import Space

Product = Callable[[list[Tensor]], list[Tensor]]
Tensors = Sequence[Tensor]


class BatchProduct:
    """v ↦ Hv at the current parameters, by double differentiation; vectors are lists shaped like
    the parameters.

    ``graphs`` are the gradients of one or more losses, each with its graph (``create_graph=True``,
    None where a loss does not depend on a parameter); H is the Hessian of their sum. A product
    costs about one more backward pass.
    """

    def __init__(self, parameters: Tensors, graphs: Sequence[Sequence[Tensor | None]]) -> None:
        self.parameters, self.graphs = list(parameters), [list(graph) for graph in graphs]

    def __call__(self, vectors: list[Tensor]) -> list[Tensor]:
        """H v."""
        return [part.detach() for part in self._multiply(vectors, create_graph=False)]

    def third(self, vectors: list[Tensor]) -> list[Tensor]:
        """∇³L[v, v, ·] = ∇(vᵀH(θ)v) with v held, by a third differentiation."""
        roots = [part.grad_fn for graph in self.graphs for part in graph if part is not None]
        got = "one through a layer norm, or a batch norm in training mode, where PyTorch's is wrong"
        cure = "use nn.GroupNorm(1, …), or leave out what needs that derivative"
        true = not through_norms(nodes_below(roots))
        check.require(true, "the loss", "have a true third derivative", got, cure)
        held = [vector.detach() for vector in vectors]
        curved = self._multiply(held, create_graph=True)
        return [part.detach() for part in self._differentiate(curved, held, create_graph=False)]

    @property
    def gradient(self) -> list[Tensor]:
        """∇L, without its graph."""
        out = [torch.zeros_like(parameter) for parameter in self.parameters]
        for graph in self.graphs:
            for index, part in enumerate(graph):
                if part is not None:
                    out[index] = out[index] + part.detach()
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
        """∇ Σ vᵀ·values; 0 where nothing depends on the parameters, as for a linear loss."""
        outputs, weights = [], []
        for value, vector in zip(values, vectors, strict=True):
            if value is not None and value.requires_grad:
                outputs.append(value)
                weights.append(vector.detach())
        if not outputs:
            return tuple(torch.zeros_like(parameter) for parameter in self.parameters)
        options = {"create_graph": create_graph, "retain_graph": True, "materialize_grads": True}
        return pull_back(outputs, self.parameters, weights, **options)


def batch_product(loss: Tensor, parameters: Tensors) -> BatchProduct:
    """Return ``product(v)`` = Hv for the Hessian of a batch's ``loss``, a scalar with its graph.

    Call it before ``loss.backward(retain_graph=True)``, or skip that pass: ``product.gradient`` is
    what it would leave in ``.grad``. A model with weight norm is run within
    ``true_second_derivatives(model)``, for torch's own kernel has a wrong second derivative.

    >>> weight = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> product = batch_product((weight**3).sum(), [weight])
    >>> product([torch.ones(2)])
    [tensor([ 6., 12.])]
    """
    if not isinstance(loss, Tensor) or loss.ndim != 0:
        raise ValueError(f"loss must be a scalar tensor, got {check.describe(loss)}; take its mean")
    cure = "call batch_product before backward(), outside torch.no_grad()"
    check.require(loss.requires_grad, "loss", "have its graph", "a tensor without one", cure)
    nodes = nodes_below([loss.grad_fn])
    kernel = any(node.name().startswith("WeightNormInterfaceBackward") for node in nodes)
    got = "one through torch's weight_norm, whose kernel holds ‖v‖ constant in it"
    cure = "run the model within lambdahat.optim.true_second_derivatives(model)"
    check.require(not kernel, "loss", "have a true second derivative", got, cure)
    trained = list(parameters)
    graph = torch.autograd.grad(loss, trained, create_graph=True, allow_unused=True)
    return BatchProduct(trained, [graph])


def absolute_product(product: Product, vectors: list[Tensor], depth: int) -> list[Tensor]:
    """|H| v, |H| of absolute eigenvalues: ‖v‖·Q|T|e₁ from ``depth`` Lanczos steps from v.

    Exact where ``depth`` reaches the number of distinct eigenvalues that v has a part in.
    """
    flat = torch.cat([vector.detach().reshape(-1) for vector in vectors])
    length = torch.linalg.vector_norm(flat)
    if not length > 0:
        return [torch.zeros_like(vector) for vector in vectors]
    run = lanczos(_Flat(product, vectors), flat, min(depth, len(flat)), task="|H|θ")
    values, rotation = torch.linalg.eigh(run.tridiagonal)
    weights = rotation @ (values.abs() * rotation[0])
    return reshape_like(length * (run.basis @ weights.to(run.basis)), vectors)


def dense_hessian(product: Product, parameters: Tensors) -> Tensor:
    """H (P, P), one product a column: for small models."""
    return _Flat(product, parameters).dense()


class _Flat(LinearOperator):
    """A product on lists of tensors as an operator on flat vectors."""

    def __init__(self, product: Product, like: Tensors) -> None:
        size = sum(tensor.numel() for tensor in like)
        super().__init__(size, like[0].dtype, like[0].device)
        self.product, self.like = product, list(like)

    def _apply(self, block: Tensor) -> Tensor:
        columns = [self.product(reshape_like(column, self.like)) for column in block.T]
        flat = [torch.cat([part.reshape(-1) for part in column]) for column in columns]
        return torch.stack(flat, dim=1)


def reshape_like(flat: Tensor, like: Tensors) -> list[Tensor]:
    """A flat vector (P,) as tensors of the shapes of ``like``."""
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.reshape(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


MAKE_PRODUCT = "make it with lambdahat.optim.batch_product(loss, parameters)"
READINGS = ("hessian_vector", "absolute_hessian")
TOP = 1e-6  # eigenvalues below this share of the largest are left out of log|H|


class Rule(ABC):
    """A regularizer: ``term`` is added to the gradient, a function of the parameters and Hθ."""

    needs_product = False

    def __init__(self, rate: float, decoupled: bool = False) -> None:
        self.rate, self.decoupled = check.require_number(rate, "rate", "[0, inf)"), bool(decoupled)
        self._held: list[Tensor] = []

    @abstractmethod
    def term(self, parameters: Tensors, curvature: Tensors, step: int) -> list[Tensor]:
        """The term added to each gradient; ``curvature`` is Hθ, empty if no product is needed."""

    def curvature(self, parameters: Tensors, product: Product | None, step: int) -> list[Tensor]:
        """Hθ, or what the rule uses in its place."""
        if not self.needs_product:
            return []
        return require_product(product, self)(list(parameters))

    @torch.no_grad()
    def add_to(self, parameters: Tensors, product: Product | None, step: int) -> None:
        """Add the term to every ``.grad``, or keep it for ``after_step`` if decoupled."""
        with torch.enable_grad():  # a product differentiates
            held = [parameter.detach() for parameter in parameters]
            curvature = self.curvature(held, product, step)
        terms = self.term(parameters, curvature, step)
        if self.decoupled:
            self._held = [term.clone() for term in terms]
            return
        for parameter, term in zip(parameters, terms, strict=True):
            if parameter.grad is None:
                parameter.grad = term.clone()
            else:
                parameter.grad.add_(term)

    @torch.no_grad()
    def after_step(self, parameters: Tensors, lr: float) -> None:
        """Subtract the term that ``add_to`` kept. Its rate is its own: ``lr`` plays no part."""
        held, self._held = self._held, []
        for parameter, term in zip(parameters, held, strict=bool(held)):
            parameter.sub_(term)

    def __repr__(self) -> str:
        own = [f"{name}={value!r}" for name, value in vars(self).items() if name[0] != "_"]
        return f"{type(self).__name__}({', '.join(own)})"


@register_regularizer("l1")
class L1(Rule):
    """λ·sign(θ), the gradient of λ‖θ‖₁."""

    def term(self, parameters: Tensors, curvature: Tensors, step: int) -> list[Tensor]:
        return [self.rate * parameter.sign() for parameter in parameters]


@register_regularizer("l2")
class L2(Rule):
    """λθ, the gradient of ½λ‖θ‖²."""

    def term(self, parameters: Tensors, curvature: Tensors, step: int) -> list[Tensor]:
        return [self.rate * parameter for parameter in parameters]


@register_regularizer("metric")
class Metric(Rule):
    """λHθ, which shrinks the Riemannian length ½θᵀHθ with H held constant (§3.8): one product per
    step.

    ``reading="absolute_hessian"`` takes |H|θ by ``depth`` Lanczos steps instead (§4.3; Dauphin et
    al. 2014), which a direction of negative curvature cannot lengthen. For small models two more
    terms make the rule the gradient of all of Eq. 3.5, ½θᵀHθ − ½ log|H|, with H a function of θ:

    - ``third_derivative``: ½∇³L[θ, θ, ·], so that the term is the whole gradient of ½θᵀH(θ)θ; one
      more product and one differentiation. The thesis leaves it out.
    - ``log_determinant``: −½ tr(H⁻¹∇³L), as §3.5 prints; P products and as many third derivatives.
      Flat directions, eigenvalues below 1e-6 of the largest, are left out, as §3.6 proposes.
    """

    needs_product = True

    def __init__(
        self,
        rate: float,
        reading: str = "hessian_vector",
        depth: int = 20,
        third_derivative: bool = False,
        log_determinant: bool = False,
        decoupled: bool = False,
    ) -> None:
        super().__init__(rate, decoupled)
        self.reading = check.require_choice(reading, "reading", READINGS)
        self.depth = check.require_count(depth, "depth")
        self.third_derivative, self.log_determinant = bool(third_derivative), bool(log_determinant)
        exact = self.third_derivative or self.log_determinant
        if exact and self.reading != READINGS[0]:
            raise ValueError(
                f"reading must be {READINGS[0]!r} with third derivatives, got {reading!r}; |H|θ is"
                " the gradient of nothing simple"
            )

    def curvature(self, parameters: Tensors, product: Product | None, step: int) -> list[Tensor]:
        held = require_product(product, self)
        out = curvature_term(held, parameters, self.reading, self.depth)
        if self.third_derivative:
            out = _sum(out, require_third(held).third(list(parameters)), 0.5)
        if self.log_determinant:
            out = _sum(out, _log_determinant_gradient(require_third(held), parameters), -0.5)
        return out

    def term(self, parameters: Tensors, curvature: Tensors, step: int) -> list[Tensor]:
        return [self.rate * part for part in curvature]


@register_regularizer("selective-l2")
class SelectiveL2(Rule):
    """λθ_i where |(Hθ)_i| < ω·max_j |(Hθ)_j|, the maximum over i's layer; 0 elsewhere (Table 4.1).

    It spares the parameters that matter most to the loss. ω = 0 spares all of them, which is the
    base optimiser; ω = ∞ spares none, which is L2. ``layers`` names the layer of each parameter, as
    ``layers_of(model)`` does; by default every tensor is a layer of its own.
    ``reading="absolute_hessian"`` compares |(|H|θ)_i|, by ``depth`` Lanczos steps.
    """

    needs_product = True

    def __init__(
        self,
        rate: float,
        omega: float,
        reading: str = "hessian_vector",
        depth: int = 20,
        layers: Sequence[Hashable] | None = None,
        decoupled: bool = False,
    ) -> None:
        super().__init__(rate, decoupled)
        self.omega = check.require_number(omega, "omega", "[0, inf]")
        self.reading = check.require_choice(reading, "reading", READINGS)
        self.depth = check.require_count(depth, "depth")
        self.layers = None if layers is None else tuple(layers)

    def curvature(self, parameters: Tensors, product: Product | None, step: int) -> list[Tensor]:
        return curvature_term(require_product(product, self), parameters, self.reading, self.depth)

    def term(self, parameters: Tensors, curvature: Tensors, step: int) -> list[Tensor]:
        if math.isinf(self.omega):
            return [self.rate * parameter for parameter in parameters]
        sizes = [part.abs() for part in curvature]
        limits = [self.omega * largest for largest in self._largest(sizes)]
        return [
            self.rate * parameter * (size < limit)
            for parameter, size, limit in zip(parameters, sizes, limits, strict=True)
        ]

    def _largest(self, sizes: Tensors) -> list[Tensor]:
        """The maximum over the layer that each parameter belongs to."""
        layers = self.layers or range(len(sizes))
        expected = f"name the layer of each of the {len(sizes)} parameters"
        cure = "make them with layers_of(model)"
        check.require(len(layers) == len(sizes), "layers", expected, f"{len(layers)} names", cure)
        own = [size.amax() if size.numel() else size.new_zeros(()) for size in sizes]
        largest: dict[Hashable, Tensor] = {}
        for layer, value in zip(layers, own, strict=True):
            largest[layer] = torch.maximum(largest[layer], value) if layer in largest else value
        return [largest[layer] for layer in layers]


@register_regularizer("stopped-l2")
class StoppedL2(L2):
    """λθ for the first ``tau`` steps, then nothing (Table 4.1; the thesis counts epochs)."""

    def __init__(self, rate: float, tau: int, decoupled: bool = False) -> None:
        super().__init__(rate, decoupled)
        self.tau = check.require_count(tau, "tau", least=0)

    def term(self, parameters: Tensors, curvature: Tensors, step: int) -> list[Tensor]:
        scale = self.rate if step < self.tau else 0.0
        return [scale * parameter for parameter in parameters]


@register_regularizer("stopped-selective-l2")
class StoppedThenSelectiveL2(SelectiveL2):
    """λθ for ``tau`` steps, then Selective L2 with ``selective_rate`` (Table 4.1)."""

    def __init__(
        self,
        rate: float,
        tau: int,
        omega: float,
        selective_rate: float | None = None,
        reading: str = "hessian_vector",
        depth: int = 20,
        layers: Sequence[Hashable] | None = None,
        decoupled: bool = False,
    ) -> None:
        self.early_rate = check.require_number(rate, "rate", "[0, inf)")
        self.tau = check.require_count(tau, "tau", least=0)
        later = rate
        if selective_rate is not None:
            later = check.require_number(selective_rate, "selective_rate", "[0, inf)")
        super().__init__(later, omega, reading, depth, layers, decoupled)

    def curvature(self, parameters: Tensors, product: Product | None, step: int) -> list[Tensor]:
        return [] if step < self.tau else super().curvature(parameters, product, step)

    def term(self, parameters: Tensors, curvature: Tensors, step: int) -> list[Tensor]:
        if step < self.tau:
            return [self.early_rate * parameter for parameter in parameters]
        return super().term(parameters, curvature, step)


def layers_of(model: nn.Module) -> tuple[str, ...]:
    """The layer that each parameter of ``model`` that requires a gradient belongs to, by the name
    of the module that owns it.

    >>> layers_of(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)))
    ('0', '0', '2', '2')
    """
    space = Space.of({name: p for name, p in model.named_parameters() if p.requires_grad})
    owner = {name: layer for layer, names in space.layers().items() for name in names}
    return tuple(owner[name] for name in space.names)


def curvature_term(product: Product, parameters: Tensors, reading: str, depth: int) -> list[Tensor]:
    """Hθ by one product, or |H|θ by ``depth`` of them."""
    if reading == "hessian_vector":
        return product(list(parameters))
    return absolute_product(product, list(parameters), depth)


def _log_determinant_gradient(product: BatchProduct, parameters: Tensors) -> list[Tensor]:
    """∇log|H| = tr(H⁻¹∇³L) = Σ_m ∇³L[u_m, u_m, ·]/λ_m over the eigenpairs that are not flat."""
    values, vectors = torch.linalg.eigh(dense_hessian(product, parameters))
    out = [torch.zeros_like(parameter) for parameter in parameters]
    for value, vector in zip(values, vectors.T, strict=True):
        if value.abs() > TOP * values.abs().max():
            out = _sum(out, product.third(reshape_like(vector, parameters)), float(1 / value))
    return out


def _sum(first: Tensors, second: Tensors, factor: float) -> list[Tensor]:
    return [a + factor * b for a, b in zip(first, second, strict=True)]


def require_product(product: Product | None, rule: Rule) -> Product:
    """The product, which the rule cannot do without."""
    function, kind = f"be a function v -> Hv for {type(rule).__name__}", Callable
    check.require_type(product, kind, "product", function, f"{MAKE_PRODUCT}, before backward()")
    assert product is not None
    return product


def require_third(product: Product) -> BatchProduct:
    """A product that can be differentiated once more."""
    expected = "be a BatchProduct where third derivatives are asked for"
    check.require_type(product, BatchProduct, "product", expected, MAKE_PRODUCT)
    assert isinstance(product, BatchProduct)
    return product
