"""Reads what the router itself does not know: the pools' sizes from the supervisor, the conductors'
plans, and the statistics of KV stores. All of it is read only while somebody looks at the console.
"""

import asyncio
from collections.abc import Awaitable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from baton.clock import Clock
from baton.core.credentials import ClusterCredentials
from baton.core.member import Member
from baton.core.states import Role
from baton.errors import BatonError
from baton.pools.control_client import send_control_command
from baton.rpc.conductor_client import fetch_pool_plan
from baton.rpc.kvstore_client import KvStoreClient
from router.console.worker_rows import Row, Rows
from router.generation.cluster import Cluster
from router.limits import MAX_SHOWN_CHARACTERS, MAX_SHOWN_CONDUCTORS, MAX_SHOWN_MODELS, MAX_STORES

POOLS_WAIT_SECONDS = 0.2
"""How long a frame waits for the supervisor, which usually answers within milliseconds."""

REMOTE_INTERVAL_SECONDS = 5.0
"""Pause between two queries of the conductors and stores. Their figures change slowly."""

REMOTE_TIMEOUT_SECONDS = 0.5
"""How long a frame waits for conductors and stores."""

T = TypeVar("T")


class PoolsReader:
    """Reads the pools from the supervisor's control socket at ``path``. ``pools`` is the last
    answer, or None if there was none. ``error`` says why the last call failed; it is empty if the
    call succeeded."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._call: asyncio.Future[dict[str, Any]] | None = None
        self.pools: Row | None = None
        self.error = ""

    async def refresh(self) -> None:
        """Ask the supervisor, unless the last call has not returned yet. A supervisor that answers
        late delays nobody: a later refresh takes its answer."""
        if self._call is None:
            call = partial(send_control_command, self._path, {"command": "pools"})
            self._call = asyncio.get_running_loop().run_in_executor(None, call)
            self._call.add_done_callback(_retrieve_exception)
        await asyncio.wait([self._call], timeout=POOLS_WAIT_SECONDS)
        if not self._call.done():
            return
        call_result, self._call = self._call, None
        try:
            self.pools, self.error = call_result.result(), ""
        except BatonError as error:
            self.error = str(error)[:MAX_SHOWN_CHARACTERS]


def _retrieve_exception(call: "asyncio.Future[Any]") -> None:
    """Retrieve the exception of a call, because asyncio logs exceptions that nobody retrieves, and
    the page for which the call was made may have been closed."""
    if not call.cancelled():
        call.exception()


class RemoteReader:
    """Reads the conductors' plans and the stores' statistics. ``plans`` are the plans of the pools'
    sizes, one for each model that has one; all are from one conductor. ``stores`` are the rows of
    the store nodes, by id; a node that did not answer has an ``error``."""

    def __init__(
        self, cluster: Cluster, clock: Clock, credentials: ClusterCredentials | str | None
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._credentials = credentials
        self._read_at = float("-inf")
        self.plans: list[Row] = []
        self.stores: Rows = {}

    async def refresh(self) -> None:
        """Read everything, if the last time is long enough ago."""
        now = self._clock.monotonic()
        if now < self._read_at + REMOTE_INTERVAL_SECONDS:
            return
        conductors = self._cluster.ready_members(Role.CONDUCTOR)[:MAX_SHOWN_CONDUCTORS]
        stores = self._cluster.ready_members(Role.KVSTORE)[:MAX_STORES]
        plans, rows = await asyncio.gather(
            _all(self._read_plans(each) for each in conductors),
            _all(self._read_store(each) for each in stores),
        )
        self._read_at = now
        self.plans = next((found for found in plans if found), [])
        self.stores = {row["id"]: row for row in rows}

    async def _read_plans(self, conductor: Member) -> list[Row]:
        """Return the conductor's plans, or an empty list if it does not answer."""
        models = sorted({worker.model for worker in self._cluster.ready_workers()})[
            :MAX_SHOWN_MODELS
        ]
        plans = await _all(self._read_plan(conductor, model) for model in models)
        return [plan for plan in plans if plan is not None]

    async def _read_plan(self, conductor: Member, model: str) -> Row | None:
        try:
            plan = await fetch_pool_plan(
                conductor.address, self._credentials, REMOTE_TIMEOUT_SECONDS, model
            )
        except BatonError:
            return None
        if plan is None:
            return None
        row = asdict(plan)
        del row["alternatives"]
        shown = {
            "model": model,
            "reason": plan.reason[:MAX_SHOWN_CHARACTERS],
            "conductor": conductor.id,
        }
        return row | shown

    async def _read_store(self, store: Member) -> Row:
        row: Row = {"id": store.id, "host": store.host, "error": ""}
        client = KvStoreClient(store.address, self._credentials)
        try:
            async with asyncio.timeout(REMOTE_TIMEOUT_SECONDS):
                return {**row, **asdict(await client.stat(check=False))}
        except TimeoutError:
            return {**row, "error": "it does not answer"}
        except BatonError as error:
            return {**row, "error": str(error)[:MAX_SHOWN_CHARACTERS]}
        finally:
            await client.close()


async def _all(reads: Iterable[Awaitable[T]]) -> list[T]:
    return await asyncio.gather(*reads)
