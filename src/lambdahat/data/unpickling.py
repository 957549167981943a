"""Reading pickled arrays without running what a pickle may contain.

Python's own unpicklers are not used: they call what a pickle names with the arguments it gives,
``__setstate__`` of numpy trusts sizes and types, and both allocate as much as a number in the file
says. This reader knows the few operations that batches of images are made of, and builds arrays
itself, as views of bytes that are in the file.
"""

from __future__ import annotations

import math
import pickletools
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lambdahat._core.check import describe, require
from lambdahat.data.sources import CURE, contents

# ImageNet's largest batch takes fewer than 400,000; each may hold a few hundred bytes
MOST_OPERATIONS = 4_000_000
MOST_AXES = 32
LARGE = 1 << 48
NUMBERS = re.compile(r"(b1|[iu][1248]|f[248])")
ORDERS = ("<", ">", "|", "=")
SCALARS = (str, bytes, int, float, type(None))  # bool is an int

# What a pickle may name. The values are inert marks: only REDUCE and BUILD below give them a
# meaning.
NAMES = {
    ("numpy.core.multiarray", "_reconstruct"): "reconstruct",
    ("numpy._core.multiarray", "_reconstruct"): "reconstruct",
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): "dtype",
    ("_codecs", "encode"): "encode",
    ("__builtin__", "bytes"): "bytes",
}
PUSHED = {
    "INT",
    "LONG",
    "LONG1",
    "LONG4",
    "BININT",
    "BININT1",
    "BININT2",
    "FLOAT",
    "BINFLOAT",
    "UNICODE",
    "BINUNICODE",
    "SHORT_BINUNICODE",
    "BINUNICODE8",
    "BINBYTES",
    "SHORT_BINBYTES",
    "BINBYTES8",
}
STRINGS = {"STRING", "BINSTRING", "SHORT_BINSTRING"}  # of Python 2, which stay bytes
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}


class Refused(ValueError):
    """What a pickle of arrays has no need of."""


class _Name:
    """A function or class that the pickle names; it cannot be called."""

    __slots__ = ("mark",)

    def __init__(self, mark: str) -> None:
        self.mark = mark


class _Dtype:
    """A dtype as numpy pickles it: its code now, its byte order by BUILD."""

    __slots__ = ("code", "order")

    def __init__(self, code: str) -> None:
        self.code, self.order = code, "="


class _Array:
    """An array as numpy pickles it: empty now, its shape, dtype and bytes by BUILD."""

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values: NDArray[Any] | None = None


