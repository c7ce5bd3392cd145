"""Renders manifests, and resolves what containers are given, as the kubelet does."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]
JOBSET = "jobset.sigs.k8s.io"
INDEX = "batch.kubernetes.io/job-completion-index"


def kubectl() -> str | None:
    """Return the path of kubectl: this environment's, else the machine's."""
    own = Path(sys.executable).parent
    return shutil.which("kubectl", path=str(own)) or shutil.which("kubectl")


def rendered(directory: Path) -> list[Manifest]:
    """Return the objects of a kustomization, which kubectl renders without a cluster."""
    program = kubectl()
    assert program is not None, "kubectl is not installed"
    text = subprocess.run(
        [program, "kustomize", str(directory)], check=True, capture_output=True, text=True
    ).stdout
    return list(yaml.safe_load_all(text))


def only(manifests: Iterable[Manifest], kind: str, name: str | None = None) -> Manifest:
    """Return the one object of a kind, or of a kind and name."""
    (found,) = (
        it for it in manifests if it["kind"] == kind and name in (None, it["metadata"]["name"])
    )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The fields of a running pod that its containers can ask for."""

    name: str
    hostname: str
    subdomain: str = ""
    machine: str
    ip: str
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """Replace `$(NAME)`; `$$` is a dollar, and a name that there is not stays as it is."""

    def replace(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)", replace, text)


def environment(
    container: Manifest, pod: Identity, objects: Mapping[tuple[str, str], Mapping[str, str]]
) -> dict[str, str]:
    """Return a container's variables.

    Args:
        container: its specification.
        pod: what the downward API tells.
        objects: the data of ConfigMaps and Secrets, by kind and name.

    Raises:
        KeyError: an object, a key or a field does not exist; the kubelet would not start it.
    """
    variables: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        kind = "ConfigMap" if "configMapRef" in source else "Secret"
        reference = source["configMapRef" if kind == "ConfigMap" else "secretRef"]
        variables |= objects[kind, reference["name"]]
    for entry in container.get("env", ()):
        if "valueFrom" in entry:
            variables[entry["name"]] = _value(entry["valueFrom"], pod, objects)
        else:
            variables[entry["name"]] = expanded(entry.get("value", ""), variables)
    return variables


def _value(
    source: Manifest, pod: Identity, objects: Mapping[tuple[str, str], Mapping[str, str]]
) -> str:
    ((kind, reference),) = source.items()
    if kind == "configMapKeyRef":
        return objects["ConfigMap", reference["name"]][reference["key"]]
    if kind == "secretKeyRef":
        return objects["Secret", reference["name"]][reference["key"]]
    assert kind == "fieldRef", f"{kind} is not known here"
    path = reference["fieldPath"]
    plain = {
        "metadata.name": pod.name,
        "metadata.namespace": "default",
        "spec.nodeName": pod.machine,
        "status.podIP": pod.ip,
    }
    if path in plain:
        return plain[path]
    match = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path)
    assert match is not None, f"fieldPath {path} is not known here"
    return (pod.labels if match[1] == "labels" else pod.annotations).get(match[2], "")


def command_line(container: Manifest, variables: Mapping[str, str]) -> list[str]:
    """Return the command and the arguments of a container, with its variables in them."""
    parts = [*container["command"], *container.get("args", ())]
    return [expanded(part, variables) for part in parts]


def restarts_in_place(pod: Manifest, container: Manifest, code: int) -> bool:
    """Return whether the kubelet starts a container again that has exited with this status."""
    for rule in container.get("restartPolicyRules", ()):
        codes, is_in = rule["exitCodes"]["values"], rule["exitCodes"]["operator"] == "In"
        if (code in codes) == is_in:
            return bool(rule["action"] == "Restart")
    policy = container.get("restartPolicy") or pod.get("restartPolicy", "Always")
    return policy == "Always" or (policy == "OnFailure" and code != 0)


def counts_as_failure(job: Manifest, codes: Mapping[str, int], is_disrupted: bool) -> bool:
    """Return whether a failed pod counts towards the limits of its Job.

    Args:
        job: specification of the Job.
        codes: exit status of each container.
        is_disrupted: the pod has the condition DisruptionTarget.

    Raises:
        AssertionError: the policy has what is not known here.
    """
    for rule in job.get("podFailurePolicy", {}).get("rules", ()):
        if conditions := rule.get("onPodConditions"):
            assert [it["type"] for it in conditions] == ["DisruptionTarget"]
            matches = is_disrupted
        else:
            names = rule["onExitCodes"]
            concerned = [
                code
                for name, code in codes.items()
                if code and names.get("containerName", name) == name
            ]
            is_in = names["operator"] == "In"
            matches = any((code in names["values"]) == is_in for code in concerned)
        if matches:
            assert rule["action"] in ("Ignore", "Count")
            return bool(rule["action"] == "Count")
    return True


def jobset_of(train_job: Manifest, runtime: Manifest) -> Manifest:
    """Return the JobSet that Kubeflow's trainer makes of a TrainJob, for its torch policy."""
    name, trainer = train_job["metadata"]["name"], train_job["spec"].get("trainer", {})
    assert train_job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    spec = copy.deepcopy(runtime["spec"]["template"]["spec"])
    (replicated,) = (
        job
        for job in spec["replicatedJobs"]
        if job["template"]
        .get("metadata", {})
        .get("labels", {})
        .get("trainer.kubeflow.org/trainjob-ancestor-step")
        == "trainer"
    )
    nodes = trainer.get("numNodes", runtime["spec"]["mlPolicy"]["numNodes"])
    job = replicated["template"]["spec"]
    job |= {"parallelism": nodes, "completions": nodes, "completionMode": "Indexed"}
    (container,) = (it for it in job["template"]["spec"]["containers"] if it["name"] == "node")
    container |= {key: trainer[key] for key in ("image", "command", "args") if key in trainer}
    reserved = [
        {"name": "PET_NNODES", "value": str(nodes)},
        {"name": "PET_NPROC_PER_NODE", "value": str(trainer.get("numProcPerNode", 1))},
        {
            "name": "PET_NODE_RANK",
            "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}},
        },
        {"name": "PET_MASTER_ADDR", "value": f"{name}-node-0-0.{name}"},
        {"name": "PET_MASTER_PORT", "value": "29500"},
    ]
    container["env"] = merged(merged(container.get("env", []), trainer.get("env", [])), reserved)
    metadata = {"name": name}
    return {"kind": "JobSet", "metadata": metadata, "spec": spec}


def merged(base: Sequence[Manifest], changes: Sequence[Manifest]) -> list[Manifest]:
    """Return variables in their order, with the changed ones in place and the new ones after."""
    by_name = {it["name"]: it for it in base} | {it["name"]: it for it in changes}
    return list(by_name.values())
