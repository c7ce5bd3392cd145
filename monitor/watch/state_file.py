"""What a daemon must not forget when it is restarted: its log of verdicts, and what it has already spent of its policy's budget.

Times in the file are wall-clock times, for the monotonic clock begins anew when the machine does.
"""

from __future__ import annotations

import json
import logging
import math
import os
from dataclasses import dataclass, field
from pathlib import Path

from keepstep.monitor.diagnosis.policy import EnforcementState, PolicyCase
from keepstep.monitor.verdicts import Verdict
from keepstep.monitor.watch.verdict_log import VerdictLog

_LOG = logging.getLogger("keepstep.monitor")


@dataclass(frozen=True, slots=True)
class SavedState:
    """The log, and a policy's state of which the budget is kept, and what people were told: what stands is seen anew."""

    log: VerdictLog = field(default_factory=VerdictLog)
    policy: EnforcementState = field(default_factory=EnforcementState)


def load_state(path: Path | None, now_s: float, wall_s: float) -> SavedState:
    """Return what an earlier daemon kept; nothing if there is none or it cannot be used.

    Args:
        path: the file.
        now_s: monotonic.
        wall_s: the wall clock at the same time.
    """
    if path is None:
        return SavedState()
    try:
        told = json.loads(path.read_text())
        spent = told["spent"]
        policy = EnforcementState(
            replaced=tuple(
                (min(now_s, now_s - wall_s + at_s), str(node)) for at_s, node in spent["replaced"]
            ),
            restarted=tuple(
                (min(now_s, now_s - wall_s + at_s), int(rank)) for at_s, rank in spent["restarted"]
            ),
            cases={
                (verdict.subject, verdict.syndrome): PolicyCase(
                    verdict, now_s, now_s, alerted_s=min(now_s, now_s - wall_s + at_s)
                )
                for at_s, verdict in (
                    (at_s, Verdict.from_json(one)) for at_s, one in told["alerted"]
                )
            },
        )
        return SavedState(VerdictLog.from_json(told), policy)
    except FileNotFoundError:
        return SavedState()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _LOG.warning(
            "the state in %s cannot be used (%s); beginning with an empty log of verdicts",
            path,
            error,
        )
        return SavedState()


def save_state(path: Path, remembered: SavedState, now_s: float, wall_s: float) -> None:
    """Replace the file; whoever reads it sees the old or the new one whole. Arguments as for `load_state`.

    Raises:
        OSError: it cannot be written.
    """
    policy = remembered.policy
    spent = {
        "replaced": [[wall_s - now_s + at_s, node] for at_s, node in policy.replaced],
        "restarted": [[wall_s - now_s + at_s, rank] for at_s, rank in policy.restarted],
    }
    alerted = [
        [wall_s - now_s + case.alerted_s, case.verdict.to_json()]
        for case in policy.cases.values()
        if math.isfinite(case.alerted_s)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    beside.write_text(json.dumps({**remembered.log.to_json(), "spent": spent, "alerted": alerted}))
    os.replace(beside, path)
