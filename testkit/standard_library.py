"""The text of Python's standard library, on which the demo model is trained and measured."""

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

HELD_OUT_PERCENT = 3
SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


def texts() -> Iterator[tuple[bool, str]]:
    """Yield (whether it is held out, its text) for each file of Python's standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS & set(relative.parts):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        digest = hashlib.blake2b(str(relative).encode(), digest_size=4).digest()
        yield int.from_bytes(digest) % 100 < HELD_OUT_PERCENT, text
