"""Claims about where the output of workers goes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.elastic.worker.log_files import Outputs, chosen_streams

_WORKER = """
import sys
from keepstep.elastic.worker.log_files import Outputs, redirect
from tests.unit.elastic.worker.places import assignment
redirect(Outputs.decode(sys.argv[1]), assignment(2, rank=1, local_rank=1))
print("out", flush=True)
print("err", file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("text", "streams"), [("0", 0), ("3", 3), ("1:2", 2), ("0:3", 0), ("0:3,1:1,11:2", 1)]
)
def test_streams_are_chosen_for_all_or_by_local_rank(text: str, streams: int) -> None:
    assert chosen_streams(text, 1) == streams


@pytest.mark.parametrize("text", ["", "4", "1:", "1:4", "x", "0:3,", "-1:3"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"--tee .*: give 0, 1, 2 or 3"):
        Outputs("logs", "0", text)


@pytest.mark.parametrize(
    ("options", "printed", "kept"),
    [
        (("0", "0", ""), "out err", ""),
        (("3", "0", ""), "", "out err"),
        (("0", "1", ""), "out err", "out"),
        (("1:2", "0", ""), "out", "err"),
        (("0:3", "0", "1"), "out err", ""),
        (("0", "0", "0"), "", ""),
        (("0", "1:3", "0,2"), "", "out err"),
    ],
)
def test_output_goes_where_torchrun_would_have_it(
    tmp_path: Path, options: tuple[str, str, str], printed: str, kept: str
) -> None:
    outputs = Outputs(str(tmp_path / "logs"), *options)
    completed = subprocess.run(
        [sys.executable, "-c", _WORKER, outputs.encode()],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert f"{completed.stdout}{completed.stderr}".split() == printed.split()
    files = sorted((tmp_path / "logs").glob("generation-2-rank-1-*.log"), reverse=True)
    assert "".join(path.read_text() for path in files).split() == kept.split()
