"""What options of the monitor's commands must be, where click's own types do not say it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import click


class Seconds(click.FloatRange):
    """A number of seconds between bounds; click's own range lets through what is no number."""

    def convert(
        self, value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> float:
        """Return the number, or have click refuse it."""
        seconds: float = super().convert(value, parameter, context)
        if math.isnan(seconds):
            self.fail(f"{value!r} is no number.", parameter, context)
        return seconds


def named(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Return the name of a job or a node, or have click refuse it: any text but an empty one."""
    if value is not None and not value.strip():
        raise click.BadParameter("a name is wanted, not an empty text.", context, parameter)
    return value


def monitor_url(
    context: click.Context, parameter: click.Parameter, value: str | Sequence[str]
) -> str | Sequence[str]:
    """Return where other daemons listen, one or several, or have click refuse it."""
    for url in (value,) if isinstance(value, str) else value:
        try:
            parts = urlsplit(url)
            is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_one = False
        if not is_one:
            raise click.BadParameter(
                f"{url!r} is no daemon's address; it must be http://HOST:PORT.", context, parameter
            )
    return value
