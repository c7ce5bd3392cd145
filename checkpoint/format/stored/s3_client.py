"""Connects to S3 by botocore, for requests that TensorStore cannot make.

Endpoint, region, credentials and trusted authorities are those of TensorStore's requests. botocore
is loaded only when a connection is opened.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# About 20 seconds in all for an endpoint that nothing answers at: the time to connect, and pauses
# of at most 1, 2, 4 and 8 seconds between attempts.
_ATTEMPTS = 5
_CONNECT_TIMEOUT_S = 3.0

PARALLEL_REQUESTS = 16
"""Requests that a client makes at a time, at most."""

# A configuration variable of botocore that neither files nor the environment set.
_NOWHERE = (None, None, None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Location:
    """Where objects are in S3.

    Attributes:
        bucket: the bucket.
        prefix: what the objects' keys begin with: empty, or with a slash at its end.
        endpoint: the URL of the service; None for that of AWS.
        region: the region; None for that of the bucket.
        has_keys: whether the environment has the credentials; then no profile matters.
    """

    bucket: str
    prefix: str
    endpoint: str | None
    region: str | None
    has_keys: bool


@contextmanager
def open_client(
    location: S3Location,
    request_timeout_s: float,
    *,
    anonymous: bool,
    max_attempts: int = _ATTEMPTS,
) -> Iterator[Any]:
    """Connect to S3 as TensorStore does. The client may be used by several threads.

    Args:
        location: where the objects are.
        request_timeout_s: how long to wait for an answer.
        anonymous: send no credentials.
        max_attempts: how many times a request is sent at most.
    """
    import botocore.session
    from botocore import UNSIGNED
    from botocore.config import Config

    config = Config(
        connect_timeout=_CONNECT_TIMEOUT_S,
        read_timeout=request_timeout_s,
        retries={"mode": "standard", "total_max_attempts": max_attempts},
        max_pool_connections=PARALLEL_REQUESTS,
        # TensorStore knows the environment's endpoint, not that of the files of AWS tools.
        ignore_configured_endpoint_urls=True,
        # TensorStore appends the bucket to an endpoint's path.
        s3=None if location.endpoint is None else {"addressing_style": "path"},
        signature_version=UNSIGNED if anonymous else None,
    )
    session = botocore.session.Session(
        session_vars={"profile": _NOWHERE} if location.has_keys else None
    )
    client = session.create_client(
        "s3",
        endpoint_url=location.endpoint,
        region_name=location.region,
        # TensorStore trusts the system's authorities, botocore those that it brings along.
        verify=os.environ.get("TENSORSTORE_CA_BUNDLE") or ssl.get_default_verify_paths().cafile,
        config=config,
    )
    try:
        yield client
    finally:
        client.close()
