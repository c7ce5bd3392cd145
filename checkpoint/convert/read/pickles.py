"""Reads pickles without importing or calling anything that they name.

Python's unpickler reads them. A name becomes an inert `Global`; a call of it becomes a `Record`, or
plain data where the name is one of a few known ones (`checkpoint.convert.read.pickled_values`). So
no code runs that a pickle names.

Each pickle is scanned before: the unpickler sizes its memory by numbers in the pickle, and one
changed byte makes them any number.
"""

from __future__ import annotations

import codecs
import io
import pickle
import pickletools
from collections.abc import Callable, Mapping

from keepstep.checkpoint.convert.read.files import damaged
from keepstep.checkpoint.convert.read.pickled_values import (
    Constructor,
    Global,
    Record,
    check_tree,
)

Persistent = Callable[[object], object]
"""Returns the value of a persistent id: what a pickle refers to outside of itself."""

MOST_NBYTES = 2**28
"""The largest pickle: the metadata of a checkpoint with millions of shards has less."""

# Python 2's names of modules that later ones renamed.
_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_PUTS = ("PUT", "BINPUT", "LONG_BINPUT")
_EXTENSIONS = ("EXT1", "EXT2", "EXT4")
_ERRORS = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)

# Found before any file is read: finding a codec imports a module of Python's.
codecs.lookup("raw-unicode-escape")


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
        constructors: what to build of calls of known names; see `plain_constructors`.
        persistent: returns the values of persistent ids; without it there may be none.
        start: where the pickle begins.

    Raises:
        CheckpointDamaged: it is no pickle, or contains itself.
    """
    end, value, _ = _load(data, location, constructors, persistent, start)
    check_tree(value, location)
    return value, end


def names_in(data: bytes, location: str) -> frozenset[str]:
    """Return the names of classes and functions that a pickle refers to.

    Raises:
        CheckpointDamaged: as for `unpickle`.
    """
    _, _, names = _load(data, location, {}, lambda identity: None, 0)
    return names


def _load(
    data: bytes,
    location: str,
    constructors: Mapping[str, Constructor],
    persistent: Persistent | None,
    start: int,
) -> tuple[int, object, frozenset[str]]:
    try:
        end = _scan(data, start)
        unpickler = _InertUnpickler(data[start:end], constructors, persistent)
        return end, unpickler.load(), unpickler.names
    except _ERRORS as error:
        reason = str(error)[:200] or type(error).__name__
        raise damaged(location, f"its pickle cannot be read: {reason}") from None


def _scan(data: bytes, start: int) -> int:
    """Return where a pickle ends, once all of its opcodes and numbers are plausible."""
    stream = io.BytesIO(data)
    stream.seek(start)
    for opcode, argument, _ in pickletools.genops(stream):
        if opcode.name in _PUTS and not 0 <= int(argument or 0) <= len(data):
            raise ValueError(f"value {argument} is remembered of fewer")
        if opcode.name in _EXTENSIONS:
            raise ValueError("it names code by a number")
    return stream.tell()


class _InertUnpickler(pickle.Unpickler):
    """An unpickler that looks no name up."""

    def __init__(
        self, data: bytes, constructors: Mapping[str, Constructor], persistent: Persistent | None
    ) -> None:
        # Text of Python 2 may be bytes: they can be had back from it.
        super().__init__(
            io.BufferedReader(io.BytesIO(data), 2**17),
            encoding="utf-8",
            errors="surrogateescape",
        )
        self._constructors = constructors
        self._persistent = persistent
        self._globals: dict[str, Global] = {}

    @property
    def names(self) -> frozenset[str]:
        """The names of classes and functions that were referred to."""
        return frozenset(self._globals)

    def find_class(self, module: str, name: str) -> Global:
        """Return what stands for a name."""
        full_name = f"{_RENAMED.get(module, module)}.{name}"
        if full_name not in self._globals:
            self._globals[full_name] = Global(full_name, self._call)
        return self._globals[full_name]

    def persistent_load(self, pid: object) -> object:
        """Return the value of a persistent id."""
        if self._persistent is None:
            raise ValueError("a value lies outside of the pickle, which nothing explains")
        return self._persistent(pid)

    def _call(self, name: str, args: tuple[object, ...], keywords: Mapping[str, object]) -> object:
        if not keywords:
            match args:
                # Old protocols name a class within a class so.
                case (Global() as owner, str(attribute)) if name == "builtins.getattr":
                    return self.find_class(owner.name, attribute)
            # An object's class may be named by the first argument of a function that makes it.
            if name in ("copyreg.__newobj__", "copyreg._reconstructor") and args:
                if not isinstance(args[0], Global):
                    raise ValueError("an object is made of what is no class")
                name, args = args[0].name, args[1:] if name.endswith("__newobj__") else ()
            constructor = self._constructors.get(name)
            if constructor is not None:
                return constructor(*args)
        return Record(name, args, keywords)
