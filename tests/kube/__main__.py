"""Run a Kubernetes cluster of local processes with the chart installed, to try things by hand.

    python -m tests.kube [--values FILE]... [--set a.b=1]... [--gpus N] [--empty]

Nodes are network namespaces on this machine, and containers are processes in them. No images are
pulled: pods run this checkout. Needs root. Prints the environment variables for kubectl and helm,
and the router's URL. Ctrl-C stops everything.
"""

import argparse
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.kube.cluster import Cluster, cluster
from tests.kube.node.network import missing_requirement
from tests.kube.patches import apply_merge_patch

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "baton"
INSTALL_SECONDS = 300


def values_of(files: Sequence[Path], settings: Sequence[str]) -> dict[str, Any]:
    """Merge values as Helm does: later files override earlier ones, then each ``--set``."""
    from helm_python import parse_set_string

    values: dict[str, Any] = {}
    for path in files:
        values = apply_merge_patch(values, yaml.safe_load(path.read_text(encoding="utf-8")) or {})
    for setting in settings:
        values = apply_merge_patch(values, parse_set_string(setting))
    return values


def install(kube: Cluster, release: str, namespace: str, values: dict[str, Any]) -> None:
    """Install the chart, and wait until all pods are ready. If that takes too long, raise a
    TimeoutError that names what is not ready."""
    kube.helm(namespace).install(
        CHART, release, values, create_namespace=True, wait="watcher", timeout=INSTALL_SECONDS
    )


def show(kube: Cluster, release: str, namespace: str) -> None:
    print(f"export KUBECONFIG={kube.kubeconfig} NS={namespace}")
    if release:
        name = release if "baton" in release else f"{release}-baton"
        print(f"export URL={kube.url(f'{name}-router', namespace)}")
        print(kube.describe())
    print("Ctrl-C stops the cluster.", flush=True)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--values", "-f", type=Path, action="append", default=[])
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--release", default="baton")
    parser.add_argument("--namespace", "-n", default="default")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--gpus", type=int, default=0, help="number of fake GPUs per node")
    parser.add_argument("--empty", action="store_true", help="install nothing")
    options = parser.parse_args(arguments)
    if why := missing_requirement():
        print(f"this machine can't run the nodes: {why}", file=sys.stderr)
        return 2
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    nodes = [f"node-{number + 1}" for number in range(options.nodes)]
    resources = {"nvidia.com/gpu": str(options.gpus)} if options.gpus else {}
    with cluster(nodes=nodes, resources=resources) as kube:
        if not options.empty:
            values = values_of(options.values, options.set)
            install(kube, options.release, options.namespace, values)
        show(kube, "" if options.empty else options.release, options.namespace)
        stopped.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
