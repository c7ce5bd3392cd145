"""Claims about the lines in docs/kubernetes.md: kubectl takes them, and they lead somewhere.

There is no server: kubectl parses each line and then cannot connect. What a line would create is
made without one, and checked as an API server would.
"""

import copy
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from ops.local_kubernetes.manifests import Manifest, kubectl, only, rendered
from ops.local_kubernetes.trial import MANIFESTS, ROOT
from tests.adaptive_timeouts import patient
from tests.integration.clusters.test_kubernetes_manifests import (
    RELEASES,
    conflicts,
    invalid,
    jobs_of,
)

GUIDE = (ROOT / "docs" / "kubernetes.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
LINES = [line for language, block in BLOCKS if not language for line in block.splitlines()]
KUBECTL = [line.replace("$(openssl rand -hex 32)", "f" * 64) for line in LINES if "kubectl" in line]

pytestmark = pytest.mark.skipif(kubectl() is None, reason="kubectl is not installed")


def run(line: str, *options: str) -> subprocess.CompletedProcess[str]:
    program, *arguments = shlex.split(line)
    assert program == "kubectl"
    # Before the command of `kubectl exec`, which is its own.
    place = arguments.index("--") if "--" in arguments else len(arguments)
    command = [kubectl() or "", *arguments[:place], *options, *arguments[place:]]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=patient(60)
    )


def test_every_line_is_kubectls_or_builds_the_image() -> None:
    assert [line for line in LINES if not line.startswith(("kubectl ", "podman "))] == []
    container = (MANIFESTS / "Containerfile").read_text()
    build, push = (line for line in LINES if line.startswith("podman "))
    assert "-f ops/kubernetes/Containerfile" in build
    name = build.split()[-2]
    assert push.split()[-1] == name
    assert f"FROM {name}" in GUIDE
    (image,) = yaml.safe_load((MANIFESTS / "small" / "kustomization.yaml").read_text())["images"]
    assert image["newName"] == name
    lines = re.findall("^COPY (?:--chown=1000:1000 )?(.*) /", container, re.M)
    copied = [name for line in lines for name in line.split()]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    assert {"pyproject.toml", "keepstep", "checkpoint", "elastic", "monitor"} <= set(copied)


@pytest.mark.parametrize("line", KUBECTL)
def test_kubectl_takes_the_line_and_would_send_it_to_the_server(line: str) -> None:
    done = run(line, "--server=http://127.0.0.1:9")
    assert done.returncode == 1
    assert re.search("refused|connect", done.stderr), done.stderr


def test_line_that_kubectl_does_not_take_is_found() -> None:
    assert (
        "unknown flag" in run("kubectl apply --kustomise x", "--server=http://127.0.0.1:9").stderr
    )


def test_lines_apply_what_there_is_and_is_valid() -> None:
    applied = [re.search(r"(apply|delete) -([kf]) (\S+)", line) for line in KUBECTL]
    found = {(match[2], match[3]) for match in applied if match}
    assert {path.rpartition("/")[2] for _, path in found} == {
        "etcd", "small", "runtime", "train-job.yaml"
    }  # fmt: skip
    for kind, path in found:
        manifests = (
            rendered(ROOT / path) if kind == "k" else [yaml.safe_load((ROOT / path).read_text())]
        )
        assert [invalid(it, RELEASES[-1]) for it in manifests] == [[]] * len(manifests)


def test_secrets_that_lines_create_are_those_that_pods_ask_for() -> None:
    created = set()
    for line in KUBECTL:
        if "create secret" in line:
            secret = yaml.safe_load(run(line, "--dry-run=client", "--output=yaml").stdout)
            assert invalid(secret, RELEASES[-1]) == []
            created |= {(secret["metadata"]["name"], key) for key in secret["data"]}
    asked = {
        (match[2], match[1])
        for folder in ("small", "runtime")
        for match in re.finditer(
            r"secretKeyRef:\n +key: (\S+)\n +name: (\S+)",
            yaml.dump_all(rendered(MANIFESTS / folder)),
        )
    }
    assert created == asked == {("run7", "secret"), ("keepstep", "secret")}


def test_names_in_the_lines_are_those_of_the_objects() -> None:
    small, etcd = rendered(MANIFESTS / "small"), rendered(MANIFESTS / "etcd")
    jobset = only(small, "JobSet")
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = f"job/{jobset['metadata']['name']}-{replicated['name']}-0"
    containers = replicated["template"]["spec"]["template"]["spec"]["containers"]
    text = "\n".join(KUBECTL)
    assert set(re.findall(r"job/\S+", text)) == {job}
    assert set(re.findall(r"--container (\S+)", text)) == {it["name"] for it in containers}
    assert only(small, "Deployment", *re.findall(r"deployment/(\S+)", text))
    assert only(small, "Service", *re.findall(r"service/(\S+)", text))
    assert only(etcd, "StatefulSet", *re.findall(r"statefulset/(\S+)", text))


def test_patch_of_the_size_keeps_the_job_valid() -> None:
    (line,) = (line for line in KUBECTL if line.startswith("kubectl patch"))
    patch = json.loads(shlex.split(line)[-1])
    (job,) = jobs_of(only(rendered(MANIFESTS / "small"), "JobSet"))
    changed = copy.deepcopy(job)
    changed["spec"] |= patch["spec"]
    assert changed != job
    assert [*invalid(changed, RELEASES[-1]), *conflicts(changed)] == []
    assert conflicts({**job, "spec": {**job["spec"], "parallelism": 4}}) != []


def test_overlay_of_the_guide_gives_its_script_and_numbers(tmp_path: Path) -> None:
    (text,) = (block for language, block in BLOCKS if language == "yaml")
    overlay = MANIFESTS / "small" / "kustomization.yaml"
    assert yaml.safe_load(overlay.read_text())["resources"] == ["../job"]
    copied = tmp_path / "kubernetes"
    for name in ("job", "mine"):
        (copied / name).mkdir(parents=True)
    for path in (MANIFESTS / "job").iterdir():
        (copied / "job" / path.name).write_bytes(path.read_bytes())
    (copied / "mine" / "kustomization.yaml").write_text(text)
    manifests = rendered(copied / "mine")
    assert [invalid(it, RELEASES[-1]) for it in manifests] == [[]] * len(manifests)
    data: Manifest = only(manifests, "ConfigMap", "run7")["data"]
    assert (data["MIN_NODES"], data["MAX_NODES"], data["WORKERS"]) == ("2", "16", "4")
    assert "STORE" in data
    (job,) = jobs_of(only(manifests, "JobSet"))
    assert job["spec"]["template"]["spec"]["containers"][0]["args"][0] == "train.py"
