"""Claims about `keepstep logs`: which files it prints, and what it says if there are none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
from click.testing import CliRunner

from keepstep.elastic.agent.output_files import OutputFile
from keepstep.elastic.cli.job_logs import holders
from keepstep.elastic.cli.main import main


def logs(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["logs", *arguments])
    return done.exit_code, done.output


def write(job: str, generation: int, rank: int, stream: str, text: str, at_s: int = 1) -> Path:
    directory = Path("keepstep-logs", job)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"generation-{generation}-rank-{rank}-{stream}.log"
    path.write_text(text)
    os.utime(path, (at_s, at_s))
    return path


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # No job of this user runs here.
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_the_newest_generation_of_the_rank_is_printed() -> None:
    for generation in (2, 10):
        for rank in (1, 3):
            write("run7", generation, rank, "stderr", f"err {generation} {rank}\n")
            write("run7", generation, rank, "stdout", f"out {generation} {rank}\n")
    write("run7", 11, 3, "stdout", "out 11 3\n")
    assert logs("--job", "run7", "--rank", "1") == (0, "out 10 1\nerr 10 1\n")
    assert logs("--job", "run7", "--rank", "3") == (0, "out 11 3\n")
    assert logs("--job", "run7") == (0, "out 10 1\nerr 10 1\n")


def test_without_a_job_it_is_the_one_that_wrote_last() -> None:
    write("newer", 1, 0, "stdout", "newer\n", at_s=20)
    write("older", 1, 0, "stdout", "older\n", at_s=10)
    assert logs() == (0, "newer\n")


@pytest.mark.parametrize("arguments", [(), ("--job", "run7")])
def test_without_output_in_files_the_flag_is_named(arguments: tuple[str, ...]) -> None:
    code, output = logs(*arguments)
    assert code == 2
    assert re.search(r"has no output of workers: .*--tee 3.*--redirects 3", output)


def test_a_rank_without_a_file_names_those_there_are() -> None:
    for rank in (0, 2):
        write("run7", 1, rank, "stdout", "")
    code, output = logs("--rank", "1")
    assert code == 2
    assert "no output of rank 1, but of 0, 2" in output


def test_what_is_followed_goes_on_in_a_later_generation() -> None:
    first = write("run7", 1, 0, "stdout", "one\n")
    with subprocess.Popen(
        [sys.executable, "-m", "keepstep", "logs", "--follow"], stdout=subprocess.PIPE, text=True
    ) as following:
        assert following.stdout is not None
        try:
            assert following.stdout.readline() == "one\n"
            with first.open("a") as file:
                file.write("two\n")
            write("run7", 2, 0, "stdout", "three\n")
            assert following.stdout.readline() == "two\n"
            assert following.stdout.readline() == "three\n"
        finally:
            following.kill()


def test_output_since_a_generation_is_in_its_order() -> None:
    for generation in (1, 2, 10):
        for stream in ("stderr", "stdout"):
            write("run7", generation, 0, stream, f"{stream} {generation}\n")
    assert logs("--since-generation", "2") == (
        0,
        "stdout 2\nstderr 2\nstdout 10\nstderr 10\n",
    )


def test_a_node_is_named_for_a_job_that_runs_only() -> None:
    write("run7", 1, 0, "stdout", "")
    code, output = logs("--node", "a")
    assert code == 2
    assert "--node is for a job that runs; give --store" in output


def listed(
    nbytes: int, generation: int = 1, stream: Literal["stdout", "stderr"] = "stdout"
) -> OutputFile:
    return OutputFile(generation=generation, rank=0, stream=stream, nbytes=nbytes)


def test_a_file_that_nodes_share_is_read_once_where_it_is_longest() -> None:
    seen = {
        "a": (listed(5), listed(3, 2, "stderr")),
        "b": (listed(7), listed(3, 2, "stderr"), listed(1, 2)),
    }
    assert list(holders(seen).values()) == [
        ("b", listed(7)),
        ("b", listed(1, 2)),
        ("a", listed(3, 2, "stderr")),
    ]
