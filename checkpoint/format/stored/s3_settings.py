"""Finds S3's endpoint and region as AWS tools do: in the environment, else in the profile.

TensorStore reads neither from the files of AWS tools. Source: AWS SDKs and Tools Reference Guide,
"Service-specific endpoints".
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keepstep.checkpoint.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class S3Settings:
    """Where S3 is: the service's URL, and the region; None where nothing says it."""

    endpoint: str | None
    region: str | None


def s3_settings(environment: Mapping[str, str]) -> S3Settings:
    """Return the settings of a process with this environment.

    Raises:
        CheckpointError: the configuration file of AWS tools is malformed.
    """
    profile = _profile(environment)
    reads_profile = environment.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() != "true"
    return S3Settings(
        environment.get("AWS_ENDPOINT_URL_S3")
        or environment.get("AWS_ENDPOINT_URL")
        or (profile.endpoint if reads_profile else None),
        environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or profile.region,
    )


def _profile(environment: Mapping[str, str]) -> S3Settings:
    path = os.path.expanduser(environment.get("AWS_CONFIG_FILE") or "~/.aws/config")
    if not os.path.isfile(path):
        return S3Settings(None, None)
    # Loaded only where there is such a file.
    from botocore.configloader import load_config
    from botocore.exceptions import BotoCoreError

    name = environment.get("AWS_PROFILE") or environment.get("AWS_DEFAULT_PROFILE") or "default"
    try:
        config = load_config(path)
    except BotoCoreError as error:
        raise CheckpointError(f"{path} cannot be read: {error}; mend or remove it") from error
    profile: Mapping[str, Any] = config["profiles"].get(name, {})
    services = config.get("services", {}).get(profile.get("services"), {})
    s3 = services.get("s3") if isinstance(services.get("s3"), Mapping) else {}
    return S3Settings(s3.get("endpoint_url") or profile.get("endpoint_url"), profile.get("region"))
