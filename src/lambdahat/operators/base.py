"""The operator, one fixed symmetric matrix known by its products, and its algebra.

A subclass gives ``_apply`` and the facts ``symmetric`` and ``psd``. Everything else wraps: a damped
operator holds an operator, it does not subclass one.
"""

from __future__ import annotations

import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy
import torch
from torch import Tensor

from lambdahat._core.check import describe, message, require
from lambdahat._core.device import default_context
from lambdahat._core.rng import generator
from lambdahat.problem.batches import free_memory
from lambdahat.problem.memory import PASS
from lambdahat.problem.network import Pattern
from lambdahat.problem.problem import Space
from lambdahat.results import Estimate

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator as ScipyOperator

DENSE_CHUNK = 64
FITS = 1 << 28  # bytes of a matrix that are taken without a look at the free memory
# scales 2^±n whose squares and fourth powers no sum takes out of range
ORDINARY = {torch.float64: 150}
ORDINARY_SINGLE = 20  # the same for float32, and for what is computed in it
# the most that a vector is scaled by before a product, 2^±n
INPUT = {torch.float64: 900, torch.float16: 8}
INPUT_SINGLE = 100
CapturableProduct = tuple[Callable[[Tensor], Tensor], torch.cuda.Stream]


class LinearOperator(ABC):
    """A square matrix A of order P = ``dim``, used through ``A @ v`` and ``A @ V``.

    ``symmetric`` and ``psd`` are declared facts; the contract suite in ``tests/operators`` checks
    them. ``matvecs`` counts the products made so far, a block of k columns as k. ``space`` names
    the coordinates, where the operator comes from a problem.
    """

    __array_ufunc__ = None  # so that numpy leaves ``np.float64(2) * A`` to us

    def __init__(
        self,
        dim: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        symmetric: bool = True,
        psd: bool = False,
        space: Space | None = None,
    ) -> None:
        # with its index
        self.dim, self.dtype, self.device = dim, dtype, torch.empty(0, device=device).device
        self.symmetric, self.psd, self.space = symmetric, psd, space
        self.matvecs = 0

    def _take_facts(self, other: LinearOperator, psd: bool | None = None) -> None:
        """Initialise with another operator's order, dtype, device, symmetry and names."""
        psd, facts = other.psd if psd is None else psd, (other.dim, other.dtype, other.device)
        LinearOperator.__init__(self, *facts, symmetric=other.symmetric, psd=psd, space=other.space)

    @property
    def _inner(self) -> list[LinearOperator]:
        """The operators that it holds."""
        return [part for part in vars(self).values() if isinstance(part, LinearOperator)]

    @abstractmethod
    def _apply(self, block: Tensor) -> Tensor:
        """A @ block for a block (P, k) of this operator's dtype and device."""

    @property
    def shape(self) -> tuple[int, int]:
        """(P, P)."""
        return self.dim, self.dim

    def _apply_adjoint(self, block: Tensor) -> Tensor:
        """Aᵀ @ block, for products from the left."""
        if not self.symmetric:
            raise ValueError(
                "the operator right of @ must be symmetric, or a matrix with entries, got"
                f" {self!r}; its transpose is not known"
            )
        return self._apply(block)

    def _multiply(self, other: Any) -> Tensor:
        block = self._operand(other, "right")
        with default_context():
            # inference tensors have no gradients, so they are copied
            own = block.clone() if block.is_inference() else block
            columns = own.reshape(self.dim, -1).to(self.dtype)
            if columns.shape[1] == 0:
                return columns
            self.matvecs += columns.shape[1]
            return self._apply(columns).reshape(block.shape)

    def _multiply_adjoint(self, block: Tensor) -> Tensor:
        """Aᵀ @ block, (P, k)."""
        with default_context():
            columns = (block.clone() if block.is_inference() else block).to(self.dtype)
            if columns.shape[1] == 0:
                return columns
            self.matvecs += columns.shape[1]
            return self._apply_adjoint(columns)

    def _operand(self, given: Any, side: str) -> Tensor:
        """One side of @: real, on the operator's device, (P,) or (P, k) right and (k, P) left."""
        name = f"the {side}-hand side of @"
        # a plain tensor is the common case, and as it should be
        plain = isinstance(given, Tensor) and not given.is_meta
        block: Tensor = given if plain else read_array(given, name)
        shape = f"({self.dim}, k)" if side == "right" else f"(k, {self.dim})"
        length = block.shape[0 if side == "right" else -1] if block.ndim in (1, 2) else None
        require(length == self.dim, name, f"have shape ({self.dim},) or {shape}", block)
        require(block.is_floating_point(), name, "be real floating point", str(block.dtype))
        cure = "move it with .to(operator.device)"
        require(block.device == self.device, name, f"be on {self.device}", str(block.device), cure)
        return block

    def __matmul__(self, other: Any) -> Any:
        if isinstance(other, LinearOperator):
            return Product(self, other)
        if not isinstance(other, Tensor) and _is_structured(other):
            product = self._multiply(self._flatten_parts(other, "right").movedim(0, -1))
            return _like(other, self._named_space(), product.movedim(-1, 0))
        return self._multiply(other)

    def __rmatmul__(self, other: Any) -> Any:
        structured = _is_structured(other)
        rows = self._operand(self._flatten_parts(other, "left") if structured else other, "left")
        product = self._multiply_adjoint(rows.reshape(-1, self.dim).T).T.reshape(rows.shape)
        return _like(other, self._named_space(), product, leading=True) if structured else product

    def _flatten_parts(self, given: Any, side: str) -> Tensor:
        """Tensors by name or in order as (P,), or (k, P) for k vectors, last right and first left
        of @.
        """
        name, space = f"the {side}-hand side of @", self.space
        if space is None:
            raise ValueError(
                f"{name} must be one tensor of {self.dim} rows, got a {type(given).__name__} of"
                " tensors; the operator has no named parameters: join them by torch.cat"
            )
        if isinstance(given, Mapping):
            wrong = sorted(set(space.names) ^ set(given), key=str)
            got = f"{', '.join(map(str, wrong[:5]))} on one side alone"
            require(not wrong, name, "hold a tensor for every parameter of the operator", got)
            given = [given[key] for key in space.names]
        count = len(space.names)
        expected = f"hold {count} tensors, one for each parameter"
        require(len(given) == count, name, expected, f"{len(given)}")
        rows, extra = [], -1
        for key, shape, part in zip(space.names, space.shapes, given, strict=True):
            tensor = own = read_array(part, f"{name}, at {key!r},")
            extra = tensor.ndim - len(shape) if extra < 0 else extra
            if extra == 1 and tensor.ndim and side == "right":
                own = tensor.movedim(-1, 0)
            if extra not in (0, 1) or own.ndim - len(shape) != extra or own.shape[extra:] != shape:
                raise ValueError(
                    f"{name}, at {key!r}, must have shape {shape}, or that and a dimension of k"
                    f" vectors, got {describe(tensor)}"
                )
            rows.append(own.reshape(*own.shape[:extra], -1))
        same = len({row.shape[:-1] for row in rows}) == 1
        require(same, name, "hold as many vectors for each parameter", "different numbers")
        return torch.cat(rows, dim=-1)

    def __add__(self, other: Any) -> LinearOperator:
        return Sum(self, other) if _is_summand(other, "+") else NotImplemented

    __radd__ = __add__

    def __mul__(self, factor: Any) -> LinearOperator:
        number = _number(factor, "the factor of an operator")
        return NotImplemented if number is None else Scaled(self, number)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> LinearOperator:
        number = _number(divisor, "the divisor of an operator")
        require(number != 0, "the divisor", "not be 0", repr(divisor))
        return NotImplemented if number is None else Scaled(self, 1.0 / number)

    def __neg__(self) -> LinearOperator:
        return Scaled(self, -1.0)

    def __sub__(self, other: Any) -> LinearOperator:
        return Sum(self, Scaled(other, -1.0)) if _is_summand(other, "−") else NotImplemented

    def __rsub__(self, other: Any) -> LinearOperator:
        return NotImplemented if not _is_summand(other, "−") else Sum(other, Scaled(self, -1.0))

    def __repr__(self) -> str:
        facts = ("psd" if self.psd else "symmetric") if self.symmetric else "general"
        name, size, dtype = type(self).__name__, f"{self.dim} × {self.dim}", str(self.dtype)[6:]
        return f"{name}({size}, {facts}, {dtype}, {self.device})"

    def known_diagonal(self) -> Tensor | None:
        """The exact diagonal (P,), where it can be had without products."""
        return None

    def known_trace(self) -> float | None:
        """The exact trace, where it can be had without products."""
        diagonal = self.known_diagonal()
        return None if diagonal is None else float(diagonal.double().sum())

    def known_squares(self) -> float | None:
        """tr A², the sum of all squared entries, where it can be had without products."""
        return None

    def known_bounds(self) -> tuple[float, float]:
        """An interval that contains the spectrum and costs no product; its ends may be infinite."""
        return 0.0 if self.psd else -math.inf, math.inf

    def capturable_product(self) -> CapturableProduct | None:
        """A product (P,) → (P,) that a CUDA graph can capture, with its stream, or None."""
        return None

    def columns(self, indices: Sequence[int]) -> Tensor:
        """A[:, indices] (P, k); each column counts as a product unless the entries are known."""
        units = torch.zeros(self.dim, len(indices), dtype=self.dtype, device=self.device)
        units[list(indices), range(len(indices))] = 1.0
        return self._multiply(units)

    def free_memory(self, device: torch.device | None = None) -> int:
        """Free bytes on its device, or on ``device``: the minimum over all ranks."""
        inner = min((part.free_memory(device) for part in self._inner), default=0)
        return inner or free_memory(device or self.device)

    def budget(self) -> int | None:
        """The bytes that all work with it may take, where its problem sets them."""
        inner = [part.budget() for part in self._inner]
        return min((found for found in inner if found is not None), default=None)

    def room(self, share: float) -> float:
        """Bytes for vectors beside it: ``share`` of what is free, or what its budget leaves."""
        budget = self.budget()
        if budget is None:
            return share * self.free_memory()
        inner = {id(part): part for part in self._inner}.values()
        rooms = [part.room(share) for part in inner if part.budget() is not None]
        # each leaves what it keeps itself
        return sum(rooms) - (len(rooms) - 1) * (1 - PASS) * budget

    def column_bytes(self) -> int:
        """Peak bytes for each column of a block during a product, the result included."""
        item = self.dtype.itemsize
        inner = [part.dim * item + part.column_bytes() for part in self._inner]
        return 2 * self.dim * item + max(inner, default=0)

    def sampled_trace(self, tol: float, seed: int, limit: int | None = None) -> Estimate | None:
        """The trace from at most ``limit`` random signals a sample, where those cost least."""
        return None

    def why_no_trace(self) -> str:
        """Why there is no exact trace, where that is known; quoted by errors."""
        return ""

    def control(self) -> LinearOperator | None:
        """A control variate: an operator near this one with known trace and diagonal."""
        return None

    def restrict(self, which: Pattern | Sequence[int] | Tensor) -> LinearOperator:
        """The principal submatrix of named parameters ("layers.0.*") or of given indices."""
        indices, space = self._choose(which)
        return Restricted(self, indices, space)

    def block_diagonal(self, blocks: Mapping[str, Pattern] | None = None) -> LinearOperator:
        """The operator without entries between blocks; by default one block a layer."""
        space = self._named_space()
        if blocks is None:
            return BlockDiagonal(self, space.layers())
        return BlockDiagonal(self, {name: space.select(p) for name, p in blocks.items()})

    def dense(self) -> Tensor:
        """The matrix (P, P), by P products."""
        step = min(self._dense_columns(), self.dim)
        out = torch.empty(self.dim, self.dim, dtype=self.dtype, device=self.device)
        for start in range(0, self.dim, step):
            size = min(step, self.dim - start)
            units = torch.zeros(self.dim, size, dtype=self.dtype, device=self.device)
            units[range(start, start + size), range(size)] = 1.0
            out[:, start : start + size] = self @ units
        return out

    def _dense_columns(self) -> int:
        """How many columns of the matrix to compute at once; refuses one that does not fit."""
        row = self.dim * self.dtype.itemsize
        need, budget = self.dim * row, self.budget()
        if budget is None and need < FITS:
            return DENSE_CHUNK
        room, column = self.room(1.0), row + self.column_bytes()
        if need + column > room:
            left = f"what the problem's memory={budget:,} leaves" if budget else "the free memory"
            raise ValueError(
                f"the matrix of an operator must fit into {left}, {max(room, 0.0):,.0f} bytes, got"
                f" {need:,} bytes for {self!r}; use products with it, or restrict it to fewer"
                " parameters"
            )
        return int(min(DENSE_CHUNK, (room - need) // column))

    def to_scipy(self) -> ScipyOperator:
        """This operator for ``scipy.sparse.linalg``, on numpy arrays."""
        from scipy.sparse.linalg import LinearOperator as ScipyLinearOperator

        def multiply(block: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            given = read_array(block, "the vector").to(self.device, self.dtype)
            return (self @ given).cpu().numpy()  # type: ignore[no-any-return]

        adjoint = multiply if self.symmetric else None
        kind = torch.empty(0, dtype=self.dtype).numpy().dtype
        # matvec, rmatvec, matmat, dtype, rmatmat
        return ScipyLinearOperator(self.shape, multiply, adjoint, multiply, kind, adjoint)

    def _named_space(self) -> Space:
        if self.space is None:
            raise ValueError(
                f"the operator must have named parameters, got {self!r}; select by index instead:"
                " restrict([0, 1, …])"
            )
        return self.space

    def _choose(self, which: Pattern | Sequence[int] | Tensor) -> tuple[Tensor, Space | None]:
        known = isinstance(which, str | Sequence | Tensor | np.ndarray) or callable(which)
        require(known, "which", "be names or a list of integers", which, error=TypeError)
        by_name = isinstance(which, str) or callable(which)
        if isinstance(which, Sequence) and not by_name:
            by_name = len(which) > 0 and isinstance(which[0], str)
        if by_name:
            space = self._named_space()
            names = space.select(which)  # type: ignore[arg-type]
            return space.indices(names).to(self.device), space.subspace(names)
        indices = torch.as_tensor(which, device=self.device)
        real = indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool
        if indices.ndim != 1 or indices.numel() == 0 or real:
            raise ValueError(
                "which must be names or a non-empty 1-D list of integers, got"
                f" {indices.dtype} of shape {tuple(indices.shape)}; for a mask pass"
                " mask.nonzero().flatten()"
            )
        low, high, last = int(indices.min()), int(indices.max()), self.dim - 1
        inside = 0 <= low and high <= last
        require(inside, "which", f"hold indices in [0, {last}]", f"{low} … {high}")
        once = len(indices.unique()) == len(indices)
        require(once, "which", "hold each index once", "repeated indices")
        return indices, None


class Identity(LinearOperator):
    """The identity of order P."""

    def __init__(
        self,
        dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        space: Space | None = None,
    ) -> None:
        super().__init__(dim, dtype, torch.device(device), psd=True, space=space)

    def _apply(self, block: Tensor) -> Tensor:
        return block.clone()

    def known_diagonal(self) -> Tensor:
        return torch.ones(self.dim, dtype=self.dtype, device=self.device)

    def known_trace(self) -> float:
        return float(self.dim)

    def known_squares(self) -> float:
        return float(self.dim)

    def known_bounds(self) -> tuple[float, float]:
        return 1.0, 1.0

    def columns(self, indices: Sequence[int]) -> Tensor:
        found = torch.zeros(self.dim, len(indices), dtype=self.dtype, device=self.device)
        found[list(indices), range(len(indices))] = 1.0
        return found


class Sum(LinearOperator):
    """A + B."""

    def __init__(self, first: LinearOperator, second: LinearOperator) -> None:
        _require_same_order(first, second, "+")
        super().__init__(
            first.dim,
            torch.promote_types(first.dtype, second.dtype),
            first.device,
            symmetric=first.symmetric and second.symmetric,
            psd=first.psd and second.psd,
            space=first.space or second.space,
        )
        self.first, self.second = first, second

    def _apply(self, block: Tensor) -> Tensor:
        total: Tensor = (self.first @ block) + (self.second @ block)
        return total.to(self.dtype)

    def _apply_adjoint(self, block: Tensor) -> Tensor:
        total = self.first._multiply_adjoint(block) + self.second._multiply_adjoint(block)
        return total.to(self.dtype)

    def known_diagonal(self) -> Tensor | None:
        first, second = self.first.known_diagonal(), self.second.known_diagonal()
        return None if first is None or second is None else first + second

    def known_trace(self) -> float | None:
        first, second = self.first.known_trace(), self.second.known_trace()
        return None if first is None or second is None else first + second

    def known_squares(self) -> float | None:
        """tr (A + B)² where one of the two is a multiple of the identity."""
        for plain, shift in ((self.first, self.second), (self.second, self.first)):
            c, squares = multiple_of_identity(shift), plain.known_squares()
            trace = plain.known_trace()
            if c is not None and squares is not None and trace is not None:
                return squares + 2 * c * trace + c * c * self.dim  # c**2 raises where it overflows
        return None

    def known_bounds(self) -> tuple[float, float]:
        """The sum of both (Weyl's inequality)."""
        (a, b), (c, d) = self.first.known_bounds(), self.second.known_bounds()
        return a + c, b + d

    def columns(self, indices: Sequence[int]) -> Tensor:
        before = self.first.matvecs, self.second.matvecs
        found = (self.first.columns(indices) + self.second.columns(indices)).to(self.dtype)
        self.matvecs += max(self.first.matvecs - before[0], self.second.matvecs - before[1])
        return found

    def why_no_trace(self) -> str:
        return self.first.why_no_trace() or self.second.why_no_trace()

    def control(self) -> LinearOperator | None:
        first, second = _near(self.first), _near(self.second)
        return None if first is None or second is None else Sum(first, second)

    def restrict(self, which: Pattern | Sequence[int] | Tensor) -> LinearOperator:
        if self.first.space is None and self.second.space is None:
            return super().restrict(which)
        indices, _ = self._choose(which)
        pair = (self.first, self.second)
        return Sum(*(op.restrict(which if op.space is not None else indices) for op in pair))


class Scaled(LinearOperator):
    """c·A."""

    def __init__(self, inner: LinearOperator, factor: float) -> None:
        require(np.isfinite(factor), "the factor", "be finite", repr(factor))
        self._take_facts(inner, psd=inner.psd and factor >= 0)
        self.inner, self.factor = inner, factor

    def _apply(self, block: Tensor) -> Tensor:
        if 2.0**-ORDINARY_SINGLE < abs(self.factor) < 2.0**ORDINARY_SINGLE:
            return self.factor * (self.inner @ block)  # type: ignore[no-any-return]
        # the product with the block itself may leave the dtype
        return self.inner._multiply(self.factor * block)

    def _apply_adjoint(self, block: Tensor) -> Tensor:
        return self.factor * self.inner._multiply_adjoint(block)

    def known_diagonal(self) -> Tensor | None:
        diagonal = self.inner.known_diagonal()
        return None if diagonal is None else self.factor * diagonal

    def known_trace(self) -> float | None:
        trace = self.inner.known_trace()
        return None if trace is None else self.factor * trace

    def known_squares(self) -> float | None:
        squares = self.inner.known_squares()
        # squares of very small or large entries leave the range
        if squares is None or not 0 < squares < math.inf:
            return None
        return self.factor * (self.factor * squares)

    def known_bounds(self) -> tuple[float, float]:
        if self.factor == 0:
            return 0.0, 0.0
        low, high = sorted(self.factor * end for end in self.inner.known_bounds())
        return low, high

    def columns(self, indices: Sequence[int]) -> Tensor:
        before = self.inner.matvecs
        found = self.factor * self.inner.columns(indices)
        self.matvecs += self.inner.matvecs - before
        return found

    def sampled_trace(self, tol: float, seed: int, limit: int | None = None) -> Estimate | None:
        found = self.inner.sampled_trace(tol, seed, limit)
        if found is None:
            return None
        value, stderr = self.factor * found.value, abs(self.factor) * found.stderr
        return replace(found, value=value, stderr=stderr)

    def why_no_trace(self) -> str:
        return self.inner.why_no_trace()

    def control(self) -> LinearOperator | None:
        near = self.inner.control()
        return None if near is None else Scaled(near, self.factor)

    def restrict(self, which: Pattern | Sequence[int] | Tensor) -> LinearOperator:
        return Scaled(self.inner.restrict(which), self.factor)


class Normalised(LinearOperator):
    """2⁻ᵉ·A with entries near 1, where squares of A's products would leave the dtype.

    The exponent e is 0 for ordinary operators. It is found at the first non-zero product, without
    one more unless that leaves the range of the dtype. Powers of two are exact and vectors are
    scaled before the product, so that results for c·A are those for A times c. ``like`` is an
    operator whose exponent it shares.
    """

    def __init__(self, inner: LinearOperator, like: Normalised | None = None) -> None:
        self._take_facts(inner)
        self.inner, self._first = inner, like
        self._exponent: int | None = None
        # products that had to be made again, to be added to a cost that was counted without them
        self.repeated = 0

    @property
    def exponent(self) -> int:
        """e, or 0 while all products were zero."""
        return (self._exponent or 0) if self._first is None else self._first.exponent

    def restore(self, value: float) -> float:
        """2ᵉ times a value."""
        return math.ldexp(value, self.exponent) if math.isfinite(value) else value

    def restored(self, estimate: Estimate) -> Estimate:
        """An estimate of a quantity that is linear in the operator, as one of A."""
        if self.exponent == 0:
            return estimate
        value, stderr = (
            _times_power(torch.as_tensor(part, dtype=torch.float64), self.exponent)
            for part in (estimate.value, estimate.stderr)
        )
        if isinstance(estimate.value, Tensor):
            return replace(estimate, value=value, stderr=stderr)
        return replace(estimate, value=float(value), stderr=float(stderr))

    def settle(self) -> None:
        """Fix the exponent now if no product was made yet, from known entries or by a product."""
        if self._exponent is None and self._first is None:
            squares = self.inner.known_squares()
            if squares is not None and 0 < squares < math.inf:
                self._fix(math.frexp(math.sqrt(squares / self.dim))[1])
                return
            draw = torch.randn(self.dim, 1, generator=generator(0, "scale"), dtype=torch.float32)
            self._multiply(draw.to(self.device, self.dtype))

    def _apply(self, block: Tensor) -> Tensor:
        most = INPUT.get(self.dtype, INPUT_SINGLE)
        if self._first is None and self._exponent is None:  # this product fixes it
            image, shift = self.inner._multiply(block), 0
            found, info = _binary_size(image, block), torch.finfo(image.dtype)
            if (found is None and self.repeated) or not block.abs().max() > 0:
                return image
            if found is None or float(image.abs().max()) < info.tiny / info.eps:
                self.repeated += block.shape[1]
                shift = -most if not bool(torch.isfinite(image).all()) else most
                retried = self.inner._multiply(_times_power(block, shift))
                again = _binary_size(retried, block)
                if again is None:
                    return image
                image, found = retried, again - shift
            self._fix(found)
            return _times_power(image, -self.exponent - shift)
        e = self.exponent
        if e == 0:
            return self.inner._multiply(block)
        before = max(-most, min(most, -e))
        return _times_power(self.inner._multiply(_times_power(block, before)), -e - before)

    def _fix(self, exponent: int) -> None:
        ordinary = abs(exponent) <= ORDINARY.get(self.dtype, ORDINARY_SINGLE)
        self._exponent = 0 if ordinary else exponent

    def known_diagonal(self) -> Tensor | None:
        diagonal = self.inner.known_diagonal()
        return None if diagonal is None else _times_power(diagonal, -self.exponent)

    def known_trace(self) -> float | None:
        trace = self.inner.known_trace()
        return None if trace is None else math.ldexp(trace, -self.exponent)

    def column_bytes(self) -> int:
        extra = self.dim * self.dtype.itemsize if self.exponent else 0
        return self.inner.column_bytes() + extra

    def capturable_product(self) -> CapturableProduct | None:
        found = self.inner.capturable_product()
        if found is None:
            return None
        self.settle()  # a captured product cannot look at its own size
        return found if self.exponent == 0 else None


def _times_power(values: Tensor, exponent: int) -> Tensor:
    """2ᵉ·values, without overflow of the factor."""
    if exponent == 0:
        return values
    half = exponent // 2
    return values * 2.0**half * 2.0 ** (exponent - half)


def _binary_size(image: Tensor, block: Tensor) -> int | None:
    """log₂ of max|Av|/max|v|, rounded; None where the product is zero or not finite."""
    top, bottom = float(image.abs().max()), float(block.abs().max())
    if not (0 < top < math.inf and bottom > 0):
        return None
    return math.frexp(top)[1] - math.frexp(bottom)[1]


class Product(LinearOperator):
    """A·B. Symmetric only as A·A, which is also positive semi-definite."""

    def __init__(self, first: LinearOperator, second: LinearOperator) -> None:
        _require_same_order(first, second, "@")
        self._take_facts(first, psd=first is second and first.symmetric)
        self.symmetric, self.dtype = self.psd, torch.promote_types(first.dtype, second.dtype)
        self.first, self.second = first, second

    def _apply(self, block: Tensor) -> Tensor:
        return (self.first @ (self.second @ block)).to(self.dtype)  # type: ignore[no-any-return]

    def _apply_adjoint(self, block: Tensor) -> Tensor:
        return self.second._multiply_adjoint(self.first._multiply_adjoint(block)).to(self.dtype)


class Restricted(LinearOperator):
    """The principal submatrix A[indices, indices], by embedding into the whole space."""

    def __init__(self, inner: LinearOperator, indices: Tensor, space: Space | None = None) -> None:
        self._take_facts(inner)
        self.dim, self.space = len(indices), space
        self.inner, self.indices = inner, indices

    def _embed(self, block: Tensor) -> Tensor:
        whole = block.new_zeros(self.inner.dim, block.shape[1])
        whole[self.indices] = block
        return whole

    def _apply(self, block: Tensor) -> Tensor:
        return (self.inner @ self._embed(block))[self.indices]  # type: ignore[no-any-return]

    def _apply_adjoint(self, block: Tensor) -> Tensor:
        return self.inner._multiply_adjoint(self._embed(block))[self.indices]

    def known_diagonal(self) -> Tensor | None:
        diagonal = self.inner.known_diagonal()
        return None if diagonal is None else diagonal[self.indices]


class BlockDiagonal(LinearOperator):
    """The diagonal blocks of an operator; parameters in no block have zero rows."""

    def __init__(self, inner: LinearOperator, groups: Mapping[str, Sequence[str]]) -> None:
        self._take_facts(inner)
        space, names = inner._named_space(), [name for group in groups.values() for name in group]
        once = len(set(names)) == len(names)
        require(once, "blocks", "not overlap", "a parameter that is in two blocks")
        self.inner, self.blocks = inner, dict[str, LinearOperator]()
        self._places: list[tuple[LinearOperator, Tensor]] = []
        for label, group in groups.items():
            # by a callable, for a name may hold what a glob takes for a pattern
            self.blocks[label] = inner.restrict(frozenset(group).__contains__)
            self._places.append((self.blocks[label], space.indices(group).to(inner.device)))

    def _apply(self, block: Tensor) -> Tensor:
        out = torch.zeros_like(block)
        for inner, where in self._places:
            out[where] = inner @ block[where]
        return out

    def _apply_adjoint(self, block: Tensor) -> Tensor:
        out = torch.zeros_like(block)
        for inner, where in self._places:
            out[where] = inner._multiply_adjoint(block[where])
        return out

    def dense(self) -> Tensor:
        """The matrix, each block by its own products: P in all."""
        self._dense_columns()
        out = torch.zeros(self.dim, self.dim, dtype=self.dtype, device=self.device)
        for inner, where in self._places:
            out[where.unsqueeze(1), where] = inner.dense()
        return out

    def known_diagonal(self) -> Tensor | None:
        out = torch.zeros(self.dim, dtype=self.dtype, device=self.device)
        for inner, where in self._places:
            part = inner.known_diagonal()
            if part is None:
                return None
            out[where] = part.to(out)
        return out


def read_array(given: Any, name: str) -> Tensor:
    """A tensor from an array of any layout, byte order or width; sparse matrices become dense."""
    if isinstance(given, Tensor):
        got = "a tensor on the meta device, which has a shape alone"
        require(not given.is_meta, name, "hold numbers", got)
        return given
    if scipy.sparse.issparse(given):
        given = given.toarray()
    try:
        array = np.asarray(given) if isinstance(given, np.ndarray | list | tuple) else None
        if array is not None and array.dtype.kind in "fiubc":
            kind = array.dtype.newbyteorder("=")
            kind = np.dtype(np.float64) if array.dtype == np.longdouble else kind
            plain = array.dtype == kind and array.flags.writeable
            given = array.astype(kind, copy=not plain or min(array.strides, default=0) < 0)
        return torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        kind_of = f" of dtype {given.dtype}" if isinstance(given, np.ndarray) else ""
        raise TypeError(
            f"{name} must be a tensor or an array of real numbers, got {describe(given)}{kind_of}; "
            "torch.as_tensor or array.astype(float) makes one"
        ) from error


def _number(given: Any, name: str) -> float | None:
    """A real number of Python, NumPy or torch, 0-d arrays included; None for other types."""
    if isinstance(given, Tensor | np.ndarray | np.number) and given.ndim == 0:
        given = given.item()
    if isinstance(given, numbers.Real):
        return float(given)
    wrong = isinstance(given, Tensor | np.ndarray | complex | LinearOperator)
    if wrong or scipy.sparse.issparse(given):
        cure = "A @ B multiplies operators, and A @ v vectors"
        raise TypeError(message(name, "be one real number", given, cure))
    return None


def _is_summand(given: Any, sign: str) -> bool:
    """Whether it is an operator; for matrices and numbers the error names the cure."""
    if isinstance(given, LinearOperator):
        return True
    number = isinstance(given, numbers.Number) or getattr(given, "ndim", None) == 0
    known = number or isinstance(given, Tensor | np.ndarray | list) or scipy.sparse.issparse(given)
    cure = f"add {given} * lh.identity(operator)" if number else "make it one: lh.operator(matrix)"
    require(not known, f"the other side of {sign}", "be an operator", given, cure, TypeError)
    return False


def _is_structured(given: Any) -> bool:
    """Whether it is tensors by name or in order; a list of numbers is one array."""
    if not isinstance(given, list | tuple):
        return isinstance(given, Mapping)
    arrays = any(isinstance(part, Tensor | np.ndarray) for part in given)
    return arrays and any(getattr(part, "ndim", 0) > 0 for part in given)


def _like(given: Any, space: Space, rows: Tensor, leading: bool = False) -> Any:
    """A vector (P,), or several (k, P), in the structure that ``_flatten_parts`` read."""
    parts = space.split(rows.contiguous())
    if rows.ndim == 2 and not leading:
        parts = [part.movedim(0, -1) for part in parts]
    if isinstance(given, Mapping):
        return dict(zip(space.names, parts, strict=True))
    return tuple(parts) if isinstance(given, tuple) else parts


def multiple_of_identity(operator: LinearOperator) -> float | None:
    """c where an operator is c·I, else None."""
    if isinstance(operator, Identity):
        return 1.0
    if not isinstance(operator, Scaled):
        return None
    inner = multiple_of_identity(operator.inner)
    return None if inner is None else operator.factor * inner


def _near(operator: LinearOperator) -> LinearOperator | None:
    """The operator itself where its trace is known, else its control variate."""
    return operator if operator.known_trace() is not None else operator.control()


def _require_same_order(first: LinearOperator, second: LinearOperator, sign: str) -> None:
    name, orders = f"the operators of {sign}", f"{first.dim} and {second.dim}"
    require(first.dim == second.dim, name, "have the same order", orders)
    devices = f"{first.device} and {second.device}"
    require(first.device == second.device, name, "be on one device", devices)
