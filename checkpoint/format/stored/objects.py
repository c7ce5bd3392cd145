"""Checkpoints in object stores, by TensorStore's drivers.

In S3 directories are found without TensorStore.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import tensorstore

from keepstep.checkpoint.errors import CheckpointError, CheckpointMissing
from keepstep.checkpoint.format.stored import s3_listing
from keepstep.checkpoint.format.stored.remote import RemoteStorage, scatter
from keepstep.checkpoint.format.stored.s3_listing import S3Location

# About 20 seconds in all. The default of 32 retries would make a wrong endpoint look like a hang.
_RETRIES = {"max_retries": 6, "initial_delay": "250ms", "max_delay": "5s"}

# A request without an answer for this long, plus the time that its bytes take on a slow connection,
# is sent again.
_REQUEST_TIMEOUT_S = 60.0
# For each request: a rank's concurrent requests, and those of all ranks, share a connection.
_SLOW_BYTES_PER_S = 2**18
# How many times slower the connection may be, by attempt. So a dead connection is detected after
# minutes, yet a connection on which 64 MiB take half an hour does not fail a save, though repeated
# requests use part of it.
_TIMEOUT_FACTORS = (1, 4, 16)
# Metadata may claim objects of any size.
_LONGEST_WAIT_S = 86400.0
# Requests that find out an object's size, at a time; and a size that no object store allows.
_PARALLEL_PROBES = 16
_LARGEST_NBYTES = 2**50
# An operation that is many requests is given as much time as a request of so many bytes.
_MANY_NBYTES = 2**26

_SETTINGS = {
    "s3": "bucket, endpoint (AWS_ENDPOINT_URL), region (AWS_REGION), AWS_PROFILE and credentials",
    "gs": "bucket and credentials (GOOGLE_APPLICATION_CREDENTIALS)",
    "memory": "the URL",
}
"""Hints for failed requests, by scheme."""

_MEMORY = tensorstore.Context()
"""This process's memory: all storages of one memory:// URL have the same objects."""


