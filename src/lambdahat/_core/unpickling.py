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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lambdahat._core.check import describe

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
LITERAL = re.compile(r"(BIN)?INT[12]?|LONG[14]?|(BIN)?FLOAT|(SHORT_)?(BIN)?(UNICODE|BYTES)8?")
PUSHED = {opcode.name for opcode in pickletools.opcodes if LITERAL.fullmatch(opcode.name)}
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
        elif name not in ("PROTO", "FRAME"):
            self._build_up(name, argument)

    def _build_up(self, name: str, argument: Any) -> None:
        """Operations that make or fill collections, or call what is named."""
        match name:
            case "MARK":
                self.below.append(self.stack)
                self.stack = []
            case "POP":
                self.stack.pop()
            case "POP_MARK":
                self._above_mark()
            case "DUP":
                self.stack.append(self.stack[-1])
            case "EMPTY_LIST" | "EMPTY_DICT":
                self.stack.append([] if name == "EMPTY_LIST" else {})
            case "LIST" | "TUPLE":
                items = self._above_mark()
                self.stack.append(items if name == "LIST" else tuple(items))
            case "DICT":
                items = self._above_mark()
                self.stack.append({})
                self._fill(items)
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                self.stack.append(tuple(self._pop(int(name[-1]))))
            case "APPEND" | "APPENDS":
                items = self._pop(1) if name == "APPEND" else self._above_mark()
                self._target(list).extend(items)
            case "SETITEM" | "SETITEMS":
                self._fill(self._pop(2) if name == "SETITEM" else self._above_mark())
            case "GLOBAL":
                self._find(*argument.partition(" ")[::2])
            case "STACK_GLOBAL":
                self._find(*self._pop(2))
            case "REDUCE":
                called, arguments = self._pop(2)
                if not isinstance(called, _Name) or not isinstance(arguments, tuple):
                    raise Refused("a call of what is no function")
                self.stack.append(self._call(called.mark, arguments))
            case "BUILD":
                (state,) = self._pop(1)
                self._set_state(self.stack[-1], state)
            case _:
                raise Refused(f"the operation {name}, which no data set needs")

    def _above_mark(self) -> list[Any]:
        """What is above the last mark, taken off with it."""
        items, self.stack = self.stack, self.below.pop()
        return items

    def _pop(self, count: int) -> list[Any]:
        """The last items, taken off."""
        if len(self.stack) < count:
            raise IndexError("an empty stack")
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

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

    def _find(self, module: Any, name: Any) -> None:
        texts = isinstance(module, str) and isinstance(name, str)
        if not texts or (module, name) not in NAMES:
            raise Refused(f"{_show(f'{module}.{name}')}, which no data set needs")
        self.stack.append(_Name(NAMES[module, name]))

    def _call(self, mark: str, arguments: tuple[Any, ...]) -> Any:
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
        three, first = len(arguments) == 3, next(iter(arguments), None)
        if mark == "reconstruct" and three and isinstance(first, _Name) and first.mark == "ndarray":
            return _Array()
        if mark == "dtype" and three and kinds[0] in (str, bytes):
            code = _decode(first)
            if not NUMBERS.fullmatch(code):
                raise Refused(f"an array of type {_show(code)}, which no data set needs")
            return _Dtype(code)
        raise Refused(f"a call of {mark} with other arguments than numpy writes")

    @staticmethod
    def _set_state(made: Any, state: Any) -> None:
        if isinstance(made, _Dtype) and isinstance(state, tuple) and len(state) >= 5:
            order = _decode(state[1])
            if state[2:5] != (None, None, None) or order not in ORDERS:
                raise Refused("an array of structures")
            made.order = order
        elif isinstance(made, _Array) and isinstance(state, tuple) and len(state) == 5:
            made.values = _array(*state[1:])
        else:
            raise Refused(f"a state of {type(made).__name__}, which no data set needs")


def _array(shape: Any, dtype: Any, fortran: Any, data: Any) -> NDArray[Any]:
    """A view of bytes; their number must be what the shape says."""
    whole = isinstance(shape, tuple) and all(type(n) is int and 0 <= n < LARGE for n in shape)
    known = isinstance(dtype, _Dtype) and isinstance(data, bytes) and isinstance(fortran, int)
    if not whole or len(shape) > MOST_AXES or not known:
        raise Refused("an array of other parts than numpy writes")
    kind = np.dtype(dtype.order.replace("|", "=") + dtype.code)
    if math.prod(shape) * kind.itemsize != len(data):
        raise Refused(
            f"{len(data):,} bytes for an array of shape {describe(shape)} and type {kind}"
        )
    return np.ndarray(shape, kind, data, order="F" if fortran else "C")


def _show(text: str) -> str:
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
        result = machine.stack.pop()
    except (IndexError, KeyError) as error:
        raise Refused(f"an operation without what it needs ({type(error).__name__})") from None
    if type(result) is not dict:
        raise Refused(f"a {type(result).__name__}")
    return {_decode(key): _plain(value) for key, value in result.items()}


def _decode(text: Any) -> Any:
    return text.decode("latin1") if isinstance(text, bytes) else text


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
