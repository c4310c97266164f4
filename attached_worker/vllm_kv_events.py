"""vLLM's KV events: what a server says about its prefix cache (``--kv-events-config``).

vLLM 0.28 sends arrays, with the name of the event first, and 0.32 maps; both are understood. Blocks
are left out if Baton has no key for them: those of adapters and of images, of other memory than the
device's, and of groups of layers without full attention.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgpack

from attached_worker.cached_blocks import CachedBlocks
from baton.errors import Corrupt

FIELDS = {
    "BlockStored": (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
        "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}  # fmt: skip
"""The fields of events that are arrays, in their order."""

DEVICE = (None, "GPU")
"""What events call the memory of the device, whatever it is: on CPUs too."""

FULL_ATTENTION = ("full_attention", "mla_attention", "sink_full_attention")

_EMPTY: tuple[object, ...] = (None, [])


class KvEventReader:
    """Applies events to ``cached``."""

    def __init__(self, cached: CachedBlocks, block_tokens: int) -> None:
        self._cached = cached
        self._block_tokens = block_tokens
        self._group: int | None = None
        """The group of layers whose blocks count: the first with full attention."""

    def apply(self, payload: bytes) -> None:
        """Apply the events of one step of the server. Raises Corrupt if they can't be read, or
        contradict what came before."""
        try:
            batch = msgpack.unpackb(payload)
            events = batch["events"] if isinstance(batch, dict) else batch[1]
            for event in events:
                self._apply(*_named(event))
        except (ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
            raise Corrupt(f"a KV event can't be read: {error!r}") from error

    def _apply(self, name: str, fields: Mapping[str, Any]) -> None:
        if name == "AllBlocksCleared":
            self._cached.clear(is_complete=True)
        elif fields.get("medium") not in DEVICE:
            return
        elif name == "BlockRemoved":
            if fields.get("group_idx") in (None, self._group):
                self._cached.remove(_ids(fields["block_hashes"]))
        elif name == "BlockStored" and self._has_keys(fields):
            self._cached.store(
                _ids(fields["block_hashes"]),
                fields["parent_block_hash"],
                fields["token_ids"],
                _salt_name(fields),
            )

    def _has_keys(self, fields: Mapping[str, Any]) -> bool:
        """Whether these are blocks for which Baton has keys."""
        if fields.get("kv_cache_spec_kind") not in (None, *FULL_ATTENTION):
            return False
        group = fields.get("group_idx") or 0
        if self._group is None:
            self._group = group
        is_plain = fields.get("lora_id") is None and fields.get("lora_name") is None
        if group != self._group or not is_plain or fields["block_size"] != self._block_tokens:
            return False
        extra_keys = fields.get("extra_keys") or []
        salt, *others = extra_keys or [None]
        has_salt = fields["parent_block_hash"] is None and _is_salt(salt)
        return (has_salt or salt in _EMPTY) and all(each in _EMPTY for each in others)


def _named(event: Any) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the fields of an event. Unknown events have no fields."""
    if isinstance(event, dict):
        return event["type"], event
    return event[0], dict(zip(FIELDS.get(event[0], ()), event[1:], strict=False))


def _ids(values: Any) -> Sequence[int | bytes]:
    if not all(isinstance(each, int | bytes) for each in values):
        raise TypeError(f"block_hashes has {values!r}")
    return list(values)


def _is_salt(extra: Any) -> bool:
    return isinstance(extra, list) and len(extra) == 1 and isinstance(extra[0], str)


def _salt_name(fields: Mapping[str, Any]) -> str:
    extra_keys = fields.get("extra_keys") or [None]
    return str(extra_keys[0][0]) if extra_keys[0] else ""
