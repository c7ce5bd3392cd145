"""Reads pickles without importing, calling or instantiating anything that they name.

Pure. A pickle is a program for a stack machine; this is such a machine, in which names are inert
(`Global`), calls of unknown names are noted (`Record`), and calls of a few known ones build plain
data (`checkpoint.convert.read.pickled_values`). Python's own unpickler is not used: it sizes
its memory by numbers in the pickle, and looks for methods on what it builds. The opcodes are
described in the standard library's `pickletools`.

What a pickle makes takes a bounded multiple of its size in time and memory.
"""

from __future__ import annotations

import codecs
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from keepstep.checkpoint.convert.read.files import damaged
from keepstep.checkpoint.convert.read.pickled_values import (
    Constructor,
    Global,
    NumpyArray,
    NumpyType,
    Record,
    check_key,
    check_tree,
)
from keepstep.checkpoint.errors import CheckpointDamaged

Persistent = Callable[[object], object]
"""Returns the value of a persistent id: what a pickle refers to outside of itself."""

MOST_NBYTES = 2**28
"""The largest pickle: the metadata of a checkpoint with millions of shards has less."""

_MOST_OPERATIONS = 2**26
_MOST_CONTAINERS = 2**23
_MOST_LINE_NBYTES = 2**16
_MOST_INTEGER_NBYTES = 1024
_COPIED = frozenset({str, bytes, list, tuple, dict, set, frozenset})
# What constructors copy, in items or bytes, per byte of the pickle; and for the smallest.
_COPIED_PER_BYTE = 4
_COPIED_BY_ANY = 2**16

# Python 2's names of modules that later ones renamed.
_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}

# Found before any file is read: finding a codec imports a module of Python's.
_RAW_UNICODE = codecs.lookup("raw-unicode-escape")


def unpickle(
    data: bytes,
    location: str,
    constructors: Mapping[str, Constructor],
    persistent: Persistent | None = None,
    start: int = 0,
) -> tuple[object, int]:
    """Return the value that a pickle stands for, and where the pickle ends.

    Args:
        data: bytes that have a pickle.
        location: where they are, for error messages.
        constructors: what to build of calls of known names; see `plain_constructors`.
        persistent: returns the values of persistent ids; without it there may be none.
        start: where the pickle begins.

    Raises:
        CheckpointDamaged: it is no pickle, or an absurd one; the message says at which byte.
    """
    machine = _Machine(data, start, location, constructors, persistent)
    value = machine.run()
    check_tree(value, location)
    return value, machine.position


def names_in(data: bytes, location: str) -> frozenset[str]:
    """Return the names of classes and functions that a pickle refers to.

    Raises:
        CheckpointDamaged: as for `unpickle`.
    """
    machine = _Machine(data, 0, location, {}, lambda identity: None)
    machine.run()
    return frozenset(machine.names)