@dataclass(frozen=True, slots=True)
class ObjectStorage(RemoteStorage):
    """A `Storage` over a TensorStore key-value store.

    A request without an answer for `request_timeout_s` seconds, longer if it carries many bytes, is
    sent again; the first answer counts.

    Attributes:
        url: the URL.
        store: TensorStore's key-value store.
        request_timeout_s: see above.
        s3: where the objects are in S3; None in other stores.
        context: TensorStore's resources, for stores over this one.
    """

    url: str
    store: Any
    request_timeout_s: float = _REQUEST_TIMEOUT_S
    s3: S3Location | None = None
    context: Any = None

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
            result = self.wait(
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
        return scatter(data, buffers)

    def write(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        """See `Storage.write`."""
        data = b"".join(pieces)
        self._request(f"write {name}", lambda: self.store.write(name, data), len(data))

    def create(self, name: str, data: bytes) -> None:
        """See `Storage.create`."""
        current = self._request(f"read {name}", lambda: self.store.read(name), len(data))
        if current.state != "value":
            # The stamp of an absent object, as a condition, requires that it is still absent. An
            # empty stamp would be no condition.
            absent = current.stamp.generation
            written = self._request(
                f"create {name}", lambda: self.store.write(name, data, if_equal=absent), len(data)
            )
            if written.generation:
                return
        self.check_created(name, data)

    def exists(self, name: str) -> bool:
        """See `Storage.exists`."""
        return bool(self._request(f"read {name}", lambda: self.store.read(name)).state == "value")

    def size(self, name: str) -> int:
        """See `Storage.size`.

        TensorStore does not tell it. So bytes at several places are asked for at a time, until the
        last one is found: of a terabyte in about eleven rounds.
        """
        if not self._has_byte(name, 0):
            return 0
        # The object has byte `last`, and does not have byte `beyond`.
        last, beyond = 0, _LARGEST_NBYTES
        with ThreadPoolExecutor(_PARALLEL_PROBES) as pool:
            while beyond - last > 1:
                places = _probes(last, beyond)
                for place, is_there in zip(
                    places, pool.map(lambda at: self._has_byte(name, at), places), strict=True
                ):
                    if is_there:
                        last = place
                    else:
                        beyond = place
                        break
        return last + 1

    def _has_byte(self, name: str, offset: int) -> bool:
        """Return whether an object has a byte at this place.

        Raises:
            CheckpointMissing: there is no such object.
        """
        return self.read_into(name, [memoryview(bytearray(1))], offset) == 1

    def names(self, prefix: str = "") -> Sequence[str]:
        """See `Storage.names`."""
        listed = self._request("list", lambda: self.store.list(_range(prefix)), _MANY_NBYTES)
        return sorted(name.decode() for name in listed)

    def directories_with(self, leaf: str, after: str = "") -> Sequence[str]:
        """See `Storage.directories_with`."""
        if self.s3 is not None:
            try:
                return s3_listing.directories_with(self.s3, leaf, after, self.request_timeout_s)
            except (ValueError, OSError) as error:
                raise self._translate_error("list", error) from error
        # Objects of a directory sort before what has its name and a character after "/".
        keys = tensorstore.KvStore.KeyRange(f"{after}0" if after else "", "")
        listed = self._request("list", lambda: self.store.list(keys), _MANY_NBYTES)
        split = (name.decode().partition("/") for name in sorted(listed))
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

    def _request(self, operation: str, start: Callable[[], Any], nbytes: int = 0) -> Any:
        try:
            return self.wait(start, nbytes)
        except (ValueError, OSError) as error:
            raise self._translate_error(operation, error) from error

    def wait(self, start: Callable[[], Any], nbytes: int) -> Any:
        """Start a request and return its result; start it again if there is none in time.

        Requests must be idempotent. TensorStore does not report a request's progress, so a slow
        request looks like a stalled one. Nor can a transfer be aborted: it continues during
        the next one. So the first answer of any of them counts.

        Args:
            start: starts the request and returns its future.
            nbytes: how many bytes the request carries.
        """
        limits_s = [
            min(_LONGEST_WAIT_S, self.request_timeout_s + nbytes / _SLOW_BYTES_PER_S * factor)
            for factor in _TIMEOUT_FACTORS
        ]
        finished: queue.SimpleQueue[Any] = queue.SimpleQueue()
        futures: list[Any] = []
        failures = 0
        try:
            for limit_s in limits_s:
                futures.append(start())
                futures[-1].add_done_callback(finished.put)
                deadline_s = time.monotonic() + limit_s
                while True:
                    try:
                        future = finished.get(timeout=max(0.0, deadline_s - time.monotonic()))
                    except queue.Empty:
                        break
                    failures += future.exception() is not None
                    # An earlier request may fail while a later one is still in progress.
                    if future.exception() is None or failures == len(futures):
                        return future.result()
        finally:
            # Cancelling stops at least their retries.
            for future in futures:
                future.cancel()
        raise TimeoutError(f"{len(limits_s)} requests got no answer within {sum(limits_s):.0f} s")

    def _translate_error(self, operation: str, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{self.url}: could not {operation}: {reason_of(error)}; check "
            f"{_SETTINGS[self.url.partition('://')[0]]}"
        )


def open_objects(url: str, specification: dict[str, Any]) -> ObjectStorage:
    """Open the key-value store that TensorStore's specification describes.

    Raises:
        CheckpointError: the store cannot be opened.
    """
    context = _MEMORY
    s3 = None
    if specification["driver"] == "s3":
        s3 = S3Location(
            bucket=specification["bucket"],
            prefix=specification["path"],
            endpoint=specification.get("endpoint"),
            region=specification.get("aws_region"),
            has_keys=specification.get("aws_credentials") == {"type": "environment"},
        )
        # Stores over this one have its context, and need the credentials, too.
        shared = {
            name: specification[name] for name in ("aws_credentials",) if name in specification
        }
        context = tensorstore.Context({"s3_request_retries": _RETRIES, **shared})
    if specification["driver"] == "gcs":
        context = tensorstore.Context({"gcs_request_retries": _RETRIES})
    try:
        store = tensorstore.KvStore.open(specification, context=context).result()
    except (ValueError, OSError) as error:
        raise CheckpointError(
            f"{url}: cannot be opened: {reason_of(error)}; check the URL"
        ) from error
    return ObjectStorage(url, store, s3=s3, context=context)


def _probes(last: int, beyond: int) -> list[int]:
    """Return places between two, in order, to look for the end of an object at.

    While nothing is known they double, for most objects are small; then they are evenly spaced.
    """
    if last == 0 and beyond == _LARGEST_NBYTES:
        return [2**exponent for exponent in range(4, 50, 2)]
    inside = beyond - last - 1
    count = min(_PARALLEL_PROBES, inside)
    return sorted({last + 1 + inside * n // count for n in range(count)})


def _range(prefix: str) -> Any:
    end = prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else ""
    return tensorstore.KvStore.KeyRange(prefix, end)


def reason_of(error: Exception) -> str:
    """Return TensorStore's message without its source locations."""
    return str(error).partition("\n")[0].partition(" [")[0]
