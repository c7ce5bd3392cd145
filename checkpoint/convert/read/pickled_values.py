"""Values that stand for what a pickle names: globals, calls, and NumPy's arrays as data.

Pure. Nothing here is imported or called because a pickle says so. What a known name would build, if
it is plain data (`OrderedDict`, `torch.Size`, NumPy's arrays), is built by the functions below; for
everything else there is a `Record` of the name and the arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from keepstep.checkpoint.convert.read.files import damaged

Constructor = Callable[..., object]
"""Returns the value that a call of a known name stands for; it only combines its arguments."""

_MOST_DEPTH = 200
# How many values a tree may be when it is walked over, per value in it and at least: whatever a
# pickle refers to repeatedly, such as the shapes of shards, is there that often.
_MOST_REPETITIONS = 16
_LEAST_VALUES = 2**20
_MOST_KEY_ITEMS = 64
_MOST_KEY_DEPTH = 4
_NUMPY_TYPE = re.compile(r"\?|b1|[iu][1248]|f[248]|c(8|16)|[SU][0-9]{1,6}")


@dataclass(frozen=True, slots=True)
class Global:
    """A name that a pickle refers to, such as `torch.float32`. It was not looked up."""

    name: str


@dataclass(slots=True, eq=False)
class Record:
    """A call of a name that is not known, or an object of such a class. Nothing was called.

    Attributes:
        name: what was to be called, such as `argparse.Namespace` or `posix.system`.
        args: the arguments.
        keywords: the arguments by name.
        state: what the object's attributes were to be set from.
        items: what was to be appended to or put into the object.
        entries: what was to be set in the object by keys.
    """

    name: str
    args: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    state: Any = None
    items: list[Any] = field(default_factory=list)
    entries: dict[Any, Any] = field(default_factory=dict)

    @property
    def attributes(self) -> Mapping[str, Any]:
        """The object's attributes, where its state is a mapping or that and one for slots."""
        parts = self.state if isinstance(self.state, tuple) else (self.state,)
        merged: dict[str, Any] = {}
        for part in parts:
            if isinstance(part, dict):
                merged.update((key, value) for key, value in part.items() if isinstance(key, str))
        return merged


@dataclass(slots=True, eq=False)
class NumpyType:
    """A data type of NumPy, in the making: its state follows its name."""

    name: str
    order: str = "="

    def build(self, state: object) -> None:
        """Take the byte order from the state."""
        order = state[1] if isinstance(state, tuple) and len(state) > 1 else None
        if order not in ("<", ">", "=", "|"):
            raise ValueError("no byte order is in the state of a NumPy data type")
        self.order = order

    def dtype(self) -> np.dtype[Any] | None:
        """Return the type, or None for one that is not plain numbers or text."""
        return np.dtype(self.order + self.name) if _NUMPY_TYPE.fullmatch(self.name) else None


@dataclass(slots=True, eq=False)
class NumpyArray:
    """An array of NumPy in a pickle. `values` is None if its elements are Python objects."""

    values: npt.NDArray[Any] | None = None

    def build(self, state: object) -> None:
        """Take shape, type and elements from the state."""
        if not isinstance(state, tuple) or len(state) != 5:
            raise ValueError("the state of a NumPy array is not five values")
        _, shape, dtype, is_fortran, data = state
        self.values = _numpy_values(data, dtype, shape, "F" if is_fortran is True else "C")


def plain_constructors() -> dict[str, Constructor]:
    """Return what builds plain containers and NumPy's values, by the names in pickles."""
    numpy_names: dict[str, Constructor] = {
        f"{module}.{name}": constructor
        for core in ("numpy.core", "numpy._core")
        for module, name, constructor in (
            (f"{core}.multiarray", "_reconstruct", _empty_numpy_array),
            (f"{core}.multiarray", "scalar", _numpy_scalar),
            (f"{core}.numeric", "_frombuffer", _numpy_from_buffer),
        )
    }
    return {
        "collections.OrderedDict": _dict,
        "collections.defaultdict": lambda factory=None, content=(): _dict(content),
        "collections.Counter": _dict,
        "collections.deque": lambda items=(), most=None: _list(items),
        "builtins.dict": _dict,
        "builtins.list": _list,
        "builtins.set": lambda items=(): set(_keys(items)),
        "builtins.frozenset": lambda items=(): frozenset(_keys(items)),
        "builtins.tuple": lambda items=(): tuple(_list(items)),
        "builtins.complex": _complex,
        "builtins.bytearray": _bytes,
        "builtins.bytes": _bytes,
        "_codecs.encode": _encode,
        "torch.Size": lambda items=(): tuple(_list(items)),
        "numpy.dtype": lambda name, *_: NumpyType(_text(name)),
        **numpy_names,
    }


def check_key(key: object) -> None:
    """Refuse keys whose hash or comparison could fail, or take long.

    Raises:
        TypeError: it is no number, text, name, record, or small tuple of these.
    """
    if not isinstance(key, tuple):
        _check_plain_key(key)
        return
    pending: list[tuple[tuple[object, ...], int]] = [(key, 1)]
    count = 0
    while pending:
        items, depth = pending.pop()
        # A tuple may have another one many times, so its items count each time.
        count += len(items)
        if count > _MOST_KEY_ITEMS or depth > _MOST_KEY_DEPTH:
            raise TypeError(f"a tuple of more than {_MOST_KEY_ITEMS} items is a key, or a deep one")
        for item in items:
            if isinstance(item, tuple):
                pending.append((item, depth + 1))
            else:
                _check_plain_key(item)