class _Machine:
    """The state of one pickle's execution."""

    def __init__(
        self,
        data: bytes,
        start: int,
        location: str,
        constructors: Mapping[str, Constructor],
        persistent: Persistent | None,
    ) -> None:
        self._data = data
        self.position = start
        self._location = location
        self._constructors = constructors
        self._persistent = persistent
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._globals: dict[str, Global] = {}
        self._containers = 0
        self._copied = 0
        self._most_copied = _COPIED_BY_ANY + _COPIED_PER_BYTE * len(data)

    @property
    def names(self) -> Iterable[str]:
        """The names of classes and functions that were referred to so far."""
        return self._globals

    def run(self) -> object:
        """Execute the opcodes up to the end of the pickle, and return the value."""
        if len(self._data) > MOST_NBYTES:
            raise damaged(self._location, f"its pickle has {len(self._data)} bytes")
        operations, data = _OPERATIONS, self._data
        at = self.position
        try:
            for _ in range(_MOST_OPERATIONS):
                at = self.position
                code = data[at]
                self.position = at + 1
                if code == _STOP:
                    return self._stack.pop()
                operations[code](self)
            raise ValueError(f"more than {_MOST_OPERATIONS} operations")
        except CheckpointDamaged:
            raise
        except IndexError:
            reason = "it ends too early, or takes a value that is not there"
        except KeyError as error:
            reason = f"there is no value or operation {str(error)[:100]}"
        except (ValueError, TypeError, OverflowError, struct.error) as error:
            reason = str(error)[:200]
        raise damaged(self._location, f"its pickle cannot be read at byte {at}: {reason}")

    # What operations consist of.

    def _take(self, nbytes: int) -> bytes:
        end = self.position + nbytes
        if nbytes < 0 or end > len(self._data):
            raise ValueError(f"{nbytes} bytes are announced, and it ends before")
        taken = self._data[self.position : end]
        self.position = end
        return taken

    def _number(self, layout: struct.Struct) -> Any:
        (number,) = layout.unpack_from(self._data, self.position)
        self.position += layout.size
        return number

    def _line(self) -> bytes:
        end = self._data.find(b"\n", self.position, self.position + _MOST_LINE_NBYTES)
        if end < 0:
            raise ValueError("a line does not end")
        line = self._data[self.position : end]
        self.position = end + 1
        return line

    def _pop_to_mark(self) -> list[Any]:
        start = self._marks.pop()
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def _push_container(self, container: object) -> None:
        self._containers += 1
        if self._containers > _MOST_CONTAINERS:
            raise ValueError(f"more than {_MOST_CONTAINERS} containers and objects")
        self._stack.append(container)

    def _push_global(self, module: str, name: str) -> None:
        full_name = f"{_RENAMED.get(module, module)}.{name}"
        self._stack.append(self._globals.setdefault(full_name, Global(full_name)))

    def _call(self, function: object, args: object, keywords: object = None) -> None:
        if not isinstance(args, tuple) or not isinstance(keywords, dict | None):
            raise ValueError("arguments of a call are no tuple")
        for arg in args:
            if type(arg) in _COPIED:
                self._copied += len(arg)
        if self._copied > self._most_copied:
            raise ValueError("calls copy far more than the pickle has")
        name = function.name if isinstance(function, Global | Record) else None
        if name is None:
            raise ValueError(f"a {type(function).__name__} is called")
        if isinstance(function, Global) and not keywords:
            # An object's class may be named by the first argument of a function that makes it.
            if name in ("copyreg.__newobj__", "copyreg._reconstructor") and args:
                if not isinstance(args[0], Global):
                    raise ValueError("an object is made of what is no class")
                name, args = args[0].name, args[1:] if name.endswith("__newobj__") else ()
            constructor = self._constructors.get(name)
            if constructor is not None:
                self._push_container(constructor(*args))
                return
        self._push_container(Record(name, args, keywords or {}))

    # Operations, in the order of `pickletools.opcodes`.

    def _int_line(self) -> None:
        line = self._line()
        constants = {b"00": False, b"01": True}
        self._stack.append(constants[line] if line in constants else _parsed_integer(line))

    def _long_line(self) -> None:
        self._stack.append(_parsed_integer(self._line().removesuffix(b"L")))

    def _integer(self, nbytes: int) -> None:
        if not 0 <= nbytes <= _MOST_INTEGER_NBYTES:
            raise ValueError(f"an integer has {nbytes} bytes")
        self._stack.append(int.from_bytes(self._take(nbytes), "little", signed=True))

    def _float_line(self) -> None:
        self._stack.append(float(self._line()))

    def _string_line(self) -> None:
        line = self._line().strip()
        if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b'"', b"'"):
            raise ValueError("text has no quotes")
        self._stack.append(_python2_text(codecs.escape_decode(line[1:-1])[0]))

    def _unicode_line(self) -> None:
        self._stack.append(_RAW_UNICODE.decode(self._line())[0])

    # The operations that metadata of many shards consists of have no calls inside.

    def _byte(self) -> None:
        self._stack.append(self._data[self.position])
        self.position += 1

    def _short_text(self) -> None:
        start = self.position + 1
        # Where it ends behind the pickle, the next operation is not found.
        self.position = end = start + self._data[start - 1]
        self._stack.append(self._data[start:end].decode("utf-8", "surrogatepass"))

    def _get_near(self) -> None:
        self._stack.append(self._memo[self._data[self.position]])
        self.position += 1

    def _get_far(self) -> None:
        self._stack.append(self._memo[_U4.unpack_from(self._data, self.position)[0]])
        self.position += 4

    def _put_near(self) -> None:
        self._memo[self._data[self.position]] = self._stack[-1]
        self.position += 1

    def _put_far(self) -> None:
        self._memo[_U4.unpack_from(self._data, self.position)[0]] = self._stack[-1]
        self.position += 4

    def _memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _append_one(self) -> None:
        value = self._stack.pop()
        self._extend(self._stack[-1], [value])

    def _append_many(self) -> None:
        items = self._pop_to_mark()
        self._extend(self._stack[-1], items)

    def _extend(self, target: object, items: list[Any]) -> None:
        if isinstance(target, list):
            target.extend(items)
        elif isinstance(target, Record):
            target.items.extend(items)
        else:
            raise ValueError(f"a {type(target).__name__} is appended to")

    def _add_items(self) -> None:
        items = self._pop_to_mark()
        target = self._stack[-1]
        if isinstance(target, set):
            for item in items:
                check_key(item)
            target.update(items)
        else:
            self._extend(target, items)

    def _set_one(self) -> None:
        value = self._stack.pop()
        self._set([self._stack.pop(), value])

    def _set_many(self) -> None:
        self._set(self._pop_to_mark())

    def _set(self, items: list[Any]) -> None:
        target = self._stack[-1]
        entries = target.entries if isinstance(target, Record) else target
        if not isinstance(entries, dict) or len(items) % 2:
            raise ValueError(f"keys are set in a {type(target).__name__}, or one has no value")
        for key in items[::2]:
            if type(key) is not str:
                check_key(key)
        entries.update(zip(items[::2], items[1::2], strict=True))

    def _dict_from_mark(self) -> None:
        items = self._pop_to_mark()
        self._push_container({})
        self._set(items)

    def _frozenset_from_mark(self) -> None:
        items = self._pop_to_mark()
        for item in items:
            check_key(item)
        self._push_container(frozenset(items))

    def _tuple(self, count: int) -> None:
        if len(self._stack) < count:
            raise IndexError
        items = tuple(self._stack[-count:])
        del self._stack[-count:]
        self._push_container(items)

    def _pop(self) -> None:
        # A mark lies on the stack like a value.
        if self._marks and self._marks[-1] >= len(self._stack):
            self._marks.pop()
        else:
            self._stack.pop()

    def _global_lines(self) -> None:
        module = self._line().decode()
        self._push_global(module, self._line().decode())

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise ValueError("a name is no text")
        self._push_global(module, name)

    def _reduce(self) -> None:
        args = self._stack.pop()
        self._call(self._stack.pop(), args)

    def _new_object_with_keywords(self) -> None:
        keywords, args = self._stack.pop(), self._stack.pop()
        self._call(self._stack.pop(), args, keywords)

    def _instance_lines(self) -> None:
        args = tuple(self._pop_to_mark())
        self._global_lines()
        self._call(self._stack.pop(), args)

    def _object_from_mark(self) -> None:
        function, *args = self._pop_to_mark()
        self._call(function, tuple(args))

    def _build(self) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if isinstance(target, Record):
            target.state = state
        elif isinstance(target, NumpyArray | NumpyType):
            target.build(state)
        # Attributes of containers and tensors, such as the versions that a module notes on its
        # state_dict, are no part of their content.

    def _persistent_id(self, value: object) -> None:
        if self._persistent is None:
            raise ValueError("a value lies outside of the pickle, which nothing explains")
        self._stack.append(self._persistent(value))

    def _drop_to_mark(self) -> None:
        self._pop_to_mark()

    def _frame(self) -> None:
        # Only a hint how much to read at once.
        self._take(8)

    def _protocol(self) -> None:
        version = self._take(1)[0]
        if version > 5:
            raise ValueError(f"its protocol is {version}, and 5 is the last one known")


