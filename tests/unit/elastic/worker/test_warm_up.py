"""Tests that warming up leaves nothing of the step that it has computed in a process."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.slow

PROBE = """
import gc, json, os, sys, threading
from keepstep.elastic.worker import bootstrap, warm_up
bootstrap.import_early()
import torch, torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _world
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _get_python_sharding_prop_cache_info

def threads():
    names = []
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/comm") as file:
            names.append(file.read().strip())
    return sorted(name for name in names if "gloo" in name)

def sockets():
    links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    return [link for link in links if os.path.islink(link) and "socket" in os.readlink(link)]

def refuse():
    raise AssertionError("a device was used before the worker has its own")

# As on a node with GPUs.
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 8
torch.cuda._lazy_init = refuse
groups = []
original = dist.init_process_group
dist.init_process_group = lambda *args, **kwargs: (groups.append(args), original(*args, **kwargs))
before = torch.get_rng_state(), dict(os.environ), sockets()
warm_up.compute_step()
after = torch.get_rng_state(), dict(os.environ), sockets()
gc.collect()
print(json.dumps({
    "groups made": len(groups),
    "draws nothing": torch.equal(before[0], after[0]),
    "environment": before[1] == after[1],
    "sockets": before[2] == after[2],
    "threads": threads(),
    "groups": dist.is_initialized() or bool(_world.pg_names) or _world.group_count,
    "cached": _get_python_sharding_prop_cache_info().currsize,
    "models": sum(isinstance(held, FSDPModule) for held in gc.get_objects()),
    "cuda": torch.cuda.is_initialized(),
}))
"""
NOTHING = {
    "groups made": 1,
    "draws nothing": True,
    "environment": True,
    "sockets": True,
    "threads": [],
    "groups": 0,
    "cached": 0,
    "models": 0,
    "cuda": False,
}


def probe(monkeypatch: pytest.MonkeyPatch, **environment: str) -> dict[str, Any]:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    # Nobody wants to read warnings of a step that is not theirs.
    command = [sys.executable, "-W", "error", "-c", PROBE]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stderr == ""
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_warming_up_computes_a_sharded_step_and_leaves_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KEEPSTEP_MONITOR", raising=False)
    assert probe(monkeypatch) == NOTHING


def test_process_that_records_itself_makes_no_group_before_the_jobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would be recorded as the one rank of that group."""
    assert probe(monkeypatch, KEEPSTEP_MONITOR="1") == NOTHING | {"groups made": 0}


def test_where_no_group_can_be_made_the_jobs_first_group_has_its_name_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks look for each other under the name of the group, which is a number."""
    monkeypatch.delenv("KEEPSTEP_MONITOR", raising=False)
    assert probe(monkeypatch, GLOO_SOCKET_IFNAME="none9") == NOTHING
