"""Thresholds of a job all of whose times are longer: what diagnosis says of it must be the same."""

from dataclasses import replace

from keepstep.monitor.diagnosis.thresholds import Thresholds


def thresholds_of_longer_job(factor: float) -> Thresholds:
    """Return the thresholds of a job in which every time is `factor` times as long.

    Absolute seconds grow, ratios stay.
    """
    usual = Thresholds()
    hang = replace(
        usual.hang,
        least_s=usual.hang.least_s * factor,
        first_step_s=usual.hang.first_step_s * factor,
        checkpoint_s=usual.hang.checkpoint_s * factor,
        alert_s=usual.hang.alert_s * factor,
        busy_alert_s=usual.hang.busy_alert_s * factor,
        act_s=usual.hang.act_s * factor,
        act_between_steps_s=usual.hang.act_between_steps_s * factor,
        quiet_s=usual.hang.quiet_s * factor,
        activity_age_s=usual.hang.activity_age_s * factor,
        warmup_s=usual.hang.warmup_s * factor,
        quiet_io_rate=usual.hang.quiet_io_rate / factor,
        between_steps_s=usual.hang.between_steps_s * factor,
        dead_s=usual.hang.dead_s * factor,
        witness_s=usual.hang.witness_s * factor,
        stale_s=usual.hang.stale_s * factor,
        silent_s=usual.hang.silent_s * factor,
    )
    slow = replace(
        usual.slow, cost_s=usual.slow.cost_s * factor, least_s=usual.slow.least_s * factor
    )
    measure = replace(usual.measure, held_s=usual.measure.held_s * factor)
    return replace(usual, hang=hang, slow=slow, measure=measure)
