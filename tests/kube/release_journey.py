"""A Helm release of the chart on a test Kubernetes cluster, and an administrator's operations on
it."""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from typing import Any

import numpy as np
from kubernetes import client

from testkit.machine import SYSTEM_CLOCK
from tests.kube.cluster import Cluster
from tests.kube.drain import drain_node
from tests.kube.helm_clients import Helm, Helm4, HelmFailed
from tests.kube.kinds import DEPLOYMENT, LEASE, NODE, POD, Object
from tests.kube.patches import apply_merge_patch
from tests.kube.pods import is_being_deleted
from tests.kube.releases import deployed_revision, differences

TIMEOUT_SECONDS = 180
"""The timeout of every single operation, on a busy machine."""

POOL = "baton.dev/pool"
ROLE = "baton.dev/role"


class Release:
    """A Helm release. ``name`` must contain "baton", because the chart then uses the release's name
    unchanged as the prefix of its objects' names."""

    def __init__(self, kube: Cluster, namespace: str, name: str, helm: Helm | None = None) -> None:
        self.kube = kube
        self.namespace = namespace
        self.name = name
        self.values: dict[str, Any] = {}
        self.helm = helm or Helm4(kube.kubeconfig, namespace)

    @property
    def url(self) -> str:
        return self.kube.url(f"{self.name}-router", self.namespace)

    def install(self, values: dict[str, Any]) -> None:
        """Install the chart, and wait until all pods are ready and the pools have the sizes in
        ``values``."""
        self.values = values
        self.helm.install(self.name, values, wait=True, seconds=TIMEOUT_SECONDS)
        pools = {"prefill": {}, "decode": {}} | values.get("pools", {})
        self.wait_for_sizes({name: pool.get("replicas", 1) for name, pool in pools.items()})

    def test(self) -> None:
        """Run ``helm test``, whose pod must not stay. Raises HelmFailed when it failed."""
        self.helm.test(self.name, seconds=TIMEOUT_SECONDS)
        self.kube.wait(lambda: not self._test_pods(), TIMEOUT_SECONDS, "the test's pod to go")

    def _test_pods(self) -> list[Object]:
        return self.kube.pods(lambda pod: pod["metadata"]["name"] == f"{self.name}-test")

    # -- sizes -----------------------------------------------------------------------------

    def workers(self, pool: str) -> set[str]:
        """Return the names of the pool's pods that are ready and not terminating."""
        return set(self.kube.ready({POOL: pool}))

    def sizes(self) -> dict[str, int]:
        """Return the number of ready workers of each pool."""
        return {pool: len(self.workers(pool)) for pool in ("prefill", "decode")}

    def pods(self, pool: str) -> list[Object]:
        return self.kube.pods(lambda pod: (pod["metadata"].get("labels") or {}).get(POOL) == pool)

    def wait_for_sizes(self, sizes: Mapping[str, int]) -> None:
        """Wait until each pool in ``sizes`` has exactly the given number of pods, and all of them
        are ready. Raises TimeoutError."""

        def reached() -> bool:
            return all(
                len(self.workers(pool)) == len(self.pods(pool)) == count
                for pool, count in sizes.items()
            )

        self.kube.wait(reached, TIMEOUT_SECONDS, f"pools of {dict(sizes)}")

    def scale(self, sizes: Mapping[str, int]) -> float:
        """Write the scale of the pools' Deployments, like ``kubectl scale``. Return the seconds
        until the pools have these sizes."""
        began = SYSTEM_CLOCK()
        with self.kube.client() as opened:
            apps = client.AppsV1Api(opened)
            for pool, count in sizes.items():
                apps.patch_namespaced_deployment_scale(
                    f"{self.name}-{pool}", self.namespace, {"spec": {"replicas": count}}
                )
        self.wait_for_sizes(sizes)
        return round(SYSTEM_CLOCK() - began, 1)

    def baton(self, *arguments: str, check: bool = True) -> str:
        """Run ``baton …`` in a conductor's pod. Raises RuntimeError when it fails."""
        pod = self.kube.ready({ROLE: "conductor"})[0]
        words, environment = self.kube.kubelet.exec_command(
            self.namespace, pod, "baton", ["baton", *arguments]
        )
        done = subprocess.run(
            words, env=dict(environment), capture_output=True, text=True, timeout=TIMEOUT_SECONDS
        )
        if check and done.returncode != 0:
            raise RuntimeError(f"baton {' '.join(arguments)} failed: {done.stderr or done.stdout}")
        return done.stdout.strip()

    def baton_from_laptop(self, *arguments: str) -> str:
        """Run ``baton …`` on this machine as an administrator with a kubeconfig, and without access
        to Redis. Raises RuntimeError when it fails."""
        words = [sys.executable, "-m", "baton", *arguments, "--on", "kubernetes"]
        target = ["--namespace", self.namespace, "--name", self.name]
        environment = {**os.environ, "KUBECONFIG": str(self.kube.kubeconfig)}
        done = subprocess.run(
            words + target, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
        )
        if done.returncode != 0:
            raise RuntimeError(f"baton {' '.join(arguments)} failed: {done.stderr or done.stdout}")
        return done.stdout.strip()

    # -- drains ----------------------------------------------------------------------------

    def drain_named_worker(self, pool: str, size: int) -> dict[str, Any]:
        """Scale the pool to ``size``, then drain its oldest pod by name. Exactly this pod must be
        removed, although Kubernetes itself would remove a newer one."""
        self.scale({pool: size})
        before = self.workers(pool)
        victim = min(self.pods(pool), key=lambda pod: pod["metadata"]["creationTimestamp"])
        name = victim["metadata"]["name"]
        output = self.baton("drain", name, "--on", "kubernetes")
        self.wait_for_sizes({pool: size - 1})
        assert self.workers(pool) == before - {name}, f"{before - self.workers(pool)} were removed"
        return {"drained": name, "output": output}

    def drain_with_pending_pod(self, pool: str) -> dict[str, Any]:
        before = self.workers(pool)
        nodes = [node["metadata"]["name"] for node in self.kube.api.store.all(NODE)]
        for node in nodes:
            self.kube.cordon(node)
        found = self.kube.api.store.get(DEPLOYMENT, self.namespace, f"{self.name}-{pool}")
        found["spec"]["replicas"] += 1
        self.kube.api.update(DEPLOYMENT, found)
        self.kube.wait(
            lambda: len(self.pods(pool)) == len(before) + 1, TIMEOUT_SECONDS, "one more pod"
        )
        victim = min(before)
        output = self.baton("drain", victim, "--on", "kubernetes", check=False)
        for node in nodes:
            self.kube.cordon(node, False)
        self.wait_for_sizes({pool: len(before)})
        assert victim not in self.workers(pool), f"{victim} was drained, but is still running"
        return {"replaced": victim, "output": output}

    # -- memory ----------------------------------------------------------------------------

    def reuse_after_drain(self) -> dict[str, Any]:
        """Drain a decode worker, then send a request that continues one of its answers. Only that
        worker and the store had the answer's KV."""
        chance = np.random.default_rng(7)
        prompt = chance.integers(3, 4000, size=64).tolist()
        first, headers = self._complete(prompt, 160)
        answer = first["choices"][0]["token_ids"]
        worker = headers["x-baton-decode"]
        victim = next(pod for pod in self.workers("decode") if worker.startswith(pod))
        before = self.workers("decode")
        self.baton("drain", victim, "--on", "kubernetes")
        self.wait_for_sizes({"decode": len(before) - 1})
        again, headers = self._complete(prompt + answer, 1)
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        self.scale({"decode": len(before)})
        result = {"drained": victim, "prompt": len(prompt), "answer": len(answer), "cached": cached}
        assert victim not in headers["x-baton-decode"], result
        assert cached > len(prompt) + len(answer) / 2, result
        return result

    def reinstall(self) -> dict[str, Any]:
        """Uninstall the release and install it again; a prompt that was computed before must then
        be cached."""
        prompt = np.random.default_rng(11).integers(3, 4000, size=256).tolist()
        first, _ = self._complete(prompt, 16)
        self.helm.uninstall(self.name, wait=True, seconds=TIMEOUT_SECONDS)
        self.kube.wait(lambda: not self.kube.pods(), TIMEOUT_SECONDS, "the end of all pods")
        leases = [each["metadata"]["name"] for each in self.kube.api.store.all(LEASE)]
        assert leases == [], f"left behind: {leases}"
        self.install(self.values)
        again, _ = self._complete(prompt, 16)
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= 240, f"{cached} of {len(prompt)} tokens were cached"
        assert again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
        return {"prompt": len(prompt), "cached": cached}

    def _complete(
        self, prompt: list[int], count: int, model: str | None = None
    ) -> tuple[dict[str, Any], dict[str, str]]:
        body = {
            "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, "model": model,
        }  # fmt: skip
        request = urllib.request.Request(
            self.url + "/v1/completions", json.dumps(body).encode(),
            {"content-type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            return json.load(response), {k.lower(): v for k, v in response.headers.items()}

    # -- models ----------------------------------------------------------------------------

    def serve_two_models(self, second: str) -> dict[str, Any]:
        """Add the demo model under another name, with pools of its own, resize one of these, and
        remove the model again. It must give the same answers as the first model, from its own
        workers."""
        pools = {f"{role}-{second}": role for role in ("prefill", "decode")}
        own = {name: {"role": role, "modelName": second} for name, role in pools.items()}
        added = self.upgrade({"models": {second: {}}, "pools": own})
        self.wait_for_sizes(dict.fromkeys(pools, 1))
        prompt = np.random.default_rng(13).integers(3, 4000, size=64).tolist()
        expected, _ = self._complete(prompt, 32)
        self.scale({f"decode-{second}": 2})
        for _ in range(8):
            answer, headers = self._complete(prompt, 32, second)
            assert answer["model"] == second, answer["model"]
            assert answer["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
            assert f"decode-{second}" in headers["x-baton-decode"], headers["x-baton-decode"]
        scaled = self.baton("scale", f"decode-{second}=1", "--on", "kubernetes")
        self.wait_for_sizes({f"decode-{second}": 1})
        removed = self.upgrade({"models": {second: None}, "pools": dict.fromkeys(pools)})
        return {"added": added, "removed": removed, "output": scaled}

    # -- releases and nodes ----------------------------------------------------------------

    def upgrade(self, values: dict[str, Any]) -> dict[str, Any]:
        """Upgrade the release, and wait until every pod has the new revision and the old pods are
        gone. Return how many of the pods were replaced."""
        self.values = apply_merge_patch(self.values, values)
        old = {pod["metadata"]["uid"] for pod in self._baton_pods()}
        self.helm.upgrade(self.name, self.values, wait=True, seconds=TIMEOUT_SECONDS)
        return self._replaced(old)

    def _replaced(self, old: set[str]) -> dict[str, Any]:
        """Wait for pods that are being deleted; return how many of ``old`` were replaced."""
        self.kube.wait(
            lambda: not any(is_being_deleted(pod) for pod in self._baton_pods()),
            TIMEOUT_SECONDS,
            "the removal of the old pods",
        )
        left = {pod["metadata"]["uid"] for pod in self._baton_pods()} & old
        return {"replaced": len(old - left), "of": len(old)}

    @property
    def revision(self) -> int:
        return int(deployed_revision(self.kube.api, self.namespace, self.name)["version"])

    def roll_back(self, revision: int) -> dict[str, Any]:
        """Roll back, and wait until the pods of other revisions are gone. Return how many of the
        pods were replaced."""
        old = {pod["metadata"]["uid"] for pod in self._baton_pods()}
        self.helm.rollback(self.name, revision, wait=True, seconds=TIMEOUT_SECONDS)
        deployed = deployed_revision(self.kube.api, self.namespace, self.name)
        self.values = deployed.get("config") or {}
        return self._replaced(old)

    def differences(self) -> list[str]:
        """Return the fields in which objects differ from the deployed revision."""
        return differences(self.kube.api, self.namespace, self.name)

    def two_owners(self, pool: str) -> dict[str, Any]:
        """Scale a pool. Then an upgrade with ``replicasManagedBy: chart`` must be rejected, and an
        upgrade with ``external`` must keep the size."""
        size = len(self.workers(pool))
        self.scale({pool: size + 1})
        try:
            values = apply_merge_patch(self.values, {"replicasManagedBy": "chart"})
            self.helm.upgrade(self.name, values, seconds=TIMEOUT_SECONDS)
        except HelmFailed as error:
            refused = str(error)
        else:
            raise AssertionError(
                "Helm accepted an upgrade that gives the size of a pool a second owner"
            )
        self.upgrade({})
        assert len(self.workers(pool)) == size + 1, "the upgrade changed the size"
        self.scale({pool: size})
        return {"refused": refused.partition("These values can't work:")[2].strip(" \n-")}

    def drain_node(self) -> dict[str, Any]:
        """Drain the node on which a decode worker runs; this evicts all pods on it."""
        pod = self.kube.api.store.get(POD, self.namespace, min(self.workers("decode")))
        node = pod["spec"]["nodeName"]
        sizes = self.sizes()
        went = drain_node(self.kube, node, TIMEOUT_SECONDS)
        self.wait_for_sizes(sizes)
        self.kube.cordon(node, False)
        return {"node": node, "went": went}

    def leader(self) -> str:
        """Return the name of the conductor that holds the autoscaler's lease."""
        lease = self.kube.api.store.get(LEASE, self.namespace, f"{self.name}-leader")
        holder: str = lease["spec"]["holderIdentity"]
        return holder

    def restarts(self) -> dict[str, int]:
        """Return the number of container restarts of each pod that has any."""
        return {
            pod["metadata"]["name"]: each["restartCount"]
            for pod in self.kube.pods()
            for each in (pod.get("status") or {}).get("containerStatuses") or []
            if each["restartCount"]
        }

    def _baton_pods(self) -> list[Object]:
        """Return the pods whose templates contain Baton's settings."""
        return self.kube.pods(
            lambda pod: (
                (pod["metadata"].get("labels") or {}).get(ROLE)
                in ("router", "conductor", "prefill", "decode", "kvstore")
            )
        )
