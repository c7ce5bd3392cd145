"""Records of nodes, whose addresses are made up."""

from __future__ import annotations

from typing import Any

from keepstep.elastic.rendezvous.records import NodeRecord


def record_of(node: str = "a", nproc: int = 2, lease: int = 7, **fields: Any) -> NodeRecord:
    """Return the record of a node that has joined; `fields` are others of `NodeRecord`."""
    return NodeRecord(node, "h", nproc, f"{node}:1", f"tcp:{node}:2", 5, lease, "d", **fields)
