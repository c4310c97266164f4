"""Unix sockets on which only processes of this user can connect."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from baton.errors import Unavailable
from baton.system.private_folder import MAX_SOCKET_PATH_BYTES, create_private_folder

BACKLOG = 128


def listen_privately(path: Path) -> socket.socket:
    """Return a non-blocking socket that listens at ``path``, in a folder that is created for this
    user alone. Sockets in it (*.sock) whose owner was killed are removed. Raises Unavailable."""
    folder = path.parent
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise Unavailable(f"the path of {folder} is too long for a socket; set TMPDIR to another")
    if not create_private_folder(folder):
        raise Unavailable(f"{folder} must be a folder that no other user may open")
    listener = socket.socket(socket.AF_UNIX)
    try:
        with _lock(folder):  # between bind and listen, a socket looks like a dead one
            _remove_dead_sockets(folder)
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise Unavailable(f"can't listen at {path}: {error}") from error
    listener.setblocking(False)
    return listener


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_dead_sockets(folder: Path) -> None:
    for path in folder.glob("*.sock"):
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:  # nobody listens (on macOS: or BACKLOG peers wait)
                path.unlink(missing_ok=True)
            except OSError:  # it has gone, its queue is full, or it is no stream socket
                continue
