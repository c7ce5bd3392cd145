"""Makes the pieces of files of `torch.save`: PyTorch's bytes around tensors without data.

`torch.serialization.skip_data` leaves the places of tensors empty. A file that only notes what is
written, and where nothing is, so has the bytes between the tensors, however large these are. The
checksums in the zip are those of empty places, which PyTorch does not look at and `unzip -t` does.
"""

from __future__ import annotations

import io
import pickle
import re
from collections import deque
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import IO, Any, cast

import torch
from torch.serialization import skip_data

from keepstep.checkpoint.convert.write.pieces_of_files import (
    Piece,
    StoredTensor,
    Transposed,
    joined,
)
from keepstep.checkpoint.live.tensors import torch_dtype
from keepstep.torch_internals import fake_tensors

# The name of a storage's entry, and what follows it up to the storage.
_STORAGE = re.compile(rb"/data/(\d+)(?:FB..Z*)?\Z", re.DOTALL)


def torch_pieces(tree: object, pickle_module: Any = pickle) -> tuple[Piece, ...]:
    """Return the pieces of a file of `torch.save`.

    Args:
        tree: what to save: containers and values that pickle knows, and `StoredTensor` and
            `Transposed` where tensors are. A `StoredTensor` in two places has its bytes
            in the file once.
        pickle_module: as for `torch.save`.
    """
    with fake_tensors():
        tensors = _Tensors()
        content = tensors.placed(tree)
        parts = _saved(content, pickle_module)
    return joined(tensors.filled(parts))


@lru_cache(maxsize=4096)
def file_around_tensor(
    dtype: str, shape: tuple[int, ...], is_transposed: bool
) -> tuple[bytes, ...]:
    """Return what is before and after the elements in a file of `torch.save` with one tensor alone.

    Args:
        is_transposed: the elements are in the order of its transpose.

    Returns:
        one element, if the tensor has none.
    """
    # Nothing touches its memory. What makes tensors without any takes seconds to be loaded.
    tensor = torch.empty(shape[::-1] if is_transposed else shape, dtype=torch_dtype(dtype))
    parts = _saved(tensor.t() if is_transposed else tensor, pickle)
    around = [b""]
    for piece in parts:
        if isinstance(piece, int):
            around.append(b"")
        else:
            around[-1] += piece
    return tuple(around)


def torch_bytes(value: object) -> bytes:
    """Return the file of `torch.save` of a value without tensors."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


class _Tensors:
    """The tensors of a tree, in the order in which they are pickled."""

    def __init__(self) -> None:
        self._stored: list[StoredTensor] = []
        self._placed: dict[int, torch.Tensor] = {}

    def placed(self, value: object) -> Any:
        """Return a tree with tensors without data in the places of those that are stored."""
        if isinstance(value, Transposed):
            return self.placed(value.of).t()
        if isinstance(value, StoredTensor):
            if id(value) not in self._placed:
                self._placed[id(value)] = torch.empty(value.shape, dtype=torch_dtype(value.dtype))
                self._stored.append(value)
            return self._placed[id(value)]
        if isinstance(value, Mapping):
            return type(value)((key, self.placed(item)) for key, item in value.items())  # type: ignore[call-arg]
        if type(value) in (list, tuple):
            return type(value)(self.placed(item) for item in cast(Iterable[object], value))  # type: ignore[call-arg]
        if type(value) is deque:
            return deque(map(self.placed, value), value.maxlen)
        return value

    def filled(self, parts: Iterable[bytes | int]) -> Iterable[Piece]:
        """Yield the pieces of a file, given what is between its storages, and their sizes."""
        before = b""
        for part in parts:
            if isinstance(part, bytes):
                yield part
                before = (before + part)[-512:]
                continue
            name = _STORAGE.search(before)
            assert name is not None, before
            # PyTorch numbers storages in the order in which it pickles them.
            stored = self._stored[int(name[1])]
            assert stored.nbytes == part, (stored, part)
            yield from stored.pieces
            before = b""


class _Outline(io.RawIOBase):
    """A file that notes what is written, and how much is left out between."""

    def __init__(self) -> None:
        self.parts: list[bytes | int] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.parts.append(bytes(data))
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        assert whence == io.SEEK_CUR
        self.parts.append(offset)
        return offset


def _saved(content: object, pickle_module: Any) -> list[bytes | int]:
    outline = _Outline()
    with skip_data(materialize_fake_tensors=True):
        torch.save(content, cast(IO[bytes], outline), pickle_module=pickle_module)
    return outline.parts
