"""Stands in for what a pickle names: inert globals, calls, and NumPy's arrays as data.

Nothing here is imported or called because a pickle says so. The functions below build the plain
data that known names would (`OrderedDict`, `torch.Size`, NumPy's arrays); a call of any other name
is a `Record` of the name and the arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from keepstep.checkpoint.convert.read.files import damaged

Constructor = Callable[..., object]
"""Returns the value that a call of a known name stands for; it only combines its arguments."""

Call = Callable[[str, tuple[object, ...], Mapping[str, object]], object]
"""Returns the value of a call, given a name, the arguments, and those by name."""

_MOST_DEPTH = 200
_NUMPY_TYPE = re.compile(r"\?|b1|[iu][1248]|f[248]|c(8|16)|[SU][0-9]{1,6}")


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

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __call__(self, *args: object, **keywords: object) -> Record:
        """Return what stands for the value that an object returns."""
        return Record(self.name, args, keywords)

    def __setitem__(self, key: object, value: object) -> None:
        self.entries[key] = value

    def append(self, item: object) -> None:
        """Note an item that was to be appended."""
        self.items.append(item)

    def extend(self, items: Iterable[object]) -> None:
        """Note items that were to be appended."""
        self.items.extend(items)

    add = append

    @property
    def attributes(self) -> Mapping[str, Any]:
        """The object's attributes, where its state is a mapping or that and one for slots."""
        parts = self.state if isinstance(self.state, tuple) else (self.state,)
        merged: dict[str, Any] = {}
        for part in parts:
            if isinstance(part, dict):
                merged.update((key, value) for key, value in part.items() if isinstance(key, str))
        return merged


class Global(type):
    """A name that a pickle refers to, such as `torch.float32`. It was not looked up.

    It is a class, as the unpickler expects of what instances are made of. To call it, or to make an
    instance, calls `call` with the name, the arguments, and those by name.
    """

    name: str

    def __new__(metaclass, name: str, call: Call = Record) -> Global:
        """Return a class of no behaviour."""

        def make(cls: Global, *args: object, **keywords: object) -> object:
            return call(name, args, keywords)

        made = super().__new__(metaclass, "Global", (), {"__slots__": (), "__new__": make})
        type.__setattr__(made, "name", name)
        return made

    def __init__(cls, name: str, call: Call = Record) -> None:
        super().__init__("Global", (), {})

    def __setattr__(cls, name: str, value: object) -> None:
        raise TypeError("attributes of a name are set")

    def __eq__(cls, other: object) -> bool:
        return isinstance(other, Global) and cls.name == other.name

    def __hash__(cls) -> int:
        return hash(cls.name)

    def __repr__(cls) -> str:
        return f"Global({cls.name!r})"


class _Dict(dict[Any, Any]):
    """A dictionary of a subclass: its attributes, such as a module's versions, are no content."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        pass


@dataclass(slots=True, eq=False)
class NumpyType:
    """A data type of NumPy, in the making: its state follows its name."""

    name: str
    order: str = "="

    def __setstate__(self, state: object) -> None:
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

    def __setstate__(self, state: object) -> None:
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
        "builtins.set": lambda items=(): set(_list(items)),
        "builtins.frozenset": lambda items=(): frozenset(_list(items)),
        "builtins.tuple": lambda items=(): tuple(_list(items)),
        "builtins.complex": _complex,
        "builtins.bytearray": _bytes,
        "builtins.bytes": _bytes,
        "_codecs.encode": _encode,
        "torch.Size": lambda items=(): tuple(_list(items)),
        "numpy.dtype": lambda name, *_: NumpyType(_text(name)),
        **numpy_names,
    }


def check_tree(root: object, location: str) -> None:
    """Refuse values that whoever walks over them would not come to the end of.

    A circle by way of a `Record` is accepted: objects have them, and nobody walks through records.

    Raises:
        CheckpointDamaged: a value contains itself, or is nested too deep.
    """
    seen: set[int] = set()

    def visit(value: object, path: set[int], depth: int) -> None:
        if depth > _MOST_DEPTH:
            raise damaged(location, f"its pickle is nested more than {_MOST_DEPTH} deep")
        inner = set() if isinstance(value, Record) else path | {id(value)}
        seen.add(id(value))
        for part in _parts(value):
            if id(part) in inner:
                raise damaged(location, "a value in its pickle contains itself")
            if id(part) not in seen:
                visit(part, inner, depth + 1)

    visit(root, set(), 0)


def _parts(value: object) -> Iterable[object]:
    """Return the parts of a value that have parts; of records all kinds."""
    match value:
        case dict():
            parts: Iterable[object] = value.values()
        case list() | tuple() | set() | frozenset():
            parts = value
        case Record():
            parts = (value.args, value.keywords, value.state, value.items, value.entries)
        case _:
            return ()
    return [part for part in parts if isinstance(part, _WITH_PARTS)]


_WITH_PARTS = (dict, list, tuple, set, frozenset, Record)


def _dict(content: object = ()) -> dict[Any, Any]:
    return _Dict(content if isinstance(content, dict) else map(_list, _list(content)))


def _list(items: object = ()) -> list[Any]:
    if not isinstance(items, list | tuple | set | frozenset):
        raise ValueError(f"a {type(items).__name__} is where items are expected")
    return list(items)


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
    if isinstance(content, bytes | bytearray | list | tuple):
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
    if isinstance(data, str):
        # As Python 2 wrote bytes.
        data = data.encode("utf-8", "surrogateescape")
    if not isinstance(data, bytes | bytearray) or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError("a NumPy array's elements are not bytes, or its shape not numbers")
    values: npt.NDArray[Any] = np.frombuffer(data, numpy_type) if data else np.empty(0, numpy_type)
    return values.reshape(shape, order="F" if order == "F" else "C")
