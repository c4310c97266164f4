"""How deep JSON from outside may be nested: parsers and encoders call themselves for each level."""

from typing import Any

MAX_NESTING = 128
"""Objects and lists in one another. Encoders give up at 254 levels, the parser of bodies at 200;
requests in use have about ten."""


def is_nested_deeper(value: Any, limit: int = MAX_NESTING) -> bool:
    """Whether a JSON value has more than ``limit`` objects and lists in one another. Iterative."""
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
