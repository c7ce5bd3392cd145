"""Tests what is remembered from one digest of a node's ranks to the next."""

import numpy as np

from keepstep.monitor.diagnosis.tables import Digest
from keepstep.monitor.records import RECORD, Communicator, Ending, Kind, Operation
from keepstep.monitor.telemetry.clocks import ClockOffset
from keepstep.monitor.telemetry.record_history import RankState, RecordHistory
from keepstep.monitor.watch.local_digests import LocalDigests

WORLD = Communicator(1, "world", (0, 1))
CLOCK = ClockOffset(0.0, 0.0)


def operation(number: int, ended_s: float) -> np.ndarray:
    record = np.zeros(1, RECORD)
    record["kind"], record["code"], record["peer"] = Kind.OPERATION, Operation.ALL_REDUCE, -1
    record["communicator"], record["step"] = WORLD.identity, 1
    record["number"], record["stamp"] = number, 2 * number
    record["enqueued_s"] = record["started_s"] = 1.0
    record["ended_s"] = ended_s
    return record


class Node:
    """A node whose ranks change; each reading finds only the rank that it has then."""

    def __init__(self) -> None:
        self.history = RecordHistory(64)
        self.history.learn([WORLD])
        self.digests = LocalDigests("a")

    def digest(self, rank: int, incarnation: str, record: np.ndarray) -> Digest:
        self.history.begin()
        state = RankState(
            rank=rank, node="a", pid=1, incarnation=incarnation, is_alive=True, ending=Ending.NONE,
            read_at_s=9.0, progress_at_s=9.0,
        )  # fmt: skip
        self.history.merge(state, record)
        return self.digests.make([self.history.ranks[rank]], self.history, CLOCK)


def test_new_process_of_a_rank_that_was_absent_has_its_own_frontiers() -> None:
    node = Node()
    node.digest(1, "first", operation(50, ended_s=2.0))
    node.digest(0, "second", operation(1, ended_s=2.0))
    (frontier,) = node.digest(1, "third", operation(5, ended_s=0.0)).frontiers
    assert (frontier["open"], frontier["entered"]) == (5, 5)


def test_same_process_of_a_rank_that_was_absent_keeps_its_frontiers() -> None:
    node = Node()
    node.digest(1, "first", operation(50, ended_s=2.0))
    node.digest(0, "first", operation(1, ended_s=2.0))
    (frontier,) = node.digest(1, "first", operation(51, ended_s=0.0)).frontiers
    assert (frontier["open"], frontier["ended"]) == (51, 50)
