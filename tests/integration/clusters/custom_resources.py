"""Schemas of the custom resources in `ops/kubernetes`: their APIs' fields, and no others.

Written from the types of JobSet v1alpha2 (0.12), Kubeflow Trainer v1alpha1 (2.3) and cert-manager
v1 (1.18). A Job or an environment inside is checked as a part of a built-in kind, by
`test_kubernetes_manifests`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
TEXTS: Schema = {"type": "array", "items": TEXT}
ANY_OBJECT: Schema = {"type": "object"}


def closed(required: Sequence[str] = (), **properties: Schema) -> Schema:
    """Return the schema of an object that has these properties only."""
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(required),
        "properties": properties,
    }


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def several(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def resource(group: str, kind: str, spec: Schema) -> Schema:
    return closed(
        ["apiVersion", "kind", "metadata", "spec"],
        apiVersion={"const": group},
        kind={"const": kind},
        metadata=closed(
            ["name"], name=TEXT, namespace=TEXT, labels=ANY_OBJECT, annotations=ANY_OBJECT
        ),
        spec=spec,
    )


_JOB_TEMPLATE = closed(
    ["spec"], metadata=closed(labels=ANY_OBJECT, annotations=ANY_OBJECT), spec=ANY_OBJECT
)

JOBSET_SPEC = closed(
    ["replicatedJobs"],
    replicatedJobs=several(
        closed(
            ["name", "template"],
            name=TEXT,
            groupName=TEXT,
            replicas=COUNT,
            template=_JOB_TEMPLATE,
            dependsOn=several(
                closed(["name", "status"], name=TEXT, status=one_of("Ready", "Complete"))
            ),
        )
    ),
    network=closed(enableDNSHostnames=FLAG, subdomain=TEXT, publishNotReadyAddresses=FLAG),
    successPolicy=closed(["operator"], operator=one_of("All", "Any"), targetReplicatedJobs=TEXTS),
    failurePolicy=closed(
        maxRestarts=COUNT,
        restartStrategy=one_of("Recreate", "BlockingRecreate", "InPlaceRestart"),
        rules=several(
            closed(
                ["name", "action"],
                name=TEXT,
                action=one_of(
                    "FailJobSet",
                    "RestartJobSet",
                    "RestartJobSetAndIgnoreMaxRestarts",
                    "RestartJob",
                    "RestartJobAndIgnoreMaxRestarts",
                ),
                onJobFailureReasons=TEXTS,
                onJobFailureMessagePatterns=TEXTS,
                targetReplicatedJobs=TEXTS,
            )
        ),
    ),
    suspend=FLAG,
    coordinator=closed(["replicatedJob"], replicatedJob=TEXT, jobIndex=COUNT, podIndex=COUNT),
    managedBy=TEXT,
    ttlSecondsAfterFinished=COUNT,
)

_RUNTIME_SPEC = closed(
    mlPolicy=closed(
        numNodes=COUNT,
        torch=closed(
            envInjection=closed(
                targets=several(
                    closed(["jobName", "containerNames"], jobName=TEXT, containerNames=TEXTS)
                )
            )
        ),
    ),
    template=closed(metadata=closed(labels=ANY_OBJECT, annotations=ANY_OBJECT), spec=JOBSET_SPEC),
)

_TRAIN_JOB_SPEC = closed(
    ["runtimeRef"],
    runtimeRef=closed(["name"], name=TEXT, apiGroup=TEXT, kind=TEXT),
    trainer=closed(
        image=TEXT,
        command=TEXTS,
        args=TEXTS,
        env=several(ANY_OBJECT),
        numNodes=COUNT,
        resourcesPerNode=closed(limits=ANY_OBJECT, requests=ANY_OBJECT, claims=several(ANY_OBJECT)),
        numProcPerNode={"type": "integer", "minimum": 1},
    ),
    suspend=FLAG,
    activeDeadlineSeconds={"type": "integer", "minimum": 1},
    managedBy=TEXT,
)

_ISSUER_SPEC = {
    **closed(selfSigned=closed(), ca=closed(["secretName"], secretName=TEXT)),
    "minProperties": 1,
    "maxProperties": 1,
}

_CERTIFICATE_SPEC = closed(
    ["secretName", "issuerRef"],
    secretName=TEXT,
    issuerRef=closed(["name"], name=TEXT, kind=one_of("Issuer", "ClusterIssuer"), group=TEXT),
    isCA=FLAG,
    commonName={"type": "string", "maxLength": 64},
    dnsNames=TEXTS,
    ipAddresses=TEXTS,
    duration={"type": "string", "pattern": "^([0-9]+(h|m|s))+$"},
    renewBefore={"type": "string", "pattern": "^([0-9]+(h|m|s))+$"},
    usages=several(one_of("digital signature", "key encipherment", "server auth", "client auth")),
    privateKey=closed(
        algorithm=one_of("RSA", "ECDSA", "Ed25519"),
        encoding=one_of("PKCS1", "PKCS8"),
        size=COUNT,
        rotationPolicy=one_of("Never", "Always"),
    ),
)

SCHEMAS: dict[str, Schema] = {
    "JobSet": resource("jobset.x-k8s.io/v1alpha2", "JobSet", JOBSET_SPEC),
    "ClusterTrainingRuntime": resource(
        "trainer.kubeflow.org/v1alpha1", "ClusterTrainingRuntime", _RUNTIME_SPEC
    ),
    "TrainJob": resource("trainer.kubeflow.org/v1alpha1", "TrainJob", _TRAIN_JOB_SPEC),
    "Issuer": resource("cert-manager.io/v1", "Issuer", _ISSUER_SPEC),
    "Certificate": resource("cert-manager.io/v1", "Certificate", _CERTIFICATE_SPEC),
}
