"""Asks a cloud's metadata service for its notices.

Each cloud is one or more sources, which are asked again and again, as often as its documentation
asks for. Its address is that of the cloud, or the one that the usual variable names.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import aiohttp

from keepstep.elastic.cloud.documents import (
    read_maintenance,
    read_maintenance_event,
    read_preempted,
    read_rebalance,
    read_scheduled_events,
    read_spot_action,
)
from keepstep.elastic.cloud.notice import Cloud, Notice

_LINK_LOCAL = "http://169.254.169.254"
_DMI = Path("/sys/class/dmi/id")
_AZURE_ASSET_TAG = "7783-7084-3265-9085-8269-3286-77"
"""The asset tag of every machine's chassis in Azure."""
_TOKEN_TTL_S = 21_600
_WAIT_S = 60
_ANSWER_S = 5.0
_FIRST_ANSWER_S = 150.0
"""Azure's service is switched on by the first request, which may take two minutes."""


class Source(Protocol):
    """One thing to ask for.

    Attributes:
        url: where.
        pause_s: how long to wait before it is asked again.
    """

    url: str
    pause_s: float

    async def read(self, session: aiohttp.ClientSession) -> tuple[Notice, ...]:
        """Return the notices that stand; some wait for a change first.

        Raises:
            aiohttp.ClientError, TimeoutError: there is no answer, or it is a refusal.
            ValueError: the answer has another form than documented.
        """
        ...


def find_cloud(dmi: Path = _DMI) -> Cloud | None:
    """Return the cloud that the firmware of this machine names; None: none of them."""
    names = {
        name: path.read_text(errors="replace").strip()
        for name in ("sys_vendor", "product_name", "chassis_asset_tag")
        if (path := dmi / name).is_file()
    }
    if names.get("sys_vendor") == "Amazon EC2":
        return Cloud.AWS
    if names.get("product_name") == "Google Compute Engine":
        return Cloud.GCP
    return Cloud.AZURE if names.get("chassis_asset_tag") == _AZURE_ASSET_TAG else None


def sources(cloud: Cloud, environment: Mapping[str, str]) -> tuple[Source, ...]:
    """Return what to ask a cloud for.

    Args:
        cloud: whose service.
        environment: may name another address of it.
    """
    match cloud:
        case Cloud.AWS:
            endpoint = environment.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or _LINK_LOCAL
            return (_Aws(endpoint.rstrip("/")),)
        case Cloud.GCP:
            host = environment.get("GCE_METADATA_HOST") or "metadata.google.internal"
            base = f"http://{host}/computeMetadata/v1/instance"
            return (
                _Gcp(f"{base}/preempted", read_preempted),
                _Gcp(f"{base}/maintenance-event", read_maintenance_event),
            )
        case Cloud.AZURE:
            endpoint = environment.get("KEEPSTEP_AZURE_METADATA_ENDPOINT") or _LINK_LOCAL
            return (_Azure(endpoint.rstrip("/")),)


class _Aws:
    """EC2's service, version 2: each request carries a token."""

    pause_s = 5.0

    def __init__(self, endpoint: str) -> None:
        self.url = f"{endpoint}/latest"
        self._token = ""

    async def read(self, session: aiohttp.ClientSession) -> tuple[Notice, ...]:
        maintenance = functools.partial(read_maintenance, now_s=time.time())
        return (
            *await self._read(session, "spot/instance-action", read_spot_action),
            *await self._read(session, "events/recommendations/rebalance", read_rebalance),
            *await self._read(session, "events/maintenance/scheduled", maintenance),
        )

    async def _read(
        self,
        session: aiohttp.ClientSession,
        category: str,
        parse: Callable[[str], tuple[Notice, ...]],
    ) -> tuple[Notice, ...]:
        text = await self._get(session, category)
        try:
            return parse(text) if text else ()
        except ValueError as error:
            # The other categories count nevertheless.
            what = f"something in {category} that keepstep does not know ({error})"
            return (Notice(identity=category, what=what, takes_machine=False),)

    async def _get(self, session: aiohttp.ClientSession, category: str) -> str:
        """Return a category's document; "": there is none."""
        url = f"{self.url}/meta-data/{category}"
        for _ in range(2):
            if not self._token:
                self._token = await self._new_token(session)
            headers = {"X-aws-ec2-metadata-token": self._token}
            async with session.get(url, headers=headers) as answer:
                if answer.status == 401:
                    self._token = ""
                    continue
                if answer.status == 404:
                    return ""
                answer.raise_for_status()
                return (await answer.text()).strip()
        raise ValueError("it refuses the token that it has just issued")

    async def _new_token(self, session: aiohttp.ClientSession) -> str:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_TTL_S)}
        async with session.put(f"{self.url}/api/token", headers=headers) as answer:
            answer.raise_for_status()
            return await answer.text()


class _Gcp:
    """One value of Google Cloud's service, which answers when it changes."""

    pause_s = 1.0

    def __init__(self, url: str, parse: Callable[[str], tuple[Notice, ...]]) -> None:
        self.url = url
        self._parse = parse
        self._etag = ""

    async def read(self, session: aiohttp.ClientSession) -> tuple[Notice, ...]:
        wait = {"wait_for_change": "true", "last_etag": self._etag, "timeout_sec": str(_WAIT_S)}
        async with session.get(
            self.url,
            params=wait if self._etag else {},
            headers={"Metadata-Flavor": "Google"},
            timeout=aiohttp.ClientTimeout(_ANSWER_S + _WAIT_S * bool(self._etag)),
        ) as answer:
            # Without one the next request must not wait either.
            self._etag = ""
            answer.raise_for_status()
            notices = self._parse(await answer.text())
            self._etag = answer.headers.get("ETag", "")
        return notices


class _Azure:
    """Azure's scheduled events; the document is that of all machines of a scale set."""

    pause_s = 1.0

    def __init__(self, endpoint: str) -> None:
        self.url = f"{endpoint}/metadata"
        self._machine = ""
        self._answer_s = _FIRST_ANSWER_S

    async def read(self, session: aiohttp.ClientSession) -> tuple[Notice, ...]:
        if not self._machine:
            place = "instance/compute/name?api-version=2021-02-01&format=text"
            self._machine = (await self._get(session, place, _ANSWER_S)).strip()
        text = await self._get(session, "scheduledevents?api-version=2020-07-01", self._answer_s)
        self._answer_s = _ANSWER_S
        return read_scheduled_events(text, self._machine)

    async def _get(self, session: aiohttp.ClientSession, place: str, answer_s: float) -> str:
        timeout = aiohttp.ClientTimeout(answer_s)
        headers = {"Metadata": "true"}
        url = f"{self.url}/{place}"
        async with session.get(url, headers=headers, timeout=timeout) as answer:
            answer.raise_for_status()
            return await answer.text()


def session() -> aiohttp.ClientSession:
    """Return a session for these requests: no proxy, and a limit for each answer."""
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(_ANSWER_S), trust_env=False)
