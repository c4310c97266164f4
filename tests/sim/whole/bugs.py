"""Bugs that a test plants one at a time, to prove that the simulation finds them. Each function
describes one bug, and returns the patches that plant it."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

from baton.core.request import RequestOutput
from baton.engine.engine import Engine
from baton.engine.key_chain import BlockKeyChainFactory
from baton.errors import BatonError
from baton.rpc.framed.client import open_framed_connection
from baton.rpc.framed.connection import FramedConnection, FrameKind
from baton.rpc.framed.server import FramedServerConnection
from baton.rpc.frames import FRAME_HEADER, FrameProtocol
from baton.rpc.service import WORKER
from baton.transport.base import Transfer, Transport
from baton.transport.unfinished_transfers import UnfinishedTransfers
from baton.worker.block_group import BlockGroup
from baton.worker.block_reader import BlockReader
from conductor.cache_index import CacheIndex
from conductor.policy import candidates
from conductor.policy.snapshot import PolicyQuery, Snapshot
from conductor.worker_directory import WorkerDirectory
from router.generation.attempt import Attempt
from router.generation.generation import Generation
from router.generation.model_workers import ModelWorkers
from router.generation.output_merger import OutputMerger
from router.generation.output_queue import OutputQueue, OutputReceiver
from router.generation.ring_placer import RingPlacer
from router.generation.worker_connection import CONNECT_TIMEOUT_SECONDS, FramedWorkerConnection
from router.http.body_senders import UvicornBodyWriter
from router.serving.delivery import InlineStreamWriter
from tests.sim.whole.seeded_random import SeededRandom
from tests.sim.whole.transport import Fabric

Changes = list[tuple[type | ModuleType, str, Any]]


def leaked_reservation() -> Changes:
    """If a KV transfer ends early, the blocks that were reserved for it stay pinned."""
    original = Engine.abort

    def abort(self: Engine, request_id: Any, *, quarantine: bool = False) -> bool:
        sequence = self._sequences.get(request_id)
        if sequence is not None and sequence.phase.value == "reserved" and not quarantine:
            return False
        return original(self, request_id, quarantine=quarantine)

    return [(Engine, "abort", abort)]


def ignored_epoch() -> Changes:
    """Outputs of any epoch are delivered to the newest attempt of the request, and the router does
    not check their epochs."""
    latest, changes = _latest_receivers()

    def deliver(self: FramedWorkerConnection, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            latest[output.request_id](self._worker.id, output)

    return [*changes, (FramedWorkerConnection, "deliver", deliver), *_no_fences()]


def _latest_receivers() -> tuple[dict[str, OutputReceiver], Changes]:
    """Return a dict from request ids to the newest receiver of each request's outputs, and the
    patches that keep the dict up to date."""
    submit = FramedWorkerConnection.submit
    latest: dict[str, OutputReceiver] = {}

    def remember(
        self: FramedWorkerConnection, spec: Any, task: Any, source: Any, receive: OutputReceiver
    ) -> None:
        latest[spec.request_id] = receive
        submit(self, spec, task, source, receive)

    return latest, [(FramedWorkerConnection, "submit", remember)]


def _no_fences() -> Changes:
    """Return patches that make the router accept outputs of any epoch."""
    accept, add = Attempt._process_one, OutputMerger.add

    def accept_any(self: Attempt, worker_id: Any, item: Any) -> list[RequestOutput]:
        if not isinstance(item, RequestOutput) or item.epoch == self._spec.epoch:
            return accept(self, worker_id, item)
        return [] if item.finish_reason is not None else list(self._merger.add(item))

    def add_any(self: OutputMerger, output: RequestOutput) -> Iterator[RequestOutput]:
        known = self._epoch
        self._epoch = output.epoch
        try:
            yield from add(self, output)
        finally:
            self._epoch = known

    return [(Attempt, "_process_one", accept_any), (OutputMerger, "add", add_any)]


def lost_token() -> Changes:
    """When a request gets a new placement, the last token that the client has received is missing
    from the tokens that are submitted."""
    return [(Generation, "_begin_epoch", _begin_with(lambda answered: answered[:-1]))]


def repeated_token() -> Changes:
    """When a request gets a new placement, the last token that the client has received occurs twice
    in the tokens that are submitted."""
    return [(Generation, "_begin_epoch", _begin_with(lambda answered: [*answered, *answered[-1:]]))]


def _begin_with(change: Callable[[Any], Any]) -> Callable[..., Any]:
    original = Generation._begin_epoch

    async def begin(self: Generation, answered: Any) -> None:
        await original(self, change(answered))

    return begin


def unverified_checksum() -> Changes:
    """Checksums are not verified, and some KV reads arrive damaged."""
    build = Fabric.__init__

    def all_matching(self: BlockGroup, indexes: Iterable[int]) -> set[int]:
        return set(indexes)

    def damaged(self: Fabric, chance: SeededRandom) -> None:
        build(self, chance)
        self.damage = 0.05

    return [(BlockGroup, "_matching", all_matching), (Fabric, "__init__", damaged)]


# -- framed connections ------------------------------------------------------------------------


def torn_frame() -> Changes:
    """A frame whose header arrives in two pieces is not reassembled."""
    original = FramedConnection.data_received

    def data_received(self: FramedConnection, data: bytes) -> None:
        original(self, data)
        if len(self._rest) < FRAME_HEADER.size:
            self._rest.clear()

    return [(FramedConnection, "data_received", data_received)]


def frame_after_close() -> Changes:
    """Messages that arrive over a connection that was given up are treated as if they had arrived
    over the connection that replaced it."""
    latest, changes = _latest_receivers()
    deliver = FramedWorkerConnection.deliver

    def deliver_late(self: FramedWorkerConnection, outputs: Iterable[RequestOutput]) -> None:
        if self.is_alive:
            deliver(self, outputs)
            return
        for output in outputs:
            latest[output.request_id](self._worker.id, output)

    def lose(self: FramedConnection, error: BatonError) -> None:
        asyncio.get_running_loop().call_later(4.0, self.close)
        self._end(error)

    async def serve(self: FramedWorkerConnection) -> BatonError:
        line = self._connection = await open_framed_connection(
            self._worker.framed_address,
            WORKER.name,
            self._credentials,
            self._receive,
            CONNECT_TIMEOUT_SECONDS,
        )
        self.was_connected = True
        for message in self._unsent:
            line.send_message(message)
        return await line.wait_until_ended()

    return [
        *changes,
        (FramedWorkerConnection, "deliver", deliver_late),
        (FramedWorkerConnection, "serve", serve),
        (FramedConnection, "lose", lose),
        *_no_fences(),
    ]


def unclosed_connection() -> Changes:
    """A connection whose peer was silent for too long is given up, but never closed."""

    def lose(self: FramedConnection, error: BatonError) -> None:
        self._end(error)

    return [(FramedConnection, "lose", lose), (FramedConnection, "close", lambda self: None)]


def unanswered_ping() -> Changes:
    """Pings are not answered, so an idle peer is considered dead."""
    original = FramedConnection._on_control

    def on_control(self: FramedConnection, number: int, kind: int, payload: bytes) -> None:
        if kind != FrameKind.PING:
            original(self, number, kind, payload)

    return [(FramedConnection, "_on_control", on_control)]


def no_silence_timeout() -> Changes:
    """A connection whose peer is silent is never given up."""

    def tick(self: FramedConnection) -> None:
        self.send(0, FrameKind.PING, b"")
        self._start_timer(self._tick_seconds, self._tick)

    return [(FramedConnection, "_tick", tick)]


def dropped_under_backpressure() -> Changes:
    """A message is discarded if the send buffer is not empty."""
    original = FrameProtocol.send

    def send(self: FrameProtocol, number: int, kind: int, payload: bytes) -> None:
        if self.transport is None or self.transport.get_write_buffer_size() == 0:
            original(self, number, kind, payload)

    return [(FrameProtocol, "send", send)]


def writer_never_resumed() -> Changes:
    """A writer that was paused because its peer did not read is never resumed."""
    return [(FramedConnection, "resume_writing", lambda self: None)]


def lost_before_connect() -> Changes:
    """Messages that are sent before the connection is established are lost."""

    def send(self: FramedWorkerConnection, message: bytes) -> None:
        if self._connection is not None:
            self._connection.send_message(message)

    return [(FramedWorkerConnection, "send", send)]


def no_handshake_timeout() -> Changes:
    """A client that connects and never completes the handshake is not disconnected."""
    original = FramedServerConnection._start_timer

    def arm(self: FramedServerConnection, seconds: float, call: Callable[[], None]) -> None:
        if self.is_open:
            original(self, seconds, call)

    return [(FramedServerConnection, "_start_timer", arm)]


# -- inline delivery of tokens to clients ------------------------------------------------------


def delivered_out_of_order() -> Changes:
    """A token that is delivered inline overtakes queued tokens, and its index is not checked."""
    original = Attempt.receive

    def receive(self: Attempt, worker_id: Any, item: Any) -> None:
        if isinstance(item, BatonError):
            original(self, worker_id, item)
            return
        waiting, self._merger.next_index = self._merger.next_index, item.first_index
        try:
            original(self, worker_id, item)
        finally:
            self._merger.next_index = max(waiting, self._merger.next_index)

    return [(Attempt, "receive", receive), _always_delivered_inline()]


def _always_delivered_inline() -> tuple[type, str, Any]:
    """Return a patch that makes the router deliver tokens inline even if earlier tokens are still
    queued."""
    return OutputQueue, "has_waiting_reader", True


def delivered_after_the_end() -> Changes:
    """An attempt that has ended goes on delivering tokens for a while."""
    close = Attempt.close

    def close_later(self: Attempt) -> None:
        asyncio.get_running_loop().call_later(2.0, close, self)

    return [_always_delivered_inline(), (Attempt, "close", close_later)]


def delivered_to_slow_client() -> Changes:
    """A token that was not written, because the client reads too slowly, counts as written."""
    original = InlineStreamWriter.write_output
    return [
        (
            InlineStreamWriter,
            "write_output",
            lambda self, choice, output: original(self, choice, output) or True,
        )
    ]


def written_past_pause() -> Changes:
    """The router keeps writing to a client that reads too slowly."""

    def is_open(self: UvicornBodyWriter) -> bool:
        cycle = self._cycle
        begun = cycle.response_started and not cycle.response_complete
        return bool(begun and not cycle.disconnected and cycle.chunked_encoding)

    return [(UvicornBodyWriter, "is_open", property(is_open))]


def shared_between_adapters() -> Changes:
    """Block keys do not depend on the adapter, so adapters reuse one another's blocks."""
    original = BlockKeyChainFactory.root_key

    def root_key(
        self: BlockKeyChainFactory, salt: bytes, adapter_digest: bytes = b"", **options: Any
    ) -> Any:
        return original(self, salt, **options)

    return [(BlockKeyChainFactory, "root_key", root_key)]


