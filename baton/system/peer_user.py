"""The user at the other end of a Unix socket."""

import ctypes
import socket
import struct
import sys
from typing import Any

from baton.system.portability import uses_linux

_UCRED = struct.Struct("3i")


def peer_user(connection: socket.socket) -> int | None:
    """Return the user id of the process that is connected. Return None if the system can't tell, so
    that only the permissions of the socket's folder protect it. Raises OSError if the connection
    has ended."""
    if sys.platform == "linux" and uses_linux():
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        return int(_UCRED.unpack(raw)[1])
    # macOS and the BSDs have it; glibc does not.
    getpeereid: Any = getattr(ctypes.CDLL(None, use_errno=True), "getpeereid", None)
    if getpeereid is None:
        return None
    user, group = ctypes.c_uint32(), ctypes.c_uint32()
    if getpeereid(connection.fileno(), ctypes.byref(user), ctypes.byref(group)):
        raise OSError(ctypes.get_errno(), "getpeereid failed")
    return user.value


def is_same_user(connection: socket.socket, user: int) -> bool:
    """Whether the process that is connected may be one of ``user``."""
    try:
        return peer_user(connection) in (user, None)
    except OSError:
        return False
