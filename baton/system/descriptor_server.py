"""Passes a file descriptor to other processes of this user, over a Unix socket.

This is the portable twin of opening ``/proc/<pid>/fd/<descriptor>``: the file needs no name, so
nothing has to be removed when its owner is killed, except the socket, which has no content. Such a
socket is removed by the next process that creates one in the same folder.
"""

import contextlib
import os
import secrets
import selectors
import socket
import threading
from pathlib import Path

from baton.errors import Unavailable
from baton.system.peer_user import is_same_user
from baton.system.unix_socket import listen_privately

FETCH_SECONDS = 2.0
"""Time limit for getting a descriptor. It takes a millisecond, unless the peer is frozen."""

SEND_SECONDS = 1.0


class DescriptorServer:
    """Gives ``descriptor``, which must stay open, to each process of this user that connects to the
    socket ``path``, until closed. Raises Unavailable if the socket can't be created in
    ``folder``."""

    def __init__(self, folder: Path, descriptor: int) -> None:
        self._descriptor = descriptor
        self.path = folder / f"memory-{secrets.token_hex(8)}.sock"
        self._listener = listen_privately(self.path)
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="descriptors", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving. Idempotent."""
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        self._thread.join()
        self._wake.close()
        self.path.unlink(missing_ok=True)

    def _run(self) -> None:
        with self._listener, self._woken, selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while all(key.fileobj is not self._woken for key, _ in selector.select()):
                with contextlib.suppress(OSError):  # the peer has gone
                    self._serve_one()

    def _serve_one(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            connection.settimeout(SEND_SECONDS)
            if is_same_user(connection, os.getuid()):
                socket.send_fds(connection, [b"d"], [self._descriptor])


def fetch_descriptor(path: str) -> int:
    """Get the descriptor that is served at ``path``; the caller closes it. Blocks for up to
    FETCH_SECONDS. Raises Unavailable."""
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(FETCH_SECONDS)
            client.connect(path)
            _, descriptors, _, _ = socket.recv_fds(client, 1, 1)
    except (OSError, ValueError) as error:
        raise Unavailable(f"no descriptor from {path}: {error}") from error
    if len(descriptors) != 1:
        raise Unavailable(f"no descriptor from {path}: the connection was closed")
    os.set_inheritable(descriptors[0], False)
    return descriptors[0]
