"""Dumps of Flight Recorder as NCCL's process group writes them."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

Write = Callable[[Path, Any], None]


def as_json(path: Path, told: Any) -> None:
    path.write_text(json.dumps(told))


def as_pickle(path: Path, told: Any) -> None:
    path.write_bytes(pickle.dumps(told, protocol=2))


def entry(number: int, name: str, **changes: Any) -> dict[str, Any]:
    """Return an entry as NCCL's process group writes them."""
    return {
        "record_id": number - 1, "pg_id": 1, "process_group": ("7", "mesh_pp"), "collective_seq_id": number, "p2p_seq_id": 0,
        "op_id": number, "profiling_name": f"nccl:{name}", "time_created_ns": 10**18 + number * 10**9,
        "input_sizes": [[3, 4]], "input_dtypes": ["BFloat16"], "output_sizes": [[6, 4]], "output_dtypes": ["BFloat16"],
        "state": "completed", "time_discovered_started_ns": 10**18 + number * 10**9 + 125 * 10**6,
        "time_discovered_completed_ns": 10**18 + number * 10**9 + 250 * 10**6,
        "retired": True, "timeout_ms": 600000, "is_p2p": False, **changes,
    }  # fmt: skip


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
