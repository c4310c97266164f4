"""JSON files on disk, written atomically."""

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a value atomically: a reader sees either the old value or the new one."""
    new = path.with_suffix(".new")
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(file, "w", encoding="utf-8") as text:
        json.dump(value, text)
    new.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object. Return None if the file can't be read, or if its contents are not a JSON
    object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def size_bytes(path: Path) -> int:
    """Return a file's size; 0 if it does not exist."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def make_folder(path: Path) -> Path:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path
