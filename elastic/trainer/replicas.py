"""Compares ranks that hold the same parts of the state, such as data-parallel replicas.

They compute the same updates from the same reduced gradients, so that their parameters and
optimizer state are equal to the bit. If they are not, a processor or a memory failed silently
(Hochschild et al., "Cores that don't count", HotOS 2021), or the model was never made parallel.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist

from keepstep import monitor
from keepstep.checkpoint.live.digest import checksums, content_digest, layout_digest
from keepstep.checkpoint.live.tensors import LiveTensor
from keepstep.checkpoint.ranks.control_group import CONTROL_GROUPS
from keepstep.elastic.errors import ReplicasDiverged
from keepstep.elastic.rendezvous.records import ReplicaComparison
from keepstep.elastic.trainer.process_groups import World
from keepstep.elastic.trainer.recomputation import (
    Contradiction,
    Recomputation,
    judge,
    step_to_repeat,
)
from keepstep.elastic.worker.peer_failure import is_peer_failure

log = logging.getLogger("keepstep")

OnDivergence: TypeAlias = Literal["report", "repair", "roll back", "replace", "stop"]
"""The reaction to replicas that differ."""

_MAX_REPORTED = 8


@dataclass(frozen=True, slots=True)
class Divergence:
    """Replicas that differ.

    Attributes:
        ranks: all replicas.
        pair: two that differ, of which the first belongs to the majority, if there is one.
        odd: those that differ from the majority; empty if there is none.
    """

    ranks: tuple[int, ...]
    pair: tuple[int, int]
    odd: tuple[int, ...] = ()


def find_divergences(layouts: Sequence[str], contents: Sequence[str]) -> tuple[Divergence, ...]:
    """Return the groups of replicas that differ.

    Args:
        layouts: which parts of the state each rank holds, by rank: equal on replicas.
        contents: digest of these parts, by rank.
    """
    divergences = []
    for ranks in _groups(layouts):
        counts = Counter(contents[rank] for rank in ranks)
        if len(counts) < 2:
            continue
        content, count = counts.most_common(1)[0]
        agreeing = [rank for rank in ranks if contents[rank] == content]
        others = tuple(rank for rank in ranks if contents[rank] != content)
        has_majority = 2 * count > len(ranks)
        pair = (agreeing[0], others[0])
        divergences.append(Divergence(ranks, pair, others if has_majority else ()))
    return tuple(divergences)


def _nothing() -> Sequence[LiveTensor]:
    """Stand for the tensors of a generation that has not begun, or is over."""
    return ()


class ReplicaCheck:
    """Compares the replicas of a job, generation by generation; every rank at the same steps.

    Args:
        every: steps between comparisons; None: never. The first step of a generation is compared.
        on_divergence: what to do if replicas differ.
    """

    def __init__(self, every: int | None, on_divergence: OnDivergence) -> None:
        self._every = every
        self._on_divergence = on_divergence
        self._world: World
        self._tensors: Callable[[], Sequence[LiveTensor]] = _nothing
        self._layouts: tuple[str, ...] = ()
        self._contradiction: Contradiction | None = None
        self._contradictions: tuple[Contradiction | None, ...] = ()
        self._repeated_step = self._compared_step = self._equal_step = 0

    @property
    def rolls_back(self) -> bool:
        """Whether the job returns to the last snapshot if replicas differ.

        Snapshots must then be of states that were compared.
        """
        return self._on_divergence in ("roll back", "replace")

    def enter(self, world: World, tensors: Callable[[], Sequence[LiveTensor]]) -> None:
        """Begin a generation.

        Args:
            world: the generation.
            tensors: returns this rank's parameters and optimizer state.
        """
        self._world = world
        self._tensors = tensors
        self._layouts = self._contradictions = ()
        self._repeated_step = self._compared_step = 0

    def learn_layouts(self) -> None:
        """Learn what each rank holds before the generation's first step; called by every rank.

        Only where the state has all tensors already, as it has once the job's own was restored. The
        first comparison asks otherwise, and then all ranks wait for the one whose optimizer takes
        longest: a new process's, which makes its first step.
        """
        if self._every is not None:
            self._begin(layout_digest(self._tensors()))

    def leave(self) -> None:
        """End a generation: drop what holds its state and its process groups."""
        self._tensors = _nothing

    def run_if_due(self, step: int, *, precedes_snapshot: bool) -> ReplicaComparison | None:
        """Compare the replicas after a step, and act; None if nothing was compared.

        Args:
            step: the step.
            precedes_snapshot: a snapshot of this step is about to be taken, by all ranks.

        Raises:
            ReplicasDiverged: they differ, and the job is to stop then.
        """
        if not self._is_due(step, precedes_snapshot):
            return None
        tensors = self._tensors()
        if not self._layouts:
            self._begin(layout_digest(tensors))
        if not self._compared_step:
            self._equal_step = step - 1
        self._compared_step = step
        groups = _groups(self._layouts)
        if not groups:
            return None
        own = next((ranks for ranks in groups if self._world.rank in ranks), None)
        sums = checksums(tensors) if own else {}
        content = content_digest(sums)
        if own:
            self._measure(own, content)
        contents = tuple(CONTROL_GROUPS.of().gather(content))
        divergences = find_divergences(self._layouts, contents)
        comparison = ReplicaComparison(step, sum(map(len, groups)))
        for divergence in divergences:
            comparison = self._act_on(divergence, comparison, sums, tensors)
        if divergences:
            _await_knowledge()
            # If they were equal one step before, nothing wrong has reached the others by gradients.
            is_fresh = self._equal_step == step - 1 and not comparison.to_replace
            self._contradiction = (
                Contradiction(step, len(self._layouts), content) if is_fresh else None
            )
            if self._on_divergence == "stop":
                raise ReplicasDiverged(comparison.finding)
            return comparison
        self._equal_step = step
        if step == self._repeated_step:
            comparison = self._conclude(comparison, groups, contents)
            self._contradiction = None
        return comparison

    def _is_due(self, step: int, precedes_snapshot: bool) -> bool:
        if self._every is None or step == self._compared_step:
            return False
        is_first = self._compared_step == 0
        is_periodic = is_first or step % self._every == 0 or step == self._repeated_step
        return is_periodic or (precedes_snapshot and self.rolls_back)

    def _begin(self, layout: str) -> None:
        """Learn once in a generation what each rank holds, and remembers."""
        self._layouts = tuple(CONTROL_GROUPS.of().gather(layout))
        if self.rolls_back:
            self._contradictions = tuple(
                Contradiction(*found) if found else None
                for found in CONTROL_GROUPS.of().gather(
                    astuple(self._contradiction) if self._contradiction else None
                )
            )
            self._repeated_step = step_to_repeat(self._contradictions, len(self._layouts))

    def _act_on(
        self,
        divergence: Divergence,
        comparison: ReplicaComparison,
        sums: Mapping[str, int],
        tensors: Sequence[LiveTensor],
    ) -> ReplicaComparison:
        """Report a divergence and repair it if asked; return the comparison with what was found."""
        is_first = self._world.rank == divergence.ranks[0]
        names = _differing(divergence, self._world.rank, sums)
        message = describe(divergence, names, comparison.step)
        if is_first:
            log.error("%s", message)
        if self._on_divergence == "repair" and divergence.odd:
            _repair(divergence, self._world.rank, tensors)
            if is_first:
                log.warning("they were given the state of rank %d", divergence.pair[0])
        return replace(
            comparison,
            differing=(*comparison.differing, *(divergence.odd or divergence.ranks)),
            to_replace=(
                *comparison.to_replace,
                *(divergence.odd if self._on_divergence == "replace" else ()),
            ),
            finding=comparison.finding or message,
        )

    def _conclude(
        self,
        comparison: ReplicaComparison,
        groups: Sequence[tuple[int, ...]],
        contents: Sequence[str],
    ) -> ReplicaComparison:
        """Report who was wrong before, now that the step has been computed again."""
        for ranks in groups:
            found = judge(ranks, self._contradictions, comparison.step, contents)
            if found is None:
                continue
            message = describe_recomputation(found, ranks, comparison.step)
            if self._world.rank == ranks[0]:
                log.error("%s", message)
            is_shown = found.is_repeated and self._on_divergence == "replace"
            comparison = replace(
                comparison,
                to_replace=(*comparison.to_replace, *(found.wrong if is_shown else ())),
                finding=comparison.finding or message,
            )
        return comparison

    def _measure(self, replicas: tuple[int, ...], content: str) -> None:
        """Report the digest to the monitor, if a process group has these ranks."""
        for group in (dist.group.WORLD, *self._world.mesh.get_all_groups()):
            if group is not None and tuple(dist.get_process_group_ranks(group)) == replicas:
                checksum = float(int(content[:8], 16))
                monitor.measure(monitor.Measure.REPLICA_CHECKSUM, checksum, group)
                return


def describe(divergence: Divergence, names: Sequence[str], step: int) -> str:
    """Return what was found and what it means, in one line."""
    where = f"; first in {', '.join(names)}" if names else ""
    ranks = divergence.ranks
    if divergence.odd:
        odd = ", ".join(map(str, divergence.odd[:_MAX_REPORTED]))
        agreeing = len(ranks) - len(divergence.odd)
        return (
            f"after step {step} rank{'s' if len(divergence.odd) > 1 else ''} {odd} "
            f"differ{'s' if len(divergence.odd) == 1 else ''} from {agreeing} replicas that agree"
            f"{where}"
        )
    listed = ", ".join(map(str, ranks[:_MAX_REPORTED]))
    return (
        f"after step {step} the replicas on ranks {listed} hold different states, none of them a "
        f"majority{where}; if this is the first step, build() has returned a model that is not "
        "parallel: wrap it in DistributedDataParallel or fully_shard"
    )


def describe_recomputation(found: Recomputation, ranks: Sequence[int], step: int) -> str:
    """Return what computing steps again has shown, in one line."""
    listed = ", ".join(map(str, (found.wrong if found.is_repeated else ranks)[:_MAX_REPORTED]))
    if found.is_repeated:
        return f"step {step} computed again shows that rank {listed} had computed wrongly"
    return (
        f"step {step} computed again gives a third result on ranks {listed}: their computation is "
        "not the same twice (torch.use_deterministic_algorithms makes it so), and which of them "
        "was wrong is not known"
    )


def _groups(layouts: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the ranks that hold the same parts of the state, where there are several."""
    ranks_by_layout: dict[str, list[int]] = defaultdict(list)
    for rank, layout in enumerate(layouts):
        ranks_by_layout[layout].append(rank)
    return [tuple(ranks) for ranks in ranks_by_layout.values() if len(ranks) > 1]


