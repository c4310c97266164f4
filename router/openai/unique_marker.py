"""Markers that are put into a text before it is rendered, to find their positions afterwards."""

import hashlib
from collections.abc import Iterable


def make_unique_marker(texts: Iterable[str]) -> str:
    """Return a marker that occurs in none of ``texts``: it contains their digest, which nobody can
    put into them. It begins and ends with a private-use character, so that templates leave it
    alone."""
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        digest.update(text.encode(errors="replace"))
    return f"\ue000{digest.hexdigest()}\ue000"
