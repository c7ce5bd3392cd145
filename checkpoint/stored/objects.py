"""Checkpoints in object stores, by TensorStore's drivers. An acknowledged PUT is whole and durable."""

from __future__ import annotations

import queue
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorstore

from keepstep.checkpoint.errors import CheckpointError, CheckpointExists, CheckpointMissing

# Some 20 seconds in all. The default of 32 retries would let a wrong endpoint look like a hang.
_RETRIES = {"max_retries": 6, "initial_delay": "250ms", "max_delay": "5s"}

# A request that has got no answer for this long, and for as long again as its bytes take at a slow line's rate, is sent again.
_REQUEST_TIMEOUT_S = 60.0
# For each request: those of a rank that are under way together, and those of all ranks, share a line.
_SLOW_BYTES_PER_S = 2**18
# How many times as slow the line may be, attempt by attempt. So a dead connection is noticed after minutes, yet a line on which 64 MiB
# take half an hour does not end a save, though what is sent again takes its share of it.
_TIMEOUT_FACTORS = (1, 4, 16)
# What is many requests in one may take as long as so many bytes.
_MANY_NBYTES = 2**26

_MEMORY = tensorstore.Context()
"""One process's memory: every storage of one memory:// URL sees the same objects."""


@dataclass(frozen=True, slots=True)
class ObjectStorage:
    """A `Storage` over a TensorStore key-value store.

    A request that has got no answer for `request_timeout_s` seconds, longer if it carries many bytes, is sent anew; the first answer counts.
    """

    url: str
    store: Any
    request_timeout_s: float = _REQUEST_TIMEOUT_S

    def read(self, name: str, nbytes: int = 0) -> bytes:
        """See `Storage.read`."""
        result = self._request(f"read {name}", lambda: self.store.read(name), nbytes)
        if result.state != "value":
            raise CheckpointMissing(f"{self.url}: there is no object {name}")
        return bytes(result.value)

    def read_into(self, name: str, buffers: Sequence[memoryview], offset: int = 0) -> int:
        """See `Storage.read_into`."""
        end = offset + sum(buffer.nbytes for buffer in buffers)
        try:
            result = self._wait(
                lambda: self.store.read(name, byte_range=slice(offset, end)), end - offset
            )
        except ValueError as error:
            if "OUT_OF_RANGE" in str(error):
                return 0
            raise self._translate_error(f"read {name}", error) from error
        except OSError as error:
            raise self._translate_error(f"read {name}", error) from error
        if result.state != "value":
            raise CheckpointMissing(f"{self.url}: there is no object {name}")
        data = memoryview(result.value)
        start = 0
        for buffer in buffers:
            piece = data[start : start + buffer.nbytes]
            buffer[: piece.nbytes] = piece
            start += piece.nbytes
        return data.nbytes

    def prefetch(self, name: str, offset: int, nbytes: int) -> None:
        """See `Storage.prefetch`: there is nothing to be gained here, several requests are under way anyway."""

    def write(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        """See `Storage.write`."""
        data = b"".join(pieces)
        self._request(f"write {name}", lambda: self.store.write(name, data), len(data))

    @property
    def supports_links(self) -> bool:
        """See `Storage.supports_links`: a second name would be a second object."""
        return False

    def link_identical(self, source: str, name: str, pieces: Sequence[bytes | memoryview]) -> bool:
        """See `Storage.link_identical`."""
        return False

    def flush(self, names: Sequence[str]) -> None:
        """See `Storage.flush`: an acknowledged PUT is durable."""

    def create(self, name: str, data: bytes) -> None:
        """See `Storage.create`."""
        found = self._request(f"read {name}", lambda: self.store.read(name), len(data))
        if found.state != "value":
            # The stamp of an absent object is the condition that it is absent. An empty one would be no
            # condition at all.
            absent = found.stamp.generation
            written = self._request(
                f"create {name}", lambda: self.store.write(name, data, if_equal=absent), len(data)
            )
            if written.generation:
                return
        if self.read(name, len(data)) != data:
            raise CheckpointExists(
                f"{self.url}: {name} exists already; committed steps are never overwritten"
            )

    def exists(self, name: str) -> bool:
        """See `Storage.exists`."""
        return bool(self._request(f"read {name}", lambda: self.store.read(name)).state == "value")

    def names(self, prefix: str = "") -> Sequence[str]:
        """See `Storage.names`."""
        listed = self._request("list", lambda: self.store.list(_range(prefix)), _MANY_NBYTES)
        return sorted(name.decode() for name in listed)

    def directories_with(self, leaf: str) -> Sequence[str]:
        """See `Storage.directories_with`."""
        split = (name.partition("/") for name in self.names())
        return [directory for directory, _, rest in split if rest == leaf]

    def delete(self, name: str) -> None:
        """See `Storage.delete`."""
        self._request(f"delete {name}", lambda: self.store.write(name, None))

    def delete_directory(self, directory: str) -> None:
        """See `Storage.delete_directory`."""
        self._request(
            f"delete {directory}",
            lambda: self.store.delete_range(_range(f"{directory}/")),
            _MANY_NBYTES,
        )

    def probe_writable(self) -> None:
        """See `Storage.probe_writable`."""
        name = f"probe-{uuid.uuid4().hex}"
        self.write(name, [b"keepstep"])
        self.delete(name)

    def _request(self, what: str, start: Callable[[], Any], nbytes: int = 0) -> Any:
        try:
            return self._wait(start, nbytes)
        except (ValueError, OSError) as error:
            raise self._translate_error(what, error) from error

    def _wait(self, start: Callable[[], Any], nbytes: int) -> Any:
        """Start a request and return its result; start it again while there is none. All of them may be done twice.

        TensorStore tells nothing of a request's progress, so one that is slow looks like one that stalls. Nor can a transfer be broken
        off: it would go on beside the next one, unheard. So whichever is answered first counts.
        """
        limits_s = [
            self.request_timeout_s + nbytes / _SLOW_BYTES_PER_S * times
            for times in _TIMEOUT_FACTORS
        ]
        answered: queue.SimpleQueue[Any] = queue.SimpleQueue()
        futures: list[Any] = []
        failed = 0
        try:
            for limit_s in limits_s:
                futures.append(start())
                futures[-1].add_done_callback(answered.put)
                until_s = time.monotonic() + limit_s
                while True:
                    try:
                        first = answered.get(timeout=max(0.0, until_s - time.monotonic()))
                    except queue.Empty:
                        break
                    failed += first.exception() is not None
                    # One that was given up may yet fail while a later one is under way.
                    if first.exception() is None or failed == len(futures):
                        return first.result()
        finally:
            # It stops their retries at least.
            for future in futures:
                future.cancel()
        raise TimeoutError(f"{len(limits_s)} requests got no answer within {sum(limits_s):.0f} s")

    def _translate_error(self, what: str, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{self.url}: could not {what}: {_reason(error)}; check bucket, "
            "endpoint (AWS_ENDPOINT_URL), region (AWS_REGION) and credentials"
        )


def open_objects(url: str, specification: dict[str, Any]) -> ObjectStorage:
    """Open the key-value store that TensorStore's specification describes.

    Raises:
        CheckpointError: it cannot be opened.
    """
    context = _MEMORY
    if specification["driver"] == "s3":
        context = tensorstore.Context({"s3_request_retries": _RETRIES})
    if specification["driver"] == "gcs":
        context = tensorstore.Context({"gcs_request_retries": _RETRIES})
    try:
        return ObjectStorage(url, tensorstore.KvStore.open(specification, context=context).result())
    except (ValueError, OSError) as error:
        raise CheckpointError(
            f"{url}: cannot be opened: {_reason(error)}; check the URL"
        ) from error


def _range(prefix: str) -> Any:
    end = prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else ""
    return tensorstore.KvStore.KeyRange(prefix, end)


def _reason(error: Exception) -> str:
    """Return TensorStore's message without what only its authors can use."""
    return str(error).splitlines()[0].partition(" [")[0]
