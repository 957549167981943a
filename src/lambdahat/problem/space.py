"""Named parameters and one flat vector: the two views of a point in parameter space."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from lambdahat._core.check import message, require

Pattern = str | Sequence[str] | Callable[[str], bool]


def matcher(pattern: Pattern) -> Callable[[str], bool]:
    """A test of names from a glob ("layers.0.*"), several globs, or a callable."""
    if callable(pattern):
        return pattern
    single = isinstance(pattern, str) or not isinstance(pattern, Iterable)
    globs: list[Any] = [pattern] if single else list(pattern)
    if not all(isinstance(glob, str) for glob in globs):
        expected = "be a glob, a list of globs or a callable"
        cure = 'pass names, as in parameters="head.*", not the tensors'
        raise TypeError(message("parameters", expected, pattern, cure))
    return lambda name: any(name == glob or fnmatchcase(name, glob) for glob in globs)


@dataclass(frozen=True)
class Space:
    """The order, names and shapes of the parameters that make up a flat vector of length P.

    A vector is the concatenation of the raveled parameters in the order of ``names``; a block of k
    vectors has shape (P, k), one vector a column.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor]) -> Space:
        """The space of named tensors, in their order."""
        return cls(tuple(parameters), tuple(tuple(tensor.shape) for tensor in parameters.values()))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of each parameter."""
        return tuple(prod(shape) for shape in self.shapes)

    @cached_property
    def size(self) -> int:
        """P, the length of the flat vector."""
        return sum(self.sizes)

    @property
    def slices(self) -> dict[str, slice]:
        """Where each parameter sits in the flat vector."""
        out, start = {}, 0
        for name, size in zip(self.names, self.sizes, strict=True):
            out[name] = slice(start, start + size)
            start += size
        return out

    def flatten(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Named tensors to one vector (P,), in the promoted dtype of all."""
        return torch.cat([parameters[name].reshape(-1) for name in self.names])

    def split(self, vector: Tensor) -> list[Tensor]:
        """A vector (P,), or several (k, P), as views shaped like the parameters."""
        if vector.shape[-1:] != (self.size,):
            raise ValueError(message("vector", f"have shape ({self.size},)", vector))
        lead, pieces = vector.shape[:-1], vector.split(self.sizes, dim=-1)
        return [part.view((*lead, *shape)) for part, shape in zip(pieces, self.shapes, strict=True)]

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """One vector (P,) to named views of it; several (k, P) to views (k, *shape)."""
        return dict(zip(self.names, self.split(vector), strict=True))

    def select(self, pattern: Pattern) -> tuple[str, ...]:
        """The names that match, in order; an error when none does."""
        match = matcher(pattern)
        chosen = tuple(name for name in self.names if match(name))
        some = ", ".join(self.names[:6]) + (", …" if len(self.names) > 6 else "")
        require(bool(chosen), "parameters", f"match at least one of {some}", repr(pattern))
        return chosen

    def subspace(self, names: Sequence[str]) -> Space:
        """The space of some of the parameters, in this space's order."""
        keep, pairs = set(names), zip(self.names, self.shapes, strict=True)
        kept = {name: shape for name, shape in pairs if name in keep}
        return Space(tuple(kept), tuple(kept.values()))

    def indices(self, names: Sequence[str]) -> Tensor:
        """Positions in the flat vector of the named parameters, in this space's order."""
        keep = set(names)
        parts = [part for name, part in self.slices.items() if name in keep]
        return torch.cat([torch.arange(part.start, part.stop) for part in parts])

    def layers(self) -> dict[str, tuple[str, ...]]:
        """Parameter names grouped by the module that owns them."""
        groups: dict[str, list[str]] = {}
        for name in self.names:
            groups.setdefault(name.rpartition(".")[0] or name, []).append(name)
        return {layer: tuple(names) for layer, names in groups.items()}
