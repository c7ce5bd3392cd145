"""Copies objects within S3, instead of sending bytes that S3 has already.

It relies on this: the ETag of an object that one request wrote is the MD5 of its bytes. In a bucket
that encrypts with keys of its own it is not; then nothing matches, and all bytes are sent. It
promises this: what it says is copied has the MD5, as S3 tells it, of the bytes asked for.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from keepstep.checkpoint.stored.links import Link
from keepstep.checkpoint.stored.s3_client import S3Location, open_client

_LEAST_NBYTES = 2**20
"""Smaller objects are sent in about the time that the request for a copy takes."""

# The source was deleted, or has other bytes: another source may still match.
_NO_SUCH_SOURCE = (404, 412)


@contextmanager
def copier(location: S3Location, request_timeout_s: float) -> Iterator[Link]:
    """Yield what copies an object that has exactly certain bytes; as `Storage.links` does.

    After a request that S3 refuses, as where objects may be written and not read, it makes no
    further ones.

    Args:
        location: where the objects are.
        request_timeout_s: a request without an answer for so many seconds is sent again.
    """
    opening = threading.Lock()
    clients: list[Any] = []
    is_refused = threading.Event()

    with ExitStack() as stack:

        def client() -> Any:
            with opening:
                if not clients:
                    opened = open_client(location, request_timeout_s, anonymous=False)
                    clients.append(stack.enter_context(opened))
                return clients[0]

        def copy(source: str, name: str, pieces: Sequence[bytes | memoryview]) -> bool:
            if is_refused.is_set() or sum(map(_nbytes, pieces)) < _LEAST_NBYTES:
                return False
            # Most parts have nothing to copy, and botocore takes long to load.
            from botocore.exceptions import BotoCoreError, ClientError

            digest = hashlib.md5(usedforsecurity=False)
            for piece in pieces:
                digest.update(piece)
            expected = f'"{digest.hexdigest()}"'
            try:
                answer = client().copy_object(
                    Bucket=location.bucket,
                    Key=f"{location.prefix}{name}",
                    CopySource={"Bucket": location.bucket, "Key": f"{location.prefix}{source}"},
                    CopySourceIfMatch=expected,
                )
            except ClientError as error:
                if error.response["ResponseMetadata"]["HTTPStatusCode"] not in _NO_SUCH_SOURCE:
                    is_refused.set()
                return False
            except BotoCoreError:
                is_refused.set()
                return False
            # Not every service that has S3's interface heeds the condition.
            return bool(answer["CopyObjectResult"]["ETag"] == expected)

        yield copy


def _nbytes(piece: bytes | memoryview) -> int:
    return memoryview(piece).nbytes
