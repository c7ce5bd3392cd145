"""Compares the tensors of a source that fill one live tensor: only one of them can.

A model ties weights, or a state has one memory under two names. A source that has a tensor under
each of these names may have different ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.described import slot_key, tie_of
from keepstep.checkpoint.format.layout.documents import TIED
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.layout.names import MODEL_PREFIX, OPTIMIZER_PREFIX, parameter_of
from keepstep.checkpoint.format.layout.source import BoxRequest, Source
from keepstep.checkpoint.live.source_match import Origin, SourceMatcher
from keepstep.checkpoint.live.tensors import LiveState, LiveTensor

_COMPARED_NBYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class _FurtherName:
    """A live tensor under a further name, and whether it is transposed there."""

    tensor: LiveTensor
    alias: LiveTensor
    is_transposed: bool


def differing_names(
    state: LiveState, source: Source, matcher: SourceMatcher, origins: Mapping[str, Origin | None]
) -> list[str]:
    """Return the further names of live tensors that differ in the source, in words, one a line.

    It compares the bits of this rank's elements. It reads both, in parts of 16 MiB.

    Args:
        state: the live state.
        source: the source to read.
        matcher: finds the source's tensor for a live one.
        origins: its results, by the keys of live tensors.
    """
    problems: dict[str, str] = {}
    for further in _further_names(state, source):
        first, alias = further.tensor.key, further.alias.key
        origin = origins[first]
        if origin is None or alias in problems:
            continue
        other = matcher.find(further.alias)
        assert other is not None, "the source has a tensor of this name"
        if other.key == origin.key:
            continue
        if not _are_equal(origin, other, further, source):
            problems[alias] = (
                f"{alias}: differs in the source from {first}, and both are one tensor here; "
                "untie them"
            )
    return list(problems.values())


def _further_names(state: LiveState, source: Source) -> Iterator[_FurtherName]:
    """Yield the live tensors that a source has under a further name, too."""
    tied = state.documents.get(TIED) or {}
    aliases: dict[str, list[tuple[str, bool]]] = {}
    for alias in tied:
        tie = tie_of(tied, f"{MODEL_PREFIX}{alias}")
        assert tie is not None, "an entry of this document is a tie"
        aliases.setdefault(tie.key, []).append((f"{MODEL_PREFIX}{alias}", tie.is_transposed))
    shapes = {tensor.key: tensor.global_shape for tensor in state.tensors}
    by_memory: dict[object, LiveTensor] = {}
    for tensor in state.tensors:
        parameter = parameter_of(tensor.key)
        for alias, is_transposed in aliases.get(parameter, ()):
            key = alias
            if tensor.key != parameter:
                key = slot_key(alias, tensor.key.rpartition("/")[2])
            # A name under which the state has a tensor of its own is no further one.
            if key in source.tensors and key not in shapes:
                turns = is_transposed and shapes.get(parameter) == tensor.global_shape
                alias_tensor = _transposed(tensor) if turns else tensor
                yield _FurtherName(tensor, replace(alias_tensor, key=key), turns)
        data = tensor.data
        # Shared numbers of optimizers are compared separately.
        is_number = tensor.key.startswith(OPTIMIZER_PREFIX) and not tensor.global_shape
        if data.numel() and data.data_ptr() and not is_number:
            memory = (data.data_ptr(), data.device, data.dtype, data.shape, data.stride())
            first = by_memory.setdefault(memory, tensor)
            if first.key != tensor.key and first.box == tensor.box and tensor.key in source.tensors:
                yield _FurtherName(first, tensor, is_transposed=False)


def _transposed(tensor: LiveTensor) -> LiveTensor:
    return replace(
        tensor,
        global_shape=tensor.global_shape[::-1],
        box=Box(tensor.box.offset[::-1], tensor.box.shape[::-1]),
        data=tensor.data.t(),
    )


def _are_equal(origin: Origin, other: Origin, further: _FurtherName, source: Source) -> bool:
    """Return whether two tensors of a source have the same bits in the place of one live box."""
    is_turned = further.is_transposed ^ origin.is_transposed ^ other.is_transposed
    shape = other.spec.shape[::-1] if is_turned else other.spec.shape
    if origin.spec.dtype != other.spec.dtype or origin.spec.shape != shape:
        return False
    common = origin.in_its_terms(further.tensor).box.intersect(Box.whole(shape))
    dtype = numpy_dtype(origin.spec.dtype)
    for box in _parts(common, dtype.itemsize):
        turned = Box(box.offset[::-1], box.shape[::-1]) if is_turned else box
        first, second = _read(source, origin.key, box), _read(source, other.key, turned)
        if is_turned:
            second = second.transpose(1, 0, 2)
        if not np.array_equal(first, second):
            return False
    return True


def _parts(box: Box | None, itemsize: int) -> Iterator[Box]:
    """Yield a box in parts of about `_COMPARED_NBYTES`, cut along its first dimension."""
    if box is None or not box.size:
        return
    if not box.shape:
        yield box
        return
    rows = max(_COMPARED_NBYTES // (box.size // box.shape[0] * itemsize), 1)
    for start in range(0, box.shape[0], rows):
        count = min(rows, box.shape[0] - start)
        yield Box((box.offset[0] + start, *box.offset[1:]), (count, *box.shape[1:]))


def _read(source: Source, key: str, box: Box) -> np.ndarray:
    """Return a box's bytes, an element's along the last axis."""
    itemsize = numpy_dtype(source.tensors[key].dtype).itemsize
    content = np.empty((*box.shape, itemsize), np.uint8)
    source.read([BoxRequest(key, box, content.reshape(-1).data)])
    return content
