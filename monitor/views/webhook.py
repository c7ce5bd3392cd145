"""Encodes verdicts for a webhook: as JSON for programs, or in the form that Slack shows. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

_SLACK_PREFIX = "slack+"
_SLACK_HOST = "hooks.slack.com"


@dataclass(frozen=True, slots=True)
class WebhookAddress:
    """Where verdicts are posted to.

    Args:
        url: may contain a secret, so it is neither printed nor logged.
        place: its scheme and host, for people.
        is_slack: whether Slack's form is wanted; Mattermost and Rocket.Chat take it, too.
    """

    url: str = field(repr=False)
    place: str
    is_slack: bool

    @classmethod
    def parse(cls, text: str) -> WebhookAddress:
        """Return the address that a URL means.

        Raises:
            ValueError: it is none; the message does not contain it.
        """
        url = text.removeprefix(_SLACK_PREFIX)
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise ValueError("the webhook's address is no URL; write https://HOST/PATH") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise ValueError("the webhook's address must be https://HOST/PATH")
        place = f"{parts.scheme}://{parts.hostname}" + (f":{port}" if port else "")
        return cls(url, place, url != text or parts.hostname == _SLACK_HOST)


def webhook_content(event: Mapping[str, Any], *, is_slack: bool) -> dict[str, Any]:
    """Return what is posted about an event, which has the form of the event file's lines."""
    if not is_slack:
        return dict(event)
    text = f"{event['resource']['keepstep.job']}: {event['body']}"
    if event["severity_text"] != "INFO":
        text += f"\nwhat to do: {event['attributes']['keepstep.verdict.to_do']}"
    # Slack's three control characters.
    for character, escaped in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(character, escaped)
    return {"text": text}
