"""A connection to Ray: to one that is started for this cluster alone, or to one that runs already.

Ray is inside the trust boundary: whoever reaches its ports can run code on its nodes, and its own
calls serialise with cloudpickle. What we send through it are plain values. A Ray of our own
listens on loopback, and asks for a token that only this process knows.
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
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from baton.config import LOOPBACK, Settings
from baton.errors import Unavailable
from orchestrator.launch_specs import RemoteWorkerSpec
from orchestrator.ray.actor import WorkerActor

MAX_RESTARTS = 3
"""Of an actor by Ray, on whatever node has room; after that it is made anew."""

CONNECT_SECONDS = 5.0
OBJECT_STORE_BYTES = 80 * 2**20
"""Ray's smallest, nearly: nothing is ever put there."""

NODE_AFFINITY = 0.001
"""Of the resource that every node has under its address: who asks for it runs there."""

Result = TypeVar("Result")


class ActorLost(Exception):
    """An actor does not answer: Ray brings it back, or (``for_good``) it doesn't."""

    def __init__(self, why: str, for_good: bool) -> None:
        super().__init__(why)
        self.for_good = for_good


@dataclass(frozen=True, slots=True)
class PlacedActor:
    """A worker's actor, and the resources that are reserved for it."""

    worker_id: str
    actor: Any
    group: PlacementGroup


