"""Claims about the lines of docs/observability.md: each of them works as it stands.

Only ports and addresses are this test's, since others may run on the machine at the same time.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from keepstep.elastic.store.ports import ReservedPort
from tests.adaptive_timeouts import patient
from tests.integration.monitor.collectors import collecting
from tests.integration.monitor.jobs import Job
from tests.integration.monitor.running import until
from tests.integration.monitor.test_trace import events_of, slices

PAGE = Path(__file__).parents[3] / "docs" / "observability.md"
RUN_HERE = (
    "Traces", "OpenTelemetry", "Webhook", "Prometheus and Grafana", "Events as lines of JSON",
)  # fmt: skip
RUN_ELSEWHERE: dict[str, str] = {}
"""By heading of the page, the test that runs its lines."""

pytestmark = pytest.mark.slow


def commands() -> dict[str, list[str]]:
    """Return the blocks of commands of the page, by heading."""
    found: dict[str, list[str]] = {}
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        blocks = re.findall(r"^```\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
        found[section.partition("\n")[0]] = [block.replace("\\\n", " ") for block in blocks]
    return found


@contextmanager
def started(block: str, directory: Path, environment: dict[str, str]) -> Iterator[None]:
    """Run a block whose last line is a monitor, which ends with the context."""
    process = subprocess.Popen(
        ["bash", "-euc", re.sub(r"^keepstep", "exec keepstep", block, flags=re.MULTILINE)],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert any("watching job run7" in line for line in process.stdout)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


def test_every_block_of_the_page_is_run() -> None:
    with_commands = {heading for heading, blocks in commands().items() if blocks}
    assert with_commands == {*RUN_HERE, *RUN_ELSEWHERE}


def test_lines_of_the_page_bring_traces_metrics_and_verdicts_out(tmp_path: Path) -> None:
    blocks = commands()
    environment = {
        **os.environ,
        "KEEPSTEP_MONITOR_DIR": str(tmp_path / "rings"),
        "XDG_RUNTIME_DIR": str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }

    def run(block: str) -> str:
        return subprocess.run(
            ["bash", "-euc", block],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=patient(120),
            check=True,
        ).stdout

    async def check() -> None:
        port = ReservedPort()
        number = port.number
        port.close()
        async with collecting() as collector:

            def here(block: str, port: int = 0) -> str:
                block = block.replace("http://127.0.0.1:4318", collector.url)
                block = block.replace("https://example.org", collector.url)
                return block.replace(
                    "keepstep monitor --job", f"keepstep monitor --port {port} --job"
                )

            otlp, webhook, events = (
                started(here(blocks[heading][0], port), tmp_path, environment)
                for heading, port in (
                    ("OpenTelemetry", 0), ("Webhook", 0), ("Events as lines of JSON", number),
                )
            )  # fmt: skip
            with Job(tmp_path / "rings", "paced", 2, KEEPSTEP_JOB="run7") as job:
                job.expect("ready")
                with otlp, webhook, events:
                    for block in blocks["Traces"]:
                        url = f"trace --url http://127.0.0.1:{number}"
                        said = await asyncio.to_thread(run, block.replace("trace", url, 1))
                        assert "steps 100 to 110 of 2 ranks" in said
                    job.workers[1].kill()
                    path = "/hooks/verdicts"
                    await until(lambda: bool(collector.requests.get(path)), 60)
                    await until(lambda: bool(collector.requests.get("/v1/logs")), 60)
                    lines = tmp_path / "run7-events.jsonl"
                    await until(lambda: "keepstep.verdict.opened" in lines.read_text(), 60)
            assert {"/v1/metrics", "/v1/traces"} <= collector.requests.keys()
            assert "deployment.environment" in str(collector.requests["/v1/metrics"])
            assert collector.requests[path][0]["resource"]["keepstep.job"] == "run7"

    asyncio.run(check())
    assert len(slices(events_of(tmp_path / "run7.json.gz"), "step")) == 22
    assert len(slices(events_of(tmp_path / "run7-trace" / "rank1.json.gz"), "step")) == 11
    (tmp_path / "run7.secret").write_text("a secret of this test\n")
    (tmp_path / "run7.secret").chmod(0o600)
    (token,) = blocks["Prometheus and Grafana"]
    run(token)
    assert len((tmp_path / "keepstep.token").read_text().strip()) > 20
