"""Claims about what a worker shows of an exception of its script."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import TextIO

import pytest

from keepstep.checkpoint.errors import CheckpointError, ProcessEnded, RankFailed
from keepstep.checkpoint.format.stored.storage import open_storage
from keepstep.elastic.errors import StepRejected, UsageError
from keepstep.elastic.worker import script_failure
from keepstep.elastic.worker.script_failure import (
    is_fatal,
    place_of,
    show,
    summary_of,
    traceback_of,
    without_launcher,
)


def failure_of(directory: Path, code: str) -> BaseException:
    script = directory / "train.py"
    script.write_text(code)
    with pytest.raises(BaseException) as seen:  # noqa: PT011 - any
        runpy.run_path(str(script), run_name="__main__")
    error = seen.value
    # The frame of this test is what the launcher's is in a worker.
    assert error.__traceback__ is not None
    return without_launcher(error.with_traceback(error.__traceback__.tb_next))


def test_error_that_explains_itself_is_shown_with_the_line_of_the_script_only() -> None:
    with pytest.raises(CheckpointError) as seen:
        open_storage("nonsense://host/x")
    text = traceback_of(without_launcher(seen.value))
    assert "test_script_failure.py" in text
    assert "storage.py" not in text
    assert "nonsense:// is not supported; use a path, file://" in text


def test_what_keepstep_caught_is_not_shown_and_one_line_says_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError) as seen:
        open_storage(str(tmp_path / "file" / "below")).probe_writable()
    assert isinstance(seen.value.__cause__, OSError)
    error = without_launcher(seen.value)
    assert "files.py" not in traceback_of(error)
    assert "direct cause" not in traceback_of(error)
    report = script_failure.failure_of(error)
    assert report.traceback == ""
    assert str(tmp_path / "file") in report.error
    assert report.error.endswith(f" ({script_failure.line_of(error)})")
    assert "test_script_failure.py" in report.error


def test_what_the_script_raised_is_shown_as_the_cause_of_keepsteps_error(tmp_path: Path) -> None:
    code = "from keepstep.checkpoint.errors import CheckpointError\n"
    code += "try:\n    {}['x']\nexcept KeyError as e:\n    raise CheckpointError('y') from e\n"
    report = script_failure.failure_of(failure_of(tmp_path, code))
    assert "KeyError: 'x'" in report.traceback
    assert report.traceback.count("train.py") == 2


def test_other_error_is_shown_with_all_frames() -> None:
    with pytest.raises(AttributeError) as seen:
        open_storage(7)  # type: ignore[arg-type]
    assert "storage.py" in traceback_of(without_launcher(seen.value))


def test_error_is_shown_with_its_cause_and_without_the_launcher(tmp_path: Path) -> None:
    code = "try:\n    {}['x']\nexcept KeyError as e:\n    raise ValueError('mine') from e\n"
    error = failure_of(tmp_path, code)
    text = traceback_of(error)
    assert summary_of(error) == "ValueError: mine"
    assert "KeyError: 'x'" in text
    assert "direct cause" in text
    assert "runpy" not in text
    assert text.count("train.py") == 2


def test_summary_is_the_message_and_not_a_note(tmp_path: Path) -> None:
    code = "e = ValueError('mine')\ne.add_note('while reading\\nshard 7')\nraise e\n"
    error = failure_of(tmp_path, code)
    assert summary_of(error) == "ValueError: mine"
    assert "ValueError: mine\nwhile reading\nshard 7\n" in traceback_of(error)


@pytest.mark.parametrize("code", ["raise ValueError('x')", "import nosuchmodule", "open('/none')"])
def test_another_attempt_is_made_where_the_script_has_run(tmp_path: Path, code: str) -> None:
    assert not is_fatal(failure_of(tmp_path, code))


def test_script_that_cannot_begin_is_not_tried_again(tmp_path: Path) -> None:
    assert is_fatal(failure_of(tmp_path, "def"))
    for run in (
        lambda: runpy.run_module("nosuchmodule", run_name="__main__"),
        lambda: runpy.run_path(str(tmp_path / "none.py")),
    ):
        with pytest.raises((ImportError, OSError)) as seen:
            run()
        error = seen.value
        assert error.__traceback__ is not None
        entry = error.__traceback__.tb_next
        assert entry is not None
        assert is_fatal(without_launcher(error.with_traceback(entry.tb_next)))


def test_wrong_input_is_fatal_and_another_ranks_failure_is_not(tmp_path: Path) -> None:
    head = "from keepstep.checkpoint.errors import CheckpointError, ProcessEnded, RankFailed\n"
    head += "from keepstep.elastic.errors import StepRejected, UsageError\n"
    for error, expected in (
        (UsageError, True), (StepRejected, True), (CheckpointError, True), (RankFailed, False),
        (ProcessEnded, False),
    ):  # fmt: skip
        found = failure_of(tmp_path, f"{head}raise {error.__name__}('x')")
        assert is_fatal(found) == expected


def test_the_scripts_own_hook_shows_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[type[BaseException]] = []
    error = failure_of(tmp_path, "1 / 0")
    monkeypatch.setattr(sys, "excepthook", lambda kind, *_: seen.append(kind))
    show(error)
    assert seen == [ZeroDivisionError]

    def fails(*_: object) -> None:
        raise RuntimeError("of the hook")

    monkeypatch.setattr(sys, "excepthook", fails)
    show(error)
    shown = capsys.readouterr().err
    assert "of the hook" in shown
    assert "ZeroDivisionError" in shown


@pytest.mark.parametrize(
    ("code", "place"),
    [
        ("def f():\n    return {}['x']\nf()", "KeyError at {}:2"),
        ("import json\njson.loads('{')", "JSONDecodeError at {}/decoder.py:"),
        # The network, a disk, a device or a peer may be at fault: it may not come again.
        ("open('/no/such/file')", ""),
        ("raise TimeoutError", ""),
        ("import torch\nraise torch.AcceleratorError('CUDA error', 700)", ""),
        ("import torch\nraise torch.distributed.DistBackendError('NCCL')", ""),
        ("import torch\nraise torch.OutOfMemoryError('CUDA out of memory')", ""),
        ("raise RuntimeError('[gloo/transport/tcp/pair.cc:537] Read error')", ""),
        ("from keepstep.checkpoint.errors import RankFailed\nraise RankFailed('x')", ""),
        ("raise SystemExit(3)", ""),
        # A process that the system has ended is no error of the script's.
        ("raise RuntimeError('DataLoader worker (pid 7) is killed by signal: Killed. ')", ""),
        ("raise RuntimeError('DataLoader worker (pid(s) 7) exited unexpectedly')", ""),
        ("import subprocess\nsubprocess.run(['sh', '-c', 'kill -9 $$'], check=True)", ""),
        ("try:\n    raise EOFError\nexcept EOFError as e:\n    raise ValueError('x') from e", ""),
        ("from concurrent.futures.process import BrokenProcessPool\nraise BrokenProcessPool", ""),
        ("from keepstep.checkpoint.errors import ProcessEnded\nraise ProcessEnded('x')", ""),
    ],
)
def test_error_is_known_again_by_its_type_and_line_unless_the_surroundings_may_cause_it(
    tmp_path: Path, code: str, place: str
) -> None:
    import torch.distributed  # noqa: F401 - as in a worker

    found = place_of(failure_of(tmp_path, code))
    known = str(tmp_path / "train.py") if "KeyError" in place else json.__path__[0]
    assert found.startswith(place.format(known))
    assert bool(found) == bool(place)


_NO_TEXT = "class NoText({}):\n    def __str__(self): raise ValueError\nraise NoText()"


@pytest.mark.parametrize("base", ["Exception", "RuntimeError", "BaseException", "SystemError"])
def test_error_whose_text_raises_is_reported_with_its_traceback(tmp_path: Path, base: str) -> None:
    report = script_failure.failure_of(failure_of(tmp_path, _NO_TEXT.format(base)))
    assert report.error == "NoText: <exception str() failed>"
    assert "train.py" in report.traceback


def test_error_is_shown_although_the_hook_exits_and_the_output_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = failure_of(tmp_path, "1 / 0")
    monkeypatch.setattr(sys, "excepthook", lambda *_: sys.exit(4))
    for output in (None, closed_file(tmp_path)):
        monkeypatch.setattr(sys, "stdout", output)
        monkeypatch.setattr(sys, "stderr", output)
        show(error)


def test_closed_output_loses_nothing_and_a_full_disk_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for output in (None, closed_file(tmp_path)):
        monkeypatch.setattr(sys, "stdout", output)
        assert script_failure.flush_output()
    full = open("/dev/full", "w")  # noqa: SIM115 - cannot be closed in good order
    full.write("x")
    monkeypatch.setattr(sys, "stdout", full)
    assert not script_failure.flush_output()
    with pytest.raises(OSError, match="No space left"):
        full.close()


def closed_file(directory: Path) -> TextIO:
    file = (directory / "closed").open("w")
    file.close()
    return file
