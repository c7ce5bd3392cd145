"""Fits a checkpoint with quantized weights to a module: finds what has to be dequantized. Pure.

A weight that the module has quantized, too, stays as it is stored. Where it can neither stay nor be
dequantized, the load is refused, whatever else it allows: codes without their scales are other
numbers, and skipped weights would keep random values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Json
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
from keepstep.checkpoint.format.layout.source import Source, TensorSpec


def fitted(
    source: Source,
    live: Mapping[str, TensorSpec],
    live_documents: Mapping[str, Json],
    others: Collection[str],
    dequantize: Callable[[Source, Mapping[str, QuantizedWeight]], Source] | None,
) -> Source:
    """Return a source with those weights plain that the module has plain.

    Args:
        source: the checkpoint.
        live: the tensors to fill, by key.
        live_documents: what is known of these.
        others: keys of tensors that other ranks fill.
        dequantize: makes weights of a source plain; None to refuse where that would be needed.

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
    if plain and dequantize is None:
        raise _refused(
            source,
            [f"{key}: it is quantized, with scales in {plain[key].scale}" for key in sorted(plain)],
            "pass convert=True to dequantize them",
        )
    if plain and dequantize is not None:
        source = dequantize(source, plain)
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
    own = _neighbours(live, live.keys())
    problems = []
    neighbours = _neighbours([key for key in source.known_keys() if key not in wanted], lacking)
    for key, stored in lacking.items():
        spec = live[key]
        found = [
            other for other in neighbours.get(key, ()) if has_config or is_of_quantized(key, other)
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


def _neighbours(keys: Collection[str], tensors: Collection[str]) -> dict[str, list[str]]:
    """Return, for each of some tensors, the keys of tensors of its module with names like its own.

    Such names begin with the tensor's; next to a `weight`, all names that are no module's count.
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
