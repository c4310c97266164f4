"""Whether the peer of a TCP connection has left."""

import socket
import sys

from baton.system.portability import uses_linux

_ESTABLISHED = 1
"""The state in the first byte of Linux's ``tcp_info``."""


def peer_has_left(connection: socket.socket) -> bool:
    """Whether the peer has closed or reset the connection. A peer that has closed only its sending
    side counts as gone, since nothing tells it from one that has closed both. Does not block.

    On Linux this is also seen behind data that was not read yet. Elsewhere it is seen only once
    that data has been read."""
    if sys.platform == "linux" and uses_linux():
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _ESTABLISHED
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
