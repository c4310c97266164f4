"""Shows whether files have changed, without reading them."""

from pathlib import Path

FileStamps = tuple[int, ...]
"""Modification times and inodes of files, which change when the files change."""


def file_stamps(*paths: str) -> FileStamps:
    """Return the modification time and the inode of each file. Raises OSError."""
    stats = [Path(path).stat() for path in paths]
    return tuple(value for stat in stats for value in (stat.st_mtime_ns, stat.st_ino))
