"""Implements `keepstep monitor mute`, `acknowledge` and `unmute`."""

from __future__ import annotations

import asyncio
import getpass
from collections.abc import Mapping
from typing import Any

import click

from keepstep.monitor.cli.options import MUTE_TIME
from keepstep.monitor.errors import MonitorError
from keepstep.monitor.tree.monitor_client import MonitorClient, parse_object
from keepstep.monitor.watch.verdict_notes import NoteKind, NoteRequest

_TIMEOUT_S = 10.0
_MOST_NBYTES = 1 << 16
NOTE_KEYS = {"m": NoteKind.MUTED, "a": NoteKind.ACKNOWLEDGED, "u": None}
"""The keys of `keepstep top`, and what they note."""


def note_verdict(url: str, secret: bytes, number: int, request: NoteRequest) -> str:
    """Send a person's note on a verdict to the daemon at `url`; return the effect.

    Raises:
        MonitorError: no verdict of this number holds there, or the note is out of bounds.
        MonitorUnreachable: no daemon of this job answers there.
    """
    request = NoteRequest.decode(request.encode())

    async def send() -> str:
        client = MonitorClient(secret)
        try:
            await _check_number(client, url, number)
            return await send_note(client, url, number, request)
        finally:
            await client.close()

    return asyncio.run(send())


async def send_note(client: MonitorClient, url: str, number: int, request: NoteRequest) -> str:
    """Send a note on a verdict that holds or is muted; return the effect, for people.

    Raises as `note_verdict` does.
    """
    address = f"{url}/v1/verdicts/{number}/note"
    answer = await client.ask("POST", address, _TIMEOUT_S, _MOST_NBYTES, request.encode())
    note = parse_object(answer)["note"]
    if note is None:
        return f"verdict {number} is neither muted nor acknowledged any more"
    return f"verdict {number}, {note['whom']}: {note['syndrome']}, is {note['text']}"


async def ask_note(client: MonitorClient, url: str, kind: NoteKind | None) -> str:
    """Ask at the terminal for a note on a verdict, and send it; return the effect."""
    try:
        number = click.prompt(f"\nnumber of the verdict ({kind or 'unmute'})", type=int)
        reason = click.prompt("reason") if kind is not None else ""
        for_s = (
            click.prompt("for how long, such as 30m, 2h or 3d", type=MUTE_TIME)
            if kind is NoteKind.MUTED
            else 0.0
        )
        request = NoteRequest(kind, getpass.getuser(), reason, for_s)
        request = NoteRequest.decode(request.encode())
        await _check_number(client, url, number)
        return await send_note(client, url, number, request)
    except click.Abort:
        return "nothing was noted"
    except MonitorError as error:
        return str(error)


async def _check_number(client: MonitorClient, url: str, number: int) -> None:
    overview = await client.ask_object(f"{url}/v1/overview", _TIMEOUT_S)
    known = {note["number"]: f"{note['whom']}: {note['syndrome']}" for note in overview["notes"]}
    known |= {entry["number"]: _named(entry) for entry in holding(overview)}
    if not overview["diagnoses"]:
        raise MonitorError(f"the daemon at {url} only relays; ask the daemon above it")
    if number not in known:
        shown = "; ".join(f"{one} is {text}" for one, text in sorted(known.items()))
        raise MonitorError(f"no verdict {number} holds; {shown or 'no verdict holds at all'}")


def holding(overview: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the verdicts of an overview that hold."""
    return [entry for entry in overview["verdicts"] if entry["closed_at_s"] is None]


def _named(entry: Mapping[str, Any]) -> str:
    return f"{entry['subject']}: {entry['verdict']['syndrome']}"
