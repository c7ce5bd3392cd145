"""Writes one rank's parts of checkpoints, from memory shared with it.

    python -m keepstep.checkpoint.saving.writer --control FD --parent PID

A process of its own, so that encoding takes neither the training's GIL nor, if others want them,
its cores. It loads no PyTorch. The rank owns the other end of the control descriptor; the process
ends when that closes, and is killed when the rank ends.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
from collections.abc import Callable, Sequence

from keepstep.checkpoint.errors import CheckpointError
from keepstep.checkpoint.format.layout.boxes import Box, Entry
from keepstep.checkpoint.format.stored.last_part import LastPart
from keepstep.checkpoint.format.stored.object_names import Attempt, StoredStep
from keepstep.checkpoint.format.stored.storage import open_storage
from keepstep.checkpoint.format.stored.transfer_memory import TransferPool
from keepstep.checkpoint.format.stored.writer import write_part
from keepstep.checkpoint.saving.messages import (
    WRITER_PROTOCOL,
    Failed,
    PartPlan,
    Publish,
    Published,
    UseBuffer,
    UsePlan,
    WritePart,
    WriterReply,
    WriterRequest,
    Written,
)
from keepstep.checkpoint.saving.parts import decode_reports, publish_parts
from keepstep.checkpoint.snapshot.arena import Arena, Bytes, box_bytes
from keepstep.log_format import log_to_stderr
from keepstep.notices import leave_notices
from keepstep.processes import die_with_parent, yield_to_training
from keepstep.transport import Connection


class Writer:
    """Answers the rank's requests, one after the other. Owns the mapped buffer."""

    def __init__(self, connection: Connection[WriterReply, WriterRequest]) -> None:
        self._connection = connection
        self._buffer: Arena | None = None
        self._plan: PartPlan | None = None
        self._task: WritePart | None = None
        self._payload = bytearray()
        self._write_memory = TransferPool()
        self._last_part = LastPart()

    def run(self) -> None:
        """Serve until the rank closes its end."""
        try:
            while (request := self._connection.receive(self._allocate)) is not None:
                self._answer(request)
        finally:
            self._connection.close()
            if self._buffer is not None:
                self._buffer.close()

    def _allocate(self, _: WriterRequest, nbytes: int) -> Sequence[memoryview]:
        self._payload = bytearray(nbytes)
        return (memoryview(self._payload),)

    def _answer(self, request: WriterRequest) -> None:
        match request:
            case UseBuffer(nbytes=nbytes):
                old, self._buffer = self._buffer, None
                if old is not None:
                    old.close()
                descriptor = self._connection.take_descriptor()
                self._buffer = Arena.map(descriptor, nbytes, writable=False)
            case UsePlan():
                self._plan = PartPlan.decode(self._payload)
            case WritePart():
                self._reply(lambda: self._write(request))
            case Publish():
                self._reply(self._publish)

    def _reply(self, act: Callable[[], WriterReply]) -> None:
        reply: WriterReply
        try:
            reply = act()
        except CheckpointError as error:
            reply = Failed(error=type(error).__name__, reason=str(error))
        except Exception as error:  # noqa: BLE001 - the process's edge: the rank waits for a reply
            reply = Failed(error=type(error).__name__, reason=repr(error))
        self._connection.send(reply)

    def _write(self, task: WritePart) -> WriterReply:
        assert self._plan is not None, "a plan is sent before"
        assert self._buffer is not None, "a buffer is sent before"
        os.chdir(task.directory)
        self._task = task
        reader = _BufferReader(self._plan, self._buffer.bytes)
        listing = write_part(
            open_storage(task.url),
            _attempt_of(task),
            self._plan.own.plan,
            [0],
            reader.read_box,
            name=self._plan.rank,
            memory=self._write_memory,
            with_content=True,
            last=self._last_part,
        )
        return Written(listing=listing)

    def _publish(self) -> WriterReply:
        assert self._plan is not None, "a plan is sent before"
        assert self._task is not None, "a part is written before"
        reports = decode_reports(self._payload)
        storage = open_storage(self._task.url)
        publish_parts(storage, _attempt_of(self._task), self._plan.tensors, reports)
        return Published()


class _BufferReader:
    """Reads chunks from the buffer. Called from several threads."""

    def __init__(self, plan: PartPlan, memory: Bytes) -> None:
        self._memory = memory
        self._entries: dict[str, list[Entry]] = {}
        for entry in plan.entries:
            self._entries.setdefault(entry.key, []).append(entry)

    def read_box(self, key: str, box: Box) -> Bytes:
        """Return a chunk's bytes, a view of the buffer."""
        entry = next(e for e in self._entries[key] if box.is_within(e.box))
        return box_bytes(entry, self._memory, box)


def _attempt_of(task: WritePart) -> Attempt:
    return Attempt(StoredStep(task.step, task.generation), task.attempt)


def main() -> None:
    """Run a writer as a rank's child."""
    # They are the rank's: a save that is under way is finished when the rank exits.
    leave_notices()
    parser = argparse.ArgumentParser(
        description="Write a rank's checkpoints (started by checkpoint.save(..., block=False))."
    )
    parser.add_argument("--control", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args()
    die_with_parent(options.parent)
    log_to_stderr(logging.WARNING, "checkpoint writer")
    yield_to_training()
    control = socket.socket(fileno=options.control)
    connection: Connection[WriterReply, WriterRequest] = Connection.over_pair(
        control, WRITER_PROTOCOL.server, "the rank"
    )
    Writer(connection).run()


if __name__ == "__main__":
    main()
