"""Drains a node like ``kubectl drain``: cordons it and evicts its pods one after the other."""

from kubernetes import client
from kubernetes.client.exceptions import ApiException

from tests.kube.api import namespace_and_name
from tests.kube.cluster import Cluster
from tests.kube.kinds import Object
from tests.kube.pods import FINISHED, phase

RETRY_SECONDS = 0.5
"""The time between two attempts of an eviction that a budget forbids; kubectl waits 5 s."""


def drain_node(kube: Cluster, node: str, seconds: float) -> list[str]:
    """Cordon a node, evict its unfinished pods and wait until they are gone; return their names.
    Raises TimeoutError if a disruption budget forbids an eviction for more than ``seconds``, or if
    the pods are not gone ``seconds`` after the last eviction."""
    kube.cordon(node)
    pods = kube.pods(lambda pod: pod["spec"].get("nodeName") == node and phase(pod) not in FINISHED)
    with kube.client() as opened:
        core = client.CoreV1Api(opened)
        for pod in pods:
            _evict(kube, core, pod, seconds)
    uids = {pod["metadata"]["uid"] for pod in pods}
    kube.wait(
        lambda: not kube.pods(lambda pod: pod["metadata"]["uid"] in uids),
        seconds,
        f"the drain of {node}",
    )
    return [pod["metadata"]["name"] for pod in pods]


def _evict(kube: Cluster, core: client.CoreV1Api, pod: Object, seconds: float) -> None:
    namespace, name = namespace_and_name(pod)
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
            raise TimeoutError(f"a disruption budget forbade evicting {name} for {seconds:g} s")
        kube.api.store.changes(kube.api.store.version, RETRY_SECONDS)
