"""A member as JSON, checked when it comes back: Redis may hold anything."""

from dataclasses import asdict
from typing import Any

import orjson

from baton.core.ids import Generation, WorkerId
from baton.core.member import Load, Member
from baton.core.states import Role, WorkerState
from baton.errors import Invalid

MAX_MEMBER_BYTES = 64 * 1024
_LOADS = tuple(Load.__dataclass_fields__)


def member_to_json(member: Member) -> bytes:
    return orjson.dumps(asdict(member))


def member_from_json(data: bytes) -> Member:
    """Raises Invalid for anything that is not a member."""
    if len(data) > MAX_MEMBER_BYTES:
        raise Invalid(f"a member has at most {MAX_MEMBER_BYTES} bytes, not {len(data)}")
    try:
        raw = orjson.loads(data)
        return Member(
            id=WorkerId(_text(raw, "id")),
            role=Role(raw["role"]),
            generation=Generation(_number(raw, "generation")),
            state=WorkerState(raw["state"]),
            transports=tuple(str(name) for name in raw.get("transports", ())),
            load=Load(**{name: _number(raw["load"], name) for name in _LOADS}),
            address=_text(raw, "address"),
            host=_text(raw, "host"),
            door=_text(raw, "door"),
            model=_text(raw, "model"),
            model_digest=_hex(raw, "model_digest"),
            kv_dtype=_text(raw, "kv_dtype"),
            pid=_number(raw, "pid"),
            block_tokens=_number(raw, "block_tokens"),
            max_model_tokens=_number(raw, "max_model_tokens"),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Invalid(f"not a member: {error}") from error


def _text(raw: Any, key: str) -> str:
    if not isinstance(raw[key], str):
        raise ValueError(f"{key} is {raw[key]!r}, and must be a string")
    return str(raw[key])


def _hex(raw: Any, key: str) -> str:
    bytes.fromhex(_text(raw, key))
    return _text(raw, key)


def _number(raw: Any, key: str) -> int:
    if isinstance(raw[key], bool) or not isinstance(raw[key], int) or raw[key] < 0:
        raise ValueError(f"{key} is {raw[key]!r}, and must be a number from 0")
    return int(raw[key])
