"""Compares ranks that hold the same parts of the state, such as data-parallel replicas.

They compute the same updates from the same reduced gradients, so that their parameters and
optimizer state are equal to the bit. If they are not, a processor or a memory failed silently
(Hochschild et al., "Cores that don't count", HotOS 2021), or the model was never made parallel.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist

from keepstep import monitor
from keepstep.checkpoint.collective import all_gather_json
from keepstep.checkpoint.live.digest import checksums, content_digest, layout_digest
from keepstep.checkpoint.live.tensors import LiveTensor
from keepstep.elastic.errors import ReplicasDiverged
from keepstep.elastic.rendezvous.records import ReplicaComparison
from keepstep.elastic.trainer.process_groups import World

log = logging.getLogger("keepstep")

OnDivergence: TypeAlias = Literal["report", "repair", "stop"]
"""What to do when replicas differ."""

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


class ReplicaCheck:
    """Compares the replicas of one generation. Every rank calls it at the same steps.

    Args:
        world: the generation.
        every: steps between comparisons; None: never. The first step of a generation is compared.
        on_divergence: what to do if replicas differ.
        tensors: returns this rank's parameters and optimizer state.
    """

    def __init__(
        self,
        world: World,
        every: int | None,
        on_divergence: OnDivergence,
        tensors: Callable[[], Sequence[LiveTensor]],
    ) -> None:
        self._world = world
        self._every = every
        self._on_divergence = on_divergence
        self._tensors = tensors
        self._layouts: tuple[str, ...] = ()

    def run_if_due(self, step: int) -> ReplicaComparison | None:
        """Compare the replicas after a step, and act; None if nothing was compared.

        Raises:
            ReplicasDiverged: they differ, and the job is to stop then.
        """
        is_first = not self._layouts
        if self._every is None or not (is_first or step % self._every == 0):
            return None
        tensors = self._tensors()
        if is_first:
            self._layouts = tuple(all_gather_json(layout_digest(tensors)))
        groups = _groups(self._layouts)
        if not groups:
            return None
        comparison = ReplicaComparison(step, sum(map(len, groups)))
        own = next((ranks for ranks in groups if self._world.rank in ranks), None)
        sums = checksums(tensors) if own else {}
        content = content_digest(sums)
        if own:
            self._measure(own, content)
        divergences = find_divergences(self._layouts, tuple(all_gather_json(content)))
        for divergence in divergences:
            names = _differing(divergence, self._world.rank, sums)
            message = describe(divergence, names, step)
            if self._world.rank == divergence.ranks[0]:
                log.error("%s", message)
            comparison = replace(
                comparison,
                differing=(*comparison.differing, *(divergence.odd or divergence.ranks)),
                finding=comparison.finding or message,
            )
            if self._on_divergence == "repair" and divergence.odd:
                _repair(divergence, self._world.rank, tensors)
                if self._world.rank == divergence.ranks[0]:
                    log.warning("they were given the state of rank %d", divergence.pair[0])
        if divergences and self._on_divergence == "stop":
            raise ReplicasDiverged(comparison.finding)
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


def _groups(layouts: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the ranks that hold the same parts of the state, where there are several."""
    ranks_by_layout: dict[str, list[int]] = defaultdict(list)
    for rank, layout in enumerate(layouts):
        ranks_by_layout[layout].append(rank)
    return [tuple(ranks) for ranks in ranks_by_layout.values() if len(ranks) > 1]


def _differing(divergence: Divergence, rank: int, sums: Mapping[str, int]) -> list[str]:
    """Return the tensors that differ between the pair, the first few; called by every rank."""
    listed = all_gather_json(sorted(sums.items()) if rank in divergence.pair else [])
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
    return tensor.reshape(-1).view(torch.uint8)
