"""What the ranks that load or save together do alike: one fails, all fail; one falls back, all do.

Every rank must make the same calls in the same order, as for `checkpoint.ranks.collective`.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import numpy as np
import torch

from keepstep.checkpoint.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMissing,
    CheckpointTooNew,
    FormatUnsupported,
    LayoutMismatch,
    RankFailed,
)
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.stored.object_names import StoredStep
from keepstep.checkpoint.format.stored.steps import list_steps
from keepstep.checkpoint.ranks.collective import (
    ByteExchange,
    all_gather_json,
    are_so_on_any_rank,
    broadcast_bytes,
    broadcast_head,
    exchange_beside_json,
    exchange_heads,
    on_group_device,
    rank,
    world_size,
)

log = logging.getLogger("keepstep")

Result = TypeVar("Result")

_LENGTH_NBYTES = 8

_ERRORS = {
    error.__name__: error
    for error in (
        CheckpointDamaged,
        CheckpointMissing,
        CheckpointTooNew,
        FormatUnsupported,
        LayoutMismatch,
    )
}
"""Errors that concern all ranks, wherever they were found."""


@dataclass(frozen=True, slots=True, eq=False)
class _Outcome(Generic[Result]):
    """What a function has returned or raised on this rank."""

    result: Result | None
    error: Exception | None

    @classmethod
    def of(cls, act: Callable[[], Result]) -> _Outcome[Result]:
        try:
            return cls(act(), None)
        except Exception as error:  # noqa: BLE001 - other ranks wait for this one's outcome
            return cls(None, error)

    def get(self) -> Result:
        if self.error is not None:
            raise self.error
        return cast(Result, self.result)


@dataclass(frozen=True, slots=True)
class Loaded(Generic[Result]):
    """What was loaded: from which checkpoint, and which newer ones are damaged."""

    stored: StoredStep
    result: Result
    damaged: tuple[StoredStep, ...]


def agreed_steps(url: str) -> tuple[StoredStep, ...]:
    """Return the committed checkpoints at a URL, newest first, as rank 0 sees them.

    So all ranks load the same one even if a new one appears now.
    """
    steps = on_all_ranks(lambda: list_steps(url) if rank() == 0 else ())
    listed = all_gather_json([[stored.step, stored.generation] for stored in steps])[0]
    return tuple(StoredStep(step, generation) for step, generation in listed)


def older_steps(url: str, than: StoredStep) -> Iterator[StoredStep]:
    """Yield the committed checkpoints before this one, newest first, as rank 0 sees them.

    They are listed when the first one is asked for: the list grows with what is stored. All ranks
    must ask for as many.
    """
    yield from (
        stored
        for stored in agreed_steps(url)
        if (stored.step, stored.generation) < (than.step, than.generation)
    )


def load_newest_intact(
    url: str, steps: Iterable[StoredStep], load: Callable[[StoredStep], Result]
) -> Loaded[Result]:
    """Load the first of these checkpoints that no rank finds damaged.

    Args:
        url: the URL that has them.
        steps: the checkpoints to try, in this order.
        load: loads one; it raises CheckpointDamaged on all ranks or on none, as what is wrapped in
            `on_all_ranks` does.

    Raises:
        CheckpointDamaged: all of them are damaged; the message names the reason of each.
        CheckpointError: whatever else `load` raises.
    """
    damaged: list[StoredStep] = []
    reasons: list[str] = []
    for stored in steps:
        if reasons and rank() == 0:
            log.warning("%s: loading the checkpoint before it", reasons[-1])
        try:
            return Loaded(stored, load(stored), tuple(damaged))
        except CheckpointDamaged as error:
            damaged.append(stored)
            reasons.append(f"step {stored.step}: {error}")
    raise CheckpointDamaged(
        f"{url}: none of {len(damaged)} checkpoints is intact; " + "; ".join(reasons)
    )


def on_all_ranks(act: Callable[[], Result]) -> Result:
    """Run a function on every rank; if it fails on any rank, all ranks raise, for the same reason.

    Raises as `on_all_ranks_gathering` does.
    """
    return on_all_ranks_telling(act, lambda _: False)[0]


def on_all_ranks_telling(
    act: Callable[[], Result], tell: Callable[[Result], bool]
) -> tuple[Result, bool]:
    """Run a function as `on_all_ranks` does, and tell whether something is so on any rank.

    Returns:
        This rank's result, and whether `tell` is true of any rank's.
    """
    outcome = _Outcome.of(lambda: (result := act(), tell(result)))
    # Two numbers while nothing fails: only failures have reasons to gather.
    is_so = outcome.error is None and outcome.get()[1]
    has_failed, is_so_on_any = are_so_on_any_rank([outcome.error is not None, is_so])
    if has_failed:
        _on_all_ranks_for(outcome)
    return outcome.get()[0], is_so_on_any


@contextmanager
def preparing(what: str) -> Iterator[None]:
    """Raise CheckpointError if what prepares for a message fails, mostly for want of memory.

    For memory of the CPU PyTorch has no error of its own: it raises RuntimeError, as for a device
    that has failed.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        raise CheckpointError(f"could not prepare {what}: {error or 'no memory'}") from error


