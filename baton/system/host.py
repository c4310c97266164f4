"""The host that this process runs on: its identity and its memory."""

import platform
from pathlib import Path

from baton.errors import Unavailable
from baton.system.portability import uses_linux
from baton.system.private_folder import create_private_folder, folder_token, private_folder

MEMINFO = Path("/proc/meminfo")


def host_id() -> str:
    """Return an id of the host. It is equal in two processes iff they may map each other's memory.
    On Linux that means the same boot of the same kernel, and the same PID namespace; elsewhere, the
    same private folder, in which the sockets are by which descriptors are passed. Raises
    Unavailable if there is no such folder."""
    if uses_linux():
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    folder = private_folder()
    if not create_private_folder(folder):
        raise Unavailable(
            f"{folder} is needed for this user's sockets, and must be a folder that no other user "
            "may open; remove it, or set TMPDIR to another folder"
        )
    try:
        return f"{platform.node()}/{folder_token(folder)}"
    except OSError as error:
        raise Unavailable(f"the token in {folder} can't be read: {error}") from error


def available_memory_bytes() -> int:
    """Return the memory that can be allocated without swapping."""
    if not uses_linux():
        import psutil

        return int(psutil.virtual_memory().available)
    for line in MEMINFO.read_text(encoding="ascii").splitlines():
        name, _, size = line.partition(":")
        if name == "MemAvailable":
            return int(size.removesuffix("kB")) * 1024
    raise AssertionError(f"{MEMINFO} has no line MemAvailable")
