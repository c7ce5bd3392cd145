"""Tests what is sampled of real processes."""

import os
import signal
import subprocess
import sys
import time

from keepstep.monitor.diagnosis.metrics import ProcessSample
from keepstep.monitor.node.processes import sample_processes
from tests.adaptive_timeouts import patient


def of_rank_0(pid: int) -> ProcessSample:
    (sample,) = sample_processes({0: pid})
    return sample


def test_processor_time_and_bytes_of_descendants_count() -> None:
    work = "open('/dev/zero', 'rb').read(1 << 22); print(1, flush=True)\nwhile True: pass"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {work!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            first = of_rank_0(process.pid)
            deadline_s = time.monotonic() + patient(60)
            while of_rank_0(process.pid).cpu_s < first.cpu_s + 0.2:
                assert time.monotonic() < deadline_s
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert first.io_nbytes >= 1 << 22
    assert (first.rank, first.pid) == (0, process.pid)


def test_process_that_does_not_exist_is_left_out() -> None:
    samples = sample_processes({0: os.getpid(), 1: 2**22 - 1})
    assert [sample.rank for sample in samples] == [0]
    assert sample_processes({}) == ()
