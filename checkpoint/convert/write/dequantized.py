"""Dequantizes weights of a checkpoint that the module to fill has plain.

`checkpoint.format.layout.quantized_fit` says which weights these are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from keepstep.checkpoint.convert.write.boxes_in_order import boxes_in_order
from keepstep.checkpoint.convert.write.quantized_elements import dtype_of, elements
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.documents import SCALES
from keepstep.checkpoint.format.layout.names import MODEL_PREFIX
from keepstep.checkpoint.format.layout.quantized import (
    QuantizedWeight,
    is_quantized,
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
                box = part.placed_in(request.box)
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
