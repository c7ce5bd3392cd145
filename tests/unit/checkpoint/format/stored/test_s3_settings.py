"""Claims about where S3's endpoint and region come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.checkpoint.errors import CheckpointError
from keepstep.checkpoint.format.stored.s3_settings import S3Settings, s3_settings

CONFIG = """
[default]
region = eu-west-1
endpoint_url = http://default:1
[profile minio]
endpoint_url = http://minio:2
services = mine
[profile plain]
endpoint_url = http://plain:3
[services mine]
s3 =
  endpoint_url = http://mine:4
"""


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, S3Settings("http://default:1", "eu-west-1")),
        ({"AWS_PROFILE": "minio"}, S3Settings("http://mine:4", None)),
        ({"AWS_PROFILE": "plain", "AWS_REGION": "r"}, S3Settings("http://plain:3", "r")),
        ({"AWS_PROFILE": "absent"}, S3Settings(None, None)),
        ({"AWS_ENDPOINT_URL": "http://e:5"}, S3Settings("http://e:5", "eu-west-1")),
        (
            {"AWS_ENDPOINT_URL": "http://e:5", "AWS_ENDPOINT_URL_S3": "http://s3:6"},
            S3Settings("http://s3:6", "eu-west-1"),
        ),
        ({"AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"}, S3Settings(None, "eu-west-1")),
    ],
)
def test_the_environment_comes_before_the_profile(
    tmp_path: Path, variables: dict[str, str], expected: S3Settings
) -> None:
    (tmp_path / "config").write_text(CONFIG)
    assert s3_settings({"AWS_CONFIG_FILE": f"{tmp_path}/config", **variables}) == expected


def test_without_a_file_the_environment_alone_counts(tmp_path: Path) -> None:
    assert s3_settings({"AWS_CONFIG_FILE": f"{tmp_path}/none"}) == S3Settings(None, None)


def test_a_malformed_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("[profile\nx")
    with pytest.raises(CheckpointError, match=f"{tmp_path}/config cannot be read: .*mend"):
        s3_settings({"AWS_CONFIG_FILE": f"{tmp_path}/config"})
