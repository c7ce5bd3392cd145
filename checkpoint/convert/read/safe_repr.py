"""Shows values of other tools' files in messages, whatever they are.

A pickle of some hundred bytes may hold tuples of tuples, each twice the same one, whose `repr`
would take for ever, or a number of a million digits.
"""

from __future__ import annotations

import reprlib

_MOST_BITS = 256


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxtuple, self.maxlist, self.maxstring = 3, 12, 12, 60

    def repr_int(self, x: int, level: int) -> str:
        return "a huge number" if x.bit_length() > _MOST_BITS else str(x)

    def repr_instance(self, x: object, level: int) -> str:
        # What an object's own `repr` does is not known.
        plain = isinstance(x, float | complex | bytes | bytearray | bool) or x is None
        return super().repr_instance(x, level) if plain else f"a {type(x).__name__}"


_SHORT = _Short()


def safe_repr(value: object) -> str:
    """Return a value in words that are short, in a time that does not depend on the value."""
    return _SHORT.repr(value)
