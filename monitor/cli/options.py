"""Validates options of the monitor's commands, where click's own types do not."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from keepstep.monitor.watch.verdict_notes import LONGEST_MUTE_S

if TYPE_CHECKING:
    from keepstep.monitor.views.webhook import WebhookAddress


@dataclass(frozen=True, slots=True)
class StepRange:
    """Steps from `first` to `last`, both included."""

    first: int
    last: int

    def __str__(self) -> str:
        if self.first == self.last:
            return f"step {self.first}"
        return f"steps {self.first} to {self.last}"


class Seconds(click.FloatRange):
    """A number of seconds between bounds; click's own range accepts NaN."""

    def convert(
        self, value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> float:
        """Return the number; click reports an error if it is not valid."""
        seconds: float = super().convert(value, parameter, context)
        if math.isnan(seconds):
            self.fail(f"{value!r} is no number.", parameter, context)
        return seconds


class Duration(click.FloatRange):
    """A time such as 90s, 30m, 2h or 3d, in seconds."""

    name = "time"

    def convert(
        self, value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> float:
        """Return the seconds; click reports an error if it is not valid."""
        match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]+)?)([smhd])", str(value))
        if match is None:
            self.fail(f"{value!r} is no time; write 90s, 30m, 2h or 3d.", parameter, context)
        seconds = float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]
        return float(super().convert(seconds, parameter, context))


MUTE_TIME = Duration(min=1, max=LONGEST_MUTE_S)


def named(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Return the name of a job or a node; click reports an error if it is empty."""
    if value is not None and not value.strip():
        raise click.BadParameter("a name is wanted, not an empty text.", context, parameter)
    return value


def monitor_url(
    context: click.Context, parameter: click.Parameter, value: str | Sequence[str] | None
) -> str | Sequence[str] | None:
    """Return URLs of daemons, one or several; click reports an error if one is not valid."""
    for url in (value,) if isinstance(value, str) else value or ():
        try:
            parts = urlsplit(url)
            is_http = parts.scheme in ("http", "https")
            is_valid = is_http and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_valid = False
        if not is_valid:
            raise click.BadParameter(
                f"{url!r} is not a daemon's address; it must be http://HOST:PORT.",
                context,
                parameter,
            )
    return value


def step_range(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> StepRange | None:
    """Return the steps that FIRST:LAST, or one number, means; click reports any other text."""
    if value is None:
        return None
    first, _, last = value.partition(":")
    numbers = (first, last or first)
    if not all(re.fullmatch(r"[0-9]{1,9}", number) for number in numbers) or value.endswith(":"):
        raise click.BadParameter(
            f"{value!r} means no steps; write 100:110 for 100 to 110, or 100 for one.",
            context,
            parameter,
        )
    steps = StepRange(int(numbers[0]), int(numbers[1]))
    if not 1 <= steps.first <= steps.last:
        raise click.BadParameter(
            f"{value!r} means no steps: they count from 1, and the last follows the first.",
            context,
            parameter,
        )
    return steps


def webhook_address(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> WebhookAddress | None:
    """Return where a URL posts to; click reports one that is not valid, without what it says."""
    from keepstep.monitor.views.webhook import WebhookAddress

    try:
        return None if value is None else WebhookAddress.parse(value)
    except ValueError as error:
        raise click.BadParameter(str(error), context, parameter) from None