class RayCluster:
    """``connect`` first, ``close`` last. All of Ray's calls run in one thread of ours: they block,
    and the processes of a Ray of our own end with the thread that has started them."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray")
        self.folder = ""
        """Of a Ray of our own: its files and sockets. Only our user may enter it."""
        self._homes: dict[str, tuple[str, str]] = {}
        self._bundle: dict[str, float] = {}
        self.host = LOOPBACK[0]
        """Where the supervisor's own programs listen."""
        self.networked = False
        """Whether workers may run on other machines than this one."""

    # -- life -------------------------------------------------------------------------------

    async def connect(self) -> None:
        """Raises Unavailable."""
        try:
            await self._in_thread(self._connect)
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            where = self._settings.ray_address or "of our own"
            raise Unavailable(f"Ray {where} can't be reached: {_first_line(error)}") from error

    async def close(self) -> None:
        await self._in_thread(ray.shutdown)
        self._thread.shutdown()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _connect(self) -> None:
        address = self._settings.ray_address
        quiet = {"log_to_driver": False, "logging_level": logging.CRITICAL}
        if address is None:
            # Ray opens its own folder to everybody (0777), so that lies in one which only we enter.
            self.folder = tempfile.mkdtemp(prefix="baton-ray-")
            ray.init(
                "local",
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=str(Path(self.folder) / "r"),  # short: paths of sockets end at 107 bytes
                **quiet,
            )
        else:
            _knock(address)
            ray.init(address, **quiet)
        self._look_around()

    def _look_around(self) -> None:
        settings, here = self._settings, ray.util.get_node_ip_address()
        addresses = {node["NodeManagerAddress"] for node in _nodes()}
        self.networked = len(addresses) > 1 or settings.grpc_host not in LOOPBACK
        if self.networked:
            self.host = here
        self._bundle = {"CPU": settings.ray_worker_cpus}
        if gpus := self._gpus():
            self._bundle["GPU"] = gpus
        if not self.networked:
            self._bundle[f"node:{here}"] = NODE_AFFINITY

    def _gpus(self) -> float:
        if self._settings.ray_worker_gpus is not None:
            return self._settings.ray_worker_gpus
        if self._settings.device == "auto":
            return float(bool(ray.cluster_resources().get("GPU")))
        return float(self._settings.device.startswith("cuda"))

    # -- workers ----------------------------------------------------------------------------

    async def check(self, count: int) -> None:
        """Raises Unavailable when so many workers could not run here even if nobody else did."""
        there = await self._in_thread(ray.cluster_resources)
        for name, each in self._wanted().items():
            if each * count > there.get(name, 0.0):
                raise Unavailable(
                    f"{count} workers need {each * count:g} {name}, and Ray has "
                    f"{there.get(name, 0.0):g}: start fewer, add nodes, or lower "
                    f"ray_worker_{name.lower()}s ({each:g})"
                )

    async def place(self, order: RemoteWorkerSpec) -> PlacedActor:
        """Reserves, and starts as soon as there is room. Ends with :meth:`let_go`. Raises
        ActorLost."""
        try:
            return await self._in_thread(lambda: self._place(order))
        except (RayError, ConnectionError) as error:
            raise ActorLost(_first_line(error), for_good=True) from error

    async def ask(self, placed: PlacedActor, method: str, *arguments: int) -> Any:
        """What the actor answers, however long it takes. Raises ActorLost."""
        reference = await self._in_thread(lambda: getattr(placed.actor, method).remote(*arguments))
        try:
            return await _result(reference)
        except ActorUnavailableError as error:
            raise ActorLost(_first_line(error), for_good=False) from error
        except RayError as error:
            raise ActorLost(_first_line(error), for_good=True) from error

    async def waits_for(self, placed: PlacedActor) -> str:
        """The resources that a worker waits for, in words; empty when it has them, or Ray does not
        say."""
        try:
            return await self._in_thread(lambda: self._waits_for(placed))
        except (RayError, ConnectionError):
            return ""

    def settle(self, placed: PlacedActor, node_id: str) -> None:
        """Where a worker has come to run, which need not be where it was to."""
        role, _ = self._homes[placed.worker_id]
        self._homes[placed.worker_id] = (role, node_id)

    async def let_go(self, placed: PlacedActor) -> None:
        """Ends the actor, and with it what it runs."""
        self._homes.pop(placed.worker_id, None)
        await self._in_thread(lambda: _let_go(placed))

    def _place(self, order: RemoteWorkerSpec) -> PlacedActor:
        # One bundle is never torn apart, and of all strategies only this one takes a wish for a
        # node: the one that has the fewest of us. Else Ray would fill one node after the other.
        node = self._emptiest(order.role)
        group = placement_group(
            [self._bundle], strategy="STRICT_PACK", _soft_target_node_id=node or None
        )
        self._homes[order.id] = (order.role, node)
        actor = ray.remote(WorkerActor).options(
            num_cpus=self._bundle["CPU"],
            num_gpus=self._bundle.get("GPU", 0),
            max_restarts=MAX_RESTARTS,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group),
        )
        return PlacedActor(order.id, actor.remote(asdict(order), self.networked), group)

    def _emptiest(self, role: str) -> str:
        """Of this role first, then of both; the id breaks ties."""
        same = Counter(node for other, node in self._homes.values() if other == role)
        both = Counter(node for _, node in self._homes.values())
        ids = [str(node["NodeID"]) for node in _nodes()]
        return min(ids, key=lambda node: (same[node], both[node], node), default="")

    def _waits_for(self, placed: PlacedActor) -> str:
        if placement_group_table(placed.group).get("state") == "CREATED":
            return ""
        if not _nodes():
            return "Ray has no machine left"
        free, there = ray.available_resources(), ray.cluster_resources()
        told = [
            f"{each:g} {name} ({free.get(name, 0.0):g} of {there.get(name, 0.0):g} are free)"
            for name, each in self._wanted().items()
        ]
        return f"waits for a node of Ray with {', '.join(told)}"

    def _wanted(self) -> dict[str, float]:
        return {name: each for name, each in self._bundle.items() if each != NODE_AFFINITY}

    async def _in_thread(self, function: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)


def _nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _let_go(placed: PlacedActor) -> None:
    with contextlib.suppress(RayError, ValueError):
        ray.kill(placed.actor)
    with contextlib.suppress(RayError, ValueError):
        remove_placement_group(placed.group)


def _knock(address: str) -> None:
    """Ray itself tries for minutes. Raises OSError."""
    host, _, port = address.rpartition(":")
    if host:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()


async def _result(reference: Any) -> Any:
    """Of a call to an actor. Whoever stops waiting leaves the call alone."""
    loop = asyncio.get_running_loop()
    mine: asyncio.Future[Any] = loop.create_future()

    def settle(told: "Future[Any]") -> None:
        if mine.done():
            return
        error = told.exception()
        if error is None:
            mine.set_result(told.result())
        else:
            mine.set_exception(error)

    def done(told: "Future[Any]") -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, told)

    reference.future().add_done_callback(done)
    return await mine


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
