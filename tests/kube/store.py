"""Stores objects with their versions and a history of changes, as etcd does in a real cluster."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from tests.kube.failures import expired, not_found
from tests.kube.kinds import Kind, Object

HISTORY = 4096
"""How many changes are kept for watches. A watch from an older version gets 410 and must list
again."""

T = TypeVar("T")

Key = tuple[Kind, str, str]
"""Kind, namespace (empty for cluster-scoped objects), name."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one object. ``kind_of`` is ADDED, MODIFIED or DELETED; ``before`` is None for an
    added object."""

    version: int
    kind_of: str
    kind: Kind
    now: Object
    before: Object | None


def deep_copy(value: T) -> T:
    """Return a deep copy of a JSON value."""
    return _copied(value)  # type: ignore[no-any-return]


def without_nulls(value: Any) -> Any:
    """Return a JSON value without its nulls, because a null means the same as an absent field."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [without_nulls(inner) for inner in value]
    return value


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_copied(inner) for inner in value]
    return value


def key_of(kind: Kind, found: Object) -> Key:
    return kind, found["metadata"].get("namespace", "") or "", found["metadata"]["name"]


class Store:
    """The object store. Objects are copied when they are stored and when they are returned. It is
    thread-safe; ``locked`` makes several calls atomic. ``version`` is the version of the last
    change."""

    def __init__(self) -> None:
        self.version = 1
        self._objects: dict[Key, Object] = {}
        self._changes: deque[Change] = deque(maxlen=HISTORY)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._listeners: list[Callable[[], None]] = []

    @contextmanager
    def locked(self) -> Iterator[None]:
        with self._lock:
            yield

    def listen(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` after each change, in the thread that made the change. ``listener``
        must not block."""
        self._listeners.append(listener)

    def get(self, kind: Kind, namespace: str, name: str) -> Object:
        """Return an object. Raises Refused (404)."""
        found = self.find(kind, namespace, name)
        if found is None:
            raise not_found(kind, name)
        return found

    def find(self, kind: Kind, namespace: str, name: str) -> Object | None:
        with self._lock:
            found = self._objects.get((kind, namespace, name))
            return deep_copy(found) if found is not None else None

    def all(
        self, kind: Kind, namespace: str = "", where: Callable[[Object], object] = bool
    ) -> list[Object]:
        """Return the objects in ``namespace``, or in all namespaces if it is empty, for which
        ``where`` is true, sorted by namespace and name. ``where`` gets the stored objects, before
        they are copied, and must not change them."""
        with self._lock:
            return [deep_copy(found) for found in self._stored(kind, namespace) if where(found)]

    def all_metadata(self, kind: Kind) -> list[Object]:
        """Return the metadata of all objects of ``kind``, each without the rest of the object, in
        the order of :meth:`all`."""
        with self._lock:
            return [{"metadata": deep_copy(each["metadata"])} for each in self._stored(kind, "")]

    def _stored(self, kind: Kind, namespace: str) -> list[Object]:
        keys = [key for key in self._objects if key[0] == kind and namespace in ("", key[1])]
        return [self._objects[key] for key in sorted(keys, key=lambda key: key[1:])]

    def put(self, kind: Kind, found: Object) -> Object:
        """Store an object as a new version unless it is unchanged; return the stored object."""
        with self._lock:
            key = key_of(kind, found)
            before = self._objects.get(key)
            if before is not None and _same(before, found):
                return deep_copy(before)
            now = deep_copy(found)
            self.version += 1
            now["metadata"]["resourceVersion"] = str(self.version)
            self._objects[key] = now
            self._note(Change(self.version, "MODIFIED" if before else "ADDED", kind, now, before))
            return deep_copy(now)

    def remove(self, kind: Kind, namespace: str, name: str) -> Object:
        """Remove and return an object. Raises Refused (404)."""
        with self._lock:
            self.get(kind, namespace, name)
            gone = deep_copy(self._objects.pop((kind, namespace, name)))
            self.version += 1
            gone["metadata"]["resourceVersion"] = str(self.version)
            self._note(Change(self.version, "DELETED", kind, gone, gone))
            return deep_copy(gone)

    def _note(self, change: Change) -> None:
        self._changes.append(change)
        self._changed.notify_all()
        for listener in self._listeners:
            listener()

    def changes(self, after: int, seconds: float) -> list[Change]:
        """Return all changes after version ``after``. If there are none yet, wait up to ``seconds``
        for the first one. Raises Refused (410) if some of these changes are no longer kept."""
        with self._changed:
            if self.version <= after:
                self._changed.wait(seconds)
            oldest = self._changes[0].version if self._changes else self.version + 1
            if after + 1 < oldest and len(self._changes) == HISTORY:
                raise expired(after)
            found = []
            for change in reversed(self._changes):
                if change.version <= after:
                    break
                found.append(change)
            return found[::-1]


def _same(before: Object, now: Object) -> bool:
    """Return whether two objects are equal apart from the resourceVersion."""
    if {k: v for k, v in before.items() if k != "metadata"} != {
        k: v for k, v in now.items() if k != "metadata"
    }:
        return False
    hidden = "resourceVersion"
    return {k: v for k, v in before["metadata"].items() if k != hidden} == {
        k: v for k, v in now["metadata"].items() if k != hidden
    }