def shared_between_windows() -> Changes:
    """Block keys do not depend on the attention window."""
    original = BlockKeyChainFactory.root_key

    def root_key(
        self: BlockKeyChainFactory,
        salt: bytes,
        adapter_digest: bytes = b"",
        attention_window: Any = None,
        **options: Any,
    ) -> Any:
        return original(self, salt, adapter_digest, **options)

    return [(BlockKeyChainFactory, "root_key", root_key)]


def staging_freed_early() -> Changes:
    """The staging space of a read is freed although the read may still write."""

    class FreedEarly(UnfinishedTransfers):
        def add(
            self, transport: Transport, transfers: Sequence[Transfer], on_end: Callable[[], object]
        ) -> None:
            on_end()

    build = BlockReader.__init__

    def freeing_early(self: BlockReader, *arguments: Any) -> None:
        build(self, *arguments)
        self._unfinished = FreedEarly()

    return [(BlockReader, "__init__", freeing_early)]


def paired_variants() -> Changes:
    """Workers with different weights are placed together."""
    ready_workers = ModelWorkers.ready_workers
    return [
        (WorkerDirectory, "workers_outside", lambda self, variant: frozenset()),
        (ModelWorkers, "ready_workers", lambda self, can, _="": ready_workers(self, can)),
    ]


