"""Runs a pod on its node: its sandbox, volumes, (init) containers, status and deletion."""

import asyncio
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tests.kube.api import Api
from tests.kube.events import record_event
from tests.kube.failures import Refused, bad_request
from tests.kube.kinds import POD, SERVICE_ACCOUNT, Object
from tests.kube.node.container import Container, StartSpec
from tests.kube.node.environment import Missing, environment, expand_references
from tests.kube.node.images import Images, command_of
from tests.kube.node.network import Network
from tests.kube.node.root import Identity, script
from tests.kube.node.sandbox import Sandbox
from tests.kube.node.volumes import Mount, Volumes, account_files
from tests.kube.pods import set_condition

RETRY_SECONDS = 1.0
"""The time between two checks for missing objects to which a pod refers."""

LOOK_SECONDS = 0.05

REFRESH_SECONDS = 1.0
"""The time between two checks for changes of the ConfigMaps and Secrets that a pod mounts."""


@dataclass(frozen=True)
class Node:
    """The objects that all pods share. ``api_port`` is the API server's port at the node's address;
    ``token`` returns the token of a service account by namespace and name."""

    api: Api
    network: Network
    images: Images
    folder: Path
    api_port: int
    authority: bytes
    token: Callable[[str, str], str]


class PodRunner:
    """Runs one pod until it is deleted. ``leave`` must be called for each deletion request for the
    pod."""

    def __init__(self, node: Node, pod: Object) -> None:
        self._node = node
        self._pod = pod
        self._namespace: str = pod["metadata"]["namespace"]
        self._name: str = pod["metadata"]["name"]
        self._folder = node.folder / "pods" / pod["metadata"]["uid"]
        token = node.token(self._namespace, pod["spec"]["serviceAccountName"])
        claims = node.folder / "claims"
        self._volumes = Volumes(node.api, pod, self._folder / "volumes", claims, token)
        self._sandbox: Sandbox | None = None
        self._initial: list[Container] = []
        self._sidecars: list[asyncio.Task[None]] = []
        self._containers: list[Container] = []
        self._waiting = ("ContainerCreating", "")
        self._leave = asyncio.Event()
        self._ends_at = float("inf")
        self._failed = ""
        """The reason why the pod itself failed, like DeadlineExceeded; otherwise empty."""

    async def run(self) -> None:
        """Run the pod until it has been deleted. Errors of the pod itself are reported in its
        status and events, and not raised."""
        life = asyncio.create_task(self._live())
        leaving = asyncio.create_task(self._leave.wait())
        try:
            await asyncio.wait({life, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not self._leave.is_set():
                await life
                await self._leave.wait()  # a finished pod is kept until it is deleted
            await self._stop()
        finally:
            for task in (life, leaving):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            await self._clean()
        self._remove()

    def leave(self, pod: Object) -> None:
        ends = pod["metadata"]["deletionTimestamp"]
        self._ends_at = min(self._ends_at, datetime.fromisoformat(ends).timestamp())
        self._pod["metadata"]["deletionTimestamp"] = ends
        self._leave.set()

    # -- running ---------------------------------------------------------------------------

    async def _live(self) -> None:
        spec = self._pod["spec"]
        hostname = spec.get("hostname") or self._name
        self._sandbox = await Sandbox.start(self._node.network, hostname)
        self._pod.setdefault("status", {})["podIP"] = self._sandbox.address
        self._report()
        await self._wait_for_references()
        refreshing = asyncio.create_task(self._refresh_volumes())
        limit = spec.get("activeDeadlineSeconds")
        try:
            async with asyncio.timeout(limit):
                await self._start(spec["restartPolicy"])
        except TimeoutError:
            self._failed = "DeadlineExceeded"
            await self._stop()
        finally:
            refreshing.cancel()
        self._report()

    async def _refresh_volumes(self) -> None:
        """Keep the files of mounted ConfigMaps and Secrets up to date. With a real kubelet, an
        update may take a minute and a half."""
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            self._volumes.refresh()

    async def _wait_for_references(self) -> None:
        """Wait until all objects to which the pod refers exist, and create the pod's volumes."""
        while True:
            try:
                self._volumes.make()
                for container in self._pod["spec"]["containers"]:
                    self._start_spec(container)
                return
            except (Missing, ValueError) as error:
                self._waiting = ("CreateContainerConfigError", str(error))
                self._tell("Failed", f"Error: {error}")
            self._report()
            await asyncio.sleep(RETRY_SECONDS)

    async def _start(self, policy: str) -> None:
        for spec in self._pod["spec"].get("initContainers") or []:
            container = self._container(spec)
            self._initial.append(container)
            if is_sidecar(container):
                self._sidecars.append(asyncio.create_task(container.run("Always")))
                while not container.state.started:
                    await asyncio.sleep(LOOK_SECONDS)
                continue
            await container.run("Never" if policy == "Never" else "OnFailure")
            if container.state.exit_code != 0:
                return
        self._containers = [self._container(spec) for spec in self._pod["spec"]["containers"]]
        async with asyncio.TaskGroup() as group:
            for container in self._containers:
                group.create_task(container.run(policy))

    def _container(self, spec: Object) -> Container:
        assert self._sandbox is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        container = Container(
            spec, self._sandbox, self._folder / f"{spec['name']}.log",
            lambda: self._start_spec(spec), self._node.api.timestamp, self._report, self._tell,
        )  # fmt: skip
        container.grace = float(self._pod["spec"]["terminationGracePeriodSeconds"])
        return container

    def _start_spec(self, spec: Object) -> StartSpec:
        """Return the script, environment variables and identity with which to start a container.
        Raises Missing if an object that the container needs doesn't exist, and ValueError if the
        container has no command or would run as root although the pod forbids it."""
        pod, node = self._pod, self._node
        pod["status"].setdefault("hostIP", node.network.gateway)
        own = environment(node.api, pod, spec)
        service = {
            "KUBERNETES_SERVICE_HOST": "kubernetes.default.svc",
            "KUBERNETES_SERVICE_PORT": str(node.api_port),
            "HOSTNAME": pod["spec"].get("hostname") or self._name,
        }
        identity = Identity.of(pod, spec)
        command = [expand_references(word, own) for word in command_of(spec)]
        base = self._folder / "roots" / spec["name"]
        base.mkdir(parents=True, exist_ok=True)
        mounts = [*self._files(), *self._account(), *self._volumes.mounts(spec)]
        secure = spec.get("securityContext") or {}
        text = script(
            base, mounts, node.images.needs, identity, command,
            bool(secure.get("readOnlyRootFilesystem")), spec.get("workingDir", "/"),
        )  # fmt: skip
        home = {"HOME": "/root" if identity.user == 0 else "/"}
        return StartSpec(text, node.images.environment | home | service | own, identity)

    def _files(self) -> list[Mount]:
        """Write the pod's /etc/hosts, /etc/resolv.conf and /etc/hostname; return their mounts."""
        domain = "svc.cluster.local"
        search = f"{self._namespace}.{domain} {domain} cluster.local"
        hostname = self._pod["spec"].get("hostname") or self._name
        texts = {
            "hosts": f"127.0.0.1\tlocalhost\n{self._pod['status']['podIP']}\t{hostname}\n",
            "resolv.conf": f"search {search}\nnameserver {self._node.network.gateway}\n"
            "options ndots:5\n",
            "hostname": f"{hostname}\n",
        }
        folder = self._folder / "etc"
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        return [Mount(f"/etc/{name}", folder / name) for name in texts]

    def _account(self) -> list[Mount]:
        spec = self._pod["spec"]
        name = spec["serviceAccountName"]
        account = self._node.api.store.find(SERVICE_ACCOUNT, self._namespace, name) or {}
        wanted = account.get("automountServiceAccountToken", True)
        if not spec.get("automountServiceAccountToken", wanted):
            return []
        token = self._node.token(self._namespace, name)
        folder = self._folder / "account"
        return [account_files(folder, token, self._namespace, self._node.authority)]

    # -- stopping --------------------------------------------------------------------------

    async def _stop(self) -> None:
        """Stop all containers at the same time, and then the sidecars in reverse order, within the
        remaining grace period."""
        began = self._node.api.clock.monotonic()
        left = self._ends_at - self._node.api.clock.wall_nanoseconds() / 1e9
        if left == float("inf"):
            left = float(self._pod["spec"]["terminationGracePeriodSeconds"])
        sidecars = [container for container in self._initial if is_sidecar(container)]
        async with asyncio.TaskGroup() as group:
            for container in [*self._initial, *self._containers]:
                if container not in sidecars:
                    group.create_task(container.stop(max(left, 0.0)))
        for container in reversed(sidecars):
            used = self._node.api.clock.monotonic() - began
            await container.stop(max(left - used, 0.0))

    async def _clean(self) -> None:
        for container in [*self._initial, *self._containers]:
            await container.kill()
        for sidecar in self._sidecars:
            sidecar.cancel()
        await asyncio.gather(*self._sidecars, return_exceptions=True)
        if self._sandbox is not None:
            await self._sandbox.stop()
        shutil.rmtree(self._folder / "volumes", ignore_errors=True)

    def _remove(self) -> None:
        store = self._node.api.store
        with store.locked():
            found = store.find(POD, self._namespace, self._name)
            if found and found["metadata"]["uid"] == self._pod["metadata"]["uid"]:
                store.remove(POD, self._namespace, self._name)

    # -- logs, events and status -----------------------------------------------------------

    def log(self, container: str) -> str:
        """Return a container's log, or "" if it has none yet. If ``container`` is empty, return
        the log of the pod's last container."""
        every = [*self._initial, *self._containers]
        found = [c for c in every if container in ("", c.spec["name"])]
        if not found or not found[-1].log.exists():
            return ""
        return found[-1].log.read_text(encoding="utf-8", errors="replace")

    def exec_command(
        self, container: str, command: Sequence[str]
    ) -> tuple[list[str], Mapping[str, str]]:
        """Call :meth:`ContainerProcess.exec_command` for a container. Raises Refused (400) if the
        container isn't running."""
        for each in [*self._containers, *self._initial]:
            if container in ("", each.spec["name"]) and each.process and each.process.pid:
                return each.process.exec_command(command)
        raise bad_request(f"container {container!r} of pod {self._name} is not running")

    def _tell(self, reason: str, message: str) -> None:
        kind = "Normal" if reason in ("Started", "Killing") else "Warning"
        with suppress(Refused):  # the namespace may be gone
            record_event(self._node.api, self._pod, reason, message, kind)

    def _report(self) -> None:
        """Write the pod's status, except for the condition that the scheduler sets."""
        api = self._node.api
        with api.store.locked():
            found = api.store.find(POD, self._namespace, self._name)
            if found is None or found["metadata"]["uid"] != self._pod["metadata"]["uid"]:
                return
            status = found.setdefault("status", {})
            status |= {"hostIP": self._node.network.gateway, "phase": self._phase()}
            status.setdefault("startTime", api.timestamp())
            if self._sandbox is not None:
                address = self._sandbox.address
                status |= {"podIP": address, "podIPs": [{"ip": address}]}
            if self._failed:
                status["reason"] = self._failed
            self._conditions(found)
            status["containerStatuses"] = self._statuses("containers", self._containers)
            if self._initial:
                status["initContainerStatuses"] = self._statuses("initContainers", self._initial)
            api.set_status(POD, found)

    def _conditions(self, found: Object) -> None:
        stamp = self._node.api.timestamp()
        specs = self._pod["spec"]["containers"]
        initial = self._pod["spec"].get("initContainers") or []
        done = len(self._initial) == len(initial) and all(
            container.state.started if is_sidecar(container) else container.state.exit_code == 0
            for container in self._initial
        )
        all_created = len(self._containers) == len(specs)
        sidecars = filter(is_sidecar, self._initial)
        ready = all_created and all(each.state.ready for each in (*self._containers, *sidecars))
        over = self._phase() == "Succeeded"
        set_condition(found, "Initialized", done, stamp)
        why = "" if ready else ("PodCompleted" if over else "ContainersNotReady")
        set_condition(found, "ContainersReady", ready, stamp, why)
        set_condition(found, "Ready", ready, stamp, why)

    def _phase(self) -> str:
        policy, containers = self._pod["spec"]["restartPolicy"], self._containers
        if self._failed:
            return "Failed"
        if policy == "Never" and any(c.state.exit_code for c in self._initial if not is_sidecar(c)):
            return "Failed"
        if not containers or all(c.state.waiting == "ContainerCreating" for c in containers):
            return "Pending"
        codes = [c.state.exit_code for c in containers]
        again = policy == "Always" or any(c.state.waiting for c in containers)
        if None in codes or again:
            return "Running"
        return "Failed" if any(codes) else "Succeeded"

    def _statuses(self, kind: str, containers: list[Container]) -> list[Object]:
        known = {container.spec["name"]: container for container in containers}
        return [self._status(spec, known.get(spec["name"])) for spec in self._pod["spec"][kind]]

    def _status(self, spec: Object, container: Container | None) -> Object:
        status: Object = {
            "name": spec["name"],
            "image": spec["image"],
            "imageID": spec["image"],
            "ready": False,
            "started": False,
            "restartCount": 0,
            "lastState": {},
        }
        if container is None:
            reason, message = self._waiting
            state = {"reason": reason} | ({"message": message} if message else {})
            return status | {"state": {"waiting": state}}
        state_now = container.state
        return status | {
            "ready": state_now.ready,
            "started": state_now.started,
            "restartCount": state_now.restarts,
            "state": state_now.as_json(),
            "lastState": state_now.last,
        }


def is_sidecar(container: Container) -> bool:
    """Whether this init container runs beside the pod's other containers and ends after them."""
    return container.spec.get("restartPolicy") == "Always"
