"""Parses Kubernetes' memory quantities."""

import re

UNITS = {
    "": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
}  # fmt: skip


def size(text: str | int) -> int:
    """Return a quantity in bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]*)", str(text))
    assert match, text
    return int(float(match[1]) * UNITS[match[2]])