def split_single_token() -> Changes:
    """Two workers are placed for an answer of one token."""
    return [(PolicyQuery, "needs_decode", property(lambda self: True))]


def unstable_ring() -> Changes:
    """The conductor looks up each request at a place of its own on the ring, and doesn't remember
    which worker has its prefix."""

    def own_key(snapshot: Snapshot, query: PolicyQuery) -> bytes:
        return query.request_id.encode()

    return [
        (candidates, "ring_key", own_key),
        (CacheIndex, "num_device_blocks", lambda self, worker, keys: 0),
        (CacheIndex, "workers_with_prefix", lambda self, keys, count: []),
    ]


def other_ring() -> Changes:
    """Without a conductor, the router looks up each request at a place of its own on the ring."""
    return [(RingPlacer, "_ring_key", lambda self, query: query.request_id.encode())]


BUGS: dict[str, Callable[[], Changes]] = {
    bug.__name__: bug
    for bug in (
        leaked_reservation,
        ignored_epoch,
        lost_token,
        repeated_token,
        unverified_checksum,
        torn_frame,
        frame_after_close,
        unclosed_connection,
        unanswered_ping,
        no_silence_timeout,
        dropped_under_backpressure,
        writer_never_resumed,
        lost_before_connect,
        no_handshake_timeout,
        delivered_out_of_order,
        delivered_after_the_end,
        delivered_to_slow_client,
        written_past_pause,
        shared_between_adapters,
        shared_between_windows,
        staging_freed_early,
        paired_variants,
        split_single_token,
        unstable_ring,
        other_ring,
    )
}


@contextmanager
def planted(bug: Callable[[], Changes]) -> Iterator[None]:
    """Patch the bug into the production code."""
    with ExitStack() as changes:
        for owner, attribute, replacement in bug():
            changes.enter_context(patch.object(owner, attribute, replacement))
        yield
