"""Selects what a conversion writes: a part of a checkpoint, with another data type.

Pure but for the reads of the checkpoint itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from keepstep.checkpoint.convert.write.boxes_in_order import boxes_in_order
from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.content_digest import OF_ONE_SAVE
from keepstep.checkpoint.format.layout.described import found, is_wider
from keepstep.checkpoint.format.layout.documents import CONFIG, MASTERS, TIED
from keepstep.checkpoint.format.layout.dtypes import numpy_dtype
from keepstep.checkpoint.format.layout.quantized import FLOATS, keys_of_quantized
from keepstep.checkpoint.format.layout.source import BoxRequest, Source, TensorSpec, slots_in

MODEL = "model"

_ROUNDED_NBYTES = 8 * 2**20


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The part of a source that a conversion writes, as a `Source`.

    Attributes:
        whole: the source.
        only_model: leave out all but the model's tensors, their ties and the model's own documents.
        model_dtype: data type of the model's floating-point tensors; None keeps theirs. Optimizer
            state is never rounded, nor what quantized weights stand in: their scales, for example.

    Raises:
        LayoutMismatch: `model_dtype` is none that can be rounded to.
    """

    whole: Source
    only_model: bool = False
    model_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.model_dtype not in (None, *FLOATS):
            raise LayoutMismatch(
                f"a model cannot be converted to {self.model_dtype}; choose one of "
                f"{', '.join(FLOATS)}"
            )

    @property
    def step(self) -> int:
        """Number of completed optimizer steps."""
        return self.whole.step

    @cached_property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Every tensor by key, in the order of the keys."""
        return {
            key: TensorSpec(self._dtype(key, spec.dtype), spec.shape)
            for key, spec in sorted(self.whole.tensors.items())
            if not self.only_model or _is_of_model(key)
        }

    @property
    def documents(self) -> Mapping[str, Json]:
        """The documents that go with the tensors."""
        if not self.only_model:
            documents = {n: c for n, c in self.whole.documents.items() if n not in OF_ONE_SAVE}
            if matched := set(self.matched_masters()):
                del documents[MASTERS]
                if wider := {n: e for n, e in self.masters.items() if n not in matched}:
                    documents[MASTERS] = wider
            return documents
        kept = {name: self.whole.documents.get(name) for name in (TIED, CONFIG)}
        return {name: content for name, content in kept.items() if content is not None}

    @property
    def masters(self) -> Mapping[str, Json]:
        """The source's entries on masters, also of parameters that are as wide now."""
        return (not self.only_model and self.whole.documents.get(MASTERS)) or {}

    def matched_masters(self) -> list[str]:
        """Return the parameters, as `masters` names them, whose masters are wider no longer.

        `documents` does not call their slots masters; the slots themselves are selected.
        """
        matched = []
        for name, entry in self.masters.items():
            key = found(self.tensors, name)
            if key is None or self.tensors[key].dtype == self.whole.tensors[key].dtype:
                continue
            if not is_wider(entry["dtype"], self.tensors[key].dtype):
                matched.append(name)
        return sorted(matched)

    def left_out(self) -> list[str]:
        """Return the names of the tensors and documents that `only_model` leaves out."""
        if not self.only_model:
            return []
        documents = self.whole.documents.keys() - self.documents.keys() - OF_ONE_SAVE
        empty = {name for name in documents if self.whole.documents[name] in ({}, [], None)}
        return sorted((self.whole.tensors.keys() - self.tensors.keys()) | (documents - empty))

    def slots(self, parameters: Collection[str]) -> Mapping[str, Mapping[str, TensorSpec]]:
        """See `Source.slots`."""
        return slots_in(self.tensors, parameters)

    def known_keys(self) -> Collection[str]:
        """See `Source.known_keys`: all of them."""
        return self.tensors.keys()

    def read(self, requests: Sequence[BoxRequest]) -> None:
        """See `Source.read`; a box of another data type is read in parts, of 8 MiB as stored."""
        same = [r for r in requests if self.whole.tensors[r.key].dtype == self.tensors[r.key].dtype]
        if same:
            self.whole.read(same)
        for request in requests:
            stored, wanted = self.whole.tensors[request.key].dtype, self.tensors[request.key].dtype
            if stored == wanted:
                continue
            into = np.frombuffer(request.into, numpy_dtype(wanted))
            done = 0
            for part in boxes_in_order(TensorSpec(stored, request.box.shape), _ROUNDED_NBYTES):
                values = np.empty(part.size, numpy_dtype(stored))
                box = part.placed_in(request.box)
                self.whole.read([BoxRequest(request.key, box, values.view(np.uint8).data)])
                into[done : done + part.size] = rounded(values, wanted)
                done += part.size

    def _dtype(self, key: str, dtype: str) -> str:
        if self.model_dtype is None or not _is_of_model(key) or dtype not in FLOATS:
            return dtype
        return dtype if key in self._of_quantized else self.model_dtype

    @cached_property
    def _of_quantized(self) -> frozenset[str]:
        return keys_of_quantized(self.whole.documents, self.whole.tensors)

    def kept_of_quantized(self) -> list[str]:
        """Return the floating-point tensors that are not rounded because they quantize weights."""
        return [
            key
            for key, spec in self.tensors.items()
            if self.model_dtype not in (None, spec.dtype)
            and spec.dtype in FLOATS
            and key in self._of_quantized
        ]


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return floating-point values in another data type, each the nearest there is, ties to even.

    Args:
        values: of one of `FLOATS`.
        dtype: another of these.
    """
    if (str(values.dtype), dtype) == ("float64", "bfloat16"):
        values = _rounded_to_odd(values)
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(numpy_dtype(dtype))


def _rounded_to_odd(values: np.ndarray) -> np.ndarray:
    """Return float64 as float32, of two neighbours the one whose last bit is set.

    ml_dtypes makes bfloat16 of float64 by way of float32, and so rounds twice. After this rounding
    the second has the result of one: Boldo and Melquiond, "Emulation of FMA and correctly rounded
    sums: proved algorithms using rounding to odd", IEEE Transactions on Computers 57(4), 2008.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        near = values.astype(np.float32)
    wide = near.astype(np.float64)
    bits = near.view(np.uint32)
    bits -= np.abs(wide) > np.abs(values)
    bits |= (wide != values) & ~np.isnan(values)
    return near


def _is_of_model(key: str) -> bool:
    return key.startswith(f"{MODEL}/")
