"""Plans the fills of a live state from a source, after a check that it fits.

Missing optimizer slots are created before (`allocation`). The planned fills are then done by each
rank for itself (`fills`), or by all ranks together (`keepstep.checkpoint.ranks.shared_restore`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.completeness import ONLY_MODEL, Requested, differences
from keepstep.checkpoint.format.layout.documents import PARTS, SUBCLASSES
from keepstep.checkpoint.format.layout.dtypes import is_convertible
from keepstep.checkpoint.format.layout.source import BoxRequest, Source
from keepstep.checkpoint.live.fills import Fill
from keepstep.checkpoint.live.overlaps import check_overlaps
from keepstep.checkpoint.live.part_slices import check_parts
from keepstep.checkpoint.live.source_match import Origin, SourceMatcher
from keepstep.checkpoint.live.storable import check_fillable, check_subclasses
from keepstep.checkpoint.live.tensors import (
    LiveState,
    LiveTensor,
    as_bytes,
    torch_dtype,
)
from keepstep.checkpoint.live.tied_names import differing_names


# Elements that a slot may have with any shape of its parameter, such as tables for quantization.
def plan_fills(
    state: LiveState,
    source: Source,
    *,
    strict: bool = True,
    convert: bool = False,
    requested: Requested = ONLY_MODEL,
    resize: Collection[str] = (),
) -> list[Fill]:
    """Return the fills of live tensors from a source, after a check that it fits.

    Args:
        state: the state to fill, from `LiveStateReader.capture` after `allocate`.
        source: the state to read.
        strict: refuse a source that lacks a name of the state, that is known to have requested
            names which the state does not take, or that has different tensors under names that are
            one tensor here. Otherwise fill the tensors that both have.
        convert: convert tensors whose data type in the source is another; not those whose elements
            are two values, such as `torch.float4_e2m1fn_x2`.
        requested: the names that the state asks for, and those that other ranks take.
        resize: names of parameters that may be larger or smaller than in the source: the common
            part is filled, the rest is zero. The same holds for their optimizer state.

    Raises:
        LayoutMismatch: names, shapes, dtypes or parts do not fit; the message lists them. Or the
            source has different elements where live tensors share them.
    """
    if SUBCLASSES in state.documents:
        check_subclasses(source.documents.get(SUBCLASSES), state.documents[SUBCLASSES])
    if PARTS in state.documents:
        check_parts(source.documents.get(PARTS), state.documents[PARTS])
    matched = _Matched.of(state, source, resize)
    by_key, origins = matched.by_key, matched.origins
    problems = [
        problem
        for key, origin in origins.items()
        if origin is not None and (problem := _problem(by_key[key], origin, convert)) is not None
    ]
    if strict:
        problems += matched.differences(state, source, requested)
        # Reads tensors, so only if everything that is known without fits.
        problems += [] if problems else matched.differing_names(state, source)
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise LayoutMismatch(
            f"step {source.step} does not fit the model: {'; '.join(problems[:8])}{more}. "
            "`checkpoint.load` takes strict=False to fill only the tensors that both have, and "
            "convert=True to convert data types where no value is lost except by rounding; a job "
            "begins from another one's checkpoint by start_from=. Shapes must agree, except for "
            "the padding of tensors whose logical shape is the same, see "
            "Descriptions(padding=...), and for parameters named in resize=[...]"
        )
    _check_shared_numbers(state.tensors, source)
    fills: list[Fill] = []
    for tensor in state.tensors:
        origin = origins[tensor.key]
        if origin is None or tensor.box.size == 0:
            continue
        check_fillable(tensor.key, tensor.data)
        if tensor.data.device.type == "meta":
            raise LayoutMismatch(
                f"{tensor.key} is on the meta device and cannot be filled; call to_empty() first"
            )
        assert origin.common is not None, "tensors that do not fit were refused"
        filled = origin.in_its_terms(tensor)
        box = filled.box.intersect(origin.common)
        fills.append(Fill(filled, origin.spec.dtype, box, origin.zeroes_rest))
    check_overlaps(fills, source)
    return fills


def unmatched(
    state: LiveState, source: Source, requested: Requested, resize: Collection[str] = ()
) -> list[str]:
    """Return the differences for which a strict `plan_fills` would refuse, one per line.

    The arguments are those of `plan_fills`.
    """
    matched = _Matched.of(state, source, resize)
    return [
        *matched.differences(state, source, requested),
        *matched.differing_names(state, source),
    ]


@dataclass(frozen=True, slots=True)
class _Matched:
    """Live tensors by key, and the source's tensor that fills each, with all its boxes."""

    by_key: Mapping[str, LiveTensor]
    origins: Mapping[str, Origin | None]
    matcher: SourceMatcher

    @classmethod
    def of(cls, state: LiveState, source: Source, resize: Collection[str]) -> Self:
        by_key = {tensor.key: tensor for tensor in state.tensors}
        matcher = SourceMatcher(state, source, resize)
        return cls(by_key, {key: matcher.find(tensor) for key, tensor in by_key.items()}, matcher)

    def differences(self, state: LiveState, source: Source, requested: Requested) -> list[str]:
        """See `keepstep.checkpoint.format.layout.completeness.differences`."""
        filled = {
            key: None if origin is None else origin.key for key, origin in self.origins.items()
        }
        return differences(filled, state.documents, source, requested)

    def differing_names(self, state: LiveState, source: Source) -> list[str]:
        """See `keepstep.checkpoint.live.tied_names.differing_names`."""
        return differing_names(state, source, self.matcher, self.origins)


def _problem(tensor: LiveTensor, origin: Origin, convert: bool) -> str | None:
    """Return why a live tensor cannot be filled from its origin, in words; None if it can."""
    spec = origin.spec
    if origin.contradiction is not None:
        return f"{tensor.key}: {origin.contradiction}"
    if origin.common is not None and (
        spec.dtype == tensor.dtype or (convert and is_convertible(spec.dtype, tensor.dtype))
    ):
        return None
    return (
        f"{tensor.key}: the source holds {spec.dtype} {spec.shape}, "
        f"the model expects {tensor.dtype} {tensor.global_shape}"
    )


def _check_shared_numbers(tensors: Sequence[LiveTensor], source: Source) -> None:
    """Check that optimizer slots that are one number here are equal in the source.

    All parameters in a flat parameter of FSDP1 have one step.
    """
    keys_by_memory: dict[int, list[str]] = {}
    for tensor in tensors:
        is_number = tensor.key.startswith("optim/") and not tensor.global_shape
        if is_number and tensor.key in source.tensors and tensor.data.data_ptr():
            keys_by_memory.setdefault(tensor.data.data_ptr(), []).append(tensor.key)
    for first, *others in keys_by_memory.values():
        if not others:
            continue
        numbers = {
            key: torch.empty((), dtype=torch_dtype(source.tensors[key].dtype))
            for key in (first, *others)
        }
        source.read([
            BoxRequest(key, Box((), ()), as_bytes(number)) for key, number in numbers.items()
        ])  # fmt: skip
        values = {key: number.item() for key, number in numbers.items()}
        for key in others:
            # NaN, which does not equal itself, is one number, too.
            if values[key] != values[first] and repr(values[key]) != repr(values[first]):
                raise LayoutMismatch(
                    f"{first} and {key} are one number in this optimizer, because its model was "
                    f"wrapped with use_orig_params=False, but {values[first]} and {values[key]} "
                    "in the source; pass use_orig_params=True"
                )
