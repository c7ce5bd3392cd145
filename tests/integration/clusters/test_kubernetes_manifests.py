"""Claims about Kubernetes' manifests: an API server would take them, and they fit the commands.

Built-in kinds are checked with the API's own schemas (kubernetes-validate), custom resources with
those of `custom_resources`. Rules between fields, which no schema has, are written out here.
"""

import copy
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from ops.local_kubernetes.manifests import (
    Identity,
    Manifest,
    command_line,
    counts_as_failure,
    environment,
    expanded,
    jobset_of,
    kubectl,
    only,
    rendered,
    restarts_in_place,
)
from ops.local_kubernetes.trial import MANIFESTS, overlay
from tests.integration.clusters.custom_resources import SCHEMAS

kubernetes_validate = pytest.importorskip("kubernetes_validate")
pytestmark = pytest.mark.skipif(kubectl() is None, reason="kubectl is not installed")

FOLDERS = ("etcd", "job", "small", "gpu", "runtime")
RELEASES = ("1.33", "1.35", "1.37")
IN_PLACE_SINCE = "1.34"


def invalid(manifest: Manifest, release: str) -> list[str]:
    """Return why an API server of this release refuses an object."""
    if manifest["kind"] in SCHEMAS:
        validator = jsonschema.Draft202012Validator(SCHEMAS[manifest["kind"]])
        errors = [it.message for it in validator.iter_errors(manifest)]
        if errors:
            return errors
        parts = [*jobs_of(manifest), *_trainers(manifest)]
        return [it for part in parts for it in (*invalid(part, release), *conflicts(part))]
    try:
        kubernetes_validate.validate(manifest, release, strict=True)
    except kubernetes_validate.utils.ValidationError as error:
        return [error.message]
    return []


def jobs_of(manifest: Manifest) -> Iterator[Manifest]:
    """Yield the Jobs that a custom resource has templates of."""
    spec = manifest["spec"]
    if manifest["kind"] == "ClusterTrainingRuntime":
        spec = spec["template"]["spec"]
    for replicated in spec.get("replicatedJobs", ()):
        template = replicated["template"]
        metadata = {"name": replicated["name"], **template.get("metadata", {})}
        yield {
            "apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": template["spec"]
        }  # fmt: skip


def _trainers(manifest: Manifest) -> Iterator[Manifest]:
    """Yield a pod with the environment that a TrainJob gives."""
    if manifest["kind"] == "TrainJob":
        container = {"name": "node", "env": manifest["spec"]["trainer"].get("env", [])}
        yield {
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "trainer"},
            "spec": {"containers": [container]},
        }  # fmt: skip


def conflicts(job: Manifest) -> list[str]:
    """Return the rules between fields of a Job that it breaks; an API server has them in code."""
    if job["kind"] != "Job":
        return []
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    indexed, never = spec.get("completionMode") == "Indexed", pod["restartPolicy"] == "Never"
    rules = {
        "podFailurePolicy needs restartPolicy Never": "podFailurePolicy" not in spec or never,
        "podFailurePolicy needs podReplacementPolicy Failed": "podFailurePolicy" not in spec
        or spec.get("podReplacementPolicy", "Failed") == "Failed",
        "backoffLimitPerIndex needs Indexed and Never": "backoffLimitPerIndex" not in spec
        or (indexed and never),
        "successPolicy needs Indexed": "successPolicy" not in spec or indexed,
        "parallelism and completions are changed together": spec.get("parallelism")
        == spec.get("completions"),
        "restartPolicyRules need the container's restartPolicy": all(
            "restartPolicy" in it or "restartPolicyRules" not in it for it in pod["containers"]
        ),
        "no init container is a sidecar": all(
            it.get("restartPolicy") == "Always" for it in pod.get("initContainers", ())
        ),
        "a mount has no volume": {
            mount["name"]
            for it in (*pod["containers"], *pod.get("initContainers", ()))
            for mount in it.get("volumeMounts", ())
        }
        <= {it["name"] for it in pod.get("volumes", ())},
    }
    return [rule for rule, holds in rules.items() if not holds]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("folder", FOLDERS)
def test_objects_of_every_folder_are_valid(folder: str, release: str) -> None:
    if folder == "gpu" and release < IN_PLACE_SINCE:
        pytest.skip("restartPolicyRules are newer")
    manifests = rendered(MANIFESTS / folder)
    assert {it["metadata"]["name"]: invalid(it, release) for it in manifests} == {
        it["metadata"]["name"]: [] for it in manifests
    }


def test_train_job_is_valid() -> None:
    train_job = yaml.safe_load((MANIFESTS / "runtime" / "train-job.yaml").read_text())
    assert invalid(train_job, RELEASES[-1]) == []


JOB = "spec/replicatedJobs/0/template/spec"
POD = f"{JOB}/template/spec"
RUNTIME_JOB = "spec/template/spec/replicatedJobs/0/template/spec"