def from_rank_0(read: Callable[[], Sequence[bytes]]) -> list[memoryview]:
    """Return on all ranks what a function returns on rank 0, where alone it is called.

    What is done with it may fail on one rank: that belongs into `on_all_ranks`. Short results take
    one collective.

    Raises:
        CheckpointError: it failed there, or a rank has no memory for it. What is wrong with the
            checkpoint has the same class on all ranks.
    """
    own = _Outcome.of(lambda: _framed(None, read() if rank() == 0 else ()))
    message = own.get() if own.error is None else _framed(own.error, ())
    nbytes, head = broadcast_head(message)

    def prepare() -> tuple[torch.Tensor, torch.Tensor]:
        with preparing("for a message of rank 0"):
            whole = (
                torch.from_numpy(np.frombuffer(message, np.uint8).copy())
                if rank() == 0
                else torch.empty(nbytes, dtype=torch.uint8)
            )
            return whole, on_group_device(whole[len(head) :])

    received = head
    if len(head) < nbytes:
        whole, on_device = on_all_ranks(prepare)
        broadcast_bytes(whole[len(head) :], on_device)
        received = whole.numpy().data
        received[: len(head)] = head
    begin = _LENGTH_NBYTES + int.from_bytes(received[:_LENGTH_NBYTES], "little")
    failure, sizes = json.loads(bytes(received[_LENGTH_NBYTES:begin]))
    if failure is not None:
        if own.error is not None:
            raise own.error
        kind, text = failure
        raise _ERRORS[kind](text) if kind in _ERRORS else RankFailed(f"rank 0: {text}")
    ends = itertools.accumulate(sizes, initial=begin)
    return [received[start : start + n] for start, n in zip(ends, sizes, strict=False)]


def _framed(error: Exception | None, contents: Sequence[bytes]) -> bytes:
    """Return the message of `from_rank_0`: an index, which has the error, and the contents."""
    told = None if error is None else [type(error).__name__, str(error)]
    index = json.dumps([told, [len(data) for data in contents]]).encode()
    return b"".join([len(index).to_bytes(_LENGTH_NBYTES, "little"), index, *contents])


