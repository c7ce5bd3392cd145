"""Copies live state into the snapshot arena while the next step computes (lazy snapshot).

Training state does not change from one optimizer step to the next, so a copy that begins after the
step may run during forward and backward, and must only be complete before the optimizer writes
again (DataStates-LLM, arXiv 2406.10707). On a CPU one thread copies by calls that do not hold the
GIL; on a GPU a side stream copies into page-locked memory. The seal is sent when the copy is
complete, not when the caller waits for it.

It checks that only the optimizer writes: a copy during which a tensor's version counter has changed
is torn, and is not sealed. Nor is a copy of memory that is no longer the tensor's (`p.data = ...`).
Writes through `.data`, of fused kernels of unknown optimizers, and of `torch._foreach_*` to
DTensors are not detected.

A shard is self-describing: its index, as JSON, follows its tensors' bytes. So a seal is one small
message for any number of tensors, and a shard's bytes are sufficient to read it.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import torch

from keepstep.checkpoint.errors import SnapshotUnavailable, StateChanged
from keepstep.checkpoint.format.layout.boxes import Entry, Json, encode_boxes, encode_index
from keepstep.checkpoint.format.layout.integers import round_up
from keepstep.checkpoint.format.layout.snapshot_id import SnapshotId
from keepstep.checkpoint.live.packing import pack, signature_of, views_over
from keepstep.checkpoint.live.state_copies import copies_from
from keepstep.checkpoint.live.tensors import LiveTensor
from keepstep.checkpoint.live.versions import WatchedTensors
from keepstep.checkpoint.snapshot.arena import Arena
from keepstep.checkpoint.snapshot.memory.client import SnapshotClient

# An index that grows by a few digits must fit the existing buffer.
_INDEX_GRANULARITY_NBYTES = 64 * 2**10


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """The place of each tensor in the arena; the same for every snapshot of an unchanged state.

    Attributes:
        tensors: the tensors, in the order of `entries`.
        sources: the tensors' memory.
        watched: the tensors whose writes are counted.
        signature: shape and dtype of each tensor's data.
        entries: the tensors' entries in the shard's index.
        encoded: the size and the entries, by `encode_boxes`.
        nbytes: the size of all tensors, with padding.
    """

    tensors: tuple[LiveTensor, ...]
    sources: tuple[torch.Tensor, ...]
    watched: WatchedTensors
    signature: tuple[tuple[torch.Size, torch.dtype], ...]
    entries: tuple[Entry, ...]
    encoded: bytes
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _PendingCopy:
    """A snapshot in progress.

    `versions` are the version counters of the watched tensors before the copy; the copy may begin
    after the mark `ready`.
    """

    snapshot: SnapshotId
    layout: _Layout
    documents: Mapping[str, Json]
    discard_uncommitted: bool
    agree: Callable[[bool], bool] | None
    sources: tuple[torch.Tensor, ...] | list[torch.Tensor]
    versions: list[int]
    ready: object


class Snapshotter:
    """Takes one rank's snapshots in one generation. Owns a thread, which `close` ends.

    Args:
        client: the snapshot server.
        generation: the generation.
        rank: this rank.
        device: where the state is.
        may_seal: asked when a copy is complete; once it has returned False it never returns True:
            the collectives that computed the state may have been aborted.
    """

    def __init__(
        self,
        client: SnapshotClient,
        generation: int,
        rank: int,
        device: torch.device,
        may_seal: Callable[[], bool] = lambda: True,
    ) -> None:
        self._may_seal = may_seal
        self._client = client
        self._generation = generation
        self._rank = rank
        self._copies = copies_from(device)
        self._layout: _Layout | None = None
        self._targets: dict[int, tuple[_Layout, list[torch.Tensor]]] = {}
        self._changed = threading.Condition()
        self._copy: _PendingCopy | None = None
        self._error: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="keepstep-snapshot", daemon=True)
        self._thread.start()

    def start(
        self,
        step: int,
        tensors: Sequence[LiveTensor],
        documents: Mapping[str, Json],
        *,
        discard_uncommitted: bool = False,
        agree: Callable[[bool], bool] | None = None,
    ) -> None:
        """Start to copy the state.

        The rank's last snapshot must be committed, or discarded by `discard_uncommitted`;
        otherwise `wait` raises.

        Args:
            step: number of completed optimizer steps.
            tensors: the tensors of the state; must not be written until `wait` has returned.
            documents: the rest of the state; must not be changed until `wait` has returned.
            discard_uncommitted: the last snapshot can never be committed, because another rank did
                not seal it.
            agree: called in the copying thread with whether the state was unchanged during the
                copy; returns whether it was on all ranks. Needed for a step that already has a
                snapshot: no rank may seal the new one while another has the first one.

        Raises:
            CheckpointError: the last copy failed.
        """
        self.wait()
        layout, sources = self._layout_for(tensors)
        ready = self._copies.mark()
        snapshot = SnapshotId(self._generation, step)
        with self._changed:
            versions = layout.watched.versions()
            self._copy = _PendingCopy(
                snapshot=snapshot,
                layout=layout,
                documents=documents,
                discard_uncommitted=discard_uncommitted,
                agree=agree,
                sources=sources,
                versions=versions,
                ready=ready,
            )
            self._changed.notify_all()

    def wait(self) -> None:
        """Block until the copy in progress, if any, is complete and sealed.

        Raises:
            StateChanged: the state was written to during the copy, which was not sealed.
            CheckpointError: the last copy failed: the generation is over, memory is short, or the
                server is not running.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._copy is None)
            error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for the copy in progress, then end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._perform_all()
        finally:
            # Before the client unmaps the buffers, in the thread that locked them.
            self._targets.clear()
            self._copies.close()

    def _perform_all(self) -> None:
        with torch.no_grad():
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._copy is not None or self._closing)
                    copy = self._copy
                if copy is None:
                    return
                error: BaseException | None = None
                try:
                    self._perform(copy)
                except Exception as caught:  # noqa: BLE001 - the thread's edge: `wait` raises it
                    error = caught
                with self._changed:
                    self._error = error
                    self._copy = None
                    self._changed.notify_all()

    def _perform(self, copy: _PendingCopy) -> None:
        self._copies.bind()
        layout = copy.layout
        index = encode_index(layout.encoded, copy.documents)
        index_capacity = round_up(len(index), _INDEX_GRANULARITY_NBYTES)
        number, arena = self._client.begin(
            copy.snapshot,
            self._rank,
            layout.nbytes + index_capacity,
            discard_uncommitted=copy.discard_uncommitted,
            before_unmap=self._release,
        )
        self._copies.begin(self._views(number, arena, layout), copy.sources, copy.ready)()
        self._check_unchanged(copy)
        if not self._may_seal():
            raise SnapshotUnavailable(
                f"step {copy.snapshot.step} is not sealed: its generation is aborted"
            )
        arena.buffer[layout.nbytes : layout.nbytes + len(index)] = index
        self._client.seal(copy.snapshot, self._rank, layout.nbytes, len(index))

    def _check_unchanged(self, copy: _PendingCopy) -> None:
        """Raise StateChanged if the state was written to during the copy, here or elsewhere."""
        changed: StateChanged | None = None
        try:
            copy.layout.watched.check_unchanged(copy.versions, copy.snapshot.step)
        except StateChanged as error:
            changed = error
        if copy.agree is not None and not copy.agree(changed is None) and changed is None:
            changed = StateChanged(
                f"step {copy.snapshot.step}: another rank's state was written to during the copy"
            )
        if changed is not None:
            raise changed

    def _layout_for(
        self, tensors: Sequence[LiveTensor]
    ) -> tuple[_Layout, tuple[torch.Tensor, ...] | list[torch.Tensor]]:
        """Return the layout of these tensors, and their memory.

        Nearly all tensors are the same objects as at the last snapshot, whose layout is reused.
        """
        layout = self._layout
        if layout is not None and len(tensors) == len(layout.tensors):
            changed = tuple(
                compress(range(len(tensors)), map(operator.is_not, tensors, layout.tensors))
            )
            if all(_is_same_place(tensors[i], layout.tensors[i]) for i in changed):
                sources = list(layout.sources)
                for i in changed:
                    sources[i] = tensors[i].data
                return layout, sources
        entries, nbytes = pack(tensors)
        self._layout = _Layout(
            tensors=tuple(tensors),
            sources=tuple(tensor.data for tensor in tensors),
            watched=WatchedTensors.of(tensors),
            signature=signature_of(tensors),
            entries=entries,
            encoded=encode_boxes(nbytes, entries),
            nbytes=nbytes,
        )
        return self._layout, self._layout.sources

    def _release(self, number: int) -> None:
        """Release a buffer that is about to be unmapped: views would keep it mapped."""
        self._targets.pop(number, None)
        self._copies.unlock(number)

    def _views(self, number: int, arena: Arena, layout: _Layout) -> list[torch.Tensor]:
        """Return tensors over the arena, one per entry; made once per buffer and layout."""
        cached = self._targets.get(number)
        if cached is not None and cached[0] is layout:
            return cached[1]
        self._copies.lock(number, arena)
        views = views_over(arena, layout.entries, layout.signature)
        self._targets[number] = (layout, views)
        return views


def _is_same_place(new: LiveTensor, old: LiveTensor) -> bool:
    """Return whether two tensors have the same place, and neither has an owner to watch."""
    return (
        new.owner is None
        and old.owner is None
        and (new.key, new.box, new.global_shape) == (old.key, old.box, old.global_shape)
        and (new.data.shape, new.data.dtype) == (old.data.shape, old.data.dtype)
    )
