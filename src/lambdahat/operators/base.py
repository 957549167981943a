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
import scipy.sparse
import torch
from torch import Tensor

from lambdahat._core.check import describe, require
from lambdahat._core.device import default_context
from lambdahat._core.rng import generator
from lambdahat.problem.batches import free_memory
from lambdahat.problem.memory import PASS
from lambdahat.problem.space import Pattern, Space
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

    @abstractmethod
    def _apply(self, block: Tensor) -> Tensor:
        """A @ block for a block (P, k) of this operator's dtype and device."""

    @property
    def shape(self) -> tuple[int, int]:
        """(P, P)."""
        return self.dim, self.dim

    def _apply_adjoint(self, block: Tensor) -> Tensor:
        """Aᵀ @ block, for products from the left."""
        require(
            self.symmetric,
            "the operator right of @",
            "be symmetric, or a matrix with entries",
            repr(self),
            "its transpose is not known",
        )
        return self._apply(block)

    def _multiply(self, other: Any) -> Tensor:
        block = read_array(other, "the right-hand side of @")
        fits = block.ndim in (1, 2) and block.shape[0] == self.dim
        require(
            fits, "the right-hand side of @", f"have shape ({self.dim},) or ({self.dim}, k)", block
        )
        self._require_factor(block, "right")
        with default_context():
            columns = self._own(block.reshape(self.dim, -1))
            if columns.shape[1] == 0:
                return columns
            self.matvecs += columns.shape[1]
            return self._apply(columns).reshape(block.shape)

    def _own(self, block: Tensor) -> Tensor:
        """The block in the operator's dtype; a copy of what was made in inference mode, which
        has no gradients.
        """
        return (block.clone() if block.is_inference() else block).to(self.dtype)

    def _multiply_adjoint(self, block: Tensor) -> Tensor:
        """Aᵀ @ block, (P, k)."""
        with default_context():
            columns = self._own(block)
            if columns.shape[1] == 0:
                return columns
            self.matvecs += columns.shape[1]
            return self._apply_adjoint(columns)

    def _require_factor(self, block: Tensor, side: str) -> None:
        name = f"the {side}-hand side of @"
        require(block.is_floating_point(), name, "be real floating point", str(block.dtype))
        require(
            block.device == self.device,
            name,
            f"be on {self.device}",
            str(block.device),
            "move it with .to(operator.device)",
        )

    def __matmul__(self, other: Any) -> Any:
        if isinstance(other, LinearOperator):
            return Product(self, other)
        if _is_structured(other):
            product = self._multiply(self._shaped(other, "right").movedim(0, -1))
            return _like(other, self._named_space(), product.movedim(-1, 0))
        return self._multiply(other)

    def __rmatmul__(self, other: Any) -> Any:
        structured = _is_structured(other)
        rows = (
            self._shaped(other, "left")
            if structured
            else read_array(other, "the left-hand side of @")
        )
        fits = rows.ndim in (1, 2) and rows.shape[-1] == self.dim
        require(
            fits, "the left-hand side of @", f"have shape ({self.dim},) or (k, {self.dim})", rows
        )
        self._require_factor(rows, "left")
        product = self._multiply_adjoint(rows.reshape(-1, self.dim).T).T.reshape(rows.shape)
        return _like(other, self._named_space(), product, leading=True) if structured else product

    def _shaped(self, given: Any, side: str) -> Tensor:
        """Tensors of the parameters' shapes, in a dict or in order, as (P,); with one more
        dimension as (k, P).

        That dimension is the last right of the operator and the first left of it.
        """
        name = f"the {side}-hand side of @"
        require(
            self.space is not None,
            name,
            f"be one tensor of {self.dim} rows",
            f"a {type(given).__name__} of tensors",
            "the operator has no named parameters: join them by torch.cat",
        )
        space = self._named_space()
        if isinstance(given, Mapping):
            wrong = sorted(set(space.names) ^ set(given), key=str)
            require(
                not wrong,
                name,
                "hold a tensor for every parameter of the operator",
                f"{', '.join(map(str, wrong[:5]))} on one side alone",
            )
            given = [given[key] for key in space.names]
        require(
            len(given) == len(space.names),
            name,
            f"hold {len(space.names)} tensors, one for each parameter",
            f"{len(given)}",
        )
        parts = [
            read_array(part, f"{name}, at {key!r},")
            for key, part in zip(space.names, given, strict=True)
        ]
        extra = parts[0].ndim - len(space.shapes[0])
        rows = []
        for key, shape, part in zip(space.names, space.shapes, parts, strict=True):
            own = part.movedim(-1, 0) if extra == 1 and part.ndim and side == "right" else part
            fits = extra in (0, 1) and own.ndim - len(shape) == extra and own.shape[extra:] == shape
            require(
                fits,
                f"{name}, at {key!r},",
                f"have shape {shape}, or that and a dimension of k vectors",
                part,
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
        return (
            f"{type(self).__name__}({self.dim} × {self.dim}, {facts}, {str(self.dtype)[6:]},"
            f" {self.device})"
        )

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
        """An interval that holds the spectrum and costs no product; its ends may be infinite."""
        return 0.0 if self.psd else -math.inf, math.inf

    def recordable(self) -> tuple[Callable[[Tensor], Tensor], torch.cuda.Stream] | None:
        """A product (P,) → (P,) that a CUDA graph can take in, and the stream to record it on;
        None where none is.
        """
        return None

    def columns(self, indices: Sequence[int]) -> Tensor:
        """The columns A[:, indices] (P, k), each counted as a product unless the entries are
        there.
        """
        units = torch.zeros(self.dim, len(indices), dtype=self.dtype, device=self.device)
        units[list(indices), range(len(indices))] = 1.0
        return self._multiply(units)

    def free_memory(self, device: torch.device | None = None) -> int:
        """Bytes that can still be taken where it is, or on ``device``: the same on all ranks,
        that of the fullest.
        """
        inner = [part for part in vars(self).values() if isinstance(part, LinearOperator)]
        return min((part.free_memory(device) for part in inner), default=0) or free_memory(
            device or self.device
        )

    def budget(self) -> int | None:
        """The bytes that all work with it may take, where its problem sets them."""
        inner = [part.budget() for part in vars(self).values() if isinstance(part, LinearOperator)]
        return min((found for found in inner if found is not None), default=None)

    def room(self, share: float) -> float:
        """Bytes for vectors beside it: ``share`` of what is free, or what its budget leaves."""
        budget = self.budget()
        if budget is None:
            return share * self.free_memory()
        inner = {id(part): part for part in vars(self).values() if isinstance(part, LinearOperator)}
        rooms = [part.room(share) for part in inner.values() if part.budget() is not None]
        # each leaves what it keeps itself
        return sum(rooms) - (len(rooms) - 1) * (1 - PASS) * budget

    def column_bytes(self) -> int:
        """What each column of a block takes at most while it is multiplied, its product
        included.
        """
        row = self.dim * self.dtype.itemsize
        inner = [part for part in vars(self).values() if isinstance(part, LinearOperator)]
        return 2 * row + max(
            (part.dim * self.dtype.itemsize + part.column_bytes() for part in inner), default=0
        )

    def sampled_trace(self, tol: float, seed: int) -> Estimate | None:
        """The trace from one-sided samples, where that is cheaper than both the closed form and
        products.
        """
        return None

    def why_no_trace(self) -> str:
        """What stands in the way of an exact trace, where that is known; for the error that
        refuses it.
        """
        return ""

    def control(self) -> LinearOperator | None:
        """An operator near this one whose trace and diagonal are known: a control variate, where
        there is one.
        """
        return None

    def restrict(self, which: Pattern | Sequence[int] | Tensor) -> LinearOperator:
        """The principal submatrix of named parameters ("layers.0.*") or of given indices."""
        indices, space = self._choose(which)
        return Restricted(self, indices, space)

    def block_diagonal(self, blocks: Mapping[str, Pattern] | None = None) -> LinearOperator:
        """The operator with all entries between different blocks set to 0; by default one block
        a layer.
        """
        space = self._named_space()
        groups = (
            space.layers()
            if blocks is None
            else {name: space.select(p) for name, p in blocks.items()}
        )
        return BlockDiagonal(self, groups)

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
        """How many columns of the matrix to make at once; a matrix that does not fit into the
        memory is refused.
        """
        row = self.dim * self.dtype.itemsize
        need, budget = self.dim * row, self.budget()
        if budget is None and need < FITS:
            return DENSE_CHUNK
        room, column = self.room(1.0), row + self.column_bytes()
        where = (
            "the free memory" if budget is None else f"what the problem's memory={budget:,} leaves"
        )
        require(
            need + column <= room,
            "the matrix of an operator",
            f"fit into {where}, {max(room, 0.0):,.0f} bytes",
            f"{need:,} bytes for {self!r}",
            "use products with it, or restrict it to fewer parameters",
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
        return ScipyLinearOperator(
            shape=self.shape,
            dtype=kind,
            matvec=multiply,
            matmat=multiply,
            rmatvec=adjoint,
            rmatmat=adjoint,
        )

    def _named_space(self) -> Space:
        require(
            self.space is not None,
            "the operator",
            "have named parameters",
            repr(self),
            "select by index instead: restrict([0, 1, …])",
        )
        assert self.space is not None
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
        whole = not (
            indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool
        )
        require(
            indices.ndim == 1 and indices.numel() > 0 and whole,
            "which",
            "be names or a non-empty 1-D list of integers",
            f"{indices.dtype} of shape {tuple(indices.shape)}",
            "for a mask pass mask.nonzero().flatten()",
        )
        low, high = int(indices.min()), int(indices.max())
        require(
            0 <= low and high < self.dim,
            "which",
            f"hold indices in [0, {self.dim - 1}]",
            f"{low} … {high}",
        )
        require(
            len(indices.unique()) == len(indices),
            "which",
            "hold each index once",
            "repeated indices",
        )
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
        return (self.first._multiply_adjoint(block) + self.second._multiply_adjoint(block)).to(
            self.dtype
        )

    def known_diagonal(self) -> Tensor | None:
        first, second = self.first.known_diagonal(), self.second.known_diagonal()
        return None if first is None or second is None else first + second

    def known_trace(self) -> float | None:
        first, second = self.first.known_trace(), self.second.known_trace()
        return None if first is None or second is None else first + second

    def known_squares(self) -> float | None:
        """tr (A + B)² where one of the two is a multiple of the identity."""
        for plain, shift in ((self.first, self.second), (self.second, self.first)):
            c, squares, trace = (
                multiple_of_identity(shift),
                plain.known_squares(),
                plain.known_trace(),
            )
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
        parts = [
            op.restrict(which if op.space is not None else indices)
            for op in (self.first, self.second)
        ]
        return Sum(*parts)


class Scaled(LinearOperator):
    """c·A."""

    def __init__(self, inner: LinearOperator, factor: float) -> None:
        require(np.isfinite(factor), "the factor", "be finite", repr(factor))
        super().__init__(
            inner.dim,
            inner.dtype,
            inner.device,
            symmetric=inner.symmetric,
            psd=inner.psd and factor >= 0,
            space=inner.space,
        )
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

    def sampled_trace(self, tol: float, seed: int) -> Estimate | None:
        found = self.inner.sampled_trace(tol, seed)
        if found is None:
            return None
        return replace(
            found, value=self.factor * found.value, stderr=abs(self.factor) * found.stderr
        )

    def why_no_trace(self) -> str:
        return self.inner.why_no_trace()

    def control(self) -> LinearOperator | None:
        near = self.inner.control()
        return None if near is None else Scaled(near, self.factor)

    def restrict(self, which: Pattern | Sequence[int] | Tensor) -> LinearOperator:
        return Scaled(self.inner.restrict(which), self.factor)


class Normalised(LinearOperator):
    """2⁻ᵉ·A with entries near 1, where those of A are so small or large that squares of products
    leave the dtype.

    The exponent e is 0 for ordinary operators, whose products pass through unchanged. It is found
    at the first product that is not zero, without one more unless that leaves the range of the
    dtype itself. Powers of two make no rounding error, and vectors are scaled before the product,
    so that results for c·A are those for A times c. ``like`` is an operator whose exponent it
    shares.
    """

    def __init__(self, inner: LinearOperator, like: Normalised | None = None) -> None:
        super().__init__(
            inner.dim,
            inner.dtype,
            inner.device,
            symmetric=inner.symmetric,
            psd=inner.psd,
            space=inner.space,
        )
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
        """Find the exponent now if no product was made yet: from the entries where they are
        there, or by a product.
        """
        if self._exponent is None and self._first is None:
            squares = self.inner.known_squares()
            if squares is not None and 0 < squares < math.inf:
                self._fix(math.frexp(math.sqrt(squares / self.dim))[1])
                return
            draw = torch.randn(self.dim, 1, generator=generator(0, "scale"), dtype=torch.float32)
            self._multiply(draw.to(self.device, self.dtype))

    def _apply(self, block: Tensor) -> Tensor:
        if self._first is None and self._exponent is None:
            return self._measure(block)
        e = self.exponent
        return self.inner._multiply(block) if e == 0 else self._scaled(block, e)

    def _scaled(self, block: Tensor, exponent: int) -> Tensor:
        most = INPUT.get(self.dtype, INPUT_SINGLE)
        before = max(-most, min(most, -exponent))
        return _times_power(self.inner._multiply(_times_power(block, before)), -exponent - before)

    def _measure(self, block: Tensor) -> Tensor:
        """The first product, by which the exponent is fixed."""
        image, most = self.inner._multiply(block), INPUT.get(self.dtype, INPUT_SINGLE)
        found, info = _binary_size(image, block), torch.finfo(image.dtype)
        shift = 0
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

    def _fix(self, exponent: int) -> None:
        self._exponent = (
            0 if abs(exponent) <= ORDINARY.get(self.dtype, ORDINARY_SINGLE) else exponent
        )

    def known_diagonal(self) -> Tensor | None:
        diagonal = self.inner.known_diagonal()
        return None if diagonal is None else _times_power(diagonal, -self.exponent)

    def known_trace(self) -> float | None:
        trace = self.inner.known_trace()
        return None if trace is None else math.ldexp(trace, -self.exponent)

    def column_bytes(self) -> int:
        extra = self.dim * self.dtype.itemsize if self.exponent else 0
        return self.inner.column_bytes() + extra

    def recordable(self) -> tuple[Callable[[Tensor], Tensor], torch.cuda.Stream] | None:
        found = self.inner.recordable()
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
        square = first is second and first.symmetric
        super().__init__(
            first.dim,
            torch.promote_types(first.dtype, second.dtype),
            first.device,
            symmetric=square,
            psd=square,
            space=first.space,
        )
        self.first, self.second = first, second

    def _apply(self, block: Tensor) -> Tensor:
        return (self.first @ (self.second @ block)).to(self.dtype)  # type: ignore[no-any-return]

    def _apply_adjoint(self, block: Tensor) -> Tensor:
        return self.second._multiply_adjoint(self.first._multiply_adjoint(block)).to(self.dtype)


class Restricted(LinearOperator):
    """The principal submatrix A[indices, indices], by embedding into the whole space."""

    def __init__(self, inner: LinearOperator, indices: Tensor, space: Space | None = None) -> None:
        super().__init__(
            len(indices),
            inner.dtype,
            inner.device,
            symmetric=inner.symmetric,
            psd=inner.psd,
            space=space,
        )
        self.inner, self.indices = inner, indices

    def _apply(self, block: Tensor) -> Tensor:
        whole = block.new_zeros(self.inner.dim, block.shape[1])
        whole[self.indices] = block
        return (self.inner @ whole)[self.indices]  # type: ignore[no-any-return]

    def _apply_adjoint(self, block: Tensor) -> Tensor:
        whole = block.new_zeros(self.inner.dim, block.shape[1])
        whole[self.indices] = block
        return self.inner._multiply_adjoint(whole)[self.indices]

    def known_diagonal(self) -> Tensor | None:
        diagonal = self.inner.known_diagonal()
        return None if diagonal is None else diagonal[self.indices]


class BlockDiagonal(LinearOperator):
    """The diagonal blocks of an operator, one restriction each; parameters in no block have zero
    rows.
    """

    def __init__(self, inner: LinearOperator, groups: Mapping[str, Sequence[str]]) -> None:
        super().__init__(
            inner.dim,
            inner.dtype,
            inner.device,
            symmetric=inner.symmetric,
            psd=inner.psd,
            space=inner.space,
        )
        space = inner._named_space()
        names = [name for group in groups.values() for name in group]
        require(
            len(set(names)) == len(names),
            "blocks",
            "not overlap",
            "a parameter that is in two blocks",
        )
        self.inner = inner
        # by a callable, for a name may hold what a glob takes for a pattern
        self.blocks = {
            label: inner.restrict(frozenset(group).__contains__) for label, group in groups.items()
        }
        self._indices = {
            label: space.indices(group).to(inner.device) for label, group in groups.items()
        }

    def _apply(self, block: Tensor) -> Tensor:
        out = torch.zeros_like(block)
        for label, inner in self.blocks.items():
            where = self._indices[label]
            out[where] = inner @ block[where]
        return out

    def _apply_adjoint(self, block: Tensor) -> Tensor:
        out = torch.zeros_like(block)
        for label, inner in self.blocks.items():
            where = self._indices[label]
            out[where] = inner._multiply_adjoint(block[where])
        return out

    def dense(self) -> Tensor:
        """The matrix, each block by its own products: P in all."""
        self._dense_columns()
        out = torch.zeros(self.dim, self.dim, dtype=self.dtype, device=self.device)
        for label, inner in self.blocks.items():
            where = self._indices[label]
            out[where.unsqueeze(1), where] = inner.dense()
        return out

    def known_diagonal(self) -> Tensor | None:
        out = torch.zeros(self.dim, dtype=self.dtype, device=self.device)
        for label, inner in self.blocks.items():
            part = inner.known_diagonal()
            if part is None:
                return None
            out[self._indices[label]] = part.to(out)
        return out


def read_array(given: Any, name: str) -> Tensor:
    """A tensor, or an array of any layout, byte order or width as one; SciPy's sparse matrices
    with their zeros.
    """
    if isinstance(given, Tensor):
        require(
            not given.is_meta,
            name,
            "hold numbers",
            "a tensor on the meta device, which has a shape alone",
        )
        return given
    if scipy.sparse.issparse(given):
        given = given.toarray()
    try:
        array = np.asarray(given) if isinstance(given, np.ndarray | list | tuple) else None
        if array is not None and array.dtype.kind in "fiubc":
            kind = (
                np.dtype(np.float64)
                if array.dtype == np.longdouble
                else array.dtype.newbyteorder("=")
            )
            plain = (
                array.dtype == kind
                and array.flags.writeable
                and all(stride >= 0 for stride in array.strides)
            )
            given = array.astype(kind, copy=not plain)
        return torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        kind_of = f" of dtype {given.dtype}" if isinstance(given, np.ndarray) else ""
        raise TypeError(
            f"{name} must be a tensor or an array of real numbers, got {describe(given)}{kind_of}; "
            "torch.as_tensor or array.astype(float) makes one"
        ) from error


def _number(given: Any, name: str) -> float | None:
    """A real number of Python, NumPy or torch, arrays of no dimension among them; None for what
    is no number.
    """
    if isinstance(given, Tensor | np.ndarray | np.number) and given.ndim == 0:
        given = given.item()
    if isinstance(given, numbers.Real):
        return float(given)
    wrong = isinstance(
        given, Tensor | np.ndarray | complex | LinearOperator
    ) or scipy.sparse.issparse(given)
    require(
        not wrong,
        name,
        "be one real number",
        given,
        "A @ B multiplies operators, and A @ v vectors",
        TypeError,
    )
    return None


def _is_summand(given: Any, sign: str) -> bool:
    """Whether it is an operator; what looks like a matrix or a number gets an error that names
    the cure.
    """
    if isinstance(given, LinearOperator):
        return True
    number = isinstance(given, numbers.Number) or getattr(given, "ndim", None) == 0
    known = number or isinstance(given, Tensor | np.ndarray | list) or scipy.sparse.issparse(given)
    cure = f"add {given} * lh.identity(operator)" if number else "make it one: lh.operator(matrix)"
    require(not known, f"the other side of {sign}", "be an operator", given, cure, TypeError)
    return False


def _is_structured(given: Any) -> bool:
    """Whether it is tensors by name or in order, rather than one array; a list of numbers is an
    array.
    """
    if isinstance(given, Mapping):
        return True
    arrays = isinstance(given, list | tuple) and any(
        isinstance(part, Tensor | np.ndarray) for part in given
    )
    return arrays and any(getattr(part, "ndim", 0) > 0 for part in given)


def _like(given: Any, space: Space, rows: Tensor, leading: bool = False) -> Any:
    """A vector (P,), or several (k, P), in the structure that ``_shaped`` took: the vectors
    last, or ``leading``.
    """
    several = rows.ndim == 2
    parts = [
        part.movedim(0, -1) if several and not leading else part
        for part in space.split(rows.contiguous())
    ]
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
    same = first.dim == second.dim
    require(
        same, f"the operators of {sign}", "have the same order", f"{first.dim} and {second.dim}"
    )
    require(
        first.device == second.device,
        f"the operators of {sign}",
        "be on one device",
        f"{first.device} and {second.device}",
    )
