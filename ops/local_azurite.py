"""Serves Azurite, Microsoft's server of Azure's blob interface, with one container in it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's own account, which is in its documentation."""
_VARIABLE = "AZURE_STORAGE_CONNECTION_STRING"
_OPTIONS = ("--inMemoryPersistence", "--skipApiVersionCheck", "--silent", "--disableTelemetry")


def not_installed() -> str | None:
    """Return why no container can be served here; None if one can."""
    if find_spec("adlfs") is None:
        return "adlfs is not installed: pip install '.[azure]'"
    if _program() is None:
        return "azurite is not installed: npm install --no-save azurite@3.37.0"
    return None


@contextmanager
def azurite(directory: Path, start_s: float = 60.0) -> Iterator[str]:
    """Serve a new container; yield its URL. adlfs finds it by this process's environment.

    Args:
        directory: where the server runs.
        start_s: seconds that it may take to start.
    """
    from azure.storage.blob import BlobServiceClient

    program = _program()
    assert program is not None, "azurite is not installed"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    connection = (
        f"DefaultEndpointsProtocol=http;AccountName={_ACCOUNT};AccountKey={_KEY};"
        f"BlobEndpoint=http://127.0.0.1:{port}/{_ACCOUNT};"
    )
    container, before = uuid.uuid4().hex, os.environ.get(_VARIABLE)
    command = [program, "--blobHost", "127.0.0.1", "--blobPort", str(port), *_OPTIONS]
    with subprocess.Popen(
        command, cwd=directory, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            _wait(server, port, start_s)
            os.environ[_VARIABLE] = connection
            with BlobServiceClient.from_connection_string(connection) as client:
                client.create_container(container)
            yield f"az://{container}"
        finally:
            os.environ.pop(_VARIABLE, None)
            if before is not None:
                os.environ[_VARIABLE] = before
            server.kill()


def _program() -> str | None:
    own = shutil.which("azurite-blob", path=str(_ROOT / "node_modules/.bin"))
    return own or shutil.which("azurite-blob")


def _wait(server: subprocess.Popen[bytes], port: int, start_s: float) -> None:
    until_s = time.monotonic() + start_s
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        if server.poll() is not None or time.monotonic() > until_s:
            raise RuntimeError(f"azurite does not serve at port {port}")
        time.sleep(0.05)
