"""Nested state as tensors and JSON, and back: what checkpoints are made of. Nothing is pickled."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lambdahat._core.check import describe, require


def pack(state: Any) -> tuple[dict[str, Tensor], Any]:
    """A nested state of dicts, lists, tuples, tensors and plain values as tensors by name, and a
    JSON document.

    Keys of dicts keep their type (a state dict of an optimiser numbers its parameters). Tensors are
    CPU copies, or the tensors themselves where they are on the CPU already; one tensor in two
    places is stored once.

    >>> tensors, document = pack({"step": 3, "state": {0: {"momentum": torch.ones(2)}}})
    >>> list(tensors)
    ['state/0/momentum']
    >>> unpack(tensors, document)["state"][0]["momentum"].tolist()
    [1.0, 1.0]
    """
    packer = _Packer()
    document = packer.encode(state, "")
    return packer.tensors, document


def unpack(tensors: Mapping[str, Tensor], document: Any) -> Any:
    """What ``pack`` was given, with new tensors on the CPU."""
    if isinstance(document, list):
        return [unpack(tensors, item) for item in document]
    if not isinstance(document, dict):
        return document
    (kind, value), *rest = document.items()
    require(
        not rest and kind in _READERS, "document", "be one that pack() made", describe(document)
    )
    return _READERS[kind](tensors, value)


class _Packer:
    """The tensors met so far, each under the path where it was met first."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            return self._keep(value.detach(), path)
        if isinstance(value, np.generic):
            return self.encode(value.item(), path)
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": repr(value)}
        if isinstance(value, Mapping):
            kind = "counter" if isinstance(value, Counter) else "dict"
            return {
                kind: [
                    [_key(key, path), self.encode(item, f"{path}/{key}")]
                    for key, item in value.items()
                ]
            }
        if isinstance(value, list | tuple):
            items = [self.encode(item, f"{path}/{i}") for i, item in enumerate(value)]
            return items if isinstance(value, list) else {"tuple": items}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        raise TypeError(
            f"{path.strip('/')} must be a tensor, a number, text, or a list, tuple or dict of them"
            f" to be kept in a checkpoint, got {describe(value)}; convert it in state_dict()"
        )

    def _keep(self, tensor: Tensor, path: str) -> dict[str, Any]:
        """A tensor's place; its layout is kept, for products with a transposed matrix round
        differently.
        """
        strides = tensor.stride()
        order = sorted(range(tensor.ndim), key=lambda axis: -strides[axis])
        if not tensor.is_contiguous() and tensor.permute(order).is_contiguous():
            return {"permuted": [self._keep(tensor.permute(order), path), order]}
        same = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), str(tensor.device))
        if not (tensor.numel() and same in self._names):
            self._names[same] = path.strip("/") or "value"
            self.tensors[self._names[same]] = tensor.cpu().contiguous()
        return {"tensor": self._names[same]}


def _key(key: Any, path: str) -> Any:
    plain = key is None or isinstance(key, bool | int | str | float)
    require(
        plain,
        f"a key of {path.strip('/') or 'the state'}",
        "be text or a number",
        key,
        error=TypeError,
    )
    return key


def _inverse(order: list[int]) -> list[int]:
    return [order.index(axis) for axis in range(len(order))]


_READERS: dict[str, Any] = {
    "tensor": lambda tensors, name: tensors[name].clone(),
    "permuted": lambda tensors, item: unpack(tensors, item[0]).permute(_inverse(item[1])),
    "float": lambda _, text: float(text),
    "dict": lambda tensors, items: {key: unpack(tensors, item) for key, item in items},
    "counter": lambda tensors, items: Counter({key: unpack(tensors, item) for key, item in items}),
    "tuple": lambda tensors, items: tuple(unpack(tensors, item) for item in items),
    "dtype": lambda _, name: getattr(torch, name),
    "device": lambda _, name: torch.device(name),
}
