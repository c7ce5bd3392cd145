"""Defines every number that diagnosis compares with, each with the reason for its value.

Thresholds are relative where possible: times are multiples of the job's step time, deviations
multiples of its noise. Absolute seconds remain where the patience of a person or of a kernel
counts, and where a scheduler's noise would be taken for a fault in very short steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class HangThresholds:
    """When a wait is reported as a hang, when people are alerted, and what proves it.

    A verdict is shown soon, for people who look. Restarting a worker loses work if the worker is
    healthy, so the advice to do that needs proof; see `keepstep.monitor.diagnosis.proof`.
    """

    least_s: float = 2.4
    """No shorter stop is a hang: a full garbage collection, a page-in or a scheduling delay
    takes a second. A reader that reads twice a second then reports within 3 s; a policy,
    which requires a sustained verdict, acts later."""
    steps: float = 3.0
    """Steps' worth of time without progress: a single slow step (longer sequence, hiccup)
    takes less than two."""
    waiter_share: float = 1 / 3
    """Share of the patience that some rank must have waited; the root cause itself must have
    stood still for all of it."""
    first_step_s: float = 300.0
    """Until the first step since the reading began is over: compilation, NCCL's connections and
    the first batch take minutes, not seconds."""
    warmup_s: float = 60.0
    """From then on until the job's step time is known: some layers are first used, and some
    kernels compiled, in the second step and later."""
    checkpoint_s: float = 120.0
    """For a rank in a checkpoint phase: stores are slow at times, and a write that retries is
    not a hang."""
    between_steps_s: float = 60.0
    """For a rank that marks its steps and is in none, or that evaluates: applies to each call
    of its model, and to what it does with the results, such as logging or saving while the
    others wait."""
    alert_s: float = 15.0
    """A standstill is shown after its patience, and people are alerted after this long: a slow
    first batch of an epoch takes 5 s, a full garbage collection of a large heap 10 s."""
    busy_alert_s: float = 120.0
    """The same where the process is seen to compute, read or write: graphs that are compiled
    again in mid-run take a minute."""
    act_s: float = 30.0
    """No worker that stood still for less is to be restarted: a restart costs the job 1 to 60 s,
    and short stops of storage and network last 10 to 20 s."""
    act_steps: float = 10.0
    """The same in steps: in steps of 12 s, three of them are no proof."""
    act_patience: float = 2.0
    """The same in multiples of the patience: proof takes longer than a report, in any phase."""
    act_between_steps_s: float = 600.0
    """The same for a rank between steps or in an evaluation: what user code does there is not
    recorded, and uploads to a slow store use neither processor nor disk."""
    learnt_ratio: float = 2.0
    """A pause in a checkpoint, an evaluation, between steps or for data is reported only if it is
    this many times as long as the longest of its kind that ended by itself."""
    act_learnt_ratio: float = 3.0
    """The same for acting, also within a step."""
    late_ratio: float = 3.0
    """An operation that all ranks have begun is stuck only if it takes this many times as long as
    such operations took in a recent step together: where packets are lost, stalls of 0.2, 0.6, 1.4
    and 3 s follow each other."""
    quiet_s: float = 30.0
    """A process must have done nothing for so long: six samples."""
    quiet_cpu_share: float = 0.05
    """It does nothing if it uses less than this share of one processor: threads that wake up ten
    times a second use 1 %, also in Python."""
    quiet_io_rate: float = 16384.0
    """And if it reads and writes fewer bytes a second: wake-ups by pipes are a few hundred, the
    slowest stores that a job could live with take 100 kB a second."""
    quiet_gpu_share: float = 0.05
    """And if kernels run on its GPU for less than this share of the time."""
    activity_age_s: float = 15.0
    """A process's activity is not known if it was sampled longer ago; it is sampled every 5 s."""
    dead_s: float = 0.5
    """A dead process needs no patience; this only lets the survivors' errors arrive, so the
    evidence includes who waited."""
    witness_s: float = 10.0
    """A failed operation is reported once, and the death that it shows may be read later, on
    another node. A rank that lives on after a failure does not count as a witness for longer."""
    stale_s: float = 2.0
    """If a rank's records were last read longer ago, the reader is behind and the rank is not
    blamed; rings are read every 0.5 s."""
    silent_s: float = 15.0
    """If they were last read longer ago than this and others wait for the rank, its node's
    monitor is gone, likely with the node."""

    def patience_s(self, step_s: float) -> float:
        """Return how long a job whose step takes `step_s` may make no progress."""
        return max(self.least_s, self.steps * step_s)