def exchange(messages: Callable[[], Sequence[bytes]]) -> list[memoryview]:
    """Send message i to rank i, and return the messages that all ranks sent to this one.

    What is done with them may fail on one rank: that belongs into `on_all_ranks`. Short messages
    take one collective.

    Args:
        messages: returns this rank's messages.

    Raises:
        CheckpointError: a rank could not make its messages, or has no memory for those to it; all
            ranks raise as `on_all_ranks_gathering` does.
    """
    own = _Outcome.of(messages)
    none = [b""] * world_size()
    outgoing = none if own.error is not None else own.get()
    heads = exchange_heads(outgoing, has_failed=own.error is not None)
    if heads.has_failed:
        _on_all_ranks_for(own)
    if heads.contents is not None:
        return heads.contents
    received_nbytes = heads.nbytes
    byte_exchange = ByteExchange()

    def prepare() -> tuple[torch.Tensor, torch.Tensor]:
        with preparing("messages between ranks"):
            sent = torch.from_numpy(np.frombuffer(b"".join(outgoing), np.uint8).copy())
            received = torch.empty(sum(received_nbytes), dtype=torch.uint8)
            byte_exchange.reserve(sent_nbytes=sent.numel(), received_nbytes=received.numel())
        return sent, received

    sent, received = on_all_ranks(prepare)
    byte_exchange.run(sent, [len(data) for data in outgoing], received, received_nbytes)
    ends = itertools.accumulate(received_nbytes)
    content = received.numpy().data
    return [content[end - nbytes : end] for end, nbytes in zip(ends, received_nbytes, strict=True)]


def on_all_ranks_gathering(
    act: Callable[[], Result], share: Callable[[Result], Json]
) -> tuple[Result, list[Json]]:
    """Run a function on every rank, and gather what `share` returns for each rank's result.

    Args:
        act: the function to run.
        share: returns the part of the result that every rank gets.

    Returns:
        This rank's result, and what all ranks share, in the order of ranks.

    Raises:
        CheckpointDamaged: the function failed because of damage on some ranks, and did not fail
            otherwise on any. So all ranks decide alike whether to fall back.
        RankFailed: the function failed on another rank; its message is that of the first such
            rank. A rank that failed in this way itself raises its own error.
    """
    own = _Outcome.of(lambda: (result := act(), share(result)))
    outcomes = all_gather_json(_told(own))
    _raise_if_any_failed(own.error, outcomes)
    return own.get()[0], [outcome["shared"] for outcome in outcomes]


def on_all_ranks_exchanging(
    act: Callable[[], Result],
    share: Callable[[Result], Json],
    send: Callable[[Result], Sequence[memoryview]],
) -> tuple[Result, list[Json], list[memoryview]]:
    """Do as `on_all_ranks_gathering`, and send a few bytes to each rank beside what is shared.

    Args:
        act: the function to run.
        share: returns the part of the result that every rank gets.
        send: returns the contents for each rank, as for `exchange_beside_json`.

    Returns:
        This rank's result, what all ranks share, and what each has sent to this one.

    Raises:
        CheckpointError: as `on_all_ranks_gathering` does.
    """
    own = _Outcome.of(lambda: (result := act(), share(result), send(result)))
    contents = own.get()[2] if own.error is None else ()
    outcomes, received = exchange_beside_json(_told(own), contents)
    _raise_if_any_failed(own.error, outcomes)
    return own.get()[0], [outcome["shared"] for outcome in outcomes], received


def _told(own: _Outcome[tuple[Any, ...]]) -> dict[str, Json]:
    """Return what a rank tells the others: what it shares, or its failure."""
    if own.error is None:
        return {"shared": own.get()[1]}
    return {"error": str(own.error), "damaged": isinstance(own.error, CheckpointDamaged)}


def _raise_if_any_failed(own_error: Exception | None, outcomes: Sequence[Json]) -> None:
    failures = {failed: outcome for failed, outcome in enumerate(outcomes) if "error" in outcome}
    if not failures:
        return
    is_damage = all(failure["damaged"] for failure in failures.values())
    if own_error is not None and isinstance(own_error, CheckpointDamaged) == is_damage:
        raise own_error
    failed_rank, failure = next(
        (failed, failure) for failed, failure in failures.items() if failure["damaged"] == is_damage
    )
    raise (CheckpointDamaged if is_damage else RankFailed)(
        f"rank {failed_rank}: {failure['error']}"
    ) from own_error


def _on_all_ranks_for(outcome: _Outcome[Result]) -> Result:
    """Raise on all ranks: on one of them at least, the outcome is an error."""
    return on_all_ranks_gathering(outcome.get, lambda _: None)[0]
