"""Finds directories in S3 by S3's own requests, without a listing of the objects in them.

TensorStore lists every object under a URL: its S3 driver sends neither a delimiter nor a name to
begin after. Of a job with ten thousand ranks one checkpoint has a million objects, a thousand
requests. Here a request returns up to a thousand directories, those after a name alone.

It relies on this: S3 returns names in the order of their bytes. It promises this: endpoint, region,
credentials and trusted authorities are those of TensorStore's requests, and s3fs is loaded only
when a listing is made.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

# About 20 seconds in all for an endpoint that nothing answers at: the time to connect, and pauses
# of at most 1, 2, 4 and 8 seconds between attempts.
_ATTEMPTS = 5
_CONNECT_TIMEOUT_S = 3.0

# S3 returns no more names to a request than this.
_PAGE_SIZE = 1000
# Requests that find out whether objects exist, at a time.
_PARALLEL_REQUESTS = 16


@dataclass(frozen=True, slots=True)
class S3Location:
    """Where objects are in S3.

    Attributes:
        bucket: the bucket.
        prefix: what the objects' keys begin with: empty, or with a slash at its end.
        endpoint: the URL of the service; None for that of AWS.
        region: the region; None for that of the bucket.
    """

    bucket: str
    prefix: str
    endpoint: str | None
    region: str | None


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
    # The caller's thread may run an event loop of its own. One that ends leaves neither threads nor
    # connections to processes that are forked later.
    with ThreadPoolExecutor(1, thread_name_prefix="keepstep-s3-listing") as thread:
        return thread.submit(
            lambda: asyncio.run(
                _directories_with(location, leaf, after, request_timeout_s, page_size)
            )
        ).result()


async def _directories_with(
    location: S3Location, leaf: str, after: str, request_timeout_s: float, page_size: int
) -> list[str]:
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

    async def find(anonymous: bool) -> list[str]:
        async with _open_client(location, request_timeout_s, anonymous) as client:
            directories = await _list(client, location, after, page_size)
            return await _keep_with(client, location, directories, leaf)

    try:
        try:
            return await find(anonymous=False)
        except NoCredentialsError:
            # As TensorStore does: a public bucket needs none.
            return await find(anonymous=True)
    except (BotoCoreError, ClientError) as error:
        raise OSError(str(error)) from error


@asynccontextmanager
async def _open_client(
    location: S3Location, request_timeout_s: float, anonymous: bool
) -> AsyncIterator[Any]:
    """Connect to S3 as TensorStore does, by a client of its own without caches."""
    import s3fs

    config: dict[str, Any] = {
        "connect_timeout": _CONNECT_TIMEOUT_S,
        "read_timeout": request_timeout_s,
        "retries": {"mode": "standard", "total_max_attempts": _ATTEMPTS},
        "max_pool_connections": _PARALLEL_REQUESTS,
        # TensorStore knows the environment's endpoint, not that of the files of AWS tools.
        "ignore_configured_endpoint_urls": True,
    }
    if location.endpoint is not None:
        # TensorStore appends the bucket to an endpoint's path.
        config["s3"] = {"addressing_style": "path"}
    system = s3fs.S3FileSystem(
        anon=anonymous,
        asynchronous=True,
        skip_instance_cache=True,
        use_listings_cache=False,
        endpoint_url=location.endpoint,
        # Otherwise fsspec's own configuration would give them.
        key=None,
        secret=None,
        token=None,
        client_kwargs={
            "region_name": location.region,
            # TensorStore trusts the system's authorities, botocore those that it brings along.
            "verify": os.environ.get("TENSORSTORE_CA_BUNDLE")
            or ssl.get_default_verify_paths().cafile,
        },
        config_kwargs=config,
    )
    # Requests go to the client itself: s3fs would repeat what botocore has repeated already.
    client = await system.set_session()
    try:
        yield client
    finally:
        await client.close()


async def _list(client: Any, location: S3Location, after: str, page_size: int) -> list[str]:
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
        page = await client.list_objects_v2(**arguments)
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


async def _keep_with(
    client: Any, location: S3Location, directories: list[str], leaf: str
) -> list[str]:
    """Return those of the directories that have an object of this name."""
    from botocore.exceptions import ClientError

    turns = asyncio.Semaphore(_PARALLEL_REQUESTS)

    async def has_leaf(directory: str) -> bool:
        key = f"{location.prefix}{directory}/{leaf}"
        async with turns:
            try:
                await client.head_object(Bucket=location.bucket, Key=key)
            except ClientError as error:
                if error.response["ResponseMetadata"]["HTTPStatusCode"] == 404:
                    return False
                raise
        return True

    answers = await asyncio.gather(*map(has_leaf, directories))
    return [name for name, is_there in zip(directories, answers, strict=True) if is_there]
