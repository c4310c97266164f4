"""Runs a cluster with one pod, prints the process id of the pod's container, and waits until
standard input ends. Before that, a test kills this program (not the container)."""

import sys

from tests.kube.cluster import cluster
from tests.kube.kinds import POD
from tests.kube.pods import phase

SECONDS = 20.0

if __name__ == "__main__":
    with cluster(nodes=["n"]) as kube:
        spec = {"containers": [{"name": "c", "image": "x:1", "command": ["sleep", "99"]}]}
        kube.api.create(POD, {"metadata": {"name": "p", "namespace": "default"}, "spec": spec})
        kube.wait(lambda: phase(kube.pods()[0]) == "Running", SECONDS, "the pod to run")
        words, _ = kube.kubelet.exec_command("default", "p", "", [])
        print(words[1].partition("=")[2], flush=True)
        sys.stdin.read()
