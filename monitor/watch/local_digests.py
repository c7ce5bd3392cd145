"""Makes the digests of the ranks on this node: each covers the records since the previous one."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.monitor.diagnosis.digest import EMPTY_DIGEST_STATE, DigestState, digest
from keepstep.monitor.diagnosis.tables import Digest
from keepstep.monitor.records import RankRecords
from keepstep.monitor.telemetry.clocks import ClockOffset
from keepstep.monitor.telemetry.record_history import RankHistory, RecordHistory


class LocalDigests:
    """Remembers up to where the ranks of a node were digested."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._state: DigestState = EMPTY_DIGEST_STATE
        self._digested_number = 0
        # Of all ranks in the state, also of those that are absent now: the state keeps theirs.
        self._incarnations: dict[int, str] = {}

    def make(
        self, ranks: Sequence[RankHistory], history: RecordHistory, clock: ClockOffset
    ) -> Digest:
        """Return the digest of the records that changed since the previous call.

        Args:
            ranks: the ranks on this node.
            history: that they belong to.
            clock: offset of this node's clock from the job's.
        """
        incarnations = {rank.state.rank: rank.state.incarnation for rank in ranks}
        has_new_writer = any(
            self._incarnations.get(rank, incarnation) != incarnation
            for rank, incarnation in incarnations.items()
        )
        if has_new_writer:
            # Positions begin again from 0.
            self._state, self._incarnations = EMPTY_DIGEST_STATE, {}
        self._incarnations.update(incarnations)
        records = [
            RankRecords(
                rank=rank.state.rank,
                node=self._node,
                records=rank.since_and_open(self._digested_number),
                read_at_s=rank.state.read_at_s,
                is_alive=rank.state.is_alive,
                ending=rank.state.ending,
                offset_s=clock.offset_s,
                offset_error_s=clock.error_s,
            )
            for rank in ranks
        ]
        self._digested_number = history.number
        self._state, made = digest(records, history.communicators, self._state)
        return made
