"""A connection to a Ray cluster: a private one started for this Baton cluster, or an existing one.

Ray is inside the trust boundary: any client that reaches its ports can run code on its nodes, and
Ray's own calls use cloudpickle. Baton sends only plain values through Ray. A private Ray listens on
loopback, and requires a token that only this process knows.
"""

import asyncio
import contextlib
import logging
import shutil
import socket
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.job_config import JobConfig
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from baton.config import LOOPBACK, Settings
from baton.errors import Unavailable
from baton.system.stop_signals import block_stop_signals
from orchestrator.launch_specs import RemoteWorkerSpec
from orchestrator.ray.actor import WorkerActor

MAX_RESTARTS = 3
"""How often Ray restarts an actor, on any node with enough resources; after that, a new actor is
created."""

CONNECT_TIMEOUT_SECONDS = 5.0
OBJECT_STORE_BYTES = 80 * 2**20
"""Size of Ray's object store: close to the minimum that Ray allows, since nothing is stored in
it."""

NODE_AFFINITY = 0.001
"""The amount of a node's own resource (``node:ADDRESS``) that a worker requests to run there."""

PROGRAMS = Path(__file__).parents[2]

Result = TypeVar("Result")


class ActorLost(Exception):
    """Says that an actor does not respond. Ray will restart the actor, unless ``is_permanent`` is
    true."""

    def __init__(self, reason: str, is_permanent: bool) -> None:
        super().__init__(reason)
        self.is_permanent = is_permanent


@dataclass(frozen=True, slots=True)
class PlacedActor:
    """A worker's actor, and the resources that are reserved for it."""

    worker_id: str
    actor: Any
    group: PlacementGroup