def _await_knowledge() -> None:
    """Wait until every rank has the result of the last exchange; called by every rank.

    A rank that leaves the generation because of that result closes connections by which others
    still receive it. Only two kinds of ranks can break this off: one that knows that all have the
    result, and one that is lost, which ends the generation in any case.
    """
    try:
        CONTROL_GROUPS.of().gather(None)
    except RuntimeError as broken:
        if not is_peer_failure(broken):
            raise


def _differing(divergence: Divergence, rank: int, sums: Mapping[str, int]) -> list[str]:
    """Return the tensors that differ between the pair, the first few; called by every rank."""
    listed = CONTROL_GROUPS.of().gather(sorted(sums.items()) if rank in divergence.pair else [])
    tensors = zip(*(listed[member] for member in divergence.pair), strict=True)
    return [key for (key, one), (_, other) in tensors if one != other][:_MAX_REPORTED]


def _repair(divergence: Divergence, rank: int, tensors: Sequence[LiveTensor]) -> None:
    """Give the odd ranks the state of the majority."""
    source = divergence.pair[0]
    for tensor in tensors:
        if rank == source:
            for odd in divergence.odd:
                dist.send(_bytes_of(tensor.data.contiguous()), odd)
        elif rank in divergence.odd:
            received = torch.empty_like(tensor.data, memory_format=torch.contiguous_format)
            dist.recv(_bytes_of(received), source)
            tensor.data.copy_(received)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor; that of one element may have any stride."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
