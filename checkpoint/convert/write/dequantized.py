"""Fits a checkpoint with quantized weights to a module: dequantizes what the module has plain.

What the module has as it is stored stays so. Where neither is possible, the load is refused,
whatever else it allows: elements without their scales are other numbers, and weights that are
skipped as if they were not in the checkpoint keep random values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from keepstep.checkpoint.convert.write.boxes_in_order import boxes_in_order
from keepstep.checkpoint.convert.write.quantized_elements import dtype_of, elements
from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Box, Json
from keepstep.checkpoint.format.layout.described import master_of, scale_of, tie_of
from keepstep.checkpoint.format.layout.documents import MASTERS, SCALES, TIED
from keepstep.checkpoint.format.layout.names import MODEL_PREFIX
from keepstep.checkpoint.format.layout.quantized import (
    FLOATS,
    QuantizedWeight,
    is_of_quantized,
    is_quantized,
    method_name,
    quantization_config,
    quantized_weights,
)
from keepstep.checkpoint.format.layout.source import BoxRequest, Source, TensorSpec, slots_in

_DEQUANTIZED_NBYTES = 16 * 2**20


@dataclass(frozen=True, kw_only=True)
class Dequantized:
    """A source in which some quantized weights are plain tensors, as a `Source`.

    Attributes:
        whole: the source.
        weights: those that are dequantized when they are read, by key; their codes and scales, and
            what quantizes the activations of their modules, are not in this source.
    """

    whole: Source
    weights: Mapping[str, QuantizedWeight]

    @property
    def step(self) -> int:
        """Number of completed optimizer steps."""
        return self.whole.step

    @cached_property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Every tensor by key."""
        return {
            **{key: spec for key, spec in self.whole.tensors.items() if key not in self._hidden},
            **{
                key: TensorSpec(dtype_of(self.whole, weight), weight.shape)
                for key, weight in self.weights.items()
            },
        }

    @cached_property
    def documents(self) -> Mapping[str, Json]:
        """The documents that go with the tensors; that on scales without those that are gone."""
        documents = dict(self.whole.documents)
        scales = {
            name: entry
            for name, entry in (documents.pop(SCALES, None) or {}).items()
            if name not in self.weights and f"{MODEL_PREFIX}{name}" not in self.weights
        }
        return {**documents, SCALES: scales} if scales else documents

    @property
    def may_be_renamed(self) -> bool:
        """Whether `named_for` may change anything: a source is fitted under its names."""
        return False

    def named_for(self, parameters: Collection[str]) -> Dequantized:
        """Return the source as it is."""
        return self

    def slots(self, parameters: Collection[str]) -> Mapping[str, Mapping[str, TensorSpec]]:
        """See `Source.slots`."""
        return slots_in(self.tensors, parameters)

    def known_keys(self) -> Collection[str]:
        """See `Source.known_keys`: all of them."""
        return self.tensors.keys()

    def read(self, requests: Sequence[BoxRequest]) -> None:
        """See `Source.read`; a box is dequantized in parts of 16 MiB.

        Raises:
            CheckpointDamaged: codes and scales contradict each other.
            LayoutMismatch: a weight has another shape than its codes tell.
        """
        self.whole.read([request for request in requests if request.key not in self.weights])
        for request in requests:
            weight = self.weights.get(request.key)
            if weight is None:
                continue
            dtype = dtype_of(self.whole, weight)
            into = np.frombuffer(request.into, dtype)
            done = 0
            for part in boxes_in_order(TensorSpec(dtype, request.box.shape), _DEQUANTIZED_NBYTES):
                start = zip(request.box.offset, part.offset, strict=True)
                box = Box(tuple(first + place for first, place in start), part.shape)
                into[done : done + part.size] = elements(self.whole, weight, box).reshape(-1)
                done += part.size

    @cached_property
    def _hidden(self) -> frozenset[str]:
        return frozenset(
            key
            for weight in self.weights.values()
            for key in (*weight.parts, *weight.of_activations)
        )


def describe_dequantized(source: Dequantized) -> str:
    """Return what was made of quantized weights, and what was left out for it, for a log line."""
    scales = [key for weight in source.weights.values() for key in weight.of_activations]
    left = f", left out {len(scales)} scales of activations ({scales[0]}, ...)" if scales else ""
    return f"; dequantized {len(source.weights)} weights{left}"


def dequantized(source: Source) -> Source:
    """Return a source with all weights plain whose quantization is known."""
    documents = source.documents
    if not is_quantized(documents):
        return source
    weights = quantized_weights(documents, source.tensors)
    return Dequantized(whole=source, weights=weights) if weights else source


