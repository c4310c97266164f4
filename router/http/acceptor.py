"""Accepts connections, and starts them in turn by the networks that they come from.

The kernel queues connections in the order of their arrival, so one client that opens thousands
would delay everybody else's. Here each iteration of the event loop empties the kernel's queue, and
starts a few connections, one network after the other. A connection whose client has left by then is
closed unread.
"""

import asyncio
import errno
import socket
from collections.abc import Callable

from baton.concurrency.fair_queue import FairQueue
from baton.network.address import source_network
from baton.system.peer_state import peer_has_left
from router.limits import ACCEPTS_PER_ITERATION, STARTS_PER_ITERATION

RETRY_SECONDS = 1.0
"""How long nothing is accepted after the system refused a file descriptor or memory."""

_QUEUE_IS_EMPTY = {errno.EAGAIN, errno.EWOULDBLOCK}
_OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Acceptor:
    """Accepts connections from any number of listeners, and calls ``start`` with each and the
    network that it comes from. At most ``max_waiting()`` wait for their turn; beyond that, the
    network with the most loses its oldest one, and ``on_overflow`` is called."""

    def __init__(
        self,
        start: Callable[[socket.socket, str], None],
        max_waiting: Callable[[], int],
        on_overflow: Callable[[], None],
    ) -> None:
        self._start = start
        self._max_waiting = max_waiting
        self._on_overflow = on_overflow
        self._waiting: FairQueue[socket.socket] = FairQueue()
        """Connections that were accepted and not started, by network."""
        self._next_turn: asyncio.Handle | None = None
        self._listeners: set[socket.socket] = set()

    def listen(self, listener: socket.socket) -> None:
        """Accept connections from now on, including those already queued."""
        listener.setblocking(False)
        self._listeners.add(listener)
        asyncio.get_running_loop().add_reader(listener, self._accept_from, listener)

    def stop(self, listener: socket.socket) -> None:
        """Start all connections in the listener's queue, and close the listener. Connections that
        are left in the queue of a closed socket would be reset, although other routers listen on
        the port."""
        while (accepted := _accept(listener)) is not None:
            self._start_unless_left(*accepted)
        self._close(listener)

    def close(self) -> None:
        """Close all listeners, and the connections that still wait."""
        for listener in list(self._listeners):
            self._close(listener)
        while (waiting := self._waiting.take()) is not None:
            waiting[1].close()

    def _close(self, listener: socket.socket) -> None:
        self._listeners.remove(listener)
        asyncio.get_running_loop().remove_reader(listener)
        listener.close()

    def _accept_from(self, listener: socket.socket) -> None:
        try:
            for _ in range(ACCEPTS_PER_ITERATION):
                accepted = _accept(listener)
                if accepted is None:
                    break
                connection, network = accepted
                self._waiting.add(network, connection)
        except OSError as error:
            if error.errno not in _OUT_OF_RESOURCES:
                raise
            self._pause(listener)
        while len(self._waiting) > self._max_waiting():
            self._waiting.take_from_largest().close()
            self._on_overflow()
        if self._next_turn is None:
            self._start_some()

    def _start_some(self) -> None:
        """Start the connections whose turn it is, and schedule the next ones."""
        self._next_turn, started = None, 0
        for _ in range(ACCEPTS_PER_ITERATION):
            if (waiting := self._waiting.take()) is None:
                return
            network, connection = waiting
            started += self._start_unless_left(connection, network)
            if started == STARTS_PER_ITERATION:
                break
        self._next_turn = asyncio.get_running_loop().call_soon(self._start_some)

    def _start_unless_left(self, connection: socket.socket, network: str) -> bool:
        has_left = peer_has_left(connection)
        if has_left:
            connection.close()
        else:
            self._start(connection, network)
        return not has_left

    def _pause(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        loop.call_later(RETRY_SECONDS, self._resume, listener)

    def _resume(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            self.listen(listener)


def _accept(listener: socket.socket) -> tuple[socket.socket, str] | None:
    """Return the next connection in the listener's queue and the network that it comes from, or
    None if the queue is empty. Raises OSError."""
    while True:
        try:
            connection, address = listener.accept()
        except OSError as error:
            if error.errno in _QUEUE_IS_EMPTY:
                return None
            if error.errno != errno.ECONNABORTED:
                raise
        else:
            return connection, source_network(address[0])
