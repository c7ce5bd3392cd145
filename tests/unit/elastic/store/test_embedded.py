"""Claims about the etcd that keepstep starts for a job."""

from pathlib import Path

from keepstep.elastic.store.embedded import _command, _environment


def test_jobs_etcd_compacts_its_history(tmp_path: Path) -> None:
    """Each commit leaves a revision: the quota of one that keeps them all is reached one day."""
    command = list(_command("127.0.0.1", 1, 2, tmp_path))
    assert command[command.index("--auto-compaction-mode") + 1] == "periodic"
    assert command[command.index("--auto-compaction-retention") + 1] == "5m"


def test_variables_of_another_etcd_do_not_reach_the_one_that_is_started() -> None:
    """A unit's or a container's: ETCD_DATA_DIR kept it from starting, or gave it another's data."""
    own = {"PATH": "/bin", "ETCD_NAME": "node1", "ETCD_DATA_DIR": "/var", "ETCDCTL_API": "3"}
    assert dict(_environment(own)) == {"PATH": "/bin", "ETCDCTL_API": "3"}
    # Without this one etcd refuses to start on some processors.
    needed = {"ETCD_UNSUPPORTED_ARCH": "riscv64"}
    assert dict(_environment(needed)) == needed
