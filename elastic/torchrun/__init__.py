"""The rendezvous back end `keepstep` of torchrun: membership of a job by leases in etcd.

torchrun loads this module, the entry point, whatever back end it uses. So nothing is imported here
before a rendezvous of this kind is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def creator() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return what torchrun calls to make the rendezvous of a job."""
    return _create


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    from keepstep.elastic.torchrun.handler import create

    return create(parameters)
