"""The sockets that a running cluster listens on, from ``baton doctor --sockets``."""

import json
from collections import defaultdict

from baton.network.listeners import LISTENERS
from tools.local_cluster import LocalCluster


def sockets_by_process(cluster: LocalCluster) -> dict[str, set[str]]:
    """Return the names of listening sockets by process. Check that every socket is described in
    ``LISTENERS``, and listens on loopback or on a Unix socket."""
    answer = cluster.baton("doctor", "--sockets", "--json", check=False)
    assert answer.returncode == 0, answer.stderr
    names = defaultdict(set)
    for each in json.loads(answer.stdout):
        listener = LISTENERS[each["name"]]
        assert each["protocol"] == listener.protocol
        assert each["authentication"] in listener.authentications
        assert each["address"].startswith(("127.0.0.1:", "/", "@")), each
        names[each["process"]].add(each["name"])
    return names
