"""Acts as the controllers and the kubelet of a small cluster, whose machines are names."""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from ops.local_kubernetes.manifests import (
    INDEX,
    JOBSET,
    Identity,
    Manifest,
    counts_as_failure,
    restarts_in_place,
)
from ops.local_kubernetes.pods import Container, Image, Network, Sandbox

_TICK_S = 0.02


class Pod:
    """A pod: its containers are started in order, restarted and ended as the kubelet does.

    Attributes:
        phase: Running, Succeeded or Failed.
        codes: exit status of each container that has ended for good.
        is_disrupted: it was evicted, or its machine was lost.
    """

    def __init__(
        self,
        specification: Manifest,
        identity: Identity,
        sandbox: Sandbox,
        volumes: Mapping[str, Path],
        start: Callable[[Pod, Manifest, int], Container],
    ) -> None:
        self.specification = specification
        self.identity = identity
        self.phase = "Running"
        self.codes: dict[str, int] = {}
        self.restarts: Counter[str] = Counter()
        self.is_disrupted = False
        self.sandbox = sandbox
        self.volumes = volumes
        self._start = start
        self._kill_at_s: float | None = None
        self._sidecars = [it["name"] for it in specification.get("initContainers", ())]
        self._specifications = {
            it["name"]: it
            for it in (*specification.get("initContainers", ()), *specification["containers"])
        }
        assert all(
            self._specifications[name].get("restartPolicy") == "Always" for name in self._sidecars
        ), "of init containers only sidecars are known here"
        self.containers = {name: start(self, it, 0) for name, it in self._specifications.items()}

    @property
    def is_terminating(self) -> bool:
        return self._kill_at_s is not None

    @property
    def _mains(self) -> list[str]:
        return [name for name in self.containers if name not in self._sidecars]

    def terminate(self) -> None:
        """Send SIGTERM to its containers; what has not ended after the grace period is killed."""
        if self.phase == "Running" and not self.is_terminating:
            grace_s = self.specification.get("terminationGracePeriodSeconds", 30)
            self._kill_at_s = time.monotonic() + grace_s
            for name in self._mains:
                self.containers[name].send(signal.SIGTERM)

    def lose(self) -> None:
        """End it as when its machine loses power."""
        self.is_disrupted = True
        self.sandbox.close()
        self._end("Failed")

    def update(self) -> None:
        """Note which containers have ended, and restart or kill what is to be."""
        if self.phase != "Running":
            return
        if self._kill_at_s is not None and time.monotonic() > self._kill_at_s:
            for container in self.containers.values():
                container.kill()
        for name, container in self.containers.items():
            code = container.exit_code()
            if code is None or name in self.codes:
                continue
            specification = self._specifications[name]
            if not self.is_terminating and restarts_in_place(
                self.specification, specification, code
            ):
                self.restarts[name] += 1
                self.containers[name] = self._start(self, specification, self.restarts[name])
            else:
                container.kill()
                self.codes[name] = code
        if all(name in self.codes for name in self._mains):
            # Sidecars end after the containers that they serve.
            for name in self._sidecars:
                self.containers[name].kill()
            failed = any(self.codes[name] for name in self._mains)
            self.sandbox.close()
            self._end("Failed" if failed else "Succeeded")

    def _end(self, phase: str) -> None:
        for container in self.containers.values():
            container.kill()
        self.phase = phase
        for name, path in self.volumes.items():
            if name in {it["name"] for it in self.specification["volumes"] if "emptyDir" in it}:
                shutil.rmtree(path, ignore_errors=True)


