"""What every store node holds, as its events tell: the index that placements are made with."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import structlog

from baton.clock import Clock
from baton.core.ids import BlockKey, Incarnation, WorkerId
from baton.core.member import Member
from baton.core.states import Role
from baton.core.store import StoreHint, Tier, WatchEvent
from baton.errors import BatonError
from baton.registry.membership import Membership
from conductor.key_table import KeyTable

POLL_SECONDS = 0.2
"""Between looks at who is there; also before a watch that broke is begun again."""

MAX_NODE_BLOCKS = 1 << 26
"""Of one node, a gigabyte of the conductor's memory; what a node says to have beyond that is not
noted. No node has so many, but a broken one may say so."""

log = structlog.get_logger(__name__)

WatchNode = Callable[[Member, Incarnation, int], AsyncIterator[WatchEvent]]
"""Watches a node from (generation, number) on; raises when it ends."""


@dataclass(slots=True)
class _NodeContents:
    """``number`` is the last change that ``table`` contains. A snapshot that is still coming in
    is not complete: what is known of the node then is a part of what it has. So it is of one that
    ``is_full``."""

    generation: Incarnation
    number: int = 0
    table: KeyTable = field(default_factory=KeyTable)
    is_full: bool = False


class StoreMirror:
    """Only a hint: the node has the last word."""

    def __init__(self) -> None:
        self._views: dict[WorkerId, _NodeContents] = {}
        """In the order of their names; replaced as a whole, since metrics are read by a thread."""
        self.num_changes = 0

    def position(self, node: WorkerId) -> tuple[Incarnation, int]:
        """Up to where the node's events are known; generation 0: not at all."""
        view = self._views.get(node)
        return (view.generation, view.number) if view is not None else (Incarnation(0), 0)

    def apply(self, node: WorkerId, page: WatchEvent) -> bool:
        """False when the page does not follow what is known: some event was missed."""
        view = self._views.get(node)
        if page.reset:
            view = _NodeContents(page.generation, page.number)
            self._views = dict(sorted({**self._views, node: view}.items()))
        elif (
            view is None
            or view.generation != page.generation
            or page.number not in (view.number, view.number + 1)
        ):
            return False
        view.number = page.number
        self.num_changes += 1
        if page.tier is Tier.NONE:
            view.table.remove(page.keys)
        elif len(view.table) + len(page.keys) <= MAX_NODE_BLOCKS:
            view.table.add(page.keys, page.tier)
        elif not view.is_full:
            view.is_full = True
            log.warning("store_too_large", node=node, num_blocks=len(view.table))
        return True

    def drop(self, node: WorkerId) -> None:
        """It is gone, or can't be followed: nobody is sent there."""
        self._views = {name: view for name, view in self._views.items() if name != node}
        self.num_changes += 1

    def best(self, keys: Sequence[BlockKey]) -> StoreHint | None:
        """The node with the longest prefix; of equals the first by name. A look per node, and a
        search only in those that have the block which the best one so far lacks."""
        best: StoreHint | None = None
        most = 0
        for node, view in self._views.items():
            if most < len(keys) and view.table.tier(keys[most]):
                most = view.table.longest_prefix(keys)
                best = StoreHint(node, most)
        return best

    def held(self, node: WorkerId, keys: Sequence[BlockKey]) -> int:
        """How many of the leading blocks are there; 0 for a node that nobody knows."""
        view = self._views.get(node)
        return view.table.longest_prefix(keys) if view is not None else 0

    @property
    def num_blocks(self) -> int:
        return sum(len(view.table) for view in self._views.values())

    @property
    def num_nodes(self) -> int:
        return len(self._views)

    def describe(self) -> str:
        """One line per node."""
        return "\n".join(
            f"{node}: life {view.generation}, change {view.number}, {len(view.table)} blocks"
            for node, view in self._views.items()
        )


class StoreWatcher:
    """One watch per store node that is ready."""

    def __init__(
        self, mirror: StoreMirror, membership: Membership, watch: WatchNode, clock: Clock
    ) -> None:
        self._mirror = mirror
        self._membership = membership
        self._watch = watch
        self._clock = clock
        self._tasks: dict[tuple[WorkerId, Incarnation], asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                stores = {(m.id, m.generation): m for m in self._membership.ready(Role.KVSTORE)}
                for life in self._tasks.keys() - stores.keys():
                    self._tasks.pop(life).cancel()
                for life in stores.keys() - self._tasks.keys():
                    self._tasks[life] = tasks.create_task(self._follow(stores[life]))
                await self._clock.sleep(POLL_SECONDS)

    async def _follow(self, node: Member) -> None:
        """A watch that breaks means that the node is gone, until it can be begun again."""
        try:
            while True:
                try:
                    generation, number = self._mirror.position(node.id)
                    async for page in self._watch(node, generation, number):
                        if not self._mirror.apply(node.id, page):
                            log.warning("store_event_missed", node=node.id, number=page.number)
                            break
                except BatonError as error:
                    log.info("store_watch_broke", node=node.id, error=str(error))
                except Exception:  # a bug, or a node that says what none does: only its blocks
                    log.exception("store_watch_crashed", node=node.id)
                self._mirror.drop(node.id)
                await self._clock.sleep(POLL_SECONDS)
        finally:
            self._mirror.drop(node.id)
