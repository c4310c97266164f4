"""Sets of the fields of an object, in the form in which ``metadata.managedFields`` records who owns
which fields.

A field is represented by its path, a tuple of steps: ``("f", name)`` leads to a field,
``("k", ((key, value), …))`` to an item of an associative list, and ``("v", value)`` to an item of a
set.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from tests.kube.failures import bad_request
from tests.kube.kinds import Object
from tests.kube.schemas import ANY, Schema

Step = tuple[str, Any]
Path = tuple[Step, ...]

UNOWNED = {
    ("apiVersion",), ("kind",), ("status",),
    *(("metadata", name) for name in (
        "name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp",
        "managedFields", "deletionTimestamp", "deletionGracePeriodSeconds", "selfLink",
    )),
}  # fmt: skip
"""Fields that no client owns."""


def fields_of(found: Object, schema: Schema) -> set[Path]:
    """Return the paths of all fields that ``found`` sets, except those of UNOWNED fields."""
    return {path for path in _paths(found, schema, ()) if not _nobodys(path)}


def _nobodys(path: Path) -> bool:
    names = tuple(value for kind, value in path if kind == "f")
    return names[:1] in UNOWNED or names[:2] in UNOWNED


def _paths(value: Any, schema: Schema, path: Path) -> Iterator[Path]:
    if isinstance(value, dict) and value and not schema.atomic:
        for name, inner in value.items():
            yield from _paths(inner, schema.field(name) or ANY, (*path, ("f", name)))
    elif isinstance(value, list) and value and schema.keys:
        for item in value:
            below = (*path, ("k", schema.key_of(item)))
            yield below
            yield from _paths(item, schema.item, below)
    elif isinstance(value, list) and value and schema.is_set:
        for item in value:
            yield (*path, ("v", item))
    else:
        yield path


def value_at(found: Any, path: Path, schema: Schema) -> Any:
    """Return the value at ``path``, or None."""
    for kind, value in path:
        if found is None:
            return None
        if kind == "f":
            found, schema = found.get(value), schema.field(value) or ANY
        elif kind == "k":
            same = (item for item in found if schema.key_of(item) == value)
            found, schema = next(same, None), schema.item
        else:
            found = value if value in found else None
    return found


def remove_field(found: Object, path: Path, schema: Schema) -> None:
    """Remove the value at ``path``, and its parents if they become empty."""
    kind, value = path[0]
    if kind == "f":
        below = schema.field(value) or ANY
        if len(path) == 1:
            found.pop(value, None)
        elif value in found:
            remove_field(found[value], path[1:], below)
            if not found[value]:
                del found[value]
        return
    items: Any = found
    place = next((n for n, item in enumerate(items) if _step_is(path[0], item, schema)), None)
    if place is None:
        return
    if len(path) == 1:
        del items[place]
    else:
        remove_field(items[place], path[1:], schema.item)


def _step_is(step: Step, item: Any, schema: Schema) -> bool:
    return bool(item == step[1] if step[0] == "v" else schema.key_of(item) == step[1])


def merge_fields(below: Any, above: Any, schema: Schema) -> Any:
    """Merge ``above`` over ``below``: associative lists by their keys, and sets as unions. Raises
    Refused if a list in ``above`` has the same key twice."""
    if isinstance(above, dict) and isinstance(below, dict) and not schema.atomic:
        out = dict(below)
        for name, inner in above.items():
            out[name] = merge_fields(below.get(name), inner, schema.field(name) or ANY)
        return out
    if isinstance(above, list) and schema.keys:
        return _overlaid_items(below or [], above, schema)
    if isinstance(above, list) and schema.is_set:
        return [*(below or []), *(item for item in above if item not in (below or []))]
    if isinstance(above, dict) and not schema.atomic:
        return {n: merge_fields(None, inner, schema.field(n) or ANY) for n, inner in above.items()}
    return above


def _overlaid_items(below: list[Any], above: list[Any], schema: Schema) -> list[Any]:
    keys = [schema.key_of(item) for item in above]
    twice = [key for number, key in enumerate(keys) if key in keys[:number]]
    if twice:
        raise bad_request(f"duplicate entries for key {dict(twice[0])}")
    old = {schema.key_of(item): item for item in below}
    first = [
        merge_fields(old.get(key), item, schema.item) for key, item in zip(keys, above, strict=True)
    ]
    return first + [item for key, item in old.items() if key not in keys]


# -- FieldsV1 --------------------------------------------------------------------------------


def as_fields_v1(paths: Iterable[Path]) -> Object:
    root: Object = {}
    for path in sorted(paths, key=repr):
        place = root
        for step in path:
            place = place.setdefault(_name(step), {})
        if path and path[-1][0] == "k":
            place["."] = {}
    return root


def _name(step: Step) -> str:
    kind, value = step
    if kind == "f":
        return f"f:{value}"
    encoded = dict(value) if kind == "k" else value
    return f"{kind}:{json.dumps(encoded, separators=(',', ':'), sort_keys=True)}"


def from_fields_v1(fields: Object) -> set[Path]:
    return set(_read(fields, ()))


def _read(fields: Object, path: Path) -> Iterator[Path]:
    if not [name for name in fields if name != "."]:
        yield path
        return
    if "." in fields and path and path[-1][0] == "k":
        yield path
    for name, below in fields.items():
        if name != ".":
            yield from _read(below, (*path, _step(name)))


def _step(name: str) -> Step:
    kind, _, text = name.partition(":")
    if kind == "f":
        return "f", text
    value = json.loads(text)
    return kind, tuple(value.items()) if kind == "k" else value


def format_path(path: Path) -> str:
    """Format a path for an error message, like ``.spec.containers[name="x"].image``."""
    out = ""
    for kind, value in path:
        if kind == "f":
            out += f".{value}"
        elif kind == "k":
            out += "[" + ",".join(f"{key}={json.dumps(each)}" for key, each in value) + "]"
        else:
            out += f"[={json.dumps(value)}]"
    return out
