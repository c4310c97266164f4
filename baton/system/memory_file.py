"""Anonymous memory files: host memory that another process of the host may map.

On Linux they are sealed files of ``memfd_create``. The portable twin is a POSIX shared memory
object whose name is removed at once. The kernel frees both when the last process that has them open
or mapped has exited, for whatever reason.
"""

import errno
import fcntl
import importlib
import mmap
import os
import secrets
import stat
import sys

from baton.system.portability import uses_linux


def create_memory_file(name: str, size_bytes: int) -> int:
    """Create a memory file of ``size_bytes`` zeroes, whose memory is allocated when it is touched.
    Return its file descriptor, which child processes don't inherit. ``name`` is shown by Linux's
    tools. Raises OSError.

    On Linux the file's size is sealed: if it shrank, processes that read its mapping would die of
    SIGBUS. Elsewhere, whoever has the descriptor could shrink it; so only processes of the same
    user may get it."""
    if sys.platform == "linux" and uses_linux():
        file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(file, size_bytes)
        fcntl.fcntl(
            file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )
        return file
    return _create_shared_memory(size_bytes)


def memory_file_problem(file: int, size_bytes: int) -> str:
    """Return why it is not safe to read a mapping of ``file``, which a peer claims to be a memory
    file of ``size_bytes``. Return an empty string if it is safe."""
    if sys.platform == "linux" and uses_linux():
        return _sealed_file_problem(file, size_bytes)
    size = os.fstat(file).st_size
    # macOS rounds the size up to whole pages.
    if not 0 < size_bytes <= size < size_bytes + mmap.PAGESIZE:
        return f"it has {size} bytes, not {size_bytes}"
    return ""


def _sealed_file_problem(file: int, size_bytes: int) -> str:
    if sys.platform != "linux":
        raise AssertionError("only Linux has sealed files")
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        return "it is not a regular file"
    if not 0 < status.st_size == size_bytes:
        return f"it has {status.st_size} bytes, not {size_bytes}"
    if os.fstatvfs(file).f_bsize != mmap.PAGESIZE:
        return "it uses huge pages, which may run out while they are read"
    try:
        seals = fcntl.fcntl(file, fcntl.F_GET_SEALS)
    except OSError:
        return "it is not a memory file"
    return "" if seals & fcntl.F_SEAL_SHRINK else "its size is not sealed: it may shrink"


def _create_shared_memory(size_bytes: int) -> int:
    """Create a POSIX shared memory object without a name. CPython's own module is used, because its
    public one, ``multiprocessing.shared_memory``, keeps the name and starts another process to
    remove it; ``shm_open`` can't be called by ctypes on Apple silicon, since it is variadic."""
    posix_shared_memory = importlib.import_module("_posixshmem")
    name = f"/baton-{secrets.token_hex(8)}"  # macOS allows 31 characters
    file: int = posix_shared_memory.shm_open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode=0o600)
    try:
        posix_shared_memory.shm_unlink(name)
        _check_space(file, size_bytes)
        os.ftruncate(file, size_bytes)
    except BaseException:
        os.close(file)
        raise
    return file


def _check_space(file: int, size_bytes: int) -> None:
    """Raise OSError if the file system of shared memory is too small: a container's often has 64
    MiB, and a process that touches memory beyond that dies of SIGBUS. Where shared memory is no
    file system (macOS), do nothing."""
    try:
        system = os.fstatvfs(file)
    except OSError:
        return
    available = system.f_bavail * system.f_frsize
    if system.f_blocks and size_bytes > available:
        raise OSError(
            errno.ENOSPC,
            f"shared memory has {available:,} free bytes, but {size_bytes:,} are needed",
        )
