"""The three kinds of patches of a client that doesn't apply: merge, JSON, and strategic merge."""

from typing import Any

from tests.kube.failures import Refused, bad_request
from tests.kube.kinds import Object
from tests.kube.schemas import ANY, Schema
from tests.kube.store import copied

ORDER, DELETE_VALUES = "$setElementOrder/", "$deleteFromPrimitiveList/"


def merged(target: Any, patch: Any) -> Any:
    """RFC 7386: None deletes, maps are merged, all else is replaced."""
    if not isinstance(patch, dict):
        return copied(patch)
    out = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            out.pop(name, None)
        else:
            out[name] = merged(out.get(name), value)
    return out


# -- RFC 6902 --------------------------------------------------------------------------------


def json_patched(target: Object, operations: list[Object]) -> Object:
    """Raises Refused: 422 for a ``test`` that fails or a path that there isn't."""
    out: Object = copied(target)
    for operation in operations:
        try:
            _operate(out, operation)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise Refused(422, "Invalid", f"the patch {operation} does not fit: {error}") from error
    return out


def _operate(out: Object, operation: Object) -> None:
    name, path = operation["op"], _steps(operation["path"])
    if name in ("add", "replace"):
        _set(out, path, operation["value"], name == "replace")
    elif name == "remove":
        _take(out, path)
    elif name == "test":
        if _get(out, path) != operation["value"]:
            raise ValueError("its test fails")
    elif name in ("move", "copy"):
        start = _steps(operation["from"])
        _set(out, path, _take(out, start) if name == "move" else _get(out, start), False)
    else:
        raise bad_request(f"there is no JSON patch {name!r}")


def _steps(path: str) -> list[str]:
    return [step.replace("~1", "/").replace("~0", "~") for step in path.split("/")[1:]]


def _get(found: Any, path: list[str]) -> Any:
    for step in path:
        found = found[int(step)] if isinstance(found, list) else found[step]
    return found


def _set(out: Any, path: list[str], value: Any, must_exist: bool) -> None:
    holder, last = _get(out, path[:-1]), path[-1]
    if must_exist:
        _get(holder, [last])
    if not isinstance(holder, list):
        holder[last] = copied(value)
    elif must_exist:
        holder[int(last)] = copied(value)
    else:
        holder.insert(len(holder) if last == "-" else int(last), copied(value))


def _take(out: Any, path: list[str]) -> Any:
    holder, last = _get(out, path[:-1]), path[-1]
    return holder.pop(int(last)) if isinstance(holder, list) else holder.pop(last)


# -- strategic merge -------------------------------------------------------------------------


def strategic(target: Any, patch: Any, schema: Schema) -> Any:
    """As merge, but lists with a merge key are merged by it; ``$patch``, ``$retainKeys``,
    ``$setElementOrder`` and ``$deleteFromPrimitiveList`` as kubectl and Helm 3 write them."""
    if not isinstance(patch, dict):
        return copied(patch)
    if patch.get("$patch") == "replace":
        return {name: copied(value) for name, value in patch.items() if name != "$patch"}
    out = dict(target) if isinstance(target, dict) else {}
    if "$retainKeys" in patch:
        out = {name: value for name, value in out.items() if name in patch["$retainKeys"]}
    for name, value in patch.items():
        if name.startswith(DELETE_VALUES):
            field = name.removeprefix(DELETE_VALUES)
            out[field] = [each for each in out.get(field) or [] if each not in value]
        elif name.startswith("$"):
            continue
        elif value is None:
            out.pop(name, None)
        else:
            out[name] = _field(out.get(name), value, schema.field(name) or ANY)
    for name, order in patch.items():
        if name.startswith(ORDER):
            field = name.removeprefix(ORDER)
            below = schema.field(field) or ANY
            out[field] = _ordered(out.get(field) or [], order, below.merge_key)
    return out


def _field(target: Any, patch: Any, schema: Schema) -> Any:
    if not isinstance(patch, list):
        return strategic(target, patch, schema)
    if schema.merge_key:
        return _list(target or [], patch, schema)
    if schema.merges_values:
        return [*(target or []), *(each for each in patch if each not in (target or []))]
    return copied(patch)


def _list(target: list[Object], patch: list[Object], schema: Schema) -> list[Object]:
    key = schema.merge_key
    if any(item.get("$patch") == "replace" for item in patch):
        return [copied(item) for item in patch if "$patch" not in item]
    gone = {item.get(key) for item in patch if item.get("$patch") == "delete"}
    out = [copied(item) for item in target if item.get(key) not in gone]
    places = {item.get(key): place for place, item in enumerate(out)}
    for item in patch:
        if "$patch" in item:
            continue
        if item.get(key) in places:
            place = places[item.get(key)]
            out[place] = strategic(out[place], item, schema.item)
        else:
            out.append(strategic({}, item, schema.item))
    return out


def _ordered(items: list[Any], order: list[Any], key: str) -> list[Any]:
    """As the patch says; what it doesn't name stays behind."""
    wanted = [each.get(key) if key else each for each in order]

    def place(item: Any) -> int:
        own = item.get(key) if key else item
        return wanted.index(own) if own in wanted else len(wanted)

    return sorted(items, key=place)
