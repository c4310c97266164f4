"""A temporary folder that belongs to one process, and that other processes remove after it was
killed."""

import atexit
import fcntl
import os
import shutil
import tempfile
from pathlib import Path


def make_process_folder(prefix: str, parent: str) -> Path:
    """Create a folder in ``parent`` that only this user can open, and whose name begins with
    ``prefix``. It is removed when this process exits normally. If the process is killed, the next
    call with the same ``prefix`` and ``parent``, in any process of this user, removes it."""
    _remove_left_folders(prefix, parent)
    # The final name appears once the folder is locked, so that no other process takes it for one
    # that a killed process has left.
    unlocked = Path(tempfile.mkdtemp(prefix=f"new-{prefix}", dir=parent))
    folder = unlocked.with_name(unlocked.name.removeprefix("new-"))
    _lock(unlocked)  # until this process and those that it has forked have ended
    unlocked.rename(folder)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _remove_left_folders(prefix: str, parent: str) -> None:
    """Remove the folders of this user that no process has locked."""
    for folder in Path(parent).glob(f"{prefix}*"):
        try:
            if folder.stat().st_uid != os.geteuid():
                continue
            lock = _lock(folder)
        except OSError:  # in use, or removed by another process at the same moment
            continue
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _lock(folder: Path) -> int:
    """Lock a folder until the returned descriptor is closed. Raises OSError if it is locked."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