def _parsed_integer(line: bytes) -> int:
    if len(line) > _MOST_INTEGER_NBYTES:
        raise ValueError("an integer is too long")
    return int(line)


def _python2_text(data: bytes) -> str | bytes:
    """Return a string of Python 2 as text, if it is."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


_U1, _U2, _U4, _U8 = (struct.Struct(f"<{code}") for code in "BHIQ")
_I4 = struct.Struct("<i")
_F8 = struct.Struct(">d")
_STOP = ord(".")


def _pushes(read: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    return lambda m: m._stack.append(read(m))


def _text_of(length: struct.Struct) -> Callable[[_Machine], None]:
    return _pushes(lambda m: m._take(m._number(length)).decode("utf-8", "surrogatepass"))


def _bytes_of(length: struct.Struct) -> Callable[[_Machine], None]:
    return _pushes(lambda m: m._take(m._number(length)))


def _python2_of(length: struct.Struct) -> Callable[[_Machine], None]:
    return _pushes(lambda m: _python2_text(m._take(m._number(length))))


_OPERATIONS: Mapping[int, Callable[[_Machine], None]] = {
    ord(code): operation
    for code, operation in {
        "I": _Machine._int_line,
        "J": _pushes(lambda m: m._number(_I4)),
        "K": _Machine._byte,
        "M": _pushes(lambda m: m._number(_U2)),
        "L": _Machine._long_line,
        "\x8a": lambda m: m._integer(m._number(_U1)),
        "\x8b": lambda m: m._integer(m._number(_I4)),
        "S": _Machine._string_line,
        "T": _python2_of(_I4),
        "U": _python2_of(_U1),
        "B": _bytes_of(_U4),
        "C": _bytes_of(_U1),
        "\x8e": _bytes_of(_U8),
        "\x96": _bytes_of(_U8),
        "N": lambda m: m._stack.append(None),
        "\x88": lambda m: m._stack.append(True),
        "\x89": lambda m: m._stack.append(False),
        "V": _Machine._unicode_line,
        "\x8c": _Machine._short_text,
        "X": _text_of(_U4),
        "\x8d": _text_of(_U8),
        "F": _Machine._float_line,
        "G": _pushes(lambda m: m._number(_F8)),
        "]": lambda m: m._push_container([]),
        "a": _Machine._append_one,
        "e": _Machine._append_many,
        "l": lambda m: m._push_container(m._pop_to_mark()),
        ")": lambda m: m._stack.append(()),
        "t": lambda m: m._push_container(tuple(m._pop_to_mark())),
        "\x85": lambda m: m._tuple(1),
        "\x86": lambda m: m._tuple(2),
        "\x87": lambda m: m._tuple(3),
        "}": lambda m: m._push_container({}),
        "d": _Machine._dict_from_mark,
        "s": _Machine._set_one,
        "u": _Machine._set_many,
        "\x8f": lambda m: m._push_container(set()),
        "\x90": _Machine._add_items,
        "\x91": _Machine._frozenset_from_mark,
        "0": _Machine._pop,
        "2": lambda m: m._stack.append(m._stack[-1]),
        "(": lambda m: m._marks.append(len(m._stack)),
        "1": _Machine._drop_to_mark,
        "g": lambda m: m._stack.append(m._memo[_parsed_integer(m._line())]),
        "h": _Machine._get_near,
        "j": _Machine._get_far,
        "p": lambda m: m._memo.__setitem__(_parsed_integer(m._line()), m._stack[-1]),
        "q": _Machine._put_near,
        "r": _Machine._put_far,
        "\x94": _Machine._memoize,
        "c": _Machine._global_lines,
        "\x93": _Machine._stack_global,
        "R": _Machine._reduce,
        "b": _Machine._build,
        "i": _Machine._instance_lines,
        "o": _Machine._object_from_mark,
        "\x81": _Machine._reduce,
        "\x92": _Machine._new_object_with_keywords,
        "\x80": _Machine._protocol,
        "P": lambda m: m._persistent_id(m._line().decode()),
        "Q": lambda m: m._persistent_id(m._stack.pop()),
        "\x95": _Machine._frame,
    }.items()
}
