"""Bounds the white space that the parsers hold back until they know whether it belongs to
markup."""

MAX_HELD_WHITESPACE = 4096
"""The maximum number of characters of white space that are held back at one place. Models write a
few of them around calls and reasoning, but a client can force any number with ``logit_bias``; and
each token of an answer costs time and memory in proportion to what is held back."""


def strip_held_whitespace(text: str) -> str:
    """Strip the white space at the end of ``text``, but at most its last MAX_HELD_WHITESPACE
    characters: what precedes them is returned as text."""
    return text[: max(len(text.rstrip()), len(text) - MAX_HELD_WHITESPACE)]


def excess_whitespace(text: str) -> int:
    """Return by how many characters the white space at the start of ``text`` exceeds
    MAX_HELD_WHITESPACE, or 0."""
    return max(0, len(text) - len(text.lstrip()) - MAX_HELD_WHITESPACE)
