"""Claims about the errors of object stores, without one."""

import pytest
import tensorstore

from keepstep.checkpoint.errors import CheckpointError
from keepstep.checkpoint.format.stored.objects import ObjectStorage


class Unreachable:
    """A key-value store whose requests fail."""

    def read(self, name: str) -> tensorstore.Future[None]:
        promise, future = tensorstore.Promise[None].new()
        promise.set_exception(OSError("PERMISSION_DENIED: no [source.cc]"))
        return future


@pytest.mark.parametrize(
    ("url", "remedy", "foreign"),
    [
        ("s3://bucket/run7", "AWS_ENDPOINT_URL", "GOOGLE"),
        ("gs://bucket/run7", "GOOGLE_APPLICATION_CREDENTIALS", "AWS"),
    ],
)
def test_error_advises_the_settings_of_its_own_service(url: str, remedy: str, foreign: str) -> None:
    with pytest.raises(CheckpointError, match=f"read x: PERMISSION_DENIED: no; .*{remedy}") as seen:
        ObjectStorage(url, Unreachable()).read("x")
    assert foreign not in str(seen.value)
