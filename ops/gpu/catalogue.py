"""Lists all checks: G1 to G15 for one GPU, N1 to N7 for several."""

from __future__ import annotations

from ops.gpu.check import Check

CHECKS = (
    Check(
        id="G1",
        shows="a synchronous collective returns no Work; events around it measure it",
        module="ops.gpu.synchronous_collectives",
    ),
    Check(
        id="G2",
        shows="polling an event breaks a graph's capture, unless the thread's mode is set",
        module="ops.gpu.capture_and_polling",
    ),
    Check(
        id="G3",
        shows="two NCCL ranks on one GPU; groups are rebuilt in place without a leak",
        module="ops.gpu.rebuilding_groups",
    ),
    Check(
        id="G4",
        shows="an abort frees hung ranks, raises nothing and leaves garbage",
        module="ops.gpu.abort_and_garbage",
    ),
    Check(
        id="G5",
        shows="an abort waits for CUDA graphs that captured a collective",
        module="ops.gpu.graphs_and_aborts",
    ),
    Check(
        id="G6",
        shows="initialization without the peer hangs; only non-blocking NCCL gives up",
        module="ops.gpu.interrupted_initialization",
    ),
    Check(
        id="G7",
        shows="shared memory is registered in a thread, and copies into it are asynchronous",
        module="ops.gpu.registered_memory",
    ),
    Check(
        id="G8",
        shows="a copy during a step: its cost, and that waiting for it takes no core",
        module="ops.gpu.copy_during_step",
    ),
    Check(
        id="G9",
        shows="after a sticky error the process can only leave; shared memory is whole",
        module="ops.gpu.sticky_errors",
    ),
    Check(
        id="G10",
        shows="a keepstep job loses a worker and ends with bit-equal weights",
        module="ops.gpu.keepstep_job",
    ),
    Check(
        id="G11",
        shows="the recorder times every launch on the device, and none that is captured",
        module="ops.gpu.observed_launches",
        recorder=True,
    ),
    Check(
        id="G12",
        shows="what the recorder costs per operation, and that it keeps no memory",
        module="ops.gpu.recorder_overhead",
        recorder=True,
    ),
    Check(
        id="G13",
        shows="with keepstep's variables groups are freed quickly and no operation waits",
        module="ops.gpu.variables",
    ),
    Check(
        id="G14",
        shows="compiled models and their graphs are gone after a rebuild",
        module="ops.gpu.compiled_generations",
    ),
    Check(
        id="G15",
        shows="a keepstep job recovers in place on NCCL from a kill and from a hang",
        module="ops.gpu.nccl_job",
        recorder=True,
    ),
    Check(
        id="N1",
        shows="a rank has a context on its own GPU only, its threads included",
        module="ops.gpu.contexts",
        gpus=2,
    ),
    Check(
        id="N2",
        shows="two communicators hung crosswise between GPUs are aborted at once",
        module="ops.gpu.crosswise_abort",
        function="check_between_gpus",
        gpus=2,
    ),
    Check(
        id="N3",
        shows="what a peer that has not aborted gets from one that has",
        module="ops.gpu.poisoned_peers",
        gpus=3,
    ),
    Check(
        id="N4",
        shows="groups are rebuilt repeatedly with and without NVLS",
        module="ops.gpu.nvls_rebuilds",
        gpus=2,
    ),
    Check(
        id="N5",
        shows="all GPUs copy to the host at once, from memory near them",
        module="ops.gpu.concurrent_copies",
        gpus=2,
    ),
    Check(
        id="N6",
        shows="collectives keep their speed under the recorder",
        module="ops.gpu.recorded_bandwidth",
        recorder=True,
        gpus=2,
    ),
    Check(
        id="N7",
        shows="GPUDirect between nodes during a copy to the host",
        module="",
        gpus=2,
        unavailable="needs two nodes with RDMA; this command runs on one machine",
    ),
)
