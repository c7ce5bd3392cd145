"""Makes dumps of Flight Recorder as NCCL's process group writes them."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

Write = Callable[[Path, Any], None]


def as_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))


def as_pickle(path: Path, content: Any) -> None:
    path.write_bytes(pickle.dumps(content, protocol=2))


def entry(number: int, name: str, **changes: Any) -> dict[str, Any]:
    """Return an entry as NCCL's process group writes them."""
    created_ns = 10**18 + number * 10**9
    return {
        "record_id": number - 1,
        "pg_id": 1,
        "process_group": ("7", "mesh_pp"),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": f"nccl:{name}",
        "time_created_ns": created_ns,
        "input_sizes": [[3, 4]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[6, 4]],
        "output_dtypes": ["BFloat16"],
        "state": "completed",
        "time_discovered_started_ns": created_ns + 125 * 10**6,
        "time_discovered_completed_ns": created_ns + 250 * 10**6,
        "retired": True,
        "timeout_ms": 600000,
        "is_p2p": False,
        **changes,
    }


def dump(*entries: dict[str, Any], version: str = "2.10") -> dict[str, Any]:
    return {
        "version": version,
        "pg_config": {"7": {"name": "7", "desc": "mesh_pp", "ranks": "[4, 6]"}},
        "pg_status": {},
        "entries": list(entries),
    }


def hung(number: int, name: str, **changes: Any) -> dict[str, Any]:
    times = {"time_discovered_started_ns": None, "time_discovered_completed_ns": None}
    return entry(number, name, state="scheduled", retired=False, **times, **changes)
