"""What a worker keeps of the training state in one generation, and its way into and out of snapshots.

`Keeper` owns the model, its optimizer and the running copy. The state is immutable from one optimizer step to the next, so the copy
begins when a step ends and is waited for just before the optimizer writes again (DataStates-LLM, arXiv 2406.10707).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from checkpoint.client import SnapshotClient
from checkpoint.copier import Snapshotter
from checkpoint.layout import Box, Json
from checkpoint.live import Capturer, LiveState, LiveTensor, allocate, restore, restore_options
from checkpoint.reader import StoredCheckpoint, list_steps
from checkpoint.recall import Holder, MemorySnapshot
from checkpoint.retention import Snapshot
from checkpoint.source import Source
from checkpoint.storage import open_storage
from elastic.data import Position
from elastic.errors import UsageError
from elastic.records import Adoption, Member
from elastic.session import Assignment
from elastic.world import check_place

if TYPE_CHECKING:
    from elastic.trainer import State

_TRAINER = "trainer"


class Keeper:
    """The state of one worker in one generation. `close` ends the copy under way and frees everything."""

    def __init__(
        self,
        state: State,
        device: torch.device,
        assignment: Assignment,
        checkpoint: str | None,
        is_committed: Callable[[int], bool],
    ) -> None:
        self._assignment = assignment
        self._checkpoint = checkpoint
        self._extra = state.extra
        self._initialize = state.initialize
        self.model = state.model
        self._was_meta = _materialize(state.model, device)
        self.optimizer = state.optimizer(state.model.parameters())
        self.scheduler = state.scheduler(self.optimizer) if state.scheduler else None
        self._buffers = {f"model/{name}" for name, _ in state.model.named_buffers()}
        self._capturer = Capturer(state.model, [self.optimizer])
        self._client = SnapshotClient(assignment.server, bytes.fromhex(assignment.secret))
        self._snapshotter = Snapshotter(self._client, assignment.generation, assignment.rank, device)
        self._taken = -1
        self._is_intact = True
        self._is_committed = is_committed
        self._agreement: tuple[torch.Tensor, dist.Work | None] | None = None
        self._in_step = False
        self._hooks = (
            self.optimizer.register_step_pre_hook(lambda *_: self._before_write()),
            state.model.register_forward_hook(lambda *_: self._after_forward()),
        )

    def resume(self, seed: int) -> tuple[Position, str]:
        """Fill the state from memory, else from storage, else leave it as built; return the position and the source's name."""
        source, name = self._source()
        if source is None:
            self._begin()
            self._seed_randomness(seed, 0)
            return Position(), name
        allocate(self.model, [self.optimizer], source.tensors)
        for parameter_name, parameter in self.model.named_parameters():
            for tensor in (parameter, *self.optimizer.state[parameter].values()):
                check_place(parameter_name, tensor)
        restore(self._capturer.capture(), source)
        restore_options(self.model, [self.optimizer], source.documents)
        trainer = source.documents[_TRAINER]
        if self.scheduler is not None and "scheduler" in trainer:
            self.scheduler.load_state_dict(trainer["scheduler"])
        for key, value in self._extra.items():
            if key in trainer["extra"]:
                value.load_state_dict(trainer["extra"][key])
        self._restore_randomness(source, seed)
        if isinstance(source, MemorySnapshot):
            name = source.describe()
            source.close()
        return Position(trainer["step"], trainer["batch"]), name

    def complete_step(self, position: Position, is_due: bool) -> None:
        """Note that the optimizer has written all that it writes in this step, and begin a snapshot if it is time for one.

        Ranks must take the same snapshots or none would ever be complete: they take one if all know, by the time the optimizer
        runs, that the last one is committed. They agree by a reduction of one number that runs beside the backward pass; if the
        commit was not known then, by another beside the optimizer.
        """
        self._in_step = False
        if self._agreement is not None:
            agreed, self._agreement = self._agreed(), None
            self._is_intact = True
            if is_due and agreed:
                self.snapshot(position)

    def seal_last(self, position: Position, wait_for_commit: Callable[[int], bool]) -> None:
        """Have the state at `position` sealed if it is still whole, for the generation ends in good order.

        Args:
            position: what the state is of.
            wait_for_commit: waits for a step's commit; False if that will not come.
        """
        while self._is_intact and self._taken != position.step and position.step > 0:
            if not self.snapshot(position) and not wait_for_commit(self._taken):
                return
        self._snapshotter.wait()

    def begin_step(self) -> None:
        """Note that all ranks do the same from here on, until the step is complete."""
        self._in_step = True

    def _after_forward(self) -> None:
        # Outside of steps ranks may well do different things, such as one of them evaluating.
        if self._in_step and self._agreement is None:
            self._agree()

    def _before_write(self) -> None:
        self._snapshotter.wait()
        first_write, self._is_intact = self._is_intact, False
        if self._agreement is None or (first_write and not self._agreed()):
            self._agree()

    def _agree(self) -> None:
        """Begin to ask all ranks whether they know that the last snapshot is committed."""
        ready = torch.tensor([int(self._is_committed(self._taken))])
        work = dist.all_reduce(ready, dist.ReduceOp.MIN, async_op=True) if dist.get_world_size() > 1 else None
        self._agreement = (ready, work)

    def _agreed(self) -> bool:
        """Wait for the answer, which is the same on every rank."""
        assert self._agreement is not None
        ready, work = self._agreement
        if work is not None:
            work.wait()
        return bool(ready.item())

    def snapshot(self, position: Position) -> bool:
        """Begin to copy the state as it is now; False if the last snapshot is not committed yet, so that none can begin."""
        if not self._is_committed(self._taken):
            return False
        live = self._whole(position)
        self._snapshotter.start(position.step, live.tensors, live.documents)
        self._taken = position.step
        return True

    def snapshot_finally(self, position: Position, wait_for_commit: Callable[[int], bool]) -> bool:
        """Have the state at `position` snapshot and committed; False if the generation closes before that."""
        self.seal_last(position, wait_for_commit)
        return wait_for_commit(position.step)

    def close(self) -> None:
        """Let a copy under way complete, then let go of everything."""
        for hook in self._hooks:
            hook.remove()
        self._snapshotter.close()
        self._client.close()

    def _source(self) -> tuple[Source | None, str]:
        resume = self._assignment.resume
        if resume is not None:
            holders = [Holder(self._server(member), tuple(member.ranks)) for member in resume.holders]
            # Later ones count: a lost rank's shard is with whoever rebuilds it.
            holders += [Holder(self._server(adopted), (adopted.rank,), rebuilds=True) for adopted in resume.adoptions]
            snapshot = resume.snapshot
            return MemorySnapshot(
                Snapshot(snapshot.generation, snapshot.step),
                holders,
                bytes.fromhex(self._assignment.secret),
                rank=self._assignment.rank,
            ), "memory"
        if self._checkpoint is None:
            return None, "start"
        step = self._newest_stored(self._checkpoint)
        return (StoredCheckpoint.open(self._checkpoint, step), "storage") if step >= 0 else (None, "start")

    def _server(self, holder: Member | Adoption) -> str:
        """Return where a holder's server is reached: the own node's beside this worker."""
        return self._assignment.server if holder.node == self._assignment.node else holder.server

    def _newest_stored(self, url: str) -> int:
        """Have rank 0 look, so that all ranks resume from the same step whatever appears meanwhile."""
        found = torch.tensor([-1])
        if self._assignment.rank == 0:
            open_storage(url).probe_writable()
            found[0] = next((stored.step for stored in list_steps(url)), -1)
        dist.broadcast(found, src=0)
        return int(found.item())

    def _begin(self) -> None:
        if self._initialize is not None:
            self._initialize(self.model)
        elif self._was_meta:
            raise UsageError(
                "the model is on the meta device and there is nothing to resume from; "
                "give State(initialize=...) that fills its parameters"
            )

    def _whole(self, position: Position) -> LiveState:
        """Everything that is state: tensors of model and optimizer, randomness, position, scheduler, extras."""
        live = self._capturer.capture()
        # Forward writes to buffers (batch norm's statistics), so these cannot be copied under it.
        tensors = tuple(replace(t, data=t.data.clone()) if t.key in self._buffers else t for t in live.tensors)
        rank = self._assignment.rank
        trainer: dict[str, Json] = {
            "step": position.step,
            "batch": position.batch,
            "extra": {key: value.state_dict() for key, value in self._extra.items()},
        }
        if self.scheduler is not None:
            trainer["scheduler"] = self.scheduler.state_dict()
        documents = {**live.documents, _TRAINER: trainer, f"rank/{rank:05d}/random": random.getstate()}
        return LiveState((*tensors, *_generators(rank)), documents)

    def _seed_randomness(self, seed: int, step: int) -> None:
        torch.manual_seed((seed * 1_000_003 + step) * 65_537 + self._assignment.rank + 1)
        random.seed(f"{seed}/{step}/{self._assignment.rank}")

    def _restore_randomness(self, source: Source, seed: int) -> None:
        """Continue this rank's random numbers; a rank that is new starts a stream of its own."""
        rank = self._assignment.rank
        generators = _generators(rank)
        if any(tensor.key not in source.tensors for tensor in generators):
            self._seed_randomness(seed, source.step)
            return
        restore(LiveState(generators, {}), source, strict=False)
        torch.set_rng_state(generators[0].data)
        if len(generators) > 1:
            torch.cuda.set_rng_state(generators[1].data)
        version, internal, gauss = source.documents[f"rank/{rank:05d}/random"]
        random.setstate((version, tuple(internal), gauss))


def _generators(rank: int) -> tuple[LiveTensor, ...]:
    states: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return tuple(
        LiveTensor(f"rank/{rank:05d}/rng/{name}", tuple(state.shape), Box.whole(state.shape), state)
        for name, state in states.items()
    )


def _materialize(model: nn.Module, device: torch.device) -> bool:
    """Give a model on the meta device memory; True if it was there.

    Raises:
        UsageError: a buffer is there that no checkpoint will fill.
    """
    if not any(parameter.is_meta for parameter in model.parameters()):
        return False
    saved = set(model.state_dict())
    lost = [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in saved]
    if lost:
        raise UsageError(
            f"buffer {lost[0]} is on the meta device but not part of the model's state, so nothing would fill it; "
            "make it on World.device inside build"
        )
    model.to_empty(device=device)
    return True
