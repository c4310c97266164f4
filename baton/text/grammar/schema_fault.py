"""Finds the part of a JSON schema that can't be enforced."""

import copy
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

DEFINITIONS = ("$defs", "definitions")

_PLAIN_KEY = re.compile(r"[\w$-]+")


def find_fault(
    schema: dict[str, Any], complain: Callable[[Any], str], may_continue: Callable[[], bool]
) -> str:
    """Return the path of the smallest part of ``schema`` that causes its error, such as
    ``properties.city.pattern``; empty if that is the whole schema. ``complain`` returns what is
    wrong with a schema, or an empty text. It is called for variants of the schema, each without
    some of its parts, until ``may_continue`` returns False; the path then ends early."""
    root = copy.deepcopy(schema)
    wrong = complain(root)

    def still_fails() -> bool:
        return may_continue() and complain(root) == wrong

    path, node = "", root
    while isinstance(node, dict | list):
        needed = _needed_parts(node, still_fails)
        # What refers to a definition is needed as well, but the fault is in the definition.
        needed = {part: needed[part] for part in DEFINITIONS if part in needed} or needed
        if len(needed) != 1:
            break
        [(part, node)] = needed.items()
        path += _step(part)
    return path.removeprefix(".")


def _needed_parts(node: Any, still_fails: Callable[[], bool]) -> dict[Any, Any]:
    """Remove the parts of an object or a list without which the schema still fails, and return the
    others by their keys or by their indices in the whole list. Halves are removed first, so that
    few variants are needed; the last parts are removed before the first ones, so that the first of
    several faults remains."""
    full = dict(node) if isinstance(node, dict) else dict(enumerate(node))
    kept = dict.fromkeys(full, True)

    def kept_parts() -> dict[Any, Any]:
        return {part: child for part, child in full.items() if kept[part]}

    def keep(parts: Sequence[Any], value: bool) -> None:
        kept.update(dict.fromkeys(parts, value))
        if isinstance(node, dict):
            node.clear()
            node.update(kept_parts())
        else:
            node[:] = kept_parts().values()

    halves = [list(kept)]
    while halves:
        parts = halves.pop()
        keep(parts, value=False)
        if still_fails():
            continue
        keep(parts, value=True)
        if len(parts) > 1:
            middle = len(parts) // 2
            halves += [parts[:middle], parts[middle:]]
    return kept_parts()


def _step(part: Any) -> str:
    if isinstance(part, int):
        return f"[{part}]"
    return f".{part}" if _PLAIN_KEY.fullmatch(part) else f"[{json.dumps(part)}]"
