"""Anonymous memory files (memfd): host memory that another process of the host may map."""

import fcntl
import mmap
import os
import stat

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def create_memory_file(name: str, size_bytes: int) -> int:
    """Create a memory file of ``size_bytes`` zeroes, whose memory is allocated when it is touched.
    Return its file descriptor. The file's size is sealed: if it shrank, processes that read its
    mapping would die of SIGBUS."""
    file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, size_bytes)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
    return file


def memory_file_problem(file: int, size_bytes: int) -> str:
    """Return why it is not safe to read a mapping of ``file``, which a peer claims to be a memory
    file of ``size_bytes``. Return an empty string if it is safe."""
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
