"""What a running cluster listens on, as ``baton doctor --sockets`` tells it."""

import json
from collections import defaultdict

from baton.network.listeners import LISTENERS
from tools.local_cluster import LocalCluster


def documented(cluster: LocalCluster) -> dict[str, set[str]]:
    """Names of ``LISTENERS`` by process. Every socket is in that table, and on loopback or Unix."""
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