def fitted(
    source: Source,
    live: Mapping[str, TensorSpec],
    live_documents: Mapping[str, Json],
    others: Collection[str],
    *,
    convert: bool,
) -> Source:
    """Return a source with those weights plain that the module has plain.

    Args:
        source: the checkpoint.
        live: the tensors to fill, by key.
        live_documents: what is known of these.
        others: keys of tensors that other ranks fill.
        convert: dequantize; otherwise weights that would have to be are refused.

    Raises:
        LayoutMismatch: weights are quantized in the source and not in the module, or the other way
            round, and cannot be converted; the message lists them.
    """
    documents = source.documents
    quantized = is_quantized(documents)
    weights = quantized_weights(documents, source.tensors) if quantized else {}
    wanted = {*live, *others}
    ties = {key: tie_of(documents.get(TIED), key) for key in wanted}
    wanted.update(tie.key for tie in ties.values() if tie is not None)
    plain = {
        key: weight
        for key, weight in weights.items()
        if key in wanted
        and wanted.isdisjoint({*weight.parts} - {key})
        and not _is_taken_as_it_is(weight, live, live_documents, source)
    }
    if plain and not convert:
        raise _refused(
            source,
            [f"{key}: it is quantized, with scales in {plain[key].scale}" for key in sorted(plain)],
            "pass convert=True to dequantize them",
        )
    if plain:
        source = Dequantized(whole=source, weights=plain)
    problems = _problems(source, live, wanted, has_config=quantized)
    if problems:
        raise _refused(
            source,
            problems,
            "load it with the library that quantized it, dequantize, and save that; or load it "
            "into a module that is quantized in the same way",
        )
    return source


def _is_taken_as_it_is(
    weight: QuantizedWeight,
    live: Mapping[str, TensorSpec],
    live_documents: Mapping[str, Json],
    source: Source,
) -> bool:
    """Return whether a live tensor has codes of the same kind, or is filled from a master."""
    spec = live.get(weight.key)
    if spec is None:
        return False
    if scale_of(live_documents.get(SCALES), weight.key) is not None:
        return True
    master = master_of(source.documents.get(MASTERS), weight.key)
    if master is not None and source.tensors.get(master.key) == spec:
        return True
    return weight.codes == weight.key and source.tensors[weight.key].dtype == spec.dtype


def _problems(
    source: Source, live: Mapping[str, TensorSpec], wanted: Collection[str], *, has_config: bool
) -> list[str]:
    """Return the live tensors that stand in a source, or here, as codes and scales."""
    lacking = {
        key: stored
        for key, spec in live.items()
        if key.startswith(MODEL_PREFIX)
        and ((stored := source.tensors.get(key)) is None or _is_bare(stored.dtype, spec.dtype))
    }
    if not lacking:
        return []
    own = _beside(live, live.keys())
    problems = []
    beside = _beside([key for key in source.known_keys() if key not in wanted], lacking)
    for key, stored in lacking.items():
        spec = live[key]
        found = [
            other for other in beside.get(key, ()) if has_config or is_of_quantized(key, other)
        ]
        if found:
            problems.append(
                f"{key}: the source has it quantized, in {', '.join(sorted(found)[:3])}"
            )
        elif stored is not None and spec.dtype not in FLOATS:
            scales = [name for name in own.get(key, ()) if is_of_quantized(key, name)]
            if lost := [name for name in scales if name not in source.tensors]:
                problems.append(
                    f"{key}: the module has it quantized, with {lost[0]}, and the source not"
                )
    return problems


def _is_bare(stored: str, live: str) -> bool:
    """Return whether a conversion is between numbers and what may be codes."""
    return stored != live and (stored in FLOATS) != (live in FLOATS)


def _beside(keys: Collection[str], tensors: Collection[str]) -> dict[str, list[str]]:
    """Return, for each of some tensors, the keys of what its module has under names like its own.

    Those are names that begin with the tensor's, and beside a `weight` all that are no module's.
    """
    found: dict[str, list[str]] = {}
    for key in keys:
        if not key.startswith(MODEL_PREFIX):
            continue
        module, dot, leaf = key.rpartition(".")
        candidates = [f"{module}{dot}weight", module]
        # Names such as gate_up_proj_scale_inv: what is before an underscore.
        candidates += [
            f"{module}{dot}{leaf[:place]}" for place, sign in enumerate(leaf) if sign == "_"
        ]
        for candidate in dict.fromkeys(candidates):
            if candidate in tensors and candidate != key:
                found.setdefault(candidate, []).append(key)
    return found


def _refused(source: Source, problems: Sequence[str], remedy: str) -> LayoutMismatch:
    quantization = quantization_config(source.documents)
    method = "" if quantization is None else f" ({method_name(quantization)})"
    more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
    return LayoutMismatch(
        f"step {source.step} has quantized weights{method} that do not fit the module: "
        f"{'; '.join(problems[:4])}{more}; {remedy}"
    )
