"""Every number that diagnosis compares with, each with the reason for its value.

What can be relative to the job is: times are multiples of its own step, deviations multiples of its own noise. Absolute seconds remain
where a person's or a kernel's patience counts, and where noise of a scheduler would be taken for a fault in very short steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class HangThresholds:
    """When a wait is a hang."""

    least_s: float = 2.4
    """No shorter stop is a hang: a full garbage collection, a page-in or a scheduler's whim last a second. A reader that comes twice
    a second then tells within 3 s, and a policy, which wants a verdict sustained, acts after as long."""
    steps: float = 3.0
    """Steps' worth of time without progress: a single odd step (other sequence length, hiccup) takes less than two."""
    waiter_share: float = 1 / 3
    """Share of the above that somebody must have waited; the root itself must have stood still for all of it."""
    first_step_s: float = 300.0
    """Before any rank has completed a step: compilation, NCCL's connections and the first batch take minutes, not seconds."""
    checkpoint_s: float = 120.0
    """For a rank within a checkpoint phase: stores are slow at times, and a write that retries is not a hang."""
    between_steps_s: float = 60.0
    """For a rank that marks its steps and is in none, or evaluates: each call of its model, and what it makes of the results, logs or
    saves while the others wait for it."""
    dead_s: float = 0.5
    """A process that is gone is no matter of patience; this only lets survivors' errors arrive, so that they say who waited."""
    witness_s: float = 10.0
    """A failed operation is told once, and the death that it witnesses may be read later, on another node; who outlived one is no witness
    for good."""
    stale_s: float = 2.0
    """If a rank's records were last read longer ago, the reader is behind and the rank is not blamed; readers come every 0.5 s."""
    silent_s: float = 15.0
    """If they were last read longer ago than this and others wait for the rank, its node's monitor is gone, likely with the node."""

    def patience_s(self, step_s: float) -> float:
        """Return how long nothing may move in a job whose step takes `step_s`."""
        return max(self.least_s, self.steps * step_s)


@dataclass(frozen=True, slots=True)
class SlowThresholds:
    """When a rank, a communicator or a link is slow."""

    window: int = 10
    """Steps looked at together: verdicts must come within 20, and the median of ten ignores four bad ones."""
    sustained: int = 8
    """Of the window, steps in which the deviation must have shown."""
    least_s: float = 1.0
    """The deviation must have lasted as long in time, too: in steps of milliseconds, a neighbour's burst fills a whole window."""
    warmup: int = 3
    """First steps of a generation that are not looked at: caches, allocators and autotuning settle."""
    peers: int = 3
    """With fewer, a median does not tell who deviates: two that disagree are inconclusive."""
    own_excess: float = 0.10
    """Own time over that of peers: Greyhound acts on changes of 10 %, and about 0.5 % of MegaScale's machines were 10 % slow."""
    sigmas: float = 6.0
    """Deviations in multiples of the noise: normal noise exceeds 6 once in 10^9, so 16,384 ranks over 10^4 steps stay quiet."""
    cost_share: float = 0.03
    """Share of the step that it must cost: less is not worth a person's look."""
    cost_s: float = 0.002
    """Seconds a step that it must cost: below, a scheduler's time slices decide."""
    transfer_ratio: float = 2.0
    """Transfer time over that of peers or of its own past: congestion comes and goes below this."""
    job_transfer_ratio: float = 3.0
    """The same for all communicators of a job at once, against their past: with no peer to compare, more is asked."""
    job_cost_share: float = 0.10
    """Share of the step that such a common slowdown must cost."""
    job_own_ratio: float = 1.2
    """If own times have grown by more at the same time, the machines are busy and not the network."""
    baseline: int = 10
    """Steps from which the own past is learnt; it learns nothing from steps that were found anomalous."""
    widespread_share: float = 0.25
    """Share of peers that may be slow at once; if more are, it is the job's business or its hardware differs: nobody is blamed."""


