"""Checks that tensors can be stored: their memory holds their elements, one for each place.

The checks come before anything is written or filled. Tensors that are made of others, such as
sparse ones, have no such memory; PyTorch's own errors, which come later, name no tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.names import is_text
from keepstep.torch_internals import is_wrapper_subclass


def check_storable(key: str, local: torch.Tensor) -> None:
    """Check that a tensor, or this rank's shard of one, can be stored under a key.

    Raises:
        LayoutMismatch: it cannot; the message names it.
    """
    check_text(key)
    check_initialized(key, local)
    obstacle = _obstacle(local)
    if obstacle is not None:
        raise LayoutMismatch(f"{key}: {obstacle}")


def check_initialized(key: str, tensor: torch.Tensor) -> None:
    """Check that a parameter has a shape.

    Raises:
        LayoutMismatch: it is a lazy module's, which gets its shape with the first input.
    """
    if is_lazy(tensor):
        raise LayoutMismatch(
            f"{key}: is not initialized, and has neither shape nor memory yet; run a forward pass, "
            "or give the layer its sizes"
        )


def check_text(name: str) -> None:
    """Check that a name can be stored.

    Raises:
        LayoutMismatch: it has half of a surrogate pair, which UTF-8 cannot encode.
    """
    if not is_text(name):
        raise LayoutMismatch(
            f"{name!a} cannot be stored: it has half of a surrogate pair; rename it"
        )


def check_fillable(key: str, tensor: torch.Tensor) -> None:
    """Check that the elements of a tensor can be written one by one.

    Raises:
        LayoutMismatch: several of them are the same memory, as in an expanded view.
    """
    if may_overlap(tensor):
        raise LayoutMismatch(
            f"{key}: several elements of shape {tuple(tensor.shape)} are the same memory, as in an "
            "expanded view, and cannot be filled one by one; make it with .clone() or .contiguous()"
        )


def may_overlap(tensor: torch.Tensor) -> bool:
    """Return whether elements of a tensor may be the same memory, judging by its strides.

    Each dimension has to step over the span of those with smaller strides. A few tensors without
    shared elements are taken for others: those with interleaved dimensions.
    """
    if tensor.numel() == 0:
        return False
    spanned = 1
    dimensions = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, extent in sorted(dimension for dimension in dimensions if dimension[1] > 1):
        if stride < spanned:
            return True
        spanned += stride * (extent - 1)
    return False


def is_made_of_tensors(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of a subclass that names the tensors it is made of.

    Examples are torchao's quantized weights and optimizer states.
    """
    return not isinstance(tensor, DTensor) and not tensor.is_nested and is_wrapper_subclass(tensor)


def tensors_within(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that make up a tensor, with their names, such as `weight.scale`."""
    if not is_made_of_tensors(tensor):
        yield name, tensor
        return
    for attribute in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        yield from tensors_within(f"{name}.{attribute}", getattr(tensor, attribute))


def subclass_of(key: str, tensor: torch.Tensor) -> Json:
    """Return the class of a tensor that is made of others, and its context.

    Raises:
        LayoutMismatch: it has objects that are described by their addresses.
    """
    kind = type(tensor)
    _, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    if " at 0x" in repr(context):
        raise LayoutMismatch(
            f"{key}: a {kind.__qualname__} cannot be stored, for its context is no plain value: "
            f"{context!r:.200}; convert it to a plain tensor"
        )
    return {"class": f"{kind.__module__}:{kind.__qualname__}", "context": repr(context)}


def check_subclasses(stored: Json, live: Mapping[str, Json]) -> None:
    """Check that tensors made of others are composed in the same way in a checkpoint.

    Raises:
        LayoutMismatch: one is of another class, or with another context; the message names it.
    """
    for key in sorted(live):
        known = stored.get(key) if isinstance(stored, Mapping) else None
        if known != live[key]:
            raise LayoutMismatch(
                f"{key}: is a tensor of {live[key]} here, and of {known} in the source; make the "
                "module with the same quantization, and the release of its package, as it was "
                "saved with"
            )


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor of a subclass has memory of its own, and does not wrap others."""
    try:
        return tensor.data_ptr() != 0
    except RuntimeError:
        return False


def _obstacle(tensor: torch.Tensor) -> str | None:
    """Return why a tensor cannot be stored, in words; None if it can."""
    kind = type(tensor)
    if tensor.is_nested:
        return "a nested tensor cannot be stored; store its values and its offsets"
    has_own_operations = kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if has_own_operations and not _has_memory(tensor):
        return (
            f"a {kind.__module__}.{kind.__qualname__} cannot be stored here: it is made of other "
            "tensors; store these, or convert it to a plain tensor. Those that name them "
            "(__tensor_flatten__) are stored as weights of a module, and as slots of an optimizer "
            "of the same package, not sharded"
        )
    if tensor.layout != torch.strided:
        return (
            f"a tensor of the layout {tensor.layout} cannot be stored; store its indices and its "
            "values, or convert it with to_dense()"
        )
    # PyTorch of today has no such names any more.
    if any(getattr(tensor, "names", ())):
        return "a tensor whose dimensions have names cannot be stored; pass tensor.rename(None)"
    if not tensor.is_meta and tensor.numel() and not tensor.untyped_storage().nbytes():
        return "its memory has been freed; gather it before, or leave it out of the state"
    return None
