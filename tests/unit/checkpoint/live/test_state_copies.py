"""Claims about copies from a GPU, by a runtime that records what it is asked for."""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from keepstep.checkpoint.live.state_copies import CudaCopies
from keepstep.checkpoint.snapshot.arena import Arena

GPU = torch.device("cuda", 3)


def is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, _, last = line.split()[0].partition("-")
        if int(first, 16) <= address < int(last, 16):
            return True
    return False


class Runtime:
    """Stands in for CUDA: takes note of calls, and fails where CUDA would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.locked: dict[int, int] = {}
        self.code = 0
        self._current = threading.local()
        for name in ("Stream", "Event", "stream", "set_device", "cudart", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, f"_{name}"))

    def _set_device(self, device: torch.device) -> None:
        self._current.device = device

    def _Stream(self, device: torch.device) -> Any:
        return SimpleNamespace(wait_event=lambda event: self.calls.append("stream waits"))

    def _current_stream(self, device: torch.device) -> str:
        return "of training"

    def _Event(self, *, blocking: bool = False) -> Any:
        return _Event(self, blocking)

    @contextmanager
    def _stream(self, stream: Any) -> Iterator[None]:
        self.calls.append(f"stream of {getattr(self._current, 'device', 'no device')}")
        yield

    def _cudart(self) -> Any:
        return SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self._unregister)

    def _register(self, pointer: int, nbytes: int, flags: int) -> int:
        assert is_mapped(pointer)
        assert pointer not in self.locked, "locked twice"
        self.locked[pointer] = nbytes
        return self.code

    def _unregister(self, pointer: int) -> int:
        assert is_mapped(pointer), "unmapped while it was locked"
        del self.locked[pointer]
        return 0


class _Event:
    def __init__(self, runtime: Runtime, blocking: bool) -> None:
        self._runtime = runtime
        self._blocking = blocking

    def record(self, stream: Any) -> None:
        self._runtime.calls.append(f"event of {stream if isinstance(stream, str) else 'the copy'}")

    def synchronize(self) -> None:
        self._runtime.calls.append("host waits" if self._blocking else "host spins")


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime(monkeypatch)
    monkeypatch.setattr(torch.cuda, "Event", _event_type(made))
    return made


def _event_type(runtime: Runtime) -> type[_Event]:
    class Event(_Event):
        def __init__(self, *, blocking: bool = False) -> None:
            super().__init__(runtime, blocking)

    return Event


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.create(3 * 2**20)
    yield made
    made.close()


class Source:
    def __init__(self, device: torch.device = GPU) -> None:
        self.device = device


class Target:
    """Takes note in which order it is written, and whether the host waits for the copy's end."""

    def __init__(self, runtime: Runtime, error: str = "") -> None:
        self._runtime = runtime
        self._error = error

    def copy_(self, source: Source, *, non_blocking: bool) -> None:
        self._runtime.calls.append("queued" if non_blocking else "copied")
        if self._error:
            raise RuntimeError(self._error)


def test_copy_begins_after_the_mark_and_its_end_is_waited_for_without_spinning(
    runtime: Runtime, arena: Arena
) -> None:
    copies = CudaCopies(GPU)
    copies.lock(1, arena)
    sources: Any = [Source()]
    targets: Any = [Target(runtime)]
    after = copies.mark()
    thread = threading.Thread(
        target=lambda: (copies.bind(), copies.begin(targets, sources, after)())
    )
    thread.start()
    thread.join()
    assert runtime.calls == [
        "event of of training",
        "stream of cuda:3",
        "stream waits",
        "queued",
        "event of the copy",
        "host waits",
    ]


def test_copies_are_queued_by_the_caller_and_waited_for_elsewhere(runtime: Runtime) -> None:
    """A thread that queued them waited for the GIL while the caller captured the state."""
    copies = CudaCopies(GPU)
    sources: Any = [Source(), Source()]
    held = weakref.ref(sources[0])
    targets: Any = [Target(runtime), Target(runtime)]
    wait = copies.begin(targets, sources, copies.mark())
    assert runtime.calls[-3:] == ["queued", "queued", "event of the copy"]
    del sources
    assert held() is not None
    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert runtime.calls[-1] == "host waits"


def test_copy_from_another_device_is_the_threads_work_and_its_end_no_event_tells(
    runtime: Runtime,
) -> None:
    """The bytes of the second GPU of a process were read before they had arrived."""
    on_host, target = torch.arange(4.0), torch.zeros(4)
    sources: Any = [Source(torch.device("cuda", 1)), on_host, Source()]
    targets: Any = [Target(runtime), target, Target(runtime)]
    copies = CudaCopies(GPU)
    finish = copies.begin(targets, sources, copies.mark())
    assert runtime.calls[-2:] == ["queued", "event of the copy"]
    assert not target.any()
    finish()
    assert runtime.calls[-2:] == ["copied", "host waits"]
    assert torch.equal(target, on_host)


@pytest.mark.parametrize("device", [GPU, torch.device("cuda", 1)])
def test_sources_live_until_the_stream_has_read_them_also_after_an_error(
    runtime: Runtime, device: torch.device
) -> None:
    copies = CudaCopies(GPU)
    sources: Any = [Source(), Source(device)]
    targets: Any = [Target(runtime), Target(runtime, "it has failed")]
    with pytest.raises(RuntimeError, match="it has failed"):
        copies.begin(targets, sources, copies.mark())()
    assert "event of the copy" in runtime.calls
    assert runtime.calls[-1] == "host waits"


def test_buffer_is_locked_once_and_released_while_it_is_mapped(
    runtime: Runtime, arena: Arena
) -> None:
    copies = CudaCopies(GPU)
    other = Arena.create(4096)
    for _ in range(2):
        copies.lock(1, arena)
        copies.lock(2, other)
    assert sorted(runtime.locked.values()) == [4096, 3 * 2**20]
    copies.unlock(2)
    other.close()
    # The next buffer may get the same address and even the same number.
    again = Arena.create(4096)
    copies.lock(2, again)
    copies.close()
    assert runtime.locked == {}
    again.close()


def test_pages_have_their_memory_before_they_are_locked(runtime: Runtime, arena: Arena) -> None:
    arena.bytes[5] = 7
    assert arena.unwritten_nbytes > 0
    CudaCopies(GPU).lock(1, arena)
    assert arena.unwritten_nbytes == 0
    assert arena.bytes[5] == 7


@pytest.mark.parametrize(("code", "why"), [(712, "locked already"), (801, "only"), (999, "list")])
def test_refusal_names_its_reason(runtime: Runtime, arena: Arena, code: int, why: str) -> None:
    runtime.code = code
    with pytest.raises(RuntimeError, match=f"CUDA error {code} .*{why}"):
        CudaCopies(GPU).lock(1, arena)
