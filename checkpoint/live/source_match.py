"""Finds the source's tensor that fills a live tensor: of the same name, or an equivalent one.

A further name of tied weights is filled from the first one. A parameter whose data type is wider
than stored is filled from its master, exactly. Tensors that are padded are filled as far as they
are not, whatever the paddings.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from keepstep.checkpoint.format.layout.boxes import Box, Json
from keepstep.checkpoint.format.layout.described import (
    Tie,
    is_wider,
    logical_shape_of,
    master_of,
    scale_of,
    slot_key,
    stored_parameter,
    tie_of,
)
from keepstep.checkpoint.format.layout.documents import MASTERS, PADDING, SCALES, TIED
from keepstep.checkpoint.format.layout.names import MODEL_PREFIX, OPTIMIZER_PREFIX, parameter_of
from keepstep.checkpoint.format.layout.source import Source, TensorSpec
from keepstep.checkpoint.live.tensors import LiveState, LiveTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The tensor of a source that fills a live tensor.

    Attributes:
        key: its key.
        spec: its data type and shape.
        is_transposed: whether it is the transpose of the live tensor.
        common: the part of it that fills the live tensor; None if the shapes do not fit.
        zeroes_rest: whether the rest of the live tensor becomes zero; otherwise it is kept.
        contradiction: another reason why it does not fit, in words; None without one.
    """

    key: str
    spec: TensorSpec
    is_transposed: bool = False
    common: Box | None = None
    zeroes_rest: bool = True
    contradiction: str | None = None

    def in_its_terms(self, tensor: LiveTensor) -> LiveTensor:
        """Return a box of the live tensor in coordinates of the source's tensor."""
        if not self.is_transposed:
            return tensor if tensor.key == self.key else replace(tensor, key=self.key)
        return replace(
            tensor,
            key=self.key,
            global_shape=tensor.global_shape[::-1],
            box=Box(tensor.box.offset[::-1], tensor.box.shape[::-1]),
            data=tensor.data.t(),
        )


