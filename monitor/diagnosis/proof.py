"""Decides whether a standstill is shown, alerted, or proved: what its verdict advises.

Healthy ranks stand still too: they compile, load, save, evaluate. So a verdict is first shown for
people who look. After some time people are alerted. Restarting the worker is advised only if

- the rank has stood still for far longer than is usual in its phase, by the clock, in steps, and
  compared with pauses of the same kind that ended by themselves;
- its process, with its descendants and its GPU, was seen to do nothing for a while;
- it neither waits for data nor saves: both depend on others, and a new worker would wait as well.

A rank that spins for ever is therefore never restarted for it, since it looks like one that
computes: its peers' collectives time out, which ends the job's generation.
"""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.monitor.diagnosis.pauses import PauseKind
from keepstep.monitor.diagnosis.thresholds import HangThresholds

_NEVER_PROVED = (PauseKind.DATA, PauseKind.CHECKPOINT)
_OUTSIDE_OF_STEPS = (PauseKind.BETWEEN_STEPS, PauseKind.EVALUATION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """A rank that stands still while others wait for it.

    Args:
        kind: what it does, as far as it recorded that.
        idle_s: since its last progress.
        patience_s: after which it is reported.
        learnt_s: the longest pause of this kind that ended by itself; 0.0 if there was none.
        quiet_s: for how long its process has done nothing; None if that is not known.
        stopped: whether a signal has stopped its process.
    """

    kind: PauseKind
    idle_s: float
    patience_s: float
    learnt_s: float
    quiet_s: float | None
    stopped: bool

    @property
    def is_busy(self) -> bool:
        """Whether its process was seen to do something when it was sampled last."""
        return self.quiet_s is not None and self.quiet_s <= 0.0


def is_proved(pause: Pause, step_s: float, thresholds: HangThresholds) -> bool:
    """Return whether a pause is a hang for certain, so that its worker may be restarted."""
    if not pause.stopped and pause.kind in _NEVER_PROVED:
        return False
    needed_s = max(
        thresholds.act_s,
        thresholds.act_steps * step_s,
        thresholds.act_patience * pause.patience_s,
        thresholds.act_learnt_ratio * pause.learnt_s,
    )
    if not pause.stopped and pause.kind in _OUTSIDE_OF_STEPS:
        needed_s = max(needed_s, thresholds.act_between_steps_s)
    is_quiet = pause.quiet_s is not None and pause.quiet_s >= thresholds.quiet_s
    return is_quiet and pause.idle_s >= needed_s


def needs_alert(pause: Pause, thresholds: HangThresholds) -> bool:
    """Return whether a pause should be reported to people, whether it is a hang or not."""
    if pause.stopped:
        return True
    least_s = thresholds.busy_alert_s if pause.is_busy else thresholds.alert_s
    return pause.idle_s >= max(least_s, thresholds.learnt_ratio * pause.learnt_s)


def describe_process(pause: Pause) -> str:
    """Return for people what is known of the process."""
    if pause.stopped:
        return "a signal has stopped its process"
    if pause.quiet_s is None:
        return "what its process does is not known"
    if pause.is_busy:
        return "its process is busy: it may compute, compile, read or write"
    return f"its process has used no processor, disk or GPU for {pause.quiet_s:.0f} s"
