"""A release of the chart on a test Kubernetes, and what its operator does with it."""

import json
import subprocess
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from helm_python import HelmReleaseError, _native
from kubernetes import client

from benchmarks.machine import SYSTEM_CLOCK
from tests.kube.cluster import Cluster
from tests.kube.drain import drain_node
from tests.kube.kinds import DEPLOYMENT, LEASE, NODE, POD, Object
from tests.kube.patches import merged
from tests.kube.pods import is_leaving

CHART = Path(__file__).parents[1] / "deploy" / "helm" / "baton"
SECONDS = 180
"""For any one thing to happen, on a busy machine."""

POOL = "baton.dev/pool"
ROLE = "baton.dev/role"


class Release:
    """``name`` contains baton, so that its objects are called by it."""

    def __init__(self, kube: Cluster, namespace: str, name: str) -> None:
        self.kube = kube
        self.namespace = namespace
        self.name = name
        self.values: dict[str, Any] = {}
        self._helm = kube.helm(namespace)

    @property
    def url(self) -> str:
        return self.kube.url(f"{self.name}-router", self.namespace)

    def install(self, values: dict[str, Any]) -> None:
        """Until all is ready."""
        self.values = values
        self._helm.install(CHART, self.name, values, wait="watcher", timeout=SECONDS)

    def test(self) -> str:
        """``helm test``; returns what its pod said. Raises RuntimeError when it failed."""
        options = json.dumps({"timeout_seconds": SECONDS})
        _native.call_string("helm_test_run", self._helm._raw(), self.name, options)
        return self.kube.kubelet.log(self.namespace, f"{self.name}-test", "").strip()

    # -- sizes -----------------------------------------------------------------------------

    def workers(self, pool: str) -> set[str]:
        """Names of those that are ready and stay."""
        return set(self.kube.ready({POOL: pool}))

    def pods(self, pool: str) -> list[Object]:
        return self.kube.pods(lambda pod: (pod["metadata"].get("labels") or {}).get(POOL) == pool)

    def settled(self, sizes: Mapping[str, int]) -> None:
        """Once so many serve, and nobody else is there any more. Raises TimeoutError."""

        def reached() -> bool:
            return all(
                len(self.workers(pool)) == len(self.pods(pool)) == count
                for pool, count in sizes.items()
            )

        self.kube.wait(reached, SECONDS, f"pools of {dict(sizes)}")

    def scale(self, sizes: Mapping[str, int]) -> float:
        """As ``kubectl scale``; returns the seconds until it is so."""
        began = SYSTEM_CLOCK()
        with self.kube.client() as opened:
            apps = client.AppsV1Api(opened)
            for pool, count in sizes.items():
                apps.patch_namespaced_deployment_scale(
                    f"{self.name}-{pool}", self.namespace, {"spec": {"replicas": count}}
                )
        self.settled(sizes)
        return round(SYSTEM_CLOCK() - began, 1)

    def baton(self, *arguments: str, check: bool = True) -> str:
        """``baton …`` in a conductor's pod. Raises RuntimeError when it fails."""
        pod = self.kube.ready({ROLE: "conductor"})[0]
        words, environment = self.kube.kubelet.entering(
            self.namespace, pod, "baton", ["baton", *arguments]
        )
        done = subprocess.run(
            words, env=dict(environment), capture_output=True, text=True, timeout=SECONDS
        )
        if check and done.returncode != 0:
            raise RuntimeError(f"baton {' '.join(arguments)}: {done.stderr or done.stdout}")
        return done.stdout.strip()

    # -- who goes --------------------------------------------------------------------------

    def directed(self, pool: str, size: int) -> dict[str, Any]:
        """The pool has ``size``; the oldest is named, which Kubernetes would keep."""
        self.scale({pool: size})
        before = self.workers(pool)
        victim = min(self.pods(pool), key=lambda pod: pod["metadata"]["creationTimestamp"])
        name = victim["metadata"]["name"]
        said = self.baton("drain", name, "--on", "kubernetes")
        self.settled({pool: size - 1})
        assert self.workers(pool) == before - {name}, f"{before - self.workers(pool)} went"
        return {"went": name, "said": said}

    def usurped(self, pool: str) -> dict[str, Any]:
        before = self.workers(pool)
        nodes = [node["metadata"]["name"] for node in self.kube.api.store.all(NODE)]
        for node in nodes:
            self.kube.cordon(node)
        found = self.kube.api.store.get(DEPLOYMENT, self.namespace, f"{self.name}-{pool}")
        found["spec"]["replicas"] += 1
        self.kube.api.update(DEPLOYMENT, found)
        self.kube.wait(lambda: len(self.pods(pool)) == len(before) + 1, SECONDS, "a pod more")
        victim = min(before)
        said = self.baton("drain", victim, "--on", "kubernetes", check=False)
        for node in nodes:
            self.kube.cordon(node, False)
        self.settled({pool: len(before)})
        assert victim not in self.workers(pool), f"{victim} drained, and is still there"
        return {"replaced": victim, "said": said}

    # -- memory ----------------------------------------------------------------------------

    def remembered(self) -> dict[str, Any]:
        """What a decode worker has written is asked for again once it has gone; only it, and the
        store, had those blocks."""
        chance = np.random.default_rng(7)
        prompt = chance.integers(3, 4000, size=64).tolist()
        first, headers = self._complete(prompt, 160)
        answer = first["choices"][0]["token_ids"]
        worker = headers["x-baton-decode"]
        victim = next(pod for pod in self.workers("decode") if worker.startswith(pod))
        before = self.workers("decode")
        self.baton("drain", victim, "--on", "kubernetes")
        self.settled({"decode": len(before) - 1})
        again, headers = self._complete(prompt + answer, 1)
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        self.scale({"decode": len(before)})
        told = {"drained": victim, "prompt": len(prompt), "answer": len(answer), "cached": cached}
        assert victim not in headers["x-baton-decode"], told
        assert cached > len(prompt) + len(answer) / 2, told
        return told

    def _complete(self, prompt: list[int], count: int) -> tuple[dict[str, Any], dict[str, str]]:
        body = {
            "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip
        request = urllib.request.Request(
            self.url + "/v1/completions", json.dumps(body).encode(),
            {"content-type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=SECONDS) as response:
            return json.load(response), {k.lower(): v for k, v in response.headers.items()}

    # -- releases and nodes ----------------------------------------------------------------

    def upgrade(self, values: dict[str, Any]) -> dict[str, Any]:
        """Until every pod is of the new revision, and the old ones are gone."""
        self.values = merged(self.values, values)
        old = {pod["metadata"]["uid"] for pod in self._ours()}
        self._helm.upgrade(CHART, self.name, self.values, wait="watcher", timeout=SECONDS)
        self.kube.wait(
            lambda: not any(is_leaving(pod) for pod in self._ours()), SECONDS, "the old pods' end"
        )
        left = {pod["metadata"]["uid"] for pod in self._ours()} & old
        return {"replaced": len(old - left), "of": len(old)}

    def owners(self, pool: str) -> dict[str, Any]:
        """Somebody scales: an upgrade as ``chart`` is refused, one as ``external`` keeps it."""
        size = len(self.workers(pool))
        self.scale({pool: size + 1})
        try:
            values = merged(self.values, {"replicasManagedBy": "chart"})
            self._helm.upgrade(CHART, self.name, values, timeout=SECONDS)
        except HelmReleaseError as error:
            refused = str(error)
        else:
            raise AssertionError("an upgrade with two owners of a size was not refused")
        self.upgrade({})
        assert len(self.workers(pool)) == size + 1, "the size was not kept"
        self.scale({pool: size})
        return {"refused": refused.partition("Apply failed")[2].strip(" :")}

    def drain_node(self) -> dict[str, Any]:
        """The node of a decode worker, with all that is on it."""
        pod = self.kube.api.store.get(POD, self.namespace, min(self.workers("decode")))
        node = pod["spec"]["nodeName"]
        sizes = {pool: len(self.workers(pool)) for pool in ("prefill", "decode")}
        went = drain_node(self.kube, node, SECONDS)
        self.settled(sizes)
        self.kube.cordon(node, False)
        return {"node": node, "went": went}

    def leader(self) -> str:
        """Whose Lease it is."""
        lease = self.kube.api.store.get(LEASE, self.namespace, f"{self.name}-conductor")
        holder: str = lease["spec"]["holderIdentity"]
        return holder

    def restarts(self) -> dict[str, int]:
        """Of pods whose container had to be started again."""
        return {
            pod["metadata"]["name"]: each["restartCount"]
            for pod in self.kube.pods()
            for each in (pod.get("status") or {}).get("containerStatuses") or []
            if each["restartCount"]
        }

    def _ours(self) -> list[Object]:
        """Pods whose template an upgrade of settings changes."""
        return self.kube.pods(
            lambda pod: (
                (pod["metadata"].get("labels") or {}).get(ROLE)
                in ("router", "conductor", "prefill", "decode", "kvstore")
            )
        )
