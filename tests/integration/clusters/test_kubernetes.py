"""Claims about jobs that Kubernetes' manifests start, in pods that are namespaces of this machine.

The controllers and the kubelet are those of `ops.local_kubernetes`; commands, environments, etcd
and its certificates are the manifests' own.
"""

import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from ops.local_kubernetes.manifests import jobset_of, only, rendered
from ops.local_kubernetes.trial import MANIFESTS, WORKERS, overlay
from tests.adaptive_timeouts import patient
from tests.integration.clusters.kubernetes_jobs import endless, kubernetes, need_pods


@pytest.fixture(autouse=True)
def _pods() -> None:
    need_pods()


def test_pod_that_is_killed_is_replaced_and_one_step_at_most_is_computed_again(
    tmp_path: Path,
) -> None:
    manifests = overlay(tmp_path / "overlay", arguments=endless())
    # This test is part of `make test`, and the topmost monitor costs seconds.
    manifests = [it for it in manifests if it["kind"] != "Deployment"]
    with kubernetes(tmp_path, manifests) as job:
        job.wait_for_ranks(2)
        before, lost = job.generation(), job.cluster.pod(WORKERS, 1)
        job.cluster.kill_container(lost, "node")
        job.cluster.wait_until(lambda: lost.phase == "Failed", patient(10))
        assert lost.codes == {"node": 137}
        job.wait_for_later_generation(before)
        job.wait_for_ranks(2)
        assert job.cluster.pod(WORKERS, 1).identity.name != lost.identity.name
        assert sum(job.lost_steps(job.cluster.pod(WORKERS, 0), before)) <= 1
        assert job.cluster.workloads[WORKERS].failures == {1: 1}
    job.check_losses()


@pytest.mark.clusters
def test_container_that_is_killed_is_restarted_in_place_by_the_kubelet(tmp_path: Path) -> None:
    """Its memory is gone with its processes: what it held comes from the other pod's parity."""
    manifests = overlay(tmp_path / "overlay", components=["in-place"], arguments=endless())
    with kubernetes(tmp_path, manifests) as job:
        job.wait_for_ranks(2)
        before, pod = job.generation(), job.cluster.pod(WORKERS, 1)
        job.cluster.kill_container(pod, "node")
        job.cluster.wait_until(lambda: pod.restarts["node"] == 1, patient(10))
        job.wait_for_later_generation(before)
        job.wait_for_ranks(2)
        assert job.cluster.pod(WORKERS, 1) is pod
        assert pod.phase == "Running"
        assert pod.restarts == {"node": 1}
        first, *_ = job.recoveries(pod, before)
        assert "parity" in first["source"]
        assert sum(job.lost_steps(pod, before)) <= 1
    job.check_losses()


@pytest.mark.clusters
def test_drained_machine_hands_over_and_no_step_is_lost(tmp_path: Path) -> None:
    manifests = overlay(tmp_path / "overlay", arguments=endless())
    with kubernetes(tmp_path, manifests) as job:
        job.wait_for_ranks(2)
        before, evicted = job.generation(), job.cluster.pod(WORKERS, 0)
        job.cluster.drain(evicted.identity.machine)
        job.cluster.wait_until(lambda: evicted.phase == "Failed", patient(90))
        assert evicted.codes == {"node": 128 + signal.SIGTERM}
        job.wait_for_later_generation(before)
        job.wait_for_ranks(2)
        assert job.cluster.pod(WORKERS, 0).identity.machine != evicted.identity.machine
        assert job.cluster.workloads[WORKERS].failures == {}
        assert set(job.lost_steps(job.cluster.pod(WORKERS, 1), before)) == {0}
    job.check_losses()


@pytest.mark.clusters
def test_lost_machine_costs_one_step_at_most_with_a_member_of_etcd_on_it(tmp_path: Path) -> None:
    manifests = overlay(tmp_path / "overlay", arguments=endless())
    with kubernetes(tmp_path, manifests) as job:
        job.wait_for_ranks(2)
        before, lost, member = (
            job.generation(),
            job.cluster.pod(WORKERS, 1),
            job.cluster.pod("etcd", 2),
        )
        job.cluster.lose(lost.identity.machine)
        if member.phase == "Running":
            job.cluster.lose(member.identity.machine)
        job.wait_for_later_generation(before)
        job.wait_for_ranks(2)
        assert job.cluster.workloads[WORKERS].failures == {}
        assert sum(job.lost_steps(job.cluster.pod(WORKERS, 0), before)) <= 1
    job.check_losses()


