"""Bugs to plant, one at a time: a simulation that finds none of them would find nothing."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from baton.core.request import RequestOutput
from baton.engine.engine import Engine
from baton.errors import BatonError
from baton.rpc.framed.client import open_framed_connection
from baton.rpc.framed.connection import FramedConnection, FrameKind
from baton.rpc.framed.server import FramedServerConnection
from baton.rpc.framed.worker_service import WORKER_SERVICE
from baton.rpc.frames import FRAME_HEADER, FrameProtocol
from baton.worker.kv_layout import KvLayout
from router.generation.attempt import Attempt
from router.generation.framed_worker_connection import FramedWorkerConnection
from router.generation.generation import Generation
from router.generation.output_merger import OutputMerger
from router.generation.output_queue import OutputQueue
from router.generation.worker_connection import CONNECT_TIMEOUT_SECONDS, StreamWorkerConnection
from router.http.connection import UvicornBodyWriter
from router.openai.choice_stream import ChoiceStream
from tests.sim.whole.chance import Chance
from tests.sim.whole.transport import Fabric

Changes = list[tuple[type, str, Any]]


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
    latest, changes = _latest_inboxes()

    def deliver(self: StreamWorkerConnection, output: RequestOutput) -> None:
        latest[output.request_id].put(self._worker.id, output)

    return [*changes, (StreamWorkerConnection, "deliver", deliver), *_no_fences()]


def _latest_inboxes() -> tuple[dict[str, OutputQueue], Changes]:
    """The newest inbox of each request."""
    submit = StreamWorkerConnection.submit
    latest: dict[str, OutputQueue] = {}

    def remember(
        self: StreamWorkerConnection, spec: Any, task: Any, source: Any, inbox: OutputQueue
    ) -> None:
        latest[spec.request_id] = inbox
        submit(self, spec, task, source, inbox)

    return latest, [(StreamWorkerConnection, "submit", remember)]


def _no_fences() -> Changes:
    """Outputs of any epoch are as good as another's."""
    accept, add = Attempt._accept, OutputMerger.add

    def accept_any(self: Attempt, worker_id: Any, item: Any) -> list[RequestOutput]:
        if not isinstance(item, RequestOutput) or item.epoch == self._spec.epoch:
            return accept(self, worker_id, item)
        return [] if item.finish_reason is not None else list(self._merge.add(item))

    def add_any(self: OutputMerger, output: RequestOutput) -> Iterator[RequestOutput]:
        known = self._epoch
        self._epoch = output.epoch
        try:
            yield from add(self, output)
        finally:
            self._epoch = known

    return [(Attempt, "_accept", accept_any), (OutputMerger, "add", add_any)]


def lost_token() -> Changes:
    """What is placed anew lacks the last token that the client has."""
    return [(Generation, "_begin_epoch", _begin_with(lambda answered: answered[:-1]))]


def doubled_token() -> Changes:
    """What is placed anew has the last token twice."""
    return [(Generation, "_begin_epoch", _begin_with(lambda answered: [*answered, *answered[-1:]]))]


def _begin_with(change: Callable[[Any], Any]) -> Callable[..., Any]:
    original = Generation._begin_epoch

    async def begin(self: Generation, answered: Any) -> None:
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


# -- of lines ----------------------------------------------------------------------------------


def torn_frame() -> Changes:
    """A frame whose head was cut in two is not put together again."""
    original = FrameProtocol.data_received

    def data_received(self: FrameProtocol, data: bytes) -> None:
        original(self, data)
        if len(self._rest) < FRAME_HEADER.size:
            self._rest.clear()

    return [(FrameProtocol, "data_received", data_received)]


def late_frame() -> Changes:
    """What still comes over a line that was given up is taken for its successor's."""
    latest, changes = _latest_inboxes()
    deliver = StreamWorkerConnection.deliver

    def deliver_late(self: StreamWorkerConnection, output: RequestOutput) -> None:
        if self.alive:
            deliver(self, output)
        else:
            latest[output.request_id].put(self._worker.id, output)

    def lose(self: FramedConnection, error: BatonError) -> None:
        asyncio.get_running_loop().call_later(4.0, self.close)
        self._end(error)

    async def serve(self: FramedWorkerConnection) -> BatonError:
        line = self._line = await open_framed_connection(
            self._worker.line, WORKER_SERVICE, self._trust, self._receive, CONNECT_TIMEOUT_SECONDS
        )
        self.reached = True
        for message in self._early:
            line.send_message(message)
        return await line.ended()

    return [
        *changes,
        (StreamWorkerConnection, "deliver", deliver_late),
        (FramedWorkerConnection, "serve", serve),
        (FramedConnection, "lose", lose),
        *_no_fences(),
    ]


