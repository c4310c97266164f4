"""Ends a pod watch before its test API server stops."""

from baton.pools.kubernetes.pod_watch import PodWatch
from tests.kube.server import KubeServer

END_SECONDS = 20.0


def end_watch(watch: PodWatch, server: KubeServer) -> None:
    """Stop ``watch``, end the watches of ``server``, and wait until the thread of ``watch`` has
    ended.

    Otherwise the thread may connect once more while the server stops. The ssl module of Python
    3.11.7 does not close a socket that is reset before its TLS handshake. That is a
    ResourceWarning, and so an error, in whichever test runs then.
    """
    watch.stop()
    server.closed.set()
    assert watch.join(END_SECONDS), "the watch has not ended"