class RayCluster:
    """A connection to Ray; call ``connect`` first and ``close`` last. All calls to Ray run in one
    thread, because they block, and because the processes of a private Ray end with the thread that
    started them."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        # A private Ray's processes inherit the blocked signals from the thread that starts them.
        self._thread = ThreadPoolExecutor(1, "ray", initializer=block_stop_signals)
        self.private_folder = ""
        """The folder with the files and sockets of a private Ray, accessible only to the current
        user."""
        self._node_by_worker: dict[str, tuple[str, str]] = {}
        self._worker_resources: dict[str, float] = {}
        self.supervisor_host = LOOPBACK[0]
        """The address on which the supervisor's own programs listen."""
        self.spans_machines = False
        """Whether workers may run on machines other than this one."""

    # -- connection -------------------------------------------------------------------------

    async def connect(self) -> None:
        """Start a private Ray, or connect to the one at ``ray_address``. Raises Unavailable if that
        fails."""
        try:
            await self._in_thread(self._connect)
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            address = self._settings.ray_address
            ray_name = f"Ray at {address}" if address else "a private Ray"
            raise Unavailable(f"{ray_name} can't be reached: {_first_line(error)}") from error

    async def close(self) -> None:
        await self._in_thread(ray.shutdown)
        self._thread.shutdown()
        if self.private_folder:
            shutil.rmtree(self.private_folder, ignore_errors=True)

    def _connect(self) -> None:
        address = self._settings.ray_address
        options = {
            "log_to_driver": False,
            "logging_level": logging.CRITICAL,
            # Ray's workers find the actor in the programs' folder. A "client job", since otherwise
            # Ray would put the working folder first in their sys.path.
            "job_config": JobConfig(_client_job=True, _py_driver_sys_path=[str(PROGRAMS)]),
        }
        if address is None:
            # Ray makes its folder accessible to everybody (0777): create it in a private one.
            self.private_folder = tempfile.mkdtemp(prefix="baton-ray-")
            ray.init(
                "local",
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                # A short path, since socket paths are limited to 107 bytes.
                _temp_dir=str(Path(self.private_folder) / "r"),
                **options,
            )
        else:
            _check_reachable(address)
            ray.init(address, **options)
        self._read_nodes()

    def _read_nodes(self) -> None:
        settings, here = self._settings, ray.util.get_node_ip_address()
        addresses = {node["NodeManagerAddress"] for node in _nodes()}
        self.spans_machines = len(addresses) > 1 or settings.grpc_host not in LOOPBACK
        if self.spans_machines:
            self.supervisor_host = here
        self._worker_resources = {"CPU": settings.ray_worker_cpus}
        if gpus := self._gpus():
            self._worker_resources["GPU"] = gpus
        if not self.spans_machines:
            self._worker_resources[f"node:{here}"] = NODE_AFFINITY

    def _gpus(self) -> float:
        if self._settings.ray_worker_gpus is not None:
            return self._settings.ray_worker_gpus
        if self._settings.device == "auto":
            return float(bool(ray.cluster_resources().get("GPU")))
        return float(self._settings.device.startswith("cuda"))

    # -- workers ----------------------------------------------------------------------------

    async def check_capacity(self, count: int) -> None:
        """Raise Unavailable if ``count`` workers could not run even if Ray ran nothing else."""
        total = await self._in_thread(ray.cluster_resources)
        for name, each in self._requested_resources().items():
            if each * count > total.get(name, 0.0):
                raise Unavailable(
                    f"{count} workers need {each * count:g} {name}, but Ray has "
                    f"{total.get(name, 0.0):g}: start fewer, add nodes, or lower "
                    f"ray_worker_{name.lower()}s ({each:g})"
                )

    async def create_actor(self, spec: RemoteWorkerSpec) -> PlacedActor:
        """Create an actor, which starts as soon as the resources that it reserves are free. The
        caller must call :meth:`release_actor` later. Raises ActorLost if Ray refuses to create
        it."""
        try:
            return await self._in_thread(lambda: self._create_actor(spec))
        except (RayError, ConnectionError) as error:
            raise ActorLost(_first_line(error), is_permanent=True) from error

    async def call_actor(self, placed: PlacedActor, method: str, *arguments: int) -> Any:
        """Call a method of the actor and return its result. There is no timeout. Raises ActorLost
        if the actor does not respond."""
        reference = await self._in_thread(lambda: getattr(placed.actor, method).remote(*arguments))
        try:
            return await _result(reference)
        except ActorUnavailableError as error:
            raise ActorLost(_first_line(error), is_permanent=False) from error
        except RayError as error:
            raise ActorLost(_first_line(error), is_permanent=True) from error

    async def describe_missing_resources(self, placed: PlacedActor) -> str:
        """Describe the resources that a worker is waiting for. Returns an empty text if the worker
        has them, or if Ray does not report them."""
        try:
            return await self._in_thread(lambda: self._describe_missing_resources(placed))
        except (RayError, ConnectionError):
            return ""

    def record_node(self, placed: PlacedActor, node_id: str) -> None:
        """Record the node on which a worker runs. It may differ from the node that was
        preferred."""
        role, _ = self._node_by_worker[placed.worker_id]
        self._node_by_worker[placed.worker_id] = (role, node_id)

    async def release_actor(self, placed: PlacedActor) -> None:
        """Kill the actor, and thereby its worker, and free its resources."""
        self._node_by_worker.pop(placed.worker_id, None)
        await self._in_thread(lambda: _release(placed))

    def _create_actor(self, order: RemoteWorkerSpec) -> PlacedActor:
        # Prefer the node with the fewest workers; Ray itself would fill one node after the other.
        # Only the strategy STRICT_PACK accepts a preferred node; a single bundle is never split
        # anyway.
        node = self._least_used_node(order.role)
        group = placement_group(
            [self._worker_resources], strategy="STRICT_PACK", _soft_target_node_id=node or None
        )
        self._node_by_worker[order.id] = (order.role, node)
        actor = ray.remote(WorkerActor).options(
            num_cpus=self._worker_resources["CPU"],
            num_gpus=self._worker_resources.get("GPU", 0),
            max_restarts=MAX_RESTARTS,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group),
        )
        return PlacedActor(order.id, actor.remote(asdict(order), self.spans_machines), group)

    def _least_used_node(self, role: str) -> str:
        """Return the node with the fewest workers of this role. Of several such nodes, return the
        one with the fewest workers of both roles; if there are still several, the first by id."""
        same_role = Counter(node for other, node in self._node_by_worker.values() if other == role)
        both_roles = Counter(node for _, node in self._node_by_worker.values())
        ids = [str(node["NodeID"]) for node in _nodes()]
        return min(ids, key=lambda node: (same_role[node], both_roles[node], node), default="")

    def _describe_missing_resources(self, placed: PlacedActor) -> str:
        if placement_group_table(placed.group).get("state") == "CREATED":
            return ""
        if not _nodes():
            return "waits for Ray, which has no live node"
        free, total = ray.available_resources(), ray.cluster_resources()
        needs = [
            f"{each:g} {name} ({free.get(name, 0.0):g} of {total.get(name, 0.0):g} are free)"
            for name, each in self._requested_resources().items()
        ]
        return f"waits for a Ray node with {', '.join(needs)}"

    def _requested_resources(self) -> dict[str, float]:
        return {
            name: each for name, each in self._worker_resources.items() if each != NODE_AFFINITY
        }

    async def _in_thread(self, function: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)


def _nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _release(placed: PlacedActor) -> None:
    with contextlib.suppress(RayError, ValueError):
        ray.kill(placed.actor)
    with contextlib.suppress(RayError, ValueError):
        remove_placement_group(placed.group)


def _check_reachable(address: str) -> None:
    """Raise OSError if nothing listens on ``address``; Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    if host:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_SECONDS).close()


async def _result(reference: Any) -> Any:
    """Wait for a call to an actor, and return its result. Cancelling the wait does not cancel the
    call."""
    loop = asyncio.get_running_loop()
    local: asyncio.Future[Any] = loop.create_future()

    def copy_result(remote: "Future[Any]") -> None:
        if local.done():
            return
        error = remote.exception()
        if error is None:
            local.set_result(remote.result())
        else:
            local.set_exception(error)

    def on_done(remote: "Future[Any]") -> None:
        with contextlib.suppress(RuntimeError):  # raised if the event loop has ended
            loop.call_soon_threadsafe(copy_result, remote)

    reference.future().add_done_callback(on_done)
    return await local


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
