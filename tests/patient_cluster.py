"""A cluster for tests, whose waits are patient."""

from collections.abc import Callable

from examples.local_cluster import LocalCluster
from keepstep.elastic.rendezvous.view import View
from tests.patience import patient


class PatientCluster(LocalCluster):
    """A cluster whose limits of waits grow with the machine's load."""

    def wait(self, node: str, timeout_s: float) -> int:
        """See `LocalCluster.wait`."""
        return super().wait(node, patient(timeout_s))

    def wait_until(self, condition: Callable[[View], bool], timeout_s: float) -> View:
        """See `LocalCluster.wait_until`."""
        return super().wait_until(condition, patient(timeout_s))
