"""Bugs to plant, one at a time: a simulation that finds none of them would find nothing."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from baton.core.request import RequestOutput
from baton.engine.engine import Engine
from baton.worker.kv_layout import KvLayout
from router.attempt import Attempt
from router.grpc_link import GrpcWorkerLink
from router.inbox import Inbox
from router.journey import Journey
from router.merge import Merge
from tests.sim.whole.chance import Chance
from tests.sim.whole.transport import Fabric

Changes = list[tuple[type, str, Callable[..., Any]]]


def lost_free() -> Changes:
    """A hand-off that ends early leaves its blocks pinned."""
    original = Engine.abort

    def abort(self: Engine, request_id: Any, *, quarantine: bool = False) -> bool:
        sequence = self._sequences.get(request_id)
        if sequence is not None and sequence.phase.value == "reserved" and not quarantine:
            return False
        return original(self, request_id, quarantine=quarantine)

    return [(Engine, "abort", abort)]


def stale_epoch() -> Changes:
    """Outputs go to whoever waits for the request, and no fence of the router holds."""
    accept, add, submit = Attempt._accept, Merge.add, GrpcWorkerLink.submit
    latest: dict[str, Inbox] = {}

    def remember(self: GrpcWorkerLink, spec: Any, task: Any, source: Any, inbox: Inbox) -> None:
        latest[spec.request_id] = inbox
        submit(self, spec, task, source, inbox)

    def deliver(self: GrpcWorkerLink, output: RequestOutput) -> None:
        latest[output.request_id].put(self._worker.id, output)

    def accept_any(self: Attempt, worker_id: Any, item: Any) -> list[RequestOutput]:
        if not isinstance(item, RequestOutput) or item.epoch == self._spec.epoch:
            return accept(self, worker_id, item)
        return [] if item.finish_reason is not None else list(self._merge.add(item))

    def add_any(self: Merge, output: RequestOutput) -> Iterator[RequestOutput]:
        known = self._epoch
        self._epoch = output.epoch
        try:
            yield from add(self, output)
        finally:
            self._epoch = known

    return [
        (GrpcWorkerLink, "submit", remember),
        (GrpcWorkerLink, "deliver", deliver),
        (Attempt, "_accept", accept_any),
        (Merge, "add", add_any),
    ]


def lost_token() -> Changes:
    """What is placed anew lacks the last token that the client has."""
    return [(Journey, "_begin_epoch", _begin_with(lambda answered: answered[:-1]))]


def doubled_token() -> Changes:
    """What is placed anew has the last token twice."""
    return [(Journey, "_begin_epoch", _begin_with(lambda answered: [*answered, *answered[-1:]]))]


def _begin_with(change: Callable[[Any], Any]) -> Callable[..., Any]:
    original = Journey._begin_epoch

    async def begin(self: Journey, answered: Any) -> None:
        await original(self, change(answered))

    return begin


def stale_block() -> Changes:
    """Nobody looks at checksums, and some reads arrive damaged."""
    build = Fabric.__init__

    def good(self: KvLayout, algorithm: str, blocks: Any, ids: Any, first: int, last: int) -> Any:
        return [True] * (last - first)

    def damaged(self: Fabric, chance: Chance) -> None:
        build(self, chance)
        self.damage = 0.05

    return [(KvLayout, "good", good), (Fabric, "__init__", damaged)]


BUGS: dict[str, Callable[[], Changes]] = {
    bug.__name__: bug
    for bug in (
        lost_free,
        stale_epoch,
        lost_token,
        doubled_token,
        stale_block,
    )
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    with ExitStack() as changes:
        for where, what, instead in BUGS[name]():
            changes.enter_context(patch.object(where, what, instead))
        yield
