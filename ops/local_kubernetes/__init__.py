"""Runs the pods of Kubernetes manifests as Linux namespaces of this machine.

There is no API server, no scheduler and no container engine. What the kubelet and the controllers
of Job, JobSet, TrainJob, StatefulSet and Deployment do with a manifest's command, arguments,
environment, volumes, restart policies and grace periods is done here, in a few hundred lines, so
that the manifests of `ops/kubernetes` can be tried without a cluster.
"""
