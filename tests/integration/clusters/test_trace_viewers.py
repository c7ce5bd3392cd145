"""Claims about traces in the programs that read them: HTA, and Perfetto's page in a browser.

Both come from an environment of their own, .venv-viewers, which `make clusters-test` makes.
"""

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from keepstep.elastic.store.ports import ReservedPort
from keepstep.monitor.records import Ending, RankRecords
from keepstep.monitor.telemetry.record_history import RankState
from keepstep.monitor.views.chrome_trace import (
    TracedRank,
    base_time_s,
    trace_events,
    trace_text,
)
from tests.adaptive_timeouts import patient
from tests.integration.monitor.browser import CHROMIUM, DRIVER, browser
from tests.integration.monitor.sample import Plan, SampleReader

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-viewers" / "bin" / "python"
READER = SampleReader(Plan(ranks=4, steps=12, step_s=0.1), 100.0)
BASE_S = base_time_s(1.8e9)
HTA = """
import json, sys
from hta.trace_analysis import TraceAnalysis
traces = TraceAnalysis(trace_dir=sys.argv[1]).t
names = traces.symbol_table.get_sym_table()
ranks = {
    rank: sorted(names[name] for name in traces.get_trace(rank)["name"])
    for rank in traces.get_ranks()
}
print(json.dumps({"ranks": ranks, "steps": [int(step) for step in traces.get_iterations()]}))
"""

pytestmark = [
    pytest.mark.clusters,
    pytest.mark.skipif(
        not PYTHON.exists(),
        reason="no .venv-viewers: `python -m venv .venv-viewers`, and there "
        "`pip install holistictraceanalysis==0.5.0 viztracer==1.1.1`",
    ),
]


def traced(records: RankRecords) -> TracedRank:
    state = RankState(
        rank=records.rank,
        node="node-a",
        pid=1,
        incarnation="first",
        is_alive=True,
        ending=Ending.NONE,
        read_at_s=200.0,
        progress_at_s=200.0,
        world_size=4,
    )
    return TracedRank(state, records.records, 1.8e9)


def write(path: Path, ranks: list[TracedRank], step_name: str, rank: int | None) -> None:
    groups = {READER.group.identity: READER.group}
    events = trace_events(ranks, groups, BASE_S, step_name)
    distributed = {} if rank is None else {"rank": rank, "world_size": 4}
    path.write_text("".join(trace_text(events, BASE_S, {}, distributed)))


@pytest.fixture(scope="module")
def ranks() -> list[TracedRank]:
    return [traced(reading.records) for reading in READER.read()]


def test_hta_loads_a_file_of_each_rank_with_its_steps(
    tmp_path: Path, ranks: list[TracedRank]
) -> None:
    for each in ranks:
        path = tmp_path / f"rank{each.state.rank}.json"
        write(path, [each], "ProfilerStep#{}", each.state.rank)
    done = subprocess.run(
        [str(PYTHON), "-c", HTA, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=patient(120),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout.splitlines()[-1])
    assert loaded["ranks"].keys() == {"0", "1", "2", "3"}
    assert set(loaded["steps"]) >= set(range(1, 11))
    # It leaves out the last step, which torch.profiler may have cut short.
    for names in loaded["ranks"].values():
        assert names.count("backward") == 11
        assert names.count("send") == names.count("receive") == 11
        assert names.count("all reduce") > 11


@contextmanager
def perfetto(trace: Path) -> Iterator[str]:
    """Serve Perfetto's page with a trace; VizTracer brings it along."""
    port = ReservedPort()
    number = port.number
    port.close()
    command = [str(PYTHON), "-m", "viztracer.viewer", "--server_only", "--port", str(number)]
    server = subprocess.Popen(
        [*command, str(trace)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield f"http://127.0.0.1:{number}"
    finally:
        server.terminate()
        server.wait()


@pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="no Chromium: apt-get install chromium chromium-driver",
)
def test_perfetto_takes_every_slice_and_flow(tmp_path: Path, ranks: list[TracedRank]) -> None:
    path = tmp_path / "run7.json"
    write(path, ranks, "step {}", None)
    events = json.loads(path.read_text())["traceEvents"]
    kinds = [event["ph"] for event in events]
    query = """app.trace.engine.query(
        "select (select count(1) from slice) as slices, (select count(1) from flow) as flows, "
        + "(select ifnull(sum(value), 0) from stats where severity != 'info') as faults"
        ).then(result => {
            const row = result.firstRow({slices: 0, flows: 0, faults: 0});
            window.counted = [row.slices, row.flows, row.faults];
        })"""
    with perfetto(path) as url, browser() as page:
        deadline_s = time.monotonic() + patient(30)
        while True:
            try:
                page.open(url)
                break
            except AssertionError:
                # The server has not begun to listen.
                assert time.monotonic() < deadline_s
        page.until("return document.body.innerText.includes('rank 3 on node-a')", patient(60))
        page.run(query)
        slices, flows, faults = page.until("return window.counted")
    # Flows go from each rank to the next one.
    assert (slices, flows) == (kinds.count("X"), kinds.count("t") + kinds.count("f"))
    assert faults == 0
