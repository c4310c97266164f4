"""The folder of this user's sockets on this machine, which other users can't open."""

import contextlib
import os
import secrets
import tempfile
from pathlib import Path

MAX_SOCKET_PATH_BYTES = 100
"""Maximum length of a Unix socket's path. Linux allows 107 bytes, macOS 103."""


def private_folder() -> Path:
    """Return the path of the folder, which may not exist yet."""
    return Path(tempfile.gettempdir()) / f"baton-{os.getuid()}"


def create_private_folder(folder: Path) -> bool:
    """Create ``folder`` for this user alone, unless it exists. Return False if it can't be created,
    belongs to another user, or is open to other users."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError:
        return False
    return status.st_uid == os.getuid() and not status.st_mode & 0o077


def folder_token(folder: Path) -> str:
    """Return a random text that is the same for all processes that see this folder. It is kept in a
    file in it. Raises OSError."""
    path = folder / "token"
    if not path.exists():
        new = folder / f"token-{secrets.token_hex(8)}"
        new.write_text(secrets.token_hex(16), encoding="ascii")
        try:
            with contextlib.suppress(FileExistsError):  # another process was faster
                os.link(new, path)
        finally:
            new.unlink()
    return path.read_text(encoding="ascii")
