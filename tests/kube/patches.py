"""Applies JSON merge patches, JSON patches and strategic merge patches."""

from typing import Any

from tests.kube.failures import Refused, bad_request
from tests.kube.kinds import Object
from tests.kube.schemas import ANY, Schema
from tests.kube.store import deep_copy

ORDER, DELETE_VALUES = "$setElementOrder/", "$deleteFromPrimitiveList/"


def apply_merge_patch(target: Any, patch: Any) -> Any:
    """Apply a JSON merge patch (RFC 7386): a None value deletes its key, maps are merged, and all
    other values are replaced."""
    if not isinstance(patch, dict):
        return deep_copy(patch)
    out = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            out.pop(name, None)
        else:
            out[name] = apply_merge_patch(out.get(name), value)
    return out


# -- RFC 6902 --------------------------------------------------------------------------------


def apply_json_patch(target: Object, operations: list[Object]) -> Object:
    """Apply a JSON patch (RFC 6902). Raises Refused (422) if a ``test`` operation fails or a path
    does not exist."""
    out: Object = deep_copy(target)
    for operation in operations:
        try:
            _operate(out, operation)
        except (KeyError, IndexError) as error:
            raise _refusal(operation, f"there is no such path or field ({error})") from error
        except (TypeError, ValueError) as error:
            raise _refusal(operation, str(error)) from error
    return out


def _refusal(operation: Object, why: str) -> Refused:
    return Refused(422, "Invalid", f"can't apply the JSON patch operation {operation}: {why}")


def _operate(out: Object, operation: Object) -> None:
    name, path = operation["op"], _steps(operation["path"])
    if name in ("add", "replace"):
        _set(out, path, operation["value"], name == "replace")
    elif name == "remove":
        _take(out, path)
    elif name == "test":
        if _get(out, path) != operation["value"]:
            raise ValueError("the value at the path is not the tested value")
    elif name in ("move", "copy"):
        start = _steps(operation["from"])
        _set(out, path, _take(out, start) if name == "move" else _get(out, start), False)
    else:
        raise bad_request(f"unknown JSON patch operation {name!r}")


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
        holder[last] = deep_copy(value)
    elif must_exist:
        holder[int(last)] = deep_copy(value)
    else:
        holder.insert(len(holder) if last == "-" else int(last), deep_copy(value))


def _take(out: Any, path: list[str]) -> Any:
    holder, last = _get(out, path[:-1]), path[-1]
    return holder.pop(int(last)) if isinstance(holder, list) else holder.pop(last)


# -- strategic merge -------------------------------------------------------------------------


def apply_strategic_merge_patch(target: Any, patch: Any, schema: Schema) -> Any:
    """Apply a strategic merge patch. It differs from a JSON merge patch in that lists with a merge
    key are merged by that key. Supports ``$patch``, ``$retainKeys``, ``$setElementOrder`` and
    ``$deleteFromPrimitiveList`` in the form that kubectl and Helm 3 write."""
    if not isinstance(patch, dict):
        return deep_copy(patch)
    if patch.get("$patch") == "replace":
        return {name: deep_copy(value) for name, value in patch.items() if name != "$patch"}
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
        return apply_strategic_merge_patch(target, patch, schema)
    if schema.merge_key:
        return _list(target or [], patch, schema)
    if schema.merges_values:
        return [*(target or []), *(each for each in patch if each not in (target or []))]
    return deep_copy(patch)


def _list(target: list[Object], patch: list[Object], schema: Schema) -> list[Object]:
    key = schema.merge_key
    if any(item.get("$patch") == "replace" for item in patch):
        return [deep_copy(item) for item in patch if "$patch" not in item]
    gone = {item.get(key) for item in patch if item.get("$patch") == "delete"}
    out = [deep_copy(item) for item in target if item.get(key) not in gone]
    places = {item.get(key): place for place, item in enumerate(out)}
    for item in patch:
        if "$patch" in item:
            continue
        if item.get(key) in places:
            place = places[item.get(key)]
            out[place] = apply_strategic_merge_patch(out[place], item, schema.item)
        else:
            out.append(apply_strategic_merge_patch({}, item, schema.item))
    return out


def _ordered(items: list[Any], order: list[Any], key: str) -> list[Any]:
    """Sort ``items`` by ``order``, which comes from the patch. Items that are not in ``order`` come
    last."""
    wanted = [each.get(key) if key else each for each in order]

    def place(item: Any) -> int:
        own = item.get(key) if key else item
        return wanted.index(own) if own in wanted else len(wanted)

    return sorted(items, key=place)
