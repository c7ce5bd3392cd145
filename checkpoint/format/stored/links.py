"""Gives a stored object another name, instead of writing the same bytes again. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Link = Callable[[str, str, Sequence[bytes | memoryview]], bool]
"""Gives an object another name if it has exactly these bytes: `link(object, new name, bytes)`.

It returns False if the object has other bytes, does not exist, or cannot have another name; what is
under the new name is then undefined until it is written. It is durable after `flush`."""
