"""Mirrors the contents of store nodes, and of workers that report their cached blocks, from their
events, for use in placement."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import structlog

from baton.clock import Clock
from baton.core.ids import BlockKey, Incarnation, WorkerId
from baton.core.member import Member
from baton.core.states import Role
from baton.core.store import StoreHint, Tier, WatchEvent
from baton.errors import BatonError
from baton.registry.membership import Membership
from conductor.key_table import KeyTable, fingerprint
from conductor.limits import MAX_NODE_BLOCKS

POLL_SECONDS = 0.2
"""Interval between checks for new nodes; also the delay before a broken watch is restarted."""

log = structlog.get_logger(__name__)

WatchNode = Callable[[Member, Incarnation, int], AsyncIterator[WatchEvent]]
"""Yields a node's events after the change with the given number, in the given generation (one run
of the node); raises when the watch ends."""


@dataclass(slots=True)
class _NodeContents:
    """The known contents of a node. ``number`` is the last change that ``table`` contains. While a
    snapshot is being received, or if ``is_full`` is True, the table has only a part of the node's
    blocks."""

    generation: Incarnation
    number: int = 0
    table: KeyTable = field(default_factory=KeyTable)
    is_full: bool = False


class StoreMirror:
    """The known contents of all store nodes. They are only hints: what counts is the node's own
    response to a lookup."""

    def __init__(self) -> None:
        self._contents: dict[WorkerId, _NodeContents] = {}
        """Sorted by node id; replaced as a whole, since the metrics thread reads it."""
        self.num_changes = 0

    def position(self, node: WorkerId) -> tuple[Incarnation, int]:
        """Return the last known (generation, change number) of a node; the generation is 0 if the
        node is unknown."""
        view = self._contents.get(node)
        return (view.generation, view.number) if view is not None else (Incarnation(0), 0)

    def apply(self, node: WorkerId, page: WatchEvent) -> bool:
        """Apply an event. If the event does not follow the last one, an event was missed: then
        apply nothing and return False."""
        view = self._contents.get(node)
        if page.is_reset:
            view = _NodeContents(page.generation, page.number)
            self._contents = dict(sorted({**self._contents, node: view}.items()))
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

    def drop_node(self, node: WorkerId) -> None:
        """Remove a node that is gone or can't be watched, so that no worker is told to fetch
        a prefix from it."""
        self._contents = {name: view for name, view in self._contents.items() if name != node}
        self.num_changes += 1

    def best_node(self, keys: Sequence[BlockKey]) -> StoreHint | None:
        """Return the node that stores the longest prefix of ``keys``; of several such nodes, the
        first by id. Return None if no node has the first block. Each node takes one lookup, for the
        block after the longest prefix found so far; the node is searched further only if it has
        that block."""
        if not keys:
            return None
        best: StoreHint | None = None
        wanted = fingerprint(keys[0])
        for node, view in self._contents.items():
            if view.table.has(wanted):
                num_blocks = view.table.longest_prefix(keys)
                best = StoreHint(node, num_blocks)
                if num_blocks == len(keys):
                    break
                wanted = fingerprint(keys[num_blocks])
        return best

    def knows(self, node: WorkerId) -> bool:
        return node in self._contents

    def nodes_with_prefix(self, keys: Sequence[BlockKey]) -> list[WorkerId]:
        """Return the nodes that have the first block."""
        if not keys:
            return []
        wanted = fingerprint(keys[0])
        return [node for node, view in self._contents.items() if view.table.has(wanted)]

    def num_leading_blocks(self, node: WorkerId, keys: Sequence[BlockKey]) -> int:
        """Return how many leading blocks the node has; 0 for an unknown node."""
        view = self._contents.get(node)
        return view.table.longest_prefix(keys) if view is not None else 0

    @property
    def num_blocks(self) -> int:
        return sum(len(view.table) for view in self._contents.values())

    @property
    def num_nodes(self) -> int:
        return len(self._contents)

    def describe(self) -> str:
        """Return a text with one line per node."""
        return "\n".join(
            f"{node}: generation {view.generation}, change {view.number}, {len(view.table)} blocks"
            for node, view in self._contents.items()
        )


def ready_stores(membership: Membership) -> Iterable[Member]:
    return membership.ready(Role.KVSTORE)


def reporting_workers(membership: Membership) -> Iterable[Member]:
    """Return the workers that report which blocks they have cached."""
    return [member for member in membership.members if member.reports_blocks]


class StoreWatcher:
    """Runs one watch per node, and applies its events to the mirror. The nodes are the members that
    ``nodes`` selects."""

    def __init__(
        self,
        mirror: StoreMirror,
        membership: Membership,
        watch: WatchNode,
        clock: Clock,
        nodes: Callable[[Membership], Iterable[Member]] = ready_stores,
    ) -> None:
        self._mirror = mirror
        self._membership = membership
        self._watch = watch
        self._clock = clock
        self._nodes = nodes
        self._tasks: dict[tuple[WorkerId, Incarnation], asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Watch the nodes until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                nodes = {(m.id, m.generation): m for m in self._nodes(self._membership)}
                for key in self._tasks.keys() - nodes.keys():
                    self._tasks.pop(key).cancel()
                for key in nodes.keys() - self._tasks.keys():
                    self._tasks[key] = tasks.create_task(self._watch_node(nodes[key]))
                await self._clock.sleep(POLL_SECONDS)

    async def _watch_node(self, node: Member) -> None:
        """Watch a node and restart broken watches. While a watch is broken, the node is removed
        from the mirror."""
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
                except Exception:  # a bug, or an invalid event: forget only this node's blocks
                    log.exception("store_watch_crashed", node=node.id)
                self._mirror.drop_node(node.id)
                await self._clock.sleep(POLL_SECONDS)
        finally:
            self._mirror.drop_node(node.id)
