"""Field ownership: server-side apply, and how other writes change the owners of fields.

As in Kubernetes, an apply conflicts if it would change a field that another manager owns. Any other
write takes over the fields that it changes. A field is removed when its last owner no longer
applies it.
"""

from dataclasses import dataclass, replace

from tests.kube.failures import Refused
from tests.kube.fields import (
    Path,
    as_fields_v1,
    fields_of,
    format_path,
    from_fields_v1,
    merge_fields,
    remove_field,
    value_at,
)
from tests.kube.kinds import Object
from tests.kube.schemas import Schema
from tests.kube.store import deep_copy

APPLY, UPDATE = "Apply", "Update"


@dataclass(frozen=True, slots=True)
class Manager:
    name: str
    operation: str
    subresource: str
    api_version: str
    time: str
    fields: frozenset[Path]

    @property
    def key(self) -> tuple[str, str, str]:
        return self.name, self.operation, self.subresource

    def as_json(self) -> Object:
        entry: Object = {
            "manager": self.name,
            "operation": self.operation,
            "apiVersion": self.api_version,
            "time": self.time,
            "fieldsType": "FieldsV1",
            "fieldsV1": as_fields_v1(self.fields),
        }
        return entry | ({"subresource": self.subresource} if self.subresource else {})


@dataclass(frozen=True, slots=True)
class Writer:
    """The client that makes a write. If ``force`` is set, an apply takes over the fields of other
    managers."""

    name: str
    api_version: str
    time: str
    subresource: str = ""
    force: bool = False

    def owning(self, fields: set[Path], operation: str) -> Manager:
        return Manager(
            self.name, operation, self.subresource, self.api_version, self.time, frozenset(fields)
        )


def managers_of(found: Object) -> list[Manager]:
    return [
        Manager(
            entry["manager"], entry["operation"], entry.get("subresource", ""),
            entry["apiVersion"], entry["time"], frozenset(from_fields_v1(entry["fieldsV1"])),
        )
        for entry in found["metadata"].get("managedFields") or []
    ]  # fmt: skip


def apply(live: Object | None, wanted: Object, schema: Schema, writer: Writer) -> Object:
    """Return the object that results when ``writer`` applies ``wanted`` to ``live``, which is None
    if the object does not exist yet. Raises Refused (409) with the conflicting fields and their
    owners."""
    fields = fields_of(wanted, schema)
    mine = writer.owning(fields, APPLY)
    others = [each for each in managers_of(live or _nothing()) if each.key != mine.key]
    before = [each for each in managers_of(live or _nothing()) if each.key == mine.key]
    disputed = _disputes(live or {}, wanted, schema, fields, others)
    if disputed and not writer.force:
        raise _conflict(disputed)
    taken = {path for _, path in disputed}
    others = [replace(each, fields=each.fields - taken) for each in others]
    out: Object = merge_fields(deep_copy(live or {}), deep_copy(wanted), schema)
    given_up = set(before[0].fields - fields) if before else set()
    owned = frozenset().union(*(each.fields for each in others)) | fields
    for path in sorted(given_up, key=len):
        if not any(other[: len(path)] == path for other in owned):
            remove_field(out, path, schema)
    same = before and before[0].fields == mine.fields
    _write(out, [*others, before[0] if same else mine])
    return out


def _nothing() -> Object:
    return {"metadata": {}}


def _disputes(
    live: Object, wanted: Object, schema: Schema, fields: set[Path], others: list[Manager]
) -> list[tuple[Manager, Path]]:
    return [
        (other, path)
        for other in others
        for path in sorted(other.fields & fields, key=repr)
        if path[-1][0] == "f" and value_at(live, path, schema) != value_at(wanted, path, schema)
    ]


def _conflict(disputed: list[tuple[Manager, Path]]) -> Refused:
    causes = [
        {
            "reason": "FieldManagerConflict",
            "message": _owner(manager),
            "field": format_path(path),
        }
        for manager, path in disputed
    ]
    if len(causes) == 1:
        message = f"{causes[0]['message']}: {causes[0]['field']}"
        plural = "conflict"
    else:
        lines = "\n".join(f"- {cause['field']}" for cause in causes)
        message, plural = f"{causes[0]['message']}:\n{lines}", "conflicts"
    text = f"Apply failed with {len(causes)} {plural}: {message}"
    return Refused(409, "Conflict", text, {"causes": causes})


def _owner(manager: Manager) -> str:
    by = f'conflict with "{manager.name}"'
    if manager.subresource:
        by += f' with subresource "{manager.subresource}"'
    return by + (f" using {manager.api_version}" if manager.operation == UPDATE else "")


def record_update(before: Object | None, now: Object, schema: Schema, writer: Writer) -> None:
    """Record in ``now`` that the fields that differ from ``before`` are owned by ``writer`` and by
    no other manager."""
    fields = fields_of(now, schema)
    old = fields_of(before, schema) if before else set()
    changed = {
        path for path in fields
        if path not in old or value_at(before, path, schema) != value_at(now, path, schema)
    }  # fmt: skip
    mine = writer.owning(changed, UPDATE)
    kept = []
    for each in managers_of(before or _nothing()):
        if each.key == mine.key:
            merged = (each.fields & fields) | changed
            mine = each if merged == each.fields else replace(mine, fields=frozenset(merged))
        else:
            kept.append(replace(each, fields=(each.fields & fields) - changed))
    _write(now, [*kept, mine])


def _write(found: Object, managers: list[Manager]) -> None:
    entries = [each.as_json() for each in managers if each.fields]
    found["metadata"].pop("managedFields", None)
    if entries:
        found["metadata"]["managedFields"] = entries
