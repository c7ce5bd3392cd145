"""Claims about the etcd that keepstep starts for a job."""

from pathlib import Path

from keepstep.elastic.store.embedded import _command


def test_jobs_etcd_compacts_its_history(tmp_path: Path) -> None:
    """Each commit leaves a revision: the quota of one that keeps them all is reached one day."""
    command = list(_command("127.0.0.1", 1, 2, tmp_path))
    assert command[command.index("--auto-compaction-mode") + 1] == "periodic"
    assert command[command.index("--auto-compaction-retention") + 1] == "5m"