@dataclass
class Workload:
    """Keeps pods of one kind: an Indexed Job, a StatefulSet or a Deployment.

    Args:
        name: of the object.
        template: specification of its pods.
        size: how many there are to be.
        hostname: of the pod with an index.
        subdomain: the headless Service's name.
        labels: of its pods.
        job: specification of the Job; None for what never completes.
        service: name of a Service that leads to its pod.
    """

    name: str
    template: Manifest
    size: int
    hostname: Callable[[int], str]
    subdomain: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    job: Manifest | None = None
    service: str = ""
    pods: dict[int, Pod] = field(default_factory=dict)
    failures: Counter[int] = field(default_factory=Counter)
    succeeded: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    may_start_at_s: dict[int, float] = field(default_factory=dict)
    result: str | None = None


class Cluster:
    """A cluster, from the beginning of the context to its end.

    Args:
        directory: for layers, volumes and logs.
        image: what all containers find.
        machines: how many there are.
        backoff_s: seconds until a failed pod is replaced; 10 in Kubernetes.
    """

    def __init__(
        self, directory: Path, image: Image, *, machines: int = 4, backoff_s: float = 0.5
    ) -> None:
        self.objects: dict[tuple[str, str], dict[str, str]] = {}
        self.workloads: dict[str, Workload] = {}
        self.machines = [f"machine-{number}" for number in range(machines)]
        self.cordoned: set[str] = set()
        self._directory = directory
        self._image = image
        self._backoff_s = backoff_s
        self._numbers = itertools.count()
        self._lock = threading.RLock()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._reconcile, name="controllers")
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        self._directory.mkdir(parents=True, exist_ok=True)
        # Where emptyDir volumes of the medium Memory are.
        self._memory = Path(tempfile.mkdtemp(prefix="keepstep-cluster-", dir="/dev/shm"))
        self._memory.chmod(0o755)
        self._network = Network(self._directory)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_closing.set()
        self._thread.join()
        self._network.close()
        shutil.rmtree(self._memory, ignore_errors=True)
        if error is not None:
            error.add_note(self.output())

    def create_secret(self, name: str, data: Mapping[str, str]) -> None:
        """Create a Secret, as `kubectl create secret generic` does."""
        self.objects["Secret", name] = dict(data)

    def apply(self, manifests: Iterable[Manifest]) -> None:
        """Create the objects; those that are known elsewhere only, such as a budget, are left."""
        with self._lock:
            for manifest in manifests:
                name, kind = manifest["metadata"]["name"], manifest["kind"]
                if kind == "ConfigMap":
                    self.objects[kind, name] = manifest["data"]
                elif kind in ("StatefulSet", "Deployment"):
                    self._apply_service_pods(name, kind, manifest["spec"])
                elif kind == "JobSet":
                    self._apply_jobset(name, manifest["spec"])

    def _apply_service_pods(self, name: str, kind: str, spec: Manifest) -> None:
        is_set = kind == "StatefulSet"
        suffix = secrets.token_hex(3)
        template = spec["template"]["spec"]
        claims = [
            {"name": it["metadata"]["name"], "claim": True}
            for it in spec.get("volumeClaimTemplates", ())
        ]
        self.workloads[name] = Workload(
            name=name,
            template={**template, "volumes": [*template["volumes"], *claims]},
            size=spec.get("replicas", 1),
            hostname=lambda index: f"{name}-{index}" if is_set else f"{name}-{suffix}",
            subdomain=spec.get("serviceName", ""),
            service="" if is_set else name,
        )

    def _apply_jobset(self, name: str, spec: Manifest) -> None:
        for replicated in spec["replicatedJobs"]:
            assert replicated.get("replicas", 1) == 1, "one Job of each kind is known here"
            job = replicated["template"]["spec"]
            own = f"{name}-{replicated['name']}-0"
            labels = {
                f"{JOBSET}/jobset-name": name,
                f"{JOBSET}/replicatedjob-name": replicated["name"],
                f"{JOBSET}/job-index": "0",
            }
            self.workloads[own] = Workload(
                name=own,
                template=job["template"]["spec"],
                size=min(job["parallelism"], job["completions"]),
                hostname=lambda index, own=own: f"{own}-{index}",  # type: ignore[misc]
                subdomain=name,
                labels=labels,
                job=job,
            )

    def pod(self, workload: str, index: int) -> Pod:
        """Return the newest pod with an index."""
        with self._lock:
            return self.workloads[workload].pods[index]

    def scale(self, workload: str, size: int) -> None:
        """Set how many pods there are, as a patch of parallelism and completions does."""
        with self._lock:
            self.workloads[workload].size = size

    def kill_container(self, pod: Pod, name: str) -> None:
        """Kill all processes of a container, as the kernel does when its memory is used up."""
        with self._lock:
            pod.containers[name].kill()

    def drain(self, machine: str) -> None:
        """Evict the pods of a machine, which gets no others, as `kubectl drain` does."""
        with self._lock:
            self.cordoned.add(machine)
            for pod in self._running(machine):
                pod.is_disrupted = True
                pod.terminate()

    def lose(self, machine: str) -> None:
        """Take a machine's power; its pods are gone, and others take their places."""
        with self._lock:
            self.cordoned.add(machine)
            for pod in self._running(machine):
                pod.lose()

    def execute(self, pod: Pod, container: str, *command: str) -> str:
        """Return what a command prints in a container, as `kubectl exec` does."""
        running = pod.containers[container].execute(command)
        output, _ = running.communicate(timeout=120)
        if running.returncode:
            raise subprocess.CalledProcessError(running.returncode, command, output)
        return output

    def wait_until(self, condition: Callable[[], object], timeout_s: float) -> None:
        """Wait until a condition holds.

        Raises:
            TimeoutError: it did not in time.
        """
        until_s = time.monotonic() + timeout_s
        while not condition():
            if self._error is not None:
                raise RuntimeError("the controllers have failed") from self._error
            if time.monotonic() > until_s:
                raise TimeoutError(f"not within {timeout_s:.0f} s")
            time.sleep(_TICK_S)

    def output(self) -> str:
        """Return the end of every container's output."""
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-6000:]}"
            for path in sorted(self._directory.glob("logs/*.log"), key=os.path.getmtime)
        )

    def _running(self, machine: str) -> Iterator[Pod]:
        for workload in self.workloads.values():
            for pod in workload.pods.values():
                if pod.phase == "Running" and pod.identity.machine == machine:
                    yield pod

    def _reconcile(self) -> None:
        try:
            while not self._is_closing.wait(_TICK_S):
                with self._lock:
                    for workload in self.workloads.values():
                        self._keep(workload)
        except BaseException as error:  # noqa: BLE001 - `wait_until` raises it in the test
            self._error = error
        finally:
            # Here, for processes end with the thread that has started them.
            for workload in self.workloads.values():
                for pod in workload.pods.values():
                    if pod.phase == "Running":
                        pod.lose()

    def _keep(self, workload: Workload) -> None:
        for index, pod in workload.pods.items():
            was_running = pod.phase == "Running"
            pod.update()
            if was_running and pod.phase != "Running":
                self._note_end(workload, index, pod)
            if index >= workload.size or workload.result is not None:
                pod.terminate()
        if workload.result is not None:
            return
        now_s = time.monotonic()
        for index in range(workload.size):
            current = workload.pods.get(index)
            # `podReplacementPolicy: Failed`: not before its predecessor has ended.
            is_needed = current is None or current.phase != "Running"
            if (
                is_needed
                and index not in workload.succeeded | workload.failed
                and now_s >= workload.may_start_at_s.get(index, 0.0)
            ):
                workload.pods[index] = self._start(workload, index)

    def _note_end(self, workload: Workload, index: int, pod: Pod) -> None:
        workload.may_start_at_s[index] = time.monotonic() + self._backoff_s
        if workload.job is None or index >= workload.size:
            return
        if pod.phase == "Succeeded":
            workload.succeeded.add(index)
        elif counts_as_failure(workload.job, pod.codes, pod.is_disrupted):
            workload.failures[index] += 1
            if workload.failures[index] > workload.job["backoffLimitPerIndex"]:
                workload.failed.add(index)
        needed = workload.size
        for rule in workload.job.get("successPolicy", {}).get("rules", ()):
            needed = min(needed, rule["succeededCount"])
        if len(workload.succeeded) >= needed:
            workload.result = "Complete"
        elif len(workload.succeeded | workload.failed) >= workload.size:
            workload.result = "Failed"

    def _start(self, workload: Workload, index: int) -> Pod:
        hostname = workload.hostname(index)
        is_job = workload.job is not None
        name = f"{hostname}-{secrets.token_hex(3)[:5]}" if is_job else hostname
        sandbox = Sandbox(hostname, self._network)
        identity = Identity(
            name=name,
            hostname=hostname,
            subdomain=workload.subdomain,
            machine=self._machine(),
            ip=sandbox.ip,
            labels={**workload.labels, INDEX: str(index)},
            annotations={INDEX: str(index)},
        )
        names = [workload.service] if workload.service else []
        if workload.subdomain:
            short = f"{hostname}.{workload.subdomain}"
            names += [short, f"{short}.default.svc.cluster.local"]
        self._network.name(sandbox.ip, hostname, *names)
        volumes = {
            volume["name"]: self._volume(volume, name, workload.template)
            for volume in workload.template.get("volumes", ())
        }
        template = workload.template
        if is_job:
            extra = {"name": "JOB_COMPLETION_INDEX", "value": str(index)}
            containers = [
                {**it, "env": [*it.get("env", ()), extra]} for it in template["containers"]
            ]
            template = {**template, "containers": containers}
        return Pod(template, identity, sandbox, volumes, self._start_container)

    def _start_container(self, pod: Pod, specification: Manifest, number: int) -> Container:
        run = f"{pod.identity.name}.{specification['name']}.{number}"
        logs = self._directory / "logs"
        logs.mkdir(exist_ok=True)
        return Container(
            pod.specification,
            specification,
            pod.identity,
            pod.sandbox,
            self.objects,
            pod.volumes,
            self._image,
            self._network,
            self._directory / "layers" / f"{next(self._numbers)}",
            logs / f"{run}.log",
        )

    def _machine(self) -> str:
        """Return the machine with the fewest pods, as a spread over host names asks for."""
        usable = [name for name in self.machines if name not in self.cordoned]
        return min(usable, key=lambda name: sum(1 for _ in self._running(name)))

    def _volume(self, volume: Manifest, pod: str, template: Manifest) -> Path:
        """Return the folder of a volume, which is made and filled for the pod."""
        name = volume["name"]
        group = template["securityContext"]["fsGroup"]
        if "emptyDir" in volume:
            is_memory = volume["emptyDir"].get("medium") == "Memory"
            base = self._memory if is_memory else self._directory / "volumes"
            return _open_folder(base / pod / name, group)
        if "claim" in volume:
            return _open_folder(self._directory / "claims" / f"{name}-{pod}", group)
        kind = "Secret" if "secret" in volume else "ConfigMap"
        source = volume["secret" if kind == "Secret" else "configMap"]
        data = self.objects[kind, source["secretName" if kind == "Secret" else "name"]]
        return _files(
            self._directory / "volumes" / pod / name, data, source.get("defaultMode", 0o644), group
        )


def _open_folder(path: Path, group: int) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    os.chown(path, 0, group)
    path.chmod(0o2777)
    return path


def _files(path: Path, data: Mapping[str, str], mode: int, group: int) -> Path:
    """Return a folder with a link for each key, to a file of root and the pod's group."""
    shutil.rmtree(path, ignore_errors=True)
    content = path / "..data"
    content.mkdir(parents=True)
    for key, value in data.items():
        (content / key).write_text(value)
        os.chown(content / key, 0, group)
        (content / key).chmod(mode)
        (path / key).symlink_to(f"..data/{key}")
    return path
