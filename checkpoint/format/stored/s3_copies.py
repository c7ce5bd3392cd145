"""Copies objects within S3, instead of sending bytes that S3 has already.

It relies on this: the ETag of an object that one request wrote is the MD5 of its bytes. In a bucket
that encrypts with keys of its own it is not; then nothing matches, and all bytes are sent. It
promises this: what it says is copied has the MD5, as S3 tells it, of the bytes asked for.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from keepstep.checkpoint.format.stored.links import Link
from keepstep.checkpoint.format.stored.s3_client import S3Location, open_client

log = logging.getLogger("keepstep")

_LEAST_NBYTES = 2**20
"""Smaller objects are sent: a request is needed in any case."""

_ANSWER_TIMEOUT_S = 20.0
"""Whoever waits for longer could have sent the bytes."""


@contextmanager
def copier(location: S3Location) -> Iterator[Link]:
    """Yield what copies an object that has exactly certain bytes; as `Storage.links` does.

    A copy is never needed, so whatever fails, the bytes are to be sent. No further request is made
    once one has failed before any has succeeded, as where objects may be written and not read, or
    where S3 does not tell their MD5; nor once there was no answer to one.

    Args:
        location: where the objects are.
    """
    opening = threading.Lock()
    clients: list[Any] = []
    has_copied, is_over = threading.Event(), threading.Event()

    with ExitStack() as stack:

        def client() -> Any:
            with opening:
                if not clients:
                    # Most parts have nothing to copy, and botocore takes long to load.
                    opened = open_client(
                        location, _ANSWER_TIMEOUT_S, anonymous=False, max_attempts=1
                    )
                    try:
                        clients.append(stack.enter_context(opened))
                    except ValueError as error:
                        # An endpoint that TensorStore takes and botocore does not.
                        raise OSError(str(error)) from error
                return clients[0]

        def copy(source: str, name: str, pieces: Sequence[bytes | memoryview]) -> bool:
            if (
                is_over.is_set()
                or sum(memoryview(piece).nbytes for piece in pieces) < _LEAST_NBYTES
            ):
                return False
            digest = hashlib.md5(usedforsecurity=False)
            for piece in pieces:
                digest.update(piece)
            try:
                is_copy = _copied(client(), location, source, name, digest.hexdigest())
            except OSError as error:
                log.debug("%s: nothing is copied within S3: %s", name, error)
                is_over.set()
                return False
            if is_copy:
                has_copied.set()
            elif not has_copied.is_set():
                is_over.set()
            return is_copy

        yield copy


def _copied(client: Any, location: S3Location, source: str, name: str, md5: str) -> bool:
    """Copy an object; return whether S3 says that the copy has this MD5.

    Raises:
        OSError: there is no answer.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        answer = client.copy_object(
            Bucket=location.bucket,
            Key=f"{location.prefix}{name}",
            CopySource={"Bucket": location.bucket, "Key": f"{location.prefix}{source}"},
            CopySourceIfMatch=f'"{md5}"',
        )
    except ClientError:
        return False
    except BotoCoreError as error:
        raise OSError(str(error)) from error
    # Not every service that has S3's interface heeds the condition, or answers alike.
    etag = answer.get("CopyObjectResult", {}).get("ETag", "")
    return bool(etag.strip('"') == md5)
