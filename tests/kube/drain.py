"""``kubectl drain``: no new pods on a node, and those that are there are evicted in turn."""

from kubernetes import client
from kubernetes.client.exceptions import ApiException

from tests.kube.api import place_of
from tests.kube.cluster import Cluster
from tests.kube.kinds import Object
from tests.kube.pods import FINISHED, phase

RETRY_SECONDS = 0.5
"""Between two tries of an eviction that a budget forbids; kubectl waits five."""


def drain_node(kube: Cluster, node: str, seconds: float) -> list[str]:
    """Until no pod of it is left. Returns their names. Raises TimeoutError."""
    kube.cordon(node)
    there = kube.pods(
        lambda pod: pod["spec"].get("nodeName") == node and phase(pod) not in FINISHED
    )
    with kube.client() as opened:
        core = client.CoreV1Api(opened)
        for pod in there:
            _evict(kube, core, pod, seconds)
    left = {pod["metadata"]["uid"] for pod in there}
    kube.wait(
        lambda: not kube.pods(lambda pod: pod["metadata"]["uid"] in left),
        seconds,
        f"drain of {node}",
    )
    return [pod["metadata"]["name"] for pod in there]


def _evict(kube: Cluster, core: client.CoreV1Api, pod: Object, seconds: float) -> None:
    namespace, name = place_of(pod)
    end = kube.api.clock.monotonic() + seconds
    body = client.V1Eviction(metadata=client.V1ObjectMeta(name=name, namespace=namespace))
    while True:
        try:
            core.create_namespaced_pod_eviction(name, namespace, body)
        except ApiException as error:
            if error.status == 404:
                return
            if error.status != 429:
                raise
        else:
            return
        if kube.api.clock.monotonic() > end:
            raise TimeoutError(f"its budget did not let {name} go in {seconds:g} s")
        kube.api.store.changes(kube.api.store.version, RETRY_SECONDS)
