"""A bound on the nesting of JSON from clients: parsers and encoders recurse for each level."""

from typing import Any

from router.limits import MAX_NESTING


def is_nested_deeper(value: Any, limit: int = MAX_NESTING) -> bool:
    """Whether a JSON value is nested deeper than ``limit`` levels. Does not recurse."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(limit):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return False
    return bool(level)
