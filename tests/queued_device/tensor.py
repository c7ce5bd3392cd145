"""Tensors whose operations are queued: calls return before anything is computed.

What NCCL.md calls "the host runs ahead" happens with these: a step's forward and backward passes,
its collectives and its optimizer are enqueued, and the host comes to the next step while the first
collective still waits for a peer. Reading a value (`item`, a copy to other memory) waits for the
queue, as it does on a GPU.

The memory is the host's, so that `tensor.device` says "cpu", and code that looks at a tensor's
memory without PyTorch (`data_ptr`) sees whatever has been computed so far.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_any, tree_map

from tests.queued_device.queue import DEVICE

_READS_VALUES = frozenset(
    {
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.equal.default,
        torch.ops.aten.is_nonzero.default,
        torch.ops.aten.nonzero.default,
    }
)


class QueuedTensor(torch.Tensor):
    """A tensor of the queued device, made of a tensor on the host, whose memory it takes."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> QueuedTensor:
        made: QueuedTensor = torch.Tensor._make_subclass(cls, data)
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in (torch.Tensor.numpy, torch.Tensor.tolist):
            DEVICE.synchronize()
            return func(on_host(args[0]), *args[1:], **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        host_args = tree_map(_unwrapped, args)
        host_kwargs = tree_map(_unwrapped, dict(kwargs or {}))
        if func.is_view:
            return tree_map(_wrapped, func(*host_args, **host_kwargs))
        if func in _READS_VALUES or _writes_to_host(func, args, kwargs or {}):
            DEVICE.synchronize()
            with torch._C._AutoDispatchBelowADInplaceOrView():
                return func(*host_args, **host_kwargs)
        if func._schema.is_mutable:
            # What the host gives is taken now: it may change it once the call has returned.
            taken = tree_map(_taken, args), tree_map(_taken, dict(kwargs or {}))
            DEVICE.enqueue(lambda: func(*taken[0], **taken[1]))
            return _mutated(func, args, kwargs or {})
        outputs = _outputs(func, host_args, host_kwargs)
        taken = tree_map(_taken, args), tree_map(_taken, dict(kwargs or {}))
        DEVICE.enqueue(lambda: _fill(outputs, func(*taken[0], **taken[1])))
        return tree_map(_wrapped, outputs)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the host's tensor over the same memory; it may not be computed yet."""
    with no_dispatch(), torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def _unwrapped(value: Any) -> Any:
    return on_host(value) if isinstance(value, QueuedTensor) else value


def _taken(value: Any) -> Any:
    if isinstance(value, QueuedTensor):
        return on_host(value)
    return value.clone() if isinstance(value, torch.Tensor) else value


def _wrapped(value: Any) -> Any:
    return QueuedTensor(value) if isinstance(value, torch.Tensor) else value


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an operator writes to."""
    written = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(args[position] if position < len(args) else kwargs.get(argument.name))
    return written


def _writes_to_host(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return tree_any(
        lambda value: isinstance(value, torch.Tensor) and not isinstance(value, QueuedTensor),
        _written(func, args, kwargs),
    )


def _mutated(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what an operator returns that writes to its arguments: those, or nothing."""
    returned = _written(func, args, kwargs)[: len(func._schema.returns)]
    if not returned:
        return None
    return returned[0] if len(returned) == 1 else tuple(returned)


def _outputs(func: Any, args: Any, kwargs: Any) -> Any:
    """Return tensors of the shapes that an operator will return, not filled yet."""

    def described(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty_strided(
                value.size(), value.stride(), dtype=value.dtype, device="meta"
            )
        return torch.device("meta") if isinstance(value, torch.device) else value

    shapes = func(*tree_map(described, args), **tree_map(described, kwargs))
    return tree_map(
        lambda value: (
            torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
            if isinstance(value, torch.Tensor)
            else value
        ),
        shapes,
    )


def _fill(outputs: Any, computed: Any) -> None:
    if isinstance(outputs, torch.Tensor):
        outputs.copy_(computed)
        return
    for output, value in zip(outputs, computed, strict=True):
        if isinstance(output, torch.Tensor):
            output.copy_(value)
