"""Claims about the etcd that keepstep starts for a job."""

import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.elastic.store.embedded import _command, _environment
from keepstep.elastic.store.ports import ReservedPort


def test_jobs_etcd_compacts_its_history(tmp_path: Path) -> None:
    """Each commit leaves a revision: the quota of one that keeps them all is reached one day."""
    with ReservedPort() as clients, ReservedPort() as peers:
        command = list(_command(clients, peers, tmp_path))
    assert command[command.index("--auto-compaction-mode") + 1] == "periodic"
    assert command[command.index("--auto-compaction-retention") + 1] == "5m"


def test_variables_of_another_etcd_do_not_reach_the_one_that_is_started() -> None:
    """A unit's or a container's: ETCD_DATA_DIR kept it from starting, or gave it another's data."""
    own = {"PATH": "/bin", "ETCD_NAME": "node1", "ETCD_DATA_DIR": "/var", "ETCDCTL_API": "3"}
    assert dict(_environment(own)) == {"PATH": "/bin", "ETCDCTL_API": "3"}
    # Without this one etcd refuses to start on some processors.
    needed = {"ETCD_UNSUPPORTED_ARCH": "riscv64"}
    assert dict(_environment(needed)) == needed


_WITHOUT_IPV4 = """
import subprocess
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
subprocess.run(["ip", "addr", "del", "127.0.0.1/8", "dev", "lo"], check=True)
from keepstep.elastic.store.embedded import EmbeddedEtcd
with EmbeddedEtcd(bytes(32)) as etcd:
    print(etcd.url)
with EmbeddedEtcd(bytes(32), "[::1]") as etcd:
    print(etcd.url)
"""


@pytest.mark.skipif(
    subprocess.run(["unshare", "-n", "ip", "link"], capture_output=True).returncode != 0,
    reason="needs a network namespace of its own",
)
def test_etcd_is_started_on_a_machine_without_ipv4() -> None:
    completed = subprocess.run(
        ["unshare", "-n", sys.executable, "-c", _WITHOUT_IPV4],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr
    urls = completed.stdout.split()
    assert len(urls) == 2
    assert all(url.startswith("keepstep://[::1]:") for url in urls)
