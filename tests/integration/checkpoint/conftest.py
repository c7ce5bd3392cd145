"""Fixtures: an S3 server, and a bucket in it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import boto3
import pytest
from moto.server import ThreadedMotoServer

from tests.integration.checkpoint.recorded_s3 import Recorder


@pytest.fixture(scope="session")
def s3_server() -> Iterator[tuple[str, int]]:
    """Host and port of an S3 server."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    yield server.get_host_and_port()
    server.stop()


@pytest.fixture(scope="module")
def s3_endpoint(s3_server: tuple[str, int]) -> tuple[str, int]:
    """The address that tests use; a module with a proxy overrides this fixture."""
    return s3_server


@pytest.fixture(scope="module")
def s3(s3_endpoint: tuple[str, int]) -> Iterator[str]:
    """The URL of a new bucket, with the environment variables of AWS tools."""
    host, port = s3_endpoint
    bucket = uuid.uuid4().hex
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_REGION", "us-east-1")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        boto3.client("s3").create_bucket(Bucket=bucket)
        yield f"s3://{bucket}"


@pytest.fixture(scope="module")
def recorder() -> Iterator[Recorder]:
    """An S3 server's application that keeps the requests, for a module that serves it."""
    recorder = Recorder()
    yield recorder
    recorder.is_over.set()
