"""Finds the sockets on which a running cluster listens, with ``baton doctor --sockets``."""

import json
from collections import defaultdict

from baton.network.listeners import LISTENERS
from baton.system.portability import uses_linux
from testkit.local_cluster import LocalCluster

MEMORY_SOCKET = "ucx_wakeup" if uses_linux() else "shared_memory"
"""The socket that a process with KV memory has for its peers on the host."""


def sockets_by_process(cluster: LocalCluster) -> dict[str, set[str]]:
    """Return the names of listening sockets by process. Check that each of them is described in
    ``LISTENERS``, and is a Unix socket or bound to loopback."""
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