@pytest.mark.parametrize(
    ("folder", "kind", "path", "value", "complaint"),
    [
        ("job", "JobSet", "spec/replicatedJobz", [], "replicatedJobz"),
        ("job", "JobSet", "spec/failurePolicy", {"maxRestart": 3}, "maxRestart"),
        ("job", "JobSet", f"{JOB}/parallelism", "four", "four"),
        ("job", "JobSet", f"{JOB}/backoffLimitPerIndx", 3, "backoffLimitPerIndx"),
        ("job", "JobSet", f"{POD}/containers/0/imag", "x", "imag"),
        ("job", "JobSet", f"{POD}/restartPolicy", "OnFailure", "needs restartPolicy Never"),
        ("job", "JobSet", f"{JOB}/completionMode", "NonIndexed", "needs Indexed"),
        ("job", "JobSet", f"{JOB}/podReplacementPolicy", "TerminatingOrFailed", "Failed"),
        ("job", "JobSet", f"{JOB}/completions", 5, "changed together"),
        ("job", "JobSet", f"{POD}/volumes", [], "a mount has no volume"),
        ("job", "JobSet", f"{POD}/initContainers/0/restartPolicy", "Never", "sidecar"),
        ("gpu", "JobSet", f"{POD}/containers/0/restartPolicy", None, "container's restartPolicy"),
        ("job", "Deployment", "spec/replica", 1, "replica"),
        ("etcd", "StatefulSet", "spec/serviceNam", "etcd", "serviceNam"),
        ("etcd", "Certificate", "spec/dnsName", [], "dnsName"),
        ("etcd", "Issuer", "spec/acme", {}, "acme"),
        ("runtime", "ClusterTrainingRuntime", "spec/mlPolicy/torch", {"numProcPerNode": 1}, "num"),
        ("runtime", "ClusterTrainingRuntime", f"{RUNTIME_JOB}/suspended", True, "suspended"),
    ],
)
def test_what_an_api_server_refuses_is_found(
    folder: str, kind: str, path: str, value: Any, complaint: str
) -> None:
    manifest = next(it for it in rendered(MANIFESTS / folder) if it["kind"] == kind)
    assert invalid(manifest, RELEASES[-1]) == []
    *parents, last = path.split("/")
    place: Any = manifest
    for part in parents:
        place = place[int(part)] if part.isdigit() else place[part]
    if value is None:
        del place[last]
    else:
        place[last] = value
    assert complaint in " ".join(invalid(manifest, RELEASES[-1]))


def test_invalid_train_job_is_found() -> None:
    train_job = yaml.safe_load((MANIFESTS / "runtime" / "train-job.yaml").read_text())
    for name, value in (("numNode", 2), ("env", [{"name": "A", "valu": "b"}])):
        changed = copy.deepcopy(train_job)
        changed["spec"]["trainer"][name] = value
        assert invalid(changed, RELEASES[-1]) != []


def _pod(folder: str, kind: str) -> Manifest:
    manifest = only(rendered(MANIFESTS / folder), kind)
    (job,) = jobs_of(manifest)
    pod: Manifest = job["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize(
    ("folder", "kind"),
    [("job", "JobSet"), ("gpu", "JobSet"), ("runtime", "ClusterTrainingRuntime")],
)
def test_pods_get_more_time_than_the_agent_and_memory_for_what_it_holds(
    folder: str, kind: str
) -> None:
    pod = _pod(folder, kind)
    command = " ".join(pod["containers"][0]["command"])
    match = re.search(r"--grace=(\d+)", command)
    assert match is not None
    assert pod["terminationGracePeriodSeconds"] >= int(match[1]) + 15
    volumes = {it["name"]: it for it in pod["volumes"]}
    shared = volumes["shared-memory"]["emptyDir"]
    assert shared["medium"] == "Memory"
    assert _gib(shared["sizeLimit"]) < _gib(pod["containers"][0]["resources"]["limits"]["memory"])
    # The image's user reads the key by its group.
    assert volumes["etcd"]["secret"]["defaultMode"] & 0o040
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]


def _gib(quantity: str) -> float:
    return int(quantity.removesuffix("Gi"))