class SourceMatcher:
    """Finds the tensors of a source that fill those of a live state.

    A source in memory asks all holders of a part for a document that none has. So documents are
    looked up only where they can make a difference.

    Args:
        state: the state to fill.
        source: the state to read.
        resize: names of parameters whose common part alone may be filled.
    """

    def __init__(self, state: LiveState, source: Source, resize: Collection[str] = ()) -> None:
        self._source = source
        self._resize = resize
        self._live_padding: Json = state.documents.get(PADDING)
        self._live_masters: Json = state.documents.get(MASTERS)
        self._live_scales: Json = state.documents.get(SCALES)
        self._live_names = {
            parameter_of(tensor.key).removeprefix(MODEL_PREFIX)
            for tensor in state.tensors
            if tensor.key.startswith(OPTIMIZER_PREFIX)
        }
        self._live_shapes = {tensor.key: tensor.global_shape for tensor in state.tensors}

    def find(self, tensor: LiveTensor) -> Origin | None:
        """Return the tensor of the source that fills a live one; None without one.

        Any of several boxes of a live tensor will do.
        """
        key, is_transposed = tensor.key, False
        spec = self._source.tensors.get(key)
        if spec is None:
            tie = self._tie(key)
            spec = self._source.tensors.get(tie.key) if tie is not None else None
            if tie is None or spec is None:
                return None
            key, is_transposed = tie.key, tie.is_transposed
            if is_transposed and key.startswith(OPTIMIZER_PREFIX):
                return self._transposed_slot(key, spec, tensor)
        key, spec = self._or_master(key, spec, tensor)
        origin = self._fitted(Origin(key=key, spec=spec, is_transposed=is_transposed), tensor)
        if origin.common is None or origin.contradiction is not None:
            return origin
        return replace(origin, contradiction=self._scaled(origin, tensor))

    def _scaled(self, origin: Origin, tensor: LiveTensor) -> str | None:
        """Return why a tensor of another data type is not converted: its elements have scales.

        If they have scales in the source and in the model, they mean the same in both.
        """
        if origin.spec.dtype == tensor.dtype:
            return None
        stored = scale_of(self._source.documents.get(SCALES), origin.key)
        live = scale_of(self._live_scales, tensor.key)
        if stored is not None and live is None:
            return (
                f"is {origin.spec.dtype} in the source, with scales in {stored}, and "
                f"{tensor.dtype} in the model; convert=True dequantizes it into a state that has "
                "no such scales"
            )
        if live is not None and stored is None:
            return (
                f"is {tensor.dtype} in the model, with scales in {live}, and {origin.spec.dtype} "
                "in the source; load it as it is stored, and quantize"
            )
        return None

    def _tie(self, key: str) -> Tie | None:
        """Return the tensor of which a tensor missing in the source is another name, else None."""
        document: Json = self._source.documents.get(TIED)
        parameter = parameter_of(key)
        if parameter == key:
            return tie_of(document, key)
        tie = stored_parameter(document, parameter.removeprefix(MODEL_PREFIX), self._live_names)
        slot = key.rpartition("/")[2]
        return None if tie is None else Tie(slot_key(tie.key, slot), tie.is_transposed)

    def _transposed_slot(self, key: str, spec: TensorSpec, tensor: LiveTensor) -> Origin:
        """Return a slot of a parameter that is stored as its transpose.

        A slot of the parameter's shape is its transpose as well, and a number stays one. Others are
        not known.
        """
        stored = self._source.tensors.get(parameter_of(key))
        has_parameter_shape = stored is not None and stored.shape == spec.shape
        contradiction = None
        if not has_parameter_shape and math.prod(spec.shape) != 1:
            contradiction = f"is a slot of shape {spec.shape} of the transpose in the source"
        origin = Origin(
            key=key, spec=spec, is_transposed=has_parameter_shape, contradiction=contradiction
        )
        return origin if contradiction else self._fitted(origin, tensor)

    def _or_master(self, key: str, spec: TensorSpec, tensor: LiveTensor) -> tuple[str, TensorSpec]:
        """Return a parameter's master if that has the live data type and the parameter has not."""
        if not key.startswith(MODEL_PREFIX) or not is_wider(tensor.dtype, spec.dtype):
            return key, spec
        master = master_of(self._source.documents.get(MASTERS), key)
        if master is None:
            return key, spec
        master_spec = self._source.tensors.get(master.key)
        if master_spec != TensorSpec(tensor.dtype, spec.shape):
            return key, spec
        return master.key, master_spec

    def _fitted(self, origin: Origin, tensor: LiveTensor) -> Origin:
        """Return an origin with the part that fills a live tensor."""
        order = slice(None, None, -1 if origin.is_transposed else 1)
        stored, live = origin.spec.shape, tensor.global_shape[order]
        parameter = parameter_of(tensor.key)
        described = logical_shape_of(self._live_padding, parameter)
        live_logical = None if described is None else described[order]
        if stored == live:
            # Padding is filled too: values that were trained there continue.
            contradiction = None
            if live_logical is not None and tensor.key == parameter:
                contradiction = self._contradiction(origin, live_logical)
            return replace(origin, common=Box.whole(stored), contradiction=contradiction)
        if self._has_parameter_shape(origin, tensor):
            logical = self._stored_logical(origin) or stored
            if logical == (live_logical or live):
                # The module's values in its padding stay. A slot's values there become those of
                # elements that were never updated, unless the slot is the parameter itself in a
                # wider type.
                is_kept = tensor.key == parameter or self._is_master(tensor.key, parameter)
                return replace(origin, common=Box.whole(logical), zeroes_rest=not is_kept)
        if parameter.removeprefix(MODEL_PREFIX) in self._resize and len(stored) == len(live):
            return replace(origin, common=Box.whole(tuple(map(min, stored, live))))
        return origin

    def _contradiction(self, origin: Origin, live_logical: tuple[int, ...]) -> str | None:
        stored_logical = self._stored_logical(origin)
        if stored_logical in (None, live_logical):
            return None
        return (
            f"is stored with logical shape {stored_logical}, and to be loaded with {live_logical}"
        )

    def _stored_logical(self, origin: Origin) -> tuple[int, ...] | None:
        document = self._source.documents.get(PADDING)
        return logical_shape_of(document, parameter_of(origin.key))

    def _has_parameter_shape(self, origin: Origin, tensor: LiveTensor) -> bool:
        """Return whether a tensor is a parameter, or a slot of its shape, both here and there.

        Matrices of another meaning may have as many dimensions, such as preconditioners.
        """
        parameter, stored_parameter = parameter_of(tensor.key), parameter_of(origin.key)
        if tensor.key == parameter:
            return True
        stored = self._source.tensors.get(stored_parameter)
        return (
            stored is not None
            and stored.shape == origin.spec.shape
            and self._live_shapes.get(parameter) == tensor.global_shape
        )

    def _is_master(self, key: str, parameter: str) -> bool:
        master = master_of(self._live_masters, parameter)
        return master is not None and master.key == key
