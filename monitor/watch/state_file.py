"""Saves and loads the state that survives a restart of the daemon: log and spent policy budget.

Times in the file are wall-clock times, because the monotonic clock restarts with the machine.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keepstep.monitor.diagnosis.policy import EnforcementState, PolicyCase, Restart
from keepstep.monitor.verdicts import Verdict
from keepstep.monitor.watch.verdict_log import VerdictLog

_LOG = logging.getLogger("keepstep.monitor")


@dataclass(frozen=True, slots=True)
class SavedState:
    """The state that a daemon saves.

    Args:
        log: of verdicts.
        policy: of its state, only the spent budget and the alerts are saved; whether a verdict
            still holds is determined again.
    """

    log: VerdictLog = field(default_factory=VerdictLog)
    policy: EnforcementState = field(default_factory=EnforcementState)


def load_state(path: Path | None, now_s: float, wall_s: float) -> SavedState:
    """Return the state that an earlier daemon saved; an empty one if there is no usable file.

    Args:
        path: the file.
        now_s: monotonic.
        wall_s: the wall clock at the same time.
    """
    if path is None:
        return SavedState()
    try:
        saved = json.loads(path.read_text())
        return SavedState(VerdictLog.from_json(saved), _policy_state(saved, now_s, wall_s))
    except FileNotFoundError:
        return SavedState()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _LOG.warning(
            "the state in %s cannot be used (%s); starting with an empty log of verdicts",
            path,
            error,
        )
        return SavedState()


def _policy_state(saved: Mapping[str, Any], now_s: float, wall_s: float) -> EnforcementState:
    """Return the policy's state, with wall-clock times as monotonic ones, none in the future."""

    def monotonic(at_s: float) -> float:
        return min(now_s, now_s - wall_s + at_s)

    spent = saved["spent"]
    alerted = [(at_s, Verdict.from_json(verdict)) for at_s, verdict in saved["alerted"]]
    return EnforcementState(
        replaced=tuple((monotonic(at_s), str(node)) for at_s, node in spent["replaced"]),
        restarted=tuple(
            Restart(monotonic(at_s), int(rank), str(node), str(syndrome))
            for at_s, rank, node, syndrome in spent["restarted"]
        ),
        cases={
            (verdict.subject, verdict.syndrome): PolicyCase(
                verdict, now_s, now_s, alerted_s=monotonic(at_s)
            )
            for at_s, verdict in alerted
        },
    )


def save_state(path: Path, state: SavedState, now_s: float, wall_s: float) -> None:
    """Replace the file atomically: a reader sees the old or the new content.

    Arguments as for `load_state`.

    Raises:
        OSError: it cannot be written.
    """
    policy = state.policy
    spent = {
        "replaced": [[wall_s - now_s + at_s, node] for at_s, node in policy.replaced],
        "restarted": [
            [wall_s - now_s + restart.at_s, restart.rank, restart.node, restart.syndrome]
            for restart in policy.restarted
        ],
    }
    alerted = [
        [wall_s - now_s + case.alerted_s, case.verdict.to_json()]
        for case in policy.cases.values()
        if math.isfinite(case.alerted_s)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps({**state.log.to_json(), "spent": spent, "alerted": alerted}))
    os.replace(temporary, path)
