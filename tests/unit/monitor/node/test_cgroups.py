"""Claims about reading cgroups: both versions, and mounts within containers."""

from pathlib import Path

from keepstep.monitor.node import cgroups


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_version_2(tmp_path: Path) -> None:
    proc, mount = tmp_path / "proc", tmp_path / "cgroup"
    write(proc / "41" / "cgroup", "0::/job/worker\n")
    write(mount / "cgroup.controllers", "cpu memory\n")
    write(
        mount / "job/worker/cpu.stat",
        "usage_usec 9000000\nnr_throttled 3\nthrottled_usec 2500000\n",
    )
    write(mount / "job/worker/memory.max", "1000\n")
    write(mount / "job/worker/memory.current", "700\n")
    write(mount / "job/worker/memory.stat", "anon 400\ninactive_file 200\n")
    files = cgroups.find(41, proc, mount)
    assert cgroups.cpu_time(files) == cgroups.CpuTime(2.5, 9.0)
    assert cgroups.memory_limit_nbytes(files) == 1000
    assert cgroups.memory_held_nbytes(files) == 500


def test_version_1_next_to_an_empty_version_2(tmp_path: Path) -> None:
    proc, mount = tmp_path / "proc", tmp_path / "cgroup"
    write(proc / "41" / "cgroup", "5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n")
    write(mount / "unified/cgroup.controllers", "\n")
    write(mount / "cpu,cpuacct/job/cpuacct.usage", "4000000000\n")
    write(mount / "cpu,cpuacct/job/cpu.stat", "nr_throttled 3\nthrottled_time 1500000000\n")
    write(mount / "memory/job/memory.limit_in_bytes", "9223372036854771712\n")
    write(mount / "memory/job/memory.usage_in_bytes", "700\n")
    files = cgroups.find(41, proc, mount)
    assert cgroups.cpu_time(files) == cgroups.CpuTime(1.5, 4.0)
    assert cgroups.memory_limit_nbytes(files) is None
    assert cgroups.memory_held_nbytes(files) == 700


def test_path_outside_of_a_containers_mount_is_the_root_of_the_mount(tmp_path: Path) -> None:
    proc, mount = tmp_path / "proc", tmp_path / "cgroup"
    write(proc / "self" / "cgroup", "0::/../../elsewhere/pod\n")
    write(mount / "cgroup.controllers", "cpu\n")
    write(mount / "cpu.stat", "throttled_usec 1000000\n")
    write(mount / "memory.max", "max\n")
    files = cgroups.find("self", proc, mount)
    assert files.unified == mount
    assert cgroups.cpu_time(files) == cgroups.CpuTime(1.0)
    assert cgroups.memory_limit_nbytes(files) is None


def test_missing_mount_or_process_gives_no_values(tmp_path: Path) -> None:
    files = cgroups.find(2**22 - 1, tmp_path / "proc", tmp_path / "cgroup")
    assert cgroups.cpu_time(files) is None
    assert cgroups.memory_held_nbytes(files) is None