@dataclass(frozen=True, slots=True)
class SlowThresholds:
    """When a rank, a communicator or a link is slow."""

    window: int = 10
    """Steps judged together: verdicts must come within 20, and the median of ten ignores four
    bad ones."""
    sustained: int = 8
    """Steps of the window in which the deviation must be visible."""
    least_s: float = 1.0
    """Minimum duration of the deviation: in steps of milliseconds, a burst of another process
    fills an entire window."""
    warmup: int = 3
    """First steps of a generation that are ignored: caches, allocators and autotuning settle."""
    peers: int = 3
    """With fewer, a median does not show which one deviates: two that disagree are
    inconclusive."""
    own_excess: float = 0.10
    """Own time over that of peers: Greyhound acts on changes of 10 %, and about 0.5 % of
    MegaScale's machines were 10 % slow."""
    sigmas: float = 6.0
    """Deviations in multiples of the noise: normal noise exceeds 6 once in 10^9, so 16,384
    ranks over 10^4 steps cause no false alarm."""
    changed_share: float = 0.5
    """Share of a rank's excess over its peers by which it must also exceed its own past: then
    something has changed. Otherwise it has more work, or was slow from the start."""
    load_share: float = 0.3
    """If the payload of a rank's all-to-alls and messages has grown by this share of the growth of
    its own time, its load has grown: of an expert's two all-to-alls only one grows with it."""
    cost_share: float = 0.03
    """Share of the step that the slowness must cost: less is not worth a person's attention."""
    cost_s: float = 0.002
    """Seconds a step that it must cost: below this, a scheduler's time slices dominate."""
    transfer_ratio: float = 2.0
    """Transfer time over that of peers or of its own past: congestion varies by less than
    this."""
    job_transfer_ratio: float = 3.0
    """The same for all communicators of a job at once, against their past: without peers to
    compare with, a larger deviation is required."""
    job_cost_share: float = 0.10
    """Share of the step that such a common slowdown must cost."""
    job_own_ratio: float = 1.2
    """If own times have grown by more at the same time, the machines are busy, and the
    network is not the cause."""
    baseline: int = 10
    """Steps from which a subject's past is learnt; steps that were found anomalous are left
    out."""
    widespread_share: float = 0.25
    """Share of peers that may be slow at once; if more are, the job itself or differing
    hardware is the cause, and no rank is blamed."""


@dataclass(frozen=True, slots=True)
class StallThresholds:
    """When data, checkpoints or garbage collection delay the job."""

    data_share: float = 0.30
    """Share of the step that all ranks wait for data: a loader that keeps up is hidden behind
    compute."""
    garbage_share: float = 0.05
    """Share of the step that the longest collection costs, averaged over the window:
    collections at different steps delay all ranks."""
    checkpoint_ratio: float = 3.0
    """A rank's checkpoint phase over its peers': stores vary by a factor of two."""
    saves: int = 3
    """Consecutive checkpoints in which a rank must take so long: a shared disk now and then
    adds tenths of a second."""


@dataclass(frozen=True, slots=True)
class MeasureThresholds:
    """When loss and gradient norm are anomalous."""

    window: int = 64
    """Steps kept."""
    history: int = 24
    """Steps needed before spikes are looked for: the spread of fewer is too uncertain."""
    sigmas: float = 12.0
    """A spike, in multiples of the noise of its logarithm: both measures are heavy-tailed;
    harmful loss spikes are far outside."""
    least_ratio: float = 1.5
    """A spike is at least this ratio over the median: a very smooth curve has a very small
    spread."""
    sustained: int = 3
    """Steps of a spike after which a person should look; most single spikes recover by
    themselves."""
    held: int = 10
    """Minimum number of steps for which a finding holds after the step in which it was found."""
    held_s: float = 60.0
    """Minimum seconds for which it holds: policies require a sustained verdict, and metrics
    are scraped every half minute. A finding that replicas differ holds until they are
    compared again and agree."""


@dataclass(frozen=True, slots=True)
class NodeThresholds:
    """When a node's metrics explain a slow rank or predict a failure."""

    throttled_share: float = 0.25
    """Share of the processor time that a cgroup needed and was denied."""
    clock_ratio: float = 0.80
    """Processor or GPU clock over the median of all nodes: power capping and heat reduce it
    by 20 % and more, turbo varies by 10 %."""
    gpu_celsius: float = 90.0
    """Data-centre GPUs begin to reduce their clock between 85 and 95 degrees Celsius."""
    memory_share: float = 0.03
    """Share of memory available below which the kernel is about to kill processes."""
    memory_horizon_s: float = 120.0
    """Memory that at its present trend is used up within this time is about to run out."""
    memory_low_share: float = 0.15
    """The trend counts only below this share: page cache that fills up looks like a leak too."""
    sustained: int = 3
    """Consecutive readings required: a single reading proves nothing. Device errors count at
    once."""
    fatal_xids: tuple[int, ...] = (62, 64, 74, 79, 95, 119, 120)
    """Xid codes of a device that needs a reset or a technician, from NVIDIA's catalogue of Xid
    errors (13, 31, 43, 45 are the program's)."""
    contained_xids: tuple[int, ...] = (48, 63, 92, 94)
    """Codes of errors that the device recovered from or contained: rows that were remapped,
    processes that were ended. An uncorrectable memory error alone (48) is contained unless 64 or
    95 follows."""
    contained_limit: int = 3
    """Number of contained errors within `error_window_s` that call for another node: spare rows run
    out."""
    error_window_s: float = 3600.0
    """For which errors of devices are remembered and counted."""
    errors_kept: int = 256
    """Number of errors of a node that are remembered: a device that fails continuously reports
    hundreds a second."""
    error_held_s: float = 600.0
    """After the last error of a device, the verdict on it ends: nothing reports that a device has
    been reset, and the job goes on with it."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """All thresholds."""

    hang: HangThresholds = field(default_factory=HangThresholds)
    slow: SlowThresholds = field(default_factory=SlowThresholds)
    stall: StallThresholds = field(default_factory=StallThresholds)
    measure: MeasureThresholds = field(default_factory=MeasureThresholds)
    node: NodeThresholds = field(default_factory=NodeThresholds)