def _check_plain_key(key: object) -> None:
    if isinstance(key, int) and key.bit_length() > 64:
        raise TypeError("an integer of more than 64 bits is a key")
    if key is not None and not isinstance(key, str | bytes | int | float | Global | Record):
        raise TypeError(f"a {type(key).__name__} is a key")


def check_tree(root: object, location: str) -> None:
    """Refuse values that whoever walks over them would not come to the end of.

    A pickle of a few bytes can contain itself, be nested without end, or refer to a value ten
    times, which refers to another ten times, and so on. A circle by way of a `Record` is accepted:
    objects have them, and nobody walks through records.

    Raises:
        CheckpointDamaged: the values are such.
    """
    counts: dict[int, int] = {}
    leaves, nested = _parts(root)
    # For each value on the path: itself, what is left of its parts, how many values it is so far.
    path: list[tuple[object, list[object]]] = [(root, nested)]
    totals = [1 + leaves]
    distinct = 1 + leaves
    depth_of: dict[int, int] = {id(root): 0}
    # Where the records on the path stand.
    records: list[int] = [0] if isinstance(root, Record) else []
    while path:
        value, pending = path[-1]
        if not pending:
            path.pop()
            del depth_of[id(value)]
            if records and records[-1] == len(path):
                records.pop()
            counts[id(value)] = total = totals.pop()
            if totals:
                totals[-1] += total
        else:
            child = pending.pop()
            number = id(child)
            if number in counts:
                totals[-1] += counts[number]
            elif number in depth_of:
                if not records or records[-1] < depth_of[number]:
                    raise damaged(location, "a value in its pickle contains itself")
                totals[-1] += 1
            else:
                leaves, nested = _parts(child)
                distinct += 1 + leaves
                if not nested:
                    counts[number] = 1 + leaves
                    totals[-1] += 1 + leaves
                else:
                    if len(path) >= _MOST_DEPTH:
                        raise damaged(
                            location, f"its pickle is nested more than {_MOST_DEPTH} deep"
                        )
                    depth_of[number] = len(path)
                    if isinstance(child, Record):
                        records.append(len(path))
                    path.append((child, nested))
                    totals.append(1 + leaves)
        if totals and totals[-1] > _LEAST_VALUES + _MOST_REPETITIONS * distinct:
            raise damaged(
                location,
                f"its pickle has {distinct} values, and stands for more than {totals[-1]} by "
                "references",
            )


_WITH_PARTS = frozenset({dict, list, tuple, set, frozenset, Record})


def _parts(value: object) -> tuple[int, list[object]]:
    """Return how many parts of a value have no parts, and the others; for records all kinds."""
    match value:
        case dict():
            parts: Collection[object] = value.values()
        case list() | tuple() | set() | frozenset():
            parts = value
        case Record():
            parts = (value.args, value.keywords, value.state, value.items, value.entries)
        case _:
            return 0, []
    nested = [part for part in parts if type(part) in _WITH_PARTS and part]
    return len(parts) - len(nested), nested


def _dict(content: object = ()) -> dict[Any, Any]:
    if isinstance(content, dict):
        return dict(content)
    built = {}
    for pair in _list(content):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ValueError("a dictionary is not made of pairs")
        check_key(pair[0])
        built[pair[0]] = pair[1]
    return built


def _list(items: object = ()) -> list[Any]:
    if not isinstance(items, list | tuple | set | frozenset):
        raise ValueError(f"a {type(items).__name__} is where items are expected")
    return list(items)


def _keys(items: object) -> list[Any]:
    keys = _list(items)
    for key in keys:
        check_key(key)
    return keys


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"a {type(value).__name__} is where text is expected")
    return value


def _complex(real: object, imaginary: object = 0.0) -> complex:
    if not isinstance(real, int | float) or not isinstance(imaginary, int | float):
        raise ValueError("a complex number is not made of two numbers")
    return complex(real, imaginary)


def _bytes(content: object = b"", encoding: object = None) -> bytes:
    if isinstance(content, str):
        return _encode(content, encoding)
    if isinstance(content, bytes):
        return content
    if isinstance(content, list | tuple):
        return bytes(content)
    # A number would be that many zeros.
    raise ValueError(f"bytes are made of a {type(content).__name__}")


def _encode(content: object, encoding: object = None) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise ValueError("text is encoded by another codec than latin1")
    return _text(content).encode("latin-1")


def _empty_numpy_array(kind: object, shape: object = (0,), code: object = b"b") -> NumpyArray:
    return NumpyArray()


def _numpy_scalar(dtype: object, data: object = b"") -> object:
    values = _numpy_values(data, dtype, (), "C")
    if values is None:
        raise ValueError("a NumPy number has a type that is none of numbers")
    return values.item()


def _numpy_from_buffer(data: object, dtype: object, shape: object, order: object) -> NumpyArray:
    return NumpyArray(_numpy_values(data, dtype, shape, "F" if order == "F" else "C"))


def _numpy_values(
    data: object, dtype: object, shape: object, order: str
) -> npt.NDArray[Any] | None:
    if not isinstance(dtype, NumpyType) or not isinstance(shape, tuple):
        raise ValueError("a NumPy array has no data type or no shape")
    numpy_type = dtype.dtype()
    if numpy_type is None or numpy_type.itemsize == 0:
        return None
    if not isinstance(data, bytes) or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError("a NumPy array's elements are not bytes, or its shape not numbers")
    values: npt.NDArray[Any] = np.frombuffer(data, numpy_type) if data else np.empty(0, numpy_type)
    return values.reshape(shape, order="F" if order == "F" else "C")
