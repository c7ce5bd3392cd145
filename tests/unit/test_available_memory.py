"""Claims about the memory that a process can still have: cgroups' limits count."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from keepstep import available_memory
from keepstep.available_memory import available_nbytes, cgroup_available_nbytes


def write(directory: Path, files: Mapping[str, object]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name).write_text(f"{content}\n")


def v2(limit: object, usage: int, inactive: int = 0) -> dict[str, object]:
    stat = f"anon 1\ninactive_file {inactive}\nactive_file 7"
    return {"memory.max": limit, "memory.current": usage, "memory.stat": stat}


def test_the_tightest_of_the_cgroups_above_limits(tmp_path: Path) -> None:
    write(tmp_path, {"membership": "0::/job/node", "cgroup.controllers": "memory"})
    membership = tmp_path / "membership"
    write(tmp_path / "job", v2(1000, 900, inactive=50))
    write(tmp_path / "job" / "node", v2("max", 800))
    assert cgroup_available_nbytes(membership, tmp_path) == 157
    write(tmp_path / "job" / "node", v2(700, 650))
    assert cgroup_available_nbytes(membership, tmp_path) == 57
    write(tmp_path / "job" / "node", v2(700, 800))
    assert cgroup_available_nbytes(membership, tmp_path) == 0


def test_limits_of_version_1_are_read_and_its_largest_number_is_none(tmp_path: Path) -> None:
    write(tmp_path, {"membership": "4:cpu,memory:/job\n0::/"})
    membership = tmp_path / "membership"
    files = {"memory.usage_in_bytes": 600, "memory.stat": "total_inactive_file 100"}
    write(tmp_path / "memory" / "job", {"memory.limit_in_bytes": 2**63 - 4096, **files})
    assert cgroup_available_nbytes(membership, tmp_path) is None
    write(tmp_path / "memory" / "job", {"memory.limit_in_bytes": 1000, **files})
    assert cgroup_available_nbytes(membership, tmp_path) == 500


def test_a_container_whose_path_is_not_mounted_is_limited_by_the_mount(tmp_path: Path) -> None:
    files = {"membership": "0::/other/place", "cgroup.controllers": "memory"}
    write(tmp_path, {**files, **v2(1000, 400)})
    assert cgroup_available_nbytes(tmp_path / "membership", tmp_path) == 607
    assert cgroup_available_nbytes(tmp_path / "nothing", tmp_path) is None


@pytest.mark.parametrize(("left", "is_limit"), [(5, True), (None, False), (2**62, False)])
def test_a_process_has_what_its_cgroup_leaves_and_no_more_than_its_node(
    monkeypatch: pytest.MonkeyPatch, left: int | None, *, is_limit: bool
) -> None:
    monkeypatch.setattr(available_memory, "cgroup_available_nbytes", lambda: left)
    available = available_nbytes()
    assert (available == left) == is_limit
    assert 0 < available < 2**62
