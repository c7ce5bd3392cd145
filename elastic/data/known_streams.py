"""Knows streams of other libraries whose state is incomplete or whose order is random.

`SplitStream` takes what has a state for exact, and what has none for the same each time that it is
read. This module recognizes a library's own objects for which that does not hold. Their classes are
recognized by name, so that no library is imported for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

_MOST_OBJECTS = 4096
_MOST_ITEMS = 64


def samples_outside_state(stream: Any) -> str:
    """Return the part of a stream with samples that its state leaves out; "" if none is known.

    Hugging Face's shuffle buffer (`datasets` 5.2, `BufferShuffledExamplesIterable`) is refilled
    with later samples when a state is loaded, so that those in it are lost. Sources that it
    interleaves by probabilities resume elsewhere in loader processes of torchdata's
    `StatefulDataLoader` (0.11).
    """
    in_processes = _is(stream, "torchdata", "StatefulDataLoader") and stream.num_workers > 0
    for part in _parts_of(stream):
        if in_processes and _is(part, "datasets", "RandomlyCyclingMultiSourcesExamplesIterable"):
            return "sources interleaved by probabilities in loader processes"
        if _is(part, "datasets", "BufferShuffledExamplesIterable") and part.buffer_size > 1:
            return f"a shuffle buffer of {part.buffer_size} samples"
    return ""


def ordered_by_chance(stream: Any) -> str:
    """Return why a stream gives other samples each time it is read; "" if no reason is known.

    Without a seed, Hugging Face's `shuffle` and `interleave_datasets` take one from the system.
    WebDataset 1.0 seeds `shuffle` without a seed, and `resampled=True`, by the clock and process,
    and counts the epochs of `detshuffle` in the object.
    """
    for part in _parts_of(stream):
        if _is_of_library(part) and _is_unseeded(getattr(part, "generator", None)):
            return "an order without a seed: give shuffle or interleave_datasets a seed"
        if _is(part, "webdataset", "ResampledShards") and not getattr(part, "deterministic", False):
            return "resampled=True: give a ResampledShards(urls, deterministic=True)"
        if _is(part, "webdataset", "detshuffle"):
            return "detshuffle, which counts epochs by itself: give shuffle(size, seed=...)"
        if (
            _is(part, "webdataset", "FilterFunction")
            and getattr(part.f, "__name__", "") == "_shuffle"
        ):
            bound = dict(zip(("bufsize", "initial", "rng", "seed"), part.args, strict=False))
            bound |= part.kw
            if bound.get("seed") is None and bound.get("rng") is None:
                return "shuffle without a seed: give shuffle(size, seed=...)"
    return ""


def epoch_receivers(stream: Any) -> list[Any]:
    """Return the objects of a stream whose `set_epoch` is to be called.

    They are the stream, its `sampler` and its `dataset`, and each of Hugging Face's streams in it:
    in an epoch of the same number those would go back to the state that was loaded.
    """
    receivers = [stream, getattr(stream, "sampler", None), getattr(stream, "dataset", None)]
    receivers += [part for part in _parts_of(stream) if _is(part, "datasets", "IterableDataset")]
    distinct = {id(one): one for one in receivers if callable(getattr(one, "set_epoch", None))}
    return list(distinct.values())


def _is_unseeded(generator: Any) -> bool:
    """Whether NumPy has seeded a generator from the system, which gives it 128 bits."""
    if not isinstance(generator, np.random.Generator):
        return False
    entropy = getattr(generator.bit_generator.seed_seq, "entropy", 0)
    return isinstance(entropy, int) and entropy.bit_length() > 64


def _is(part: Any, library: str, name: str) -> bool:
    return any(
        kind.__name__ == name and kind.__module__.partition(".")[0] == library
        for kind in type(part).__mro__
    )


def _parts_of(stream: Any) -> Iterator[Any]:
    """Yield a stream and the objects that its attributes refer to, if they may be streams."""
    seen: set[int] = set()
    pending = [stream]
    while pending and len(seen) < _MOST_OBJECTS:
        part = pending.pop()
        if id(part) in seen or isinstance(part, str | bytes | int | float | type | None):
            continue
        seen.add(id(part))
        if isinstance(part, list | tuple):
            pending += part[:_MOST_ITEMS]
            continue
        if isinstance(part, dict):
            pending += list(part.values())[:_MOST_ITEMS]
            continue
        yield part
        # Not objects without samples, such as a model that a tokenizer refers to.
        if hasattr(type(part), "__iter__") or _is_of_library(part):
            pending += vars(part).values() if hasattr(part, "__dict__") else ()


def _is_of_library(part: Any) -> bool:
    return type(part).__module__.partition(".")[0] in ("datasets", "webdataset", "torchdata")
