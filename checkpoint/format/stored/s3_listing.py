"""Finds directories in S3 by S3's own requests, without a listing of the objects in them.

TensorStore lists every object under a URL: its S3 driver sends neither a delimiter nor a name to
begin after. Of a job with ten thousand ranks one checkpoint has a million objects, a thousand
requests. Here a request returns up to a thousand directories, those after a name alone.

It relies on this: S3 returns names in the order of their bytes.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from keepstep.checkpoint.format.stored.s3_client import PARALLEL_REQUESTS, S3Location, open_client

# S3 returns no more names to a request than this.
_PAGE_SIZE = 1000


def directories_with(
    location: S3Location,
    leaf: str,
    after: str,
    request_timeout_s: float,
    page_size: int = _PAGE_SIZE,
) -> list[str]:
    """Return the top-level directories that have an object of this name, sorted.

    Args:
        location: where they are.
        leaf: the object.
        after: only directories whose names come after this one, in order of their bytes.
        request_timeout_s: a request without an answer for so many seconds is sent again.
        page_size: how many names a request may return.

    Raises:
        OSError: S3 refuses a request, or gives no answer.
        ValueError: the endpoint is no URL, or the bucket cannot have this name.
    """
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

    def find(*, anonymous: bool) -> list[str]:
        with open_client(location, request_timeout_s, anonymous=anonymous) as client:
            directories = _list(client, location, after, page_size)
            with ThreadPoolExecutor(PARALLEL_REQUESTS) as pool:
                has_leaf = pool.map(
                    lambda name: _exists(client, location, f"{name}/{leaf}"), directories
                )
                return [name for name, has in zip(directories, has_leaf, strict=True) if has]

    try:
        try:
            return find(anonymous=False)
        except NoCredentialsError:
            # As TensorStore does: a public bucket needs none.
            return find(anonymous=True)
    except (BotoCoreError, ClientError) as error:
        raise OSError(str(error)) from error


def _list(client: Any, location: S3Location, after: str, page_size: int) -> list[str]:
    """Return the names of the top-level directories after a name."""
    arguments: dict[str, Any] = {
        "Bucket": location.bucket,
        "Prefix": location.prefix,
        "Delimiter": "/",
        "MaxKeys": page_size,
    }
    if after:
        arguments["StartAfter"] = f"{location.prefix}{after}"
    directories: list[str] = []
    while True:
        page = client.list_objects_v2(**arguments)
        names = (
            common["Prefix"].removeprefix(location.prefix).removesuffix("/")
            for common in page.get("CommonPrefixes", ())
        )
        # Keys of the directory `after` come after its name; and not every service that has S3's
        # interface heeds where to begin.
        directories += (name for name in names if name > after)
        if not page.get("IsTruncated"):
            return sorted(directories)
        arguments["ContinuationToken"] = page["NextContinuationToken"]


def _exists(client: Any, location: S3Location, name: str) -> bool:
    from botocore.exceptions import ClientError

    try:
        client.head_object(Bucket=location.bucket, Key=f"{location.prefix}{name}")
    except ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] == 404:
            return False
        raise
    return True
