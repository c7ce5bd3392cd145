"""Moves a module to the queued device."""

from __future__ import annotations

from torch import nn

from tests.queued_device.tensor import QueuedTensor


def to_device(module: nn.Module) -> None:
    """Replace a module's parameters, in place, by parameters on the queued device."""
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                part._parameters[name] = nn.Parameter(QueuedTensor(parameter.detach().clone()))