@dataclass(frozen=True, slots=True)
class StallThresholds:
    """When data, checkpoints or garbage collection hold the job up."""

    data_share: float = 0.30
    """Share of the step that all ranks wait for data: a loader that keeps up hides behind compute."""
    garbage_share: float = 0.05
    """Share of the step that the rank which collects longest costs, averaged over the window: irregular collection stalls everybody."""
    checkpoint_ratio: float = 3.0
    """A rank's checkpoint phase over its peers': stores vary by a factor of two."""
    saves: int = 3
    """Checkpoints in a row in which a rank must take so long: a disk that others use too has odd tenths of a second now and then."""


@dataclass(frozen=True, slots=True)
class MeasureThresholds:
    """When loss and gradient norm are odd."""

    window: int = 64
    """Steps kept."""
    history: int = 24
    """Steps needed before spikes are looked for: the spread of fewer is too uncertain."""
    sigmas: float = 12.0
    """A spike, in multiples of the noise of its logarithm: both are heavy-tailed; loss spikes that hurt are far outside."""
    least_ratio: float = 1.5
    """A spike is at least this over the median: a very smooth curve has a very small spread."""
    sustained: int = 3
    """Steps of a spike after which a person should look; a single one mostly heals."""
    held: int = 10
    """Steps for which a finding stands at least after the step that showed it."""
    held_s: float = 60.0
    """Seconds for which it stands at least: policies want a verdict sustained, and whoever reads metrics comes every half minute. Replicas
    that differ do so until they are compared again and agree."""


@dataclass(frozen=True, slots=True)
class NodeThresholds:
    """When a node's own figures explain or announce trouble."""

    throttled_share: float = 0.25
    """Share of time in which the cgroup was denied the processor."""
    clock_ratio: float = 0.80
    """Processor or GPU clock over the median of all nodes: power capping and heat take 20 % and more, turbo differs by 10 %."""
    gpu_celsius: float = 90.0
    """Data-centre GPUs begin to slow down between 85 and 95 degrees Celsius."""
    memory_share: float = 0.03
    """Share of memory available below which the kernel's killer is near."""
    memory_horizon_s: float = 120.0
    """Memory that at its present trend is gone within this time is about to run out."""
    memory_low_share: float = 0.15
    """The trend counts only below this share: page cache filling up looks like a leak too."""
    sustained: int = 3
    """Readings in a row: one odd reading is nothing. Errors of a device count at once."""
    bad_xids: tuple[int, ...] = (48, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120)
    """Xid codes that speak of the device rather than of the program, from NVIDIA's list of Xid errors (13, 31, 43, 45 are the program's)."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """All of them."""

    hang: HangThresholds = field(default_factory=HangThresholds)
    slow: SlowThresholds = field(default_factory=SlowThresholds)
    stall: StallThresholds = field(default_factory=StallThresholds)
    measure: MeasureThresholds = field(default_factory=MeasureThresholds)
    node: NodeThresholds = field(default_factory=NodeThresholds)

    def scaled(self, factor: float) -> Thresholds:
        """Return the same for a job whose every time is `factor` times as long: absolute seconds grow, ratios stay."""
        hang = replace(
            self.hang,
            least_s=self.hang.least_s * factor,
            first_step_s=self.hang.first_step_s * factor,
            checkpoint_s=self.hang.checkpoint_s * factor,
            between_steps_s=self.hang.between_steps_s * factor,
            dead_s=self.hang.dead_s * factor,
            witness_s=self.hang.witness_s * factor,
            stale_s=self.hang.stale_s * factor,
            silent_s=self.hang.silent_s * factor,
        )
        slow = replace(
            self.slow, cost_s=self.slow.cost_s * factor, least_s=self.slow.least_s * factor
        )
        measure = replace(self.measure, held_s=self.measure.held_s * factor)
        return replace(self, hang=hang, slow=slow, measure=measure)
