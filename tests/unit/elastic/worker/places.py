"""A worker's place in a generation."""

from __future__ import annotations

from typing import Any

from keepstep.elastic.worker.messages import Assignment


def assignment(generation: int, **changes: Any) -> Assignment:
    """Return the place of the only rank of a job; `changes` are other values of fields."""
    place: dict[str, Any] = {
        "node": "a",
        "rank": 0,
        "world_size": 1,
        "local_rank": 0,
        "local_world_size": 1,
        "node_rank": 0,
        "node_count": 1,
        "store_host": "127.0.0.1",
        "store_port": 1,
        "server": "unix:/none",
        "secret": "",
        "job": "job",
        "max_restarts": 3,
    }
    return Assignment(generation=generation, **{**place, **changes})