@pytest.mark.clusters
def test_job_grows_and_shrinks_with_the_number_of_its_pods(tmp_path: Path) -> None:
    manifests = overlay(tmp_path / "overlay", arguments=endless())
    with kubernetes(tmp_path, manifests) as job:
        job.wait_for_ranks(2)
        before = job.generation()
        job.cluster.scale(WORKERS, 3)
        job.wait_for_ranks(3)
        job.cluster.scale(WORKERS, 1)
        job.wait_for_ranks(1)
        left = [job.cluster.pod(WORKERS, index) for index in (1, 2)]
        job.cluster.wait_until(lambda: {it.phase for it in left} == {"Failed"}, patient(90))
        assert [it.codes["node"] for it in left] == [128 + signal.SIGTERM] * 2
        assert set(job.lost_steps(job.cluster.pod(WORKERS, 0), before)) == {0}
    job.check_losses()


@pytest.mark.clusters
def test_job_that_has_ended_is_complete_and_no_pod_begins_it_again(tmp_path: Path) -> None:
    manifests = overlay(tmp_path / "overlay", arguments=["train.py", "--steps=20"])
    with kubernetes(tmp_path, manifests) as job:
        workload = job.cluster.workloads[WORKERS]
        job.cluster.wait_until(lambda: workload.result is not None, patient(90))
        assert workload.result == "Complete"
        pods = dict(workload.pods)
        job.cluster.wait_until(
            lambda: all(it.phase != "Running" for it in pods.values()), patient(90)
        )
        assert {it.codes["node"] for it in pods.values()} <= {0, 128 + signal.SIGTERM}
        assert workload.pods == pods


@pytest.mark.clusters
def test_job_whose_script_fails_for_good_is_tried_again_and_then_fails(tmp_path: Path) -> None:
    manifests = overlay(tmp_path / "overlay", arguments=["train.py", "--no-such-option"])
    spec = only(manifests, "JobSet")["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert spec["backoffLimitPerIndex"] == 10
    spec["backoffLimitPerIndex"] = 1
    with kubernetes(tmp_path, manifests) as job:
        workload = job.cluster.workloads[WORKERS]
        job.cluster.wait_until(lambda: workload.result is not None, patient(120))
        assert workload.result == "Failed"
        assert workload.failures == {0: 2, 1: 2}
        assert [it.codes["node"] for it in workload.pods.values()] == [1, 1]
        assert "No such option" in job.cluster.output()


@pytest.mark.clusters
def test_train_job_recovers_with_the_variables_that_the_trainer_sets(tmp_path: Path) -> None:
    runtime = only(rendered(MANIFESTS / "runtime"), "ClusterTrainingRuntime")
    train_job = yaml.safe_load((MANIFESTS / "runtime" / "train-job.yaml").read_text())
    train_job["spec"]["trainer"]["args"] = endless()
    with kubernetes(tmp_path, [jobset_of(train_job, runtime)]) as job:
        workers = "run8-node-0"
        job.wait_for_ranks(2)
        before = job.generation()
        job.cluster.kill_container(job.cluster.pod(workers, 1), "node")
        job.wait_for_later_generation(before)
        job.wait_for_ranks(2)
        assert sum(job.lost_steps(job.cluster.pod(workers, 0), before)) <= 1
    job.check_losses()


@pytest.mark.clusters
def test_topmost_monitor_gathers_from_the_pods_and_serves_the_page_to_whoever_has_the_token(
    tmp_path: Path,
) -> None:
    manifests = overlay(tmp_path / "overlay", arguments=endless())
    with kubernetes(tmp_path, manifests) as job:
        job.wait_for_ranks(2)
        pod = job.cluster.pod("run7-monitor", 0)

        token = job.cluster.execute(
            pod, "monitor", "keepstep", "monitor", "--job", "run7", "--print-token"
        ).strip()

        def metrics(token: str) -> str:
            command = ["curl", "--silent", "--fail", "http://run7-monitor:8433/metrics"]
            header = ["--header", f"Authorization: Bearer {token}"]
            return job.cluster.execute(pod, "monitor", *command, *header)

        job.cluster.wait_until(
            lambda: 'keepstep_job_ranks{job="run7"} 2.0' in metrics(token), patient(60)
        )
        with pytest.raises(subprocess.CalledProcessError):
            metrics("another")