def test_runtimes_pods_are_those_of_the_jobset_but_for_what_the_trainer_sets() -> None:
    ours, trainers = _pod("job", "JobSet"), _pod("runtime", "ClusterTrainingRuntime")
    node, other = ours["containers"][0], trainers["containers"][0]
    differing = set(node["command"]) ^ set(other["command"])
    assert differing == {
        "--nnodes=$(MIN_NODES):$(MAX_NODES)",
        "--nproc-per-node=$(WORKERS)",
        "--nnodes=$(MIN_NODES):$(PET_NNODES)",
    }
    by_name = {it["name"]: it for it in other["env"]}
    assert (
        by_name.pop("STORE")["value"]
        == only(rendered(MANIFESTS / "job"), "ConfigMap", "run7")["data"]["STORE"]
    )
    by_name.pop("MIN_NODES")
    assert list(by_name.values()) == node["env"]
    for pod in (ours, trainers):
        container, sidecar = pod["containers"][0], pod["initContainers"][0]
        for name in ("command", "env", "envFrom", "image"):
            container.pop(name, None)
        del sidecar["image"]
        sidecar["env"][-1]["valueFrom"]["secretKeyRef"].pop("name")
        del pod["topologySpreadConstraints"][0]["labelSelector"]
    assert ours == trainers


def test_monitors_are_asked_at_the_host_names_of_the_pods() -> None:
    for folder in ("job", "gpu"):
        manifests = rendered(MANIFESTS / folder)
        jobset, config = only(manifests, "JobSet"), only(manifests, "ConfigMap", "run7-monitors")
        name = jobset["metadata"]["name"]
        (replicated,) = jobset["spec"]["replicatedJobs"]
        urls = config["data"]["monitors"].split()
        assert len(urls) >= replicated["template"]["spec"]["completions"]
        assert urls == [
            f"http://{name}-{replicated['name']}-0-{index}.{name}:8433"
            for index in range(len(urls))
        ]


def test_variables_are_resolved_as_the_kubelet_does() -> None:
    pod = Identity(
        name="run7-node-0-1-abcde", hostname="run7-node-0-1", machine="m2", ip="10.0.0.7",
        labels={"a.b/c": "label"}, annotations={"d": "annotation"},
    )  # fmt: skip
    objects = {("ConfigMap", "c"): {"A": "1", "B": "2"}, ("Secret", "s"): {"k": "hidden"}}
    container = {
        "envFrom": [{"configMapRef": {"name": "c"}}],
        "env": [
            {"name": "B", "value": "own $(A) $(LATER) $$(A)"},
            {"name": "LATER", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {
                "name": "L",
                "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['a.b/c']"}},
            },
            {
                "name": "K",
                "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}},
            },
        ],
        "command": ["run", "--at=$(LATER)"],
        "args": ["$(UNKNOWN)", "$(K)"],
    }
    variables = environment(container, pod, objects)
    assert variables == {
        "A": "1", "B": "own 1 $(LATER) $(A)", "LATER": "10.0.0.7", "L": "label", "K": "hidden"
    }  # fmt: skip
    assert command_line(container, variables) == ["run", "--at=10.0.0.7", "$(UNKNOWN)", "hidden"]
    assert expanded("$(A)$(A)", variables) == "11"
    container["env"].append(
        {"name": "N", "valueFrom": {"configMapKeyRef": {"name": "none", "key": "k"}}}
    )
    with pytest.raises(KeyError):
        environment(container, pod, objects)


def test_killed_containers_are_restarted_in_place_only_with_that_component(tmp_path: Path) -> None:
    pod = _pod("job", "JobSet")
    (in_place,) = jobs_of(only(overlay(tmp_path / "overlay", components=["in-place"]), "JobSet"))
    other = in_place["spec"]["template"]["spec"]
    for code, expected in ((137, True), (139, True), (1, False), (143, False), (0, False)):
        assert not restarts_in_place(pod, pod["containers"][0], code)
        assert restarts_in_place(other, other["containers"][0], code) is expected
        assert restarts_in_place(pod, pod["initContainers"][0], code)


def test_pods_that_were_evicted_or_have_left_count_as_no_failure() -> None:
    (job,) = jobs_of(only(rendered(MANIFESTS / "job"), "JobSet"))
    assert not counts_as_failure(job["spec"], {"node": 137}, is_disrupted=True)
    assert not counts_as_failure(job["spec"], {"node": 143}, is_disrupted=False)
    for code in (137, 1):
        assert counts_as_failure(job["spec"], {"node": code}, is_disrupted=False)


def test_trainer_makes_a_jobset_of_the_runtime_and_the_train_job() -> None:
    runtime = only(rendered(MANIFESTS / "runtime"), "ClusterTrainingRuntime")
    train_job = yaml.safe_load((MANIFESTS / "runtime" / "train-job.yaml").read_text())
    jobset = jobset_of(train_job, runtime)
    assert invalid({"apiVersion": "jobset.x-k8s.io/v1alpha2", **jobset}, RELEASES[-1]) == []
    (job,) = jobs_of(jobset)
    container = job["spec"]["template"]["spec"]["containers"][0]
    pod = Identity(name="p", hostname="h", machine="m", ip="i")
    variables = environment(container, pod, {})
    line = shlex.join(command_line(container, variables))
    assert "--nnodes=1:2" in line
    assert line.endswith("train.py --steps=2000")
    assert variables["PET_NPROC_PER_NODE"] == "1"
