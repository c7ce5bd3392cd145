"""Commits a checkpoint that all ranks write: they report their parts to rank 0, which publishes it.

Blocking saves and those in the background commit in this way. Only rank 0 publishes, and it needs
all parts: a save in which a rank fails or dies is not committed.

In the background a rank sends heartbeats while it writes, `_HEARTBEATS` in the time for which
others wait. So a rank that is stopped, or whose host is gone, fails the save although its
connection stays open. Rank 0 answers them, and the answer names the rank that is lost. If rank 0 is
lost after it has all parts, the checkpoint may be committed or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch

from keepstep.checkpoint.errors import RankFailed
from keepstep.checkpoint.ranks.control_group import ControlGroup

_HEARTBEATS = 6
"""How many heartbeats a rank sends in the time for which others wait for one."""

_DONE, _GOES_ON, _FAILED, _LOST = range(4)
"""A rank's state. Rank 0 answers with the greatest of all, or with `_LOST` plus the lost rank."""

_TAG = 7


class PartWriter(Protocol):
    """Writes one rank's part. The functions go on with what they have begun when called again."""

    def write(self, limit_s: float | None) -> bool:
        """Write the part; return False if that goes on after the limit."""
        ...

    def report(self) -> bytes:
        """Return the encoded `PartReport` of the part, which is written."""
        ...

    def publish(self, reports: Sequence[memoryview], limit_s: float | None) -> bool:
        """Publish the checkpoint of these parts; return False if that goes on after the limit."""
        ...


def commit_together(
    writer: PartWriter, group: ControlGroup, peer_timeout_s: float | None = None
) -> None:
    """Write this rank's part, and commit the checkpoint; all ranks make the call.

    Args:
        writer: writes this rank's part.
        group: the ranks.
        peer_timeout_s: how long to wait for a heartbeat of a rank. None: ranks send none while
            they write, and one that ends raises torch's RuntimeError on the others.

    Raises:
        CheckpointError: a rank has no part, or rank 0 could not publish, as for `run_on_all_ranks`.
        RankFailed: a rank has ended or sends no heartbeat.
    """
    _wait_for_all(writer.write, group, peer_timeout_s, "nothing is committed")
    reports = group.all_to_all(lambda: {0: writer.report()})

    def publish(limit_s: float | None) -> bool:
        return group.rank != 0 or writer.publish(reports, limit_s)

    seen = "it may be committed: see `keepstep ckpt ls`"
    _wait_for_all(publish, group, peer_timeout_s, seen)


def _wait_for_all(
    act: Callable[[float | None], bool],
    group: ControlGroup,
    peer_timeout_s: float | None,
    result: str,
) -> None:
    """Call a function on each rank until it returns True on all; if it fails on one, all raise.

    Args:
        act: the function, with the time until the next heartbeat is due.
        group: the ranks.
        peer_timeout_s: as for `commit_together`.
        result: says in the error about a lost rank whether the checkpoint is committed.
    """
    limit_s = None if peer_timeout_s is None else peer_timeout_s / _HEARTBEATS
    state, error = _GOES_ON, None
    while True:
        if state == _GOES_ON:
            try:
                state = _DONE if act(limit_s) else _GOES_ON
            except Exception as caught:  # noqa: BLE001 - other ranks wait for this one
                state, error = _FAILED, caught
        answer = _answer(state, group, peer_timeout_s)
        if answer == _DONE:
            return
        if answer == _FAILED:
            group.run_on_all_ranks(partial(_raise, error))
        if answer >= _LOST:
            raise RankFailed(
                f"rank {group.global_ranks[answer - _LOST]} has ended, or sent no heartbeat for "
                f"{peer_timeout_s:g} s while the checkpoint was stored; {result}"
            )


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def _answer(state: int, group: ControlGroup, peer_timeout_s: float | None) -> int:
    """Report to rank 0 how this rank is, and return how all are."""
    if group.collectives is None:
        return state
    if group.rank == 0:
        return _answer_of_rank_0(state, group, peer_timeout_s)
    message = torch.tensor([state])
    try:
        group.collectives.send([message], 0, _TAG).wait()
        # Rank 0 may have waited for another one until its patience was at an end.
        _wait(group.collectives.recv([message], 0, _TAG), peer_timeout_s, times=2)
    except RuntimeError:
        if peer_timeout_s is None:
            raise
        return _LOST
    return int(message)


def _answer_of_rank_0(state: int, group: ControlGroup, peer_timeout_s: float | None) -> int:
    peers = range(1, group.size)
    states = [torch.tensor([state]), *(torch.empty(1, dtype=torch.int64) for _ in peers)]
    works: dict[int, Any] = {}
    peer = 0
    try:
        for peer in peers:
            works[peer] = group.collectives.recv([states[peer]], peer, _TAG)
        for peer in peers:
            _wait(works[peer], peer_timeout_s)
        answer = max(map(int, states))
    except RuntimeError:
        if peer_timeout_s is None:
            raise
        answer = _LOST + peer
    for receiver in peers:
        # One that is lost needs no answer.
        with suppress(RuntimeError):
            if answer != _LOST + receiver:
                group.collectives.send([torch.tensor([answer])], receiver, _TAG).wait()
    return answer


def _wait(work: Any, timeout_s: float | None, times: int = 1) -> None:
    """Wait for a message, for so long at most if there is a limit."""
    if timeout_s is None:
        work.wait()
    else:
        work.wait(timedelta(seconds=times * timeout_s))
