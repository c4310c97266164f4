"""Serves watches, which are streams of the changes after a version, with bookmarks."""

from collections.abc import Callable, Iterator

from tests.kube.api import Api, is_selected
from tests.kube.failures import Refused
from tests.kube.kinds import Object
from tests.kube.request import Request
from tests.kube.store import Change

LOOK_SECONDS = 1.0
"""How often a waiting watch checks whether the server is closing."""

BOOKMARK_SECONDS = 5.0
MOST_SECONDS = 1800.0
INITIAL_END = "k8s.io/initial-events-end"


def watch(api: Api, request: Request, closed: Callable[[], bool]) -> Iterator[Object]:
    """Yield watch events. The existing objects come first if the request has no resourceVersion,
    has the resourceVersion "0" or sets ``sendInitialEvents``."""
    since = request.query.get("resourceVersion", "")
    began_at = last_bookmark_at = api.clock.monotonic()
    seconds = float(request.query.get("timeoutSeconds") or MOST_SECONDS)
    bookmarks = request.query.get("allowWatchBookmarks") in ("true", "1")
    initial = request.query.get("sendInitialEvents") in ("true", "1")
    if since in ("", "0") or initial:
        with api.store.locked():
            version, found = api.store.version, api.select_objects(request)
        yield from ({"type": "ADDED", "object": each} for each in found)
        if initial:
            yield _bookmark(request, version, {INITIAL_END: "true"})
    else:
        version = int(since)
    while not closed() and api.clock.monotonic() - began_at < seconds:
        try:
            changes = api.store.changes(version, LOOK_SECONDS)
        except Refused as gone:
            yield {"type": "ERROR", "object": gone.as_status()}
            return
        for change in changes:
            version = change.version
            event = _event(request, change)
            if event is not None:
                yield event
        if bookmarks and api.clock.monotonic() - last_bookmark_at > BOOKMARK_SECONDS:
            last_bookmark_at = api.clock.monotonic()
            yield _bookmark(request, version, {})


def _event(request: Request, change: Change) -> Object | None:
    """Return the event for a change, or None if the watch selects neither the old nor the new
    object."""
    if change.kind != request.kind:
        return None
    sees = change.kind_of != "DELETED" and is_selected(request, change.now)
    saw = change.before is not None and is_selected(request, change.before)
    if not (sees or saw):
        return None
    kind_of = "DELETED" if not sees else "MODIFIED" if saw else "ADDED"
    return {"type": kind_of, "object": change.now}


def _bookmark(request: Request, version: int, annotations: dict[str, str]) -> Object:
    metadata: Object = {"resourceVersion": str(version), "creationTimestamp": None}
    if annotations:
        metadata["annotations"] = annotations
    kind = request.kind
    bookmark = {"kind": kind.kind, "apiVersion": kind.api_version, "metadata": metadata}
    return {"type": "BOOKMARK", "object": bookmark}
