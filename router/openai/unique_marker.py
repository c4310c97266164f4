"""Marks that are put into a text to find a place again."""

import hashlib
from collections.abc import Iterable


def make_unique_marker(texts: Iterable[str]) -> str:
    """A mark that stands in none of ``texts``: it is made of their digest, which nobody can put
    into them. Its ends are characters of private use, so that templates leave it alone."""
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        digest.update(text.encode(errors="replace"))
    return f"\ue000{digest.hexdigest()}\ue000"
