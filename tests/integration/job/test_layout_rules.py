"""A job takes the ranks that its mesh has places for, from its start on."""

from pathlib import Path

from examples.local_cluster import script
from tests.integration.job.example_runs import printed_losses
from tests.integration.job.jobs import committed_step_of
from tests.patient_cluster import PatientCluster


def test_a_number_that_does_not_fit_leaves_a_spare_which_takes_a_lost_ranks_place(
    tmp_path: Path,
) -> None:
    """Three ranks begin, of which tensor parallelism over two has no place for one."""
    with PatientCluster(
        "layouts",
        script("layouts/tensor_parallel.py", "--steps", "40"),
        nnodes="1:3",
        workers=1,
        log=tmp_path,
        last_call_s=60.0,
    ) as running:
        for node in "abc":
            running.start(node)
        view = running.wait_until(lambda view: committed_step_of(view) >= 3, 60)
        assert view.generation is not None
        assert (view.generation_number, view.generation.world_size) == (2, 2)
        assert "the mesh does not fit 3 ranks; it needs a multiple of 2" in view.generation.reason
        first, second = (member.node for member in view.generation.members)
        running.kill(second)
        view = running.wait_until(lambda view: view.generation_number >= 3, 60)
        assert view.generation is not None
        (spare,) = {"a", "b", "c"} - {first, second}
        assert {member.node for member in view.generation.members} == {first, spare}
        assert view.generation.resume is not None
        assert [running.wait(node, 120) for node in (first, spare)] == [0, 0], running.output()
    losses = printed_losses(tmp_path)
    assert max(losses) == 40
    assert losses[40] < losses[min(losses)]