class _Machine:
    """A pickle's stack, marks and memo, and the operations on them."""

    def __init__(self, size: int) -> None:
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks below each mark
        self.memo: dict[int, Any] = {}
        # bytes that texts may still be encoded to: in all no more than the file has
        self.room = size

    def step(self, name: str, argument: Any) -> None:
        """One operation other than STOP."""
        stack = self.stack
        if name in PUSHED:
            stack.append(argument)
        elif name in STRINGS:
            stack.append(argument.encode("latin1"))
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            self.memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif name in ("PROTO", "FRAME"):
            pass
        else:
            method = getattr(self, f"_{name.lower()}", None)
            if method is None:
                raise Refused(f"the operation {name}, which no data set needs")
            method(argument)

    def _mark(self, _: Any) -> None:
        self.below.append(self.stack)
        self.stack = []

    def _items(self) -> list[Any]:
        """What is above the last mark, taken off with it."""
        items, self.stack = self.stack, self.below.pop()
        return items

    def _pop(self, _: Any) -> None:
        self.stack.pop()

    def _pop_mark(self, _: Any) -> None:
        self._items()

    def _dup(self, _: Any) -> None:
        self.stack.append(self.stack[-1])

    def _empty_list(self, _: Any) -> None:
        self.stack.append([])

    def _empty_dict(self, _: Any) -> None:
        self.stack.append({})

    def _list(self, _: Any) -> None:
        items = self._items()
        self.stack.append(items)

    def _tuple(self, _: Any) -> None:
        items = self._items()
        self.stack.append(tuple(items))

    def _dict(self, _: Any) -> None:
        items = self._items()
        self.stack.append({})
        self._fill(items)

    def _tuple1(self, _: Any) -> None:
        self.stack[-1:] = [tuple(self._last(1))]

    def _tuple2(self, _: Any) -> None:
        self.stack[-2:] = [tuple(self._last(2))]

    def _tuple3(self, _: Any) -> None:
        self.stack[-3:] = [tuple(self._last(3))]

    def _last(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise IndexError("an empty stack")
        return self.stack[-count:]

    def _append(self, _: Any) -> None:
        item = self.stack.pop()
        self._target(list).append(item)

    def _appends(self, _: Any) -> None:
        items = self._items()
        self._target(list).extend(items)

    def _setitem(self, _: Any) -> None:
        items = self._last(2)
        del self.stack[-2:]
        self._fill(items)

    def _setitems(self, _: Any) -> None:
        self._fill(self._items())

    def _fill(self, items: list[Any]) -> None:
        """Require text keys: hashing deeply nested tuples would exhaust the stack."""
        target = self._target(dict)
        if len(items) % 2:
            raise Refused("a key without a value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | bytes):
                raise Refused(f"a key of type {type(key).__name__}")
            target[key] = value

    def _target(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise Refused(f"items for a {type(self.stack[-1]).__name__}")
        return self.stack[-1]

    def _global(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self._find(module, name)

    def _stack_global(self, _: Any) -> None:
        module, name = self._last(2)
        del self.stack[-2:]
        self._find(module, name)

    def _find(self, module: Any, name: Any) -> None:
        known = (
            NAMES.get((module, name)) if isinstance(module, str) and isinstance(name, str) else None
        )
        if known is None:
            raise Refused(f"{_shown(f'{module}.{name}')}, which no data set needs")
        self.stack.append(_Name(known))

    def _reduce(self, _: Any) -> None:
        called, arguments = self._last(2)
        del self.stack[-2:]
        if not isinstance(called, _Name) or not isinstance(arguments, tuple):
            raise Refused("a call of what is no function")
        self.stack.append(self._called(called.mark, arguments))

    def _called(self, mark: str, arguments: tuple[Any, ...]) -> Any:
        kinds = tuple(map(type, arguments))
        # how Python 3 writes bytes into pickles of protocol 2
        if mark == "encode" and kinds == (str, str):
            text, encoding = arguments
            if encoding != "latin1":
                raise Refused(f"an encoding {describe(encoding)}")
            self.room -= len(text)
            if self.room < 0:
                raise Refused("more bytes than the file has")
            return text.encode("latin1")
        if mark == "bytes" and not arguments:
            return b""
        if (
            mark == "reconstruct"
            and len(arguments) == 3
            and kinds[0] is _Name
            and arguments[0].mark == "ndarray"
        ):
            return _Array()
        if mark == "dtype" and len(arguments) == 3 and kinds[0] in (str, bytes):
            code = arguments[0] if kinds[0] is str else arguments[0].decode("latin1")
            if not NUMBERS.fullmatch(code):
                raise Refused(f"an array of type {_shown(code)}, which no data set needs")
            return _Dtype(code)
        raise Refused(f"a call of {mark} with other arguments than numpy writes")

    def _build(self, _: Any) -> None:
        made, state = self._last(2)
        del self.stack[-1:]
        if isinstance(made, _Dtype) and isinstance(state, tuple) and len(state) >= 5:
            order = state[1].decode("latin1") if isinstance(state[1], bytes) else state[1]
            if state[2:5] != (None, None, None) or order not in ORDERS:
                raise Refused("an array of structures")
            made.order = order
        elif isinstance(made, _Array) and isinstance(state, tuple) and len(state) == 5:
            made.values = _array(*state[1:])
        else:
            raise Refused(f"a state of {type(made).__name__}, which no data set needs")


def _array(shape: Any, dtype: Any, fortran: Any, data: Any) -> NDArray[Any]:
    """A view of bytes; their number must be what the shape says."""
    whole = (
        isinstance(shape, tuple)
        and len(shape) <= MOST_AXES
        and all(type(n) is int and 0 <= n < LARGE for n in shape)
    )
    if not (
        whole and isinstance(dtype, _Dtype) and isinstance(data, bytes) and isinstance(fortran, int)
    ):
        raise Refused("an array of other parts than numpy writes")
    kind = np.dtype(dtype.order.replace("|", "=") + dtype.code)
    if math.prod(shape) * kind.itemsize != len(data):
        raise Refused(
            f"{len(data):,} bytes for an array of shape {describe(shape)} and type {kind}"
        )
    return np.ndarray(shape, kind, data, order="F" if fortran else "C")


def _shown(text: str) -> str:
    """A name out of a file as it is where it is one, else quoted and cut."""
    return text if re.fullmatch(r"[\w.]{1,80}", text) else describe(text)


def read_pickle(data: bytes) -> dict[str, Any]:
    """The dictionary in a pickle, with text keys: arrays, texts, bytes, numbers, and lists of the
    last three.

    Raises ``ValueError`` for everything else, and for more than the file's own size can hold.
    """
    machine = _Machine(len(data))
    try:
        for count, (operation, argument, _) in enumerate(pickletools.genops(data)):
            if count >= MOST_OPERATIONS:
                raise Refused(f"more than {MOST_OPERATIONS:,} operations")
            if operation.name == "STOP":
                break
            machine.step(operation.name, argument)
        found = machine.stack.pop()
    except (IndexError, KeyError) as error:
        raise Refused(f"an operation without what it needs ({type(error).__name__})") from None
    if type(found) is not dict:
        raise Refused(f"a {type(found).__name__}")
    return {_decoded(key): _plain(value) for key, value in found.items()}


def _decoded(key: str | bytes) -> str:
    return key.decode("latin1") if isinstance(key, bytes) else key


def _plain(value: Any) -> Any:
    """The value of a key; what is nested is refused, since a few bytes can nest to any size."""
    if isinstance(value, _Array):
        if value.values is None:
            raise Refused("an array without its contents")
        return value.values
    if isinstance(value, SCALARS):
        return value
    if isinstance(value, list | tuple) and all(isinstance(item, SCALARS) for item in value):
        return list(value)
    raise Refused(f"a {type(value).__name__} of other things than numbers and texts")


def unpickle(path: Path) -> dict[str, Any]:
    """The dictionary in a pickled batch, with text keys. Bytes of Python 2 stay bytes."""
    data = contents(path)
    require(bool(data), str(path), "be a pickled dictionary of arrays", "an empty file", CURE)
    try:
        return read_pickle(data)
    except (ValueError, OverflowError, Warning) as error:  # Python warns of odd escapes in text
        got = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{path} must be a pickled dictionary of arrays, got {got}; {CURE}"
        ) from None
