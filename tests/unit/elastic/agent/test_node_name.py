"""Claims about the names of nodes that the user has not named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.elastic.agent.node_name import own_node_name

HOLD = """
import sys
from keepstep.elastic.agent.node_name import own_node_name
with own_node_name("job") as name:
    print(name, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_an_agent_that_is_started_again_has_the_same_name_and_others_have_others() -> None:
    with own_node_name("job") as first, own_node_name("job") as second:
        assert second == f"{first}-2"
        with own_node_name("another job") as other:
            assert other == first
    with own_node_name("job") as again:
        assert again == first


def test_the_first_free_name_is_taken_also_after_sigkill(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        with own_node_name("job") as second:
            assert second == f"{name}-2"
            process.kill()
            process.wait()
            with own_node_name("job") as third:
                assert third == name
    assert list((tmp_path / "keepstep").glob("name-*")) == []


def test_an_odd_host_name_gives_a_name_that_can_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "h\xf6st name.example.org")
    with own_node_name("job") as name:
        assert name.startswith("h-st-name-")
        assert name.isascii()