def unclosed_line() -> Changes:
    """A line whose peer was silent for too long is given up, and never closed."""

    def lose(self: FramedConnection, error: BatonError) -> None:
        self._end(error)

    return [(FramedConnection, "lose", lose), (FramedConnection, "close", lambda self: None)]


def unanswered_ping() -> Changes:
    """Who has nothing to say is taken for dead."""
    original = FramedConnection._on_control

    def on_control(self: FramedConnection, kind: int, payload: bytes) -> None:
        if kind != FrameKind.PING:
            original(self, kind, payload)

    return [(FramedConnection, "_on_control", on_control)]


def endless_patience() -> Changes:
    """Nobody minds a peer that is silent."""

    def tick(self: FramedConnection) -> None:
        self.send(0, FrameKind.PING, b"")
        self._arm(self._tick_seconds, self._tick)

    return [(FramedConnection, "_tick", tick)]


def dropped_at_pressure() -> Changes:
    """What a peer that does not read leaves no room for is thrown away."""
    original = FrameProtocol.send

    def send(self: FrameProtocol, number: int, kind: int, payload: bytes) -> None:
        if self.transport is None or self.transport.get_write_buffer_size() == 0:
            original(self, number, kind, payload)

    return [(FrameProtocol, "send", send)]


def never_resumed() -> Changes:
    """Who has waited for a peer to read waits for ever."""
    return [(FramedConnection, "resume_writing", lambda self: None)]


def lost_early() -> Changes:
    """What was to be sent before there was a line is lost."""

    def send(self: FramedWorkerConnection, message: bytes) -> None:
        if self._line is not None:
            self._line.send_message(message)

    return [(FramedWorkerConnection, "send", send)]


def endless_handshake() -> Changes:
    """Who connects and says nothing stays."""
    original = FramedServerConnection._arm

    def arm(self: FramedServerConnection, seconds: float, call: Callable[[], None]) -> None:
        if self.is_open:
            original(self, seconds, call)

    return [(FramedServerConnection, "_arm", arm)]


# -- of the relay ------------------------------------------------------------------------------


def relayed_out_of_order() -> Changes:
    """A token overtakes those that wait to be read, and nobody looks at its index."""
    original, put = Attempt._hand_on, OutputQueue.put

    def hand_on(self: Attempt, worker_id: Any, output: RequestOutput) -> bool:
        waiting, self._merge.next_index = self._merge.next_index, output.first_index
        try:
            return original(self, worker_id, output)
        finally:
            self._merge.next_index = max(waiting, self._merge.next_index)

    def put_any(self: OutputQueue, worker_id: Any, item: Any) -> None:
        if self.relay is None or isinstance(item, BatonError) or not self.relay(worker_id, item):
            put(self, worker_id, item)

    return [(Attempt, "_hand_on", hand_on), (OutputQueue, "put", put_any)]


def relayed_after_the_end() -> Changes:
    """A placement that is over goes on to hand over tokens for a while."""
    put, close = OutputQueue.put, Attempt.close

    def put_any(self: OutputQueue, worker_id: Any, item: Any) -> None:
        if self.relay is None or isinstance(item, BatonError) or not self.relay(worker_id, item):
            put(self, worker_id, item)

    def close_later(self: Attempt) -> None:
        asyncio.get_running_loop().call_later(2.0, close, self)

    return [(OutputQueue, "put", put_any), (Attempt, "close", close_later)]


def relayed_to_nobody() -> Changes:
    """A token for a client that does not keep up counts as written."""
    original = ChoiceStream._relay
    return [
        (
            ChoiceStream,
            "_relay",
            lambda self, outlet, output: original(self, outlet, output) or True,
        )
    ]


def pushed_past_pause() -> Changes:
    """Whoever reads slowly is written to all the same."""

    def is_open(self: UvicornBodyWriter) -> bool:
        cycle = self._cycle
        begun = cycle.response_started and not cycle.response_complete
        return bool(begun and not cycle.disconnected and cycle.chunked_encoding)

    return [(UvicornBodyWriter, "is_open", property(is_open))]


BUGS: dict[str, Callable[[], Changes]] = {
    bug.__name__: bug
    for bug in (
        lost_free,
        stale_epoch,
        lost_token,
        doubled_token,
        stale_block,
        torn_frame,
        late_frame,
        unclosed_line,
        unanswered_ping,
        endless_patience,
        dropped_at_pressure,
        never_resumed,
        lost_early,
        endless_handshake,
        relayed_out_of_order,
        relayed_after_the_end,
        relayed_to_nobody,
        pushed_past_pause,
    )
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    with ExitStack() as changes:
        for where, what, instead in BUGS[name]():
            changes.enter_context(patch.object(where, what, instead))
        yield
