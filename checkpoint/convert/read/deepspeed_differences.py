"""Checks that all ranks' files agree on replicated values.

Ranks have the same number of steps. A script may add different values on each rank, such as states
of random generators; the first rank's are carried then, and the others' are left out by name.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence

import numpy as np

from keepstep.checkpoint.convert.read.arrays import FileArray, MemoryArray
from keepstep.checkpoint.convert.read.deepspeed_files import ModelFile, is_state
from keepstep.checkpoint.convert.read.files import damaged
from keepstep.checkpoint.convert.read.foreign_source import LeftOut
from keepstep.checkpoint.convert.read.pickled_values import Global, NumpyArray, NumpyType, Record
from keepstep.checkpoint.convert.read.safe_repr import safe_repr

_MOST_COMPARED_NBYTES = 2**20
_MOST_DEPTH = 200
_STEPS = "global_steps"


class Comparison(enum.Enum):
    """Says whether two values of pickles are equal."""

    EQUAL = "equal"
    DIFFERENT = "different"
    NOT_COMPARED = "not compared"
    """They are tensors too large to be read for this."""


_RELATIONS = {
    Comparison.DIFFERENT: "differs from",
    Comparison.NOT_COMPARED: "is too large to be compared with",
}


def differences(files: Sequence[ModelFile]) -> Iterator[LeftOut]:
    """Yield what of the ranks' files is not carried because the first file has another value.

    Args:
        files: the modules' files of all ranks; the first one's values are carried.

    Raises:
        CheckpointDamaged: they have different numbers of steps.
    """
    first = files[0]
    for other in files[1:]:
        if other.content.get(_STEPS) != first.content.get(_STEPS):
            raise damaged(
                other.location,
                f"its {_STEPS} is {safe_repr(other.content.get(_STEPS))}, and that of "
                f"{first.location} is {safe_repr(first.content.get(_STEPS))}",
            )
        for name, value in other.content.items():
            if is_state(name):
                continue
            comparison = compare(first.content.get(name), value)
            if comparison is not Comparison.EQUAL:
                yield LeftOut(
                    f"{name} of {_file_name(other)}",
                    f"it {_RELATIONS[comparison]} that of {_file_name(first)}, which is carried",
                )


def buffer_differences(files: Sequence[ModelFile]) -> Iterator[LeftOut]:
    """Yield the buffers of ranks' modules that are not carried because the first file's are.

    Ranks of data parallelism have whole buffers each, in stage 3 in files of their own.
    """
    first = files[0]
    for other in files[1:]:
        for name in sorted(other.buffers & other.module.keys()):
            comparison = compare(first.module.get(name), other.module[name])
            if comparison is not Comparison.EQUAL:
                yield LeftOut(
                    f"model/{name} of {_file_name(other)}",
                    f"it {_RELATIONS[comparison]} that of {_file_name(first)}, which is carried",
                )


def compare(first: object, other: object, depth: int = 0) -> Comparison:
    """Compare two values of pickles; tensors by their bits."""
    if depth > _MOST_DEPTH:
        return Comparison.NOT_COMPARED
    match first, other:
        case FileArray(), FileArray():
            return _compare_arrays(first, other)
        case MemoryArray(), MemoryArray():
            return _answer(_are_equal(first.values, other.values))
        case NumpyArray(), NumpyArray():
            return _answer(
                first.values is not None
                and other.values is not None
                and _are_equal(first.values, other.values)
            )
        case Record(), Record():
            return _all(
                (
                    (first.name, other.name),
                    (first.args, other.args),
                    (dict(first.keywords), dict(other.keywords)),
                    (first.state, other.state),
                    (first.items, other.items),
                    (first.entries, other.entries),
                ),
                depth,
            )
        case NumpyType(), NumpyType():
            return _answer((first.name, first.order) == (other.name, other.order))
        case dict(), dict():
            if len(first) != len(other) or any(key not in other for key in first):
                return Comparison.DIFFERENT
            return _all([(value, other[key]) for key, value in first.items()], depth)
        case [list(), list()] | [tuple(), tuple()]:
            return _compare_sequences(first, other, depth)
        case Global(), Global():
            return _answer(first == other)
    if type(first) is not type(other):
        return Comparison.DIFFERENT
    # A NaN is not equal to itself.
    return _answer(first == other or repr(first) == repr(other))


def _all(pairs: Sequence[tuple[object, object]], depth: int) -> Comparison:
    worst = Comparison.EQUAL
    for first, other in pairs:
        comparison = compare(first, other, depth + 1)
        if comparison is Comparison.DIFFERENT:
            return comparison
        if comparison is Comparison.NOT_COMPARED:
            worst = comparison
    return worst


def _compare_sequences(first: object, other: object, depth: int) -> Comparison:
    assert isinstance(first, list | tuple)
    assert isinstance(other, list | tuple)
    if len(first) != len(other):
        return Comparison.DIFFERENT
    return _all(list(zip(first, other, strict=True)), depth)


def _compare_arrays(first: FileArray, other: FileArray) -> Comparison:
    if (first.dtype, first.shape) != (other.dtype, other.shape):
        return Comparison.DIFFERENT
    if first.nbytes > _MOST_COMPARED_NBYTES:
        return Comparison.NOT_COMPARED
    return _answer(first.read().tobytes() == other.read().tobytes())


def _are_equal(first: np.ndarray, other: np.ndarray) -> bool:
    return (first.dtype, first.shape) == (other.dtype, other.shape) and (
        first.tobytes() == other.tobytes()
    )


def _answer(is_equal: bool) -> Comparison:
    return Comparison.EQUAL if is_equal else Comparison.DIFFERENT


def _file_name(file: ModelFile) -> str:
    return file.location.rpartition("/")[2]
